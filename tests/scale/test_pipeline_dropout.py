"""Dropout in stages of torch.distributed.pipelining that are ORTModules: the backward of each microbatch drops what its
forward has dropped. A stage is dropout(dropout(x w) v), so the gradient of the sum of all outputs is their sum by w."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

CODE = """
import torch, torch.distributed as dist, torch.distributed.pipelining as pp
from torch import nn
from ortmodule import ORTModule
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.rand(64, dtype=torch.double) + 0.5) for _ in range(2))
    def forward(self, x):
        return nn.functional.dropout(nn.functional.dropout(x * self.w, 0.3, True) * self.v, 0.2, True)

schedules = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleInterleavedZeroBubble": 2, "ScheduleZBVZeroBubble": 2}
for name, each in schedules.items():
    n = world * each
    torch.manual_seed(0)
    parts = [Part() for _ in range(n)]
    own = [rank, n - 1 - rank] if "ZBV" in name else [rank + world * k for k in range(each)]
    modules = [ORTModule(parts[i], strict=True, segment_mb=1e6) for i in own]
    stages = [pp.PipelineStage(m, i, n, torch.device("cpu")) for m, i in zip(modules, own)]
    outs = []
    def total(out, _):
        outs.append(out.detach().clone())
        return out.sum()
    schedule = getattr(pp, name)(stages if each > 1 else stages[0], 4, loss_fn=total, scale_grads=False)
    before = None
    for step in range(4):
        outs.clear()
        x = (1 + torch.arange(8).double())[:, None] * torch.ones(64, dtype=torch.double)
        schedule.step(*((x,) if 0 in own else ()), **({"target": x} if n - 1 in own else {}))
        sums = torch.cat(outs).sum(0) if n - 1 in own else torch.zeros(64, dtype=torch.double)
        dist.all_reduce(sums)
        for p in (p for m in modules for p in m.parameters()):
            if step:  # the first step runs a stage more than once, to learn sizes
                assert (p.grad * p.detach() - sums).abs().max() <= 1e-12 * sums.abs().max(), (name, step)
            p.grad = None
        assert before is None or not torch.equal(sums, before), "the same is dropped at every step"
        before = sums
dist.barrier()
print("done")
"""


def test_backward_drops_what_forward_has_dropped() -> None:
    launch(CODE)
