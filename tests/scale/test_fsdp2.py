"""FSDP2 (fully_shard) with ORTModule blocks: gloo ranks, losses and gradients' norms of the same training without
ORTModule; checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

START = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tiny_gpt import batch, build
from ortmodule import ORTModule, wrap_blocks

if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

def shard(ours, mesh, reshard=True, bf16=False):
    model = build()
    policy = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)) if bf16 else {}
    wrapped = [model.get_submodule(name) for name in wrap_blocks(model)] if ours else []
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **policy), wrapped

def train(model, opt, steps, gen, clip=1.0):
    found = []
    for _ in range(steps):
        loss = model(batch(gen))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        found += [total.item() / world, getattr(norm, "full_tensor", lambda: norm)().item()]
    return found

def data():
    return torch.Generator().manual_seed(dist.get_rank())

def near(ours, theirs, tolerance):
    assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)

def in_engine(wrapped):
    assert wrapped and all(m.report().node_share == 1 and not m.report().eager for m in wrapped), [str(m.report()) for m in wrapped]

def end():
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
"""

MODES = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if world == 4 else init_device_mesh("cpu", (2,))
for bf16 in (False, True):
    for reshard in (True, False) if world == 2 else (True,):
        found = []
        for ours in (False, True):
            model, wrapped = shard(ours, mesh, reshard, bf16)
            found.append(train(model, torch.optim.AdamW(model.parameters(), 1e-3), 4, data()))
        near(found[1], found[0], 2e-3 if bf16 else 1e-6)
        in_engine(wrapped)
end()
"""

SAVE = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
mesh = init_device_mesh("cpu", (world,))
model, wrapped = shard(True, mesh)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
if sys.argv[2] == "save":
    train(model, opt, 3, data())
    state, moments = get_state_dict(model, opt)
    dcp.save({"model": state, "optim": moments}, checkpoint_id=sys.argv[1])
else:
    state, moments = get_state_dict(model, opt)
    both = {"model": state, "optim": moments}
    dcp.load(both, checkpoint_id=sys.argv[1])
    set_state_dict(model, opt, model_state_dict=both["model"], optim_state_dict=both["optim"])
# the same batch for every rank: what follows must not depend on how many there are
with torch.no_grad():
    loss = model(batch(torch.Generator().manual_seed(7))).item()
if sys.argv[2] == "save":
    if rank == 0:
        open(sys.argv[1] + ".loss", "w").write(repr(loss))
else:
    want = float(open(sys.argv[1] + ".loss").read())
    assert abs(loss - want) <= 1e-6 * want, (loss, want)
train(model, opt, 1, data())
end()
"""

ONE = """
import torch.distributed.checkpoint as dcp
model = build()
state = model.state_dict()
dcp.load({"model": state}, checkpoint_id=sys.argv[1])
model.load_state_dict(state)
model = ORTModule(model)
with torch.no_grad():
    loss = model(batch(torch.Generator().manual_seed(7))).item()
want = float(open(sys.argv[1] + ".loss").read())
assert abs(loss - want) <= 1e-6 * want, (loss, want)
print("done", flush=True)
"""

REFUSED = """
mesh = init_device_mesh("cpu", (2,))
model = build()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
for wrap in (lambda: ORTModule(model), lambda: wrap_blocks(model)):
    try:
        wrap()
    except RuntimeError as error:
        assert "before" in str(error), error
    else:
        raise AssertionError("not refused")
end()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_wrapped_and_then_sharded(ranks: int) -> None:
    """Both modes of resharding, fp32 and bf16; on four ranks a mesh of 2 x 2 (HSDP)."""
    launch(START + MODES, ranks=ranks)


def test_checkpoints_of_two_ranks_in_one_and_in_four(tmp_path: object) -> None:
    path = f"{tmp_path}/checkpoint"
    launch(START + SAVE, path, "save")
    launch(START + SAVE, path, "load", ranks=4)
    launch(START + ONE, path, ranks=1)


def test_blocks_that_are_sharded_already_are_refused() -> None:
    launch(START + REFUSED)
