"""Batches of random sizes: what a size costs when it is new (plan, blocks of other sizes) beside the step after it.

    make bench-shapes                                     # BERT-base, 500 sizes
    make bench-shapes BENCH="--layers 2 --shapes 50"

Each size (1 to 8 samples of 8 to 128 positions, padded at the right) is stepped twice, forward, loss, backward; the first
steps' processor time, in all, over the second ones'. Goal: 1.05. The captures, one for the first size and one for all
others, are told apart. The losses of every tenth size are compared with eager's on the same weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shapes", type=int, default=500)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    from transformers import BertConfig, BertForMaskedLM

    from ortmodule import ORTModule
    torch.manual_seed(0)
    eager = BertForMaskedLM(BertConfig(num_hidden_layers=a.layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
    ours = ORTModule(eager)
    g = torch.Generator().manual_seed(1)

    def step(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        eager.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        ours(**batch).loss.backward()
        return time.perf_counter() - wall, time.process_time() - cpu

    new, known, captures = [0.0, 0.0], [0.0, 0.0], 0.0
    sizes: set[tuple[int, int]] = set()
    worst = 0.0
    while len(sizes) < a.shapes + 2:
        b, t = int(torch.randint(1, 9, (), generator=g)), int(torch.randint(8, 129, (), generator=g))
        if (b, t) in sizes:
            continue
        ids = torch.randint(1, 30522, (b, t), generator=g)
        mask = (torch.arange(t) < torch.randint(max(t // 2, 1), t + 1, (b, 1), generator=g)).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        first, second = step(batch), step(batch)
        if len(sizes) < 2:  # one with constant sizes, one with symbols
            captures += first[1] - second[1]
        else:
            for i in (0, 1):
                new[i] += first[i]
                known[i] += second[i]
        sizes.add((b, t))
        if len(sizes) % 10 == 0:
            with torch.no_grad():
                here, there = ours(**batch).loss.item(), eager(**batch).loss.item()
            worst = max(worst, abs(here - there) / abs(there))
    told = ours.report()
    print(f"{a.shapes} sizes of BERT with {a.layers} layers: new {new[1]:.1f} s of processors, again {known[1]:.1f} s: {new[1] / known[1]:.3f} times "
          f"(by the clock {new[0] / known[0]:.3f})")
    print(f"{len(told.graphs)} captures, {captures:.1f} s on top, {(new[1] + captures) / known[1]:.3f} times with them; losses beside eager's: off by {worst:.1e} at most")


if __name__ == "__main__":
    main()
