"""Losses built by hand behind an ONNX model, for artifacts.generate_artifacts(loss=...).

    class Weighted(onnxblock.Block):
        def __init__(self):
            self.mse, self.l1 = onnxblock.MSELoss(), onnxblock.L1Loss()
            self.add, self.half = onnxblock.Add(), onnxblock.Constant(0.5)
        def build(self, y):
            return self.add(self.mse(y), onnxblock.Mul()(self.l1(y, "target"), self.half()))

A block takes names of values of the graph and returns the name of a value it has added. Nothing is written to disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_current: list[onnx.ModelProto] = []


def value_infos(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """What is known of every value: inputs, outputs, and what shape inference finds."""
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {i.name: i for i in inferred.graph.value_info}
    known.update({i.name: i for i in [*inferred.graph.input, *inferred.graph.output]})
    return known


def _graph() -> onnx.GraphProto:
    if not _current:
        raise RuntimeError("a block is built by generate_artifacts, not outside of it")
    return _current[-1].graph


def _fresh(hint: str) -> str:
    graph = _graph()
    taken = {o for n in graph.node for o in n.output} | {i.name for i in [*graph.input, *graph.initializer]}
    name, k = hint, 0
    while name in taken:
        k += 1
        name = f"{hint}_{k}"
    return name


def node(op: str, inputs: Sequence[str], **attributes: Any) -> str:
    """Adds a node with one output; returns the output's name."""
    out = _fresh(f"onnxblock.{op.lower()}")
    _graph().node.append(helper.make_node(op, list(inputs), [out], **attributes))
    return out


def constant(value: Any, dtype: Any = np.float32) -> str:
    name = _fresh("onnxblock.constant")
    _graph().initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def add_input(name: str, like: str, without: Sequence[int] = (), elem_type: int | None = None) -> str:
    """A new graph input of the sizes (but for some axes) and type of a value; one of that name is used when there."""
    graph = _graph()
    if any(i.name == name for i in graph.input):
        return name
    info = value_infos(_current[-1]).get(like)
    if info is None or not info.type.tensor_type.HasField("shape"):
        raise RuntimeError(f"the shape of {like!r} is not known, so none can be given to the input {name!r}")
    shape = [d.dim_param or d.dim_value for k, d in enumerate(info.type.tensor_type.shape.dim) if k not in without]
    kind = info.type.tensor_type.elem_type if elem_type is None else elem_type
    graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    return name


def build(model: onnx.ModelProto, block: Block, inputs: Sequence[str]) -> str:
    """Runs a block on values of the model, which it changes; the name of the result."""
    _current.append(model)
    try:
        return block(*inputs)
    finally:
        _current.pop()


class Block:
    """What is built from others: override build(self, *names) and return a name."""

    def build(self, *inputs: str) -> str:
        raise NotImplementedError

    def __call__(self, *inputs: str) -> str:
        return self.build(*inputs)


class PassThrough(Block):
    """The first of its inputs."""

    def build(self, *inputs: str) -> str:
        return inputs[0]


class _Op(Block):
    op = ""

    def build(self, *inputs: str) -> str:
        return node(self.op, inputs)


class Add(_Op):
    op = "Add"


class Sub(_Op):
    op = "Sub"


class Mul(_Op):
    op = "Mul"


class Div(_Op):
    op = "Div"


class Pow(Block):
    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def build(self, *inputs: str) -> str:
        return node("Pow", [inputs[0], constant(self.exponent)])


class Sigmoid(_Op):
    op = "Sigmoid"


class Log(_Op):
    op = "Log"


class Neg(_Op):
    op = "Neg"


class Abs(_Op):
    op = "Abs"


class ReduceMean(Block):
    op = "ReduceMean"

    def __init__(self, keepdims: bool = True) -> None:
        self.keepdims = keepdims

    def build(self, *inputs: str) -> str:
        return node(self.op, inputs, keepdims=int(self.keepdims))


class ReduceSum(ReduceMean):
    op = "ReduceSum"


class Constant(Block):
    def __init__(self, value: float | int | np.ndarray[Any, Any]) -> None:
        self.value = value

    def build(self, *inputs: str) -> str:
        return constant(self.value, np.asarray(self.value).dtype if isinstance(self.value, np.ndarray) else np.float32)


class Cast(Block):
    def __init__(self, to: int) -> None:
        self.to = to

    def build(self, *inputs: str) -> str:
        return node("Cast", inputs, to=self.to)


class Clip(Block):
    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        self.limits = clip_min, clip_max

    def build(self, *inputs: str) -> str:
        return node("Clip", [inputs[0], *("" if limit is None else constant(limit) for limit in self.limits)])


class InputLike(Block):
    """A new graph input with the sizes and type of a value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, *inputs: str) -> str:
        return add_input(self.name, inputs[0])


def _reduced(name: str, reduction: str) -> str:
    if reduction == "none":
        return name
    return node("ReduceMean" if reduction == "mean" else "ReduceSum", [name], keepdims=0)


class _Loss(Block):
    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum", "none"):
            raise RuntimeError(f"reduction {reduction!r}; 'mean', 'sum' and 'none' are defined")
        self.reduction = reduction


class MSELoss(_Loss):
    """Mean of (input - target)^2. `target` is a new graph input, shaped as the first."""

    def build(self, *inputs: str) -> str:
        target = add_input(inputs[1] if len(inputs) > 1 else "target", inputs[0])
        difference = node("Sub", [inputs[0], target])
        return _reduced(node("Mul", [difference, difference]), self.reduction)


class L1Loss(_Loss):
    """Mean of |input - target|."""

    def build(self, *inputs: str) -> str:
        target = add_input(inputs[1] if len(inputs) > 1 else "target", inputs[0])
        return _reduced(node("Abs", [node("Sub", [inputs[0], target])]), self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy of logits, exact for large ones: softplus(x) - x z, with weights as torch has them."""

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self.weight, self.pos_weight = weight, pos_weight

    def build(self, *inputs: str) -> str:
        x = inputs[0]
        z = add_input(inputs[1] if len(inputs) > 1 else "target", x)
        if self.pos_weight is None:
            loss = node("Sub", [node("Softplus", [x]), node("Mul", [x, z])])
        else:
            more = constant(np.asarray(self.pos_weight, np.float32) - 1)
            slope = node("Add", [constant(1.0), node("Mul", [more, z])])
            negative = node("Mul", [slope, node("Softplus", [node("Neg", [x])])])
            loss = node("Add", [node("Mul", [node("Sub", [constant(1.0), z]), x]), negative])
        if self.weight is not None:
            loss = node("Mul", [loss, constant(self.weight)])
        return _reduced(loss, self.reduction)


class CrossEntropyLoss(_Loss):
    """Softmax cross entropy; `labels` (int64) is a new graph input shaped as the scores without axis 1."""

    def __init__(self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None) -> None:
        super().__init__(reduction)
        self.weight, self.ignore_index = weight, ignore_index

    def build(self, *inputs: str) -> str:
        labels = add_input(inputs[1] if len(inputs) > 1 else "labels", inputs[0], (1,), TensorProto.INT64)
        operands = [inputs[0], labels] + ([constant(self.weight)] if self.weight is not None else [])
        attributes: dict[str, Any] = {"reduction": self.reduction}
        if self.ignore_index is not None:
            attributes["ignore_index"] = self.ignore_index
        return node("SoftmaxCrossEntropyLoss", operands, **attributes)


# --- optimizers, for artifacts.generate_artifacts(optimizer=...)


class ClipGradNorm:
    """Before an update: gradients whose norm, over all of them, is above max_norm are scaled down to it."""

    def __init__(self, max_norm: float) -> None:
        if not (max_norm > 0 and math.isfinite(max_norm)):
            raise ValueError(f"max_norm: {max_norm}; a finite number above 0 is expected")
        self.max_norm = max_norm


class SGD:
    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        self.op, self.moments, self.clip_grad = "SGDOptimizerV2", 0, clip_grad
        self.attributes: dict[str, float | int] = {}


class AdamW:
    """onnxruntime-training's defaults: transformers' order of decay, eps 1e-6, no decay."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas: {betas}; numbers from 0 up and below 1 are expected")
        if not (eps >= 0 and math.isfinite(eps) and math.isfinite(weight_decay)):
            raise ValueError(f"eps {eps} and weight_decay {weight_decay}: finite numbers are expected, eps from 0 up")
        self.op, self.moments, self.clip_grad = "AdamWOptimizer", 2, clip_grad
        self.attributes: dict[str, float | int] = {
            "alpha": betas[0], "beta": betas[1], "epsilon": eps, "weight_decay": weight_decay, "adam_mode": 1,
            "correct_bias": int(bias_correction)}  # fmt: skip
