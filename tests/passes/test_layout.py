"""The layout pass: attention writes what the next layer reads."""

from __future__ import annotations

import torch
from passed import body

from engine import Graph


def test_attention_writes_time_before_heads() -> None:
    qkv = "input q: f32[2, 3, 5, 4]\n input k: f32[2, 3, 7, 4]\n input v: f32[2, 3, 7, 6]\n a, l = attention(q, k, v) {causal=1}\n "
    turn = "p = permute(a) {perm=[0, 2, 1, 3]}\n r = reshape(p) {shape=[2, 5, 18]}\n output r"
    assert body(qkv + turn, "layout", "simplify", "dce") == ["attention", "reshape"]
    assert body(qkv + turn + "\n t = tanh(a)\n output t", "layout", "simplify", "dce") == ["attention", "permute", "reshape", "tanh"]
    for other in ("p = permute(a) {perm=[0, 1, 3, 2]}\n output p", "p = permute(a) {perm=[2, 0, 1, 3]}\n output p", "output a"):
        assert "seq_first" not in Graph.parse("graph {\n" + qkv + other + "\n}").apply("layout").verify().text()
    full = Graph.parse("graph {\n" + qkv + turn + "\n t = tanh(a)\n output t\n}").grad([1, 1, 1], [1, 1])
    ins = [torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6), torch.randn(2, 5, 18), torch.randn(2, 3, 5, 6)]
    want = full.run(ins, 5)
    made = Graph.parse("graph {\n" + qkv + turn + "\n t = tanh(a)\n output t\n}").apply("layout", "simplify").grad([1, 1, 1], [1, 1]).verify()
    for a, b in zip(made.run(ins, 5), want, strict=True):
        assert torch.equal(a, b)
