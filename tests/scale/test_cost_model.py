"""examples/recipes/cost_model.py held to two gloo ranks: bytes of weights, gradients and optimizer on each, by ZeRO stage;
bytes that go through the all-reduce."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ranks import ROOT, launch

pytestmark = pytest.mark.slow

RUN = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples/recipes")!r})
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from transformers import GPT2Config, GPT2LMHeadModel
import cost_model as cost
from ortmodule import ORTModule, wrap_blocks
dist.init_process_group("gloo")
config = dict(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
ids = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))

def held(t):
    return getattr(t, "to_local", lambda: t)().nbytes if t is not None else 0

for stage in (0, 1, 3):
    model = GPT2LMHeadModel(GPT2Config(**config))
    shape = cost.Model(2, 64, 4, 32, 100)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    moved = []
    if stage < 3:
        model = torch.nn.parallel.DistributedDataParallel(ORTModule(model))
        def hook(state, bucket):
            moved.append(bucket.buffer().nbytes)
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda f: f.value()[0] / 2)
        model.register_comm_hook(None, hook)
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW) if stage else torch.optim.AdamW(model.parameters())
    else:
        for name in wrap_blocks(model):
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        opt = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        opt.zero_grad()
        moved.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
    inner = opt.optim if stage == 1 else opt
    has = sum(held(p) + held(p.grad) for p in model.parameters())
    has += sum(held(v) for s in inner.state.values() for v in s.values() if torch.is_tensor(v) and v.numel() > 1)
    total = torch.tensor(float(has))
    dist.all_reduce(total)  # a rank may have some tensors more than the other
    want = cost.memory(shape.parameters, cost.SINGLE, stage, 2)
    assert abs(total.item() / 2 - want) <= 0.01 * want, (stage, total.item() / 2, want)
    if stage < 3:  # sent once to reduce and once to gather, each time half of it
        assert sum(moved) == cost.traffic(shape.parameters, cost.SINGLE, stage, 2), (sum(moved), stage)
print("done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_bytes_of_two_ranks() -> None:
    launch(RUN)


def test_the_table() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples/recipes/cost_model.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(r[0], r[1]) for r in rows[::4]] == [(str(8 << i), "0") for i in range(8)]
    space = [[float(r[-1]) for r in rows[i : i + 4]] for i in range(0, 32, 4)]
    assert all(a > b for row in space for a, b in zip(row, row[1:], strict=False))  # every stage needs less
    assert space[0][0] == space[7][0] and space[0][3] > space[7][3]
