"""ONNX import: every operator of docs/ONNX.md as a one-node model, with fixed and with symbolic sizes, against
onnxruntime (or onnx's reference evaluator where onnxruntime has no kernel); shape subgraphs leave no nodes; broken
files give a message."""

from __future__ import annotations

import ctypes as C
import random
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx_models import ATEN, CASES, OMD, RNG, Const, Fixed, build, f, i64, model_of, pos, reference, shape_model

import engine
from engine import EngineError, Graph


def check(m: onnx.ModelProto, inputs: dict[str, Any], passes: tuple[str, ...] = (), tol: float = 2e-5) -> Graph:
    feeds = {k: v.value if isinstance(v, Fixed) else v for k, v in inputs.items() if not isinstance(v, Const)}
    want = reference(m, feeds)
    g = Graph.onnx(m.SerializeToString()).verify()
    if passes:
        g.apply(*passes).verify()
    got = g.run([torch.from_numpy(np.array(v)) for v in feeds.values()], len(want))
    for w, x in zip(want, got):
        assert tuple(w.shape) == tuple(x.shape)
        assert str(torch.from_numpy(np.array(w)).dtype) == str(x.dtype)
        torch.testing.assert_close(x, torch.from_numpy(np.array(w)), rtol=tol, atol=tol, equal_nan=True)
    return g


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("key", CASES)
def test_operator_equals_onnxruntimes(key: str, dynamic: bool) -> None:
    if dynamic and key == "Conv:same":
        pytest.skip("auto_pad needs sizes that are numbers")
    m, inputs = model_of(key, dynamic)
    if dynamic and not any(isinstance(d, str) or d > 1 for x in inputs.values() if not isinstance(x, Const) for d in x.shape):
        pytest.skip("nothing is symbolic")
    check(m, inputs, tol=2e-2 if key.startswith("Cast:10") else 2e-5)


CLEANED = ("Reshape", "Slice", "Gather", "Concat", "MatMul", "Where", "Tile", "OneHot")


@pytest.mark.parametrize("key", [k for k in CASES if k.split(":")[0] in CLEANED])
def test_operator_after_passes(key: str) -> None:
    m, inputs = model_of(key, True)
    check(m, inputs, passes=("fold", "simplify", "cse", "simplify", "bias", "dce"))


def test_batch_norm_writes() -> None:
    x, w, bias, mean, var = f(5, 3, 7), f(3), f(3), f(3), pos(3)
    node = helper.make_node("BatchNorm", ["x", "w", "b", "m", "v"], ["y", "nm", "nv"], domain=OMD, training=1, momentum=0.25, eps=0.5)
    inputs = {"x": x, "w": w, "b": bias, "m": mean, "v": var}
    m = build([node], inputs, ["y", "nm", "nv"], types={k: (TensorProto.FLOAT, None) for k in ("y", "nm", "nv")},
              props={"role:w": "param", "role:b": "param", "role:m": "buffer", "role:v": "buffer", "write:nm": "m", "write:nv": "v"})
    outs, _ = engine.run_onnx(m.SerializeToString(), [torch.from_numpy(v) for v in inputs.values()])
    rm, rv = torch.from_numpy(mean.copy()), torch.from_numpy(var.copy())
    y = F.batch_norm(torch.from_numpy(x), rm, rv, torch.from_numpy(w), torch.from_numpy(bias), True, 0.25, 0.5)
    for got, want in zip(outs, [y, rm, rv]):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    text = Graph.onnx(m.SerializeToString()).text()
    assert "param w:" in text and "buffer m:" in text and "write nm -> m" in text and "write nv -> v" in text


def test_shape_subgraphs_vanish() -> None:
    m, inputs = shape_model()
    g = check(m, inputs, passes=("fold", "simplify", "cse", "simplify", "bias", "dce"))
    lines = [ln for ln in g.text().splitlines() if " = " in ln and not ln.lstrip().startswith(("sym", "const"))]
    ops = [ln.split(" = ")[1].split("(")[0] for ln in lines]
    assert set(ops) <= {"reshape", "permute", "iota", "le", "matmul", "where", "softmax", "slice", "div", "cast", "fill"}, ops
    other = RNG.standard_normal((5, 11, 12)).astype(np.float32)  # the same graph at other sizes
    torch.testing.assert_close(g.run([torch.from_numpy(other)], 1)[0], torch.from_numpy(reference(m, {"x": other})[0]), rtol=2e-5, atol=2e-5)


def test_computed_pads() -> None:
    """As torch's exporter writes them: lists are reshaped to rank 2, reversed and transposed; the reader evaluates what
    is constant."""
    n = helper.make_node
    nodes = [n("Reshape", ["p", "two"], ["p2"]), n("Slice", ["p2", "last", "first", "ax", "last"], ["r"]), n("Transpose", ["r"], ["t"], perm=[1, 0]),
             n("Reshape", ["t", "flat"], ["pads"]), n("Pad", ["x", "pads"], ["y"])]
    inputs = {"x": f(3, 5), "p": Const([1, 2, 3, 0]), "two": Const([-1, 2]), "last": Const([-1]), "first": Const([-(2**63) + 1]), "ax": Const([0]),
              "flat": Const([-1])}
    check(build(nodes, inputs, ["y"], dynamic=True), inputs)


def test_dim_param_expressions_and_symbol_input() -> None:
    nodes = [helper.make_node("Range", ["n", "end", "one"], ["r"]), helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT)]
    nodes.insert(0, helper.make_node("Add", ["n", "five"], ["end"]))
    g = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["s0", "s0*2 + 1"]),
                                      helper.make_tensor_value_info("n", TensorProto.INT64, [])],
                          [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5])],
                          [numpy_helper.from_array(np.array(1, np.int64), "one"), numpy_helper.from_array(np.array(5, np.int64), "five")])
    g.metadata_props.add(key="symbol:n", value="s3")
    m = helper.make_model(g, opset_imports=[helper.make_opsetid("", 23)])
    e = Graph.onnx(m.SerializeToString())
    assert "sym s3 = value of n" in e.text() and "f32[s0, s0*2 + 1]" in e.text()
    out = e.run([torch.zeros(2, 5), torch.tensor(4)], 1)[0]
    assert out.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_negative_index_only_where_needed() -> None:
    """A constant index is fixed at import; argmax and Range need nothing; an unknown one is wrapped; index_nonneg says
    not to."""
    def text(nodes: list[onnx.NodeProto], inputs: dict[str, Any]) -> str:
        return Graph.onnx(build(nodes, inputs, ["y"], types={"y": (TensorProto.FLOAT, None)}).SerializeToString()).text()

    gather = helper.make_node("Gather", ["x", "i"], ["y"])
    assert "where" not in text([gather], {"x": f(7, 5), "i": Const([-1, 3])})
    assert "where" not in text([helper.make_node("ArgMax", ["z"], ["i"], axis=1, keepdims=0), gather], {"x": f(7, 5), "z": f(3, 7)})
    assert "where" in text([gather], {"x": f(7, 5), "i": i64(3)})
    hinted = helper.make_node("Gather", ["x", "i"], ["y"])
    hinted.metadata_props.add(key="index_nonneg", value="1")
    assert "where" not in text([hinted], {"x": f(7, 5), "i": i64(3)})


def test_scopes_are_read() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    for k, v in {"module": "h.0.mlp", "file": "model.py", "line": "12"}.items():
        node.metadata_props.add(key=k, value=v)
    assert '@"h.0.mlp" "model.py":12' in Graph.onnx(build([node], {"x": f(3)}, ["y"]).SerializeToString()).text()


def test_host_nodes_are_read() -> None:
    node = helper.make_node("ATen", ["x"], ["v", "i"], domain=ATEN, operator="aten::topk", overload_name="",
                            arguments='[{"input": 0}, 2]', host_index=3)
    types = {"v": (TensorProto.FLOAT, ["s7", 2]), "i": (TensorProto.INT64, ["s7", 2])}
    m = build([node], {"x": f(7, 5)}, ["v", "i"], dynamic=True, types=types)
    text = Graph.onnx(m.SerializeToString()).verify().text()
    assert "v, i = host(x) {index=3" in text and "diff=1" in text and "f32[s7, 2], i64[s7, 2]" in text
    del m.graph.output[1].type.tensor_type.shape.dim[:]
    m.graph.output[1].type.tensor_type.shape.dim.add()
    with pytest.raises(EngineError, match="size along axis 0 is not given"):
        Graph.onnx(m.SerializeToString())


def test_random_streams_are_numbered() -> None:
    nodes = [helper.make_node("Dropout", ["x", "p", "t"], ["a", "mask"]), helper.make_node("Dropout", ["a", "p", "t"], ["y"])]
    m = build(nodes, {"x": f(40, 50), "p": Const(0.25, np.float32), "t": Const(True, bool)}, ["y", "a", "mask"],
              types={"y": (TensorProto.FLOAT, None), "a": (TensorProto.FLOAT, None), "mask": (TensorProto.BOOL, None)})
    g = Graph.onnx(m.SerializeToString()).verify()
    assert g.text().count("rng=1") == 2 and g.text().count("rng=2") == 1
    x = torch.rand(40, 50) + 0.5
    y, a, mask = g.run([x], 3, seed=5)
    torch.testing.assert_close(a, torch.where(mask, x / 0.75, torch.zeros(())))
    assert 0.2 < (~mask).float().mean() < 0.3 and (y == 0).sum() > (a == 0).sum()

# --- broken files ----------------------------------------------------------------------------------------

def refused(data: bytes, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        Graph.onnx(data)


def test_broken_files_are_refused_by_name() -> None:
    def one(op: str, inputs: dict[str, Any], opset: int = 23, out: list | None = None, ins: list[str] | None = None, to: str = "y",
            **attrs: Any) -> bytes:
        node = helper.make_node(op, ins or list(inputs), [to], name="nd", **attrs)
        return build([node], inputs, ["y"], opset, types={"y": (TensorProto.FLOAT, out)}).SerializeToString()

    refused(b"", "empty")
    refused(b"\x08\x07\x3a\xff", "byte 3: .*length")
    refused(one("NonZero", {"x": f(3)}), r"ONNX node 0 'nd' \(NonZero\).*not supported")
    refused(one("Relu", {"x": f(3)}, opset=12), "opset 12.*13 to 23")
    refused(one("Reshape", {"x": f(3, 5), "s": i64(2)}), "operand 1 's' must be known before the run")
    refused(one("Reshape", {"x": f(3, 5), "s": Const([4, -1])}), "cannot be inferred")
    refused(one("Softmax", {"x": f(3, 5)}, axis=7), "axis 7 of a tensor of rank 2")
    refused(one("Gather", {"x": f(3, 5), "i": Const([3])}), "index 3, but the axis has size 3")
    refused(one("MatMul", {"x": f(3, 5), "w": f(3, 5)}), "ONNX node 0 'nd' .*matmul")
    refused(one("Add", {"x": f(3), "z": f(5)}), "ONNX node 0 'nd'")
    refused(one("Relu", {"x": f(3)}, ins=["nope"]), "input 0 'nope' is not defined")
    refused(one("Relu", {"x": f(3)}, to="z"), "output 0 'y' is computed by no node")
    refused(one("Relu", {"x": f(3)}, out=[4]), r"is f32\[3\], but the file's value_info says f32\[4\]")
    m = build([helper.make_node("Add", ["x", "w"], ["y"])], {"x": f(3), "w": Const(f(3), np.float32)}, ["y"])
    m.graph.initializer[0].raw_data = m.graph.initializer[0].raw_data[:-1]
    refused(m.SerializeToString(), "3 elements of 4 bytes, but 11 bytes")


def test_truncated_and_flipped_bytes() -> None:
    """Never a crash, never a failure without a message."""
    m, _ = shape_model()
    data = m.SerializeToString()
    tries = [data[:n] for n in range(0, len(data), 7)]
    rnd = random.Random(1)
    for _ in range(1500):
        bad = bytearray(data)
        for _ in range(rnd.choice((1, 1, 2, 5))):
            bad[rnd.randrange(len(bad))] ^= 1 << rnd.randrange(8)
        tries.append(bytes(bad))
    refusals = 0
    for t in tries:
        try:
            Graph.onnx(t).verify()
        except EngineError as e:
            refusals += 1
            assert len(str(e)) > 20 and "without a message" not in str(e)
    assert refusals > len(tries) // 3


def test_every_allocation_may_fail() -> None:
    """Reading, cleaning, differentiating, printing, parsing and writing with an allocator that fails at its k-th call:
    a message, and every block given back."""
    libc = C.CDLL(None)
    libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = C.c_void_p, [C.c_size_t, C.c_size_t]
    libc.free.argtypes = [C.c_void_p]
    state = {"calls": 0, "fail": -1, "live": 0}

    @engine.ALLOC
    def alloc(_user: Any, size: int) -> Any:
        state["calls"] += 1
        if state["calls"] == state["fail"]:
            return None
        state["live"] += 1
        return libc.aligned_alloc(64, (size + 63) // 64 * 64)

    @engine.FREE
    def free(_user: Any, p: int, _size: int) -> None:
        state["live"] -= 1
        libc.free(p)

    lib, services = engine.lib, engine.Services(alloc=alloc, free=free)
    data = shape_model()[0].SerializeToString()
    lists = (C.c_void_p * 6)(*[C.addressof(C.c_char.in_dll(lib, "om_pass_" + p)) for p in ("fold", "simplify", "cse", "bias", "dce")])

    def everything(cx: C.c_void_p) -> int:
        g, joint, parsed = C.c_void_p(), C.c_void_p(), C.c_void_p()
        text, out, n = C.c_void_p(), C.c_void_p(), C.c_size_t()
        s = (lib.om_onnx_read(cx, data, C.c_size_t(len(data)), C.byref(g)) or lib.om_passes_run(cx, lists, C.byref(g)) or lib.om_verify(g)
             or lib.om_onnx_write(cx, g, C.byref(out), C.byref(n)) or lib.om_grad_build(cx, g, b"\1", b"\1", C.byref(joint))
             or lib.om_graph_print(joint, C.byref(text)) or lib.om_graph_parse(cx, text, C.byref(parsed)))
        for p in (g, joint, parsed):
            lib.om_graph_free(p)
        lib.om_free(cx, text)
        lib.om_free(cx, out)
        return s

    k, status = 0, 1
    while status:
        k += 1
        state.update(calls=0, fail=k)
        cx = lib.om_ctx_new(C.byref(services))
        if not cx:
            continue
        cx = C.c_void_p(cx)
        status = everything(cx)
        message = lib.om_ctx_message(cx).decode()
        lib.om_ctx_free(cx)
        assert state["live"] == 0, f"failing allocation {k} leaks"
        assert (status == 1 and "out of memory" in message) or (status == 0 and not message), (k, status, message)
    assert k > 50
