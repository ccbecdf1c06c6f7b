"""What docs/COVERAGE.md is made of: rows, each a model of a tiny configuration with random weights, and its batches.

A family is a file that adds rows; what it needs and this machine lacks is said in `missing`, and its rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

Size = tuple[int, int]  # batch, length (or the side of an image)
SEQUENCES: tuple[Size, ...] = ((2, 12), (2, 12), (3, 17), (1, 9))
IMAGES: tuple[Size, ...] = ((2, 32), (2, 32), (3, 32), (1, 32))


@dataclass(frozen=True)
class Row:
    """make: the model. batch: (model, batch, length, generator) -> arguments of forward, a dict or a tuple. The first
    two of the four sizes are the same, the last has batch 1."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    batch: Callable[[Any, int, int, Generator], Any]
    sizes: tuple[Size, ...] = SEQUENCES


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # families that this machine cannot build, and why
    left_out: dict[str, str] = field(default_factory=dict)  # models without a tiny configuration, and why

    def add(self, row: Row) -> None:
        assert all(r.name != row.name for r in self.rows), row.name
        self.rows.append(row)


class Family(list[Row]):
    """Rows made of classes, by decorating them: `row = Family("plain torch")`, `@row("name", batch)`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def of(self, name: str, make: Callable[[], nn.Module], batch: Callable[..., Any], sizes: tuple[Size, ...] = SEQUENCES) -> None:
        self.append(Row(name, self.name, make, batch, sizes))

    def __call__(self, name: str, batch: Callable[..., Any], sizes: tuple[Size, ...] = SEQUENCES) -> Callable[[type], type]:
        def add(cls: type) -> type:
            self.of(name, cls, batch, sizes)
            return cls

        return add

    def add_to(self, table: Table) -> None:
        for made in self:
            table.add(made)


def ids(b: int, t: int, g: Generator, low: int = 5, high: int = 60) -> Tensor:
    return torch.randint(low, high, (b, t), generator=g)


def table() -> Table:
    import hugging
    import others
    import packages
    import plain
    import plain_more

    made = Table()
    for family in (plain.row, plain_more.row, hugging, others, packages):
        family.add_to(made)
    return made
