"""Rows of the operator table that multiply matrices, and what is made of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .convert import Converter, NotHere, broadcast, row, wide_of
from .onnx_build import Val, shape_of
from .ops_shape import diagonal_of, numel
from .program import Node


def product(c: Converter, a: Val, b: Val) -> Val:
    """torch.matmul: vectors are promoted to matrices and demoted again."""
    one_a, one_b = a.rank == 1, b.rank == 1
    a = c.unsqueeze(a, [0]) if one_a else a
    b = c.unsqueeze(b, [1]) if one_b else b
    y = c.matmul(a, b)
    return c.squeeze(y, [y.rank - 2] * one_a + [y.rank - 1] * one_b)


@row("mm", "bmm", "matmul", "mv", "dot", "vdot")
def matmul(c: Converter, n: Node, a: Node, b: Node) -> Val:
    return product(c, c.num(a, n.val.dtype), c.num(b, n.val.dtype))


@row("linear")
def linear(c: Converter, n: Node, x: Node, w: Node, b: Node | None) -> Val:
    dtype = n.val.dtype
    weight = c.num(w, dtype)
    y = product(c, c.num(x, dtype), c.swap(weight, 0, 1) if weight.rank == 2 else weight)
    return y if b is None else c.op2("Add", y, c.num(b, dtype))


@row("addmm", "baddbmm", "addmv", "addbmm")
def addmm(c: Converter, n: Node, x: Node, a: Node, b: Node, beta: Any, alpha: Any) -> Val:
    """beta = 0: x is not read, but its gradient is 0 times what arrives."""
    dtype = n.val.dtype
    if n.target._schema.name == "aten::addbmm":
        raise NotHere("sum of batched products")
    y = product(c, c.num(a, dtype), c.num(b, dtype))
    wide = dtype if alpha == 1 and beta in (0, 1) else wide_of(dtype)
    y = y if alpha == 1 else c.op2("Mul", c.cast(y, wide), c.scalar(alpha, wide))
    bias = c.num(x, wide)
    if beta == 0 and dtype.is_floating_point:
        none = c.op2("Add", c.op2("Mul", bias, c.scalar(0, wide)), y)
        return c.cast(c.b.op("StraightThrough", [y, none], wide, y.shape, "ortmodule"), dtype)
    if beta == 0:
        return y
    bias = bias if beta == 1 else c.op2("Mul", bias, c.scalar(beta, wide))
    return c.cast(c.op2("Add", bias, c.cast(y, wide)), dtype)


@row("outer")
def outer(c: Converter, n: Node, a: Node, b: Node) -> Val:
    dtype = n.val.dtype
    return c.op2("Mul", c.unsqueeze(c.num(a, dtype), [1]), c.unsqueeze(c.num(b, dtype), [0]))


def _contract(c: Converter, a: Val, la: str, b: Val, lb: str, out: str) -> Val:
    """Two operands, every label once per operand: transpose, flatten to (batch, rows, sum) x (batch, sum, cols),
    multiply, restore."""
    size = dict(zip(lb, b.shape, strict=True)) | {
        s: d for s, d in zip(la, a.shape, strict=True) if d != 1 or s not in lb
    }
    both = [s for s in la if s in lb]
    a = c.expand(a, tuple(size[s] if s in both else d for s, d in zip(la, a.shape, strict=True)))
    b = c.expand(b, tuple(size[s] if s in both else d for s, d in zip(lb, b.shape, strict=True)))
    a, la = _sum_out(c, a, la, lb + out)
    b, lb = _sum_out(c, b, lb, la + out)
    batch = [s for s in la if s in lb and s in out]
    summed = [s for s in la if s in lb and s not in out]
    rows, cols = [s for s in la if s not in lb], [s for s in lb if s not in la]

    def shape(labels: Sequence[str]) -> tuple[Any, ...]:
        return tuple(size[s] for s in labels)

    a = c.transpose(a, [la.index(s) for s in [*batch, *rows, *summed]])
    b = c.transpose(b, [lb.index(s) for s in [*batch, *summed, *cols]])
    y = c.matmul(
        c.reshape(a, (*shape(batch), numel(shape(rows)), numel(shape(summed)))),
        c.reshape(b, (*shape(batch), numel(shape(summed)), numel(shape(cols)))),
    )
    order = [*batch, *rows, *cols]
    y = c.reshape(y, shape(order))
    return c.transpose(y, [order.index(s) for s in out])


def _sum_out(c: Converter, v: Val, labels: str, kept: str) -> tuple[Val, str]:
    """Sums over the labels that nothing else has."""
    gone = [s for s in labels if s not in kept]
    if gone:
        v = c.reduce("ReduceSum", v, [labels.index(s) for s in gone], False)
    return v, "".join(s for s in labels if s not in gone)


@row("einsum")
def einsum(c: Converter, n: Node, equation: str, operands: Sequence[Node], *_path: Any) -> Val:
    """From left to right, two operands at a time. Dots become labels of their own, aligned at the right; a label twice
    in one operand is its diagonal."""
    dtype = n.val.dtype
    left, arrow, out = equation.replace(" ", "").partition("->")
    values = [c.num(x, dtype) for x in operands]
    terms = left.split(",")
    dots = [v.rank - len(t.replace("...", "")) if "..." in t else 0 for v, t in zip(values, terms, strict=True)]
    free = [s for s in map(chr, range(0x3B1, 0x3CA))][: max(dots)]  # Greek letters: no one else's labels
    terms = [t.replace("...", "".join(free[len(free) - k :])) for t, k in zip(terms, dots, strict=True)]
    if not arrow:
        every = "".join(terms)
        out = "..." * any(dots) + "".join(sorted(s for s in set(every) if every.count(s) == 1 and s not in free))
    out = out.replace("...", "".join(free))
    for i, t in enumerate(terms):
        for s in sorted(set(t)):
            while t.count(s) > 1:
                first, second = t.index(s), t.rindex(s)
                values[i] = diagonal_of(c, values[i], 0, first, second, values[i].shape[first])
                t = t.replace(s, "", t.count(s)) if t.count(s) == 2 else t[:second] + t[second + 1 :].replace(s, "", 1)
                t += s
        terms[i] = t
    v, labels = values[0], terms[0]
    for i in range(1, len(values)):
        later = out + "".join(terms[i + 1 :])
        kept = "".join(dict.fromkeys(s for s in labels + terms[i] if s in later))
        v, labels = _contract(c, v, labels, values[i], terms[i], kept), kept
    v, labels = _sum_out(c, v, labels, out)
    return c.transpose(v, [labels.index(s) for s in out])


@row("bilinear")
def bilinear(c: Converter, n: Node, x: Node, y: Node, w: Node, b: Node | None) -> Val:
    dtype, out = n.val.dtype, shape_of(n.val)
    weight = c.num(w, dtype)
    rows = numel(out[:-1])
    left, right = (c.reshape(c.num(z, dtype), (rows, weight.shape[i])) for i, z in ((1, x), (2, y)))
    half = _contract(c, left, "ni", weight, "kij", "nkj")
    v = c.reshape(_contract(c, half, "nkj", right, "nj", "nk"), out)
    return v if b is None else c.op2("Add", v, c.num(b, dtype))


@row("linalg_cross", "cross")
def cross(c: Converter, n: Node, x: Node, y: Node, dim: int | None) -> Val:
    dtype, out = n.val.dtype, shape_of(n.val)
    a, b = (c.expand(c.num(z, dtype), out) for z in (x, y))
    if dim is None:  # of torch.cross without one: the first of size 3
        dim = next(i for i, size in enumerate(a.shape) if size == 3)
    dim %= len(out)

    def turned(v: Val, by: int) -> Val:
        first, rest = c.slice(v, dim, 0, by, 1, by), c.slice(v, dim, by, 3, 1, 3 - by)
        return c.concat([rest, first], dim)

    return c.op2("Sub", c.op2("Mul", turned(a, 1), turned(b, 2)), c.op2("Mul", turned(a, 2), turned(b, 1)))


@row("cosine_similarity")
def cosine_similarity(c: Converter, n: Node, x: Node, y: Node, dim: int, eps: float) -> Val:
    """The norms are clamped behind autograd's back, as torch does it."""
    dtype = n.val.dtype

    def unit(z: Node) -> Val:
        v = c.expand(c.num(z, dtype), broadcast(c.v(x).shape, c.v(y).shape))
        norm = c.reduce("ReduceL2", v, [dim], True)
        low = c.scalar(eps, dtype)
        clamped = c.where(c.compare("Less", norm, low), low, norm)
        return c.op2("Div", v, c.b.op("StraightThrough", [clamped, norm], dtype, norm.shape, "ortmodule"))

    return c.reduce("ReduceSum", c.op2("Mul", unit(x), unit(y)), [dim], False)
