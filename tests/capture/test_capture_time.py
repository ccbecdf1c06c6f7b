"""What captures cost is bounded: all of a model's together, and the attempts for modules of one class."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ortmodule.climb
import ortmodule.ladder
from ortmodule import ORTModule
from ortmodule.capture import CaptureError


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.tanh(self.body(x))
            nap()
        return x


naps = [0]


def nap() -> None:
    naps[0] += 1
    time.sleep(0.05)


def test_a_trace_ends_when_the_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    model, naps[0] = ORTModule(Slow(), capture_seconds=0.1), 0
    for n in (2, 2, 3):
        x = torch.randn(n, 3)
        assert torch.equal(model(x), model._ortmodule.module(x))
    report = model.report()
    assert not report.graphs and [(e.calls, "ORTMODULE_CAPTURE_SECONDS" in e.reason) for e in report.eager] == [(3, True)]
    assert [(f.reason, f.count) for f in report.failed] == [("the time for captures was over", 1)]
    assert naps[0] <= 6 * 20 + 3  # the trace was given up at once
    assert sum("may (ORTMODULE_CAPTURE_SECONDS)" in r.getMessage() for r in caplog.records) == 1


def test_a_trace_with_symbols_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up before the time of all captures is over, once; constants take its place."""
    monkeypatch.setattr(ortmodule.ladder, "_SYMBOLS_S", 1e-4)
    monkeypatch.setattr(ortmodule.ladder, "_SYMBOLS_TIMES", 1e-4)
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    for n in (2, 3, 4, 5, 3):
        x = torch.randn(n, 3)
        torch.testing.assert_close(model(x), model._ortmodule.module(x))
    report = model.report()
    assert not report.eager and sorted(g.forwards for g in report.graphs) == [1, 1, 1, 2]
    assert [(f.reason, f.count) for f in report.failed] == [("the time for a capture with symbols was over", 1)]
    assert model._ortmodule.capturing_s < 300


def test_captures_that_are_there_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    model(x)
    model._ortmodule.capturing_s = 1e9
    model(torch.randn(5, 3))
    model(x)
    report = model.report()
    assert [g.forwards for g in report.graphs] == [2] and [e.calls for e in report.eager] == [1]
    assert "ORTMODULE_CAPTURE_SECONDS" in str(report)


def test_strict_raises() -> None:
    model = ORTModule(Slow(), capture_seconds=0.1, strict=True)
    with pytest.raises(CaptureError, match="ORTMODULE_CAPTURE_SECONDS"):
        model(torch.randn(2, 3))
    with pytest.raises(ValueError, match="capture_seconds"):
        ORTModule(Slow(), capture_seconds=0)


class Expert(nn.Module):
    """Which rows it takes is known by the data alone, and so is the number it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in which.unique().tolist():
            row = (which == i).nonzero()[:, 0]
            out = out.index_add(0, row, self.lines[i](x[row]))
        return out


class Experts(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, 3) for _ in range(layers))
        self.layers = nn.ModuleList(Expert() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        for gate, layer in zip(self.gates, self.layers):
            h = x.reshape(b * t, d)
            x = torch.tanh(x + layer(h, gate(h).argmax(-1)).view(b, t, d))
        return x


def test_modules_of_one_class_are_kept_together(monkeypatch: pytest.MonkeyPatch, fp64: None) -> None:
    """Twelve layers of routed experts: three traces, not thirteen; and one capture for all sizes."""
    tried: list[Any] = []
    capture = ortmodule.climb.capture
    monkeypatch.setattr(ortmodule.climb, "capture", lambda *a, **k: tried.append(k["dynamic"]) or capture(*a, **k))
    torch.manual_seed(0)
    eager = Experts(12)
    model = ORTModule(eager)
    for b, t in ((2, 5), (3, 7), (1, 4), (4, 4), (2, 9)):
        x = torch.randn(b, t, 4)
        results = []
        for m in (model, eager):
            eager.zero_grad()
            own = x.clone().requires_grad_()
            y = m(own)
            y.square().sum().backward()
            results.append([y.detach(), own.grad, *[p.grad for p in eager.parameters()]])
        for a, c in zip(*results):
            assert (a is None) == (c is None)
            assert a is None or (a - c).abs().max() <= 1e-10
    assert tried == [False, False, False, True]
    report = model.report()
    assert report.n_captures == 2 and not report.eager
    assert {h.name for h in report.host} == {f"layers.{i}" for i in range(12)}


class Longest(nn.Module):
    """Returns as many rows as there are positive numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if int((x[:, 0] > 0).sum()) > 100:
            return x
        return self.body(x[x[:, 0] > 0])


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Longest()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(0)


def test_a_guess_of_sizes_that_is_wrong(fp64: None) -> None:
    """All rows, at two sizes; then some."""
    eager = Around()
    model = ORTModule(eager)
    for b in (3, 5, 6):
        model(torch.rand(b, 4) + 0.1)
    for b in (6, 7, 6):
        x = torch.randn(b, 4)
        x[0, 0], x[1, 0] = 1, -1
        assert torch.equal(model(x), eager(x))
