"""Gradients of values far from 0: small, and exact all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

FAR: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "elu of 1.3": lambda x: F.elu(x, 1.3),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.7),
    "negatives": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="none"),
    "positives": lambda x: F.binary_cross_entropy_with_logits(-x, torch.ones_like(x), reduction="none"),
    "soft": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3), reduction="none"),
    "weighed": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), pos_weight=x.new_tensor([0.3, 1, 2.5, 7]), reduction="none"),
    "Bernoulli": lambda x: torch.distributions.Bernoulli(logits=x, validate_args=False).entropy(),
}


@pytest.mark.parametrize("name", FAR)
def test_gradients_far_out_are_as_exact_as_eagers(name: str) -> None:
    """Small gradients of confident values, one by one: a difference of large numbers has none of their bits."""

    class Far(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return FAR[name](x)

    def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        f(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    model = ORTModule(Far())
    torch.manual_seed(0)
    for lo, hi in ((-80, -30), (-30, -16), (-16, -5), (-5, -1)):
        x = torch.empty(64, 4).uniform_(lo, hi)
        exact = gradient(FAR[name], x.double())
        eager, ours = [((gradient(f, x) - exact).abs() / exact.abs().clamp(min=1e-300)).max().item() for f in (FAR[name], model)]
        assert ours <= 2 * eager + 1e-6, (lo, hi, ours, eager)
