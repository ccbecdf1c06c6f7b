"""Numbers that forward reads from tensors which are neither parameters nor buffers: they are compared at every call, so
an edit in place is another state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")

GLOBAL = torch.tensor(1.0)
CLOSED = torch.tensor(1.0)


class Reads(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = read
        self.own = torch.tensor(1.0)
        self.pair = torch.tensor([1.0, 1.0])
        self.whole = torch.tensor(1)
        self.dict = {"t": torch.tensor(1.0)}
        self.list = [torch.tensor(1.0)]

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.layer(x))


def closed() -> Callable[[Any, Tensor], Tensor]:
    c = CLOSED
    return lambda m, h: h * c.item()


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Tensor]]] = {
    "item": (lambda m, h: h * m.own.item(), lambda m: m.own),
    "float": (lambda m, h: h * float(m.dict["t"]), lambda m: m.dict["t"]),
    "of a list": (lambda m, h: h * float(m.list[0]), lambda m: m.list[0]),
    "tolist": (lambda m, h: h * m.pair.tolist()[0], lambda m: m.pair),
    "int": (lambda m, h: h * int(m.whole), lambda m: m.whole),
    "range": (lambda m, h: h * sum(2 for _ in range(m.whole)), lambda m: m.whole),
    "a slice": (lambda m, h: h[:, : m.whole].sum(1), lambda m: m.whole),
    "an argument": (lambda m, h: F.leaky_relu(h, m.own), lambda m: m.own),
    "a fill": (lambda m, h: h + torch.full((4,), m.own), lambda m: m.own),
    "a branch": (lambda m, h: h * (2 if m.own > 2 else 3), lambda m: m.own),
    "item, and as a tensor": (lambda m, h: h * m.own.item() + m.own, lambda m: m.own),
    "global": (lambda m, h: h * GLOBAL.item(), lambda m: GLOBAL),
    "closure": (closed(), lambda m: CLOSED),
    "as a tensor": (lambda m, h: h * m.own, lambda m: m.own),
}


@pytest.mark.parametrize("name", READS)
def test_an_edit_in_place_is_seen(name: str) -> None:
    read, what = READS[name]
    eager = Reads(read)
    wrapped = ORTModule(copy.deepcopy(eager))
    for value in (1, 1, 2, 3, 3, 4, 1):
        x = torch.randn(2, 4)
        for m in (eager, wrapped):
            m.zero_grad()
            what(m).fill_(value)
        want, got = eager(x), wrapped(x)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        want.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(wrapped.layer.weight.grad, eager.layer.weight.grad, rtol=1e-10, atol=1e-10)
    report = wrapped.report()
    assert report.graphs and len(report.graphs) <= 5, str(report)
    if name == "as a tensor":
        assert len(report.graphs) == 1


class Steps(nn.Module):
    """A counter that forward itself moves on, beside a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))
        self.scale = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        return self.layer(x) * self.scale.item()


def test_what_forward_writes_is_no_new_state() -> None:
    wrapped = ORTModule(Steps())
    for _ in range(6):
        wrapped(torch.randn(2, 4)).sum().backward()
    assert len(wrapped.report().graphs) == 1 and not wrapped.report().eager
