"""The padding pass: layers run on the rows that somebody sees. Text graphs beside eager PyTorch in fp64, one plan for every
share of padding; and graphs in which somebody may see padding, which stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device import steps
from torch import Tensor

import engine

B, T, H, D, CLASSES = 3, 5, 2, 4, 7


def layer(mask: str = "m", attributes: str = "causal=0", end: str = "", before: str = "") -> str:
    """x (s0, 5, 4) -> one layer -> a head of 7 classes -> the loss; mask: of keep (s0, 5), the operand of attention."""
    lines = ["graph {", "  sym s0 = x[0]", f"  input x: f64[s0, {T}, {D}]", f"  input keep: i64[s0, {T}]", f"  input labels: i64[s0, {T}]",
             *(f"  param w{i}: f64[{D}, {D}]" for i in range(6)), f"  param head: f64[{D}, {CLASSES}]",
             "  kept = cast(keep) {to=bool}", f"  m = reshape(kept) {{shape=[s0, 1, 1, {T}]}}", before]  # fmt: skip
    for i, n in enumerate("qkv"):
        lines += [f"  {n}0 = matmul(x, w{i}, _)", f"  {n}1 = reshape({n}0) {{shape=[s0, {T}, {H}, {D // H}]}}", f"  {n} = permute({n}1) {{perm=[0, 2, 1, 3]}}"]
    lines += [f"  a, lse = attention(q, k, v, {mask}) {{scale=0.7, dropout=0.0, {attributes}}}", "  a1 = permute(a) {perm=[0, 2, 1, 3]}",
              f"  a2 = reshape(a1) {{shape=[s0, {T}, {D}]}}", "  o = matmul(a2, w3, _)", "  y = add(o, x)", "  f = matmul(y, w4, _)", "  fg = gelu(f)",
              "  f2 = matmul(fg, w5, _)", "  z = add(f2, y)", "  l = matmul(z, head, _)", f"  l2 = reshape(l) {{shape=[s0*{T}, {CLASSES}]}}",
              f"  y2 = reshape(labels) {{shape=[s0*{T}]}}",
              "  loss, ce, denom = cross_entropy(l2, y2, _) {ignore_index=-100, label_smoothing=0.0, reduction=2}", "  output loss", end]  # fmt: skip
    return "\n".join([*lines, "}"])


def eager(ins: list[Tensor], mask: Tensor | None, causal: bool = False) -> tuple[Tensor, list[Tensor]]:
    """mask: added to scores, or bools whose rows without a key give zeros."""
    x, _, labels, *w = (t.clone().requires_grad_(t.is_floating_point()) for t in ins)
    q, k, v = ((x @ w[i]).view(-1, T, H, D // H).transpose(1, 2) for i in range(3))
    scores = 0.7 * q @ k.transpose(-1, -2)
    blind = torch.zeros(1, dtype=torch.bool)
    if causal:
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        see = mask.expand(scores.shape) & (scores > -torch.inf)
        blind = ~see.any(-1, keepdim=True)
        scores = scores.masked_fill(~(mask | blind), -torch.inf)
    elif mask is not None:
        scores = scores + mask
    p = torch.where(blind, 0.0, torch.softmax(torch.where(blind, 0.0, scores), -1))
    y = (p @ v).transpose(1, 2).reshape(-1, T, D) @ w[3] + x
    z = F.gelu(y @ w[4]) @ w[5] + y
    loss = F.cross_entropy((z @ w[6]).view(-1, CLASSES), labels.view(-1), reduction="sum")
    return loss.detach(), list(torch.autograd.grad(loss, [x, *w]))


def given(lengths: list[int], labels: str = "tokens", left: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(lengths) + 10 * len(lengths))
    n, at = torch.tensor(lengths)[:, None], torch.arange(T)
    keep = at >= T - n if left else at < n
    want = torch.randint(CLASSES, (len(lengths), T), generator=g)
    some = torch.rand(len(lengths), T, generator=g) < 0.4
    want = torch.where({"tokens": keep, "some": keep & some, "anywhere": some}[labels], want, -100)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return [r(len(lengths), T, D), keep.long(), want, *(r(D, D) for _ in range(6)), r(D, CLASSES)]


LENGTHS = [[5, 5, 5], [5, 3, 1], [1, 1, 2], [4], [5, 0, 2], [5, 4, 5, 5, 5, 5]]
LOWEST = -1e9
MASKS: dict[str, dict[str, Any]] = {
    "bools": {},
    "bools, causal": {"attributes": "causal=1"},
    "added": {"mask": "am", "before": "  const low: f64[] = -1e9\n  const zero: f64[] = 0.0\n  am = where(m, zero, low)"},
    "added, hidden where": {"mask": "am", "before": "  const low: f64[] = -1e9\n  const zero: f64[] = 0.0\n  nm = not(m)\n  am = where(nm, low, zero)"},
    "added, computed": {"mask": "am", "before": "  const low: f64[] = 1e9\n  const one: f64[] = 1.0\n  mf = cast(m) {to=f64}\n  m1 = sub(mf, one)\n  am = mul(m1, low)"},
    "added to causal": {"mask": "am", "before": "  const low: f64[] = -1e9\n  const zero: f64[] = 0.0\n  i = iota() {shape=[5], dtype=i64, start=0, step=1}\n"
                        "  iq = reshape(i) {shape=[5, 1]}\n  tri = le(i, iq)\n  both = and(tri, m)\n  am = where(both, zero, low)"},
}  # fmt: skip


def passed(text: str) -> list[str]:
    g = engine.Graph.parse(text).apply("padding", "dce").verify()
    assert engine.Graph.parse(g.text()).verify().text() == g.text()
    return [ln.split(" = ")[1].split("(")[0] for ln in g.text().splitlines() if " = " in ln and "(" in ln and "const" not in ln]


def mask_of(name: str, keep: Tensor) -> Tensor:
    m = keep.bool()[:, None, None, :]
    if name == "added to causal":
        m = m & torch.ones(T, T).tril().bool()
    return m if name.startswith("bools") else torch.where(m, 0.0, LOWEST).double()


@pytest.mark.parametrize("device", ["cpu", "checking"])
@pytest.mark.parametrize("labels", ["tokens", "some", "anywhere"])
@pytest.mark.parametrize("name", list(MASKS))
def test_masks(name: str, labels: str, device: str) -> None:
    """Queries that see no key (samples of padding, padding at the left, labels on padding) are as in eager, too."""
    text = layer(**MASKS[name])
    ops = passed(text)
    assert ops.count("select_rows") == 1 and "restore" in ops, ops
    model = steps.Model.text(steps.cx(device), text)
    for left in (False, True):
        for lengths in LENGTHS:
            ins = given(lengths, labels, left)
            loss, grads = eager(ins, mask_of(name, ins[1]), name == "bools, causal")
            res = model.step(ins, [1, 0, 0] + [1] * 7, [torch.ones((), dtype=torch.float64)])
            what = f"{lengths} {left}"
            torch.testing.assert_close(res.outputs[0], loss, rtol=1e-10, atol=1e-11, msg=what)
            for i, (a, b) in enumerate(zip([res.grads[k] for k in (0, *range(3, 10))], grads, strict=True)):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=f"{what}, gradient {i}")
    model.free()


@pytest.mark.parametrize("labels", ["tokens", "anywhere"])
@pytest.mark.parametrize("name", list(MASKS))
def test_interpreted(name: str, labels: str) -> None:
    """The graph of the pass, node by node."""
    for left in (False, True):
        for lengths in ([4, 2, 1], [5, 0, 2]):
            ins = given(lengths, labels, left)
            loss, grads = eager(ins, mask_of(name, ins[1]), name == "bools, causal")
            g = engine.Graph.parse(layer(**MASKS[name])).apply("padding", "dce")
            got, dxs = engine.run(g, ins, [1, 0, 0] + [1] * 7, [torch.ones((), dtype=torch.float64)])
            torch.testing.assert_close(got[0], loss, rtol=1e-10, atol=1e-11)
            for i, (a, b) in enumerate(zip([d for d in dxs if d is not None], grads, strict=True)):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=f"{lengths} {left}, gradient {i}")


@pytest.mark.parametrize("name", list(MASKS))
def test_bounds_of_keys(name: str) -> None:
    """Where a mask is added, attention has them; forward and backward."""
    text = engine.Graph.parse(layer(**MASKS[name])).apply("padding").grad([1, 0, 0] + [1] * 7, [1]).text()
    calls = [ln.partition("(")[2].partition(")")[0].split(", ") for ln in text.splitlines() if "= attention" in ln]
    has = [c[4:6] if len(c) < 7 else c[7:9] for c in calls]
    assert len(has) == 2 and all((len(h) == 2 and "_" not in h) == name.startswith("added") for h in has), calls


SEEN: dict[str, str] = {
    "the logits are a result": layer(end="  output l"),
    "a hidden state is one": layer(end="  output y"),
    "a mean over positions": layer(end="  mean = reduce_mean(z) {axes=[0, 1, 2]}\n  output mean"),
    "a mask of each query": layer("full", before=f"  full = expand(m) {{shape=[s0, 1, {T}, {T}]}}\n  input other: bool[s0, 1, {T}, {T}]").replace(
        "attention(q, k, v, full)", "attention(q, k, v, other)"),
    "no mask": layer("_"),
    "an added mask beside a causal attribute": layer(**{**MASKS["added"], "attributes": "causal=1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SEEN))
def test_seen(name: str) -> None:
    """All rows are computed."""
    text = SEEN[name]
    if "input other" in text:  # inputs stand in front
        line = next(ln for ln in text.splitlines() if "input other" in ln)
        text = text.replace(line, "").replace("  input labels", f"{line}\n  input labels")
    assert "select_rows" not in passed(text)


def test_up_to_the_last_label() -> None:
    """Causal, with a mask: rows behind a sample's last label are left out, too."""
    text = layer(attributes="causal=1")
    g = engine.Graph.parse(text).apply("padding").verify()
    assert "reduce_max" in g.text()
