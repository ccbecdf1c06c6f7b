"""Optimizer steps as operators of the graph on the fake GPU (csrc/cuda/update.cu): weights and moments as the CPU's plan
leaves them, in their own memory where plans allow that. Random groups in f64; each step with gradients that are not
finite, and operands of 16 bits."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import torch, engine
from cuda import fake
from device import steps
from graphs import STEPS, random_update, scalars
cxs = {device: steps.cx(device) for device in ("cpu", "cuda-fake")}
def compare(text, ins, near):
    made = []
    for cx in cxs.values():
        model = steps.Model.text(cx, text)
        made.append(model.step(ins))
        model.free()
    changed = 0
    for k, (a, b, was) in enumerate(zip(made[0].outputs + made[0].inputs, made[1].outputs + made[1].inputs, [None] * len(made[0].outputs) + ins, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=near, atol=near, equal_nan=True), (k, a, b, text)
        changed += was is not None and not torch.allclose(a, was, rtol=0, atol=0, equal_nan=True)
    return changed
def done():
    assert fake.count(fake.FAILURES) == 0, fake.message()
    assert not fake.host_ops(engine.lib), fake.host_ops(engine.lib)
    print("done")
"""

RANDOM = """
assert sum(compare(*random_update(seed), 1e-12) for seed in range(FIRST, FIRST + 20)) > 20
done()
"""

MIXED = """
NAME = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
for weight, grad, moment in [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32, torch.float32), (torch.float16, torch.float16, torch.bfloat16), (torch.float64,) * 3]:
    for op, (takes, makes) in STEPS.items():
        for on in (True, False):
            types = {"w": weight, "g": grad, "m": moment, "v": moment, "h": torch.float16}
            gen = torch.Generator().manual_seed(3)
            x = {k: torch.rand(37, 61, generator=gen, dtype=torch.float64).to(types[k]) for k in takes}
            if op == "lamb_step":  # elements that are left out
                x["g"][3, 5], x["g"][36, 60] = float("inf"), float("nan")
                x["w"][1, 1] = 0
            if "m" in x:
                x["m"] = x["m"].t().contiguous().t()
            outs = (["s"] if op == "lamb_step" else []) + [k + "1" for k in makes]
            lines = [f" param {k}: {NAME[types[k]]}[37, 61]" for k in takes]
            node = f" {', '.join(outs)} = {op}({scalars(op)}, {', '.join(takes)}) {{out_dtype=[{', '.join('0' for _ in outs)}]}}"
            text = "\\n".join(["graph {", " input lr: f32[]", " input step: i64[]", " input on: bool[]", *lines, node, *(f" write {k}1 -> {k}" for k in makes if k in takes), "}"])
            unit = {torch.float64: 1e-13, torch.float32: 2e-6}.get(weight, 1e-2)
            changed = compare(text, [torch.tensor(0.1), torch.tensor(3), torch.tensor(on), *(x[k] for k in takes)], 1e-2 if grad != weight or moment == torch.bfloat16 else unit)
            assert bool(changed) == on, (op, weight)
done()
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_groups(seed: int) -> None:
    assert child(HEAD + RANDOM.replace("FIRST", str(20 * seed)), OM_FAKE_SEED=str(seed)) == "done\n"


def test_types_and_gradients_that_are_not_finite() -> None:
    assert child(HEAD + MIXED, OM_FAKE_SEED="1") == "done\n"
