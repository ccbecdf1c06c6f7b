"""Memory from torch's caching allocator (csrc/cuda/host_memory.h), by a libtorch_cuda.so on the fake GPU
(fake_allocator.cpp): the same bits, every block torch's and on the stream it is used on, all given back. Each of its
functions fails once: one error, or none where nobody can be told, no block lost and the next step right."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

from engine import ROOT

pytestmark = on_fake
TORCH = str(ROOT / "build/fake/libtorch_cuda.so")

HEAD = """
import ctypes as C, torch, engine
from cuda import fake
from device import steps
NEW, END = "aoti_torch_create_cuda_stream_guard", "aoti_torch_delete_cuda_stream_guard"
GET, PUT = "aoti_torch_cuda_caching_allocator_raw_alloc", "aoti_torch_cuda_caching_allocator_raw_delete"
text = '''graph {
 input x: f32[6, 8]
 param w: f32[8, 12]
 h = matmul(x, w)
 d = dropout(h) {p=0.5} rng=3
 s = softmax(d) {axis=1}
 u = cumsum(s) {axis=1}
 output u
}'''
def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
cx = steps.cx("cuda-fake")
def step(model, k=0):
    return model.step([rand(6, 8) + k, rand(8, 12)], [1, 1], [rand(6, 12)], seed=k)
"""

BITS = """
def bits(stream):
    engine.lib.om_cuda_stream(C.c_void_p(stream))
    model = steps.Model.text(cx, text)
    kept = [t for k in range(6) for s in [step(model, k)] for t in [*s.outputs, *s.grads.values()]]
    if fake.torch_memory:
        assert fake.torch_memory.fake_torch_block_stream() == (stream or 0), fake.message()
        assert fake.torch_blocks() > 0
    model.free()
    engine.lib.om_cuda_keep(C.c_bool(False))  # what is kept goes
    engine.lib.om_cuda_keep(C.c_bool(True))
    return kept
stream = C.c_void_p()
engine.lib.om_cuda_keep(C.c_bool(True))
steps.Model.text(cx, text).free()
assert fake.gpu.cuCtxPushCurrent_v2(None) == 0 and fake.gpu.cuStreamCreate(C.byref(stream), 1) == 0 and fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p())) == 0
a, b = bits(None), bits(stream.value)
engine.lib.om_cuda_stream(C.c_void_p(None))
assert all(map(steps.same, a, b))
engine.lib.om_cuda_keep(C.c_bool(False))
fake.late(False)
assert fake.torch_blocks() == 0 and fake.count(fake.BLOCKS) == 1 and fake.count(fake.FAILURES) == 0, (fake.torch_blocks(), fake.count(fake.BLOCKS), fake.message())
gone = fake.calls("cuMemAllocAsync") - fake.calls(GET)
print(gone, sum(float(t.double().sum()) for t in a))
"""


def test_every_block_is_torchs_and_nothing_else_changes() -> None:
    """One block, the fault word's, is page-locked memory of the driver's."""
    ours, theirs = child(HEAD + BITS), child(HEAD + BITS, OM_FAKE_TORCH=TORCH)
    assert theirs.split()[0] == "0" and int(ours.split()[0]) > 0
    assert ours.split()[1] == theirs.split()[1]


POOL = """
fake.fail("cuDeviceGetDefaultMemPool", 1, 801)  # a virtual GPU, say
step(steps.Model.text(steps.cx("cuda-fake"), text))
assert fake.calls("cuDeviceGetDefaultMemPool") == 0
print("done")
"""


def test_a_gpu_without_a_pool_will_do() -> None:
    assert child(HEAD.replace('cx = steps.cx("cuda-fake")', "") + POOL, OM_FAKE_TORCH=TORCH) == "done\n"


FAILS = """
model = steps.Model.text(cx, text)
want = step(model)
usual = {e: fake.calls(e) for e in (NEW, END, GET, PUT)}
step(model)
usual = {e: fake.calls(e) - n for e, n in usual.items()}
model.free()
assert KEEPS or min(usual.values()) > 2, usual
told = 0
for entry, most in usual.items():
    for nth in range(1, most + 1):
        if KEEPS:  # the engine's own are too few
            engine.lib.om_cuda_keep(C.c_bool(False))
            engine.lib.om_cuda_keep(C.c_bool(True))
        model = steps.Model.text(cx, text)
        step(model)
        fake.fail(entry, nth, 1)
        error = None
        try:
            step(model)
        except engine.EngineError as e:
            error = str(e)
        fake.fail("", 0, 0)
        if error is None:
            assert entry == PUT or KEEPS, (entry, nth)
        else:
            told += 1
            assert "CUDA device 0 is out of memory" in error and GET in error if entry != PUT else PUT in error, (entry, nth, error)
        assert fake.gpu.fake_gpu_depth() == 0 and fake.torch_memory.fake_torch_guards() == 0, (entry, nth)
        for _ in range(2):
            assert steps.difference(want, step(model)) is None, (entry, nth)
        model.free()
        fake.late(False)
        assert KEEPS or fake.torch_blocks() == 0, (entry, nth, fake.torch_blocks())
        fake.late(True)
engine.lib.om_cuda_keep(C.c_bool(False))
fake.late(False)
assert fake.torch_blocks() == 0 and fake.count(fake.FAILURES) == 0, (fake.torch_blocks(), fake.message())
print("done", told)
"""


@pytest.mark.parametrize("keeps", [False, True])
def test_each_function_fails_once(keeps: bool) -> None:
    """keeps: the engine keeps blocks, of which it lets go before it says that there is no memory."""
    out = child(HEAD + f"KEEPS = {keeps}\nengine.lib.om_cuda_keep(C.c_bool({keeps}))\n" + FAILS, OM_FAKE_TORCH=TORCH)
    assert out.startswith("done")
