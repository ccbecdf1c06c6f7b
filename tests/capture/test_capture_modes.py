"""Captures under autocast and without gradients, random numbers, low precision."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
import torch.nn.functional as F
from captured import Fn, graph_inputs, nodes, r, tensors_in
from captured_models import MODELS, gpt2, ids
from onnx_torch import Graph
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import capture


def test_dropout_is_captured_where_it_drops() -> None:
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


def test_random_operators_stay_in_pytorch() -> None:
    c = capture(Fn(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.rand(7)), (r(5, 7),), {})
    assert [h.name for h in c.host_ops] == ["aten::bernoulli.default", "aten::rand.default"]


def test_random_fills_stay_in_pytorch() -> None:
    c = capture(Fn(lambda x: x * torch.empty_like(x).bernoulli_() + torch.empty_like(x).normal_(1.0, 2.0)), (r(5, 7),), {})
    assert [h.name for h in c.host_ops] == ["aten::bernoulli.p", "aten::normal_functional.default"]


def test_no_grad_leaves_no_trace() -> None:
    with torch.no_grad():
        c = capture(gpt2().eval(), (), {"input_ids": ids(3, 11)})
    assert "StopGradient" not in nodes(c)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert_cls", "encoder", "resnet"])
def test_casts_of_autocast_are_in_the_file(name: str) -> None:
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


def test_constants_round_as_in_eager() -> None:
    x = r(5, 7, grad=False).bfloat16()
    c = capture(Fn(lambda x: x * 0.044715 + 0.1), (x,), {})
    assert torch.equal(Graph(c.onnx).run([x])[0], x * 0.044715 + 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_low_precision_cannot_hold(dtype: torch.dtype) -> None:
    """torch's products take a number, a size and a tensor without dimensions, second, as they are; sums round them."""

    class Mean(nn.Module):
        def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
            sums = x * 2049 + 2049, x * 0 * 70000, x.sum() / x.numel(), x.sum() * x.numel()
            return *sums, x * s, s * x, x / s, x / (s > 0).sum(), torch.addcmul(x, x, x, value=2049)

    m = Mean()
    wrapped = ORTModule(m)
    for n in (5, 70_000, 70_001):
        x = torch.linspace(0.01, 0.03, n).to(dtype).requires_grad_()
        with torch.no_grad():
            x[2:] /= 64
        s = torch.tensor(70_001.0)
        for i in range(9):
            gradients = []
            for f in (m, wrapped):
                y = f(x, s)[i]
                gradients += [y, *torch.autograd.grad(y.sum(), x)]
            torch.testing.assert_close(gradients[2:], gradients[:2], rtol=2**-7, atol=2**-16, equal_nan=True)
    assert "100%" in str(wrapped.report())
