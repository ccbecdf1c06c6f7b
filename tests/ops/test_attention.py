"""attention and attention_grad against softmax(q k^T) v written out in eager PyTorch: masks of every form, grouped
heads, dropout, strides."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import engine
from opcheck import check as check_op
from opcheck import rand

FACTOR = 4.0  # the largest error of a small case is chance: test_error compares the mean
LOW = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")

rand = functools.partial(rand, per_axis=31)


def check(*args, **kw) -> None:
    check_op(*args, factor=FACTOR, **kw)


def qkv(b: int, hq: int, hk: int, tq: int, tk: int, d: int, dv: int) -> list[torch.Tensor]:
    return [rand(b, hq, tq, d), rand(b, hk, tk, d) * 1.1, rand(b, hk, tk, dv) + 0.25]


def eager(q, k, v, mask=None, start=None, end=None, *, scale=None, causal=False, offset=0, window=0, keep=None):
    """The definition: every condition as a dense mask, a row without a visible key gives 0."""
    group = q.shape[-3] // max(1, k.shape[-3])
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    see = torch.ones(s.shape, dtype=torch.bool)
    if causal:
        see = see & (j <= i + offset)
    if window:
        see = see & (j > i - window)
    if start is not None:
        see = see & (j >= start.view(-1, 1, 1, 1))
    if end is not None:
        see = see & (j < end.view(-1, 1, 1, 1))
    if mask is not None and mask.dtype is torch.bool:
        see = see & mask
    elif mask is not None:
        s = s + mask.to(s.dtype)
        see = see & (s > -INF)
    some = see.any(-1, keepdim=True)
    p = torch.softmax(torch.where(see, s, torch.where(some, -INF, 0.0).to(s.dtype)), -1) * some
    if keep is not None:
        p = p * keep.to(p.dtype)
    return p @ v


def test_eager_is_torch() -> None:
    """The reference itself, where PyTorch has the same function."""
    q, k, v = qkv(2, 4, 2, 7, 11, 5, 3)
    mask = rand(2, 1, 7, 11)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(eager(q, k, v, mask), sdpa(q, k, v, mask, enable_gqa=True))
    torch.testing.assert_close(eager(q, k, v, causal=True), sdpa(q, k, v, is_causal=True, enable_gqa=True))
    torch.testing.assert_close(eager(q, k, v, mask > 0), sdpa(q, k, v, mask > 0, enable_gqa=True))


@pytest.mark.parametrize("t", [1, 2, 3, 5, 13, 31, 61, 64, 67, 97, 127, 131, 293])
@pytest.mark.parametrize("causal", [0, 1])
def test_lengths(t: int, causal: int) -> None:
    low = (torch.float32,) if t > 1 else ()  # one key: dq is exactly 0 in eager, the rounding of two dot products here
    check("attention", qkv(1, 2, 2, t, t, 7, 5), partial(eager, causal=causal), f"causal={causal}", n_out=2, n_check=1, low=low)


@pytest.mark.parametrize(
    "b,hq,hk,tq,tk,d,dv",
    [
        (2, 3, 3, 5, 7, 11, 13),
        (2, 6, 2, 67, 71, 8, 8),
        (1, 5, 1, 13, 131, 64, 32),
        (3, 2, 1, 1, 17, 16, 24),
        (2, 2, 2, 71, 3, 3, 1),
        (1, 1, 1, 101, 103, 128, 96),
        (2, 4, 4, 65, 64, 16, 16),
    ],
)
@pytest.mark.parametrize("causal", [0, 1])
def test_shapes(b: int, hq: int, hk: int, tq: int, tk: int, d: int, dv: int, causal: int) -> None:
    check(
        "attention",
        qkv(b, hq, hk, tq, tk, d, dv),
        partial(eager, causal=causal, scale=0.31),
        f"causal={causal}, scale=0.31",
        n_out=2,
        n_check=1,
        low=LOW,
    )


def test_ranks() -> None:
    check("attention", [rand(3, 5, 7), rand(3, 11, 7), rand(3, 11, 2)], eager, n_out=2, n_check=1)
    check("attention", [rand(2, 3, 2, 5, 7), rand(2, 3, 2, 11, 7), rand(2, 3, 2, 11, 2)], eager, n_out=2, n_check=1)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("b,hq,hk,tq,tk,d,dv", [(2, 3, 3, 5, 7, 11, 13), (2, 6, 2, 67, 71, 8, 8), (1, 1, 1, 1, 17, 16, 24), (2, 4, 4, 0, 3, 2, 2)])
def test_time_before_heads(b: int, hq: int, hk: int, tq: int, tk: int, d: int, dv: int, causal: int) -> None:
    args, low = qkv(b, hq, hk, tq, tk, d, dv), LOW if tq else ()

    def ref(q, k, v):
        return eager(q, k, v, causal=causal).transpose(1, 2)

    check("attention", args, ref, f"causal={causal}, seq_first=1", n_out=2, n_check=1, low=low)
    mask = rand(b, hq, tq, tk)
    check("attention", [*args, mask], lambda q, k, v, m: eager(q, k, v, m).transpose(1, 2), "seq_first=1", n_out=2, n_check=1)
    check("attention", [x[0] for x in args], lambda q, k, v: eager(q, k, v).transpose(0, 1), "seq_first=1", n_out=2, n_check=1)


@pytest.mark.parametrize("offset,window", [(-3, 0), (5, 0), (0, 1), (0, 4), (2, 3), (70, 65), (-70, 0), (1, 67)])
@pytest.mark.parametrize("causal", [0, 1])
def test_causal_window(offset: int, window: int, causal: int) -> None:
    off = f"causal_offset={offset}, " if offset >= 0 else f"causal_offset=[{offset}], "
    check(
        "attention",
        qkv(2, 2, 1, 131, 137, 5, 7),
        partial(eager, causal=causal, offset=offset, window=window),
        f"causal={causal}, {off}window={window}",
        n_out=2,
        n_check=1,
    )


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "start,end",
    [([0, 0, 0], [131, 67, 1]), ([3, 100, 64], [131, 131, 131]), ([70, 0, 131], [71, 0, 131]), (None, [5, 128, 131]), ([1, 2, 130], None)],
)
def test_kv_range(start: list[int] | None, end: list[int] | None, causal: int) -> None:
    s, e = [None if x is None else torch.tensor(x) for x in (start, end)]
    args = [*qkv(3, 2, 2, 71, 131, 5, 3), None, s, e]
    check("attention", args, partial(eager, causal=causal), f"causal={causal}", n_out=2, n_check=1)


@pytest.mark.parametrize("shape", [(71, 131), (1, 131), (71, 1), (3, 1, 1, 131), (1, 4, 71, 131), (3, 4, 71, 131), (1, 1, 1, 1), (131,), (4, 1, 131)])
@pytest.mark.parametrize("causal", [0, 1])
def test_bool_mask(shape: tuple[int, ...], causal: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    check("attention", [*qkv(3, 4, 2, 71, 131, 5, 3), mask], partial(eager, causal=causal), f"causal={causal}", n_out=2, n_check=1)


@pytest.mark.parametrize(
    "shape", [(71, 131), (1, 131), (71, 1), (3, 1, 1, 131), (1, 4, 71, 131), (3, 4, 71, 131), (1, 4, 1, 131), (1, 1, 1, 1), (131,), (4, 1, 131)]
)
@pytest.mark.parametrize("causal", [0, 1])
def test_float_mask_and_its_gradient(shape: tuple[int, ...], causal: int) -> None:
    args = [*qkv(3, 4, 2, 71, 131, 5, 3), rand(*shape)]
    if shape[-1] > 1:  # else a shift of whole rows: its gradient is 0 but for rounding
        check("attention", args, partial(eager, causal=causal), f"causal={causal}", n_out=2, n_check=1, low=LOW)
    check("attention", args, partial(eager, causal=causal), f"causal={causal}", n_out=2, n_check=1, grad=[True, True, True, False])


def test_mask_of_hidden_tiles() -> None:
    """Lengths as a (b, 1, 1, k) mask and block-diagonal packing: whole tiles vanish."""
    j = torch.arange(197)
    args = qkv(3, 2, 2, 193, 197, 5, 3)
    check("attention", [*args, (j < torch.tensor([197, 64, 3])[:, None]).view(3, 1, 1, 197)], eager, n_out=2, n_check=1)
    packed = (torch.arange(193) // 65)[:, None] == j // 65
    check("attention", [*args, packed], eager, n_out=2, n_check=1)
    check("attention", [*args, torch.where(packed, 0.0, -INF).double()], eager, n_out=2, n_check=1, grad=[True, True, True, False])


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest", "-1e4", "two lowest"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_that_see_nothing(kind: str, dtype: torch.dtype) -> None:
    """bool and -inf: output and gradient 0. Finite values are arithmetic: the mean of v over all keys, and its true
    gradient."""
    q, k, v = [t.to(dtype) for t in qkv(2, 2, 1, 71, 131, 5, 3)]
    see = torch.rand(2, 1, 71, 131, generator=torch.Generator().manual_seed(5)) > 0.3
    see[0, 0, 3], see[1, 0, 64:] = False, False
    value = {"-inf": -INF, "lowest": torch.finfo(dtype).min, "-1e4": -1e4, "two lowest": 2 * torch.finfo(torch.float64).min}.get(kind, 0.0)
    full = torch.where(see, torch.zeros((), dtype=torch.float64), torch.tensor(value, dtype=torch.float64))
    mask = see if kind == "bool" else full.to(dtype)
    hi = see if kind == "bool" else full
    dy = rand(2, 2, 71, 3).to(dtype)
    xs = [t.double().requires_grad_() for t in (q, k, v)]
    # the sum with a score rounds to the lowest number itself: in exact arithmetic all such scores are equal
    if kind == "lowest":
        s = xs[0] @ xs[1].transpose(-1, -2) * 5**-0.5
        some = see.any(-1, keepdim=True)
        want = torch.softmax(torch.where(see, s, torch.where(some, torch.tensor(-INF).double(), s - s.detach())), -1) @ xs[2]
        if dtype is torch.float64:
            want = eager(*xs, hi)
    else:
        want = eager(*xs, hi)
    grads = torch.autograd.grad(want, xs, dy.double())
    name = engine.NAMES[engine.TORCH.index(dtype)]
    text = f"""graph {{
  input q: {name}[2, 2, 71, 5]
  input k: {name}[2, 1, 131, 5]
  input v: {name}[2, 1, 131, 3]
  input m: {"bool" if kind == "bool" else name}[2, 1, 71, 131]
  y, lse = attention(q, k, v, m)
  output y
}}"""
    ys, gs = engine.run(text, [q, k, v, mask], [1, 1, 1, 0], [dy])
    tol = 1e-10 if dtype is torch.float64 else 2e-2 if dtype is torch.bfloat16 else 2e-5 if kind != "-1e4" else 5e-3
    for got, ref in [(ys[0], want), *zip(gs, grads)]:
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), ref.detach(), rtol=tol, atol=tol * ref.abs().max().item())
    if kind in ("bool", "-inf", "two lowest"):
        assert not ys[0][0, :, 3].any() and not gs[0][1, :, 64:].any()


@pytest.mark.parametrize(
    "b,hq,hk,tq,tk,p", [(2, 3, 3, 71, 131, 0.1), (1, 2, 1, 67, 128, 0.5), (2, 2, 2, 5, 3, 0.9), (1, 2, 2, 7, 13, 1.0), (1, 3, 3, 130, 131, 0.25)]
)
@pytest.mark.parametrize("causal", [0, 1])
def test_dropout(b: int, hq: int, hk: int, tq: int, tk: int, p: float, causal: int) -> None:
    """The words are those of a dropout node of the same stream over (b, hq, tq, tk): its mask is replayed in eager."""
    shape = (b, hq, tq, tk)
    text = f"graph {{ input x: f64[{b}, {hq}, {tq}, {tk}]\n y = dropout(x) {{p={p}}} rng=7\n output y\n}}"
    keep = engine.run(text, [torch.ones(shape, dtype=torch.float64)])[0][0]
    assert abs(float((keep > 0).double().mean()) - (1 - p)) < 5 * (p * (1 - p) / keep.numel()) ** 0.5 + 1e-9
    check("attention", qkv(b, hq, hk, tq, tk, 5, 3), partial(eager, causal=causal, keep=keep), f"causal={causal}, dropout={p}", n_out=2, n_check=1)


def test_heads_interleaved() -> None:
    """(b, t, h, d) storage read and written through views, q k v packed in one tensor."""
    text = """graph {{
  input x: {t0}
  a = slice(x) {{axis=2, start=[0], end=[1], step=1}}
  b = slice(x) {{axis=2, start=[1], end=[2], step=1}}
  c = slice(x) {{axis=2, start=[2], end=[3], step=1}}
  a4 = reshape(a) {{shape=[2, 71, 3, 16]}}
  b4 = reshape(b) {{shape=[2, 71, 3, 16]}}
  c4 = reshape(c) {{shape=[2, 71, 3, 16]}}
  q = permute(a4) {{perm=[0, 2, 1, 3]}}
  k = permute(b4) {{perm=[0, 2, 1, 3]}}
  v = permute(c4) {{perm=[0, 2, 1, 3]}}
  o, lse = attention(q, k, v) {{causal=1}}
  y = permute(o) {{perm=[0, 2, 1, 3]}}
  output y
}}"""

    def ref(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(2, 71, 3, 3, 16).permute(2, 0, 3, 1, 4)
        return eager(q, k, v, causal=True).transpose(1, 2)

    check("attention", [rand(2, 71, 3, 48)], ref, graph=text)


@pytest.mark.parametrize("b,h,tq,tk,d", [(0, 2, 3, 5, 7), (2, 0, 3, 5, 7), (2, 2, 0, 5, 7), (2, 2, 3, 0, 7), (2, 2, 3, 5, 0)])
def test_empty(b: int, h: int, tq: int, tk: int, d: int) -> None:
    xs = [torch.randn(b, h, tq, d).double(), torch.randn(b, h, tk, d).double(), torch.randn(b, h, tk, d + 1).double()]
    check("attention", xs, partial(eager, scale=0.5), "scale=0.5", n_out=2, n_check=1, strides=False, low=())


def test_nan_and_inf_come_through() -> None:
    q, k, v = qkv(1, 1, 1, 5, 7, 3, 2)
    text = "graph { input q: f64[1, 1, 5, 3]\n input k: f64[1, 1, 7, 3]\n input v: f64[1, 1, 7, 2]\n y, l = attention(q, k, v)\n output y\n}"
    q[0, 0, 2, 1] = float("nan")
    got = engine.run(text, [q, k, v])[0][0]
    assert torch.equal(torch.isnan(got), torch.isnan(eager(q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_bits_whatever_the_threads(dtype: torch.dtype) -> None:
    name = engine.NAMES[engine.TORCH.index(dtype)]
    text = f"""graph {{
  input q: {name}[2, 4, 293, 16]
  input k: {name}[2, 2, 293, 16]
  input v: {name}[2, 2, 293, 16]
  y, lse = attention(q, k, v) {{causal=1, dropout=0.1}} rng=3
  output y
}}"""
    xs = [t.to(dtype) for t in qkv(2, 4, 2, 293, 293, 16, 16)]
    dy = rand(2, 4, 293, 16).to(dtype)
    runs = [engine.run(engine.Graph.parse(text, engine.Ctx(threads=t)), xs, None, [dy], seed=11) for t in (False, True)]
    for one, two in zip(itertools.chain(*runs[0]), itertools.chain(*runs[1])):
        assert torch.equal(one, two)


@pytest.mark.parametrize("t,d,causal", [(61, 16, 1), (131, 16, 0), (293, 64, 1), (257, 32, 0)])
def test_error(t: int, d: int, causal: int) -> None:
    """Root mean square error of y, dq, dk, dv in fp32 against fp64: at most twice that of the definition in eager
    fp32."""
    xs, dy = [x.float() for x in qkv(2, 3, 3, t, t, d, d)], rand(2, 3, t, d).float()

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        ins = [x.to(dtype).requires_grad_() for x in xs]
        y = eager(*ins, causal=causal)
        return [y.detach(), *torch.autograd.grad(y, ins, dy.to(dtype))]

    text = f"""graph {{
  input q: f32[2, 3, {t}, {d}]
  input k: f32[2, 3, {t}, {d}]
  input v: f32[2, 3, {t}, {d}]
  y, lse = attention(q, k, v) {{causal={causal}}}
  output y
}}"""
    ys, gs = engine.run(text, xs, None, [dy])
    for what, exact, theirs, mine in zip(("y", "dq", "dk", "dv"), run(torch.float64), run(torch.float32), [*ys, *gs]):
        own, ref = [(x.double() - exact).square().mean().sqrt().item() for x in (mine, theirs)]
        assert own <= 2 * ref, f"{what}: {own:.3e}, eager's {ref:.3e}"


BF16_CASES = [  # b, hq, hk, tq, tk, d, dv, what attributes and operands say
    (2, 3, 3, 128, 128, 64, 64, {}),
    (2, 3, 3, 197, 197, 64, 64, {}),
    (1, 2, 2, 293, 293, 64, 64, {"causal": 1}),
    (1, 2, 1, 1031, 1031, 32, 32, {"causal": 1}),
    (2, 6, 2, 67, 131, 16, 48, {}),
    (2, 4, 2, 131, 259, 33, 17, {"causal": 1, "offset": 127}),
    (1, 3, 1, 33, 129, 7, 5, {}),
    (1, 2, 2, 301, 301, 24, 40, {"causal": 1, "window": 37}),
    (3, 2, 2, 71, 387, 64, 64, {"start": [3, 130, 0], "end": [387, 387, 45]}),
    (2, 4, 4, 131, 261, 64, 64, {"mask": "bool"}),
    (2, 4, 2, 131, 261, 64, 64, {"mask": "float"}),
    (2, 3, 3, 128, 128, 64, 64, {"dropout": 0.1}),
    (2, 3, 1, 197, 197, 64, 64, {"dropout": 0.1}),
    (1, 2, 2, 293, 293, 32, 32, {"dropout": 0.5, "causal": 1}),
]


@pytest.mark.parametrize("b,hq,hk,tq,tk,d,dv,how", BF16_CASES)
@pytest.mark.parametrize("layout", ["heads first", "time first", "numbers apart"])
def test_error_in_bf16(b: int, hq: int, hk: int, tq: int, tk: int, d: int, dv: int, how: dict, layout: str) -> None:
    """As test_error, beside torch's own kernels: what an engine that multiplies bf16 rounds on its way is no more than
    what they round."""
    bf16 = torch.bfloat16
    mask = None if "mask" not in how else rand(b, 1, tq, tk) > -0.5 if how["mask"] == "bool" else rand(b, 1, tq, tk).to(bf16)
    start, end = (torch.tensor(how[x]) if x in how else None for x in ("start", "end"))
    place = {"causal": how.get("causal", 0), "offset": how.get("offset", 0), "window": how.get("window", 0)}
    xs, dy = [x.to(bf16) for x in qkv(b, hq, hk, tq, tk, d, dv)], rand(b, hq, tq, dv).to(bf16)
    if layout == "time first":
        xs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
    elif layout == "numbers apart":
        xs = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in xs]
    p, keep = how.get("dropout", 0), None
    if p:
        text = f"graph {{ input x: f64[{b}, {hq}, {tq}, {tk}]\n y = dropout(x) {{p={p}}} rng=7\n output y\n}}"
        keep = engine.run(text, [torch.ones(b, hq, tq, tk, dtype=torch.float64)])[0][0]

    def run(dtype: torch.dtype, torchs: bool) -> list[torch.Tensor]:
        ins = [x.to(dtype).contiguous().requires_grad_() for x in xs]  # torch's kernels are for these
        if torchs:
            zero = torch.zeros(b, 1, tq, tk, dtype=torch.float64)
            see = eager(zero[..., :1], torch.zeros(b, 1, tk, 1).double(), torch.eye(tk).double().expand(b, 1, tk, tk), None, start, end, **place) > 0
            also = see if mask is None else see & mask if mask.dtype is torch.bool else torch.where(see, mask.to(dtype), -INF)
            y = torch.nn.functional.scaled_dot_product_attention(*ins, attn_mask=also, enable_gqa=True)
        else:
            y = eager(*ins, mask, start, end, **place, keep=keep)
        return [y.detach(), *torch.autograd.grad(y, ins, dy.to(dtype))]

    extra = [("m", mask), ("s", start), ("e", end)]
    lines = [f"input {n}: bf16[{', '.join(map(str, x.shape))}]" for n, x in zip("qkv", xs)]
    lines += [f"input {n}: {engine.NAMES[engine.TORCH.index(x.dtype)]}[{', '.join(map(str, x.shape))}]" for n, x in extra if x is not None]
    names = ", ".join(n if x is not None else "_" for n, x in extra)
    attrs = f"causal={place['causal']}, causal_offset={place['offset']}, window={place['window']}, dropout={p}"
    text = "graph {\n" + "\n".join(lines) + f"\n y, lse = attention(q, k, v, {names}) {{{attrs}}} rng=7\n output y\n}}"
    given = [*xs, *(x for _, x in extra if x is not None)]
    ys, gs = engine.run(text, given, [1, 1, 1] + [0] * (len(given) - 3), [dy])
    for what, exact, theirs, mine in zip(("y", "dq", "dk", "dv"), run(torch.float64, False), run(bf16, not p), [*ys, *gs]):
        own, ref = [(x.double() - exact).square().mean().sqrt().item() for x in (mine, theirs)]
        assert own <= 2 * ref, f"{what}: {own:.3e}, torch's {ref:.3e}"


@pytest.mark.parametrize("tk,end", [(131, 67), (197, 1), (64, 33), (300, 129)])
def test_what_lies_behind_the_last_key_is_not_multiplied_in_bf16(tk: int, end: int) -> None:
    """Pairs of keys: beside an odd last one lies a number that nobody may see."""
    xs, dy = [x.to(torch.bfloat16) for x in qkv(1, 2, 2, 37, tk, 16, 16)], rand(1, 2, 37, 16).to(torch.bfloat16)
    text = f"""graph {{
  input q: bf16[1, 2, 37, 16]
  input k: bf16[1, 2, {tk}, 16]
  input v: bf16[1, 2, {tk}, 16]
  input e: i64[1]
  y, lse = attention(q, k, v, _, _, e)
  output y
}}"""
    runs = []
    for value in (0.0, float("nan"), INF):
        k, v = xs[1].clone(), xs[2].clone()
        k[:, :, end:], v[:, :, end:] = value, value
        ys, gs = engine.run(text, [xs[0], k, v, torch.tensor([end])], [1, 1, 1, 0], [dy])
        runs.append([*ys, *gs])
    for other in runs[1:]:
        for a, b in zip(runs[0], other):
            assert torch.isfinite(a).all() and torch.equal(a, b)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_nan_and_inf_come_through_in_bf16(value: float) -> None:
    """Where they are in eager's result, there and nowhere else."""
    for which, at in itertools.product(range(3), [(0, 0, 3, 1), (0, 1, 36, 6), (0, 1, 130, 0)]):
        xs = [x.to(torch.bfloat16) for x in qkv(1, 2, 2, 131, 131, 7, 7)]
        xs[which][at] = value
        text = "graph {" + "\n".join(f"input {n}: bf16[1, 2, 131, 7]" for n in "qkv") + "\n y, l = attention(q, k, v)\n output y\n}"
        got, want = engine.run(text, xs)[0][0], eager(*(x.double() for x in xs))
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


def again(**env: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", "in_bf16"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(not engine.lib.om_isa_bf16() & 1, reason="the processor has no AVX512_BF16: all of the above ran without it")
def test_without_the_instruction() -> None:
    again(ORTMODULE_ISA="avx512")


@pytest.mark.skipif(not engine.lib.om_isa_bf16() & 2, reason="the processor has no AMX: all of the above ran without tiles")
def test_without_tiles() -> None:
    again(ORTMODULE_ISA="avx512_bf16")


@pytest.mark.skipif(not engine.lib.om_isa_bf16() & 1, reason="emulated tiles stand beside pairs of AVX512_BF16")
def test_on_emulated_tiles() -> None:
    again(OM_LIB=os.path.join(engine.ROOT, "build", "amx.so"))


@pytest.mark.parametrize(
    "text,needle",
    [
        ("input q: f32[1, 3, 5, 7]\n input k: f32[1, 2, 5, 7]\n input v: f32[1, 2, 5, 7]\n y, l = attention(q, k, v)", "multiple"),
        ("input q: f32[1, 2, 5, 7]\n input k: f32[1, 2, 5, 8]\n input v: f32[1, 2, 5, 7]\n y, l = attention(q, k, v)", "equal"),
        ("input q: f32[5, 7]\n input k: f32[5, 7]\n input v: f32[5, 7]\n y, l = attention(q, k, v)", "at least 3"),
        ("input q: f32[1, 2, 5, 7]\n input k: f64[1, 2, 5, 7]\n input v: f32[1, 2, 5, 7]\n y, l = attention(q, k, v)", "one dtype"),
        (
            "input q: f32[1, 2, 5, 7]\n input k: f32[1, 2, 5, 7]\n input v: f32[1, 2, 5, 7]\n input m: i64[5, 5]\n y, "
            "l = attention(q, k, v, m)",
            "bool or a float",
        ),
        (
            "input q: f32[1, 2, 5, 7]\n input k: f32[1, 2, 5, 7]\n input v: f32[1, 2, 5, 7]\n input m: bool[5, 4]\n y, "
            "l = attention(q, k, v, m)",
            "axis 1 of the mask",
        ),
    ],
)
def test_errors(text: str, needle: str) -> None:
    with pytest.raises(engine.EngineError, match=needle):
        engine.Graph.parse(f"graph {{ {text}\n output y\n}}")
