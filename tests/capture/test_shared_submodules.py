"""One submodule at two places of the tree: what code asks of submodules (is it that one, of which class, how many) has
eager's answers while it is captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act = nn.Tanh()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), act), nn.Sequential(nn.Linear(4, 4), act)])
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.frozen = [self.layers[0]]
        self.scale = {self.layers[1]: 3.0}


class Identity(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for layer in self.layers:
            x = layer(x)
            if layer is not self.layers[-1]:
                x = x.tanh()
        return x


class Keys(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale.get(layer, 1.0)
            if layer in self.frozen:
                x = x.detach()
        return x + self.blocks[0](x) * len({self.blocks[0][1], self.blocks[1][1]})


class Classes(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.blocks[0], *self.blocks[1], *self.layers):
            x = layer(x)
            if type(layer) is nn.Linear:
                x = x * 2
            x = x + {nn.Tanh: 1.0}.get(type(layer), 0.0)
            x = x * (2 if layer.__class__ is nn.Tanh else 1)
        return x


class Counts(Tower):
    def forward(self, x: Tensor) -> Tensor:
        n = len(list(self.modules())) + 10 * len(list(self.blocks[0].children())) + len(dict(self.named_modules()))
        return self.blocks[1](self.blocks[0](x)) * n


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act, layer = nn.Tanh(), nn.Linear(4, 4)
        self.net = nn.Sequential(layer, act, layer, act, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.net, 2, x, use_reentrant=False)


@pytest.mark.parametrize("module", [Identity, Keys, Classes, Counts, Checkpoints])
def test_answers_are_eagers(module: type[nn.Module]) -> None:
    eager = module()
    wrapped = ORTModule(copy.deepcopy(eager))
    for n in (3, 3, 5):
        x = torch.randn(n, 4)
        for m in (eager, wrapped):
            m.zero_grad()
        want, got = eager(x), wrapped(x)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        want.sum().backward()
        got.sum().backward()
        for p, q in zip(eager.parameters(), wrapped.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)
    assert wrapped.report().graphs, str(wrapped.report())
