"""What is in containers and modules: shallow copies from before a trace, compared element by element by identity, put
back."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import patches
from . import torch_private as private
from .frames import OWN_DIR
from .torch_private import HOOKS

PLAIN = frozenset((int, float, str, bytes, bool, complex, type(None)))
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LEFT = PLAIN | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt}


class Met:
    """Something that outlives the call: what it is called, who has read it, a shallow copy from before."""

    __slots__ = ("copy", "name", "tokens", "value")

    def __init__(self, value: Any, copy: Any, name: str, token: Any) -> None:
        self.value = value
        self.copy = copy
        self.name = name
        self.tokens = {token}


def version_of(t: Tensor) -> int | None:
    """How often it has been edited; None: made under inference_mode, where PyTorch does not count."""
    return None if t.is_inference() else t._version


def put_tensor_back(t: Tensor, old: Tensor, version: int | None) -> None:
    """Its values, and its version of then, as a backward may be waiting."""
    with torch.inference_mode() if version is None else torch.no_grad():
        t.detach().copy_(old)
    if version is not None:
        private.set_version((t,), (version,))


class Numbers:
    """Called: the bytes of a tensor. They are looked at again only when it was edited, or its memory is another."""

    __slots__ = ("_at", "_known", "_tensor")

    def __init__(self, t: Tensor) -> None:
        self._tensor = t
        self._at: Any = None
        self._known = b""

    def __call__(self) -> bytes:
        t = self._tensor
        at = None if t.is_inference() else (t._version, t.data_ptr(), t.shape)
        if at is None or at != self._at:
            self._known = bytes(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            self._at = at
        return self._known


def joined(where: str, name: str) -> str:
    """The name in the tree of an attribute of a module."""
    return f"{where}.{name}".lstrip(".")


def registered(module: nn.Module) -> dict[int, str]:
    """Parameters and buffers by id: the first name of each, by which a capture knows it."""
    return {id(t): name for name, t in (*module.named_buffers(), *module.named_parameters())}


def unregistered(module: nn.Module) -> dict[int, str]:
    """Tensors that are attributes of modules, by id: the last name of each, by which a capture knows it."""
    return {
        id(t): joined(where, name)
        for where, m in module.named_modules()
        for name, t in m.__dict__.items()
        if isinstance(t, Tensor)
    }


def copy(v: Any) -> Any:
    """Contents of a container, to be compared element by element by identity."""
    if isinstance(v, dict):
        items: Any = collections.OrderedDict.items if isinstance(v, collections.OrderedDict) else dict.items
        return [x for pair in items(v) for x in pair]
    if isinstance(v, list):
        return list.copy(v)
    return list(v)


def changed_keys(v: dict[Any, Any], old: Sequence[Any]) -> list[Any]:
    """Of a dictionary, against its copy: keys that are new, gone, or have another value."""
    before = dict(zip(old[::2], old[1::2], strict=True))
    return [k for k in {**before, **v} if v.get(k, patches.ABSENT) is not before.get(k, patches.ABSENT)]


def put_back(v: Any, old: list[Any]) -> None:
    if isinstance(v, dict):
        base: Any = collections.OrderedDict if isinstance(v, collections.OrderedDict) else dict
        base.clear(v)
        for i in range(0, len(old), 2):
            base.__setitem__(v, old[i], old[i + 1])
    elif isinstance(v, list):
        list.__setitem__(v, slice(None), old)
    elif isinstance(v, set):
        set.clear(v)
        set.update(v, old)
    elif isinstance(v, collections.deque):
        collections.deque.clear(v)
        collections.deque.extend(v, old)


def unchanged(v: Any, old: list[Any]) -> bool:
    now = copy(v)
    if len(now) != len(old):
        return False
    if isinstance(v, set):
        return {id(x) for x in now} == {id(x) for x in old}
    return all(a is b for a, b in zip(now, old, strict=True))


def entries_more(v: Any, old: list[Any]) -> dict[Any, Any] | None:
    """What a dictionary has got, where all that it had is still there. A value under a class of tensors or numbers that
    a trace alone has (type(x) of a tensor of the trace) is nothing new where it is there under the plain class, which
    is what forward would have looked under. None: no dictionary, or other changes."""
    if not isinstance(v, dict):
        return None
    had = dict(zip(old[::2], old[1::2], strict=True))
    now = dict(dict.items(v))
    if any(now.get(k, patches.ABSENT) is not x for k, x in had.items()):
        return None
    return {k: x for k, x in now.items() if k not in had and had.get(_plain_class(k), patches.ABSENT) is not x}


def _plain_class(k: Any) -> Any:
    """The class that a value has outside of a trace, for one of torch's that it has inside; else the key itself."""
    if not isinstance(k, type):
        return k
    if issubclass(k, SYMBOLIC):
        return next(plain for cls, plain in zip(SYMBOLIC, (int, float, bool), strict=True) if issubclass(k, cls))
    return Tensor if issubclass(k, Tensor) and k.__module__.startswith("torch._subclasses.") else k


def holds_tensor(v: Any, depth: int = 3) -> bool:
    """Is there a tensor that may have a gradient in it?"""
    if isinstance(v, Tensor):
        return v.is_floating_point() or v.is_complex()
    if depth == 0 or type(v) in PLAIN or isinstance(v, (type, torch.nn.Module)) or callable(v):
        return False
    if isinstance(v, dict):
        return any(holds_tensor(x, depth - 1) for x in dict.values(v))
    if container(v):
        return any(holds_tensor(x, depth - 1) for x in v)
    return any(holds_tensor(x, depth - 1) for x in (attributes(v) or {}).values())


def added(v: Any, old: list[Any]) -> list[Any]:
    """What is in a container and was not in this copy of it."""
    known = {id(x) for x in old}
    return [x for x in copy(v) if id(x) not in known]


def container(v: Any) -> bool:
    return isinstance(v, (list, tuple, dict, set, frozenset, collections.deque))


def attributes(obj: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def flat(d: Any) -> tuple[Any, ...]:
    return tuple(x for pair in d.items() for x in pair)


def entries(table: str, values: dict[Any, Any]) -> tuple[Any, ...]:
    """What a table of a module holds: modules and hooks (but for those by which a capture looks on) themselves; of
    parameters, for which the export puts others, the names."""
    if table == "_parameters":
        return tuple(values)
    return tuple([(k, id(v)) for k, v in values.items()
                  if not getattr(getattr(v, "__code__", None), "co_filename", "").startswith(OWN_DIR)])  # fmt: skip


def snapshot(own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    return dict(own), {t: entries(t, own[t]) for t in ("_parameters", "_modules", *HOOKS) if own.get(t) is not None}


def lasts(v: Any) -> bool:
    """Can an attribute be given this value at every call, without forward? Numbers and words; sizes, of which a trace
    has symbols."""
    if type(v) in (tuple, torch.Size):
        return all(map(lasts, v))
    return type(v) in _LEFT
