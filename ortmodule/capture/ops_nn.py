"""Rows of the operator table for layers: normalisations, softmax, dropout, attention, losses, embeddings, convolutions,
pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .convert import BOOL, F64, I64, Converter, NotHere, broadcast, not_empty, row, wide_of
from .onnx_build import Val, expr_of, shape_of
from .program import BATCH_NORM, Node


def _like(c: Converter, w: Node | None, size: int, value: float, dtype: torch.dtype) -> Val:
    return c.fill(value, dtype, (size,)) if w is None else c.num(w, dtype)


@row("layer_norm")
def layer_norm(
    c: Converter, n: Node, x: Node, dims: Sequence[Any], w: Node | None, b: Node | None, eps: float, *_: Any
) -> Val:
    v = c.num(x, n.val.dtype)
    shape = tuple(expr_of(d) for d in dims)
    scale = c.fill(1, v.dtype, shape) if w is None else c.num(w, v.dtype)
    bias = None if b is None else c.num(b, v.dtype)
    return c.b.op("LayerNormalization", [v, scale, bias], v.dtype, v.shape, axis=-len(dims), epsilon=eps)


@row("native_layer_norm")
def native_layer_norm(
    c: Converter, n: Node, x: Node, dims: Sequence[Any], w: Node | None, b: Node | None, eps: float
) -> list[Any]:
    v = c.num(x, n.val[0].dtype)
    if c.reads(n, 1) or c.reads(n, 2):
        raise NotHere("layer norm whose statistics are used")
    scale = c.fill(1, v.dtype, tuple(expr_of(d) for d in dims)) if w is None else c.num(w, v.dtype)
    y = c.b.op(
        "LayerNormalization",
        [v, scale, None if b is None else c.num(b, v.dtype)],
        v.dtype,
        v.shape,
        axis=-len(dims),
        epsilon=eps,
    )
    return [y, None, None]


@row("rms_norm")
def rms_norm(c: Converter, n: Node, x: Node, dims: Sequence[Any], w: Node | None, eps: float | None) -> Val:
    v = c.num(x, n.val.dtype)
    computed = torch.float64 if n.val.dtype is torch.float64 else torch.float32  # also for halves
    eps = torch.finfo(computed).eps if eps is None else eps
    scale = c.fill(1, v.dtype, tuple(expr_of(d) for d in dims)) if w is None else c.num(w, v.dtype)
    return c.b.op("RMSNormalization", [v, scale], v.dtype, v.shape, axis=-len(dims), epsilon=eps)


@row("group_norm")
def group_norm(c: Converter, n: Node, x: Node, groups: int, w: Node | None, b: Node | None, eps: float, *_: Any) -> Val:
    v = c.num(x, n.val.dtype)
    not_empty(v, "group_norm")
    scale, bias = _like(c, w, v.shape[1], 1, v.dtype), _like(c, b, v.shape[1], 0, v.dtype)
    return c.b.op("GroupNormalization", [v, scale, bias], v.dtype, v.shape, num_groups=groups, epsilon=eps)


@row("instance_norm")
def instance_norm(
    c: Converter,
    n: Node,
    x: Node,
    w: Node | None,
    b: Node | None,
    mean: Any,
    var: Any,
    use_input: bool,
    _m: float,
    eps: float,
    *_: Any,
) -> Val:
    v = c.num(x, n.val.dtype)
    if not use_input:
        return batch_norm(c, n, x, w, b, mean, var, False, _m, eps)
    scale, bias = _like(c, w, v.shape[1], 1, v.dtype), _like(c, b, v.shape[1], 0, v.dtype)
    return c.b.op("InstanceNormalization", [v, scale, bias], v.dtype, v.shape, epsilon=eps)


def _batch_norm(
    c: Converter,
    dtype: torch.dtype,
    x: Node,
    w: Any,
    b: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Val]:
    """Statistics and weights keep their own type (float32 beside a bfloat16 input)."""
    v = c.num(x, dtype)
    own = next((c.v(t).dtype for t in (w, b, mean, var) if t is not None), v.dtype)
    channels = v.shape[1]
    ins = [v, *(_like(c, t, channels, value, own) for t, value in ((w, 1), (b, 0), (mean, 0), (var, 1)))]
    types = [(v.dtype, v.shape), (own, (channels,)), (own, (channels,))]
    return c.b.ops("BatchNorm", ins, types, "ortmodule", momentum=float(momentum), eps=eps, training=int(training))


@row("batch_norm")
def batch_norm(
    c: Converter,
    n: Node,
    x: Node,
    w: Any,
    b: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Val:
    return _batch_norm(c, n.val.dtype, x, w, b, mean, var, bool(training) or mean is None, momentum, eps)[0]


@row(BATCH_NORM)
def batch_norm_train(
    c: Converter, n: Node, x: Node, w: Any, b: Any, mean: Any, var: Any, _t: bool, momentum: float, eps: float, *_: Any
) -> Any:
    return _batch_norm(c, n.val[0].dtype, x, w, b, mean, var, True, momentum, eps)


@row("softmax.int", "_softmax", "special_softmax.int")
def softmax(c: Converter, n: Node, x: Node, dim: int, *_: Any) -> Val:
    v = c.num(x, n.val.dtype)
    return _rows(c, "Softmax", v, dim)


def _rows(c: Converter, op: str, v: Val, dim: int) -> Val:
    """A number is a row of one."""
    one = c.reshape(v, v.shape or (1,))
    return c.reshape(c.un(op, one, axis=dim % one.rank), v.shape)


@row("log_softmax.int", "_log_softmax")
def log_softmax(c: Converter, n: Node, x: Node, dim: int, *_: Any) -> Val:
    v = c.num(x, n.val.dtype)
    return _rows(c, "LogSoftmax", v, dim)


@row("_weight_norm")
def weight_norm(c: Converter, n: Node, v: Node, g: Node, dim: int) -> Val:
    """v * g / norm of v over all axes but one; -1: over all of them."""
    wide = wide_of(n.val.dtype)
    x = c.num(v, wide)
    norm = c.reduce("ReduceL2", x, [a for a in range(x.rank) if dim == -1 or a != dim % x.rank], True)
    return c.cast(c.op2("Mul", x, c.op2("Div", c.num(g, wide), norm)), n.val.dtype)


# --- randomness -----------------------------------------------------------------------------------


def dropped(c: Converter, v: Val, p: float) -> Val:
    if p == 0:
        return v
    if p == 1:  # as PyTorch: the gradient is zeros, not None, and NaN stays NaN
        return c.op2("Mul", v, c.scalar(0, v.dtype))
    return c.b.op("Dropout", [v, c.b.constant(p, F64), c.b.constant(True, BOOL)], v.dtype, v.shape)


@row("dropout")
def dropout(c: Converter, n: Node, x: Node, p: float, train: bool) -> Val:
    return dropped(c, c.v(x), p) if train else c.v(x)


@row("native_dropout")
def native_dropout(c: Converter, n: Node, x: Node, p: float, train: bool | None) -> list[Any]:
    if c.reads(n, 1):
        raise NotHere("dropout whose mask is used")
    return [dropped(c, c.v(x), p) if train or train is None else c.v(x), None]


@row("feature_dropout")
def feature_dropout(c: Converter, n: Node, x: Node, p: float, train: bool) -> Val:
    """One coin per (sample, channel)."""
    v = c.v(x)
    if not train or p == 0:
        return v
    if p == 1:
        return c.op2("Mul", v, c.scalar(0, v.dtype))
    keep = dropped(c, c.fill(1, v.dtype, (*v.shape[:2], *[1] * (v.rank - 2))), p)
    return c.op2("Mul", v, keep)


# --- attention ------------------------------------------------------------------------------------


def _lead(c: Converter, v: Val, batch: tuple[Any, ...]) -> Val:
    """Leading axes made `batch`, then all but the last of them merged, so that the rank is 4."""
    v = c.expand(v, (*batch, *v.shape[-3:])) if v.rank > 3 else v
    if v.rank == 4:
        return v
    if v.rank < 4:
        return c.unsqueeze(v, list(range(4 - v.rank)))
    total: Any = 1
    for d in v.shape[:-3]:
        total = total * d
    return c.reshape(v, (expr_of(total), *v.shape[-3:]))


@row("scaled_dot_product_attention")
def attention(
    c: Converter,
    n: Node,
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None,
    p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Val:
    dtype = n.val.dtype
    tq, tk, tv = c.num(q, dtype), c.num(k, dtype), c.num(v, dtype)
    out = shape_of(n.val)
    batch: tuple[Any, ...] = ()
    for t in (tq, tk, tv):
        batch = broadcast(batch, t.shape[:-3])
    heads = tq.shape[-3] if tq.rank > 2 else 1
    if not gqa:
        one = [t.rank > 2 and t.shape[-3] == 1 and heads != 1 for t in (tk, tv)]
        tk, tv = (
            c.expand(t, (*t.shape[:-3], heads, *t.shape[-2:])) if wide else t
            for t, wide in zip((tk, tv), one, strict=True)
        )
    m = None
    if mask is not None:
        m = c.v(mask)
        m = m if m.dtype == BOOL else c.cast(m, dtype)
        if m.rank > 4:
            m = _lead(c, c.expand(m, (*broadcast(m.shape[:-3], batch), *m.shape[-3:])), batch)
        elif m.rank < 2:
            m = c.unsqueeze(m, list(range(2 - m.rank)))
        # Other runtimes want the last two sizes in full; here it is a view.
        m = c.expand(m, (*m.shape[:-2], tq.shape[-2], tk.shape[-2]))
    if scale is None:
        width = tq.shape[-1]
        scale = 1 / math.sqrt(width) if isinstance(width, int) else 1.0
        if not isinstance(width, int):
            tq = c.op2("Div", tq, c.un("Sqrt", c.cast(c.symbolic(width), dtype)))
    ins = [_lead(c, tq, batch), _lead(c, tk, batch), _lead(c, tv, batch), m]
    first, value = ins[0], ins[2]
    assert first is not None and value is not None
    attrs = {"is_causal": int(causal), "scale": float(scale), "dropout_p": float(p)}
    y = c.b.op("Attention", ins, dtype, (*first.shape[:3], value.shape[-1]), "ortmodule", **attrs)
    return c.reshape(y, out)


# --- embeddings -----------------------------------------------------------------------------------


@row("embedding")
def embedding(c: Converter, n: Node, w: Node, idx: Node, padding: int, by_freq: bool, sparse: bool) -> Val:
    if by_freq or sparse:
        raise NotHere("embedding with scale_grad_by_freq or sparse gradients")
    weight, i = c.num(w, n.val.dtype), c.v(idx)
    padding = expr_of(padding)
    if not isinstance(padding, int):
        raise NotHere("embedding whose padding index is a symbolic size")
    shape = (*i.shape, weight.shape[1])
    if padding < 0:
        return c.no_negative(c.b.op("Gather", [weight, i], weight.dtype, shape, axis=0))
    return c.b.op("Embedding", [weight, i], weight.dtype, shape, "ortmodule", padding_idx=padding)


# --- losses ---------------------------------------------------------------------------------------

_REDUCTION = {0: "none", 1: "mean", 2: "sum"}


def reduced(c: Converter, v: Val, reduction: int) -> Val:
    return v if reduction == 0 else c.reduce("ReduceMean" if reduction == 1 else "ReduceSum", v, None, False)


@row("cross_entropy_loss")
def cross_entropy(
    c: Converter, n: Node, x: Node, y: Node, w: Node | None, reduction: int, ignore: int, smoothing: float
) -> Val:
    dtype = n.val.dtype
    v, labels = c.num(x, dtype), c.v(y)
    weight = None if w is None else c.num(w, dtype)
    if labels.dtype.is_floating_point:
        return _soft_cross_entropy(c, v, c.cast(labels, dtype), weight, reduction, smoothing)
    alone = v.rank == 1
    if alone:
        v, labels = c.unsqueeze(v, [0]), c.unsqueeze(labels, [0])
    attrs = {"ignore_index": int(ignore), "label_smoothing": float(smoothing), "reduction": _REDUCTION[reduction]}
    shape = labels.shape if reduction == 0 else ()
    out = c.b.op("CrossEntropy", [v, c.cast(labels, I64), weight], dtype, shape, "ortmodule", **attrs)
    return c.squeeze(out, [0]) if alone and reduction == 0 else out


def _soft_cross_entropy(c: Converter, v: Val, target: Val, weight: Val | None, reduction: int, smoothing: float) -> Val:
    """Targets are probabilities. The mean is over everything but the classes."""
    axis = 0 if v.rank == 1 else 1
    classes = v.shape[axis]
    if smoothing:
        if not isinstance(classes, int):
            raise NotHere("label smoothing over a symbolic number of classes")
        wide = wide_of(v.dtype)
        kept = c.op2("Mul", c.cast(target, wide), c.scalar(1 - smoothing, wide))
        target = c.cast(c.op2("Add", kept, c.scalar(smoothing / classes, wide)), v.dtype)
    if weight is not None:
        target = c.op2("Mul", target, c.reshape(weight, (classes, *[1] * (v.rank - 1 - axis))))
    loss = c.neg(c.reduce("ReduceSum", c.op2("Mul", c.un("LogSoftmax", v, axis=axis), target), [axis], False))
    return reduced(c, loss, reduction)


@row("nll_loss", "nll_loss_nd", "nll_loss2d")
def nll_loss(c: Converter, n: Node, x: Node, y: Node, w: Node | None, reduction: int, ignore: int) -> Val:
    dtype = n.val.dtype
    v, labels = c.num(x, dtype), c.v(y)
    if v.rank == 1:
        raise NotHere("nll_loss of one sample without a batch axis")
    shape = labels.shape if reduction == 0 else ()
    return c.b.op(
        "NegativeLogLikelihoodLoss",
        [v, labels, None if w is None else c.num(w, dtype)],
        dtype,
        shape,
        ignore_index=int(ignore),
        reduction=_REDUCTION[reduction],
    )


@row("mse_loss")
def mse_loss(c: Converter, n: Node, x: Node, y: Node, reduction: int) -> Val:
    d = c.op2("Sub", c.num(x, n.val.dtype), c.num(y, n.val.dtype))
    return reduced(c, c.op2("Mul", d, d), reduction)


@row("l1_loss")
def l1_loss(c: Converter, n: Node, x: Node, y: Node, reduction: int) -> Val:
    return reduced(c, c.un("Abs", c.op2("Sub", c.num(x, n.val.dtype), c.num(y, n.val.dtype))), reduction)


@row("smooth_l1_loss", "huber_loss")
def smooth_l1(c: Converter, n: Node, x: Node, y: Node, reduction: int, beta: float) -> Val:
    """|d| < beta: d^2 / 2 (/ beta), else |d| - beta / 2 (* beta); the second factors are smooth_l1's and huber's."""
    t = wide_of(n.val.dtype)
    d = c.op2("Sub", c.num(x, t), c.num(y, t))
    a = c.un("Abs", d)
    huber = n.target._schema.name == "aten::huber_loss"
    if beta == 0:
        return reduced(c, c.cast(a, n.val.dtype), reduction)
    beyond = c.compare("Greater" if huber else "GreaterOrEqual", a, c.scalar(beta, t))
    small = c.where(beyond, c.scalar(0, t), d)  # 0 * inf is NaN in the gradient
    half = c.op2("Mul", c.op2("Mul", small, small), c.scalar(0.5 if huber else 0.5 / beta, t))
    line = c.op2("Sub", a, c.scalar(0.5 * beta, t))
    line = c.op2("Mul", line, c.scalar(beta, t)) if huber else line
    return reduced(c, c.cast(c.where(beyond, line, half), n.val.dtype), reduction)


@row("kl_div")
def kl_div(c: Converter, n: Node, x: Node, y: Node, reduction: int, log_target: bool) -> Val:
    """Where the target is 0 its term is 0: the logarithm is taken of 1 there. Below 0 it is NaN."""
    v, t = c.num(x, n.val.dtype), c.num(y, n.val.dtype)
    if log_target:
        return reduced(c, c.op2("Mul", c.un("Exp", t), c.op2("Sub", t, v)), reduction)
    zero, one = c.scalar(0, t.dtype), c.scalar(1, t.dtype)
    some = c.un("Not", c.compare("Equal", t, zero))
    entropy = c.op2("Mul", t, c.un("Log", c.where(some, t, one)))
    return reduced(c, c.op2("Sub", entropy, c.op2("Mul", t, v)), reduction)


@row("binary_cross_entropy_with_logits")
def bce_with_logits(c: Converter, n: Node, x: Node, y: Node, w: Node | None, pos: Node | None, reduction: int) -> Val:
    """(1 - y) x + (1 + (pos - 1) y) softplus(-x), with the gradients of (1 + (pos - 1) y) softplus(x) - pos y x: equal
    numbers, but that loses confident positives and the first the gradients of confident negatives."""
    v, t = c.num(x, n.val.dtype), c.num(y, n.val.dtype)
    one = c.scalar(1, v.dtype)
    soft, owner, positive = c.un("Softplus", c.neg(v)), c.un("Softplus", v), t
    if pos is not None:
        p = c.num(pos, v.dtype)
        weight = c.op2("Add", c.op2("Mul", c.op2("Sub", p, one), t), one)
        soft, owner, positive = c.op2("Mul", weight, soft), c.op2("Mul", weight, owner), c.op2("Mul", p, t)
    loss = c.op2("Add", c.op2("Mul", c.op2("Sub", one, t), v), soft)
    owner = c.op2("Sub", owner, c.op2("Mul", positive, v))
    loss = c.b.op("StraightThrough", [loss, owner], loss.dtype, loss.shape, "ortmodule")
    return reduced(c, loss if w is None else c.op2("Mul", loss, c.num(w, v.dtype)), reduction)


# --- convolutions and pools -----------------------------------------------------------------------


def _per_axis(x: Any, k: int) -> list[int]:
    sizes: list[int] = list(x) if isinstance(x, (list, tuple)) else [x]
    return sizes * k if len(sizes) == 1 else sizes


@row("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv(
    c: Converter, n: Node, x: Node, w: Node, b: Node | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Val:
    dtype = n.val.dtype
    v, weight = c.num(x, dtype), c.num(w, dtype)
    k = weight.rank - 2
    alone = v.rank == weight.rank - 1
    v = c.unsqueeze(v, [0]) if alone else v
    kernel, dil = list(weight.shape[2:]), _per_axis(dilation, k)
    if not all(isinstance(i, int) for i in kernel):
        raise NotHere("convolution with a kernel of symbolic size")
    if isinstance(padding, str):
        total = [0 if padding == "valid" else dil[i] * (kernel[i] - 1) for i in range(k)]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    else:
        pads = _per_axis(padding, k) * 2
    shape = shape_of(n.val)
    y = c.b.op(
        "Conv",
        [v, weight, None if b is None else c.num(b, dtype)],
        dtype,
        (1, *shape) if alone else shape,
        kernel_shape=kernel,
        strides=_per_axis(stride, k),
        pads=pads,
        dilations=dil,
        group=groups,
    )
    return c.squeeze(y, [0]) if alone else y


@row(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool1d_with_indices",
    "max_pool3d_with_indices",
)
def max_pool(c: Converter, n: Node, x: Node, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    """With indices only as long as nobody reads them."""
    v = c.v(x)
    name = n.target._schema.name
    k = int(name[len("aten::max_pool")])
    if v.rank != k + 2:
        raise NotHere("max_pool without a batch axis")
    pair = name.endswith("_indices")
    if pair and c.reads(n, 1):
        raise NotHere("max_pool whose indices are used")
    size = _per_axis(kernel, k)
    shape = shape_of(n.val[0] if pair else n.val)
    y = c.b.op("MaxPool", [v], v.dtype, shape, kernel_shape=size, strides=_per_axis(stride or size, k),
               pads=_per_axis(padding, k) * 2, dilations=_per_axis(dilation, k), ceil_mode=int(ceil))
    return [y, None] if pair else y


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(c: Converter, n: Node, x: Node, kernel: Any, stride: Any, padding: Any, ceil: bool, count_pad: bool,
             divisor: Any = None) -> Val:
    v = c.v(x)
    k = int(n.target._schema.name[len("aten::avg_pool")])
    if v.rank != k + 2 or divisor is not None:
        raise NotHere("avg_pool without a batch axis or with a divisor")
    size = _per_axis(kernel, k)
    return c.b.op("AveragePool", [v], v.dtype, shape_of(n.val), kernel_shape=size, strides=_per_axis(stride or size, k),
                  pads=_per_axis(padding, k) * 2, ceil_mode=int(ceil), count_include_pad=int(count_pad))


@row("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(c: Converter, n: Node, x: Node, size: Sequence[Any]) -> Val:
    v = c.v(x)
    k = int(n.target._schema.name[len("aten::adaptive_avg_pool")])
    out = shape_of(n.val)
    not_empty(v, "adaptive_avg_pool")
    if v.rank != k + 2:
        raise NotHere("adaptive_avg_pool without a batch axis")
    if all(d == 1 for d in out[2:]):
        return c.b.op("GlobalAveragePool", [v], v.dtype, out)
    if all(isinstance(i, int) and isinstance(o, int) and i % o == 0 for i, o in zip(v.shape[2:], out[2:], strict=True)):
        step = [i // o for i, o in zip(v.shape[2:], out[2:], strict=True)]
        if all(s == 1 for s in step):
            return v
        return c.b.op("AveragePool", [v], v.dtype, out, kernel_shape=step, strides=step, pads=[0] * (2 * k))
    if not all(isinstance(o, int) for o in out[2:]):
        raise NotHere("adaptive_avg_pool to a symbolic size")
    return c.b.op("AdaptiveAvgPool", [v], v.dtype, out, "ortmodule", output_size=list(out[2:]))
