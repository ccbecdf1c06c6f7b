"""Layer norm and RMS norm against eager PyTorch, with and without weights."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [((7, 13, 5), 2), ((7, 13, 5), 1), ((7, 13, 5), 0), ((3, 1031), 1), ((211, 17), 1), ((1, 7), 1), ((0, 5), 1), ((2, 3, 5, 67), 3)]
NORM = "  y, m, r = layer_norm(x, w, b) {axis=1, eps=1e-5}\n  output y\n}"

rand = functools.partial(rand, per_axis=7)


@pytest.mark.parametrize("params", ["wb", "w", "b", ""])
@pytest.mark.parametrize("shape,axis", SHAPES)
def test_layer_norm(shape: tuple[int, ...], axis: int, params: str) -> None:
    inner = shape[axis:]
    w, b = rand(*inner, shift=1.0) if "w" in params else None, rand(*inner) * 0.5 if "b" in params else None
    check("layer_norm", [rand(*shape), w, b], lambda x, w, b: F.layer_norm(x, inner, w, b, 1e-5), f"axis={axis}, eps=1e-5", n_out=3, n_check=1,
          low=LOW)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("shape,axis", SHAPES)
def test_rms_norm(shape: tuple[int, ...], axis: int, weight: bool) -> None:
    inner = shape[axis:]
    w = rand(*inner, shift=1.0) if weight else None
    check("rms_norm", [rand(*shape), w], lambda x, w: F.rms_norm(x, inner, w, 1e-6), f"axis={axis}, eps=1e-6", n_out=2, n_check=1,
          low=LOW)


def test_statistics() -> None:
    x = rand(5, 7, 11, shift=3.0).float()
    text = "graph {\n  input x: f32[5, 7, 11]\n  y, m, r = layer_norm(x) {axis=1, eps=1e-3}\n  output m\n  output r\n}"
    m, r = engine.run(text, [x])[0]
    flat = x.double().reshape(5, 77)
    assert torch.allclose(m.double(), flat.mean(1), rtol=1e-6)
    assert torch.allclose(r.double(), 1 / (flat.var(1, unbiased=False) + 1e-3).sqrt(), rtol=1e-6)


def test_far_from_zero() -> None:
    """The variance must not come from a difference of large squares."""
    x = (rand(13, 257) + 1000).float()
    text = "graph {\n  input x: f32[13, 257]\n  y, m, r = layer_norm(x) {axis=1, eps=1e-5}\n  output y\n}"
    got, exact = engine.run(text, [x])[0][0], F.layer_norm(x.double(), (257,))
    assert (got.double() - exact).abs().max() <= 2 * (F.layer_norm(x, (257,)).double() - exact).abs().max() + 1e-6


def test_frozen_weights_and_mixed_dtypes() -> None:
    x, w, b = rand(11, 13), rand(13, shift=1.0), rand(13)
    for grad in ([True, False, False], [False, True, False]):
        check("layer_norm", [x, w, b], lambda x, w, b: F.layer_norm(x, (13,), w, b), "axis=1, eps=1e-5", n_out=3, n_check=1, grad=grad)
    text = "graph {\n  input x: bf16[11, 13]\n  input w: f32[13]\n  input b: f32[13]\n" + NORM
    lo, dy = x.bfloat16(), rand(11, 13).bfloat16()
    ys, gs = engine.run(text, [lo, w.float(), b.float()], None, [dy])
    ref = [t.clone().requires_grad_() for t in (lo.double(), w.float().double(), b.float().double())]
    want = F.layer_norm(ref[0], (13,), ref[1], ref[2])
    want.backward(dy.double())
    assert gs[1].dtype == torch.float32
    assert torch.allclose(ys[0].double(), want, rtol=2**-8, atol=2**-8)
    for got, r, tol in zip(gs, ref, (2**-7, 1e-5, 1e-5)):
        assert (got.double() - r.grad).abs().max() <= tol * r.grad.abs().max()


def test_same_bits_on_any_number_of_threads() -> None:
    x, w, dy = rand(509, 31).float(), rand(31).float(), rand(509, 31).float()
    text = "graph {\n  input x: f32[509, 31]\n  input w: f32[31]\n  input b: f32[31]\n" + NORM
    one = engine.run(engine.Graph.parse(text, engine.Ctx(threads=False)), [x, w, w], None, [dy])
    two = engine.run(text, [x, w, w], None, [dy])
    assert all(torch.equal(a, b) for a, b in zip(one[0] + one[1], two[0] + two[1]))
