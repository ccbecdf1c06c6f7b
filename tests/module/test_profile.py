"""model.profile(): every call of the engine is timed, at the right line of the user's code, with the work that its sizes
say; and the ranges that torch.profiler is shown."""

from __future__ import annotations

import inspect
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule import profile as profiles
from ortmodule.profile import Profile, Row

ROWS, WIDE, HIDDEN = 64, 128, 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))
        self.up = nn.Linear(WIDE, HIDDEN)
        self.down = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        h = F.gelu(self.up(x)) * 0.5
        return self.down(h).square().mean()


class WithHost(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.linalg.qr(x.t())[0].t()) * 2


def made(cls: type[nn.Module] = Net, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return ORTModule(cls(), **options), torch.randn(ROWS, WIDE)


def stepping(model: nn.Module, x: Tensor) -> Any:
    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def line_of(cls: type, text: str) -> int:
    lines, first = inspect.getsourcelines(cls)
    return first + next(i for i, line in enumerate(lines) if text in line)


def row(p: Profile, what: str, line: int, phase: str = "forward") -> Row:
    found = [r for r in p.rows if r.what.startswith(what) and r.line == line and r.phase == phase and r.file == __file__]
    assert len(found) == 1, (what, line, [(r.what, r.line, r.phase) for r in p.rows])
    return found[0]


def test_rows_are_of_lines_and_their_work_is_that_of_their_sizes() -> None:
    model, x = made(strict="engine")
    p = model.profile(stepping(model, x), steps=4)
    assert p.steps == 4 and p.wall_ms > 0 and p.rows == sorted(p.rows, key=lambda r: -r.ms)
    assert abs(sum(r.share for r in p.rows) - 1) < 1e-6 and 0 < p.engine_ms * 4 <= p.wall_ms
    linear = [r for r in p.rows if r.what == "matmul" and r.phase == "forward"]
    blocks = next(r for r in linear if "blocks" in r.module)
    assert blocks.module == "blocks.*" and blocks.calls == 3
    assert blocks.flops == 3 * 2 * ROWS * WIDE * WIDE  # what a product of these sizes is
    assert blocks.bytes == 3 * 4 * (ROWS * WIDE + WIDE * WIDE + WIDE + ROWS * WIDE)
    up = next(r for r in linear if r.module == "up")
    assert up.flops == 2 * ROWS * WIDE * HIDDEN and up.calls == 1
    assert abs(up.gflops - up.flops / up.ms / 1e6) < 1e-9 * up.gflops and up.gbs > 0 and up.roofline > 0
    # forward and both gradients of each product, but for the first block, whose input wants none
    every = sum(r.flops for r in p.rows if r.what == "matmul")
    assert every == 2 * ROWS * (WIDE * WIDE * (3 + 3 + 2) + 3 * WIDE * HIDDEN + 3 * HIDDEN * 4)
    gelu = next(r for r in p.rows if "gelu" in r.fused and r.phase == "forward")
    assert gelu.fused == ["gelu", "mul"] and gelu.what == "fused(gelu+mul)" and gelu.flops == 2 * ROWS * HIDDEN
    assert gelu.file == __file__ and gelu.line == line_of(Net, "F.gelu")
    assert {line for file, line, _, _ in p.lines() if file == __file__} >= {line_of(Net, "F.gelu"), line_of(Net, "square")}
    assert abs(sum(ms for _, _, ms, _ in p.lines()) - p.engine_ms) < 1e-6


def test_what_is_computed_again_is_marked() -> None:
    model, x = made()
    p = model.profile(stepping(model, x), steps=1)
    again = [r for r in p.rows if r.again]
    assert again and all(r.phase == "backward" for r in again)
    assert any("gelu" in r.fused for r in again), [r.what for r in again]
    assert "computed again in backward: " in p.table() and "backward again " in p.table()


def test_what_pytorch_computes_has_rows_of_its_own() -> None:
    model, x = made(WithHost)
    p = model.profile(stepping(model, x), steps=2)
    (host,) = [r for r in p.rows if r.kind == "host" and r.phase == "forward"]
    assert "qr" in host.what and host.ms > 0 and host.line == line_of(WithHost, "qr") and host.calls == 1
    assert "in PyTorch" in p.table() and not host.roofline


def test_context_counts_what_happens_inside_and_nothing_else() -> None:
    model, x = made()
    step = stepping(model, x)
    step()
    before = [torch.equal(a, b) for a, b in zip(model.parameters(), model.parameters())]
    with model.profile() as p:
        for _ in range(3):
            step()
        with pytest.raises(RuntimeError, match="open already"), model.profile():
            pass
    step()
    assert before and p.steps == 3 and row(p, "fused(gelu", line_of(Net, "F.gelu")).calls == 1
    # off: no clock is read
    (graph,) = [made.graph for made in model._ortmodule.every]
    step()
    assert not graph.model.profile(False) and all(c["count"] == 0 for plan in graph.model.profile_calls() for c in plan["calls"])
    with model.profile() as empty:
        pass
    assert empty.steps == 0 and not empty.rows and "no forward of it ran in the engine" in str(empty)
    with model.profile() as p:  # captured inside
        model(torch.randn(3, WIDE)).backward()
        step()
    assert p.steps == 2 and len(model._ortmodule.every) > 1 and any(r.what == "matmul" for r in p.rows)
    assert not profiles._active


def test_a_graph_in_parts() -> None:
    """Hooks on submodules cut the graph: all parts are timed, and their memory is shown."""
    model, x = made()
    seen: list[int] = []
    model.up.register_forward_hook(lambda *_: seen.append(1))
    p = model.profile(stepping(model, x), steps=2)
    assert p.steps == 2 and sum(r.calls for r in p.rows if r.what == "matmul" and r.phase == "forward") == 5 and seen
    assert max(model.memory_timeline().held) > 0


def test_a_step_that_does_not_reach_the_engine_is_said() -> None:
    model, x = made()
    beside = model.profile(lambda: torch.tanh(x), steps=1)
    assert not beside.rows and "no forward of it ran in the engine" in beside.table() == str(beside)
    assert "1 steps" in model.profile(stepping(model, x), steps=1).table()


def test_errors_end_a_profile() -> None:
    model, x = made()
    with pytest.raises(ZeroDivisionError), model.profile():
        model(x)
        raise ZeroDivisionError
    assert not profiles._active and not any(r for made in model._ortmodule.every for r in made.graph.model.profile(False))
    with pytest.raises(ValueError, match="steps=0"):
        model.profile(stepping(model, x), steps=0)


def test_several_threads() -> None:
    model, x = made()
    model(x).backward()
    with model.profile() as p:
        threads = [threading.Thread(target=lambda: [model(x).sum() for _ in range(20)]) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert p.steps == 60 and row(p, "fused(gelu", line_of(Net, "F.gelu")).calls == 1


def test_the_gradients_are_those_without_a_profile() -> None:
    model, x = made()
    stepping(model, x)()
    grads = [p.grad for p in model.parameters()]
    model.profile(stepping(model, x), steps=2)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))


def test_text_and_page(tmp_path: Path) -> None:
    model, x = made()
    p = model.profile(stepping(model, x), steps=2)
    table = p.table()
    head = next(line for line in table.splitlines() if "GFLOP/s" in line and "roofline" in line)
    assert head.split() == ["ms", "share", "calls", "GFLOP/s", "GB/s", "roofline", "what"]
    rows = table.splitlines()[table.splitlines().index(head) + 1 :]
    assert len(rows) == len(p.rows)
    for text, r in zip(rows, p.rows):
        assert abs(float(text.split()[0]) - r.ms) < 1e-3 and r.what in text and text.split()[1].endswith("%")
    assert len(p.table(3).splitlines()) == len(table.splitlines()) - len(p.rows) + 4 and f"{len(p.rows) - 3} more" in p.table(3)
    page = p.html(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == page
    data = re.search(r"<script type=application/json id=profile>(.*?)</script>", page, re.S)
    assert data and json.loads(data[1]) == json.loads(json.dumps(p.to_dict()))
    assert page.count("<tr>") == len(p.rows) + len(p.lines()) + 2 and "F.gelu(self.up(x))" in page


def test_the_machine_is_measured_once() -> None:
    """Two measurements of the same thing agree within what a shared machine allows."""
    profiles._machines.clear()
    flops, memory = profiles.peak_flops("f32"), profiles.bandwidth()
    assert 1e9 < flops < 1e15 and 1e8 < memory < 1e14
    assert profiles.peak_flops("f32") == flops and profiles.bandwidth() == memory and len(profiles._machines) == 2


def test_a_users_own_attribute_keeps_its_name() -> None:
    class Mine(Net):
        def profile(self) -> str:
            return "mine"

    model = ORTModule(Mine())
    x = torch.randn(ROWS, WIDE)
    assert model.profile() == "mine" and ORTModule.profile(model, stepping(model, x), 1).steps == 1


def test_ranges_of_torch_profiler() -> None:
    model, x = made(segment_mb=0.05)
    step = stepping(model, x)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
        with torch.no_grad():
            model(x)
    names = [e.name for e in seen.events() if e.name.startswith("ORTModule ")]
    assert names.count("ORTModule forward") == 2
    segments = sorted(n for n in names if n.startswith("ORTModule backward, segment"))
    assert len(segments) > 1 and segments == [f"ORTModule backward, segment {i}" for i in range(len(segments))]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        pass
    step()
    assert not [e for e in seen.events() if e.name.startswith("ORTModule ")]
