"""Programs on the fake GPU run in processes of their own: the optimizers' tests have another libcuda.so.1."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import forked
import pytest

from ortmodule import _C

TESTS = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}:{TESTS / 'gpu'}"}
BUILT = all((TESTS.parent / "build/fake" / name).exists() for name in ("libcuda.so.1", "libcublasLt.so.13"))
on_fake = pytest.mark.skipif(not _C.cuda_archs() or not BUILT, reason="built without CUDA kernels, or `make lib` has not run")


def child(source: str, **env: str) -> str:
    """What a Python of its own prints."""
    res = forked.run(source, env=ENV | env, cwd=TESTS.parent, timeout=900)
    assert res.returncode == 0, res.stdout + res.stderr[-4000:]
    return res.stdout


def compiled(source: str, folder: Path, *flags: str) -> str:
    """The program of a C++ file of tests/cuda, which reads the engine's headers."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or pytest.skip("no C++ compiler")
    out = str(folder / Path(source).stem)
    subprocess.run([compiler, "-std=c++17", "-O1", "-w", *flags, f"-I{TESTS.parent / 'csrc'}", "-o", out, str(TESTS / "cuda" / source)], check=True)
    return out
