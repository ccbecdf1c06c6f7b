"""Rows of the operator table that compute element by element: arithmetic, functions, comparisons, truth."""

from __future__ import annotations

import math
from typing import Any

import torch

from .convert import _LOW, BOOL, F32, Converter, NotHere, broadcast, row, wide_of
from .elementwise import PLAIN
from .onnx_build import Val, shape_of
from .program import Node


def _exact(y: Any, dtype: torch.dtype) -> bool:
    """Is a second operand the same number in this low precision? Of tensors torch's kernels on the CPU look into one
    without dimensions alone, in its own type."""
    if isinstance(y, Node):
        return y.val.ndim > 0 or y.val.dtype == dtype or y.val.device.type != "cpu"
    if isinstance(y, (torch.SymInt, torch.SymFloat)):
        return False
    return not math.isfinite(y) or float(torch.tensor(float(y), dtype=dtype, device="cpu")) == y


def arithmetic(c: Converter, op: str, x: Any, y: Any, dtype: torch.dtype) -> Val:
    """op(x, y) in the recorded type of the result. Numbers that a low precision cannot hold: products take a second
    operand in float32, sums and powers take them rounded, as torch does."""
    if dtype in _LOW and op in ("Mul", "Div") and not _exact(y, dtype):
        return c.cast(c.op2(op, c.num(x, F32), c.num(y, F32)), dtype)
    return c.op2(op, c.num(x, dtype), c.num(y, dtype))


def _plus_scaled(c: Converter, op: str, x: Any, y: Any, alpha: Any, dtype: torch.dtype) -> Val:
    """op(x, alpha * y), op Add or Sub, rounded once."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return arithmetic(c, op, x, y, dtype)
    if isinstance(y, (int, float)) and isinstance(alpha, (int, float)):
        return c.op2(op, c.num(x, dtype), c.b.constant(alpha * y, dtype))
    wide = wide_of(dtype)
    return c.cast(c.op2(op, c.num(x, wide), c.op2("Mul", c.num(y, wide), c.num(alpha, wide))), dtype)


def _add(c: Converter, op: str, x: Any, y: Any, alpha: Any, dtype: torch.dtype) -> Val:
    if dtype == BOOL:
        if op == "Sub":
            raise NotHere("subtraction of booleans")
        return c.op2("Or", c.num(x, BOOL), c.num(y, BOOL))
    return _plus_scaled(c, op, x, y, alpha, dtype)


@row("add.Tensor", "add.Scalar")
def add(c: Converter, n: Node, x: Node, y: Any, alpha: Any) -> Val:
    return _add(c, "Add", x, y, alpha, n.val.dtype)


@row("sub.Tensor", "sub.Scalar", "subtract.Tensor")
def sub(c: Converter, n: Node, x: Node, y: Any, alpha: Any) -> Val:
    return _add(c, "Sub", x, y, alpha, n.val.dtype)


@row("rsub.Tensor", "rsub.Scalar")
def rsub(c: Converter, n: Node, x: Node, y: Any, alpha: Any) -> Val:
    return _plus_scaled(c, "Sub", y, x, alpha, n.val.dtype)


@row("mul.Tensor", "mul.Scalar", "multiply.Tensor")
def mul(c: Converter, n: Node, x: Node, y: Any) -> Val:
    dtype = n.val.dtype
    return c.op2("And", c.num(x, BOOL), c.num(y, BOOL)) if dtype == BOOL else arithmetic(c, "Mul", x, y, dtype)


@row("div.Tensor", "div.Scalar", "true_divide.Tensor", "divide.Tensor")
def div(c: Converter, n: Node, x: Node, y: Any) -> Val:
    return arithmetic(c, "Div", x, y, n.val.dtype)


def _whole(y: Any, dtype: torch.dtype) -> None:
    """Integer division: PyTorch raises where a divisor is 0, which only a number shows beforehand."""
    if not dtype.is_floating_point and (isinstance(y, Node) or isinstance(y, (int, float)) and int(y) == 0):
        raise NotHere("integer division by a tensor or by 0, where PyTorch may raise")


def _remainder(c: Converter, x: Val, y: Val) -> Val:
    """Has the sign of the divisor. ONNX Mod says so for integers; for floats it is fmod."""
    if not x.dtype.is_floating_point:
        return c.op2("Mod", x, y)
    return c.b.op("Remainder", [x, y], x.dtype, broadcast(x.shape, y.shape), "ortmodule")


def _floor_div(c: Converter, x: Val, y: Val) -> Val:
    """Rounds towards minus infinity. Integers: the truncated quotient, less 1 where signs differ and something is left;
    no difference of the operands, which could overflow."""
    if x.dtype.is_floating_point:
        return c.b.op("FloorDiv", [x, y], x.dtype, broadcast(x.shape, y.shape), "ortmodule")
    q, zero = c.op2("Div", x, y), c.scalar(0, x.dtype)
    some = c.un("Not", c.compare("Equal", c.op2("Mul", q, y), x))
    if x.dtype == torch.uint8:
        return q
    unlike = c.op2("Xor", c.compare("Less", x, zero), c.compare("Less", y, zero), BOOL)
    return c.where(c.op2("And", some, unlike, BOOL), c.op2("Sub", q, c.scalar(1, x.dtype)), q)


@row("div.Tensor_mode", "div.Scalar_mode")
def div_mode(c: Converter, n: Node, x: Node, y: Any, mode: str | None) -> Val:
    dtype = n.val.dtype
    if mode is None:
        return arithmetic(c, "Div", x, y, dtype)
    _whole(y, dtype)
    a, b = c.num(x, dtype), c.num(y, dtype)
    if mode == "floor" and dtype.is_floating_point:
        return c.zero(_floor_div(c, c.stop(a), c.stop(b)), a, b)
    if mode == "floor":
        return _floor_div(c, a, b)
    if dtype.is_floating_point:
        return c.zero(_trunc(c, c.stop(c.op2("Div", c.stop(a), c.stop(b)))), a, b)
    return c.op2("Div", a, b)


@row("floor_divide", "floor_divide.Scalar")
def floor_divide(c: Converter, n: Node, x: Node, y: Any) -> Val:
    _whole(y, n.val.dtype)
    return _floor_div(c, c.num(x, n.val.dtype), c.num(y, n.val.dtype))


@row("remainder.Scalar", "remainder.Tensor")
def remainder(c: Converter, n: Node, x: Node, y: Any) -> Val:
    _whole(y, n.val.dtype)
    return _remainder(c, c.num(x, n.val.dtype), c.num(y, n.val.dtype))


@row("fmod.Scalar", "fmod.Tensor")
def fmod(c: Converter, n: Node, x: Node, y: Any) -> Val:
    _whole(y, n.val.dtype)
    a, b = c.num(x, n.val.dtype), c.num(y, n.val.dtype)
    return c.b.op("Mod", [a, b], a.dtype, broadcast(a.shape, b.shape), fmod=1)


@row("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def power(c: Converter, n: Node, x: Any, y: Any) -> Val:
    dtype = n.val.dtype
    if isinstance(x, Node) and isinstance(y, (int, float)):
        v = c.num(x, dtype)
        if y == 1:
            return v
        if y == 2:
            return c.op2("Mul", v, v)
        if y == 0.5:
            return c.un("Sqrt", v)
        if y == -0.5:
            return c.un("Reciprocal", c.un("Sqrt", v))
        if y == -1 and dtype.is_floating_point:
            return c.un("Reciprocal", v)
        if y == int(y) and dtype.is_floating_point:
            y = int(y)
    out = arithmetic(c, "Pow", x, y, dtype)
    if dtype in _LOW and not all(isinstance(v, Node) or _exact(v, dtype) for v in (x, y)):
        # torch rounds the number for the value, not for the gradient
        path = c.cast(c.op2("Pow", c.num(x, F32), c.num(y, F32)), dtype)
        return c.b.op("StraightThrough", [out, path], dtype, out.shape, "ortmodule")
    return out


@row("square")
def square(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, n.val.dtype)
    return c.op2("Mul", v, v)


@row("addcmul")
def addcmul(c: Converter, n: Node, x: Node, a: Node, b: Node, value: Any) -> Val:
    dtype = wide_of(n.val.dtype)
    scaled = c.num(a, dtype) if value == 1 else c.op2("Mul", c.num(a, dtype), c.num(value, dtype))
    return c.cast(c.op2("Add", c.num(x, dtype), c.op2("Mul", scaled, c.num(b, dtype))), n.val.dtype)


@row("addcdiv")
def addcdiv(c: Converter, n: Node, x: Node, a: Node, b: Node, value: Any) -> Val:
    dtype = wide_of(n.val.dtype)
    ab = c.op2("Div", c.num(a, dtype), c.num(b, dtype))
    ab = ab if value == 1 else c.op2("Mul", ab, c.scalar(value, dtype))
    return c.cast(c.op2("Add", c.num(x, dtype), ab), n.val.dtype)


@row("lerp.Scalar", "lerp.Tensor")
def lerp(c: Converter, n: Node, x: Node, y: Node, w: Any) -> Val:
    """From the nearer end, as torch computes it."""
    dtype = wide_of(n.val.dtype)
    a, b, t = c.num(x, dtype), c.num(y, dtype), c.num(w, dtype)
    near = c.op2("Add", a, c.op2("Mul", t, c.op2("Sub", b, a)))
    if isinstance(w, (int, float)) and abs(w) < 0.5:
        return c.cast(near, n.val.dtype)
    far = c.op2("Sub", b, c.op2("Mul", c.op2("Sub", c.scalar(1, dtype), t), c.op2("Sub", b, a)))
    if isinstance(w, (int, float)):
        return c.cast(far, n.val.dtype)
    return c.cast(c.where(c.compare("Less", c.un("Abs", t), c.scalar(0.5, dtype)), near, far), n.val.dtype)


@row("maximum", "max.other")
def maximum(c: Converter, n: Node, x: Node, y: Node) -> Val:
    return c.op2("Max", c.num(x, n.val.dtype), c.num(y, n.val.dtype))


@row("minimum", "min.other")
def minimum(c: Converter, n: Node, x: Node, y: Node) -> Val:
    return c.op2("Min", c.num(x, n.val.dtype), c.num(y, n.val.dtype))


@row("fmax", "fmin")
def fmax(c: Converter, n: Node, x: Node, y: Node) -> Val:
    """A number beats NaN; ties and their whole gradient go to the first operand."""
    a, b = c.num(x, n.val.dtype), c.num(y, n.val.dtype)
    if a.dtype == BOOL:
        raise NotHere("fmax and fmin of booleans")
    first = c.compare("GreaterOrEqual" if n.target._schema.name == "aten::fmax" else "LessOrEqual", a, b)
    return c.where(c.op2("Or", first, test(c, "IsNaN", b), BOOL) if a.dtype.is_floating_point else first, a, b)


# --- one operand ----------------------------------------------------------------------------------

_UNARY = PLAIN | {"sgn": "Sign", "floor": "Floor", "ceil": "Ceil", "round": "Round"}


def _unary(onnx_op: str) -> Any:
    def f(c: Converter, n: Node, x: Node, *_: Any) -> Val:
        v = c.num(x, n.val.dtype)
        return v if onnx_op in ("Floor", "Ceil", "Round") and not v.dtype.is_floating_point else c.un(onnx_op, v)

    return f


for _aten, _onnx in _UNARY.items():
    row(_aten)(_unary(_onnx))


@row("rsqrt")
def rsqrt(c: Converter, n: Node, x: Node) -> Val:
    return c.un("Reciprocal", c.un("Sqrt", c.num(x, n.val.dtype)))


@row("silu")
def silu(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, n.val.dtype)
    return c.op2("Mul", v, c.un("Sigmoid", v))


@row("gelu")
def gelu(c: Converter, n: Node, x: Node, approximate: str) -> Val:
    return c.un("Gelu", c.num(x, n.val.dtype), approximate=approximate)


@row("softplus")
def softplus(c: Converter, n: Node, x: Node, beta: Any, threshold: Any) -> Val:
    """Linear above the threshold, as torch has it."""
    plain = beta == 1 and _exact(threshold, n.val.dtype)
    v = c.num(x, n.val.dtype if plain else wide_of(n.val.dtype))
    scaled = v if beta == 1 else c.op2("Mul", v, c.scalar(beta, v.dtype))
    soft = c.un("Softplus", scaled)
    soft = soft if beta == 1 else c.op2("Div", soft, c.scalar(beta, v.dtype))
    return c.cast(c.where(c.compare("Greater", scaled, c.scalar(threshold, v.dtype)), v, soft), n.val.dtype)


@row("log_sigmoid")
def log_sigmoid(c: Converter, n: Node, x: Node) -> Val:
    """-softplus(-x): min(x, 0) - log1p(exp(-|x|)) in one operator."""
    v = c.num(x, n.val.dtype)
    return c.neg(c.un("Softplus", c.neg(v)))


def _trunc(c: Converter, v: Val) -> Val:
    return c.where(c.compare("Less", v, c.scalar(0, v.dtype)), c.un("Ceil", v), c.un("Floor", v))


@row("trunc", "fix")
def trunc(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, n.val.dtype)
    return _trunc(c, v) if v.dtype.is_floating_point else v


@row("log1p", "expm1")
def near_zero(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, n.val.dtype)
    return c.b.op("Log1p" if "log1p" in str(n.target) else "Expm1", [v], v.dtype, v.shape, "ortmodule")


@row("log2", "log10")
def log_base(c: Converter, n: Node, x: Node) -> Val:
    """The logarithm of a power of the base is exact, as torch's is: floor(log10(1000)) is 3."""
    v = c.num(x, n.val.dtype)
    wide = c.cast(v, wide_of(v.dtype))
    base = 2 if "log2" in str(n.target) else 10
    y = c.op2("Mul", c.un("Log", wide), c.scalar(1 / math.log(base), wide.dtype))
    near = c.un("Round", y)
    exact = c.where(c.compare("Equal", c.op2("Pow", c.scalar(base, wide.dtype), near), wide), near, y)
    return c.cast(c.b.op("StraightThrough", [exact, y], y.dtype, y.shape, "ortmodule"), v.dtype)


# Kinks are written as Where: its gradient is what torch gives at the boundary, which differs from Clip's, Max's and
# Min's.


@row("clamp", "clip", "clamp.Tensor", "clamp_min", "clamp_max", "clamp_min.Tensor", "clamp_max.Tensor")
def clamp(c: Converter, n: Node, x: Node, *bounds: Any) -> Val:
    """The operand itself within the bounds, else what they make of it. NaN stays NaN; its gradient is 0."""
    v = c.num(x, n.val.dtype)
    name = n.target._schema.name
    lo, hi = (bounds[0], None) if name.endswith("_min") else (None, bounds[0]) if name.endswith("_max") else bounds[:2]
    if any(isinstance(b, float) and b != b for b in (lo, hi)):
        raise NotHere("a bound is NaN")
    low, high = (None if b is None or v.dtype == BOOL else c.num(b, v.dtype) for b in (lo, hi))
    if not v.dtype.is_floating_point:
        v = v if low is None else c.where(c.compare("Less", v, low), low, v)
        return v if high is None else c.where(c.compare("Greater", v, high), high, v)
    y = _clamped(c, v, low, high)
    if not any(isinstance(b, Node) for b in (lo, hi)):
        return y
    # of two bounds the lower gets nothing where they are equal, the upper all where they are crossed
    to = c.stop(v)
    if low is not None:
        below = c.compare("Less", v, low)
        below = below if high is None else c.op2("And", below, c.compare("Less", low, high), BOOL)
        to = c.where(below, low, to)
    if high is not None:
        above = c.compare("Greater", v, high)
        above = above if low is None else c.op2("Or", above, c.compare("Less", high, low), BOOL)
        to = c.where(above, high, to)
    out = c.where(_inside(c, v, low, high, "OrEqual"), v, to)
    return c.b.op("StraightThrough", [y, out], y.dtype, y.shape, "ortmodule")


def _inside(c: Converter, v: Val, low: Val | None, high: Val | None, equal: str) -> Val:
    tests = [c.compare("Greater" + equal, v, low)] if low is not None else []
    tests += [c.compare("Less" + equal, v, high)] if high is not None else []
    return tests[0] if len(tests) == 1 else c.op2("And", tests[0], tests[1], BOOL)


def _clamped(c: Converter, v: Val, low: Val | None, high: Val | None) -> Val:
    """The bounds themselves pass the gradient on."""
    if low is None and high is None:
        return v
    y = c.stop(v)
    y = y if low is None else c.op2("Max", y, low)
    y = y if high is None else c.op2("Min", y, high)
    return c.where(_inside(c, v, low, high, "OrEqual"), v, y)


def _between(c: Converter, v: Val, lo: float, hi: float) -> Val:
    """hardtanh: no gradient at the bounds themselves, which a low precision rounds for the values alone."""
    wide = wide_of(v.dtype)
    inside = _inside(c, c.cast(v, wide), c.scalar(lo, wide), c.scalar(hi, wide), "")
    y = c.op2("Min", c.op2("Max", c.stop(v), c.scalar(lo, v.dtype)), c.scalar(hi, v.dtype))
    return c.where(inside, v, y)


@row("hardtanh")
def hardtanh(c: Converter, n: Node, x: Node, lo: Any, hi: Any) -> Val:
    return _between(c, c.num(x, n.val.dtype), lo, hi)


@row("relu6")
def relu6(c: Converter, n: Node, x: Node) -> Val:
    return _between(c, c.num(x, n.val.dtype), 0, 6)


@row("hardsigmoid", "hardswish")
def hardsigmoid(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, wide_of(n.val.dtype))
    six = _between(c, c.op2("Add", v, c.scalar(3, v.dtype)), 0, 6)
    if v.dtype == torch.float64 and "hardsigmoid" in str(n.target):  # torch's slope is the float 1 / 6 there, too
        y = c.op2("Div", c.stop(six), c.scalar(6, v.dtype))
        path = c.op2("Mul", six, c.scalar(float(torch.tensor(1 / 6, dtype=torch.float32, device="cpu")), v.dtype))
        return c.b.op("StraightThrough", [y, path], y.dtype, y.shape, "ortmodule")
    y = six if "hardsigmoid" in str(n.target) else c.op2("Mul", v, six)
    return c.cast(c.op2("Div", y, c.scalar(6, v.dtype)), n.val.dtype)


@row("leaky_relu")
def leaky_relu(c: Converter, n: Node, x: Node, slope: Any) -> Val:
    return c.un("LeakyRelu", c.num(x, n.val.dtype), alpha=float(slope))


@row("prelu")
def prelu(c: Converter, n: Node, x: Node, w: Node) -> Val:
    v, slope = c.num(x, n.val.dtype), c.num(w, n.val.dtype)
    if slope.rank and slope.shape != (1,):
        slope = c.reshape(slope, (*slope.shape, *[1] * (v.rank - 2)))
    else:
        slope = c.reshape(slope, ())
    return c.where(c.compare("Greater", v, c.scalar(0, v.dtype)), v, c.op2("Mul", v, slope))


@row("elu", "selu", "celu")
def elu(c: Converter, n: Node, x: Node, *args: Any) -> Val:
    """Beyond plain Elu: exp only where it is used; its gradient would overflow elsewhere and 0 * inf is NaN."""
    v = c.num(x, n.val.dtype)
    name = n.target._schema.name
    if name == "aten::elu" and args[1] == 1 and args[2] == 1:
        return c.un("Elu", v, alpha=float(args[0]))
    if v.dtype in _LOW:
        raise NotHere("exponential unit in low precision")
    if name == "aten::selu":
        alpha, scale, inner = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0
    elif name == "aten::celu":
        alpha, scale, inner = args[0], 1.0, 1.0 / args[0]
    else:
        alpha, scale, inner = args
    zero = c.scalar(0, v.dtype)
    above = c.compare("Greater", v, zero)
    low = c.where(above, zero, v)
    low = low if inner == 1 else c.op2("Mul", low, c.scalar(inner, v.dtype))
    soft = c.op2("Mul", c.b.op("Expm1", [low], low.dtype, low.shape, "ortmodule"), c.scalar(alpha * scale, v.dtype))
    high = v if scale == 1 else c.op2("Mul", v, c.scalar(scale, v.dtype))
    return c.where(above, high, soft)


@row("mish")
def mish(c: Converter, n: Node, x: Node) -> Val:
    v = c.num(x, n.val.dtype)
    return c.op2("Mul", v, c.un("Tanh", c.un("Softplus", v)))


@row("glu")
def glu(c: Converter, n: Node, x: Node, dim: int) -> Val:
    v = c.num(x, n.val.dtype)
    dim %= v.rank
    half = shape_of(n.val)[dim]
    a, b = c.b.ops("Split", [v, c.b.dims([half, half])], [(v.dtype, shape_of(n.val))] * 2, axis=dim)
    return c.op2("Mul", a, c.un("Sigmoid", b))


# --- truth ----------------------------------------------------------------------------------------


def _common(c: Converter, x: Any, y: Any) -> torch.dtype:
    """The type in which torch compares."""
    a, b = (v.val if isinstance(v, Node) else v for v in (x, y))
    b = float(b) if isinstance(b, torch.SymFloat) else 1 if isinstance(b, torch.SymInt) else b
    return torch.result_type(a, b)


def _comparison(onnx_op: str, negate: bool = False) -> Any:
    def f(c: Converter, n: Node, x: Any, y: Any) -> Val:
        dtype = _common(c, x, y)
        if dtype == BOOL and onnx_op != "Equal":
            dtype = torch.int32
        out = c.compare(onnx_op, c.num(x, dtype), c.num(y, dtype))
        return c.un("Not", out) if negate else out

    return f


for _name, _op in {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}.items():
    row(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_op))
row("ne.Tensor", "ne.Scalar")(_comparison("Equal", negate=True))


def _logical(bool_op: str, int_op: str | None) -> Any:
    def f(c: Converter, n: Node, x: Any, y: Any) -> Val:
        if n.val.dtype == BOOL:
            return c.op2(bool_op, _truth(c, x), _truth(c, y))
        if int_op is None:
            raise NotHere("logical operation with a result that is not boolean")
        return c.op2(int_op, c.num(x, n.val.dtype), c.num(y, n.val.dtype))

    return f


def _truth(c: Converter, x: Any) -> Val:
    return c.num(x, BOOL) if isinstance(x, Node) else c.b.constant(bool(x), BOOL)


for _name, _op in {"and": "And", "or": "Or", "xor": "Xor"}.items():
    row(f"__{_name}__.Tensor", f"__{_name}__.Scalar", f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar")(
        _logical(_op, f"Bitwise{_op}")
    )
    row(f"logical_{_name}")(_logical(_op, None))


@row("logical_not")
def logical_not(c: Converter, n: Node, x: Node) -> Val:
    return c.un("Not", _truth(c, x))


@row("bitwise_not")
def bitwise_not(c: Converter, n: Node, x: Node) -> Val:
    v = c.v(x)
    return c.un("Not", v) if v.dtype == BOOL else c.un("BitwiseNot", v)


def test(c: Converter, op: str, v: Val) -> Val:
    return c.b.op(op, [v], BOOL, v.shape) if v.dtype.is_floating_point else c.fill(False, BOOL, v.shape)


@row("isnan")
def isnan(c: Converter, n: Node, x: Node) -> Val:
    return test(c, "IsNaN", c.v(x))


@row("isinf")
def isinf(c: Converter, n: Node, x: Node) -> Val:
    return test(c, "IsInf", c.v(x))


@row("isfinite")
def isfinite(c: Converter, n: Node, x: Node) -> Val:
    return c.un("Not", c.op2("Or", test(c, "IsNaN", c.v(x)), test(c, "IsInf", c.v(x))))


@row("nan_to_num")
def nan_to_num(c: Converter, n: Node, x: Node, nan: Any, pos: Any, neg: Any) -> Val:
    v = c.v(x)
    if not v.dtype.is_floating_point:
        return v
    big = torch.finfo(v.dtype)
    out = c.where(test(c, "IsNaN", v), c.scalar(nan or 0.0, v.dtype), v)
    inf = c.scalar(math.inf, v.dtype)
    out = c.where(c.compare("Equal", v, inf), c.scalar(big.max if pos is None else pos, v.dtype), out)
    return c.where(
        c.compare("Equal", v, c.scalar(-math.inf, v.dtype)), c.scalar(big.min if neg is None else neg, v.dtype), out
    )


@row("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(c: Converter, n: Node, cond: Node, x: Any, y: Any) -> Val:
    return c.where(c.num(cond, BOOL), c.num(x, n.val.dtype), c.num(y, n.val.dtype))


@row("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(c: Converter, n: Node, x: Node, mask: Node, value: Any) -> Val:
    return c.where(c.num(mask, BOOL), c.num(value, n.val.dtype), c.num(x, n.val.dtype))
