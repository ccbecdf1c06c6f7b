"""Late faults on the fake GPU (graph/device.h, csrc/cuda/device.c): a step waits for nothing, also before write-backs,
which look at the fault word themselves: none that comes behind a fault is done, not even when another run has been told
of it meanwhile; those before it, and those of later runs, are."""

from __future__ import annotations

import pytest
from cuda.children import TESTS, child, on_fake

pytestmark = on_fake
SABOTAGED = {"OM_LIB": str(TESTS.parent / "build/sabotage.so")}

HEAD = """
import ctypes as C, torch, engine
from cuda import fake
from device import steps
lib = engine.lib
text = '''graph {
 input x: f32[50, 40]
 input i: i64[29]
 buffer s: f32[29, 40]
 buffer t: f32[40, 29]
 buffer u: f32[29, 40]
 const rate: f32[] = 0.5
 y = gather(x, i) {axis=0}
 a = tanh(y)
 c = add(s, a)
 d = permute(c) {perm=[1, 0]}
 e = add(t, d)
 f = sgd_step(rate, _, u, a) {out_dtype=[DTYPE]}
 output a
 write c -> s
 write e -> t
 write f -> u
}'''.replace("DTYPE", str(engine.TORCH.index(torch.float32)))
GOOD = list(range(29))
BAD = GOOD[:4] + [50] + GOOD[5:]
x = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
class Steps:
    def __init__(self):
        self.model = steps.Model.text(steps.cx("cuda-fake"), text)
        self.cx = self.model.cx
        self.mem = steps.Memory(self.cx)
        self.s, self.t, self.u = self.mem.give(torch.zeros(29, 40)), self.mem.give(torch.zeros(29, 40).t()), self.mem.give(torch.zeros(29, 40))
        self.runs = []
        self.given = {k: [self.mem.give(x), self.mem.give(torch.tensor(i)), self.s, self.t, self.u] for k, i in (("good", GOOD), ("bad", BAD))}
    def begin(self, what):
        run = steps.Pointer()
        self.cx.check(lib.om_run_forward(self.cx.p, self.model.p, self.model.variant([0] * 5, [0]), steps.array(self.given[what]), C.c_uint64(0), True, C.byref(run)))
        self.runs.append(run)
        return run
    def resume(self, run):
        self.cx.check(lib.om_run_resume(run, 0))
    def step(self, what="good"):
        self.resume(self.begin(what))
    def end(self):
        for r in self.runs:
            lib.om_run_free(r)
        self.mem.put()
        self.model.free()
    def holds(self, n):
        s, t, u = self.mem.fetch(self.s), self.mem.fetch(self.t), self.mem.fetch(self.u)
        want, turned = torch.zeros(29, 40), torch.zeros(40, 29)
        for _ in range(n):
            want = want + x[:29].tanh()
            turned = turned + want.t()
        assert (u + 0.5 * want).abs().max() < 1e-5, (n, u[0, :3])  # in its own memory, by the step's own look at the fault
        assert (s - want).abs().max() < 1e-5 and (t - turned).abs().max() < 1e-5, (n, s[0, :3], want[0, :3], t[0, :3], turned[0, :3])
def told(f, *args, what="index 50 at position 4"):
    try:
        f(*args)
    except engine.EngineError as e:
        assert what in str(e), e
        return
    raise AssertionError("no fault")
def done(*all):
    for a in all:
        a.end()
    assert fake.count(fake.FAILURES) == 0 and fake.gpu.fake_gpu_depth() == 0, fake.message()
    print("done")
"""

ONE = """
a = Steps()
for k in range(1, 5):
    a.step()
a.holds(4)
waits = fake.count(fake.WAITS)
a.step("bad")
a.step()  # behind the fault, which nobody knows of yet
assert fake.count(fake.WAITS) == waits, "a step has waited"
told(a.holds, 4)
a.holds(4)
a.step()
a.step()
a.holds(6)
done(a)
"""

OTHER_STREAM = """
lib.om_cuda_graphs(C.c_bool(False))  # of which the fake one runs all at once
a, b, stream = Steps(), Steps(), C.c_void_p()
for k in range(3):
    a.step(), b.step()
a.holds(3), b.holds(3)
assert fake.gpu.cuCtxPushCurrent_v2(None) == 0 and fake.gpu.cuStreamCreate(C.byref(stream), 1) == 0
fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
lib.om_cuda_stream(stream)
a.step("bad")
a.step()
lib.om_cuda_stream(None)
while not fake.gpu.fake_gpu_some(stream, 1, b"om_k_gather"):  # the gather of the first has run, its write-backs have not
    pass
told(b.step)  # without waiting for what is its own
lib.om_cuda_stream(stream)
a.holds(3)
a.step()
a.holds(4)
lib.om_cuda_stream(None)
b.step()
b.holds(4)
done(a, b)
"""

MEANWHILE = """
a, b = Steps(), Steps()
a.step(), b.step()
a.holds(1), b.holds(1)
told_in_b = []
def meanwhile(kernel):
    # of the run's own slice: its gather has been queued, its write-backs have not, and another thread's run is told
    fake.gpu.fake_gpu_watch(None, None)
    import threading
    def other():
        told(b.step)
        told_in_b.append(1)
    t = threading.Thread(target=other)
    t.start()
    t.join()
called = C.CFUNCTYPE(None, C.c_char_p)(meanwhile)
fake.late(False)
lib.om_cuda_graphs(C.c_bool(False))
fake.gpu.fake_gpu_watch(b"om_k_gather", called)
told(a.step, "bad", what="while this step ran, another one's fault was told")
assert told_in_b
fake.late(True)
a.holds(1), b.holds(1)
a.step(), b.step()
a.holds(2), b.holds(2)
done(a, b)
"""

RECORDS = """
class Reads(Steps):
    def __init__(self):
        self.model = steps.Model.text(steps.cx("cuda-fake"), "graph {\\n input x: f32[50, 40]\\n input i: i64[29]\\n y = gather(x, i) {axis=0}\\n"
                                      " a = softmax(y) {axis=1}\\n b = softmax(a) {axis=1}\\n c = softmax(b) {axis=1}\\n output c\\n}")
        self.cx, self.runs = self.model.cx, []
        self.mem = steps.Memory(self.cx)
        self.given = {"good": [self.mem.give(x), self.mem.give(torch.tensor(GOOD))]}
    def begin(self, what):
        run = steps.Pointer()
        self.cx.check(lib.om_run_forward(self.cx.p, self.model.p, self.model.variant([0] * 2, [0]), steps.array(self.given[what]), C.c_uint64(0), True, C.byref(run)))
        return run
    def step(self):
        run = self.begin("good")
        self.resume(run)
        lib.om_run_free(run)
fake.late(False)
a, b = Reads(), Steps()
told_in_b = []
def other():
    lib.om_cuda_graphs(C.c_bool(False))
    b.step("bad")
    told(b.step)
    told_in_b.append(1)
import threading
t = threading.Thread(target=other)
def meanwhile(kernel):
    # the gather has been recorded, what follows has not, and another thread is told of a fault, for which it waits for the device
    fake.gpu.fake_gpu_watch(None, None)
    assert fake.count(fake.RECORDED) == 1
    t.start()
    t.join(0.5)
called = C.CFUNCTYPE(None, C.c_char_p)(meanwhile)
b.step()
a.step()
lib.om_cuda_graph_count.restype = C.c_long
fake.gpu.fake_gpu_watch(b"om_k_gather", called)
a.step()
t.join()
assert told_in_b and lib.om_cuda_graph_count(0) == 1 and lib.om_cuda_graph_count(2) == 0
b.holds(1)
done(a, b)
"""

OTHER_WAY = """
import copy, torch, graph_correct
from torch import nn
from cuda import fake
from ortmodule import ORTModule
fake.late(False)
graph_correct.stand_in()
class Looks(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.embed, self.out, self.n = nn.Embedding(n, 3), nn.Linear(3, 2), n
    def forward(self, ids):
        if (ids < self.n).all():
            return self.out(self.embed(ids))
        return self.out(self.embed(ids % self.n)) * 2
class Before(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
    def forward(self, ids):
        return self.embed(ids).exp()
eager, before = Looks(7), ORTModule(Before(), strict=True)
ours = ORTModule(copy.deepcopy(eager), strict=True)
few, many = torch.tensor([[1, 6, 2]]), torch.tensor([[8, 6, 12]])
for i in range(6):
    got, want = [m(many if i % 2 else few) for m in (ours, eager)]
    assert torch.allclose(got, want), i
    got.sum().backward()
before(torch.tensor([4])).sum().backward()
before(torch.tensor([9])).sum()  # told at the latest when the next run begins, and not forgotten with what `ours` leaves
try:
    ours(many)
except IndexError as e:
    assert "index 9" in str(e), e
    print("done")
assert ours.report().n_captures == 2 and not ours.report().eager, ours.report()
"""


@pytest.mark.parametrize("graphs", [False, True])
def test_nothing_behind_a_fault_is_written(graphs: bool) -> None:
    assert child(HEAD + ONE, **({"OM_FAKE_REUSE": "1", "OM_FAKE_KEEP": "1"} if graphs else {})) == "done\n"


def test_write_backs_on_their_way_are_waited_for_before_a_fault_is_forgotten() -> None:
    assert child(HEAD + OTHER_STREAM) == "done\n"


def test_a_run_under_way_writes_nothing_once_another_is_told() -> None:
    assert child(HEAD + MEANWHILE) == "done\n"


def test_who_is_told_waits_for_a_record_of_another_thread() -> None:
    """No device may be waited for while one of its streams records, whatever thread does."""
    assert child(HEAD + RECORDS, OM_FAKE_REUSE="1", OM_FAKE_KEEP="1") == "done\n"


def test_an_index_that_only_the_way_not_taken_has_read() -> None:
    """A capture for another way through forward has run ahead of the question which way this call goes."""
    assert child(OTHER_WAY) == "done\n"


@pytest.mark.parametrize("point,script", [("device.guard", ONE), ("device.told", OTHER_STREAM), ("device.meanwhile", MEANWHILE)])
def test_what_is_broken_is_noticed(point: str, script: str) -> None:
    """Write-backs that do not look; a fault forgotten while they are on their way; a run that does not ask."""
    with pytest.raises(AssertionError):
        child(HEAD + script, OM_SABOTAGE=point, **SABOTAGED)
