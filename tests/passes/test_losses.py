"""The losses pass: a cross-entropy of logits in half precision that were cast for it reads them as they are. The bits of
loss and gradients stay."""

from __future__ import annotations

import pytest
import torch

import engine
from opcheck import rand

TEXT = """graph {{
  input h: {half}[6, 7]
  param w: {half}[7, 13]
  input y: i64[6]
  input c: f32[13]
  x = matmul(h, w, _)
  {between}
  loss, lse, denom = cross_entropy({of}, y{weight}) {{{how}}}
  output loss{more}
}}"""
VIEWS = {
    "none": ("f = cast(x) {to=1}", "f"),
    "reshape": ("a = reshape(x) {shape=[2, 3, 13]}\n b = cast(a) {to=1}\n f = reshape(b) {shape=[6, 13]}", "f"),
    "slice": ("b = cast(x) {to=1}\n d = reshape(b) {shape=[1, 6, 13]}\n f = reshape(d) {shape=[6, 13]}", "f"),
}


def both(text: str, ins: list[torch.Tensor], n_out: int) -> tuple[engine.Graph, list[list[torch.Tensor]]]:
    got = []
    for passes in ((), ("losses", "dce")):
        g = engine.Graph.parse(text).apply(*passes).verify()
        forward = g.text()
        got.append(g.grad([1, 1, 0, 0], [1] * n_out).apply("simplify", "dce").run(ins, n_out + 2, 3))
    return forward, got  # type: ignore[return-value]


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("how", ["reduction=1", "reduction=2, label_smoothing=0.1", "reduction=0, ignore_index=3"])
@pytest.mark.parametrize("weight", ["", ", c"])
def test_bits_stay(half: str, views: str, how: str, weight: str) -> None:
    between, of = VIEWS[views]
    text = TEXT.format(half=half, between=between, of=of, weight=weight, how=how, more="")
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[half]
    y = torch.tensor([0, 3, 12, 5, 3, 1])
    dy = rand(6) if "reduction=0" in how else torch.tensor(0.7)
    ins = [rand(6, 7).to(dtype), rand(7, 13).to(dtype), y, rand(13).abs().float(), dy.float()]
    text_after, (want, got) = both(text, ins, 1)
    assert "wide=1" in str(text_after) and "cast(" not in str(text_after)
    assert want[0].dtype == got[0].dtype == torch.float32
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def test_a_copy_that_others_read_stays() -> None:
    for more in ("\n  output f", "\n  z = sin(f)\n  output z"):
        text = TEXT.format(half="bf16", between=VIEWS["none"][0], of="f", weight="", how="reduction=1", more=more)
        ins = [rand(6, 7).bfloat16(), rand(7, 13).bfloat16(), torch.tensor([0, 3, 12, 5, 3, 1]), rand(13).float(),
               torch.tensor(0.7), rand(6, 13).float()]  # fmt: skip
        after, (want, got) = both(text, ins, 2)
        assert "wide" not in str(after)
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b)


def test_against_pytorch() -> None:
    text = TEXT.format(half="bf16", between=VIEWS["reshape"][0], of="f", weight="", how="reduction=1", more="")
    h, w, y = rand(6, 7).bfloat16(), rand(7, 13).bfloat16(), torch.tensor([0, 3, 12, 5, 3, 1])
    g = engine.Graph.parse(text).apply("losses", "dce").grad([1, 1, 0, 0], [1])
    loss, dh, dw = g.run([h, w, y, rand(13).float(), torch.tensor(1.0)], 3, 3)
    hr, wr = h.double().requires_grad_(), w.double().requires_grad_()
    x = (hr.detach() @ wr.detach()).bfloat16().double()  # rounded where the engine rounds
    logits = hr @ wr
    want = torch.nn.functional.cross_entropy(logits + (x - logits).detach(), y)
    want.backward()
    assert abs(loss.double() - want) < 1e-6
    assert torch.allclose(dh.double(), hr.grad, rtol=0.02, atol=1e-2) and torch.allclose(dw.double(), wr.grad, rtol=0.02, atol=1e-2)  # type: ignore[arg-type]
