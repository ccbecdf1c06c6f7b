"""Tensors as names over memory: a base, the views down from it, what ATen calls a view, how to make one again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from .. import torch_private as private
from .layouts import as_written
from .opaque import Expected
from .program import STOP, Node, View

aten = torch.ops.aten
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


class Base:
    __slots__ = ("node", "version", "input", "flushed", "held", "hosts", "kin", "loud", "views", "behind", "untrained",
                 "constant")

    def __init__(self, node: Node, is_input: bool = False) -> None:
        self.node = node
        self.version = 0
        self.flushed = 0  # the version that its write-back before a cut has written
        self.held: Node | None = None  # a hook has seen this value, and may keep the tensor
        self.kin: set[Base] = set()  # values that are the same tensor, unless a hook has put another in its place
        self.hosts: list[Expected] = []  # opaque calls that were given, or have returned, memory of this value
        self.views = False
        self.behind = False  # Tensor.data was read: what autograd keeps of that has no version of this value's
        self.loud = False  # written by more than training batch_norm, whose edit is no new version
        self.untrained = False  # what training batch_norm has put there has no gradient
        self.input = node if is_input else None
        self.constant = False  # a recorded one: neither parameter, buffer nor argument


class V:
    """A tensor name of the IR. view: the Node that derives it from its parent (its first argument is replaced when
    derived again); item: which result of a view with several results; own: of a detached tensor, the value with the
    gradient of what has been written into it, of which the tensor that it was detached from has nothing."""

    __slots__ = ("base", "parent", "view", "item", "node", "version", "own")

    def __init__(
        self, base: Base, node: Node, parent: V | None = None, view: Node | None = None, item: int = -1
    ) -> None:
        self.base = base
        self.parent = parent
        self.view = view
        self.item = item
        self.node = node
        self.version = base.version
        self.own: Node | None = None
        if parent is not None:
            base.views = True
            base.behind |= self.is_data()

    def is_detached(self) -> bool:
        return self.view is not None and self.view.target is aten.detach.default

    def is_data(self) -> bool:
        """Tensor.data (capture/refused.py): an alias below a detach; any other is x[:, :]."""
        above = None if self.parent is None else self.parent.view
        return (self.view is not None and self.view.target is aten.alias.default and above is not None
                and above.target is aten.detach.default)  # fmt: skip


# --- views, by the names of ATen


RESHAPES = {
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
EXPANDS = {"expand", "expand_as", "broadcast_to"}
SIZED = RESHAPES | EXPANDS  # the sizes of their result say all
SAME = {
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
    *DROPOUTS,
}


TRANSPOSES = {
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
WHOLE = RESHAPES | SAME | TRANSPOSES  # views of all elements
# Views that are an error, or see other elements, where strides forbid or have them; what is a view or a copy as the
# strides of its operand have it; results that lie in memory in one way, whatever the operands' strides.
STRICT = frozenset(("view", "view_as", "unflatten", "view_as_real", "view_as_complex", "as_strided"))
MAYBE = frozenset(("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "_to_copy", "einsum", "type_as",
                    "pin_memory", "narrow_copy", "tensordot", "meshgrid", "kron", "block_diag", "atleast_3d"))
EACH = frozenset(("meshgrid", "broadcast_tensors"))  # each result is a view of one of the operands
ONE_LAYOUT = frozenset(("linear", "mm", "bmm", "addmm", "baddbmm", "embedding", "layer_norm"))


def one_memory(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and bool(private.storage_of(a) == private.storage_of(b))
    )


def is_view(node: Node) -> bool:
    return node.target is operator.getitem or bool(node.args) and isinstance(node.args[0], Node) \
        and one_memory(node.val, node.args[0].val)  # fmt: skip


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


def view_again(node: Node, item: int) -> list[View] | None:
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


def lies(t: Tensor) -> list[Any]:
    return [as_written(n) for n in (*t.shape, *t.stride(), t.storage_offset())]


class Held:
    """Wraps values in map_arg, which would look into lists."""

    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = v
