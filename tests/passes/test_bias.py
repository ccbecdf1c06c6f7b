"""The bias pass: a product and the vector added to it are one node, where nobody else reads the product."""

from __future__ import annotations

import torch
from passed import body

from engine import Graph


def test_an_added_vector_becomes_the_products_bias() -> None:
    linear = "input x: f32[2, 3, 5]\n param w: f32[7, 5]\n param b: f32[7]\n t = permute(w) {perm=[1, 0]}\n m = matmul(x, t, _)\n "
    assert body(linear + "y = add(m, b)\n output y", "bias") == ["permute", "matmul"]
    assert body(linear + "y = add(b, m)\n output y", "bias") == ["permute", "matmul"]
    assert body(linear + "y = add(m, b)\n output y\n output m", "bias") == ["permute", "matmul", "add"]
    g = Graph.parse("graph {\n" + linear + "y = add(m, b)\n output y\n}")
    ins = [torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7)]
    torch.testing.assert_close(g.apply("bias", "dce").verify().run(ins, 1)[0], torch.nn.functional.linear(*ins), rtol=1e-5, atol=1e-5)
