"""The planner and executor against the interpreter, which has no planner: same graph, same kernels, so the same bits.

Random graphs (hypothesis) of views, pointwise, reductions, products, outputs that are views or inputs, write-backs read
by backward; run with reuse and in-place, with no reuse, and with dead memory filled with NaN bytes. Overlaps are
checked by code that shares nothing with plan.c.
"""

import os
import random
import signal
import subprocess
import sys
import threading

import pytest
import torch

import engine

_C = pytest.importorskip("ortmodule._C")


def random_graph(seed: int, writes: bool = True) -> tuple[str, list[torch.Tensor], int]:
    """A random but valid graph over (m, n) and (n, m) matrices; returns text, inputs, number of outputs."""
    r = random.Random(seed)
    m, n = r.choice([(3, 5), (1, 7), (4, 4), (2, 1), (5, 0), (67, 31), (41, 41)])
    lines = ["graph {", f"  input x: f64[{m}, {n}]", f"  param w: f64[{n}, {m}]", f"  param b: f64[{n}]", f"  buffer s: f64[{m}, {n}]"]
    tall, wide = ["x", "s"], ["w"]  # (m, n) and (n, m)
    for i in range(r.randint(3, 22)):
        v = f"t{i}"
        k = r.randrange(15)
        a, c = r.choice(tall), r.choice(tall)
        if k == 0:
            lines.append(f"  {v} = {r.choice(['add', 'mul', 'sub', 'maximum'])}({a}, {c})")
        elif k == 1:
            lines.append(f"  {v} = {r.choice(['tanh', 'sigmoid', 'gelu', 'neg', 'sin'])}({a})")
        elif k == 2:
            lines.append(f"  {v} = add({a}, b)")
        elif k == 3:
            lines.append(f"  {v} = permute({a}) {{perm=[1, 0]}}")
            wide.append(v)
            continue
        elif k == 4:
            lines.append(f"  {v} = permute({r.choice(wide)}) {{perm=[1, 0]}}")
        elif k == 5:
            lines.append(f"  {v}q = matmul({a}, {r.choice(wide)})")
            lines.append(f"  {v} = matmul({v}q, {c})")
        elif k == 6:
            lines.append(f"  {v}f = reshape({a}) {{shape=[{m * n}]}}")
            lines.append(f"  {v} = reshape({v}f) {{shape=[{m}, {n}]}}")
        elif k == 7:
            lines.append(f"  {v}f = reshape({r.choice(wide)}) {{shape=[{m * n}]}}")
            lines.append(f"  {v} = reshape({v}f) {{shape=[{m}, {n}]}}")
        elif k == 8:
            lines.append(f"  {v}r = reduce_sum({a}) {{axes=[0], keepdims=0}}")
            lines.append(f"  {v} = mul({v}r, {c})")
        elif k == 9:
            lines.append(f"  {v} = dropout({a}) {{p=0.25}} rng={i + 1}")
        elif k == 10:
            lines.append(f"  {v} = flip({a}) {{axes=[1]}}")
        elif k == 11:  # computed, and read across its rows
            lines.append(f"  {v} = sin({r.choice(wide)})")
            wide.append(v)
            continue
        elif k == 12:  # views of a part, one of them at the beginning
            lines.append(f"  {v}c = concat({a}, {c}) {{axis=0}}")
            lo = r.choice([0, m])
            lines.append(f"  {v} = slice({v}c) {{axis=0, start=[{lo}], end=[{lo + m}], step=1}}")
        elif k == 13 and m == n:  # one matrix along and across
            w = r.choice(wide)
            lines.append(f"  {v} = {r.choice(['add', 'mul'])}({w}, {r.choice([w, a])})")
            lines.append(f"  {v}p = permute({v}) {{perm=[1, 0]}}")
            lines.append(f"  {v}s = add({v}, {v}p)")
            v += "s"
        elif k == 14:  # wants its operand dense
            lines.append(f"  {v}t = permute({r.choice(wide)}) {{perm=[1, 0]}}")
            lines.append(f"  {v}, {v}m, {v}r = layer_norm({v}t, _, b) {{axis=1, eps=0.1}}")
        else:
            lines.append(f"  {v} = flip({a}) {{axes=[0]}}")
        tall.append(v)
    outs = [r.choice(tall + wide) for _ in range(r.randint(1, 4))]
    lines += [f"  output {o}" for o in outs]
    if writes and r.random() < 0.5:
        lines.append(f"  write {r.choice(tall)} -> s")
    g = torch.Generator().manual_seed(seed)
    shapes = [(m, n), (n, m), (n,), (m, n)]
    ins = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    if r.random() < 0.5:
        ins[1] = ins[1].t().contiguous().t()
    return "\n".join(lines + ["}"]), ins, len(outs)


def planned(text: str, ins: list[torch.Tensor], dys: list[torch.Tensor | None], group=None, seed: int = 3):
    """(outputs, buffer s afterwards, gradients by input) through _C.Model. Who has a gradient changes the parameter at
    once."""
    model = _C.Model.from_text(text)
    n = len(model.inputs)
    mine = [t.clone(memory_format=torch.preserve_format) for t in ins]
    v = model.variant(bytes([1, 1, 1, 0]), bytes(int(d is not None) for d in dys), group)
    run = model.forward(v, mine, seed)
    assert run.resume() is None
    outs, (state, arena) = run.outputs(), run.state()
    info = model.variant_info(v)
    given = [mine[i] if i in info["reads_inputs"] else None for i in range(n)]
    back = state.backward(arena, given, [o if i in info["reads_outputs"] else None for i, o in enumerate(outs)], dys)
    grads: dict[int, torch.Tensor] = {}
    kept = [o.clone() for o in outs]
    for s in range(info["segments"]):
        assert back.resume(s) is None
        for i, g in back.grads(s):
            assert i not in grads and (group is None or s <= group[i])
            grads[i] = g.clone()
            mine[i].fill_(float("nan"))
            g.fill_(float("nan"))  # handed over: the engine must not read it again
    for a, b in zip(outs, kept):
        assert torch.equal(a, b) or torch.isnan(b).any()
    return kept, mine[3], grads


def compare(seed: int, group=None) -> None:
    text, ins, n_out = random_graph(seed)
    g = torch.Generator().manual_seed(seed + 1)
    oracle = lambda: engine.Graph.parse(text).apply("patterns")  # noqa: E731  (gelu and silu round differently spelled out)
    shape_of = engine.run(oracle(), ins, seed=3)[0]
    dys = [torch.randn(o.shape, generator=g, dtype=torch.float64) for o in shape_of[:n_out]]
    if n_out > 1 and seed % 3 == 0:
        dys[0] = None
    if seed % 4 == 0:
        dys = [None if d is None else d.t().contiguous().t() for d in dys]
    want, want_g = engine.run(oracle(), ins, [1, 1, 1, 0], dys, seed=3)
    got, s_after, got_g = planned(text, ins, dys, group)
    # Where a row is longer than one step of a kernel, sums and products add in an order that depends on strides:
    # operands are views in a plan and dense copies in the interpreter. The largest difference seen is 4e-16 of the
    # largest element.
    equal = torch.equal if ins[2].numel() < 30 else lambda a, b: bool((a - b).abs().max() <= 1e-14 * b.abs().max())
    for i in range(n_out):
        assert equal(got[i], want[i]), f"output {i}\n{text}"
    if len(want) > n_out:
        assert equal(s_after, want[n_out]), f"write-back\n{text}"
    for i in range(3):
        if want_g[i] is None:
            assert i not in got_g
        else:
            torch.testing.assert_close(got_g[i], want_g[i], rtol=1e-12, atol=1e-12, msg=lambda m: f"gradient {i}: {m}\n{text}")  # noqa: B023
            assert got_g[i].stride() == ins[i].stride() or min(ins[i].shape) <= 1


@pytest.mark.parametrize("block", range(12))
def test_plan_equals_interpreter(block):
    for seed in range(block * 25, block * 25 + 25):
        compare(seed)


@pytest.mark.parametrize("block", range(4))
def test_a_plan_in_segments_equals_the_interpreter(block):
    for seed in range(1000 + block * 25, 1000 + block * 25 + 25):
        compare(seed, group=[0, seed % 2, 1 - seed % 2, 0])


def test_written_inputs_change_places() -> None:
    """Both values are read before either input is overwritten."""
    text = "graph {\n buffer a: f64[3, 2]\n buffer b: f64[3, 2]\n y = add(a, b)\n output y\n write a -> b\n write b -> a\n}"
    a, b = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    model, mine = _C.Model.from_text(text), [a.clone(), b.clone()]
    run = model.forward(model.variant(bytes(2), bytes(1), None), mine, 0)
    assert run.resume() is None
    assert torch.equal(run.outputs()[0], a + b)
    assert torch.equal(mine[0], b) and torch.equal(mine[1], a)


WRITTEN = {  # what a buffer becomes, of itself: views of it, some of which overlap
    "flip": "v = flip(s) {axes=[0]}", "transpose": "v = permute(s) {perm=[1, 0]}", "rows": "v = gather(s, i) {axis=0}",
    "shift": "a = slice(s) {axis=0, start=[0], end=[2], step=1}\n v = slice_scatter(s, a) {axis=0, start=[1], end=[3], step=1}",
    "last": "a = slice(s) {axis=0, start=[2], end=[3], step=1}\n v = expand(a) {shape=[3, 3]}",
    "roll": "a = slice(s) {axis=0, start=[2], end=[3], step=1}\n b = slice(s) {axis=0, start=[0], end=[2], step=1}\n"
            " v = concat(a, b) {axis=0}",
    "itself": "v = reshape(s) {shape=[3, 3]}", "other": "v = permute(t) {perm=[1, 0]}",
}  # fmt: skip


@pytest.mark.parametrize("way", WRITTEN)
def test_written_with_a_view_of_itself(way: str) -> None:
    """Backward reads the buffers, so the plan saves them; what is written back are views of what it saved. `t` is given
    a view of s."""
    text = (f"graph {{\n input x: f64[3, 3]\n buffer s: f64[3, 3]\n buffer t: f64[3, 3]\n input i: i64[3]\n {WRITTEN[way]}\n"
            " u = flip(s) {axes=[1]}\n p = mul(x, s)\n q = mul(p, t)\n y = sin(q)\n output y\n write v -> s\n write u "
            "-> t\n}")
    x, s, t, i = torch.ones(3, 3).double(), torch.arange(9.0).double().view(3, 3), torch.rand(3, 3).double(), torch.tensor([2, 0, 1])
    rows = {"flip": s.flip(0), "transpose": s.t(), "rows": s[i], "shift": torch.cat([s[:1], s[:2]]), "last": s[2:].expand(3, 3),
            "roll": s.roll(1, 0), "itself": s, "other": t.t()}  # fmt: skip
    model, mine = _C.Model.from_text(text), [a.clone() for a in (x, s, t, i)]
    v = model.variant(bytes([1, 0, 0, 0]), bytes([1]), None)
    run = model.forward(v, mine, 0)
    assert run.resume() is None
    assert torch.equal(mine[1], rows[way]) and torch.equal(mine[2], s.flip(1))
    state, arena = run.state()
    back = state.backward(arena, mine, run.outputs(), [torch.ones_like(x)])
    assert back.resume() is None
    torch.testing.assert_close(dict(back.grads(0))[0], (x * s * t).cos() * s * t)


def test_every_size_is_in_the_key() -> None:
    """Sizes that are values of inputs: those of one call must not be taken for another's, whatever their sums and
    products."""
    text = ("graph {\n sym a = value of n\n sym b = value of k\n input n: i64[]\n input k: i64[]\n x = fill() {shape=[a], value=1.0, dtype=f64}\n"
            " z = fill() {shape=[b], value=2.0, dtype=f64}\n output x\n output z\n}")  # fmt: skip
    model = _C.Model.from_text(text)
    v = model.variant(bytes(2), bytes(2), None)
    for a, b in [(5, 7), (7, 5), (6, 9), (2, 1000005), (3, 2), (1, 2000008), (4, 4)]:
        run = model.forward(v, [torch.tensor(a), torch.tensor(b)], 0)
        assert run.resume() is None
        assert [len(t) for t in run.outputs()] == [a, b]


@pytest.mark.parametrize("knob", ["ORTMODULE_NO_REUSE", "ORTMODULE_POISON"])
def test_bits_do_not_depend_on_dead_memory(knob):
    """No reuse and no in-place: the same bits. Dead storage filled with NaN bytes: nothing stale is read."""
    code = "import test_plan as t\nfor s in range(2000, 2060): t.compare(s)\nfor s in range(2060, 2090): t.compare(s, [0, s % 2, 1 - s % 2, 0])"
    env = {**os.environ, knob: "1", "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__), str(engine.ROOT / "tests"), str(engine.ROOT)])}
    res = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert res.returncode == 0, res.stderr[-3000:]


def test_plans_in_use_outlive_the_cache() -> None:
    """More shapes than the cache holds while one run waits: it ends well, and so does a backward from the state of
    another; an arena that is not that state's is refused."""
    model = _C.Model.from_text("graph {\n sym s = x[0]\n input x: f64[s]\n y = tanh(x)\n output y\n}")
    v = model.variant(bytes([1]), bytes([1]), None)
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    first = model.forward(v, [x], 0)
    done = model.forward(v, [x], 0)
    assert done.resume() is None
    outs, (state, arena) = done.outputs(), done.state()
    del done
    for n in range(8, 8 + 600):
        assert model.forward(v, [torch.zeros(n, dtype=torch.float64)], 0).resume() is None
    assert len(model.plan_report()) == 512
    assert first.resume() is None
    assert torch.equal(first.outputs()[0], x.tanh())
    del first
    dy = torch.ones(7, dtype=torch.float64)
    for wrong in (torch.zeros(64, dtype=torch.uint8), arena.to(torch.int8), torch.cat([arena, arena, arena])[: arena.numel() + 1]):
        if wrong.dtype != torch.uint8 or wrong.shape != arena.shape:
            with pytest.raises(ValueError, match="not the state of a forward of this graph and variant"):
                state.backward(wrong, [x], outs, [dy])
    back = state.backward(arena, [x], outs, [dy])
    del state, model
    assert back.resume() is None
    torch.testing.assert_close(back.grads(0)[0][1], 1 - x.tanh() ** 2)


def test_sizes_in_flight() -> None:
    """A loss over more sizes than the plan cache holds."""
    from ortmodule import ORTModule

    layer = torch.nn.Linear(2, 2).double()
    ours = ORTModule(torch.nn.Linear(2, 2).double())
    ours.load_state_dict(layer.state_dict())
    for m in (layer, ours):
        sum(m(torch.ones(n, 2, dtype=torch.float64)).sin().sum() for n in range(2, 540)).backward()
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in layer.parameters()])


def test_profile_of_many_threads() -> None:
    """Every call is counted, and rows can be taken while others run."""
    chain = "\n".join(f" t{i + 1} = softmax(t{i}) {{axis=1}}" for i in range(20))
    text = f"graph {{\n input t0: f32[4, 4]\n{chain}\n output t20\n}}"
    model = _C.Model.from_text(text)
    model.profile(True)
    v = model.variant(bytes(1), bytes(1), None)
    counted = []

    def work() -> None:
        for _ in range(100):
            assert model.forward(v, [torch.ones(4, 4)], 0).resume() is None

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        counted += model.profile(True)
    for t in threads:
        t.join()
    assert sum(row["count"] for row in counted + model.profile(False) if row["op"] == "softmax") == 3 * 100 * 20


def test_fork_while_other_threads_work() -> None:
    """A child that is forked while another thread plans and takes blocks finds the locks free."""
    model = _C.Model.from_text("graph {\n sym s = x[0]\n input x: f64[s]\n y = tanh(x)\n output y\n}")
    v = model.variant(bytes([1]), bytes([1]), None)
    stop = threading.Event()

    def step(n: int) -> None:
        assert model.forward(v, [torch.zeros(n, dtype=torch.float64)], 0).resume() is None

    def work() -> None:
        n = 100
        while not stop.is_set():
            n += 1
            step(n)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for i in range(25):
            child = os.fork()
            if not child:
                signal.alarm(20)
                step(1 + i)  # too few for OpenMP, whose threads do not live on in a child
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for t in threads:
            t.join()


def test_blocks_are_counted_anew_after_a_trim() -> None:
    block = torch.zeros(1 << 20, dtype=torch.float64)
    model = _C.Model.from_text("graph {\n input x: f64[1048576]\n y = neg(x)\n output y\n}")
    run = model.forward(model.variant(bytes(1), bytes(1), None), [block], 0)
    assert run.resume() is None
    del run
    assert _C.pool_stats()["peak_live"] >= block.nbytes
    _C.pool_trim()
    stats = _C.pool_stats()
    assert stats["peak_live"] == stats["live"] and stats["free"] == 0


@pytest.mark.parametrize("n", [16368, 16369, 16383, 16384])
def test_blocks_around_the_smallest_mapping_come_back(n: int) -> None:
    """What is below 64 KiB only before it is rounded up is a mapping, and is handed out again."""
    x = torch.zeros(n)
    model = _C.Model.from_text(f"graph {{\n input x: f32[{n}]\n y = neg(x)\n output y\n}}")

    def step() -> None:
        run = model.forward(model.variant(bytes(1), bytes(1), None), [x], 0)
        assert run.resume() is None and run.outputs()[0].shape == (n,)

    step()
    before = _C.pool_stats()
    for _ in range(5):
        step()
    after = _C.pool_stats()
    assert (after["free"], after["live"], after["mapped"]) == (before["free"], before["live"], before["mapped"])


def test_a_run_is_only_started_by_a_model() -> None:
    with pytest.raises(TypeError):
        _C.Run()
