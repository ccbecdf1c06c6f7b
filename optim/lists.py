"""Norms, finiteness and scaled copies over lists of tensors: the engine's kernels on CPU and CUDA, torch's foreach
operators elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ortmodule import _C
from ortmodule import torch_private as private

from . import cuda
from .shards import PLAIN, is_sharded, local, local_as

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PAIRS = (torch.complex64, torch.complex128)
RANK = 8  # axes of a tensor in the engine


def on_cpu(tensors: Sequence[Tensor]) -> bool:
    """Whether the engine's CPU kernels take all of them."""
    index = cuda.host.index
    return all(
        t.is_cpu
        and index(t) < 0
        and type(t) in PLAIN
        and t.layout is torch.strided
        and t.dtype in DTYPES
        and t.dim() <= RANK
        for t in tensors
    )


def reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The memory of complex tensors as reals, parts last; others as they are."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor], order: float = 2.0) -> tuple[float, bool]:
    """(norm over all elements, every element is finite), in one sweep on CPU."""
    if not grads:
        return 0.0, True
    if on_cpu(grads):
        norm, finite = _C.norm(grads, order, False)
        return norm, finite
    if order == 2.0 and cuda.usable(grads):
        norm, stop, _ = cuda.norm(grads)[0].tolist()
        return norm, not stop
    if any(is_sharded(g) for g in grads):
        return _norm_over_ranks(grads, order)
    norm = float(
        torch.linalg.vector_norm(torch.stack([n.double() for n in private.foreach_norm(list(grads), order)]), order)
    )
    return norm, math.isfinite(norm) or not has_nonfinite(grads)


def _norm_over_ranks(grads: Sequence[Any], order: float) -> tuple[float, bool]:
    """grad_norm where some are DTensors: every rank gets the same answer, with one reduction per mesh and way of
    sharding."""
    alike: dict[Any, list[Any]] = {}
    for g in grads:
        if is_sharded(g) and any(x.is_partial() for x in g.placements):
            g = g.full_tensor()
        alike.setdefault((g.device_mesh, g.placements) if is_sharded(g) else None, []).append(local(g))
    norms, all_finite = [], True
    for place, members in alike.items():
        norm, finite = grad_norm(members, order)
        if place is not None:
            mesh, placements = place
            op = torch.distributed.ReduceOp.MAX if order == math.inf else torch.distributed.ReduceOp.SUM
            both = torch.tensor(
                [norm if order == math.inf else norm**order, not finite], dtype=torch.float64, device=members[0].device
            )
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():
                    torch.distributed.all_reduce(both, op, mesh.get_group(dim))
            norm, finite = both[0].item() ** (1.0 if order == math.inf else 1.0 / order), not both[1].item()
        norms.append(norm)
        all_finite = all_finite and finite
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64, device="cpu"), order)), all_finite


@torch.no_grad()
def has_nonfinite(grads: Sequence[Tensor]) -> bool:
    if not grads:
        return False
    if on_cpu(grads):
        return not _C.norm(grads, 2.0, False)[1]
    if cuda.usable(grads):
        return bool(cuda.norm(grads)[0][1])
    if any(is_sharded(g) for g in grads):
        return not _norm_over_ranks(grads, 2.0)[1]
    return not bool(torch.stack([g.isfinite().all() for g in grads]).all())


@torch.no_grad()
def first_nonfinite(grads: Sequence[Tensor]) -> int | None:
    """Index of the first tensor with an inf or NaN; of DTensors the shard on this rank is looked at."""
    if on_cpu(grads):
        largest = _C.norm(grads, math.inf, True)[2]
        return next((i for i, x in enumerate(largest) if not math.isfinite(x)), None)
    return next((i for i, g in enumerate(grads) if not bool(local(g).isfinite().all())), None)


def overlaps(tensors: Sequence[Tensor]) -> list[int]:
    """Indices of the tensors that share memory with an earlier one; of what is not plain, those that are an earlier
    one."""
    if on_cpu(tensors) or cuda.usable(tensors):
        return _C.overlaps(tensors)
    ids = [id(t) for t in tensors]
    return [i for i, x in enumerate(ids) if ids.index(x) < i]


@torch.no_grad()
def scale_into(dst: Sequence[Tensor], src: Sequence[Tensor] | None, factor: float = 1.0) -> None:
    """dst = factor * src (src None: dst itself), converted to dst's type; counts as an in-place change of dst."""
    if not dst:
        return
    if src is not None:  # the kernels see memory, and a lazy sign stands beside it; in place it does not matter
        src = [s.resolve_neg() for s in src]
    if on_cpu(dst) and (src is None or on_cpu(src)):
        _C.axpby(dst, src, factor, 0.0)
        torch.autograd.graph.increment_version(list(dst))
        return
    if cuda.usable(dst) and (src is None or (cuda.usable(src) and cuda.host.index(src[0]) == cuda.host.index(dst[0]))):
        cuda.axpby(dst, src, factor)
        torch.autograd.graph.increment_version(list(dst))
        return
    if any(is_sharded(d) for d in dst):
        scale_into([local(d) for d in dst], src and [local_as(s, d) for s, d in zip(src, dst)], factor)
        torch.autograd.graph.increment_version(list(dst))
        return
    if src is not None:
        private.foreach_copy(list(dst), list(src))
    if factor != 1.0:
        private.foreach_mul(list(dst), factor)
