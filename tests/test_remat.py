"""The remat pass: backward reads less of the forward, and the numbers stay the same bits."""

from __future__ import annotations

import pytest
import torch

import engine


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def joint(text: str, wanted: list[int], remat: bool) -> engine.Graph:
    g = engine.Graph.parse("graph {\n" + text + "\n}").grad(wanted, [1]).apply("simplify", "cse", "dce")
    return g.apply("remat", "dce").verify() if remat else g


def kept(g: engine.Graph) -> set[str]:
    """Operators of the forward whose results backward reads (views seen through)."""
    made: dict[str, tuple[str, list[str], bool]] = {}
    out = set()
    for line in g.text().splitlines():
        if " = " not in line or "(" not in line or line.strip().startswith(("const", "sym")):
            continue
        left, right = line.strip().split(" = ", 1)
        op, rest = right.split("(", 1)
        args = [a.strip() for a in rest.split(")")[0].split(",")]
        backward = " backward" in line
        for name in left.split(","):
            made[name.strip()] = op, args, backward
        for a in args:
            while a in made and made[a][0] in ("permute", "reshape", "expand", "slice"):
                a = made[a][1][0]
            if backward and a in made and not made[a][2]:
                out.add(made[a][0])
    return out


MLP = """input x: f64[7, 5]
  param w: f64[5, 11]
  param v: f64[11, 3]
  h = matmul(x, w, _)
  """

CASES = {
    # name: (text, wanted, shapes of inputs, kept without, kept with)
    "activation": (MLP + "a = gelu_tanh(h)\n y = matmul(a, v, _)\n output y", [0, 1, 1], {"matmul", "gelu_tanh"}, {"matmul"}),
    "chain": (MLP + "s = sigmoid(h)\n a = mul(h, s)\n y = matmul(a, v, _)\n output y", [0, 1, 1], {"matmul", "sigmoid", "mul"}, {"matmul"}),
    "through a view": (MLP + "a = gelu_tanh(h)\n r = reshape(a) {shape=[1, 7, 11]}\n q = reshape(r) {shape=[7, 11]}\n y = matmul(q, v, _)\n "
                       "output y", [0, 1, 1], {"matmul", "gelu_tanh"}, {"matmul"}),
    "dropout": (MLP + "a = tanh(h)\n d = dropout(a) {p=0.5} rng=1\n y = matmul(d, v, _)\n output y", [0, 1, 1], {"tanh", "dropout"}, {"tanh"}),
    "an output stays": (MLP + "a = gelu_tanh(h)\n y = matmul(a, v, _)\n output y\n output a", [0, 1, 1], {"matmul", "gelu_tanh"},
                        {"matmul", "gelu_tanh"}),
    "nothing to compute it from": (MLP + "a = relu(h)\n y = matmul(a, v, _)\n output y", [0, 1, 1], {"relu"}, {"relu"}),
    "of inputs alone": ("input x: f64[7, 5]\n param w: f64[5, 11]\n param v: f64[11, 3]\n a = tanh(x)\n h = matmul(a, w, _)\n "
                        "y = matmul(h, v, _)\n output y", [0, 1, 1], {"tanh", "matmul"}, {"tanh", "matmul"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kept(name: str) -> None:
    text, wanted, without, with_ = CASES[name]
    arriving = [1] + [0] * (text.count("output ") - 1)
    inputs = [rand(7, 5), rand(5, 11), rand(11, 3)]
    got = []
    for remat in (False, True):
        g = engine.Graph.parse("graph {\n" + text + "\n}").grad(wanted, arriving).apply("simplify", "cse", "dce")
        if remat:
            g = g.apply("remat", "dce").verify()
        assert kept(g) == (with_ if remat else without), g.text()
        got.append(g.run([*inputs, rand(7, 3)], len(arriving) + 2, 5))
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


def test_written_inputs_are_not_read_again() -> None:
    """b is overwritten at the end of the forward: what was computed from it must be kept."""
    text = """input x: f64[7, 5]
      param w: f64[5, 11]
      buffer b: f64[7, 11]
      param v: f64[11, 3]
      h = matmul(x, w, _)
      g = gelu_tanh(h)
      s = add(g, b)
      y = matmul(s, v, _)
      m = sigmoid(h)
      write m -> b
      output y"""
    g = joint(text, [0, 1, 0, 1], True)
    assert "add" in kept(g), g.text()


def test_norm_is_computed_from_its_input() -> None:
    text = """input x: f64[7, 5]
      param w: f64[5, 5]
      param s: f64[5]
      param b: f64[5]
      param v: f64[5, 3]
      h = matmul(x, w, _)
      n, mean, rstd = layer_norm(h, s, b) {axis=1, epsilon=1e-5}
      y = matmul(n, v, _)
      output y"""
    inputs = [rand(7, 5), rand(5, 5), rand(5), rand(5).flip(0), rand(5, 3)]
    x, w, s, b, v = (t.clone().requires_grad_() for t in inputs)
    dy = rand(7, 3)
    want = torch.autograd.grad(torch.nn.functional.layer_norm(x @ w, (5,), s, b, 1e-5) @ v, (w, s, b, v), dy)
    g = joint(text, [0, 1, 1, 1, 1], True)
    assert g.text().count("layer_norm(") == 2 and "backward" in [x for x in g.text().splitlines() if "layer_norm(" in x][1]
    for got, ref in zip(g.run([*inputs, dy], 5)[1:], want, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-12, atol=1e-12)
