"""The optimizer operators of com.microsoft read from ONNX (csrc/onnx/optim.c), interpreted, against fp64 references."""

from __future__ import annotations

import ctypes as C
import math

import numpy as np
import onnx
import optim_reference as reference
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper

import engine

KIND = {torch.float64: T.DOUBLE, torch.float32: T.FLOAT, torch.int64: T.INT64, torch.bool: T.BOOL, torch.float16: T.FLOAT16}
LR, STEP = torch.tensor(0.013), torch.tensor(5)
H = dict(lr=LR.item(), b1=0.87, b2=0.983, eps=1e-3, wd=0.11)
SHAPES = [(13, 17), (1,), (5,), (3, 5, 7)]


def run(nodes, inputs, outputs):
    """inputs: name -> tensor; outputs: names. Returns name -> result."""
    ins = [helper.make_tensor_value_info(k, KIND[x.dtype], x.shape) for k, x in inputs.items()]
    outs = [helper.make_empty_tensor_value_info(k) for k in outputs]
    graph = helper.make_graph(nodes, "g", ins, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    return dict(zip(outputs, engine.run_onnx(model.SerializeToString(), list(inputs.values()))[0]))


def node(op, ins, outs, **attrs):
    return helper.make_node(op, ins, outs, domain="com.microsoft", **attrs)


def groups(n, dtype=torch.float64):
    gen = torch.Generator().manual_seed(n)
    make = lambda i: [torch.randn(SHAPES[i % len(SHAPES)], generator=gen, dtype=torch.float64) for _ in range(4)]  # noqa: E731
    out = [make(i) for i in range(n)]
    for group in out:
        group[3].abs_()
    return [[x.to(dtype) for x in group] for group in out]


def close(got, want, tol=1e-12):
    assert got.shape == want.shape
    assert np.abs(got.double().numpy() - want).max(initial=0) <= tol * max(1e-30, np.abs(want).max(initial=0))


def sequences(given, kinds):
    """SequenceConstruct nodes and inputs for lists of tensors."""
    inputs = {f"{k}{i}": group["pgmv".index(k)] for k in kinds for i, group in enumerate(given)}
    return [helper.make_node("SequenceConstruct", [f"{k}{i}" for i in range(len(given))], [k]) for k in kinds], inputs


def elements(kinds, n):
    """SequenceAt nodes for results named K, and the constants they need."""
    nodes = [helper.make_node("Constant", [], [f"i{i}"], value_int=i) for i in range(n)]
    nodes += [helper.make_node("SequenceAt", [k.upper(), f"i{i}"], [f"new_{k}{i}"]) for k in kinds for i in range(n)]
    return nodes, [f"new_{k}{i}" for k in kinds for i in range(n)]


@pytest.mark.parametrize("n", [1, 4, 50])
@pytest.mark.parametrize("mode", [0, 1])
def test_adamw(n, mode):
    given = groups(n)
    make, inputs = sequences(given, "pgmv")
    take, outputs = elements("pmv", n)
    step = node("AdamWOptimizer", ["lr", "step", "p", "g", "m", "v"], ["flag", "P", "M", "V"], alpha=0.87, beta=0.983, epsilon=1e-3,
                weight_decay=0.11, adam_mode=mode)  # fmt: skip
    got = run([*make, step, *take], {"lr": LR, "step": STEP, **inputs}, ["flag", *outputs])
    assert got["flag"].item() is True
    for i, group in enumerate(given):
        for k, want in zip("pmv", reference.adam(*(x.numpy() for x in group), 5, mode=1 if mode else 2, **H)):
            close(got[f"new_{k}{i}"], want, 1e-6)  # attributes are float32


@pytest.mark.parametrize("update", [True, False])
def test_sgd_and_update_signal(update):
    given = groups(70)
    make, inputs = sequences(given, "pg")
    take, outputs = elements("p", 70)
    step = node("SGDOptimizerV2", ["lr", "p", "g", "update"], ["flag", "P"])
    got = run([*make, step, *take], {"lr": LR, "update": torch.tensor(update), **inputs}, ["flag", *outputs])
    assert got["flag"].item() is update
    for i, (p, g, *_) in enumerate(given):
        close(got[f"new_p{i}"], (p - LR.item() * g if update else p).numpy())


def lamb(given, extra=None, mixed=(), **attrs):
    """given: [w, g, m, v] per group; mixed: indices with a 16-bit copy. Returns (step, per group [w, g, m, v, w16 or
    None])."""
    inputs = {"lr": LR, "step": STEP, **(extra or {})}
    names = [k if k in inputs else "" for k in ("update", "scale", "norm", "lr", "step")]
    outputs = ["step1"]
    for i, group in enumerate(given):
        inputs |= {f"{k}{i}": x for k, x in zip("pgmv", group)}
        names += [f"{k}{i}" for k in "pgmv"]
        names.append(f"h{i}" if i in mixed else "")
        outputs += [f"new_{k}{i}" for k in "pgmv"] + ([f"new_h{i}"] if i in mixed else [""])
        if i in mixed:
            inputs[f"h{i}"] = group[0].half()
    got = run([node("LambOptimizer", names, outputs, **attrs)], inputs, [x for x in outputs if x])
    return got["step1"].item(), [[got.get(f"new_{k}{i}") for k in "pgmvh"] for i in range(len(given))]


def test_lamb_with_settings_per_group():
    n = 30
    given = groups(n)
    rng = np.random.default_rng(0)
    each = [dict(b1=a, b2=b, wd=w, eps=e) for a, b, w, e in zip(
        rng.choice([0.5, 0.75], n), rng.choice([0.875, 0.9375], n), rng.choice([0.0, 0.125], n), rng.choice([2**-10, 2**-6], n))]
    limit = [float(x) for x in rng.choice([0.25, 1.0], n)]
    attrs = dict(alpha=[e["b1"] for e in each], beta=[e["b2"] for e in each], epsilon=[e["eps"] for e in each], max_norm_clip=limit)
    attrs["lambda"] = [e["wd"] for e in each]
    extra = {"scale": torch.tensor(64.0), "norm": torch.tensor(40.0)}
    step, got = lamb(given, extra, mixed={2, 29}, ratio_max=3.0, do_bias_correction=1, **attrs)
    assert step == 6
    for i, (group, e) in enumerate(zip(given, each)):
        x = [t.numpy() for t in group]
        divisor = reference.lamb_scale(64.0, 40.0, limit[i])
        w, m, v, _ = reference.lamb(*x, 5, lr=LR.item(), scale=divisor, ratio_max=3.0, **e)
        for y, want in zip(got[i], (w, w - x[0], m, v)):
            close(y, want, 1e-10)
        assert (got[i][4] is not None) == (i in (2, 29))
        if got[i][4] is not None:
            assert torch.equal(got[i][4], got[i][0].half())


def test_lamb_skips_as_a_whole():
    given = groups(3)
    step, got = lamb(given, {"update": torch.tensor(False)})
    assert step == 5
    assert all(torch.equal(y, x) for ys, xs in zip(got, given) for y, x in zip(ys, xs))


def test_lamb_of_more_than_1024_groups():
    given = groups(1100)
    _, got = lamb(given)
    for i in (0, 11, 12, 1023, 1024, 1099):
        x = [t.numpy() for t in given[i]]
        w = reference.lamb(*x, 5, lr=LR.item(), b1=0.9, b2=0.999, eps=1e-6, wd=0.0)[0]
        close(got[i][0], w, 1e-10)


def test_a_model_that_scales_checks_clips_and_updates_itself():
    """ReduceAllL2, IsAllFinite, InplaceClipGradNorm, InPlaceAccumulatorV2 together, over 200 tensors."""
    n = 200
    given = groups(n)
    make, inputs = sequences(given, "g")
    take, outputs = elements("g", n)
    names = list(inputs)
    nodes = [*make, node("InplaceClipGradNorm", ["g"], ["G"], max_norm=0.5), *take, node("ReduceAllL2", names, ["norm"]),
             node("IsAllFinite", names, ["ok"]), node("InPlaceAccumulatorV2", ["g0", "g4", "over"], ["done", "sum"])]
    for overwrite in (False, True):
        got = run(nodes, {**inputs, "over": torch.tensor([overwrite])}, ["norm", "ok", "done", "sum", *outputs])
        norm = math.sqrt(sum(float((x**2).sum()) for x in inputs.values()))
        assert got["norm"].item() == pytest.approx(norm, rel=1e-12) and got["ok"].item() is True
        assert got["done"].tolist() == [True]
        close(got["sum"], (inputs["g4"] if overwrite else inputs["g0"] + inputs["g4"]).numpy())
        for k, x in inputs.items():
            close(got[f"new_{k}"], (x * (0.5 / (norm + 1e-6))).numpy())
    inputs["g199"][0, 0, 0] = math.nan
    assert run(nodes, {**inputs, "over": torch.tensor([True])}, ["ok"])["ok"].item() is False


def test_weights_are_stored_by_write_backs():
    """As a training graph does it: outputs marked write:<output> go to the inputs they replace."""
    given = groups(2)
    make, inputs = sequences(given, "pg")
    take, outputs = elements("p", 2)
    ins = [helper.make_tensor_value_info(k, KIND[x.dtype], x.shape) for k, x in {"lr": LR, **inputs}.items()]
    graph = helper.make_graph([*make, node("SGDOptimizerV2", ["lr", "p", "g"], ["", "P"]), *take], "g", ins,
                              [helper.make_empty_tensor_value_info(k) for k in outputs])  # fmt: skip
    for i in range(2):
        entry = graph.metadata_props.add()
        entry.key, entry.value = f"write:new_p{i}", f"p{i}"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    text = engine.Graph.onnx(model.SerializeToString()).text()
    assert text.count("write ") == 2 and text.count("sgd_step(") == 1
    got = engine.run_onnx(model.SerializeToString(), [LR, *inputs.values()])[0]
    for y, (p, g, *_) in zip(got, given):
        close(y, (p - LR.item() * g).numpy())


def written(graph):
    p, n = C.c_void_p(), C.c_size_t()
    graph.cx.check(engine.lib.om_onnx_write(graph.cx.p, graph.p, C.byref(p), C.byref(n)))
    data = C.string_at(p, n.value)
    engine.lib.om_free(graph.cx.p, p)
    return data


def test_write_and_read_back():
    """A graph with every update operator becomes a valid ONNX file and, read again, gives the same bits."""
    n = 3
    given = groups(n)
    flat = [x for group in given for x in group]
    names = [f"{k}{i}" for i in range(n) for k in "pgmv"]
    inputs = {"lr": LR, "step": STEP, **dict(zip(names, flat))}
    outs = {
        "adamw_step": [f"a{i}" for i in range(3 * n)], "sgd_step": [f"s{i}" for i in range(n)], "lamb_step": [f"l{i}" for i in range(1 + 5 * n)],
        "clip_by_norm": ["c"], "accumulate": ["b"], "l2_norm_all": ["norm"], "all_finite": ["ok"],
    }  # fmt: skip
    grads = [f"g{i}" for i in range(n)]
    calls = {
        "all_finite": (grads, ""), "l2_norm_all": (grads, ""), "clip_by_norm": (["g0", "norm"], "max_norm=0.5"),
        "accumulate": (["g0", "p0", "ok"], ""),
        "adamw_step": (["lr", "step", "ok", *names], "alpha=0.75, beta=0.875, weight_decay=0.125, adam_mode=1"),
        "sgd_step": (["lr", "_", *[f"{k}{i}" for i in range(n) for k in "pg"]], ""),
        "lamb_step": (["ok", "_", "norm", "lr", "step", *[x for i in range(n) for x in (f"p{i}", f"g{i}", f"m{i}", f"v{i}", "_")]],
                      # lists hold float32
                      "alpha=0.75, beta=0.875, epsilon=0.0009765625, lambda=0.125, ratio_max=3.0, max_norm_clip=0.5"),
    }  # fmt: skip
    short = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64"}
    lines = [f"input {k}: {short[x.dtype]}[{', '.join(map(str, x.shape))}]" for k, x in inputs.items()]
    for op, (operands, attrs) in calls.items():
        if op.endswith("step"):
            attrs = ", ".join(filter(None, [attrs, f"out_dtype=[{', '.join('0' * len(outs[op]))}]"]))
        lines.append(f"{', '.join(outs[op])} = {op}({', '.join(operands)}) {{{attrs}}}")
    used = [o for op, names in outs.items() for i, o in enumerate(names) if not (op == "lamb_step" and i and i % 5 == 0)]
    text = "graph {\n" + "\n".join([*lines, *[f"output {o}" for o in used]]) + "\n}"
    data = written(engine.Graph.parse(text))
    onnx.checker.check_model(onnx.load_from_string(data))
    want, got = engine.run(text, list(inputs.values()))[0], engine.run_onnx(data, list(inputs.values()))[0]
    for name, a, b in zip(used, want, got):
        if name == "c":  # written as a division and a product
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: [node("SGDOptimizerV2", ["lr", "x", "x"], ["", "y"])], "must be a sequence"),
        (lambda: [helper.make_node("SequenceConstruct", ["x"], ["s"]), helper.make_node("Neg", ["s"], ["y"])], "is a sequence"),
        (lambda: [helper.make_node("SequenceConstruct", ["x", "x"], ["s"]), helper.make_node("SequenceConstruct", ["x"], ["t"]),
                  node("SGDOptimizerV2", ["lr", "s", "t"], ["", "y"])], "equally many"),
        (lambda: [node("LambOptimizer", ["", "", "", "lr", "", "x", "x", "x"], ["", "y"])], "groups of 5"),
        (lambda: [node("LambOptimizer", ["", "", "", "lr", "", "x", "x", "x", "x"], ["", "y"], max_norm_clip=[0.0])], "max_norm_clip"),
        (lambda: [node("LambOptimizer", ["", "", "", "lr", "", *["x"] * 10], ["", "y"], alpha=[0.5])], "alpha has 1 entries for 2"),
        (lambda: [node("IsAllFinite", ["x"], ["y"], isinf_only=1)], "isinf_only"),
    ],
)  # fmt: skip
def test_refusals(make, text):
    with pytest.raises(engine.EngineError, match=text):
        run(make(), {"lr": LR, "x": torch.zeros(3)}, ["y"])


