"""Gradients and graph optimizers that a user registers, as onnxruntime-training has them.

A gradient is a list of nodes (operator, inputs, outputs, attributes) over I(i), O(i), GO(i): the arguments of a torch
operator, its results, and the gradients of these; GI(i) is the gradient of an argument. Who has one is run by PyTorch
inside the graph, and this gradient is its backward: nodes of ATen by PyTorch, those of ONNX by onnx's reference
implementation. A graph optimizer edits the ONNX graph of a training capture, before it is differentiated.

Both hold for captures that are made later. Where PyTorch runs the whole module they mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .. import autocast

if TYPE_CHECKING:
    import numpy as np
    import onnx

F = TypeVar("F", bound=Callable[..., Any])
ATEN = "org.pytorch.aten"
_OPSET = 17  # of the nodes of gradients: onnxruntime-training 1.19.2's
_TYPES = {
    "int": torch.int64, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool, "float": torch.float32,
    "double": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}  # fmt: skip
_PLACE = re.compile(r"(I|O|GO|GI|IElemType|OElemType)\((\d+)\)$")
Key = tuple[str, str]  # "aten::embedding", its overload, "default" for none
Definition = tuple[Any, ...]


class NotServed(NotImplementedError):
    """A registration that cannot be honoured; the message is what to do."""


# --- operators by name


def key_of(operator: str, overload: str = "") -> Key:
    return operator if "::" in operator else f"aten::{operator}", overload or "default"


def operator_of(key: Key) -> Any:
    """The operator of PyTorch, or NotServed."""
    space, name = key[0].split("::", 1)
    found = getattr(getattr(getattr(torch.ops, space), name, None), key[1], None)
    if found is None:
        raise NotServed(f"PyTorch {torch.__version__} has no operator {key[0]}, overload {key[1]!r}")
    return found


def call_aten(operator: Any, given: Sequence[Any]) -> tuple[Any, ...]:
    """The operator on its arguments in the order of its schema. Numbers may come as tensors, None is a default."""
    arguments = operator._schema.arguments
    if len(given) > len(arguments):
        raise TypeError(f"{operator._schema.name} takes {len(arguments)} arguments, {len(given)} are given")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for a, x in zip(arguments, given, strict=False):
        text = str(a.type)
        if x is None and a.has_default_value():
            x = a.default_value
        elif isinstance(x, Tensor) and "Tensor" not in text:
            x = (x != 0 if "bool" in text else x).flatten()
            x = x.tolist() if "List" in text else x.item()
        elif isinstance(x, (bool, int, float)) and text == "Tensor":
            x = torch.tensor(x, device="cpu")
        if a.kwarg_only:
            kwargs[a.name] = x
        else:
            args.append(x)
    out = operator(*args, **kwargs)
    return (out,) if isinstance(out, Tensor) else tuple(out)


# --- gradients


@dataclass
class _Step:
    operator: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, dict[str, Any]]
    made: dict[Any, Any] = field(default_factory=dict)  # evaluators, by the types that attributes name

    def key(self) -> Key:
        """Of an ATen node."""
        a = {k: v["value"] for k, v in self.attributes.items()}
        return key_of(a["operator"], a.get("overload_name", ""))


class Gradient:
    def __init__(self, name: str, nodes: Sequence[Definition]) -> None:
        import onnx

        self.name, self.steps = name, [_step(name, node) for node in nodes]
        known: set[str] = set()
        for s in self.steps:
            for x in s.inputs:
                if x and x not in known and not re.match(r"(I|O|GO)\(\d+\)$", x):
                    raise ValueError(f"{name}: {s.operator} reads {x!r}, which no node before it makes")
            known.update(s.outputs)
            if s.domain == ATEN:
                if "value" not in s.attributes.get("operator", {}):
                    raise ValueError(f"{name}: a node {ATEN}::{s.operator} needs an attribute 'operator'")
                operator_of(s.key())
            elif s.domain or not onnx.defs.has(s.operator, _OPSET):
                raise NotServed(f"{name}: {s.domain or 'onnx'}::{s.operator} is neither an operator of ONNX {_OPSET} "
                                f"nor {ATEN}::ATen, of which a gradient is made here")
        if not any(x.startswith("GI(") for x in known):
            raise ValueError(f"{name}: no node makes a gradient, GI(i)")

    def run(self, given: Sequence[Any], results: Sequence[Any], grads: Sequence[Any]) -> list[Tensor | None]:
        """-> gradients by argument."""
        value: dict[str, Any] = {"": None}
        for letter, xs in (("I", given), ("O", results), ("GO", grads)):
            value.update((f"{letter}({i})", x) for i, x in enumerate(xs))
        device = next(g.device for g in grads if g is not None)
        for s in self.steps:
            absent = next((x for x in s.inputs if x not in value), None)
            if absent is not None:
                raise RuntimeError(f"ortmodule: {self.name}: {s.operator} reads {absent}, and there is none")
            xs = [value[x] for x in s.inputs]
            if s.domain == ATEN:
                made: Sequence[Any] = call_aten(operator_of(s.key()), xs)
            else:
                made = _by_onnx(s, xs, partial(self._type, value), device)
            value.update(zip(s.outputs, made, strict=False))
        return [x if isinstance(x, Tensor) else None for x in (value.get(f"GI({i})") for i in range(len(given)))]

    def _type(self, value: dict[str, Any], name: str) -> torch.dtype:
        found = _PLACE.match(name)
        if found is None:
            return _TYPES[name]
        x = value[f"{found[1][0]}({found[2]})"]
        return x.dtype if isinstance(x, Tensor) else torch.tensor(x, device="cpu").dtype

    def around(self, call: Callable[[list[Tensor]], Any], values: Sequence[Callable[[list[Tensor]], Any]],
               places: Sequence[int | None]) -> Callable[[list[Tensor]], Any]:  # fmt: skip
        """call: the operator on its tensors; values: these -> its arguments; places: which tensor an argument is."""
        gradient = self

        class Registered(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Tensor) -> Any:
                out = call(list(tensors))
                ctx.n = len(tensors)
                ctx.save_for_backward(*tensors, *([out] if isinstance(out, Tensor) else out))
                return out

            @staticmethod
            @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                saved = list(ctx.saved_tensors)
                tensors = saved[: ctx.n]
                with autocast.off():
                    found = gradient.run([f(tensors) for f in values], saved[ctx.n :], grads)
                back: list[Tensor | None] = [None] * ctx.n
                for place, g in zip(places, found, strict=True):
                    if place is not None and g is not None:
                        before = back[place]  # of another argument that is the same tensor
                        back[place] = g if before is None else before + g
                return tuple(back)

        return lambda tensors: Registered.apply(*tensors)


def _step(name: str, node: Definition) -> _Step:
    if not isinstance(node, tuple) or len(node) not in (3, 4):
        raise ValueError(f"{name}: a node is (operator, inputs, outputs) or (operator, inputs, outputs, attributes), "
                         f"not {node!r}")
    operator, domain = (node[0], "") if isinstance(node[0], str) else node[0]
    for key, a in (node[3] if len(node) == 4 else {}).items():
        types = a.get("dtype", "string")
        if types != "string" and types not in _TYPES and not _PLACE.match(types):
            raise ValueError(f"{name}: attribute {key} of {operator} has the type {types!r}, not one of "
                             f"{', '.join(_TYPES)}, string, IElemType(i), OElemType(i)")
    return _Step(operator, domain, list(node[1]), list(node[2]), dict(node[3]) if len(node) == 4 else {})


def _by_onnx(s: _Step, xs: list[Any], type_of: Callable[[str], torch.dtype], device: torch.device) -> list[Tensor]:
    types = tuple(type_of(a["dtype"]) if a["dtype"] != "string" else None for a in s.attributes.values())
    arrays = {f"x{i}": array_of(x) for i, x in enumerate(xs) if x is not None}
    key = (types, tuple(str(a.dtype) for a in arrays.values()), tuple(x is None for x in xs))
    if key not in s.made:
        s.made[key] = _evaluator(s, types, arrays, len(xs))
    return [_tensor(y).to(device) for y in s.made[key].run(None, arrays)]


def _evaluator(s: _Step, types: Sequence[torch.dtype | None], arrays: dict[str, np.ndarray], n: int) -> Any:
    from onnx import ValueInfoProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    attributes: dict[str, Any] = {}
    for (name, a), dtype in zip(s.attributes.items(), types, strict=True):
        v = a["value"]
        if a.get("is_tensor"):
            v = numpy_helper.from_array(array_of(torch.tensor(v, dtype=dtype, device="cpu")))
        elif dtype is not None and dtype.is_floating_point:
            v = [float(y) for y in v] if isinstance(v, list) else float(v)
        elif dtype is not None:
            v = [int(y) for y in v] if isinstance(v, list) else int(v)
        attributes[name] = v
    names = [f"x{i}" if f"x{i}" in arrays else "" for i in range(n)]
    outs = [f"y{i}" if x else "" for i, x in enumerate(s.outputs)]
    graph = helper.make_graph(
        [helper.make_node(s.operator, names, outs, **attributes)], "gradient",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), None) for k, a in arrays.items()],
        [ValueInfoProto(name=y) for y in outs if y])  # fmt: skip
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)]))


def array_of(x: Any) -> np.ndarray:
    t = (x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")).detach().cpu().contiguous()
    if t.dtype != torch.bfloat16:
        return t.numpy()
    import ml_dtypes

    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(a: np.ndarray) -> Tensor:
    import numpy as np

    a = np.array(a)
    if a.dtype.name == "bfloat16":
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


GRADIENTS: dict[Key, Gradient] = {}
STOPPED: dict[Key, frozenset[int]] = {}  # arguments that are not followed


def registered_call(key: Key, call: Callable[[list[Tensor]], Any], values: Sequence[Callable[[list[Tensor]], Any]],
                    places: Sequence[int | None]) -> Callable[[list[Tensor]], Any]:  # fmt: skip
    """The call of an operator with what is registered for its gradient. values, places: as for Gradient.around."""
    if key in STOPPED:
        stopped = {places[i] for i in STOPPED[key] if i < len(places)}
        inner = call

        def call(ts: list[Tensor]) -> Any:
            return inner([t.detach() if i in stopped else t for i, t in enumerate(ts)])

    return GRADIENTS[key].around(call, values, places) if key in GRADIENTS else call


def called(key: Key, present: Sequence[bool], n: int) -> Callable[[list[Tensor]], Any]:
    """An operator whose arguments are all tensors, or absent. n: how many results are wanted."""
    operator = operator_of(key)
    where = [sum(present[:i]) if given else None for i, given in enumerate(present)]
    values = [lambda ts, i=i: None if i is None else ts[i] for i in where]

    def call(ts: list[Tensor]) -> Any:
        with autocast.off():
            out = call_aten(operator, [f(ts) for f in values])[:n]
        return out[0] if n == 1 else tuple(out)

    return registered_call(key, call, values, where)


def _registered_key(domain: str, name: str, attributes: Sequence[str]) -> Key:
    if domain == ATEN and name == "ATen":
        if not 1 <= len(attributes) <= 2:
            raise ValueError("register_gradient: 'org.pytorch.aten', 'ATen', operator, overload")
        return key_of(*attributes)
    if domain in ("", "ai.onnx", "com.microsoft"):
        raise NotServed(
            f"the gradient of {domain or 'onnx'}::{name} is the engine's own. For another one write a "
            "torch.autograd.Function with that backward and call it in forward, or register the gradient of a torch "
            "operator (register_gradient('org.pytorch.aten', 'ATen', operator, overload))"
        )
    return key_of(f"{domain}::{name}")


class CustomGradientRegistry:
    """Gradients of torch operators, by domain, name and attributes: "org.pytorch.aten", "ATen", operator, overload, or
    the namespace and name of an operator of torch.library."""

    @classmethod
    def register(
        cls, domain: str, name: str, attributes: Sequence[str], fn: Callable[[], Sequence[Definition]]
    ) -> None:
        key = _registered_key(domain, name, attributes)
        GRADIENTS[key] = Gradient(f"the gradient {fn.__qualname__} of {key[0]}", fn())

    @classmethod
    def register_custom_stop_gradient_edges(
        cls, edges: Sequence[int], domain: str, name: str, *attributes: str
    ) -> None:
        STOPPED[_registered_key(domain, name, attributes)] = frozenset(edges)


def register_gradient(domain: str, name: str, *attributes: str) -> Callable[[F], F]:
    """Decorates a function that returns the gradient of a torch operator as a list of nodes."""
    def keep(fn: F) -> F:
        CustomGradientRegistry.register(domain, name, attributes, fn)
        return fn

    return keep


# --- graph optimizers


class GraphOptimizerRegistry:
    _functions: list[tuple[str, str, int, Callable[[onnx.GraphProto], None]]] = []

    @classmethod
    def register(
        cls, target_modules: str, devices: str, priority: int, fn: Callable[[onnx.GraphProto], None]
    ) -> None:
        cls._functions.append((target_modules, devices, priority, fn))

    @classmethod
    def chosen(cls, module: str, device: str) -> list[Callable[[onnx.GraphProto], None]]:
        found = [row for row in cls._functions
                 if "all" in (row[0], *row[0].split("|")) or module in row[0].split("|")]  # fmt: skip
        found = [row for row in found if row[1] == "all" or device in row[1].split("|")]
        return [row[3] for row in sorted(found, key=lambda row: -row[2])]

    @classmethod
    def optimize_all(cls, module_name: str, device: str, graph: onnx.GraphProto) -> None:
        for fn in cls.chosen(module_name, device):
            fn(graph)


def register_graph_optimizer(target_modules: str = "all", devices: str = "all", priority: int = 0) -> Callable[[F], F]:
    """Decorates a function that edits the GraphProto of a training capture. target_modules: names of classes, joined by
    "|"; devices: "cpu|cuda|rocm"; those of higher priority are first."""
    def keep(fn: F) -> F:
        GraphOptimizerRegistry.register(target_modules, devices, priority, fn)
        return fn

    return keep


def _signature(graph: onnx.GraphProto) -> list[tuple[str, str, str]]:
    return [(kind, v.name, str(v.type)) for kind, vs in (("input", graph.input), ("output", graph.output)) for v in vs]


def optimized(graph: onnx.GraphProto, module: str, device: str) -> list[str]:
    """Runs the optimizers. -> their names. Raises ValueError for what no caller could go on with."""
    chosen = GraphOptimizerRegistry.chosen(module, device)
    if not chosen:
        return []
    before = _signature(graph)
    names: list[str] = []
    for fn in chosen:
        code = getattr(fn, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        names.append(f"{getattr(fn, '__qualname__', fn)}{where}")
        try:
            fn(graph)
        except Exception as e:
            raise ValueError(f"the graph optimizer {names[-1]} raised {type(e).__name__}: {e}") from e
        if _signature(graph) != before:
            raise ValueError(f"the graph optimizer {names[-1]} has changed the graph's inputs or outputs, which are "
                             "the module's: give them back under their names")
    made = {x for n in graph.node for x in n.output} | {x for _, x, _ in before}
    for i in range(len(graph.value_info) - 1, -1, -1):
        if graph.value_info[i].name not in made:
            del graph.value_info[i]
    return names
