"""ORTModule: an object of a dynamic subclass of the user's class, sharing the user's module's state, whose forward runs
in the engine.

forward   arguments are flattened; the guard (guard.py) says whether a known capture fits; Graph (chain.py) runs it.
          What is not known
          is captured: with constant sizes first, once more with symbolic sizes at the first new shape, once more with
          int/float arguments as inputs at their second distinct value.
ladder    what cannot be captured or computed goes to PyTorch in the smallest piece that works: operator (done by the
          capture),
          submodule, whole module. Every piece is counted and named in report(); strict=True raises instead of the last
          two, strict="engine" instead of all.

The wrapper's __dict__ IS the module's: parameters, buffers, children, modes, hooks and attributes are one and the same,
names carry no prefix. Hooks of the wrapped module itself run in __call__, around the engine. The wrapper's own state is
in a slot.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import sys
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import _C, cuts, guard, net, watch
from .capture import CaptureError, CutCaptured, FlatInputs, InputSpec, capture, capture_error, flatten_inputs
from .capture.opaque import Changed
from .capture.skeleton import Unreadable, input_skeleton, skeleton
from .chain import Graph, Refusal, Unfit
from .config import DebugOptions, Settings, resolve
from .host import Failed
from .report import EagerEntry, GraphEntry, HostEntry, MemoryEntry, Report

logger = logging.getLogger("ortmodule")

_SITE_LIMIT = 64  # states of one module remembered with their tensors
_EXPORTER = os.path.join("torch", "export", "_trace.py")
_LADDER_LIMIT = 24  # submodules tried to be left out before the whole module is
_MANY_CAPTURES = 16  # of one module, before a warning
_FAILURES = 3  # of runs, before the calls of that kind stay in PyTorch
_GENERAL_LIMIT = 3  # symbolic captures of one call structure
_UNFIT_LIMIT = 2  # captures of one call that the engine may turn down when it sees the sizes
_PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_check = _C.guard_check


class _Skip(Exception):
    """This call runs in PyTorch, the next may not have to."""


class _Stale(CaptureError):
    """A capture that no longer holds, though everything that is compared is as it was."""

    def __str__(self) -> str:
        where = f", in submodule {self.module!r}" * bool(self.module) + f" ({self.file}:{self.line})" * bool(self.file)
        return self.reason + where


class Refused(RuntimeError):
    """The module must not be wrapped: it would train wrongly."""


class _Entry:
    """All captures for one state of the module, one argument structure and one environment."""

    def __init__(self) -> None:
        self.graphs: list[_Captured] = []
        self.eager: EagerEntry | None = None
        self.dynamic = False  # a second shape has been seen
        self.symbolic = False  # a second value of an int/float argument has been seen
        self.no_symbolic = False  # ... but it cannot be an input
        self.n_captures = 0
        self.keep: set[str] = set()
        self.places: tuple[guard.Place, ...] = ()  # submodules with hooks
        self.effect: cuts.Effect | None = None  # of those hooks, once a call has been watched
        self.reads: guard.Reads | None = None  # the attributes of modules that the captures hold for
        self.held = watch.Held()  # the rest of the Python state
        self.writes_seen = 0
        self.failures = 0  # runs of the engine that PyTorch had to repeat
        self.left: list[list[torch.Size]] = []  # sizes for which the engine has turned down every capture: PyTorch's
        self.why = "first call"  # what no other entry stood for

    def changed(self, module: nn.Module) -> list[str]:
        """Names of what differs from the state that the captures hold for."""
        return [*(self.reads.changed(module) if self.reads is not None else ()), *self.held.changed()]


class _Captured:
    """A graph, and for which calls it holds."""

    def __init__(self, graph: Graph | cuts.CutGraph, flat: FlatInputs, dynamic: bool, symbolic: bool, why: str) -> None:
        self.graph = graph
        self.why = why
        self.dynamic = dynamic
        self.symbolic = symbolic
        self.shapes = [t.shape for t in flat.tensors]
        self.scalars = list(flat.scalars)
        self.refused: list[list[torch.Size]] = []  # sizes the engine turned down
        self.net: net.Net | None = None
        self.no_net = ""  # why there is none
        self.calls = 0
        self.next_check = -1  # call at which the net looks again

    def fits(self, flat: FlatInputs) -> bool:
        shapes = [t.shape for t in flat.tensors]
        if self.refused and shapes in self.refused:
            return False
        if self.dynamic or self.symbolic:
            return self.graph.captured.fits(flat)
        return self.shapes == shapes and self.scalars == flat.scalars


class _Site:
    """An _Entry with this moment's parameters and buffers: valid as long as the guard's fast() value is the same and
    the entry's `held` holds. other: a site of equal fast() for another state of what `held` compares."""

    __slots__ = (
        "bound",
        "captured",
        "entry",
        "fast",
        "fill",
        "other",
        "params",
        "params_grad",
        "refs",
        "structure",
        "wanted_bound",
    )

    def __init__(self, entry: _Entry, fast: Hashable, own: guard.Guard, like: _Site | None = None) -> None:
        """like: the site before forward assigned new tensors to buffers."""
        self.entry = entry
        self.other: _Site | None = None
        self.fast = fast
        self.structure: Hashable = own.structure() if like is None else like.structure
        self.refs: list[tuple[Any, ...]] = own.refs() if like is None else like.refs
        self.params = own.params
        self.params_grad: list[bool] = [p.requires_grad for p in own.params] if like is None else like.params_grad
        self.captured: _Captured | None = None  # the one used last
        self.bound: list[Tensor] = []  # its parameters, buffers and constants
        self.wanted_bound: tuple[bool, ...] = ()
        self.fill: Callable[[list[Any]], Any] | None = None


class _Call(NamedTuple):
    """One call, so that PyTorch can repeat it (chain.Call)."""

    state: State
    site: _Site
    flat: FlatInputs
    fill: Callable[[list[Any]], Any]

    def replay(self, tensors: Sequence[Tensor], clones: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        return self.state.replay(self, tensors, clones)


class State:
    """What an ORTModule knows besides its module."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.module = module
        self.settings = settings
        self.body = module  # whose forward runs: the module, seen with the methods that were assigned on the wrapper
        self.override: Callable[..., Any] | None = None  # forward assigned on the wrapper
        self.assigned: dict[str, Any] = {}  # other methods
        self.base: type[ORTModule] = ORTModule  # the wrapper's class, without the module's
        self.off: str | None = None  # why every call runs in PyTorch
        self.sites: dict[Hashable, _Site] = {}
        self.entries: dict[tuple[Any, ...], list[_Entry]] = {}
        self.dynamic = self.symbolic = False  # calls have differed in sizes, in int/float arguments
        self.guard = guard.Guard(module)
        self.eager_entries: dict[str, EagerEntry] = {}
        self.every: list[_Captured] = []
        self.load_s: dict[int, float] = {}
        self.lock = threading.RLock()
        self.local = threading.local()
        self.announced = False
        self.reasons: dict[str, watch.Problem] = {}  # why modules are kept in PyTorch
        self.told: set[tuple[str, int]] = set()

    # --- the hot path ------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapper's forward."""
        if self.off is not None:
            return self.eager(self.off, args, kwargs)
        try:
            flat = flatten_inputs(args, kwargs)
        except Exception as error:  # also a list that holds itself
            return self.eager(f"among the arguments is {error}" if isinstance(error, Unreadable) else
                              f"the arguments cannot be flattened: {_named(error)}", args, kwargs)  # fmt: skip
        leaves, _, structure = flat
        for t in leaves:
            if type(t) not in _PLAIN_TYPES:
                return self.eager(f"an argument is a {type(t).__name__}", args, kwargs)
            if t.is_nested:
                return self.eager("an argument is a nested tensor", args, kwargs)
            if t.is_neg():
                return self.eager("an argument is stored negated (the imaginary part of a conjugate)", args, kwargs)
        if forward_ad._current_level >= 0:
            return self.eager("called inside forward-mode differentiation", args, kwargs)
        if _transforms() is not None or _dispatch_modes() or _tracing():
            return self.eager("called inside a function transform or while PyTorch traces", args, kwargs)
        if guard.global_hooks():
            return self.eager("hooks for all modules of the process are registered", args, kwargs)
        if getattr(self.local, "capturing", False) or net.busy and threading.get_ident() in net.busy:
            return self.body.forward(*args, **kwargs)
        env = guard.environment()
        fast = self.guard.fast()
        key = (fast, structure, env, tuple([t.requires_grad for t in leaves]))
        site = self.sites.get(key)
        while site is not None and _check(site.entry.held.table) >= 0:
            site = site.other
        if site is None or [p.requires_grad for p in site.params] != site.params_grad:
            try:
                site = self.find_site(key, structure, env, args, kwargs)
            except Refused:
                raise
            except Exception as error:
                if self.settings.strict:
                    raise
                return self.eager(f"the state of the module cannot be read: {_named(error)}", args, kwargs)
        if site.entry.eager is not None:
            site.entry.eager.calls += 1
            return self.body.forward(*args, **kwargs)
        captured = site.captured
        if captured is None or not captured.fits(flat):
            if site.entry.places and site.entry.effect is None:
                return self.observe(site, flat, args, kwargs)
            captured = self.find_captured(site, flat, args, kwargs)
            if captured is None:
                return self.eager_site(site, args, kwargs)
        captured.calls += 1
        if captured.calls == captured.next_check and not self.recheck(site, captured):
            return self.call(args, kwargs)
        return self.run(site, captured, flat, env, args, kwargs)

    def run(self, site: _Site, captured: _Captured, flat: FlatInputs, env: tuple[Any, ...], args: tuple[Any, ...],
            kwargs: dict[str, Any]) -> Any:  # fmt: skip
        graph = captured.graph
        if not self.announced and graph.forwards:
            self.announce()
        given = flat.tensors
        if captured.symbolic and flat.scalars:
            given = given + [
                torch.tensor(x, dtype=torch.float64 if type(x) is float else torch.int64) for x in flat.scalars
            ]
        if graph.captured.rebinds:
            site = self.rebind(site, captured)
        tensors = [given[i] for i in graph.leaves]
        wanted = tuple([t.requires_grad for t in tensors]) + site.wanted_bound
        tensors += site.bound
        if isinstance(graph, cuts.CutGraph):
            return self.play(site, graph, tensors, env)
        try:
            if not env[0] or True not in wanted:
                return graph.infer(tensors)
            fill = site.fill or self.fill(site, args, kwargs)
            return graph.train(tensors, wanted, _Call(self, site, flat, fill), env[2])
        except Unfit as error:
            return self.unfit(site, captured, flat, error, args, kwargs)
        except Refusal as error:
            self.leave(site.entry, CaptureError(f"the engine refuses the graph: {str(error).partition(chr(10))[0]}"))
            return self.call(args, kwargs)
        except Failed as error:
            return self.failed(site.entry, error, args, kwargs)
        except Changed as error:
            site.entry.eager = self.eager_entry(error.reason)
            logger.warning("%s runs in PyTorch: %s", type(self.module).__name__, error.reason)
            raise

    def rebind(self, site: _Site, captured: _Captured) -> _Site:
        """Gives the buffers to which forward assigns new tensors one each, for the graph to write into. What was there
        keeps its values."""
        with self.lock:
            for i in captured.graph.captured.rebinds:
                owner, _, name = captured.graph.captured.inputs[i].target.rpartition(".")
                buffers = self.module.get_submodule(owner)._buffers
                buffers[name] = torch.clone(cast(Tensor, buffers[name]).detach())
            # what is new is among its `bound`
            return self.move(site, captured, _Site(site.entry, self.guard.fast(), self.guard, site))

    def move(self, site: _Site, captured: _Captured, fresh: _Site) -> _Site:
        """`fresh` takes the place of `site`: the same captures, for the module as it is now. The sites beside it hold
        the tensors of before: they are found anew."""
        fresh.fill = site.fill
        self.bind(fresh, captured)
        key: Any = next((k for k, s in self.sites.items() if s is site), None)
        if key is not None:
            del self.sites[key]
            self.sites[(fresh.fast, *key[1:])] = fresh
        return fresh

    def play(self, site: _Site, graph: cuts.CutGraph, tensors: list[Tensor], env: tuple[Any, ...]) -> Any:
        """A call with hooks on submodules, which may change the module."""
        try:
            result = graph.play(tensors, env[2])
            if self.guard.fast() != site.fast:
                graph.broken = self.follow(site)
                if graph.broken is not None:
                    raise RuntimeError(
                        f"ortmodule: {graph.broken}, and had not done so when the module was captured. Later calls run "
                        "in PyTorch."
                    )
            return result
        finally:
            if graph.broken is not None and site.entry.eager is None:
                site.entry.eager = self.eager_entry(graph.broken)
                logger.warning("%s runs in PyTorch: %s", type(self.module).__name__, graph.broken)

    def follow(self, site: _Site) -> str | None:
        """Hooks have changed the module in a call. When it is nothing that the call has read, the next one finds the
        same site; else what that was."""
        with self.lock:
            own = guard.Guard(self.module)
            reads, captured = site.entry.reads, site.captured
            if reads is None or captured is None or own.structure() != site.structure:
                return None
            if not reads.hold(self.module):
                return f"hooks on submodules change {', '.join(reads.changed(self.module))}, which forward reads"
            moved = [
                spec.name
                for spec, t in zip(captured.graph.bound, site.bound, strict=True)
                if _lookup(self.module, spec) is not t
            ]
            if moved:
                return f"hooks on submodules put other tensors in the place of {', '.join(moved)}"
            self.guard = own
            self.move(site, captured, _Site(site.entry, own.fast(), own))
            return None

    # --- the slow path -----------------------------------------------------------------------------

    def find_site(self, key: tuple[Any, ...], structure: Hashable, env: tuple[Any, ...], args: tuple[Any, ...],
                  kwargs: dict[str, Any]) -> _Site:  # fmt: skip
        """Something changed (or this is the first call): what do we know about the state the module is in now?"""
        with self.lock:
            reason = guard.refuse(self.module)
            if reason is not None:
                raise Refused(f"ORTModule cannot run {type(self.module).__name__}: {reason}.")
            own = self.guard = guard.Guard(self.module)
            fast, tree = own.fast(), own.structure()
            known = self.entries.get((tree, structure, env, key[3]), [])
            entry = next((e for e in known if (e.reads is None or e.reads.hold(self.module)) and e.held.hold()), None)
            if entry is None:
                entry = _Entry()
                entry.dynamic, entry.symbolic = self.dynamic, self.symbolic
                entry.why = self.why(tree, key, known)
                changing = sorted({name for e in known for name in e.changed(self.module)})
                entry.places = guard.places(self.module)
                entry.keep = {place.name for place in entry.places if place.whole}
                known = self.entries.setdefault((tree, structure, env, key[3]), known)
                known.append(entry)
                if len(known) > self.settings.max_captures:
                    what = ", ".join(changing[:3]) or "attributes of modules that forward reads"
                    entry.eager = self.eager_entry(
                        f"{len(known)} captures of one call structure were not enough: what forward reads changes "
                        f"from call to call ({what}); pass it as an argument"
                    )
                if self.settings.disable:
                    entry.eager = self.eager_entry("switched off by ORTMODULE_DISABLE")
                elif _holds_cache(args, kwargs):
                    entry.eager = self.eager_entry(
                        "an argument is a generation cache, which forward edits and which grows at every call"
                    )
            site = _Site(entry, fast, own)
            if len(self.sites) >= _SITE_LIMIT:
                self.sites.pop(next(iter(self.sites)))
            other = self.sites.get((fast, structure, env, key[3]))
            while other is not None and other.entry is entry:
                other = other.other
            site.other = other
            self.sites[fast, structure, env, key[3]] = site
            return site

    def why(self, structure: Any, key: tuple[Any, ...], known: list[_Entry]) -> str:
        """What has changed, against the state of the module and the call that is nearest to this one."""
        if known:
            return f"changed: {', '.join(known[-1].changed(self.module)) or 'attributes'}"
        parts = (
            "modules or modes",
            "parameters or buffers",
            "hooks",
            "argument structure or dtypes",
            "grad mode, autocast or default dtype",
            "requires_grad of arguments",
        )
        now = (*structure, *key[1:])
        changes: list[list[str]] = [
            [name for name, a, b in zip(parts, (*old[0], *old[1:]), now, strict=True) if a != b] for old in self.entries
        ]
        nearest = min(changes, key=len, default=["first call"])
        return nearest[0] if not changes else f"changed: {', '.join(nearest)}"

    def count(self, made: _Captured) -> None:
        """Every state a module is in is captured once, without a limit: a limit would slow down a model that merely has
        many. Who captures again and again should know why."""
        self.every.append(made)
        if len(self.every) == _MANY_CAPTURES:
            reasons = Counter(c.why for c in self.every)
            logger.warning(
                "%s has been captured %d times, which took %.0f s. Reasons: %s. Captures are kept, so states that come "
                "back cost nothing; "
                "what changes at every step should be a tensor argument.",
                type(self.module).__name__, len(self.every), sum(c.graph.captured.seconds for c in self.every),
                "; ".join(f"{k}x {why}" for why, k in reasons.most_common()))

    def bind(self, site: _Site, captured: _Captured) -> _Captured:
        """Makes `captured` the one that `site` uses: looks up its parameters and buffers by name."""
        bound = [_lookup(self.module, spec) for spec in captured.graph.bound]
        site.bound = bound
        site.wanted_bound = tuple([t.requires_grad for t in bound])
        site.captured = captured
        return captured

    def find_captured(
        self, site: _Site, flat: FlatInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Captured | None:
        """A capture of the site's entry for these sizes and scalars, made now if need be; None: leave the call to
        PyTorch."""
        entry = site.entry
        shapes = [t.shape for t in flat.tensors]
        with self.lock:
            if shapes in entry.left:
                self.local.skip = "the engine cannot run these sizes"
                return None
            for known in entry.graphs:
                if known.fits(flat):
                    return self.bind(site, known)
            why = entry.why
            if entry.graphs:
                why = " and ".join(["sizes of arguments"] * all(c.shapes != shapes for c in entry.graphs)
                                   + ["int or float arguments"] * all(c.scalars != flat.scalars for c in entry.graphs))
                why = f"changed: {why or 'sizes or numbers that forward branches on'}"
                entry.dynamic = entry.dynamic or all(c.shapes != shapes for c in entry.graphs)
                entry.symbolic = bool(flat.scalars) and not entry.no_symbolic and (
                    entry.symbolic or all(c.scalars != flat.scalars for c in entry.graphs))  # fmt: skip
                self.dynamic, self.symbolic = self.dynamic or entry.dynamic, self.symbolic or entry.symbolic
            if entry.n_captures >= self.settings.max_captures:
                self.leave(
                    entry,
                    CaptureError(
                        f"{entry.n_captures} captures of one call structure were not enough: sizes or numbers "
                        "that the model's code branches on change from call to call"
                    ),
                )
                return None
            # Code that branches on sizes or numbers (is the length 1?) gets a symbolic capture per branch taken; after
            # some, constants.
            n_general = sum(c.dynamic or c.symbolic for c in entry.graphs)
            general = n_general < _GENERAL_LIMIT or entry.dynamic > any(c.dynamic for c in entry.graphs) \
                or entry.symbolic > any(c.symbolic for c in entry.graphs)  # fmt: skip
            general = general and sum(shapes in c.refused for c in entry.graphs) < _UNFIT_LIMIT
            for dynamic, symbolic in _attempts(entry.dynamic and general, entry.symbolic and general):
                entry.n_captures += 1
                try:
                    graph = self.capture(
                        entry, args, kwargs, dynamic, symbolic, _image_sizes(flat, entry.graphs) if dynamic else set()
                    )
                except _Skip as skip:
                    self.local.skip = str(skip)
                    return None
                except Exception as error:
                    failure = capture_error(self.module, error)
                    if symbolic:
                        entry.no_symbolic, entry.symbolic = True, False
                    continue
                made = _Captured(graph, flat, dynamic, symbolic, why)
                self.cast_net(made, entry, args, kwargs)
                entry.graphs.insert(0, made)
                self.count(made)
                return self.bind(site, made)
            # Either the module cannot be captured, or this call is wrong: then PyTorch's own error is the one the user
            # should see.
            self.local.failure = failure
            return None

    def observe(self, site: _Site, flat: FlatInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call with hooks on submodules runs in PyTorch, which shows what they do; what is captured then
        serves the calls after it."""
        entry = site.entry
        effect = cuts.Effect(self.module, entry.places)
        result = effect.call(args, kwargs)
        with self.lock:
            if entry.effect is None and entry.eager is None and guard.places(self.module) == entry.places:
                entry.effect = effect
                entry.places = tuple([p._replace(apart=p.apart or p.name in effect.apart) for p in entry.places])
                if effect.reason is not None:
                    self.leave(entry, CaptureError(effect.reason))
                elif self.find_captured(site, flat, args, kwargs) is None:
                    failure, self.local.failure = getattr(self.local, "failure", None), None
                    if failure is not None:
                        self.leave(entry, failure)
        return result

    def capture(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, symbolic: bool,
                fixed: set[tuple[int, int]]) -> Graph | cuts.CutGraph:  # fmt: skip
        """Captures, climbing from failing submodules to their parents, and loads the result into the engine. Raises
        CaptureError."""
        if any(not isinstance(p, nn.Parameter) for p in self.module.parameters()):
            raise _Skip("parameters are replaced by other tensors for this call (functional_call)")
        if watch.busy():
            raise _Skip("called while another module is captured")
        keep = set(entry.keep)
        self.local.capturing = True
        # a capture whose forward assigned numbers to attributes of objects
        first: tuple[bytes, watch.Watch] | None = None
        undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for _ in range(_LADDER_LIMIT):
                shadow = _shadow(self.body)
                try:
                    with _unwrapped(shadow), watch.Watch(shadow, self.module) as seen, _undisturbed():
                        captured = capture(
                            shadow,
                            args,
                            kwargs,
                            dynamic=dynamic,
                            symbolic_scalars=symbolic,
                            keep_in_torch=keep,
                            fixed=fixed,
                            cut=entry.places,
                        )
                    if entry.effect is not None:
                        cuts.check(entry.effect, seen.reads)
                    written = sorted(w for w in seen.writes if not _inside(w[0], keep))
                    if not written:
                        problems = [p for p in seen.problems if not _inside(p.module, keep)]
                        # What a kept module assigns and the code around it reads is of this call: they stay together.
                        problems += [
                            watch.Problem(
                                k.rpartition(".")[0],
                                f"reads {where}.{name}, which a module kept in PyTorch assigns",
                                "",
                                0,
                            )
                            for where, name in sorted(seen.quiet_writes & seen.reads)
                            for k in keep
                            if _inside(where, {k})
                        ]
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
                        if not problems:
                            entry.writes_seen += 1
                            if not seen.assigns and entry.writes_seen <= 2 and not self.settings.strict:
                                raise _Skip("forward assigns attributes of an object that it reads")
                            assert first is not None
                            problems = (seen if seen.assigns else first[1]).assigned()
                        _restore(undo)
                        undo, first = [], None
                        whole = next((p for p in problems if not p.module), problems[0])
                        if self.settings.strict or not whole.module:
                            raise CaptureError(whole.reason, whole.module, whole.file, whole.line)
                        keep = _outermost(keep | {p.module for p in problems})
                        self.reasons.update({p.module: p for p in problems})
                        continue
                    # Tensors or state that the user may look at afterwards, or a cache: this call runs in PyTorch so
                    # that it is written; a module that does it again and again stays there.
                    entry.writes_seen += 1
                    if entry.writes_seen <= 2 and not self.settings.strict:
                        raise _Skip("forward assigns attributes of a module")
                    where, name = written[0]
                    raise CaptureError(f"forward assigns self.{name}", where)
                except _Skip:
                    raise
                except Exception as raised:
                    error = capture_error(shadow, raised)
                    name = error.module
                    while name in keep:
                        name = name.rpartition(".")[0]
                    if self.settings.strict or not name:
                        raise error from raised
                    keep = _outermost(keep | {name})
            else:
                raise CaptureError(f"more than {_LADDER_LIMIT} submodules cannot be captured")
        finally:
            self.local.capturing = False
            _restore(undo)
        for op in captured.host_ops if self.settings.strict else ():
            if op.kind == "module" or self.settings.strict == "engine":
                raise CaptureError(f"strict: {op.name} would run in PyTorch ({op.reason})", op.module, op.file, op.line)
        start = perf_counter()
        graph: Graph | cuts.CutGraph
        try:
            if isinstance(captured, CutCaptured):
                for number, part in enumerate(c for c in captured.captured if c is not None):
                    self.save(part.onnx, f"_part{number}")
                graph = cuts.CutGraph(captured, self.module, self.settings.segment_mb, self.settings.memory_opt_level)
            else:
                self.save(captured.onnx)
                graph = Graph(captured, self.settings.segment_mb, self.settings.memory_opt_level)
        except Exception as error:
            raise CaptureError(f"the engine refuses the graph: {_named(error)}") from error
        for i in graph.writes:
            spec = captured.inputs[i]
            if spec.kind == "user" and flatten_inputs(args, kwargs).tensors[spec.leaf].requires_grad:
                raise CaptureError(f"argument {spec.name} requires a gradient and is changed in place")
        entry.keep = keep
        reads = {r for r in seen.reads if not _inside(r[0], keep)}
        if entry.reads is None:
            entry.reads = guard.Reads(self.module, reads)
        else:
            entry.reads.add(self.module, reads)
        entry.held.add(seen.rows)
        self.local.caches = seen.caches()
        self.tell(seen)
        self.load_s[id(graph)] = perf_counter() - start
        return graph

    def cast_net(self, made: _Captured, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what forward does now, to see later whether it still does."""
        caches, self.local.caches = self.local.caches, None
        if not self.settings.recheck:
            made.no_net = "ORTMODULE_RECHECK is 0"
        elif isinstance(made.graph, cuts.CutGraph):
            made.no_net = "hooks on submodules take part"
        else:
            shadow = _shadow(self.body)
            with _unwrapped(shadow):
                made.net, made.no_net = net.cast(shadow, args, kwargs, entry.keep, made.graph.captured.kept, caches)
            made.next_check = net.FIRST if made.net is not None else -1

    def recheck(self, site: _Site, captured: _Captured) -> bool:
        """Does forward still do what it did when it was captured? If not, calls of this kind go to PyTorch: something
        has changed that nothing here sees, and may do so again."""
        captured.next_check = net.after(captured.calls)
        assert captured.net is not None
        with self.lock:
            shadow = _shadow(self.body)
            with _unwrapped(shadow):
                difference = captured.net.check(shadow)
        if difference is None:
            return True
        error = _Stale(
            "forward no longer does what it did when it was captured, and nothing that ORTModule compares has "
            "changed: "
            f"{difference.reason}",
            *difference[1:],
        )
        self.leave(site.entry, error)
        return False

    def unfit(self, site: _Site, captured: _Captured, flat: FlatInputs, error: Unfit, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Any:  # fmt: skip
        """The engine found that the tensors are not those of the capture (a parameter's dtype or size was changed under
        its data, or a dynamic capture holds for fewer sizes): looks again, and then leaves the call to PyTorch."""
        again = getattr(self.local, "again", 0)
        # not for the engine, or not for PyTorch either: then its error is the one the user should see
        if again >= _UNFIT_LIMIT:
            result = self.eager(f"the engine cannot run these sizes: {error}", args, kwargs)
            if self.settings.strict:
                raise error
            site.entry.left.append([t.shape for t in flat.tensors])
            return result
        self.local.again = again + 1
        try:
            with self.lock:
                self.sites = {k: s for k, s in self.sites.items() if s is not site}
                site.captured = None
                own = guard.Guard(self.module)
                if own.structure() == site.structure:
                    captured.refused.append([t.shape for t in flat.tensors])
            return self.call(args, kwargs)
        finally:
            self.local.again = again

    def failed(self, entry: _Entry, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The engine could not run this call, and has left everything as it was: an index is out of range, memory is
        short, or a plan for these sizes cannot be made. PyTorch either has the error that the user should see, or a
        result."""
        reason = f"the engine failed: {str(error).partition(chr(10))[0]}"
        result = self.eager(reason, args, kwargs)
        if self.settings.strict:
            raise error
        entry.failures += 1
        if entry.failures == 1:
            logger.warning("%s ran in PyTorch: %s", type(self.module).__name__, reason)
        if entry.failures == _FAILURES:
            self.leave(entry, CaptureError(reason))
        return result

    # --- PyTorch instead ---------------------------------------------------------------------------

    def eager_entry(self, reason: str, module: str = "", file: str = "", line: int = 0) -> EagerEntry:
        entry = self.eager_entries.get(reason)
        if entry is None:
            entry = self.eager_entries[reason] = EagerEntry(reason, module, file, line)
        return entry

    def eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This call in PyTorch."""
        self.eager_entry(reason).calls += 1
        return self.body.forward(*args, **kwargs)

    def leave(self, entry: _Entry, error: CaptureError) -> None:
        """All calls of this kind in PyTorch from now on."""
        if self.settings.strict:
            raise error
        entry.eager = self.eager_entry(error.reason, error.module, error.file, error.line)
        logger.warning("%s runs in PyTorch: %s", type(self.module).__name__, error)

    def eager_site(self, site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that could not be captured. It is left to PyTorch for good only when PyTorch can run it."""
        failure = getattr(self.local, "failure", None)
        if failure is None:
            return self.eager(self.local.skip if site.entry.eager is None else site.entry.eager.reason, args, kwargs)
        self.local.failure = None
        result = self.body.forward(*args, **kwargs)
        if self.settings.strict:
            raise failure
        shapes = [t.shape for t in flatten_inputs(args, kwargs).tensors]
        if any(shapes in c.refused for c in site.entry.graphs):  # other sizes have their captures
            site.entry.left.append(shapes)
            self.eager_entry(failure.reason, failure.module, failure.file, failure.line).calls += 1
            return result
        self.leave(site.entry, failure)
        assert site.entry.eager is not None
        site.entry.eager.calls += 1
        return result

    def fill(self, site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[list[Any]], Any]:
        site.fill = input_skeleton(args, kwargs)[0]
        return site.fill

    def replay(
        self, call: _Call, tensors: Sequence[Tensor], clones: dict[int, Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Runs the call in PyTorch on aliases, so that gradients can be taken for this use of the tensors alone."""
        site = call.site
        if self.guard.fast() != site.fast:
            raise RuntimeError("ortmodule: the module was changed between forward and backward(create_graph=True)")
        graph = site.captured.graph if site.captured is not None else None
        assert isinstance(graph, Graph)
        leaves = [t.view_as(t) if t.requires_grad else t for t in call.flat.tensors]
        args, kwargs = call.fill([*leaves, *call.flat.scalars])
        holder = _Holder(self.body)
        before = {id(tensors[i]): t for i, t in clones.items()}
        own: dict[str, Tensor] = {}
        alias: dict[int, Tensor] = {}
        # a module under two names comes once, a tensor in two modules twice
        for prefix, m in self.module.named_modules(prefix="m"):
            for name, p in m._parameters.items():
                if p is not None:
                    own[f"{prefix}.{name}"] = alias.setdefault(id(p), p.view_as(p))
            for name, b in m._buffers.items():
                if b is not None:
                    own[f"{prefix}.{name}"] = alias.setdefault(id(b), before.get(id(b), b).clone())
        out = torch.func.functional_call(holder, own, args, kwargs, tie_weights=False)
        outputs: list[Tensor | None] = []
        seen: dict[int, int] = {}

        def leaf(x: Any) -> int | None:
            if not isinstance(x, Tensor):
                return None
            if id(x) not in seen:
                seen[id(x)] = len(outputs)
                outputs.append(x)
            return seen[id(x)]

        skeleton(out, leaf)
        if len(outputs) != graph.n_outputs:
            raise RuntimeError(
                f"ortmodule: the module returned {len(outputs)} tensors in PyTorch, {graph.n_outputs} when captured"
            )
        given = [*leaves, *[torch.tensor(0)] * len(call.flat.scalars)]
        aliases = [given[i] for i in graph.leaves] + [alias.get(id(t), t) for t in tensors[len(graph.leaves) :]]
        return outputs, aliases

    def assign(self, methods: dict[str, Any]) -> None:
        """These methods stand on the wrapper in place of the class's."""
        with self.lock:
            self.assigned = methods
            cls = type(self.module)
            self.body = self.module
            if methods:
                given = {k: staticmethod(v) if callable(v) else v for k, v in methods.items()}
                seen = types.new_class(
                    cls.__name__,
                    (cls,),
                    {},
                    lambda namespace: namespace.update({"__module__": cls.__module__, **given}),
                )
                self.body = object.__new__(seen)
                object.__setattr__(self.body, "__dict__", self.module.__dict__)
            self.sites, self.entries = {}, {}  # captured with other methods

    # --- telling -----------------------------------------------------------------------------------

    def tell(self, seen: watch.Watch) -> None:
        """Output of forward that the engine does not repeat."""
        for (file, line), does in seen.says.items():
            if (file, line) not in self.told:
                self.told.add((file, line))
                logger.warning("%s: forward %s (%s:%d). In the engine it does so only when it is captured.",
                               type(self.module).__name__, does, file, line)

    def save(self, onnx: bytes, part: str = "") -> None:
        path = self.settings.save_path
        if path is None:
            return
        mode = "training" if self.module.training and torch.is_grad_enabled() else "inference"
        name = f"{self.settings.save_prefix}{type(self.module).__name__}_{len(self.every)}_{mode}{part}.onnx"
        try:
            os.makedirs(path, exist_ok=True)
            with open(os.path.join(path, name), "wb") as file:
                file.write(onnx)
        except OSError as error:
            logger.warning("the captured graph cannot be saved: %s", error)

    def announce(self) -> None:
        """One line, after the first step."""
        self.announced = True
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        report = self.report()
        logger.log(logging.WARNING if report.eager else logging.INFO, "%s", report.headline())

    def report(self) -> Report:
        report = Report(type(self.module).__name__, isa=_C.isa())
        host: dict[tuple[str, str, int], HostEntry] = {}
        for made in self.every:
            whole = made.graph
            graphs = whole.loaded if isinstance(whole, cuts.CutGraph) else [whole]
            plans = [plan for g in graphs for plan in g.model.plan_report()]
            peak: dict[str, int] = {}
            for plan in plans:
                for name, size in plan.get("peak_bytes", {}).items():
                    peak[name] = max(peak.get(name, 0), size)
            report.graphs.append(
                GraphEntry(
                    nodes=whole.captured.n_nodes,
                    engine_nodes=whole.captured.n_nodes - len(whole.captured.host_ops),
                    dynamic=whole.captured.dynamic,
                    capture_s=whole.captured.seconds,
                    load_s=self.load_s[id(whole)],
                    plans=len(plans),
                    plan_ms=sum(p["plan_ms"] for p in plans),
                    arena_bytes=max((p["arena_bytes"] for p in plans), default=0),
                    peak_bytes=peak,
                    largest=_largest(plans),
                    forwards=whole.forwards,
                    backwards=max((g.backwards for g in graphs), default=0),
                    reruns=sum(g.reruns for g in graphs),
                    why=made.why,
                    forward_ms=sum(g.forward_ms for g in graphs),
                    backward_ms=sum(g.backward_ms for g in graphs),
                    host_ms=sum(sum(g.host.ms) for g in graphs),
                    cuts=whole.describe() if isinstance(whole, cuts.CutGraph) else [],
                    unchecked=made.no_net,
                )
            )
            for op, ms in ((op, ms) for g in graphs for op, ms in zip(g.captured.host_ops, g.host.ms, strict=True)):
                entry = host.get((op.name, op.file, op.line))
                if entry is None:
                    why = self.reasons.get(op.module) if op.kind == "module" else None
                    file, line, reason = (
                        (op.file, op.line, op.reason)
                        if why is None
                        else (why.file, why.line, f"{op.reason}: it {why.reason}")
                    )
                    host[op.name, op.file, op.line] = HostEntry(op.name, op.kind, op.module, file, line, reason, 1, ms)
                else:
                    entry.count += 1
                    entry.ms += ms
        report.host = list(host.values())
        report.eager = [e for e in self.eager_entries.values() if e.calls]
        return report


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While a capture runs: saved_tensors_hooks of the caller do not see its tensors, and what PyTorch logs about an
    attempt that fails is not shown (the ladder's own message says what happened)."""
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.name.startswith("torch.")

    loggers = [
        logging.getLogger(name)
        for name in [*logging.root.manager.loggerDict]
        if name == "torch" or name.startswith("torch.")
    ]
    handlers = {handler for log in (logging.root, *loggers) for handler in log.handlers}
    for handler in handlers:
        handler.addFilter(others)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            contextlib.redirect_stderr(_Stderr(sys.stderr)),
        ):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(others)


class _Stderr:
    """sys.stderr without the half-made graph that torch.export prints there when it fails."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def write(self, text: str) -> int:
        if sys._getframe(1).f_code.co_filename.endswith(_EXPORTER):
            return len(text)
        return int(self.inner.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _restore(undo: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for own, old in undo:
        own.clear()
        own.update(old)


def _inside(name: str, keep: Collection[str]) -> bool:
    """Is the module of this name one of `keep`, or in one?"""
    return any(name == k or name.startswith(k + ".") for k in keep)


def _outermost(names: set[str]) -> set[str]:
    return {n for n in names if not _inside(n.rpartition(".")[0], names)}


class _Holder(nn.Module):
    """Calls a module's forward without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.m = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.m.forward(*args, **kwargs)


def _named(error: BaseException) -> str:
    first = next((s.strip() for s in str(error).splitlines() if s.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A Hugging Face Cache among the arguments."""
    return any(
        c.__name__ == "Cache" and c.__module__.startswith("transformers")
        for v in (*args, *kwargs.values())
        for c in type(v).__mro__
    )


def _largest(plans: list[dict[str, Any]]) -> list[MemoryEntry]:
    """Of the plan that needs most: what lies in memory at its peak, gathered by kind and place."""
    found: dict[tuple[str, str, str, int], MemoryEntry] = {}
    for row in max(plans, key=lambda p: p["arena_bytes"], default={"largest": []})["largest"]:
        key = row["class"], row["op"], row["file"] or "", row["line"]
        entry = found.setdefault(key, MemoryEntry(*key, 0, 0))
        entry.count += 1
        entry.bytes += row["bytes"]
    return sorted(found.values(), key=lambda e: -e.bytes)


def _attempts(dynamic: bool, symbolic: bool) -> list[tuple[bool, bool]]:
    """From what is wanted to what is always possible."""
    tries = [(dynamic, symbolic), (dynamic, False), (False, False)]
    return list(dict.fromkeys(tries))


def _image_sizes(flat: FlatInputs, known: list[_Captured]) -> set[tuple[int, int]]:
    """Sizes that stay numbers in a dynamic capture until they change: those of images but for the batch. They rarely
    change, and as symbols they are expensive: every window, pool and convolution asks about their divisors."""
    return {
        (i, axis)
        for i, t in enumerate(flat.tensors)
        if t.dim() >= 4 and t.is_floating_point()
        for axis in range(1, t.dim())
        if all(c.shapes[i][axis] == t.shape[axis] for c in known)
    }


_CALL_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _shadow(module: nn.Module) -> nn.Module:
    """The module without its own hooks (they run around the engine, in __call__): same class, same children,
    parameters, attributes."""
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__:  # what it does runs around the engine, too
        cls = types.new_class(
            cls.__name__, (cls,), {}, lambda body: body.update(__module__=cls.__module__, __call__=nn.Module.__call__)
        )
    shadow: nn.Module = object.__new__(cls)
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__.update({name: OrderedDict() for name in _CALL_HOOKS})
    return shadow


@contextlib.contextmanager
def _unwrapped(root: nn.Module) -> Iterator[None]:
    """While root is captured, wrappers inside it give place to what they wrap: they are part of its graph."""
    undo: list[tuple[dict[str, Any], str, nn.Module]] = []
    try:
        for m in list(root.modules()):
            for name, child in m._modules.items():
                if (
                    isinstance(child, ORTModule)
                    and child._ortmodule.override is None
                    and child._ortmodule.base.forward is ORTModule.forward
                ):
                    undo.append((m._modules, name, child))
        for children, name, child in undo:
            children[name] = child._ortmodule.body  # type: ignore[union-attr]
        yield
    finally:
        for children, name, child in undo:
            children[name] = child


def _lookup(module: nn.Module, spec: InputSpec) -> Tensor:
    """The tensor that a graph input names, as it is now."""
    owner, _, name = spec.target.rpartition(".")
    try:
        found = getattr(module.get_submodule(owner), name)
    except AttributeError:
        found = spec.tensor  # held by something that is no module: it is the object of the capture
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"{spec.target} was a tensor when the module was captured and is a {type(found).__name__} now"
        )
    return found


class _Forward:
    """`forward` of a wrapper class: the engine's, unless another one was assigned on the wrapper. As a data descriptor
    it goes before a `forward` in the shared __dict__, which belongs to the wrapped module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is None:
            return self.function
        return obj._ortmodule.override or types.MethodType(self.function, obj)

    def __set__(self, obj: Any, value: Callable[..., Any]) -> None:
        obj._ortmodule.override = value

    def __delete__(self, obj: Any) -> None:
        obj._ortmodule.override = None


class _Assigned:
    """A method that was assigned on the wrapper: it takes the place of the class's method there and for the forward
    that runs for the wrapper, and leaves the wrapped module as it is."""

    def __init__(self, name: str, original: Any) -> None:
        self.name = name
        self.original = original

    def __get__(self, obj: Any, owner: type) -> Any:
        return self.original if obj is None else obj._ortmodule.assigned[self.name]

    def __set__(self, obj: Any, value: Any) -> None:
        obj._ortmodule.assign({**obj._ortmodule.assigned, self.name: value})

    def __delete__(self, obj: Any) -> None:
        delattr(type(obj), self.name)
        obj._ortmodule.assign({k: v for k, v in obj._ortmodule.assigned.items() if k != self.name})


def _is_method(cls: type, name: str) -> bool:
    static = inspect.getattr_static(cls, name, None)
    return isinstance(static, (types.FunctionType, classmethod, staticmethod, _Assigned)) and not name.startswith("__")


_OURS = ("report", "module", "_ortmodule")


def _users(name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        own = self.__dict__
        return own[name] if name in own else nn.Module.__getattr__(self, name)

    return get


def _subclass(base: type[ORTModule], module: nn.Module) -> type:
    """The class of a wrapper: base (ORTModule, or a user's subclass of it) before the module's own."""
    cls = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ortmodule.call(args, kwargs)

    forward.__doc__ = cls.forward.__doc__
    forward.__qualname__ = f"{cls.__qualname__}.forward"
    forward.__module__ = cls.__module__
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(module.forward)
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *signature.parameters.values(),
        ]
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    # A user's own attributes of these names keep their meaning: the user's methods depend on it.
    taken: dict[str, Any] = {}
    for name in _OURS:
        theirs = (
            name in module._modules or name in module._parameters or name in module._buffers or name in module.__dict__
        )
        if name != "_ortmodule" and getattr(base, name) is getattr(ORTModule, name):
            if hasattr(cls, name):
                taken[name] = inspect.getattr_static(cls, name)
            elif theirs:
                taken[name] = property(_users(name))
        if (theirs or hasattr(cls, name)) and (cls, name) not in _collisions and cls is not nn.DataParallel:
            _collisions.add((cls, name))
            logger.warning("%s has an attribute %r of its own, which is also one of ORTModule. %s", cls.__name__, name,
                           "The wrapper's is ORTModule's; forward sees its own" if name not in taken else
                           "It keeps its meaning; ORTModule's is "
                           f"ORTModule.{name}{'(model)' if name == 'report' else '.fget(model)'}")

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(taken)
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __slots__=(),
                         forward=_Forward(forward if base.forward is ORTModule.forward else base.forward))  # fmt: skip

    try:
        return types.new_class(cls.__name__, (base, cls), {}, body)
    except TypeError as error:
        raise TypeError(f"ORTModule cannot make a subclass of {cls.__name__} and {base.__name__}: {error}") from error


_collisions: set[tuple[type, str]] = set()
_PARALLEL = "torch.nn.DataParallel copies the module for every call; use DistributedDataParallel(ORTModule(model))"


class ORTModule(nn.Module):
    """`model = ORTModule(model)`: the same module, trained by the engine.

    module: the module to wrap; it stays usable and shares its state with the result.
    debug_options: log level and saving of the captured graphs.
    options: strict, disable, segment_mb, max_captures, recheck, log_level, save_path (see config.TABLE; the environment
    wins).

    The result is an instance of ORTModule and of type(module), with the same parameters, names, attributes, methods and
    signature. A subclass calls super().__init__(module, ...); its methods and its forward go before the module's, and
    its super().forward(...) is the module's in the engine.
    """

    __slots__ = ("_ortmodule",)
    _ortmodule: State

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None, **options: Any) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ORTModule wraps a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, ORTModule):
            raise TypeError("ORTModule got a module that is already an ORTModule")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError("ORTModule must be inside: DistributedDataParallel(ORTModule(model))")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "ORTModule wraps the module before torch.jit.script or torch.jit.trace, not what they return"
            )
        settings = resolve(options, debug_options)
        off = None
        if isinstance(module, nn.DataParallel):
            off = _PARALLEL
            if settings.strict:
                raise TypeError(f"ORTModule does not work with DataParallel: {off}")
        reason = guard.refuse(module)
        if reason is not None:
            raise Refused(f"ORTModule cannot run {type(module).__name__}: {reason}.")
        if settings.log_level is not None:
            logger.setLevel(settings.log_level)
        self._wrap(module, settings)
        if off is not None:
            self._ortmodule.off = off
            logger.warning("%s runs in PyTorch: %s", type(module).__name__, off)

    def _wrap(self, module: nn.Module, settings: Settings) -> None:
        base = type(self)
        before = self.__dict__
        if _state_of(self) is not None:
            raise TypeError(f"{base.__name__}.__init__: this object is an ORTModule already")
        state = State(module, settings)
        wrapper = _subclass(base, module)
        module.__dict__.update(before)  # what a subclass has set before super().__init__
        # The state is the module's; nn.Module.__init__ would make another one.
        object.__setattr__(self, "__class__", wrapper)
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "_ortmodule", state)
        state.base = base

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._ortmodule.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, in the engine."""
        return self._ortmodule.call(args, kwargs)

    def report(self) -> Report:
        """What runs in the engine, what does not and why, and what capture and planning have cost."""
        return self._ortmodule.report()

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            callable(value)
            and not isinstance(value, (nn.Module, type))
            and name != "forward"
            and name not in self.__dict__
            and _is_method(type(self), name)
        ):
            state = _state_of(self)
            if state is not None:
                if name not in state.assigned:
                    setattr(type(self), name, _Assigned(name, getattr(type(self), name)))
                state.assign({**state.assigned, name: value})
                return
        super().__setattr__(name, value)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # In two steps: attributes of the module may refer to this object.
        state = self._ortmodule
        return _blank, (state.base,), (state.module, state.settings, state.override, state.assigned)

    def __setstate__(self, saved: tuple[Any, ...]) -> None:
        module, settings, override, assigned = saved
        self._wrap(module, settings)
        for name, value in assigned.items():
            setattr(self, name, value)
        self._ortmodule.override = override
        if isinstance(module, nn.DataParallel):
            self._ortmodule.off = _PARALLEL

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        make, args, state = self.__reduce_ex__(2)
        result: ORTModule = make(*args)
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(state, memo))
        return result

    def __copy__(self) -> ORTModule:
        make, args, (module, *rest) = self.__reduce_ex__(2)
        result: ORTModule = make(*args)
        result.__setstate__((copy.copy(module), *rest))
        return result

    def __prepare_scriptable__(self) -> nn.Module:
        return self._ortmodule.body  # torch.jit.script compiles the user's code

    def _replicate_for_data_parallel(self) -> Any:
        logger.warning("%s: the copies that DataParallel makes run in PyTorch: %s", type(self).__name__, _PARALLEL)
        return self._ortmodule.module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]


def _blank(base: type[ORTModule]) -> ORTModule:
    return object.__new__(base)


def _state_of(wrapper: ORTModule) -> State | None:
    """None: its __init__ has not run yet."""
    try:
        return object.__getattribute__(wrapper, "_ortmodule")  # type: ignore[no-any-return]
    except AttributeError:
        return None
