"""Handwritten digits: a small convolutional network, or a vision transformer of transformers.

    python examples/vision.py
    python examples/vision.py --net vit --arm eager,ortmodule --dropout 0

Data: examples/digits.u8, scikit-learn's set of 1,797 images of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import arms
import torch
from torch import Tensor, nn

TRAINED = 1500


def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) around 0, labels (n,)."""
    data = Path(__file__).with_name("digits.u8").read_bytes()
    n = int(data.split(b"\n", 1)[0].split()[1])
    rest = torch.frombuffer(bytearray(data.split(b"\n", 1)[1]), dtype=torch.uint8)
    return rest[: 64 * n].view(n, 1, 8, 8).float() / 16 - 0.5, rest[64 * n :].long()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def cnn(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), Residual(32), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
                         Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout),
                         nn.Linear(64, 10))  # fmt: skip


class ViT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.net = ViTForImageClassification(ViTConfig(
            image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=128, num_labels=10, hidden_dropout_prob=dropout))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(pixel_values=x).logits


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    images, labels = digits()
    run = arms.Run(cnn(args.dropout) if args.net == "cnn" else ViT(args.dropout), arm, args)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=args.lr)
    order = torch.randint(TRAINED, (args.steps, args.batch), generator=torch.Generator().manual_seed(args.seed))
    for chosen in run.steps(order):
        with run.precision():
            loss = nn.functional.cross_entropy(run.model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.model.eval()
    with torch.no_grad():
        right = run.model(images[TRAINED:]).argmax(1) == labels[TRAINED:]
    return run.told(accuracy=float(right.float().mean()))


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=200, batch=32, lr=2e-3)
    parser.add_argument("--net", choices=("cnn", "vit"), default="cnn")
    arms.main(parser, train)
