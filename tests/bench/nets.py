"""Nets of the benchmarks that no library is needed for: convolutional, recurrent, and small ones as a newcomer writes them.

Each takes the batch as keywords and returns (loss,).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """A body that makes logits, and the cross entropy of them."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (F.cross_entropy(self.body(x), labels),)


class Bottleneck(nn.Module):
    def __init__(self, c: int, width: int, stride: int):
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(c, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.down = None
        if stride != 1 or c != out:
            self.down = nn.Sequential(nn.Conv2d(c, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + (x if self.down is None else self.down(x)), inplace=True)


def resnet50(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    c = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(c, width, stride if i == 0 else 1))
            c = 4 * width
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes)))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.up, self.down, self.scale = nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.Parameter(torch.full((c,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext_tiny(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
    c = 96
    for width, blocks in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if width != c:
            layers += [ChannelNorm(c, eps=1e-6), nn.Conv2d(c, width, 2, 2)]
        c = width
        layers += [ConvNeXtBlock(c) for _ in range(blocks)]
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(c, eps=1e-6), nn.Linear(c, classes)))


class UNet(nn.Module):
    """Four levels down and up, transposed convolutions, a label for each pixel."""

    def __init__(self, base: int = 32, classes: int = 4):
        super().__init__()

        def twice(c: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(c, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                                 nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

        widths = [base << i for i in range(5)]
        self.first = twice(3, base)
        self.downs = nn.ModuleList(twice(a, b) for a, b in zip(widths, widths[1:]))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:]))
        self.joins = nn.ModuleList(twice(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        kept = [self.first(x)]
        for down in self.downs:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        y = kept.pop()
        for up, join in zip(reversed(self.ups), reversed(self.joins)):
            y = join(torch.cat([kept.pop(), up(y)], 1))
        return (F.cross_entropy(self.last(y), labels),)


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab: int = 10000, width: int = 512, layers: int = 2):
        super().__init__()
        self.embed, self.drop = nn.Embedding(vocab, width), nn.Dropout(0.2)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        y, _ = self.rnn(self.drop(self.embed(ids)))
        return (F.cross_entropy(self.head(self.drop(y)).flatten(0, 1), labels.flatten()),)


class LSTMClassifier(nn.Module):
    def __init__(self, vocab: int = 2000, width: int = 128, classes: int = 2):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(vocab, width), nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        _, (h, _) = self.rnn(self.embed(ids))
        return (F.cross_entropy(self.head(h[-1]), labels),)


class DLRM(nn.Module):
    """Bags of categories and a few numbers, their products with each other, a click."""

    def __init__(self, tables: int = 8, rows: int = 1000, width: int = 16):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        n = tables + 1
        self.top = nn.Sequential(nn.Linear(width + n * (n - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(n, n, -1))

    def forward(self, numbers: Tensor, bags: Tensor, clicks: Tensor) -> tuple[Tensor]:
        x = self.bottom(numbers)
        rows = torch.stack([x] + [bag(bags[:, i]) for i, bag in enumerate(self.bags)], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return (F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1), clicks),)


def mlp() -> nn.Module:
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)))


def tiny_cnn() -> nn.Module:
    return Classifier(nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
                                    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10)))


# --- batches ---

def images(b: int, c: int, side: int, classes: int, pixels: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    return {"x": torch.randn(b, c, side, side, generator=g), "labels": torch.randint(classes, (b, side, side) if pixels else (b,), generator=g)}


def tokens(vocab: int, b: int, t: int, classes: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(vocab, (b, t), generator=g)
    return {"ids": ids, "labels": torch.randint(classes, (b,), generator=g) if classes else ids.roll(-1, 1)}


def clicks(b: int, tables: int = 8, rows: int = 1000, bag: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    return {"numbers": torch.randn(b, 13, generator=g), "bags": torch.randint(rows, (b, tables, bag), generator=g),
            "clicks": torch.randint(2, (b,), generator=g).float()}
