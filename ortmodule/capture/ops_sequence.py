"""Rows of the operator table for sequences and groups: CTC loss, products of groups of rows (experts), places in sorted
rows, logarithms of running sums.

CTC loss does not run on tensors without values, so it comes as an opaque call; and the targets of a batch are often
picked by a mask, so that their number depends on data. `ctc_into_graph` makes one node of both, whose sizes are known.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .. import torch_private as private
from . import opaque
from .convert import I64, Converter, NotHere, row
from .export import Exported
from .onnx_build import Val
from .program import Node, Program

CTC = "ctc_loss"
_PICKS = (torch.ops.aten.masked_select.default, torch.ops.aten.index.Tensor)


def ctc_into_graph(program: Program, exported: Exported) -> None:
    """Calls of torch.ctc_loss become nodes of their own, as far as the engine has them."""
    users: dict[Node, list[Node]] = {}
    for n in program.nodes:
        for i in n.inputs():
            users.setdefault(i, []).append(n)
    kept = {n for n in program.outputs if isinstance(n, Node)} | {n for _, n in program.writes}
    kept |= set(program.item_of.values())
    gone: set[Node] = set()
    for n in program.nodes:
        if n.target is not opaque.HOST or exported.table.rows[n.args[1]].arguments is None:
            continue
        xs, index = n.args
        arguments = exported.table.rows[index].arguments
        assert arguments is not None
        a, k = arguments(list(xs))
        given = inspect.signature(opaque.like_ctc).bind(*a, **k)
        given.apply_defaults()
        x, targets, inputs, lengths, blank, reduction, zero = given.args
        valid, picked = None, targets
        of = _picked(targets)
        if of is not None and users[targets] == [n] and targets not in kept:
            gone.add(targets)
            targets, valid = of
        known = targets.val.dim() in (1, 2) and not private.free_unbacked_symbols(targets.val)
        if not known or x.val.dim() != 3 or x.val.dtype not in (torch.float32, torch.float64):
            gone.discard(picked)
            continue
        if not all(isinstance(t, (Node, list, tuple)) for t in (inputs, lengths)) or not isinstance(blank, int):
            gone.discard(picked)
            continue
        n.target, n.args = CTC, (x, targets, valid, inputs, lengths, blank, reduction, bool(zero))
        n.val = list(n.val)
    program.nodes = [n for n in program.nodes if n not in gone]


def _picked(n: Any) -> tuple[Node, Node] | None:
    """Of masked_select(x, mask) and x[mask], where the mask has the shape of x: both."""
    if not isinstance(n, Node) or n.target not in _PICKS:
        return None
    x, mask = n.args[:2]
    mask = mask[0] if isinstance(mask, (list, tuple)) and len(mask) == 1 else mask
    if not isinstance(mask, Node) or mask.val.dtype != torch.bool or x.val.dim() not in (1, 2):
        return None
    return (x, mask) if tuple(x.val.shape) == tuple(mask.val.shape) else None


@row(CTC)
def ctc(
    c: Converter, n: Node, x: Node, targets: Node, valid: Node | None, inputs: Any, lengths: Any, blank: int,
    reduction: int, zero: bool,
) -> list[Val]:  # fmt: skip
    v = c.v(x)
    rows = v.shape[1]

    def counts(t: Any) -> Val:
        if not isinstance(t, Node):
            return c.b.dims(list(t))
        return c.reshape(c.cast(c.v(t), I64), (rows,))

    length = counts(lengths)
    ins: list[Val | None] = [v, c.cast(c.v(targets), I64), counts(inputs), length]
    ins += [] if valid is None else [c.v(valid)]
    loss = c.b.op("CTCLoss", ins, v.dtype, (rows,), "ortmodule", blank=blank, zero_infinity=int(zero))
    if reduction == 1:
        each = c.cast(c.op2("Max", length, c.scalar(1, I64)), v.dtype)
        return [c.reduce("ReduceMean", c.op2("Div", loss, each), [0], False)]
    return [loss if reduction == 0 else c.reduce("ReduceSum", loss, [0], False)]


@row("transformers::grouped_mm_fallback", "_grouped_mm")
def grouped_matmul(c: Converter, n: Node, x: Node, w: Node, ends: Node | None, *more: Any) -> Val:
    a, b = c.v(x), c.v(w)
    if a.rank != 2 or b.rank != 3 or ends is None or any(m is not None for m in more) or a.dtype != b.dtype:
        raise NotHere("a grouped product other than of rows with a matrix for each group")
    return c.b.op("GroupedMatMul", [a, b, c.cast(c.v(ends), I64)], a.dtype, (a.shape[0], b.shape[2]), "ortmodule")


@row("logcumsumexp")
def logcumsumexp(c: Converter, n: Node, x: Node, dim: int) -> Val:
    v = c.v(x)
    if v.rank == 0:
        return v
    dim, last = dim % v.rank, v.rank - 1
    turned = c.swap(v, dim, last)
    return c.swap(c.b.op("LogCumSumExp", [turned], v.dtype, turned.shape, "ortmodule"), dim, last)


def _places(c: Converter, n: Node, ordered: Val, v: Val, right: bool) -> Val:
    if v.dtype != ordered.dtype or v.dtype in (torch.float16, torch.bfloat16, torch.bool) or ordered.rank == 0:
        raise NotHere("searchsorted of mixed types or in low precision")
    at = c.b.op("SearchSorted", [ordered, v], I64, v.shape, "ortmodule", right=int(right))
    return c.cast(at, n.val.dtype)


@row("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    c: Converter, n: Node, ordered: Node, x: Any, _int32: bool, right: bool, side: str | None, sorter: Node | None
) -> Val:
    if sorter is not None:
        raise NotHere("searchsorted with a sorter")
    row_ = c.v(ordered)
    return _places(c, n, row_, c.num(x, row_.dtype) if not isinstance(x, Node) else c.v(x), right or side == "right")


@row("bucketize.Tensor", "bucketize.Scalar")
def bucketize(c: Converter, n: Node, x: Any, ordered: Node, _int32: bool, right: bool) -> Val:
    row_ = c.v(ordered)
    return _places(c, n, row_, c.num(x, row_.dtype) if not isinstance(x, Node) else c.v(x), right)
