# ruff: noqa: I001 - bench_gemm finds the engine and fixes the thread count
"""Milliseconds of attention forward and backward on one thread: the engine's kernel and torch's
scaled_dot_product_attention, interleaved, CPU time of the thread, best of n.

    python tests/bench/bench_attention.py [--bf16] [B,H,T,D,causal,dropout ...]

GFLOP/s count the products that a causal mask leaves: two in forward, five in backward.
"""

from __future__ import annotations

import sys

import bench_gemm  # noqa: F401 - sets the thread count before torch is imported
from op_calls import best, kernel

import engine
import torch
import torch.nn.functional as F

SHAPES = [
    (4, 12, 128, 64, 0, 0.0),
    (4, 12, 197, 64, 0, 0.0),
    (2, 12, 256, 64, 1, 0.0),
    (12, 6, 256, 64, 1, 0.0),
    (1, 12, 512, 64, 1, 0.0),
    (1, 12, 1024, 64, 1, 0.0),
    (1, 4, 4096, 64, 1, 0.0),
    (4, 12, 128, 64, 0, 0.1),
    (4, 12, 197, 64, 0, 0.1),
    (2, 12, 256, 64, 1, 0.1),
    (1, 12, 512, 64, 1, 0.1),
    (1, 12, 1024, 64, 1, 0.1),
]


def main() -> None:
    torch.set_num_threads(1)
    cx = engine.Ctx(threads=False)
    argv = [a for a in sys.argv[1:] if a != "--bf16"]
    dtype = torch.bfloat16 if len(argv) < len(sys.argv) - 1 else torch.float32
    shapes = [tuple(float(v) for v in s.split(",")) for s in argv] or SHAPES
    print(f"{'B,H,T,D,causal,p':>24}  own fwd, bwd (GFLOP/s)          torch fwd, fwd+bwd   torch/own")
    for *dims, p in shapes:
        b, h, t, d, causal = map(int, dims)
        q, k, v, dy = (torch.randn(b, t, h, d).to(dtype).transpose(1, 2) for _ in range(4))
        y, lse = torch.empty(b, h, t, d, dtype=dtype), torch.empty(b, h, t)
        dq, dk, dv, dm = (torch.empty(b, h, t, d, dtype=dtype) for _ in range(4))
        attrs = {"causal": causal, "dropout": p}
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

        def forward(leaves: list[torch.Tensor] = leaves, p: float = p, causal: int = causal) -> torch.Tensor:
            return F.scaled_dot_product_attention(*leaves, dropout_p=p, is_causal=bool(causal))

        calls = [
            kernel(cx, "attention", attrs, [q, k, v], [y, lse]),
            kernel(cx, "attention_grad", attrs, [dy, q, k, v, None, y, lse], [dq, dk, dv, dm[:0, 0, 0, 0]]),
            forward,
            lambda forward=forward, leaves=leaves, dy=dy: torch.autograd.grad(forward(), leaves, dy),
        ]
        own_f, own_b, torch_f, torch_fb = [1e3 * x for x in best(calls, 0.4)]
        shape, ratio = f"{b},{h},{t},{d},{causal},{p}", torch_fb / (own_f + own_b)
        mflop = 4 * b * h * d * (t * (t + 1) / 2 if causal else t * t) / 1e6
        own = f"{own_f:6.2f} {own_b:6.2f} ({mflop / own_f:3.0f}, {2.5 * mflop / own_b:3.0f})"
        print(f"{shape:>24}  {own}     {torch_f:6.2f} {torch_fb:6.2f}    {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
