"""Small models of five kinds, and a batch for each: what sweeps over memory train. Every one has dropout but Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, VOCAB = 3, 64, 4, 211


class LossAlone(nn.Module):
    """onnxruntime-training's pattern (ModuleWithLoss): the loss alone leaves the module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kw: Tensor) -> Tensor:
        return self.model(**kw).loss


def gpt2(**kw: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCAB, n_positions=96,
                                                                bos_token_id=0, eos_token_id=0, use_cache=False, **kw))  # fmt: skip


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
                                                                intermediate_size=4 * WIDTH, vocab_size=VOCAB))  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
                                                                  intermediate_size=3 * WIDTH, vocab_size=VOCAB, use_cache=False))  # fmt: skip


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
                                                                         intermediate_size=4 * WIDTH, image_size=48, patch_size=6, num_labels=5,
                                                                         hidden_dropout_prob=0.1))  # fmt: skip


class Cube(torch.autograd.Function):
    """A function of the user's: tanh(x)^3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh() ** 3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = x.tanh()
        return dy * 3 * t * t * (1 - t * t)


class CNN(nn.Module):
    """Residual blocks with BatchNorm, whose statistics are written."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU(), nn.Dropout(0.1))
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def ids(seed: int = 0, b: int = 6, t: int = 80) -> Tensor:
    return torch.randint(1, VOCAB, (b, t), generator=torch.Generator().manual_seed(seed))


def images(b: int, size: int) -> Tensor:
    return torch.randn(b, 3, size, size, generator=torch.Generator().manual_seed(3))


def padded(b: int = 6, t: int = 80) -> Tensor:
    return (torch.arange(t)[None] < torch.arange(t, t - 8 * b, -8)[:, None]).long()


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "gpt2": (gpt2, {"input_ids": ids(), "labels": ids()}),
    "bert": (bert, {"input_ids": ids(), "labels": ids(1), "attention_mask": padded()}),
    "llama": (llama, {"input_ids": ids(), "labels": ids()}),
    "vit": (vit, {"pixel_values": images(8, 48), "labels": torch.arange(8) % 5}),
    "cnn": (CNN, {"x": images(8, 40), "labels": torch.arange(8) % 5}),
}
