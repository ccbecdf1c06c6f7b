"""topk and sort against eager PyTorch: order, indices of ties, NaN, gradients."""

from __future__ import annotations

import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


def sort(axis: int, k: int, largest: bool):
    """torch's stable sort, cut: the order of ties that topk leaves open is its."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v, i = torch.sort(x, dim=axis, descending=largest, stable=True)
        return v.narrow(axis, 0, k), i.narrow(axis, 0, k)

    return f


CASES = [
    # shape, axis, k
    ((7, 11), 1, 11),
    ((7, 11), 0, 7),
    ((5, 13, 3), 1, 4),
    ((64, 8), 1, 2),  # routing to experts
    ((3, 101), 1, 101),  # several runs
    ((3, 101), 1, 5),  # a heap
    ((200,), 0, 1),
    ((3, 5), 1, 0),
    ((0, 5), 1, 3),
    ((1, 1), 1, 1),
]


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("shape,axis,k", CASES)
def test_topk(shape: tuple, axis: int, k: int, largest: bool) -> None:
    attrs = f"axis={axis}, k=[{k}], largest={int(largest)}"
    check("topk", [rand(*shape)], sort(axis, k, largest), attrs, n_out=2, low=LOW)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", [3, 64])
def test_ties_nan_and_zeros(k: int, largest: bool) -> None:
    x = torch.tensor([0.0, -0.0, 1, NAN, -INF, INF, 1, -1, 0, NAN, -0.0, 2, -1, 1, INF, -INF] * 4, dtype=torch.float64)
    attrs = f"axis=0, k=[{k}], largest={int(largest)}"
    for dtype in (torch.float64, *LOW):
        v, i = sort(0, k, largest)(x.to(dtype))
        text = f"graph {{\n input x: {engine.NAMES[engine.TORCH.index(dtype)]}[64]\n v, i = topk(x) {{{attrs}}}\n output v\n output i\n}}"
        (a, b), _ = engine.run(text, [x.to(dtype)])
        assert torch.equal(b, i)
        assert torch.equal(a.nan_to_num(7), v.nan_to_num(7)) and torch.equal(a.signbit() & ~a.isnan(), v.signbit() & ~v.isnan())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_integers(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    low, high = (0, 2) if dtype == torch.bool else (0, 200) if dtype == torch.uint8 else (-100, 100)
    x = torch.randint(low, high, (5, 300), generator=g).to(dtype)
    if dtype == torch.int64:
        x[0, :2] = torch.tensor([-(2**63), 2**63 - 1])
    for k in (4, 300):
        for largest in (False, True):
            check("topk", [x], sort(1, k, largest), f"axis=1, k=[{k}], largest={int(largest)}", n_out=2)


def test_values_are_torch_topks() -> None:
    check("topk", [rand(9, 77)], lambda x: x.topk(6, 1), "axis=1, k=[6]", n_out=2)
    check("topk", [rand(9, 77)], lambda x: x.topk(6, 1, largest=False), "axis=1, k=[6], largest=0", n_out=2)


def test_same_bits_for_any_number_of_threads() -> None:
    x = rand(40, 500).float()
    text = "graph {\n input x: f32[40, 500]\n v, i = topk(x) {axis=1, k=[500]}\n output v\n output i\n}"
    one = engine.Graph.parse(text, engine.Ctx(threads=False)).run([x], 2)
    two = engine.Graph.parse(text, engine.Ctx(threads=True)).run([x], 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("node,words", [("topk(x) {axis=1, k=[6]}", ["k = 6 of 5"]), ("topk(x) {axis=1}", ["k", "missing"]),
                                        ("topk(x) {axis=2, k=[1]}", ["axis 2"])])
def test_refused(node: str, words: list[str]) -> None:
    with pytest.raises(engine.EngineError) as e:
        engine.run(f"graph {{\n input x: f64[2, 5]\n v, i = {node}\n output v\n}}", [rand(2, 5)])
    assert all(w in str(e.value) for w in words), str(e.value)
