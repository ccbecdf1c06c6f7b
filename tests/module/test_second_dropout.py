"""Second derivatives through active dropout: PyTorch runs forward again and drops what the engine has dropped. Judge: the
engine's own first derivatives from the same seed, at two sides of a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule, masks

pytestmark = pytest.mark.usefixtures("seeded")


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(6, 6), function, nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x).tanh())).tanh()


def attention(h: Tensor) -> Tensor:
    q = h.view(2, 6, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q + 1, q * 2, dropout_p=0.3, is_causal=True).transpose(1, 2).reshape(12, 6)


def written_out(h: Tensor) -> Tensor:
    q = h.view(2, 6, 2, 3).transpose(1, 2)
    weights = F.dropout((q @ q.transpose(-1, -2) / 2).softmax(-1), 0.2)
    return (weights @ q).transpose(1, 2).reshape(12, 6)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "in place": lambda h: F.dropout(h * 2, 0.3, inplace=True),
    "several": lambda h: F.dropout(h, 0.5) * F.dropout(h, 0.1) + F.dropout(h.t(), 0.1).t(),
    "channels": lambda h: F.dropout2d(h.view(2, 3, -1, 6), 0.4).view(-1, 6),
    "with a mask": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "nothing, and all": lambda h: F.dropout(h, 0.0) + F.dropout(h, 1.0) + F.dropout(h, 0.2),
    "attention": attention,
    "attention written out": written_out,
}


def gradient(model: nn.Module, x: Tensor, v: Tensor, create_graph: bool = False) -> Any:
    torch.manual_seed(7)
    return torch.autograd.grad((model(x) * v).sum(), [x, *model.parameters()], create_graph=create_graph)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_derivative_of_the_engines_gradient(name: str) -> None:
    model = ORTModule(Applies(FUNCTIONS[name]))
    x, v = torch.randn(12, 6, requires_grad=True), torch.randn(12, 5)
    first, again = gradient(model, x, v), gradient(model, x, v, create_graph=True)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    along, step = torch.randn(12, 6), 1e-6
    second = torch.autograd.grad(again[0], x, along)[0]
    moved = [gradient(model, (x + s * along).detach().requires_grad_(), v)[0] for s in (step, -step)]
    torch.testing.assert_close(second, (moved[0] - moved[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    assert model.report().graphs[0].forwards and not model.report().eager


def test_a_critic_with_a_gradient_penalty_trains() -> None:
    model = ORTModule(nn.Sequential(nn.Linear(10, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1)))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(30):
        x = torch.randn(64, 10, requires_grad=True)
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (g.norm(2, 1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_in_other_types(dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 24, 0.2, batch_first=True)
    model = ORTModule(layer.float())
    x, v = torch.randn(3, 7, 12, dtype=torch.float32, requires_grad=True), torch.randn(3, 7, 12, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        first, again = gradient(model, x, v)[0], gradient(model, x, v, create_graph=True)[0]
    torch.testing.assert_close(again, first, rtol=1e-4, atol=5e-2 if dtype is torch.bfloat16 else 1e-5)
    assert torch.autograd.grad(again.square().sum(), x)[0].isfinite().all()


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda h: h * torch.rand_like(h),
    "coins": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "alpha": lambda h: F.alpha_dropout(h, 0.2, True),
    "one that nobody reads": lambda h: (F.dropout(h, 0.5), F.dropout(h, 0.2))[1],
    "slopes": lambda h: F.rrelu(h, training=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_drawn_otherwise_is_refused(name: str) -> None:
    model = ORTModule(Applies(OTHERS[name]))
    x, v = torch.randn(12, 6, requires_grad=True), torch.randn(12, 5)
    with pytest.raises(RuntimeError, match="their p to 0, or call eval"):
        gradient(model, x, v, create_graph=True)


def test_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = masks.kept
    monkeypatch.setattr(masks, "kept", lambda seed, stream, *rest: kept(seed, 3 - stream, *rest))
    model = ORTModule(Applies(lambda h: F.dropout(h, 0.3) + F.dropout(h * 2, 0.3)))
    x, v = torch.randn(12, 6, requires_grad=True), torch.randn(12, 5)
    with pytest.raises(RuntimeError, match="their p to 0, or call eval"):
        gradient(model, x, v, create_graph=True)
