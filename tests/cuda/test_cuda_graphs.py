"""CUDA graphs (csrc/cuda/graphs.h) on the fake GPU (fake_driver.cpp): steps that are launched as graphs have the bits of
steps that are queued call by call, whatever changes between them.

In most tests blocks come back in the order of their stream, so that steps repeat their addresses (OM_FAKE_REUSE), and
launches may reach blocks of the device alone (OM_FAKE_STRICT)."""

from __future__ import annotations

import pytest
from cuda.children import TESTS, child, on_fake

pytestmark = on_fake
POOL = {"OM_FAKE_REUSE": "1", "OM_FAKE_STRICT": "1"}
SABOTAGED = {"OM_LIB": str(TESTS.parent / "build" / "sabotage.so")}

HEAD = """
import ctypes as C, torch, engine
from cuda import fake
from device import steps
lib = engine.lib
lib.om_cuda_graph_count.restype = C.c_long
lib.om_cuda_graph_reason.restype = C.c_char_p
MADE, PLAYED, GIVEN_UP, ALIVE = range(4)
def counted(what):
    return lib.om_cuda_graph_count(what)
def reasons():
    found = []
    while text := lib.om_cuda_graph_reason(len(found)):
        found.append(text.decode())
    return found
def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
def sane():
    assert fake.count(fake.FAILURES) == 0, fake.message()
    assert fake.count(fake.RECORDED) == 0 and fake.gpu.fake_gpu_depth() == 0
def compare(text, step, n, unstable=()):
    '''step(model, k): what a step has made. With graphs and without: the same bits, step by step.'''
    found = []
    for on in (False, True):
        lib.om_cuda_graphs(C.c_bool(on))
        model, before, made = steps.Model.text(steps.cx("cuda-fake"), text), counted(PLAYED), []
        for k in range(n):
            if k in unstable:
                fake.unstable(4)
            made.append(step(model, k))
        assert on or counted(PLAYED) == before
        played = counted(PLAYED) - before
        model.free()
        found.append(made)
    for k, (a, b) in enumerate(zip(*found, strict=True)):
        assert steps.difference(a, b) is None, (k, steps.difference(a, b), text)
    assert counted(ALIVE) == 0 and fake.count(fake.GRAPHS) == 0
    sane()
    return played
"""

RANDOM = """
from graphs import random_graph
played = 0
for seed in range({first}, {first} + 9):
    text, ins, n_out, _ = random_graph(seed)
    def step(model, k):
        given = [t + k / 8 * rand(*t.shape, seed=k, dtype=t.dtype) if t.is_floating_point() else t.roll(k) for t in ins]
        outs = step.shapes or model.step(given, seed=k, write=False).outputs
        step.shapes = outs
        dys = [rand(*y.shape, seed=k + 7, dtype=y.dtype) for y in outs]
        group = [0, seed % 2, 1, 0] + [0] * (len(ins) - 4) if seed % 3 == 0 else None
        return model.step(given, [1, 1, 1] + [0] * (len(ins) - 3), dys, group, drop=seed % 5 < 2, seed=k, again=seed // 2 % 2, move=seed % 4 == 1)
    step.shapes = None
    played += compare(text, step, {steps}, unstable=(3, 5))
print("done", played)
"""


@pytest.mark.parametrize("first,seed,late", [(0, 0, 1), (9, 5, 1), (18, 8, 0)])
def test_random_graphs(first: int, seed: int, late: int) -> None:
    """Other values, other seeds of dropout, arenas that have moved, gradients by segments, addresses that change."""
    out = child(HEAD + RANDOM.format(first=first, steps=6), OM_FAKE_SEED=str(seed), OM_FAKE_LATE=str(late), **POOL)
    assert out.startswith("done") and int(out.split()[1]) > 20, out


DROPOUT = """
text = '''graph {
 input x: f32[6, 40]
 input a: f32[] host
 param w: f32[40, 40]
 h = matmul(x, w)
 d = dropout(h) {p=0.5} rng=3
 e = mul(d, a)
 f = gelu(e)
 g = dropout(f) {p=0.25} rng=4
 s = softmax(g) {axis=1}
 y = matmul(s, w)
 output y
 output e
}'''
def step(model, k):
    number = torch.tensor(1.0 + k)
    hold = steps.Memory(model.cx)  # in odd steps: a run's own seed and numbers lie elsewhere than in those before
    for n in (1, 2, 3) * (k % 2):
        hold.give(torch.zeros(n, dtype=torch.float64))
    made = model.step([rand(6, 40, seed=k, dtype=torch.float32), number, rand(40, 40, dtype=torch.float32)], [1, 0, 1],
                      [rand(6, 40, seed=k + 9, dtype=torch.float32)] * 2, seed=k + 1)
    hold.put()
    return made
assert compare(text, step, 6) >= 8
lib.om_cuda_graphs(C.c_bool(True))
model = steps.Model.text(steps.cx("cuda-fake"), text)
masks = [step(model, k).outputs[1] != 0 for k in range(4)]
assert all(0.3 < m.float().mean() < 0.7 for m in masks) and not any(torch.equal(masks[i], masks[k]) for i in range(4) for k in range(i))
model.free()
print("done")
"""


def test_seeds_and_numbers_of_the_host_are_not_recorded() -> None:
    assert child(HEAD + DROPOUT, **POOL) == "done\n"


SHAPES = """
text = '''graph {
 sym s0 = x[0]
 input x: f32[s0, 8]
 param w: f32[8, 12]
 param b: f32[12]
 h = matmul(x, w, b)
 t = tanh(h)
 s = softmax(t) {axis=1}
 y = mul(s, t)
 output y
}'''
def step(model, k):
    n = (3, 5, 3, 7)[k % 4]
    return model.step([rand(n, 8, seed=k, dtype=torch.float32), rand(8, 12, dtype=torch.float32), rand(12, dtype=torch.float32)], [1, 1, 1],
                      [rand(n, 12, seed=k, dtype=torch.float32)], seed=k)
assert compare(text, step, 24) > 10
print("done")
"""


def test_sizes_that_change() -> None:
    """A plan for each, graphs for each."""
    assert child(HEAD + SHAPES, **POOL) == "done\n"


PIECES = """
text = '''graph {
 input x: f64[5, 4]
 param w: f64[4, 4]
 buffer s: f64[4]
 h = matmul(x, w)
 t = tanh(h)
 u = sin(t)
 m = softmax(u) {axis=1}
 p = pad(m) {lo=[0, 0], hi=[0, 260], value=0.}
 d = reshape(p) {shape=[1, 1, 5, 264]}
 e, lse = attention(d, d, d) {scale=0.3}
 b = slice(e) {axis=3, start=[0], end=[4], step=1}
 c = reshape(b) {shape=[5, 4]}
 v = neg(c)
 k = matmul(v, w)
 l = gelu(k)
 f = host(l) {index=0, out_dtype=[2], shape0=[5, 4], diff=1}
 q = matmul(f, w)
 r = tanh(q)
 a = softmax(r) {axis=1}
 y = mul(a, a)
 z = reduce_mean(y) {axes=[0]}
 n = add(s, z)
 output y
 write n -> s
}'''
def answer(index, backward, given):
    return [given[0] * 2] if not backward else [given[0] * 3]
def step(model, k):
    return model.step([rand(5, 4, seed=k), rand(4, 4), rand(4, seed=k)], [1, 1, 0], [rand(5, 4, seed=k + 3)], seed=k, answer=answer)
played = compare(text, step, 5)
assert played >= 12, played
assert fake.host_ops(lib) == ["attention", "attention_grad"], fake.host_ops(lib)
print("done")
"""


def test_host_nodes_the_cpus_calls_and_writes_cut_graphs() -> None:
    assert child(HEAD + PIECES, **POOL) == "done\n"


UPDATES = """
from graphs import random_update
played = 0
for seed in range(12):
    text, ins = random_update(seed)
    chain = "  p0 = neg({x})\\n  p1 = sin(p0)\\n  p2 = softmax(p1) {{axis=0}}\\n  p3 = tanh(p2)\\n  output p3\\n"
    first = next(line for line in text.splitlines() if line.strip().startswith("param"))
    text = text.rstrip().rstrip("}") + chain.format(x=first.split()[1].rstrip(":")) + "}"
    def step(model, k):
        given = [(t * (1 + k) if t.is_floating_point() else t + k if t.dtype == torch.int64 else t) for t in ins]
        return model.step(given, seed=k)
    played += compare(text, step, 4)
assert played > 12, played
print("done")
"""


def test_optimizer_steps() -> None:
    """They are recorded like everything."""
    assert child(HEAD + UPDATES, OM_FAKE_REUSE="1") == "done\n"


STREAMS = """
text = '''graph {
 input x: f64[40]
 param w: f64[40]
 a = sin(x)
 b = softmax(a) {axis=0}
 c = mul(b, w)
 d = softmax(c) {axis=0}
 e = sub(d, x)
 output e
}'''
def forward(model, mem, x, w):
    run, out, block, cx = steps.Pointer(), engine.Tensor(), C.POINTER(steps.Block)(), model.cx
    given = steps.array([mem.give(x), w])
    cx.check(lib.om_run_forward(cx.p, model.p, model.variant([0, 0], [0]), given, C.c_uint64(0), True, C.byref(run)))
    cx.check(lib.om_run_resume(run, 0))
    cx.check(lib.om_run_output(run, 0, C.byref(out), C.byref(block)))
    lib.om_run_free(run)
    mem.take(block)
    return out
streams = []
for _ in range(2):
    assert fake.gpu.cuCtxPushCurrent_v2(None) == 0
    s = C.c_void_p()
    assert fake.gpu.cuStreamCreate(C.byref(s), 1) == 0
    fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
    streams.append(s)
model = steps.Model.text(steps.cx("cuda-fake"), text)
mems, weights = [], []
for s in streams:
    lib.om_cuda_stream(s)
    mem = steps.Memory(model.cx)
    mems.append(mem)
    weights.append(mem.give(rand(40)))
want = lambda x: torch.softmax(torch.softmax(torch.sin(x), 0) * rand(40), 0) - x
for turn in range(6):
    outs = []
    for k, s in enumerate(streams):
        lib.om_cuda_stream(s)
        mem = steps.Memory(model.cx)
        x = rand(40, seed=2 * turn + k)
        outs.append((s, mem, x, forward(model, mem, x, weights[k])))
    for s, mem, x, out in outs[::-1]:
        lib.om_cuda_stream(s)
        assert torch.allclose(mem.fetch(out), want(x), atol=1e-12), turn
        mem.put()
assert counted(PLAYED) >= 6, counted(PLAYED)
for s, mem in zip(streams, mems):
    lib.om_cuda_stream(s)
    mem.put()
model.free()
sane()
print("done")
"""


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_two_streams_at_once(seed: int) -> None:
    """Nothing orders them but who waits: each has graphs of its own, and memory for what graphs are given."""
    assert child(HEAD + STREAMS, OM_FAKE_SEED=str(seed), **POOL) == "done\n"


KEPT_APART = """
product = '''graph {
 input x: f32[6, 40]
 param w: f32[40, 40]
 h = matmul(x, w)
 s = softmax(h) {axis=1}
 y = matmul(s, w)
 output h
 output y
}'''
cut = []
def step(model, k):
    lib.om_cuda_tf32(C.c_bool(k // 2 % 2))
    x = rand(6, 40, seed=3, dtype=torch.float32)
    made = model.step([x, rand(40, 40, dtype=torch.float32)], [1, 1], [x, x], seed=1)
    cut.append(made.outputs[0])
    return made
assert compare(product, step, 12) >= 8
assert not torch.equal(cut[0], cut[2]) and torch.equal(cut[0], cut[4])
lib.om_cuda_tf32(C.c_bool(False))
written = '''graph {
 input x: f64[9]
 buffer s: f64[9]
 a = sin(x)
 b = softmax(a) {axis=0}
 c = tanh(b)
 d = softmax(c) {axis=0}
 n = add(s, d)
 output d
 write n -> s
}'''
def step(model, k):
    return model.step([rand(9, seed=k), rand(9)], seed=1, write=k // 2 % 2 == 0)
assert compare(written, step, 12) >= 6
print("done")
"""


def test_settings_are_part_of_the_key() -> None:
    """Whether products cut operands to TF32, whether write-backs are left out: what was recorded otherwise is not launched."""
    assert child(HEAD + KEPT_APART, **POOL) == "done\n"


LAST = STREAMS[: STREAMS.index("model = ")] + """
own = streams[0]
model = steps.Model.text(steps.cx("cuda-fake"), text)
lib.om_cuda_stream(own)
held = steps.Memory(model.cx)
w = held.give(rand(40))
for turn in range(7):  # the last one is under way when the plan goes
    mem = steps.Memory(model.cx)
    x = rand(40, seed=turn)
    if turn % 2:
        mem.give(x)  # in another place than before: the graph has a copy
    out = forward(model, mem, x, w)
    if turn < 6:
        mem.fetch(out)
        mem.put()
assert counted(PLAYED) >= 3 and fake.count(fake.QUEUED) > 0
lib.om_cuda_stream(None)
model.free()
assert fake.gpu.cuCtxPushCurrent_v2(None) == 0 and fake.gpu.cuStreamSynchronize(None) == 0
fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
lib.om_cuda_stream(own)
assert torch.allclose(mem.fetch(out), torch.softmax(torch.softmax(torch.sin(x), 0) * rand(40), 0) - x, atol=1e-12)
mem.put()
held.put()
sane()
print("done")
"""


def test_what_a_graph_holds_goes_behind_its_launches() -> None:
    """On the stream of the graph, whatever stream the thread that frees the plan is on."""
    assert child(HEAD + LAST, **POOL) == "done\n"


CHANGING = """
text = "graph {\\n param x: f64[30]\\n a = sin(x)\\n b = softmax(a) {axis=0}\\n c = tanh(b)\\n d = softmax(c) {axis=0}\\n output d\\n}"
def step(model, k):
    fake.unstable(100)
    return model.step([rand(30, seed=k)], [1], [rand(30, seed=k)])
assert compare(text, step, 40) == 0
assert counted(MADE) == 0 and counted(GIVEN_UP) == 2 and reasons() == ["addresses change too often to be recorded"], (counted(GIVEN_UP), reasons())
def step(model, k):  # two places, one after the other: both are kept
    hold = steps.Memory(model.cx)
    for _ in range(k % 2):
        hold.give(torch.zeros(30, dtype=torch.float64))
    made = model.step([rand(30, seed=k)], [1], [rand(30, seed=k)])
    hold.put()
    return made
played = compare(text, step, 12)
assert played >= 12 and counted(GIVEN_UP) == 2, (played, counted(GIVEN_UP))
print("done")
"""


def test_addresses_that_change_are_given_up() -> None:
    """Where they take turns each has its graph."""
    assert child(HEAD + CHANGING, **POOL) == "done\n"


WAITS = """
text = '''graph {{
 input x: f32[50, 4]
 input i: i64[9]
 buffer s: f32[9, 4]
 y = gather(x, i) {{axis=0}}
 a = tanh(y)
 b = softmax(a) {{axis=1}}
 c = add(s, b)
 output b
 {write}
}}'''
for write, waits in (("", 0), ("write c -> s", 0)):
    model = steps.Model.text(steps.cx("cuda-fake"), text.format(write=write))
    mem = steps.Memory(model.cx)
    s = mem.give(torch.zeros(9, 4))
    def run(indices, seen=[0]):
        run, cx, own = steps.Pointer(), model.cx, steps.Memory(model.cx)
        given = [own.give(rand(50, 4, dtype=torch.float32)), own.give(torch.tensor(indices)), s]
        cx.check(lib.om_run_forward(cx.p, model.p, model.variant([0, 0, 0], [0]), steps.array(given), C.c_uint64(0), True, C.byref(run)))
        before = fake.count(fake.WAITS)
        try:
            cx.check(lib.om_run_resume(run, 0))
        finally:
            seen[0] = fake.count(fake.WAITS) - before
            lib.om_run_free(run)
            own.put()
        return seen[0]
    good = list(range(9))
    for k in range(5):
        assert run(good) == waits, (k, write)
    assert counted(PLAYED) >= 4
    held = mem.fetch(s)
    before = counted(PLAYED)
    try:  # at the first wait, or when the next run begins
        run(good[:4] + [50] + good[5:])
        mem.fetch(s)
    except engine.EngineError as e:
        assert "index 50 at position 4" in str(e), e
    else:
        raise AssertionError("no fault")
    assert counted(PLAYED) == before + 1 and steps.same(mem.fetch(s), held)
    assert run(good) == waits
    mem.put()
    model.free()
sane()
print("done")
"""


def test_faults_and_waits() -> None:
    """An index out of range inside of a graph is told as late and as surely; a step waits as often as without graphs,
    and no write-back is behind a fault."""
    assert child(HEAD + WAITS, **POOL) == "done\n"


MEANWHILE = """
import threading
text = "graph {\\n param x: f64[30]\\n a = sin(x)\\n b = softmax(a) {axis=0}\\n c = tanh(b)\\n d = softmax(c) {axis=0}\\n output d\\n}"
model, said = steps.Model.text(steps.cx("cuda-fake"), text), []
def step():
    model.step([rand(30)])
def other():
    assert fake.gpu.cuCtxPushCurrent_v2(None) == 0
    said.append(fake.gpu.cuMemHostAlloc(C.byref(C.c_void_p()), C.c_size_t(64), 0))
    fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
def meanwhile(kernel):
    fake.gpu.fake_gpu_watch(None, None)
    assert fake.count(fake.RECORDED) == 1
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
called = C.CFUNCTYPE(None, C.c_char_p)(meanwhile)
step()
fake.gpu.fake_gpu_watch(b"om_k_softmax_f64", called)
step()
assert said == [0] and counted(MADE) == 1 and counted(GIVEN_UP) == 0, (said, reasons())
model.free()
sane()
print("done")
"""


def test_other_threads_go_on_while_one_records() -> None:
    """With calls that may not be recorded (torch's, for page-locked memory)."""
    assert child(HEAD + MEANWHILE, **POOL) == "done\n"


REFUSED = """
text = "graph {\\n input x: f64[30]\\n y = sin(x)\\n output y\\n}"
model, s = steps.Model.text(steps.cx("cuda-fake"), text), C.c_void_p()
model.step([rand(30)])
assert fake.gpu.cuCtxPushCurrent_v2(None) == 0 and fake.gpu.cuStreamCreate(C.byref(s), 0) == 0
fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
mem = steps.Memory(model.cx)
x = mem.give(rand(30))
assert fake.gpu.cuStreamBeginCapture_v2(s, 0) == 0
lib.om_cuda_stream(s)
run = steps.Pointer()
try:
    model.cx.check(lib.om_run_forward(model.cx.p, model.p, model.variant([0], [0]), steps.array([x]), C.c_uint64(0), True, C.byref(run)))
except engine.EngineError as e:
    print(e)
"""


def test_a_capture_of_the_users_is_refused() -> None:
    """It would repeat the seed for ever."""
    out = child(HEAD + REFUSED)
    assert out.startswith("the stream is being captured into a CUDA graph: a step takes its seed"), out


SABOTAGE = {
    "graphs.address": RANDOM.format(first=0, steps=6),
    "graphs.scalars": DROPOUT,
    "graphs.input": RANDOM.format(first=0, steps=9),
}


@pytest.mark.parametrize("point", SABOTAGE)
def test_what_is_broken_is_noticed(point: str) -> None:
    """csrc/graph/sabotage.h: an address left out of the key, a seed or an input of the first launch kept for ever."""
    with pytest.raises(AssertionError, match="AssertionError|leaves its block"):
        child(HEAD + SABOTAGE[point], OM_SABOTAGE=point, **POOL, **SABOTAGED)
