"""Complex numbers in the engine, as pairs of reals (capture/pairs.py): rotary embeddings as Meta's Llama and torchtitan write them, arithmetic and views; what has no rule runs in
PyTorch. Beside eager in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

C = torch.view_as_complex
R = torch.view_as_real


def frequencies(d: int, length: int) -> Tensor:
    angles = torch.outer(torch.arange(length).double(), 1.0 / 10000 ** (torch.arange(0, d, 2).double() / d))
    return torch.polar(torch.ones_like(angles), angles)


def rotary(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    qc, kc = (C(x.reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
    freqs = freqs[: q.shape[1]].view(1, qc.shape[1], 1, qc.shape[-1])
    return R(qc * freqs).flatten(3).type_as(q), R(kc * freqs).flatten(3).type_as(k)


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1) for y in self.qkv(x).split(d, -1))
        q, k = rotary(q, k, freqs)
        y = nn.functional.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class Llama(nn.Module):
    def __init__(self, kept: str, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.blocks, self.kept, self.size = nn.ModuleList(Block(d, heads) for _ in range(2)), kept, d // heads
        if kept == "buffer":
            self.register_buffer("freqs", frequencies(d // heads, 32), persistent=False)
        elif kept == "attribute":
            self.freqs = frequencies(d // heads, 32)

    def forward(self, x: Tensor) -> Tensor:
        freqs = self.freqs.to(x.device) if self.kept != "made" else frequencies(self.size, 32)
        for block in self.blocks:
            x = block(x, freqs)
        return x


def same(eager: nn.Module, ours: ORTModule, *args: Tensor) -> None:
    results = []
    for m in (eager, ours):
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        for p in m.parameters():
            p.grad = None
        y = m(*own)
        y.square().sum().backward()
        results.append([y.detach(), *[x.grad for x in own], *[p.grad for p in m.parameters()]])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kept", ["made", "attribute", "buffer"])
def test_rotary_embeddings(seeded: None, kept: str) -> None:
    eager = Llama(kept).double()
    ours = ORTModule(copy.deepcopy(eager))
    for b, t in ((2, 5), (3, 9), (1, 32)):
        same(eager, ours, torch.randn(b, t, 16, dtype=torch.float64))
    report = ours.report()
    assert report.node_share == 1 and report.n_captures == 2 and not report.eager, str(report)


def test_a_table_that_is_an_argument(seeded: None) -> None:
    """Blocks that are wrapped one by one are given it: contiguous, a piece, expanded, conjugated, of several lengths."""
    eager = Block(16, 2).double()
    ours = ORTModule(copy.deepcopy(eager))
    for t, table in ((5, frequencies(8, 32)), (9, frequencies(8, 32)[4:]), (9, frequencies(8, 16)), (7, frequencies(8, 40).conj()), (3, frequencies(8, 1).expand(16, 4)),
                     (5, frequencies(8, 64)[::2])):  # fmt: skip
        x = torch.randn(2, t, 16, dtype=torch.float64)
        results = []
        for m in (eager, ours):
            own = x.clone().requires_grad_()
            y = m(own, table)
            y.square().sum().backward()
            results.append([y, own.grad, *[p.grad for p in m.parameters()]])
            m.zero_grad()
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
    report = ours.report()
    assert report.node_share == 1 and not report.eager and report.n_captures <= 4, str(report)  # one where the table has one row, one where its strides differ


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return R(z(torch.tanh(self.body(x))) * a + b * a.conj())


@pytest.mark.parametrize("again", [False, True])
def test_a_table_that_requires_a_gradient(seeded: None, again: bool) -> None:
    """A leaf or computed, one for two arguments, and where the backward is differentiated."""
    eager = Times().double()
    ours = ORTModule(copy.deepcopy(eager))
    x, found = torch.randn(2, 5, 6, dtype=torch.float64), []
    for m in (eager, ours):
        grads: list[Tensor | None] = []
        for twice in (False, True):
            leaf = TABLE.clone().requires_grad_()
            a = leaf if twice else leaf * 2
            b = a if twice else leaf.exp()
            loss = m(x, a, b).square().sum()
            if again:
                (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
                loss = R(g).square().sum()
            m.zero_grad()
            loss.backward()
            grads += [leaf.grad, *[p.grad for p in m.parameters()]]
        found.append(grads)
    for e, o in zip(*found, strict=True):
        torch.testing.assert_close(o, e, rtol=1e-9, atol=1e-9)
    assert not ours.report().eager and not ours.report().host
    with torch.no_grad():
        torch.testing.assert_close(ours(x, TABLE, TABLE), eager(x, TABLE, TABLE), rtol=1e-10, atol=1e-10)


def test_a_table_that_changes(seeded: None) -> None:
    """Edited in place, by way of .data, and replaced: the next call takes it as it is."""
    eager = Llama("buffer").double()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    same(eager, ours, x)
    for m in (eager, ours.module):
        m.freqs.mul_(1j)
    same(eager, ours, x)
    for m in (eager, ours.module):
        m.freqs.data = m.freqs.data * 0.5
    same(eager, ours, x)
    for m in (eager, ours.module):
        m.freqs = m.freqs.conj()
    same(eager, ours, x)
    for m in (eager, ours.module):
        m.freqs = m.freqs.resolve_conj().clone()
    same(eager, ours, x)
    assert not ours.report().eager, str(ours.report())


class Of(nn.Module):
    def __init__(self, f: Callable[..., Tensor], *held: Tensor) -> None:
        super().__init__()
        self.f, self.body = f, nn.Linear(6, 6)
        for i, t in enumerate(held):
            self.register_buffer(f"t{i}", t)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(torch.tanh(self.body(x)), *self.buffers())


def z(x: Tensor) -> Tensor:
    return C(x.reshape(*x.shape[:-1], 3, 2))


TABLE = torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
WIDE = torch.randn(7, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(2))
POSITIONS = torch.tensor([3, 0, 5, 5])
FORMS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "product with a table": (lambda x, t: R(z(x) * t), [TABLE]),
    "table first": (lambda x, t: R(t * z(x)), [TABLE]),
    "square": (lambda x: R(z(x) * z(x)), []),
    "product of two": (lambda x: R(z(x) * z(x.flip(-1))), []),
    "conjugate": (lambda x, t: R(z(x) * t.conj() + z(x).conj()), [TABLE]),
    "real and imaginary": (lambda x: z(x).real * z(x).imag, []),
    "made of parts": (lambda x: R(torch.complex(x[..., :3], x[..., 3:]) * z(x)), []),
    "polar": (lambda x: R(torch.polar(x[..., :3].exp(), x[..., 3:])), []),
    "by a number": (lambda x: R(z(x) * 2.5 - z(x) / 3), []),
    "by reals": (lambda x: R(z(x) * x[..., :3] / (1.5 + x[..., 3:])), []),
    "by one real": (lambda x: R(z(x) * x.sum()), []),
    "by a complex number": (lambda x: R(z(x) * (2 - 3j) + 1j * z(x)), []),
    "reals by a complex number": (lambda x: R(1j * x), []),
    "angles": (lambda x: R(torch.exp(1j * x)), []),
    "exponential": (lambda x: R(z(x).exp()), []),
    "sum with reals": (lambda x: R(z(x) + x[..., :3]), []),
    "reals less it": (lambda x: R(x[0, 0, :3] - z(x) - x.sum()), []),
    "sum with numbers": (lambda x: R(z(x) + 2 - (1 - 3j)) + R(5j - z(x)), []),
    "negated": (lambda x: R(-z(x)), []),
    "sum of an axis": (lambda x: R(z(x).sum(0) + z(x).mean((0, -1), keepdim=True)), []),
    "sum of all": (lambda x: R(z(x).sum((0, 1, 2))), []),
    "transposed": (lambda x: R(z(x).transpose(-1, 0).transpose(-2, -1).contiguous()), []),
    "permuted": (lambda x: R(z(x).permute(2, -3, 1)), []),
    "sliced from the end": (lambda x: R(z(x)[..., -2:] * z(x)[..., :-1]), []),
    "selected": (lambda x: R(z(x).select(-1, 1)), []),
    "an axis more": (lambda x: R(z(x).unsqueeze(-1) * z(x).unsqueeze(-2)), []),
    "an axis of one": (lambda x: R(z(x)[..., :1].squeeze(-1)), []),
    "expanded": (lambda x: R(z(x).unsqueeze(0).expand(2, -1, -1, -1)), []),
    "flattened": (lambda x: R(z(x).flatten(0, 1).unflatten(-1, (3, 1))), []),
    "joined": (lambda x: R(torch.cat([z(x), z(x) * 2], -1)) + R(torch.stack([z(x), -z(x)], -1)).flatten(-3, -2), []),
    "by positions": (lambda x, w: R(z(x) * w[POSITIONS][:, :3].view(4, 1, 3)[: x.shape[0]]), [WIDE]),
    "chosen rows": (lambda x, w: R(z(x) * w.index_select(0, POSITIONS)[1]), [WIDE]),
    "flipped": (lambda x: R(z(x).flip(-1)), []),
    "kept from gradients": (lambda x: R(z(x) * z(x).detach()), []),
    "without gradients": (lambda x: R(z(x) * times_two(x)), []),
    "a number of single precision": (lambda x: R(z(x.float()) * z(x.float())).double(), []),
    "of both precisions": (lambda x, t: R(z(x.float()) * t), [TABLE]),
}


def times_two(x: Tensor) -> Tensor:
    with torch.no_grad():
        return z(x) * 2


@pytest.mark.parametrize("form", FORMS)
def test_forms(seeded: None, form: str) -> None:
    f, held = FORMS[form]
    eager = Of(f, *held).double()
    for i, t in enumerate(held):
        setattr(eager, f"t{i}", t)
    ours = ORTModule(copy.deepcopy(eager))
    for shape in ((4, 5, 6), (3, 2, 6), (2, 7, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        if "single" in form:
            y, ref = ours(x), eager(x)
            torch.testing.assert_close(y, ref, rtol=1e-5, atol=1e-6)
        elif "both" in form:
            torch.testing.assert_close(ours(x), eager(x), rtol=1e-6, atol=1e-6)
        else:
            same(eager, ours, x)
    report = ours.report()
    assert report.node_share == 1 and not report.host and not report.eager, str(report)


def test_a_backward_that_is_differentiated(seeded: None) -> None:
    eager = Of(FORMS["product with a table"][0], TABLE).double()
    ours = ORTModule(copy.deepcopy(eager))
    given = torch.randn(2, 5, 6, dtype=torch.float64)
    found = []
    for m in (eager, ours):
        x = given.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
        found.append([x.grad, *[p.grad for p in m.parameters()]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
    assert ours.module.t0.is_complex() and not ours.report().eager


REGIONS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "spectrum": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=6), []),
    "absolute": (lambda x: z(x).abs(), []),
    "root": (lambda x: R(z(x).sqrt()), []),
    "quotient": (lambda x: R(z(x) / (z(x) + z(x.cos()) * 2)), []),
    "matrix product": (lambda x: R(z(x) @ z(x).transpose(-1, -2)), []),
}


@pytest.mark.parametrize("form", REGIONS)
def test_what_has_no_rule_runs_in_pytorch(seeded: None, form: str) -> None:
    """As a region: all of what complex tensors connect, and nothing else."""
    f, held = REGIONS[form]
    eager = Of(lambda x, *t: f(x, *t).sum() * R(z(x) * z(x)), *held).double()
    ours = ORTModule(copy.deepcopy(eager))
    for shape in ((4, 5, 6), (3, 2, 6)):
        same(eager, ours, torch.randn(shape, dtype=torch.float64))
    report = ours.report()
    assert len(report.host) >= 1 and not report.eager, str(report)


def test_results_and_arguments_that_are_complex_run_in_pytorch(seeded: None) -> None:
    for f in (lambda x: z(x) * z(x), lambda x: (R(z(x)), z(x))):
        eager = Of(f).double()
        ours = ORTModule(copy.deepcopy(eager))
        x = torch.randn(4, 5, 6, dtype=torch.float64)
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-12, atol=1e-12)


class Turned(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        v = self.view(x)
        turned = v.flip(-1)
        return torch.where(table != 0, turned, v) if x.dtype == torch.bool else turned * table + v


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x, "permuted": lambda x: x.movedim(0, -2), "cut": lambda x: x[..., x.shape[-2] // 2 :, :], "turned over": lambda x: x.flip(-2), "every other": lambda x: x[..., ::2, :],
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_pairs_read_from_their_end(dtype: torch.dtype, view: str) -> None:
    """Operands whose last axis is two, flipped: dense and not, beside tables, of one pair and of many."""
    g = torch.Generator().manual_seed(5)
    eager = Turned(VIEWS[view])
    ours = ORTModule(Turned(VIEWS[view]))
    for shape in ((1, 2), (3, 2), (5, 7, 2), (2, 300, 3, 2), (4, 9, 8, 16, 2)):
        x = (torch.randn(shape, generator=g) * 9).abs().to(dtype)
        pairs = VIEWS[view](x).shape[-2]
        table = (torch.randn((pairs, 2), generator=g) * 9).abs().to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(ours(x, table), eager(x, table), rtol=0 if not dtype.is_floating_point else None, atol=0 if not dtype.is_floating_point else None)
    assert not ours.report().eager
