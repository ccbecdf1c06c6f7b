"""Two GPUs in one process (the fake driver has two: memory, streams, modules and contexts belong to one, and who mixes them
is refused): a plan has one device, steps of several take turns and run on threads at once, each on a stream of its own."""

from __future__ import annotations

import pytest
from cuda.children import TESTS, child, on_fake

pytestmark = on_fake
TORCH = {"OM_FAKE_TORCH": str(TESTS.parent / "build/fake/libtorch_cuda.so")}

HEAD = """
import ctypes as C, threading, torch, engine
from cuda import fake
from device import steps
lib = engine.lib
text = '''graph {
 input x: f32[6, 8]
 input i: i64[5]
 param w: f32[8, 12]
 buffer b: f32[6, 12]
 h = matmul(x, w)
 c = add(b, h)
 d = dropout(h) {p=0.5} rng=3
 s = softmax(d) {axis=1}
 g = gather(s, i) {axis=0}
 output g
 write c -> b
}'''
rand = lambda k, *n: torch.randn(*n, generator=torch.Generator().manual_seed(k))
def cx(ordinal):
    c = engine.Ctx(True, "cuda-fake")
    c.check(fake.use(lib, c.p, ordinal))
    return c
def stream(ordinal):
    s = C.c_void_p()
    assert fake.gpu.cuCtxPushCurrent_v2(C.c_void_p(fake.gpu.fake_gpu_context(ordinal))) == 0 and fake.gpu.cuStreamCreate(C.byref(s), 1) == 0
    assert fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p())) == 0
    return s
fake.gpu.fake_gpu_context.restype = C.c_void_p
cpu = steps.Model.text(engine.Ctx(True, "cpu"), text)
models = [steps.Model.text(cx(d), text) for d in (0, 1)]
def step(model, k, bad=False):
    i = torch.tensor([0, 5, 2, 6 if bad else 2, 1])
    return model.step([rand(k, 6, 8), i, rand(9, 8, 12), rand(k + 1, 6, 12)], [1, 0, 1, 0], [rand(7, 5, 12)], seed=k)
def check(model, k):
    want, got = step(cpu, k), step(model, k)
    for a, b in zip([*want.outputs, *want.grads.values()], [*got.outputs, *got.grads.values()], strict=True):
        assert (a - b).abs().max() < 1e-5
def sane():
    assert fake.count(fake.FAILURES) == 0 and fake.gpu.fake_gpu_depth() == 0, fake.message()
    print("done")
"""

TURNS = """
for k in range(6):
    check(models[k % 2], k)
for d in (0, 1):
    s = stream(d)
    lib.om_cuda_stream(s)
    for k in range(5):
        check(models[d], k)
    lib.om_cuda_stream(None)
# a fault is told on its own device alone
fake.late(False)
try:
    step(models[1], 3, bad=True)
    raise SystemExit("no fault")
except engine.EngineError as e:
    assert "index 6 at position 3" in str(e), e
check(models[0], 1)
check(models[1], 2)
sane()
"""

AT_ONCE = """
errors = []
def train(d):
    try:
        lib.om_cuda_stream(stream(d))
        for k in range(6):
            check_own(d, k)
    except BaseException as e:
        errors.append(e)
wants = [step(cpu, k) for k in range(6)]
def check_own(d, k):
    got = step(models[d], k)
    for a, b in zip([*wants[k].outputs, *wants[k].grads.values()], [*got.outputs, *got.grads.values()], strict=True):
        assert (a - b).abs().max() < 1e-5
threads = [threading.Thread(target=train, args=(d,)) for d in (0, 1)]
for t in threads: t.start()
for t in threads: t.join()
assert not errors, errors
sane()
"""

MIXED = """
lib.om_cuda_stream(stream(0))
step(models[1], 1)
"""


@pytest.mark.parametrize("env", [{}, {"OM_FAKE_REUSE": "1", "OM_FAKE_KEEP": "1"}, TORCH], ids=["plain", "graphs", "torch"])
@pytest.mark.parametrize("script", [TURNS, AT_ONCE], ids=["turns", "at once"])
def test_each_plan_has_its_device(script: str, env: dict[str, str]) -> None:
    assert child(HEAD + script, **env) == "done\n"


def test_a_stream_of_another_device_is_refused() -> None:
    with pytest.raises(AssertionError, match="a stream of another device"):
        child(HEAD + MIXED)
