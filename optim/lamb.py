"""LAMB, one engine call for all parameters of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ortmodule import _C

from . import cuda
from .fused import NEAREST, FusedOptimizer, check_adam
from .lists import reals
from .shards import is_sharded


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's direction, scaled per tensor by |weight| / |direction| (https://arxiv.org/abs/1904.00962).

    Args (as in Apex's FusedLAMB, with onnxruntime-training's clamps):
        max_grad_norm: gradients are divided by norm / max_grad_norm when their global norm exceeds it; None or 0 = no
        clipping. adam_w_mode: True = decay is part of the direction, False = L2 added to the gradient.
        grad_averaging: the gradient enters the first moment with 1 - beta1, or with 1.
        use_nvlamb: trust ratio also for groups without weight decay.
        ratio_min, ratio_max: clamp of the trust ratio; not applied when a norm is zero (then the ratio is 1).
        keep_grads: by default float32 gradients hold the direction after step(), as in Apex and onnxruntime-training;
        True keeps them, at the price of computing the direction twice.

    one_launch (attribute, may be set at any time): on CUDA both sweeps run in one launch, the second close behind the
    first while the data are in the L2 cache. False (default): a launch for each sweep.

    A step whose gradient norm is inf or NaN is left out as a whole when max_grad_norm is set; otherwise single elements
    whose direction is not finite keep weight and moments.
    """

    _kernel = "lamb"
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        keep_grads: bool = False,
        master_weights: bool | Literal["split"] = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedLAMB has no amsgrad variant")
        check_adam(bias_correction, betas, eps)
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm} given; it must be positive, or None for no clipping")
        if not ratio_min <= ratio_max:
            raise ValueError(f"ratio_min={ratio_min} must not exceed ratio_max={ratio_max}")
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        self.keep_grads = keep_grads
        self.last_grad_norm: float | Tensor | None = None  # on CUDA a tensor there: reading it waits for the device
        defaults = dict(
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            ratio_min=ratio_min,
            ratio_max=ratio_max,
            maximize=maximize,
        )
        super().__init__(params, defaults, set_grad_none, master_weights, stochastic_rounding, moment_dtype)

    def _part_gradients(self, collected: list[dict[int, list[list[Any]]]]) -> None:
        lists = [grads for by_store in collected for _, grads, _ in by_store.values()]
        for i in _C.overlaps(reals([g for grads in lists for g in grads])):
            for grads in lists:
                if i < len(grads):
                    grads[i] = grads[i].clone()
                    break
                i -= len(grads)

    def _leave_out(self, collected: list[dict[int, list[list[Any]]]], inv_scale: float) -> bool:
        self.last_grad_norm = None
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return False
        all_grads = [g for lists in collected for _, grads, _ in lists.values() for g in grads]
        norm, finite = _C.norm(reals(all_grads), 2.0, False)
        self.last_grad_norm = norm * inv_scale
        return not finite

    def _call(self, group, store, params, grads, states, inv_scale, seed):  # type: ignore[no-untyped-def]
        limit = group["max_grad_norm"]
        if limit and self.last_grad_norm is not None and self.last_grad_norm > limit:
            inv_scale *= limit / self.last_grad_norm
        return super()._call(group, store, params, grads, states, inv_scale, seed)

    def _constants(self, group: dict[str, Any], lr: Any, inv_scale: float) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        return (
            lr,
            beta1,
            beta2,
            group["eps"],
            decay if self.adam_w_mode else 0.0,
            0.0 if self.adam_w_mode else decay,
            1.0 - beta1 if group["grad_averaging"] else 1.0,
            group["ratio_min"],
            group["ratio_max"],
            inv_scale,
            group["bias_correction"],
            not (self.use_nvlamb or decay),
            self.keep_grads,
        )

    def _check_shards(self) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if is_sharded(p) and not all(x.is_replicate() for x in p.placements):
                raise RuntimeError(
                    f"FusedLAMB: parameter {number} of sizes {tuple(p.shape)} is a DTensor placed {p.placements}, and "
                    "LAMB needs the norm of the "
                    "whole; allowed: ordinary tensors and replicated DTensors: use FusedAdam, or "
                    "DistributedDataParallel instead of sharding"
                )

    def _check_devices(self, devices: set[int]) -> None:
        if len(devices) > 1 and any(group["max_grad_norm"] for group in self.param_groups):
            raise RuntimeError(
                f"FusedLAMB: parameters on devices {sorted(devices)} (-1: the CPU) and max_grad_norm set; their common "
                "norm needs one device: "
                "set max_grad_norm=None and clip the gradients yourself"
            )

    def _cuda_scales(
        self,
        stepper: cuda.Stepper,
        place: cuda.Place,
        params: list[Tensor],
        scale: Tensor | None,
        inv_scale: float,
        found: Tensor | None,
    ) -> tuple[list[tuple[Tensor | None, float]], Tensor | None]:
        """With max_grad_norm the norm, the clipping divisor of each group and the flag are made on the device."""
        self.last_grad_norm = None
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return super()._cuda_scales(stepper, place, params, scale, inv_scale, found)
        head = self._swept
        if head is None:
            grads = [p.grad for p in params if p.grad is not None and p.grad.layout is torch.strided]
            head, _ = stepper.table(place, "norm").refresh(
                place, "lamb", [grads, grads, None, None, None, None], NEAREST
            )
            _C.cuda_norm(*head)
        out = cuda.host.empty(2 + len(self.param_groups), torch.float32, params[0])
        for number, group in enumerate(self.param_groups):
            limit = group["max_grad_norm"] or 0.0
            _C.cuda_norm_finish(
                *head, scale, found, out[0], out[1], out[2 + number], None, 1.0 / inv_scale, limit, cuda.CLIP_LAMB
            )
        self.last_grad_norm = out[0]
        return [(out[2 + number], 1.0) for number in range(len(self.param_groups))], out[1]

    def _cuda_launch(
        self, table: cuda.Table, head: tuple[Any, ...], group: dict[str, Any], lr: float, inv_scale: float
    ) -> None:
        _C.cuda_lamb(*head, *self._constants(group, lr, inv_scale), table.order if self.one_launch else None)
