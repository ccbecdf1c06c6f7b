"""Every operator that the capture knows, in a function of its own (the judges: tests/captured.py; and the engine's
interpreter)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import Fn, b, check, double, graph_inputs, k, r, u, wide
from onnx_torch import Graph
from torch import Tensor, nn

from ortmodule.capture import capture
from ortmodule.capture.elementwise import PLAIN

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
        lambda x: (x.cummax(1).values, x.renorm(2, 0, 1.0), torch.erfinv(x / 9)),
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
def test_operator_is_captured(name: str) -> None:
    f, args = ONE[name]
    ort = name not in ("pools",)
    c = check(Fn(f), args, ort=ort)
    assert bool(c.host_ops) == (name == "host"), [h.name for h in c.host_ops]


def test_hardsigmoid() -> None:
    check(Fn(F.hardsigmoid), (wide(5, 7),))


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [n for n in ONE if n not in ("host", "attention_mask")])
def test_the_engine_computes_what_was_captured(name: str, dynamic: bool) -> None:
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
