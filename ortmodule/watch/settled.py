"""What the traced run has changed in values that outlive the call is put back, and told; what is there then is compared
at every step."""

from __future__ import annotations

import array
import collections
import collections.abc
import gc
import sys
import types
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import contents
from .. import torch_private as private
from ..contents import PLAIN, Met, flat
from ..libraries import is_library
from ..patches import ABSENT
from . import outside
from .table import ATTRIBUTE, CALL, DICT, FUNCTIONS, ITEM, LIST, MAPPED, NO_ITEM, SEQUENCE, UNMAPPED, Problem
from .values import Values

_NAMED = (ITEM, NO_ITEM, ATTRIBUTE, MAPPED, UNMAPPED)  # rows of one name in a holder


def _caches_tensors(cache: Any) -> bool:
    """Does a functools.lru_cache hold tensors? Its results lie in a dictionary, by themselves or in links."""
    held = _kept_by(cache)
    return any(map(contents.holds_tensor, [*held, *gc.get_referents(*held)]))


def _kept_by(cache: Any) -> list[Any]:
    return [v for d in gc.get_referents(cache) if type(d) is dict for v in d.values()]


def _keeps(cache: Any, before: list[Any]) -> bool:
    now = {*map(id, _kept_by(cache))}
    return all(id(x) in now for x in before)


class Settled(Values):
    """Compares what was met with what it was."""

    _numpy_state: Any  # of numpy's own generator, before

    def __init__(self, module: nn.Module, known_as: nn.Module | None = None) -> None:
        super().__init__(module, known_as)
        self.assigns: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.fills = False  # the code has filled a cache of functools, which a second call reads
        self._assigned: set[Any] = set()
        self._numpy: set[Any] = set()
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any, str, Any]] = {}
        # attributes of modules of Python and of classes that code may assign
        self._put_on: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        # (holder, name) that what is kept in PyTorch changes: what it is
        self._by_kept: dict[tuple[int, str], str] = {}

    def settle(self) -> None:
        """The traced forward has returned: what it changed is noted and put back."""
        for met in self._met.values():
            if not contents.unchanged(met.value, met.copy):
                plain = self._plain_changes(met)
                more = contents.entries_more(met.value, met.copy)
                left = contents.added(met.value, met.copy)
                if self.quiet and id(met.value) in self._own_dicts:
                    self._note_kept(met.value, contents.changed_keys(met.value, met.copy), f"{met.name}.")
                contents.put_back(met.value, met.copy)
                if more is not None and not more:
                    continue
                if plain:
                    self.assigns.append((met.value, plain))
                    self._assigned.update(met.tokens)
                    continue
                self._changed(met.tokens, f"changes {met.name}", left, fills=more is not None)
        for v, old, name, tokens in self._arrays.values():
            if v.tobytes() != old.tobytes():
                v[...] = old
                self._changed(tokens, f"changes {name}")
        for v, old, name, tokens in self._bytes.values():
            if bytes(v) != old:
                v[:] = old if isinstance(v, bytearray) else array.array(v.typecode, old)
                self._changed(tokens, f"changes {name}")
        for v, state, name, tokens in self._generators.values():
            if outside.generator_state(v) != state:
                outside.set_generator_state(v, state)
                self._changed(tokens, f"draws random numbers of {name}")
        for t, version, old in self._tensors.values():
            if not torch.equal(t, old) if version is None else t._version != version:
                with private.without_modes():
                    contents.put_tensor_back(t, old, version)
        for space, name, old, at, token in self._globals.values():
            left = space.get(name, ABSENT)
            if left is not old:
                if old is ABSENT:
                    del space[name]
                else:
                    space[name] = old
                self._note_kept(space, [name], "global ")
                self._changed({token}, f"assigns global {name} ({at})", left)
        for holder, name, old, token in self._put_on.values():
            left = vars(holder).get(name, ABSENT)
            if left is not old:
                put: Any = type if isinstance(holder, type) else types.ModuleType
                if old is ABSENT:
                    put.__delattr__(holder, name)
                else:
                    put.__setattr__(holder, name, old)
                self._note_kept(vars(holder), [name], f"{holder.__name__}.")
                self._changed({token}, f"assigns {holder.__name__}.{name}", left)
        for f, was, token in self._defaults.values():
            now = f.__code__, f.__defaults__, f.__kwdefaults__
            if any(a is not b for a, b in zip(now, was, strict=True)):
                f.__code__, f.__defaults__, f.__kwdefaults__ = was
                self._changed({token}, f"changes {f.__qualname__}")
        for var, value, token in self._context.values():
            left = var.get(ABSENT)
            if left is not value:
                var.set(value)
                self._changed({token}, f"sets {var.name}, a ContextVar", left)
        names = self._attribute_names[False] | self._attribute_names[True]
        for cls, (token, old, name) in self._classes.items():
            own = vars(cls)
            for k in [k for k in {**old, **own} if k in names and k != "__getattribute__"]:
                left, was = own.get(k, ABSENT), old.get(k, ABSENT)
                if left is was:
                    continue
                if was is ABSENT:
                    type.__delattr__(cls, k)
                else:
                    type.__setattr__(cls, k, was)
                self._note_kept(self._space(cls), [k], f"{name}.")
                self._changed({token}, f"assigns {name}.{k}", left)
        for obj, name, old, what, token in self._slots.values():
            left = getattr(obj, name, ABSENT)
            if left is not old:
                object.__setattr__(obj, name, old)
                self._note_kept(obj, [name], f"{type(obj).__qualname__}.")
                self._changed({token}, f"changes {what}", left)
        for cache, before in self._caches.values():
            if cache.cache_info().misses != before.misses:
                self.fills = self.fills or not self.quiet and _caches_tensors(cache)
                cache.cache_clear()
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy_state is not None and outside.numpy_state(numpy) != self._numpy_state:
            numpy.random.mtrand._rand._bit_generator.state = outside.from_hashable(self._numpy_state)
            self._changed(self._numpy or {""}, "draws random numbers of numpy.random")

    def _note_kept(self, holder: Any, names: Iterable[str], what: str) -> None:
        if self.quiet:
            self._by_kept.update({(id(holder), name): f"{what}{name}" for name in names})

    def _read_around_kept(self) -> None:
        """What the graph's own code reads is not changed by what the graph calls: it would be read as it was before the
        step."""
        for row, _ in [*self.rows.values()]:
            what = self._by_kept.get((id(row[1]), row[2])) if row[0] in _NAMED else None
            if what is not None:
                readers = [key for key, code in self._ran.items() if self._ran_in[key] and row[2] in code.co_names]
                for token in readers or ("",):
                    self._problem(token, f"reads {what}, which a module kept in PyTorch changes")

    def _plain_changes(self, met: Met) -> dict[str, Any]:
        """Attributes of an object that were assigned numbers or strings (transformers' config.problem_type), when
        nothing else was."""
        if self.quiet or id(met.value) not in self._own_dicts:
            return {}
        old = dict(zip(met.copy[::2], met.copy[1::2], strict=True))
        new = {k: v for k, v in met.value.items() if old.get(k, ABSENT) is not v}
        ok = (
            all(type(v) in PLAIN and (k not in old or type(old[k]) in PLAIN) for k, v in new.items())
            and old.keys() <= met.value.keys()
        )
        return new if ok else {}

    def assigned(self) -> list[Problem]:
        """`assigns` as problems."""
        before, self.problems = self.problems, []
        self._changed(
            self._assigned, f"assigns {', '.join(sorted({k for _, new in self.assigns for k in new}))} of an object"
        )
        found, self.problems = self.problems, before
        return found

    def _changed(self, tokens: set[Any], reason: str, left: Any = None, fills: bool = False) -> None:
        """left: what code of these has left there, where it may hold tensors."""
        escapes = contents.holds_tensor(left)
        for token in tokens:
            self._problem(token, reason, fills)
            if escapes:
                self.escaped |= self._places_of(token) | self._ran_quietly.get(token, set())

    def _finish(self) -> None:
        """Rows for the contents of containers, as they are after everything was put back."""
        self._read_around_kept()
        self._functions_hold()
        names = self._attribute_names[False]
        for log in self._loggers.values():
            for name in names & {"level", "disabled", "propagate"}:
                self._row((ITEM, vars(log), name, vars(log)[name]), f"{name} of {log}")
        for lock, name in self._locks.values() if "locked" in names else ():
            self._row((CALL, None, lock.locked, lock.locked()), name)
        for own, name in self._belong:
            if own and names & {*own, "getattr", "hasattr"}:
                self._row((DICT, own, None, flat(own)), f"attributes of {name}")
        looks = {"hasattr", "getattr", "vars", "__dict__"} & self._attribute_names[False]
        for t, _, _ in self._tensors.values():
            if vars(t) or looks:
                self._row((DICT, vars(t), None, flat(vars(t))), "attributes of a tensor")
        for which, name in self._contents.items():
            met = self._met[which]
            v, old = met.value, met.copy
            if isinstance(v, collections.OrderedDict):  # its own order
                pairs = tuple(zip(old[::2], old[1::2], strict=True))
                self._row((SEQUENCE, collections.OrderedDict.items(v), None, pairs), name)
            elif isinstance(v, dict):
                self._row((DICT, v, None, tuple(old)), name)
            elif isinstance(v, list):
                self._row((LIST, v, None, tuple(old)), name)
            elif not isinstance(v, (tuple, frozenset)):  # of a set the order, too, in which it gives what it has
                self._row((SEQUENCE, v, None, tuple(old)), name)
        for cache, before in self._caches.values():
            if before.currsize and _caches_tensors(cache):  # which are constants of the graph
                of = getattr(cache.__wrapped__, "__qualname__", "functools.lru_cache")
                self._row((CALL, None, partial(_keeps, cache, _kept_by(cache)), True), f"the cache of {of}")
        for key, (row, name) in self.rows.items():  # as they were before: the first read may have come after a change
            pair = (MAPPED, UNMAPPED) if row[0] in (MAPPED, UNMAPPED) else (ITEM, NO_ITEM)
            if row[0] in pair:
                now = row[1].get(row[2], ABSENT)
                self.rows[key] = ((pair[1], *row[1:3], None) if now is ABSENT else (pair[0], *row[1:3], now)), name

    def _functions_hold(self) -> None:
        """Functions of the user's keep their code and their defaults."""
        met = []
        for functions in self._functions.values():
            for f in functions:
                if is_library(f.__code__.co_filename):
                    continue
                met.append(f)
                if f.__kwdefaults__:
                    self._row((DICT, f.__kwdefaults__, None, flat(f.__kwdefaults__)), f"defaults of {f.__qualname__}")
        if met:
            kept = tuple(x for f in met for x in (f.__code__, f.__defaults__, f.__kwdefaults__))
            self._row((FUNCTIONS, tuple(met), None, kept), f"code or defaults of functions ({met[0].__qualname__} ...)")
