"""What the user's Python code reads while a capture runs, what it changes, and what cannot be told.

A captured graph holds for the Python state that its code has read. `Watch` is entered around a capture and notes, of
this thread alone:
  which code ran     every function of a file that is neither torch's, numpy's nor the standard library's (a profile
                     function in C);
                     its bytecode names the globals and closure variables it can read, and the attributes of modules and
                     classes
  attributes read    `__getattribute__` of nn.Module, and of the class of every object that is met, is replaced while
                     the capture runs
  what is in there   lists, dictionaries, sets, arrays and objects behind a value that was read are looked into

It leaves
  rows      a table for _C.guard_check: asked at every step, some 0.1 us a row (Held)
  problems  modules that must stay in PyTorch, because they draw random numbers that are not torch's, ask for the time,
            read what
            cannot be compared, or change something that outlives the call; ('' = the whole module). What could not
            be put back (a file, a signal to another thread) ends the trace before it is done, and leaves the whole
            module
  says      files and lines that print or log: that happens at the capture only

An object counts when it is met from a module, a global, a closure variable or the inside of one that was met before:
what forward makes itself is no state. Whatever the traced run has changed in such objects is put back, so no tensor of
the trace stays anywhere. Code inside a submodule that is kept in PyTorch (`quiet`) runs at every step anyway: there,
changes are put back and nothing is noted.

Invariant: a Watch is a scope (patches.py): one at a time among all threads, and what was replaced is restored at exit.
"""

from __future__ import annotations

import array
import builtins
import collections
import collections.abc
import contextlib
import contextvars
import decimal
import enum
import functools
import gc
import io
import logging
import operator
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _C, bytecode, contents, frames, libraries, outside, patches
from . import torch_private as private
from .bytecode import UNKNOWN
from .contents import PLAIN, Met, flat, lasts
from .errors import CaptureError
from .frames import OWN_DIR
from .libraries import is_library, user_class
from .outside import decimal_context
from .torch_private import HOOK_TABLES

# kinds of rows, see csrc/python/guard.c
ITEM, NO_ITEM, ATTRIBUTE, MAPPED, UNMAPPED, LIST, DICT, SEQUENCE, SET, MEMORY, CALL, FUNCTIONS = range(12)

_MANY = 20_000  # elements of a container that are compared at every step
_BYTES = 1 << 20  # of an array or tensor
_CHECKPOINTS = frozenset(("checkpoint", "checkpoint_sequential", "_gradient_checkpointing_func"))
_FEW = 64  # numbers of a tensor of which code may have asked for some by name
# classes in one container: with more it is a registry, and what stands on the classes themselves is not followed
_REGISTRY = 8
_ABSENT = patches.ABSENT
_LOCK = type(threading.Lock())
_ATOMS = PLAIN | {
    type(...),
    type(NotImplemented),
    range,
    slice,
    object,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    types.CodeType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
}
_VIEWS = frozenset((types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())))
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules", "__dict__", "__class__"))
_OF_MODULES = frozenset(nn.Module().__dict__) | _REGISTRIES | {"forward"}


class Problem(NamedTuple):
    """Why a module must stay in PyTorch. fills: a dictionary has got entries and lost none, so a second call may find
    all that it looks for."""

    module: str
    reason: str
    file: str
    line: int
    fills: bool = False


class Held:
    """The Python state that captures hold for: rows for _C.guard_check and what to call them."""

    def __init__(self) -> None:
        self.table: tuple[Any, ...] = ()
        self.names: list[str] = []
        self._known: set[tuple[Any, ...]] = set()

    def add(self, rows: dict[tuple[Any, ...], tuple[tuple[Any, ...], str]]) -> None:
        """The rows of one more capture."""
        new = [(row, name) for key, (row, name) in rows.items() if key not in self._known]
        self._known.update(rows)
        self.names += [name for _, name in new]
        self.table += tuple(x for row, _ in new for x in row)

    def hold(self) -> bool:
        return _C.guard_check(self.table) < 0

    def changed(self) -> list[str]:
        """Names of what is no longer as it was."""
        return list(
            dict.fromkeys(
                name for i, name in enumerate(self.names) if _C.guard_check(self.table[4 * i : 4 * i + 4]) >= 0
            )
        )


# --- code ------------------------------------------------------------------------------------------


# --- what was met ----------------------------------------------------------------------------------


class Watch:
    """See the file's head. Modules are known by their __dict__: the tracer puts other objects over the same __dict__ in
    their place."""

    def __init__(self, module: nn.Module, known_as: nn.Module | None = None) -> None:
        """known_as: the module that the user's code may reach by a global or closure variable, when `module` stands for
        it. It shares its tables of parameters and buffers, in which the export puts tensors of the trace: no state to
        be noted or put back."""
        self._root = module
        self._names = frames.names_of(module)
        if known_as is not None:
            self._names.setdefault(id(known_as.__dict__), "")
        # the export's to change and to restore
        self._tables = {id(d) for m in module.modules() for d in (m._parameters, m._buffers, m._modules)}
        self._classes_of = {name: type(m) for name, m in module.named_modules()}
        self._attributes = {name: dict(m.__dict__) for name, m in module.named_modules()}
        self._keep: list[Any] = [m.__dict__ for m in module.modules()]
        self.reads: set[tuple[str, str]] = set()
        self.writes: set[tuple[str, str]] = set()
        self.quiet_writes: set[tuple[str, str]] = set()
        self.escaped: set[str] = set()  # modules whose code leaves a tensor where others find it when it has returned
        # modules kept in PyTorch that may checkpoint: reentrant checkpoints give gradients to a whole backward alone
        self.checkpointed: set[str] = set()
        # attributes that forward assigned before it had read them; those that it leaves as numbers, words or sizes that
        # a call can be given without forward, and those that it leaves as they were
        self._blind: set[tuple[str, str]] = set()
        self._looked_into: set[str] = set()  # modules whose __dict__ the user's code has asked for
        self.kept = 0  # a run of all in PyTorch is in modules that will be kept there
        self._kept_reads: set[tuple[str, str]] = set()  # by what the graph will call
        self._kept_writes: set[tuple[str, str]] = set()
        self._past: set[tuple[str, str]] = set()  # assigned to the module that `_outside` belongs to
        self.left: dict[tuple[str, str], Any] = {}
        self.restored: set[tuple[str, str]] = set()
        self.keeps = False  # it leaves something of the call in others
        self._quiet_reads: set[tuple[str, str]] = set()  # looked at for what is to be put back
        self.problems: list[Problem] = []
        self.says: dict[tuple[str, int], str] = {}
        self.rows: dict[tuple[Any, ...], tuple[tuple[Any, ...], str]] = {}
        self.assigns: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._assigned: set[Any] = set()
        self._own_dicts: set[int] = set()
        self.quiet = 0
        self._active = 0
        self._thread = threading.get_ident()
        self._met: dict[int, Met] = {}  # containers, and dictionaries of objects
        self._objects: dict[int, Any] = {}  # objects whose attributes are watched
        self._object_reads: set[tuple[int, str]] = set()
        self._no_methods: dict[int, types.CodeType] = {}  # code that is no method of a module, by id
        self._spaces: dict[type, Any] = {}
        self._dict_owner: dict[int, str] = {}  # of modules outside of the tree
        self._dicts = [(name, m.__dict__) for name, m in module.named_modules()]
        self._outside: dict[str, Any] = known_as.__dict__ if known_as is not None else {}  # no export puts it back
        self._dicts += [("", self._outside)] * bool(self._outside)
        # what those, and their tables, held when the code that runs now began; what those held when forward began
        self._before: list[tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = []
        self._start: list[dict[str, Any]] = []
        self._by_torch: set[tuple[str, str]] = set()  # attributes that PyTorch's own code has assigned
        self._contents: dict[int, str] = {}  # met containers whose contents count
        self._patched: dict[type, Any] = {}  # -> its own __getattribute__ from before
        self._classes: dict[type, tuple[Any, Any, str]] = {}  # -> token, dictionary before, name
        # of code that ran, in the graph and (quiet) in what is kept in PyTorch; classes whose attributes of these names
        # are compared
        self._attribute_names: tuple[set[str], set[str]] = set(), set()
        self._watched: set[tuple[type, bool]] = set()
        self._ran_quietly: dict[int, set[str]] = {}  # by code: modules kept in PyTorch in which it has run
        self._functions: dict[int, list[types.FunctionType]] = {}
        self._closures: dict[tuple[int, tuple[int, ...]], tuple[types.CodeType, dict[str, Any]]] = {}
        self._inner: set[int] = set()  # ids of code objects that executed code makes functions of
        self._ran: dict[int, types.CodeType] = {}
        self._ran_in: dict[int, set[str]] = {}
        self._generators: dict[int, tuple[Any, Any, str, set[Any]]] = {}
        self._arrays: dict[int, tuple[Any, Any, str, set[Any]]] = {}
        self._bytes: dict[int, tuple[Any, bytes, str, set[Any]]] = {}
        self._opened: dict[int, Any] = {}  # files opened for reading by the traced code
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._caches: dict[int, tuple[Any, Any]] = {}
        self._numpy: set[Any] = set()
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any, str, Any]] = {}
        self._slots: list[tuple[Any, str, Any, str, Any]] = []
        self._entered: set[tuple[int, bool]] = set()
        self._given_class: dict[int, set[str]] = {}  # arguments of code that are compared with int or float
        self._seen: set[int] = set()
        self._seen_quietly: set[int] = set()
        self._loggers: dict[int, logging.Logger] = {}
        self._locks: dict[int, tuple[Any, str]] = {}
        self._alive: list[Any] = []
        self._closures_read: set[Any] = set()
        self._known = known_as if known_as is not None else module
        self._tensor_rows: set[tuple[str, str]] = set()
        self.symbolic = False  # sizes or numbers of the trace are symbols
        self.identity = False  # forward may ask which tensors are one object
        self.asked: Any = None  # capture/refused.py: what forward asks of tensors, while it runs

    # --- entering and leaving ----------------------------------------------------------------------

    def __enter__(self) -> Watch:
        with contextlib.ExitStack() as ends:
            self._scope = ends.enter_context(patches.scope(watch=self))
            numpy = sys.modules.get("numpy")
            self._numpy_state = outside.numpy_state(numpy)
            randoms: tuple[Any, ...] = (
                *outside.RANDOM,
                *([numpy.random.RandomState, numpy.random.Generator] if numpy else []),
            )
            self._random_types = randoms
            self._put = nn.Module.__setattr__
            ends.callback(self._patched.clear)
            self._scope.replace(nn.Module, "__getattribute__", self._module_getattribute())
            self._scope.replace(nn.Module, "__setattr__", self._module_setattr())
            self._opens = io.open
            opened = patches.only_here(self._open(io.open), io.open)
            for owner in (builtins, io):
                self._scope.replace(owner, "open", opened)
            self._for_good = frozenset(outside.for_good())
            self._for_good_types = outside.for_good_types()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._ends:  # the lock is held until what was changed is put back
            self._scope.ends.close()  # what was replaced
            self.settle()
            self._finish()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The user's forward runs: from here on, what is read counts."""
        self._active += 1
        profile: Any = sys.getprofile()
        collects = gc.isenabled()
        try:
            gc.disable()  # finalizers and callbacks of the collector are no part of forward
            if self._active == 1:
                self._before = [contents.snapshot(own) for _, own in self._dicts]
                self._start = [old for old, _ in self._before]
                told = outside.watched_functions(), outside.told_types()
                _C.watch_calls(self._chosen, self._called, self._c_called, *told)
            yield
        finally:
            if self._active == 1 and not self.quiet:
                self._note_left()
            self._note_assigned()
            self._active -= 1
            if not self._active:
                _C.watch_end()
                if hasattr(profile, "enable"):  # cProfile
                    profile.enable()
                elif callable(profile):  # that of torch.profiler's with_stack is C's alone, and sees no more frames
                    sys.setprofile(profile)
            if collects:
                gc.enable()
            self.settle()

    # --- attributes --------------------------------------------------------------------------------

    def _module_getattribute(self) -> Callable[[Any, str], Any]:
        names, reads, me, ident = self._names, self.reads, self._thread, threading.get_ident
        get = object.__getattribute__

        def getattribute(obj: Any, name: str) -> Any:
            try:
                value = get(obj, name)
            except AttributeError:
                value = _ABSENT
            own = get(obj, "__dict__")
            where = names.get(id(own))
            if where is not None:
                if self.quiet and ident() == me and self._in_kept():
                    self._kept_reads.add((where, name))
                if name == "__dict__" and self._active and ident() == me:
                    asks = sys._getframe(1).f_code  # dir() asks by way of PyTorch
                    if not libraries.of_torch(asks.co_filename) or asks.co_name == "__dir__":
                        self._looks_into(where, own)
                elif (
                    self._active
                    and (where, name) not in (self._quiet_reads if self.quiet else reads)
                    and name not in _REGISTRIES
                    and ident() == me
                ):
                    (self._quiet_reads if self.quiet else reads).add((where, name))
                    self._module_read(where, own, name, value)
            elif self._active and id(own) in self._dict_owner and ident() == me:
                self._object_read(obj, name, value)
            if value is _ABSENT:
                return get(obj, name)
            return value

        return getattribute

    def _module_setattr(self) -> Callable[[Any, str, Any], None]:
        names, me, ident, put, get = self._names, self._thread, threading.get_ident, self._put, object.__getattribute__

        def setattribute(obj: Any, name: str, value: Any) -> None:
            own = get(obj, "__dict__")
            where = names.get(id(own))
            if where is not None and ident() == me and name not in obj._buffers:
                if own is self._outside:
                    self._past.add((where, name))
                elif self._in_kept():
                    self._kept_writes.add((where, name))
                elif not self.quiet and (where, name) not in self.reads:
                    self._blind.add((where, name))
                if type(value) in PLAIN and own.get(name, _ABSENT) is value:
                    if not self.quiet:
                        self.reads.add((where, name))  # as long as it is that, nothing is assigned
                elif isinstance(value, nn.Module) and obj._modules.get(name) is value:
                    pass  # the submodule that is there: the guard knows the tree
                elif not libraries.of_torch(sys._getframe(1).f_code.co_filename):
                    (self.quiet_writes if self.quiet else self.writes).add((where, name))
                elif name != "training":  # by train() and eval(), for whoever calls them
                    self._by_torch.add((where, name))
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
                if own.get(k, _ABSENT) is old.get(k, _ABSENT) or (where, k) in self._by_torch:
                    continue
                if not isinstance(getattr(self._classes_of[where], k, None), functools.cached_property):
                    (self.quiet_writes if self.quiet else self.writes).add((where, k))
                    if self._in_kept():
                        self._kept_writes.add((where, k))
            if own is self._outside:
                own.clear()
                own.update(old)
        self._before = [contents.snapshot(own) for _, own in self._dicts]

    def _note_left(self) -> None:
        """What forward, which has returned, leaves in the attributes that it has assigned."""
        self.left, self.restored, self.keeps = {}, set(), False
        of = {where: (own, old) for (where, own), old in reversed([*zip(self._dicts, self._start, strict=True)])}
        blind = set() if self._past_names() else self._blind
        for key in (self.writes | blind) - self._kept_reads - self._kept_writes - self._past:
            where, name = key
            own, old = of[where]
            now, was = own.get(name, _ABSENT), old.get(name, _ABSENT)
            if name in _OF_MODULES:
                continue
            if key in blind and where not in self._looked_into and lasts(now):
                self.left[key] = now
            elif now is was or lasts(now) and type(now) is type(was) and repr(now) == repr(was):
                self.restored.add(key)
                self.reads.add(key)
            elif not isinstance(now, nn.Module) and not lasts(now):
                self.keeps = True

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
            fresh = self._attributes[where].get(name, _ABSENT) is not value
            if name not in _OF_MODULES and type(value) not in PLAIN and not isinstance(value, Tensor) and not fresh:
                self._discover(value, where, f"self.{name}{f' of {where}' * bool(where)}")
        elif not self.quiet and not any(name in own[registry] for registry in ("_parameters", "_buffers", "_modules")):
            self._class_read(self._classes_of[where], name, where)

    def _class_read(self, cls: type, name: str, token: Any) -> None:
        """An attribute that is found on the class, or on none of its bases."""
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or user_class(owner) or name == "forward":
            if name[:2] == "__" and name != "__call__":
                return
            for base in cls.__mro__:
                if base is owner:
                    self._mapped(base, name, token)
                    return
                if user_class(base):
                    space = self._space(base)
                    self._row(
                        (NO_ITEM if type(space) is dict else UNMAPPED, space, name, None), f"{base.__qualname__}.{name}"
                    )

    def _space(self, cls: type) -> Any:
        """The class's dictionary, always by the same object: the one behind vars(cls), which is asked in a third of the
        time."""
        space = self._spaces.get(cls)
        if space is None:
            view = vars(cls)
            (behind,) = gc.get_referents(view) or (None,)
            space = self._spaces[cls] = behind if type(behind) is dict and behind == view else view
        return space

    def _mapped(self, cls: type, name: str, token: Any) -> None:
        if name[:2] == "__" and name != "__call__":
            return
        own = self._space(cls)
        value = own[name]
        self._row((ITEM if type(own) is dict else MAPPED, own, name, value), f"{cls.__qualname__}.{name}")
        if type(value) not in _ATOMS and (
            cls not in self._classes or self._classes[cls][1].get(name, _ABSENT) is value
        ):
            self._discover(value, token, f"{cls.__qualname__}.{name}")

    def _watch_class(self, cls: type, token: Any) -> None:
        """Attributes that executed code names are compared, wherever they stand on the class or its bases."""
        quiet = self.quiet > 0
        meta: type = type(cls)
        for base in (*cls.__mro__, *meta.__mro__):
            if (base, quiet) in self._watched or not user_class(base):
                continue
            self._watched.add((base, quiet))
            own = vars(base)
            if base not in self._classes:
                known = {k: v for k, v in own.items() if k != "__getattribute__"}
                self._classes[base] = token, known, base.__qualname__
            for name in self._attribute_names[quiet]:
                if name in own:
                    self._mapped(base, name, token)

    def _patch(self, cls: type) -> bool:
        """Reads of the attributes of this class's objects are noted from now on. False: that is not possible."""
        if issubclass(cls, nn.Module) or any(base in self._patched for base in cls.__mro__):
            return True
        original = cls.__getattribute__
        own = cls.__dict__.get("__getattribute__", _ABSENT)
        objects, me, ident = self._objects, self._thread, threading.get_ident

        def getattribute(obj: Any, name: str) -> Any:
            if id(obj) not in objects or not self._active or ident() != me:
                return original(obj, name)
            try:
                value = original(obj, name)
            except AttributeError:
                self._object_read(obj, name, _ABSENT)
                raise
            self._object_read(obj, name, value)
            return value

        try:
            self._scope.replace(cls, "__getattribute__", getattribute)
        except TypeError:
            return False
        self._patched[cls] = own
        return True

    def _reads_itself(self, cls: type) -> bool:
        """The class has a __getattribute__ of its own, which reads whatever it likes."""
        return any(
            isinstance(self._patched.get(base, vars(base).get("__getattribute__")), types.FunctionType)
            for base in cls.__mro__
        )

    def _object_read(self, obj: Any, name: str, value: Any) -> None:
        key = id(obj), name
        if self.quiet or key in self._object_reads:
            return
        self._object_reads.add(key)
        own = contents.attributes(obj)
        cls = type(obj)
        what = f"{cls.__qualname__}.{name}"
        token = self._module_at(sys._getframe(2))
        if name[:2] == "__" and name != "__call__":
            if name == "__dict__" and own is not None:
                self._container(own, token, what)
            return
        if own is not None and name in own:
            self._row((ITEM, own, name, own[name]), what)
            old = self._met[id(own)].copy
            if not any(old[i] == name and old[i + 1] is own[name] for i in range(0, len(old), 2)):
                return  # assigned by the traced code itself: what is in there is of this call
        elif isinstance(getattr(cls, name, None), types.MemberDescriptorType):
            if value is not _ABSENT:
                self._slots.append((obj, name, value, what, token))
                self._row((ATTRIBUTE, obj, name, value), what)
        else:
            if own is not None:
                self._row((NO_ITEM, own, name, None), what)
            self._class_read(cls, name, token)
        if value is not _ABSENT and type(value) not in _ATOMS:
            self._discover(value, token, what)

    def looks_inside(self) -> bool:
        """Forward may read the attributes of its arguments all at once."""
        return bool({"vars", "__dict__"} & self._attribute_names[False])

    def ask_tensor(self, where: str, now: Tensor, ask: Callable[[Tensor], Any], what: str) -> None:
        """Forward has asked this of a parameter or buffer, in whose place the trace has another tensor."""
        owner, _, name = where.rpartition(".")
        root = self._known

        def again() -> Any:
            return ask(getattr(root.get_submodule(owner), name))

        if not self.quiet and (where, what) not in self._tensor_rows:
            self._tensor_rows.add((where, what))
            self._row((CALL, None, again, ask(now)), what)

    def _row(self, row: tuple[Any, ...], name: str) -> None:
        if not self.quiet:
            self.rows.setdefault((row[0] if row[0] > UNMAPPED else row[0] // 2, id(row[1]), row[2]), (row, name))

    # --- values ------------------------------------------------------------------------------------

    def _discover(self, v: Any, token: Any, name: str) -> None:
        """Looks behind a value that code outside of torch can reach."""
        t = type(v)
        if t in _ATOMS or isinstance(v, (enum.Enum, types.GenericAlias)):
            return
        if isinstance(v, logging.Logger):
            self._loggers[id(v)] = v
            return
        if id(v) in self._seen or (self.quiet and id(v) in self._seen_quietly):
            met = self._met.get(id(v)) or self._met.get(id(contents.attributes(v)))
            if met is not None:
                met.tokens.add(token)
            for known in (self._arrays, self._bytes, self._generators):
                if id(v) in known:
                    known[id(v)][3].add(token)
            return
        (self._seen_quietly if self.quiet else self._seen).add(id(v))
        self._alive.append(v)
        if isinstance(v, Tensor):
            if t is Tensor and id(v) not in self._tensors and v.layout is torch.strided and v.device.type != "meta":
                with private.without_modes():
                    self._tensors[id(v)] = v, v._version, v.detach().clone()
        elif isinstance(v, nn.Module):
            if id(v.__dict__) not in self._names:
                self._foreign_module(v, token, name)
        elif t is types.FunctionType:
            self._function(v, token, name)
        elif t is types.MethodType:
            self._discover(v.__self__, token, name)
            self._discover(v.__func__, token, name)
        elif t is types.BuiltinFunctionType:
            if not isinstance(v.__self__, types.ModuleType):
                self._discover(v.__self__, token, name)
        elif t is property:
            for f in (v.fget, v.fset):
                if f is not None:
                    self._discover(f, token, name)
        elif t in (staticmethod, classmethod) or isinstance(v, functools.cached_property):
            self._discover(v.func if isinstance(v, functools.cached_property) else v.__func__, token, name)
        elif t is functools.partial or t is functools.partialmethod:
            self._discover(v.func, token, name)
            for x in v.args:
                self._discover(x, token, name)
            self._discover(v.keywords, token, name)
        elif isinstance(v, type):
            if user_class(v):
                self._watch_class(v, token)
        elif isinstance(v, types.ModuleType):
            pass  # its attributes are noted where they are named
        elif isinstance(v, functools._lru_cache_wrapper):
            self._caches.setdefault(id(v), (v, v.cache_info()))
            self._discover(v.__wrapped__, token, name)
        elif isinstance(v, self._random_types):
            if isinstance(v, torch.Generator):
                self._stop(f"reads {name}, a generator of random numbers of its own")
            self._generators.setdefault(id(v), (v, outside.generator_state(v), name, set()))[3].add(token)
        elif isinstance(v, weakref.ref):
            self._row((CALL, None, functools.partial(v), v()), name)
            self._discover(v(), token, name)
        elif t is contextvars.ContextVar:
            self._row((CALL, None, functools.partial(v.get, None), v.get(None)), name)
        elif t is types.CellType:
            with contextlib.suppress(ValueError):
                self._row((ATTRIBUTE, v, "cell_contents", v.cell_contents), name)
                self._discover(v.cell_contents, token, name)
        elif contents.container(v):
            self._container(v, token, name)
        elif t.__module__ == "numpy" and t.__name__ == "ndarray":
            self._array(v, token, name)
        elif t in _VIEWS:
            view = v.items() if t is types.MappingProxyType else v
            self._row((SEQUENCE, view, None, tuple(view)), name)
            for x in list(view):
                self._discover(x, token, name)
        elif isinstance(v, threading.Event):  # other threads may set it meanwhile: nothing is put back
            self._row((CALL, None, v.is_set, v.is_set()), name)
        elif isinstance(v, threading.local):
            own = v.__dict__  # of this thread
            self._row((CALL, None, functools.partial(getattr, v, "__dict__"), own), name)
            self._container(own, token, name)
        elif user_class(t) or t is types.SimpleNamespace:
            self._object(v, token, name)
        elif t.__module__ == "threading" and (held := contents.attributes(v)) is not None:
            self._row((DICT, held, None, flat(held)), name)  # other threads may change it: nothing is put back
        elif t is _LOCK:
            self._locks[id(v)] = v, name
        elif isinstance(v, decimal.Decimal):
            self._row((CALL, None, decimal_context, decimal_context()), "the context of decimal")
        elif isinstance(v, collections.abc.Iterator) or isinstance(v, io.IOBase):
            self._stop(f"reads {name}, {_article(t.__name__)}, whose state cannot be compared or put back")
        elif isinstance(v, (bytearray, array.array)):
            self._row((CALL, None, functools.partial(bytes, v), bytes(v)), name)
            self._bytes.setdefault(id(v), (v, bytes(v), name, set()))[3].add(token)
        elif t.__module__.partition(".")[0] in libraries.LIBRARIES and (held := contents.attributes(v)) is not None:
            if t.__module__.partition(".")[0] not in libraries.STATELESS:
                self._container(held, token, name)  # of the standard library: argparse.Namespace, queue.Queue
        elif (t.__module__.partition(".")[0].lstrip("_") not in libraries.STATELESS or t is memoryview) and not hasattr(
            t, "__get__"
        ):
            self._problem(
                token,
                f"reads {name}, {_article(t.__qualname__)} that is not written in Python: its state cannot be compared",
            )

    def _meet(self, v: Any, token: Any, name: str) -> list[Any]:
        met = self._met.get(id(v))
        if met is None:
            met = self._met[id(v)] = Met(v, contents.copy(v), name, token)
        met.tokens.add(token)
        return met.copy

    def _container(self, v: Any, token: Any, name: str) -> None:
        if id(v) in self._tables:
            return
        if len(v) > _MANY:
            self._problem(
                token, f"reads {name}, a {type(v).__name__} of {len(v)} elements: too many to compare at every step"
            )
            return
        old = self._meet(v, token, name)
        if not self.quiet:
            self._contents[id(v)] = name
        registry = sum(isinstance(x, type) for x in old) > _REGISTRY
        for x in old:
            if type(x) not in _ATOMS and not (registry and isinstance(x, type)):
                self._discover(x, token, name)
        if user_class(type(v)):
            self._object(v, token, name)

    def _object(self, v: Any, token: Any, name: str) -> None:
        """An object of a class written in Python: what is read of it is noted one by one."""
        cls = type(v)
        self._objects[id(v)] = v
        self._watch_class(cls, token)
        own = contents.attributes(v)
        if own is not None:
            self._meet(own, token, name)
            self._own_dicts.add(id(own))
        if (not self._patch(cls) or self._reads_itself(cls)) and own is not None:
            self._container(own, token, name)

    def _foreign_module(self, m: nn.Module, token: Any, name: str) -> None:
        """A module that is not part of the tree (a global, one hidden in a list)."""
        for sub in m.modules():
            own = sub.__dict__
            if id(own) in self._dict_owner or id(own) in self._names:
                continue
            self._dict_owner[id(own)] = name
            self._objects[id(sub)] = sub
            self._watch_class(type(sub), token)
            self._meet(own, token, name)
            for registry in ("_parameters", "_buffers", "_modules"):
                if id(own[registry]) not in self._tables:  # else a copy of a module of the tree (copy.copy shares them)
                    self._meet(own[registry], token, name)
                    if not self.quiet:
                        self._contents[id(own[registry])] = name

    def _function(self, f: types.FunctionType, token: Any, name: str) -> None:
        known = self._functions.setdefault(id(f.__code__), [])
        if any(f is g for g in known):
            return
        known.append(f)
        for d in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            if type(d) not in _ATOMS:
                self._discover(d, token, f"a default argument of {f.__qualname__}")
        inner = getattr(f, "__wrapped__", None)
        if inner is not None and type(inner) is types.FunctionType:
            self._function(inner, token, name)

    def _array(self, v: Any, token: Any, name: str) -> None:
        if v.nbytes > _BYTES or v.dtype.hasobject:
            what = "of objects" if v.dtype.hasobject else f"of {v.nbytes} bytes: too large to compare at every step"
            self._problem(token, f"reads {name}, an array {what}")
            return
        self._arrays.setdefault(id(v), (v, v.copy(), name, set()))[3].add(token)
        if v.flags.c_contiguous:
            self._row((MEMORY, v, v.__array_interface__["data"][0], v.tobytes()), name)
        else:
            self._row((CALL, None, v.tobytes, v.tobytes()), name)

    # --- code --------------------------------------------------------------------------------------

    @staticmethod
    def _chosen(code: types.CodeType) -> bool:
        return code in outside.SPECIAL if is_library(code.co_filename) else True

    def _called(self, frame: types.FrameType, code: types.CodeType) -> None:
        """Code of the user's is entered."""
        special = outside.SPECIAL.get(code) if is_library(code.co_filename) else None
        if special is not None:
            self._called_special(frame, code, special)
            return
        if code.co_name == "<module>" and frame.f_back is not None and is_library(frame.f_back.f_code.co_filename):
            return  # text that a library evaluates (sympy does, for symbolic sizes)
        where = self._module_at(frame)
        cls = self._classes_of[where]
        if (cls, self.quiet > 0) not in self._watched:
            self._watch_class(cls, cls)
        key = id(code)
        ran_in = self._ran_in.get(key)
        if ran_in is None:
            ran_in = self._ran_in[key] = set()
            self._ran[key] = code
        if self.quiet:
            self._ran_quietly.setdefault(key, set()).add(where)
            if _CHECKPOINTS.intersection(code.co_names):
                self.checkpointed.add(where)
        else:
            ran_in.add(where)
        if (key, self.quiet > 0) not in self._entered:
            self._entered.add((key, self.quiet > 0))
            self._first_call(frame, code)
        if key in self._given_class and not self.quiet:
            given = [frame.f_locals.get(n) for n in self._given_class[key]]
            if any(x is cls for x in given for cls in contents.SYMBOLIC):
                raise _class_of_number(frame)
        free = code.co_freevars and [n for n in code.co_freevars if n[:2] != "__"]  # others are Python's, dataclasses'
        if free and key not in self._inner:
            values = {n: frame.f_locals[n] for n in free if n in frame.f_locals}
            which = key, tuple(id(v) for v in values.values())
            if which not in self._closures or (not self.quiet and which not in self._closures_read):
                self._closures[which] = code, values
                if not self.quiet:
                    self._closures_read.add(which)
                for n, v in values.items():
                    if type(v) not in _ATOMS:
                        self._discover(v, key, f"{n}, a closure variable of {bytecode.at(code)}")
                        self._follow(v, bytecode.analyse(code).chains.get(n, ()), key)

    def _first_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        known = bytecode.analyse(code)
        asked = {"__name__", "__qualname__", "__module__"}.intersection(code.co_names)
        if asked and not self.quiet and _names_of_tensors(code):
            self._problem(id(code), f"compares the {min(asked)} of a class with a tensor's: isinstance can be followed")
        if {"object", "__getattribute__"} <= known.names:
            for where, own in self._dicts:
                self._looks_into(where, own)
        key = id(code)
        for how, pair in known.compared:
            self._compares(frame, how, pair)
        self._inner.update(id(c) for c in code.co_consts if type(c) is types.CodeType)
        names = self._attribute_names[self.quiet > 0]
        new = known.names - names
        names |= new
        for cls, (token, _, _) in list(self._classes.items()):
            own = vars(cls)
            for name in new:
                if name in own:
                    self._mapped(cls, name, token)
        space = frame.f_globals
        for name in (*known.globals, *known.stored):
            if name not in space:
                if name in known.stored:
                    self._globals.setdefault((id(space), name), (space, name, _ABSENT, bytecode.at(code), key))
                continue
            value = space[name]
            what = f"global {name} of {bytecode.at(code)}"
            if name in known.stored:
                self._globals.setdefault((id(space), name), (space, name, value, bytecode.at(code), key))
            if isinstance(value, types.ModuleType):
                if value is decimal:
                    self._row((CALL, None, decimal_context, decimal_context()), "the context of decimal")
                self._follow(value, known.chains.get(name, ()), key)
                if name in known.bare and not is_library(getattr(value, "__file__", None) or "<frozen"):
                    self._row((ITEM, space, name, value), what)
                continue
            self._row((ITEM, space, name, value), what)
            if type(value) is types.FunctionType:
                for chain in known.chains.get(name, ()):
                    of = vars(value)
                    row = (ITEM, of, chain[0], of[chain[0]]) if chain[0] in of else (NO_ITEM, of, chain[0], None)
                    self._row(row, f"{name}.{chain[0]}")
                looks = name in known.bare and known.names & {"getattr", "hasattr"}
                if looks and not is_library(value.__code__.co_filename):
                    self._row((DICT, vars(value), None, flat(vars(value))), f"attributes of {name}")
            if getattr(value, "__module__", None) == "decimal":
                self._row((CALL, None, decimal_context, decimal_context()), "the context of decimal")
            if type(value) not in _ATOMS:
                self._discover(value, key, what)
                if isinstance(value, type):
                    self._follow(value, known.chains.get(name, ()), key)
                elif (
                    getattr(value, "__self__", None) is not None
                    and "numpy.random" in type(value.__self__).__module__ + "."
                ):
                    self._numpy.add(key)
        for name in known.imports:
            module = sys.modules.get(name)
            if module is not None:
                for n in known.names:
                    self._follow(module, [(n,)], key)

    def _follow(self, owner: Any, chains: Any, token: Any) -> None:
        """Attributes of modules (and of classes and modules in them) that code names one after the other."""
        for chain in chains:
            at = owner
            for name in chain:
                if not isinstance(at, types.ModuleType):
                    break
                if at.__name__.partition(".")[0] == "numpy" and name == "random":
                    self._numpy.add(token)
                space = vars(at)
                if name not in space:
                    break
                value = space[name]
                if at.__name__.partition(".")[0] not in libraries.LIBRARIES:
                    what = f"{at.__name__}.{name}"
                    self._row((ITEM, space, name, value), what)
                    self._globals.setdefault((id(space), name), (space, name, value, what, token))
                    if type(value) not in _ATOMS:
                        self._discover(value, token, what)
                at = value

    def _compares(self, frame: types.FrameType, how: str, pair: tuple[Any, Any]) -> None:
        """Code that is entered will compare these: may they be tensors, or the classes of tensors?"""
        if self.quiet:
            return
        values = [bytecode.operand(frame, x) for x in pair]
        if any(isinstance(v, type) and issubclass(v, Tensor) for v in values):
            if any(v is UNKNOWN for v in values):
                self._stop(f"compares the class of a tensor by `{'is' if how == 'IS_OP' else '=='}`: isinstance can be "
                           "followed", frame)  # fmt: skip
        elif self.symbolic and any(v is UNKNOWN for v in values) and any(v is int or v is float for v in values):
            unknown = [x for x, v in zip(pair, values, strict=True) if v is UNKNOWN]
            if any(x is None or x[0] != "argument" or x[2] for x in unknown):
                raise _class_of_number(frame)
            self._given_class.setdefault(id(frame.f_code), set()).update(x[1] for x in unknown)
        elif how == "IS_OP" and all(v is UNKNOWN or isinstance(v, Tensor) for v in values):
            classes = any(x is not None and x[2][-1:] == ("__class__",) for x in pair)  # no tensors then
            self.identity = self.identity or not classes
        if how == "IS_OP":
            for x, v in zip(pair, values, strict=True):
                self._same_container(frame, x, v)

    def _same_container(self, frame: types.FrameType, x: Any, v: Any) -> None:
        """Equal lists count as the same state, unless forward asks which list it is."""
        owner = frame.f_locals.get(x[1]) if x is not None and len(x[2]) == 1 else None
        if isinstance(v, (list, dict, tuple)) and isinstance(owner, nn.Module):
            where = self._names.get(id(object.__getattribute__(owner, "__dict__")))
            if where is not None:
                own = self._known.get_submodule(where).__dict__
                if own.get(x[2][0]) is v:
                    self._row((ITEM, own, x[2][0], v), f"{where}.{x[2][0]}".lstrip("."))

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """open(): a file that is read can be read again."""

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_DIR):
                frame = frame.f_back
            where, user = self._reader(frame) if self._active else ("", None)
            if user is None:
                return original(file, mode, *args, **kwargs)
            if set(mode) & set("wax+"):
                self._stop(f"opens a file to write it ({file})", user)
            if not self.quiet:
                self._problem_at(where, "opens a file", user)
            made = original(file, mode, *args, **kwargs)
            self._opened[id(made)] = made
            return made

        return opened

    def _called_special(self, frame: types.FrameType, code: types.CodeType, special: str) -> None:
        by = frame.f_back
        if special == "for good":
            _, user = self._reader(by)
            if user is not None:
                self._stop(f"calls {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}, which would "
                           "happen when it is captured only", user)  # fmt: skip
            return
        if self.quiet:
            return
        by = frame.f_back
        if special in ("level", "thread"):
            if by is not None and not is_library(by.f_code.co_filename):
                log: Any = frame.f_locals.get("self")
                ask: Any = threading.current_thread if special == "thread" else log.getEffectiveLevel
                if "level" in frame.f_locals:
                    ask = functools.partial(log.isEnabledFor, frame.f_locals["level"])
                self._row((CALL, None, ask, ask()), "the thread" if special == "thread" else f"level of {log}")
            return
        if special in ("key", "class"):
            if self.asked is not None and by is not None and not is_library(by.f_code.co_filename):
                if special == "key":
                    self.asked.as_key(frame.f_locals["self"])
                else:
                    self.asked.asks_class(frame.f_locals["instance"])
            return
        # the export passes every call of torch through its own
        while by is not None and by.f_code.co_filename.startswith(libraries.TRACER):
            by = by.f_back
        where, user = self._reader(by)
        if special == "environ":
            if user is not None:
                data = os.environ._data  # type: ignore[attr-defined]
                key = frame.f_locals["key"]
                if isinstance(key, str):
                    raw = os.environ.encodekey(key)  # type: ignore[attr-defined]
                    row = (ITEM, data, raw, data[raw]) if raw in data else (NO_ITEM, data, raw, None)
                    self._row(row, f"environment variable {key}")
        elif special == "log":
            at: types.FrameType | None = frame
            while at is not None and f"{os.sep}logging{os.sep}" in at.f_code.co_filename:
                at = at.f_back
            # not what torch logs of itself
            if at is not None and not is_library(at.f_code.co_filename) and not libraries.once(frame):
                self.says.setdefault((at.f_code.co_filename, at.f_lineno), "logs")
        elif user is not None:
            self._problem_at(where, special.format(code.co_name), user)

    def _c_called(self, frame: types.FrameType, function: Any) -> None:
        where, user = self._reader(frame)
        if user is None:
            return
        if function in self._for_good or isinstance(function.__self__, self._for_good_types):
            self._stop(f"calls {function.__qualname__}, which would happen when it is captured only", user)
        stream = function.__self__ if isinstance(function.__self__, io.IOBase) else None
        spoken = any(stream is x for x in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__,
                                           getattr(sys.stderr, "inner", None)))  # fmt: skip
        if stream is not None and not spoken and not isinstance(stream, (io.StringIO, io.BytesIO)):
            if id(stream) not in self._opened:
                self._stop("reads or writes a file that was open before", user)
        if self.quiet:
            return
        if function is warnings.warn:
            if not libraries.once(frame):
                self.says.setdefault((user.f_code.co_filename, user.f_lineno), "warns")
        elif function is print or stream is not None:
            if function is print or spoken:
                if not libraries.once(frame):
                    self.says.setdefault((user.f_code.co_filename, user.f_lineno), "prints")
            else:
                self._problem_at(where, "reads or writes a file", user)
        elif isinstance(function.__self__, random.Random):
            if function.__name__ not in ("getstate",):
                self._problem_at(where, "draws random numbers of Python's random", user)
        elif isinstance(function.__self__, torch.Generator):
            self._problem_at(where, "uses a torch.Generator of its own", user)
        elif function in outside.GETTERS:
            with contextlib.suppress(Exception):
                self._row((CALL, None, function, function()), f"{function.__name__}()")
        elif function in (operator.is_, operator.is_not):
            self.identity = True
        elif function in (gc.isenabled, gc.get_count):
            self._problem_at(where, "asks for the state of Python's collector", user)
        elif function is builtins.id:
            # `hash(self)` by identity, written out, says as little as that of any object
            if not is_library(frame.f_code.co_filename) and frame.f_code.co_name != "__hash__":
                self._stop("asks for the id of an object", user)
        elif function is os.urandom:
            self._problem_at(where, "asks the system for random bytes", user)
        elif function is self._opens:  # bound before the capture
            self._problem_at(where, "opens a file", user)
        elif function is time.sleep:
            self._problem_at(where, "waits (time.sleep)", user)
        elif function is builtins.input:
            self._problem_at(where, "asks for input", user)
        elif function is builtins.globals:
            self._problem_at(where, "looks through its globals()", user)
        else:
            self._problem_at(where, "asks for the time", user)

    # --- where it happens --------------------------------------------------------------------------

    def _module_at(self, frame: types.FrameType | None) -> str:
        """The innermost module whose code is running."""
        return frames.module_at(frames.outwards(frame), self._names, self._no_methods) or ""

    def _reader(self, frame: types.FrameType | None) -> tuple[str, types.FrameType | None]:
        """The user's frame that called into the standard library here (None: torch or logging did), and its module."""
        while frame is not None:
            path = frame.f_code.co_filename
            if not is_library(path):
                return self._module_at(frame), frame
            if (
                not libraries.in_std(path)
                and not path.startswith("<frozen")
                and f"{os.sep}torch{os.sep}backends{os.sep}" not in path
                or f"{os.sep}logging{os.sep}" in path
                or path.endswith(("warnings.py", "threading.py"))
            ):
                return "", None
            frame = frame.f_back
        return "", None

    def _problem_at(self, where: str, reason: str, frame: types.FrameType) -> None:
        self.problems.append(Problem(where, reason, frame.f_code.co_filename, frame.f_lineno))

    def problem_at(self, frame: types.FrameType, reason: str, whole: bool = False) -> None:
        """Code that runs here must stay in PyTorch; whole: with all that calls it."""
        if not self.quiet:
            self._problem_at("" if whole else self._module_at(frame), reason, frame)

    def _problem(self, token: Any, reason: str, fills: bool = False) -> None:
        if self.quiet:
            return
        if isinstance(token, str):
            code = getattr(self._classes_of[token].forward, "__code__", None)
        elif isinstance(token, type):
            code = getattr(token.forward, "__code__", None) if issubclass(token, nn.Module) else None
        else:
            code = self._ran[token]
        for where in self._places_of(token):
            self.problems.append(
                Problem(where, reason, code.co_filename if code else "", code.co_firstlineno if code else 0, fills)
            )

    def _places_of(self, token: Any) -> set[str]:
        """Where in the tree a module, a class, or code that has run (by its id; in the graph) stands."""
        if isinstance(token, str):
            return {token}
        if isinstance(token, type):
            return {where for where, cls in self._classes_of.items() if issubclass(cls, token)}
        return self._ran_in[token]

    def _stop(self, reason: str, user: types.FrameType | None = None) -> None:
        """What the trace would use up cannot even be traced: the whole module stays in PyTorch."""
        user = user or libraries.first_user(sys._getframe(1))
        problem = Problem("", reason, user.f_code.co_filename if user else "", user.f_lineno if user else 0)
        self.problems.append(problem)
        raise CaptureError(problem.reason, "", problem.file, problem.line)

    # --- afterwards --------------------------------------------------------------------------------

    def settle(self) -> None:
        """The traced forward has returned: what it changed is noted and put back."""
        for met in self._met.values():
            if not contents.unchanged(met.value, met.copy):
                plain = self._plain_changes(met)
                more = contents.entries_more(met.value, met.copy)
                left = contents.added(met.value, met.copy)
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
            if t._version != version:
                with torch.no_grad(), private.without_modes():
                    t.detach().copy_(old)
                private.set_version((t,), (version,))  # a backward may be waiting
        for space, name, old, at, token in self._globals.values():
            left = space.get(name, _ABSENT)
            if left is not old:
                if old is _ABSENT:
                    del space[name]
                else:
                    space[name] = old
                self._changed({token}, f"assigns global {name} ({at})", left)
        names = self._attribute_names[False] | self._attribute_names[True]
        for cls, (token, old, name) in self._classes.items():
            own = vars(cls)
            for k in [k for k in own if k not in old and k in names and k != "__getattribute__"]:
                left = own[k]
                type.__delattr__(cls, k)
                self._changed({token}, f"assigns {name}.{k}", left)
            for k, v in old.items():
                left = own.get(k, _ABSENT)
                if k in names and left is not v:
                    type.__setattr__(cls, k, v)
                    self._changed({token}, f"assigns {name}.{k}", left)
        for obj, name, old, what, token in self._slots:
            left = getattr(obj, name, _ABSENT)
            if left is not old:
                object.__setattr__(obj, name, old)
                self._changed({token}, f"changes {what}", left)
        for cache, before in self._caches.values():
            if cache.cache_info().misses != before.misses:
                cache.cache_clear()
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy_state is not None and outside.numpy_state(numpy) != self._numpy_state:
            numpy.random.mtrand._rand._bit_generator.state = outside.from_hashable(self._numpy_state)
            self._changed(self._numpy or {""}, "draws random numbers of numpy.random")

    def _plain_changes(self, met: Met) -> dict[str, Any]:
        """Attributes of an object that were assigned numbers or strings (transformers' config.problem_type), when
        nothing else was."""
        if self.quiet or id(met.value) not in self._own_dicts:
            return {}
        old = dict(zip(met.copy[::2], met.copy[1::2], strict=True))
        new = {k: v for k, v in met.value.items() if old.get(k, _ABSENT) is not v}
        ok = (
            all(type(v) in PLAIN and (k not in old or type(old[k]) in PLAIN) for k, v in new.items())
            and old.keys() <= met.value.keys()
        )
        return new if ok else {}

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
            if 0 < t.nbytes <= _BYTES and id(t) not in registered and asked:
                numbers = contents.Numbers(t)
                self._row((CALL, None, numbers, numbers()), "numbers in a tensor")

    def assigned(self) -> list[Problem]:
        """`assigns` as problems."""
        before, self.problems = self.problems, []
        self._changed(
            self._assigned, f"assigns {', '.join(sorted({k for _, new in self.assigns for k in new}))} of an object"
        )
        found, self.problems = self.problems, before
        return found

    def caches(self) -> list[Any]:
        """functools.lru_cache functions that were met."""
        return [cache for cache, _ in self._caches.values()]

    def _changed(self, tokens: set[Any], reason: str, left: Any = None, fills: bool = False) -> None:
        """left: what code of these has left there, where it may hold tensors."""
        escapes = contents.holds_tensor(left)
        for token in tokens:
            self._problem(token, reason, fills)
            if escapes:
                self.escaped |= self._places_of(token) | self._ran_quietly.get(token, set())

    def _finish(self) -> None:
        """Rows for the contents of containers and for closure variables, as they are after everything was put back."""
        self._functions_hold()
        names = self._attribute_names[False]
        for log in self._loggers.values():
            for name in names & {"level", "disabled", "propagate"}:
                self._row((ITEM, vars(log), name, vars(log)[name]), f"{name} of {log}")
        for lock, name in self._locks.values() if "locked" in names else ():
            self._row((CALL, None, lock.locked, lock.locked()), name)
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
            elif isinstance(v, set):
                self._row((SET, v, None, frozenset(old)), name)
            elif not isinstance(v, (tuple, frozenset)):
                self._row((SEQUENCE, v, None, tuple(old)), name)
        for key, (row, name) in self.rows.items():  # as they were before: the first read may have come after a change
            pair = (MAPPED, UNMAPPED) if row[0] in (MAPPED, UNMAPPED) else (ITEM, NO_ITEM)
            if row[0] in pair:
                now = row[1].get(row[2], _ABSENT)
                self.rows[key] = ((pair[1], *row[1:3], None) if now is _ABSENT else (pair[0], *row[1:3], now)), name
        missing = []
        for code, _ in self._closures.values():
            if bytecode.stores_free(code):
                self.escaped |= self._places_of(id(code)) | self._ran_quietly.get(id(code), set())
        for closure, (code, values) in self._closures.items():
            if closure in self._closures_read and not self._cells(code, values):
                missing.append((code, values))
        if missing:
            wanted = {id(code) for code, _ in missing}
            for f in _C.living((types.FunctionType,)):
                if id(f.__code__) in wanted:
                    self._functions.setdefault(id(f.__code__), []).append(f)
            for code, values in missing:
                if not self._cells(code, values) and gc.get_freeze_count():
                    self._problem(id(code), f"reads closure variables of {bytecode.at(code)}, which gc.freeze() hides")

    def _functions_hold(self) -> None:
        """Functions of the user's keep their code, their defaults and the attributes that are asked for."""
        names, met = self._attribute_names[False], []
        for functions in self._functions.values():
            for f in functions:
                if is_library(f.__code__.co_filename):
                    continue
                met.append(f)
                if f.__kwdefaults__:
                    self._row((DICT, f.__kwdefaults__, None, flat(f.__kwdefaults__)), f"defaults of {f.__qualname__}")
                own = vars(f)
                if own and names & {*own, "getattr", "hasattr"}:
                    self._row((DICT, own, None, flat(own)), f"attributes of {f.__qualname__}")
        if met:
            kept = tuple(x for f in met for x in (f.__code__, f.__defaults__, f.__kwdefaults__))
            self._row((FUNCTIONS, tuple(met), None, kept), f"code or defaults of functions ({met[0].__qualname__} ...)")

    def _cells(self, code: types.CodeType, values: dict[str, Any]) -> bool:
        """Rows for the cells of the function that was called with these values in its closure. Cells that were assigned
        are put back."""
        stores = bytecode.stores_free(code)
        for f in self._functions.get(id(code), ()):
            cells = dict(zip(code.co_freevars, f.__closure__ or (), strict=True))
            now = {n: bytecode.cell(c) for n, c in cells.items()}
            if all(n[:2] == "__" or now[n] is values.get(n, _ABSENT) or n in stores for n in cells):
                for n, c in cells.items():
                    old = values.get(n, _ABSENT)
                    if now[n] is not old and old is not _ABSENT:
                        c.cell_contents = old
                        self._problem(id(code), f"assigns {n}, a closure variable of {bytecode.at(code)}")
                    elif old is not _ABSENT:
                        what = f"{n}, a closure variable of {bytecode.at(code)}"
                        self._row((ATTRIBUTE, c, "cell_contents", old), what)
                return True
        return False


# --- small things ----------------------------------------------------------------------------------


def _names_of_tensors(code: types.CodeType) -> bool:
    """Has the code the name of a class of tensors, or of torch, among its constants?"""
    flat = [x for c in code.co_consts for x in (c if isinstance(c, (tuple, frozenset)) else (c,))]
    return any(x in ("Tensor", "Parameter", "FakeTensor", "torch", "torch.Tensor") for x in flat if type(x) is str)


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _class_of_number(frame: types.FrameType) -> CaptureError:
    return CaptureError("compares a class with int or float: what stands for sizes and numbers has another", "",
                        frame.f_code.co_filename, frame.f_lineno)  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What runs inside is run again at every step: its reads need no rows. What it changes is put back all the same."""
    watch = _here()
    if watch is None:
        yield
        return
    watch.settle()
    watch._note_assigned()
    watch.quiet += 1
    try:
        with watch.running():
            yield
    finally:
        watch.settle()
        watch.quiet -= 1


def in_kept(entered: int) -> None:
    """A run of all in PyTorch enters a module that will be kept there (1), or has left it (-1)."""
    watch = _here()
    if watch is not None:
        watch.kept += entered


def running() -> contextlib.AbstractContextManager[None]:
    """To be entered around the traced forward; at its end, before anything else is put back, what it changed is."""
    watch = _here()
    return watch.running() if watch is not None else contextlib.nullcontext()


def _here() -> Watch | None:
    scope = patches.here()
    return scope.watch if scope is not None else None
