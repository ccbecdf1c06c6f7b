"""Trainers around an ORTModule on two gloo ranks: Hugging Face's Trainer (DDP and DeepSpeed), Accelerate, and where they
are installed PEFT; losses of the same training without ORTModule, and the bits of one that was not interrupted."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from ranks import launch, python_with

pytestmark = pytest.mark.slow

START = """
import os, sys, warnings
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
import torch, torch.distributed as dist
import transformers
from ortmodule import ORTModule
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
g = torch.Generator().manual_seed(0)
rows = [{"input_ids": torch.randint(0, 61, (19,), generator=g)} for _ in range(64)]
rows = [{**row, "labels": row["input_ids"]} for row in rows]

def build(dropout):
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                                     resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return transformers.GPT2LMHeadModel(config)

def near(ours, theirs, tolerance):
    assert len(ours) == len(theirs) > 0 and all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, theirs)), (ours, theirs)

def end():
    dist.barrier()
    print("done", flush=True)
    os._exit(0)  # DeepSpeed's threads may outlive the process group
"""

TRAINER = """
class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.found = []
    def on_log(self, args, state, control, logs=None, **rest):
        self.found += [logs[k] for k in ("loss", "grad_norm", "eval_loss") if k in logs]

def train(ours, folder, dropout=0.0, resume=None, wrap=ORTModule, **more):
    model = wrap(build(dropout)) if ours else build(dropout)
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, max_steps=6, max_grad_norm=0.5,
        save_strategy="steps", save_steps=3, use_cpu=True, report_to=[], logging_steps=1, logging_strategy="steps", seed=3, disable_tqdm=True, **more,
    )
    losses = Losses()
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[losses])
    assert args.world_size == 2
    trainer.train(resume_from_checkpoint=resume)
    if ours:
        report = model.report()
        assert report.node_share == 1 and not report.eager, report
    return losses.found, torch.cat([p.detach().flatten() for p in model.parameters()])

kind = sys.argv[2]
more = {
    "fp32": {},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}},
}[kind]
if kind == "zero2":
    import deepspeed
    deepspeed.comm.torch.build_shm_op = lambda: None  # would compile a kernel for minutes
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
theirs, weights = train(False, f"{sys.argv[1]}/theirs", **more)
ours, same = train(True, f"{sys.argv[1]}/ours", **more)
near(ours, theirs, 2e-3 if kind == "bf16" else 1e-4)  # of the losses Trainer logs four digits
assert (weights - same).abs().max() <= (1e-3 if kind == "bf16" else 1e-5), (weights - same).abs().max()
if kind != "zero2":  # DeepSpeed's own checkpoints: test_deepspeed_engines.py
    whole, weights = train(True, f"{sys.argv[1]}/whole", 0.1, **more)
    dist.barrier()
    again, same = train(True, f"{sys.argv[1]}/whole", 0.1, resume=f"{sys.argv[1]}/whole/checkpoint-3", **more)
    assert torch.equal(weights, same), (weights - same).abs().max()
    assert again[-2:] == whole[-2:]
end()
"""

ACCELERATE = """
import accelerate
from accelerate.state import AcceleratorState

def start(ours, dropout, precision):
    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    assert accelerator.num_processes == 2
    model = ORTModule(build(dropout)) if ours else build(dropout)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(rows[:30], batch_size=2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=40)
    torch.manual_seed(5 + rank)
    return accelerator, *accelerator.prepare(model, opt, loader, schedule)

def epoch(accelerator, model, opt, loader, schedule):
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            opt.step(), schedule.step(), opt.zero_grad()
        found.append(accelerator.gather(loss.detach().float().reshape(1)).sum().item())
    return found

for precision in ("no", "bf16"):
    near(epoch(*start(True, 0.0, precision)), epoch(*start(False, 0.0, precision)), 1e-6 if precision == "no" else 5e-3)
    first = start(True, 0.1, precision)
    epoch(*first)
    folder = f"{sys.argv[1]}/{precision}"
    first[0].save_state(folder)
    first[0].wait_for_everyone()
    theirs = epoch(*first)
    again = start(True, 0.1, precision)
    again[0].load_state(folder)
    assert epoch(*again) == theirs
    plain = first[0].unwrap_model(first[1])
    assert isinstance(plain, transformers.GPT2LMHeadModel) and plain.report().node_share == 1
    assert {*first[0].get_state_dict(first[1])} == {*build(0.1).state_dict()}
end()
"""

LEFT_OUT = """
import logging
import accelerate
from accelerate.state import AcceleratorState
said = []
class Heard(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("ortmodule").addHandler(Heard())
lacking = lambda: [text for text in said if "Accelerate" in text]

def train(ours, **how):
    AcceleratorState._reset_state(True)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)
    accelerator = accelerate.Accelerator(**how)
    model = ORTModule(build(0.0)) if ours else build(0.0)
    model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    found = []
    for row in rows[rank * 3 : rank * 3 + 3]:
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        accelerator.backward(loss)
        opt.step(), opt.zero_grad()
        found.append(loss.item())
    plain = accelerator.unwrap_model(model)
    assert not ours or plain.report().node_share == 1
    return accelerator, found, torch.cat([p.detach().flatten() for p in plain.parameters()]).sum()

def both(**how):
    (_, theirs, same), (accelerator, found, total) = train(False, **how), train(True, **how)
    near(found + [total.item()], theirs + [same.item()], 1e-6)
    return accelerator, total

def equal(total):
    every = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(every, total)
    return all(torch.equal(t, total) for t in every)

# each process by itself: their weights differ
accelerator, total = both()
assert accelerator.num_processes == 1 and accelerator.distributed_type == "NO"
(line,) = lacking()
assert f"one of {world} processes" in line and "cpu=True" in line, line
# cpu=True: one training; nothing to be said
said.clear()
accelerator, same = both(cpu=True)
assert accelerator.num_processes == 2 and equal(same) and not equal(total) and not lacking(), said
# plugins: DDP
for how in (dict(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)), dict(deepspeed_plugin=accelerate.DeepSpeedPlugin(zero_stage=2))):
    said.clear()
    accelerator, total = both(cpu=True, **how)
    assert accelerator.distributed_type == "MULTI_CPU" and torch.equal(total, same) and equal(total)
    (line,) = lacking()
    assert ("FSDP" if "fsdp_plugin" in how else "DEEPSPEED") in line and "MULTI_CPU" in line, line
# the Trainer's fsdp
said.clear()
args = dict(per_device_train_batch_size=2, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
AcceleratorState._reset_state(True)
os.environ.pop("ACCELERATE_USE_DEEPSPEED")
trainer = transformers.Trainer(ORTModule(build(0.0)), transformers.TrainingArguments(sys.argv[1], fsdp=True, fsdp_config={"version": 2}, **args), train_dataset=rows)
trainer.train()
assert trainer.accelerator.distributed_type == "MULTI_CPU"
assert type(trainer.model_wrapped) is torch.nn.parallel.DistributedDataParallel
end()
"""

PEFT = """
import peft

def train(order):
    config = peft.LoraConfig(target_modules=["c_attn"], r=4, lora_dropout=0.0, fan_in_fan_out=True)
    model = build(0.0)
    if order == "outside":
        model = ORTModule(peft.get_peft_model(model, config))
    elif order == "inside":
        model = peft.get_peft_model(ORTModule(model), config)
    else:
        model = peft.get_peft_model(model, config)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    found = []
    for i in range(5):
        loss = model(input_ids=rows[i]["input_ids"][None], labels=rows[i]["labels"][None]).loss
        loss.backward()
        opt.step(), opt.zero_grad()
        found.append(loss.item())
    return found

theirs = train("")
near(train("outside"), theirs, 1e-6)
near(train("inside"), theirs, 1e-6)
print("done")
"""


@pytest.mark.parametrize("kind", ["fp32", "bf16", "checkpointing", "zero2"])
def test_hugging_face_trainer(kind: str, tmp_path: object) -> None:
    """Accumulation, clipping; resumed with dropout to the bit, where no hooks take part."""
    launch(START + TRAINER, tmp_path, kind, python=python_with("deepspeed" if kind == "zero2" else "transformers", "0.19.8 and 5.23.0"))


def test_accelerate(tmp_path: object) -> None:
    launch(START + ACCELERATE, tmp_path, python=python_with("accelerate", "1.15.0"))


def test_accelerate_leaves_out_what_it_was_asked_for_and_that_is_said(tmp_path: object) -> None:
    """Accelerator() without cpu=True, its plugins and the Trainer's fsdp on a CPU: single processes, or DDP, with the
    losses of the same without ORTModule."""
    launch(START + LEFT_OUT, tmp_path, python=python_with("deepspeed", "0.19.8"))


def test_accelerate_launch_on_a_cpu_is_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import accelerate\na = accelerate.Accelerator()\nprint('processes', a.num_processes, a.distributed_type.value)\n")
    python = python_with("accelerate", "1.15.0")
    command = [python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and re.findall("processes.*", done.stdout) == ["processes 1 NO"], done.stdout + done.stderr[-3000:]


def test_peft_in_both_orders() -> None:
    launch('import os\nos.environ.update(RANK="0", WORLD_SIZE="1")\n' + START + PEFT, ranks=1, python=python_with("peft", "0.21.2"))
