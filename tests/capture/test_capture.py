"""The capture against eager PyTorch. Two judges that are not ours: onnxruntime runs the captured file's inference part
(function bodies included) in float32, and onnx_torch runs it node by node in float64 with PyTorch's autograd, so that
outputs, gradients, write-backs and every size and type the file declares are compared with the module at 1e-10.
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
from ortmodule.capture.elementwise import PLAIN

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


def check(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    ort: bool = True,
    other: Any = None,
    tolerance: float = 1e-10,
    **how: Any,
) -> Captured:
    """Captures the module in float64 and compares the file, run by onnx_torch, with the module: outputs, gradients by
    random output gradients, buffers and inputs after the call. Then the same in float32 in onnxruntime, outputs only.
    other: (args, kwargs) of different sizes for a dynamic capture."""
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
            error = float((o - e).abs().max()) if e.numel() else 0.0
            assert error <= tolerance * max(1.0, float(e.abs().max())) if e.numel() else True, f"gradient of {name}: off by {error:.3e}"

    with torch.no_grad():
        for i, value in zip(c.writes, writes, strict=True):
            inputs[i].copy_(value)
    for (name, e), (_, o) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"buffer {name}: {m}")
    for e, o in zip(flatten_inputs(eargs, ekwargs).tensors, flatten_inputs(oargs, okwargs).tensors, strict=True):
        torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance, equal_nan=True)


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


# --- operators ------------------------------------------------------------------------------------


class Fn(nn.Module):
    """A module around a function of tensors."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)


def r(*shape: int, grad: bool = True) -> Tensor:
    g = torch.Generator().manual_seed(sum(d * 7**i for i, d in enumerate(shape)) + 3)
    return torch.randn(*shape, generator=g).requires_grad_(grad)


def wide(*shape: int) -> Tensor:
    return (r(*shape) * 4).detach().requires_grad_()


def u(*shape: int) -> Tensor:
    """In (0.2, 1.2): where logarithms and roots are smooth."""
    g = torch.Generator().manual_seed(sum(shape) + 5)
    return (torch.rand(*shape, generator=g) + 0.2).requires_grad_()


def k(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


def b(*shape: int) -> Tensor:
    return k(2, *shape) > 0


ONE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    # pointwise
    "arithmetic": (
        lambda x, y: (x + y, x - 2 * y, 3 - x, x * y, x / (y * y + 1), 2 / (x * x + 1), torch.add(x, y, alpha=0.3)),
        (r(5, 7), r(7)),
    ),
    "promotion": (
        lambda x, i, m: (x + i, i * 2.5, i / 3, m * x, i + 1, m + i, i * m, torch.where(m, x, i), torch.where(m, 1.5, x)),
        (r(5, 7), k(9, 5, 7), b(5, 7)),
    ),
    "scalar_0d": (lambda x, s: (x * s, x + s.float(), s * 2), (r(5, 7), torch.tensor(0.7))),
    "unary": (
        lambda x: (
            -x,
            x.abs(),
            x.exp(),
            x.tanh(),
            x.sigmoid(),
            x.erf(),
            x.sin(),
            x.cos(),
            x.relu(),
            x.sign(),
            x.floor(),
            x.ceil(),
            x.round(),
            x.trunc(),
            x.square(),
            x.expm1(),
        ),
        (r(5, 7),),
    ),
    "roots": (
        lambda x: (
            x.log(),
            x.sqrt(),
            x.rsqrt(),
            x.reciprocal(),
            x.log1p(),
            x.log2(),
            x.log10(),
            x**0.5,
            x**-0.5,
            x**-1,
            x**2.5,
            2.5**x,
            x**x,
        ),
        (u(5, 7),),
    ),
    "powers": (lambda x, i: (x**2, x**3, x**1, i**2, x.pow(4)), (r(5, 7), k(9, 5))),
    "rows of pointwise.def": (lambda x: tuple(getattr(torch, aten)(x) for aten in PLAIN), (u(5, 7),)),
    "activations": (
        lambda x: (
            F.silu(x),
            F.gelu(x),
            F.gelu(x, approximate="tanh"),
            F.softplus(x),
            F.softplus(x, 2.0, 1.0),
            F.logsigmoid(x),
            F.leaky_relu(x, 0.1),
            F.elu(x),
            F.elu(x, 1.7),
            F.selu(x),
            F.celu(x, 2.0),
            F.mish(x),
            F.glu(x, -1),
        ),
        (r(5, 14),),
    ),
    "kinks": (lambda x: (F.relu6(x), F.hardtanh(x), F.hardswish(x), x.clamp(-0.5, 0.7), x.clamp(min=0.1), x.clamp_max(0.2)), (wide(5, 7),)),
    "clamp_at_bounds": (
        lambda x: (x.clamp(-1, 1), F.relu6(x), F.hardtanh(x), F.relu(x)),
        (torch.tensor([-2.0, -1, 0, 1, 6, 7], requires_grad=True),),
    ),
    "clamp_tensor": (lambda x, y: x.clamp(min=y), (r(5, 7), r(7))),
    "prelu": (lambda x, w: F.prelu(x, w), (r(3, 5, 7), r(5))),
    "min_max": (
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x.max(), x.min(), x.max(1).values, x.min(0), x.amax(1), x.amin((0, 1))),
        (r(5, 7), r(5, 7)),
    ),
    "integer_division": (
        lambda i, j: (i // -3, i % -3, i.div(3, rounding_mode="trunc"), torch.fmod(i, 3), i // 3, i % 3, i.float() // j, i.float() % 1.7),
        (k(20, 5, 7, low=-20), k(9, 7, low=1) * torch.tensor([1, -1, 1, -1, 1, -1, 1])),
    ),
    "compare": (lambda x, y, i: (x > y, x >= 0.1, x < y, x <= 0, i == 3, i != j3(i), x == y, i > 1.5), (r(5, 7), r(7), k(5, 5, 7))),
    "logic": (
        lambda m, q, i: (m & q, m | q, m ^ q, ~m, i & 3, i | 4, ~i, torch.logical_and(m, i), torch.logical_not(i), m * q, m + q),
        (b(5, 7), b(5, 7), k(9, 5, 7)),
    ),
    "tests": (
        lambda x: (x.isnan(), x.isinf(), x.isfinite(), x.nan_to_num(0.5, 3.0, -3.0)),
        (torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]),),
    ),
    "where_masked": (
        lambda x, y, m: (torch.where(m, x, y), x.masked_fill(m, -1e4), torch.where(m, x, 0.0), x.masked_fill(m, y.sum())),
        (r(5, 7), r(7), b(5, 7)),
    ),
    "addcmul_lerp": (
        lambda x, y, z: (torch.addcmul(x, y, z, value=0.3), torch.addcdiv(x, y, z * z + 1), torch.lerp(x, y, 0.3), torch.lerp(x, y, z)),
        (r(5, 7), r(7), r(5, 7)),
    ),
    # reductions
    "sums": (
        lambda x, i, m: (
            x.sum(),
            x.sum(1),
            x.sum((0, 2), keepdim=True),
            x.mean(),
            x.mean(-1, keepdim=True),
            x.prod(1),
            i.sum(0),
            m.sum(),
            x.sum(1, dtype=torch.float64),
        ),
        (r(5, 7, 3), k(9, 5, 7), b(5, 7)),
    ),
    "moments": (
        lambda x: (x.var(1), x.std((0, 2), correction=0), x.var(), torch.var_mean(x, 1, keepdim=True), x.std(1, unbiased=False)),
        (r(5, 7, 3),),
    ),
    "norms": (
        lambda x: (x.norm(), x.norm(dim=1, keepdim=True), torch.linalg.vector_norm(x, 1, (0, 2)), F.normalize(x, dim=1)),
        (r(5, 7, 3),),
    ),
    "argmax_any": (
        lambda x, m: (x.argmax(1), x.argmin(), x.argmax(0, keepdim=True), m.any(), m.all(1), m.any(0, keepdim=True)),
        (r(5, 7), b(5, 7)),
    ),
    "cumsum": (lambda x, i: (x.cumsum(1), i.cumsum(0), x.logsumexp(1), x.logsumexp((0, 1), keepdim=True)), (r(5, 7), k(9, 5, 7))),
    # products
    "products": (
        lambda x, y, v: (
            x @ y,
            torch.mm(x, y),
            v @ y,
            x @ v,
            torch.dot(v, v),
            torch.outer(v, v),
            torch.addmm(v[:3].expand(5, 3), x, y, beta=0.5, alpha=2),
        ),
        (r(5, 7), r(7, 3), r(7)),
    ),
    "batched": (
        lambda x, y, z: (torch.bmm(x, y), x @ z, torch.baddbmm(x @ y, x, y, alpha=0.3), torch.matmul(x[None], y)),
        (r(3, 5, 7), r(3, 7, 2), r(7, 11)),
    ),
    "einsum": (
        lambda x, y, z: (torch.einsum("bij,bjk->bik", x, y), torch.einsum("bij,jk->ikb", x, z), torch.einsum("bij,bkj->bk", x, x)),
        (r(3, 5, 7), r(3, 7, 2), r(7, 11)),
    ),
    "linear": (
        lambda x, w, c: (F.linear(x, w, c), F.linear(x, w), F.linear(x[0, 0], w, c), F.linear(x, w[0])),
        (r(3, 5, 7), r(11, 7), r(11)),
    ),
    # shapes
    "views": (
        lambda x: (
            x.view(-1, 3),
            x.reshape(7, 15),
            x.transpose(0, 2),
            x.permute(2, 0, 1),
            x.unsqueeze(1),
            x[:, None].squeeze(1),
            x.flatten(1),
            x.unflatten(1, (7, 1)),
            x.mT,
            x.swapaxes(0, 1),
            x.movedim(0, -1),
            x[0].t(),
            x.contiguous(),
        ),
        (r(5, 7, 3),),
    ),
    "slices": (
        lambda x: (x[1:4], x[:, -3:], x[..., ::2], x[:, 1:100], x[2], x[:, -1], x.narrow(1, 2, 3), x[:, 3:3], x.select(2, 1)),
        (r(5, 7, 3),),
    ),
    "splits": (lambda x: (*x.split(2, 0), *x.chunk(3, 1), *x.unbind(2), *x.split([1, 4], 0), *x.tensor_split(2, 1)), (r(5, 7, 3),)),
    "joins": (
        lambda x, y: (torch.cat([x, y, x], 1), torch.stack([x, y], -1), torch.cat([x.new_zeros(0), x]), torch.cat([x, (x > 0).long()])),
        (r(5, 7), r(5, 7)),
    ),
    "repeats": (
        lambda x: (
            x.repeat(2, 1, 3),
            x.expand(3, 5, 7),
            x.repeat_interleave(2, 1),
            x.tile(2),
            x.broadcast_to(2, 5, 7),
            x.roll(2, 1),
            x.roll((1, -2), (0, 1)),
            x.flip(0, 1),
        ),
        (r(5, 7),),
    ),
    "pads": (
        lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 2, 1), value=3.0), F.pad(x, (-1, 1)), x.tril(), x.triu(1), x.diff(), x.diff(dim=0)),
        (r(5, 7),),
    ),
    "creation": (
        lambda x: (
            torch.arange(7) * x,
            torch.arange(2, 9, 3),
            torch.arange(0, 1, 0.3),
            torch.zeros(2, 3),
            x.new_ones(3),
            torch.full((2,), 1.5),
            torch.zeros_like(x),
            torch.eye(3),
            torch.linspace(0, 1, 5),
            torch.full_like(x, 2),
            torch.tensor([1.0, 2.0]),
            torch.ones(2, dtype=torch.bool),
        ),
        (r(5, 7),),
    ),
    # indexing
    "indexing": (
        lambda x, i, j: (
            x[i],
            x[:, j],
            x[i, j],
            x[i, :, j % 3],
            x[:, i, j % 3],
            x[-1 - i],
            x[i[:, None], j],
            x.index_select(1, j),
            x[[0, 2]],
        ),
        (r(5, 7, 3), k(5, 4), k(7, 4)),
    ),
    "gather": (lambda x, i: (x.gather(1, i), torch.take_along_dim(x, i, 1)), (r(5, 7), k(7, 5, 3))),
    "scatter": (
        lambda x, i, s: (
            x.scatter(1, i, s),
            x.scatter_add(1, i, s),
            x.scatter(1, i, 0.5),
            x.index_add(0, torch.tensor([1, 1, 4]), s[:3, :1].expand(3, 7)),
        ),
        (r(5, 7), torch.tensor([[0, 3, 6]] * 5), r(5, 3)),
    ),
    "one_hot": (lambda i: F.one_hot(i, 7), (k(7, 5),)),
    "embedding": (
        lambda w, i: (F.embedding(i, w), F.embedding(i, w, padding_idx=2), F.embedding(i, w, padding_idx=-1)),
        (r(11, 3), k(11, 5, 7)),
    ),
    # rows
    "softmaxes": (lambda x: (x.softmax(-1), x.softmax(0), x.log_softmax(1), F.softmax(x, 1, dtype=torch.float64)), (r(5, 7),)),
    "norm_layers": (
        lambda x, w, c: (
            F.layer_norm(x, (7,), w, c),
            F.layer_norm(x, (5, 7)),
            F.rms_norm(x, (7,), w),
            F.group_norm(x.transpose(1, 2)[:, :6], 3),
            F.instance_norm(x),
        ),
        (r(3, 5, 7), r(7), r(7)),
    ),
    "batch_norm_stateless": (
        lambda x, w: (F.batch_norm(x, None, None, w, training=True), F.batch_norm(x, torch.ones(5).to(x), torch.full((5,), 2.0).to(x), w)),
        (r(3, 5, 7), r(5)),
    ),
    # attention
    "attention": (
        lambda q, kk, v: (
            F.scaled_dot_product_attention(q, kk, v),
            F.scaled_dot_product_attention(q, kk, v, scale=0.3),
            F.scaled_dot_product_attention(q[0], kk[0], v[0]),
        ),
        (r(2, 3, 5, 7), r(2, 3, 11, 7), r(2, 3, 11, 4)),
    ),
    "attention_causal": (
        lambda q, kk, v: F.scaled_dot_product_attention(q, kk, v, is_causal=True),
        (r(2, 3, 5, 7), r(2, 3, 11, 7), r(2, 3, 11, 4)),
    ),
    "attention_mask": (
        lambda q, kk, v, m: F.scaled_dot_product_attention(q, kk, v, m),
        (r(2, 3, 5, 7), r(2, 3, 11, 7), r(2, 3, 11, 4), r(2, 1, 5, 11)),
    ),
    "attention_bool": (
        lambda q, kk, v, m: F.scaled_dot_product_attention(q, kk, v, m | (torch.arange(11) == 0)),
        (r(2, 3, 5, 7), r(2, 3, 11, 7), r(2, 3, 11, 4), b(5, 11)),
    ),
    "attention_gqa": (
        lambda q, kk, v: F.scaled_dot_product_attention(q, kk, v, enable_gqa=True),
        (r(2, 6, 5, 7), r(2, 3, 11, 7), r(2, 3, 11, 4)),
    ),
    # losses
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y, ignore_index=2), (r(7, 5), k(5, 7))),
    "cross_entropy_smooth": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), (r(7, 5, 3), k(5, 7, 3))),
    "cross_entropy_sum": (
        lambda x, y, w: (F.cross_entropy(x, y, w, reduction="sum"), F.cross_entropy(x, y, w), F.cross_entropy(x, y, w, reduction="none")),
        (r(7, 5), k(5, 7), u(5).detach()),
    ),
    "cross_entropy_soft": (
        lambda x, y: (F.cross_entropy(x, y.softmax(1)), F.cross_entropy(x, y.softmax(1), label_smoothing=0.1)),
        (r(7, 5), r(7, 5)),
    ),
    "nll": (lambda x, y: F.nll_loss(x.log_softmax(1), y), (r(7, 5), k(5, 7))),
    "regressions": (
        lambda x, y: (
            F.mse_loss(x, y),
            F.l1_loss(x, y),
            F.smooth_l1_loss(x, y, beta=0.3),
            F.huber_loss(x, y, delta=0.7),
            F.mse_loss(x, y, reduction="sum"),
        ),
        (r(5, 7), r(5, 7)),
    ),
    "kl_bce": (
        lambda x, y: (
            F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
            F.kl_div(x, y, log_target=True),
            F.binary_cross_entropy_with_logits(x, y.sigmoid()),
            F.binary_cross_entropy_with_logits(x, y.sigmoid(), y, pos_weight=y.exp()),
        ),
        (r(5, 7), r(5, 7, grad=False)),
    ),
    # convolutions and pools
    "convolutions": (
        lambda x, w, g, c: (
            F.conv2d(x, w, c, 2, 1, 2),
            F.conv2d(x, g, None, 1, "same", groups=3),
            F.conv1d(x[:, :, 0], w[:, :, 0], c, 3),
            F.conv2d(x[0], w),
        ),
        (r(2, 3, 13, 11), r(5, 3, 3, 3), r(6, 1, 3, 5), r(5)),
    ),
    "pools": (
        lambda x: (
            F.max_pool2d(x, 3, 2, 1),
            F.max_pool2d(x, (2, 3), ceil_mode=True),
            F.avg_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 2, count_include_pad=False),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_avg_pool2d(x[..., :10], (13, 5)),
            F.adaptive_avg_pool2d(x, (3, 4)),
            F.max_pool1d(x[:, :, 0], 3),
            F.avg_pool1d(x[:, :, 0], 3),
        ),
        (r(2, 3, 13, 11),),
    ),
    # what PyTorch keeps
    "host": (
        lambda x: (x.topk(2).values, torch.cdist(x, x + 1), x.median(1).values, x.sort(1), torch.tan(x)),
        (r(5, 7),),
    ),
    "regions": (lambda x: (x * x.detach(), no_grad_square(x), x + no_grad_square(x)), (r(5, 7),)),
}


def j3(i: Tensor) -> Tensor:
    return i.flip(0)


@torch.no_grad()
def no_grad_square(x: Tensor) -> Tensor:
    y = x * x
    return y + 1


@pytest.mark.parametrize("name", ONE)
def test_operator(name: str) -> None:
    f, args = ONE[name]
    ort = name not in ("pools",)
    c = check(Fn(f), args, ort=ort)
    assert bool(c.host_ops) == (name == "host"), [h.name for h in c.host_ops]


def test_hardsigmoid() -> None:
    check(Fn(F.hardsigmoid), (wide(5, 7),), tolerance=1e-7)  # torch's own backward uses 1/6 in float32


# --- in-place edits and state ---------------------------------------------------------------------


class Stateful(nn.Module):
    """Runs `f(module, x)`; has a parameter, buffers and a plain tensor."""

    def __init__(self, f: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(r(5, 7).detach())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("average", r(7, grad=False))
        self.register_buffer("cache", torch.zeros(11, 7))

    def forward(self, x: Tensor) -> Any:
        return self.f(self, x)


def _fill_slices(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[1:3] = x[0]
    y[:, 2] = 0.5
    y[..., ::2] += 1
    y[-1, -1] = x.sum()
    return y


def _chain(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * m.w
    v = y.view(7, 5).t()[1:4]
    v.mul_(3)
    return y, v + 1


def _late_view(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    row = y[2]
    y.add_(1)
    z = row * 2
    row.sub_(x[0])
    return y, z


def _masked(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0.3] = 0.0
    y.masked_fill_(x < -0.5, 2.0)
    return y


def _splits(m: Any, x: Tensor) -> Tensor:
    y = x.detach() * 1  # autograd forbids edits of one of several views
    a, c, _d = y.split([2, 2, 3], 1)
    a.mul_(c)
    y.unbind(0)[3].zero_()
    y.chunk(2, 1)[1].neg_()
    return y


def _index(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    i = torch.tensor([0, 2])
    y[i] = x[1] * 3
    y[:, i] = 1.0
    y[i, i + 1] = x[3, :2]
    y.index_put_((i,), x[i], accumulate=True)
    y.scatter_(1, torch.tensor([[0, 1]] * 5), x[:, :2])
    y.index_add_(0, i, x[3:])
    return y


def _ema(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    m.count += 1
    return x * m.average / m.count


def _detached_write(m: Any, x: Tensor) -> Tensor:
    y = x * m.w
    y.detach()[1:3].mul_(5)
    return y * x


def _no_grad_write(m: Any, x: Tensor) -> Tensor:
    y = x * m.w
    with torch.no_grad():
        y[0] = 7
    return y * y


def _kv_cache(m: Any, x: Tensor) -> Tensor:
    m.cache[2:7].copy_(x.detach())
    return x @ m.cache.t()


def _input(m: Any, x: Tensor) -> Tensor:
    x += 1
    return x * m.w


def _dtype(m: Any, x: Tensor) -> Tensor:
    y = (x * 1).float()
    y.add_(x.double())
    i = torch.zeros(5, 7, dtype=torch.int64)
    i.add_(2).mul_(3)
    return y * i


def _triangle(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.tril_().clamp_(max=0.9)
    y.transpose(0, 1).add_(x.t())
    y.diagonal().fill_(2.0)
    return y


def _out(m: Any, x: Tensor) -> Tensor:
    y = torch.empty(5, 7, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(x, 2, out=y)
    return y + x


def _eval_dropout(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = torch.atleast_1d(F.dropout(F.dropout(y, 0.5, False), 0.0))
    z.add_(1)
    return y * z


STATE: dict[str, Callable[[Any, Tensor], Any]] = {
    f.__name__: f
    for f in (
        _fill_slices,
        _chain,
        _late_view,
        _masked,
        _splits,
        _index,
        _ema,
        _detached_write,
        _no_grad_write,
        _kv_cache,
        _dtype,
        _triangle,
        _eval_dropout,
        _out,
    )
}


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_place(name: str, dynamic: bool) -> None:
    c = check(Stateful(STATE[name]), (r(5, 7),), dynamic=dynamic, ort=name != "_triangle")
    assert bool(c.writes) == (name in ("_ema", "_kv_cache"))


def test_input_written() -> None:
    c = check(Stateful(_input), (r(5, 7, grad=False),))
    assert [c.inputs[i].kind for i in c.writes] == ["user"]


def test_export_leaves_plain_tensors_alone() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.zeros(7)
            self.calls = 0
            self.log: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.plain.add_(1)
            self.calls += 1
            self.log.append(1)
            return x * self.plain

    m = M()
    c = capture(m, (r(5, 7),), {})
    assert not m.plain.any() and m.calls == 0 and m.log == []
    assert [c.inputs[i].tensor is m.plain for i in c.writes] == [True]


def test_expanded_write_is_refused() -> None:
    def f(m: Any, x: Tensor) -> Tensor:
        y = (x * 2)[0].expand(5, 7)
        y.add_(1)
        return y

    with pytest.raises(CaptureError, match="expanded view"):
        capture(Stateful(f), (r(5, 7),), {})


def test_shared_memory_write_is_refused() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(14)
            self.register_buffer("a", both[:7])
            self.register_buffer("z", both[7:])

        def forward(self, x: Tensor) -> Tensor:
            self.a.add_(1)
            return x * self.a + self.z

    with pytest.raises(CaptureError, match="shares its memory"):
        capture(M(), (r(5, 7),), {})


# --- parameters -----------------------------------------------------------------------------------


def test_tied_and_equal_parameters() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(7, 7, bias=False)
            self.z = nn.Linear(7, 7, bias=False)
            self.z.weight = self.a.weight
            self.one = nn.LayerNorm(7)
            self.two = nn.LayerNorm(7)
            self.unused = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.z(self.one(self.a(x))))

    c = check(M(), (r(5, 7),))
    assert [s.target for s in c.inputs if s.kind == "param"] == ["a.weight", "one.weight", "one.bias", "two.weight", "two.bias"]


def test_unregistered_parameter_gets_gradient() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Parameter(torch.ones(7))]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.hidden[0]

    m = M()
    c = capture(m, (r(5, 7),), {})
    assert [s.tensor is m.hidden[0] for s in c.inputs if s.kind == "const_attr"] == [True]


def test_nothing_is_touched() -> None:
    m = gpt2(resid_pdrop=0.1)
    bn = ResNet()
    before = [copy.deepcopy(x.state_dict()) for x in (m, bn)]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    capture(m, (), {"input_ids": ids(3, 11), "labels": ids(3, 11)})
    capture(bn, (r(3, 3, 23, 19), k(11, 3)), {}, dynamic=True)
    assert (
        torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate() and (states[2] == np.random.get_state()[1]).all()
    )
    for x, state in zip((m, bn), before, strict=True):
        assert x.training and all(torch.equal(v, state[key]) for key, v in x.state_dict().items())
        assert all(p.grad is None for p in x.parameters())


# --- results --------------------------------------------------------------------------------------


def test_output_objects() -> None:
    @dataclasses.dataclass
    class Out:
        a: Tensor
        more: dict[str, Any]
        none: None = None

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor, scale: float = 2.0) -> Out:
            y = x * self.w
            return Out(y, {"same": y, "list": [x, (y.sum(), 3, "text")], "w": self.w, "size": x.shape[0]})

    m, x = M(), r(5, 7)
    for dynamic in (False, True):
        c = capture(m, (x,), {}, dynamic=dynamic)
        names = [c.inputs[i].name for i in c.passthrough.values()]
        assert names == ["input_0", "w"]
        results = Graph(c.onnx).run(graph_inputs(c, m, (x,), {}))
        first, second = c.rebuild(results), c.rebuild(results)
        assert type(first) is Out and first is not second and first.more is not second.more
        assert first.more["same"] is first.a and first.more["list"][1][1:] == (3, "text") and first.none is None
        assert first.more["size"] == 5 and type(first.more["size"]) is int


def test_cache_decodes_next_token() -> None:
    m = llama().eval()
    c = capture(m, (), {"input_ids": ids(2, 11)})
    with torch.no_grad():
        ours = c.rebuild(Graph(c.onnx).run(graph_inputs(c, m, (), {"input_ids": ids(2, 11)})))
        theirs = m(input_ids=ids(2, 11))
        assert type(ours) is type(theirs) and type(ours.past_key_values) is type(theirs.past_key_values)
        assert ours.past_key_values is ours["past_key_values"]
        a = m(input_ids=ids(2, 1), past_key_values=ours.past_key_values).logits
        e = m(input_ids=ids(2, 1), past_key_values=theirs.past_key_values).logits
    torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{"return_dict": False}, {"output_hidden_states": True}, {"use_cache": False}])
def test_output_options(how: dict[str, Any]) -> None:
    check(gpt2(), (), {"input_ids": ids(3, 11), "labels": ids(3, 11), **how})


# --- arguments ------------------------------------------------------------------------------------


def test_flatten_inputs() -> None:
    x, y = r(5, 7), k(5, 7)
    flat = flatten_inputs((x, [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": True}})
    assert [t is e for t, e in zip(flat.tensors, (x, y, x), strict=True)] == [True] * 3 and flat.scalars == [3, 2.5]
    same = flatten_inputs((x + 1, [y, None, 4]), {"a": {"k": x, "flag": True}, "b": 1.5})
    assert same.key == flat.key and hash(same.key) == hash(flat.key)
    for args, kwargs in (
        ((x, [y, None, 3.0]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x, [y, y, 3]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x, [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": False}}),
        ((x, (y, None, 3)), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x.double(), [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x[0], [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": True}}),
    ):
        assert flatten_inputs(args, kwargs).key != flat.key


def test_scalars() -> None:
    def f(x: Tensor, i: int, a: float) -> Any:
        return x * a + i, x.long() * a, torch.zeros(i) + 1, (x * a).sum() * i, torch.tensor(2.0) * a

    x = r(5, 7)
    fixed = capture(Fn(f), (x, 3, 0.5), {})
    assert fixed.fits(flatten_inputs((x, 3, 0.5), {})) and not fixed.fits(flatten_inputs((x, 4, 0.5), {}))
    free = capture(Fn(f), (x, 3, 0.5), {}, symbolic_scalars=True)
    assert free.fixed_scalars == [] and [s.leaf for s in free.inputs] == [0, 1, 2]
    for i, a in ((3, 0.5), (5, 0.1)):
        assert free.fits(flatten_inputs((x, i, a), {}))
        want = f(x, i, a)
        got = free.rebuild(Graph(free.onnx).run(graph_inputs(free, nn.Module(), (x, i, a), {})))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g, w)


def test_dynamic_conditions() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x @ y if x.shape[0] > 2 else x @ y * 2

    x, y = r(5, 7), r(7, 3)
    c = capture(Fn(f), (x, y), {}, dynamic=True)
    assert [s.dims for s in c.inputs] == [("s0", "s1"), ("s1", "s2")]
    for a, e, ok in ((r(5, 7), r(7, 3), True), (r(3, 2), r(2, 1), True), (r(2, 7), r(7, 3), False), (r(5, 7), r(6, 3), False)):
        assert c.fits(flatten_inputs((a, e), {})) == ok


def test_size_one_stays_symbolic() -> None:
    c = capture(gpt2(), (), {"input_ids": ids(1, 11), "labels": ids(1, 11)}, dynamic=True)
    assert c.inputs[0].dims == ("s0", "s1")
    check(nn.Linear(7, 3), (r(1, 7),), dynamic=True, other=((r(5, 7),), {}))


# --- randomness, grad mode, autocast --------------------------------------------------------------


def nodes(c: Captured) -> list[str]:
    return [n.op_type for n in onnx.load_from_string(c.onnx).graph.node]


def test_dropout() -> None:
    def f(x: Tensor) -> Tensor:
        a = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return F.dropout(a, 0.1) + F.dropout(a, 0.2, False) + F.dropout2d(a, 0.4)

    c = capture(Fn(f), (r(2, 3, 5, 7),), {})
    assert nodes(c).count("Dropout") == 2 and not c.host_ops
    attention = next(n for n in onnx.load_from_string(c.onnx).graph.node if n.op_type == "Attention")
    assert {e.key: e.value for e in attention.metadata_props}["f64:dropout_p"] == "0.3"
    m = gpt2(resid_pdrop=0.1)
    assert nodes(capture(m, (), {"input_ids": ids(2, 5)})).count("Dropout") == 4
    assert "Dropout" not in nodes(capture(m.eval(), (), {"input_ids": ids(2, 5)}))


def test_random_operator_is_kept() -> None:
    c = capture(Fn(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.rand(7)), (r(5, 7),), {})
    assert [h.name for h in c.host_ops] == ["aten::bernoulli.default", "aten::rand.default"]


def test_random_fills() -> None:
    c = capture(Fn(lambda x: x * torch.empty_like(x).bernoulli_() + torch.empty_like(x).normal_(1.0, 2.0)), (r(5, 7),), {})
    assert [h.name for h in c.host_ops] == ["aten::bernoulli.p", "aten::normal_functional.default"]


def test_no_grad_capture() -> None:
    with torch.no_grad():
        c = capture(gpt2().eval(), (), {"input_ids": ids(3, 11)})
    assert "StopGradient" not in nodes(c)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert_cls", "encoder", "resnet"])
def test_autocast(name: str) -> None:
    """The file runs with autocast off and has the casts in it."""
    make, batch = MODELS[name]
    torch.manual_seed(23)
    m = make()
    args, kwargs = batch(3, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = capture(m, args, kwargs)
        theirs = tensors_in(copy.deepcopy(m)(*args, **kwargs))
    ours = tensors_in(c.rebuild(Graph(c.onnx, c.host_ops).run(graph_inputs(c, m, args, kwargs))[: c.n_user_outputs]))
    assert any(n == "Cast" for n in nodes(c))
    for a, e in zip(ours, theirs, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a.float(), e.float(), rtol=2e-2, atol=2e-2)


def test_low_precision_constants() -> None:
    x = r(5, 7, grad=False).bfloat16()
    c = capture(Fn(lambda x: x * 0.044715 + 0.1), (x,), {})
    assert torch.equal(Graph(c.onnx).run([x])[0], x * 0.044715 + 0.1)


# --- what stays in PyTorch ------------------------------------------------------------------------


class Doubling(torch.autograd.Function):
    """The forward multiplies by a factor, the backward by seven: only a kept backward can tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * factor, x.sum(1)

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gs: Tensor) -> tuple[Tensor, None]:
        return gy * 7 + gs[:, None], None


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def test_custom_function() -> None:
    c = check(Fn(lambda x: (Doubling.apply(x * 1, 2), NewStyle.apply(x))), (r(5, 7),), dynamic=True, other=((r(3, 2),), {}))
    assert [(h.kind, h.name) for h in c.host_ops] == [("python_op", "Doubling.apply"), ("python_op", "NewStyle.apply")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_inlined(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    lin = nn.Linear(7, 7)

    class M(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.lin = lin
            self.on = on

        def forward(self, x: Tensor) -> Tensor:
            def f(y: Tensor) -> Tensor:
                return torch.tanh(self.lin(y))

            return checkpoint(f, x * 2, use_reentrant=reentrant) if self.on else f(x * 2)

    assert nodes(capture(M(True), (r(5, 7),), {})) == nodes(capture(M(False), (r(5, 7),), {}))


class Branch(nn.Module):
    """Cannot be traced: the way depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.lin(x)
        return self.lin(x) * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Tanh(), Branch()), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_data_dependent_branch() -> None:
    m = Outer()
    with pytest.raises(CaptureError) as e:
        capture(m, (r(5, 7),), {})
    assert e.value.module == "blocks.0.1" and e.value.file.endswith("test_capture.py") and e.value.line > 0
    calls: list[int] = []
    m.blocks[0][1].register_forward_hook(lambda *_: calls.append(1))
    c = capture(m, (r(5, 7),), {}, keep_in_torch=["blocks.0.1"])
    assert [(h.kind, h.name) for h in c.host_ops] == [("module", "blocks.0.1")]
    assert "forward" not in m.blocks[0][1].__dict__
    n = len(calls)
    c = check(m, (r(5, 7),), keep_in_torch=["blocks.0.1"])
    assert len(calls) >= n


def test_result_of_unknown_size_is_an_error() -> None:
    """Inside the graph such sizes are a region (test_coverage.py); what the user gets must have a known one."""
    with pytest.raises(CaptureError, match="size depends on data is returned"):
        capture(Fn(lambda x: x[x > 0] * 2), (r(5, 7),), {})


def test_source_lines() -> None:
    c = capture(gpt2(), (), {"input_ids": ids(2, 5)})
    graph = onnx.load_from_string(c.onnx).graph
    for n in graph.node:
        if n.op_type == "Attention":
            notes = {e.key: e.value for e in n.metadata_props}
            assert notes["module"].startswith("transformer.h.") and notes["file"].endswith("modeling_gpt2.py") and int(notes["line"]) > 0


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [n for n in ONE if n not in ("host", "attention_mask")])
def test_engine_agrees(name: str, dynamic: bool) -> None:
    """The engine's interpreter on the captured file: outputs and gradients at 1e-10 of PyTorch's."""
    engine = pytest.importorskip("engine", exc_type=OSError)
    f, args = ONE[name]
    args = double(args)
    c = capture(Fn(f), args, {}, dynamic=dynamic)
    if c.host_ops:
        return
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in graph_inputs(c, nn.Module(), args, {})]
    want = Graph(c.onnx).run(inputs)
    seeds = [torch.randn(t.shape, dtype=t.dtype) if t.requires_grad else None for t in want]
    leaves = [t for t in inputs if t.requires_grad]
    pairs = [(t, s) for t, s in zip(want, seeds, strict=True) if s is not None]
    grads = torch.autograd.grad([t for t, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True) if pairs else []
    wanted = [int(t.requires_grad) for t in inputs] if pairs else None
    outs, ours = engine.run_onnx(c.onnx, [t.detach().contiguous() for t in inputs], wanted=wanted, dys=seeds if pairs else None)
    for a, e in zip(outs, want, strict=True):
        torch.testing.assert_close(a, e.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)
    for a, e in zip(ours, grads, strict=True):
        if a is None or e is None:
            assert (a is None or not a.any()) and (e is None or not e.any())
        else:
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)
