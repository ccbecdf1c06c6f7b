"""What backward computes again, by structure: the table that onnxruntime-training printed, and its configuration file.

A cluster is what computes a value that backward reads, from what is there anyway: "layer_norm+matmul+", operators in
their order, each followed by +. Equal ones are one row, however many layers a model has (csrc/passes/remat_cluster.c).

ORTMODULE_MEMORY_OPT_CONFIG: a JSON file with a list of "cluster:strategy:count", or several of them joined by commas.
strategy 0: keep the value, 1: compute it again, 2: with a compromise (the narrower operand of a cast is kept instead);
count: of so many, first to last, -1 of all. It changes what level 0 computes again. "?cluster:strategy:count": where
there is such a cluster; other names are an error, unless another capture of the same wrapper has had them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .chain import Graph, Variant


class Plan(NamedTuple):
    cluster: str
    strategy: int
    most: int  # of so many; -1: all
    maybe: bool = False  # a graph need not have it

    def __str__(self) -> str:
        return f"{'?' * self.maybe}{self.cluster}:{self.strategy}:{self.most}"

    def row(self, rows: Sequence[Cluster]) -> Cluster | None:
        """Of a graph's clusters the one that is meant: of two of the name strategy 2 means that with a compromise."""
        found = [r for r in rows if r.name == self.cluster and (self.strategy != 1 or not r.compromise)]
        return min(found, key=lambda r: r.compromise != (self.strategy == 2), default=None)


FORMAT = (
    "a JSON file with a list of 'cluster:strategy:count', strategy 0 none, 1 recompute, 2 with compromise, count -1 all"
)


def plan(text: str) -> Plan:
    text = text.strip()
    parts = text.removeprefix("?").split(":")
    numbers = [int(p) if p.strip().lstrip("-").isdigit() else None for p in parts[1:]]
    if len(parts) != 3 or not parts[0] or numbers[0] not in (0, 1, 2) or numbers[1] is None or numbers[1] < -1:
        raise ValueError(f"{text!r} is no 'cluster:strategy:count' with strategy 0, 1 or 2 and count -1 or more")
    return Plan(parts[0], numbers[0], numbers[1], text.startswith("?"))


def read(path: str) -> tuple[Plan, ...]:
    """ValueError when it is no such list."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(str(error)) from error
    if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise ValueError("it holds something else")
    return tuple([plan(one) for row in rows for one in row.split(",")])


@dataclass
class Cluster:
    """A row. bytes: what is not kept when all of them are computed again, of which `formula` is over the sizes; cheap,
    layers: how many of `count` levels 0 and 1 compute again. compromise: strategy 2 alone."""

    name: str
    count: int
    bytes: int
    formula: str
    cheap: int
    layers: int
    compromise: bool
    strategy: int = -1  # of the configuration; -1: it does not say
    asked: int = 0  # of how many it says that


@dataclass
class Table:
    """For the sizes of one step. before: the engine's peak if nothing were computed again; after: its peak."""

    level: int
    config: list[str]
    before: int
    after: int
    sizes: dict[str, int]
    rows: list[Cluster] = field(default_factory=list)
    decided: str = ""  # by what else

    def applied(self, row: Cluster) -> str:
        if self.decided:
            return self.decided
        if row.strategy == 0:
            return f"config: {row.asked} kept"
        if row.strategy > 0:
            return f"config: {row.asked}"
        if row.cheap:
            return f"level 0: {row.cheap}"
        if self.level and row.layers:
            return f"level 1: {row.layers}"
        return f"OFF (level 1: {row.layers})" if row.layers else "OFF"

    def __str__(self) -> str:
        head = ("", "Configs", "Freq", "Applied", "Max Saving(Bytes)", "Saving Symbolic(Bytes)")
        rows = [head]
        for k, row in enumerate(self.rows, 1):
            config = f"{row.name}:{2 if row.compromise else 1}:-1"
            rows.append((f"- Plan {k}", config, str(row.count), self.applied(row), f"{row.bytes:,}", row.formula))
        width = [max(len(r[i]) for r in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, width, strict=True)).rstrip() for r in rows]
        config = f", config [{', '.join(self.config)}]" if self.config else ""
        where = f"; with {', '.join(f'{k}={v}' for k, v in self.sizes.items())}" if self.sizes else ""
        return "\n".join([
            f"Memory Optimizer: level {self.level}{config}; peak {self.before:,} bytes if all were kept, "
            f"{self.after:,} as it is{where}", *lines])  # fmt: skip


def clusters(graph: Graph, variant: Variant, tensors: Sequence[Tensor]) -> list[Cluster]:
    return [Cluster(**row) for row in graph.model.clusters(variant.wanted, variant.arriving, tensors)]


def make(graph: Graph, variant: Variant, tensors: Sequence[Tensor], level: int, plans: Sequence[Plan],
         decided: str = "") -> Table:  # fmt: skip
    """variant: what runs."""
    model = graph.model
    rows = clusters(graph, variant, tensors)
    for one in plans:
        row = one.row(rows)
        if row is not None:
            row.strategy, row.asked = one.strategy, row.count if one.most < 0 else min(one.most, row.count)
    rows.sort(key=lambda row: -row.bytes)
    kept = model.choose(variant.wanted, variant.arriving, variant.group, -1, None)
    sizes = {d: t.shape[axis] for spec, t in zip(graph.captured.inputs, tensors, strict=True)
             for axis, d in enumerate(spec.dims) if isinstance(d, str) and d.isidentifier()}  # fmt: skip
    return Table(level, [str(p) for p in plans], model.memory(kept, tensors)["peak"],
                 model.memory(variant.number, tensors)["peak"], sizes, rows, decided)  # fmt: skip


class Like(NamedTuple):
    """A tensor's sizes. number: its value, when it is one."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: Tensor | None

    def make(self) -> Tensor:
        """Nothing is written to it, so it takes no memory."""
        if self.number is not None:
            return self.number
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


def like(t: Tensor) -> Like:
    return Like(t.shape, t.stride(), t.dtype, None if t.dim() else t.detach().clone())
