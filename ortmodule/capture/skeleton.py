"""Flattening of what goes into and comes out of a module: tensors become numbered slots, the rest a skeleton.

A captured graph knows only flat lists of tensors. Arguments and results of real modules are nested containers,
dataclasses, Hugging Face ModelOutputs and caches, with None and Python numbers in between. Two walks are kept in the
same order:

* flatten_inputs runs at every step. It yields the tensors, the int/float leaves, and a hashable key of everything else
that a
  capture bakes in (container types and lengths, names, None, bools, strings, dtypes, ranks). Nothing is built but three
  lists.
* skeleton runs once per capture. It turns an object into a function `fill(leaves)` that builds an equal fresh object
from new leaves.
  Objects are rebuilt by __new__ plus their items plus __dict__, so no class has to be registered anywhere and no
  __init__ runs.

Invariants: both walks visit leaves in the same order (keyword arguments by name; __dict__ in insertion order); a leaf
that occurs twice as the same object keeps its identity in the filled copy; objects that hold no leaf are constants,
shared, not copied, except what callers are free to edit: plain containers, caches, arrays, and objects of a result that
nothing else holds.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import functools
import gc
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..frames import frozen

Fill = Callable[[list[Any]], Any]

_EDITED = (set, collections.deque, bytearray, array.array)  # copied, as lists and dicts are

# Never looked into: they hold no data of one call, or are singletons.
_ATOMS = (
    nn.Module, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, str, bytes, bool, complex, range,
)


class Unreadable(TypeError):
    """An object whose contents cannot be told, so nothing may be made of it that outlives the call."""


_SMALL_ARRAY = 1 << 12  # bytes of a numpy array whose bytes are its key; larger ones are read as other objects are
_DEEP = 8  # levels of objects in objects, which may hold themselves
_INT64 = 1 << 63  # other integers are constants


class FlatInputs(NamedTuple):
    """Arguments of one call: tensor leaves, int/float leaves, and a hashable key of all the rest."""

    tensors: list[Tensor]
    scalars: list[int | float]
    key: Hashable


def _is_config(x: object) -> bool:
    return any(c.__name__ in ("PretrainedConfig", "PreTrainedConfig") for c in type(x).__mro__)


def is_cache(x: object) -> bool:
    return any(c.__name__ in ("Cache", "CacheLayerMixin") for c in type(x).__mro__)


def is_array(x: object) -> bool:
    return type(x).__module__ == "numpy" and type(x).__name__ == "ndarray"


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    """Names of the attributes that objects of this class have in slots."""
    found = []
    for c in cls.__mro__:
        own = c.__dict__.get("__slots__", ())
        for s in (own,) if isinstance(own, str) else own:
            if s not in ("__dict__", "__weakref__"):
                private = s.startswith("__") and not s.endswith("__")
                found.append(f"_{c.__name__.lstrip('_')}{s}" if private else s)
    return tuple(found)


def state_of(x: object) -> dict[str, Any] | None:
    """Attributes of an object that is worth looking into, else None."""
    if isinstance(x, _ATOMS) or _is_config(x):
        return None
    state = getattr(x, "__dict__", None)
    slots = _slots(type(x))  # type: ignore[arg-type]
    if slots:
        state = dict(state or {})
        state.update({s: getattr(x, s) for s in slots if hasattr(x, s)})
    return state


class _Bare:
    """The layout of an object whose state is its attributes."""


@functools.cache
def _is_bare(cls: type) -> bool:
    """Whether there is nothing in an object of this class but its __dict__ and slots (no memory of a C type:
    random.Random, iterators)."""
    return cls.__basicsize__ <= _Bare.__basicsize__ + 8 * len(_slots(cls)) and cls.__itemsize__ == 0


def _exact(x: Any) -> Hashable:
    """Equal for two constants only where nothing can tell them apart: 0.0 and -0.0, 1 and True, Decimal("1.0") and
    Decimal("1.00") are equal, and not the same; what a word's or number's own class makes of == says nothing."""
    if isinstance(x, complex):
        return type(x), x.real.hex(), x.imag.hex()
    if isinstance(x, float):
        return type(x), float.hex(x)
    if isinstance(x, (int, str, bytes)) and not isinstance(x, enum.Enum):
        plain: Any = int.__int__ if isinstance(x, int) else str.__str__ if isinstance(x, str) else bytes.hex
        return type(x), plain(x)
    if type(x).__module__ in ("numpy", "decimal", "datetime"):
        return type(x), x.__reduce_ex__(4)  # type: ignore[return-value]
    return type(x), x


def _visit_constant(x: Any, what: str, key: list[Any], depth: int) -> None:
    """What the skeleton takes as it is: its numbers are constants, too."""
    tensors: list[Tensor] = []
    scalars: list[int | float] = []
    _visit(x, tensors, scalars, key, depth)
    if tensors:
        raise Unreadable(f"a {what} that holds a tensor")
    key.append(tuple([_exact(y) for y in scalars]))


def _visit(x: Any, tensors: list[Tensor], scalars: list[int | float], key: list[Any], depth: int) -> None:
    t = type(x)
    if t is Tensor or isinstance(x, Tensor):
        tensors.append(x)
        key.append(x.dtype)
        key.append(x.ndim)
        key.append(x.get_device())
    elif x is None:
        key.append(None)
    elif t is float or t is int and -_INT64 <= x < _INT64:
        scalars.append(x)
        key.append(t)
    elif t is bool or t is str:
        key.append(t)
        key.append(x)
    elif t is list or t is tuple:
        key.append(t)
        key.append(len(x))
        for y in x:
            _visit(y, tensors, scalars, key, depth + 1)
    elif isinstance(x, dict):
        key.append(t)
        key.append(len(x))
        for k, y in x.items():
            if type(k) is str:
                key.append(k)
            else:
                _visit_constant(k, "key", key, depth + 1)
            _visit(y, tensors, scalars, key, depth + 1)
        _visit_state(x, tensors, scalars, key, depth)
    elif isinstance(x, (list, tuple)):
        key.append(t)
        key.append(len(x))
        for y in x:
            _visit(y, tensors, scalars, key, depth + 1)
        for k, y in (state_of(x) or {}).items():
            key.append(k)
            _visit(y, tensors, scalars, key, depth + 1)
    else:
        _visit_state(x, tensors, scalars, key, depth)


def _visit_state(x: Any, tensors: list[Tensor], scalars: list[int | float], key: list[Any], depth: int) -> None:
    if isinstance(x, dict) and type(x) in (dict, collections.OrderedDict, collections.defaultdict):
        return
    t = type(x)
    key.append(t)
    if t is set or t is frozenset or t is collections.deque:
        items = list(x)
        for y in items:
            if not isinstance(y, (int, float, str, bytes, complex, enum.Enum, type(None))):
                raise Unreadable(f"a {t.__name__} of {type(y).__name__}")
        key.append(tuple([_exact(y) for y in items]))  # of a set the order, too, in which it gives what it has
        return
    if t is functools.partial:
        _visit_constant((x.func, x.args, x.keywords), "partial", key, depth + 1)
        return
    if t is slice:
        _visit_constant((x.start, x.stop, x.step), "slice", key, depth + 1)
        return
    if is_array(x) and x.nbytes <= _SMALL_ARRAY and not x.dtype.hasobject:
        key.append((x.dtype, x.shape, x.tobytes()))
        return
    state = state_of(x)
    if state is not None and depth > _DEEP:
        raise Unreadable(f"a {t.__name__} more than {_DEEP} levels deep")
    if state is None or not isinstance(x, (dict, list, tuple)) and not _is_bare(t):  # type: ignore[arg-type]
        if isinstance(x, (Iterator, torch.Generator, nn.Module)) or state is not None:
            raise Unreadable(f"a {t.__name__}, whose state is not watched")
        try:
            exact_x = _exact(x)
            hash(exact_x)
        except (TypeError, ValueError):
            raise Unreadable(f"a {t.__name__}, whose contents are not watched") from None
        more = getattr(x, "__dict__", None) or _slots(t)  # type: ignore[arg-type]
        if isinstance(x, (str, bytes, complex)) and not isinstance(x, enum.Enum) and more:
            raise Unreadable(f"a {t.__name__}, whose state is not watched")
        key.append(exact_x)
        return
    held = {id(v) for _, v in (dict.items(x) if isinstance(x, dict) else ()) if v is not None}
    for k, y in state.items():
        key.append(k)
        if id(y) in held:  # a ModelOutput keeps its items as attributes too
            continue
        _visit(y, tensors, scalars, key, depth + 1)


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
    """Tensor leaves, int/float leaves and structure key of a call's arguments; run at every step."""
    tensors: list[Tensor] = []
    scalars: list[int | float] = []
    key: list[Any] = [len(args)]
    for x in args:
        _visit(x, tensors, scalars, key, 0)
    for name in kwargs:  # in their order, which forward sees where it takes **kwargs
        key.append(name)
        _visit(kwargs[name], tensors, scalars, key, 0)
    return FlatInputs(tensors, scalars, tuple(key))


def unreadable(x: Any) -> str | None:
    """Why this object, met in a result, cannot be given again at the next call: it is used up, or hides tensors. None
    when it can."""
    if isinstance(x, (Iterator, types.CoroutineType)):
        return f"forward returns a {type(x).__name__}"
    if is_array(x):
        return "forward returns a numpy array"
    if isinstance(x, (nn.Module, type, types.ModuleType, int, float, str, bytes, list, tuple, dict)):
        return None
    if (
        not isinstance(x, (types.FunctionType, types.MethodType, functools.partial, set, frozenset))
        and state_of(x) is not None
        and _is_bare(type(x))  # type: ignore[arg-type]
    ):
        return None
    todo, seen = [x], {id(x)}
    while todo and len(seen) < 1000:
        y = todo.pop()
        if isinstance(y, Tensor):
            return f"forward returns a {type(x).__name__} that holds a tensor"
        if isinstance(y, (nn.Module, type, types.ModuleType, str, bytes)):
            continue
        inner = (
            [y.__closure__, y.__defaults__, y.__kwdefaults__]
            if isinstance(y, types.FunctionType)
            else gc.get_referents(y)
        )
        todo += [z for z in inner if id(z) not in seen and not seen.add(id(z))]  # type: ignore[func-returns-value]
    return None


# --- skeleton -------------------------------------------------------------------------------------

Leaf = Callable[[Any], "int | Fill | None"]


class _Part:
    """One object of the skeleton: how to fill it, whether a leaf is inside, whether it is met more than once."""

    __slots__ = ("fill", "has_leaf", "shared")

    def __init__(self, fill: Fill, has_leaf: bool) -> None:
        self.fill = fill
        self.has_leaf = has_leaf
        self.shared = False


class _Leaves(list[Any]):
    """Leaves of one filling, with the objects already made for parts that are met more than once."""

    made: dict[int, Any]


def skeleton(obj: Any, leaf: Leaf, *, share: bool = True) -> Fill:
    """A function that builds an object equal to `obj` from a list of leaves.

    leaf(x) gives the slot of a leaf, or a function of the leaves, or None when x is no leaf (then it is looked into).
    share=False visits an object that is met twice twice, as flatten_inputs does.
    """
    walk = _Walk(leaf, share)
    part = walk.part(obj)
    if not walk.any_shared:
        return part.fill

    def fill(leaves: list[Any]) -> Any:
        own = _Leaves(leaves)
        own.made = {}
        return part.fill(own)

    return fill


def _slot(i: int) -> Fill:
    return lambda leaves: leaves[i]


def _unfilled(_leaves: list[Any]) -> Any:
    raise AssertionError("a part is filled while it is walked")


def _constant(x: Any) -> _Part:
    return _Part(lambda _leaves: x, False)


class _Walk:
    def __init__(self, leaf: Leaf, share: bool) -> None:
        self.leaf = leaf
        self.share = share
        self.any_shared = False
        self.seen: dict[int, _Part] = {}
        self.open: set[int] = set()  # objects whose contents are being walked
        self.closed_on: set[int] = set()  # those of them that were met again inside
        self.states: list[Any] = []
        self.inside: dict[int, int] = {}  # numbers of what the walk has come through: objects, dicts of attributes

    def part(self, x: Any, held: dict[int, _Part] | None = None) -> _Part:
        if x is None or type(x) in (str, bool):
            return _constant(x)
        met = (held or {}).get(id(x)) or (self.seen.get(id(x)) if self.share else None)
        if met is not None:
            if not isinstance(x, Tensor):
                met.shared = self.any_shared = True
                if id(x) in self.open:
                    self.closed_on.add(id(x))
            return met
        where = self.leaf(x)
        if where is None and isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unreadable("a size, in a capture for several sizes")
        if where is not None:
            part = _Part(where if callable(where) else _slot(where), True)
            if isinstance(x, Tensor):
                self.seen[id(x)] = part
            return part
        if isinstance(x, (int, float, *_ATOMS)) or _is_config(x):
            return _constant(x)
        before = len(self.inside)
        part = _Part(_unfilled, False)  # nothing here may hold x until `given` has looked who does
        self.seen[id(x)] = part  # a cycle meets this one
        self.open.add(id(x))
        self.inside.setdefault(id(x), before)
        fill, part.has_leaf = self.container(x)
        if not part.has_leaf and self.given(x, before):
            fill = _constant(x).fill
        self.open.remove(id(x))
        if id(x) in self.closed_on and part.has_leaf:
            raise Unreadable(f"a {type(x).__name__} that holds itself")

        def fill_once(leaves: list[Any]) -> Any:
            if not part.shared:
                return fill(leaves)
            made = leaves.made  # type: ignore[attr-defined]
            if id(part) not in made:
                made[id(part)] = fill(leaves)
            return made[id(part)]

        part.fill = fill_once
        return part

    def given(self, x: Any, before: int) -> bool:
        """Is this an object without a leaf that something else may hold? Then it is the same at every call. One whose
        attributes a caller may edit, and that nothing but what the walk had come through holds, is forward's own: it
        makes another at every call. Who holds an object takes a look at all of Python's: 0.1 s after transformers is
        imported, so it is asked last."""
        if isinstance(x, (list, tuple, dict)) or type(x) in _EDITED or is_array(x):
            return False
        if not self.share or not state_of(x) or not _is_bare(type(x)):  # type: ignore[arg-type]
            return True
        if frozen():
            raise Unreadable(f"who holds the {type(x).__name__} that forward returns is hidden by gc.freeze()")
        holders = gc.get_referrers(x)
        return not all(isinstance(r, types.FrameType) or self.inside.get(id(r), before) < before for r in holders)

    def container(self, x: Any) -> tuple[Fill, bool]:
        cls: Any = type(x)
        if isinstance(x, (list, tuple)):
            return self.sequence(x)
        if isinstance(x, dict):
            return self.mapping(x)
        if cls in _EDITED or is_array(x):
            return (lambda _leaves: copy.copy(x)), False
        if state_of(x) is None or isinstance(x, (set, frozenset)):
            return (lambda _leaves: x), False
        names, has = self.attributes(x, {})

        def fill(leaves: list[Any]) -> Any:
            new = _blank(cls)
            _set_state(new, names, leaves)
            return new

        return fill, has or is_cache(x)

    def sequence(self, x: Any) -> tuple[Fill, bool]:
        cls: Any = type(x)
        parts = [self.part(y) for y in x]
        has = any(p.has_leaf for p in parts)
        if cls is list:
            return (lambda leaves: [p.fill(leaves) for p in parts]), has
        if cls is tuple:
            return (lambda leaves: tuple([p.fill(leaves) for p in parts])), has
        names, attribute_has = self.attributes(x, {})
        has = has or attribute_has
        if not (has or isinstance(x, list)):
            return (lambda _leaves: x), False
        if cls is torch.Size:
            return (lambda leaves: torch.Size([p.fill(leaves) for p in parts])), True

        def fill(leaves: list[Any]) -> Any:
            items = [p.fill(leaves) for p in parts]
            if hasattr(cls, "n_sequence_fields"):  # torch.return_types
                return cls(items)
            if isinstance(x, tuple):
                new: Any = tuple.__new__(cls, items)
            else:
                new = _blank(cls)
                list.extend(new, items)
            _set_state(new, names, leaves)
            return new

        return fill, has

    def mapping(self, x: dict[Any, Any]) -> tuple[Fill, bool]:
        cls = type(x)
        parts = [(k, self.part(dict.__getitem__(x, k))) for k in dict.keys(x)]
        has = any(p.has_leaf for _, p in parts)
        if cls is dict:
            return (lambda leaves: {k: p.fill(leaves) for k, p in parts}), has
        held = {id(y): p for y, (_, p) in zip(dict.values(x), parts, strict=True) if y is not None}
        names, state_has = self.attributes(x, held)
        factory = x.default_factory if isinstance(x, collections.defaultdict) else None
        put = collections.OrderedDict.__setitem__ if isinstance(x, collections.OrderedDict) else dict.__setitem__

        def fill(leaves: list[Any]) -> Any:
            new: Any = _blank(cls)
            for k, p in parts:
                put(new, k, p.fill(leaves))
            if factory is not None:
                new.default_factory = factory
            _set_state(new, names, leaves)
            return new

        return fill, has or state_has

    def attributes(self, x: Any, held: dict[int, _Part]) -> tuple[list[tuple[str, _Part]], bool]:
        state = state_of(x) or {}
        for d in (state, getattr(x, "__dict__", state)):  # not the same one where there are slots
            self.states.append(d)  # an object that is made anew must not get the number of one that is gone
            self.inside.setdefault(id(d), len(self.inside))
        parts = [(name, self.part(state[name], held)) for name in list(state)]
        return parts, any(p.has_leaf for _, p in parts)


def _set_state(new: Any, names: list[tuple[str, _Part]], leaves: list[Any]) -> None:
    slots = _slots(type(new))  # type: ignore[arg-type]
    for name, part in names:
        if name in slots:
            object.__setattr__(new, name, part.fill(leaves))
        else:
            new.__dict__[name] = part.fill(leaves)


def _blank(cls: type) -> Any:
    """An object of the class without any attributes: by the constructor of C that it inherits, not by one of its own,
    which may want arguments."""
    made = next(m for c in cls.__mro__ if isinstance(m := c.__dict__.get("__new__"), types.BuiltinFunctionType))
    return made(cls)


def input_skeleton(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Fill, FlatInputs]:
    """fill(leaves) -> (args, kwargs), where leaves are the tensors followed by the int/float leaves, as flatten_inputs
    orders them."""
    flat = flatten_inputs(args, kwargs)
    tensors = iter(range(len(flat.tensors)))
    scalars = iter(range(len(flat.tensors), len(flat.tensors) + len(flat.scalars)))

    def leaf(x: Any) -> int | None:
        if isinstance(x, Tensor):
            return next(tensors)
        return next(scalars) if type(x) is float or type(x) is int and -_INT64 <= x < _INT64 else None

    return skeleton((tuple(args), kwargs), leaf, share=False), flat
