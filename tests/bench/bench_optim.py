"""Optimizers against torch's: time per step, bytes per parameter, GB/s, share of copy bandwidth.

    python tests/bench/bench_optim.py [--list gpt2|bert|tiny] [--threads 1,2] [--rounds 7] [--half] [--csv
    tests/bench/history_optim.csv]

All contenders (DeepSpeed's CPU optimizer where DeepSpeed is installed) run interleaved in one process on the same
parameters and gradients, each with its own state; the figure is the median over rounds, ratios are medians of per-round
ratios against FusedAdam. "copy_" is torch's over as many floats as the list has (8 bytes each): what the memory can do.
GB/s count the bytes an update must move, not those that a contender happens to move.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import statistics
import time

import torch

from ortmodule.optim import FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_


def sizes(name: str) -> list[tuple[int, ...]]:
    if name == "tiny":
        return [(7,), (13, 5), (1,), (64,)] * 250
    layers, dim = 12, 768
    block: list[tuple[int, ...]] = [(dim,)] * 4 + [(dim, 3 * dim), (3 * dim,), (dim, dim), (dim,), (dim, 4 * dim), (4 * dim,), (4 * dim, dim), (dim,)]
    head: list[tuple[int, ...]] = [(50257 if name == "gpt2" else 30522, dim), (1024, dim)]
    return head + block * layers


def contenders(shapes: list[tuple[int, ...]], half: bool) -> dict[str, tuple[torch.optim.Optimizer | None, float, list[torch.Tensor]]]:
    """name -> (optimizer, bytes per parameter that must move, its parameters)"""
    dtype = torch.bfloat16 if half else torch.float32

    def params() -> list[torch.Tensor]:
        out = [torch.nn.Parameter(torch.randn(s).mul_(0.02).to(dtype)) for s in shapes]
        for p in out:
            p.grad = torch.randn_like(p)
        return out

    rows: dict[str, tuple[torch.optim.Optimizer | None, float, list[torch.Tensor]]] = {}
    ps = params()

    def add(name: str, make, size: float) -> None:  # type: ignore[no-untyped-def]
        rows[name] = (make(ps), size, ps)

    if half:
        add("FusedAdam bf16 + f32 master", lambda p: FusedAdam(p, adam_w_mode=2, master_weights=True), 28)
        add("FusedAdam bf16, split master", lambda p: FusedAdam(p, adam_w_mode=2, master_weights="split"), 26)
        add("FusedAdam bf16, stochastic", lambda p: FusedAdam(p, adam_w_mode=2, stochastic_rounding=True), 22)
        add("torch AdamW fused, all bf16", lambda p: torch.optim.AdamW(p, fused=True), 14)
        return rows
    add("FusedAdam", lambda p: FusedAdam(p, adam_w_mode=2, eps=1e-8, weight_decay=0.01), 28)
    add("torch AdamW fused", lambda p: torch.optim.AdamW(p, fused=True), 28)
    add("torch AdamW foreach", lambda p: torch.optim.AdamW(p, foreach=True), 28)
    add("torch AdamW for-loop", lambda p: torch.optim.AdamW(p, foreach=False), 28)
    add("FusedLAMB, no clipping", lambda p: FusedLAMB(p, max_grad_norm=None), 40)
    add("FusedLAMB", lambda p: FusedLAMB(p), 44)
    add("FusedSGD momentum", lambda p: FusedSGD(p, momentum=0.9), 20)
    add("torch SGD momentum fused", lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True), 20)
    if importlib.util.find_spec("deepspeed"):  # compiles its kernels at the first use
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        add("DeepSpeedCPUAdam", lambda p: DeepSpeedCPUAdam(p), 28)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", default="gpt2", choices=("gpt2", "bert", "tiny"))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--half", action="store_true", help="bfloat16 parameters in their four forms of storage")
    parser.add_argument("--csv", help="append the rows to this file")
    parser.add_argument("--note", default="", help="last column of the rows, such as: under load")
    args = parser.parse_args()
    shapes = sizes(args.list)
    numel = sum(torch.Size(s).numel() for s in shapes)
    rows = contenders(shapes, args.half)
    a, b = torch.zeros(numel), torch.zeros(numel)
    clip = next(iter(rows.values()))[2]
    jobs = {name: opt.step for name, (opt, _, _) in rows.items()}
    jobs["copy_"] = lambda: b.copy_(a)  # type: ignore[assignment,return-value]
    size = {name: row[1] for name, row in rows.items()} | {"copy_": 8.0}
    if not args.half:
        jobs["clip_grad_norm_ (no clipping)"] = lambda: clip_grad_norm_(clip, 1e9)  # type: ignore[assignment]
        jobs["torch clip_grad_norm_"] = lambda: torch.nn.utils.clip_grad_norm_(clip, 1e9)  # type: ignore[assignment]
        size |= {"clip_grad_norm_ (no clipping)": 4.0, "torch clip_grad_norm_": 4.0}
    base = next(iter(rows))
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for r in range(args.rounds + 2):
            for name, job in jobs.items():
                start = time.perf_counter()
                job()
                if r >= 2:
                    times[name].append(time.perf_counter() - start)
        copy = 8 * numel / statistics.median(times["copy_"]) / 1e9
        print(f"{args.list}: {len(shapes)} tensors, {numel / 1e6:.1f} M parameters, {threads} thread(s), copy {copy:.1f} GB/s")
        for name, ts in times.items():
            rate = size[name] * numel / statistics.median(ts) / 1e9
            ratio = statistics.median(x / y for x, y in zip(ts, times[base]))
            ms = statistics.median(ts) * 1e3
            if args.csv:
                with open(args.csv, "a") as f:
                    row = [datetime.date.today(), torch.__version__, args.list, threads, name.replace(",", ""), f"{ms:.2f}", f"{size[name]:g}",
                           f"{rate:.1f}", f"{rate / copy:.2f}", f"{ratio:.2f}", args.note]  # fmt: skip
                    f.write(",".join(map(str, row)) + "\n")
            print(f"  {name:32s} {ms:8.2f} ms {size[name]:4.0f} B/param {rate:6.1f} GB/s {rate / copy:5.2f}x copy {ratio:6.2f}x {base}")


if __name__ == "__main__":
    main()
