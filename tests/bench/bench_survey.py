"""Many models of moderate size, none of which is tuned for: a training step (forward, loss, backward) in ORTModule beside
eager's, interleaved in one process, in fp32 and under autocast to bf16; the ratio of medians. What is below 1 is what to
look at next. Models of packages that are not installed are left out.

    make bench-survey                                     # all, about ten minutes on two cores
    make bench-survey BENCH="plain LSTM --bf16"           # those whose name has one of these words
    make bench-survey BENCH="--seconds 5 --list"
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ROWS: dict[str, Callable[[], Made]] = {}
SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 1000}


def row(name: str, make: Callable[[], nn.Module], *args: Any, **kwargs: Any) -> None:
    ROWS[name] = lambda: (make(), args, kwargs)


def ids(*shape: int, most: int = 1000) -> Tensor:
    return torch.randint(3, most, shape)


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Scored(nn.Module):
    """Logits, and their loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Any, y: Tensor) -> Tensor:
        logits = self.body(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class Copied(nn.Module):
    """What a net makes of its input, beside it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), x)


# --- plain torch -----------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, kind: str, width: int, layers: int, both: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.cells = getattr(nn, kind)(width, width, layers, batch_first=True, bidirectional=both)
        self.out = nn.Linear(2 * width if both else width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(self.embed(x))[0])  # type: ignore[no-any-return]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 128)
        out = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            out.append(self.out(h))
        return torch.stack(out, 1)


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.body = nn.Transformer(256, 4, 2, 2, 1024, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.body(self.embed(x), self.embed(x), tgt_mask=mask))  # type: ignore[no-any-return]


def _block(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = _block(3, 16), _block(16, 32), _block(32, 64), _block(96, 32), _block(48, 16)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = F.interpolate(self.c(F.max_pool2d(b, 2)), scale_factor=2, mode="bilinear", align_corners=False)
        d = F.interpolate(self.d(torch.cat([c, b], 1)), scale_factor=2)
        return self.out(self.e(torch.cat([d, a], 1)))  # type: ignore[no-any-return]


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv1d(1, 32, 1), nn.Conv1d(32, 256, 1)
        self.wide = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=2**k) for k in range(8))
        self.back = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for k, (wide, back) in enumerate(zip(self.wide, self.back)):
            a, b = wide(F.pad(h, (2**k, 0))).chunk(2, 1)
            h = h + back(a.tanh() * b.sigmoid())
        return self.out(h).transpose(1, 2)  # type: ignore[no-any-return]


class Clicks(nn.Module):
    """DLRM: tables of categories, products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(5000, 32, mode="sum") for _ in range(8))
        self.low, self.top = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32)), nn.Linear(32 + 36, 2)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, kinds = given
        v = torch.stack([self.low(x), *[t(i) for t, i in zip(self.tables, kinds)]], 1)
        at = torch.tril_indices(9, 9, -1)
        return self.top(torch.cat([v[:, 0], (v @ v.transpose(1, 2))[:, at[0], at[1]]], 1))  # type: ignore[no-any-return]


class Field(nn.Module):
    """NeRF: colours and densities along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(63, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, x: Tensor) -> Tensor:
        p = (x[..., None] * 2.0 ** torch.arange(10)).flatten(-2)
        o = self.net(torch.cat([x, p.sin(), p.cos()], -1))
        a = 1 - torch.exp(-0.1 * o[..., 3].relu())
        through = torch.cumprod(torch.cat([torch.ones_like(a[:, :1]), 1 - a + 1e-10], 1), 1)[:, :-1]
        return ((a * through)[..., None] * o[..., :3].sigmoid()).sum(1).square().mean()


class Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 128), nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return x.square().mean()


class Experts(nn.Module):
    """All experts for all rows, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(128, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        w, i = self.gate(x).softmax(-1).topk(2, -1)
        return torch.stack([(w * (i == k)).sum(-1, keepdim=True) * e(x) for k, e in enumerate(self.experts)]).sum(0)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.net(x), dim=-1)
        return (2 * z @ z.t()).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(40, 128, 5, 2, 2), nn.GELU(), nn.Conv1d(128, 128, 5, 2, 2), nn.GELU())
        self.cells, self.out = nn.GRU(128, 128, batch_first=True, bidirectional=True), nn.Linear(256, 30)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.out(self.cells(self.convs(x).transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(h, y, torch.full((len(x),), len(h)), torch.full((len(x),), y.shape[1]))


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 256, 1))
        self.out = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x).amax(2))  # type: ignore[no-any-return]


def plain() -> None:
    tokens = ids(16, 64)
    for kind in ("LSTM", "GRU", "RNN"):
        row(f"plain {kind}", lambda kind=kind: Scored(Words(kind, 256, 2)), tokens, tokens)
    row("plain LSTM, both ways", lambda: Scored(Words("LSTM", 128, 1, True)), tokens, tokens)
    row("plain LSTMCell, 20 steps", lambda: Copied(Steps()), torch.randn(32, 20, 64))
    row("plain nn.Transformer", lambda: Scored(Translation()), tokens[:8], tokens[:8])
    row("plain autoencoder", lambda: Copied(nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1))), torch.randn(8, 3, 64, 64))  # fmt: skip
    row("plain U-Net", lambda: Copied(UNet()), torch.randn(2, 3, 96, 96))
    row("plain discriminator", lambda: Scored(nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.InstanceNorm2d(64, affine=True), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1), nn.GroupNorm(8, 128), nn.SiLU(), nn.Conv2d(128, 2, 8), nn.Flatten())),
        torch.randn(8, 3, 64, 64), torch.randint(0, 2, (8,)))  # fmt: skip
    row("plain volumes", lambda: Scored(nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 10))), torch.randn(2, 1, 24, 24, 24), torch.randint(0, 10, (2,)))  # fmt: skip
    row("plain WaveNet", lambda: Scored(WaveNet()), torch.randn(4, 1, 1000), torch.randint(0, 256, (4, 1000)))
    row("plain DLRM", lambda: Scored(Clicks()), (torch.randn(512, 13), torch.randint(0, 5000, (8, 512, 3))), torch.randint(0, 2, (512,)))
    row("plain NeRF", Field, torch.randn(128, 32, 3))
    row("plain SIREN", Sines, torch.rand(4096, 2))
    row("plain experts", lambda: Copied(Experts()), torch.randn(512, 128))
    row("plain contrast", lambda: Scored(Contrast()), torch.randn(512, 256), torch.randint(0, 512, (512,)))
    row("plain speech, CTC", Speech, torch.randn(8, 40, 400), torch.randint(1, 30, (8, 20)))
    row("plain PointNet", lambda: Scored(Points()), torch.randn(8, 3, 512), torch.randint(0, 10, (8,)))
    row("plain table", lambda: Scored(nn.Sequential(
        nn.Linear(40, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))),
        torch.randn(512, 40), torch.randint(0, 2, (512,)))  # fmt: skip
    row("plain perceptron, batch 64", lambda: Scored(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))), torch.randn(64, 64), torch.randint(0, 64, (64,)))


# --- packages --------------------------------------------------------------------------------------------------


def hugging_face() -> None:
    hf = package("transformers")
    if hf is None:
        return

    def model(name: str, kind: str, options: dict[str, Any], **given: Any) -> None:
        config = getattr(hf, kind.partition("For")[0].removesuffix("Model").removesuffix("LMHead") + "Config")
        row(f"hf {name}", lambda: getattr(hf, kind)(config(**options)), **given)

    x = ids(4, 128)
    text, short = {"input_ids": x, "labels": x}, {"input_ids": x[:2, :32], "labels": x[:2, :32]}
    grouped, small = {**SIZES, "num_key_value_heads": 2}, {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2}
    ends = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
            "vocab_size": 1000, "d_model": 256}
    model("BERT", "BertForMaskedLM", SIZES, **text, attention_mask=torch.ones_like(x))
    model("ELECTRA", "ElectraForMaskedLM", {**SIZES, "embedding_size": 128}, **text)
    model("DeBERTa v2", "DebertaV2ForMaskedLM", {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32}, **text)
    model("ALBERT", "AlbertForMaskedLM", {**SIZES, "embedding_size": 128}, **text)
    model("XLNet", "XLNetLMHeadModel", {"vocab_size": 1000, "d_model": 256, "n_layer": 3, "n_head": 4, "d_inner": 1024}, **text)
    model("Longformer", "LongformerForMaskedLM", {**SIZES, "attention_window": 32, "max_position_embeddings": 514}, **text)
    model("FNet", "FNetForMaskedLM", {k: v for k, v in SIZES.items() if "heads" not in k}, **text)
    model("GPT-2", "GPT2LMHeadModel", {"vocab_size": 1000, "n_embd": 256, "n_layer": 3, "n_head": 4}, **text)
    model("BLOOM", "BloomForCausalLM", {"vocab_size": 1000, "hidden_size": 256, "n_layer": 3, "n_head": 4}, **text)
    model("Llama", "LlamaForCausalLM", grouped, **text)
    model("Qwen 3", "Qwen3ForCausalLM", {**grouped, "head_dim": 64}, **text)
    model("Gemma 2", "Gemma2ForCausalLM", {**grouped, "head_dim": 64}, **text)
    model("Mixtral", "MixtralForCausalLM", {**grouped, "num_local_experts": 4}, **text)
    model("Falcon", "FalconForCausalLM", SIZES, **text)
    model("Mamba", "MambaForCausalLM", small, **short)
    model("RWKV", "RwkvForCausalLM", small, **short)
    model("T5", "T5ForConditionalGeneration", {"vocab_size": 1000, "d_model": 256, "d_ff": 1024, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, **text)
    model("BART", "BartForConditionalGeneration", ends, **text)
    model("Whisper", "WhisperForConditionalGeneration",
          {**ends, "max_source_positions": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
          input_features=torch.randn(2, 80, 400), labels=x[:2, :64])  # fmt: skip
    model("wav2vec 2", "Wav2Vec2ForCTC", {**SIZES, "vocab_size": 32, "conv_dim": (128,) * 7, "mask_time_prob": 0.0, "layerdrop": 0.0},
          input_values=torch.randn(2, 8000), labels=ids(2, 8, most=32))  # fmt: skip
    model("ViT", "ViTForImageClassification", {k: v for k, v in SIZES.items() if k != "vocab_size"}, pixel_values=torch.randn(2, 3, 224, 224), labels=torch.tensor([0, 1]))
    model("SegFormer", "SegformerForSemanticSegmentation", {"num_labels": 10}, pixel_values=torch.randn(2, 3, 128, 128), labels=torch.randint(0, 10, (2, 128, 128)))
    model("PatchTST", "PatchTSTForPrediction", {"num_input_channels": 7, "context_length": 256, "prediction_length": 24, "d_model": 64, "ffn_dim": 128},
          past_values=torch.randn(8, 256, 7), future_values=torch.randn(8, 24, 7))  # fmt: skip


TIMM = {96: ("resnet18", "resnetv2_50", "seresnet18", "mobilenetv3_small_100", "efficientnet_b0", "regnety_002", "convnext_atto", "densenet121", "ghostnet_100",
             "repvgg_a0", "nfnet_l0", "mobilevit_xxs", "edgenext_xx_small", "dla34", "poolformer_s12"),
        224: ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "xcit_nano_12_p16_224", "levit_128s", "eva02_tiny_patch14_224")}  # fmt: skip


def images() -> None:
    timm = package("timm")
    for side, names in TIMM.items() if timm else ():
        for name in names:
            row(f"timm {name}", lambda name=name: Scored(timm.create_model(name, num_classes=100)), torch.randn(4, 3, side, side), torch.randint(0, 100, (4,)))


class Graphs(nn.Module):
    def __init__(self, conv: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.out = conv(64, 64), conv(64, 64), nn.Linear(64, 7)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, edges = given
        return self.out(self.b(self.a(x, edges).relu(), edges).relu())  # type: ignore[no-any-return]


def graphs() -> None:
    nets = package("torch_geometric.nn")
    if nets is None:
        return
    convs: dict[str, Callable[[int, int], nn.Module]] = {
        "GCN": nets.GCNConv, "SAGE": nets.SAGEConv, "GraphConv": nets.GraphConv, "GAT": lambda i, o: nets.GATConv(i, o // 4, 4),
        "GIN": lambda i, o: nets.GINConv(nn.Linear(i, o)), "TransformerConv": lambda i, o: nets.TransformerConv(i, o // 4, 4),
        "EdgeConv": lambda i, o: nets.EdgeConv(nn.Linear(2 * i, o)),
    }  # fmt: skip
    for name, conv in convs.items():
        row(f"pyg {name}", lambda conv=conv: Scored(Graphs(conv)), (torch.randn(2000, 64), torch.randint(0, 2000, (2, 10000))), torch.randint(0, 7, (2000,)))


# --- measuring -------------------------------------------------------------------------------------------------


def compared(eager: nn.Module, ours: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], low: bool, seconds: float) -> tuple[float, float]:
    """Medians of a step of each, in seconds; steps take turns."""
    def step(model: nn.Module) -> float:
        model.zero_grad()
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            out = model(*args, **kwargs)
        (out if isinstance(out, Tensor) else out.loss).backward()
        return time.perf_counter() - start

    for _ in range(3):
        step(eager), step(ours)
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        times[0].append(step(eager))
        times[1].append(step(ours))
    return sorted(times[0])[len(times[0]) // 2], sorted(times[1])[len(times[1]) // 2]


def lines(names: list[str], types: list[bool], seconds: float) -> Iterator[tuple[str, list[float]]]:
    from ortmodule import ORTModule

    for name in names:
        ratios, told = [], ""
        for low in types:
            torch.manual_seed(0)
            try:
                model, args, kwargs = ROWS[name]()
                eager, ours = compared(model.train(), ORTModule(copy.deepcopy(model)), args, kwargs, low, seconds)
            except Exception as error:  # of eager's, too: a type that it has no kernel for
                told += f" {type(error).__name__}: {str(error).partition(chr(10))[0][:70]} | | |"
                continue
            ratios.append(eager / ours)
            mark = "**" if eager < ours else ""
            told += f" {eager * 1e3:.1f} | {ours * 1e3:.1f} | {mark}{eager / ours:.2f}x{mark} |"
        yield f"| {name} |{told}", ratios


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("words", nargs="*", help="models whose name has one of these")
    p.add_argument("--fp32", action="store_true")
    p.add_argument("--bf16", action="store_true", help="under autocast alone")
    p.add_argument("--seconds", type=float, default=2.0, help="for each model and type")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--list", action="store_true", help="only the names")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for family in (plain, hugging_face, images, graphs):
        family()
    names = [n for n in ROWS if not a.words or any(w.lower() in n.lower() for w in a.words)]
    if a.list:
        print("\n".join(names))
        return
    types = [low for low, asked in ((False, a.fp32), (True, a.bf16)) if asked or not (a.fp32 or a.bf16)]
    print("| model |" + "".join(f" eager {t} ms | ORTModule | speed |" for t in (("fp32", "bf16")[low] for low in types)))
    print("|---|" + "---|" * 3 * len(types))
    found: list[float] = []
    for line, ratios in lines(names, types, a.seconds):
        print(line, flush=True)
        found += ratios
    found.sort()
    if found:
        print(f"\n{len(found)} steps, {sum(r < 1 for r in found)} slower than eager; median {found[len(found) // 2]:.2f}x, least {found[0]:.2f}x")


if __name__ == "__main__":
    main()
