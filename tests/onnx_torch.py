"""Runs a captured ONNX file in PyTorch, node by node, differentiably: an oracle for the capture that knows nothing of
the engine.

Standard operators are written from their definition in the ONNX specification, the ortmodule ones from docs/ONNX.md.
Autograd of PyTorch then gives gradients of the *file*, to be compared with gradients of the module it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor

from ortmodule.capture.elementwise import PLAIN

DTYPE = {1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16,
         11: torch.float64, 16: torch.bfloat16}


def to_torch(t: onnx.TensorProto) -> Tensor:
    if t.data_type == 16:
        return torch.frombuffer(bytearray(t.raw_data), dtype=torch.bfloat16).reshape(tuple(t.dims))
    return torch.from_numpy(np.array(numpy_helper.to_array(t)))


class Graph:
    """A captured file. run(inputs) -> values of all graph outputs, in order."""

    def __init__(self, data: bytes, host_ops: Sequence[Any] = ()) -> None:
        self.model = onnx.load_from_string(data)
        self.graph = self.model.graph
        self.host_ops = host_ops
        self.constants = {t.name: to_torch(t) for t in self.graph.initializer}
        self.types = {v.name: v.type.tensor_type for v in [*self.graph.value_info, *self.graph.output]}
        self.symbols: dict[str, int] = {}

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        values: dict[str, Tensor] = dict(self.constants)
        assert len(inputs) == len(self.graph.input)
        notes = {e.key: e.value for e in self.graph.metadata_props}
        for spec, x in zip(self.graph.input, inputs, strict=True):
            tt = spec.type.tensor_type
            assert DTYPE[tt.elem_type] == x.dtype and len(tt.shape.dim) == x.dim(), f"{spec.name}: {x.dtype} {tuple(x.shape)}"
            for d, size in zip(tt.shape.dim, x.shape, strict=True):
                if d.dim_param.isidentifier():
                    self.symbols.setdefault(d.dim_param, size)
                elif not d.dim_param:
                    assert d.dim_value == size, f"{spec.name}: {d.dim_value} != {size}"
            if f"symbol:{spec.name}" in notes:
                self.symbols[notes[f"symbol:{spec.name}"]] = int(x)
            values[spec.name] = x
        for node in self.graph.node:
            attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in attrs.items()}
            attrs |= {e.key[4:]: float(e.value) for e in node.metadata_props if e.key.startswith("f64:")}
            out = self.node(node, [values[i] if i else None for i in node.input], attrs)
            outs = list(out) if isinstance(out, (list, tuple)) else [out]
            assert len(outs) >= len(node.output), f"{node.op_type}: {len(outs)} results"
            for name, y in zip(node.output, outs, strict=False):
                self.check(node, name, y)
                values[name] = y
        return [values[o.name] for o in self.graph.output]

    def check(self, node: onnx.NodeProto, name: str, y: Tensor) -> None:
        """What the file says about the value is true."""
        tt = self.types[name]
        said = [self.size(d) for d in tt.shape.dim]
        assert DTYPE[tt.elem_type] == y.dtype, f"{node.name} ({node.op_type}): {DTYPE[tt.elem_type]} in the file, {y.dtype} computed"
        assert said == list(y.shape), f"{node.name} ({node.op_type}): {said} in the file, {list(y.shape)} computed"

    def size(self, d: Any) -> int:
        names = {"Max": max, "Min": min, "Mod": lambda a, b: a % b, **self.symbols}
        return int(eval(d.dim_param, {"__builtins__": {}}, names)) if d.dim_param else int(d.dim_value)

    def node(self, node: onnx.NodeProto, x: list[Any], a: dict[str, Any]) -> Any:
        if node.domain in ("org.pytorch.aten", "com.microsoft") or node.op_type == "PyModule":
            return self.host_ops[a["host_index"]].call(x)
        f: Callable[..., Any] | None = globals().get(f"op_{node.op_type}")
        if f is not None:
            return f(x, a, len(node.output))
        if node.op_type in SIMPLE:
            if len(x) == 2 and node.op_type != "Pow":
                assert x[0].dtype == x[1].dtype, f"{node.name} ({node.op_type}): {x[0].dtype} and {x[1].dtype}"
            return SIMPLE[node.op_type](*x)
        raise NotImplementedError(f"{node.domain}::{node.op_type}")


def _int_div(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


SIMPLE: dict[str, Callable[..., Any]] = {
    **{onnx: getattr(torch, aten) for aten, onnx in PLAIN.items()}, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Not": torch.logical_not, "IsNaN": torch.isnan,
    "IsInf": torch.isinf, "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _int_div, "Pow": torch.pow, "Max": torch.maximum,
    "Min": torch.minimum, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "BitwiseNot": torch.bitwise_not, "Equal": torch.eq, "Less": torch.lt,
    "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "MatMul": torch.matmul, "Identity": lambda x: x.view_as(x),
    "StopGradient": torch.detach, "Log1p": torch.log1p, "Expm1": torch.expm1, "LogGamma": torch.lgamma, "Digamma": torch.digamma, "Atan2": torch.atan2, "XLogY": torch.xlogy,
    **{name.capitalize(): getattr(torch, name) for name in ("acos", "asin", "atan", "acosh", "atanh", "tan", "sinh", "cosh")}, "FloorDiv": torch.floor_divide, "Remainder": torch.remainder,
    "Shape": lambda x: torch.tensor(x.shape, dtype=torch.int64), "Size": lambda x: torch.tensor(x.numel()),
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros((), dtype=x.dtype)),
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
}


def op_Where(x: Any, a: Any, n: int) -> Tensor:
    assert x[0].dtype == torch.bool and x[1].dtype == x[2].dtype
    return torch.where(*x)


def op_Cast(x: Any, a: Any, n: int) -> Tensor:
    return x[0].to(DTYPE[a["to"]])


def op_Mod(x: Any, a: Any, n: int) -> Tensor:
    return torch.fmod(*x) if a.get("fmod") else torch.remainder(*x)


def op_Gelu(x: Any, a: Any, n: int) -> Tensor:
    return F.gelu(x[0], approximate=a.get("approximate", "none"))


def op_LeakyRelu(x: Any, a: Any, n: int) -> Tensor:
    return F.leaky_relu(x[0], a["alpha"])


def op_Elu(x: Any, a: Any, n: int) -> Tensor:
    return F.elu(x[0], a["alpha"])


def op_AdaptiveAvgPool(x: Any, a: Any, n: int) -> Tensor:
    return (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[x[0].dim() - 3](x[0], a["output_size"])


def op_StraightThrough(x: Any, a: Any, n: int) -> Tensor:
    return x[1] + (x[0] - x[1]).detach() if x[1].requires_grad else x[0].detach()


def op_ZeroGradient(x: Any, a: Any, n: int) -> Tensor:
    return x[0] + (x[1].new_zeros(x[1].shape) * x[1].nan_to_num(0, 0, 0)).sum()


def op_Reshape(x: Any, a: Any, n: int) -> Tensor:
    shape = x[1].tolist()
    if not a.get("allowzero"):
        shape = [x[0].shape[i] if s == 0 else s for i, s in enumerate(shape)]
    return x[0].reshape(shape)


def op_Transpose(x: Any, a: Any, n: int) -> Tensor:
    return x[0].permute(a["perm"])


def op_Expand(x: Any, a: Any, n: int) -> Tensor:
    return x[0].expand(torch.broadcast_shapes(x[0].shape, tuple(x[1].tolist())))


def op_Squeeze(x: Any, a: Any, n: int) -> Tensor:
    axes = x[1].tolist()
    assert all(x[0].shape[i] == 1 for i in axes)
    return x[0].squeeze(axes)


def op_Unsqueeze(x: Any, a: Any, n: int) -> Tensor:
    y = x[0]
    for i in sorted(x[1].tolist()):
        y = y.unsqueeze(i)
    return y


def op_Slice(x: Any, a: Any, n: int) -> Tensor:
    y = x[0]
    starts, ends, axes, steps = (t.tolist() for t in x[1:])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        where = range(y.shape[axis])[slice(start, None if step < 0 and end < -y.shape[axis] else end, step)]
        y = y.index_select(axis, torch.tensor(list(where), dtype=torch.int64))
    return y


def op_Concat(x: Any, a: Any, n: int) -> Tensor:
    assert len({t.dtype for t in x}) == 1
    return torch.cat(x, a["axis"])


def op_Split(x: Any, a: Any, n: int) -> Any:
    return x[0].split(x[1].tolist(), a["axis"])


def op_Pad(x: Any, a: Any, n: int) -> Tensor:
    pads, r = x[1].tolist(), x[0].dim()
    return F.pad(x[0], [p for i in range(r - 1, -1, -1) for p in (pads[i], pads[i + r])], value=x[2].item())


def op_Tile(x: Any, a: Any, n: int) -> Tensor:
    return x[0].repeat(x[1].tolist())


def op_Trilu(x: Any, a: Any, n: int) -> Tensor:
    return (torch.triu if a["upper"] else torch.tril)(x[0], int(x[1]))


def op_Range(x: Any, a: Any, n: int) -> Tensor:
    return torch.arange(*(t.item() for t in x))


def op_ConstantOfShape(x: Any, a: Any, n: int) -> Tensor:
    v = to_torch(a["value"])
    return torch.full(x[0].tolist(), v.item(), dtype=v.dtype)


def op_Gather(x: Any, a: Any, n: int) -> Tensor:
    axis, i = a.get("axis", 0), x[1]
    i = torch.where(i < 0, i + x[0].shape[axis], i)
    return x[0].index_select(axis, i.reshape(-1)).reshape(*x[0].shape[:axis], *i.shape, *x[0].shape[axis + 1 :])


def op_Embedding(x: Any, a: Any, n: int) -> Tensor:
    rows = torch.arange(x[0].shape[0]) == a["padding_idx"]
    return op_Gather([torch.where(rows[:, None], x[0].detach(), x[0]), x[1]], {}, 1)


def op_GatherElements(x: Any, a: Any, n: int) -> Tensor:
    return torch.gather(x[0], a["axis"], x[1])


def op_ScatterElements(x: Any, a: Any, n: int) -> Tensor:
    how = a.get("reduction", "none")
    if how in ("max", "min"):
        return x[0].scatter_reduce(a["axis"], x[1], x[2], "a" + how)
    f = torch.scatter_add if how == "add" else torch.scatter
    return f(x[0], a["axis"], x[1], x[2])


def op_TopK(x: Any, a: Any, n: int) -> Any:
    axis = a.get("axis", -1)
    v, i = torch.sort(x[0], dim=axis, descending=bool(a.get("largest", 1)), stable=True)
    return v.narrow(axis, 0, int(x[1])), i.narrow(axis, 0, int(x[1]))


def op_CumProd(x: Any, a: Any, n: int) -> Tensor:
    return x[0].cumprod(-1)


def op_LogCumSumExp(x: Any, a: Any, n: int) -> Tensor:
    return x[0].logcumsumexp(-1)


def op_SearchSorted(x: Any, a: Any, n: int) -> Tensor:
    return torch.searchsorted(x[0], x[1], right=bool(a["right"]))


def op_GroupedMatMul(x: Any, a: Any, n: int) -> Tensor:
    ends = x[2].tolist()
    parts = [x[0][i:j] @ w for i, j, w in zip([0, *ends], ends, x[1])]
    return torch.cat([*parts, x[0][ends[-1] :] @ x[1][0] * 0])


def op_CTCLoss(x: Any, a: Any, n: int) -> Tensor:
    targets = x[1] if len(x) < 5 or x[4] is None else x[1][x[4]]
    return F.ctc_loss(x[0], targets, x[2], x[3], a["blank"], "none", bool(a["zero_infinity"]))


def op_GridSample(x: Any, a: Any, n: int) -> Tensor:
    return F.grid_sample(x[0], x[1], "bilinear", a["padding_mode"], bool(a["align_corners"]))


def op_Cdist(x: Any, a: Any, n: int) -> Tensor:
    return torch.cdist(x[0], x[1], math.inf if a["p"] < 0 else a["p"])


def op_ConvTranspose(x: Any, a: Any, n: int) -> Tensor:
    k = x[0].dim() - 2
    f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[k - 1]
    assert a["pads"][:k] == a["pads"][k:]
    return f(x[0], x[1], x[2] if len(x) > 2 else None, a["strides"], a["pads"][:k], a["output_padding"], a["group"], a["dilations"])


def op_Im2Col(x: Any, a: Any, n: int) -> Tensor:
    return F.unfold(x[0], a["kernel_shape"], a["dilations"], a["pads"][:2], a["strides"])


def op_Col2Im(x: Any, a: Any, n: int) -> Tensor:
    return F.fold(x[0], x[1].tolist(), x[2].tolist(), a["dilations"], a["pads"][:2], a["strides"])


def _recurrent(x: Any, a: Any, step: Callable[..., Any]) -> Any:
    """Step by step: states (n, h) before -> after; the first is the output."""
    v, w, r, bw, br, *states = x
    steps = list(v.unbind(0))
    ys = []
    for s in reversed(steps) if a["reverse"] else steps:
        states = step(s @ w.t() + bw, states[0] @ r.t() + br, *states)
        ys.append(states[0])
    return [torch.stack(ys[::-1] if a["reverse"] else ys), *states]


def op_LSTM(x: Any, a: Any, n: int) -> Any:
    def step(gx: Tensor, gh: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        i, f, g, o = (gx + gh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]

    return _recurrent(x, a, step)


def op_GRU(x: Any, a: Any, n: int) -> Any:
    def step(gx: Tensor, gh: Tensor, h: Tensor) -> list[Tensor]:
        (xr, xz, xn), (hr, hz, hn) = gx.chunk(3, 1), gh.chunk(3, 1)
        z, new = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
        return [(1 - z) * new + z * h]

    return _recurrent(x, a, step)


def op_RNN(x: Any, a: Any, n: int) -> Any:
    return _recurrent(x, a, lambda gx, gh, h: [torch.tanh(gx + gh) if a["nonlinearity"] == "tanh" else torch.relu(gx + gh)])


def op_GatherND(x: Any, a: Any, n: int) -> Tensor:
    return x[0][tuple(x[1].unbind(-1))]


def op_ScatterND(x: Any, a: Any, n: int) -> Tensor:
    return x[0].index_put(tuple(x[1].unbind(-1)), x[2], accumulate=a.get("reduction") == "add")


def op_CumSum(x: Any, a: Any, n: int) -> Tensor:
    return torch.cumsum(x[0], int(x[1]))


def _reduction(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def op(x: Any, a: Any, n: int) -> Tensor:
        axes = x[1].tolist() if len(x) > 1 else list(range(x[0].dim()))
        return f(x[0], axes, bool(a["keepdims"])) if axes else f(x[0], [], False)

    return op


def _prod(t: Tensor, axes: list[int], keep: bool) -> Tensor:
    for i in sorted(axes, reverse=True):
        t = t.prod(i, keepdim=keep)
    return t


op_ReduceSum = _reduction(lambda t, d, k: t.sum(d, keepdim=k))
op_ReduceMean = _reduction(lambda t, d, k: t.mean(d, keepdim=k))
op_ReduceMax = _reduction(lambda t, d, k: t.amax(d, keepdim=k))
op_ReduceMin = _reduction(lambda t, d, k: t.amin(d, keepdim=k))
op_ReduceProd = _reduction(_prod)
op_ReduceL1 = _reduction(lambda t, d, k: t.abs().sum(d, keepdim=k))
op_ReduceL2 = _reduction(lambda t, d, k: (t * t).sum(d, keepdim=k).sqrt())
op_ReduceLogSumExp = _reduction(lambda t, d, k: t.exp().sum(d, keepdim=k).log())


def op_ArgMax(x: Any, a: Any, n: int) -> Tensor:
    return x[0].argmax(a["axis"], keepdim=bool(a["keepdims"]))


def op_ArgMin(x: Any, a: Any, n: int) -> Tensor:
    return x[0].argmin(a["axis"], keepdim=bool(a["keepdims"]))


def op_Softmax(x: Any, a: Any, n: int) -> Tensor:
    e = (x[0] - x[0].amax(a["axis"], keepdim=True).detach()).exp()
    return e / e.sum(a["axis"], keepdim=True)


def op_LogSoftmax(x: Any, a: Any, n: int) -> Tensor:
    z = x[0] - x[0].amax(a["axis"], keepdim=True).detach()
    return z - z.exp().sum(a["axis"], keepdim=True).log()


def op_LayerNormalization(x: Any, a: Any, n: int) -> Tensor:
    axes = list(range(a["axis"] % x[0].dim(), x[0].dim()))
    d = x[0] - x[0].mean(axes, keepdim=True)
    y = d / ((d * d).mean(axes, keepdim=True) + a["epsilon"]).sqrt() * x[1]
    return y if len(x) < 3 else y + x[2]


def op_RMSNormalization(x: Any, a: Any, n: int) -> Tensor:
    axes = list(range(a["axis"] % x[0].dim(), x[0].dim()))
    return x[0] / ((x[0] * x[0]).mean(axes, keepdim=True) + a["epsilon"]).sqrt() * x[1]


def op_GroupNormalization(x: Any, a: Any, n: int) -> Tensor:
    shape, g = x[0].shape, a["num_groups"]
    y = x[0].reshape(shape[0], g, -1)
    d = y - y.mean(2, keepdim=True)
    y = (d / ((d * d).mean(2, keepdim=True) + a["epsilon"]).sqrt()).reshape(shape)
    wide = (shape[1], *[1] * (len(shape) - 2))
    return y * x[1].reshape(wide) + x[2].reshape(wide)


def op_InstanceNormalization(x: Any, a: Any, n: int) -> Tensor:
    return op_GroupNormalization(x, {"num_groups": x[0].shape[1], **a}, n)


def op_BatchNorm(x: Any, a: Any, n: int) -> Any:
    low, w, b, mean, var = x
    v = low.to(w.dtype)
    axes = [i for i in range(v.dim()) if i != 1]
    wide = (v.shape[1], *[1] * (v.dim() - 2))
    m, s = mean, var
    if a["training"]:
        m = v.mean(axes)
        s = ((v - m.reshape(wide)) ** 2).mean(axes)
    y = (v - m.reshape(wide)) / (s.reshape(wide) + a["eps"]).sqrt() * w.reshape(wide) + b.reshape(wide)
    if not a["training"]:
        return y.to(low.dtype), mean, var
    k, t = v.numel() // v.shape[1], a["momentum"]
    return y.to(low.dtype), (1 - t) * mean + t * m.detach(), (1 - t) * var + t * s.detach() * (k / max(k - 1, 1))


def op_Dropout(x: Any, a: Any, n: int) -> Tensor:
    raise AssertionError("live dropout: the oracle compares models without randomness")


def op_Attention(x: Any, a: Any, n: int) -> Tensor:
    q, k, v = x[:3]
    assert not a.get("dropout_p")
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * a.get("scale", 1 / math.sqrt(q.shape[-1]))
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    seen = seen.tril() if a.get("is_causal") else seen
    mask = x[3] if len(x) > 3 else None
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -math.inf)
    none = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(none, 0.0, torch.softmax(scores.masked_fill(none, 0.0), -1)) @ v


def op_CrossEntropy(x: Any, a: Any, n: int) -> Tensor:
    return F.cross_entropy(*x, ignore_index=a["ignore_index"], label_smoothing=a.get("label_smoothing", 0.0), reduction=a["reduction"])


def op_NegativeLogLikelihoodLoss(x: Any, a: Any, n: int) -> Tensor:
    return F.nll_loss(*x, ignore_index=a["ignore_index"], reduction=a["reduction"])


def op_Conv(x: Any, a: Any, n: int) -> Tensor:
    k = x[1].dim() - 2
    v = F.pad(x[0], [p for i in range(k - 1, -1, -1) for p in (a["pads"][i], a["pads"][i + k])])
    return (F.conv1d, F.conv2d, F.conv3d)[k - 1](v, x[1], x[2] if len(x) > 2 else None, a["strides"], 0, a["dilations"], a["group"])


def op_MaxPool(x: Any, a: Any, n: int) -> Tensor:
    k = x[0].dim() - 2
    f: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[k - 1]
    return f(x[0], a["kernel_shape"], a["strides"], a["pads"][:k], a["dilations"], bool(a["ceil_mode"]))


def op_AveragePool(x: Any, a: Any, n: int) -> Tensor:
    k = x[0].dim() - 2
    f: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[k - 1]
    return f(x[0], a["kernel_shape"], a["strides"], a["pads"][:k], bool(a.get("ceil_mode", 0)), bool(a.get("count_include_pad", 0)))
