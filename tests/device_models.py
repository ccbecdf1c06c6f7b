"""Small models, their batches and optimizers, and the way from a module to a trainer (tests/ondevice)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ortmodule import ORTModule, api


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 5))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x)
        return nn.functional.cross_entropy(y, labels), y


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c2 = nn.Conv2d(8, 12, 3, stride=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.relu(self.n1(self.c1(x)))
        y = self.head(nn.functional.relu(self.c2(y)).mean((2, 3)))
        return nn.functional.cross_entropy(y, labels), y


class Former(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(31, 16), nn.Parameter(torch.randn(9, 16) * 0.02)
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.token.weight  # tied

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.token(ids) + self.place
        b, t, d = h.shape
        q, k, v = self.qkv(self.n1(h)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).reshape(b, t, d))
        h = h + self.down(nn.functional.gelu(self.up(self.n2(h))))
        y = self.head(h)
        return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()), y


def batch(kind: type[nn.Module], seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    if kind is Mlp:
        return torch.randn(11, 7, generator=g), torch.randint(5, (11,), generator=g)
    if kind is Cnn:
        return torch.randn(6, 3, 10, 10, generator=g), torch.randint(5, (6,), generator=g)
    return torch.randint(31, (3, 9), generator=g), torch.randint(31, (3, 9), generator=g)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
}


def artifacts(module: nn.Module, folder: Path, kind: type[nn.Module], optimizer: Any) -> ORTModule:
    model = ORTModule(module)
    model.save_for_device(folder, batch(kind, 0), optimizer=optimizer)
    return model


def trainer(folder: Path, **options: Any) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **options)
    return state, module, api.Optimizer(folder / "optimizer_model.onnx", module)
