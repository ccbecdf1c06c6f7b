"""States of a module that a capture was found for when its captures had read less: an attribute that matters later, at
other sizes, or one way alone. When such a state comes back, it is its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import close
from torch import Tensor, nn

from ortmodule import ORTModule

TABLE: dict[int, Tensor] = {}


class Reads(nn.Module):
    """k: what the script changes."""

    def __init__(self, does: Callable[[Any, Tensor, Tensor, float], Tensor]) -> None:
        super().__init__()
        self.first, self.does, self.k, self.inner = nn.Linear(8, 4), does, 1.0, nn.Identity()
        self.inner.k = 1.0

    def forward(self, x: Tensor, n: float = 0) -> Tensor:
        return self.does(self, torch.tanh(self.first(x)), x, n)


def raises(m: Any, h: Tensor, x: Tensor, n: float) -> Tensor:
    if m.k < 0:
        raise ValueError("negative")
    return h * m.k


def memo(m: Any, h: Tensor, x: Tensor, n: float) -> Tensor:
    if x.shape[0] not in TABLE:
        TABLE[x.shape[0]] = torch.linspace(0, 1, 4, dtype=torch.float64)
    return h * m.k + TABLE[x.shape[0]]


def later(m: Any, h: Tensor, x: Tensor, n: float) -> Tensor:
    return h * m.k if n >= 2 else h


# what forward does, and the calls: k, rows, sign of the argument, number
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[float, int, int, float]]]] = {
    "at other sizes": (lambda m, h, x, n: h * m.k if x.shape[0] > 4 else h, [(1, 3, 1, 0), (2, 3, 1, 0), (2, 6, 1, 0), (2, 6, 1, 0), (1, 6, 1, 0), (2, 6, 1, 0)]),
    "of a submodule": (lambda m, h, x, n: h * m.inner.k if x.shape[0] > 4 else h, [(1, 3, 1, 0), (2, 3, 1, 0), (2, 6, 1, 0), (2, 6, 1, 0), (1, 6, 1, 0), (2, 6, 1, 0)]),
    "one way alone": (lambda m, h, x, n: h * m.k if x.sum() > 0 else h, [(1, 5, -1, 0), (2, 5, -1, 0), (2, 5, 1, 0), (2, 5, 1, 0), (1, 5, 1, 0), (2, 5, 1, 0), (1, 5, -1, 0)]),
    "later": (later, [(k, 5, 1, n) for n in range(5) for k in (1, 1, 2, 2)]),
    "a memo": (memo, [(k, 5, 1, 0) for k in (1, 2, 2, 1, 2, 2, 1, 2)]),
    "an error first": (raises, [(k, 5, 1, 0) for k in (-1, 1, 1, 2, 3, -1, 2)]),
}  # fmt: skip


# strict: but for those of which PyTorch runs some calls
@pytest.mark.parametrize("name,strict", [(name, strict) for name in CASES for strict in (False, True)
                                         if not strict or name not in ("a memo", "an error first")])  # fmt: skip
def test_a_state_that_comes_back(name: str, strict: bool) -> None:
    does, calls = CASES[name]
    TABLE.clear()
    torch.manual_seed(0)
    eager = Reads(does).double()
    ours: Any = ORTModule(copy.deepcopy(eager), strict=strict)
    for k, rows, sign, n in calls:
        found: list[list[Tensor | None] | str] = []
        x = torch.rand(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)) * sign
        for model in (ours, eager):
            model.k = model.inner.k = float(k)
            model.zero_grad()
            try:
                y = model(x, n)
            except ValueError as error:
                found.append(str(error))
                continue
            y.sin().sum().backward()
            found.append([y.detach(), *[p.grad for p in model.parameters()]])
        if isinstance(found[0], str) or isinstance(found[1], str):
            assert found[0] == found[1]
            continue
        for a, b in zip(*found, strict=True):
            close(a, b)  # type: ignore[arg-type]
