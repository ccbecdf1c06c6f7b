"""The label_rows pass: a head whose logits only the loss reads runs on the rows whose label counts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device import steps
from sparse_heads import CLASSES, DENSITIES, HEADS, INNER, Head, compare

import engine

TESTS = Path(__file__).resolve().parents[1]


def chosen(text: str) -> list[str]:
    """Operators after the pass."""
    g = engine.Graph.parse(text).apply("label_rows", "dce").verify()
    assert engine.Graph.parse(g.text()).verify().text() == g.text()
    return [ln.split(" = ")[1].split("(")[0] for ln in g.text().splitlines() if " = " in ln and "(" in ln and "const" not in ln]


@pytest.mark.parametrize("device", ["cpu", "checking"])
@pytest.mark.parametrize("name", list(HEADS))
def test_heads(name: str, device: str) -> None:
    """One plan of each size for all densities; rows that do not count hold what was there before."""
    head = HEADS[name]
    ops = chosen(head.text())
    assert ops.count("select_rows") == 1 and ops.index("compress") < ops.index("matmul"), ops
    model = steps.Model.text(steps.cx(device), head.text())
    for k, density in enumerate(DENSITIES):
        for rows in (7, 1, 12):
            compare(head, model, head.given(density, rows, seed=k), f"{density} of {rows}", again=k % 2)
    model.free()


def test_interpreted() -> None:
    for head in HEADS.values():
        if head.dtype != "f64":
            continue
        ins = head.given(0.5)
        want, grads = head.eager(ins)
        g = engine.Graph.parse(head.text()).apply("label_rows")
        got, dxs = engine.run(g, ins, [1, 0, 1, int(head.bias), 0], [torch.ones((), dtype=torch.float64)])
        torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=0)
        for a, b in zip(dxs, grads):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_all_rows_count() -> None:
    """Then, and when most of them do, the bits are those of the graph without the pass."""
    head = Head(dtype="f32")
    model, dense = steps.Model.text(steps.cx("cpu"), head.text()), steps.Model.text(steps.cx("cpu"), replace(head, logits=True, used=True).text())
    for density in (1.0, 0.97):
        ins = head.given(density, rows=40)
        share = (ins[1] != -100).double().mean()
        assert share == 1 if density == 1 else 0.9 < share < 1
        got = head.step(model, ins)
        want = dense.step(ins, [1, 0, 1, 1, 0], [torch.ones(()), None, None])
        assert torch.equal(got[0][0], want.outputs[0])
        for i, g in zip((0, 2, 3), got[1]):
            assert torch.equal(g, want.grads[i]), i


LEFT = {
    "logits are a result": Head(logits=True).text(),
    "somebody else reads them": Head(used=True).text(),
    "no reduction": Head(reduction=0).text(),
    "few classes": Head().text().replace(str(CLASSES), "200"),
    "lse is read": Head().text().replace("output loss", "output loss\n  output lse"),
    "a tanh over rows put together": Head().text().replace("f = reshape(l)", "c = concat(l, l) {axis=2}\n  s = slice(c) {axis=2, start=[0], end=[300], step=1}"
                                                         "\n  f = reshape(s)"),  # fmt: skip
    "rows in another order": Head().text().replace("f = reshape(l)", "p = permute(l) {perm=[1, 0, 2]}\n  f = reshape(p)"),
    "dropout": Head().text().replace("f = reshape(l)", "p = dropout(l) {p=0.5} rng=1\n  f = reshape(p)"),
    "a vector per position": Head().text().replace("f = reshape(l)", "p = add(l, x2)\n  f = reshape(p)").replace(
        "  param w", f"  input x2: f64[{INNER}, {CLASSES}]\n  param w"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LEFT))
def test_left_alone(name: str) -> None:
    assert "select_rows" not in chosen(LEFT[name])


def test_what_all_rows_share_is_added_to_each() -> None:
    text = Head().text().replace("f = reshape(l)", "p = add(l, cw)\n  q = tanh(p)\n  f = reshape(q)")
    assert "select_rows" in chosen(text)
    ins = Head().given(0.4)
    x, labels, w, b, cw = (t.clone().requires_grad_(t.is_floating_point()) for t in ins)
    loss = torch.nn.functional.cross_entropy(torch.tanh(x @ w.t() + b + cw).view(-1, CLASSES), labels.view(-1))
    want = torch.autograd.grad(loss, [x, w, b, cw])
    for device in ("cpu", "checking"):
        model = steps.Model.text(steps.cx(device), text)
        step = model.step(ins, [1, 0, 1, 1, 1], [torch.ones((), dtype=torch.float64)])
        torch.testing.assert_close(step.outputs[0], loss.detach(), rtol=1e-12, atol=0)
        for i, g in zip((0, 2, 3, 4), want):
            torch.testing.assert_close(step.grads[i], g, rtol=1e-9, atol=1e-13)
        model.free()


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_out_of_range(label: int) -> None:
    for head in (Head(), Head(logits=True)):
        ins = head.given(0.5)
        ins[1][2, 1] = label
        model = steps.Model.text(steps.cx("cpu"), head.text())
        with pytest.raises(engine.EngineError, match=rf"cross_entropy: label {label} in row \d+; 0 to {CLASSES - 1} or ignore_index -100 are allowed"):
            head.step(model, ins)
        model.free()


@pytest.mark.parametrize("setting", ["ORTMODULE_POISON", "ORTMODULE_NO_REUSE"])
def test_while_debugging(setting: str) -> None:
    """Dead memory filled with NaN."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS}/passes:{TESTS.parent}", "ORTMODULE_VERIFY": "1", setting: "1"}
    source = "import test_label_rows as t, test_label_grads as g\nfor n in t.HEADS:\n t.test_heads(n, 'cpu')\n g.test_heads(n, 'cpu', True)\nprint('done')"
    res = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=500, env=env, cwd=TESTS.parent)
    assert res.stdout == "done\n", res.stderr[-3000:]
