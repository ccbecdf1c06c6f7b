"""A biased product asks for the scratch that it uses: at planning no operand has memory, the bias neither."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.l(x), self.l(x * 0.5)  # x * 0.5 lies in the arena until backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_biased_product_of_one_column_asks_for_what_it_uses(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = ORTModule(Twice().to(dtype)), torch.randn(9, 64).to(dtype)
    a, b = model(x)
    torch.autograd.backward([a, b], [torch.ones_like(a), torch.ones_like(b) * 2])
    weight = next(iter(model.parameters())).grad
    want = 2 * x.double().sum(0)
    assert weight is not None and (weight.double()[0] - want).abs().max() <= 2e-2 * want.abs().max()
