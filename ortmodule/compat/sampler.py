"""Samplers that give the processes of a group samples of like complexity at the same time.

All samples are sorted by complexity (or those of each group of group_size), and neighbours of that order are dealt to
the ranks. With group_size None `shuffle` permutes these deals, else the groups. random_level adds noise to the
complexities: 0 is the best balance, 1 noise as large as their whole range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler


def _deals(indices: list[int], n_ranks: int, n_samples: int) -> list[list[int]]:
    """n_samples rows of one index per rank, wrapping around at the end."""
    n_samples = max(1, n_samples)
    flat = [indices[i % len(indices)] for i in range(n_samples * n_ranks)]
    return [flat[i : i + n_ranks] for i in range(0, len(flat), n_ranks)]


def shard_wrapped_indices_for_worker(dataset_index_list: list[int], shard_id: int, num_shards: int) -> list[int]:
    """One shard's indices: every num_shards-th, wrapping around so that all shards are equally long."""
    rows = _deals(dataset_index_list, num_shards, math.ceil(len(dataset_index_list) / num_shards))
    return [row[shard_id] for row in rows]


class LoadBalancingDistributedSampler:
    """dataset: of constant size, by index. complexity_fn: a sample's complexity, an integer. world_size, rank: of the
    default process group when not given. seed: the same on all ranks. drop_last: the tail is left out instead of
    repeating samples. Call set_epoch before each epoch.

    Raises ValueError for a rank outside of the group or a random_level outside of [0, 1].
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., int],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        if (world_size is None or rank is None) and not dist.is_available():
            raise RuntimeError("Requires distributed package to be available")
        world_size = dist.get_world_size() if world_size is None else world_size
        rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < world_size:
            raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {world_size - 1}]")
        if not 0.0 <= random_level <= 1.0:
            raise ValueError(f"Invalid random level {random_level}, should be in the range [0.0, 1.0]")
        self.dataset = dataset
        self.complexity_fn = complexity_fn
        self.world_size = world_size
        self.rank = rank
        self.shuffle = shuffle
        self.group_size = group_size
        self.seed = seed
        self.drop_last = drop_last
        self.random_level = random_level
        self.epoch = 0
        n = len(dataset)
        self.num_samples = n // world_size if drop_last else math.ceil(n / world_size)
        self.total_size = self.num_samples * world_size
        self._complexities: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def _sorted(self, generator: torch.Generator) -> list[int]:
        """Indices by complexity, within their groups."""
        if self._complexities is None:
            found = [self.complexity_fn(self.dataset[i]) for i in range(len(self.dataset))]
            self._complexities = np.array(found, np.int64)
        values = self._complexities
        if not len(values):
            return []
        span = int((values.max() - values.min()) * self.random_level + 1)
        if span > 1:
            values = values + torch.randint(span, (len(values),), generator=generator, device="cpu").numpy()
        size = self.group_size or len(values)
        order: list[int] = []
        for begin in range(0, len(values), size):
            order += (begin + np.argsort(values[begin : begin + size], kind="stable")).tolist()
        return order

    def _plan(self) -> tuple[list[list[int]], list[int]]:
        """Deals (an index per rank), and the order in which they are given."""
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = self._sorted(generator)
        if self.shuffle and self.group_size is not None:
            size = self.group_size
            groups = torch.randperm(math.ceil(len(order) / size), generator=generator, device="cpu").tolist()
            order = [i for g in groups for i in order[g * size : (g + 1) * size]]
        deals = _deals(order, self.world_size, self.num_samples) if order else []
        turns = list(range(len(deals)))
        if self.shuffle and self.group_size is None:
            turns = torch.randperm(len(deals), generator=generator, device="cpu").tolist()
        return deals, turns[: self.num_samples]

    def __iter__(self) -> Iterator[int]:
        deals, turns = self._plan()
        return iter([deals[t][self.rank] for t in turns])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Another order in each epoch, the same on all ranks."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]], Sized):
    """Batches of varying size: batch_fn(indices) -> list of batches, for the indices that `sampler` gives a rank.

    drop_last: batches that not every rank has are left out; else ranks with fewer repeat their first ones. Raises
    ValueError for another kind of sampler, or one with drop_last.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError("sampler should be of LoadBalancingDistributedSampler type.")
        if sampler.drop_last:
            raise ValueError("drop_last of sampler should be False")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self.world_size = sampler.world_size
        self.rank = sampler.rank
        self.generate_batches()

    def generate_batches(self) -> None:
        deals, turns = self.sampler._plan()
        ranks = [self.batch_fn([deals[t][rank] for t in turns]) for rank in range(self.world_size)]
        counts = [len(batches) for batches in ranks]
        self.total_batch = min(counts) if self.drop_last else max(counts)
        own = ranks[self.rank]
        self._batches = [own[i % len(own)] for i in range(self.total_batch)] if own else []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Another order in each epoch, the same on all ranks."""
        self.sampler.set_epoch(epoch)
        self.generate_batches()
