"""Ctrl-C in the middle of a capture: the process is as it was.

A handler of signals raises between any two bytecodes, also before the first one of an __exit__. So none of the blocks
of a capture can be sure of its end, PyTorch's least of all; but a capture runs in a function that is `whole`. What
blocks have left, that puts back: names of the process (patches.py), modes of PyTorch on this thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from . import patches
from . import torch_private as private

_P = ParamSpec("_P")
_R = TypeVar("_R")


def whole(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that opens scopes, and after which all is as it was, whatever has interrupted their ends."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if patches.here() is not None:
            return function(*args, **kwargs)
        before, names = private.modes_of_thread(), private.names_of_export()
        try:
            return function(*args, **kwargs)
        except Exception:
            patches.end(False)
            raise
        except BaseException as error:
            try:
                _end(error, before, names)
            finally:  # a second interrupt
                _end(error, before, names)
            raise

    return run


def _end(error: BaseException, before: private.Modes, names: list[tuple[Any, str, Any]]) -> None:
    _let_go(error, set())
    patches.end()
    patches.put_back(names)  # a block that has ended only now may have put back what it had found
    private.put_modes(before)


def _let_go(error: BaseException | None, met: set[int]) -> None:
    """Blocks that it has interrupted end now, the innermost first, and not with the traceback, when much else has
    begun: its frames give away what they hold."""
    while error is not None and id(error) not in met:
        met.add(id(error))
        at: TracebackType | None = error.__traceback__
        frames = []
        while at is not None:
            frames.append(at.tb_frame)
            at = at.tb_next
        while frames:
            with contextlib.suppress(RuntimeError):  # it runs
                frames.pop().clear()
        _let_go(error.__cause__, met)
        error = error.__context__
