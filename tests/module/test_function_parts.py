"""Every part of torch.autograd.Function inside a module beside eager: what ctx offers, what forward may return, what backward
may do, random numbers, double backward, forward mode, threads, functions replaced after the capture."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable

from ortmodule import ORTModule

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Saves(Function):
    """An input, an output and a tensor of its own; asked for twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y, own = x * w, x.sin()
        ctx.save_for_backward(x, y, own, None)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y, own, none = ctx.saved_tensors
        assert none is None and ctx.saved_tensors[0] is not None and ctx.shape == g.shape
        return g * own + y, (g * x).sum(0) if ctx.needs_input_grad[1] else None


class Needs(Function):
    """The gradient says which inputs need one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + y + z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return tuple(g * (1 + i) if need else None for i, need in enumerate(ctx.needs_input_grad))


class Results(Function):
    """Tensors, a number, a None, a string, an integer tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        return x * 2, 7, None, "word", order, x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Any) -> Tensor:
        assert [o is None for o in others] == [True, True, True, False, False]
        return g * 3 + others[-1]


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        return (a * 10 if a is not None else 0) + (b * 100 if b is not None else 0)


class Inner(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * -5


class Outer(Function):
    """Another Function in forward; autograd, with that Function, in backward: what checkpoints are made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Inner.apply(x) + 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = Inner.apply(x) + 1
        return torch.autograd.grad(y, x, g)[0]


class Recursive(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        ctx.n = n
        return x if n == 0 else Recursive.apply(x * 2, n - 1) + 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 3**ctx.n, None


class Random(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        keep = torch.rand_like(x)
        ctx.save_for_backward(keep)
        return x * keep

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Structures(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: dict[str, Any], words: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        ctx.how = how
        return (x * how["by"]).to(dtype) + len(words)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.how["by"] ** 2, None, None, None


class Square(Function):
    """Twice differentiable, with formulas that autograd would not find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Inner.apply(g) * ctx.saved_tensors[0]


class Transposed(Function):
    """Gradients of another layout, and one that is expanded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.shape = x.shape
        return (x + w).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        n, m = ctx.shape
        return torch.arange(n * m, dtype=g.dtype).view(m, n).t() * g, g.expand(m)


class Modern(Function):
    @staticmethod
    def forward(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs[:1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


class Half(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Uses(nn.Module):
    def __init__(self, f: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.last, self.w = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.rand(4) + 0.5)
        self._f = f

    def forward(self, x: Tensor) -> Any:
        return self._f(self, x)


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "saves": lambda m, x: m.last(Saves.apply(m.fc(x), m.w)),
    "saves, of what needs none": lambda m, x: m.last(Saves.apply(m.fc(x), m.w.detach())),
    "needs": lambda m, x: m.last(Needs.apply(x, m.fc(x), m.w)),
    "results": lambda m, x: [m.last(r) if r.is_floating_point() else r for r in Results.apply(m.fc(x)) if isinstance(r, Tensor)],
    "results, one": lambda m, x: m.last(Results.apply(m.fc(x))[5]),
    "unmaterialized, first": lambda m, x: m.last(Unmaterialized.apply(m.fc(x))[0]),
    "unmaterialized, second": lambda m, x: m.last(Unmaterialized.apply(m.fc(x))[1]),
    "unmaterialized, both": lambda m, x: m.last(sum(Unmaterialized.apply(m.fc(x)))),
    "nested": lambda m, x: m.last(Outer.apply(m.fc(x))),
    "recursive": lambda m, x: m.last(Recursive.apply(m.fc(x), 3)),
    "recursive, no more": lambda m, x: m.last(Recursive.apply(m.fc(x), 0)),
    "random": lambda m, x: m.last(Random.apply(m.fc(x))) + m.last(Random.apply(x)),
    "structures": lambda m, x: m.last(Structures.apply(m.fc(x), {"by": 3.0, "more": [1]}, ("a", "b"), x.dtype)),
    "layouts": lambda m, x: m.last(m.fc(x)) * Transposed.apply(m.fc(x), m.w),
    "square": lambda m, x: m.last(Square.apply(m.fc(x))),
    "modern": lambda m, x: m.last(Modern.apply(m.fc(x))),
    "modern, a keyword": lambda m, x: m.last(Modern.apply(m.fc(x), by=3.0)),
    "many": lambda m, x: m.last(Square.apply(Inner.apply(Saves.apply(Inner.apply(m.fc(x)), m.w)))),
    "in a loop": lambda m, x: [x := Inner.apply(m.fc(x)) + x for _ in range(3)][-1],
    "not used": lambda m, x: (Inner.apply(m.fc(x)), m.last(x))[1],
}


def flat(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def run(model: nn.Module, x: Tensor, seed: int) -> list[Tensor | None]:
    """Outputs, gradients of the parameters and of x."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    outs = flat(model(x))
    used = [o for o in outs if o.requires_grad]
    torch.autograd.backward(used, [torch.linspace(1, 2, o.numel(), dtype=o.dtype).view_as(o) for o in used])
    return [*(o.detach() for o in outs), x.grad, *(p.grad for p in model.parameters())]


def same(ours: list[Tensor | None], eager: list[Tensor | None], tol: float = 1e-11) -> None:
    for a, b in zip(ours, eager, strict=True):
        assert (a is None) == (b is None), (ours, eager)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_is_as_in_pytorch(name: str, level: int) -> None:
    """Also where backward computes again: a Function's forward runs once, with its own random numbers."""
    eager = Uses(CASES[name]).double()
    ours = ORTModule(copy.deepcopy(eager), memory_opt_level=level)
    for seed, x in enumerate((X, X + 0.5, torch.cat([X, X]))):
        same(run(ours, x, seed), run(eager, x, seed))


@pytest.mark.parametrize("name", ["square", "saves", "many"])
def test_differentiated_twice(name: str) -> None:
    eager = Uses(CASES[name]).double()
    ours = ORTModule(copy.deepcopy(eager))
    for x in (X, X + 0.5):
        found = []
        for model in (ours, eager):
            model.zero_grad()
            x = x.detach().clone().requires_grad_()
            (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            gx.pow(2).sum().backward()
            found.append([gx.detach(), x.grad, *(p.grad for p in model.parameters())])
        same(*found)


def test_once_differentiable_refuses_a_second_time() -> None:
    for model in (Uses(CASES["nested"]).double(), ORTModule(Uses(CASES["nested"]).double())):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
            g.sum().backward()


def test_a_backward_again_and_its_errors() -> None:
    """retain_graph; the error of a second backward without it; an error of the user's own backward."""
    ours = ORTModule(Uses(CASES["saves"]).double())
    y = ours(X).sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    y.backward()
    same([p.grad for p in ours.parameters() if p.grad is not None], [2 * g for g in once])
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()

    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            raise KeyError("the user's")

    fails = ORTModule(Uses(lambda m, x: m.last(Fails.apply(m.fc(x)))).double())
    for _ in range(2):
        with pytest.raises(KeyError, match="the user's"):
            fails(X).sum().backward()


def test_too_many_gradients_are_pytorchs_error() -> None:
    class Wrong(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, g

    for wrap in (lambda m: m, ORTModule):
        model = wrap(Uses(lambda m, x: m.last(Wrong.apply(m.fc(x)))).double())
        with pytest.raises(RuntimeError, match="incorrect number of gradients"):
            model(X).sum().backward()


def test_under_autocast() -> None:
    eager = Uses(lambda m, x: m.last(Half.apply(m.fc(x))))
    ours = ORTModule(copy.deepcopy(eager))
    for seed in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = [run(model, X.float(), seed) for model in (ours, eager)]
        same(*found, tol=2e-2)


class Tangents(Function):
    """Its jvp is not the transpose of its backward, so that it is seen whose is asked."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1.5, 1.5) * 3 * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t * 5 * ctx.saved_tensors[0] ** 2


class NoTangents(Tangents):
    jvp = Function.jvp


def forward_mode(model: nn.Module) -> Any:
    return torch.func.jvp(model, (X,), (X.cos(),))


def forward_mode_of_weights(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        weights = {k: forward_ad.make_dual(p.detach(), p.detach().cos()) for k, p in model.named_parameters()}
        return tuple(forward_ad.unpack_dual(torch.func.functional_call(model, weights, (X,))))


def forward_over_reverse(model: nn.Module) -> Any:
    return torch.func.jvp(torch.func.grad(lambda x: model(x).square().sum()), (X,), (X.cos(),))


def forward_mode_of_backward(model: nn.Module) -> Any:
    """The forward is over when the level begins: gradients have tangents."""
    y = model(X)
    with forward_ad.dual_level():
        grads = torch.autograd.grad(y, [*model.fc.parameters()], forward_ad.make_dual(y.detach(), y.detach().cos()))
        assert not any(g.requires_grad for g in grads)
        return [t for g in grads for t in forward_ad.unpack_dual(g)]


def told(do: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    try:
        return do(model)
    except NotImplementedError as error:
        return [str(error)]


@pytest.mark.parametrize("kind", [Tangents, NoTangents])
def test_jvp(kind: type[Function]) -> None:
    """A Function trains in the engine whether it has a jvp or not. Forward mode is PyTorch's, which runs the call: with the
    user's jvp, and its own error where there is none."""
    eager = Uses(lambda m, x: m.last(kind.apply(m.fc(x)))).double()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        same(run(ours, X, 0), run(eager, X, 0))
    report = ours.report()
    assert not report.eager and [h.name for h in report.host] == [f"{kind.__name__}.apply"] and sum(g.backwards for g in report.graphs) == 2
    for do in (forward_mode, forward_mode_of_weights, forward_over_reverse):
        found, want = (told(do, model) for model in (ours, eager))
        if kind is NoTangents:
            assert found == want and "jvp" in want[0]
        else:
            same(list(found), list(want))
    assert [(e.reason, e.calls) for e in ours.report().eager] == [("called inside forward-mode differentiation", 3)]
    same(forward_mode_of_backward(ours), forward_mode_of_backward(eager))
    same(run(ours, X, 0), run(eager, X, 0))


def test_torch_func_around_a_backward_is_refused() -> None:
    ours = ORTModule(Uses(lambda m, x: m.last(Tangents.apply(m.fc(x)))).double())
    y = ours(X)

    def back(g: Tensor) -> Tensor:
        return torch.autograd.grad(y, ours.fc.weight, g, retain_graph=True)[0].sum()

    for do in (lambda: torch.func.jvp(back, (y.detach(),), (y.detach(),)), lambda: torch.func.grad(back)(y.detach())):
        with pytest.raises(RuntimeError, match="around a backward whose forward ran outside of it .* call the module inside"):
            do()
    y.sum().backward()


def test_bound_late() -> None:
    """What forward finds under the name counts, and what the class says, at every call."""

    class First(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 10

    class Second(First):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 20

    eager = Uses(lambda m, x: m.last(m.f.apply(m.fc(x)))).double()
    eager.f = First
    ours = ORTModule(copy.deepcopy(eager))
    same(run(ours, X, 0), run(eager, X, 0))
    eager.f = ours.f = Second
    same(run(ours, X, 0), run(eager, X, 0))
    First.backward = staticmethod(lambda ctx, g: g * 30)  # type: ignore[method-assign]
    eager.f = ours.f = First
    same(run(ours, X, 0), run(eager, X, 0))
    First.forward = staticmethod(lambda ctx, x: x * 4)  # type: ignore[method-assign]
    same(run(ours, X, 0), run(eager, X, 0))


def test_several_threads() -> None:
    """Each has a copy; the Functions are shared."""
    eager = Uses(CASES["many"]).double()
    want, errors = run(eager, X, 0), []

    def work() -> None:
        try:
            model = ORTModule(copy.deepcopy(eager))
            for _ in range(5):
                same(run(model, X, 0), want)
        except BaseException as e:  # noqa: BLE001
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
