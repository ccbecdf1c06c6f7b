"""Rows of the operator table that reduce: sums, extrema, truth of any and all, variances, norms."""

from __future__ import annotations

from typing import Any

import torch

from .convert import BOOL, F32, I64, Converter, NotHere, holds, row, wide_of
from .onnx_build import Val, expr_of, shape_of
from .ops_math import test
from .ops_shape import numel
from .program import Node


def _axes(dim: Any) -> list[int] | None:
    return None if dim is None or dim == [] else list(dim) if isinstance(dim, (list, tuple)) else [dim]


@row("sum", "sum.dim_IntList")
def sum_(c: Converter, n: Node, x: Node, dim: Any = None, keep: Any = False, dtype: Any = None) -> Val:
    if n.target._overloadname in ("", "default"):
        dim, keep = None, False
    return c.reduce("ReduceSum", c.num(x, n.val.dtype), _axes(dim), bool(keep))


@row("mean", "mean.dim")
def mean(c: Converter, n: Node, x: Node, dim: Any = None, keep: Any = False, dtype: Any = None) -> Val:
    if n.target._overloadname in ("", "default"):
        dim, keep = None, False
    return c.reduce("ReduceMean", c.num(x, n.val.dtype), _axes(dim), bool(keep))


@row("prod", "prod.dim_int")
def prod(c: Converter, n: Node, x: Node, dim: Any = None, keep: Any = False, dtype: Any = None) -> Val:
    if n.target._overloadname in ("", "default"):
        dim, keep = None, False
    return c.reduce("ReduceProd", c.num(x, n.val.dtype), _axes(dim), bool(keep))


def _some(x: Node, axes: list[int] | None) -> None:
    """PyTorch raises where an extremum is taken of nothing."""
    sizes = x.val.shape
    if any(holds(sizes[a] == 0) for a in (range(len(sizes)) if axes is None else axes if len(sizes) else ())):
        raise NotHere("an extremum of nothing, where PyTorch may raise")


@row("amax", "amin")
def amax(c: Converter, n: Node, x: Node, dim: Any, keep: bool) -> Val:
    _some(x, _axes(dim))
    return c.reduce("ReduceMax" if "amax" in str(n.target) else "ReduceMin", c.v(x), _axes(dim), keep)


@row("max", "min")
def max_all(c: Converter, n: Node, x: Node) -> Val:
    """Where amax gives every element a gradient of NaN when one is NaN, all that are NaN share it here."""
    v = c.v(x)
    _some(x, None)
    y = c.reduce("ReduceMax" if n.target._schema.name == "aten::max" else "ReduceMin", v, None, False)
    if not v.dtype.is_floating_point or not n.grad or not c.exported.grad_mode:
        return y
    wide = wide_of(v.dtype)
    hit = c.op2("Or", c.compare("Equal", c.stop(v), c.stop(y)), test(c, "IsNaN", c.stop(v)), BOOL)
    total = c.reduce("ReduceSum", c.cast(c.where(hit, v, c.scalar(0, v.dtype)), wide), None, False)
    share = c.cast(c.op2("Div", total, c.reduce("ReduceSum", c.cast(hit, wide), None, False)), v.dtype)
    return c.b.op("StraightThrough", [c.stop(y), share], v.dtype, (), "ortmodule")


@row("max.dim", "min.dim")
def max_dim(c: Converter, n: Node, x: Node, dim: int, keep: bool) -> list[Val]:
    """Values are gathered at the index found: the whole gradient goes to that element."""
    v = c.v(x)
    _some(x, [dim])
    if v.rank == 0:
        return [v, c.b.constant(0, I64)]
    dim %= v.rank
    shape = tuple(1 if i == dim else d for i, d in enumerate(v.shape))
    op = "ArgMax" if n.target._schema.name == "aten::max" else "ArgMin"
    where = c.b.op(op, [v], I64, shape, axis=dim, keepdims=1)
    values = c.b.op("GatherElements", [v, where], v.dtype, shape, axis=dim)
    return [values, where] if keep else [c.squeeze(values, [dim]), c.squeeze(where, [dim])]


@row("argmax", "argmin")
def argmax(c: Converter, n: Node, x: Node, dim: Any, keep: bool) -> Val:
    v = c.v(x)
    _some(x, _axes(dim))
    if dim is None or v.rank == 0:
        v, dim, keep = c.reshape(v, (numel(v.shape),)), 0, False
    return c.b.op(
        "ArgMax" if "argmax" in str(n.target) else "ArgMin",
        [v],
        I64,
        shape_of(n.val),
        axis=dim % v.rank,
        keepdims=int(keep),
    )


@row("any", "any.dim", "any.dims", "all", "all.dim", "all.dims", "_is_all_true", "_is_any_true")
def any_(c: Converter, n: Node, x: Node, dim: Any = None, keep: Any = False) -> Val:
    if n.val.dtype != BOOL:
        raise NotHere("any/all on bytes")
    v = c.cast(c.num(x, BOOL), I64)
    found = n.target._schema.name in ("aten::any", "aten::_is_any_true")
    out = c.reduce("ReduceMax" if found else "ReduceMin", v, _axes(dim), bool(keep))
    # the maximum of nothing is the lowest integer, not False
    if found and not all(isinstance(d, int) and d > 0 for d in v.shape):
        out = c.op2("Max", out, c.b.constant(0, I64))
    return c.cast(out, BOOL)


@row("cumsum")
def cumsum(c: Converter, n: Node, x: Node, dim: int, *_: Any) -> Val:
    v = c.num(x, n.val.dtype)
    return v if v.rank == 0 else c.b.op("CumSum", [v, c.b.constant(dim % v.rank, I64)], v.dtype, v.shape)


@row("logsumexp")
def logsumexp(c: Converter, n: Node, x: Node, dim: Any, keep: bool) -> Val:
    return c.reduce("ReduceLogSumExp", c.num(x, n.val.dtype), _axes(dim), keep)


def _variance(c: Converter, v: Val, dim: Any, correction: Any, keep: bool) -> tuple[Val, Val]:
    axes = _axes(dim)
    axes = list(range(v.rank)) if axes is None else [a % v.rank for a in axes]
    mean = c.reduce("ReduceMean", v, axes, True)
    d = c.op2("Sub", v, mean)
    total = c.reduce("ReduceSum", c.op2("Mul", d, d), axes, keep)
    if v.dtype == F32:  # torch sums in float64: beside a large mean, what that has lost by rounding counts
        lost = c.op2("Mul", c.reduce("ReduceSum", d, axes, keep), c.reduce("ReduceMean", d, axes, keep))
        total = c.op2("Max", c.op2("Sub", total, lost), c.scalar(0, v.dtype))
    count: Any = 1
    for a in axes:
        count = count * v.shape[a]
    count = expr_of(count)
    correction = 1 if correction is None else correction
    if isinstance(count, int):
        if count < correction or count == correction != 1:  # its gradient divides by another number than it does
            raise NotHere("a variance of fewer elements than its correction")
        divisor = c.b.constant(count - correction, v.dtype)
    else:
        if correction > 1:
            raise NotHere("a variance of perhaps fewer elements than its correction")
        divisor = c.op2("Max", c.cast(c.symbolic(count - correction), v.dtype), c.scalar(0, v.dtype))
    return c.op2("Div", total, divisor), mean if keep else c.squeeze(mean, axes)


@row(
    "var.dim",
    "var.correction",
    "var",
    "std.dim",
    "std.correction",
    "std",
    "var_mean.correction",
    "std_mean.correction",
    "var_mean.dim",
    "std_mean.dim",
    "var_mean",
    "std_mean",
)
def var(c: Converter, n: Node, x: Node, *args: Any) -> Any:
    over, name = n.target._overloadname, n.target._schema.name
    if over in ("", "default"):
        dim, correction, keep = None, int(args[0] if args else True), False
    elif over == "dim":
        dim, correction, keep = args[0], int(args[1]), args[2]
    else:
        dim, correction, keep = args[0], args[1], args[2]
    dtype = (n.val if isinstance(n.val, torch.Tensor) else n.val[0]).dtype
    v, m = _variance(c, c.num(x, wide_of(dtype)), dim, correction, bool(keep))
    if "std" in name:  # where nothing varies the gradient is 0, not that of a root at 0
        zero = c.compare("Equal", v, c.scalar(0, v.dtype))
        v = c.where(zero, c.scalar(0, v.dtype), c.un("Sqrt", c.where(zero, c.scalar(1, v.dtype), v)))
    v, m = c.cast(v, dtype), c.cast(m, dtype)
    return [v, m] if name.endswith("_mean") else v


@row("linalg_vector_norm")
def vector_norm(c: Converter, n: Node, x: Node, order: Any, dim: Any, keep: bool, *_: Any) -> Val:
    v = c.num(x, n.val.dtype)
    op = {1: "ReduceL1", 2: "ReduceL2"}.get(order)
    if op is None:
        raise NotHere(f"vector norm of order {order}")
    return c.reduce(op, v, _axes(dim), keep)


@row("norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def norm(c: Converter, n: Node, x: Node, order: Any, dim: Any = None, keep: Any = False, *_: Any) -> Val:
    if order not in (1, 2, None):
        raise NotHere(f"norm of order {order}")
    return c.reduce("ReduceL1" if order == 1 else "ReduceL2", c.num(x, n.val.dtype), _axes(dim), bool(keep))
