"""Cuts: hooks on submodules see live tensors, because the graph ends before them and a new one begins behind them.

The list of pure nodes is split at the marks (marks.py) into parts. Each part becomes an ONNX graph of its own; what
crosses a mark is an output of one part and an input of others. ../cuts.py runs parts and hooks in turn.

Invariants: write-backs of buffers are made at the end of the part that computes them, so a hook finds the state that it
would find in PyTorch, and a later part reads what the hook leaves. What no part can stand for is a CaptureError: then
the module runs in PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import autocast
from .. import torch_private as private
from . import opaque
from .export import Exported, Source
from .marks import CutError, Mark, Sizes
from .onnx_build import expr_of, shape_of
from .opaque import CUT, HOST
from .program import BATCH_NORM, COPY, FILL, INPUT, STOP, THROUGH, Node, Program, operand

_CONE = 64  # nodes computed again in a later part rather than handed over


@dataclass
class Part:
    """The nodes between two marks. feed: per input of its graph the slot, or the (slot, axis) whose size it is;
    outputs: slots; cloned: inputs that are edited in place later; drop: slots that nobody needs once this part
    begins."""

    program: Program
    feed: list[int | tuple[int, int]] = field(default_factory=list)
    cloned: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.outputs and not self.program.writes


# --- splitting ------------------------------------------------------------------------------------


class Split(NamedTuple):
    """parts[k] ends at marks[k]. n_slots: values in a run: first those of program.inputs but constants, in their order;
    outputs: slots."""

    parts: list[Part]
    marks: list[Mark]
    n_slots: int
    outputs: list[int]


def split(program: Program, exported: Exported) -> Split:
    """Cuts a program at its marks. Raises CutError."""
    table = exported.table
    order = {"user": 0, "param": 1, "buffer": 2, "const_attr": 2, "constant": 3}
    program.inputs.sort(key=lambda s: (order[s[0].kind], s[0].leaf))
    source_of = {n: s for s, n in program.inputs}
    slot: dict[Node, int] = {}
    for s, n in program.inputs:
        if s.kind != "constant":
            slot[n] = len(slot)
    seen = {
        i
        for n in program.nodes
        if n.target is CUT
        for i in n.args[0]
        if isinstance(i.val, Tensor) and i.val.dtype.is_floating_point
    }
    groups: list[list[Node]] = [[]]
    cuts: list[Node] = []
    end = Node(CUT, ([], -1), {}, (), ("", "", 0))
    for n in [*program.nodes, end]:
        if n.target is CUT:
            levels = _levels(groups.pop(), seen)
            groups += [*levels, []]
            cuts += [*[Node(CUT, ([], -1), {}, (), ("", "", 0)) for _ in levels[1:]], n]
        elif not (n.target is operator.getitem and n.args[0].target is CUT):
            groups[-1].append(n)
    groups.pop(), cuts.pop()  # there is no part behind the end
    at = {n: k for k, group in enumerate(groups) for n in group}
    marks: list[Mark] = []
    for k, cut in enumerate(cuts):
        mark = table.marks[cut.args[1]] if cut.args[1] >= 0 else Mark("between", "", lambda leaves: leaves, [])
        if mark.kind == "enter" and mark.partner < 0:
            raise CutError(f"an error inside of {mark.module} is caught by the code around it")
        marks.append(mark)
        for n in program.nodes:
            if n.target is operator.getitem and n.args[0] is cut:
                slot[n] = len(slot)
                at[n] = k + 1
    position = {id(m): k for k, m in enumerate(marks)}
    for mark in marks:
        if mark.kind == "enter":
            mark.partner = position[id(table.marks[mark.partner])]

    results = [program.passthrough.get(i, out) for i, out in enumerate(program.outputs)]
    again = _Cones(program, source_of)
    parts: list[Part] = []
    last: dict[Node, int] = {}
    wanted: list[list[Node]] = [[] for _ in groups]  # outputs of parts

    def need(n: Node, k: int) -> None:
        """n is read by part k from outside, or by mark k."""
        last[n] = max(last.get(n, -1), k)
        if n not in slot:
            if n not in at:
                raise CutError("a constant of forward goes through a hook")
            slot[n] = len(slot)
            wanted[at[n]].append(n)

    for k, group in enumerate(groups):
        p = Program()
        copies: dict[Node, None] = {}
        for n in group:
            for i in n.inputs():
                if i.target != INPUT and i in at and at[i] < k and (cone := again.cone(i)) is not None:
                    copies.update(dict.fromkeys(cone))
        rank = again.rank
        p.nodes = [*sorted(copies, key=rank.__getitem__), *group]
        inside = set(p.nodes)
        flush = list(program.flushes.get(cuts[k], []) if k < len(cuts) else program.writes)
        for number, (target, new) in enumerate(flush):
            if new not in inside:
                copy = Node(torch.ops.aten.clone.default, (new,), {}, new.val, new.src, new.grad)
                p.nodes.append(copy)
                inside.add(copy)
                flush[number] = (target, copy)
        outside: dict[Node, None] = {}
        for n in p.nodes:
            outside.update(dict.fromkeys(i for i in n.inputs() if i not in inside))
        numbers = [out for out in results if not isinstance(out, Node)] if k == len(cuts) else []
        for s in (_of_nodes(p.nodes) | _symbols(numbers)) & program.item_of.keys():  # numbers read from tensors
            p.item_of[s] = program.item_of[s]
            if p.item_of[s] not in inside:
                outside[p.item_of[s]] = None
        for target, _ in flush:
            outside[target] = None
        for n in outside:
            if n not in source_of or source_of[n].kind != "constant":
                need(n, k)
        p.inputs = [(source_of.get(n) or Source("user"), n) for n in outside]
        p.writes, p.quiet = flush, program.quiet
        parts.append(Part(p))
        if k < len(cuts):
            operands = [i for i in cuts[k].args[0] if isinstance(i, Node)]
            for i in operands:
                if marks[k].order or marks[k].kind in ("sync", "call"):
                    need(i, k)
    for out in results:
        if isinstance(out, Node):
            need(out, len(groups))

    outputs = [slot[out] if isinstance(out, Node) else -1 for out in results]
    n_slots = len(slot)
    for place, out in enumerate(results):
        if not isinstance(out, Node):  # a size or number: the last part computes it
            outputs[place] = n_slots
            n_slots += 1
    for k, mark in enumerate(marks):
        mark.operands = [slot[i] for i in cuts[k].args[0] if i in slot]
        found = {n.args[1]: slot[n] for n in slot if n.target is operator.getitem and n.args[0] is cuts[k]}
        n_results = max([*found, *mark.order, 0]) + 1
        mark.results = [found.get(i) for i in range(n_results)]
        if mark.kind == "call":
            mark.sizes = _expected(cuts[k].val, program, slot)
    edited = {marks[k].operands[0] for k in range(len(marks)) if marks[k].kind == "sync"}
    for m in reversed(marks):
        if m.kind in ("enter", "exit"):
            edited |= {s for s, i in zip(m.operands, m.results, strict=False) if i in edited}
    for k, part in enumerate(parts):
        p = part.program
        p.outputs = [n for n in wanted[k]]
        part.outputs = [slot[n] for n in p.outputs]
        if k == len(parts) - 1:
            rest = [(i, out) for i, out in enumerate(results) if not isinstance(out, Node)]
            p.outputs += [out for _, out in rest]
            part.outputs += [outputs[i] for i, _ in rest]
        _sizes(p, program, slot)
        leaves = 0
        named: list[tuple[Source, Node]] = []
        for s, n in p.inputs:
            if s.kind == "user":
                s, leaves = Source("user", leaf=leaves), leaves + 1
            named.append((s, n))
        p.inputs = named
        ordered = sorted(named, key=lambda s: (order[s[0].kind], s[0].leaf))
        part.feed = [n.args[0] if n not in slot else slot[n] for s, n in ordered if s.kind != "constant"]
        part.cloned = [
            i for i, f in enumerate(part.feed) if f in edited and not any(slot.get(t) == f for t, _ in p.writes)
        ]
        part.drop = [slot[n] for n, until in last.items() if until == k - 1 and slot[n] >= len(source_of)]
    return Split(parts, marks, n_slots, outputs)


def _levels(group: list[Node], seen: set[Node]) -> list[list[Node]]:
    """What is computed from a value that a hook sees is a part behind it, so that gradients go through that value."""
    level: dict[Node, int] = {}
    for n in group:
        level[n] = max((level[i] + (i in seen) for i in n.inputs() if i in level), default=0)
    return [[n for n in group if level[n] == k] for k in range(max(level.values(), default=0) + 1)]


class _Cones:
    """Values that depend on nothing that is trained or changed (masks, positions): a later part computes them again, so
    that the engine sees what they are."""

    def __init__(self, program: Program, source_of: dict[Node, Any]) -> None:
        self.rank = {n: i for i, n in enumerate(program.nodes)}
        self.source_of = source_of
        self.written = {n for n, _ in program.writes} | {n for f in program.flushes.values() for n, _ in f}
        self.known: dict[Node, list[Node] | None] = {}

    def cone(self, n: Node) -> list[Node] | None:
        if n not in self.known:
            self.known[n] = None
            self.known[n] = self._cone(n)
        return self.known[n]

    def _cone(self, n: Node) -> list[Node] | None:
        if n.target is HOST or n.target is CUT or isinstance(n.target, private.OpOverload) and (
                torch.Tag.nondeterministic_seeded in n.target.tags or n.target.namespace != "aten"):  # fmt: skip
            return None
        found: dict[Node, None] = {}
        for i in n.inputs():
            if i.target == INPUT:
                source = self.source_of[i]
                if source.kind == "constant":
                    continue
                if (
                    source.kind != "user"
                    or i in self.written
                    or not isinstance(i.val, Tensor)
                    or i.val.dtype.is_floating_point
                ):
                    return None
                continue
            inner = self.cone(i)
            if inner is None:
                return None
            found.update(dict.fromkeys(inner))
        found[n] = None
        return list(found) if len(found) <= _CONE else None


def _symbols(x: Any) -> set[Any]:
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(private.free_symbols(x))
    if isinstance(x, Tensor):
        return {s for d in x.shape if isinstance(d, torch.SymInt) for s in private.free_symbols(d)}
    if isinstance(x, (list, tuple)):
        return {s for y in x for s in _symbols(y)}
    return set()


def _of_nodes(nodes: list[Node]) -> set[Any]:
    return {s for n in nodes for s in _symbols(n.val) | _symbols(n.args) | _symbols(tuple(n.kwargs.values()))}


def _sizes(p: Program, program: Program, slot: dict[Node, int]) -> None:
    """Sizes that the part's inputs do not show become inputs of it."""
    needed = _of_nodes(p.nodes)
    needed |= {s for out in p.outputs for s in _symbols(out.val if isinstance(out, Node) else out)}
    for _, n in p.inputs:
        needed |= _symbols(n.val)
    known = {
        d for _, n in p.inputs if isinstance(n.val, Tensor) for d in shape_of(n.val) if getattr(d, "is_Symbol", False)
    }
    known |= {expr_of(n.val) for _, n in p.inputs if not isinstance(n.val, Tensor)}
    for s in sorted(needed - known - p.item_of.keys(), key=str):
        if private.free_unbacked_symbols(s):  # that of x[mask]: regions.py keeps what has it
            continue
        for source, n in program.inputs:
            if source.kind != "user":
                continue
            if not isinstance(n.val, Tensor):
                if expr_of(n.val) == s:
                    p.inputs.append((Source("user"), n))
                    break
                continue
            axis = next((a for a, d in enumerate(shape_of(n.val)) if d == s), None)
            if axis is not None:
                p.inputs.append((Source("user"), Node(INPUT, ((slot[n], axis),), {}, n.val.shape[axis], ("", "", 0))))
                break
        else:
            raise CutError(f"a size ({s}) that no argument tells, in a module with hooks on submodules")


def _expected(results: Sequence[Any], program: Program, slot: dict[Node, int]) -> Sizes:
    """The sizes of what comes of kept submodules."""
    found: Sizes = []
    of: dict[Any, tuple[int, int]] = {}
    for source, n in program.inputs:
        if source.kind == "user" and isinstance(n.val, Tensor):
            for axis, size in enumerate(shape_of(n.val)):
                of.setdefault(size, (slot[n], axis))
    for i, t in enumerate(results):
        for axis, size in enumerate(shape_of(t) if isinstance(t, Tensor) else ()):
            if isinstance(size, int) or getattr(size, "is_Integer", False):
                found.append((i, axis, int(size)))
            elif size in of:
                found.append((i, axis, of[size]))
    return found


# --- a part in PyTorch ----------------------------------------------------------------------------


class _Through(torch.autograd.Function):
    """A new value with the gradient of the old one."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, _old: Tensor) -> Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


def _batch_norm(
    x: Tensor, w: Any, b: Any, mean: Tensor, var: Tensor, _training: bool, momentum: float, eps: float, *_: Any
) -> Any:
    mean, var = mean.detach().clone(), var.detach().clone()
    return torch.nn.functional.batch_norm(x, mean, var, w, b, True, momentum, eps), mean, var


class OtherSizes(RuntimeError):
    pass


def other_sizes(name: str, now: Sequence[int], then: Sequence[Any]) -> str:
    return (
        f"{name}, kept in PyTorch, returns other sizes than when it was captured: ({', '.join(map(str, now))}), not "
        f"({', '.join(map(str, then))})"
    )


class Interpreter:
    """A part, operation by operation in PyTorch: when its gradients are to be differentiated, and when the engine turns
    its tensors down."""

    def __init__(self, program: Program, table: opaque.Table) -> None:
        inputs = [n for s, n in program.inputs if s.kind != "constant"]
        self.inputs = inputs  # in the order of the graph: the converter has sorted them
        self.constants = {n: s.tensor for s, n in program.inputs if s.kind == "constant"}
        self.steps = [(n, n.target, n.args, n.kwargs, n.grad, n.autocast, n.val) for n in program.nodes]
        self.outputs = list(program.outputs)
        self.writes = list(program.writes)
        self.item_of = dict(program.item_of)
        self.rows = table.rows
        self.hosts = any(n.target is HOST for n in program.nodes)

    def run(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """-> outputs, new values of what is written."""
        value: dict[Node, Any] = {**self.constants, **dict(zip(self.inputs, tensors, strict=True))}
        size: dict[Any, Any] = {}
        for n, t in zip(self.inputs, tensors, strict=True):
            if isinstance(n.val, Tensor):
                size.update(
                    (d, got) for d, got in zip(shape_of(n.val), t.shape, strict=True) if getattr(d, "is_Symbol", False)
                )
            else:
                size[expr_of(n.val)] = t.item()

        def number(e: Any) -> Any:
            size.update(
                (s, value[self.item_of[s]].item()) for s in e.free_symbols if s not in size and s in self.item_of
            )
            r = e.subs(size)
            return int(r) if r.is_integer else float(r)

        def of(a: Any) -> Any:
            return operand(a, value, number)

        for n, target, args, kwargs, grad, lowered, val in self.steps:
            with (
                torch.set_grad_enabled(grad and torch.is_grad_enabled()),
                autocast.put(lowered),
            ):
                if target is HOST:
                    made: Any = self.rows[args[1]].call([of(x) for x in args[0]])
                    value[n] = (made,) if isinstance(made, Tensor) else made
                    for t, y in zip(value[n], val, strict=False):
                        then = [d if isinstance(d, int) else d.subs(size) for d in shape_of(y)]
                        pairs = [p for p in zip(then, t.shape, strict=False) if not getattr(p[0], "free_symbols", ())]
                        if len(then) != t.dim() or any(d != got for d, got in pairs):
                            raise OtherSizes(other_sizes(self.rows[args[1]].name, t.shape, then))
                elif isinstance(target, str):
                    value[n] = self.named(
                        target, of(list(val.shape)) if isinstance(val, Tensor) else [], [of(a) for a in args], val
                    )
                    if isinstance(val, Tensor):
                        value[n] = value[n].to(val.dtype)
                else:
                    value[n] = target(*map(of, args), **{k: of(a) for k, a in kwargs.items()})
        outputs = [value[n] if isinstance(n, Node) else torch.tensor(of(n), device="cpu") for n in self.outputs]
        return outputs, [value[new] for _, new in self.writes]

    def named(self, target: str, shape: list[int], args: list[Any], val: Any) -> Any:
        if target == STOP:
            return args[0].detach()
        if target == THROUGH:
            return _Through.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        if target == BATCH_NORM:
            return _batch_norm(*args)
        if target == "reshape_to":
            return args[-1].reshape(shape)
        assert target in (COPY, FILL), target
        if isinstance(args[0], Tensor):
            return args[0].expand(shape).clone()
        return torch.full(shape, args[0], device=val.device)
