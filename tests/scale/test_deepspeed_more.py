"""DeepSpeed's engine around ORTModule: optimizer states on the host (offload), universal checkpoints on another number
of ranks, ZeRO's shards merged into one plain state_dict."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from ranks import free_port, launch
from zero import START, python

pytestmark = pytest.mark.slow

OFFLOAD = """
stage, how, adam = int(sys.argv[1]), sys.argv[2], sys.argv[3]
more = dict(zero=dict(offload_optimizer=dict(device="cpu"), **(dict(offload_param=dict(device="cpu")) if stage == 3 else {})))
optimizer = torch.optim.AdamW
if adam == "torch":
    more["zero_force_ds_cpu_optimizer"] = False
else:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    optimizer = lambda params, lr: DeepSpeedCPUAdam(params, lr=lr)
for kind in ("fp32", "bf16"):
    engine, _ = start("eager", stage, kind, optimizer, **{k: dict(v) if k == "zero" else v for k, v in more.items()})
    theirs = losses(engine, 6, data())
    engine, wrapped = start(how, stage, kind, optimizer, **{k: dict(v) if k == "zero" else v for k, v in more.items()})
    near(losses(engine, 6, data()), theirs, kind)
    in_engine(wrapped)
    assert engine.zero_cpu_offload() and all(p.device.type == "cpu" for p in engine.parameters())
end()
"""

UNLIKE = """
what = sys.argv[1]
class Lengths(torch.nn.Module):  # rank 1 meets another length late, so it captures when rank 0 does not
    def __init__(self):
        super().__init__()
        self.w, self.out = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)
        self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
        self.out.weight = self.w.weight
    def forward(self, ids):
        kept, x = [], self.w(ids)
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return torch.nn.functional.cross_entropy(self.out(x).flatten(0, 1), ids.flatten()), kept

def train(wrap):
    torch.manual_seed(0)
    module = Lengths()
    model = ORTModule(module) if wrap else module
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": 2, "reduce_bucket_size": 300}}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.5), config=config)[0]
    gen, found = data(), []
    for step in range(6):
        if what == "anomaly" and rank == 1:
            torch.autograd.set_detect_anomaly(step % 2 == 1)  # runs in PyTorch
        loss, kept = engine(torch.randint(11, (2, 5 if what == "length" and rank == 1 and step > 2 else 8), generator=gen))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    torch.autograd.set_detect_anomaly(False)
    return found, [p.detach().clone() for p in module.parameters()]

theirs, their_weights = train(False)
ours, weights = train(True)
near(ours, theirs, "rounding")
for a, b in zip(weights, their_weights, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
end()
"""

SAVE = """
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
import argparse, json
folder, stage, how, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
engine, _ = start(how, stage, kind)
losses(engine, 4, data())
engine.save_checkpoint(folder, tag="four")
dist.barrier()
engine.eval()
with torch.no_grad():
    loss = engine(batch(torch.Generator().manual_seed(9))).item()
engine.train()
if rank == 0:
    main(argparse.Namespace(input_folder=f"{folder}/four", output_folder=f"{folder}/four_universal", num_extract_workers=1, num_merge_workers=1,
                            keep_temp_folder=False, strict=True, inject_missing_state=stage < 3))
    # ZeRO's shards as one plain state_dict, by DeepSpeed's own tool: a model that was never wrapped loads it
    merged = get_fp32_state_dict_from_zero_checkpoint(folder, tag="four")
    plain = build()
    assert {*merged} == {*plain.state_dict()}, [*merged]
    plain.load_state_dict(merged)
    with torch.no_grad():
        near([plain(batch(torch.Generator().manual_seed(9))).item()], [loss], kind)
# batches that all ranks share: what follows does not depend on how many they are
theirs = losses(engine, 4, torch.Generator().manual_seed(7))
if rank == 0:
    json.dump(theirs, open(f"{folder}/losses.json", "w"))
end()
"""

LOAD = """
import json
folder, stage, how, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
want = json.load(open(f"{folder}/losses.json"))
for how in (how, "eager"):
    engine, wrapped = start(how, stage, kind, checkpoint={"load_universal": True})
    assert engine.load_checkpoint(folder, tag="four_universal")[0]
    near(losses(engine, 4, torch.Generator().manual_seed(7)), want, kind)
    in_engine(wrapped)
end()
"""


def compiled(name: str) -> str | None:
    roots = [os.environ.get("TORCH_EXTENSIONS_DIR"), Path.home() / ".cache/torch_extensions"]
    return next((p for r in roots if r for p in glob.glob(f"{r}/**/{name}/{name}.so", recursive=True)), None)


@pytest.mark.parametrize(("stage", "how"), [(2, "whole"), (3, "blocks")])
def test_offload(stage: int, how: str) -> None:
    """torch's AdamW on the host, which DeepSpeed has to be told (zero_force_ds_cpu_optimizer)."""
    launch(START + OFFLOAD, stage, how, "torch", python=python())


@pytest.mark.parametrize(("stage", "how"), [(2, "whole"), (3, "blocks")])
def test_offload_to_deepspeeds_own_optimizer(stage: int, how: str) -> None:
    if not compiled("cpu_adam"):
        pytest.skip("DeepSpeedCPUAdam is compiled at its first use (two minutes, ninja and g++): python -c 'from deepspeed.ops.adam import *; DeepSpeedCPUAdam([torch.ones(1)])'")
    launch(START + OFFLOAD, stage, how, "deepspeed", python=python())


@pytest.mark.parametrize("what", ["length", "anomaly"])
def test_ranks_that_run_unlike_graphs(what: str) -> None:
    """ZeRO-2 packs gradients as they arrive, so on every rank, in the engine or not, they arrive in one order."""
    launch(START + UNLIKE, what, python=python())


@pytest.mark.parametrize(("stage", "how", "kind", "ranks"), [(2, "whole", "bf16", 4), (3, "blocks", "fp32", 1)])
def test_universal_checkpoints_and_plain_weights(stage: int, how: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """Saved on two ranks; gone on with on four and on one, wrapped and not."""
    launch(START + SAVE, tmp_path, stage, how, kind, python=python())
    alone = f"import os\nos.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='{free_port()}')\n"
    launch((alone if ranks == 1 else "") + START + LOAD, tmp_path, stage, how, kind, ranks=ranks, python=python())
