"""What installing promises: the self-test, the time of `import ortmodule`, and where the extension loads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ortmodule
from ortmodule import selftest

ROOT = Path(__file__).parents[2]


def test_the_self_test_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.run()
    out = capsys.readouterr().out
    assert out.count(" ok ") == len(selftest.CHECKS) and "checks hold" in out


def test_the_self_test_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where an optimizer's step is another one, and where nothing can be captured."""
    monkeypatch.setattr(selftest, "CHECKS", {k: v for k, v in selftest.CHECKS.items() if k in ("training", "pictures")})
    made = selftest.optim.FusedAdam
    monkeypatch.setattr(selftest.optim, "FusedAdam", lambda p, lr, **k: made(p, lr=lr * 1.001, **k))
    assert not selftest.run()
    out = capsys.readouterr().out
    assert "pictures     failed  RuntimeError: differs from PyTorch by" in out and out.count(" ok ") == 1
    assert "failed: pictures (" in out


def test_import_costs_nothing_beyond_torch() -> None:
    """Less than 200 ms, in the best of three processes."""
    code = "import time, torch; t = time.perf_counter(); import ortmodule; print(time.perf_counter() - t)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = [float(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    assert min(times) < 0.2, times


def test_wrapping_imports_nothing_of_others() -> None:
    """sympy, onnx and what torch.export wants take longer to import than all of this package: they are imported by the first capture."""
    code = """
import sys, torch
before = set(sys.modules)
from ortmodule import ORTModule
model = ORTModule(torch.nn.Linear(2, 2))
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"ortmodule"}))
print(len([m for m in set(sys.modules) - before if m.startswith("torch")]))
model(torch.ones(1, 2)).sum().backward()
print(*[m for m in ("sympy", "onnx") if m in sys.modules])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    roots = set(found[0].split())
    assert {r for r in roots if not r.startswith("_")} <= {"torch"} and int(found[1]) <= 2, found
    assert found[2] == "sympy onnx"


def test_the_extension_loads_on_older_systems() -> None:
    """No glibc after 2.28, no library but its own, no name exported that others could meet."""
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tests" / "wheel" / "audit.py")
    assert spec is not None and spec.loader is not None
    audit: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    extension = Path(ortmodule.__file__).parent / "_C.abi3.so"
    assert not audit.broken(extension)
    audit.GLIBC = (2, 2)  # and what is too new is found
    assert any("of glibc" in sentence for sentence in audit.broken(extension))
