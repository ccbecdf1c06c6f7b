"""Blocks that steps repeat (csrc/cuda/blocks.h) on the fake GPU, whose own pool never hands an address out again while
work is queued."""

from __future__ import annotations

from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import ctypes as C, random, torch, engine
from cuda import fake
from device import steps
lib, cx = engine.lib, steps.cx("cuda-fake")
def get(size):
    b = lib.om_checking_get(cx.p, C.c_size_t(size))
    if not b:
        cx.check(1)
    return b
def at(b):
    return b.contents.data
"""

SOURCE = """
# the same addresses in whatever order they come back
r, sizes, first = random.Random(1), [64, 100, 64, 4096, 100, 64], None
for turn in range(20):
    blocks = [get(n) for n in sizes]
    addresses = [at(b) for b in blocks]
    assert first is None or addresses == first, turn
    first = addresses
    r.shuffle(blocks)
    for b in blocks:
        lib.om_block_put(b)
assert fake.calls("cuMemAllocAsync") == len(sizes) and fake.calls("cuMemFreeAsync") == 0
# another stream has its own
s = C.c_void_p()
assert fake.gpu.cuCtxPushCurrent_v2(None) == 0 and fake.gpu.cuStreamCreate(C.byref(s), 1) == 0
fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
lib.om_cuda_stream(s)
b = get(64)
assert at(b) not in first
lib.om_block_put(b)
lib.om_cuda_stream(None)
x, y = get(8), get(8)
lib.om_block_put(x), lib.om_block_put(y)
# no memory: all that is kept goes, and the block is there
freed = fake.calls("cuMemFreeAsync")
fake.fail("cuMemAllocAsync", 1, 2)
b = get(5000)
assert fake.calls("cuMemFreeAsync") - freed == 9, fake.calls("cuMemFreeAsync") - freed
lib.om_block_put(b)
fake.fail("cuMemAllocAsync", 1, 2)
try:  # nothing is kept of any use the second time
    lib.om_cuda_keep(C.c_bool(True))
    get(6000)
except engine.EngineError as e:
    assert "out of memory: 6000 bytes" in str(e), e
else:
    raise AssertionError
print("done")
"""

BOUND = """
# sizes that never come again: together at most twice the most that was in use
for k in range(200):
    blocks = [get(1000 + 8 * k), get(3000 + 8 * k)]
    for b in blocks:
        lib.om_block_put(b)
    fake.late(True)
    assert fake.count(fake.BLOCKS) <= 1 + 6, (k, fake.count(fake.BLOCKS))  # 1: the fault word
lib.om_cuda_keep(C.c_bool(False))
fake.late(True)
assert fake.count(fake.BLOCKS) == 1
b = get(64)
lib.om_block_put(b)
fake.late(True)
assert fake.count(fake.BLOCKS) == 1 and fake.count(fake.FAILURES) == 0, fake.message()
# what nobody asks for goes
lib.om_cuda_keep(C.c_bool(True))
big = [get(10_000), get(10_000)]
lib.om_block_put(get(77))
for k in range(5000):
    lib.om_block_put(get(50))
b = get(60)
fake.late(True)
assert fake.count(fake.BLOCKS) == 1 + 2 + 2, fake.count(fake.BLOCKS)  # 77 has gone
print("done")
"""


def test_the_same_addresses_again() -> None:
    assert child(HEAD + SOURCE, OM_FAKE_KEEP="1") == "done\n"


def test_what_is_kept_is_bounded() -> None:
    assert child(HEAD + BOUND, OM_FAKE_KEEP="1") == "done\n"
