"""LoadBalancingDistributedSampler: every sample once, ranks alike, the same on all ranks; its batches."""

from __future__ import annotations

import math

import pytest
import torch

from ortmodule.compat.sampler import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
    shard_wrapped_indices_for_worker,
)

Sampler = LoadBalancingDistributedSampler


def ranks(data, world, **options):
    return [list(Sampler(data, lambda x: x, world_size=world, rank=r, **options)) for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", [{"shuffle": False}, {}, {"group_size": 8}, {"group_size": 8, "shuffle": False}, {"random_level": 0.5}])
@pytest.mark.parametrize("n", [24, 25, 2])
def test_every_sample_is_given(n, options, world):
    data = [(7 * i) % 31 for i in range(n)]
    given = ranks(data, world, **options)
    assert {len(g) for g in given} == {math.ceil(n / world)}
    flat = [i for g in given for i in g]
    assert set(flat) == set(range(n)) and len(flat) - n < world + n * (n < world)
    dropped = ranks(data, world, drop_last=True, **options)
    flat = [i for g in dropped for i in g]
    assert {len(g) for g in dropped} == {n // world} and len(set(flat)) == len(flat)


def test_ranks_get_samples_of_like_complexity_at_the_same_time():
    data = [c for c in torch.randperm(50).tolist() for _ in range(2)]
    for epoch in range(3):
        both = [Sampler(data, lambda x: x, world_size=2, rank=r) for r in range(2)]
        for s in both:
            s.set_epoch(epoch)
        pairs = list(zip(*both, strict=True))
        assert all(data[i] == data[j] for i, j in pairs)


def test_the_order():
    data = torch.randint(0, 100, (40,)).tolist()
    (order,) = ranks(data, 1, shuffle=False)
    assert [data[i] for i in order] == sorted(data)
    (order,) = ranks(data, 1, shuffle=False, group_size=8)
    assert [data[i] for i in order] == [v for b in range(0, 40, 8) for v in sorted(data[b : b + 8])]
    (order,) = ranks(data, 1, group_size=8)
    groups = [tuple(order[b : b + 8]) for b in range(0, 40, 8)]
    assert all({i // 8 for i in g} == {g[0] // 8} for g in groups) and [data[i] for i in groups[0]] == sorted(data[i] for i in groups[0])


def test_epochs_and_seeds():
    data = list(range(64))
    s = Sampler(data, lambda x: x, world_size=2, rank=0)
    first = list(s)
    assert list(s) == first
    s.set_epoch(1)
    second = list(s)
    assert second != first and sorted(second) == sorted(first)
    assert list(Sampler(data, lambda x: x, world_size=2, rank=0, seed=1)) == second


def test_noise_grows_with_random_level():
    data = list(range(200))

    def disorder(level):
        (order,) = ranks(data, 1, shuffle=False, random_level=level)
        return sum(abs(data[i] - k) for k, i in enumerate(order))

    assert 0 == disorder(0) < disorder(0.1) < disorder(1)


def test_batches():
    data = [1, 2, 3, 4, 5, 6, 7, 8, 9, 30]

    def batches(indices):  # at most 10 in all, so ranks differ in how many they have
        found, total = [[]], 0
        for i in indices:
            if total + data[i] > 10 and found[-1]:
                found, total = [*found, []], 0
            found[-1].append(i)
            total += data[i]
        return found

    both = [LoadBalancingDistributedBatchSampler(Sampler(data, lambda x: x, world_size=2, rank=r, shuffle=False), batches) for r in range(2)]
    assert len(both[0]) == len(both[1]) == len(list(both[0])) == len(list(both[1]))
    assert {i for s in both for b in s for i in b} == set(range(10))
    fewer = [LoadBalancingDistributedBatchSampler(Sampler(data, lambda x: x, world_size=2, rank=r, shuffle=False), batches, drop_last=True) for r in range(2)]
    assert len(fewer[0]) == len(fewer[1]) <= len(both[0])
    loader = torch.utils.data.DataLoader(data, batch_sampler=both[0])
    assert [b.tolist() for b in loader] == [[data[i] for i in b] for b in both[0]]
    both[0].set_epoch(3)
    assert len(list(both[0])) == len(both[0])


def test_what_is_not_allowed():
    with pytest.raises(ValueError, match="Invalid rank 2"):
        Sampler([1], len, world_size=2, rank=2)
    with pytest.raises(ValueError, match="random level"):
        Sampler([1], len, world_size=2, rank=1, random_level=1.5)
    with pytest.raises(ValueError, match="LoadBalancingDistributedSampler"):
        LoadBalancingDistributedBatchSampler([1], len)
    with pytest.raises(ValueError, match="drop_last"):
        LoadBalancingDistributedBatchSampler(Sampler([1], len, world_size=1, rank=0, drop_last=True), len)
    assert [shard_wrapped_indices_for_worker([5, 6, 7], r, 2) for r in range(2)] == [[5, 7], [6, 5]]
