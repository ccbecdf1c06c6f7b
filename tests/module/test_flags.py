"""Orders of memory and PyTorch's global flags: results are those of eager, strides and gradients too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))


class Several(nn.Module):
    """Images of two sizes and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = images(), nn.Conv2d(4, 2, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.a(x)
        return {"first": y, "second": [self.b(y).tanh()], "rest": self.fc(y.mean((2, 3)))}


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 4, 2), nn.GELU())


def leaves(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [out["first"], out["second"][0], out["rest"]]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("make, shape, kind", [(images, (2, 3, 7, 9), torch.channels_last), (Several, (2, 3, 7, 9), torch.channels_last),
                                               (volumes, (2, 3, 4, 5, 6), torch.channels_last_3d)])  # fmt: skip
def test_channels_last(make: Any, shape: tuple[int, ...], kind: torch.memory_format, weights: bool) -> None:
    """Results have eager's strides, whichever arguments and weights are channels_last, call by call."""
    eager = make()
    if weights and make is not volumes:
        eager = eager.to(memory_format=kind)
    wrapped = ORTModule(copy.deepcopy(eager))
    for step in range(6):
        x = torch.randn(shape[0] + step // 4, *shape[1:])
        x = x.contiguous(memory_format=kind) if step % 2 == 0 else x
        found = []
        for m in (wrapped, eager):
            m.zero_grad()
            given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            outs = leaves(m(given))
            sum(y.square().sum() for y in outs).backward()
            found.append((outs, [given.grad, *[p.grad for p in m.parameters()]]))
        (ours, grads), (theirs, wanted) = found
        assert [y.stride() for y in ours] == [y.stride() for y in theirs], step
        torch.testing.assert_close([y.detach() for y in ours], [y.detach() for y in theirs], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10)
    assert not wrapped.report().eager and len(wrapped.report().graphs) <= 4, str(wrapped.report())


def test_slices_of_images_cost_no_capture() -> None:
    """Only channels_last is asked for, not the strides."""
    wrapped = ORTModule(images())
    whole = torch.randn(2, 6, 14, 9)
    for x in (whole[:, :3], whole[:, 3:], whole[:, ::2], whole[:, :3].clone(), whole[:, 1:4]):
        assert wrapped(x).is_contiguous()
    assert len(wrapped.report().graphs) == 1


class Uninitialised(nn.Module):
    """Under the flag PyTorch fills what torch.empty gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen = torch.are_deterministic_algorithms_enabled()
        y = torch.zeros_like(x).index_add(0, torch.tensor([0, 0, 1]), x)
        return self.fc(y * (3 if seen else 2))


def test_deterministic_algorithms() -> None:
    """The flag is part of what a capture holds for; results do not change, twice the same bits."""
    eager = Uninitialised()
    wrapped = ORTModule(copy.deepcopy(eager))
    ids = torch.tensor([1, 1, 5])
    for on in (False, True, True, False):
        torch.use_deterministic_algorithms(on)
        grads = []
        for m in (wrapped, wrapped, eager):
            m.zero_grad()
            m(ids).square().sum().backward()
            grads.append([p.grad.clone() for p in m.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[1], strict=True))
        torch.testing.assert_close(grads[0], grads[2], rtol=1e-12, atol=1e-12)
    assert not wrapped.report().eager and len(wrapped.report().graphs) == 2
