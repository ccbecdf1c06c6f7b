"""ORTModule: an object of a dynamic subclass of the user's class, sharing the user's module's state, whose forward runs in the engine.

forward   arguments are flattened; the guard (guard.py) says whether a known capture fits; Graph (chain.py) runs it. What is not known
          is captured: with constant sizes first, once more with symbolic sizes at the first new shape, once more with int/float
          arguments as inputs at their second distinct value.
ladder    what cannot be captured or computed goes to PyTorch in the smallest piece that works: operator (done by the capture),
          submodule, whole module. Every piece is counted and named in report(); strict=True raises instead.

The wrapper's __dict__ IS the module's: parameters, buffers, children, modes, hooks and attributes are one and the same, names carry no
prefix. Hooks of the wrapped module itself run in __call__, around the engine. The wrapper's own state is in a slot.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _C, guard, watch
from .capture import CaptureError, FlatInputs, InputSpec, capture, flatten_inputs
from .capture.skeleton import input_skeleton, skeleton
from .chain import Graph, Refusal, Unfit
from .config import DebugOptions, Settings, resolve
from .report import EagerEntry, GraphEntry, HostEntry, MemoryEntry, Report

logger = logging.getLogger("ortmodule")

_SITE_LIMIT = 64  # states of one module remembered with their tensors
_EXPORTER = os.path.join("torch", "export", "_trace.py")
_LADDER_LIMIT = 24  # submodules tried to be left out before the whole module is
_MANY_CAPTURES = 16  # of one module, before a warning
_GENERAL_LIMIT = 3  # symbolic captures of one call structure
_PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_check = _C.guard_check


class _Skip(Exception):
    """This call runs in PyTorch, the next may not have to."""


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
        self.reads: guard.Reads | None = None  # the attributes of modules that the captures hold for
        self.held = watch.Held()  # the rest of the Python state
        self.writes_seen = 0
        self.why = "first call"  # what no other entry stood for

    def changed(self, module: nn.Module) -> list[str]:
        """Names of what differs from the state that the captures hold for."""
        return [*(self.reads.changed(module) if self.reads is not None else ()), *self.held.changed()]


class _Captured:
    """A graph, and for which calls it holds."""

    def __init__(self, graph: Graph, flat: FlatInputs, dynamic: bool, symbolic: bool, why: str) -> None:
        self.graph = graph
        self.why = why
        self.dynamic = dynamic
        self.symbolic = symbolic
        self.shapes = [t.shape for t in flat.tensors]
        self.scalars = list(flat.scalars)
        self.refused: list[list[torch.Size]] = []  # sizes the engine turned down

    def fits(self, flat: FlatInputs) -> bool:
        shapes = [t.shape for t in flat.tensors]
        if self.refused and shapes in self.refused:
            return False
        if self.dynamic or self.symbolic:
            return self.graph.captured.fits(flat)
        return self.shapes == shapes and self.scalars == flat.scalars


class _Site:
    """An _Entry with this moment's parameters and buffers: valid as long as the guard's fast() value is the same and the entry's `held`
    holds. other: a site of equal fast() for another state of what `held` compares."""

    __slots__ = ("bound", "captured", "entry", "fast", "fill", "other", "params", "params_grad", "refs", "structure", "wanted_bound")

    def __init__(self, entry: _Entry, fast: Hashable, own: guard.Guard) -> None:
        self.entry = entry
        self.other: _Site | None = None
        self.fast = fast
        self.structure = own.structure()
        self.refs = own.refs()
        self.params = own.params
        self.params_grad = [p.requires_grad for p in own.params]
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
        self.override: Callable[..., Any] | None = None  # forward assigned on the wrapper
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
        flat = flatten_inputs(args, kwargs)
        leaves, _, structure = flat
        for t in leaves:
            if type(t) not in _PLAIN_TYPES:
                return self.eager(f"an argument is a {type(t).__name__}", args, kwargs)
        if _transforms() is not None or _dispatch_modes() or _tracing():
            return self.eager("called inside a function transform or while PyTorch traces", args, kwargs)
        if guard.global_hooks():
            return self.eager("hooks for all modules of the process are registered", args, kwargs)
        if getattr(self.local, "capturing", False):
            return self.module.forward(*args, **kwargs)
        env = guard.environment()
        fast = self.guard.fast()
        key = (fast, structure, env, tuple([t.requires_grad for t in leaves]))
        site = self.sites.get(key)
        while site is not None and _check(site.entry.held.table) >= 0:
            site = site.other
        if site is None or [p.requires_grad for p in site.params] != site.params_grad:
            site = self.find_site(key, structure, env, args, kwargs)
        if site.entry.eager is not None:
            site.entry.eager.calls += 1
            return self.module.forward(*args, **kwargs)
        captured = site.captured
        if captured is None or not captured.fits(flat):
            captured = self.find_captured(site, flat, args, kwargs)
            if captured is None:
                return self.eager_site(site, args, kwargs)
        return self.run(site, captured, flat, env, args, kwargs)

    def run(self, site: _Site, captured: _Captured, flat: FlatInputs, env: tuple[Any, ...], args: tuple[Any, ...],
            kwargs: dict[str, Any]) -> Any:  # fmt: skip
        graph = captured.graph
        if not self.announced and graph.forwards:
            self.announce()
        given = flat.tensors
        if captured.symbolic and flat.scalars:
            given = given + [torch.tensor(x, dtype=torch.float64 if type(x) is float else torch.int64) for x in flat.scalars]
        tensors = [given[i] for i in graph.leaves]
        wanted = tuple([t.requires_grad for t in tensors]) + site.wanted_bound
        tensors += site.bound
        try:
            if not env[0] or True not in wanted:
                return graph.infer(tensors)
            fill = site.fill or self.fill(site, args, kwargs)
            return graph.train(tensors, wanted, _Call(self, site, flat, fill), env[2])
        except Unfit as error:
            return self.unfit(site, captured, flat, error, args, kwargs)
        except Refusal as error:
            self.leave(site.entry, CaptureError(f"the engine refuses the graph: {error}"))
            return self.call(args, kwargs)

    # --- the slow path -----------------------------------------------------------------------------

    def find_site(self, key: tuple[Any, ...], structure: Hashable, env: tuple[Any, ...], args: tuple[Any, ...],
                  kwargs: dict[str, Any]) -> _Site:  # fmt: skip
        """Something changed (or this is the first call): what do we know about the state the module is in now?"""
        with self.lock:
            reason = guard.refuse(self.module)
            if reason is not None:
                raise Refused(f"ORTModule cannot run {type(self.module).__name__}: {reason}.")
            own = self.guard = guard.Guard(self.module)
            fast = own.fast()
            known = self.entries.get((own.structure(), structure, env, key[3]), [])
            entry = next((e for e in known if (e.reads is None or e.reads.hold(self.module)) and e.held.hold()), None)
            if entry is None:
                entry = _Entry()
                entry.dynamic, entry.symbolic = self.dynamic, self.symbolic
                entry.why = self.why(own.structure(), key, known)
                changing = sorted({name for e in known for name in e.changed(self.module)})
                entry.keep = set(guard.hooked(self.module))
                known = self.entries.setdefault((own.structure(), structure, env, key[3]), known)
                known.append(entry)
                if len(known) > self.settings.max_captures:
                    what = ", ".join(changing[:3]) or "attributes of modules that forward reads"
                    entry.eager = self.eager_entry(f"{len(known)} captures of one call structure were not enough: what forward reads changes "
                                                   f"from call to call ({what}); pass it as an argument")  # fmt: skip
                if self.settings.disable:
                    entry.eager = self.eager_entry("switched off by ORTMODULE_DISABLE")
                elif _holds_cache(args, kwargs):
                    entry.eager = self.eager_entry("an argument is a generation cache, which forward edits and which grows at every call")
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
        parts = ("modules or modes", "parameters or buffers", "hooks", "argument structure or dtypes", "grad mode, autocast or default dtype",
                 "requires_grad of arguments")  # fmt: skip
        now = (*structure, *key[1:])
        changes: list[list[str]] = [[name for name, a, b in zip(parts, (*old[0], *old[1:]), now, strict=True) if a != b] for old in self.entries]
        nearest = min(changes, key=len, default=["first call"])
        return nearest[0] if not changes else f"changed: {', '.join(nearest)}"

    def count(self, made: _Captured) -> None:
        """Every state a module is in is captured once, without a limit: a limit would slow down a model that merely has many. Who captures
        again and again should know why."""
        self.every.append(made)
        if len(self.every) == _MANY_CAPTURES:
            reasons = Counter(c.why for c in self.every)
            logger.warning(
                "%s has been captured %d times, which took %.0f s. Reasons: %s. Captures are kept, so states that come back cost nothing; "
                "what changes at every step should be a tensor argument.",
                type(self.module).__name__, len(self.every), sum(c.graph.captured.seconds for c in self.every),
                "; ".join(f"{k}x {why}" for why, k in reasons.most_common()))  # fmt: skip

    def bind(self, site: _Site, captured: _Captured) -> _Captured:
        """Makes `captured` the one that `site` uses: looks up its parameters and buffers by name."""
        bound = [_lookup(self.module, spec) for spec in captured.graph.bound]
        site.bound = bound
        site.wanted_bound = tuple([t.requires_grad for t in bound])
        site.captured = captured
        return captured

    def find_captured(self, site: _Site, flat: FlatInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured | None:
        """A capture of the site's entry for these sizes and scalars, made now if need be; None: leave the call to PyTorch."""
        entry = site.entry
        shapes = [t.shape for t in flat.tensors]
        with self.lock:
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
                self.leave(entry, CaptureError(f"{entry.n_captures} captures of one call structure were not enough: sizes or numbers "
                                               "that the model's code branches on change from call to call"))  # fmt: skip
                return None
            # Code that branches on sizes or numbers (is the length 1?) gets a symbolic capture per branch taken; after some, constants.
            n_general = sum(c.dynamic or c.symbolic for c in entry.graphs)
            general = n_general < _GENERAL_LIMIT or entry.dynamic > any(c.dynamic for c in entry.graphs) \
                or entry.symbolic > any(c.symbolic for c in entry.graphs)  # fmt: skip
            for dynamic, symbolic in _attempts(entry.dynamic and general, entry.symbolic and general):
                entry.n_captures += 1
                try:
                    graph = self.capture(entry, args, kwargs, dynamic, symbolic, _image_sizes(flat, entry.graphs) if dynamic else set())
                except _Skip as skip:
                    self.local.skip = str(skip)
                    return None
                except CaptureError as error:
                    failure = error
                    if symbolic:
                        entry.no_symbolic, entry.symbolic = True, False
                    continue
                made = _Captured(graph, flat, dynamic, symbolic, why)
                entry.graphs.insert(0, made)
                self.count(made)
                return self.bind(site, made)
            # Either the module cannot be captured, or this call is wrong: then PyTorch's own error is the one the user should see.
            self.local.failure = failure
            return None

    def capture(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, symbolic: bool,
                fixed: set[tuple[int, int]]) -> Graph:  # fmt: skip
        """Captures, climbing from failing submodules to their parents, and loads the result into the engine. Raises CaptureError."""
        if any(not isinstance(p, nn.Parameter) for p in self.module.parameters()):
            raise _Skip("parameters are replaced by other tensors for this call (functional_call)")
        if watch.busy():
            raise _Skip("called while another module is captured")
        keep = set(entry.keep)
        self.local.capturing = True
        first: tuple[bytes, watch.Watch] | None = None  # a capture whose forward assigned numbers to attributes of objects
        undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for _ in range(_LADDER_LIMIT):
                shadow = _shadow(self.module)
                try:
                    with watch.Watch(shadow) as seen, _undisturbed():
                        captured = capture(shadow, args, kwargs, dynamic=dynamic, symbolic_scalars=symbolic, keep_in_torch=keep,
                                           fixed=fixed)
                    written = sorted(w for w in seen.writes if not _inside(w[0], keep))
                    if not written:
                        problems = [p for p in seen.problems if not _inside(p.module, keep)]
                        # What a kept module assigns and the code around it reads is of this call: they stay together.
                        problems += [watch.Problem(k.rpartition(".")[0], f"reads {where}.{name}, which a module kept in PyTorch assigns", "", 0)
                                     for where, name in sorted(seen.quiet_writes & seen.reads) for k in keep if _inside(where, {k})]
                        if not problems and not seen.assigns and (first is None or captured.onnx == first[0]):
                            undo = []
                            break
                        if not problems and first is None:
                            # Assigned as forward would have done. If that makes no difference to a second capture, it holds for this call too.
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
                    # Tensors or state that the user may look at afterwards, or a cache: this call runs in PyTorch so that it is
                    # written; a module that does it again and again stays there.
                    entry.writes_seen += 1
                    if entry.writes_seen <= 2 and not self.settings.strict:
                        raise _Skip("forward assigns attributes of a module")
                    where, name = written[0]
                    raise CaptureError(f"forward assigns self.{name}", where)
                except CaptureError as error:
                    name = error.module
                    while name in keep:
                        name = name.rpartition(".")[0]
                    if self.settings.strict or not name:
                        raise
                    keep = _outermost(keep | {name})
            else:
                raise CaptureError(f"more than {_LADDER_LIMIT} submodules cannot be captured")
        finally:
            self.local.capturing = False
            _restore(undo)
        if self.settings.strict and captured.host_ops:
            op = captured.host_ops[0]
            raise CaptureError(f"strict: {op.name} would run in PyTorch ({op.reason})", op.module, op.file, op.line)
        start = perf_counter()
        self.save(captured.onnx)
        try:
            graph = Graph(captured, self.settings.segment_mb, self.settings.memory_opt_level)
        except (RuntimeError, ValueError) as error:
            raise CaptureError(f"the engine refuses the graph: {error}") from error
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
        self.tell(seen)
        self.load_s[id(graph)] = perf_counter() - start
        return graph

    def unfit(self, site: _Site, captured: _Captured, flat: FlatInputs, error: Unfit, args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Any:  # fmt: skip
        """The engine found that the tensors are not those of the capture (a parameter's dtype or size was changed under its data, or a
        dynamic capture holds for fewer sizes): looks again, once."""
        if getattr(self.local, "again", False):
            raise error
        self.local.again = True
        try:
            with self.lock:
                self.sites = {k: s for k, s in self.sites.items() if s is not site}
                site.captured = None
                own = guard.Guard(self.module)
                if own.structure() == site.structure:
                    captured.refused.append([t.shape for t in flat.tensors])
            return self.call(args, kwargs)
        finally:
            self.local.again = False

    # --- PyTorch instead ---------------------------------------------------------------------------

    def eager_entry(self, reason: str, module: str = "", file: str = "", line: int = 0) -> EagerEntry:
        entry = self.eager_entries.get(reason)
        if entry is None:
            entry = self.eager_entries[reason] = EagerEntry(reason, module, file, line)
        return entry

    def eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This call in PyTorch."""
        self.eager_entry(reason).calls += 1
        return self.module.forward(*args, **kwargs)

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
        if self.settings.strict:
            raise failure
        result = self.module.forward(*args, **kwargs)
        self.leave(site.entry, failure)
        assert site.entry.eager is not None
        site.entry.eager.calls += 1
        return result

    def fill(self, site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[list[Any]], Any]:
        site.fill = input_skeleton(args, kwargs)[0]
        return site.fill

    def replay(self, call: _Call, tensors: Sequence[Tensor], clones: dict[int, Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        """Runs the call in PyTorch on aliases, so that gradients can be taken for this use of the tensors alone."""
        site = call.site
        if self.guard.fast() != site.fast:
            raise RuntimeError("ortmodule: the module was changed between forward and backward(create_graph=True)")
        graph = site.captured.graph if site.captured is not None else None
        assert graph is not None
        leaves = [t.view_as(t) if t.requires_grad else t for t in call.flat.tensors]
        args, kwargs = call.fill([*leaves, *call.flat.scalars])
        holder = _Holder(self.module)
        before = {id(tensors[i]): t for i, t in clones.items()}
        own: dict[str, Tensor] = {}
        alias: dict[int, Tensor] = {}
        for prefix, m in self.module.named_modules(prefix="m"):  # a module under two names comes once, a tensor in two modules twice
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
            raise RuntimeError(f"ortmodule: the module returned {len(outputs)} tensors in PyTorch, {graph.n_outputs} when captured")
        given = [*leaves, *[torch.tensor(0)] * len(call.flat.scalars)]
        aliases = [given[i] for i in graph.leaves] + [alias.get(id(t), t) for t in tensors[len(graph.leaves) :]]
        return outputs, aliases

    # --- telling -----------------------------------------------------------------------------------

    def tell(self, seen: watch.Watch) -> None:
        """Output of forward that the engine does not repeat."""
        for (file, line), does in seen.says.items():
            if (file, line) not in self.told:
                self.told.add((file, line))
                logger.warning("%s: forward %s (%s:%d). In the engine it does so only when it is captured.",
                               type(self.module).__name__, does, file, line)

    def save(self, onnx: bytes) -> None:
        path = self.settings.save_path
        if path is None:
            return
        os.makedirs(path, exist_ok=True)
        mode = "training" if self.module.training and torch.is_grad_enabled() else "inference"
        name = f"{self.settings.save_prefix}{type(self.module).__name__}_{len(self.every)}_{mode}.onnx"
        with open(os.path.join(path, name), "wb") as file:
            file.write(onnx)

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
            g = made.graph
            plans = g.model.plan_report()
            peak: dict[str, int] = {}
            for plan in plans:
                for name, size in plan.get("peak_bytes", {}).items():
                    peak[name] = max(peak.get(name, 0), size)
            report.graphs.append(GraphEntry(
                nodes=g.captured.n_nodes, engine_nodes=g.captured.n_nodes - len(g.captured.host_ops), dynamic=g.captured.dynamic,
                capture_s=g.captured.seconds, load_s=self.load_s[id(g)], plans=len(plans), plan_ms=sum(p["plan_ms"] for p in plans),
                arena_bytes=max((p["arena_bytes"] for p in plans), default=0), peak_bytes=peak,
                largest=_largest(plans), forwards=g.forwards, backwards=g.backwards,
                reruns=g.reruns, why=made.why, forward_ms=g.forward_ms, backward_ms=g.backward_ms, host_ms=sum(g.host.ms)))  # fmt: skip
            for op, ms in zip(g.captured.host_ops, g.host.ms, strict=True):
                entry = host.get((op.name, op.file, op.line))
                if entry is None:
                    why = self.reasons.get(op.module) if op.kind == "module" else None
                    file, line, reason = (op.file, op.line, op.reason) if why is None else (why.file, why.line, f"{op.reason}: it {why.reason}")
                    host[op.name, op.file, op.line] = HostEntry(op.name, op.kind, op.module, file, line, reason, 1, ms)
                else:
                    entry.count += 1
                    entry.ms += ms
        report.host = list(host.values())
        report.eager = [e for e in self.eager_entries.values() if e.calls]
        return report


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While a capture runs: saved_tensors_hooks of the caller do not see its tensors, and what PyTorch logs about an attempt that
    fails is not shown (the ladder's own message says what happened)."""
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.name.startswith("torch.")

    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name == "torch" or name.startswith("torch.")]
    handlers = {handler for log in (logging.root, *loggers) for handler in log.handlers}
    for handler in handlers:
        handler.addFilter(others)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), contextlib.redirect_stderr(_Stderr(sys.stderr)):
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


def _holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A Hugging Face Cache among the arguments."""
    return any(c.__name__ == "Cache" and c.__module__.startswith("transformers") for v in (*args, *kwargs.values()) for c in type(v).__mro__)


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
    """Sizes that stay numbers in a dynamic capture until they change: those of images but for the batch. They rarely change, and
    as symbols they are expensive: every window, pool and convolution asks about their divisors."""
    return {(i, axis) for i, t in enumerate(flat.tensors) if t.dim() >= 4 and t.is_floating_point() for axis in range(1, t.dim())
            if all(c.shapes[i][axis] == t.shape[axis] for c in known)}


_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
               "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")  # fmt: skip


def _shadow(module: nn.Module) -> nn.Module:
    """The module without its own hooks (they run around the engine, in __call__): same class, same children, parameters, attributes."""
    shadow: nn.Module = object.__new__(type(module))
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__.update({name: OrderedDict() for name in _CALL_HOOKS})
    return shadow


def _lookup(module: nn.Module, spec: InputSpec) -> Tensor:
    """The tensor that a graph input names, as it is now."""
    owner, _, name = spec.target.rpartition(".")
    try:
        found = getattr(module.get_submodule(owner), name)
    except AttributeError:
        found = spec.tensor  # held by something that is no module: it is the object of the capture
    if not isinstance(found, Tensor):
        raise CaptureError(f"{spec.target} was a tensor when the module was captured and is a {type(found).__name__} now")
    return found


class _Forward:
    """`forward` of a wrapper class: the engine's, unless another one was assigned on the wrapper. As a data descriptor it goes before
    a `forward` in the shared __dict__, which belongs to the wrapped module."""

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


def _child(name: str) -> Callable[[nn.Module], Any]:
    return lambda self: nn.Module.__getattr__(self, name)


def _subclass(cls: type[nn.Module], signature: inspect.Signature | None, children: Collection[str]) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ortmodule.call(args, kwargs)

    forward.__doc__ = cls.forward.__doc__
    forward.__qualname__ = f"{cls.__qualname__}.forward"
    forward.__module__ = cls.__module__
    if signature is not None:
        forward.__signature__ = signature  # type: ignore[attr-defined]

    # A user's own attributes of these names keep their meaning: the user's methods depend on it.
    taken = {name: getattr(cls, name) for name in ("report", "module") if hasattr(cls, name)}
    for name in ("report", "module"):
        if name not in taken and name in children:
            taken[name] = property(_child(name))

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(taken)
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __slots__=("_ortmodule",),
                         forward=_Forward(forward))  # fmt: skip

    return types.new_class(cls.__name__, (ORTModule, cls), {}, body)


class ORTModule(nn.Module):
    """`model = ORTModule(model)`: the same module, trained by the engine.

    module: the module to wrap; it stays usable and shares its state with the result.
    debug_options: log level and saving of the captured graphs.
    options: strict, disable, segment_mb, max_captures, log_level, save_path (see config.TABLE; the environment wins).

    The result is an instance of ORTModule and of type(module), with the same parameters, names, attributes, methods and signature.
    """

    _ortmodule: State

    def __new__(cls, module: nn.Module, debug_options: DebugOptions | None = None, **options: Any) -> ORTModule:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ORTModule wraps a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, ORTModule):
            raise TypeError("ORTModule got a module that is already an ORTModule")
        if isinstance(module, nn.DataParallel):
            raise TypeError("ORTModule does not work with torch.nn.DataParallel; use DistributedDataParallel(ORTModule(model))")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError("ORTModule must be inside: DistributedDataParallel(ORTModule(model))")
        reason = guard.refuse(module)
        if reason is not None:
            raise Refused(f"ORTModule cannot run {type(module).__name__}: {reason}.")
        settings = resolve(options, debug_options)
        if settings.log_level is not None:
            logger.setLevel(settings.log_level)
        try:
            signature: inspect.Signature | None = inspect.signature(module.forward)
            assert signature is not None
            signature = signature.replace(parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                                                      *signature.parameters.values()])  # fmt: skip
        except (TypeError, ValueError):
            signature = None
        self: ORTModule = object.__new__(_subclass(type(module), signature, [*module._modules, *module._parameters, *module._buffers]))
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "_ortmodule", State(module, settings))
        return self

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None, **options: Any) -> None:
        pass  # the state is the module's; nn.Module.__init__ would reset it

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._ortmodule.module

    def report(self) -> Report:
        """What runs in the engine, what does not and why, and what capture and planning have cost."""
        return self._ortmodule.report()

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _rewrap, (self._ortmodule.module, self._ortmodule.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        result = _rewrap(copy.deepcopy(self._ortmodule.module, memo), self._ortmodule.settings)
        memo[id(self)] = result
        return result

    def __copy__(self) -> ORTModule:
        return _rewrap(copy.copy(self._ortmodule.module), self._ortmodule.settings)

    def _replicate_for_data_parallel(self) -> Any:
        raise TypeError("ORTModule does not work with torch.nn.DataParallel; use DistributedDataParallel(ORTModule(model))")


def _rewrap(module: nn.Module, settings: Settings) -> ORTModule:
    result = ORTModule(module)
    result._ortmodule.settings = settings
    return result
