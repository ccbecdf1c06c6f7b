"""Running products, distances and scatters of extrema against eager PyTorch."""

from __future__ import annotations

import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("shape,axis", [((7, 11), 1), ((7, 11), 0), ((3, 5, 4), 1), ((1,), 0), ((0, 3), 1), ((3, 0), 1), ((2, 300), 1)])
def test_cumprod(shape: tuple, axis: int) -> None:
    check("cumprod", [rand(*shape)], lambda x: x.cumprod(axis), f"axis={axis}", low=LOW, terms=100)


def test_cumprod_with_zeros() -> None:
    for zeros in ((3,), (0,), (2, 5), (0, 6)):
        x = rand(4, 7)
        x[1, list(zeros)] = 0
        check("cumprod", [x], lambda x: x.cumprod(1), "axis=1", low=LOW)


def test_cumprod_of_integers() -> None:
    check("cumprod", [torch.tensor([[3, -2, 5], [2**40, 2**40, 7]])], lambda x: x.cumprod(1), "axis=1")
    check("cumprod", [torch.tensor([3, -2, 100], dtype=torch.int8)], lambda x: x.cumprod(0, dtype=torch.int8), "axis=0")


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, INF])
@pytest.mark.parametrize("x,y", [((7, 5), (4, 5)), ((2, 3, 5), (2, 6, 5)), ((3, 1), (2, 1)), ((3, 200), (5, 200)), ((0, 5), (3, 5)),
                                 ((3, 5), (0, 5)), ((3, 0), (2, 0))])
def test_cdist(x: tuple, y: tuple, p: float) -> None:
    check("cdist", [rand(*x), rand(*y, seed=9)], lambda a, b: torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist"),
          f"p={-1.0 if p == INF else float(p)}", terms=300)


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, INF])
def test_cdist_of_equal_rows(p: float) -> None:
    """Distance 0, and single elements that are equal."""
    a, b = rand(4, 3), rand(5, 3, seed=8)
    b[1] = a[2]
    b[3, 1] = a[0, 1]
    a[3] = 0
    b[4] = torch.tensor([1.0, -1, 1])  # two, three maxima
    check("cdist", [a, b], lambda a, b: torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist"), f"p={-1.0 if p == INF else float(p)}")


@pytest.mark.parametrize("how,reduce", [("amax", 2), ("amin", 3)])
def test_scatter_extremum(how: str, reduce: int) -> None:
    def ref(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(1, i, s, how)

    i = torch.randint(0, 6, (4, 9), generator=torch.Generator().manual_seed(2))
    check("scatter_elements", [rand(5, 6), i, rand(4, 9)], ref, f"axis=1, reduce={reduce}", low=LOW)
    ties = rand(4, 9).round(), rand(5, 6).round()
    check("scatter_elements", [ties[1], i, ties[0]], ref, f"axis=1, reduce={reduce}", low=LOW)
    x, s = rand(5, 6), rand(4, 9)
    x[0, 1] = s[2, 3] = NAN
    check("scatter_elements", [x, i, s], ref, f"axis=1, reduce={reduce}", grad=False)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        whole = [torch.randint(0, 90, t, generator=torch.Generator().manual_seed(4)).to(dtype) for t in ((5, 6), (4, 9))]
        check("scatter_elements", [whole[0], i, whole[1]], ref, f"axis=1, reduce={reduce}")


@pytest.mark.parametrize("node,words", [
    ("cdist(x, y)", ["rows of one length"]), ("cdist(x, x) {p=-2.0}", ["p is -2"]), ("cdist(x, h)", ["f32 or f64"]),
    ("cumprod(x) {axis=2}", ["axis 2"]), ("cumprod(b) {axis=0}", ["bool"]), ("scatter_elements(x, i, x) {axis=0, reduce=4}", ["reduce is 4"])])
def test_refused(node: str, words: list[str]) -> None:
    text = (f"graph {{\n input x: f64[2, 5]\n input y: f64[2, 4]\n input h: f16[2, 5]\n input b: bool[3]\n input i: i64[2, 5]\n"
            f" v = {node}\n output v\n}}")
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(2, 5), rand(2, 4), rand(2, 5).half(), torch.ones(3) > 0, torch.zeros(2, 5, dtype=torch.int64)])
    assert all(w in str(e.value) for w in words), str(e.value)


def test_same_bits_for_any_number_of_threads() -> None:
    x, y, dy = rand(90, 33).float(), rand(70, 33).float(), rand(90, 70).float()
    text = "graph {\n input x: f32[90, 33]\n input y: f32[70, 33]\n d = cdist(x, y)\n c = cumprod(d) {axis=1}\n output c\n}"
    one = engine.Graph.parse(text, engine.Ctx(threads=False)).grad([1, 1], [1]).run([x, y, dy], 3)
    two = engine.Graph.parse(text, engine.Ctx(threads=True)).grad([1, 1], [1]).run([x, y, dy], 3)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, two))
