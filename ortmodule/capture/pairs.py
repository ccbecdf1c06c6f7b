"""Complex numbers as pairs of reals, where arithmetic and views are all that is done with them: rotary embeddings.

The engine has no complex tensors. One of a shape is here a tensor of reals with one more axis, (real, imaginary), as
torch.view_as_real shows its memory: views move the other axes, a product p q is p (re(q), re(q)) + flip(p) (-im(q),
im(q)), in which flip is a view; q is the smaller one, often a table. What complex tensors connect goes this way as a
whole; where anything in it has no rule (spectra), it stays as it is, for regions.py to leave to PyTorch. Parameters,
buffers, attributes and arguments are given to the graph as such pairs either way (InputSpec.pairs); parameters and
arguments may have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import torch_private as private
from .export import Exported, Source
from .program import COPY, INPUT, STOP, Node, Program, is_complex
from .results import tensor_of

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_GIVEN = ("user", "param", "buffer", "const_attr")  # kinds of tensors that may be given as pairs
aten = torch.ops.aten


class _No(Exception):
    """It cannot be done with pairs."""


def as_pairs(t: Tensor) -> Tensor:
    """The memory of a complex tensor as reals, parts last."""
    return torch.view_as_real(t.resolve_conj())


def complex_as_pairs(program: Program, exported: Exported) -> None:
    """Rewrites in `program` what can be; the nodes stay what others refer to."""
    held = {node: i for i, (_, node) in enumerate(program.inputs)}
    everywhere = [*held, *program.nodes]
    if not any(is_complex(n.val) for n in everywhere):
        return
    given = {n for n in program.outputs if isinstance(n, Node)} | {n for both in program.writes for n in both}
    given |= {n for n, _ in program.views.values()} | {*program.passthrough.values(), *program.item_of.values()}
    before: dict[Node, list[Node]] = {}
    for group in _groups(everywhere):
        if any(is_complex(n.val) and n in given for n in group):
            continue
        try:
            work = _Work()
            for n in group:
                if n in held:
                    source = program.inputs[held[n]][0]
                    work.take(n, source, tensor_of(exported, source))
                else:
                    work.do(n)
        except _No:
            for n in (n for n in group if n in held and n not in given):
                _read_as_complex(program, exported, held[n])
            continue
        for n, (target, args, val) in work.new.items():
            n.target, n.args, n.kwargs, n.val, n.autocast = target, args, {}, val, ()
        for n, source in work.sources.items():
            program.inputs[held[n]] = (source, n)
        before.update(work.before)
    program.nodes = [each for n in program.nodes for each in (*before.get(n, ()), n)]


def _may_be_given(source: Source, t: Any, dtype: torch.dtype) -> bool:
    graded = source.kind == "param"  # and of an argument autograd knows more
    return source.kind in _GIVEN and isinstance(t, Tensor) and (graded or not t.requires_grad) and dtype in REAL


def _read_as_complex(program: Program, exported: Exported, at: int) -> None:
    """Input number `at` is given as pairs, for what PyTorch computes with it as a complex tensor."""
    source, n = program.inputs[at]
    if not _may_be_given(source, tensor_of(exported, source), n.val.dtype):
        return
    pair = Node(INPUT, n.args, {}, _pair_val(n.val), n.src, n.grad)
    program.inputs[at] = (replace(source, pairs=True), pair)
    n.target, n.args = aten.view_as_complex.default, (pair,)
    program.nodes.insert(0, n)


def _pair_val(v: Any) -> Any:
    return v.new_empty((*v.shape, 2), dtype=REAL[v.dtype])


def _groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """What complex tensors connect, each in the order of the program."""
    of: dict[Node, Node] = {}

    def root(n: Node) -> Node:
        while of.setdefault(n, n) is not n:
            n = of[n]
        return n

    for n in nodes:
        for x in n.inputs():
            if is_complex(x.val):
                of[root(n)] = root(x)
        if is_complex(n.val):
            root(n)
    found: dict[Node, list[Node]] = {}
    for n in nodes:
        if n in of:
            found.setdefault(root(n), []).append(n)
    return list(found.values())


class _Work:
    """One group. new: what its nodes become; before: nodes to be made in front of one; sources: of inputs."""

    def __init__(self) -> None:
        self.new: dict[Node, tuple[Any, tuple[Any, ...], Any]] = {}
        self.before: dict[Node, list[Node]] = {}
        self.sources: dict[Node, Source] = {}
        self.n: Any = None

    def take(self, n: Node, source: Source, t: Any) -> None:
        """An input."""
        self.n = n
        if source.kind == "constant" and isinstance(t, Tensor) and n.val.dtype in REAL:
            self.sources[n] = replace(source, tensor=as_pairs(t))
        elif _may_be_given(source, t, n.val.dtype):
            self.sources[n] = replace(source, pairs=True)
        else:
            raise _No
        self.new[n] = (INPUT, n.args, _pair_val(n.val))

    def do(self, n: Node) -> None:
        self.n = n
        rule = _RULES.get(_name(n.target))
        if rule is None or isinstance(n.val, (list, tuple)) or (is_complex(n.val) and n.val.dtype not in REAL):
            raise _No
        rule(self, n, *n.args)

    # --- what rules are made of

    def val(self, x: Node) -> Any:
        return self.new[x][2] if x in self.new else x.val

    def is_pair(self, x: Any) -> bool:
        return isinstance(x, Node) and x in self.new and is_complex(x.val)

    def rank(self, x: Node) -> int:
        """Of the complex tensor."""
        if not self.is_pair(x):
            raise _No
        return int(x.val.dim())

    def make(self, target: Any, args: tuple[Any, ...], shape: Sequence[Any], dtype: torch.dtype) -> Node:
        node = Node(target, args, {}, self.n.val.new_empty(tuple(shape), dtype=dtype), self.n.src, self.n.grad)
        node.within = self.n.within
        self.before.setdefault(self.n, []).append(node)
        return node

    def become(self, target: Any, *args: Any) -> None:
        v = self.n.val
        self.new[self.n] = (target, args, _pair_val(v) if v.is_complex() else v)

    def part(self, x: Node, i: int) -> Node:
        """The real or imaginary part, with an axis of one."""
        v = self.val(x)
        return self.make(aten.slice.Tensor, (x, v.dim() - 1, i, i + 1), (*v.shape[:-1], 1), v.dtype)

    def like(self, target: Any, x: Node, *more: Any) -> Node:
        v = self.val(x)
        return self.make(target, (x, *more), v.shape, v.dtype)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        v = self.val(x)
        return x if v.dtype == dtype else self.make(aten.to.dtype, (x, dtype), v.shape, dtype)

    def operand(self, x: Any) -> Any:
        """A number, a real tensor beside pairs, or a pair, of the result's type."""
        real = REAL.get(self.n.val.dtype)
        if real is None or isinstance(x, complex):
            raise _No
        if not isinstance(x, Node):
            return x
        x_val = self.val(x)
        if not isinstance(x_val, Tensor):
            raise _No
        found = self.cast(x, real)
        if self.is_pair(x):
            return found
        return self.make(aten.unsqueeze.default, (found, x_val.dim()), (*x_val.shape, 1), real)

    def both_parts(self, x: Any) -> Node:
        """A tensor as a pair: the imaginary part of a real one is 0."""
        found = self.operand(x)
        if not isinstance(found, Node):
            raise _No
        if self.is_pair(x):
            return found
        v = self.val(x)
        return self.make(aten.constant_pad_nd.default, (found, [0, 1]), (*v.shape, 2), REAL[self.n.val.dtype])


def _name(target: Any) -> str:
    if not isinstance(target, private.OpOverload):
        return target if isinstance(target, str) else ""
    name, overload = target._schema.name.partition("::")[2], target._overloadname
    return f"{name}.{overload}" if overload not in ("", "default") else name


_Rule = Callable[..., None]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def keep(f: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, f))
        return f

    return keep


# --- in and out


@_rule("view_as_complex", "view_as_real")
def _as_it_is(w: _Work, n: Node, x: Node) -> None:
    w.become(aten.alias.default, x)


@_rule("real", "imag")
def _part(w: _Work, n: Node, x: Node) -> None:
    w.become(aten.select.int, x, w.rank(x), int(_name(n.target) == "imag"))


@_rule("complex", "polar")
def _made(w: _Work, n: Node, a: Node, b: Node) -> None:
    real, shape = REAL[n.val.dtype], n.val.shape
    both = [w.make(aten.expand.default, (x, list(shape)), shape, real) for x in (a, b)]
    if _name(n.target) == "polar":
        both = [w.like(aten.mul.Tensor, both[0], w.like(f, both[1])) for f in (aten.cos.default, aten.sin.default)]
    w.become(aten.stack.default, both, len(shape))


# --- arithmetic


@_rule("mul.Tensor")
def _mul(w: _Work, n: Node, a: Any, b: Any) -> None:
    if isinstance(b, complex):
        p = w.both_parts(a)
        crossed = [w.like(aten.mul.Tensor, w.part(p, i), by) for i, by in ((1, -b.imag), (0, b.imag))]
        joined = w.make(aten.cat.default, (crossed, n.val.dim()), w.val(p).shape, w.val(p).dtype)
        return w.become(aten.add.Tensor, w.like(aten.mul.Tensor, p, b.real), joined)
    p, q = w.operand(a), w.operand(b)
    if not (w.is_pair(a) and w.is_pair(b)):
        return w.become(aten.mul.Tensor, p, q)
    if _elements(w.val(p)) < _elements(w.val(q)):  # the table is the smaller one
        p, q = q, p
    v, last = w.val(q), w.val(q).dim() - 1
    re, im = w.part(q, 0), w.part(q, 1)
    both = w.make(aten.cat.default, ([re, re], last), v.shape, v.dtype)
    signed = w.make(aten.cat.default, ([w.like(aten.neg.default, im), im], last), v.shape, v.dtype)
    shape, real = (*n.val.shape, 2), v.dtype
    straight = w.make(aten.mul.Tensor, (p, both), shape, real)
    turned = w.make(aten.mul.Tensor, (w.like(aten.flip.default, p, [w.val(p).dim() - 1]), signed), shape, real)
    return w.become(aten.add.Tensor, straight, turned)


def _elements(v: Tensor) -> int:
    found = 1
    for d in v.shape:
        found *= d if isinstance(d, int) else 1 << 20  # a size of the data's, beside numbers of the model's
    return found


@_rule("div.Tensor")
def _div(w: _Work, n: Node, a: Any, b: Any) -> None:
    if w.is_pair(b):
        raise _No
    w.become(aten.div.Tensor, w.operand(a), w.operand(b))


@_rule("add.Tensor", "sub.Tensor", "rsub.Scalar")
def _add(w: _Work, n: Node, a: Any, b: Any) -> None:
    if n.kwargs:
        raise _No
    if isinstance(b, Node):
        return w.become(n.target, w.both_parts(a), w.both_parts(b))
    parts = [w.like(n.target, w.part(w.operand(a), i), by) for i, by in enumerate((b.real, b.imag))]
    return w.become(aten.cat.default, parts, n.val.dim())


@_rule("exp")
def _exp(w: _Work, n: Node, x: Node) -> None:
    rank = w.rank(x)
    size, angle = w.like(aten.exp.default, w.part(x, 0)), w.part(x, 1)
    parts = [w.like(aten.mul.Tensor, size, w.like(f, angle)) for f in (aten.cos.default, aten.sin.default)]
    w.become(aten.cat.default, parts, rank)


@_rule("neg")
def _neg(w: _Work, n: Node, x: Node) -> None:
    w.become(n.target, x)


@_rule("conj", "_conj", "conj_physical", "_conj_physical")
def _conj(w: _Work, n: Node, x: Node) -> None:
    rank = w.rank(x)
    w.become(aten.cat.default, [w.part(x, 0), w.like(aten.neg.default, w.part(x, 1))], rank)


@_rule("sum.dim_IntList", "mean.dim")
def _reduced(w: _Work, n: Node, x: Node, dims: Any, keep: bool = False) -> None:
    rank = w.rank(x)
    if n.kwargs or not rank:
        raise _No
    w.become(n.target, x, [d % rank for d in dims or range(rank)], keep)


# --- views, and what moves elements


@_rule("clone", "contiguous", "alias", "lift", "lift_fresh", "lift_fresh_copy", "to.dtype", "to.device",
       "to.dtype_layout", "_to_copy", "type_as", "resolve_conj", "resolve_neg")  # fmt: skip
def _same(w: _Work, n: Node, x: Node, *_: Any) -> None:
    if not w.is_pair(x) or not n.val.is_complex():
        raise _No
    real = REAL[n.val.dtype]
    if w.val(x).dtype == real:
        w.become(aten.alias.default, x)
    else:
        w.become(aten.to.dtype, x, real)


@_rule(STOP, COPY, "detach")
def _kept(w: _Work, n: Node, x: Node) -> None:
    w.rank(x)
    w.become(n.target, x)


@_rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten.using_ints", "unflatten.int", "ravel",
       "reshape_to", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze")  # fmt: skip
def _reshaped(w: _Work, n: Node, x: Node, *_: Any) -> None:
    w.rank(x)
    w.become("reshape_to", x)


@_rule("expand", "expand_as", "broadcast_to")
def _expanded(w: _Work, n: Node, x: Node, *_: Any) -> None:
    w.rank(x)
    w.become(aten.expand.default, x, [*n.val.shape, 2])


@_rule("slice.Tensor", "select.int", "narrow", "transpose.int", "index_select")
def _along(w: _Work, n: Node, x: Node, dim: int = 0, *more: Any) -> None:
    rank = w.rank(x)
    if _name(n.target) == "transpose.int":
        more = (more[0] % rank,)
    if n.kwargs or not rank:
        raise _No
    w.become(n.target, x, dim % rank, *more)


@_rule("permute")
def _permuted(w: _Work, n: Node, x: Node, dims: Sequence[int]) -> None:
    rank = w.rank(x)
    w.become(n.target, x, [*[d % rank for d in dims], rank])


@_rule("flip")
def _flipped(w: _Work, n: Node, x: Node, dims: Sequence[int]) -> None:
    rank = w.rank(x)
    w.become(n.target, x, [d % rank for d in dims])


@_rule("cat", "stack")
def _joined(w: _Work, n: Node, xs: Sequence[Node], dim: int = 0) -> None:
    if not all(w.is_pair(x) and w.val(x).dtype == REAL[n.val.dtype] for x in xs):
        raise _No
    w.become(n.target, list(xs), dim % n.val.dim())


@_rule("index.Tensor")
def _indexed(w: _Work, n: Node, x: Node, at: Sequence[Any]) -> None:
    if not w.is_pair(x) or any(isinstance(i, Node) and i.val.dtype not in (torch.int64, torch.int32) for i in at):
        raise _No
    w.become(n.target, x, list(at))
