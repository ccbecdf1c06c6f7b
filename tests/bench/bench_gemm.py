"""GFLOP/s of matrix products on one thread: the engine's packed kernel and torch's BLAS, interleaved, CPU time of the
thread, best of n.

python tests/bench/bench_gemm.py                 the shapes of GPT-2, BERT and small models
python tests/bench/bench_gemm.py 512,768,50257   M,K,N: forward X W^T, input gradient G W, weight gradient G^T X
"""

from __future__ import annotations

import ctypes as C
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ORTMODULE_GEMM"] = "own"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import engine  # noqa: E402

SHAPES = [(512, 768, 768), (512, 768, 3072), (512, 3072, 768), (2048, 768, 768), (3072, 384, 1536), (67, 131, 257), (13, 768, 768), (2048, 768, 2)]
I64, PTR = C.c_int64, C.c_void_p


class Gemm(C.Structure):
    _fields_ = [
        ("dtype", C.c_int),
        ("m", I64),
        ("n", I64),
        ("k", I64),
        ("a", PTR),
        ("rsa", I64),
        ("csa", I64),
        ("b", PTR),
        ("rsb", I64),
        ("csb", I64),
        ("c", PTR),
        ("rsc", I64),
        ("csc", I64),
        ("alpha", C.c_double),
        ("beta", C.c_int),
        ("bias", PTR),
        ("batch", I64),
        ("n_axis", C.c_int),
        ("axis", PTR),
        ("scratch", PTR),
    ]


class How(C.Structure):
    _fields_ = [
        ("flags", C.c_char * 6),
        ("ld", C.c_int * 3),
        ("workers", C.c_int),
        ("type", PTR),
        ("sizes", I64 * 8),
        ("scratch", I64),
    ]


def product(cx: engine.Ctx, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], None]:
    g = Gemm(
        dtype=engine.TORCH.index(a.dtype),
        m=c.shape[0],
        n=c.shape[1],
        k=a.shape[1],
        a=a.data_ptr(),
        rsa=a.stride(0),
        csa=a.stride(1),
        b=b.data_ptr(),
        rsb=b.stride(0),
        csb=b.stride(1),
        c=c.data_ptr(),
        rsc=c.stride(0),
        csc=c.stride(1),
        alpha=1.0,
        batch=1,
    )
    how = How()
    cx.check(engine.lib.om_gemm_prepare(cx.p, C.byref(g), C.byref(how)))
    scratch = torch.empty(how.scratch + 128, dtype=torch.uint8)
    g.scratch = (scratch.data_ptr() + 63) & ~63
    keep = (a, b, c, scratch)

    def call() -> None:
        assert keep
        cx.check(engine.lib.om_gemm_run(cx.p, C.byref(g), C.byref(how)))

    return call


def best(calls: list[Callable[[], object]], seconds: float = 0.6) -> list[float]:
    """Best CPU time of each, taking turns."""
    times = [float("inf")] * len(calls)
    for f in calls:
        f()
    stop, rounds = time.monotonic() + seconds * len(calls), 0
    while rounds < 3 or (time.monotonic() < stop and rounds < 200):
        rounds += 1
        for i, f in enumerate(calls):
            t = time.thread_time()
            f()
            times[i] = min(times[i], time.thread_time() - t)
    return times


def main() -> None:
    torch.set_num_threads(1)
    cx = engine.Ctx(threads=False)
    shapes = [tuple(int(v) for v in s.split(",")) for s in sys.argv[1:]] or SHAPES
    print(f"{'M,K,N':>18}  own forward, dX, dW     torch forward, dX, dW   (GFLOP/s, fp32, one thread)")
    for m, k, n in shapes:
        x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        forms = [(x, w.t(), torch.empty(m, n)), (g, w, torch.empty(m, k)), (g.t(), x, torch.empty(n, k))]
        own, torchs = [], []
        for a, b, c in forms:
            t = best([product(cx, a, b, c), lambda a=a, b=b, c=c: torch.mm(a, b, out=c)])
            own.append(2 * m * k * n / t[0] / 1e9)
            torchs.append(2 * m * k * n / t[1] / 1e9)
        print(f"{f'{m},{k},{n}':>18}  " + " ".join(f"{v:6.1f}" for v in own) + "     " + " ".join(f"{v:6.1f}" for v in torchs), flush=True)


if __name__ == "__main__":
    main()
