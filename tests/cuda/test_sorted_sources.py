"""Rows added by index on the fake GPU (sort.cu, index.cu, scatter.cu): PyTorch's bits of the same sums, one after the
other in double and rounded once, in every order of threads and blocks; work that is linear in the number of sources,
however they are spread."""

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
    return torch.zeros(outer, n, src.shape[-1], dtype=torch.float64).index_add_(1, idx, src.view(outer, len(idx), -1).double())
def gather_grad(m, n, inner, kind="any", outer=1, dtype=torch.float32, wide=True, skip=-1):
    idx, dy = indices(m, n, kind), rand(outer, m, inner).to(dtype)
    text = (f"graph {{\\n input dy: {engine.NAMES[engine.TORCH.index(dtype)]}[{outer}, {m}, {inner}]\\n input i: {'i64' if wide else 'i32'}[{m}]\\n"
            f" y = gather_grad(dy, i) {{axis=1, shape=[{outer}, {n}, {inner}], padding_idx={skip}}}\\n output y\\n}}")
    y, touches = run(text, [dy, idx if wide else idx.int()])
    keep = idx != skip
    assert torch.equal(y, added(n, idx[keep], dy[:, keep].contiguous(), outer).to(dtype)), (m, n, inner, kind, dtype)
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
    y = 50257 * 8
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
