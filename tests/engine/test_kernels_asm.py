"""The inner loops of hot kernels, disassembled: full-width vector registers, no scalar arithmetic, no gather, nothing
spilled in the products.

A compiler that stops vectorising a loop gives the same results, only four to sixteen times slower: no other test would
say so.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import new_op
import pytest

import engine

BUILD = Path(engine.ROOT) / "build"
REGISTER = {"avx2": "%ymm", "avx512": "%zmm"}
HOT = {
    "gemm": ["tile_full_f32", "tile_full_f64"],
    "attention": ["product_f32", "product_flip_f32"],
    "strip": ["load_BF16", "store_BF16", "dropout_F"],
    "copy": ["convert_BF16_F32", "convert_F32_BF16", "stream_line"],
    "rows": ["softmax_f32", "log_softmax_f32", "layer_norm_f32", "layer_norm_grad_f32", "rms_norm_f32"],
    "reduce": ["row_sum_F", "row_max_F", "col_sum_F"],
    "loss": ["lse_f32", "grad_f32"],
    "optim": ["adam_core_f32", "sgd_core_f32"],
    "batch_norm": ["apply_f32", "grad_apply_f32", "square_f32"],
}
# elementwise rows that have no vector code, by class: libm's fmod; libm for f64; C's divisions and powers of integers
LIBM = ["exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "sin", "cos", "silu", "gelu", "gelu_tanh", "softplus", "asinh", "pow", "silu_grad",
        "gelu_grad", "gelu_tanh_grad"]
NO_VECTORS = {f"{name}_F" for name in ("mod", "fmod", "floor_div")} | {f"{name}_D" for name in ("mod", "fmod", "floor_div", *LIBM)}
NO_VECTORS |= {f"{name}_I" for name in ("div", "mod", "fmod", "floor_div", "pow")}
CLASSES = {"FLT": "FD", "TRIG": "FD", "NUM": "FDI", "CMP": "FDIB", "PRED": "FD", "LOG": "IB", "SEL": "FDIB"}
SCALAR = re.compile(r"v?(add|sub|mul|div|max|min|sqrt|fn?m(add|sub)\d*)s[sd]\b")


def elementwise() -> list[str]:
    """The function of every row of pointwise.def and class."""
    text = new_op.ROWS.read_text()
    found = re.findall(r"^PW\((\w+), +\d, (\w+),", text, re.M)
    names = [f"{name}_{c}" for name, rule in found for c in CLASSES.get(rule, "")]
    return [n for n in names if n not in NO_VECTORS]


@cache
def loops(path: Path) -> dict[str, list[list[str]]]:
    """Innermost loops by function (clones of one function together): instructions between a backward jump and its
    target."""
    out = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"\n(?=[0-9a-f]+ <)", out):
        head = re.match(r"\s*[0-9a-f]+ <([\w]+)[^>]*>:", part)
        if not head:
            continue
        code = [(int(m[1], 16), m[2]) for m in re.finditer(r"^\s+([0-9a-f]+):\s+(.*?)\s*$", part, re.M)]
        at = {address: i for i, (address, _) in enumerate(code)}
        spans = []
        for i, (address, text) in enumerate(code):
            jump = re.match(r"j\w+\s+([0-9a-f]+)\b", text)
            if jump and int(jump[1], 16) <= address and int(jump[1], 16) in at:
                spans.append((at[int(jump[1], 16)], i))
        inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
        bodies = [[text for _, text in code[a : b + 1]] for a, b in inner]
        # else blocks moved about
        found.setdefault(head[1], []).extend(b for b in bodies if not any(re.match(r"jmp|ret", text) for text in b))
    return found


def object_of(family: str, isa: str) -> Path:
    if platform.machine() != "x86_64":
        pytest.skip("the AVX kernels are built on x86_64 only")
    if not shutil.which("objdump"):
        pytest.skip("objdump (binutils) is not installed")
    found = list(BUILD.glob(f"[co]*/kernels/{family}.{isa}.o"))
    assert len(found) == 1, f"{family}.{isa}.o: {found or 'not built'} (make lib)"
    return found[0]


@pytest.mark.parametrize("isa", REGISTER)
@pytest.mark.parametrize("family", HOT)
def test_inner_loops_are_vectorised(family: str, isa: str) -> None:
    everything = loops(object_of(family, isa))
    assert not any("gather" in text for found in everything.values() for loop in found for text in loop), "a gather in a loop"
    wrong = []
    for name in HOT[family] + (elementwise() if family == "strip" else []):
        found = everything.get(name, [])
        if not found and isa == "avx512" and name.startswith("product"):
            continue  # inlined into its callers there: they are in the list
        if not found:
            wrong.append(f"{name}: no loop (renamed? inlined?)")
            continue
        best = max(found, key=lambda loop: sum(REGISTER[isa] in text for text in loop))
        # half, not all: statistics kept in f64 are converted half a register at a time
        wide, vector = (sum(bool(re.search(register, text)) for text in best) for register in (REGISTER[isa], "%[xyz]mm"))
        if not wide or wide < vector / 2:
            wrong.append(f"{name}: {wide} of {vector} vector instructions of its widest loop are full width:\n" + "\n".join(best))
        scalar = [text for text in best if SCALAR.match(text)]
        if scalar:
            wrong.append(f"{name}: scalar arithmetic in its widest loop: {scalar}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family,names,sums", [("gemm_bf16", ["tile_full_bf16"], 24), ("attention_bf16", ["product_f32", "product_flip_f32"], 16)])
def test_bf16_products_keep_their_tiles_in_registers(family: str, names: list[str], sums: int) -> None:
    found = loops(object_of(family, "avx512"))
    for name in names:
        best = max(found[name], key=lambda loop: sum("vdpbf16ps" in text for text in loop))
        assert sum("vdpbf16ps" in text and "%zmm" in text for text in best) >= sums, "\n".join(best)
        spilled = [text for text in best if re.search(r"%[yz]mm\d+,.*\(", text)]
        assert not spilled, spilled


def test_attention_on_tiles_has_no_vector_in_its_loop() -> None:
    found = loops(object_of("attention_amx", "avx512"))
    best = max(found["product_tiles"], key=lambda loop: sum("tdpbf16ps" in text for text in loop))
    assert sum("tdpbf16ps" in text for text in best) >= 4 and not [text for text in best if re.search("%[xyz]mm", text)]


@pytest.mark.parametrize("isa", REGISTER)
@pytest.mark.parametrize("name", HOT["gemm"])
def test_product_keeps_its_tile_in_registers(name: str, isa: str) -> None:
    found = loops(object_of("gemm", isa))[name]
    best = max(found, key=lambda loop: sum("fmadd" in text for text in loop))
    fma = sum("fmadd" in text and REGISTER[isa] in text for text in best)
    fetched = sum("prefetch" in text for text in best)  # ahead: each line of B once, a panel is a number of whole lines
    lines = sum("vmov" in text and REGISTER[isa] in text for text in best) * (32 if isa == "avx2" else 64) // 64
    assert 0 < fetched <= lines, "\n".join(best)
    assert fma >= 12 and fma >= (len(best) - fetched) / 2, "\n".join(best)
    spilled = [text for text in best if re.search(r"%[yz]mm\d+,.*\(", text) and "fmadd" not in text]
    assert not spilled, spilled
