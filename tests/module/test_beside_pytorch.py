"""A module in the engine, and graphs of PyTorch's beside it and in front of it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ortmodule import ORTModule


class Statistics(nn.Module):
    def __init__(self, of: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.head, self.of = nn.BatchNorm1d(4), nn.Linear(4, 4), of

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.head(x))
        return h, self.of(self.norm, h)


@pytest.mark.parametrize("of", [lambda n, h: n.running_var.clone(), lambda n, h: (n.running_mean**2).sum(), lambda n, h: h * n.running_var])
def test_running_statistics_have_no_gradient(of: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    eager = Statistics(of).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for _ in range(2):
        x = torch.randn(5, 4, dtype=torch.float64)
        got = []
        for m in (eager, ours):
            m.zero_grad()
            h, s = m(x)
            (h.pow(3).sum() + s.pow(3).sum()).backward()
            got.append([h, s, m.head.weight.grad, m.norm.running_var])
        for a, b in zip(*got):
            assert a.requires_grad is b.requires_grad
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


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


class Towers(nn.Module):
    """Three results: of a, of a and b, of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.bias = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.left(a))
        return h, torch.sigmoid(self.right(h * b)), self.bias * 2


class Seen(Function):
    """Makes zeros of None, and is called when the backward gets to it."""

    calls: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Seen.calls.append(ctx.number)
        return grad, None


def _each(outs: tuple[Tensor, ...], _leaves: list[Tensor]) -> Any:
    for out in outs[::2]:
        out.sum().backward()


def _all(outs: tuple[Tensor, ...], _leaves: list[Tensor]) -> Any:
    (outs[0].sum() + outs[1].pow(2).sum() + outs[2].sum()).backward()


def _last(outs: tuple[Tensor, ...], _leaves: list[Tensor]) -> Any:
    outs[2].sum().backward()


def _second(outs: tuple[Tensor, ...], _leaves: list[Tensor]) -> Any:
    outs[1].sum().backward()


def _kept(outs: tuple[Tensor, ...], _leaves: list[Tensor]) -> Any:
    for out in outs[1], outs[0], outs[2], outs[1]:
        out.sum().backward(retain_graph=True)
    outs[1].sum().backward()
    outs[2].sum().backward()


def _freed(outs: tuple[Tensor, ...], _leaves: list[Tensor]) -> Any:
    outs[0].sum().backward()
    outs[1].sum().backward()


def _asked(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> Any:
    return torch.autograd.grad(outs[1].sum(), leaves, retain_graph=True), torch.autograd.grad(
        outs[0].sum() + outs[2].sum(), leaves, allow_unused=True
    )


def _unused(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> Any:
    return torch.autograd.grad(outs[2].sum(), leaves)


def _twice(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> Any:
    (g,) = torch.autograd.grad(outs[1].sum(), leaves[1], create_graph=True)
    g.pow(2).sum().backward()


def _batched(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> Any:
    return torch.autograd.grad(outs[1], leaves, torch.eye(12).view(12, 3, 4), is_grads_batched=True)


def _elsewhere(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> Any:
    """The loss is made by another thread, whose count of operations is lower: PyTorch walks in another order."""
    losses: list[Tensor] = []

    def make() -> None:
        loss = outs[0].sum()
        for _ in range(20):
            loss = loss * 1
        losses.append(loss + outs[1].pow(2).sum() + outs[2].sum())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return torch.autograd.grad(losses[0], leaves)


ACTS = [_each, _all, _last, _second, _kept, _freed, _asked, _unused, _twice, _batched, _elsewhere]


@pytest.mark.parametrize("segment_mb", [25.0, 1e-5])
@pytest.mark.parametrize("act", ACTS)
def test_a_backward_goes_where_eagers_goes(act: Callable[..., Any], segment_mb: float) -> None:
    """Into the graphs in front of what the output depends on, and no other: hooks, Functions, freed tensors, None."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        eager = Towers()
        user = copy.deepcopy(eager)
        model = ORTModule(user, segment_mb=segment_mb)
        for step in range(3):
            data = [torch.randn(3, 4) for _ in range(2)]
            results = []
            for m in (model, eager):
                Seen.calls.clear()
                hooks: list[int] = []
                leaves = [t.clone().requires_grad_() for t in data]
                fronts = [Seen.apply(t.exp(), i) for i, t in enumerate(leaves)]
                for i, t in enumerate(fronts):
                    t.register_hook(lambda grad, i=i, hooks=hooks: hooks.append(i if grad is not None else -1))
                for p in m.parameters():
                    p.grad = None
                error: Any = None
                try:
                    found = act(m(*fronts), leaves)
                except RuntimeError as e:
                    found, error = None, type(e)
                grads = [t.grad for t in (*leaves, *[p for _, p in sorted(m.named_parameters())])]
                results.append((found, error, sorted(Seen.calls), sorted(hooks), None if error else grads))
            mine, theirs = results
            assert mine[1:4] == theirs[1:4], step
            torch.testing.assert_close(mine[0], theirs[0])
            assert (mine[4] is None) == (theirs[4] is None)
            for a, b in zip(mine[4] or (), theirs[4] or (), strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    torch.testing.assert_close(a, b)
    finally:
        torch.set_default_dtype(torch.float32)
