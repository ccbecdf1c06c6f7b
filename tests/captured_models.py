"""Models that are captured in several tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


def ids(batch: int, length: int, vocabulary: int = 97) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def padded(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    for i in range(batch):
        mask[i, length - i :] = 0
    return mask


NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=24, n_head=3, vocab_size=97, n_positions=41, bos_token_id=1, eos_token_id=2, **(NO_DROPOUT | more)
        )
    )


def bert(cls: str, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    return getattr(transformers, cls)(
        transformers.BertConfig(
            num_hidden_layers=2,
            hidden_size=30,
            num_attention_heads=3,
            intermediate_size=34,
            vocab_size=97,
            max_position_embeddings=41,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=5,
            **more,
        )
    )


def t5() -> nn.Module:
    torch.manual_seed(2)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=2, d_model=22, d_kv=7, num_heads=3, d_ff=34, vocab_size=97, dropout_rate=0.0, decoder_start_token_id=0
        )
    )


def llama() -> nn.Module:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=24,
            num_attention_heads=6,
            num_key_value_heads=3,
            intermediate_size=34,
            vocab_size=97,
            max_position_embeddings=41,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def vit() -> nn.Module:
    torch.manual_seed(4)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=2,
            hidden_size=30,
            num_attention_heads=3,
            intermediate_size=34,
            image_size=15,
            patch_size=5,
            num_labels=7,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 5, stride=2, padding=2), nn.BatchNorm2d(7), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.block = Residual(7)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(7, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(self.pool(self.block(self.stem(x))).flatten(1)), y, label_smoothing=0.1)


class Lstm(nn.Module):
    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        torch.manual_seed(6)
        self.rnn = getattr(nn, kind)(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0])


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(31, 7, padding_idx=2)
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.fc(self.embedding(x).mean(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def encoder() -> nn.Module:
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(22, 2, 34, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3)), lambda b, t: ((torch.randn(b, 5),), {})),
    "gpt2": (gpt2, lambda b, t: ((), {"input_ids": ids(b, t), "labels": ids(b, t)})),
    "gpt2_padded": (gpt2, lambda b, t: ((), {"input_ids": ids(b, t), "labels": ids(b, t), "attention_mask": padded(b, t)})),
    "bert_mlm": (lambda: bert("BertForMaskedLM"), lambda b, t: ((), {"input_ids": ids(b, t), "labels": ids(b, t)})),
    "bert_cls": (
        lambda: bert("BertForSequenceClassification"),
        lambda b, t: ((), {"input_ids": ids(b, t), "attention_mask": padded(b, t), "labels": ids(b, 1, 5)[:, 0]}),
    ),
    "t5": (t5, lambda b, t: ((), {"input_ids": ids(b, t), "attention_mask": padded(b, t), "labels": ids(b, t + 2)})),
    "llama": (llama, lambda b, t: ((), {"input_ids": ids(b, t), "labels": ids(b, t), "attention_mask": padded(b, t)})),
    "vit": (vit, lambda b, t: ((), {"pixel_values": torch.randn(b, 3, 15, 15), "labels": ids(b, 1, 7)[:, 0]})),
    "encoder": (encoder, lambda b, t: ((torch.randn(b, t, 22),), {"src_key_padding_mask": padded(b, t) == 0})),
    "resnet": (ResNet, lambda b, t: ((torch.randn(b, 3, 23, 19), ids(b, 1, 11)[:, 0]), {})),
    "lstm": (Lstm, lambda b, t: ((torch.randn(b, t, 5, requires_grad=True),), {})),
    "gru": (lambda: Lstm("GRU"), lambda b, t: ((torch.randn(b, t, 5, requires_grad=True),), {})),
    "text": (TextClassifier, lambda b, t: ((ids(b, t, 31), ids(b, 1, 5)[:, 0]), {})),
}
