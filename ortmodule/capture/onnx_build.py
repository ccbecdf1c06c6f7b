"""Builds one ONNX ModelProto: typed values, nodes, constants, sizes as expressions.

A Val is a name with element type and sizes; a size is an int or a sympy expression over the symbols of the export.
Expressions are written twice, as the contract of docs/ONNX.md asks: as text in every dim_param, and as
Shape/Gather/arithmetic nodes wherever ONNX needs a size as a tensor. Symbols are renamed s0, s1, ... in the order in
which the graph inputs show them; a symbol that no input shows alone is expressed by one that it shows in a product (2*s
-> t, s = t//2).

Invariants: values are defined once and have a value_info; equal small constants are one initialiser (parameters never
are: they are graph inputs); nodes carry the module, file and line that were current when they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import onnx  # imported when the first graph is built, as sympy is

OPSET, IR_VERSION = 23, 10
DOMAINS = {"": OPSET, "com.microsoft": 1, "org.pytorch.aten": 1, "ortmodule": 1}

ONNX_TYPE = {  # TensorProto.DataType
    torch.float32: 1,
    torch.float64: 11,
    torch.float16: 10,
    torch.bfloat16: 16,
    torch.int64: 7,
    torch.int32: 6,
    torch.int16: 5,
    torch.int8: 3,
    torch.uint8: 2,
    torch.bool: 9,
}


class UnsupportedError(Exception):
    """Something ONNX or the engine has no words for; the message is the reason."""


class Val:
    """A value of the graph: name, element type, sizes (int or sympy expression)."""

    __slots__ = ("name", "dtype", "shape")

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[Any, ...]) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape

    @property
    def rank(self) -> int:
        return len(self.shape)


def same_graph(a: bytes, b: bytes) -> bool:
    """Do they compute the same, wherever in the module that is written?"""
    import onnx

    graphs = [onnx.load_from_string(x).graph for x in (a, b)]
    for node in [n for g in graphs for n in g.node]:
        del node.metadata_props[:]
    return bool(graphs[0] == graphs[1])


def expr_of(d: Any) -> Any:
    """int or SymInt or sympy -> int when it is a known number, else sympy."""
    if isinstance(d, int):
        return d
    e = d.node.expr if isinstance(d, torch.SymInt) else d
    return int(e) if getattr(e, "is_Integer", False) else e


def _least(e: Any) -> float:
    """A number that is below a size, whatever the symbols are, which are sizes."""
    if isinstance(e, int) or e.is_Integer:
        return int(e)
    if e.is_Symbol:
        return 0
    kind = type(e).__name__
    if e.is_Add:
        return sum(map(_least, e.args))
    if e.is_Mul:
        factors = [_least(a) for a in e.args]
        whole = [a for a in e.args if not a.is_Integer]
        c = math.prod(int(a) for a in e.args if a.is_Integer)
        if min(factors) >= 0:
            return math.prod(factors)
        return c * _least(whole[0]) if c > 0 and len(whole) == 1 else -math.inf
    if kind in ("FloorDiv", "CleanDiv") and e.args[1].is_Integer and int(e.args[1]) > 0:
        return _least(e.args[0]) // int(e.args[1])
    if kind in ("PythonMod", "Mod") and e.args[1].is_Integer and int(e.args[1]) > 0:
        return 0
    if kind in ("Max", "Min"):
        return (max if kind == "Max" else min)(map(_least, e.args))
    return -math.inf


def shape_of(t: Tensor) -> tuple[Any, ...]:
    return tuple([d if type(d) is int else expr_of(d) for d in t.shape])


class Sizes:
    """The symbols: their names and where each is read from."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        # symbol name -> (graph input, axis); axis -1: the value of that 0-d input
        self.at: dict[str, tuple[str, int]] = {}
        self.replaced: dict[Any, Any] = {}

    def bind(self, inputs: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """Names every symbol that a size of an input, or a 0-d integer input (given as a size list [-1, symbol]),
        tells."""
        rest: list[tuple[str, int, Any]] = []
        for name, dims in inputs:
            for axis, d in enumerate(dims):
                if isinstance(d, int):
                    continue
                if d.is_Symbol:
                    if d not in self.names:
                        self.add(d, name, axis)
                else:
                    rest.append((name, axis, d))
        if rest:
            from sympy import Symbol
        for name, axis, d in rest:
            unknown = [s for s in d.free_symbols if s not in self.names and s not in self.replaced]
            if len(unknown) == 1:
                c, s = d.as_coeff_Mul()
                if s == unknown[0] and c.is_Integer and c > 0:
                    new = Symbol(f"dim_{name}_{axis}", integer=True, nonnegative=True)
                    self.add(new, name, axis)
                    self.replaced[s] = (new, int(c))

    def add(self, symbol: Any, name: str, axis: int) -> None:
        text = f"s{len(self.names)}"
        self.names[symbol] = text
        self.at[text] = (name, axis)

    def text(self, e: Any) -> str:
        """The dim_param of a size."""
        return str(e) if isinstance(e, int) else self._text(e, 0)

    def _text(self, e: Any, level: int) -> str:  # level 0 sum, 1 product, 2 atom
        if e.is_Symbol:
            if e in self.replaced:
                new, c = self.replaced[e]
                return self._paren(f"{self.names[new]}//{c}", level > 0)
            if e not in self.names:
                raise UnsupportedError(f"a size that depends on data ({e})")
            return self.names[e]
        if e.is_Integer:
            return str(int(e)) if int(e) >= 0 or level == 0 else f"({int(e)})"
        kind = type(e).__name__
        if e.is_Add:
            terms = sorted(e.args, key=lambda a: (a.is_Integer, str(a)))
            text = self._text(terms[0], 1)
            for t in terms[1:]:
                c, rest = t.as_coeff_Mul()
                if c.is_negative:
                    text += " - " + self._text(-t, 1)
                else:
                    text += " + " + self._text(t, 1)
            return self._paren(text, level > 0)
        if e.is_Mul:
            return self._paren(
                "*".join(self._text(a, 2) for a in sorted(e.args, key=lambda a: (a.is_Integer, str(a)))), level > 1
            )
        if e.is_Pow and e.exp.is_Integer and int(e.exp) > 0:
            return self._paren("*".join([self._text(e.base, 2)] * int(e.exp)), level > 1)
        if kind in ("FloorDiv", "CleanDiv"):
            return self._paren(f"{self._text(e.args[0], 2)}//{self._text(e.args[1], 2)}", level > 0)
        if kind in ("PythonMod", "Mod"):
            return f"Mod({self._text(e.args[0], 0)}, {self._text(e.args[1], 0)})"
        if kind in ("Max", "Min"):
            text = self._text(e.args[0], 0)
            for a in e.args[1:]:
                text = f"{kind}({text}, {self._text(a, 0)})"
            return text
        raise UnsupportedError(f"a size computed as {e} (only + - * // % min max)")

    @staticmethod
    def _paren(text: str, need: bool) -> str:
        return f"({text})" if need else text


class Builder:
    """The graph being made. `source` is stamped on every node."""

    def __init__(self, name: str) -> None:
        import onnx

        self.model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="ortmodule")
        self.graph = self.model.graph
        self.graph.name = name
        self.sizes = Sizes()
        self.source: tuple[str, str, int] = ("", "", 0)
        self.within = ""  # checkpoints that the node lies in
        self.count = 0
        self.constants: dict[Any, Val] = {}
        self.flat: set[str] = set()  # values that have no gradient: constants, and what stop_gradient gives
        self.size_nodes: dict[Any, Val] = {}
        self.domains: set[str] = {""}
        self.inputs: dict[str, Val] = {}

    # --- values

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}_{self.count}"

    def _info(self, info: Any, v: Val) -> None:
        info.name = v.name
        t = info.type.tensor_type
        try:
            t.elem_type = ONNX_TYPE[v.dtype]
        except KeyError:
            raise UnsupportedError(f"tensors of type {v.dtype}") from None
        t.shape.SetInParent()
        for d in v.shape:
            if isinstance(d, int):
                t.shape.dim.add().dim_value = d
            else:
                t.shape.dim.add().dim_param = self.sizes.text(d)

    def input(self, name: str, dtype: torch.dtype, shape: tuple[Any, ...], role: str) -> Val:
        v = Val(name, dtype, shape)
        self._info(self.graph.input.add(), v)
        self.graph_note(f"role:{name}", role)
        self.inputs[name] = v
        return v

    def output(self, name: str, v: Val) -> None:
        """Makes `v` a graph output under a name of its own."""
        out = Val(name, v.dtype, v.shape)
        self._node("Identity", [v], [out], {}, "")
        self._info(self.graph.output.add(), out)

    def graph_note(self, key: str, value: str) -> None:
        e = self.graph.metadata_props.add()
        e.key, e.value = key, value

    def constant(self, data: Any, dtype: torch.dtype) -> Val:
        """An initialiser from Python numbers; equal ones are shared."""
        key = (str(data), type(data), dtype)
        v = self.constants.get(key)
        if v is None:
            v = self.constants[key] = self.tensor(torch.tensor(data, dtype=dtype, device="cpu"), "c")
        return v

    def tensor(self, t: Tensor, hint: str) -> Val:
        """An initialiser from a tensor, never shared."""
        t = t.detach().cpu().contiguous()
        v = Val(self.fresh(hint), t.dtype, tuple(t.shape))
        init = self.graph.initializer.add()
        init.name, init.data_type = v.name, ONNX_TYPE[t.dtype]
        init.dims.extend(t.shape)
        init.raw_data = t.view(torch.uint8).numpy().tobytes() if t.numel() and t.dim() else _bytes(t)
        self.flat.add(v.name)
        return v

    # --- nodes

    def _node(
        self, op: str, ins: Sequence[Val | None], outs: Sequence[Val], attrs: dict[str, Any], domain: str
    ) -> None:
        n = self.graph.node.add()
        n.op_type = op
        n.domain = domain
        self.domains.add(domain)
        names = ["" if v is None else v.name for v in ins]
        while names and not names[-1]:
            names.pop()
        n.input.extend(names)
        n.output.extend([v.name for v in outs])
        n.name = f"{op}_{len(self.graph.node)}"
        for key, x in attrs.items():
            if x is not None:
                _attribute(n.attribute.add(), key, x)
                # attributes are float32; the full double stands beside
                if type(x) is float and float(np.float32(x)) != x:
                    e = n.metadata_props.add()
                    e.key, e.value = f"f64:{key}", repr(x)
        module, file, line = self.source
        for key, text in (("module", module), ("file", file), ("line", str(line) if line else ""),
                          ("checkpoint", self.within)):  # fmt: skip
            if text:
                e = n.metadata_props.add()
                e.key, e.value = key, text

    def op(
        self,
        op: str,
        ins: Sequence[Val | None],
        dtype: torch.dtype,
        shape: tuple[Any, ...],
        domain: str = "",
        **attrs: Any,
    ) -> Val:
        """A node with one output."""
        v = Val(self.fresh(op.lower()), dtype, shape)
        self._node(op, ins, [v], attrs, domain)
        self._info(self.graph.value_info.add(), v)
        return v

    def ops(
        self,
        op: str,
        ins: Sequence[Val | None],
        types: Sequence[tuple[torch.dtype, tuple[Any, ...]]],
        domain: str = "",
        **attrs: Any,
    ) -> list[Val]:
        """A node with several outputs."""
        outs = [Val(self.fresh(op.lower()), d, s) for d, s in types]
        self._node(op, ins, outs, attrs, domain)
        for v in outs:
            self._info(self.graph.value_info.add(), v)
        return outs

    # --- sizes as tensors

    def dims(self, shape: Sequence[Any]) -> Val:
        """A 1-d int64 tensor of sizes."""
        if all(isinstance(d, int) for d in shape):
            return self.constant(list(shape), torch.int64)
        key = ("dims", tuple(shape))
        v = self.size_nodes.get(key)
        if v is None:
            parts = [self.size(d) for d in shape]
            v = parts[0] if len(parts) == 1 else self.op("Concat", parts, torch.int64, (len(parts),), axis=0)
            self.size_nodes[key] = v
        return v

    def size(self, e: Any) -> Val:
        """One size as an int64 tensor of one element."""
        if isinstance(e, int):
            return self.constant([e], torch.int64)
        v = self.size_nodes.get(e)
        if v is None:
            v = self.size_nodes[e] = self._size(e)
        return v

    def _binary(self, op: str, a: Val, b: Val) -> Val:
        return self.op(op, [a, b], torch.int64, (1,))

    def _size(self, e: Any) -> Val:
        i64 = torch.int64
        if e.is_Symbol:
            if e in self.sizes.replaced:
                new, c = self.sizes.replaced[e]
                return self._binary("Div", self.size(new), self.size(c))
            name, axis = self.sizes.at[self.sizes.text(e)]
            if axis < 0:
                return self.op("Reshape", [self.inputs[name], self.constant([1], i64)], i64, (1,))
            key = ("shape", name)
            shape = self.size_nodes.get(key)
            if shape is None:
                shape = self.size_nodes[key] = self.op("Shape", [self.inputs[name]], i64, (self.inputs[name].rank,))
            return self.op("Gather", [shape, self.constant([axis], i64)], i64, (1,), axis=0)
        if e.is_Integer:
            return self.constant([int(e)], i64)
        kind = type(e).__name__
        if e.is_Add or e.is_Mul:
            args = sorted(e.args, key=lambda a: (a.is_Integer, str(a)))
            v = self.size(expr_of(args[0]))
            for a in args[1:]:
                v = self._binary("Add" if e.is_Add else "Mul", v, self.size(expr_of(a)))
            return v
        if e.is_Pow and e.exp.is_Integer and int(e.exp) > 0:
            base = v = self.size(expr_of(e.base))
            for _ in range(int(e.exp) - 1):
                v = self._binary("Mul", v, base)
            return v
        if kind in ("FloorDiv", "CleanDiv", "PythonMod", "Mod"):
            a, b = (expr_of(x) for x in e.args)
            if kind in ("FloorDiv", "CleanDiv"):
                return self._floor(a, b)
            return self._binary("Mod", self.size(a), self.size(b))
        if kind in ("Max", "Min"):
            v = self.size(expr_of(e.args[0]))
            for a in e.args[1:]:
                v = self._binary(kind, v, self.size(expr_of(a)))
            return v
        raise UnsupportedError(f"a size computed as {e} (only + - * // % min max)")

    def _floor(self, a: Any, b: Any) -> Val:
        """ONNX truncates, so what is divided is made positive for all sizes: (s - 10) // 5 is (s + 0) // 5 - 2. Where
        no number is below it for all of them (-s // 2), what the division leaves over, of the divisor's sign, is taken
        away first."""
        if isinstance(b, int) and b < 0:
            a, b = expr_of(-a), -b
        least = _least(a)
        if _least(b) < 0 or least < -(2**31):
            whole = self._binary("Sub", self.size(a), self._binary("Mod", self.size(a), self.size(b)))
            return self._binary("Div", whole, self.size(b))
        more = -(least // b) if isinstance(b, int) and b > 0 and -(2**31) < least < 0 else 0
        v = self._binary("Div", self.size(expr_of(a + more * b)), self.size(b))
        return self._binary("Add", v, self.size(-more)) if more else v

    def prune(self) -> None:
        """Drops nodes and initialisers that nothing uses; rows leave some behind (an empty part of a concatenation,
        say)."""
        used = {o.name for o in self.graph.output}
        dead: list[int] = []
        for i in range(len(self.graph.node) - 1, -1, -1):
            node = self.graph.node[i]
            runs = node.op_type in ("PyModule", "PythonOp") or any(a.name == "effect" for a in node.attribute)
            if used.isdisjoint(node.output) and not runs:
                dead.append(i)
            else:
                used.update(node.input)
        gone: set[str] = set()
        for i in dead:
            gone.update(self.graph.node[i].output)
            del self.graph.node[i]
        if gone:
            for i in range(len(self.graph.value_info) - 1, -1, -1):
                if self.graph.value_info[i].name in gone:
                    del self.graph.value_info[i]
        for i in range(len(self.graph.initializer) - 1, -1, -1):
            if self.graph.initializer[i].name not in used:
                del self.graph.initializer[i]

    def finish(self, functions: Iterable[onnx.FunctionProto]) -> bytes:
        for domain in sorted(self.domains | {f.domain for f in functions}):
            self.model.opset_import.add(domain=domain, version=DOMAINS[domain])
        self.model.functions.extend(functions)
        return bytes(self.model.SerializeToString())


def _bytes(t: Tensor) -> bytes:
    return t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def _attribute(a: Any, key: str, x: Any) -> None:
    a.name = key
    if isinstance(x, (bool, int, np.integer)):
        a.type, a.i = a.INT, int(x)
    elif isinstance(x, float):
        a.type, a.f = a.FLOAT, x
    elif isinstance(x, str):
        a.type, a.s = a.STRING, x.encode()
    elif isinstance(x, type(a.t)):
        a.type = a.TENSOR
        a.t.CopyFrom(x)
    elif isinstance(x, (list, tuple)) and all(isinstance(i, int) for i in x):
        a.type = a.INTS
        a.ints.extend(x)
    else:
        from onnx import helper

        a.CopyFrom(helper.make_attribute(key, x))
