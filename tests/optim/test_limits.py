"""The ends of the range: 50 M elements, thousands of tiny unaligned tensors, mixed types in one group, and every
allocation failing once."""

from __future__ import annotations

import ctypes as C
import math
import threading

import optim_reference as reference
import pytest
import torch

import engine
from ortmodule import _C
from ortmodule.optim import FusedAdam, FusedLAMB, FusedSGD

H = dict(lr=0.013, b1=0.87, b2=0.983, eps=1e-3, wd=0.11)


@pytest.mark.parametrize("kind", ["adam", "lamb", "sgd", "norm"])
def test_a_tensor_of_many_elements(kind):
    """The tensor is one period repeated: so is the result (LAMB's trust ratio does not change with the number of
    periods)."""
    period, times = 100003, 500
    gen = torch.Generator().manual_seed(0)
    base = [torch.randn(period, generator=gen) for _ in range(3)]
    base.append(base[2].abs())
    p, g, m, v = (x.repeat(times) for x in base)
    x64 = [x.double().numpy() for x in base]
    if kind == "norm":
        norm, finite = _C.norm([g], 2.0, False)
        assert finite and norm == pytest.approx(math.sqrt(times * float((x64[1] ** 2).sum())), rel=1e-12)
        g[-1] = math.nan
        assert not _C.norm([g], 2.0, False)[1]
        return
    if kind == "adam":
        _C.adam_step([p], [g], [m], [v], [torch.tensor(4.0)], None, 0, 0, 0.013, 0.87, 0.983, 1e-3, 0.11, 1.0, 2, True)
        want = reference.adam(*x64, 5, mode=2, **H)[0]
    elif kind == "lamb":
        _C.lamb_step([p], [g], [m], [v], [torch.tensor(4.0)], None, 0, 0, 0.013, 0.87, 0.983, 1e-3, 0.11, 0.0, 1 - 0.87, -math.inf, math.inf, 1.0,
                     True, False, False)  # fmt: skip
        want = reference.lamb(*x64, 5, **H)[0]
    else:
        _C.sgd_step([p], [g], None, None, 0, 0, 0.013, 0.0, 0.0, 0.0, 1.0, False, True)
        want = x64[0] - 0.013 * x64[1]
    want = torch.from_numpy(want)
    rows = p.view(times, period)
    for i in (0, times // 2, times - 1):
        assert (rows[i].double() - want).abs().max() <= 3e-6 * want.abs().max()
    assert torch.equal(rows, rows[:1].expand_as(rows)) or kind == "lamb"


MAKERS = {
    "adam": lambda p: FusedAdam(p, 0.01, True, (0.8, 0.99), 1e-4, 2, 0.1),
    "lamb": lambda p: FusedLAMB(p, 0.01, True, (0.8, 0.99), 1e-4, 0.1, max_grad_norm=None),
    "sgd": lambda p: FusedSGD(p, 0.01),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_thousands_of_tiny_unaligned_tensors_of_mixed_types(maker):
    """Views into one buffer per type at odd offsets, sizes 0 to 7, f32, f64, bf16 and f16 in one group, moments in f32
    (f64 for f64)."""
    types = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    gen = torch.Generator().manual_seed(0)
    buffers = {t: torch.randn(12001, generator=gen, dtype=torch.float64).to(t) for t in types}
    at = dict.fromkeys(types, 1)
    params = []
    for i in range(3001):
        t, n = types[i % 4], i * 7 % 8
        p = torch.nn.Parameter(buffers[t][at[t] : at[t] + n])
        at[t] += n + i % 2
        p.grad = torch.randn(n, generator=gen, dtype=torch.float64).to(t)
        params.append(p)
    old = [(p.detach().double().numpy().copy(), p.grad.double().numpy().copy()) for p in params]
    around = {t: x.clone() for t, x in buffers.items()}
    MAKERS[maker](params).step()
    kw = dict(lr=0.01, b1=0.8, b2=0.99, eps=1e-4, wd=0.1)
    tol = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    for p, (x, g) in zip(params, old):
        zero = 0 * x
        if maker == "sgd":
            want = x - 0.01 * g
        else:
            want = reference.adam(x, g, zero, zero, 1, mode=2, **kw)[0] if maker == "adam" else reference.lamb(x, g, zero, zero, 1, **kw)[0]
        error = (p.detach().double() - torch.from_numpy(want)).abs()
        assert not p.numel() or error.max() <= tol[p.dtype] * max(abs(want).max(), 1e-3)
    for t, x in buffers.items():  # what lies between the tensors
        touched = torch.zeros(len(x), dtype=torch.bool)
        for p in params:
            if p.dtype == t:
                begin = p.storage_offset()
                touched[begin : begin + p.numel()] = True
        assert torch.equal(x[~touched], around[t][~touched])


# --- allocation failures ------------------------------------------------------------------------------------


class Param(C.Structure):
    _fields_ = [*[(k, engine.Tensor) for k in "pgmvwd"], ("step", C.c_double), ("stream", C.c_uint64)]


class Adam(C.Structure):
    _fields_ = [*[(k, C.c_double) for k in ("lr", "beta1", "beta2", "eps", "weight_decay", "inv_scale")], ("mode", C.c_int), ("bias", C.c_int)]


class Lamb(C.Structure):
    _fields_ = [
        *[(k, C.c_double) for k in ("lr", "beta1", "beta2", "eps", "wd", "l2", "grad_weight", "ratio_min", "ratio_max", "inv_scale")],
        ("bias", C.c_int),
        ("no_ratio", C.c_int),
    ]


class Sgd(C.Structure):
    _fields_ = [*[(k, C.c_double) for k in ("lr", "momentum", "dampening", "weight_decay", "inv_scale")], ("nesterov", C.c_int)]


@pytest.mark.parametrize("kind", ["adam", "sgd", "lamb", "norm", "axpby"])
def test_every_allocation_failing_once(kind):
    """Tensors with gaps need temporaries, so there is something to allocate: no crash, no leak, and nothing written
    before it fails."""
    libc = C.CDLL(None)
    libc.aligned_alloc.restype = C.c_void_p
    libc.free.argtypes = [C.c_void_p]
    state = {"calls": 0, "fail": -1, "live": 0}

    @engine.ALLOC
    def alloc(_user, size):
        state["calls"] += 1
        if state["calls"] == state["fail"]:
            return None
        state["live"] += 1
        return libc.aligned_alloc(64, (size + 63) // 64 * 64)

    @engine.FREE
    def free(_user, p, _size):
        state["live"] -= 1
        libc.free(p)

    lib, services = engine.lib, engine.Services(alloc=alloc, free=free)
    gen = torch.Generator().manual_seed(0)
    rand = lambda *size: torch.rand(*size, generator=gen)  # noqa: E731
    tensors = [[rand(5, 14)[:, ::2], rand(7, 5).t(), rand(5, 7), rand(5, 7)] for _ in range(3)]
    whole = [x if x._base is None else x._base for group in tensors for x in group]
    n = len(tensors)

    def call(cx):
        ps = (Param * n)(*[Param(*map(engine.tensor, group), step=1, stream=i) for i, group in enumerate(tensors)])
        if kind == "adam":
            return lib.om_adam_step(cx, C.byref(Adam(0.01, 0.9, 0.99, 1e-6, 0.1, 1.0, 2, 1)), 0, C.c_uint64(0), ps, n)
        if kind == "sgd":
            return lib.om_sgd_step(cx, C.byref(Sgd(0.01, 0.9, 0, 0, 1.0, 0)), 0, C.c_uint64(0), ps, n)
        if kind == "lamb":
            cfg = (Lamb * n)(*[Lamb(0.01, 0.9, 0.99, 1e-6, 0.1, 0, 0.1, -math.inf, math.inf, 1.0, 1, 0)] * n)
            return lib.om_lamb_step(cx, cfg, 0, C.c_uint64(0), C.c_bool(True), C.c_bool(False), ps, n)
        x, y = ((engine.Tensor * n)(*[engine.tensor(group[j]) for group in tensors]) for j in (0, 1))
        if kind == "norm":
            return lib.om_norm(cx, x, n, C.c_double(2), C.byref(C.c_double()), C.byref(C.c_bool()), None)
        return lib.om_axpby(cx, x, y, n, C.c_double(0.5), C.c_double(2))

    k, status = 0, 1
    while status:
        k += 1
        before = [x.clone() for x in whole]
        state.update(calls=0, fail=-1)
        cx = C.c_void_p(lib.om_ctx_new(C.byref(services)))
        state.update(calls=0, fail=k)
        status = call(cx)
        message = lib.om_ctx_message(cx).decode()
        lib.om_ctx_free(cx)
        assert state["live"] == 0
        if status:
            assert status == 1 and "memory" in message
            assert all(torch.equal(a, b) for a, b in zip(before, whole))
        assert k < 200
    assert k > 5
    assert kind == "norm" or not all(torch.equal(a, b) for a, b in zip(before, whole))


# --- who does which part of a LAMB step ---------------------------------------------------------------------


def _threads_pool(_user, n, _grain, fn, arg):
    """A thread for every item, all let go at once."""
    f = C.CFUNCTYPE(None, C.c_void_p, C.c_int64, C.c_int64)(fn)
    gate = threading.Barrier(n)
    workers = [threading.Thread(target=lambda i=i: (gate.wait(), f(arg, i, i + 1))) for i in range(n)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()


POOLS = {
    "none": engine.Services(),
    "one after the other": engine._services,
    "2 threads": engine.Services(parallel_for=engine.PFOR(_threads_pool), num_threads=engine.NTHR(lambda _user: 2)),
    "7 threads": engine.Services(parallel_for=engine.PFOR(_threads_pool), num_threads=engine.NTHR(lambda _user: 7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb_gives_the_same_bits_from_any_pool(dtype):
    """Waves of small tensors, tensors cut into pieces, and their order among the workers change nothing; a pool that
    runs the workers one after the other finishes."""
    gen = torch.Generator().manual_seed(0)
    sizes = [40009, 3, 700001, *[1000] * 50, 16384, 16385, 1, 300007, 65536]
    start = [[torch.randn(n, generator=gen).to(dtype), torch.randn(n, generator=gen).to(dtype), torch.zeros(n), torch.rand(n, generator=gen)]
             for n in sizes]  # fmt: skip
    start[2][1][70000] = math.inf  # an element to skip
    n = len(sizes)
    cfg = (Lamb * n)(*[Lamb(0.01, 0.9, 0.99, 1e-6, 0.1, 0, 0.1, -math.inf, math.inf, 1.0, 1, 0)] * n)

    def step(pool):
        tensors = [[x.clone() for x in group] for group in start]
        ps = (Param * n)(*[Param(*map(engine.tensor, group), step=1, stream=i) for i, group in enumerate(tensors)])
        cx = C.c_void_p(engine.lib.om_ctx_new(C.byref(POOLS[pool])))
        assert engine.lib.om_lamb_step(cx, cfg, 0, C.c_uint64(0), C.c_bool(True), C.c_bool(False), ps, n) == 0
        engine.lib.om_ctx_free(cx)
        return [x for group in tensors for x in group]

    want = step("none")
    assert not torch.equal(want[0], start[0][0])
    for pool in [p for p in POOLS for _ in range(5)]:
        assert all(torch.equal(a.nan_to_num(nan=7.5), b.nan_to_num(nan=7.5)) for a, b in zip(want, step(pool))), pool
