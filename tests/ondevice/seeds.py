"""Seeds for fuzz_files: seeds.py DIRECTORY. `0.omd` is read first and is the trainer whose state must survive."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from ortmodule import ORTModule, artifacts


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.b(nn.functional.dropout(self.n(self.a(x)).relu(), 0.1, self.training)), labels)


home = Path(sys.argv[1])
home.mkdir(parents=True, exist_ok=True)
batch = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
packed = ORTModule(Small()).save_for_device(home / "parts", batch)
(home / "0.omd").write_bytes(packed.read_bytes())
(home / "1.safetensors").write_bytes((home / "parts" / "checkpoint").read_bytes())
(home / "2.safetensors").write_bytes((home / "parts" / "nominal_checkpoint").read_bytes())
(home / "3.safetensors").write_bytes(artifacts.tensors_bytes(
    {"é\n": ("F32", [0, 3], b""), "b": ("U8", [2], b"xy")}, {"int:a": "7", "float:b": "1e-3", "string:\\": '"'}))  # fmt: skip
theirs = Path(__file__).with_name("ort") / "mlp"  # onnxruntime-training's
names = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
(home / "4.omd").write_bytes(artifacts.pack({name: (theirs / name).read_bytes() for name in names}))
(home / "5.odtc").write_bytes((theirs / "later").read_bytes())
for part in (home / "parts").iterdir():
    part.unlink()
(home / "parts").rmdir()
