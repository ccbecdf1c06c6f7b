"""The cse pass: equal nodes become one, unless they draw numbers, differ in an attribute or lie in another phase."""

from __future__ import annotations

import torch
from passed import X, body

from engine import Graph


def test_equal_nodes_become_one() -> None:
    assert body(X + "a = tanh(x)\n b = tanh(x)\n y = mul(a, b)\n output y", "cse") == ["tanh", "mul"]
    assert body(X + "a = tanh(x)\n b = exp(x)\n c = add(a, b)\n d = add(b, a)\n y = mul(c, d)\n output y", "cse") == ["tanh", "exp", "add", "mul"]
    two = X + "a = tanh(x)\n b = exp(x)\n "
    assert body(two + "c = sub(a, b)\n d = sub(b, a)\n y = mul(c, d)\n output y", "cse") == ["tanh", "exp", "sub", "sub", "mul"]
    assert body(X + "a = dropout(x) {p=0.5} rng=1\n b = dropout(x) {p=0.5} rng=2\n y = mul(a, b)\n output y", "cse") == ["dropout", "dropout", "mul"]
    assert body(X + "const p: f32[] = 2.0\n const q: f32[] = 2.0\n a = mul(x, p)\n b = mul(x, q)\n y = mul(a, b)\n output y", "cse") == ["mul", "mul"]
    assert body(X + "a = softmax(x) {axis=1}\n b = softmax(x) {axis=2}\n y = mul(a, b)\n output y", "cse") == ["softmax", "softmax", "mul"]
    assert body(X + "a = tanh(x)\n b = tanh(x) backward\n y = mul(a, b) backward\n output y", "cse") == ["tanh", "tanh", "mul"], "recompute decides"


def test_values_keep_their_bits() -> None:
    """Equal nodes, equal but for a stream of random numbers, equal but for the order of operands that may change."""
    text = "graph {\n" + X + """a = tanh(x)
      b = tanh(x)
      c = dropout(a) {p=0.5} rng=1
      d = dropout(b) {p=0.5} rng=2
      e = mul(c, d)
      f = mul(d, c)
      s = softmax(e) {axis=1}
      t = softmax(f) {axis=1}
      y = sub(s, a)
      z = sub(t, b)
      output y
      output z
    }"""
    x, dys = torch.randn(3, 5, 2), [torch.randn(3, 5, 2) for _ in range(2)]
    for graph, ins, n in ((Graph.parse(text), [x], 2), (Graph.parse(text).grad([1], [1, 1]), [x, *dys], 3)):
        want, before = graph.run(ins, n, 3), graph.text().count(" = ")
        after = graph.apply("cse", "dce").verify().text().count(" = ")
        assert after <= before - 4
        for a, b in zip(graph.run(ins, n, 3), want, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)
