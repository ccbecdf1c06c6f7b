"""Files of a graph's stages: the capture with its arguments' own names, and the engine's graph as a file that viewers
of ONNX open: one node per operator, in a domain of its own.

The latter is made from the text form (`Model.text`), so it shows what the engine runs, gradients included; onnxruntime
does not run it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from .capture import Captured, flatten_inputs
from .chain import Graph
from .state import State

logger = logging.getLogger("ortmodule")
DOMAIN = "ortmodule.engine"
_TYPES = {
    "f64": TensorProto.DOUBLE, "f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16,
    "i64": TensorProto.INT64, "i32": TensorProto.INT32, "i16": TensorProto.INT16, "i8": TensorProto.INT8,
    "u8": TensorProto.UINT8, "bool": TensorProto.BOOL}  # fmt: skip
_INPUT = re.compile(r'(input|param|buffer|grad_in) (\S+)(?: "((?:[^"\\]|\\.)*)")?: (.*)$')
_NODE = re.compile(r"(.+?) = (\w+)\((.*?)\)(?: \{(.*)\})?: (.*)$")
_CONST = re.compile(r"const (\S+): (\S+?\[.*?\]) = (.*)$")
_KIND = re.compile(r"(\w+)\[(.*?)\]")


def _value(name: str, text: str) -> onnx.ValueInfoProto:
    found = _KIND.match(text)
    if found is None or found[1] not in _TYPES:
        return onnx.ValueInfoProto(name=name)
    sizes = [int(d) if d.strip().isdigit() else d.strip() for d in found[2].split(",") if d.strip()]
    return helper.make_tensor_value_info(name, _TYPES[found[1]], sizes)


def _attributes(text: str | None) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in re.findall(r'(\w+)=(\[[^\]]*\]|"(?:[^"\\]|\\.)*"|[^,\s]+)', text or ""):
        try:
            found[name] = int(value)
        except ValueError:
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = value.strip('"')
    return found


def model_of(text: str, name: str) -> onnx.ModelProto:
    """From the text of a graph."""
    nodes, inputs, values, outputs = [], [], {}, []
    for line in text.splitlines():
        line = line.strip()
        if found := _CONST.match(line):
            nodes.append(helper.make_node("const", [], [found[1]], domain=DOMAIN, value=found[3]))
            values[found[1]] = _value(found[1], found[2])
        elif found := _INPUT.match(line):
            values[found[2]] = _value(found[2], found[4])
            values[found[2]].doc_string = f"{found[1]} {found[3] or ''}".strip()
            inputs.append(values[found[2]])
        elif found := re.match(r"output (\S+)$", line):
            outputs.append(found[1])
        elif found := re.match(r"grad (\S+) = (\S+)$", line):
            nodes.append(helper.make_node("grad", [found[2]], [f"{found[1]}_grad"], domain=DOMAIN))
            outputs.append(f"{found[1]}_grad")
            values[f"{found[1]}_grad"] = onnx.ValueInfoProto(name=f"{found[1]}_grad")
        elif found := re.match(r"write (\S+) -> (\S+)$", line):
            nodes.append(helper.make_node("write", [found[1], found[2]], [f"{found[2]}_written"], domain=DOMAIN))
        elif found := _NODE.match(line):
            names = [n.strip() for n in found[1].split(",")]
            given = [n.strip() for n in found[3].split(",")] if found[3].strip() else []
            node = helper.make_node(found[2], [n if n != "_" else "" for n in given], names, domain=DOMAIN)
            node.attribute.extend(helper.make_attribute(k, v) for k, v in _attributes(found[4]).items())
            place = re.search(r'@"((?:[^"\\]|\\.)*)"', found[5])
            node.doc_string = f"{place[1] if place else ''}{' backward' * found[5].endswith('backward')}"
            nodes.append(node)
            for n, kind in zip(names, _KIND.finditer(found[5]), strict=False):
                values[n] = _value(n, kind[0])
    outs = [values.get(n) or onnx.ValueInfoProto(name=n) for n in dict.fromkeys(outputs)]
    graph = helper.make_graph(nodes, name, inputs, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("", 23)])
    model.producer_name = "ortmodule"
    return model


def argument_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                   tensors: Sequence[Tensor]) -> list[str]:  # fmt: skip
    """Of each tensor: its parameter, with the index or key below it. '' where none is found."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return [""] * len(tensors)
    found: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            found.setdefault(id(value), name)
        elif isinstance(value, Mapping):
            for key, below in value.items():
                walk(below, f"{name}_{key}")
        elif isinstance(value, (list, tuple)):
            for i, below in enumerate(value):
                walk(below, f"{name}_{i}")

    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for key, below in value.items():
                walk(below, key)
        else:
            walk(value, name)
    return [found.get(id(t), "") for t in tensors]


def named(onnx_bytes: bytes, inputs: Sequence[str], names: Sequence[str]) -> bytes:
    """The file with other names for these graph inputs; '' keeps one, and so does a name that is taken."""
    model = onnx.load_from_string(onnx_bytes)
    known = {i.name for i in model.graph.input}
    new: dict[str, str] = {}
    for old, name in zip(inputs, names, strict=True):
        if name and name not in known and name not in new.values():
            new[old] = name
    rename(model.graph, new)
    result: bytes = model.SerializeToString()
    return result


def rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    """Values of new names; who has such a name already gets another."""
    used = {name for node in graph.node for name in (*node.input, *node.output)} | {i.name for i in graph.initializer}
    names = dict(new)
    for name in set(new.values()) & (used - set(new)):
        names[name] = f"{name}/inner"
    for node in graph.node:
        for values in (node.input, node.output):
            for i, name in enumerate(values):
                values[i] = names.get(name, name)
    for rows in (graph.input, graph.output, graph.value_info, graph.initializer):
        for row in rows:
            row.name = names.get(row.name, row.name)


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """Training goes on without the files, whatever keeps them from being made."""
    try:
        yield
    except Exception as error:
        logger.warning("the captured graph cannot be saved: %s", error)


@_beside()
def save(state: State, data: bytes, name: str) -> None:
    """Writes a file into the directory of the module's settings, if they have one."""
    path = state.settings.save_path
    if path is None:
        return
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, name), "wb") as file:
        file.write(data)


def file_name(state: State, stage: str, part: str = "") -> str:
    mode = "training" if state.module.training and torch.is_grad_enabled() else "inference"
    prefix = state.settings.save_prefix or type(state.module).__name__
    number = f"_{len(state.every)}" if state.every else ""  # of a later capture
    return f"{prefix}_{stage}_{mode}{part}{number}.onnx"


@_beside()
def save_capture(state: State, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The capture's file, with the names of forward's parameters."""
    if state.settings.save_path is None:
        return
    names = argument_names(state.module.forward, args, kwargs, flatten_inputs(args, kwargs).tensors)
    own = [spec for spec in captured.inputs if spec.kind == "user" and spec.leaf < len(names)]
    data = named(captured.onnx, [spec.name for spec in own], [names[spec.leaf] for spec in own])
    save(state, data, file_name(state, "torch_exported"))


@_beside()
def save_graph(state: State, graph: Graph) -> None:
    """The engine's own graphs, for DebugOptions(save_onnx=True): the simplified forward now, the one that runs, with
    its gradients, when it is made."""
    if state.settings.save_path is None or not state.settings.save_prefix:
        return

    @_beside()
    def write(variant: int, *names: str) -> None:
        model = model_of(graph.model.text(variant), type(state.module).__name__)
        for name in names:
            save(state, model.SerializeToString(), name)

    if not torch.is_grad_enabled() or not state.module.training:
        write(-1, file_name(state, "optimized"))
        write(graph.plain.number, file_name(state, "execution_model"))
    else:
        write(-1, file_name(state, "optimized_pre_grad"))
        names = file_name(state, "optimized"), file_name(state, "execution_model")
        graph.made = lambda variant: write(variant, *names)
