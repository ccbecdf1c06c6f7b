"""GFLOP/s of matrix products on one thread: the engine's packed kernel and torch's product (oneDNN for bf16), which the
engine otherwise calls, interleaved, CPU time of the thread, best of n.

python tests/bench/bench_gemm.py                 the shapes of GPT-2, BERT and small models
python tests/bench/bench_gemm.py --bf16          in bf16, on tiles where the processor has AMX: own against host
ORTMODULE_ISA=avx512_bf16 python tests/bench/bench_gemm.py --bf16     there without tiles
python tests/bench/bench_gemm.py --bf16 512,768,50257   M,K,N: forward X W^T, input gradient G W, weight gradient G^T X
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ORTMODULE_GEMM"] = "own"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from gemm_call import kernel, product  # noqa: E402
from op_calls import best  # noqa: E402

import engine  # noqa: E402

SHAPES = [(512, 768, 768), (512, 768, 3072), (512, 3072, 768), (2048, 768, 768), (3072, 384, 1536), (67, 131, 257), (13, 768, 768), (2048, 768, 2)]
VOCABULARY = (512, 768, 50257)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("shapes", nargs="*", help="M,K,N")
    p.add_argument("--bf16", action="store_true", help="bf16 instead of fp32")
    p.add_argument("--seconds", type=float, default=0.6, help="for each form of a shape")
    a = p.parse_args()
    torch.set_num_threads(1)
    cx = engine.Ctx(threads=False)
    dtype = torch.bfloat16 if a.bf16 else torch.float32
    shapes = [tuple(int(v) for v in s.split(",")) for s in a.shapes] or SHAPES + [VOCABULARY] * a.bf16
    print(f"own: {kernel(cx, dtype)}")
    print(f"{'M,K,N':>18}  own forward, dX, dW     torch forward, dX, dW    own / torch        (GFLOP/s, {dtype}, one thread)")
    ratios = []
    for m, k, n in shapes:
        x, w, g = (torch.randn(*s).to(dtype) for s in ((m, k), (n, k), (m, n)))
        forms = [(x, w.t(), (m, n)), (g, w, (m, k)), (g.t(), x, (n, k))]
        own, torchs = [], []
        for left, right, size in forms:
            c, d = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
            t = best([product(cx, left, right, c), lambda a=left, b=right, c=d: torch.mm(a, b, out=c)], a.seconds)
            assert (c.float() - d.float()).abs().max() <= 0.02 * d.float().abs().max(), "own and torch's differ"
            own.append(2 * m * k * n / t[0] / 1e9)
            torchs.append(2 * m * k * n / t[1] / 1e9)
        ratios += [o / t for o, t in zip(own, torchs)]
        columns = [" ".join(f"{v:6.1f}" for v in own), " ".join(f"{v:6.1f}" for v in torchs), " ".join(f"{o / t:5.2f}" for o, t in zip(own, torchs))]
        print(f"{f'{m},{k},{n}':>18}  " + "     ".join(columns), flush=True)
    print(f"own / torch, geometric mean: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")


if __name__ == "__main__":
    main()
