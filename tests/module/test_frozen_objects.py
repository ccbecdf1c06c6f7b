"""gc.freeze() takes what lives out of the collector's sight, and with it what a capture looks for there: tensors that are
no parameters, functions behind closures, who holds an object. Such a call stays in PyTorch, by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule, frames


class Held:
    def __init__(self) -> None:
        self.name = "held"


OF_FILE = nn.Parameter(torch.full((3,), 2.0))
HELD = Held()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * OF_FILE


class Holds(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x), HELD


class Plain(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).relu()


@pytest.fixture
def frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_tensor_of_the_file_has_its_gradient(frozen: None) -> None:
    torch.manual_seed(1)
    model, x = Scaled(), torch.randn(2, 3)
    want = torch.autograd.grad(model(x).sum(), OF_FILE)[0]
    wrapped = ORTModule(model)
    wrapped(x).sum().backward()
    got, OF_FILE.grad = OF_FILE.grad, None
    assert got is not None and torch.allclose(got, want)
    assert "gc.freeze()" in str(wrapped.report())


def test_a_held_object_stays_that_object(frozen: None) -> None:
    wrapped = ORTModule(Holds())
    for _ in range(3):
        assert wrapped(torch.randn(2, 3))[1] is HELD
    assert "gc.freeze()" in str(wrapped.report())


def test_what_needs_no_search_is_captured(frozen: None) -> None:
    wrapped = ORTModule(Plain(), strict=True)
    wrapped(torch.randn(2, 3)).sum().backward()
    assert wrapped.report().graphs and not wrapped.report().eager


def test_what_python_itself_freezes_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.12 begins with some hundred frozen objects, which nobody has asked for."""
    monkeypatch.setattr(frames, "_AT_START", 4096)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    assert not frames.frozen()
    wrapped = ORTModule(Scaled())
    wrapped(torch.randn(2, 3)).sum().backward()
    OF_FILE.grad = None
    assert not wrapped.report().eager
