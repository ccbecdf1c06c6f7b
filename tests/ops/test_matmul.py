"""matmul: forward, gradients, strides, empty sizes, batch broadcasting and exactness across thread counts, against
eager PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
from gemm_call import product

import engine
from opcheck import check as check_op
from opcheck import rand

FACTOR = 4.0  # the largest error of one small product is chance: test_error_of_sums compares the mean
LOW = (torch.float32, torch.bfloat16, torch.float16)

rand = functools.partial(rand, per_axis=31)


def check(op: str, inputs: list[torch.Tensor], *args, **kw) -> None:
    check_op(op, inputs, *args, factor=FACTOR, terms=max([n for t in inputs for n in t.shape[-2:]], default=0), **kw)


SHAPES = [
    ((5, 7), (7, 3)),
    ((1, 1), (1, 1)),
    ((1, 13), (13, 17)),
    ((19, 1), (1, 23)),
    ((97, 101), (101, 103)),
    ((2, 61), (61, 1)),  # narrow and tall both ways
    ((211, 61), (61, 2)),
    ((3, 1031), (1031, 5)),  # several slices of k
    ((2, 3, 5, 7), (7, 11)),  # a weight
    ((3, 5, 7), (3, 7, 11)),
    ((2, 3, 5, 7), (2, 3, 7, 11)),
    ((3, 1, 5, 7), (2, 7, 11)),  # both sides broadcast
    ((5, 7), (3, 7, 11)),
    ((3, 5, 7), (1, 7, 11)),
    ((1, 2, 5, 7), (3, 1, 7, 2)),
    ((0, 7), (7, 3)),
    ((5, 0), (0, 3)),
    ((5, 7), (7, 0)),
    ((0, 5, 7), (0, 7, 3)),
    ((2, 0, 7), (7, 3)),
    ((3, 5, 0), (0, 2)),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sa,sb", SHAPES)
def test_shapes(sa: tuple[int, ...], sb: tuple[int, ...], bias: bool) -> None:
    a, b = rand(*sa), rand(*sb)
    if bias:
        check("matmul", [a, b, rand(sb[-1])], lambda x, y, z: x @ y + z, low=LOW)
    else:
        check("matmul", [a, b], lambda x, y: x @ y, low=LOW)


@pytest.mark.parametrize("m,k,n", [(1, 257, 509), (6, 67, 131), (13, 521, 1), (127, 769, 257), (509, 29, 3), (3, 29, 509), (257, 2053, 17)])
def test_sizes(m: int, k: int, n: int) -> None:
    check("matmul", [rand(m, k), rand(k, n), rand(n)], lambda a, b, c: a @ b + c, low=LOW)


def test_many_products() -> None:
    check("matmul", [rand(13, 5, 29, 31), rand(13, 5, 31, 37)], torch.matmul, low=LOW)
    check("matmul", [rand(11, 101, 67), rand(11, 67, 103)], torch.matmul)


def test_linear_weight() -> None:
    """x W^T with W stored (n, k): a transposed view, and the gradient of W itself."""
    text = """graph {{
  input x: {t0}
  param w: {t1}
  input b: {t2}
  wt = permute(w) {{perm=[1, 0]}}
  y = matmul(x, wt, b)
  output y
}}"""
    check("matmul", [rand(3, 29, 41), rand(53, 41), rand(53)], torch.nn.functional.linear, graph=text, low=LOW)
    g = engine.Graph.parse(text.format(t0="f32[3, 29, 41]", t1="f32[53, 41]", t2="f32[53]")).grad([1, 1, 1], [1])
    assert "f32[53, 41]" in g.text() and "f32[41, 53]" in g.text()


def test_views_of_heads() -> None:
    """q k^T on (b, t, h, d) storage: permuted views reach the kernel."""
    text = """graph {{
  input q: {t0}
  input k: {t1}
  qh = permute(q) {{perm=[0, 2, 1, 3]}}
  kh = permute(k) {{perm=[0, 2, 3, 1]}}
  y = matmul(qh, kh)
  output y
}}"""
    check("matmul", [rand(2, 17, 3, 5), rand(2, 19, 3, 5)], lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1), graph=text, low=LOW)


def test_nan_and_inf_pass() -> None:
    a, b = rand(13, 17), rand(17, 19)
    a[3, 5], b[7, 2] = float("nan"), float("inf")
    got, _ = engine.run("graph { input a: f64[13, 17]\n input b: f64[17, 19]\n y = matmul(a, b)\n output y\n}", [a, b])
    want = a @ b
    assert torch.equal(torch.isnan(got[0]), torch.isnan(want))
    assert torch.equal(torch.isinf(got[0]), torch.isinf(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("m,k,n", [(131, 1033, 257), (401, 211, 5), (5, 211, 401), (1031, 67, 127), (1601, 1030, 417), (301, 2050, 1001), (61, 4099, 67), (3, 1537, 211), (67, 1024, 64)])
def test_same_bits_whatever_the_threads(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    name = engine.NAMES[engine.TORCH.index(dtype)]
    text = f"graph {{ input a: {name}[{m}, {k}]\n input b: {name}[{k}, {n}]\n y = matmul(a, b)\n output y\n}}"
    a, b = rand(m, k).to(dtype), rand(k, n).to(dtype)
    one = engine.run(engine.Graph.parse(text, engine.Ctx(threads=False)), [a, b])[0][0]
    two = engine.run(engine.Graph.parse(text, engine.Ctx(threads=True)), [a, b])[0][0]
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m,k,n", [(64, 4096, 64), (61, 1029, 67), (7, 5003, 301), (300, 513, 5), (2, 3000, 3)])
def test_slices_of_k_summed_apart(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    """Same bits as on one thread, where slices are added to C one after the other; any strides, into what is there."""
    a, b, bias = rand(k, m).to(dtype).t(), rand(k, n).to(dtype), rand(n).to(dtype)
    for alpha, beta, add, form in [(1.0, 0, None, "rows"), (0.5, 1, bias, "rows"), (2.0, 0, bias, "gaps"), (1.0, 1, None, "columns")]:
        start = rand(m, n).to(dtype)
        got = []
        for threads in (False, True):
            c = {"rows": torch.empty(m, n, dtype=dtype), "gaps": torch.empty(m, 2 * n, dtype=dtype)[:, ::2], "columns": torch.empty(n, m, dtype=dtype).t()}[form]
            c.copy_(start if beta else torch.full_like(start, float("nan")))
            product(engine.Ctx(threads=threads), a, b, c, alpha, beta, add)()
            got.append(c)
        exact = alpha * (a.double() @ b.double()) + (start.double() if beta else 0) + (0 if add is None else add.double())
        assert torch.equal(got[0], got[1])
        assert (got[1].double() - exact).abs().max() <= 4 * k * torch.finfo(dtype).eps * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m,k,n", [(32, 128, 512), (7, 61, 67), (1, 130, 301), (40, 1030, 200), (129, 64, 17), (300, 515, 70), (3, 1, 130)])
def test_packed_once(dtype: torch.dtype, m: int, k: int, n: int, threads: bool) -> None:
    """B laid out before, rows or columns contiguous: the same bits, and nothing else is read of it."""
    cx = engine.Ctx(threads=threads)
    a, bias = rand(m, k).to(dtype), rand(n).to(dtype)
    for b in (rand(k, n).to(dtype), rand(n, k).to(dtype).t()):
        for beta, add in ((0, None), (1, bias)):
            want, got = torch.ones(m, n, dtype=dtype), torch.ones(m, n, dtype=dtype)
            product(cx, a, b, want, 1.0, beta, add)()
            call = product(cx, a, b, got, 1.0, beta, add, packed=True)
            call()
            assert torch.equal(got, want)


@pytest.mark.parametrize("m,k,n", [(131, 127, 257), (67, 1031, 131), (3, 509, 29), (257, 4099, 61), (5, 2053, 2)])
def test_error_of_sums(m: int, k: int, n: int) -> None:
    """Root mean square error in fp32 against fp64: at most twice eager's own."""
    a, b = rand(m, k).float(), rand(k, n).float()
    got = engine.run(f"graph {{ input a: f32[{m}, {k}]\n input b: f32[{k}, {n}]\n y = matmul(a, b)\n output y\n}}", [a, b])[0][0]
    exact = a.double() @ b.double()
    mine, theirs = [(x.double() - exact).square().mean().sqrt().item() for x in (got, a @ b)]
    assert mine <= 2 * theirs, f"{mine:.3e}, eager's {theirs:.3e}"


@pytest.mark.parametrize(
    "text,needle",
    [
        ("input a: f32[2, 3]\n input b: f32[4, 5]\n y = matmul(a, b)", "rows"),
        ("input a: f32[2, 3]\n input b: f64[3, 5]\n y = matmul(a, b)", "dtype"),
        ("input a: i64[2, 3]\n input b: i64[3, 5]\n y = matmul(a, b)", "cast"),
        ("input a: f32[3]\n input b: f32[3, 5]\n y = matmul(a, b)", "reshape"),
        ("input a: f32[2, 4, 3]\n input b: f32[5, 3, 5]\n y = matmul(a, b)", "batch axis"),
        ("input a: f32[4, 3]\n input b: f32[3, 5]\n input c: f32[4]\n y = matmul(a, b, c)", "bias"),
    ],
)
def test_errors(text: str, needle: str) -> None:
    with pytest.raises(engine.EngineError, match=needle):
        engine.Graph.parse(f"graph {{ {text}\n output y\n}}")


@pytest.mark.parametrize("shapes", [((37, 2, 3), (37, 3, 2)), ((300, 1, 1), (300, 1, 1)), ((9, 5, 4, 0), (9, 5, 0, 3)), ((3, 70, 3, 3), (70, 3, 3)), ((11, 1, 16), (1, 16, 1)), ((8, 6, 6), (8, 6, 6)), ((8, 7, 7), (8, 7, 7))])
def test_many_products_of_a_few_numbers(shapes: tuple[tuple[int, ...], ...]) -> None:
    """No packing, up to 224 multiplications each; transposed operands, a bias, the same bits on any number of threads."""
    a, b = rand(*shapes[0]), rand(*shapes[1])
    check("matmul", [a, b], torch.matmul, low=LOW)
    n = b.shape[-1]
    turned = [x.mT.contiguous() for x in (a, b)]
    names = [", ".join(map(str, x.shape)) for x in turned]
    last = [[*range(x.dim() - 2), x.dim() - 1, x.dim() - 2] for x in turned]
    text = (f"graph {{ input p: f64[{names[0]}]\n input q: f64[{names[1]}]\n input c: f64[{n}]\n a = permute(p) {{perm={last[0]}}}\n"
            f" b = permute(q) {{perm={last[1]}}}\n y = matmul(a, b, c)\n output y\n}}")
    bias = rand(n)
    made = [engine.run(engine.Graph.parse(text, engine.Ctx(threads=t)), [*turned, bias])[0][0] for t in (False, True)]
    assert torch.equal(*made)
    assert (made[0] - (a @ b + bias)).abs().max() < 1e-12
