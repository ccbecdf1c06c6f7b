"""A training step on a device beside onnxruntime-training's on-device API, on the same artifacts.

    tests/bench/bench_ondevice.py --theirs PYTHON [--rounds 5] [--models mlp,cnn,former] [--threads 1,2]

PYTHON: an environment with onnxruntime-training-cpu 1.19.2 (tests/ort_models.py), which also makes the artifacts. Both
sides are Python programs over numpy: step, optimizer, lazy_reset_grad. They run by turns, each time in a new process; of
a side the fastest step of all rounds and the median of its rounds' medians are told. Memory: VmHWM of the process, and
what it is above VmRSS after the imports, before anything is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
STEPS = {"mlp": 200, "cnn": 60, "former": 60}


def kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def child(side: str, folder: Path, threads: int) -> None:
    if side == "ours":
        sys.path.insert(0, str(ROOT))
        from ortmodule.api import CheckpointState, Module, Optimizer

        options = {"threads": threads}
    else:
        sys.path.insert(0, str(ROOT / "tests"))
        import ort_models
        from onnxruntime import SessionOptions

        ort_models.without_torch()
        from onnxruntime.training.api import CheckpointState, Module, Optimizer

        session = SessionOptions()
        session.intra_op_num_threads = threads
        options = {"session_options": session}
    batches = np.load(folder / "batches.npz")
    x, labels = batches["x"], batches["labels"]
    before = kib("VmRSS")
    module = Module(str(folder / "training_model.onnx"), CheckpointState.load_checkpoint(str(folder / "checkpoint")), **options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    module.train()
    times = []
    for step in range(STEPS[folder.name] + 5):
        begin = time.perf_counter()
        loss = module(x[step % len(x)], labels[step % len(x)])
        optimizer.step()
        module.lazy_reset_grad()
        if step >= 5:
            times.append(time.perf_counter() - begin)
    print(json.dumps({"least": min(times), "median": float(np.median(times)), "peak": kib("VmHWM"), "before": before,
                      "loss": float(np.ravel(loss)[0])}))  # fmt: skip


def batches_write(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import ort_models

    model, _ = ort_models.models(True)[folder.name]
    rows = [ort_models.inputs(model, i) for i in range(4)]
    np.savez(folder / "batches.npz", x=np.stack([r[0] for r in rows]), labels=np.stack([r[1] for r in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="mlp,cnn,former")
    parser.add_argument("--threads", default="1,2")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp())
    subprocess.run([given.theirs, ROOT / "tests" / "ort_models.py", home, "--large"], check=True, capture_output=True)
    print("model    threads   ours ms  theirs ms  ratio (medians)   ours MB  theirs MB  ratio   above imports: ratio")
    for name in given.models.split(","):
        batches_write(home / name)
        for threads in map(int, given.threads.split(",")):
            rows: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
            for turn in range(given.rounds):
                for side in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                    python = sys.executable if side == "ours" else given.theirs
                    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                    done = subprocess.run([python, __file__, "--child", side, home / name, str(threads)],
                                          check=True, capture_output=True, text=True, env=env)  # fmt: skip
                    rows[side].append(json.loads(done.stdout.splitlines()[-1]))
            a, b = ({k: min(r[k] for r in rows[s]) for k in ("least", "peak")} for s in rows)
            medians = [float(np.median([r["median"] for r in rows[s]])) for s in rows]
            above = [min(r["peak"] - r["before"] for r in rows[s]) for s in rows]
            losses = [rows[s][0]["loss"] for s in rows]
            assert abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[1]) + 1e-5, losses
            print(f"{name:8} {threads:7} {1e3 * a['least']:9.3f} {1e3 * b['least']:10.3f} {a['least'] / b['least']:6.2f}"
                  f" ({medians[0] / medians[1]:.2f})     {a['peak'] / 1024:9.1f} {b['peak'] / 1024:10.1f} {a['peak'] / b['peak']:6.2f}"
                  f"   {above[0] / 1024:.1f} of {above[1] / 1024:.1f}: {above[0] / above[1]:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
