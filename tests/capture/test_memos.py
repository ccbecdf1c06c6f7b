"""Dictionaries that forward fills: einops looks up what computes by the class of its tensors, others keep what they have
worked out by size. What only a trace would put there is nothing that forward changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

MEMO: dict[Any, Any] = {}
SCALES = (2.0, 3.0)


class ByIdentity:
    """What can be a key, and says so itself."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


KEY = ByIdentity()


def by_class(x: Tensor) -> Tensor:
    if type(x) not in MEMO:
        MEMO[type(x)] = SCALES
    return x * MEMO[type(x)][0]


def by_class_anew(x: Tensor) -> Tensor:
    """Another value for every class: which one counts in forward, only forward can tell."""
    if type(x) not in MEMO:
        MEMO[type(x)] = [2.0 + len(MEMO)]
    return x * MEMO[type(x)][0]


def by_name(x: Tensor) -> Tensor:
    if "scale" not in MEMO:
        MEMO["scale"] = SCALES
    return x * MEMO["scale"][1]


def by_hash(x: Tensor) -> Tensor:
    return x * {KEY: 2.0}[KEY]


def every_call(x: Tensor) -> Tensor:
    MEMO[f"call {len(MEMO)}"] = 1.0
    return x * float(len(MEMO))


class Net(nn.Module):
    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.linear(x))


def trained(rule: Callable[[Tensor], Tensor], wrapped: bool, before: dict[Any, Any]) -> tuple[list[Tensor], list[Any], Any]:
    MEMO.clear()
    MEMO.update(before)
    torch.manual_seed(0)
    model: Any = Net(rule)
    model = ORTModule(model) if wrapped else model
    told = []
    for i in range(4):
        model.zero_grad()
        out = model(torch.randn(2, 3, generator=torch.Generator().manual_seed(i)))
        out.sum().backward()
        told += [out.detach(), model.linear.weight.grad.clone()]
    return told, sorted(map(str, MEMO.items())), model


@pytest.mark.parametrize(("rule", "before", "in_pytorch"), [
    (by_class, {}, 1), (by_class, {Tensor: SCALES}, 0), (by_name, {}, 1), (by_name, {"scale": SCALES}, 0), (by_hash, {}, 0),
    (by_class_anew, {}, 4), (by_class_anew, {Tensor: [5.0]}, 4), (every_call, {}, 4),
])  # fmt: skip
def test_filled_as_in_eager(rule: Any, before: dict[Any, Any], in_pytorch: int) -> None:
    """The first call fills it in PyTorch, the second finds all there; what is never all there stays in PyTorch."""
    eager, filled, _ = trained(rule, False, before)
    mine, filled_too, model = trained(rule, True, before)
    for a, b in zip(eager, mine, strict=True):
        torch.testing.assert_close(b, a)
    assert filled_too == filled
    report = model.report()
    assert sum(e.calls for e in report.eager) == in_pytorch, report
    if in_pytorch == 4:
        assert any("changes" in e.reason for e in report.eager), report
