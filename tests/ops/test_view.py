"""View operators against eager PyTorch: values, gradients, strides, empty and size-1 axes, and what they must
refuse."""

from __future__ import annotations

import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    "shape,to",
    [
        ((3, 5, 7), (15, 7)),
        ((3, 5, 7), (3, 35)),
        ((15, 7), (3, 5, 7)),
        ((3, 5, 7), (105,)),
        ((12, 5), (3, 4, 5)),
        ((12, 5), (5, 12)),
        ((1, 5, 1, 7), (5, 7)),
        ((5, 7), (1, 5, 1, 7, 1)),
        ((1, 1), ()),
        ((), (1, 1, 1)),
        ((0, 5), (5, 0)),
        ((3, 0, 7), (0, 11)),
        ((2, 3, 5, 7), (6, 35)),
        ((4, 6), (2, 2, 3, 2)),
        ((6, 4), (2, 12)),
    ],
)
def test_reshape(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    check("reshape", [rand(*shape)], lambda x: x.reshape(to), f"shape={list(to)}", low=LOW)


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (3, 0, 7), (67, 1, 71)])
def test_permute(shape: tuple[int, ...], perm: tuple[int, ...]) -> None:
    check("permute", [rand(*shape)], lambda x: x.permute(perm), f"perm={list(perm)}", low=LOW)


@pytest.mark.parametrize(
    "shape,to",
    [
        ((1, 5), (3, 5)),
        ((3, 1), (3, 5)),
        ((5,), (2, 3, 5)),
        ((), (3,)),
        ((1, 1, 7), (2, 3, 7)),
        ((3, 5), (3, 5)),
        ((1,), (0,)),
        ((3, 1, 7), (3, 5, 7)),
    ],
)
def test_expand(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    check("expand", [rand(*shape)], lambda x: x.expand(to), f"shape={list(to)}")


@pytest.mark.parametrize(
    "axis,start,end,step",
    [
        (0, 1, 4, 1),
        (1, 0, 7, 2),
        (1, 1, 7, 3),
        (2, 3, 3, 1),
        (2, 10, 11, 5),
        (0, 0, 5, 1),
        (2, 1, 11, 4),
        (0, 5, 5, 1),
    ],
)
def test_slice(axis: int, start: int, end: int, step: int) -> None:
    key = [slice(None)] * 3
    key[axis] = slice(start, end, step)
    check("slice", [rand(5, 7, 11)], lambda x: x[tuple(key)], f"axis={axis}, start=[{start}], end=[{end}], step={step}", low=LOW)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 1), (3, 0, 2)])
def test_flip(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    check("flip", [rand(*shape)], lambda x: x.flip(axes), f"axes={list(axes)}", low=LOW)


def test_stop_grad() -> None:
    check("stop_grad", [rand(3, 5)], lambda x: x.detach(), grad=False)
    x, dy = rand(3, 5), rand(3, 5)
    _, grads = engine.run("graph {\n input x: f64[3, 5]\n y = stop_grad(x)\n output y\n}", [x], [1], [dy])
    assert grads == [None]


def test_zero_grad() -> None:
    """The second operand has any shape and gets zeros."""
    for shape in ((3, 5), (), (7, 1, 2), (0, 3)):
        check("zero_grad", [rand(3, 5), rand(*shape)], lambda v, x: v + (0 * x).sum())


def test_straight_through() -> None:
    check("straight_through", [rand(3, 5), rand(3, 5)[[2, 0, 1]]], lambda v, x: v.detach() + (x - x.detach()), grad=[False, True])


@pytest.mark.parametrize("chain", range(40))
def test_chains(chain: int) -> None:
    """Random chains of views: each meets the strides the ones before left behind. The gradient runs the chain
    backwards."""
    gen = torch.Generator().manual_seed(chain)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=gen))

    x = rand(4, 6, 10)
    lines, name, cur, steps = ["graph {", " input x0: f64[4, 6, 10]"], "x0", x, []
    for k in range(5):
        what = pick(5)
        rank = cur.dim()
        if what == 0:
            perm = torch.randperm(rank, generator=gen).tolist()
            op, attr, f = "permute", f"perm={perm}", lambda t, perm=perm: t.permute(perm)
        elif what == 1:
            axis = pick(rank)
            start = pick(max(1, cur.shape[axis] - 1))
            step = 1 + pick(2)
            end = cur.shape[axis]
            op, attr = "slice", f"axis={axis}, start=[{start}], end=[{end}], step={step}"

            def f(t, a=axis, s=start, e=end, st=step):
                return t[(slice(None),) * a + (slice(s, e, st),)]
        elif what == 2:
            axes = [i for i in range(rank) if pick(2)]
            op, attr, f = "flip", f"axes={axes}", lambda t, axes=axes: t.flip(axes)
        elif what == 3 and rank > 1:
            i = pick(rank - 1)
            to = [*cur.shape[:i], cur.shape[i] * cur.shape[i + 1], *cur.shape[i + 2 :]]
            op, attr, f = "reshape", f"shape={to}", lambda t, to=to: t.reshape(to)
        else:
            even = [i for i in range(rank) if cur.shape[i] % 2 == 0]
            if not even or rank > 6:
                continue
            i = even[pick(len(even))]
            to = [*cur.shape[:i], 2, cur.shape[i] // 2, *cur.shape[i + 1 :]]
            op, attr, f = "reshape", f"shape={to}", lambda t, to=to: t.reshape(to)
        lines.append(f" v{k} = {op}({name}) {{{attr}}}")
        name, cur = f"v{k}", f(cur)
        steps.append(f)

    def ref(t: torch.Tensor) -> torch.Tensor:
        for f in steps:
            t = f(t)
        return t * 1.0

    y = ref(x)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=gen)
    xr = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(ref(xr), xr, dy)
    (got,), (dx,) = engine.run("\n".join([*lines, f" output {name}", "}"]), [x], [1], [dy])
    assert torch.equal(got, y)
    assert torch.equal(dx, want)


@pytest.mark.parametrize(
    "node,words",
    [
        ("reshape(x) {shape=[4, 4]}", ["reshape", "15", "16"]),
        ("permute(x) {perm=[0, 0]}", ["permute", "once"]),
        ("permute(x) {perm=[0]}", ["permute", "2 axes"]),
        ("expand(x) {shape=[3, 7]}", ["expand", "size 5", "7"]),
        ("expand(x) {shape=[3]}", ["expand", "rank"]),
        ("slice(x) {axis=1, start=[2], end=[9], step=1}", ["slice", "9"]),
        ("slice(x) {axis=1, start=[2], end=[3], step=0}", ["slice", "step"]),
        ("slice(x) {axis=2, start=[2], end=[3], step=1}", ["slice", "axis 2"]),
        ("flip(x) {axes=[0, 0]}", ["flip", "different"]),
        ("reshape(x)", ["reshape", "shape", "missing"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    with pytest.raises(engine.EngineError) as e:
        engine.run(f"graph {{\n input x: f64[3, 5]\n y = {node}\n output y\n}}", [rand(3, 5)])
    assert all(w in str(e.value) for w in words), str(e.value)


@pytest.mark.parametrize("node", ["slice(x) {axis=1, start=[1], end=[s0 + 1], step=1}", "expand(x) {shape=[3, s0*2]}", "reshape(x) {shape=[s0, s0]}"])
def test_refused_at_run_time(node: str) -> None:
    """Sizes that only the run knows: an error, never a wild read."""
    text = f"graph {{\n sym s0 = x[1]\n input x: f64[3, s0]\n y = {node}\n output y\n}}"
    with pytest.raises(engine.EngineError):
        engine.run(text, [rand(3, 5)])
