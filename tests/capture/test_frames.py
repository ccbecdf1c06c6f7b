"""A `try` that may catch is found in bytecode, also where a `with` or a `finally` stands between it and what fails."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

ROOT = Path(__file__).parents[2]
F64 = torch.float64


def in_a_with(m: Any, x: Tensor) -> Tensor:
    try:
        with torch.enable_grad():
            f = torch.linalg.cholesky(x)
    except RuntimeError:
        f = torch.eye(4, dtype=F64) * 7
    return f @ m.a(x)


def in_two(m: Any, x: Tensor) -> Tensor:
    f = torch.eye(4, dtype=F64) * 7
    with contextlib.suppress(RuntimeError), torch.enable_grad():
        f = torch.linalg.cholesky(x)
    return f @ m.a(x)


def in_a_finally(m: Any, x: Tensor) -> Tensor:
    try:
        try:
            f = torch.linalg.cholesky(x)
        finally:
            h = m.a(x)
    except RuntimeError:
        f = torch.eye(4, dtype=F64) * 7
    return f @ h


def in_a_handler(m: Any, x: Tensor) -> Tensor:
    try:
        try:
            f = torch.linalg.cholesky(x)
        except RuntimeError:
            f = torch.linalg.cholesky(x * 0 + 1)
    except RuntimeError:
        f = torch.eye(4, dtype=F64) * 7
    return f @ m.a(x)


class Net(nn.Module):
    def __init__(self, rule: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rule, self.a = rule, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


@pytest.mark.parametrize("rule", [in_a_with, in_two, in_a_finally, in_a_handler])
def test_a_try_around_another_block(rule: Callable[..., Tensor]) -> None:
    """Every other time cholesky fails."""
    torch.manual_seed(0)
    eager = Net(rule).double()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(6):
        x, results = torch.eye(4, dtype=F64) * (step + 1 - 10 * (step % 2)), []
        for m in (eager, ours):
            m.zero_grad()
            out = m(x)
            out.square().sum().backward()
            results.append([out.detach(), m.a.weight.grad])
        torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
    assert ours.report().eager, str(ours.report())


def test_of_this_pythons_bytecode() -> None:
    """The same cases run on other Pythons: make check-pythons."""
    env = {**os.environ, "OM_HOME": str(ROOT / "ortmodule" / "__init__.py"), "PYTHONPATH": str(ROOT / "tests" / "wheel")}
    done = subprocess.run([sys.executable, "-c", "import alone; print(alone.tries())"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) >= 27, done.stderr
