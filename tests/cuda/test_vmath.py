"""sigmoid, silu, tanh, gelu and their gradients as a GPU computes them (csrc/cpu/kernels/vmath.h), by the host with a GPU's powers of two and reciprocals as
far off as its manual allows (vmath_check.cpp), beside the CPU's functions."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

from cuda.children import compiled


def said(folder: Path, *flags: str) -> dict[str, tuple[list[float], list[float]]]:
    """Of each function the largest errors in ulp, range by range, and what it makes of special values."""
    out = compiled("vmath_check.cpp", folder, "-ffp-contract=off", *flags)
    lines = [line.split() for line in subprocess.run([out], capture_output=True, text=True, check=True).stdout.splitlines()]
    return {name: ([float(x) for x in rest[: rest.index("|")]], [float(x) for x in rest[rest.index("|") + 1 :]]) for name, *rest in lines}


def test_functions_of_a_gpu(tmp_path: Path) -> None:
    """From -1 on within 6.5 ulp. Below it (where the CPU's gelu is hundreds of ulp off, as torch's is) not much worse than the CPU's; infinities, NaN and zeros as there."""
    gpu, cpu = said(tmp_path), said(tmp_path, "-DHOST")
    assert len(gpu) == 8 and gpu.keys() == cpu.keys()
    for name, (errors, special) in gpu.items():
        others, wanted = cpu[name]
        assert max(errors[4:]) < 6.5, (name, errors)
        assert all(a <= 1.25 * b + 10 for a, b in zip(errors, others, strict=True)), (name, errors, others)
        for a, b in zip(special, wanted, strict=True):
            same = math.isnan(b) if math.isnan(a) else a == b or abs(a - b) < 1e-34
            assert same and (math.isnan(b) or math.copysign(1, a) == math.copysign(1, b)), (name, special, wanted)
