"""The ladder: one call of an ORTModule, from the captured graph that fits down to PyTorch.

call      arguments are flattened; the state (state.py) says whether a known capture fits; Graph (chain.py) runs it.
capture   what is not known is captured: with constant sizes first, once more with symbolic sizes at the first new
          shape, once more with int/float arguments as inputs at their second distinct value.
steps     what cannot be captured or computed goes to PyTorch in the smallest piece that works: operator (done by the
          capture), submodule, whole module. Every piece is counted and named in report(); strict=True raises instead of
          the last two, strict="engine" instead of all.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import (
    _C,
    answered,
    branches,
    bypassed,
    cuda_engine,
    cuts,
    fallback,
    guard,
    interrupts,
    net,
    parts,
    patches,
    profile,
    ranks,
    settle,
)
from . import torch_private as private
from .capture import CaptureError, FlatInputs, capture_error, flatten_inputs
from .capture.onnx_build import same_graph
from .capture.opaque import Changed
from .capture.pairs import as_pairs
from .capture.refused import users_hook
from .capture.skeleton import Unreadable, input_skeleton
from .chain import Graph, Refusal, Unfit
from .climb import Skip, climb, named
from .errors import TimeUp
from .host import Failed
from .quiet import of_signal, progress, signals_later
from .replay import ModuleCall, put_back
from .spread import judge
from .state import Entry, GuardedGraph, Refused, Site, State, shadow_of, structure_alone, unwrapped
from .summary import announce

logger = logging.getLogger("ortmodule")

_MANY_CAPTURES = 16  # of one module, before a warning
_FAILURES = 3  # of runs, before the calls of that kind stay in PyTorch
_GENERAL_LIMIT = 3  # symbolic captures of one call structure
_ASTRAY = 3  # calls on a way through forward that cannot be captured, before what branches stays in PyTorch
_VAIN_LIMIT = 2  # captures with symbols for sizes that came to nothing, before there are no more
_SYMBOLS_S, _SYMBOLS_TIMES = 45.0, 8.0  # what one with symbols may take: seconds, or times one with constants
_UNFIT_LIMIT = 2  # captures of one call that the engine may turn down when it sees the sizes
_warned: dict[str, dict[Any, Any]] = {}  # by file: what Python keeps in a module, to show a warning once
_PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
_check = _C.guard_check


class _Stale(CaptureError):
    """A capture that no longer holds, though everything that is compared is as it was."""

    def __str__(self) -> str:
        where = f", in submodule {self.module!r}" * bool(self.module) + f" ({self.file}:{self.line})" * bool(self.file)
        return self.reason + where


class Left(NamedTuple):
    """A call for which there is no capture, and why. failure: the calls of its kind stay in PyTorch, once it has been
    seen that PyTorch can run them. onnx: of Skip. before: what the entry had counted before its captures failed.
    spent: no capture was tried, there have been too many."""

    reason: str
    failure: CaptureError | None = None
    onnx: bytes = b""
    before: tuple[int, int, bool, bool] = (0, 0, False, False)
    spent: bool = False


def call(state: State, args: tuple[Any, ...], kwargs: dict[str, Any], turned_down: int = 0) -> Any:
    """The wrapper's forward. turned_down: how often the engine has seen the sizes of this call and refused them."""
    if state.off is not None:
        return _eager(state, state.off, args, kwargs)
    try:
        flat = flatten_inputs(args, kwargs)
    except Exception as error:  # also a list that holds itself
        return _odd(state, f"among the arguments is {error}" if isinstance(error, Unreadable) else
                    f"the arguments cannot be flattened: {named(error)}", args, kwargs)  # fmt: skip
    leaves, _, structure = flat
    for t in leaves:
        if type(t) not in _PLAIN_TYPES:
            return _odd(state, f"an argument is a {type(t).__name__}", args, kwargs)
        if t.is_nested:
            return _odd(state, "an argument is a nested tensor", args, kwargs)
        if t.is_neg():
            return _odd(state, "an argument is stored negated (the imaginary part of a conjugate)", args, kwargs)
    if private.forward_ad._current_level >= 0:
        return _eager(state, "called inside forward-mode differentiation", args, kwargs)
    if torch.is_anomaly_enabled():
        return _eager(state, "called inside torch.autograd.detect_anomaly: its errors name PyTorch's operations",
                      args, kwargs)  # fmt: skip
    if private.transforms() is not None or private.dispatch_modes() or private.tracing():
        return _eager(state, "called inside a function transform or while PyTorch traces", args, kwargs)
    if private.parametrized._cache_enabled:
        return _eager(state, "called inside torch.nn.utils.parametrize.cached(): the values it keeps are PyTorch's",
                      args, kwargs)  # fmt: skip
    if guard.global_hooks():
        return _eager(state, "hooks for all modules of the process are registered", args, kwargs)
    if patches.threads and threading.get_ident() in patches.threads:  # part of what is captured, or compared
        return state.body.forward(*args, **kwargs)
    env = guard.environment()
    if private.function_modes():
        mode, defaults = private.modes_of_caller()
        if not mode and defaults and (other := cuda_engine.other_default(state.module, leaves, defaults)):
            mode = f"a default device ({other})"
        if mode:
            return _eager(state, f"called inside {mode}", args, kwargs)
        env += (*map(str, defaults),)
    hooks = private.saved_hooks(True) if env[0] else None
    if hooks is not None and any(map(users_hook, hooks)):
        return _eager(state, "called inside saved_tensors_hooks: what the engine keeps for backward would not go "
                      "through them", args, kwargs)  # fmt: skip
    if state.part_of is not None and (why := parts.outside(state, state.part_of)) is not None:
        return _eager(state, why, args, kwargs)
    if state.spread is not None:
        if state.spread.holds():
            return _by(state, state.spread, args, kwargs)
        state.spread = None
    fast = state.guard.fast()
    key = (fast, structure, env, tuple([t.requires_grad for t in leaves]))
    site = state.sites.get(key)
    if site is None and state.changing:
        site = state.sites.get((fast, structure_alone(structure), env, key[3]))
    while site is not None and (_check(site.entry.held.table) >= 0 or site.also and _check(site.also) >= 0):
        site = site.other
    if (site is None or [p.requires_grad for p in site.params] != site.params_grad
            or [t.requires_grad for t in site.plain] != site.plain_grad):  # fmt: skip
        with state.lock:
            state.spread = state.spread or judge(state)
        if state.spread is not None:
            return _by(state, state.spread, args, kwargs)
        try:
            site = state.find_site(key, structure, env, args, kwargs)
        except Refused:
            raise
        except Exception as error:
            if state.settings.strict:
                raise
            return _eager(state, f"the state of the module cannot be read: {named(error)}", args, kwargs)
    if site.entry.eager is not None:
        if not site.entry.again:
            found = parts.of(state) if site.entry.by_parts else None
            site.entry.eager.count(found is not None)
            return _by(state, found, args, kwargs)
        site.entry.eager, site.entry.n_captures, site.entry.again = None, 0, False
    captured = site.captured
    if captured is None or not captured.fits(flat, site.known) or captured.strange(flat.tensors, site.reach):
        if site.entry.places and site.entry.effect is None:
            return _observe(state, site, flat, args, kwargs)
        made = _new_graph(state, site, flat, args, kwargs)
        if isinstance(made, Left) and made.onnx and not state.settled:
            return _settle(state, site, flat, made, env, args, kwargs)
        if isinstance(made, Left):
            return _eager_site(state, site, made, args, kwargs)
        captured = made
    captured.calls += 1
    if captured.calls == captured.next_check and not _recheck(state, site, captured):
        return call(state, args, kwargs, turned_down)
    return _run(state, site, captured, flat, env, args, kwargs, turned_down)


def _by(state: State, found: parts.Parts | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that PyTorch runs, with these parts in the engine."""
    if found is None:
        return state.body.forward(*args, **kwargs)
    if not state.announced and any(each.every for each in bypassed.states(state)):
        announce(state)
    return found.forward(args, kwargs)


def _numbers(graph: Graph | cuts.CutGraph, flat: FlatInputs) -> list[Tensor]:
    """int and float arguments as graph inputs: where the plan is, but for those that the host reads."""
    kinds = [torch.float64 if type(x) is float else torch.int64 for x in flat.scalars]
    found = [torch.tensor(x, dtype=kind, device="cpu") for x, kind in zip(flat.scalars, kinds)]
    if graph.cuda >= 0 and isinstance(graph, Graph):
        for i, leaf in enumerate(graph.leaves):
            if leaf >= len(flat.tensors):
                at = leaf - len(flat.tensors)
                found[at] = cuda_engine.number(found[at], graph.cuda, i in graph.host_inputs)
    return found


def _run(state: State, site: Site, captured: GuardedGraph, flat: FlatInputs, env: tuple[Any, ...],
         args: tuple[Any, ...], kwargs: dict[str, Any], turned_down: int,
         gone: tuple[GuardedGraph, ...] = ()) -> Any:  # fmt: skip
    """gone: captures for other ways through forward than this call's."""
    graph = captured.graph
    if not state.announced and graph.forwards:
        announce(state)
    for text, category, file, line in graph.captured.warned:
        warnings.warn_explicit(text, category, file, line, registry=_warned.setdefault(file, {}))
    given = flat.tensors
    if captured.symbolic and flat.scalars:
        given = given + _numbers(graph, flat)
    if graph.captured.rebinds:
        site = state.rebind(site, captured)
    site, before = state.leave(site, captured, flat) if graph.captured.left else (site, [])
    if captured.elsewhere:
        given = [cuda_engine.moved(t, graph.cuda) if i in captured.elsewhere else t for i, t in enumerate(given)]
    tensors = [given[i] for i in graph.leaves]
    wanted = tuple([t.requires_grad for t in tensors]) + site.wanted_bound
    tensors += site.bound
    whole: dict[int, Tensor] = {}
    if graph.pairs:
        whole = {i: tensors[i] for i in graph.pairs if i >= len(graph.leaves)}
        made = {id(tensors[i]): as_pairs(tensors[i]) for i in graph.pairs}  # one that comes twice is one
        tensors = [made.get(id(t), t) for t in tensors]
    if isinstance(graph, cuts.CutGraph):
        try:
            return _play(state, site, graph, tensors, env)
        except Failed as error:
            return _failed(state, site.entry, error, args, kwargs)
    moment = branches.Moment(graph, tensors) if captured.answers else None
    try:
        try:
            if not env[0] or True not in wanted:
                return site.store(graph.infer(tensors))
            if site.fill is None:
                site.fill = input_skeleton(args, kwargs)[0]
            here = flat._replace(tensors=given[: len(flat.tensors)]) if captured.elsewhere else flat
            return site.store(graph.train(tensors, wanted, ModuleCall(state, site, here, site.fill, whole), env[2]))
        except BaseException:
            put_back(before)
            raise
    except Unfit as error:
        return _unfit(state, site, captured, flat, error, args, kwargs, turned_down)
    except Refusal as error:
        reason = f"the engine refuses the graph: {str(error).partition(chr(10))[0]}"
        _leave(state, site.entry, CaptureError(reason), by_parts=True)
        return call(state, args, kwargs, turned_down)
    except Failed as error:
        if moment is None:
            return _failed(state, site.entry, error, args, kwargs)
        failed: Failed | None = error
        answers: branches.Answers = ()
    except Changed as error:
        site.entry.eager = state.eager_entry(error.reason)
        logger.warning("%s runs in PyTorch: %s", type(state.module).__name__, error.reason)
        raise
    except branches.Other as other:
        failed, answers = None, other.answers
        graph.forget_fault()
    assert moment is not None
    moment.put_back()
    captured.astray += 1
    gone = *gone, captured
    if failed is not None:
        return _wrong_way(state, site, flat, failed, env, args, kwargs, turned_down, gone)
    return _other_way(state, site, flat, answers, env, args, kwargs, turned_down, gone)


def _wrong_way(state: State, site: Site, flat: FlatInputs, error: Failed, env: tuple[Any, ...], args: tuple[Any, ...],
               kwargs: dict[str, Any], turned_down: int, gone: tuple[GuardedGraph, ...]) -> Any:  # fmt: skip
    """The engine has failed before a condition could be asked (an index that forward would have looked at first): does
    the call go another way? Captures for other ways tell, and at last forward itself."""
    entry = site.entry
    others = (g for g in entry.graphs if g.answers and g not in gone and g.fits(flat, site.known)
              and g.strange(flat.tensors, state.reach(g)) is None)
    found = next(others, None)
    if found is not None:
        state.bind(site, found)
    else:
        made = _new_graph(state, site, flat, args, kwargs, anew=True)
        if isinstance(made, Left):
            return _failed(state, entry, error, args, kwargs)
        if any(branches.agree(made.answers, g.answers) for g in gone):
            with state.lock:
                entry.graphs = [g for g in entry.graphs if g is not made]
            return _failed(state, entry, error, args, kwargs)
        found = made
    found.calls += 1
    return _run(state, site, found, flat, env, args, kwargs, turned_down, gone)


def _other_way(state: State, site: Site, flat: FlatInputs, answers: branches.Answers, env: tuple[Any, ...],
               args: tuple[Any, ...], kwargs: dict[str, Any], turned_down: int,
               gone: tuple[GuardedGraph, ...]) -> Any:  # fmt: skip
    """A call that takes another way through forward than the captures that have computed it, which has left no trace:
    the capture for that way computes it again."""
    entry, last = site.entry, answers[-1]
    if any(branches.agree(answers, closed) for closed in entry.closed):
        return _closed(state, entry, answers, None, args, kwargs)
    found = _new_graph(state, site, flat, args, kwargs, answers)
    if isinstance(found, Left):
        if found.failure is None or entry.eager is not None:
            return _eager(state, found.reason, args, kwargs)
        entry.closed.append(answers)
        return _closed(state, entry, answers, found.failure, args, kwargs)
    if found in gone:
        reason = f"a branch on a tensor's value at {last.place}, which rounding decides"
        return _eager(state, reason, args, kwargs)
    found.calls += 1
    return _run(state, site, found, flat, env, args, kwargs, turned_down, gone)


def _closed(state: State, entry: Entry, answers: branches.Answers, failure: CaptureError | None, args: tuple[Any, ...],
            kwargs: dict[str, Any]) -> Any:  # fmt: skip
    """A way that cannot be captured: PyTorch raises what forward raises there (an assert), or computes it."""
    last = answers[-1]
    result = state.body.forward(*args, **kwargs)
    reason = f"a branch on a tensor's value at {last.place} goes a way that cannot be captured"
    if failure is not None:
        reason += f": {failure.reason}"
        if state.settings.strict:
            raise failure
    told = state.eager_entry(reason, last.module, last.file, last.line)
    told.calls += 1
    entry.astray += 1
    if entry.astray == _ASTRAY:
        _without_branches(state, entry)
    return result


def _without_branches(state: State, entry: Entry) -> None:
    """From now on what branches on values is left to PyTorch."""
    with state.lock:
        entry.branches = False
        entry.graphs = [g for g in entry.graphs if not g.answers]
        entry.n_captures = len(entry.graphs)
        for site in state.every_site():
            if site.entry is entry:
                site.captured = None


@interrupts.whole
def _settle(state: State, site: Site, flat: FlatInputs, left: Left, env: tuple[Any, ...], args: tuple[Any, ...],
            kwargs: dict[str, Any]) -> Any:  # fmt: skip
    """A call that changes modules: once for all, so that it can be captured as they are then (settle.py)? Asked
    once."""
    with state.lock:
        state.settled = True
        try:
            with unwrapped(state.body):
                settled = settle.Settled(state.module, state.body.forward, args, kwargs)
        except Exception:  # PyTorch's to raise
            return _unsettled(state, site, left, args, kwargs)
        if not settled.whole:
            return _unsettled(state, site, left, args, kwargs)
        key = (state.new_guard().fast(), flat.key, env, tuple([t.requires_grad for t in flat.tensors]))
        found: GuardedGraph | Left = left
        try:
            site = state.find_site(key, flat.key, env, args, kwargs)
            if site.entry.eager is None and not site.entry.places:
                found = _new_graph(state, site, flat, args, kwargs)
        finally:
            same = isinstance(found, GuardedGraph) and same_graph(found.graph.captured.onnx, left.onnx)
            if not same:
                settled.put_back()
    if isinstance(found, Left) or not same:
        return _unsettled(state, site, left, args, kwargs)
    found.calls += 1
    return _run(state, site, found, flat, env, args, kwargs, 0)


def _unsettled(state: State, site: Site, left: Left, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In PyTorch; where that is an error, the capture that is not followed by such a run has its reason."""
    return call(state, args, kwargs) if state.settings.strict else _eager_site(state, site, left, args, kwargs)


def _play(state: State, site: Site, graph: cuts.CutGraph, tensors: list[Tensor], env: tuple[Any, ...]) -> Any:
    """A call with hooks on submodules, which may change the module."""
    try:
        result = graph.play(tensors, env[2])
        if state.guard.fast() != site.fast:
            graph.broken = state.follow(site)
            if graph.broken is not None:
                raise RuntimeError(
                    f"ortmodule: {graph.broken}, and had not done so when the module was captured. Later calls run "
                    "in PyTorch."
                )
        return result
    finally:
        if graph.broken is not None and site.entry.eager is None:
            site.entry.eager = state.eager_entry(graph.broken)
            logger.warning("%s runs in PyTorch: %s", type(state.module).__name__, graph.broken)


# --- nothing fits ------------------------------------------------------------------------------------


@interrupts.whole
def _new_graph(
    state: State,
    site: Site,
    flat: FlatInputs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    answers: branches.Answers = (),
    anew: bool = False,
) -> GuardedGraph | Left:
    """A capture of the site's entry for these sizes and scalars, made now if need be. answers: what is known of the
    way that the call takes through forward. anew: none that is there is the one."""
    entry = site.entry
    shapes = [t.shape for t in flat.tensors]
    if not state.settings.allows(fallback.DEVICE):
        _check_devices(state, flat)
    refused = cuda_engine.refusal(cuda_engine.home(state.module, flat.tensors), state.settings.cuda_engine)
    if refused:  # asked again at the next call: the module may have been moved
        _forbid(state, CaptureError(refused))
        if (refused,) not in state.told:
            state.told.add((refused,))
            logger.warning("%s runs in PyTorch: %s", type(state.module).__name__, refused)
        return Left(refused)
    with state.lock:
        if shapes in entry.left:
            return Left("the engine cannot run these sizes")
        known = None if anew else state.find_graph(site, flat, answers)
        if isinstance(known, str):
            if state.settings.strict:
                raise CaptureError(known)
            return Left(known)
        if known is not None:
            return known
        forbidden = state.settings.strict or state.settings.min_coverage
        if entry.raised >= state.settings.max_captures and not (answers or anew or forbidden):
            return Left("many calls that no capture fits have raised: PyTorch runs one first")
        why = entry.why
        if anew:
            why = "a branch on a tensor's value went another way"
        elif answers:
            why = f"a branch on a tensor's value at {answers[-1].place} went another way"
        elif entry.graphs:
            why = " and ".join(["sizes of arguments"] * all(c.shapes != shapes for c in entry.graphs)
                               + ["int or float arguments"] * all(c.scalars != flat.scalars for c in entry.graphs))
            if any(c.shapes == shapes and c.scalars == flat.scalars for c in entry.graphs):
                why = "layout, identity or attributes of arguments"
            why = f"changed: {why or 'sizes or numbers that forward branches on'}"
            widest = next((g for g in entry.graphs if g.dynamic or g.symbolic), None)
            unmet = "" if widest is None else widest.graph.captured.unmet(flat)
            why += f"; a capture holds where {unmet}" * bool(unmet)
            entry.dynamic = entry.dynamic or all(c.shapes != shapes for c in entry.graphs)
            entry.symbolic = bool(flat.scalars) and not entry.no_symbolic and (
                entry.symbolic or all(c.scalars != flat.scalars for c in entry.graphs))  # fmt: skip
            state.dynamic, state.symbolic = state.dynamic or entry.dynamic, state.symbolic or entry.symbolic
        if entry.n_captures >= state.settings.max_captures and entry.branches and (
                branching := [g for g in entry.graphs if g.answers]):  # fmt: skip
            where = ", ".join(sorted({c.place for g in branching for c in g.answers})[:3])
            logger.warning("%s has been captured %d times: branches on values of tensors (at %s) go another way from "
                           "call to call, and are left to PyTorch now", type(state.module).__name__, entry.n_captures,
                           where)  # fmt: skip
            _without_branches(state, entry)
            if answers or anew:
                return Left(f"{len(branching)} captures of one call structure were not enough: branches on values of "
                            f"tensors (at {where}) go another way from call to call")  # fmt: skip
        if entry.n_captures >= state.settings.max_captures:
            reason = (
                f"{entry.n_captures} captures of one call structure were not enough: sizes, numbers, layouts or "
                "attributes that the model's code branches on change from call to call"
            )
            if not answers and not anew:
                return Left(reason, CaptureError(reason), before=entry.counts(), spent=True)
            _leave(state, entry, CaptureError(reason))
            return Left(reason)
        # Code that branches on sizes or numbers (is the length 1?) gets a symbolic capture per branch taken; after
        # some, constants.
        n_general = max(Counter(c.answers for c in entry.graphs if c.dynamic or c.symbolic).values(), default=0)
        general = n_general < _GENERAL_LIMIT or entry.dynamic > any(c.dynamic for c in entry.graphs) \
            or entry.symbolic > any(c.symbolic for c in entry.graphs)  # fmt: skip
        general = general and sum(shapes in c.refused for c in entry.graphs) < _UNFIT_LIMIT
        general = general and entry.in_vain < _VAIN_LIMIT
        tries = _attempts(entry.dynamic and general, entry.symbolic and general)
        with signals_later():
            return _capture(state, site, flat, args, kwargs, answers, anew, tries, why)


def _capture(state: State, site: Site, flat: FlatInputs, args: tuple[Any, ...], kwargs: dict[str, Any],
             answers: branches.Answers, anew: bool, tries: list[tuple[bool, bool]], why: str) -> GuardedGraph | Left:
    """tries: with which symbols, in turn."""
    entry = site.entry
    before = entry.counts()
    ranks.begin()
    for dynamic, symbolic in tries:
        if (dynamic or symbolic) and entry.in_vain >= _VAIN_LIMIT:
            continue
        if state.root.capturing_s >= state.settings.capture_seconds:
            return _no_time(state)
        entry.n_captures += 1
        fixed = _image_sizes(flat, entry.graphs) if dynamic else set()
        began = perf_counter()
        over = began + state.settings.capture_seconds - state.root.capturing_s
        deadline = over
        if (dynamic or symbolic) and state.constants_s:  # what sympy has to say of many sizes may be long
            deadline = min(over, began + max(_SYMBOLS_S, _SYMBOLS_TIMES * state.constants_s))
        try:
            with progress(f"{type(state.module).__name__} is being captured, once for calls of this kind"):
                graph, caches = climb(state, entry, args, kwargs, dynamic, symbolic, fixed, answers, deadline)
        except Skip as skip:
            return Left(str(skip), onnx=skip.onnx)
        except Refused:
            raise
        except BaseException as error:
            if of_signal(error):
                raise
            if isinstance(error, TimeUp):
                what = "captures" if deadline == over else "a capture with symbols"
                failure = CaptureError(f"the time for {what} was over")
            else:
                failure = capture_error(state.module, error)
            state.has_failed(failure, dynamic or symbolic, perf_counter() - began)
            if isinstance(error, TimeUp) and deadline == over:
                state.root.capturing_s = state.settings.capture_seconds
                return _no_time(state)
            entry.in_vain += (dynamic or symbolic) and not answers and not anew
            if isinstance(error, TimeUp):  # with other sizes it would be again
                entry.in_vain = _VAIN_LIMIT
            if symbolic and not answers and not anew:
                entry.no_symbolic, entry.symbolic = True, False
            if answers or anew:  # another way may do without
                entry.n_captures -= 1
            continue
        finally:
            state.root.capturing_s += perf_counter() - began
        if not dynamic and not symbolic:
            state.constants_s = max(state.constants_s, perf_counter() - began)
        made = GuardedGraph(graph, flat, dynamic, symbolic, why)
        _cast_net(state, made, entry, args, kwargs, caches)
        entry.graphs.insert(0, made)
        _count(state, made)
        state.bind(site, made)
        made.overlapped = _C.overlaps_written(made.given(flat.tensors, site.reach), made.edited)
        return made
    # Either the module cannot be captured, or this call is wrong: then PyTorch's own error is the one the user
    # should see.
    return Left(failure.reason, failure, before=before)


def _no_time(state: State) -> Left:
    """Captures have taken as long as they may: what none fits runs in PyTorch."""
    limit = state.settings.capture_seconds
    reason = f"captures of this model have taken the {limit:g} s that they may (ORTMODULE_CAPTURE_SECONDS)"
    if state.settings.strict:
        raise CaptureError(reason)
    if reason not in state.eager_entries:
        tried = "; ".join(f"{e.count}x {e.reason}" for e in state.failed.values())
        logger.warning("%s: %s; calls that none of them fits run in PyTorch. Captured: %d%s",
                       type(state.module).__name__, reason, len(state.every), f"; in vain: {tried}" * bool(tried))
    return Left(reason)


def _observe(state: State, site: Site, flat: FlatInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first call with hooks on submodules runs in PyTorch, which shows what they do; what is captured then
    serves the calls after it."""
    entry = site.entry
    effect = cuts.Effect(state.module, entry.places)
    result = effect.call(args, kwargs)
    with state.lock:
        if guard.places(state.module) != entry.places:
            _passing(state)
        elif entry.effect is None and entry.eager is None:
            entry.effect = effect
            entry.places = tuple([effect.seen(p) for p in entry.places])
            if effect.reason is not None:
                _leave(state, entry, CaptureError(effect.reason))
            else:
                found = _new_graph(state, site, flat, args, kwargs)
                if isinstance(found, Left) and found.failure is not None:
                    _leave(state, entry, found.failure, by_parts=True)
    return result


def _passing(state: State) -> None:
    """A call has put hooks on submodules or removed them, so nothing is captured of it. Once is nothing to tell (a hook
    for the first call); where it is done again, the calls stay in PyTorch."""
    reason = "hooks on submodules come or go while forward runs"
    entry = state.eager_entry(reason)
    entry.calls += 1
    if entry.calls > 1:
        _forbid(state, CaptureError(reason))
    if entry.calls == 2:
        logger.warning("%s runs in PyTorch: %s", type(state.module).__name__, reason)


def _cast_net(state: State, made: GuardedGraph, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any],
              caches: list[Any]) -> None:  # fmt: skip
    """Notes what forward does now, to see later whether it still does."""
    if not state.settings.recheck:
        made.no_net = "ORTMODULE_RECHECK is 0"
    elif isinstance(made.graph, cuts.CutGraph):
        made.no_net = "hooks on submodules, or submodules kept in PyTorch, cut the graph"
    elif made.answers:
        made.no_net = "forward branches on values of tensors"
    elif private.lacks("net"):
        made.no_net = private.lacks("net") or ""
    else:
        shadow = shadow_of(state.body)
        with unwrapped(shadow):
            known = made.graph.captured
            made.net, made.no_net = net.cast(shadow, args, kwargs, entry.keep, known.kept, caches, known.stored)
        made.next_check = net.FIRST if made.net is not None else -1


@interrupts.whole
def _recheck(state: State, site: Site, captured: GuardedGraph) -> bool:
    """Does forward still do what it did when it was captured? If not, calls of this kind go to PyTorch: something
    has changed that nothing here sees, and may do so again."""
    captured.next_check = net.after(captured.calls)
    assert captured.net is not None
    with state.lock:
        shadow = shadow_of(state.body)
        with unwrapped(shadow):
            difference = captured.net.check(shadow)
    if difference is None:
        return True
    error = _Stale(
        "forward no longer does what it did when it was captured, and nothing that ORTModule compares has "
        "changed: "
        f"{difference.reason}",
        *difference[1:],
    )
    _leave(state, site.entry, error)
    return False


def _unfit(state: State, site: Site, captured: GuardedGraph, flat: FlatInputs, error: Unfit, args: tuple[Any, ...],
           kwargs: dict[str, Any], turned_down: int) -> Any:  # fmt: skip
    """The engine found that the tensors are not those of the capture (a parameter's dtype or size was changed under
    its data, or a dynamic capture holds for fewer sizes): looks again, and then leaves the call to PyTorch."""
    # not for the engine, or not for PyTorch either: then its error is the one the user should see
    if turned_down >= _UNFIT_LIMIT:
        result = _eager(state, f"the engine cannot run these sizes: {error}", args, kwargs)
        if state.settings.strict:
            raise error
        site.entry.left.append([t.shape for t in flat.tensors])
        return result
    with state.lock:
        state.sites = {k: s for k, s in state.sites.items() if s is not site}
        site.captured = None
        own = state.new_guard()
        if own.structure() == site.structure:
            captured.refused.append([t.shape for t in flat.tensors])
    return call(state, args, kwargs, turned_down + 1)


def _failed(state: State, entry: Entry, error: Failed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The engine could not run this call, and has left everything as it was: an index is out of range, memory is
    short, or a plan for these sizes cannot be made. PyTorch either has the error that the user should see, or a
    result."""
    reason = f"the engine failed: {str(error).partition(chr(10))[0]}"
    no_memory = isinstance(error.__cause__, MemoryError)
    if no_memory:
        _C.cuda_engine_empty()
    with answered.again(error.answers):
        result = _eager(state, reason, args, kwargs)
    if state.settings.strict:
        raise error
    first = not entry.failures and ("no memory",) not in state.told
    if first:
        logger.warning("%s ran in PyTorch: %s", type(state.module).__name__, reason)
    if no_memory:  # there may be some again, and batches may be smaller
        state.told.add(("no memory",))
        return result
    entry.failures += 1
    if entry.failures == _FAILURES:
        _leave(state, entry, CaptureError(reason))
    return result


# --- PyTorch instead ---------------------------------------------------------------------------------


def _eager(state: State, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """This call in PyTorch."""
    state.eager_entry(reason).calls += 1
    return state.body.forward(*args, **kwargs)


def _odd(state: State, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """This call in PyTorch, because of its arguments; or an error, by the policy."""
    if not state.settings.allows(fallback.DATA):
        raise fallback.ORTModuleIOError(
            f"{type(state.module).__name__}: {reason}; FALLBACK_UNSUPPORTED_DATA leaves such calls to PyTorch"
        )
    return _eager(state, reason, args, kwargs)


def _check_devices(state: State, flat: FlatInputs) -> None:
    """For a policy that does not leave unsupported devices to PyTorch."""
    enabled = state.settings.cuda_engine
    engine = "cuda" if cuda_engine.ordinal(state.module, flat.tensors, enabled) >= 0 else "cpu"
    own = {t.device for t in [*state.module.parameters(), *state.module.buffers()]}
    name = type(state.module).__name__
    if len(own) > 1:
        raise fallback.ORTModuleDeviceException(
            f"{name}: ORTModule supports a single device per model, and it has {', '.join(sorted(map(str, own)))}; "
            "FALLBACK_UNSUPPORTED_DEVICE leaves it to PyTorch"
        )
    for device in own | {t.device for t in flat.tensors}:
        if device.type != engine and not cuda_engine.stand_in:
            raise fallback.ORTModuleDeviceException(
                f"{name}: the engine runs on {engine}, and here is {device}; "
                "FALLBACK_UNSUPPORTED_DEVICE leaves that to PyTorch"
            )


def _forbid(state: State, error: CaptureError) -> None:
    """Raises what the policy does not leave to PyTorch."""
    if state.settings.asked_strict:
        raise error.say("without strict PyTorch runs that, by name in report()")
    if state.settings.min_coverage:
        raise error.say("without min_coverage, or with a lower one, PyTorch runs that, by name in report()")
    category = fallback.DATA if isinstance(error.__cause__, Unreadable) else fallback.ONNX_MODEL
    if not state.settings.allows(category):
        data = category is fallback.DATA
        error.say(f"FALLBACK_UNSUPPORTED_{'DATA' if data else 'ONNX_MODEL'} leaves that to PyTorch")
        raise error if isinstance(error, category.exception) else fallback.wrap_exception(category.exception, error)


def _leave(state: State, entry: Entry, error: CaptureError, by_parts: bool = False) -> None:
    """All calls of this kind in PyTorch from now on. by_parts: it is forward itself that cannot be captured, so that
    the submodules may run in the engine."""
    _forbid(state, error)
    entry.eager = state.eager_entry(error.reason, error.module, error.file, error.line)
    entry.by_parts = by_parts
    name, found = type(state.module).__name__, parts.of(state) if by_parts else None
    said = name, str(error)
    if said not in state.root.told or state.settings.fallback_retry:  # once, for many parts or kinds of calls
        state.root.told.add(said)
        if found is not None:
            logger.warning("%s: PyTorch runs forward: %s. The engine runs %s", *said, parts.listed(found.ours))
        else:
            logger.warning("%s runs in PyTorch: %s", *said)  # the error itself has frames, and a handler may keep it


def _eager_site(state: State, site: Site, left: Left, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that could not be captured. It is left to PyTorch for good only when PyTorch can run it."""
    failure, entry = left.failure, site.entry
    if failure is None:
        result = _eager(state, left.reason, args, kwargs)
        entry.raised = 0
        return result
    # from the first call on: backward may compute this one again (checkpoint)
    found = None if left.spent else parts.of(state)
    try:
        result = _by(state, found, args, kwargs)
    except Exception:  # of this call, and no word about others
        entry.n_captures, entry.in_vain, entry.no_symbolic, entry.symbolic = left.before
        entry.raised += 1
        raise
    _forbid(state, failure)
    state.eager_entry(failure.reason, failure.module, failure.file, failure.line).count(found is not None)
    shapes = [t.shape for t in flatten_inputs(args, kwargs).tensors]
    if any(shapes in c.refused for c in entry.graphs):  # other sizes have their captures
        entry.left.append(shapes)
        return result
    _leave(state, entry, failure, by_parts=not left.spent)
    entry.again = state.settings.fallback_retry and not left.spent
    return result


# --- telling -----------------------------------------------------------------------------------------


def _count(state: State, made: GuardedGraph) -> None:
    """Every state a module is in is captured once, without a limit: a limit would slow down a model that merely has
    many. Who captures again and again should know why."""
    state.every.append(made)
    captured = made.graph.captured
    logger.info("%s: capture %d in %.2f s, %d nodes, %d of them in PyTorch (%s)", type(state.module).__name__,
                len(state.every), captured.seconds, captured.n_nodes, len(captured.host_ops), made.why)  # fmt: skip
    profile.new_graph(made, state)
    if len(state.every) == _MANY_CAPTURES:
        reasons = Counter(c.why for c in state.every)
        logger.warning(
            "%s has been captured %d times, which took %.0f s. Reasons: %s. Captures are kept, so states that come "
            "back cost nothing; "
            "what changes at every step should be a tensor argument.",
            type(state.module).__name__, len(state.every), sum(c.graph.captured.seconds for c in state.every),
            "; ".join(f"{k}x {why}" for why, k in reasons.most_common()))


# --- small things ------------------------------------------------------------------------------------


def _attempts(dynamic: bool, symbolic: bool) -> list[tuple[bool, bool]]:
    """From what is wanted to what is always possible."""
    tries = [(dynamic, symbolic), (dynamic, False), (False, False)]
    return list(dict.fromkeys(tries))


def _image_sizes(flat: FlatInputs, known: list[GuardedGraph]) -> set[tuple[int, int]]:
    """Sizes that stay numbers in a dynamic capture until they change: those of images but for the batch. They rarely
    change, and as symbols they are expensive: every window, pool and convolution asks about their divisors."""
    return {
        (i, axis)
        for i, t in enumerate(flat.tensors)
        if t.dim() >= 4 and t.is_floating_point()
        for axis in range(1, t.dim())
        if all(c.shapes[i][axis] == t.shape[axis] for c in known)
    }
