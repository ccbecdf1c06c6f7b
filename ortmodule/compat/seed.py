"""set_seed: what onnxruntime's function of this name meant for training."""

from __future__ import annotations

import torch


def set_seed(seed: int) -> None:
    """Seeds torch's generators: from them the engine draws the seed of a forward with dropout."""
    torch.manual_seed(seed)
