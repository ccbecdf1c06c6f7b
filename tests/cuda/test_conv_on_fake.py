"""Kernels of convolution and gather_elements on the fake GPU, against PyTorch in f64 and in each dtype's unit. All rows of
tests/ops/test_conv.py and test_gather.py run there too: `OM_DEVICE=cuda-fake pytest tests/ops/test_conv.py`."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake


CONV = """
import torch, engine
from cuda import fake
from opcheck import check, rand
import torch.nn.functional as F
LOW = (torch.float32, torch.bfloat16, torch.float16)
CASES = [  # x, w, bias, torch's arguments
    ((2, 3, 12, 12), (5, 3, 4, 4), True, dict(stride=4)),                       # patches
    ((2, 4, 7, 9), (6, 2, 3, 2), False, dict(stride=(2, 1), padding=(1, 0), groups=2)),
    ((1, 3, 11), (3, 1, 5), True, dict(padding=4, dilation=2, groups=3)),       # depthwise
    ((3, 2, 5, 4, 6), (3, 2, 2, 1, 3), True, dict(stride=(1, 2, 3), padding=(1, 0, 2))),
    ((2, 5, 17, 19), (7, 5, 1, 1), False, {}),
    ((0, 3, 8, 8), (2, 3, 3, 3), True, {}),
]
for x, w, bias, given in CASES:
    nd = len(x) - 2
    each = lambda v: [v] * nd if isinstance(v, int) else list(v)
    pad = each(given.get("padding", 0))
    text = f"stride={each(given.get('stride', 1))}, pad={pad + pad}, dilation={each(given.get('dilation', 1))}, groups={given.get('groups', 1)}"
    op = (F.conv1d, F.conv2d, F.conv3d)[nd - 1]
    ins = [rand(*x), rand(*w)] + ([rand(w[0])] if bias else [])
    terms = int(torch.tensor(w[1:]).prod())
    check("conv", ins, lambda *t: op(*t, **given), text, low=LOW, factor=4.0, terms=terms)
assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_convolution(seed: int) -> None:
    assert child(CONV, OM_DEVICE="cuda-fake", OM_FAKE_SEED=str(seed)) == "done\n"


ELEMENTS = """
import torch, engine
from cuda import fake
def run(x, idx, axis, before=""):
    name = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bfloat16: "bf16"}
    text = f"graph {{\\n input x: {name[x.dtype]}{list(x.shape)}\\n input i: {name[idx.dtype]}{list(idx.shape)}\\n{before} y = gather_elements({'t' if before else 'x'}, i) {{axis={axis}}}\\n output y\\n}}"
    return engine.run(text, [x, idx])[0][0]
g = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16):
    for shape, ishape, axis in (((7, 5), (3, 5), 0), ((7, 5), (7, 9), 1), ((4, 6, 3), (2, 11, 3), 1), ((300,), (700,), 0), ((4, 3), (0, 3), 0)):
        for wide in (torch.int64, torch.int32):
            x = torch.randint(0, 99, shape, generator=g).to(dtype)
            i = torch.randint(0, shape[axis], ishape, generator=g)
            assert torch.equal(run(x, i.to(wide), axis), x.gather(axis, i)), (dtype, shape)
x, i = torch.randn(5, 7), torch.randint(0, 5, (7, 5), generator=g)
assert torch.equal(run(x, i, 1, " t = permute(x) {perm=[1, 0]}\\n"), x.T.gather(1, i))
assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
try:
    run(x, torch.tensor([[0, 1], [5, 9]]), 0)
except engine.EngineError as e:
    assert "gather_elements: index 5 at position 2 is out of range; 0 to 4 are allowed" in str(e), e
else:
    raise AssertionError("index 5 of 5")
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


@pytest.mark.parametrize("seed", [0, 5])
def test_elements_by_index(seed: int) -> None:
    assert child(ELEMENTS, OM_DEVICE="cuda-fake", OM_FAKE_SEED=str(seed)) == "done\n"


ROWS = """
import torch, engine
from cuda import fake
g = torch.Generator().manual_seed(0)
def run(x, idx, whole, s, axis):
    name = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}[x.dtype]
    text = (f"graph {{\\n input x: {name}{list(x.shape)}\\n input i: i64{list(idx.shape)}\\n input s: {name}{list(s.shape)}\\n e = expand(i) {{shape={list(whole)}}}\\n"
            f" y = scatter_elements(x, e, s) {{axis={axis}, reduce=1}}\\n output y\\n}}")
    return engine.run(text, [x, idx, s])[0][0]
for dtype, tol in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 8e-3)):
    for shape, own, whole, axis in (((11, 7), (300, 1), (300, 7), 0), ((3, 11, 8), (1, 90, 1), (3, 90, 8), 1), ((5,), (70,), (70,), 0), ((4, 9), (1, 1), (4, 1), 1),
                                    ((11, 7), (300, 1), (300, 3), 0), ((3, 11, 8), (3, 90, 1), (3, 90, 8), 1)):  # the last two: by elements
        x, s, i = torch.randn(shape, generator=g).to(dtype), torch.randn(whole, generator=g).to(dtype), torch.randint(0, shape[axis], own, generator=g)
        y, want = run(x, i, whole, s, axis), x.double().scatter_add(axis, i.expand(whole), s.double())
        assert (y.double() - want).abs().max() <= (tol if whole[-1] != 3 and own[0] != 3 else 40 * tol) * want.abs().max(), (dtype, shape)
assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
try:
    run(torch.randn(5, 7), torch.tensor([[0], [5]]), (2, 7), torch.randn(2, 7), 0)
except engine.EngineError as e:
    assert "scatter_elements: index 5 at position 7 is out of range; 0 to 4 are allowed" in str(e), e
else:
    raise AssertionError("index 5 of 5")
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


@pytest.mark.parametrize("seed", [0, 5])
def test_sums_of_rows_by_an_expanded_index(seed: int) -> None:
    assert child(ROWS, OM_DEVICE="cuda-fake", OM_FAKE_SEED=str(seed)) == "done\n"
