"""memory_opt_level=1: transformer layers are computed again in backward. The bits stay, the memory goes
(csrc/passes/remat.c)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from small_models import Cube
from torch import Tensor, nn
from training import stay_fp64, train

from ortmodule import ORTModule

LAYERS, WIDTH, HEADS, VOCAB = 5, 48, 3, 61


def gpt2(**kw: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCAB, n_positions=64,
                                                                bos_token_id=0, eos_token_id=0, **kw))  # fmt: skip


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
                                                                # fmt: skip
                                                                intermediate_size=4 * WIDTH, vocab_size=VOCAB))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
                                                                  # fmt: skip
                                                                  intermediate_size=3 * WIDTH, vocab_size=VOCAB))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=LAYERS, d_model=WIDTH, d_kv=16, num_heads=HEADS, d_ff=4 * WIDTH,
                                                                         # fmt: skip
                                                                         vocab_size=VOCAB, decoder_start_token_id=0))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
                                                                         intermediate_size=4 * WIDTH, image_size=48, patch_size=8, num_labels=5,
                                                                         hidden_dropout_prob=0.1))  # fmt: skip


def ids(seed: int = 0, b: int = 8, t: int = 48) -> Tensor:
    return torch.randint(1, VOCAB, (b, t), generator=torch.Generator().manual_seed(seed))


def padded() -> Tensor:
    return (torch.arange(48)[None] < torch.arange(48, 0, -6)[:, None]).long()


# and what level 1 may take of level 0's arena
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], float]] = {
    "gpt2": (gpt2, {"input_ids": ids(), "labels": ids()}, 0.5),
    "gpt2-no-cache": (lambda: gpt2(use_cache=False), {"input_ids": ids(), "labels": ids()}, 0.5),
    "bert-padded": (bert, {"input_ids": ids(), "labels": ids(1), "attention_mask": padded()}, 0.5),
    "llama": (llama, {"input_ids": ids(), "labels": ids()}, 0.5),
    "t5": (t5, {"input_ids": ids(), "labels": ids(1), "attention_mask": padded()}, 0.55),
    "vit": (vit, {"pixel_values": torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(3)), "labels": torch.arange(8) % 5}, 0.5),
}


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> None:
    """At level INFO a second plan is made for what is told, which is none of a step's."""
    caplog.set_level(logging.WARNING, "ortmodule")


def arena(ours: ORTModule) -> int:
    return max(p["arena_bytes"] for c in ours._ortmodule.every for p in c.graph.model.plan_report())


def both(make: Callable[[], nn.Module], **options: Any) -> tuple[ORTModule, ORTModule]:
    torch.manual_seed(0)
    model = make().train()
    return ORTModule(copy.deepcopy(model), **options), ORTModule(model, memory_opt_level=1, **options)


def equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for (name, x), y in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize(("name", "segment_mb"), [*((name, 25.0) for name in MODELS), ("gpt2", 0.01), ("t5", 0.01)])
def test_same_bits_less_memory(name: str, segment_mb: float) -> None:
    """With dropout (0.1 in all of them but Llama): a clone draws the forward's numbers."""
    make, batch, most = MODELS[name]
    plain, layers = both(make, strict=True, segment_mb=segment_mb)
    for step in range(2):
        out = []
        for m in (plain, layers):
            torch.manual_seed(step)
            out.append(m(**batch))
            out[-1].loss.backward()
        assert torch.equal(out[0].loss, out[1].loss) and torch.equal(out[0].logits, out[1].logits)
        equal(plain, layers)
    if segment_mb > 1:  # gradients that are handed out early are not in the arena, but need their inputs longer
        assert arena(layers) <= most * arena(plain), (arena(layers), arena(plain))


def test_training_equals_eager_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    stay_fp64(monkeypatch)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    train(gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), [{"input_ids": ids()}], steps=2, strict=True)


def test_backwards_in_any_order() -> None:
    """Two forwards in flight, their backwards out of order, one of them twice."""
    plain, layers = both(bert)
    for m in (plain, layers):
        torch.manual_seed(1)
        a = m(input_ids=ids(1), labels=ids(2)).loss
        b = m(input_ids=ids(3), labels=ids(4)).loss
        a.backward(retain_graph=True)
        b.backward()
        a.backward()
    equal(plain, layers)


class Block(nn.Module):
    """An attention layer with a BatchNorm, a buffer that it reads and then overwrites, and optionally a function of the
    user's."""

    def __init__(self, width: int, user: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.batch = nn.LayerNorm(width), nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.user = user

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        h = self.norm2(x) + torch.tanh(self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        h = nn.functional.gelu(self.batch(h.transpose(1, 2)).transpose(1, 2))
        h = self.up(h)
        return x + self.down(Cube.apply(h) if self.user else h.sigmoid())


@pytest.mark.parametrize("user", [False, True])
def test_state_is_written_once(user: bool) -> None:
    plain, layers = both(lambda: nn.Sequential(*[Block(24, user) for _ in range(4)], nn.Linear(24, 3)))
    x = torch.randn(4, 20, 24, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for m in (plain, layers):
            m(x + step).square().mean().backward()
        equal(plain, layers)
    assert arena(layers) < arena(plain)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, False) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states[-1].square().mean(), states


def test_boundaries_that_are_outputs() -> None:
    """The user has the layers' inputs: backward reads them there, and a gradient may arrive at each."""
    plain, layers = both(Tower)
    x = torch.randn(4, 20, 24, generator=torch.Generator().manual_seed(1))
    for m in (plain, layers):
        loss, states = m(x)
        (loss + sum((k + 1) * s.sin().mean() for k, s in enumerate(states[1:]))).backward()
    equal(plain, layers)
    assert arena(layers) < arena(plain)


def test_a_model_without_attention_stays() -> None:
    plain, layers = both(lambda: nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3)))
    for m in (plain, layers):
        m(torch.ones(5, 7)).sum().backward()
    equal(plain, layers)
    assert arena(layers) == arena(plain)


def test_the_level_is_an_option_and_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="memory_opt_level=3 is not allowed"):
        ORTModule(nn.Linear(2, 2), memory_opt_level=3)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    torch.manual_seed(0)
    ours = ORTModule(gpt2())
    assert ours._ortmodule.settings.memory_opt_level == 1
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "high")
    with pytest.raises(ValueError, match="ORTMODULE_MEMORY_OPT_LEVEL='high' is not allowed; give 0, 1 or 2"):
        ORTModule(gpt2())
