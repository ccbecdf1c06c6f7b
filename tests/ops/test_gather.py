"""Gathers, scatters and their gradients against eager PyTorch: repeated indices, strides, empty sizes, bad indices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)


def index(limit: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(max(limit, 1), shape, generator=gen).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "shape,axis,idx",
    [
        ((11, 7), 0, (5,)),
        ((11, 7), 1, (13,)),
        ((11, 7), 0, (3, 5)),
        ((11,), 0, (2, 3)),
        ((5, 11, 3), 1, (7,)),
        ((5, 11, 3), 2, (2, 4)),
        ((2, 3, 11, 5, 7), 2, (17,)),
        ((11, 1), 0, (5,)),
        ((1, 7), 0, (5,)),
        ((11, 7), 0, ()),
        ((11, 0), 0, (5,)),
        ((11, 7), 0, (0,)),
        ((0, 7), 0, (0, 3)),
        ((3, 700), 0, (401,)),
        ((3001, 5), 0, (3,)),
        ((20011, 2), 0, (7,)),
    ],
)
def test_gather(shape: tuple[int, ...], axis: int, idx: tuple[int, ...], dtype: torch.dtype) -> None:
    i = index(shape[axis], *idx, dtype=dtype)

    def ref(x: torch.Tensor, ix: torch.Tensor) -> torch.Tensor:
        flat = torch.index_select(x, axis, ix.reshape(-1))
        return flat.reshape(*x.shape[:axis], *ix.shape, *x.shape[axis + 1 :])

    check("gather", [rand(*shape), i], ref, f"axis={axis}", low=LOW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 12, 64, 260])
def test_rows_anywhere(n: int, dtype: torch.dtype) -> None:
    """Rows of a part of x: they begin where 16 bytes may, or anywhere."""
    name, i = engine.NAMES[engine.TORCH.index(dtype)], index(11, 3, 13)
    for at, width in ((0, n), (1, n + 1), (4, n + 8), (8, n + 8), (3, n + 8)):
        x = rand(2, 11, width).to(dtype)
        text = (f"graph {{\n input x: {name}[2, 11, {width}]\n input i: i64[3, 13]\n s = slice(x) {{axis=2, start=[{at}], end=[{at + n}], step=1}}\n"
                " y = gather(s, i) {axis=1}\n output y\n}")
        (y,), _ = engine.run(text, [x, i])
        assert torch.equal(y, x[:, i, at:at + n]), (at, width)


@pytest.mark.parametrize("padding_idx", [-1, 0, 4, 10])
def test_embedding(padding_idx: int) -> None:
    i = index(11, 7, 13)
    i[0] = 4
    check(
        "gather",
        [rand(11, 5), i],
        lambda w, ix: F.embedding(ix, w, padding_idx if padding_idx >= 0 else None),
        f"axis=0, padding_idx={padding_idx}",
        low=LOW,
    )


def test_frequent_row_is_accurate() -> None:
    """One row that occurs 40,000 times: the blocked sum keeps fp32 near its last place, and threads do not change a
    bit."""
    i = torch.zeros(40009, dtype=torch.int64)
    dy = torch.rand(40009, 3, generator=torch.Generator().manual_seed(1))
    text = "graph {\n input dy: f32[40009, 3]\n input i: i64[40009]\n y = gather_grad(dy, i) {axis=0, shape=[2, 3], padding_idx=-1}\n output y\n}"
    (y,), _ = engine.run(text, [dy, i])
    want = dy.double().sum(0)
    assert ((y[0].double() - want).abs() / want).max() < 1e-6
    (one,) = engine.Graph.parse(text, engine.Ctx(threads=False)).run([dy, i], 1)
    assert torch.equal(one, y)


@pytest.mark.parametrize(
    "shape,axis,idx",
    [
        ((11, 7), 0, (5, 7)),
        ((11, 7), 1, (11, 3)),
        ((11, 7), 0, (5, 4)),
        ((5, 11, 3), 1, (5, 17, 3)),
        ((5, 11, 3), 0, (2, 7, 3)),
        ((5, 11, 3), 2, (5, 2, 9)),
        ((11,), 0, (23,)),
        ((11, 7), 1, (11, 0)),
        ((1, 7), 1, (1, 7)),
        ((3, 601), 0, (5, 599)),
        ((0, 7), 1, (0, 3)),
    ],
)
def test_elements(shape: tuple[int, ...], axis: int, idx: tuple[int, ...]) -> None:
    i = index(shape[axis], *idx)
    check("gather_elements", [rand(*shape), i], lambda x, ix: torch.gather(x, axis, ix), f"axis={axis}", low=LOW)
    src = rand(*idx) + 1
    check("scatter_elements", [rand(*shape), i, src], lambda x, ix, s: torch.scatter_add(x, axis, ix, s), f"axis={axis}, reduce=1", low=LOW)
    perm = torch.rand(shape, generator=torch.Generator().manual_seed(3)).argsort(axis)  # set: no place twice
    at = tuple(slice(0, min(n, m)) for n, m in zip(idx, shape))
    check(
        "scatter_elements",
        [rand(*shape), perm[at].clone(), rand(*shape)[at].clone() + 1],
        lambda x, ix, s: torch.scatter(x, axis, ix, s),
        f"axis={axis}, reduce=0",
        low=LOW,
    )


# shape of x, axis, shape of the index, shape it is expanded to
EXPANDED = [
    ((11, 7), 0, (23, 1), (23, 7)),
    ((11, 7), 0, (23, 1), (23, 3)),  # a part of every row
    ((4, 11), 1, (1, 9), (4, 9)),
    ((11, 3, 5), 0, (9, 1, 1), (9, 3, 5)),  # axes that become one
    ((11, 3, 5), 0, (9, 1, 1), (9, 2, 5)),  # and that do not
    ((11, 3, 5), 0, (9, 3, 1), (9, 3, 5)),
    ((3, 11, 5), 1, (3, 9, 1), (3, 9, 5)),  # of every batch its own
    ((3, 11, 5), 1, (1, 9, 1), (3, 9, 5)),
    ((3, 11, 5), 1, (1, 9, 1), (2, 9, 4)),
    ((3, 5, 11), 2, (1, 1, 9), (3, 5, 9)),
    ((7, 1201), 0, (40, 1), (40, 1201)),  # columns in pieces
    ((401, 3), 0, (1500, 1), (1500, 3)),  # rows in pieces; on a GPU sums of several parts
    ((11, 7), 0, (0, 1), (0, 7)),
]


@pytest.mark.parametrize("shape,axis,own,whole", EXPANDED)
def test_elements_by_an_expanded_index(shape: tuple[int, ...], axis: int, own: tuple[int, ...], whole: tuple[int, ...]) -> None:
    dims = ", ".join(map(str, whole))
    i = index(shape[axis], *own)

    def one(op: str, inputs: list[torch.Tensor], ref: object, attrs: str, **kw: object) -> None:
        names = [f"a{k}" for k in range(len(inputs))]
        text = "graph {{\n" + "".join(f" input {n}: {{t{k}}}\n" for k, n in enumerate(names))
        call = ", ".join([names[0], "e", *names[2:]])
        check(op, inputs, ref, attrs, graph=text + f" e = expand(a1) {{{{shape=[{dims}]}}}}\n y = {op}({call}) {{{{{attrs}}}}}\n output y\n}}}}", **kw)

    one("gather_elements", [rand(*shape), i], lambda x, ix: torch.gather(x, axis, ix.expand(whole)), f"axis={axis}", low=LOW)
    src = rand(*whole) + 1
    one("scatter_elements", [rand(*shape), i, src], lambda x, ix, s: x.scatter_add(axis, ix.expand(whole), s), f"axis={axis}, reduce=1", low=LOW)
    for how, reduce in (("amax", 2), ("amin", 3)):
        ref = lambda x, ix, s, how=how: x.scatter_reduce(axis, ix.expand(whole), s, how)  # noqa: E731
        one("scatter_elements", [rand(*shape), i, src - 1], ref, f"axis={axis}, reduce={reduce}", low=LOW)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        ints = index(100, *shape, seed=1).to(dtype), index(100, *whole, seed=2).to(dtype)
        one("scatter_elements", [ints[0], i, ints[1]], lambda x, ix, s: x.scatter_add(axis, ix.expand(whole), s), f"axis={axis}, reduce=1")
        one("scatter_elements", [ints[0], i, ints[1]], lambda x, ix, s: x.scatter_reduce(axis, ix.expand(whole), s, "amax"), f"axis={axis}, reduce=2")
        one("gather_elements", [ints[0], i], lambda x, ix: torch.gather(x, axis, ix.expand(whole)), f"axis={axis}")
    if own[axis] <= shape[axis]:  # set: no place twice
        once = torch.randperm(shape[axis], generator=torch.Generator().manual_seed(1))[: own[axis]]
        once = once.reshape([own[axis] if a == axis else 1 for a in range(len(own))]).expand(own).contiguous()
        one("scatter_elements", [rand(*shape), once, src], lambda x, ix, s: x.scatter(axis, ix.expand(whole), s), f"axis={axis}, reduce=0", low=LOW)


def test_nan_among_rows_that_are_joined() -> None:
    x, s, i = rand(5, 9), rand(7, 9), index(5, 7, 1)
    x[1, 2] = s[3, 4] = float("nan")
    text = "graph {{\n input x: {t0}\n input i: {t1}\n input s: {t2}\n e = expand(i) {{shape=[7, 9]}}\n y = scatter_elements(x, e, s) {{axis=0, reduce=%d}}\n output y\n}}"
    for how, reduce in (("amax", 2), ("amin", 3)):
        ref = lambda x, ix, s, how=how: x.scatter_reduce(0, ix.expand(7, 9), s, how)  # noqa: E731
        check("scatter_elements", [x, i, s], ref, f"reduce={reduce}", grad=False, graph=text % reduce, low=LOW)


def test_set_keeps_the_last() -> None:
    i = torch.tensor([2, 0, 2, 2, 0])
    (y,), _ = engine.run(
        "graph {\n input x: f64[3]\n input i: i64[5]\n input s: f64[5]\n y = scatter_elements(x, i, s) {axis=0, "
        "reduce=0}\n output y\n}",
        [torch.zeros(3, dtype=torch.float64), i, torch.arange(5.0, dtype=torch.float64)],
    )
    assert y.tolist() == [4, 0, 3]
    (y,), _ = engine.run(
        "graph {\n input x: f64[3]\n input i: i64[5, 1]\n input s: f64[5]\n y = scatter_nd(x, i, s) {reduce=0}\n "
        "output y\n}",
        [torch.zeros(3, dtype=torch.float64), i[:, None].clone(), torch.arange(5.0, dtype=torch.float64)],
    )
    assert y.tolist() == [4, 0, 3]


@pytest.mark.parametrize(
    "shape,rows,k",
    [
        ((5, 7, 3), (11,), 1),
        ((5, 7, 3), (11,), 2),
        ((5, 7, 3), (4, 2), 3),
        ((5, 7, 3), (2,), 0),
        ((13,), (29,), 1),
        ((5, 0), (3,), 1),
        ((5, 7), (0,), 2),
        ((70, 71), (37,), 2),
        ((2, 611), (97,), 1),
        ((5, 7), (), 2),
    ],
)
def test_nd(shape: tuple[int, ...], rows: tuple[int, ...], k: int) -> None:
    idx = torch.stack([index(shape[d], *rows, seed=d) for d in range(k)], -1) if k else torch.zeros(*rows, 0, dtype=torch.int64)

    def pick(x: torch.Tensor, ix: torch.Tensor) -> torch.Tensor:
        return x[tuple(ix.unbind(-1))] if k else x.expand(*rows, *x.shape) * 1

    check("gather_nd", [rand(*shape), idx], pick, low=LOW)
    if not k:
        return
    src = rand(*rows, *shape[k:]) + 1
    check(
        "scatter_nd",
        [rand(*shape), idx, src],
        lambda x, ix, s: torch.index_put(x, tuple(ix.unbind(-1)), s, accumulate=True),
        "reduce=1",
        low=(torch.float32,),
    )
    flat = torch.zeros(rows, dtype=torch.int64)
    for d in range(k):
        flat = flat * shape[d] + idx[..., d]
    if flat.unique().numel() == flat.numel():
        check("scatter_nd", [rand(*shape), idx, src], lambda x, ix, s: torch.index_put(x, tuple(ix.unbind(-1)), s), "reduce=0", low=LOW)


def test_nd_set_unique() -> None:
    idx = torch.stack(torch.meshgrid(torch.tensor([4, 0, 2]), torch.tensor([6, 1]), indexing="ij"), -1)
    check("scatter_nd", [rand(5, 7, 3), idx, rand(3, 2, 3)], lambda x, ix, s: torch.index_put(x, tuple(ix.unbind(-1)), s), "reduce=0", low=LOW)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    x, s, i = index(100, 11, seed=1).to(dtype), index(100, 23, seed=2).to(dtype), index(11, 23)
    check("scatter_elements", [x, i, s], lambda x, i, s: x.scatter_add(0, i, s), "axis=0, reduce=1")
    check("scatter_nd", [x, i[:, None].clone(), s], lambda x, i, s: x.index_put((i[:, 0],), s, accumulate=True), "reduce=1")
    check("gather", [x, i], lambda x, i: x[i], "axis=0")


@pytest.mark.parametrize("bad", [11, -1, 2**40, -(2**62)])
@pytest.mark.parametrize(
    "node",
    [
        "gather(x, i) {axis=0}",
        "gather_grad(s, i) {axis=0, shape=[11, 3], padding_idx=-1}",
        "gather_elements(x, j) {axis=0}",
        "scatter_elements(x, j, s) {axis=0, reduce=1}",
        "gather_elements(x, e) {axis=0}",
        "scatter_elements(x, e, s) {axis=0, reduce=1}",
        "scatter_elements(x, e, s) {axis=0, reduce=2}",
        "gather_nd(x, k)",
        "scatter_nd(x, k, s) {reduce=0}",
    ],
)
def test_out_of_range(node: str, bad: int) -> None:
    i = torch.tensor([3, 10, bad, 4, bad])
    text = (
        f"graph {{\n input x: f64[11, 3]\n input i: i64[5]\n input j: i64[5, 3]\n input k: i64[5, 1]\n input s: f64[5, "
        f"3]\n c = reshape(i) {{shape=[5, 1]}}\n e = expand(c) {{shape=[5, 3]}}\n y = {node}\n output y\n}}"
    )
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(11, 3), i, i[:, None].expand(5, 3), i[:, None].clone(), rand(5, 3)])
    at = 6 if node.split(", ")[1][0] in "je" else 2
    for word in (node.split("(")[0], f"index {bad} ", f"position {at} ", "0 to 10 "):
        assert word in str(e.value), str(e.value)


@pytest.mark.parametrize(
    "node,words",
    [
        ("gather(x, x) {axis=0}", ["gather", "f64", "i64 or i32"]),
        ("gather(x, i) {axis=2}", ["axis 2", "0 to 1"]),
        ("scatter_elements(x, j, i) {axis=0}", ["scatter_elements", "source"]),
        ("scatter_elements(x, j, x) {axis=0, reduce=4}", ["reduce is 4"]),
        ("gather_nd(x, j)", ["gather_nd", "at most 2"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = f"graph {{\n input x: f64[11, 3]\n input i: i64[5]\n input j: i64[5, 3]\n y = {node}\n output y\n}}"
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(11, 3), index(3, 5), index(3, 5, 3)])
    assert all(w in str(e.value) for w in words), str(e.value)
