"""FSDP1 (FullyShardedDataParallel) around ORTModules on two gloo ranks: losses and gradients of the same training without
them; ORTModule around FSDP1 is refused."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

START = """
import itertools
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from tiny_gpt import batch, build
from ortmodule import ORTModule, wrap_blocks
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def end():
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
"""

TRAIN = """
def train(ours, how, **more):
    model, wrapped = build(), []
    if how == "blocks":
        if ours:
            wrapped = [model.get_submodule(name) for name in wrap_blocks(model)]
        model.blocks = torch.nn.ModuleList(FSDP(block, **more) for block in model.blocks)
    elif ours:
        model = ORTModule(model)
        wrapped = [model]
    model = FSDP(model, **more)
    opt, gen, found = torch.optim.AdamW(model.parameters(), 1e-3), torch.Generator().manual_seed(rank), []
    for step in range(4):
        for micro in range(2):
            loss = model(batch(gen)) / 2
            loss.backward()
            found.append(loss.item())
        found.append(model.clip_grad_norm_(1.0).item())
        opt.step()
        opt.zero_grad()
    return found, [m.report() for m in wrapped]

bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
S = ShardingStrategy
for how, strategy, names, mixed in [*itertools.product(("blocks", "whole"), (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD), (False, True), (None,)),
                                    ("blocks", S.FULL_SHARD, False, bf16), ("whole", S.FULL_SHARD, False, bf16)]:
    more = dict(device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=names, mixed_precision=mixed)
    theirs, _ = train(False, how, **more)
    ours, reports = train(True, how, **more)
    tolerance = 2e-3 if mixed else 1e-6
    assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, theirs, strict=True)), (how, strategy, names, ours, theirs)
    for report in reports:  # the parameters of FSDP1's use_orig_params are other tensors at every call
        assert report.node_share == (0 if names else 1) and bool(report.eager) == names, (how, strategy, names, str(report))
        assert not names or "parameters are replaced" in str(report.eager), str(report)
end()
"""

REFUSED = """
def refused(make):
    try:
        make()
    except RuntimeError as error:
        assert "FullyShardedDataParallel(ORTModule(block))" in str(error), error
    else:
        raise AssertionError("not refused")
cpu = torch.device("cpu")
refused(lambda: ORTModule(FSDP(build(), device_id=cpu)))
model = build()
model.blocks[0] = FSDP(model.blocks[0], device_id=cpu)
refused(lambda: ORTModule(model))
model = ORTModule(build())  # sharded afterwards, also behind a capture
ids = batch(torch.Generator())
model(ids)
model.blocks[0] = FSDP(model.blocks[0], device_id=cpu)
refused(lambda: model(ids))
end()
"""


def test_sharded_around_wrapped_modules() -> None:
    launch(START + TRAIN)


def test_wrapped_around_sharded_modules_is_refused() -> None:
    launch(START + REFUSED)
