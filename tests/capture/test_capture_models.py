"""Whole models captured and run beside eager, with fixed and with symbolic sizes (the judges: tests/captured.py)."""

from __future__ import annotations

import pytest
import torch
from captured import check
from captured_models import MODELS

# T5's and Llama's norms, and T5's and ViT's softmax, compute in float32 whatever the model's type.
LOOSE = {"t5": 2e-6, "llama": 2e-6}


@pytest.mark.parametrize("name", MODELS)
def test_model_with_fixed_sizes(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(21)
    check(make(), *batch(3, 11), tolerance=LOOSE.get(name, 1e-10))


@pytest.mark.parametrize("name", MODELS)
def test_model_with_symbolic_sizes(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(22)
    check(make(), *batch(3, 11), dynamic=True, other=batch(2, 13), tolerance=LOOSE.get(name, 1e-10))
