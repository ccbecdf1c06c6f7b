"""The passes `attention` and `masks` on Hugging Face's architectures and torch's own encoder: what they recognise,
and that no number changes beside the same graph without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import CAUSAL, FULL, Case, attentions, paddings
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

# --- Hugging Face architectures
# -------------------------------------------------------------------------------------------

B, T = 3, 13
SMALL = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
GQA = dict(SMALL, num_key_value_heads=2)
EAGER = dict(attn_implementation="eager")


def hf(model: str, config: str, **kw: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**kw)).double()

    return build


ARCH: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "gpt2": (hf("GPT2Model", "GPT2Config", vocab_size=97, n_embd=28, n_layer=2, n_head=2, n_positions=64, use_cache=False), [CAUSAL] * 2),
    "llama": (hf("LlamaModel", "LlamaConfig", **GQA, use_cache=False), [CAUSAL] * 2),
    "opt": (hf("OPTModel", "OPTConfig", vocab_size=97, hidden_size=32, ffn_dim=44, num_hidden_layers=2, num_attention_heads=4,
               word_embed_proj_dim=32, use_cache=False), [CAUSAL] * 2),
    "mistral": (hf("MistralModel", "MistralConfig", **GQA, use_cache=False), [CAUSAL] * 2),
    "mistral-window": (hf("MistralModel", "MistralConfig", **GQA, use_cache=False, sliding_window=5), [dict(CAUSAL, window=5)] * 2),
    "qwen2": (hf("Qwen2Model", "Qwen2Config", **GQA, use_cache=False), [CAUSAL] * 2),
    "qwen2-mixed": (hf("Qwen2Model", "Qwen2Config", **GQA, use_cache=False, use_sliding_window=True, sliding_window=5, max_window_layers=1),
                    [CAUSAL, dict(CAUSAL, window=5)]),
    "phi": (hf("PhiModel", "PhiConfig", **SMALL, use_cache=False), [CAUSAL] * 2),
    "gpt_neox": (hf("GPTNeoXModel", "GPTNeoXConfig", **SMALL, use_cache=False), [CAUSAL] * 2),
    "bert": (hf("BertModel", "BertConfig", **SMALL), [FULL] * 2),
    "roberta": (hf("RobertaModel", "RobertaConfig", **SMALL), [FULL] * 2),
    "distilbert": (hf("DistilBertModel", "DistilBertConfig", vocab_size=97, dim=32, n_layers=2, n_heads=4, hidden_dim=44), [FULL] * 2),
    "electra": (hf("ElectraModel", "ElectraConfig", **SMALL, embedding_size=32), [FULL] * 2),
    "albert": (hf("AlbertModel", "AlbertConfig", **SMALL, embedding_size=16), [FULL] * 2),
    "modernbert": (hf("ModernBertModel", "ModernBertConfig", **dict(SMALL, num_hidden_layers=4), local_attention=4, pad_token_id=0,
                      global_attn_every_n_layers=3), [FULL, dict(causal=True, offset=2, window=3), dict(causal=True, offset=2, window=3), FULL]),
}


@pytest.mark.parametrize("padded", [False, True], ids=["bare", "padded"])
@pytest.mark.parametrize("name", list(ARCH))
def test_attention_and_masks_of_architectures_are_recognised(name: str, padded: bool) -> None:
    build, expected = ARCH[name]
    module = build()
    ids = torch.randint(1, 97, (B, T), generator=torch.Generator().manual_seed(1))
    case = Case(module, (ids,), {"attention_mask": torch.ones(B, T, dtype=torch.long)} if padded else {})
    got = [{k: n[k] for k in ("causal", "offset", "window")} for n in case.nodes]
    assert got == expected
    assert [n["mask"] for n in case.nodes] == [f"bool[{B}, 1, 1, {T}]" if padded else None] * len(expected)
    for am in paddings(B, T) if padded else [None]:
        case.check([ids] if am is None else [ids, am], grads=am is None or bool((am[-1] == 0).all()))


ENCODER_DECODER = {
    "bart": hf("BartModel", "BartConfig", vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
               decoder_attention_heads=4, encoder_ffn_dim=44, decoder_ffn_dim=44, use_cache=False),
    "t5": hf("T5Model", "T5Config", vocab_size=97, d_model=32, d_kv=8, d_ff=44, num_layers=1, num_heads=4, use_cache=False),
}


@pytest.mark.parametrize("name", list(ENCODER_DECODER))
def test_padding_reaches_encoder_and_cross_attention(name: str) -> None:
    """Padding reaches the encoder's and the cross attention; the decoder's own is causal, with T5's position bias
    beside."""
    ids, own = torch.randint(1, 97, (B, T)), torch.randint(1, 97, (B, 7))
    module = ENCODER_DECODER[name]()
    module.decoder.config.use_cache = False
    case = Case(module, (ids,), {"attention_mask": torch.ones(B, T, dtype=torch.long), "decoder_input_ids": own})
    encoder, decoder, cross = case.nodes
    assert [n["causal"] for n in case.nodes] == [False, True, False]
    assert cross["mask"].endswith(f"[{B}, 1, 1, {T}]")
    if name == "bart":
        assert encoder["mask"] == f"bool[{B}, 1, 1, {T}]" and decoder["mask"] is None
    else:
        assert encoder["mask"] == f"f64[{B}, 4, {T}, {T}]" and decoder["mask"] == "f64[1, 4, 7, 7]"
    for am in paddings(B, T):
        case.check([ids, am, own], grads=bool((am[-1] == 0).all()))


@pytest.mark.parametrize("name", ["gpt2", "mistral-window", "bert"])
def test_symbolic_sizes_are_recognised(name: str) -> None:
    """Captured with symbols, run at other sizes."""
    build, expected = ARCH[name]
    module = build()
    ids = torch.randint(1, 97, (B, T))
    case = Case(module, (ids,), {"attention_mask": torch.ones(B, T, dtype=torch.long)}, dynamic=True)
    assert [{k: n[k] for k in ("causal", "offset", "window")} for n in case.nodes] == expected
    for n in case.nodes:
        dims = n["mask"][5:-1].split(", ")
        assert n["mask"].startswith("bool[") and dims[1:3] == ["1", "1"]
    for b, t in ((B, T), (2, 7), (1, 4)):
        for am in paddings(b, max(t, 9))[1:]:
            case.check([torch.randint(1, 97, (b, t)), am[:, :t].contiguous()], grads=False)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_later_passes_keep_attributes_and_numbers(name: str) -> None:
    """The passes that follow leave attributes and numbers alone."""
    build, expected = ARCH[name]
    ids = torch.randint(1, 97, (B, T))
    case = Case(build(), (ids,), {"attention_mask": torch.ones(B, T, dtype=torch.long)})
    case.passed.apply("fold", "simplify", "cse", "simplify", "bias", "dce").verify()
    assert [{k: n[k] for k in ("causal", "offset", "window")} for n in attentions(case.passed.text())] == expected
    case.check([ids, paddings(B, T)[4]])


# Additive finfo.min masks: a row without visible keys is the mean of all values, so padding must not be taken apart
# from causality.
ADDITIVE: dict[str, tuple[Callable[[], nn.Module], bool, dict[str, Any], str | None]] = {
    "gpt2-eager": (hf("GPT2Model", "GPT2Config", vocab_size=97, n_embd=28, n_layer=2, n_head=2, n_positions=64, use_cache=False, **EAGER),
                   False, CAUSAL, None),
    "gpt2-eager-padded": (hf("GPT2Model", "GPT2Config", vocab_size=97, n_embd=28, n_layer=2, n_head=2, n_positions=64, use_cache=False,
                             **EAGER), True, FULL, f"f64[{B}, 1, {T}, {T}]"),
    "bert-eager-padded": (hf("BertModel", "BertConfig", **SMALL, **EAGER), True, FULL, f"f64[{B}, 1, 1, {T}]"),
    "t5-encoder-padded": (hf("T5EncoderModel", "T5Config", vocab_size=97, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4), True, FULL,
                          f"f64[{B}, 4, {T}, {T}]"),
    "t5-encoder": (hf("T5EncoderModel", "T5Config", vocab_size=97, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4), False, FULL,
                   f"f64[1, 4, {T}, {T}]"),
}


@pytest.mark.parametrize("name", list(ADDITIVE))
def test_additive_padding_stays_a_mask(name: str) -> None:
    build, padded, attrs, mask = ADDITIVE[name]
    module = build()
    ids = torch.randint(1, 97, (B, T))
    case = Case(module, (ids,), {"attention_mask": torch.ones(B, T, dtype=torch.long)} if padded else {})
    assert [{k: n[k] for k in attrs} for n in case.nodes] == [attrs] * 2
    assert [n["mask"] for n in case.nodes] == [mask] * 2
    assert all(n["dropout"] > 0 and n["rng"] for n in case.nodes)
    for am in paddings(B, T) if padded else [None]:
        case.check([ids] if am is None else [ids, am], grads=am is None or bool((am[:, 0] == 0).any()))


# --- torch's own modules
# -----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(14, 2, 22, batch_first=True, dropout=0.2)
        self.causal = causal

    def forward(self, x: Tensor, pad: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        return self.layer(x, src_mask=mask, src_key_padding_mask=pad)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_encoder_layer_is_recognised(causal: bool, padded: bool) -> None:
    x = torch.randn(3, 7, 14, dtype=torch.float64)
    pad = torch.zeros(3, 7, dtype=torch.bool)
    case = Case(Encoder(causal).double(), (x, pad) if padded else (x,))
    (node,) = case.nodes
    assert (node["causal"], node["offset"], node["window"]) == (causal, 0, 0)
    assert node["mask"] == ("bool[3, 1, 1, 7]" if padded else None)
    for am in paddings(3, 7)[:4] if padded else [None]:
        case.check([x] if am is None else [x, am == 0])
