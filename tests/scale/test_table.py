"""docs/DISTRIBUTED.md: every row of the table has a test that exists, every test of this folder has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/DISTRIBUTED.md"
# what no row stands for: a row is a combination
OTHERS = {"test_table", "test_cost_model"}


def rows(text: str) -> list[list[str]]:
    """Cells of the first table's rows."""
    lines = text[text.index("| combination |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def functions(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def wrong(text: str) -> list[str]:
    """Rows without a test that exists."""
    found, before = [], ""
    for cells in rows(text):
        name, test = " | ".join(cells[:3]), cells[-1]
        if test.startswith("the same"):
            test = before
        before = test
        if len(cells) != 4:
            found.append(f"{name}: {len(cells)} cells")
            continue
        links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", test)
        for label, target in links:
            path = (PAGE.parent / target).resolve()
            if not path.is_file():
                found.append(f"{name}: {target} is not there")
            elif path.suffix == ".py" and label.startswith("test_") and label != path.name and label not in functions(path):
                found.append(f"{name}: {path.name} has no {label}")
        if not links:
            found.append(f"{name}: no test")
    return found


def test_every_row_has_a_test() -> None:
    assert len(rows(PAGE.read_text())) > 30 and wrong(PAGE.read_text()) == []


def test_every_test_has_a_row() -> None:
    """A file of this folder that no row names is a combination that nobody reads of."""
    text = "\n".join(row[-1] for row in rows(PAGE.read_text()))
    files = {p.stem for p in Path(__file__).parent.glob("test_*.py")} - OTHERS
    assert files and {name for name in files if f"/{name}.py" not in text} == set()


def test_a_row_without_a_test_is_found() -> None:
    text = PAGE.read_text()
    last = "| optimizers on shards"
    for row, words in (
        ("| a | b | fp32 | |", "no test"),
        ("| a | b | fp32 | soon |", "no test"),
        ("| a | b | [test_x](../tests/scale/test_fsdp2.py) |", "cells"),
        ("| a | b | fp32 | [test_x](../tests/scale/test_fsdp2.py) |", "has no test_x"),
        ("| a | b | fp32 | [test_x](../tests/scale/test_none.py) |", "is not there"),
    ):
        assert [w for w in wrong(text.replace(last, f"{row}\n{last}")) if words in w], row
