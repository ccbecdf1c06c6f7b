"""`precision="bf16"`: forward as under torch.autocast, without a line in the training loop."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from . import _C
from .state import State

logger = logging.getLogger("ortmodule")


def within(state: State) -> contextlib.AbstractContextManager[Any]:
    """What forward runs in: autocast where the option asks for it and the caller has none of its own."""
    if state.settings.precision is None:
        return contextlib.nullcontext()
    kind = next((p.device.type for p in state.module.parameters()), "cpu")
    if torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.bfloat16)


def tell_slow(name: str) -> None:
    """A sentence where bf16 saves memory and no time."""
    if not _C.has_bf16():
        logger.warning(
            "%s: precision='bf16' on a processor without bf16 instructions: products are widened to float32; it takes "
            "less memory, not less time",
            name,
        )
