"""A head whose weights are tied: what the backward takes of the logits, and of their gradient, goes back when its last
product has read it (csrc/run/joint.c, segments_pull; python/run.c), not when the embedding's gradient is due."""

from __future__ import annotations

import copy
import gc
from typing import Any

import peaks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import compare_step

from ortmodule import _C, ORTModule

VOCAB, WIDTH = 1511, 32
IDS = torch.randint(VOCAB, (4, 40), generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """An embedding, layers, the embedding again as the head; the logits beside the loss."""

    def __init__(self, layers: int = 3, hidden: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = hidden

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = F.linear(self.norm(x), self.embed.weight)
        loss = F.cross_entropy(logits.float().view(-1, VOCAB) if logits.dtype == torch.bfloat16 else logits.view(-1, VOCAB), labels.view(-1))
        return loss, x if self.hidden else logits


def labels(share: float) -> Tensor:
    chosen = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2)) < share
    return torch.where(chosen, IDS, -100)


def run(model: nn.Module, share: float = 1.0, half: bool = False, hold: bool = False) -> Any:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss, other = model(IDS, labels(share))
    held = other if hold else None
    del other
    loss.backward()
    return held


def taken_by(ours: ORTModule, half: bool, hold: bool) -> int:
    ours.zero_grad()
    return peaks.of_engine(lambda: run(ours, half=half, hold=hold))


@pytest.mark.parametrize("segment_mb", [1e6, 0.004])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_gradients(share: float, segment_mb: float) -> None:
    torch.manual_seed(0)
    eager = Tied().double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine", segment_mb=segment_mb)
    for k in range(3):
        compare_step(eager, ours, {"ids": IDS, "labels": labels(share)}, f"step {k}", lambda out: out[0])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_segments_have_the_same_bits(share: float, half: bool) -> None:
    torch.manual_seed(0)
    model = Tied()
    one, many = (ORTModule(copy.deepcopy(model), strict="engine", segment_mb=mb) for mb in (1e6, 0.004))
    for hold in (False, True, False):
        for m in (one, many):
            run(m, share, half, hold)
        for (name, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    segments = [len((m._ortmodule.every[0].graph.model.timeline() or {})["segment_ends"]) for m in (one, many)]
    assert segments[0] == 1 < segments[1]


@pytest.mark.parametrize("half", [False, True])
def test_memory(half: bool) -> None:
    """What is told is what is taken; and that is less than eager's."""
    torch.manual_seed(0)
    eager = Tied()
    ours = ORTModule(copy.deepcopy(eager), strict="engine", segment_mb=0.004)
    run(ours, half=half)
    said = ours.report().graphs[0].memory
    logits = IDS.numel() * VOCAB * (2 if half else 4)
    assert said is not None and said.outputs >= logits
    taken = {hold: taken_by(ours, half, hold) for hold in (False, True)}
    assert 0.97 * said.released <= taken[False] <= said.released
    assert 0.97 * said.peak <= taken[True] <= said.peak
    assert taken[False] <= taken[True] - 0.9 * logits
    run(eager, half=half)
    eager.zero_grad()
    theirs = peaks.of_torch(lambda: run(eager, half=half))
    assert taken[False] <= 0.85 * theirs * (1 if half else 1.05), (taken, theirs)


def test_the_logits_go_back_in_the_middle() -> None:
    """Seen when the first layer's gradient comes, long after the head."""
    torch.manual_seed(0)
    ours = ORTModule(Tied(), strict="engine", segment_mb=0.004)
    live = []
    ours.layers[0].weight.register_post_accumulate_grad_hook(lambda _: live.append(_C.pool_stats()["live"]))  # type: ignore[union-attr]
    logits = IDS.numel() * VOCAB * 4
    for hold in (False, True, False, True):
        ours.zero_grad()
        gc.collect()
        before = _C.pool_stats()["live"]
        run(ours, hold=hold)
        said = ours.report().graphs[0].memory
        assert said is not None
        most = said.kept + said.workspace + said.gradients + (1 << 17)  # blocks are a little larger than what is asked of them
        assert live[-1] - before <= most + logits * hold, "neither they nor their gradient; held: they"
    assert live[-1] - live[-2] >= logits, live


def test_an_output_that_later_segments_read_stays() -> None:
    torch.manual_seed(0)
    eager = Tied(hidden=True).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine", segment_mb=0.004)
    for k in range(2):
        compare_step(eager, ours, {"ids": IDS, "labels": labels(0.5)}, f"step {k}", lambda out: out[0] + out[1].square().mean())
    run(ours)
    said = ours.report().graphs[0].memory
    assert said is not None
    assert taken_by(ours, False, False) <= said.released
