"""FP16_Optimizer: mixed precision around any optimizer, as the same object.

On a torch optimizer (ours included) the object's class becomes a subclass of its own class, so schedulers, Accelerate and isinstance keep
working, and it gains `backward`, `clip_master_grads`, `loss_scale`, `overflow`. For every 16-bit parameter there is an f32 master
weight: inside the state of our fused optimizers, otherwise a tensor that takes the parameter's place in param_groups while the inner
step or state_dict runs, and only then.

    backward(loss)   scales the loss and runs autograd
    step()           one sweep: norm and finiteness of the gradients; inf or NaN: no update, the scale halves; else gradients are unscaled
                     on their way to the masters (or inside the fused kernel), the inner step runs, masters are rounded to the parameters

A script that never calls `optimizer.backward` keeps working unscaled. Wrappers of Apex, DeepSpeed and Megatron: wrappers.py.
"""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .fused import HALF, FusedOptimizer, run_closure
from .lists import first_nonfinite, grad_norm, scale_into
from .loss_scaler import DynamicLossScaler
from .wrappers import modify_wrapper

logger = logging.getLogger("ortmodule")

ADVICE_AFTER = 5  # overflows in a row before advice is given
ADVICE = (
    "Every one of the last {n} steps overflowed. Likely causes: a learning rate too high, an input with inf or NaN, a loss computed in "
    "float16 (compute it in float32), or an epsilon that is 0 in float16 (below 6e-8). bfloat16 needs no loss scaling."
)


def FP16_Optimizer(
    optimizer: Any,
    model: torch.nn.Module | None = None,
    loss_scaler: DynamicLossScaler | float | None = None,
    **kwargs: Any,
) -> Any:
    """Makes `optimizer` a mixed-precision optimizer and returns the same object.

    Args:
        optimizer: a torch optimizer; or an Apex AMP, DeepSpeed ZeRO 1/2 or legacy Megatron optimizer, whose overflow check and norm are
            replaced by faster ones; anything else is returned as it is, with a warning.
        model: only for messages: names of parameters and modules.
        loss_scaler: DynamicLossScaler, or a number for a constant scale. Default: dynamic, 2^16, window 2000.
        kwargs: get_tensor_model_parallel_rank, get_tensor_model_parallel_group (or ..._horizontal_...) for Megatron.
    """
    if modify_wrapper(optimizer, **kwargs):
        return optimizer
    if kwargs:
        raise TypeError(f"unknown arguments for a {type(optimizer).__name__}: {', '.join(kwargs)}")
    inner = getattr(optimizer, "optimizer", None)
    if type(optimizer).__module__.startswith("accelerate.") and isinstance(inner, torch.optim.Optimizer):
        FP16_Optimizer(inner, model, loss_scaler)
        return optimizer
    nested = [v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)] if hasattr(optimizer, "__dict__") else []
    if not isinstance(optimizer, torch.optim.Optimizer) or nested:
        warnings.warn(
            f"Skip modifying optimizer because {type(optimizer).__module__}.{type(optimizer).__qualname__} is not one that FP16_Optimizer "
            "knows; it is returned unchanged.",
            UserWarning,
            stacklevel=2,
        )
        return optimizer
    if isinstance(optimizer, MixedPrecision):
        return optimizer
    cls: Any = type(optimizer)
    optimizer.__class__ = _mixed_class(cls)
    optimizer._mixed_init(model, loss_scaler)  # type: ignore[attr-defined]
    return optimizer


@functools.cache
def _mixed_class(cls: Any) -> Any:
    return type(f"FP16_{cls.__name__}", (MixedPrecision, cls), {"__module__": __name__, "__doc__": MixedPrecision.__doc__})


def _blank(cls: Any) -> Any:
    """What a copy starts from; names of parameters and a scheduler's wrapper of step() stay behind."""
    optimizer = cls.__new__(cls)
    optimizer.__setstate__({"state": {}, "param_groups": [], "defaults": {}})  # here torch puts the calls of hooks into the step() of cls
    optimizer.__class__ = _mixed_class(cls)
    optimizer._checked = optimizer._inner_step = None
    optimizer._names = {}
    return optimizer


class MixedPrecision(torch.optim.Optimizer):
    """Methods that FP16_Optimizer adds to an optimizer's class."""

    _scaler: DynamicLossScaler
    _f32_of: dict[Tensor, Tensor]  # 16-bit parameter -> f32 master; empty for our fused optimizers
    _names: dict[int, tuple[str, str]]  # id of a parameter -> its name, its module
    _inner_step: Any
    master_weights: Any
    stochastic_rounding: bool
    grad_scale: Any

    def _mixed_init(self, model: torch.nn.Module | None, loss_scaler: DynamicLossScaler | float | None) -> None:
        constant = loss_scaler is not None and not isinstance(loss_scaler, DynamicLossScaler)
        self._scaler = DynamicLossScaler(False, float(loss_scaler)) if constant else loss_scaler or DynamicLossScaler()  # type: ignore[arg-type,assignment]
        self._scaled = False  # backward() has run since the last step
        self._clip = 1.0
        self._checked: tuple[float, bool] | None = None  # norm and finiteness, while the gradients are known not to have changed
        self.overflow = False
        self.skipped_steps = 0
        self.steps = 0
        self._overflows_in_a_row = 0
        self.first_overflow: tuple[str, str] | None = None
        self._fused = isinstance(self, FusedOptimizer)
        # A scheduler made before has put a wrapper of the class's step on the instance: it becomes the inner step, and what takes its
        # place carries the mark by which schedulers recognise their wrapper.
        self._inner_step = self.__dict__.pop("step", None)
        if self._inner_step is not None:
            this = weakref.ref(self)

            def step(closure: Callable[[], Any] | None = None) -> Any:
                return MixedPrecision.step(this(), closure)  # type: ignore[arg-type]

            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            self.step = step  # type: ignore[method-assign]
        self._f32_of = {}
        self._names = {}
        if model is not None:
            for prefix, module in model.named_modules():
                for name, p in module.named_parameters(recurse=False):
                    path = f"{prefix}.{name}" if prefix else name
                    self._names.setdefault(id(p), (path, f"{prefix or 'the model'} ({type(module).__name__})"))
        if self._fused:
            if not (self.master_weights or self.stochastic_rounding):
                self.master_weights = True
                for p, state in self.state.items():
                    self._init_master(p, state)  # type: ignore[attr-defined]
        else:
            self._add_masters()

    _COPIED = ("_scaler", "_scaled", "_clip", "overflow", "skipped_steps", "steps", "_overflows_in_a_row", "first_overflow", "_fused", "_f32_of")

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._COPIED}}

    def _add_masters(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype in HALF and p not in self._f32_of:
                    self._f32_of[p] = p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
                    if p in self.state:  # the optimizer has run before
                        old = self.state.pop(p)
                        self.state[self._f32_of[p]] = {
                            k: v.float() if isinstance(v, Tensor) and v.dtype in HALF else v for k, v in old.items()
                        }

    @contextmanager
    def _with_masters(self) -> Iterator[None]:
        """While inside, param_groups hold the masters instead of the 16-bit parameters."""
        if not self._f32_of:
            yield
            return
        kept = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [self._f32_of.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, kept):
                group["params"] = params

    # --- scaling ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self._scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scaler.loss_scale = float(value)

    @property
    def loss_scaler(self) -> DynamicLossScaler:
        return self._scaler

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """(loss * loss_scale).backward(); update_master_grads is accepted for Apex's sake, gradients reach the masters in step()."""
        (loss.float() * self._scaler.loss_scale).backward(retain_graph=retain_graph)
        self._scaled = True
        self._checked = None

    def update_master_grads(self) -> None:
        """Nothing to do here: gradients reach the masters in step()."""

    def _grads(self) -> tuple[list[Tensor], list[Tensor]]:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            if p.grad.layout is not torch.strided:  # type: ignore[union-attr]
                raise RuntimeError("FP16_Optimizer does not support sparse gradients")
        return params, [p.grad for p in params]  # type: ignore[misc]

    def _inverse_scale(self) -> float:
        return 1.0 / self._scaler.loss_scale if self._scaled else 1.0

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Limits the norm of the unscaled gradients at the next step(); no gradient is touched. Returns the norm before, -1 at overflow."""
        _, grads = self._grads()
        norm, finite = grad_norm(grads, norm_type)
        self._checked = (norm, finite)
        if not finite:
            return -1.0
        norm *= self._inverse_scale()
        self._clip = min(1.0, max_norm / (norm + 1e-6))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self._scaled = False
        self._checked = None
        self._clip = 1.0

    # --- step -------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, or none at overflow (see `overflow`). A closure is called once, first; its loss is returned."""
        loss = None
        if closure is not None:
            loss = run_closure(self, closure)
        self._opt_called = True  # what schedulers look for, also when this step is left out
        params, grads = self._grads()
        scaled, factor = self._scaled, self._inverse_scale() * self._clip
        if scaled:
            _, finite = self._checked or grad_norm(grads)
            self.overflow = not finite
            if not finite:
                self._report_overflow(params, grads)
            scale = self._scaler.loss_scale
            self._scaler.update(finite)
            if not finite:
                logger.warning(
                    "step %d: %s in the gradient of %s, module %s; update skipped, loss scale %g -> %g",
                    self.steps + self.skipped_steps,
                    "inf or NaN",
                    *(self.first_overflow or ("a shard on another rank", "?")),
                    scale,
                    self._scaler.loss_scale,
                )
                if self._overflows_in_a_row == ADVICE_AFTER:
                    logger.warning(ADVICE.format(n=ADVICE_AFTER))
        else:
            self.overflow = False
        self._scaled, self._checked, self._clip = False, None, 1.0
        if self.overflow:
            self.skipped_steps += 1
            return loss
        self._overflows_in_a_row = 0
        self.steps += 1
        if self._fused:
            self._step_fused(factor)
        else:
            self._step_masters(params, grads, factor)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # for torch, at loading and copying: hooks are run by the inner step, none at overflow

    def _call_inner_step(self) -> None:
        if self._inner_step is not None:
            self._inner_step()
        else:
            super().step()

    def _step_fused(self, factor: float) -> None:
        if factor == 1.0:
            self._call_inner_step()
            return
        given, outer = "grad_scale" in vars(self), getattr(self, "grad_scale", None)  # a GradScaler's; None when it has unscaled
        self.grad_scale = (1.0 if outer is None else outer) / factor
        try:
            self._call_inner_step()
        finally:
            if given:
                self.grad_scale = outer
            else:
                del self.grad_scale

    def _step_masters(self, params: list[Tensor], grads: list[Tensor], factor: float) -> None:
        if any(p.dtype in HALF and p not in self._f32_of for p in params):
            self._add_masters()  # a group was added
        if factor != 1.0:
            scale_into([g for p, g in zip(params, grads) if p not in self._f32_of], None, factor)
        half = [(p, self._f32_of[p], g) for p, g in zip(params, grads) if p in self._f32_of]
        for _, master, _ in half:
            master.grad = torch.empty_like(master)
        scale_into([m.grad for _, m, _ in half], [g for _, _, g in half], factor)  # type: ignore[misc]
        try:
            with self._with_masters():
                self._call_inner_step()
        finally:
            for _, master, _ in half:
                master.grad = None
        scale_into([p.detach() for p, _, _ in half], [m for _, m, _ in half])

    def _report_overflow(self, params: list[Tensor], grads: list[Tensor]) -> None:
        self._overflows_in_a_row += 1
        index = first_nonfinite(grads)
        if index is None:
            return
        p = params[index]
        name, module = self._names.get(id(p), ("", ""))
        if not name:
            for group in self.param_groups:
                for q, known in zip(group["params"], group.get("param_names", [])):
                    if q is p:
                        name, module = known, known.rpartition(".")[0] or "the model"
        self.first_overflow = (name or f"parameter {index} of sizes {tuple(p.shape)}", module or "unknown (pass model= to FP16_Optimizer)")

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state over the masters, plus "fp16_optimizer": scaler, counters, masters. Plain tensors and numbers."""
        with self._with_masters():
            out = super().state_dict()
        masters = [self._f32_of.get(p) for group in self.param_groups for p in group["params"]]
        out["fp16_optimizer"] = {
            **self._scaler.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "overflows_in_a_row": self._overflows_in_a_row,
            "masters": {i: m for i, m in enumerate(masters) if m is not None},
        }
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes its own state, or a plain optimizer's: then the masters start from the parameters and the scale is left as it is."""
        own = state_dict.get("fp16_optimizer", {})
        inner = {k: v for k, v in state_dict.items() if k != "fp16_optimizer"}
        with self._with_masters():
            super().load_state_dict(inner)
        params = [p for group in self.param_groups for p in group["params"]]
        if own:
            self._scaler.load_state_dict(own)
            self.steps, self.skipped_steps = int(own["steps"]), int(own["skipped_steps"])
            self._overflows_in_a_row = int(own["overflows_in_a_row"])
        for i, p in enumerate(params):
            if p in self._f32_of:
                self._f32_of[p].copy_(own.get("masters", {}).get(i, p.detach()))
