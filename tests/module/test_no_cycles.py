"""What a step has computed goes when the script drops it: no cycle of objects keeps tensors until Python's collector
comes by, whichever way a module runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Branching(nn.Module):
    """Stays in PyTorch: a number of the data decides how often."""

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(int(h.detach().square().mean() * 0) + 1):
            h = h * 2
        return h


class Net(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(6, 6), nn.Linear(6, 6), Branching()
        self.norm, self.lstm = nn.BatchNorm1d(6), nn.LSTM(6, 6)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.first(x), x)


def one(y: Any, x: Tensor) -> None:
    y.square().sum().backward()


def twice(y: Any, x: Tensor) -> None:
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (y.sum() + g.square().sum()).backward()


def by_row(y: Any, x: Tensor) -> None:
    torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)


def in_turn(y: Any, x: Tensor) -> None:
    y[0].sum().backward(retain_graph=True)
    y[1].sum().backward()


def not_at_all(y: Any, x: Tensor) -> None:
    pass


def selected(m: Net, h: Tensor, x: Tensor) -> Tensor:
    rows = h[x[:, 0] > 0]
    rows = torch.cat([rows, rows.new_ones(rows.shape[0], 6)])
    return m.last(rows).sum(0) / rows.shape[0]


def hooked(m: Net) -> None:
    m.last.register_full_backward_hook(lambda *_: None)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Any, Tensor], None], dict[str, Any]]] = {
    "plain": (lambda m, h, x: m.last(F.gelu(h)), one, {}),
    "rows that data selects": (selected, one, {}),
    "spectra": (lambda m, h, x: torch.fft.rfft(h).abs(), one, {}),
    "a branch": (lambda m, h, x: m.last(h) if h.sum() > -1e9 else h, one, {}),
    "a module in PyTorch": (lambda m, h, x: m.last(m.kept(h)), one, {}),
    "a Function": (lambda m, h, x: m.last(Twice.apply(h)), one, {}),
    "checkpoint": (lambda m, h, x: checkpoint(m.last, h, use_reentrant=False), one, {}),
    "checkpoint, reentrant": (lambda m, h, x: checkpoint(m.last, h, use_reentrant=True), one, {}),
    "hooks": (lambda m, h, x: m.last(h).tanh(), one, {"prepare": hooked}),
    "statistics": (lambda m, h, x: m.norm(h), one, {}),
    "recurrent": (lambda m, h, x: m.lstm(h)[0], one, {}),
    "segments": (lambda m, h, x: m.last(h.tanh()), one, {"segment_mb": 1e-6}),
    "recomputed": (lambda m, h, x: m.last(F.gelu(m.last(F.gelu(h)))), one, {"memory_opt_level": 1}),
    "differentiated again": (lambda m, h, x: m.last(h.tanh()), twice, {}),
    "hooks, differentiated again": (lambda m, h, x: m.last(h).tanh(), twice, {"prepare": hooked}),
    "selected, differentiated again": (selected, twice, {}),
    "batched gradients": (lambda m, h, x: m.last(h.tanh()), by_row, {}),
    "outputs in turn": (lambda m, h, x: (m.last(h), h.tanh()), in_turn, {}),
    "a dictionary": (lambda m, h, x: {"loss": m.last(h).sum(), "states": [h, h.tanh()]}, lambda y, x: y["loss"].backward(), {}),
    "no backward": (lambda m, h, x: m.last(selected(m, h, x)), not_at_all, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_leaves_no_tensors_to_the_collector(name: str) -> None:
    body, backward, options = CASES[name]
    net = Net(body).double()
    options.get("prepare", lambda _: None)(net)
    model = ORTModule(net, **{k: v for k, v in options.items() if k != "prepare"})

    def step() -> None:
        x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
        y = model(x)
        backward(y, x)
        model.zero_grad()

    for _ in range(4):
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [o for o in gc.garbage if isinstance(o, Tensor)]
        assert not left, [t.shape for t in left]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
