"""DistributedDataParallel(ORTModule(model)) with four gloo processes against the same training in eager PyTorch.

Each case trains a few steps in all processes twice, eager and wrapped, on different data per rank, and compares
parameters at 1e-10. The overlap case logs when all-reduces start: with several segments the first starts before the
engine has finished its backward.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

if not dist.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

RANKS = 4
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "bucket_view_find_unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
}


class Net(nn.Module):
    """With `partial`, the second branch is used in every other step only, and by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 31)
        self.left = nn.Linear(31, 17)
        self.right = nn.Linear(31, 17)
        self.last = nn.Linear(17, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        h = torch.tanh(self.first(x))
        y = self.left(h)
        if both:
            y = y + torch.sigmoid(self.right(h))
        return self.last(y)


class Deep(nn.Module):
    def __init__(self, layers: int = 12, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(model: nn.Module, rank: int, options: dict[str, Any], no_sync: bool) -> dict[str, Tensor]:
    ddp = DDP(model, bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    random = torch.Generator().manual_seed(10 + rank)
    for step in range(6):
        for micro in range(3 if no_sync else 1):
            x = torch.randn(13, 5, generator=random)
            grad = torch.randn(13, 3, generator=random)
            both = True
            if options.get("find_unused_parameters"):
                both = (step + rank) % 2 == 0
            with ddp.no_sync() if no_sync and micro < 2 else nullcontext():
                ddp(x, both=both).backward(grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def overlap(model: nn.Module) -> tuple[float, float]:
    """Start of the first all-reduce and end of the engine's last segment, in ms since backward began (best of some)."""
    from ortmodule import links

    ddp = DDP(model, bucket_cap_mb=1.0)
    starts: list[float] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        starts.append(time.perf_counter())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / dist.get_world_size())

    hook.__annotations__ = {}  # DDP compares annotations with classes; here they are text
    ddp.register_comm_hook(None, hook)
    ends: list[float] = []
    give = links._give

    def timed(*args: Any) -> Any:
        result = give(*args)
        ends.append(time.perf_counter())
        return result

    links._give = timed
    found = []
    for _ in range(6):
        starts.clear(), ends.clear()
        out = ddp(torch.randn(67, 512))
        begin = time.perf_counter()
        out.backward(torch.ones_like(out))
        found.append(((min(starts) - begin) * 1e3, (max(ends) - begin) * 1e3))
    links._give = give
    return min(found[2:], key=lambda pair: pair[0] - pair[1])


def work(rank: int, store: str, tests: str, root: str, out: str) -> None:
    sys.path[:0] = [tests, root]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from ortmodule import ORTModule

    results: dict[str, Any] = {}
    for name, options in CASES.items():
        for no_sync in (False, True):
            if no_sync and name == "static_graph":
                continue
            torch.manual_seed(0)
            eager = Net()
            wrapped = ORTModule(copy.deepcopy(eager), strict=True, segment_mb=0.001)
            theirs = train(eager, rank, options, no_sync)
            ours = train(wrapped, rank, options, no_sync)
            error = max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)
            results[f"{name}{'_no_sync' * no_sync}"] = (error, ours, str(wrapped.report()))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    results["overlap"] = overlap(ORTModule(Deep(), strict=True, segment_mb=1.0))
    torch.save(results, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ddp")
    here = Path(__file__).resolve().parent
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(work, (str(out / "store"), str(here), str(here.parents[1]), str(out)), nprocs=RANKS)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("case", [f"{name}{'_no_sync' * s}" for name in CASES for s in (False, True) if not (s and name == "static_graph")])
def test_ranks_train_as_in_eager(results, case):
    for found in results:
        error, _, report = found[case]
        assert error < 1e-10, f"relative error {error:.3g}\n{report}"
    for name, p in results[0][case][1].items():
        assert all(torch.equal(p, found[case][1][name]) for found in results[1:]), f"{name} differs between the ranks"


def test_all_reduce_overlaps_with_backward(results):
    for found in results:
        first, last = found["overlap"]
        assert first < 0.7 * last, f"the first all-reduce started at {first:.2f} ms, the engine ended at {last:.2f} ms"
