"""Matrix products by cuBLASLt (csrc/cuda/blaslt.*) on the fake library (fake_blaslt.cpp): which layouts it is given, in
whose numbers the results lie, what is left to the engine's own kernel. Processes of their own, as in
test_graphs_on_fake.py; all rows of tests/ops run on it by `OM_DEVICE=cuda-fake pytest tests/ops`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.children import ENV, TESTS, child, on_fake

from ortmodule import cuda_engine

HEAD = """
import ctypes as C, torch, engine
from cuda import fake
NAME = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
def shape(t):
    return f"{NAME[t.dtype]}[{', '.join(map(str, t.shape))}]"
def run(body, *ins):
    text = "graph {\\n" + "".join(f" input x{i}: {shape(t)}\\n" for i, t in enumerate(ins)) + body + "\\n output y\\n}"
    before = fake.products(), fake.count(fake.LAUNCHES)
    (y,), _ = engine.run(text, list(ins), device="cuda-fake")
    assert fake.count(fake.FAILURES) == 0, fake.message()
    return y, fake.products() - before[0], fake.count(fake.LAUNCHES) - before[1]
def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)
"""


LAYOUTS = """
T = "perm=[1, 0]"
CASES = [  # graph, sizes, the same in torch, calls of the library
    (" y = matmul(x0, x1)", [(5, 7), (7, 3)], lambda a, b: a @ b, 1),
    (" y = matmul(x0, x1, x2)", [(5, 7), (7, 3), (3,)], lambda a, b, c: a @ b + c, 1),
    (" t = permute(x0) {perm=[1, 0]}\\n y = matmul(t, x1)", [(7, 5), (7, 3)], lambda a, b: a.T @ b, 1),
    (" t = permute(x1) {perm=[1, 0]}\\n y = matmul(x0, t, x2)", [(5, 7), (3, 7), (3,)], lambda a, b, c: a @ b.T + c, 1),
    (" t = permute(x0) {perm=[1, 0]}\\n u = permute(x1) {perm=[1, 0]}\\n y = matmul(t, u)", [(7, 5), (3, 7)], lambda a, b: a.T @ b.T, 1),
    (" t = slice(x0) {axis=1, start=3, end=10, step=1}\\n y = matmul(t, x1)", [(5, 16), (7, 3)], lambda a, b: a[:, 3:10] @ b, 1),  # rows apart, odd address
    (" t = slice(x0) {axis=1, start=3, end=11, step=1}\\n y = matmul(t, x1)", [(8, 16), (8, 8)], lambda a, b: a[:, 3:11] @ b, 1),  # an odd address alone
    (" t = slice(x0) {axis=1, start=0, end=14, step=2}\\n y = matmul(t, x1)", [(5, 16), (7, 3)], lambda a, b: a[:, 0:14:2] @ b, 0),  # neither rows nor columns
    (" t = flip(x0) {axes=[1]}\\n y = matmul(t, x1)", [(5, 7), (7, 3)], lambda a, b: a.flip(1) @ b, 0),
    (" t = expand(x0) {shape=[5, 7]}\\n y = matmul(t, x1)", [(1, 7), (7, 3)], lambda a, b: a.expand(5, 7) @ b, 0),  # rows at one place
    (" y = matmul(x0, x1)", [(4, 5, 7), (4, 7, 3)], lambda a, b: a @ b, 1),
    (" y = matmul(x0, x1)", [(4, 5, 7), (7, 3)], lambda a, b: a @ b, 1),  # rows of one product
    (" y = matmul(x0, x1)", [(5, 7), (4, 7, 3)], lambda a, b: a @ b, 1),
    (" y = matmul(x0, x1)", [(2, 3, 5, 7), (2, 3, 7, 4)], lambda a, b: a @ b, 1),
    (" t = permute(x0) {perm=[0, 2, 1, 3]}\\n u = permute(x1) {perm=[0, 2, 3, 1]}\\n y = matmul(t, u)", [(2, 5, 3, 8), (2, 5, 3, 8)],
     lambda a, b: a.permute(0, 2, 1, 3) @ b.permute(0, 2, 3, 1), 2),  # heads inside of rows: a call per batch
    (" t = permute(x0) {perm=[0, 2, 1, 3]}\\n y = matmul(t, x1)", [(66, 2, 67, 4), (1, 67, 4, 3)], lambda a, b: a.permute(0, 2, 1, 3) @ b, 0),  # too many calls
    (" y = matmul(x0, x1)", [(5, 0), (0, 3)], lambda a, b: a @ b, 0),
    (" y = matmul(x0, x1)", [(0, 5), (5, 3)], lambda a, b: a @ b, 0),
    (" y = matmul(x0, x1)", [(1, 9), (9, 1)], lambda a, b: a @ b, 1),
    (" y = matmul(x0, x1)", [(1, 9), (9, 40)], lambda a, b: a @ b, 1),
    (" y = matmul(x0, x1)", [(40, 9), (9, 1)], lambda a, b: a @ b, 1),
    (" y = matmul(x0, x1)", [(16, 32), (32, 24)], lambda a, b: a @ b, 1),  # the algorithm with workspace
]
for body, sizes, torch_says, calls in CASES:
    for dtype, unit in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2 ** -8), (torch.float16, 2 ** -11)):
        ins = [rand(*s, dtype=dtype) for s in sizes]
        y, products, launches = run(body, *ins)
        want = torch_says(*[t.double() for t in ins])
        assert y.dtype == dtype and (y.double() - want).abs().max().item() <= unit * (1 + want.abs().max().item()) if want.numel() else y.shape == want.shape, (body, dtype)
        assert products == {calls}, (body, sizes, dtype, products, launches)
print("done")
"""


@on_fake
def test_layouts_the_library_is_given() -> None:
    """Every layout, in every dtype; sums of 16-bit floats in f32: rounded once."""
    assert child(HEAD + LAYOUTS.replace("{calls}", "calls"), OM_FAKE_SEED="3") == "done\n"


@on_fake
def test_without_the_library_the_kernel_does_it() -> None:
    assert child(HEAD + LAYOUTS.replace("{calls}", "0"), OM_FAKE_BLAS="0") == "done\n"


ALIGNED = """
for most, least in ((1 << 20, 1), (256 * 272 * 2, 1), (256 * 272 * 4, 1), (1 << 20, 1 << 40)):
    engine.lib.om_cuda_aligned(C.c_int64(most), C.c_int64(least))
    for dtype, unit in ((torch.float32, 1e-5), (torch.bfloat16, 2 ** -8), (torch.float16, 2 ** -11), (torch.float64, 1e-13)):
        e = 8 if dtype == torch.float64 else 4 if dtype == torch.float32 else 2
        fits = least == 1 and e < 8
        for body, sizes, torch_says, rows in [  # rows: operands of which some are odd, in products of at least 128 per element
            (" t = permute(x1) {perm=[1, 0]}\\n y = matmul(x0, t, x2)", [(520, 128), (261, 128), (261,)], lambda a, b, c: a @ b.T + c, "cb+"),  # logits
            (" t = permute(x1) {perm=[1, 0]}\\n y = matmul(x0, t)", [(520, 128), (261, 128)], lambda a, b: a @ b.T, "cb"),
            (" y = matmul(x0, x1)", [(520, 261), (261, 128)], lambda a, b: a @ b, "ab"),  # gradient of the hidden states
            (" t = permute(x0) {perm=[1, 0]}\\n y = matmul(t, x1)", [(132, 261), (132, 128)], lambda a, b: a.T @ b, "aa"),  # of the weights, the odd rows apart
            (" y = matmul(x0, x1)", [(130, 144), (144, 133)], lambda a, b: a @ b, "bc"),
            (" t = permute(x1) {perm=[1, 0]}\\n y = matmul(x0, t)", [(129, 137), (136, 137)], lambda a, b: a @ b.T, "ab"),
            (" y = matmul(x0, x1)", [(3, 88, 137), (137, 139)], lambda a, b: a @ b, "abc"),
            (" y = matmul(x0, x1)", [(520, 127), (127, 261)], lambda a, b: a @ b, "ab"),  # too few for c
            (" y = matmul(x0, x1)", [(520, 128), (128, 264)], lambda a, b: a @ b, ""),
            (" y = matmul(x0, x1)", [(2, 200, 137), (2, 137, 139)], lambda a, b: a @ b, ""),  # several products
        ]:
            ins = [rand(*s, dtype=dtype) for s in sizes]
            before = fake.ran("rows")
            y, pieces, _ = run(body, *ins)
            want = torch_says(*[t.double() for t in ins])
            assert y.dtype == dtype and (y.double() - want).abs().max().item() <= unit * (1 + want.abs().max().item()), (body, dtype, most)
            ran = fake.ran("rows") - before
            if not fits or not rows: assert ran == 0 and pieces == 1, (body, dtype, most, ran, pieces)
            elif most == 1 << 20: assert ran == len(rows) and pieces == max(1, rows.count("a")), (body, dtype, ran, pieces)
            elif e == 2 and most == 256 * 272 * 2 and (rows == "cb+" or rows == "ab" and sizes[0] == (520, 261)): assert (ran, pieces) == (2 + 3 if "+" in rows else 1 + 3, 3), (body, ran, pieces)
print("done")
"""


@on_fake
@pytest.mark.parametrize("seed", ["1", "3"])
def test_rows_that_begin_anywhere(seed: str) -> None:
    """Large products with such operands have them in aligned rows, as many of them at a time as fit."""
    assert child(HEAD + ALIGNED, OM_FAKE_SEED=seed, OM_FAKE_STRICT="1") == "done\n"


TF32 = """
a, b = rand(9, 33), rand(33, 20)
body = " y = matmul(x0, x1)"
def cut(x):
    return ((x.view(torch.int32) + 0xfff + (x.view(torch.int32) >> 13 & 1)) & ~0x1fff).view(torch.float32)
want, less = (a.double() @ b.double()).float(), (cut(a).double() @ cut(b).double()).float()
assert not torch.equal(want, less)
for allowed, says in ((0, want), (1, less), (0, want)):
    engine.lib.om_cuda_tf32(C.c_bool(allowed))
    assert torch.equal(run(body, a, b)[0], says), allowed
engine.lib.om_cuda_tf32(C.c_bool(True))
d = [rand(9, 33, dtype=torch.float64), rand(33, 20, dtype=torch.float64)]
assert torch.allclose(run(body, *d)[0], d[0] @ d[1], rtol=0, atol=1e-13)
print("done")
"""


@on_fake
def test_operands_are_cut_to_tf32_when_allowed() -> None:
    assert child(HEAD + TF32) == "done\n"


OLD = """
a, b = rand(9, 33), rand(33, 20)
engine.lib.om_cuda_tf32(C.c_bool(True))
y, products, _ = run(" y = matmul(x0, x1)", a, b)
assert products == 1 and torch.equal(y, (a.double() @ b.double()).float())
print("done")
"""


@on_fake
def test_a_gpu_without_tf32_multiplies_f32_by_the_library() -> None:
    assert child(HEAD + OLD, OM_FAKE_SM="75") == "done\n"


CHOICES = """
asked = lambda: fake.gpu.fake_gpu_calls(b"cublasLtMatmulAlgoGetHeuristic")
body = " y = matmul(x0, x1)"
first, *_ = run(body, rand(9, 33), rand(33, 20))
n = asked()
assert n == 4, n  # plain and TF32, for any address and for aligned ones
again, *_ = run(body, rand(9, 33), rand(33, 20))
assert asked() == n and torch.equal(first, again)
for k in range(200):  # the table grows
    run(body, rand(1 + k % 20, 3), rand(3, 1 + k // 20))
n = asked()
for k in range(200):
    run(body, rand(1 + k % 20, 3), rand(3, 1 + k // 20))
assert asked() == n
run(body, rand(9, 33, dtype=torch.float16), rand(33, 20, dtype=torch.float16))
assert asked() == n + 2
fake.gpu.fake_gpu_fail(b"cublasLtMatmulAlgoGetHeuristic", 1, 15)  # refused: the kernel's, and remembered
for _ in range(2):
    y, products, _ = run(body, rand(11, 33), rand(33, 20))
    assert products == 0 and torch.allclose(y, rand(11, 33) @ rand(33, 20), atol=1e-5)
print("done")
"""


@on_fake
def test_an_algorithm_is_chosen_once_per_shape_and_dtype() -> None:
    assert child(HEAD + CHOICES) == "done\n"


MEMORY = """
from device import steps
model = steps.Model.text(steps.cx("cuda-fake"), "graph {\\n input x: f32[64, 48]\\n input w: f32[48, 32]\\n y = matmul(x, w)\\n output y\\n}")
step = lambda: model.step([rand(64, 48), rand(48, 32)], [1, 1], [rand(64, 32)])
step()
before = fake.calls("cuMemAllocAsync")
step()
print(fake.calls("cuMemAllocAsync") - before, fake.products())
"""


@on_fake
def test_workspace_is_the_plans() -> None:
    """As many blocks a step as without the library: its workspace lies in the arena. (The fake fills it all.)"""
    (own, none), (blocks, products) = (child(HEAD + MEMORY, OM_FAKE_BLAS=b).split() for b in "01")
    assert own == blocks and none == "0" and products == "6", (own, blocks, products)


SHRINK = """
def less(r):
    {change}
fake.change = less
try:
    engine.run("graph {{\\n input a: f32[16, 8]\\n input b: f32[8, 12]\\n input c: f32[12]\\n y = matmul(a, b, c)\\n output y\\n}}",
               [rand(16, 8), rand(8, 12), rand(12)], device="cuda-fake")
except engine.EngineError as e:
    print(e, fake.message())
"""


@on_fake
@pytest.mark.parametrize("change,says", [("r[0].size -= 4", "B reaches"), ("r[1].size -= 4", "A reaches"), ("r[2].size -= 4", "the bias reaches"),
                                         ("r[3].mode = 1", "D reaches"), ("r[4].size = 255", "workspace"), ("r[4].mode = 1", "workspace"), ("pass", "")])
def test_products_are_held_to_what_they_declare(change: str, says: str) -> None:
    out = child(HEAD + SHRINK.format(change=change))
    assert says in out and bool(says) == bool(out), out


def test_what_torch_allows() -> None:
    """Child: torch complains where both of its ways to say it were used in one process."""
    source = """
import torch
from ortmodule.cuda_engine import tf32_allowed
matmul = torch.backends.cuda.matmul
assert not tf32_allowed()
matmul.allow_tf32 = True
assert tf32_allowed()
torch.set_float32_matmul_precision("highest")
assert not tf32_allowed()
if hasattr(matmul, "fp32_precision"):
    matmul.fp32_precision = "tf32"
    assert tf32_allowed()
    matmul.fp32_precision = "ieee"
    assert not tf32_allowed()
"""
    subprocess.run([sys.executable, "-c", source], check=True, env=ENV, cwd=TESTS.parent)
    assert cuda_engine.tf32_allowed() in (True, False)


def test_entry_points_have_the_types_of_cublaslt_h() -> None:
    """Where the header is: of the toolkit, of NVIDIA's wheel in this environment, or where CUBLAS_INCLUDE says."""
    given = os.environ.get("CUBLAS_INCLUDE")
    places = [Path(given)] if given else []
    places += [*Path("/usr/local").glob("cuda*/include"), *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include")]
    lt = [p for p in places if (p / "cublasLt.h").exists()]
    driver = [p for p in places if (p / "cuda_fp16.h").exists()]
    if not lt or not driver:
        pytest.skip("no cublasLt.h")
    command = ["gcc", "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", f"-I{TESTS.parent / 'csrc'}", f"-I{lt[0]}", f"-I{driver[0]}"]
    subprocess.run([*command, str(TESTS / "cuda/lt_check.c")], check=True)
