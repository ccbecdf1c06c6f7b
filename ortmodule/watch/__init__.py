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

import builtins
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from .. import _C, contents, patches
from . import outside
from .calls import Calls
from .table import Held, Problem
from .ties import Ties

__all__ = ["Held", "Problem", "Ties", "Watch", "inside", "quiet", "running", "watching"]


class Watch(Calls):
    """See the package's head. One layer a file: Table, Values, Settled, Modules, Calls."""

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
        active = self._active
        self._active += 1
        profile: Any = sys.getprofile()
        switches = outside.switches() if self._active == 1 and not self.quiet else None

        def unwatched() -> None:
            self._active = active
            if not active:
                _C.watch_end()
                if hasattr(profile, "enable"):  # cProfile
                    profile.enable()
                elif callable(profile):  # that of torch.profiler's with_stack is C's alone, and sees no more frames
                    sys.setprofile(profile)

        try:
            with patches.no_collector():  # finalizers and callbacks of the collector are no part of forward
                try:
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
                    unwatched()
        finally:
            if self._active != active:  # an interrupt has come
                unwatched()
            left = "" if switches is None else outside.left_changed(switches)
            if left:
                self._problem("", f"leaves {left} changed")
            self.settle()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What runs inside is run again at every step: its reads need no rows. What it changes is put back all the same."""
    watch = watching()
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


@contextlib.contextmanager
def inside(caller: str | None, kept: bool = False) -> Iterator[None]:
    """Code runs that the graph will call. caller: the module whose code calls it; None: the one that runs here. kept: a
    run of all in PyTorch is in a module that will be kept there."""
    watch = watching()
    if watch is None:
        yield
        return
    before, watch.caller = watch.caller, watch._module_at(sys._getframe(2)) if caller is None else caller
    watch.kept += kept
    try:
        yield
    finally:
        watch.caller = before
        watch.kept -= kept


def running() -> contextlib.AbstractContextManager[None]:
    """To be entered around the traced forward; at its end, before anything else is put back, what it changed is."""
    watch = watching()
    return watch.running() if watch is not None else contextlib.nullcontext()


def watching() -> Watch | None:
    """The watch over the capture that this thread is in."""
    scope = patches.here()
    return scope.watch if scope is not None else None
