"""Calls that raise in eager PyTorch, too, say nothing about those that do not: captures stay, and others are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


def wrapped(**options: object) -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)), **options)


def wrong(model: ORTModule, times: int) -> None:
    for i in range(times):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.randn(2 + i % 3, 9))


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"max_captures": 2}], ids=str)
def test_they_use_no_captures_up(options: dict[str, object]) -> None:
    model = wrapped(**options)
    model(torch.randn(4, 8)).sum().backward()
    wrong(model, 20)
    for rows in (4, 6, 6, 7, 4):
        model(torch.randn(rows, 8)).sum().backward()
    report = model.report()
    assert report.n_captures == 2 and not [e for e in report.eager if "not enough" in e.reason]
    before = sum(e.calls for e in report.eager)
    wrong(model, 3)
    model(torch.randn(7, 8)).sum().backward()
    assert sum(e.calls for e in model.report().eager) <= before + 3


def test_they_come_first() -> None:
    model = wrapped()
    wrong(model, 12)
    for rows in (4, 4, 6, 7):
        model(torch.randn(rows, 8)).sum().backward()
    assert model.report().n_captures >= 1
    before = sum(e.calls for e in model.report().eager)
    model(torch.randn(11, 8))
    assert sum(e.calls for e in model.report().eager) == before


def test_an_error_of_its_own_at_some_calls() -> None:
    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 8:
                raise ValueError(f"too many rows: {x.shape[0]}")
            return self.layer(x).relu()

    model = ORTModule(Checks())
    for i in range(30):
        if i % 3:
            with pytest.raises(ValueError, match=f"too many rows: {i + 9}"):
                model(torch.randn(i + 9, 4))
        else:
            model(torch.randn(1 + i % 8, 4)).sum().backward()
    assert not [e for e in model.report().eager if "not enough" in e.reason], str(model.report())
