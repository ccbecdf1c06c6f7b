"""A rank of graph_train.ranks: BACKEND DEVICE STAND_IN FOLDER, the rest from the environment. FOLDER/RANK.json gets, of
each way of using DDP, how far parameters are from eager's, their sum of bits, and what was left to PyTorch."""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import graph_correct
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ortmodule import ORTModule

CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "views": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
    "accumulating": {}, "bf16": {},
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.other = nn.Linear(5, 40), nn.Linear(40, 40), nn.Linear(40, 3), nn.Linear(40, 3)
        self.norm = nn.LayerNorm(40)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        h = torch.tanh(self.norm(self.b(torch.relu(self.a(x)))))
        return self.c(h) + self.other(h) if both else self.c(h)


def train(model: nn.Module, case: str, rank: int, device: str) -> dict[str, Tensor]:
    ddp = DDP(model, bucket_cap_mb=0.002, **CASES[case])
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    random = torch.Generator().manual_seed(10 + rank)
    micros = 3 if case == "accumulating" else 1
    for step in range(8):
        for micro in range(micros):
            x, grad = torch.randn(13, 5, generator=random).to(device), torch.randn(13, 3, generator=random).to(device)
            both = case != "unused" or (step + rank) % 2 == 0
            with ddp.no_sync() if micro + 1 < micros else nullcontext(), torch.autocast(device, torch.bfloat16, enabled=case == "bf16"):
                y = ddp(x, both=both)
            y.backward(grad.to(y.dtype))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def main(backend: str, device: str, stand_in: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    elif stand_in == "1":
        from cuda import fake

        fake.late(False)
    dist.init_process_group(backend, rank=rank)
    found = {}
    for case in CASES:
        torch.manual_seed(0)
        eager = Net().to(device)
        wrapped = ORTModule(copy.deepcopy(eager), strict=True, segment_mb=0.001)
        graph_correct.stand_in(stand_in == "1")
        ours = train(wrapped, case, rank, device)
        graph_correct.stand_in(False)
        theirs = train(eager, case, rank, device)
        error = max(float((ours[n.replace("module.", "", 1) if n not in ours else n] - t).abs().max() / t.abs().max()) for n, t in theirs.items())
        report = wrapped.report()
        bits = sum(int(t.view(torch.int32).long().sum()) for t in ours.values())  # one value that differs between ranks changes it
        allowed = 0.2 if case == "bf16" else 1e-4
        found[case] = {"error": error, "allowed": allowed, "bits": bits, "left": str(report) if report.eager else ""}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
