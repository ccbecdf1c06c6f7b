"""The checking device (tests/device/checking.c): nothing in graph, passes, plan or run assumes a CPU.

Random graphs, host nodes, sizes that are values, optimizer steps and GPT-2 have the CPU's bits there, every operator's
rows pass, and the device itself can fail: a look into its memory ends the process, a slice runs late."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device import steps
from graphs import random_graph, random_update

import engine
from opcheck import check, rand

DEVICES = ("cpu", "checking")
TESTS = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}


@pytest.fixture(autouse=True)
def as_late_as_allowed() -> Iterator[None]:
    steps.late(0)
    yield
    steps.late(0)
    engine.Ctx().check(engine.lib.om_checking_wait(engine.Ctx().p))
    assert steps.count(steps.LIVE) == steps.count(steps.PENDING) == 0


def child(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own; a crash is an exit status there."""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=500, env=ENV | env, cwd=TESTS.parent)


# --- the device can fail --------------------------------------------------------------------------------------------

TOUCH = """
import ctypes, torch
from device import steps
mem = steps.Memory(steps.cx("checking"))
t = mem.give(torch.ones(8))
assert mem.fetch(t).tolist() == [1] * 8
print("before", flush=True)
{}
print("after", flush=True)
"""


@pytest.mark.parametrize("how", ["ctypes.string_at(t.data, 4)", "ctypes.memset(t.data, 0, 4)", "steps.lib.om_is_dense(ctypes.c_void_p(t.data))"])
def test_a_look_into_its_memory_is_caught(how: str) -> None:
    res = child(TOUCH.format(how))
    assert res.returncode == -6 and res.stdout == "before\n", (res.returncode, res.stdout, res.stderr)
    assert re.search(r"checking device: the host touched what is the device's at byte \d+", res.stderr), res.stderr
    assert child(TOUCH.format("")).stdout == "before\nafter\n"


STALE = """
import torch
from device import steps
mem = steps.Memory(steps.cx("checking"))
t = mem.give(torch.ones(8))
{}
mem.blocks and mem.fetch(t)
mem.cx.check(steps.lib.om_checking_copy_of(mem.cx.p, steps.C.byref(t), steps.C.byref(mem.give(torch.zeros(8)))))
mem.cx.check(steps.lib.om_checking_wait(mem.cx.p))
print("done")
"""


def test_a_kernel_in_memory_that_was_given_back_is_caught() -> None:
    res = child(STALE.format("mem.put()"))
    assert res.returncode == -6 and "a kernel left the blocks it was given" in res.stderr, (res.returncode, res.stderr)
    assert child(STALE.format("")).stdout == "done\n"


def test_a_slice_is_late() -> None:
    """The run has ended, its block is in the host's hands, the run itself is gone: nothing has been computed."""
    ctx = steps.cx("checking")
    model, mem = steps.Model.text(ctx, "graph {\n input x: f64[2]\n y = neg(x)\n output y\n}"), steps.Memory(ctx)
    given = steps.array([mem.give(torch.tensor([3.0, 4.0], dtype=torch.float64))])
    run, out, block, slices, waits = steps.Pointer(), engine.Tensor(), steps.C.POINTER(steps.Block)(), steps.count(steps.SLICES), steps.count(steps.WAITS)
    v, lib, ref = model.variant([0], [0]), engine.lib, steps.C.byref
    ctx.check(lib.om_run_forward(ctx.p, model.p, v, given, steps.C.c_uint64(0), True, ref(run)))
    ctx.check(lib.om_run_resume(run, 0))
    ctx.check(lib.om_run_output(run, 0, ref(out), ref(block)))
    lib.om_run_free(run)
    mem.take(block)
    bits = torch.zeros(2, dtype=torch.int64)

    def peek() -> list[int]:
        lib.om_checking_peek(steps.Pointer(bits.data_ptr()), steps.Pointer(out.data), steps.C.c_size_t(16))
        return bits.tolist()

    assert steps.count(steps.SLICES) == slices + 1 and steps.count(steps.WAITS) == waits and steps.count(steps.PENDING) >= 2
    assert peek() == [-1, -1]
    got = mem.fetch(out)
    assert got is not None and got.tolist() == [-3.0, -4.0] and steps.count(steps.WAITS) == waits + 1
    assert peek() == got.view(torch.int64).tolist()
    mem.put()
    model.free()


def test_an_index_out_of_range_is_told_to_the_next_who_waits() -> None:
    """And the run's writes have not happened, as on the CPU."""
    text = "graph {\n input i: i64[2]\n buffer s: f64[3]\n y = gather(s, i) {axis=0, padding_idx=-1}\n v = neg(s)\n output y\n write v -> s\n}"
    s, messages = torch.arange(3.0, dtype=torch.float64), []
    for device in DEVICES:
        model = steps.Model.text(steps.cx(device), text)
        with pytest.raises(engine.EngineError) as e:
            model.step([torch.tensor([0, 7]), s])
        messages.append(str(e.value))
        step = model.step([torch.tensor([0, 2]), s])
        assert step.outputs[0].tolist() == [0, 2] and step.inputs[1].tolist() == [0, -1, -2]
        model.free()
    assert messages[0] == messages[1] and "7" in messages[0]


def test_passes_ask_the_device() -> None:
    """It may take shorter chains than the CPU: more nodes, the same bits."""
    chain = "\n".join(f" v{k + 1} = {op}(v{k})" for k, op in enumerate(("sin", "tanh", "neg", "exp", "cos", "sigmoid")))
    text = f"graph {{\n input v0: f64[5]\n{chain}\n output v6\n}}"
    x, nodes, res = rand(5), {}, []
    try:
        for most in (0, 2):
            engine.lib.om_checking_strip(most)
            for device in DEVICES:
                model = steps.Model.text(steps.cx(device), text)
                res.append(model.step([x], [1], [rand(5)]))
                nodes[device, most] = model.print(model.variant([1], [1])).count(" = ")
                model.free()
    finally:
        engine.lib.om_checking_strip(0)
    assert nodes["cpu", 0] == nodes["cpu", 2] == nodes["checking", 0] < nodes["checking", 2]
    assert not any(steps.difference(res[0], r) for r in res)


# --- host scalars ---------------------------------------------------------------------------------------------------

STEP = """graph {{
  input lr: f32[1]{mark}
  input step: i64[]{mark}
  param w: f64[5]
  param g: f64[5]
  buffer m: f64[5]
  buffer v: f64[5]
  w1, m1, v1 = adamw_step(lr, step, _, w, g, m, v) {{out_dtype=[2, 2, 2]}}
  write w1 -> w
  write m1 -> m
  write v1 -> v
}}"""


def test_host_scalars() -> None:
    """Learning rate and step lie in the host's memory and change from run to run; what is queued has its own numbers."""
    ins = [rand(5), rand(5), rand(5), rand(5).abs()]
    model, ends = steps.Model.text(steps.cx("checking"), STEP.format(mark=" host")), []
    assert "input lr: f32[1] host" in model.print() and model.input(0).host and not model.input(2).host
    for lr, step in ((0.1, 1), (0.2, 2)):
        numbers = [torch.tensor([lr]), torch.tensor(step)]
        ends.append(model.step([*numbers, *ins]).inputs[2:])
        group = torch.nn.Parameter(ins[0].clone())
        optim = torch.optim.AdamW([group], lr=lr, weight_decay=0.01)
        optim.state[group] = {"step": torch.tensor(step - 1.0), "exp_avg": ins[2].clone(), "exp_avg_sq": ins[3].clone()}
        group.grad = ins[1].clone()
        optim.step()
        assert torch.allclose(ends[-1][0], group.detach(), rtol=1e-6, atol=1e-8)
    assert not torch.equal(ends[0][0], ends[1][0])
    model.free()


def test_a_scalar_that_is_not_marked_is_refused() -> None:
    """A kernel finds it in the host's memory; with the mark the run takes it along."""
    ctx = steps.cx("checking")
    model, mem = steps.Model.text(ctx, STEP.format(mark="")), steps.Memory(ctx)
    numbers = [torch.tensor([0.1]), torch.tensor(1)]
    given = steps.array([engine.tensor(t) for t in numbers] + [mem.give(rand(5)) for _ in range(4)])
    run, lib = steps.Pointer(), engine.lib
    ctx.check(lib.om_run_forward(ctx.p, model.p, model.variant([0] * 6, []), given, steps.C.c_uint64(0), True, steps.C.byref(run)))
    ctx.check(lib.om_run_resume(run, 0))
    with pytest.raises(engine.EngineError, match="adamw_step: operand 0 lies at .*, which is no memory of the device"):
        ctx.check(lib.om_checking_wait(ctx.p))
    lib.om_run_free(run)
    mem.put()
    model.free()


def test_late_runs_keep_their_scalars() -> None:
    """The host changes the number before the device has begun."""
    ctx = steps.cx("checking")
    model, mem, lib = steps.Model.text(ctx, "graph {\n input a: f64[] host\n input x: f64[2]\n y = mul(x, a)\n output y\n}"), steps.Memory(ctx), engine.lib
    a, x, outs = torch.tensor(2.0, dtype=torch.float64), mem.give(torch.tensor([3.0, 4.0], dtype=torch.float64)), []
    for number in (2.0, 5.0):
        a.fill_(number)
        run, out, block = steps.Pointer(), engine.Tensor(), steps.C.POINTER(steps.Block)()
        ctx.check(lib.om_run_forward(ctx.p, model.p, model.variant([0, 0], [0]), steps.array([engine.tensor(a), x]), steps.C.c_uint64(0), True, steps.C.byref(run)))
        ctx.check(lib.om_run_resume(run, 0))
        ctx.check(lib.om_run_output(run, 0, steps.C.byref(out), steps.C.byref(block)))
        lib.om_run_free(run)
        mem.take(block)
        outs.append(out)
    a.fill_(-1)
    assert [mem.fetch(o).tolist() for o in outs] == [[6, 8], [15, 20]]
    mem.put()
    model.free()


def test_host_scalars_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(engine.EngineError, match="not one element"):
        engine.Graph.parse("graph {\n input a: f64[2] host\n output a\n}")
    text = "graph {\n input a: f64[] host\n y = neg(a)\n output y\n write y -> a\n}"
    with pytest.raises(engine.EngineError, match="stores into a host scalar"):
        engine.Graph.parse(text).verify()
    model = steps.Model.text(steps.cx("cpu"), text)
    with pytest.raises(engine.EngineError, match="no run may write it"):
        model.step([torch.tensor(1.0, dtype=torch.float64)])
    with pytest.raises(engine.EngineError, match="host scalar: it has no gradient"):
        model.variant([1], [1])
    model.free()


# --- late faults (graph/device.h) -----------------------------------------------------------------------------------

FAULTY = "graph {\n input i: i64[2]\n buffer s: f64[3]\n y = gather(s, i) {axis=0, padding_idx=-1}\n v = neg(s)\n output y\n write v -> s\n}"


class Forwards:
    """Forwards of FAULTY that nobody waits for."""

    def __init__(self) -> None:
        self.cx = steps.cx("checking")
        self.model, self.mem = steps.Model.text(self.cx, FAULTY), steps.Memory(self.cx)
        self.s = self.mem.give(torch.arange(3.0, dtype=torch.float64))

    def begin(self, indices: list[int]) -> steps.Pointer:
        run = steps.Pointer()
        given = steps.array([self.mem.give(torch.tensor(indices)), self.s])
        v = self.model.variant([0, 0], [0])
        self.cx.check(engine.lib.om_run_forward(self.cx.p, self.model.p, v, given, steps.C.c_uint64(0), True, steps.C.byref(run)))
        return run

    def resume(self, run: steps.Pointer) -> None:
        self.cx.check(engine.lib.om_run_resume(run, 0))

    def output(self, run: steps.Pointer) -> engine.Tensor:
        out, block = engine.Tensor(), steps.C.POINTER(steps.Block)()
        self.cx.check(engine.lib.om_run_output(run, 0, steps.C.byref(out), steps.C.byref(block)))
        self.mem.take(block)
        return out

    def close(self, *runs: steps.Pointer) -> None:
        for run in runs:
            engine.lib.om_run_free(run)
        self.mem.put()
        self.model.free()


def test_resume_does_not_wait_for_a_fault() -> None:
    """As late as is allowed: the run with the fault, and the next one, are queued; the first download is told, once."""
    f = Forwards()
    waits, runs = steps.count(steps.WAITS), [f.begin([0, 7]), f.begin([0, 1])]
    outs = []
    for run in runs:
        f.resume(run)
        outs.append(f.output(run))
    assert steps.count(steps.WAITS) == waits
    with pytest.raises(engine.EngineError, match="index 7 at position 1"):
        f.mem.fetch(outs[1])
    last = f.begin([2, 0])
    f.resume(last)
    assert f.mem.fetch(f.output(last)).tolist() == [2, 0] and f.mem.fetch(f.s).tolist() == [0, -1, -2]  # type: ignore[union-attr]
    f.close(*runs, last)


def test_resume_tells_a_fault_that_is_known() -> None:
    """Whichever run resumes next, before anything of it is queued; it can only be freed, and nobody else is told."""
    f = Forwards()
    steps.late(1)
    first, second, third = f.begin([0, 7]), f.begin([0, 1]), f.begin([2, 0])
    f.resume(first)
    until = time.monotonic() + 20
    while steps.count(steps.PENDING) and time.monotonic() < until:
        time.sleep(0.001)
    slices = steps.count(steps.SLICES)
    with pytest.raises(engine.EngineError, match="index 7 at position 1"):
        f.resume(second)
    assert steps.count(steps.SLICES) == slices
    with pytest.raises(engine.EngineError, match="this run has failed; start another"):
        f.resume(second)
    f.resume(third)
    assert f.mem.fetch(f.output(third)).tolist() == [2, 0]  # type: ignore[union-attr]
    f.close(first, second, third)


def test_a_host_stop_tells_who_reads_its_operands() -> None:
    ctx = steps.cx("checking")
    model, mem = steps.Model.text(ctx, "graph {\n input i: i64[2]\n input s: f64[3]\n y = gather(s, i) {axis=0, padding_idx=-1}\n"
                                  " u = host(y) {index=0, out_dtype=[2], shape0=[2], diff=1}\n output u\n}"), steps.Memory(ctx)  # fmt: skip
    run, given = steps.Pointer(), steps.array([mem.give(torch.tensor([0, 7])), mem.give(rand(3))])
    ctx.check(engine.lib.om_run_forward(ctx.p, model.p, model.variant([0, 0], [0]), given, steps.C.c_uint64(0), True, steps.C.byref(run)))
    assert engine.lib.om_run_resume(run, 0) == steps.HOST
    with pytest.raises(engine.EngineError, match="index 7 at position 1"):
        mem.fetch(engine.lib.om_run_host(run).contents.in_[0])
    engine.lib.om_run_free(run)
    mem.put()
    model.free()


def test_the_device_is_told_when_a_plan_goes() -> None:
    """While its calls are still queued."""
    f = Forwards()
    run, ended = f.begin([0, 1]), steps.count(steps.ENDED)
    f.resume(run)
    assert steps.count(steps.PENDING) and steps.count(steps.ENDED) == ended
    f.close(run)
    assert steps.count(steps.ENDED) == ended + 1


# --- the CPU's bits -------------------------------------------------------------------------------------------------


def on_both(text: str, ins: list[torch.Tensor], **step: object) -> list[steps.Step]:
    """Two steps on each device, the second with the plan of the first; all four must agree but for what is random."""
    res = []
    for device in DEVICES:
        model = steps.Model.text(steps.cx(device), text)
        res.append([model.step(ins, **step) for _ in range(2)])  # type: ignore[arg-type]
        model.free()
    for a, b in zip(*res):
        assert not (found := steps.difference(a, b)), f"{found}\n{text}"
    return res[1]


def differs(seed: int) -> str | None:
    """What has other bits on the checking device, of one random graph."""
    text, ins, n_out, _ = random_graph(seed)
    g = torch.Generator().manual_seed(seed + 1)
    wanted = [1, 1, 1] + [0] * (len(ins) - 3)
    group = None if seed % 2 else [0, seed // 2 % 2, 1 - seed // 2 % 2] + [0] * (len(ins) - 3)
    res, dys = [], []
    for device in DEVICES:
        model = steps.Model.text(steps.cx(device), text)
        if not dys:
            dys = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) for y in model.step(ins, seed=3, write=False).outputs]
        arriving = [None if n_out > 1 and seed % 3 == 0 and not i else d for i, d in enumerate(dys)]
        res.append(model.step(ins, wanted, arriving, group, drop=seed % 5 < 2, seed=3, again=seed // 2 % 2, move=seed % 3 == 1))
        model.free()
    return steps.difference(*res)


@pytest.mark.parametrize("block", range(4))
def test_random_graphs(block: int) -> None:
    """Some as late as is allowed, some with pauses."""
    for seed in range(block * 60, block * 60 + 60):
        steps.late(seed % 4 and seed)
        assert not (found := differs(seed)), f"seed {seed}: {found}\n{random_graph(seed)[0]}"


@pytest.mark.parametrize("setting", ["ORTMODULE_POISON", "ORTMODULE_NO_REUSE"])
def test_random_graphs_while_debugging(setting: str) -> None:
    """Dead memory is filled by the device, not by the host."""
    res = child("from device import test_checking as t\nfor seed in range(40): assert not t.differs(seed), seed\nprint('done')", **{setting: "1"})
    assert res.stdout == "done\n", (res.returncode, res.stderr)


def test_optimizer_steps() -> None:
    for seed in range(30):
        text, ins = random_update(seed)
        on_both(text, ins)


def test_profile() -> None:
    """Times are the run's: a profiled slice is waited for."""
    model = steps.Model.text(steps.cx("checking"), "graph {\n input x: f64[4, 4]\n y = matmul(x, x)\n output y\n}")
    model.profile(True)
    model.step([rand(4, 4)])
    assert model.profile(False) == 1
    model.free()


SIZES = """graph {
  sym s0 = value of n
  input n: i64[]
  input x: f64[5]
  const c: f64[1] = [0.5]
  a = slice(x) {axis=0, start=[0], end=[s0], step=1}
  y = add(a, c)
  output y
}"""


def test_sizes_that_are_values() -> None:
    for n in (3, 5):
        (first, _) = on_both(SIZES, [torch.tensor(n), rand(5)], wanted=[0, 1], dys=[rand(n)])
        assert first.outputs[0].shape == (n,)


def test_iota() -> None:
    text = "graph {\n sym s0 = x[0]\n input x: f64[s0]\n i = iota() {shape=[s0], axis=0, dtype=i64}\n output i\n}"
    assert on_both(text, [rand(4)])[0].outputs[0].tolist() == [0, 1, 2, 3]


HOST = """graph {
  input x: f64[3, 2]
  param w: f64[3, 2]
  a = mul(x, w)
  f = flip(a) {axes=[0]}
  u, v = host(f, w) {index=4, out_dtype=[2, 2], shape0=[3, 2], shape1=[2, 3], diff=1}
  s = sin(u)
  t = tanh(v)
  output s
  output t
  output a
}"""


@pytest.mark.parametrize("zeros", [False, True])
def test_host_nodes(zeros: bool) -> None:
    """Operands and answers cross by download and upload; answers lie where they are wanted, elsewhere, in another layout,
    or nowhere (zeros)."""
    seen: list[tuple[int, bool, int]] = []

    def answer(index: int, backward: bool, given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        a, b = given
        assert a is not None and b is not None
        seen.append((index, backward, steps.count(steps.PENDING)))
        if backward:  # gradients of u and v -> of f and w
            return [None if zeros else a + b.t(), a * 2]
        return [a * b, None if zeros else (a + b).t()]

    first, _ = on_both(HOST, [rand(3, 2), rand(3, 2, per_axis=2)], wanted=[1, 1], dys=[rand(3, 2), rand(2, 3), rand(3, 2)], answer=answer)
    assert [s[:2] for s in seen] == [(4, False), (4, True)] * 4
    x, w = rand(3, 2).requires_grad_(), rand(3, 2, per_axis=2)
    a = (x * w).detach()
    want = torch.tanh(torch.zeros(2, 3, dtype=torch.float64) if zeros else (a.flip(0) + w).t())
    assert torch.allclose(first.outputs[0], torch.sin(a.flip(0) * w), atol=1e-12) and torch.allclose(first.outputs[1], want, atol=1e-12)


def test_gpt2(tmp_path: Path) -> None:
    """Captured in Python, run from the file it saves: three steps of forward, backward and SGD, with every policy of what
    backward computes again and the backward in one segment or three."""
    data, module, ids = steps.gpt2(tmp_path)
    for again, segments in ((0, 1), (1, 3)):
        runs: list[list[steps.Step]] = []
        for device in DEVICES:
            model = steps.Model.onnx(steps.cx(device), data)
            io = [model.input(i) for i in range(model.n_in)]
            named = {k: v.detach().clone() for k, v in module.state_dict().items()}
            ins = [ids.clone() if x.role == steps.INPUT else named[x.name.decode()] for x in io]
            wanted = [int(x.role == steps.PARAM and x.differentiable) for x in io]
            group = None if segments == 1 else [segments - 1 - i * segments // model.n_in for i in range(model.n_in)]
            taken: list[steps.Step] = []
            for k in range(3):
                dys = [torch.ones(()) if not i else None for i in range(model.n_out)]
                taken.append(model.step(ins, wanted, dys, group, drop=k == 1, seed=k, again=again, move=k == 2))
                for i, g in taken[-1].grads.items():
                    ins[i] = ins[i] - 0.1 * g
            assert sum(wanted) == len(taken[0].grads) > 20
            runs.append(taken)
            model.free()
        for k, (a, b) in enumerate(zip(*runs)):
            assert not (found := steps.difference(a, b)), f"step {k}: {found}"
        assert runs[1][0].outputs[0] > runs[1][2].outputs[0]


# --- operators ------------------------------------------------------------------------------------------------------


def test_the_check_takes_a_device() -> None:
    before = steps.count(steps.SLICES)
    check("softmax", [rand(3, 4)], lambda x: torch.softmax(x, 1), "axis=1", device="checking")
    assert steps.count(steps.SLICES) > before


# simplify drops a slice as long as what it is taken from without a look at where it begins: no device is asked
LEFT_OUT = ["tests/ops/test_view.py::test_refused_at_run_time[slice(x) {axis=1, start=[1], end=[s0 + 1], step=1}]"]
# never in a plan: the passes leave no copy, and fold an iota whose size is a number (the other: test_iota)
IDLE = {"copy", "iota"}

OPERATORS = f"""
import sys, pytest
from device import steps
left_out = [arg for name in {LEFT_OUT} for arg in ("--deselect", name)]
status = pytest.main(["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", *left_out,
                      "tests/ops", "tests/passes/test_fuse.py", "tests/optim/test_operators.py", "tests/engine/test_bounded.py"])
names = iter(lambda at=iter(range(1000)): steps.lib.om_checking_idle(next(at)), None)
print("IDLE", *sorted(name.decode() for name in names))
sys.exit(status)
"""


@pytest.mark.slow
def test_operators() -> None:
    """Every row of every operator, planned and run here: forward and all gradients beside eager. None is left out."""
    res = child(OPERATORS, OM_DEVICE="checking")
    assert res.returncode == 0 and " passed" in res.stdout, res.stdout[-4000:] + res.stderr[-2000:]
    assert set(res.stdout.split("IDLE")[1].split()) == IDLE, res.stdout.split("IDLE")[1]
