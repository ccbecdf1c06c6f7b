"""One capture: the steps down from the whole module in the engine to the smallest piece of it in PyTorch.

climb     a submodule that cannot be captured is kept in PyTorch and the rest is captured again; where that cannot be,
          its parent is. What a kept submodule and the code around it read, write or leave for each other decides how
          far: called by the graph, together in PyTorch, or called on live tensors between two parts of the graph.
Skip      this call runs in PyTorch, and the next may be captured.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from . import branches, cuda_engine, cuts, guard, memory, parts, patches, watch
from . import torch_private as private
from .capture import Captured, CaptureError, CutCaptured, capture, capture_error, flatten_inputs
from .capture.edits import tensors_in
from .chain import Graph
from .contents import joined
from .errors import TimeUp
from .quiet import quiet
from .state import Entry, Refused, State, n_modules, shadow_of, tensor_of, unwrapped

logger = logging.getLogger("ortmodule")

_LIMIT = 24  # submodules tried to be left out before the whole module is
# Calls that PyTorch runs because they fill caches of functools. Then what such a cache would keep is computed at every
# step: forward fills it for sizes without end, or for the module itself, in whose place another stands for a trace.
_CACHES_FILLED = 8


class Skip(Exception):
    """This call runs in PyTorch, the next may not have to. onnx: the graph, when forward has done no more than to
    change modules, and drawn nothing for them."""

    def __init__(self, reason: str, onnx: bytes = b"") -> None:
        super().__init__(reason)
        self.onnx = onnx


def climb(state: State, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, symbolic: bool,
          fixed: set[tuple[int, int]], answers: branches.Answers,
          deadline: float) -> tuple[Graph | cuts.CutGraph, list[Any]]:  # fmt: skip
    """Captures, climbing from failing submodules to their parents, and loads the result into the engine. Also the
    functools caches that forward has met. Raises CaptureError, and TimeUp after the deadline."""
    if any(not isinstance(p, nn.Parameter) for p in state.module.parameters()):
        raise Skip("parameters are replaced by other tensors for this call (functional_call)")
    if any(p.grad is not None and p.grad.shape != p.shape for p in state.module.parameters()):
        raise Skip("a parameter has a gradient of another size, as after a resize; zero_grad ends that")
    odd = guard.of_odd_class(state.module)
    if odd is not None:
        raise CaptureError(odd)
    lacking = private.lacks("capture") or (private.lacks("hooks") if entry.places else None)
    if lacking is None and private.lacks("shared") is not None:
        n_places = sum(1 for _ in state.module.named_modules(remove_duplicate=False))
        lacking = private.lacks("shared") if n_places != sum(1 for _ in state.module.modules()) else None
    if lacking is not None:
        raise CaptureError(lacking)
    keep = set(entry.keep)
    branching = entry.branches and not keep and not entry.places
    if answers and not branching:
        raise CaptureError("a branch on a tensor's value", *answers[-1][2:])
    # a capture whose forward assigned numbers to attributes of objects
    first: tuple[bytes, watch.Watch] | None = None
    stopped: set[tuple[Any, ...]] = set()  # kinds of modules that could not be captured, and where
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    seen: watch.Watch | None = None
    try:
        for _ in range(_LIMIT):
            if perf_counter() > deadline:
                raise TimeUp
            if seen is not None:
                entry.escaped |= _on_live(state, seen)
            places = _live(state, entry, keep)
            shadow = shadow_of(state.body)
            try:
                with (
                    patches.scope(deadline=deadline),
                    unwrapped(shadow),
                    watch.Watch(shadow, state.module) as seen,
                    quiet(),
                ):
                    seen.symbolic = dynamic or symbolic
                    seen.stores = not places
                    captured = capture(
                        shadow,
                        args,
                        kwargs,
                        dynamic=dynamic,
                        symbolic_scalars=symbolic,
                        keep_in_torch=keep,
                        fixed=fixed,
                        cut=places,
                        answers=answers if branching else None,
                        rehearse=branching and any(g.answers for g in entry.graphs),
                        earlier=[g.graph.captured.kept for g in state.every if g.graph.captured.kept],
                    )
                if entry.effect is not None:
                    cuts.check(entry.effect, seen.reads)
                if _escaping(_on_live(state, seen) - entry.escaped, keep):
                    _restore(undo)
                    undo, first = [], None
                    continue
                ran = seen.ran() if keep else set()
                around = {k for k in keep - seen.called if any(_inside(w, {k}) for w in ran)}
                if around:  # layers of a list that forward walks through itself
                    _restore(undo)
                    undo, first = [], None
                    keep = _outermost((keep - around) | {_parent(shadow, k) for k in around})
                    if "" in keep:
                        raise CaptureError(f"{min(around)} would have to stay in PyTorch, and is not called as a whole")
                    branching = branching and not keep
                    continue
                # what a kept module's own forward assigns is not among them; hooks may look in between
                # a checkpoint assigns them once more, in backward
                twice = captured.checkpoints.n or captured.checkpoints.selective
                stored = set() if twice else set(captured.stored) - captured.inside
                lasting = set() if places else {*captured.left, *seen.restored} | stored
                written = sorted(seen.writes - lasting)
                if seen.fills and entry.caches_filled < _CACHES_FILLED and not state.settings.strict:
                    entry.caches_filled += 1  # this call fills it in PyTorch; the next finds all there
                    raise Skip("forward fills a cache (functools) that outlives the call")
                if not written:
                    problems = _problems(state.module, seen, captured, keep)
                    if not problems and not seen.assigns and (first is None or captured.onnx == first[0]):
                        undo = []
                        break
                    if not problems and first is None:
                        # Assigned as forward would have done. If that makes no difference to a second capture, it
                        # holds for this call too.
                        first = captured.onnx, seen
                        undo = [(own, dict(own)) for own, _ in seen.assigns]
                        for own, new in seen.assigns:
                            own.update(new)
                        continue
                    if problems and all(p.fills for p in problems) and not (entry.fills_seen or state.settings.strict):
                        entry.fills_seen = True  # this call fills it in PyTorch; the next may find all there
                        raise Skip("forward fills a dictionary that outlives the call")
                    if not problems:
                        entry.writes_seen += 1
                        if not seen.assigns and entry.writes_seen <= 2 and not state.settings.strict:
                            raise Skip("forward assigns attributes of an object that it reads")
                        assert first is not None
                        problems = (seen if seen.assigns else first[1]).assigned()
                    _restore(undo)
                    undo, first = [], None
                    whole = next((p for p in problems if not p.module), problems[0])
                    if state.settings.strict or not whole.module:
                        raise CaptureError(whole.reason, whole.module, whole.file, whole.line)
                    keep = _outermost(keep | {p.module for p in problems})
                    branching = branching and _still(keep, answers, whole)
                    state.reasons.update({p.module: p for p in problems})
                    continue
                # Tensors or state that the user may look at afterwards, or a cache: this call runs in PyTorch so
                # that it is written; a module that does it again and again stays there.
                again = private.in_backward()  # a checkpoint's second forward, of which the first was PyTorch's
                entry.writes_seen += not again
                more = (keep or places or seen.keeps or captured.stored or seen.problems or seen.assigns
                        or captured.conditions)  # fmt: skip
                plain = not more and all(op.kind == "aten" and not op.draws for op in captured.host_ops)
                if (entry.writes_seen <= 2 or again) and (not state.settings.strict or plain and not state.settled):
                    raise Skip("forward assigns attributes of a module", captured.onnx if plain else b"")
                where, name = written[0]
                while _inside(where, keep):
                    where = _parent(shadow, where)
                raise CaptureError(f"forward assigns self.{name}", where)
            except Skip:
                raise
            except branches.NoBranches:
                if answers:
                    raise
                branching = False
            except Exception as raised:
                error = capture_error(shadow, raised)
                name = error.module
                while name in keep:
                    name = _parent(shadow, name)
                # in a kept module, which a symbolic trace runs for the sizes of its result: no other trace does better
                if state.settings.strict or not name or _inside(name, keep):
                    raise error from raised
                like = _alike(shadow, name)
                at = type(shadow.get_submodule(name)), error.reason, error.file, error.line
                keep = _outermost(keep | (like if at in stopped else {name}))
                stopped.add(at)
                branching = branching and _still(keep, answers, error)
        else:
            raise CaptureError(f"more than {_LIMIT} submodules cannot be captured")
    finally:
        _restore(undo)
    for op in captured.host_ops if state.settings.strict else ():
        if op.kind == "module" or state.settings.strict == "engine":
            asked = state.settings.asked_strict
            what = f"strict={asked!r}" if asked else "the fallback policy"
            raise CaptureError(f"{what}: {op.name} would run in PyTorch ({op.reason})", op.module, op.file, op.line)
    if parts.better(state, keep):
        raise CaptureError(f"{', '.join(sorted(keep))}, most of the module, cannot be captured, and would stay in "
                           "PyTorch as a whole")  # fmt: skip
    start = perf_counter()
    graph = _loaded(state, captured, args, kwargs)
    entry.keep = keep
    reads = {r for r in seen.reads - {*captured.left, *captured.stored} if not _inside(r[0], keep)}
    state.note(entry, reads, captured.stored)
    bound: dict[int | str, bool] = {}
    for each in _parts(captured):
        for i, spec in enumerate(each.inputs):
            if spec.kind == "const_attr":
                bound.update(dict.fromkeys((id(spec.tensor), spec.target), i in each.writes))
    seen.note_numbers(state.module, bound)
    # what stays in PyTorch is given the objects of the capture
    plain = not keep and not places and all(op.kind == "aten" for op in captured.host_ops)
    entry.held.add(seen.rows, seen.spaces, seen.asked_by_name(), plain and seen.equals(), seen.shared())
    entry.ties.add(state.module, seen.reads, seen.met())
    _tell(state, seen)
    state.load_s[id(graph)] = perf_counter() - start
    return graph, seen.caches()


def _loaded(state: State, captured: Captured | CutCaptured, args: tuple[Any, ...],
            kwargs: dict[str, Any]) -> Graph | cuts.CutGraph:  # fmt: skip
    """The captured graph in the engine."""
    _check_coverage(state, captured)
    graph: Graph | cuts.CutGraph
    given = flatten_inputs(args, kwargs).tensors
    cuda = cuda_engine.ordinal(state.module, given, state.settings.cuda_engine)
    if cuda >= 0:
        cuda_engine.follow_settings(state.settings)
    dense = not state.settings.label_sparsity, not state.settings.padding_sparsity
    segment_mb, recorded = state.settings.segment_mb, state.settings.cuda_graphs
    try:
        from . import stages

        level, taken = state.settings.memory_opt_level, memory.of_settings(state.settings, state.root.clusters)
        if isinstance(captured, CutCaptured):
            for number, part in enumerate(_parts(captured)):
                stages.save(state, part.onnx, stages.file_name(state, "torch_exported", f"_part{number}"))
            graph = cuts.CutGraph(captured, state.module, segment_mb, level, cuda, *dense, recorded)
        else:
            stages.save_capture(state, captured, args, kwargs)
            graph = Graph(captured, segment_mb, level, cuda, taken, *dense, recorded)
            stages.save_graph(state, graph)
    except MemoryError as error:  # another time there may be some
        raise Skip(f"the engine failed: {named(error)}") from error
    except Exception as error:
        raise CaptureError(f"the engine refuses the graph: {named(error)}") from error
    _check_moved(captured, given, cuda)
    for i in graph.writes:
        spec = captured.inputs[i]
        if spec.kind == "user" and given[spec.leaf].requires_grad:
            raise CaptureError(f"argument {spec.name} requires a gradient and is changed in place")
    return graph


def _parts(captured: Captured | CutCaptured) -> list[Captured]:
    """The graphs that there are."""
    return [c for c in captured.captured if c is not None] if isinstance(captured, CutCaptured) else [captured]


def _problems(
    module: nn.Module, seen: watch.Watch, captured: Captured | CutCaptured, keep: set[str]
) -> list[watch.Problem]:
    """Why more has to be kept in PyTorch."""
    found = [p for p in seen.problems if not _inside(p.module, keep)]
    # What a kept module changes and the code around it reads is of this call: they stay together.
    written = {(k, *w) for w in seen.quiet_writes for k in keep if _inside(w[0], {k})}
    found += [
        watch.Problem(
            _parent(module, k), f"reads {joined(where, name)}, which a module kept in PyTorch changes", "", 0
        )
        for k, where, name in sorted(seen.kept_changes | written)
        if (where, name) in seen.reads
    ]
    return found + _out_of_order(module, seen, captured)


def _out_of_order(module: nn.Module, seen: watch.Watch, captured: Captured | CutCaptured) -> list[watch.Problem]:
    """Where what a graph calls reads, or writes, what the graph writes: the call would see it as it was before the
    step."""
    if not seen.called_reads and not seen.kept_changes:  # it calls nothing
        return []
    written = {
        id(tensor_of(module, c.inputs[i])) for c in _parts(captured) for i in c.writes if c.inputs[i].kind != "user"
    }
    of = tensors_in(module)
    changes = {(_parent(module, k), where, name) for k, where, name in seen.kept_changes}
    return [
        watch.Problem(caller, f"changes {joined(where, name)}, and calls what uses it and stays in PyTorch", "", 0)
        for caller, where, name in sorted(seen.called_reads | changes)
        if id(of.get((where, name))) in written or name == "training" and where in seen.modes
    ]


def _parent(root: nn.Module, name: str) -> str:
    """The module around this one that has a forward, which a list of modules has not."""
    name = name.rpartition(".")[0]
    while name and type(root.get_submodule(name)).forward is nn.Module.forward:
        name = name.rpartition(".")[0]
    return name


def _on_live(state: State, seen: watch.Watch) -> set[str]:
    """Modules that must be called on live tensors if they are kept in PyTorch. A checkpoint alone is no reason to turn
    down a memory_budget, which cannot be kept beside them."""
    return seen.escaped | (seen.checkpointed if state.settings.memory_budget is None else set())


def _escaping(escaped: set[str], keep: set[str]) -> list[str]:
    """Kept modules that leave tensors behind."""
    return [k for k in sorted(keep) if any(_inside(where, {k}) for where in escaped)]


def _live(state: State, entry: Entry, keep: set[str]) -> tuple[guard.Place, ...]:
    """Where the graph is cut: at hooks, and where a kept module leaves tensors behind (an attribute, an element of a
    list), from which others may take a gradient: it must be called on live tensors."""
    found = _escaping(entry.escaped, keep)
    live = [k for k in found if not any(_inside(p.name, {k}) for p in entry.places)]
    if live and state.settings.memory_budget is not None:
        raise Refused(
            f"memory_budget cannot be kept for {type(state.module).__name__}: {live[0]} stays in PyTorch and leaves "
            "tensors behind that others may use, so it cuts the graph into parts. Return them from forward, or remove "
            "the budget."
        )
    lacking = private.lacks("hooks") if live else None
    if lacking is not None:
        raise CaptureError(lacking)
    return (*entry.places, *[guard.Place(k, False, False, True) for k in live])


def _still(keep: set[str], answers: branches.Answers, why: CaptureError | watch.Problem) -> bool:
    """A module is going to be kept in PyTorch, which a call that changes its way would run twice: no capture with
    branches, then."""
    if keep and answers:
        raise why if isinstance(why, CaptureError) else CaptureError(why.reason, why.module, why.file, why.line)
    return not keep


def _check_moved(captured: Captured | CutCaptured, tensors: Sequence[Tensor], cuda: int) -> None:
    """What is moved to the plan's device is another tensor: it cannot be the one that is returned or edited."""
    seen = {*captured.passthrough.values(), *[source for source, _, _ in captured.views.values()], *captured.writes}
    for i in cuda_engine.elsewhere(tensors, cuda):
        for at, spec in enumerate(captured.inputs):
            if spec.kind == "user" and spec.leaf == i and (at in seen or isinstance(captured, CutCaptured)):
                why = "there are hooks on submodules" if at not in seen else "forward edits or returns it"
                raise CaptureError(f"argument {spec.name} lies on {cuda_engine.device_of(tensors[i])}, the module on "
                                   f"{cuda_engine.place(cuda)}, and {why}")  # fmt: skip


def _check_coverage(state: State, captured: Captured | CutCaptured) -> None:
    least = state.settings.min_coverage
    if not least:
        return
    engine = captured.n_nodes - len(captured.host_ops)
    every = engine + sum(n_modules(state.module, op.name) if op.kind == "module" else 1 for op in captured.host_ops)
    if engine < least * every:
        first = captured.host_ops[0]
        names = ", ".join(sorted({op.name for op in captured.host_ops}))
        raise CaptureError(
            f"min_coverage={least}: of {every} nodes {engine / every:.1%} would run in the engine; in PyTorch: {names}",
            first.module, first.file, first.line)  # fmt: skip


def _tell(state: State, seen: watch.Watch) -> None:
    """Output of forward that the engine does not repeat."""
    for (file, line), does in seen.says.items():
        if (file, line) not in state.told:
            state.told.add((file, line))
            logger.warning("%s: forward %s (%s:%d). In the engine it does so only when it is captured.",
                           type(state.module).__name__, does, file, line)


def _restore(undo: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for own, old in undo:
        own.clear()
        own.update(old)


def _inside(name: str, keep: Collection[str]) -> bool:
    """Is the module of this name one of `keep`, or in one?"""
    return any(name == k or name.startswith(k + ".") for k in keep)


def _alike(root: nn.Module, name: str) -> set[str]:
    """Submodules of the same class as this one, with hooks or without as this one is. Where two of them could not be
    captured for the same reason, at the same line, nobody should try the others one by one."""
    module = root.get_submodule(name)
    kind, hooks = type(module), _hooked(module)
    return {fqn for fqn, m in root.named_modules() if type(m) is kind and _hooked(m) == hooks}


def _hooked(m: nn.Module) -> bool:
    return any(getattr(m, name) for name in private.HOOKS)


def _outermost(names: set[str]) -> set[str]:
    return {n for n in names if not _inside(n.rpartition(".")[0], names)}


def named(error: BaseException) -> str:
    first = next((s.strip() for s in str(error).splitlines() if s.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
