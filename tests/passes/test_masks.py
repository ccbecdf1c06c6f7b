"""Passes `attention` and `masks`: what they recognise, and that no number changes.

Three oracles, none of them the passes' own: the same graph without the passes (node by node, fp64), attention written
out in torch, and for random mask formulas a torch tensor built beside the graph text by the same random choices.
"""

from __future__ import annotations

import ctypes as C
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from ortmodule.capture import capture

transformers = pytest.importorskip("transformers")

LOWEST = torch.finfo(torch.float64).min


def attentions(text: str) -> list[dict[str, Any]]:
    """The attention nodes of a graph text: causal, offset, window, mask (its type as text, or None), dropout, rng."""
    types = {m[1]: m[2] for m in re.finditer(r"^\s*(?:input |param |buffer |const )?([\w.]+)[^:\n]*: (\w+\[[^\]]*\])", text, re.M)}
    found = []
    for m in re.finditer(r"= attention\(([^)]*)\) \{([^}]*)\}(.*)", text):
        operands = [o.strip() for o in m[1].split(",")]
        attrs = dict(a.split("=") for a in m[2].split(", "))
        mask = operands[3] if len(operands) > 3 and operands[3] != "_" else None
        rng = re.search(r"rng=(\d+)", m[3])
        found.append({"causal": bool(int(attrs.get("causal", 0))), "offset": int(attrs.get("causal_offset", 0)),
                      "window": int(attrs.get("window", 0)), "mask": types[mask] if mask else None,
                      "dropout": float(attrs.get("dropout", 0)), "rng": int(rng[1]) if rng else 0, "key": operands[1]})
    return found


def close(a: Tensor | None, b: Tensor | None, tol: float = 1e-10, floor: float = 0.0) -> None:
    """Equal within tol of the largest element. floor: magnitude below which a value is rounding noise (a gradient that
    is 0 in theory)."""
    assert (a is None) == (b is None)
    if a is None or b is None or not a.numel():
        return
    assert a.shape == b.shape and a.dtype == b.dtype
    if not a.is_floating_point():
        assert torch.equal(a, b)
        return
    assert torch.isfinite(b).all(), "the reference itself is not finite"
    scale = max(b.abs().max().item(), floor) or 1.0
    assert (a - b).abs().max().item() <= tol * scale


class Case:
    """One captured module: its graph plain and passed, run by the interpreter on the same inputs."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, dynamic: bool = False) -> None:
        self.module, self.captured = module, capture(module, args, kwargs or {}, dynamic=dynamic)
        self.plain = engine.Graph.onnx(self.captured.onnx)
        self.passed = engine.Graph.onnx(self.captured.onnx).apply("attention", "masks").verify()
        self.nodes = attentions(self.passed.text())
        self.writes = self.plain.text().count("\n  write ")

    def inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        state = dict(self.module.named_parameters(remove_duplicate=False)) | dict(self.module.named_buffers(remove_duplicate=False))
        res = []
        for s in self.captured.inputs:
            t = tensors[s.leaf] if s.kind == "user" else s.tensor if s.tensor is not None else state[s.target]
            res.append(t.detach())
        return res

    def run(self, graph: engine.Graph, tensors: list[Tensor], seed: int = 3, grads: bool = True) -> tuple[list[Tensor], list[Tensor | None]]:
        ins = self.inputs(tensors)
        n = self.captured.n_user_outputs
        outs = graph.run(ins, n + self.writes, seed)
        if not grads:
            return outs[:n], []
        gen = torch.Generator().manual_seed(11)
        arriving = [int(o.is_floating_point()) for o in outs[:n]]
        dys = [torch.randn(o.shape, generator=gen, dtype=o.dtype) for o in outs[:n] if o.is_floating_point()]
        wanted = [int(t.is_floating_point() and s.kind != "buffer") for t, s in zip(ins, self.captured.inputs)]
        res = graph.grad(wanted, arriving).run(ins + dys, n + self.writes + sum(wanted), seed)
        return res[:n], res[n + self.writes:]

    def check(self, tensors: list[Tensor], grads: bool = True, tol: float = 1e-10) -> None:
        """Passed and plain graph agree, in outputs and in every gradient."""
        a, da = self.run(self.passed, tensors, grads=grads)
        b, db = self.run(self.plain, tensors, grads=grads)
        for x, y in zip(a, b, strict=True):
            close(x, y, tol)
        floor = 1e-5 * max((y.abs().max().item() for y in db if y is not None and y.numel()), default=0.0)
        for x, y in zip(da, db, strict=True):
            close(x, y, tol, floor)


def paddings(b: int, t: int) -> list[Tensor]:
    """All ones, right, left, random, one row fully masked."""
    right = (torch.arange(t) < torch.tensor([t, t - 4, 5])[:b, None]).long()
    gen = torch.Generator().manual_seed(5)
    rand = (torch.rand(b, t, generator=gen) > 0.4).long()
    full = right.clone()
    full[-1] = 0
    return [torch.ones(b, t, dtype=torch.long), right, right.flip(1), rand, full]


# --- Hugging Face architectures
# -------------------------------------------------------------------------------------------

B, T = 3, 13
SMALL = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
GQA = dict(SMALL, num_key_value_heads=2)
CAUSAL = dict(causal=True, offset=0, window=0)
FULL = dict(causal=False, offset=0, window=0)
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
def test_architectures(name: str, padded: bool) -> None:
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
def test_encoder_decoder(name: str) -> None:
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
def test_dynamic_sizes(name: str) -> None:
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
def test_whole_pipeline(name: str) -> None:
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
def test_additive(name: str) -> None:
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
def test_transformer_encoder(causal: bool, padded: bool) -> None:
    x = torch.randn(3, 7, 14, dtype=torch.float64)
    pad = torch.zeros(3, 7, dtype=torch.bool)
    case = Case(Encoder(causal).double(), (x, pad) if padded else (x,))
    (node,) = case.nodes
    assert (node["causal"], node["offset"], node["window"]) == (causal, 0, 0)
    assert node["mask"] == ("bool[3, 1, 1, 7]" if padded else None)
    for am in paddings(3, 7)[:4] if padded else [None]:
        case.check([x] if am is None else [x, am == 0])


# --- attention written out
# ---------------------------------------------------------------------------------------------------


class Written(nn.Module):
    """Attention by hand, in the spellings people use."""

    def __init__(self, style: str, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.p = style, p
        self.qkv = nn.Linear(12, 36)
        self.bias = nn.Parameter(torch.randn(2, 11, 11))
        self.register_buffer("tril", torch.tril(torch.ones(11, 11)).view(1, 1, 11, 11))

    def forward(self, x: Tensor, m: Tensor | None = None) -> Any:
        b, t, c = x.shape
        s, h = self.style, 2
        q, k, v = (y.view(b, t, h, c // h).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        d = c // h
        if s == "one head":
            q, k, v = self.qkv(x).split(c, dim=2)
            a = (q @ k.transpose(1, 2) / math.sqrt(c)).masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
            return F.dropout(a.softmax(-1), self.p, self.training) @ v
        idx = torch.arange(t)
        causal = idx[None, :] <= idx[:, None]
        if s == "merged":  # (b * h, t, d), as torch.bmm wants it
            q, k, v = (y.reshape(b * h, t, d) for y in (q, k, v))
            a = torch.bmm(q, k.transpose(1, 2)).view(b, h, t, t) / math.sqrt(d)
            a = a.masked_fill(~causal, float("-inf")).softmax(-1)
            a = F.dropout(a, self.p, self.training).view(b * h, t, t)
            return torch.bmm(a, v).view(b, h, t, d).transpose(1, 2).reshape(b, t, c)
        if s == "scaled query":
            a = (q * d**-0.5) @ k.transpose(-2, -1)
        elif s == "scaled key":
            a = q @ (k / math.sqrt(d)).transpose(-2, -1)
        elif s == "twice scaled":
            a = (q @ k.transpose(-2, -1)) * 0.5 / math.sqrt(d)
        else:
            a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(d))
        if s == "nanogpt":
            a = a.masked_fill(self.tril[:, :, :t, :t] == 0, float("-inf"))
        elif s == "where":
            a = torch.where(causal, a, torch.full((), torch.finfo(a.dtype).min, dtype=a.dtype))
        elif s == "bias":
            a = a + self.bias[:, :t, :t] + torch.where(causal, 0.0, float("-inf")).to(a.dtype)
        elif s == "bias first":
            a = (a + self.bias[:, :t, :t]).masked_fill(~causal, torch.finfo(a.dtype).min)
        elif s == "float mask":
            a = a + m
        elif s == "small number":
            a = a.masked_fill(~causal, -1e4)
        elif s == "1e9":
            a = a.masked_fill(~causal, -1e9)
        elif s == "1e9 data":
            a = a.masked_fill(m == 0, -1e9)
        elif s == "mask times scale":
            a = (q @ k.transpose(-2, -1) + m) * 0.25
        elif s == "softmax of keys":
            return (a.softmax(2) @ v).transpose(1, 2).reshape(b, t, c)
        elif s == "clipped":
            a = a.tanh() * 2
        p = F.dropout(a.softmax(dim=-1), self.p, self.training)
        y = (p @ v).transpose(1, 2).reshape(b, t, c)
        return (y, p) if s == "weights too" else y


WRITTEN = ["plain", "one head", "merged", "scaled query", "scaled key", "twice scaled", "nanogpt", "where", "bias", "bias first", "float mask",
           "1e9", "1e9 data"]
NOT_ATTENTION = ["small number", "mask times scale", "softmax of keys", "clipped", "weights too"]


@pytest.mark.parametrize("style", WRITTEN + NOT_ATTENTION)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_written_out(style: str, p: float) -> None:
    module = Written(style, p).double()
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    extra = [torch.randn(7, 7, dtype=torch.float64)] if style in ("float mask", "mask times scale") else []
    if style == "1e9 data":
        extra = [(torch.rand(3, 1, 7, 7) > 0.5).long()]
        extra[0][1, 0, 4] = 0  # a row that sees nothing
    case = Case(module, (x, *extra))
    assert len(case.nodes) == (style in WRITTEN)
    for n in case.nodes:
        assert n["causal"] == (style in ("one head", "merged", "where", "bias", "bias first", "1e9"))
        want = {"nanogpt": "bool[", "bias": "f64[1, 2, 7, 7]", "bias first": "f64[1, 2, 7, 7]", "float mask": "f64[7, 7]",
                "1e9 data": "bool[3, 1, 7, 7]"}.get(style)
        assert n["mask"] is None if want is None else n["mask"].startswith(want)
        assert (n["dropout"] > 0) == (p > 0) and (n["rng"] > 0) == (p > 0)
    case.check([x, *extra])
    if p == 0:  # and against eager, forward and backward
        xs = x.clone().requires_grad_()
        y = module(xs, *extra)
        outs, _ = case.run(case.passed, [x, *extra], grads=False)
        for a, e in zip(outs, y if isinstance(y, tuple) else (y,)):
            close(a, e.detach())


def test_repeated_heads_are_read_once() -> None:
    class Repeat(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, h, t, d = k.shape
            k, v = (y[:, :, None].expand(b, h, 3, t, d).reshape(b, 3 * h, t, d) for y in (k, v))
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(2, h, 7, 5, dtype=torch.float64) for h in (6, 2, 2))
    case = Case(Repeat(), (q, k, v))
    assert "expand" not in case.passed.text()
    case.check([q, k, v])
    close(case.run(case.passed, [q, k, v], grads=False)[0][0], Repeat()(q, k, v))


# --- odd masks: never taken for what they are not
# --------------------------------------------------------------------------------


def _hide(visible: Tensor, number: float) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, number)


def _prefix(m: dict[str, Tensor]) -> Tensor:
    return (m["k"] <= m["q"]) | (m["k"] < m["len"][:, None, None, None])


ODD: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Any], bool]] = {
    # formula -> attributes, does a mask stay
    "prefix": (_prefix, FULL, True),
    "every other": (lambda m: m["k"] <= 2 * m["q"], FULL, True),
    "strict": (lambda m: m["k"] < m["q"], dict(CAUSAL, offset=-1), False),
    "future only": (lambda m: m["k"] > m["q"], FULL, True),
    "diagonal": (lambda m: m["k"] == m["q"], FULL, True),
    "band": (lambda m: (m["q"] - m["k"]).abs() <= 2, dict(causal=True, offset=2, window=3), False),
    "chunks": (lambda m: (m["k"] // 3 == m["q"] // 3) & (m["k"] <= m["q"]), CAUSAL, True),
    "packed": (lambda m: (m["seg"][:, None, :, None] == m["seg"][:, None, None, :]) & (m["k"] <= m["q"]), CAUSAL, True),
    "positions": (lambda m: m["seg"][:, None, None, :] <= m["seg"][:, None, :, None], FULL, True),
    "causal or padding": (lambda m: (m["k"] <= m["q"]) | m["pad"][:, None, None, :], FULL, True),
    "double negation": (lambda m: ~((m["k"] > m["q"]) | ~m["pad"][:, None, None, :]), CAUSAL, True),
    "user": (lambda m: m["user"], FULL, True),
    "user and causal": (lambda m: m["user"] & (m["k"] <= m["q"]), CAUSAL, True),
    "nothing": (lambda m: (m["q"] >= 0) & (m["k"] < 7), FULL, False),
    "tril": (lambda m: torch.ones(7, 7, dtype=torch.bool).tril() & m["pad"][:, None, None, :], CAUSAL, True),
    "constant": (lambda m: torch.tensor([[j <= i + 1 for j in range(7)] for i in range(7)]), dict(CAUSAL, offset=1), False),
    "concat": (lambda m: (torch.cat([m["k"][..., :3], m["k"][..., 3:]], -1) <= m["q"]), CAUSAL, False),
    "diff": (lambda m: (torch.diff(torch.arange(7), prepend=torch.tensor([-1])) == 1)[None, None, None] & (m["k"] <= m["q"]), CAUSAL, False),
    "flipped": (lambda m: m["pad"].flip(1)[:, None, None, :] & (m["k"] <= m["q"]).expand(3, 1, 7, 7), CAUSAL, True),
    "product": (lambda m: (m["pad"].long()[:, None, None, :] * (m["k"] <= m["q"]).long()).bool(), CAUSAL, True),
    "alibi": (lambda m: torch.where(m["k"] <= m["q"], (m["k"] - m["q"]).double() * m["slope"][:, None, None], -math.inf), CAUSAL, True),
    "lowest": (lambda m: _hide(m["k"] <= m["q"], LOWEST), CAUSAL, False),
    "lowest strict": (lambda m: _hide(m["k"] < m["q"], LOWEST), FULL, True),
    "lowest padding": (lambda m: _hide((m["k"] <= m["q"]) & m["pad"][:, None, None, :], LOWEST), FULL, True),
    "lowest plus user": (lambda m: _hide(m["k"] <= m["q"], LOWEST) + m["bias"], FULL, True),
    "two lowest": (lambda m: _hide(m["k"] <= m["q"], LOWEST) + _hide(m["pad"][:, None, None, :], LOWEST), FULL, True),
    "inf and lowest": (lambda m: _hide(m["k"] <= m["q"], -math.inf) + _hide(m["pad"][:, None, None, :], LOWEST), CAUSAL, True),
    "ones minus": (lambda m: (1.0 - m["pad"].double())[:, None, None, :] * -1e9, FULL, True),
    "small": (lambda m: _hide(m["k"] <= m["q"], -5.0), FULL, True),
}


class Odd(nn.Module):
    def __init__(self, formula: Callable[[dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.formula = formula
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor, seg: Tensor, length: Tensor, user: Tensor, bias: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        m = {"q": i[None, None, :, None], "k": i[None, None, None, :], "pad": pad, "seg": seg, "len": length, "user": user, "bias": bias,
             "slope": self.slope}
        mask = self.formula(m)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(3, 2, 7, 7) if mask.dim() == 4 else mask)


@pytest.mark.parametrize("name", list(ODD))
def test_odd_masks(name: str) -> None:
    formula, attrs, stays = ODD[name]
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 2, 7, 5, generator=gen, dtype=torch.float64) for _ in range(3))
    user = torch.rand(3, 1, 7, 7, generator=gen) > 0.3
    user[1, 0, 2] = False
    bias = _hide(torch.rand(7, 7, generator=gen) > 0.5, LOWEST)
    fixed = [torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2 + [[0] * 7]), torch.tensor([2, 0, 5]), user, bias]
    module = Odd(formula)
    case = Case(module, (q, k, v, torch.ones(3, 7, dtype=torch.bool), *fixed))
    (node,) = case.nodes
    assert {x: node[x] for x in attrs} == attrs
    assert (node["mask"] is not None) == stays
    for am in paddings(3, 7):
        tensors = [q, k, v, am.bool(), *fixed]
        case.check(tensors)
        outs, _ = case.run(case.passed, tensors, grads=False)
        mask = formula({"q": torch.arange(7)[None, None, :, None], "k": torch.arange(7)[None, None, None, :], "pad": am.bool(), "seg": fixed[0],
                        "len": fixed[1], "user": user, "bias": bias, "slope": module.slope.detach()})
        close(outs[0], reference(q, k, v, mask))


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by its definition; a row with nothing visible gives 0."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    e = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min))
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v


# --- rows whose keys are all hidden: numbers and gradients are those of the graph that attention replaces
# ----------------------------

LOWEST32 = torch.finfo(torch.float32).min
HIDING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # (scores, visible, bias) -> masked scores; bias has the shape of the scores
    "masked_fill lowest": lambda s, see, b: s.masked_fill(~see, torch.finfo(s.dtype).min),
    "where lowest": lambda s, see, b: torch.where(see, s, torch.finfo(s.dtype).min),
    "where -1e9": lambda s, see, b: torch.where(see, s, torch.tensor(-1e9, dtype=s.dtype)),
    "masked_fill -1e4": lambda s, see, b: s.masked_fill(~see, -1e4),
    "masked_fill -1e30": lambda s, see, b: s.masked_fill(~see, -1e30),
    "masked_fill -inf": lambda s, see, b: s.masked_fill(~see, -math.inf),
    "add lowest": lambda s, see, b: s + (~see).to(s.dtype) * torch.finfo(s.dtype).min,
    "add -1e4": lambda s, see, b: s + (~see).to(s.dtype) * -1e4,
    "add -inf": lambda s, see, b: s + torch.zeros_like(s[:1]).masked_fill(~see, -math.inf),
    "bias inside": lambda s, see, b: (s + b).masked_fill(~see, torch.finfo(s.dtype).min),
    "bias inside, -inf": lambda s, see, b: (s + b).masked_fill(~see, -math.inf),
    "bias outside": lambda s, see, b: torch.where(see, s, torch.finfo(s.dtype).min) + b,
    "fill, then padding added": lambda s, see, b: torch.where(torch.ones(s.shape[-2:], dtype=torch.bool).tril(), s, torch.finfo(s.dtype).min)
    + (~see).to(s.dtype) * torch.finfo(s.dtype).min,
    "two fills": lambda s, see, b: s.masked_fill(~see[..., :1], LOWEST32).masked_fill(~see, LOWEST32),
    "two unlike fills": lambda s, see, b: s.masked_fill(~see[..., :1], -math.inf).masked_fill(~see, torch.finfo(s.dtype).min),
    "heads merged": lambda s, see, b: s.unflatten(0, (-1, 1)).masked_fill(~see[:, None], torch.finfo(s.dtype).min).flatten(0, 1),
}


class Hidden(nn.Module):
    def __init__(self, hide: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.hide = hide

    def forward(self, q: Tensor, k: Tensor, v: Tensor, see: Tensor, bias: Tensor) -> Tensor:
        return self.hide(q @ k.transpose(-1, -2) * 0.4, see, bias).softmax(-1) @ v


@pytest.mark.parametrize("t", [7, 70], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("name", list(HIDING))
def test_hidden_rows(name: str, t: int) -> None:
    """Every form of mask, where all rows see something, where some see nothing, where a sample sees nothing, where all
    is hidden."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, t, 5, generator=gen, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, t, t, generator=gen, dtype=torch.float64, requires_grad=True)
    see = torch.rand(2, t, t, generator=gen) > 0.4
    see[..., 0] = True
    case = Case(Hidden(HIDING[name]), (q, k, v, see, bias))
    assert len(case.nodes) == (name != "masked_fill -1e4")  # a score may reach that number
    for kind in ("some", "rows", "sample", "none"):
        if kind == "rows":
            see[0, 2:5] = see[1, -1] = False
        elif kind != "some":
            see[int(kind == "sample"):] = False
        (y,), grads = case.run(case.passed, [q, k, v, see, bias])
        want = case.module(q, k, v, see, bias)
        dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(11), dtype=want.dtype)
        theirs = torch.autograd.grad(want, [q, k, v, bias], dy, allow_unused=True)
        for what, mine, eager in zip(("y", "dq", "dk", "dv", "dbias"), (y, *grads), (want.detach(), *theirs), strict=True):
            a, b = (torch.zeros(()).double() if x is None else x for x in (mine, eager))
            torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-10, atol=1e-10 * float(b.nan_to_num().abs().max()), equal_nan=True,
                                       msg=lambda m, where=f"{kind} {what}": f"{where}: {m}")


# --- random formulas
# -------------------------------------------------------------------------------------------------------------


class Formula:
    """Builds graph text and the torch tensor it stands for, side by side."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.size = {"B": 3, "H": 2, "Q": self.r.choice([5, 7]), "K": 7}
        self.symbolic = self.r.random() < 0.5
        self.lines: list[str] = []
        self.inputs: list[Tensor] = []
        b, h, q, k = (self.dim(a) for a in "BHQK")
        if self.symbolic:
            self.lines += ["sym B = q[0]", "sym Q = q[2]", "sym K = k[2]"]
        self.q, self.k, self.v = (torch.randn(self.size["B"], 2, n, 5, generator=self.gen, dtype=torch.float64)
                                  for n in (self.size["Q"], 7, 7))
        for name, rows, t in (("q", q, self.q), ("k", k, self.k), ("v", k, self.v)):
            self.lines.append(f"input {name}: f64[{b}, {h}, {rows}, 5]")
            self.inputs.append(t)
        self.pad = self.feed(f"[{b}, {k}]", (torch.rand(3, 7, generator=self.gen) > 0.3).long())
        self.qpad = self.feed(f"[{b}, {q}]", (torch.rand(3, self.size["Q"], generator=self.gen) > 0.2).long())
        self.user = self.feed(f"[{b}, 1, {q}, {k}]", torch.rand(3, 1, self.size["Q"], 7, generator=self.gen) > 0.3)
        i, j = torch.arange(self.size["Q"]), torch.arange(7)
        self.i = self.make(f"iota() {{shape=[{q}], dtype=i64, start=0, step=1}}", i)
        self.j = self.make(f"iota() {{shape=[{k}], dtype=i64, start=0, step=1}}", j)
        self.i = self.reshape(self.i, ["1", "1", q, "1"], i[None, None, :, None])
        self.j = self.reshape(self.j, ["1", "1", "1", k], j[None, None, None, :])

    def dim(self, axis: str) -> str:
        return axis if self.symbolic and axis != "H" else str(self.size[axis])

    def feed(self, shape: str, t: Tensor) -> tuple[str, Tensor]:
        name = f"x{len(self.inputs)}"
        self.lines.append(f"input {name}: {'bool' if t.dtype == torch.bool else 'i64'}{shape}")
        self.inputs.append(t)
        return name, t

    def make(self, code: str, t: Tensor) -> tuple[str, Tensor]:
        name = f"n{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return name, t

    def number(self, x: float, dtype: str) -> str:
        return self.make(f"fill() {{shape=[], dtype={dtype}, value={float(x)!r}}}", torch.tensor(x))[0]

    def reshape(self, x: tuple[str, Tensor], shape: list[str], t: Tensor) -> tuple[str, Tensor]:
        return self.make(f"reshape({x[0]}) {{shape=[{', '.join(shape)}]}}", t)

    def op(self, name: str, *xs: tuple[str, Tensor], fn: Callable[..., Tensor]) -> tuple[str, Tensor]:
        return self.make(f"{name}({', '.join(x[0] for x in xs)})", fn(*(x[1] for x in xs)))

    def linear(self) -> tuple[str, Tensor]:
        """A small integer formula of q and k."""
        i, j = self.i, self.j
        c = self.r.randint(-3, 3)
        kind = self.r.randrange(6)
        if kind == 0:
            j = self.op("mul", j, (self.number(2, "i64"), torch.tensor(2)), fn=torch.mul)
        d = self.op("sub", i, j, fn=torch.sub)
        if kind == 1:
            d = self.op("abs", d, fn=torch.abs)
        if kind == 2:
            three = (self.number(3, "i64"), torch.tensor(3))
            return self.op("sub", self.op("floor_div", i, three, fn=torch.floor_divide), self.op("floor_div", j, three, fn=torch.floor_divide),
                           fn=torch.sub)
        if kind == 3:
            d = self.op("neg", d, fn=torch.neg)
        if kind == 4:
            d = self.op("mul", d, (self.number(2, "i64"), torch.tensor(2)), fn=torch.mul)
        return self.op("add", d, (self.number(c, "i64"), torch.tensor(c)), fn=torch.add)

    def leaf(self) -> tuple[str, Tensor]:
        b, q, k = self.dim("B"), self.dim("Q"), self.dim("K")
        kind = self.r.randrange(8)
        if kind < 3:
            name = self.r.choice(["ge", "le", "gt", "lt", "eq", "ne"])
            return self.op(name, self.linear(), (self.number(0, "i64"), torch.tensor(0)), fn=getattr(torch, name))
        if kind < 5:
            m = self.make(f"cast({self.pad[0]}) {{to=bool}}", self.pad[1].bool())
            return self.reshape(m, [b, "1", "1", k], m[1][:, None, None, :])
        if kind == 5:
            m = self.make(f"ne({self.qpad[0]}, {self.number(0, 'i64')})", self.qpad[1] != 0)
            return self.reshape(m, [b, "1", q, "1"], m[1][:, None, :, None])
        if kind == 6:  # products and comparisons of data
            x = self.reshape(self.qpad, [b, "1", q, "1"], self.qpad[1][:, None, :, None])
            y = self.reshape(self.pad, [b, "1", "1", k], self.pad[1][:, None, None, :])
            if self.r.random() < 0.5:
                return self.op("eq", x, y, fn=torch.eq)
            return self.make(f"cast({self.op('mul', x, y, fn=torch.mul)[0]}) {{to=bool}}", (x[1] * y[1]).bool())
        return self.user

    def view(self, x: tuple[str, Tensor]) -> tuple[str, Tensor]:
        """A detour of views that changes nothing."""
        b, q, k = self.dim("B"), self.dim("Q"), self.dim("K")
        full = (self.size["B"], self.size["H"], self.size["Q"], self.size["K"])
        kind = self.r.randrange(5)
        if kind == 0:
            return self.make(f"expand({x[0]}) {{shape=[{b}, 2, {q}, {k}]}}", x[1].expand(full))
        if kind == 1:
            e = self.make(f"expand({x[0]}) {{shape=[{b}, 2, {q}, {k}]}}", x[1].expand(full))
            flat = f"{b}*2" if self.symbolic else str(full[0] * 2)
            e = self.reshape(e, [flat, q, k], e[1])
            return self.reshape(e, [b, "2", q, k], e[1].reshape(full))
        if kind == 2:
            e = self.make(f"permute({x[0]}) {{perm=[3, 0, 2, 1]}}", x[1])
            return self.make(f"permute({e[0]}) {{perm=[1, 3, 2, 0]}}", x[1])
        if kind == 3 and x[1].shape[3] == 7:
            e = self.make(f"flip({x[0]}) {{axes=[3]}}", x[1])
            return self.make(f"flip({e[0]}) {{axes=[3]}}", x[1])
        if kind == 4 and x[1].shape[3] == 7 and not self.symbolic:
            cut = self.r.randint(1, 6)
            a = self.make(f"slice({x[0]}) {{axis=3, start=0, end={cut}, step=1}}", x[1])
            c = self.make(f"slice({x[0]}) {{axis=3, start={cut}, end=7, step=1}}", x[1])
            return self.make(f"concat({a[0]}, {c[0]}) {{axis=3}}", x[1])
        return x

    def boolean(self, depth: int) -> tuple[str, Tensor]:
        if depth == 0 or self.r.random() < 0.2:
            x = self.leaf()
        else:
            kind = self.r.randrange(6)
            a = self.boolean(depth - 1)
            if kind == 0:
                x = self.op("not", a, fn=torch.logical_not)
            elif kind == 1:
                x = self.op("where", a, self.boolean(depth - 1), self.boolean(depth - 1), fn=torch.where)
            elif kind == 2:
                x = self.op("or", a, self.boolean(depth - 1), fn=torch.logical_or)
            else:
                x = self.op("and", a, self.boolean(depth - 1), fn=torch.logical_and)
        return self.view(x) if self.r.random() < 0.4 else x

    def additive(self) -> tuple[str, Tensor]:
        total: tuple[str, Tensor] | None = None
        for _ in range(self.r.randint(1, 3)):
            neg = self.r.choice([-math.inf, LOWEST, -1e30, -2.0])
            text = "-inf" if neg == -math.inf else repr(neg)
            hide = self.make(f"fill() {{shape=[], dtype=f64, value={text}}}", torch.tensor(neg, dtype=torch.float64))
            zero = (self.number(0, "f64"), torch.tensor(0, dtype=torch.float64))
            c = self.boolean(2)
            term = self.op("where", c, zero, hide, fn=torch.where) if self.r.random() < 0.7 else self.op("where", c, hide, zero, fn=torch.where)
            total = term if total is None else self.op("add", total, term, fn=torch.add)
        assert total is not None
        return total

    def text(self, mask: tuple[str, Tensor]) -> str:
        order = [x for x in self.lines if x.startswith("sym")] + [x for x in self.lines if not x.startswith("sym")]
        return "graph {\n  " + "\n  ".join(order) + f"\n  y, l = attention(q, k, v, {mask[0]}) {{scale={1 / math.sqrt(5)!r}}}\n  output y\n}}"


@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("block", range(6))
def test_random_formulas(form: str, block: int) -> None:
    changed = 0
    for seed in range(block * 40, block * 40 + 40):
        f = Formula(seed)
        mask = f.boolean(3) if form == "bool" else f.additive()
        text = f.text(mask)
        graph = engine.Graph.parse(text)
        before = graph.text()
        graph.apply("masks").verify()
        changed += graph.text() != before
        (y,) = graph.run(f.inputs, 1)
        try:
            close(y, reference(f.q, f.k, f.v, mask[1]))
        except AssertionError as e:
            raise AssertionError(f"seed {seed}:\n{text}\n-- passed:\n{graph.text()}") from e
    assert changed >= 10, "the generator makes too few masks that the pass can simplify"


def test_size_that_only_the_run_knows() -> None:
    """A mask whose key axis is not provably the keys' length: the rewritten graph must refuse another length, not
    misread it."""
    text = """graph {
      sym B = q[0]
      sym T = q[2]
      sym M = m[1]
      input q: f64[B, 2, T, 5]
      input m: i64[B, M]
      i = iota() {shape=[T], dtype=i64, start=0, step=1}
      j = iota() {shape=[M], dtype=i64, start=0, step=1}
      i4 = reshape(i) {shape=[1, 1, T, 1]}
      j4 = reshape(j) {shape=[1, 1, 1, M]}
      c = le(j4, i4)
      mb = cast(m) {to=bool}
      m4 = reshape(mb) {shape=[B, 1, 1, M]}
      a = and(c, m4)
      y, l = attention(q, q, q, a) {scale=0.5}
      output y
    }"""
    graph = engine.Graph.parse(text).apply("masks")
    (node,) = attentions(graph.text())
    assert node["causal"] and node["mask"] == "bool[B, 1, 1, T]"
    q, m = torch.randn(3, 2, 7, 5, dtype=torch.float64), torch.ones(3, 7, dtype=torch.long)
    m[1, 4:] = 0
    (y,) = graph.run([q, m], 1)
    mask = (torch.arange(7)[None] <= torch.arange(7)[:, None]) & m.bool()[:, None, None, :]
    s = (q @ q.transpose(-1, -2) * 0.5).masked_fill(~mask, -math.inf)
    close(y, s.softmax(-1) @ q)
    with pytest.raises(engine.EngineError):
        graph.run([q, m[:, :1].contiguous()], 1)
    # nothing of the mask is left that could check: it stays, and a single column is broadcast as ever
    alone = engine.Graph.parse(text.replace("q, q, q, a)", "q, q, q, c)")).apply("masks")
    assert attentions(alone.text())[0]["causal"] is False
    (y,) = alone.run([q, m[:, :1].contiguous()], 1)
    close(y, (q @ q.transpose(-1, -2) * 0.5).softmax(-1) @ q)


def test_out_of_memory() -> None:
    """An allocation that fails, at each place in turn, is an error with a message and leaves nothing behind."""
    libc, live, left = C.CDLL(None), set(), [0]
    libc.aligned_alloc.restype = C.c_void_p
    libc.aligned_alloc.argtypes = [C.c_size_t, C.c_size_t]
    libc.free.argtypes = [C.c_void_p]

    @engine.ALLOC
    def alloc(_user: Any, size: int) -> int | None:
        left[0] -= 1
        if left[0] < 0:
            return None
        p = libc.aligned_alloc(64, (size + 127) // 64 * 64)
        live.add(p)
        return p

    @engine.FREE
    def free(_user: Any, p: int, _size: int) -> None:
        live.remove(p)
        libc.free(p)

    services = engine.Services(alloc=alloc, free=free)
    f = Formula(7)
    text = f.text(f.boolean(3))

    def attempt(budget: int) -> bool:
        left[0] = budget
        cx = engine.Ctx.__new__(engine.Ctx)
        cx.p = C.c_void_p(engine.lib.om_ctx_new(C.byref(services)))
        if not cx.p.value:
            return False
        engine._owners[cx.p.value] = 1
        try:
            engine.Graph.parse(text, cx).apply("attention", "masks").text()
        except engine.EngineError as e:
            assert "memory" in str(e)
            return False
        return True

    assert attempt(1 << 30)
    used = (1 << 30) - left[0]
    assert not any(attempt(k) for k in range(0, used, max(1, used // 150)))
    assert not live
