"""Values that code outside of torch can reach: what is behind them is looked into, what is read of them is noted."""

from __future__ import annotations

import array
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
import sys
import threading
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .. import contents, libraries, patches
from .. import torch_private as private
from ..contents import PLAIN, Met, flat
from ..libraries import user_class
from ..patches import ABSENT
from . import bytecode, outside
from .outside import decimal_context
from .table import (
    ATTRIBUTE,
    CALL,
    CLASS,
    DICT,
    ITEM,
    MAPPED,
    MEMORY,
    NO_ATTRIBUTE,
    NO_ITEM,
    OWN,
    SEQUENCE,
    UNMAPPED,
    Asked,
    Table,
)

_MANY = 20_000  # elements of a container that are compared at every step
BYTES = 1 << 20  # of an array or tensor
# classes in one container: with more it is a registry, and what stands on the classes themselves is not followed
_REGISTRY = 8
_LOCK = type(threading.Lock())
ATOMS = PLAIN | {
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
LOOKS_INSIDE = frozenset(("vars", "__dict__"))  # what code names that reads all attributes at once
_VIEWS = frozenset((types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())))


class Values(Table):
    """Containers, objects, classes, functions, arrays and generators that were met, as they were before the trace."""

    _scope: patches.Scope  # of the capture, from when it is entered
    _random_types: tuple[Any, ...]  # classes of generators

    def __init__(self, module: nn.Module, known_as: nn.Module | None = None) -> None:
        super().__init__(module, known_as)
        # the export's to change and to restore
        self._tables = {id(d) for m in module.modules() for d in (m._parameters, m._buffers, m._modules)}
        self._keep: list[Any] = [m.__dict__ for m in module.modules()]
        self._met: dict[int, Met] = {}  # containers, and dictionaries of objects
        self._objects: dict[int, Any] = {}  # objects whose attributes are watched
        self._past_reads = False  # code has run that may read them past what watches
        self._class_looks = False  # and that may read the dictionaries of their classes
        self._object_reads: set[tuple[int, str]] = set()
        self._by_name: dict[int, Asked] = {}  # objects that read their attributes by themselves, by their dictionaries
        self._own_dicts: set[int] = set()
        self.spaces: dict[type, Any] = {}  # dictionaries of classes
        self._dict_owner: dict[int, str] = {}  # of modules outside of the tree
        self._contents: dict[int, str] = {}  # met containers whose contents count
        self._patched: dict[type, Any] = {}  # -> its own __getattribute__ from before
        self._classes: dict[type, tuple[Any, Any, str]] = {}  # -> token, dictionary before, name
        # of code that ran, in the graph and (quiet) in what is kept in PyTorch; classes whose attributes of these names
        # are compared
        self._attribute_names: tuple[set[str], set[str]] = set(), set()
        self._watched: set[tuple[type, bool]] = set()
        self._functions: dict[int, list[types.FunctionType]] = {}
        self._generators: dict[int, tuple[Any, Any, str, set[Any]]] = {}
        self._arrays: dict[int, tuple[Any, Any, str, set[Any]]] = {}
        self._bytes: dict[int, tuple[Any, bytes, str, set[Any]]] = {}
        self._tensors: dict[int, tuple[Tensor, int | None, Tensor]] = {}
        self._caches: dict[int, tuple[Any, Any]] = {}
        self._belong: list[tuple[dict[str, Any], str]] = []  # attributes of functions and such
        self._defaults: dict[int, tuple[types.FunctionType, tuple[Any, ...], Any]] = {}
        self._context: dict[int, tuple[contextvars.ContextVar[Any], Any, Any]] = {}
        self._slots: dict[tuple[int, str], tuple[Any, str, Any, str, Any]] = {}
        # ids of functions and of attributes of others, looked into by code in the graph and (quiet) by what is kept
        self._looked: tuple[set[int], set[int]] = set(), set()
        self._seen: set[int] = set()
        self._seen_quietly: set[int] = set()
        self._loggers: dict[int, logging.Logger] = {}
        self._locks: dict[int, tuple[Any, str]] = {}
        self._alive: list[Any] = []
        self._weakly: set[int] = set()  # met by a weak reference

    def looks_inside(self) -> bool:
        """Forward may read the attributes of its arguments all at once."""
        return bool(LOOKS_INSIDE & self._attribute_names[False])

    def met(self) -> list[Any]:
        """Tensors and modules that code has come to otherwise than by the tree."""
        return [v for v in self._alive if isinstance(v, (Tensor, nn.Module))]

    def caches(self) -> list[Any]:
        """functools.lru_cache functions that were met."""
        return [cache for cache, _ in self._caches.values()]

    def _discover(self, v: Any, token: Any, name: str) -> None:
        """Looks behind a value that code outside of torch can reach."""
        t = type(v)
        if t in ATOMS or isinstance(v, types.GenericAlias):
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
        if isinstance(v, enum.Enum):
            if user_class(t):
                self._belongings(v, token, name)
        elif isinstance(v, Tensor):
            self._meet(vars(v), token, f"attributes of {name}")
            if t is Tensor and id(v) not in self._tensors and v.layout is torch.strided and v.device.type != "meta":
                with private.without_modes():
                    self._tensors[id(v)] = v, contents.version_of(v), v.detach().clone()
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
        elif t is functools.singledispatchmethod:
            self._discover(v.dispatcher, token, name)
        elif t is functools.partial or t is functools.partialmethod:
            self._belongings(v, token, name)
            for what in ("func", "args", "keywords"):
                self._row((ATTRIBUTE, v, what, getattr(v, what)), f"{what} of {name}")
            self._discover(v.func, token, name)
            for x in v.args:
                self._discover(x, token, name)
            self._discover(v.keywords, token, name)
        elif isinstance(v, type):
            if user_class(v):
                self._watch_class(v, token)
        elif isinstance(v, types.ModuleType):  # of others the attributes are noted where they are named
            if getattr(v, "__spec__", None) is None:  # one that was made, not imported
                self._belongings(v, token, name)
        elif isinstance(v, functools._lru_cache_wrapper):
            self._caches.setdefault(id(v), (v, v.cache_info()))
            self._discover(v.__wrapped__, token, name)
        elif isinstance(v, self._random_types):
            if isinstance(v, torch.Generator):
                self._stop(f"reads {name}, a generator of random numbers of its own")
            self._generators.setdefault(id(v), (v, outside.generator_state(v), name, set()))[3].add(token)
        elif isinstance(v, weakref.ref):
            self._weak(v, token, name)
        elif t is contextvars.ContextVar:
            self._row((CALL, None, functools.partial(v.get, None), v.get(None)), name)
            if (value := v.get(ABSENT)) is not ABSENT:
                self._context.setdefault(id(v), (v, value, token))
            with contextlib.suppress(LookupError):
                self._discover(v.get(), token, name)  # it may be its own default
        elif t is types.CellType:
            if bytecode.cell(v) is ABSENT:
                self._row((NO_ATTRIBUTE, v, "cell_contents", None), name)
            else:
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
            what = f"reads {name}, {_article(t.__qualname__)}"
            if t is memoryview or t.__module__.partition(".")[0] in sys.stdlib_module_names:  # csv.writer, hashlib
                self._stop(f"{what}, whose state cannot be compared or put back")
            self._problem(token, f"{what} that is not written in Python: its state cannot be compared")

    def _weak(self, r: weakref.ref[Any], token: Any, name: str) -> None:
        """What it leads to may go at any time: no row holds that."""
        met = r()
        if met is None:
            self._row((CALL, None, functools.partial(r), None), name)
            return
        with contextlib.suppress(TypeError):
            again = weakref.ref(met)
            self._row((CALL, None, lambda: (now := r()) is not None and now is again(), True), name)
        self._weakly.add(id(met))
        self._discover(met, token, name)

    def _meet(self, v: Any, token: Any, name: str) -> list[Any]:
        met = self._met.get(id(v))
        if met is None:
            met = self._met[id(v)] = Met(v, contents.copy(v), name, token)
        met.tokens.add(token)
        return met.copy

    def _container(self, v: Any, token: Any, name: str, asked: bool = False) -> None:
        """asked: the dictionary of an object, of which code has got nothing but what it asks the object for."""
        if id(v) in self._tables:
            return
        if not asked and not self.quiet and id(v) in self._by_name:
            self._by_name[id(v)].whole = True
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
            if type(x) not in ATOMS and not (registry and isinstance(x, type)):
                self._discover(x, token, name)
        if isinstance(v, collections.defaultdict):
            self._row((ATTRIBUTE, v, "default_factory", v.default_factory), f"default_factory of {name}")
        if user_class(type(v)):
            self._object(v, token, name)
        else:
            self._belongings(v, token, name)

    def _belongings(self, v: Any, token: Any, name: str) -> None:
        """Attributes of what is no object of the user's: of a function, a partial, a member of an Enum, an
        OrderedDict. They are compared where code that runs has one of their names."""
        own = contents.attributes(v)
        if own is None or not self._first_look(own):
            return
        if id(own) not in self._met:
            self._belong.append((own, name))
        self._meet(own, token, f"attributes of {name}")
        for key, x in list(own.items()):
            if type(x) not in ATOMS and key[:2] != "__":
                self._discover(x, token, f"{name}.{key}")

    def _first_look(self, v: Any) -> bool:
        """Rows are made of what code in the graph looks into, whoever has come to it before."""
        if id(v) in self._looked[False] or (self.quiet and id(v) in self._looked[True]):
            return False
        self._looked[self.quiet > 0].add(id(v))
        return True

    def _object(self, v: Any, token: Any, name: str) -> None:
        """An object of a class written in Python: what is read of it is noted one by one."""
        cls = type(v)
        self._objects[id(v)] = v
        self._watch_class(cls, token)
        own = contents.attributes(v)
        self._same_object(v, own, name)
        if own is not None:
            self._meet(own, token, name)
            self._own_dicts.add(id(own))
        if not self._patch(cls) or self._reads_itself(cls):
            if own is not None:
                by_name = self._asks(v, own)
                self._container(own, token, name, by_name)
        elif self._past_reads:
            self._all_read(v, token)
        if self._class_looks:
            self._looks_at_class(cls, token)

    def _asks(self, v: Any, own: dict[str, Any]) -> bool:
        """Can all that code gets of this object be noted by the names that it asks for?"""
        cls = type(v)
        reads = next((base for base in cls.__mro__ if "__getattribute__" in vars(base)), None)
        if id(v) in self._weakly or reads not in self._patched:
            return False
        self._by_name.setdefault(id(own), Asked(v, own)).whole |= id(own) in self._contents or self._past_reads
        return True

    def _same_object(self, v: Any, own: dict[str, Any] | None, name: str) -> None:
        """Rows of its attributes are of its class and its dictionary: they stay its."""
        if id(v) not in self._weakly:
            self._row((CLASS, v, None, type(v)), f"the class of {name}")
            if own is not None:
                self._row((OWN, v, None, own), f"__dict__ of {name}")

    def _all_read(self, v: Any, token: Any) -> None:
        """All attributes of an object that is watched may have been read."""
        own, cls = contents.attributes(v), type(v)
        if own is not None:
            self._container(own, token, cls.__qualname__)
        for base in cls.__mro__:
            for name, member in vars(base).items():
                if type(member) is types.MemberDescriptorType:
                    with contextlib.suppress(AttributeError):
                        self._object_read(v, name, member.__get__(v))

    def _foreign_module(self, m: nn.Module, token: Any, name: str) -> None:
        """A module that is not part of the tree (a global, one hidden in a list)."""
        for sub in m.modules():
            own = sub.__dict__
            if id(own) in self._names or not self._first_look(own):
                continue
            self._dict_owner[id(own)] = name
            self._objects[id(sub)] = sub
            self._watch_class(type(sub), token)
            self._same_object(sub, own, name)
            self._meet(own, token, name)
            for registry in ("_parameters", "_buffers", "_modules"):
                if id(own[registry]) not in self._tables:  # else a copy of a module of the tree (copy.copy shares them)
                    self._meet(own[registry], token, name)
                    if not self.quiet:
                        self._contents[id(own[registry])] = name

    def _function(self, f: types.FunctionType, token: Any, name: str) -> None:
        if not self._first_look(f):
            return
        known = self._functions.setdefault(id(f.__code__), [])
        if not any(f is g for g in known):
            known.append(f)
        if not libraries.is_library(f.__code__.co_filename):
            self._defaults[id(f)] = f, (f.__code__, f.__defaults__, f.__kwdefaults__), token
            self._belongings(f, token, f.__qualname__)
        for d in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            if type(d) not in ATOMS:
                self._discover(d, token, f"a default argument of {f.__qualname__}")
        inner = getattr(f, "__wrapped__", None)
        if inner is not None and type(inner) is types.FunctionType:
            self._function(inner, token, name)
        if type(registry := getattr(f, "registry", None)) is types.MappingProxyType:  # of functools.singledispatch
            self._discover(registry, token, f"the implementations of {f.__qualname__}")

    def _array(self, v: Any, token: Any, name: str) -> None:
        if v.nbytes > BYTES or v.dtype.hasobject:
            what = "of objects" if v.dtype.hasobject else f"of {v.nbytes} bytes: too large to compare at every step"
            self._problem(token, f"reads {name}, an array {what}")
            return
        self._arrays.setdefault(id(v), (v, v.copy(), name, set()))[3].add(token)
        for what in ("shape", "strides", "dtype"):
            self._row((ATTRIBUTE, v, what, getattr(v, what)), f"{what} of {name}")
        if v.flags.c_contiguous:
            self._row((MEMORY, v, "__array_struct__", v.tobytes()), name)
        else:
            self._row((CALL, None, v.tobytes, v.tobytes()), name)

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
        space = self.spaces.get(cls)
        if space is None:
            view = vars(cls)
            (behind,) = gc.get_referents(view) or (None,)
            space = self.spaces[cls] = behind if type(behind) is dict and behind == view else view
        return space

    def _mapped(self, cls: type, name: str, token: Any) -> None:
        if name[:2] == "__" and name != "__call__":
            return
        own = self._space(cls)
        value = own[name]
        self._row((ITEM if type(own) is dict else MAPPED, own, name, value), f"{cls.__qualname__}.{name}")
        if type(value) not in ATOMS and (
            cls not in self._classes or self._classes[cls][1].get(name, ABSENT) is value
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

    def _looks_at_class(self, cls: type, token: Any) -> None:
        """The program's own code may read all that stands on a class of its own."""
        for base in cls.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if user_class(base) and (file is None or libraries.of_program(file)):
                for name in list(vars(base)):
                    self._mapped(base, name, token)

    def _patch(self, cls: type) -> bool:
        """Reads of the attributes of this class's objects are noted from now on. False: that is not possible."""
        if issubclass(cls, nn.Module) or any(base in self._patched for base in cls.__mro__):
            return True
        original = cls.__getattribute__
        own = cls.__dict__.get("__getattribute__", ABSENT)
        objects, me, ident = self._objects, self._thread, threading.get_ident

        def getattribute(obj: Any, name: str) -> Any:
            if id(obj) not in objects or not self._active or ident() != me:
                return original(obj, name)
            try:
                value = original(obj, name)
            except AttributeError:
                self._object_read(obj, name, ABSENT)
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
        asked = None if self.quiet else self._by_name.get(id(contents.attributes(obj)))
        if asked is not None:
            asked.note(name, value)
        if self.quiet:
            if value is not ABSENT and isinstance(getattr(type(obj), name, None), types.MemberDescriptorType):
                self._slots.setdefault(key, (obj, name, value, f"{type(obj).__qualname__}.{name}", type(obj)))
            return
        if key in self._object_reads:
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
            if value is not ABSENT:
                self._slots[key] = obj, name, self._slots.get(key, (obj, name, value))[2], what, token
                self._row((ATTRIBUTE, obj, name, value), what)
            else:
                self._row((NO_ATTRIBUTE, obj, name, None), what)
        else:
            if own is not None:
                self._row((NO_ITEM, own, name, None), what)
            self._class_read(cls, name, token)
        if value is not ABSENT and type(value) not in ATOMS:
            self._discover(value, token, what)


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
