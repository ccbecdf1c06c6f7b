"""The dce pass: nodes that no output, write-back or gradient needs go; what is left has the same bits."""

from __future__ import annotations

import torch
from passed import body

from engine import Graph

HEAD = "input x: f64[3, 5]\n buffer b: f64[3, 5]\n "


def test_only_what_is_needed_stays() -> None:
    dead = "d = exp(x)\n e = mul(d, x)\n "
    assert body(HEAD + dead + "y = tanh(x)\n output y") == ["tanh"]
    assert body(HEAD + dead + "y = tanh(x)\n output y\n output e") == ["exp", "mul", "tanh"]
    assert body(HEAD + dead + "output x\n write e -> b") == ["exp", "mul"], "a write-back needs it"
    assert body(HEAD + "v, m, r = layer_norm(x, _, _) {axis=1, eps=0.1}\n t = sin(m)\n output v") == ["layer_norm"]
    assert body(HEAD + "d = dropout(x) {p=0.5} rng=1\n y = dropout(x) {p=0.5} rng=2\n output y") == ["dropout"]


def test_what_is_left_keeps_its_bits() -> None:
    """Forward and gradients; random streams keep their numbers although one before them is gone."""
    text = "graph {\n " + HEAD + """d = dropout(x) {p=0.5} rng=1
      u = exp(d)
      s = sin(x)
      y = dropout(s) {p=0.25} rng=2
      z = mul(y, b)
      w = add(b, s)
      output z
      write w -> b
    }"""
    g = torch.Generator().manual_seed(0)
    ins = [torch.randn(3, 5, dtype=torch.float64, generator=g) for _ in range(3)]
    graph = Graph.parse(text)
    assert "exp(" in graph.text()
    want, want_grads = graph.run(ins[:2], 2, 7), graph.grad([1, 0], [1]).run(ins, 3, 7)
    after = graph.apply("dce").verify().text()
    assert "exp(" not in after and " rng=1" not in after and " rng=2" in after
    for a, b in zip(graph.run(ins[:2], 2, 7) + graph.grad([1, 0], [1]).run(ins, 3, 7), want + want_grads, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
