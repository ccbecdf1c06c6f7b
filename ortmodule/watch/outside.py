"""What forward may reach beyond Python's values: clocks, generators of random numbers that are not torch's, files,
signals, threads, the settings of the process. watch.py is told of calls to these; the state of generators is read and
put back.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import io
import logging
import operator
import os
import pickle
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import autocast
from .. import torch_private as private

RANDOM = (random.Random, torch.Generator)
# C functions and Python code that change what no one can put back; what they do
_FOR_GOOD = (
    ("os", "write pwrite writev pwritev sendfile open openpty read readv pread close dup dup2 lseek pipe pipe2"),
    ("os", "truncate ftruncate remove unlink rename replace link symlink mkdir rmdir mkfifo mknod chmod chown utime"),
    ("os", "chdir fchdir putenv unsetenv umask nice fork forkpty kill killpg system posix_spawn posix_spawnp waitpid"),
    ("os", "wait memfd_create"),
    ("_posixsubprocess", "fork_exec"),
    ("_thread", "start_new_thread start_joinable_thread interrupt_main"),
    ("_signal", "signal alarm setitimer raise_signal pthread_kill"),
    ("atexit", "register unregister"),
)  # fmt: skip
_SIGNALS = {threading.Event: "set clear", threading.Condition: "notify", threading.Semaphore: "acquire release",
            threading.Barrier: "wait reset abort", threading.Thread: "start"}  # fmt: skip
_FOR_GOOD_TYPES = (("_queue", "SimpleQueue"), ("_socket", "socket"), ("mmap", "mmap"), ("sqlite3", "Connection"),
                   ("sqlite3", "Cursor"))  # fmt: skip
_CLOCKS = tuple(
    getattr(time, n)
    for n in (
        "time",
        "time_ns",
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
    )
)


def _special_code() -> dict[Any, str]:
    # what sets it is refused at once: capture/refused.py
    rng = "calls torch.{}, which reads the state of torch's generator itself"
    codes = {
        f.__code__: rng.format(f.__name__)
        for f in (torch.random.initial_seed, torch.random.get_rng_state)
        if hasattr(f, "__code__")
    }
    environ: Any = type(os.environ)
    codes[environ.__getitem__.__code__] = "environ"
    codes.update((getattr(environ, n).__code__, "all of environ") for n in ("__iter__", "__len__", "__repr__"))
    codes[torch.autocast.__init__.__code__] = "autocast"
    codes[logging.Logger.handle.__code__] = "log"
    codes[logging.Logger.isEnabledFor.__code__] = "level"
    codes[logging.Logger.getEffectiveLevel.__code__] = "level"
    codes[threading.current_thread.__code__] = "thread"
    codes[Tensor.__hash__.__code__] = "key"
    codes[type(nn.Parameter).__instancecheck__.__code__] = "class"  # type: ignore[attr-defined]
    codes[torch.save.__code__] = "for good"
    for cls, names in _SIGNALS.items():
        codes.update((getattr(cls, name).__code__, "for good") for name in names.split())
    return codes


_OF_LIBRARIES = private.switches()
SPECIAL = _special_code()
OF_MODULES = (property, torch.backends.ContextProp)  # settings that the class of a module of Python's answers for
GETTERS = tuple(f for f in (torch.get_num_threads, torch.get_num_interop_threads, os.getpid, os.getcwd,
                             sys.getrecursionlimit, sys.getswitchinterval, threading.get_ident,
                             threading.get_native_id, *_OF_LIBRARIES))


# what tells a type that torch.autocast computes in where it is given none; what that is, by kind of device
AUTOCAST = tuple([getattr(torch, f"get_autocast_{n}dtype") for n in ("", "cpu_", "gpu_")])
AUTOCAST_TYPES = tuple([partial(torch.get_autocast_dtype, kind) for kind in autocast.KINDS])


# methods in C that read an object's attributes past its __getattribute__, for copies of it; by the types' own names
OF_COPIES = frozenset(("__reduce_ex__", "__reduce__", "__getstate__"))
_OF_COPIES = tuple([f for n in OF_COPIES if isinstance(f := getattr(object(), n, None), types.BuiltinFunctionType)])
PICKLES = (pickle.dump, pickle.dumps)

# What of the process or thread forward may leave changed: how it is told, and put back (PyTorch sets it anew).
_SWITCHES: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any] | None], ...] = (
    ("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    *[("autocast", partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
      for kind in autocast.KINDS],
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("whether algorithms are deterministic", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    ("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    ("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ("which levels are logged", lambda: logging.root.manager.disable, logging.disable),
    ("numpy's errors", np.geterr, lambda was: np.seterr(**was)),
    ("how numpy prints", np.get_printoptions, lambda was: np.set_printoptions(**was)),
    ("how PyTorch prints", lambda: vars(torch._tensor_str.PRINT_OPTS).copy(),
     lambda was: vars(torch._tensor_str.PRINT_OPTS).update(was)),
    ("decimal's precision", lambda: decimal.getcontext().prec, lambda was: setattr(decimal.getcontext(), "prec", was)),
    ("a switch of PyTorch's libraries", lambda: [get() for get in _OF_LIBRARIES], None),
)


def switches() -> list[Any]:
    return [get() for _, get, _ in _SWITCHES]


def left_changed(before: list[Any]) -> str:
    """What is no longer as `switches` has told before, and is put back; "": nothing."""
    changed = ""
    for (name, get, put), was in zip(_SWITCHES, before, strict=True):
        if get() != was:
            changed = changed or name
            if put is not None:
                put(was)
    return changed


def for_good() -> tuple[Any, ...]:
    found = [(sys.modules.get(module), names) for module, names in _FOR_GOOD]
    return tuple([f for m, names in found for n in names.split() if (f := getattr(m, n, None)) is not None])


def told_types() -> tuple[type, ...]:
    """Builtin methods of their objects are of interest."""
    return random.Random, torch.Generator, io.TextIOBase, io.BufferedIOBase, io.RawIOBase, *for_good_types()


def for_good_types() -> tuple[type, ...]:
    return tuple([getattr(sys.modules[m], n) for m, n in _FOR_GOOD_TYPES if m in sys.modules])


def watched_functions() -> tuple[Any, ...]:
    import datetime

    return (
        *_CLOCKS,
        datetime.datetime.now,
        datetime.datetime.utcnow,
        datetime.datetime.today,
        datetime.date.today,
        os.urandom,
        builtins.print,
        builtins.input,
        builtins.globals,
        time.sleep,
        io.open,
        builtins.id,
        gc.isenabled,
        gc.get_count,
        operator.is_,
        operator.is_not,
        *GETTERS,
        *AUTOCAST,
        *_OF_COPIES,
        *PICKLES,
        *for_good(),
    )


def _hashable(x: Any) -> Any:
    if isinstance(x, dict):
        return ("dict", tuple((k, _hashable(v)) for k, v in x.items()))
    if hasattr(x, "tobytes") and hasattr(x, "dtype") and x.shape:
        return ("array", x.dtype.str, x.tobytes())
    return x


def from_hashable(x: Any) -> Any:
    import numpy as np

    if isinstance(x, tuple) and x and x[0] == "dict":
        return {k: from_hashable(v) for k, v in x[1]}
    if isinstance(x, tuple) and x and x[0] == "array":
        return np.frombuffer(x[2], dtype=x[1]).copy()
    return x


def numpy_state(numpy: Any) -> Any:
    return None if numpy is None else _hashable(numpy.random.mtrand._rand._bit_generator.state)


def generator_state(g: Any) -> Any:
    if isinstance(g, random.Random):
        return g.getstate()
    return _hashable(getattr(g, "bit_generator", None) and g.bit_generator.state or g._bit_generator.state)


def set_generator_state(g: Any, state: Any) -> None:
    if isinstance(g, random.Random):
        g.setstate(state)
    elif hasattr(g, "bit_generator"):
        g.bit_generator.state = from_hashable(state)
    else:
        g._bit_generator.state = from_hashable(state)


def decimal_context() -> str:
    now = decimal.getcontext()
    return f"{now.prec} {now.rounding} {now.Emin} {now.Emax} {now.clamp}"
