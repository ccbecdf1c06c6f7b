"""Rows of the operator table for functions that few models need: inverse and hyperbolic ones, gamma functions, and
what comes down to other rows (shuffled channels, grids of affine maps, a margin loss, windows of adaptive sizes)."""

from __future__ import annotations

from typing import Any

import torch

from .convert import BOOL, I64, Converter, NotHere, row
from .onnx_build import Val, expr_of, shape_of
from .ops_shape import numel
from .program import Node

_NAMES = {"acos": "Acos", "asin": "Asin", "atan": "Atan", "acosh": "Acosh", "atanh": "Atanh", "tan": "Tan",
          "sinh": "Sinh", "cosh": "Cosh", "lgamma": "LogGamma", "digamma": "Digamma"}  # fmt: skip


@row(*_NAMES)
def special(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, n.val.dtype)
    op = _NAMES[n.target._schema.name.removeprefix("aten::")]
    return c.b.op(op, [v], v.dtype, v.shape, "ortmodule" if op in ("LogGamma", "Digamma") else "")


@row("atan2", "xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def special_of_two(c: Converter, n: Node, x: Any, y: Any) -> Val:
    dtype, shape = n.val.dtype, shape_of(n.val)
    both = [c.expand(c.num(z, dtype), shape) for z in (x, y)]
    return c.b.op("Atan2" if "atan2" in str(n.target) else "XLogY", both, dtype, shape, "ortmodule")


@row("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(c: Converter, n: Node, x: Node, groups: int) -> Val:
    v = c.v(x)
    size = v.shape[1]
    if not isinstance(size, int) or size % groups:
        raise NotHere("channel_shuffle of a number of channels that is not known, or no multiple of the groups")
    apart = c.reshape(v, (v.shape[0], groups, size // groups, *v.shape[2:]))
    return c.reshape(c.swap(apart, 1, 2), v.shape)


def _steps(c: Converter, size: Any, dtype: torch.dtype, corners: bool) -> Val:
    """Places of `size` elements between -1 and 1: their middles, or from corner to corner (one element: 0). To the bit
    as in torch: a map that changes nothing points at whole pixels, where the last bit says on which side of a pixel
    grid_sample's gradient is taken."""
    if not isinstance(size, int):
        raise NotHere("affine_grid of symbolic sizes")
    if size > 1:
        place = torch.linspace(-1, 1, size, dtype=dtype, device="cpu")
    else:
        place = torch.zeros(size, dtype=dtype, device="cpu")
    return c.b.tensor(place if corners else place * (size - 1) / size, "places")


@row("affine_grid_generator")
def affine_grid(c: Converter, n: Node, theta: Node, size: Any, corners: bool) -> Val:
    """Every place of the output, and a 1, times theta transposed."""
    t, out = c.v(theta), shape_of(n.val)
    space = out[1:-1]
    dims = len(space)
    axes = []
    for k in range(dims):  # x, the last axis, comes first
        axis = dims - 1 - k
        places = _steps(c, space[axis], t.dtype, bool(corners))
        places = c.reshape(places, tuple(space[axis] if a == axis else 1 for a in range(dims)) + (1,))
        axes.append(c.expand(places, (*space, 1)))
    axes.append(c.fill(1, t.dtype, (*space, 1)))
    count: Any = expr_of(numel(space))
    base = c.reshape(c.concat(axes, dims), (count, dims + 1))
    return c.reshape(c.matmul(base, c.swap(t, 1, 2)), out)


@row("multi_margin_loss")
def multi_margin_loss(
    c: Converter, n: Node, x: Node, target: Node, p: Any, margin: Any, weight: Node | None, reduction: int
) -> Val:
    v, label = c.v(x), c.v(target)
    if v.rank == 0 or p not in (1, 2) or v.dtype not in (torch.float32, torch.float64):
        raise NotHere("multi_margin_loss of a number, of a power other than 1 and 2, or in low precision")
    v = v if v.rank == 2 else c.unsqueeze(v, [0])
    rows, classes = v.shape
    label = c.reshape(label, (rows, 1))
    own = c.no_negative(c.b.op("GatherElements", [v, label], v.dtype, (rows, 1), axis=1))
    zero = c.scalar(0, v.dtype)
    z = c.op2("Add", c.op2("Sub", c.scalar(margin, v.dtype), own), v)
    other = c.un("Not", c.compare("Equal", c.reshape(c.range(classes), (1, classes)), label))
    counts = c.op2("And", c.compare("Greater", z, zero), other, BOOL)
    loss = c.where(counts, z if p == 1 else c.op2("Mul", z, z), zero)
    if weight is not None:
        flat = c.reshape(label, (rows,))
        w = c.no_negative(c.b.op("Gather", [c.v(weight), flat], v.dtype, (rows,), axis=0))
        loss = c.op2("Mul", loss, c.reshape(w, (rows, 1)))
    loss = c.op2("Div", c.reduce("ReduceSum", loss, [1], False), c.cast(c.symbolic(classes), v.dtype))
    if reduction:
        return c.reduce("ReduceMean" if reduction == 1 else "ReduceSum", loss, [0], False)
    return c.reshape(loss, shape_of(n.val))


@row("soft_margin_loss")
def soft_margin_loss(c: Converter, n: Node, x: Node, target: Node, reduction: int) -> Val:
    """log(1 + exp(-target x)), infinite (and its gradient NaN) where exp is, as in torch."""
    dtype = n.val.dtype
    if dtype not in (torch.float32, torch.float64):
        raise NotHere("soft_margin_loss in low precision")
    v = c.op2("Mul", c.neg(c.num(target, dtype)), c.num(x, dtype))
    loss = c.b.op("Log1p", [c.un("Exp", v)], dtype, v.shape, "ortmodule")
    if reduction:
        return c.reduce("ReduceMean" if reduction == 1 else "ReduceSum", loss, None, False)
    return loss


@row("binary_cross_entropy")
def binary_cross_entropy(c: Converter, n: Node, x: Node, target: Node, weight: Node | None, reduction: int) -> Val:
    """Logarithms end at -100; torch's gradients do not follow from that. PyTorch raises where x or the target lies
    outside of [0, 1]: a look at element 1 of one, which is a fault, gives the call to it."""
    dtype = n.val.dtype
    if dtype not in (torch.float32, torch.float64) or c.v(target).dtype != dtype:
        raise NotHere("binary_cross_entropy in low precision")
    v, t = c.v(x), c.v(target)
    zero, one, low = c.scalar(0, dtype), c.scalar(1, dtype), c.scalar(-100, dtype)
    p = c.stop(v)
    log, log_other = c.un("Log", p), c.b.op("Log1p", [c.neg(p)], dtype, p.shape, "ortmodule")
    y = c.op2("Mul", c.op2("Sub", c.stop(t), one), c.op2("Max", log_other, low))
    y = c.op2("Sub", y, c.op2("Mul", c.stop(t), c.op2("Max", log, low)))
    least = c.scalar(float(torch.tensor(1e-12, dtype=torch.float32, device="cpu")), dtype)  # a float in torch, too
    spread = c.op2("Max", c.op2("Mul", c.op2("Sub", one, p), p), least)
    slope = c.op2("Div", c.op2("Sub", p, c.stop(t)), spread)
    path = c.op2("Add", c.op2("Mul", v, slope), c.op2("Mul", t, c.op2("Sub", log_other, log)))
    loss = c.b.op("StraightThrough", [y, path], dtype, y.shape, "ortmodule")
    if weight is not None:
        loss = c.op2("Mul", loss, c.num(weight, dtype))
    inside, labels = (c.op2("And", c.compare("GreaterOrEqual", s, zero), c.compare("LessOrEqual", s, one), BOOL)
                      for s in (p, c.stop(t)))  # fmt: skip
    outside = c.reduce("ReduceMax", c.cast(c.un("Not", c.op2("And", inside, labels, BOOL)), I64), None, False)
    outside = c.reshape(c.op2("Max", outside, c.scalar(0, I64)), (1,))  # the maximum of nothing is the lowest integer
    checked = c.no_negative(c.b.op("Gather", [c.fill(1, dtype, (1,)), outside], dtype, (1,), axis=0))
    loss = c.op2("Mul", loss, c.reshape(checked, ()))
    if reduction:
        return c.reduce("ReduceMean" if reduction == 1 else "ReduceSum", loss, None, False)
    return loss


@row("tril_indices", "triu_indices")
def triangle_indices(c: Converter, n: Node, rows: Any, cols: Any, offset: Any = 0, *_: Any) -> Val:
    if not all(isinstance(i, int) for i in (rows, cols, offset)):
        raise NotHere("indices of a triangle whose size varies")
    of = torch.tril_indices if "tril" in str(n.target) else torch.triu_indices
    at = of(rows, cols, offset)
    return c.cast(c.reshape(c.b.constant(at.flatten().tolist(), I64), shape_of(n.val)), n.val.dtype)


def _windows(c: Converter, size: Any, count: Any) -> tuple[Val, Any]:
    """(count, k): the elements of each window [floor(i size / count), ceil((i + 1) size / count)), the last again where
    it has fewer than k."""
    k = expr_of((size + count - 1) // count + 1)
    i, n, m, one = c.range(count), c.symbolic(size), c.symbolic(count), c.scalar(1, I64)
    first = c.op2("Div", c.op2("Mul", i, n), m)
    end = c.op2("Div", c.op2("Add", c.op2("Mul", c.op2("Add", i, one), n), c.op2("Sub", m, one)), m)
    at = c.op2("Add", c.reshape(first, (count, 1)), c.range(k))
    return c.op2("Min", at, c.reshape(c.op2("Sub", end, one), (count, 1))), k


@row("adaptive_max_pool2d")
def adaptive_max_pool(c: Converter, n: Node, x: Node, _size: Any) -> list[Any]:
    """The windows are gathered, the first of the largest is chosen, and read from x where it is: all of the gradient
    goes there."""
    v, out = c.v(x), shape_of(n.val[0])
    if c.reads(n, 1) or v.dtype not in (torch.float32, torch.float64):
        raise NotHere("adaptive_max_pool2d whose indices are read, or in low precision")
    if any(d == 0 for d in v.shape):
        raise NotHere("windows of nothing")
    lead, (h, w), (oh, ow) = v.shape[:-2], v.shape[-2:], out[-2:]
    (rows, kh), (cols, kw) = _windows(c, h, oh), _windows(c, w, ow)
    windows, k = expr_of(oh * ow), expr_of(kh * kw)
    at = c.op2("Add", c.op2("Mul", c.reshape(rows, (oh, 1, kh, 1)), c.symbolic(w)), c.reshape(cols, (1, ow, 1, kw)))
    at = c.reshape(at, (windows, k))
    flat = c.reshape(v, (*lead, expr_of(h * w)))
    axis = len(lead)
    every = c.no_negative(c.b.op("Gather", [c.stop(flat), at], v.dtype, (*lead, windows, k), axis=axis))
    which = c.b.op("ArgMax", [every], I64, (*lead, windows), axis=axis + 1, keepdims=0)
    which = c.op2("Add", which, c.op2("Mul", c.range(windows), c.symbolic(k)))
    at = c.reshape(at, (expr_of(windows * k),))
    place = c.no_negative(c.b.op("Gather", [at, which], I64, (*lead, windows), axis=0))
    y = c.no_negative(c.b.op("GatherElements", [flat, place], v.dtype, (*lead, windows), axis=axis))
    return [c.reshape(y, out), None]
