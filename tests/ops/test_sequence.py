"""CTC loss, grouped products, running logarithms, places in sorted rows against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


def lengths(*n: int) -> torch.Tensor:
    return torch.tensor(n, dtype=torch.int64)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("inputs,targets", [((9, 7, 5), (3, 4, 2)), ((9, 9, 1), (0, 4, 1)), ((3, 9, 9), (4, 1, 4)), ((9, 0, 8), (4, 0, 1))])
def test_ctc(inputs: tuple, targets: tuple, zero: bool) -> None:
    """Repeated targets, none, more than there is time for (infinite), no time."""
    x = torch.log_softmax(rand(9, 3, 6), -1)
    t = torch.tensor([[1, 2, 2, 5], [3, 3, 3, 1], [4, 1, 5, 5]])
    il, tl = lengths(*inputs), lengths(*targets)

    def ref(x: torch.Tensor, t: torch.Tensor, il: torch.Tensor, tl: torch.Tensor) -> torch.Tensor:
        y = F.ctc_loss(x, t, il, tl, reduction="none", zero_infinity=zero)
        return y

    attrs = f"blank=0, zero_infinity={int(zero)}"
    check("ctc_loss", [x, t, None, il, tl], lambda x, t, _, a, b: ref(x, t, a, b), attrs)
    flat = torch.cat([r[:n] for r, n in zip(t, targets)])
    check("ctc_loss", [x, flat, None, il, tl], lambda x, t, _, a, b: ref(x, t, a, b), attrs)
    valid = torch.zeros(3, 6, dtype=torch.bool)
    spread = torch.full((3, 6), -100)
    for i, n in enumerate(targets):
        at = torch.randperm(6, generator=torch.Generator().manual_seed(i))[:n].sort().values
        valid[i, at] = True
        spread[i, at] = t[i, :n]
    check("ctc_loss", [x, spread, valid, il, tl], lambda x, t, v, a, b: ref(x, t[v], a, b), attrs)


def test_ctc_of_one_class_and_long_rows() -> None:
    x = torch.log_softmax(rand(60, 20, 30), -1)
    g = torch.Generator().manual_seed(1)
    t, tl = torch.randint(0, 29, (20, 12), generator=g), torch.randint(1, 13, (20,), generator=g)
    il = torch.randint(30, 61, (20,), generator=g)
    check("ctc_loss", [x, t, None, il, tl], lambda x, t, _, a, b: F.ctc_loss(x, t, a, b, blank=29, reduction="none"), "blank=29", terms=100)
    one = torch.log_softmax(rand(4, 2, 1), -1)
    check("ctc_loss", [one, torch.zeros(2, 0, dtype=torch.int64), None, lengths(4, 3), lengths(0, 0)],
          lambda x, t, _, a, b: F.ctc_loss(x, t, a, b, reduction="none"), "")


@pytest.mark.parametrize("il,tl,flat", [((9, 10), (1, 1), False), ((9, 9), (1, 5), False), ((9, 9), (1, -1), False), ((9, 9), (2, 3), True)])
def test_ctc_lengths_that_do_not_fit(il: tuple, tl: tuple, flat: bool) -> None:
    x, t = torch.log_softmax(rand(9, 2, 6), -1), torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    t = t.flatten() if flat else t
    shape = ", ".join(map(str, t.shape))
    text = f"graph {{\n input x: f64[9, 2, 6]\n input t: i64[{shape}]\n input a: i64[2]\n input b: i64[2]\n y = ctc_loss(x, t, _, a, b)\n output y\n}}"
    with pytest.raises(engine.EngineError):
        engine.run(text, [x, t, lengths(*il), lengths(*tl)])


@pytest.mark.parametrize("ends", [(3, 3, 7, 10), (0, 0, 0, 0), (10, 10, 10, 10), (1, 2, 5, 8)])
@pytest.mark.parametrize("k,n", [(5, 4), (1, 1), (64, 33)])
def test_grouped_matmul(ends: tuple, k: int, n: int) -> None:
    def ref(x: torch.Tensor, w: torch.Tensor, _e: torch.Tensor) -> torch.Tensor:
        begin = (0, *ends[:-1])
        parts = [x[a:b] @ w[i] for i, (a, b) in enumerate(zip(begin, ends))]
        return torch.cat([*parts, (x[ends[-1]:] @ w[0]) * 0])

    check("grouped_matmul", [rand(10, k), rand(4, k, n), lengths(*ends)], ref, "", low=LOW, terms=100)


def test_grouped_matmul_of_nothing() -> None:
    for s, k, n in ((0, 3, 4), (5, 0, 4), (5, 3, 0)):
        check("grouped_matmul", [rand(s, k), rand(2, k, n), lengths(0, 0)], lambda x, w, e: (x @ w.sum(0)) * 0, "")


@pytest.mark.parametrize("ends", ["5, 3", "2, 9", "-1, 8"])
def test_grouped_matmul_ends_that_do_not_fit(ends: str) -> None:
    text = "graph {\n input x: f64[8, 3]\n input w: f64[2, 3, 2]\n input e: i64[2]\n y = grouped_matmul(x, w, e)\n output y\n}"
    with pytest.raises(engine.EngineError):
        engine.run(text, [rand(8, 3), rand(2, 3, 2), lengths(*map(int, ends.split(",")))])


def test_grouped_outer() -> None:
    def ref(x: torch.Tensor, y: torch.Tensor, _e: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[a:b].T @ y[a:b] for a, b in ((0, 2), (2, 2), (2, 7))])

    check("grouped_outer", [rand(9, 4), rand(9, 5), lengths(2, 2, 7)], ref, "", low=LOW, terms=100)


@pytest.mark.parametrize("shape,axis", [((7, 11), 1), ((7, 11), 0), ((1,), 0), ((0, 3), 1), ((2, 300), 1)])
def test_logcumsumexp(shape: tuple, axis: int) -> None:
    check("logcumsumexp", [rand(*shape)], lambda x: x.logcumsumexp(axis), f"axis={axis}", low=LOW, terms=100)
    check("logcumsumexp", [rand(*shape) * 200], lambda x: x.logcumsumexp(axis), f"axis={axis}")


def test_logcumsumexp_of_infinities() -> None:
    x = torch.tensor([[-INF, -INF, 1, 2], [1, -INF, 2, -INF], [1, INF, 2, INF], [1, NAN, 2, 3], [-INF, 1, NAN, INF]], dtype=torch.float64)
    check("logcumsumexp", [x], lambda x: x.logcumsumexp(1), "axis=1", grad=False)
    nan = torch.tensor([[-INF, NAN, -INF, 1], [INF, NAN, INF, 1], [NAN, INF, 2, INF], [NAN, -INF, -INF, 2]], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):  # from NaN on it is NaN, and so are gradients
        (y,), (dx,) = engine.run(f"graph {{\n input x: {engine.NAMES[engine.TORCH.index(dtype)]}[4, 4]\n y = logcumsumexp(x) {{axis=1}}\n output y\n}}",
                                 [nan.to(dtype)], dys=[torch.ones(4, 4, dtype=dtype)])
        leaf = nan.to(dtype, copy=True).requires_grad_()
        want = leaf.logcumsumexp(1)
        want.sum().backward()
        assert torch.equal(y.isnan(), want.isnan()) and torch.equal(dx.isnan(), leaf.grad.isnan())


@pytest.mark.parametrize("right", [False, True])
def test_search_sorted(right: bool) -> None:
    def ref(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(x, v, right=right)

    for rows, shape in (((7,), (4, 5)), ((3, 7), (3, 5)), ((1,), (3,)), ((3, 0), (3, 2)), ((2, 3, 9), (2, 3, 4)), ((5,), (0,))):
        x, v = rand(*rows).sort(-1).values, rand(*shape, seed=4)
        if rows[-1] and v.numel():
            v.flatten()[0] = x.flatten()[0]
        check("search_sorted", [x, v], ref, f"right={int(right)}", grad=False, low=())
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            check("search_sorted", [(x * 9).abs().sort(-1).values.to(dtype), (v * 9).abs().to(dtype)], ref, f"right={int(right)}", grad=False)
    x, v = torch.tensor([1.0, 2, NAN]), torch.tensor([NAN, 0, 5, 2, INF])
    check("search_sorted", [x.double(), v.double()], ref, f"right={int(right)}", grad=False, low=())


def test_same_bits_for_any_number_of_threads() -> None:
    x = torch.log_softmax(rand(30, 33, 9), -1)
    t = torch.randint(1, 9, (33, 5), generator=torch.Generator().manual_seed(3))
    text = ("graph {\n input x: f64[30, 33, 9]\n input t: i64[33, 5]\n input a: i64[33]\n input b: i64[33]\n"
            " y = ctc_loss(x, t, _, a, b)\n z = logcumsumexp(y) {axis=0}\n output z\n}")
    a, b = torch.full((33,), 28), torch.full((33,), 4)
    made = [engine.Graph.parse(text, engine.Ctx(threads=n)).grad([1, 0, 0, 0], [1]).run([x, t, a, b, rand(33)], 2) for n in (False, True)]
    assert all(torch.equal(p, q) for p, q in zip(*made))
