"""Products of bf16 by the engine's own kernels, called directly: sizes, strides, alpha, beta, bias, products cut along k.

Judged by the product in fp64, rounded once: half a unit in the last place of the result and what fp32 sums may lose. On
a processor with AVX512_BF16 this is the kernel of pairs; the same tests then run again without it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from gemm_call import packs, product

import engine

BF16 = torch.bfloat16


def numbers(rows: int, cols: int, layout: str, seed: int) -> torch.Tensor:
    """bf16 numbers: rows contiguous, columns contiguous, or neither."""
    g = torch.Generator().manual_seed(seed)
    if layout == "rows":
        return torch.randn(rows, cols, generator=g).to(BF16)
    if layout == "columns":
        return torch.randn(cols, rows, generator=g).to(BF16).t()
    return torch.randn(2 * rows, 3 * cols, generator=g).to(BF16)[::2, 1::3]


def check(m: int, k: int, n: int, la: str = "rows", lb: str = "rows", lc: str = "rows", alpha: float = 1.0, beta: int = 0, bias: bool = False) -> torch.Tensor:
    a, b, c = numbers(m, k, la, 1), numbers(k, n, lb, 2), numbers(m, n, lc, 3)
    add = numbers(1, n, "rows", 4)[0] if bias else None
    exact, size = alpha * (a.double() @ b.double()), abs(alpha) * (a.double().abs() @ b.double().abs())
    if add is not None:
        exact, size = exact + add.double(), size + add.double().abs()
    if beta:
        exact, size = exact + c.double(), size + c.double().abs()
    hull = c.untyped_storage()
    before = torch.frombuffer(bytearray(bytes(hull)), dtype=torch.int16).clone()
    got = c
    product(engine.Ctx(), a, b, got, alpha, beta, add)()
    err = (got.double() - exact).abs()
    assert (err <= 2.0**-8 * 1.01 * exact.abs() + 2.0**-22 * size + 1e-37).all(), (err / exact.abs().clamp_min(1e-30)).max()
    if lc == "gaps":  # nothing but C was written
        after = torch.frombuffer(bytearray(bytes(hull)), dtype=torch.int16)
        inside = torch.zeros(len(after), dtype=torch.bool)
        inside.as_strided(c.shape, c.stride(), c.storage_offset()).fill_(True)
        assert torch.equal(before[~inside], after[~inside])
    return got


@pytest.mark.parametrize("layout", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("m,k,n", [(1, 1, 1), (13, 7, 31), (14, 32, 96), (29, 65, 97), (61, 1023, 17), (3, 129, 200), (200, 33, 3), (115, 1061, 131)])
def test_sizes_and_operands(m: int, k: int, n: int, layout: str) -> None:
    for other in ("rows", "columns", "gaps"):
        check(m, k, n, layout, other)


@pytest.mark.parametrize("layout", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("alpha,beta,bias", [(0.5, 0, False), (1.0, 1, False), (1.0, 0, True), (-2.0, 1, True)])
@pytest.mark.parametrize("m,k,n", [(31, 45, 67), (17, 2053, 35), (5, 0, 9)])
def test_what_is_added(m: int, k: int, n: int, layout: str, alpha: float, beta: int, bias: bool) -> None:
    check(m, k, n, "rows", "columns", layout, alpha, beta, bias)


@pytest.mark.parametrize("alpha,beta,bias", [(1.0, 0, False), (-0.5, 1, True)])
@pytest.mark.parametrize("m,k,n", [(519, 8209, 41), (30, 1025, 1031), (700, 17001, 33)])
def test_deep_products_wait_as_floats(m: int, k: int, n: int, alpha: float, beta: int, bias: bool) -> None:
    """Sums of a product that is cut along k are rounded once, at the end."""
    check(m, k, n, "rows", "rows", "rows", alpha, beta, bias)
    check(m, k, n, "columns", "columns", "gaps", alpha, beta, bias)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("m,k,n", [(32, 128, 512), (7, 61, 67), (1, 131, 301), (40, 2053, 200), (519, 8209, 41), (300, 515, 7), (3, 0, 130)])
def test_results_as_the_sums_are(m: int, k: int, n: int, threads: bool, dtype: torch.dtype) -> None:
    """C and bias in fp32 (om_gemm_args.wide_c), B as it is and packed before."""
    cx, exactly = engine.Ctx(threads=threads), 2.0**-21
    for la, lb, columns, alpha, beta, bias in [("rows", "columns", False, 1.0, 0, True), ("columns", "rows", False, -0.5, 1, False), ("gaps", "gaps", True, 2.0, 1, False)]:
        a, b = numbers(m, k, la, 1).to(dtype), numbers(k, n, lb, 2).to(dtype)
        add = torch.randn(n) if bias else None
        start = torch.randn(m, n)
        exact, size = alpha * (a.double() @ b.double()), abs(alpha) * (a.double().abs() @ b.double().abs())
        if add is not None:
            exact, size = exact + add.double(), size + add.double().abs()
        if beta:
            exact, size = exact + start.double(), size + start.double().abs()
        got = torch.empty(n, 2 * m)[:, ::2].t() if columns else torch.empty(m, n)
        product(cx, a, b, got.copy_(start), alpha, beta, add)()
        assert ((got.double() - exact).abs() <= exactly * size).all()
        if packs(cx, a, b, got, alpha, beta, add):
            again = start.clone()
            product(cx, a, b, again, alpha, beta, add, packed=True)()
            assert torch.equal(again, got)


@pytest.mark.parametrize("m,k,n", [(131, 1033, 257), (519, 8209, 41), (5, 211, 401)])
def test_same_bits_whatever_the_threads(m: int, k: int, n: int) -> None:
    a, b = numbers(m, k, "rows", 1), numbers(k, n, "columns", 2)
    one, two = torch.empty(m, n, dtype=BF16), torch.empty(m, n, dtype=BF16)
    product(engine.Ctx(threads=False), a, b, one)()
    product(engine.Ctx(threads=True), a, b, two)()
    assert torch.equal(one, two)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    a, b = numbers(31, 77, "rows", 1), numbers(77, 45, "columns", 2)
    a[3, 76], b[5, 44], a[30, 0] = float("nan"), float("inf"), float("-inf")
    c = torch.empty(31, 45, dtype=BF16)
    product(engine.Ctx(), a, b, c)()
    want = a.double() @ b.double()
    assert torch.equal(c.isnan(), want.isnan()) and torch.equal(c.isinf(), want.isinf())
    assert torch.equal(c[c.isinf()].double(), want[want.isinf()])


@pytest.mark.skipif(not engine.lib.om_isa_bf16() & 1, reason="the processor has no AVX512_BF16: all of the above ran without it")
def test_without_the_instruction() -> None:
    env = {**os.environ, "ORTMODULE_ISA": "avx512", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", "not instruction"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
