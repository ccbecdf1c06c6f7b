"""Attention on tensor cores (attention_mma.cu, attention_mma_grad.cu) on the fake GPU: bf16 and f16, outputs and gradients against fp64 eager, with an error
of at most twice that of eager in the same type; the emulated fragments by themselves (mma_check.cpp)."""

from __future__ import annotations

import functools
import subprocess

import pytest
from cuda.children import child as any_child
from cuda.children import compiled, on_fake

pytestmark = on_fake
child = functools.partial(any_child, OM_DEVICE="cuda-fake")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled("mma_check.cpp", tmp_path_factory.mktemp("mma"))


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_fragments(checker: str, seed: int) -> None:
    """Products of fragments are the plain ones, copies are there after wait and barrier; a missing lane, wait or barrier and bad addresses are
    noticed, and what reaches past its block's shared memory."""
    res = subprocess.run([checker, str(seed)], capture_output=True, text=True, check=False)
    assert res.returncode == 0 and res.stdout.split() == ["15360", "15360", "11520", "68"], (res.stdout, res.stderr)


SETUP = """
import torch, engine
from cuda import fake
from opcheck import rand
INF = float("inf")

def qkv(b, hq, hk, tq, tk, d, dv):
    return [rand(b, hq, tq, d, per_axis=31), rand(b, hk, tk, d, per_axis=31) * 1.1, rand(b, hk, tk, dv, per_axis=31) + 0.25]

def eager(q, k, v, mask, start, end, frozen, scale, causal, offset, window, keep):
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    see = torch.ones(s.shape, dtype=torch.bool)
    if frozen is not None: s = torch.where(frozen, s.detach(), s)
    if causal: see = see & (j <= i + offset)
    if window: see = see & (j > i - window)
    if start is not None: see = see & (j >= start.view(-1, 1, 1, 1))
    if end is not None: see = see & (j < end.view(-1, 1, 1, 1))
    if mask is not None and mask.dtype is torch.bool: see = see & mask
    elif mask is not None:
        s = s + mask.to(s.dtype)
        see = see & (s > -INF)
    some = see.any(-1, keepdim=True)
    p = torch.softmax(torch.where(see, s, torch.where(some, -INF, 0.0).to(s.dtype)), -1) * some
    return (p if keep is None else p * keep.to(p.dtype)) @ v

def kept(shape, p):
    text = f"graph {{ input x: f64[{', '.join(map(str, shape))}]\\n y = dropout(x) {{p={p}}} rng=7\\n output y\\n}}"
    return engine.run(text, [torch.ones(shape, dtype=torch.float64)])[0][0]

def graph(xs, attrs, rng):
    names = [None if x is None else f"x{i}" for i, x in enumerate(xs)]
    lines = [f"input {n}: {engine.NAMES[engine.TORCH.index(x.dtype)]}[{', '.join(map(str, x.shape))}]" for n, x in zip(names, xs) if n]
    return "graph {\\n" + "\\n".join(lines) + f"\\n y, l = attention({', '.join(n or '_' for n in names)}) {{{attrs}}}{rng}\\n output y\\n}}"

def case(shape, dtype, mask=None, start=None, end=None, frozen=None, scale=None, causal=0, offset=0, window=0, drop=0.0, seq_first=0, view=False, compare=True):
    b, hq, hk, tq, tk, d, dv = shape
    q, k, v = [x.to(dtype) for x in qkv(*shape)]
    start, end = [None if x is None else torch.tensor(x) for x in (start, end)]
    keep = kept((b, hq, tq, tk), drop) if drop else None
    dy = rand(*((b, tq, hq, dv) if seq_first else (b, hq, tq, dv)), per_axis=7).to(dtype)
    attrs = f"causal={causal}, causal_offset=[{offset}], window={window}, dropout={drop}, seq_first={seq_first}" + (f", scale={scale}" if scale else "")
    xs = [q, k, v, mask, start, end, frozen]
    given = [x for x in xs if x is not None]
    if view:  # other memory: time before heads, whole rows apart
        given[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:3]]
    ys, gs = engine.run(graph(xs, attrs, " rng=7" if drop else ""), given, [1, 1, 1] + [0] * (len(given) - 3), [dy])
    mine = [*ys, *gs]
    def run(t):
        ins = [x.to(t).requires_grad_() for x in (q, k, v)]
        y = eager(*ins, mask, start, end, frozen, scale, causal, offset, window, keep)
        y = y.transpose(1, 2) if seq_first else y
        return [y.detach(), *torch.autograd.grad(y, ins, dy.to(t))]
    for what, exact, theirs, own in zip(("y", "dq", "dk", "dv"), run(torch.float64), run(dtype), mine, strict=True):
        assert own.dtype == dtype and torch.isfinite(own).all(), (what, shape)
        e, ref = [(x.double() - exact).square().mean().sqrt().item() for x in (own, theirs)]
        unit = torch.finfo(dtype).eps * exact.abs().max().item()
        most, ref_most = [(x.double() - exact).abs().max().item() for x in (own, theirs)]
        # 1e-7: of two f32 sums whose difference is 0, as where a query sees one key; eager's own products are closer on some processors
        assert not compare or e <= 2 * ref + (1 if dtype is torch.float32 else 1e-2) * unit + 1e-7, (what, shape, e, ref)
        assert most <= 4 * ref_most + unit + 1e-6, (what, shape, most, ref_most)
    return mine

def edges(dtype, d):
    "What is seen ends, or begins, at a tile's last or first row, before it or behind it."
    for tk in (63, 64, 65, 79, 127):
        case((1, 1, 1, 64, tk, d, d), dtype, scale=0.05)
    for tq in (31, 33, 63, 65):
        case((1, 1, 1, tq, 64, d, d), dtype, scale=0.05)
    for offset in (13, 14, 15, 16, 61, 62, 63, 64):
        case((1, 1, 1, 64, 131, d, d), dtype, scale=0.05, causal=1, offset=offset)
    for window in (15, 16, 17, 31, 63, 64, 79):
        case((1, 1, 1, 131, 131, d, d), dtype, scale=0.05, window=window)
    for start, end in ((0, 63), (0, 64), (0, 65), (0, 127), (1, 131), (17, 131), (63, 131), (64, 131), (65, 131)):
        case((1, 1, 1, 64, 131, d, d), dtype, scale=0.05, start=[start], end=[end])

def done(want):
    assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
    assert fake.count(fake.FAILURES) == 0, fake.message()
    assert all(fake.ran(k) for k in want), {k: fake.ran(k) for k in want}
    print("done")
BF, HF = torch.bfloat16, torch.float16
MMA = [f"attention_mma{n}{what}_{t}" for n in (64, 128) for what in ("", "_dq", "_dkv") for t in ("bf16", "f16")]
"""

SHAPES = """
for dtype in (BF, HF):
    for shape in [(1, 2, 2, 64, 64, 64, 64), (2, 2, 1, 67, 131, 64, 32), (1, 1, 1, 33, 97, 128, 96), (1, 2, 2, 5, 71, 7, 5), (1, 1, 1, 130, 65, 72, 80)]:
        for causal in (0, 1):
            case(shape, dtype, causal=causal, view=causal, scale=0.31 if shape[5] == 7 else None)
    case((1, 3, 1, 40, 72, 16, 24), dtype, seq_first=1, causal=1, offset=5)
    case((2, 2, 2, 1, 37, 8, 8), dtype)
    # the gradient of y is a part of another's: its rows begin where 16 bytes may, or not
    for lead in (8, 4):
        x = [x.to(dtype) for x in qkv(2, 3, 3, 37, 40, 16, 72)]
        text = graph([*x, None, None, None, None], "causal=1", "")
        t = text.splitlines()[1].split(": ")[1].split("[")[0]
        text = text.replace("output y", f"z = concat(w, y, w) {{axis=3}}\\n output z").replace(" y, l =", f" input w: {t}[2, 3, 37, {lead}]\\n y, l =")
        w, dz = torch.zeros(2, 3, 37, lead, dtype=dtype), rand(2, 3, 37, 72 + 2 * lead).to(dtype)
        _, got = engine.run(text, [*x, w], [1, 1, 1, 0], [dz])
        _, want = engine.run(graph([*x, None, None, None, None], "causal=1", ""), x, [1, 1, 1], [dz[..., lead:-lead].contiguous()])
        assert all((a.double() - b.double()).abs().max() <= 0.01 * b.abs().max() for a, b in zip(got, want, strict=True)), lead
done(MMA)
"""

MASKS = """
g = torch.Generator().manual_seed(3)
for dtype in (BF, HF):
    shape = (3, 2, 1, 71, 131, 16, 8)
    case(shape, dtype, start=[0, 100, 64], end=[131, 131, 67])
    case(shape, dtype, start=[70, 0, 131], end=[71, 0, 131], causal=1)
    for offset, window in [(-3, 0), (60, 0), (0, 4), (70, 65), (-70, 0), (1, 67)]:
        case(shape, dtype, causal=1, offset=offset, window=window)
        if window: case(shape, dtype, window=window)
    mask = torch.rand(3, 1, 71, 131, generator=g) > 0.4
    mask[1, 0, 7] = False  # sees nothing
    case(shape, dtype, mask=mask)
    case(shape, dtype, mask=mask[:1, :, :1], causal=1)
    for kind in (dtype, torch.float32, torch.float64):
        case(shape, dtype, mask=rand(3, 2, 71, 131).to(kind))
        case(shape, dtype, mask=torch.where(mask, 0.0, -INF).to(kind), causal=1, offset=60)
    lowest = torch.where(mask, 0.0, float(torch.finfo(dtype).min)).to(dtype)  # a row of these: the mean of v
    case(shape, dtype, mask=lowest, compare=False)
    case(shape, dtype, frozen=torch.rand(3, 1, 71, 131, generator=g) > 0.6)
done(MMA[:2] + MMA[2:6])
"""

EDGES = """
for d in (8, 72):
    edges(HF, d)
done([k for k in MMA if k.endswith("f16") and "bf16" not in k])
"""

DROPOUT = """
for dtype in (BF, HF):
    # the last: so long beside its heads that dq leaves no bits for dkv
    for shape, p in [((2, 2, 2, 71, 131, 8, 8), 0.1), ((1, 4, 2, 67, 128, 8, 16), 0.5), ((1, 1, 1, 35, 193, 128, 128), 0.25), ((1, 2, 2, 7, 70, 5, 3), 1.0), ((1, 2, 1, 35, 130, 2, 8), 0.3)]:
        for causal in (0, 1):
            case(shape, dtype, drop=p, causal=causal, offset=60)
done(MMA)
"""

ORDERS = """
fake.late(False)
runs = []
for seed in (0, 3, 8, 13):
    fake.seed(seed)
    runs.append(case((1, 2, 1, 67, 131, 64, 64), BF, drop=0.1, causal=1, offset=64) + case((1, 1, 1, 35, 66, 128, 96), HF, drop=0.1, end=[65]))
    runs[-1] += case((1, 1, 1, 64, 131, 8, 8), BF, causal=1, offset=30)  # a warp has done when others have another tile
for other in runs[1:]:
    assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
done(MMA[:1])
"""


@pytest.mark.parametrize("what,seed", [("SHAPES", 4), ("MASKS", 7), ("EDGES", 9), ("DROPOUT", 10)])
def test_against_eager(what: str, seed: int) -> None:
    assert child(SETUP + globals()[what], OM_FAKE_SEED=str(seed)) == "done\n"


def test_same_bits_in_every_order() -> None:
    assert child(SETUP + ORDERS) == "done\n"


def test_older_gpus_take_the_plain_kernels() -> None:
    out = child(SETUP + 'case((1, 2, 1, 35, 66, 8, 8), BF, causal=1, drop=0.1)\nassert not any(map(fake.ran, MMA))\n'
                'done(["attention_bf16", "attention_dq_bf16", "attention_dkv_bf16"])', OM_FAKE_SM="75")
    assert out == "done\n"


def test_what_tensor_cores_do_not_take() -> None:
    """Larger heads are the plain kernels', f32 register tiles' (test_attention_f32.py)."""
    out = child(SETUP + 'case((1, 1, 1, 9, 35, 144, 8), BF)\ncase((1, 1, 1, 9, 35, 8, 8), torch.float32, compare=False)\n'
                'assert not any(map(fake.ran, MMA))\ndone(["attention_bf16", "attention_tiled64_dq_f32"])')
    assert out == "done\n"
