"""Locks that the child of a fork finds free: a thread of the parent that held one there is none of the child's."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> Any:
    """For what calls nothing of the user's: the thread that holds it does not fork."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> Any:
    """The thread that holds it may fork; it holds it in the child, too."""
    made = threading.RLock()
    _locks.add(made)
    return made


def _in_child() -> None:
    for each in list(_locks):
        if not (hasattr(each, "_is_owned") and each._is_owned()):
            each._at_fork_reinit()


os.register_at_fork(after_in_child=_in_child)
