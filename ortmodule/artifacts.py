"""Artifacts for training on a device: what om_trainer_load (csrc/ortmodule.h) and ortmodule.api read.

    generate_artifacts(model, ...)     from an ONNX file; the arguments of onnxruntime.training.artifacts
    model.save_for_device(dir, batch)  from a wrapped module (device.py)

A directory of artifacts, names with a prefix where one is given:

    training_model.onnx    forward whose first output is the loss; parameters are inputs with metadata `role:<name>`
    eval_model.onnx        the same for evaluation: no dropout
    optimizer_model.onnx   onnxruntime-training's contract: one AdamWOptimizer or SGDOptimizerV2 node over sequences
    checkpoint             safetensors: parameters by name
    nominal_checkpoint     no values: for a client that is sent them
    model.omd              all of these in one safetensors file

The gradient is derived on the device. Needs onnx and numpy, not PyTorch.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from . import onnxblock

__all__ = ["LossType", "OptimType", "generate_artifacts"]


class LossType(IntEnum):
    """Losses that generate_artifacts can put behind a model."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(IntEnum):
    """AdamW: as in onnxruntime-training (transformers' order of decay, eps 1e-6, no decay), rate 0.001. SGD: plain."""

    AdamW = 1
    SGD = 2


# --- files

_KINDS = {
    TensorProto.FLOAT: "F32",
    TensorProto.DOUBLE: "F64",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT16: "F16",
    TensorProto.INT64: "I64",
    TensorProto.INT32: "I32",
    TensorProto.INT16: "I16",
    TensorProto.INT8: "I8",
    TensorProto.UINT8: "U8",
    TensorProto.BOOL: "BOOL",
}


def tensors_bytes(tensors: Mapping[str, tuple[str, Sequence[int], bytes]], meta: Mapping[str, str]) -> bytes:
    """A safetensors file of (dtype as safetensors spells it, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": dict(meta)}
    if "__metadata__" in tensors:
        raise ValueError("a tensor named '__metadata__': safetensors has that name for something else; rename it")
    at = 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for _, _, data in tensors.values())])


def file_replace(path: str | os.PathLike[str], data: bytes) -> None:
    """Written beside, synchronised, renamed: a reader sees the old file or the new one."""
    aside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def checkpoint_bytes(
    values: Mapping[str, tuple[str, Sequence[int], bytes]],
    frozen: Sequence[str],
    rate: float,
    nominal: bool = False,
    updates: int = 0,
) -> bytes:
    """What om_trainer_save writes (csrc/trainer/state.c). updates: taken before; values then has moments, if any."""
    meta = {
        "format": "ortmodule-checkpoint",
        "version": "1",
        "updates": str(updates),
        "rate": repr(rate),
        "initial_rate": repr(rate),
    }
    if nominal:
        meta["nominal"] = "1"
    meta.update({f"frozen:{name}": "1" for name in frozen})
    return tensors_bytes({} if nominal else values, meta)


def pack(parts: Mapping[str, bytes]) -> bytes:
    """The one file: each part a tensor of bytes."""
    return tensors_bytes(
        {name: ("U8", [len(data)], data) for name, data in parts.items()},
        {"format": "ortmodule-device", "version": "1"},
    )


def write_artifacts(
    directory: str | os.PathLike[str], prefix: str, parts: Mapping[str, bytes], nominal: bytes | None
) -> Path:
    """Writes the parts and the packed file; returns the latter's path."""
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    for name, data in parts.items():
        file_replace(home / f"{prefix}{name}", data)
    if nominal is not None:
        file_replace(home / f"{prefix}nominal_checkpoint", nominal)
    packed = home / f"{prefix}model.omd"
    file_replace(packed, pack(parts))
    return packed


# --- optimizer


def optimizer_model(
    op: str, domain: str, attributes: Mapping[str, Any], n_moments: int, opset: int, max_norm: float | None = None
) -> onnx.ModelProto:
    """The optimizer graph of onnxruntime-training's contract."""
    one = helper.make_tensor_value_info
    sequence = helper.make_tensor_sequence_value_info
    moments = ["first_order_moments", "second_order_moments"][:n_moments]
    inputs = [one("learning_rate", TensorProto.FLOAT, [1]), one("step", TensorProto.INT64, [1])]
    inputs += [sequence(name, TensorProto.FLOAT, None) for name in ("params", "gradients", *moments)]
    nodes = []
    gradients = "gradients"
    if max_norm is not None:
        gradients = "clipped_gradients"
        nodes.append(helper.make_node(
            "InplaceClipGradNorm", ["gradients"], [gradients], "ClipGradNorm", domain="com.microsoft",
            max_norm=float(max_norm)))  # fmt: skip
    steps = ["learning_rate", "step"] if op == "AdamWOptimizer" else ["learning_rate"]
    node = helper.make_node(op, [*steps, "params", gradients, *moments], ["update_completed"], op, domain=domain)
    for name, value in attributes.items():
        node.attribute.append(helper.make_attribute(name, value))
        if isinstance(value, float) and float(np.float32(value)) != value:  # attributes are f32: docs/ONNX.md
            node.metadata_props.add(key=f"f64:{name}", value=repr(value))
    nodes.append(node)
    graph = helper.make_graph(nodes, "optimizer", inputs, [one("update_completed", TensorProto.BOOL, [1])])
    domains = {"": opset, "com.microsoft": 1, domain: 1}
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()], ir_version=10,
        producer_name="ortmodule")  # fmt: skip


def optimizer_of(kind: Any, opset: int) -> onnx.ModelProto:
    """Of an OptimType, or of onnxblock.AdamW or SGD with their settings."""
    block = kind
    if not isinstance(kind, (onnxblock.AdamW, onnxblock.SGD)):
        try:
            block = onnxblock.AdamW() if OptimType(kind) == OptimType.AdamW else onnxblock.SGD()
        except ValueError:
            raise RuntimeError(f"optimizer: {kind!r}; an OptimType, onnxblock.AdamW or SGD is expected") from None
    norm = block.clip_grad.max_norm if block.clip_grad else None
    return optimizer_model(block.op, "com.microsoft", block.attributes, block.moments, opset, norm)


# --- from an ONNX file

_OPSETS = 13, 23  # those that the trainer loads (csrc/onnx/onnx.h)


def _opset(model: onnx.ModelProto) -> int:
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    low, high = _OPSETS
    if not low <= opset <= high:
        raise RuntimeError(
            f"model: opset {opset} of ai.onnx; {low} to {high} are taken (onnx.version_converter converts)"
        )
    return int(opset)


def _name_sizes(graph: onnx.GraphProto) -> None:
    """Sizes of inputs that have no name, or an empty one, get one: what a loss adds has the same."""
    inputs, others = list(graph.input), [*graph.output, *graph.value_info]
    taken = {d.dim_param for i in inputs + others for d in i.type.tensor_type.shape.dim}
    fresh = (name for k in itertools.count() if (name := f"size_{k}") not in taken)
    for infos, named in (inputs, True), (others, False):
        for d in (d for i in infos for d in i.type.tensor_type.shape.dim):
            if not d.HasField("dim_value") and not d.dim_param:
                d.ClearField("dim_param")  # shape inference takes an empty name for one
                if named:
                    d.dim_param = next(fresh)


def _names(given: Sequence[str] | None, what: str, known: Mapping[str, Any]) -> list[str]:
    names = list(given or ())
    missing = [n for n in names if n not in known]
    if missing:
        raise RuntimeError(f"{what}: {', '.join(missing)}: no initializer of the model")
    return names


def _evaluation(model: onnx.ModelProto) -> onnx.ModelProto:
    """Dropout without its training input, BatchNormalization by its statistics."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx"):
            del node.input[1:]
        if node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx"):
            del node.output[1:]
            for a in node.attribute:
                if a.name == "training_mode":
                    a.i = 0
    return result


def _lifted(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Initializers become graph inputs with the role of parameters, behind the others."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    lifted = {t.name: t for t in graph.initializer if t.name in names}
    kept = [t for t in graph.initializer if t.name not in lifted]
    inputs = [i for i in graph.input if i.name not in lifted]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(kept)
    graph.input.extend(inputs)
    used = {name for node in graph.node for name in node.input} | {o.name for o in graph.output}
    for name in names:
        if name not in used:
            continue
        graph.input.append(helper.make_tensor_value_info(name, lifted[name].data_type, list(lifted[name].dims)))
        graph.metadata_props.add(key=f"role:{name}", value="param")
    return result


def _check_loss(name: str, info: onnx.ValueInfoProto, given: Any) -> None:
    """The result must be one f32 number; what is not known is the engine's to refuse."""
    kind = info.type.tensor_type
    sizes = [d.dim_param or d.dim_value for d in kind.shape.dim] if kind.HasField("shape") else []
    if kind.elem_type in (TensorProto.UNDEFINED, TensorProto.FLOAT) and all(s in (0, 1) for s in sizes):
        return
    shape = f"{TensorProto.DataType.Name(kind.elem_type).lower()} [{', '.join(map(str, sizes))}]"
    remedy = "give loss=LossType..." if given is None else "end the block with a ReduceMean or ReduceSum"
    raise RuntimeError(f"loss: {name!r} is {shape}; one float number is expected: {remedy}")


def _loss_block(loss: Any) -> onnxblock.Block:
    if loss is None:
        return onnxblock.PassThrough()
    if isinstance(loss, onnxblock.Block):
        return loss
    try:
        return {
            LossType.MSELoss: onnxblock.MSELoss,
            LossType.CrossEntropyLoss: onnxblock.CrossEntropyLoss,
            LossType.BCEWithLogitsLoss: onnxblock.BCEWithLogitsLoss,
            LossType.L1Loss: onnxblock.L1Loss,
        }[LossType(loss)]()
    except ValueError:
        raise RuntimeError(f"loss: {loss!r}; a LossType or an onnxblock.Block is expected") from None


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.AdamW | onnxblock.SGD | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
) -> None:
    """Writes artifacts for a device from an ONNX model (a ModelProto, or a path), exported in training mode.

    The model's opset is 13 to 23. requires_grad, frozen_params: initializers that are parameters; others stay
    constants. loss: what is put behind the outputs `loss_input_names` (None: all); None: the first output is the loss.
    The graph's outputs are then the loss and additional_output_names. optimizer None: gradients only.
    artifact_directory None: the current one. nominal_checkpoint: one without values as well. Raises RuntimeError with
    the name of what does not fit. ort_format and custom_op_library are onnxruntime's own and refused.
    """
    if ort_format or custom_op_library is not None:
        raise RuntimeError("ort_format and custom_op_library: only onnxruntime can run these")
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(os.fspath(model))
    opset = _opset(model)
    values = {t.name: t for t in model.graph.initializer}
    trained = _names(requires_grad, "requires_grad", values)
    frozen = _names(frozen_params, "frozen_params", values)
    both = sorted(set(trained) & set(frozen))
    if both:
        raise RuntimeError(f"in requires_grad and in frozen_params: {', '.join(both)}")
    if not trained:
        raise RuntimeError("requires_grad: no parameter to train")
    names = [name for name in values if name in {*trained, *frozen}]
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    _name_sizes(whole.graph)
    outputs = {o.name: o for o in whole.graph.output}
    use = list(loss_input_names) if loss_input_names is not None else list(outputs)
    keep = list(additional_output_names or ())
    unknown = [n for n in use if n not in outputs]
    if unknown:
        raise RuntimeError(f"loss_input_names: {', '.join(unknown)}: no output of the model")
    result = onnxblock.build(whole, _loss_block(loss), use)
    infos = onnxblock.value_infos(whole)
    unknown = [n for n in keep if n not in infos]
    if unknown:
        raise RuntimeError(f"additional_output_names: {', '.join(unknown)}: no value of the model")
    if result in infos:
        _check_loss(result, infos[result], loss)
    del whole.graph.output[:]
    whole.graph.output.extend([infos[n] for n in [result, *(k for k in keep if k != result)]])
    train, evaluation = _lifted(whole, names), _lifted(_evaluation(whole), names)
    onnx.checker.check_model(train)
    onnx.checker.check_model(evaluation)
    used = {i.name for i in train.graph.input}
    unused = [n for n in names if n not in used]
    if set(unused) & set(trained):
        raise RuntimeError(f"requires_grad: the graph does not use {', '.join(sorted(set(unused) & set(trained)))}")
    arrays: dict[str, tuple[str, Sequence[int], bytes]] = {}
    for name in names:
        if name in used:
            t = values[name]
            if t.data_type not in _KINDS:
                raise RuntimeError(f"{name}: a parameter of type {TensorProto.DataType.Name(t.data_type)}")
            arrays[name] = (_KINDS[t.data_type], list(t.dims), numpy_helper.to_array(t).tobytes())
    still = [n for n in frozen if n in used]
    parts = {"training_model.onnx": train.SerializeToString(), "eval_model.onnx": evaluation.SerializeToString()}
    if optimizer is not None:
        parts["optimizer_model.onnx"] = optimizer_of(optimizer, opset).SerializeToString()
    parts["checkpoint"] = checkpoint_bytes(arrays, still, 1e-3)
    nominal = checkpoint_bytes({}, still, 1e-3, nominal=True) if nominal_checkpoint else None
    write_artifacts(artifact_directory if artifact_directory is not None else os.getcwd(), prefix, parts, nominal)
