"""Operators where they are easily got wrong: whole numbers, nothing at all, NaN, ties, powers of the base, lazy signs,
edits in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule import ORTModule

F64 = torch.float64
MIN, MAX = -(2**63), 2**63 - 1
INF, NAN = float("inf"), float("nan")


class Call(nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *xs: Any) -> Any:
        return self.f(*xs)


def outcome(f: Callable[..., Any], xs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Results, and the gradients of the floating-point arguments, for fixed random gradients arriving."""
    ins = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
    out = f(*ins)
    outs = [out] if isinstance(out, Tensor) else list(out)
    gen = torch.Generator().manual_seed(5)
    pairs = [(o, torch.randn(o.shape, generator=gen, dtype=F64).to(o.dtype)) for o in outs if o.requires_grad]
    floats = [x for x in ins if x.requires_grad]
    grads: tuple[Tensor | None, ...] = ()
    if pairs:
        grads = torch.autograd.grad([o for o, _ in pairs], floats, [d for _, d in pairs], allow_unused=True)
    return [o.detach() for o in outs] + [None if g is None or not g.any() else g for g in grads]


def same(f: Callable[..., Any], *xs: Tensor, tol: float = 1e-12) -> Any:
    """The wrapped function gives what eager gives, twice; where eager raises, it raises."""
    wrapped = ORTModule(Call(f))
    try:
        want = outcome(f, xs)
    except Exception:
        for _ in range(2):
            with pytest.raises(Exception):  # noqa: B017
                outcome(wrapped, xs)
        return wrapped
    for _ in range(2):
        got = outcome(wrapped, xs)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=tol, atol=tol, equal_nan=True)
                if a.is_floating_point():
                    assert torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0)), "the sign of a zero"  # type: ignore[union-attr]
    return wrapped


WHOLE = [MIN, MIN + 1, -7, -6, -1, 0, 1, 5, 6, MAX]
FLOATS = [0.0, -0.0, 1.0, -1.0, 6.5, -6.5, INF, -INF, NAN, 1e300, -7.0]


@pytest.mark.parametrize("op", [torch.floor_divide, torch.remainder, torch.fmod, lambda x, y: torch.div(x, y, rounding_mode="trunc")])
def test_division(op: Callable[..., Tensor]) -> None:
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        x = torch.tensor(WHOLE).to(dtype)
        for d in (3, 2, 7, 1) if dtype == torch.uint8 else (3, -3, 2, -7, 1):
            same(lambda x, d=d: op(x, d), x)
    whole = torch.tensor(WHOLE)
    same(lambda x, y: op(x, y), whole, torch.tensor([3, -3] * 5))
    same(lambda x, y: op(x, y), whole, torch.tensor([3, 0] * 5))
    same(lambda x: op(x, 0), whole)
    a, b = (t.contiguous().flatten() for t in torch.meshgrid(torch.tensor(FLOATS, dtype=F64), torch.tensor(FLOATS, dtype=F64), indexing="ij"))
    same(lambda x, y: op(x.detach(), y.detach()), a, b)
    for d in (2.0, -3.0, 0.0, INF):
        same(lambda x, d=d: op(x.detach(), d), torch.tensor(FLOATS, dtype=F64))


@pytest.mark.parametrize("op", [torch.fmax, torch.fmin, torch.maximum, torch.minimum])
def test_extrema_of_two(op: Callable[..., Tensor]) -> None:
    a, b = (t.contiguous().flatten() for t in torch.meshgrid(torch.tensor(FLOATS, dtype=F64), torch.tensor(FLOATS, dtype=F64), indexing="ij"))
    keep = (a != 0) | (b != 0)  # which zero wins is not defined
    same(lambda x, y: op(x, y), a[keep], b[keep])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logarithms_of_powers(dtype: torch.dtype) -> None:
    same(lambda x: (torch.log2(x).floor().detach(), torch.log2(x)), 2.0 ** torch.arange(-30, 60, dtype=dtype), tol=1e-6)
    same(lambda x: (torch.log10(x).floor().detach(), torch.log10(x)), torch.tensor([10.0**k for k in range(13)], dtype=dtype), tol=1e-6)


def test_tensors_without_elements() -> None:
    for shape in ((0, 3), (3, 0), (0, 0)):
        x = torch.zeros(shape, dtype=F64)
        same(lambda x: (x > 0).any(), x)
        same(lambda x: ((x > 0).any(1), (x > 0).all(1), (x > 0).any(0), (x > 0).all()), x)
        for f in (lambda x: x.std(0), lambda x: x.var(1), lambda x: x.mean(0), lambda x: x.sum(), lambda x: x.max(1)[0], lambda x: x.amax(0),
                  lambda x: x.argmax(1), lambda x: x.max()):
            same(f, x)
        for dim in (0, 1):
            same(lambda x, dim=dim: torch.cat([x, x], dim), x)
            same(lambda x, e, dim=dim: torch.cat([e, x, x], dim), x, torch.zeros(0, dtype=F64))
    same(lambda x, y: torch.cat([x, y, x], 1), torch.ones(2, 0, dtype=F64), torch.ones(2, 3, dtype=F64))
    sizes = ORTModule(Call(lambda x: (x > 0).any(0)))
    for n in (3, 5, 0):  # the third is a run of the graph with sizes as symbols
        assert torch.equal(sizes(torch.ones(n, 2)), torch.full((2,), n > 0))


def test_results_of_many_pieces() -> None:
    """More than one concat takes."""
    x, y = torch.randn(2, dtype=F64), torch.randn(3, dtype=F64)
    for f in (lambda x, y: torch.cat([x, y] * 150), lambda x, y: torch.stack([x * 2.0] * 599 + [y[:2]], 1)):
        wrapped = same(f, x, y)
        assert not wrapped.report().eager and not wrapped.report().host


def test_negative_indices() -> None:
    x, i = torch.randn(5, 3, dtype=F64), torch.tensor([[-1, 0, 2]])
    for f in (lambda x, i: x.gather(0, i), lambda x, i: x.index_select(0, i[0]), lambda x, i: torch.take_along_dim(x, i, 0),
              lambda x, i: F.embedding(i, x), lambda x, i: x.scatter(0, i, 0.5), lambda x, i: x.scatter_add(0, i, x[:1]),
              lambda x, i: x.index_add(0, i[0], x[:3]), lambda x, i: x[i[0]], lambda x, i: x[:, i[0]]):
        same(f, x, i)
        same(f, x, i.abs())
    same(lambda x: x.gather(0, torch.tensor([0])), torch.ones((), dtype=F64))
    same(lambda x: x.index_add(0, torch.tensor([0]), x.reshape(1)), torch.ones((), dtype=F64))


def test_indices_that_are_what_is_written() -> None:
    for x in (torch.tensor([2, 3, 0, 1]), torch.tensor([1, 1, 0, 3])):
        same(lambda x: x.scatter(0, x, x + 10), x)
        same(lambda x: (x * 1).scatter_add(0, x * 1, x + 10), x)


def test_norms_of_halves() -> None:
    """Squares that leave the range of float16, above and below."""
    x = (torch.randn(40, 8, generator=torch.Generator().manual_seed(1)) * 300).half()
    for f in (lambda x: x.norm(), lambda x: torch.linalg.vector_norm(x, dim=0), lambda x: F.normalize(x, dim=1),
              lambda x: torch._weight_norm(x, torch.ones(40, 1, dtype=x.dtype), 0)):
        same(f, x, tol=4e-3)
        same(lambda x, f=f: f(x.detach()), x / 2**21, tol=4e-3)


def test_lazy_signs() -> None:
    x = torch.complex(torch.randn(5, dtype=F64), torch.randn(5, dtype=F64)).conj().imag
    assert x.is_neg()
    wrapped = ORTModule(Call(lambda x: x * 3.0))
    assert torch.equal(wrapped(x), x * 3.0)
    y = torch.randn(5, dtype=F64)

    def loss(f: Callable[..., Any]) -> Tensor:
        leaf = y.clone().requires_grad_()
        (torch.complex(y, f(leaf)).conj() * torch.complex(y, y)).real.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def sine(x: Tensor) -> Tensor:
        return x.sin() * 2.0

    torch.testing.assert_close(loss(ORTModule(Call(sine))), loss(sine))
    module = Call(lambda x: x + module.b)
    module.register_buffer("b", x)
    torch.testing.assert_close(ORTModule(module)(y), y + x)


def test_what_takes_no_gradient() -> None:
    """Fused with something that does, still not."""
    x = torch.randn(3, dtype=F64, requires_grad=True)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (x > 0).double() * 2, x * 2, x.detach() * 3, torch.where(x > 0, x, 0.0) * 2

    wrapped = ORTModule(Call(f))
    for _ in range(2):
        assert [t.requires_grad for t in wrapped(x)] == [t.requires_grad for t in f(x)]


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.0, True, True),
    "dropout2d": lambda h: F.dropout2d(h.view(1, 5, 8, 1), 0.0, True, True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.0, True, True),
    "relu6": lambda h: F.relu6(h, inplace=True),
    "hardswish": lambda h: F.hardswish(h, inplace=True),
    "silu": lambda h: F.silu(h, inplace=True),
    "elu": lambda h: F.elu(h, inplace=True),
    "threshold": lambda h: F.threshold(h, 0.1, 0.0, inplace=True),
    "pow": lambda h: h.abs().pow_(1.5),
    "pow tensor": lambda h: (h.abs() + 1).pow_(h),
    "clamp": lambda h: h.clamp_(-0.5, 0.5),
    "clamp tensor": lambda h: h.clamp_(torch.full((8,), -0.5).double()),
    "masked_fill": lambda h: h.masked_fill_(h < 0, 0.3),
    "index_put": lambda h: h.index_put_((torch.tensor([0, 1]),), torch.zeros(8, dtype=F64)),
    "view": lambda h: (h[:, :3].mul_(2.0), h)[1],
    "view of a view": lambda h: (h.view(8, 5).t()[1].add_(1.0), h)[1],
    "xor": lambda h: h * (h > 0).__ixor__(h > 1),
    "lerp": lambda h: h.lerp_(h * 2, 0.3),
    "fill_diagonal": lambda h: h.fill_diagonal_(0.5),
    "transpose": lambda h: h.t_(),
    "unsqueeze": lambda h: h.unsqueeze_(0),
    "round": lambda h: h.round_(decimals=1),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_in_place(name: str) -> None:
    same(lambda x: IN_PLACE[name](x * 1.0), torch.randn(5, 8, dtype=F64, generator=torch.Generator().manual_seed(2)))


def turned(h: Tensor) -> tuple[Tensor, ...]:
    h = h * 2
    first = h[0]
    h.t_()
    return first * 3, h[0] * 2


def strided(h: Tensor) -> tuple[Tensor, ...]:
    h = h * 2
    first = h[0]
    h.as_strided_((4, 4), (1, 4))
    return first * 3, h[0] * 2


def turned_argument(h: Tensor) -> tuple[Tensor, ...]:
    h.transpose_(0, 1)
    return (h[0] * 2,)


@pytest.mark.parametrize("rule", [turned, strided, turned_argument])
def test_a_square_that_is_turned_in_place(rule: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Its views, and the memory that it shares, stay as they are."""
    ours = ORTModule(Call(rule))
    for _ in range(2):
        block = torch.randn(2, 4, 4, dtype=F64)
        other = block.clone()
        x, y = block[1], other[1]
        torch.testing.assert_close(ours(x), rule(y), rtol=0, atol=0)
        torch.testing.assert_close(block, other, rtol=0, atol=0)
        assert x.stride() == y.stride()
    assert any("changes the shape of what it writes" in e.reason for e in ours.report().eager)


class Kept(nn.Module):
    """Edits a tensor that is neither parameter nor buffer, then goes on with what the edit returns."""

    def __init__(self, rule: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.plain = torch.arange(-8.0, 8.0, dtype=F64).view(4, 4)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def a_view_of_it(m: Any, x: Tensor) -> Tensor:
    m.plain[m.plain > 0] = 1.5
    m.plain.t().mul_(2.0)
    return m.plain * x


def a_view_of_what_is_edited_twice(m: Any, x: Tensor) -> Tensor:
    v = m.plain.mul_(2).add_(1)[..., ::2]
    m.plain[0] = 3
    return v * x[:, :2]


def written_by_out(m: Any, x: Tensor) -> Tensor:
    v = torch.cumsum(x.detach(), 0, out=m.plain)[1]
    m.plain.mul_(2)
    return v * x


def one_of_several(m: Any, x: Tensor) -> Tensor:
    torch.broadcast_tensors(x, m.plain)[1].add_(1)
    torch.broadcast_tensors(x, m.plain.mul_(2))[1].add_(1)
    return m.plain * x


def at_least_as_many_axes(m: Any, x: Tensor) -> Tensor:
    torch.atleast_2d(m.plain).mul_(2)
    torch.atleast_3d(m.plain.add_(1)).mul_(2)
    return m.plain * x


def a_copy_in_another_type(m: Any, x: Tensor) -> Tensor:
    h = m.plain.float()
    h.mul_(2)
    m.plain.double().add_(1)
    return m.plain * x + h


@pytest.mark.parametrize("rule", [a_view_of_it, a_view_of_what_is_edited_twice, written_by_out, one_of_several,
                                  at_least_as_many_axes, a_copy_in_another_type])  # fmt: skip
def test_views_of_what_an_edit_returns(rule: Callable[[Any, Tensor], Tensor]) -> None:
    eager, kept = Kept(rule), Kept(rule)
    ours = ORTModule(kept)
    for k in range(3):
        x = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(k))
        torch.testing.assert_close(ours(x.requires_grad_()), eager(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(kept.plain, eager.plain, rtol=1e-12, atol=1e-12)
    assert not ours.report().eager


def test_inplace_dropout_trains() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Hardswish(inplace=True), nn.Dropout(0.5, inplace=True), nn.Linear(64, 2))
    wrapped = ORTModule(model)
    for _ in range(2):
        wrapped(torch.randn(4, 8)).sum().backward()
    assert not wrapped.report().eager and not wrapped.report().host
    assert model[3].weight.grad.abs().max() > 0


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients(bag: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: nn.Module = nn.EmbeddingBag(20, 8, sparse=True) if bag else nn.Embedding(20, 8, sparse=True)
            self.out = nn.Linear(8, 2)

        def forward(self, i: Tensor) -> Tensor:
            h = self.table(i)
            return self.out(h if bag else h.mean(1))  # type: ignore[no-any-return]

    mine = Model()
    theirs = copy.deepcopy(mine)
    wrapped = ORTModule(mine)
    i = torch.randint(20, (4, 5))
    for m in (wrapped, theirs):
        m(i).sum().backward()
    a, b = mine.table.weight.grad, theirs.table.weight.grad
    assert isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_sparse
    torch.testing.assert_close(a.to_dense(), b.to_dense())
    assert "sparse" in wrapped.report().eager[0].reason


def test_tensors_of_a_number():
    """The number is the number: factories take it at different places."""
    x = torch.randn(2, 3, dtype=F64)
    w = same(lambda x: (x * x.new_full((3,), 2.5), x.new_full((1,), 2.5, dtype=torch.int64), x.new_full((2, 3), True), x.new_full((), 7),
                        x.new_full((2,), torch.tensor(3.5)), x + torch.full((3,), 4), torch.full_like(x, -1), torch.fill(x, 6.0)), x)
    assert not w.report().host and not w.report().eager, str(w.report())


def test_a_row_that_gives_another_type_is_a_step_down(monkeypatch):
    """What the table gets wrong is PyTorch's, by name."""
    monkeypatch.setitem(sys.modules["ortmodule.capture.convert"].TABLE, "tanh", lambda c, n, x: c.cast(c.v(x), torch.float32))
    (host,) = same(lambda x: torch.tanh(x) * 2, torch.randn(2, 3, dtype=F64)).report().host
    assert host.name.startswith("aten::tanh") and "float32" in host.reason


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_enabled_within_no_grad(nested):
    """What forward computes under enable_grad has a gradient, whatever the caller's mode is."""

    def enabled(x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            h = x @ w
        return h * 2 if nested else h

    w = torch.randn(3, 3, dtype=F64, requires_grad=True)
    wrapped = ORTModule(Call(enabled))
    for mode in (torch.no_grad(), torch.enable_grad(), torch.no_grad()):
        with mode:
            out = wrapped(torch.ones(2, 3, dtype=F64), w)
            assert out.requires_grad == enabled(torch.ones(2, 3, dtype=F64), w).requires_grad
    assert "enables gradients" in wrapped.report().eager[0].reason


def test_deviation_of_what_does_not_vary() -> None:
    """PyTorch's gradient is 0 there: normalising a dead unit by its own deviation trains on."""
    x = torch.randn(5, 4, dtype=F64)
    x[:, 1] = 2.0
    for f in (lambda t: (t - t.mean(0)) / (t.std(0) + 1e-5), lambda t: torch.std_mean(t, 0), lambda t: (t * 0).std() + t.std(1)):
        same(f, x)


@pytest.mark.parametrize("mean", [3e2, 1e4, 1e6])
def test_deviation_beside_a_large_mean(mean: float) -> None:
    """PyTorch's sums of float32 are float64's, so what rounding takes from the mean is not in them."""
    x = mean + mean * 1e-6 * torch.randn(64, 500, generator=torch.Generator().manual_seed(3))
    for f in (lambda t: t.std(1), lambda t: t.var(0), lambda t: torch.var_mean(t, 1)[0], lambda t: t.std((0, 1))):
        torch.testing.assert_close(ORTModule(Call(f))(x), f(x), rtol=1e-4 if f(x).dim() == 0 else 1e-6, atol=0.0)
        ours, exact = (t.clone().requires_grad_() for t in (x, x.double()))
        ORTModule(Call(f))(ours).sum().backward()
        f(exact).sum().backward()
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-5 * exact.grad.abs().max().item())


def test_dropout_of_everything() -> None:
    """Zeros, not None: momentum and weight decay go on."""
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + nn.functional.dropout(self.b(x), 1.0) + nn.functional.dropout1d(self.b(x)[None], 1.0)[0]

    w = ORTModule(Both())
    w(torch.randn(2, 3)).sum().backward()
    assert w.b.weight.grad is not None and not w.b.weight.grad.any() and w.a.weight.grad.any()


def test_bound_that_is_no_number() -> None:
    same(lambda t: t.clamp(min=NAN), torch.randn(3, dtype=F64))


def test_a_view_of_an_output_that_is_laid_out_otherwise() -> None:
    def f(t: Tensor) -> Any:
        y = (t * 2).t()
        return y, y.t().contiguous()

    w = ORTModule(Call(f))
    for _ in range(2):
        a, b = w(torch.randn(4, 6))
        assert b.is_contiguous() and torch.equal(a.t(), b)


# --- what used to crash ---------------------------------------------------------------------------


def above(x: Tensor) -> Tensor:
    return x[x > 0]


@pytest.mark.parametrize("f", [
    lambda x: x.sin() / above(x).numel(),
    lambda x: x.sin() * above(x).shape[0],
    lambda x: x.sin() + torch.unique((x * 2).round()).numel(),
    lambda x: x.sin() + torch.arange(above(x).numel(), dtype=F64).sum(),
    lambda x: x.sin() + torch.zeros(above(x).numel(), dtype=F64).sum(),
    lambda x: x.sin() * (above(x).numel() + above(x - 1).numel() * 0.5),
    lambda x: x.sin() / torch.cat([above(x), above(x - 1)]).numel(),
    lambda x: x.sin() + above(x).sum() / above(x).numel(),
    lambda x: x.sin() * len(x.nonzero()),
], ids=["numel", "shape", "unique", "arange", "zeros", "two", "cat", "and its values", "len"])  # fmt: skip
def test_the_size_alone_of_what_depends_on_data(f: Callable[..., Any]) -> None:
    """The operation that has this size was dropped, since nobody reads its values: KeyError 'u0' at every call."""
    wrapped = ORTModule(Call(f))
    for step in range(4):
        x = torch.randn(5 + step, 4, dtype=F64, generator=torch.Generator().manual_seed(step))
        for a, b in zip(outcome(wrapped, (x,)), outcome(f, (x,)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class HoldsScript(nn.Module):
    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        self.first, self.script = nn.Linear(4, 4), script

    def forward(self, x: Tensor) -> Tensor:
        return self.script(self.first(x))


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 4))], ids=["script", "trace"])
def test_torchscript_inside_runs_in_pytorch_by_name(make: Callable[..., Any]) -> None:
    eager = HoldsScript(make(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    wrapped = ORTModule(eager)
    x = torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), eager(x))
        wrapped(x).sum().backward()
    assert [e.module for e in wrapped.report().eager] == ["script"]
    assert "TorchScript" in str(wrapped.report())
    with pytest.raises(Exception, match="TorchScript"):
        ORTModule(eager, strict=True)(x)
    later = HoldsScript(nn.Identity())
    wrapped = ORTModule(later)
    wrapped(x)
    wrapped.script = eager.script
    torch.testing.assert_close(wrapped(x), later(x))


class Rebuilds(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.l = size, nn.Linear(size, size)

    def wider(self) -> nn.Module:
        return self.__class__(self.size + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


def test_methods_that_make_another_of_their_class() -> None:
    """`self.__class__(...)` in a user's or PyTorch's method means the user's class."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    wrapped = ORTModule(layers)
    part = wrapped[:2]
    assert type(part) is nn.Sequential and part[0] is layers[0] and len(part) == 2
    assert type(wrapped[1:]) is nn.Sequential
    wider = ORTModule(Rebuilds(3)).wider()
    assert type(wider) is Rebuilds and wider.size == 4
    assert isinstance(copy.deepcopy(wrapped), ORTModule) and isinstance(copy.copy(wrapped), ORTModule)
    assert len(ORTModule(nn.ModuleList([nn.ReLU(), nn.ReLU()]))[:1]) == 1


class Grid(nn.Module):
    """Numbers between two that are trained: PyTorch reads those, and gives them no gradient."""

    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.top, self.make = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0)), make

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.make(0, self.top, 4)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("make", [torch.linspace, torch.logspace])
def test_ends_of_a_grid_have_no_gradient(make: Callable[..., Tensor]) -> None:
    eager = Grid(make)
    wrapped = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        x = torch.randn(3, 4)
        for m in (eager, wrapped):
            m(x).sum().backward()
        torch.testing.assert_close(wrapped.layer.weight.grad, eager.layer.weight.grad)
        assert wrapped.top.grad is None and eager.top.grad is None
