"""What is kept in PyTorch (modules, custom Functions) and the captured code around it: whatever passes between the two
besides the values of tensors is as in eager, or refused by name."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule


class Kept(nn.Module):
    """Stays in PyTorch for its randomness; `how` says what it returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.last = how, 0, None

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        factor = 1 + random.random()
        match self.how:
            case "nothing":
                return None
            case "number":
                return x * factor, factor
            case "flag":
                return x * factor, factor > 1.5
            case "text":
                return x * factor, str(factor)
            case "itself":
                return x
            case "view":
                return x.view(-1)
            case "part":
                return x[0]
            case "list":
                return [x]
            case "twice":
                y = x * factor
                return y, y.view(-1)
            case "held":
                self.last = x * factor
                return self.last
            case "either":
                return (x * factor, None) if factor < 1.7 else (x * factor, x.sum())
        return x * factor


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.kept, self.last = nn.Linear(4, 4), Kept(how), nn.Linear(4, 4)


class Reads(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out = self.kept(h)
        if out is None:
            return self.last(h)
        y, more = out
        if isinstance(more, str):
            return self.last(y) * float(more)
        if more is None:
            return self.last(y)
        return self.last(y) * (more if not isinstance(more, bool) else 2 if more else 3)


class Edits(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.kept(h)
        other = h
        if isinstance(y, tuple):
            y, other = y
        if isinstance(y, list):
            y = y[0]
        y.add_(1)
        return self.last(h) * 2 + other.sum() + (0 if self.kept.last is None else self.kept.last.sum())


def beside_eager(eager: nn.Module, steps: int = 5) -> ORTModule:
    wrapped = ORTModule(copy.deepcopy(eager))
    for step in range(steps):
        x = torch.randn(5, 4)
        for m in (eager, wrapped):
            random.seed(step)
            m.zero_grad()
            m.out = m(x.clone())  # type: ignore[assignment]
            m.out.sum().backward()
        torch.testing.assert_close(wrapped.out, eager.out)
        for (name, p), q in zip(wrapped.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        assert wrapped.kept.calls == eager.kept.calls
    return wrapped


@pytest.mark.parametrize("how", ["number", "flag", "text"])
def test_values_that_the_code_around_reads(how: str) -> None:
    """They were those of the capture for ever."""
    wrapped = beside_eager(Reads(how))
    assert any("kept in PyTorch, returns a" in e.reason for e in wrapped.report().eager)


def test_a_module_that_returns_nothing_runs() -> None:
    wrapped = beside_eager(Reads("nothing"))
    assert wrapped.report().graphs and [h.name for h in wrapped.report().host] == ["kept"]


@pytest.mark.parametrize("how", ["itself", "view", "part", "list", "twice", "held"])
def test_edits_in_place_of_memory_that_both_know(how: str) -> None:
    wrapped = beside_eager(Edits(how))
    assert not wrapped.report().graphs


def test_edits_in_place_of_a_fresh_result_stay_in_the_engine() -> None:
    wrapped = beside_eager(Edits("fresh"))
    assert sum(g.forwards for g in wrapped.report().graphs) >= 3  # `calls` is looked at for two steps


class Sometimes(nn.Module):
    """A layer that is left out now and then and gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() > 0.7 else x * 2


class LeavesOut(Net):
    def __init__(self) -> None:
        super().__init__("")
        self.kept = Sometimes()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.kept(h)
        y += 1
        return self.last(h) + y


def test_memory_of_its_arguments_returned_later_is_an_error_once() -> None:
    """The kept module has run by then; later calls run in PyTorch."""
    torch.manual_seed(0)
    eager = LeavesOut()
    wrapped = ORTModule(copy.deepcopy(eager))
    x, said = torch.randn(5, 4), 0
    for step in range(8):
        random.seed(step + 1)
        want = eager(x)
        random.seed(step + 1)
        try:
            torch.testing.assert_close(wrapped(x), want)
        except RuntimeError as e:
            assert "returns memory of its arguments" in str(e) and "Later calls run in PyTorch" in str(e)
            said += 1
    assert said == 1


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_result_of_another_structure_later(hooked: bool, trained: bool) -> None:
    """PyTorch computes the call, and the kept module is not run again."""
    torch.manual_seed(0)
    eager = Reads("either")
    wrapped = ORTModule(copy.deepcopy(eager))
    if hooked:
        for m in (eager, wrapped):
            m.last.register_forward_hook(lambda *_: None)
    x = torch.randn(5, 4)
    for step in range(8):
        seen: list[list[Tensor | None]] = []
        for m in (wrapped, eager):
            random.seed(step + 1)
            m.zero_grad()
            with torch.set_grad_enabled(trained):
                y = m(x)
                if trained:
                    y.square().sum().backward()
            seen.append([y.detach(), *(p.grad for p in m.parameters())])
        for mine, theirs in zip(*seen, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert wrapped.kept.calls == eager.kept.calls
    assert "another structure" in str(wrapped.report())


def test_a_result_of_another_structure_behind_a_hook_is_an_error_once() -> None:
    torch.manual_seed(0)
    wrapped, x, ran, said = ORTModule(Reads("either")), torch.randn(5, 4), [], []
    wrapped.first.register_forward_hook(lambda *_: ran.append(1))
    for step in range(8):
        random.seed(step + 1)
        before = len(ran), wrapped.kept.calls
        try:
            wrapped(x).sum().backward()
        except RuntimeError as error:
            assert "another structure" in str(error) and "Later calls run in PyTorch" in str(error)
            said.append(step)
        assert (len(ran), wrapped.kept.calls) == (before[0] + 1, before[1] + 1)
    assert len(said) == 1


class Tells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, random.random()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * 2


class TellsIn(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, factor = Tells.apply(self.first(x))
        self.kept.calls += 0
        return self.last(y) * factor


def test_values_that_a_function_returns() -> None:
    beside_eager(TellsIn(""))


class Balanced(nn.Module):
    """Numbers read from tensors are numbers: no gradient comes back from them, and arithmetic on them is in double."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.a(x).square().mean(), self.b(x).square().mean()
        again = sum(v for v in (one * two).reshape(1).tolist())
        return one / one.item() + two / two.item() ** 0.5 + one.clamp(max=again * 3) * again


def test_no_gradient_through_numbers() -> None:
    torch.manual_seed(0)
    eager = Balanced().double()
    wrapped = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(5, 4, dtype=torch.float64)
        for m in (eager, wrapped):
            m.zero_grad()
            m(x).backward()
        for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
    assert sum(g.forwards for g in wrapped.report().graphs) == 3


GRADS: list[Tensor] = []


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        GRADS.append(grad)
        return grad * 2


class Cache(nn.Module):
    """Stays in PyTorch, and remembers what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        return x * (1 + random.random())


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cache, self.last = nn.Linear(4, 4), Cache(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = Keeps.apply(self.first(x))
        return torch.tanh(self.last(self.cache(h))) @ self.last.weight


def test_what_is_kept_of_what_was_given_stays_what_it_was() -> None:
    """A gradient in a Function's backward, an argument of a module when no gradients are wanted."""
    torch.manual_seed(0)
    eager = Remembers().double()
    wrapped = ORTModule(copy.deepcopy(eager))
    for m in (eager, wrapped):
        m.found = []
        for step in range(6):
            x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            random.seed(step)
            m(x).square().sum().backward()
            with torch.no_grad():
                m(x)
            m.found.append(m.cache.given)
        m.found += GRADS
        GRADS.clear()
    assert len(wrapped.report().host) == 2 and sum(g.forwards for g in wrapped.report().graphs) >= 6
    for got, want in zip(wrapped.found, eager.found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


class Neuron(nn.Module):
    """A spiking neuron: what it holds goes on from call to call of one forward, with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Tensor
        self.register_buffer("held", torch.zeros(0), persistent=False)

    def reset(self) -> None:
        self.held = torch.zeros_like(self.held)

    def forward(self, x: Tensor) -> Tensor:
        random.random()  # keeps it in PyTorch
        before = self.held if self.held.shape == x.shape else torch.zeros_like(x)
        self.held = 0.9 * before + x
        return self.held.tanh()


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.neuron = nn.Linear(4, 4), Neuron()

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.reset()
        first = self.neuron(self.linear(x))
        return first + self.neuron(self.linear(x)) + self.neuron(self.linear(x))


def test_state_that_carries_a_gradient_between_calls() -> None:
    eager, ours = Spiking(), ORTModule(Spiking())
    ours.load_state_dict(eager.state_dict())
    for rows in (2, 2, 3):
        x = torch.randn(rows, 4)
        for m in (eager, ours):
            m.zero_grad()
            m(x).square().sum().backward()
        torch.testing.assert_close(ours.linear.weight.grad, eager.linear.weight.grad)
    assert "an earlier call of this forward" in ours.report().eager[0].reason


class Checkpoints(nn.Module):
    """Stays in PyTorch for the random number, and checkpoints inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) * (1 + random.random())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_what_is_kept(reentrant: bool) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 4), Checkpoints(reentrant), nn.Linear(4, 2)).double()
    wrapped = ORTModule(copy.deepcopy(eager))
    for step in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        for m in (eager, wrapped):
            random.seed(step)
            m.zero_grad()
            m(x).square().sum().backward()
        for p, q in zip(eager.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12)
    assert [h.module for h in wrapped.report().host] == ["1"], str(wrapped.report())


class _Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls.append(1)
        return x[mask].reshape(2, -1, 4)


class _Counted(nn.Module):
    """Statistics, random numbers, a counter, and as many rows as the mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        h = self.norm(self.drop(self.inner(x))[mask])
        return {"rows": h.reshape(2, -1, 4), "sum": h.sum(0), "number": mask.sum()}


class _OfCounted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.counted, self.last = nn.Linear(4, 4), _Counted(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        found = self.counted(h, mask)
        again = self.counted(h.sin(), mask=mask)
        return (self.last(found["rows"] + again["rows"]).tanh().mean(1) + again["sum"] + h.mean(1)) * found["number"]


@pytest.mark.parametrize("trained", [True, False])
def test_a_kept_module_that_has_run_answers_when_the_call_begins_again(trained: bool) -> None:
    """Its statistics, counter and random numbers are those of one run."""
    torch.manual_seed(0)
    eager = _OfCounted().double()
    ours = ORTModule(copy.deepcopy(eager))
    for step, n in enumerate((3, 3, 5, 2, 4, 5, 3)):
        mask, data = (torch.arange(6) < n).expand(2, 6), torch.randn(2, 6, 4, dtype=torch.float64)
        seen = []
        for m in (ours, eager):
            torch.manual_seed(step)
            m.zero_grad()
            x = data.clone().requires_grad_()
            with torch.set_grad_enabled(trained):
                y = m(x, mask)
                if trained:
                    y.square().sum().backward()
            seen.append([y.detach(), x.grad, *(p.grad for p in m.parameters()), *m.buffers()])
        for mine, theirs in zip(*seen, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        assert ours.counted.calls == eager.counted.calls
    assert [h.module for h in ours.report().host] and ours.report().eager


class _OfChosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chosen, self.last = _Chosen(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.chosen(x, mask)).tanh().mean(1)


def test_the_error_of_other_sizes_names_the_module_and_the_sizes() -> None:
    ours, x = ORTModule(_OfChosen()), torch.randn(2, 6, 4)
    for n in (3, 3, 5):
        mask = (torch.arange(6) < n).expand(2, 6)
        y = ours(x, mask)
        y.sum().backward()
        torch.testing.assert_close(y, ours.module.last(x[:, :n]).tanh().mean(1))
    assert "chosen in PyTorch: result 0 is f32 [2, 5, 4] and was f32 [2, 3, 4] when it was captured" in str(ours.report())
