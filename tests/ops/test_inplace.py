"""Operators that may write over an operand: the plan, which lets them, gives what the interpreter gives, which never
does."""

from __future__ import annotations

import pytest
import torch

import engine

_C = pytest.importorskip("ortmodule._C")

GRAPHS = {
    "tied embedding and loss": """graph {
  input i: i64[7]
  input l: i64[7]
  param w: f64[11, 5]
  x = gather(w, i) {axis=0, padding_idx=3}
  t = permute(w) {perm=[1, 0]}
  y = matmul(x, t)
  a, b, c = cross_entropy(y, l) {reduction=1, label_smoothing=0.1}
  output a
}""",
    "batch norm": """graph {
  input x: f64[7, 3, 5]
  param w: f64[3]
  e = exp(x)
  f = sin(e)
  y, m, v, a, b = batch_norm(f, w) {training=1}
  z = tanh(y)
  output z
}""",
    "scatters, one of them reading what it writes": """graph {
  input x: f64[7, 3]
  input i: i64[5, 1]
  input j: i64[7, 3]
  e = exp(x)
  s = scatter_elements(e, j, e) {axis=0, reduce=1}
  g = gather_nd(s, i)
  q = sin(s)
  r = slice(q) {axis=0, start=[0], end=[2], step=1}
  u = slice_scatter(q, r) {axis=0, start=[3], end=[5], step=1}
  k = scatter_nd(u, i, g) {reduce=1}
  output k
}""",
}


def operand(line: str, gen: torch.Generator) -> torch.Tensor:
    dtype, dims = line.split(": ")[1].rstrip("]").split("[")
    shape = [int(d) for d in dims.split(",")]
    return torch.randint(7, shape, generator=gen) if dtype == "i64" else torch.randn(shape, dtype=torch.float64, generator=gen)


@pytest.mark.parametrize("name", GRAPHS)
def test_in_place(name: str) -> None:
    text, gen = GRAPHS[name], torch.Generator().manual_seed(5)
    ins = [operand(line, gen) for line in text.splitlines() if line.split()[0] in ("input", "param")]
    y, _ = engine.run(text, ins)
    dys = [torch.randn(y[0].shape, dtype=torch.float64, generator=gen)]
    _, want = engine.run(text, ins, None, dys)

    model = _C.Model.from_text(text)
    v = model.variant(bytes(int(t.is_floating_point()) for t in ins), b"\x01", None)
    run = model.forward(v, ins, 0)
    assert run.resume() is None
    outs, (state, arena), info = run.outputs(), run.state(), model.variant_info(v)
    torch.testing.assert_close(outs[0], y[0], rtol=1e-12, atol=0)
    given = [t if i in info["reads_inputs"] else None for i, t in enumerate(ins)]
    kept = [t if i in info["reads_outputs"] else None for i, t in enumerate(outs)]
    back = state.backward(arena, given, kept, dys)
    grads: dict[int, torch.Tensor] = {}
    for segment in range(info["segments"]):
        assert back.resume(segment) is None
        grads.update({i: g.clone() for i, g in back.grads(segment)})
    floats = [i for i, t in enumerate(ins) if t.is_floating_point()]
    assert sorted(grads) == floats
    for i, g in zip(floats, want):
        torch.testing.assert_close(grads[i], g, rtol=1e-10, atol=1e-13)
