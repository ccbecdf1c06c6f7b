"""Convolution by torch's kernels (csrc/cuda/torch_conv.h) on the fake GPU, whose libtorch_cuda.so (fake_conv.cpp) computes
them when their turn on the stream comes, with results in channels-last memory of its own: forward, transposed and all
gradients against eager PyTorch in f64; nothing is left over; failures, an autocast the graph was not captured under."""

from __future__ import annotations

import pytest
from cuda.children import TESTS, child, on_fake

pytestmark = on_fake
TORCH = {"OM_FAKE_TORCH": str(TESTS.parent / "build/fake/libtorch_cuda.so"), "OM_DEVICE": "cuda-fake"}

HEAD = """
import torch, engine
from cuda import fake
from device import steps
from opcheck import check, rand
import torch.nn.functional as F
torch_lib = fake.torch_memory
def done(least):
    assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
    assert torch_lib.fake_torch_convolutions() >= least, torch_lib.fake_torch_convolutions()
    assert torch_lib.fake_torch_tensors() == 0 and torch_lib.fake_torch_grad_mode() and torch_lib.fake_torch_guards() == 0
    assert fake.count(fake.FAILURES) == 0 and fake.gpu.fake_gpu_depth() == 0, fake.message()
    print("done")
"""

CASES = """
LOW = (torch.float32, torch.bfloat16, torch.float16)
for x, w, bias, given in [
    ((2, 3, 12, 12), (5, 3, 4, 4), True, dict(stride=4)),
    ((2, 4, 7, 9), (6, 2, 3, 2), False, dict(stride=(2, 1), padding=(1, 0), groups=2)),
    ((1, 3, 11), (3, 1, 5), True, dict(padding=4, dilation=2, groups=3)),
    ((3, 2, 5, 4, 6), (3, 2, 2, 1, 3), True, dict(stride=(1, 2, 3), padding=(1, 0, 2))),
]:
    nd = len(x) - 2
    each = lambda v: [v] * nd if isinstance(v, int) else list(v)
    pad = each(given.get("padding", 0))
    text = f"stride={each(given.get('stride', 1))}, pad={pad + pad}, dilation={each(given.get('dilation', 1))}, groups={given.get('groups', 1)}"
    op = (F.conv1d, F.conv2d, F.conv3d)[nd - 1]
    before = torch_lib.fake_torch_convolutions()
    check("conv", [rand(*x), rand(*w)] + ([rand(w[0])] if bias else []), lambda *t: op(*t, **given), text, low=LOW, factor=4.0, terms=int(torch.tensor(w[1:]).prod()))
    assert torch_lib.fake_torch_convolutions() > before
before = torch_lib.fake_torch_convolutions()
check("conv_transpose", [rand(2, 4, 5, 6), rand(4, 3, 3, 2)], lambda x, w: F.conv_transpose2d(x, w, None, (2, 1), (1, 0), (1, 0), 2), "stride=[2, 1], pad=[1, 0, 1, 0], groups=2, out_pad=[1, 0]", low=LOW, factor=4.0)
assert torch_lib.fake_torch_convolutions() > before
# padding that is another on either side is none of torch's
before = torch_lib.fake_torch_convolutions()
check("conv", [rand(2, 3, 7), rand(4, 3, 3)], lambda x, w: F.conv1d(F.pad(x, (2, 1)), w), "stride=[1], pad=[2, 1]")
assert torch_lib.fake_torch_convolutions() == before
done(20)
"""

FAILS = """
text = '''graph {
 input x: f32[2, 3, 8, 8]
 param w: f32[4, 3, 3, 3]
 param b: f32[4]
 y = conv(x, w, b) {stride=[1, 1], pad=[1, 1, 1, 1], dilation=[1, 1], groups=1}
 z = tanh(y)
 output z
}'''
cx = steps.cx("cuda-fake")
ins, dy = [rand(2, 3, 8, 8), rand(4, 3, 3, 3), rand(4)], [rand(2, 4, 8, 8)]
ins, dy = [t.float() for t in ins], [t.float() for t in dy]
def step(model):
    return model.step(ins, [1, 1, 1], dy)
NAMES = ["aoti_torch_cuda_convolution", "aoti_torch_cuda_convolution_backward", "aoti_torch_create_tensor_from_blob", "aoti_torch_tensor_copy_", "aoti_torch_get_dtype",
         "aoti_torch_create_cuda_stream_guard", "aoti_torch_delete_cuda_stream_guard"]
model = steps.Model.text(cx, text)
want = step(model)
usual = {e: fake.calls(e) for e in NAMES}
step(model)
usual = {e: fake.calls(e) - n for e, n in usual.items()}
assert min(usual.values()) > 0, usual
told = again = 0
for entry, most in usual.items():
    for nth in range(1, most + 1):
        fake.fail(entry, nth, 1)
        try:  # a first failure is answered by giving back what is kept, and a second try
            assert steps.difference(want, step(model)) is None, (entry, nth)
            again += 1
        except engine.EngineError as e:
            told += 1
            assert "torch's convolution failed (aoti_torch_" in str(e) or "torch's stream guard failed" in str(e) or "out of memory" in str(e) , (entry, nth, e)
        fake.fail("", 0, 0)
        assert torch_lib.fake_torch_tensors() == 0 and torch_lib.fake_torch_guards() == 0 and torch_lib.fake_torch_grad_mode(), (entry, nth)
        assert steps.difference(want, step(model)) is None, (entry, nth)
assert told > 0 and again > 5, (told, again)
# an autocast of the script's that the graph was not captured under: the own kernels
torch_lib.fake_torch_autocast(15)
other = step(model)
torch_lib.fake_torch_autocast(0)
for a, b in zip([*want.outputs, *want.grads.values()], [*other.outputs, *other.grads.values()]):
    assert (a - b).abs().max() < 1e-4
model.free()
done(10)
"""

RESNET = """
import graph_correct
from torch import nn
from ortmodule import ORTModule, _C
fake.late(False)
graph_correct.stand_in()
class Block(nn.Module):
    def __init__(self, n, stride):
        super().__init__()
        self.a, self.b = nn.Conv2d(n, 2 * n, 3, stride, 1, bias=False), nn.Conv2d(2 * n, 2 * n, 3, 1, 1, bias=False)
        self.na, self.nb, self.down = nn.BatchNorm2d(2 * n), nn.BatchNorm2d(2 * n), nn.Conv2d(n, 2 * n, 1, stride)
    def forward(self, x):
        return (self.nb(self.b(self.na(self.a(x)).relu())) + self.down(x)).relu()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 4, 7, 2, 3), nn.Sequential(Block(4, 1), Block(8, 2)), nn.Linear(16, 5)
    def forward(self, x):
        return self.head(nn.functional.max_pool2d(self.blocks(self.stem(x)), 2).mean((2, 3)))
def train(wrap, dtype=torch.float32, graphs=True):
    torch.manual_seed(0)
    net = Net().to(dtype)
    run = ORTModule(net, strict=True, cuda_graphs=graphs) if wrap else net
    opt, found = torch.optim.SGD(net.parameters(), lr=0.05), []
    for k in range(4):
        loss = run(torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(k)).to(dtype)).square().mean()
        loss.backward()
        found += [loss.detach().double().clone(), *(p.grad.double().clone() for p in net.parameters()), *(b.double().clone() for b in net.buffers())]
        opt.step(), opt.zero_grad()
    return found
worst = lambda a, b: max(((x - y).abs().max() / (1e-3 + y.abs().max())).item() for x, y in zip(a, b, strict=True))
truth, eager = train(False, torch.float64), train(False)
for graphs in (True, False):
    got = train(True, graphs=graphs)
    assert worst(got, truth) <= 2 * worst(eager, truth) + 1e-5, (worst(got, truth), worst(eager, truth))
made, played, given_up, why = _C.cuda_engine_graph_counts()
assert (played > 0) == (PLAYS), (made, played, why)
done(100)
"""


@pytest.mark.parametrize("seed", [0, 3])
def test_values_and_gradients(seed: int) -> None:
    assert child(HEAD + CASES, OM_FAKE_SEED=str(seed), **TORCH).endswith("done\n")


def test_failures_are_told_and_nothing_is_left() -> None:
    assert child(HEAD + FAILS, **TORCH).endswith("done\n")


def test_a_residual_network_trains() -> None:
    """Calls of torch's are in no CUDA graph; what is between them is."""
    assert child(HEAD + "PLAYS = True\n" + RESNET, OM_FAKE_REUSE="1", OM_FAKE_KEEP="1", **TORCH).endswith("done\n")
