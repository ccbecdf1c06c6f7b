"""What forward can learn of its tensors besides their values: which of them are one object, how they lie in memory, what
is attached to them, who shares their memory, and the exceptions that they cause. An ORTModule answers as eager PyTorch
does at every step, not as it was when it was captured (docs/SEMANTICS.md)."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

F64 = torch.float64


class Net(nn.Module):
    """`rule(self, *args)` is forward."""

    def __init__(self, rule: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)
        self.register_buffer("buf", torch.arange(20.0, dtype=F64).view(5, 4))
        if inner is not None:
            self.inner = inner
        self.rule = rule

    def forward(self, *args: Any) -> Any:
        return self.rule(self, *args)


def plain(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach().clone()
    return [plain(x) for x in out] if isinstance(out, (list, tuple)) else out


def outcome(m: nn.Module, given: Callable[[nn.Module, int], tuple[Any, ...]], step: int) -> Any:
    """Result, arguments afterwards, gradients; or the exception."""
    torch.manual_seed(step)
    random.seed(step)
    m.zero_grad()
    try:
        args = given(m, step)
        out = m(*args)
        outs = [t for t in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(t, Tensor)]
        loss = [t.sin().sum() for t in outs if t.requires_grad]
        if loss:
            sum(loss).backward()
        return [plain(out), [plain(x) for x in args], [plain(p.grad) for p in m.parameters()],
                [plain(x.grad) for x in args if isinstance(x, Tensor) and x.is_leaf]]
    except Exception as e:
        return type(e).__name__


def beside(eager: nn.Module, given: Callable[[nn.Module, int], tuple[Any, ...]], n: int = 6, **options: Any) -> ORTModule:
    """n steps beside eager."""
    ours = ORTModule(copy.deepcopy(eager), **options)
    for step in range(n):
        want, got = outcome(eager, given, step), outcome(ours, given, step)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m, s=step: f"step {s}: {m}")
    return ours


def draw(step: int) -> Tensor:
    return torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(step))


# --- exceptions that forward catches --------------------------------------------------------------


def definite(m: nn.Module, step: int) -> tuple[Any, ...]:
    """Every other time cholesky fails."""
    x = torch.eye(5, 4, dtype=F64) * (step + 1)
    return (x - 10 * (step % 2),)


def falls_back(m: Any, x: Tensor) -> Tensor:
    try:
        f = torch.linalg.cholesky(x[:4])
    except RuntimeError:
        f = torch.eye(4, dtype=F64) * 7
    return f @ m.a(x)[:4]


def suppresses(m: Any, x: Tensor) -> Tensor:
    f = torch.eye(4, dtype=F64) * 7
    with contextlib.suppress(RuntimeError):
        f = torch.linalg.cholesky(x[:4])
    return f @ m.a(x)[:4]


def only_tries(m: Any, x: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(x[:4])
        scale = 1.0
    except RuntimeError:
        scale = 2.0
    return m.a(x) * scale


def tries_an_index(m: Any, x: Tensor) -> Tensor:
    try:
        return m.a(x)[(x[0, :2] + 8).long()]
    except IndexError:
        return m.b(x)


def tries_a_question(m: Any, x: Tensor) -> Tensor:
    try:
        return m.a(x) if x.sum() > 0 else m.a(x) * 3
    except Exception:
        return m.b(x)


def tries_a_number(m: Any, x: Tensor) -> Tensor:
    n = x.sum().item()
    try:
        return m.a(x) if n > 0 else m.a(x) * 3
    except Exception:
        return m.b(x)


def tries_a_hook(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    try:
        h.register_hook(lambda g: g * 2)
        return h
    except Exception:
        return m.b(x)


def tries_sizes(m: Any, x: Tensor) -> Tensor:
    try:
        return m.a(x) @ x
    except RuntimeError:
        return m.b(x)


class Refuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if random.random() < 0.5:
            raise ValueError("no")
        return x * 2


def tries_a_module(m: Any, x: Tensor) -> Tensor:
    try:
        return m.a(m.inner(x))
    except ValueError:
        return m.b(x)


class RefusesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if type(x) is Tensor and int(x.sum() < 0):
            raise ValueError("no")
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def tries_a_function(m: Any, x: Tensor) -> Tensor:
    try:
        return m.a(RefusesFunction.apply(x))
    except ValueError:
        return m.b(x)


@pytest.mark.parametrize("rule", [falls_back, suppresses, only_tries, tries_an_index, tries_a_question, tries_a_number,
                                  tries_a_hook, tries_sizes, tries_a_module, tries_a_function])
def test_exceptions_that_forward_catches(rule: Callable[..., Any]) -> None:
    ours = beside(Net(rule, Refuses()), definite)
    # a branch on a value raises nothing: each way is captured
    assert bool(ours.report().eager) != (rule in (tries_a_question, tries_a_number)), str(ours.report())


def test_a_try_that_catches_nothing_stays_in_the_engine() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        try:
            h = m.a(x)
        except RuntimeError:
            h = m.b(x)
        try:
            return h * m.scale
        except AttributeError:
            return h * 2

    ours = beside(Net(rule), definite)
    assert not ours.report().eager and not ours.report().host


def test_the_innermost_module_that_tries_stays_in_pytorch() -> None:
    eager = Net(lambda m, x: m.b(m.inner(m.a(x))), Net(tries_sizes))
    ours = beside(eager, definite)
    assert [h.name for h in ours.report().host] == ["inner"] and not ours.report().eager


def test_hooks_and_a_try_stay_in_pytorch() -> None:
    eager = Net(falls_back)
    eager.a.register_forward_hook(lambda m, args, out: out * 2)
    assert beside(eager, definite).report().eager
