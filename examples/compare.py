"""Runs a training example in each arm, by turns, each in a process of its own: speed, memory, losses, side by side.

    python examples/compare.py bert_pretraining.py --size base --batch 4 --steps 12
    python examples/compare.py question_answering.py --arms eager,ortmodule --rounds 3
    python examples/compare.py bert_pretraining.py --size base --limit 8000     # and the largest batch in 8,000 MiB

Options that are not compare's own go to the example. A largest batch is found by trying: twice as many rows until the
process's peak is above the limit, then the middle of what is known, three steps each.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def one(script: Path, arm: str, rest: list[str]) -> dict[str, Any] | None:
    """What the arm told in the end; None, with its error shown in a line, if it did not come to the end."""
    done = subprocess.run([sys.executable, script, *rest, "--arm", arm], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        # advice may follow it
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
        print(f"{arm}: {(errors or lines)[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def largest_batch(script: Path, arm: str, rest: list[str], limit: float) -> int:
    def fits(rows: int) -> bool:
        told = one(script, arm, [*rest, "--steps", "3", "--batch", str(rows)])
        took = f"{told['peak_mb']:.0f} MiB" if told else "did not run"
        print(f"{arm}: batch {rows}: {took}", flush=True)
        return told is not None and told["peak_mb"] <= limit

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="an example of this folder")
    parser.add_argument("--arms", default="eager,ortmodule", help="eager, ortmodule, compile")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, help="MiB: find the largest batch whose process stays below")
    args, rest = parser.parse_known_args()
    script = Path(__file__).with_name(args.script)
    if not script.exists():
        parser.error(f"{script} does not exist")
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms.split(",")}
    for turn in range(args.rounds):
        for arm in found if turn % 2 == 0 else reversed(found):
            print(f"round {turn + 1} of {args.rounds}: {arm} ...", flush=True)
            if told := one(script, arm, rest):
                found[arm].append(told)
    rows = {arm: largest_batch(script, arm, rest, args.limit) for arm in found} if args.limit else {}
    columns = ["rows_per_s", "first_step_s", "peak_mb"]
    costs = {*columns, "arm", "losses", "in_engine"}
    measures = sorted({name for runs in found.values() for run in runs for name in run} - costs)
    head = [f"{name:>14}" for name in ("rows/s", "first step s", "peak MiB", "last loss", *measures)]
    print(f"\n{'arm':10}" + "".join(head) + (f"{'largest batch':>15}" if rows else ""))
    for arm, runs in found.items():
        if runs:
            line = [statistics.median(run.get(c, float("nan")) for run in runs) for c in columns]
            line += [runs[-1]["losses"][-1], *(runs[-1].get(m, float("nan")) for m in measures)]
            print(f"{arm:10}" + "".join(f"{x:14.4g}" for x in line) + (f"{rows[arm]:15}" if rows else ""))
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
