"""cross_entropy and its gradient over rows that only the data counts: what they add up past the count, what is refused,
what kernels leave out."""

from __future__ import annotations

import pytest
import torch
from device import steps

import engine

HEAD = ["  sym s0 = x[0]", "  input x: f64[s0, 6]", "  input labels: i64[s0]", "  input other: i64[s0]", "  param w: f64[6, 6]", "  const k: i64[] = -100",
        "  mask = ne(labels, k)", "  idx, count = select_rows(mask) {count=[c0]}", "  r = compress(x, idx, count)", "  h = matmul(r, w, _)"]  # fmt: skip


def parse(body: str, *outs: str) -> engine.Graph:
    return engine.Graph.parse("\n".join(["graph {", *HEAD, body, *(f"  output {o}" for o in outs), "}"]))


LABELS = "  y = compress(labels, idx, count) {past=-100}\n"
REFUSED = {
    "labels that go on": ("  y = compress(labels, idx, count)\n  l, e, d = cross_entropy(h, y, _) {reduction=1}",
                          "cross_entropy with bounded size c0: past the count its labels are not ignore_index"),
    "another ignore_index": (LABELS + "  l, e, d = cross_entropy(h, y, _) {ignore_index=-1, reduction=1}",
                             "cross_entropy with bounded size c0: past the count its labels are not ignore_index"),
    "labels of all rows": ("  l, e, d = cross_entropy(h, labels, _) {reduction=1}", "logits and labels need the same bounded rows"),
    "bounded classes": (LABELS + "  p = permute(h) {perm=[1, 0]}\n  six = iota() {shape=[6], dtype=i64}\n  l, e, d = cross_entropy(p, six, _) {reduction=1}",
                        "logits and labels need the same bounded rows"),
    "rows of rows": (LABELS + "  l, e, d = cross_entropy(h, y, _) {ignore_index=-100, reduction=1}\n  u = reduce_sum(l) {axes=[]}\n"
                     "  g = cross_entropy_grad(u, h, y, _, e, d, idx, count) {ignore_index=-100, reduction=1}", "cross_entropy_grad"),
    "floats past": ("  y = compress(x, idx, count) {past=-100}", "compress: past is for i64 and i32, x is f64"),
    "more than all": ("  i2, c2 = select_rows(mask) {count=[c1], most=2}", "select_rows: most is 2; 0 to 1 is allowed"),
    "no idx": ("  l, e, d = cross_entropy(x, labels, _) {reduction=1}\n  g = cross_entropy_grad(l, x, labels, _, e, d, idx) {reduction=1}",
               "cross_entropy_grad of some rows needs idx and count, and a reduction"),
    "a gradient each": ("  l, e, d = cross_entropy(x, labels, _) {reduction=0}\n  g = cross_entropy_grad(l, x, labels, _, e, d, idx, count) {reduction=0}",
                        "cross_entropy_grad of some rows needs idx and count, and a reduction"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(engine.EngineError, match=message.replace("*", r"\*")):
        parse(body)


@pytest.mark.parametrize("most", [0.0, 0.4, 1.0])
def test_all_rows_when_most_count(most: float) -> None:
    g = engine.Graph.parse("\n".join(["graph {", "  sym s0 = m[0]", "  input m: bool[s0]", "  input x: f64[s0]",
                                      f"  idx, count = select_rows(m) {{count=[c0], most={most}}}", "  r = compress(x, idx, count)",
                                      "  z = restore(r, idx, count) {shape=[s0]}", "  output z", "  output count", "}"])).verify()  # fmt: skip
    for share in ([], [0], [1], [1, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1], [1, 1, 1]):
        m = torch.tensor(share, dtype=torch.bool)
        x = torch.arange(1.0, len(share) + 1, dtype=torch.float64)
        z, count = g.run([m, x], 2)
        everything = sum(share) > most * len(share)
        assert count == (len(share) if everything else sum(share)) and torch.equal(z, x if everything else x * m)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("dtype", ["i64", "i32"])
def test_a_row_past_the_count_adds_nothing(dtype: str, drop: bool) -> None:
    """Forward and gradient of a head on some rows, with sums over rows and a transposed product; then nobody may see
    what lies past the count: dead memory is 0xff on the checking device."""
    body = LABELS + "  l, e, d = cross_entropy(h, y, _) {ignore_index=-100, label_smoothing=0.1, reduction=1}"
    text = "\n".join(["graph {", *HEAD, body, "  output l", "}"]).replace("i64[", f"{dtype}[").replace("f64[6, 6]", "f64[6, 6]")
    for device in ("cpu", "checking"):
        model = steps.Model.text(steps.cx(device), text)
        for labels in ([-100, 2, -100, 5, 0], [-100] * 5, [1, 2, 3, 4, 5], [4]):
            y = torch.tensor(labels, dtype=torch.int64 if dtype == "i64" else torch.int32)
            g = torch.Generator().manual_seed(len(labels))
            x, w = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((len(labels), 6), (6, 6)))
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1], y.long(), label_smoothing=0.1)
            want = torch.autograd.grad(loss, leaves)
            step = model.step([x, y, y, w], [1, 0, 0, 1], [torch.ones((), dtype=torch.float64)], drop=drop)
            assert torch.allclose(step.outputs[0], loss.detach(), rtol=1e-12, equal_nan=True)
            assert all(torch.allclose(step.grads[i], e, rtol=1e-9, atol=1e-13, equal_nan=True) for i, e in zip((0, 3), want))
        model.free()
