"""A model over two GPUs and the CPU in one process (two_devices.py): each part's plan runs on the part's device, PyTorch
moves what crosses. Losses and gradients of several steps against eager PyTorch in fp64, within twice eager's error."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import copy, torch, torch.nn.functional as F
from torch import nn
from cuda import fake, two_devices
from cuda.two_devices import CPU, put
from ortmodule import ORTModule, _C
two_devices.install()
class Block(nn.Module):
    def __init__(self, n, p):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n), nn.Dropout(p)
    def forward(self, x, mask=None):
        x = x if mask is None else x * mask
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
class Net(nn.Module):
    # embedding on the CPU, blocks on two devices, a head that shares its weight with another part of its device
    def __init__(self, p=0.0):
        super().__init__()
        self.embed = nn.Embedding(19, 8)
        self.blocks = nn.ModuleList(Block(8, p) for _ in range(4))
        self.tail = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 19))
        self.again = nn.Linear(8, 19)
        self.again.weight = self.tail[1].weight
        self.scale = nn.Parameter(torch.ones(()))
        self.places = [CPU, 0, 0, 1, 1, 1]
    def spread(self):
        for m, at in zip([self.embed, *self.blocks, self.tail], self.places):
            put(m, at)
        put(self.again, self.places[-1])
        self.scale.fake_device = 1
        return self
    def forward(self, ids, labels):
        x = self.embed(ids)
        for block, at in zip(self.blocks, self.places[1:]):
            x = block(put(x, at))
        at = self.places[-1]
        x = self.tail(put(x, at)) + self.again(put(x, at))
        return F.cross_entropy((x * self.scale).flatten(0, 1), labels.flatten())
def batch(k):
    g = torch.Generator().manual_seed(k)
    return torch.randint(0, 19, (3, 5), generator=g), torch.randint(0, 19, (3, 5), generator=g)
def train(net, run, n=4, between=None):
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    found = []
    for k in range(n):
        loss = run(*batch(k))
        loss.backward()
        found += [loss.detach().clone()] + [p.grad.clone() for p in net.parameters()]
        opt.step()
        opt.zero_grad()
        if between:
            between(net, k)
    return found
def worst(a, truth):
    return max(((x.double() - t.double()).abs().max() / (1e-3 + t.double().abs().max())).item() for x, t in zip(a, truth, strict=True))
def three(between=None, n=4):
    torch.manual_seed(0)
    net = Net().spread()
    eager, truth = copy.deepcopy(net).spread(), copy.deepcopy(net).double().spread()
    run = ORTModule(net)
    got, plain, exact = train(net, run, n, between), train(eager, eager, n, between), train(truth, truth, n, between)
    assert worst(got, exact) <= 2 * worst(plain, exact) + 1e-7, (worst(got, exact), worst(plain, exact))
    return run
def devices(run):
    # of the plans of each part
    return {name: [made.graph.cuda for made in w._ortmodule.every] for w in run._ortmodule.parts.values() for name in [w._ortmodule.name]}
def sane():
    assert fake.count(fake.FAILURES) == 0, fake.message()
    print("done")
"""

SCRIPTS = {
    "trains": """
run = three()
want = {"embed": -1, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "tail": 1, "again": 1}
assert {k: v for k, (v,) in devices(run).items()} == want, devices(run)
assert fake.count(fake.LAUNCHES) > 100
report = run.report()
assert {p.name: p.device for p in report.parts if not p.reason} == {k: "cpu" if v < 0 else f"cuda:{v}" for k, v in want.items()}
assert {g.part for g in report.graphs} == set(want) and all(g.forwards == g.backwards == 4 for g in report.graphs), str(report)
assert not report.eager and not report.failed, str(report)
text = str(report)
assert "it lies on cpu, cuda:0, cuda:1: forward in PyTorch, 7 of 7 parts in the engine" in text, text
assert "on cuda:0, in the engine: blocks.0, blocks.1\\n" in text, text
""",
    # masks are the engine's: those of parts that were wrapped by hand, in the same order of the same generator
    "dropout": """
torch.manual_seed(0)
net = Net(0.4).spread()
hand = copy.deepcopy(net).spread()
for name in ("embed", "tail", "again"):
    setattr(hand, name, ORTModule(getattr(hand, name), strict=True))
for k in range(4):
    hand.blocks[k] = ORTModule(hand.blocks[k], strict=True)
run = ORTModule(net)
found = []
for n, m in ((net, run), (hand, hand)):
    torch.manual_seed(3)
    found.append(train(n, m))
assert all(map(torch.equal, *found))
assert run(*batch(0)) != run(*batch(0)) and not run.report().eager
""",
    "moved later": """
def move(net, k):
    net.places = [[CPU, 0, 0, 1, 1, 1], [CPU, 0, 1, 1, 0, 0], [0] * 6, [CPU, 0, 0, 1, 1, 1]][k % 4]
    net.spread()
    net.scale.fake_device = net.places[-1]
run = three(move, 9)
assert not [e for e in run.report().eager], str(run.report())
whole = run._ortmodule.every
assert len(whole) == 1 and whole[0].graph.cuda == 0 and whole[0].graph.forwards == 2, str(run.report())
assert set(devices(run)["blocks.3"]) == {0, 1} and set(devices(run)["blocks.1"]) == {0, 1}, devices(run)
move(run.module, 2)
run(*batch(0))
assert run._ortmodule.spread is None and not run.report().parts
""",
    # an argument that lies elsewhere is moved by PyTorch, and its gradient comes back
    "arguments from another device": """
torch.manual_seed(0)
block = put(Block(8, 0.0), 1)
run, eager = ORTModule(block, strict=True), copy.deepcopy(block)
for k in range(3):
    x = put(torch.randn(3, 8), 0).detach().requires_grad_()
    x.fake_device = 0
    y = x.detach().clone().requires_grad_()
    mask = put(torch.rand(8), CPU)
    for m, z in ((run, x), (eager, y)):
        m.zero_grad()
        m(z, mask).square().sum().backward()
    assert (x.grad - y.grad).abs().max() < 1e-4
    assert all((p.grad - q.grad).abs().max() < 1e-4 for p, q in zip(block.parameters(), eager.parameters()))
(made,) = run._ortmodule.every
assert made.graph.cuda == 1 and made.elsewhere == [0, 1] and made.graph.forwards == 3
x = put(torch.randn(3, 8), 1)
assert (run(x, put(torch.ones(8), 1)) - eager(x)).abs().max() < 1e-4  # here now: the same capture
assert len(run._ortmodule.every) == 2, str(run.report())  # x requires no gradient
""",
    # a plan for the CPU, and one for a device, meet a tensor of another: no address is used on the wrong one
    "a call from elsewhere after one from here": """
torch.manual_seed(0)
for at, away in ((0, 1), (0, CPU), (CPU, 0)):
    block = put(Block(8, 0.0), at)
    run, eager = ORTModule(block, strict=True), copy.deepcopy(block)
    for where in (at, away, at, away, at):
        x = put(torch.randn(3, 8), where)
        assert (run(x) - eager(x)).abs().max() < 1e-4
    assert [made.elsewhere for made in run._ortmodule.every] == [[], [0]], str(run.report())
    assert not run.report().eager, str(run.report())
""",
    "what is returned or edited": """
class Edits(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x, give):
        if give:
            return self.a(x), x
        h = self.a(x)
        x.add_(1)
        return h, h
run = ORTModule(put(Edits(), 1))
for give in (True, False):
    for _ in range(2):
        x = put(torch.randn(3, 8), 0)
        y = x.clone()
        out = run(x, give)
        assert (out[1] is x) == give and torch.equal(x, y if give else y + 1)
told = [e.reason for e in run.report().eager]
assert told == ["argument input_0 lies on cuda:0, the module on cuda:1, and forward edits or returns it"], told
""",
    "threads": """
import threading
torch.manual_seed(0)
net = Net().spread()
eager = copy.deepcopy(net).spread()
run = ORTModule(net)
errors, kinds = [], {name: type(m) for name, m in net.named_modules() if name}
run(*batch(0)).backward()
def work(k):
    try:
        for i in range(5):
            assert (run(*batch(k + i)) - eager(*batch(k + i))).abs() < 1e-4
    except BaseException as e:
        errors.append(e)
threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
for t in threads: t.start()
for t in threads: t.join()
assert not errors, errors
assert {name: type(m) for name, m in net.named_modules() if name} == kinds
assert not run.report().eager, str(run.report())
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_parts_on_their_devices(name: str) -> None:
    assert child(HEAD + SCRIPTS[name] + "\nsane()").endswith("done\n")


NUMBERS = HEAD + """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
    def forward(self, x, alpha, n):
        return torch.tanh(self.up(x)) * alpha + n + x[:, :n].sum()
net = put(Scaled(), 1)
run = ORTModule(net, strict=True)
for k, (alpha, n) in enumerate(((0.5, 2), (0.5, 2), (0.25, 2), (0.125, 3), (0.3, 1), (0.7, 4))):
    x = put(torch.randn(3, 4), 1)
    torch.testing.assert_close(run(x, alpha, n), net(x, alpha, n))
    run(x, alpha, n).sum().backward()
assert run.report().n_captures <= 3 and not run.report().eager, run.report()
seen = []
net.up.register_forward_hook(lambda m, args, out: seen.append(out.shape))
for alpha, n in ((0.5, 2), (0.25, 3), (0.125, 3), (0.3, 1)):
    x = put(torch.randn(3 + n, 4), 1)
    torch.testing.assert_close(run(x, alpha, n), net(x, alpha, n))
    run(x, alpha, n).sum().backward()
assert not run.report().eager and len(seen) == 12, run.report()
"""

BARE = HEAD + """
class Bare(nn.Module):
    def forward(self, x, y):
        return (x * y).tanh(), x + y
net = Bare()
run = ORTModule(net, strict=True)
for at in (0, 0, 1, CPU, 1, 0, CPU):
    x, y = (put(torch.randn(3, 4), at).requires_grad_() for _ in range(2))
    for t in (x, y):
        t.fake_device = at
    a, b = run(x, y)
    assert {max(two_devices.ordinal(t), CPU) for t in (a, b)} == {at}, at
    torch.testing.assert_close(a, net(x, y)[0])
    a.sum().backward()
    want = torch.autograd.grad(net(x, y)[0].sum(), (x, y))
    torch.testing.assert_close((x.grad, y.grad), want)
report = run.report()
assert not report.eager, report  # (get_device, by which calls are told apart, knows one device here)
assert "cuda:0, cuda:1" in report.headline(), report.headline()
"""


@pytest.mark.parametrize("program", [NUMBERS, BARE], ids=["numbers as arguments", "a module without tensors"])
def test_where_a_plan_runs(program):
    child(program)
