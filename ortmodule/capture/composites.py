"""Operators without a row that PyTorch computes by others (losses, distances): taken apart, as PyTorch does it, on the
tensors of the trace.

The operator runs once on its fake operands, under a mode that notes which operators it comes down to; these become
nodes in its place. What PyTorch differentiates is the same, since such an operator has no derivative of its own. Edits
in place of what it has made itself become values. None of this may ask about sizes: a guard that is new now would be
forgotten.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import autocast
from .. import torch_private as private
from .functional import pure_of
from .program import COPY, FILL, Node

_VALUES = {"copy_": COPY, "fill_": FILL, "zero_": FILL}


class _NotApart(Exception):
    """It stays one operator."""


class _Notes(private.DispatchMode):  # type: ignore[misc]
    def __init__(self, given: dict[int, Node], alive: list[Tensor], like: Node) -> None:
        super().__init__()
        self.known = given  # by the id of the tensor
        self.given = set(given)
        self.alive = alive  # all of them, so that an id stays one tensor's
        self.like = like
        self.nodes: list[Node] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.written(func, args, kwargs, out)
        elif isinstance(out, Tensor):
            self.name(out, self.make(func, args, kwargs, out))
        elif isinstance(out, (list, tuple)) and all(isinstance(t, Tensor) for t in out):
            made = self.make(func, args, kwargs, tuple(out))
            for i, t in enumerate(out):
                self.name(t, self.node(operator.getitem, (made, i), {}, t))
        else:
            raise _NotApart
        return out

    def make(self, func: Any, args: Any, kwargs: dict[str, Any], val: Any) -> Node:
        return self.node(func, tuple([self.of(a) for a in args]), {k: self.of(a) for k, a in kwargs.items()}, val)

    def node(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> Node:
        self.nodes.append(Node(func, args, kwargs, val, self.like.src, self.like.grad, self.like.autocast))
        return self.nodes[-1]

    def of(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if id(a) not in self.known:
                raise _NotApart
            return self.known[id(a)]
        return [self.of(x) for x in a] if isinstance(a, (list, tuple)) else a

    def name(self, t: Tensor, node: Node) -> None:
        self.known[id(t)] = node
        self.alive.append(t)

    def written(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Only what it has made, and of which there is no view."""
        t, name = args[0], func._schema.name.partition("::")[2]
        where = private.storage_of(t)
        shared = any(x is not t and private.storage_of(x) == where for x in self.alive)
        if out is not t or id(t) in self.given or shared:
            raise _NotApart
        if name in _VALUES:
            value = 0 if name == "zero_" else self.of(args[1])
            self.known[id(t)] = self.node(_VALUES[name], (value,), {}, t)
            return
        pure = pure_of(func)
        if pure is None or any(isinstance(a, Tensor) and a.dtype != t.dtype for a in args):
            raise _NotApart
        self.known[id(t)] = self.make(pure, args, kwargs, t)


def apart(n: Node, has_row: Callable[[Any], bool]) -> tuple[list[Node], Node] | None:
    """The nodes that this one comes down to, and the one of them that is its result. None: it is no such operator, or
    one of them has no row."""
    target, schema = n.target, n.target._schema
    if not private.has("composite_kernel") or not private.has("DispatchMode") or n.autocast or schema.is_mutable:
        return None
    if not isinstance(n.val, Tensor) or not target.has_kernel_for_dispatch_key(private.composite_kernel):
        return None
    mode = next((i.val.fake_mode for i in n.inputs() if hasattr(i.val, "fake_mode")), None)
    if mode is None:
        return None
    given: dict[int, Node] = {}
    alive: list[Tensor] = []

    def val(a: Any) -> Any:
        if isinstance(a, Node):
            if isinstance(a.val, Tensor):
                given[id(a.val)] = a
                alive.append(a.val)
            return a.val
        return [val(x) for x in a] if isinstance(a, (list, tuple)) else a

    args, kwargs = [val(a) for a in n.args], {k: val(a) for k, a in n.kwargs.items()}
    guards = mode.shape_env.guards if mode.shape_env is not None else []
    before = len(guards)
    try:
        with (
            private.size_config.patch(backed_size_oblivious=True) if private.size_config else contextlib.nullcontext(),
            mode,
            torch.no_grad(),
            autocast.off(),
            _Notes(given, alive, n) as notes,
        ):
            out = target(*args, **kwargs)
        result = notes.of(out)
    except Exception:  # noqa: BLE001  (whatever stands in the way: it stays one operator)
        return None
    if len(guards) != before or result.val.dtype != n.val.dtype or result.val.dim() != n.val.dim():
        return None
    if not all(x.target is operator.getitem or has_row(x.target) for x in notes.nodes):
        return None
    return notes.nodes, result
