"""Gradients in the arena (csrc/run/parts.c): networks whose weights are larger than what is computed with them, against
the interpreter, and who holds the memory."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import engine

_C = pytest.importorskip("ortmodule._C")
WIDE = 160


def network(seed: int) -> tuple[str, list[torch.Tensor]]:
    """Layers of matrices WIDE x WIDE, some used twice, transposed or added up, over a few rows."""
    r = random.Random(seed)
    rows, n = r.randint(1, 6), r.randint(2, 7)
    lines = ["graph {", f"  input x: f64[{rows}, {WIDE}]"]
    lines += [f"  param w{i}: f64[{WIDE}, {WIDE}]" for i in range(n)] + [f"  param b: f64[{WIDE}]"]
    at = "x"
    for i in range(n + r.randint(0, 3)):
        w, k = f"w{i if i < n else r.randrange(n)}", r.randrange(6)
        if k == 0:
            lines.append(f"  t{i} = permute({w}) {{perm=[1, 0]}}")
            w = f"t{i}"
        elif k == 1:
            lines.append(f"  t{i} = add({w}, w{r.randrange(n)})")
            w = f"t{i}"
        elif k == 2:
            lines.append(f"  t{i} = tanh({w})")
            w = f"t{i}"
        lines.append(f"  m{i} = matmul({at}, {w})")
        lines.append(f"  h{i} = {r.choice(['tanh', 'gelu', 'sin'])}(m{i})" if k != 3 else f"  h{i} = add(m{i}, b)")
        lines.append(f"  r{i} = add(h{i}, {at})" if k != 4 else f"  r{i} = mul(h{i}, b)")
        at = f"r{i}"
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, WIDE), *[(WIDE, WIDE)] * n, (WIDE,)]
    return "\n".join([*lines, f"  output {at}", "}"]), [torch.randn(s, generator=g, dtype=torch.float64) / 6 for s in shapes]


class Steps:
    """A model and its steps; gradients are the engine's own tensors."""

    def __init__(self, text: str, ins: list[torch.Tensor], group: list[int] | None = None) -> None:
        self.model, self.ins = _C.Model.from_text(text), ins
        self.variant = self.model.variant(bytes([1] * len(ins)), bytes([1]), group)
        self.info = self.model.variant_info(self.variant)

    def forward(self):
        run = self.model.forward(self.variant, self.ins, 3)
        assert run.resume() is None
        return (run.outputs(), *run.state())

    def backward(self, outs, state, arena, fleeting: bool = False) -> dict[int, torch.Tensor]:
        given = [t if i in self.info["reads_inputs"] else None for i, t in enumerate(self.ins)]
        read = [o if i in self.info["reads_outputs"] else None for i, o in enumerate(outs)]
        back = state.backward(arena, given, read, [torch.ones_like(outs[0])], None, fleeting)
        grads: dict[int, torch.Tensor] = {}
        kept: dict[int, torch.Tensor] = {}
        for s in range(self.info["segments"]):
            assert back.resume(s) is None
            for i, g in back.grads(s):
                grads[i], kept[i] = g, g.clone()
                g.fill_(float("nan"))  # nothing reads it any more
        for i, g in grads.items():
            assert torch.isnan(g).all(), "nothing writes it any more"
            g.copy_(kept[i])
        return grads

    def step(self) -> dict[int, torch.Tensor]:
        return self.backward(*self.forward())


def inside(arena: tuple[int, int], grads: dict[int, torch.Tensor]) -> list[int]:
    return [i for i, g in grads.items() if arena[0] <= g.data_ptr() < arena[1]]


def of(arena: torch.Tensor) -> tuple[int, int]:
    return arena.data_ptr(), arena.data_ptr() + arena.numel()


@pytest.mark.parametrize("block", range(8))
def test_they_are_the_interpreters_and_do_not_overlap(block: int) -> None:
    found = 0
    for seed in range(block * 15, block * 15 + 15):
        text, ins = network(seed)
        want = engine.run(engine.Graph.parse(text).apply("patterns"), ins, [1] * len(ins), [torch.ones_like(ins[0])], seed=3)[1]
        group = [random.Random(seed).randrange(3) for _ in ins] if seed % 2 else None
        steps = Steps(text, ins, group)
        outs, state, arena = steps.forward()
        where = of(arena)
        grads = steps.backward(outs, state, arena)
        for i, w in enumerate(want):
            if w is None:
                assert i not in grads
                continue
            torch.testing.assert_close(grads[i], w, rtol=1e-11, atol=1e-11, msg=lambda m: f"{m}\n{text}")  # noqa: B023
        spans = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in grads.values())
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        found += len(inside(where, grads))
    assert found > 3, "some lie in the arena"


def test_the_arena_lives_as_long_as_a_gradient_in_it() -> None:
    steps = Steps(*network(3))
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    outs, state, arena = steps.forward()
    where = of(arena)
    grads = steps.backward(outs, state, arena)
    mine = inside(where, grads)
    assert mine, "one lies there"
    last, want = grads[mine[0]], grads[mine[0]].clone()
    del outs, state, arena, grads
    assert _C.pool_stats()["live"] > before
    for _ in range(3):  # others take and write all the memory there is
        steps.step()
    assert torch.equal(last, want)
    del last
    assert _C.pool_stats()["live"] == before


def test_gradients_held_over_a_forward_are_the_last_ones_there() -> None:
    steps = Steps(*network(3))
    for held in (False, False, True, False):
        outs, state, arena = steps.forward()
        where = of(arena)
        grads = steps.backward(outs, state, arena)
        if held:
            assert inside(where, grads)
            forward = steps.forward()
            assert not inside(of(forward[2]), steps.backward(*forward))
            break
        assert inside(where, grads)
        del grads
    assert not inside(where, steps.step())


def test_fleeting_ones_lie_there_whatever_others_did() -> None:
    steps = Steps(*network(3))
    held = steps.step()
    for _ in range(3):  # gradients of a step before are held: those of this one are added to them
        outs, state, arena = steps.forward()
        where = of(arena)
        grads = steps.backward(outs, state, arena, fleeting=True)
        assert inside(where, grads)
        for i, g in grads.items():
            held[i] += g
        del grads, outs, state, arena
    outs, state, arena = steps.forward()
    assert not inside(of(arena), steps.backward(outs, state, arena)), "held ones were seen"
    outs, state, arena = steps.forward()
    kept = steps.backward(outs, state, arena, fleeting=True)
    assert inside(of(arena), kept)
    outs, state, arena = steps.forward()
    assert not inside(of(arena), steps.backward(outs, state, arena, fleeting=True)), "they were kept all the same"


def test_one_kept_elsewhere_is_not_held() -> None:
    """A saved-tensor hook that has copied it, a second backward: the memory is not the engine's."""
    steps = Steps(*network(3))
    outs, state, arena = steps.forward()
    copy = arena.clone()
    assert not inside(of(copy), steps.backward(outs, state, copy))
    assert inside(of(arena), steps.backward(outs, state, arena))
    outs, state, arena = steps.forward()
    want, copy = of(arena), arena.clone()
    del arena  # its memory has gone, and something else may lie there
    grads = steps.backward(outs, state, copy)
    assert not inside(of(copy), grads) and not inside(want, grads)


def test_with_a_budget_they_are_apart() -> None:
    text, ins = network(3)
    steps = Steps(text, ins)
    assert steps.model.memory(steps.variant, ins)["placed"] > 0
    fit = steps.model.fit(bytes([1] * len(ins)), bytes([1]), None, ins, 1 << 30, 0.0)
    assert fit["variant"] >= 0
    outs, state, arena = steps.forward()
    assert not inside(of(arena), steps.backward(outs, state, arena))


def test_activations_larger_than_what_is_saved_keep_them_apart() -> None:
    """An arena that lives on under its gradients would cost more."""
    text, ins = network(3)
    tall = text.replace(f"x: f64[{ins[0].shape[0]},", "x: f64[4000,")
    steps = Steps(tall, [torch.randn(4000, WIDE, dtype=torch.float64), *ins[1:]])
    outs, state, arena = steps.forward()
    assert not inside(of(arena), steps.backward(outs, state, arena))
    assert steps.model.memory(steps.variant, steps.ins)["placed"] == 0
    outs, state, arena = steps.forward()
    assert inside(of(arena), steps.backward(outs, state, arena, fleeting=True)), "but for those that nobody keeps"


def test_they_go_back_on_any_thread() -> None:
    steps = Steps(*network(5))
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    for _ in range(20):
        grads = list(steps.step().values())
        box = [grads[k::4] for k in range(4)]
        grads.clear()
        threads = [threading.Thread(target=part.clear) for part in box]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert _C.pool_stats()["live"] == before


def test_the_model_may_go_before_them() -> None:
    steps = Steps(*network(3))
    grads = steps.step()
    want = {i: g.clone() for i, g in grads.items()}
    del steps
    assert all(torch.equal(g, want[i]) for i, g in grads.items())
