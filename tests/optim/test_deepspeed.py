"""FP16_Optimizer on the optimizers of an installed DeepSpeed, on the CPU over gloo with two ranks.

`make venv` installs DeepSpeed; else set ORTMODULE_DEEPSPEED to a Python that has it (tested with 0.19.8).
"""

from __future__ import annotations

import pytest
from ranks import launch, python_with

pytestmark = pytest.mark.slow

START = """
import math, os, sys, types, warnings
os.environ["DS_ACCELERATOR"] = "cpu"
import torch, deepspeed
from deepspeed.accelerator import get_accelerator
from ortmodule.optim import FP16_Optimizer, FusedAdam
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile a kernel for minutes
get_accelerator().is_fp16_supported = lambda: True  # a matter of speed, not of ability

def start(optimizer, stage, kind, **more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    settings = {"enabled": True, **({"initial_scale_power": 12} if kind == "fp16" else {})}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, kind: settings, "gradient_clipping": 0.01, **more}
    return deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)[:2]
"""

CURVES = """
def train(stage, kind, ours):
    engine, zero = start(lambda p: torch.optim.AdamW(p, 1e-2), stage, kind)
    assert f"{type(zero).__module__}.{type(zero).__qualname__}" == "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
    if ours:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert FP16_Optimizer(zero) is zero
        assert [str(w.message) for w in seen] == ["DeepSpeed fp16_optimizer functions are overrided with faster implementation."]
        calls = {}
        for name in ("has_overflow_serial", "has_overflow_partitioned_grads_serial", "get_grad_norm_direct"):
            def counted(self, *a, _f=getattr(zero, name), _n=name, **k):
                calls[_n] = calls.get(_n, 0) + 1
                return _f(*a, **k)
            setattr(zero, name, types.MethodType(counted, zero))
    gen = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    out = []
    for step in range(6):
        x = torch.randn(4, 8, generator=gen).to(next(engine.parameters()).dtype)
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss * (math.inf if step == 3 and kind == "fp16" else 1))
        engine.step()
        out.append((loss.item(), float(zero._global_grad_norm) if step != 3 else 0.0, bool(zero.overflow), float(zero.loss_scale)))
    return out, torch.cat([p.detach().float().flatten() for p in engine.module.parameters()]), calls if ours else None

for stage in (1, 2):
    for kind in ("bf16", "fp16"):
        a, wa, _ = train(stage, kind, False)
        b, wb, calls = train(stage, kind, True)
        assert calls.get("get_grad_norm_direct"), calls  # ours is what runs
        assert kind == "bf16" or sum(v for k, v in calls.items() if "overflow" in k), calls
        for (l1, n1, o1, s1), (l2, n2, o2, s2) in zip(a, b):
            assert abs(l1 - l2) <= 1e-3 * abs(l1) and abs(n1 - n2) <= 1e-4 * max(n1, 1e-6) and (o1, s1) == (o2, s2), (stage, kind, a, b)
        assert [o for _, _, o, _ in b] == [step == 3 and kind == "fp16" for step in range(6)], b
        torch.testing.assert_close(wa, wb, rtol=2e-3, atol=1e-4)
print("done")
"""

NAMES = """
import importlib
from ortmodule.optim import wrappers
for name in (wrappers.DEEPSPEED_ZERO[0], *wrappers.DEEPSPEED_OTHER):
    module, _, cls = name.rpartition(".")
    getattr(importlib.import_module(module), cls)
# the whitelist compares exact types: without the setting a foreign optimizer is refused, with it FusedAdam trains
try:
    start(lambda p: FusedAdam(p, 1e-2), 1, "bf16")
except AssertionError as e:
    assert "zero_allow_untested_optimizer" in str(e), e
else:
    raise SystemExit("the whitelist let FusedAdam through")
engine, zero = start(lambda p: FusedAdam(p, 1e-2), 1, "bf16", zero_allow_untested_optimizer=True)
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
Accelerator(cpu=True)
wrapped = DeepSpeedOptimizerWrapper(zero)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert FP16_Optimizer(wrapped) is wrapped
assert [str(w.message) for w in seen] == ["DeepSpeed fp16_optimizer functions are overrided with faster implementation."]
losses = []
for _ in range(5):
    loss = engine(torch.ones(4, 8, dtype=torch.bfloat16)).float().pow(2).mean()
    engine.backward(loss), engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print("done")
"""


def test_zero_1_and_2_train_as_without():
    launch(START + CURVES, python=python_with("deepspeed", "0.19.8"))


def test_class_names_and_whitelist():
    launch(START + NAMES, python=python_with("deepspeed", "0.19.8"))
