"""The step kernels against fp64 references: formulas, element types, layouts, sizes, threads, instruction sets."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import optim_reference as reference
import pytest
import torch
from ranks import dtensor

from ortmodule import _C

SIZES = [(), (0,), (1,), (7, 0, 3), (31,), (63,), (64,), (65,), (511,), (513,), (13, 17), (3, 5, 7), (16384,), (16385,), (40009,)]
HYPER = dict(lr=0.013, b1=0.87, b2=0.983, eps=1e-3, wd=0.11)
TYPES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


def tensors(dtype, seed=0, sizes=SIZES):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in sizes]


def steps_at(n, step):
    return [torch.tensor(float(step - 1)) for _ in range(n)]


def close(got, want, tol, what=""):
    got, want = got.double().numpy(), np.asarray(want)
    if got.size:
        err = np.abs(got - want).max() / max(1e-30, np.abs(want).max())
        assert err <= tol, f"{what}: {err:.2e} > {tol:.0e}"


def adam_call(p, g, m, v, step, mode, *, masters=None, store=0, seed=0, inv_scale=1.0, bias=True):
    h = HYPER
    steps = steps_at(len(p), step)
    _C.adam_step(p, g, m, v, steps, masters, store, seed, h["lr"], h["b1"], h["b2"], h["eps"], h["wd"], inv_scale, mode, bias)
    assert all(s.item() == step for s in steps)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("bias", [True, False])
def test_adam(dtype, mode, bias):
    p, g, m = tensors(dtype, 1), tensors(dtype, 2), tensors(dtype if dtype == torch.float64 else torch.float32, 3)
    v = [x.abs() for x in tensors(dtype if dtype == torch.float64 else torch.float32, 4)]
    want = [reference.adam(*(x.double().numpy() for x in row), 5, mode=mode, bias=bias, **HYPER) for row in zip(p, g, m, v)]
    adam_call(p, g, m, v, 5, mode, bias=bias)
    for got_p, got_m, got_v, (wp, wm, wv) in zip(p, m, v, want):
        close(got_p, wp, TYPES[dtype], "p")
        close(got_m, wm, 1e-12 if dtype == torch.float64 else 1e-6, "m")
        close(got_v, wv, 1e-12 if dtype == torch.float64 else 1e-6, "v")


@pytest.mark.parametrize("mode", range(4))
def test_adam_modes_differ(mode):
    """The references are not all one formula: a wrong mode must be noticed."""
    p, g = torch.randn(37, dtype=torch.float64), torch.randn(37, dtype=torch.float64)
    rows = [reference.adam(p.numpy(), g.numpy(), np.zeros(37), np.zeros(37), 1, mode=k, **HYPER)[0] for k in range(4)]
    assert all(np.abs(rows[mode] - rows[k]).max() > 1e-6 for k in range(4) if k != mode)


def test_adam_mixed_types_in_one_call():
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    p = [torch.randn(101 + i).to(t) for i, t in enumerate(types)]
    g = [torch.randn(101 + i).to(t) for i, t in enumerate([torch.bfloat16, torch.float32, torch.float16, torch.float64])]
    mt = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    m = [torch.randn(101 + i).to(t) for i, t in enumerate(mt)]
    v = [torch.rand(101 + i).to(t) for i, t in enumerate(mt)]
    want = [reference.adam(*(x.double().numpy() for x in row), 2, mode=2, **HYPER) for row in zip(p, g, m, v)]
    adam_call(p, g, m, v, 2, 2)
    for i, (wp, wm, _) in enumerate(want):
        close(p[i], wp, TYPES[types[i]])
        close(m[i], wm, TYPES[mt[i]] if mt[i] != torch.float32 else 1e-6)


@pytest.mark.parametrize("inv_scale", [1 / 1024, -1.0])
def test_adam_unscales_and_maximises(inv_scale):
    p, g, m, v = (torch.randn(1009, dtype=torch.float64) for _ in range(4))
    v = v.abs()
    want = reference.adam(p.numpy(), g.numpy() * inv_scale, m.numpy(), v.numpy(), 3, mode=1, **HYPER)[0]
    kept = g.clone()
    adam_call([p], [g], [m], [v], 3, 1, inv_scale=inv_scale)
    close(p, want, 1e-12)
    assert torch.equal(g, kept)


def test_master_weights_are_f32_steps():
    p16 = [x.bfloat16() for x in tensors(torch.float32, 1)]
    w = [x.float() for x in p16]
    g, m, v = tensors(torch.float32, 2), tensors(torch.float32, 3), [x.abs() for x in tensors(torch.float32, 4)]
    q, mq, vq = [x.clone() for x in w], [x.clone() for x in m], [x.clone() for x in v]
    for step in (1, 2, 3):
        adam_call(p16, g, m, v, step, 1, masters=w, store=1)
        adam_call(q, g, mq, vq, step, 1)
    for a, b, c in zip(w, q, p16):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert torch.equal(c, a.bfloat16())


def test_split_master_is_exact():
    p = [x.bfloat16() for x in tensors(torch.float32, 1)]
    rest = [torch.zeros_like(x, dtype=torch.int16) for x in p]
    w, p2 = [x.float() for x in p], [x.clone() for x in p]
    g = tensors(torch.float32, 2)
    m, v = [torch.zeros(x.shape) for x in p], [torch.zeros(x.shape) for x in p]
    m2, v2 = [x.clone() for x in m], [x.clone() for x in v]
    for step in range(1, 8):
        adam_call(p, g, m, v, step, 2, masters=rest, store=2)
        adam_call(p2, g, m2, v2, step, 2, masters=w, store=1)
    for hi, lo, full in zip(p, rest, w):
        bits = (hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)
        assert torch.equal(bits.view(torch.float32), full)


def test_stochastic_rounding_is_unbiased_and_reproducible():
    n = 40009
    x = 1.0 + 0.3 * 2**-7  # between two bfloat16 neighbours, 0.3 of the way
    def run(seed):
        p = torch.full((n,), 1.0).bfloat16()
        # m = v = 0 and g chosen so that p - lr * m/... is exactly x: SGD is the plain way to add a number
        _C.sgd_step([p], [torch.full((n,), 1.0 - x)], None, None, 3, seed, 1.0, 0.0, 0.0, 0.0, 1.0, False, True)
        return p.float()
    a = run(11)
    assert set(a.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = (a > 1).double().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / n)
    assert torch.equal(a, run(11)) and not torch.equal(a, run(12))
    special = torch.zeros(4).bfloat16()
    grad = torch.tensor([-math.inf, math.inf, math.nan, 0.0])
    _C.sgd_step([special], [grad], None, None, 3, 1, 1.0, 0.0, 0.0, 0.0, 1.0, False, True)
    assert special[0] == math.inf and special[1] == -math.inf and special[2].isnan() and special[3] == 0


LAMB_CASES = {
    "plain": {},
    "no bias correction": dict(bias=False),
    "scaled": dict(scale=128.0),
    "ratio clamped above": dict(ratio_max=0.1),
    "ratio clamped below": dict(ratio_min=30.0),
}


def lamb_call(p, g, m, v, step, *, masters=None, store=0, bias=True, scale=1.0, ratio_min=-math.inf, ratio_max=math.inf, keep=False):
    h = HYPER
    _C.lamb_step(
        p, g, m, v, steps_at(len(p), step), masters, store, 0, h["lr"], h["b1"], h["b2"], h["eps"], h["wd"], 0.0, 1 - h["b1"], ratio_min,
        ratio_max, 1 / scale, bias, False, keep,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", LAMB_CASES)
@pytest.mark.parametrize("keep", [False, True])
def test_lamb(dtype, case, keep):
    kw = LAMB_CASES[case]
    p, g, m = tensors(dtype, 1), tensors(dtype, 2), tensors(dtype if dtype == torch.float64 else torch.float32, 3)
    v = [x.abs() for x in tensors(dtype if dtype == torch.float64 else torch.float32, 4)]
    kept = [x.clone() for x in g]
    want = [reference.lamb(*(x.double().numpy() for x in row), 5, **HYPER, **kw) for row in zip(p, g, m, v)]
    lamb_call(p, g, m, v, 5, keep=keep, **kw)
    for got_p, got_g, old_g, got_m, got_v, (wp, wm, wv, wd) in zip(p, g, kept, m, v, want):
        close(got_p, wp, TYPES[dtype], "p")
        close(got_m, wm, 1e-12 if dtype == torch.float64 else 2e-6, "m")
        close(got_v, wv, 1e-12 if dtype == torch.float64 else 2e-6, "v")
        if keep or dtype not in (torch.float32, torch.float64):
            assert torch.equal(got_g, old_g)
        else:
            close(got_g, wd, TYPES[dtype], "direction")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
def test_lamb_skips_single_elements(dtype, keep):
    n = 20011
    p, g = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    m, v = torch.randn(n).double(), torch.rand(n).double()
    if dtype != torch.float64:
        m, v = m.float(), v.float()
    g[3], g[517], g[16390], m[9] = math.inf, math.nan, -math.inf, math.inf
    old = [x.clone() for x in (p, m, v)]
    wp, wm, wv, _ = reference.lamb(*(x.double().numpy() for x in (p, g, m, v)), 2, **HYPER)
    lamb_call([p], [g], [m], [v], 2, keep=keep)
    bad = [3, 517, 16390, 9]
    for i in bad:
        assert p[i] == old[0][i] and m[i] == old[1][i] and v[i] == old[2][i]
    close(p, wp, TYPES[dtype])
    m[9] = wm[9] = 0
    close(m, wm, 2e-6)
    close(v, wv, 2e-6)


def test_lamb_infinite_weight_blocks_its_tensor_only():
    p, g = [torch.randn(103), torch.randn(107)], [torch.randn(103), torch.randn(107)]
    m, v = [torch.zeros(103), torch.zeros(107)], [torch.zeros(103), torch.zeros(107)]
    p[0][5] = math.inf
    want = [reference.lamb(*(x.double().numpy() for x in row), 1, **HYPER)[0] for row in zip(p, g, m, v)]
    lamb_call(p, g, m, v, 1)
    assert p[0][5] == math.inf and p[0][:5].isfinite().all()
    close(p[1], want[1], 3e-6)


def test_lamb_zero_norm_uses_plain_rate():
    p, g = torch.zeros(19, dtype=torch.float64), torch.randn(19, dtype=torch.float64)
    m, v = torch.zeros(19, dtype=torch.float64), torch.zeros(19, dtype=torch.float64)
    want = reference.lamb(p.numpy(), g.numpy(), m.numpy(), v.numpy(), 1, **HYPER)[0]
    lamb_call([p], [g], [m], [v], 1, ratio_min=5.0, ratio_max=7.0)  # the clamp does not apply
    close(p, want, 1e-12)


def test_lamb_more_than_1024_groups():
    n = 1031
    p = [torch.randn(1 + i % 7, dtype=torch.float64) for i in range(n)]
    g = [torch.randn_like(x) for x in p]
    z = lambda: [torch.zeros_like(x) for x in p]  # noqa: E731
    m, v = z(), z()
    want = [reference.lamb(*(x.numpy() for x in row), 1, **HYPER)[0] for row in zip(p, g, m, v)]
    lamb_call(p, g, m, v, 1)
    for a, b in zip(p, want):
        close(a, b, 1e-12)


def test_lamb_full_pack():
    """Thirty-two tensors that fill every block exactly: onnxruntime-training's launcher ran such a pack twice."""
    p = [torch.randn(512, 1024) for _ in range(32)]
    g = [torch.randn(512, 1024) for _ in range(32)]
    m, v = [torch.zeros(512, 1024) for _ in range(32)], [torch.zeros(512, 1024) for _ in range(32)]
    want = [reference.lamb(*(x.double().numpy() for x in row), 1, **HYPER)[0] for row in list(zip(p, g, m, v))[:3]]
    lamb_call(p, g, m, v, 1)
    for a, b in zip(p, want):
        close(a, b, 3e-6)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "grad only"])
def test_layouts(layout):
    torch.manual_seed(0)
    def make():
        x = torch.randn(5, 3, 7, 11, dtype=torch.float64)
        if layout == "channels_last":
            return x.to(memory_format=torch.channels_last)
        if layout == "transposed":
            return x.transpose(0, 3)
        return torch.randn(5, 3, 7, 22, dtype=torch.float64)[..., ::2] if layout == "strided" else x
    p, g = make(), make()
    if layout == "grad only":
        g = g.to(memory_format=torch.channels_last)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    around = p._base.clone() if layout == "strided" else None
    want = reference.adam(p.numpy().copy(), g.numpy().copy(), m.numpy().copy(), v.numpy().copy(), 1, mode=2, **HYPER)[0]
    adam_call([p], [g], [m], [v], 1, 2)
    close(p, want, 1e-12)
    if around is not None:
        assert torch.equal(p._base[..., 1::2], around[..., 1::2])
    norm, finite, each = _C.norm([g, p], 2.0, True)
    assert finite and abs(each[0] - g.norm().item()) < 1e-9 and abs(each[1] - p.norm().item()) < 1e-9
    dst = torch.zeros_like(p)
    _C.axpby([dst], [g], 0.25, 0.0)
    close(dst, 0.25 * g.numpy(), 1e-15)


def test_unaligned_pointers():
    base = torch.randn(70001, dtype=torch.float32)
    p, g = base[1:65538].clone()[3:], base[2:65539][3:]
    m, v = torch.zeros(65540)[6:], torch.zeros(65541)[7:]
    want = reference.adam(*(x.double().numpy() for x in (p, g, m, v)), 1, mode=0, **HYPER)[0]
    adam_call([p], [g], [m], [v], 1, 0)
    close(p, want, 3e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
def test_norm(dtype, order):
    x = tensors(dtype, 5)
    norm, finite, each = _C.norm(x, order, True)
    flat = torch.cat([t.double().flatten() for t in x])
    assert finite and norm == pytest.approx(torch.linalg.vector_norm(flat, order).item(), rel=1e-12)
    for t, n in zip(x, each):
        assert n == pytest.approx(torch.linalg.vector_norm(t.double().flatten(), order).item() if t.numel() else 0.0, rel=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
def test_norm_finds_every_nonfinite_element(bad, dtype, order):
    for size, at in ((1, 0), (77, 76), (16385, 16384), (40009, 23333)):
        x = torch.randn(size).to(dtype)
        assert _C.norm([x], order, False)[1]
        x[at] = bad
        norm, finite = _C.norm([torch.randn(5), x], order, False)
        assert not finite and not math.isfinite(norm)
        assert math.isnan(norm) == math.isnan(bad)


def test_norm_does_not_overflow():
    x = torch.full((103,), 1e30)
    norm, finite = _C.norm([x], 2.0, False)
    assert finite and norm == pytest.approx(1e30 * math.sqrt(103), rel=1e-6)
    wide = torch.full((103,), 1e200, dtype=torch.float64)
    norm, finite = _C.norm([wide], 2.0, False)
    assert finite and norm == math.inf


@pytest.mark.parametrize("src", TYPES)
@pytest.mark.parametrize("dst", TYPES)
def test_axpby(src, dst):
    x, y = tensors(src, 1), tensors(dst, 2)
    want = [0.75 * a.double() - 2 * b.double() for a, b in zip(x, y)]
    nan = [torch.full_like(b, math.nan) for b in y]
    _C.axpby(y, x, 0.75, -2.0)
    _C.axpby(nan, x, 0.5, 0.0)  # what was in dst does not matter
    tol = max(TYPES[dst], 3e-6 if src != dst or src != torch.float64 else 0)
    for got, w, plain, a in zip(y, want, nan, x):
        close(got, w.numpy(), tol)
        close(plain, 0.5 * a.double().numpy(), tol)


def test_conversions_are_torchs():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for half in (torch.float16, torch.bfloat16):
        x = every.view(half)
        wide = torch.empty(1 << 16)
        _C.axpby([wide], [x], 1.0, 0.0)
        assert torch.equal(wide.nan_to_num(nan=7.5), x.float().nan_to_num(nan=7.5)) and torch.equal(wide.isnan(), x.isnan())
        f = torch.randn(1 << 16) * torch.logspace(-12, 6, 1 << 16)
        narrow = torch.empty(1 << 16, dtype=half)
        _C.axpby([narrow], [f], 1.0, 0.0)
        assert torch.equal(narrow, f.to(half))


def test_same_bits_whatever_the_threads():
    def run(threads):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p = [torch.randn(s) for s in (40009, 3, 100003)]
        g = [torch.randn_like(x) for x in p]
        m, v = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p]
        lamb_call(p, g, m, v, 1)
        return [*p, torch.tensor(_C.norm(g, 2.0, False)[0], dtype=torch.float64)]
    before = torch.get_num_threads()
    try:
        one, two = run(1), run(2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set(isa):
    """The formula and norm tests again in a process held to one instruction set (what the machine lacks falls back to
    less)."""
    if os.environ.get("ORTMODULE_ISA"):
        pytest.skip("already inside")
    names = "test_adam or test_lamb or test_norm or test_axpby or test_conversions or test_stochastic"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", names],
        env={**os.environ, "ORTMODULE_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_errors_name_what_is_wrong():
    p, g, m, v = (torch.zeros(3) for _ in range(4))
    cases = [
        (([p], [torch.zeros(4)], [m], [v]), {}, r"gradient of parameter 0 has sizes \(4\), its weight \(3\)"),
        (([p], [g], [m.double()], [v]), {}, "first moment of parameter 0 is f64"),
        (([p.int()], [g], [m], [v]), {}, "i32"),
        (([p.expand(2, 3)], [g.expand(2, 3)], [m.expand(2, 3)], [v.expand(2, 3)]), {}, "expanded"),
        (([p], [g], [m], [v]), dict(store=1), "needs a master"),
        (([p], [g], [m], [v]), dict(store=3), "bf16 weights"),
        (([p], [g], [m], [v]), dict(mode=9), "mode 9"),
    ]
    for lists, kw, text in cases:
        with pytest.raises(ValueError, match=text):
            adam_call(*lists, 1, kw.pop("mode", 0), **kw)
    with pytest.raises(ValueError, match="expected 1"):
        adam_call([p], [g, g], [m], [v], 1, 0)
    with pytest.raises(TypeError):
        _C.adam_step(1)


def test_the_engine_refuses_tensors_without_memory(one_process):
    with pytest.raises(ValueError, match="DTensor.*to_local"):
        _C.norm([dtensor()], 2.0, False)
