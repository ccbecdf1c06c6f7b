"""Rows of the operator table for recurrent layers and their cells: one node per layer and direction, torch's order of
weights and gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .convert import Converter, NotHere, row
from .onnx_build import Val, shape_of
from .ops_nn import dropped
from .program import Node

_KIND = {"lstm": ("LSTM", 4), "gru": ("GRU", 3), "rnn_tanh": ("RNN", 1), "rnn_relu": ("RNN", 1)}


def _direction(
    c: Converter, kind: str, x: Val, weights: Sequence[Val | None], h: Val, cell: Val | None, reverse: bool
) -> list[Val]:
    """x (t, n, i), weights w_ih, w_hh, b_ih, b_hh (None: zeros), states (n, h) -> y (t, n, h), last h, last c."""
    op, gates = _KIND[kind]
    size = h.shape[1]
    zero = None if weights[2] else c.fill(0, x.dtype, (gates * size,))
    ins = [x, weights[0], weights[1], weights[2] or zero, weights[3] or zero, h, *([cell] if cell else [])]
    state = (x.dtype, (x.shape[1], size))
    types = [(x.dtype, (x.shape[0], x.shape[1], size)), *([state] * (2 if cell else 1))]
    attrs = {"hidden_size": size, "reverse": int(reverse), "direction": "reverse" if reverse else "forward"}
    if op == "RNN":
        attrs |= {"nonlinearity": kind[4:], "activations": [kind[4:].capitalize()]}
    return c.b.ops(op, ins, types, "ortmodule", **attrs)


@row("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(
    c: Converter, n: Node, x: Node, states: Any, params: Sequence[Node], biases: bool, layers: int, p: float,
    train: bool, both: bool, batch_first: bool,
) -> list[Val]:  # fmt: skip
    kind = n.target._schema.name.removeprefix("aten::")
    dtype = n.val[0].dtype
    v = c.num(x, dtype)
    first = [c.num(s, dtype) for s in (states if isinstance(states, (list, tuple)) else [states])]
    dirs, per = 2 if both else 1, 4 if biases else 2
    weights = [c.num(w, dtype) for w in params]
    if len(weights) != layers * dirs * per:
        raise NotHere("a recurrent layer with projections (proj_size)")
    size = first[0].shape[2]
    if not isinstance(size, int) or any(not isinstance(d, int) for w in weights for d in w.shape):
        raise NotHere("a recurrent layer of symbolic size")
    if v.rank != 3 or v.shape[0] == 0 or v.shape[1] == 0:
        raise NotHere("a recurrent layer over nothing")
    if batch_first:
        v = c.swap(v, 0, 1)
    last: list[list[Val]] = [[] for _ in first]
    for layer in range(layers):
        ys = []
        for d in range(dirs):
            k = layer * dirs + d
            own: list[Val | None] = [*weights[k * per : (k + 1) * per], *([None] * (4 - per))]
            at = [c.squeeze(c.slice(s, 0, k, k + 1, 1, 1), [0]) for s in first]
            y, *end = _direction(c, kind, v, own, at[0], at[1] if len(at) > 1 else None, d == 1)
            ys.append(y)
            for whole, e in zip(last, end, strict=True):
                whole.append(c.unsqueeze(e, [0]))
        v = c.concat(ys, 2)
        if p and train and layer < layers - 1:
            v = dropped(c, v, p)
    if batch_first:
        v = c.swap(v, 0, 1)
    return [v, *(c.concat(parts, 0) for parts in last)]


@row("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(
    c: Converter, n: Node, x: Node, states: Any, w_ih: Node, w_hh: Node, b_ih: Node | None, b_hh: Node | None
) -> Any:
    """A sequence of one step."""
    kind = n.target._schema.name.removeprefix("aten::").removesuffix("_cell")
    val = n.val[0] if isinstance(n.val, (list, tuple)) else n.val
    dtype: torch.dtype = val.dtype
    v = c.num(x, dtype)
    first = [c.num(s, dtype) for s in (states if isinstance(states, (list, tuple)) else [states])]
    weights = [None if w is None else c.num(w, dtype) for w in (w_ih, w_hh, b_ih, b_hh)]
    if v.rank != 2 or not isinstance(first[0].shape[1], int) or (b_ih is None) != (b_hh is None):
        raise NotHere("a recurrent cell of symbolic size or with one bias")
    _, *end = _direction(c, kind, c.unsqueeze(v, [0]), weights, first[0], first[1] if len(first) > 1 else None, False)
    assert end[0].shape == shape_of(val)
    return end if kind == "lstm" else end[0]
