"""Fallback policies: each flag by itself, in words of the environment and as an option, what it forbids and what not."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import (
    CaptureError,
    FallbackPolicy,
    ORTModule,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
    fallback,
)
from ortmodule import torch_private as private
from ortmodule.config import resolve

P = FallbackPolicy
DATA, ONNX, DEVICE, TORCH, INIT = (
    P.FALLBACK_UNSUPPORTED_DATA, P.FALLBACK_UNSUPPORTED_ONNX_MODEL, P.FALLBACK_UNSUPPORTED_DEVICE, P.FALLBACK_UNSUPPORTED_TORCH_MODEL,
    P.FALLBACK_BAD_INITIALIZATION)  # fmt: skip


class Named(Tensor):
    """A subclass, which is no input of a graph."""


class Branches(nn.Module):
    """Cannot be captured: it asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.detach().sum()) > -1e9 else x


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


class Inside(nn.Module):
    """A custom Function and an operator that only PyTorch has, in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Triple.apply(self.layer(x)) + torch.linalg.det(x)


def odd_data(policy):
    return ORTModule(nn.Linear(3, 3), fallback_policy=policy), torch.randn(2, 3).as_subclass(Named)


def no_graph(policy):
    return ORTModule(Branches(), fallback_policy=policy), torch.randn(2, 3)


def odd_device(policy):
    return ORTModule(nn.Linear(3, 3, device="meta"), fallback_policy=policy), torch.randn(2, 3, device="meta")


def odd_model(policy):
    return ORTModule(nn.DataParallel(nn.Linear(3, 3)), fallback_policy=policy), torch.randn(2, 3)


CASES = {
    "data": (odd_data, DATA, ORTModuleIOError), "onnx": (no_graph, ONNX, ORTModuleONNXModelException), "device": (odd_device, DEVICE, ORTModuleDeviceException),
    "torch": (odd_model, TORCH, ORTModuleTorchModelException),
}  # fmt: skip


@pytest.mark.parametrize("flag", [DATA, ONNX, DEVICE, TORCH])
@pytest.mark.parametrize("name", CASES)
def test_a_flag_leaves_its_category_to_pytorch_and_no_other(name, flag):
    make, own, error = CASES[name]
    # a device that the engine does not know also fails to load
    policy = flag | ONNX if name == "device" and flag == DEVICE else flag
    if flag == own:
        model, x = make(policy)
        for _ in range(2):
            assert model(x).shape == (2, 3)
        assert sum(e.calls for e in model.report().eager) == 2
    else:
        with pytest.raises(error):
            model, x = make(policy)
            model(x)


@pytest.mark.parametrize("policy", [P.FALLBACK_FORCE_TORCH_FORWARD, P.FALLBACK_FORCE_TORCH_BACKWARD, fallback.ORTMODULE_FALLBACK_POLICY])
@pytest.mark.parametrize("name", CASES)
def test_forced_and_default_policies_leave_all_to_pytorch(name, policy):
    model, x = CASES[name][0](policy)
    assert model(x).shape == (2, 3)


@pytest.mark.parametrize("name", CASES)
def test_disable_goes_before_all_others(name):
    make, own, error = CASES[name]
    with pytest.raises(error) as raised:
        model, x = make(P.FALLBACK_DISABLE | own | P.FALLBACK_FORCE_TORCH_FORWARD)
        model(x)
    assert isinstance(raised.value, ORTModuleFallbackException)


def test_disable_leaves_functions_and_operators_inside_the_graph_alone():
    torch.manual_seed(0)
    model = ORTModule(Inside(), fallback_policy=P.FALLBACK_DISABLE)
    x = torch.randn(3, 3)
    assert torch.allclose(model(x), model.module(x))
    model(x).sum().backward()
    report = model.report()
    assert not report.eager and {h.kind for h in report.host} == {"python_op", "aten"} and len(report.host) == 2


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Branches()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.odd(x))


@pytest.mark.parametrize("policy", [P.FALLBACK_DISABLE, DATA | DEVICE | TORCH])
def test_without_the_flag_a_submodule_stays_not_in_pytorch_either(policy):
    with pytest.raises(CaptureError, match="odd"):
        ORTModule(Half(), fallback_policy=policy)(torch.randn(2, 3))


def test_data_parallel_runs_in_pytorch_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "ortmodule"):
        model = ORTModule(nn.DataParallel(nn.Linear(3, 3)))
    assert "runs in PyTorch: torch.nn.DataParallel" in caplog.text
    x = torch.randn(2, 3)
    model(x).sum().backward()
    assert torch.equal(model(x), model.module(x)) and model.module.weight.grad is not None


@pytest.mark.parametrize("retry", [False, True])
def test_retry_tries_to_capture_at_every_call(retry, caplog):
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.odd = [True]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (float(x.detach().sum() > -1e9) if switch["odd"] else 1.0)

    switch = {"odd": True}
    model = ORTModule(Later(), fallback_retry=retry)
    x = torch.randn(2, 3)
    with caplog.at_level(logging.WARNING, "ortmodule"):
        for _ in range(3):
            assert torch.equal(model(x), model.module(x))
    assert caplog.text.count("runs in PyTorch") == (3 if retry else 1)
    eager = sum(e.calls for e in model.report().eager)
    assert eager == 3 and not model.report().n_captures


def test_initialization(monkeypatch):
    monkeypatch.setattr(private, "lacks", lambda part: "this PyTorch has no x" if part == "call" else None)
    with pytest.raises(ORTModuleInitException, match="has no x"):
        ORTModule(nn.Linear(2, 2), fallback_policy=DATA)
    model = ORTModule(nn.Linear(2, 2), fallback_policy=INIT)
    assert model(torch.ones(1, 2)).shape == (1, 2) and model.report().eager


def test_the_environment_wins_and_joins_names(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA | FALLBACK_UNSUPPORTED_ONNX_MODEL")
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", "True")
    settings = resolve({"fallback_policy": P.FALLBACK_DISABLE})
    assert settings.fallback_policy == DATA | ONNX and settings.fallback_retry and not settings.strict
    for text in ("FALLBACK", "FALLBACK_DISABLE|", "1"):
        with pytest.raises(ValueError, match="ORTMODULE_FALLBACK_POLICY=.* is not allowed: .* is no fallback policy; give FALLBACK_DISABLE, "):
            resolve({}, None, {"ORTMODULE_FALLBACK_POLICY": text})
    with pytest.raises(ValueError, match="fallback_policy='x' is not allowed"):
        resolve({"fallback_policy": "x"}, None, {})


def test_flags_are_onnxruntimes():
    names = ("DISABLE", "FORCE_TORCH_FORWARD", "FORCE_TORCH_BACKWARD", "UNSUPPORTED_DEVICE", "UNSUPPORTED_DATA", "UNSUPPORTED_TORCH_MODEL",
             "UNSUPPORTED_ONNX_MODEL", "BAD_INITIALIZATION")  # fmt: skip
    assert {p.name: p.value for p in P} == {f"FALLBACK_{n}": 2**i for i, n in enumerate(names)}
    for a, b in itertools.product(P, P):
        assert (a | b).is_set(a) is not (P.FALLBACK_DISABLE in (a, b)) and (a | b).is_disabled() is (P.FALLBACK_DISABLE in (a, b))
    assert fallback.ORTMODULE_FALLBACK_POLICY == 8 | 16 | 32 | 64 | 128


def test_exceptions_are_of_one_family():
    kinds = [ORTModuleDeviceException, ORTModuleIOError, ORTModuleInitException, ORTModuleTorchModelException, ORTModuleONNXModelException]
    assert all(issubclass(k, ORTModuleFallbackException) for k in kinds) and issubclass(CaptureError, ORTModuleONNXModelException)
    error = fallback.wrap_exception(ORTModuleIOError, ValueError("x"))
    assert type(error) is ORTModuleIOError and str(error) == "x" and isinstance(error.__cause__, ValueError)
    for wrong in (3, ORTModule(nn.Linear(1, 1)), torch.jit.script(nn.Linear(1, 1))):
        with pytest.raises(TypeError) as raised:
            ORTModule(wrong)
        assert isinstance(raised.value, ORTModuleTorchModelException)


@dataclass
class Point:
    x: int
    y: int


@pytest.mark.parametrize("value", [Point(2, 3), {1, 2}, object()])
def test_any_python_object_is_an_argument_under_every_policy(value):
    """Where onnxruntime-training raised ORTModuleIOError: it is a constant of the graph."""
    model = ORTModule(Given(), fallback_policy=P.FALLBACK_DISABLE)
    x = torch.randn(2, 3)
    assert torch.allclose(model(x, value), model.module(x, value))


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, value: Any) -> Tensor:
        return self.layer(x) * getattr(value, "x", 1)
