"""A small network of several kinds of modules, wrapped, and its batch: what model.verify is tried on, also in a process with
another engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.lin = nn.Linear(12, 12)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.lin(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(nn.Tanh()), Block(Swish()), Block(nn.GELU()), Block(nn.GELU()))
        self.bn = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.bn(self.drop(self.blocks(x)))
        return self.head(h), h


def batch() -> Tensor:
    return torch.randn(9, 12, generator=torch.Generator().manual_seed(5))


def made(make: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    return ORTModule(make(), **options)
