"""DeepSpeed's engine around ORTModule, two gloo ranks: ZeRO stages, precisions, accumulation and clipping; losses of the
same training without ORTModule.

DeepSpeed is among the requirements of the tests (pure Python, nothing is compiled here); it needs ninja in the path.
"""

from __future__ import annotations

import pytest
from ranks import launch, python_with

pytestmark = pytest.mark.slow

START = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import torch, deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tiny_gpt import batch, build
from ortmodule import ORTModule, wrap_blocks
from ortmodule.optim import AdamWMode, FusedAdam
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile a kernel for minutes
get_accelerator().is_fp16_supported = lambda: True  # a matter of speed, not of ability
deepspeed.init_distributed("gloo", verbose=False)
rank = dist.get_rank()

def start(how, stage, kind, optimizer=torch.optim.AdamW, **more):
    model = build()
    wrapped = []
    if how == "whole":
        model = ORTModule(model)
        wrapped = [model]
    elif how == "blocks":
        wrapped = [model.get_submodule(name) for name in wrap_blocks(model)]
        assert len(wrapped) == 2
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more}
    if kind != "fp32":
        config[kind] = {"enabled": True, **({"initial_scale_power": 10} if kind == "fp16" else {})}
    engine = deepspeed.initialize(model=model, optimizer=optimizer(model.parameters(), 1e-3), config=config)[0]
    return engine, wrapped

def losses(engine, steps, gen):
    found = []
    for _ in range(steps):
        loss = engine(batch(gen))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        found.append(total.item() / 2)
    return found

def data():
    return torch.Generator().manual_seed(rank)

def near(ours, theirs, kind):
    tolerance = 1e-6 if kind == "fp32" else 2e-4  # eager's own: rounding of weights and activations to 8 or 11 bits
    assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, theirs, strict=True)), (kind, ours, theirs)

def in_engine(wrapped):
    assert all(m.report().node_share == 1 and not m.report().eager for m in wrapped), [str(m.report()) for m in wrapped]

def end():
    dist.barrier()
    print("done", flush=True)
    os._exit(0)  # DeepSpeed's threads may outlive the process group
"""

STAGES = """
stage, hows = int(sys.argv[1]), sys.argv[2].split(",")
for kind in sys.argv[3].split(","):
    engine, _ = start("eager", stage, kind)
    theirs = losses(engine, 6, data())
    for how in hows:
        engine, wrapped = start(how, stage, kind)
        near(losses(engine, 6, data()), theirs, kind)
        in_engine(wrapped)
end()
"""

CLIENT = """
untested = dict(zero_allow_untested_optimizer=True)  # what DeepSpeed calls an optimizer that it does not know by name
for stage in (0, 2):
    engine, _ = start("eager", stage, "fp32", lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.01), **untested)
    theirs = losses(engine, 6, data())
    engine, wrapped = start("whole", stage, "fp32", lambda p, lr: FusedAdam(p, lr, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.01), **untested)
    near(losses(engine, 6, data()), theirs, "fp32")
end()
"""

CHECKPOINT = """
folder, stage = sys.argv[1], int(sys.argv[2])
gen = data()
engine, _ = start(sys.argv[3], stage, "bf16")
losses(engine, 4, gen)
engine.save_checkpoint(folder, tag="four")
theirs = losses(engine, 4, gen)
gen = data()
for _ in range(4):
    batch(gen)
engine, wrapped = start(sys.argv[3], stage, "bf16")
assert engine.load_checkpoint(folder, tag="four")[0]
assert losses(engine, 4, gen) == theirs
# and into the engine of a model that is not wrapped
gen = data()
for _ in range(4):
    batch(gen)
engine, _ = start("eager", stage, "bf16")
assert engine.load_checkpoint(folder, tag="four")[0]
near(losses(engine, 4, gen), theirs, "bf16")
end()
"""

WHOLE_3 = """
engine, _ = start("whole", 3, "fp32")
try:
    losses(engine, 2, data())
except RuntimeError as error:
    assert "wrap_blocks" in str(error), error
    end()
raise AssertionError("not refused")
"""


def python() -> str:
    return python_with("deepspeed", "0.19.8")


@pytest.mark.parametrize(("stage", "hows"), [(0, "whole,blocks"), (1, "whole"), (2, "whole,blocks"), (3, "blocks")])
def test_zero_stages(stage: int, hows: str) -> None:
    launch(START + STAGES, stage, hows, "fp32,bf16,fp16" if stage in (1, 2) else "fp32,bf16", python=python())


def test_our_optimizer_as_deepspeeds_client() -> None:
    launch(START + CLIENT, python=python())


@pytest.mark.parametrize(("stage", "how"), [(2, "whole"), (3, "blocks")])
def test_checkpoints(stage: int, how: str, tmp_path: object) -> None:
    launch(START + CHECKPOINT, tmp_path, stage, how, python=python())


def test_stage_3_around_a_whole_model_is_refused() -> None:
    launch(START + WHOLE_3, python=python())
