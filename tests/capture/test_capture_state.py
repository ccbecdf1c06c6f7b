"""What a captured forward writes and reads besides its arguments: edits in place, buffers, parameters; and what a
capture leaves alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captured import check, k, r
from captured_models import ResNet, gpt2, ids
from torch import Tensor, nn

from ortmodule.capture import CaptureError, capture


class Stateful(nn.Module):
    """Runs `f(module, x)`; has a parameter, buffers and a plain tensor."""

    def __init__(self, f: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(r(5, 7).detach())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("average", r(7, grad=False))
        self.register_buffer("cache", torch.zeros(11, 7))

    def forward(self, x: Tensor) -> Any:
        return self.f(self, x)


def _fill_slices(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[1:3] = x[0]
    y[:, 2] = 0.5
    y[..., ::2] += 1
    y[-1, -1] = x.sum()
    return y


def _chain(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * m.w
    v = y.view(7, 5).t()[1:4]
    v.mul_(3)
    return y, v + 1


def _late_view(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    row = y[2]
    y.add_(1)
    z = row * 2
    row.sub_(x[0])
    return y, z


def _masked(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0.3] = 0.0
    y.masked_fill_(x < -0.5, 2.0)
    return y


def _splits(m: Any, x: Tensor) -> Tensor:
    y = x.detach() * 1  # autograd forbids edits of one of several views
    a, c, _d = y.split([2, 2, 3], 1)
    a.mul_(c)
    y.unbind(0)[3].zero_()
    y.chunk(2, 1)[1].neg_()
    return y


def _index(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    i = torch.tensor([0, 2])
    y[i] = x[1] * 3
    y[:, i] = 1.0
    y[i, i + 1] = x[3, :2]
    y.index_put_((i,), x[i], accumulate=True)
    y.scatter_(1, torch.tensor([[0, 1]] * 5), x[:, :2])
    y.index_add_(0, i, x[3:])
    return y


def _ema(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    m.count += 1
    return x * m.average / m.count


def _detached_write(m: Any, x: Tensor) -> Tensor:
    y = x * m.w
    y.detach()[1:3].mul_(5)
    return y * x


def _no_grad_write(m: Any, x: Tensor) -> Tensor:
    y = x * m.w
    with torch.no_grad():
        y[0] = 7
    return y * y


def _kv_cache(m: Any, x: Tensor) -> Tensor:
    m.cache[2:7].copy_(x.detach())
    return x @ m.cache.t()


def _input(m: Any, x: Tensor) -> Tensor:
    x += 1
    return x * m.w


def _dtype(m: Any, x: Tensor) -> Tensor:
    y = (x * 1).float()
    y.add_(x.double())
    i = torch.zeros(5, 7, dtype=torch.int64)
    i.add_(2).mul_(3)
    return y * i


def _triangle(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.tril_().clamp_(max=0.9)
    y.transpose(0, 1).add_(x.t())
    y.diagonal().fill_(2.0)
    return y


def _out(m: Any, x: Tensor) -> Tensor:
    y = torch.empty(5, 7, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(x, 2, out=y)
    return y + x


def _eval_dropout(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = torch.atleast_1d(F.dropout(F.dropout(y, 0.5, False), 0.0))
    z.add_(1)
    return y * z


STATE: dict[str, Callable[[Any, Tensor], Any]] = {
    f.__name__: f
    for f in (
        _fill_slices,
        _chain,
        _late_view,
        _masked,
        _splits,
        _index,
        _ema,
        _detached_write,
        _no_grad_write,
        _kv_cache,
        _dtype,
        _triangle,
        _eval_dropout,
        _out,
    )
}


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_edits_in_place_become_values_and_writes(name: str, dynamic: bool) -> None:
    c = check(Stateful(STATE[name]), (r(5, 7),), dynamic=dynamic, ort=name != "_triangle")
    assert bool(c.writes) == (name in ("_ema", "_kv_cache"))


def test_an_edited_argument_is_written_back() -> None:
    c = check(Stateful(_input), (r(5, 7, grad=False),))
    assert [c.inputs[i].kind for i in c.writes] == ["user"]


def test_export_leaves_plain_tensors_alone() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.zeros(7)
            self.calls = 0
            self.log: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.plain.add_(1)
            self.calls += 1
            self.log.append(1)
            return x * self.plain

    m = M()
    c = capture(m, (r(5, 7),), {})
    assert not m.plain.any() and m.calls == 0 and m.log == []
    assert [c.inputs[i].tensor is m.plain for i in c.writes] == [True]


def test_expanded_write_is_refused() -> None:
    def f(m: Any, x: Tensor) -> Tensor:
        y = (x * 2)[0].expand(5, 7)
        y.add_(1)
        return y

    with pytest.raises(CaptureError, match="expanded view"):
        capture(Stateful(f), (r(5, 7),), {})


def test_shared_memory_write_is_refused() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(14)
            self.register_buffer("a", both[:7])
            self.register_buffer("z", both[7:])

        def forward(self, x: Tensor) -> Tensor:
            self.a.add_(1)
            return x * self.a + self.z

    with pytest.raises(CaptureError, match="shares its memory"):
        capture(M(), (r(5, 7),), {})


# --- parameters -----------------------------------------------------------------------------------


def test_tied_and_equal_parameters() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(7, 7, bias=False)
            self.z = nn.Linear(7, 7, bias=False)
            self.z.weight = self.a.weight
            self.one = nn.LayerNorm(7)
            self.two = nn.LayerNorm(7)
            self.unused = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.z(self.one(self.a(x))))

    c = check(M(), (r(5, 7),))
    assert [s.target for s in c.inputs if s.kind == "param"] == ["a.weight", "one.weight", "one.bias", "two.weight", "two.bias"]


def test_unregistered_parameter_gets_gradient() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Parameter(torch.ones(7))]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.hidden[0]

    m = M()
    c = capture(m, (r(5, 7),), {})
    assert [s.tensor is m.hidden[0] for s in c.inputs if s.kind == "const_attr"] == [True]


def test_a_capture_touches_nothing() -> None:
    m = gpt2(resid_pdrop=0.1)
    bn = ResNet()
    before = [copy.deepcopy(x.state_dict()) for x in (m, bn)]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    capture(m, (), {"input_ids": ids(3, 11), "labels": ids(3, 11)})
    capture(bn, (r(3, 3, 23, 19), k(11, 3)), {}, dynamic=True)
    assert (
        torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate() and (states[2] == np.random.get_state()[1]).all()
    )
    for x, state in zip((m, bn), before, strict=True):
        assert x.training and all(torch.equal(v, state[key]) for key, v in x.state_dict().items())
        assert all(p.grad is None for p in x.parameters())
