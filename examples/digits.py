"""Makes the artifacts that examples/train_digits.c trains:  python examples/digits.py DIRECTORY"""

import argparse

import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return nn.functional.cross_entropy(scores, labels), scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = ORTModule(Digits())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batch = (torch.zeros(25, 64), torch.zeros(25, dtype=torch.long))
    print(model.save_for_device(args.directory, batch, optimizer=optimizer))
