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
no_grad, or through a detached view, keeps the gradient of the old value: base := THROUGH(new, old). What is detached
takes the gradient of what is written into it (V.own), and keeps it whatever its base becomes. A value that is written
over and not read gets a gradient of zeros, which is not None: base := ZERO(new, old).

Invariants: the list is in topological order and free of dead nodes; nodes have no side effects; a node's `val` is the
fake tensor (or tuple of them) that the export recorded or, for nodes made here, that the operation gives on fake
tensors.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from .. import autocast
from .. import torch_private as private
from ..errors import CaptureError
from . import checkpoints, layouts, marks
from .aliases import DROPOUTS, EACH, MAYBE, RESHAPES, SAME, WHOLE, Base, Held, V, one_memory, same_memory
from .export import Exported, Source, source_of
from .opaque import CUT, HOST, SHARES
from .operands import named
from .program import BATCH_NORM, COPY, FILL, INPUT, STOP, THROUGH, ZERO, Node, Program, View, is_float, name_of
from .results import check_unshared, finish, needs_gradient

aten = torch.ops.aten

_SKIP = {
    "_assert_scalar",
    "_assert_async",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_functional_assert_async",
    "_functional_assert_scalar",
}
_MAY_COPY = {"reshape", "reshape_as", "flatten", "ravel"}
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
# Comparisons in place: autograd gives the operands zeros, or has not heard of the operation.
_STEPS = {f"{op}_": True for op in ("eq", "ne", "lt", "le", "gt", "ge")} | {
    f"logical_{op}_": False for op in ("and", "or", "xor", "not")
}

# They write nothing: the tensor sees its memory in another way, its views do not.
_TURNS = {"t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"}
_DRAWS = {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}


class Functionalizer:
    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.program = Program()
        self.src_of = source_of()
        self.src: tuple[str, str, int] = ("", "", 0)
        self.checkpoints: list[str] = []  # the open ones
        # Under a capture-wide no_grad nothing needs a gradient: then regions make no difference.
        self.grad = True
        self.grad_matters = exported.grad_mode
        self.enabled = False  # gradients, within a call that computes none
        self.trained: set[int] = set()  # storages of inputs that require or may require a gradient, in such a call
        self.autocast = exported.autocast
        self.fake_mode: Any = None
        self.held: list[tuple[Source, Base]] = []
        self.mutates = any(_writes(n) for g in _graphs(exported.graph_module) for n in g.nodes)
        # contiguous() of what is so for some sizes: its operand, the version of that then, and its result
        self.same_or_copy: list[tuple[V, int, V]] = []
        self.reshaped: list[tuple[V, int, V]] = []  # the same of reshape()
        self.memory: dict[int, set[Base]] = {}  # which values have had tensors over a storage of the trace
        self.edited: dict[fx.Node, fx.Node] = {}  # what an edit in place returns -> the tensor that it has edited

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
        return node if not self.grad or node.grad or not is_float(node.val) else self.stop(node)

    def stop(self, node: Node) -> Node:
        if node.stopped is None:
            node.stopped = self.make(STOP, (node,), {}, node.val)
        return node.stopped

    # --- reads and writes

    def read(self, v: V) -> Node:
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
                if v.own is not None:
                    node = v.own = self.through(node, v.own)
                v.node = node
            v.version = v.base.version
        return self.use(v.node)

    def through(self, value: Node, old: Node) -> Node:
        """`value` with the gradients of `old` alone."""
        node = self.make(THROUGH, (self.stop(value), old), {}, old.val)
        node.grad = True
        return node

    def only_by_data(self, v: V, new: Node) -> bool:
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

    def write(self, v: V, new: Node, over: bool = False, loud: bool = True) -> None:
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
        detached: list[V] = []  # they take a gradient of their own
        while cur.parent is not None:
            assert cur.view is not None
            keeps_gradient |= cur.is_detached() or not cur.view.grad
            over = over and name_of(cur.view.target) in WHOLE
            if self.grad and cur.is_detached() and (cur.own is not None or needs_gradient(self, value)):
                cur.node = cur.own = self.make(ZERO, (value, cur.own), {}, value.val) if over and cur.own else value
                detached.append(cur)
                value = self.stop(value)
            value = self.scatter(cur, value)
            cur = cur.parent
        if keeps_gradient and self.grad_matters and is_float(old.val) and old.grad:
            value = self.through(value, old)
        elif over and self.grad_matters and old.differentiable():
            value = self.make(ZERO, (value, old), {}, old.val)
        v.base.node = value
        v.base.version += 1
        for cur in detached:
            cur.version = v.base.version
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
            base = Base(item)
            base.held = item
            items.append(V(base, item))
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
                check_unshared(self.exported, source, [s for s, _ in self.held])
                self.program.flushes[cut].append((base.input, base.node))
                base.node = base.input
                base.version += 1
                base.flushed = base.version
        return cut

    def sync(self, base: Base) -> None:
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

    def scatter(self, v: V, new: Node) -> Node:
        """A new value of v's parent in which v is `new`."""
        assert v.parent is not None and v.view is not None
        view, parent = v.view, self.read(v.parent)
        name, val = name_of(view.target), v.parent.node.val
        a = named(view)
        if name in RESHAPES:
            return self.make("reshape_to", (new,), {}, val)
        if name in SAME:
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
            return self.read(v) if isinstance(v, V) else v
        if isinstance(a, (list, tuple)):
            return [self.arg(x, env) for x in a]
        return a

    def go(self) -> Program:
        gm = self.exported.graph_module
        env: dict[fx.Node, Any] = {}
        same: dict[int, V] = {}
        held = self.held
        for node in gm.graph.nodes:
            if node.op != "placeholder":
                continue
            source, val = self.exported.sources[node.name], node.meta["val"]
            if not isinstance(val, Tensor):
                if isinstance(val, (torch.SymInt, torch.SymFloat)):
                    held.append((source, Base(Node(INPUT, (), {}, val, self.src), True)))
                env[node] = val
                continue
            self.fake_mode = self.fake_mode or getattr(val, "fake_mode", None)
            if not self.grad_matters and is_float(val) and (source.tensor is None or source.tensor.requires_grad):
                self.trained.add(private.storage_of(val))
            if source.tensor is not None and id(source.tensor) in same:
                env[node] = same[id(source.tensor)]
                continue
            base = Base(Node(INPUT, (), {}, val, self.src), True)
            base.constant = node.name.startswith("c_")
            env[node] = self.lies(V(base, base.node))
            held.append((source, base))
            if source.tensor is not None:
                same[id(source.tensor)] = env[node]
        result = self.walk(gm, env)
        self.grad = True
        finish(self, result)
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
                hold: Any = lambda n: Held(env[n])  # noqa: E731
                return fx.node.map_arg(node.args[0], hold)
        return None

    def call(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        target: Any = node.target
        val = node.meta.get("val")
        if self.enabled:
            self.ungraded(node)
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
                if str(getattr(target, "__module__", "")).startswith("torch._functorch."):
                    raise self.fail("forward calls a function transform (torch.vmap, torch.func.jvp)")
                raise self.fail(f"{getattr(target, '__name__', target)}: not an operator the capture knows")
            env[node] = val
        elif name_of(target) in _SKIP:
            pass
        elif target is CUT:
            self.cut(node, env)
        elif target is checkpoints.MARK:
            self.checkpoint(str(node.args[0]), bool(node.args[1]))
        elif not isinstance(val, Tensor) and name_of(target) in ("item", "_local_scalar_dense"):
            if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                read = self.arg(node.args[0], env)
                if is_float(read.val):  # a number in Python: a double, and no gradient comes back from it
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
        self.enabled = enabled and not self.grad_matters
        self.grad = enabled or not self.grad_matters

    def ungraded(self, node: fx.Node) -> None:
        """Where gradients are enabled within a call that computes none, nothing may require one. (torch.distributions
        enables them for what it computes at its first use.)"""
        vals = [of.meta.get("val") for of in node.all_input_nodes]
        if node.target in (HOST, CUT) or any(
            private.storage_of(t) in self.trained for t in vals if isinstance(t, Tensor) and t.layout is torch.strided
        ):
            raise CaptureError("forward enables gradients within a call that computes none", "", *self.src[1:])

    def operation(self, node: fx.Node, target: Any, val: Any, env: dict[fx.Node, Any]) -> None:
        name = name_of(target)
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
            elif name in _MAY_COPY and not layouts.follows(made.args[0].val) and layouts.depends(made.args[0].val):
                of = env[cast(fx.Node, node.args[0])]
                self.reshaped.append((of, of.base.version, v))
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
                if isinstance(v, V):
                    v.base.hosts.append(self.exported.table.rows[index].expected)

    def lies(self, v: V) -> V:
        if isinstance(v.node.val, Tensor) and v.node.val.layout is torch.strided:
            self.memory.setdefault(private.storage_of(v.node.val), set()).add(v.base)
        return v

    def result(
        self, node: fx.Node, made: Node, value: Node, val: Tensor, env: dict[fx.Node, Any], item: int = -1
    ) -> V:
        """The name of a result: a view of an operand, or a value of its own."""
        if not self.mutates:
            return V(Base(value), value)
        first = env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(first, V) and self.aliases(node, val, first):
            return V(first.base, value, first, made, item)
        if name_of(node.target) not in DROPOUTS and node.target is not HOST:
            each = name_of(node.target) in EACH and item >= 0
            for given in [cast("list[fx.Node]", node.args[0])[item]] if each else node.all_input_nodes:  # of einsum
                x = self.edited.get(given, given)
                of, seen = env.get(x), self.again(node)[item] if each and _is_constant(env[x]) else val
                if not isinstance(of, V) or of is first or not one_memory(seen, x.meta.get("val")):
                    continue
                views = same_memory(x.meta["val"], val, self.grad)
                if views is None and name_of(node.target) == "broadcast_tensors":  # of sizes that are symbols
                    views = [View(aten.expand.default, (list(val.shape),), {}, -1, self.grad)]
                if views is None and name_of(node.target) == "meshgrid":  # a row or column, again and again
                    shape = list(val.shape)
                    spread = [n if not isinstance(step, int) or step else 1 for n, step in zip(shape, val.stride())]
                    views = [View(aten.view.default, (spread,), {}, -1, self.grad),
                             View(aten.expand.default, (shape,), {}, -1, self.grad)]
                for view in views or ():
                    step = self.run(view.target, (self.read(of), *view.args), {})
                    of = V(of.base, step, of, step)
                if of is env[x]:
                    raise self.fail(f"{node.target}: its result is a view of an argument, in a way that is not known "
                                    "here; clone it before writing")  # fmt: skip
                return of
        return V(Base(value), value)

    def aliases(self, node: fx.Node, val: Tensor, first: V) -> bool:
        """Whether the result is a view of the first argument: the recorded storages say it, schemas do not always.
        Four exceptions: detach (a view to us), recorded constants (do not share their storage with their views), what
        an edit in place of one returns (has a storage of its own), dropout that drops nothing (is its input, but is
        recorded as a copy)."""
        target, of = node.target, node.args[0]
        assert isinstance(of, fx.Node)
        of = self.edited.get(of, of)
        name = name_of(target)
        if name == "detach":
            return True
        if name in DROPOUTS:
            p, train = cast("tuple[float, bool]", node.args[1:3])
            return not train or p == 0
        if name in RESHAPES | MAYBE and _is_constant(first):
            return one_memory(self.again(node), of.meta["val"])
        if of.op == "placeholder" and of.name.startswith("c_"):
            returns = cast(Any, target)._schema.returns
            return name != "lift_fresh_copy" and bool(returns) and returns[0].alias_info is not None
        return bool(private.storage_of(val) == private.storage_of(of.meta["val"]))

    def again(self, node: fx.Node) -> Any:
        """What an operation gives on what was recorded of its operands: its views share their storage."""
        def recorded(n: fx.Node) -> Any:
            return self.edited.get(n, n).meta.get("val")

        args, kwargs = cast(Any, fx.node.map_arg((node.args, node.kwargs), recorded))
        with self.fake_mode or contextlib.nullcontext(), layouts.no_conditions(self.fake_mode):
            return cast(Any, node.target)(*args, **kwargs)

    def operands_returned(self, node: fx.Node, val: Any, env: dict[fx.Node, Any]) -> dict[int, V]:
        """Results that are an operand itself, by their number (a conversion to what it is already). The trace takes
        such an operand, wherever else it is used, for the result."""
        of = {id(self.edited.get(x, x).meta["val"]): env[x] for x in node.all_input_nodes if isinstance(env.get(x), V)}
        vals = [val] if isinstance(val, Tensor) else [x for x in val if isinstance(x, Tensor)]
        if not any(one_memory(x, y.meta.get("val")) for x in vals for y in node.all_input_nodes):
            return {}
        try:
            out = self.again(node)
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
        env[node] = V(Base(out[0]), out[0])
        return True

    def mutation(self, node: fx.Node, target: Any, env: dict[fx.Node, Any]) -> None:
        schema, name = target._schema, name_of(target)
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        if len(written) != 1:
            raise self.fail(f"{target}: writes {len(written)} of its arguments; one is supported")
        of = cast(fx.Node, given[written[0]])
        v = env[of]
        if not isinstance(v, V):
            raise self.fail(f"{target}: writes something that is not a tensor")
        env[node] = v
        self.edited[node] = self.edited.get(of, of)
        if name == "requires_grad_":
            return
        if name == "detach_":
            at, own = of, [v]
            while v.parent is not None:  # of what is the tensor itself, as torch.tensor(a size) makes it
                v = self.operands_returned(at, at.meta["val"], env).get(0, v)
                if v is env[at]:
                    raise self.fail("detach_: on a view")
                at = cast(fx.Node, at.args[0])
                own.append(v)
            if not is_float(v.node.val):
                return
            for n, x in env.items():
                if isinstance(x, V) and x.base is v.base and x not in own and any(u not in env for u in n.users):
                    raise self.fail("detach_: of a tensor that has views, which keep their gradient; use detach()")
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
            if pure is aten.bernoulli.p:  # its own result is contiguous
                new.val = val
            if name in _TURNS or tuple(new.val.shape) != tuple(val.shape):
                raise self.fail(f"{target}: changes the shape of what it writes")
            if torch.Tag.pointwise in pure.tags and not torch.can_cast(new.val.dtype, val.dtype):
                raise self.fail(f"{target}: {new.val.dtype} is no result for {val.dtype}")
            if new.val.dtype != val.dtype:
                new = self.make(aten.to.dtype, (new, val.dtype), {}, val)
            if self.grad and name in _STEPS and is_float(val):
                over = [x for x in args if isinstance(x, Node)]
                new = self.make(*((ZERO, (new, *over)) if _STEPS[name] else (THROUGH, (new, over[0]))), {}, val)
        self.write(v, new, name in ("copy_", "fill_", "zero_") or name in _DRAWS)


def _is_constant(v: Any) -> bool:
    """Is it, or a view of it, a tensor that is neither parameter nor buffer nor argument?"""
    return isinstance(v, V) and v.base.constant


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            yield m.graph


def _writes(node: fx.Node) -> bool:
    t = node.target
    if not isinstance(t, private.OpOverload):
        return False
    return bool(t._schema.is_mutable) or t is aten.batch_norm.default


def pure_of(target: Any) -> Any:
    """The operation that returns what the in-place one writes: of the same name and the same arguments, whatever the
    overload is called (pow_.Scalar is pow.Tensor_Scalar)."""
    name = name_of(target)
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
    packet = getattr(aten, name_of(target))
    for overload in packet.overloads():
        op = getattr(packet, overload)
        if not op._schema.is_mutable and [a.name for a in op._schema.arguments][: len(want)] == want:
            return op
    return None


def functionalize(exported: Exported) -> Program:
    """Training IR -> pure nodes and write-backs; raises CaptureError where an edit has no functional form."""
    return Functionalizer(exported).go()
