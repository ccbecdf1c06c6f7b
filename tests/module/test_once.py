"""What a user has written (modules kept in PyTorch, custom Functions) runs once a step, whatever backwards come: its
counters and buffers are eager's, and gradients belong to the numbers that it has drawn itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import close
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * random.random()


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3, bias=False), inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = self.first(x)
        return v, self.inner(v)


def alike(eager: list[Any], ours: list[Any]) -> None:
    for a, b in zip(eager, ours, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            close(b, a)
        else:
            assert a == b


def one_then_both(outs: Any, k: int) -> None:
    ((outs[1] ** 3).sum() if k == 0 else outs[0].sum() + (outs[1] ** 3).sum()).backward()


def two_backwards(outs: Any, k: int) -> None:
    (outs[1] ** 3).sum().backward(retain_graph=True)
    outs[0].sum().backward()


def in_turn(outs: Any, k: int) -> None:
    (outs[k % 2] ** 3).sum().backward()


def all_then_one(outs: Any, k: int) -> None:
    (outs[0].sum() + (outs[1] ** 3).sum() if k == 0 else (outs[1] ** 3).sum()).backward()


def three(outs: Any, k: int) -> None:
    for i in (0, 1, 0, 1):
        (outs[i] ** 3).sum().backward(retain_graph=True)


@pytest.mark.parametrize("backward", [one_then_both, two_backwards, in_turn, all_then_one, three])
@pytest.mark.parametrize("make", [Noise, lambda: nn.BatchNorm1d(3, momentum=None)])
def test_once_a_step(make: Callable[[], nn.Module], backward: Callable[[Any, int], None]) -> None:
    got = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        net = Net(make()).double()
        m: Any = wrap(net)
        mine: list[Any] = []
        for k in range(4):
            torch.manual_seed(k)
            random.seed(k)
            m.zero_grad()
            backward(m(torch.randn(5, 3, dtype=torch.float64)), k)
            mine += [random.random(), getattr(net.inner, "calls", None), *[b.clone() for b in m.buffers()]]
            mine += [None if p.grad is None else p.grad.clone() for p in m.parameters()]
        got.append(mine)
    alike(*got)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 3), Noise())
        self.critic = nn.Sequential(nn.Linear(3, 3), Noise(), nn.Linear(3, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


class Infinite(nn.Module):
    """An output that the loss does not use, with an infinite slope: zero times that sends the forward once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(3, 3), Noise()), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return self.last(h), (h * 0).sqrt()


def apart(outs: Any, k: int) -> None:
    for out in outs if k % 2 else outs[::-1]:
        out.exp().sum().backward()


def first(outs: Any, k: int) -> None:
    outs[0].exp().sum().backward()


@pytest.mark.parametrize(("make", "backward"), [(Towers, apart), (Infinite, first)])
def test_what_a_second_run_would_draw(make: Callable[[], nn.Module], backward: Callable[[Any, int], None]) -> None:
    got = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        net = make().double()
        m: Any = wrap(net)
        mine: list[Any] = []
        for k in range(5):
            random.seed(k)
            m.zero_grad()
            backward(m(torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(k))), k)
            mine += [random.random(), *[n.calls for n in net.modules() if isinstance(n, Noise)], *[p.grad.clone() for p in m.parameters()]]
        got.append(mine)
    alike(*got)


def test_numbers_drawn_by_python_have_no_second_derivative() -> None:
    m = ORTModule(Net(Noise()))
    for _ in range(3):  # the first calls, which assign attributes, are PyTorch's
        m(torch.randn(5, 3))[1].sum().backward()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(m(torch.randn(5, 3))[1].sum(), [*m.parameters()], create_graph=True)
