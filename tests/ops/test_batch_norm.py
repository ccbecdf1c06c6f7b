"""Batch normalisation and its gradients, training and eval, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 11), (2, 7, 5, 3), (67, 131), (2, 3, 601), (2, 1, 3), (5, 3, 1, 1), (2, 3, 2, 3, 2)])
def test_batch_norm(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    c = shape[1]
    x = rand(*shape) * 3 + 2
    w, b = (rand(c), rand(c + 1)[:c].clone()) if affine else (None, None)
    rm, rv = rand(c), rand(c).abs() + 0.5

    def ref(x, w, b, rm, rv):
        m, v = rm.detach().clone(), rv.detach().clone()
        y = F.batch_norm(x, m, v, w, b, training, 0.3, 1e-3)
        return y, m, v

    # statistics get no gradient; as outputs their gradient is not asked for either
    def only_y(x, w, b, rm, rv):
        return ref(x, w, b, rm, rv)[0]

    attrs = f"training={int(training)}, momentum=0.3, eps=0.001"
    wanted = [True, affine, affine, False, False]
    check("batch_norm", [x, w, b, rm, rv], only_y, attrs, n_out=5, n_check=1, grad=wanted, low=LOW)
    check("batch_norm", [x, w, b, rm, rv], ref, attrs, n_out=5, n_check=3, grad=False, low=(torch.float32,))


def test_without_running_statistics() -> None:
    check("batch_norm", [rand(7, 5, 3), rand(5), rand(5)], lambda x, w, b: F.batch_norm(x, None, None, w, b, True), "training=1", n_out=5, n_check=1)


def test_saved_statistics() -> None:
    x = rand(7, 5, 3) + 4
    text = "graph {\n input x: f64[7, 5, 3]\n y, a, b, m, r = batch_norm(x) {training=1, eps=0.25}\n output m\n output r\n output b\n}"
    (m, r, v), _ = engine.run(text, [x])
    assert torch.allclose(m, x.mean((0, 2)), rtol=1e-13)
    assert torch.allclose(r, 1 / (x.var((0, 2), unbiased=False) + 0.25).sqrt(), rtol=1e-13)
    assert torch.allclose(v, x.var((0, 2)), rtol=1e-13)


def test_far_from_zero() -> None:
    """A mean 3000 times the spread: two passes keep what fp32 holds."""
    x = (rand(31, 3, 401) + 3000).float()
    text = "graph {\n input x: f32[31, 3, 401]\n y, a, b, m, r = batch_norm(x) {training=1}\n output y\n}"
    (y,), _ = engine.run(text, [x])
    want = F.batch_norm(x.double(), None, None, training=True)
    assert (y.double() - want).abs().max() < 1e-3  # half a place of 3000 is 1.2e-4
    theirs = (F.batch_norm(x, None, None, training=True).double() - want).abs().max()
    assert (y.double() - want).abs().max() <= 2 * theirs + 1e-6


def test_mixed_types() -> None:
    """bf16 activations with f32 parameters and statistics, as autocast leaves them."""
    x, w, b = rand(7, 5, 11).bfloat16(), rand(5).float(), rand(5).float()
    rm, rv = torch.zeros(5), torch.ones(5)
    text = (
        "graph {\n input x: bf16[7, 5, 11]\n input w: f32[5]\n input b: f32[5]\n input m: f32[5]\n input v: f32[5]\n"
        " y, nm, nv, s, r = batch_norm(x, w, b, m, v) {training=1}\n output y\n write nm -> m\n}"
    )
    dy = rand(11, 7, 5).permute(1, 2, 0).contiguous().bfloat16()
    (y, nm), (dx, dw, db) = engine.run(text, [x, w, b, rm, rv], [1, 1, 1, 0, 0], [dy])
    xd, wd, bd = x.double().requires_grad_(), w.double().requires_grad_(), b.double().requires_grad_()
    m = torch.zeros(5, dtype=torch.float64)
    want = F.batch_norm(xd, m, torch.ones(5, dtype=torch.float64), wd, bd, True)
    gs = torch.autograd.grad(want, [xd, wd, bd], dy.double())
    assert dw.dtype == db.dtype == torch.float32 and dx.dtype == y.dtype == torch.bfloat16
    for got, exact, tol in ((y, want, 2**-8), (dx, gs[0], 2**-8), (dw, gs[1], 1e-5), (db, gs[2], 1e-5), (nm, m, 1e-6)):
        assert ((got.double() - exact).abs() <= tol * exact.abs().max()).all()


@pytest.mark.parametrize(
    "node,words",
    [
        ("batch_norm(x) {training=0}", ["running statistics"]),
        ("batch_norm(x, w) {training=1}", ["weight", "size 3", "(5)"]),
        ("batch_norm(x, _, _, v) {training=1}", ["both"]),
        ("batch_norm(v) {training=1}", ["rank 1"]),
        ("batch_norm(z) {training=1}", ["1 value per channel"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = f"graph {{\n input x: f64[7, 5]\n input w: f64[3]\n input v: f64[5]\n input z: f64[1, 5]\n y, a, b, c, d = {node}\n output y\n}}"
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(7, 5), rand(3), rand(5), rand(1, 5)])
    assert all(w in str(e.value) for w in words), str(e.value)


@pytest.mark.parametrize("training", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3), (0, 3, 4), (2, 3, 0, 4)])
def test_of_nothing(shape: tuple[int, ...], training: int) -> None:
    text = (f"graph {{\n input x: f64{[*shape]}\n input w: f64[3]\n input b: f64[3]\n input m: f64[3]\n input v: f64[3]\n"
            f" y, p, q, s, r = batch_norm(x, w, b, m, v) {{training={training}}}\n output y\n output p\n output q\n}}")
    m, v = rand(3), rand(3).abs() + 1
    out, grads = engine.run(text, [torch.zeros(shape).double(), rand(3), rand(3), m, v], [1, 1, 1, 0, 0], [torch.zeros(shape).double(), None, None])
    assert out[0].shape == shape and torch.equal(out[1], m) and torch.equal(out[2], v)
    assert grads[0].shape == shape and not grads[1].any() and not grads[2].any()
