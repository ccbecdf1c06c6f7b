"""Attributes that forward assigns to its modules: what can be given at every call without forward is, what forward
changes once is changed once; the rest leaves the call to PyTorch. Beside eager in fp64, attributes compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Assigns(nn.Module):
    """forward: a linear layer, and what `does` to the module with its result."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x))


def _length(m: Any, h: Tensor) -> Tensor:
    m.length = h.size(0)
    return h * m.length


def _words(m: Any, h: Tensor) -> Tensor:
    m.input_dtype, m.kind, m.scale, m.shape = h.dtype, "dense", -0.0, h.shape
    return h.to(m.input_dtype) + m.scale


def _doubling(m: Any, h: Tensor) -> Tensor:
    m.factor = 1
    for _ in range(h.dim()):
        m.factor *= 2
    return h * m.factor


def _handed_over(m: Any, h: Tensor) -> Tensor:
    m.between = torch.tanh(h)
    out = m.between * 2
    m.between = None
    return out


def _restored(m: Any, h: Tensor) -> Tensor:
    before, m.scale = m.scale, 3.0
    out = h * m.scale
    m.scale = before
    return out * m.scale


def _half_length(m: Any, h: Tensor) -> Tensor:
    m.halves = h.size(0) // 2 + h.size(0) % 2
    return h[: m.halves].sum(0, keepdim=True) + h


FOLLOWED: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "a size": (_length, {}),
    "words": (_words, {}),
    "a number that begins anew": (_doubling, {"factor": None}),
    "a tensor between two methods": (_handed_over, {"between": None}),
    "set and restored": (_restored, {"scale": 0.5}),
    "computed from a size": (_half_length, {}),
}


class Reads(nn.Module):
    """Stays in PyTorch (a clock), and reads what the code around it has assigned to it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + 0 * time.time()


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.reads = Reads()

    def forward(self, x: Tensor) -> Tensor:
        self.reads.factor = 2.0
        y = self.reads(self.linear(x))
        self.reads.factor = 3.0
        return y + self.reads(y)


def test_a_module_kept_in_pytorch_reads_what_is_assigned_to_it() -> None:
    torch.manual_seed(0)
    eager = Around()
    ours = ORTModule(copy.deepcopy(eager))
    _beside(ours, eager, (6, 6, 7, 9))


def _public(m: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(m).items() if k[0] != "_" and k not in ("does", "training")}


def _beside(ours: Any, eager: Any, sizes: tuple[int, ...]) -> None:
    for i, n in enumerate(sizes):
        x = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        out = []
        for m in (eager, ours):
            m.zero_grad()
            torch.manual_seed(i)
            y = m(x)
            y.sum().backward()
            out.append((y, [p.grad for p in m.parameters()], torch.get_rng_state()))
        torch.testing.assert_close(out[1], out[0], rtol=1e-12, atol=1e-12)
        for a, b in zip(ours.modules(), eager.modules(), strict=True):
            mine, theirs = _public(a), _public(b)
            assert mine == theirs and {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in theirs.items()}
            assert all(repr(mine[k]) == repr(theirs[k]) for k in mine if isinstance(mine[k], float))


@pytest.mark.parametrize("deep", [False, True], ids=["itself", "a submodule"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_attributes_are_left_as_forward_leaves_them(name: str, deep: bool) -> None:
    does, attributes = FOLLOWED[name]
    torch.manual_seed(0)
    eager: nn.Module = Assigns(does, **attributes)
    eager = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), eager) if deep else eager
    ours = ORTModule(copy.deepcopy(eager))
    _beside(ours, eager, (6, 6, 7, 300, 6, 300, 9, 6))
    report = ours.report()
    assert not report.eager and report.node_share == 1 and report.n_captures <= 2, str(report)


def _counter(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def _kept_list(m: Any, h: Tensor) -> Tensor:
    m.last = [torch.tanh(h)]
    return m.last[0] * 2


def _toggle(m: Any, h: Tensor) -> Tensor:
    m.flip = not m.flip
    return h * 3 if m.flip else h


def _dict_of_itself(m: Any, h: Tensor) -> Tensor:
    before = vars(m).get("length", 0)
    m.length = h.size(0)
    return h + before


def _sum_read(m: Any, h: Tensor) -> Tensor:
    m.total = int(h.detach().sum().round())
    return h


def _global_name(m: Any, h: Tensor) -> Tensor:
    REACHED[0].length = h.size(0)
    return h


REACHED: list[Any] = []
LEFT_TO_PYTORCH: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "a counter": (_counter, {"calls": 0}),
    "a list of tensors": (_kept_list, {}),
    "a switch": (_toggle, {"flip": False}),
    "read by vars()": (_dict_of_itself, {}),
    "a number read from a tensor": (_sum_read, {}),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTORCH)
def test_what_needs_forward_is_left_to_pytorch(name: str) -> None:
    does, attributes = LEFT_TO_PYTORCH[name]
    torch.manual_seed(0)
    eager = Assigns(does, **attributes)
    ours = ORTModule(copy.deepcopy(eager))
    for i, n in enumerate((6, 6, 7, 6, 9)):
        x = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-12, atol=1e-12)
        mine, theirs = ({k: v for k, v in _public(m).items()} for m in (ours, eager))
        assert mine.keys() == theirs.keys()
        for k, v in mine.items():
            torch.testing.assert_close(v, theirs[k], rtol=1e-12, atol=1e-12)
            assert type(v) is type(theirs[k])
    assert ours.report().eager, str(ours.report())


def test_the_module_reached_by_a_global() -> None:
    torch.manual_seed(0)
    eager = Assigns(_global_name)
    module = copy.deepcopy(eager)
    ours = ORTModule(module)
    for n in (6, 6, 7, 9):
        x = torch.randn(n, 5, dtype=torch.float64)
        REACHED[:] = [eager]
        want = eager(x)
        REACHED[:] = [module]
        torch.testing.assert_close(ours(x), want, rtol=1e-12, atol=1e-12)
        assert module.length == eager.length == n


# --- changed once ----------------------------------------------------------------------------------


class Swaps(nn.Module):
    """The first call puts another module around the same layer, as transformers' BigBird does, and installs a hook."""

    def __init__(self, more: str = "") -> None:
        super().__init__()
        self.inner: nn.Module = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), nn.Tanh())
        self.kind = "first"
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "first":
            self.kind = "second"
            layer = self.inner[0]  # type: ignore[index]
            if self.more == "random":
                nn.Linear(3, 3)  # as BigBird does: draws, and is thrown away
            if self.more == "parameter":
                layer = nn.Linear(5, 5, dtype=torch.float64)
            self.inner = nn.Sequential(layer, nn.Tanh(), nn.Identity())
            if self.more == "other":
                self.inner.append(nn.Sigmoid())
                return self.inner(x) * 2
        return self.inner(x)


@pytest.mark.parametrize("more", ["", "random"])
def test_modules_that_the_first_call_changes(more: str) -> None:
    torch.manual_seed(0)
    eager = Swaps(more)
    ours = ORTModule(copy.deepcopy(eager))
    _beside(ours, eager, (6, 6, 7, 9, 6))
    assert [type(m) for m in ours.modules()][1:] == [type(m) for m in eager.modules()][1:]
    report = ours.report()
    # what only the first call draws is eager's: that call is PyTorch's
    assert sum(e.calls for e in report.eager) == (more == "random") and report.node_share == 1, str(report)
    assert report.n_captures == 2


@pytest.mark.parametrize("more", ["parameter", "other"])
def test_changes_that_are_of_the_call(more: str) -> None:
    """A new parameter; a first call that computes something else than those after it."""
    torch.manual_seed(0)
    eager = Swaps(more)
    ours = ORTModule(copy.deepcopy(eager))
    torch.manual_seed(5)
    x = torch.randn(6, 5, dtype=torch.float64)
    for _ in range(4):
        both = []
        for m in (eager, ours):
            torch.manual_seed(7)
            both.append(m(x))
        torch.testing.assert_close(both[1], both[0], rtol=1e-12, atol=1e-12)
    report = ours.report()
    assert sum(e.calls for e in report.eager) >= 1 and report.n_captures >= 1, str(report)


def test_second_derivatives_leave_what_a_later_call_has_left():
    """They run forward again, of the call before."""
    torch.manual_seed(0)
    eager = Assigns(lambda m, h: _length(m, torch.tanh(h)))
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (4, 2):
        ours(torch.ones(rows, 5, dtype=torch.float64)).sum().backward()
    for m in (eager, ours):
        m.zero_grad()
        x = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
        first = m(x)
        m(x[:2])
        (g,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        g.square().sum().backward()
        assert m.length == 2
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], rtol=1e-10, atol=1e-12)


class Counts(nn.Module):
    """The first call leaves a word; statistics are of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 5, dtype=torch.float64), nn.BatchNorm1d(5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "ready"):
            self.ready = "yes"
        return self.norm(self.layer(x))


def test_statistics_of_a_run_that_settles_are_put_back() -> None:
    torch.manual_seed(0)
    eager = Counts()
    ours = ORTModule(copy.deepcopy(eager))
    for n in (6, 6, 7):
        x = torch.randn(n, 5, dtype=torch.float64)
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(ours.state_dict()), dict(eager.state_dict()), rtol=1e-12, atol=1e-12)
    assert not ours.report().eager, str(ours.report())
