"""Optimizer steps on a GPU: ms, bytes that must move, share of the measured copy bandwidth, beside torch's.

Median of event-timed steps; contenders run interleaved; the lists are far larger than the cache. `host` is the time
step() takes to return, `graph` the replay of a captured step. Bytes a parameter of LAMB in one launch are those of
tensors that fit the L2 cache between the sweeps: a share of copy bandwidth far below the others' says that they did
not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_optim import sizes as model_sizes

from ortmodule.optim import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_

ROUNDS = 40
COPY = 1 << 29  # floats
TARGET_MS = {("gpt2", "FusedAdam"): 1.0, ("bert-large", "FusedLAMB"): 2.6, ("bert-large", "FusedLAMB, one launch"): 2.6}


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Parameters of a model; or equal tensors, to see from which size on a cache holds one between LAMB's sweeps."""
    if name == "gpt2":
        return model_sizes("gpt2")
    d = 1024
    equal = {"3000 small": [(1 + i % 4096,) for i in range(3000)], "1 M each": [(d, d)] * 96, "2 M each": [(2 * d, d)] * 48,
             "4 M each": [(4 * d, d)] * 24, "8 M each": [(8 * d, d)] * 12, "31 M each": [(30522, d)] * 3}  # fmt: skip
    if name in equal:
        return equal[name]
    layer: list[tuple[int, ...]] = [(d, d), (d,)] * 4 + [(4 * d, d), (4 * d,), (d, 4 * d), (d,)] + [(d,)] * 4
    return [(30522, d), (512, d), (2, d), (d,), (d,), *layer * 24, (d, d), (d,), (d, d), (d,), (d,), (d,), (30522,)]


def make(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    out = [torch.nn.Parameter((torch.randn(s, device="cuda") * 0.02).to(dtype)) for s in shapes]
    for p in out:
        p.grad = torch.randn_like(p) * 1e-3
    return out


def timed(jobs: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float, float]]:
    """name -> median ms, fastest ms on the device, median host ms"""
    device: dict[str, list[float]] = {n: [] for n in jobs}
    host: dict[str, list[float]] = {n: [] for n in jobs}
    for i in range(ROUNDS + 5):
        for name, job in jobs.items():
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # a millisecond: the host gets ahead: launches do not show as device time
            start.record()
            t = time.perf_counter()
            job()
            t = time.perf_counter() - t
            end.record()
            torch.cuda.synchronize()
            if i >= 5:
                device[name].append(start.elapsed_time(end))
                host[name].append(t * 1e3)
    return {n: (statistics.median(device[n]), min(device[n]), statistics.median(host[n])) for n in jobs}


def lamb(params: list[torch.nn.Parameter], one_launch: bool, keep_grads: bool = False) -> FusedLAMB:
    opt = FusedLAMB(params, max_grad_norm=None, keep_grads=keep_grads)
    opt.one_launch = one_launch
    return opt


def mixed(inner: Callable[[Any], torch.optim.Optimizer]) -> Callable[[list[torch.nn.Parameter]], Callable[[], Any]]:
    """backward() of next to nothing and step() with a clipped norm; the gradients are those that are there."""

    def build(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
        opt = FP16_Optimizer(inner(params), loss_scaler=1024.0)
        tiny = params[-1].detach().flatten()[:1].float().requires_grad_()

        def job() -> None:
            opt.backward((tiny * 0).sum())
            opt.clip_master_grads(1e9)
            opt.step()

        return job

    return build


def replayed(opt: torch.optim.Optimizer) -> Callable[[], Any]:
    opt.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    return lambda opt=opt: graph.replay()  # type: ignore[misc] # keeps the parameters that the graph writes


def rows_of(list_name: str, contenders: dict[str, tuple[Callable[[list[torch.nn.Parameter]], Any], torch.dtype, float]]) -> list[dict[str, Any]]:
    """contenders: name -> (job from parameters, their type, bytes a parameter)"""
    shapes = shapes_of(list_name)
    n = sum(torch.Size(s).numel() for s in shapes)
    src = torch.randn(COPY, device="cuda")
    dst = torch.empty_like(src)
    jobs = {name: build(make(shapes, dtype)) for name, (build, dtype, _) in contenders.items()}
    times = timed({"copy": lambda: dst.copy_(src), **jobs})
    copy = 8 * src.numel() / times.pop("copy")[0] / 1e6  # GB/s, read plus written
    rows = []
    for name, (ms, fastest, host) in times.items():
        rate = contenders[name][2] * n / ms / 1e6
        target = TARGET_MS.get((list_name, name))
        verdict = "" if target is None else "met" if ms <= target else "MISSED"
        rows.append({
            "list": list_name, "parameters": n, "tensors": len(shapes), "arm": name, "ms": round(ms, 4), "min_ms": round(fastest, 4),
            "host_ms": round(host, 4), "bytes_per_param": contenders[name][2], "GB_per_s": round(rate, 1), "copy_GB_per_s": round(copy, 1),
            "share_of_copy": round(rate / copy, 3), "target_ms": target, "verdict": verdict,
        })  # fmt: skip
    return rows


def run() -> list[dict[str, Any]]:
    f32, bf16 = torch.float32, torch.bfloat16
    adam: dict[str, Any] = dict(eps=1e-8, adam_w_mode=2, weight_decay=0.01)
    rows = rows_of("gpt2", {
        "FusedAdam": (lambda p: FusedAdam(p, **adam).step, f32, 28),
        "FusedAdam, graph": (lambda p: replayed(FusedAdam(p, **adam)), f32, 28),
        "torch AdamW fused": (lambda p: torch.optim.AdamW(p, fused=True).step, f32, 28),
        "torch AdamW foreach": (lambda p: torch.optim.AdamW(p, foreach=True).step, f32, 28),
        "FusedAdam bf16 + f32 master": (lambda p: FusedAdam(p, master_weights=True, **adam).step, bf16, 28),
        "FusedAdam bf16 split": (lambda p: FusedAdam(p, master_weights="split", **adam).step, bf16, 26),
        "FusedAdam bf16 stochastic": (lambda p: FusedAdam(p, stochastic_rounding=True, **adam).step, bf16, 22),
        "torch AdamW fused, all bf16": (lambda p: torch.optim.AdamW(p, fused=True).step, bf16, 14),
        "FusedSGD momentum": (lambda p: FusedSGD(p, 1e-3, 0.9).step, f32, 20),
        "torch SGD momentum fused": (lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True).step, f32, 20),
        "FP16_Optimizer over FusedAdam, f16": (mixed(lambda p: FusedAdam(p, **adam)), torch.float16, 30),
        "FP16_Optimizer over torch fused, f16": (mixed(lambda p: torch.optim.AdamW(p, fused=True)), torch.float16, 44),
        "FP16_Optimizer over torch foreach (waits)": (mixed(lambda p: torch.optim.AdamW(p, foreach=True)), torch.float16, 44),
        "clip_grad_norm_, nothing clipped": (lambda p: lambda: clip_grad_norm_(p, 1e9), f32, 4),
        "torch clip_grad_norm_": (lambda p: lambda: torch.nn.utils.clip_grad_norm_(p, 1e9), f32, 4),
    })  # fmt: skip
    torch.cuda.empty_cache()
    rows += rows_of("bert-large", {
        "FusedLAMB": (lambda p: FusedLAMB(p, max_grad_norm=None).step, f32, 40),
        "FusedLAMB, one launch": (lambda p: lamb(p, True).step, f32, 32),
        "FusedLAMB, gradients kept": (lambda p: lamb(p, False, True).step, f32, 40),
        "FusedLAMB, one launch, gradients kept": (lambda p: lamb(p, True, True).step, f32, 28),
        "FusedAdam": (lambda p: FusedAdam(p, **adam).step, f32, 28),
    })  # fmt: skip
    torch.cuda.empty_cache()
    rows += rows_of("bert-large", {  # apart from those above: 5 GB an arm
        "FusedLAMB, graph": (lambda p: replayed(lamb(p, False)), f32, 40),
        "FusedLAMB, one launch, graph": (lambda p: replayed(lamb(p, True)), f32, 32),
        "FusedLAMB with clipping": (lambda p: FusedLAMB(p).step, f32, 44),
        "torch AdamW fused": (lambda p: torch.optim.AdamW(p, fused=True).step, f32, 28),
    })  # fmt: skip
    for name in ("3000 small", "1 M each", "2 M each", "4 M each", "8 M each", "31 M each"):
        torch.cuda.empty_cache()
        rows += rows_of(name, {
            "FusedLAMB": (lambda p: lamb(p, False).step, f32, 40),
            "FusedLAMB, one launch": (lambda p: lamb(p, True).step, f32, 32),
            "FusedLAMB, one launch, gradients kept": (lambda p: lamb(p, True, True).step, f32, 28),
            "FusedAdam": (lambda p: FusedAdam(p, **adam).step, f32, 28),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        target = "" if r["target_ms"] is None else f"target {r['target_ms']} ms {r['verdict']}"
        print(
            f"{r['list']:11s} {r['arm']:42s} {r['ms']:8.3f} ms (min {r['min_ms']:.3f}, host {r['host_ms']:.3f}) "
            f"{r['bytes_per_param']:3.0f} B/param "
            f"{r['GB_per_s']:7.0f} GB/s {r['share_of_copy']:5.2f} of copy ({r['copy_GB_per_s']:.0f}) {target}"
        )
