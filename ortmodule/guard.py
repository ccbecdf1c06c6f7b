"""Did anything change that the capture has read? Asked before every step, so the answer must cost microseconds.

Two questions of different price:
  - `Guard.fast()`: one C walk over the dictionaries of all submodules (attributes, parameters, buffers, children,
    hooks, config objects). Equal to last time means: the same Python state and the same Parameter and buffer objects,
    so everything derived from them (which capture, which tensors to pass) can be reused as it is.
  - only when that changed: `Guard.structure()` (tree, types, sizes, hooks) and `Reads.hold()` (the attributes that the
    capture has read, noted by `watch.Watch` while it ran). A Parameter replaced by another of its kind, or an attribute
    that no forward reads, changes neither, so no new capture is made.

Invariant: whoever stores a fast() value stores `Guard.refs()` beside it. Entries are hashed by identity; while the
objects are alive their addresses cannot be taken by others, so an equal hash cannot be an accident of the allocator.
What lies outside of the modules' dictionaries (globals, closures, classes, the inside of objects) is watch/'s:
`watch.Held`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from . import _C, autocast, cuda_engine
from . import torch_private as private
from .torch_private import CALL, HOOKS

_CONFIG_NAMES = (
    "Config",
    "Configuration",
    "Args",
    "Arguments",
    "Options",
    "Settings",
    "Params",
    "HParams",
    "Namespace",
)
_DEPTH = 3  # how deep configurations inside configurations are followed
_PLAIN = frozenset((int, str, bytes, bool, type(None), torch.device))
_BY_BITS = frozenset((float, complex))
_RANGES = frozenset((range, slice))
_ONES = frozenset((list, set, frozenset))  # whose elements are compared one after the other


def environment() -> tuple[Hashable, ...]:
    """Global switches of PyTorch that the capture, or the kernels' choice, depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.now(),
        torch.are_deterministic_algorithms_enabled(),
        _precision(),
        torch.get_default_dtype(),
    )


def _precision() -> Hashable:
    """How f32 products may be rounded. The older question raises once the newer settings are used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        mkldnn: Any = torch.backends.mkldnn
        return mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision


def global_hooks() -> bool:
    """True when hooks are registered for all modules of the process (they would have to run inside the graph)."""
    of = private.global_hooks
    return bool(of._global_forward_hooks or of._global_forward_pre_hooks or of._global_backward_hooks
                or of._global_backward_pre_hooks)  # fmt: skip


def part_of_forward(hook: object) -> bool:
    """A hook that only hands values to the forward around it (Hugging Face collects hidden_states and attentions so):
    captured with it."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _asks(module: nn.Module, input: Any, output: Any) -> None:
    output.requires_grad_(True)


def idle(hook: object, m: nn.Module) -> bool:
    """A hook whose code is that of `_asks` and no more (Hugging Face puts one on the embedding for gradient
    checkpointing), behind an embedding that is trained: its result requires a gradient already."""
    code, asks = getattr(hook, "__code__", None), _asks.__code__
    return (
        code is not None
        and (code.co_code, code.co_names, code.co_consts) == (asks.co_code, asks.co_names, asks.co_consts)
        and (code.co_argcount, code.co_kwonlyargcount, code.co_freevars) == (3, 0, ())
        and not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR)
        and type(m).forward is nn.Embedding.forward
        and m.weight.requires_grad is True
        and torch.is_grad_enabled()
    )


class Place(NamedTuple):
    """A submodule with hooks. apart: they make several tensors of one that comes at several places (backward hooks do);
    early: its forward hooks come before those that are part of the forward; whole: it can only be called as a whole, by
    PyTorch; asks: they make tensors require a gradient that did not, before forward and behind it."""

    name: str
    apart: bool
    early: bool
    whole: bool
    asks: tuple[bool, bool] = (False, False)


def place_of(name: str, m: nn.Module) -> Place | None:
    """Where the hooks of a submodule make cuts; None when it has none."""
    own = m.__dict__
    hooks = {h: list(own.get(h, {}).values()) for h in HOOKS}
    hooks["_forward_hooks"] = [f for f in hooks["_forward_hooks"] if not idle(f, m)]
    if not any(hooks.values()):
        return None
    users = [not part_of_forward(f) for f in hooks["_forward_hooks"]]
    backward = bool(hooks["_backward_pre_hooks"] or hooks["_backward_hooks"])
    if not (backward or any(users) or any(not part_of_forward(f) for f in hooks["_forward_pre_hooks"])):
        return None
    # Hooks stand on one side of those that are part of the forward, and backward hooks behind all; the old kind of
    # backward hooks looks at the node of the last operation. Else a call is right alone.
    early = users != sorted(users) and not backward
    whole = (
        users != sorted(users, reverse=early)
        or bool(hooks["_backward_hooks"])
        and own.get("_is_full_backward_hook") is False
    )
    return Place(name, backward, early, whole)


def places(module: nn.Module) -> tuple[Place, ...]:
    """All submodules with hooks, but for those that are captured with the forward."""
    return tuple([p for name, m in module.named_modules() if name and (p := place_of(name, m)) is not None])


def refuse(module: nn.Module, called: Sequence[Tensor] | None = None) -> str | None:
    """Why this module must not be run as one graph at all, or None. called: tensors of the call that is to come."""
    lazy = nn.modules.lazy.LazyModuleMixin
    if called is None and isinstance(module, lazy) and module.cls_to_become and module.has_uninitialized_params():
        return "its parameters have no sizes yet, and its first call makes it another class: call it once, then wrap it"
    for name, m in module.named_modules():
        if name and any(c.__name__ == "FSDPModule" for c in type(m).__mro__):
            return (f"submodule {name!r} is sharded by fully_shard: its hooks cannot run inside one graph. "
                    "Wrap each block, before it is sharded or after: ORTModule(block)")  # fmt: skip
        if any(c.__name__ == "FullyShardedDataParallel" for c in type(m).__mro__):
            return (f"{f'submodule {name!r}' if name else 'it'} is sharded by FullyShardedDataParallel, which gathers "
                    "parameters in forward. ORTModule must be inside: FullyShardedDataParallel(ORTModule(block))"
                    )  # fmt: skip
    if called is None and private.fsdp_state(module) is not None:
        return None  # whole when it is called: looked at then
    for name, p in module.named_parameters():
        if hasattr(p, "ds_id") and called is not None:
            if p.numel() != getattr(p, "ds_numel", -1):
                return (f"parameter {name!r} is partitioned by DeepSpeed ZeRO-3 and has not been gathered. Wrap before "
                        "deepspeed.initialize, and call through its engine")  # fmt: skip
            if torch.is_grad_enabled() and not any(t.requires_grad for t in called):
                return ("no argument requires a gradient, so DeepSpeed ZeRO-3 does not learn when the backward of this "
                        "module is over. Wrap the model's blocks: ortmodule.wrap_blocks(model); where all before them "
                        "is frozen (PEFT), call model.enable_input_require_grads()")  # fmt: skip
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            return (
                f"parameter {name!r} is a DTensor: ORTModule computes on whole tensors. Wrap the module before "
                "fully_shard; leave what parallelize_module has made parallel as it is, and wrap what is not"
            )
    return None


def odd_class(t: Tensor) -> type | None:
    """Its class, where that decides what functions of torch do with it."""
    kind = type(t)
    plain = kind in (Tensor, nn.Parameter) or kind.__torch_function__ is nn.Parameter.__torch_function__
    return None if plain else kind


def of_odd_class(module: nn.Module) -> str | None:
    """A parameter or buffer whose class decides what functions of torch do with it."""
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if odd_class(t) is not None:
            return f"{name} is a {type(t).__name__}, a subclass of Tensor, whose functions its class may change"
    return None


def in_torchscript(module: nn.Module) -> str | None:
    """The first submodule that is TorchScript (its code is not Python, and nothing may stand in its parameters' place):
    a model with one is left to PyTorch."""
    return next((name for name, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)


def _is_config(value: object) -> bool:
    if isinstance(value, (nn.Module, Tensor, type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or dataclasses.is_dataclass(value):
        return True
    return type(value).__name__.endswith(_CONFIG_NAMES)


def _configs(values: dict[str, Any], seen: set[int], depth: int = _DEPTH) -> Iterator[dict[str, Any]]:
    """Dictionaries of configuration objects, and dictionaries with string keys, reachable from the entries of
    `values`."""
    if depth == 0:
        return
    for value in values.values():
        if isinstance(value, dict):
            inner = value if all(isinstance(k, str) for k in value) else None
        else:
            inner = vars(value) if _is_config(value) else None
        if inner and id(inner) not in seen:
            seen.add(id(inner))
            yield inner
            yield from _configs(inner, seen, depth - 1)


_INNER = frozenset(("_parameters", "_buffers", "_modules", CALL, *HOOKS))


class Guard:
    """The Python state of one module tree, recorded as dictionaries to hash. Build anew when the tree changes.
    unread: attributes that no capture has read and that do not count, by the module's name."""

    def __init__(self, module: nn.Module, unread: Mapping[str, frozenset[str]] = MappingProxyType({})) -> None:
        dicts: list[dict[str, Any] | frozenset[str]] = []
        seen: set[int] = set()
        for where, m in module.named_modules():
            d = m.__dict__
            if isinstance(m, torch.jit.ScriptModule):  # has no dictionaries of its own
                continue
            if where in unread:
                dicts.append(unread[where])
            dicts += (d, d["_modules"], d["_parameters"], d["_buffers"])
            if m is not module:
                dicts += [d[h] for h in HOOKS if d.get(h) is not None]
            attributes = {k: v for k, v in d.items() if k not in _INNER}
            dicts += _configs(attributes, seen)
        self._all: list[Any] = [*dicts, tuple(module.modules())]
        self.module = module
        self.params: list[nn.Parameter] = list(module.parameters())

    def fast(self) -> Hashable:
        """Changes whenever an attribute, parameter, buffer, child, hook object or class of a module does. About 10 ns
        an entry. What is in lists that a capture has read is among its rows (watch.Held)."""
        return _C.guard_hash(self._all)

    def refs(self) -> list[tuple[Any, ...]]:
        """Strong references to everything fast() hashes by identity."""
        refs: list[tuple[Any, ...]] = []
        passed: frozenset[str] = frozenset()
        for d in self._all:
            if isinstance(d, frozenset):
                passed = d
                continue
            if isinstance(d, dict):
                refs.append(tuple([x for k, v in d.items() if k not in passed for x in (k, v, type(v))]))
            else:
                refs.append((*d, *map(type, d), *[m.__dict__ for m in d]))
            passed = frozenset()
        return refs

    def structure(self) -> Hashable:
        """The tree of modules and what is registered in it, free of the identity of parameters and buffers."""
        tensors: list[Hashable] = []
        first: dict[int, int] = {}
        for m in self.module.modules():
            for d in (m._parameters, m._buffers):
                for name, t in d.items():
                    if t is None:
                        tensors.append((name, None))
                        continue
                    tie = first.setdefault(id(t), len(first))
                    kind = odd_class(t), t.is_neg()
                    tensors.append((name, tie, kind, t.dtype, t.shape, cuda_engine.device_of(t), t.requires_grad))
        names: dict[int, str] = {}
        classes, again = [], []  # again: a module that has another name already
        for name, m in self.module.named_modules():
            names[id(m)] = name
            classes.append((name, type(m), m.training))
        for name, m in self.module.named_modules():
            for child, part in m._modules.items():
                if part is None or names[id(part)] != f"{name}.{child}".lstrip("."):
                    again.append((name, child, None if part is None else names[id(part)]))
        return ((tuple(classes), tuple(again)), tuple(tensors), places(self.module))


_MISSING = object()


class Reads:
    """Values of attributes at a capture, to be compared with what they are now."""

    def __init__(self, module: nn.Module, reads: set[tuple[str, str]]) -> None:
        self._values: dict[tuple[str, str], Hashable] = {}
        self._containers: dict[tuple[str, str], list[Any]] = {}  # as captures have met them, equal ones
        self.add(module, reads)

    def add(self, module: nn.Module, reads: set[tuple[str, str]]) -> None:
        """What one more capture has read; what it did not find must stay absent."""
        attributes = {name: m.__dict__ for name, m in module.named_modules()}
        for where, name in sorted(reads):
            if where in attributes and name not in _INNER:
                self._values.setdefault((where, name), _read(attributes[where], name))
                now = attributes[where].get(name)
                if isinstance(now, (list, tuple, dict, set)):
                    met = self._containers.setdefault((where, name), [])
                    met += [now] * all(now is not x for x in met)

    def containers(self, module: nn.Module) -> list[tuple[Any, list[Any]]]:
        """Those that were read: (what is there, what captures have met there)."""
        attributes = {name: m.__dict__ for name, m in module.named_modules()} if self._containers else {}
        return [(attributes.get(where, {}).get(name), met) for (where, name), met in self._containers.items()]

    def hold(self, module: nn.Module) -> bool:
        """Are they the same?"""
        attributes = {name: m.__dict__ for name, m in module.named_modules()}
        try:
            return all(
                _read(attributes[where], name) == value for (where, name), value in self._values.items()
            )
        except KeyError:
            return False

    def changed(self, module: nn.Module) -> list[str]:
        """Names of those that are not."""
        attributes = {name: m.__dict__ for name, m in module.named_modules()}
        return [f"{where}.{name}".lstrip(".") for (where, name), value in self._values.items()
                if _read(attributes.get(where, {}), name) != value]  # fmt: skip


def _read(own: dict[str, Any], name: str) -> Hashable:
    """An attribute as it is compared; of the dictionary itself, who has looked into it knows the names."""
    return tuple(own) if name == "__dict__" else _freeze(own.get(name, _MISSING))


class _Same:
    """Equal to itself only; keeps its object alive, so that no other can take its place."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _freeze(value: Any, depth: int = _DEPTH, inside: bool = False) -> Hashable:
    """A snapshot: equal when a capture may not tell the difference. A tensor attribute is an input of the graph, so
    only its kind counts; one inside a container is a constant of the graph."""
    kind = type(value)  # what a class of the user's makes of == says nothing
    if kind in _BY_BITS:
        return (kind, value.real.hex(), value.imag.hex())  # -0.0 is not 0.0
    if kind in _PLAIN:
        return (kind, value)
    if kind in _RANGES:
        return (kind, *[_freeze(x) for x in (value.start, value.stop, value.step)])
    if isinstance(value, np.generic) and kind.__module__ == "numpy" and not value.dtype.hasobject:
        return (kind, value.dtype, value.tobytes())
    if isinstance(value, Tensor):
        if inside:
            return _Same(value)
        return (odd_class(value), value.is_neg(), value.dtype, value.shape, value.requires_grad)
    if depth and (kind in _ONES or isinstance(value, tuple) and not getattr(value, "__dict__", None)):
        return (kind, *[_freeze(v, depth - 1, True) for v in value])
    if depth and kind is dict:
        return (kind, *[(_freeze(k, 0), _freeze(v, depth - 1, True)) for k, v in value.items()])
    return _Same(value)  # what is read of an object is in watch.Held
