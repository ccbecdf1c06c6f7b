"""Warm-up schedules of onnxruntime-training as torch schedulers: factor * initial lr, a closed form of the step.

Before the end of the warm-up the factor is step / warm-up steps (the first lr is 0). `warmup` is a fraction of
total_steps in [0, 1).
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class _WarmupLRScheduler(LRScheduler):
    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: float = 0.002, last_epoch: int = -1) -> None:
        if not total_steps > 0:
            raise ValueError(f"total_steps={total_steps} given; it must be positive")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup} given; it is a fraction of total_steps in [0, 1)")
        self.total_steps = total_steps
        self.warmup = warmup
        self._warmup_steps = float(warmup * total_steps)
        super().__init__(optimizer, last_epoch)

    def _after_warmup(self, step: int, base_lr: float) -> float:
        raise NotImplementedError

    def factor(self, step: int, base_lr: float) -> float:
        """lr / initial lr at `step` (0 = first update)."""
        if step < self._warmup_steps:
            return step / max(1.0, self._warmup_steps)
        return self._after_warmup(step, base_lr)

    def get_lr(self) -> list[Any]:
        return [base * self.factor(self.last_epoch, float(base)) for base in self.base_lrs]


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """Linear warm-up, then constant."""

    def _after_warmup(self, step: int, base_lr: float) -> float:
        return 1.0


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """Linear warm-up, then linear decay to 0 at total_steps."""

    def _after_warmup(self, step: int, base_lr: float) -> float:
        return max(0.0, (self.total_steps - step) / max(1.0, self.total_steps - self._warmup_steps))


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """Linear warm-up, then max(0, (1 + cos(2 pi cycles p)) / 2) with p running from 0 to 1."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, cycles: float = 0.5, warmup: float = 0.002, last_epoch: int = -1
    ) -> None:
        if not cycles > 0:
            raise ValueError(f"cycles={cycles} given; it must be positive")
        self.cycles = cycles
        super().__init__(optimizer, total_steps, warmup, last_epoch)

    def _after_warmup(self, step: int, base_lr: float) -> float:
        progress = (step - self._warmup_steps) / max(1.0, self.total_steps - self._warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 2.0 * self.cycles * progress)))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """Linear warm-up, then lr_end + (lr - lr_end) (1 - p)^power; lr_end after total_steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_end: float = 1e-7,
        power: float = 1.0,
        warmup: float = 0.002,
        last_epoch: int = -1,
    ) -> None:
        for group in optimizer.param_groups:
            base = float(group.get("initial_lr", group["lr"]))
            if not lr_end < base:
                raise ValueError(f"lr_end={lr_end} given; it must be smaller than the initial lr {base}")
        self.lr_end = lr_end
        self.power = power
        super().__init__(optimizer, total_steps, warmup, last_epoch)

    def _after_warmup(self, step: int, base_lr: float) -> float:
        base = float(base_lr)
        if step > self.total_steps:
            return self.lr_end / base
        left = 1.0 - (step - self._warmup_steps) / (self.total_steps - self._warmup_steps)
        return ((base - self.lr_end) * left**self.power + self.lr_end) / base


class LinearLRScheduler(LRScheduler):
    """The on-device schedule: warm-up and total given as numbers of steps; linear decay to 0."""

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, last_epoch: int = -1
    ) -> None:
        if not 0 <= warmup_step_count < total_step_count:
            raise ValueError(
                f"warmup_step_count={warmup_step_count}, total_step_count={total_step_count} given; 0 <= warm-up < "
                "total is needed"
            )
        self.warmup_step_count = warmup_step_count
        self.total_step_count = total_step_count
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        step, warmup, total = self.last_epoch, self.warmup_step_count, self.total_step_count
        factor = step / max(1, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))
        return [base * factor for base in self.base_lrs]
