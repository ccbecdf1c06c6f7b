"""Against onnxruntime-training 1.19.2 itself: its CPU optimizer operators, loss scaler and schedules.

It does not install beside torch of today: give a separate environment's Python (`pip install
onnxruntime-training==1.19.2 onnx numpy`) in ORTMODULE_ORACLE. LambOptimizer and FusedAdam of that release need a GPU:
their formulas are checked against fp64 (test_kernels.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import engine
from ortmodule import _C
from ortmodule import optim as ours

SIZES = [(13, 17), (1,), (5,), (3, 5, 7), (20011,)]
FINITE = [1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, *[0] * 25, 1, 1, 1, *[1] * 90]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    python = os.environ.get("ORTMODULE_ORACLE")
    if not python:
        pytest.skip("set ORTMODULE_ORACLE to a Python that has onnxruntime-training 1.19.2")
    rng = np.random.default_rng(0)
    given = {f"{k}{i}": rng.standard_normal(s).astype(np.float32) for k in "pgm" for i, s in enumerate(SIZES)}
    given |= {f"v{i}": rng.random(s).astype(np.float32) for i, s in enumerate(SIZES)}
    folder = tmp_path_factory.mktemp("oracle")
    np.savez(folder / "in.npz", n=len(SIZES), finite=FINITE, **given)
    worker = Path(__file__).with_name("oracle_worker.py")
    run = subprocess.run([python, str(worker), str(folder / "in.npz"), str(folder / "out.npz")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return given, dict(np.load(folder / "out.npz"))


def lists(given, *names):
    return [[torch.from_numpy(given[f"{k}{i}"].copy()) for i in range(len(SIZES))] for k in names]


def same(got, want, tol=3e-6):
    for i, x in enumerate(got):
        w = want(i)
        assert np.abs(x.numpy() - w).max() <= tol * np.abs(w).max()


@pytest.mark.parametrize("theirs,mode", [(0, 2), (1, 1)])
def test_adamw_operator(data, theirs, mode):
    given, out = data
    p, g, m, v = lists(given, "p", "g", "m", "v")
    _C.adam_step(p, g, m, v, [torch.tensor(4.0) for _ in p], None, 0, 0, 0.013, 0.87, 0.983, 1e-3, 0.11, 1.0, mode, True)
    same(p, lambda i: out[f"adamw{theirs}_p{i}"])
    same(m, lambda i: out[f"adamw{theirs}_m{i}"])
    same(v, lambda i: out[f"adamw{theirs}_v{i}"])


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "clip", "accumulate"])
def test_the_same_file_in_both_engines(data, name, update):
    """Models with AdamWOptimizer, SGDOptimizerV2, InplaceClipGradNorm, InPlaceAccumulatorV2: the bytes onnxruntime ran,
    read here."""
    _, out = data
    key = f"{name}_{update}"
    feeds = [torch.from_numpy(out[f"feed_{key}_{k}"]) for k in out[f"feeds_{key}"]]
    got = engine.run_onnx(out[f"model_{key}"].tobytes(), feeds)[0]
    same(got, lambda i: out[f"result_{key}_{i}"])
    assert f"result_{key}_{len(got)}" not in out


def test_sgd_operator(data):
    given, out = data
    p, g = lists(given, "p", "g")
    _C.sgd_step(p, g, None, None, 0, 0, 0.013, 0.0, 0.0, 0.0, 1.0, False, True)
    same(p, lambda i: out[f"sgd_p{i}"], 1e-6)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clip_operator(data, limit):
    given, out = data
    (g,) = lists(given, "g")
    params = [torch.nn.Parameter(torch.zeros_like(x)) for x in g]
    for q, x in zip(params, g):
        q.grad = x
    ours.clip_grad_norm_(params, limit)
    same(g, lambda i: out[f"clip{limit}_g{i}"])


def test_loss_scaler(data):
    scaler = ours.DynamicLossScaler(up_scale_window=3)
    np.testing.assert_array_equal([scaler.update(bool(f)) for f in FINITE], data[1]["scaler"])


@pytest.mark.parametrize("name,kw", [("Constant", {}), ("Linear", {}), ("Cosine", {"cycles": 0.5}), ("Poly", {"power": 2.0, "lr_end": 1e-7})])
def test_schedules(data, name, kw):
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = getattr(ours, f"{name}WarmupLRScheduler")(opt, 50, warmup=0.1, **kw)
    got = []
    for _ in range(55):
        got.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    np.testing.assert_allclose(got, data[1][f"schedule_{name}"], rtol=1e-9, atol=1e-15)
