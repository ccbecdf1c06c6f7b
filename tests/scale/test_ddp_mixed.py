"""DistributedDataParallel around an ORTModule as scripts mix it: ranks with other lengths and other parts at every step,
uneven numbers of steps, hooks beside accumulation, two forwards for one backward. Losses, gradients that are None and
parameters of the same training without ORTModule, on two gloo ranks."""

from __future__ import annotations

import pytest
from ranks import launch

pytestmark = pytest.mark.slow

MIXED = """
import contextlib, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from ortmodule import ORTModule
dist.init_process_group("gloo")
rank = dist.get_rank()
WORDS = 37

class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.qkv, self.out, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + torch.tanh(self.up(x))

class Net(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.blocks, self.extra = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(extra))
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, ids, which=0):
        x = self.words(ids)
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        if which:
            x = self.extra[which - 1](x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1)), "logits": logits}

def start(ours, extra=0, **more):
    torch.manual_seed(0)
    model = Net(extra).double()
    ddp = DDP(ORTModule(model, segment_mb=0.02) if ours else model, bucket_cap_mb=0.01, **more)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9), torch.Generator().manual_seed(rank + 5)

def ids(g, rows, length):
    return torch.randint(0, WORDS, (rows, length), generator=g)

def state(ddp):
    return [t.clone() for t in ddp.module.state_dict().values()]

def none(ddp):
    return [name for name, p in ddp.named_parameters() if p.grad is None]

def lengths(ours, **more):
    ddp, opt, g = start(ours, **more)
    found = []
    for s in range(7):
        loss = ddp(ids(g, 1 + (s + rank) % 3, 3 + (5 * s + 7 * rank) % 11))["loss"]
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(ddp.parameters(), 1.0).item()]
        opt.step(), opt.zero_grad()
    return found, state(ddp)

def parts(ours, **more):
    ddp, opt, g = start(ours, 2, find_unused_parameters=True, **more)
    found = []
    for s in range(8):
        loss = ddp(ids(g, 2, 5 + s % 2), (s + rank) % 3)["loss"]
        loss.backward()
        found += [loss.item(), none(ddp)]
        opt.step(), opt.zero_grad()
    return found, state(ddp)

def uneven(ours, **more):
    ddp, opt, g = start(ours, 2, find_unused_parameters=True, **more)
    found = []
    with Join([ddp]):
        for s in range(3 + 2 * rank):
            loss = ddp(ids(g, 2, 5 + s % 2 + rank), (s + rank) % 3)["loss"]
            loss.backward()
            found.append(loss.item())
            opt.step(), opt.zero_grad()
    return found, state(ddp)

def hooks(ours, **more):
    ddp, opt, g = start(ours, **more)
    model, seen = ddp.module, []
    model.head.weight.register_hook(lambda grad: grad * 2)
    model.words.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 1.5)
    model.blocks[2].register_full_backward_hook(lambda module, given, got: seen.append(got[0].abs().sum().item()))
    for s in range(4):
        for k in range(3):
            with ddp.no_sync() if k < 2 else contextlib.nullcontext():
                loss = ddp(ids(g, 2, 4 + (s + k + rank) % 3))["loss"] / 3
                loss.backward()
                seen.append(loss.item())
        opt.step(), opt.zero_grad(set_to_none=s % 2 == 0)
    return seen, state(ddp)

def twice(ours, **more):
    ddp, opt, g = start(ours, **more)
    found = []
    for s in range(4):
        first, second = ddp(ids(g, 2, 5))["loss"], ddp(ids(g, 2, 6 + rank))["loss"]
        (first + second).backward()
        found += [first.item(), second.item()]
        opt.step(), opt.zero_grad()
    return found, state(ddp)

def same(a, b):
    if isinstance(a, torch.Tensor):
        return bool((a - b).abs().max() <= 1e-9 * max(1e-2, b.abs().max()))
    if isinstance(a, float):
        return abs(a - b) <= 1e-9 * max(1, abs(b))
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b

views, static = {"gradient_as_bucket_view": True}, {"static_graph": True}
modes = {lengths: ({}, views, static), parts: ({}, views), uneven: ({}, views), hooks: ({}, views), twice: ({}, static)}
for what in map(globals().get, sys.argv[1].split(",")):
    for more in modes[what]:
        theirs, ours = what(False, **more), what(True, **more)
        assert same(ours, theirs), (what.__name__, more, ours[0], theirs[0])
        assert max(t.abs().max() for t in ours[1][:3]) > 0
dist.barrier()
print("done")
"""


@pytest.mark.parametrize("what", ["lengths,twice", "parts,uneven", "hooks"])
def test_as_scripts_mix_it(what: str) -> None:
    launch(MIXED, what)
