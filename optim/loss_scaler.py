"""Dynamic loss scaling with the numbers of onnxruntime-training. The arithmetic is om_loss_scale_next
(csrc/optim/optim_math.h), here and on CUDA."""

from __future__ import annotations

import math
from typing import Any

from ortmodule import _C

from .cuda import Mirror


def positive(what: str, value: Any) -> float:
    """value as a loss scale."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{what}={value!r} given; it must be positive and finite")
    return number


def count(state: dict[str, Any], name: str) -> float:
    """A number of steps in a saved state."""
    try:
        number = float(state.get(name))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"the saved {name} is {state.get(name)!r}; it must be a number of steps")
    return number


class DynamicLossScaler:
    """Halves the scale at an overflow, doubles it after `up_scale_window` good steps, within [min_loss_scale,
    max_loss_scale].

    automatic_update False: the scale is constant (and may be set by hand). While FP16_Optimizer steps on CUDA, the
    scale lives there, and reading it waits for the device.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        loss_scale = positive("loss_scale", loss_scale)
        if not up_scale_window > 0:
            raise ValueError(f"up_scale_window={up_scale_window} given; it must be positive")
        if not 0 < min_loss_scale <= max_loss_scale:
            raise ValueError(
                f"min_loss_scale={min_loss_scale}, max_loss_scale={max_loss_scale} given; 0 < min <= max is needed"
            )
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._initial_scale = loss_scale
        self.state = Mirror(self._initial_scale, 0.0)  # the scale, good steps since it changed

    @property
    def loss_scale(self) -> float:
        return self.state.get()[0]

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.state.set(positive("loss_scale", value), self.state.get()[1])

    def reset(self) -> None:
        """Back to the scale given at construction."""
        self.state.set(self._initial_scale, 0.0)

    def rule(self) -> tuple[float, float, float]:
        """What om_loss_scale_next asks for."""
        return self.up_scale_window, self.min_loss_scale, self.max_loss_scale

    def update(self, all_finite: Any) -> float:
        """Tells the outcome of a step: a bool, or an object with `all_finite` (onnxruntime-training's TrainStepInfo).
        Returns the new scale."""
        finite = bool(getattr(all_finite, "all_finite", all_finite))
        if self.automatic_update:
            scale, good = self.state.get()
            self.state.set(*_C.loss_scale_next(scale, good, finite, *self.rule()))
        return self.loss_scale

    def state_dict(self) -> dict[str, float]:
        scale, good = self.state.get()
        return {"loss_scale": scale, "stable_steps": int(good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A state that is none raises ValueError and changes nothing."""
        self.state.set(positive("the saved loss_scale", state.get("loss_scale")), count(state, "stable_steps"))
