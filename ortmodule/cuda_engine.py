"""The graph engine on a CUDA device (csrc/cuda/): for which modules, and on which stream.

Off unless ORTMODULE_CUDA_ENGINE=1: its kernels have run under emulation only (docs/GPU_STATUS.md). A module whose
tensors lie on one CUDA device is then planned for it; several devices are left to PyTorch, as without the setting.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from . import _C

stand_in = False  # tests: CPU tensors stand for those of cuda:0


def ordinal(module: nn.Module, enabled: bool) -> int:
    """Of the device whose kernels run the module's graphs; -1: the CPU's."""
    if stand_in:
        return 0
    if not enabled:
        return -1
    devices = {t.device for t in chain(module.parameters(), module.buffers())}
    one = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return one.index if one.type == "cuda" and one.index is not None else -1


def tf32_allowed() -> bool:
    """Whether PyTorch lets float32 matrix products on CUDA cut their operands to TF32."""
    now = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # torch 2.9 and later
    return now == "tf32" if now is not None else torch.backends.cuda.matmul.allow_tf32


def follow_stream(index: int, graphs: bool) -> None:
    """What this thread queues next goes on torch's current stream, in torch's precision, and with `graphs` as CUDA
    graphs where it can."""
    if index < 0:
        return
    _C.cuda_engine_graphs(graphs)
    _C.cuda_engine_tf32(tf32_allowed())
    if not stand_in:
        _C.cuda_engine_stream(torch.cuda.current_stream(index).cuda_stream)
