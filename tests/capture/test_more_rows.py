"""Rows of the operator table that few models need, beside PyTorch: the captured file (also in onnxruntime), and a
wrapped module at sizes that vary, wholly in the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import Fn, check, k, r, u
from torch import Tensor, nn

from ortmodule import ORTModule


def inside(*shape: int) -> Tensor:
    return (torch.tanh(r(*shape)) * 0.9).detach().requires_grad_()


def twin(f: Callable[..., Any], *calls: tuple) -> Any:
    """Outputs and gradients of the arguments in float64, as eager's; nothing in PyTorch."""
    model = ORTModule(Fn(f), strict="engine")
    for args in calls:
        made = []
        for m in (f, model):
            own = [a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else copy.deepcopy(a)
                   for a in args]
            y = m(*own)
            g = torch.Generator().manual_seed(5)
            if y.requires_grad:
                y.backward(torch.randn(y.shape, generator=g, dtype=y.dtype))
            made.append([y.detach(), *(a.grad for a in own if isinstance(a, Tensor) and a.requires_grad)])
        for a, b in zip(*made, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10, equal_nan=True)
    report = model.report()
    assert report.node_share == 1 and not report.eager and not report.host, str(report)
    return model


def both(f: Callable[..., Any], *calls: tuple, ort: bool = True) -> None:
    check(Fn(f), calls[0], ort=ort)
    twin(f, *calls)


@pytest.mark.parametrize("name", ["acos", "asin", "atan", "atanh", "tan", "sinh", "cosh"])
def test_inverse_and_hyperbolic(name: str) -> None:
    both(getattr(torch, name), (inside(5, 7),), (inside(3, 2),), (inside(1, 9),))


@pytest.mark.parametrize("f", [torch.lgamma, torch.digamma, lambda x: torch.acosh(x + 1)])
def test_gamma(f: Callable[..., Any]) -> None:
    both(f, (u(5, 7),), (u(3, 2),), (u(1, 9),))
    twin(f, ((u(4, 5) * 20).detach().requires_grad_(),))


def test_two_operands() -> None:
    both(torch.atan2, (r(5, 7), r(7)), (r(2, 3), r(3)))
    both(torch.xlogy, (r(5, 1), u(5, 7)), (r(3, 1), u(3, 2)))
    both(lambda x: torch.xlogy(x, 2.5) + torch.xlogy(3, x.abs() + 1), (r(5, 7),), (r(4, 2),))


@pytest.mark.parametrize("make", [
    lambda a, b: torch.distributions.Beta(a, b).log_prob(torch.full((), 0.3, dtype=a.dtype)),
    lambda a, b: torch.distributions.Gamma(a, b).entropy(),
    lambda a, b: torch.distributions.kl_divergence(torch.distributions.Dirichlet(a), torch.distributions.Dirichlet(b))])
def test_distributions(make: Callable[..., Tensor]) -> None:
    twin(make, (u(5, 7), u(5, 7)), (u(3, 7), u(3, 7)))


@pytest.mark.parametrize("correction", [1, 2, 3, 5])
def test_more_corrections_than_elements(correction: int) -> None:
    made = []
    for m in (f := Fn(lambda x: x.var(0, correction=correction)), ORTModule(copy.deepcopy(f))):
        made.append([])
        for rows in (7, 6, 2, 1):
            x = torch.tensor([[1.0, 2], [3, 7], [4, 9], [2, 2], [0, 5], [1, 8], [3, 3]])[:rows].requires_grad_()
            y = m(x)
            y.sum().backward()
            made[-1] += [y.detach(), x.grad]
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(b, a, equal_nan=True)


def test_variance_below_its_bound() -> None:
    """The loss clamps the variance under no_grad, inside of a function of PyTorch's."""
    for reduction in ("sum", "mean", "none"):
        twin(lambda x, y, v, r=reduction: F.gaussian_nll_loss(x, y, (v - 0.5).relu(), full=True, eps=0.2, reduction=r),
             (r(5, 7), r(5, 7), u(5, 7)), (r(3, 2), r(3, 2), u(3, 2)))


def test_channel_shuffle() -> None:
    both(lambda x: torch.channel_shuffle(x, 3), (r(2, 6, 4, 5),), (r(3, 6, 2, 2),), (r(1, 6, 3, 3),))


@pytest.mark.parametrize("corners", [False, True])
def test_affine_grid(corners: bool) -> None:
    both(lambda t: F.affine_grid(t, [t.shape[0], 1, 4, 5], align_corners=corners), (r(3, 2, 3),), (r(2, 2, 3),))
    both(lambda t: F.affine_grid(t, [t.shape[0], 1, 1, 5], align_corners=corners), (r(3, 2, 3),))
    both(lambda t: F.affine_grid(t, [t.shape[0], 1, 3, 4, 5], align_corners=corners), (r(3, 3, 4),))
    twin(lambda t, x: F.affine_grid(t, x.shape, align_corners=corners) * x.mean(), (r(3, 2, 3), r(3, 1, 4, 5)), (r(3, 2, 3), r(3, 1, 1, 7)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("corners", [True, False])
def test_affine_grid_of_a_map_that_changes_nothing(corners: bool, dtype: torch.dtype) -> None:
    """Its places are whole pixels, at which the last bit decides what gradient grid_sample has."""
    model = ORTModule(Fn(lambda t: F.affine_grid(t, [t.shape[0], 1, 28, 7], align_corners=corners)), strict="engine")
    for rows in (2, 3, 4):
        same = torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=dtype).repeat(rows, 1, 1).requires_grad_()
        assert torch.equal(model(same), F.affine_grid(same, [rows, 1, 28, 7], align_corners=corners))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_loss(p: int, reduction: str) -> None:
    def f(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return F.multi_margin_loss(x, t, p, 0.7, w, reduction=reduction)

    both(f, (r(5, 7), k(7, 5), u(7).detach()), (r(3, 7), k(7, 3), u(7).detach()))
    both(lambda x, t: F.multi_margin_loss(x, t, p, reduction=reduction), (r(5, 7), k(7, 5)), (r(1, 7), k(7, 1)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_soft_margin_loss(reduction: str) -> None:
    def f(x: Tensor, t: Tensor) -> Tensor:
        return F.soft_margin_loss(x * 30, t.sign(), reduction=reduction)

    both(f, (r(5, 7), r(5, 7).detach()), (r(3, 2), r(3, 2).detach()))
    large = torch.tensor([-900.0, 900.0, 0.0], requires_grad=True)  # an infinite loss, whose gradient is NaN
    twin(lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction=reduction), (large,))


@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(bias: bool) -> None:
    def f(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.bilinear(x, y, w, b if bias else None)

    w, b = r(4, 6, 3), r(4)
    both(f, (r(5, 6), r(5, 3), w, b), (r(2, 6), r(2, 3), w, b))
    both(f, (r(5, 2, 6), r(5, 2, 3), w, b), (r(3, 7, 6), r(3, 7, 3), w, b))
    both(f, (r(6), r(3), w, b))
    both(f, (r(5, 1), r(5, 1), r(1, 1, 1), r(1)))


def test_cross_products() -> None:
    both(torch.linalg.cross, (r(5, 3), r(5, 3)), (r(2, 3), r(2, 3)))
    both(lambda x, y: torch.linalg.cross(x, y, dim=0), (r(3, 5), r(3, 1)))
    both(lambda x, y: torch.cross(x, y, dim=1), (r(2, 3, 4), r(1, 3, 4)))
    twin(lambda x, y: torch.cross(x, y), (r(3, 4, 3), r(3, 4, 3)), (r(3, 5, 3), r(3, 5, 3)))


def test_triangle_indices() -> None:
    def f(x: Tensor) -> Tensor:
        i, j = torch.tril_indices(5, 5, -1)
        a, b = torch.triu_indices(5, 7, 1)
        return torch.cat([x[:, i, j], x[:, a, b]], 1)

    both(f, (r(3, 5, 7),), (r(2, 5, 7),))


@pytest.mark.parametrize("size", [(2, 3), (1, 1), (5, 7), (8, 9), (None, 2)])
def test_adaptive_max_pool(size: tuple) -> None:
    both(lambda x: F.adaptive_max_pool2d(x, size), (r(2, 3, 6, 7),), (r(3, 3, 6, 7),), (r(2, 3, 9, 5),))
    twin(lambda x: F.adaptive_max_pool2d(x.round(), size) * x.mean(), (r(2, 3, 6, 7),))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_binary_cross_entropy(reduction: str) -> None:
    def f(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, t, w, reduction=reduction)

    x = (u(5, 7) / 2).detach().requires_grad_()
    both(f, (x, (u(5, 7) / 2).detach(), u(7).detach()), (u(3, 7).detach().div(2).requires_grad_(), u(3, 7) / 2, u(7).detach()))
    ends = torch.tensor([0.0, 1, 0, 1, 0.5]).requires_grad_()
    twin(lambda x, t: F.binary_cross_entropy(x, t, reduction=reduction), (ends, torch.tensor([0.0, 1, 1, 0, 0.2]).requires_grad_()))


def test_binary_cross_entropy_outside() -> None:
    """PyTorch's own error, also at a later call; and the next one computes."""
    model = ORTModule(Fn(lambda x, t: F.binary_cross_entropy(x, t)))
    good, t = torch.full((4,), 0.3, requires_grad=True), torch.ones(4)
    for bad in (1.5, -0.1, float("nan")):
        model(good, t).backward()
        with pytest.raises(RuntimeError, match="between 0 and 1"):
            model(torch.tensor([0.5, bad, 0.1, 0.2]), t)
        assert torch.isfinite(model(good, t))


def test_logcumsumexp() -> None:
    both(lambda x: x.logcumsumexp(1), (r(5, 7),), (r(3, 4),))
    both(lambda x: x.logcumsumexp(0) + x.logcumsumexp(-1), (r(5, 7, 2),), (r(3, 7, 2),))


def test_searchsorted_and_bucketize() -> None:
    both(lambda x, v: torch.searchsorted(x.sort(-1).values, v) * v, (r(3, 9), r(3, 4)), (r(2, 9), r(2, 6)))
    both(lambda v: torch.bucketize(v, torch.tensor([-1.0, 0, 1], dtype=v.dtype), right=True) * v, (r(5, 7),), (r(2, 3),))
    both(lambda x: torch.searchsorted(x.sort().values, 0.1, side="right", out_int32=True) + x, (r(9),), (r(4),))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero", [False, True])
def test_ctc(reduction: str, zero: bool) -> None:
    def padded(x: Tensor, t: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), t, a, b, reduction=reduction, zero_infinity=zero)

    def picked(x: Tensor, t: Tensor, a: Tensor) -> Tensor:
        mask = t > 0
        return F.ctc_loss(x.log_softmax(-1), t.masked_select(mask), a, mask.sum(-1), reduction=reduction, zero_infinity=zero)

    def call(time: int, n: int, s: int) -> tuple:
        return r(time, n, 6), k(6, n, s, low=1), torch.full((n,), time), k(s + 1, n)

    both(padded, call(9, 3, 4), call(7, 2, 3), call(12, 1, 4), ort=False)
    both(picked, (r(9, 3, 6), k(6, 3, 5), torch.tensor([9, 8, 9])), (r(11, 2, 6), k(6, 2, 7), torch.tensor([11, 8])), ort=False)
    numbers = [5, 4]
    twin(lambda x, t: F.ctc_loss(x.log_softmax(-1), t, [9, 7], numbers[:1] + [2], reduction=reduction), (r(9, 2, 6), k(6, 7, low=1)))


def test_ctc_that_does_not_fit() -> None:
    model = ORTModule(Fn(lambda x, t, a, b: F.ctc_loss(x.log_softmax(-1), t, a, b)))
    x, t, b = r(9, 2, 6), k(6, 2, 4, low=1), torch.tensor([3, 4])
    model(x, t, torch.tensor([9, 9]), b).backward()
    with pytest.raises(RuntimeError, match="input_lengths"):
        model(x, t, torch.tensor([9, 10]), b)
    assert torch.isfinite(model(x, t, torch.tensor([9, 9]), b))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(16, 4), nn.Parameter(r(4, 16, 8).detach())

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.nn.functional.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
        y = torch._grouped_mm(x[order].to(torch.bfloat16), self.w.to(torch.bfloat16), ends)
        return y.float() * weight[order].unsqueeze(-1)


def test_grouped_product() -> None:
    """PyTorch has it in bfloat16 alone: held against a loop over the experts."""
    model = Experts()
    c = check(model, (r(10, 16),), ort=False, tolerance=1e-2)
    assert not c.host_ops
