"""Models of other packages, where they are installed: timm, diffusers, torch_geometric."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rows import IMAGES, Row, Table
from torch import Tensor, nn


def _has(table: Table, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that is there, but does not fit this torch
        text = str(error).partition("\n")[0]
        table.missing.append(f"{name}: {type(error).__name__}: {text}")
        return None


class Scored(nn.Module):
    """Logits of an image model, and its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


def _image(side: int) -> Callable[..., Any]:
    return lambda m, b, t, g: (torch.randn(b, 3, side, side, generator=g), torch.randint(0, 5, (b,), generator=g))


# name -> side of the image, options that make it tiny
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}), "resnet26d": (64, {}), "resnetv2_50": (64, {}), "seresnet18": (64, {}), "ecaresnet26t": (64, {}), "mobilenetv3_small_050": (64, {}),
    "efficientnet_b0": (64, {}), "tf_efficientnetv2_b0": (64, {}), "regnetx_002": (64, {}), "regnety_002": (64, {}), "convnext_atto": (32, {}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4}),
    "deit_tiny_distilled_patch16_224": (32, {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4}),
    "beit_base_patch16_224": (32, {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4}),
    "swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 16, "num_heads": (1, 2)}),
    "mixer_s32_224": (32, {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}),
    "gmlp_s16_224": (32, {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}),
    "poolformer_s12": (32, {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)}), "densenet121": (64, {"block_config": (1, 1, 1, 1)}),
    "cspresnet50": (64, {}), "dla34": (64, {}), "hrnet_w18_small": (64, {}), "res2net50_14w_8s": (64, {}), "xcit_nano_12_p16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 32}),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 4, "patch_size": 8}), "levit_128s": (64, {"img_size": 64}), "coat_lite_tiny": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}), "edgenext_xx_small": (64, {}), "mobilevit_xxs": (64, {}), "ghostnet_050": (64, {}), "repvgg_a0": (64, {}),
    "nfnet_l0": (64, {}), "eva02_tiny_patch14_224": (28, {"img_size": 28, "patch_size": 7, "depth": 2, "embed_dim": 32, "num_heads": 4}), "focalnet_tiny_srf": (64, {"depths": (1, 1, 1, 1), "embed_dim": 16}),
}  # fmt: skip


def add_to(table: Table) -> None:
    timm = _has(table, "timm")
    for name, (side, options) in TIMM.items() if timm else ():
        make = lambda name=name, options=options: Scored(timm.create_model(name, pretrained=False, num_classes=5, **options))  # noqa: E731
        table.add(Row(f"timm {name}", "timm", make, _image(side), IMAGES))
    _diffusers(table)
    _graphs(table)


def _diffusers(table: Table) -> None:
    diffusers = _has(table, "diffusers")
    if diffusers is None:
        return

    def noise(m: Any, b: int, t: int, g: torch.Generator) -> Any:
        return {"sample": torch.randn(b, 3, 16, 16, generator=g), "timestep": torch.randint(0, 50, (b,), generator=g)}

    def prompted(m: Any, b: int, t: int, g: torch.Generator) -> Any:
        return {**noise(m, b, t, g), "encoder_hidden_states": torch.randn(b, 6, 16, generator=g)}

    def latents(m: Any, b: int, t: int, g: torch.Generator) -> Any:
        return {"sample": torch.randn(b, 3, 16, 16, generator=g)}

    two = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    cross = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    sized = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    rows: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
        "UNet2DModel": (lambda: diffusers.UNet2DModel(sample_size=16, down_block_types=two[0], up_block_types=two[1], attention_head_dim=4, **sized), noise),
        "UNet2DConditionModel": (lambda: diffusers.UNet2DConditionModel(sample_size=16, in_channels=3, out_channels=3, down_block_types=cross[0], up_block_types=cross[1], cross_attention_dim=16, attention_head_dim=4, **sized), prompted),
        "AutoencoderKL": (lambda: diffusers.AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **sized), latents),
        "VQModel": (lambda: diffusers.VQModel(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3, num_vq_embeddings=8, **sized), latents),
        "DiTTransformer2DModel": (lambda: diffusers.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2, sample_size=16, num_embeds_ada_norm=60, norm_num_groups=4, dropout=0.0),
                                  lambda m, b, t, g: {"hidden_states": torch.randn(b, 3, 16, 16, generator=g), "timestep": torch.randint(0, 50, (b,), generator=g), "class_labels": torch.randint(0, 50, (b,), generator=g)}),
        "SD3Transformer2DModel": (lambda: diffusers.SD3Transformer2DModel(sample_size=16, patch_size=2, in_channels=3, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=3, pos_embed_max_size=16),
                                  lambda m, b, t, g: {"hidden_states": torch.randn(b, 3, 16, 16, generator=g), "timestep": torch.randint(0, 50, (b,), generator=g), "encoder_hidden_states": torch.randn(b, 6, 16, generator=g), "pooled_projections": torch.randn(b, 16, generator=g)}),
        "FluxTransformer2DModel": (lambda: diffusers.FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)),
                                   lambda m, b, t, g: {"hidden_states": torch.randn(b, 16, 4, generator=g), "encoder_hidden_states": torch.randn(b, 6, 16, generator=g), "pooled_projections": torch.randn(b, 16, generator=g), "timestep": torch.rand(b, generator=g), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}),
        "PixArtTransformer2DModel": (lambda: diffusers.PixArtTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2, sample_size=16, cross_attention_dim=16, caption_channels=16, use_additional_conditions=False),
                                     lambda m, b, t, g: {"hidden_states": torch.randn(b, 3, 16, 16, generator=g), "timestep": torch.randint(0, 50, (b,), generator=g), "encoder_hidden_states": torch.randn(b, 6, 16, generator=g), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
        "UNet1DModel": (lambda: diffusers.UNet1DModel(sample_size=32, in_channels=2, out_channels=2, block_out_channels=(8, 8), down_block_types=("DownBlock1D", "AttnDownBlock1D"), up_block_types=("AttnUpBlock1D", "UpBlock1D"), extra_in_channels=16, layers_per_block=1),
                        lambda m, b, t, g: {"sample": torch.randn(b, 2, 32, generator=g), "timestep": torch.randint(0, 50, (b,), generator=g)}),
        "PriorTransformer": (lambda: diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=6, additional_embeddings=4),
                             lambda m, b, t, g: {"hidden_states": torch.randn(b, 16, generator=g), "timestep": torch.randint(0, 50, (b,), generator=g), "proj_embedding": torch.randn(b, 16, generator=g), "encoder_hidden_states": torch.randn(b, 6, 16, generator=g)}),
    }  # fmt: skip
    for name, (make, batch) in rows.items():
        table.add(Row(f"diffusers {name}", "diffusers", make, batch, IMAGES))


class Nodes(nn.Module):
    """Two layers of message passing and a loss over the nodes."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(F.relu(self.first(x, edges)), edges), y)


def _graphs(table: Table) -> None:
    pyg = _has(table, "torch_geometric.nn")
    if pyg is None:
        return
    from plain_more import graph

    def mlp(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))

    rows: dict[str, Callable[[int, int], nn.Module]] = {
        "GCNConv": pyg.GCNConv, "SAGEConv": pyg.SAGEConv, "GraphConv": pyg.GraphConv, "TAGConv": pyg.TAGConv, "SGConv": pyg.SGConv, "ARMAConv": pyg.ARMAConv,
        "GATConv": pyg.GATConv, "GATv2Conv": pyg.GATv2Conv, "TransformerConv": pyg.TransformerConv, "GINConv": lambda a, b: pyg.GINConv(mlp(a, b)),
        "ChebConv": lambda a, b: pyg.ChebConv(a, b, 2), "EdgeConv": lambda a, b: pyg.EdgeConv(mlp(2 * a, b)), "LEConv": pyg.LEConv,
        "GENConv": pyg.GENConv, "ClusterGCNConv": pyg.ClusterGCNConv, "FeaStConv": pyg.FeaStConv,
    }  # fmt: skip
    for name, layer in rows.items():
        table.add(Row(f"torch_geometric {name}", "torch_geometric", lambda f=layer: Nodes(f(16, 16), f(16, 4)), graph))  # type: ignore[misc]
