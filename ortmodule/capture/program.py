"""The pure graph that a capture is: a flat list of operations without side effects, and what the call reads and writes.

Made by functional.py, read by everything behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import autocast
from .. import torch_private as private
from .export import Source

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
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout",
    "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"))  # fmt: skip

_SLOPES = ("rrelu", "rrelu_with_noise")  # drawn in training


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
                float_ = not isinstance(n.val, Tensor) or is_float(n.val)
                n.reached = float_ and n.grad and n.target == INPUT
                if float_ and n.grad and n.target != STOP:
                    unknown = [i for i in n.inputs() if i.reached is None]
                    n.reached = None if unknown else n.reached or any([i.reached for i in n.inputs()])
                    rest += unknown
            if n.reached is not None:
                rest.pop()
        return bool(self.reached)

    def inputs(self) -> Iterator[Node]:
        yield from nodes_in(self.args)
        yield from nodes_in(tuple(self.kwargs.values()))


def nodes_in(args: Any) -> Iterator[Node]:
    for a in args:
        if isinstance(a, Node):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from nodes_in(a)


def operand(a: Any, value: dict[Node, Any], number: Callable[[Any], Any]) -> Any:
    """An argument of a node as its operator takes it. (No closure that calls itself: a cycle, and what a call has
    computed would stay until Python looks for cycles.)"""
    if isinstance(a, Node):
        return value[a]
    if isinstance(a, (torch.SymInt, torch.SymFloat)):
        return number(a.node.expr)
    return [operand(x, value, number) for x in a] if isinstance(a, (list, tuple)) else a


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


def is_float(val: Any) -> bool:
    return isinstance(val, Tensor) and (val.dtype.is_floating_point or val.dtype.is_complex)


def is_complex(val: Any) -> bool:
    return any(isinstance(t, Tensor) and t.is_complex() for t in (val if isinstance(val, (list, tuple)) else (val,)))


def name_of(target: Any) -> str:
    if isinstance(target, private.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(target)


def draws(n: Node) -> bool:
    """Does PyTorch draw it from its generator? What drops numbers out is the engine's, which takes one seed for a
    call."""
    tags: Any = getattr(n.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags or n.target._schema.name in _OWN_NUMBERS:
        return False
    given = dict(zip((a.name for a in n.target._schema.arguments), n.args, strict=False)) | n.kwargs
    return name_of(n.target) not in _SLOPES or bool(given.get("training"))
