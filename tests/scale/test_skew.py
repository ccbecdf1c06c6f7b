"""Ranks capture each for itself (docs/DISTRIBUTED.md): how far apart their first steps end, the order of DDP's buckets
and how much of backward they overlap, beside eager; a capture near the others' time-out says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ranks import ROOT, launch

sys.path.insert(0, str(ROOT / "tests/bench"))
from bench_ranks import run  # noqa: E402

pytestmark = pytest.mark.slow
LAYERS = 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_first_steps_and_overlap(ranks: int, tmp_path: Path) -> None:
    """Skew of the first forwards: less than a second, or, where ranks share cores with others, than half of the longest. Overlap: what is left of backward when the first bucket is ready."""
    told = run(tmp_path, ranks, "--layers", LAYERS, "--width", 256, "--steps", 8, "--segment-mb", 1)
    eager, ours = told["eager"], told["ortmodule"]
    assert ours["skew"][0][0] < max(1.0, ours["first"] / 2), (ours["skew"], ours["first"])
    assert eager["same"] and ours["same"] and len(ours["names"]) >= 4
    # every parameter once, the last layers' first, as in eager
    order = [[layer_of(names) for names in arm["names"]] for arm in (eager, ours)]
    assert sorted(sum(eager["names"], [])) == sorted(sum(ours["names"], []))
    assert order[1] == sorted(order[1], reverse=True), order
    for theirs, mine in zip(eager["ready"], ours["ready"], strict=True):
        assert 1 - mine[0] > 0.8 * (1 - theirs[0]), (theirs, mine)
        assert mine == sorted(mine)


def layer_of(names: list[str]) -> float:
    """The mean layer of a bucket's parameters."""
    at = {"tokens": -1, "places": -1, "norm": LAYERS, "head": LAYERS}
    layers = [at.get(parts[0], int(parts[1]) if parts[0] == "blocks" else 0) for parts in (n.split(".") for n in names)]
    return sum(layers) / len(layers)


LATE = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from ortmodule import ORTModule
dist.init_process_group("gloo", timeout=timedelta(seconds=12))

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
    def forward(self, x):
        if dist.get_rank() and torch.compiler.is_exporting.__code__.co_name == "_is_exporting":  # while it is captured
            time.sleep(7)
        return self.a(x)

said = []
inner = sys.stderr.write
sys.stderr.write = lambda text: said.append(text) or inner(text)
model = nn.parallel.DistributedDataParallel(ORTModule(Slow()))
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
late = [text for text in said if "still; ranks that wait for this one fail at their time-out, 12.0 s" in text]
assert len(late) == dist.get_rank(), said
print("done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_capture_near_the_time_out_says_so() -> None:
    launch(LATE)
