"""Norms, finiteness and scaled copies over lists of tensors: the engine's kernels on CPU and CUDA, torch's foreach operators elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ortmodule import _C

from . import cuda

PLAIN = (Tensor, torch.nn.Parameter)  # not DTensor and the like
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
RANK = 8  # axes of a tensor in the engine


def on_cpu(tensors: Sequence[Tensor]) -> bool:
    """Whether the engine's CPU kernels take all of them."""
    index = cuda.host.index
    return all(
        t.is_cpu and index(t) < 0 and type(t) in PLAIN and t.layout is torch.strided and t.dtype in DTYPES and t.dim() <= RANK for t in tensors
    )


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor], order: float = 2.0) -> tuple[float, bool]:
    """(norm over all elements, every element is finite), in one sweep on CPU."""
    if not grads:
        return 0.0, True
    if on_cpu(grads):
        norm, finite = _C.norm(grads, order, False)
        return norm, finite
    if order == 2.0 and cuda.usable(grads):
        norm, stop, _ = cuda.norm(grads)[0].tolist()
        return norm, not stop
    norm = float(torch.linalg.vector_norm(torch.stack([n.double() for n in torch._foreach_norm(list(grads), order)]), order))
    return norm, math.isfinite(norm) or not has_nonfinite(grads)


@torch.no_grad()
def has_nonfinite(grads: Sequence[Tensor]) -> bool:
    if not grads:
        return False
    if on_cpu(grads):
        return not _C.norm(grads, 2.0, False)[1]
    if cuda.usable(grads):
        return bool(cuda.norm(grads)[0][1])
    return not bool(torch.stack([g.isfinite().all() for g in grads]).all())


@torch.no_grad()
def first_nonfinite(grads: Sequence[Tensor]) -> int | None:
    """Index of the first tensor with an inf or NaN."""
    if on_cpu(grads):
        largest = _C.norm(grads, math.inf, True)[2]
        return next((i for i, x in enumerate(largest) if not math.isfinite(x)), None)
    return next((i for i, g in enumerate(grads) if not bool(g.isfinite().all())), None)


@torch.no_grad()
def scale_into(dst: Sequence[Tensor], src: Sequence[Tensor] | None, factor: float = 1.0) -> None:
    """dst = factor * src (src None: dst itself), converted to dst's type; counts as an in-place change of dst."""
    if not dst:
        return
    if on_cpu(dst) and (src is None or on_cpu(src)):
        _C.axpby(dst, src, factor, 0.0)
        torch.autograd.graph.increment_version(list(dst))
        return
    if cuda.usable(dst) and (src is None or (cuda.usable(src) and cuda.host.index(src[0]) == cuda.host.index(dst[0]))):
        cuda.axpby(dst, src, factor)
        torch.autograd.graph.increment_version(list(dst))
        return
    if src is not None:
        torch._foreach_copy_(list(dst), list(src))
    if factor != 1.0:
        torch._foreach_mul_(list(dst), factor)
