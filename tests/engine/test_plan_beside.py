"""Gradients of queries, keys and values that one product has made are computed where their concat would put them
(csrc/run/plan_beside.c): no copies, the interpreter's bits."""

from __future__ import annotations

import pytest
import torch
from device import steps

import engine

_C = pytest.importorskip("ortmodule._C")

TEXT = """graph {{
  input x: {dtype}[2, 6, {width}]
  param w: {dtype}[{width}, {all}]
  m = matmul(x, w)
  q0 = slice(m) {{axis=2, start=[0], end=[{width}], step=1}}
  k0 = slice(m) {{axis=2, start=[{width}], end=[{two}], step=1}}
  v0 = slice(m) {{axis=2, start=[{two}], end=[{all}], step=1}}
  q1 = reshape(q0) {{shape=[2, 6, 2, {head}]}}
  k1 = reshape(k0) {{shape=[2, 6, 2, {head}]}}
  v1 = reshape(v0) {{shape=[2, 6, 2, {head}]}}
  q = permute(q1) {{perm=[0, 2, 1, 3]}}
  k = permute(k1) {{perm=[0, 2, 1, 3]}}
  v = permute(v1) {{perm=[0, 2, 1, 3]}}
  y, lse = attention(q, k, v) {{scale=0.5, dropout=0.2, causal=1, seq_first=1}} rng=3
  {more}
  output y
}}"""


def text_of(more: str, head: int, dtype: str = "f32") -> str:
    return TEXT.format(more=more, head=head, width=2 * head, two=4 * head, all=6 * head, dtype=dtype)


def tensors(text: str, head: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(head)
    ins = [torch.randn(s, generator=g).to(dtype) for s in ((2, 6, 2 * head), (2 * head, 6 * head))]
    outs = 1 + text.count("output z")
    return ins, [torch.randn(2, 6, 2, head, generator=g).to(dtype) for _ in range(outs)]


def operators(text: str, ins: list[torch.Tensor], dys: list[torch.Tensor]) -> list[tuple[str, str]]:
    """Kinds and operators of the calls of a step."""
    model = _C.Model.from_text(text)
    model.profile(True)
    v = model.variant(bytes([1, 1]), bytes([1] * len(dys)), None)
    info = model.variant_info(v)
    run = model.forward(v, ins, 5)
    assert run.resume() is None
    outs, (state, arena) = run.outputs(), run.state()
    back = state.backward(arena, [t if i in info["reads_inputs"] else None for i, t in enumerate(ins)],
                          [o if i in info["reads_outputs"] else None for i, o in enumerate(outs)], dys)  # fmt: skip
    for s in range(info["segments"]):
        assert back.resume(s) is None
    (plan,) = model.profile_calls()
    return [(c["kind"], c["op"]) for c in plan["calls"]]


@pytest.mark.parametrize("head", [4, 5, 64])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_gradients_lie_side_by_side(head: int, dtype: str) -> None:
    text = text_of("", head, dtype)
    ins, dys = tensors(text, head, {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}[dtype])
    calls = operators(text, ins, dys)
    assert ("run", "attention_grad") in calls and all(op != "concat" and kind == "run" for kind, op in calls), calls
    want, got = engine.run(text, ins, [1, 1], dys, 5), steps.run(text, ins, [1, 1], dys, 5, "cpu")
    for a, b in zip([*want[0], *want[1]], [*got[0], *got[1]], strict=True):
        assert steps.same(a, b)


def test_what_others_read_too_is_copied() -> None:
    """The gradient of the keys is a sum of two: its concat is a call."""
    text = text_of("z = tanh(k1)\n  output z", 4)
    ins, dys = tensors(text, 4, torch.float32)
    assert ("run", "concat") in operators(text, ins, dys)
    want, got = engine.run(text, ins, [1, 1], dys, 5), steps.run(text, ins, [1, 1], dys, 5, "cpu")
    for a, b in zip([*want[0], *want[1]], [*got[0], *got[1]], strict=True):
        assert steps.same(a, b)


def test_a_gradient_that_is_handed_out_as_it_is() -> None:
    """The concat is a gradient itself: computed straight into its block."""
    text = text_of("", 4).replace("  param w: f32[8, 24]\n  m = matmul(x, w)\n", "").replace("x: f32[2, 6, 8]", "m: f32[2, 6, 24]")
    ins, dys = [torch.randn(2, 6, 24)], [torch.randn(2, 6, 2, 4)]
    want, got = engine.run(text, ins, [1], dys, 5), steps.run(text, ins, [1], dys, 5, "cpu")
    for a, b in zip([*want[0], *want[1]], [*got[0], *got[1]], strict=True):
        assert steps.same(a, b)
