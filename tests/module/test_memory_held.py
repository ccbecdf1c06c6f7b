"""Memory between steps: blocks are kept while a loop runs and given back when it rests (ortmodule/memory_idle.py)."""

from __future__ import annotations

import itertools
import math
import os
import time
from types import SimpleNamespace

import pytest
import torch
from small_models import MODELS
from torch import nn

import ortmodule
from ortmodule import _C, ORTModule, memory, memory_idle
from ortmodule.memory_idle import Idle
from ortmodule.memory_idle import idle as of_process

idle = Idle()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has learnt nothing: the process's may be asleep for as long as a pause of earlier tests was."""
    global idle
    idle = Idle()
    monkeypatch.setattr(memory, "idle", idle)


def train(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        out = model(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        del out
        optimizer.step()
        optimizer.zero_grad()


def made(keep: float) -> tuple[ORTModule, dict[str, torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    make, batch = MODELS["gpt2"]
    ours = ORTModule(make().train(), keep_memory=keep)
    return ours, batch, torch.optim.SGD(ours.parameters(), lr=1e-3)


def test_steps_after_the_first_ones_ask_the_system_for_nothing() -> None:
    ours, batch, optimizer = made(60.0)
    train(ours, batch, optimizer, 3)
    before = _C.pool_stats()["mapped"]
    train(ours, batch, optimizer, 5)
    assert _C.pool_stats()["mapped"] == before
    ortmodule.release_memory()
    assert _C.pool_stats()["free"] == 0
    train(ours, batch, optimizer, 1)
    assert _C.pool_stats()["mapped"] > before, "the counter counts"


class Wide(nn.Module):
    """Results of 4.5 MiB, which are gone when most gradients of 1 MiB are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(24))
        self.head = nn.Linear(512, 4608)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        y = self.head(x)
        return y.square().mean(), y


def test_results_and_gradients_share_pages_step_after_step() -> None:
    torch.manual_seed(0)
    _C.pool_trim()
    ours, x = ORTModule(Wide(), keep_memory=60.0), torch.randn(256, 512)
    for i in range(12):
        if i == 6:
            before = _C.pool_stats()
        ours(x)[0].backward()
        ours.zero_grad()
    after = _C.pool_stats()
    assert after["mapped"] == before["mapped"], (before, after)
    assert after["free"] + after["live"] <= after["peak_live"] * 9 / 8


def test_under_a_budget_nothing_is_kept_beside_what_lives_at_once() -> None:
    torch.manual_seed(0)
    _C.pool_trim()
    ours, x = ORTModule(Wide(), keep_memory=60.0, memory_budget="1 GB"), torch.randn(256, 512)
    for _ in range(6):
        ours(x)[0].backward()
        ours.zero_grad()
    stats = _C.pool_stats()
    assert stats["free"] + stats["live"] <= stats["peak_live"]
    _C.pool_trim()  # other tests keep none


def test_what_nobody_uses_is_given_back_and_a_slow_loop_is_learnt() -> None:
    ours, batch, optimizer = made(0.2)
    train(ours, batch, optimizer, 2)
    assert _wait(lambda: idle._gone is not None and _C.pool_stats()["free"] == 0), _C.pool_stats()
    time.sleep(0.3)
    train(ours, batch, optimizer, 1)
    assert idle.learnt >= 0.6, "twice the pause"
    assert _C.pool_stats()["free"] > 1 << 20
    time.sleep(0.3)
    assert _C.pool_stats()["free"] > 1 << 20, "as long as the last pause was, it is kept"


def _wait(done: object) -> bool:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if done():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_page_faults_are_told() -> None:
    ours, batch, optimizer = made(60.0)
    train(ours, batch, optimizer, 4)
    graph = ours.report().graphs[0]
    assert 0 <= graph.page_faults < 5000
    assert f"{graph.page_faults} page faults in a recent one" in str(ours.report())


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="keep_memory=-1 is not allowed"):
        ORTModule(nn.Linear(2, 2), keep_memory=-1)
    monkeypatch.setenv("ORTMODULE_KEEP_MEMORY", "inf")
    assert ORTModule(nn.Linear(2, 2))._ortmodule.settings.keep_memory == math.inf
    monkeypatch.setenv("ORTMODULE_KEEP_MEMORY", "long")
    with pytest.raises(ValueError, match="ORTMODULE_KEEP_MEMORY='long' is not allowed"):
        ORTModule(nn.Linear(2, 2))


def test_a_forked_child_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = of_process
    monkeypatch.setattr(memory, "idle", idle)
    ours, batch, optimizer = made(60.0)
    train(ours, batch, optimizer, 1)
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        alive = idle._thread is None and not idle._wake.is_set()
        idle.arm(60.0)
        os._exit(0 if alive and idle._thread is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_model_that_keeps_for_ever_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is at work for the first one by then: it goes on, and gives nothing back."""
    died: list[object] = []
    monkeypatch.setattr("threading.excepthook", died.append)
    for moves in (itertools.count(), itertools.repeat(0)):  # of blocks meanwhile
        monkeypatch.setattr(memory_idle, "_C", SimpleNamespace(pool_stats=lambda moves=moves: {"moved": next(moves)}, pool_trim=lambda _: 1))
        one = Idle()
        one.arm(0.3)
        one.arm(math.inf)
        time.sleep(0.8)
        assert not died and one._thread is not None and one._thread.is_alive() and not one.given_back
