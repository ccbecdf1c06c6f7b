"""The beginning of scripts that run DeepSpeed's engine on two gloo ranks around tiny_gpt, with ORTModule and without."""

from __future__ import annotations

from ranks import python_with

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
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}, **more}
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
        found.append(total.item() / dist.get_world_size())
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


def python() -> str:
    return python_with("deepspeed", "0.19.8")
