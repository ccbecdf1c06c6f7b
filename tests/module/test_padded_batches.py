"""Padding sparsity of wrapped modules beside eager PyTorch: the same losses, gradients and masks of dropout, whatever share
of a batch is padding, on either side; and where somebody could see the difference, all tokens."""

from __future__ import annotations

import copy
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


def bert(kind: str = "BertForMaskedLM", p: float = 0.0) -> nn.Module:
    return getattr(transformers, kind)(transformers.BertConfig(
        num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=3, intermediate_size=48, vocab_size=VOCAB, hidden_dropout_prob=p,
        attention_probs_dropout_prob=p, num_labels=3))  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=WIDTH, n_head=3, vocab_size=VOCAB, n_positions=32, bos_token_id=0,
                                                                eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))  # fmt: skip


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=2, d_model=WIDTH, d_kv=8, num_heads=3, d_ff=48, vocab_size=VOCAB, dropout_rate=0.0,
                                                                         decoder_start_token_id=0, pad_token_id=0))  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": bert, "classifier": lambda: bert("BertForSequenceClassification"), "gpt2": gpt2, "t5": t5}  # fmt: skip


def batch(lengths: list[int], t: int = T, left: bool = False, seed: int = 0, labels: float = 1.0, classes: int = 0) -> dict[str, Tensor]:
    """Samples of these lengths, padded to t; of their tokens that share has a label."""
    g = torch.Generator().manual_seed(seed)
    b = len(lengths)
    ids, want = (torch.randint(1, VOCAB, (b, t), generator=g) for _ in range(2))
    at, n = torch.arange(t), torch.tensor(lengths)[:, None]
    mask = (at >= t - n) if left else (at < n)
    want = torch.where(mask & (torch.rand(b, t, generator=g) < labels), want, -100)
    if classes:
        want = torch.randint(classes, (b,), generator=g)
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long(), "labels": want}


# shares from all tokens to few, a sample of padding alone (only where it has no label), one sample, other sizes
BATCHES = [([11, 5, 3], 11), ([11, 11, 11], 11), ([2, 4, 1], 11), ([6], 8), ([9, 2, 0, 4], 9), ([2, 1], 5)]


def products(ours: ORTModule) -> list[str]:
    return [g.padding for g in ours.report().graphs]


@pytest.mark.parametrize(("attention", "left"), [("sdpa", False), ("sdpa", True), ("eager", False)])
@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str, attention: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stay_fp64(monkeypatch)
    torch.manual_seed(0)
    model = MODELS[name]()
    model.set_attn_implementation(attention)
    eager = LossAlone(model).double().train()
    ours = ORTModule(copy.deepcopy(eager), strict="engine", padding_sparsity=True)
    for k, (lengths, t) in enumerate(BATCHES):
        given = batch(lengths, t, left, k, classes=3 if name == "classifier" else 0)
        compare_step(eager, ours, given, f"batch {k}")  # gradients add up
    told = products(ours)
    wanted = {"bert": "13 products", "classifier": "12 products", "gpt2": "8 products", "t5": "32 products"}[name]
    assert told[0] == wanted and not any(p.startswith("none") for p in told), told


class Encoder(nn.Module):
    """Layers with dropout, a head, a loss; `out`: what else leaves the module."""

    def __init__(self, out: str = "", p: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "norm": nn.LayerNorm(WIDTH), "qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH), "up": nn.Linear(WIDTH, 2 * WIDTH),
            "down": nn.Linear(2 * WIDTH, WIDTH)}) for _ in range(layers))  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCAB)
        self.out, self.p = out, p

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        b, t = input_ids.shape
        mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).view(b, t, 3, 3, WIDTH // 3).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.p if self.training else 0.0)
            x = x + F.dropout(layer["out"](y.transpose(1, 2).reshape(b, t, WIDTH)), self.p, self.training)
            x = x + F.dropout(layer["down"](F.gelu(layer["up"](x))), self.p, self.training)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
        if self.out == "mean":
            return loss + x.mean()
        if self.out == "hidden":
            return loss, x
        if self.out == "logits":
            return loss, logits
        return loss


def pair(options: dict[str, Any], *args: Any, dtype: torch.dtype = torch.float32, **kw: Any) -> tuple[ORTModule, ORTModule]:
    """The same module, with padding left out and without."""
    torch.manual_seed(1)
    model = Encoder(*args, **kw).to(dtype)
    return tuple(ORTModule(copy.deepcopy(model), strict="engine", padding_sparsity=on, **options) for on in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("out", ["logits", "hidden", "mean"])
def test_somebody_sees_padding(out: str) -> None:
    """Then all tokens are computed, and the report says why."""
    torch.manual_seed(2)
    eager = Encoder(out).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine", padding_sparsity=True)
    first = (lambda r: r[0]) if out != "mean" else (lambda r: r)
    for k, (lengths, t) in enumerate(BATCHES[:3]):
        compare_step(eager, ours, batch(lengths, t, seed=k), f"batch {k}", first)
    assert all(p.startswith("none: ") for p in products(ours)), products(ours)
    assert "padding is left out by: none: " in str(ours.report())


def test_labels_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a label is computed, wherever it is."""
    torch.manual_seed(3)
    eager = Encoder().double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine", padding_sparsity=True)
    for k, (lengths, t) in enumerate(BATCHES):
        given = batch(lengths, t, seed=k)
        free = torch.rand(given["labels"].shape, generator=torch.Generator().manual_seed(k)) < 0.3
        given["labels"] = torch.where(free, torch.full_like(given["labels"], 7), given["labels"])
        compare_step(eager, ours, given, f"batch {k}")
    assert products(ours) == ["8 products"] * len(products(ours))


@pytest.mark.parametrize("options", [{}, {"memory_opt_level": 1}, {"memory_budget": "90%"}])
def test_dropout(options: dict[str, Any]) -> None:
    """Tokens that are left keep their masks: as near to all tokens as a rounding, and with all tokens the same bits."""
    sparse, dense = pair(options, p=0.3)
    for k, lengths in enumerate([[11, 5, 3, 1], [11, 11, 11, 11], [2, 2, 2, 2], [11, 11, 11, 10]]):
        got = []
        for m in (sparse, dense):
            m.zero_grad()
            torch.manual_seed(k)
            loss = m(**batch(lengths, seed=k))
            loss.backward()
            got.append([loss.detach(), *(p.grad for p in m.parameters())])
        for a, b in zip(*got, strict=True):
            if k in (1, 3):
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert products(sparse)[0] == "8 products" and "none" not in products(sparse)[0]
    assert products(dense) == [""] * len(products(dense))


def test_the_bits_of_levels_and_budgets() -> None:
    """What backward computes again changes nothing."""
    torch.manual_seed(4)
    model = Encoder(p=0.2)
    runs = []
    for options in ({}, {"memory_opt_level": 1}, {"memory_budget": "90%"}):
        ours = ORTModule(copy.deepcopy(model), padding_sparsity=True, **options)
        grads = []
        for k in range(3):
            torch.manual_seed(k)
            loss = ours(**batch([11, 5, 3, 8], seed=k))
            loss.backward()
            grads.append([loss.detach(), *(p.grad.clone() for p in ours.parameters())])
            ours.zero_grad()
        assert products(ours)[0] == "8 products"
        runs.append(grads)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_autocast() -> None:
    """Gradients as near to fp64's as eager's under the same autocast."""
    torch.manual_seed(5)
    eager = Encoder()
    ours, exact = ORTModule(copy.deepcopy(eager), strict="engine", padding_sparsity=True), copy.deepcopy(eager).double()
    for k, (lengths, t) in enumerate(BATCHES[:3]):
        for m in (eager, ours, exact):
            m.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=m is not exact):
                m(**batch(lengths, t, seed=k)).backward()
        for (name, p), q, e in zip(ours.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
            size = e.grad.abs().max().item()
            near, far = ((x.grad.double() - e.grad).abs().max().item() for x in (p, q))
            assert near <= 2 * far + 2.0**-7 * size, f"{name}, batch {k}: {near:.2e}, eager {far:.2e} of {size:.2e}"
    assert products(ours) == ["8 products"] * len(products(ours))


@pytest.mark.parametrize("name", ["PADDING_SPARSITY", "ENABLE_COMPUTE_OPTIMIZER", "ENABLE_SPARSE_OPTIMIZER", "ENABLE_EMBEDDING_SPARSE_OPTIMIZER"])
def test_off_from_outside(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for value, told in (("0", ""), ("1", "4 products")):
        monkeypatch.setenv(f"ORTMODULE_{name}", value)
        model = ORTModule(Encoder(layers=1), padding_sparsity=True)
        model(**batch([5, 2])).backward()
        assert products(model) == [told]
    assert "has no effect" not in caplog.text
