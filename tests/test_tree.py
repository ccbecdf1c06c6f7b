"""The rooms of csrc/: who may include whom, and how wide a line is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
# A room may include its own files and those of the rooms named here; ortmodule.h, the public manual, is everyone's.
ROOMS = {
    "graph": [],
    "ops": ["graph"],
    "passes": ["graph", "ops"],
    "onnx": ["graph", "ops", "passes"],
    "run": ["graph", "ops", "passes"],
    "cpu": ["graph", "ops"],
    "optim": ["graph", "ops", "cpu"],
    "cuda": ["graph", "ops", "optim"],
    "python": ["graph", "ops", "passes", "onnx", "run", "cpu", "optim", "cuda"],
    "tools": ["graph", "ops", "passes", "onnx", "run"],
}
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".c", ".h", ".cu", ".def"))
INCLUDE = re.compile(r'^#\s*include "([^"]+)"', re.M)


def includes(path: Path) -> list[Path]:
    return [CSRC / name for name in INCLUDE.findall(path.read_text()) if (CSRC / name).exists()]


def room(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def test_every_room_is_known() -> None:
    assert {p.name for p in CSRC.iterdir() if p.is_dir()} == set(ROOMS)
    assert max(len(p.relative_to(CSRC).parts) for p in SOURCES) <= 3


def test_includes_are_paths_from_csrc() -> None:
    wrong = [
        f"{p.relative_to(CSRC)}: {name}"
        for p in SOURCES
        for name in INCLUDE.findall(p.read_text())
        if not (CSRC / name).exists() and name != "onnx.pb-c.h"
    ]
    assert not wrong


@pytest.mark.parametrize("name", ROOMS)
def test_includes_point_downwards(name: str) -> None:
    allowed = {name, "ortmodule.h", *ROOMS[name]}
    wrong = [
        f"{p.relative_to(CSRC)} includes {q.relative_to(CSRC)}"
        for p in SOURCES
        if room(p) == name
        for q in includes(p)
        if room(q) not in allowed
    ]
    assert not wrong


def test_headers_make_no_circle() -> None:
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, " -> ".join(str(p.relative_to(CSRC)) for p in (*above[above.index(path) :], path))
        if path in done:
            return
        for q in includes(path):
            if q.suffix == ".h":
                visit(q, (*above, path))
        done.add(path)

    for p in SOURCES:
        if p.suffix == ".h":
            visit(p, ())


def test_only_python_knows_python() -> None:
    wrong = [p.name for p in SOURCES if room(p) != "python" and re.search(r"#\s*include <Python\.h>|\bPyObject\b", p.read_text())]
    assert not wrong


def test_lines_have_at_most_120_columns() -> None:
    files = [*SOURCES, *(p for d in ("ortmodule", "optim") for p in (ROOT / d).rglob("*.py*") if p.suffix in (".py", ".pyi"))]
    wrong = [f"{p.relative_to(ROOT)}:{i}" for p in files for i, line in enumerate(p.read_text().splitlines(), 1) if len(line) > 120]
    assert not wrong
