"""Models as Hugging Face configures them by default, at full width and depth: five steps of fp64 gradients at 1e-10,
fp32 error within twice eager's own.

Sequences are short (the parameters' sizes are what differs from test_models.py). Two exceptions to "default", for
memory and time: Llama's 7 B parameters become one layer and a small vocabulary at the default width, ViT's image is 64
pixels wide instead of 224. One model stays in `make test`, the others are `make test-full`. Peak about 5 GB.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import compare_dropout_replay, compare_fp32, compare_step, ids, leaves, loss_of, same, stay_fp64

from ortmodule import ORTModule

transformers = pytest.importorskip("transformers")

B, T, STEPS = 2, 17, 5
MASK = (torch.arange(T)[None] < torch.tensor([[T], [T - 6]])).long()


def gpt2(p: float = 0.0) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(resid_pdrop=p, embd_pdrop=p, attn_pdrop=p))


def bert(cls: str) -> nn.Module:
    return getattr(transformers, cls)(transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, vocab_size=1000))


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=64, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.ViTForImageClassification(config)


WORDS = {"input_ids": ids(1000, B, T)}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "gpt2": (gpt2, WORDS),
    "bert-mlm": (lambda: bert("BertForMaskedLM"), WORDS),
    "bert-cls-padded": (lambda: bert("BertForSequenceClassification"), {**WORDS, "attention_mask": MASK}),
    "t5": (t5, {**WORDS, "decoder_input_ids": ids(1000, B, 11, seed=1)}),
    "llama": (llama, WORDS),
    "vit": (vit, {"pixel_values": torch.randn(B, 3, 64, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}),
}
IN_EVERY_RUN = ("bert-cls-padded",)


def gradients(m: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in m.named_parameters() if p.grad is not None}
    m.zero_grad()
    return found


@pytest.mark.parametrize("name", [n if n in IN_EVERY_RUN else pytest.param(n, marks=pytest.mark.full) for n in MODELS])
def test_default_size_trains_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make().train()
    single = copy.deepcopy(model), {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    model, exact = model.double(), {}
    with pytest.MonkeyPatch.context() as patch:
        stay_fp64(patch)
        ours = ORTModule(model, strict="engine")  # the same parameters: one copy of them
        for step in range(STEPS):
            want = model(**batch)
            loss_of(want).backward()
            outputs, expected = [t.detach() for t in leaves(want)], gradients(model)
            got = ours(**batch)
            loss_of(got).backward()
            for i, (a, b) in enumerate(zip(leaves(got), outputs, strict=True)):
                same(a.detach(), b, f"step {step}: output {i}")
            summed = max(g.abs().max().item() for g in expected.values())
            found = gradients(model)
            assert found.keys() == expected.keys()
            for n, g in expected.items():
                same(found[n], g, f"step {step}: gradient of {n}", summed=summed)
            exact = expected if step == 0 else exact
            with torch.no_grad():
                for n, p in model.named_parameters():
                    if n in expected:
                        # a small step: gradients of a diverging model agree no further than its condition
                        p.sub_(expected[n], alpha=1e-3 / summed)
        assert ours.report().node_share == 1.0, str(ours.report())
        del model, ours, want, got, found, expected
    eager, batch = single
    compare_fp32(ORTModule(copy.deepcopy(eager), strict="engine"), eager, exact, batch)


@pytest.mark.full
def test_default_size_gpt2_trains_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: after one optimizer step without dropout, one with, by replaying the engine's masks in eager."""
    torch.manual_seed(0)
    stay_fp64(monkeypatch)
    model: Any = gpt2().double().train()
    ours: Any = ORTModule(copy.deepcopy(model), strict="engine")
    compare_step(model, ours, WORDS, "first step")
    for m in (model, ours):
        torch.optim.SGD(m.parameters(), lr=1e-4).step()
        m.zero_grad()
        for part in m.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.1
    compare_dropout_replay(model, ours, WORDS, monkeypatch)
