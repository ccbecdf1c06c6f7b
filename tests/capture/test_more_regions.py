"""What stays in PyTorch by parts: CTC loss, spectra; and operators that are taken apart. Beside eager in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule


class Fn(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f
        self.body = nn.Linear(6, 6)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.f(torch.tanh(self.body(x)), *rest)


def beside(f: Callable[..., Tensor], batches: list[tuple[Tensor, ...]], host: list[str] | None, captures: int | None = 2) -> ORTModule:
    eager = Fn(f)
    ours = ORTModule(eager)
    for batch in batches:
        results = []
        for m in (ours, eager):
            eager.zero_grad()
            own = [t.clone().requires_grad_(t.is_floating_point()) for t in batch]
            y = m(*own)
            y.square().sum().backward()
            results.append([y.detach(), *[t.grad for t in own], *[p.grad for p in eager.parameters()]])
        for a, b in zip(*results):
            assert (a is None) == (b is None)
            assert a is None or a.dtype == b.dtype and a.shape == b.shape
            assert a is None or (a - b).abs().max() <= 1e-10 * b.abs().max().clamp_min(1e-6)
    report = ours.report()
    assert not report.eager and captures in (None, report.n_captures), str(report)
    assert host is None or sorted({h.name for h in report.host}) == host, str(report)
    return ours


def ctc(b: int, t: int) -> tuple[Tensor, ...]:
    return torch.randn(b, t, 6), torch.randint(1, 6, (b, 4)), torch.full((b,), t), torch.randint(1, 5, (b,))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc(seeded: None, reduction: str) -> None:
    def f(x: Tensor, y: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y, n, m, reduction=reduction, zero_infinity=True)

    beside(f, [ctc(2, 9), ctc(3, 12), ctc(4, 15)], [])


def test_ctc_with_labels_that_are_selected(seeded: None) -> None:
    """As Wav2Vec2ForCTC does it: labels of a number that only the data knows."""
    def f(x: Tensor, y: Tensor) -> Tensor:
        keep = y >= 0
        n = torch.full((x.shape[0],), x.shape[1])
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y.masked_select(keep), n, keep.sum(-1), zero_infinity=True)

    batches = []
    for b, t in ((2, 9), (3, 12), (2, 20)):
        y = torch.randint(1, 6, (b, 4))
        y[0, 2:] = -100
        batches.append((torch.randn(b, t, 6), y))
    beside(f, batches, [], 2)
    beside(lambda x, y: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y[y >= 0], torch.full((x.shape[0],), x.shape[1]), (y >= 0).sum(-1)),
           batches, [], 2)
    seen = lambda x, y: f(x, y) * y.masked_select(y >= 0).sum()  # noqa: E731  (labels that others read, too)
    beside(seen, batches, None, 2)


def test_tensors_of_a_size_that_data_decides(seeded: None) -> None:
    """torch.tensor converts what it has made and detaches it in place: the conversion's result is what it is given."""
    def f(x: Tensor, y: Tensor) -> Tensor:
        kept = x[y > 0]
        return kept.sum(0) / torch.tensor(kept.shape[0]) + torch.tensor([kept.shape[0], 2], dtype=x.dtype).sum()

    beside(f, [(torch.randn(n, 6), torch.arange(n) - 2) for n in (9, 12, 15)], None)


def test_ctc_left_to_pytorch(seeded: None) -> None:
    one = (torch.randn(9, 6), torch.randint(1, 6, (4,)), torch.tensor(9), torch.tensor(4))
    ours = beside(lambda x, *rest: F.ctc_loss(x.log_softmax(-1), *rest), [one], ["aten::ctc_loss"], 1)
    assert {h.reason for h in ours.report().host} == {"sizes that depend on data"}


def test_ctc_outside_of_captures_is_pytorchs(seeded: None) -> None:
    own = torch.ctc_loss
    beside(lambda x, *rest: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), *rest), [ctc(2, 9)], [], 1)
    assert torch.ctc_loss is own


def test_spectra_are_regions_of_their_own(seeded: None) -> None:
    """Two filters, with work of the engine's between them: two regions."""
    def mix(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.tensor([1.0, 0.5j, 2.0, 1.0, 1.0, 1.0]), n=x.shape[1], dim=1)

    def f(x: Tensor) -> Tensor:
        return mix(torch.relu(mix(x)) * 2)

    ours = beside(f, [(torch.randn(b, 8, 6),) for b in (2, 3, 5)], None)
    host = ours.report().host
    assert sum(h.count for h in host) == 4 and {h.reason for h in host} == {"complex numbers"}, host


def test_spectra_that_are_written_in_parts(seeded: None) -> None:
    def f(x: Tensor) -> Tensor:
        s = torch.fft.rfft(x, dim=1)
        out = torch.zeros_like(s)
        out[:, :3] = s[:, :3] * 2
        out[:, 4] = s[:, 1]
        return torch.fft.irfft(out, n=x.shape[1], dim=1)

    beside(f, [(torch.randn(b, 8, 6),) for b in (2, 3, 5)], None)


COMPOSITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y, keepdim=True),
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, y.roll(1, 0), swap=True),
    "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, y.sign(), 0.5),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign(), 0.1),
    "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y.abs(), full=True),
    "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, y.sign(), 0.2, reduction="none"),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_are_taken_apart(seeded: None, name: str) -> None:
    beside(COMPOSITES[name], [(torch.randn(b, 6), torch.randn(b, 6)) for b in (4, 7, 5)], [])


def test_fill_diagonal(seeded: None) -> None:
    def f(x: Tensor) -> Tensor:
        s = x @ x.t()
        s.fill_diagonal_(0.25)
        return s * (x[:, :1] > 0).to(x.dtype).expand(-1, len(x)).clone().fill_diagonal_(3)

    beside(f, [(torch.randn(b, 6),) for b in (4, 7, 5)], [], None)


def test_a_fill_of_a_size_that_another_region_comes_before(seeded: None) -> None:
    """What the first mask writes goes into what the second takes out, a column of which is filled: the fill has no
    operand but its size, and belongs behind the first region all the same."""

    def f(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[x < 0] = x[x < 0]
        inside = y.sum(-1) < -0.5
        w = y[inside].cumsum(-1)
        w[..., 0] = -3.0
        out = torch.zeros_like(x)
        out[inside] = w * 2
        return out + y

    beside(f, [(torch.randn(n, 6),) for n in (8, 8, 5)], None)


@pytest.mark.parametrize("edit", [lambda v: v.fill_(0.4), lambda v: v.copy_(torch.ones(3, 6)), lambda v: v.zero_(), lambda v: v.mul_(0).add_(1)])
def test_a_result_that_is_overwritten(seeded: None, edit: Callable[[Tensor], Tensor]) -> None:
    """Nobody reads it, so forward leaves it out; its gradient is zero, not None."""

    def f(h: Tensor) -> Tensor:
        v = torch.sinc(h)
        edit(v)
        return v + torch.zeros_like(h).detach()

    beside(f, [(torch.randn(3, 6),)] * 2, None, None)


def test_factories_that_write_into_a_tensor(seeded: None) -> None:
    def f(h: Tensor) -> Tensor:
        g = h.T @ h
        eye = torch.eye(*g.shape, out=torch.empty_like(g).detach())
        steps = torch.empty(6, dtype=h.dtype)
        torch.arange(6, out=steps)
        full = torch.empty(6, 6)
        torch.full((6, 6), 2.0, out=full)
        return (g - eye) * steps + full

    beside(f, [(torch.randn(3, 6),)] * 2, None, None)


WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda h, x: h + (x > 0).long() @ torch.ones(6, 6, dtype=torch.int64),
    "einsum": lambda h, x: h * torch.einsum("ij,kj->ik", (x > 0).int(), (x > 0).int())[:, :1],
    "linear": lambda h, x: h + F.linear((x > 0).long(), torch.ones(6, 6, dtype=torch.int64)),
    "addmm": lambda h, x: h + torch.addmm(torch.ones(6, dtype=torch.int64), (x > 0).long(), torch.ones(6, 6, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_products_of_whole_numbers(seeded: None, name: str) -> None:
    ours = beside(WHOLE[name], [(torch.randn(n, 6), torch.randn(n, 6)) for n in (3, 4, 5)], [f"aten::{name}.default"])
    assert {h.reason for h in ours.report().host} == {"a product of matrices of whole numbers"}


@pytest.mark.parametrize("f, reason", [(lambda x, i: torch.complex(x, x), "a result of complex numbers is returned"),
                                       (lambda x, i: x[i], "a result whose place in memory depends on data"),
                                       (lambda x, i: x[x > i], "a result whose size depends on data")])
def test_results_that_are_none_of_the_engines(f: Callable[..., Tensor], reason: str) -> None:
    ours = ORTModule(Fn(f))
    ours(torch.randn(3, 6), torch.tensor(1))
    assert [reason in e.reason for e in ours.report().eager] == [True], str(ours.report())
