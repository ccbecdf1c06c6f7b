"""Forward writes what requires a gradient into an argument that requires none: PyTorch makes the argument part of the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


def view(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    return x.view(-1)


def itself(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    return x


def a_part(x: Tensor, y: Tensor) -> Any:
    x[0] = y[0]
    return x.t() * 1, x[1:]


def a_view_from_before(x: Tensor, y: Tensor) -> Any:
    v = x.view(-1)
    x.mul_(y)
    return v


def sums(x: Tensor, y: Tensor) -> Any:
    v = x.view(-1)
    x.copy_(y)
    return v.sum(), x.sum()


def values_alone(x: Tensor, y: Tensor) -> Any:
    x.add_(y.detach())
    return y * 2


class Writes(nn.Module):
    def __init__(self, rule: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.rule = nn.Linear(4, 4), rule

    def forward(self, x: Tensor) -> Any:
        return self.rule(x, self.a(torch.ones(3, 4, dtype=x.dtype)))


@pytest.mark.parametrize("rule", [view, itself, a_part, a_view_from_before, sums, values_alone])
def test_gradients_and_what_is_written(rule: Callable[[Tensor, Tensor], Any]) -> None:
    eager = Writes(rule).double()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        found: list[Any] = []
        for model in (ours, eager):
            model.zero_grad()
            x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
            out = model(x)
            out = out if isinstance(out, tuple) else (out,)
            (sum((t * t).sum() for t in out) + (x.sum() if x.requires_grad else 0)).backward()
            found.append((x.requires_grad, [t.detach().clone() for t in (*out, x)], [p.grad.clone() for p in model.parameters()]))
        assert found[0][0] == found[1][0] == (rule is not values_alone)
        torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-11, atol=1e-12)
    reasons = [e.reason for e in ours.report().eager]
    assert reasons == ([] if rule is values_alone else ["forward writes what requires a gradient into an argument that requires none"])
    with torch.no_grad():
        x, z = torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
        torch.testing.assert_close(ours(x), eager(z))
        torch.testing.assert_close(x, z)


class Leaky(nn.Module):
    """A cell that keeps its state in a buffer, a tensor that is none, or what a dictionary holds."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.line, self.where = nn.Linear(4, 4), where
        self.register_buffer("state", torch.zeros(3, 4))
        self.held = {"state": torch.zeros(3, 4, dtype=torch.float64)}
        self.plain = torch.zeros(3, 4, dtype=torch.float64)

    def of(self) -> Tensor:
        return self.held["state"] if self.where == "held" else getattr(self, self.where)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        self.of().mul_(0.9).add_(self.line(x))
        return torch.sigmoid(self.of())


@pytest.mark.parametrize("where", ["state", "plain", "held"])
def test_a_state_that_becomes_part_of_the_graph(where: str) -> None:
    eager = Leaky(where).double()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    for m in (eager, ours):
        sum(m(t).sum() for t in x).backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-11, atol=1e-12)
    assert eager.of().requires_grad and ours.of().requires_grad
    assert [e.reason.split(" into ")[0] for e in ours.report().eager] == ["forward writes what requires a gradient"]


@pytest.mark.parametrize("where", ["plain", "held", "a part"])
def test_a_capture_leaves_no_history_behind(where: str) -> None:
    """A state that is multiplied at every call, over sizes of which each is captured; forward asks whether it is part
    of the graph."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((4,), 1.5, dtype=torch.float64))
            self.plain = torch.ones(4, dtype=torch.float64)
            self.held = [torch.ones(4, dtype=torch.float64)]

        def forward(self, x: Tensor) -> Tensor:
            state = self.held[0] if where == "held" else self.plain
            was = state.requires_grad
            if where == "a part":
                state[1:].mul_(self.scale[1:])
            else:
                state.mul_(self.scale)
            return state * x + (1 if was else 0)

    eager = Scaled()
    ours = ORTModule(copy.deepcopy(eager))
    for m in (eager, ours):
        first = m(torch.ones(4, dtype=torch.float64))
        others = [m(torch.ones(*size, 4, dtype=torch.float64)).sum() for size in ((3,), (1, 3))]
        (first.sum() + others[0] + others[1]).backward()
        assert first.max() == 1.5  # it was no part of the graph
    assert type(ours.scale.grad) is Tensor
    torch.testing.assert_close(ours.scale.grad, eager.scale.grad, rtol=1e-12, atol=0)
    state, wanted = (m.held[0] if where == "held" else m.plain for m in (ours, eager))
    torch.testing.assert_close(state, wanted, rtol=1e-12, atol=0)
    steps = []
    for node in (state.grad_fn, wanted.grad_fn):
        steps.append(0)
        while node is not None:
            steps[-1], node = steps[-1] + 1, node.next_functions[0][0] if node.next_functions else None
    assert steps[0] == steps[1]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.line.weight.clamp_(-0.3, 0.3)
        h = self.norm(self.line(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0))
        self.mean.add_(h.detach().sum(0))
        return h * self.mean


def test_what_is_written_without_a_gradient_stays_in_the_engine() -> None:
    eager = Counting().double()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        for m in (eager, ours):
            m.zero_grad()
            m(x).sum().backward()
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    assert not ours.report().eager
