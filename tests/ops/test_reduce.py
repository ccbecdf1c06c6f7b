"""Reductions against eager PyTorch: any axes and strides, empty axes, ties, NaN, accuracy of long sums, independence of
threads."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)

rand = functools.partial(rand, per_axis=7)


def node(op: str, x: torch.Tensor, attrs: str, seed: int = 0) -> torch.Tensor:
    name = engine.NAMES[engine.TORCH.index(x.dtype)]
    return engine.run(f"graph {{\n  input x: {name}[{', '.join(map(str, x.shape))}]\n  y = {op}(x) {{{attrs}}}\n  output y\n}}", [x])[0][0]


CASES = [((7, 13, 5), (0,)), ((7, 13, 5), (1,)), ((7, 13, 5), (2,)), ((7, 13, 5), (0, 2)), ((7, 13, 5), (0, 1, 2)), ((7, 13, 5), (1, 2)),
         ((3, 1, 5), (1,)), ((2, 3, 5, 7, 11), (0, 2, 4)), ((2, 3, 5, 7, 11), (1, 3)), ((1031,), (0,)), ((5, 1031), (1,)), ((1031, 5), (0,)),
         ((61, 67), (0,)), ((0, 5), (1,)), ((5, 0), (1,)), ((3, 0, 5), (0, 1))]


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_sum_mean(case: tuple[tuple[int, ...], tuple[int, ...]], keep: int) -> None:
    shape, axes = case
    attrs = f"axes={list(axes)}, keepdims={keep}"
    check("reduce_sum", [rand(*shape)], lambda x: x.sum(axes, keepdim=bool(keep)), attrs, low=LOW)
    check("reduce_mean", [rand(*shape)], lambda x: x.mean(axes, keepdim=bool(keep)), attrs, low=LOW)


@pytest.mark.parametrize("case", [c for c in CASES if 0 not in c[0]])
def test_max_min(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, axes = case
    x = (rand(*shape) * 2).round()  # many ties
    for keep in (0, 1):
        attrs = f"axes={list(axes)}, keepdims={keep}"
        check("reduce_max", [x], lambda t, k=bool(keep): t.amax(axes, keepdim=k), attrs, low=LOW)
        check("reduce_min", [x], lambda t, k=bool(keep): t.amin(axes, keepdim=k), attrs, low=LOW)


def prod(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    for a in sorted(axes, reverse=True):
        x = x.prod(a)
    return x


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("case", [((7, 5), (0,)), ((7, 5), (1,)), ((3, 5, 2), (0, 2)), ((5, 0), (1,))])
def test_prod(case: tuple[tuple[int, ...], tuple[int, ...]], zeros: int) -> None:
    shape, axes = case
    x = rand(*shape)
    x.view(-1)[:zeros] = 0
    check("reduce_prod", [x], lambda t: prod(t, axes), f"axes={list(axes)}")


def test_all_axes_by_default() -> None:
    check("reduce_sum", [rand(3, 5, 7)], lambda x: x.sum())


def test_nan_and_infinity() -> None:
    x = rand(5, 37).float()
    x[1, 3], x[2, 36], x[3, 0] = math.nan, math.inf, -math.inf
    for op, f in (("reduce_max", torch.amax), ("reduce_min", torch.amin)):
        for axis in (0, 1):
            assert torch.equal(node(op, x, f"axes=[{axis}]").nan_to_num(7.0), f(x, axis).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 9, (13, 29), generator=torch.Generator().manual_seed(3)).to(dtype)
    for axis in (0, 1):
        assert torch.equal(node("reduce_sum", x, f"axes=[{axis}]"), x.any(axis) if dtype == torch.bool else x.sum(axis).to(dtype))
        assert torch.equal(node("reduce_max", x, f"axes=[{axis}]"), x.amax(axis))
        assert torch.equal(node("reduce_min", x, f"axes=[{axis}]"), x.amin(axis))


@pytest.mark.parametrize("shape,axes", [((1_000_003,), (0,)), ((4099, 257), (0,)), ((257, 4099), (1,)), ((11, 769, 97), (0, 1)),
                                        ((3, 515, 1100), (1,)), ((2, 1, 390, 2500), (0, 2))])
def test_long_sums(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Accurate to the last place of f32, and bit for bit the same whatever way the work is cut."""
    x = (rand(*shape) + 1000).float()
    got = node("reduce_sum", x, f"axes={list(axes)}")
    exact = x.double().sum(axes)
    assert ((got.double() - exact).abs() / exact.abs()).max() < 2**-23
    text = f"graph {{\n  input x: f32[{', '.join(map(str, shape))}]\n  y = reduce_sum(x) {{axes={list(axes)}}}\n  output y\n}}"
    assert torch.equal(engine.run(engine.Graph.parse(text, engine.Ctx(threads=False)), [x])[0][0], got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape,axis", [((1537, 1100), 0), ((3, 515, 1100), 1), ((2, 1100, 515), 2), ((1030, 9001), 0)])
def test_in_blocks(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    """Several blocks, strips and kept axes at once: small whole numbers, whose sums are exact; a NaN wins from any block."""
    x = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert torch.equal(node("reduce_sum", x, f"axes=[{axis}]"), x.double().sum(axis).to(dtype))
    for order in ((0, 1), (1, 0)):  # and as it lies transposed
        y = x.transpose(*order).contiguous().transpose(*order)
        y[(shape[0] - 1,) + (3,) * (len(shape) - 1)] = 90
        assert torch.equal(node("reduce_max", y, f"axes=[{axis}]"), y.amax(axis))
        assert torch.equal(node("reduce_min", y, f"axes=[{axis}]"), y.amin(axis))
    if dtype.is_floating_point:
        x[(1,) * len(shape)] = math.nan
        assert torch.equal(node("reduce_max", x, f"axes=[{axis}]").isnan(), x.amax(axis).isnan())


def part(x: torch.Tensor, at: int, n: int, axis: int) -> torch.Tensor:
    """The sum over an axis of columns `at` to at + n."""
    text = (f"graph {{\n  input x: {engine.NAMES[engine.TORCH.index(x.dtype)]}[{x.shape[0]}, {x.shape[1]}]\n  s = slice(x) {{axis=1, start=[{at}], end=[{at + n}], step=1}}\n"
            f"  y = reduce_sum(s) {{axes=[{axis}]}}\n  output y\n}}")
    return engine.run(text, [x])[0][0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [32, 33, 34, 36, 40, 255, 256, 258, 264, 520])
def test_columns_anywhere(n: int, dtype: torch.dtype) -> None:
    """Columns of rows that begin anywhere, sizes around what a thread, a block and a part of them take: sums of small whole numbers are exact."""
    for rows, at, width in [(1, 0, n), (33, 1, n + 1), (63, 4, n + 8), (64, 0, n), (127, 8, n + 16), (128, 0, n), (130, 2, n + 8), (135, 0, n + 4), (700, 8, n + 8), (1100, 0, n)]:
        x = torch.randint(-8, 9, (rows, width), generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(part(x, at, n, 0), x[:, at:at + n].double().sum(0).to(dtype)), (rows, at, width)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [33, 39, 255, 257, 2047, 2049, 8191, 8192, 8200, 9001, 20003])
def test_lines_anywhere(n: int, dtype: torch.dtype) -> None:
    for at, width in [(0, n), (1, n + 1), (8, n + 8), (2, n + 5)]:
        x = torch.randint(-8, 9, (3, width), generator=torch.Generator().manual_seed(n)).to(dtype)
        assert torch.equal(part(x, at, n, 1), x[:, at:at + n].double().sum(1).to(dtype)), (at, width)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape,axis", [((7, 13, 5), 0), ((7, 13, 5), 1), ((7, 13, 5), 2), ((3, 2053), 1), ((1, 1), 0), ((2053,), 0)])
def test_arg(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    x = (rand(*shape) * 3).round().to(dtype)
    for t in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        for keep in (0, 1):
            first = (t == t.amax(axis, keepdim=True)).to(torch.int64).argmax(axis, keepdim=bool(keep))
            assert torch.equal(node("argmax", t, f"axis={axis}, keepdims={keep}"), first)
            first = (t == t.amin(axis, keepdim=True)).to(torch.int64).argmax(axis, keepdim=bool(keep))
            assert torch.equal(node("argmin", t, f"axis={axis}, keepdims={keep}"), first)


def test_arg_nan() -> None:
    x = rand(3, 1500)
    x[0, 1200], x[1, 7], x[1, 1400] = math.nan, math.nan, math.nan
    assert torch.equal(node("argmax", x, "axis=1"), x.argmax(1))
    assert torch.equal(node("argmin", x, "axis=1"), x.argmin(1))


def ref_cumsum(x: torch.Tensor, axis: int, exclusive: int, reverse: int) -> torch.Tensor:
    if reverse:
        x = x.flip(axis)
    y = x.cumsum(axis)
    y = y - x if exclusive else y
    return y.flip(axis) if reverse else y


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("shape,axis", [((7, 13, 5), 0), ((7, 13, 5), 1), ((7, 13, 5), 2), ((3, 1031), 1), ((0, 5), 1), ((5, 0), 1)])
def test_cumsum(shape: tuple[int, ...], axis: int, reverse: int, exclusive: int) -> None:
    attrs = f"axis={axis}, exclusive={exclusive}, reverse={reverse}"
    check("cumsum", [rand(*shape)], lambda x: ref_cumsum(x, axis, exclusive, reverse), attrs)
    ints = torch.arange(math.prod(shape)).reshape(shape)
    assert torch.equal(node("cumsum", ints, attrs), ref_cumsum(ints, axis, exclusive, reverse))
