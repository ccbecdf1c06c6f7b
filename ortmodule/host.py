"""Yield points: what PyTorch does between two parts of the engine's work.

The engine stops at a host node (an ATen operator without a kernel of its own, a custom autograd.Function, a submodule kept in PyTorch)
and hands over the node's inputs. `drive` answers such stops until the engine is done:
  forward   the inputs are detached, those that are floats require grad, PyTorch computes under enable_grad and builds the node's own
            small autograd graph, a Region; the engine gets the detached outputs. Without a backward: plain no_grad, nothing kept.
  backward  the gradients of the outputs come in, torch.autograd.grad walks the Region, the gradients of the inputs go back.
Regions live in the dictionary of one forward, keyed by the forward node's id, so several forwards may be in flight.

Invariant: input tensors are views of engine memory that ends with the run. A Region outlives it, so its inputs are copies, except when
they are the caller's own tensors (parameters of a submodule in PyTorch): those are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import _C
    from .capture import HostOp


class Region:
    """The autograd graph of one host node in one forward."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs
        self.outputs = outputs


Regions = dict[int, Region]


class Host:
    """The host nodes of one captured graph. `ms` adds up the time spent outside the engine."""

    def __init__(self, ops: Sequence[HostOp]) -> None:
        self.ops = ops
        self.ms = [0.0] * len(ops)

    def drive_forward(self, run: _C.Run, regions: Regions | None, own: Sequence[Tensor]) -> None:
        """Runs a forward to its end. regions: where to leave the Regions; None when no backward follows.
        own: the caller's tensors, one per graph input."""
        stop = run.resume()
        while stop is not None:
            start = perf_counter()
            index, node, inputs = stop
            self._forward(run, index, node, inputs, regions, own)
            self.ms[index] += (perf_counter() - start) * 1e3
            stop = run.resume()

    def drive_backward(self, run: _C.Run, segment: int, regions: Regions, retain: bool) -> None:
        """Runs a backward to the end of `segment` (-1: of everything). retain: keep the Regions usable for another backward."""
        stop = run.resume(segment)
        while stop is not None:
            start = perf_counter()
            index, node, grads = stop
            self._backward(run, regions[node], grads, retain)
            self.ms[index] += (perf_counter() - start) * 1e3
            stop = run.resume(segment)

    def _forward(self, run: _C.Run, index: int, node: int, inputs: list[Tensor], regions: Regions | None, own: Sequence[Tensor]) -> None:
        op = self.ops[index]
        if regions is None:
            with torch.no_grad():
                run.host_done(_as_tuple(op.call(inputs)))
            return
        by_address = {t.data_ptr(): t for t in own if t.numel()} if op.kind == "module" else {}
        leaves: list[Tensor] = []
        for t in inputs:
            mine = by_address.get(t.data_ptr())
            same = mine is not None and mine.shape == t.shape and mine.dtype == t.dtype and mine.stride() == t.stride()
            leaf = mine.detach() if same and mine is not None else t.detach().clone()
            leaves.append(leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf)
        with torch.enable_grad():
            outputs = _as_tuple(op.call(leaves))
        regions[node] = Region(leaves, outputs)
        run.host_done([t.detach() for t in outputs])

    def _backward(self, run: _C.Run, region: Region, grads: list[Tensor], retain: bool) -> None:
        """grads: one per floating-point output. Answers one gradient per floating-point input."""
        float_outputs = [t for t in region.outputs if t.is_floating_point() or t.is_complex()]
        pairs = [(t, g) for t, g in zip(float_outputs, grads, strict=True) if t.requires_grad]
        wanted = [t for t in region.inputs if t.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outputs, incoming = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True, retain_graph=retain)
        run.host_done([torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)])


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
