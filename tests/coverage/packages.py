"""Models of smaller packages, each where it is installed: transformers of many kinds, flows, solvers, Gaussian processes,
equivariant and graph networks, quantizers, spiking neurons, tables. A package is a row of PACKAGES; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from others import _has
from rows import SEQUENCES, Row, Size, Table, ids
from torch import Generator, Tensor, nn

Batch = Callable[[Any, int, int, Generator], Any]
SIXTEENS: tuple[Size, ...] = ((2, 16), (2, 16), (3, 24), (1, 8))


class Next(nn.Module):
    """A language model and its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Likely(nn.Module):
    """A flow and what its samples are worth."""

    def __init__(self, flow: nn.Module, conditional: bool = False) -> None:
        super().__init__()
        self.flow, self.conditional = flow, conditional

    def forward(self, x: Tensor) -> Tensor:
        return -(self.flow() if self.conditional else self.flow).log_prob(x).mean()


class Solved(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.net, self.method = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), method

    def forward(self, x: Tensor) -> Tensor:
        solve = importlib.import_module("torchdiffeq").odeint
        return solve(lambda _t, y: self.net(y), x, torch.linspace(0, 1, 4), method=self.method)


class Quantized(nn.Module):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        quantizer = getattr(importlib.import_module("vector_quantize_pytorch"), name)(**options)
        self.first, self.quantizer, self.last = nn.Linear(16, 16), quantizer, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out, *rest = self.quantizer(self.first(x))
        return F.mse_loss(self.last(out), x), *rest


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(64, 16), nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.out, self.crf = nn.Linear(16, 5), importlib.import_module("torchcrf").CRF(5, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return -self.crf(self.out(self.lstm(self.embed(x))[0]), y, mask=mask, reduction="mean")


def _tokens(m: Any, b: int, t: int, g: Generator) -> Any:
    return (ids(b, t, g),)


def _tagged(m: Any, b: int, t: int, g: Generator) -> Any:
    return ids(b, t, g), torch.randint(0, 5, (b, t), generator=g), torch.arange(t)[None] < torch.arange(t, t - b, -1)[:, None]


def _points(m: Any, b: int, t: int, g: Generator) -> Any:
    return torch.randn(b, t, 16, generator=g), torch.randn(b, t, 3, generator=g)


def _line(width: int) -> Batch:
    return lambda m, b, t, g: (torch.randn(b, t, width, generator=g),)


def _floats(*sizes: int) -> Batch:
    return lambda m, b, t, g: (torch.randn(b, *sizes, generator=g),)


def _x_transformer(x: Any, **options: Any) -> nn.Module:
    return Next(x.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=x.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)))


def _litgpt(p: Any, **options: Any) -> nn.Module:
    return Next(p.GPT(p.Config(block_size=32, n_layer=2, n_embd=32, n_head=4, vocab_size=64, padded_vocab_size=64, head_size=8, **options)))


_LLAMA = {"norm_class_name": "RMSNorm", "intermediate_size": 48, "parallel_residual": False, "bias": False}
_LM = {"num_tokens": 64, "dim": 32, "depth": 2, "heads": 2}
_FLOW = {"features": 4, "transforms": 2, "hidden_features": (16,)}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
# package -> name: what makes the model of the package, its batches, other sizes
PACKAGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "x_transformers": {
        "decoder": (lambda p: _x_transformer(p), _tokens), "rotary": (lambda p: _x_transformer(p, rotary_pos_emb=True, attn_flash=True), _tokens),
        "RMSNorm, SwiGLU": (lambda p: _x_transformer(p, use_rmsnorm=True, ff_swish=True, ff_glu=True), _tokens),
        "sparse attention": (lambda p: _x_transformer(p, attn_sparse_topk=4), _tokens), "gated residual": (lambda p: _x_transformer(p, gate_residual=True), _tokens),
        "memory keys": (lambda p: _x_transformer(p, attn_num_mem_kv=4), _tokens),
    },
    "perceiver_pytorch": {"Perceiver": (lambda p: p.Perceiver(num_freq_bands=2, depth=2, max_freq=10.0, num_latents=8, latent_dim=16, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=5), _floats(8, 8, 3))},
    "performer_pytorch": {
        "PerformerLM": (lambda p: Next(p.PerformerLM(max_seq_len=32, dim_head=16, nb_features=16, **_LM)), _tokens),
        "PerformerLM, drawn anew": (lambda p: Next(p.PerformerLM(max_seq_len=32, dim_head=16, nb_features=16, feature_redraw_interval=2, **_LM)), _tokens),
    },
    "reformer_pytorch": {"ReformerLM": (lambda p: Next(p.ReformerLM(max_seq_len=32, dim_head=16, bucket_size=4, n_hashes=2, ff_chunks=1, use_full_attn=True, **_LM)), _tokens, SIXTEENS)},
    "linformer": {"LinformerLM": (lambda p: Next(p.LinformerLM(seq_len=32, k=8, **_LM)), _tokens)},
    "egnn_pytorch": {"EGNN": (lambda p: p.EGNN(dim=16), _points), "EGNN, neighbours": (lambda p: p.EGNN(dim=16, num_nearest_neighbors=4, norm_coors=True, soft_edges=True), _points)},
    "mlp_mixer_pytorch": {"MLPMixer": (lambda p: p.MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5), _floats(3, 32, 32))},
    "g_mlp_pytorch": {"gMLP": (lambda p: Next(p.gMLP(num_tokens=64, dim=32, depth=2, seq_len=32, causal=True)), _tokens)},
    "conformer": {"Conformer": (lambda p: p.Conformer(dim=32, depth=2, dim_head=8, heads=2, conv_kernel_size=5), _line(32))},
    "vector_quantize_pytorch": {
        "VectorQuantize, EMA": (lambda p: Quantized("VectorQuantize", dim=16, codebook_size=12), _line(16)),
        "ResidualFSQ": (lambda p: Quantized("ResidualFSQ", levels=[5, 3], num_quantizers=2, dim=16), _line(16)),
        "LFQ": (lambda p: Quantized("LFQ", dim=16, codebook_size=16, entropy_loss_weight=0.1), _line(16)),
    },
    "soft_moe_pytorch": {"SoftMoE": (lambda p: p.SoftMoE(dim=16, seq_len=16, num_experts=3), _line(16))},
    "zuko.flows": {n: (lambda p, n=n: Likely(getattr(p, n)(**_FLOW), True), _floats(4)) for n in ("NSF", "MAF", "NICE", "NCSF")},
    "normflows": {
        "spline": (lambda p: Likely(p.NormalizingFlow(p.distributions.base.DiagGaussian(4), [p.flows.AutoregressiveRationalQuadraticSpline(4, 1, 16), p.flows.LULinearPermute(4)])), _floats(4)),
        "masked affine": (lambda p: Likely(p.NormalizingFlow(p.distributions.base.DiagGaussian(4), [p.flows.MaskedAffineAutoregressive(4, 16, num_blocks=1)])), _floats(4)),
    },
    "torchdiffeq": {n: (lambda p, n=n: Solved(n), _floats(4)) for n in ("rk4", "euler", "dopri5")},
    "mambapy.mamba": {"Mamba": (lambda p: Next(nn.Sequential(nn.Embedding(64, 16), p.Mamba(p.MambaConfig(d_model=16, n_layers=2, d_state=4)), nn.Linear(16, 64))), _tokens)},
    "litgpt": {
        "GPT-NeoX": (lambda p: _litgpt(p), _tokens), "Llama": (lambda p: _litgpt(p, mlp_class_name="LLaMAMLP", n_query_groups=2, **_LLAMA), _tokens),
        "experts": (lambda p: _litgpt(p, mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, **_LLAMA), _tokens),
    },
    "torchcrf": {"LSTM and CRF": (lambda p: Tagger(), _tagged)},
    "entmax": {n: (lambda p, n=n: nn.Sequential(nn.Linear(8, 6), getattr(p, n)(dim=-1)), _floats(8)) for n in ("Sparsemax", "Entmax15")},
    "rtdl_revisiting_models": {"MLP": (lambda p: p.MLP(d_in=4, d_out=2, n_blocks=2, d_block=16, dropout=0.0), _floats(4))},
    "monai.networks.nets": {
        "UNet": (lambda p: p.UNet(channels=(4, 8, 8), strides=(2, 2), num_res_units=1, **_FLAT), _floats(1, 32, 32)),
        "AttentionUnet": (lambda p: p.AttentionUnet(channels=(4, 8, 8), strides=(2, 2), **_FLAT), _floats(1, 32, 32)),
        "SegResNet": (lambda p: p.SegResNet(init_filters=4, norm=("GROUP", {"num_groups": 2}), **_FLAT), _floats(1, 32, 32)),
    },
}  # fmt: skip


def add_to(table: Table) -> None:
    for package, models in PACKAGES.items():
        found = _has(table, package)
        for name, (make, batch, *sizes) in models.items() if found else ():
            table.add(Row(f"{package.partition('.')[0]} {name}", "packages", lambda m=make, p=found: m(p), batch, *(sizes or [SEQUENCES])))
