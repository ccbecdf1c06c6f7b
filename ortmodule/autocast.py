"""Autocast of every type of device: what holds now, and what is to hold for a while.

PyTorch has a switch and a type for each type of device, and an operator obeys those of the tensors that it runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

KINDS = ("cpu", "cuda")  # types of devices whose autocast the engine knows
Low: TypeAlias = torch.dtype | None
State: TypeAlias = tuple[Low, ...]  # by kind: what is computed in; None: autocast is off
OFF: State = (None,) * len(KINDS)


def now() -> State:
    return tuple([torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in KINDS])


def changed(state: State, kind: str, dtype: Low, enabled: bool) -> State:
    """The state inside of torch.autocast(kind, dtype, enabled); dtype None: PyTorch's own."""
    low = (dtype or torch.get_autocast_dtype(kind)) if enabled else None
    return tuple([low if k == kind else before for k, before in zip(KINDS, state)])


def of(state: State, *values: Any) -> bool:
    """Whether the first tensor among these lies where autocast is on; without any: whether it is on anywhere."""
    for x in values:
        if isinstance(x, Tensor):
            return x.device.type in KINDS and state[KINDS.index(x.device.type)] is not None
        if isinstance(x, (list, tuple)) and any(isinstance(t, Tensor) for t in x):
            return of(state, *x)
    return any(low is not None for low in state)


@contextlib.contextmanager
def put(state: State, cache: bool | None = None) -> Iterator[None]:
    """Autocast as in state; () is off. cache: whether casts of weights are kept meanwhile; None: as they are now."""
    with contextlib.ExitStack() as stack:
        for kind, low, before in zip(KINDS, state or OFF, now()):
            if low is not None or before is not None:
                stack.enter_context(torch.autocast(kind, low, enabled=low is not None, cache_enabled=cache))
        yield


def off() -> contextlib.AbstractContextManager[None]:
    return put(OFF)
