"""The fake GPU (fake_gpu.cpp, fake_driver.cpp, build/fake/libcuda.so.1) and its matrix products (fake_blaslt.cpp) under the engine of the tests: `use(ctx)` makes a context's plans
run on the CUDA device, whose kernels are emulated. OM_FAKE_SEED: in which order threads and blocks take turns.
OM_FAKE_LATE=0: what is queued runs at once, not when somebody waits.
OM_FAKE_REUSE=1: blocks come back in the order of their stream, as from the driver's pool, so that steps repeat their
addresses. OM_FAKE_KEEP=1: the engine keeps blocks for the next step, as it does where
not told otherwise (here it is, so that memory is poisoned and watched). OM_FAKE_STRICT=1: launches reach blocks of the device alone. OM_FAKE_BLAS=0: there is no cuBLASLt; a path: that one. OM_FAKE_TORCH=path: a libtorch_cuda.so, whose allocator gives memory (fake_allocator.cpp). OM_FAKE_SM: its compute capability (90).
OM_FAKE_PROGRAMS=1: chains are compiled, all of them, by the fake NVRTC (fake_nvrtc.cpp); with OM_FAKE_CACHE=directory modules are kept there."""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAILURES, LAUNCHES, BLOCKS, QUEUED, WAITS, GRAPHS, PLAYED, RECORDED, EVENTS = range(9)  # fake_gpu_count

gpu = C.CDLL(os.environ.get("OM_FAKE_LIB", str(ROOT / "build" / "fake" / "libcuda.so.1")))  # dlopen finds it by its name
_blas = os.environ.get("OM_FAKE_BLAS", "1")
blas = C.CDLL(str(ROOT / "build" / "fake" / "libcublasLt.so.13") if _blas == "1" else _blas) if _blas != "0" else None
rtc = C.CDLL(str(ROOT / "build" / "fake" / "libnvrtc.so.13")) if os.environ.get("OM_FAKE_PROGRAMS", "0") != "0" else None
torch_memory = C.CDLL(os.environ["OM_FAKE_TORCH"]) if "OM_FAKE_TORCH" in os.environ else None
if torch_memory:
    torch_memory.fake_torch_blocks.restype, torch_memory.fake_torch_block_stream.restype = C.c_long, C.c_size_t
gpu.fake_gpu_count.restype = gpu.fake_gpu_calls.restype = gpu.fake_gpu_ran.restype = gpu.fake_gpu_touches.restype = C.c_long
gpu.fake_gpu_calls.argtypes = [C.c_char_p]
gpu.fake_gpu_fail.argtypes = [C.c_char_p, C.c_long, C.c_uint]
gpu.fake_gpu_message.restype = C.c_char_p
gpu.fake_gpu_seed.argtypes = [C.c_uint64]
gpu.fake_gpu_unstable.argtypes = [C.c_long]


def count(what: int) -> int:
    return int(gpu.fake_gpu_count(what))


def message() -> str:
    return gpu.fake_gpu_message().decode()


def products() -> int:
    """That the library has done."""
    return int(blas.fake_blaslt_products()) if blas else 0


def torch_blocks() -> int:
    """Of the allocator, on loan."""
    return int(torch_memory.fake_torch_blocks()) if torch_memory else 0


def late(on: bool) -> None:
    gpu.fake_gpu_late(int(on))


def fail(entry: str, nth: int, code: int) -> None:
    """The nth call of the entry point from now on returns the code and does nothing; nth 0: none."""
    gpu.fake_gpu_fail(entry.encode(), nth, code)


def calls(entry: str) -> int:
    return int(gpu.fake_gpu_calls(entry.encode()))


def ran(kernel: str) -> int:
    """How often om_k_<kernel> has."""
    return int(gpu.fake_gpu_ran(f"om_k_{kernel}".encode()))


def unstable(blocks: int) -> None:
    """The next blocks have addresses of their own."""
    gpu.fake_gpu_unstable(blocks)


def seed(n: int) -> None:
    gpu.fake_gpu_seed(n)


gpu.fake_gpu_reuse(int(os.environ.get("OM_FAKE_REUSE", "0")))
gpu.fake_gpu_strict(int(os.environ.get("OM_FAKE_STRICT", "0")))
gpu.fake_gpu_capability(int(os.environ.get("OM_FAKE_SM", "90")))
seed(int(os.environ.get("OM_FAKE_SEED", "0")))
late(os.environ.get("OM_FAKE_LATE", "1") != "0")


class Range(C.Structure):
    """What a launch reads (mode 1), writes (2) or both (3)."""

    _fields_ = [("at", C.c_void_p), ("size", C.c_int64), ("mode", C.c_int)]


change: Callable[[Any], None] | None = None  # set before a context is made: done to the ranges that launches declare


@C.CFUNCTYPE(None, C.POINTER(Range), C.c_int)
def _declare_changed(ranges: Any, n: int) -> None:
    assert change is not None
    change(ranges)
    gpu.fake_gpu_declare(ranges, n)


def declare(lib: C.CDLL) -> None:
    """Launches of this engine say what they touch."""
    function = gpu.fake_gpu_declare if change is None else _declare_changed
    C.c_void_p.in_dll(lib, "om_cuda_declare").value = C.cast(function, C.c_void_p).value


def use(lib: C.CDLL, ctx: C.c_void_p, ordinal: int = 0) -> int:
    declare(lib)
    lib.om_cuda_keep(C.c_bool(os.environ.get("OM_FAKE_KEEP", "0") != "0"))
    if rtc and not told:
        compile_chains(lib)
    return lib.om_cuda_use(ctx, ordinal)


told = False  # what is compiled


def compile_chains(lib: C.CDLL, when: int = 2, library: str = "") -> None:
    """when: 0 never, 1 where it pays, 2 always."""
    global told
    told = True
    os.environ.setdefault("OM_FAKE_SOURCE", str(ROOT))
    lib.om_cuda_programs(when, library.encode(), os.environ.get("OM_FAKE_CACHE", "").encode())


def programs(lib: C.CDLL, what: int = 0) -> int:
    """Chains compiled (0), calls of NVRTC (1), modules found in the cache (2)."""
    lib.om_cuda_program_count.restype = C.c_long
    return int(lib.om_cuda_program_count(what))


def programs_reason(lib: C.CDLL) -> str:
    """Why not all chains are compiled."""
    lib.om_cuda_program_reason.restype = C.c_char_p
    return (lib.om_cuda_program_reason() or b"").decode()


def host_ops(lib: C.CDLL) -> list[str]:
    """Operators that the CPU did."""
    lib.om_cuda_host_op.restype = C.c_char_p
    found = []
    while name := lib.om_cuda_host_op(len(found)):
        found.append(name.decode())
    return found
