"""Custom autograd.Functions and custom operators inside a module: the user's backward runs, whatever way `apply` is
reached, and what it says (None, not differentiable, edits in place) means what it means in PyTorch."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ortmodule import ORTModule, guard, torch_private
from ortmodule.capture import marks, opaque


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

    def apply() -> tuple[object, object]:
        made = Function.__dict__["apply"]
        return made, getattr(getattr(made, "__func__", None), "__code__", None)

    before = apply()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        check(Held())
    finally:
        stop.set()
        thread.join()
    assert seen and all(g == [-1.0, -1.0] for g in seen)
    assert apply() == before
    with pytest.raises(Exception, match="a branch on a tensor's value"):
        ORTModule(Calls(lambda m, x: reverse(x) if int(x.sum() > 0) else x), strict=True)(torch.ones(3, 5))
    assert apply() == before


def test_kept_and_hooked_modules_in_other_threads_are_not_disturbed():
    """While one thread captures, another one may be inside of the same submodules."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    expected = model(x)
    places = (guard.Place("1", False, False, False),)
    with opaque.table(), opaque.keep_functions(), marks.marked(model, places, []), opaque.keep_modules(model, ["0"]):
        seen: list[Tensor] = []
        thread = threading.Thread(target=lambda: seen.append(model(x)))
        thread.start()
        thread.join()
        with pytest.raises(NotImplementedError, match="ortmodule_capture::host"):  # here it is a node
            model(x)
    assert torch.equal(seen[0], expected) and torch.equal(model(x), expected)


class Editing(nn.Module):
    """Stays in PyTorch, because it branches on data."""

    def __init__(self, edit: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.edit = edit

    def forward(self, h: Tensor) -> Tensor:
        if int(h.sum() > 1e9):
            return h
        self.edit(h)
        return self.fc(h)


@pytest.mark.parametrize("edit", [torch.relu_, lambda h: h.mul_(2), lambda h: h.t()[0].fill_(1), lambda h: h.detach().zero_()])
@pytest.mark.parametrize("of", [lambda m, x: m.fc(x), lambda m, x: x.clone(), lambda m, x: m.fc(x).view(-1).view(3, 5)])
def test_a_kept_module_that_edits_its_argument(edit, of):
    """The code around it sees the edit: the two stay together."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.kept = nn.Linear(5, 5), Editing(edit)

        def forward(self, x: Tensor) -> Tensor:
            h = of(self, x)
            return self.kept(h) * 2 + h

    model = Around().double()
    wrapped, x = ORTModule(copy.deepcopy(model)), torch.randn(3, 5, dtype=torch.float64)
    for _ in range(2):
        before = x.clone()
        out, expected = wrapped(x), model(x)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(x, before)
        out.sum().backward()
        expected.sum().backward()
        for p, q in zip(wrapped.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    assert "edits an argument in place" in wrapped.report().eager[0].reason


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


# --- None is not zero ---------------------------------------------------------------------------


class Experts(nn.Module):
    """Data decides which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) if int(x.mean() > 0) else self.experts[1](x)


class Routed(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.router = Experts()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.router(self.first(x))
        return y @ self.router.experts[1].weight if self.shared else y


class Stops(Function):
    """No gradient for the first operand; the second's says which gradients have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 1, y * 3

    @staticmethod
    def backward(ctx: Any, gx: Tensor | None, gy: Tensor | None) -> Any:
        return None, None if gy is None else gy * (3 if gx is None else 100)


stops = Stops.apply


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("segment_mb", [25.0, 1e-5], ids=["one segment", "many segments"])
def test_unused_experts_get_none(shared, segment_mb):
    xs = [torch.randn(3, 5, dtype=torch.float64) + shift for shift in (9, -9, 9)]
    w = check(Routed(shared), *xs, options={"segment_mb": segment_mb})
    assert [h.kind for h in w.report().host] == ["module"], str(w.report())


NONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "upstream of a None": lambda m, x: stops(torch.tanh(m.fc(x)), m.other)[0] * m.other,
    "also used elsewhere": lambda m, x: stops(m.fc(x), m.other)[0] * m.other + m.fc.weight.sum(),
    "one output unused": lambda m, x: stops(m.fc(x), x * m.other)[1],
    "both used": lambda m, x: sum(stops(m.fc(x), x * m.other)),
    "two in a row": lambda m, x: stops(x, stops(m.fc(x), m.other)[0].exp())[1] + x,
    "two in a row, both used": lambda m, x: stops(stops(m.fc(x), m.other * 2)[1].exp(), stops(m.other, x * m.fc.bias)[1])[0] * m.other,
}


@pytest.mark.parametrize("name", NONE)
def test_none_travels_through_the_engine(name):
    assert check(Calls(NONE[name])).report().host


def test_none_for_an_argument():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    check(Calls(lambda m, x: stops(x, m.other)[0] * m.other), x)
    check(Calls(lambda m, x: [stops(m.fc(x), m.other)[1], torch.tanh(x * m.fc.bias)]), x, seeds=lambda outs: outs[:1])
    check(Calls(lambda m, x: [stops(m.fc(x), m.other)[1], torch.tanh(x * m.fc.bias)]), x, seeds=lambda outs: outs[1:])


def test_outputs_without_a_gradient_do_not_require_one():
    check(Calls(lambda m, x: [(m.fc(x) > 0).double() * 2, m.fc(x) * 2]))


# --- one backward after another -------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 5)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind == "apart":
            return self.a(x), torch.tanh(self.b(x)), self.b.weight.exp().sum()
        if self.kind == "losses":
            return self.a(x).sum(), self.b(x).pow(2).sum()
        if self.kind == "sum before":  # nothing of a sum is kept
            x = x + self.c.bias
            return x * 2, x * 3
        if self.kind == "host":
            return self.a(reverse(x * 1)), reverse(self.b(x))
        h = torch.tanh(self.c(x))
        return (h * 2, h * 3) if self.kind == "tanh before" else (self.a(h), self.b(h), self.c(x.detach()))


@pytest.mark.parametrize("order", [(0, 1), (1, 0, 1), (0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["apart", "losses", "sum before", "tanh before", "host", "trunk"])
def test_backward_after_backward(kind, order):
    """Works where PyTorch has freed nothing that the second needs, and fails with PyTorch's words where it has."""
    eager = Heads(kind).double()
    w = ORTModule(copy.deepcopy(eager), segment_mb=1e-5 if kind in ("apart", "trunk", "host") else 25.0)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        found = []
        for model in (eager, w):
            model.zero_grad()
            x.grad = None
            outs = model(x)
            error = ""
            try:
                for k in order:
                    outs[min(k, len(outs) - 1)].sum().backward()
            except RuntimeError as e:
                error = str(e)[:60]
            found.append((error, [x.grad, *[p.grad for p in model.parameters()]]))
        assert found[0][0] == found[1][0], found
        # what an error leaves behind is anybody's guess
        for a, b in zip(found[0][1], found[1][1], strict=True) if not found[0][0] else ():
            assert (a is None) == (b is None), found
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def test_nothing_is_held_when_no_backward_can_follow():
    """The logits are kept, but what their gradient needs is gone with the loss's."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            logits = torch.tanh(self.fc(x))
            return logits.pow(2).mean(), logits

    w = ORTModule(Loss())
    for _ in range(2):
        x = torch.randn(4, 5)
        alive = weakref.ref(x)
        loss, logits = w(x)
        loss.backward()
        del x
        assert alive() is None and logits.requires_grad


def test_a_later_backward_sees_the_same_mask():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.p = nn.Linear(5, 3), nn.Parameter(torch.rand(1000) + 1)

        def forward(self, x: Tensor) -> Any:
            return self.a(x).sum(), nn.functional.dropout(self.p, 0.5)

    w = ORTModule(Masked())
    for _ in range(3):
        w.zero_grad()
        loss, masked = w(torch.randn(4, 5))
        loss.backward()
        masked.sum().backward()
        torch.testing.assert_close(w.p.grad * w.p, masked)
    assert not w.report().eager


# --- what a tensor may be at the border -----------------------------------------------------------


def odd(x: Tensor) -> Tensor:
    """The negation bit is set."""
    return torch.complex(x, x * 2).conj().imag


BORDER: dict[str, Callable[[Any, Tensor], Any]] = {
    "flipped into an operator": lambda m, x: torch.logaddexp(m.fc(x), m.fc(x).flip(1)),
    "flipped into a Function": lambda m, x: reverse(m.fc(x).flip(0, 1)),
    "flipped into a Function, empty": lambda m, x: reverse(m.fc(x[:0]).flip(0)).sum() + m.other.flip(0),
    "flipped gradient": lambda m, x: torch.logaddexp(m.fc(x), m.other).flip(1) * m.other,
    "flipped out": lambda m, x: m.fc(x).flip(1),
    "expanded": lambda m, x: torch.logaddexp(m.other.sum().expand(3, 5), m.fc(x)),
    "part": lambda m, x: torch.logaddexp(m.fc(x)[1:, ::2], m.other[1]),
    "none of it": lambda m, x: torch.logaddexp(m.fc(x)[:0], m.other).sum() + m.other.sum(),
    "bool": lambda m, x: torch.logaddexp(m.fc(x), m.other) * (m.fc(x) > 0).flip(1),
}


@pytest.mark.parametrize("name", BORDER)
def test_views_into_and_out_of_host_nodes(name):
    assert not check(Calls(BORDER[name])).report().eager


def test_negated_tensors():
    x = torch.randn(3, 5, dtype=torch.float64)
    eager = nn.Linear(5, 5).double()
    w = ORTModule(copy.deepcopy(eager))
    results = []
    for model in (eager, w):
        out = model(odd(x))
        (odd(model(x)) * x).sum().backward()
        results.append([out, *[p.grad for p in model.parameters()]])
    class Buffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", odd(x))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.b

    results[0].append(Buffer()(x))
    results[1].append(ORTModule(Buffer())(x))

    class Odd(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return odd(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return odd(grad)

    check(Calls(lambda m, x: Odd.apply(m.fc(x))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("make", [lambda t: torch._efficientzerotensor(3, 5, dtype=t.dtype), lambda t: t[:1, :1].expand(3, 5)],
                         ids=["zero", "expanded"])  # fmt: skip
def test_arriving_gradients(make):
    x, found = torch.randn(3, 5), []
    eager = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    for model in (eager, ORTModule(copy.deepcopy(eager))):
        y = model(x)
        y.register_hook(lambda g: make(g))
        y.pow(2).sum().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("segment_mb", [1e-5], ids=["many segments"])
@pytest.mark.parametrize("f", [lambda m, x: torch.tanh(m.fc(x)), lambda m, x: reverse(m.fc(x)) * m.other, lambda m, x: [m.fc(x), x * m.other]])
def test_batched_gradients(f, segment_mb):
    eager = Calls(f).double()
    w, x = ORTModule(copy.deepcopy(eager), segment_mb=segment_mb), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    seeds = torch.randn(4, 3, 5, dtype=torch.float64)
    for again in (False, True):
        found = []
        for model in (eager, w):
            y = outputs(model(x))[-1]
            wanted = [x, *model.parameters()]
            grads = torch.autograd.grad(y, wanted, seeds, is_grads_batched=True, allow_unused=True, retain_graph=again)
            if again:
                y.sum().backward()
            found.append(grads)
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a)
    y = outputs(w(x))[-1]
    torch.autograd.grad(y, x, seeds, is_grads_batched=True)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    ys = [outputs(k(x))[-1] for k in (eager, w)]
    a, b = [torch.vmap(functools.partial(torch.autograd.grad, y, x))(seeds)[0] for y in ys]
    torch.testing.assert_close(b, a)


def test_batched_gradients_in_a_thread_of_autograds(monkeypatch):
    """As on CUDA, where the thread that runs backward does not know the level of vmap that the caller has entered."""
    monkeypatch.setattr(torch_private, "_levels", lambda: itertools.repeat((1, 0)))
    eager = Calls(lambda m, x: torch.tanh(m.fc(x))).double()
    x, seeds = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, 5, dtype=torch.float64)
    models = (eager, ORTModule(copy.deepcopy(eager)))
    found = [torch.autograd.grad(m(x), [x, *m.parameters()], seeds, is_grads_batched=True, allow_unused=True) for m in models]
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a)


def test_nested_tensors_go_to_pytorch():
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    w = ORTModule(Calls(lambda m, x: torch.sin(x)))
    assert torch.equal(w(x).to_padded_tensor(0.0), torch.sin(x).to_padded_tensor(0.0)) and w.report().eager


def test_forward_mode():
    eager = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double()
    w, x = ORTModule(copy.deepcopy(eager)), torch.randn(3, 5, dtype=torch.float64)
    w(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.randn(3, 5, dtype=torch.float64))
        a, b = [torch.autograd.forward_ad.unpack_dual(k(dual)).tangent for k in (eager, w)]
    torch.testing.assert_close(b, a)
    assert [e.calls for e in w.report().eager] == [1]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_hooks_of_tensors_without_a_gradient_are_not_called() -> None:
    seen: list[list[float]] = [[], []]
    for number, make in enumerate((lambda: TwoOutputs(), lambda: ORTModule(TwoOutputs()))):
        torch.manual_seed(0)
        m = make()
        x = torch.ones(2, 3, requires_grad=True)
        for p in (m.first.weight, m.second.weight):
            p.register_hook(lambda grad, number=number: seen[number].append(float(grad.sum())))
            removed = p.register_hook(lambda grad: grad * 3)
            p.register_hook(lambda grad: grad * 2)
        removed.remove()
        m(x)[1].sum().backward()
        m(x)[0].sum().backward()
        seen[number] += [float(p.grad.sum()) for p in (m.first.weight, m.second.weight)]
    assert seen[0] == seen[1]
