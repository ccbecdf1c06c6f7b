"""Label sparsity of wrapped modules beside eager PyTorch: the same losses, gradients and errors at every density, memory
level and budget, under autocast, with gradients that accumulate and sizes that change; and what the report says of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from small_models import LossAlone
from torch import Tensor, nn
from training import compare_step, stay_fp64

from ortmodule import ORTModule

VOCAB, WIDTH, T = 301, 24, 11


class Body(nn.Module):
    """forward returns the loss alone, or the logits beside it."""

    def __init__(self, logits: bool = False, tied: bool = True, **loss: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.embed.weight
        self.logits, self.loss = logits, loss
        self.register_buffer("cw", torch.rand(VOCAB))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        h = self.norm(torch.tanh(self.mix(self.embed(ids))))
        logits = self.head(h)
        weight = self.cw.to(logits.dtype) if self.loss.get("weighted") else None
        loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), weight, **{k: v for k, v in self.loss.items() if k != "weighted"})
        return (loss, logits) if self.logits else loss


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "padding": {"ignore_index": 0},
    "smoothing": {"label_smoothing": 0.1},
    "weights": {"weighted": True, "label_smoothing": 0.2},
    "each": {"reduction": "none"},
}


def batch(density: float, b: int = 3, t: int = T, seed: int = 0, ignore: int = -100) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(1, VOCAB, (b, t), generator=g) for _ in range(2))
    return {"ids": ids, "labels": torch.where(torch.rand(b, t, generator=g) < density, labels, ignore)}


def loss_alone(out: Any) -> Tensor:
    loss = out["loss"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    return loss.sum()


def heads(ours: ORTModule) -> tuple[int, int]:
    return ours.report().graphs[-1].sparse_heads


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> None:
    """At level INFO a second plan is made for what is told, which is none of a step's."""
    caplog.set_level(logging.WARNING, "ortmodule")


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("name", list(LOSSES))
def test_densities(name: str, logits: bool) -> None:
    torch.manual_seed(0)
    ignore = LOSSES[name].get("ignore_index", -100)
    eager = Body(logits, **LOSSES[name]).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for k, density in enumerate([0.5, 0.1, 1.0, 0.95, 0.3, 0.7]):
        compare_step(eager, ours, batch(density, seed=k, ignore=ignore), f"density {density}", loss_alone)  # gradients add up
    told = ours.report()
    assert len(told.graphs) == 1 and told.n_plans <= 2
    assert heads(ours) == ((0, 0) if name == "each" else (0, 1) if logits else (1, 0))


@pytest.mark.parametrize("shift", [False, True])
def test_a_loss_has_the_bits_of_all_rows_where_the_logits_have_them(shift: bool) -> None:
    """Logits that are exact in any order of their sums; with rounded ones (docs/SPARSITY.md) one unit in the last place."""

    class Head(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
            for p in self.parameters():
                p.data.copy_(torch.randint(-4, 5, p.shape) / 4 if whole else torch.randn(p.shape) / 4)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embed(ids))
            logits, labels = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
            return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))

    torch.manual_seed(12)
    for whole in (True, False):
        model = Head(whole)
        ours, dense = (ORTModule(copy.deepcopy(model), strict="engine", label_sparsity=on) for on in (True, False))
        for seed in range(60):
            given = batch((0.05, 0.3, 0.5, 0.8, 1.0)[seed % 5], 4, 9, seed)
            a, b = ours(**given).detach(), dense(**given).detach()
            torch.testing.assert_close(a, b, rtol=0 if whole else 2.0**-22, atol=0, equal_nan=True)
        assert ours.report().graphs[0].sparse_heads[0] == 1 and dense.report().graphs[0].sparse_heads == (0, 0)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_row_counts(reduction: str, logits: bool) -> None:
    """A mean over nothing is NaN, its gradients are zeros; both as in eager."""
    torch.manual_seed(10)
    eager = Body(logits, reduction=reduction).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for density in (0.0, 0.5, 0.0):
        losses = []
        for m in (eager, ours):
            m.zero_grad()
            losses.append(out := (m(**batch(density))[0] if logits else m(**batch(density))))
            out.backward()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-12, atol=0, equal_nan=True)
        assert losses[1].isnan() == (density == 0 and reduction == "mean")
        for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_sizes_change() -> None:
    torch.manual_seed(1)
    for logits in (False, True):
        eager = Body(logits).double()
        ours = ORTModule(copy.deepcopy(eager), strict="engine")
        for k, (b, t) in enumerate([(3, 11), (2, 7), (5, 3), (3, 11), (1, 1), (4, 13)]):
            compare_step(eager, ours, batch(0.4, b, t, k), f"{b} x {t}", loss_alone)


def test_off() -> None:
    torch.manual_seed(2)
    for options in ({"label_sparsity": False}, {}):
        model = ORTModule(Body(), **options)
        model(**batch(0.3)).backward()
        assert heads(model) == ((0, 0) if options else (1, 0))


@pytest.mark.parametrize("name", ["LABEL_SPARSITY", "ENABLE_COMPUTE_OPTIMIZER", "ENABLE_SPARSE_OPTIMIZER", "ENABLE_LABEL_SPARSE_OPTIMIZER"])
def test_off_from_outside(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ortmodule")
    for value in ("0", "1"):
        monkeypatch.setenv(f"ORTMODULE_{name}", value)
        caplog.clear()
        model = ORTModule(Body())
        for _ in range(2):  # told when the first step is over
            model(**batch(0.3)).backward()
        assert heads(model) == (int(value), 0)
        rows = {line.split(":")[0].strip(): line for line in caplog.text.splitlines() if ": ON" in line or ": OFF" in line}
        assert (": ON" in rows["Compute Optimizer"]) == (": ON" in rows["- Label Sparsity"]) == (value == "1"), caplog.text
        assert "has no effect" not in caplog.text
    monkeypatch.setenv(f"ORTMODULE_{name}", "perhaps")
    with pytest.raises(ValueError, match=f"ORTMODULE_{name}='perhaps' is not allowed; give 0 or 1"):
        ORTModule(Body())


def test_the_feature_table(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ortmodule")
    told = {"1 heads run on labelled rows": Body(), "the gradients of 1 heads, whose logits are results, on labelled rows": Body(True)}
    for text, body in told.items():
        caplog.clear()
        model = ORTModule(body)
        for _ in range(2):
            loss_alone(model(**batch(0.3))).backward()
        assert text in caplog.text and "- Label Sparsity" in caplog.text
    caplog.clear()
    model = ORTModule(nn.Linear(3, 2))
    for _ in range(2):
        model(torch.randn(2, 3)).sum().backward()
    row = next(line for line in caplog.text.splitlines() if line.startswith("- Label Sparsity"))
    assert ": OFF" in row and "no head" in row
    row = next(line for line in caplog.text.splitlines() if line.startswith("- Padding Sparsity"))
    assert ": OFF" in row and "PADDING_SPARSITY=0" in row


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=3, intermediate_size=48,
                                                                vocab_size=VOCAB))  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=WIDTH, n_head=3, vocab_size=VOCAB, n_positions=32, bos_token_id=0,
                                                                eos_token_id=0))  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=1, d_model=WIDTH, d_kv=8, num_heads=3, d_ff=48, vocab_size=VOCAB, dropout_rate=0.0,
                                                                         decoder_start_token_id=0))  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "t5": t5}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stay_fp64(monkeypatch)
    torch.manual_seed(3)
    model = MODELS[name]()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    eager = (LossAlone(model) if alone else model).double().train()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for k, density in enumerate([0.15, 0.6, 1.0]):
        given = batch(density, seed=k)
        given = {"input_ids": given["ids"], "labels": given["labels"], "attention_mask": torch.ones_like(given["ids"])}
        compare_step(eager, ours, given, f"density {density}", loss_alone)
    assert heads(ours) == ((1, 0) if alone else (0, 1))


@pytest.mark.parametrize("logits", [False, True])
def test_the_bits_of_levels_and_budgets(logits: bool) -> None:
    """What backward computes again changes nothing, with dropout before the head too."""
    torch.manual_seed(4)
    model = (gpt2() if logits else LossAlone(gpt2())).train()
    runs = []
    for options in ({}, {"memory_opt_level": 1}, {"memory_budget": "90%"}):
        ours = ORTModule(copy.deepcopy(model), **options)
        grads = []
        for k, density in enumerate([0.5, 0.1, 0.8]):
            given = batch(density, 8, seed=k)
            torch.manual_seed(k)
            loss = loss_alone(ours(input_ids=given["ids"], labels=given["labels"]))
            loss.backward()
            grads.append([loss.detach(), *(p.grad.clone() for p in ours.parameters())])
            ours.zero_grad()
        assert sum(heads(ours)) == 1
        runs.append(grads)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_autocast(logits: bool, held: bool) -> None:
    """Gradients as near to fp64's as eager's under the same autocast."""
    torch.manual_seed(5)
    eager = Body(logits, tied=False)
    ours, exact = ORTModule(copy.deepcopy(eager), strict="engine"), copy.deepcopy(eager).double()
    for k, density in enumerate([0.15, 0.5, 0.9]):
        given = batch(density, 4, seed=k)
        outs = []
        for m in (eager, ours, exact):
            m.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=m is not exact):
                out = m(**given)
            loss_alone(out).backward()
            outs.append(out if held else None)
        for (name, p), q, e in zip(ours.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
            size = e.grad.abs().max().item()
            near, far = ((x.grad.double() - e.grad).abs().max().item() for x in (p, q))
            assert near <= 2 * far + 2.0**-8 * size, f"{name} at {density}: {near:.2e}, eager {far:.2e} of {size:.2e}"
    assert heads(ours) == ((0, 1) if logits else (1, 0))


@pytest.mark.parametrize("logits", [False, True])
def test_labels_out_of_range(logits: bool) -> None:
    torch.manual_seed(6)
    eager = Body(logits)
    ours = ORTModule(copy.deepcopy(eager))
    loss_alone(ours(**batch(0.5))).backward()
    given = batch(0.5)
    given["labels"][1, 4] = VOCAB
    told = []
    for m in (eager, ours):
        with pytest.raises(IndexError) as error:
            m(**given)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_logits_that_get_a_gradient_later() -> None:
    """Predicted: the loss alone. Then a gradient arrives for the logits too, and later not any more."""
    torch.manual_seed(7)
    eager = Body(True).double()
    ours = ORTModule(copy.deepcopy(eager))
    for k in range(6):
        both = k in (2, 3)
        compare_step(eager, ours, batch(0.4, seed=k), f"step {k}",
                     lambda out, both=both: out[0] + (out[1].pow(2).mean() if both else 0))  # fmt: skip


def test_a_loss_over_a_part_of_the_logits() -> None:
    """Shifted as user code does: logits[:, :-1] against labels[:, 1:]."""

    class Shifted(Body):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.head(torch.tanh(self.mix(self.embed(ids))))
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
            return (loss, logits) if self.logits else loss

    torch.manual_seed(8)
    for logits in (False, True):
        eager = Shifted(logits).double()
        ours = ORTModule(copy.deepcopy(eager), strict="engine")
        for k, density in enumerate([0.5, 0.1, 1.0]):
            compare_step(eager, ours, batch(density, seed=k), f"density {density}", loss_alone)


def test_two_heads() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Body(), Body(tied=False)

        def forward(self, ids: Tensor, labels: Tensor, others: Tensor) -> Tensor:
            return self.a(ids, labels) + 0.5 * self.b(ids, others)

    torch.manual_seed(9)
    eager = Two().double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for k in range(3):
        compare_step(eager, ours, {**batch(0.3, seed=k), "others": batch(0.6, seed=k + 9)["labels"]}, f"step {k}")
    assert heads(ours) == (2, 0)
