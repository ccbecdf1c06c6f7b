"""The attention pass: attention written out in the ways people write it becomes one node, what only looks like it
stays, and no number changes, also not in rows that see no key.

Two oracles, none of them the pass's own: the same graph without the pass (node by node, fp64) and PyTorch's eager
forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case, close
from torch import Tensor, nn
from torch.nn import functional as F


class Written(nn.Module):
    """Attention by hand, in the spellings people use."""

    def __init__(self, style: str, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.p = style, p
        self.qkv = nn.Linear(12, 36)
        self.bias = nn.Parameter(torch.randn(2, 11, 11))
        self.register_buffer("tril", torch.tril(torch.ones(11, 11)).view(1, 1, 11, 11))

    def forward(self, x: Tensor, m: Tensor | None = None) -> Any:
        b, t, c = x.shape
        s, h = self.style, 2
        q, k, v = (y.view(b, t, h, c // h).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        d = c // h
        if s == "one head":
            q, k, v = self.qkv(x).split(c, dim=2)
            a = (q @ k.transpose(1, 2) / math.sqrt(c)).masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
            return F.dropout(a.softmax(-1), self.p, self.training) @ v
        idx = torch.arange(t)
        causal = idx[None, :] <= idx[:, None]
        if s == "merged":  # (b * h, t, d), as torch.bmm wants it
            q, k, v = (y.reshape(b * h, t, d) for y in (q, k, v))
            a = torch.bmm(q, k.transpose(1, 2)).view(b, h, t, t) / math.sqrt(d)
            a = a.masked_fill(~causal, float("-inf")).softmax(-1)
            a = F.dropout(a, self.p, self.training).view(b * h, t, t)
            return torch.bmm(a, v).view(b, h, t, d).transpose(1, 2).reshape(b, t, c)
        if s == "scaled query":
            a = (q * d**-0.5) @ k.transpose(-2, -1)
        elif s == "scaled key":
            a = q @ (k / math.sqrt(d)).transpose(-2, -1)
        elif s == "twice scaled":
            a = (q @ k.transpose(-2, -1)) * 0.5 / math.sqrt(d)
        else:
            a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(d))
        if s == "nanogpt":
            a = a.masked_fill(self.tril[:, :, :t, :t] == 0, float("-inf"))
        elif s == "where":
            a = torch.where(causal, a, torch.full((), torch.finfo(a.dtype).min, dtype=a.dtype))
        elif s == "bias":
            a = a + self.bias[:, :t, :t] + torch.where(causal, 0.0, float("-inf")).to(a.dtype)
        elif s == "bias first":
            a = (a + self.bias[:, :t, :t]).masked_fill(~causal, torch.finfo(a.dtype).min)
        elif s == "float mask":
            a = a + m
        elif s == "small number":
            a = a.masked_fill(~causal, -1e4)
        elif s == "1e9":
            a = a.masked_fill(~causal, -1e9)
        elif s == "1e9 data":
            a = a.masked_fill(m == 0, -1e9)
        elif s == "mask times scale":
            a = (q @ k.transpose(-2, -1) + m) * 0.25
        elif s == "softmax of keys":
            return (a.softmax(2) @ v).transpose(1, 2).reshape(b, t, c)
        elif s == "clipped":
            a = a.tanh() * 2
        p = F.dropout(a.softmax(dim=-1), self.p, self.training)
        y = (p @ v).transpose(1, 2).reshape(b, t, c)
        return (y, p) if s == "weights too" else y


WRITTEN = ["plain", "one head", "merged", "scaled query", "scaled key", "twice scaled", "nanogpt", "where", "bias", "bias first", "float mask",
           "1e9", "1e9 data"]
NOT_ATTENTION = ["small number", "mask times scale", "softmax of keys", "clipped", "weights too"]


@pytest.mark.parametrize("style", WRITTEN + NOT_ATTENTION)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_written_out_attention_becomes_one_node(style: str, p: float) -> None:
    module = Written(style, p).double()
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    extra = [torch.randn(7, 7, dtype=torch.float64)] if style in ("float mask", "mask times scale") else []
    if style == "1e9 data":
        extra = [(torch.rand(3, 1, 7, 7) > 0.5).long()]
        extra[0][1, 0, 4] = 0  # a row that sees nothing
    case = Case(module, (x, *extra))
    assert len(case.nodes) == (style in WRITTEN)
    for n in case.nodes:
        assert n["causal"] == (style in ("one head", "merged", "where", "bias", "bias first", "1e9"))
        want = {"nanogpt": "bool[", "bias": "f64[1, 2, 7, 7]", "bias first": "f64[1, 2, 7, 7]", "float mask": "f64[7, 7]",
                "1e9 data": "bool[3, 1, 7, 7]"}.get(style)
        assert n["mask"] is None if want is None else n["mask"].startswith(want)
        assert (n["dropout"] > 0) == (p > 0) and (n["rng"] > 0) == (p > 0)
    case.check([x, *extra])
    if p == 0:  # and against eager, forward and backward
        xs = x.clone().requires_grad_()
        y = module(xs, *extra)
        outs, _ = case.run(case.passed, [x, *extra], grads=False)
        for a, e in zip(outs, y if isinstance(y, tuple) else (y,)):
            close(a, e.detach())


def test_repeated_heads_are_read_once() -> None:
    class Repeat(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, h, t, d = k.shape
            k, v = (y[:, :, None].expand(b, h, 3, t, d).reshape(b, 3 * h, t, d) for y in (k, v))
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(2, h, 7, 5, dtype=torch.float64) for h in (6, 2, 2))
    case = Case(Repeat(), (q, k, v))
    assert "expand" not in case.passed.text()
    case.check([q, k, v])
    close(case.run(case.passed, [q, k, v], grads=False)[0][0], Repeat()(q, k, v))


@pytest.mark.parametrize("cast", ["k and v", "k"])
def test_repeated_heads_that_are_cast_are_read_once(cast: str) -> None:
    """Autocast's casts stand behind the repetition: heads are cast, then read as they are."""

    class Repeat(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, h, t, d = k.shape
            k, v = (y[:, :, None].expand(b, h, 3, t, d).reshape(b, 3 * h, t, d) for y in (k, v))
            return F.scaled_dot_product_attention(q, k.double(), v.double())

    q, k, v = (torch.randn(2, h, 7, 5, dtype=torch.float64) for h in (6, 2, 2))
    k, v = k.float(), v.float() if cast == "k and v" else v
    case = Case(Repeat(), (q, k, v))
    assert "expand" not in case.passed.text()
    case.check([q, k, v], tol=2e-7)  # a gradient is rounded to f32 once, not once a head
    close(case.run(case.passed, [q, k, v], grads=False)[0][0], Repeat()(q, k, v))


@pytest.mark.parametrize("by_hand", [True, False])
def test_keys_and_values_repeated_from_unlike_heads(by_hand: bool) -> None:
    class Repeat(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (y[:, :, None].expand(2, y.shape[1], 8 // y.shape[1], 7, 5).reshape(2, 8, 7, 5) for y in (k, v))
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v if by_hand else F.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(2, h, 7, 5, dtype=torch.float64) for h in (8, 2, 4))
    case = Case(Repeat(), (q, k, v))
    assert len(case.nodes) == 1
    case.check([q, k, v])
    close(case.run(case.passed, [q, k, v], grads=False)[0][0], Repeat()(q, k, v))


def test_one_of_keys_and_values_repeated_stays() -> None:
    class Repeat(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, h, t, d = k.shape
            return F.scaled_dot_product_attention(q, k[:, :, None].expand(b, h, 3, t, d).reshape(b, 3 * h, t, d).double(), v)

    q, k, v = (torch.randn(2, h, 7, 5, dtype=torch.float64) for h in (6, 2, 6))
    case = Case(Repeat(), (q, k.float(), v))
    assert "expand" in case.passed.text()
    case.check([q, k.float(), v])


# --- rows whose keys are all hidden: numbers and gradients are those of the graph that attention replaces
# ----------------------------

LOWEST32 = torch.finfo(torch.float32).min
HIDING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # (scores, visible, bias) -> masked scores; bias has the shape of the scores
    "masked_fill lowest": lambda s, see, b: s.masked_fill(~see, torch.finfo(s.dtype).min),
    "where lowest": lambda s, see, b: torch.where(see, s, torch.finfo(s.dtype).min),
    "where -1e9": lambda s, see, b: torch.where(see, s, torch.tensor(-1e9, dtype=s.dtype)),
    "masked_fill -1e4": lambda s, see, b: s.masked_fill(~see, -1e4),
    "masked_fill -1e5": lambda s, see, b: s.masked_fill(~see, -1e5),
    "masked_fill -1e30": lambda s, see, b: s.masked_fill(~see, -1e30),
    "masked_fill -inf": lambda s, see, b: s.masked_fill(~see, -math.inf),
    "add lowest": lambda s, see, b: s + (~see).to(s.dtype) * torch.finfo(s.dtype).min,
    "add -1e4": lambda s, see, b: s + (~see).to(s.dtype) * -1e4,
    "add -inf": lambda s, see, b: s + torch.zeros_like(s[:1]).masked_fill(~see, -math.inf),
    "bias inside": lambda s, see, b: (s + b).masked_fill(~see, torch.finfo(s.dtype).min),
    "bias inside, -inf": lambda s, see, b: (s + b).masked_fill(~see, -math.inf),
    "bias outside": lambda s, see, b: torch.where(see, s, torch.finfo(s.dtype).min) + b,
    "fill, then padding added": lambda s, see, b: torch.where(torch.ones(s.shape[-2:], dtype=torch.bool).tril(), s, torch.finfo(s.dtype).min)
    + (~see).to(s.dtype) * torch.finfo(s.dtype).min,
    "two fills": lambda s, see, b: s.masked_fill(~see[..., :1], LOWEST32).masked_fill(~see, LOWEST32),
    "two unlike fills": lambda s, see, b: s.masked_fill(~see[..., :1], -math.inf).masked_fill(~see, torch.finfo(s.dtype).min),
    "heads merged": lambda s, see, b: s.unflatten(0, (-1, 1)).masked_fill(~see[:, None], torch.finfo(s.dtype).min).flatten(0, 1),
}


class Hidden(nn.Module):
    def __init__(self, hide: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.hide = hide

    def forward(self, q: Tensor, k: Tensor, v: Tensor, see: Tensor, bias: Tensor) -> Tensor:
        return self.hide(q @ k.transpose(-1, -2) * 0.4, see, bias).softmax(-1) @ v


class Far(nn.Module):
    def __init__(self, number: float, added: bool) -> None:
        super().__init__()
        self.number, self.added = number, added

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        s = q @ k.transpose(-1, -2)
        if self.added:
            return (s + torch.zeros_like(s[:1, :1]).masked_fill(later, self.number)).softmax(-1) @ v
        return s.masked_fill(later, self.number).softmax(-1) @ v


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("number", [-6e4, -1e5, -1e8])
def test_a_number_that_scores_reach_hides_nothing(number: float, added: bool) -> None:
    q, k, v = (torch.randn(2, 3, 7, 5, dtype=torch.float64).abs() for _ in range(3))
    q, k = (q * -number / 4, -k) if not added else (q * number / 4, -k * torch.arange(1.0, 8)[:, None])
    module = Far(number, added)
    case = Case(module, (q, k, v))
    case.check([q, k, v])
    want = module(q, k, v)
    assert not torch.allclose(want, Far(-math.inf, added)(q, k, v))
    close(case.run(case.passed, [q, k, v], grads=False)[0][0], want)


@pytest.mark.parametrize("t", [7, 70], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("name", list(HIDING))
def test_hidden_rows_have_eagers_numbers(name: str, t: int) -> None:
    """Every form of mask, where all rows see something, where some see nothing, where a sample sees nothing, where all
    is hidden."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, t, 5, generator=gen, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, t, t, generator=gen, dtype=torch.float64, requires_grad=True)
    see = torch.rand(2, t, t, generator=gen) > 0.4
    see[..., 0] = True
    case = Case(Hidden(HIDING[name]), (q, k, v, see, bias))
    assert len(case.nodes) == (name not in ("masked_fill -1e4", "masked_fill -1e5"))  # scores may reach them
    for kind in ("some", "rows", "sample", "none"):
        if kind == "rows":
            see[0, 2:5] = see[1, -1] = False
        elif kind != "some":
            see[int(kind == "sample"):] = False
        (y,), grads = case.run(case.passed, [q, k, v, see, bias])
        want = case.module(q, k, v, see, bias)
        dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(11), dtype=want.dtype)
        theirs = torch.autograd.grad(want, [q, k, v, bias], dy, allow_unused=True)
        for what, mine, eager in zip(("y", "dq", "dk", "dv", "dbias"), (y, *grads), (want.detach(), *theirs), strict=True):
            a, b = (torch.zeros(()).double() if x is None else x for x in (mine, eager))
            torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-10, atol=1e-10 * float(b.nan_to_num().abs().max()), equal_nan=True,
                                       msg=lambda m, where=f"{kind} {what}": f"{where}: {m}")
