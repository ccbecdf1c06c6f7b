"""What forward draws from torch's generator is PyTorch's own: the numbers of eager for the same seed, at every call, also
the one that captures, and what is drawn afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


def unread(m: Any, x: Tensor) -> Tensor:
    torch.randn(3)
    return m.linear(x) * torch.rand(4)


def ordered(m: Any, x: Tensor) -> Tensor:
    a = torch.randn(4, 4)
    b = torch.randn(4, 4, device="cpu")
    return m.linear(x) @ b @ a


def like(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    return h + torch.randn_like(h, device="cpu") + torch.distributions.Normal(h, h.exp()).rsample()


def stored(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.p.copy_(torch.linalg.qr(torch.randn(4, 4))[0] * torch.randn(4, 4).norm(dim=1)[:, None])
    return m.linear(x) @ m.p


def drawn_anew(m: Any, x: Tensor) -> Tensor:
    """As Performer's projections: after so many calls."""
    m.n.add_(1)
    if m.n >= 2:
        m.n.zero_()
        m.p.copy_(torch.randn(4, 4) * torch.randn(4, 4).norm(dim=1)[:, None])
    return m.linear(x) @ m.p


class Net(nn.Module):
    def __init__(self, rule: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rule = rule
        self.n: Tensor
        self.p: Tensor
        self.register_buffer("n", torch.tensor(0))
        self.register_buffer("p", torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


@pytest.mark.parametrize("rule", [unread, ordered, like, stored, drawn_anew])
def test_numbers_are_those_of_eager(rule: Callable[[Any, Tensor], Tensor]) -> None:
    eager = Net(rule)
    ours = ORTModule(Net(rule))
    ours.load_state_dict(eager.state_dict())
    for i, rows in enumerate((2, 2, 3, 3)):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(i))
        told = []
        for m in (eager, ours):
            m.zero_grad()
            torch.manual_seed(i)
            y = m(x)
            y.square().sum().backward()
            told.append([y.detach(), m.linear.weight.grad.clone(), m.p.clone(), torch.rand(2)])
        for a, b in zip(*told, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert not ours.report().eager, str(ours.report())
