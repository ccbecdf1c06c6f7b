"""tests/gpu on a machine without a GPU: its checks that need no torch.cuda run here on the fake device; the runner says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_checks_that_need_no_torch_cuda(gpu, monkeypatch):
    for folder in ("gpu", "optim", "bench"):
        monkeypatch.syspath_prepend(str(ROOT / "tests" / folder))
    import optim_correct

    monkeypatch.setattr(optim_correct, "ODD", [(3,), (1,), (0,), (257,), (5, 7), ()])
    make = optim_correct.params_of
    monkeypatch.setattr(optim_correct, "params_of", lambda *args, **kw: [gpu.put(p, 0) for p in make(*args, **kw)])
    rows = optim_correct.run("cpu", tiny=60)
    assert len(rows) > 80
    assert [r for r in rows if not r["ok"]] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence():
    run = subprocess.run([sys.executable, str(ROOT / "tests/gpu/run.py")], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("gpu-check: an NVIDIA GPU is needed") and run.stderr.count("\n") == 1
    run = subprocess.run([sys.executable, str(ROOT / "tests/gpu/run.py"), "--wheel", "none.whl"], capture_output=True, text=True)
    assert run.returncode == 2 and "there is no wheel none.whl" in run.stderr and run.stderr.count("\n") == 1
