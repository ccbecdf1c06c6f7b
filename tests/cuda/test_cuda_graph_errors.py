"""Every entry point that CUDA graphs use (csrc/cuda/capture.h) fails once with each of its codes, and those of a step fail
while a graph is recorded (tests/cuda/fake_driver.cpp: fake_gpu_fail).

While a graph is made a failure is nobody's: the step runs call by call, the piece runs so from then on, and the reason
names call and code. A graph's launch, and the copies before it, fail as a kernel's launch does: one error, and the next
step is right. No stream is left recording, no graph and no block are lost (but a graph that the driver would not give
back)."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

STATE = (3, 4, 201)  # NOT_INITIALIZED, DEINITIALIZED, INVALID_CONTEXT
LATE = (700, 701, 702, 719)  # of earlier work
MADE = {  # while a graph is made
    "cuStreamCreate": (*STATE, 1, 2), "cuStreamBeginCapture_v2": (3, 4, 1, 401, 900, 906), "cuStreamEndCapture": (3, 4, 1, 901, 904, 908),
    "cuGraphInstantiateWithFlags": (3, 4, 1, 2, 801), "cuGraphDestroy": (3, 4, 1), "cuGraphExecDestroy": (3, 4, 1),
}  # fmt: skip
PLAYED = {"cuGraphLaunch": (3, 4, 1, 2, *LATE), "cuMemcpyDtoDAsync_v2": (*STATE, 1, 400, *LATE)}
SHARED = {  # with steps that run call by call
    "cuLaunchKernel": (1, 2, 200, 302, 400, 900, 901, 719), "cublasLtMatmul": (1, 7, 8, 13, 14, 15), "cuMemAllocAsync": (1, 2, 801),
    "cuStreamIsCapturing": (3, 4, 1, 906), "cuMemFreeAsync": (1, 801),
}  # fmt: skip

SOURCE = """
import ctypes as C, torch, engine
from cuda import fake
from device import steps
lib = engine.lib
lib.om_cuda_graph_count.restype = C.c_long
lib.om_cuda_graph_reason.restype = C.c_char_p
def counted(what):
    return lib.om_cuda_graph_count(what)
text = '''graph {
 input x: f32[6, 8]
 param w: f32[8, 12]
 input b: f32[12]
 h = matmul(x, w, b)
 d = dropout(h) {p=0.5} rng=3
 s = softmax(d) {axis=1}
 t = tanh(s)
 u = softmax(t) {axis=1}
 output u
}'''
def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
def step(model, k):
    return model.step([rand(6, 8) + k, rand(8, 12), rand(12)], [1, 1, 1], [rand(6, 12)], seed=k)
cx = steps.cx("cuda-fake")
lib.om_cuda_graphs(C.c_bool(False))
model = steps.Model.text(cx, text)
want = [step(model, k) for k in range(8)]
model.free()
lib.om_cuda_graphs(C.c_bool(True))
most = {}
def drive(entry, nth, code):
    model, error = steps.Model.text(cx, text), None
    assert steps.difference(step(model, 0), want[0]) is None  # the second makes graphs
    before = {e: fake.calls(e) for e in ENTRIES}
    fake.fail(entry, nth, code)
    for k in range(1, 8):
        try:
            assert steps.difference(step(model, k), want[k]) is None, (entry, nth, code, k)
        except engine.EngineError as e:
            assert error is None, (error, e)
            error = e
        assert fake.count(fake.RECORDED) == 0 and fake.gpu.fake_gpu_depth() == 0, (entry, nth, code)
    most.update({e: fake.calls(e) - c for e, c in before.items()})
    if "Destroy" not in entry:
        fake.fail("", 0, 0)
    for k in (6, 7):
        assert steps.difference(step(model, k), want[k]) is None, (entry, nth, code, k)
    model.free()
    fake.fail("", 0, 0)
    return error
if HOW == "made":  # the stream on which graphs are recorded: once in a process
    for given_up, code in enumerate(ENTRIES.pop("cuStreamCreate")):
        model = steps.Model.text(cx, text)
        for k in range(5):  # forwards: one piece
            fake.fail("cuStreamCreate", 1, code)
            got = model.step([rand(6, 8) + k, rand(8, 12), rand(12)], seed=k)
            assert all(map(steps.same, got.outputs, want[k].outputs))
        assert counted(2) == given_up + 1 and fake.count(fake.RECORDED) == 0
        model.free()
    fake.fail("", 0, 0)
    drive("", 0, 0)
    assert counted(1) > 0
before = counted(1), counted(2)
drive("", 0, 0)
usual = dict(most)
fake.late(True)
blocks, stuck = fake.count(fake.BLOCKS), 0
assert counted(1) > before[0] + 8 and counted(2) == before[1]
for entry, codes in ENTRIES.items():
    for at, code in enumerate(codes):
        for nth in range(1, max(1, usual[entry]) + 1) if at == 0 else sorted({1, max(1, usual[entry])}):
            given_up = counted(2)
            error = drive(entry, nth, code)
            if HOW == "played":
                assert error is not None
            if HOW == "made":
                assert error is None, error
                stuck += "Destroy" in entry
                assert counted(2) == given_up + ("Destroy" not in entry), (entry, nth, code)
            if error is not None:
                said = str(error)
                assert entry.replace("_v2", "") in said and str(code) in said and said.count("failed") == ((entry, code) != ("cuMemAllocAsync", 2)), (entry, nth, code, said)
                assert counted(2) == given_up
            fake.late(True)
            assert fake.count(fake.GRAPHS) == stuck and fake.count(fake.BLOCKS) == blocks, (entry, nth, code, fake.count(fake.GRAPHS), fake.count(fake.BLOCKS), blocks)
assert fake.count(fake.FAILURES) == 0, fake.message()
reasons = []
while why := lib.om_cuda_graph_reason(len(reasons)):
    reasons.append(why.decode())
for why in reasons:
    assert any(e.replace("_v2", "") in why for e in [*ENTRIES, "cuStreamCreate"]), why
print("done", len(reasons))
"""


@pytest.mark.parametrize("how,entries", [("made", MADE), ("played", PLAYED), ("shared", SHARED)])
def test_every_entry_point(how: str, entries: dict[str, tuple[int, ...]]) -> None:
    out = child(f"ENTRIES, HOW = {entries!r}, {how!r}\n" + SOURCE, OM_FAKE_REUSE="1", OM_FAKE_STRICT="1", ORTMODULE_POISON="1")
    assert out.startswith("done ") and (how != "made" or int(out.split()[1]) > 3), out
