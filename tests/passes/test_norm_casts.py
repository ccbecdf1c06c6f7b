"""The norm_casts pass: norms of f32 write the half precision that products want, and their gradients read it. Bits stay."""

from __future__ import annotations

import pytest
import torch

import engine
from opcheck import rand

NORMS = {
    "layer_norm": "y, mean, rstd = layer_norm(x, w, b) {axis=2, eps=1e-05}",
    "rms_norm": "y, rstd = rms_norm(x, w) {axis=2, eps=1e-06}",
    "layer_norm without weights": "y, mean, rstd = layer_norm(x, _, _) {axis=1, eps=1e-05}",
}
TEXT = """graph {{
  input x: f32[3, 5, {n}]
  param w: f32[{n}]
  param b: f32[{n}]
  param k: {half}[{n}, 4]
  {norm}
  {between}
  z = matmul(h, k, _)
  output z{more}
}}"""
BETWEEN = {
    "cast": "h = cast(y) {{to={to}}}",
    "views": "a = reshape(y) {{shape=[15, {n}]}}\n c = cast(a) {{to={to}}}\n h = reshape(c) {{shape=[5, 3, {n}]}}",
}
HALF = {"bf16": torch.bfloat16, "f16": torch.float16}
GRADS = [1, 1, 1, 1]


def text_of(half: str, norm: str, between: str, more: str = "", n: int = 8) -> str:
    return TEXT.format(half=half, norm=NORMS[norm], between=BETWEEN[between].format(to=half, n=n), more=more, n=n)


def both(text: str, n: int = 8, n_out: int = 1, half: torch.dtype = torch.bfloat16,
         two: tuple[int, ...] = ()) -> tuple[str, list[list[torch.Tensor]]]:
    got = []
    ins = [rand(3, 5, n).float(), rand(n).float(), rand(n).float(), rand(n, 4).to(half)]
    sizes = torch.Size([5, 3, 4]) if "shape=[15" in text else torch.Size([3, 5, 4])
    ins.append(rand(*sizes).to(half))
    if n_out > 1:
        ins.append(rand(*two).to(half) if two else rand(3, 5, n).float())
    for passes in (("simplify", "cse", "dce", "fuse"), ("simplify", "cse", "norm_casts", "dce", "fuse")):
        g = engine.Graph.parse(text).grad(GRADS, [1] * n_out).apply(*passes).verify()
        got.append(g.run(ins, n_out + 4, n_out + 1))
    return g.text(), got


def same(want: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None)  # of weights that the norm has not
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("n", [8, 7])
def test_bits_stay(half: str, norm: str, between: str, n: int) -> None:
    text, (want, got) = both(text_of(half, norm, between, n=n), n, half=HALF[half])
    assert f"to={half}" in text and "cast(" not in text
    same(want, got)


@pytest.mark.parametrize("more", ["\n  output y", "\n  s = sin(y)\n  output s"])
def test_a_result_that_others_read_stays(more: str) -> None:
    text, (want, got) = both(text_of("bf16", "layer_norm", "cast", more), n_out=2)
    assert "eps=1e-05, to" not in text
    same(want, got)


def test_a_sum_of_gradients_stays_in_its_chain() -> None:
    """Two products read the norm: their gradients are added and cast in one chain, which does not round the sum."""
    text, (want, got) = both(text_of("bf16", "layer_norm", "cast", "\n  u = matmul(h, k, _)\n  v = tanh(u)\n  output v"), n_out=2, two=(3, 5, 4))
    assert "to=bf16" in text and "cast:f32" in text
    same(want, got)


def test_against_pytorch() -> None:
    text = text_of("bf16", "layer_norm", "cast")
    x, w, b, k = rand(3, 5, 8).float(), rand(8).float(), rand(8).float(), rand(8, 4).bfloat16()
    dz = rand(3, 5, 4).bfloat16()
    g = engine.Graph.parse(text).grad(GRADS, [1]).apply("norm_casts", "dce")
    got = g.run([x, w, b, k, dz], 5, 2)

    def eager(dtype: torch.dtype, half: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, w, b)] + [k.to(half).requires_grad_()]
        z = torch.nn.functional.layer_norm(leaves[0], (8,), leaves[1], leaves[2]).to(half) @ leaves[3]
        return [z.detach(), *torch.autograd.grad(z, leaves, dz.to(half))]

    for a, e, exact in zip(got, eager(torch.float32, torch.bfloat16), eager(torch.float64, torch.float64), strict=True):
        assert (a - exact).norm() <= 1.5 * (e - exact).norm() + 1e-6 * exact.norm()
