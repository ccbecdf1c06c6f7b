"""Rows of the operator table for what puts elements in order or into groups: sorting, histograms, bags of embeddings,
reductions by index, masks."""

from __future__ import annotations

from typing import Any

import torch

from .convert import BOOL, F64, I64, Converter, NotHere, not_empty, row
from .onnx_build import Val, expr_of, shape_of
from .ops_shape import numel
from .program import Node

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
    not_empty(v, "median")
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


# --- running and grouped --------------------------------------------------------------------------


@row("cumprod")
def cumprod(c: Converter, n: Node, x: Node, dim: int, *_: Any) -> Val:
    v = c.num(x, n.val.dtype)
    if v.rank == 0:
        return v
    last = v.rank - 1
    y = c.b.op("CumProd", [c.swap(v, dim % v.rank, last)], v.dtype, c.swap(v, dim % v.rank, last).shape, "ortmodule")
    return c.swap(y, dim % v.rank, last)


@row("cdist")
def cdist(c: Converter, n: Node, x: Node, y: Node, p: float, _mode: Any) -> Val:
    out, dtype = shape_of(n.val), n.val.dtype
    if dtype not in (torch.float32, F64):
        raise NotHere(f"cdist in {dtype}")
    a, b = c.num(x, dtype), c.num(y, dtype)
    a, b = c.expand(a, (*out[:-2], *a.shape[-2:])), c.expand(b, (*out[:-2], *b.shape[-2:]))
    return c.b.op("Cdist", [a, b], dtype, out, "ortmodule", p=-1.0 if p == float("inf") else float(p))


def _put(c: Converter, v: Val, index: Val, src: Val, axis: int, how: str) -> Val:
    y = c.b.op("ScatterElements", [v, index, src], v.dtype, v.shape, axis=axis, reduction=how)
    return c.no_negative(y) if v.dtype != I64 else y  # an index must not be the memory that is written


def _at(c: Converter, v: Val, index: Val, axis: int) -> Val:
    return c.no_negative(c.b.op("GatherElements", [v, index], v.dtype, index.shape, axis=axis))


@row("scatter_reduce.two")
def scatter_reduce(
    c: Converter, n: Node, x: Node, dim: int, index: Node, src: Node, how: str, include: bool
) -> Val:
    """torch scatters the part of src that index covers."""
    v, i = c.v(x), c.v(index)
    s = c.cast(c.v(src), v.dtype)
    if v.rank == 0 or how == "prod" or v.dtype == BOOL:
        raise NotHere(f"scatter_reduce '{how}' of {v.dtype} with {v.rank} axes")
    if how == "mean" and not v.dtype.is_floating_point:
        raise NotHere("scatter_reduce 'mean' of integers")
    axis = dim % v.rank
    if s.shape != i.shape:
        for a in range(s.rank):
            s = c.slice(s, a, 0, i.shape[a], 1, i.shape[a])
        s = c.b.op("Reshape", [s, c.b.dims(i.shape)], s.dtype, i.shape)
    zero = c.fill(0, v.dtype, i.shape)
    if how in ("sum", "mean"):
        y = _put(c, v if include else _put(c, v, i, zero, axis, "none"), i, s, axis, "add")
        if how == "sum":
            return y
        wide = v.dtype if v.dtype == F64 else torch.float32
        one, ones = c.scalar(1, wide), c.fill(1, wide, i.shape)
        count = _put(c, c.fill(1 if include else 0, wide, v.shape), i, ones, axis, "add")
        return c.cast(c.op2("Div", c.cast(y, wide), c.op2("Max", count, one)), v.dtype)
    further = {"amax": "max", "amin": "min"}[how]
    if include:
        return _put(c, v, i, s, axis, further)
    if not v.dtype.is_floating_point:
        raise NotHere(f"scatter_reduce '{how}' of integers without their own values")
    # torch's gradient counts elements of x that equal the result, though they have no part in it
    worst = c.fill(float("-inf") if further == "max" else float("inf"), v.dtype, i.shape)
    stopped = [c.b.op("StopGradient", [t], t.dtype, t.shape, "ortmodule") for t in (v, s)]
    y = _put(c, _put(c, stopped[0], i, worst, axis, "none"), i, stopped[1], axis, further)
    hit, of_src = c.compare("Equal", stopped[0], y), c.compare("Equal", stopped[1], _at(c, y, i, axis))
    count = _put(c, c.cast(hit, v.dtype), i, c.cast(of_src, v.dtype), axis, "add")
    share = c.op2("Div", c.scalar(1, v.dtype), c.op2("Max", count, c.scalar(1, v.dtype)))
    share = c.b.op("StopGradient", [share], share.dtype, share.shape, "ortmodule")
    none = c.scalar(0, v.dtype)
    own = _put(c, c.where(hit, c.op2("Mul", v, share), none), i, zero, axis, "none")
    path = _put(c, own, i, c.where(of_src, c.op2("Mul", s, _at(c, share, i, axis)), none), axis, "add")
    return c.b.op("StraightThrough", [y, path], v.dtype, v.shape, "ortmodule")


@row("masked_scatter")
def masked_scatter(c: Converter, n: Node, x: Node, mask: Node, src: Node) -> Val:
    """The k-th place of the mask takes element k of src."""
    out = shape_of(n.val)
    v, m, s = c.expand(c.v(x), out), c.expand(c.v(mask), out), c.v(src)
    flat = c.reshape(s, (expr_of(numel(s.shape)),))
    if numel(s.shape) == 0:
        raise NotHere("masked_scatter from nothing")
    all_: Any = expr_of(numel(out))
    one = c.scalar(1, I64)
    k = c.b.op("CumSum", [c.reshape(c.cast(m, I64), (all_,)), c.b.constant(0, I64)], I64, (all_,))
    k = c.where(c.reshape(m, (all_,)), c.op2("Sub", k, one), c.scalar(0, I64))
    taken = c.no_negative(c.b.op("Gather", [flat, k], s.dtype, (all_,), axis=0))
    return c.where(m, c.reshape(taken, out), v)


@row("histc")
def histc(c: Converter, n: Node, x: Node, bins: int, low: Any, high: Any) -> Val:
    """Counts as torch places elements: (x - low) * bins / (high - low), the last bin closed, others left out."""
    v = c.v(x)
    if not all(isinstance(i, (int, float)) for i in (bins, low, high)) or low >= high or v.dtype not in (
        torch.float32, F64
    ):  # fmt: skip
        raise NotHere("histc over the range of its data, or of a type that PyTorch does not count")
    v = c.reshape(v, (expr_of(numel(v.shape)),))
    left, right = c.scalar(low, v.dtype), c.scalar(high, v.dtype)
    inside = c.op2("And", c.compare("GreaterOrEqual", v, left), c.compare("LessOrEqual", v, right))
    place = c.op2("Mul", c.op2("Sub", c.where(inside, v, left), left), c.scalar(bins, v.dtype))
    place = c.cast(c.op2("Div", place, c.op2("Sub", right, left)), I64)
    place = c.where(inside, c.op2("Min", place, c.scalar(bins - 1, I64)), c.scalar(bins, I64))
    count = _put(c, c.fill(0, v.dtype, (bins + 1,)), place, c.fill(1, v.dtype, v.shape), 0, "add")
    count = c.b.op("StopGradient", [count], count.dtype, count.shape, "ortmodule")
    return c.slice(count, 0, 0, bins, 1, bins)


# --- bags -----------------------------------------------------------------------------------------


@row("embedding_bag.padding_idx", "embedding_bag")
def embedding_bag(
    c: Converter, n: Node, w: Node, index: Node, offsets: Node, by_freq: bool, mode: int, sparse: bool,
    weights: Node | None, last: bool, padding: int | None = None,
) -> list[Any]:  # fmt: skip
    """Rows are gathered and added up by bag; which bag an index is in: how many bags have begun."""
    if by_freq or sparse or any(c.reads(n, k) for k in (1, 2, 3)):
        raise NotHere("embedding_bag with scale_grad_by_freq, sparse gradients or its bags' sizes read")
    table, i, begin = c.num(w, n.val[0].dtype), c.cast(c.v(index), I64), c.cast(c.v(offsets), I64)
    dtype, size, count = table.dtype, table.shape[1], i.shape[0]
    bags = begin.shape[0] - 1 if last else begin.shape[0]
    bags = expr_of(bags)
    begin = c.slice(begin, 0, 0, bags, 1, bags)
    one = c.scalar(1, I64)
    starts = c.b.op(
        "ScatterElements", [c.fill(0, I64, (expr_of(count + 1),)), begin, c.fill(1, I64, (bags,))], I64,
        (expr_of(count + 1),), axis=0, reduction="add",
    )  # fmt: skip
    bag = c.b.op("CumSum", [c.slice(starts, 0, 0, count, 1, count), c.b.constant(0, I64)], I64, (count,))
    bag = c.op2("Sub", bag, one)
    wide = c.expand(c.unsqueeze(bag, [1]), (count, size))
    rows = c.no_negative(c.b.op("Gather", [table, i], dtype, (count, size), axis=0))
    zero = c.scalar(0, dtype)
    kept = None
    if padding is not None and padding != -1:
        rows_of = table.shape[0]
        padding = expr_of(padding)
        if not isinstance(padding, int) or not isinstance(rows_of, int):
            raise NotHere("embedding_bag whose padding index is a symbolic size")
        kept = c.un("Not", c.compare("Equal", i, c.scalar(padding % rows_of, I64)))
    empty = c.fill(0, dtype, (bags, size))
    if mode != 2:
        if weights is not None:
            rows = c.op2("Mul", rows, c.unsqueeze(c.num(weights, dtype), [1]))
        if kept is not None:
            rows = c.where(c.unsqueeze(kept, [1]), rows, zero)
        y = _put(c, empty, wide, rows, 0, "add")
        if mode == 1:
            each = c.fill(1, dtype, (count,)) if kept is None else c.cast(kept, dtype)
            total = _put(c, c.fill(0, dtype, (bags,)), bag, each, 0, "add")
            y = c.op2("Div", y, c.unsqueeze(c.op2("Max", total, c.scalar(1, dtype)), [1]))
        return [y, None, None, None]
    # the first of the largest: its place is found, then its row's element taken, with all of the gradient
    seen = c.b.op("StopGradient", [rows], dtype, rows.shape, "ortmodule")
    if kept is not None:
        seen = c.where(c.unsqueeze(kept, [1]), seen, c.scalar(float("-inf"), dtype))
    top = _put(c, c.fill(float("-inf"), dtype, (bags, size)), wide, seen, 0, "max")
    hit = c.compare("Equal", seen, _at(c, top, wide, 0))
    if kept is not None:
        hit = c.op2("And", hit, c.unsqueeze(kept, [1]))
    end = c.symbolic(count)
    place = c.where(hit, c.unsqueeze(c.range(count), [1]), end)
    first = _put(c, c.expand(end, (bags, size)), wide, c.expand(place, (count, size)), 0, "min")
    some = c.compare("Less", first, end)
    y = _at(c, rows, c.where(some, first, c.scalar(0, I64)), 0)
    return [c.where(some, y, zero), None, None, None]
