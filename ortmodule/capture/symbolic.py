"""Symbolics that a user registers (onnxruntime-training's register_symbolic): a torch operator as nodes of ONNX.

A symbolic is called with a graph, `g.op(...)`, and the operator's arguments: tensors as values, all else as it is,
which the helpers of torch.onnx.symbolic_helper take as constants. Its nodes stand in the captured graph and are the
engine's, gradients included. What the engine cannot take of them leaves the operator to PyTorch, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .. import _C
from .onnx_build import DOMAINS, OPSET, Builder, UnsupportedError, Val, shape_of
from .onnx_functions import functions
from .registered import ATEN, Key, array_of

if TYPE_CHECKING:
    from .convert import Converter
    from .program import Node

F = TypeVar("F", bound=Callable[..., Any])
SYMBOLICS: dict[Key, Callable[..., Any]] = {}


class CustomOpSymbolicRegistry:
    @classmethod
    def register(cls, name: str, domain: str, fn: Callable[..., Any]) -> None:
        """Of all overloads, unless the name has one: "add.Tensor"."""
        name, _, overload = name.partition(".")
        SYMBOLICS[f"{domain or 'aten'}::{name}", overload] = fn


def _below(version: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        parts = text.split("+")[0].split(".")[:3]
        return tuple(int("".join(c for c in p if c.isdigit()) or 0) for p in parts)

    return numbers(torch.__version__) < numbers(version)


def register_symbolic(name: str, domain: str = "", torch_version_start: str | None = None,
                      torch_version_end: str | None = None, need_node: bool = False) -> Callable[[F], F]:  # fmt: skip
    """Decorates `fn(g, *arguments)`, with need_node `fn(g, node, *arguments)`, which returns values of g.op for the
    torch operator domain::name (aten without a domain)."""
    def keep(fn: F) -> F:
        early = torch_version_start is not None and _below(torch_version_start)
        if not early and (torch_version_end is None or _below(torch_version_end)):
            CustomOpSymbolicRegistry.register(name, domain, _WithNode(fn) if need_node else fn)
        return fn

    return keep


class _WithNode:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, g: Graph, *args: Any) -> Any:
        return self.fn(g, g.original_node, *args)


def find(key: Key) -> Callable[..., Any] | None:
    return SYMBOLICS.get(key) or SYMBOLICS.get((key[0], ""))


class Value:
    """A value of the graph, as a symbolic sees it."""

    def __init__(self, name: str, kind: Any = None, node: Any = None) -> None:
        self.name, self._type, self._node = name, kind or torch.TensorType.get(), node

    def type(self) -> Any:
        """A torch.TensorType: of arguments and the operator's own results with element type and known sizes."""
        return self._type

    def setType(self, kind: Any) -> Value:  # noqa: N802
        self._type = kind
        return self

    def debugName(self) -> str:  # noqa: N802
        return self.name

    def node(self) -> Any:
        return self._node


class OriginalNode:
    """The call of the torch operator."""

    def __init__(self, kind: str, inputs: list[Any], outputs: list[Value]) -> None:
        self._kind, self._inputs, self._outputs = kind, inputs, outputs

    def kind(self) -> str:
        return self._kind

    def inputs(self) -> list[Any]:
        return self._inputs

    def outputs(self) -> list[Value]:
        return self._outputs

    def output(self) -> Value:
        return self._outputs[0]

    def mustBeNone(self) -> bool:  # noqa: N802
        return False


def _type_of(t: Tensor) -> Any:
    kind = torch.TensorType.create_from_tensor(torch.empty([0] * t.dim(), dtype=t.dtype, device="cpu"))
    return kind.with_sizes([d if isinstance(d, int) else None for d in shape_of(t)])


class Graph:
    """What a symbolic makes nodes with."""

    opset = OPSET

    def __init__(self, c: Converter, node: Node, arguments: list[Any]) -> None:
        self.c = c
        outs = [node.val] if isinstance(node.val, Tensor) else list(node.val)
        self.original_node = OriginalNode(node.target._schema.name, arguments,
                                          [Value("", _type_of(t)) for t in outs if isinstance(t, Tensor)])  # fmt: skip

    def op(self, operator: str, *args: Any, outputs: int = 1, **attributes: Any) -> Any:
        """A node "Op", "domain::Op". Attributes have their kind behind their name: axis_i, alpha_f, mode_s, value_t,
        and lists of these."""
        domain, _, name = operator.rpartition("::")
        domain = "" if domain in ("onnx", "ai.onnx") else domain
        if domain == "aten":
            return self.at(name, *args, outputs=outputs, **attributes)
        if domain not in DOMAINS:
            raise UnsupportedError(
                f"{operator} is no operator of ONNX or of the engine; one of torch.library is {ATEN}::ATen with "
                f"operator_s={operator!r}")
        ins = [None if a is None else Val(self._name(a), torch.float32, ()) for a in args]
        made = [Val(self.c.b.fresh(name.lower()), torch.float32, ()) for _ in range(outputs)]
        self.c.b._node(name, ins, made, dict(map(_attribute, attributes.items())), domain)
        values = [Value(v.name) for v in made]
        return values[0] if outputs == 1 else tuple(values)

    def at(self, operator: str, *args: Any, overload_name: str = "", outputs: int = 1, **attributes: Any) -> Any:
        return self.op(f"{ATEN}::ATen", *args, outputs=outputs, operator_s=operator, overload_name_s=overload_name,
                       **attributes)  # fmt: skip

    def _name(self, x: Any) -> str:
        if isinstance(x, Value):
            return x.name
        if isinstance(x, Tensor):
            return self.c.b.tensor(x, "c").name
        if isinstance(x, (list, tuple)) and any(isinstance(y, (Value, Tensor)) for y in x):
            raise UnsupportedError("a list of tensors where an operator takes one")
        if isinstance(x, (bool, int, float, list, tuple)):
            return self.c.b.tensor(torch.tensor(x, device="cpu"), "c").name
        if isinstance(x, torch.dtype):
            raise UnsupportedError(f"{x} where an operator takes a tensor")
        raise UnsupportedError(f"a {type(x).__name__} where an operator takes a tensor")


def _attribute(item: tuple[str, Any]) -> tuple[str, Any]:
    key, x = item
    name, _, kind = key.rpartition("_")
    if not name or kind not in ("i", "f", "s", "t"):
        raise UnsupportedError(f"the attribute {key}: its kind, _i, _f, _s or _t, stands behind its name")
    many = isinstance(x, (list, tuple))
    if kind == "t":
        from onnx import numpy_helper

        return name, numpy_helper.from_array(array_of(x))
    to = {"i": int, "f": float, "s": str}[kind]
    return name, [to(y) for y in x] if many else to(x)


def emit(c: Converter, n: Node, fn: Callable[..., Any], given: Sequence[Any], dtype: torch.dtype | None) -> Any:
    """The operator by its symbolic, or UnsupportedError and a graph as before. dtype: what autocast computes in."""
    b = c.b
    used: dict[str, tuple[Val, list[int]]] = {}

    def seen(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [seen(y) for y in x]
        if isinstance(x, (torch.SymInt, torch.SymFloat)):
            v, sizes, kind = c.symbolic(x.node.expr), [], None
        elif hasattr(x, "val"):
            v, sizes, kind = c.v(x), [_hint(d) for d in x.val.shape], _type_of(x.val)
            v = c.cast(v, dtype) if dtype is not None and v.dtype.is_floating_point else v
        else:
            return x
        used[v.name] = v, sizes
        return Value(v.name, kind)

    arguments = [seen(x) for x in given]
    nodes, tensors, told, hosts = (len(x) for x in (b.graph.node, b.graph.initializer, b.graph.value_info, c.host_ops))
    try:
        made = fn(Graph(c, n, arguments), *arguments)
        outs = [t for t in ([n.val] if isinstance(n.val, Tensor) else n.val) if isinstance(t, Tensor)]
        values = list(made) if isinstance(made, (list, tuple)) else [made]
        if len(values) != len(outs) or not all(isinstance(v, Value) for v in values):
            raise UnsupportedError(f"{len(values)} values for {len(outs)} results")
        found = [Val(v.name, t.dtype, shape_of(t)) for v, t in zip(values, outs, strict=True)]
        new = {x for node in b.graph.node[nodes:] for x in node.output}
        for v in {v.name: v for v in found if v.name in new}.values():
            b._info(b.graph.value_info.add(), v)
        c.adopt(b.graph.node[nodes:])
        _alone(b, nodes, tensors, used, [(v, [_hint(d) for d in t.shape]) for v, t in zip(found, outs, strict=True)])
    except Exception as e:
        del b.graph.node[nodes:], b.graph.initializer[tensors:], b.graph.value_info[told:], c.host_ops[hosts:]
        raise UnsupportedError(f"its symbolic: {e}") from e
    return found[0] if isinstance(n.val, Tensor) else found


def _hint(d: Any) -> int:
    return d if isinstance(d, int) else int(d.node.hint)


def _alone(b: Builder, nodes: int, tensors: int, used: dict[str, tuple[Val, list[int]]],
           found: Sequence[tuple[Val, list[int]]]) -> None:  # fmt: skip
    """Does the engine take the new nodes, and have they the types of the operator's results? As a graph of their own,
    with the sizes of this call."""
    own = Builder("symbolic")
    for v, sizes in used.values():
        own.input(v.name, v.dtype, tuple(sizes), "input")
    own.graph.node.extend(b.graph.node[nodes:])
    own.graph.initializer.extend(b.graph.initializer[tensors:])
    own.domains |= {node.domain for node in own.graph.node}
    made = {x for node in own.graph.node for x in node.output}
    for i, (v, sizes) in enumerate(found):
        known = Val(v.name, v.dtype, tuple(sizes))
        if v.name in made:
            own._info(own.graph.value_info.add(), known)
        own.output(f"output_{i}", known)
    _C.Model(own.finish(functions(own.graph)))
