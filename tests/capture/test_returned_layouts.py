"""What a recurrent layer, a module kept in PyTorch or a custom Function returns lies in a trace as it does in eager: edits
through views, questions about strides and drawn numbers depend on it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sizes import Of, run
from torch import Tensor, nn

from ortmodule import ORTModule


def edited(h: Tensor, seen: Tensor, by: float) -> Tensor:
    seen.mul_(by)
    return h * 1


BODIES: dict[str, Callable[[Tensor], Any]] = {
    "reshape": lambda h: edited(h * 1, h.reshape(-1), 2),
    "an edit through reshape": lambda h: edited(h, h.detach().reshape(-1), 2),
    "an edit through flatten": lambda h: edited(h, h.detach().flatten(0, 1), 2),
    "an edit through contiguous": lambda h: edited(h, h.detach().contiguous(), 2),
    "is_contiguous": lambda h: h * 2 if h.is_contiguous() else h * 3,
    "stride": lambda h: h * (1 + h.stride(0)) + h.stride(1),
    "view": lambda h: h.view(-1) * 2,
    "as_strided": lambda h: h.as_strided((2, 2), (3, 1)) * 2,
    "like": lambda h: h * (1 + torch.zeros_like(h).stride(0)) if h.shape[0] > 1 else h * 2,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 3, batch_first=True),
    "GRU, both ways, two layers": lambda: nn.GRU(4, 3, 2, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(4, 3, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(4, 5, proj_size=3, batch_first=True),
    "GRU, steps first": lambda: nn.GRU(4, 3),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("body", BODIES)
def test_recurrent_layers(layer: str, body: str) -> None:
    torch.manual_seed(0)
    part = LAYERS[layer]()
    run(Of(lambda m, x: BODIES[body](m.part(x)[0]), part=part), [(3, 6, 4), (3, 6, 4), (5, 2, 4), (1, 7, 4)])


@pytest.mark.parametrize("layer", LAYERS)
def test_the_last_state_is_contiguous(layer: str) -> None:
    """Whatever order the first one has."""

    def body(m: Any, x: Tensor) -> Any:
        part = m.part
        rows = x.shape[0] if part.batch_first else x.shape[1]
        n = part.num_layers * (2 if part.bidirectional else 1)
        first = x.new_zeros(rows, n, part.proj_size or part.hidden_size).transpose(0, 1)
        cell = x.new_zeros(rows, n, part.hidden_size).transpose(0, 1)
        h = part(x, (first, cell) if isinstance(part, nn.LSTM) else first)[1]
        return tuple(t * (2 if t.is_contiguous() else 3) for t in (h if isinstance(h, tuple) else (h,)))

    torch.manual_seed(0)
    run(Of(body, part=LAYERS[layer]()), [(3, 6, 4), (5, 2, 4), (1, 7, 4)])


def test_an_unbatched_sequence_and_autocast() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.GRU(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            h, one = self.part(x)[0], self.part(x[0])[0]
            return h.float(), one.float(), h.stride(), one.stride(), torch.zeros_like(h).is_contiguous()

    torch.manual_seed(0)
    eager = Two()
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5, 1):
        x = torch.randn(rows, 6, 4)
        for low in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                a, b = eager(x), ours(x)
            assert a[2:] == b[2:]
            torch.testing.assert_close(b[:2], a[:2], rtol=2e-2, atol=2e-2)


def test_numbers_drawn_for_what_a_layer_returns() -> None:
    torch.manual_seed(0)
    module = Of(lambda m, x: m.part(x)[0] + torch.zeros_like(m.part(x)[0]).normal_(), part=nn.GRU(4, 3, batch_first=True))
    eager, ours = copy.deepcopy(module).float(), ORTModule(copy.deepcopy(module).float())
    for rows in (3, 3, 9):
        x = torch.randn(rows, 6, 4)
        made = []
        for m in (eager, ours):
            torch.manual_seed(rows)
            made.append([m(x).detach(), torch.rand(2)])
        torch.testing.assert_close(made[1], made[0])


class Kept(nn.Module):
    """Random numbers that are not torch's keep it in PyTorch."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(4, 3), turn

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        return self.turn(self.layer(x))


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda h: (h * 2).transpose(0, 1),
    "turned twice": lambda h: (h * 2).permute(2, 0, 1),
    "with gaps": lambda h: (h * 2)[:, ::2],
    "the last step": lambda h: (h * 2)[:, -1:],
    "expanded": lambda h: (h * 2)[:, :1].expand(-1, 3, -1),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("body", [b for b in BODIES if b not in ("as_strided", "like")])
def test_modules_kept_in_pytorch(turn: str, body: str) -> None:
    torch.manual_seed(0)
    run(Of(lambda m, x: BODIES[body](m.part(x)), part=Kept(TURNS[turn])), [(3, 6, 4), (5, 6, 4), (4, 6, 4), (2, 7, 4), (1, 5, 4)])


@pytest.mark.parametrize("turn", TURNS)
def test_hooked_modules_kept_in_pytorch(turn: str) -> None:
    torch.manual_seed(0)
    module = Of(lambda m, x: BODIES["an edit through reshape"](m.part(x)), part=Kept(TURNS[turn]))
    module.part.register_forward_hook(lambda m, args, out: None)
    run(module, [(3, 6, 4), (3, 6, 4), (3, 6, 4)])


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gaps: bool) -> Tensor:
        ctx.gaps = gaps
        return (x * 2)[:, ::2] if gaps else (x * 2).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if not ctx.gaps:
            return 2 * g.transpose(0, 1), None
        into = g.new_zeros(g.shape[0], 2 * g.shape[1], g.shape[2])
        into[:, ::2] = 2 * g
        return into, None


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("body", ["an edit through reshape", "is_contiguous", "stride", "view"])
def test_custom_functions(gaps: bool, body: str) -> None:
    torch.manual_seed(0)
    run(Of(lambda m, x: BODIES[body](Turned.apply(x * m.w[0], gaps))), [(3, 6, 4), (5, 6, 4), (4, 6, 4)])
