"""The files of the Python package import in one direction: no circle, also none that is hidden in a function."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ortmodule

HOME = Path(ortmodule.__file__).parent
# code that runs in the place of PyTorch's finds its function by an import: it has PyTorch's globals, not its file's
OF_OTHERS = {("ortmodule.capture.opaque", "ortmodule.capture.opaque"), ("ortmodule.capture.refused",) * 2}


def files() -> dict[str, Path]:
    found = {}
    for path in [p for d in ("", "capture/", "compat/", "experimental/", "torch_cpp_extensions/") for p in HOME.glob(f"{d}*.py")]:
        parts = ("ortmodule", *path.relative_to(HOME).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class _RunTime(ast.NodeTransformer):
    """Without what is imported for types alone."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Files of the package that a file imports, anywhere in it."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(_RunTime().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]) \
                if node.level else node.module or ""  # fmt: skip
            for a in node.names:
                found.add(f"{base}.{a.name}" if f"{base}.{a.name}" in known else base)
    return {f for f in found if f in known and f != "ortmodule"}  # of `ortmodule` itself only _C is taken


def test_imports_go_in_one_direction():
    known = files()
    graph = {name: imported(name, path, known) for name, path in known.items() if name != "ortmodule"}
    own = {(name, d) for name, deps in graph.items() for d in deps if name == d}
    assert own <= OF_OTHERS | {("ortmodule.compat",) * 2}  # that one makes itself the imported one
    order = list(TopologicalSorter({name: deps - {name} for name, deps in graph.items()}).static_order())
    assert order.index("ortmodule.state") < order.index("ortmodule.ladder") < order.index("ortmodule.module")
    assert order.index("ortmodule.torch_private") < order.index("ortmodule.capture")


def test_private_names_of_torch_are_in_one_file():
    """What looks like one (`torch._C...`, `torch.x._y`) stands in torch_private.py, but for texts."""
    for name, path in [*files().items(), *[(p.stem, p) for p in HOME.glob("optim/*.py")]]:
        if name == "ortmodule.torch_private":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            chain, at = [], node
            while isinstance(at, ast.Attribute):
                chain.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id == "torch":
                assert not any(part.startswith("_") and part[:2] != "__" for part in chain), f"{path}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                words = [*(node.module or "").split("."), *[a.name for a in node.names]]
                assert not any(w.startswith("_") for w in words), f"{path}:{node.lineno}"
