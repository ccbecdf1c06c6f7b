"""Direct access to the C engine for tests: build/libom.so by ctypes, graphs in text form, run by the interpreter.

    outs, grads = run("graph { input x: f64[2, 3] \\n y = tanh(x) \\n output y }", {"x": x}, wanted=["x"], dys=[dy])
"""

from __future__ import annotations

import ctypes as C
import os
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RANK = 8
NAMES = ["", "f32", "f64", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool", "opaque"]
TORCH = [None, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool, None]


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("dim", C.c_int64 * RANK), ("stride", C.c_int64 * RANK), ("dtype", C.c_uint8),
                ("rank", C.c_uint8), ("device", C.c_int16)]


PFOR = C.CFUNCTYPE(None, C.c_void_p, C.c_int64, C.c_int64, C.c_void_p, C.c_void_p)
NTHR = C.CFUNCTYPE(C.c_int, C.c_void_p)
ALLOC = C.CFUNCTYPE(C.c_void_p, C.c_void_p, C.c_size_t)
FREE = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_size_t)


class Services(C.Structure):
    _fields_ = [("user", C.c_void_p), ("alloc", ALLOC), ("free", FREE), ("parallel_for", PFOR), ("num_threads", NTHR),
                ("sgemm", C.c_void_p), ("dgemm", C.c_void_p), ("gemm_bf16", C.c_void_p), ("conv", C.c_void_p), ("log", C.c_void_p)]


class EngineError(RuntimeError):
    pass


def load(path: str) -> C.CDLL:
    lib = C.CDLL(path)
    for name in ("om_ctx_new", "om_alloc"):
        getattr(lib, name).restype = C.c_void_p
    lib.om_ctx_message.restype = C.c_char_p
    lib.om_ctx_free.argtypes = lib.om_ctx_message.argtypes = lib.om_ctx_clear.argtypes = [C.c_void_p]
    lib.om_graph_free.argtypes = [C.c_void_p]
    return lib


lib = load(os.environ.get("OM_LIB", str(ROOT / "build" / "libom.so")))

# A "pool" that cuts every parallel_for into uneven pieces and runs them last to first: kernels must not care.
_piece = C.CFUNCTYPE(None, C.c_void_p, C.c_int64, C.c_int64)


@PFOR
def _parallel_for(_user, n, grain, fn, arg):
    cuts = sorted({0, n, *(c for c in (max(grain, n // 3), max(2 * grain, n - grain)) if 0 < c < n)})
    f = _piece(fn)
    for b, e in reversed(list(zip(cuts, cuts[1:]))):
        f(arg, b, e)


@NTHR
def _num_threads(_user):
    return 2


_services = Services(parallel_for=_parallel_for, num_threads=_num_threads)


# users of a context: itself and its graphs. A garbage collector may finalise them in any order.
_owners: dict[int, int] = {}


def own(ctx: Ctx) -> int:
    _owners[ctx.p.value] += 1
    return ctx.p.value


def release(ctx: int) -> None:
    _owners[ctx] -= 1
    if not _owners[ctx]:
        del _owners[ctx]
        lib.om_ctx_free(ctx)


class Ctx:
    """One engine context; `check` turns a status into an exception with the engine's message."""

    def __init__(self, threads: bool = True, device: str = "cpu"):
        self.p = C.c_void_p(lib.om_ctx_new(C.byref(_services) if threads else None))
        _owners[self.p.value] = 1
        if device == "checking":
            lib.om_checking_use(self.p)
        elif device == "cuda":
            torch.cuda.init()  # whose allocator gives memory
            torch.backends.cudnn.allow_tf32 = False  # in convolutions, which follow it
            self.check(lib.om_cuda_use(self.p, 0))
        elif device == "cuda-fake":
            from cuda import fake

            self.check(fake.use(lib, self.p))

    def check(self, status: int) -> None:
        if status:
            msg = lib.om_ctx_message(self.p).decode(errors="replace")
            lib.om_ctx_clear(self.p)
            raise EngineError(msg or f"status {status} without a message")

    def __del__(self):
        if getattr(self, "p", None):
            release(self.p.value)


def tensor(t: torch.Tensor | None) -> Tensor:
    if t is None:
        return Tensor()
    r = Tensor(data=t.data_ptr(), dtype=TORCH.index(t.dtype), rank=t.dim(), device=-1)
    for i in range(t.dim()):
        r.dim[i], r.stride[i] = t.shape[i], t.stride(i)
    return r


def to_torch(t: Tensor) -> torch.Tensor:
    """Copies a dense engine tensor."""
    shape = [t.dim[i] for i in range(t.rank)]
    out = torch.empty(shape, dtype=TORCH[t.dtype])
    if out.numel():
        C.memmove(out.data_ptr(), t.data, out.numel() * out.element_size())
    return out


class Graph:
    def __init__(self, cx: Ctx, p: C.c_void_p):
        self.cx, self.p, self.owner = cx, p, own(cx)

    @staticmethod
    def parse(text: str, cx: Ctx | None = None) -> Graph:
        cx = cx or Ctx()
        p = C.c_void_p()
        cx.check(lib.om_graph_parse(cx.p, text.encode(), C.byref(p)))
        return Graph(cx, p)

    @staticmethod
    def onnx(data: bytes, cx: Ctx | None = None) -> Graph:
        cx = cx or Ctx()
        p = C.c_void_p()
        cx.check(lib.om_onnx_read(cx.p, data, C.c_size_t(len(data)), C.byref(p)))
        return Graph(cx, p)

    def text(self) -> str:
        s = C.c_char_p()
        self.cx.check(lib.om_graph_print(self.p, C.byref(s)))
        out = s.value.decode()
        lib.om_text_free(self.cx.p, s)
        return out

    def verify(self) -> Graph:
        self.cx.check(lib.om_verify(self.p))
        return self

    def grad(self, wanted: list[int], arriving: list[int]) -> Graph:
        p = C.c_void_p()
        self.cx.check(lib.om_grad_build(self.cx.p, self.p, bytes(wanted), bytes(arriving), C.byref(p)))
        return Graph(self.cx, p)

    def apply(self, *passes: str) -> Graph:
        """Runs passes by symbol name (om_pass_<name>)."""
        arr = (C.c_void_p * (len(passes) + 1))()
        for i, name in enumerate(passes):
            arr[i] = C.addressof(C.c_char.in_dll(lib, "om_pass_" + name))
        p = C.c_void_p(self.p.value)
        status = lib.om_passes_run(self.cx.p, arr, C.byref(p))
        self.p = p  # after a failure: the last graph that was whole
        self.cx.check(status)
        return self

    def run(self, inputs: list[torch.Tensor], n_out: int, seed: int = 0) -> list[torch.Tensor | None]:
        """n_out = outputs + writes + gradients."""
        ins = (Tensor * max(1, len(inputs)))(*[tensor(t) for t in inputs])
        outs = (Tensor * max(1, n_out))()
        self.cx.check(lib.om_interpret(self.cx.p, self.p, ins, C.c_uint64(seed), outs))
        res = []
        for i in range(n_out):
            res.append(to_torch(outs[i]) if outs[i].dtype else None)
            if outs[i].data:
                lib.om_free(self.cx.p, C.c_void_p(outs[i].data))
        return res

    def __del__(self):
        if getattr(self, "p", None):
            lib.om_graph_free(self.p)
        if getattr(self, "owner", None):
            release(self.owner)


def _count(text: str, word: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip().startswith(word + " "))


def run(text: str | Graph, inputs: list[torch.Tensor], wanted: list[int] | None = None, dys: list[torch.Tensor | None] | None = None,
        seed: int = 0, passes: tuple[str, ...] = (), device: str | None = None) -> tuple[list, list]:
    """Forward (and, with dys, backward) of a graph. inputs: one per graph input in order; wanted: 0/1 per input
    (default: all floats); dys: one per output, None = does not arrive. Returns (outputs + writes, gradients of the
    wanted inputs in order).
    device: None is the interpreter, or what OM_DEVICE says; "cpu", "checking" (tests/device), "cuda-fake" (tests/cuda/fake.py) and
    "cuda" (a GPU) plan the step, after the passes of every model in the place of `passes`."""
    device = device or os.environ.get("OM_DEVICE")
    if device:
        from device import steps

        return steps.run(text if isinstance(text, str) else text.text(), inputs, wanted, dys, seed, device)
    g = Graph.parse(text) if isinstance(text, str) else text
    src = g.text()
    n_out, n_write = _count(src, "output"), _count(src, "write")
    if dys is None:
        if passes:
            g.apply(*passes)
        return g.run(inputs, n_out + n_write, seed), []
    if wanted is None:
        wanted = [int(t.is_floating_point()) for t in inputs]
    j = g.grad(wanted, [int(d is not None) for d in dys])
    if passes:
        j.apply(*passes)
    res = j.run(inputs + [d for d in dys if d is not None], n_out + n_write + sum(wanted), seed)
    return res[:n_out + n_write], res[n_out + n_write:]


def run_onnx(data: bytes, inputs: list[torch.Tensor], **kw) -> tuple[list, list]:
    return run(Graph.onnx(data), inputs, **kw)
