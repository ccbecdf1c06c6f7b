"""CUDA graphs under ORTModule on the fake GPU (CPU tensors stand for cuda:0): training with them has the bits of training
without (ORTMODULE_CUDA_GRAPHS=0), in what a script does with steps. The engine keeps its blocks, so steps repeat their
addresses (csrc/cuda/blocks.h) although the fake driver's pool never does while work is queued."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import torch, graph_correct
from torch import nn
from cuda import fake
from ortmodule import ORTModule, _C
fake.late(False)  # PyTorch reads the CPU tensors that stand for the device's without waiting
graph_correct.stand_in()
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, dy):
        return dy * 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 5), nn.LayerNorm(24)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(24))
    def forward(self, x, host=False):
        h = self.drop(torch.nn.functional.gelu(self.norm(self.up(x))))
        self.seen.add_(h.detach().mean(0).softmax(0).tanh())
        if host:
            h = Twice.apply(h)
        return self.down(self.drop(torch.tanh(h).softmax(1) + h))
def both(script, n=8, needs=10):
    found, played = [], []
    for on in (False, True):
        torch.manual_seed(0)
        net = Net().train()
        run = ORTModule(net, strict=True, cuda_graphs=on)
        opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
        before, kept = _C.cuda_engine_graph_counts()[1], []
        torch.manual_seed(1)
        for k in range(n):
            kept += [t.detach().clone() for t in script(run, opt, k)]
            kept += [t.detach().clone() for p in net.parameters() for t in (p, p.grad) if t is not None] + [net.seen.clone()]
        found.append(kept)
        played.append(_C.cuda_engine_graph_counts()[1] - before)
    assert len(found[0]) == len(found[1])
    bad = [i for i, (a, b) in enumerate(zip(*found)) if not torch.equal(a, b)]
    assert not bad and all(t.isfinite().all() for t in found[0]), (script.__name__, bad[:8])
    assert played[0] == 0 and played[1] >= needs, (script.__name__, played)
    assert fake.count(fake.FAILURES) == 0, fake.message()
def x(k, n=7):
    return torch.randn(n, 12, generator=torch.Generator().manual_seed(k))
"""

SCRIPTS = {
    "plain": """
def script(run, opt, k):
    loss = run(x(k)).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    return [loss]
both(script)
""",
    "accumulated": """
def script(run, opt, k):
    out = []
    for j in range(3):
        loss = run(x(3 * k + j)).square().mean()
        loss.backward()
        out.append(loss)
    opt.step(); opt.zero_grad(set_to_none=k % 2 == 0)
    return out
both(script, 6)
""",
    "sizes": """
def script(run, opt, k):
    loss = run(x(k, (7, 4, 7, 9)[k % 4])).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    return [loss]
both(script, 20)
""",
    "backward twice": """
def script(run, opt, k):
    y = run(x(k))
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    opt.step(); opt.zero_grad()
    return [y]
both(script)
""",
    "a function of the user's": """
def script(run, opt, k):
    loss = run(x(k), host=True).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    return [loss]
both(script)
""",
    "several at once": """
def script(run, opt, k):
    a, b = run(x(2 * k)), run(x(2 * k + 1))
    if k % 3 == 2:
        with torch.no_grad():
            run(x(99))
    (a * b).sum().backward(); opt.step(); opt.zero_grad()
    return [a, b]
both(script)
""",
    "weights that are replaced": """
def script(run, opt, k):
    if k == 4:
        for p in run.parameters():
            p.data = p.data.clone()
    loss = run(x(k)).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    return [loss]
both(script, 9)
""",
    "a budget, segments": """
def script(run, opt, k):
    loss = run(x(k)).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    return [loss]
old = ORTModule
ORTModule = lambda net, **kw: old(net, segment_mb=0.0005, memory_opt_level=1, **kw)
both(script, 8, 6)
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_bits(name: str) -> None:
    assert child(HEAD + SCRIPTS[name] + "\nprint('done')").endswith("done\n")


REPORT = """
import os
os.environ["ORTMODULE_CUDA_GRAPHS"] = "0"
assert not ORTModule(Net())._ortmodule.settings.cuda_graphs
del os.environ["ORTMODULE_CUDA_GRAPHS"]
fake.fail("cuGraphInstantiateWithFlags", 1, 801)
net = Net().train()
run = ORTModule(net, strict=True)
for k in range(5):
    run(x(k)).square().mean().backward()
    net.zero_grad()
made, played, without, why = _C.cuda_engine_graph_counts()
assert without == 1 and len(why) == 1 and "cuGraphInstantiateWithFlags" in why[0] and "801" in why[0], (without, why)
report = run.report()
assert "without a CUDA graph: 1 (cuGraphInstantiateWithFlags" in str(report), str(report)
assert report.cuda_graphs == (made, played, 1) and played > 0
print("done")
"""


def test_what_runs_without_is_told() -> None:
    assert child(HEAD + REPORT).endswith("done\n")
