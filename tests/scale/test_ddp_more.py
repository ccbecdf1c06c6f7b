"""What DistributedDataParallel can do besides averaging, around an ORTModule: two gloo ranks on different data, losses
and parameters of the same training without ORTModule; and what happens to the others when a rank dies."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

LIMIT = "LIMIT = 60\n"
START = """
import copy, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from tiny_gpt import GPT, LENGTH, VOCABULARY
from ortmodule import ORTModule
from ortmodule.optim import AdamWMode, FusedAdam
dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
rank, world = dist.get_rank(), dist.get_world_size()

class Net(nn.Module):
    def __init__(self, reentrant=None, partial=False):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 96), nn.BatchNorm1d(96)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(3))
        self.last, self.spare = nn.Linear(96, 1), nn.Linear(1, 1) if partial else None
        self.reentrant = reentrant
    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        for layer in self.body:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)

def net(ours, **more):
    torch.manual_seed(0)
    model = Net(**more).double()
    return ORTModule(model, strict=True, segment_mb=0.02) if ours else model

def train(ddp, opt, steps=6, before=None, average=None):
    g = torch.Generator().manual_seed(rank)
    found = []
    for step in range(steps):
        loss = ddp(torch.randn(5, 8, generator=g, dtype=torch.double)).sub(1).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        if average is not None:
            average()
        found.append(loss.item())
    return found, [t.clone() for t in ddp.module.state_dict().values()]

def near(name, ours, theirs):
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert abs(a - b) <= 1e-10 * abs(b), (name, ours[0], theirs[0])
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1e-3, b.abs().max()), name

def both(name, run):
    theirs = run(False)
    ours = run(True)
    near(name, ours, theirs)
    return ours

def end():
    dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()

def sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
"""

HOOKS = """
def hooked(state, hook, **more):
    # PowerSGD reduces in callbacks, whose order among several buckets gloo does not keep: without ORTModule, too
    more = {"bucket_cap_mb": 25 if state else 0.1, **more}
    def run(ours):
        ddp = DDP(net(ours), **more)
        ddp.register_comm_hook(state() if state else None, hook)
        return train(ddp, sgd(ddp))
    return run
sgd_state = lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
plain = both("allreduce", hooked(None, default_hooks.allreduce_hook))
found = {
    "fp16": both("fp16", hooked(None, default_hooks.fp16_compress_hook)),
    "fp16, bucket views": both("fp16 views", hooked(None, default_hooks.fp16_compress_hook, gradient_as_bucket_view=True)),
    "powerSGD": both("powerSGD", hooked(sgd_state, powerSGD_hook.powerSGD_hook)),
    "fp16 of powerSGD": both("wrapper", hooked(sgd_state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))),
}
assert all(losses != plain[0] for losses, _ in found.values())  # the hooks did something
for ours in (False, True):
    try:
        hooked(None, default_hooks.bf16_compress_hook)(ours)
    except TypeError as error:
        assert "BF16" in str(error), error
    else:
        raise AssertionError("DDP has learned bf16 on gloo: test it")
end()
"""

MODES = """
# static graph, bucket views, buffers, with regions that backward computes again
for reentrant in (None, False, True):
    for more in ({"static_graph": True}, {"static_graph": True, "gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True},
                 {"broadcast_buffers": False}, {"init_sync": False}):
        def run(ours):
            ddp = DDP(net(ours, reentrant=reentrant), bucket_cap_mb=0.1, **more)
            return train(ddp, sgd(ddp))
        both((reentrant, more), run)

# uneven inputs: rank 0 ends two batches before rank 1, with one optimizer per rank and with a sharded one
def uneven(zero):
    def run(ours):
        ddp = DDP(net(ours), bucket_cap_mb=0.1)
        opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2) if zero else sgd(ddp)
        with Join([ddp, opt] if zero else [ddp]):
            losses = train(ddp, opt, 4 + 2 * rank)[0]
        return losses, [t.clone() for t in ddp.module.state_dict().values()]  # the last rank's: Join hands them out
    return run
for zero in (False, True):
    _, last = both(("Join", zero), uneven(zero))
    given = [None] * world
    params = [t for t, name in zip(last, net(False).state_dict()) if "running" not in name and "num" not in name]
    dist.all_gather_object(given, params)
    assert all(torch.equal(a, b) for a, b in zip(*given))

# sharded optimizer states: torch's and ours; the consolidated state is the unsharded optimizer's
def zero(make, **more):
    def run(ours):
        ddp = DDP(net(ours))
        opt = ZeroRedundancyOptimizer(ddp.parameters(), make, lr=1e-2, **more)
        found = train(ddp, opt)
        opt.consolidate_state_dict(0)
        if rank == 0 and make is torch.optim.AdamW:
            plain = make(ddp.parameters(), lr=1e-2)
            plain.load_state_dict(opt.state_dict())
            assert len(plain.state) == len(list(ddp.parameters()))
        return found
    return run
adamw = both("zero", zero(torch.optim.AdamW))
both("zero views", zero(torch.optim.AdamW, parameters_as_bucket_view=True))
near("ours", zero(FusedAdam, eps=1e-8, weight_decay=1e-2, adam_w_mode=AdamWMode.ADAMW_TORCH)(True), adamw)

# local SGD: gradients are averaged for three steps, then parameters every second step
def local(ours):
    ddp = DDP(net(ours), bucket_cap_mb=0.1)
    ddp.register_comm_hook(post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=3), post_localSGD_hook.post_localSGD_hook)
    opt = PostLocalSGDOptimizer(sgd(ddp), PeriodicModelAverager(period=2, warmup_steps=3))
    return train(ddp, opt, 8)
both("local", local)

# a parameter that takes no part: DDP's error, in the second forward
for ours in (False, True):
    ddp = DDP(net(ours, partial=True))
    try:
        train(ddp, sgd(ddp))
    except RuntimeError as error:
        assert "Expected to have finished reduction" in str(error), error
    else:
        raise AssertionError("unused parameters are not noticed")
try:
    ORTModule(DDP(net(False)))
except TypeError as error:
    assert "DistributedDataParallel(ORTModule(model))" in str(error), error
else:
    raise AssertionError("not refused")
end()
"""

ZERO_CHECKPOINT = """
from ortmodule import checkpoint as saved
def make():
    ddp = DDP(net(True))
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
ddp, opt = make()
train(ddp, opt)
try:
    saved.save(sys.argv[1], 6, ddp, opt)
except RuntimeError as error:
    assert "consolidate" in str(error), error
else:
    raise AssertionError("not refused")
saved.save(sys.argv[1], 6, ddp, opt.optim)
theirs = train(ddp, opt)
ddp, opt = make()
assert saved.load(sys.argv[1], ddp, opt.optim) == 6
ours = train(ddp, opt)
assert ours[0] == theirs[0] and all(map(torch.equal, ours[1], theirs[1]))
end()
"""

DIES = """
import time
how = sys.argv[1]
ddp = DDP(net(True), bucket_cap_mb=0.1)
opt = sgd(ddp)
train(ddp, opt, 2)
dist.barrier()
began = time.monotonic()
if rank == 1 and how == "dies":
    print("done", flush=True)
    os._exit(0)
if rank == 1 and how == "hangs":
    time.sleep(40)
    print("done", flush=True)
    os._exit(0)
try:
    if rank == 1:  # raises in the middle of forward, where PyTorch would
        train_ids = ddp(torch.randn(5, 9, dtype=torch.double))
    else:
        train(ddp, opt, 2)
except RuntimeError as error:
    took = time.monotonic() - began
    assert took < 2 * LIMIT, took
    text = str(error)
    assert "shapes" in text if rank == 1 else any(w in text for w in ("closed", "reset", "Timed out", "timed out", "imeout")), text
    print("done", flush=True)
    os._exit(0)
raise AssertionError("no error")
"""


def test_communication_hooks() -> None:
    launch(LIMIT + START + HOOKS)


def test_join_sharded_optimizers_local_sgd_and_static_graphs() -> None:
    launch(LIMIT + START + MODES)


def test_checkpoint_of_a_sharded_optimizer(tmp_path: object) -> None:
    launch(LIMIT + START + ZERO_CHECKPOINT, tmp_path)


@pytest.mark.parametrize("how", ["dies", "hangs", "raises"])
def test_the_others_hear_of_a_rank_that_is_gone(how: str) -> None:
    launch("LIMIT = 15\n" + START + DIES, how)
