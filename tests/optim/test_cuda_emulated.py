"""The CUDA optimizer kernels, run on the host by csrc/cuda/host_emulation.h, against the CPU kernels (which are tested
against fp64); and compiled by nvcc for every architecture where there is an nvcc."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ortmodule import _C

ROOT = Path(__file__).parents[2]
SIZES = [(1,), (3,), (0,), (257,), (1021,), (16384,), (16385,), (40009,)]
TYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 0}
H = dict(lr=0.013, b1=0.87, b2=0.983, eps=1e-3, wd=0.11)


class Emulated:
    """csrc/cuda/optim.cu as a library of its own; blocks one after the other, or `threads` of them at once on host
    threads."""

    def __init__(self, home: Path, *flags: str) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if not compiler:
            pytest.skip("no C compiler")
        out = home / f"emulated{len(list(home.iterdir()))}.so"
        always = ["-std=gnu11", "-O1", "-Wall", "-Wno-unused-function", "-Wno-missing-braces", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
        subprocess.run([compiler, *always, *flags, str(ROOT / "tests/optim/cuda_emulated.c"), "-o", str(out), "-lm", "-lpthread"], check=True)
        self.lib = ctypes.CDLL(str(out))
        self.lib.host_threads.restype = ctypes.c_long

    def __call__(
        self, kind, p, g, m, v, w, d, steps, *, store=0, seed=0, scalars=None, use_norm=False, blocks=1, lag=2, reverse=0, threads=1, **kw
    ):
        n = len(p)
        rows = [[r[i] if r else None for r in (p, g, m, v, w, d)] for i in range(n)]
        ptr = (ctypes.c_void_p * (6 * n))(*[t.data_ptr() if t is not None else None for row in rows for t in row])
        kinds = (ctypes.c_uint8 * (5 * n))(*[TYPE[row[j].dtype] if row[j] is not None else 0 for row in rows for j in (0, 1, 2, 3, 5)])
        numel = (ctypes.c_int64 * n)(*[t.numel() for t in p])
        step = (ctypes.c_void_p * n)(*[s.data_ptr() for s in steps])
        order = ("lr", "b1", "b2", "eps", "wd", "mode", "bias", "momentum", "dampening", "nesterov", "max_norm", "keep")
        values = {**dict.fromkeys(order, 0.0), **H, "bias": 1, "ratio_min": -math.inf, "ratio_max": math.inf, "a": 0, "b": 0, **kw}
        h = (ctypes.c_double * 16)(*[float(values[k]) for k in (*order, "ratio_min", "ratio_max", "a", "b")])
        scalars = torch.tensor([1.0, 0.0, 0.0, 1.0]) if scalars is None else scalars
        launch = (ctypes.c_int * 3)(blocks, lag, reverse)
        at = ctypes.c_void_p(scalars.data_ptr())
        self.lib.host_threads(threads)
        bad = self.lib.emulate(kind, n, numel, ptr, kinds, step, store, ctypes.c_uint64(seed), h, at, int(use_norm), launch)
        self.lib.host_threads(1)
        if bad:
            raise RuntimeError("a block waited for ever")
        return scalars


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def emulate(home):
    return Emulated(home)


def aligned(x, shift):
    """A copy whose memory starts `shift` elements after a 64-byte boundary."""
    base = torch.empty(x.numel() + 64, dtype=x.dtype)
    start = (-base.data_ptr() // x.element_size()) % (64 // x.element_size()) + shift
    out = base[start : start + x.numel()].view(x.shape)
    return out.copy_(x)


def make(dtype, shift=0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [aligned(torch.randn(s, generator=gen).to(dtype), shift) for s in SIZES]


def copies(*lists):
    return [[x.clone() for x in xs] if xs else None for xs in lists]


def same(got, want, tol=2e-6):
    for a, b in zip(got, want):
        if a.numel():
            assert ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item() <= tol


CASES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("dtype,gtype", CASES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_adam(emulate, dtype, gtype, shift, mode):
    p, g, m, v = make(dtype, shift, 1), make(gtype, shift, 2), make(torch.float32, shift, 3), [x.abs() for x in make(torch.float32, shift, 4)]
    q, h, n, w = copies(p, g, m, v)
    steps, other = [torch.tensor(4.0) for _ in p], [torch.tensor(4.0) for _ in p]
    emulate(0, p, g, m, v, None, None, steps, mode=mode, scalars=torch.tensor([64.0, 0, 0, 1]))
    _C.adam_step(q, h, n, w, other, None, 0, 0, H["lr"], H["b1"], H["b2"], H["eps"], H["wd"], 1 / 64, mode, True)
    same(p, q, 2e-6 if dtype == torch.float32 else 8e-3 if dtype == torch.bfloat16 else 1e-3)
    same(m, n)
    same(v, w)
    assert all(s.item() == 5 for s, x in zip(steps, p) if x.numel())


@pytest.mark.parametrize("store", [1, 2, 3])
def test_storage_of_weights(emulate, store):
    p, g, m, v = make(torch.bfloat16, 0, 1), make(torch.float32, 0, 2), make(torch.float32, 0, 3), [x.abs() for x in make(torch.float32, 0, 4)]
    w = {1: [x.float() for x in p], 2: [torch.zeros_like(x, dtype=torch.int16) for x in p], 3: None}[store]
    q, h, n, u, w2 = copies(p, g, m, v, w)
    steps = [torch.tensor(0.0) for _ in p]
    emulate(0, p, g, m, v, w, None, steps, mode=2, store=store, seed=77)
    seed = 77 + 0x9E3779B97F4A7C15  # the kernels add the step's share themselves
    _C.adam_step(q, h, n, u, [torch.tensor(0.0) for _ in p], w2, store, seed, H["lr"], H["b1"], H["b2"], H["eps"], H["wd"], 1.0, 2, True)
    for i, (a, b) in enumerate(zip(p, q)):
        if store == 2:
            a, b = (((x.view(torch.int16).int() << 16) + r.int()).view(torch.float32) for x, r in ((a, w[i]), (b, w2[i])))
            same([a], [b], 1e-6)
        elif a.numel():
            # the same random words: neighbours differ only where the last bit of the f32 result does
            assert (a != b).double().mean().item() <= 2e-3 + 1.5 / a.numel() * (a != b).sum().item()
            assert ((a.float() - b.float()).abs() <= 2**-7 * b.float().abs() + 1e-30).all()
            if store == 3 and a.numel() > 1000:
                assert (a != b).double().mean().item() < 0.01


@pytest.mark.parametrize("dtype,gtype", CASES)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", [2, 4])
def test_lamb(emulate, dtype, gtype, keep, bad, kind):
    p, g, m, v = make(dtype, 0, 1), make(gtype, 0, 2), make(torch.float32, 0, 3), [x.abs() for x in make(torch.float32, 0, 4)]
    if bad:
        g[4][7], g[7][20000] = math.inf, math.nan
    q, h, n, w = copies(p, g, m, v)
    d = [torch.zeros_like(x, dtype=torch.float32) for x in p]
    before = [x.clone().float() for x in p]
    emulate(kind, p, g, m, v, None, d, [torch.tensor(1.0) for _ in p], keep=keep, ratio_max=20.0)
    _C.lamb_step(q, h, n, w, [torch.tensor(1.0) for _ in p], None, 0, 0, H["lr"], H["b1"], H["b2"], H["eps"], H["wd"], 0.0, 1 - H["b1"], -math.inf,
                 20.0, 1.0, True, False, keep)  # fmt: skip
    tol = 3e-6 if dtype == torch.float32 else 8e-3 if dtype == torch.bfloat16 else 1e-3
    same(p, q, tol)
    same(m, n)
    same(v, w)
    same([b + x for b, x in zip(before, d)], [x.float() for x in q], tol)
    for a, b in zip(g, h):
        assert torch.equal(a.isnan(), b.isnan())
        same([a.nan_to_num(0)], [b.nan_to_num(0)], tol)


def lamb_state(store, gtype=torch.float32):
    """Parameters of LAMB: p, g, m, v, masters, step counters."""
    dtype = torch.float32 if store == 0 else torch.bfloat16
    p, g, m, v = make(dtype, 0, 1), make(gtype, 0, 2), make(torch.float32, 0, 3), [x.abs() for x in make(torch.float32, 0, 4)]
    w = {0: None, 1: [x.float() for x in p], 2: [torch.zeros_like(x, dtype=torch.int16) for x in p], 3: None}[store]
    return p, g, m, v, w, [torch.tensor(1.0) for _ in p]


@pytest.mark.parametrize("store", [0, 1, 2, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_lamb_in_one_launch_has_the_same_bits_whatever_runs_when(emulate, home, store, keep):
    """Any grid, any lag, one block after the other or several at once; and the numbers of three launches."""
    threaded = emulate.threaded = getattr(emulate, "threaded", None) or Emulated(home, "-DEMU_THREADS")
    results = []
    runs = [(1, 0, 1), (1, 3, 1), (5, 1, 1), (3, 1000, 1), (2, 2, 2), (8, 0, 8), (8, 5, 8), (16, 3, 4), (40, 40, 16)]
    for blocks, lag, threads in runs:
        p, g, m, v, w, steps = lamb_state(store)
        g[5][77] = math.inf
        run = threaded if threads > 1 else emulate
        run(4, p, g, m, v, w, None, steps, store=store, seed=7, keep=keep, blocks=blocks, lag=lag, threads=threads)
        results.append([x for list_ in (p, g, m, v, w or []) for x in list_])
        assert all(s.item() == 2 for s, x in zip(steps, p) if x.numel())
    assert threaded.lib.host_threads(1) > 0, "no block has met another"
    for r in results[1:]:
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(r, results[0]))
    p, g, m, v, w, steps = lamb_state(store)
    g[5][77] = math.inf
    emulate(2, p, g, m, v, w, None, steps, store=store, seed=7, keep=keep)
    for a, b in zip(results[0], [x for list_ in (p, g, m, v, w or []) for x in list_]):
        if a.dtype == torch.int16 or a.dtype == torch.bfloat16:
            assert (a != b).sum() <= 1 + 1e-3 * a.numel()
        elif a.numel():
            same([a.nan_to_num(7.0)], [b.nan_to_num(7.0)], 1e-6)


@pytest.mark.parametrize("threads", [1, 4])
def test_lamb_in_one_launch_leaves_a_stopped_step_alone(emulate, home, threads):
    threaded = emulate.threaded = getattr(emulate, "threaded", None) or Emulated(home, "-DEMU_THREADS")
    p, g, m, v, w, steps = lamb_state(0)
    kept = copies(p, g, m, v)
    for found in (1.0, 0.0):  # the step after it finds its counters at the start again
        threaded(4, p, g, m, v, w, None, steps, blocks=6, threads=threads, scalars=torch.tensor([1.0, found, 0.0, 1.0]))
        same_bits = [all(torch.equal(a, b) for a, b in zip(now, then)) for now, then in zip((p, g, m, v), kept)]
        assert same_bits == [bool(found)] * 4
    assert steps[0].item() == 2


def test_a_wrong_order_of_lambs_tickets_is_noticed(home):
    """What the argument that it cannot hang rests on: with the second sweep's tickets first, the emulation finds a
    block waiting for ever."""
    alone = Emulated(home)
    p, g, m, v, w, steps = lamb_state(0)
    with pytest.raises(RuntimeError, match="waited for ever"):
        alone(4, p, g, m, v, w, None, steps, reverse=1, blocks=3)


@pytest.mark.parametrize("lag", [0, 1, 3, 7, 1000])
def test_order_of_lambs_tickets(emulate, lag):
    """Against the rule written out: pieces of the first sweep in order; a span's second sweep, backwards, once `lag`
    more were handed out."""
    gen = torch.Generator().manual_seed(lag)
    numel = [1, 0, 5, 4096, 4097, 16384, 16385, 99999, *torch.randint(0, 40000, (40,), generator=gen).tolist(), 1]
    spans, pieces, chunks = [], [], 0
    for n in numel:
        if n:
            count = -(-n // 4096)
            spans.append(list(range(4 * chunks, 4 * chunks + count)))
            pieces += spans[-1]
            chunks += -(-n // 16384)
    want, given, end = [], 0, 0
    for span in spans:
        end += len(span)
        want += pieces[given : min(len(pieces), end + lag)]
        given = max(given, min(len(pieces), end + lag))
        want += [x | 1 << 31 for x in reversed(span)]
    item = (ctypes.c_uint32 * (2 * len(pieces) + 9))()
    assert emulate.lib.lamb_order(len(numel), (ctypes.c_int64 * len(numel))(*numel), lag, item) == 2 * len(pieces) == len(want)
    assert list(item)[: len(want)] == want and not any(list(item)[len(want) :])


@pytest.mark.parametrize("nesterov,first,momentum", [(0, 1, 0.9), (0, 0, 0.9), (1, 0, 0.9), (0, 1, 0.0)])
def test_sgd(emulate, nesterov, first, momentum):
    p, g, m = make(torch.float32, 1, 1), make(torch.float32, 1, 2), make(torch.float32, 1, 3)
    q, h, n = copies(p, g, m)
    damp = 0.0 if nesterov else 0.2
    steps = [torch.tensor(1.0 - first) for _ in p]
    emulate(1, p, g, m, None, None, None, steps, momentum=momentum, dampening=damp, nesterov=nesterov)
    _C.sgd_step(q, h, n if momentum else None, None, 0, 0, H["lr"], momentum, damp, H["wd"], 1.0, bool(nesterov), bool(first))
    same(p, q)
    if momentum:
        same(m, n)


def test_norm_clip_and_overflow_without_the_host(emulate):
    """norm, found_inf and the clipping divisor are made on the device and read there by the step."""
    p, g, m, v = make(torch.float32, 0, 1), make(torch.float16, 0, 2), make(torch.float32, 0, 3), [x.abs() for x in make(torch.float32, 0, 4)]
    q, h, n, w = copies(p, g, m, v)
    norm, _ = _C.norm(g, 2.0, False)
    steps = [torch.tensor(0.0) for _ in p]
    scalars = emulate(0, p, g, m, v, None, None, steps, mode=2, scalars=torch.tensor([64.0, 0, 0, 0]), use_norm=True, max_norm=0.5)
    assert scalars[2].item() == pytest.approx(norm / 64, rel=1e-6) and scalars[1] == 0
    assert scalars[3].item() == pytest.approx(norm / 0.5, rel=1e-6)
    _C.adam_step(q, h, n, w, [torch.tensor(0.0) for _ in p], None, 0, 0, H["lr"], H["b1"], H["b2"], H["eps"], H["wd"], 0.5 / norm, 2, True)
    same(p, q)
    g[3][5] = math.inf
    kept = copies(p, m, v)
    steps = [torch.tensor(1.0) for _ in p]
    scalars = emulate(0, p, g, m, v, None, None, steps, mode=2, scalars=torch.tensor([64.0, 0, 0, 0]), use_norm=True)
    assert scalars[1] == 1 and all(s.item() == 1 for s in steps)
    for now, then in zip((p, m, v), kept):
        assert all(torch.equal(a, b) for a, b in zip(now, then))


@pytest.mark.parametrize("src", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dst", [torch.float32, torch.bfloat16, torch.float16])
def test_axpby(emulate, src, dst):
    x, y = make(src, 0, 1), make(dst, 0, 2)
    (z,) = copies(y)
    emulate(3, y, x, None, None, None, None, [torch.tensor(0.0) for _ in x], a=0.75, b=-2.0)
    _C.axpby(z, x, 0.75, -2.0)
    same(y, z, 2e-6 if dst == torch.float32 else 8e-3 if dst == torch.bfloat16 else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_compiles_for_every_architecture(arch, tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc on PATH")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    if f"sm_{arch}" not in listed:
        pytest.skip(f"this nvcc does not know sm_{arch}")
    run = subprocess.run(
        [nvcc, "-cubin", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", "-Xptxas", "-v", "-o", str(tmp_path / "a.cubin"), str(ROOT / "csrc/cuda/optim.cu")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    spills = [line for line in run.stderr.splitlines() if "spill stores" in line and " 0 bytes spill stores" not in line]
    assert not spills, spills
