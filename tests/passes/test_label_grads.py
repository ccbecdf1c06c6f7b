"""The label_grads pass: the gradient of a head whose logits are results is made of the rows whose label counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device import steps
from sparse_heads import CLASSES, DENSITIES, HEADS, Head, compare

import engine


def chosen(head: Head, wanted: list[int], arriving: list[int]) -> list[str]:
    g = engine.Graph.parse(head.text()).grad(wanted, arriving).apply("simplify", "fold", "cse", "label_grads", "dce").verify()
    return [ln.split(" = ")[1].split("(")[0] for ln in g.text().splitlines() if " = " in ln and "(" in ln and "const" not in ln]


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("device", ["cpu", "checking"])
@pytest.mark.parametrize("name", list(HEADS))
def test_heads(name: str, device: str, drop: bool) -> None:
    """The logits are there in full; when nobody holds them, rows of the gradient lie where they were."""
    head = replace(HEADS[name], logits=True)
    ops = chosen(head, [1, 0, 1, int(head.bias), 0], [1, 0])
    assert ops.count("select_rows") == 1 and ops.count("restore") == 1, ops
    model = steps.Model.text(steps.cx(device), head.text())
    for k, density in enumerate(DENSITIES):
        for rows in (7, 1, 12):
            compare(head, model, head.given(density, rows, seed=k), f"{density} of {rows}", again=k % 2, drop=drop)
    model.free()


def test_each_gradient_alone() -> None:
    head = Head(logits=True)
    for wanted in ([1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 0, 1, 0, 0], [0, 0, 1, 1, 0]):
        ops = chosen(head, wanted, [1, 0])
        assert ("select_rows" in ops) == (wanted != [0, 0, 0, 1, 0]), (wanted, ops)  # a sum alone is not worth it
        ins = head.given(0.4)
        _, grads = head.eager(ins)
        model = steps.Model.text(steps.cx("cpu"), head.text())
        step = model.step(ins, wanted, [torch.ones((), dtype=torch.float64), None])
        for i, g in zip((0, 2, 3), grads):
            if wanted[i]:
                torch.testing.assert_close(step.grads[i], g, rtol=1e-9, atol=1e-13)
        model.free()


def test_a_gradient_of_the_logits_from_outside() -> None:
    """It is added to that of the loss: no row is zero then."""
    head = Head(logits=True)
    assert "select_rows" not in chosen(head, [1, 0, 1, 1, 0], [1, 1])
    ins = head.given(0.4)
    x, labels, w, b, _ = (t.clone().requires_grad_(t.is_floating_point()) for t in ins)
    logits = x @ w.t() + b
    loss = torch.nn.functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
    dy = torch.randn_like(logits)
    want = torch.autograd.grad([loss, logits], [x, w, b], [torch.ones_like(loss), dy])
    step = steps.Model.text(steps.cx("cpu"), head.text()).step(ins, [1, 0, 1, 1, 0], [torch.ones((), dtype=torch.float64), dy])
    for i, g in zip((0, 2, 3), want):
        torch.testing.assert_close(step.grads[i], g, rtol=1e-9, atol=1e-12)


def test_another_reader_of_the_logits_that_has_a_gradient() -> None:
    head = Head(used=True)
    assert "select_rows" not in chosen(head, [1, 0, 1, 1, 0], [1, 1])
    assert "select_rows" in chosen(head, [1, 0, 1, 1, 0], [1, 0])
    compare(head, steps.Model.text(steps.cx("cpu"), head.text()), head.given(0.4), "both")


def test_many_rows_in_the_place_of_the_logits() -> None:
    """Rows move up over the logits that they are made of, in pieces of columns, with the bits of memory of their own."""
    head = Head(dtype="f32", logits=True)
    text = head.text().replace(str(CLASSES), "10500")
    model = steps.Model.text(steps.cx("cpu"), text)
    g = torch.Generator().manual_seed(5)
    for density in (0.05, 0.5, 0.9):
        labels = torch.where(torch.rand(20, 3, generator=g) < density, torch.randint(10500, (20, 3), generator=g), -100)
        ins = [torch.randn(20, 3, 5, generator=g), labels, torch.randn(10500, 5, generator=g), torch.randn(10500, generator=g), torch.rand(10500)]
        held, lent = (model.step(ins, [1, 0, 1, 1, 0], [torch.ones(()), None], drop=drop) for drop in (False, True))
        x, w, b = (ins[i].double().requires_grad_() for i in (0, 2, 3))
        loss = torch.nn.functional.cross_entropy((x @ w.t() + b).view(-1, 10500), labels.view(-1))
        want = torch.autograd.grad(loss, [x, w, b])
        for i, e in zip((0, 2, 3), want):
            assert torch.equal(held.grads[i], lent.grads[i])
            torch.testing.assert_close(held.grads[i].double(), e, rtol=1e-4, atol=1e-5 * e.abs().max().item())
    model.free()


def test_interpreted() -> None:
    for name, head in HEADS.items():
        if head.dtype != "f64" or head.scale != 1 or head.reduction != 1:
            continue
        head = replace(head, logits=True)
        ins = head.given(0.5)
        outs, grads = head.eager(ins)
        wanted = [1, 0, 1, int(head.bias), 0]
        j = engine.Graph.parse(head.text()).grad(wanted, [1, 0]).apply("simplify", "label_grads", "dce").verify()
        assert "select_rows" in j.text(), name
        for a, b in zip(j.run([*ins, torch.ones((), dtype=torch.float64)], 2 + sum(wanted)), [*outs, *grads]):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name
