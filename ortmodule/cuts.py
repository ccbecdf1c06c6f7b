"""A module with hooks on submodules: parts of its graph and the hooks between them, in the order in which PyTorch would
run them.

Every part is a Graph with a chain of autograd.Functions of its own. A hook is given the tensors that one part has
returned and the next one takes, so all that it does with them (a loss, a gradient, retain_grad, another value in their
place) is between two chains, where autograd joins them by itself. Hooks are run by torch's own Module._call_impl, on a
stand-in whose forward plays the parts of the submodule: order, keyword arguments, always_call, errors and full backward
hooks are PyTorch's.

The first call of a kind runs in PyTorch while `Effect` looks on: hooks that give other structures or sizes, or that
change attributes which forward reads, have no place between parts.

Invariant: a hook runs as often as in PyTorch. So once hooks have run, a call is not begun again: a part that the engine
turns down is computed operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import answered, autocast, cuda_engine, guard
from . import torch_private as private
from .capture import CaptureError, CutCaptured, flatten_inputs
from .capture.cuts import Interpreter, OtherSizes, other_sizes
from .capture.marks import Mark
from .capture.skeleton import Unreadable
from .chain import Graph, Refusal, Unfit, view_again
from .host import Answer, Failed, note, noting, plain

_PLAIN = frozenset((Tensor, nn.Parameter))


def _form(x: Any) -> tuple[Any, ...]:
    """What must be the same behind a hook as before it."""
    flat = flatten_inputs((x,), {})
    return flat.key, flat.scalars, [t.shape for t in flat.tensors], [type(t) in _PLAIN for t in flat.tensors]


def _same_tensors(x: Any) -> list[int]:
    """Which of the tensors are one."""
    first: dict[int, int] = {}
    return [first.setdefault(id(t), i) for i, t in enumerate(flatten_inputs((x,), {}).tensors)]


def _wanting(x: Any) -> list[bool]:
    """Which of the tensors that could do require a gradient."""
    return [t.requires_grad for t in flatten_inputs((x,), {}).tensors if t.is_floating_point() or t.is_complex()]


class Effect:
    """What the hooks of a module did in one call: `reason` why they cannot run between parts, `changed` attributes
    (module, name), submodules where one tensor at several places becomes several (`apart`), and those whose hooks make
    tensors require a gradient (`asks`: name, behind forward)."""

    def __init__(self, module: nn.Module, places: Sequence[guard.Place]) -> None:
        self.module = module
        self.places = places
        self.reason: str | None = None
        self.changed: set[tuple[str, str]] = set()
        self.apart: set[str] = set()
        self.asks: set[tuple[str, bool]] = set()

    def seen(self, place: guard.Place) -> guard.Place:
        """The place with what was found out about it."""
        asks = (place.name, False) in self.asks, (place.name, True) in self.asks
        return place._replace(apart=place.apart or place.name in self.apart, asks=asks)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward in PyTorch."""
        before, params = self._attributes(), dict(self.module.named_parameters())
        undo = [f for place in self.places if not place.whole for f in self._watch(place)]
        try:
            result = self.module.forward(*args, **kwargs)
        finally:
            for f in undo:
                f()
        after = self._attributes()
        self.changed = {
            k for k in before.keys() | after.keys() if k not in before or k not in after or before[k] != after[k]
        }
        now = dict(self.module.named_parameters())
        if params.keys() != now.keys() or any(now[k] is not p for k, p in params.items()):
            self.reason = "parameters are replaced while forward runs"
        return result

    def _attributes(self) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for name, m in self.module.named_modules():
            for k, v in m.__dict__.items():
                if k not in guard._INNER and "_hooks" not in k:
                    found[name, k] = guard._Same(v) if isinstance(v, Tensor) else guard._freeze(v)
        return found

    def _watch(self, place: guard.Place) -> list[Callable[[], None]]:
        """The first and the last of the module's hooks: do they see the same?"""
        m = self.module.get_submodule(place.name)
        pre, post = m._forward_pre_hooks, m._forward_hooks
        seen: list[tuple[tuple[Any, ...], list[int], list[bool]] | None] = []

        def look(given: Any) -> tuple[tuple[Any, ...], list[int], list[bool]] | None:
            try:
                return _form(given), _same_tensors(given), _wanting(given)
            except Unreadable as error:
                self.reason = self.reason or f"{place.name}, which has hooks, takes or returns {error}"
                return None

        def note(_m: Any, *given: Any) -> None:
            seen.append(look(given))

        def compare(_m: Any, *given: Any) -> None:
            before, after = seen.pop(), look(given)
            if before is None or after is None:
                return
            (form, same, wanting), (form_now, same_now, now) = before, after
            if any(late and not early for early, late in zip(wanting, now)):
                self.asks.add((place.name, len(given) == 1))
                if not all(now):
                    self.reason = f"a hook on {place.name} makes some of its tensors require a gradient, others not"
            if same != same_now:
                self.apart.add(place.name)
            if form != form_now:
                self.reason = (
                    self.reason
                    or f"a hook on {place.name} gives tensors of another structure or size in the place of its own"
                )

        def note_result(_m: Any, _args: Any, out: Any) -> None:
            note(_m, out)

        def compare_result(_m: Any, _args: Any, out: Any) -> None:
            compare(_m, out)

        marks = [object() for _ in range(4)]
        table: list[tuple[Any, Any, Callable[..., None], bool]] = [
            (pre, marks[0], note, False), (pre, marks[1], compare, True),
            (post, marks[2], note_result, False), (post, marks[3], compare_result, True)]  # fmt: skip
        for hooks, key, f, last in table:
            hooks[key] = f
            hooks.move_to_end(key, last=last)
            if hooks is pre:
                m._forward_pre_hooks_with_kwargs[key] = True  # type: ignore[index]

        def remove(hooks: Any, key: Any) -> Callable[[], None]:
            return lambda: (hooks.pop(key, None), m._forward_pre_hooks_with_kwargs.pop(key, None))[0]

        return [remove(hooks, key) for hooks, key, _, _ in table]


class Stand:
    """Looks like a hooked submodule to Module._call_impl, with another forward. Hooks get the submodule itself. every:
    also those that are part of the forward around it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], every: bool = False) -> None:
        self.module = module
        self.every = every
        self.forward: Callable[..., Any] | None = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def _hooks(self, name: str) -> dict[Any, Callable[..., Any]]:
        module = self.module

        def bound(f: Callable[..., Any]) -> Callable[..., Any]:
            return lambda _stand, *args, _kept=self: f(module, *args)  # a backward hook refers to its module weakly

        return {k: bound(f) for k, f in getattr(module, name).items()
                if self.every or not guard.part_of_forward(f)}  # fmt: skip

    _forward_pre_hooks = property(lambda self: self._hooks("_forward_pre_hooks"))
    _forward_hooks = property(lambda self: self._hooks("_forward_hooks"))
    _backward_pre_hooks = property(lambda self: self._hooks("_backward_pre_hooks"))
    _backward_hooks = property(lambda self: self._hooks("_backward_hooks"))
    _get_backward_hooks = nn.Module._get_backward_hooks
    _get_backward_pre_hooks = nn.Module._get_backward_pre_hooks


class _Again:
    """A part, for a backward that is to be differentiated (chain.Call)."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter

    def replay(self, tensors: Sequence[Tensor], clones: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        alias: dict[int, Tensor] = {}
        own = [
            clones[i] if i in clones else alias.setdefault(id(t), t.view_as(t)) if t.requires_grad else t
            for i, t in enumerate(tensors)
        ]
        return list(self.interpreter.run(own)[0]), own


class CutGraph:
    """The parts of one captured module, loaded: what State.run expects of a Graph."""

    def __init__(
        self,
        captured: CutCaptured,
        module: nn.Module,
        segment_mb: float,
        memory_level: int,
        cuda: int,
        all_rows: bool = False,
        all_tokens: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        assert captured.cut is not None
        self.captured = captured
        self.module = module
        self.cuda = cuda
        self.parts = captured.cut.parts
        self.marks = captured.cut.marks
        self.n_slots = captured.cut.n_slots
        self.outputs = captured.cut.outputs
        self.graphs = [
            None if c is None else Graph(c, segment_mb, memory_level, cuda, None, all_rows, all_tokens, cuda_graphs)
            for c in captured.captured
        ]
        self.again = [_Again(i) for i in captured.interpreters]
        self.leaves = [spec.leaf for spec in captured.inputs if spec.kind == "user"]
        self.bound = [spec for spec in captured.inputs if spec.kind != "user"]
        self.pairs: list[int] = []  # complex numbers stay what they are
        fed = [self.parts[k].feed[i] for k, g in enumerate(self.graphs) if g is not None for i in g.writes]
        self.writes = [slot for slot in fed if isinstance(slot, int)]
        self.n_outputs = len(self.outputs)
        self.forwards = 0
        self.broken: str | None = None  # why later calls should be PyTorch's
        self.call_ms = {m.module: 0.0 for m in self.marks if m.kind == "call"}  # of kept submodules, forward

    @property
    def loaded(self) -> list[Graph]:
        return [g for g in self.graphs if g is not None]

    def describe(self) -> list[str]:
        """One text per cut submodule, for the report."""
        found: dict[str, str] = {}
        for mark in self.marks:
            if mark.kind == "call":
                inside = self.module.get_submodule(mark.module).modules()
                hooked = any(guard.place_of("", m) for m in inside)
                why = "with its hooks" if hooked else "as it leaves tensors behind, or checkpoints"
                found[mark.module] = f"cut at {mark.module}: called in PyTorch, {why}"
            elif mark.kind == "enter":
                own = self.module.get_submodule(mark.module).__dict__
                kinds = [
                    text
                    for text, name in (
                        ("forward pre-hook", "_forward_pre_hooks"),
                        ("forward hook", "_forward_hooks"),
                        ("backward hook", "_backward_hooks"),
                        ("backward pre-hook", "_backward_pre_hooks"),
                    )
                    if own.get(name)
                ]
                found[mark.module] = f"cut at {mark.module}: {', '.join(kinds) or 'hooks, since removed'}"
        return list(found.values())

    def play(self, tensors: list[Tensor], lowered: autocast.State) -> Any:
        """One call. tensors: the arguments' leaves and what is bound, as captured.inputs has them."""
        self.forwards += 1
        run = _Run(self, tensors, lowered)
        try:
            with noting():
                run.until(0, len(self.parts) - 1)
            outs = [run.values[i] for i in self.outputs]
            view_again(self.captured.views, tensors, outs)
            return self.captured.rebuild(outs)
        finally:
            run.values.clear()


class _Run:
    """One call of a CutGraph. values: by slot."""

    __slots__ = ("graph", "lowered", "values")

    def __init__(self, graph: CutGraph, tensors: list[Tensor], lowered: autocast.State) -> None:
        self.graph = graph
        self.values: list[Any] = [*tensors, *[None] * (graph.n_slots - len(tensors))]
        self.lowered = lowered

    def until(self, k: int, end: int) -> None:
        """Parts k to end, with what is between them."""
        marks = self.graph.marks
        while True:
            self.part(k)
            if k == end:
                return
            mark = marks[k]
            if mark.kind == "enter":
                k = self.enter(k, mark)
            elif mark.kind == "call":
                self.call(k, mark)
            elif mark.kind == "sync":
                with nullcontext() if mark.grad else torch.no_grad():
                    held, new = (self.values[i] for i in mark.operands)
                    held.copy_(new)
                if mark.results[0] is not None:
                    self.values[mark.results[0]] = held
            k += 1

    def part(self, k: int) -> None:
        part, graph, values = self.graph.parts[k], self.graph.graphs[k], self.values
        for i in part.drop:
            values[i] = None
        if graph is None:
            return

        def given(i: int, f: int | tuple[int, int]) -> Tensor:
            t = plain(values[f]) if isinstance(f, int) else torch.tensor(values[f[0]].shape[f[1]], device="cpu")
            return t if t.dim() else cuda_engine.number(t, graph.cuda, i in graph.host_inputs)

        tensors = [given(i, f) for i, f in enumerate(part.feed)]
        for i in part.cloned:
            tensors[i] = tensors[i].clone()
        again = self.graph.again[k]
        try:
            if torch.is_grad_enabled():
                outs = graph.train(tensors, tuple([t.requires_grad for t in tensors]), again, self.lowered)
            else:
                outs = graph.infer(tensors)
        except (Unfit, Refusal, Failed) as error:
            if isinstance(error, Failed) and again.interpreter.hosts and self.untouched(k):
                raise
            self.graph.broken = f"the engine refuses a part of the graph: {error}"
            try:
                with answered.again(error.answers if isinstance(error, Failed) else ()):
                    outs, writes = again.interpreter.run(tensors)
            except (OtherSizes, Failed) as other:
                self.give_up(k, str(other))
            with torch.no_grad():
                for i, new in zip(graph.captured.writes, writes, strict=True):
                    tensors[i].copy_(new)
        for i, t in zip(part.outputs, outs, strict=True):
            values[i] = t

    def take(self, mark: Mark, given: Any, got: Any) -> None:
        """What a hook has left of what it was given becomes the values behind the mark."""
        tensors = flatten_inputs((got,), {}).tensors
        fits = got is given and type(got) is Tensor or _form(got) == _form(given)
        if fits and len(set(mark.order)) < len(mark.order):  # one tensor at several places stays one
            first: dict[int, Tensor] = {}
            fits = all(first.setdefault(i, t) is t for i, t in zip(mark.order, tensors, strict=True))
        if not fits:
            self.graph.broken = (
                f"a hook on {mark.module} gives tensors of another structure or size in the place of its own"
            )
            raise RuntimeError(
                f"ortmodule: {self.graph.broken}, and has not done so when the module was captured. Later calls run in "
                "PyTorch."
            )
        self.put(mark, tensors)

    def enter(self, k: int, mark: Mark) -> int:
        """A hooked submodule: its hooks, and the parts up to its exit. Returns the number of that mark."""
        end = self.graph.marks[mark.partner]
        grad = torch.is_grad_enabled()
        module = self.graph.module.get_submodule(mark.module)
        given = mark.fill([self.values[i] for i in mark.operands])
        out: Any = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal out
            # What BackwardHook puts in the place of the arguments is of the same form.
            self.take(mark, given, (args, kwargs))
            with nullcontext() if mark.grad else torch.set_grad_enabled(grad):
                self.until(k + 1, mark.partner)
            out = end.fill([self.values[i] for i in end.operands])
            return out

        stand = Stand(module, forward)
        try:
            with nullcontext() if mark.grad else torch.no_grad(), mark.autocast():
                result = private.call_impl(stand, *given[0], **given[1])
            self.take(end, out, result)
        finally:
            stand.forward = None  # autograd may keep the stand-in
        return mark.partner

    def call(self, k: int, mark: Mark) -> None:
        args, kwargs = mark.fill([self.values[i] for i in mark.operands])
        start = perf_counter()
        with nullcontext() if mark.grad else torch.no_grad(), mark.autocast():
            module = self.graph.module.get_submodule(mark.module)
            result = module(*args, **kwargs)
        note(Answer(module, result))
        self.graph.call_ms[mark.module] += (perf_counter() - start) * 1e3
        flat = flatten_inputs((result,), {})
        if flat.key != mark.key:
            self.give_up(k, f"{mark.module} returns another structure than when it was captured")
        first = dict(zip(mark.order, flat.tensors, strict=True))
        for i, axis, size in mark.sizes:
            want = size if isinstance(size, int) else self.values[size[0]].shape[size[1]]
            if i in first and first[i].shape[axis] != want:
                now = first[i].shape
                self.give_up(k, other_sizes(mark.module, now, [*now[:axis], want, *now[axis + 1 :]]))
        self.put(mark, flat.tensors)

    def untouched(self, k: int) -> bool:
        """Nothing has happened before the end of part k but that kept submodules have been called."""
        written = any(g is not None and g.captured.writes for g in self.graph.graphs[: k + 1])
        return not written and all(m.kind in ("call", "between") for m in self.graph.marks[:k])

    def give_up(self, k: int, reason: str) -> NoReturn:
        """The rest of the graph, from part k or the mark behind it on, cannot take what a kept submodule has returned.
        PyTorch runs the call, where it still can."""
        if self.untouched(k):
            raise Failed(reason)
        self.graph.broken = reason
        raise RuntimeError(f"ortmodule: {reason}. Later calls run in PyTorch.")

    def put(self, mark: Mark, tensors: list[Tensor]) -> None:
        for i, t in zip(mark.order, tensors, strict=True):
            where = mark.results[i]
            if where is not None:
                self.values[where] = t


def check(effect: Effect, reads: set[tuple[str, str]]) -> None:
    """Raises CaptureError when forward reads what hooks have changed."""
    if effect.reason is not None:
        raise CaptureError(effect.reason)
    found = sorted(effect.changed & reads)
    if found:
        where, name = found[0]
        raise CaptureError(f"hooks on submodules change self.{name}: they take part in what forward returns", where)
