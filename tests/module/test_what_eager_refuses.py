"""Operands that PyTorch's kernels refuse for their types, values or sizes, and a trace does not: the error is eager's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule

CASES = {
    "1 - mask": lambda h, n: h * (1 - (h > 0)), "mask - 1": lambda h, n: h * ((h > 0) - 1), "mask - mask": lambda h, n: h * ((h > 0) - (h > 1)), "int - True": lambda h, n: h * (n - True), "True - int": lambda h, n: h * (True - n),
    "int - mask": lambda h, n: h * (n - (h > 0)), "float - mask": lambda h, n: h - (h > 0), "True - float": lambda h, n: True - h, "rsub": lambda h, n: h * torch.rsub(h > 0, n), "sub_": lambda h, n: h * n.clone().sub_(h > 0),
    "alpha": lambda h, n: h * torch.add(n, n, alpha=True), "float alpha": lambda h, n: h * torch.add(n, n, alpha=1.5), "mul_": lambda h, n: h * n.clone().mul_(1.5), "add_": lambda h, n: h * n.clone().add_(0.5), "out": lambda h, n: h * torch.mul(n, 1.5, out=n.clone()),
    "lerp": lambda h, n: h * torch.lerp(n, n, 0.5), "var": lambda h, n: h * (h > 0).var(), "std": lambda h, n: h * n.std(), "cross": lambda h, n: h[:, :3].cross(h.detach().float()[:, :3], 1),
    "cdist": lambda h, n: torch.cdist(h, h.float()), "weights of classes": lambda h, n: F.cross_entropy(h, n[:, 0] % 4, weight=torch.ones(4)), "nll_loss": lambda h, n: F.nll_loss(h, n[:, 0] % 4, weight=torch.ones(4)), "embedding_bag": lambda h, n: F.embedding_bag(n % 2, h, mode="sum", per_sample_weights=n.float()),
    # constant indices below 0
    "embedding": lambda h, n: F.embedding(torch.tensor([0, -1]), h), "one index": lambda h, n: F.embedding(torch.tensor(-1), h), "index_select": lambda h, n: h.index_select(1, torch.arange(2) - 1), "gather": lambda h, n: h.gather(1, torch.tensor([[0, -1]])), "scatter": lambda h, n: h.scatter(1, torch.tensor([[0, -1]]), h), "scatter_add": lambda h, n: h.scatter_add(1, torch.tensor([[0, -1]]), h),
    "scatter_reduce": lambda h, n: h.scatter_reduce(1, torch.tensor([[0, -1]]), h, "amax"), "one_hot": lambda h, n: h[:2] * F.one_hot(torch.tensor([-1, 2]), 4), "one_hot of a size": lambda h, n: h * F.one_hot(torch.full((h.shape[0],), -1), 4), "full": lambda h, n: h.sum() + F.embedding(torch.full((2,), -1), h),
    "targets of binary_cross_entropy": lambda h, n: F.binary_cross_entropy(h.sigmoid(), n.double()), "NaN among them": lambda h, n: F.binary_cross_entropy(h.sigmoid(), n.double() * float("nan")),
    # sizes that it has no room for
    "weight of more": lambda h, n: F.binary_cross_entropy(h.sigmoid(), torch.ones_like(h), torch.ones(2, 1, 1).double().expand(2, *h.shape)), "with logits": lambda h, n: F.binary_cross_entropy_with_logits(h, torch.ones_like(h), torch.ones(2, 1, 1).double()),
    "pos_weight": lambda h, n: F.binary_cross_entropy_with_logits(h[:, :1], torch.ones_like(h)[:, :1], pos_weight=torch.ones(4).double()), "mask of more axes": lambda h, n: F.scaled_dot_product_attention(h[None], h[None], h[None], torch.ones(1, 1, 1, len(h)).double()),
    "to nothing": lambda h, n: F.interpolate(h[None], scale_factor=0.05), "bilinear to nothing": lambda h, n: F.interpolate(h[None, None], scale_factor=0.05, mode="bilinear"), "linear bytes": lambda h, n: h.sum() * F.interpolate(n[None].byte(), size=9, mode="linear"),
}  # fmt: skip
ELSEWHERE = {  # right, though PyTorch computes a part
    "interpolate bytes": lambda h, n: h.mean() * F.interpolate(30 * n[None, None].byte(), size=(7, 9), mode="bilinear"), "bicubic": lambda h, n: h.mean() * F.interpolate(30 * n[None, None].byte(), size=(7, 9), mode="bicubic"),
    "nearest 1.1": lambda h, n: F.interpolate(h[None], scale_factor=1.1), "nearest 2.1": lambda h, n: F.interpolate(h[None], scale_factor=2.1), "nearest 3-d": lambda h, n: F.interpolate(h[None, None, None], scale_factor=1.1), "exact": lambda h, n: F.interpolate(h[None], scale_factor=2.1, mode="nearest-exact"),
    "multi_margin_loss": lambda h, n: F.multi_margin_loss(h[0], n[0, 1], reduction="none"),
}
ALLOWED = {
    "l1_loss": lambda h, n: F.l1_loss(h, n.double(), weight=n + 0.5), "l1_loss, by place": lambda h, n: F.l1_loss(h, n.double(), None, None, "none", n + 0.5), "of no weights": lambda h, n: nn.L1Loss()(h, n.double()),
    "mask": lambda h, n: F.scaled_dot_product_attention(h[None], h[None], h[None], torch.ones(len(h), len(h)).double()), "weight": lambda h, n: F.binary_cross_entropy_with_logits(h, torch.ones_like(h), n[:, :1] + 0.5, pos_weight=n[0].double()),
    "nearest by whole numbers": lambda h, n: F.interpolate(h[None], scale_factor=2.0), "nearest 1.5": lambda h, n: F.interpolate(h[None, None], scale_factor=1.5),
    "mask - float": lambda h, n: h * ((h > 0).double() - 1), "~mask": lambda h, n: h * ~(h > 0), "mask + mask": lambda h, n: h * ((h > 0) + (h > 1)), "int - int": lambda h, n: h * (n - 2), "int / int": lambda h, n: h * (n / 3), "mul_": lambda h, n: h * n.clone().mul_(3),
    "alpha": lambda h, n: h * torch.add(n, n, alpha=2), "float + int": lambda h, n: h + n, "0-dim": lambda h, n: h - n.sum(), "where": lambda h, n: torch.where(n > 3, h, 0.5), "masked_fill": lambda h, n: h.masked_fill(n > 3, float("-inf")).exp(), "clamp": lambda h, n: h.clamp(-1, n.sum()),
    "negative index": lambda h, n: h[torch.tensor([0, -1])], "select": lambda h, n: h.select(0, -1), "embedding": lambda h, n: F.embedding(torch.tensor([0, 1]), h), "one_hot": lambda h, n: h[:2] * F.one_hot(torch.tensor([1, 2]), 4),
    "weights of classes": lambda h, n: F.cross_entropy(h, n[:, 0] % 4, weight=torch.ones(4).double()), "without": lambda h, n: F.nll_loss(h, n[:, 0] % 4), "binary_cross_entropy": lambda h, n: F.binary_cross_entropy(h.sigmoid(), (n > 3).double()), "cdist": lambda h, n: torch.cdist(h, h + 1),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.l, self.f = nn.Linear(4, 4), f

    def forward(self, x, n):
        return self.f(self.l(x), n)


def outcome(model, rows):
    x, n = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)), torch.arange(4 * rows).view(rows, 4)
    try:
        return model(x, n)
    except Exception as error:
        return type(error), str(error)


def pair(f):
    torch.manual_seed(0)
    model = Model(f).double()
    return ORTModule(model), model


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_eagers(name):
    ours, eager = pair(CASES[name])
    for rows in (3, 3, 2, 5):
        there = outcome(eager, rows)
        assert isinstance(there, tuple) and outcome(ours, rows) == there


@pytest.mark.parametrize("name", ALLOWED)
def test_the_rest_stays_in_the_engine(name):
    ours, eager = pair(ALLOWED[name])
    for rows in (3, 3, 2):
        torch.testing.assert_close(outcome(ours, rows), outcome(eager, rows))
    assert not ours.report().eager and not ours.report().host


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_gradients_are_eagers(name):
    ours, eager = pair(ELSEWHERE[name])
    for rows in (3, 3, 2):
        a, b = outcome(ours, rows), outcome(eager, rows)
        assert a.shape == b.shape
        for model, y in ((ours, a), (eager, b)):
            model.zero_grad()
            (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum().backward()
            if model is ours:
                grads = [p.grad.clone() for p in model.parameters()]
        torch.testing.assert_close((a, *grads), (b, *[p.grad for p in eager.parameters()]))


def test_under_autocast():
    ours, eager = pair(lambda h, n: h * (1 - (h > 0)))
    with torch.autocast("cpu", torch.bfloat16):
        assert outcome(ours, 3) == outcome(eager, 3)
        mixed, plain = pair(lambda h, n: h * (h > 0) + h.float() * n)
        torch.testing.assert_close(outcome(mixed, 3), outcome(plain, 3), rtol=1e-2, atol=1e-2)
        assert not mixed.report().host
