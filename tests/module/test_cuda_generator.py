"""Random numbers of modules on a CUDA device (ortmodule/cuda_engine.py): a stand-in for torch.cuda's generator, which
holds what PyTorch documents of one (a seed, an offset that is a multiple of 4, a state of both), gives dropout its
masks; the CPU engine computes, so no GPU and no fake one is needed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, cuda_engine


class Generator:
    def __init__(self) -> None:
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> None:
        self.now = [seed, 0]

    def initial_seed(self) -> int:
        return self.now[0]

    def get_offset(self) -> int:
        return self.now[1]

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.now[1] = offset

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.now)

    def set_state(self, state: torch.Tensor) -> None:
        self.now = state.tolist()


@pytest.fixture
def of_device(monkeypatch: pytest.MonkeyPatch) -> Generator:
    made = Generator()
    monkeypatch.setattr(cuda_engine, "generator", lambda index: made)
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    return ORTModule(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)), strict=True)


X = torch.ones(5, 8)


def outs(run: nn.Module, n: int = 3) -> list[torch.Tensor]:
    return [run(X).detach().clone() for _ in range(n)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_masks_follow_seed_and_state(of_device: Generator) -> None:
    run = net()
    outs(run, 1)
    of_device.manual_seed(7)
    first, at, before = outs(run), of_device.get_state(), torch.get_rng_state()
    further = outs(run)
    assert torch.equal(before, torch.get_rng_state())  # the CPU's generator has no part
    of_device.manual_seed(7)
    torch.manual_seed(99)
    assert same(first, outs(run))
    of_device.set_state(at)
    assert same(further, outs(run))
    of_device.manual_seed(8)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations([*first, *further, *outs(run)], 2))


def test_seeds_are_spread(of_device: Generator) -> None:
    found = set()
    for seed in (0, 1, 2**63 + 5):
        of_device.manual_seed(seed)
        found |= {cuda_engine.seed(0, 2**63 - 1) for _ in range(300)}
    assert len(found) == 900 and all(0 <= s < 2**63 - 1 for s in found)
    assert 0.4 < sum(s & 1 for s in found) / 900 < 0.6 and 0.4 < sum(s >> 62 for s in found) / 900 < 0.6


def test_a_capture_leaves_the_generator_alone(of_device: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch forbids to move it; the engine refuses the step itself."""
    monkeypatch.setattr(cuda_engine, "capturing", lambda: True)
    monkeypatch.setattr(of_device, "set_offset", None)
    assert cuda_engine.seed(0, 100) == 0 and len(cuda_engine.random_states(0)) == 1


def test_a_second_forward_draws_what_the_first_did(of_device: Generator) -> None:
    """Both generators as they were, and afterwards as if nothing had been drawn again (chain.py: backward_other)."""

    def drawn() -> tuple[int, torch.Tensor]:
        return cuda_engine.seed(0, 2**63 - 1), torch.rand(3)

    states = cuda_engine.random_states(0)
    first, now = drawn(), cuda_engine.random_states(0)
    assert not cuda_engine.same_states(states, now)
    with cuda_engine.random_from(0, states):
        again = drawn()
    assert first[0] == again[0] and torch.equal(first[1], again[1])
    assert cuda_engine.same_states(now, cuda_engine.random_states(0))
    with cuda_engine.random_from(0, None):
        assert drawn()[0] != first[0]
    assert not cuda_engine.same_states(now, cuda_engine.random_states(0))
