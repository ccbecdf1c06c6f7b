"""What the training examples share: their options, the ways to run a model (arms), and what a run has cost.

An arm is `ortmodule`, `eager` or `compile`; `--arm eager,ortmodule` trains one after the other from the same weights
on the same batches. Each ends with a line of JSON: losses, rows and tokens a second (of the median step), peak memory
of the process, measures of the task. `examples/compare.py` runs them in processes of their own and makes a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

ARMS = ("ortmodule", "eager", "compile")


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of every example; defaults: steps, batch, length, lr of this one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", default="ortmodule", help=f"one or more of {','.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=defaults.get("steps", 100))
    parser.add_argument("--batch", type=int, default=defaults.get("batch", 16), help="rows a step")
    parser.add_argument("--length", type=int, default=defaults.get("length", 64), help="tokens a row")
    parser.add_argument("--lr", type=float, default=defaults.get("lr", 1e-3))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--seed", type=int, default=0)
    return parser


class Run:
    """One arm's training of one module. losses: of the steps so far."""

    def __init__(self, net: nn.Module, arm: str, args: argparse.Namespace, tokens: int | None = None) -> None:
        """tokens: of a step, for tokens a second."""
        self.arm, self.args, self.tokens = arm, args, tokens
        self.model: Any = net.train()
        if arm == "ortmodule":
            from ortmodule import ORTModule

            self.model = ORTModule(net)
        elif arm == "compile":
            self.model = torch.compile(net)
        self.losses: list[float] = []
        self.times: list[float] = []

    def steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; what the loop does with each is a step, and timed."""
        for number, batch in zip(range(self.args.steps), batches):
            start = time.perf_counter()
            yield batch
            self.times.append(time.perf_counter() - start)
            if number % max(self.args.steps // 10, 1) == 0 or number + 1 == self.args.steps:
                print(f"{self.arm}: step {number + 1} of {self.args.steps}, loss {self.losses[-1]:.4f}, "
                      f"{1e3 * self.times[-1]:.0f} ms", flush=True)  # fmt: skip

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """autocast, with --bf16."""
        return torch.autocast("cpu", torch.bfloat16) if self.args.bf16 else contextlib.nullcontext()

    def told(self, **measures: float) -> dict[str, Any]:
        """Prints what the run has cost, as a line of JSON."""
        step = statistics.median(self.times[1:] or self.times)
        told: dict[str, Any] = {"arm": self.arm, "losses": self.losses, "first_step_s": round(self.times[0], 3),
                                "rows_per_s": self.args.batch / step, "peak_mb": peak_mb(), **measures}  # fmt: skip
        if self.tokens:
            told["tokens_per_s"] = self.tokens / step
        if self.arm == "ortmodule":
            told["in_engine"] = self.model.report().node_share
        print(json.dumps(told), flush=True)
        return told


def peak_mb() -> float:
    """The most memory that the process has had so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main(parser: argparse.ArgumentParser, train: Callable[[str, argparse.Namespace], dict[str, Any]]) -> None:
    """train: (arm, options) -> what Run.told gave; makes its model after the seed that is set here."""
    args = parser.parse_args()
    arms = args.arm.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arm {unknown[0]}: one of {', '.join(ARMS)}")
    for arm in arms:
        torch.manual_seed(args.seed)
        train(arm, args)
