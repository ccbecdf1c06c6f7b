"""Whether a tensor is contiguous makes a condition of a capture only where somebody can tell: batches of 1 run in the graph
for all batches, and an edit, a result or a question that depends on it is eager PyTorch's at every size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sizes import Of, run
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import layouts


class Cells(nn.Module):
    """A result that is written piece by piece."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, 1:] = x[:, :-1].sin()
        return out


def labels(m: Any, x: Tensor) -> Tensor:
    """Hugging Face's loss: the labels are a slice, which is contiguous where there is one row."""
    y = (x * 3).long().abs().clamp(max=5)
    scores = (x.unsqueeze(-1) * m.w)[:, :-1].contiguous().view(-1, 6)
    return F.nll_loss(scores, y[..., 1:].contiguous().view(-1), ignore_index=5)


SAME: dict[str, Callable[[], nn.Module]] = {
    "labels": lambda: Of(labels),
    "heads": lambda: Of(lambda m, x: (x.unsqueeze(-1) * m.w).transpose(0, 1).contiguous().sin()),
    "softmax": lambda: Of(lambda m, x: F.softmax((x.unsqueeze(-1) * m.w).transpose(0, 2), -1)),
    "log_softmax": lambda: Of(lambda m, x: F.log_softmax((x.unsqueeze(-1) * m.w).transpose(0, 1), -1)),
    "linear": lambda: Of(lambda m, x: m.part((x.unsqueeze(-1) * m.w).transpose(0, 1)), part=nn.Linear(6, 3).double()),
    "convolution": lambda: Of(lambda m, x: m.part(x.unsqueeze(1)), part=nn.Conv1d(1, 3, 3, padding=1).double()),
    "attention": lambda: Of(lambda m, x: m.part(*[x.unsqueeze(-1) * m.w] * 3)[0],
                             part=nn.MultiheadAttention(6, 2, batch_first=True).double()),
    "written by pieces": Cells,
    "loss beside an edit": lambda: Of(lambda m, x: F.mse_loss(m.part((x.unsqueeze(-1) * m.w).transpose(1, 2)).relu_(), x.unsqueeze(1).expand(-1, 6, -1).sin()),
                                       part=nn.BatchNorm1d(6).double()),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_batch_of_one_needs_no_capture(name: str) -> None:
    torch.manual_seed(0)
    assert run(SAME[name](), [(2, 5), (3, 7), (1, 6), (2, 4), (1, 9), (4, 5)]) == 2


def test_batches_of_one_first() -> None:
    """The second capture is made for a batch of 1, and holds for that alone or for all: no more than one further."""
    torch.manual_seed(0)
    assert run(Of(labels), [(1, 5), (1, 7), (2, 6), (1, 4), (3, 5)]) <= 3


def edits_copy(m: Any, x: Tensor) -> Tensor:
    x = x * 1.5
    y = x[:, 1:].contiguous()
    y.mul_(2)
    return x * m.w[0] + y.sum()


def edits_source(m: Any, x: Tensor) -> Tensor:
    x = x * 1.5
    y = x[:, 1:].contiguous()
    x.add_(1)
    return y * m.w[0]


def edits_argument(m: Any, x: Tensor) -> Tensor:
    x[:, 1:].contiguous().mul_(2)
    return x * m.w[0]


def asks(m: Any, x: Tensor) -> tuple[Any, ...]:
    y = (x * m.w[0])[:, 1:]
    z = y.contiguous()
    return z.sin(), y.is_contiguous(), z is y


def strides(m: Any, x: Tensor) -> tuple[Any, ...]:
    y = (x * m.w[0])[:, 1:].contiguous()
    return y.sin(), y.stride()[0] == x.shape[1]


def branches(m: Any, x: Tensor) -> Tensor:
    y = (x * m.w[0])[:, 1:]
    z = y.contiguous()
    return z.sin() if z is y else z.cos()


SEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "the copy is edited": edits_copy,
    "the source is edited": edits_source,
    "an argument is edited": edits_argument,
    "a result": lambda m, x: (x[:, 1:].contiguous(), x * m.w[0]),
    "a result, turned": lambda m, x: x[:, 1:].contiguous().transpose(0, 1),
    "two results": lambda m, x: ((y := (x * m.w[0])[:, 1:]), y.contiguous()),
    "pieces as results": lambda m, x: x[:, 1:].contiguous().split(1, 1)[0],
    "forward asks": asks,
    "forward asks for strides": strides,
    "forward branches on it": branches,
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("order", [(2, 3, 1, 2, 1), (1, 2, 1, 3), (3, 1, 2, 1)], ids=str)
def test_where_it_can_be_told_it_is_a_condition(name: str, order: tuple[int, ...]) -> None:
    module = Of(SEEN[name])
    module.edits = name == "an argument is edited" or "result" in name  # type: ignore[assignment]
    run(module, [(b, 4 + i) for i, b in enumerate(order)])


RAISES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "features": (lambda: Of(lambda m, x: m.part(x.transpose(0, 1)), part=nn.Linear(6, 3).double()),
                 [(6, 2), (6, 4), (6, 1), (5, 4), (6, 3), (1, 1)]),
    "channels": (lambda: Of(lambda m, x: m.part(x), part=nn.Conv1d(2, 3, 2).double()),
                 [(3, 2, 5), (4, 2, 6), (1, 2, 5), (2, 1, 5), (1, 3, 5), (2, 2, 1), (2, 2, 5)]),
    "an expanded tensor is written": (lambda: Of(lambda m, x: x[:1].expand_as(x).copy_(torch.ones_like(x)) * m.w[0]), [(1, 4), (1, 5), (2, 4), (1, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", RAISES)
def test_sizes_that_do_not_fit_raise(name: str) -> None:
    make, sizes = RAISES[name]
    torch.manual_seed(0)
    module = make()
    module.edits = "written" in name  # type: ignore[assignment]
    run(module, sizes)


def test_what_can_be_viewed() -> None:
    """The answer of Tensor.view, for random strides and shapes."""
    draw = random.Random(0)
    for _ in range(4000):
        t = torch.empty([draw.choice([1, 1, 2, 3, 4]) for _ in range(draw.randint(0, 4))])
        for _ in range(draw.randint(0, 3) if t.dim() else 0):
            d = draw.randrange(t.dim())
            rest = (slice(None),) * d
            t = draw.choice([t.transpose(d, draw.randrange(t.dim())), t[(*rest, slice(0, 2))], t[(*rest, slice(None, None, 2))],
                             t.expand([*t.shape[:d], 3, *t.shape[d + 1 :]]) if t.shape[d] == 1 else t, t.unsqueeze(d)])  # fmt: skip
        factors, rest_of = [], t.numel()
        while rest_of > 1:
            factors.append(next(p for p in (2, 3, 5, 7) if rest_of % p == 0))
            rest_of //= factors[-1]
        shape = [1] * draw.randint(1 if factors else 0, 4)
        for p in factors:
            shape[draw.randrange(len(shape))] *= p
        try:
            t.view(shape)
            possible = True
        except RuntimeError:
            possible = False
        assert layouts.pin_view(t, shape) is possible, (t.shape, t.stride(), shape)


def through_a_slice(m: Edits, x: Tensor) -> Tensor:
    h = (x * m.w)[:, :4]
    h.reshape(h.shape[0], -1, 2).mul_(2)
    return h * 1


def through_an_argument(m: Edits, x: Tensor) -> Tensor:
    x.reshape(-1, x.shape[1]).mul_(2)
    return x * m.w


def through_turned_axes(m: Edits, x: Tensor) -> Tensor:
    h = (x * m.w).view(-1, 2, 4).transpose(1, 2)
    h.reshape(-1, h.shape[-1]).mul_(2)
    return h * 1


def into_a_cache(m: Edits, x: Tensor) -> Tensor:
    x[:, :4].reshape(x.shape[0], -1, 2).copy_(torch.ones(x.shape[0], 2, 2, dtype=x.dtype))
    return x * m.w


class Edits(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.body = nn.Parameter(torch.ones((), dtype=torch.float64)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@pytest.mark.parametrize("body", [through_a_slice, through_an_argument, through_turned_axes, into_a_cache])
@pytest.mark.parametrize("whole", [True, False])
def test_an_edit_through_reshape(body: Callable[[Any, Tensor], Tensor], whole: bool) -> None:
    """It is a view or a copy, as in eager, for each size."""
    eager = Edits(body)
    ours = ORTModule(Edits(body))
    for n in (3, 4, 5, 2, 1, 1):
        found = []
        for m in (eager, ours):
            x = torch.arange(n * 16, dtype=torch.float64).view(n, 16)[:, :: 1 if whole else 2]
            y = m(x)
            m.zero_grad()
            y.sum().backward()
            found.append((y.detach(), x, m.w.grad))
        torch.testing.assert_close(found[1], found[0])
    assert not ours.report().eager
