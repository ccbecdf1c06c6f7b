"""Gradients arrive in the order of PyTorch's backward, whatever graph they come from: ranks fill buckets in that order, so
where two of them meet different sizes, captures or modes, gradients of different parameters would be added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Tower(nn.Module):
    """Used in another order than made, one layer twice, one weight tied; the second result needs half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.twice, self.tied = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norms[0](self.twice(self.first(x)).tanh())
        z = self.norms[1](self.twice(self.tied(y)).relu()) + y
        return self.last(self.norms[2](z)).square().mean(), y


class Beside(nn.Module):
    """Takes a second argument, that some results, or none, depend on."""

    def __init__(self, results: int) -> None:
        super().__init__()
        self.l, self.h, self.g, self.results = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), results

    def forward(self, x: Tensor, z: Tensor) -> Any:
        y = self.l(x).tanh()
        return (self.h(y), self.g(y + z)) if self.results == 2 else self.g(self.h(y))


BESIDE: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "computed": lambda x, z: (x, z * 2),
    "both computed": lambda x, z: (x.requires_grad_() * 3, z * 2),
    "leaves": lambda x, z: (x.requires_grad_(), z),
    "plain": lambda x, z: (x, z.detach()),
}


@pytest.mark.parametrize("segment_mb", [25, 0.0001], ids=["one segment", "many segments"])
@pytest.mark.parametrize("results", [1, 2])
def test_arguments_that_stand_apart_change_no_order(results: int, segment_mb: float) -> None:
    torch.manual_seed(0)
    module = Beside(results)
    model, arrived = ORTModule(module, segment_mb=segment_mb), []
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    for kind, given in BESIDE.items():
        orders = []
        for run in (module, model):
            arrived.clear()
            found = run(*given(torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)))
            sum(t.square().sum() for t in (found if results == 2 else (found,))).backward()
            orders.append([*arrived])
        assert orders[0] == orders[1], kind


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(9)])


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


def total(y: Any) -> Tensor:
    return y.float().sum() if isinstance(y, Tensor) else y[0]


def anomaly(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.set_detect_anomaly(True):
        return total(model(x))


def lowered(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return total(model(x))


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "first": lambda model, x: total(model(x)),
    "again": lambda model, x: total(model(x)),
    "other sizes": lambda model, x: total(model(x.repeat(2, *[1] * (x.ndim - 1)))),
    "an input with a gradient": lambda model, x: total(model(x.requires_grad_())),
    "a computed input": lambda model, x: total(model(x.requires_grad_() * 2)),
    "lowered": lowered,
    "in PyTorch": anomaly,
    "no gradient of the rest": lambda model, x: total(model(x)) * 2,
}
MODELS = {"tower": (Tower, (4, 8)), "deep": (deep, (4, 8)), "convolutions": (convolutions, (4, 3, 8)), "encoder": (encoder, (4, 3, 8))}


def orders(model: nn.Module, size: tuple[int, ...], segment_mb: float) -> dict[str, list[str]]:
    arrived: list[str] = []
    run = model if segment_mb < 0 else ORTModule(model, segment_mb=segment_mb)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    found = {}
    for kind, call in CALLS.items():
        arrived.clear()
        torch.manual_seed(0)
        call(run, torch.randn(size)).backward()
        found[kind] = [*arrived]
    return found


@pytest.mark.parametrize("segment_mb", [25, 0.0005], ids=["one segment", "many segments"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_arrive_in_the_order_of_pytorch(name: str, segment_mb: float) -> None:
    make, size = MODELS[name]
    want, got = orders(make(), size, -1), orders(make(), size, segment_mb)
    for kind in CALLS:
        assert got[kind] == want[kind], kind
