"""Two CUDA devices and the CPU, as Python sees them, of ordinary CPU tensors: parameters and copies lie where `put` has
said, what the engine made where the fake driver has its block, all else on the CPU. PyTorch computes with all of
them; the engine refuses a tensor that is not where a plan runs, as on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from cuda import fake
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ortmodule import _C, cuda_engine

CPU, UNKNOWN = -1, -2


def ordinal(t: Tensor) -> int:
    """UNKNOWN: PyTorch has computed it; that is an input's CPU, and may be a gradient's anywhere."""
    at = getattr(t, "fake_device", None)
    if at is None:
        at = fake.gpu.fake_gpu_place(fake.C.c_void_p(t.data_ptr()))
    return UNKNOWN if at == CPU and not hasattr(t, "fake_device") else at


def device_of(t: Tensor) -> torch.device:
    return cuda_engine.place(ordinal(t))


class Moved(torch.autograd.Function):
    """A copy; its gradient comes back as one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.back = max(ordinal(x), CPU)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made = grad.clone()
        made.fake_device = ctx.back  # type: ignore[attr-defined]
        return made


def put(x: Any, at: int) -> Any:
    """What `x.to(device)` does: a module in place, a copy of a tensor, through autograd, where it is not there."""
    if isinstance(x, nn.Module):
        for t in (*x.parameters(), *x.buffers()):
            t.fake_device = at  # type: ignore[attr-defined]
        return x
    if isinstance(x, FakeTensor) or ordinal(x) == at:  # fake: in a trace
        return x
    made = Moved.apply(x)
    made.fake_device = at
    return made


def install() -> None:
    fake.late(False)  # PyTorch reads the CPU tensors that stand for the devices' without waiting
    cuda_engine.stand_in = True
    cuda_engine.device_of, cuda_engine.moved = device_of, put
    _C.cuda_engine_stand_in(ordinal)
