"""The rotary pass: no slices and no copies are left of rotary embeddings, forward and backward, and no bit changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import Graph

TABLES = "input cos: T[1, 1, 5, 8]\n input sin: T[1, 1, 5, 8]\n "
TURN = ("lo = slice(x) {axis=3, start=[0], end=[4], step=1}\n hi = slice(x) {axis=3, start=[4], end=[8], step=1}\n "
        "n = neg(hi)\n r = concat(n, lo) {axis=3}\n ")
PLAIN = "input x: T[2, 3, 5, 8]\n " + TABLES + TURN + "a = mul(FIRST)\n b = mul(SECOND)\n y = add(SUM)\n output y\n"
# autocast's: x in bf16, tables in f32, the sum is cast
MIXED = ("input x: bf16[2, 3, 5, 8]\n " + TABLES.replace("T[", "f32[") + TURN + "c = cast(x) {to=f32}\n d = cast(r) {to=f32}\n "
         "a = mul(c, cos)\n b = mul(d, sin)\n s = add(a, b)\n y = cast(s) {to=bf16}\n output y\n")
# between a product and attention heads and time change places, and back in the gradient
PERMUTED = ("input z: T[2, 5, 3, 8]\n x = permute(z) {perm=[0, 2, 1, 3]}\n " + TABLES + TURN + "a = mul(x, cos)\n b = mul(r, sin)\n "
            "s = add(a, b)\n y = permute(s) {perm=[0, 2, 1, 3]}\n output y\n")
ORDERS = [("x, cos", "r, sin", "a, b"), ("cos, x", "r, sin", "b, a"), ("x, cos", "sin, r", "a, b"), ("cos, x", "sin, r", "b, a")]
FORMS = [PLAIN.replace("T[", t + "[").replace("FIRST", f).replace("SECOND", s).replace("SUM", a) for t in ("f64", "f32") for f, s, a in ORDERS]
FORMS += [MIXED, PERMUTED.replace("T[", "f32["), PERMUTED.replace("T[", "f64[")]


def graphs(text: str) -> tuple[Graph, Graph]:
    """Forward and backward, as it is and passed."""
    full = [Graph.parse("graph {\n" + text + "}").grad([1, 0, 0], [1]).apply("simplify", "cse", "accumulate", "dce") for _ in range(2)]
    return full[0], full[1].apply("rotary", "dce").verify()


def operands(g: Graph, seed: int = 0) -> list[Tensor]:
    types = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
    lines = [ln.split(": ")[1] for ln in g.text().splitlines() if ln.lstrip().startswith(("input", "grad_in"))]
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn([int(n) for n in ln.split("[")[1].rstrip("]").split(", ")], generator=gen).to(types[ln.split("[")[0]]) for ln in lines]


@pytest.mark.parametrize("text", FORMS)
def test_forward_and_backward_are_elementwise(text: str) -> None:
    plain, passed = graphs(text)
    ins = operands(plain)
    want, got = plain.run(ins, 2), passed.run(ins, 2)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    swept = [ln for ln in passed.text().splitlines() if "[2, " in ln and any(f" = {op}(" in ln for op in ("slice", "concat", "neg", "slice_put"))]
    assert not swept, swept
    assert passed.text().count(" = flip(") == 2


def test_numbers_are_pytorchs() -> None:
    _, passed = graphs(FORMS[0])
    x, cos, sin, dy = operands(passed)
    leaf = x.clone().requires_grad_()
    y = leaf * cos + torch.cat((-leaf[..., 4:], leaf[..., :4]), -1) * sin
    y.backward(dy)
    for got, want in zip(passed.run([x, cos, sin, dy], 2), (y.detach(), leaf.grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_gradient_stays_in_the_order_of_attention() -> None:
    """What is permuted before and behind is computed in the order before: who reads it needs no copy."""
    _, passed = graphs(FORMS[-1])
    sums = [ln for ln in passed.text().splitlines() if " = add(" in ln]
    assert len(sums) == 2 and all("[2, 5, 3, 2, 4]" in ln for ln in sums), passed.text()


@pytest.mark.parametrize("change", [
    ("n = neg(hi)", "n = exp(hi)"), ("concat(n, lo)", "concat(lo, n)"), ("neg(hi)", "neg(lo)"), ("y = add(a, b)", "y = sub(a, b)"),
    ("a = mul(x, cos)", "a = mul(sin, cos)"), ("a = mul(x, cos)", "w = mul(x, x)\n a = mul(w, cos)"),
    ("input cos: f64[1, 1, 5, 8]", "input cos: f64[1, 1, 5, 1]"), ("input sin: f64[1, 1, 5, 8]", "input sin: f64[8]"),
    ("input sin: f64[1, 1, 5, 8]", "input sin: f64[2, 3, 5, 8]"),
    ("lo = slice(x) {axis=3, start=[0], end=[4], step=1}\n hi = slice(x) {axis=3, start=[4], end=[8], step=1}",
     "lo = slice(x) {axis=3, start=[0], end=[3], step=1}\n hi = slice(x) {axis=3, start=[3], end=[8], step=1}"),
])  # fmt: skip
def test_what_only_looks_like_it_keeps_its_numbers(change: tuple[str, str]) -> None:
    text = FORMS[0].replace(*change)
    assert text != FORMS[0]
    plain, passed = graphs(text)
    ins = operands(plain)
    for a, b in zip(passed.run(ins, 2), plain.run(ins, 2), strict=True):
        assert torch.equal(a, b)
