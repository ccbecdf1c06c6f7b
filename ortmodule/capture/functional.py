"""In-place operations and views become values: exported training IR -> a flat list of pure nodes plus a list of
write-backs.

Every tensor of the IR is a V: a base and a chain of views down from it. A base has a current value and a version.
  read   V.version != base.version: the value is derived again through the chain, in the grad mode of each view's
         creation.
  write  the operation without its underscore gives a new value of the view, cast to its dtype; it is scattered up the
         chain into a
         new value of the base; the version goes up.
At the end the inputs whose version is above zero are the write-backs. Written by hand here, not by run_decompositions:
that takes seconds on a 12-layer model and rewrites dropout and batch_norm.

Grad modes and autocast: the trace has the calls that switch them; what leaves no_grad is wrapped in STOP. A write under
no_grad, or through a detached view, keeps the gradient of the old value: base := THROUGH(new, old). A value that is
written over and not read gets a gradient of zeros, which is not None: base := ZERO(new, old).

Invariants: the list is in topological order and free of dead nodes; nodes have no side effects; a node's `val` is the
fake tensor (or tuple of them) that the export recorded or, for nodes made here, that the operation gives on fake
tensors.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from .. import autocast, patches
from .. import torch_private as private
from ..errors import CaptureError
from . import checkpoints, layouts, marks
from .export import Exported, Source, source_of
from .layouts import as_written
from .opaque import CUT, HOST, SHARES, Expected

aten = torch.ops.aten

# Targets of nodes that are no ATen call.
INPUT, STOP, THROUGH, ZERO, COPY, FILL, BATCH_NORM = (
    "input",
    "stop_gradient",
    "straight_through",
    "zero_gradient",
    "copy",
    "fill",
    "batch_norm_train",
)


# operators that may drop numbers out
_OWN_NUMBERS = frozenset(f"aten::{name}" for name in (
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout", "rrelu",
    "rrelu_with_noise", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"))  # fmt: skip


class Node:
    """A pure operation. target: an OpOverload, operator.getitem, or one of the names above; val: fake result; src:
    (module, file, line); grad: made in grad mode; autocast: that of its device, () where that is off; within:
    checkpoints it lies in (checkpoints.py)."""

    __slots__ = ("target", "args", "kwargs", "val", "src", "grad", "autocast", "live", "stopped", "reached",
                 "within")  # fmt: skip

    def __init__(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        val: Any,
        src: tuple[str, str, int],
        grad: bool = True,
        autocast: autocast.State = (),
    ) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.val = val
        self.src = src
        self.grad = grad
        self.autocast = autocast
        self.live = False
        self.stopped: Node | None = None
        self.reached: bool | None = None
        self.within = ""

    def differentiable(self) -> bool:
        """May it require a gradient: computed in grad mode from floating-point inputs?"""
        rest = [self]
        while rest:
            n = rest[-1]
            if n.reached is None:
                float_ = not isinstance(n.val, Tensor) or _is_float(n.val)
                n.reached = float_ and n.grad and n.target == INPUT
                if float_ and n.grad and n.target != STOP:
                    unknown = [i for i in n.inputs() if i.reached is None]
                    n.reached = None if unknown else n.reached or any([i.reached for i in n.inputs()])
                    rest += unknown
            if n.reached is not None:
                rest.pop()
        return bool(self.reached)

    def inputs(self) -> Iterator[Node]:
        yield from _nodes_in(self.args)
        yield from _nodes_in(tuple(self.kwargs.values()))


def _nodes_in(args: Any) -> Iterator[Node]:
    for a in args:
        if isinstance(a, Node):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _nodes_in(a)


class Program:
    """The pure graph. inputs: (source, INPUT node) of every placeholder that is used; outputs: tensors or sizes of the
    user's result; passthrough: output index -> INPUT node when the output is that input itself; views: output index ->
    (INPUT node or another output, the views that lead from it to this output); writes: (INPUT node, new value);
    layouts: tensor arguments whose strides decide what is a copy, or whether a view is allowed; own_layouts: as_strided
    sees the memory of a parameter or buffer, in its order; edited: inputs that are edited in place; quiet: those whose
    edit is no new version in PyTorch (running statistics)."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[tuple[Source, Node]] = []
        self.outputs: list[Any] = []
        self.passthrough: dict[int, Node] = {}
        self.views: dict[int, tuple[Node, list[View]]] = {}
        self.writes: list[tuple[Node, Node]] = []
        self.layouts: set[int] = set()
        self.own_layouts = False
        self.edited: list[Source] = []
        self.quiet: set[Node] = set()
        self.edits = False  # anything is
        self.item_of: dict[Any, Node] = {}  # symbol of an item() -> the 0-d tensor it was read from
        self.flushes: dict[Node, list[tuple[Node, Node]]] = {}  # write-backs that are made before a cut


SIZES: Any = object()  # among the arguments of a View: the sizes that the engine has computed for the result


class View(NamedTuple):
    """One view, to be made again from a tensor of PyTorch's. item: which result of a view with several, or -1; grad:
    made in grad mode."""

    target: Any
    args: tuple[Any, ...]  # after the first
    kwargs: dict[str, Any]
    item: int
    grad: bool


class _Base:
    __slots__ = ("node", "version", "input", "flushed", "held", "hosts", "kin", "loud", "views", "behind", "untrained")

    def __init__(self, node: Node, is_input: bool = False) -> None:
        self.node = node
        self.version = 0
        self.flushed = 0  # the version that its write-back before a cut has written
        self.held: Node | None = None  # a hook has seen this value, and may keep the tensor
        self.kin: set[_Base] = set()  # values that are the same tensor, unless a hook has put another in its place
        self.hosts: list[Expected] = []  # opaque calls that were given, or have returned, memory of this value
        self.views = False
        self.behind = False  # Tensor.data was read: what autograd keeps of that has no version of this value's
        self.loud = False  # written by more than training batch_norm, whose edit is no new version
        self.untrained = False  # what training batch_norm has put there has no gradient
        self.input = node if is_input else None


class _V:
    """A tensor name of the IR. view: the Node that derives it from its parent (its first argument is replaced when
    derived again); item: which result of a view with several results."""

    __slots__ = ("base", "parent", "view", "item", "node", "version")

    def __init__(
        self, base: _Base, node: Node, parent: _V | None = None, view: Node | None = None, item: int = -1
    ) -> None:
        self.base = base
        self.parent = parent
        self.view = view
        self.item = item
        self.node = node
        self.version = base.version
        if parent is not None:
            base.views = True
            base.behind |= self.is_data()

    def is_data(self) -> bool:
        """Tensor.data (capture/refused.py): an alias below a detach; any other is x[:, :]."""
        above = None if self.parent is None else self.parent.view
        return (self.view is not None and self.view.target is aten.alias.default and above is not None
                and above.target is aten.detach.default)  # fmt: skip


def _is_float(val: Any) -> bool:
    return isinstance(val, Tensor) and (val.dtype.is_floating_point or val.dtype.is_complex)


_SKIP = {
    "_assert_scalar",
    "_assert_async",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_functional_assert_async",
    "_functional_assert_scalar",
}
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_RESHAPES = {
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
    "_reshape_alias",
    "ravel",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
}
_EXPANDS = {"expand", "expand_as", "broadcast_to"}
_SIZED = _RESHAPES | _EXPANDS  # the sizes of their result say all
_SAME = {
    "alias",
    "detach",
    "contiguous",
    "to",
    "_to_copy",
    "lift",
    "lift_fresh",
    "type_as",
    "positive",
    "resolve_conj",
    "resolve_neg",
    "expand",
    "expand_as",
    "broadcast_to",
    "pin_memory",
    "requires_grad_",
    *_DROPOUTS,
}


_TRANSPOSES = {
    "transpose",
    "swapaxes",
    "swapdims",
    "t",
    "numpy_T",
    "mT",
    "adjoint",
    "matrix_H",
    "permute",
}
_WHOLE = _RESHAPES | _SAME | _TRANSPOSES  # views of all elements
# Comparisons in place: autograd gives the operands zeros, or has not heard of the operation.
_STEPS = {f"{op}_": True for op in ("eq", "ne", "lt", "le", "gt", "ge")} | {
    f"logical_{op}_": False for op in ("and", "or", "xor", "not")
}

_DRAWS = {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
# Views that are an error, or see other elements, where strides forbid or have them; what is a view or a copy as the
# strides of its operand have it; results that lie in memory in one way, whatever the operands' strides.
_STRICT = frozenset(("view", "view_as", "unflatten", "view_as_real", "view_as_complex", "as_strided"))
_MAYBE = frozenset(("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "_to_copy", "einsum", "type_as",
                    "pin_memory", "narrow_copy", "tensordot", "meshgrid", "kron", "block_diag", "atleast_3d"))
_EACH = frozenset(("meshgrid", "broadcast_tensors"))  # each result is a view of one of the operands
_ONE_LAYOUT = frozenset(("linear", "mm", "bmm", "addmm", "baddbmm", "embedding", "layer_norm"))


class _Functionalizer:
    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.program = Program()
        self.src_of = source_of()
        self.src: tuple[str, str, int] = ("", "", 0)
        self.checkpoints: list[str] = []  # the open ones
        # Under a capture-wide no_grad nothing needs a gradient: then regions make no difference.
        self.grad = True
        self.grad_matters = exported.grad_mode
        self.autocast = exported.autocast
        self.bases: list[_Base] = []
        self.fake_mode: Any = None
        self.held: list[tuple[Source, _Base]] = []
        self.mutates = any(_writes(n) for g in _graphs(exported.graph_module) for n in g.nodes)
        # contiguous() of what is so for some sizes: its operand, the version of that then, and its result
        self.same_or_copy: list[tuple[_V, int, _V]] = []
        self.memory: dict[int, set[_Base]] = {}  # which values have had tensors over a storage of the trace

    # --- nodes

    def fail(self, reason: str) -> CaptureError:
        return CaptureError(reason, *self.src)

    def make(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> Node:
        node = Node(target, args, kwargs, val, self.src, self.grad)
        if self.autocast != autocast.OFF and autocast.of(self.autocast, val, *[n.val for n in node.inputs()]):
            node.autocast = self.autocast
        node.within = "/".join(self.checkpoints)
        self.program.nodes.append(node)
        return node

    def fake(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operation on the fake tensors of its operands."""
        def val(a: Any) -> Any:
            if isinstance(a, Node):
                return a.val
            return [val(x) for x in a] if isinstance(a, (list, tuple)) else a

        try:
            with (
                self.fake_mode,
                torch.no_grad(),
                autocast.off(),
                layouts.no_conditions(self.fake_mode),  # the trace has made those of the operation
            ):
                return target(*[val(a) for a in args], **{k: val(a) for k, a in kwargs.items()})
        except Exception as e:  # whatever an operator does on fake tensors: the module then runs in PyTorch
            raise self.fail(f"{target}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}") from e

    def run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        return self.make(target, args, kwargs, self.fake(target, args, kwargs))

    def use(self, node: Node) -> Node:
        """The node as an operand here: values made under no_grad carry no gradient out."""
        return node if not self.grad or node.grad or not _is_float(node.val) else self.stop(node)

    def stop(self, node: Node) -> Node:
        if node.stopped is None:
            node.stopped = self.make(STOP, (node,), {}, node.val)
        return node.stopped

    # --- reads and writes

    def read(self, v: _V) -> Node:
        if v.version != v.base.version:
            if v.parent is None:
                v.node = self.stop(v.base.node) if v.base.untrained else v.base.node
            else:
                assert v.view is not None
                parent = self.read(v.parent)
                old = v.view
                node = Node(old.target, (parent, *old.args[1:]), old.kwargs, old.val, old.src, old.grad, old.autocast)
                self.program.nodes.append(node)
                if v.item >= 0:
                    node = Node(operator.getitem, (node, v.item), {}, v.node.val, old.src, old.grad, old.autocast)
                    self.program.nodes.append(node)
                v.node = node
            v.version = v.base.version
        return self.use(v.node)

    def only_by_data(self, v: _V, new: Node) -> bool:
        """`new` is written to Tensor.data of an input (weight.data.clamp_()) that nothing has used before: what uses it
        from here on finds the new value, and no backward the old one."""
        cur, by_data = v, False
        while cur.parent is not None:
            by_data |= cur.is_data()
            cur = cur.parent
        behind: set[Node | None] = {v.base.input}
        for node in self.program.nodes:
            if behind.isdisjoint(node.inputs()):
                continue
            if node.target in (aten.detach.default, aten.alias.default):
                behind.add(node)
            elif node is not new:
                return False
        return by_data and v.base.input is not None and v.base.version == 0

    def write(self, v: _V, new: Node, over: bool = False, loud: bool = True) -> None:
        """over: `new` is not computed from what it takes the place of."""
        for expected in v.base.hosts:
            expected.edited = True
            if expected.shares:
                raise self.fail(f"what is kept in PyTorch {SHARES}")
        if v.base.behind and not self.only_by_data(v, new):
            raise self.fail("forward edits a tensor in place whose Tensor.data it has read: autograd does not see it")
        old = v.base.node
        v.base.untrained = False
        keeps_gradient = not self.grad
        cur, value = v, new
        while cur.parent is not None:
            assert cur.view is not None
            keeps_gradient |= _name(cur.view.target) == "detach" or not cur.view.grad
            over = over and _name(cur.view.target) in _WHOLE
            value = self.scatter(cur, value)
            cur = cur.parent
        if keeps_gradient and self.grad_matters and _is_float(old.val) and old.grad:
            value = self.make(THROUGH, (self.stop(value), old), {}, old.val)  # gradients are those of old alone
            value.grad = True
        elif over and self.grad_matters and old.differentiable():
            value = self.make(ZERO, (value, old), {}, old.val)
        v.base.node = value
        v.base.version += 1
        v.base.loud |= loud and not v.base.behind
        if v.base.held is not None or v.base.kin:
            self.sync(v.base)

    # --- cuts (cuts.py)

    def cut(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        """Hooks run here. They see the state of now, and may keep, change or edit the tensors that go through."""
        xs, index = cast("tuple[list[fx.Node], int]", node.args)
        before, self.grad = self.grad, True  # what was made under no_grad requires no gradient
        operands = [self.read(env[x]) for x in xs]
        self.grad = before
        made = self.flush(self.make(CUT, (operands, index), {}, tuple(node.meta["val"])))
        items: list[Any] = []
        for i, t in enumerate(node.meta["val"]):
            item = self.make(operator.getitem, (made, i), {}, t)
            base = _Base(item)
            base.held = item
            items.append(_V(base, item))
        env[node] = items
        called = self.exported.table.marks[index].kind == "call"  # it may return any of its arguments
        for i, (x, operand) in enumerate(zip(xs, operands, strict=True)):
            base = env[x].base
            if env[x].parent is None:
                base.held = operand
            kin = {base, *base.kin, *[item.base for item in (items if called else [items[i]])]}
            for other in kin:
                other.kin = other.kin | kin

    def flush(self, cut: Node) -> Node:
        """Write-backs so far are made before this cut; what comes after it reads the tensors again."""
        self.program.flushes[cut] = []
        for source, base in self.held:
            if base.version > base.flushed and source.kind != "constant":
                assert base.input is not None
                self.check_unshared(source, [s for s, _ in self.held])
                self.program.flushes[cut].append((base.input, base.node))
                base.node = base.input
                base.version += 1
                base.flushed = base.version
        return cut

    def sync(self, base: _Base) -> None:
        """An edit of what a hook has seen: the tensor that the hook had gets the new value."""
        if base.held is None or any(b.views for b in base.kin if b is not base):
            raise CaptureError(
                "an edit in place of what a hook on a submodule has seen, of which there are other views"
            )
        new, held = base.node, base.held
        if base.input is not None:
            base.flushed = base.version
        row = marks.sync_mark(self.exported.table, self.grad)
        made = self.flush(self.make(CUT, ([held, new], row), {}, (held.val,)))
        base.node = base.held = self.make(operator.getitem, (made, 0), {}, held.val)

    def scatter(self, v: _V, new: Node) -> Node:
        """A new value of v's parent in which v is `new`."""
        assert v.parent is not None and v.view is not None
        view, parent = v.view, self.read(v.parent)
        name, val = _name(view.target), v.parent.node.val
        a = _bound(view)
        if name in _RESHAPES:
            return self.make("reshape_to", (new,), {}, val)
        if name in _SAME:
            if tuple(new.val.shape) != tuple(val.shape):
                raise self.fail(
                    f"{name}: an in-place write into an expanded view (several elements share one place); clone it "
                    "first"
                )
            return new
        if name in ("transpose", "swapaxes", "swapdims"):
            d = list(a.values())
            return self.make(aten.transpose.int, (new, d[1], d[2]), {}, val)
        if name in ("t", "numpy_T", "mT", "adjoint", "matrix_H"):
            order = list(range(val.dim()))
            order = order[::-1] if name in ("t", "numpy_T") else [*order[:-2], order[-1], order[-2]]
            return self.make(aten.permute.default, (new, order), {}, val)
        if name == "permute":
            dims = [d % val.dim() for d in a["dims"]]
            return self.make(aten.permute.default, (new, [dims.index(i) for i in range(len(dims))]), {}, val)
        if name == "slice":
            return self.make(
                aten.slice_scatter.default, (parent, new, a["dim"], a["start"], a["end"], a["step"]), {}, val
            )
        if name == "narrow":
            return self.make(
                aten.slice_scatter.default, (parent, new, a["dim"], a["start"], a["start"] + a["length"], 1), {}, val
            )
        if name == "select":
            return self.make(aten.select_scatter.default, (parent, new, a["dim"], a["index"]), {}, val)
        if name == "diagonal":
            return self.make(aten.diagonal_scatter.default, (parent, new, a["offset"], a["dim1"], a["dim2"]), {}, val)
        if name == "unbind":
            return self.make(aten.select_scatter.default, (parent, new, a["dim"], v.item), {}, val)
        if name in ("split", "split_with_sizes", "chunk", "tensor_split"):
            dim = a.get("dim", 0)
            start = sum(x.shape[dim] for x in view.val[: v.item])
            end = start + view.val[v.item].shape[dim]
            if isinstance(start, int) and isinstance(end, int):
                return self.make(aten.slice_scatter.default, (parent, new, dim, start, end, 1), {}, val)
        raise self.fail(
            f"{name}: an in-place write through this view has no functional form here; clone the view before writing"
        )

    # --- the walk

    def arg(self, a: Any, env: dict[fx.Node, Any]) -> Any:
        if isinstance(a, fx.Node):
            v = env[a]
            return self.read(v) if isinstance(v, _V) else v
        if isinstance(a, (list, tuple)):
            return [self.arg(x, env) for x in a]
        return a

    def go(self) -> Program:
        gm = self.exported.graph_module
        env: dict[fx.Node, Any] = {}
        same: dict[int, _V] = {}
        held = self.held
        for node in gm.graph.nodes:
            if node.op != "placeholder":
                continue
            source, val = self.exported.sources[node.name], node.meta["val"]
            if not isinstance(val, Tensor):
                if isinstance(val, (torch.SymInt, torch.SymFloat)):
                    held.append((source, _Base(Node(INPUT, (), {}, val, self.src), True)))
                env[node] = val
                continue
            self.fake_mode = self.fake_mode or getattr(val, "fake_mode", None)
            if source.tensor is not None and id(source.tensor) in same:
                env[node] = same[id(source.tensor)]
                continue
            base = _Base(Node(INPUT, (), {}, val, self.src), True)
            env[node] = self.lies(_V(base, base.node))
            held.append((source, base))
            if source.tensor is not None:
                same[id(source.tensor)] = env[node]
        result = self.walk(gm, env)
        self.finish(result, held)
        return self.program

    def walk(self, gm: fx.GraphModule, env: dict[fx.Node, Any]) -> Any:
        """Runs through one graph; gives the values of its output, not yet read."""
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                env[node] = getattr(gm, str(node.target))
                if isinstance(env[node], Tensor):
                    raise self.fail(f"the exported graph refers to a tensor by attribute ({node.target})")
            elif node.op == "call_function":
                self.src = self.src_of(node)
                self.call(node, env)
            elif node.op == "output":
                hold: Any = lambda n: _Held(env[n])  # noqa: E731
                return fx.node.map_arg(node.args[0], hold)
        return None

    def call(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        target: Any = node.target
        val = node.meta.get("val")
        if isinstance(target, private.HigherOrderOperator):
            name = getattr(target, "_name", target)
            raise self.fail(
                f"{name}: control flow inside the graph is not supported; keep this submodule in PyTorch"
            )
        elif target is operator.getitem:
            of, at = cast("tuple[fx.Node, int]", node.args)
            items = env[of]
            env[node] = items[at] if isinstance(items, (list, tuple)) else val
        elif target is private.set_grad_enabled:
            self.set_grad(bool(node.args[0]))
        elif target is private.autocast_nodes._enter_autocast:
            kind, dtype, enabled, _cache = node.args
            env[node] = self.autocast
            self.autocast = autocast.changed(self.autocast, str(kind), cast(Any, dtype), bool(enabled))
        elif target is private.autocast_nodes._exit_autocast:
            self.autocast = env[cast(fx.Node, node.args[0])]
        elif not isinstance(target, private.OpOverload):
            if isinstance(val, Tensor):
                raise self.fail(f"{target}: not an operator the capture knows")
            env[node] = val
        elif _name(target) in _SKIP:
            pass
        elif target is CUT:
            self.cut(node, env)
        elif target is checkpoints.MARK:
            self.checkpoint(str(node.args[0]), bool(node.args[1]))
        elif not isinstance(val, Tensor) and _name(target) in ("item", "_local_scalar_dense"):
            if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                read = self.arg(node.args[0], env)
                if _is_float(read.val):  # a number in Python: a double, and no gradient comes back from it
                    read = self.make(STOP, (read,), {}, read.val)
                    if read.val.dtype != torch.float64:
                        read = self.run(aten.to.dtype, (read, torch.float64), {})
                if not isinstance(val, torch.SymInt) or private.free_unbacked_symbols(val):  # else it is a size
                    self.program.item_of[val.node.expr] = read
            env[node] = val
        elif isinstance(val, _NUMBERS) or val is None and not target._schema.is_mutable:
            env[node] = val
        else:
            self.operation(node, target, val, env)

    def checkpoint(self, number: str, begin: bool) -> None:
        if begin:
            self.checkpoints.append(number)
        elif number in self.checkpoints:  # with those inside whose end an exception has left out
            del self.checkpoints[self.checkpoints.index(number):]

    def set_grad(self, enabled: bool) -> None:
        if enabled and not self.grad_matters:
            raise CaptureError("forward enables gradients within a call that computes none", "", *self.src[1:])
        self.grad = enabled or not self.grad_matters

    def operation(self, node: fx.Node, target: Any, val: Any, env: dict[fx.Node, Any]) -> None:
        name = _name(target)
        if name.startswith("squeeze"):
            layouts.pin_ones(cast(fx.Node, node.args[0]).meta["val"], node.args[1:])
        if name == "batch_norm" and self.batch_norm(node, env):
            return
        if target._schema.is_mutable:
            self.mutation(node, target, env)
            return
        kwargs = {k: self.arg(a, env) for k, a in node.kwargs.items()}
        if name == "instance_norm" and node.args[3] is not None and node.args[5]:
            raise self.fail(
                "instance_norm: training with running statistics is not supported; use track_running_stats=False"
            )
        args = tuple([self.arg(a, env) for a in node.args])
        itself = self.operands_returned(node, val, env) if not self.grad else {}
        if isinstance(val, Tensor) and itself:
            env[node] = itself[0]
            return
        made = self.make(target, args, kwargs, val)
        if isinstance(val, Tensor):
            v = env[node] = self.lies(self.result(node, made, made, val, env))
            if name == "contiguous" and len(args) == 1 and not kwargs and layouts.depends(made.args[0].val):
                of = env[cast(fx.Node, node.args[0])]
                self.same_or_copy.append((of, of.base.version, v))
            return
        if not isinstance(val, (list, tuple)):
            raise self.fail(f"{target}: result of type {type(val).__name__}")
        items: list[Any] = []
        for i, x in enumerate(val):
            if not isinstance(x, Tensor) or i in itself:
                items.append(itself.get(i, x))
                continue
            item = self.make(operator.getitem, (made, i), {}, x)
            items.append(self.lies(self.result(node, made, item, x, env, i)))
        env[node] = items
        if target is HOST:
            xs, index = cast("tuple[list[fx.Node], int]", node.args)
            for v in (*[env[x] for x in xs], *items):
                if isinstance(v, _V):
                    v.base.hosts.append(self.exported.table.rows[index].expected)

    def lies(self, v: _V) -> _V:
        if isinstance(v.node.val, Tensor) and v.node.val.layout is torch.strided:
            self.memory.setdefault(private.storage_of(v.node.val), set()).add(v.base)
        return v

    def result(
        self, node: fx.Node, made: Node, value: Node, val: Tensor, env: dict[fx.Node, Any], item: int = -1
    ) -> _V:
        """The name of a result: a view of an operand, or a value of its own."""
        if not self.mutates:
            return _V(_Base(value), value)
        first = env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(first, _V) and self.aliases(node, val):
            return _V(first.base, value, first, made, item)
        if _name(node.target) not in _DROPOUTS and node.target is not HOST:
            each = _name(node.target) in _EACH and item >= 0
            for x in [cast("list[fx.Node]", node.args[0])[item]] if each else node.all_input_nodes:  # of einsum
                of = env.get(x)
                if not isinstance(of, _V) or of is first or not _one_memory(val, x.meta.get("val")):
                    continue
                views = same_memory(x.meta["val"], val, self.grad)
                if views is None and _name(node.target) == "broadcast_tensors":  # of sizes that are symbols
                    views = [View(aten.expand.default, (list(val.shape),), {}, -1, self.grad)]
                if views is None and _name(node.target) == "meshgrid":  # a row or column, again and again
                    shape = list(val.shape)
                    spread = [n if not isinstance(step, int) or step else 1 for n, step in zip(shape, val.stride())]
                    views = [View(aten.view.default, (spread,), {}, -1, self.grad),
                             View(aten.expand.default, (shape,), {}, -1, self.grad)]
                for view in views or ():
                    step = self.run(view.target, (self.read(of), *view.args), {})
                    of = _V(of.base, step, of, step)
                if of is env[x]:
                    raise self.fail(f"{node.target}: its result is a view of an argument, in a way that is not known "
                                    "here; clone it before writing")  # fmt: skip
                return of
        return _V(_Base(value), value)

    def aliases(self, node: fx.Node, val: Tensor) -> bool:
        """Whether the result is a view of the first argument: the recorded storages say it, schemas do not always.
        Three exceptions: detach (a view to us), recorded constants (do not share their storage with their views),
        dropout that drops nothing (is its input, but is recorded as a copy)."""
        target, of = node.target, node.args[0]
        assert isinstance(of, fx.Node)
        name = _name(target)
        if name == "detach":
            return True
        if name in _DROPOUTS:
            p, train = cast("tuple[float, bool]", node.args[1:3])
            return not train or p == 0
        if of.op == "placeholder" and of.name.startswith("c_"):
            returns = cast(Any, target)._schema.returns
            return name != "lift_fresh_copy" and bool(returns) and returns[0].alias_info is not None
        return bool(private.storage_of(val) == private.storage_of(of.meta["val"]))

    def operands_returned(self, node: fx.Node, val: Any, env: dict[fx.Node, Any]) -> dict[int, _V]:
        """Results that are an operand itself, by their number (a conversion to what it is already). The trace takes
        such an operand, wherever else it is used, for the result."""
        of = {id(x.meta["val"]): env[x] for x in node.all_input_nodes if isinstance(env.get(x), _V)}
        vals = [val] if isinstance(val, Tensor) else [x for x in val if isinstance(x, Tensor)]
        if not any(_one_memory(x, y.meta.get("val")) for x in vals for y in node.all_input_nodes):
            return {}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))  # type: ignore[misc]
        try:
            with self.fake_mode or contextlib.nullcontext(), layouts.no_conditions(self.fake_mode):
                out = cast(Any, node.target)(*args, **kwargs)
        except Exception:  # what cannot be told is a new object
            return {}
        outs = [out] if isinstance(out, Tensor) else out
        return {i: of[id(x)] for i, x in enumerate(outs) if id(x) in of}

    def batch_norm(self, node: fx.Node, env: dict[fx.Node, Any]) -> bool:
        """Training batch_norm writes the running statistics, though its schema does not say so."""
        _x, _w, _b, mean, var, training, *_ = node.args
        if not training or mean is None:
            return False
        m, v = env[cast(fx.Node, mean)], env[cast(fx.Node, var)]
        args = tuple([self.arg(a, env) for a in node.args])
        made = self.make(BATCH_NORM, args, {}, (node.meta["val"], m.node.val, v.node.val))
        out = [self.make(operator.getitem, (made, i), {}, made.val[i]) for i in range(3)]
        for target, new in ((m, out[1]), (v, out[2])):
            self.write(target, new, loud=False)
            target.base.untrained = True
        env[node] = _V(_Base(out[0]), out[0])
        return True

    def mutation(self, node: fx.Node, target: Any, env: dict[fx.Node, Any]) -> None:
        schema, name = target._schema, _name(target)
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        if len(written) != 1:
            raise self.fail(f"{target}: writes {len(written)} of its arguments; one is supported")
        v = env[cast(fx.Node, given[written[0]])]
        if not isinstance(v, _V):
            raise self.fail(f"{target}: writes something that is not a tensor")
        env[node] = v
        if name == "requires_grad_":
            return
        if name == "detach_":
            if v.parent is not None:
                raise self.fail("detach_: on a view")
            v.base.node = self.make(STOP, (self.read(v),), {}, v.node.val)
            v.base.version += 1
            if v.base.input is not None:
                raise self.fail("detach_: on an input of the module")
            return
        val = v.node.val
        if name == "fill_diagonal_" and val.dim() == 2 and not given.get("wrap"):
            value = self.run(aten.full.default, ([], given["fill_value"]),
                             {"dtype": val.dtype, "device": val.device})  # fmt: skip
            eye = self.run(aten.eye.m, (val.shape[0], val.shape[1]), {"dtype": torch.bool, "device": val.device})
            new = self.run(aten.where.self, (eye, value, self.read(v)), {})
        elif name in ("copy_", "fill_", "zero_"):
            source = 0 if name == "zero_" else self.arg(given["src" if name == "copy_" else "value"], env)
            new = self.make(COPY if name == "copy_" else FILL, (source,), {}, val)
        else:
            pure = _without_out(target) if written[0] == "out" else pure_of(target)
            if pure is None:
                raise self.fail(f"{target}: no functional form; use the operation without the underscore")
            # exported code omits defaults
            full = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} | given
            if written[0] == "out":
                names = {p.name: p.name for p in pure._schema.arguments}
                full |= {"dtype": val.dtype, "device": val.device}
            else:  # dropout_ has self, dropout input
                names = {p.name: a.name for p, a in zip(pure._schema.arguments, schema.arguments, strict=False)}
            takes = [(a, full[names[a.name]]) for a in pure._schema.arguments if names.get(a.name) in full]
            args = tuple([self.arg(x, env) for a, x in takes if not a.kwarg_only])
            if name in _DRAWS:  # their functional forms have no derivative
                args = tuple([self.stop(a) if isinstance(a, Node) else a for a in args])
            new = self.run(pure, args, {a.name: self.arg(x, env) for a, x in takes if a.kwarg_only})
            if tuple(new.val.shape) != tuple(val.shape):
                raise self.fail(f"{target}: changes the shape of what it writes")
            if torch.Tag.pointwise in pure.tags and not torch.can_cast(new.val.dtype, val.dtype):
                raise self.fail(f"{target}: {new.val.dtype} is no result for {val.dtype}")
            if new.val.dtype != val.dtype:
                new = self.make(aten.to.dtype, (new, val.dtype), {}, val)
            if self.grad and name in _STEPS and _is_float(val):
                over = [x for x in args if isinstance(x, Node)]
                new = self.make(*((ZERO, (new, *over)) if _STEPS[name] else (THROUGH, (new, over[0]))), {}, val)
        self.write(v, new, name in ("copy_", "fill_", "zero_") or name in _DRAWS)

    # --- end

    def finish(self, result: Any, held: list[tuple[Source, _Base]]) -> None:
        p = self.program
        self.grad = True
        inputs = {i: base.input for i, of in self.exported.same.items() for source, base in held
                  if base.input is not None and of == (source.leaf if source.kind == "user" else source.target)}
        result = [x.v if isinstance(x, _Held) else x for x in result]
        last = len(result) - len(self.exported.conditions)
        end = last - self.exported.n_made
        tried = [v.node for v in result[end:last] if isinstance(v, _V)]
        result = result[:end] + result[last:]
        for i, v in enumerate(result):
            if isinstance(v, _V):
                out: Any = self.read(v)
                if i in inputs:
                    p.passthrough[i] = inputs[i]
                elif v.parent is None and v.base.input is not None:
                    p.passthrough[i] = v.base.input
                p.outputs.append(out)
            else:
                p.outputs.append(v)
        self.pin_layouts()
        self.find_views(result, {b.input for s, b in held if s.kind != "constant"})
        for source, base in held:
            if base.version > base.flushed and source.kind != "constant":
                assert base.input is not None
                self.check_unshared(source, [s for s, _ in held])
                if source.kind == "user" and self.needs_gradient(base.node, held):
                    raise CaptureError("forward writes what requires a gradient into an argument that requires none",
                                       "", *base.node.src[1:])  # fmt: skip
                p.writes.append((base.input, base.node))
        p.edited = [source for source, base in held if base.version > 0 and source.kind != "constant"]
        self.check_returned({base.input for source, base in held if source.kind == "user"})
        p.quiet = {base.input for _, base in held if base.input is not None and base.version > 0 and not base.loud}
        p.edits = self.mutates
        p.layouts = self.layouts_that_matter(held)
        live = [n for n in p.outputs if isinstance(n, Node)] + [n for _, n in p.writes] + [n for n, _ in p.writes]
        # what a user wrote runs, whoever reads its results, and what is drawn decides what is drawn after it
        live += [n for n in p.nodes if n.target is HOST or draws(n)]
        live += list(p.passthrough.values()) + list(p.item_of.values())
        live += list(p.flushes) + [n for pairs in p.flushes.values() for pair in pairs for n in pair]
        made = _made_sizes(p.nodes)
        live += [made[s] for out in p.outputs for s in _sizes_in(out) if s in made]
        while live:
            n = live.pop()
            if not n.live:
                n.live = True
                live.extend(n.inputs())
                # of x[mask] the size alone may be read
                live += [made[s] for s in _sizes_in([n.args, list(n.kwargs.values())]) if s in made] if made else []
        self.check_tried([n for n in tried if not n.live])
        p.nodes = [n for n in p.nodes if n.live]
        # Sizes of user inputs may be all that is read of them, so user inputs always stay.
        p.inputs = [(s, b.input) for s, b in held if b.input is not None and (b.input.live or s.kind == "user")]

    def tensor_of(self, source: Source) -> Any:
        return self.exported.leaves[source.leaf] if source.kind == "user" else source.tensor

    def needs_gradient(self, node: Node, held: list[tuple[Source, _Base]]) -> bool:
        """Does PyTorch give it a grad_fn?"""
        leaves = {b.input for s, b in held if isinstance(t := self.tensor_of(s), Tensor) and t.requires_grad}
        rest, seen = [node] if self.grad_matters else [], set[Node]()
        while rest:
            n = rest.pop()
            if n not in seen and n.differentiable() and n.target is not aten.detach.default:
                if n in leaves:
                    return True
                seen.add(n)
                rest += n.inputs()
        return False

    def pin_layouts(self) -> None:
        """Who can tell whether contiguous() has made a copy: an edit of one of the two afterwards, who is given a
        result, or who looks. For them the answer is a condition on sizes."""
        exported, scope = self.exported, patches.here()
        looks = exported.facts.looks or exported.facts.identity or bool(exported.table.marks)
        looks = looks or scope is not None and scope.watch is not None and scope.watch.identity
        looks = looks or any(row.kind != "aten" for row in exported.table.rows)
        returned = self.returned()
        pinned = {node for v, version, result in self.same_or_copy for node in (v.node, result.node)
                  if looks or v.base.version > version or result.node in returned
                  or result.base is not v.base and result.base.version > 0}  # fmt: skip
        for v, _, result in self.same_or_copy:
            if result.node in pinned:
                layouts.pin(v.node.val)
        rest = [(t, *self.follow(t)) for t in exported.facts.uncopied]
        again = True
        while again:
            again = False
            for row in [*rest]:
                t, own, nodes, strict = row
                edited = self.mutates and any(base.loud for base in self.memory.get(private.storage_of(t), ()))
                if looks or edited or strict or not own or not (returned | pinned).isdisjoint(own | nodes):
                    layouts.pin(t)
                    pinned |= own
                    rest = [other for other in rest if other is not row]
                    again = True

    def follow(self, t: Tensor) -> tuple[set[Node], set[Node], bool]:
        """Nodes over the memory of what contiguous() has given back as it was; those whose strides follow from its; and
        whether other strides might forbid one of these. For other sizes contiguous() copies: the trace knows the
        strides of now alone. What is contiguous can be viewed in any way, which gives what is contiguous."""
        at, like = private.storage_of(t), _lies(t)
        own = {n for n in self.program.nodes if isinstance(n.val, Tensor) and private.storage_of(n.val) == at}
        dense, found, strict = {n for n in own if _lies(n.val) == like}, set[Node](), False
        for n in self.program.nodes if not layouts.follows(t) else ():
            name = _name(n.target)
            given = [x for x in n.inputs() if x in dense or x in found]
            if not given or n in dense or name in _ONE_LAYOUT or isinstance(n.val, Tensor) and n.val.dim() == 0:
                continue
            if given[0] in dense and (name in _RESHAPES or name == "contiguous"):
                dense.add(n)
            else:
                strict = strict or name in _STRICT
                found.add(n)
        return own, dense | found, strict

    def returned(self) -> set[Node]:
        """What results, and buffers to which forward assigns, may be views of, whatever the strides."""
        rest = [out for out in self.program.outputs if isinstance(out, Node)]
        for source, base in self.held:
            if source.kind == "buffer" and source.target in self.exported.rebinds:
                n = base.node
                while n.target in (THROUGH, ZERO, COPY) or _name(n.target) == "clone":  # how it is written
                    n = n.args[0]
                rest.append(n)
        found: set[Node] = set()
        while rest:
            out = rest.pop()
            if out not in found:
                found.add(out)
                of = out.args[0] if out.target is operator.getitem else out
                if of is not out or _name(of.target) in _MAYBE or _is_view(of):
                    rest += [x for x in of.inputs() if isinstance(x.val, Tensor)]
        return found

    def check_returned(self, arguments: Collection[Node | None]) -> None:
        """What is kept in PyTorch may return memory of what it is given. Whoever has both, sees it."""
        p = self.program
        known = {x for x in (*arguments, *p.outputs) if isinstance(x, Node)}

        def root(x: Any) -> Any:
            while isinstance(x, Node) and x not in known and x.target is not HOST and _is_view(x):
                x = x.args[0]
            return x

        def item_of(x: Node, made: Node) -> Any:
            while x.args[0] is not made:
                x = x.args[0]
            return x.args[1]

        for i, out in enumerate(p.outputs):
            made = root(out.args[0]) if isinstance(out, Node) and _is_view(out) else None
            if not isinstance(made, Node) or made.target is not HOST:
                continue
            expected = self.exported.table.rows[made.args[1]].expected
            if not expected.shares or item_of(out, made) in expected.fresh:
                continue
            if any(root(x) in known for x in made.args[0]) and not self.outside(i, made, arguments):
                raise CaptureError("what is kept in PyTorch returns memory of an argument or of another result", "",
                                   *made.src[1:])  # fmt: skip

    def outside(self, i: int, made: Node, arguments: Collection[Node | None]) -> bool:
        """A Function of one argument of forward, whose only result leaves forward, can be called on that argument
        itself, behind the graph. made: its node. -> whether that is the case, and done."""
        p, out = self.program, self.program.outputs[i]
        row, xs = self.exported.table.rows[made.args[1]], made.args[0]
        alone = [n for n in p.nodes if made in n.inputs()] == [out] and out.target is operator.getitem
        read = p.outputs.count(out) > 1 or any(out in n.inputs() for n in p.nodes)
        other = self.exported.table.marks or self.exported.conditions or p.writes or i in p.views or i in p.passthrough
        if row.kind != "python_op" or len(xs) != 1 or xs[0] not in arguments or not alone or read or other:
            return False
        call, item = row.call, out.args[1]

        def result(t: Tensor) -> Tensor:
            y = call([t])
            return y if isinstance(y, Tensor) else y[item]

        p.nodes = [n for n in p.nodes if n is not made and n is not out]
        p.outputs[i] = xs[0]
        p.views[i] = xs[0], [View(result, (), {}, -1, True)]
        return True

    def layouts_that_matter(self, held: list[tuple[Source, _Base]]) -> set[int]:
        """Arguments whose strides a later call must share. Strides go from operands to results."""
        p = self.program
        returned: set[Node] = set()  # what an output may be a view of
        for out in p.outputs:
            while isinstance(out, Node) and out not in returned:
                returned.add(out)
                out = next((a for a in _nodes_in(out.args) if isinstance(a.val, Tensor)), None) \
                    if _name(out.target) in _MAYBE or _is_view(out) else None  # fmt: skip
        own = -1  # a parameter or buffer
        of: dict[Node, frozenset[int]] = {
            base.input: frozenset((s.leaf if s.kind == "user" else own,)) for s, base in held
            if s.kind != "constant" and base.input is not None and isinstance(base.input.val, Tensor)
        }  # fmt: skip
        none: frozenset[int] = frozenset()
        matter: set[int] = set()
        for n in p.nodes:
            name = _name(n.target)
            given = none.union(*[of.get(x, none) for x in n.inputs()])
            drawn = draws(n)  # in the order of memory
            if drawn or name in _STRICT or name in _MAYBE and (self.mutates or n in returned):
                matter |= given - {own}
            p.own_layouts = p.own_layouts or (drawn or name == "as_strided") and own in given
            if given and name not in _ONE_LAYOUT and not (isinstance(n.val, Tensor) and n.val.dim() == 0):
                of[n] = given
        return matter

    def check_tried(self, dead: list[Node]) -> None:
        """In a `try`, an operation may be there for its exception alone; and where hooks on submodules have run, a call
        cannot begin again in PyTorch, which would let the user's code catch it. dead: results of operations in a `try`
        that nobody reads."""
        if not self.exported.tried:
            return
        file, line = min(self.exported.tried)
        if self.exported.table.marks:
            raise CaptureError("hooks on submodules, and a try statement around operations of PyTorch", "", file, line)
        for n in dead:
            if isinstance(n.target, private.OpOverload) and not _is_view(n):
                raise CaptureError(
                    f"{n.target} in a try statement: nobody reads its result, but perhaps its exception",
                    n.src[0], n.src[1] or file, n.src[2] or line)

    def find_views(self, result: list[Any], inputs: Collection[Node | None]) -> None:
        """Outputs that share memory with an input or with another output, so that who edits one in place sees it in the
        other."""
        p = self.program
        others = {out: i for i, out in reversed([*enumerate(p.outputs)]) if isinstance(out, Node)}

        def whole(out: Node) -> bool:
            """The engine's outputs are dense: only of those that are so in PyTorch, too, a view is the view that
            PyTorch has."""
            return isinstance(out.val, Tensor) and layouts.pin(out.val)

        for i, out in enumerate(p.outputs):
            if i in p.passthrough or not isinstance(out, Node) or others[out] != i:
                continue
            chain: list[View] = []
            known = True
            v: _V | None = result[i]
            node = out
            while True:
                item = -1
                # edits may lie between: the chain of views knows, the nodes do not
                if v is not None and v.parent is not None:
                    assert v.view is not None
                    made, item, v = v.view, v.item, v.parent
                    source: Any = v.base.input if v.parent is None and v.base.input is not None else self.read(v)
                else:
                    v = None
                    made = node
                    if made.target is operator.getitem:
                        item, made = made.args[1], made.args[0]
                    source = made.args[0] if made.args and made.target is not INPUT else None
                    if isinstance(source, (list, tuple)) and _name(made.target) in _EACH and item >= 0:
                        source = source[item]
                    elif isinstance(source, (str, list, tuple)):  # einsum
                        source = next((x for x in made.inputs() if _one_memory(node.val, x.val)), None)
                    if not isinstance(source, Node) or not _one_memory(node.val, source.val):
                        break
                again = _view_again(made, item) or same_memory(source.val, node.val, made.grad)
                if again is None and node is out and _name(made.target) in _SIZED:
                    target = aten.expand if _name(made.target) in _EXPANDS else aten.view
                    again = [View(target.default, (SIZES,), {}, -1, made.grad)]
                known = known and again is not None
                chain[:0] = again or []
                node = source
                if node in inputs or (others.get(node, i) != i and whole(node)):
                    if not known:  # with numbers for sizes it may be
                        raise CaptureError(f"a result is a view ({made.target}) of an argument or of another result, "
                                           "in a way that is not known here", *made.src)  # fmt: skip
                    p.views[i] = (node, chain)
                    break

    def check_unshared(self, source: Source, sources: list[Source]) -> None:
        """A write must not be visible through another input that is a different object over the same memory."""
        mine = self.tensor_of(source)
        for other in sources:
            t = self.tensor_of(other)
            if other is source or t is mine or not isinstance(t, Tensor) or not isinstance(mine, Tensor):
                continue
            if t.numel() and mine.numel() and t.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr():
                a, b = source.target or f"input {source.leaf}", other.target or f"input {other.leaf}"
                raise CaptureError(f"{a} is written in place and shares its memory with {b}; clone one of them")


def _lies(t: Tensor) -> list[Any]:
    return [as_written(n) for n in (*t.shape, *t.stride(), t.storage_offset())]


class _Held:
    """Wraps values in map_arg, which would look into lists."""

    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = v


def _sizes_in(args: Any) -> Iterator[Any]:
    """Symbols of sizes that depend on data, among the numbers of a call."""
    for a in args if isinstance(args, (list, tuple)) else (args,):
        if isinstance(a, (list, tuple)):
            yield from _sizes_in(a)
        elif isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield from private.free_unbacked_symbols(a)


def draws(n: Node) -> bool:
    """Does PyTorch draw it from its generator? What drops numbers out is the engine's, which takes one seed for a
    call."""
    tags: Any = getattr(n.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and n.target._schema.name not in _OWN_NUMBERS


def _made_sizes(nodes: list[Node]) -> dict[Any, Node]:
    """Which node's result first has a size that depends on data."""
    made: dict[Any, Node] = {}
    for n in nodes:
        for t in n.val if isinstance(n.val, (list, tuple)) else (n.val,):
            if isinstance(t, Tensor):
                for s in private.free_unbacked_symbols(t):
                    made.setdefault(s, n)
    return made


def _name(target: Any) -> str:
    if isinstance(target, private.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(target)


def _one_memory(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and bool(private.storage_of(a) == private.storage_of(b))
    )


def _is_view(node: Node) -> bool:
    return node.target is operator.getitem or bool(node.args) and isinstance(node.args[0], Node) \
        and _one_memory(node.val, node.args[0].val)  # fmt: skip


def same_memory(source: Tensor, val: Tensor, grad: bool) -> list[View] | None:
    """Views that lead from one tensor to another over the same memory; None: none that is known, or its sizes are
    symbols."""
    a, b = [[(as_written(n), as_written(m)) for n, m in zip(t.shape, t.stride(), strict=True)] for t in (source, val)]
    if source.dtype != val.dtype or as_written(source.storage_offset()) != as_written(val.storage_offset()):
        return None
    if a == b:
        return [View(aten.alias.default, (), {}, -1, grad)]
    if any(not isinstance(n, int) for pair in (*a, *b) for n in pair):
        return None
    if sorted(a) == sorted(b) and len(set(a)) == len(a):
        return [View(aten.permute.default, ([a.index(pair) for pair in b],), {}, -1, grad)]
    wide = [*[(1, 0)] * (len(b) - len(a)), *a]
    if len(wide) == len(b) and all(x == y or x[0] == 1 and (y[0] == 1 or y[1] == 0)
                                   for x, y in zip(wide, b, strict=True)):  # fmt: skip
        return [View(aten.expand.default, (list(val.shape),), {}, -1, grad)]
    if source.numel() == val.numel() and source.is_contiguous() and val.is_contiguous():
        return [View(aten.view.default, (list(val.shape),), {}, -1, grad)]
    return None


def _view_again(node: Node, item: int) -> list[View] | None:
    """How to make this view of another tensor; None: it depends on sizes that are symbols, or is no ATen view of its
    first argument alone."""
    if node.target == STOP:
        return [View(aten.detach.default, (), {}, -1, True)]
    rest = [*node.args[1:], *node.kwargs.values()]
    flat = [y for x in rest for y in (x if isinstance(x, (list, tuple)) else [x])]
    if not isinstance(node.target, private.OpOverload) or not isinstance(node.args[0], Node) or any(
        isinstance(x, (Node, torch.SymInt, torch.SymFloat)) for x in flat
    ):
        return None
    return [View(node.target, node.args[1:], node.kwargs, item, node.grad)]


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            yield m.graph


def _writes(node: fx.Node) -> bool:
    t = node.target
    if not isinstance(t, private.OpOverload):
        return False
    return bool(t._schema.is_mutable) or t is aten.batch_norm.default


def _bound(node: Node) -> dict[str, Any]:
    """Arguments of a view by schema name, defaults filled in."""
    out: dict[str, Any] = {}
    for i, a in enumerate(node.target._schema.arguments):
        out[a.name] = node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
    return out


def pure_of(target: Any) -> Any:
    """The operation that returns what the in-place one writes: of the same name and the same arguments, whatever the
    overload is called (pow_.Scalar is pow.Tensor_Scalar)."""
    name = _name(target)
    if not name.endswith("_") and not name.startswith("__i"):
        return None
    base = "__" + name[3:] if name.startswith("__i") else name[:-1]
    packet = aten.normal_functional if base == "normal" else getattr(aten, base, None)
    if packet is None or len(target._schema.returns) != 1:
        return None
    want = [str(a.type) for a in target._schema.arguments]
    found = [
        op
        for op in (getattr(packet, o) for o in packet.overloads())
        if not op._schema.is_mutable
        and [str(a.type) for a in op._schema.arguments] == want
        and len(op._schema.returns) == 1
    ]
    same = [op for op in found if op._overloadname == target._overloadname]
    return (same or found or [None])[0]


def _without_out(target: Any) -> Any:
    want = [a.name for a in target._schema.arguments if a.name != "out"]
    packet = getattr(aten, _name(target))
    for overload in packet.overloads():
        op = getattr(packet, overload)
        if not op._schema.is_mutable and [a.name for a in op._schema.arguments][: len(want)] == want:
            return op
    return None


def functionalize(exported: Exported) -> Program:
    """Training IR -> pure nodes and write-backs; raises CaptureError where an edit has no functional form."""
    return _Functionalizer(exported).go()
