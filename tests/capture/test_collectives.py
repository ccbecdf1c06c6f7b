"""A forward that communicates, in a group of one process: refused while it is traced, and afterwards the group's methods
are what they were (tests/scale/test_talk.py has several processes)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ortmodule import ORTModule


class Talk(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "barrier":
            dist.barrier()
        elif self.how == "rows":  # kept in PyTorch, for which forward is run once on values
            h = h[h.sum(1) > -1e9]
        if self.how != "barrier":
            total = h.detach().clone()
            dist.all_reduce(total)
            h = h * total
        return h


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["sum", "barrier", "rows"])
def test_a_trace_sends_nothing(how: str, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: value for name, value in vars(dist.ProcessGroup).items() if callable(value)}
    sent: list[str] = []
    for name in ("allreduce", "barrier"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda *a, _f=before[name], _n=name, **k: (sent.append(_n), _f(*a, **k))[1])
    torch.manual_seed(0)
    eager = Talk(how)
    x = torch.ones(3, 4)
    want = eager(x)
    n = len(sent)
    model = ORTModule(nn.Sequential(eager, nn.Tanh()))
    for turn in range(1, 13):
        assert torch.equal(model(x), want.tanh())
        assert len(sent) == n * (turn + 1)
    (entry,) = model.report().eager
    assert "communicates with other processes" in entry.reason and model.report().node_share == 0
    monkeypatch.undo()
    assert all(vars(dist.ProcessGroup)[name] is value for name, value in before.items())
