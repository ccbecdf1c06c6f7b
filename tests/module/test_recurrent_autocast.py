"""Recurrent layers under autocast: results have the types that PyTorch's have (an LSTM's by oneDNN and an RNN's are
bf16, a GRU's are not), errors stay within twice eager's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

CASES = {
    "lstm": (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    "both ways": (nn.LSTM, {"bidirectional": True}),
    "no bias": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"num_layers": 2}),
    "rnn": (nn.RNN, {}),
}


def step(model: nn.Module, x: Tensor, low: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        y, states = model(x)
    out = [y, *(states if isinstance(states, tuple) else [states])]
    weight = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).view_as(t) for t in out]
    sum((t.double() * w).sum() for t, w in zip(out, weight)).backward()
    found = [*(t.detach() for t in out), x.grad, *[p.grad.clone() for p in model.parameters()]]
    model.zero_grad()
    return found


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_eagers(name: str, low: bool) -> None:
    kind, more = CASES[name]
    torch.manual_seed(5)
    eager, x = kind(24, 32, **more), torch.randn(9, 7, 24)
    ours, theirs = step(ORTModule(copy.deepcopy(eager), strict="engine"), x, low), step(eager, x, low)
    exact = step(eager.double(), x.double(), False)
    for a, e, want in zip(ours, theirs, exact, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        mine, own = ((t.double() - want).abs().max() / want.abs().max() for t in (a, e))
        assert mine <= 2 * own + 1e-6, (float(mine), float(own))
