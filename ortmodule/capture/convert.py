"""Pure nodes -> ONNX: one table, a row per ATen operator, written so that the meaning for training is equal.

A row is a function (c, n, *arguments in the order of the ATen schema, defaults filled in) that emits nodes and returns
the result. What PyTorch does silently is written out: type promotion and autocast become Cast nodes (the recorded type
of a result is the rule), floor division, gradients at kinks (Where instead of Clip), negative indices. What has no row
stays one node, org.pytorch.aten::ATen, with a row in the table of host calls, so no operator is missing.

Floats. ONNX attributes are float32. Where a double does not fit, the node's metadata holds it in full:
`f64:<attribute>`. Low precision. x * 0.044715 in bf16 is computed by torch in float32 and rounded once; a factor that
bf16 cannot hold is therefore applied in float32 between two Casts.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .. import autocast
from .. import torch_private as private
from ..errors import CaptureError
from . import layouts, opaque, symbolic
from .composites import apart
from .export import Exported
from .onnx_build import DOMAINS, ONNX_TYPE, Builder, UnsupportedError, Val, _attribute, expr_of, shape_of
from .onnx_functions import functions
from .operands import bound, eager_refuses, named
from .program import INPUT, Node, Program, draws, name_of
from .refused import talks
from .registered import ATEN, GRADIENTS, STOPPED, Key, NotServed, called, key_of, optimized, registered_call

INT_MAX = 2**63 - 1
CONCAT_MAX = 256  # operands of one concat in the engine
F32, F64, I64, BOOL = torch.float32, torch.float64, torch.int64, torch.bool
_LOW = (torch.bfloat16, torch.float16)

# gradients may be asked to be sparse
_RELATIONS = {"StrictGreaterThan": "Greater", "GreaterThan": "GreaterOrEqual", "StrictLessThan": "Less",
              "LessThan": "LessOrEqual", "Equality": "Equal", "Unequality": "NotEqual"}  # fmt: skip
_SPARSE = {"aten::embedding", "aten::embedding_bag", "aten::_embedding_bag", "aten::gather"}


@dataclass
class HostOp:
    """A node that PyTorch runs. call: takes the node's tensor inputs in order, is differentiable. reason: why it is not
    in the engine. gradient: the one that somebody has registered for it. draws: from torch's generator."""

    kind: Literal["aten", "python_op", "module"]
    call: Callable[[list[Tensor]], Tensor | tuple[Tensor, ...]]
    name: str
    module: str
    file: str
    line: int
    reason: str
    gradient: str = ""
    draws: bool = False

    @property
    def of_torch(self) -> bool:
        """Does it run PyTorch's own code alone, which keeps nothing that it is given?"""
        return self.kind == "aten" and self.name.startswith("aten::")


Row = TypeVar("Row", bound=Callable[..., Any])
TABLE: dict[str, Callable[..., Any]] = {}


def row(*names: str) -> Callable[[Row], Row]:
    def put(f: Row) -> Row:
        for name in names:
            assert name not in TABLE, name
            TABLE[name] = f
        return f

    return put


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch computes what it rounds to this one."""
    return F32 if dtype in _LOW else dtype


class NotHere(Exception):
    """Raised by a row for a case it does not cover: the node goes to PyTorch. The message is the reason."""


class Converter:
    def __init__(self, program: Program, exported: Exported, name: str, training: bool = False) -> None:
        self.training = training  # graph optimizers are asked
        self.program = program
        self.exported = exported
        self.b = Builder(name)
        self.values: dict[Node, Any] = {}
        self.host_ops: list[HostOp] = []

    # --- operands

    def v(self, x: Any) -> Val:
        """The value of a node argument."""
        return self.values[x]  # type: ignore[no-any-return]

    def opt(self, x: Any) -> Val | None:
        return None if x is None else self.v(x)

    def scalar(self, x: Any, dtype: torch.dtype) -> Val:
        """A Python number, or a symbolic one, as a 0-d value."""
        if isinstance(x, (torch.SymInt, torch.SymFloat)):
            return self.cast(self.symbolic(x.node.expr), dtype)
        return self.b.constant(x, dtype)

    def num(self, x: Any, dtype: torch.dtype) -> Val:
        """A tensor or number argument, cast."""
        return self.cast(self.v(x), dtype) if isinstance(x, Node) else self.scalar(x, dtype)

    def symbolic(self, e: Any) -> Val:
        """A symbolic number as a 0-d value: int64 for sizes, float64 for what was computed from them or read from a
        float argument."""
        e = expr_of(e)
        item = self.program.item_of.get(e)
        if item is not None:
            return self.reshape(self.v(item), ())
        if isinstance(e, int):
            return self.b.constant(e, I64)
        if getattr(e, "is_Float", False):
            return self.b.constant(float(e), F64)
        kind = type(e).__name__
        if kind == "Piecewise" and len(e.args) == 2:  # a comparison that forward branches on
            (one, cond), (other, _) = e.args
            return self.where(self.relation(cond), self.symbolic(one), self.symbolic(other))
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            return self.op2("Div", self.double(e.args[0]), self.double(e.args[1]))
        if kind == "ToFloat":
            return self.double(e.args[0])
        if kind in ("OpaqueUnaryFn_sqrt", "sqrt"):
            return self.un("Sqrt", self.double(e.args[0]))
        if kind in ("FloatPow", "PowByNatural") or kind == "Pow" and not e.is_integer:
            return self.op2("Pow", self.double(e.args[0]), self.double(e.args[1]))
        if kind in ("Add", "Mul") and not e.is_integer:
            v = self.double(e.args[0])
            for a in e.args[1:]:
                v = self.op2(kind, v, self.double(a))
            return v
        return self.b.op("Squeeze", [self.b.size(e), self.b.constant([0], I64)], I64, ())

    def relation(self, e: Any) -> Val:
        op = _RELATIONS.get(type(e).__name__)
        if op is None:
            raise UnsupportedError(f"the condition {e} on numbers read from tensors")
        x, y = (self.symbolic(a) for a in e.args)
        if x.dtype != y.dtype:
            x, y = self.cast(x, F64), self.cast(y, F64)
        if op == "NotEqual":
            return self.b.op("Not", [self.compare("Equal", x, y)], BOOL, ())
        return self.compare(op, x, y)

    def double(self, e: Any) -> Val:
        return self.cast(self.symbolic(e), F64)

    # --- nodes

    def cast(self, v: Val, dtype: torch.dtype) -> Val:
        if v.dtype == dtype:
            return v
        if dtype not in ONNX_TYPE:
            raise UnsupportedError(f"tensors of type {dtype}")
        return self.b.op("Cast", [v], dtype, v.shape, to=ONNX_TYPE[dtype])

    def un(self, op: str, v: Val, **attrs: Any) -> Val:
        return self.b.op(op, [v], v.dtype, v.shape, **attrs)

    def op2(self, op: str, x: Val, y: Val, dtype: torch.dtype | None = None) -> Val:
        return self.b.op(op, [x, y], dtype or x.dtype, broadcast(x.shape, y.shape))

    def compare(self, op: str, x: Val, y: Val) -> Val:
        return self.op2(op, x, y, BOOL)

    def where(self, cond: Val, x: Val, y: Val) -> Val:
        return self.b.op("Where", [cond, x, y], x.dtype, broadcast(cond.shape, broadcast(x.shape, y.shape)))

    def neg(self, v: Val) -> Val:
        return self.un("Neg", v)

    def stop(self, v: Val) -> Val:
        if not v.dtype.is_floating_point:
            return v
        v = self.b.op("StopGradient", [v], v.dtype, v.shape, "ortmodule")
        self.b.flat.add(v.name)
        return v

    def zero(self, v: Val, *xs: Val) -> Val:
        """v, of whose gradient the xs get zeros, not None: operators that a gradient enters and does not leave."""
        for x in xs:
            if v.dtype.is_floating_point and x.dtype.is_floating_point and x.name not in self.b.flat:
                v = self.b.op("ZeroGradient", [v, x], v.dtype, v.shape, "ortmodule")
        return v

    def reshape(self, v: Val, shape: tuple[Any, ...]) -> Val:
        if v.shape == shape:
            return v
        if not shape and all(d == 1 for d in v.shape):
            return self.b.op("Squeeze", [v, self.axes(range(v.rank))], v.dtype, ())
        return self.b.op("Reshape", [v, self.b.dims(shape)], v.dtype, shape, allowzero=1 if 0 in shape else None)

    def axes(self, axes: Any) -> Val:
        return self.b.constant([int(a) for a in axes], I64)

    def unsqueeze(self, v: Val, axes: Sequence[int]) -> Val:
        """axes: positions in the result, ascending."""
        if not axes:
            return v
        shape = list(v.shape)
        for a in axes:
            shape.insert(a, 1)
        return self.b.op("Unsqueeze", [v, self.axes(axes)], v.dtype, tuple(shape))

    def squeeze(self, v: Val, axes: Sequence[int]) -> Val:
        if not axes:
            return v
        return self.b.op(
            "Squeeze", [v, self.axes(axes)], v.dtype, tuple(d for i, d in enumerate(v.shape) if i not in axes)
        )

    def transpose(self, v: Val, perm: Sequence[int]) -> Val:
        if list(perm) == list(range(v.rank)):
            return v
        return self.b.op("Transpose", [v], v.dtype, tuple(v.shape[p] for p in perm), perm=list(perm))

    def swap(self, v: Val, a: int, b: int) -> Val:
        perm = list(range(v.rank))
        perm[a], perm[b] = perm[b], perm[a]
        return self.transpose(v, perm)

    def expand(self, v: Val, shape: tuple[Any, ...]) -> Val:
        if v.shape == shape:
            return v
        return self.b.op("Expand", [v, self.b.dims(shape)], v.dtype, shape)

    def reduce(self, op: str, v: Val, axes: Sequence[int] | None, keep: bool) -> Val:
        """axes None: all."""
        axes = list(range(v.rank)) if axes is None else sorted(a % max(v.rank, 1) for a in axes)
        if v.rank == 0:
            same = op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
            return v if same else self.b.op(op, [v], v.dtype, (), keepdims=0)
        shape = tuple(1 if i in axes else d for i, d in enumerate(v.shape) if keep or i not in axes)
        return self.b.op(op, [v, self.axes(axes)], v.dtype, shape, keepdims=int(keep))

    def slice(self, v: Val, axis: int, start: Any, end: Any, step: int, size: Any) -> Val:
        """start, end: int or size expression, already as ONNX understands them; size: of the result."""
        shape = (*v.shape[:axis], size, *v.shape[axis + 1 :])
        if start == 0 and step == 1 and v.shape[axis] == size:
            return v
        return self.b.op(
            "Slice", [v, self.b.dims([start]), self.b.dims([end]), self.axes([axis]), self.axes([step])], v.dtype, shape
        )

    def concat(self, parts: Sequence[Val], axis: int) -> Val:
        while len(parts) > 1:
            if len(parts) <= CONCAT_MAX:
                return self._concat(parts, axis)
            parts = [self.concat(parts[i : i + CONCAT_MAX], axis) for i in range(0, len(parts), CONCAT_MAX)]
        return parts[0]

    def _concat(self, parts: Sequence[Val], axis: int) -> Val:
        total: Any = 0
        for p in parts:
            total = total + p.shape[axis]
        first = parts[0]
        return self.b.op(
            "Concat", parts, first.dtype, (*first.shape[:axis], expr_of(total), *first.shape[axis + 1 :]), axis=axis
        )

    def no_negative(self, v: Val) -> Val:
        """The node just made takes its indices as they are: one below 0 is an error, where ONNX counts it from the
        end."""
        note = self.b.graph.node[-1].metadata_props.add()
        note.key, note.value = "index_nonneg", "1"
        return v

    def matmul(self, a: Val, b: Val) -> Val:
        """Ranks >= 2."""
        if not a.dtype.is_floating_point:
            raise NotHere("a product of matrices of whole numbers")
        return self.b.op("MatMul", [a, b], a.dtype, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))

    def fill(self, x: Any, dtype: torch.dtype, shape: tuple[Any, ...]) -> Val:
        """A tensor full of a number, symbolic number or 0-d value."""
        if isinstance(x, (Node, torch.SymInt, torch.SymFloat)):
            return self.expand(self.num(x, dtype), shape)
        if not shape:
            return self.b.constant(x, dtype)
        raw = torch.tensor([x], dtype=dtype, device="cpu").view(torch.uint8).numpy().tobytes()
        import onnx

        value = onnx.TensorProto(data_type=ONNX_TYPE[dtype], dims=[1], raw_data=raw)
        return self.b.op("ConstantOfShape", [self.b.dims(shape)], dtype, shape, value=value)

    def range(self, n: Any, dtype: torch.dtype = I64) -> Val:
        """0, 1, ..., n - 1."""
        end = self.b.constant(n, I64) if isinstance(n, int) else self.symbolic(n)
        return self.cast(self.b.op("Range", [self.b.constant(0, I64), end, self.b.constant(1, I64)], I64, (n,)), dtype)

    def reads(self, n: Node, item: int) -> bool:
        """Whether that result of a node is used."""
        return any(m.target is operator.getitem and m.args[0] is n and m.args[1] == item for m in self.program.nodes)

    # --- the walk

    def go(self) -> bytes:
        """Emits the whole graph; the order of its inputs is the order of program.inputs, sorted by role."""
        p = self.program
        order = {"user": 0, "param": 1, "buffer": 2, "const_attr": 2, "constant": 3}
        p.inputs.sort(key=lambda s: (order[s[0].kind], s[0].leaf))
        taken: dict[str, int] = {}
        sized: list[tuple[str, Sequence[Any]]] = []
        named: list[tuple[str, Any, Node]] = []
        for source, node in p.inputs:
            if source.kind == "constant":
                continue
            name = f"input_{source.leaf}" if source.kind == "user" else source.target
            taken[name] = taken.get(name, 0) + 1
            named.append((name if taken[name] == 1 else f"{name}_{taken[name]}", source, node))
        scalars: list[tuple[str, Any]] = []
        for name, _source, node in named:
            if isinstance(node.val, Tensor):
                sized.append((name, shape_of(node.val)))
            else:
                scalars.append((name, node.val.node.expr))
        self.b.sizes.bind(sized)
        for name, e in scalars:
            if e not in self.b.sizes.names and not isinstance(expr_of(e), int):
                self.b.sizes.add(e, name, -1)
                self.b.graph_note(f"symbol:{name}", self.b.sizes.names[e])
        role = {"user": "input", "param": "param", "buffer": "buffer", "const_attr": "buffer"}
        for name, source, node in named:
            if isinstance(node.val, Tensor):
                self.values[node] = self.b.input(name, node.val.dtype, shape_of(node.val), role[source.kind])
            else:
                self.values[node] = self.b.input(name, I64, (), "input")
        for source, node in p.inputs:
            if source.kind == "constant":
                assert source.tensor is not None
                self.values[node] = self.b.tensor(source.tensor, "lifted")
        for node in p.nodes:
            self.b.source, self.b.within = node.src, node.within
            before = len(self.host_ops)
            try:
                self.emit(node)
            except UnsupportedError as e:
                raise CaptureError(f"{node.target}: {e}", *node.src) from e
            if node.within:
                self.exported.table.checkpoints.kept += len(self.host_ops) - before
        self.b.source, self.b.within = ("", "", 0), ""
        for i, out in enumerate(p.outputs):
            self.b.output(f"output_{i}", self.v(out) if isinstance(out, Node) else self.symbolic(out.node.expr))
        for i, (target, new) in enumerate(p.writes):
            self.b.output(f"write_{i}", self.cast(self.v(new), target.val.dtype))
            self.b.graph_note(f"write:write_{i}", self.v(target).name)
        self.b.prune()
        if self.training:
            self.optimize()
        return self.b.finish(functions(self.b.graph))

    def optimize(self) -> None:
        """What graph optimizers make of it."""
        graph = self.b.graph
        device = next((n.val.device.type for _, n in self.program.inputs if isinstance(n.val, Tensor)), "cpu")
        try:
            names = optimized(graph, graph.name, "rocm" if device == "cuda" and torch.version.hip else device)
        except ValueError as e:
            raise UnsupportedError(str(e)) from e
        if not names:
            return
        what = ", ".join(names)
        try:
            self.adopt(graph.node)
        except (UnsupportedError, NotServed) as e:
            raise UnsupportedError(f"the graph optimizer {what}: {e}") from e
        rows = [x.i for n in graph.node for x in n.attribute if x.name == "host_index"]
        if len(set(rows)) != len(rows) or not set(rows) <= set(range(len(self.host_ops))):
            raise UnsupportedError(f"the graph optimizer {what} has copied a node with a host_index")
        self.b.domains |= {n.domain for n in graph.node}
        if strange := self.b.domains - set(DOMAINS):
            raise UnsupportedError(f"the graph optimizer {what} has put in nodes of the domain {min(strange)!r}, which "
                                   f"the engine lacks; an operator of torch.library is {ATEN}::ATen with its name")

    def emit(self, n: Node) -> None:
        target = n.target
        if target is operator.getitem:
            self.values[n] = self.values[n.args[0]][n.args[1]]
            return
        if target is opaque.HOST:
            self.opaque(n)
            return
        if not isinstance(target, str):
            refused = eager_refuses(n)
            if refused is not None:
                raise UnsupportedError(refused)
            if (talk := talks(target)) is not None:
                raise CaptureError(str(talk), "", *n.src[1:])
        if not isinstance(target, str) and target._schema.name in _SPARSE and self.exported.grad_mode:
            given = named(n)
            if given.get("sparse") or given.get("sparse_grad"):
                raise CaptureError(
                    f"{target._schema.name}: its gradient is sparse, which only PyTorch's autograd can hand to the "
                    "parameter",
                    "",
                    *n.src[1:],
                )
        f = TABLE.get(target if isinstance(target, str) else _key(target))
        reason = "no row in the operator table"
        if not isinstance(target, str):
            if private.has_onnx_symbolic(target._schema.name):
                space, name = target._schema.name.split("::")
                reason += (f"; its symbolic of torch.onnx is for files: register_symbolic({name!r}, {space!r})(fn) of "
                           "ortmodule.capture.symbolic gives it to the engine")
            key = key_of(target._schema.name, target._overloadname)
            if (fn := symbolic.find(key)) is not None:
                try:
                    self.values[n] = symbolic.emit(self, n, fn, bound(n), self.lowered(n))
                except UnsupportedError as e:
                    self.aten(n, str(e))
                return
            if key in GRADIENTS or key in STOPPED:
                self.aten(n, "a gradient is registered for it")
                return
        if f is not None:
            try:
                out = f(self, n, *bound(n))
            except NotHere as e:
                reason = str(e)
            else:
                pairs = zip(out, n.val, strict=False) if isinstance(out, (list, tuple)) else ((out, n.val),)
                wrong = next((f"{v.dtype}{v.shape} for {t.dtype}{t.shape}" for v, t in pairs
                              if v is not None and (v.dtype != t.dtype or len(v.shape) != t.dim())), None)  # fmt: skip
                if wrong is None:
                    self.values[n] = out
                    return
                reason = f"its row in the operator table gives {wrong}"
        if isinstance(target, str):
            raise UnsupportedError(reason)
        wide = self.widened(n)
        if wide is not None:
            self.emit(wide)
            self.values[n] = self.values[wide]
            return
        parts = apart(n, lambda op: (op if isinstance(op, str) else _key(op)) in TABLE) if f is None else None
        if parts is not None:
            for node in parts[0]:
                self.emit(node)
            self.values[n] = self.v(parts[1])
            return
        self.aten(n, reason)

    # --- nodes that PyTorch runs

    def opaque(self, n: Node) -> None:
        xs, index = n.args
        r = self.exported.table.rows[index]
        ins = [self.v(x) for x in xs]
        types = [(t.dtype, shape_of(t)) for t in n.val]
        module, file, line = n.src
        host, orders = len(self.host_ops), [_order_of(x) for x in xs]

        def call(ts: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
            return r.call([_lying(t, order) for t, order in zip(ts, orders, strict=True)])

        self.host_ops.append(HostOp(r.kind, call, r.name, r.module or module, file, line, r.reason))
        if r.kind == "module":
            self.values[n] = self.b.ops("PyModule", ins, types, "ortmodule", module=r.name, host_index=host)
        else:
            self.values[n] = self.b.ops("PythonOp", ins, types, "com.microsoft", name=r.name, host_index=host)

    def aten(self, n: Node, reason: str) -> None:
        """One torch operator as it is. Sizes among its arguments that the input tensors do not show travel as extra
        inputs."""
        ins: list[Val] = []
        vals = bound(n)
        dtype = self.lowered(n)
        lie: dict[int, list[int]] = {}  # how memory holds the operands

        def tensor(x: Node) -> int:
            v = self.v(x)
            if dtype is not None and v.dtype.is_floating_point:
                v = self.cast(v, dtype)
            ins.append(v)
            if order := _order_of_draw(n, x) if draws(n) else _order_of(x):
                lie[len(ins) - 1] = order
            return len(ins) - 1

        def walk(x: Any) -> tuple[Any, Callable[[list[Tensor]], Any]]:
            if isinstance(x, Node):
                i = tensor(x)
                return {"input": i}, lambda ts: ts[i]
            if isinstance(x, (torch.SymInt, torch.SymFloat)):
                ins.append(self.symbolic(x.node.expr))
                j, text = len(ins) - 1, self.b.sizes.text(expr_of(x)) if isinstance(x, torch.SymInt) else ""
                return {"sym": text, "input": j}, lambda ts: ts[j].item()
            if isinstance(x, (list, tuple)):
                parts = [walk(y) for y in x]
                if parts and all(isinstance(y, Node) for y in x):
                    return {"inputs": [p[0]["input"] for p in parts]}, lambda ts: [p[1](ts) for p in parts]
                return [p[0] for p in parts], lambda ts: [p[1](ts) for p in parts]
            return _json(x), lambda ts: x

        parts = [walk(x) for x in vals]
        arguments = n.target._schema.arguments
        split = next((i for i, a in enumerate(arguments) if a.kwarg_only), len(arguments))
        args = [p[1] for p in parts[:split]]
        kwargs = [(a.name, p[1]) for a, p in zip(arguments[split:], parts[split:], strict=True)]
        target = n.target
        if target is torch.ops.aten.bernoulli.p and not layouts.follows(n.val):  # an edit, whose operand lies so
            target = _bernoulli

        def call(ts: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
            ts = [_lying(t, lie.get(i)) for i, t in enumerate(ts)]
            with autocast.off():
                out = target(*[f(ts) for f in args], **{k: f(ts) for k, f in kwargs})
            return out if isinstance(out, Tensor) else tuple(x for x in out if isinstance(x, Tensor))

        key = key_of(n.target._schema.name, n.target._overloadname)
        places = [p[0]["input"] if isinstance(x, Node) else None for p, x in zip(parts, vals, strict=True)]
        self.host(registered_call(key, call, [p[1] for p in parts], places),
                  str(n.target).replace("aten.", "aten::"), n.src, reason, key, draws(n))  # fmt: skip
        outs = [n.val] if isinstance(n.val, Tensor) else [t for t in n.val if isinstance(t, Tensor)]
        values = self.b.ops(
            "ATen",
            ins,
            [(t.dtype, shape_of(t)) for t in outs],
            "org.pytorch.aten",
            operator=n.target._schema.name,
            overload_name="" if n.target._overloadname == "default" else n.target._overloadname,
            arguments=json.dumps([p[0] for p in parts]),
            host_index=len(self.host_ops) - 1,
            **{"effect": 1} if self.host_ops[-1].draws else {},
        )
        for i, dead in enumerate(self.passive(n) if any(t.is_floating_point() for t in outs) else ()):
            values[i] = self.stop(values[i]) if dead else values[i]
        self.values[n] = values[0] if isinstance(n.val, Tensor) else values

    def host(self, call: Callable[[list[Tensor]], Any], name: str, src: tuple[str, str, int], reason: str, key: Key,
             draws: bool = False) -> None:  # fmt: skip
        gradient = GRADIENTS[key].name if key in GRADIENTS else ""
        self.host_ops.append(HostOp("aten", call, name, *src, reason, gradient, draws))

    def adopt(self, nodes: Iterable[Any]) -> None:
        """Calls for nodes of ATen that are not the converter's."""
        told = {v.name for v in self.b.graph.value_info}
        for node in nodes:
            a = {x.name: x for x in node.attribute}
            if node.domain != ATEN or "host_index" in a:
                continue
            if node.op_type != "ATen" or "operator" not in a:
                raise UnsupportedError(f"{node.domain}::{node.op_type} without an operator")
            if absent := [x for x in node.output if x and x not in told]:
                raise UnsupportedError(f"no value_info says what {absent[0]!r} of {ATEN}::ATen is")
            key = key_of(a["operator"].s.decode(), a["overload_name"].s.decode() if "overload_name" in a else "")
            notes = {e.key: e.value for e in node.metadata_props}
            src = notes.get("module", ""), notes.get("file", ""), int(notes.get("line", 0))
            call = called(key, [bool(x) for x in node.input], len(node.output))
            self.host(call, key[0], src, f"given as {ATEN}::ATen", key)
            _attribute(node.attribute.add(), "host_index", len(self.host_ops) - 1)
            self.b.domains.add(ATEN)

    def lowered(self, n: Node) -> torch.dtype | None:
        """What autocast computes this operator in, where that is not what its operands say."""
        dtype = n.val.dtype if isinstance(n.val, Tensor) else None
        changes = bool(n.autocast) and dtype is not None and dtype.is_floating_point and self.natural_dtype(n) != dtype
        return dtype if changes else None

    def widened(self, n: Node) -> Node | None:
        """An operator that autocast computes in float32, on operands that have been cast, as autocast casts them."""
        outs = [t for t in (n.val if isinstance(n.val, (list, tuple)) else [n.val]) if isinstance(t, Tensor)]
        real = {t.dtype for t in outs if t.is_floating_point()}
        low = [i for i in n.inputs() if isinstance(i.val, Tensor) and i.val.dtype in (torch.bfloat16, torch.float16)]
        if not n.autocast or real != {torch.float32} or not low:
            return None
        if not private.autocast_has(n.target, low[0].val.device) and self.lowered(n) != torch.float32:
            return None
        mode = next((i.val.fake_mode for i in low if hasattr(i.val, "fake_mode")), None)
        if mode is None:
            return None
        cast: dict[Node, Node] = {}
        for i in low:
            with mode, torch.no_grad(), autocast.off():
                cast[i] = Node("cast", (i,), {}, i.val.to(torch.float32), n.src, n.grad)
            self.values[cast[i]] = self.cast(self.v(i), torch.float32)

        def of(a: Any) -> Any:
            if isinstance(a, Node):
                return cast.get(a, a)
            return type(a)([of(x) for x in a]) if type(a) in (list, tuple) else a

        return Node(n.target, of(n.args), {k: of(a) for k, a in n.kwargs.items()}, n.val, n.src, n.grad)

    def passive(self, n: Node) -> list[bool]:
        """By result: is it without a gradient whatever requires one? [] when that cannot be told. On tensors without
        values, of the sizes at hand: nothing is asked of symbols, and nothing drawn from torch's generator. Raises
        where PyTorch lacks the derivative that an operand may need."""
        # randn((3, 4)) would run on the CPU; torch.randint_like keeps autograd out, which its operator alone does not
        if not n.inputs() or name_of(n.target) == "randint_like":
            return [True for t in (n.val if isinstance(n.val, (list, tuple)) else [n.val]) if isinstance(t, Tensor)]

        def val(a: Any) -> Any:
            if isinstance(a, torch.device):
                return torch.device("meta")
            if isinstance(a, (torch.SymInt, torch.SymFloat)):
                return a.node.hint
            if isinstance(a, Node) and isinstance(a.val, Tensor):
                t = torch.empty([val(d) for d in a.val.shape], dtype=a.val.dtype, device="meta")
                if t.is_floating_point() and a.differentiable():
                    leaves.append(t)
                return t.requires_grad_(t.is_floating_point())
            if isinstance(a, Node):
                return val(a.val)
            return [val(x) for x in a] if isinstance(a, (list, tuple)) else a

        leaves: list[Tensor] = []
        try:
            with torch.enable_grad(), autocast.off():
                out = n.target(*[val(a) for a in n.args], **{k: val(a) for k, a in n.kwargs.items()})
        except Exception:  # noqa: BLE001  (no kernel for such tensors, a size that is not known)
            return []
        outs = [t for t in ([out] if isinstance(out, Tensor) else out) if isinstance(t, Tensor)]
        if n.target.namespace == "aten" and not _differentiates(outs, leaves):
            raise UnsupportedError(f"{n.target} has no derivative in PyTorch")
        return [not t.requires_grad for t in outs]

    def natural_dtype(self, n: Node) -> torch.dtype | None:
        """Element type of the result without autocast; None when the operator refuses the operands as they are."""
        def val(a: Any) -> Any:
            if isinstance(a, Node):
                return a.val
            return [val(x) for x in a] if isinstance(a, (list, tuple)) else a

        mode = next((a.val.fake_mode for a in n.inputs() if hasattr(a.val, "fake_mode")), None)
        if mode is None:
            return n.val.dtype  # type: ignore[no-any-return]
        try:
            with mode, torch.no_grad(), autocast.off():
                args, kwargs = [val(a) for a in n.args], {k: val(a) for k, a in n.kwargs.items()}
                return n.target(*args, **kwargs).dtype  # type: ignore[no-any-return]
        except RuntimeError:
            return None


def _differentiates(outs: list[Tensor], leaves: list[Tensor]) -> bool:
    """Has PyTorch derivatives of these results by these operands? Where it has none an operand may have no gradient in
    eager after all: a module that is kept in PyTorch may detach what it returns, which only its call can tell."""
    ends = [t for t in outs if t.requires_grad]
    if ends and leaves:
        try:
            torch.autograd.grad(ends, leaves, [torch.empty_like(t) for t in ends], allow_unused=True)
        except Exception as error:  # noqa: BLE001  (no kernel for tensors without values)
            return "derivative for " not in str(error)
    return True


def _order_of_draw(n: Node, x: Node) -> list[int] | None:
    """PyTorch draws numbers in the order of memory, and some by another method where that is not row by row: the axes
    as memory has them (slowest first) where that is not so. The engine's tensors lie row by row."""
    if not isinstance(x.val, Tensor) or x.val.dim() < 2 or layouts.pin(x.val):
        return None
    order = layouts.order_of(x.val)
    if order is None and (n.target._schema.name == "aten::normal_functional" or not layouts.pin(n.val)):
        raise CaptureError(f"{n.target}: draws numbers for a tensor with gaps in memory", *n.src)
    return order


def _order_of(x: Node) -> list[int] | None:
    """What PyTorch or the user's own code is given lies in memory as in eager, where it is dense: code may ask for it,
    as .view() does, or read memory as it lies. Arguments, parameters and buffers come as they are."""
    return layouts.order_now(x.val) if x.target is not INPUT and isinstance(x.val, Tensor) else None


def _bernoulli(t: Tensor, p: float, **given: Any) -> Tensor:
    """bernoulli.p, whose result is contiguous, in the places of its operand."""
    return torch.empty_like(t).bernoulli_(p, **given)


def _lying(t: Tensor, order: list[int] | None) -> Tensor:
    if order is None or t.permute(order).is_contiguous():
        return t
    return torch.empty_permuted(t.shape, order, dtype=t.dtype, device=t.device).copy_(t)


def _json(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, (torch.device, torch.layout, torch.memory_format)):
        return {type(x).__name__: str(x).removeprefix("torch.")}
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": repr(x)}
    return x


_keys: dict[Any, str] = {}


def _key(target: Any) -> str:
    """'add.Tensor'; the default overload has no suffix."""
    k = _keys.get(target)
    if k is None:
        space, _, name = target._schema.name.partition("::")
        over = target._overloadname
        k = _keys[target] = (name if space == "aten" else f"{space}::{name}") + (
            "" if over in ("", "default") else f".{over}"
        )
    return k


def holds(relation: Any) -> bool:
    """Of sizes, as ints or symbols: the answer is a condition of the capture. Of sizes that only data knows: False."""
    return not private.free_unbacked_symbols(relation) and bool(relation)


def not_empty(v: Val, what: str) -> None:
    """Of nothing PyTorch has errors, or NaN for gradients, of its own here: let it."""
    if any(isinstance(d, int) and d == 0 for d in v.shape):
        raise NotHere(f"{what} of a tensor without elements")


def broadcast(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """numpy broadcasting of sizes; two different expressions are taken as equal (the export has proved it), numbers
    first."""
    if a == b:
        return a
    n = max(len(a), len(b))
    a, b = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
    return tuple(
        y if x == 1 else x if y == 1 or isinstance(x, int) else y if isinstance(y, int) else x
        for x, y in zip(a, b, strict=True)
    )


def convert(
    program: Program, exported: Exported, name: str, training: bool = False
) -> tuple[bytes, list[HostOp], Builder]:
    """The ONNX bytes, the table of host calls, and the builder (symbols, inputs, counts)."""
    c = Converter(program, exported, name, training)
    onnx_bytes = c.go()
    return onnx_bytes, c.host_ops, c.b
