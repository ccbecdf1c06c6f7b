"""Stages of torch.distributed.pipelining that are ORTModules, on two gloo ranks: every microbatch's loss and every
gradient of the same pipeline without ORTModule. Tensor parallelism: refused, or left to PyTorch."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

START = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tiny_gpt import LENGTH, VOCABULARY, Block
from ortmodule import ORTModule, wrap_blocks
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, world = dist.get_rank(), dist.get_world_size()

def end():
    dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()
"""

PIPELINE = """
import torch.distributed.pipelining as pp

class Part(nn.Module):
    def __init__(self, i, n):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64) if i == 0 else None
        self.block = Block(64, 4)
        self.head = nn.Linear(64, VOCABULARY) if i == n - 1 else None
    def forward(self, x):
        x = self.block(x if self.tokens is None else self.tokens(x))
        return x if self.head is None else self.head(x)

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

def run(schedule, each, v, ours, segment_mb):
    n = world * each
    torch.manual_seed(0)
    parts = [Part(i, n) for i in range(n)]
    own = [rank, n - 1 - rank] if v else [rank + world * k for k in range(each)]
    modules = [ORTModule(parts[i], strict=True, segment_mb=segment_mb) if ours else parts[i] for i in own]
    stages = [pp.PipelineStage(m, i, n, torch.device("cpu")) for m, i in zip(modules, own)]
    schedule = schedule(stages if each > 1 else stages[0], 4, loss_fn=loss_fn)
    opt = torch.optim.AdamW([p for m in modules for p in m.parameters()], 1e-3)
    g = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        x, y = (torch.randint(0, VOCABULARY, (8, LENGTH), generator=g) for _ in range(2))
        losses = []
        schedule.step(*((x,) if 0 in own else ()), **(dict(target=y, losses=losses) if n - 1 in own else {}))
        found += [loss.item() for loss in losses] + [p.grad.norm().item() for m in modules for p in m.parameters()]
        opt.step()
        opt.zero_grad()
    assert not ours or all(m.report().node_share == 1 for m in modules)
    return found

name, each, v, segment_mb = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "v", float(sys.argv[4])
kind = getattr(pp, name)
theirs = run(kind, each, v, False, segment_mb)
try:
    ours = run(kind, each, v, True, segment_mb)
except RuntimeError as error:
    assert sys.argv[5] == "refused" and "segment_mb=1e6" in str(error), error
    print("done", flush=True)
    os._exit(0)
assert sys.argv[5] == "right"
assert len(ours) == len(theirs) and all(abs(a - b) <= 1e-6 * max(1e-3, abs(b)) for a, b in zip(ours, theirs)), (ours, theirs)
end()
"""

TENSOR = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (world,))
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.feed, self.last = nn.Linear(8, 64), Feed(), nn.Linear(64, 1)
    def forward(self, x):
        return self.last(self.feed(self.first(x)))
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
def build():
    torch.manual_seed(0)
    return Model()
def refused(call):
    try:
        call()
    except RuntimeError as error:
        assert "DTensor" in str(error) and "parallel" in str(error), error
    else:
        raise AssertionError("not refused")
# before and after: the module, the part that is parallel, with a capture that was made before
model = build()
parallelize_module(model.feed, mesh, PLAN)
refused(lambda: ORTModule(model))
refused(lambda: ORTModule(model.feed))
model = build()
wrapped = ORTModule(model)
wrapped(x).sum().backward()
parallelize_module(model.feed, mesh, PLAN)
refused(lambda: wrapped(x))
# parts that are not parallel, wrapped beside those that are
def train(ours):
    model = build()
    parallelize_module(model.feed, mesh, PLAN)
    if ours:
        model.first, model.last = ORTModule(model.first), ORTModule(model.last)
    opt = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    losses = []
    for _ in range(4):
        loss = model(x).sub(1).pow(2).mean()
        loss.backward()
        opt.step(), opt.zero_grad()
        losses.append(loss.item())
    assert not ours or model.first.report().node_share == 1
    return losses
theirs, ours = train(False), train(True)
assert all(abs(a - b) <= 1e-6 * theirs[0] for a, b in zip(ours, theirs)), (ours, theirs)
end()
"""

RIGHT = [
    ("ScheduleGPipe", 1, "loop", 0.02),
    ("Schedule1F1B", 1, "loop", 0.02),
    ("ScheduleInterleaved1F1B", 2, "loop", 0.02),
    ("ScheduleLoopedBFS", 2, "loop", 0.02),
    ("ScheduleInterleavedZeroBubble", 2, "loop", 1e6),
    ("ScheduleZBVZeroBubble", 2, "v", 1e6),
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case[0])
def test_schedules(case: tuple[object, ...]) -> None:
    launch(START + PIPELINE, *case, "right")


def test_zero_bubble_refuses_several_segments() -> None:
    """Its second half would begin behind the first segment: those behind had no gradients, and nobody said so."""
    launch(START + PIPELINE, "ScheduleInterleavedZeroBubble", 2, "loop", 0.02, "refused")


def test_tensor_parallel_parts_are_refused_and_others_train() -> None:
    launch(START + TENSOR)
