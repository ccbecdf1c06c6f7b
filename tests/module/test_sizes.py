"""Sizes that change from call to call, 0 and 1 among them, against eager PyTorch: a capture that does not hold for them
is made again or the call left to PyTorch, and nobody sees an exception that PyTorch does not raise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Of(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *x: Tensor) -> Tensor:
        return self.f(*x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


def step(module: nn.Module, xs: list[Tensor]) -> list[Tensor] | type[Exception]:
    xs = [x.clone().requires_grad_() for x in xs]
    for p in module.parameters():
        p.grad = None
    try:
        y = module(*xs)
    except Exception as error:  # noqa: BLE001
        return type(error)
    y.sin().sum().backward()
    return [y.detach(), *[x.grad for x in xs], *[p.grad for p in module.parameters()], *[b.double() for b in module.buffers()]]


PAIRS = [[(m, 4), (n, 4)] for m, n in ((5, 5), (3, 3), (1, 3), (3, 1), (1, 1), (0, 0), (2, 3), (4, 4))]
ROWS = [[(5, 3)], [(4, 3)], [(0, 3)], [(1, 3)], [(0, 3)], [(6, 3)]]
CASES: dict[str, tuple[Callable[..., Tensor], list[list[tuple[int, ...]]]]] = {
    "add": (lambda x, y: x + y, PAIRS),
    "maximum": (torch.maximum, PAIRS),
    "where": (lambda x, y: torch.where(x > 0, x, y), PAIRS),
    "all but the first": (lambda x: x[1:] * 2, ROWS),
    "last": (lambda x: x[-1:] * 2, ROWS),
    "differences": (lambda x: x.diff(dim=0), ROWS),
}


@pytest.mark.parametrize("name", [*CASES, "batch_norm"])
def test_sizes_that_change(name: str) -> None:
    f, calls = CASES.get(name, (None, ROWS))
    theirs = Of(f) if f else Norm()
    ours = ORTModule(copy.deepcopy(theirs))
    for n, shapes in enumerate(calls):
        g = torch.Generator().manual_seed(n)
        xs = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
        want, got = step(theirs, xs), step(ours, xs)
        if isinstance(want, type):
            assert got is want
        else:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    report = ours.report()  # type: ignore[attr-defined]
    assert not [e for e in report.eager if e.calls > 2], "only calls of sizes that have no capture run in PyTorch"
