"""Floor division and shifts of numbers made from sizes, which may be negative and divided by what is: as factors and as
sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")

NUMBERS: dict[str, Callable[[int], int]] = {
    "ceil": lambda n: -(-n // 2),
    "difference": lambda n: (6 - n) // 2,
    "shift": lambda n: -n >> 1,
    "by a negative number": lambda n: n // -2,
    "both": lambda n: (3 - n) // -4,
    "by a size": lambda n: (7 - 2 * n) // n,
    "by a difference": lambda n: n // (n - 9),
    "remainder": lambda n: -n % 4,
    "remainder of a negative divisor": lambda n: n % -4,
    "of a product": lambda n: (n * n - 20) // 3,
    "twice": lambda n: -(-(-n // 2) // 2),
}


class Scales(nn.Module):
    def __init__(self, number: Callable[[int], int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.number(x.shape[0])


class Sized(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + self.layer.bias.new_ones(self.number(x.shape[0]) + 30, 4) * self.layer.bias


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("module", [Scales, Sized])
def test_rounds_as_python_does(module: type[Scales], name: str) -> None:
    eager = module(NUMBERS[name])
    wrapped = ORTModule(copy.deepcopy(eager))
    for n in (4, 5, 3, 7, 1, 2, 8, 6):
        x = torch.randn(n, 4)
        for m in (eager, wrapped):
            m.zero_grad()
        want, got = eager(x), wrapped(x)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        want.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(wrapped.layer.bias.grad, eager.layer.bias.grad, rtol=1e-10, atol=1e-10)
    assert wrapped.report().graphs, str(wrapped.report())
