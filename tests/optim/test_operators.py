"""The update operators of the graph (csrc/ops/optimizer.c) through the interpreter, against fp64 references, in f64 and
strided."""

from __future__ import annotations

import functools
import math

import numpy as np
import optim_reference as reference
import pytest
import torch

import engine
from opcheck import rand

SIZE = (13, 17)

rand = functools.partial(rand, seed=0)


def parameters(strided):
    xs = [rand(*SIZE, seed=i) for i in range(4)]
    xs[3] = xs[3].abs()
    return [x.t().contiguous().t() for x in xs] if strided else xs


def call(op, inputs, n_out, attrs):
    """One node; inputs None = left out."""
    names = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.bool: "bool", torch.bfloat16: "bf16", torch.float16: "f16"}
    given = [(f"x{i}", x) for i, x in enumerate(inputs) if x is not None]
    lines = [f"  input {k}: {names[x.dtype]}[{', '.join(map(str, x.shape))}]" for k, x in given]
    args = ", ".join(f"x{i}" if x is not None else "_" for i, x in enumerate(inputs))
    outs = [f"y{i}" for i in range(n_out)]
    if op in ("adamw_step", "sgd_step", "lamb_step"):
        attrs = ", ".join(filter(None, [attrs, f"out_dtype=[{', '.join('0' * n_out)}]"]))
    text = "graph {\n" + "\n".join([*lines, f"  {', '.join(outs)} = {op}({args}) {{{attrs}}}", *[f"  output {o}" for o in outs]]) + "\n}"
    return engine.run(text, [x for _, x in given])[0]


def close(got, want, tol=1e-12):
    want = np.asarray(want)
    assert np.abs(got.double().numpy() - want).max() <= tol * max(1e-30, np.abs(want).max())


LR, STEP = torch.tensor(0.013), torch.tensor(5)
H = dict(lr=LR.item(), b1=0.87, b2=0.983, eps=1e-3, wd=0.11)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("update", [None, True, False])
def test_adamw_step(strided, mode, update):
    p, g, m, v = parameters(strided)
    old = [x.clone() for x in (p, g, m, v)]
    attrs = f"alpha=0.87, beta=0.983, epsilon=0.001, weight_decay=0.11, adam_mode={mode}"
    flag = torch.tensor(update) if update is not None else None
    ys = call("adamw_step", [LR, STEP, flag, p, g, m, v], 3, attrs)
    want = reference.adam(*(x.numpy() for x in (p, g, m, v)), 5, mode=1 if mode else 2, **H)
    if update is False:
        want = [x.numpy() for x in (p, m, v)]
    for y, w in zip(ys, want):
        close(y, w)
    assert all(torch.equal(a, b) for a, b in zip((p, g, m, v), old))  # values in, values out


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("norm,scale", [(None, None), (700.0, 64.0), (10.0, 64.0)])
def test_lamb_step(strided, norm, scale):
    p, g, m, v = parameters(strided)
    old = g.clone()
    extra = [torch.tensor(x) if x is not None else None for x in (scale, norm)]
    attrs = "alpha=0.87, beta=0.983, epsilon=0.001, lambda=0.11, max_norm_clip=0.5, ratio_max=3.0"
    ys = call("lamb_step", [None, *extra, LR, STEP, p, g, m, v, None], 6, attrs)
    divisor = reference.lamb_scale(scale, norm, 0.5) if norm else 1.0
    want = reference.lamb(*(x.numpy() for x in (p, g, m, v)), 5, scale=divisor, ratio_max=3.0, **H)
    assert ys[0].item() == 6
    for y, w in zip(ys[1:], (want[0], want[0] - p.numpy(), *want[1:3])):
        close(y, w, 1e-10)
    assert torch.equal(g, old)
    ys = call("lamb_step", [torch.tensor(False), None, None, LR, STEP, p, g, m, v, None], 6, "")
    assert ys[0].item() == 5 and all(torch.equal(y, x) for y, x in zip(ys[1:], (p, g, m, v)))


def test_lamb_step_with_16_bit_gradients_and_copies():
    p, g, m, v = (x.float() for x in parameters(False))
    g = g.bfloat16()
    g[3, 3] = math.inf
    w16 = p.half()
    ys = call("lamb_step", [None, None, None, LR, STEP, p, g, m, v, w16], 6, "alpha=0.87, beta=0.983, epsilon=0.001, lambda=0.11")
    want = reference.lamb(*(x.double().numpy() for x in (p, g, m, v)), 5, **H)
    close(ys[1], want[0], 3e-6)
    close(ys[2], want[0] - p.double().numpy(), 1e-2)
    assert ys[2].dtype == torch.bfloat16 and ys[2][3, 3] == 0
    assert torch.equal(ys[5], ys[1].half())


def test_groups_of_one_node_are_separate():
    shapes = [(13, 17), (5,), (0,), (3, 1, 2)]
    groups = [[rand(*s, seed=7 * i + j).abs() if j == 3 else rand(*s, seed=7 * i + j) for j in range(4)] for i, s in enumerate(shapes)]
    flat = [x for group in groups for x in group]
    attrs = "alpha=0.87, beta=0.983, epsilon=0.001"
    adam = call("adamw_step", [LR, STEP, None, *flat], 12, attrs + ", weight_decay=0.11, adam_mode=1")
    lamb = call("lamb_step", [None, None, None, LR, STEP, *(x for group in groups for x in (*group, None))], 21, attrs + ", lambda=0.11")
    for i, group in enumerate(groups):
        given = [x.numpy() for x in group]
        for y, w in zip(adam[3 * i : 3 * i + 3], reference.adam(*given, 5, mode=1, **H)):
            assert y.shape == w.shape and (y.numel() == 0 or close(y, w) is None)
        want = reference.lamb(*given, 5, **H)
        for y, w in zip(lamb[1 + 5 * i : 5 + 5 * i], (want[0], want[0] - given[0], want[1], want[2])):
            assert y.shape == w.shape and (y.numel() == 0 or close(y, w, 1e-10) is None)
    sgd = call("sgd_step", [LR, None, *(x for group in groups for x in group[:2])], 4, "")
    for y, (p, g, *_) in zip(sgd, groups):
        assert torch.allclose(y, p - LR.item() * g, rtol=1e-12, atol=0)


@pytest.mark.parametrize("update", [True, False])
def test_sgd_step(update):
    p, g, *_ = parameters(False)
    close(call("sgd_step", [LR, torch.tensor(update), p, g], 1, "")[0], p - LR.item() * g if update else p)


def test_norm_finite_and_clip():
    xs = [rand(13, 17, seed=1), rand(5, seed=2), rand(1, seed=3)]
    norm = call("l2_norm_all", xs, 1, "")[0]
    want = torch.cat([x.flatten() for x in xs]).norm()
    close(norm, want)
    assert norm.dim() == 0 and norm.dtype == torch.float64
    assert call("all_finite", xs, 1, "")[0].item() is True
    for bad in (math.inf, math.nan):
        xs[1][3] = bad
        assert call("all_finite", xs, 1, "")[0].item() is False
    g = rand(13, 17, seed=4)
    for limit in (0.5, 1e6):
        n = g.norm()
        close(call("clip_by_norm", [g, n], 1, f"max_norm={limit}")[0], g * min(1.0, limit / (n.item() + 1e-6)))


def test_accumulate():
    a, b = rand(13, 17, seed=1), rand(13, 17, seed=2)
    close(call("accumulate", [a, b], 1, "")[0], a + b, 1e-15)
    close(call("accumulate", [a, b, torch.tensor(False)], 1, "")[0], a + b, 1e-15)
    close(call("accumulate", [a, b, torch.tensor(True)], 1, "")[0], b, 0)


@pytest.mark.parametrize(
    "op,inputs,attrs,text",
    [
        ("adamw_step", [LR, STEP, None, rand(3), rand(4), rand(3), rand(3)], "", "equal sizes"),
        ("adamw_step", [LR, torch.tensor(5.0), None, *[rand(3)] * 4], "", "i64"),
        ("adamw_step", [LR, STEP, None, *[rand(3)] * 4], "adam_mode=0, correct_bias=0", "correct_bias"),
        ("adamw_step", [LR, STEP, None, *[rand(3)] * 6], "", "groups of 4"),
        ("adamw_step", [LR, STEP, None, *[rand(3)] * 8], "", "out_dtype lists 3 outputs; 2 groups make 6"),
        ("lamb_step", [None, None, None, LR, STEP, *[rand(3)] * 5], "max_norm_clip=0.0", "max_norm_clip"),
        ("sgd_step", [rand(2), None, rand(3), rand(3)], "", "one element"),
    ],
)
def test_refusals(op, inputs, attrs, text):
    with pytest.raises(engine.EngineError, match=text):
        call(op, inputs, {"sgd_step": 1, "adamw_step": 3, "lamb_step": 6}[op], attrs)
