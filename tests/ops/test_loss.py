"""cross_entropy and its gradient against torch.nn.functional.cross_entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
RED = {"none": 0, "mean": 1, "sum": 2}


def labels(n: int, c: int, ignored: float = 0.3, ignore: int = -100) -> torch.Tensor:
    gen = torch.Generator().manual_seed(n)
    y = torch.randint(c, (n,), generator=gen)
    y[torch.rand(n, generator=gen) < ignored] = ignore
    return y


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("n,c", [(7, 11), (1, 1), (5, 1301), (67, 3)])
def test_cross_entropy(n: int, c: int, reduction: str, weighted: bool, smoothing: float) -> None:
    y = labels(n, c)
    y[0] = c - 1
    w = torch.rand(c, dtype=torch.float64, generator=torch.Generator().manual_seed(c)) + 0.1 if weighted else None

    def ref(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        return F.cross_entropy(x, y, w, reduction=reduction, label_smoothing=smoothing)

    check(
        "cross_entropy",
        [rand(n, c) * 3, y, w],
        ref,
        f"ignore_index=-100, label_smoothing={smoothing}, reduction={RED[reduction]}",
        n_out=3,
        n_check=1,
        grad=[True, False, False],
        low=LOW,
    )


def test_large_vocabulary() -> None:
    """As wide as GPT-2's, with large and -inf logits; ignore_index inside the range; 32-bit labels."""
    x = rand(3, 50257) * 10
    x[0, 5] = 900
    x[1, 100:50000] = float("-inf")
    y = torch.tensor([5, 50256, 9])
    at = "ignore_index=9, label_smoothing=0.0, reduction=1"
    check("cross_entropy", [x, y], lambda x, y: F.cross_entropy(x, y, ignore_index=9), at, n_out=3, n_check=1)
    check("cross_entropy", [x, y.int()], lambda x, y: F.cross_entropy(x, y.long(), ignore_index=9), at, n_out=3, n_check=1)


def test_outputs_for_backward() -> None:
    x, y = rand(7, 11), labels(7, 11, 0)
    (_, lse, denom), _ = engine.run(
        "graph {\n input x: f64[7, 11]\n input y: i64[7]\n a, b, c = cross_entropy(x, y) {reduction=1}\n output a\n output b\n output c\n}", [x, y]
    )
    assert torch.allclose(lse, torch.logsumexp(x, 1), rtol=1e-13)
    assert denom.item() == 7


@pytest.mark.parametrize("case", ["all ignored", "empty", "row of -inf", "nan", "inf"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_special(case: str, smoothing: float, dtype: torch.dtype) -> None:
    x, y = rand(5, 700).to(dtype), labels(5, 700, 0)
    if case == "all ignored":
        y[:] = -100
    elif case == "empty":
        x, y = x[:0], y[:0]
    elif case == "row of -inf":
        x[2] = float("-inf")
    elif case == "nan":
        x[2, 650] = float("nan")
    else:
        x[2, 3] = float("inf")
    xr = x.clone().requires_grad_()
    want = F.cross_entropy(xr, y, label_smoothing=smoothing)
    (dx,) = torch.autograd.grad(want, xr, torch.tensor(1.5, dtype=dtype))
    name = engine.NAMES[engine.TORCH.index(dtype)]
    text = (
        f"graph {{\n input x: {name}[{x.shape[0]}, 700]\n input y: i64[{x.shape[0]}]\n"
        f" a, b, c = cross_entropy(x, y) {{label_smoothing={smoothing}, reduction=1}}\n output a\n}}"
    )
    (got,), (gx,) = engine.run(text, [x, y], [1, 0], [torch.tensor(1.5, dtype=dtype)])
    torch.testing.assert_close(got, want.detach(), equal_nan=True, rtol=1e-6, atol=0)
    torch.testing.assert_close(gx, dx, equal_nan=True, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("bad", [11, -1, 2**40])
def test_label_out_of_range(bad: int) -> None:
    y = labels(7, 11, 0)
    y[4] = bad
    with pytest.raises(engine.EngineError) as e:
        engine.run("graph {\n input x: f64[7, 11]\n input y: i64[7]\n a, b, c = cross_entropy(x, y) {reduction=1}\n output a\n}", [rand(7, 11), y])
    for word in ("cross_entropy", f"label {bad} ", "row 4", "0 to 10", "ignore_index -100"):
        assert word in str(e.value), str(e.value)


@pytest.mark.parametrize(
    "node,words",
    [
        ("cross_entropy(x, x)", ["labels", "f64"]),
        ("cross_entropy(y, y)", ["logits", "i64"]),
        ("cross_entropy(x, z)", ["5 labels", "7 rows"]),
        ("cross_entropy(x, y) {label_smoothing=1.5}", ["label_smoothing", "1.5"]),
        ("cross_entropy(x, y) {reduction=3}", ["reduction is 3"]),
        ("cross_entropy(x, y, v)", ["weight"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = f"graph {{\n input x: f64[7, 11]\n input y: i64[7]\n input z: i64[5]\n input v: f64[3]\n a, b, c = {node}\n output a\n}}"
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(7, 11), labels(7, 11), labels(5, 11), rand(3)])
    assert all(w in str(e.value) for w in words), str(e.value)
