"""om_model_fit: of random graphs, sizes and budgets, the variant's step takes what was said and no more than asked for,
computes less again when more is allowed, and has the bits of the variant without a budget (csrc/run/budget.c)."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import pytest
import torch
from device import steps

import engine
from engine import lib
from opcheck import rand


class Memory(C.Structure):
    _fields_ = [(name, C.c_int64) for name in ("peak", "released", "kept", "workspace", "outputs", "gradients", "loans", "placed")]


class Fit(C.Structure):
    _fields_ = [("variant", C.c_int), ("memory", Memory), ("bytes", C.c_int64), ("most", C.c_int64), ("least", C.c_int64),
                ("again_us", C.c_double), ("step_us", C.c_double)]  # fmt: skip


lib.om_model_fit.argtypes = [C.c_void_p, C.c_void_p, C.c_char_p, C.c_char_p, C.c_void_p, C.c_void_p, C.c_int64, C.c_double, C.c_void_p]
lib.om_model_memory.argtypes = [C.c_void_p, C.c_void_p, C.c_int, C.c_void_p, C.c_void_p]


class Asked:
    """One model, gradients and inputs, and the budgets it is asked for."""

    def __init__(self, model: steps.Model, ins: list[torch.Tensor], wanted: list[int], dys: list[torch.Tensor | None],
                 group: list[int] | None = None) -> None:  # fmt: skip
        self.model, self.ins, self.wanted, self.dys, self.group = model, ins, wanted, dys, group
        self.arriving = [int(d is not None) for d in dys]

    def fit(self, size: int, share: float = 0.0, ins: list[torch.Tensor] | None = None) -> Fit:
        found, m = Fit(), self.model
        given = steps.array([engine.tensor(t) for t in ins or self.ins])
        group = None if self.group is None else (C.c_int * len(self.group))(*self.group)
        m.cx.check(lib.om_model_fit(m.cx.p, m.p, bytes(self.wanted), bytes(self.arriving), group, given, size, share, C.byref(found)))
        if found.variant >= 0:
            memory = Memory()
            m.cx.check(lib.om_model_memory(m.cx.p, m.p, found.variant, given, C.byref(memory)))
            assert bytes(memory) == bytes(found.memory), "the plan that runs takes something else"
            assert found.memory.peak <= found.bytes
        return found

    def step(self, variant: int, ins: list[torch.Tensor] | None = None, dys: list[torch.Tensor | None] | None = None) -> steps.Step:
        own = self.model.variant
        self.model.variant = lambda *a, **k: variant  # type: ignore[method-assign]
        try:
            return self.model.step(ins or self.ins, self.wanted, dys or self.dys, group=self.group, seed=3)
        finally:
            self.model.variant = own  # type: ignore[method-assign]

    def sweep(self, n: int = 12) -> list[Fit]:
        """From the smallest budget to the largest."""
        ends = self.fit(1)
        assert ends.variant == -1 and 0 < ends.least <= ends.most
        found = [self.fit(ends.least + (ends.most - ends.least) * k // (n - 1)) for k in range(n)]
        assert found[0].memory.peak == ends.least and found[-1].memory.peak == ends.most
        times = [f.again_us for f in found]
        assert times == sorted(times, reverse=True) and times[-1] == 0, times
        assert self.fit(ends.least - 1).variant == -1 and self.fit(-1, 1.0).bytes == ends.most
        want = self.step(found[-1].variant)
        for variant in {f.variant for f in found}:
            assert not (difference := steps.difference(want, self.step(variant))), difference
        return found


DEEP = """graph {
  sym s0 = x[0]
  input x: f64[s0, 40]
  buffer b: f64[40]
""" + "".join(f"  param w{i}: f64[40, 40]\n" for i in range(9)) + "".join(f"""  h{i} = matmul({"x" if not i else f"r{i - 1}"}, w{i}, _)
  a{i} = gelu_tanh(h{i})
  d{i} = dropout(a{i}) {{p=0.5}} rng={i + 1}
  r{i} = tanh(d{i})
""" for i in range(8)) + """  m = reduce_mean(r2) {axes=[0]}
  n = add(b, m)
  q = mul(r7, b)
  y = matmul(q, w8, _)
  output y
  write n -> b
}"""  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "checking"])
@pytest.mark.parametrize("group", [None, [2, 0, *[2] * 5, *[0] * 4]])
def test_a_chain(device: str, group: list[int] | None) -> None:
    model = steps.Model.text(steps.cx(device), DEEP)
    ask = Asked(model, [rand(1500, 40), rand(40), *[rand(40, 40) for _ in range(9)]], [1, 0, *[1] * 9], [rand(1500, 40)], group)
    found = ask.sweep()
    assert len({f.variant for f in found}) >= 3 and found[0].memory.peak < 0.9 * found[-1].memory.peak
    assert found[0].memory.kept < 0.7 * found[-1].memory.kept
    small = [rand(7, 40), *ask.ins[1:]]
    other = ask.fit(found[0].bytes, ins=small)
    assert other.again_us == 0 and other.variant == found[-1].variant, "a smaller batch fits as it is"
    large = [rand(2500, 40), *ask.ins[1:]]
    need = ask.fit(1, ins=large)
    assert need.variant == -1 and need.least > found[0].memory.peak
    for size in (need.least, (need.least + need.most) // 2):
        fit = ask.fit(size, ins=large)
        assert fit.variant >= 0
        dys: list[torch.Tensor | None] = [rand(2500, 40)]
        full = ask.fit(need.most, ins=large)
        assert not steps.difference(ask.step(full.variant, large, dys), ask.step(fit.variant, large, dys))
    again = ask.fit(found[9].bytes)
    assert again.memory.peak <= found[9].bytes and again.again_us <= found[9].again_us
    model.free()


def test_a_gpt(tmp_path: Path) -> None:
    data, module, ids = steps.gpt2(tmp_path)
    model = steps.Model.onnx(steps.cx("cpu"), data)
    io = [model.input(i) for i in range(model.n_in)]
    named = {k: v.detach().clone() for k, v in module.state_dict().items()}
    ins = [ids.clone() if x.role == steps.INPUT else named[x.name.decode()] for x in io]
    wanted = [int(x.role == steps.PARAM and x.differentiable) for x in io]
    ask = Asked(model, ins, wanted, [torch.ones(()) if not i else None for i in range(model.n_out)])
    found = ask.sweep(6)
    assert len({f.variant for f in found}) >= 2
    model.free()


def test_sizes_that_contradict_are_an_error() -> None:
    model = steps.Model.text(steps.cx("cpu"), DEEP)
    ask = Asked(model, [rand(1500, 40), rand(40), *[rand(40, 40) for _ in range(9)]], [1, 0, *[1] * 9], [rand(1500, 40)])
    with pytest.raises(engine.EngineError, match="of rank 2 expected"):
        ask.fit(1, ins=[rand(1500), *ask.ins[1:]])
    with pytest.raises(engine.EngineError):
        ask.fit(1, ins=[rand(1500, 41), *ask.ins[1:]])
    assert ask.fit(-1, 1.0).variant >= 0
    model.free()
