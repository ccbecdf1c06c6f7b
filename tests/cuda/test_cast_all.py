"""`cast_all` on the fake GPU: one launch (move.cu), the bits of single casts there and on the CPU."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import torch, engine
from cuda import fake
from device import steps
TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
def bits(t):
    return t.contiguous().view(BITS[t.element_size()])
def numbers(n, name, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(-30, 20, (n,), generator=g)
    odd = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, 65519.9, 65520.0, 1e-8, 2.0**-133, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 2.0**-25]
    x[: len(odd)] = torch.tensor(odd, dtype=torch.float64)[:n]
    return x.to(TYPES[name])
def outputs(device, text, ins):
    model = steps.Model.text(steps.cx(device), text)
    try:
        return model.step(ins).outputs
    finally:
        model.free()
"""

TAIL = """
assert fake.count(fake.FAILURES) == 0, fake.message()
assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
print("done")
"""

BITS = """
def compare(sizes, pairs, view=""):
    lines, results, ins = [], [], []
    for k, (n, (a, b)) in enumerate(zip(sizes, pairs, strict=True)):
        lines.append(f"input x{k}: {a}[{n}]")
        if view:
            lines.append(f"v{k} = {view.replace('SIZE', str(n))}".replace("X", f"x{k}"))
        ins.append(numbers(n, a, k))
    of = "v" if view else "x"
    names = [f"y{k}" for k in range(len(ins))]
    kinds = ", ".join(str(engine.TORCH.index(TYPES[b])) for _, b in pairs)
    joined = f"{', '.join(names)} = cast_all({', '.join(f'{of}{k}' for k in range(len(ins)))}) {{out_dtype=[{kinds}]}}"
    single = [f"{n} = cast({of}{k}) {{to={b}}}" for k, (n, (_, b)) in enumerate(zip(names, pairs))]
    text = lambda body: "\\n".join(["graph {", *lines, *body, *(f"output {n}" for n in names), "}"])
    assert engine.Graph.parse(text([joined])).verify().text().count(" = cast_all(") == 1
    before = fake.ran("cast_all")
    got = outputs("cuda-fake", text([joined]), ins)
    ran = fake.ran("cast_all") - before
    for device, body in (("cuda-fake", single), ("cpu", single), ("cpu", [joined])):
        for k, (x, y) in enumerate(zip(got, outputs(device, text(body), ins), strict=True)):
            assert x.dtype == y.dtype and torch.equal(bits(x), bits(y)), (device, k, sizes[k], pairs[k])
    oracle = engine.Graph.parse(text([joined])).run(ins, len(ins))
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(got, oracle, strict=True))
    return ran
every = [(a, b) for a in TYPES for b in TYPES]
for sizes in ((0, 1, 7, 8, 9, 4095, 4096, 4097), (9001, 0, 3, 16, 8191, 2, 4104, 1)):
    for first in range(0, len(every), 8):
        assert compare(sizes, every[first : first + 8]) == 1
        assert compare(sizes[::-1], every[first : first + 8]) == 1
assert compare([13 * k + 1 for k in range(64)], (every * 4)[:64]) == 1  # as many as a node may have
assert compare([0, 0], [("f32", "bf16")] * 2) == 0                      # nothing to do: no launch
sixteen = [(a, b) for a in ("f32", "bf16") for b in TYPES]
assert compare([40] * 8, sixteen, "slice(X) {axis=0, start=[1], end=[SIZE], step=1}") == 1  # begins between two accesses
assert compare([4999] * 8, sixteen, "slice(X) {axis=0, start=[3], end=[SIZE], step=1}") == 1
assert compare([40] * 8, sixteen, "slice(X) {axis=0, start=[1], end=[SIZE], step=2}") == 0  # not dense: a launch each
"""


@pytest.mark.parametrize("seed,late", [(0, 1), (5, 0)])
def test_the_bits_of_single_casts(seed: int, late: int) -> None:
    assert child(HEAD + BITS + TAIL, OM_FAKE_SEED=str(seed), OM_FAKE_LATE=str(late)) == "done\n"
