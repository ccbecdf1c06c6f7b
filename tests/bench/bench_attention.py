# ruff: noqa: I001 - bench_gemm finds the engine and fixes the thread count
"""Milliseconds of attention forward and backward on one thread: the engine's kernel and torch's
scaled_dot_product_attention, interleaved, CPU time of the thread, best of n.

    python tests/bench/bench_attention.py [B,H,T,D,causal,dropout ...]
"""

from __future__ import annotations

import ctypes as C
import sys
from collections.abc import Callable

from bench_gemm import best  # sets the thread count before torch is imported

import engine
import torch
import torch.nn.functional as F

SHAPES = [
    (4, 12, 128, 64, 0, 0.0),
    (2, 12, 256, 64, 1, 0.0),
    (12, 6, 256, 64, 1, 0.0),
    (1, 12, 512, 64, 1, 0.0),
    (1, 12, 1024, 64, 1, 0.0),
    (4, 12, 128, 64, 0, 0.1),
    (2, 12, 256, 64, 1, 0.1),
    (1, 12, 512, 64, 1, 0.1),
]


class Attr(C.Structure):
    class Value(C.Union):
        _fields_ = [("i", C.c_int64), ("f", C.c_double), ("p", C.c_void_p)]

    _anonymous_ = ("value",)
    _fields_ = [("name", C.c_char_p), ("kind", C.c_uint8), ("n", C.c_uint32), ("value", Value)]


class Node(C.Structure):
    _fields_ = [
        ("op", C.c_void_p),
        ("in_", C.c_uint32),
        ("out", C.c_uint32),
        ("n_in", C.c_uint16),
        ("n_out", C.c_uint16),
        ("n_attr", C.c_uint16),
        ("segment", C.c_uint16),
        ("phase", C.c_uint8),
        ("attr", C.c_void_p),
        ("scope", C.c_uint32),
        ("rng", C.c_uint64),
        ("prep", C.c_void_p),
    ]


class Args(C.Structure):
    _fields_ = [
        ("node", C.c_void_p),
        ("attr", C.c_void_p),
        ("n_attr", C.c_int),
        ("n_in", C.c_int),
        ("n_out", C.c_int),
        ("in_", C.c_void_p),
        ("out", C.c_void_p),
        ("scratch", C.c_void_p),
        ("seed", C.c_uint64),
    ]


class Op(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("doc", C.c_char_p),
        ("kind", C.c_uint8),
        ("min_in", C.c_int8),
        ("max_in", C.c_int8),
        ("n_out", C.c_int8),
        ("inplace", C.c_uint32),
        ("dense", C.c_uint32),
        ("optional", C.c_uint32),
        ("random", C.c_bool),
        ("meta", C.c_bool),
        ("infer", C.c_void_p),
        ("view", C.c_void_p),
        ("grad", C.c_void_p),
        ("scratch", C.CFUNCTYPE(C.c_int64, C.c_void_p, C.c_void_p)),
        ("run", C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p)),
    ]


def kernel(cx: engine.Ctx, name: str, attrs: dict[str, float], ins: list[torch.Tensor | None], outs: list[torch.Tensor]) -> Callable[[], None]:
    """One call of an operator's kernel: no graph, no allocation."""
    op = Op.in_dll(engine.lib, "om_op_" + name)
    attr = (Attr * len(attrs))()
    for a, (key, v) in zip(attr, attrs.items()):
        a.name, a.kind = key.encode(), int(isinstance(v, float))
        if isinstance(v, float):
            a.f = v
        else:
            a.i = v
    i, o = (engine.Tensor * len(ins))(*map(engine.tensor, ins)), (engine.Tensor * len(outs))(*map(engine.tensor, outs))
    node = Node(op=C.addressof(op), rng=7)
    args = Args(
        node=C.addressof(node),
        attr=C.addressof(attr),
        n_attr=len(attrs),
        n_in=len(ins),
        n_out=len(outs),
        in_=C.addressof(i),
        out=C.addressof(o),
        seed=3,
    )
    scratch = torch.empty(op.scratch(cx.p, C.byref(args)) + 64, dtype=torch.uint8)
    args.scratch = (scratch.data_ptr() + 63) & ~63
    keep = (attr, i, o, node, scratch, ins, outs)

    def call() -> None:
        assert keep
        cx.check(op.run(cx.p, C.byref(args)))

    return call


def main() -> None:
    torch.set_num_threads(1)
    cx = engine.Ctx(threads=False)
    shapes = [tuple(float(v) for v in s.split(",")) for s in sys.argv[1:]] or SHAPES
    print(f"{'B,H,T,D,causal,p':>24}  own fwd, bwd      torch fwd, fwd+bwd   torch/own")
    for *dims, p in shapes:
        b, h, t, d, causal = map(int, dims)
        q, k, v, dy = (torch.randn(b, t, h, d).transpose(1, 2) for _ in range(4))
        y, lse = torch.empty(b, h, t, d), torch.empty(b, h, t)
        dq, dk, dv, dm = (torch.empty(b, h, t, d) for _ in range(4))
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
        print(f"{shape:>24}  {own_f:6.2f} {own_b:6.2f}     {torch_f:6.2f} {torch_fb:6.2f}    {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
