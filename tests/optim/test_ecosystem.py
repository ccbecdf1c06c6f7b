"""The optimizers inside the Hugging Face Trainer and DistributedDataParallel (each in processes of its own)."""

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

DDP = """
import sys, torch, torch.distributed as dist
from ortmodule.optim import FusedLAMB
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
alone = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
alone.load_state_dict(model.state_dict())
ddp = torch.nn.parallel.DistributedDataParallel(model)
opt, ref = FusedLAMB(ddp.parameters(), 1e-2), FusedLAMB(alone.parameters(), 1e-2)
gen = torch.Generator().manual_seed(5)
for _ in range(6):
    x, y = torch.randn(8, 7, generator=gen), torch.randn(8, 5, generator=gen)
    opt.zero_grad(), ref.zero_grad()
    ((ddp(x[rank * 4 : rank * 4 + 4]) - y[rank * 4 : rank * 4 + 4]) ** 2).mean().backward()
    ((alone(x) - y) ** 2).mean().backward()
    opt.step(), ref.step()
for p, q in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
both = [torch.zeros_like(model[0].weight) for _ in range(2)]
dist.all_gather(both, model[0].weight.detach())
assert torch.equal(*both)
dist.destroy_process_group()
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_hugging_face_trainer(tmp_path):
    pytest.importorskip("transformers")
    run = subprocess.run([sys.executable, "-c", TRAINER, str(tmp_path)], env=environment(), capture_output=True, text=True)
    assert run.returncode == 0 and "equal" in run.stdout, run.stderr[-3000:]


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    command = [sys.executable, "-c", DDP]
    file = str(tmp_path / "rendezvous")
    both = [subprocess.Popen([*command, str(r), file], env=environment(), stderr=subprocess.PIPE, text=True) for r in range(2)]
    for process in both:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
