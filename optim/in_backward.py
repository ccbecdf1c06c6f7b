"""Updates within backward: a parameter takes its step as soon as its gradient is complete, which is then let go of.

The gradients of a whole model, 4 bytes a parameter in f32, then never exist together: only those of the backward
segment that is running (`segment_mb`), or in eager the one that was just made.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ortmodule import forks

from .fp16_optimizer import MixedPrecision
from .fused import FusedOptimizer
from .shards import PLAIN

# whose step treats each parameter for itself, and keeps nothing between steps but by parameter
_BY_PARAMETER = {
    cls
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD",
                 "Adafactor", "SparseAdam", "Muon")
    if (cls := getattr(torch.optim, name, None)) is not None
}  # fmt: skip


def step_in_backward(optimizer: torch.optim.Optimizer) -> StepInBackward:
    """From now on `loss.backward()` updates the optimizer's parameters, each as soon as its gradient is complete, and
    sets that gradient to None. The loop stays as it is: `optimizer.step()` ends a step, after one backward, and finds
    nothing more to do; schedules, state_dict and zero_grad work as ever. The numbers have the bits of ordinary steps.

    optimizer: FusedAdam, FusedSGD, FusedLAMB without max_grad_norm (CPU), or one of torch.optim that treats parameters
    one by one. What needs all gradients first cannot be had: clipping by their norm, accumulation over several
    backwards, GradScaler, FP16_Optimizer, several ranks. Each of them raises, but for torch's clip_grad_norm_, which
    finds no gradients and returns 0.
    -> remove() ends it.
    """
    return StepInBackward(optimizer)


class StepInBackward:
    """What step_in_backward returns. The optimizer holds it, and nothing here holds the optimizer: an optimizer that is
    given up updates nothing any more."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, MixedPrecision):
            raise TypeError("step_in_backward of an FP16_Optimizer: it needs all gradients to know whether they have "
                            "overflowed; use bfloat16 (FusedAdam(master_weights=True)) without it")  # fmt: skip
        fused = isinstance(optimizer, FusedOptimizer)
        if not fused and type(optimizer) not in _BY_PARAMETER:
            raise TypeError(f"step_in_backward of {type(optimizer).__name__}: it is not known to treat its parameters "
                            "one by one; allowed: FusedAdam, FusedSGD, FusedLAMB and, of torch.optim, "
                            f"{', '.join(sorted(c.__name__ for c in _BY_PARAMETER))}")  # fmt: skip
        self._optimizer = weakref.ref(optimizer)
        self._lock = forks.lock()
        self._hook: dict[int, Any] = {}  # by id of a parameter
        self._place: dict[int, tuple[int, int, int]] = {}  # its group, its place there and among all; see _find
        self._updated: set[int] = set()  # since the last optimizer.step()
        self._watch(optimizer)
        self._before = optimizer.register_step_pre_hook(self._ends)

    def remove(self) -> None:
        """Ordinary steps again; gradients that arrive are kept."""
        self._before.remove()
        for hook in self._hook.values():
            hook.remove()
        self._hook.clear()

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters that were added, or unfrozen, too; none that were taken out."""
        self._find_all(optimizer)
        for gone in self._hook.keys() - self._place.keys():
            self._hook.pop(gone).remove()
        for group in optimizer.param_groups:
            self._check_group(optimizer, group)
            for p in group["params"]:
                if id(p) in self._hook or not p.requires_grad:
                    continue
                if type(p) not in PLAIN:
                    raise TypeError(f"step_in_backward of a {type(p).__name__}: ordinary parameters are allowed")
                self._hook[id(p)] = p.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self)))

    @staticmethod
    def _check_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if group.get("max_grad_norm"):
            raise ValueError(f"step_in_backward of {type(optimizer).__name__} with max_grad_norm="
                             f"{group['max_grad_norm']}: the norm of all gradients is known after backward; give "
                             "max_grad_norm=None")  # fmt: skip

    def _find_all(self, optimizer: torch.optim.Optimizer) -> None:
        places: dict[int, tuple[int, int, int]] = {}
        number = 0
        for index, group in enumerate(optimizer.param_groups):
            for at, p in enumerate(group["params"]):
                number += 1
                if places.setdefault(id(p), (index, at, number))[2] != number:
                    raise ValueError(f"step_in_backward: a parameter of sizes {tuple(p.shape)} is in the optimizer "
                                     "twice, so that one gradient is to move it twice; list it once")  # fmt: skip
        self._place = places

    def _find(self, optimizer: torch.optim.Optimizer, p: Tensor) -> tuple[dict[str, Any], int] | None:
        """Its group now, and its place among all; None: the optimizer has it no more."""
        for _ in range(2):
            index, at, number = self._place.get(id(p), (0, -1, 0))
            groups = optimizer.param_groups
            if index < len(groups) and 0 <= at < len(groups[index]["params"]) and groups[index]["params"][at] is p:
                return groups[index], number
            self._find_all(optimizer)  # groups have changed
        return None

    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before optimizer.step(), which goes over what has a gradient nevertheless."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError("step_in_backward with loss scaling (GradScaler, grad_scale): backward has updated the "
                               "parameters with scaled gradients; use bfloat16, or step after backward")  # fmt: skip
        self._updated.clear()
        self._watch(optimizer)

    def _update(self, optimizer: torch.optim.Optimizer, p: Tensor) -> None:
        with self._lock:
            found = self._find(optimizer, p)
            if found is None:
                return
            group, number = found
            self._check_group(optimizer, group)
            if p.grad is None:
                raise RuntimeError("step_in_backward: another hook of the parameter has taken its gradient; is it in "
                                   "two optimizers?")  # fmt: skip
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise RuntimeError("step_in_backward with several ranks: what has just come is the gradient of this "
                                   "rank, not their mean; step after backward")  # fmt: skip
            if id(p) in self._updated:
                raise RuntimeError("step_in_backward: a parameter got a second gradient before optimizer.step(). Call "
                                   "that after each backward; gradients of several backwards cannot be summed, for the "
                                   "first is gone")  # fmt: skip
            self._updated.add(id(p))
            groups = optimizer.param_groups
            params, count = group["params"], group.get("step")
            group["params"], optimizer.param_groups = [p], [group]
            try:
                if isinstance(optimizer, FusedOptimizer):
                    _step_fused(optimizer, p, number)
                else:
                    step = type(optimizer).step  # within: what a step's own hooks and the profiler wrap around it
                    getattr(step, "__wrapped__", step)(optimizer)
            finally:
                group["params"], optimizer.param_groups = params, groups
                if count is not None:
                    group["step"] = count
                else:
                    group.pop("step", None)
            p.grad = None


def _step_fused(optimizer: FusedOptimizer, p: Tensor, number: int) -> None:
    if not p.is_cpu:
        raise RuntimeError(f"step_in_backward of {type(optimizer).__name__} on {p.device}: on the CPU only; of "
                           "torch.optim's optimizers it can be had there")  # fmt: skip
    seed = optimizer.rounding_seed
    optimizer.rounding_seed = (seed + 0xBF58476D1CE4E5B9 * number) & (1 << 64) - 1  # bits of its own for each parameter
    try:
        with torch.no_grad():
            optimizer._step()
    finally:
        optimizer.rounding_seed = seed


def _arrived(of: weakref.ref[StepInBackward], p: Tensor) -> None:
    if (own := of()) is not None and (optimizer := own._optimizer()) is not None:
        own._update(optimizer, p)
