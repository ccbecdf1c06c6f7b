"""Trainings on a GPU, and what users put around them: convolutional and recurrent models, long sequences, fp16 with
GradScaler, checkpoints, DDP, the trainers, and some thousand steps beside eager PyTorch.

run("cuda") on a GPU; on the fake device as graph_correct.py, with less to do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import graph_correct
import torch
import transformers as hf
from checks import rows_of
from graph_correct import Batch, Make, checks_of
from ranks import free_port
from torch import Tensor, nn
from torch.nn import functional as F
from train_gpt2 import corpus

from ortmodule import ORTModule, cuda_engine

HERE = Path(__file__).resolve().parent


class Out(NamedTuple):
    loss: Tensor


# --- convolutional and recurrent ----------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> Out:
        return Out(F.cross_entropy(self.body(x), labels))


class Block(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x)), inplace=True))), inplace=True)


class Hourglass(nn.Module):
    """Pooling, a transposed convolution and one that follows interpolation, group norm, a skip by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.first(x))
        b = F.gelu(self.norm(self.mid(F.avg_pool2d(a, 2))))
        return self.last(torch.cat([a, self.up(b)], 1)) + F.interpolate(b[:, :4], scale_factor=2, mode="bilinear")


def pictures(classes: int, side: int = 12, pixels: bool = False) -> Batch:
    def batch(k: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(k)
        return dict(x=torch.randn(3, 3, side, side, generator=g), labels=torch.randint(classes, (3, side, side) if pixels else (3,), generator=g))

    return batch


def resnet(drop: float) -> tuple[nn.Module, Batch]:
    layers = [nn.Conv2d(3, 8, 5, 2, 2), nn.MaxPool2d(3, 2, 1), Block(8), nn.Conv2d(8, 16, 1), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers, nn.Dropout(drop), nn.Linear(16, 7))), pictures(7)


def hourglass(drop: float) -> tuple[nn.Module, Batch]:
    return Classifier(nn.Sequential(Hourglass(), nn.Dropout(drop))), pictures(4, pixels=True)


def convnext(drop: float) -> tuple[nn.Module, Batch]:
    config = hf.ConvNextConfig(num_stages=2, depths=[1, 2], hidden_sizes=[8, 16], patch_size=2, num_labels=7)
    model = hf.ConvNextForImageClassification(config)
    model.classifier = nn.Sequential(nn.Dropout(drop), model.classifier)
    give = pictures(7)

    def batch(k: int) -> dict[str, Tensor]:
        b = give(k)
        return dict(pixel_values=b["x"], labels=b["labels"])

    return model, batch


class Recurrent(nn.Module):
    """A layer of each kind, of two directions and layers, over embedded tokens."""

    def __init__(self, kind: type[nn.RNNBase], drop: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12)
        self.rnn = kind(12, 10, 2, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(20, 31)

    def forward(self, ids: Tensor, labels: Tensor) -> Out:
        y, _ = self.rnn(self.embed(ids))
        return Out(F.cross_entropy(self.head(self.drop(y)).flatten(0, 1), labels.flatten()))


def recurrent(kind: type[nn.RNNBase]) -> Make:
    def make(drop: float) -> tuple[nn.Module, Batch]:
        def batch(k: int) -> dict[str, Tensor]:
            ids = torch.randint(31, (3, 11), generator=torch.Generator().manual_seed(k))
            return dict(ids=ids, labels=ids.roll(-1, 1))

        return Recurrent(kind, drop), batch

    return make


class Encoder(nn.Module):
    """PyTorch's own layers: attention with a mask and padding, both orders of the norm."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, drop, batch_first=True, norm_first=i == 1) for i in range(2))
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor, given: Tensor, labels: Tensor) -> Out:
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf, device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask, src_key_padding_mask=torch.zeros_like(given, dtype=x.dtype).masked_fill(~given, -math.inf))
        return Out(F.cross_entropy(self.head(x).transpose(1, 2), labels))


def encoder(drop: float) -> tuple[nn.Module, Batch]:
    def batch(k: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(k)
        given = torch.arange(9) < torch.tensor([[9], [6], [8]])
        return dict(x=torch.randn(3, 9, 16, generator=g), given=given, labels=torch.randint(7, (3, 9), generator=g))

    return Encoder(drop), batch


def t5(drop: float) -> tuple[nn.Module, Batch]:
    config = hf.T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, vocab_size=101, dropout_rate=drop, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config), lambda k: dict(input_ids=graph_correct.ids(k), labels=graph_correct.ids(k + 50, 7))


MODELS: dict[str, Make] = {
    "residual convolutions": resnet, "hourglass": hourglass, "convnext": convnext, "T5": t5, "TransformerEncoderLayer": encoder,
    "LSTM": recurrent(nn.LSTM), "GRU": recurrent(nn.GRU), "RNN": recurrent(nn.RNN),
}  # fmt: skip


def long_sequence(length: int) -> Make:
    def make(drop: float) -> tuple[nn.Module, Batch]:
        config = hf.LlamaConfig(num_hidden_layers=1, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
                                vocab_size=101, max_position_embeddings=length, attention_dropout=drop)  # fmt: skip
        return hf.LlamaForCausalLM(config), lambda k: dict(input_ids=graph_correct.ids(k, length), labels=graph_correct.ids(k, length))

    return make


def long(length: int, dtype: torch.dtype, device: str) -> str:
    """One step against fp64."""
    got, truth, eager = (graph_correct.train(long_sequence(length), how, dtype, 0.0, device, steps=1) for how in ("cuda", "double", "eager"))
    own, theirs = graph_correct.worst(got, truth), graph_correct.worst(eager, truth)
    return f"{'ok' if own <= max(2 * theirs, graph_correct.LEAST) else 'error'} {own:.2g}, eager {theirs:.2g}"


# --- around a step --------------------------------------------------------------------------------------


def pair_of(make: Make, device: str, drop: float = 0.0, **options: Any) -> tuple[nn.Module, nn.Module, Batch]:
    torch.manual_seed(0)
    (ours, batch), (eager, _) = make(drop), make(drop)
    eager.load_state_dict(ours.state_dict())
    return ORTModule(ours.to(device).train(), strict=True, **options), eager.to(device).train(), batch


def placed(batch: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {n: t.to(device) for n, t in batch.items()}


def gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / (1e-3 + abs(y)) for x, y in zip(a, b, strict=True))


def grad_scaler(device: str, dtype: torch.dtype = torch.float16) -> str:
    """fp16 with GradScaler: the scale goes up and down at the same steps as eager's, losses follow eager's; an overflow
    leaves parameters as they were."""
    ours, eager, batch = pair_of(graph_correct.gpt2, device)
    found: list[tuple[list[float], list[float], bool]] = []
    for model in (ours, eager):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
        scales, losses, kept = [], [], True
        for k in range(10):
            before = [p.detach().clone() for p in model.parameters()]
            with torch.autocast(device, dtype):
                loss = model(**placed(batch(k % 3), device)).loss
            scaler.scale(loss * (1e30 if k == 5 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            losses.append(loss.item())
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            kept &= same == (k == 5)
        found.append((scales, losses, kept))
    (scales, losses, kept), (theirs, expected, _) = found
    if scales != theirs:
        return f"scales {scales}, eager's {theirs}"
    if not kept:
        return "a step was skipped or taken where it should not be"
    off = gap(losses, expected)
    return f"{'ok' if off < 5e-3 else 'error'} scales as eager's, losses within {off:.2g}"


def around(device: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Accumulation, clipping, a frozen layer, a schedule, evaluation in between, a state dict put back halfway."""
    ours, eager, batch = pair_of(graph_correct.bert, device)
    every = []
    for model in (ours, eager):
        inner = model.module if isinstance(model, ORTModule) else model
        inner.bert.encoder.layer[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
        losses, saved = [], {}
        for k in range(12):
            for micro in range(2):
                with torch.autocast(device, dtype):
                    loss = model(**placed(batch(2 * k + micro), device)).loss / 2
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=k % 2 == 0)
            if k == 4:
                saved = {n: t.clone() for n, t in model.state_dict().items()}
            if k == 7:
                model.load_state_dict(saved)
            if k % 4 == 3:
                model.eval()
                with torch.no_grad(), torch.autocast(device, dtype):
                    losses.append(model(**placed(batch(100 + k), device)).loss.item())
                model.train()
        every.append(losses)
    off = gap(*every)
    return f"{'ok' if off < 1e-2 else 'error'} losses within {off:.2g}"


def parts_of_a_model(device: str) -> str:
    """One submodule in the engine, PyTorch around it, its own checkpointing, a hook on a gradient, two backwards."""
    torch.manual_seed(0)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = nn.Linear(6, 16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.utils.checkpoint.checkpoint(torch.tanh, self.first(x), use_reentrant=False)
            return self.last(self.body(h) + self.body(h * 2))

    eager, ours = Whole().to(device), Whole().to(device)
    ours.load_state_dict(eager.state_dict())
    ours.body = ORTModule(ours.body, strict=True)
    x = torch.randn(5, 6).to(device)
    seen: list[list[Tensor]] = []
    for model in (ours, eager):
        norms: list[Tensor] = []
        next(model.parameters()).register_hook(lambda g, norms=norms: norms.append(g.norm()))
        for _ in range(4):
            y = model(x)
            y.square().sum().backward(retain_graph=True)
            y.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append([*norms, *grads])
    off = max(float((a - b).abs().max() / (1e-3 + b.abs().max())) for a, b in zip(*seen, strict=True))
    return f"{'ok' if off < 1e-4 else 'error'} within {off:.2g}"


def generation(device: str) -> str:
    """generate() of the wrapped model has eager's tokens."""
    ours, eager, batch = pair_of(graph_correct.gpt2, device)
    ours(**placed(batch(0), device)).loss.backward()
    prompt = batch(3)["input_ids"][:, :4].to(device)
    texts = []
    for model in (ours, eager):
        model.eval()
        with torch.no_grad():
            texts.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, pad_token_id=0))
    return "ok" if torch.equal(*texts) else f"{texts[0].tolist()}, eager {texts[1].tolist()}"


def two_threads(device: str) -> str:
    """A model in each of two threads, on a stream of its own."""
    import threading

    found: dict[int, str] = {}
    pairs = [graph_correct.pair(device) for _ in range(2)]

    def work(i: int) -> None:
        ours, eager = pairs[i]
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
            for k in range(8):
                x = torch.randint(0, 50, (7 + i,), generator=torch.Generator().manual_seed(k)).to(device)
                for m in (ours, eager):
                    m(x).square().mean().backward()
            if device == "cuda":
                torch.cuda.current_stream().synchronize()
        found[i] = graph_correct.close(ours, eager, 1e-4)

    for m, x in ((m, torch.arange(9).to(device)) for pair in pairs for m in pair):
        m(x).sum().backward()
        m.zero_grad()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return "ok" if set(found.values()) == {"ok"} and len(found) == 2 else str(found)


class Ramp(nn.Module):
    """Makes tensors without naming a device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.arange(x.shape[1]) * 0.1 + torch.tensor([0.5])
        return self.down(torch.tanh(self.up(x + ramp))) * torch.ones(3)


def default_device(device: str) -> str:
    """torch.set_default_device, as scripts begin with."""
    torch.set_default_device(device)
    try:
        torch.manual_seed(0)
        eager = Ramp()
        ours = ORTModule(Ramp(), strict=True)
        ours.load_state_dict(eager.state_dict())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, eager)]
        for k in range(6):
            x = torch.randn(4 + k % 2, 6)
            ys = [m(x) for m in (ours, eager)]
            for y, optimizer in zip(ys, optimizers, strict=True):
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if ys[0].device != ys[1].device:
                return f"a result on {ys[0].device}, eager's on {ys[1].device}"
        off = float((ys[0] - ys[1]).abs().max())
    finally:
        torch.set_default_device(None)
    return f"{'ok' if off < 1e-4 and not ours.report().eager else 'error'} within {off:.2g}; {ours.report().headline()}"


def without_gradients(device: str) -> str:
    """Outputs without a gradient, a module without tensors of its own, one whose forward was on another stream."""
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x)
            return self.a(h), self.b(h) * h.sum()

    class Bare(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x * 2, y)

    torch.manual_seed(0)
    eager = Two().to(device)
    ours = ORTModule(Two().to(device), strict=True)
    ours.load_state_dict(eager.state_dict())
    bare, loss = Bare(), ORTModule(Bare(), strict=True)
    for k in range(8):
        x = torch.randn(7, 6).to(device)
        y = torch.randint(0, 5, (7,)).to(device)
        for m, of in ((ours, loss), (eager, bare)):
            with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" and k > 4 else contextlib.nullcontext():
                if device == "cuda":
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                both = m(x)
                one = of(both[0], y) if k % 3 == 0 else both[k % 2].sum()
            one.backward()
        if k % 3 == 2:
            for m in (ours, eager):
                m.zero_grad()
    off = max(float((a.grad - b.grad).abs().max() / (1e-3 + b.grad.abs().max()))
              for a, b in zip(ours.parameters(), eager.parameters(), strict=True) if b.grad is not None)  # fmt: skip
    return f"{'ok' if off < 1e-4 else 'error'} within {off:.2g}"


def out_of_memory(device: str) -> str:
    """A batch that does not fit raises PyTorch's error, and smaller ones train on afterwards."""
    ours, eager = graph_correct.pair(device)
    good = torch.arange(20).to(device)
    for m in (ours, eager):
        m(good).square().mean().backward()
    try:
        ours(torch.zeros(1 << 31, dtype=torch.int64, device=device)).sum().backward()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        pass
    else:
        return "2^31 rows of 184 numbers fitted?"
    for m in (ours, eager):
        m.zero_grad()
    ours.module.norm.load_state_dict(eager.norm.state_dict())
    for m in (ours, eager):
        m(good).square().mean().backward()
    return graph_correct.close(ours, eager)


# --- DDP, trainers --------------------------------------------------------------------------------------


def ranks(backend: str, n: int, device: str) -> str:
    """DDP of n ranks on one device beside eager's (gloo lets ranks share one, NCCL does not)."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n), "GLOO_SOCKET_IFNAME": "lo",
                            "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
        argv = [sys.executable, str(HERE / "ddp_rank.py"), backend, device, str(int(cuda_engine.stand_in)), folder]
        running = [subprocess.Popen(argv, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(n)]
        said = [p.communicate(timeout=240)[0] for p in running]
        if any(p.returncode for p in running):
            return f"exit {[p.returncode for p in running]}: {' | '.join(s[-600:] for s in said)}"
        found = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(n)]
    wrong = {name: case["error"] for rank in found for name, case in rank.items() if not case["error"] <= case["allowed"]}
    left = {name: case["left"] for rank in found for name, case in rank.items() if case["left"]}
    if left:
        return f"left to PyTorch: {left}"
    bits = [[case["bits"] for case in rank.values()] for rank in found]
    if any(b != bits[0] for b in bits):
        return "ranks have other parameters"
    return f"error: {wrong}" if wrong else "ok " + ", ".join(f"{name} {case['error']:.1g}" for name, case in found[0].items())


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, batch: Batch, n: int) -> None:
        self.rows = [{name: t[0] for name, t in batch(k).items()} for k in range(n)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


def hf_trainer(device: str) -> str:
    """transformers.Trainer in bf16, accumulating, with evaluation: eager's losses."""
    ours, eager, batch = pair_of(graph_correct.gpt2, "cpu")
    rows = Rows(batch, 32)
    every = []
    for model in (ours, eager):
        with tempfile.TemporaryDirectory() as folder:
            args = hf.TrainingArguments(folder, max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True, logging_steps=1,
                                        learning_rate=1e-3, eval_strategy="steps", eval_steps=6, save_steps=6, report_to=[], disable_tqdm=True,
                                        use_cpu=device == "cpu", dataloader_pin_memory=False, seed=3)  # fmt: skip
            trainer = hf.Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
            trainer.train()
            every.append([entry.get("loss", entry.get("eval_loss", 0.0)) for entry in trainer.state.log_history])
    off = gap(*every)
    if ours.report().eager:
        return f"PyTorch has run it: {ours.report()}"
    return f"{'ok' if off < 1e-2 else 'error'} {len(every[0])} losses within {off:.2g}"


def lightning(device: str) -> str:
    """Lightning's Trainer, mixed precision, clipping."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        return "ok (Lightning is not installed: not run)"
    ours, eager, batch = pair_of(graph_correct.bert, "cpu")
    every = []

    class Task(pl.LightningModule):
        def __init__(self, model: nn.Module, losses: list[float]) -> None:
            super().__init__()
            self.model, self.losses = model, losses

        def training_step(self, b: dict[str, Tensor], i: int) -> Tensor:
            loss: Tensor = self.model(**b).loss
            self.losses.append(loss.detach().float())  # type: ignore[arg-type]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    for model in (ours, eager):
        losses: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(max_steps=12, accelerator="gpu" if device == "cuda" else "cpu", devices=1, precision="bf16-mixed", gradient_clip_val=0.5,
                                 logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                 default_root_dir=folder)  # fmt: skip
            trainer.fit(Task(model, losses), torch.utils.data.DataLoader(Rows(batch, 24), batch_size=4))
        every.append([float(x) for x in losses])
    off = gap(*every)
    if ours.report().eager:
        return f"PyTorch has run it: {ours.report()}"
    return f"{'ok' if off < 1e-2 else 'error'} {len(every[0])} losses within {off:.2g}"


# --- a training -----------------------------------------------------------------------------------------


def training(device: str, dtype: torch.dtype, steps: int, drop: float) -> str:
    """A language model of bytes, from the same weights on the same batches: losses of the last tenth on held-out text
    within 2 % of eager's, and no less learnt."""
    small = device != "cuda"
    length, width, b = (16, 32, 2) if small else (256, 384, 24)
    data = corpus(20_000 if small else 4_000_000)
    cut = len(data) * 9 // 10
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=2 if small else 6, n_embd=width, n_head=2 if small else 6, vocab_size=256, n_positions=length, resid_pdrop=drop,
                           embd_pdrop=drop, attn_pdrop=drop, bos_token_id=0, eos_token_id=0)  # fmt: skip
    first = hf.GPT2LMHeadModel(config).state_dict()
    found = []
    for how in ("ours", "eager"):
        model: nn.Module = hf.GPT2LMHeadModel(config)
        model.load_state_dict(first)
        model.to(device).train()
        if how == "ours":
            model = ORTModule(model, strict=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps + 1)
        pick = torch.Generator().manual_seed(5)
        losses = []
        start = time.perf_counter()
        for _ in range(steps):
            at = torch.randint(cut - length, (b,), generator=pick)
            x = torch.stack([data[i:i + length] for i in at]).to(device)
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                loss = model(input_ids=x, labels=x).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        model.eval()
        held = data[cut:cut + (len(data) - cut) // length * length].view(-1, length)[:256]
        with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
            valid = statistics.mean(model(input_ids=x.to(device), labels=x.to(device)).loss.item() for x in held.split(b))
        tail = torch.stack(losses).float()[-max(1, steps // 10):].mean().item()
        found.append((losses[0].item(), tail, valid, took))
    (at, tail, valid, took), (_, their_tail, their_valid, their_took) = found
    apart = max(abs(tail / their_tail - 1), abs(valid / their_valid - 1))
    good = apart < 0.02 and (small or tail < at / 2)
    return (f"{'ok' if good else 'error'} {steps} steps: loss {at:.3f} -> {tail:.4f} (eager {their_tail:.4f}), held out {valid:.4f} ({their_valid:.4f}); "
            f"{took:.1f} s (eager {their_took:.1f})")  # fmt: skip


def checks(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    real = device == "cuda"
    yield from checks_of(MODELS, device, half=3)  # the largest of some hundred errors, each of few roundings
    for length in (1000, 8192) if real else (96,):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{length} tokens, {dtype}", lambda n=length, d=dtype: long(n, d, device)
    yield "fp16 with GradScaler", lambda: grad_scaler(device)
    yield "accumulation, clipping, frozen, restored", lambda: around(device)
    yield "a submodule, checkpoint, hooks", lambda: parts_of_a_model(device)
    yield "generate", lambda: generation(device)
    yield "two threads", lambda: two_threads(device)
    yield "a default device", lambda: default_device(device)
    yield "outputs without a gradient", lambda: without_gradients(device)
    yield "DDP, gloo, two ranks", lambda: ranks("gloo", 2, device)
    if real:
        yield "DDP, NCCL, one rank", lambda: ranks("nccl", 1, device)
        yield "a batch that does not fit", lambda: out_of_memory(device)
    yield "transformers.Trainer", lambda: hf_trainer(device)
    yield "Lightning", lambda: lightning(device)
    for dtype, steps, drop in ((torch.bfloat16, 2000, 0.0), (torch.bfloat16, 1500, 0.1), (torch.float32, 800, 0.0)):
        yield f"training, {dtype}, dropout {drop}", lambda d=dtype, n=steps, p=drop: training(device, d, n if real else 4, p)


def run(device: str, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    return rows_of(checks(device), only)
