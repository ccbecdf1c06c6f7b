"""The memory table, and what ORTMODULE_MEMORY_OPT_CONFIG makes of the clusters that it names (ortmodule/memory_table.py)."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import bert, gpt2, ids
from torch import Tensor, nn

from ortmodule import _C, ORTModule
from ortmodule.memory import ClusterError
from ortmodule.memory_table import Plan, Table, plan, read

BATCH = {"input_ids": ids(), "labels": ids(1)}


def wrapped(make: Any = gpt2, **options: Any) -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(make().train(), strict=True, recheck=False, **options)


def step(model: nn.Module, batch: dict[str, Tensor] = BATCH) -> Tensor:
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**batch)
    out.loss.backward()
    return out.loss.detach()  # type: ignore[no-any-return]


def table(model: ORTModule) -> Table:
    found = model.report().graphs[-1].table
    assert found is not None
    return found


def peak(model: ORTModule) -> int:
    model.zero_grad()
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    step(model)
    return _C.pool_stats()["peak_live"] - before


def config(path: Path, *rows: str) -> str:
    file = path / "plans.json"
    file.write_text(json.dumps(rows))
    return str(file)


def test_layers_share_rows_and_numbers_are_those_of_the_plans() -> None:
    ours = wrapped()
    step(ours)
    found = table(ours)
    gelu = next(r for r in found.rows if r.name == "gelu_tanh+")
    assert gelu.count == gelu.cheap == 3 and found.applied(gelu) == "level 0: 3"
    assert gelu.bytes == 3 * 6 * 80 * 4 * 64 * 4
    products = [r for r in found.rows if r.name == "matmul+" or r.name.endswith("+matmul+")]
    assert products and all(found.applied(r).startswith("OFF") for r in products)
    assert found.after == peak(ours) < found.before
    assert [r.bytes for r in found.rows] == sorted([r.bytes for r in found.rows], reverse=True)
    assert found.before == peak(wrapped_keeping(ours, found))


def wrapped_keeping(ours: ORTModule, found: Table) -> ORTModule:
    """Nothing is computed again."""
    other = wrapped()
    step(other)
    graph = other._ortmodule.every[0].graph
    graph.memory.plans = [Plan(r.name, 0, -1) for r in found.rows]
    return other


def test_formulas_are_over_sizes() -> None:
    ours = wrapped()
    for t in (80, 40, 64):
        step(ours, {"input_ids": ids(t=t), "labels": ids(t=t)})
    found = table(ours)
    assert found.sizes and set(found.sizes.values()) <= {6, 40, 64, 80}
    gelu = next(r for r in found.rows if r.name == "gelu_tanh+")
    assert eval(gelu.formula, {}, dict(found.sizes)) == gelu.bytes


def test_printed_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ortmodule"):
        step(wrapped())
    text = caplog.text
    assert "Memory Optimizer: level 0; peak " in text and "Saving Symbolic(Bytes)" in text and "gelu_tanh+:1:-1" in text


@pytest.mark.parametrize("level", [0, 2])
def test_a_file_says_what_is_computed_again(tmp_path: Path, level: int) -> None:
    plain = wrapped()
    step(plain)
    row = max((r for r in table(plain).rows if not r.cheap and not r.compromise), key=lambda r: r.bytes / r.count)
    file = config(tmp_path, f"{row.name}:1:-1")
    ours = wrapped(memory_opt_config=file, memory_opt_level=level)
    assert torch.equal(step(ours), step(plain))
    same(ours, plain)
    found = table(ours)
    assert found.applied(next(r for r in found.rows if r.name == row.name)) == f"config: {row.count}"
    assert found.config == [f"{row.name}:1:-1"]
    some = wrapped(memory_opt_config=config(tmp_path, f"{row.name}:1:1"), memory_opt_level=level)
    step(some)
    same(some, plain)
    assert peak(ours) < peak(plain)
    assert again(ours) > again(some) > again(plain)


def again(model: ORTModule) -> int:
    """Nodes of the backward that runs."""
    graph = model._ortmodule.every[0].graph
    number = max(graph.memory.made.values(), key=lambda v: v.number).number if graph.memory.made else max(
        v.number for v in graph._variants.values())
    return sum(n["phase"] == "backward" for n in graph.model.nodes(number))


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


def test_strategy_none_keeps_what_level_0_would_not(tmp_path: Path) -> None:
    plain, ours = wrapped(), wrapped(memory_opt_config=config(tmp_path, "gelu_tanh+:0:-1"))
    assert torch.equal(step(ours), step(plain))
    same(ours, plain)
    gelu = next(r for r in table(ours).rows if r.name == "gelu_tanh+")
    assert table(ours).applied(gelu) == "config: 3 kept"
    assert peak(ours) > peak(plain)


class Casting(nn.Module):
    """A mask in fp32 that comes from bools; backward reads the former alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 3), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) > 0).float() * self.c(x)).square().mean()


def test_a_compromise_keeps_the_narrower_operand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Casting(), torch.randn(64, 50, 32)
    first = ORTModule(copy.deepcopy(model))
    first(x).backward()
    names = {(r.name, r.compromise) for r in table(first).rows}
    assert ("cast+", True) in names, names
    ours = ORTModule(copy.deepcopy(model), memory_opt_config=config(tmp_path, "cast+:2:-1"))
    ours(x).backward()
    for (name, p), q in zip(ours.named_parameters(), first.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == name.startswith("a."), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    kept, all_kept = (m.report().graphs[0].memory.kept for m in (ours, first))  # the peak may be a product's packed operands
    assert kept < all_kept and table(ours).after <= table(first).after


def test_what_is_no_cluster_is_an_error_that_lists_those_there_are(tmp_path: Path) -> None:
    ours = wrapped(memory_opt_config=config(tmp_path, "gelu_tanh+:1:-1,nothing+:1:2"))
    with pytest.raises(ClusterError, match=r"there is no cluster nothing\+; there are .*gelu_tanh\+"):
        step(ours)


def test_every_row_can_be_kept_and_a_compromise_is_no_recompute(tmp_path: Path) -> None:
    """Every strategy of every row of a table in which one has strategy 2 alone."""
    torch.manual_seed(0)
    model, x = Casting(), torch.randn(64, 50, 32)

    def ran(*rows: str) -> ORTModule:
        ours = ORTModule(copy.deepcopy(model), memory_opt_config=config(tmp_path, *rows) if rows else None)
        ours(x).backward()
        return ours

    plain = ran()
    only_2 = {r.name for r in table(plain).rows if r.compromise} - {r.name for r in table(plain).rows if not r.compromise}
    assert only_2 and len(table(plain).rows) > 1
    for row in table(plain).rows:
        for strategy in (0, 1, 2):
            if strategy == 1 and row.name in only_2:
                with pytest.raises(ClusterError, match=rf"cluster {re.escape(row.name)} has strategies 0 and 2 only"):
                    ran(f"{row.name}:1:-1")
                continue
            ours = ran(f"{row.name}:{strategy}:-1")
            for name in ("b", "c"):  # nothing of a has a gradient
                same(getattr(ours, name), getattr(plain, name))
            if row.compromise == (strategy == 2) or row.name in only_2:
                found = next(r for r in table(ours).rows if (r.name, r.compromise) == (row.name, row.compromise))
                assert table(ours).applied(found) == f"config: {row.count}" + " kept" * (strategy == 0)


class TwoWays(nn.Module):
    """Its captures have other clusters each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, way: int) -> Tensor:
        x = torch.sin(self.a(x)) if way == 0 else torch.tanh(self.a(x)).exp()
        return self.b(x * x.cos() if way == 0 else x * x.erf()).square().mean()


def test_a_name_of_another_capture_is_no_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = TwoWays(), torch.randn(64, 32)

    def ran(ways: tuple[int, ...], *rows: str) -> ORTModule:
        ours = ORTModule(copy.deepcopy(model), strict=True, memory_opt_config=config(tmp_path, *rows) if rows else None)
        for way in ways:
            ours(x, way).backward()
        return ours

    plain = ran((0, 1, 0))
    first, second = ({r.name for r in graph.table.rows} for graph in plain.report().graphs)  # type: ignore[union-attr]
    assert "sin+" in first - second and "exp+" in second - first
    known = ran((0, 1, 0), "sin+:1:-1")
    same(known, plain)
    tables = [graph.table for graph in known.report().graphs]
    assert [[t.applied(r) for r in t.rows if r.name == "sin+"] for t in tables if t] == [["config: 1"], []]
    both = ran((0, 1, 0), "sin+:1:-1", "?exp+:1:-1")
    same(both, plain)
    tables = [graph.table for graph in both.report().graphs]
    assert [[t.applied(r) for r in t.rows if r.name in ("sin+", "exp+")] for t in tables if t] == [["config: 1"]] * 2
    assert tables[0] and tables[0].config == ["sin+:1:-1", "?exp+:1:-1"]
    for rows, ways in ((("sin+:1:-1", "exp+:1:-1"), (0,)), (("sin+:1:-1",), (1,))):
        with pytest.raises(ClusterError, match=r"there is no cluster (sin|exp)\+; there are "):
            ran(ways, *rows)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ('["gelu+:1"]', "'gelu\\+:1' is no 'cluster:strategy:count'"),
        ('["gelu+:3:1"]', "strategy 0, 1 or 2"),
        ('["gelu+:1:-2"]', "count -1 or more"),
        ('{"a": 1}', "holds something else"),
        ("[", "Expecting value"),
    ],
)
def test_files_that_are_none(tmp_path: Path, rows: str, why: str) -> None:
    file = tmp_path / "plans.json"
    file.write_text(rows)
    with pytest.raises(ValueError, match=why):
        ORTModule(nn.Linear(2, 2), memory_opt_config=str(file))
    with pytest.raises(ValueError, match="No such file"):
        ORTModule(nn.Linear(2, 2), memory_opt_config=str(tmp_path / "none.json"))


def test_combined_plans_and_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan("a+b+:2:-1") == ("a+b+", 2, -1, False) and str(plan("a+:0:3")) == "a+:0:3"
    assert plan(" ?a+:0:3") == ("a+", 0, 3, True) and str(plan("?a+:0:3")) == "?a+:0:3"
    file = config(tmp_path, "Cast+:2:-1,Mul+:1:4", "a+:1:1")
    assert read(file) == (plan("Cast+:2:-1"), plan("Mul+:1:4"), plan("a+:1:1"))
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", file)
    assert ORTModule(nn.Linear(2, 2))._ortmodule.settings.memory_opt_config == file


def test_level_1_does_not_ask_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = wrapped(bert, memory_opt_level=1, memory_opt_config=config(tmp_path, "nothing+:1:-1"))
    assert "has no effect beside memory_opt_level=1" in caplog.text
    step(ours)
    found = table(ours)
    assert found.level == 1 and any(found.applied(r).startswith("level 1: ") for r in found.rows)
