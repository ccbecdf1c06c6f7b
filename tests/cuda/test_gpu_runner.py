"""tests/gpu on a machine without a GPU: all of it runs on the fake device, what needs torch.cuda on stand-ins
(fake_torch.py); the runner says what is missing."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_torch
import pytest
import torch

ROOT = Path(__file__).parents[2]
OF_A_GPU = {  # run, but what they find on the fake device says nothing
    "CUDA graph, FP16_Optimizer with backward": "torch's share of a graph is not replayed",
}
NO_LSTM = "could not create a primitive descriptor for the LSTM"  # eager's bf16 one, by oneDNN, on a processor without AVX-512


@pytest.fixture
def small(monkeypatch):
    """The modules of tests/gpu with little to do."""
    for folder in ("gpu", "optim", "bench"):
        monkeypatch.syspath_prepend(str(ROOT / "tests" / folder))
    import optim_bench
    import optim_correct

    monkeypatch.setattr(optim_correct, "ODD", [(3,), (1,), (0,), (257,), (5, 7), ()])
    monkeypatch.setattr(optim_correct, "RACES", [(5, 3), (4097,)])
    monkeypatch.setattr(optim_correct, "TURNS", 2)
    monkeypatch.setattr(optim_correct, "TINY", optim_correct.TINY[:60])
    monkeypatch.setattr(optim_correct, "HUGE", 50_001)
    monkeypatch.setattr(optim_correct, "model_sizes", lambda name: [(13, 5), (7,)])
    monkeypatch.setattr(optim_bench, "ROUNDS", 1)
    monkeypatch.setattr(optim_bench, "COPY", 1000)
    shapes = optim_bench.shapes_of
    monkeypatch.setattr(optim_bench, "shapes_of", lambda name: [s[:-1] + (3,) for s in shapes(name)[:4]])
    return optim_correct


def test_checks_that_need_no_torch_cuda(gpu, small, monkeypatch):
    make = small.params_of
    monkeypatch.setattr(small, "params_of", lambda *args, **kw: [gpu.put(p, 0) for p in make(*args, **kw)])
    rows = small.run("cpu", tiny=60)
    assert len(rows) > 80
    assert [r for r in rows if not r["ok"]] == []


def test_the_optimizers_parts(gpu, small, monkeypatch, tmp_path, capsys):
    import run

    monkeypatch.setattr(small, "TINY", small.TINY[:12])
    with fake_torch.install(gpu, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--part", "optim-correct", "--part", "optim-bench"])
        status = run.main()
    said = capsys.readouterr().out
    checks = json.loads((tmp_path / "optim-correct.json").read_text())["rows"]
    failed = {r["check"]: r["detail"] for r in checks if not r["ok"]}
    assert set(failed) <= set(OF_A_GPU) and status == int(bool(failed)), failed
    assert not any(".py:" in detail for detail in failed.values()), failed  # a check that raised
    bench = list(csv.DictReader(open(tmp_path / "optim-bench.csv")))
    assert {r["list"] for r in bench} == {"gpt2", "bert-large", "3000 small", "1 M each", "2 M each", "4 M each", "8 M each", "31 M each"}
    assert all(float(r["ms"]) > 0 for r in bench) and said.count("target") == 3 and "optim-correct: " in said
    with fake_torch.install(gpu, monkeypatch):
        ran = []
        monkeypatch.setattr(run, "run_part", lambda part, *_: ran.append(part) or [])
        (tmp_path / "optim-bench.json").unlink()
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
        assert run.main() == status and ran == ["optim-bench"]
    assert f"optim-correct: {len(checks)} rows, {len(failed)} failed, from " in capsys.readouterr().out


GRAPH = """
import json, sys, torch
import graph_correct, graph_bench, graph_train
from cuda import fake
fake.late(False)
graph_correct.stand_in()
rows = []
graph_correct.MODELS = {}  # test_models_on_fake.py
rows += graph_correct.run("cpu")
graph_train.MODELS = {name: graph_train.MODELS[name] for name in ("hourglass", "LSTM")}  # the others' kernels have tests of their own
rows += graph_train.run("cpu")
rows += graph_correct.operators("cpu", ["tests/ops/test_softmax.py"])
rows += graph_correct.operators("cpu", ["tests/ops/none.py"])
from bench_models import Case
bench = graph_bench.cases()
assert len(bench) >= 6
graph_bench.cases = lambda: {"tiny": Case(lambda: graph_correct.gpt2(0.1)[0], lambda: graph_correct.gpt2(0.1)[1](0)),
                             "broken": Case(lambda: 1 / 0, None)}
times = graph_bench.run("cpu", steps=2, arms=("eager", "ortmodule"))
print(json.dumps([rows, times]))
"""


def test_the_runner_finds_its_modules():
    """Without PYTHONPATH, as make gpu-check starts it."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests/gpu')!r}); import run; run.look_around(); import graph_train, graph_bench, optim_bench, optim_correct"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/", check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_the_graph_engines_parts():
    """graph-correct, graph-train, graph-ops and graph-bench with CPU tensors that stand for cuda:0."""
    tests = ROOT / "tests"
    path = ":".join(map(str, (tests, ROOT, tests / "gpu", tests / "bench", tests / "optim", ROOT / "examples")))
    run = subprocess.run([sys.executable, "-c", GRAPH], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OM_FAKE_PROGRAMS": "1", "OM_FAKE_SOURCE": str(ROOT)})
    assert run.returncode == 0, run.stderr[-4000:]
    rows, times = json.loads(run.stdout.splitlines()[-1])
    *checked, operators, nothing = rows
    assert len(checked) >= 22 and [r for r in checked if not r["ok"] and NO_LSTM not in r["detail"]] == []
    assert operators["ok"] and int(operators["detail"].split()[0]) > 10 and not nothing["ok"]
    assert [(r["model"], r["arm"], "ms" in r) for r in times[:2]] == [("tiny", "eager", True), ("tiny", "ortmodule", True)]
    assert all(r["verdict"].startswith("FAILED: ZeroDivisionError") for r in times if r["model"] == "broken")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence():
    run = subprocess.run([sys.executable, str(ROOT / "tests/gpu/run.py")], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("gpu-check: an NVIDIA GPU is needed") and run.stderr.count("\n") == 1
    run = subprocess.run([sys.executable, str(ROOT / "tests/gpu/run.py"), "--wheel", "none.whl"], capture_output=True, text=True)
    assert run.returncode == 2 and "there is no wheel none.whl" in run.stderr and run.stderr.count("\n") == 1
