"""Every CUDA check and benchmark of this project, on a machine with a GPU, from a checkout and a wheel (no compiler, no
network, no pip).

    python tests/gpu/run.py [--wheel dist/ortmodule-0.1.0-cp310-abi3-linux_x86_64.whl] [--part PART]... [--model NAME]...
    [--arm ARM]... [--dtype DTYPE]... [--check TEXT]... [--out DIR] [--resume]

graph-ops: every row of tests/ops through lowered plans (build/libom.so of `make lib`, pytest). graph-correct: models and
what surrounds them. graph-train: more models, trainings, DDP and the trainers. graph-modules, when asked for: tests/module with what it
makes on the GPU (pytest); tests that hand PyTorch an index out of range end their process there. graph-bench: whole steps beside eager and torch.compile (--model, --arm, --dtype: some of them). optim-correct,
optim-bench: the optimizers. Each part but graph-bench of all models takes less than ten minutes. A table goes to the screen; DIR (default $OUT, else build/gpu) gets PART.json and
PART.csv; with --resume the parts that it has of an earlier run are read there and not run again. The exit status is 0 when every check of the parts passed, 1 when one failed, 2 when there is nothing to run
on. Benchmarks that miss a target are marked, not failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("graph-correct", "graph-train", "graph-ops", "optim-correct", "graph-bench", "optim-bench")
ASKED = ("graph-modules",)  # only when asked for: some of its tests ask for what is another on a GPU


def stop(sentence: str) -> None:
    print(f"gpu-check: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def use_wheel(path: Path) -> None:
    """Makes `import ortmodule` take the wheel's contents."""
    if not path.is_file():
        stop(f"there is no wheel {path}: build it with make gpu-wheel")
    home = tempfile.mkdtemp(prefix="ortmodule-wheel-")
    with zipfile.ZipFile(path) as z:
        z.extractall(home)
    sys.path.insert(0, home)


def look_around() -> None:
    """Makes the modules of the parts importable, whatever PYTHONPATH is. tests and examples come last: names of theirs
    (cuda) are packages elsewhere."""
    tests = HERE.parent
    sys.path[1:1] = [str(HERE), str(tests / "optim"), str(tests / "bench")]
    sys.path += [str(tests), str(tests.parent / "examples")]


def machine() -> dict[str, str]:
    try:
        import torch
    except ImportError:
        stop("torch is not installed here")
    if not torch.cuda.is_available():
        built = "was built without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) sees no GPU"
        stop(f"an NVIDIA GPU is needed; torch {torch.__version__} {built}: run this file where there is one, with the wheel from make gpu-wheel")
    from ortmodule import _C

    if not _C.cuda_archs():
        stop("this ortmodule was built without CUDA kernels: build the wheel where nvcc is (make gpu-wheel)")
    p = torch.cuda.get_device_properties(0)
    return {
        "gpu": p.name,
        "sm": f"{p.major}{p.minor}",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "kernels": _C.cuda_archs(),
        "ortmodule": os.path.dirname(os.path.abspath(_C.__file__)),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(out: Path, part: str, about: dict[str, str], rows: list[dict[str, object]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{part}.json").write_text(json.dumps({"machine": about, "rows": rows}, indent=1, default=str))
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with open(out / f"{part}.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, ["gpu", "torch", *fields])
        writer.writeheader()
        writer.writerows({"gpu": about["gpu"], "torch": about["torch"], **row} for row in rows)


def run_part(part: str, bench: dict[str, Any], only: list[str]) -> list[dict[str, object]]:
    if part == "graph-correct":
        import graph_correct

        return graph_correct.run("cuda", only)
    if part == "graph-train":
        import graph_train

        return graph_train.run("cuda", only)
    if part in ("graph-ops", "graph-modules"):
        import graph_correct

        return graph_correct.run_operators("cuda") if part == "graph-ops" else graph_correct.run_modules("cuda")
    if part == "graph-bench":
        import graph_bench

        return graph_bench.run(**bench)
    if part == "optim-correct":
        import optim_correct

        return optim_correct.run("cuda")
    import optim_bench

    rows = optim_bench.run()
    optim_bench.show(rows)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--part", action="append", choices=PARTS + ASKED)
    for name, help in (("model", "a model"), ("arm", "eager, compile, ortmodule"), ("dtype", "bf16, f32 (with TF32), f32-ieee (without)")):
        parser.add_argument(f"--{name}", action="append", help=f"of graph-bench, may be repeated: {help}")
    parser.add_argument("--check", action="append", default=[], help="of graph-correct and graph-train: those whose name has this text, may be repeated")
    parser.add_argument("--resume", action="store_true", help="parts that --out has are not run again")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", HERE.parents[1] / "build" / "gpu")))
    args = parser.parse_args()
    if args.wheel:
        use_wheel(args.wheel)
    else:
        sys.path.insert(0, str(HERE.parents[1]))
    about = machine()
    look_around()
    print("  ".join(f"{k} {v}" for k, v in about.items()))
    chosen = {"names": args.model, "arms": args.arm, "dtypes": args.dtype}
    bench = {k: v for k, v in chosen.items() if v}
    failed = 0
    for part in args.part or PARTS:
        start, table = time.perf_counter(), args.out / f"{part}.json"
        had = args.resume and table.is_file()
        rows = json.loads(table.read_text())["rows"] if had else run_part(part, bench, args.check)
        bad = [r for r in rows if not r.get("ok", True)]
        for r in bad:
            print(f"FAILED {r['check']}: {r['detail']}")
        failed += len(bad)
        print(f"{part}: {len(rows)} rows, {len(bad)} failed, " + (f"from {table}" if had else f"{time.perf_counter() - start:.0f} s"))
        if not had:
            write(args.out, part, about, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
