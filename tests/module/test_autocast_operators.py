"""Operators that PyTorch's autocast computes in float32 (at::autocast's lists), behind a layer whose result is bfloat16:
the engine computes them too, on operands that have been cast, within twice eager's error against float64. So are
variances in bfloat16, which no list has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

IMAGE, VOLUME, LINE = (2, 8, 12, 12), (2, 8, 6, 6, 6), (2, 8, 24)
Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
SIGN = torch.where(Y > 0, 1.0, -1.0)
FIRST = torch.arange(6)

ROWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "max_pool3d": (VOLUME, lambda h: F.max_pool3d(h, 2)),
    "avg_pool3d": (VOLUME, lambda h: F.avg_pool3d(h, 2)),
    "adaptive_avg_pool3d": (VOLUME, lambda h: F.adaptive_avg_pool3d(h, 3)),
    "local_response_norm": (IMAGE, lambda h: F.local_response_norm(h, 3)),
    "reflection_pad1d": (LINE, lambda h: F.pad(h, (2, 1), mode="reflect")),
    "reflection_pad2d": (IMAGE, lambda h: F.pad(h, (1, 2, 1, 1), mode="reflect")),
    "replication_pad2d": (IMAGE, lambda h: F.pad(h, (1, 2, 1, 1), mode="replicate")),
    "grid_sample": (IMAGE, lambda h: F.grid_sample(h, torch.linspace(-0.9, 0.8, 100).reshape(2, 5, 5, 2).to(h if h.dtype == torch.float64 else torch.float32), align_corners=False)),
    "cosine_embedding_loss": ((6, 8), lambda h: F.cosine_embedding_loss(h, Y, SIGN[:, 0])),
    "hinge_embedding_loss": ((6, 8), lambda h: F.hinge_embedding_loss(h, SIGN)),
    "margin_ranking_loss": ((6, 8), lambda h: F.margin_ranking_loss(h, Y, SIGN, margin=0.3)),
    "triplet_margin_loss": ((6, 8), lambda h: F.triplet_margin_loss(h, Y, Y.flip(0))),
    "poisson_nll_loss": ((6, 8), lambda h: F.poisson_nll_loss(h, Y.exp())),
    "multi_margin_loss": ((6, 8), lambda h: F.multi_margin_loss(h, FIRST)),
    "ctc_loss": ((6, 8), lambda h: F.ctc_loss(h[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))),
    "ctc_loss, lists and keywords": ((6, 8), lambda h: F.ctc_loss(log_probs=h[:, None].log_softmax(-1), targets=torch.tensor([[1, 2]]), input_lengths=[6], target_lengths=[2], reduction="sum")),
    "hardswish": ((6, 8), lambda h: F.hardswish(3 * h)),
    "hardsigmoid": ((6, 8), lambda h: F.hardsigmoid(3 * h)),
    "var": ((6, 8), lambda h: h.var(1)),
    "std": ((6, 8), lambda h: h.std(1, unbiased=False)),
    "std_mean": ((6, 8), lambda h: torch.cat(torch.std_mean(h, 0))),
}  # fmt: skip


class Behind(nn.Module):
    def __init__(self, shape: tuple[int, ...], f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer: nn.Module = {2: nn.Linear(8, 8), 3: nn.Conv1d(8, 8, 1), 4: nn.Conv2d(8, 8, 1), 5: nn.Conv3d(8, 8, 1)}[len(shape)]
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.layer(x))


@pytest.mark.parametrize("name", ROWS)
def test_in_the_engine_as_autocast_computes_it(name: str) -> None:
    shape, f = ROWS[name]
    torch.manual_seed(0)
    eager = Behind(shape, f)
    ours, x = ORTModule(copy.deepcopy(eager), strict=True), torch.randn(shape)

    def step(model: nn.Module, dtype: torch.dtype, low: bool) -> list[Tensor]:
        model.zero_grad()
        given = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = model(given)
        weight = torch.linspace(0.5, 2, y.numel(), dtype=dtype).reshape(y.shape)
        (y.to(dtype) * weight).sum().backward()
        return [y, *[p.grad for p in model.parameters()], given.grad]

    exact = step(copy.deepcopy(eager).double(), torch.float64, False)
    want = step(eager, torch.float32, True)
    for _ in range(2):
        got = step(ours, torch.float32, True)
    assert ours.report().host == [], str(ours.report())
    for i, (mine, theirs, e) in enumerate(zip(got, want, exact)):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (i, mine.dtype, theirs.dtype)
        own, other = [(t.double() - e).abs().max() for t in (mine, theirs)]
        assert own <= 2 * other + 1e-3 * e.abs().max(), (i, own, other)
