"""The graph engine on the fake GPU (fake_gpu.cpp): lowered calls, emulated kernels. Whole models: test_models_on_fake.py.

Everything runs in processes of its own: the optimizers' tests have another libcuda.so.1. All operator rows:
`OM_DEVICE=cuda-fake pytest tests/ops`."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake


GRAPHS = """
import torch, engine
from cuda import fake
from device import steps
from graphs import random_graph
def one(seed, device):
    text, ins, n_out, _ = random_graph(seed)
    model = steps.Model.text(steps.cx(device), text)
    g = torch.Generator().manual_seed(seed + 1)
    dys = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) for y in model.step(ins, seed=3, write=False).outputs]
    s = model.step(ins, [1, 1, 1] + [0] * (len(ins) - 3), dys, drop=seed % 5 < 2, seed=3, again=seed // 2 % 2, move=seed % 3 == 1)
    model.free()
    return s
for seed in range({first}, {first} + 30):
    a, b = one(seed, "cpu"), one(seed, "cuda-fake")
    for x, y in zip([*a.outputs, *a.inputs, *a.grads.values()], [*b.outputs, *b.inputs, *b.grads.values()], strict=True):
        top = x.double().abs().max().item() if x.numel() else 0
        unit = {{torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}}.get(x.dtype, 0)
        assert x.dtype == y.dtype and torch.allclose(x.double(), y.double(), rtol=0, atol=unit * (1 + top), equal_nan=True), (seed, random_graph(seed)[0])
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done", fake.count(fake.LAUNCHES))
"""


@pytest.mark.parametrize("first,seed,late", [(0, 0, 1), (30, 5, 1), (60, 8, 0)])
def test_random_graphs(first: int, seed: int, late: int) -> None:
    """The CPU's numbers, threads and blocks in several orders, as late as is allowed."""
    out = child(GRAPHS.format(first=first), OM_FAKE_SEED=str(seed), OM_FAKE_LATE=str(late))
    assert out.startswith("done") and int(out.split()[1]) > 300, out


OPERATORS = """
import torch, engine
from cuda import fake
from opcheck import check, rand
import torch.nn.functional as F
check("softmax", [rand(3, 37)], lambda x: torch.softmax(x, 1), "axis=1")
check("reduce_sum", [rand(3, 5, 700)], lambda x: x.sum((0, 2)), "axes=[0, 2]")
check("matmul", [rand(2, 70, 33), rand(33, 67)], lambda a, b: a @ b)
check("concat", [rand(3, 4), rand(3, 5)], lambda a, b: torch.cat([a, b], 1), "axis=1")
q = [rand(2, 3, 37, 8, per_axis=k) for k in (1, 2, 3)]
text = "graph {\\n" + "".join(f" input {n}: f64[2, 3, 37, 8]\\n" for n in "qkv") + " y, l = attention(q, k, v) {causal=1}\\n output y\\n}"
(y,), grads = engine.run(text, q, dys=[torch.ones_like(q[0])])
xs = [t.clone().requires_grad_() for t in q]
want = F.scaled_dot_product_attention(*xs, is_causal=True)
want.sum().backward()
assert torch.allclose(y, want, atol=1e-12) and all(torch.allclose(g, x.grad, atol=1e-12) for g, x in zip(grads, xs))
assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


def test_operators_run_in_kernels() -> None:
    assert child(OPERATORS, OM_DEVICE="cuda-fake", OM_FAKE_SEED="3") == "done\n"


HOST = """
import torch, engine
from cuda import fake
x = torch.randn(1, 1, 3, 300, dtype=torch.float64)  # more than the shared memory of a block holds
(y,), _ = engine.run("graph {\\n input x: f64[1, 1, 3, 300]\\n y, l = attention(x, x, x) {causal=1}\\n output y\\n}", [x], device="cuda-fake")
assert torch.allclose(y, torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)) and fake.host_ops(engine.lib) == ["attention"]
print("done")
"""


def test_what_has_no_kernel_is_the_cpus_and_named() -> None:
    assert child(HOST) == "done\n"


TRAINS = """
import torch, graph_correct
from cuda import fake
from ortmodule import ORTModule
fake.late(False)
graph_correct.stand_in()
class Largest(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(40000, generator=torch.Generator().manual_seed(0)))
    def forward(self, x):
        return (self.w * x).topk(20000).values.tanh()
ours, eager = Largest(), Largest()
run = ORTModule(ours, strict=True)
for k in range(3):
    for net, call in ((ours, run), (eager, eager)):
        call(torch.tensor(1.0 + k)).sum().backward()
        with torch.no_grad():
            net.w -= 0.1 * net.w.grad
        net.w.grad = None
assert torch.allclose(ours.w, eager.w, atol=1e-6)
report = run.report()
assert report.on_cpu == ["topk"] and "on the CPU for the GPU: topk" in str(report) and not report.eager, str(report)
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


def test_a_model_with_such_an_operator_trains_and_its_report_says_so() -> None:
    assert child(TRAINS).endswith("done\n")


FAULT = """
import torch, engine
from cuda import fake
for op, text in (("index 11 at position 1", "y = gather(x, i) {axis=0}"), ("label 11 in row 1", "y, l, d = cross_entropy(x, i)")):
    try:
        engine.run(f"graph {{\\n input x: f32[7, 5]\\n input i: i64[7]\\n {text}\\n output y\\n}}", [torch.randn(7, 5), torch.tensor([0, 11, 2, 12, 0, 0, 0])], device="cuda-fake")
    except engine.EngineError as e:
        assert op in str(e), e
    else:
        raise AssertionError(op)
(y,), _ = engine.run("graph {\\n input x: f32[3]\\n y = neg(x)\\n output y\\n}", [torch.ones(3)], device="cuda-fake")
assert y.tolist() == [-1] * 3  # told once
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_an_index_out_of_range_is_named(seed: int) -> None:
    """The first of them, whichever thread or block comes first."""
    assert child(FAULT, OM_FAKE_SEED=str(seed)) == "done\n"


SHRINK = """
import torch, engine
from cuda import fake
def less(r):
    {change}
fake.change = less
try:
    engine.run("graph {{\\n input x: f32[40]\\n y = neg(x)\\n output y\\n}}", [torch.ones(40)], device="cuda-fake")
except engine.EngineError as e:
    print(e)
"""


@pytest.mark.parametrize("change,says", [("r[0].size -= 4", "reads memory the launch did not declare"), ("r[1].size -= 4", "writes memory the launch did not declare"),
                                         ("r[1].mode = 1", "writes memory the launch did not declare"), ("r[0].size += 4096", "leaves its block"), ("pass", "")])
def test_kernels_are_held_to_what_launches_declare(change: str, says: str) -> None:
    out = child(SHRINK.format(change=change))
    assert says in out and bool(says) == bool(out), out
