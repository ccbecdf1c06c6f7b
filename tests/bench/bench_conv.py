"""Convolutions on one thread: the engine's own against torch's (oneDNN), which the engine otherwise calls; milliseconds of
CPU time, best of n, interleaved. Contiguous tensors; torch's on channels_last ones beside them.

python tests/bench/bench_conv.py [--bf16] [N,C,side,O,kernel,stride,padding,groups ...]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from op_calls import best, kernel  # noqa: E402

import engine  # noqa: E402

SHAPES = [(2, 3, 128, 32, 3, 1, 1, 1), (2, 32, 128, 32, 3, 1, 1, 1), (2, 64, 64, 64, 3, 1, 1, 1), (2, 128, 32, 128, 3, 1, 1, 1),
          (2, 256, 16, 256, 3, 1, 1, 1), (2, 512, 8, 512, 3, 1, 1, 1), (4, 3, 160, 64, 7, 2, 3, 1), (4, 64, 40, 64, 1, 1, 0, 1),
          (4, 64, 40, 256, 1, 1, 0, 1), (4, 256, 10, 1024, 1, 1, 0, 1), (4, 1024, 10, 256, 1, 1, 0, 1), (4, 512, 5, 512, 3, 1, 1, 1),
          (4, 512, 5, 2048, 1, 1, 0, 1), (4, 128, 40, 128, 3, 2, 1, 1), (4, 512, 20, 1024, 1, 2, 0, 1), (4, 3, 160, 96, 4, 4, 0, 1),
          (4, 192, 20, 384, 2, 2, 0, 1), (4, 256, 10, 256, 3, 1, 1, 32), (4, 96, 40, 96, 7, 1, 3, 96), (4, 384, 10, 384, 7, 1, 3, 384),
          (32, 1, 28, 16, 3, 1, 1, 1), (32, 16, 14, 32, 3, 1, 1, 1), (4, 96, 40, 96, 3, 2, 1, 96)]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("shapes", nargs="*", help="N,C,side,O,kernel,stride,padding,groups")
    p.add_argument("--bf16", action="store_true", help="bf16 instead of fp32")
    p.add_argument("--seconds", type=float, default=0.3, help="for each form of a shape")
    a = p.parse_args()
    torch.set_num_threads(1)
    cx = engine.Ctx(threads=False)
    dtype = torch.bfloat16 if a.bf16 else torch.float32
    conv, back = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
    print(f"{'N,C,side,O,k,s,p,g':>26}   own forward, gradients    torch    channels_last    torch's time / own   ({dtype}, ms)")
    ratios: list[float] = []
    for n, c, side, o, k, s, pad, g in [tuple(int(v) for v in t.split(",")) for t in a.shapes] or SHAPES:
        x, w = torch.randn(n, c, side, side).to(dtype), torch.randn(o, c // g, k, k).to(dtype)
        rest = ([s, s], [pad, pad], [1, 1], False, [0, 0], g)
        y = conv(x, w, None, *rest)
        dy = torch.randn_like(y)
        last = [t.to(memory_format=torch.channels_last) for t in (x, w, dy)]
        attrs = {"stride": [s, s], "pad": [pad, pad], "groups": g}
        outs = [torch.empty_like(y)], [torch.empty_like(x), torch.empty_like(w), torch.empty(0, dtype=dtype)]
        forward = best([kernel(cx, "conv", attrs, [x, w, None], outs[0]), partial(conv, x, w, None, *rest),
                        partial(conv, last[0], last[1], None, *rest)], a.seconds)
        mask = [True, True, False]
        backward = best([kernel(cx, "conv_grad", {**attrs, "want": [1, 1, 0]}, [dy, x, w], outs[1]), partial(back, dy, x, w, None, *rest, mask),
                         partial(back, last[2], last[0], last[1], None, *rest, mask)], a.seconds)
        theirs = (y, *back(dy, x, w, None, *rest, mask)[:2])
        for own, their in zip([*outs[0], *outs[1]], theirs):
            assert (own.float() - their.float()).abs().max() <= 0.02 * their.float().abs().max(), "own and torch's differ"
        ratio = [forward[1] / forward[0], backward[1] / backward[0]]
        ratios += ratio
        columns = ["".join(f"{t[i] * 1e3:9.2f}" for t in (forward, backward)) for i in range(3)]
        print(f"{','.join(map(str, (n, c, side, o, k, s, pad, g))):>26} {' '.join(columns)}    {ratio[0]:6.2f} {ratio[1]:6.2f}", flush=True)
    print(f"torch / own, geometric mean: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")


if __name__ == "__main__":
    main()
