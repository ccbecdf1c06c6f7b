"""The patterns pass: gelu, silu and rms_norm spelled out, and what only looks like them."""

from __future__ import annotations

import pytest
import torch
from passed import body

import engine
from engine import Graph

NUMBERS = "".join(f"const {n}: f64[] = {v}\n" for n, v in {"half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "k": 0.044715, "other": 0.05,
                                                           "s": 0.7978845608028654, "r": 0.7071067811865476, "root2": 1.4142135623730951,
                                                           "eps": 1e-6}.items())
RMS = "q = mul(x, x)\n m = reduce_mean(q) {axes=[1], keepdims=1}\n e = add(m, eps)\n i = rsqrt(e)\n n = mul(x, i)\n y = mul(n, w)"


@pytest.mark.parametrize(("text", "left"), [
    ("c = pow(x, three)\n d = mul(c, k)\n a = add(x, d)\n b = mul(a, s)\n t = tanh(b)\n u = add(t, one)\n h = mul(x, half)\n y = mul(h, u)",
     ["gelu_tanh"]),
    ("b = mul(x, r)\n t = erf(b)\n u = add(t, one)\n h = mul(x, u)\n y = mul(h, half)", ["gelu"]),
    ("t = sigmoid(x)\n y = mul(t, x)", ["silu"]),
    (RMS, ["rms_norm"]),
    (RMS.replace("axes=[1]", "axes=[0]"), ["mul", "reduce_mean", "add", "rsqrt", "mul", "mul"]),
    ("t = sigmoid(x)\n y = mul(t, t)", ["sigmoid", "mul"]),
    ("b = div(x, root2)\n t = erf(b)\n u = add(one, t)\n h = mul(half, u)\n y = mul(x, h)", ["gelu"]),
    ("b = div(root2, x)\n t = erf(b)\n u = add(one, t)\n h = mul(half, u)\n y = mul(x, h)", ["div", "erf", "add", "mul", "mul"]),
    ("c = mul(x, x)\n c3 = mul(x, c)\n d = mul(k, c3)\n a = add(d, x)\n b = mul(s, a)\n t = tanh(b)\n u = add(t, one)\n h = mul(u, x)\n y = mul(half, h)",
     ["gelu_tanh"]),
    ("q = pow(x, two)\n m = reduce_mean(q) {axes=[1], keepdims=1}\n e = add(eps, m)\n r1 = sqrt(e)\n i = reciprocal(r1)\n y = mul(i, x)", ["rms_norm"]),
    ("q = mul(x, x)\n m = reduce_mean(q) {axes=[1], keepdims=1}\n e = add(m, eps)\n i = rsqrt(e)\n z = neg(x)\n y = mul(z, i)",
     ["mul", "reduce_mean", "add", "rsqrt", "neg", "mul"]),
    ("b = mul(x, s)\n t = erf(b)\n u = add(t, one)\n h = mul(x, u)\n y = mul(h, half)", ["mul", "erf", "add", "mul", "mul"]),
    ("c = pow(x, three)\n d = mul(c, other)\n a = add(x, d)\n b = mul(a, s)\n t = tanh(b)\n u = add(t, one)\n h = mul(x, half)\n y = mul(h, u)",
     ["pow", "mul", "add", "mul", "tanh", "add", "mul", "mul"]),
])
def test_what_is_spelled_out_becomes_one_operator(text: str, left: list[str]) -> None:
    """The value stays what was spelled out, whatever was recognised."""
    text = f"input x: f64[7, 5]\n param w: f64[5]\n {NUMBERS}{text}\n output y"
    g = torch.Generator().manual_seed(0)
    ins = [torch.randn(7, 5, dtype=torch.float64, generator=g), torch.randn(5, dtype=torch.float64, generator=g)]
    want = Graph.parse("graph {\n" + text + "\n}").run(ins, 1)[0]
    got = Graph.parse("graph {\n" + text + "\n}").apply("patterns", "dce").verify().run(ins, 1)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert body(text, "patterns") == left


NARROW = "input x: bf16[7, 5]\n const half: bf16[] = 0.5\n const one: f32[] = 1\n const three: f32[] = 3\n const k: f32[] = 0.044715\n const s: f32[] = 0.7978845608028654\n"


@pytest.mark.parametrize(("text", "left"), [
    ("v = cast(x) {to=f32}\n c = pow(v, three)\n d = mul(c, k)\n a = add(v, d)\n b = mul(a, s)\n t = tanh(b)\n u = add(t, one)\n h = mul(x, half)\n"
     " g = cast(h) {to=f32}\n y = mul(g, u)", ["cast", "gelu_tanh"]),  # gelu_new under CUDA's autocast
    ("v = cast(x) {to=f32}\n t = sigmoid(v)\n y = mul(v, t)", ["cast", "silu"]),
    ("t = sigmoid(x)\n u = cast(t) {to=f32}\n v = cast(x) {to=f32}\n y = mul(v, u)", ["cast", "silu"]),
    ("v = cast(x) {to=f32}\n n = neg(x)\n w = cast(n) {to=f32}\n t = sigmoid(w)\n y = mul(v, t)", ["cast", "neg", "cast", "sigmoid", "mul"]),
    ("v = cast(x) {to=f32}\n w = cast(v) {to=f64}\n t = sigmoid(w)\n y = mul(w, t)", ["cast", "cast", "silu"]),
])  # fmt: skip
def test_seen_through_copies_in_a_wider_type(text: str, left: list[str]) -> None:
    text = f"{NARROW}{text}\n output y"
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = Graph.parse("graph {\n" + text + "\n}").run([x], 1)[0]
    got = Graph.parse("graph {\n" + text + "\n}").apply("patterns", "dce").verify().run([x], 1)[0]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=4e-3, atol=1e-5)
    assert body(text, "patterns") == left


NEW = "c = pow(x, p)\n d = mul(c, k)\n a = add(x, d)\n b = mul(a, s)\n t = tanh(b)\n u = add(t, one)\n h = mul(x, half)\n y = mul(h, u)"
ERF = "b = mul(x, r)\n t = erf(b)\n u = add(t, one)\n h = mul(x, u)\n y = mul(h, half)"
LIKE = {"k": 0.044715, "s": 0.7978845608028654, "r": 0.7071067811865476, "p": 3.0, "half": 0.5, "one": 1.0, "two": 2.0, "eps": 1e-6}


@pytest.mark.parametrize(("text", "dtype", "numbers", "known"), [
    (NEW, "f64", {"s": 0.7978845608028653}, True),
    (NEW, "f64", {"s": 0.797885}, False),
    (NEW, "f64", {"s": 0.7978845608}, False),
    (NEW, "f64", {"s": 0.79788458347}, False),  # rounded to f32
    (NEW, "f64", {"k": 0.04471500001}, False),
    (NEW, "f32", {"s": 0.79788456}, True),  # Bloom's
    (NEW, "f32", {"s": 0.7978845608}, True),
    (NEW, "f32", {"s": 0.7978845}, True),  # the float next to it, what torch.sqrt of a tensor may give
    (NEW, "f32", {"s": 0.797885}, False),
    (NEW, "f32", {"p": 3.0000002}, False),
    (NEW, "bf16", {}, True),
    (NEW, "bf16", {"s": 0.8}, False),
    (NEW, "f16", {"s": 0.7978}, True),
    (NEW, "f16", {"s": 0.7985}, False),
    (ERF, "f16", {}, True),
    (ERF, "f16", {"r": 0.71}, False),
    (ERF, "f16", {"half": 0.504}, False),
    (ERF, "bf16", {"one": 1.0078125}, False),
    (RMS.replace("mul(x, x)", "pow(x, two)"), "bf16", {}, True),
    (RMS.replace("mul(x, x)", "pow(x, two)"), "f16", {"two": 2.02}, False),
    (RMS.replace("mul(x, x)", "pow(x, two)"), "bf16", {"two": 2.015625}, False),
])  # fmt: skip
def test_similar_numbers_are_another_formula(text: str, dtype: str, numbers: dict[str, float], known: bool) -> None:
    consts = "".join(f" const {n}: {dtype}[] = {v}\n" for n, v in (LIKE | numbers).items())
    text = f"input x: {dtype}[7, 5]\n param w: {dtype}[5]\n{consts} {text}\n output y"
    assert (len(body(text, "patterns")) == 1) == known


@pytest.mark.parametrize(("x", "w", "attrs", "left"), [
    ("[3, 5, 4, 2]", "[7, 5, 4, 2]", "", True),
    ("[3, 5, 1, 1]", "[7, 5, 1, 1]", " {stride=[2, 2]}", True),
    ("[3, 5, 4]", "[7, 5, 4]", " {pad=[0, 0]}", True),
    ("[0, 5, 4]", "[7, 5, 4]", "", True),
    ("[3, 5, 2, 2, 2]", "[7, 5, 2, 2, 2]", "", True),
    ("[3, 5, 4]", "[7, 5, 4]", " {pad=[1, 0]}", False),
    ("[3, 5, 4]", "[7, 5, 3]", "", False),
    ("[3, 6, 4]", "[8, 3, 4]", " {groups=2}", False),
])  # fmt: skip
def test_a_window_as_large_as_the_image_is_a_product(x: str, w: str, attrs: str, left: bool) -> None:
    g = torch.Generator().manual_seed(0)
    sizes = [[int(v) for v in t[1:-1].split(",")] for t in (x, w)]
    ins = [torch.randn(*s, dtype=torch.float64, generator=g) for s in (*sizes, sizes[1][:1])]
    for bias in (", b", ""):
        text = f"input x: f64{x}\n input w: f64{w}\n input b: f64[{sizes[1][0]}]\n y = conv(x, w{bias}){attrs}\n output y"
        want, want_grads = engine.run("graph {\n" + text + "\n}", ins, [1, 1, int(bool(bias))])
        graph = Graph.parse("graph {\n" + text + "\n}").apply("patterns", "dce").verify()
        got, got_grads = engine.run(graph, ins, [1, 1, int(bool(bias))])
        for a, b in zip([*got, *got_grads], [*want, *want_grads]):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert ("matmul" in body(text, "patterns")) == left and ("conv" in body(text, "patterns")) != left
