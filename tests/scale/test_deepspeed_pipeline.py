"""DeepSpeed's PipelineModule with stages that run in the engine (ORTPipelineModule), gloo ranks: losses of the same
pipeline without it, training and evaluation, its files of layers."""

from __future__ import annotations

import pytest
from ranks import launch, python_with

pytestmark = pytest.mark.slow

START = """
import os, sys, zlib
os.environ["DS_ACCELERATOR"] = "cpu"
import torch, deepspeed, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tiny_gpt import LENGTH, VOCABULARY, Block
from ortmodule import ORTModule
import ortmodule.compat  # serves the name
from onnxruntime.training.ortmodule.experimental.pipe import ORTPipelineModule
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile a kernel for minutes
deepspeed.init_distributed("gloo", verbose=False)

class Tokens(nn.Embedding):
    pass

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, VOCABULARY)
    def forward(self, x):
        return self.head(self.norm(x))

def unembed(tokens, x):
    return F.linear(x, tokens.weight)

def specs(kind):
    blocks = [LayerSpec(Block, 64, 4) for _ in range(4)]
    if kind == "tied":  # and a layer that is no module
        return [TiedLayerSpec("tokens", Tokens, VOCABULARY, 64), *blocks, lambda x: x / 8, TiedLayerSpec("tokens", Tokens, VOCABULARY, 64, forward_fn=unembed)]
    return [LayerSpec(Tokens, VOCABULARY, 64), *blocks, LayerSpec(Head)]

def loss_fn(out, y):
    return F.cross_entropy(out.flatten(0, 1).float(), y.flatten())

def start(how, kind):
    layers, module = specs(kind), ORTPipelineModule if how == "ours" else PipelineModule
    if how == "layers":
        layers = [ORTModule(layer.build()) for layer in layers]
    module = module(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform", seed_layers=kind == "seeded")
    for name, p in module.named_parameters():  # whoever has built the layer, and after whichever
        nn.init.normal_(p, 0, 0.05, torch.Generator().manual_seed(zlib.crc32(name.encode())))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": int(kind not in ("tied", "zero0"))}, "bf16": {"enabled": kind == "bf16"}}
    if kind == "checkpointed":
        config["pipeline"] = {"activation_checkpoint_interval": 2, "use_reentrant": False}
    return deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters(), 1e-3), config=config)[0], module, layers

def batches(engine, skip=0):
    g = torch.Generator().manual_seed(engine.grid.get_data_parallel_id())
    for i in range(1000):
        x = torch.randint(0, VOCABULARY, (2, LENGTH), generator=g)
        if i >= skip:
            yield x, x.roll(-1, 1)

def losses(engine, data):
    return [engine.train_batch(data).item() for _ in range(3)] + [engine.eval_batch(data).item(), engine.train_batch(data).item()]

def near(ours, theirs, kind):
    assert all(abs(a - b) <= (2e-4 if kind == "bf16" else 1e-6) * abs(b) for a, b in zip(ours, theirs, strict=True)), (kind, ours, theirs)

def end():
    dist.barrier()
    print("done", flush=True)
    os._exit(0)  # DeepSpeed's threads may outlive the process group
"""

RUNS = """
for kind in sys.argv[1].split(","):
    found = {}
    for how in ("eager", "ours") + (("layers",) if kind == "zero1" else ()):
        engine, module, layers = start(how, kind)
        found[how] = losses(engine, batches(engine))
        if how == "ours":
            reports = module.report()
            assert reports and all(r.node_share == 1 and not r.eager for r in reports), reports
            assert (len(reports) == 1) == (kind != "seeded"), len(reports)
            assert kind != "checkpointed" or "2 computed again" in reports[0].graphs[0].checkpoints, reports[0]
            assert sorted(k for k, _ in module.named_parameters()) == names
        names = sorted(k for k, _ in module.named_parameters())
    near(found["ours"], found["eager"], kind)
    if "layers" in found:
        near(found["layers"], found["eager"], kind)
end()
"""

FILES = """
engine, module, _ = start("ours", "zero1")
data = batches(engine)
losses(engine, data)
engine.save_checkpoint(sys.argv[1], tag="five")
theirs = losses(engine, data)
for how in ("ours", "eager"):
    engine, module, _ = start(how, "zero1")
    assert engine.load_checkpoint(sys.argv[1], tag="five")[0]
    again = losses(engine, batches(engine, 20))
    near(again, theirs, "zero1")
    assert how == "eager" or again == theirs
end()
"""


def python() -> str:
    return python_with("deepspeed", "0.19.8")


@pytest.mark.parametrize(("kinds", "ranks"), [("zero1,bf16,seeded,checkpointed", 2), ("tied", 2), ("zero0", 4)])
def test_stages(kinds: str, ranks: int) -> None:
    """On four ranks two pipelines of two stages."""
    launch(START + RUNS, kinds, ranks=ranks, python=python())


def test_files_of_layers(tmp_path: object) -> None:
    """Saved by stages in the engine, resumed to the bit, and by a plain PipelineModule."""
    launch(START + FILES, tmp_path, python=python())
