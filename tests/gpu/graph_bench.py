"""Whole training steps on a GPU: eager, torch.compile and ORTModule, interleaved in one process; f32 (with TF32, as all
arms may; f32-ieee, when asked for: without) and bf16 autocast.

ms: median of steps that end in a synchronisation; host_ms: until the step's last call returns. MiB: the most that
torch's allocator, which the engine takes its memory from, has given out in the arm's first two steps, with the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from bench_models import CASES, Case

ARMS = ("eager", "compile", "ortmodule")
DTYPES = ("bf16", "f32")
TARGET_MS = {("gpt2-124m-b8", "bf16"): 12.9, ("bert-base-b32", "bf16"): 5.1}  # of ORTModule on an H200


def cases() -> dict[str, Case]:
    """Those of the CPU's table, at sizes that keep a GPU busy."""
    from bench_models import _gpt2, _hf, _lm

    return {
        "g-small": CASES["g-small"],
        "gpt2-124m-b8": Case(_gpt2(), _lm(50257, 8, 1024)),
        "bert-base-b32": Case(_hf("BertForMaskedLM", "BertConfig"), _lm(30522, 32, 128)),
        "bert-base-b32-padded": Case(_hf("BertForMaskedLM", "BertConfig"), _lm(30522, 32, 128, mask=True)),
        "llama-60m": Case(CASES["llama-60m"].make, _lm(8000, 16, 512)),
        "vit-base": CASES["vit-base"],
    }


class Stepper:
    def __init__(self, arm: str, case: Case, bf16: bool, device: str) -> None:
        torch.manual_seed(0)
        model = case.make().train().to(device)
        if arm == "ortmodule":
            from ortmodule import ORTModule

            model = ORTModule(model)
        elif arm == "compile":
            model = torch.compile(model)
        self.arm, self.model, self.bf16, self.device = arm, model, bf16, device
        self.batch = {n: t.to(device) for n, t in case.batch().items()}
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.loss = torch.zeros(())

    def __call__(self) -> float:
        """-> the seconds until it has returned"""
        start = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            self.loss = self.model(**self.batch)[0]
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return time.perf_counter() - start


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def given_out(device: str, anew: bool = False) -> float:
    """MiB: now (anew: the peak begins here), else the most since then."""
    if device != "cuda":
        return 0.0
    if anew:
        torch.cuda.reset_peak_memory_stats()
    return (torch.cuda.memory_allocated() if anew else torch.cuda.max_memory_allocated()) / 2**20


def one(name: str, case: Case, kind: str, device: str, steps: int, arms: list[str]) -> list[dict[str, Any]]:
    torch.set_float32_matmul_precision("highest" if kind == "f32-ieee" else "high")
    steppers, first, failed, most = {}, {}, {}, {}
    for arm in arms:
        before, start = given_out(device, anew=True), time.perf_counter()
        try:
            steppers[arm] = Stepper(arm, case, kind == "bf16", device)
            steppers[arm]()
            wait(device)
        except Exception as e:  # the other arms go on
            failed[arm] = f"{type(e).__name__}: {e}"[:300]
            steppers.pop(arm, None)
        first[arm] = time.perf_counter() - start
        if arm in steppers:
            steppers[arm]()
            wait(device)
        most[arm] = given_out(device) - before
    times: dict[str, list[float]] = {arm: [] for arm in steppers}
    host: dict[str, list[float]] = {arm: [] for arm in steppers}
    for i in range(steps + 3):
        for arm, step in steppers.items():
            wait(device)
            start = time.perf_counter()
            returned = step()
            wait(device)
            if i >= 3:
                times[arm].append(time.perf_counter() - start)
                host[arm].append(returned)
    rows = []
    for arm in arms:
        row: dict[str, Any] = {"model": name, "dtype": kind, "arm": arm, "first_s": round(first[arm], 2)}
        if arm in failed:
            row["verdict"] = f"FAILED: {failed[arm]}"
        else:
            row["ms"] = round(statistics.median(times[arm]) * 1e3, 2)
            row["host_ms"] = round(statistics.median(host[arm]) * 1e3, 2)
            row["MiB"] = round(most[arm])
            row["loss"] = round(steppers[arm].loss.item(), 4)
            if "eager" in times:
                ratio = statistics.median(e / o for e, o in zip(times["eager"], times[arm], strict=True))
                row["speed"] = round(ratio, 3)
                target = TARGET_MS.get((name, kind))
                if arm == "ortmodule" and target:
                    row["target_ms"], row["verdict"] = target, "met" if row["ms"] <= target else "MISSED"
        rows.append(row)
    return rows


def run(device: str = "cuda", names: list[str] | None = None, steps: int = 20, arms: Sequence[str] = ARMS,
        dtypes: Sequence[str] = DTYPES) -> list[dict[str, Any]]:  # fmt: skip
    rows = []
    for name, case in cases().items():
        if names and name not in names:
            continue
        for dtype in dtypes:
            found = one(name, case, dtype, device, steps, list(arms))
            show(found)
            rows += found
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        ms = f"{r['ms']:9.2f} ms (host {r['host_ms']:.2f})" if "ms" in r else ""
        print(f"{r['model']:22s} {r['dtype']:8s} {r['arm']:10s} {ms} {r.get('speed', '')}x  {r.get('MiB', '')} MiB  first {r['first_s']} s  {r.get('verdict', '')}",
              flush=True)  # fmt: skip
