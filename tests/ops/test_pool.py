"""Pooling and its gradients against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


CASES = [
    # shape, kernel, stride, pad, dilation
    ((2, 3, 7, 11), (3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 3, 8, 12), (2, 2), (2, 2), (0, 0), (1, 1)),
    ((2, 3, 13, 11), (3, 2), (1, 3), (1, 0), (2, 3)),
    ((3, 7, 10), (4, 5), (3, 2), (2, 2), (1, 1)),
    ((2, 3, 29), (3,), (2,), (1,), (1,)),
    ((2, 3, 5, 7, 6), (2, 3, 2), (2, 1, 3), (1, 1, 0), (1, 1, 1)),
    ((2, 3, 1, 5), (1, 2), (1, 2), (0, 1), (1, 1)),
    ((0, 3, 7, 7), (3, 3), (2, 2), (1, 1), (1, 1)),
    ((1, 1, 6, 6), (3, 3), (4, 4), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_max_pool(case: tuple, ceil: bool) -> None:
    shape, k, s, p, d = case
    if shape[0] == 0:

        def ref(x):
            return (MAX[len(k)](x, k, s, p, d, ceil), torch.empty(MAX[len(k)](x, k, s, p, d, ceil).shape, dtype=torch.int64))
    else:

        def ref(x):
            return MAX[len(k)](x, k, s, p, d, ceil, return_indices=True)

    check(
        "max_pool", [rand(*shape)], ref, f"kernel={list(k)}, stride={list(s)}, pad={list(p)}, dilation={list(d)}, ceil={int(ceil)}", n_out=2, low=LOW
    )


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if all(x == 1 for x in c[4])])
def test_avg_pool(case: tuple, ceil: bool, include: bool) -> None:
    shape, k, s, p, _ = case
    check(
        "avg_pool",
        [rand(*shape)],
        lambda x: AVG[len(k)](x, k, s, p, ceil, include),
        f"kernel={list(k)}, stride={list(s)}, pad={list(p)}, ceil={int(ceil)}, count_include_pad={int(include)}",
        low=LOW if len(k) < 3 else LOW[:1],
    )  # torch has no avg_pool3d in bf16


@pytest.mark.parametrize(
    "shape,size",
    [
        ((2, 3, 7, 11), (1, 1)),
        ((2, 3, 7, 11), (3, 4)),
        ((2, 3, 7, 11), (7, 11)),
        ((2, 3, 3, 2), (7, 5)),
        ((3, 29), (4,)),
        ((2, 3, 5, 7, 6), (2, 3, 5)),
        ((0, 3, 7, 7), (2, 2)),
    ],
)
def test_adaptive_avg_pool(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    check("adaptive_avg_pool", [rand(*shape)], lambda x: ADAPTIVE[len(size)](x, size), f"size={list(size)}", low=LOW)


def test_ties_and_nan() -> None:
    """Of equal maxima the first gets the gradient; NaN wins."""
    x = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    x[0, 0, 4, 4] = float("nan")
    x[0, 0, :2] = float("-inf")
    check("max_pool", [x], lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), "kernel=[3, 3], stride=[2, 2], pad=[1, 1]", n_out=2)


@pytest.mark.parametrize(
    "node,words",
    [
        ("max_pool(x) {kernel=[9, 9]}", ["larger than the padded input"]),
        ("max_pool(x) {kernel=[2, 2], pad=[2, 1]}", ["pad 2", "half"]),
        ("max_pool(x) {kernel=[2, 2], stride=[0, 1]}", ["stride 0"]),
        ("max_pool(x) {kernel=[2147483649, 2147483649], pad=[1073741824, 1073741824]}", ["2147483649", "2^31"]),
        ("max_pool(x) {kernel=[4194304, 4194304], pad=[2097152, 2097152]}", ["4194304", "2^31"]),
        ("max_pool(x)", ["kernel"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    with pytest.raises(engine.EngineError) as e:
        engine.run(f"graph {{\n input x: f64[2, 3, 7, 5]\n y, i = {node}\n output y\n}}", [rand(2, 3, 7, 5)])
    assert all(w in str(e.value) for w in words), str(e.value)
