"""ORTModuleCallback on two gloo ranks: Lightning's strategies with losses of the same training without it; checkpoints
of the plain module; what is refused."""

from __future__ import annotations

import pytest
from ranks import launch, python_with

pytestmark = pytest.mark.slow

START = """
import os, sys, warnings, logging
import torch
from torch import nn
import lightning
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from tiny_gpt import batch, build
from ortmodule import ORTModule
from ortmodule.lightning import ORTModuleCallback
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Lit(lightning.LightningModule):
    def __init__(self, late=False):
        super().__init__()
        self.late, self.found = late, []
        self.net = None if late else build()
        self.same = self.net
    def configure_model(self):
        if self.net is None:
            self.net = self.same = build()
            if self.late == "sharded":
                from torch.distributed.fsdp import fully_shard
                for block in self.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
    def training_step(self, ids, _):
        loss = (self.net(ids) + self.same(ids)) / 2
        self.found.append(loss.item())
        return loss
    def validation_step(self, ids, _):
        self.found.append(self.net(ids).item())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

def rows(n):
    g = torch.Generator().manual_seed(1)
    return [r for _ in range(n // 4) for r in batch(g)]

def train(ours, late=False, resume=None, steps=6, devices=2, **more):
    lit, callback = Lit(late), ORTModuleCallback()
    # ModelParallelStrategy does not clip by norm
    trainer = lightning.Trainer(accelerator="cpu", devices=devices, max_steps=steps, accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, val_check_interval=4, limit_val_batches=1,
        gradient_clip_val=None if late == "sharded" else 0.5, callbacks=[callback] if ours else [], **more)
    loader = torch.utils.data.DataLoader(rows(96), batch_size=4)
    trainer.fit(lit, loader, torch.utils.data.DataLoader(rows(16), batch_size=4), ckpt_path=resume)
    if ours:
        reports = callback.report()
        assert reports and all(r.node_share == 1 and not r.eager for r in reports.values()), [str(r) for r in reports.values()]
        assert [*reports] == (["net"] if late != "sharded" else ["net.blocks.0", "net.blocks.1"])
        assert not any(isinstance(m, ORTModule) for m in lit.modules()) and lit.net is lit.same
    return lit, trainer

def near(ours, theirs, tolerance):
    assert len(ours) == len(theirs) > 12 and all(abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, theirs)), (ours, theirs)

def end():
    print("done", flush=True)
    os._exit(0)
"""

DDP = """
for precision, late, tolerance in (("32-true", False, 1e-6), ("bf16-mixed", False, 2e-3), ("32-true", "built", 1e-6)):
    theirs, _ = train(False, late, strategy="ddp", precision=precision)
    ours, trainer = train(True, late, strategy="ddp", precision=precision)
    near(ours.found, theirs.found, tolerance)
# its checkpoint has the plain module's names, and goes on without the callback
path = sys.argv[1] + "/six.ckpt"
trainer.save_checkpoint(path)
trainer.strategy.barrier()
assert {*torch.load(path, weights_only=False)["state_dict"]} == {*theirs.state_dict()}
with_, _ = train(True, "built", path, 10, strategy="ddp")
without, _ = train(False, "built", path, 10, strategy="ddp")
assert len(with_.found) < 13
near(with_.found * 2, without.found * 2, 1e-6)
end()
"""

SHARDED = """
theirs, _ = train(False, "sharded", strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
ours, _ = train(True, "sharded", strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
near(ours.found, theirs.found, 1e-6)
end()
"""

REFUSED = """
from types import SimpleNamespace
def refused(error, words, call):
    try:
        call()
    except error as e:
        assert words in str(e), e
    else:
        raise AssertionError(words)
# Lightning has FSDP1 for GPUs alone
refused(RuntimeError, "ModelParallelStrategy", lambda: ORTModuleCallback().setup(SimpleNamespace(strategy=FSDPStrategy()), Lit(), "fit"))
class Empty(Lit):
    def __init__(self):
        super().__init__()
        del self.net, self.same
        self.weight = nn.Parameter(torch.ones(3))
    configure_model = lightning.LightningModule.configure_model
trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                            callbacks=[ORTModuleCallback()], max_steps=1)
refused(ValueError, "name them", lambda: trainer.fit(Empty(), torch.utils.data.DataLoader(rows(8), batch_size=4)))
# DeepSpeed's stage 3 gathers by block
deepspeed = SimpleNamespace(config={"zero_optimization": {"stage": 3}})
callback, lit = ORTModuleCallback(), Lit()
callback.setup(SimpleNamespace(strategy=deepspeed), lit, "fit")
assert [k for k, m in lit.named_modules() if isinstance(m, ORTModule)] == ["net.blocks.0", "net.blocks.1"]
callback.on_exception(None, lit, ValueError())
assert not any(isinstance(m, ORTModule) for m in lit.modules())
end()
"""


def python() -> str:
    return python_with("lightning", "2.6.6")


def test_ddp_and_checkpoints(tmp_path: object) -> None:
    """Accumulation, clipping, validation between steps; a network that configure_model builds."""
    launch(START + DDP, tmp_path, python=python())


def test_sharded_by_fully_shard() -> None:
    launch(START + SHARDED, python=python())


def test_what_is_refused() -> None:
    launch(START + REFUSED, ranks=1, python=python())
