"""Gradients that lie where the activations were (docs/MEMORY.md): whatever a script does with them, they are eager's."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortmodule import _C, ORTModule

WIDE = 192


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDE)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(WIDE, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def pair() -> tuple[nn.Module, ORTModule]:
    torch.manual_seed(0)
    net = Net().double()
    return copy.deepcopy(net), ORTModule(net)


def batch(k: int) -> torch.Tensor:
    return torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(k))


def loss_of(model: nn.Module, k: int) -> torch.Tensor:
    return model(batch(k)).square().mean()


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023
        if p.grad is not None:
            assert q.grad is not None
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023


def zero_before(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    optimizer.zero_grad()
    loss_of(model, k).backward()
    optimizer.step()


def zero_after(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    loss_of(model, k).backward()
    optimizer.step()
    optimizer.zero_grad()


def zero_between(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    loss = loss_of(model, k)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, k).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    for i in range(3):
        (loss_of(model, 3 * k + i) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    loss_of(model, k).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    loss = loss_of(model, k)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def two_in_flight(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    a, b = loss_of(model, 2 * k), loss_of(model, 2 * k + 1)
    a.backward()
    b.backward()
    optimizer.step()
    optimizer.zero_grad()


def on_cpu(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, k)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    loss_of(model, k).backward()
    model.eval()
    with torch.no_grad():
        model(batch(k + 100))
    model.train()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    found = torch.autograd.grad(loss_of(model, k), list(model.parameters()))
    for p, g in zip(model.parameters(), found, strict=True):
        p.grad = g
    optimizer.step()
    optimizer.zero_grad()


LOOPS: list[Callable[[nn.Module, torch.optim.Optimizer, int], None]] = [
    zero_before, zero_after, zero_between, zero_in_place, accumulated, clipped, twice, two_in_flight, on_cpu, evaluated, by_hand,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_loops(loop: Callable[[nn.Module, torch.optim.Optimizer, int], None], make: type[torch.optim.Optimizer]) -> None:
    eager, ours = pair()
    optimizers = [make(m.parameters(), lr=1e-3) for m in (eager, ours)]
    for k in range(5):
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            loop(model, optimizer, k)
        same(eager, ours)
    report = ours.report()
    assert report.graphs and not report.eager and not report.failed


def test_gradients_kept_for_later_stay_what_they_were() -> None:
    eager, ours = pair()
    kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for k in range(6):
        for model in (eager, ours):
            model.zero_grad()
            loss_of(model, k).backward()
        kept.append(([p.grad for p in eager.parameters()], [p.grad for p in ours.parameters()]))
    for a, b in kept:
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-12)


def test_one_saved_is_as_large_as_itself() -> None:
    _, ours = pair()
    loss_of(ours, 0).backward()
    for p in ours.parameters():
        assert p.grad is not None and p.grad.untyped_storage().nbytes() == p.grad.nbytes and p.grad.storage_offset() == 0
    file = io.BytesIO()
    torch.save(ours.head.weight.grad, file)
    assert file.tell() < ours.head.weight.nbytes + 4096


def test_the_model_goes_while_its_gradients_stay() -> None:
    eager, ours = pair()
    loss_of(eager, 1).backward()
    loss_of(ours, 1).backward()
    want, got = [p.grad for p in eager.parameters()], [p.grad for p in ours.parameters()]
    del ours
    for x, y in zip(want, got, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-12)


def test_memory_goes_back_with_them() -> None:
    _, ours = pair()
    for k in range(3):
        loss_of(ours, k).backward()
        ours.zero_grad()
    before = _C.pool_stats()["live"]
    loss_of(ours, 3).backward()
    assert _C.pool_stats()["live"] > before
    last = ours.head.weight.grad
    ours.zero_grad()
    del last
    assert _C.pool_stats()["live"] == before


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_that_are_added_up_take_no_room_of_their_own(in_place: bool) -> None:
    """But for those they are added to; neither do those that are set to zero in place. With activations as large as
    they are."""
    def loss(k: int) -> torch.Tensor:
        return ours(torch.randint(50, (16, 32), generator=torch.Generator().manual_seed(k))).square().mean()

    _, ours = pair()
    size = sum(p.nbytes for p in ours.parameters())
    for k in range(3):
        loss(k).backward()
        ours.zero_grad(set_to_none=not in_place)
    loss(3).backward()
    loss(4).backward()
    step = ours.report().graphs[0].memory
    assert step is not None and step.kept > 2 * size
    _C.pool_trim(True)  # the peak is counted from here
    before = _C.pool_stats()["live"]
    loss(5).backward()
    assert _C.pool_stats()["peak_live"] < before + step.kept + step.workspace + step.outputs + 0.2 * size


PEAK = """
import sys, torch
from torch import nn
from ortmodule import ORTModule
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()
torch.manual_seed(0)
model = ORTModule(Net(), **eval(sys.argv[1]))
x = torch.randn(512, 1024)
for _ in range(3):
    model(x).backward()
    model.zero_grad()
step = model.report().graphs[0].memory
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(step.peak, step.placed, int(peak.split()[1]) * 1024)
"""


def test_the_process_takes_less_by_what_the_report_says() -> None:
    def run(options: str) -> list[int]:
        done = subprocess.run([sys.executable, "-c", PEAK, options], capture_output=True, text=True, check=True)
        return [int(x) for x in done.stdout.split()]

    peak, placed, process = run("{}")
    apart, none, more = run("dict(memory_budget='4GB')")
    assert peak == apart and placed > 16 << 20 and none == 0
    assert 0.8 * placed < more - process < 1.2 * placed
