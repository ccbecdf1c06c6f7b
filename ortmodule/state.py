"""What an ORTModule knows besides its module, and the look-up: which captured graph fits a call?

look-up   a call's key (guard.fast(), structure of the arguments, environment, which arguments require a gradient) leads
          to a Site: an Entry with the parameters and buffers of this moment. The Entry has the captures of one state of
          the module and one structure of arguments; each says itself for which sizes and numbers it holds.
change    a new key is compared by what the captures have read (guard.Reads, watch.Held): an Entry may serve many keys.

Nothing here captures or runs anything: ladder.py does, when no capture fits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from . import _C, branches, cuda_engine, cuts, forks, guard, net, patches, watch
from . import torch_private as private
from .capture import CaptureError, FlatInputs, InputSpec, flatten_inputs
from .capture.facts import Known, hold
from .chain import Graph
from .config import Settings
from .fallback import TORCH_MODEL, wrap_exception
from .memory_table import Plan
from .patches import Patch
from .report import EagerEntry, FailedEntry
from .torch_private import CALL, HOOK_TABLES

logger = logging.getLogger("ortmodule")

_FLOATS = (float, complex)  # 0.0 == -0.0
_MANY_LEFT = 4  # kinds of calls that cannot be captured, before others are not tried
_SITE_LIMIT = 64  # states of one module remembered with their tensors
_STALE_LIMIT = 4  # of those, with tensors that the module has no more (parameters, a batch in an attribute)


class Refused(RuntimeError):
    """The module must not be wrapped: it would train wrongly."""


class _Untold:
    """In front of a user's class: its __init_subclass__ is not called."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _below(cls: type, namespace: dict[str, Any]) -> type:
    """A class below a user's, for the engine's sake: the user's __init_subclass__ may change or count those below."""
    bases = (cls,) if issubclass(cls, _Untold) else (_Untold, cls)
    return types.new_class(cls.__name__, bases, {}, lambda body: body.update(__module__=cls.__module__, **namespace))


def structure_alone(structure: Any) -> tuple[Any, ...]:
    """The structure of arguments without what is compared by value but numbers: words, arrays, functions."""
    return tuple([x if x is None or isinstance(x, (type, int, torch.dtype)) else "" for x in structure])


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):  # skeleton._exact
        value = float.fromhex(value[1]) if issubclass(value[0], float) else value[1]
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class Entry:
    """All captures for one state of the module, one argument structure and one environment."""

    def __init__(self) -> None:
        self.graphs: list[GuardedGraph] = []
        self.eager: EagerEntry | None = None
        self.by_parts = False  # with parts in the engine
        self.again = False  # the next call tries to capture once more
        self.dynamic = False  # a second shape has been seen
        self.symbolic = False  # a second value of an int/float argument has been seen
        self.no_symbolic = False  # ... but it cannot be an input
        self.n_captures = 0
        self.raised = 0  # calls that could not be captured and raised in PyTorch, too
        self.in_vain = 0  # captures with symbols for sizes or numbers that came to nothing
        self.keep: set[str] = set()
        self.escaped: set[str] = set()  # submodules that leave tensors where others find them
        self.places: tuple[guard.Place, ...] = ()  # submodules with hooks
        self.effect: cuts.Effect | None = None  # of those hooks, once a call has been watched
        self.reads: guard.Reads | None = None  # the attributes of modules that the captures hold for
        self.held = watch.Held()  # the rest of the Python state
        self.ties = watch.Ties()  # what forward has met under several names
        self.writes_seen = 0
        self.fills_seen = False  # a call has run in PyTorch for the dictionaries that forward fills
        self.caches_filled = 0  # so many have for the caches of functools
        self.failures = 0  # runs of the engine that PyTorch had to repeat
        self.left: list[list[torch.Size]] = []  # sizes for which the engine has turned down every capture: PyTorch's
        self.why = "first call"  # what no other entry stood for
        # Branches on values of tensors: captures hold for one way through forward; else what branches is PyTorch's
        self.branches = True
        self.closed: list[branches.Answers] = []  # beginnings of ways that cannot be captured
        self.astray = 0  # calls that went one of those, and that PyTorch could run

    def counts(self) -> tuple[int, int, bool, bool]:
        """What a capture that fails changes."""
        return self.n_captures, self.in_vain, self.no_symbolic, self.symbolic

    def holds(self, module: nn.Module) -> bool:
        """Is the state that the captures have read as it was? `reads` compares attributes by their place and content,
        so they may be another module's; `held` compares objects, and is asked at every call."""
        if self.reads is not None and not self.reads.hold(module):
            return False
        stands = [(now, met[0]) for now, met in self._containers(module)]
        held = self.held.hold() and self.held.apart(stands) or self.held.follow(stands)
        return held and not self.ties.changed(module)

    def _containers(self, module: nn.Module) -> list[tuple[Any, list[Any]]]:
        return [] if self.reads is None else self.reads.containers(module)

    def also(self, module: nn.Module) -> tuple[Any, ...]:
        """Rows as `held` has them, for what stands where equal containers were read."""
        return self.held.also((now, was) for now, met in self._containers(module) for was in met)

    def changed(self, module: nn.Module) -> list[str]:
        """Names of what differs from the state that the captures hold for."""
        reads = self.reads.changed(module) if self.reads is not None else []
        return [*reads, *self.held.changed(), *self.ties.changed(module)]


class Strange(NamedTuple):
    """Why a graph does not hold for these tensors. of_call: PyTorch runs the call; else another capture may hold."""

    reason: str
    of_call: bool


class GuardedGraph:
    """A graph, and for which calls it holds."""

    def __init__(self, graph: Graph | cuts.CutGraph, flat: FlatInputs, dynamic: bool, symbolic: bool, why: str) -> None:
        self.graph = graph
        self.why = why
        self.dynamic = dynamic
        self.symbolic = symbolic
        self.shapes = [t.shape for t in flat.tensors]
        self.scalars = list(flat.scalars)
        self.zeros = [i for i, x in enumerate(self.scalars) if type(x) is float and x == 0.0]
        self.refused: list[list[torch.Size]] = []  # sizes the engine turned down
        self.tests = graph.captured.tests
        self.answers = graph.captured.conditions
        self.astray = 0  # calls that went another way, and were computed again
        self.net: net.Net | None = None
        self.no_net = ""  # why there is none
        self.elsewhere = cuda_engine.elsewhere(flat.tensors, graph.cuda)  # arguments that lay on another device
        self.edited = tuple(set(graph.writes).difference(graph.captured.rebinds))  # graph inputs
        self.overlapped: set[tuple[int, int]] = set()  # of `given`, what shared memory with those when it was captured
        self.calls = 0
        self.next_check = -1  # call at which the net looks again

    def fits(self, flat: FlatInputs, known: Known) -> bool:
        shapes = [t.shape for t in flat.tensors]
        if self.refused and shapes in self.refused:
            return False
        if self.dynamic or self.symbolic:
            fits = self.graph.captured.fits(flat)
        else:
            fits = self.shapes == shapes and self.scalars == flat.scalars and self._same_zeros(flat)
        return fits and (self.tests is None or hold(self.tests, flat.tensors, known))

    def given(self, tensors: list[Tensor], reach: list[Tensor]) -> list[Tensor | None]:
        """The graph's inputs, and what else may share memory with them. reach: State.reach()."""
        n = len(tensors)
        return [tensors[i] if i < n else None for i in self.graph.leaves] + reach

    def strange(self, tensors: list[Tensor], reach: list[Tensor]) -> Strange | None:
        """Do tensors share memory with what forward edits that did not when it was captured, or the other way round?
        May it be edited at all?"""
        if not self.edited:
            return None
        given = self.given(tensors, reach)
        pair = min(_C.overlaps_written(given, self.edited) ^ self.overlapped, default=None)
        if pair is not None:
            return Strange(self._shares(pair), pair[0] < len(self.graph.leaves))
        made = [i for i in self.edited if (t := given[i]) is not None and t.is_inference()]
        if made and not torch.is_inference_mode_enabled():
            return Strange(f"forward edits {self._name(made[0])}, an inference tensor", True)
        return None

    def _name(self, i: int) -> str:
        inputs = self.graph.captured.inputs
        return "another tensor" if i >= len(inputs) else inputs[i].target or f"argument {inputs[i].name}"

    def _shares(self, pair: tuple[int, int]) -> str:
        one, other = map(self._name, pair)
        if pair[0] == pair[1]:
            return f"forward edits {one}, of which elements share memory (expand, unfold)"
        return f"forward edits {one} or {other}, which share memory"

    def _same_zeros(self, flat: FlatInputs) -> bool:
        """0.0 == -0.0"""
        return all(math.copysign(1.0, flat.scalars[i]) == math.copysign(1.0, self.scalars[i]) for i in self.zeros)


class Site:
    """An Entry with this moment's parameters and buffers: valid as long as the guard's fast() value is the same and
    the entry's `held` holds. other: a site of equal fast() for another state of what `held` compares."""

    __slots__ = (
        "also",
        "bound",
        "captured",
        "entry",
        "fast",
        "fill",
        "known",
        "left",
        "other",
        "params",
        "params_grad",
        "plain",
        "plain_grad",
        "reach",
        "refs",
        "stored",
        "structure",
        "tensors",
        "wanted_bound",
    )

    def __init__(self, entry: Entry, fast: Hashable, own: guard.Guard, like: Site | None = None) -> None:
        """like: the site before forward assigned new tensors to buffers."""
        self.entry = entry
        self.other: Site | None = None
        self.fast = fast
        self.structure: Hashable = own.structure() if like is None else like.structure
        self.refs: list[tuple[Any, ...]] = own.refs() if like is None else like.refs
        self.tensors: frozenset[int] = _tensors_in(self.refs) if like is None else like.tensors
        self.also: tuple[Any, ...] = entry.also(own.module) if like is None else like.also
        self.params = own.params
        self.known = Known(own.module)
        self.params_grad: list[bool] = [p.requires_grad for p in own.params] if like is None else like.params_grad
        self.captured: GuardedGraph | None = None  # the one used last
        self.bound: list[Tensor] = []  # its parameters, buffers and constants
        self.reach: list[Tensor] = []  # State.reach()
        self.plain: list[Tensor] = []  # of those, what is no parameter
        self.plain_grad: list[bool] = []
        self.left: list[dict[str, Any]] = []  # the modules whose attributes it leaves as forward would
        self.stored: list[tuple[dict[str, Any], str]] = []  # attributes that get tensors behind the results
        self.wanted_bound: tuple[bool, ...] = ()
        self.fill: Callable[[list[Any]], Any] | None = None

    def store(self, made: Any) -> Any:
        """What forward returns, of what the graph gives; the rest goes where forward would have put it."""
        if not self.stored:
            return made
        result, values = made
        for (own, name), value in zip(self.stored, values, strict=True):
            own[name] = value
        return result


class State:
    """What an ORTModule knows besides its module."""

    def __init__(self, module: nn.Module, settings: Settings, base: type[nn.Module], own_forward: bool) -> None:
        """base: the wrapper's class, without the module's; own_forward: it has a forward of its own."""
        self.module = module
        self.settings = settings
        self.body = module  # whose forward runs: the module, seen with the methods that were assigned on the wrapper
        self.override: Callable[..., Any] | None = None  # forward assigned on the wrapper
        self.assigned: dict[str, Any] = {}  # other methods
        self.base = base
        self.own_forward = own_forward
        self.off: str | None = None  # why every call runs in PyTorch
        self.sites: dict[Hashable, Site] = {}
        self.entries: dict[tuple[Any, ...], list[Entry]] = {}
        self.changing: dict[tuple[Any, ...], Entry] = {}  # by what is alike in calls of which there are too many
        self.dynamic = self.symbolic = False  # calls have differed in sizes, in int/float arguments
        self.unread: dict[str, frozenset[str]] = {}  # attributes that are stored and not read, by module
        self._stored: set[tuple[str, str]] = set()
        self._read: set[tuple[str, str]] = set()
        self.guard = self.new_guard()
        self.eager_entries: dict[str, EagerEntry] = {}
        self.failed: dict[tuple[str, bool], FailedEntry] = {}  # captures
        self.every: list[GuardedGraph] = []
        self.capturing_s = 0.0  # what captures have taken, those that failed, too
        self.constants_s = 0.0  # what the longest one with constant sizes has taken that did not fail
        self.load_s: dict[int, float] = {}
        self.lock = forks.rlock()
        self.announced = False
        self.settled = False  # settle.py has been asked
        self.clusters: set[Plan] = set()  # memory.py: of memory_opt_config, that a capture has had
        self.reasons: dict[str, watch.Problem] = {}  # why modules are kept in PyTorch
        self.told: set[tuple[Any, ...]] = set()
        # bypassed.py
        self.entered = 0  # calls of forward
        self.children: dict[str, tuple[nn.Module, Any]] | None = None  # submodules and their wrappers
        self.children_away = False  # the wrappers stand in the table of children
        self.ways: dict[Hashable, Any] = {}
        # parts.py, spread.py
        self.spread: Any = None  # the spread.Spread of a module on several devices
        self.by_parts: Any = None  # the parts.Parts of calls that cannot be captured
        self.parts: dict[int, Any] = {}  # wrappers of parts, by id(module)
        self.new_part: Callable[[nn.Module], Any] | None = None
        self.inside = threading.local()  # how this thread's forward began, which PyTorch runs with its parts
        self.name = ""  # of a part
        self.part_of: State | None = None
        self.new_way: Callable[[State, str], Any] | None = None

    @property
    def root(self) -> State:
        """Of the module that this one is a part of."""
        return self if self.part_of is None else self.part_of.root

    def within(self, module: str) -> str:
        """A submodule by its name in the module that was wrapped."""
        return ".".join(name for name in (self.name, module) if name)

    def new_guard(self) -> guard.Guard:
        return guard.Guard(self.module, self.unread)

    def note(self, entry: Entry, reads: set[tuple[str, str]], stored: Collection[tuple[str, str]]) -> None:
        """A capture of the entry has read attributes and stores tensors in others. What is stored at every call and
        read by none makes no difference to any: it is not looked at. Sites are found anew: by other hashes, and for
        what the entry holds for now, which may be fewer states than when it had read less."""
        if entry.reads is None:
            entry.reads = guard.Reads(self.module, reads)
        else:
            entry.reads.add(self.module, reads)
        self._stored.update(stored)
        self._read.update(reads)
        every = {(where, name) for where, name in self._stored - self._read if (where, "__dict__") not in self._read}
        unread = {where: frozenset([name for at, name in every if at == where]) for where, _ in every}
        if unread != self.unread:
            self.unread, self.guard = unread, guard.Guard(self.module, unread)
        self.sites.clear()

    # --- look-up -----------------------------------------------------------------------------------

    def find_site(self, key: tuple[Any, ...], structure: Hashable, env: tuple[Any, ...], args: tuple[Any, ...],
                  kwargs: dict[str, Any]) -> Site:  # fmt: skip
        """Something changed (or this is the first call): what do we know about the state the module is in now?"""
        with self.lock:
            reason = guard.refuse(self.module, flatten_inputs(args, kwargs).tensors)
            if reason is not None:
                raise Refused(f"ORTModule cannot run {type(self.module).__name__}: {reason}.")
            for name, t in (*self.module.named_parameters(), *self.module.named_buffers()):
                if nn.parameter.is_lazy(t):
                    raise RuntimeError(f"{name} of a lazy module gets its size at the first call")
                if private.is_transformed(t):
                    raise RuntimeError(f"{name} is a tensor of torch.func's (vmap, jvp, grad), which has ended")
            own = self.guard = self.new_guard()
            fast, tree = own.fast(), own.structure()
            known = self.entries.get((tree, structure, env, key[3]), [])
            alike = (tree, structure_alone(structure), env, key[3])
            entry = next((e for e in known if e.holds(self.module)), None) or self.left_alike(tree, env)
            entry = entry or self.changing.get(alike) or self.changes(alike, structure)
            if entry is not None and entry is self.changing.get(alike):
                key = (key[0], *alike[1:])  # one site for all of them (ladder.call)
            if entry is None:
                entry = Entry()
                entry.dynamic, entry.symbolic = self.dynamic, self.symbolic
                entry.why = self.why(tree, key, known)
                changing = sorted({name for e in known for name in e.changed(self.module)})
                entry.places = guard.places(self.module)
                if entry.places and self.settings.memory_budget is not None:
                    raise Refused(
                        f"memory_budget cannot be kept for {type(self.module).__name__}: hooks on submodules "
                        f"({entry.places[0].name}) cut its graph into parts. Remove the hooks or the budget."
                    )
                entry.keep = {place.name for place in entry.places if place.whole}
                known = self.entries.setdefault((tree, structure, env, key[3]), known)
                known.append(entry)
                if len(known) > self.settings.max_captures:
                    what = ", ".join(changing[:3]) or "attributes of modules that forward reads"
                    entry.eager = self.eager_entry(
                        f"{len(known)} captures of one call structure were not enough: what forward reads changes "
                        f"from call to call ({what}); pass it as an argument"
                    )
                script = guard.in_torchscript(self.module)
                if script is not None:
                    reason = "it is TorchScript (torch.jit.script or torch.jit.trace), which cannot be captured; give "\
                             "ORTModule the module that it was made from"
                    error = CaptureError(reason, script)
                    if self.settings.asked_strict:
                        raise error
                    if not self.settings.allows(TORCH_MODEL):
                        raise wrap_exception(TORCH_MODEL.exception, error)
                    entry.eager, entry.by_parts = self.eager_entry(reason, script), True
                    logger.warning("%s runs in PyTorch: %s", type(self.module).__name__, error)
                elif self.settings.disable:
                    entry.eager = self.eager_entry("switched off by ORTMODULE_DISABLE")
                elif _holds_cache(args, kwargs):
                    entry.eager = self.eager_entry(
                        "an argument is a generation cache, which forward edits and which grows at every call (in "
                        "training, use_cache=False makes none)"
                    )
                    entry.by_parts = torch.is_grad_enabled()  # generation itself calls too often for too little
            site = Site(entry, fast, own)
            stale = [k for k, s in self.sites.items() if not s.tensors <= site.tensors]
            for k in stale[: max(0, len(stale) - _STALE_LIMIT)]:
                del self.sites[k]
            if len(self.sites) >= _SITE_LIMIT:
                self.sites.pop(next(iter(self.sites)))
            key = (fast, *key[1:])
            other = self.sites.get(key)
            while other is not None and other.entry is entry:
                other = other.other
            site.other = other
            self.sites[key] = site
            return site

    def changes(self, alike: tuple[Any, ...], structure: Any) -> Entry | None:
        """For calls that differ in words, arrays or objects among their arguments, once there are too many captures of
        them: what all further ones run as."""
        values = [k[1] for k in self.entries if (k[0], structure_alone(k[1]), *k[2:]) == alike and k[1] != structure]
        if len(values) < self.settings.max_captures:
            return None
        new, old = next((a, b) for a, b in zip(structure, values[-1], strict=True) if a != b)
        entry = self.changing[alike] = Entry()
        entry.eager = self.eager_entry(
            f"{len(values)} captures were not enough for calls that differ in an argument that is neither a tensor nor "
            f"a number ({_short(old)}, now {_short(new)}): leave out what forward does not read, and pass numbers as "
            "int, float or tensors"
        )
        entry.by_parts = True
        logger.warning("%s runs in PyTorch: %s", type(self.module).__name__, entry.eager.reason)
        return entry

    def left_alike(self, tree: Any, env: tuple[Any, ...]) -> Entry | None:
        """For a new kind of call, when forward could be captured for none of those before it (lists of targets, which
        are another structure at every step): the last of them."""
        alike = [e for key, of in self.entries.items() if key[0] == tree and key[2] == env for e in of]
        left = [e for e in alike if e.eager is not None and e.by_parts]
        many = len(left) >= _MANY_LEFT and not self.settings.strict and not any(e.graphs or e.again for e in alike)
        return left[-1] if many else None

    def why(self, structure: Any, key: tuple[Any, ...], known: list[Entry]) -> str:
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

    def bind(self, site: Site, captured: GuardedGraph) -> GuardedGraph:
        """Makes `captured` the one that `site` uses: looks up its parameters and buffers by name."""
        bound = [tensor_of(self.module, spec) for spec in captured.graph.bound]
        site.bound = bound
        site.reach = self.reach(captured)
        site.wanted_bound = tuple([t.requires_grad for t in bound])
        site.plain = [t for t in bound if not isinstance(t, nn.Parameter)]
        site.plain_grad = [t.requires_grad for t in site.plain]
        site.left = [self.module.get_submodule(where).__dict__ for where, _ in captured.graph.captured.left]
        site.stored = [(self.module.get_submodule(at).__dict__, name) for at, name in captured.graph.captured.stored]
        site.captured = captured
        return captured

    def reach(self, captured: GuardedGraph) -> list[Tensor]:
        """The module's tensors that may share memory with what the graph edits: those that it is given, and where
        PyTorch runs parts of forward all others, too."""
        found = [tensor_of(self.module, spec) for spec in captured.graph.bound] if captured.edited else []
        if captured.edited and isinstance(captured.graph, cuts.CutGraph):
            found += [*self.module.parameters(), *self.module.buffers()]
        return found

    def find_graph(self, site: Site, flat: FlatInputs, answers: branches.Answers = ()) -> GuardedGraph | str | None:
        """The capture of the site's entry that holds for these sizes and numbers, and for answers. Of those that
        differ in answers alone the one that was used last. A text: one would, but for what forward edits."""
        graphs, why = site.entry.graphs, None
        for found in graphs:
            if found.fits(flat, site.known) and branches.agree(found.answers, answers):
                strange = found.strange(flat.tensors, self.reach(found))
                if strange is None:
                    if answers:
                        site.entry.graphs = [found, *[g for g in graphs if g is not found]]
                    return self.bind(site, found)
                if strange.of_call:
                    why = strange.reason
        return why

    def every_site(self) -> Iterator[Site]:
        for found in [*self.sites.values()]:
            site: Site | None = found
            while site is not None:
                yield site
                site = site.other

    # --- what a call changes -----------------------------------------------------------------------

    def rebind(self, site: Site, captured: GuardedGraph) -> Site:
        """Gives the buffers to which forward assigns new tensors one each, for the graph to write into. What was there
        keeps its values."""
        with self.lock:
            for i in captured.graph.captured.rebinds:
                owner, _, name = captured.graph.captured.inputs[i].target.rpartition(".")
                buffers = self.module.get_submodule(owner)._buffers
                with torch.inference_mode(False):  # what other calls save for backward
                    buffers[name] = torch.clone(cast(Tensor, buffers[name]).detach())
            # what is new is among its `bound`
            return self.move(site, captured, Site(site.entry, self.guard.fast(), self.guard, site))

    def leave(
        self, site: Site, captured: GuardedGraph, flat: FlatInputs
    ) -> tuple[Site, list[tuple[dict[str, Any], str, Any]]]:
        """Attributes get what forward would leave in them. Also what was in those that had something else."""
        made, before = captured.graph.captured, []
        for own, (_, name), value in zip(site.left, made.left, made.leave(flat), strict=True):
            old = own.get(name, patches.ABSENT)
            if old is not value and (type(value) in _FLOATS or type(old) is not type(value) or old != value):
                before.append((own, name, old))
                own[name] = value
        if not before:
            return site, before
        with self.lock:  # no capture has read them
            own_guard = self.guard = self.new_guard()
            return self.move(site, captured, Site(site.entry, own_guard.fast(), own_guard)), before

    def unchanged(self, site: Site) -> bool:
        """Is all that its captures have read as it was, and are the tensors that they were given?"""
        captured = site.captured
        return (
            captured is not None
            and self.new_guard().structure() == site.structure
            and site.entry.holds(self.module)
            and all(tensor_of(self.module, s) is t for s, t in zip(captured.graph.bound, site.bound, strict=True))
        )

    def move(self, site: Site, captured: GuardedGraph, fresh: Site) -> Site:
        """`fresh` takes the place of `site`: the same captures, for the module as it is now. The sites beside it hold
        the tensors of before: they are found anew."""
        fresh.fill = site.fill
        self.bind(fresh, captured)
        key: Any = next((k for k, s in self.sites.items() if s is site), None)
        if key is not None:
            del self.sites[key]
            self.sites[(fresh.fast, *key[1:])] = fresh
        return fresh

    def follow(self, site: Site) -> str | None:
        """Hooks have changed the module in a call. When it is nothing that the call has read, the next one finds the
        same site; else what that was."""
        with self.lock:
            own = self.new_guard()
            reads, captured = site.entry.reads, site.captured
            if reads is None or captured is None or own.structure() != site.structure:
                return None
            if not reads.hold(self.module):
                return f"hooks on submodules change {', '.join(reads.changed(self.module))}, which forward reads"
            moved = [
                spec.name
                for spec, t in zip(captured.graph.bound, site.bound, strict=True)
                if tensor_of(self.module, spec) is not t
            ]
            if moved:
                return f"hooks on submodules put other tensors in the place of {', '.join(moved)}"
            self.guard = own
            self.move(site, captured, Site(site.entry, own.fast(), own))
            return None

    def assign(self, methods: dict[str, Any]) -> None:
        """These methods stand on the wrapper in place of the class's."""
        with self.lock:
            self.assigned = methods
            cls = type(self.module)
            self.body = self.module
            if methods:
                given = {k: staticmethod(v) if callable(v) else v for k, v in methods.items()}
                self.body = object.__new__(_below(cls, given))
                object.__setattr__(self.body, "__dict__", self.module.__dict__)
            self.sites, self.entries, self.changing = {}, {}, {}  # captured with other methods

    def has_failed(self, error: CaptureError, symbolic: bool, seconds: float) -> None:
        """An attempt to capture that took so long for nothing."""
        key = error.reason, symbolic
        entry = self.failed.setdefault(
            key, FailedEntry(error.reason, error.module, error.file, error.line, symbolic)
        )
        entry.count += 1
        entry.seconds += seconds
        logger.info("%s: no capture%s, after %.2f s: %s", type(self.module).__name__,
                    " with symbolic sizes" * symbolic, seconds, error)  # fmt: skip

    def way(self, key: Hashable, name: str) -> Any:
        """The bypassed.Way of a function that may go around forward."""
        found = self.ways.get(key)
        if found is None:
            assert self.new_way is not None
            found = self.ways[key] = self.new_way(self, name)
        return found

    def eager_entry(self, reason: str, module: str = "", file: str = "", line: int = 0) -> EagerEntry:
        entry = self.eager_entries.get(reason)
        if entry is None:
            entry = self.eager_entries[reason] = EagerEntry(reason, module, file, line)
        return entry


def _called(own: Callable[..., Any]) -> Callable[..., Any]:
    """A shadow's __call__: forward; its class's own where forward calls the module again."""
    inside = threading.local()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "forward", False):
            return own(self, *args, **kwargs)
        inside.forward = True
        try:
            return nn.Module.__call__(self, *args, **kwargs)
        finally:
            inside.forward = False

    return call


def shadow_of(module: nn.Module) -> nn.Module:
    """The module without its own hooks (they run around the engine, in __call__): same class, same children,
    parameters, attributes."""
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__:  # what it does runs around the engine, too
        cls = _below(cls, {"__call__": _called(cls.__call__)})
    shadow: nn.Module = object.__new__(cls)
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__.update({name: OrderedDict() for name in HOOK_TABLES})
    shadow.__dict__.pop(CALL, None)
    return shadow


@contextlib.contextmanager
def unwrapped(root: nn.Module) -> Iterator[None]:
    """While root is captured, wrappers inside it give place to what they wrap: they are part of its graph."""
    rows: list[Patch] = []
    for m in list(root.modules()):
        if m.__dict__.get(CALL) is not None:
            rows.append(Patch(m.__dict__, CALL, None))
        for name, child in m._modules.items():
            state = getattr(child, "_ortmodule", None)
            if isinstance(state, State) and state.override is None and not state.own_forward:
                rows.append(Patch(m._modules, name, state.body))
    with patches.scope() as scope, patches.replaced(*rows):
        scope.found(root)
        yield


def n_modules(root: nn.Module, name: str) -> int:
    """As how many nodes a submodule counts that is kept in PyTorch: as the modules that it is made of."""
    try:
        return sum(1 for _ in root.get_submodule(name).modules())
    except AttributeError:  # it is not there any more
        return 1


def tensor_of(module: nn.Module, spec: InputSpec) -> Tensor:
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


def _tensors_in(refs: list[tuple[Any, ...]]) -> frozenset[int]:
    """Their ids."""
    return frozenset([id(v) for held in refs for v in held if isinstance(v, Tensor)])


def _holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A Hugging Face Cache among the arguments."""
    return any(
        c.__name__ == "Cache" and c.__module__.startswith("transformers")
        for v in (*args, *kwargs.values())
        for c in type(v).__mro__
    )
