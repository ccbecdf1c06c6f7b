"""What is heard of a capture: nothing of what PyTorch prints about attempts, a line where it takes long."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from . import patches
from . import torch_private as private

PATIENCE_S = 2.0
_EXPORTER = os.path.join("torch", "export", "_trace.py")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While a capture runs: saved_tensors_hooks of the caller do not see its tensors, and what PyTorch logs and prints
    about an attempt that fails is not shown (the ladder's own message says what happened)."""
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.name.startswith("torch.")

    loggers = [
        logging.getLogger(name)
        for name in [*logging.root.manager.loggerDict]
        if name == "torch" or name.startswith("torch.")
    ]
    handlers = {handler for log in (logging.root, *loggers) for handler in log.handlers}

    def all_again() -> None:
        for handler in handlers:
            handler.removeFilter(others)

    try:
        for handler in handlers:
            handler.addFilter(others)
        with no_hooks(), patches.replaced(patches.Patch(sys, "stderr", _Stderr(sys.stderr, thread))):
            yield
    finally:
        try:
            all_again()
        finally:  # an interrupt has left the rest of it
            all_again()


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """The script's handlers of signals run when this is over, but for SIGINT's: what they raise (a time-out, an order
    to leave) is for the script, and would be taken for a capture that has failed."""
    if threading.current_thread() is not threading.main_thread():  # which runs them
        yield
        return
    came: list[tuple[int, Any]] = []
    numbers = [int(n) for n in signal.valid_signals() if n != signal.SIGINT]
    before = {n: f for n in numbers if callable(f := signal.getsignal(n))
              and not isinstance(f, signal.Handlers)}  # fmt: skip

    def theirs() -> None:
        for n, f in before.items():
            signal.signal(n, f)

    try:
        for n in before:
            signal.signal(n, lambda n, frame: came.append((n, frame)))
        yield
    finally:
        try:
            theirs()
        finally:  # SIGINT has left the rest of it
            theirs()
        for n, frame in came:
            before[n](n, frame)


def of_signal(error: BaseException) -> bool:
    """Was this raised by SIGINT's handler, not by the code that ran?"""
    if isinstance(error, Exception):
        return False
    handler, at = getattr(signal.getsignal(signal.SIGINT), "__code__", None), error.__traceback__
    while at is not None and at.tb_frame.f_code is not handler:
        at = at.tb_next
    return at is not None or isinstance(error, KeyboardInterrupt)


def no_hooks() -> contextlib.AbstractContextManager[Any]:
    """saved_tensors_hooks of the caller do not see what is saved here. (Where there are none, one may be forbidden.)"""
    if not private.hooks_allowed():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """What takes longer than a user waits without a word is said on stderr, with its end; and, before other ranks have
    waited half as long as they do, that they may fail."""
    start = perf_counter()

    def say(what: str = text) -> None:
        print(f"ortmodule: {what} ...", file=sys.stderr, flush=True)

    limit = private.patience()
    late = threading.Timer((limit or 0.0) / 2, say, [
        f"{text}, still; ranks that wait for this one fail at their time-out, {limit} s "
        "(init_process_group(timeout=...))"
    ])  # fmt: skip
    late.daemon = True
    if limit is not None:
        late.start()

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        late.cancel()
        if (took := perf_counter() - start) > PATIENCE_S:
            print(f"ortmodule: that took {took:.1f} s", file=sys.stderr, flush=True)


class _Stderr:
    """sys.stderr without the half-made graph that torch.export prints there when it fails."""

    def __init__(self, inner: Any, thread: int) -> None:
        self.inner = inner
        self.thread = thread

    def write(self, text: str) -> int:
        if threading.get_ident() == self.thread and sys._getframe(1).f_code.co_filename.endswith(_EXPORTER):
            return len(text)
        return int(self.inner.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
