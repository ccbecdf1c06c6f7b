"""Attributes of the tree's modules: which are read, which are assigned, and what forward leaves in them."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import contents, libraries
from ..contents import PLAIN, lasts
from ..patches import ABSENT
from ..torch_private import HOOK_TABLES
from .settled import Settled
from .table import CALL
from .values import BYTES

_FEW = 64  # numbers of a tensor of which code may have asked for some by name
_TABLES = ("_parameters", "_buffers", *HOOK_TABLES)  # of a module, in which the export puts its own
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules", "__dict__", "__class__"))
_OF_MODULES = frozenset(nn.Module().__dict__) | _REGISTRIES | {"forward"}


class _Shown(dict[str, Any]):
    """A table as it was, for another thread that may walk it while the export changes it; what is put there is put into
    the table."""

    def __init__(self, was: dict[str, Any], table: dict[str, Any]) -> None:
        super().__init__(was)
        self._table = table

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._table[name]


def _tensors(value: Any) -> bool:
    """A tensor, or a tuple of nothing else, that is no parameter: what a call can be given from what its graph
    returns."""
    if type(value) is tuple:
        return bool(value) and all(map(_tensors, value))
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


class Modules(Settled):
    """Reads and writes by (where in the tree, name); `quiet` ones are those of code that is kept in PyTorch."""

    _put: Callable[[Any, str, Any], None]  # nn.Module's own __setattr__

    def __init__(self, module: nn.Module, known_as: nn.Module | None = None) -> None:
        super().__init__(module, known_as)
        self._attributes = {name: dict(m.__dict__) for name, m in module.named_modules()}
        self.reads: set[tuple[str, str]] = set()
        self.writes: set[tuple[str, str]] = set()
        self.quiet_writes: set[tuple[str, str]] = set()
        self.kept_changes: set[tuple[str, str, str]] = set()  # tensors that modules kept in PyTorch (first) write
        # attributes that forward assigned before it had read them; those that it leaves as numbers, words or sizes that
        # a call can be given without forward, and those that it leaves as they were
        self._blind: set[tuple[str, str]] = set()
        self._looked_into: set[str] = set()  # modules whose __dict__ the user's code has asked for
        self.called: set[str] = set()  # modules kept in PyTorch that the trace has come to
        self.caller: str | None = None  # the module that calls what the graph will call, while that runs
        self.called_reads: set[tuple[str, str, str]] = set()  # what that reads, behind its caller
        self.modes: set[str] = set()  # modules that forward switches between train and eval
        self.kept = 0  # a run of all in PyTorch is in modules that will be kept there
        self._kept_reads: set[tuple[str, str]] = set()  # by what the graph will call
        self._kept_writes: set[tuple[str, str]] = set()
        self._past: set[tuple[str, str]] = set()  # assigned to the module that `_outside` belongs to
        self.left: dict[tuple[str, str], Any] = {}
        self.stored: dict[tuple[str, str], Any] = {}  # tensors, which the graph can return behind the results
        self.stores = False  # it can: it is whole
        self.restored: set[tuple[str, str]] = set()
        self.keeps = False  # it leaves something of the call in others
        self._quiet_reads: set[tuple[str, str]] = set()  # looked at for what is to be put back
        self._dicts = [(name, m.__dict__) for name, m in module.named_modules()]
        self._outside: dict[str, Any] = known_as.__dict__ if known_as is not None else {}  # no export puts it back
        self._dicts += [("", self._outside)] * bool(self._outside)
        # what those, and their tables, held when the code that runs now began; what those held when forward began
        self._before: list[tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = []
        self._start: list[dict[str, Any]] = []
        self._by_torch: set[tuple[str, str]] = set()  # attributes that PyTorch's own code has assigned
        self._for_others = {id(own): {k: copy.copy(own[k]) for k in _TABLES if k in own} for _, own in self._dicts}

    def _module_getattribute(self) -> Callable[[Any, str], Any]:
        names, reads, me, ident = self._names, self.reads, self._thread, threading.get_ident
        get = object.__getattribute__

        def getattribute(obj: Any, name: str) -> Any:
            try:
                value = get(obj, name)
            except AttributeError:
                value = ABSENT
            own = get(obj, "__dict__")
            where = names.get(id(own))
            if ident() != me:
                value = self._elsewhere(own, name, value) if where is not None else value
            elif where is not None:
                if self.caller is not None:
                    self.called_reads.add((self.caller, where, name))
                if self.quiet and self._in_kept():
                    self._kept_reads.add((where, name))
                if name == "__dict__" and self._active:
                    asks = sys._getframe(1).f_code  # dir() asks by way of PyTorch
                    if not libraries.of_torch(asks.co_filename) or asks.co_name == "__dir__":
                        self._looks_into(where, own)
                elif (
                    self._active
                    and (where, name) not in (self._quiet_reads if self.quiet else reads)
                    and name not in _REGISTRIES
                ):
                    (self._quiet_reads if self.quiet else reads).add((where, name))
                    self._module_read(where, own, name, value)
            elif self._active and id(own) in self._dict_owner:
                self._object_read(obj, name, value)
            if value is ABSENT:
                return get(obj, name)
            return value

        return getattribute

    def _elsewhere(self, own: dict[str, Any], name: str, value: Any) -> Any:
        """What an attribute is to other threads: parameters, buffers and hooks are what they were before the export
        has put its own there."""
        before = self._for_others[id(own)]
        if value is ABSENT:
            return next((before[k][name] for k in ("_parameters", "_buffers") if name in before[k]), ABSENT)
        if name == "__dict__":
            return {k: self._elsewhere(own, k, v) for k, v in value.copy().items()}
        if name in ("_parameters", "_buffers"):
            return _Shown(before[name], value)
        if name in before:
            now, was = value.copy(), before[name]
            return value if now.keys() == was.keys() and all(now[k] is v for k, v in was.items()) else was
        return value

    def _module_setattr(self) -> Callable[[Any, str, Any], None]:
        names, me, ident, put, get = self._names, self._thread, threading.get_ident, self._put, object.__getattribute__

        def setattribute(obj: Any, name: str, value: Any) -> None:
            own = get(obj, "__dict__")
            where = names.get(id(own))
            if where is not None and ident() == me and name in obj._buffers:
                if isinstance(value, Tensor) and value.requires_grad:
                    self.escaped.add(where)
            elif where is not None and ident() == me:
                if own is self._outside:
                    self._past.add((where, name))
                elif self._in_kept():
                    self._kept_writes.add((where, name))
                elif not self.quiet and (where, name) not in self.reads:
                    self._blind.add((where, name))
                if type(value) in PLAIN and own.get(name, ABSENT) is value:
                    if not self.quiet:
                        self.reads.add((where, name))  # as long as it is that, nothing is assigned
                elif isinstance(value, nn.Module) and obj._modules.get(name) is value:
                    pass  # the submodule that is there: the guard knows the tree
                elif not libraries.of_torch(sys._getframe(1).f_code.co_filename):
                    (self.quiet_writes if self.quiet else self.writes).add((where, name))
                elif name != "training":  # by train() and eval(), for whoever calls them
                    self._by_torch.add((where, name))
                elif not self.quiet:
                    self.modes.add(where)
                if contents.holds_tensor(value):
                    self.escaped.add(where)
            put(obj, name, value)

        return setattribute

    def _note_assigned(self) -> None:
        """Attributes of modules that are not what they were, by whatever way (vars(self), object.__setattr__, delattr,
        train())."""
        for (where, own), (old, tables) in zip(self._dicts, self._before, strict=True) if self._before else ():
            for table, was in tables.items():
                if own.get(table) is old[table] and contents.entries(table, own[table]) != was:
                    (self.quiet_writes if self.quiet else self.writes).add((where, table))
            if own.keys() == old.keys() and all(own[k] is v for k, v in old.items()):
                continue
            for k in {**old, **own}:
                if k in HOOK_TABLES:  # others stand in their place while a capture runs (marks.py)
                    continue
                if own.get(k, ABSENT) is old.get(k, ABSENT) or (where, k) in self._by_torch:
                    continue
                if isinstance(getattr(self._classes_of[where], k, None), functools.cached_property):
                    self.fills = self.fills or not self.quiet and k in own
                else:
                    (self.quiet_writes if self.quiet else self.writes).add((where, k))
                    if self._in_kept():
                        self._kept_writes.add((where, k))
            if own is self._outside:
                own.clear()
                own.update(old)
        self._before = [contents.snapshot(own) for _, own in self._dicts]

    def _note_left(self) -> None:
        """What forward, which has returned, leaves in the attributes that it has assigned."""
        self.left, self.stored, self.restored, self.keeps = {}, {}, set(), False
        of = {where: (own, old) for (where, own), old in reversed([*zip(self._dicts, self._start, strict=True)])}
        blind = set() if self._past_names() else self._blind
        called = {(where, name) for _, where, name in self.called_reads}
        for key in (self.writes | blind) - self._kept_reads - self._kept_writes - self._past:
            where, name = key
            own, old = of[where]
            now, was = own.get(name, ABSENT), old.get(name, ABSENT)
            if name in _OF_MODULES:
                continue
            unseen = key in blind and where not in self._looked_into
            if unseen and lasts(now):
                self.left[key] = now
            elif unseen and self.stores and key not in called and _tensors(now):
                self.stored[key] = now
            elif now is was or lasts(now) and type(now) is type(was) and repr(now) == repr(was):
                self.restored.add(key)
                self.reads.add(key)
            elif not isinstance(now, nn.Module) and not lasts(now):
                self.keeps = True

    def take_stored(self) -> dict[tuple[str, str], Any]:
        """`stored`, of which none is kept here: they are of the trace."""
        stored, self.stored = self.stored, {}
        return stored

    def _looks_into(self, where: str, own: dict[str, Any]) -> None:
        """The user's code has got the dictionary of a module, or a way past what looks on: it can read all that is
        there, and what is not."""
        self._looked_into.add(where)
        reads = self._quiet_reads if self.quiet else self.reads
        reads.add((where, "__dict__"))
        for name in [n for n in own if n not in _OF_MODULES and (where, n) not in reads]:
            reads.add((where, name))
            self._module_read(where, own, name, own[name])

    def _in_kept(self) -> bool:
        """Does code run that the graph will call?"""
        return bool(self.quiet and (self.kept or self._active > 1))

    def _past_names(self) -> bool:
        """Has forward read attributes of modules by a way that nothing here sees?"""
        return any({"object", "__getattribute__"} <= set(code.co_names) for code in self._ran.values())

    def _module_read(self, where: str, own: dict[str, Any], name: str, value: Any) -> None:
        """The first read of an attribute of a module of the tree; the entry of its __dict__ itself is guard.Reads'
        business."""
        if name in own:
            fresh = self._attributes[where].get(name, ABSENT) is not value
            if name not in _OF_MODULES and type(value) not in PLAIN and not isinstance(value, Tensor) and not fresh:
                self._discover(value, where, f"self.{name}{f' of {where}' * bool(where)}")
        elif not self.quiet and not any(name in own[registry] for registry in ("_parameters", "_buffers", "_modules")):
            self._class_read(self._classes_of[where], name, where)

    def note_numbers(self, module: nn.Module, inputs: dict[int | str, bool]) -> None:
        """Rows for the numbers in tensors that are no parameters and buffers. inputs: by id, and by name in the tree,
        of those that are inputs of the graph, which computes with what is in them, whether it also writes them; of
        others forward can only have asked for numbers, and so it may have of small ones."""
        registered = {id(t) for t in (*module.parameters(), *module.buffers())}
        asks = {"item", "tolist", "numpy"} & self._attribute_names[False]
        found: dict[int, tuple[Tensor, str]] = {
            id(t): (t, "") for t, _, _ in self._tensors.values() if id(t) in self._seen
        }
        for where, name in self.reads:
            t = vars(module.get_submodule(where)).get(name)
            if type(t) is Tensor and t.layout is torch.strided and t.device.type != "meta":
                found[id(t)] = t, f"{where}.{name}".lstrip(".")
        for t, name in found.values():
            written = inputs.get(id(t), inputs.get(name))  # None: no input
            asked = written is None or not written and bool(asks) and t.numel() <= _FEW
            if 0 < t.nbytes <= BYTES and id(t) not in registered and asked:
                numbers = contents.Numbers(t)
                self._row((CALL, None, numbers, numbers()), "numbers in a tensor")
