"""The cse pass: equal nodes become one, unless they draw numbers, differ in an attribute or lie in another phase."""

from __future__ import annotations

from passed import X, body


def test_equal_nodes_become_one() -> None:
    assert body(X + "a = tanh(x)\n b = tanh(x)\n y = mul(a, b)\n output y", "cse") == ["tanh", "mul"]
    assert body(X + "a = tanh(x)\n b = exp(x)\n c = add(a, b)\n d = add(b, a)\n y = mul(c, d)\n output y", "cse") == ["tanh", "exp", "add", "mul"]
    two = X + "a = tanh(x)\n b = exp(x)\n "
    assert body(two + "c = sub(a, b)\n d = sub(b, a)\n y = mul(c, d)\n output y", "cse") == ["tanh", "exp", "sub", "sub", "mul"]
    assert body(X + "a = dropout(x) {p=0.5} rng=1\n b = dropout(x) {p=0.5} rng=2\n y = mul(a, b)\n output y", "cse") == ["dropout", "dropout", "mul"]
    assert body(X + "const p: f32[] = 2.0\n const q: f32[] = 2.0\n a = mul(x, p)\n b = mul(x, q)\n y = mul(a, b)\n output y", "cse") == ["mul", "mul"]
    assert body(X + "a = softmax(x) {axis=1}\n b = softmax(x) {axis=2}\n y = mul(a, b)\n output y", "cse") == ["softmax", "softmax", "mul"]
    assert body(X + "a = tanh(x)\n b = tanh(x) backward\n y = mul(a, b) backward\n output y", "cse") == ["tanh", "tanh", "mul"], "recompute decides"
