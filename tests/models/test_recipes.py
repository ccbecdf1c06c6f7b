"""examples/recipes: one command runs each recipe, small, in both arms; phase 2 of BERT goes on where phase 1 has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(script: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "examples" / script), *options], capture_output=True, text=True, env={**ENV, **env})


@pytest.mark.parametrize(("name", "more"), [("bert-2", ()), ("gpt2", ("--limit", "1"))])
def test_one_command(name: str, more: tuple[str, ...]) -> None:
    done = run("recipes/recipes.py", name, *more, "--", "--steps", "3", "--dropout", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    (head, *lines) = done.stdout.split("\narm ")[1].splitlines()
    assert ("perplexity" in head) == (name == "gpt2")
    names = head.replace("first step s", "first_step").replace("peak MiB", "peak").replace("last loss", "loss").replace("largest batch", "batch").split()
    arms = {line.split()[0]: dict(zip(names, map(float, line.split()[1:]), strict=True)) for line in lines[:2]}
    assert list(arms) == ["eager", "ortmodule"], head
    eager, ours = arms["eager"], arms["ortmodule"]
    assert abs(eager["loss"] - ours["loss"]) < 1e-3 and eager["tokens_per_s"] > 1 and ours["peak"] > 1
    assert not more or eager["batch"] == ours["batch"] == 0  # nothing runs in 1 MiB


@pytest.mark.full
def test_torch_compile_is_a_row_or_a_sentence(tmp_path: Path) -> None:
    """Where nothing compiles for it, as here: the error that ended it in one line, and the rows of the others."""
    done = run("recipes/recipes.py", "gpt2", "--arms", "compile,eager", "--", "--steps", "1", "--length", "16", "--batch", "1", CXX="/none", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    rows = [line.split()[0] for line in done.stdout.partition("\narm ")[2].splitlines()[1:]]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("compile: ")]
    assert done.returncode == 1 and rows == ["eager"] and "InvalidCxxCompiler" in line, (done.stdout, done.stderr[-2000:])


def test_what_is_no_recipe() -> None:
    done = run("recipes/recipes.py", "bert-3")
    assert done.returncode == 2 and "one of bert-1, bert-2, gpt2, squad" in done.stderr and "Traceback" not in done.stderr


def test_the_second_phase_begins_where_the_first_has_ended(tmp_path: Path) -> None:
    tiny = ("--size", "tiny", "--text", "100000", "--dropout", "0", "--lr", "2e-2")
    first = run("bert_pretraining.py", *tiny, "--phase", "1", "--length", "16", "--batch", "16", "--steps", "40", "--save", str(tmp_path / "w.pt"))
    assert first.returncode == 0, first.stderr[-3000:]
    losses = {}
    for begin in ("", str(tmp_path / "w.pt")):
        how = ("--phase", "2", "--length", "64", "--batch", "4", "--steps", "2", *(("--begin", begin) if begin else ()))
        done = run("bert_pretraining.py", *tiny, *how)
        assert done.returncode == 0, done.stderr[-3000:]
        losses[begin] = json.loads(done.stdout.splitlines()[-1])["losses"][0]
    assert losses[str(tmp_path / "w.pt")] < losses[""] - 0.3, losses
