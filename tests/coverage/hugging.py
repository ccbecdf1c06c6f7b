"""The models of transformers: every class that its Auto tables list for the tasks below, shrunk by one table of small
numbers (SMALL) and, where that is not enough, by a row of OVER."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from rows import IMAGES, SEQUENCES, Row, Table, ids
from torch import nn

_LIMIT = 8_000_000  # parameters of what is still tiny

SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "dim", "emb_dim", "hidden_dim", "word_embed_proj_dim",
                     "decoder_hidden_size", "encoder_hidden_size", "text_embed_dim", "output_hidden_size", "lstm_dim", "attention_hidden_size",
                     "encoder_hidden_dim", "fusion_hidden_size", "projector_hidden_size", "conv_dim_out", "mask_feature_size", "feature_size",
                     "reduction_hidden", "d_latents", "word_embedding_dimension", "lru_width", "backbone_hidden_size", "hidden_channels",
                     "decoder_hidden_dim", "out_hidden_size", "proj_codevector_dim", "embedding_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads",
                     "num_head", "decoder_num_attention_heads", "linear_num_value_heads", "mamba_n_heads", "n_mamba_heads", "mamba_num_heads",
                     "num_self_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads", "num_groups_heads", "n_heads_kv", "num_kv_heads",
                     "encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "kv_channels", "linear_key_head_dim",
                     "linear_value_head_dim", "swa_head_dim", "d_head", "global_head_dim"), 8),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "depth",
                     "num_encoder_layers", "num_dense_layers", "num_blocks", "decoder_num_hidden_layers", "num_decoder_blocks", "num_reader_layers"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim", "ffn_hidden_size", "dim_feedforward",
                     "decoder_intermediate_size", "encoder_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp",
                     "mlp_hidden_size", "dense_intermediate_size", "block_ff_dim", "feed_forward_size", "d_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "projection_dim", "classifier_proj_size", "q_lora_rank", "kv_lora_rank",
                     "index_head_dim", "attention_size", "moe_shared_expert_intermediate_size", "xvector_output_dim", "codevector_dim",
                     "moe_latent_size", "projection_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx", "max_seq_len", "context_length",
                     "max_encoder_position_embeddings", "max_decoder_position_embeddings", "max_2d_position_embeddings", "seq_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_expert"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_selected_experts", "expert_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_shared_experts", "moe_num_shared_experts",
                     "num_mtp_layers", "num_nextn_predict_layers", "mamba_n_groups", "n_groups"), 1),
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "entity_vocab_size": 20, "entity_emb_size": 16, "sliding_window": 8, "image_size": 32, "patch_size": 8,
    "num_queries": 5, "mamba_d_state": 8, "state_size": 8, "ssm_state_size": 8, "mamba_chunk_size": 8, "chunk_size": 8, "chunk_length": 8, "mamba_d_head": 16,
    "mamba_head_dim": 16, "mamba_headdim": 16, "index_topk": 4, "num_mel_bins": 16, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "hidden_size_per_layer_input": 8, "attention_window": 8, "block_size": 4, "num_codevectors_per_group": 8, "num_latents": 8, "pretrain_image_size": 32,
    "num_frames": 4, "tubelet_size": 2, "expand_dim": 64, "num_landmarks": 4,
}  # fmt: skip
LISTS: dict[str, Callable[[int], list[int]]] = {
    "depths": lambda n: [1] * n, "hidden_sizes": lambda n: [16 * 2**i for i in range(n)], "num_heads": lambda n: [2**i for i in range(n)],
    "num_attention_heads": lambda n: [2**i for i in range(n)], "embed_dim": lambda n: [16 * 2**i for i in range(n)], "conv_dim": lambda n: [16] * n,
    "tdnn_dim": lambda n: [16] * n, "depth": lambda n: [1] * n, "embed_dims": lambda n: [16 * 2**i for i in range(n)], "layer_depths": lambda n: [1] * n,
}  # fmt: skip

_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}
_LAST = {"use_timm_backbone": False, "backbone": None, "backbone_config": {**_RESNET, "out_features": ["stage4"]}}

_START = {"decoder_start_token_id": 0, "pad_token_id": 0}
_WINDOWS = {"patch_size": 2, "window_size": 4, "depths": [1, 1], "num_heads": [1, 2], "embed_dim": 16}
_LARGE = {"image_size": 64}
# by model type or class: what SMALL does not know
OVER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "pop2piano", "moonshine"), _START),
    **dict.fromkeys(("swin", "donut-swin", "swinv2", "maskformer-swin", "swin2sr"), _WINDOWS),
    **dict.fromkeys(("mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "levit"), _LARGE),
    "bit": {"num_groups": 4, "hidden_sizes": [8, 8, 16, 16], "embedding_size": 8}, "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 16]},
    "xmod": {"default_language": "en_XX"}, "roc_bert": {"shape_vocab_size": 20, "pronunciation_vocab_size": 20}, "esm": {"pad_token_id": 0, "mask_token_id": 3},
    "wav2vec2-bert": {"vocab_size": 96}, "wav2vec2-conformer": {"vocab_size": 96}, "granite_speech5_ctc": {"context_size": 16},
    "audio-spectrogram-transformer": {"max_length": 96, "num_mel_bins": 16}, "nystromformer": {"segment_means_seq_len": 64, "num_landmarks": 64},
    **dict.fromkeys(("detr", "table-transformer", "conditional_detr", "dab-detr"), _LAST),
    **dict.fromkeys(("deformable_detr", "rt_detr", "rt_detr_v2", "d_fine", "maskformer", "mask2former"), {**_LAST, "backbone_config": _RESNET}),
    "hgnet_v2": {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [16, 16, 16, 16], "stage_num_blocks": [1, 1, 1, 1]},
    **dict.fromkeys(("beit", "data2vec-vision", "dpt"), {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]}),
    "cvt": {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 1, 1]}, "efficientnet": {"width_coefficient": 0.2, "depth_coefficient": 0.1, "hidden_dim": 256},
    "switch_transformers": {**_START, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "Wav2Vec2ForXVector": {"tdnn_dilation": [1, 1, 1, 1, 1]},
}  # fmt: skip
# by class name: other arguments than those of its task
INPUTS: dict[str, Callable[[Any, int, int, torch.Generator], dict[str, Any]]] = {}
# model types and classes without a row, and why
_TOKENS, _LARGER = "text with tokens for sounds or images", "its parts have no small sizes"
WITHOUT: dict[str, str] = {
    **dict.fromkeys(("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo", "nemo_speechlm",
                     "qwen2_audio", "qwen3_asr", "voxtral", "voxtral_realtime", "cohere_asr", "fun_asr_nano", "kyutai_speech_to_text", "shieldgemma2",
                     "speech-encoder-decoder", "encoder-decoder", "moonshine_streaming"), _TOKENS),
    **dict.fromkeys(("vibevoice_asr", "vibevoice", "dia", "seamless_m4t", "seamless_m4t_v2", "esmc", "parakeet_ctc", "lasr_ctc"), _LARGER),
    **dict.fromkeys(("dinat",), "needs the package natten"), **dict.fromkeys(("timm_wrapper",), "needs the package timm"),
    **dict.fromkeys(("imagegpt", "siglip2", "perceiver", "neomme", "fsmt"), "other arguments than those of its task"),
}  # fmt: skip


def small(cls: Any, over: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a configuration class."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    like = cls()
    out: dict[str, Any] = {}
    special = 90
    for name in fields:
        value = getattr(like, name, None)
        if isinstance(value, bool):
            if name in ("apply_spec_augment", "use_timm_backbone", "use_pretrained_backbone"):
                out[name] = False
        elif isinstance(value, (int, float)) and ("drop" in name and "layer_drop_path" not in name or name.startswith("mask_") and name.endswith("_prob")
                                                  or name == "router_jitter_noise"):  # fmt: skip
            out[name] = 0.0 if isinstance(value, float) or value else value
        elif isinstance(value, int) and name in SMALL:
            out[name] = min(SMALL[name], value) if name not in ("head_dim",) else SMALL[name]
        elif isinstance(value, (list, tuple)) and name in LISTS and all(isinstance(v, int) for v in value):
            out[name] = LISTS[name](len(value))
        elif isinstance(value, int) and value >= 96 and name.endswith(("_token_id", "_token_index")):
            known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            out[name] = known.get(name, special)
            special -= name not in known
        elif name == "eos_token_id" and isinstance(value, (list, tuple)):
            out[name] = 2
    for name in getattr(cls, "sub_configs_defaults", {}):
        sub = getattr(like, name, None)
        given = over.get(name)
        if given is None and sub is not None and dataclasses.is_dataclass(sub):
            out[name] = {"model_type": sub.model_type, **small(type(sub), OVER.get(sub.model_type, {}))}
        elif isinstance(given, dict) and "model_type" not in given and sub is not None:
            out[name] = {"model_type": sub.model_type, **small(type(sub), given)}
    return {**out, **{k: v for k, v in over.items() if k not in out or not isinstance(out[k], dict) or "model_type" in (v or {})}}


def build(name: str) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class
    over = {**OVER.get(config.model_type, {}), **OVER.get(name, {})}
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config(**small(config, over))).parameters())
    if size > _LIMIT:
        raise ValueError(f"{size} parameters are not tiny")
    model = cls(config(**small(config, over)))
    for p in model.parameters():
        if p.dim() > 1 and not p.any():  # a router of zeros sends everything anywhere
            nn.init.normal_(p, 0.0, 0.02)
    return model  # type: ignore[no-any-return]


# --- batches, by task --------------------------------------------------------------------------------


def _names(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _only(model: Any, **kw: Any) -> dict[str, Any]:
    names = _names(model)
    anything = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return {k: v for k, v in kw.items() if k in names or anything and k == "labels"}


def _given(f: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def batch(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
        return INPUTS.get(type(m).__name__, f)(m, b, t, g)

    return batch


def _image(m: Any, b: int, g: torch.Generator) -> torch.Tensor:
    config = getattr(m.config, "vision_config", None) or m.config
    side = getattr(config, "image_size", None) or 64  # without: a network of convolutions, by 32 smaller at its end
    side = side if isinstance(side, int) else side[0]
    return torch.randn(b, getattr(config, "num_channels", 3), side, side, generator=g)


@_given
def causal(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    x = ids(b, t, g)
    return _only(m, input_ids=x, labels=x)


@_given
def padded(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    x = ids(b, t, g)
    keep = torch.ones_like(x)
    if b > 1:
        keep[1, t - 3 :] = 0
    return _only(m, input_ids=x, attention_mask=keep, labels=torch.where(torch.rand(b, t, generator=g) < 0.5, x, -100))


@_given
def translated(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, input_ids=ids(b, t, g), attention_mask=torch.ones(b, t, dtype=torch.int64), labels=ids(b, t - 3, g))


@_given
def sentence(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, input_ids=ids(b, t, g), attention_mask=torch.ones(b, t, dtype=torch.int64), labels=torch.randint(0, 2, (b,), generator=g))


@_given
def classified(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, pixel_values=_image(m, b, g), labels=torch.randint(0, 2, (b,), generator=g))


@_given
def seen(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, pixel_values=_image(m, b, g))


@_given
def segmented(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    x = _image(m, b, g)
    return _only(m, pixel_values=x, labels=torch.randint(0, 2, (b, *x.shape[2:]), generator=g))


@_given
def film(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    frames = getattr(m.config, "num_frames", None) or getattr(m.config, "frames_per_clip", 4)
    x = torch.stack([_image(m, b, g) for _ in range(frames)], 1)
    return _only(m, pixel_values=x, pixel_values_videos=x, labels=torch.randint(0, 2, (b,), generator=g))


def _sound(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    config = getattr(m.config, "encoder_config", None) or getattr(m.config, "audio_config", None) or m.config
    if "input_values" in _names(m) and hasattr(config, "conv_stride"):
        return {"input_values": torch.randn(b, 320 * t + 80, generator=g)}
    if type(m).__name__.startswith("Whisper"):
        return {"input_features": torch.randn(b, m.config.num_mel_bins, 2 * m.config.max_source_positions, generator=g)}
    width = next((getattr(config, k) for k in ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "feature_size") if hasattr(config, k)), 16)
    x = torch.randn(b, 8 * t, width, generator=g)
    return {k: x for k in ("input_values", "input_features") if k in _names(m)}


@_given
def heard(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    t += 8 * hasattr(m, "tdnn")
    return _only(m, **_sound(m, b, t, g), labels=torch.randint(0, 2, (b,), generator=g))


@_given
def spelled(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, **_sound(m, b, t, g), labels=ids(b, 4, g, 3, 30))


@_given
def frames(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, **_sound(m, b, t, g))


@_given
def towers(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    x = ids(b, t, g)
    x[:, -1] = 2
    return _only(m, input_ids=x, pixel_values=_image(m, b, g), attention_mask=torch.ones_like(x), return_loss=True)


@_given
def series(m: Any, b: int, t: int, g: torch.Generator) -> dict[str, Any]:
    return _only(m, past_values=torch.randn(b, m.config.context_length, m.config.num_input_channels, generator=g),
                 target_values=torch.randint(0, 2, (b,), generator=g))  # fmt: skip


TASKS: list[tuple[str, str, Callable[..., dict[str, Any]], Any]] = [
    ("MASKED_LM", "masked LM", padded, SEQUENCES),
    ("SEQ_TO_SEQ_CAUSAL_LM", "sequence to sequence", translated, SEQUENCES),
    ("CTC", "audio", spelled, SEQUENCES),
    ("AUDIO_CLASSIFICATION", "audio", heard, SEQUENCES),
    ("SPEECH_SEQ_2_SEQ", "audio", spelled, SEQUENCES),
    ("AUDIO_XVECTOR", "audio", heard, SEQUENCES),
    ("IMAGE_CLASSIFICATION", "images", classified, IMAGES),
    ("SEMANTIC_SEGMENTATION", "segmentation, detection, depth", segmented, IMAGES),
    ("OBJECT_DETECTION", "segmentation, detection, depth", seen, IMAGES),
    ("UNIVERSAL_SEGMENTATION", "segmentation, detection, depth", seen, IMAGES),
    ("DEPTH_ESTIMATION", "segmentation, detection, depth", seen, IMAGES),
    ("IMAGE_TO_IMAGE", "segmentation, detection, depth", seen, IMAGES),
    ("VIDEO_CLASSIFICATION", "images", film, IMAGES),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", "image and text", towers, SEQUENCES),
    ("CAUSAL_LM", "causal LM", causal, SEQUENCES),
    ("SEQUENCE_CLASSIFICATION", "text classification", sentence, SEQUENCES),
    ("TIME_SERIES_CLASSIFICATION", "time series", series, IMAGES),
]


def add_to(table: Table) -> None:
    if importlib.util.find_spec("transformers") is None:
        table.missing.append("transformers is not installed")
        return
    from transformers.models.auto import modeling_auto as auto

    known: set[str] = set()
    for key, family, batch, sizes in TASKS:
        mapping = getattr(auto, f"MODEL_FOR_{key}_MAPPING_NAMES", None) or {}
        if key == "SEQUENCE_CLASSIFICATION":
            mapping = {k: v for k, v in mapping.items() if k in _CLASSIFIERS}
        for kind, names in mapping.items():
            name = names if isinstance(names, str) else names[0]
            if name in known:
                continue
            known.add(name)
            why = WITHOUT.get(name) or WITHOUT.get(kind)
            if why is not None:
                table.left_out[name] = why
            else:
                table.add(Row(name, family, lambda name=name: build(name), batch, sizes))  # type: ignore[misc]


_CLASSIFIERS = {"bert", "distilbert", "roberta", "albert", "electra", "deberta-v2", "mpnet", "xlnet", "canine", "funnel", "llama", "gpt2", "mistral", "qwen2",
                "bart", "t5", "longformer", "modernbert", "layoutlm", "tapas", "convbert", "fnet", "squeezebert", "mobilebert"}  # fmt: skip
