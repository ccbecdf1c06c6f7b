"""A call of a capture that holds for one way through forward (capture/branches.py): until its conditions are known to
hold, nothing has happened.

What a graph does besides computing is to write buffers and arguments, and to draw a seed. Both are noted before it runs
and put back when a condition goes the other way; modules and custom Functions that PyTorch would run are not in such a
graph, nor are hooks on submodules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda_engine
from . import torch_private as private
from .capture.branches import Answers, Condition, NoBranches, Other
from .chain import Graph

__all__ = ["Answers", "Condition", "Moment", "NoBranches", "Other", "agree"]


def agree(known: Answers, prefix: Answers) -> bool:
    """Does a capture begin with these answers?"""
    return [(c.asked, c.answer) for c in known[: len(prefix)]] == [(c.asked, c.answer) for c in prefix]


class Moment:
    """What a run of the graph may change, as it is."""

    def __init__(self, graph: Graph, tensors: Sequence[Tensor]) -> None:
        self._cuda = graph.cuda
        self._random = cuda_engine.random_states(graph.cuda) if graph.random or graph.host.ops else None
        self._written = [
            (t, t.detach().clone(), None if t.is_inference() else t._version)
            for t in (tensors[i] for i in graph.writes)
        ]

    def put_back(self) -> None:
        if self._random is not None:
            cuda_engine.set_random_states(self._cuda, self._random)
        with torch.no_grad():
            for t, old, version in self._written:
                t.detach().copy_(old)
                if version is not None:
                    private.set_version((t,), (version,))
