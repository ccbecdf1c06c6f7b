"""Schedules against the formulas, the Trainer against a written-out loop, the familiar imports in a fresh process."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortmodule import optim
from ortmodule.training import AdamConfig, LambConfig, SGDConfig, Trainer, TrainerOptions

ROOT = Path(__file__).parents[2]
T, W = 50, 0.1


def factor(name, t):
    w = W * T
    if t < w:
        return t / w
    if name == "constant":
        return 1.0
    if name == "linear":
        return max(0.0, (T - t) / (T - w))
    if name == "cosine":
        return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * 0.5 * (t - w) / (T - w))))
    lr, end = 0.3, 1e-7
    return end / lr if t > T else ((lr - end) * (1 - (t - w) / (T - w)) ** 2.0 + end) / lr


SCHEDULES = {
    "constant": lambda o: optim.ConstantWarmupLRScheduler(o, T, W),
    "linear": lambda o: optim.LinearWarmupLRScheduler(o, T, W),
    "cosine": lambda o: optim.CosineWarmupLRScheduler(o, T, warmup=W),
    "poly": lambda o: optim.PolyWarmupLRScheduler(o, T, power=2.0, warmup=W),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    p = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], 0.3)
    scheduler = SCHEDULES[name](opt)
    for t in range(T + 5):
        assert opt.param_groups[0]["lr"] == pytest.approx(0.3 * factor(name, t), rel=1e-9, abs=1e-15)
        if t == 20:
            saved = scheduler.state_dict()
        opt.step()
        scheduler.step()
    other = torch.optim.SGD([p], 0.3)
    again = SCHEDULES[name](other)
    again.load_state_dict(saved)
    other.step()
    again.step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.3 * factor(name, 21), rel=1e-9)


def test_on_device_schedule_starts_at_zero():
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = optim.LinearLRScheduler(opt, 5, 25)
    for t in range(28):
        want = t / 5 if t < 5 else max(0.0, (25 - t) / 20)
        assert opt.param_groups[0]["lr"] == pytest.approx(0.3 * want)
        opt.step()
        scheduler.step()


def test_schedule_refusals():
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    for make in (
        lambda: optim.LinearWarmupLRScheduler(opt, 0),
        lambda: optim.LinearWarmupLRScheduler(opt, 10, 1.0),
        lambda: optim.PolyWarmupLRScheduler(opt, 10, lr_end=0.5),
        lambda: optim.CosineWarmupLRScheduler(opt, 10, cycles=0),
        lambda: optim.LinearLRScheduler(opt, 10, 10),
    ):
        with pytest.raises(ValueError):
            make()


def net(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).double()


TRAINED = [
    AdamConfig(lr=1e-2, lambda_coef=0.1),
    AdamConfig(lr=1e-2, lambda_coef=0.1, weight_decay_mode=1),
    LambConfig(lr=1e-2),
    LambConfig(lr=1e-2, max_norm_clip=0.05),
    SGDConfig(lr=1e-2),
]


@pytest.mark.parametrize("config", TRAINED)
def test_trainer_is_the_loop_it_says(config):
    model, twin = net(), net()
    options = TrainerOptions(gradient_accumulation_steps=2, frozen_weights=["0.bias"], lr_scheduler=SCHEDULES["linear"])
    trainer = Trainer(model, config, torch.nn.functional.mse_loss, options)
    params = [p for n, p in twin.named_parameters() if n != "0.bias"]
    if isinstance(config, AdamConfig) and config.weight_decay_mode:
        opt = optim.FusedAdam(params, 1e-2, eps=1e-8, adam_w_mode=optim.AdamWMode.ADAMW_TRANSFORMERS, weight_decay=0.1)
    elif isinstance(config, AdamConfig):
        opt = torch.optim.AdamW(params, 1e-2, weight_decay=0.1)
    elif isinstance(config, SGDConfig):
        opt = torch.optim.SGD(params, 1e-2)
    else:
        opt = optim.FusedLAMB(params, 1e-2, False, weight_decay=0.0, use_nvlamb=True, max_grad_norm=config.max_norm_clip)
    for q in opt.param_groups:
        q["initial_lr"] = q["lr"]
    gen = torch.Generator().manual_seed(0)
    frozen = model[0].bias.detach().clone()
    for step in range(12):
        x, y = torch.randn(11, 7, generator=gen).double(), torch.randn(11, 5, generator=gen).double()
        loss = trainer.train_step(x, targets=[y])
        want = torch.nn.functional.mse_loss(twin(x), y)
        assert loss.item() == pytest.approx(want.item(), rel=1e-9)
        (want / 2).backward()
        if step % 2:
            opt.param_groups[0]["lr"] = 1e-2 * factor("linear", step // 2)
            if isinstance(config, AdamConfig):
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
            twin.zero_grad()
    assert trainer.step == 12 and trainer.optimization_step == 6
    assert torch.equal(model[0].bias.detach(), frozen)


def test_trainer_counts_finite_steps_only_and_resumes():
    def make():
        options = TrainerOptions(loss_scaler=optim.DynamicLossScaler(loss_scale=256.0))
        return Trainer(net().float().half(), AdamConfig(lr=1e-2), torch.nn.functional.mse_loss, options)

    gen = torch.Generator().manual_seed(0)
    data = [(torch.randn(11, 7, generator=gen).half(), torch.randn(11, 5, generator=gen).half()) for _ in range(6)]
    a = make()
    for i, (x, y) in enumerate(data[:3]):
        a.train_step(x * (math.inf if i == 1 else 1.0), targets=[y])
        assert a.all_finite == (i != 1)
    assert a.step == 3 and a.optimization_step == 2 and a.optimizer.loss_scale == 128.0
    buffer = io.BytesIO()
    torch.save(a.state_dict(), buffer)
    buffer.seek(0)
    b = make()
    b.load_state_dict(torch.load(buffer, weights_only=True))
    for x, y in data[3:]:
        assert a.train_step(x, targets=[y]).item() == b.train_step(x, targets=[y]).item()
    assert b.step == 6 and b.optimization_step == 5
    assert math.isfinite(a.eval_step(*data[0][:1], targets=[data[0][1]]).item())


def test_trainer_refusals():
    with pytest.raises(TypeError, match="optim_config.*'adam'.*AdamConfig"):
        Trainer(net(), "adam")
    trainer = Trainer(net(), SGDConfig(), torch.nn.functional.mse_loss)
    with pytest.raises(TypeError, match=r"targets.*\[targets\]"):  # would be unpacked along its first axis
        trainer.train_step(torch.ones(1, 7).double(), targets=torch.ones(1, 5).double())
    with pytest.raises(ValueError, match="no.such"):
        Trainer(net(), SGDConfig(), options=TrainerOptions(frozen_weights=["no.such"]))
    with pytest.raises(ValueError, match="at least 1"):
        Trainer(net(), SGDConfig(), options=TrainerOptions(gradient_accumulation_steps=0))


SCRIPT = """
import sys
assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
from onnxruntime.training.optim import FusedAdam, AdamWMode
from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer
from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel
from torch_ort import ORTModule as Same
import torch
assert Same is ORTModule and FusedAdam.__module__.startswith("ortmodule")
assert __name__ == "__main__"
p = torch.nn.Parameter(torch.ones(3))
opt = FP16_Optimizer(FusedAdam([p], lr=0.1))
opt.backward((p * p).sum())
opt.step()
try:
    from onnxruntime.training.optim import Nonsense
except ImportError as e:
    print("refused:", e)
print("trained", p[0].item() < 1)
"""


def test_familiar_imports(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-m", "ortmodule.compat", str(script), "--lr", "0.1"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "trained True" in run.stdout and "refused" in run.stdout
    code = """
import ortmodule.compat
import onnxruntime.training, torch_ort
from onnxruntime.training import ORTModule
assert ORTModule is torch_ort.ORTModule and onnxruntime.training.optim.FusedAdam is torch_ort.optim.FusedAdam
assert onnxruntime.training.optim.fp16_optimizer.FP16_Optimizer and onnxruntime.training.amp.DynamicLossScaler
assert not hasattr(onnxruntime.training, "nonsense")
"""
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
    code = "import ortmodule.compat, sys; n = len(sys.meta_path); ortmodule.compat.install(); assert len(sys.meta_path) == n; import torch_ort"
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


SPAWNING = """
import multiprocessing, sys
from onnxruntime.training.optim import FusedAdam

def child(answers):
    answers.put((FusedAdam.__module__, sys.argv[1:]))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    print("child:", *answers.get())
    process.join()
"""


def test_familiar_imports_in_spawned_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    command = [sys.executable, "-m", "ortmodule.compat", str(script), "spawn"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "child: ortmodule.optim.fused ['spawn']", run.stderr
