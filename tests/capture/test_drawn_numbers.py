"""What forward draws from torch's generator is PyTorch's own: the numbers of eager for the same seed, at every call, also
the one that captures, and what is drawn afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


def unread(m: Any, x: Tensor) -> Tensor:
    torch.randn(3)
    return m.linear(x) * torch.rand(4)


def slopes(m: Any, x: Tensor) -> Tensor:
    torch.nn.functional.rrelu(x, training=True)
    torch.nn.functional.rrelu(x, training=False)
    return torch.nn.functional.rrelu(m.linear(x), training=True)


def ordered(m: Any, x: Tensor) -> Tensor:
    a = torch.randn(4, 4)
    b = torch.randn(4, 4, device="cpu")
    return m.linear(x) @ b @ a


def like(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    return h + torch.randn_like(h, device="cpu") + torch.distributions.Normal(h, h.exp()).rsample()


def stored(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.p.copy_(torch.linalg.qr(torch.randn(4, 4))[0] * torch.randn(4, 4).norm(dim=1)[:, None])
    return m.linear(x) @ m.p


def drawn_anew(m: Any, x: Tensor) -> Tensor:
    """As Performer's projections: after so many calls."""
    m.n.add_(1)
    if m.n >= 2:
        m.n.zero_()
        m.p.copy_(torch.randn(4, 4) * torch.randn(4, 4).norm(dim=1)[:, None])
    return m.linear(x) @ m.p


class Net(nn.Module):
    def __init__(self, rule: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rule = rule
        self.n: Tensor
        self.p: Tensor
        self.register_buffer("n", torch.tensor(0))
        self.register_buffer("p", torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def same_step(eager: Any, ours: Any, x: Tensor, seed: int, look: Callable[[Any], list[Tensor]], bound: float) -> None:
    """One step of each from the same seed: results, what `look` sees, and what is drawn afterwards."""
    told = []
    for m in (eager, ours):
        m.zero_grad()
        torch.manual_seed(seed)
        y = m(x)
        y.square().sum().backward()
        told.append([y.detach(), *look(m), torch.rand(2)])
    for a, b in zip(*told, strict=True):
        torch.testing.assert_close(b, a, rtol=bound, atol=bound)


@pytest.mark.parametrize("rule", [unread, slopes, ordered, like, stored, drawn_anew])
def test_numbers_are_those_of_eager(rule: Callable[[Any, Tensor], Tensor]) -> None:
    eager = Net(rule)
    ours = ORTModule(Net(rule))
    ours.load_state_dict(eager.state_dict())
    for i, rows in enumerate((2, 2, 3, 3)):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(i))
        same_step(eager, ours, x, i, lambda m: [m.linear.weight.grad.clone(), m.p.clone()], 1e-4)
    assert not ours.report().eager, str(ours.report())


@pytest.mark.parametrize("n", [0, 1, 3])
def test_dropout_takes_one_seed_or_none(n: int) -> None:
    """n: dropouts whose results are read, beside one whose is not."""

    def dropped(m: Any, x: Tensor) -> Tensor:
        torch.nn.functional.dropout(x)
        h = m.linear(x)
        for _ in range(n):
            h = torch.nn.functional.dropout(h)
        return h

    ours = ORTModule(Net(dropped))
    for seed in range(3):
        torch.manual_seed(seed)
        ours(torch.ones(3, 4))
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        if n:
            torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(after, torch.get_rng_state())


IN_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda h: h + torch.randn_like(h),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randint_like": lambda h: h * torch.randint_like(h, 2, 90),
    "other type": lambda h: h + torch.randn_like(h, dtype=torch.float32),
    "as it lies": lambda h: h + torch.randn_like(h, memory_format=torch.contiguous_format),
    "in place": lambda h: h + torch.empty_like(h).normal_().exp() + torch.empty_like(h).exponential_(),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.3),
    "of values": lambda h: h * torch.bernoulli(h.sigmoid()) + torch.normal(h, h.exp()) + torch.poisson(h.exp()),
    "multinomial": lambda h: h * torch.multinomial(h.exp().reshape(-1, h.shape[-1]), 3).sum(),
    "distribution": lambda h: torch.distributions.Normal(h, h.exp()).rsample() + torch.nn.functional.gumbel_softmax(h),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_MEMORY)
@pytest.mark.parametrize("lies", ["turned", "channels_last", "as it came", "turned twice"])
def test_numbers_go_to_where_memory_has_them(name: str, lies: str) -> None:
    """PyTorch fills memory in its order, and normal_ by another method where that is not row by row."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).transpose(1, 3).tanh() if lies == "turned" else self.conv(x) \
                if lies == "channels_last" else x.sin() * self.linear.bias[0] if lies == "as it came" \
                else self.linear(x).permute(1, 2, 0, 3).exp().transpose(0, 3)  # fmt: skip
            return IN_MEMORY[name](h)

    eager = Drawn().double()
    ours = ORTModule(Drawn().double())
    ours.load_state_dict(eager.state_dict())
    for i, size in enumerate((3, 3, 5, 5, 2)):
        x = torch.randn(size, 4, 4, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        if lies == "channels_last" or lies == "as it came" and i % 2:
            x = x.to(memory_format=torch.channels_last)
        same_step(eager, ours, x, i, lambda m: [p.grad for p in m.parameters() if p.grad is not None], 1e-9)


def test_integers_drawn_like_what_requires_a_gradient() -> None:
    torch.manual_seed(0)
    eager, ours = (make(lambda m, x: (h := m.linear(x)) * torch.randint_like(h, 2, 9)) for make in (Net, lambda f: ORTModule(Net(f))))
    ours.load_state_dict(eager.state_dict())
    for i in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        same_step(eager, ours, x, i, lambda m: [m.linear.weight.grad.clone()], 1e-4)
    assert not ours.report().eager, str(ours.report())


def test_gaps_in_memory() -> None:
    def gaps(m: Any, x: Tensor) -> Tensor:
        h = m.linear(x) * 1
        h.detach()[:, ::2].normal_()
        return h

    torch.manual_seed(0)
    eager, ours = Net(gaps), ORTModule(Net(gaps))
    ours.load_state_dict(eager.state_dict())
    for rows in (12, 12, 3):
        x = torch.randn(rows, 4)
        made = []
        for m in (eager, ours):
            torch.manual_seed(rows)
            made.append(m(x).detach())
        torch.testing.assert_close(*made)
