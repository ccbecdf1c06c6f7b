"""Tensor.data: what reads it is captured as what it is, the same numbers out of autograd's sight; what edits or replaces a
tensor by it, which autograd does not see either, is PyTorch's, unless it is a weight or buffer that nothing has used
before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Body(nn.Module):
    def __init__(self, does: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("low", torch.zeros(1))
        self.does = does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, self.layer(x), x)


class Around(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), body, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)).tanh())


def _assigned(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.low = torch.minimum(m.low, h.data.min())
    return h - m.low


def _leaf(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h.data
    y.requires_grad = True
    return (h * y).sum() + y.sum()


def _copied(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h.data.clone()
    y.mul_(2)
    return y * h


def _after_an_edit(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = (h * 2).mul_(3)
    return (h * y.data).sum()


READS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a scale": lambda m, h, x: h / h.data.abs().max(),
    "a mask": lambda m, h, x: h * (h.data > 0),
    "of a parameter": lambda m, h, x: h * m.other.weight.data.abs().max(),
    "of an argument": lambda m, h, x: h + x.data,
    "by getattr": lambda m, h, x: h / getattr(h, "da" + "ta").abs().max(),
    "by the descriptor": lambda m, h, x: h - Tensor.data.__get__(h).abs().max(),  # type: ignore[attr-defined]
    "beside itself": lambda m, h, x: (h, h.data),
    "a view of it": lambda m, h, x: h * h.data.view(-1)[:4],
    "a new buffer": _assigned,
    "a leaf": _leaf,
    "a copy, edited": _copied,
    "after an edit": _after_an_edit,
}


def _replaced(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.low.data = torch.minimum(m.low, h.detach().min())
    return h - m.low


def _weight(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.layer.weight.data = m.layer.weight.data * 0.5
    return h


def _by_descriptor(m: Any, h: Tensor, x: Tensor) -> Tensor:
    Tensor.data.__set__(m.low, m.low + 1)  # type: ignore[attr-defined]
    return h - m.low


def _made(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    y.data = y.data * 3
    return y


def _vector(m: Any, h: Tensor, x: Tensor) -> Tensor:
    nn.utils.vector_to_parameters(torch.ones(20), m.other.parameters())
    return h * m.other.weight.sum()


def _average(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.low.data.mul_(0.9).add_(h.detach().mean().view(1), alpha=0.1)
    return h - m.low


def _clamped(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.other.weight.data.clamp_(-0.1, 0.1)
    return m.other(h)


def _clamped_after_its_use(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = m.other(h)  # whose gradient reads the clamped weight
    return y + _clamped(m, h, x)


def _after_its_use(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    z = y * y  # its gradient reads the edited y, as autograd does not see the edit
    y.data.mul_(3)
    return z


def _of_a_view(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    y.view(-1).data[:3] = 5
    return y * h


def _view_of_it(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    y.data.view(-1)[0:2].zero_()
    return y * h


def _of_all(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = torch.cat((h, x), 1)[:, :3][:, :]  # of all: an alias, as .data is one
    y += h[:, 1:]
    return y * y


def _out(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    torch.add(h.detach(), 1, out=y.data)
    return y * h


def _edited_later(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    w = (h * y.data).sum()  # its gradient reads y as it is behind the edit, which the version of .data does not tell
    y.mul_(3)
    return w + y.sum()


EDITS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a buffer is replaced": _replaced,
    "a parameter is replaced": _weight,
    "replaced by the descriptor": _by_descriptor,
    "an intermediate is replaced": _made,
    "vector_to_parameters": _vector,
    "a moving average": _average,
    "a weight is clamped after its use": _clamped_after_its_use,
    "after its use": _after_its_use,
    "of a view": _of_a_view,
    "a view of it": _view_of_it,
    "as out": _out,
    "the tensor itself, later": _edited_later,
}


def _beside(eager: nn.Module, ours: Any) -> None:
    for step in range(4):
        seen: list[Any] = []
        for m in (eager, ours):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
            m.zero_grad()
            y = m(x)
            sum(t.sum() for t in (y if isinstance(y, tuple) else (y,))).backward()  # type: ignore[union-attr]
            state = {k: v.detach().clone() for k, v in m.state_dict().items()}
            seen.append((y, x.grad, [p.grad for p in m.parameters()], state))
        torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("name", READS)
def test_what_reads_it_is_in_the_engine(name: str) -> None:
    torch.manual_seed(0)
    eager = Body(READS[name])
    ours = ORTModule(copy.deepcopy(eager))
    _beside(eager, ours)
    report = ours.report()
    assert not report.eager and report.node_share == 1, str(report)


def test_an_alias_that_is_none_of_it_may_be_edited() -> None:
    """x[:, :] of all there is; GhostNet adds its shortcut to one."""
    torch.manual_seed(0)
    eager = Body(_of_all)
    ours = ORTModule(copy.deepcopy(eager))
    _beside(eager, ours)
    report = ours.report()
    assert not report.eager and report.node_share == 1, str(report)


@pytest.mark.parametrize("name", EDITS)
def test_what_edits_by_it_is_left_to_pytorch(name: str) -> None:
    torch.manual_seed(0)
    eager = Body(EDITS[name])
    ours = ORTModule(copy.deepcopy(eager))
    _beside(eager, ours)
    report = str(ours.report())
    assert "Tensor.data" in report and report.count("4 calls wholly in PyTorch"), report


def _decayed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.low.data.add_(1)
    return h * m.low


@pytest.mark.parametrize("does", [_clamped, _decayed])
def test_weights_clamped_before_they_are_used(does: Callable[[Any, Tensor, Tensor], Any]) -> None:
    """As Gemma 3n does in forward."""
    torch.manual_seed(0)
    for eager in (Body(does), Around(Body(does))):
        ours = ORTModule(copy.deepcopy(eager))
        _beside(eager, ours)
        report = ours.report()
        assert not report.eager and report.node_share == 1, str(report)


@pytest.mark.parametrize("name", ["a buffer is replaced", "a moving average", "a weight is clamped after its use", "after its use"])
def test_in_a_submodule(name: str) -> None:
    torch.manual_seed(0)
    eager = Around(Body(EDITS[name]))
    _beside(eager, ORTModule(copy.deepcopy(eager)))


def test_what_the_export_cannot_follow_is_named() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True)[0]

    ours = ORTModule(Packed())
    ours(torch.randn(2, 3, 4), torch.tensor([3, 2])).sum().backward()
    assert "pack_padded_sequence" in ours.report().eager[0].reason, str(ours.report())
