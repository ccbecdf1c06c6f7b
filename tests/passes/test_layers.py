"""The layers pass: transformer layers are computed again from their inputs (memory level 1), with the same bits."""

from __future__ import annotations

import pytest
import torch

import engine

TEXT = """graph {
  input x: f64[2, 5, 6]
  param w: f64[6, 6]
  param s: f64[6]
  param b: f64[6]
  buffer c: f64[6]
  n1, m1, r1 = layer_norm(x, s, b) {axis=2, epsilon=1e-5}
  k1 = matmul(n1, w, _)
  k1c = add(k1, c)
  p1 = softmax(k1c) {axis=2}
  x1 = add(x, p1)
  n2, m2, r2 = layer_norm(x1, s, b) {axis=2, epsilon=1e-5}
  k2 = matmul(n2, w, _)
  p2 = softmax(k2) {axis=2}
  x2 = add(x1, p2)
  o = tanh(x2)
  cc = reduce_sum(k2) {axes=[0, 1], keepdims=0}
  write cc -> c
  output o
}"""


def test_a_layer_is_computed_again_from_its_input() -> None:
    """The first layer is computed again from x, but not what reads c: it is overwritten before backward runs. The
    second layer is the last."""
    g = engine.Graph.parse(TEXT).grad([1, 1, 1, 1, 0], [1])
    gen = torch.Generator().manual_seed(0)
    ins = [torch.randn(s, generator=gen, dtype=torch.float64) for s in [(2, 5, 6), (6, 6), (6,), (6,), (6,), (2, 5, 6)]]
    want = engine.Graph.parse(TEXT).grad([1, 1, 1, 1, 0], [1]).run(ins, 6)
    g.apply("simplify", "cse", "layers", "dce").verify()
    for a, b in zip(g.run(ins, 6), want, strict=True):
        assert torch.equal(a, b)
    again = [line.split(" = ")[1].split("(")[0] for line in g.text().splitlines() if " backward" in line and " = " in line]
    assert again.count("layer_norm") == 2  # both: the second one is cheap
    reads = [line for line in g.text().splitlines() if " backward" in line and ("add(" in line or "softmax(" in line) and ", c)" in line]
    assert not reads, g.text()


def test_levels_of_one_model_side_by_side() -> None:
    """What is computed again is part of what a variant is asked by: the model's own level is only the default."""
    _C = pytest.importorskip("ortmodule._C")
    model, wanted = _C.Model.from_text(TEXT), bytes([1, 1, 1, 1, 0])
    first = model.variant(wanted, b"\1")
    layers = model.variant(wanted, b"\1", None, 1)
    assert layers != first and model.variant(wanted, b"\1", None, 0) == first == model.variant(wanted, b"\1")
    assert model.variant(wanted, b"\1", None, 1) == layers
    assert model.text(layers).count("backward") > model.text(first).count("backward")
    gen = torch.Generator().manual_seed(0)
    ins = [torch.randn(s, generator=gen, dtype=torch.float64) for s in [(2, 5, 6), (6, 6), (6,), (6,), (6,)]]
    dy = torch.randn(2, 5, 6, generator=gen, dtype=torch.float64)
    results = []
    for v in (first, layers, first):
        mine = [t.clone() for t in ins]
        run = model.forward(v, mine, 3)
        assert run.resume() is None
        outs, (state, arena), info = run.outputs(), run.state(), model.variant_info(v)
        reads = [t if i in info["reads_inputs"] else None for i, t in enumerate(mine)]
        back = state.backward(arena, reads, [o if i in info["reads_outputs"] else None for i, o in enumerate(outs)], [dy])
        assert back.resume() is None
        results.append([outs[0].clone(), mine[4], *[g for _, g in back.grads(0)]])
    assert len(results[0]) == 6
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    for level in (-1, 2):
        with pytest.raises(ValueError, match=f"memory_level={level} is not allowed; give 0 or 1"):
            model.variant(wanted, b"\1", None, level)
