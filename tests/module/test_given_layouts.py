"""What PyTorch and the user's own code are given in the midst of a graph lies in memory as in eager: code may ask for
that (.view), or read memory as it lies (native kernels)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


def in_memory(x: Tensor) -> Tensor:
    """The elements one behind the other, whatever the strides say."""
    return torch.as_strided(x, (x.numel(),), (1,)) * torch.arange(1, x.numel() + 1, dtype=x.dtype)


class Raw(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        ctx.order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
        return in_memory(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        g = (g * torch.arange(1, g.numel() + 1, dtype=g.dtype)).view([ctx.shape[d] for d in ctx.order])
        return g.permute([ctx.order.index(d) for d in range(g.dim())])


class Kept(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return in_memory(x.clone()) + random.random() * 0


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1) + random.random() * 0


@torch.library.custom_op("given_layouts::raw", mutates_args=())
def raw_op(x: Tensor) -> Tensor:
    return in_memory(x)


raw_op.register_fake(lambda x: x.new_empty(x.numel()))  # pyright: ignore
raw_op.register_autograd(lambda ctx, g: (g * torch.arange(1, g.numel() + 1, dtype=g.dtype)).view(ctx.shape),
                         setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape))  # fmt: skip


class Net(nn.Module):
    def __init__(self, before: Callable[[Tensor], Tensor], code: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(4, 4), nn.Conv2d(3, 3, 1)
        self.kept, self.views = Kept(), Views()
        self.before, self.code = before, code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, self.before(self.conv(self.first(x)))).square().sum()


BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda h: h.transpose(1, 2).contiguous(),
    "clone": lambda h: h.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format),
    "channels last": lambda h: h.contiguous(memory_format=torch.channels_last),
    "elementwise": lambda h: (h.transpose(1, 2) + 1).relu(),
    "turned product": lambda h: (h @ h.transpose(-1, -2)).transpose(-1, -2).contiguous(),
    "selected": lambda h: h.transpose(1, 2)[:, [0, 2]].contiguous(),
}
CODE: dict[str, Callable[..., Tensor]] = {
    "Function": lambda m, h: Raw.apply(h),
    "module": lambda m, h: m.kept(h),
}


def beside(net: Net, sizes: tuple[int, ...] = (2, 2, 3, 5)) -> ORTModule:
    net = net.double()
    eager, model = copy.deepcopy(net), ORTModule(net)
    for n in sizes:
        x = torch.randn(n, 3, 5, 4, dtype=torch.float64)
        for m in (eager, model):
            m.zero_grad()
        a, b = eager(x), model(x)
        a.backward()
        b.backward()
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
        for p, q in zip(eager.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)
    assert not model.report().eager, str(model.report())
    return model


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("before", BEFORE)
def test_memory_as_in_eager(before: str, code: str) -> None:
    beside(Net(BEFORE[before], CODE[code]))


@pytest.mark.parametrize("before", ["contiguous", "clone", "turned product"])
def test_an_operator_of_a_library(before: str) -> None:
    beside(Net(BEFORE[before], lambda m, h: raw_op(h)))


def test_a_view_of_what_is_contiguous() -> None:
    beside(Net(BEFORE["contiguous"], lambda m, h: m.views(h)))


def test_complex_numbers_of_what_is_contiguous() -> None:
    """Pairs that lie side by side."""
    beside(Net(lambda h: h.reshape(-1, 3, 5, 2, 2).transpose(1, 2).contiguous(),
               lambda m, h: torch.view_as_real(torch.view_as_complex(h) * 1j).abs()))  # fmt: skip
