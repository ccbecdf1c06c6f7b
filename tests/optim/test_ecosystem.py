"""The optimizers inside the Hugging Face Trainer (in a process of its own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAINER = """
import sys, torch, transformers
from ortmodule.optim import FusedAdam, LinearWarmupLRScheduler
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=1, n_head=2)
data = [{"input_ids": torch.randint(0, 61, (19,))} for _ in range(24)]
data = [{**row, "labels": row["input_ids"]} for row in data]
def run(make):
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    opt = make(model.parameters())
    args = transformers.TrainingArguments(sys.argv[1], per_device_train_batch_size=4, max_steps=8, use_cpu=True, report_to=[], max_grad_norm=0.5,
                                          logging_steps=100, save_strategy="no", seed=3, disable_tqdm=True)
    transformers.Trainer(model, args, train_dataset=data, optimizers=(opt, LinearWarmupLRScheduler(opt, 8, 0.25))).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
a = run(lambda p: FusedAdam(p, 1e-3, eps=1e-8, adam_w_mode=2, weight_decay=0.01))
b = run(lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.01))
assert (a - b).abs().max() < 2e-5, (a - b).abs().max()
print("equal")
"""

def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_hugging_face_trainer(tmp_path):
    pytest.importorskip("transformers")
    run = subprocess.run([sys.executable, "-c", TRAINER, str(tmp_path)], env=environment(), capture_output=True, text=True)
    assert run.returncode == 0 and "equal" in run.stdout, run.stderr[-3000:]
