"""Rows of the operator table that resize images and signals: nearest, linear and cubic, with PyTorch's own sampling
points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .convert import F64, I64, Converter, NotHere, not_empty, row
from .onnx_build import Val, expr_of, shape_of
from .ops_shape import sympify
from .program import Node


@row(
    "upsample_nearest1d.vec",
    "upsample_nearest2d.vec",
    "upsample_nearest3d.vec",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d.vec",
    "_upsample_nearest_exact2d.vec",
    "_upsample_nearest_exact3d.vec",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)
def upsample_nearest(c: Converter, n: Node, x: Node, _size: Any, *scales: Any) -> Val:
    """Whole factors repeat elements; otherwise one index per row, in torch's own float32 arithmetic."""
    v, out = c.v(x), shape_of(n.val)
    not_empty(v, "interpolate")
    exact = "exact" in n.target._schema.name
    given = _scales(n, scales)
    for axis in range(2, v.rank):
        size, new = v.shape[axis], out[axis]
        if v.rank != 4 and not _exact_factor(given[axis - 2], size, new):
            raise NotHere("interpolate by a factor whose forward and gradient take other elements in PyTorch")
        if size == new:  # PyTorch copies then, and repeats for twice the size, whatever factor was given
            continue
        factor = sympify(new) / sympify(size)
        if factor == 2 or (factor.is_Integer and given[axis - 2] in (None, float(factor))):
            wide = c.unsqueeze(v, [axis + 1])
            wide = c.expand(wide, (*wide.shape[: axis + 1], int(factor), *wide.shape[axis + 2 :]))
            v = c.reshape(wide, (*v.shape[:axis], new, *v.shape[axis + 1 :]))
            continue
        fine = F64 if exact and v.dtype == F64 else torch.float32
        if isinstance(size, int) and isinstance(new, int):
            ratio, at = _ratio(given[axis - 2], size, new), torch.arange(new, dtype=fine, device="cpu")
            step = torch.tensor(ratio, dtype=fine, device="cpu")
            at = ((at + 0.5) * ratio - 0.5).clamp(min=0) + 0.5 if exact else at * step
            index = c.b.tensor(at.floor().long().clamp(max=size - 1), "nearest")
        else:
            if exact:
                places = c.op2("Max", _sampled(c, v, axis, new, False, given[axis - 2]), c.scalar(0, fine))
                places = c.op2("Add", places, c.scalar(0.5, fine))
            else:
                ratio_ = _symbolic_ratio(c, given[axis - 2], size, new, fine, True)
                places = c.op2("Mul", c.range(new, fine), ratio_)
            index = c.op2("Min", c.cast(c.un("Floor", places), I64), c.symbolic(expr_of(size - 1)))
        v = c.b.op(
            "Gather",
            [v, index],
            v.dtype,
            (*v.shape[:axis], new, *v.shape[axis + 1 :]),
            axis=axis,
        )
    return v


def _exact_factor(factor: float | None, size: Any, new: Any) -> bool:
    """Of 1-d and 3-d signals, the gradient alone copies where the size stays, and repeats where it doubles: is that
    what the factor says as well?"""
    if factor is None or float(factor).is_integer():
        return True
    return new not in (size, 2 * size) if isinstance(size, int) and isinstance(new, int) else not 1 < factor < 3


def _scales(n: Node, rest: Sequence[Any]) -> list[float | None]:
    """Factors that the user gave: the size follows from them, the sampling points too."""
    k = n.val.dim() - 2
    if n.target._overloadname == "vec":
        return list(rest[-1]) if rest[-1] else [None] * k
    return list(rest[-k:])


def _ratio(factor: float | None, size: int, new: int) -> float:
    return 1 / factor if factor else size / new


def _symbolic_ratio(
    c: Converter, factor: float | None, size: Any, new: Any, dtype: torch.dtype, doubled: bool = False
) -> Val:
    """_ratio of sizes known when the plan is made. Where the size stays PyTorch copies, and (doubled) where it doubles
    it repeats, whatever factor was given."""
    s, t = c.symbolic(size), c.symbolic(new)
    ratio = c.op2("Div", c.cast(s, dtype), c.cast(t, dtype))
    if factor is None:
        return ratio
    plain = c.compare("Equal", s, t)
    if doubled:
        plain = c.op2("Or", plain, c.compare("Equal", c.op2("Mul", s, c.scalar(2, I64)), t))
    return c.where(plain, ratio, c.scalar(1 / factor, dtype))


def _sampled(c: Converter, v: Val, axis: int, new: Any, corners: bool, factor: float | None) -> Val:
    """Where along the axis each element of the result is sampled, in the type PyTorch computes it in."""
    dtype = v.dtype if v.dtype == F64 else torch.float32
    size = v.shape[axis]
    at, half = c.range(new, dtype), c.scalar(0.5, dtype)
    if corners:
        span = c.op2("Max", c.symbolic(expr_of(new - 1)), c.scalar(1, I64))
        return c.op2("Mul", at, c.op2("Div", c.cast(c.symbolic(expr_of(size - 1)), dtype), c.cast(span, dtype)))
    at = c.op2("Mul", c.op2("Add", at, half), _symbolic_ratio(c, factor, size, new, dtype))
    return c.op2("Sub", at, half)


def _between(c: Converter, v: Val, axis: int, new: Any, at: Val, cubic: bool) -> Val:
    """The axis sampled at `at`: two neighbours weighted, or four by the cubic convolution with a = -0.75."""
    dtype = at.dtype
    if not cubic:
        at = c.op2("Max", at, c.scalar(0, dtype))
    floor = c.un("Floor", at)
    t, low = c.op2("Sub", at, floor), c.cast(floor, I64)
    top, zero = c.symbolic(expr_of(v.shape[axis] - 1)), c.scalar(0, I64)

    def number(x: float) -> Val:
        return c.scalar(x, dtype)

    def poly(x: Val, *k: float) -> Val:
        y = number(k[0])
        for a in k[1:]:
            y = c.op2("Add", c.op2("Mul", y, x), number(a))
        return y

    one = number(1)
    rest = c.op2("Sub", one, t)
    if cubic:
        a = -0.75
        far, near = (a, -5 * a, 8 * a, -4 * a), (a + 2, -(a + 3), 0.0, 1.0)
        outer = [poly(c.op2("Add", d, one), *far) for d in (t, rest)]
        weights = [outer[0], poly(t, *near), poly(rest, *near), outer[1]]
    else:
        weights = [rest, t]
    shape = (*v.shape[:axis], new, *v.shape[axis + 1 :])
    sum_: Val | None = None
    for i, w in enumerate(weights):
        place = c.op2("Add", low, c.scalar(i - 1 if cubic else i, I64))
        place = c.op2("Min", c.op2("Max", place, zero) if cubic else place, top)
        part = c.no_negative(c.b.op("Gather", [v, place], v.dtype, shape, axis=axis))
        part = c.op2("Mul", part, c.reshape(c.cast(w, v.dtype), (new, *[1] * (v.rank - 1 - axis))))
        sum_ = part if sum_ is None else c.op2("Add", sum_, part)
    assert sum_ is not None
    return sum_


def _weighted(v: Val) -> None:
    """Can the engine take means of these elements?"""
    not_empty(v, "interpolate")
    if v.dtype == torch.uint8:
        raise NotHere("interpolate of images in bytes, whose weights are integers, too")


@row("upsample_bicubic2d.vec", "upsample_bicubic2d")
def upsample_bicubic(c: Converter, n: Node, x: Node, _size: Any, corners: bool, *scales: Any) -> Val:
    v, out = c.v(x), shape_of(n.val)
    _weighted(v)
    dtype = v.dtype
    v = c.cast(v, torch.float32) if dtype != F64 else v
    given = _scales(n, scales)
    if v.shape == out:  # PyTorch copies then, whatever factor was given
        return c.cast(v, dtype)
    for axis in range(2, v.rank):
        size, new = v.shape[axis], out[axis]
        if isinstance(size, int) and isinstance(new, int):
            wide = F64 if v.dtype == F64 else torch.float32
            at = torch.arange(new, dtype=wide, device="cpu")
            if corners:
                at = at * ((size - 1) / (new - 1) if new > 1 else 0)
            else:
                at = (at + 0.5) * _ratio(given[axis - 2], size, new) - 0.5
            places = c.b.tensor(at, "sample")
        else:
            places = _sampled(c, v, axis, new, corners, given[axis - 2])
        v = _between(c, v, axis, new, places, cubic=True)
    return c.cast(v, dtype)


@row(
    "upsample_linear1d.vec",
    "upsample_bilinear2d.vec",
    "upsample_trilinear3d.vec",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
)
def upsample_linear(c: Converter, n: Node, x: Node, _size: Any, corners: bool, *scales: Any) -> Val:
    """Axis after axis: neighbours below and above every sampling point, and the weight between them."""
    v, out = c.v(x), shape_of(n.val)
    _weighted(v)
    given = _scales(n, scales)
    for axis in range(2, v.rank):
        size, new = v.shape[axis], out[axis]
        if size == new:  # PyTorch copies then, whatever factor was given
            continue
        if not isinstance(size, int) or not isinstance(new, int):
            v = _between(c, v, axis, new, _sampled(c, v, axis, new, corners, given[axis - 2]), cubic=False)
            continue
        dtype = v.dtype if v.dtype == F64 else torch.float32
        at = torch.arange(new, dtype=dtype, device="cpu")
        if corners:
            at = at * ((size - 1) / (new - 1) if new > 1 else 0)
        else:
            at = ((at + 0.5) * _ratio(given[axis - 2], size, new) - 0.5).clamp(min=0)
        low = at.floor().long().clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        weight = (at - low).to(v.dtype).reshape(-1, *[1] * (v.rank - 1 - axis))
        shape = (*v.shape[:axis], new, *v.shape[axis + 1 :])
        a, b = (c.b.op("Gather", [v, c.b.tensor(i, "sample")], v.dtype, shape, axis=axis) for i in (low, high))
        w = c.b.tensor(weight, "weight")
        v = c.op2("Add", c.op2("Mul", a, c.op2("Sub", c.scalar(1, v.dtype), w)), c.op2("Mul", b, w))
    return v
