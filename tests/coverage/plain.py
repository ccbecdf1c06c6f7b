"""Models in plain torch: sequences, images, generative models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rows import IMAGES, Family, ids
from torch import Tensor, nn

D = 16
row = Family("plain torch")


def randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def tokens(_m: Any, b: int, t: int, g: torch.Generator) -> Any:
    return ids(b, t, g), ids(b, t, g)


def sentence(_m: Any, b: int, t: int, g: torch.Generator) -> Any:
    return ids(b, t, g), torch.randint(0, 4, (b,), generator=g)


def features(_m: Any, b: int, t: int, g: torch.Generator) -> Any:
    return randn(g, b, t, D), randn(g, b, t, D)


def image(_m: Any, b: int, t: int, g: torch.Generator) -> Any:
    return randn(g, b, 3, t, t), torch.randint(0, 4, (b,), generator=g)


def images(_m: Any, b: int, t: int, g: torch.Generator) -> Any:
    return randn(g, b, 3, t, t), randn(g, b, 3, t, t)


def vectors(_m: Any, b: int, t: int, g: torch.Generator) -> Any:
    return randn(g, b * t, D), randn(g, b * t, D)


# --- sequences ---------------------------------------------------------------------------------------


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, D), nn.Linear(D, 64)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@row("nn.Transformer", tokens)
class Seq2Seq(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(D, 4, 2, 2, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        return self.loss(self.body(self.embed(x), self.embed(y), tgt_mask=mask, tgt_is_causal=True), y)


@row("nn.TransformerEncoder, padding mask", sentence)
class Encoder(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 32, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False)
        self.out = nn.Linear(D, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pad = x < 8
        pad = pad & ~pad.all(1, keepdim=True)
        return F.cross_entropy(self.out(self.body(self.embed(x), src_key_padding_mask=pad).mean(1)), y)


@row("nn.TransformerDecoder, causal", tokens)
class Decoder(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, 32, 0.0, batch_first=True), 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.full((y.shape[1], y.shape[1]), -math.inf).triu(1)
        return self.loss(self.body(self.embed(y), self.embed(x), tgt_mask=mask), y)


@row("nn.MultiheadAttention with weights", features)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, w = self.body(x, y, y)
        return h, w


def recurrent(cls: Any, **kw: Any) -> type:
    class Recurrent(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.body = cls(D, D, 2, batch_first=True, **kw)
            self.out = nn.Linear(D * (2 if kw.get("bidirectional") else 1), 64)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.out(self.body(self.embed(x))[0]).flatten(0, 1), y.flatten())

    return Recurrent


row("nn.LSTM", tokens)(recurrent(nn.LSTM))
row("nn.LSTM, both directions", tokens)(recurrent(nn.LSTM, bidirectional=True))
row("nn.LSTM with a projection", tokens)(type("P", (recurrent(nn.LSTM, proj_size=D // 2),), {"__init__": lambda self: _projected(self)}))
row("nn.GRU", tokens)(recurrent(nn.GRU))
row("nn.GRU, both directions", tokens)(recurrent(nn.GRU, bidirectional=True))
row("nn.RNN", tokens)(recurrent(nn.RNN))


def _projected(self: Any) -> None:
    type(self).__mro__[1].__init__(self)
    self.out = nn.Linear(D // 2, 64)


@row("LSTM, packed sequences", lambda m, b, t, g: (ids(b, t, g), torch.randint(2, t + 1, (b,), generator=g)))
class Packed(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True)
        return self.head(h).square().mean()


@row("LSTMCell in a loop", tokens)
class Cell(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], D, dtype=self.head.weight.dtype)
        out = []
        for t in range(x.shape[1]):
            h, c = self.cell(self.embed(x[:, t]), (h, c))
            out.append(h)
        return self.loss(torch.stack(out, 1), y)


@row("GRUCell and attention, teacher forcing", tokens)
class Bahdanau(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.GRU(D, D, batch_first=True), nn.GRUCell(2 * D, D)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states, last = self.encoder(self.embed(x))
        h, out = last[-1], []
        for t in range(y.shape[1]):
            w = self.v(torch.tanh(self.q(h)[:, None] + self.k(states))).softmax(1)
            h = self.cell(torch.cat([self.embed(y[:, t]), (w * states).sum(1)], -1), h)
            out.append(h)
        return self.loss(torch.stack(out, 1), y)


@row("linear-chain CRF", tokens)
class CRF(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(D, D, batch_first=True)
        self.emit, self.move = nn.Linear(D, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        e, tags = self.emit(self.body(self.embed(x))[0]), y % 5
        total = e[:, 0]
        for t in range(1, x.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.move + e[:, t, None], 1)
        score = e.gather(2, tags[..., None]).sum((1, 2)) + self.move[tags[:, :-1], tags[:, 1:]].sum(1)
        return (total.logsumexp(1) - score).mean()


@row("WaveNet", lambda m, b, t, g: (randn(g, b, 1, 4 * t),))
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, D, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=2**i) for i in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(3))
        self.last = nn.Conv1d(D, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.first(x), 0
        for conv, skip in zip(self.dilated, self.skip):
            a, b = conv(F.pad(h, (conv.dilation[0], 0))).chunk(2, 1)
            s = skip(torch.tanh(a) * torch.sigmoid(b))
            h, total = h + s, total + s
        return F.mse_loss(self.last(F.relu(total))[..., :-1], x[..., 1:])


@row("TCN, weight norm", features)
class TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.body = nn.Sequential(*[m for i in (1, 2, 4) for m in (norm(nn.Conv1d(D, D, 3, padding=i, dilation=i)), nn.ReLU())])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x.transpose(1, 2)).transpose(1, 2), y)


@row("conformer block", features)
class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(D, 32), nn.SiLU(), nn.Linear(32, D)) for _ in range(2))
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.up, self.deep, self.bn, self.down = nn.Conv1d(D, 2 * D, 1), nn.Conv1d(D, D, 7, padding=3, groups=D), nn.BatchNorm1d(D), nn.Conv1d(D, D, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + 0.5 * self.ff[0](self.norms[0](x))
        h = self.norms[1](x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        h = F.glu(self.up(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.down(F.silu(self.bn(self.deep(h)))).transpose(1, 2)
        return F.l1_loss(x + 0.5 * self.ff[1](self.norms[3](x)), y)


@row("S4D state space, by FFT", features)
class S4D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_a, self.c, self.d = nn.Parameter(torch.rand(D, 4)), nn.Parameter(torch.randn(D, 4)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[1]
        kernel = (self.c[..., None] * torch.exp(-self.log_a.exp()[..., None] * torch.arange(n))).sum(1)
        u = x.transpose(1, 2)
        h = torch.fft.irfft(torch.fft.rfft(u, n=2 * n) * torch.fft.rfft(kernel, n=2 * n), n=2 * n)[..., :n]
        return F.mse_loss((h + self.d[:, None] * u).transpose(1, 2), y)


@row("spectrogram CNN, stft", lambda m, b, t, g: (randn(g, b, 20 * t),))
class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Buffer(torch.hann_window(32))
        self.conv = nn.Conv1d(17, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        s = torch.stft(x, 32, 16, window=self.window, return_complex=True).abs()
        return self.conv(torch.log1p(s)).mean(-1)


@row("MLP-Mixer", features, ((2, 12), (2, 12), (3, 12), (1, 12)))
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.cols = nn.Linear(12, 12), nn.Linear(D, D)
        self.a, self.b = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + F.gelu(self.rows(self.a(x).transpose(1, 2))).transpose(1, 2)
        return F.mse_loss(x + F.gelu(self.cols(self.b(x))), y)


@row("Set Transformer", features)
class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(1, 3, D))
        self.inside, self.pool = nn.MultiheadAttention(D, 2, batch_first=True), nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x + self.inside(x, y, y)[0]
        return self.pool(self.seeds.expand(x.shape[0], -1, -1), h, h)[0].sum(1)


@row("mixture of experts, dense gate", vectors)
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(nn.Linear(D, D) for _ in range(4)), nn.Linear(D, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss((torch.stack([e(x) for e in self.experts], 1) * self.gate(x).softmax(-1)[..., None]).sum(1), y)


@row("mixture of experts, top 2, a loop over experts", vectors)
class Sparse(Dense):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(which == i)
            out = out.index_add(0, row, expert(x[row]) * weight[row, slot, None])
        return F.mse_loss(out, y)


# --- images ------------------------------------------------------------------------------------------


def conv(i: int, o: int, k: int = 3, **kw: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=False, **kw), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Classifier(nn.Module):
    def __init__(self, *body: nn.Module, width: int = D) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), y, label_smoothing=0.1)


class Block(nn.Module):
    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(i, o, stride=stride), nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o))
        self.short = nn.Sequential(nn.Conv2d(i, o, 1, stride=stride), nn.BatchNorm2d(o)) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Squeeze(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 4, 3, padding=1)) for c in (4, 8, 12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(D, 4, 1), conv(D, 8, 3), conv(D, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(F.max_pool2d(x, 3, 1, 1))], 1)


def cnn(name: str, *body: Callable[[], nn.Module]) -> None:
    row.of(name, lambda: Classifier(*[m() for m in body]), image, IMAGES)


cnn("ResNet, basic blocks", lambda: conv(3, D), lambda: Block(D, D), lambda: Block(D, D, 2))
cnn("VGG", lambda: conv(3, 8), lambda: nn.MaxPool2d(2), lambda: conv(8, D), lambda: nn.AvgPool2d(2))
cnn("MobileNet, depthwise", lambda: conv(3, 8), lambda: conv(8, 8, groups=8), lambda: conv(8, D, 1), lambda: nn.Hardswish())
cnn("EfficientNet block", lambda: conv(3, D), lambda: nn.SiLU(), lambda: Squeeze(D), lambda: conv(D, D, 1))
cnn("ConvNeXt block", lambda: nn.Conv2d(3, D, 4, 4), lambda: nn.Conv2d(D, D, 7, padding=3, groups=D), lambda: nn.GroupNorm(1, D), lambda: nn.Conv2d(D, D, 1), nn.GELU)
cnn("DenseNet block", lambda: conv(3, 4), DenseBlock)
cnn("Inception block", lambda: conv(3, D), Inception)
cnn("ResNeXt, groups and strides", lambda: conv(3, D, stride=2), lambda: conv(D, D, groups=4), lambda: nn.Dropout2d(0.0))
cnn("instance norm, reflection", lambda: nn.ReflectionPad2d(1), lambda: nn.Conv2d(3, D, 3), lambda: nn.InstanceNorm2d(D, affine=True), lambda: nn.LeakyReLU(0.2))
cnn("spectral norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, D, 3)), lambda: nn.LeakyReLU(0.2))
cnn("fractional sizes, adaptive max pool", lambda: conv(3, D), lambda: nn.AdaptiveMaxPool2d(5), lambda: nn.PReLU())
cnn("LP pool, CELU, channel shuffle", lambda: conv(3, D), lambda: nn.LPPool2d(2, 2), lambda: nn.ChannelShuffle(4), nn.CELU)


@row("U-Net, transposed convolutions", images, IMAGES)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, D)
        self.up, self.last = nn.ConvTranspose2d(D, 8, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.a(x)
        return F.mse_loss(self.last(torch.cat([a, self.up(self.b(F.max_pool2d(a, 2)))], 1)), y)


@row("FCN, bilinear", images, ((2, 32), (2, 32), (3, 40), (1, 24)))
class FCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Sequential(conv(3, 8, stride=2), conv(8, D, stride=2)), nn.Conv2d(D, 5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = F.interpolate(self.head(self.down(x)), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(logits, (y[:, 0] > 0).long() + (y[:, 1] > 0))


@row("super resolution, pixel shuffle and bicubic", lambda m, b, t, g: (randn(g, b, 3, t // 2, t // 2), randn(g, b, 3, t, t)), IMAGES)
class Super(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, D, 3, padding=1), nn.ReLU(), nn.Conv2d(D, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(self.body(x) + F.interpolate(x, scale_factor=2, mode="bicubic"), y)


@row("spatial transformer, grid_sample", image, IMAGES)
class STN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.find, self.body = nn.Linear(3, 6), Classifier(conv(3, D))
        nn.init.normal_(self.find.weight, std=0.1)
        self.find.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        theta = self.find(x.mean((2, 3))).view(-1, 2, 3)
        return self.body(F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False), y)


@row("3-D CNN", lambda m, b, t, g: (randn(g, b, 2, 6, 8, 8), torch.randint(0, 4, (b,), generator=g)), IMAGES)
class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, D, 3, padding=1))
        self.head = nn.Linear(D, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3, 4))), y)


@row("ViT by hand, unfold", image, IMAGES)
class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(3 * 64, D), nn.Parameter(torch.randn(1, 17, D))
        self.first, self.head = nn.Parameter(torch.randn(1, 1, D)), nn.Linear(D, 4)
        self.body = nn.TransformerEncoderLayer(D, 4, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(F.unfold(x, 8, stride=8).transpose(1, 2))
        h = torch.cat([self.first.expand(x.shape[0], -1, -1), h], 1) + self.place
        return F.cross_entropy(self.head(self.body(h)[:, 0]), y)


@row("capsules, routing by agreement", image, IMAGES)
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.w = nn.Conv2d(3, D, 9, stride=6), nn.Parameter(0.1 * torch.randn(1, 64, 4, 6, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u = self.body(x).flatten(2).transpose(1, 2).reshape(x.shape[0], 64, 1, 4, 1)
        votes = (self.w @ u)[..., 0]
        b = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(3):
            s = (b.softmax(2)[..., None] * votes).sum(1)
            n = s.norm(dim=-1, keepdim=True)
            v = s * n / (1 + n * n)
            b = b + (votes * v[:, None]).sum(-1)
        return F.multi_margin_loss(v.norm(dim=-1), y)


@row("NeRF, volume rendering", lambda m, b, t, g: (randn(g, b * t, 3), randn(g, b * t, 3)))
class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, start: Tensor, way: Tensor) -> Tensor:
        z = torch.linspace(0.0, 1.0, 8, dtype=start.dtype)
        x = start[:, None] + z[:, None] * way[:, None]
        code = torch.cat([f(x * 2**i) for i in range(4) for f in (torch.sin, torch.cos)], -1)
        out = self.body(code)
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) * 0.125)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return (alpha * clear)[..., None].mul(out[..., :3].sigmoid()).sum(1)
