"""What torch knows of its own memory and not of the engine's (ortmodule/cuda_engine.py: listen), on the fake GPU: an
output that another stream works with (Tensor.record_stream), blocks kept for the next step (torch.cuda.empty_cache)."""

from __future__ import annotations

import pytest
from cuda.children import TESTS, child, on_fake

pytestmark = on_fake

HEAD = """
import ctypes as C, torch, graph_correct
from cuda import fake
from ortmodule import ORTModule, _C, cuda_engine
gpu = fake.gpu
graph_correct.stand_in()
_C.cuda_engine_keep(True)
net = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh())
run = ORTModule(net, strict=True, cuda_graphs=False)
x = [torch.randn(5, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]
with torch.no_grad():
    want = [net(t) for t in x]
    for t in x:
        run(t)
gpu.cuCtxPushCurrent_v2(None)
other, event = C.c_void_p(), C.c_void_p()
assert gpu.cuStreamCreate(C.byref(other), 1) == 0
"""

RECORD = """
def given_away(record):
    "An output is copied by another stream, dropped, and its memory used by the next step, all of it still to run."
    z = torch.zeros(5, 300)
    with torch.no_grad():
        y = run(x[0])
        at = y.data_ptr()
        assert gpu.cuEventCreate(C.byref(event), 2) == 0 and gpu.cuEventRecord(event, None) == 0
        assert gpu.cuStreamWaitEvent(other, event, 0) == 0 and gpu.cuEventDestroy_v2(event) == 0
        assert gpu.cuMemcpyDtoDAsync_v2(C.c_uint64(z.data_ptr()), C.c_uint64(at), C.c_size_t(z.nbytes), other) == 0
        if record:  # an address within, as a view has it
            assert _C.cuda_engine_record_stream(0, at + 4 * 301, other.value) and not _C.cuda_engine_record_stream(0, z.data_ptr(), other.value)
        del y
        again = run(x[1])
        assert again.data_ptr() == at
    assert gpu.cuStreamSynchronize(None) == 0 and gpu.cuStreamSynchronize(other) == 0
    assert torch.allclose(again, want[1], atol=1e-6)
    return torch.allclose(z, want[0], atol=1e-6)
"""

RACE = """
assert not given_away(False), "the fake device shows no such race"
"""

HOLDS = """
waits = fake.count(fake.WAITS)
assert given_away(True)
assert fake.count(fake.WAITS) == waits + 2, "the host has waited"
for entry in ("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"):
    fake.fail(entry, 2, 1)  # the first is the test's own; the host waits then
    assert given_away(True), entry
    fake.fail("", 0, 0)
assert fake.count(fake.EVENTS) == 0 and fake.count(fake.FAILURES) == 0 and gpu.fake_gpu_depth() == 1, (fake.count(fake.EVENTS), fake.message())
print("done")
"""

FOLLOW = """
# Others use the thread between two slices: a host node, and what autograd runs between two segments, leave another stream.
fake.late(False)
own = C.c_void_p()
assert gpu.cuStreamCreate(C.byref(own), 1) == 0
followed = []
def follow_stream(index, graphs):
    followed.append(index)
    _C.cuda_engine_stream(own.value)
class Other(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        _C.cuda_engine_stream(other.value)
        return x * 2
    @staticmethod
    def backward(ctx, dy):
        _C.cuda_engine_stream(other.value)
        return dy * 2
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    def forward(self, x):
        return self.b(Other.apply(self.a(x).tanh()).sin())
cuda_engine.follow_stream = follow_stream
def held(segments):
    net = Net()
    run = ORTModule(net, segment_mb=1e-4 if segments else 1e4)
    for k in range(3):
        loss = run(x[k]).square().mean()
        if segments:
            net.b.weight.register_hook(lambda g: _C.cuda_engine_stream(other.value))
        loss.backward()
    return [loss, *(p.grad for p in net.parameters())]
first, second = held(False), held(True)
assert len(followed) > 12 and all(t.isfinite().all() for t in first + second)
assert fake.count(fake.FAILURES) == 0, fake.message()
used = fake.calls("cuLaunchKernel")
print("streams", fake.gpu.fake_gpu_launched(own), fake.gpu.fake_gpu_launched(other))
"""

EMPTY = """
fake.late(False)
import gc
gc.collect()
before = fake.torch_blocks()
assert before > 0
cuda_engine.stand_in = False
cuda_engine.listen()
cuda_engine.listen()
torch.cuda.empty_cache()
cuda_engine.stand_in = True
kept = fake.torch_blocks()
assert kept < before, (kept, before)
with torch.no_grad():
    y = run(x[2])
    assert torch.allclose(y, want[2], atol=1e-6) and fake.torch_blocks() > kept
del y
torch.cuda.memory.empty_cache()
assert fake.torch_blocks() == kept and fake.count(fake.FAILURES) == 0, fake.message()
try:
    x[0].record_stream(None)
except (NotImplementedError, TypeError, RuntimeError):
    print("done")
"""


def test_memory_is_not_reused_before_other_streams_are_done() -> None:
    assert child(HEAD + RECORD + RACE + HOLDS) == "done\n"


@pytest.mark.parametrize("seed", [1, 4])
def test_in_other_orders(seed: int) -> None:
    assert child(HEAD + RECORD + HOLDS, OM_FAKE_SEED=str(seed)) == "done\n"


def test_empty_cache_reaches_what_the_engine_keeps() -> None:
    assert child(HEAD + EMPTY, OM_FAKE_TORCH=str(TESTS.parent / "build/fake/libtorch_cuda.so")) == "done\n"


def test_a_run_stays_on_its_stream() -> None:
    out = child(HEAD + FOLLOW)
    own, other = (int(n) for n in out.split("streams")[1].split())
    assert own > 30 and other == 0
