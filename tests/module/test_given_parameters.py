"""A custom Function, and a submodule that stays in PyTorch, are given the parameters themselves: backward may
differentiate by them again, read their attributes, write their gradients."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


class Again(torch.autograd.Function):
    """A checkpoint that differentiates by the parameters it is given, as models of diffusion have it."""

    @staticmethod
    def forward(ctx: Any, run: Any, n: int, *args: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.params = run, list(args[:n]), list(args[n:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        return None, None, *torch.autograd.grad(out, inputs + ctx.params, grad, allow_unused=True)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() * (1 if isinstance(weight, nn.Parameter) else 100)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class MainGrad(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.t() @ x)
        return grad @ weight, None


class OwnGrad(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        own = grad.t() @ x
        weight.grad = own if weight.grad is None else weight.grad + own
        return grad @ weight, None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(self.inner, 1, x, *self.parameters())


class Uses(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.layer.weight)


class Kept(Uses):
    """Stays in PyTorch for the random number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Tied(Uses):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.layer.weight).tanh()


CASES = {
    "checkpoint": Checkpointed,
    **{f.__name__: lambda f=f: Uses(f) for f in (Product, MainGrad, OwnGrad)},
    **{f"kept, {f.__name__}": lambda f=f: Kept(f) for f in (Product, MainGrad, OwnGrad)},
    **{f"tied, {f.__name__}": lambda f=f: Tied(f) for f in (Product, MainGrad)},
}


def net(name: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), CASES[name](), nn.Linear(4, 2))


def twins(name: str) -> tuple[nn.Sequential, ORTModule]:
    eager = net(name)
    wrapped = ORTModule(copy.deepcopy(eager))
    for m in (eager, wrapped):  # attributes of parameters are not copied
        m[1].layer.weight.main_grad = torch.zeros(4, 4)
    return eager, wrapped


def state(model: nn.Module) -> list[Any]:
    return [(p.grad, getattr(p, "main_grad", None)) for p in model.parameters()]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eagers(name: str, frozen: bool) -> None:
    eager, wrapped = twins(name)
    for m in (eager, wrapped):
        m[1].layer.weight.requires_grad_(not frozen)
    for step in range(4):
        x = torch.randn(3, 4)
        for m in (eager, wrapped):
            if frozen and isinstance(m[1], Checkpointed):
                return  # eager cannot differentiate by what is frozen
            random.seed(step)
            m(x).square().sum().backward()
        torch.testing.assert_close(state(wrapped), state(eager), rtol=1e-10, atol=1e-12)
    assert wrapped.report().graphs, str(wrapped.report())


@pytest.mark.parametrize("name", ["Product", "tied, Product", "kept, Product"])
def test_hooks_of_a_parameter_run_once_with_the_whole_gradient(name: str) -> None:
    eager, wrapped = twins(name)
    seen: dict[str, list[Tensor]] = {"eager": [], "wrapped": []}
    for m, found in ((eager, seen["eager"]), (wrapped, seen["wrapped"])):
        m[1].layer.weight.register_hook(lambda g, found=found: found.append(g.clone()) or g * 2)
    for step in range(3):
        x = torch.randn(3, 4)
        for m in (eager, wrapped):
            random.seed(step)
            m(x).square().sum().backward()
    torch.testing.assert_close(seen["wrapped"], seen["eager"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state(wrapped), state(eager), rtol=1e-10, atol=1e-12)
