"""ONNX files made for tests: one operator each with fixed or symbolic sizes (CASES), one that computes sizes; what
onnxruntime or onnx's reference evaluator makes of a file; the file of an engine's graph."""

from __future__ import annotations

import ctypes as C
from typing import Any

import new_op
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import engine
from engine import Graph

RNG = np.random.default_rng(0)
MS, OMD, ATEN = "com.microsoft", "ortmodule", "org.pytorch.aten"


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def pos(*shape: int) -> np.ndarray:
    return (np.abs(RNG.standard_normal(shape)) + 0.5).astype(np.float32)


def i64(*shape: int, lo: int = 0, hi: int = 3) -> np.ndarray:
    return RNG.integers(lo, hi, shape).astype(np.int64)


def b(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(bool)


class Const:
    """An operand that is an initialiser of the file."""

    def __init__(self, value: Any, dtype: Any = np.int64):
        self.value = np.asarray(value, dtype)


class Fixed:
    """An operand of which these axes stay numbers in the symbolic form (head sizes, kernels)."""

    def __init__(self, value: np.ndarray, *axes: int):
        self.value, self.axes, self.dtype, self.shape = value, axes, value.dtype, value.shape


def build(nodes: list[onnx.NodeProto], inputs: dict[str, Any], outputs: list[str], opset: int = 23, dynamic: bool = False,
          types: dict[str, tuple[int, list]] | None = None, props: dict[str, str] | None = None, infer: bool = True) -> onnx.ModelProto:
    """dynamic: every size > 1 of the graph inputs becomes a symbol of its own value, s7 for 7: equal sizes share it."""
    def dim(x: Any, axis: int) -> int | str:
        d = x.shape[axis]
        return f"s{d}" if dynamic and d > 1 and not (isinstance(x, Fixed) and axis in x.axes) else d

    ins, inits = [], []
    for name, x in inputs.items():
        if isinstance(x, Const):
            inits.append(numpy_helper.from_array(x.value, name))
        else:
            ins.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), [dim(x, a) for a in range(len(x.shape))]))
    outs = [helper.make_tensor_value_info(o, *types[o]) if types and o in types else onnx.ValueInfoProto(name=o) for o in outputs]
    g = helper.make_graph(nodes, "g", ins, outs, inits)
    for k, v in (props or {}).items():
        g.metadata_props.add(key=k, value=v)
    m = helper.make_model(g, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)], ir_version=10)
    if infer and not types:
        m = onnx.shape_inference.infer_shapes(m)
        for o in m.graph.output:  # a few operators have no inference: the engine does not need it, onnxruntime does
            if not o.type.tensor_type.elem_type:
                o.type.tensor_type.elem_type = TensorProto.FLOAT
    return m


def reference(m: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    try:
        s = ort.InferenceSession(m.SerializeToString(), ort.SessionOptions(), providers=["CPUExecutionProvider"])
        return s.run(None, feeds)
    except Exception:  # noqa: BLE001 - no kernel in onnxruntime
        from onnx.reference import ReferenceEvaluator
        return ReferenceEvaluator(m).run(None, feeds)


# id: operator, operands (None = left out), attributes, outputs, opset
CASES: dict[str, tuple] = {}


def case(op: str, *operands: Any, n_out: int = 1, opset: int = 23, domain: str = "", tag: str = "", **attrs: Any) -> None:
    key = op + (":" + tag if tag else "")
    while key in CASES:
        key += "'"
    CASES[key] = (op, operands, attrs, n_out, opset, domain)


for _op in "Softplus Floor Ceil Round IsNaN IsInf LeakyRelu Elu HardSigmoid HardSwish".split():
    case(_op, f(2, 3, 5))
for _op, _, _n in new_op.plain().values():  # rows of pointwise.def
    case(_op, *[pos(2, 3, 5) if _op in ("Log", "Sqrt", "Reciprocal") else f(2, 3, 5) for _ in range(_n)])
case("Round", np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4], np.float32), tag="even")
case("IsInf", np.array([1, np.inf, -np.inf, np.nan], np.float32), detect_negative=0, tag="positive")
case("IsInf", np.array([1, np.inf, -np.inf, np.nan], np.float32), detect_positive=0, tag="negative")
case("Gelu", f(3, 5))
case("Gelu", f(3, 5), approximate="tanh", tag="tanh")
case("Elu", f(3, 5), alpha=0.7, tag="alpha")
case("PRelu", f(2, 3, 5), Const(pos(3, 1), np.float32))
case("Not", b(3, 5))
case("Neg", i64(5, lo=-3), tag="int")
case("BitwiseNot", i64(5, lo=-9, hi=9))
for _op in "Add Sub Mul Div Max Min".split():
    case(_op, f(2, 3, 5), pos(3, 1), tag="broadcast")
    case(_op, f(7), Const(2.5, np.float32), tag="constant")
case("Div", i64(11, lo=-20, hi=20), Const([3, -3, 2, -2, 5, -5, 7, -7, 1, -1, 4]), tag="int truncates")
case("Max", f(3, 5), f(5), f(3, 1), tag="three")
case("Min", i64(3, 5, lo=-9, hi=9), i64(5, lo=-9, hi=9), tag="int")
case("Sum", f(3, 5), f(5), f(3, 1))
case("Mean", f(3, 5), f(5), f(3, 1))
case("Pow", pos(3, 5), Const(2.5, np.float32))
case("Pow", f(3, 5), Const(2), tag="int exponent")
case("Mod", i64(11, lo=-20, hi=20), Const([3, -3, 2, -2, 5, -5, 7, -7, 1, -1, 4]))
case("Mod", f(7), Const(f(7), np.float32), fmod=1, tag="fmod")
for _op in "And Or Xor".split():
    case(_op, b(3, 5), b(5))
for _op in "BitwiseAnd BitwiseOr BitwiseXor".split():
    case(_op, i64(7, lo=-99, hi=99), i64(7, lo=-99, hi=99))
for _op in "Equal Less LessOrEqual Greater GreaterOrEqual".split():
    case(_op, i64(3, 5), i64(5))
    case(_op, f(3, 5), f(5), tag="float")
case("Where", b(3, 5), f(5), f(2, 3, 1))
case("Clip", f(3, 5), Const(-0.5, np.float32), Const(0.7, np.float32))
case("Clip", f(3, 5), None, Const(0.7, np.float32), tag="max only")
case("Clip", f(3, 5), tag="nothing")
for _t in (TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.BOOL):
    case("Cast", pos(3, 5) * 3, to=_t, tag=str(_t))
case("CastLike", f(3, 5), Const(0, np.int32))
case("Identity", f(3, 5))
case("Reshape", f(2, 3, 5), Const([5, -1]))
case("Reshape", f(2, 3, 5), Const([0, -1]), tag="zero copies")
case("Reshape", f(2, 3, 5), Const([-1]), tag="flat")
case("Flatten", f(2, 3, 5))
case("Flatten", f(2, 3, 5), axis=-1, tag="negative")
case("Flatten", f(2, 3, 5), axis=0, tag="zero")
case("Squeeze", f(1, 3, 1, 5), Const([0, -2]))
case("Squeeze", f(1, 3, 1, 5), tag="all")
case("Unsqueeze", f(3, 5), Const([0, -1]))
case("Transpose", f(2, 3, 5))
case("Transpose", f(2, 3, 5), perm=[1, 2, 0], tag="perm")
case("Expand", f(3, 1), Const([2, 1, 5]))
case("Expand", f(3, 5), Const([3, 1]), tag="keeps")
case("Slice", f(7, 11), Const([1, 2]), Const([5, 9]))
case("Slice", f(7, 11), Const([-5]), Const([2**63 - 1]), Const([1]), tag="to the end")
case("Slice", f(7, 11), Const([-100, 9]), Const([100, -3]), Const([0, 1]), Const([2, 3]), tag="steps clamped")
case("Slice", f(7, 11), Const([-1]), Const([-(2**63) + 1]), Const([0]), Const([-1]), tag="reverse")
case("Concat", f(2, 3), f(2, 5), f(2, 1), axis=-1)
case("Concat", f(2, 3), axis=0, tag="one")
case("Split", f(7, 6), n_out=3, axis=-1, num_outputs=3)
case("Split", f(7, 2), n_out=3, num_outputs=3, tag="uneven")
case("Split", f(7, 6), Const([1, 2, 4]), n_out=3, tag="sizes")
case("Pad", f(3, 5), Const([1, 0, 2, 3]), Const(1.5, np.float32))
case("Pad", f(3, 5), Const([2, 1]), None, Const([1]), tag="axes")
case("Pad", f(3, 5), Const([-1, 0, 2, -2]), tag="crop")
for _m in ("reflect", "edge", "wrap"):
    case("Pad", f(3, 5), Const([1, 2, 2, 3]), mode=_m, tag=_m)
case("Tile", f(2, 3), Const([3, 2]))
case("CumSum", f(3, 5), Const(1))
case("CumSum", f(3, 5), Const(-2), exclusive=1, reverse=1, tag="exclusive reverse")
case("Trilu", f(2, 5, 7))
case("Trilu", f(5, 7), Const(-2), upper=0, tag="lower")
case("OneHot", i64(3, 2, lo=-4, hi=6), Const(5), Const([0.5, 2], np.float32))
case("OneHot", i64(3, hi=5), Const([5]), Const([0, 1]), axis=0, tag="axis 0")
case("Range", Const(3), Const(17), Const(4))
case("Range", Const(17), Const(3), Const(-4), tag="down")
case("Range", Const(0.5, np.float32), Const(3, np.float32), Const(0.7, np.float32), tag="float")
case("ConstantOfShape", Const([2, 3]), value=numpy_helper.from_array(np.array([2.5], np.float32)))
case("Gather", f(7, 5), i64(2, 3, lo=-7, hi=7))
case("Gather", f(7, 5), Const([[0, -1], [-5, 3]]), axis=1, tag="constant")
case("Gather", f(7, 5), Const(-2), axis=1, tag="one")
case("GatherElements", f(7, 5), i64(2, 5, lo=-7, hi=7))
case("GatherND", f(7, 5, 3), Const([[-1, 2], [3, -4]]))
case("GatherND", f(7, 5, 3), i64(2, 2, 1, lo=-7, hi=7), tag="computed")
case("ScatterElements", f(7, 5), np.array([[0, -1, 2, 3, -3]]), f(1, 5))
case("ScatterElements", f(7, 5), i64(3, 5, lo=-7, hi=7), f(3, 5), reduction="add", tag="add")
case("ScatterND", f(7, 5), Const([[-1], [2]]), f(2, 5))
case("ScatterND", f(7, 5), Fixed(i64(4, 2, lo=-5, hi=5), 1), f(4), reduction="add", tag="add")
for _op in "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp".split():
    case(_op, f(2, 3, 5), Const([0, -1]))
    case(_op, f(2, 3, 5), keepdims=0, tag="all")
    if _op != "ReduceSum":
        case(_op, f(2, 3, 5), axes=[1], keepdims=0, opset=13, tag="opset 13")
case("ReduceLogSum", pos(3, 5), Const([1]))
case("ReduceSum", f(3, 5), Const([], np.int64), noop_with_empty_axes=1, tag="noop")
case("ReduceMax", i64(3, 5, lo=-9, hi=9), Const([1]), tag="int")
case("ArgMax", f(3, 5), axis=1)
case("ArgMin", f(3, 5), axis=-2, keepdims=0)
case("Softmax", f(2, 3, 5))
case("Softmax", f(2, 3, 5), axis=1, tag="axis 1")
case("LogSoftmax", f(2, 3, 5), axis=0)
case("LayerNormalization", f(2, 3, 5), f(5), f(5), epsilon=1e-3, n_out=3)
case("LayerNormalization", f(2, 3, 5), f(3, 5), axis=1, tag="axis 1")
case("LayerNormalization", f(2, 3, 5), Const(f(1), np.float32), tag="broadcast scale")
case("RMSNormalization", f(2, 3, 5), f(5), epsilon=1e-3)
case("GroupNormalization", f(2, 6, 5), f(6), f(6), num_groups=3)
case("GroupNormalization", f(2, 6, 5, 3), f(2), f(2), num_groups=2, opset=18, tag="opset 18")
case("InstanceNormalization", f(2, 3, 5, 7), f(3), f(3))
case("BatchNormalization", f(2, 3, 5), f(3), f(3), f(3), pos(3))
case("MatMul", f(3, 5), f(5, 7))
case("MatMul", f(2, 1, 3, 5), f(11, 5, 7), tag="batch")
case("MatMul", f(5), f(2, 5, 7), tag="vector left")
case("MatMul", f(2, 3, 5), f(5), tag="vector right")
case("MatMul", f(5), f(5), tag="dot")
case("Gemm", f(3, 5), f(5, 7), f(7))
case("Gemm", f(5, 3), f(7, 5), f(3, 1), transA=1, transB=1, alpha=0.5, beta=2.0, tag="all")
case("Attention", Fixed(f(2, 3, 5, 7), 3), Fixed(f(2, 3, 11, 7), 3), Fixed(f(2, 3, 11, 13), 3))
case("Attention", Fixed(f(2, 3, 5, 7), 3), Fixed(f(2, 3, 5, 7), 3), Fixed(f(2, 3, 5, 7), 3), is_causal=1, tag="causal")
case("Attention", Fixed(f(2, 3, 5, 7), 3), Fixed(f(2, 3, 11, 7), 3), Fixed(f(2, 3, 11, 7), 3), f(5, 11), scale=0.3, tag="mask")
case("Attention", Fixed(f(2, 5, 21), 2), Fixed(f(2, 11, 21), 2), Fixed(f(2, 11, 21), 2), q_num_heads=3, kv_num_heads=3, tag="flat")
case("Dropout", f(3, 5))
case("Dropout", f(3, 5), Const(0.5, np.float32), Const(False, bool), n_out=2, tag="mask")
case("SoftmaxCrossEntropyLoss", f(7, 5), i64(7, hi=5))
case("SoftmaxCrossEntropyLoss", f(3, 5, 7), i64(3, 7, hi=5), pos(5), reduction="none", ignore_index=2, n_out=2, tag="rank 3")
case("SoftmaxCrossEntropyLoss", f(7, 5), i64(7, hi=5), pos(5), reduction="sum", ignore_index=-1, tag="sum")
case("NegativeLogLikelihoodLoss", f(3, 5, 7), i64(3, 7, hi=5), pos(5), ignore_index=3)
case("NegativeLogLikelihoodLoss", f(7, 5), i64(7, hi=5), reduction="none", tag="none")
case("Conv", Fixed(f(2, 4, 11), 1), Fixed(f(6, 2, 3), 0, 1, 2), f(6), group=2, strides=[2], pads=[1, 1])
case("Conv", f(2, 3, 7, 11), Fixed(f(5, 3, 3, 2), 2, 3), dilations=[2, 1], pads=[1, 0, 2, 1], tag="asymmetric")
case("Conv", f(2, 3, 7, 11), f(5, 3, 3, 2), auto_pad="SAME_UPPER", strides=[2, 2], tag="same")
case("MaxPool", f(2, 3, 7, 11), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0])
case("MaxPool", f(2, 3, 7, 11), kernel_shape=[3, 2], n_out=2, tag="indices")
case("MaxPool", f(2, 3, 7), kernel_shape=[3], strides=[2], ceil_mode=1, tag="ceil")
case("AveragePool", f(2, 3, 7, 11), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0])
case("AveragePool", f(2, 3, 7, 11), kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1, tag="include")
case("GlobalAveragePool", f(2, 3, 7, 11))
case("GlobalMaxPool", f(2, 3, 7))
case("ConvTranspose", f(2, 4, 11), Fixed(f(4, 3, 3), 0, 1, 2), group=2, strides=[2], pads=[1, 1], output_padding=[1])
case("ConvTranspose", f(2, 3, 5, 7), Fixed(f(3, 5, 3, 2), 2, 3), f(5), dilations=[2, 1], pads=[1, 0, 2, 1], tag="asymmetric")
case("Col2Im", Fixed(f(2, 12, 20), 1, 2), Const([6, 7], np.int64), Const([2, 3], np.int64), dilations=[2, 2], pads=[0, 1, 0, 1])
case("TopK", f(3, 11), Const([4], np.int64), n_out=2)
case("TopK", f(7, 3), Const([7], np.int64), axis=0, largest=0, n_out=2, tag="all")
for _op, _gates, _more in (("RNN", 1, {}), ("GRU", 3, {"linear_before_reset": 1}), ("LSTM", 4, {})):
    for _dirs, _way in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
        _w = [Fixed(f(_dirs, _gates * 5, 6), 0, 1, 2), Fixed(f(_dirs, _gates * 5, 5), 0, 1, 2), f(_dirs, 2 * _gates * 5)]
        _states = [None, Fixed(f(_dirs, 3, 5), 0, 2)] + [Fixed(f(_dirs, 3, 5) * 2, 0, 2)] * (_op == "LSTM")
        _n = 3 if _op == "LSTM" else 2
        case(_op, Fixed(f(7, 3, 6), 2), *_w, *_states, n_out=_n, hidden_size=5, direction=_way, tag=_way, **_more)
        case(_op, Fixed(f(7, 3, 6), 2), *_w[:2], n_out=_n, hidden_size=5, direction=_way, tag=_way + ", bare", **_more)
case("RNN", Fixed(f(7, 3, 6), 2), Fixed(f(1, 5, 6), 0, 1, 2), Fixed(f(1, 5, 5), 0, 1, 2), hidden_size=5, activations=["Relu"], tag="relu")
case("FusedMatMul", f(5, 3), f(7, 5), transA=1, transB=1, alpha=0.5, domain=MS)
case("BiasGelu", f(3, 5), f(5), domain=MS)
case("FastGelu", f(3, 5), f(5), domain=MS)
case("QuickGelu", f(3, 5), domain=MS)


def model_of(key: str, dynamic: bool) -> tuple[onnx.ModelProto, dict[str, Any]]:
    op, operands, attrs, n_out, opset, domain = CASES[key]
    inputs = {f"x{i}": x for i, x in enumerate(operands) if x is not None}
    outputs = [f"y{i}" for i in range(n_out)]
    node = helper.make_node(op, [f"x{i}" if x is not None else "" for i, x in enumerate(operands)], outputs, domain=domain, **attrs)
    types = None
    if domain:
        types = {"y0": (TensorProto.FLOAT, None)}
    m = build([node], inputs, outputs, opset, dynamic, types=types)
    return m, inputs


def written(g: Graph) -> bytes:
    p, n = C.c_void_p(), C.c_size_t()
    g.cx.check(engine.lib.om_onnx_write(g.cx.p, g.p, C.byref(p), C.byref(n)))
    data = C.string_at(p.value, n.value)
    engine.lib.om_free(g.cx.p, p)
    return data


def shape_model() -> tuple[onnx.ModelProto, dict[str, Any]]:
    """x (b, t, 12) -> heads (b, 3, t, 4) by a Shape/Gather/Concat subgraph, a causal mask by Range, a Slice to t -
    1."""
    n = helper.make_node
    nodes = [n("Shape", ["x"], ["shape"]), n("Gather", ["shape", "zero"], ["b"]), n("Gather", ["shape", "one"], ["t"]),
             n("Unsqueeze", ["b", "ax0"], ["b1"]), n("Unsqueeze", ["t", "ax0"], ["t1"]), n("Concat", ["b1", "t1", "three", "minus"], ["to"], axis=0),
             n("Reshape", ["x", "to"], ["h"]), n("Transpose", ["h"], ["q"], perm=[0, 2, 1, 3]),
             n("Range", ["zero", "t", "one"], ["pos"]), n("Unsqueeze", ["pos", "ax0"], ["row"]), n("Unsqueeze", ["pos", "ax1"], ["col"]),
             n("LessOrEqual", ["row", "col"], ["mask"]), n("Transpose", ["h"], ["k"], perm=[0, 2, 3, 1]), n("MatMul", ["q", "k"], ["s"]),
             n("Where", ["mask", "s", "low"], ["masked"]), n("Softmax", ["masked"], ["p"], axis=-1),
             n("Sub", ["t1", "ones"], ["last"]), n("Slice", ["p", "zeros", "last", "two"], ["cut"]),
             n("Cast", ["t"], ["tf"], to=TensorProto.FLOAT), n("Div", ["cut", "tf"], ["y"])]
    inputs = {"x": f(2, 7, 12), "zero": Const(0), "one": Const(1), "ax0": Const([0]), "ax1": Const([1]), "three": Const([3]), "minus": Const([-1]),
              "low": Const(-1e9, np.float32), "ones": Const([1]), "zeros": Const([0]), "two": Const([2])}
    return build(nodes, inputs, ["y"], dynamic=True), inputs
