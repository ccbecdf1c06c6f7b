"""Gradients of compositions of ONNX operators, against eager PyTorch in fp64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from onnx_models import OMD, Const, build, f, i64, pos

import engine


def grads(nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], consts: dict[str, Const], fn: Any) -> None:
    """Gradients of one output y in fp64 against eager PyTorch's."""
    feeds = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in inputs.items()}
    for c in consts.values():
        if c.value.dtype == np.float32:
            c.value = c.value.astype(np.float64)
    m = build(nodes, {**feeds, **consts}, ["y"], types={"y": (TensorProto.DOUBLE, None)})
    ts = [torch.from_numpy(v) for v in feeds.values()]
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in ts]
    want = fn(*leaves)
    dy = torch.randn_like(want)
    want.backward(dy)
    outs, ds = engine.run_onnx(m.SerializeToString(), ts, dys=[dy])
    torch.testing.assert_close(outs[0], want.detach(), rtol=1e-10, atol=1e-12)
    for t, d in zip([t for t in leaves if t.requires_grad], ds):
        zero = torch.zeros_like(t)
        torch.testing.assert_close(zero if d is None else d, zero if t.grad is None else t.grad, rtol=1e-10, atol=1e-12)


def n1(op: str, ins: list[str], domain: str = "", **attrs: Any) -> list[onnx.NodeProto]:
    return [helper.make_node(op, ins, ["y"], domain=domain, **attrs)]


def test_grad_clip_at_bounds() -> None:
    x = np.array([-1.0, -0.5, 0.0, 0.25, 0.7, 0.9], np.float32)
    lo, hi = Const(-0.5, np.float64), Const(np.float64(np.float32(0.7)), np.float64)
    grads(n1("Clip", ["x", "lo", "hi"]), {"x": x}, {"lo": lo, "hi": hi}, lambda t: t.clamp(-0.5, float(np.float32(0.7))))


def test_grad_norm_at_zero() -> None:
    x = f(3, 5)
    x[1] = 0
    grads(n1("ReduceL2", ["x", "a"]), {"x": x}, {"a": Const([1])}, lambda t: torch.linalg.vector_norm(t, dim=1, keepdim=True))


def test_grad_logsumexp() -> None:
    grads(n1("ReduceLogSumExp", ["x", "a"], keepdims=0), {"x": f(3, 5, 7)}, {"a": Const([0, 2])}, lambda t: torch.logsumexp(t, (0, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_grad_logsumexp_of_infinities(dtype: torch.dtype) -> None:
    """Beside infinity the others get zero, also those whose exponential overflows."""
    inf = math.inf
    x = torch.tensor([[0, inf, 800, -inf], [-inf, -inf, -inf, -inf], [inf, 20.5, inf, 1], [1, -inf, 2, 3]], dtype=dtype)
    onnx_type = {torch.float64: TensorProto.DOUBLE, torch.float32: TensorProto.FLOAT, torch.bfloat16: TensorProto.BFLOAT16,
                 torch.float16: TensorProto.FLOAT16}[dtype]
    axes = helper.make_tensor("a", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(n1("ReduceLogSumExp", ["x", "a"], keepdims=0), "g", [helper.make_tensor_value_info("x", onnx_type, [4, 4])],
                              [helper.make_tensor_value_info("y", onnx_type, [4])], [axes])
    m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    (y,), (dx,) = engine.run_onnx(m.SerializeToString(), [x], dys=[torch.ones(4, dtype=dtype)])
    leaf = x.clone().requires_grad_()
    want = leaf.logsumexp(1)
    want.sum().backward()
    near = dict(rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(y, want.detach(), **near)
    torch.testing.assert_close(dx, leaf.grad, **near)


def test_grad_elu() -> None:
    x = f(3, 5)
    x[0, 0] = 800.0
    grads(n1("Elu", ["x"]), {"x": x}, {}, F.elu)


def test_grad_group_norm() -> None:
    grads(n1("GroupNormalization", ["x", "w", "b"], num_groups=3), {"x": f(2, 6, 5), "w": f(6), "b": f(6)}, {},
          lambda x, w, b: F.group_norm(x, 3, w, b, float(np.float32(1e-5))))


def test_grad_split_concat_slice() -> None:
    nodes = [helper.make_node("Split", ["x"], ["a", "b", "c"], axis=1, num_outputs=3), helper.make_node("Slice", ["b", "s", "e", "ax", "st"], ["bb"]),
             helper.make_node("Concat", ["c", "bb", "a"], ["y"], axis=1)]
    grads(nodes, {"x": f(3, 15)}, {"s": Const([-1]), "e": Const([-100]), "ax": Const([1]), "st": Const([-2])},
          lambda x: torch.cat([x.chunk(3, 1)[2], x.chunk(3, 1)[1].flip(1)[:, ::2], x.chunk(3, 1)[0]], 1))


def test_grad_cross_entropy() -> None:
    labels = i64(3, 7, hi=5)
    labels[0, 0] = -100
    grads(n1("CrossEntropy", ["x", "l", "w"], OMD, label_smoothing=0.125, reduction="mean"), {"x": f(3, 5, 7), "l": labels, "w": pos(5)}, {},
          lambda x, lab, w: F.cross_entropy(x, lab, w.detach(), label_smoothing=0.125) + 0 * w.sum())


def test_grad_sizes_spelt_differently() -> None:
    """Sizes the file does not know to be equal: x (s0, 5) + y (s1, 5), and updates (s2, 5) for two constant rows."""
    for node, inputs in ((helper.make_node("Add", ["a", "b"], ["y"]), {"a": f(7, 5), "b": f(7, 5)}),
                         (helper.make_node("ScatterND", ["a", "i", "b"], ["y"]), {"a": f(7, 5), "i": Const([[-1], [2]]), "b": f(2, 5)})):
        m = build([node], inputs, ["y"], types={"y": (TensorProto.FLOAT, None)})
        for k, v in enumerate(m.graph.input):
            v.type.tensor_type.shape.dim[0].dim_param = f"s{k}"
        a, b = (torch.from_numpy(v) for v in inputs.values() if not isinstance(v, Const))
        dy = torch.randn(7, 5)
        _, (da, db) = engine.run_onnx(m.SerializeToString(), [a, b], dys=[dy])
        if node.op_type == "Add":
            assert torch.equal(da, dy) and torch.equal(db, dy)
        else:
            keep = torch.ones(7, 1)
            keep[[6, 2]] = 0
            assert torch.equal(da, dy * keep) and torch.equal(db, dy[[6, 2]])


def test_grad_embedding_padding() -> None:
    grads(n1("Embedding", ["w", "i"], OMD, padding_idx=2), {"w": f(5, 3), "i": i64(7, hi=5)}, {}, lambda w, i: F.embedding(i, w, padding_idx=2))


def test_grad_attention() -> None:
    grads(n1("Attention", ["q", "k", "v"], OMD, is_causal=1, scale=0.25), {"q": f(2, 3, 5, 7), "k": f(2, 3, 5, 7), "v": f(2, 3, 5, 11)}, {},
          lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25))


def test_stop_gradient_and_straight_through() -> None:
    nodes = [helper.make_node("Round", ["x"], ["r"]), helper.make_node("StraightThrough", ["r", "x"], ["s"], domain=OMD),
             helper.make_node("StopGradient", ["x"], ["d"], domain=OMD), helper.make_node("Mul", ["s", "d"], ["y"])]
    grads(nodes, {"x": f(3, 5)}, {}, lambda x: (x + (x.round() - x).detach()) * x.detach())
