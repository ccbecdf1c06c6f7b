"""Code that runs during a capture, as a profile function in C tells of it: what its bytecode names is followed."""

from __future__ import annotations

import builtins
import collections
import contextlib
import decimal
import functools
import gc
import inspect
import io
import operator
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C, contents, libraries
from ..contents import flat
from ..errors import CaptureError
from ..frames import OWN_DIR, frozen, is_user_file, outwards, tried
from ..libraries import is_library, user_class
from ..patches import ABSENT
from . import bytecode, outside
from .bytecode import UNKNOWN
from .modules import Modules
from .outside import decimal_context
from .table import ATTRIBUTE, CALL, DICT, ITEM, MAPPED, NO_ATTRIBUTE, NO_ITEM, UNMAPPED, Asked, for_itself
from .values import ATOMS, LOOKS_INSIDE

_CHECKPOINTS = frozenset(("checkpoint", "checkpoint_sequential", "_gradient_checkpointing_func"))
_NUMBERS = frozenset(("int", "float", "bool", "complex", "numbers"))
_NAMES = frozenset(("__name__", "__qualname__"))
_BUILT_IN = (types.BuiltinFunctionType, type, type(...), type(NotImplemented))
_PAST_READS = frozenset(("__getattribute__", "getattr_static", "__get__"))  # ways past what notes reads of objects
_SETTINGS = (bool, int, float, str, type(None))  # that a program may put on, or set in, modules of others


class Calls(Modules):
    """Globals, closure variables, comparisons, and calls of what says, waits, draws or asks."""

    _opens: Callable[..., Any]  # Python's own open
    _for_good: frozenset[Any]  # C functions that change what no one can put back
    _for_good_types: tuple[type, ...]  # whose methods do

    def __init__(self, module: nn.Module, known_as: nn.Module | None = None) -> None:
        super().__init__(module, known_as)
        # modules kept in PyTorch that may checkpoint: reentrant checkpoints give gradients to a whole backward alone
        self.checkpointed: set[str] = set()
        self._closures: dict[tuple[int, tuple[int, ...]], tuple[types.CodeType, dict[str, Any]]] = {}
        self._closures_read: set[Any] = set()
        self._inner: set[int] = set()  # ids of code objects that executed code makes functions of
        self._opened: dict[int, Any] = {}  # files opened for reading by the traced code
        self._entered: set[tuple[int, bool]] = set()
        self._given_class: dict[int, set[str]] = {}  # arguments of code that are compared with int or float
        self._given_typed: dict[int, set[str]] = {}  # arguments and closure variables of code whose type() it asks
        self.symbolic = False  # sizes or numbers of the trace are symbols
        self.identity = False  # forward may ask which tensors are one object
        self._which = False  # or which containers
        self.asked: Any = None  # capture/refused.py: what forward asks of tensors, while it runs
        self._autocast_types = [ask() for ask in outside.AUTOCAST_TYPES]

    @staticmethod
    def _chosen(code: types.CodeType) -> int:
        """Bits of _C.watch_calls: of which code is told that it is entered, and what it calls in C."""
        path = code.co_filename
        return (not is_library(path) or code in outside.SPECIAL) + 2 * (not for_itself(path))

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
                raise self._class_of_number(frame)
        if key in self._given_typed and not self.quiet:
            if any(type(frame.f_locals.get(n)) in contents.SYMBOLIC for n in self._given_typed[key]):
                raise self._class_of_number(frame)
        free = code.co_freevars and [n for n in code.co_freevars if n[:2] != "__"]  # others are Python's, dataclasses'
        if free and key not in self._inner:
            values = {n: frame.f_locals[n] for n in free if n in frame.f_locals}
            which = key, tuple(id(v) for v in values.values())
            if which not in self._closures or (not self.quiet and which not in self._closures_read):
                self._closures[which] = code, values
                if not self.quiet:
                    self._closures_read.add(which)
                for n, v in values.items():
                    if type(v) not in ATOMS:
                        known = bytecode.analyse(code)
                        self._discover(v, key, f"{n}, a closure variable of {bytecode.at(code)}")
                        self._follow(v, known.chains.get(n, ()), key)
                        self._puts(v, known.chains.get(n, ()), known.puts, key)

    def _first_call(self, frame: types.FrameType, code: types.CodeType) -> None:
        known = bytecode.analyse(code)
        asked = {"__name__", "__qualname__", "__module__"}.intersection(code.co_names)
        if asked and not self.quiet and _names_of_tensors(code):
            self._problem(id(code), f"compares the {min(asked)} of a class with a tensor's: isinstance can be followed")
        key = id(code)
        if {"object", "__getattribute__"} <= known.names:
            for where, own in self._dicts:
                self._looks_into(where, own)
        if libraries.of_program(code.co_filename):
            self._reads_past(frame, known)
        for how, pair in known.compared:
            self._compares(frame, how, pair)
        for x in known.typed if self.symbolic and not self.quiet else ():
            self._asks_type(frame, known, x)
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
                    self._globals.setdefault((id(space), name), (space, name, ABSENT, bytecode.at(code), key))
                self._builtin(name, key, code)
                continue
            value = space[name]
            what = f"global {name} of {bytecode.at(code)}"
            self._puts(value, known.chains.get(name, ()), known.puts, key)
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
            if type(value) not in ATOMS:
                self._discover(value, key, what)
                if isinstance(value, type):
                    self._follow(value, known.chains.get(name, ()), key)
                elif (
                    getattr(value, "__self__", None) is not None
                    and "numpy.random" in type(value.__self__).__module__ + "."
                ):
                    self._numpy.add(key)
        by_name = ("__name__",) if {"modules", "__name__"} <= known.names else ()  # sys.modules[__name__]
        for name in (*known.imports, *(space.get(n, "") for n in by_name)):
            module = sys.modules.get(name)
            if module is not None:
                for n in known.names:
                    self._follow(module, [(n,)], key)
                self._puts(module, [(n,) for n in known.names], known.puts, key)

    def _reads_past(self, frame: types.FrameType, known: bytecode.Code) -> None:
        """The user's own code is entered, which may read attributes otherwise than by their names."""
        code, key = frame.f_code, id(frame.f_code)
        if not self._past_reads and _PAST_READS & known.names and code.co_name != "__getattribute__":
            self._past_reads = True
            for obj in list(self._objects.values()):
                self._all_read(obj, self._module_at(frame))
        if LOOKS_INSIDE & known.names:
            named = [frame.f_globals.get(name) for name in known.globals]
            classes = [x for x in named if isinstance(x, type) and user_class(x)]
            if {"type", "__class__"} & known.names and not self._class_looks:
                self._class_looks = True
                classes += [type(obj) for obj in self._objects.values()]
            for cls in dict.fromkeys(classes):
                self._looks_at_class(cls, key)
        if "__globals__" in known.names:
            self._problem(key, "looks through the __globals__ of a function")

    def _builtin(self, name: str, key: int, code: types.CodeType) -> None:
        """A name that may stand in builtins, where somebody has put it."""
        space = vars(builtins)
        value = space.get(name, ABSENT)
        if value is ABSENT or name[:2] == "__" or type(value) in _BUILT_IN:
            return
        if type(value) is types.FunctionType and (
                is_library(value.__code__.co_filename) or value.__code__.co_filename.startswith(OWN_DIR)):  # fmt: skip
            return
        what = f"builtin {name} of {bytecode.at(code)}"
        self._row((ITEM, space, name, value), what)
        if type(value) not in ATOMS:
            self._discover(value, key, what)

    def _puts(self, owner: Any, chains: Any, names: frozenset[str], token: Any) -> None:
        """The code may assign attributes of these names to modules (of Python) and classes that it names."""
        if not names:
            return
        holders = {id(owner): owner}
        for chain in chains:
            at = owner
            for name in chain:
                at = vars(at).get(name) if isinstance(at, (types.ModuleType, type)) else None
                holders[id(at)] = at
        for holder in holders.values():
            if isinstance(holder, (types.ModuleType, type)) and type(vars(holder)) in (dict, types.MappingProxyType):
                for name in names:
                    was = vars(holder).get(name, ABSENT)
                    self._put_on.setdefault((id(holder), name), (holder, name, was, token))

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
                    if isinstance(inspect.getattr_static(type(at), name, None), outside.OF_MODULES):
                        self._row((ATTRIBUTE, at, name, getattr(at, name)), f"{at.__name__}.{name}")
                    break
                value = space[name]
                if at.__name__.partition(".")[0] == "torch" and callable(value):  # another may be put in its place
                    self._row((ITEM, space, name, value), f"{at.__name__}.{name}")
                elif at is sys and name == "argv":
                    self._discover(value, token, "sys.argv")
                elif name[0] != "_" and type(value) in _SETTINGS:
                    self._row((ITEM, space, name, value), f"{at.__name__}.{name}")
                if at.__name__.partition(".")[0] not in libraries.LIBRARIES:
                    what = f"{at.__name__}.{name}"
                    self._row((ITEM, space, name, value), what)
                    self._globals.setdefault((id(space), name), (space, name, value, what, token))
                    if type(value) not in ATOMS:
                        self._discover(value, token, what)
                at = value

    def _compares(self, frame: types.FrameType, how: str, pair: tuple[Any, Any]) -> None:
        """Code that is entered will compare these: may they be tensors, or the classes of tensors?"""
        if self.quiet:
            return
        values = [bytecode.operand(frame, x) for x in pair]
        classes = any(x is not None and x[2][-1:] == ("__class__",) for x in pair)  # no tensors or containers then
        if any(isinstance(v, type) and issubclass(v, Tensor) for v in values):
            if any(v is UNKNOWN for v in values):
                self._stop(f"compares the class of a tensor by `{'is' if how == 'IS_OP' else '=='}`: isinstance can be "
                           "followed", frame)  # fmt: skip
        elif self.symbolic and any(v is UNKNOWN for v in values) and any(v is int or v is float for v in values):
            unknown = [x for x, v in zip(pair, values, strict=True) if v is UNKNOWN]
            if any(x is None or x[0] != "argument" or x[2] for x in unknown):
                raise self._class_of_number(frame)
            self._given_class.setdefault(id(frame.f_code), set()).update(x[1] for x in unknown)
        elif how == "IS_OP" and all(v is UNKNOWN or isinstance(v, Tensor) for v in values):
            self.identity = self.identity or not classes
        if how == "IS_OP":
            self._which = self._which or not classes and all(v is UNKNOWN or contents.container(v) for v in values)
            for x, v in zip(pair, values, strict=True):
                self._same_container(frame, x, v)

    def _asks_type(self, frame: types.FrameType, known: bytecode.Code, x: Any) -> None:
        """type() of what may be a symbol for a number."""
        if x is not None and x[0] in ("argument", "free") and not x[2]:
            self._given_typed.setdefault(id(frame.f_code), set()).add(x[1])
        elif x is not None and x[0] == "size":
            raise self._class_of_number(frame)
        elif bytecode.operand(frame, x) is UNKNOWN:
            variable = x is not None and not x[2]
            if known.names & (_NUMBERS | _NAMES if variable else _NUMBERS):
                raise self._class_of_number(frame)

    def _class_of_number(self, frame: types.FrameType) -> CaptureError:
        """What to raise; where forward may catch it, its trace is not that of the numbers."""
        reason = "asks for the class of a number: what stands for sizes and numbers has another"
        if any(is_user_file(f.f_code.co_filename) and tried(f) for f in outwards(frame.f_back)):
            self.problem_at(frame, reason, True)
        return CaptureError(reason, "", frame.f_code.co_filename, frame.f_lineno)

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
                if special == "thread":
                    self._discover(ask(), self._module_at(by), "the thread")
            return
        if special == "autocast":
            if frame.f_locals["enabled"] and frame.f_locals["dtype"] is None:
                self._asks_autocast()
            return
        if special in ("key", "class"):
            if self.asked is not None and by is not None and not is_library(by.f_code.co_filename):
                if special == "key":
                    self.asked.as_key(frame.f_locals["self"])
                else:
                    self.asked.asks_class(frame.f_locals["instance"])
            return
        # the export passes every call of torch through its own; a trace has a len() of its own
        passed = (*libraries.TRACER, OWN_DIR) if special == "all of environ" else libraries.TRACER
        while by is not None and by.f_code.co_filename.startswith(passed):
            by = by.f_back
        where, user = self._reader(by)
        if special == "environ":
            if user is not None:
                of, key = frame.f_locals["self"], frame.f_locals["key"]
                with contextlib.suppress(TypeError):  # it is asked for what is no name
                    raw = of.encodekey(key)
                    row = (ITEM, of._data, raw, of._data[raw]) if raw in of._data else (NO_ITEM, of._data, raw, None)
                    self._row(row, f"environment variable {key}")
        elif special == "all of environ":
            if user is not None:
                data = frame.f_locals["self"]._data
                self._row((DICT, data, None, flat(data)), "the environment's variables")
        elif special == "log":
            at: types.FrameType | None = frame
            while at is not None and f"{os.sep}logging{os.sep}" in at.f_code.co_filename:
                at = at.f_back
            # not what torch logs of itself
            if at is not None and not is_library(at.f_code.co_filename) and not libraries.once(frame):
                self.says.setdefault((at.f_code.co_filename, at.f_lineno), "logs")
        elif user is not None:
            self._problem_at(where, special.format(code.co_name), user)

    def _asks_autocast(self) -> None:
        for ask, was in zip(outside.AUTOCAST_TYPES, self._autocast_types, strict=True):
            if ask() is was:  # else a block of forward's is around
                self._row((CALL, None, ask, was), "what autocast computes in")

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
        if function is print or stream is not None:
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
        elif function in outside.AUTOCAST:
            self._asks_autocast()
        elif function in (operator.is_, operator.is_not):
            self.identity = self._which = True
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
        elif function.__name__ in outside.OF_COPIES:
            self._copied(function.__self__, where)
        elif function in outside.PICKLES:
            self._problem_at(where, "pickles an object", user)
        else:
            self._problem_at(where, "asks for the time", user)

    def _copied(self, obj: Any, where: str) -> None:
        """An object is copied (copy, deepcopy), or asked for its state: in C, past what notes reads."""
        own = contents.attributes(obj)
        if own is not None and id(own) in self._names:
            self._looks_into(self._names[id(own)], own)
        elif own is not None and id(own) in self._dict_owner:
            for name, value in list(own.items()):
                self._object_read(obj, name, value)
        elif id(obj) in self._objects:
            self._all_read(obj, where)

    def equals(self) -> bool:
        """Can forward not tell a list that it reads from an equal one? It can when it compares by `is`."""
        return not self._which

    def shared(self) -> list[Any]:
        """Containers that stand at several places among those that code can reach."""
        places = [met.copy for met in self._met.values() if type(met.value) is not tuple]
        places += [[*own.values()] for own in self._attributes.values()]
        places += [[*own.values()] for _, own, _ in self._classes.values()]
        places += [[value] for _, _, value, *_ in (*self._globals.values(), *self._put_on.values())]
        places += [[*values.values()] for code, values in self._closures.values() if bytecode.stores_free(code)]
        todo, found = [x for of in places for x in of], []
        while todo:
            v = todo.pop()
            if type(v) is tuple:
                todo += v
            elif type(v) is types.BuiltinMethodType and type(v.__self__) in (list, dict, set):
                found += [v.__self__] * 2  # wherever else it stands
            elif type(v) in (list, dict, set):
                found.append(v)
        times = collections.Counter(map(id, found))
        return [v for v in found if times[id(v)] > 1]

    def asked_by_name(self) -> list[Asked]:
        """Objects that read their attributes by themselves; whole where code may have got at those past what notes
        reads, or where asking says something."""
        past = any(_PAST_READS & set(c.co_names) for c in self._ran.values() if c.co_name != "__getattribute__")
        for of in self._by_name.values():
            of.whole = of.whole or past or bool(self.says)
        return [*self._by_name.values()]

    def _finish(self) -> None:
        """Rows for closure variables, too, and for a __call__ that is put on a class of modules."""
        super()._finish()
        for base in {base for cls in self._classes_of.values() for base in cls.__mro__}:
            if issubclass(base, nn.Module) and user_class(base):
                space = self._space(base)
                there, absent = (ITEM, NO_ITEM) if type(space) is dict else (MAPPED, UNMAPPED)
                row = (there, space, "__call__", space["__call__"]) if "__call__" in space else (
                    absent, space, "__call__", None)  # fmt: skip
                self._row(row, f"{base.__qualname__}.__call__")
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
                if not self._cells(code, values) and frozen():
                    self._problem(id(code), f"reads closure variables of {bytecode.at(code)}, which gc.freeze() hides")

    def _cells(self, code: types.CodeType, values: dict[str, Any]) -> bool:
        """Rows for the cells of the function that was called with these values in its closure. Cells that were assigned
        are put back."""
        stores = bytecode.stores_free(code)
        for f in self._functions.get(id(code), ()):
            cells = dict(zip(code.co_freevars, f.__closure__ or (), strict=True))
            now = {n: bytecode.cell(c) for n, c in cells.items()}
            if all(n[:2] == "__" or now[n] is values.get(n, ABSENT) or n in stores for n in cells):
                for n, c in cells.items():
                    old = values.get(n, ABSENT)
                    if now[n] is not old and old is not ABSENT:
                        c.cell_contents = old
                        self._problem(id(code), f"assigns {n}, a closure variable of {bytecode.at(code)}")
                    elif old is not ABSENT:
                        what = f"{n}, a closure variable of {bytecode.at(code)}"
                        self._row((ATTRIBUTE, c, "cell_contents", old), what)
                    elif now[n] is ABSENT and n[:2] != "__":
                        what = f"{n}, an empty closure variable of {bytecode.at(code)}"
                        self._row((NO_ATTRIBUTE, c, "cell_contents", None), what)
                return True
        return False


def _names_of_tensors(code: types.CodeType) -> bool:
    """Has the code the name of a class of tensors, or of torch, among its constants?"""
    flat = [x for c in code.co_consts for x in (c if isinstance(c, (tuple, frozenset)) else (c,))]
    return any(x in ("Tensor", "Parameter", "FakeTensor", "torch", "torch.Tensor") for x in flat if type(x) is str)
