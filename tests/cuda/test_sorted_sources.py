"""Rows added by index on the fake GPU (sort.cu, index.cu, scatter.cu): PyTorch's bits of the same sums in double, rounded
once (of double itself: sums of parts, the same bits in every order of threads and blocks); work that is linear in the
number of sources, however they are spread."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import torch, engine
from cuda import fake
from device import steps
fake.late(False)
cx = steps.cx("cuda-fake")
def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
def indices(m, n, kind):
    g = torch.Generator().manual_seed(m)
    if kind == "one":
        return torch.full((m,), n - 1)
    if kind == "falling":
        return (n - 1 - torch.arange(m)) % n
    i = torch.randint(0, n, (m,), generator=g)
    return torch.where(torch.rand(m, generator=g) < 0.3, n // 2, i) if kind == "frequent" else i
def run(text, ins):
    model = steps.Model.text(cx, text)
    before = fake.gpu.fake_gpu_touches()
    (out,) = model.step(ins).outputs
    model.free()
    assert fake.count(fake.FAILURES) == 0, fake.message()
    return out, fake.gpu.fake_gpu_touches() - before
def added(n, idx, src, outer=1):
    return torch.zeros(outer, n, src.shape[-1], dtype=torch.float64).index_add_(1, idx, src.reshape(outer, len(idx), src.shape[-1]).double())
def gather_grad(m, n, inner, kind="any", outer=1, dtype=torch.float32, wide=True, skip=-1, at=0):
    idx, flat = indices(m, n, kind), rand(at + outer * m * inner).to(dtype)
    dy = flat[at:].view(outer, m, inner)
    text = (f"graph {{\\n input f: {engine.NAMES[engine.TORCH.index(dtype)]}[{len(flat)}]\\n input i: {'i64' if wide else 'i32'}[{m}]\\n"
            f" s = slice(f) {{axis=0, start=[{at}], end=[{len(flat)}], step=1}}\\n dy = reshape(s) {{shape=[{outer}, {m}, {inner}]}}\\n"
            f" y = gather_grad(dy, i) {{axis=1, shape=[{outer}, {n}, {inner}], padding_idx={skip}}}\\n output y\\n}}")
    y, touches = run(text, [flat, idx if wide else idx.int()])
    keep = idx != skip
    want = added(n, idx[keep], dy[:, keep].contiguous(), outer)
    assert torch.equal(y, want.to(dtype)) if dtype != torch.float64 else (y - want).abs().max() < 1e-12, (m, n, inner, kind, dtype)
    return touches
"""

CASES = """
gather_grad(8192, 50257, 24, "frequent", skip=50257 // 2)
for kind in ("any", "one", "falling", "frequent"):
    gather_grad(4999, 300, 33, kind)
    gather_grad(2049, 70001, 3, kind, outer=2, wide=False)
for m, n in [(1, 1), (31, 2), (2048, 255), (2050, 256), (2048 * 3, 65536), (7, 1 << 24)]:
    gather_grad(m, n, 1)
gather_grad(3001, 40, 300, "frequent", dtype=torch.bfloat16)
gather_grad(3001, 40, 5, "any", dtype=torch.float64)
for m in (1, 31, 32, 33, 63, 64, 65, 97, 1000, 32 * 34 + 1):  # parts are 32 sources
    for n, kind in ((1, "one"), (3, "any"), (40, "frequent"), (2000, "falling")):
        for inner, at, dtype in ((12, 0, torch.float32), (16, 0, torch.bfloat16), (4, 1, torch.float32), (8, 4, torch.float16), (5, 0, torch.float32), (6, 1, torch.float64)):
            gather_grad(m, n, inner, kind, outer=1 + m % 2, dtype=dtype, at=at, skip=-1 if m % 3 else 0)
base = torch.arange(40.0).view(5, 8)
for dtype in (torch.float32, torch.bfloat16):  # onto what is there
    idx, dy = indices(200, 5, "frequent"), rand(200, 8).to(dtype)
    t = engine.NAMES[engine.TORCH.index(dtype)]
    y, _ = run(f"graph {{\\n input dy: {t}[200, 8]\\n input i: i64[200]\\n input b: {t}[5, 8]\\n y = gather_grad(dy, i, b) {{axis=0, shape=[5, 8], padding_idx=-1}}\\n output y\\n}}",
               [dy, idx, base.to(dtype)])
    assert torch.equal(y, (base.to(dtype).double() + added(5, idx, dy)[0]).to(dtype))
gather_grad(9, 4, 8200, "frequent")  # a block has as many threads as the kernel was compiled for, not as a row asks for
for m in (3, 5000):
    idx, src = torch.stack([indices(m, 40, "frequent"), indices(m + 1, 9, "any")[:m]], 1), rand(m, 5)
    at = idx[:, 0] * 9 + idx[:, 1]
    y, _ = run(f"graph {{\\n input x: f32[40, 9, 5]\\n input i: i64[{m}, 2]\\n input s: f32[{m}, 5]\\n y = scatter_nd(x, i, s) {{reduce=1}}\\n output y\\n}}",
               [torch.zeros(40, 9, 5), idx, src])
    assert torch.equal(y.view(360, 5), added(360, at, src)[0].float())
    y, _ = run(f"graph {{\\n input x: f32[40, 9, 5]\\n input i: i64[{m}, 2]\\n input s: f32[{m}, 5]\\n y = scatter_nd(x, i, s) {{reduce=0}}\\n output y\\n}}",
               [torch.zeros(40, 9, 5), idx, src])
    last = torch.zeros(360, 5)
    for k, a in enumerate(at.tolist()):
        last[a] = src[k]
    assert torch.equal(y.view(360, 5), last)
print("done")
"""

LINEAR = """
for kind in ("any", "one", "frequent"):
    few, many = (gather_grad(m, 50257, 8, kind) for m in (4096, 16384))
    y = 50257 * 8 // 4  # zeros, 16 bytes at once
    assert many - y < 4.3 * (few - y), (kind, few, many)
    assert few - y < 4096 * 8 * 2 + 4096 * 40 + 4 * 1024 * 3 + 50257 * 8, (kind, few)
print("done")
"""

FAULT = """
try:
    gather_grad(3000, 70, 3, "any") and run("graph {\\n input dy: f32[3000, 3]\\n input i: i64[3000]\\n y = gather_grad(dy, i) {axis=0, shape=[50, 3], padding_idx=-1}\\n output y\\n}",
                                            [rand(3000, 3), indices(3000, 70, "falling") - 0])
except engine.EngineError as e:
    assert "index 69 at position 0" in str(e) and "0 to 49" in str(e), str(e)
    print("done")
"""


@pytest.mark.parametrize("seed", [0, 3, 8])
def test_bits_are_those_of_sums_in_order(seed: int) -> None:
    assert child(HEAD + CASES, OM_FAKE_SEED=str(seed)).endswith("done\n")


def test_work_is_linear() -> None:
    assert child(HEAD + LINEAR).endswith("done\n")


def test_an_index_out_of_range_is_told_and_writes_nothing_else() -> None:
    assert child(HEAD + FAULT).endswith("done\n")
