"""Results that are an argument, a parameter or a buffer, or share memory with one: at other sizes, beside submodules with
hooks or kept in PyTorch; what is edited behind autograd's back between forward and backward; the order of parameters'
hooks; saved_tensors_hooks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortmodule import ORTModule

F64 = torch.float64


class Keeps(nn.Module):
    """Stays in PyTorch: it draws a random number."""

    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        return self.rule(x)


class Net(nn.Module):
    def __init__(self, rule: Callable[..., Any], kept: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4, dtype=F64)
        self.b = nn.Linear(4, 4, dtype=F64)
        self.register_buffer("buf", torch.ones(4, dtype=F64))
        self.kept = kept or nn.Identity()
        self.rule = rule

    def forward(self, *args: Any) -> Any:
        return self.rule(self, *args)


def sharing(m: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    """Which results are which tensors (1), and share memory with which (2)."""
    outs = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
    known = [*args, *m.parameters(), *m.buffers(), *outs]
    where = [k.untyped_storage().data_ptr() for k in known]
    return [[(t is k) + 2 * (t.untyped_storage().data_ptr() == w) for k, w in zip(known, where, strict=True)]
            for t in outs]


def draw(*size: int) -> Tensor:
    return torch.randn(*size, dtype=F64, generator=torch.Generator().manual_seed(sum(size)))


RESULTS: dict[str, Callable[..., Any]] = {
    "the argument": lambda m, x: (x, m.a(x)),
    "view": lambda m, x: (m.a(x), x.view(-1)),
    "view in two": lambda m, x: (m.a(x), x.view(-1, 2, 2)),
    "reshape": lambda m, x: (m.a(x), x.reshape(x.shape[0], 2, 2)),
    "flatten": lambda m, x: (m.a(x), x.flatten()),
    "unsqueeze": lambda m, x: (m.a(x), x.unsqueeze(0)),
    "transpose": lambda m, x: (m.a(x), x.t()),
    "slice": lambda m, x: (m.a(x), x[1:]),
    "slice by a size": lambda m, x: (m.a(x), x[: x.shape[0] - 1]),
    "last row": lambda m, x: (m.a(x), x[-1]),
    "expand": lambda m, x: (m.a(x), x.expand(2, *x.shape)),
    "chunk": lambda m, x: (m.a(x), *x.split(2, -1)),
    "contiguous": lambda m, x: (m.a(x), x.contiguous()),
    "dropout in eval": lambda m, x: (m.a(x), F.dropout(x, 0.1, False)),
    "to": lambda m, x: (m.a(x), x.to(F64)),
    "einsum": lambda m, x: (m.a(x), torch.einsum("ij->ij", x)),
    "broadcast_tensors": lambda m, x: (m.a(x), *torch.broadcast_tensors(x, m.buf)),
    "detach": lambda m, x: (m.a(x), x.detach()),
    "a parameter": lambda m, x: (m.a(x), m.a.weight),
    "a view of a parameter": lambda m, x: (m.a(x), m.a.weight.t()),
    "a buffer": lambda m, x: (m.a(x), m.buf),
    "a view of a buffer": lambda m, x: (m.a(x), m.buf.view(2, 2)),
    "a result twice": lambda m, x: (y := m.a(x), y),
    "a view of a result": lambda m, x: (y := m.a(x), y.view(-1)),
    "reshape of a result": lambda m, x: (y := m.a(x), y.reshape(-1, 2)),
    "contiguous of a result": lambda m, x: (y := m.a(x), y.contiguous()),
    "a view of what is converted to itself": lambda m, x: (y := m.a(x), v := y[0], y.to(F64), v.view(-1))[2:],
    "of its type, and a view": lambda m, x: (y := m.a(x), v := y[1:], y.type_as(x), v)[2:],
    "broadcast, and a view": lambda m, x: (y := m.a(x), v := y[1:], torch.broadcast_tensors(y, m.buf)[0], v)[2:],
    "einsum, and a view": lambda m, x: (y := m.a(x), v := y[1:], torch.einsum("ij->ij", y), v)[2:],
    "last row of a result": lambda m, x: (y := m.a(x), y[-1]),
    "dropout of a result": lambda m, x: (y := m.a(x), F.dropout(y, 0.0, True)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_at_other_sizes(name: str) -> None:
    """The second size makes a capture with symbols."""
    eager = Net(RESULTS[name])
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    for rows in (2, 3, 5, 4, 2):
        x, y = draw(rows, 4), draw(rows, 4)
        a, b = eager(x), ours(y)
        torch.testing.assert_close(b, a)
        assert sharing(ours, (y,), b) == sharing(eager, (x,), a), rows
    assert not ours.report().eager and not ours.report().host, str(ours.report())


@pytest.mark.parametrize("name", RESULTS)
def test_beside_submodules_with_hooks(name: str) -> None:
    eager = Net(RESULTS[name])
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    for m in (eager, ours):
        m.b.register_forward_hook(lambda *_: None)
        m.a.register_forward_hook(lambda *_: None)
    for _ in range(3):
        x, y = draw(2, 4), draw(2, 4)
        a, b = eager(x), ours(y)
        torch.testing.assert_close(b, a)
        assert sharing(ours, (y,), b) == sharing(eager, (x,), a)


@pytest.mark.parametrize("rule", [lambda x: x, lambda x: x.view(-1), lambda x: x.detach(), lambda x: x * 2,
                                  lambda x: F.dropout(x, 0.5, False)])
def test_beside_modules_in_pytorch(rule: Callable[[Tensor], Tensor]) -> None:
    """What a module kept in PyTorch returns may be its argument."""
    eager = Net(lambda m, x: (m.a(x), m.kept(x)), Keeps(rule))
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    for _ in range(3):
        x, y = draw(2, 4), draw(2, 4)
        a, b = eager(x), ours(y)
        torch.testing.assert_close(b, a)
        assert sharing(ours, (y,), b) == sharing(eager, (x,), a)


def test_an_edit_of_the_result_edits_the_argument() -> None:
    eager = Net(lambda m, x: (m.a(x), F.dropout(x, 0.5, False).view(-1)))
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    for _ in range(3):
        x, y = draw(2, 4), draw(2, 4)
        eager(x)[1].mul_(3)
        ours(y)[1].mul_(3)
        assert torch.equal(x, y) and torch.equal(x, draw(2, 4) * 3)


# --- between forward and backward -----------------------------------------------------------------


def _array(m: nn.Module, x: Tensor, array: Any) -> None:
    array[:] *= 2


def _data(m: nn.Module, x: Tensor, array: Any) -> None:
    for p in m.parameters():
        p.data.mul_(1.5)


def _assigned(m: nn.Module, x: Tensor, array: Any) -> None:
    for p in m.parameters():
        p.data = p.data * 1.5


def _no_grad(m: nn.Module, x: Tensor, array: Any) -> None:
    with torch.no_grad():
        x.mul_(2)


@pytest.mark.parametrize("edit", [_array, _data, _assigned, _no_grad])
def test_edits_that_autograd_does_not_see(edit: Callable[..., None]) -> None:
    """What autograd has saved is the caller's memory: backward computes with what is there now, as eager does; of what
    it can see, PyTorch's error."""
    eager = Net(lambda m, x: m.b(torch.tanh(m.a(x * x))))
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    found = []
    for m in (eager, ours):
        array = draw(3, 4).numpy().copy()
        x = torch.from_numpy(array).requires_grad_()
        y = m(x)
        edit(m, x, array)
        try:
            y.sum().backward()
            found.append([t.grad for t in (*m.parameters(), x)])
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e)
            found.append([])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert bool(found[0]) == (edit is not _no_grad)


# --- hooks of parameters --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("segment_mb", [1e-5, 25.0])
def test_hooks_of_parameters_run_once_each(kind: str, segment_mb: float) -> None:
    """Segment by segment from the back; inside of one in an order of autograd's own (docs/SEMANTICS.md)."""
    eager = Net(lambda m, x: m.b(torch.tanh(m.a(x))).sum())
    ours = ORTModule(copy.deepcopy(eager), recheck=False, segment_mb=segment_mb)
    seen: list[list[tuple[str, Any]]] = []
    for m in (eager, ours):
        for name, p in m.named_parameters():
            getattr(p, kind)(lambda t, name=name: seen[-1].append((name, (t if t.grad is None else t.grad).clone())) or None)
        for _ in range(2):
            m.zero_grad()
            seen.append([])
            m(draw(3, 4)).backward()
    for other in seen[1:]:
        assert len(other) == 4
        torch.testing.assert_close(dict(other), dict(seen[0]), rtol=1e-10, atol=1e-12)
    if segment_mb < 1:
        assert [name[0] for name, _ in seen[-1]] == ["b", "b", "a", "a"]


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(h).sin().sum(), self.c(h).sum()


def test_hooks_of_parameters_that_a_backward_does_not_reach() -> None:
    """They were called where .grad had not changed: an optimizer in backward took the last step again."""
    eager = TwoResults().double()
    ours = ORTModule(copy.deepcopy(eager))
    seen: list[list[str]] = []
    for m in (eager, ours):
        m.b.weight.grad = torch.ones(4, 4, dtype=torch.float64)
        for name, p in m.named_parameters():
            p.register_hook(lambda g, name=name: seen[-1].append(name))

            def update(p: Tensor, name: str = name) -> None:
                seen[-1].append(f"{name} updated")
                p.data.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]

            p.register_post_accumulate_grad_hook(update)
        for which in (0, 1, 1, 2, 0, 1, 2, 2):
            seen.append([])
            one, other = m(draw(3, 4).double())
            (one + other if which == 2 else (one, other)[which]).backward()
    for got, want in zip(seen[8:], seen[:8], strict=True):
        assert sorted(got) == sorted(want)
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    assert ours.report().graphs and not ours.report().eager


@pytest.mark.parametrize("segment_mb", [25, 1e-6])
def test_a_hook_of_several_parameters(segment_mb: float) -> None:
    """register_multi_grad_hook waits for all that a backward reaches: it waited for the others, too, and was not called."""
    eager = TwoResults().double()
    ours = ORTModule(copy.deepcopy(eager), segment_mb=segment_mb)
    seen: list[list[Any]] = []
    for m in (eager, ours):

        def note(name: str) -> Callable[[Any], None]:
            return lambda grads: seen[-1].append((name, [g if g is None else g.clone() for g in grads]))

        for name, parameters in (("all", m.parameters()), ("a", m.a.parameters()), ("b", m.b.parameters())):
            torch.autograd.graph.register_multi_grad_hook(list(parameters), note(name))
        torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda _: seen[-1].append(("any", [])), mode="any")
        for which in (0, 1, 1, 2, 0, 1, 2, 2):
            seen.append([])
            one, other = m(draw(3, 4).double())
            (one + other if which == 2 else (one, other)[which]).backward()
    for got, want in zip(seen[8:], seen[:8], strict=True):
        assert sorted(name for name, _ in got) == sorted(name for name, _ in want)
        for name, grads in want:
            for g, w in zip(dict(got)[name], grads, strict=True):
                assert (g is None) is (w is None)
                if w is not None:
                    torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)
    assert ours.report().graphs and not ours.report().eager


# --- saved_tensors_hooks --------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [None, Keeps(lambda x: x.sin())])
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_saved_tensors_hooks(kept: nn.Module | None, hooks: bool, times: int) -> None:
    """They see what the engine keeps, not what eager does: but each that is packed is unpacked as often as it is read,
    and what comes back counts."""
    eager = Net(lambda m, x: m.b(torch.tanh(m.kept(m.a(x)))).sum(), kept)
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    if hooks:
        ours.a.register_forward_hook(lambda *_: None)
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def pack(t: Tensor) -> int:
        packed.append(t.detach().clone())
        return len(packed) - 1

    def unpack(i: int) -> Tensor:
        unpacked.append(i)
        return packed[i]

    for step in range(3):
        grads = []
        for m in (eager, ours):
            packed.clear()
            unpacked.clear()
            m.zero_grad()
            x = draw(3, 4).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                y = m(x)
            n = len(packed)
            assert n and not unpacked
            for k in range(times):
                y.backward(retain_graph=k + 1 < times)
            assert len(packed) == n and set(unpacked) == set(range(n)), step
            assert len(unpacked) == times * n
            grads.append([t.grad for t in (*m.parameters(), x)])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)


def test_save_on_cpu_and_hooks_that_fail() -> None:
    eager = Net(lambda m, x: m.b(torch.tanh(m.a(x))).sum())
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    for _ in range(2):
        for m in (eager, ours):
            m.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                y = m(draw(3, 4))
            y.backward()
            with pytest.raises(ZeroDivisionError), torch.autograd.graph.saved_tensors_hooks(lambda t: 1 // 0, lambda t: t):
                m(draw(3, 4))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 1 // 0):
                y = m(draw(3, 4))
            with pytest.raises(ZeroDivisionError):
                y.backward()
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
