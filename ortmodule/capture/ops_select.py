"""Rows of the operator table for what puts elements in order or into groups: sorting, histograms, bags of embeddings,
reductions by index, masks."""

from __future__ import annotations

from typing import Any

import torch

from .convert import BOOL, I64, Converter, NotHere, row
from .functional import Node
from .onnx_build import Val, expr_of

# --- order ----------------------------------------------------------------------------------------


def _first(c: Converter, v: Val, k: Any, axis: int, largest: bool) -> tuple[Val, Val]:
    """The first k of an axis and their indices; of equal ones the smaller index first."""
    dtype = v.dtype
    v = c.cast(v, torch.uint8) if dtype == BOOL else v
    shape = (*v.shape[:axis], expr_of(k), *v.shape[axis + 1 :])
    y, i = c.b.ops("TopK", [v, c.b.dims([k])], [(v.dtype, shape), (I64, shape)], axis=axis, largest=int(largest))
    return c.cast(y, dtype), i


def _sorted(c: Converter, v: Val, dim: int, descending: bool) -> tuple[Val, Val]:
    if v.rank == 0:
        return v, c.b.constant(0, I64)
    axis = dim % v.rank
    return _first(c, v, v.shape[axis], axis, descending)


@row("topk")
def topk(c: Converter, n: Node, x: Node, k: Any, dim: int, largest: bool, _sorted: bool) -> list[Val]:
    v = c.v(x)
    if v.rank == 0:
        raise NotHere("topk of a number")
    return list(_first(c, v, expr_of(k), dim % v.rank, largest))


@row("sort", "msort", "argsort")
def sort(c: Converter, n: Node, x: Node, dim: int = 0, descending: bool = False) -> Any:
    y, i = _sorted(c, c.v(x), dim, descending)
    name = n.target._schema.name
    return [y, i] if name == "aten::sort" else y if name == "aten::msort" else i


@row("sort.stable", "argsort.stable")
def sort_stable(c: Converter, n: Node, x: Node, _stable: Any, dim: int, descending: bool) -> Any:
    return sort(c, n, x, dim, descending)


def _pick(c: Converter, v: Val, order: Val, place: Val, axis: int, keep: bool) -> list[Val]:
    """Element order[place] of the axis and its index: all of the gradient goes there."""
    shape = tuple(1 if a == axis else d for a, d in enumerate(v.shape))
    i = c.no_negative(c.b.op("GatherElements", [order, place], I64, shape, axis=axis))
    y = c.no_negative(c.b.op("GatherElements", [v, i], v.dtype, shape, axis=axis))
    return [y, i] if keep else [c.squeeze(y, [axis]), c.squeeze(i, [axis])]


@row("kthvalue")
def kthvalue(c: Converter, n: Node, x: Node, k: Any, dim: int, keep: bool) -> list[Val]:
    v = c.v(x)
    if v.rank == 0:
        raise NotHere("kthvalue of a number")
    axis, k = dim % v.rank, expr_of(k)
    shape = tuple(1 if a == axis else d for a, d in enumerate(v.shape))
    _, order = _first(c, v, k, axis, False)
    last = c.op2("Sub", c.symbolic(k), c.scalar(1, I64))
    return _pick(c, v, order, c.expand(last, shape), axis, keep)


@row("median.dim")
def median(c: Converter, n: Node, x: Node, dim: int, keep: bool) -> list[Val]:
    """The lower one of two in the middle; NaN, the first, where there is any."""
    v = c.v(x)
    if v.rank == 0:
        raise NotHere("median of a number")
    axis = dim % v.rank
    size = v.shape[axis]
    shape = tuple(1 if a == axis else d for a, d in enumerate(v.shape))
    _, order = _sorted(c, v, axis, False)
    place = c.expand(c.symbolic((size - 1) // 2), shape)
    if v.dtype.is_floating_point:
        count = c.reduce("ReduceSum", c.cast(c.b.op("IsNaN", [v], BOOL, v.shape), I64), [axis], True)
        some = c.compare("Greater", count, c.scalar(0, I64))
        place = c.where(some, c.op2("Sub", c.symbolic(size), count), place)
    return _pick(c, v, order, place, axis, keep)
