"""Yield points: what PyTorch does between two parts of the engine's work.

The engine stops at a host node (an ATen operator without a kernel of its own, a custom autograd.Function, a submodule
kept in PyTorch) and hands over the node's inputs. `drive` answers such stops until the engine is done:
  forward   the inputs are detached, those that are floats require grad, PyTorch computes under enable_grad and builds
            the node's own
            small autograd graph, a Region; the engine gets the detached outputs. Without a backward: plain no_grad,
            nothing kept.
  backward  the gradients of the outputs come in, torch.autograd.grad walks the Region, the gradients of the inputs go
            back (of a node
            with very many inputs in parts, from one walk).
Regions live in the dictionary of one forward, keyed by the node, so several forwards may be in flight.

Invariant: input tensors are views of engine memory that ends with the run. A Region outlives it, and what users have
written may keep what it is given (a feature in an attribute, the gradient in a Function's backward). Both get copies,
except of the caller's own tensors (all of a submodule in PyTorch, those with a gradient): those are used as they are. A
parameter is handed over itself: a Function may differentiate again by it, look at its attributes, write its gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from operator import or_
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from . import torch_private as private

if TYPE_CHECKING:
    from . import _C
    from .capture import HostOp


class Region:
    """The autograd graph of one host node in one forward. spent: a backward has freed it."""

    __slots__ = ("inputs", "outputs", "spent")

    def __init__(self, inputs: list[Tensor | None], outputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.spent = False


class Answer(NamedTuple):
    """What a submodule kept in PyTorch has returned. leaves: where the result's autograd graph ends: the tensors that
    it was given, then its parameters; none where the graph goes on."""

    module: nn.Module
    result: Any
    leaves: Sequence[Tensor] = ()


class Failed(RuntimeError):
    """The engine, or an operator of PyTorch's among its work, has stopped in the middle of a forward; what it has
    written so far may be half done. answers: of submodules that have run by then (answered.py)."""

    answers: tuple[Answer, ...] = ()


class _Noted(threading.local):
    answers: list[Answer] | None = None


_noted = _Noted()


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """In this block, on this thread, `note` keeps answers; they go with a Failed that leaves it."""
    outer, own = _noted.answers, list[Answer]()
    _noted.answers = own
    try:
        yield
    except Failed as error:
        error.answers = (*own, *error.answers)  # those that it has are of a part of this block
        raise
    finally:
        _noted.answers = outer


def note(answer: Answer) -> None:
    if _noted.answers is not None:
        _noted.answers.append(answer)


def _of_engine(step: Callable[..., Any], *args: Any) -> Any:
    try:
        return step(*args)
    except Exception as error:
        raise Failed(str(error)) from error


def _answer(run: _C.Run, op: HostOp, results: list[Tensor]) -> None:
    try:
        run.host_done(results)
    except Exception as error:
        raise Failed(f"{op.name} in PyTorch: {error}") from error


# A host node is known by its row in the table of host operations.
Regions = dict[int, Region]
Want = dict[int, list[list[int]]]
"""Per host node that takes part in a backward: the positions of its inputs that want a gradient, in parts (see
csrc/ops/host.c)."""
Answers = dict[int, dict[int, "Tensor | None"]]
"""Per host node: gradients by position of the input, computed for all parts when the first is asked for. Lives as long
as one backward."""
OUTPUT, _HOST, _ANY = 1, 2, 3  # om_flow_kind
_OF_NUMBERS = ("aten::linspace", "aten::logspace")  # read tensors as numbers in eager: no gradient, and no error


class Flow:
    """What the gradients of a joint graph are sums over (csrc/graph/engine.h, om_flow): to tell in a backward which of
    them are None."""

    __slots__ = ("_fed", "grads", "host", "shares", "terms")

    def __init__(
        self, rows: tuple[list[tuple[int, int, int]], dict[tuple[int, int], int], dict[int, int], list[int]]
    ) -> None:
        self.terms, self.host, self.grads, self.shares = rows
        self._fed: dict[tuple[int, int, int], frozenset[Any]] | None = None

    def sources(self) -> dict[int, int]:
        """Per graph input: the user outputs (bits; the last for all from 63 on) that its gradient may come from."""
        bits: list[int] = []
        for kind, a, b in self.terms:
            if kind == _HOST:  # whatever comes to any of the node's outputs
                given = [term for (row, _), term in self.host.items() if row == a]
                bits.append(reduce(or_, [bits[t] if t < len(bits) else -1 for t in given], 0))
            else:
                bits.append(1 << min(a, 63) if kind == OUTPUT else bits[a] | bits[b] if kind == _ANY else 0)
        return {i: bits[term] for i, term in self.grads.items()}

    def detached(self, row: int, region: Region) -> list[tuple[int, int]]:
        """Results of a host node (node, number among those of floating point) that require no gradient, which only its
        call can tell: the graph has taken them for ones that do."""
        floats = [t for t in region.outputs if t.is_floating_point()]
        return [(row, k) for k, t in enumerate(floats) if not t.requires_grad and (row, k) in self.host]

    def requires(self, kind: int, a: int, b: int, detached: Collection[tuple[int, int]]) -> bool:
        """Does a user output (OUTPUT, its number, 0) or an input of a host node (_HOST, node, its position) require a
        gradient when these results do not?"""
        if self._fed is None:
            leaves: list[frozenset[tuple[int, int, int]]] = []
            for term in self.terms:
                leaves.append(leaves[term[1]] | leaves[term[2]] if term[0] == _ANY else frozenset([term]))
            fed: dict[tuple[int, int, int], set[Any]] = {}
            for source, t in (*((None, t) for t in self.grads.values()), *self.host.items()):
                for leaf in leaves[t]:
                    fed.setdefault(leaf, set()).add(source)  # None: a graph input
            self._fed = {leaf: frozenset(of) for leaf, of in fed.items()}
        of = self._fed.get((kind, a, b))
        return of is None or any(source not in detached for source in of)


class Missing:
    """Which gradients of one backward are None, as far as it has come. The engine has zeros in their place."""

    __slots__ = ("arrived", "flow", "none")

    def __init__(self, flow: Flow, arrived: bytes) -> None:
        self.flow = flow
        self.arrived = arrived  # per user output
        self.none: set[tuple[int, int]] = set()  # (host node, position of its input) without a gradient

    def of_input(self, i: int) -> bool:
        """Is the gradient of this graph input None? Asked when it has been computed."""
        return self.all(self.flow.grads[i])

    def all(self, term: int) -> bool:
        """Are all sources of this term without a gradient?"""
        rest, seen = [term], {term}
        while rest:
            kind, a, b = self.flow.terms[rest.pop()]
            if kind == OUTPUT and self.arrived[a] or kind == _HOST and (a, b) not in self.none:
                return False
            if kind == _ANY:
                rest += {a, b} - seen
                seen |= {a, b}
        return True


def _nothing() -> None:
    pass


class Host:
    """The host nodes of one captured graph. `ms` adds up the time spent outside the engine. follow: called before the
    engine goes on, as others may have used this thread meanwhile (a GPU's stream is the thread's). once: nodes that run
    once a step, whatever backwards come: what a user has written may count, or draw numbers of its own."""

    def __init__(self, ops: Sequence[HostOp], follow: Callable[[], None] | None = None) -> None:
        self.ops = ops
        self.keeps = any(op.kind == "module" for op in ops)
        self.once = frozenset(i for i, op in enumerate(ops) if op.kind != "aten" or op.draws)
        self.follow = follow or _nothing
        self.ms = [0.0] * len(ops)

    def resume(self, run: _C.Run, segment: int) -> tuple[int, int, list[Tensor]] | None:
        """A backward goes on. On a GPU it may be what tells that an index or label of the forward was out of range."""
        self.follow()
        try:
            return run.resume(segment)
        except ValueError as error:
            if self.follow is _nothing:
                raise
            raise IndexError(str(error)) from None

    def drive_forward(
        self,
        run: _C.Run,
        regions: Regions,
        want: Want,
        own: Sequence[Tensor],
        flow: Flow | None = None,
        before: Regions | None = None,
    ) -> frozenset[tuple[int, int]]:
        """Runs a forward to its end. Leaves a Region for every node in `want`. own: the caller's tensors, one per graph
        input. flow: of the variant for which all outputs arrive; with `want`. before: of the same step's forward, which
        is run again: `once` nodes are not. -> all that is detached (Flow.detached)."""
        if not self.keeps:
            return self._drive_forward(run, regions, want, own, flow, before)
        with noting():
            return self._drive_forward(run, regions, want, own, flow, before)

    def _drive_forward(self, run: _C.Run, regions: Regions, want: Want, own: Sequence[Tensor], flow: Flow | None,
                       before: Regions | None) -> frozenset[tuple[int, int]]:  # fmt: skip
        detached: set[tuple[int, int]] = set()
        self.follow()
        stop = _of_engine(run.resume)
        mine = {t.data_ptr(): t for t in own if t.numel()} if stop is not None else {}
        while stop is not None:
            start = perf_counter()
            index, _, inputs = stop
            done = before.get(index) if before is not None and index in self.once else None
            if done is not None and not (done.spent and index in want):
                regions[index] = done
                _answer(run, self.ops[index], [plain(t.detach()) for t in done.outputs])
            else:
                self._forward(run, index, inputs, regions, want, mine, flow, detached)
            if flow is not None and index in regions:
                detached.update(flow.detached(index, regions[index]))
            self.ms[index] += (perf_counter() - start) * 1e3
            stop = _of_engine(run.resume)
        return frozenset(detached)

    def drive_backward(
        self, run: _C.Run, segment: int, regions: Regions, want: Want, retain: bool, answers: Answers, missing: Missing
    ) -> None:
        """Runs a backward to the end of `segment`. retain: keep the Regions usable for another backward. missing: what
        arrives as None in PyTorch does so here, and what comes back as None is noted."""
        stop = self.resume(run, segment)
        while stop is not None:
            start = perf_counter()
            index, part, grads = stop
            parts = want[index]
            if index not in answers:
                places = [place for wanted in parts for place in wanted]
                given = [None if missing.all(missing.flow.host[index, k]) else g for k, g in enumerate(grads)]
                if not self.ops[index].of_torch:
                    given = [None if g is None else g.clone() for g in given]
                if index in regions:
                    found = _region_grads(regions[index], places, given, retain)
                    missing.none.update([(index, place) for place, g in zip(places, found, strict=True) if g is None])
                else:  # forward has left it out: its result was overwritten before anybody read it
                    found = [None] * len(places)
                answers[index] = dict(zip(places, found, strict=True))
            self.follow()
            run.host_done([answers[index].pop(place) for place in parts[part]])
            self.ms[index] += (perf_counter() - start) * 1e3
            stop = self.resume(run, segment)

    def _call(self, op: HostOp, inputs: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """What PyTorch's own operators raise is raised again by the user's forward, which may catch it; what the user
        has written has run, and is not run twice."""
        if op.kind != "aten":
            return op.call(inputs)
        return _of_engine(op.call, inputs)  # type: ignore[no-any-return]

    def _forward(self, run: _C.Run, node: int, inputs: Sequence[Tensor | None], regions: Regions, want: Want,
                 own: dict[int, Tensor], flow: Flow | None, detached: Collection[tuple[int, int]]) -> None:  # fmt: skip
        op = self.ops[node]
        if node not in want:
            with torch.no_grad():
                given = [t if op.of_torch else _copied(op, t, own) for t in _given(inputs)]
                answer = [plain(t) for t in _as_tuple(self._call(op, given))]
            if node in self.once:
                regions[node] = Region([], tuple(answer))
            self.follow()
            _answer(run, op, answer)
            return
        wanted = {place for part in want[node] for place in part}
        if flow is not None and detached:
            wanted = {place for place in wanted if flow.requires(_HOST, node, place, detached)}
        leaves: list[Tensor | None] = []
        for place, t in enumerate(inputs):
            if t is None:
                leaves.append(None)
                continue
            leaf = _copied(op, t, own)
            leaves.append(leaf.requires_grad_() if place in wanted and not leaf.requires_grad else leaf)
        with torch.set_grad_enabled(not op.name.startswith(_OF_NUMBERS)):
            outputs = _as_tuple(self._call(op, _given(leaves)))
        regions[node] = Region(leaves, outputs)
        self.follow()
        _answer(run, op, [plain(t.detach()) for t in outputs])


def _region_grads(
    region: Region, wanted: list[int], grads: Sequence[Tensor | None], retain: bool
) -> list[Tensor | None]:
    """grads: of every floating-point output, in order, None where none arrives. -> gradients of the wanted inputs."""
    floats = [t for t in region.outputs if t.is_floating_point()]
    pairs = [(t, g) for t, g in zip(floats, grads, strict=True) if g is not None and t.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    region.spent = not retain
    outputs, incoming = zip(*pairs, strict=True)
    sources = {place: t for place in wanted if (t := region.inputs[place]) is not None and t.requires_grad}
    if not sources:
        return [None] * len(wanted)
    with hooks_at_rest([*sources.values()]):
        found = torch.autograd.grad(outputs, [*sources.values()], incoming, allow_unused=True, retain_graph=retain)
    grads_of = dict(zip(sources, found, strict=True))
    return [None if (g := grads_of.get(place)) is None else plain(g) for place in wanted]


@contextlib.contextmanager
def hooks_at_rest(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hooks of parameters are run when the whole gradient is handed to them."""
    tables: list[Any] = [t._backward_hooks for t in tensors if t._backward_hooks]
    before = [list(table.items()) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, items in zip(tables, before, strict=True):
            table.update(items)


def plain(t: Tensor) -> Tensor:
    """The same values as memory shows them: the engine knows no negation bit, no tensor that is zero without memory, no
    sparse one."""
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.resolve_neg().clone() if t.is_neg() or private.is_zero(t) else t


def _copied(op: HostOp, t: Tensor, own: dict[int, Tensor]) -> Tensor:
    """What outlives the run: a copy, or the caller's own tensor."""
    mine = own.get(t.data_ptr())
    if mine is not None and mine.shape == t.shape and mine.dtype == t.dtype and mine.stride() == t.stride():
        if type(mine) is nn.Parameter and op.kind != "aten":
            return mine
        if mine.requires_grad or op.kind == "module":
            return mine.detach()
    return t.detach().clone()


def _given(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in inputs if t is not None]


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
