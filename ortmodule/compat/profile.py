"""Ranges for NVIDIA's profilers, a line about memory, a table of text."""

from __future__ import annotations

import functools
import logging
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def torch_nvtx_range_push(msg: str) -> None:
    """Opens a range. Without CUDA nothing happens."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def torch_nvtx_range_pop() -> None:
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def nvtx_function_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """A range of the function's name around each call."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        torch_nvtx_range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            torch_nvtx_range_pop()

    return ranged


def memory_line(phase: str, step_info: str = "", module: nn.Module | None = None) -> str:
    """One line, in MiB. With CUDA what its allocator holds, and of the module what lies there; without, the process's
    resident memory and the module's own."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    cells = [("phase", phase)]

    def add(name: str, size: float) -> None:
        cells.append((name, f"{size / 2**20:.0f}"))

    cuda = torch.cuda.is_available()
    if cuda:
        stats = torch.cuda.memory_stats()
        add("allocated", torch.cuda.memory_allocated())
        add("max allocated", torch.cuda.max_memory_allocated())
        add("cached", torch.cuda.memory_reserved())
        add("max cached", torch.cuda.max_memory_reserved())
        add("inactive", stats.get("inactive_split_bytes.all.current", 0))
        add("max inactive", stats.get("inactive_split_bytes.all.peak", 0))
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        add("max resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    if module is not None:

        def size(tensors: list[Tensor]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors if t.is_cuda or not cuda)

        add("param", size(list(module.parameters())))
        add("grad", size([p.grad for p in module.parameters() if p.grad is not None]))
        add("buffer", size(list(module.buffers())))
    return f"rank-{rank} {step_info} memory (MiB)" + "".join(f" | {name}: {text}" for name, text in cells)


def log_memory_usage(
    cur_phase: str,
    rank_0_only: bool = True,
    step_info: str = "",
    logger: logging.Logger | None = None,
    module: nn.Module | None = None,
) -> None:
    """Says memory_line, printed or to `logger` at INFO."""
    text = memory_line(cur_phase, step_info, module)
    if rank_0_only and not text.startswith("rank-0 "):
        return
    if logger is None:
        print(text)
    else:
        logger.info(text)


class PTable:
    """Rows of texts in columns; a row may have a table of its own below it."""

    class Row:
        def __init__(self, columns: list[str]) -> None:
            self.columns = columns
            self.below: PTable | None = None

        def append_annotation_table(self, ptable: PTable) -> None:
            self.below = ptable

    def __init__(self, sortable: bool = False) -> None:
        """sortable: printed in the order of the first column."""
        self.rows: list[PTable.Row] = []
        self.sortable = sortable

    def add_row(self, columns: list[str]) -> PTable.Row:
        """As many texts as the first row has."""
        assert not self.rows or len(self.rows[0].columns) == len(columns)
        self.rows.append(PTable.Row(columns))
        return self.rows[-1]

    def get_string(self, first_column_width: int | None = None, second_column_width: int | None = None) -> str:
        """The text. The widths are least ones, of the first and of the third column."""
        if not self.rows:
            return ""
        widths = [max(len(str(row.columns[i])) for row in self.rows) for i in range(len(self.rows[0].columns))]
        widths[0] = max(widths[0], first_column_width or 0)
        if len(widths) > 2:
            widths[2] = max(widths[2], second_column_width or 0)
        rows = sorted(self.rows, key=lambda row: row.columns[0]) if self.sortable else self.rows
        text = ""
        for row in rows:
            text += "".join(str(c).ljust(w + 2) for c, w in zip(row.columns, widths, strict=True)) + "\n"
            if row.below is not None:
                text += row.below.get_string(widths[0], widths[2] if len(widths) > 2 else None)
        return text
