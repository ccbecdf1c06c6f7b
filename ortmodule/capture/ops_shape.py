"""Rows of the operator table that move, view, create or index: no arithmetic on values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import torch_private as private
from .convert import BOOL, F64, I64, INT_MAX, Converter, NotHere, broadcast, holds, row
from .onnx_build import Val, expr_of, shape_of
from .program import COPY, FILL, STOP, THROUGH, ZERO, Node


@row(STOP, "detach", "alias_copy.detach")
def stop(c: Converter, n: Node, x: Node) -> Val:
    return c.stop(c.v(x))


@row(ZERO)
def zero(c: Converter, n: Node, value: Node, *xs: Node) -> Val:
    return c.zero(c.v(value), *[c.v(x) for x in xs])


@row(THROUGH)
def through(c: Converter, n: Node, value: Node, x: Node) -> Val:
    v = c.v(value)
    return c.b.op("StraightThrough", [v, c.v(x)], v.dtype, v.shape, "ortmodule")


@row(COPY)
def copy(c: Converter, n: Node, source: Any) -> Val:
    return c.expand(c.num(source, n.val.dtype), shape_of(n.val))


@row(FILL)
def fill(c: Converter, n: Node, value: Any) -> Val:
    return c.fill(value, n.val.dtype, shape_of(n.val))


@row(
    "clone",
    "contiguous",
    "alias",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "to.dtype",
    "to.device",
    "to.dtype_layout",
    "to.other",
    "to.prim_Device",
    "to.prim_dtype",
    "to.prim_other",
    "_to_copy",
    "type_as",
    "positive",
    "resolve_conj",
    "resolve_neg",
    "pin_memory",
)
def to(c: Converter, n: Node, x: Node, *_: Any) -> Val:
    return c.cast(c.v(x), n.val.dtype)


@row(
    "view",
    "reshape",
    "_unsafe_view",
    "view_as",
    "reshape_as",
    "flatten.using_ints",
    "unflatten.int",
    "ravel",
    "reshape_to",
    "_reshape_alias",
    "view_copy",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
)
def reshape(c: Converter, n: Node, x: Node, *_: Any) -> Val:
    return c.reshape(c.v(x), shape_of(n.val))


@row("unsqueeze")
def unsqueeze(c: Converter, n: Node, x: Node, dim: int) -> Val:
    return c.unsqueeze(c.v(x), [dim % (c.v(x).rank + 1)])


@row("squeeze", "squeeze.dim", "squeeze.dims")
def squeeze(c: Converter, n: Node, x: Node, *dims: Any) -> Val:
    v = c.v(x)
    if not dims:
        axes = [i for i, d in enumerate(v.shape) if d == 1]
    else:
        given = dims[0] if isinstance(dims[0], (list, tuple)) else [dims[0]]
        axes = sorted(d % v.rank for d in given if v.rank and v.shape[d % v.rank] == 1)
    return c.squeeze(v, axes)


@row("transpose.int", "swapaxes", "swapdims")
def transpose(c: Converter, n: Node, x: Node, a: int, b: int) -> Val:
    v = c.v(x)
    return v if v.rank == 0 else c.swap(v, a % v.rank, b % v.rank)


@row("t", "numpy_T", "mT", "adjoint", "matrix_H", "t_copy")
def matrix_transpose(c: Converter, n: Node, x: Node) -> Val:
    v = c.v(x)
    if n.target._schema.name in ("aten::t", "aten::t_copy", "aten::numpy_T"):
        return c.transpose(v, list(range(v.rank))[::-1])
    return c.swap(v, v.rank - 2, v.rank - 1)


@row("permute")
def permute(c: Converter, n: Node, x: Node, dims: Sequence[int]) -> Val:
    v = c.v(x)
    return c.transpose(v, [d % v.rank for d in dims])


@row("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def movedim(c: Converter, n: Node, x: Node, source: Any, to: Any) -> Val:
    v = c.v(x)
    src = [s % v.rank for s in (source if isinstance(source, (list, tuple)) else [source])]
    dst = [d % v.rank for d in (to if isinstance(to, (list, tuple)) else [to])]
    rest = iter(i for i in range(v.rank) if i not in src)
    return c.transpose(v, [src[dst.index(i)] if i in dst else next(rest) for i in range(v.rank)])


@row("expand", "expand_as", "broadcast_to")
def expand(c: Converter, n: Node, x: Node, *_: Any) -> Val:
    return c.expand(c.v(x), shape_of(n.val))


@row("broadcast_tensors", "meshgrid", "meshgrid.indexing")
def broadcast_tensors(c: Converter, n: Node, xs: Sequence[Node], *_: Any) -> list[Val]:
    if "meshgrid" in str(n.target):
        shape = shape_of(n.val[0])
        out = []
        for i, x in enumerate(xs):
            axis = i if not _ or _[0] == "ij" else {0: 1, 1: 0}.get(i, i)
            v = c.reshape(c.v(x), (c.v(x).shape[0] if c.v(x).rank else 1,))
            out.append(c.expand(c.unsqueeze(v, [j for j in range(len(shape)) if j != axis]), shape))
        return out
    return [c.expand(c.v(x), shape_of(t)) for x, t in zip(xs, n.val, strict=True)]


def sympify(size: Any) -> Any:
    from sympy import sympify  # takes longer to import than all the rest of this package

    return sympify(size)


def _bounds(size: Any, start: Any, end: Any) -> tuple[Any, Any]:
    """Slice bounds as ONNX reads them; clamped numbers when all is known."""
    start = 0 if start is None else expr_of(start)
    end = INT_MAX if end is None else expr_of(end)
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        start = min(max(start + size if start < 0 else start, 0), size)
        end = min(max(end + size if end < 0 else end, start), size)
    return start, end


@row("slice.Tensor", "slice_copy.Tensor")
def slice_(c: Converter, n: Node, x: Node, dim: int, start: Any, end: Any, step: int) -> Val:
    v = c.v(x)
    dim %= v.rank
    start, end = _bounds(v.shape[dim], start, end)
    return c.slice(v, dim, start, end, step, shape_of(n.val)[dim])


@row("narrow")
def narrow(c: Converter, n: Node, x: Node, dim: int, start: Any, length: Any) -> Val:
    v = c.v(x)
    dim %= v.rank
    start = expr_of(start)
    if isinstance(start, int) and start < 0:
        start = expr_of(v.shape[dim] + start)
    return c.slice(v, dim, start, expr_of(start + expr_of(length)), 1, expr_of(length))


@row("select.int", "select_copy.int")
def select(c: Converter, n: Node, x: Node, dim: int, index: Any) -> Val:
    v = c.v(x)
    dim %= v.rank
    index = expr_of(index)
    if isinstance(index, int) and index < 0:
        start, end = (
            (index + v.shape[dim], index + v.shape[dim] + 1)
            if isinstance(v.shape[dim], int)
            else (index, index + 1 or INT_MAX)
        )
    else:
        start, end = index, expr_of(index + 1)
    return c.squeeze(c.slice(v, dim, start, end, 1, 1), [dim])


def _slice_length(size: Any, start: Any, end: Any, step: int) -> Any:
    """Of x[start:end:step]."""

    def place(i: Any, default: Any) -> Any:
        if i is None:
            return default
        return torch.sym_max(i + size, 0) if holds(i < 0) else torch.sym_min(i, size)

    return torch.sym_max((place(end, size) - place(start, 0) + step - 1) // step, 0)


@row("slice_scatter")
def slice_scatter(c: Converter, n: Node, x: Node, src: Node, dim: int, start: Any, end: Any, step: int) -> Val:
    """Written as pieces put together when the step is 1, else as a scatter along the axis."""
    v = c.v(x)
    dim %= v.rank
    size = v.shape[dim]
    if holds(_slice_length(x.val.shape[dim], start, end, step) != src.val.shape[dim]):
        raise NotHere("slice_scatter of another size than the slice, which PyTorch refuses")
    start, end = _bounds(size, start, end)
    new = c.cast(c.v(src), v.dtype)
    if step == 1:
        length = new.shape[dim]
        if start == 0 and length == size:
            return c.zero(new, v)
        if isinstance(start, int) and start < 0:
            start = expr_of(size + start)
        after = expr_of(start + length)
        parts = []
        if start != 0:
            parts.append(c.slice(v, dim, 0, start, 1, start))
        parts.append(new)
        if after != size:
            parts.append(c.slice(v, dim, after, INT_MAX, 1, expr_of(size - after)))
        return c.concat(parts, dim)
    if not isinstance(start, int) or not isinstance(new.shape[dim], int):
        raise NotHere("slice_scatter with a step and symbolic bounds")
    index = c.b.constant([start + step * i for i in range(new.shape[dim])], I64)
    index = c.expand(c.unsqueeze(index, [i for i in range(v.rank) if i != dim]), new.shape)
    return c.b.op("ScatterElements", [v, index, new], v.dtype, v.shape, axis=dim)


@row("select_scatter")
def select_scatter(c: Converter, n: Node, x: Node, src: Node, dim: int, index: Any) -> Val:
    v = c.v(x)
    dim %= v.rank
    if holds(index >= x.val.shape[dim]) or holds(index < -x.val.shape[dim]):
        raise NotHere("select_scatter behind the last row, which PyTorch refuses")
    index = expr_of(index)
    if isinstance(index, int) and index < 0:
        index = expr_of(v.shape[dim] + index)
    new = c.unsqueeze(c.cast(c.v(src), v.dtype), [dim])
    after = expr_of(index + 1)
    parts = [c.slice(v, dim, 0, index, 1, index)] if index != 0 else []
    parts.append(new)
    if after != v.shape[dim]:
        parts.append(c.slice(v, dim, after, INT_MAX, 1, expr_of(v.shape[dim] - after)))
    return c.zero(new, v) if len(parts) == 1 else c.concat(parts, dim)


@row(
    "split.Tensor",
    "split_with_sizes",
    "split.sizes",
    "chunk",
    "tensor_split.sections",
    "tensor_split.indices",
    "unbind.int",
    "unsafe_chunk",
    "unsafe_split.Tensor",
)
def split(c: Converter, n: Node, x: Node, *rest: Any) -> list[Val]:
    v = c.v(x)
    name = n.target._schema.name
    unbind = name == "aten::unbind"
    dim = (rest[0] if unbind else rest[1]) % v.rank
    sizes = [1] * len(n.val) if unbind else [shape_of(t)[dim] for t in n.val]
    types = [(v.dtype, (*v.shape[:dim], s, *v.shape[dim + 1 :])) for s in sizes]
    if len(sizes) == 1:
        out = [v]
    else:
        out = c.b.ops("Split", [v, c.b.dims(sizes)], types, axis=dim)
    return [c.squeeze(o, [dim]) for o in out] if unbind else out


@row("cat", "concat", "concatenate")
def cat(c: Converter, n: Node, xs: Sequence[Node], dim: int) -> Val:
    dtype = n.val.dtype
    parts = [c.v(x) for x in xs]
    rank = n.val.dim()
    dim %= max(rank, 1)
    same = [p for p in parts if p.rank == rank]  # an empty vector may stand among tensors of any rank
    kept = [p for p in same if p.shape[dim] != 0] or same[:1]
    out = c.concat([c.cast(p, dtype) for p in kept], dim)
    return c.zero(out, *[p for p in parts if p not in kept])


@row("stack")
def stack(c: Converter, n: Node, xs: Sequence[Node], dim: int) -> Val:
    dim %= n.val.dim()
    return c.concat([c.unsqueeze(c.cast(c.v(x), n.val.dtype), [dim]) for x in xs], dim)


@row("repeat")
def repeat(c: Converter, n: Node, x: Node, repeats: Sequence[Any]) -> Val:
    v = c.v(x)
    v = c.unsqueeze(v, list(range(len(repeats) - v.rank)))
    if all(isinstance(r, int) and r == 1 for r in repeats):
        return v
    return c.b.op("Tile", [v, c.b.dims([expr_of(r) for r in repeats])], v.dtype, shape_of(n.val))


@row("tile")
def tile(c: Converter, n: Node, x: Node, dims: Sequence[Any]) -> Val:
    return repeat(c, n, x, [1] * (c.v(x).rank - len(dims)) + list(dims))


@row("repeat_interleave.self_int")
def repeat_interleave(c: Converter, n: Node, x: Node, repeats: Any, dim: Any, output_size: Any = None) -> Val:
    v = c.v(x)
    if dim is None:
        v, dim = c.reshape(v, (numel(v.shape),)), 0
    dim %= v.rank
    wide = c.unsqueeze(v, [dim + 1])
    wide = c.expand(wide, (*wide.shape[: dim + 1], expr_of(repeats), *wide.shape[dim + 2 :]))
    return c.reshape(wide, shape_of(n.val))


@row("roll")
def roll(c: Converter, n: Node, x: Node, shifts: Any, dims: Any) -> Val:
    v = c.v(x)
    shape = v.shape
    shifts = list(shifts) if isinstance(shifts, (list, tuple)) else [shifts]
    if not dims:
        v, dims = c.reshape(v, (numel(shape),)), [0]
    for s, d in zip(map(expr_of, shifts), dims, strict=True):
        d %= v.rank
        size = v.shape[d]
        if isinstance(size, int) and isinstance(s, int):
            cut = -s % max(size, 1)
        elif s.could_extract_minus_sign() if not isinstance(s, int) else s < 0:
            cut = private.Mod(sympify(-s), size)
        else:
            cut = expr_of(size - private.Mod(sympify(s), size))
        if cut != 0:  # the part before the cut goes behind the rest
            v = c.concat([c.slice(v, d, cut, INT_MAX, 1, expr_of(size - cut)), c.slice(v, d, 0, cut, 1, cut)], d)
    return c.reshape(v, shape)


def _flipped(c: Converter, v: Val, axes: Sequence[int]) -> Val:
    m = len(axes)
    if not m:
        return v
    return c.b.op(
        "Slice", [v, c.axes([-1] * m), c.axes([-INT_MAX] * m), c.axes(axes), c.axes([-1] * m)], v.dtype, v.shape
    )


@row("flip")
def flip(c: Converter, n: Node, x: Node, dims: Sequence[int]) -> Val:
    return _flipped(c, c.v(x), [d % c.v(x).rank for d in dims])


def _edges(c: Converter, v: Val, axis: int, lo: Any, hi: Any, mode: str) -> Val:
    """One axis made longer by its own elements."""
    size = v.shape[axis]

    def part(start: Any, length: Any) -> Val:
        return c.slice(v, axis, start, expr_of(start + length), 1, length)

    if mode == "replicate":
        wide = [
            c.expand(part(at, 1), (*v.shape[:axis], k, *v.shape[axis + 1 :]))
            for at, k in ((0, lo), (expr_of(size - 1), hi))
        ]
    elif mode == "reflect":
        wide = [_flipped(c, part(1, lo), [axis]), _flipped(c, part(expr_of(size - 1 - hi), hi), [axis])]
    else:
        wide = [part(expr_of(size - lo), lo), part(0, hi)]
    return c.concat([*wide[:1] * (lo != 0), v, *wide[1:] * (hi != 0)], axis)


@row(
    "constant_pad_nd",
    "pad",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "_pad_circular",
)
def pad(c: Converter, n: Node, x: Node, pads: Sequence[Any], *rest: Any) -> Val:
    v = c.v(x)
    name = n.target._schema.name.removeprefix("aten::")
    mode = (
        rest[0]
        if name == "pad"
        else {"ref": "reflect", "rep": "replicate", "_pa": "circular"}.get(name[:3], "constant")
    )
    lo, hi = [0] * v.rank, [0] * v.rank
    for i in range(len(pads) // 2):
        lo[v.rank - 1 - i], hi[v.rank - 1 - i] = expr_of(pads[2 * i]), expr_of(pads[2 * i + 1])
    if mode != "constant":
        if not all(isinstance(p, int) and p >= 0 for p in lo + hi):
            raise NotHere(f"{mode} padding by a negative or symbolic width")
        for axis in range(v.rank):
            v = _edges(c, v, axis, lo[axis], hi[axis], mode) if lo[axis] or hi[axis] else v
        return v
    rest = rest[1:] if name == "pad" else rest
    value = rest[0] if rest and rest[0] is not None else 0
    if all(isinstance(p, int) and p == 0 for p in lo + hi):
        return v
    return c.b.op("Pad", [v, c.b.dims(lo + hi), c.scalar(value, v.dtype)], v.dtype, shape_of(n.val))


@row("tril", "triu")
def trilu(c: Converter, n: Node, x: Node, k: int) -> Val:
    v = c.v(x)
    as_int = v.dtype == BOOL  # few runtimes have a boolean Trilu
    w = c.cast(v, torch.int32) if as_int else v
    out = c.b.op("Trilu", [w, c.b.constant(k, I64)], w.dtype, w.shape, upper=int("triu" in str(n.target)))
    return c.cast(out, v.dtype)


@row("diff")
def diff(c: Converter, n: Node, x: Node, order: int, dim: int, prepend: Any, append: Any) -> Val:
    parts = [c.cast(c.v(p), c.v(x).dtype) for p in (prepend, x, append) if p is not None]
    v = c.v(x)
    dim %= v.rank
    v = c.concat(parts, dim)
    for _ in range(order):
        size = v.shape[dim]
        size = max(size - 1, 0) if isinstance(size, int) else expr_of(size - 1)
        hi = c.slice(v, dim, 1, INT_MAX, 1, size)
        lo = c.slice(v, dim, 0, size if isinstance(size, int) else -1, 1, size)
        v = c.cast(c.op2("Xor", hi, lo), BOOL) if v.dtype == BOOL else c.op2("Sub", hi, lo)
    return v


# --- diagonals ------------------------------------------------------------------------------------


def numel(shape: Sequence[Any]) -> Any:
    total: Any = 1
    for d in shape:
        total = total * d
    return expr_of(total)


def _on_diagonal(c: Converter, v: Val, offset: int, dim1: int, dim2: int, length: Any) -> tuple[Val, Val, list[int]]:
    """v with the two axes last and flattened; places of the diagonal there; the permutation."""
    dim1, dim2 = dim1 % v.rank, dim2 % v.rank
    perm = [a for a in range(v.rank) if a not in (dim1, dim2)] + [dim1, dim2]
    w = c.transpose(v, perm)
    *lead, rows, cols = w.shape
    start = offset if offset >= 0 else expr_of(-offset * cols)
    places = c.range(length)
    places = c.op2("Mul", places, c.num(expr_of(cols + 1), I64) if isinstance(cols, int) else c.symbolic(cols + 1))
    places = (
        places
        if start == 0
        else c.op2("Add", places, c.b.constant(start, I64) if isinstance(start, int) else c.symbolic(start))
    )
    return c.reshape(w, (*lead, expr_of(rows * cols))), places, perm


def diagonal_of(c: Converter, v: Val, offset: int, dim1: int, dim2: int, length: Any) -> Val:
    """The diagonal as the last axis."""
    flat, places, _ = _on_diagonal(c, v, offset, dim1, dim2, length)
    return c.b.op("Gather", [flat, places], v.dtype, (*flat.shape[:-1], length), axis=flat.rank - 1)


@row("diagonal", "diagonal_copy", "linalg_diagonal", "trace")
def diagonal(c: Converter, n: Node, x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Val:
    v = c.v(x)
    if n.target._schema.name == "aten::trace":
        if not all(isinstance(d, int) for d in v.shape):
            raise NotHere("trace of a matrix of symbolic size")
        return c.reduce("ReduceSum", c.cast(diagonal_of(c, v, 0, 0, 1, min(v.shape)), n.val.dtype), None, False)
    return diagonal_of(c, v, offset, dim1, dim2, shape_of(n.val)[-1])


@row("diag")
def diag(c: Converter, n: Node, x: Node, offset: int) -> Val:
    return diag_embed(c, n, x, offset, 0, 1) if c.v(x).rank == 1 else diagonal(c, n, x, offset)


@row("diagonal_scatter")
def diagonal_scatter(c: Converter, n: Node, x: Node, src: Node, offset: int, dim1: int, dim2: int) -> Val:
    v, new = c.v(x), c.cast(c.v(src), c.v(x).dtype)
    flat, places, perm = _on_diagonal(c, v, offset, dim1, dim2, new.shape[-1])
    out = c.b.op("ScatterElements", [flat, c.expand(places, new.shape), new], v.dtype, flat.shape, axis=flat.rank - 1)
    return c.transpose(c.reshape(out, tuple(v.shape[p] for p in perm)), [perm.index(a) for a in range(v.rank)])


@row("diag_embed")
def diag_embed(c: Converter, n: Node, x: Node, offset: int, dim1: int, dim2: int) -> Val:
    v, rank = c.v(x), n.val.dim()
    dim1, dim2 = dim1 % rank, dim2 % rank
    size = shape_of(n.val)[dim1]
    rows = c.unsqueeze(v, [v.rank])  # entry i stands in row i (offset >= 0) or i - offset
    if offset:
        lo, hi = (0, offset) if offset > 0 else (-offset, 0)
        widths = [0] * (v.rank - 1) + [lo, 0] + [0] * (v.rank - 1) + [hi, 0]
        rows = c.b.op("Pad", [rows, c.b.dims(widths), c.scalar(0, v.dtype)], v.dtype, (*v.shape[:-1], size, 1))
    column = c.range(size)
    on = c.compare("Equal", c.op2("Add", c.unsqueeze(column, [1]), c.b.constant(offset, I64)), c.unsqueeze(column, [0]))
    out = c.where(on, rows, c.scalar(0, v.dtype))
    front = [a for a in range(rank) if a not in (dim1, dim2)] + [dim1, dim2]
    return c.transpose(out, [front.index(a) for a in range(rank)])


# --- images ---------------------------------------------------------------------------------------


@row("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(c: Converter, n: Node, x: Node, r: int) -> Val:
    """Channels (c, r, r) go to (h, r), (w, r) or come from there."""
    v, out = c.v(x), shape_of(n.val)
    k = v.rank - 3
    lead = v.shape[:k]
    if "unshuffle" in str(n.target):
        parts, perm = (v.shape[k], out[k + 1], r, out[k + 2], r), (0, 2, 4, 1, 3)
    else:
        parts, perm = (out[k], r, r, v.shape[k + 1], v.shape[k + 2]), (0, 3, 1, 4, 2)
    return c.reshape(c.transpose(c.reshape(v, (*lead, *parts)), [*range(k), *[k + p for p in perm]]), out)


# --- making tensors from nothing ------------------------------------------------------------------


@row("arange", "arange.start", "arange.start_step")
def arange(c: Converter, n: Node, *args: Any) -> Val:
    name = n.target._overloadname
    start, end, step = (
        (0, args[0], 1) if name in ("", "default") else (args[0], args[1], 1) if name == "start" else args[:3]
    )
    size, dtype = shape_of(n.val)[0], n.val.dtype
    v = c.range(size)
    if all(isinstance(a, (int, torch.SymInt)) for a in (start, end, step)):
        if not (isinstance(step, int) and step == 1):
            v = c.op2("Mul", v, c.scalar(step, I64))
        if not (isinstance(start, int) and start == 0):
            v = c.op2("Add", v, c.scalar(start, I64))
        return c.cast(v, dtype)
    v = c.cast(v, F64)
    return c.cast(c.op2("Add", c.op2("Mul", v, c.scalar(step, F64)), c.scalar(start, F64)), dtype)


@row("linspace")
def linspace(c: Converter, n: Node, start: Any, end: Any, steps: int, *_: Any) -> Val:
    if not isinstance(start, (int, float)) or not isinstance(end, (int, float)) or not isinstance(steps, int):
        raise NotHere("linspace with symbolic bounds")
    return c.b.tensor(torch.linspace(start, end, steps, dtype=n.val.dtype, device="cpu"), "linspace")


@row("zeros", "zeros_like", "new_zeros", "empty.memory_format", "empty_like", "new_empty")
def zeros(c: Converter, n: Node, *_: Any) -> Val:
    return c.fill(0, n.val.dtype, shape_of(n.val))


@row("ones", "ones_like", "new_ones")
def ones(c: Converter, n: Node, *_: Any) -> Val:
    return c.fill(1, n.val.dtype, shape_of(n.val))


@row("full", "full_like")
def full(c: Converter, n: Node, _size: Any, value: Any, *_: Any) -> Val:
    return c.fill(value, n.val.dtype, shape_of(n.val))


@row("new_full")
def new_full(c: Converter, n: Node, _x: Node, _size: Any, value: Any, *_: Any) -> Val:
    return c.fill(value, n.val.dtype, shape_of(n.val))


@row("scalar_tensor")
def scalar_tensor(c: Converter, n: Node, value: Any, *_: Any) -> Val:
    return c.fill(value, n.val.dtype, shape_of(n.val))


@row("fill.Scalar", "fill.Tensor")
def filled(c: Converter, n: Node, x: Node, value: Any) -> Val:
    return c.zero(c.fill(value, n.val.dtype, shape_of(n.val)), c.v(x))


@row("eye", "eye.m")
def eye(c: Converter, n: Node, *_: Any) -> Val:
    rows, cols = shape_of(n.val)
    same = c.op2("Equal", c.unsqueeze(c.range(rows), [1]), c.unsqueeze(c.range(cols), [0]), BOOL)
    return c.cast(same, n.val.dtype)


@row("one_hot")
def one_hot(c: Converter, n: Node, x: Node, classes: int) -> Val:
    if classes < 0:
        raise NotHere("one_hot with a class count that depends on data")
    v, places = c.v(x), c.range(classes)
    inside = c.no_negative(c.b.op("Gather", [places, v], I64, v.shape, axis=0))  # PyTorch raises for other classes
    return c.cast(c.op2("Equal", c.unsqueeze(inside, [v.rank]), places, BOOL), I64)


# --- indexing -------------------------------------------------------------------------------------


@row("gather")
def gather(c: Converter, n: Node, x: Node, dim: int, index: Node, *_: Any) -> Val:
    v, i = c.v(x), c.v(index)
    if v.rank == 0:
        return c.reshape(v, i.shape)
    return c.no_negative(c.b.op("GatherElements", [v, i], v.dtype, i.shape, axis=dim % v.rank))


@row("take_along_dim")
def take_along_dim(c: Converter, n: Node, x: Node, index: Node, dim: int | None) -> Val:
    v, i = c.v(x), c.cast(c.v(index), I64)
    if dim is None:
        raise NotHere("take_along_dim over the flattened tensor")
    dim %= v.rank
    one = [*v.shape]
    both = list(broadcast((*one[:dim], 1, *one[dim + 1 :]), (*i.shape[:dim], 1, *i.shape[dim + 1 :])))
    v = c.expand(v, (*both[:dim], v.shape[dim], *both[dim + 1 :]))
    i = c.expand(i, (*both[:dim], i.shape[dim], *both[dim + 1 :]))
    return c.b.op("GatherElements", [v, i], v.dtype, i.shape, axis=dim)


@row("index_select")
def index_select(c: Converter, n: Node, x: Node, dim: int, index: Node) -> Val:
    v, i = c.v(x), c.v(index)
    i = c.reshape(i, (1,)) if i.rank == 0 else i
    if v.rank == 0:
        return v
    dim %= v.rank
    return c.no_negative(c.b.op("Gather", [v, i], v.dtype, (*v.shape[:dim], *i.shape, *v.shape[dim + 1 :]), axis=dim))


@row("scatter.src", "scatter.value", "scatter_add", "scatter.reduce", "scatter.value_reduce")
def scatter(c: Converter, n: Node, x: Node, dim: int, index: Node, src: Any, *reduce: Any) -> Val:
    """torch scatters the part of src that index covers."""
    v, i = c.v(x), c.v(index)
    name = n.target._schema.name
    how = "add" if name == "aten::scatter_add" else {"add": "add", "multiply": "mul"}[reduce[0]] if reduce else "none"
    if how == "mul":
        raise NotHere("scatter with reduce='multiply'")
    if isinstance(src, Node):
        s = c.cast(c.v(src), v.dtype)
        if s.shape != i.shape:
            for a in range(s.rank):
                s = c.slice(s, a, 0, i.shape[a], 1, i.shape[a])
            # to readers the slice is min(size, index size) long
            s = c.b.op("Reshape", [s, c.b.dims(i.shape)], s.dtype, i.shape)
    else:
        s = c.fill(src, v.dtype, i.shape)
    y = c.b.op("ScatterElements", [v, i, s], v.dtype, v.shape, axis=dim % max(v.rank, 1), reduction=how)
    return c.no_negative(y) if v.dtype != I64 else y  # an index must not be the memory that is written


@row("index_add")
def index_add(c: Converter, n: Node, x: Node, dim: int, index: Node, src: Node, alpha: Any) -> Val:
    v, i, s = c.v(x), c.v(index), c.cast(c.v(src), c.v(x).dtype)
    if v.rank == 0:
        raise NotHere("index_add into a number")
    if alpha != 1:
        s = c.op2("Mul", s, c.scalar(alpha, v.dtype))
    dim %= v.rank
    i = c.expand(c.unsqueeze(i, [a for a in range(v.rank) if a != dim]), s.shape)
    y = c.b.op("ScatterElements", [v, i, s], v.dtype, v.shape, axis=dim, reduction="add")
    return c.no_negative(y) if v.dtype != I64 else y


def _advanced(c: Converter, v: Val, indices: Sequence[Node | None]) -> tuple[list[int], list[Val]]:
    """Axes with an index tensor and those tensors as int64; a boolean mask has no fixed size."""
    axes: list[int] = []
    tensors: list[Val] = []
    for axis, i in enumerate(indices):
        if i is not None:
            t = c.v(i)
            if t.dtype in (BOOL, torch.uint8):
                raise NotHere("indexing with a boolean mask")
            axes.append(axis)
            tensors.append(c.cast(t, I64))
    return axes, tensors


def _stacked(c: Converter, tensors: list[Val]) -> tuple[Val, tuple[Any, ...]]:
    """Index tensors broadcast together, as one tensor with a last axis over the indexed axes."""
    shape: tuple[Any, ...] = ()
    for t in tensors:
        shape = broadcast(shape, t.shape)
    last = [c.unsqueeze(c.expand(t, shape), [len(shape)]) for t in tensors]
    return c.concat(last, len(shape)), shape


@row("index.Tensor", "_unsafe_index.Tensor")
def index(c: Converter, n: Node, x: Node, indices: Sequence[Node | None]) -> Val:
    v = c.v(x)
    axes, tensors = _advanced(c, v, indices)
    if len(axes) == 1:
        a = axes[0]
        return c.b.op("Gather", [v, tensors[0]], v.dtype, (*v.shape[:a], *tensors[0].shape, *v.shape[a + 1 :]), axis=a)
    front = [*axes, *(a for a in range(v.rank) if a not in axes)]
    w = c.transpose(v, front)
    where, shape = _stacked(c, tensors)
    rest = w.shape[len(axes) :]
    out = c.b.op("GatherND", [w, where], v.dtype, (*shape, *rest))
    # adjacent: the result stands where the indices stood
    if axes == list(range(axes[0], axes[0] + len(axes))) and axes[0] > 0:
        k, a = len(shape), axes[0]
        out = c.transpose(out, [*range(k, k + a), *range(k), *range(k + a, out.rank)])
    return out


@row("index_put", "_unsafe_index_put")
def index_put(
    c: Converter, n: Node, x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False
) -> Val:
    v, new = c.v(x), c.cast(c.v(values), c.v(x).dtype)
    first = indices[0]
    mask = c.v(first) if len(indices) == 1 and first is not None and not accumulate else None
    mask = mask if mask is not None and mask.dtype == BOOL else None
    single = all(d == 1 for d in new.shape)
    if values.val.dtype != x.val.dtype and (mask is None or not single):
        raise NotHere("writing values of another type, which PyTorch refuses")
    if mask is not None:
        apart = v.rank - mask.rank
        if new.rank > apart and not single:
            raise NotHere("writing a list of values under a boolean mask")
        mask = c.unsqueeze(mask, list(range(mask.rank, v.rank)))
        return c.expand(c.where(mask, new if new.rank <= apart else c.reshape(new, ()), v), v.shape)
    axes, tensors = _advanced(c, v, indices)
    front = [*axes, *(a for a in range(v.rank) if a not in axes)]
    w = c.transpose(v, front)
    where, shape = _stacked(c, tensors)
    rest = w.shape[len(axes) :]
    if axes == list(range(axes[0], axes[0] + len(axes))) and axes[0] > 0:
        # values come in the order of x[...]: untouched axes before the indices stand first
        k, a = len(shape), axes[0]
        full = (*rest[:a], *shape, *rest[a:])
        new = c.transpose(c.expand(new, full), [*range(a, a + k), *range(a), *range(a + k, len(full))])
    else:
        new = c.expand(new, (*shape, *rest))
    out = c.b.op("ScatterND", [w, where, new], v.dtype, w.shape, reduction="add" if accumulate else "none")
    return c.transpose(out, [front.index(a) for a in range(v.rank)])
