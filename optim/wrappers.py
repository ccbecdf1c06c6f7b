"""Optimizers of Apex AMP, DeepSpeed ZeRO 1/2 and legacy Megatron-LM: their overflow check and gradient norm, replaced
by one sweep.

The objects stay theirs; single methods are replaced on the instance. Recognition is by class name, so nothing is
imported that the script has not imported. Shapes of results are those of the methods replaced (DeepSpeed: tensors since
0.14, plain values before; both accept a one-element tensor).
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .lists import grad_norm, has_nonfinite, scale_into

DEEPSPEED_ZERO = (
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer",
)
DEEPSPEED_OTHER = (  # known, and left alone: they check in their own reduction or own fused kernels
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
)
ACCELERATE_DEEPSPEED = "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper"
MEGATRON = "megatron.fp16.fp16.FP16_Optimizer"


def _class_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _skip(reason: str) -> bool:
    warnings.warn(f"Skip modifying optimizer because {reason}.", UserWarning, stacklevel=4)
    return True


def _missing(optimizer: Any, *methods: str) -> str | None:
    gone = [m for m in methods if not callable(getattr(optimizer, m, None))]
    return f"{_class_name(optimizer)} has no method {', '.join(gone)}" if gone else None


def modify_wrapper(optimizer: Any, **kwargs: Any) -> bool:
    """True when the optimizer is one of those named above (modified, or left alone with a warning)."""
    name = _class_name(optimizer)
    if name == ACCELERATE_DEEPSPEED:
        return modify_wrapper(optimizer.optimizer, **kwargs) or _skip(
            f"{_class_name(optimizer.optimizer)} inside it is not known"
        )
    if hasattr(optimizer, "_amp_stash"):
        return _modify_apex(optimizer)
    bases = {f"{c.__module__}.{c.__qualname__}" for c in type(optimizer).__mro__}
    if bases & set(DEEPSPEED_ZERO):
        return _modify_zero(optimizer)
    if bases & set(DEEPSPEED_OTHER):
        return _skip(f"{name} checks for overflow in its own way; it keeps working as it is")
    if name == MEGATRON:
        return _modify_megatron(optimizer, **kwargs)
    return False


# --- DeepSpeed ZeRO 1 and 2 ------------------------------------------------------------------------


def _modify_zero(optimizer: Any) -> bool:
    gone = _missing(optimizer, "has_overflow_serial", "get_grad_norm_direct", "has_overflow_partitioned_grads_serial")
    if gone:
        return _skip(gone)

    def flag(self: Any, grads: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([has_nonfinite(grads)], device=grads[0].device if grads else getattr(self, "device", "cpu"))

    def has_overflow_serial(self: Any, params: Any, *_: Any) -> torch.Tensor:
        return flag(self, [p.grad.detach() for p in params if p.grad is not None])

    def has_overflow_partitioned_grads_serial(self: Any) -> torch.Tensor:
        groups = self.bit16_groups if hasattr(self, "bit16_groups") else self.fp16_groups
        return flag(self, [g.detach() for i in range(len(groups)) for g in self.averaged_gradients[i] if g is not None])

    def get_grad_norm_direct(self: Any, gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        dist = torch.distributed
        order = float(norm_type)
        pairs = list(zip(gradients, params))
        if order != math.inf:  # every element once over all ranks: replicated parameters count on one of them
            pairs = [
                (g, p)
                for g, p in pairs
                if not getattr(p, "ds_pipe_replicated", False)
                and (
                    getattr(p, "model_parallel", False)
                    or getattr(p, "tensor_model_parallel", False)
                    or self.model_parallel_rank == 0
                )
            ]
        norm, _ = grad_norm([g.detach() for g, _ in pairs], order)
        device = pairs[0][0].device if pairs else getattr(self, "device", "cpu")
        wide = torch.float64 if torch.device(device).type == "cpu" else torch.float32
        total = torch.tensor(norm if order == math.inf else norm**order, dtype=wide, device=device)
        op = dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total, op=op, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=op)
        if order != math.inf:
            total = total.pow(1.0 / order)
        return torch.where(total.isfinite(), total, -torch.ones_like(total)).float()

    warnings.warn(
        "DeepSpeed fp16_optimizer functions are overrided with faster implementation.", UserWarning, stacklevel=4
    )
    for f in (has_overflow_serial, has_overflow_partitioned_grads_serial, get_grad_norm_direct):
        setattr(optimizer, f.__name__, types.MethodType(f, optimizer))
    return True


# --- Apex AMP O1/O2 ----------------------------------------------------------------------------------


def _modify_apex(optimizer: Any) -> bool:
    gone = _missing(optimizer, "_post_amp_backward", "zero_grad", "_amp_lazy_init")
    if gone:
        return _skip(gone)
    original: Callable[[Any], None] = optimizer._post_amp_backward

    def post_amp_backward(self: Any, scaler: Any) -> None:
        """Unscales the 16-bit gradients into the f32 masters: all of them in one sweep."""
        stash = self._amp_stash
        self._amp_lazy_init()
        pairs = [(h, f) for h, f in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params) if h.grad is not None]
        fresh = [(h, f) for h, f in pairs if f.grad is None]
        if len(fresh) != len(pairs) or not hasattr(scaler, "_overflow_buf"):
            original(scaler)  # gradients stashed from earlier micro-batches are added by Apex itself
            return
        for _, f in fresh:
            f.grad = torch.empty_like(f)
        halves = [h.grad for h, _ in fresh]
        if has_nonfinite(halves):
            scaler._overflow_buf.fill_(1)
        scale_into([f.grad for _, f in fresh], halves, 1.0 / float(scaler.loss_scale()))
        from apex.amp import _process_optimizer

        _process_optimizer.post_backward_models_are_masters(
            scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash
        )

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        stash = self._amp_stash
        self._amp_lazy_init()
        for p in [*stash.all_fp16_params, *stash.all_fp32_from_fp32_params]:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()
        for p in stash.all_fp32_from_fp16_params:
            p.grad = None

    warnings.warn(
        "Apex AMP fp16_optimizer functions are overrided with faster implementation.", UserWarning, stacklevel=4
    )
    if _class_name(optimizer) != "apex.optimizers.fused_sgd.FusedSGD":
        optimizer._post_amp_backward = types.MethodType(post_amp_backward, optimizer)
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
    return True


# --- Megatron-LM 1.1.5 -------------------------------------------------------------------------------


def _modify_megatron(optimizer: Any, **kwargs: Any) -> bool:
    gone = _missing(optimizer, "_check_overflow", "clip_master_grads")
    if gone:
        return _skip(gone)
    names = ("tensor", "horizontal")  # documented, and what onnxruntime-training read
    rank = next((kwargs[k] for n in names if (k := f"get_{n}_model_parallel_rank") in kwargs), None)
    group = next((kwargs[k] for n in names if (k := f"get_{n}_model_parallel_group") in kwargs), None)

    def masters(self: Any) -> list[Any]:
        return [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]

    def check_overflow(self: Any) -> None:
        params = [p for g in [*self.fp16_groups, *self.fp32_from_fp32_groups] for p in g if p.grad is not None]
        self.overflow = (
            self.loss_scaler.has_overflow(params)
            if group is not None
            else has_nonfinite([p.grad.detach() for p in params])
        )

    def clip_master_grads(self: Any, max_norm: float, norm_type: float = 2) -> float:
        if self.overflow:
            return -1
        params, order = masters(self), float(norm_type)
        counted = params if rank is None else [p for p in params if getattr(p, "model_parallel", False) or rank() == 0]
        norm, _ = grad_norm([p.grad.detach() for p in counted], order)
        if group is not None:
            op = torch.distributed.ReduceOp
            total = torch.tensor([norm if order == math.inf else norm**order], device=params[0].device)
            torch.distributed.all_reduce(total, op=op.MAX if order == math.inf else op.SUM, group=group())
            norm = float(total) if order == math.inf else float(total) ** (1.0 / order)
        if max_norm / (norm + 1e-6) < 1:
            scale_into([p.grad.detach() for p in params], None, max_norm / (norm + 1e-6))
        return norm

    warnings.warn(
        "Megatron-LM fp16_optimizer functions are overrided with faster implementation.", UserWarning, stacklevel=4
    )
    optimizer._check_overflow = types.MethodType(check_overflow, optimizer)
    optimizer.clip_master_grads = types.MethodType(clip_master_grads, optimizer)
    return True
