"""The capture against eager PyTorch. Two judges that are not ours: onnxruntime runs the captured file's inference part (function bodies
included) in float32, and onnx_torch runs it node by node in float64 with PyTorch's autograd, so that outputs, gradients, write-backs and
every size and type the file declares are compared with the module at 1e-10.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx_torch import Graph
from torch import Tensor, nn

from ortmodule.capture import Captured, CaptureError, capture, flatten_inputs

onnxruntime = pytest.importorskip("onnxruntime")
transformers = pytest.importorskip("transformers")


def tensors_in(x: Any) -> list[Tensor]:
    """Tensors of a result in the order of a plain walk."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for y in x.values() for t in tensors_in(y)]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in tensors_in(y)]
    if hasattr(x, "layers"):
        return [t for layer in x.layers for t in (layer.keys, layer.values)]
    if hasattr(x, "self_attention_cache"):
        return tensors_in(x.self_attention_cache) + tensors_in(x.cross_attention_cache)
    if dataclasses.is_dataclass(x):
        return [t for f in dataclasses.fields(x) for t in tensors_in(getattr(x, f.name))]
    return []


def graph_inputs(c: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    flat = flatten_inputs(args, kwargs)
    leaves = [*flat.tensors, *flat.scalars]
    names = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    out: list[Tensor] = []
    for s in c.inputs:
        x = leaves[s.leaf] if s.kind == "user" else s.tensor if s.kind == "const_attr" else names[s.target]
        out.append(x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64 if type(x) is int else torch.float64))
    return out


def own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments as fresh leaves; float ones want gradients when the originals do."""
    return copy.deepcopy(args), copy.deepcopy(kwargs)


def double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)):
        return type(x)(double(y) for y in x)
    return {k: double(y) for k, y in x.items()} if isinstance(x, dict) else x


def check(module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, ort: bool = True, other: Any = None,
          tolerance: float = 1e-10, **how: Any) -> Captured:
    """Captures the module in float64 and compares the file, run by onnx_torch, with the module: outputs, gradients by random output
    gradients, buffers and inputs after the call. Then the same in float32 in onnxruntime, outputs only. other: (args, kwargs) of
    different sizes for a dynamic capture."""
    kwargs = kwargs or {}
    wide = copy.deepcopy(module).double()
    wargs, wkwargs = double(args), double(kwargs)
    c = capture(wide, *own(wargs, wkwargs), **how)
    model = onnx.load_from_string(c.onnx)
    onnx.checker.check_model(model, full_check=True)
    for call_args, call_kwargs in [(wargs, wkwargs)] + ([(double(other[0]), double(other[1]))] if other else []):
        compare(c, wide, call_args, call_kwargs, tolerance)
    if ort and not c.host_ops:
        c32 = capture(module, *own(args, kwargs), **how)
        run_ort(c32, module, args, kwargs)
        if other:
            run_ort(c32, module, *other)
    return c


def compare(c: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float) -> None:
    theirs = copy.deepcopy(module)
    eargs, ekwargs = own(args, kwargs)
    assert c.fits(flatten_inputs(eargs, ekwargs))
    was_leaf = [t.clone() if t.requires_grad else t for t in flatten_inputs(eargs, ekwargs).tensors]
    del was_leaf
    expected = theirs(*eargs, **ekwargs)
    want = tensors_in(expected)

    ours = copy.deepcopy(module)
    oargs, okwargs = own(args, kwargs)
    inputs = graph_inputs(c, ours, oargs, okwargs)
    results = Graph(c.onnx, c.host_ops).run(inputs)
    user, writes = results[: c.n_user_outputs], results[c.n_user_outputs :]
    rebuilt = c.rebuild(user)
    assert type(rebuilt) is type(expected)
    got = tensors_in(rebuilt)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)

    generator = torch.Generator().manual_seed(11)
    seeds = [torch.randn(w.shape, generator=generator, dtype=w.dtype) if w.is_floating_point() else None for w in want]

    def gradients(outs: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
        pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if s is not None and o.requires_grad]
        if not pairs or not leaves:
            return [None] * len(leaves)
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True))

    flags = [o.requires_grad for o in want]
    assert [o.requires_grad for o in got] == flags, "which outputs require grad"
    eleaves = dict(theirs.named_parameters())
    oleaves = dict(ours.named_parameters())
    names = [n for n, p in eleaves.items() if p.requires_grad]
    e_in = [t for t in flatten_inputs(eargs, ekwargs).tensors if t.requires_grad and t.is_leaf]
    o_in = [t for t in flatten_inputs(oargs, okwargs).tensors if t.requires_grad and t.is_leaf]
    eg = gradients(want, [eleaves[n] for n in names] + e_in)
    og = gradients(got, [oleaves[n] for n in names] + o_in)
    for name, e, o in zip(names + [f"input {i}" for i in range(len(e_in))], eg, og, strict=True):
        if e is None or o is None:
            assert (e is None or not e.any()) and (o is None or not o.any()), f"gradient of {name}"
        else:
            torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"gradient of {name}: {m}")

    with torch.no_grad():
        for i, value in zip(c.writes, writes, strict=True):
            inputs[i].copy_(value)
    for (name, e), (_, o) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"buffer {name}: {m}")
    for e, o in zip(flatten_inputs(eargs, ekwargs).tensors, flatten_inputs(oargs, okwargs).tensors, strict=True):
        torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance)


def run_ort(c: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(c.onnx, options, providers=["CPUExecutionProvider"])
    theirs = copy.deepcopy(module)
    eargs, ekwargs = own(args, kwargs)
    with torch.no_grad():
        want = tensors_in(theirs(*eargs, **ekwargs))
    feeds = {s.name: t.detach().numpy() for s, t in zip(c.inputs, graph_inputs(c, module, args, kwargs), strict=True)}
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    results = [torch.from_numpy(np.asarray(r)) for r in session.run(None, feeds)]
    got = tensors_in(c.rebuild(results[: c.n_user_outputs]))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)


# --- models ---------------------------------------------------------------------------------------


def ids(batch: int, length: int, vocabulary: int = 97) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def padded(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    for i in range(batch):
        mask[i, length - i :] = 0
    return mask


NO_DROPOUT: dict[str, Any] = {
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=3, vocab_size=97, n_positions=41, bos_token_id=1, eos_token_id=2, **(NO_DROPOUT | more)))


def bert(cls: str, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    return getattr(transformers, cls)(transformers.BertConfig(
        num_hidden_layers=2, hidden_size=30, num_attention_heads=3, intermediate_size=34, vocab_size=97, max_position_embeddings=41,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5, **more))


def t5() -> nn.Module:
    torch.manual_seed(2)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        num_layers=2, d_model=22, d_kv=7, num_heads=3, d_ff=34, vocab_size=97, dropout_rate=0.0, decoder_start_token_id=0))


def llama() -> nn.Module:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=24, num_attention_heads=6, num_key_value_heads=3, intermediate_size=34, vocab_size=97,
        max_position_embeddings=41, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def vit() -> nn.Module:
    torch.manual_seed(4)
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=30, num_attention_heads=3, intermediate_size=34, image_size=15, patch_size=5, num_labels=7,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


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
    "bert_cls": (lambda: bert("BertForSequenceClassification"),
                 lambda b, t: ((), {"input_ids": ids(b, t), "attention_mask": padded(b, t), "labels": ids(b, 1, 5)[:, 0]})),
    "t5": (t5, lambda b, t: ((), {"input_ids": ids(b, t), "attention_mask": padded(b, t), "labels": ids(b, t + 2)})),
    "llama": (llama, lambda b, t: ((), {"input_ids": ids(b, t), "labels": ids(b, t), "attention_mask": padded(b, t)})),
    "vit": (vit, lambda b, t: ((), {"pixel_values": torch.randn(b, 3, 15, 15), "labels": ids(b, 1, 7)[:, 0]})),
    "encoder": (encoder, lambda b, t: ((torch.randn(b, t, 22),), {"src_key_padding_mask": padded(b, t) == 0})),
    "resnet": (ResNet, lambda b, t: ((torch.randn(b, 3, 23, 19), ids(b, 1, 11)[:, 0]), {})),
    "lstm": (Lstm, lambda b, t: ((torch.randn(b, t, 5, requires_grad=True),), {})),
    "gru": (lambda: Lstm("GRU"), lambda b, t: ((torch.randn(b, t, 5, requires_grad=True),), {})),
    "text": (TextClassifier, lambda b, t: ((ids(b, t, 31), ids(b, 1, 5)[:, 0]), {})),
}


# T5's and Llama's norms, and T5's and ViT's softmax, compute in float32 whatever the model's type.
LOOSE = {"t5": 2e-6, "llama": 2e-6}


@pytest.mark.parametrize("name", MODELS)
def test_model_static(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(21)
    check(make(), *batch(3, 11), tolerance=LOOSE.get(name, 1e-10))


@pytest.mark.parametrize("name", MODELS)
def test_model_dynamic(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(22)
    check(make(), *batch(3, 11), dynamic=True, other=batch(2, 13), tolerance=LOOSE.get(name, 1e-10))
