"""The graph engine on a GPU: operators, models and what surrounds them, against eager PyTorch in fp64 and the CPU engine.

run("cuda") on a GPU; on the fake device of tests/cuda (run("cpu") after stand_in()) CPU
tensors stand for cuda:0, so that every line of this file has run before a GPU sees it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from checks import rows_of
from torch import Tensor, nn

from ortmodule import _C, ORTModule, chain, cuda_engine

TESTS = Path(__file__).resolve().parents[1]
Batch = Callable[[int], dict[str, Tensor]]
Make = Callable[[float], tuple[nn.Module, Batch]]
STEPS = 3
SEED = chain.Graph._seed


def stand_in(on: bool = True) -> None:
    """Modules on the CPU run on the (fake) CUDA device."""
    cuda_engine.stand_in = on
    _C.cuda_engine_stand_in(on)


def ids(k: int, n: int = 13) -> Tensor:
    return torch.randint(0, 101, (2, n), generator=torch.Generator().manual_seed(k))


def bert(drop: float) -> tuple[nn.Module, Batch]:
    config = hf.BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=101,
                           max_position_embeddings=16, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop)

    def batch(k: int) -> dict[str, Tensor]:
        mask = torch.ones(2, 13, dtype=torch.int64)
        mask[1, 9 + k % 4:] = 0  # padded
        labels = torch.where(torch.rand(2, 13, generator=torch.Generator().manual_seed(k)) < 0.3, ids(k), -100)
        return dict(input_ids=ids(k), attention_mask=mask, labels=labels)

    return hf.BertForMaskedLM(config), batch


def llama(drop: float) -> tuple[nn.Module, Batch]:
    """Grouped heads; dropout in attention alone."""
    config = hf.LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
                            vocab_size=101, max_position_embeddings=16, attention_dropout=drop)
    return hf.LlamaForCausalLM(config), lambda k: dict(input_ids=ids(k), labels=ids(k))


def vit(drop: float) -> tuple[nn.Module, Batch]:
    config = hf.ViTConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
                          num_labels=7, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop)

    def batch(k: int) -> dict[str, Tensor]:
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(k))
        return dict(pixel_values=images, labels=torch.tensor([k % 7, 5]))

    return hf.ViTForImageClassification(config), batch


def gpt2(drop: float) -> tuple[nn.Module, Batch]:
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=16, resid_pdrop=drop, embd_pdrop=drop,
                           attn_pdrop=drop, bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(config), lambda k: dict(input_ids=ids(k), labels=ids(k))


MODELS: dict[str, Make] = {"bert": bert, "llama": llama, "vit": vit, "gpt2": gpt2}


# --- models -------------------------------------------------------------------------------------------


def train(make: Make, how: str, dtype: torch.dtype, drop: float, device: str, steps: int = STEPS, **options: Any) -> list[Tensor]:
    """how: cuda, cpu (engines), eager, double. Losses and gradients of every step, on the CPU."""
    faked = cuda_engine.stand_in
    if faked:
        stand_in(how == "cuda")
    place = "cpu" if how in ("cpu", "double") else device
    try:
        torch.manual_seed(0)
        model, batch = make(drop)
        model.train().to(place)
        if how == "double":
            model.double()
        run = ORTModule(model, strict=True, **options) if how in ("cuda", "cpu") else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seeds = iter(range(1, steps + 1))  # of both engines, whichever generator theirs is
        chain.Graph._seed = lambda graph: next(seeds) if graph.random else 0  # type: ignore[method-assign]
        found = []
        for k in range(steps):
            given = {n: (t.double() if how == "double" and t.is_floating_point() else t).to(place) for n, t in batch(k).items()}
            with torch.autocast(place, dtype, enabled=dtype != torch.float32 and how != "double"):
                loss = run(**given).loss
            loss.backward()
            found += [loss.detach().cpu().clone()] + [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return found
    finally:
        chain.Graph._seed = SEED  # type: ignore[method-assign]
        if faked:
            stand_in()


def worst(a: list[Tensor], truth: list[Tensor]) -> float:
    return max(((x.double() - t.double()).abs().max() / (1e-3 + t.double().abs().max())).item() for x, t in zip(a, truth, strict=True))


LEAST = 2e-6  # of errors of f32 that are told apart: some dozen roundings


def one_model(make: Make, dtype: torch.dtype, device: str, times: float = 2) -> str:
    """Without dropout within twice (`times`) eager's error of fp64; with dropout, which has the CPU engine's masks, of
    that."""
    got, truth, eager = (train(make, how, dtype, 0.0, device) for how in ("cuda", "double", "eager"))
    own, theirs = worst(got, truth), worst(eager, truth)
    allowed = max(times * theirs, LEAST)
    if not own <= allowed:
        return f"error {own:.3g}, eager's is {theirs:.3g}"
    left = set(_C.cuda_engine_counts()[2])
    got, cpu = train(make, "cuda", dtype, 0.1, device), train(make, "cpu", dtype, 0.1, device)
    apart = worst(got, cpu)
    if not apart <= allowed:
        return f"dropout: {apart:.3g} from the CPU engine, allowed {allowed:.3g}"
    if not apart < worst(got, truth) / 4 and dtype == torch.float32:
        return "dropout changes nothing"
    left |= set(_C.cuda_engine_counts()[2])
    return f"left to the CPU: {left}" if left else f"ok {own:.2g}, eager {theirs:.2g}"


def seeds_of_the_generator(device: str) -> str:
    """Dropout repeats with the device's generator, and goes on where a state was taken."""
    seed = torch.cuda.manual_seed if device == "cuda" else torch.manual_seed
    state, put = (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if device == "cuda" else (torch.get_rng_state, torch.set_rng_state)
    run = ORTModule(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).to(device), strict=True)
    x = torch.ones(4, 8, device=device)

    def masks() -> Tensor:
        return torch.stack([run(x).detach() != 0 for _ in range(2)])

    run(x)
    seed(3)
    first, at = masks(), state()
    further = masks()
    seed(3)
    again = masks()
    put(at)
    if not torch.equal(first, again) or not torch.equal(further, masks()):
        return "other masks from the same seed or state"
    seed(4)
    kinds = [*first, *further, *masks()]
    return "ok" if all(not torch.equal(a, b) for i, a in enumerate(kinds) for b in kinds[:i]) else "a mask occurs twice"


def memory_choices(device: str) -> str:
    """Recomputation has the bits of keeping."""
    plain = train(gpt2, "cuda", torch.float32, 0.1, device)
    for options in (dict(memory_opt_level=1), dict(memory_budget="90%")):
        other = train(gpt2, "cuda", torch.float32, 0.1, device, **options)
        if not all(torch.equal(a, b) for a, b in zip(plain, other, strict=True)):
            return f"{options}: other bits"
    return "ok"


def same_bits_again(device: str) -> str:
    first = train(bert, "cuda", torch.bfloat16, 0.1, device)
    for turn in range(3):
        other = train(bert, "cuda", torch.bfloat16, 0.1, device)
        bad = [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if not torch.equal(a, b)]
        if bad:
            return f"turn {turn}: {len(bad)} of {len(first)} tensors have other bits"
    return "ok"


def graphs_on_and_off(device: str, cases: Sequence[tuple[Make, torch.dtype]] = ((gpt2, torch.bfloat16), (bert, torch.float32))) -> str:
    """Steps that are launched as CUDA graphs have the bits of those that are not, with other dropout at every step."""
    for make, dtype in cases:
        off = train(make, "cuda", dtype, 0.1, device, steps=7, cuda_graphs=False)
        before = _C.cuda_engine_graph_counts()[1]
        on = train(make, "cuda", dtype, 0.1, device, steps=7)
        played = _C.cuda_engine_graph_counts()[1] - before
        bad = [i for i, (a, b) in enumerate(zip(off, on, strict=True)) if not torch.equal(a, b)]
        if bad:
            return f"{make.__name__}: {len(bad)} of {len(on)} tensors have other bits"
        if not played:
            return f"{make.__name__}: no graph was launched: {_C.cuda_engine_graph_counts()}"
    return f"ok, of 14 forwards and backwards {played} as graphs"


def chains_compiled(device: str) -> str:
    """Chains of elementwise operators that NVRTC compiles have the interpreter's bits."""
    follow, library = cuda_engine.follow_settings, "" if cuda_engine.stand_in else cuda_engine.nvrtc()
    before = _C.cuda_engine_program_counts()[0]
    try:
        for make, dtype in ((gpt2, torch.bfloat16), (bert, torch.float32)):
            ways = []
            for when in (0, 2):  # never, always
                cuda_engine.follow_settings = lambda settings, when=when: _C.cuda_engine_programs(when, library, "")
                ways.append(train(make, "cuda", dtype, 0.1, device, steps=4))
            bad = [i for i, (a, b) in enumerate(zip(*ways, strict=True)) if not torch.equal(a, b)]
            if bad:
                return f"{make.__name__}: {len(bad)} of {len(ways[0])} tensors have other bits"
    finally:
        cuda_engine.follow_settings = follow
        _C.cuda_engine_programs(0, "", "")
    made, _, _, why = _C.cuda_engine_program_counts()
    return why or (f"ok, {made - before} chains" if made > before else "no chain was compiled")


# --- what surrounds a step ------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 24), nn.BatchNorm1d(24)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(self.table(x)))))


def pair(device: str, dtype: torch.dtype = torch.float32) -> tuple[ORTModule, nn.Module]:
    torch.manual_seed(0)
    ours, eager = Mlp().to(device), Mlp().to(device)
    eager.load_state_dict(ours.state_dict())
    return ORTModule(ours, strict=True), eager.double()


def close(ours: ORTModule, eager: nn.Module, tol: float = 2e-5) -> str:
    state = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    for name, t in [*ours.module.named_parameters(), *ours.module.named_buffers()]:
        for what, a, b in (("value", t.data, state[name].data), ("gradient", t.grad, state[name].grad)):
            if (a is None) != (b is None):
                return f"{what} of {name}: {a is None}, {b is None}"
            if a is not None and b is not None:
                off = float((a.double() - b.double()).abs().max()) / (1e-3 + float(b.double().abs().max()))
                if not off <= tol:
                    return f"{what} of {name} is off by {off:.3g}"
    return "ok"


def sizes_and_streams(device: str) -> str:
    """Batches of several sizes, on a stream of the user's where there are streams, memory that goes early in between."""
    ours, eager = pair(device)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, eager)]
    stream = torch.cuda.Stream() if device == "cuda" else None
    noise: list[Tensor] = []
    for k in range(12):
        x = torch.randint(0, 50, (3 + k % 5,), generator=torch.Generator().manual_seed(k)).to(device)
        for m, opt in zip((ours, eager), opts, strict=True):
            if stream is not None and k % 2 and m is ours:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    m(x).square().mean().backward()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                m(x).square().mean().backward()
            opt.step()
            if k % 3:
                opt.zero_grad()
            noise = [torch.full((64 + 8 * k, 33), float("nan"), device=device) for _ in range(3)]  # noqa: F841
    return close(ours, eager)


def evaluation(device: str) -> str:
    ours, eager = pair(device)
    x = torch.arange(20).to(device)
    for m in (ours, eager):
        m(x).sum().backward()
        m.zero_grad()
        m.eval()
    with torch.no_grad():
        a, b = ours(x), eager(x)
    off = float((a.double() - b).abs().max())
    return close(ours, eager) if off < 1e-4 else f"off by {off:.3g}"


def bad_index(device: str) -> str:
    """An index out of range is an error by the second step at the latest, and the next good step is right."""
    ours, eager = pair(device)
    good = torch.arange(20).to(device)
    ours(good).sum().backward()
    ours.zero_grad()
    bad = good.clone()
    bad[7] = 50
    try:
        ours(bad).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        ours(good).sum().backward()
    except IndexError as e:
        text = str(e)
    else:
        return "no error"
    if "index 50 at position 7" not in text:
        return f"the message does not name the index: {text}"
    if ours.report().eager:
        return "PyTorch has run it"
    ours, eager = pair(device)
    for m in (ours, eager):
        m(good).sum().backward()
    return close(ours, eager)


def fused_optimizer(device: str) -> str:
    from ortmodule.optim import FusedAdam

    ours, eager = pair(device)
    a = FusedAdam(ours.parameters(), lr=1e-2, eps=1e-8, adam_w_mode=2, weight_decay=0.01)
    b = torch.optim.AdamW(eager.parameters(), lr=1e-2, weight_decay=0.01)
    for k in range(5):
        x = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(k)).to(device)
        for m, opt in ((ours, a), (eager, b)):
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return close(ours, eager, 1e-3)  # where a gradient is nothing but rounding its sign is, too


def no_memory_grows(device: str) -> str:
    """Steps after the first take no more of the device. (mem_get_info: the engine's pool is not torch's.)"""
    ours, _ = pair(device)
    levels = []
    for k in range(40):
        x = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(k)).to(device)
        ours(x).square().mean().backward()
        ours.zero_grad()
        torch.cuda.synchronize()
        levels.append(torch.cuda.mem_get_info()[0])
    grown = levels[10] - levels[-1]
    return "ok" if grown <= 1 << 20 else f"{grown} bytes less are free after 30 more steps"


def no_waiting(device: str) -> str:
    """A step of a model without write-backs waits for nothing: torch's own check sees torch's waits, the clock ours."""
    torch.manual_seed(0)
    model, batch = gpt2(0.1)
    run = ORTModule(model.to(device).train(), strict=True)
    given = {n: t.to(device) for n, t in batch(0).items()}
    import time

    for _ in range(3):
        run(**given).loss.backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    start = time.perf_counter()
    run(**given).loss.backward()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return f"ok {host * 1e3:.1f} ms on the host" if host < 0.5 else f"the host waited {host:.2f} s"


# --- operators --------------------------------------------------------------------------------------------

# What asks for something else: the interpreter's bits; a slice past the end, which a planned step on the CPU does not refuse either; the
# CPU's instruction sets; a gradient of exactly 0 of queries that see one key, where sums of tensor cores leave 1e-7; twice the error of
# torch's on the CPU in bf16, where delta comes from an output that is rounded, as in flash attention (2.2 times).
ATTENTION = "tests/ops/test_attention.py::test_"
ELSEWHERE = [
    "tests/ops/test_gather.py::test_frequent_row_is_accurate", "tests/ops/test_view.py::test_refused_at_run_time", "tests/ops/test_matmul_amx.py",
    *[ATTENTION + name for name in ("without_the_instruction", "without_tiles", "on_emulated_tiles", "shapes[1-3-2-1-1-17-16-24]",
                                    "time_before_heads[1-1-1-1-17-16-24-1]")],
    *[f"{ATTENTION}error_in_bf16[{how}-1-2-2-301-301-24-40-how7]" for how in ("heads first", "time first", "numbers apart")],
]  # fmt: skip

MODULES_ELSEWHERE: list[str] = []


def tests(files: list[str], elsewhere: list[str], more: dict[str, str]) -> Iterator[dict[str, Any]]:
    """As pytest runs them, in this machine's processors where pytest-xdist is."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={out}", *files]
        argv += ["-n", str(min(8, os.cpu_count() or 1))] * (importlib.util.find_spec("xdist") is not None)
        argv += [a for test in elsewhere for a in ("--deselect", test)]
        env = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}:{TESTS / 'optim'}"} | more
        res = subprocess.run(argv, cwd=TESTS.parent, env=env, capture_output=True, text=True, check=False)
        if not out.exists():
            yield {"check": " ".join(files), "ok": False, "detail": (res.stdout + res.stderr)[-1500:]}
            return
        cases = list(ET.parse(out).getroot().iter("testcase"))
    bad = 0
    for case in cases:
        wrong = [e for e in case if e.tag in ("failure", "error")]
        if wrong:
            bad += 1
            yield {"check": f"{case.get('classname')}::{case.get('name')}", "ok": False, "detail": (wrong[0].get("message") or "")[:600]}
    yield {"check": f"tests: {' '.join(files)}", "ok": bool(cases) and not bad, "detail": f"{len(cases)} tests, {bad} failed"}


def operators(device: str, files: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of tests/ops through lowered plans; build/libom.so is the engine (make lib)."""
    return tests(files, ELSEWHERE, {"OM_DEVICE": "cuda" if device == "cuda" else "cuda-fake"})


def modules(device: str, files: list[str]) -> Iterator[dict[str, Any]]:
    """tests/module with what its tests make, and name no device for, on this one."""
    return tests(files, MODULES_ELSEWHERE, {"OM_MODULES_ON": device})


def checks_of(models: dict[str, Make], device: str, half: float = 2) -> Iterator[tuple[str, Callable[[], str]]]:
    """half: how many times eager's error in bf16 (one_model)."""
    for name, make in models.items():
        for dtype, times in ((torch.float32, 2), (torch.bfloat16, half)):
            yield f"{name}, {dtype}", lambda m=make, d=dtype, t=times: one_model(m, d, device, t)


def checks(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    yield from checks_of(MODELS, device)
    yield "memory levels and budgets", lambda: memory_choices(device)
    yield "the same bits again", lambda: same_bits_again(device)
    yield "CUDA graphs on and off", lambda: graphs_on_and_off(device)
    yield "chains compiled and interpreted", lambda: chains_compiled(device)
    yield "several sizes, streams, early memory", lambda: sizes_and_streams(device)
    yield "evaluation", lambda: evaluation(device)
    yield "an index out of range", lambda: bad_index(device)
    yield "FusedAdam behind the engine", lambda: fused_optimizer(device)
    yield "dropout follows the generator", lambda: seeds_of_the_generator(device)
    if device == "cuda":
        yield "memory of forty steps", lambda: no_memory_grows(device)
        yield "a step waits for nothing", lambda: no_waiting(device)


def run(device: str, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    return rows_of(checks(device), only)


def run_modules(device: str) -> list[dict[str, Any]]:
    return list(modules(device, ["tests/module"]))


def run_operators(device: str) -> list[dict[str, Any]]:
    return list(operators(device, ["tests/ops"]))
