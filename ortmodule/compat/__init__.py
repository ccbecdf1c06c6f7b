"""Familiar imports: `onnxruntime.training...` and `torch_ort` served by ortmodule when they are not installed.

    import ortmodule.compat                                         in the script, before the imports to serve
    python -m ortmodule.compat script.py arguments...               or without touching it

A finder at the end of sys.meta_path answers only for the names of names.py, and only when no other finder knows them:
an installed onnxruntime-training or torch-ort wins, and nothing is added to it. The plain onnxruntime package may be
installed; only its missing `training` is added. A process that multiprocessing starts by spawn or forkserver imports
the script without this module: there the script needs the import.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.abc
import importlib.machinery
import opcode
import sys
from types import ModuleType
from typing import Any

from .names import MISSING, NAMES

_ORIGIN = "ortmodule.compat"
# packages whose modules may have an origin of their own
_ROOTS = ("onnxruntime",)


class _Served(ModuleType):
    """A module of the table. What is written in capitals is a constant that scripts change by assigning it here: it is
    read from its home each time and written there. Other assignments stay in this module."""

    def __getattr__(self, name: str) -> Any:
        own = NAMES[self.__name__]
        if name in own:
            home, _, attribute = own[name].partition(":")
            module = importlib.import_module(home)
            value = getattr(module, attribute) if attribute else module
            if not name.isupper():
                self.__dict__[name] = value
            return value
        below = f"{self.__name__}.{name}"
        if below in NAMES:
            return importlib.import_module(below)
        raise (ImportError if _imported() else AttributeError)(_unknown(self.__name__, name))

    def __setattr__(self, name: str, value: Any) -> None:
        entry = NAMES[self.__name__].get(name)
        if entry is not None and name.isupper():
            home, _, attribute = entry.partition(":")
            setattr(importlib.import_module(home), attribute, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        prefix = self.__name__ + "."
        below = [m[len(prefix) :] for m in NAMES if m.startswith(prefix) and "." not in m[len(prefix) :]]
        return sorted({*NAMES[self.__name__], *below, *self.__dict__})


def _imported() -> bool:
    """Does `from module import name` ask? Python puts a text of its own in the place of an AttributeError."""
    frame = sys._getframe(2)
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def _unknown(module: str, name: str) -> str:
    known = [n for n in NAMES[module] if not n.startswith("_")]
    text = f"module {module!r} (served by ortmodule.compat) has no attribute {name!r}"
    why = MISSING.get(f"{module}.{name}")
    if why is not None:
        return f"{text}: {why}"
    near = difflib.get_close_matches(name, known, 1)
    return f"{text}{f'; the nearest is {near[0]!r}' if near else ''}; it has: {', '.join(known)}"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent, _, tail = name.rpartition(".")
        if name in MISSING and isinstance(sys.modules.get(parent), _Served):
            raise ModuleNotFoundError(_unknown(parent, tail), name=name)
        if name not in NAMES:
            return None
        if parent and parent not in _ROOTS and not isinstance(sys.modules.get(parent), _Served):
            return None  # an installed onnxruntime-training stays as it is
        is_package = any(other.startswith(name + ".") for other in NAMES)
        return importlib.machinery.ModuleSpec(name, self, origin=_ORIGIN, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return _Served(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = [n for n in NAMES[module.__name__] if not n.startswith("_")]
        module.__dict__["__doc__"] = "Served by ortmodule.compat."

    def get_code(self, name: str) -> Any:
        """For `python -m`: what the module at home does as __main__."""
        home = NAMES[name].get("__main__")
        if home is None:
            return compile("", name, "exec")
        return compile(f"import runpy; runpy.run_module({home!r}, run_name='__main__', alter_sys=True)", name, "exec")


def install() -> None:
    """Adds the finder; once is enough."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


install()
