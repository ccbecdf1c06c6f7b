"""Programs on the fake GPU run in processes of their own: the optimizers' tests have another libcuda.so.1."""

from __future__ import annotations

import os
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
