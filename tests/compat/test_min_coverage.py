"""min_coverage: an error where less than that share of a model would run in the engine."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from ortmodule import CaptureError, ORTModule
from ortmodule.config import resolve


class Inverse(nn.Module):
    """One operator that PyTorch computes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x.T @ x + torch.eye(4)) * 2


class Numpy(nn.Module):
    """Stays in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * float(x.detach().numpy().size)


def share(model: nn.Module) -> float:
    """What the report counts, for operators."""
    wrapped = ORTModule(model)
    wrapped(torch.randn(3, 4))
    return wrapped.report().node_share


def test_operators_in_pytorch_count_as_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Inverse())
    found = share(model)
    assert 0.5 < found < 1
    x = torch.randn(3, 4)
    assert torch.allclose(ORTModule(model, min_coverage=found - 0.01)(x), model(x), atol=1e-4, rtol=1e-3)
    with pytest.raises(CaptureError) as error:
        ORTModule(model, min_coverage=found + 0.01)(x)
    assert re.search(rf"test_min_coverage.py:\d+\): min_coverage=0.*: of \d+ nodes {found:.1%} would run in the engine; "
                     r"in PyTorch: aten::linalg_inv.*; without min_coverage, or with a lower one, PyTorch runs that", str(error.value))  # fmt: skip


def test_submodules_in_pytorch_count_as_many_as_they_have_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Numpy())
    x = torch.randn(3, 4)
    report = ORTModule(model)
    report(x)
    engine = report.report().graphs[0].engine_nodes
    found = engine / (engine + 4)  # Numpy, Sequential, Linear, Tanh
    assert torch.allclose(ORTModule(model, min_coverage=found - 0.01)(x), model(x), atol=1e-6)
    with pytest.raises(CaptureError, match=rf"{found:.1%} would run .*; in PyTorch: 2;"):
        ORTModule(model, min_coverage=found + 0.01)(x)


def test_a_model_in_pytorch_has_none() -> None:
    with pytest.raises(CaptureError, match="without min_coverage"):
        ORTModule(Numpy(), min_coverage=0.01)(torch.randn(3, 4))
    assert ORTModule(Numpy())(torch.randn(3, 4)).shape == (3, 4)
    assert ORTModule(nn.Linear(4, 4), min_coverage=1.0)(torch.randn(3, 4)).shape == (3, 4)


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MIN_COVERAGE", "0.95")
    assert resolve({}).min_coverage == 0.95
    for text in ("2", "most", "-1"):
        with pytest.raises(ValueError, match="ORTMODULE_MIN_COVERAGE=.* is not allowed; give a number from 0 to 1"):
            resolve({}, None, {"ORTMODULE_MIN_COVERAGE": text})
    monkeypatch.delenv("ORTMODULE_MIN_COVERAGE")
    with pytest.raises(ValueError, match=r"min_coverage=1.5 is not allowed; give a number from 0 to 1"):
        ORTModule(nn.Linear(1, 1), min_coverage=1.5)
