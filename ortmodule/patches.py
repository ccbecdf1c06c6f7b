"""What a capture replaces in the process, and what replaced functions must see: one context, under one lock.

scope      entered around a capture, or a run of forward on stand-ins (net.py). Scopes nest (a capture in a capture, a
           part of one that needs more); an inner one sees the fields of the outer ones, unless it gives its own. One
           thread at a time is inside of scopes: others that want to wait at the outermost.
replaced   inside of a scope, names of the process, or of the user's modules, stand for something else. All are put back
           at the end, in any order of ends, whatever is raised: each name has a stack of layers, and a layer that goes
           from the middle leaves to the one above it what it had found itself.
threads    what is replaced is met by every thread of the process. `only_here` gives the others the original; what
           depends on the scope asks `here()`, which is None for them.

The fields are the dynamic scope that functions called by PyTorch need (a fake kernel is given tensors and a number, and
has to find the table); nothing is handed back through them.

Invariant: when no scope is open, every name is as it was found.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ABSENT: Any = object()  # as a value: the name is not there
threads: set[int] = set()  # that are inside of a scope: at most one. Asked at every call of a wrapper
_lock = threading.RLock()


class Patch(NamedTuple):
    """owner: a dictionary (name is a key) or anything with attributes."""

    owner: Any
    name: Any
    value: Any


class _Layer:
    """One replacement. before: what to put back."""

    __slots__ = ("before", "name", "owner")

    def __init__(self, owner: Any, name: Any, before: Any) -> None:
        self.owner = owner
        self.name = name
        self.before = before


class Scope(NamedTuple):
    """What is known inside. watch: a watch.Watch, which notes what forward reads; table: the opaque.Table of the trace;
    exporting: the user's forward is being traced (Functions and kept submodules become nodes). deadline: on
    perf_counter, for traces."""

    thread: int
    ends: contextlib.ExitStack
    watch: Any = None
    table: Any = None
    exporting: bool = False
    deadline: float = math.inf

    def replace(self, owner: Any, name: Any, value: Any) -> None:
        """Until the end of this scope."""
        self.ends.callback(_undo, _replace(owner, name, value))


_scope: Scope | None = None  # the innermost
_layers: dict[tuple[int, Any], list[_Layer]] = {}


def here() -> Scope | None:
    """The scope that this thread is in."""
    scope = _scope
    return scope if scope is not None and scope.thread == threading.get_ident() else None


@contextlib.contextmanager
def scope(**fields: Any) -> Iterator[Scope]:
    """Opens a scope. fields: of Scope."""
    global _scope
    with _lock:
        outer, me = _scope, threading.get_ident()
        try:
            with contextlib.ExitStack() as ends:
                _scope = (outer or Scope(me, ends))._replace(ends=ends, **fields)
                threads.add(me)
                yield _scope
        finally:
            _scope = outer
            if outer is None:
                threads.discard(me)


@contextlib.contextmanager
def replaced(*patches: Patch) -> Iterator[None]:
    """The names stand for something else in this block."""
    if here() is None:
        raise RuntimeError("ortmodule: names of the process are replaced inside of a scope only")
    with contextlib.ExitStack() as ends:
        for patch in patches:
            ends.callback(_undo, _replace(*patch))
        yield


def only_here(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `ours` on this thread, and for all others what it was."""
    me = threading.get_ident()

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == me else original)(*args, **kwargs)

    return either


def silent() -> contextlib.AbstractContextManager[None]:
    """What this thread prints and logs is not shown (forward has said it when it was captured)."""
    me = threading.get_ident()
    return replaced(
        Patch(logging.Logger, "handle", only_here(lambda self, record: None, logging.Logger.handle)),
        Patch(sys, "stdout", _Muted(sys.stdout, me)),
        Patch(sys, "stderr", _Muted(sys.stderr, me)),
    )


class _Muted:
    """A stream without what one thread writes."""

    def __init__(self, inner: Any, thread: int) -> None:
        self._inner = inner
        self._thread = thread

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._inner.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def now() -> list[tuple[Any, Any]]:
    """(owner, name) of what is replaced at the moment."""
    return [(layer.owner, layer.name) for layers in _layers.values() for layer in layers[:1]]


def _replace(owner: Any, name: Any, value: Any) -> _Layer:
    layer = _Layer(owner, name, _read(owner, name))
    _write(owner, name, value)
    _layers.setdefault((id(owner), name), []).append(layer)
    return layer


def _undo(layer: _Layer) -> None:
    key = id(layer.owner), layer.name
    layers = _layers[key]
    at = layers.index(layer)
    del layers[at]
    if at < len(layers):
        layers[at].before = layer.before
        return
    if not layers:
        del _layers[key]
    _write(layer.owner, layer.name, layer.before)


def _read(owner: Any, name: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(name, ABSENT)
    if isinstance(owner, (type, types.ModuleType)):
        return vars(owner).get(name, ABSENT)
    return getattr(owner, name, ABSENT)


def _write(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        if value is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is not ABSENT:
        _plainly(owner)[0](owner, name, value)
    elif name in vars(owner):
        _plainly(owner)[1](owner, name)


def _plainly(owner: Any) -> tuple[Callable[[Any, Any, Any], None], Callable[[Any, Any], None]]:
    """Which setattr and delattr pass by what a metaclass of Python's makes of them (one written in C is asked:
    type's own refuses it)."""
    if not isinstance(owner, type) or type(owner).__module__ == "pybind11_builtins":
        return setattr, delattr
    return type.__setattr__, type.__delattr__
