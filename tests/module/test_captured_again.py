"""When a model is captured again: sizes that used to need a capture of their own and do not, beside eager in fp64, and
what report() says of those that do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule


class Strided(nn.Module):
    """Wav2Vec2's way to the number of its features: floors of floors, of numbers that a small size makes negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 10, stride=5, dtype=torch.float64)
        self.second = nn.Conv1d(4, 4, 3, stride=2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        n = x.shape[-1]
        for kernel, stride in ((10, 5), (3, 2)):
            n = torch.div(n - kernel, stride, rounding_mode="floor") + 1 if isinstance(n, Tensor) else (n - kernel) // stride + 1
        return h * torch.arange(n, dtype=h.dtype) + h.mean(-1, keepdim=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=torch.float64)
        return self.layer(x, memory, tgt_mask=mask)


class Counts(nn.Module):
    """len() of a tensor is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), torch.arange(len(x)) % 7)


class AboveFour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if x.size(0) > 4:  # asked here
            y = torch.tanh(y)
        return y


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, tuple[Any, list[tuple[Tensor, ...]], int, str]] = {
    "floors of floors": (Strided, [(r(2, 1, n),) for n in (40, 40, 53, 61, 25)] + [(r(1, 1, 47),)], 2, ""),
    "attention at batch 1": (Decoder, [(r(b, t, 8), r(b, t + 2, 8)) for b, t in ((2, 5), (2, 5), (3, 7), (1, 4), (1, 7))], 2, ""),
    "len()": (Counts, [(r(n, 5),) for n in (3, 3, 4, 6, 1)], 2, ""),
    "a branch on a size": (AboveFour, [(r(n, 5),) for n in (5, 6, 7, 3, 2)], 3, "size(0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_captures_of_sizes(name: str) -> None:
    make, calls, captures, holds = CASES[name]
    torch.manual_seed(0)
    eager = make()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for args in calls:
        out = []
        for m in (eager, ours):
            m.zero_grad()
            given = [a.clone().requires_grad_() for a in args]
            y = m(*given)
            y.sum().backward()
            out.append((y, [a.grad for a in given], [p.grad for p in m.parameters()]))
        torch.testing.assert_close(out[1], out[0], rtol=1e-10, atol=1e-10)
    report = ours.report()
    assert report.n_captures == captures, str(report)
    assert holds in report.graphs[-1].why, report.graphs[-1].why
    if "branch" in name:
        assert "a capture holds where" in report.graphs[-1].why and "test_captured_again.py:" in report.graphs[-1].why
