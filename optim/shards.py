"""DTensor parameters (FSDP2's fully_shard, tensor parallelism): a step works on the shards of this rank.

Everything elementwise is the same on a shard as on the whole, so inside `local_shards` each DTensor of param_groups is
replaced by its local tensor, gradient and state with it; the kernels know nothing of meshes. State that a step makes
comes back as DTensors placed like their parameter, so that torch.distributed.checkpoint saves and reshards it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PLAIN = {Tensor, torch.nn.Parameter}


def is_sharded(value: Any) -> bool:
    """A DTensor. Their module takes most of a second to import; where there is one it is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(value: Any) -> Any:
    """The shard of a DTensor on this rank (without gradients enabled: itself, not a copy); anything else as it is."""
    return value.to_local() if is_sharded(value) else value


def local_as(value: Any, p: Any) -> Any:
    """local(value), brought to the placement of p before if it has another."""
    if is_sharded(value) and value.placements != p.placements:
        value = value.redistribute(p.device_mesh, p.placements)
    return local(value)


def _placed_like(p: Any, shard: Tensor) -> Tensor:
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    return dtensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


@contextmanager
def local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """To be entered without gradients enabled."""
    groups, state = optimizer.param_groups, optimizer.state
    kept = [group["params"] for group in groups]
    shard_of: dict[Any, Tensor] = {p: local(p) for params in kept for p in params if is_sharded(p)}
    versions = [shard._version for shard in shard_of.values()]
    try:
        for p, shard in shard_of.items():
            shard.grad = local_as(p.grad, p)
            if p in state:
                state[shard] = {name: local(value) for name, value in state[p].items()}
        for group in groups:
            group["params"] = [shard_of.get(p, p) for p in group["params"]]
        yield
    finally:
        for group, params in zip(groups, kept):
            group["params"] = params
        for (p, shard), version in zip(shard_of.items(), versions):
            if shard._version != version:  # autograd is to see the change in p
                torch.autograd.graph.increment_version(p)
            shard.grad = None
            for name, value in state.pop(shard, {}).items():
                if name not in state[p]:
                    state[p][name] = _placed_like(p, value) if isinstance(value, Tensor) and name != "step" else value
