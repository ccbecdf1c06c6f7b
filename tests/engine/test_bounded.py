"""Sizes that only the data knows (graph/engine.h): rows are selected, layers run on as many as there are, and they are put
back. Random graphs over the operators that understand such a size: eager on exactly these rows, the interpreter, the plan
(with dead memory filled with NaN, too) and the checking device."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device import steps

import engine
from opcheck import rand

TESTS = Path(__file__).resolve().parents[1]
HEAD = ["  sym s0 = x[0]", "  input x: f64[s0, 4]", "  input mask: bool[s0]", "  param w: f64[4, 4]", "  param b: f64[4]", "  param q: f64[4, 3]"]
SELECT = "  idx, count = select_rows(mask) {count=[c0]}"
WANTED = [1, 0, 1, 1, 1]

Eager = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def random_graph(seed: int) -> tuple[str, list[tuple[str, Eager]], list[str]]:
    """(text, steps in eager, outputs). Values r* have count rows of 4 numbers, t* of 3, v* none."""
    r = random.Random(seed)
    lines = ["graph {", *HEAD, SELECT, "  r0 = compress(x, idx, count)"]
    todo: list[tuple[str, Eager]] = [("r0", lambda v: v["x"][v["mask"]])]
    full, thin, flat = ["r0"], [], []

    def put(name: str, text: str, fn: Eager) -> str:
        lines.append(f"  {name} = {text}")
        todo.append((name, fn))
        return name

    for n in range(r.randint(2, 9)):
        a, b, name, kind = r.choice(full), r.choice(full), f"r{n + 1}", r.randrange(14)
        if kind == 0:
            op = r.choice(["tanh", "sin", "cos", "sigmoid"])
            full.append(put(name, f"{op}({a})", lambda v, a=a, op=op: getattr(torch, op)(v[a] * 1.0)))
        elif kind == 1:
            op = r.choice(["add", "mul", "sub"])
            full.append(put(name, f"{op}({a}, {b})", lambda v, a=a, b=b, op=op: getattr(torch, op)(v[a], v[b])))
        elif kind == 2:
            full.append(put(name, f"add({a}, b)", lambda v, a=a: v[a] + v["b"]))
        elif kind == 3:
            full.append(put(name, f"matmul({a}, w, _)", lambda v, a=a: v[a] @ v["w"]))
        elif kind == 4:
            full.append(put(name, f"matmul({a}, w, b)", lambda v, a=a: v[a] @ v["w"] + v["b"]))
        elif kind == 5:
            op = r.choice(["softmax", "log_softmax"])
            full.append(put(name, f"{op}({a}) {{axis=1}}", lambda v, a=a, op=op: getattr(torch, op)(v[a], 1)))
        elif kind == 6:
            lines.append(f"  {name}, m{n}, s{n} = layer_norm({a}, b, b) {{axis=1, eps=1e-5}}")
            todo.append((name, lambda v, a=a: torch.nn.functional.layer_norm(v[a], (4,), v["b"], v["b"], 1e-5)))
            full.append(name)
        elif kind == 7:
            put(f"m{n}", f"reduce_mean({a}) {{axes=[1], keepdims=1}}", lambda v, a=a: v[a].mean(1, keepdim=True))
            full.append(put(name, f"sub({b}, m{n})", lambda v, b=b, n=n: v[b] - v[f"m{n}"]))
        elif kind == 8:
            thin.append(put(f"t{n}", f"matmul({a}, q, _)", lambda v, a=a: v[a] @ v["q"]))
        elif kind == 9:  # over the rows
            flat.append(put(f"v{n}", f"reduce_sum({a}) {{axes=[0]}}", lambda v, a=a: v[a].sum(0)))
        elif kind == 10:  # back to all rows
            put(f"x{n}", f"permute({a}) {{perm=[1, 0]}}", lambda v, a=a: v[a].t())
            flat.append(put(f"v{n}", f"matmul(x{n}, {b}, _)", lambda v, b=b, n=n: v[f"x{n}"] @ v[b]))
        elif kind == 11 and flat:
            y = r.choice(flat)
            put(f"z{n}", f"reduce_sum({y}) {{axes=[0]}}", lambda v, y=y: v[y].sum(0))
            full.append(put(name, f"add({a}, z{n})", lambda v, a=a, n=n: v[a] + v[f"z{n}"]))
        elif kind == 12:
            put(f"p{n}", f"reshape({a}) {{shape=[c0, 2, 2]}}", lambda v, a=a: v[a].reshape(-1, 2, 2))
            put(f"o{n}", f"permute(p{n}) {{perm=[0, 2, 1]}}", lambda v, n=n: v[f"p{n}"].transpose(1, 2))
            full.append(put(name, f"reshape(o{n}) {{shape=[c0, 4]}}", lambda v, n=n: v[f"o{n}"].reshape(-1, 4)))
        elif kind == 13:  # out and in again, by the same rows
            put(f"y{n}", f"restore({a}, idx, count) {{shape=[s0, 4]}}", lambda v, a=a: torch.zeros_like(v["x"]).masked_scatter(v["mask"][:, None], v[a]))
            put(f"u{n}", f"add(y{n}, x)", lambda v, n=n: v[f"y{n}"] + v["x"])
            full.append(put(name, f"compress(u{n}, idx, count)", lambda v, n=n: v[f"u{n}"][v["mask"]]))
    last = full[-1]
    put("y", f"restore({last}, idx, count) {{shape=[s0, 4]}}", lambda v: torch.zeros_like(v["x"]).masked_scatter(v["mask"][:, None], v[last]))
    outs = ["y", *flat]
    if thin:
        put("t", f"restore({thin[-1]}, idx, count) {{shape=[s0, 3]}}",
            lambda v: torch.zeros(len(v["x"]), 3, dtype=torch.float64).masked_scatter(v["mask"][:, None], v[thin[-1]]))  # fmt: skip
        outs.append("t")
    return "\n".join([*lines, *(f"  output {o}" for o in outs), "}"]), todo, outs


def given(seed: int, rows: int, chance: float) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, generator=g) < chance
    return [torch.randn(rows, 4, generator=g, dtype=torch.float64), mask, *(torch.randn(*s, generator=g, dtype=torch.float64) / 2 for s in ((4, 4), (4,), (4, 3)))]


def eager(todo: list[tuple[str, Eager]], outs: list[str], ins: list[torch.Tensor], dys: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in ins]
    v = dict(zip(("x", "mask", "w", "b", "q"), leaves))
    for name, fn in todo:
        v[name] = fn(v)
    ys = [v[o] for o in outs]
    dys = dys or [torch.zeros_like(y) for y in ys]
    grads = torch.autograd.grad(ys, [leaves[i] for i in (0, 2, 3, 4)], dys, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in ys], list(grads)


def differs(seed: int, device: str) -> str | None:
    """One random graph, one model, several counts: none, all, some."""
    text, todo, outs = random_graph(seed)
    model = steps.Model.text(steps.cx(device), text)
    planned = set()
    for k, (rows, chance) in enumerate([(7, 0.5), (7, 0.0), (7, 1.0), (7, 0.3), (1, 1.0), (0, 0.5)]):
        ins = given(seed + k, rows, chance)
        ys, _ = eager(todo, outs, ins, [])
        g = torch.Generator().manual_seed(seed)
        dys = [torch.randn(y.shape, generator=g, dtype=torch.float64) for y in ys]
        ys, grads = eager(todo, outs, ins, dys)
        step = model.step(ins, WANTED, list(dys), again=k % 2, drop=k % 3 == 1)
        res, _ = engine.run(text, ins) if k < 2 else (step.outputs, [])
        got = [step.grads[i] if i in step.grads else torch.zeros_like(ins[i]) for i in (0, 2, 3, 4)]
        for what, a, b in (("output", ys, step.outputs), ("gradient", grads, got), ("interpreted", ys, res)):
            for i, (s, t) in enumerate(zip(a, b, strict=True)):
                if not torch.allclose(s, t, rtol=1e-9, atol=1e-9):
                    return f"{what} {i}, {rows} rows, {int(ins[1].sum())} of them\n{text}\n{s}\n{t}"
        planned.add((rows, chance))
    model.free()
    return None


@pytest.mark.parametrize("device", ["cpu", "checking"])
@pytest.mark.parametrize("block", range(3))
def test_random_graphs(block: int, device: str) -> None:
    for seed in range(block * 20, block * 20 + 20):
        assert not (found := differs(seed, device)), f"seed {seed}: {found}"


@pytest.mark.parametrize("setting", ["ORTMODULE_POISON", "ORTMODULE_NO_REUSE"])
def test_random_graphs_while_debugging(setting: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS}/engine:{TESTS.parent}", "ORTMODULE_VERIFY": "1", setting: "1"}
    source = "import test_bounded as t\nfor seed in range(60, 75):\n f = t.differs(seed, 'cpu')\n assert not f, (seed, f)\nprint('done')"
    res = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=500, env=env, cwd=TESTS.parent)
    assert res.stdout == "done\n", res.stderr[-3000:]


def parse(body: str, *outs: str, head: list[str] | None = None) -> engine.Graph:
    return engine.Graph.parse("\n".join(["graph {", *(HEAD if head is None else head), SELECT, body, *(f"  output {o}" for o in outs), "}"]))


def test_text() -> None:
    """The bound is printed and read back; trims stand where rows are added up, and reading them again adds none."""
    g = parse("  r = compress(x, idx, count)\n  e = exp(r)\n  v = reduce_sum(e) {axes=[0]}", "v").verify()
    text = g.text()
    assert "  sym c0 <= s0\n" in text and text.count("trim(") == 1 and "e: f64[c0, 4]" in text.replace(" = exp(r)", ""), text
    assert engine.Graph.parse(text).verify().text() == text
    clean = parse("  r = compress(x, idx, count)\n  v = reduce_sum(r) {axes=[0]}", "v").text()
    assert "trim" not in clean
    with pytest.raises(engine.EngineError, match="size c0 is at most 3, and s0 rows are selected"):
        parse("", head=["  sym c0 <= 3", *HEAD])
    with pytest.raises(engine.EngineError, match="size s0 is bounded: no graph input tells it as well"):
        engine.Graph.parse("graph {\n sym s0 = x[0]\n input x: f64[s0]\n input m: bool[4]\n i, k = select_rows(m) {count=[s0]}\n}")


def test_one_plan_for_all_counts() -> None:
    """The host does not look at the count: neither does the plan's key."""
    _C = pytest.importorskip("ortmodule._C")
    text, _, _ = random_graph(3)
    model = _C.Model.from_text(text)
    for k in range(4):
        run = model.forward(model.variant(bytes(5), bytes(len(model.outputs))), given(k, 9, k / 3), 0)
        assert run.resume() is None
    assert len(model.plan_report()) == 1


REFUSED = {
    "gather": ("  g = gather(r, idx2) {axis=0, padding_idx=-1}", "gather with bounded size c0: it does not know such sizes"),
    "sort of": ("  g = cumsum(r) {axis=0}", "cumsum with bounded size c0: it does not know"),
    "another size": ("  g = add(r, x)", "add with bounded size c0: a bounded size meets another size"),
    "mean": ("  g = reduce_mean(r) {axes=[0]}", "reduce_mean with bounded size c0: it is no sum"),
    "softmax": ("  g = softmax(r) {axis=0}", "softmax with bounded size c0: it goes along the bounded axis"),
    "norm": ("  g, m, s = layer_norm(r, _, _) {axis=0, eps=1e-5}", "layer_norm with bounded size c0: it goes over the bounded axis"),
    "merged": ("  g = reshape(r) {shape=[c0*4]}", "reshape with bounded size c0*4: a size is computed from a bounded one"),
    "contracted": ("  p = permute(r) {perm=[1, 0]}\n  g = matmul(p, x, _)", "matmul with bounded size c0: a bounded size meets another size"),
    "concat": ("  g = concat(r, r) {axis=1}", "concat with bounded size c0: it does not know such sizes"),
    "slice": ("  g = slice(r) {axis=0, start=[0], end=[1], step=1}", "slice with bounded size c0: it does not know such sizes"),
    "rows of others": ("  g = compress(b, idx, count)", "compress: x must have as many rows as the mask"),
    "no count": ("  n = iota() {shape=[1], dtype=i64}\n  z = reshape(n) {shape=[]}\n  g = compress(x, idx, z)", "compress: operand 2 is no count"),
    "nested": ("  t = reduce_sum(r) {axes=[1]}\n  m2 = gt(t, t)\n  i2, k2 = select_rows(m2) {count=[c1]}", "depends on a bounded size"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(engine.EngineError, match=message.replace("*", r"\*")):
        parse("  r = compress(x, idx, count)\n" + body, head=[*HEAD, "  input idx2: i64[2]"])


def test_the_host_gets_no_bounded_size() -> None:
    g = parse("  r = compress(x, idx, count)", "r")
    with pytest.raises(engine.EngineError, match="has the bounded size c0, which the host does not know"):
        g.verify()
    with pytest.raises(engine.EngineError, match="has the bounded size c0"):
        steps.Model.text(steps.cx("cpu"), g.text())


def test_label_sparsity() -> None:
    """What it is for: a head over the rows whose label counts, put back before the loss."""
    text = "\n".join(["graph {", *HEAD, "  input labels: i64[s0]", SELECT, "  r = compress(x, idx, count)", "  h = matmul(r, w, b)", "  a = tanh(h)",
                      "  l = matmul(a, q, _)", "  z = restore(l, idx, count) {shape=[s0, 3]}",
                      "  loss, lse, denom = cross_entropy(z, labels, _) {ignore_index=-100, reduction=1}", "  output loss", "}"])  # fmt: skip
    ins = given(5, 11, 0.4)
    labels = torch.where(ins[1], torch.arange(11) % 3, -100)
    leaves = [t.clone().requires_grad_() for t in (ins[0], *ins[2:])]
    x, w, b, q = leaves
    loss = torch.nn.functional.cross_entropy(torch.tanh(x @ w + b) @ q, labels)
    want = torch.autograd.grad(loss, leaves)
    for device in ("cpu", "checking"):
        model = steps.Model.text(steps.cx(device), text)
        step = model.step([*ins, labels], [*WANTED, 0], [torch.ones((), dtype=torch.float64)])
        assert torch.allclose(step.outputs[0], loss.detach(), rtol=1e-12)
        for i, g in zip((0, 2, 3, 4), want):
            assert torch.allclose(step.grads[i], g, rtol=1e-9, atol=1e-12)
        model.free()


def test_rows_past_the_count_are_not_read() -> None:
    """exp of rows that hold anything, log of zeros: none of it arrives."""
    body = "  r = compress(x, idx, count)\n  l = log(r)\n  v = reduce_sum(l) {axes=[0]}\n  p = permute(l) {perm=[1, 0]}\n  m = matmul(p, l, _)"
    x, mask = rand(6, 4).abs() + 0.5, torch.tensor([True, False, True, False, False, False])
    ins = [x, mask, rand(4, 4), rand(4), rand(4, 3)]
    want = torch.log(x[mask])
    g = parse(body, "v", "m").verify()
    for device in (None, "cpu", "checking"):
        (v, m), _ = engine.run(g.text(), ins, device=device) if device is None else (steps.Model.text(steps.cx(device), g.text()).step(ins).outputs, None)
        assert torch.allclose(v, want.sum(0)) and torch.allclose(m, want.t() @ want)


def test_a_product_leaves_out_what_does_not_count() -> None:
    """Two rows of 64: of the others the arena keeps the bytes it came with, 0xff on the checking device."""
    text = "\n".join(["graph {", "  sym s0 = x[0]", "  input x: f64[s0, 4]", "  input mask: bool[s0]", "  param w: f64[4, 64]", SELECT,
                      "  r = compress(x, idx, count)", "  h = matmul(r, w, _)", "  z = restore(h, idx, count) {shape=[s0, 64]}", "  output z", "}"])  # fmt: skip
    ctx, mask = steps.cx("checking"), torch.zeros(64, dtype=torch.bool)
    mask[[3, 40]] = True
    model, mem, lib = steps.Model.text(ctx, text), steps.Memory(ctx), engine.lib
    given = steps.array([mem.give(t) for t in (rand(64, 4), mask, rand(4, 64))])
    run, state, arena = steps.Pointer(), steps.Pointer(), steps.C.POINTER(steps.Block)()
    v = model.variant([1, 0, 1], [1])
    ctx.check(lib.om_run_forward(ctx.p, model.p, v, given, steps.C.c_uint64(0), True, steps.C.byref(run)))
    ctx.check(lib.om_run_resume(run, 0))
    ctx.check(lib.om_run_state(run, steps.C.byref(state), steps.C.byref(arena)))
    size = arena.contents.size
    host = steps.C.create_string_buffer(size)
    ctx.check(lib.om_checking_download(ctx.p, host, steps.Pointer(arena.contents.data), steps.C.c_size_t(size)))
    assert b"\xff" * (62 * 64 * 8) in host.raw and size >= 64 * 64 * 8
    lib.om_run_free(run)
    lib.om_state_free(state)
    lib.om_block_put(arena)
    mem.put()
    model.free()
