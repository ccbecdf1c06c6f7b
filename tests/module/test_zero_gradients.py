"""None is not zero: operators whose derivative is zero everywhere but which take part in autograd, values that are
written over or multiplied by nothing. Each case has parameters of its own; for those of a family together, captured
once, every gradient is None, zeros or the number that eager's is, and every output requires a gradient where eager's
does. AdamW is what makes the difference visible: it decays what has a gradient of zeros, and leaves alone what has
none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from ortmodule import ORTModule

F64 = torch.float64
NAMES = "pqwbe"
SHAPES = {"p": (3, 4), "q": (3, 4), "w": (4, 4), "b": (4,), "e": (0, 4)}
ALL, NOTHING = torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)
ROWS = torch.arange(3)


class P(nn.Module):
    """The parameters of one case: matrices of one shape, a square one, a vector, one without elements."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=F64, generator=gen)))


class All(nn.Module):
    """also: the parameters are read elsewhere, too."""

    def __init__(self, cases: list[Callable[..., Any]], also: bool) -> None:
        super().__init__()
        self.cases, self.also = cases, also
        self.own = nn.ModuleList([P(i) for i in range(len(cases))])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = [f(s, x) for f, s in zip(self.cases, self.own, strict=True)]
        return (*outs, *[(s.p * s.q).sum() + s.w.sum() * s.b.sum() for s in self.own]) if self.also else tuple(outs)


def over(f: Callable[[Any, Tensor, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """f edits h in place."""
    def g(s: Any, x: Tensor) -> Tensor:
        h = s.p * 2
        f(s, h, x)
        return h

    return g


def put(h: Tensor, where: Any, value: Any) -> None:
    h[where] = value


FAMILIES: dict[str, dict[str, Callable[[Any, Tensor], Tensor]]] = {
    "steps": {
        "sign": lambda s, x: s.p.sign() * s.q, "sgn": lambda s, x: s.p.sgn(), "floor": lambda s, x: s.p.floor(),
        "ceil": lambda s, x: s.p.ceil(), "round": lambda s, x: s.p.round(), "decimals": lambda s, x: s.p.round(decimals=2),
        "trunc": lambda s, x: s.p.trunc(), "fix": lambda s, x: torch.fix(s.p), "frac": lambda s, x: s.p.frac(),
        "div floor": lambda s, x: torch.div(s.p, s.q, rounding_mode="floor"), "div trunc": lambda s, x: torch.div(s.p, s.q, rounding_mode="trunc"),
        "div by a number": lambda s, x: torch.div(s.p, 0.3, rounding_mode="floor"), "broadcast": lambda s, x: torch.div(s.p, s.b, rounding_mode="floor"),
        "remainder": lambda s, x: s.p.remainder(s.q), "remainder of a number": lambda s, x: s.p % 0.5, "fmod": lambda s, x: s.p.fmod(s.q),
        "through a layer": lambda s, x: F.linear(s.p.floor(), s.w, s.b), "behind a layer": lambda s, x: F.linear(x, s.w, s.b).round(),
        "straight through": lambda s, x: s.p + (s.p.round() - s.p).detach(), "floor_": over(lambda s, h, x: h.floor_()),
        "sign_": over(lambda s, h, x: h.sign_()), "step of a step": lambda s, x: s.p.floor().sign() + s.q.ceil(),
        "not at all": lambda s, x: s.p.detach().floor(), "whole numbers": lambda s, x: s.p.long().to(F64) + s.b,
        "compared": lambda s, x: (s.p > 0).to(F64) * s.q, "argmax": lambda s, x: s.p.argmax(1).to(F64) * s.b.sum(),
    },
    "written over": {
        "fill_": over(lambda s, h, x: h.fill_(2.0)), "fill_ by a tensor": over(lambda s, h, x: h.fill_(s.b.sum())), "zero_": over(lambda s, h, x: h.zero_()),
        "copy_": over(lambda s, h, x: h.copy_(s.q)), "copy_ of data": over(lambda s, h, x: h.copy_(x.detach())), "...": over(lambda s, h, x: put(h, ..., s.q)),
        ":": over(lambda s, h, x: put(h, slice(None), s.q)), ":, 0:4": over(lambda s, h, x: put(h, (slice(None), slice(0, 4)), s.q)),
        "one row": over(lambda s, h, x: put(h, 1, s.b)), "every row": over(lambda s, h, x: [put(h, i, s.b) for i in range(3)]),
        "a view": over(lambda s, h, x: h.view(-1).fill_(3.0)), "transposed": over(lambda s, h, x: h.t().copy_(s.q.t())),
        "part of a view": over(lambda s, h, x: h.view(-1)[2:5].fill_(3.0)), "a row of one": over(lambda s, h, x: h[None].select(0, 0).copy_(s.q)),
        "no_grad": over(lambda s, h, x: torch.no_grad()(lambda: h.fill_(3.0))()), "detached": over(lambda s, h, x: h.detach().fill_(3.0)),
        "twice": over(lambda s, h, x: h.copy_(s.q).zero_()), "gt_": over(lambda s, h, x: h.gt_(0)), "eq_": over(lambda s, h, x: h.eq_(s.q)),
        "logical_not_": over(lambda s, h, x: h.logical_not_()), "normal_": over(lambda s, h, x: h.normal_()), "bernoulli_": over(lambda s, h, x: h.bernoulli_(0.5)),
        "uniform_": over(lambda s, h, x: h.uniform_()), "masked_fill": lambda s, x: s.p.masked_fill(ALL, 0.0), "by a tensor": lambda s, x: s.p.masked_fill(ALL, s.b[0]),
        "nowhere": lambda s, x: s.p.masked_fill(NOTHING, s.b[0]), "where": lambda s, x: torch.where(ALL, s.p, s.q), "where not": lambda s, x: torch.where(torch.tensor(False), s.p, s.q),
        "where a number": lambda s, x: torch.where(torch.tensor(True), 0.0, s.q), "index_put": lambda s, x: s.p.index_put((ROWS,), s.q),
        "index_put, a mask": lambda s, x: s.p.index_put((ALL,), s.b[0]), "index_copy": lambda s, x: s.p.index_copy(0, ROWS, s.q), "index_fill": lambda s, x: s.p.index_fill(0, ROWS, 0.0),
        "scatter": lambda s, x: s.p.scatter(0, ROWS[:, None].expand(3, 4), s.q), "masked_scatter": lambda s, x: s.p.masked_scatter(ALL, s.q),
        "slice_scatter": lambda s, x: s.p.slice_scatter(s.q, 0, 0, 3), "select_scatter": lambda s, x: s.p[:1].select_scatter(s.b, 0, 0), "fill": lambda s, x: torch.fill(s.p, 2.0),
        "new": lambda s, x: torch.zeros_like(s.p) + s.q + torch.full_like(s.p, 2.0) * s.b,
    },
    "times nothing": {
        "addmm": lambda s, x: torch.addmm(s.q, s.p, s.w, beta=0), "addmm of a vector": lambda s, x: torch.addmm(s.b, s.p, s.w, beta=0),
        "alpha": lambda s, x: torch.addmm(s.q, s.p, s.w, alpha=0), "both": lambda s, x: torch.addmm(s.b, s.p, s.w, beta=0, alpha=0),
        "addmv": lambda s, x: torch.addmv(s.b, s.w, s.q[0], beta=0), "addr": lambda s, x: torch.addr(s.w, s.b, s.q[0], beta=0), "addr, alpha": lambda s, x: torch.addr(s.w, s.b, s.q[0], alpha=0),
        "baddbmm": lambda s, x: torch.baddbmm(s.q[None], s.p[None], s.w[None], beta=0), "addbmm": lambda s, x: torch.addbmm(s.q, s.p[None], s.w[None], beta=0),
        "addmm_": over(lambda s, h, x: h.addmm_(s.p, s.w, beta=0)), "add": lambda s, x: torch.add(s.p, s.q, alpha=0), "sub": lambda s, x: torch.sub(s.p, s.q, alpha=0),
        "rsub": lambda s, x: torch.rsub(s.p, s.q, alpha=0), "number": lambda s, x: s.p * 0, "a term": lambda s, x: s.p * 0 + s.q, "tensor": lambda s, x: s.p * torch.zeros(3, 4, dtype=F64),
        "False": lambda s, x: s.p * False, "minus itself": lambda s, x: s.p - s.p, "to the power 0": lambda s, x: s.p**0, "to powers 0": lambda s, x: s.p.pow(torch.zeros(4, dtype=F64)),
        "1 to a power": lambda s, x: 1**s.p, "0 to a power": lambda s, x: 0 ** s.p.abs(), "by infinity": lambda s, x: s.p / float("inf"), "0 divided": lambda s, x: 0 / s.p,
        "bounds": lambda s, x: s.p.clamp(2, -2), "bounds of parameters": lambda s, x: s.p.clamp(s.q + 5, s.q + 3), "beyond": lambda s, x: s.p.clamp(50, 60),
        "relu": lambda s, x: F.relu(s.p - 100), "maximum": lambda s, x: torch.maximum(s.p, s.q + 100), "lerp": lambda s, x: torch.lerp(s.p, s.q, 0.0), "lerp to the end": lambda s, x: torch.lerp(s.p, s.q, 1.0),
        "addcmul": lambda s, x: torch.addcmul(s.p, s.q, s.q, value=0), "addcdiv": lambda s, x: torch.addcdiv(s.p, s.q, s.q, value=0), "dropout": lambda s, x: F.dropout(s.p, 1.0),
        "dropout of channels": lambda s, x: F.dropout1d(s.p[None], 1.0), "tril": lambda s, x: s.p.tril(-5), "labels ignored": lambda s, x: F.cross_entropy(s.p, torch.tensor([-100] * 3), reduction="sum"),
        "padding row": lambda s, x: F.embedding(torch.tensor([2]), s.p, padding_idx=2), "softmax of one": lambda s, x: s.p[:, :1].softmax(1), "softmax of a number": lambda s, x: s.p.sum().softmax(0),
        "log_softmax of a number": lambda s, x: s.p.sum().log_softmax(0), "norm of one": lambda s, x: F.layer_norm(s.p[:, :1], (1,)), "threshold": lambda s, x: F.threshold(s.p, 100, 0.0),
        "hardshrink": lambda s, x: F.hardshrink(s.p, 100), "hardsigmoid": lambda s, x: F.hardsigmoid(s.p + 100), "norm 0": lambda s, x: torch.linalg.vector_norm(s.p, 0),
        "length of nothing": lambda s, x: (s.p - s.p).norm(), "no key": lambda s, x: F.scaled_dot_product_attention(s.p[None], s.q[None], s.w[None, :3], attn_mask=torch.zeros(3, 3, dtype=torch.bool)),
        "no bias": lambda s, x: F.scaled_dot_product_attention(s.p[None], s.q[None], s.w[None, :3], attn_mask=s.w[:3, :3] * 0),
        "one key": lambda s, x: F.scaled_dot_product_attention(s.p[None], s.q[None, :1], s.w[None, :1]),
    },
    "of nothing": {
        "cat": lambda s, x: torch.cat([s.e, s.p]), "cat a slice": lambda s, x: torch.cat([s.q[:0], s.p]), "cat a vector": lambda s, x: torch.cat([s.q.reshape(-1)[:0], s.p]),
        "cat a layer": lambda s, x: torch.cat([F.linear(x, s.w)[:0], s.p]), "cat columns": lambda s, x: torch.cat([s.q[:, :0], s.p], 1), "cat of nothing": lambda s, x: torch.cat([s.e, s.q[:0]]),
        "slice": lambda s, x: s.p[:0], "sum of a slice": lambda s, x: s.p.narrow(0, 0, 0).sum(), "cropped": lambda s, x: F.pad(s.p, (-4, 0)), "expanded": lambda s, x: s.b[None].expand(0, 4).sum(0),
        "repeated": lambda s, x: s.p.repeat(0, 1), "sum": lambda s, x: s.e.sum(), "product": lambda s, x: s.e.t() @ s.e, "layer": lambda s, x: F.linear(s.e, s.w, s.b),
        "gather": lambda s, x: s.p[torch.zeros(0, dtype=torch.long)], "embedding": lambda s, x: F.embedding(torch.zeros(0, dtype=torch.long), s.p), "one part": lambda s, x: s.p.split(1)[0],
        "another": lambda s, x: s.p.unbind(0)[1], "statistics": lambda s, x: torch.native_layer_norm(s.p, [4], s.b, None, 1e-5)[1] * s.q[:, :1],
    },
}  # fmt: skip


def step(module: nn.Module, own: list[P]) -> tuple[list[Tensor], list[Tensor | None]]:
    """One step of AdamW with gradients that are numbers of their place."""
    torch.manual_seed(3)
    module.zero_grad()
    outs = module((torch.arange(12, dtype=F64).reshape(3, 4) / 7 - 0.8).requires_grad_())
    gen = torch.Generator().manual_seed(2)
    pairs = [(o, torch.randn(o.shape, dtype=F64, generator=gen)) for o in outs]
    pairs = [(o, d) for o, d in pairs if o.requires_grad]
    torch.autograd.backward([o for o, _ in pairs], [d for _, d in pairs])
    return list(outs), [getattr(s, name).grad for s in own for name in NAMES]


def kind(g: Tensor | None) -> str:
    return "None" if g is None else "a tensor" if g.any() else "zeros"


@pytest.mark.parametrize("also", [False, True], ids=["alone", "also elsewhere"])
@pytest.mark.parametrize("family", FAMILIES)
def test_against_eager(family: str, also: bool) -> None:
    names, cases = list(FAMILIES[family]), list(FAMILIES[family].values())
    eager, plain = All(cases, also), All(cases, also)
    wrapped = ORTModule(plain)
    different = []
    for _ in range(2):
        (want, want_grads), (got, got_grads) = step(eager, list(eager.own)), step(wrapped, list(plain.own))
        for name, a, b in zip(names, want, got, strict=False):
            if a.requires_grad != b.requires_grad:
                different.append(f"{name}: requires_grad {a.requires_grad}, here {b.requires_grad}")
            if a.shape != b.shape or not torch.allclose(a, b, equal_nan=True):
                different.append(f"{name}: the result")
        for i, (u, v) in enumerate(zip(want_grads, got_grads, strict=True)):
            where = f"{names[i // len(NAMES)]}: gradient of {NAMES[i % len(NAMES)]}"
            if (u is None) != (v is None):
                different.append(f"{where} is {kind(u)}, here {kind(v)}")
            elif u is not None and v is not None and not torch.allclose(u, v, rtol=1e-9, atol=1e-10, equal_nan=True):
                different.append(f"{where}: {u.flatten()[:3].tolist()}, here {v.flatten()[:3].tolist()}")
    assert not different, "\n".join(different)
    assert not wrapped.report().eager, str(wrapped.report())


def test_nothing_but_steps_is_trained() -> None:
    """All there is has a gradient of zeros: the output requires one, AdamW decays."""
    def train(wrap: bool) -> list[Tensor]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 5), nn.Module())
        plain[1].forward = lambda x: x.round()  # type: ignore[method-assign]
        module = ORTModule(plain.double()) if wrap else plain.double()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            loss = module(torch.ones(2, 4, dtype=F64)).sum()
            assert loss.requires_grad
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in plain.parameters()]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("f", [lambda a, b: a // b, lambda a, b: torch.floor_divide(a, 0.5) * b, lambda a, b: torch.heaviside(a, b)])
def test_no_derivative_is_pytorchs_error(f: Callable[..., Tensor]) -> None:
    class M(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return f(a, b)

    for module in (M(), ORTModule(M())):
        for _ in range(2):
            a, b = (torch.randn(3, dtype=F64).requires_grad_() for _ in range(2))
            with pytest.raises(RuntimeError, match="derivative for aten::.* is not implemented"):
                module(a, b).sum().backward()


def test_floor_divide_as_an_index() -> None:
    """Nothing asks for its derivative."""
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 3, dtype=F64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w[(x // 2).long()] * x[:, None]

    module = ORTModule(M())
    x = torch.tensor([0.5, 3.0, 9.5], dtype=F64, requires_grad=True)
    module(x).sum().backward()
    assert not module.report().eager and not module.report().host
    assert x.grad is not None and torch.allclose(x.grad, module.w[[0, 1, 4]].sum(1))


@pytest.mark.parametrize("passes", [(), ("simplify",), ("fold", "simplify", "cse", "simplify")])
def test_simplifying_first(passes: tuple[str, ...]) -> None:
    """What the passes before the gradient drop is due a gradient all the same."""
    text = """graph {
      input x: f64[2, 3]
      input e: f64[0, 3]
      input y: f64[2, 3]
      const t: bool[] = 1
      const z: f64[] = 0.0
      a = concat(e, x) {axis=0}
      b = where(t, a, y)
      c = mul(b, z)
      d = sub(c, c)
      output d
    }"""
    joint = engine.Graph.parse(text).apply(*passes).grad([1, 1, 1], [1])
    grads = [line.split() for line in joint.text().splitlines() if line.strip().startswith("grad ")]
    assert len(grads) == 3 and not any("none" in " ".join(g).lower() for g in grads), joint.text()
