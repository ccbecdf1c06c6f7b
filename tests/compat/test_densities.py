"""Densities of labels and tokens at level INFO, in onnxruntime-training's words. Judge: the masks that made the batch."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
import transformers
from small_models import LossAlone
from torch import Tensor, nn

from ortmodule import ORTModule

VOCAB, T = 301, 16


class Head(nn.Module):
    """As a language model: labels are moved by one place inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), nn.CrossEntropyLoss(ignore_index=7)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        return self.loss(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def lines(model: nn.Module, caplog: pytest.LogCaptureFixture, given: dict[str, Tensor], **options: bool) -> tuple[list[str], dict[str, str]]:
    """What is said of densities, and the rows of the feature table."""
    caplog.set_level(logging.INFO, "ortmodule")
    caplog.clear()
    wrapped = ORTModule(model, **options)
    for _ in range(2):
        out = wrapped(**given)
        (out if isinstance(out, Tensor) else out[0]).sum().backward()
    rows = {line.split(":")[0].strip(): line for line in caplog.text.splitlines()}
    return [r.getMessage() for r in caplog.records if "sparsity-based" in r.getMessage()], rows


def test_density_of_labels(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    ids, labels = torch.randint(8, VOCAB, (4, T)), torch.randint(8, VOCAB, (4, T))
    labels[:, 4:] = 7  # of the 15 that are left of a row, 3 count
    told, rows = lines(Head(), caplog, {"ids": ids, "labels": labels})
    assert told == ["Label sparsity-based optimization is ON for density: 20%"]
    assert rows["- Label Sparsity"].endswith("Input density: 20%")
    labels[:, 4:] = 8
    assert lines(Head(), caplog, {"ids": ids, "labels": labels})[0] == ["Label sparsity-based optimization is OFF for density: 100%"]
    labels[:, 4:] = 7
    assert lines(Head(), caplog, {"ids": ids, "labels": labels}, label_sparsity=False)[0] == ["Label sparsity-based optimization is OFF for density: 20%"]


@pytest.mark.parametrize("on", [True, False])
def test_density_of_tokens(on: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=48, vocab_size=VOCAB))
    ids, labels, mask = torch.randint(1, VOCAB, (4, T)), torch.full((4, T), -100), torch.ones(4, T, dtype=torch.long)
    ids[:, 4:], mask[:, 4:], labels[:, 1] = 0, 0, 5
    told, rows = lines(LossAlone(model), caplog, {"input_ids": ids, "attention_mask": mask, "labels": labels}, padding_sparsity=on)
    assert told == [f"Embedding sparsity-based optimization is {'ON' if on else 'OFF'} for density: 25%",
                    "Label sparsity-based optimization is ON for density: 6%"]  # fmt: skip
    assert rows["- Padding Sparsity"].endswith("Input density: 25%") and (": ON" in rows["- Padding Sparsity"]) == on


def test_nothing_is_said_of_what_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, VOCAB)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return F.cross_entropy(y, y.argmax(1))

    told, rows = lines(Own(), caplog, {"x": torch.randn(3, 4)})
    assert told == [] and "density" not in rows["- Label Sparsity"]


def test_below_info_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    import ortmodule.capture as capture

    monkeypatch.setattr(capture, "densities", lambda *_: 1 / 0)
    logging.getLogger("ortmodule").setLevel(logging.WARNING)
    wrapped = ORTModule(Head())
    wrapped(torch.zeros(2, T, dtype=torch.long), torch.ones(2, T, dtype=torch.long)).backward()
    assert not wrapped.report().eager
