"""Ranks under DistributedDataParallel (gloo): how far apart their first steps end, and when in backward the buckets of
gradients are ready, ORTModule beside eager (docs/DISTRIBUTED.md).

    python tests/bench/bench_ranks.py --ranks 4 --layers 12 --width 256

Skew: seconds between the first and the last rank to end forward, and the step, of each step; all ranks begin at a
barrier. Buckets: when DDP's communication hook was given each, as a share of the time from backward's begin until the
last was ready, and what these shares leave of backward behind the first; medians of the steps after the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def measure(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of this rank: moments (all processes of a machine share the clock), and of each step after the second its
    buckets."""
    from tiny_gpt import GPT, batch

    torch.manual_seed(0)
    model: torch.nn.Module = GPT(args.width, 4, args.layers)
    if arm == "ortmodule":
        from ortmodule import ORTModule

        model = ORTModule(model, strict=True, segment_mb=args.segment_mb)
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    names = {p: name for name, p in model.module.named_parameters()}
    ready: list[tuple[float, list[str]]] = []

    def hook(_: Any, bucket: Any) -> Any:
        ready.append((time.perf_counter(), [names[p] for p in bucket.parameters()]))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())

    hook.__annotations__ = {}  # DDP compares annotations with classes; here they are text
    model.register_comm_hook(None, hook)
    data = torch.Generator().manual_seed(dist.get_rank())
    steps, buckets, first = [], [], 0.0
    for _ in range(args.steps):
        model.zero_grad()
        ready.clear()
        ids = torch.cat([batch(data) for _ in range(args.batch // 4)])
        dist.barrier()
        start = time.perf_counter()
        loss = model(ids)
        middle = time.perf_counter()
        loss.backward()
        steps.append((middle, time.perf_counter()))
        first = first or steps[0][1] - start
        buckets.append([((at - middle) / (ready[-1][0] - middle), members) for at, members in ready])
    return {"steps": steps, "buckets": buckets[2:], "first": first}


def child(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {arm: measure(arm, args) for arm in ("eager", "ortmodule")}
    dist.barrier()
    Path(args.child, f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def run(out: Path, ranks: int, *options: object) -> dict[str, Any]:
    """By arm: skew of every step (forward, step), the buckets' names, the shares at which each is ready on each rank."""
    from ranks import free_port

    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--child", str(out), *map(str, options)]
    running = [subprocess.Popen(command, env={**os.environ, **group, "RANK": str(r), "OMP_NUM_THREADS": "1"})
               for r in range(ranks)]  # fmt: skip
    if any([process.wait() for process in running]):
        raise RuntimeError("a rank has failed")
    of = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    told = {}
    for arm in of[0]:
        ends = [list(zip(*step)) for step in zip(*(rank[arm]["steps"] for rank in of))]
        every = [rank[arm]["buckets"] for rank in of]
        told[arm] = {
            "skew": [[max(at) - min(at) for at in step] for step in ends],
            "first": max(rank[arm]["first"] for rank in of),
            "names": [members for _, members in every[0][0]],
            "same": all([m for _, m in step] == [m for _, m in every[0][0]] for rank in every for step in rank),
            "ready": [[median(at) for at in zip(*[[at for at, _ in step] for step in rank])] for rank in every],
        }
    return told


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 2, "layers": 12, "width": 256, "batch": 4, "steps": 12}
    for name, value in sizes.items():
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--bucket-mb", type=float, default=4.0)
    options.add_argument("--segment-mb", type=float, default=4.0)
    options.add_argument("--child", help=argparse.SUPPRESS)
    return options


def main() -> None:
    args = parser().parse_args()
    if args.child:
        return child(args)
    import tempfile

    with tempfile.TemporaryDirectory() as out:
        told = run(Path(out), args.ranks, *sys.argv[1:])
    for arm, found in told.items():
        first, later = found["skew"][0], [max(step) for step in found["skew"][2:]]
        print(f"{arm}: first forwards end {first[0]:.2f} s apart, first steps {first[1]:.2f} s, later ones "
              f"{median(later):.3f} s (at most {max(later):.3f}); the longest first step {found['first']:.1f} s")  # fmt: skip
        for rank, ready in enumerate(found["ready"]):
            print(f"  rank {rank}: buckets ready at {' '.join(f'{at:.2f}' for at in ready)} of backward, "
                  f"{1 - ready[0]:.0%} of it behind the first")  # fmt: skip
    print(f"buckets of the same parameters in the same order: {told['eager']['names'] == told['ortmodule']['names']}")


if __name__ == "__main__":
    main()
