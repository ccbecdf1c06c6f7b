"""Gradient clipping with one sweep for the norm and, only when the norm is too large, one for the scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ortmodule import _C

from . import cuda
from .lists import on_cpu


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    loss_scale: float = 1.0,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ over all gradients as one vector; returns their norm before clipping.

    Args:
        loss_scale: gradients are that many times too large; they are divided by it in the same sweep, and the norm is
        of the result. foreach: accepted for compatibility; there is one implementation.

    The norm is accumulated in float64: float32 gradients never overflow it. On one CUDA device the 2-norm, the decision
    and the scaling stay on the device. All else (sparse, complex, distributed, several devices, orders <= 0) is handed
    to torch.nn.utils.clip_grad_norm_.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    if norm_type == 2.0 and not error_if_nonfinite and cuda.usable(grads):
        norm = cuda.clip(grads, float(max_norm), float(loss_scale))
        torch.autograd.graph.increment_version(grads)
        return norm
    if not (float(norm_type) > 0 and on_cpu(grads)):
        for g in grads if loss_scale != 1.0 else []:
            g.mul_(1.0 / loss_scale)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    wide = any(g.dtype == torch.float64 for g in grads)
    norm = _C.norm(grads, float(norm_type), False)[0] / loss_scale
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    coefficient = float(max_norm) / (norm + 1e-6)
    # a NaN norm makes every gradient NaN, as in torch
    factor = (coefficient if not coefficient >= 1.0 else 1.0) / loss_scale
    if factor != 1.0 and grads:
        _C.axpby(grads, None, factor, 0.0)
        torch.autograd.graph.increment_version(grads)
    return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32, device="cpu")
