"""Trainer: the settings of ORTTrainer that still matter, around an ordinary PyTorch loop.

Optimizer by name, frozen weights, gradient accumulation, loss scaling, a learning-rate schedule that moves with finite
steps only. It is thin on purpose: every part is public and works alone (docs/OPTIMIZERS.md has the same loop written
out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .optim import AdamWMode, DynamicLossScaler, FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_
from .optim.lists import grad_norm


@dataclass
class AdamConfig:
    """weight_decay_mode: 0 = before the update, 1 = after it (transformers' AdamW)."""

    lr: float = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    lambda_coef: float = 0.0
    epsilon: float = 1e-8
    max_norm_clip: float = 1.0
    do_bias_correction: bool = True
    weight_decay_mode: int = 0


@dataclass
class LambConfig:
    lr: float = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    lambda_coef: float = 0.0
    ratio_min: float = float("-inf")
    ratio_max: float = float("inf")
    epsilon: float = 1e-6
    max_norm_clip: float = 1.0
    do_bias_correction: bool = False


@dataclass
class SGDConfig:
    lr: float = 1e-3


@dataclass
class TrainerOptions:
    gradient_accumulation_steps: int = 1
    frozen_weights: list[str] = field(default_factory=list)  # names of parameters that do not train
    loss_scaler: DynamicLossScaler | float | None = None  # given: mixed precision with f32 masters
    grad_norm_clip: bool = True
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None  # makes a torch scheduler


class Trainer:
    """train_step(*inputs) runs forward, backward and, at an accumulation boundary, the optimizer; returns the loss
    (detached).

    Args:
        model: called with the inputs of train_step. Wrap it in ORTModule first if wanted.
        optim_config: AdamConfig, LambConfig or SGDConfig.
        loss_fn: loss_fn(output, *targets), or None when the model returns the loss (first element of a tuple, or
        `.loss`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optim_config: AdamConfig | LambConfig | SGDConfig,
        loss_fn: Callable[..., Tensor] | None = None,
        options: TrainerOptions | None = None,
    ) -> None:
        self.model = model
        self.config = optim_config
        self.loss_fn = loss_fn
        self.options = options or TrainerOptions()
        if self.options.gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.options.gradient_accumulation_steps} given; it must be at least 1"
            )
        self.step = 0  # calls of train_step
        self.optimization_step = 0  # finite updates
        self.all_finite = True  # of the last update
        named = dict(model.named_parameters())
        unknown = [name for name in self.options.frozen_weights if name not in named]
        if unknown:
            raise ValueError(f"frozen_weights names parameters the model does not have: {', '.join(unknown)}")
        for name in self.options.frozen_weights:
            named[name].requires_grad_(False)
        self._params = [p for p in named.values() if p.requires_grad]
        self.optimizer = _make_optimizer(self._params, optim_config, self.options.grad_norm_clip)
        if self.options.loss_scaler is not None:
            self.optimizer = FP16_Optimizer(self.optimizer, model, self.options.loss_scaler)
        self.lr_scheduler = self.options.lr_scheduler(self.optimizer) if self.options.lr_scheduler else None

    def train_step(self, *inputs: Any, targets: Iterable[Any] = ()) -> Tensor:
        """One micro-batch. Gradients are averaged over the accumulation steps."""
        self.model.train()
        loss = self._loss(self.model(*inputs), targets)
        scaled = loss / self.options.gradient_accumulation_steps
        if self.options.loss_scaler is not None:
            self.optimizer.backward(scaled)  # type: ignore[attr-defined]
        else:
            scaled.backward()
        self.step += 1
        if self.step % self.options.gradient_accumulation_steps == 0:
            self._update()
        return loss.detach()

    def eval_step(self, *inputs: Any, targets: Iterable[Any] = ()) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            return self._loss(self.model(*inputs), targets)

    def _loss(self, output: Any, targets: Iterable[Any]) -> Tensor:
        if isinstance(targets, Tensor):
            raise TypeError(
                "targets is a tensor; it must be a list of the arguments of loss_fn after the output: targets=[targets]"
            )
        if self.loss_fn is not None:
            return self.loss_fn(output, *targets)
        if isinstance(output, Tensor):
            return output
        return output.loss if hasattr(output, "loss") else output[0]

    def _update(self) -> None:
        limit = getattr(self.config, "max_norm_clip", 0.0) if self.options.grad_norm_clip else 0.0
        lamb = isinstance(self.config, LambConfig)  # clips by itself
        if self.options.loss_scaler is not None:
            if limit and not lamb:
                self.optimizer.clip_master_grads(limit)  # type: ignore[attr-defined]
            self.optimizer.step()
            self.all_finite = not self.optimizer.overflow  # type: ignore[attr-defined]
        else:
            grads = [p.grad for p in self._params if p.grad is not None]
            self.all_finite = (
                grad_norm(grads)[1] if lamb or not limit else bool(clip_grad_norm_(self._params, limit).isfinite())
            )
            if self.all_finite:
                self.optimizer.step()
        if self.all_finite:
            self.optimization_step += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only: torch.load(..., weights_only=True) reads the file."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "train_step_info": {"step": self.step, "optimization_step": self.optimization_step},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.step = state["train_step_info"]["step"]
        self.optimization_step = state["train_step_info"]["optimization_step"]


def _make_optimizer(
    params: list[Any], config: AdamConfig | LambConfig | SGDConfig, clip: bool
) -> torch.optim.Optimizer:
    if isinstance(config, SGDConfig):
        return FusedSGD(params, config.lr)
    if not isinstance(config, (AdamConfig, LambConfig)):
        raise TypeError(f"optim_config={config!r} given; allowed: AdamConfig, LambConfig, SGDConfig")
    common: dict[str, Any] = dict(
        lr=config.lr,
        betas=(config.alpha, config.beta),
        eps=config.epsilon,
        weight_decay=config.lambda_coef,
        bias_correction=config.do_bias_correction,
    )
    if isinstance(config, LambConfig):
        limit = config.max_norm_clip if clip else None
        return FusedLAMB(
            params,
            **common,
            max_grad_norm=limit,
            use_nvlamb=True,
            ratio_min=config.ratio_min,
            ratio_max=config.ratio_max,
        )
    if config.weight_decay_mode not in (0, 1):
        raise ValueError(
            f"weight_decay_mode={config.weight_decay_mode} given; allowed: 0 (before the update), 1 (after)"
        )
    mode = AdamWMode.ADAMW_TRANSFORMERS if config.weight_decay_mode else AdamWMode.ADAMW_TORCH
    return FusedAdam(params, **common, adam_w_mode=mode)
