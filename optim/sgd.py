"""SGD with momentum, one engine call for all parameters of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from . import cuda
from .fused import COMPLEX, NEAREST, FusedOptimizer
from .lists import reals


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay as L2; state dicts go both ways."""

    _kernel = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        set_grad_none: bool = True,
        master_weights: bool | Literal["split"] = False,
        stochastic_rounding: bool = False,
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        if momentum < 0:
            raise ValueError(f"momentum={momentum} given; it must be >= 0")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        super().__init__(params, defaults, set_grad_none, master_weights, stochastic_rounding, moment_dtype)

    def _constants(self, group: dict[str, Any], lr: Any, inv_scale: float) -> tuple[Any, ...]:
        names = ("momentum", "dampening", "weight_decay")
        return (lr, *[group[name] for name in names], inv_scale, group["nesterov"])

    def _make_momentum(self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]]) -> list[bool]:
        """Makes the buffers that are missing. -> which those are."""
        missing = [s.get("momentum_buffer") is None for s in states]
        for p, state, new in zip(params, states, missing):
            if new and group["momentum"] != 0:
                state["momentum_buffer"] = self._zeros(p)
        return missing

    def _call(self, group, store, params, grads, states, inv_scale, seed):  # type: ignore[no-untyped-def]
        first = self._make_momentum(group, params, states)  # these buffers become the gradient itself
        momentum = [s["momentum_buffer"] for s in states] if group["momentum"] else None
        constants = self._constants(group, group["lr"], inv_scale)
        if store == COMPLEX:
            params, grads, momentum = reals(params), reals(grads), momentum and reals(momentum)
        return (params, grads, momentum, self._masters(store, states), max(store, NEAREST), seed, *constants, first)

    def _take_back(self, calls: list[tuple[Any, ...]], states: list[list[dict[str, Any]]]) -> None:
        for (*_, first), of_list in zip(calls, states):
            for new, state in zip(first, of_list):
                if new:
                    state.pop("momentum_buffer", None)

    def _lists(
        self, group: dict[str, Any], store: int, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> cuda.Lists:
        """On CUDA steps are counted on the device: the first one that is not left out has no momentum yet."""
        if group["momentum"] and len(set(map(id, params))) < len(params):
            raise ValueError(
                "FusedSGD: a parameter is twice in a group with momentum; on CUDA its first momentum cannot be "
                "torch's: list it once"
            )
        for p, state, new in zip(params, states, self._make_momentum(group, params, states)):
            if "step" not in state:
                state["step"] = torch.full((), 0.0 if new else 1.0, dtype=torch.float32, device=p.device)
        momentum = [s["momentum_buffer"] for s in states] if group["momentum"] else None
        return [params, grads, momentum, None, self._masters(store, states), [s["step"] for s in states]]
