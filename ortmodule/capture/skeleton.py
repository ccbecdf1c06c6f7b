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
shared, not copied, except plain containers and caches, which callers are free to edit.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Fill = Callable[[list[Any]], Any]

# Never looked into: they hold no data of one call, or are singletons.
_ATOMS = (
    nn.Module, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, str, bytes, bool, complex, range,
)


class Unreadable(TypeError):
    """An object whose contents cannot be told, so nothing may be made of it that outlives the call."""


_SMALL_ARRAY = 1 << 12  # bytes of a numpy array that are compared at every step


class FlatInputs(NamedTuple):
    """Arguments of one call: tensor leaves, int/float leaves, and a hashable key of all the rest."""

    tensors: list[Tensor]
    scalars: list[int | float]
    key: Hashable


def _is_config(x: object) -> bool:
    return any(c.__name__ in ("PretrainedConfig", "PreTrainedConfig") for c in type(x).__mro__)


def _is_cache(x: object) -> bool:
    return any(c.__name__ in ("Cache", "CacheLayerMixin") for c in type(x).__mro__)


def _state(x: object) -> dict[str, Any] | None:
    """Attributes of an object that is worth looking into, else None."""
    if isinstance(x, _ATOMS) or _is_config(x):
        return None
    state = getattr(x, "__dict__", None)
    slots = [
        s
        for c in type(x).__mro__
        for s in (
            [c.__dict__["__slots__"]]
            if isinstance(c.__dict__.get("__slots__"), str)
            else c.__dict__.get("__slots__", ())
        )
    ]
    if slots and not isinstance(x, (tuple, list, dict, set, frozenset)):
        state = dict(state or {})
        state.update({s: getattr(x, s) for s in slots if s != "__dict__" and s != "__weakref__" and hasattr(x, s)})
    return state


class _Bare:
    """The layout of an object whose state is its attributes."""


@functools.cache
def _is_bare(cls: type) -> bool:
    """Whether there is nothing in an object of this class but its __dict__ and slots (no memory of a C type:
    random.Random, iterators)."""
    slots = [
        s
        for c in cls.__mro__
        for s in (
            [c.__dict__["__slots__"]]
            if isinstance(c.__dict__.get("__slots__"), str)
            else c.__dict__.get("__slots__", ())
        )
        if s not in ("__dict__", "__weakref__")
    ]
    return cls.__basicsize__ <= _Bare.__basicsize__ + 8 * len(slots) and cls.__itemsize__ == 0


def _visit(x: Any, tensors: list[Tensor], scalars: list[int | float], key: list[Any], depth: int) -> None:
    t = type(x)
    if t is Tensor or isinstance(x, Tensor):
        tensors.append(x)
        key.append(x.dtype)
        key.append(x.ndim)
    elif x is None:
        key.append(None)
    elif t is int or t is float:
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
            key.append(k)
            _visit(y, tensors, scalars, key, depth + 1)
        _visit_state(x, tensors, scalars, key, depth)
    elif isinstance(x, (list, tuple)):
        key.append(t)
        key.append(len(x))
        for y in x:
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
        key.append(
            tuple((type(y), y) for y in items) if t is collections.deque else frozenset((type(y), y) for y in items)
        )
        return
    if t is functools.partial:
        inner: tuple[list[Tensor], list[int | float]] = [], []  # no leaves: the skeleton takes a partial as it is
        _visit((x.func, x.args, x.keywords), *inner, key, depth + 1)
        if inner[0]:
            raise Unreadable("a partial that holds a tensor")
        key.append(tuple(inner[1]))
        return
    if t.__module__ == "numpy" and t.__name__ == "ndarray" and x.nbytes <= _SMALL_ARRAY and not x.dtype.hasobject:
        key.append((x.dtype, x.shape, x.tobytes()))
        return
    state = None if depth > 8 else _state(x)
    if state is None or not isinstance(x, (dict, list, tuple)) and not _is_bare(t):  # type: ignore[arg-type]
        if isinstance(x, (Iterator, torch.Generator, nn.Module)) or state is not None:
            raise Unreadable(f"a {t.__name__}, whose state is not watched")
        try:
            hash(x)
        except TypeError:
            raise Unreadable(f"a {t.__name__}, whose contents are not watched") from None
        key.append(x)
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
    for name in sorted(kwargs) if len(kwargs) > 1 else kwargs:
        key.append(name)
        _visit(kwargs[name], tensors, scalars, key, 0)
    return FlatInputs(tensors, scalars, tuple(key))


def unreadable(x: Any) -> str | None:
    """Why this object, met in a result, cannot be given again at the next call: it is used up, or hides tensors. None
    when it can."""
    if isinstance(x, (Iterator, types.CoroutineType)):
        return f"forward returns a {type(x).__name__}"
    if isinstance(x, (nn.Module, type, types.ModuleType, int, float, str, bytes, list, tuple, dict)):
        return None
    if (
        not isinstance(x, (types.FunctionType, types.MethodType, functools.partial, set, frozenset))
        and _state(x) is not None
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


def _constant(x: Any) -> _Part:
    return _Part(lambda _leaves: x, False)


class _Walk:
    def __init__(self, leaf: Leaf, share: bool) -> None:
        self.leaf = leaf
        self.share = share
        self.any_shared = False
        self.seen: dict[int, _Part] = {}

    def part(self, x: Any, held: dict[int, _Part] | None = None) -> _Part:
        if x is None or type(x) in (str, bool):
            return _constant(x)
        met = (held or {}).get(id(x)) or (self.seen.get(id(x)) if self.share else None)
        if met is not None:
            if not isinstance(x, Tensor):
                met.shared = self.any_shared = True
            return met
        where = self.leaf(x)
        if where is not None:
            part = _Part(where if callable(where) else _slot(where), True)
            if isinstance(x, Tensor):
                self.seen[id(x)] = part
            return part
        if isinstance(x, (int, float, *_ATOMS)) or _is_config(x):
            return _constant(x)
        part = _constant(x)
        self.seen[id(x)] = part  # a cycle meets this one
        fill, part.has_leaf = self.container(x)

        def fill_once(leaves: list[Any]) -> Any:
            if not part.shared:
                return fill(leaves)
            made = leaves.made  # type: ignore[attr-defined]
            if id(part) not in made:
                made[id(part)] = fill(leaves)
            return made[id(part)]

        part.fill = fill_once
        return part

    def container(self, x: Any) -> tuple[Fill, bool]:
        cls: Any = type(x)
        if isinstance(x, (list, tuple)):
            return self.sequence(x)
        if isinstance(x, dict):
            return self.mapping(x)
        if _state(x) is None or isinstance(x, (set, frozenset)):
            return (lambda _leaves: x), False
        names, has = self.attributes(x, {})
        if not has and not _is_cache(x):
            return (lambda _leaves: x), False

        def fill(leaves: list[Any]) -> Any:
            new = cls.__new__(cls)
            _set_state(new, names, leaves)
            return new

        return fill, True

    def sequence(self, x: Any) -> tuple[Fill, bool]:
        cls: Any = type(x)
        parts = [self.part(y) for y in x]
        has = any(p.has_leaf for p in parts)
        if cls is list:
            return (lambda leaves: [p.fill(leaves) for p in parts]), has
        if cls is tuple:
            return (lambda leaves: tuple([p.fill(leaves) for p in parts])), has
        if isinstance(x, torch.Size) or not (has or isinstance(x, list)):
            return (lambda _leaves: x), False
        names, _ = self.attributes(x, {}) if getattr(x, "__dict__", None) else ([], False)

        def fill(leaves: list[Any]) -> Any:
            items = [p.fill(leaves) for p in parts]
            if hasattr(cls, "n_sequence_fields"):  # torch.return_types
                return cls(items)
            if isinstance(x, tuple):
                new: Any = tuple.__new__(cls, items)
            else:
                new = cls.__new__(cls)
                list.extend(new, items)
            _set_state(new, names, leaves)
            return new

        return fill, has

    def mapping(self, x: dict[Any, Any]) -> tuple[Fill, bool]:
        cls = type(x)
        parts = [(k, self.part(y)) for k, y in dict.items(x)]
        has = any(p.has_leaf for _, p in parts)
        if cls is dict:
            return (lambda leaves: {k: p.fill(leaves) for k, p in parts}), has
        held = {id(y): p for y, (_, p) in zip(dict.values(x), parts, strict=True) if y is not None}
        names, state_has = self.attributes(x, held)
        factory = x.default_factory if isinstance(x, collections.defaultdict) else None
        put = collections.OrderedDict.__setitem__ if isinstance(x, collections.OrderedDict) else dict.__setitem__

        def fill(leaves: list[Any]) -> Any:
            new: Any = cls.__new__(cls)
            for k, p in parts:
                put(new, k, p.fill(leaves))
            if factory is not None:
                new.default_factory = factory
            _set_state(new, names, leaves)
            return new

        return fill, has or state_has

    def attributes(self, x: Any, held: dict[int, _Part]) -> tuple[list[tuple[str, _Part]], bool]:
        parts = [(name, self.part(y, held)) for name, y in (_state(x) or {}).items()]
        return parts, any(p.has_leaf for _, p in parts)


def _set_state(new: Any, names: list[tuple[str, _Part]], leaves: list[Any]) -> None:
    state = getattr(new, "__dict__", None)
    for name, part in names:
        if state is not None:
            state[name] = part.fill(leaves)
        else:
            object.__setattr__(new, name, part.fill(leaves))


def input_skeleton(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Fill, FlatInputs]:
    """fill(leaves) -> (args, kwargs), where leaves are the tensors followed by the int/float leaves, as flatten_inputs
    orders them."""
    flat = flatten_inputs(args, kwargs)
    tensors = iter(range(len(flat.tensors)))
    scalars = iter(range(len(flat.tensors), len(flat.tensors) + len(flat.scalars)))

    def leaf(x: Any) -> int | None:
        if isinstance(x, Tensor):
            return next(tensors)
        return next(scalars) if type(x) in (int, float) else None

    return skeleton((tuple(args), dict(sorted(kwargs.items()))), leaf, share=False), flat
