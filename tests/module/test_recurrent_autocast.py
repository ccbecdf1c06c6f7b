"""Recurrent layers under autocast: results have the types that PyTorch's have (an LSTM's by oneDNN and an RNN's are
bf16, a GRU's are not), errors stay within twice eager's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import tracing

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


def error(t: Tensor, want: Tensor) -> float:
    return float((t.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_eagers(name: str, low: bool) -> None:
    kind, more = CASES[name]
    torch.manual_seed(5)
    eager, x = kind(24, 32, **more), torch.randn(9, 7, 24)
    ours = step(ORTModule(copy.deepcopy(eager), strict="engine"), x, low)
    try:
        theirs = step(eager, x, low)
    except RuntimeError as raised:  # oneDNN's LSTM on a processor without AVX-512
        assert low and "could not create a primitive descriptor" in str(raised), raised
        theirs = None
    exact = step(eager.double(), x.double(), False)
    for k, (a, want) in enumerate(zip(ours, exact, strict=True)):
        assert a.shape == want.shape
        mine, own = error(a, want), 2**-7
        if theirs is not None:
            assert (a.dtype, a.shape) == (theirs[k].dtype, theirs[k].shape)
            own = error(theirs[k], want)
        assert mine <= 2 * own + 1e-6, (mine, own)


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("weight", "given", "low"), [
    (torch.float64, torch.float64, torch.bfloat16), (torch.float32, torch.float16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16, torch.bfloat16)])  # fmt: skip
def test_types(kind: type[nn.RNNBase], weight: torch.dtype, given: torch.dtype, low: torch.dtype,
               graded: bool) -> None:  # fmt: skip
    """Autocast leaves float64 alone; what it casts meets inputs of the other half type as it is."""
    eager, x = kind(4, 3).to(weight), torch.randn(5, 2, 4).to(given)
    found = []
    for model in (eager, ORTModule(copy.deepcopy(eager))):
        try:
            with torch.autocast("cpu", low), torch.set_grad_enabled(graded):
                y, states = model(x)
        except RuntimeError:
            if model is eager:
                pytest.skip("PyTorch has no kernel for these types on this processor")
            raise
        found.append([y, *(states if isinstance(states, tuple) else [states])])
    for e, a in zip(*found, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=1e-10 if weight == torch.float64 else 2e-2, atol=1e-2 * (weight != torch.float64))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_types_whatever_the_default_was_at_the_first_capture(kind: type[nn.RNNBase]) -> None:
    """What PyTorch gives is asked once a process."""
    tracing._lowered.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        ORTModule(nn.Linear(3, 2), strict=True)(torch.randn(2, 3)).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    eager = kind(4, 3)
    ours, x = ORTModule(copy.deepcopy(eager), strict=True), torch.randn(5, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        mine = ours(x)[0].dtype
        try:
            there = eager(x)[0].dtype
        except RuntimeError as raised:  # oneDNN's LSTM on a processor without AVX-512
            assert kind is nn.LSTM and "could not create a primitive descriptor" in str(raised), raised
            pytest.skip("PyTorch has no kernel for these types on this processor")
        assert mine == there
