"""What can be shown of an installed wheel on a Python without torch: run by tests/wheel/pythons.sh.

    python alone.py ARTIFACTS digits.u8     (made by examples/digits.py)

Every file of the package compiles, with warnings as errors; frames.py tells what stands in a `try`, on this Python's own
bytecode; ortmodule.api trains. The last line is the losses, in hexadecimal: the same on every Python.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import sys
import types
import warnings
from pathlib import Path

import numpy as np

HOME = Path(os.environ.get("OM_HOME") or importlib.util.find_spec("ortmodule").origin).parent  # type: ignore[union-attr,arg-type]


def compiles() -> int:
    warnings.simplefilter("error")
    files = sorted(HOME.rglob("*.py"))
    for path in files:
        tree = ast.parse(path.read_text(), str(path))
        compile(tree, str(path), "exec", dont_inherit=True)
        for node in ast.walk(tree):  # and asks for nothing of the standard library that this Python has not
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level and node.module else []
            for name in names:
                if name.partition(".")[0] in STANDARD and importlib.util.find_spec(name) is None:
                    raise ImportError(f"{path}: {name}")
    return len(files)


STANDARD = sys.stdlib_module_names | {"distutils", "imp", "asyncore", "asynchat", "cgi", "pipes", "telnetlib"}


def frames() -> types.ModuleType:
    """frames.py, which asks torch where it lies and what a module is."""
    for name, attributes in {"torch": {"__file__": "/torch/__init__.py"}, "torch.nn": {"Module": type("Module", (), {})}}.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    sys.modules["torch"].nn = sys.modules["torch.nn"]  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("frames_alone", HOME / "frames.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    del sys.modules["torch"], sys.modules["torch.nn"]
    return module


def tries() -> int:
    """Each `ask(k)` of these stands in a try that may catch (1) or does not (0); asked of the frame while it runs."""
    told = frames()
    seen: list[tuple[int, bool]] = []

    def ask(expected: int, value: int = 0) -> int:
        seen.append((expected, told.tried(sys._getframe(1))))
        return value

    def plain() -> None:
        ask(0)
        try:
            ask(1)
        except ValueError:
            ask(0)
        else:
            ask(0)
        ask(0)

    def ends() -> int:
        try:
            ask(0)
        finally:
            ask(0)
        with contextlib.suppress(ValueError):
            ask(1)
        return ask(0)

    def manages() -> None:
        with contextlib.nullcontext():
            ask(0)
            with contextlib.nullcontext() as _, contextlib.nullcontext():
                ask(0)

    def nested(k: int = 3) -> None:
        for i in range(k):
            try:
                if i == 1:
                    continue
                ask(1)
                with contextlib.nullcontext():
                    ask(1)
                try:
                    ask(1)
                finally:
                    ask(1)
            except (KeyError, ValueError) as error:
                print(error)
            finally:
                ask(0)
        while ask(0):
            pass

    def catches() -> None:
        try:
            raise ValueError
        except ValueError:
            ask(0)
            try:
                ask(1)
            except Exception:
                raise

    def comprehends() -> list[int]:
        try:
            return [ask(1, i) for i in range(2)] if sys.version_info >= (3, 12) else [ask(1), ask(1)]  # inlined since 3.12
        except Exception:
            return []

    def bare() -> None:
        try:
            ask(1)
        except:  # noqa: E722
            pass

    runs = [plain, ends, manages, nested, catches, comprehends, bare]
    if sys.version_info >= (3, 11):
        space: dict[str, types.FunctionType] = {"ask": ask}  # type: ignore[dict-item]
        exec("def groups():\n try:\n  ask(1)\n except* ValueError:\n  pass\n ask(0)\n", space)
        runs.append(space["groups"])
    for run in runs:
        before = len(seen)
        run()
        assert len(seen) > before
        wrong = [i for i, (expected, found) in enumerate(seen[before:]) if expected != found]
        assert not wrong, f"{run.__name__}: frames.tried is wrong at the questions {wrong}"
    assert told.is_user_file(__file__) and not told.is_user_file(told.__file__) and not told.is_user_file("/torch/x.py")
    return len(seen)


def losses(artifacts: Path, data: Path) -> list[str]:
    from ortmodule.api import CheckpointState, Module, Optimizer, set_seed

    raw = data.read_bytes()
    head, _, rest = raw.partition(b"\n")
    n = int(head.split()[1])
    pixels = np.frombuffer(rest, np.uint8)
    x, labels = pixels[: 64 * n].reshape(n, 64).astype(np.float32) / 16 - 0.5, pixels[64 * n :].astype(np.int64)
    set_seed(0)
    module = Module(artifacts / "training_model.onnx", CheckpointState.load_checkpoint(artifacts / "checkpoint"))
    optimizer = Optimizer(artifacts / "optimizer_model.onnx", module)
    found = []
    for at in range(0, 500, 25):
        found.append(float(np.asarray(module(x[at : at + 25], labels[at : at + 25])[0])))
        optimizer.step()
        module.lazy_reset_grad()
    assert "torch" not in sys.modules and found[-1] < found[0], found
    return [value.hex() for value in found]


if __name__ == "__main__":
    rows = losses(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stderr.write(f"{compiles()} files compile, frames.tried is right {tries()} times, {len(rows)} steps of ortmodule.api\n")
    assert re.fullmatch(r"[\w\-.+]+", rows[0])
    print(" ".join(rows))
