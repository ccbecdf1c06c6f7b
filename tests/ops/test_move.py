"""Copies, casts of many tensors, concat, pad, slice_put, slice_scatter, trilu, iota, fill against eager PyTorch."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = [t for t in engine.TORCH if t is not None]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values every type can hold part of: negative, fractional, zero."""
    x = rand(*shape) * 40
    x[x.abs() < 8] = 0
    return x.to(dtype) if dtype.is_floating_point or dtype is torch.bool else x.long().clamp(0 if dtype is torch.uint8 else -128, 127).to(dtype)


def om_copy(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    cx = engine.Ctx()
    s, d = engine.tensor(src), engine.tensor(dst)
    cx.check(engine.lib.om_copy(cx.p, ctypes.byref(s), ctypes.byref(d)))
    return dst


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_convert(dtype: torch.dtype, to: torch.dtype) -> None:
    x = values(dtype, 13, 37)
    if x.dtype.is_floating_point and to is torch.uint8:
        x = x.abs()
    want = x.to(to)
    assert torch.equal(om_copy(x, torch.empty_like(want)), want)
    assert torch.equal(om_copy(x.t(), torch.empty(37, 13, dtype=to)), want.t())
    back = torch.empty(26, 37, dtype=to)[::2]
    assert torch.equal(om_copy(x, back), want)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("pair", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32), (torch.int64, torch.bool)])
def test_convert_large(pair: tuple[torch.dtype, torch.dtype], at: int, step: int) -> None:
    """Results that are written past the caches: wherever they begin and end, whole and in rows, and nothing beside them."""
    dtype, to = pair
    n = 2 * (1 << 21) // to.itemsize + 37
    x = (values(dtype, 1000) if not dtype.is_floating_point else torch.randn(1000).to(dtype)).repeat(step * n // 1000 + 1)[: step * n : step]
    for shape, pitch in (((n,), n), ((2, n // 2), n // 2 + 3)):
        rows = n // shape[-1]
        around = torch.full((rows * pitch + 64,), 1, dtype=to)
        dst, want = around[at:].as_strided(shape, (pitch, 1)[-len(shape) :]), around.clone()
        src = x[: rows * shape[-1]].view(shape)
        want[at:].as_strided(shape, dst.stride()).copy_(src)
        om_copy(src, dst)
        assert torch.equal(around, want)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_rounding(to: torch.dtype) -> None:
    """Halfway cases, subnormals, overflow, infinities, NaN; and every one of the 65536 values back to float."""
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
    edge = torch.tensor(
        [
            65504,
            65519.9,
            65520,
            65536,
            1e38,
            2**-14,
            2**-24,
            2**-25,
            2**-25 * 1.0001,
            3 * 2**-25,
            1e-30,
            0.0,
            -0.0,
            float("inf"),
            float("-inf"),
            float("nan"),
            1 + 2**-8,
            1 + 3 * 2**-8,
            1 + 2**-11,
            1 + 3 * 2**-11,
            3.39e38,
        ]
    )
    x = torch.cat([bits, edge, -edge])
    got, want = om_copy(x, torch.empty(x.shape, dtype=to)), x.to(to)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan)
    assert torch.equal(got[~nan].view(torch.int16), want[~nan].view(torch.int16))
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(to)
    wide = om_copy(every, torch.empty(every.shape, dtype=torch.float32))
    nan = torch.isnan(every)
    assert torch.equal(torch.isnan(wide), nan)
    assert torch.equal(wide[~nan].view(torch.int32), every[~nan].float().view(torch.int32))


@pytest.mark.parametrize("last", [(9, 40), (40, 9), (4, 130), (130, 4), (16, 8), (15, 67), (67, 70), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_converted_and_transposed(dtype: torch.dtype, last: tuple[int, int]) -> None:
    """Filters with channels last and not, both ways, with rows that have gaps: what runs in one does not in the other."""
    x = torch.arange(5 * last[0] * last[1]).remainder(113).view(5, *last)
    for to in (torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.bool):
        for gap in (0, 3):
            src = torch.zeros(5, last[0], last[1] + gap, dtype=dtype)[:, :, :last[1]].copy_(x).transpose(1, 2)
            dst = torch.zeros(5, last[1], last[0] + gap, dtype=to)
            assert torch.equal(om_copy(src, dst[:, :, :last[0]]), src.to(to))
            assert not dst[:, :, last[0]:].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (67, 71), (8, 8), (16, 130, 9), (1, 67, 1, 70), (2, 3, 2, 3, 2, 3, 2, 2), (64, 2, 33), (), (3, 0, 5), (40000,)]
)
def test_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """om_copy between random layouts of both sides: permuted axes, gaps, reversed axes, expanded source."""
    gen = torch.Generator().manual_seed(len(shape))
    x = values(dtype, *shape)

    def layout(t: torch.Tensor, reverse: bool) -> torch.Tensor:
        order = torch.randperm(t.dim(), generator=gen).tolist()
        gaps = [int(torch.randint(1, 3, (), generator=gen)) for _ in order]
        mem = torch.zeros([s * k for s, k in zip((t.shape[i] for i in order), gaps)], dtype=t.dtype)
        view = mem[tuple(slice(None, None, k) for k in gaps)]
        view = view.permute([order.index(i) for i in range(t.dim())])
        if not reverse:
            return view.copy_(t)
        return view

    for _ in range(6):
        src, dst = layout(x, False), layout(x, True)
        assert torch.equal(om_copy(src, dst), x)
        s, d = engine.tensor(src), engine.tensor(dst)  # reverse both along every axis: negative strides
        for t, u in ((src, s), (dst, d)):
            u.data = t.data_ptr() + sum((n - 1) * k for n, k in zip(t.shape, t.stride())) * t.element_size() if t.numel() else u.data
            for i in range(t.dim()):
                u.stride[i] = -u.stride[i]
        dst.zero_()
        cx = engine.Ctx()
        cx.check(engine.lib.om_copy(cx.p, ctypes.byref(s), ctypes.byref(d)))
        assert torch.equal(dst, x)
        d2 = engine.tensor(dst)  # reverse the source only
        cx.check(engine.lib.om_copy(cx.p, ctypes.byref(s), ctypes.byref(d2)))
        assert torch.equal(dst, x.flip(tuple(range(x.dim()))))
    if x.dim() > 1:
        wide = x[:1].expand(shape) if x.shape[0] else x
        assert torch.equal(om_copy(wide, torch.empty(shape, dtype=dtype)), wide)


def test_copy() -> None:
    check("copy", [rand(3, 5, 7)], lambda x: x.clone(), low=LOW)


@pytest.mark.parametrize(
    "axis,shapes",
    [
        (0, [(3, 5), (2, 5), (7, 5)]),
        (1, [(3, 5), (3, 1), (3, 0), (3, 11)]),
        (1, [(3, 5), (3, 1), (3, 2), (3, 11)]),
        (2, [(2, 3, 5), (2, 3, 7)]),
        (1, [(2, 3, 5), (2, 7, 5)]),
        (0, [(5,)]),
        (0, [(1,)] * 9),
    ],
)
def test_concat(axis: int, shapes: list[tuple[int, ...]]) -> None:
    check("concat", [rand(*s) for s in shapes], lambda *x: torch.cat(x, axis), f"axis={axis}", low=LOW)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 6, 8, 12, 16, 20, 64])
def test_heads_side_by_side(d: int, dtype: torch.dtype) -> None:
    """Heads before time, laid side by side behind the same of another: runs of d numbers on both sides, which begin where 16 bytes may or anywhere."""
    name = engine.NAMES[engine.TORCH.index(dtype)]
    for heads, time, at in ((3, 70, 0), (2, 17, 1), (1, 5, 8), (4, 33, 16)):
        a, b = values(dtype, 2, heads, time, d), values(dtype, 2, heads, time, at + d)
        text = (f"graph {{\n input a: {name}[2, {heads}, {time}, {d}]\n input b: {name}[2, {heads}, {time}, {at + d}]\n c = slice(b) {{axis=3, start=[{at}], end=[{at + d}], step=1}}\n"
                " p = permute(a) {perm=[0, 2, 1, 3]}\n q = permute(c) {perm=[0, 2, 1, 3]}\n y = concat(p, q) {axis=2}\n z = concat(q, p) {axis=3}\n output y\n output z\n}")
        p, q = (x.permute(0, 2, 1, 3) for x in (a, b[..., at:]))
        (y, z), _ = engine.run(text, [a, b])
        assert torch.equal(y, torch.cat([p, q], 2)) and torch.equal(z, torch.cat([q, p], 3)), (heads, time, at)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_turned(dtype: torch.dtype) -> None:
    """Columns become rows: in pairs on both sides, or where sizes are odd and rows begin anywhere, one by one."""
    name = engine.NAMES[engine.TORCH.index(dtype)]
    for rows, cols, at, width in ((16, 16, 0, 16), (17, 64, 0, 64), (64, 66, 0, 66), (130, 96, 2, 98), (70, 34, 1, 40), (62, 130, 3, 134), (65, 33, 0, 33), (128, 18, 1, 19)):
        x = values(dtype, 2, rows, width)
        text = (f"graph {{\n input x: {name}[2, {rows}, {width}]\n s = slice(x) {{axis=2, start=[{at}], end=[{at + cols}], step=1}}\n"
                " p = permute(s) {perm=[0, 2, 1]}\n y = concat(p, p) {axis=1}\n output y\n}")
        (y,), _ = engine.run(text, [x])
        t = x[..., at:at + cols].transpose(1, 2)
        assert torch.equal(y, torch.cat([t, t], 1)), (rows, cols, at, width)


@pytest.mark.parametrize(
    "lo,hi,value",
    [
        ((1, 2, 3), (0, 1, 2), 1.5),
        ((0, 0, 0), (0, 0, 4), 0.0),
        ((-1, 2, 0), (1, -3, 0), -2.0),
        ((-2, 0, 0), (-3, 0, 1), 3.0),
        ((-1, -1, -1), (-1, -1, -1), 7.0),
        ((0, 3, 0), (-5, 0, 0), 2.5),
        ((0, 0, 0), (0, 0, 0), 1.0),
        ((0, 0, -9), (0, 0, 0), 1.0),
        ((-7, 0, 0), (4, 0, 0), 1.25),
    ],
)
def test_pad(lo: tuple[int, ...], hi: tuple[int, ...], value: float) -> None:
    if any(x + lo_ + hi_ < 0 for x, lo_, hi_ in zip((5, 7, 11), lo, hi)):
        pytest.skip("negative size")
    torch_pad = [p for i in (2, 1, 0) for p in (lo[i], hi[i])]

    def ref(x: torch.Tensor) -> torch.Tensor:
        if lo[0] == -7:  # torch refuses to crop more than there is; by hand: all of x is gone
            return F.pad(x[:0], [0, 0, 0, 0, 2, 0], value=value)
        return F.pad(x, torch_pad, value=value)

    check("pad", [rand(5, 7, 11)], ref, f"lo={list(lo)}, hi={list(hi)}, value={value}", low=LOW)


@pytest.mark.parametrize("axis,start,end,step", [(0, 1, 4, 1), (1, 0, 7, 2), (1, 1, 7, 3), (2, 3, 3, 1), (2, 2, 11, 4), (0, 0, 5, 1), (2, 5, 11, 1)])
def test_slice_put_and_scatter(axis: int, start: int, end: int, step: int) -> None:
    key: list[slice] = [slice(None)] * 3
    key[axis] = slice(start, end, step)
    k = tuple(key)
    full = rand(5, 7, 11)
    src = rand(5, 7, 11)[k].clone() + 1

    def put(s: torch.Tensor) -> torch.Tensor:
        z = torch.zeros(5, 7, 11, dtype=s.dtype)
        z[k] = s
        return z

    at = f"axis={axis}, start=[{start}], end=[{end}], step={step}"
    check("slice_put", [src], put, f"{at}, shape=[5, 7, 11]", low=LOW)
    check("slice_scatter", [full, src], lambda x, s: torch.slice_scatter(x, s, axis, start, end, step), at, low=LOW)


@pytest.mark.parametrize("k", [0, 1, -2, 5, -9, 30])
@pytest.mark.parametrize("shape", [(5, 7), (3, 7, 5), (2, 1, 5), (5, 1), (0, 3), (2, 67, 71)])
def test_trilu(shape: tuple[int, ...], k: int) -> None:
    check("trilu", [rand(*shape)], lambda x: x.triu(k), f"k={k}, upper=1", low=LOW)
    check("trilu", [rand(*shape)], lambda x: x.tril(k), f"k={k}, upper=0", low=LOW)
    mask = torch.ones(shape, dtype=torch.bool)
    check("trilu", [mask], lambda x: x.tril(k), f"k={k}, upper=0")


@pytest.mark.parametrize("dtype", ["i64", "i32", "f32", "f64", "bf16"])
@pytest.mark.parametrize("n,start,step", [(17, 3, 2), (0, 0, 1), (1, 5, -3), (1301, -7, 1)])
def test_iota(dtype: str, n: int, start: int, step: int) -> None:
    t = engine.TORCH[engine.NAMES.index(dtype)]
    (y,), _ = engine.run(
        f'graph {{\n y = iota() {{shape=[{n}], dtype="{dtype}", start={start}, step={step}}}\n output y\n}}'.replace(f'"{dtype}"', dtype), []
    )
    assert torch.equal(y, (start + step * torch.arange(n)).to(t))


def test_iota_fraction() -> None:
    (y,), _ = engine.run("graph {\n y = iota() {shape=[1009], dtype=f32, start=0.3, step=0.7}\n output y\n}", [])
    assert torch.equal(y, (0.3 + 0.7 * torch.arange(1009, dtype=torch.float64)).float())


@pytest.mark.parametrize(
    "dtype,value", [("f32", "-1.5"), ("bf16", "inf"), ("f64", "0.1"), ("i64", "7"), ("bool", "1"), ("f16", "-inf"), ("i64", "9007199254740993")]
)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (40009,)])
def test_fill(dtype: str, value: str, shape: tuple[int, ...]) -> None:
    t = engine.TORCH[engine.NAMES.index(dtype)]
    (y,), _ = engine.run(f"graph {{\n y = fill() {{shape={list(shape)}, dtype={dtype}, value={value}}}\n output y\n}}", [])
    assert torch.equal(y, torch.full(shape, float(value) if t.is_floating_point else int(value), dtype=t))


CASTS = [(a, b) for a in ("f64", "f32", "bf16", "f16") for b in ("f64", "f32", "bf16", "f16")]


@pytest.mark.parametrize("view", ["", "slice(X) {axis=0, start=[1], end=[SIZE], step=1}", "slice(X) {axis=0, start=[1], end=[SIZE], step=3}"])
def test_cast_all(view: str) -> None:
    """Each operand as `cast` converts it, of all sizes together; also views that begin anywhere."""
    sizes = [0 if k == 3 and not view else 1 + 7 * k * k for k in range(64)]
    kinds = [[engine.NAMES.index(t) for t in CASTS[k % len(CASTS)]] for k in range(64)]
    ins = [(rand(n) * 3).to(engine.TORCH[a]) for n, (a, _) in zip(sizes, kinds, strict=True)]
    lines = [f"input x{k}: {engine.NAMES[a]}[{n}]" for k, (n, (a, _)) in enumerate(zip(sizes, kinds, strict=True))]
    lines += [f"v{k} = {view}".replace("X", f"x{k}").replace("SIZE", str(n)) for k, n in enumerate(sizes) if view]
    outs, operands = [f"y{k}" for k in range(64)], ", ".join(f"{'v' if view else 'x'}{k}" for k in range(64))
    lines.append(f"{', '.join(outs)} = cast_all({operands}) {{out_dtype={[b for _, b in kinds]}}}")
    text = "\n".join(["graph {", *lines, *(f"output {y}" for y in outs), "}"])
    printed = engine.Graph.parse(text).verify().text()
    assert engine.Graph.parse(printed).text() == printed
    got, _ = engine.run(text, ins)
    for y, x, (_, b) in zip(got, ins, kinds, strict=True):
        want = (x[1::3] if "step=3" in view else x[1:] if view else x).to(engine.TORCH[b])
        assert y.dtype == want.dtype and torch.equal(y, want)


@pytest.mark.parametrize(
    "node,words",
    [
        ("concat(x, z) {axis=0}", ["concat", "size 7", "5"]),
        ("concat(x, w) {axis=0}", ["concat", "f32", "f64"]),
        ("pad(x) {lo=[1], hi=[1]}", ["pad", "one entry per axis"]),
        ("slice_put(x) {axis=1, start=[0], end=[3], step=1, shape=[3, 9]}", ["slice_put", "size 3", "5"]),
        ("trilu(v) {k=0, upper=1}", ["trilu", "rank 1"]),
        ("cast_all(x) {out_dtype=[1, 1]}", ["cast_all", "2 dtypes for 1 operands"]),
        ("cast_all(x) {out_dtype=[5]}", ["cast_all", "floats become floats"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = f"graph {{\n input x: f64[3, 5]\n input z: f64[3, 7]\n input w: f32[3, 5]\n input v: f64[3]\n y = {node}\n output y\n}}"
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(3, 5), rand(3, 7), rand(3, 5).float(), rand(3)])
    assert all(w in str(e.value) for w in words), str(e.value)
