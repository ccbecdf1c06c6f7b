"""The end of a capture: which values of the graph are the call's results, write-backs, views of arguments, and what of
memory a later call must share for them to stay so."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import patches
from .. import torch_private as private
from ..errors import CaptureError
from . import layouts
from .aliases import (
    EACH,
    EXPANDS,
    MAYBE,
    ONE_LAYOUT,
    RESHAPES,
    SIZED,
    STRICT,
    Held,
    V,
    is_view,
    lies,
    one_memory,
    same_memory,
    view_again,
)
from .export import Exported, Source
from .opaque import HOST
from .program import COPY, INPUT, SIZES, THROUGH, ZERO, Node, View, draws, name_of, nodes_in

if TYPE_CHECKING:
    from .functional import Functionalizer

aten = torch.ops.aten


def finish(of: Functionalizer, result: Any) -> None:
    """Fills in the program's outputs, writes, views and inputs; drops dead nodes. result: what the trace returns."""
    _Results(of).finish(result)


def tensor_of(exported: Exported, source: Source) -> Any:
    return exported.leaves[source.leaf] if source.kind == "user" else source.tensor


def needs_gradient(of: Functionalizer, node: Node) -> bool:
    """Does PyTorch give it a grad_fn?"""
    tensors = [(tensor_of(of.exported, source), base.input) for source, base in of.held]
    leaves = {made for t, made in tensors if isinstance(t, Tensor) and t.requires_grad}
    rest, seen = [node] if of.grad_matters else [], set[Node]()
    while rest:
        n = rest.pop()
        if n not in seen and n.differentiable() and n.target is not aten.detach.default:
            if n in leaves:
                return True
            seen.add(n)
            rest += n.inputs()
    return False


def check_unshared(exported: Exported, source: Source, sources: list[Source]) -> None:
    """A write must not be visible through another input that is a different object over the same memory."""
    mine = tensor_of(exported, source)
    for other in sources:
        t = tensor_of(exported, other)
        if other is source or not isinstance(t, Tensor) or not isinstance(mine, Tensor):
            continue
        if t is mine and "const_attr" not in (source.kind, other.kind):
            continue
        if t.numel() and mine.numel() and t.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr():
            a, b = source.target or f"input {source.leaf}", other.target or f"input {other.leaf}"
            raise CaptureError(f"{a} is written in place and shares its memory with {b}; clone one of them")


class _Results:
    def __init__(self, of: Functionalizer) -> None:
        self.of, self.exported, self.program, self.held = of, of.exported, of.program, of.held
        self.mutates, self.grad_matters = of.mutates, of.grad_matters
        self.same_or_copy, self.reshaped, self.memory = of.same_or_copy, of.reshaped, of.memory

    def finish(self, result: Any) -> None:
        p, held = self.program, self.held
        inputs = {i: base.input for i, of in self.exported.same.items() for source, base in held
                  if base.input is not None and of == (source.leaf if source.kind == "user" else source.target)}
        result = [x.v if isinstance(x, Held) else x for x in result]
        last = len(result) - len(self.exported.conditions)
        end = last - self.exported.n_made
        tried = [v.node for v in result[end:last] if isinstance(v, V)]
        result = result[:end] + result[last:]
        for i, v in enumerate(result):
            if isinstance(v, V):
                out: Any = self.of.read(v)
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
                check_unshared(self.exported, source, [s for s, _ in held])
                t = tensor_of(self.exported, source)
                trained = source.kind != "user" and isinstance(t, Tensor) and t.requires_grad and t.is_leaf
                if not trained and not base.untrained and needs_gradient(self.of, base.node):
                    what = "an argument" if source.kind == "user" else source.target or "a tensor of its own"
                    raise CaptureError(f"forward writes what requires a gradient into {what} that requires none",
                                       "", *base.node.src[1:])  # fmt: skip
                p.writes.append((base.input, base.node))
        p.edited = [source for source, base in held if base.version > 0 and source.kind != "constant"]
        self.check_returned({base.input for source, base in held if source.kind == "user"})
        p.quiet = {base.input for _, base in held if base.input is not None and base.version > 0 and not base.loud}
        p.edits = self.mutates
        p.layouts = self.layouts_that_matter()
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

    def pin_layouts(self) -> None:
        """Who can tell whether contiguous() or reshape() has made a copy: an edit of one of the two afterwards, who is
        given a result, or who looks. For them the answer is a condition on sizes."""
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
        for v, version, result in self.reshaped:
            apart = result.base is not v.base
            seen = v.base.version > version or apart and result.base.version > 0
            seen = seen or result.node in returned and self.given_twice(v, result)
            if seen and layouts.pin_view(v.node.val, result.node.val.shape) is apart:
                raise CaptureError("reshape: whether it is a view depends on sizes, and somebody sees it", "",
                                   *result.node.src[1:])  # fmt: skip
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

    def given_twice(self, v: V, result: V) -> bool:
        """Has the caller, beside the result, something else over the memory of what it may be a view of?"""
        def through(n: Any) -> bool:
            while isinstance(n, Node) and n is not result.node:
                n = n.args[0] if n.args else None
            return n is result.node

        return v.base.input is not None or any(
            one_memory(n.val, v.node.val) and not through(n) for n in self.program.outputs if isinstance(n, Node)
        )

    def follow(self, t: Tensor) -> tuple[set[Node], set[Node], bool]:
        """Nodes over the memory of what contiguous() has given back as it was; those whose strides follow from its; and
        whether other strides might forbid one of these. For other sizes contiguous() copies: the trace knows the
        strides of now alone. What is contiguous can be viewed in any way, which gives what is contiguous."""
        at, like = private.storage_of(t), lies(t)
        own = {n for n in self.program.nodes if isinstance(n.val, Tensor) and private.storage_of(n.val) == at}
        dense, found, strict = {n for n in own if lies(n.val) == like}, set[Node](), False
        for n in self.program.nodes if not layouts.follows(t) else ():
            name = name_of(n.target)
            given = [x for x in n.inputs() if x in dense or x in found]
            if not given or n in dense or name in ONE_LAYOUT or isinstance(n.val, Tensor) and n.val.dim() == 0:
                continue
            if given[0] in dense and (name in RESHAPES or name == "contiguous"):
                dense.add(n)
            else:
                strict = strict or name in STRICT
                found.add(n)
        return own, dense | found, strict

    def returned(self) -> set[Node]:
        """What results, and buffers to which forward assigns, may be views of, whatever the strides."""
        rest = [out for out in self.program.outputs if isinstance(out, Node)]
        for source, base in self.held:
            if source.kind == "buffer" and source.target in self.exported.rebinds:
                n = base.node
                while n.target in (THROUGH, ZERO, COPY) or name_of(n.target) == "clone":  # how it is written
                    n = n.args[0]
                rest.append(n)
        found: set[Node] = set()
        while rest:
            out = rest.pop()
            if out not in found:
                found.add(out)
                of = out.args[0] if out.target is operator.getitem else out
                if of is not out or name_of(of.target) in MAYBE or is_view(of):
                    rest += [x for x in of.inputs() if isinstance(x.val, Tensor)]
        return found

    def check_returned(self, arguments: Collection[Node | None]) -> None:
        """What is kept in PyTorch may return memory of what it is given. Whoever has both, sees it."""
        p = self.program
        known = {x for x in (*arguments, *p.outputs) if isinstance(x, Node)}

        def root(x: Any) -> Any:
            while isinstance(x, Node) and x not in known and x.target is not HOST and is_view(x):
                x = x.args[0]
            return x

        def item_of(x: Node, made: Node) -> Any:
            while x.args[0] is not made:
                x = x.args[0]
            return x.args[1]

        for i, out in enumerate(p.outputs):
            made = root(out.args[0]) if isinstance(out, Node) and is_view(out) else None
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

    def layouts_that_matter(self) -> set[int]:
        """Arguments whose strides a later call must share. Strides go from operands to results."""
        p = self.program
        returned: set[Node] = set()  # what an output may be a view of
        for out in p.outputs:
            while isinstance(out, Node) and out not in returned:
                returned.add(out)
                out = next((a for a in nodes_in(out.args) if isinstance(a.val, Tensor)), None) \
                    if name_of(out.target) in MAYBE or is_view(out) else None  # fmt: skip
        own = -1  # a parameter or buffer
        of: dict[Node, frozenset[int]] = {
            base.input: frozenset((s.leaf if s.kind == "user" else own,)) for s, base in self.held
            if s.kind != "constant" and base.input is not None and isinstance(base.input.val, Tensor)
        }  # fmt: skip
        none: frozenset[int] = frozenset()
        matter: set[int] = set()
        for n in p.nodes:
            name = name_of(n.target)
            given = none.union(*[of.get(x, none) for x in n.inputs()])
            drawn = draws(n)  # in the order of memory
            if drawn or name in STRICT or name in MAYBE and (self.mutates or n in returned):
                matter |= given - {own}
            p.own_layouts = p.own_layouts or (drawn or name == "as_strided") and own in given
            if given and name not in ONE_LAYOUT and not (isinstance(n.val, Tensor) and n.val.dim() == 0):
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
            if isinstance(n.target, private.OpOverload) and not is_view(n):
                raise CaptureError(
                    f"{n.target} in a try statement: nobody reads its result, but perhaps its exception",
                    n.src[0], n.src[1] or file, n.src[2] or line)

    def find_views(self, result: list[Any], inputs: Collection[Node | None]) -> None:
        """Outputs that share memory with an input or with another output, so that who edits one in place sees it in the
        other."""
        p = self.program
        others = {out: i for i, out in reversed([*enumerate(p.outputs)]) if isinstance(out, Node)}
        for out, i in [*others.items()]:
            others.setdefault(_itself(out), i)

        def whole(out: Node) -> bool:
            """The engine's outputs are dense: only of those that are so in PyTorch, too, a view is the view that
            PyTorch has."""
            return isinstance(out.val, Tensor) and layouts.pin(out.val)

        for i, out in enumerate(p.outputs):
            if i in p.passthrough or not isinstance(out, Node) or others[out] != i:
                continue
            chain: list[View] = []
            known, own = True, False
            v: V | None = result[i]
            node = out
            while True:
                item = -1
                # edits may lie between: the chain of views knows, the nodes do not
                if v is not None and v.parent is not None:
                    assert v.view is not None
                    own = own or v.own is not None
                    made, item, v = v.view, v.item, v.parent
                    source: Any = v.base.input if v.parent is None and v.base.input is not None else self.of.read(v)
                else:
                    v = None
                    made = node
                    if made.target is operator.getitem:
                        item, made = made.args[1], made.args[0]
                    source = made.args[0] if made.args and made.target is not INPUT else None
                    if isinstance(source, (list, tuple)) and name_of(made.target) in EACH and item >= 0:
                        source = source[item]
                    elif isinstance(source, (str, list, tuple)):  # einsum
                        source = next((x for x in made.inputs() if one_memory(node.val, x.val)), None)
                    if not isinstance(source, Node) or not one_memory(node.val, source.val):
                        break
                again = view_again(made, item) or same_memory(source.val, node.val, made.grad)
                if again is None and node is out and name_of(made.target) in SIZED:
                    target = aten.expand if name_of(made.target) in EXPANDS else aten.view
                    again = [View(target.default, (SIZES,), {}, -1, made.grad)]
                known = known and again is not None
                chain[:0] = again or []
                node = source
                if node in inputs or (others.get(node, i) != i and whole(node)):
                    if own:
                        raise CaptureError("a result is a detached tensor over memory of an argument or of another "
                                           "result, into which forward wrote what requires a gradient", *made.src)
                    if not known:  # with numbers for sizes it may be
                        raise CaptureError(f"a result is a view ({made.target}) of an argument or of another result, "
                                           "in a way that is not known here", *made.src)  # fmt: skip
                    p.views[i] = (node if node in inputs else p.outputs[others[node]], chain)
                    break


def _itself(out: Node) -> Node:
    """What a result is the same tensor as: a conversion to what it is already returns its operand."""
    while out.target is not aten.detach.default and out.differentiable():
        made = out.args[0] if out.target is operator.getitem else out
        of = next((x for x in made.inputs() if _alike(out.val, x.val)), None)
        if of is None:
            break
        out = of
    return out


def _alike(a: Any, b: Any) -> bool:
    return one_memory(a, b) and a.dtype == b.dtype and lies(a) == lies(b)


def _sizes_in(args: Any) -> Iterator[Any]:
    """Symbols of sizes that depend on data, among the numbers of a call."""
    for a in args if isinstance(args, (list, tuple)) else (args,):
        if isinstance(a, (list, tuple)):
            yield from _sizes_in(a)
        elif isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield from private.free_unbacked_symbols(a)


def _made_sizes(nodes: list[Node]) -> dict[Any, Node]:
    """Which node's result first has a size that depends on data."""
    made: dict[Any, Node] = {}
    for n in nodes:
        for t in n.val if isinstance(n.val, (list, tuple)) else (n.val,):
            if isinstance(t, Tensor):
                for s in private.free_unbacked_symbols(t):
                    made.setdefault(s, n)
    return made
