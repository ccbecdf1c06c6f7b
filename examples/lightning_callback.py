"""Lightning without a line in the LightningModule: a callback of the Trainer. Needs `pip install lightning`.

python examples/lightning_callback.py
python examples/lightning_callback.py --arm eager,ortmodule --dropout 0    # the same losses
python examples/lightning_callback.py --devices 2                          # two processes (DDP)
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import arms
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from vision import TRAINED, cnn, digits


class Digits(lightning.LightningModule):
    def __init__(self, dropout: float, lr: float) -> None:
        super().__init__()
        self.net, self.lr, self.losses = cnn(dropout), lr, list[float]()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    from ortmodule.lightning import ORTModuleCallback

    torch.manual_seed(args.seed)
    module, callback = Digits(args.dropout, args.lr), ORTModuleCallback()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    callbacks = [callback] if arm == "ortmodule" else []
    more = {"devices": args.devices, "strategy": "ddp" if args.devices > 1 else "auto", "max_steps": args.steps}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=callbacks, **more, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(*(t[:TRAINED] for t in digits())), batch_size=args.batch))
    told = {"arm": arm, "losses": module.losses, "peak_mb": arms.peak_mb()}
    if arm == "ortmodule":
        told["in_engine"] = callback.report()["net"].node_share
    print(json.dumps(told), flush=True)
    return told


if __name__ == "__main__":
    parser = arms.options(__doc__, steps=60, batch=32, lr=2e-3)
    parser.add_argument("--devices", type=int, default=1, help="processes")
    arms.main(parser, train)
