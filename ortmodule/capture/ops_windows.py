"""Rows of the operator table for windows: transposed convolutions, unfold and fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CaptureError
from .convert import F64, I64, Converter, NotHere, row
from .layouts import as_written, order_of
from .onnx_build import Val, expr_of, shape_of
from .ops_nn import _per_axis
from .program import Node


@row("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(
    c: Converter, n: Node, x: Node, w: Node, b: Node | None, stride: Any, padding: Any, more: Any, groups: int,
    dilation: Any,
) -> Val:  # fmt: skip
    dtype = n.val.dtype
    v, weight = c.num(x, dtype), c.num(w, dtype)
    k = weight.rank - 2
    alone = v.rank == weight.rank - 1
    v = c.unsqueeze(v, [0]) if alone else v
    if not all(isinstance(i, int) for i in weight.shape):
        raise NotHere("transposed convolution with a kernel of symbolic size")
    shape = shape_of(n.val)
    y = c.b.op(
        "ConvTranspose",
        [v, weight, None if b is None else c.num(b, dtype)],
        dtype,
        (1, *shape) if alone else shape,
        kernel_shape=list(weight.shape[2:]),
        strides=_per_axis(stride, k),
        pads=_per_axis(padding, k) * 2,
        output_padding=_per_axis(more, k),
        dilations=_per_axis(dilation, k),
        group=groups,
    )
    return c.squeeze(y, [0]) if alone else y


@row("im2col")
def im2col(c: Converter, n: Node, x: Node, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Val:
    v, shape = c.v(x), shape_of(n.val)
    alone = v.rank == 3
    if not v.dtype.is_floating_point:
        raise NotHere("unfold of integers")
    v = c.unsqueeze(v, [0]) if alone else v
    y = c.b.op(
        "Im2Col", [v], v.dtype, (1, *shape) if alone else shape, "ortmodule", kernel_shape=_per_axis(kernel, 2),
        strides=_per_axis(stride, 2), pads=_per_axis(padding, 2) * 2, dilations=_per_axis(dilation, 2),
    )  # fmt: skip
    return c.squeeze(y, [0]) if alone else y


@row("col2im")
def col2im(c: Converter, n: Node, x: Node, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Val:
    v, shape = c.v(x), shape_of(n.val)
    alone = v.rank == 2
    if not v.dtype.is_floating_point:
        raise NotHere("fold of integers")
    v = c.unsqueeze(v, [0]) if alone else v
    ins = [v, c.b.dims(shape[-2:]), c.b.constant(_per_axis(kernel, 2), I64)]
    y = c.b.op(
        "Col2Im", ins, v.dtype, (1, *shape) if alone else shape, strides=_per_axis(stride, 2),
        pads=_per_axis(padding, 2) * 2, dilations=_per_axis(dilation, 2),
    )  # fmt: skip
    return c.squeeze(y, [0]) if alone else y


@row("unfold")
def unfold(c: Converter, n: Node, x: Node, dim: int, size: Any, step: int) -> Val:
    """Windows of one axis: gathered at step * window + place, the places then last."""
    v, out = c.v(x), shape_of(n.val)
    if v.rank == 0:
        return c.reshape(v, out)
    dim %= v.rank
    windows, places = out[dim], out[-1]
    if places == v.shape[dim]:  # one window
        return c.unsqueeze(c.transpose(v, [*(i for i in range(v.rank) if i != dim), dim]), [dim])
    first = c.reshape(c.op2("Mul", c.range(windows), c.scalar(step, I64)), (windows, 1))
    index = c.op2("Add", first, c.range(places))
    shape: Sequence[Any] = (*v.shape[:dim], windows, places, *v.shape[dim + 1 :])
    y = c.no_negative(c.b.op("Gather", [v, index], v.dtype, tuple(expr_of(d) for d in shape), axis=dim))
    return c.transpose(y, [*(i for i in range(v.rank + 1) if i != dim + 1), dim + 1])


@row("as_strided")
def as_strided(c: Converter, n: Node, x: Node, size: Any, stride: Any, offset: Any) -> Val:
    """Elements by their place in memory, gathered where it is known which the operand's memory holds. Places behind it
    are out of range, which with symbols for sizes a call tells: PyTorch, whose memory may hold more, runs such a
    one."""
    v, t = c.v(x), x.val
    order = order_of(t)
    known = all(isinstance(k, int) for k in (*size, *stride, *t.shape)) and 0 not in size
    behind = known and sum((k - 1) * step for k, step in zip(size, stride, strict=True)) >= t.numel()
    if order is None or behind or offset is not None and as_written(offset) != as_written(t.storage_offset()):
        raise CaptureError("as_strided of a tensor whose memory holds more than its elements", *n.src)
    flat = c.reshape(c.transpose(v, order), (math.prod(v.shape),))
    index = c.scalar(0, I64)
    for extent, step in zip(map(expr_of, size), map(expr_of, stride), strict=True):
        places = c.op2("Mul", c.range(extent), c.cast(c.symbolic(step), I64))
        index = c.op2("Add", c.unsqueeze(index, [index.rank]), places)
    return c.no_negative(c.b.op("Gather", [flat, index], v.dtype, shape_of(n.val), axis=0))


@row("grid_sampler", "grid_sampler_2d")
def grid_sampler(c: Converter, n: Node, x: Node, grid: Node, mode: int, padding: int, corners: bool) -> Val:
    v, at = c.v(x), c.v(grid)
    if mode != 0 or padding > 1 or v.rank != 4 or v.dtype not in (torch.float32, F64) or at.dtype != v.dtype:
        raise NotHere("grid_sample other than bilinear, zeros or the border outside, of images in float32 or float64")
    return c.b.op(
        "GridSample", [v, at], v.dtype, shape_of(n.val), mode="linear", padding_mode=("zeros", "border")[padding],
        align_corners=int(corners),
    )  # fmt: skip
