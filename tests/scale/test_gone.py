"""A rank that dies or hangs: within the process group's time-out every other rank gets an error that names it, from
ortmodule.checkpoint."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

START = """
import os, sys, time
from datetime import timedelta
how, where, LIMIT = sys.argv[1], sys.argv[2], 8
import torch, torch.distributed as dist
from torch import nn
from ortmodule import ORTModule, checkpoint
dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(ORTModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

def train(steps):
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def leave():
    print("done", flush=True)
    os._exit(0)

def gone():
    if how == "hangs":
        time.sleep(2.5 * LIMIT)
    leave()
"""

CHECKPOINT = """
folder = sys.argv[3]
train(1)
checkpoint.save(folder, 1, model, optimizer)
if rank == 1 and where == "inside":  # between two of save's collectives
    state = optimizer.state_dict
    optimizer.state_dict = lambda: gone() or state()
elif rank == 1:
    gone()
elif rank == 0 and where == "late":  # on its way while rank 2 already hears of rank 1's death
    time.sleep(2)
began = time.monotonic()
try:
    checkpoint.load(folder, model, optimizer) if where == "load" else checkpoint.save(folder, 2, model, optimizer)
except RuntimeError as error:
    text = str(error)
    assert time.monotonic() - began < 2 * LIMIT
    assert "ortmodule.checkpoint: rank 1 has not come" in text, text
    assert sorted(os.listdir(folder)) in (["step-1"], ["new", "step-1"])
    open(f"{folder}.{rank}", "w")
    while rank == 0 and not os.path.exists(f"{folder}.2") and time.monotonic() - began < 3 * LIMIT:
        time.sleep(0.1)  # it keeps the store, as torchrun does for the scripts that it starts
    leave()
raise AssertionError("no error")
"""


@pytest.mark.parametrize(("how", "where"), [("dies", "inside"), ("dies", "load"), ("dies", "late"),
                                            ("hangs", "save"), ("hangs", "load")])  # fmt: skip
def test_checkpoints_name_the_rank(how: str, where: str, tmp_path: object) -> None:
    launch(START + CHECKPOINT, how, where, tmp_path, ranks=3)

