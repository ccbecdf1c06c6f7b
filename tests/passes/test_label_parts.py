"""The label_parts pass: a loss over a part of the positions is one over all of them, of which the others are ignored."""

from __future__ import annotations

import pytest
import torch
from device import steps
from torch import Tensor

import engine

B, T, D, V = 3, 5, 4, 300
CASES = {
    # (axis, start, end, in between, a cast, its sizes)
    "all but the last": (1, 0, 4, ""),
    "all but the first": (1, 1, 5, ""),
    "in the middle": (1, 1, 3, ""),
    "some sequences": (0, 1, 3, ""),
    "nothing cut": (1, 0, 5, ""),
    "a cast behind it": (1, 0, 4, "cast"),
}


def text_of(name: str, logits: bool = False) -> str:
    axis, start, end, cast = CASES[name]
    b, t = (end - start, T) if axis == 0 else (B, end - start)
    d = "f32" if cast else "f64"
    return "\n".join(["graph {", f"  input x: {d}[{B}, {T}, {D}]", f"  input labels: i64[{b}, {t}]", f"  param w: {d}[{D}, {V}]", "  l = matmul(x, w, _)",
                      f"  p = slice(l) {{axis={axis}, start=[{start}], end=[{end}], step=1}}", *(["  c = cast(p) {to=f64}"] * bool(cast)),
                      f"  f = reshape({'c' if cast else 'p'}) {{shape=[{b * t}, {V}]}}", f"  y = reshape(labels) {{shape=[{b * t}]}}",
                      "  loss, lse, denom = cross_entropy(f, y, _) {ignore_index=-100, reduction=1}", "  output loss", *(["  output l"] * logits), "}"])  # fmt: skip


def given(name: str, density: float, seed: int = 0) -> list[Tensor]:
    axis, start, end, cast = CASES[name]
    g = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if cast else torch.float64
    shape = (end - start, T) if axis == 0 else (B, end - start)
    labels = torch.where(torch.rand(shape, generator=g) < density, torch.randint(V, shape, generator=g), -100)
    return [torch.randn(B, T, D, generator=g).to(dtype), labels, torch.randn(D, V, generator=g).to(dtype)]


def eager(name: str, ins: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    axis, start, end, _ = CASES[name]
    x, w = (ins[i].clone().requires_grad_() for i in (0, 2))
    logits = (x @ w).double()
    part = logits[start:end] if axis == 0 else logits[:, start:end]
    loss = torch.nn.functional.cross_entropy(part.reshape(-1, V), ins[1].view(-1))
    return loss.detach(), list(torch.autograd.grad(loss, [x, w]))


@pytest.mark.parametrize("name", list(CASES))
def test_parts(name: str) -> None:
    g = engine.Graph.parse(text_of(name)).apply("simplify", "label_parts", "dce").verify()
    assert "slice(" not in g.text() and ("pad(" in g.text()) == (name != "nothing cut"), g.text()
    ins = given(name, 0.5)
    loss, grads = eager(name, ins)
    tol = 1e-5 if ins[0].dtype == torch.float32 else 1e-10
    (got,), dxs = engine.run(g, ins, [1, 0, 1], [torch.ones((), dtype=torch.float64)])
    torch.testing.assert_close(got, loss, rtol=tol, atol=0)
    for a, b in zip(dxs, grads):
        torch.testing.assert_close(a, b, rtol=10 * tol, atol=tol)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_then_rows_are_chosen(name: str, logits: bool) -> None:
    for device in ("cpu", "checking"):
        model = steps.Model.text(steps.cx(device), text_of(name, logits))
        for k, density in enumerate((0.3, 0.0, 1.0)):
            ins = given(name, density, k)
            loss, grads = eager(name, ins)
            step = model.step(ins, [1, 0, 1], [torch.ones((), dtype=torch.float64), *([None] * logits)])
            tol = 1e-5 if ins[0].dtype == torch.float32 else 1e-10
            torch.testing.assert_close(step.outputs[0], loss, rtol=tol, atol=0, equal_nan=True)
            for i, e in zip((0, 2), grads):
                torch.testing.assert_close(step.grads[i], e, rtol=10 * tol, atol=tol)
        variant = model.print(0)
        assert variant.count("select_rows(") == 1 and "slice_put" not in variant
        model.free()


@pytest.mark.parametrize("change", [("step=1", "step=2"), ("axis=1", "axis=2")])
def test_left_alone(change: tuple[str, str]) -> None:
    """Every second position; a part of the classes."""
    text = text_of("all but the last").replace(*change)
    text = text.replace("end=[4], step=2", "end=[5], step=2").replace("12", "9").replace("[3, 4]", "[3, 3]") if change[0] == "step=1" else (
        text.replace("start=[0], end=[4]", "start=[0], end=[290]").replace("12, 300", "15, 290").replace("[12]", "[15]").replace("[3, 4]", "[3, 5]"))  # fmt: skip
    g = engine.Graph.parse(text).apply("label_parts", "dce").verify()
    assert "pad(" not in g.text() and "slice(" in g.text()
