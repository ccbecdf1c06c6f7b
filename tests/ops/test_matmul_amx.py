"""bf16 products on AMX tiles (csrc/cpu/kernels/gemm_amx.k.c), on every machine: build/amx.so has the tiles emulated.

One tile product is judged by Intel's text, written down again here in exact fractions; whole products by its sums in
numpy, bit for bit, and by fp64 (the tests of test_matmul_bf16.py, run again on tiles). Where there is AMX, the
processor is held to the emulation.
"""

from __future__ import annotations

import ctypes as C
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import engine

ROOT = Path(engine.ROOT)
PATH = ROOT / "build" / "amx.so"
engine.lib.om_isa_text.restype = C.c_char_p
ISAS = ["generic", "avx2", "avx512"]
ISAS = ISAS[: 1 + ISAS.index(engine.lib.om_isa_text().decode())]
SMALLEST = Fraction(2) ** -126


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def floats(b: np.ndarray) -> np.ndarray:
    return b.astype(np.uint32).view(np.float32)


# --- one tile product ------------------------------------------------------------------------------------------


def rounded(x: Fraction, negative_zero: bool) -> float:
    """To fp32, nearest even, as if exponents had no lower end; what is then below the smallest normal number is 0."""
    if x == 0:
        return -0.0 if negative_zero else 0.0
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    e -= abs(x) < Fraction(2) ** e
    unit = Fraction(2) ** (e - 23)
    x = round(x / unit) * unit  # Python's round: ties to even
    if abs(x) < SMALLEST:
        return -0.0 if x < 0 else 0.0
    return float(x) if abs(x) < Fraction(2) ** 128 else float("inf") if x > 0 else float("-inf")


def flushed(x: float) -> float:
    return float(np.copysign(0.0, x)) if abs(x) < 2.0**-126 else x


def fma(a: float, b: float, c: float) -> float:
    a, b, c = flushed(a), flushed(b), flushed(c)
    if not np.isfinite([a, b, c]).all():
        with np.errstate(invalid="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    sign = np.signbit(a) != np.signbit(b)
    return rounded(Fraction(a) * Fraction(b) + Fraction(c), bool(sign and np.signbit(c)))


def by_the_book(a: np.ndarray, b: np.ndarray, c: float) -> float:
    """One element of C: a row of 32 numbers of A, a column of 32 of B. Even and odd numbers are two chains of sums,
    which are added, and then added to C."""
    even = odd = 0.0
    for k in range(16):
        even = fma(float(a[2 * k]), float(b[2 * k]), even)
        odd = fma(float(a[2 * k + 1]), float(b[2 * k + 1]), odd)
    return fma(1.0, fma(1.0, even, odd), c)


def numbers(kind: str, rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 numbers as floats, and floats of the size of their products."""
    exponents = {"one size": (120, 131), "all": (1, 255), "tiny": (57, 68), "subnormal": (0, 66)}
    lo, hi = exponents.get(kind, (120, 131))
    sign = rng.integers(0, 2, shape) << 31
    x = floats(sign | rng.integers(lo, hi, shape) << 23 | rng.integers(0, 128, shape) << 16)
    if kind == "special":
        x[rng.random(shape) < 0.02] = rng.choice([np.inf, -np.inf, np.nan])
    e = rng.integers(*{"tiny": (0, 12), "all": (1, 255), "subnormal": (0, 3)}.get(kind, (118, 135)), size=shape)
    return x, floats(sign | e << 23 | rng.integers(0, 1 << 23, shape))


def tile_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray((bits(a) >> 16).astype(np.uint16))
    pairs = np.ascontiguousarray((bits(b) >> 16).astype(np.uint16).reshape(16, 2, 16).transpose(0, 2, 1))
    got = c.copy()
    engine.load(str(PATH)).om_tiles_emulated(*(C.c_void_p(x.ctypes.data) for x in (rows, pairs, got)))
    return got


@pytest.mark.parametrize("kind", ["one size", "all", "tiny", "subnormal", "special"])
def test_a_tile_product_is_the_manuals(kind: str) -> None:
    rng = np.random.default_rng(7)
    a, b = numbers(kind, rng, 16, 32)[0], numbers(kind, rng, 32, 16)[0]
    c = numbers(kind, rng, 16, 16)[1]
    got = tile_product(a, b, c)
    want = np.array([[by_the_book(a[m], b[:, n], float(c[m, n])) for n in range(16)] for m in range(16)], np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    there = ~np.isnan(want)
    assert np.array_equal(bits(got)[there], bits(want)[there])
    if kind == "one size":  # the order is seen: one chain gives other bits
        chain = c.copy()
        for k in range(32):
            chain = (chain + a[:, k : k + 1] * b[k]).astype(np.float32)
        assert not np.array_equal(bits(chain), bits(want))


def test_what_is_subnormal_is_so_when_rounded() -> None:
    """2^-126 less a bit: rounded with all 24 bits it stays below, is subnormal and becomes 0, though rounded to the
    spacing of subnormal numbers it would be 2^-126 again. With half of that bit it is 2^-126."""
    a, b, c = (np.zeros(s, np.float32) for s in ((16, 32), (32, 16), (16, 16)))
    a[:, 0], b[0] = 2.0**-63, 2.0**-63
    a[:, 2], b[2] = -(2.0**-75), 1.5 * 2.0**-76
    b[2, 1] = 2.0**-77
    assert [by_the_book(a[0], b[:, n], 0.0) for n in (0, 1)] == [0.0, 2.0**-126]
    assert tile_product(a, b, c)[5].tolist() == [0.0, 2.0**-126] + [0.0] * 14


# --- whole products -----------------------------------------------------------------------------------------------

CHILD = r"""
import json, sys
import torch
from gemm_call import product
import engine
lib = engine.lib
out = []
for m, k, n, ta, tb, alpha, beta, bias in json.loads(sys.argv[1]):
    g = torch.Generator().manual_seed(m * 7 + k)
    a = torch.randn(*((k, m) if ta else (m, k)), generator=g).bfloat16()
    b = torch.randn(*((n, k) if tb else (k, n)), generator=g).bfloat16()
    c = torch.randn(m, n, generator=g).bfloat16()
    add = torch.randn(n, generator=g).bfloat16() if bias else None
    c0 = c.clone()
    product(engine.Ctx(), a.t() if ta else a, b.t() if tb else b, c, alpha, beta, add)()
    out.append((a.t() if ta else a, b.t() if tb else b, c0, add, c))
torch.save(out, sys.argv[2])
"""


def run(argv: list[str], lib: Path | None = PATH, **env: str) -> str:
    env = {**os.environ, "ORTMODULE_GEMM": "own", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests"), **env}
    if lib:
        env["OM_LIB"] = str(lib)
    done = subprocess.run([sys.executable, *argv], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


CASES = [
    (16, 32, 16, 0, 0, 1.0, 0, 0),
    (33, 65, 47, 0, 1, 1.0, 0, 0),
    (1, 100, 200, 1, 0, 1.0, 1, 1),
    (70, 513, 150, 1, 1, -0.5, 1, 0),  # two slices of k
    (45, 2100, 260, 0, 0, 1.0, 0, 1),
    (530, 8300, 20, 0, 1, 1.0, 1, 0),  # cut along k, sums wait in `acc`
    (200, 40, 3, 0, 0, 1.0, 0, 0),  # C^T = B^T A^T
    (6, 0, 5, 0, 0, 1.0, 1, 1),
]


def products(path: Path, lib: Path | None = PATH, **env: str) -> list[tuple[torch.Tensor, ...]]:
    run(["-c", CHILD, json.dumps(CASES), str(path)], lib, **env)
    return torch.load(path)


def sums(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Steps of 32 along k, each as above. A product of two bf16 is a float, so `+` rounds as a fused sum does."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    wide = -(-k // 32) * 32
    x, y = np.zeros((m, wide), np.float32), np.zeros((wide, n), np.float32)
    x[:, :k], y[:k] = a.float().numpy(), b.float().numpy()
    total = np.zeros((m, n), np.float32)
    for k0 in range(0, wide, 32):
        half = [np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)]
        for i in range(32):
            half[i % 2] += x[:, k0 + i : k0 + i + 1] * y[k0 + i]
        total += half[0] + half[1]
    return total


@pytest.mark.parametrize("isa", ISAS)
def test_products_have_the_bits_of_one_chain_of_tiles(isa: str, tmp_path: Path) -> None:
    """Whatever slices, blocks, orientation."""
    for (m, k, n, *_, alpha, beta, _), (a, b, c, add, got) in zip(CASES, products(tmp_path / "p", ORTMODULE_ISA="" if isa == "avx512" else isa)):
        want = torch.from_numpy(sums(a, b)) * alpha
        if add is not None:
            want = want + add.float()
        if beta:
            want = want + c.float()
        assert torch.equal(got, want.bfloat16()), (m, k, n)


def test_products_on_tiles_hold_what_those_of_pairs_do() -> None:
    """Sizes, layouts, what is added, depth, threads, NaN and infinity, against fp64."""
    told = run(["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(Path(__file__).with_name("test_matmul_bf16.py")),
                "-k", "not instruction"])
    assert int(re.search(r"(\d+) passed", told)[1]) >= 60  # type: ignore[index]


KERNEL = "import engine, gemm_call, torch; print(gemm_call.kernel(engine.Ctx(), torch.bfloat16))"


@pytest.mark.parametrize(("isa", "forced", "tiles"), [("", "own", True), ("", "", False), ("avx512_bf16", "own", False), ("avx512", "own", False)])
def test_tiles_are_chosen_where_they_are_asked_for(isa: str, forced: str, tiles: bool) -> None:
    assert run(["-c", KERNEL], ORTMODULE_ISA=isa, ORTMODULE_GEMM=forced).startswith("om_gemm_amx") == tiles


def test_models_train_on_tiles() -> None:
    """bf16 training of whole models through the emulated kernel: errors against fp64 within twice eager's."""
    told = run(["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "amx_engine", "tests/module/test_mixed.py",
                "-k", "bf16 and not provider and (gpt2 or bert)"], None)
    assert int(re.search(r"(\d+) passed", told)[1]) >= 4  # type: ignore[index]


# --- the processor's tiles ------------------------------------------------------------------------------------------


def disassembled(function: str) -> list[str]:
    path = ROOT / "build" / "cpu" / "kernels" / "gemm_amx.avx512.o"
    if not path.exists():
        pytest.skip("built on x86_64 only")
    out = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"<{function}>:\n(.*?)\n\n", out + "\n\n", re.S)
    assert found, f"{function}: renamed? inlined?"
    return [line.split("\t", 1)[1].strip() for line in found[1].splitlines() if "\t" in line]


def loop(code: list[str], what: str) -> list[str]:
    """From the first `what` to the jump behind the last."""
    at = [i for i, text in enumerate(code) if text.startswith(what)]
    return code[at[0] : next(i for i in range(at[-1], len(code)) if code[i].startswith("j")) + 1]


def test_the_inner_loop_is_four_products_and_four_loads() -> None:
    code = disassembled("tiles_full_amx")
    body = loop(code, "tdpbf16ps")
    assert [re.findall(r"%tmm\d", text) for text in body if "tdpbf16ps" in text] == [
        ["%tmm6", "%tmm4", "%tmm0"], ["%tmm7", "%tmm4", "%tmm1"], ["%tmm6", "%tmm5", "%tmm2"], ["%tmm7", "%tmm5", "%tmm3"]]  # fmt: skip
    assert sum("tileloadd" in text for text in code) == 4 + 4 and sum("tilestored" in text for text in code) == 4
    assert not [text for text in code if re.search(r"%[xyz]mm", text)], "a vector in the loop over tiles"
    assert not [text for text in body if "(%rsp" in text or "(%rbp" in text], "something spilled in the inner loop"


def test_what_is_configured_is_released() -> None:
    code = disassembled("block")
    assert sum("ldtilecfg" in text for text in code) == sum("tilerelease" in text for text in code) == 1
    rows = [text for text in disassembled("store_rows_amx") if "%zmm" in text]
    assert rows, "sums are stored one by one"


@pytest.mark.skipif(not (ROOT / "build" / "om-tiles").exists(), reason="built on x86_64 only")
def test_the_processor_has_the_emulations_bits(tmp_path: Path) -> None:
    def told(program: str, *argv: str) -> tuple[int, str]:
        done = subprocess.run([ROOT / "build" / program, *argv], env={**os.environ, "ORTMODULE_GEMM": "own", "ORTMODULE_ISA": ""}, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    emulated = told("om-tiles-emulated", "sums")
    assert emulated[0] == 0 and emulated[1].count("\n") == 8
    status, text = told("om-tiles")
    if status == 77:
        pytest.skip("no AMX here: what the tests above say of the emulation is not known of this processor")
    assert status == 0, text
    assert told("om-tiles", "sums") == emulated
    assert run(["-c", KERNEL], None).strip() == "om_gemm_amx_avx512"
    for ours, theirs in zip(products(tmp_path / "n", None), products(tmp_path / "e")):
        assert torch.equal(ours[-1], theirs[-1])
