"""The masks pass: what it takes for causal, window and padding masks, and that no number changes.

Three oracles, none of them the pass's own: the same graph without the passes (node by node, fp64), attention by its
definition in torch, and for random mask formulas a torch tensor built beside the graph text by the same random
choices."""

from __future__ import annotations

import ctypes as C
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import CAUSAL, FULL, LOWEST, Case, attentions, close, paddings, reference
from torch import Tensor, nn
from torch.nn import functional as F

import engine


def _hide(visible: Tensor, number: float) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, number)


def _prefix(m: dict[str, Tensor]) -> Tensor:
    return (m["k"] <= m["q"]) | (m["k"] < m["len"][:, None, None, None])


ODD: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Any], bool]] = {
    # formula -> attributes, does a mask stay
    "prefix": (_prefix, FULL, True),
    "every other": (lambda m: m["k"] <= 2 * m["q"], FULL, True),
    "strict": (lambda m: m["k"] < m["q"], dict(CAUSAL, offset=-1), False),
    "future only": (lambda m: m["k"] > m["q"], FULL, True),
    "diagonal": (lambda m: m["k"] == m["q"], FULL, True),
    "band": (lambda m: (m["q"] - m["k"]).abs() <= 2, dict(causal=True, offset=2, window=3), False),
    "chunks": (lambda m: (m["k"] // 3 == m["q"] // 3) & (m["k"] <= m["q"]), CAUSAL, True),
    "packed": (lambda m: (m["seg"][:, None, :, None] == m["seg"][:, None, None, :]) & (m["k"] <= m["q"]), CAUSAL, True),
    "positions": (lambda m: m["seg"][:, None, None, :] <= m["seg"][:, None, :, None], FULL, True),
    "causal or padding": (lambda m: (m["k"] <= m["q"]) | m["pad"][:, None, None, :], FULL, True),
    "double negation": (lambda m: ~((m["k"] > m["q"]) | ~m["pad"][:, None, None, :]), CAUSAL, True),
    "user": (lambda m: m["user"], FULL, True),
    "user and causal": (lambda m: m["user"] & (m["k"] <= m["q"]), CAUSAL, True),
    "nothing": (lambda m: (m["q"] >= 0) & (m["k"] < 7), FULL, False),
    "tril": (lambda m: torch.ones(7, 7, dtype=torch.bool).tril() & m["pad"][:, None, None, :], CAUSAL, True),
    "constant": (lambda m: torch.tensor([[j <= i + 1 for j in range(7)] for i in range(7)]), dict(CAUSAL, offset=1), False),
    "concat": (lambda m: (torch.cat([m["k"][..., :3], m["k"][..., 3:]], -1) <= m["q"]), CAUSAL, False),
    "diff": (lambda m: (torch.diff(torch.arange(7), prepend=torch.tensor([-1])) == 1)[None, None, None] & (m["k"] <= m["q"]), CAUSAL, False),
    "flipped": (lambda m: m["pad"].flip(1)[:, None, None, :] & (m["k"] <= m["q"]).expand(3, 1, 7, 7), CAUSAL, True),
    "product": (lambda m: (m["pad"].long()[:, None, None, :] * (m["k"] <= m["q"]).long()).bool(), CAUSAL, True),
    "alibi": (lambda m: torch.where(m["k"] <= m["q"], (m["k"] - m["q"]).double() * m["slope"][:, None, None], -math.inf), CAUSAL, True),
    "lowest": (lambda m: _hide(m["k"] <= m["q"], LOWEST), CAUSAL, False),
    "lowest strict": (lambda m: _hide(m["k"] < m["q"], LOWEST), FULL, True),
    "lowest padding": (lambda m: _hide((m["k"] <= m["q"]) & m["pad"][:, None, None, :], LOWEST), FULL, True),
    "lowest plus user": (lambda m: _hide(m["k"] <= m["q"], LOWEST) + m["bias"], FULL, True),
    "two lowest": (lambda m: _hide(m["k"] <= m["q"], LOWEST) + _hide(m["pad"][:, None, None, :], LOWEST), FULL, True),
    "inf and lowest": (lambda m: _hide(m["k"] <= m["q"], -math.inf) + _hide(m["pad"][:, None, None, :], LOWEST), CAUSAL, True),
    "ones minus": (lambda m: (1.0 - m["pad"].double())[:, None, None, :] * -1e9, FULL, True),
    "small": (lambda m: _hide(m["k"] <= m["q"], -5.0), FULL, True),
}


class Odd(nn.Module):
    def __init__(self, formula: Callable[[dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.formula = formula
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor, seg: Tensor, length: Tensor, user: Tensor, bias: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        m = {"q": i[None, None, :, None], "k": i[None, None, None, :], "pad": pad, "seg": seg, "len": length, "user": user, "bias": bias,
             "slope": self.slope}
        mask = self.formula(m)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(3, 2, 7, 7) if mask.dim() == 4 else mask)


@pytest.mark.parametrize("name", list(ODD))
def test_odd_masks_are_not_taken_for_what_they_are_not(name: str) -> None:
    formula, attrs, stays = ODD[name]
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 2, 7, 5, generator=gen, dtype=torch.float64) for _ in range(3))
    user = torch.rand(3, 1, 7, 7, generator=gen) > 0.3
    user[1, 0, 2] = False
    bias = _hide(torch.rand(7, 7, generator=gen) > 0.5, LOWEST)
    fixed = [torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2 + [[0] * 7]), torch.tensor([2, 0, 5]), user, bias]
    module = Odd(formula)
    case = Case(module, (q, k, v, torch.ones(3, 7, dtype=torch.bool), *fixed))
    (node,) = case.nodes
    assert {x: node[x] for x in attrs} == attrs
    assert (node["mask"] is not None) == stays
    for am in paddings(3, 7):
        tensors = [q, k, v, am.bool(), *fixed]
        case.check(tensors)
        outs, _ = case.run(case.passed, tensors, grads=False)
        mask = formula({"q": torch.arange(7)[None, None, :, None], "k": torch.arange(7)[None, None, None, :], "pad": am.bool(), "seg": fixed[0],
                        "len": fixed[1], "user": user, "bias": bias, "slope": module.slope.detach()})
        close(outs[0], reference(q, k, v, mask))


# --- random formulas
# -------------------------------------------------------------------------------------------------------------


class Formula:
    """Builds graph text and the torch tensor it stands for, side by side."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.size = {"B": 3, "H": 2, "Q": self.r.choice([5, 7]), "K": 7}
        self.symbolic = self.r.random() < 0.5
        self.lines: list[str] = []
        self.inputs: list[Tensor] = []
        b, h, q, k = (self.dim(a) for a in "BHQK")
        if self.symbolic:
            self.lines += ["sym B = q[0]", "sym Q = q[2]", "sym K = k[2]"]
        self.q, self.k, self.v = (torch.randn(self.size["B"], 2, n, 5, generator=self.gen, dtype=torch.float64)
                                  for n in (self.size["Q"], 7, 7))
        for name, rows, t in (("q", q, self.q), ("k", k, self.k), ("v", k, self.v)):
            self.lines.append(f"input {name}: f64[{b}, {h}, {rows}, 5]")
            self.inputs.append(t)
        self.pad = self.feed(f"[{b}, {k}]", (torch.rand(3, 7, generator=self.gen) > 0.3).long())
        self.qpad = self.feed(f"[{b}, {q}]", (torch.rand(3, self.size["Q"], generator=self.gen) > 0.2).long())
        self.user = self.feed(f"[{b}, 1, {q}, {k}]", torch.rand(3, 1, self.size["Q"], 7, generator=self.gen) > 0.3)
        i, j = torch.arange(self.size["Q"]), torch.arange(7)
        self.i = self.make(f"iota() {{shape=[{q}], dtype=i64, start=0, step=1}}", i)
        self.j = self.make(f"iota() {{shape=[{k}], dtype=i64, start=0, step=1}}", j)
        self.i = self.reshape(self.i, ["1", "1", q, "1"], i[None, None, :, None])
        self.j = self.reshape(self.j, ["1", "1", "1", k], j[None, None, None, :])

    def dim(self, axis: str) -> str:
        return axis if self.symbolic and axis != "H" else str(self.size[axis])

    def feed(self, shape: str, t: Tensor) -> tuple[str, Tensor]:
        name = f"x{len(self.inputs)}"
        self.lines.append(f"input {name}: {'bool' if t.dtype == torch.bool else 'i64'}{shape}")
        self.inputs.append(t)
        return name, t

    def make(self, code: str, t: Tensor) -> tuple[str, Tensor]:
        name = f"n{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return name, t

    def number(self, x: float, dtype: str) -> str:
        return self.make(f"fill() {{shape=[], dtype={dtype}, value={float(x)!r}}}", torch.tensor(x))[0]

    def reshape(self, x: tuple[str, Tensor], shape: list[str], t: Tensor) -> tuple[str, Tensor]:
        return self.make(f"reshape({x[0]}) {{shape=[{', '.join(shape)}]}}", t)

    def op(self, name: str, *xs: tuple[str, Tensor], fn: Callable[..., Tensor]) -> tuple[str, Tensor]:
        return self.make(f"{name}({', '.join(x[0] for x in xs)})", fn(*(x[1] for x in xs)))

    def linear(self) -> tuple[str, Tensor]:
        """A small integer formula of q and k."""
        i, j = self.i, self.j
        c = self.r.randint(-3, 3)
        kind = self.r.randrange(6)
        if kind == 0:
            j = self.op("mul", j, (self.number(2, "i64"), torch.tensor(2)), fn=torch.mul)
        d = self.op("sub", i, j, fn=torch.sub)
        if kind == 1:
            d = self.op("abs", d, fn=torch.abs)
        if kind == 2:
            three = (self.number(3, "i64"), torch.tensor(3))
            return self.op("sub", self.op("floor_div", i, three, fn=torch.floor_divide), self.op("floor_div", j, three, fn=torch.floor_divide),
                           fn=torch.sub)
        if kind == 3:
            d = self.op("neg", d, fn=torch.neg)
        if kind == 4:
            d = self.op("mul", d, (self.number(2, "i64"), torch.tensor(2)), fn=torch.mul)
        return self.op("add", d, (self.number(c, "i64"), torch.tensor(c)), fn=torch.add)

    def leaf(self) -> tuple[str, Tensor]:
        b, q, k = self.dim("B"), self.dim("Q"), self.dim("K")
        kind = self.r.randrange(8)
        if kind < 3:
            name = self.r.choice(["ge", "le", "gt", "lt", "eq", "ne"])
            return self.op(name, self.linear(), (self.number(0, "i64"), torch.tensor(0)), fn=getattr(torch, name))
        if kind < 5:
            m = self.make(f"cast({self.pad[0]}) {{to=bool}}", self.pad[1].bool())
            return self.reshape(m, [b, "1", "1", k], m[1][:, None, None, :])
        if kind == 5:
            m = self.make(f"ne({self.qpad[0]}, {self.number(0, 'i64')})", self.qpad[1] != 0)
            return self.reshape(m, [b, "1", q, "1"], m[1][:, None, :, None])
        if kind == 6:  # products and comparisons of data
            x = self.reshape(self.qpad, [b, "1", q, "1"], self.qpad[1][:, None, :, None])
            y = self.reshape(self.pad, [b, "1", "1", k], self.pad[1][:, None, None, :])
            if self.r.random() < 0.5:
                return self.op("eq", x, y, fn=torch.eq)
            return self.make(f"cast({self.op('mul', x, y, fn=torch.mul)[0]}) {{to=bool}}", (x[1] * y[1]).bool())
        return self.user

    def view(self, x: tuple[str, Tensor]) -> tuple[str, Tensor]:
        """A detour of views that changes nothing."""
        b, q, k = self.dim("B"), self.dim("Q"), self.dim("K")
        full = (self.size["B"], self.size["H"], self.size["Q"], self.size["K"])
        kind = self.r.randrange(5)
        if kind == 0:
            return self.make(f"expand({x[0]}) {{shape=[{b}, 2, {q}, {k}]}}", x[1].expand(full))
        if kind == 1:
            e = self.make(f"expand({x[0]}) {{shape=[{b}, 2, {q}, {k}]}}", x[1].expand(full))
            flat = f"{b}*2" if self.symbolic else str(full[0] * 2)
            e = self.reshape(e, [flat, q, k], e[1])
            return self.reshape(e, [b, "2", q, k], e[1].reshape(full))
        if kind == 2:
            e = self.make(f"permute({x[0]}) {{perm=[3, 0, 2, 1]}}", x[1])
            return self.make(f"permute({e[0]}) {{perm=[1, 3, 2, 0]}}", x[1])
        if kind == 3 and x[1].shape[3] == 7:
            e = self.make(f"flip({x[0]}) {{axes=[3]}}", x[1])
            return self.make(f"flip({e[0]}) {{axes=[3]}}", x[1])
        if kind == 4 and x[1].shape[3] == 7 and not self.symbolic:
            cut = self.r.randint(1, 6)
            a = self.make(f"slice({x[0]}) {{axis=3, start=0, end={cut}, step=1}}", x[1])
            c = self.make(f"slice({x[0]}) {{axis=3, start={cut}, end=7, step=1}}", x[1])
            return self.make(f"concat({a[0]}, {c[0]}) {{axis=3}}", x[1])
        return x

    def boolean(self, depth: int) -> tuple[str, Tensor]:
        if depth == 0 or self.r.random() < 0.2:
            x = self.leaf()
        else:
            kind = self.r.randrange(6)
            a = self.boolean(depth - 1)
            if kind == 0:
                x = self.op("not", a, fn=torch.logical_not)
            elif kind == 1:
                x = self.op("where", a, self.boolean(depth - 1), self.boolean(depth - 1), fn=torch.where)
            elif kind == 2:
                x = self.op("or", a, self.boolean(depth - 1), fn=torch.logical_or)
            else:
                x = self.op("and", a, self.boolean(depth - 1), fn=torch.logical_and)
        return self.view(x) if self.r.random() < 0.4 else x

    def additive(self) -> tuple[str, Tensor]:
        total: tuple[str, Tensor] | None = None
        for _ in range(self.r.randint(1, 3)):
            neg = self.r.choice([-math.inf, LOWEST, -1e30, -2.0])
            text = "-inf" if neg == -math.inf else repr(neg)
            hide = self.make(f"fill() {{shape=[], dtype=f64, value={text}}}", torch.tensor(neg, dtype=torch.float64))
            zero = (self.number(0, "f64"), torch.tensor(0, dtype=torch.float64))
            c = self.boolean(2)
            term = self.op("where", c, zero, hide, fn=torch.where) if self.r.random() < 0.7 else self.op("where", c, hide, zero, fn=torch.where)
            total = term if total is None else self.op("add", total, term, fn=torch.add)
        assert total is not None
        return total

    def text(self, mask: tuple[str, Tensor]) -> str:
        order = [x for x in self.lines if x.startswith("sym")] + [x for x in self.lines if not x.startswith("sym")]
        return "graph {\n  " + "\n  ".join(order) + f"\n  y, l = attention(q, k, v, {mask[0]}) {{scale={1 / math.sqrt(5)!r}}}\n  output y\n}}"


@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("block", range(6))
def test_random_formulas_keep_their_numbers(form: str, block: int) -> None:
    changed = 0
    for seed in range(block * 40, block * 40 + 40):
        f = Formula(seed)
        mask = f.boolean(3) if form == "bool" else f.additive()
        text = f.text(mask)
        graph = engine.Graph.parse(text)
        before = graph.text()
        graph.apply("masks").verify()
        changed += graph.text() != before
        (y,) = graph.run(f.inputs, 1)
        try:
            close(y, reference(f.q, f.k, f.v, mask[1]))
        except AssertionError as e:
            raise AssertionError(f"seed {seed}:\n{text}\n-- passed:\n{graph.text()}") from e
    assert changed >= 10, "the generator makes too few masks that the pass can simplify"


def test_size_that_only_the_run_knows() -> None:
    """A mask whose key axis is not provably the keys' length: the rewritten graph must refuse another length, not
    misread it."""
    text = """graph {
      sym B = q[0]
      sym T = q[2]
      sym M = m[1]
      input q: f64[B, 2, T, 5]
      input m: i64[B, M]
      i = iota() {shape=[T], dtype=i64, start=0, step=1}
      j = iota() {shape=[M], dtype=i64, start=0, step=1}
      i4 = reshape(i) {shape=[1, 1, T, 1]}
      j4 = reshape(j) {shape=[1, 1, 1, M]}
      c = le(j4, i4)
      mb = cast(m) {to=bool}
      m4 = reshape(mb) {shape=[B, 1, 1, M]}
      a = and(c, m4)
      y, l = attention(q, q, q, a) {scale=0.5}
      output y
    }"""
    graph = engine.Graph.parse(text).apply("masks")
    (node,) = attentions(graph.text())
    assert node["causal"] and node["mask"] == "bool[B, 1, 1, T]"
    q, m = torch.randn(3, 2, 7, 5, dtype=torch.float64), torch.ones(3, 7, dtype=torch.long)
    m[1, 4:] = 0
    (y,) = graph.run([q, m], 1)
    mask = (torch.arange(7)[None] <= torch.arange(7)[:, None]) & m.bool()[:, None, None, :]
    s = (q @ q.transpose(-1, -2) * 0.5).masked_fill(~mask, -math.inf)
    close(y, s.softmax(-1) @ q)
    with pytest.raises(engine.EngineError):
        graph.run([q, m[:, :1].contiguous()], 1)
    # nothing of the mask is left that could check: it stays, and a single column is broadcast as ever
    alone = engine.Graph.parse(text.replace("q, q, q, a)", "q, q, q, c)")).apply("masks")
    assert attentions(alone.text())[0]["causal"] is False
    (y,) = alone.run([q, m[:, :1].contiguous()], 1)
    close(y, (q @ q.transpose(-1, -2) * 0.5).softmax(-1) @ q)


def test_an_allocation_that_fails_is_an_error() -> None:
    """An allocation that fails, at each place in turn, is an error with a message and leaves nothing behind."""
    libc, live, left = C.CDLL(None), set(), [0]
    libc.aligned_alloc.restype = C.c_void_p
    libc.aligned_alloc.argtypes = [C.c_size_t, C.c_size_t]
    libc.free.argtypes = [C.c_void_p]

    @engine.ALLOC
    def alloc(_user: Any, size: int) -> int | None:
        left[0] -= 1
        if left[0] < 0:
            return None
        p = libc.aligned_alloc(64, (size + 127) // 64 * 64)
        live.add(p)
        return p

    @engine.FREE
    def free(_user: Any, p: int, _size: int) -> None:
        live.remove(p)
        libc.free(p)

    services = engine.Services(alloc=alloc, free=free)
    f = Formula(7)
    text = f.text(f.boolean(3))

    def attempt(budget: int) -> bool:
        left[0] = budget
        cx = engine.Ctx.__new__(engine.Ctx)
        cx.p = C.c_void_p(engine.lib.om_ctx_new(C.byref(services)))
        if not cx.p.value:
            return False
        engine._owners[cx.p.value] = 1
        try:
            engine.Graph.parse(text, cx).apply("attention", "masks").text()
        except engine.EngineError as e:
            assert "memory" in str(e)
            return False
        return True

    assert attempt(1 << 30)
    used = (1 << 30) - left[0]
    assert not any(attempt(k) for k in range(0, used, max(1, used // 150)))
    assert not live
