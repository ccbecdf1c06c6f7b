"""Results that are views of one another, and of an argument or of what is computed, in every order: memory and gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "reshaped": lambda y: [y, (z := y.reshape(-1)), z.unsqueeze(1)],
    "squeezed": lambda y: [y, (z := y.squeeze(0)), z[..., None]],
    "squeezed everywhere": lambda y: [y, (z := y.squeeze()), z.unsqueeze(-1)],
    "unflattened": lambda y: [y, (z := y.flatten(0, 1)), z.unflatten(-1, (2, 3))],
    "spread": lambda y: [y, (z := y.unsqueeze(0)), z.expand(3, *y.shape)],
}


class Net(nn.Module):
    def __init__(self, views: Callable[[Tensor], list[Tensor]], order: tuple[int, ...], computed: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.views, self.order, self.computed = views, order, computed

    def forward(self, x: Tensor) -> Any:
        made = self.views(self.a(x) if self.computed else x)
        return [made[i] for i in self.order]


@pytest.mark.parametrize("computed", [False, True], ids=["of an argument", "computed"])
@pytest.mark.parametrize("name", VIEWS)
def test_in_every_order(name: str, computed: bool) -> None:
    for order in itertools.permutations(range(3), 3 if computed else 2):
        eager = Net(VIEWS[name], order, computed).double()
        ours = ORTModule(copy.deepcopy(eager))
        for rows in (2, 3, 1):
            x = torch.randn(rows, 4, 6, dtype=torch.float64)
            found: list[list[Any]] = []
            for model in (ours, eager):
                leaf = x.clone().requires_grad_()
                outs = model(leaf)
                memory = [[o.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in (*outs, leaf)] for o in outs]
                grads = [torch.autograd.grad((o * torch.linspace(1, 2, o.numel(), dtype=o.dtype).view(o.shape)).sum(), leaf, retain_graph=True)[0] for o in outs]
                found.append([memory, [o.detach().clone() for o in outs], grads])
            (memory, outs, grads), (memory_e, outs_e, grads_e) = found
            assert memory == memory_e, (order, rows)
            torch.testing.assert_close([*outs, *grads], [*outs_e, *grads_e], rtol=1e-11, atol=1e-12)


SQUEEZES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a dimension": lambda m, x: m.a(x).squeeze(0)[..., 1:],
    "all": lambda m, x: m.a(x).squeeze() * 2,
    "several": lambda m, x: m.a(x[:, None]).squeeze((0, 1)).sum(-1),
    "in place": lambda m, x: m.a(x).clone().squeeze_(0).sum(0),
    "then a product": lambda m, x: m.a(x.squeeze(0)).sum(-2),
    "of a computed size": lambda m, x: m.a(x[1:]).squeeze(0).mean(0),
    "numpy's name": lambda m, x: torch.squeeze(m.a(x), dim=0).tanh(),
}


@pytest.mark.parametrize("first", [2, 1])
@pytest.mark.parametrize("name", SQUEEZES)
def test_squeeze_of_a_size_that_comes_to_be_one(name: str, first: int) -> None:
    class Squeezes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return SQUEEZES[name](self, x)

    eager = Squeezes().double()
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (first, 3, 2, 1, 4, 1, 2):
        x, found = torch.randn(rows, 4, 6, dtype=torch.float64), []
        for model in (ours, eager):
            model.zero_grad()
            y = model(x)
            y.pow(2).sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12, equal_nan=True)
