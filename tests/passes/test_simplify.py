"""The simplify pass: nodes that change nothing go, what would change a bit stays."""

from __future__ import annotations

import pytest
import torch
from passed import X, body

from engine import Graph


@pytest.mark.parametrize(("text", "left"), [
    ("a = reshape(x) {shape=[15, 2]}\n b = reshape(a) {shape=[3, 5, 2]}\n y = tanh(b)", ["tanh"]),
    ("a = reshape(x) {shape=[15, 2]}\n y = reshape(a) {shape=[30]}", ["reshape"]),
    ("a = permute(x) {perm=[1, 2, 0]}\n b = permute(a) {perm=[2, 0, 1]}\n y = tanh(b)", ["tanh"]),
    ("a = permute(x) {perm=[1, 2, 0]}\n y = permute(a) {perm=[1, 2, 0]}", ["permute"]),
    ("a = cast(x) {to=f64}\n b = cast(a) {to=f32}\n y = tanh(b)", ["tanh"]),
    ("a = cast(x) {to=bf16}\n b = cast(a) {to=f32}\n y = tanh(b)", ["cast", "cast", "tanh"]),
    ("a = cast(x) {to=f64}\n y = cast(a) {to=bf16}", ["cast"]),
    ("a = slice(x) {axis=1, start=[0], end=[5], step=1}\n y = tanh(a)", ["tanh"]),
    ("a = slice(x) {axis=1, start=[1], end=[5], step=1}\n y = slice(a) {axis=1, start=[1], end=[3], step=1}", ["slice"]),
    ("a = flip(x) {axes=[0, 1]}\n b = flip(a) {axes=[0, 1]}\n y = tanh(b)", ["tanh"]),
    ("const c: f32[] = 1.0\n a = mul(x, c)\n b = div(a, c)\n y = tanh(b)", ["tanh"]),
    ("const c: f32[2] = [1, 1]\n a = mul(c, x)\n y = tanh(a)", ["tanh"]),
    ("const c: f32[2] = [1, 2]\n a = mul(c, x)\n y = tanh(a)", ["mul", "tanh"]),
    ("const c: f32[4, 1, 1, 1] = [1, 1, 1, 1]\n a = mul(c, x)\n y = tanh(a)", ["mul", "tanh"]),
    ("const c: f32[] = -0.0\n a = add(x, c)\n y = tanh(a)", ["tanh"]),
    ("const c: f32[] = 0.0\n a = add(x, c)\n y = tanh(a)", ["add", "tanh"]),
    ("const c: f32[] = 0.0\n a = sub(x, c)\n y = tanh(a)", ["tanh"]),
    ("const c: f32[] = -0.0\n a = sub(x, c)\n y = tanh(a)", ["sub", "tanh"]),
    ("a = slice(x) {axis=1, start=[2], end=[2], step=1}\n b = concat(a, x) {axis=1}\n y = tanh(b)", ["slice", "zero_grad", "tanh"]),
    ("c = cast(x) {to=i32}\n a = slice(c) {axis=1, start=[2], end=[2], step=1}\n y = concat(a, c) {axis=1}", ["cast"]),
    ("const z: f32[2] = [1, 2]\n a = zero_grad(x, z)\n y = tanh(a)", ["tanh"]),
    ("a = pad(x) {lo=[0, 0, 0], hi=[0, 0, 0], value=1.0}\n y = tanh(a)", ["tanh"]),
    ("a = dropout(x) {p=0.0}\n b = neg(a)\n c = neg(b)\n y = tanh(c)", ["tanh"]),
    ("const t: bool[] = 1\n const z: f32[] = 3.0\n a = where(t, x, z)\n y = tanh(a)", ["tanh"]),
    ("const t: bool[] = 1\n e = exp(x)\n a = where(t, x, e)\n y = tanh(a)", ["exp", "where", "tanh"]),
])
def test_what_changes_nothing_goes(text: str, left: list[str]) -> None:
    assert body(X + text + "\n output y", "simplify") == left


def test_values_stay() -> None:
    text = X + """const one: f32[] = 1.0
      a = cast(x) {to=f64}
      b = cast(a) {to=f16}
      c = permute(x) {perm=[2, 0, 1]}
      d = permute(c) {perm=[1, 0, 2]}
      e = slice(x) {axis=1, start=[1], end=[4], step=1}
      f = slice(e) {axis=1, start=[1], end=[3], step=2}
      g = mul(x, one)
      output b
      output d
      output f
      output g"""
    x = torch.randn(3, 5, 2) * 1000
    full = Graph.parse("graph {\n" + text + "\n}")
    want = full.run([x], 4)
    for a, b in zip(full.apply("simplify", "fold", "cse", "dce").verify().run([x], 4), want):
        assert torch.equal(a, b)
