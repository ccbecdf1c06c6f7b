"""Switches of PyTorch's libraries while forward is traced are those of the call, not those that torch.export puts."""

from __future__ import annotations

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
