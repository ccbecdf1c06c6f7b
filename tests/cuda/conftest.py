"""A CUDA device made of ordinary memory: fake_cuda.c takes libcuda.so.1's place, and the optimizers' seam
(ortmodule.optim.cuda.host) says that every tensor lies on device 0 unless a test placed it elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ortmodule import _C
from ortmodule.optim import cuda

ROOT = Path(__file__).parents[2]
READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.item, torch.ops.aten.equal, torch.ops.aten.is_nonzero, torch.ops.aten.nonzero)


class Late:
    """ortmodule.optim.cuda.Late: the copy is made when the device has come there, which the host learns from sync()
    only."""

    def __init__(self, gpu: Gpu, source: torch.Tensor) -> None:
        self.gpu, self.source = gpu, source
        self.values: list[float] | None = None
        self.under_way = False

    def begin(self) -> None:
        if not self.under_way:
            self.under_way = True
            self.gpu.late_copies.append(self)
            if not self.gpu.deferred:
                self.gpu.arrive()

    def arrived(self) -> list[float] | None:
        if self.values is None:
            return None
        values, self.values, self.under_way = self.values, None, False
        return values


class Gpu(TorchDispatchMode):
    """Registers the memory of every tensor torch makes while a test runs, and forgets it when the tensor dies."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        super().__init__()
        self.lib = lib
        self.places: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self.default = 0
        self.use = 0  # which of a device's streams is current
        self.unread = False  # reading a tensor's values on the host is an error
        self.deferred = False
        self.late_copies: list[Late] = []
        self.in_use: list[torch.Tensor] = []  # by launches that have not run
        self.pool: list[torch.Tensor] | None = None  # while capturing: the graph's memory, which outlives its tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not (self.unread and func.overloadpacket in READS), f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, torch.Tensor):
                self.add(t)
        return out

    def add(self, t: torch.Tensor, device: int = -1) -> torch.Tensor:
        """device -1: fit for every one, until something says which (what torch makes inside a step)."""
        storage = t.untyped_storage()
        if self.deferred:
            self.in_use.append(t)  # CUDA's allocator hands memory on in the order of the stream
        if storage.nbytes():
            at = ctypes.c_void_p(storage.data_ptr())
            self.lib.fake_register(at, ctypes.c_size_t(storage.nbytes()), device)
            weakref.finalize(t, self.lib.fake_unregister, at)
        return t

    # --- the seam -----------------------------------------------------------------------------------

    def index(self, t: torch.Tensor) -> int:
        return getattr(t, "fake_device", self.default)

    def stream(self, index: int) -> int:
        return self.lib.fake_stream(index, self.use)

    def empty(self, size: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        base = torch.empty(size * dtype.itemsize + 64, dtype=torch.uint8)  # CUDA aligns to 512 bytes, malloc to 16
        out = base[-base.data_ptr() % 64 :][: size * dtype.itemsize].view(dtype)
        if self.pool is not None:
            self.pool.append(out)
        return self.add(out, self.index(like))

    def late(self, source: torch.Tensor) -> Late:
        return Late(self, source)

    # --- what tests do ------------------------------------------------------------------------------

    def put(self, t: torch.Tensor, device: int) -> torch.Tensor:
        t.fake_device = device  # type: ignore[attr-defined]
        return self.add(t, device) if device >= 0 else t

    @contextlib.contextmanager
    def capture(self):
        """Yields a function that replays what was captured inside."""
        graph: list[int] = []
        self.pool = pool = []

        def replay() -> None:
            assert pool is not None and self.lib.fake_replay(graph[0]) == 0, self.message()

        self.lib.fake_capture_begin(self.stream(0))
        try:
            yield replay
        finally:
            graph.append(self.lib.fake_capture_end(self.stream(0)))
            self.pool = None

    def calls(self, name: str) -> int:
        return self.lib.fake_calls(name.encode())

    def fail(self, name: str, nth: int = 1, code: int = 999) -> None:
        self.lib.fake_fail(name.encode(), nth, code)

    def message(self) -> str:
        return self.lib.fake_message().decode()

    def defer(self, on: bool = True) -> None:
        self.deferred = on
        self.lib.fake_defer(int(on))

    def sync(self) -> None:
        assert self.lib.fake_sync() == 0, self.message()
        self.arrive()

    def arrive(self) -> None:
        unread, self.unread = self.unread, False
        for late in self.late_copies:
            late.values = late.source.tolist()
        self.late_copies, self.in_use, self.unread = [], [], unread


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory):
    if not _C.cuda_archs():
        pytest.skip("the extension was built without nvcc: it has no CUDA kernels")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wno-unused-function", "-Wno-missing-braces", "-fPIC", "-shared", "-fvisibility=hidden"]
    source = str(ROOT / "tests/cuda/fake_cuda.c")
    subprocess.run([compiler, *flags, f"-I{ROOT / 'csrc'}", source, "-Wl,-soname,libcuda.so.1", "-o", str(out), "-lm"], check=True)
    lib = ctypes.CDLL(str(out))  # from now on dlopen("libcuda.so.1") finds it by its name
    lib.fake_stream.restype = ctypes.c_void_p
    lib.fake_message.restype = ctypes.c_char_p
    lib.fake_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    lib.fake_unregister.argtypes = [ctypes.c_void_p]
    lib.fake_capture_begin.argtypes = lib.fake_capture_end.argtypes = [ctypes.c_void_p]
    return lib


@pytest.fixture
def gpu(fake_cuda, monkeypatch):
    torch.set_num_threads(1)
    mode = Gpu(fake_cuda)
    monkeypatch.setattr(cuda, "host", mode)
    fake_cuda.fake_defer(0)
    fake_cuda.fake_fail(b"", 0, 0)
    with mode:
        yield mode
    fake_cuda.fake_defer(0)
    fake_cuda.fake_fail(b"", 0, 0)
    fake_cuda.fake_trust(0)
    assert fake_cuda.fake_depth() == 0, "a context was left current"
