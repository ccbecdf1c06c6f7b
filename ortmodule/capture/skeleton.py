"""Flattening of what goes into and comes out of a module: tensors become numbered slots, the rest a skeleton.

A captured graph knows only flat lists of tensors. Arguments and results of real modules are nested containers, dataclasses,
Hugging Face ModelOutputs and caches, with None and Python numbers in between. Two walks are kept in the same order:

* flatten_inputs runs at every step. It yields the tensors, the int/float leaves, and a hashable key of everything else that a
  capture bakes in (container types and lengths, names, None, bools, strings, dtypes, ranks). Nothing is built but three lists.
* skeleton runs once per capture. It turns an object into a function `fill(leaves)` that builds an equal fresh object from new leaves.
  Objects are rebuilt by __new__ plus their items plus __dict__, so no class has to be registered anywhere and no __init__ runs.

Invariants: both walks visit leaves in the same order (keyword arguments by name; __dict__ in insertion order); a leaf that occurs
twice as the same object keeps its identity in the filled copy; objects that hold no leaf are constants, shared, not copied, except
plain containers and caches, which callers are free to edit.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Fill = Callable[[list[Any]], Any]

# Never looked into: they hold no data of one call, or are singletons.
_ATOMS = (
    nn.Module, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, str, bytes, bool, complex, range,
)


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
    slots = [s for c in type(x).__mro__ for s in ([c.__dict__["__slots__"]] if isinstance(c.__dict__.get("__slots__"), str)
                                                  else c.__dict__.get("__slots__", ()))]
    if slots and not isinstance(x, (tuple, list, dict, set, frozenset)):
        state = dict(state or {})
        state.update({s: getattr(x, s) for s in slots if s != "__dict__" and s != "__weakref__" and hasattr(x, s)})
    return state


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
    state = None if depth > 8 else _state(x)
    if state is None:
        try:
            hash(x)
            key.append(x)
        except TypeError:
            key.append(id(x))
        return
    key.append(type(x))
    items = dict.items(x) if isinstance(x, dict) else ()
    held = {id(v) for _, v in items}
    for k, y in state.items():
        key.append(k)
        if id(y) in held and isinstance(y, Tensor):  # a ModelOutput keeps its items as attributes too
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


# --- skeleton -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Part:
    fill: Fill
    has_leaf: bool


def skeleton(obj: Any, leaf: Callable[[Any], int | Fill | None]) -> Fill:
    """A function that builds an object equal to `obj` from a list of leaves.

    leaf(x) gives the slot of a leaf, or a function of the leaves, or None when x is no leaf (then it is looked into).
    """
    return _part(obj, leaf, {}).fill


def _slot(i: int) -> Fill:
    return lambda leaves: leaves[i]


def _constant(x: Any) -> _Part:
    return _Part(lambda _leaves: x, False)


def _part(x: Any, leaf: Callable[[Any], int | Fill | None], seen: dict[int, _Part]) -> _Part:
    if x is None or type(x) in (str, bool):
        return _constant(x)
    where = leaf(x)
    if where is not None:
        return _Part(where if callable(where) else _slot(where), True)
    if isinstance(x, (int, float, *_ATOMS)) or _is_config(x):
        return _constant(x)
    if id(x) in seen:
        return seen[id(x)]
    part = _constant(x)
    seen[id(x)] = part  # a cycle ends at the original object; filled in below for mere sharing
    made = _container(x, leaf, seen)
    part.fill, part.has_leaf = made.fill, made.has_leaf
    return part


def _memo(fill: Callable[[list[Any]], Any]) -> Fill:
    return fill


def _container(x: Any, leaf: Callable[[Any], int | Fill | None], seen: dict[int, _Part]) -> _Part:
    cls = type(x)
    if isinstance(x, (list, tuple)):
        parts = [_part(y, leaf, seen) for y in x]
        fills = [p.fill for p in parts]
        has = any(p.has_leaf for p in parts)
        state = _attributes(x, leaf, seen) if cls not in (list, tuple) and getattr(x, "__dict__", None) else None
        if cls is list:
            return _Part(lambda leaves: [f(leaves) for f in fills], has)
        if not has and not (state and state[1]) and isinstance(x, tuple):
            return _constant(x)
        if cls is tuple:
            return _Part(lambda leaves: tuple([f(leaves) for f in fills]), has)

        def fill_sequence(leaves: list[Any]) -> Any:
            items = [f(leaves) for f in fills]
            if isinstance(x, tuple):
                new: Any = tuple.__new__(cls, items)
            else:
                new = cls.__new__(cls)
                list.extend(new, items)
            if state:
                _set_state(new, state[0], leaves)
            return new

        return _Part(fill_sequence, has)
    if isinstance(x, dict):
        keys = list(dict.keys(x))
        parts = [_part(y, leaf, seen) for y in dict.values(x)]
        fills = [p.fill for p in parts]
        has = any(p.has_leaf for p in parts)
        pairs = list(zip(keys, fills, strict=True))
        if cls is dict:
            return _Part(lambda leaves: {k: f(leaves) for k, f in pairs}, has)
        names, state_has = _attributes(x, leaf, seen)
        factory = x.default_factory if isinstance(x, collections.defaultdict) else None
        ordered = isinstance(x, collections.OrderedDict)

        def fill_dict(leaves: list[Any]) -> Any:
            new = cls.__new__(cls)
            put = collections.OrderedDict.__setitem__ if ordered else dict.__setitem__
            for k, f in pairs:
                put(new, k, f(leaves))
            if factory is not None:
                new.default_factory = factory
            _set_state(new, names, leaves)
            return new

        return _Part(fill_dict, has or state_has)
    state_of = _state(x)
    if state_of is None or isinstance(x, (set, frozenset)):
        return _constant(x)
    names, has = _attributes(x, leaf, seen)
    if not has and not _is_cache(x):
        return _constant(x)

    def fill_object(leaves: list[Any]) -> Any:
        new = cls.__new__(cls)
        _set_state(new, names, leaves)
        return new

    return _Part(fill_object, True)


def _attributes(x: Any, leaf: Callable[[Any], int | Fill | None], seen: dict[int, _Part]) -> tuple[list[tuple[str, Fill]], bool]:
    parts = [(name, _part(y, leaf, seen)) for name, y in (_state(x) or {}).items()]
    return [(name, p.fill) for name, p in parts], any(p.has_leaf for _, p in parts)


def _set_state(new: Any, names: list[tuple[str, Fill]], leaves: list[Any]) -> None:
    state = getattr(new, "__dict__", None)
    for name, f in names:
        if state is not None:
            state[name] = f(leaves)
        else:
            object.__setattr__(new, name, f(leaves))


def input_skeleton(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Fill, FlatInputs]:
    """fill(leaves) -> (args, kwargs), where leaves are the tensors followed by the int/float leaves, as flatten_inputs orders them."""
    flat = flatten_inputs(args, kwargs)
    tensors = iter(range(len(flat.tensors)))
    scalars = iter(range(len(flat.tensors), len(flat.tensors) + len(flat.scalars)))
    at: dict[int, int] = {}

    def leaf(x: Any) -> int | None:
        if isinstance(x, Tensor):
            if id(x) in at:  # the attribute of a ModelOutput, or the same tensor given twice
                return at[id(x)]
            return None
        return next(scalars) if type(x) in (int, float) else None

    for x in flat.tensors:
        i = next(tensors)
        at.setdefault(id(x), i)
    ordered = dict(sorted(kwargs.items()))
    return skeleton((tuple(args), ordered), leaf), flat
