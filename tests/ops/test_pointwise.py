"""Elementwise operators against eager PyTorch: values, gradients, broadcasting, dtypes, special values, in-place-free
strides."""

from __future__ import annotations

import functools
import math

import new_op
import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 1e-30, 3e38, -3e38, 1.0, -1.0, 0.5, 2.0, 88.8, -88.0, 100.0,
                        -104.0, 20.5])

rand = functools.partial(rand, per_axis=7)


def node(op: str, *xs: torch.Tensor, attrs: str = "") -> torch.Tensor:
    lines = [f"  input x{i}: {engine.NAMES[engine.TORCH.index(x.dtype)]}[{', '.join(map(str, x.shape))}]" for i, x in enumerate(xs)]
    args = ", ".join(f"x{i}" for i in range(len(xs)))
    outs, _ = engine.run("\n".join(["graph {", *lines, f"  y = {op}({args}) {{{attrs}}}", "  output y", "}"]), list(xs))
    return outs[0]


UNARY = {
    "expm1": torch.expm1, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
}
UNARY |= {name: getattr(torch, aten) for name, (_, aten, arity) in new_op.plain().items() if arity == 1}
POSITIVE = {"log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal}
UNARY = {name: f for name, f in UNARY.items() if name not in POSITIVE}  # those that new_op.py writes too: from their row


@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str) -> None:
    check(op, [rand(7, 13, 5, scale=3.0)], UNARY[op], low=LOW)


@pytest.mark.parametrize("op", POSITIVE)
def test_positive(op: str) -> None:
    check(op, [rand(7, 13, 5).abs() + 0.3], POSITIVE[op], low=LOW)


@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (3, 0), (1, 1, 1), (1031,), (3, 1031), (251, 257)])
def test_sizes(shape: tuple[int, ...]) -> None:
    check("gelu", [rand(*shape)], F.gelu)
    check("mul", [rand(*shape), rand(*shape, shift=1.0)], torch.mul)


# Where PyTorch's vector kernels differ from one processor to the next (gelu of inf is inf or NaN): the formula in
# scalar fp64.
FORMULA = {"gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
           "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))}


@pytest.mark.parametrize("op", UNARY | POSITIVE)
def test_special_values(op: str) -> None:
    """NaN, infinities, signed zeros, subnormals in f32: as fp64 rounded; finite results within 4 units in the last
    place of the exact ones."""
    for x in (SPECIAL, rand(3001, scale=4.0).float(), rand(3001, scale=30.0).float()):
        got, eager, exact = node(op, x), {**UNARY, **POSITIVE}[op](x), {**UNARY, **POSITIVE}[op](x.double())
        if op in FORMULA:
            exact = torch.tensor([FORMULA[op](v) for v in x.tolist()], dtype=torch.float64)
        want = exact.float()
        assert torch.equal(got.isnan(), want.isnan()), x[got.isnan() != want.isnan()]
        assert torch.equal(got.isinf(), want.isinf()), x[got.isinf() != want.isinf()]
        ok = want.isfinite() & exact.isfinite()
        ulp = torch.finfo(torch.float32).eps * exact.abs().clamp_min(1e-36)
        err, own = ((got.double() - exact).abs() / ulp)[ok], ((eager.double() - exact).abs() / ulp)[ok].nan_to_num(0, 0, 0)
        # 1 + erf and 1 + tanh cancel far below 0, in the reference too: error relative to x there
        if op.startswith("gelu"):
            err = torch.minimum(err, (got.double() - exact).abs()[ok] / (2**-24 * x.double().abs()[ok] + 1e-37))
        assert (err <= torch.clamp_min(2 * own, 4)).all(), (op, err.max(), x[ok][err.argmax()])


def test_trigonometric_range() -> None:
    x = torch.cat([rand(1009, scale=1e3).float(), rand(1009, scale=1e5).float(), torch.tensor([1e7, -3e9, 1e30, 3e38])])
    for op, f in (("sin", torch.sin), ("cos", torch.cos)):
        assert (node(op, x).double() - f(x.double())).abs().max() < 3e-7
        assert (node(op, x[:2018]).double() - f(x[:2018].double())).abs().max() < 3e-7


PAIRS = [((7, 13, 5), (7, 13, 5)), ((7, 13, 5), (13, 1)), ((7, 1, 5), (13, 1)), ((5,), (7, 13, 5)), ((), (7, 13)), ((7, 13), (1, 1)), ((0, 5), (5,)),
         ((3, 211), (3, 1)), ((3, 211), (211,)), ((2, 3, 211), (2, 1, 211)), ((0, 1), (1, 7)), ((7, 1), (1, 13))]
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum}


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(op, [rand(*shapes[0]), rand(*shapes[1], shift=0.5)], BINARY[op], low=LOW if shapes is PAIRS[1] else (torch.float32,))


@pytest.mark.parametrize("shapes", PAIRS[:5])
def test_binary_own_range(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = rand(*shapes[0]), rand(*shapes[1], shift=0.2)
    check("pow", [a.abs() + 0.1, b], torch.pow)
    check("fmod", [a, b], torch.fmod)
    check("mod", [a, b], torch.remainder)
    check("floor_div", [a, b], torch.floor_divide, grad=False)


def test_floor_div_has_no_derivative() -> None:
    """As in PyTorch."""
    with pytest.raises(engine.EngineError, match="floor_div has no derivative"):
        engine.Graph.parse("graph {\n input x: f64[3]\n y = floor_div(x, x)\n output y\n}").grad([1], [1])


def test_fmod_of_large_quotients() -> None:
    check("fmod", [rand(211, scale=300.0), rand(211, shift=0.2)], torch.fmod)


@pytest.mark.parametrize("shapes", PAIRS)
def test_ties_where_broadcast(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (rand(*s).round() for s in shapes)
    check("maximum", [a, b], torch.maximum)
    check("minimum", [a, b], torch.minimum)


def test_ties() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 0.0, -0.0], dtype=torch.float64)
    b = torch.tensor([1.0, 1.0, 5.0, 0.0, 0.0], dtype=torch.float64)
    check("maximum", [a, b], torch.maximum)
    check("minimum", [a, b], torch.minimum)
    check("abs", [a - 1], torch.abs)
    check("relu", [a - 1], torch.relu)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_relu_keeps_the_zeros(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, -1.0, -math.inf, 1e-40, -1e-40, 2.0] * 5).to(dtype)
    got, want = node("relu", x), torch.relu(x)
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, -1.0, 0.5, -2.0, 2.5])
def test_pow_constant(p: float) -> None:
    x = rand(7, 13).abs() + 0.2 if p != int(p) else rand(7, 13)
    graph = "graph {{\n  input x: {t0}\n  const c: f64[] = P\n  y = pow(x, c)\n  output y\n}}".replace("P", str(p))
    check("pow", [x], lambda t: torch.pow(t, p), graph=graph, low=())
    y = torch.full((), p, dtype=torch.float32)
    got, exact = node("pow", x.float(), y), torch.pow(x.float().double(), p)
    assert ((got.double() - exact).abs() / exact.abs().clamp_min(1e-30)).max() < 3e-7


def test_pow_special() -> None:
    vals = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, math.inf, -math.inf, math.nan, 3.0, -3.0, 1e30, 1e-30, 16777216.0, 1e-40])
    x, y = torch.meshgrid(vals, vals, indexing="ij")
    got = node("pow", x.contiguous(), y.contiguous())
    want = torch.tensor([[math_pow(float(a), float(b)) for b in vals] for a in vals], dtype=torch.float64).float()
    assert torch.equal(got.isnan(), want.isnan()), (x[got.isnan() != want.isnan()], y[got.isnan() != want.isnan()])
    fin = want.isfinite()
    assert torch.equal(got[want.isinf()], want[want.isinf()])
    assert torch.allclose(got[fin], want[fin], rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("p", [2.0, 3.0, -1.0, 0.5, -0.5, 4.0, 0.0, math.inf, math.nan])
def test_one_exponent_has_the_bits_of_many(p: float) -> None:
    x = torch.cat([SPECIAL, rand(1009, scale=30.0).float(), torch.tensor([1e13, -1e13, 1e-13, 3e-39, -3e-39])])
    one, many = node("pow", x, torch.tensor(p)), node("pow", x, torch.full_like(x, p))
    assert torch.equal(one.view(torch.int32), many.view(torch.int32)), x[one.view(torch.int32) != many.view(torch.int32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradient_of_a_constant_power(dtype: torch.dtype) -> None:
    """The exponent's number is seen in every type: neither a general power nor a `where` for the exponent 0."""
    name = engine.NAMES[engine.TORCH.index(dtype)]
    for p, powers in ((3.0, 2), (2.0, 1), (0.0, 1)):
        text = f"graph {{\n  input x: {name}[64]\n  const c: {name}[] = {p}\n  y = pow(x, c)\n  output y\n}}"
        joint = engine.Graph.parse(text).grad([1], [1]).text()
        assert "where" not in joint and joint.count("pow(") == powers, joint
        x, dy = rand(64).to(dtype).requires_grad_(), rand(64).to(dtype)
        torch.pow(x, p).backward(dy)
        got = engine.run(text, [x.detach()], [1], [dy])[1][0]
        assert torch.allclose(got.double(), x.grad.double(), rtol=4 * torch.finfo(dtype).eps, atol=1e-6), (p, got, x.grad)


def math_pow(a: float, b: float) -> float:
    return float(torch.pow(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)))


def test_second_order() -> None:
    check("tanh_grad", [rand(7, 5), rand(7, 5)], lambda d, y: d * (1 - y * y))
    check("sigmoid_grad", [rand(7, 5), rand(7, 5)], lambda d, y: d * y * (1 - y))


INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", INTS)
def test_integers(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    low, high = (0, 250) if dtype == torch.uint8 else (-120, 120)
    a, b = (torch.randint(low, high, (11, 23), generator=g).to(dtype) for _ in range(2))
    for op, f in {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum, "eq": torch.eq,
                  "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "and": torch.bitwise_and, "or": torch.bitwise_or,
                  "xor": torch.bitwise_xor}.items():
        assert torch.equal(node(op, a, b), f(a, b)), op
        assert torch.equal(node(op, a.t()[3:], b.t()[3:]), f(a.t()[3:], b.t()[3:])), op
    d = torch.where(b == 0, torch.ones_like(b), b)
    assert torch.equal(node("floor_div", a, d), torch.div(a, d, rounding_mode="floor"))
    assert torch.equal(node("div", a, d), torch.div(a, d, rounding_mode="trunc"))
    assert torch.equal(node("mod", a, d), torch.remainder(a, d))
    assert torch.equal(node("fmod", a, d), torch.fmod(a, d))
    assert torch.equal(node("pow", a, (d.to(torch.int64).abs() % 4).to(dtype)), torch.pow(a, (d.to(torch.int64).abs() % 4).to(dtype)))
    assert torch.equal(node("abs", a), torch.abs(a))
    assert torch.equal(node("neg", a), torch.neg(a))
    assert torch.equal(node("not", a), torch.bitwise_not(a))
    assert torch.equal(node("sign", a), torch.sign(a))
    assert torch.equal(node("relu", a), torch.relu(a))


def test_integer_division_is_total() -> None:
    a = torch.tensor([-(2**63), 5, -5, 0], dtype=torch.int64)
    for op in ("div", "floor_div", "mod", "fmod"):
        assert node(op, a, torch.zeros(4, dtype=torch.int64)).tolist() == [0, 0, 0, 0]
        node(op, a, torch.full((4,), -1, dtype=torch.int64))


def test_bool() -> None:
    a, b = (torch.randint(0, 2, (13, 229), generator=torch.Generator().manual_seed(k)).bool() for k in (1, 2))
    for op, f in {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
                  "ge": torch.ge, "mul": torch.mul, "maximum": torch.maximum}.items():
        assert torch.equal(node(op, a, b), f(a, b)), op
        assert torch.equal(node(op, a, b[:1]), f(a, b[:1])), op
    assert torch.equal(node("not", a), ~a)
    assert torch.equal(node("add", a, b), a | b)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW])
def test_comparisons(dtype: torch.dtype) -> None:
    a, b = rand(13, 17).to(dtype), rand(17).to(dtype)
    a[3], a[4, 5] = b, math.nan
    for op, f in {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}.items():
        assert torch.equal(node(op, a, b), f(a, b)), op
    x = SPECIAL.to(dtype)
    assert torch.equal(node("isnan", x), x.isnan())
    assert torch.equal(node("isinf", x), x.isinf())


@pytest.mark.parametrize("shapes", [((7, 13, 5),) * 3, ((7, 1, 5), (13, 5), ()), ((13, 1), (), (7, 13, 5)), ((), (5,), (5,)),
                                    ((3, 301), (301,), (3, 1))])
def test_where(shapes: tuple[tuple[int, ...], ...]) -> None:
    check("where", [rand(*shapes[0]) > 0, rand(*shapes[1]), rand(*shapes[2], shift=1.0)], torch.where, low=LOW)


@pytest.mark.parametrize("to", [torch.float32, torch.float64, torch.bfloat16, torch.float16, *INTS, torch.bool])
@pytest.mark.parametrize("frm", [torch.float32, torch.float64, torch.bfloat16, torch.float16, *INTS, torch.bool])
def test_cast(frm: torch.dtype, to: torch.dtype) -> None:
    x = rand(11, 19, scale=20.0).abs().to(frm) if to == torch.uint8 else rand(11, 19, scale=20.0).to(frm)
    i = engine.TORCH.index(to)
    assert torch.equal(node("cast", x, attrs=f"to={i}"), x.to(to))
    assert torch.equal(node("cast", x.t()[1::2], attrs=f"to={i}"), x.t()[1::2].to(to))


@pytest.mark.parametrize("frm", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", INTS)
def test_cast_of_what_an_integer_does_not_hold(frm: torch.dtype, to: torch.dtype) -> None:
    numbers = [math.nan, math.inf, -math.inf, 1e10, -1e10, 2.0**31, 3e9, -3e9, 2.0**32 + 7, 5e18, 1e19, 7e4, -7e4, 300.0, -129.0, -1.0]
    for n in (1, 37):  # remainders and vectors
        x = torch.tensor(numbers, dtype=torch.float64).repeat(n).to(frm)
        assert torch.equal(node("cast", x, attrs=f"to={engine.TORCH.index(to)}"), x.to(to))


def test_cast_gradient_and_rounding() -> None:
    check("cast", [rand(7, 5)], lambda x: x.to(torch.float32), "to=1", low=(), tol=1e-6)
    bits = torch.arange(0, 2**16, dtype=torch.int32)
    every_half = (bits - 2**15).to(torch.int16).view(torch.float16)
    number = ~every_half.isnan()
    assert torch.equal(node("cast", every_half, attrs="to=1").view(torch.int32)[number], every_half.float().view(torch.int32)[number])
    x = torch.cat([rand(4001, scale=1e-6), rand(4001, scale=3e4), every_half.double() * (1 + 2**-12)]).float()
    for i, dt in ((3, torch.bfloat16), (4, torch.float16)):
        assert torch.equal(node("cast", x, attrs=f"to={i}").nan_to_num(), x.to(dt).nan_to_num())


def test_errors_name_operator_and_remedy() -> None:
    for op, xs, words in [("add", [rand(3), rand(3).float()], ("add", "f32", "cast")), ("exp", [torch.ones(3, dtype=torch.int64)], ("exp", "i64")),
                          ("add", [rand(3), rand(4)], ("add", "3", "4")), ("where", [rand(3), rand(3), rand(3)], ("where", "bool"))]:
        with pytest.raises(engine.EngineError) as e:
            node(op, *xs)
        assert all(w in str(e.value) for w in words), str(e.value)
