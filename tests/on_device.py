"""A default device for tests that name none, of their own code alone (torch.set_default_device is also that of what
they start)."""

from __future__ import annotations

import functools
import sys
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


def begin(device: str) -> None:
    if device != "fake":
        make_there(device)
        return
    from cuda import fake

    from ortmodule import _C, cuda_engine

    fake.late(False)
    cuda_engine.stand_in = True
    _C.cuda_engine_stand_in(True)
