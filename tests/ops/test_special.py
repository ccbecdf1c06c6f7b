"""Inverse and hyperbolic functions and those around the gamma function against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(7, 11), (1,), (), (0, 3), (3, 5, 300)]


def within(shape: tuple, low: float, high: float, seed: int = 3) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * (high - low) + low


@pytest.mark.parametrize("name,low,high", [
    ("acos", -0.95, 0.95), ("asin", -0.95, 0.95), ("atan", -9, 9), ("acosh", 1.1, 9), ("atanh", -0.95, 0.95), ("tan", -1.4, 1.4),
    ("sinh", -4, 4), ("cosh", -4, 4), ("lgamma", 0.05, 30), ("lgamma", -5.9, -5.1), ("digamma", 0.05, 30), ("digamma", -5.9, -5.1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_operand(name: str, low: float, high: float, shape: tuple) -> None:
    half = () if name in ("lgamma", "digamma") and low < 0 else LOW  # torch's own error near the poles is another each time
    check(name, [within(shape, low, high)], getattr(torch, name), low=half, terms=100,
          tol=1e-9 if name == "digamma" else 1e-10)  # torch shifts its trigamma by 6 alone


@pytest.mark.parametrize("name", ["acos", "asin", "atan", "acosh", "atanh", "tan", "sinh", "cosh", "lgamma", "digamma"])
def test_edges(name: str) -> None:
    """Where the functions end: 0 of either sign, 1, beyond, the poles, infinities, NaN."""
    x = torch.tensor([0.0, -0.0, 1, -1, 2, -2, -3, 0.5, 1e-300, 1e18, 1e300, float("inf"), -float("inf"), float("nan")], dtype=torch.float64)
    check(name, [x], getattr(torch, name), grad="gamma" not in name, low=())


def test_trigamma() -> None:
    def exact(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([float(mpmath.polygamma(1, mpmath.mpf(v))) for v in x.flatten().tolist()], dtype=torch.float64).view(x.shape)

    for x in (within((5, 60), 0.05, 30), within((40,), -7.9, -7.1)):
        check("trigamma", [x], exact, grad=False, tol=1e-13, low=())


@pytest.mark.parametrize("shape", SHAPES)
def test_two_operands(shape: tuple) -> None:
    check("atan2", [rand(*shape), rand(*shape, seed=5)], torch.atan2, low=LOW, terms=100)
    check("xlogy", [rand(*shape), within(shape, 0.1, 9)], torch.xlogy, low=LOW, terms=100)


def test_edges_of_two_operands() -> None:
    n = float("nan")
    x = torch.tensor([0.0, 0, 0, 0, 0, 1, 1, 2, n, 1], dtype=torch.float64)
    y = torch.tensor([0.0, 1, -1, n, float("inf"), 0, -1, 3, 1, n], dtype=torch.float64)
    check("xlogy", [x, y], torch.xlogy, low=())
    a = torch.tensor([0.0, -0.0, 1, -1, 0, 0, 3, 0, -0.0, n, 0], dtype=torch.float64)
    check("atan2", [a, torch.tensor([1.0, -1, 0, 0, -2, 2, -4, 0, -0.0, 0, n], dtype=torch.float64)], torch.atan2, low=())


@pytest.mark.parametrize("name,point", [("lgamma", 0.3), ("lgamma", -2.4), ("digamma", 4.5), ("acos", 0.4), ("atanh", -0.7)])
def test_finite_differences(name: str, point: float) -> None:
    f: Callable = getattr(torch, name)
    text = f"graph {{\n input x: f64[1]\n y = {name}(x)\n output y\n}}"
    x, h = torch.tensor([point], dtype=torch.float64), 1e-5
    _, (g,) = engine.run(text, [x], [1], [torch.ones(1, dtype=torch.float64)])
    assert abs(g - (f(x + h) - f(x - h)) / (2 * h)).item() < 1e-8


@pytest.mark.parametrize("node,words", [("lgamma(i)", ["i64"]), ("atan2(x, y)", ["sizes 3 and 4"]), ("xlogy(x, h)", ["different types"])])
def test_refused(node: str, words: list[str]) -> None:
    text = f"graph {{\n input x: f64[3]\n input y: f64[4]\n input h: f16[3]\n input i: i64[3]\n v = {node}\n output v\n}}"
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(3), rand(4), rand(3).half(), torch.zeros(3, dtype=torch.int64)])
    assert all(w in str(e.value) for w in words), str(e.value)
