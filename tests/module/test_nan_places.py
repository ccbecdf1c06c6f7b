"""Where NaN and infinities stand, in results and gradients, against eager in fp64: activations, bounds, chains that are
fused, comparisons, extrema. Every function is captured with others in one graph, as it would stand in a model; whoever
differs is named. What eager's own kernels do not agree on, or what is infinity times zero in a formula of its alone, is
held to the value of the function (FORMULA; docs/SEMANTICS.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule import ORTModule

F64 = torch.float64
INF, NAN = float("inf"), float("nan")
# 16: what eager's vectors take whole; its loops over the rest treat NaN otherwise (hardtanh, elu)
X = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 100.0, -100.0, 0.5, -2.5, 1e300, 6.0, -6.0], dtype=F64)
A, B = (t.flatten().contiguous() for t in torch.meshgrid(X, X, indexing="ij"))


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=F64)


ACTIVATIONS = {
    "relu": F.relu, "relu6": F.relu6, "elu": F.elu, "elu, alpha": lambda x: F.elu(x, 0.5), "selu": F.selu, "hardswish": F.hardswish,
    "hardtanh": F.hardtanh, "leaky_relu": F.leaky_relu, "softplus": F.softplus, "softplus, beta": lambda x: F.softplus(x, 2.0, 5.0), "mish": F.mish,
    "softsign": F.softsign, "threshold": lambda x: F.threshold(x, 0.5, 7.0), "logsigmoid": F.logsigmoid, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=F64)), "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "abs": torch.abs, "sign": torch.sign, "floor": torch.floor, "round": torch.round, "trunc": torch.trunc,
    "frac": torch.frac, "sin": torch.sin, "asinh": torch.asinh, "cube": lambda x: x**3, "nan_to_num": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
    "remainder": lambda x: x % 2.0, "fmod": lambda x: x.fmod(2.0), "divided": lambda x: torch.div(x, 2.0, rounding_mode="floor"),
}  # fmt: skip
CHAINS = {
    "clamp": lambda x: x.clamp(-1, 1), "from below": lambda x: x.clamp(min=0.0), "from above": lambda x: x.clamp(max=1.0), "crossed": lambda x: x.clamp(1, -1),
    "infinite": lambda x: x.clamp(-INF, INF), "bounds of NaN": lambda x: x.clamp(number(NAN), number(2.0)), "relu, clamps": lambda x: F.relu(x.clamp(-1, 5)).clamp(max=3) * 2,
    "maximum, relu": lambda x: torch.maximum(F.relu(x), torch.zeros_like(x)).clamp(0, 6) / 6, "clamp twice": lambda x: x.clamp(min=0).clamp(min=0).clamp(max=1),
    "relu twice": lambda x: F.relu(F.relu(x)), "x - x": lambda x: x - x, "x / x": lambda x: x / x, "x * 0": lambda x: x * 0, "relu * 0": lambda x: F.relu(x) * 0,
    "where": lambda x: torch.where(x > 0, x, 0.0), "where x != x": lambda x: torch.where(x != x, 0.0, x), "where x == x": lambda x: torch.where(x == x, x, 1.0),
    "where x <= x": lambda x: torch.where(x <= x, x, 5.0), "where not": lambda x: torch.where(~(x < 0), x, 5.0), "root where": lambda x: torch.where(x > 0, x.sqrt(), x),
    "masked_fill": lambda x: x.masked_fill(x <= 0, 2.0), "masked NaN": lambda x: x.masked_fill(x.isnan(), 2.0) * 3, "isfinite": lambda x: torch.where(x.isfinite(), x, 0.0),
    "twice negative": lambda x: x.neg().neg(), "x + -x": lambda x: x + (-x), "dropout": lambda x: F.dropout(x, 1.0), "mean square": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "softmax of one": lambda x: x[None].softmax(0), "cumsum": lambda x: x.cumsum(0), "tril": lambda x: (x[:4, None] * x[None, :4]).tril(),
}  # fmt: skip
PAIRS = {
    "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "fmin": torch.fmin, "mul": torch.mul, "div": torch.div, "fmod": torch.fmod, "remainder": torch.remainder,
    "where": lambda a, b: torch.where(a > b, a, b), "where <=": lambda a, b: torch.where(a <= b, a, b * 2), "where not": lambda a, b: torch.where(~(a > b), a, b * 2),
    "clamp": lambda a, b: a.clamp(b, b + 1), "clamp to equal": lambda a, b: a.clamp(b, b), "clamp, crossed": lambda a, b: a.clamp(b, b - 1), "clamp from below": lambda a, b: torch.clamp(a, min=b),
    "clamp from above": lambda a, b: torch.clamp(a, max=b), "lerp": lambda a, b: torch.lerp(a, b, 0.3), "lerp, nearer": lambda a, b: torch.lerp(a, b, 0.7), "lerp, end": lambda a, b: torch.lerp(a, b, 1.0),
    "lerp by a tensor": lambda a, b: torch.lerp(a, b, torch.where(b > 0, 0.25, 0.75).to(F64)), "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0), "huber": lambda a, b: F.huber_loss(a, b, reduction="none"),
    "smooth_l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"), "mse": lambda a, b: F.mse_loss(a, b, reduction="none"), "add": lambda a, b: torch.add(a, b, alpha=0),
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"), "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}  # fmt: skip
REDUCTIONS = {
    "max": lambda x: x.max(), "min": lambda x: x.min(), "amax": lambda x: x.amax(1), "amin": lambda x: x.amin(1), "amax of all": lambda x: x.amax(), "max of rows": lambda x: x.max(1)[0],
    "max, kept": lambda x: x.max(0, keepdim=True)[0], "min of rows": lambda x: x.min(1)[0], "sum": lambda x: x.sum(1), "mean": lambda x: x.mean(1), "prod": lambda x: x.prod(1), "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(1), "norm": lambda x: x.norm(dim=1), "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "at argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)), "at argmin": lambda x: x.gather(1, x.argmin(1, keepdim=True)), "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "max_pool, wide": lambda x: F.max_pool1d(x[None], 3, 1, 1), "avg_pool": lambda x: F.avg_pool1d(x[None], 2), "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(5)),
    "without a sum": lambda x: F.cross_entropy(x, torch.arange(5), reduction="none"), "product": lambda x: x @ x.t(), "clamped": lambda x: x.clamp(0, 1).sum(), "scaled": lambda x: (x - x.min()) / (x.max() - x.min()),
}  # fmt: skip


class All(nn.Module):
    def __init__(self, cases: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        k = len(xs) // len(self.cases)
        return tuple(f(*xs[i * k : i * k + k]) for i, f in enumerate(self.cases))


def outcome(module: nn.Module, inputs: list[Tensor]) -> list[list[Tensor]]:
    """By case: the result, then the gradient of each operand. Every case has operands of its own."""
    xs = [x.clone().requires_grad_() for x in inputs]
    outs = module(*xs)
    gen = torch.Generator().manual_seed(1)
    torch.autograd.backward(outs, [torch.randn(o.shape, dtype=F64, generator=gen) for o in outs])
    k = len(inputs) // len(outs)
    return [[o.detach(), *[x.grad for x in xs[i * k : i * k + k]]] for i, o in enumerate(outs)]  # type: ignore[list-item]


def same(cases: dict[str, Callable[..., Any]], *xs: Tensor) -> None:
    plain = All(list(cases.values()))
    wrapped = ORTModule(All(list(cases.values())))
    inputs = [*xs] * len(cases)
    different = []
    for name, want, got in zip(cases, outcome(plain, inputs), outcome(wrapped, inputs), strict=True):
        for k, (a, b) in enumerate(zip(want, got, strict=True)):
            bad = ~torch.isclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
            if bad.any():
                at = [tuple(i.tolist()) for i in bad.nonzero()[:3]]
                where = f"gradient {k - 1}" if k else "result"
                different.append(f"{name}, {where}, at {[x[at[0]].item() for x in xs if x.shape == a.shape] or at}: {a[bad][:3].tolist()}, here {b[bad][:3].tolist()}")
    assert not different, "\n".join(different)
    assert not wrapped.report().eager, str(wrapped.report())


@pytest.mark.parametrize("cases", [ACTIVATIONS, CHAINS], ids=["activations", "chains"])
def test_one_operand(cases: dict[str, Callable[[Tensor], Tensor]]) -> None:
    same(cases, X)


def test_two_operands() -> None:
    same(PAIRS, A, B)


def matrix(kind: str) -> Tensor:
    x = torch.randn(5, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    if kind == "NaN":
        x[1, 2] = x[3, 1] = x[3, 4] = NAN
    elif kind == "all":
        x[1, 2], x[1, 3], x[2], x[3] = NAN, INF, -INF, NAN
    elif kind == "ties":
        x = x.round()
    return x


@pytest.mark.parametrize("kind", ["NaN", "all", "ties"])
def test_reductions(kind: str) -> None:
    same(REDUCTIONS, matrix(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremum_of_low_precision(dtype: torch.dtype) -> None:
    """300 ties, more than bf16 counts."""
    x = torch.zeros(700)
    x[::2] = 1.0
    for f in (torch.max, torch.amax):
        ours, own = x.to(dtype).requires_grad_(), x.to(dtype).requires_grad_()
        ORTModule(All([f]))(ours)[0].backward()
        f(own).backward()
        assert torch.equal(ours.grad, own.grad)  # type: ignore[arg-type]


def slope(f: Callable[[float], float], x: float, h: float = 1e-6) -> float:
    return (f(x + h) - f(x - h)) / (2 * h)


# f, its value and its derivative at -inf and inf
FORMULA: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float], tuple[float, float]]] = {
    "gelu": (F.gelu, (0, INF), (0, 1)), "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), (0, INF), (0, 1)), "silu": (F.silu, (0, INF), (0, 1)),
    "silu written out": (lambda x: x * torch.sigmoid(x), (0, INF), (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULA)
def test_limits(name: str) -> None:
    """Eager: NaN in the gradient, on some processors in the value (inf * 0), of gelu and silu at infinity."""
    f, _, slopes = FORMULA[name]
    module = ORTModule(All([f]))
    x = torch.tensor([-INF, INF, NAN, -1e4, 1e4, 0.5], dtype=F64, requires_grad=True)
    (y,) = module(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[:2].tolist() == pytest.approx(slopes, abs=1e-300) and x.grad[3:5].tolist() == pytest.approx(slopes)
    assert x.grad[2].isnan() and y[2].isnan() and y[1] == INF
    assert math.isclose(x.grad[5], slope(lambda v: float(f(number(v))), 0.5), rel_tol=1e-8)


def test_a_recurrent_relu() -> None:
    """The gradient goes on through NaN, as through relu itself."""
    torch.manual_seed(0)
    eager = nn.RNN(1, 1, nonlinearity="relu").double()
    with torch.no_grad():
        for p in eager.parameters():
            p.abs_()
    grads = []
    for model in (eager, ORTModule(eager)):
        x = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64, requires_grad=True)
        model(x)[0].sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert bool((grads[0] > 0).all())
    torch.testing.assert_close(grads[1], grads[0])
