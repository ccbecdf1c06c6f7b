"""Submodules that leave tensors behind, from which a loss outside of forward takes gradients: penalties, KL terms,
attention's weights; as attributes, in containers, objects, globals, closures."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import marks

pytestmark = pytest.mark.usefixtures("seeded")

LEFT: list[Tensor] = []
SHARED = types.SimpleNamespace(loss=None)
LAST: Tensor | None = None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        self.keep: Any = None
        self.list: list[Tensor] = []
        self.dict: dict[str, Tensor] = {}
        self.deque: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.object = types.SimpleNamespace(loss=None)

    def penalty(self, x: Tensor) -> Tensor:
        return self.k(x).tanh().pow(2).mean()

    def left(self) -> list[Tensor]:
        return [self.keep]


class Result(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.keep = self.q(x).tanh()
        return self.keep

    def left(self) -> list[Tensor]:
        return [self.keep.abs().mean()]


class Weights(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        self.keep = [weights, weights * 2]
        return weights @ x

    def left(self) -> list[Tensor]:
        return [w.pow(2).mean() for w in self.keep]


class OfParameters(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.keep = self.k.weight.pow(2).sum()
        return F.linear(x, self.q.weight + 0.1 * self.k.weight, self.q.bias)


class Argument(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.keep = x
        return self.q(x)

    def left(self) -> list[Tensor]:
        return [self.keep.pow(2).mean()]


class Appended(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.list.append(self.penalty(x))
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        found = list(self.list)
        self.list.clear()
        return found


class Filled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.dict["penalty"] = self.penalty(x)
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        return list(self.dict.values())


class Queued(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.deque.append(self.penalty(x))
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        return [self.deque[-1]]


class InObject(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.object.loss = self.penalty(x)
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        return [self.object.loss]


class InSharedObject(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SHARED.loss = self.penalty(x)
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        return [SHARED.loss]


class InGlobalList(Layer):
    def forward(self, x: Tensor) -> Tensor:
        LEFT.append(self.penalty(x))
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        found = LEFT.copy()
        LEFT.clear()
        return found


class Global(Layer):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST = self.penalty(x)
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        assert LAST is not None
        return [LAST]


class OfClass(Layer):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        OfClass.last = self.penalty(x)
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        assert OfClass.last is not None
        return [OfClass.last]


def _cell() -> tuple[Callable[[Tensor], None], Callable[[], Tensor]]:
    last: Any = None

    def put(x: Tensor) -> None:
        nonlocal last
        last = x

    return put, lambda: last


put, get = _cell()


class OfClosure(Layer):
    def forward(self, x: Tensor) -> Tensor:
        put(self.penalty(x))
        return self.q(x).tanh()

    def left(self) -> list[Tensor]:
        return [get()]


class Refused(Layer):
    """Stays in PyTorch for another reason: the number that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).tanh()
        self.keep = self.penalty(x)
        return y * int(y.abs().max() > 0)


class RefusedAppended(Appended):
    def forward(self, x: Tensor) -> Tensor:
        self.list.append(self.penalty(x))
        y = self.q(x).tanh()
        return y * int(y.abs().max() > 0)


class RefusedGlobal(InGlobalList):
    def forward(self, x: Tensor) -> Tensor:
        LEFT.append(self.penalty(x))
        y = self.q(x).tanh()
        return y * int(y.abs().max() > 0)


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], n: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.GELU(), layer()) for _ in range(n)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    whole = model(x).pow(2).mean()
    for m in model.modules():
        if isinstance(m, Layer):
            for t in m.left():
                whole = whole + t
    return whole


CASES = [Result, Weights, OfParameters, Argument, Appended, Filled, Queued, InObject, InSharedObject, InGlobalList, Global, OfClass, OfClosure,
         Refused, RefusedAppended, RefusedGlobal]  # fmt: skip
STORED = (OfParameters,)  # results of the graph: test_stored.py


@pytest.mark.parametrize("layer", CASES)
def test_what_is_left_behind_has_its_gradient(layer: type[Layer]) -> None:
    LEFT.clear()
    eager = Net(layer)
    wrapped = ORTModule(copy.deepcopy(eager))
    for step in range(5):
        x = torch.randn(2 + step // 3, 5, 6)
        for m in (eager, wrapped):
            m.zero_grad()
        want, got = loss(eager, x), loss(wrapped, x)
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for (name, p), q in zip(eager.named_parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    report = wrapped.report()
    named = {h.module for h in report.host}
    if layer in STORED:
        assert not named and not report.eager and report.node_share == 1, str(report)
        return
    assert named == {"blocks.0.2", "blocks.1.2"} or report.eager, str(report)
    if named:
        assert sum(g.forwards for g in report.graphs) >= 2 and "as it leaves tensors behind" in str(report)


def test_more_than_can_be_cut_out_run_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "MOST", 4)
    eager = Net(InObject, 5)
    wrapped = ORTModule(copy.deepcopy(eager))
    for _ in range(4):
        x = torch.randn(2, 5, 6)
        for m in (eager, wrapped):
            m.zero_grad()
            loss(m, x).backward()
        torch.testing.assert_close(wrapped.blocks[3][2].k.weight.grad, eager.blocks[3][2].k.weight.grad)
    assert wrapped.report().eager


def test_beside_a_budget_it_is_an_error() -> None:
    wrapped = ORTModule(Net(Refused), memory_budget="1GiB")
    with pytest.raises(Exception, match="memory_budget cannot be kept for Net: blocks.0.2 stays in PyTorch"):
        for _ in range(3):
            loss(wrapped, torch.randn(2, 5, 6)).backward()
