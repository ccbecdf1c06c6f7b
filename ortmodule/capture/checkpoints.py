"""torch.utils.checkpoint in the user's forward: which part of the trace it stands around.

The trace goes through a checkpoint as through any other function. While it does, two nodes without operands or results,
ortmodule_capture::checkpoint(int number, bool begin), stand where the region begins and ends; nodes are recorded in the
order of the program, so what stands between them is the region's. functional.py takes the marks out again and notes on
every node the regions it lies in, outermost first ("2", "2/3"); the engine computes again in backward what lies inside
(csrc/passes/remat_choose.c).

A region with a context_fn (selective checkpointing) says itself what it keeps; that is left to the engine's choice, and
told. `number` is counted over a capture, from 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private as private
from ..patches import Patch, here, only_here, replaced


@dataclass
class Regions:
    """Of one capture. selective: regions that are not honoured; kept: nodes of PyTorch's inside of regions, whose
    results are kept."""

    n: int = 0
    selective: int = 0
    kept: int = 0

    def __str__(self) -> str:
        rows = []
        if self.n:
            rows.append(f"{self.n} computed again in backward")
        if self.selective:
            rows.append(f"{self.selective} with a context_fn left to the engine's choice")
        if self.kept:
            rows.append(f"results of {self.kept} nodes that PyTorch runs inside of them are kept")
        return "; ".join(rows)


_lib: Any = torch.library.Library("ortmodule_capture", "FRAGMENT")  # type: ignore[no-untyped-call]
_lib.define("checkpoint(int number, bool begin) -> ()")
torch.library.register_fake("ortmodule_capture::checkpoint", lambda number, begin: None, lib=_lib)
MARK = torch.ops.ortmodule_capture.checkpoint.default
torch.fx.node.has_side_effect(MARK)


def _regions() -> Regions | None:
    """Of the trace that this thread is in, where it computes gradients. A run on stand-ins (net.py) has none."""
    scope = here()
    if scope is None or not scope.exporting or not torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return None
    if scope.table.instead is not None:
        return None
    found: Regions = scope.table.checkpoints
    return found


@contextlib.contextmanager
def _region(regions: Regions) -> Iterator[None]:
    regions.n += 1
    number = regions.n
    MARK(number, True)
    try:
        yield
    finally:
        if _regions() is regions:  # else an exception has ended the trace
            MARK(number, False)


def reentrant(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """CheckpointFunction.apply: where no argument requires a gradient, it gives none to anything inside."""
    regions = _regions()
    wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    with (
        contextlib.nullcontext() if regions is None else _region(regions),
        contextlib.nullcontext() if wanted else torch.no_grad(),
    ):
        return run(*args)


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        regions = _regions()
        if regions is None:
            return (yield from original(*args, **kwargs))
        given = kwargs.get("context_fn", args[2] if len(args) > 2 else private.checkpoint.noop_context_fn)
        if given is not private.checkpoint.noop_context_fn:
            regions.selective += 1
            return (yield from original(*args, **kwargs))
        with _region(regions):  # without the original's hooks on saved tensors: a trace saves none
            yield

    return generator


def marked() -> contextlib.AbstractContextManager[None]:
    """Checkpoints without a Function of their own (use_reentrant=False) are marked while a module is exported."""
    if not private.has("checkpoint"):
        return contextlib.nullcontext()
    name = "_checkpoint_without_reentrant_generator"
    original = vars(private.checkpoint)[name]
    return replaced(Patch(private.checkpoint, name, only_here(_marked(original), original)))
