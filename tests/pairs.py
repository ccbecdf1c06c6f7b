"""A wrapped model and its eager twin in fp64, small modules for them, and comparison of outputs, gradients and buffers
at 1e-10 relative.

Sizes are different primes and output gradients are random, so that a transposed or dropped term cannot hide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

TOLERANCE = 1e-10


class MLP(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.drop = nn.Dropout(p)
        self.second = nn.Linear(7, 11)
        self.third = nn.Linear(11, 3)
        self.scale = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(self.drop(F.relu(self.first(x)))))) * self.scale


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.bn = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.bn(self.first(x))))


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    eager = make()
    return ORTModule(copy.deepcopy(eager), strict="engine", **options), eager


def close(a: Tensor | None, b: Tensor | None, what: str = "") -> None:
    if a is None or b is None:
        assert a is None and b is None, f"{what}: {a} against {b}"
        return
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    scale = b.abs().max().item() if b.numel() else 1.0
    error = (a - b).abs().max().item() if b.numel() else 0.0
    assert error <= TOLERANCE * max(scale, 1e-6), f"{what}: error {error:.3g} at scale {scale:.3g}"


def same_state(ours: nn.Module, eager: nn.Module) -> None:
    mine, theirs = dict(ours.named_parameters()), dict(eager.named_parameters())
    assert list(mine) == list(theirs)
    for name in mine:
        close(mine[name].grad, theirs[name].grad, f"gradient of {name}")
        close(mine[name].detach(), theirs[name].detach(), name)
    for (name, a), (_, b) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
        close(a, b, name) if a.is_floating_point() else None
        assert torch.equal(a, b) or a.is_floating_point(), name


def nodes_in_engine(model: Any) -> None:
    report = model.report()
    assert report.n_captures >= 1 and report.node_share == 1 and not report.eager, str(report)


def step(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.detach().requires_grad_()
    out = model(x)
    out.backward(grad)
    return out.detach(), x.grad


def step_of_both(ours: Any, eager: Any, *args: Any) -> None:
    """A step of each: losses, gradients (and which there are) and buffers."""
    losses = []
    for m in (ours, eager):
        m.zero_grad()
        losses.append(m(*args))
        if losses[-1].requires_grad:
            (losses[-1] if losses[-1].dim() == 0 else losses[-1].square().mean()).backward()
    assert losses[0].requires_grad is losses[1].requires_grad
    close(*losses)
    for (name, p), (other, q) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert name == other
        close(p.grad, q.grad, name)
    for (name, p), (_, q) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
        close(p, q, name)
