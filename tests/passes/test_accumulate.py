"""The accumulate pass: same gradients, fewer sweeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import rand


def joint(text: str, wanted: list[int], passes: bool) -> engine.Graph:
    g = engine.Graph.parse(text).grad(wanted, [1])
    return g.apply("cse", "accumulate", "dce").verify() if passes else g


def test_the_gradient_of_a_tied_embedding_goes_into_the_heads() -> None:
    """Weights used as embedding and as head: the embedding's gradient goes into the head's."""
    text = """graph {
      input i: i64[7]
      param w: f64[11, 5]
      x = gather(w, i) {axis=0, padding_idx=3}
      t = permute(w) {perm=[1, 0]}
      y = matmul(x, t)
      output y
    }"""
    i, w, dy = torch.tensor([3, 1, 10, 1, 0, 3, 1]), rand(11, 5), rand(7, 11)
    wr = w.clone().requires_grad_()
    (want,) = torch.autograd.grad(F.embedding(i, wr, 3) @ wr.T, wr, dy)
    g = joint(text, [0, 1], True)
    assert g.text().count(" = add(") == 0
    (line,) = [x for x in g.text().splitlines() if "gather_grad" in x]
    assert line.split("gather_grad(")[1].split(")")[0].count(",") == 2, line
    for passes in (True, False):
        _, got = joint(text, [0, 1], passes).run([i, w, dy], 2)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("axis,n", [(1, 15), (0, 15)])
def test_gradients_of_a_split_are_written_side_by_side(order: tuple[int, ...], axis: int, n: int) -> None:
    cuts = [(0, 4), (4, 9), (9, 15)]
    shape = [7, n] if axis else [n, 7]
    lines = [f"p{k} = slice(x) {{axis={axis}, start=[{cuts[k][0]}], end=[{cuts[k][1]}], step=1}}" for k in order]
    text = (
        f"graph {{\n input x: f64{shape}\n"
        + "\n".join(lines)
        + (f"\n a = sin(p0)\n b = exp(p1)\n c = tanh(p2)\n y = concat(c, a, b) {{axis={axis}}}\n output y\n}}")
    )

    def ref(x: torch.Tensor) -> torch.Tensor:
        p = [x.narrow(axis, lo, hi - lo) for lo, hi in cuts]
        return torch.cat([p[2].tanh(), p[0].sin(), p[1].exp()], axis)

    x, dy = rand(*shape), rand(*shape).flip(0)
    xr = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(ref(xr), xr, dy)
    g = joint(text, [1], True)
    assert "slice_put" not in g.text() and " = add(" not in g.text()
    _, got = g.run([x, dy], 2)
    assert torch.allclose(got, want, rtol=1e-12, atol=0)


def test_gradients_of_a_split_at_a_symbol_are_written_side_by_side() -> None:
    """Halves of a size only the run knows."""
    text = """graph {
      sym s0 = x[1]
      input x: f64[3, s0]
      a = slice(x) {axis=1, start=[0], end=[s0//2], step=1}
      b = slice(x) {axis=1, start=[s0//2], end=[s0], step=1}
      c = exp(a)
      d = tanh(b)
      y = concat(d, c) {axis=1}
      output y
    }"""
    g = joint(text, [1], True)
    assert "slice_put" not in g.text()
    for n in (7, 2, 1):
        x, dy = rand(3, n), rand(3, n).flip(1)
        xr = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(torch.cat([xr[:, n // 2 :].tanh(), xr[:, : n // 2].exp()], 1), xr, dy)
        _, got = g.run([x, dy], 2)
        assert torch.allclose(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("second", ["start=[5], end=[9]", "start=[3], end=[9]", "start=[4], end=[8]"])
def test_what_does_not_tile_stays(second: str) -> None:
    """A gap, an overlap, a missing end: the slices are added as before."""
    text = f"""graph {{
      input x: f64[7, 9]
      a = slice(x) {{axis=1, start=[0], end=[4], step=1}}
      b = slice(x) {{axis=1, {second}, step=1}}
      c = exp(a)
      d = tanh(b)
      y = concat(d, c) {{axis=1}}
      output y
    }}"""
    lo, hi = (int(p.split("[")[1].split("]")[0]) for p in second.split(","))
    x = rand(7, 9)
    xr = x.clone().requires_grad_()
    y = torch.cat([xr[:, lo:hi].tanh(), xr[:, :4].exp()], 1)
    dy = rand(*y.shape)
    (want,) = torch.autograd.grad(y, xr, dy)
    g = joint(text, [1], True)
    assert g.text().count("slice_put") == 2
    _, got = g.run([x, dy], 2)
    assert torch.allclose(got, want, rtol=1e-12, atol=0)


def test_split_with_other_terms_and_scatters() -> None:
    text = """graph {
      input x: f64[7, 9]
      input i: i64[5, 9]
      input j: i64[4, 1]
      a = slice(x) {axis=1, start=[0], end=[4], step=1}
      b = slice(x) {axis=1, start=[4], end=[9], step=1}
      c = concat(b, a) {axis=1}
      e = exp(x)
      f = mul(c, e)
      g = gather_elements(x, i) {axis=0}
      h = gather_nd(x, j)
      k = concat(f, g, h) {axis=0}
      output k
    }"""
    x, i, j = rand(7, 9), torch.randint(7, (5, 9), generator=torch.Generator().manual_seed(0)), torch.tensor([[3], [6], [3], [0]])

    def ref(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.cat([x[:, 4:], x[:, :4]], 1) * x.exp(), x.gather(0, i), x[j[:, 0]]], 0)

    xr = x.clone().requires_grad_()
    y = ref(xr)
    dy = rand(*y.shape)
    (want,) = torch.autograd.grad(y, xr, dy)
    g = joint(text, [1, 0, 0], True)
    assert "slice_put" not in g.text() and g.text().count(" = add(") == 1 and g.text().count("fill") == 0
    for passes in (True, False):
        _, got = joint(text, [1, 0, 0], passes).run([x, i, j, dy], 2)
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)
