"""The gradient of the logits over the logits: only when the user has let go of them, and then with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ortmodule
from ortmodule import ORTModule, chain, holders

N, D, V = 7, 5, 13


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, 11)
        self.head = nn.Linear(11, V)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return nn.functional.cross_entropy(logits, y), logits


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per backward: was an output's memory given away?"""
    seen: list[bool] = []
    start = chain.Graph.backward

    def backward(self: chain.Graph, *args: Any) -> Any:
        dropped = args[5]
        seen.append(bool(dropped and any(dropped)))
        return start(self, *args)

    monkeypatch.setattr(chain.Graph, "backward", backward)
    return seen


def make() -> tuple[Model, Model, Tensor, Tensor]:
    torch.manual_seed(3)
    eager = Model().double()
    ours = ORTModule(Model().double())
    ours.load_state_dict(eager.state_dict())
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randint(V, (N,))
    ours(x, y)[0].backward()  # settles which outputs receive gradients
    ours.zero_grad()
    return eager, ours, x, y


def check(eager: Model, ours: Model) -> None:
    for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_dropped_logits_are_lent(lent: list[bool]) -> None:
    eager, ours, x, y = make()
    eager(x, y)[0].backward()
    ours(x, y)[0].backward()
    assert lent == [True, True]
    check(eager, ours)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda t: t,
    "view": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "numpy": lambda t: t.detach().numpy(),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "graph": lambda t: t.pow(2),
}


@pytest.mark.parametrize("how", HOLDS)
def test_held_logits_are_not_lent(lent: list[bool], how: str) -> None:
    eager, ours, x, y = make()
    le, we = eager(x, y)
    lo, wo = ours(x, y)
    before = wo.detach().clone()
    held = HOLDS[how](wo)
    del wo
    lo.backward()
    le.backward()
    assert lent[1:] == [False]
    check(eager, ours)
    values = torch.as_tensor(held) if how != "storage" else torch.empty(0, dtype=before.dtype).set_(held)  # type: ignore[call-overload]
    torch.testing.assert_close(values.reshape(-1), (before.pow(2) if how == "graph" else before).reshape(-1), rtol=0, atol=0)
    del we


def test_a_retained_graph_is_lent_at_its_last_backward(lent: list[bool]) -> None:
    eager, ours, x, y = make()
    for m in (eager, ours):
        loss = m(x, y)[0]
        loss.backward(retain_graph=True)
        loss.backward()
    assert lent[1:] == [False, True]
    check(eager, ours)


def test_logits_that_saved_tensor_hooks_hold_are_not_lent(lent: list[bool]) -> None:
    """PyTorch's own: calls inside of a user's stay in PyTorch (test_autograd_state.py)."""
    eager, ours, x, y = make()
    eager(x, y)[0].backward()
    with torch.autograd.graph.save_on_cpu():
        loss, logits = ours(x, y)
    del logits
    loss.backward()
    assert lent[1:] == [False]
    check(eager, ours)


def test_logits_saved_by_another_graph_have_the_right_gradient(lent: list[bool]) -> None:
    """Another gradient arrives at the logits, from a graph that has saved them."""
    eager, ours, x, y = make()
    for _ in range(2):
        for m in (eager, ours):
            m.zero_grad()
            loss, logits = m(x, y)
            (loss + logits.pow(2).mean()).backward()
            del logits
    check(eager, ours)


def test_lending_makes_the_step_smaller() -> None:
    """A large vocabulary: a dropped output saves a block of its size."""
    x, y = torch.randn(64, D, dtype=torch.float64), torch.randint(4096, (64,))
    torch.manual_seed(3)
    model = Model().double()
    model.head = nn.Linear(11, 4096).double()
    ours = ORTModule(model)
    size = 64 * 4096 * 8
    peaks = []
    ours(x, y)[0].backward()
    for hold in (False, True):
        ortmodule._C.pool_trim()
        for _ in range(2):
            ours.zero_grad()
            loss, logits = ours(x, y)
            held = logits if hold else None
            del logits
            loss.backward()
            del held
        peaks.append(ortmodule._C.pool_stats()["peak_live"])
    assert peaks[1] - peaks[0] >= size, (peaks, size)


@pytest.mark.parametrize("under", ["inference_mode", "save_on_cpu", "checkpoint"])
def test_first_forward_elsewhere(under: str, lent: list[bool]) -> None:
    """What tells whether an output is held is measured once per process, wherever the first forward happens to be."""
    holders.holders_when_dropped.cache_clear()
    ours, x, y = ORTModule(Model().double()), torch.randn(N, D, dtype=torch.float64), torch.randint(V, (N,))
    if under == "inference_mode":
        with torch.inference_mode():
            ours(x, y)
    elif under == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            ours(x, y)
    else:
        checkpoint(ours, x, y, use_reentrant=False)
    ours(x, y)[0].backward()
    assert lent == [True]


def test_edited_logits_beside_the_loss() -> None:
    """Eager's cross entropy does not need the logits again; here the forward makes them once more."""
    eager, ours, x, y = make()
    for model in (eager, ours):
        loss, logits = model(x, y)
        with torch.no_grad():
            logits[:, 0] = -100
        loss.backward()
    check(eager, ours)
    assert ours.report().graphs[0].reruns == 1


@pytest.mark.parametrize("of", ["parameters", "ids", "detached"])
def test_outputs_that_do_not_depend_on_an_earlier_layer(of: str) -> None:
    """An argument that an earlier layer has made gets no gradient from what is returned: the outputs are apart, and held."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.table = nn.Linear(D, V), nn.Embedding(9, V)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            v = {"parameters": lambda: self.body.weight.T[:N] * 2, "ids": lambda: self.table(y), "detached": lambda: self.body(x.detach())}[of]()
            return v.clamp(min=0.1), v, nn.functional.cross_entropy(v, y[: len(v)])

    torch.manual_seed(4)
    ours = ORTModule(Beside().double())
    for k in range(3):
        x, y = torch.randn(N, D, dtype=torch.float64, requires_grad=True), torch.randint(9, (N,))
        outs = ours(x * 1, y)
        before = [t.detach().clone() for t in outs]
        (outs[2] if k else sum(t.sum() for t in outs)).backward()
        assert all(torch.equal(t, b) for t, b in zip(outs, before))
