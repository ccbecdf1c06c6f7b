"""Optimizers and mixed precision: FusedAdam, FusedLAMB, FusedSGD, FP16_Optimizer, loss scaling, gradient clipping,
learning-rate schedules, updates within backward.

The names and formulas are those of onnxruntime.training.optim; docs/OPTIMIZERS.md says what is more and what differs.
"""

from .clip import clip_grad_norm_
from .fp16_optimizer import FP16_Optimizer
from .fused import AdamWMode, FusedAdam
from .in_backward import StepInBackward, step_in_backward
from .lamb import FusedLAMB
from .loss_scaler import DynamicLossScaler
from .lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)
from .sgd import FusedSGD

__all__ = [
    "AdamWMode",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "DynamicLossScaler",
    "FP16_Optimizer",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "LinearLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "StepInBackward",
    "clip_grad_norm_",
    "step_in_backward",
]
