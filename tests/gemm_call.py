"""om_gemm called directly (csrc/cpu/gemm.h): C = alpha A B + beta C + bias on torch's memory, any strides."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable

import torch

import engine

I64, PTR = C.c_int64, C.c_void_p


class Gemm(C.Structure):
    _fields_ = [
        ("dtype", C.c_int),
        ("wide_c", C.c_bool),
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
        ("packed", PTR),
    ]


class How(C.Structure):
    _fields_ = [
        ("flags", C.c_char * 7),
        ("ld", C.c_int * 3),
        ("workers", C.c_int),
        ("type", PTR),
        ("sizes", I64 * 14),
        ("scratch", I64),
        ("fence", I64 * 8),
    ]


def _prepared(cx: engine.Ctx, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: int,
              bias: torch.Tensor | None) -> tuple[Gemm, How]:
    g = Gemm(
        dtype=engine.TORCH.index(a.dtype),
        wide_c=c.dtype != a.dtype,
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
        alpha=alpha,
        beta=beta,
        bias=None if bias is None else bias.data_ptr(),
        batch=1,
    )
    how = How()
    cx.check(engine.lib.om_gemm_prepare(cx.p, C.byref(g), C.byref(how)))
    assert not any(how.fence), "om_gemm_how has grown: How is to be written anew"
    engine.lib.om_gemm_packed_size.restype = I64
    return g, how


def packs(cx: engine.Ctx, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float = 1.0, beta: int = 0,
          bias: torch.Tensor | None = None) -> bool:
    """Is there such a product for packed operands?"""
    return bool(engine.lib.om_gemm_packed_size(C.byref(_prepared(cx, a, b, c, alpha, beta, bias)[1])) > 0)


def product(cx: engine.Ctx, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float = 1.0, beta: int = 0,
            bias: torch.Tensor | None = None, packed: bool = False) -> Callable[[], None]:
    """A call that can be made again and again: prepared once, scratch taken once. packed: b, too, and then not read.
    c, bias: of a's type, or both f32 where that is narrower."""
    g, how = _prepared(cx, a, b, c, alpha, beta, bias)
    lib = engine.lib
    scratch = torch.full((how.scratch + 192,), 0xA5, dtype=torch.uint8)
    g.scratch = (scratch.data_ptr() + 63) & ~63
    end = g.scratch - scratch.data_ptr() + how.scratch
    own = torch.empty(0)
    if packed:
        size = lib.om_gemm_packed_size(C.byref(how))
        assert size > 0, "no product for packed operands"
        own = torch.full((size + 128,), 0xA5, dtype=torch.uint8)
        g.packed = (own.data_ptr() + 63) & ~63
        lib.om_gemm_pack(cx.p, C.byref(g), C.byref(how), PTR(g.packed))
        last = g.packed - own.data_ptr() + size
        assert own[last : last + 64].eq(0xA5).all(), "wrote past what is packed"
        g.b = None
    keep = (a, b, c, bias, scratch, own)

    def call() -> None:
        assert keep
        cx.check(lib.om_gemm_run(cx.p, C.byref(g), C.byref(how)))
        assert scratch[end : end + 64].eq(0xA5).all(), "wrote past its scratch"

    return call


def kernel(cx: engine.Ctx, dtype: torch.dtype) -> str:
    """The kernel of a product in bf16 or f32 that the engine computes itself, as om_gemm_amx_avx512."""
    g = Gemm(dtype=engine.TORCH.index(dtype), m=64, n=64, k=64, rsa=64, csa=1, rsb=64, csb=1, rsc=64, csc=1, alpha=1.0, batch=1)
    how = How()
    cx.check(engine.lib.om_gemm_prepare(cx.p, C.byref(g), C.byref(how)))
    names = [f"om_gemm_{k}_{i}" for k in ("amx", "bf16", "isa") for i in ("generic", "avx2", "avx512")]
    return {C.addressof(C.c_char.in_dll(engine.lib, n)): n for n in names if hasattr(engine.lib, n)}[how.type]
