"""Update nodes in a plan: the interpreter's bits, in the memory of the weights where that is allowed and only there
(rules: csrc/run/plan.h)."""

from __future__ import annotations

import pytest
import torch
from graphs import STEPS, random_update, scalars
from onnx_models import written as onnx_of

import engine

_C = pytest.importorskip("ortmodule._C")


def run_plan(text: str, ins: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], _C.Model]:
    """(outputs, inputs afterwards, model)"""
    model = _C.Model.from_text(text)
    mine = [t.clone(memory_format=torch.preserve_format) for t in ins]
    run = model.forward(model.variant(bytes(len(ins)), bytes(len(model.outputs))), mine, 0)
    assert run.resume() is None
    return run.outputs(), mine, model


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def compare(seed: int) -> int:
    text, ins = random_update(seed)
    outs, after, model = run_plan(text, ins)
    want = engine.run(text, ins)[0]
    for i, y in enumerate(outs):
        assert same(y, want[i]), f"output {i}\n{text}"
    expect = list(ins)
    names = [line.split()[1].rstrip(":") for line in text.splitlines() if line.split()[0] in ("input", "param", "buffer")]
    for i, line in enumerate(w for w in text.splitlines() if w.startswith("  write ")):
        expect[names.index(line.split()[3])] = want[len(outs) + i]
    for name, a, b in zip(names, after, expect):
        assert same(a, b), f"{name} afterwards\n{text}"
    return model.plan_report()[0]["arena_bytes"]


@pytest.mark.parametrize("block", range(8))
def test_update_plans_equal_the_interpreter(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        compare(seed)


SIZE = 4096


def one_step(op: str, extra: str = "", write: bool = True) -> tuple[str, list[torch.Tensor]]:
    takes, makes = STEPS[op]
    takes, makes = takes.replace("h", ""), makes
    lines = [f"  param {k}: f64[{SIZE}]" for k in takes]
    operands = ", ".join(takes) + (", _" if op == "lamb_step" else "")
    outs = (["s"] if op == "lamb_step" else []) + [f"{k}1" for k in makes]
    writes = [f"  write {k}1 -> {k}" for k in makes if k in takes] if write else []
    outputs = [] if write else [f"  output {k}1" for k in makes if k in takes]
    step = f"  {', '.join(outs)} = {op}({scalars(op)}, {operands}) {{out_dtype=[{', '.join('0' * len(outs))}]}}"
    text = "\n".join(["graph {", "  input lr: f32[]", "  input step: i64[]", "  input on: bool[]", *lines, step, extra, *writes, *outputs, "}"])
    gen = torch.Generator().manual_seed(1)
    return text, [torch.tensor(0.01), torch.tensor(3), torch.tensor(True), *(torch.rand(SIZE, generator=gen, dtype=torch.float64) for _ in takes)]


@pytest.mark.parametrize("op", list(STEPS))
def test_step_takes_no_memory(op: str) -> None:
    text, ins = one_step(op)
    _, after, model = run_plan(text, ins)
    assert model.plan_report()[0]["arena_bytes"] < 8 * SIZE
    assert not torch.equal(after[3], ins[3])
    want, _ = engine.run(text, ins)
    for got, x in zip([after[3 + "wgmv".index(k)] if op != "sgd_step" else after[3] for k in STEPS[op][1] if k != "h"], want):
        assert torch.equal(got, x)


@pytest.mark.parametrize("op", list(STEPS))
def test_step_read_from_onnx(op: str) -> None:
    """The file's write list is the in-place aliasing of com.microsoft's operators."""
    text, ins = one_step(op)
    data = onnx_of(engine.Graph.parse(text))
    want = engine.run_onnx(data, ins)[0]
    model = _C.Model(data)
    mine = [x.clone() for x in ins]
    where = [x.data_ptr() for x in mine]
    assert model.forward(model.variant(bytes(len(ins)), b""), mine, 0).resume() is None
    assert model.plan_report()[0]["arena_bytes"] < 8 * SIZE
    assert where == [x.data_ptr() for x in mine] and not torch.equal(mine[3], ins[3])
    assert all(torch.equal(mine[to], x) for to, x in zip(model.writes, want))


@pytest.mark.parametrize("extra", ["  y = tanh(w)\n  y2 = add(y, w1)\n  output y2", "  output w", "  u = reshape(w) {shape=[64, 64]}\n  output u"])
def test_old_values_still_to_be_had(extra: str) -> None:
    """Who needs the old weight gets it: the step then copies."""
    text, ins = one_step("adamw_step", extra)
    outs, after, _ = run_plan(text, ins)
    want, _ = engine.run(text, ins)
    assert torch.equal(outs[0], want[0])
    assert torch.equal(after[3], want[1])


def test_forward_is_not_repeated() -> None:
    text, ins = one_step("sgd_step")
    model = _C.Model.from_text(text)
    run = model.forward(model.variant(bytes(len(ins)), b""), ins, 0, write=False)
    with pytest.raises(ValueError, match="cannot be repeated"):
        run.resume()


def test_gradients_want_a_graph_of_their_own() -> None:
    text = "graph {\n param w: f64[3]\n buffer b: f64[3]\n y = tanh(w)\n n = accumulate(b, y)\n output y\n write n -> b\n}"
    model = _C.Model.from_text(text)
    with pytest.raises(RuntimeError, match="graph of its own"):
        model.forward(model.variant(bytes([1, 0]), bytes([1])), [torch.ones(3, dtype=torch.float64)] * 2, 0)


def test_text_keeps_the_phase() -> None:
    text, _ = one_step("adamw_step", "  y = tanh(w1)\n  output y")
    g = engine.Graph.parse(text).verify()
    assert g.text().count(" update") == 2
    assert engine.Graph.parse(g.text()).verify().text() == g.text()
    with pytest.raises(engine.EngineError, match="phase is update"):
        engine.Graph.parse("graph {\n param w: f64[3]\n y = accumulate(w, w) backward\n output y\n}").verify()
