"""The first step of a process: eager beside ORTModule, each in fresh processes, in turn (docs/LOOKING_IN.md).

    make bench-first                                 # GPT-2 124M, 2 x 256 tokens
    make bench-first BENCH="bert-base --pairs 5"

Per arm: seconds and processor seconds of the first step (forward + loss + backward) and of the one after it, medians. Of
ORTModule's first also what the capture took: the export by PyTorch and all of what becomes of its result, and the note
of what forward does (ortmodule/net.py). Names of models: bench_models.py --list.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]


def child(arm: str, name: str, threads: int) -> None:
    from bench_models import CASES, arm_model
    torch.set_num_threads(threads)
    began = time.perf_counter()
    model, batch = arm_model(arm, CASES[name]), CASES[name].batch()
    made = time.perf_counter() - began
    spent: dict[str, float] = {}

    def timed(owner: Any, function: str, label: str) -> None:
        inner = getattr(owner, function)

        def outer(*args: Any, **kw: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*args, **kw)
            finally:
                spent[label] = spent.get(label, 0.0) + time.process_time() - start

        setattr(owner, function, outer)

    if arm == "ortmodule":
        import ortmodule.capture as capture
        import ortmodule.ladder as ladder
        timed(capture, "export_module", "export")
        timed(ladder, "climb", "capture")
        timed(ladder, "_cast_net", "net")
    steps = []
    for _ in range(3):
        model.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        model(**batch)[0].backward()
        steps.append((time.perf_counter() - wall, time.process_time() - cpu))
    print(json.dumps({"made": made, "first": steps[0], "later": min(steps[1:]), **spent}))


def run(arm: str, a: argparse.Namespace) -> dict[str, Any]:
    argv = [sys.executable, __file__, a.model, "--child", arm, "--threads", str(a.threads)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", nargs="?", default="gpt2-124m")
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        return child(a.child, a.model, a.threads)
    found: dict[str, list[dict[str, Any]]] = {"eager": [], "ortmodule": []}
    for k in range(a.pairs):
        for arm in ("eager", "ortmodule") if k % 2 else ("ortmodule", "eager"):
            found[arm].append(run(arm, a))
    for arm, rows in found.items():
        first, later = ([median(r[what][i] for r in rows) for i in (0, 1)] for what in ("first", "later"))
        print(f"{a.model} {arm:10s} first step {first[0]:6.2f} s ({first[1]:6.2f} s of processors), later {later[0]:6.2f} s "
              f"({later[1]:6.2f} s)", flush=True)
    ours, eager = found["ortmodule"], found["eager"]
    over = [[o["first"][i] - e["first"][i] for o, e in zip(ours, eager, strict=True)] for i in (0, 1)]
    print(f"first step above eager's: {median(over[0]):+.2f} s ({median(over[1]):+.2f} s of processors; goal: at most +1)")
    export, capture, net = (median(r[k] for r in ours) for k in ("export", "capture", "net"))
    print(f"of it: torch.export {export:.2f} s, from its result to the engine {capture - export:.2f} s, note of the calls {net:.2f} s of processors")


if __name__ == "__main__":
    main()
