"""Lightning: wrap the network that training_step calls. Needs `pip install lightning`.

python examples/lightning_trainer.py
python examples/lightning_trainer.py --arm eager,ortmodule --dropout 0    # the same losses
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import arms
import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from vision import TRAINED, cnn, digits


class Digits(lightning.LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr, self.losses = net, lr, list[float]()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    net = arms.Run(cnn(args.dropout), arm, args).model
    data = TensorDataset(*(t[:TRAINED] for t in digits()))
    order = torch.Generator().manual_seed(args.seed)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(
        max_steps=args.steps, accelerator="cpu", precision="bf16-mixed" if args.bf16 else None, **quiet
    )
    module = Digits(net, args.lr)
    trainer.fit(module, DataLoader(data, batch_size=args.batch, shuffle=True, generator=order))
    told = {"arm": arm, "losses": module.losses, "peak_mb": arms.peak_mb()}
    if arm == "ortmodule":
        told["in_engine"] = net.report().node_share
    print(json.dumps(told), flush=True)
    return told


if __name__ == "__main__":
    arms.main(arms.options(__doc__, steps=60, batch=32, lr=2e-3), train)
