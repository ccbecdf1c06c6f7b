"""python -m ortmodule.torch_cpp_extensions.install (also under onnxruntime.training.ortmodule..., torch_ort.configure)

Nothing is built: checks that the extension loads and works with this PyTorch, by training a small model beside
PyTorch. Exit status 0, or 1 and what is wrong.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
from torch import nn


def _extension() -> str:
    from .. import _C

    return f"{_C.__file__}, instruction set {_C.isa()}"  # type: ignore[attr-defined]


def _pytorch() -> str:
    from .. import torch_private

    lacking = [text for text in (torch_private.lacks(part) for part in ("call", "capture")) if text]
    if lacking:
        raise RuntimeError("; ".join(lacking))
    missing = torch_private.missing()
    return torch.__version__ + (f"; {'; '.join(missing)}" if missing else "")


def _training() -> str:
    from .. import ORTModule

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        eager = nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
        x = torch.randn(4, 7, dtype=torch.float64, device="cpu")
    ours = ORTModule(copy.deepcopy(eager), strict="engine", disable=False, save_path=None)
    worst = 0.0
    for model in (eager, ours):
        model(x).square().sum().backward()
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        worst = max(worst, float((p.grad - q.grad).abs().max()))
    if not worst < 1e-10:
        raise RuntimeError(f"gradients differ from PyTorch's by {worst:.3g}")
    return f"{ours.report().headline()}; gradients within {worst:.1e} of PyTorch's"


CHECKS: dict[str, Callable[[], str]] = {"extension": _extension, "pytorch": _pytorch, "training": _training}


def build_torch_cpp_extensions() -> bool:
    """Runs the checks and prints a line for each; True when all hold."""
    good = True
    for name, check in CHECKS.items():
        try:
            print(f"{name:10} ok      {check()}")
        except Exception as error:
            good = False
            print(f"{name:10} failed  {type(error).__name__}: {error}")
    print("ortmodule works here; there is nothing to build." if good else
          "ortmodule does not work here. `python -m ortmodule.info` says what is installed.")  # fmt: skip
    return good


if __name__ == "__main__":
    sys.exit(0 if build_torch_cpp_extensions() else 1)
