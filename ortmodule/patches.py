"""What a capture replaces in the process, and what replaced functions must see: one context, under one lock.

scope      entered around a capture, or a run of forward on stand-ins (net.py). Scopes nest (a capture in a capture, a
           part of one that needs more); an inner one sees the fields of the outer ones, unless it gives its own. One
           thread at a time is inside of scopes: others that want to wait at the outermost.
replaced   inside of a scope, names of the process, or of the user's modules, stand for something else. All are put back
           at the end, in any order of ends, whatever is raised: each name has a stack of layers, and a layer that goes
           from the middle leaves to the one above it what it had found itself.
interrupts a handler of signals raises between any two bytecodes (Ctrl-C), also before the first one of an __exit__. So
           a layer is noted before the name is written, and forgotten after that has been put back. What the end of a
           block has left, that of the outermost scope does, and after it interrupts.py; for names that torch.export
           replaces, too, but only then: other threads may have changed them.
forks      the child of a fork that another thread's capture is in the middle of has its names as they were found.
threads    what is replaced is met by every thread of the process. `only_here` gives the others the original; what
           depends on the scope asks `here()`, which is None for them.

The fields are the dynamic scope that functions called by PyTorch need (a fake kernel is given tensors and a number, and
has to find the table); nothing is handed back through them.

Invariant: when no scope is open, every name is as it was found; and when a layer stands, `_layers` has it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import _C, forks
from . import torch_private as private

ABSENT: Any = object()  # as a value: the name is not there
threads: set[int] = set()  # that are inside of a scope: at most one. Asked at every call of a wrapper
_lock = forks.rlock()


class Patch(NamedTuple):
    """owner: a dictionary (name is a key) or anything with attributes."""

    owner: Any
    name: Any
    value: Any


class _Layer:
    """One replacement. before: what to put back, from when it stands."""

    __slots__ = ("before", "name", "owner")

    def __init__(self, owner: Any, name: Any) -> None:
        self.owner = owner
        self.name = name
        self.before: Any = ABSENT


class Ends:
    """Replacements that end together."""

    def __init__(self) -> None:
        self._made: list[_Layer] = []

    def replace(self, owner: Any, name: Any, value: Any) -> None:
        layer = _Layer(owner, name)
        self._made.append(layer)
        layer.before = _read(owner, name)
        _layers.setdefault((id(owner), name), []).append(layer)
        _write(owner, name, value)

    def close(self) -> None:
        while self._made:
            try:
                _undo(self._made[-1])
            except Exception:  # an owner that refuses: the others first
                self._made.pop()
                self.close()
                raise
            self._made.pop()


class Scope(NamedTuple):
    """What is known inside. watch: a watch.Watch, which notes what forward reads; table: the opaque.Table of the trace;
    exporting: the user's forward is being traced (Functions and kept submodules become nodes). deadline: on
    perf_counter, for traces."""

    thread: int
    ends: Ends
    watch: Any = None
    table: Any = None
    exporting: bool = False
    deadline: float = math.inf

    def replace(self, owner: Any, name: Any, value: Any) -> None:
        """Until the end of this scope."""
        self.ends.replace(owner, name, value)

    def found(self, module: Any) -> None:
        """torch.export puts stand-ins in the place of a module's tensors; it puts these back, if it can."""
        for m in module.modules():
            for table in (m._parameters, m._buffers):
                _found.extend([Patch(table, name, value) for name, value in table.items()])


_open: list[Scope] = []  # the innermost is the last
_found: list[Patch] = []  # of the names that torch.export replaces, what was there before
_layers: dict[tuple[int, Any], list[_Layer]] = {}


def here() -> Scope | None:
    """The scope that this thread is in."""
    return _open[-1] if threads and threading.get_ident() in threads and _open else None


class scope(contextlib.AbstractContextManager[Scope]):
    """Opens a scope. fields: of Scope."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._ends = Ends()

    def __enter__(self) -> Scope:
        outer, me = here(), threading.get_ident()
        if outer is None:
            _lock.acquire()
            threads.add(me)
            _found[:] = [Patch(*row) for row in private.names_of_export()]
        _open.append((outer or Scope(me, self._ends))._replace(ends=self._ends, **self._fields))
        return _open[-1]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ends.close()
        at = next((i for i, each in enumerate(_open) if each.ends is self._ends), None)
        if at is not None:
            del _open[at:]
        if not _open:
            end(kind is not None and not issubclass(kind, Exception))


def end(interrupted: bool = True) -> None:
    """This thread is in no scope any more."""
    if _lock._is_owned():
        _put_back(interrupted)
        _open.clear()
        threads.discard(threading.get_ident())
        _lock.release()


def _put_back(interrupted: bool) -> None:
    """All names that somebody has not put back himself."""
    refused: Exception | None = None
    for layer in [layer for layers in _layers.values() for layer in reversed(layers)]:
        try:
            _undo(layer)
        except Exception as error:
            refused = error
    _layers.clear()
    if interrupted:
        _C.watch_end()
        put_back(_found)
    _found.clear()
    if refused is not None:
        raise refused


def put_back(rows: Iterable[tuple[Any, Any, Any]]) -> None:
    """(owner, name, value): names that stand for something else by now."""
    for owner, name, value in rows:
        if _read(owner, name) is not value:
            _write(owner, name, value)


def _forked() -> None:
    """In the child of a fork: a capture on another thread goes on in the parent alone."""
    if threads and here() is None:
        _put_back(True)
        _open.clear()
        threads.clear()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def replaced(*patches: Patch) -> Iterator[None]:
    """The names stand for something else in this block."""
    if here() is None:
        raise RuntimeError("ortmodule: names of the process are replaced inside of a scope only")
    ends = Ends()
    try:
        for patch in patches:
            ends.replace(*patch)
        yield
    finally:
        ends.close()


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


class _Collector:
    """Python's collector of garbage as an object whose attribute can be replaced."""

    enabled = property(lambda _: gc.isenabled(), lambda _, wanted: gc.enable() if wanted else gc.disable())


def no_collector() -> contextlib.AbstractContextManager[None]:
    """No garbage is collected in this block."""
    return replaced(Patch(_collector, "enabled", False))


_collector = _Collector()


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


def _undo(layer: _Layer) -> None:
    """Nothing, where it does not stand."""
    key = id(layer.owner), layer.name
    layers = _layers.get(key, [])
    if layer in layers:
        at = layers.index(layer)
        if layer is not layers[-1]:
            layers[at + 1].before = layer.before
        elif _read(layer.owner, layer.name) is not layer.before:
            _write(layer.owner, layer.name, layer.before)
        del layers[at]


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
