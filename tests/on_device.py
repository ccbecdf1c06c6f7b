"""A default device for tests that name none, of their own code alone (torch.set_default_device is also that of what
they start)."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import Any

import torch

FACTORIES = ("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
             "tril_indices", "triu_indices", "zeros")  # fmt: skip
MOVED = ("from_numpy", "frombuffer")


def of_a_test(name: str) -> bool:
    """The caller's module: neither ortmodule's nor PyTorch's, but for what initialises modules."""
    return name.startswith("torch.nn.modules") or name.partition(".")[0] not in ("torch", "ortmodule")


def make_there(device: str) -> None:
    """From now on in this process."""

    def made(real: Any) -> Any:
        @functools.wraps(real)
        def make(*args: Any, **kw: Any) -> Any:
            if not of_a_test(sys._getframe(1).f_globals.get("__name__", "")):
                return real(*args, **kw)
            generator = kw.get("generator")
            if kw.get("device") is None and not (real.__name__ == "as_tensor" and isinstance(args[0], torch.Tensor)):
                if generator is not None:  # of the CPU: the same numbers
                    return real(*args, **{**kw, "device": generator.device}).to(device)
                kw["device"] = device
            return real(*args, **kw)

        return make

    for name in FACTORIES:
        setattr(torch, name, made(getattr(torch, name)))
    for name in MOVED:
        real = getattr(torch, name)
        setattr(torch, name, functools.wraps(real)(lambda *args, real=real, **kw: real(*args, **kw).to(device)))


class Places:
    """All tensors stand for those of cuda:0 but what the wrapper makes for itself on the CPU."""

    def __init__(self) -> None:
        self.ours: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def note(self, real: Any) -> Any:
        @functools.wraps(real)
        def make(*args: Any, **kw: Any) -> Any:
            made = real(*args, **kw)
            if kw.get("device") == "cpu" and sys._getframe(1).f_globals.get("__name__", "").startswith("ortmodule"):
                with contextlib.suppress(RuntimeError):  # what stands in for tensors in a trace has no memory
                    storage = made.untyped_storage()
                    if storage.data_ptr():
                        self.ours[storage.data_ptr()] = storage
            return made

        return make

    def ordinal(self, t: torch.Tensor) -> int:
        return -1 if t.untyped_storage().data_ptr() in self.ours else 0  # raises where there is no memory


def begin(device: str) -> None:
    if device != "fake":
        make_there(device)
        return
    from cuda import fake

    from ortmodule import _C, cuda_engine

    places = Places()
    for name in FACTORIES:
        setattr(torch, name, places.note(getattr(torch, name)))

    def device_of(t: torch.Tensor) -> torch.device:
        with contextlib.suppress(RuntimeError):
            return cuda_engine.place(places.ordinal(t))
        return cuda_engine.place(0)

    fake.late(False)
    cuda_engine.stand_in = True
    cuda_engine.device_of = device_of
    cuda_engine.moved = lambda t, index: t.clone()
    cuda_engine.nothing = lambda index, dtype: torch.zeros((), dtype=dtype)
    _C.cuda_engine_stand_in(places.ordinal)
