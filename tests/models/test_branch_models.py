"""Models whose code branches on values of tensors, wholly in the engine, beside eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close, same_state
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


def beside(model: nn.Module, batches: list[Any], steps: int = 2) -> ORTModule:
    """Trains with SGD; the losses, gradients, parameters and buffers of every step."""
    ours = ORTModule(copy.deepcopy(model), strict=True)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (ours, model)]
    for batch in batches * steps:
        losses = []
        for m, optimizer in pairs:
            optimizer.zero_grad()
            loss = m(**batch) if isinstance(batch, dict) else m(*batch)
            loss = loss if isinstance(loss, Tensor) else loss.loss
            loss.backward()
            losses.append(loss.detach())
        close(*losses)
        same_state(ours, model)
        for _, optimizer in pairs:
            optimizer.step()
    return ours


def wholly(model: ORTModule, captures: int) -> None:
    report = model.report()
    assert report.node_share == 1 and not report.eager and not report.host, str(report)
    assert report.n_captures == captures, str(report)


class Policy(nn.Module):
    """PPO: a categorical and a normal policy, with the checks of torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh())
        self.choice, self.mean, self.value = nn.Linear(11, 3), nn.Linear(11, 2), nn.Linear(11, 1)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, choice: Tensor, action: Tensor, old: Tensor, gain: Tensor) -> Tensor:
        h = self.body(x)
        discrete = torch.distributions.Categorical(logits=self.choice(h))
        normal = torch.distributions.Normal(self.mean(h), self.scale.exp())
        log = discrete.log_prob(choice) + normal.log_prob(action).sum(-1)
        ratio = (log - old).exp()
        better = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = discrete.entropy().mean() + normal.entropy().mean()
        return F.mse_loss(self.value(h)[:, 0], gain) - better - 0.01 * entropy


def test_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile, used by anybody in the process, turns the checks off
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    batches = [
        (torch.randn(n, 5), torch.randint(0, 3, (n,)), torch.randn(n, 2), -torch.rand(n) - 1, torch.randn(n))
        for n in (7, 7, 3)
    ]
    ours = beside(Policy(), batches)
    wholly(ours, 2)
    with pytest.raises(ValueError, match="Expected parameter logits"):
        ours(batches[0][0] * float("nan"), *batches[0][1:])


class Regression(nn.Module):
    """Time series with their own variance."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 7, batch_first=True)
        self.mean, self.variance = nn.Linear(7, 1), nn.Linear(7, 1)
        self.loss = nn.GaussianNLLLoss(full=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.rnn(x)
        return self.loss(self.mean(h), y, F.softplus(self.variance(h)))


def test_gaussian_loss() -> None:
    wholly(beside(Regression(), [(torch.randn(n, 6, 3), torch.randn(n, 6, 1)) for n in (4, 4, 2)]), 2)


class Skips(nn.Module):
    """A language model that leaves out a loss of nothing, and looks whether there is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 23)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        padding = None if mask.all() else mask == 0
        logits = self.head(self.layer(self.embed(ids), src_key_padding_mask=padding))
        if (labels >= 0).any():
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return logits.sum() * 0


def test_masks_that_are_looked_at() -> None:
    batches = []
    for hidden, labelled in ((False, True), (True, True), (False, True), (True, False)):
        ids, mask = torch.randint(0, 23, (3, 7)), torch.ones(3, 7, dtype=torch.long)
        mask[0, 4:] = 1 - int(hidden)
        batches.append((ids, mask, ids if labelled else torch.full_like(ids, -1)))
    wholly(beside(Skips(), batches), 3)


def test_deberta() -> None:
    """Its classification asks how many rows have a label: a size that depends on data."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=67, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=32, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8,
        norm_rel_ebd="layer_norm", share_att_key=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pooler_dropout=0.0)  # fmt: skip
    model = transformers.DebertaV2ForSequenceClassification(config).double()
    batches = []
    for labels in ([0, 1, 1], [1, 0, -1], [-1, -1, -1]):
        ids, mask = torch.randint(0, 67, (3, 11)), torch.ones(3, 11, dtype=torch.long)
        mask[0, 8:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)})
    ours = beside(model, batches[:2])
    report = ours.report()
    # what has the size that depends on data, from nonzero to the loss, is one region
    assert not report.eager and report.n_captures == 1 and [h.kind for h in report.host] == ["aten"], str(report)
    assert report.node_share > 0.99, str(report)
    with torch.no_grad():
        close(ours(**batches[2]).loss, model(**batches[2]).loss)
    token = transformers.DebertaV2ForTokenClassification(config).double()
    for b in batches:
        b["labels"] = b["input_ids"] % 2
    wholly(beside(token, batches, 1), 1)
