"""The rooms of csrc/: who may include whom, and how wide a line is; the tests lie as the tree does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import new_op
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
    "cuda": ["graph", "ops", "cpu", "optim", "run"],
    "trainer": ["graph", "ops", "passes", "onnx", "run", "cpu", "optim"],
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
    wrong = [
        p.name
        for p in SOURCES
        if room(p) != "python" and re.search(r"#\s*include <Python\.h>|\bPyObject\b", p.read_text())
    ]
    assert not wrong


def test_files_of_kernels_are_short() -> None:
    long = {str(p.relative_to(CSRC)): n for p in SOURCES if p.suffix == ".cu" and (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_lines_have_at_most_120_columns() -> None:
    files = [
        *SOURCES,
        *(p for d in ("ortmodule", "optim") for p in (ROOT / d).rglob("*.py*") if p.suffix in (".py", ".pyi")),
    ]
    wrong = [
        f"{p.relative_to(ROOT)}:{i}"
        for p in files
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not wrong


FUNCTION = re.compile(r"^\w[\w ]*?[ *](\w+)\((?:[^;{}]*?)\) \{(.*?)(?:^\}|\}$)", re.M | re.S)
LOOKUP = re.compile(
    r"\bom_(?:args_int|args_float|attr_|node_|is\()|\battr_(?:value|axes_mask|number)|\bnode->op\b(?!->name)"
)


def functions(text: str) -> dict[str, str]:
    return {m[1]: m[2] for m in FUNCTION.finditer(text)}


def looked_up(text: str) -> list[str]:
    """Look-ups in om_cpu_run_* functions of a file and in what they call there."""
    bodies = functions(text)
    seen, todo = set(), [name for name in bodies if name.startswith("om_cpu_run_")]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [word for word in set(re.findall(r"\b\w+\b", bodies[name])) if word in bodies]
    return sorted(f"{name}: {m[0]}" for name in seen for m in LOOKUP.finditer(bodies[name]))


def test_runs_look_nothing_up() -> None:
    """What attributes say is read once per plan, by `scratch` and `prepare`; a run has addresses (graph/device.h)."""
    files = [*sorted((CSRC / "cpu").glob("*.c")), CSRC / "optim/ops.c"]
    defined = {name for p in files for name in functions(p.read_text()) if name.startswith("om_cpu_run_")}
    named = set(re.findall(r"^ROW\(.*\b(\w+)\)$", (CSRC / "cpu/cpu.def").read_text(), re.M))
    assert {f"om_cpu_run_{name}" for name in named} == defined
    assert {p.name: found for p in files if (found := looked_up(p.read_text()))} == {}
    text = "static int f(int a) {\n    return attr_value(a, 1);\n}\nint om_cpu_run_x(int a) { return f(a); }\n"
    assert looked_up(text) == ["f: attr_value"]


def test_every_pass_has_tests_of_its_own() -> None:
    """attention's have another name: test_attention.py has the operator's."""
    named = re.findall(r"^PASS\((\w+)", (CSRC / "passes/passes.def").read_text(), re.M)
    have = {p.stem for p in (ROOT / "tests/passes").glob("test_*.py")}
    assert named and [n for n in named if not {f"test_{n}", f"test_{n}_pass"} & have] == []


def test_test_files_import_no_test_files() -> None:
    """What two of them need is a module beside them. test_sabotage.py runs tests; those are what it is about."""
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if p.name != "test_sabotage.py"]
    assert len({p.name for p in files}) == len(files), "pytest knows a test file by its name alone"
    wrong = [p.name for p in files if re.search(r"^\s*(?:import|from) test_\w+", p.read_text(), re.M)]
    assert files and not wrong


def test_capture_has_the_rows_of_pointwise_def() -> None:
    """Stale? .venv/bin/python tests/new_op.py TABLE=1"""
    assert new_op.TABLE.read_text() == new_op.table()
    rows = re.findall(r"^PW\((\w+)", new_op.ROWS.read_text(), re.M)
    assert [m[1] for m in new_op.ROW.finditer(new_op.ROWS.read_text())] == rows  # every row is read


FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand",
             "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}  # fmt: skip


def test_tensors_of_our_own_name_their_device() -> None:
    """torch.set_default_device is the user's: it must not move what the wrapper and the optimizers make for themselves."""
    bad = []
    for path in (p for folder in ("ortmodule", "optim") for p in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                named = any(k.arg in ("device", None) for k in node.keywords)
                if node.func.value.id == "torch" and node.func.attr in FACTORIES and not named:
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr}")
    assert not bad, "\n".join(bad)
