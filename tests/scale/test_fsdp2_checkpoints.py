"""FSDP2 with blocks that are computed again in backward: torch.utils.checkpoint of both kinds around and inside of
ORTModule blocks, and torch's checkpoint_wrapper; lengths that differ among ranks and steps. Losses and gradient norms of
the same training without ORTModule, on two gloo ranks."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

CODE = """
import sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tiny_gpt import VOCABULARY, Block
from ortmodule import ORTModule
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()

class Inner(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block, self.reentrant = Block(32, 2), reentrant
    def forward(self, x):
        return x + checkpoint(self.block, x, use_reentrant=self.reentrant)

class Net(nn.Module):
    def __init__(self, where, reentrant):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.blocks = nn.ModuleList(Inner(reentrant) if where == "inside" else Block(32, 2) for _ in range(3))
        self.where, self.reentrant = where, reentrant
    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.where == "around" else block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

def again(block):
    return checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)

def train(ours, where, reentrant, bf16, reshard, accumulate):
    torch.manual_seed(0)
    model = Net(where, reentrant)
    how = {"mesh": init_device_mesh("cpu", (2,)), "reshard_after_forward": reshard}
    if bf16:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        block = again(block) if where == "wrapper inside" else block
        block = ORTModule(block) if ours else block
        model.blocks[i] = fully_shard(again(block) if where == "wrapper around" else block, **how)
    fully_shard(model, **how)
    opt, g, found = torch.optim.AdamW(model.parameters(), 1e-2), torch.Generator().manual_seed(rank), []
    for step in range(4):
        for k in range(accumulate):
            model.set_requires_gradient_sync(k + 1 == accumulate)
            loss = model(torch.randint(0, VOCABULARY, (2 + (step + rank) % 2, 5 + (3 * step + rank) % 7), generator=g)) / accumulate
            loss.backward()
            found.append(loss.item())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        opt.step(), opt.zero_grad()
    wrapped = [m for m in model.modules() if isinstance(m, ORTModule)]
    assert len(wrapped) == 3 * ours and all(m.report().node_share == 1 and not m.report().eager for m in wrapped)
    return found

where = sys.argv[1]
for reentrant in (False, True) if "wrapper" not in where else (False,):
    for bf16, reshard, accumulate in ((False, True, 2), (True, True, 1), (True, False, 2)):
        theirs, ours = (train(arm, where, reentrant, bf16, reshard, accumulate) for arm in (False, True))
        for a, b in zip(ours, theirs, strict=True):
            assert abs(a - b) <= (1e-2 if bf16 else 3e-6) * abs(b), (where, reentrant, bf16, ours, theirs)
dist.barrier()
print("done")
"""


@pytest.mark.parametrize("where", ["around", "inside", "wrapper inside", "wrapper around"])
def test_blocks_that_are_computed_again(where: str) -> None:
    launch(CODE, where)
