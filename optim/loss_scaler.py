"""Dynamic loss scaling with the numbers of onnxruntime-training."""

from __future__ import annotations

from typing import Any


class DynamicLossScaler:
    """Halves the scale at an overflow, doubles it after `up_scale_window` good steps, within [min_loss_scale, max_loss_scale].

    automatic_update False: the scale is constant (and may be set by hand).
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        if not loss_scale > 0:
            raise ValueError(f"loss_scale={loss_scale} given; it must be positive")
        if not up_scale_window > 0:
            raise ValueError(f"up_scale_window={up_scale_window} given; it must be positive")
        if not 0 < min_loss_scale <= max_loss_scale:
            raise ValueError(f"min_loss_scale={min_loss_scale}, max_loss_scale={max_loss_scale} given; 0 < min <= max is needed")
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.loss_scale = float(loss_scale)
        self._initial_scale = float(loss_scale)
        self._stable_steps = 0

    def reset(self) -> None:
        """Back to the scale given at construction."""
        self.loss_scale = self._initial_scale
        self._stable_steps = 0

    def update(self, all_finite: Any) -> float:
        """Tells the outcome of a step: a bool, or an object with `all_finite` (onnxruntime-training's TrainStepInfo). Returns the new scale."""
        finite = bool(getattr(all_finite, "all_finite", all_finite))
        if not self.automatic_update:
            return self.loss_scale
        if finite:
            self._stable_steps += 1
            if self._stable_steps >= self.up_scale_window:
                self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
                self._stable_steps = 0
        else:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps = 0
        return self.loss_scale

    def state_dict(self) -> dict[str, float]:
        return {"loss_scale": self.loss_scale, "stable_steps": self._stable_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss_scale = float(state["loss_scale"])
        self._stable_steps = int(state["stable_steps"])
