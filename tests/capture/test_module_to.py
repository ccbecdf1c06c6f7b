"""nn.Module.to inside of forward, as the routers of Switch transformers have it: where it changes nothing the module is
captured, where it does PyTorch does it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Router(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "type":
            self.inner = self.inner.to(torch.float32)
        elif self.how == "place":
            self.inner.to("cpu")
        elif self.how == "both":
            self.inner.to(device=torch.device("cpu"), dtype=torch.float32)
        else:
            self.inner.to(torch.float64)
        return self.inner(x.to(self.inner.weight.dtype)).softmax(-1)


@pytest.mark.parametrize("how", ["type", "place", "both"])
def test_to_where_it_is(how: str) -> None:
    torch.manual_seed(0)
    eager = Router(how)
    wrapped = ORTModule(copy.deepcopy(eager))
    for n in (2, 2, 3, 1):
        x = torch.randn(n, 4)
        a, b = eager(x), wrapped(x)
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
        for m, y in ((eager, a), (wrapped, b)):
            m.zero_grad()
            y.square().sum().backward()
        torch.testing.assert_close(wrapped.inner.weight.grad, eager.inner.weight.grad, rtol=1e-5, atol=1e-6)
    assert wrapped.report().n_captures == 2 and not wrapped.report().eager


def test_to_elsewhere() -> None:
    torch.manual_seed(0)
    eager = Router("wider")
    wrapped = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(2, 4)
        a, b = eager(x), wrapped(x)
        assert a.dtype == b.dtype == torch.float64 and wrapped.inner.weight.dtype == torch.float64
        torch.testing.assert_close(b, a)
