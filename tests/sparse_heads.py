"""Heads over rows of labels, in text and in eager PyTorch: what the passes about ignored labels are tested with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from device import steps
from torch import Tensor

ROWS, INNER, DIM, CLASSES = 7, 3, 5, 300
WANTED = [1, 0, 1, 1, 1]


@dataclass(frozen=True)
class Head:
    """x (s0, 3, 5) -> logits -> loss of labels (s0, 3)."""

    dtype: str = "f64"  # of x, w, b; narrower than f32: the logits are cast before the loss
    labels: str = "i64"
    reduction: int = 1
    ignore: int = -100
    smoothing: float = 0.0
    weight: bool = False
    bias: bool = True
    scale: float = 1.0
    plain: bool = False  # w (dim, classes), no transposed view
    logits: bool = False  # are a result, too
    used: bool = False  # and read by a second one

    def text(self) -> str:
        d, wide = self.dtype, "f32" if self.dtype in ("bf16", "f16") else self.dtype
        w = f"{DIM}, {CLASSES}" if self.plain else f"{CLASSES}, {DIM}"
        lines = ["graph {", "  sym s0 = x[0]", f"  input x: {d}[s0, {INNER}, {DIM}]", f"  input labels: {self.labels}[s0, {INNER}]",
                 f"  param w: {d}[{w}]", f"  param b: {d}[{CLASSES}]", f"  param cw: {wide}[{CLASSES}]"]  # fmt: skip
        lines += ["  t = w" if self.plain else "  t = permute(w) {perm=[1, 0]}"][: not self.plain]
        lines.append(f"  l = matmul(x, {'w' if self.plain else 't'}, {'b' if self.bias else '_'})")
        last = "l"
        if self.scale != 1:
            lines += [f"  const k: {d}[] = {self.scale}", "  m = mul(l, k)"]
            last = "m"
        if wide != d:
            lines.append(f"  wide = cast({last}) {{to={wide}}}")
            last = "wide"
        lines += [f"  f = reshape({last}) {{shape=[s0*{INNER}, {CLASSES}]}}", f"  y = reshape(labels) {{shape=[s0*{INNER}]}}",
                  f"  loss, lse, denom = cross_entropy(f, y, {'cw' if self.weight else '_'}) {{ignore_index={self.ignore}, "
                  f"label_smoothing={self.smoothing}, reduction={self.reduction}}}", "  output loss"]  # fmt: skip
        if self.logits:
            lines.append(f"  output {'m' if self.scale != 1 else 'l'}")
        if self.used:
            lines += ["  z = reduce_sum(l) {axes=[0, 1, 2]}", "  output z"]
        return "\n".join([*lines, "}"])

    def given(self, density: float, rows: int = ROWS, seed: int = 0) -> list[Tensor]:
        """x, labels of which that share counts, w, b, cw."""
        g = torch.Generator().manual_seed(seed + 1000 * rows)
        dtype = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[self.dtype]
        wide = torch.float32 if self.dtype in ("bf16", "f16") else dtype
        labels = torch.randint(CLASSES, (rows, INNER), generator=g)
        labels = torch.where(labels == self.ignore, self.ignore + 1, labels)
        labels = torch.where(torch.rand(rows, INNER, generator=g) < density, labels, self.ignore)
        w = torch.randn(CLASSES, DIM, generator=g, dtype=torch.float64).to(dtype)
        return [torch.randn(rows, INNER, DIM, generator=g, dtype=torch.float64).to(dtype),
                labels.to(torch.int32 if self.labels == "i32" else torch.int64), w.t().contiguous() if self.plain else w,
                torch.randn(CLASSES, generator=g, dtype=torch.float64).to(dtype),
                torch.rand(CLASSES, generator=g, dtype=torch.float64).to(wide)]  # fmt: skip

    def eager(self, given: list[Tensor], double: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and gradients of x, w, b, from the loss (and from the sum, where there is one). double: in fp64."""
        to = (lambda t: t.double() if t.is_floating_point() else t) if double else (lambda t: t)
        x, labels, w, b, cw = (to(t).clone().requires_grad_(t.is_floating_point()) for t in given)
        logits = x @ (w if self.plain else w.t())
        logits = logits + b if self.bias else logits
        total = logits.sum()
        logits = logits * self.scale if self.scale != 1 else logits
        wide = logits if double else logits.float() if self.dtype in ("bf16", "f16") else logits
        loss = F.cross_entropy(wide.reshape(-1, CLASSES), labels.reshape(-1).long(), cw.detach() if self.weight else None,
                               ignore_index=self.ignore, label_smoothing=self.smoothing, reduction=["none", "mean", "sum"][self.reduction])  # fmt: skip
        outs = [loss, *([logits] * self.logits), *([total] * self.used)]
        grads = torch.autograd.grad([loss, *([total] * self.used)], [x, w, b], allow_unused=True)
        return [o.detach() for o in outs], [torch.zeros_like(t) if g is None else g for t, g in zip((x, w, b), grads)]

    def step(self, model: steps.Model, given: list[Tensor], **kw: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The same of the engine; only the loss has a gradient (and the sum)."""
        wide = torch.float32 if self.dtype in ("bf16", "f16") else given[0].dtype
        dys = [torch.ones((), dtype=wide), *([None] * self.logits), *([torch.ones((), dtype=given[0].dtype)] * self.used)]
        res = model.step(given, [1, 0, 1, int(self.bias), 0], dys, **kw)
        return res.outputs, [res.grads[i] if i in res.grads else torch.zeros_like(given[i]) for i in (0, 2, 3)]


HEADS: dict[str, Head] = {
    "linear": Head(),
    "no bias": Head(bias=False),
    "no transposed view": Head(plain=True),
    "sum": Head(reduction=2),
    "class weights": Head(weight=True),
    "class weights, sum, smoothing": Head(weight=True, smoothing=0.3, reduction=2),
    "label smoothing": Head(smoothing=0.1),
    "another ignore_index": Head(ignore=0),
    "labels of 32 bits": Head(labels="i32"),
    "a scale": Head(scale=0.25),
    "f32": Head(dtype="f32"),
    "bf16 logits, f32 loss": Head(dtype="bf16"),
    "f16 logits, f32 loss, a scale": Head(dtype="f16", scale=0.5),
}
DENSITIES = [0.0, 0.15, 0.5, 0.85, 1.0]


def close(got: Tensor, want: Tensor, exact: Tensor, unit: float, what: str) -> None:
    """As near to `exact` (fp64) as eager is, or nearer, or as roundings of the logits (`unit` each); fp64 itself to rounding."""
    if want.dtype == torch.float64:
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12, equal_nan=True), f"{what}: {(got - want).abs().max()}"
        return
    assert torch.equal(got.isnan(), want.isnan()), what
    size = exact.abs().nan_to_num().max().item() if exact.numel() else 0.0
    error, eager = ((t.double() - exact).abs().nan_to_num().max().item() if t.numel() else 0.0 for t in (got, want))
    assert error <= 2 * eager + unit * size, f"{what}: {error:.2e}, eager {eager:.2e}"


def compare(head: Head, model: steps.Model, given: list[Tensor], what: str, **kw: Any) -> tuple[list[Tensor], list[Tensor]]:
    want, exact = head.eager(given), head.eager(given, double=True)
    got = head.step(model, given, **kw)
    for kind, a, b, c in zip(("result", "gradient"), got, want, exact):
        for i, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
            close(x, y, z, torch.finfo(given[0].dtype).eps, f"{what}, {kind} {i}")
    return got
