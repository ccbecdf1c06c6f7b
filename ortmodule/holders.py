"""Who else holds a tensor that a Function has saved: whether its memory may be overwritten."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import torch_private as private


def _holders(t: Tensor) -> int:
    storage = t.untyped_storage()
    count: int = private.storage_use_count(private.storage_of(t))
    return count + sys.getrefcount(storage)  # somebody may hold the storage object itself


class _Probe(Function):
    """How many holders a saved output has, seen from its Function's backward."""

    @staticmethod
    def forward(ctx: Any, seen: list[int], x: Tensor) -> tuple[Tensor, Tensor]:
        out = x.new_zeros(2)
        ctx.seen = seen
        ctx.save_for_backward(out)
        return x.sum(), out

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, None]:
        ctx.seen.append(_holders(ctx.saved_tensors[0]))
        return None, None


@cache
def holders_when_dropped() -> int:
    """The count that means: only autograd holds it, for the next moment. -1: this PyTorch cannot tell."""
    seen: list[int] = []

    def measure() -> None:
        with suppress(AttributeError, RuntimeError, TypeError):
            for hold in (False, True):
                loss, out = _Probe.apply(seen, torch.zeros(1, requires_grad=True, device="cpu"))
                view = out.view(1, 2) if hold else None
                del out
                loss.backward()
                del view

    # the caller may be in inference mode, under saved-tensor hooks, inside a backward: a new thread is not
    thread = Thread(target=measure)
    thread.start()
    thread.join()
    return seen[0] if len(seen) == 2 and seen[1] > seen[0] else -1


def dropped_by_all(t: Tensor) -> bool:
    """Is this saved output of a Function, just unpacked in its backward, held by nobody else (no tensor, view, array or
    storage)?"""
    none = holders_when_dropped() if private.has("storage_use_count") else -1
    return none >= 0 and _holders(t) == none
