"""The fold pass: what constants alone say is computed once, and no more than is worth keeping."""

from __future__ import annotations

import torch
from passed import body

from engine import Graph


def test_constants_are_computed_once() -> None:
    consts = "const a: f32[2, 3] = [1, 2, 3, 4, 5, 6]\n const b: f32[3] = [1, -1, 2]\n"
    chain = "c = add(a, b)\n d = permute(c) {perm=[1, 0]}\n e = reduce_sum(d) {axes=[0], keepdims=0}\n"
    assert body(consts + chain + "i = iota() {shape=[2], dtype=f32, start=-3}\n y = mul(e, i)\n output y", "fold") == []
    assert body("i = iota() {shape=[100000], dtype=f32}\n y = neg(i)\n output y", "fold") == ["iota", "neg"], "too large to keep"
    assert body("sym s = x[0]\n input x: f32[s]\n i = iota() {shape=[s], dtype=f32}\n y = neg(i)\n output y", "fold") == ["iota", "neg"]
    assert body(consts + "y = dropout(a) {p=0.5} rng=1\n output y", "fold") == ["dropout"]
    g = Graph.parse("graph {\n" + consts + "c = add(a, b)\n d = permute(c) {perm=[1, 0]}\n output d\n}")
    want = g.run([], 1)[0]
    assert torch.equal(g.apply("fold", "dce").run([], 1)[0], want)
