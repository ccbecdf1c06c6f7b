"""DeepSpeed's engine around ORTModule, two gloo ranks: ZeRO stages, precisions, accumulation and clipping; losses of the
same training without ORTModule.

`make venv` installs DeepSpeed (pure Python, nothing is compiled here).
"""

from __future__ import annotations

import pytest
from ranks import launch
from zero import START, python

pytestmark = pytest.mark.slow

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

TWICE = """
import copy
from torch import nn
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(block(x))
        return x
siamese = lambda e, x: (e(x) - e(x.flip(0))).pow(2).mean()
several = lambda e, x: sum(e(x * i).pow(2).mean() for i in range(3))
for loss, threshold in ((lambda e, x: e(x).pow(2).mean(), 0), (siamese, 0), (siamese, 10**6), (several, 0)):
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Twice()
        names = wrap_blocks(model) if wrapped else []
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
                  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold}}
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        gen = data()
        for _ in range(6):
            engine.backward(loss(engine, torch.randn(4, 6, generator=gen)))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            found.append([p.detach().clone() for p in model.parameters()])
        in_engine([model.get_submodule(name) for name in names])
        assert len(names) == 2 * wrapped
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))
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


@pytest.mark.parametrize(("stage", "hows"), [(0, "whole,blocks"), (1, "whole"), (2, "whole,blocks"), (3, "blocks")])
def test_zero_stages(stage: int, hows: str) -> None:
    launch(START + STAGES, stage, hows, "fp32,bf16,fp16" if stage in (1, 2) else "fp32,bf16", python=python())


def test_our_optimizer_as_deepspeeds_client() -> None:
    launch(START + CLIENT, python=python())


@pytest.mark.parametrize(("stage", "how"), [(2, "whole"), (3, "blocks")])
def test_checkpoints(stage: int, how: str, tmp_path: object) -> None:
    launch(START + CHECKPOINT, tmp_path, stage, how, python=python())


def test_blocks_that_are_called_several_times_before_a_backward() -> None:
    launch(START + TWICE, python=python())


def test_stage_3_around_a_whole_model_is_refused() -> None:
    launch(START + WHOLE_3, python=python())
