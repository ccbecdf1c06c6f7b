"""Gradients in the place of activations (docs/MEMORY.md) on the fake GPU: the values of the CPU's plan, parts of the
arena's block, which is given back with the last of them, in the order of its stream; record_stream of a part is one of
the block."""

from __future__ import annotations

import pytest
from cuda.children import TESTS, child, on_fake

pytestmark = on_fake

SOURCE = """
import ctypes as C, torch, engine
from cuda import fake
from device import steps
lib = engine.lib
N, LAYERS = 48, 24
text = ["graph {", f" input x0: f64[{N}, {N}]", *(f" param w{k}: f64[{N}, {N}]" for k in range(LAYERS))]
for k in range(LAYERS):
    text += [f" y{k} = matmul(x{k}, w{k})", f" x{k + 1} = tanh(y{k})"]
text = "\\n".join([*text, f" output x{LAYERS}", "}"])
rand = lambda seed: torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 8
arena, inside, all_parts = [], 0, 0
grad, backward = lib.om_run_grad, lib.om_run_backward
def backward_seen(cx, state, data, size, *rest):
    arena[:] = [data.value, size.value]
    return backward(cx, state, data, size, *rest)
def grad_seen(run, i, t, b):
    global inside, all_parts
    s = grad(run, i, t, b)
    at = t._obj.data
    if CUDA:
        all_parts += 1
        if arena[0] <= at < arena[0] + arena[1]:
            inside += 1
            assert lib.om_cuda_record_stream(0, C.c_void_p(at), stream) == 1  # the whole block waits for it
    return s
stream = C.c_void_p()
lib.om_run_backward, lib.om_run_grad = backward_seen, grad_seen
models = {d: steps.Model.text(steps.cx(d), text) for d in ("cpu", "cuda-fake")}
assert fake.gpu.cuCtxPushCurrent_v2(None) == 0 and fake.gpu.cuStreamCreate(C.byref(stream), 1) == 0
fake.gpu.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))
for turn in range(5):
    made = {}
    for d, model in models.items():
        CUDA = d != "cpu"
        group = [0, *(LAYERS - 1 - k for k in range(LAYERS))] if turn % 2 else None
        made[d] = model.step([rand(turn), *(rand(k + 9) for k in range(LAYERS))], [0] + [1] * LAYERS, [rand(turn + 50)], group, seed=turn, move=turn == 3)
    a, b = made["cpu"], made["cuda-fake"]
    assert torch.allclose(a.outputs[0], b.outputs[0], atol=1e-12) and set(a.grads) == set(b.grads) == set(range(1, LAYERS + 1))
    assert all(torch.allclose(a.grads[k], b.grads[k], rtol=1e-10, atol=1e-12) for k in a.grads)
    assert turn != 3 or inside == was, "the arena was moved: it is not the forward's"
    was = inside
assert LAYERS < inside < all_parts, (inside, all_parts)
for model in models.values():
    model.free()
assert fake.count(fake.FAILURES) == 0, fake.message()
print("done")
"""


SABOTAGED = {"OM_LIB": str(TESTS.parent / "build/sabotage.so")}


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_parts_of_the_arena(seed: int) -> None:
    assert child(SOURCE, OM_FAKE_SEED=str(seed)) == "done\n"


def test_the_same_with_graphs() -> None:
    assert child(SOURCE, OM_FAKE_REUSE="1", OM_FAKE_KEEP="1") == "done\n"


def test_a_place_that_is_not_free_yet_is_noticed() -> None:
    with pytest.raises(AssertionError):
        child(SOURCE, OM_SABOTAGE="plan.place", **SABOTAGED)
