"""Switches of PyTorch's libraries while forward is traced are those of the call, not those that torch.export puts."""

from __future__ import annotations

import copy
import decimal
import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Without(nn.Module):
    """As Hugging Face computes CTC losses."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return x.sin()


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if torch.backends.cudnn.enabled else x.cos()


def test_a_switch_that_forward_puts_back_needs_no_capture() -> None:
    module = ORTModule(Without())
    for _ in range(3):
        module(torch.ones(2, 3))
    assert module.report().n_captures == 1 and not module.report().eager


def test_a_switch_that_forward_reads() -> None:
    module, x = ORTModule(Asks()), torch.linspace(0, 1, 6, dtype=torch.float64)
    before = torch.backends.cudnn.enabled
    try:
        for enabled in (True, True, False, True):
            torch.backends.cudnn.enabled = enabled
            torch.testing.assert_close(module(x), x.sin() if enabled else x.cos())
            assert torch.backends.cudnn.enabled is enabled
    finally:
        torch.backends.cudnn.enabled = before
    assert not module.report().eager


def test_a_switch_that_an_export_puts_is_that_of_the_call() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if torch.backends.mkldnn.enabled else x.cos()

    module, x = ORTModule(Asks()), torch.linspace(0, 1, 6, dtype=torch.float64)
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled):
            for _ in range(2):
                torch.testing.assert_close(module(x), x.sin() if enabled else x.cos())
                assert torch.backends.mkldnn.enabled is enabled
    assert len(module.report().graphs) == 2 and not module.report().eager


@pytest.mark.parametrize("of, name", [
    (torch.backends.opt_einsum, "enabled"), (torch.utils.deterministic, "fill_uninitialized_memory"),
])  # fmt: skip
def test_a_setting_that_a_modules_class_answers_for(of: Any, name: str) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            enabled = torch.backends.opt_einsum.enabled, torch.utils.deterministic.fill_uninitialized_memory
            return x * enabled[name != "enabled"]

    module, before = ORTModule(Asks()), getattr(of, name)
    try:
        for enabled in (True, False, True):
            setattr(of, name, enabled)
            assert module(torch.ones(2)).tolist() == [float(enabled)] * 2
    finally:
        setattr(of, name, before)
    assert len(module.report().graphs) == 2 and not module.report().eager


class Casts(nn.Module):
    """What autocast computes in is PyTorch's setting, or that of the block around."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3, dtype=torch.float32)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False), torch.autocast("cpu", enabled=False):
            y = self.line(x)
        return y + self.how(self, x)


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return m.line(x)  # type: ignore[no-any-return]


def _nested(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16), torch.autocast("cpu"):
        return m.line(x) + _autocast(m, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how, captures", [
    (_autocast, 2), (lambda m, x: x.to(torch.get_autocast_dtype("cpu")), 2), (lambda m, x: m.line(x), 1), (_nested, 1),
])  # fmt: skip
def test_what_autocast_computes_in(how: Callable[[Any, Tensor], Tensor], captures: int) -> None:
    eager = Casts(how)
    module, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 3, dtype=torch.float32)
    before = torch.get_autocast_dtype("cpu")
    try:
        for kind in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16):
            torch.set_autocast_dtype("cpu", kind)
            torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert len(module.report().graphs) == captures and not module.report().eager


LEFT: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], Any]] = {
    "grad mode": (torch.set_grad_enabled, torch.is_grad_enabled, False),
    "autocast": (lambda on: torch.set_autocast_enabled("cpu", on), lambda: torch.is_autocast_enabled("cpu"), True),
    "deterministic": (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True),
    "precision": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"),
    "benchmark": (lambda on: setattr(torch.backends.cudnn, "benchmark", on), lambda: torch.backends.cudnn.benchmark, True),
    "anomaly": (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, True),
    "recursion": (sys.setrecursionlimit, sys.getrecursionlimit, 2345),
    "numpy's errors": (lambda how: np.seterr(over=how), lambda: np.geterr()["over"], "raise"),
    "digits of numpy": (lambda n: np.set_printoptions(precision=n), lambda: np.get_printoptions()["precision"], 3),
    "digits of PyTorch": (lambda n: torch.set_printoptions(precision=n), lambda: torch._tensor_str.PRINT_OPTS.precision, 2),
    "digits of decimal": (lambda n: setattr(decimal.getcontext(), "prec", n), lambda: decimal.getcontext().prec, 9),
    "logging": (logging.disable, lambda: logging.root.manager.disable, logging.INFO),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_switch_that_forward_leaves_changed(kind: str) -> None:
    put, get, value = LEFT[kind]
    before = get()

    class Sets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            put(value)
            return x.sin()

    module = ORTModule(Sets())
    try:
        for _ in range(4):
            module(torch.ones(2, 3))
            assert get() == value
            put(before)
    finally:
        put(before)
    assert "changed" in str(module.report())
