"""What backward computes again is a set of flags that anybody may hand in (om_model_variant_again): two sets of one
model stand side by side, and every legal set has the same bits of gradients."""

from __future__ import annotations

import ctypes as C
import random
from pathlib import Path

import pytest
import torch
from device import steps

import engine
from engine import RANK, lib
from opcheck import rand

CHEAP, LAYERS = 0, 1


class Row(C.Structure):
    _fields_ = [("illegal", C.c_char_p), ("op", C.c_char_p), ("module", C.c_char_p), ("file", C.c_char_p), ("line", C.c_int), ("output", C.c_int),
                ("dtype", C.c_uint8), ("rank", C.c_uint8), ("dim", C.c_int64 * RANK), ("kept", C.c_bool)]


lib.om_choice_value.restype = Row
lib.om_choice_policy.restype = C.POINTER(C.c_uint8)
lib.om_choice_value.argtypes = lib.om_choice_policy.argtypes = [C.c_void_p, C.c_int]
lib.om_choice_values.argtypes = lib.om_choice_free.argtypes = [C.c_void_p]
lib.om_choice_free.restype = None
lib.om_choice_clusters.argtypes = [C.c_void_p] * 4
lib.om_choice_set.argtypes = [C.c_void_p, C.c_void_p, C.c_char_p, C.c_int, C.c_int, C.c_char_p]


class Choice:
    def __init__(self, model: steps.Model, wanted: list[int], arriving: list[int]) -> None:
        self.model, self.wanted, self.arriving, self.p = model, wanted, arriving, C.c_void_p()
        model.cx.check(lib.om_choice_new(model.cx.p, model.p, bytes(wanted), bytes(arriving), C.byref(self.p)))
        self.n = lib.om_choice_values(self.p)
        self.rows = [lib.om_choice_value(self.p, i) for i in range(self.n)]
        self.legal = [i for i, row in enumerate(self.rows) if not row.illegal]

    def policy(self, which: int) -> bytes:
        return bytes(lib.om_choice_policy(self.p, which)[: self.n])

    def variant(self, flags: bytes, group: list[int] | None = None) -> int:
        v, m = C.c_int(), self.model
        groups = None if group is None else (C.c_int * len(group))(*group)
        m.cx.check(lib.om_model_variant_again(m.cx.p, m.p, bytes(self.wanted), bytes(self.arriving), groups, flags, len(flags), C.byref(v)))
        return v.value

    def free(self) -> None:
        lib.om_choice_free(self.p)


def with_variant(model: steps.Model, v: int, *args: object, **kw: object) -> steps.Step:
    """A step of variant v, whatever steps.Model would have asked for."""
    own = model.variant
    model.variant = lambda *a, **k: v  # type: ignore[method-assign]
    try:
        return model.step(*args, **kw)  # type: ignore[arg-type]
    finally:
        model.variant = own  # type: ignore[method-assign]


MLP = """graph {
  sym s0 = x[0]
  input x: f64[s0, 5]
  param w: f64[5, 7]
  param v: f64[7, 3]
  buffer b: f64[7]
  h = matmul(x, w, _)
  a = gelu_tanh(h)
  d = dropout(a) {p=0.5} rng=1
  r = relu(d)
  m = reduce_mean(r) {axes=[0]}
  n = add(b, m)
  y = matmul(r, v, _)
  output y
  write n -> b
}"""


def test_what_there_is_to_choose_from() -> None:
    model = steps.Model.text(steps.cx("cpu"), MLP)
    c = Choice(model, [0, 1, 1, 0], [1])
    ops = {i: (c.rows[i].op or b"").decode() for i in range(c.n)}
    assert {ops[i] for i in c.legal} >= {"matmul", "gelu_tanh", "dropout", "relu"}
    kept = {ops[i] for i in range(c.n) if c.rows[i].kept}
    assert "matmul" in kept and "permute" not in kept
    why = {ops[i]: (c.rows[i].illegal or b"").decode() for i in range(c.n) if c.rows[i].illegal}
    assert "write" in why["add"] and "input or a constant" in why[""], why
    first = next(c.rows[i] for i in c.legal if ops[i] == "matmul")
    assert list(first.dim[: first.rank]) == [-1, 7]
    again = Choice(model, [0, 1, 1, 0], [1])
    assert [bytes(r) for r in again.rows] != [] and [(r.op, r.output, r.kept) for r in again.rows] == [(r.op, r.output, r.kept) for r in c.rows]
    again.free()
    c.free()
    model.free()


def test_the_set_is_the_key() -> None:
    model = steps.Model.text(steps.cx("cpu"), MLP)
    c = Choice(model, [0, 1, 1, 0], [1])
    cheap = model.variant([0, 1, 1, 0], [1], again=CHEAP)
    assert c.variant(c.policy(CHEAP)) == cheap, "a policy's own set is the policy's variant"
    assert model.variant([0, 1, 1, 0], [1], again=LAYERS) == cheap, "no layers: both policies choose the same"
    nothing = c.variant(bytes(c.n))
    everything = c.variant(bytes(int(i in c.legal) for i in range(c.n)))
    assert len({cheap, nothing, everything}) == 3
    assert c.variant(bytes(c.n)) == nothing and c.variant(bytes(2 * int(i in c.legal) for i in range(c.n))) == everything
    assert c.variant(bytes(c.n), [0, 1, 0, 0]) not in (cheap, nothing, everything), "segments are part of the key, too"
    nodes = {v: model.print(v).count(" = ") for v in (nothing, cheap, everything)}
    assert nodes[nothing] < nodes[everything]
    c.free()
    model.free()


def test_a_choice_outlives_the_context_it_was_listed_with() -> None:
    model = steps.Model.text(steps.cx("cpu"), MLP)
    c, n = Choice(model, [0, 1, 1, 0], [1]), C.c_int()
    other = engine.Ctx()
    other.check(lib.om_choice_clusters(other.p, c.p, None, C.byref(n)))
    assert n.value > 0
    with pytest.raises(engine.EngineError, match="there is no cluster nothing"):
        other.check(lib.om_choice_set(other.p, c.p, b"nothing", 1, -1, bytes(c.n)))
    del other  # and what it had allocated
    assert len(c.policy(CHEAP)) == c.n
    c.free()
    model.free()


def test_illegal_sets_are_refused() -> None:
    model = steps.Model.text(steps.cx("cpu"), MLP)
    c = Choice(model, [0, 1, 1, 0], [1])
    add = next(i for i in range(c.n) if c.rows[i].op == b"add")
    with pytest.raises(engine.EngineError, match="of add.*cannot be computed again in backward: a write stores it"):
        c.variant(bytes(int(i == add) for i in range(c.n)))
    with pytest.raises(engine.EngineError, match=f"a set of {c.n - 1} flags for a graph of {c.n} values"):
        c.variant(bytes(c.n - 1))
    assert c.variant(bytes(c.n)) >= 0
    c.free()
    model.free()


@pytest.mark.parametrize("device", ["cpu", "checking"])
def test_random_sets_of_an_mlp(device: str) -> None:
    model, r = steps.Model.text(steps.cx(device), MLP), random.Random(5)
    c = Choice(model, [0, 1, 1, 0], [1])
    ins, dys = [rand(6, 5), rand(5, 7), rand(7, 3), rand(7)], [rand(6, 3)]
    want = with_variant(model, c.variant(bytes(c.n)), ins, [0, 1, 1, 0], dys, seed=3)
    for _ in range(20):
        flags = bytes(int(i in c.legal and r.random() < 0.5) for i in range(c.n))
        got = with_variant(model, c.variant(flags), ins, [0, 1, 1, 0], dys, seed=3)
        assert not (found := steps.difference(want, got)), f"{found} with {flags.hex()}"
    c.free()
    model.free()


def test_random_sets_of_a_gpt(tmp_path: Path) -> None:
    """Side by side in one model, forwards and backwards of several sets between each other."""
    data, module, ids = steps.gpt2(tmp_path)
    model, r = steps.Model.onnx(steps.cx("cpu"), data), random.Random(7)
    io = [model.input(i) for i in range(model.n_in)]
    named = {k: v.detach().clone() for k, v in module.state_dict().items()}
    ins = [ids.clone() if x.role == steps.INPUT else named[x.name.decode()] for x in io]
    wanted = [int(x.role == steps.PARAM and x.differentiable) for x in io]
    dys = [torch.ones(()) if not i else None for i in range(model.n_out)]
    c = Choice(model, wanted, [int(d is not None) for d in dys])
    sets = [bytes(c.n), c.policy(CHEAP), c.policy(LAYERS), bytes(int(i in c.legal) for i in range(c.n))]
    for chance in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
        sets += [bytes(int(i in c.legal and r.random() < chance) for i in range(c.n)) for _ in range(2)]
    variants = [c.variant(flags) for flags in sets]
    assert len(set(variants)) == len(set(sets)) > 8
    want = with_variant(model, variants[0], ins, wanted, dys, seed=1)
    assert sum(wanted) == len(want.grads) > 20 and any(float(g.abs().sum()) > 0 for g in want.grads.values())
    for i in r.sample(range(len(sets)), len(sets)) + [0]:
        got = with_variant(model, variants[i], ins, wanted, dys, seed=1)
        assert not (found := steps.difference(want, got)), f"{found} of set {i}: {sets[i].hex()}"
    c.free()
    model.free()
