"""A module in the engine, and graphs of PyTorch's beside it and in front of it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_running_statistics_get_no_new_version() -> None:
    """As in eager, whose batch_norm keeps them for its backward: a forward in PyTorch may be waiting."""
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    eager = Normed()
    user = copy.deepcopy(eager)
    model = ORTModule(user)
    before = user.norm.running_mean._version
    in_torch, in_engine = user(x), model(x)
    assert user.norm.running_mean._version == before
    (in_torch.sum() + in_engine.pow(2).sum()).backward()
    (eager(x).sum() + eager(x).pow(2).sum()).backward()
    for (name, a), b in zip(user.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for a, b in zip(user.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)


class Edited(Normed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        with torch.no_grad():
            self.norm.running_mean.mul_(0.5)
        return self.head(h)


def test_an_edit_of_running_statistics_is_a_version() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    eager = Edited()
    user = copy.deepcopy(eager)
    model = ORTModule(user)
    mean, var = user.norm.running_mean, user.norm.running_var
    before = mean._version, var._version
    for _ in range(2):
        model(x), eager(x)
    torch.testing.assert_close(mean, eager.norm.running_mean)
    assert mean._version > before[0]
    assert var._version == before[1]


class Two(nn.Module):
    """With a hook the graph is in two parts; the second result needs nothing of the first part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bias = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.first.register_forward_hook(lambda module, args, out: None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.second(self.first(x))), self.bias * 2


def test_a_backward_that_brings_a_part_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    eager = Two()
    user = copy.deepcopy(eager)
    model = ORTModule(user)
    for _ in range(3):
        for m in (model, eager):
            for out in m(x):
                out.sum().backward()
    for (name, a), b in zip(user.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
