"""Custom autograd.Functions and custom operators inside a module: the user's backward runs, whatever way `apply` is reached, and what it
says (None, not differentiable, edits in place) means what it means in PyTorch."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ortmodule import ORTModule


class Reverse(Function):
    """The gradient says whether the user's backward ran."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 1.0) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class Overridden(Reverse):
    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return super().apply(x, 2.0)


class Modern(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float = 3.0) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.scale = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0] * ctx.scale, None


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


class Nested(Function):
    """Autograd does not look into lists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:
        return x * others[0] + others[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


class Same(Function):
    """Returns its input, and a number that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return x, rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * 7


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -2


class Secret(Function):
    """Edits its input without saying so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 1
        x.add_(1)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -3


reverse = Reverse.apply
partly = functools.partial(Modern.apply, scale=2.0)


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.f = Reverse.apply

    def forward(self, x: Tensor) -> Any:
        return self.f(self.fc(x))


class Calls(nn.Module):
    def __init__(self, f: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.other = nn.Parameter(torch.rand(5))
        self._f = f

    def forward(self, x: Tensor) -> Any:
        return self._f(self, x)


def outputs(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def check(eager: nn.Module, *xs: Tensor, options: dict[str, Any] | None = None, seeds: Callable[[list[Tensor]], Any] | None = None) -> ORTModule:
    """Two steps each: outputs, which of them require grad, gradients, None included."""
    eager = eager.double()
    w = ORTModule(copy.deepcopy(eager), **(options or {}))
    for x in [x for x in xs or [torch.randn(3, 5, dtype=torch.float64)] for _ in range(2)]:
        found = []
        for model in (eager, w):
            model.zero_grad()
            x = x.detach().clone().requires_grad_(x.requires_grad)
            torch.manual_seed(3)
            outs = outputs(model(x))
            used = seeds(outs) if seeds else [o for o in outs if o.requires_grad]
            torch.autograd.backward(used, [torch.linspace(1, 2, o.numel(), dtype=o.dtype).view_as(o) for o in used])
            found.append(([o.requires_grad for o in outs], [o.detach() for o in outs], {n: p.grad for n, p in model.named_parameters()}, x.grad))
        (need, out, grads, dx), (need_w, out_w, grads_w, dx_w) = found
        assert need == need_w
        for a, b in zip([*out, *grads.values(), dx], [*out_w, *grads_w.values(), dx_w], strict=True):
            assert (a is None) == (b is None), (grads, grads_w)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
    return w


FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "class": lambda m, x: Reverse.apply(m.fc(x)),
    "module level": lambda m, x: reverse(m.fc(x)),
    "partial": lambda m, x: partly(m.fc(x)),
    "argument": lambda m, x: Reverse.apply(m.fc(x), 2.0),
    "override": lambda m, x: Overridden.apply(m.fc(x)),
    "modern": lambda m, x: Modern.apply(m.fc(x)),
    "modern keyword": lambda m, x: Modern.apply(m.fc(x), scale=4.0),
    "once": lambda m, x: Once.apply(m.fc(x)),
    "nested": lambda m, x: Nested.apply(m.fc(x), [m.other, x]),
    "nested alone": lambda m, x: Nested.apply(x, [m.other, x]) + m.fc(x),
    "twice": lambda m, x: reverse(torch.tanh(reverse(m.fc(x)))) * m.other,
    "same": lambda m, x: Same.apply(m.fc(x)),
    "not differentiable": lambda m, x: [Same.apply(m.fc(x))[1] * 2, m.fc(x)],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_users_backward_runs(form):
    w = check(Calls(FORMS[form]))
    report = w.report()
    assert not report.eager and [h.kind for h in report.host] == ["python_op"] * len(report.host) and report.host, str(report)


def test_reference_held_by_the_module():
    assert check(Held()).report().host


@pytest.mark.parametrize("f", [Dirty, Secret], ids=["dirty", "secret"])
def test_functions_that_edit_their_input_stay_in_pytorch(f):
    apply = f.apply
    w = check(Calls(lambda m, x: (apply(y := m.fc(x) * 1), y * 2)))
    assert any("edits an input in place" in e.reason for e in w.report().eager), str(w.report())


def test_functions_of_pytorch_itself():
    """Their backward is not what differentiating the forward would give, either."""
    w = check(Calls(lambda m, x: torch.distributions.Dirichlet(m.fc(x).exp(), validate_args=False).rsample()))
    assert [h.kind for h in w.report().host] == ["python_op"] and not w.report().eager, str(w.report())


def test_functions_in_other_threads_are_not_disturbed():
    stop, seen = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            x = torch.ones(2, requires_grad=True)
            reverse(x).sum().backward()
            seen.append(x.grad.tolist())  # type: ignore[union-attr]

    before = Function.apply.__func__.__code__
    thread = threading.Thread(target=work)
    thread.start()
    try:
        check(Held())
    finally:
        stop.set()
        thread.join()
    assert seen and all(g == [-1.0, -1.0] for g in seen)
    assert Function.apply.__func__.__code__ is before and Function.__dict__["apply"].__func__ is Function.apply.__func__
    with pytest.raises(Exception, match="data-dependent|Could not guard"):
        ORTModule(Calls(lambda m, x: reverse(x) if x.sum() > 0 else x), strict=True)(torch.ones(3, 5))
    assert Function.apply.__func__.__code__ is before


@torch.library.custom_op("ortmodule_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


cube.register_autograd(lambda ctx, grad: -grad * ctx.saved_tensors[0] ** 2, setup_context=_save)


def test_custom_operator():
    w = check(Calls(lambda m, x: cube(m.fc(x))))
    assert [h.kind for h in w.report().host] == ["aten"] and not w.report().eager, str(w.report())


def test_inside_a_function_transform():
    w = check(Calls(lambda m, x: torch.vmap(lambda t: Modern.apply(t) * 2)(m.fc(x))))
    assert w.report().eager, str(w.report())
