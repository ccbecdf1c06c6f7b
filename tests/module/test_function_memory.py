"""Custom autograd.Functions that return memory of their arguments, under FALLBACK_DISABLE, as onnxruntime-training's tests
have them: they run, what shares memory in eager shares it here, or a sentence says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ortmodule import FallbackPolicy, ORTModule, ORTModuleONNXModelException

DISABLE = FallbackPolicy.FALLBACK_DISABLE


class Named(Function):
    """As in onnxruntime-training's test of pointers: an argument that is no tensor, and the input's own memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * len(ctx.name), None


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Named.apply(x, "temp_name")  # type: ignore[no-any-return]


def test_pointer_type() -> None:
    x, y = (torch.arange(6.0).requires_grad_() for _ in range(2))
    wrapped, eager = ORTModule(Whole(), fallback_policy=DISABLE), Whole()
    for _ in range(3):
        a, b = wrapped(x), eager(y)
        assert torch.equal(a, b) and a.data_ptr() == x.data_ptr() and b.data_ptr() == y.data_ptr()
        assert type(a.grad_fn).__name__ == type(b.grad_fn).__name__
        (a * 3).sum().backward()
        (b * 3).sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert not wrapped.report().eager and wrapped.report().graphs


class Beside(nn.Module):
    """The result stands beside others that the engine computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        return {"own": Named.apply(x, "abc"), "made": self.fc(x * 2) + z}


@pytest.mark.parametrize("n", [2, 5])
def test_edits_of_the_result_are_seen_in_the_argument(n: int) -> None:
    eager = Beside()
    wrapped = ORTModule(copy.deepcopy(eager), fallback_policy=DISABLE)
    for size in (n, n, n + 1):  # the last with symbols for sizes
        x = torch.randn(size, 6)
        pairs = []
        for model in (wrapped, eager):
            given = x.clone()
            z = torch.ones(3, requires_grad=True)
            out = model(given, z)
            model.zero_grad()
            out["made"].square().sum().backward()
            out["own"].add_(1)
            pairs.append([given, out["own"], out["made"].detach(), z.grad, *[p.grad for p in model.parameters()]])
        for got, want in zip(*pairs, strict=True):
            torch.testing.assert_close(got, want)
    assert not wrapped.report().eager


class Inner(nn.Module):
    """Memory of a value inside: nobody outside can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Named.apply(self.a(x), "four").relu())


class Twice(nn.Module):
    """Two results over one argument: kept apart, they would not see each other's edits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = Named.apply(x, "a")
        return y, y * 2


def test_memory_of_a_value_inside() -> None:
    eager = Inner()
    wrapped = ORTModule(copy.deepcopy(eager), fallback_policy=DISABLE)
    x = torch.randn(4, 6)
    for model in (wrapped, eager):
        model(x).square().sum().backward()
    for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_what_cannot_be_is_refused_by_a_sentence() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ORTModuleONNXModelException, match="returns memory of an argument or of another result; FALLBACK_UNSUPPORTED_ONNX_MODEL"):
        ORTModule(Twice(), fallback_policy=DISABLE)(x)
    for got, want in zip(ORTModule(Twice())(x), Twice()(x), strict=True):
        assert torch.equal(got, want)


class NoGradFn(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return ids, x * y

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return None, grad * y, grad * x


class AsksGradFn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.ids = nn.Parameter(torch.rand(4)), torch.tensor([1, 4, 6, 7])

    def forward(self, x: Tensor) -> Tensor:
        ids, z = NoGradFn.apply(self.ids, x, self.bias)
        assert hasattr(ids, "grad_fn") and ids.grad_fn is None
        return z


def test_two_outputs_function_none_grad_fn() -> None:
    """An integer never has one, so that may be asked; of a float the answer belongs to one moment."""
    eager = AsksGradFn()
    wrapped = ORTModule(copy.deepcopy(eager), fallback_policy=DISABLE)
    x = torch.randn(3, 4)
    for model in (wrapped, eager):
        model(x).square().sum().backward()
    torch.testing.assert_close(wrapped.bias.grad, eager.bias.grad)

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.grad_fn is None else x

    with pytest.raises(ORTModuleONNXModelException, match=r"forward reads Tensor.grad_fn.*FALLBACK_UNSUPPORTED_ONNX_MODEL"):
        ORTModule(Asks(), fallback_policy=DISABLE)(x)
