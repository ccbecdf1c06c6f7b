"""The table of rows that a capture holds for, and the problems that keep a module in PyTorch.

Tokens say who has read or changed something: the name of a module in the tree, a class of modules, or code that has run
(by its id).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import _C, contents, frames, libraries
from ..errors import CaptureError
from ..libraries import is_library

# kinds of rows, see csrc/python/guard.c
(ITEM, NO_ITEM, ATTRIBUTE, MAPPED, UNMAPPED, LIST, DICT, SEQUENCE, MEMORY, CALL, FUNCTIONS, CLASS, OWN,
 NO_ATTRIBUTE) = range(14)  # fmt: skip


@functools.cache
def for_itself(path: str) -> bool:
    """Is what the code of this file calls its own affair, whoever has called it: torch's, logging's?"""
    return is_library(path) and (
        not libraries.in_std(path)
        and not path.startswith("<frozen")
        and f"{os.sep}torch{os.sep}backends{os.sep}" not in path
        or f"{os.sep}logging{os.sep}" in path
        or path.endswith(("warnings.py", "threading.py"))
    )


class Problem(NamedTuple):
    """Why a module must stay in PyTorch. fills: a dictionary has got entries and lost none, so a second call may find
    all that it looks for."""

    module: str
    reason: str
    file: str
    line: int
    fills: bool = False


class Held:
    """The Python state that captures hold for: rows for _C.guard_check and what to call them."""

    def __init__(self) -> None:
        self.table: tuple[Any, ...] = ()
        self.names: list[str] = []
        self._known: set[tuple[Any, ...]] = set()
        self._classes: set[type] = set()

    def add(self, rows: dict[tuple[Any, ...], tuple[tuple[Any, ...], str]], classes: Collection[type]) -> None:
        """The rows of one more capture. classes: whose dictionaries are among them; when a class goes, Python empties
        its dictionary, whoever holds it."""
        self._classes.update(classes)
        new = [(row, name) for key, (row, name) in rows.items() if key not in self._known]
        self._known.update(rows)
        self.names += [name for _, name in new]
        self.table += tuple(x for row, _ in new for x in row)

    def hold(self) -> bool:
        return _C.guard_check(self.table) < 0

    def also(self, stands: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
        """More rows, for lists and dictionaries that stand where equal ones were: (what is there, what was)."""
        todo = [*stands]
        if not todo:
            return ()
        rows: list[Any] = []
        known = {id(x): kind for kind, x in zip(self.table[::4], self.table[1::4], strict=True) if kind in (LIST, DICT)}
        while todo:
            now, was = todo.pop()
            if type(now) is not type(was) or now is was:
                continue
            inside: Iterable[Any]
            before: Iterable[Any]
            if isinstance(now, dict):
                inside, before, held = now.values(), was.values(), contents.flat(now)
            elif isinstance(now, (list, tuple)):
                inside, before, held = now, was, tuple(now)
            else:
                continue
            if id(was) in known:
                rows += known[id(was)], now, None, held
            todo += zip(inside, before, strict=False)
        return tuple(rows)

    def changed(self) -> list[str]:
        """Names of what is no longer as it was."""
        return list(
            dict.fromkeys(
                name for i, name in enumerate(self.names) if _C.guard_check(self.table[4 * i : 4 * i + 4]) >= 0
            )
        )


class Table:
    """Rows, problems and what they are told of: the modules of the tree and the code that has run.

    Modules are known by their __dict__: the tracer puts other objects over the same __dict__ in their place.
    """

    def __init__(self, module: nn.Module, known_as: nn.Module | None = None) -> None:
        """known_as: the module that the user's code may reach by a global or closure variable, when `module` stands for
        it. It shares its tables of parameters and buffers, in which the export puts tensors of the trace: no state to
        be noted or put back."""
        self._names = frames.names_of(module)
        if known_as is not None:
            self._names.setdefault(id(known_as.__dict__), "")
        self._classes_of = {name: type(m) for name, m in module.named_modules()}
        self.quiet = 0
        self._active = 0
        self._thread = threading.get_ident()
        self.rows: dict[tuple[Any, ...], tuple[tuple[Any, ...], str]] = {}
        self.problems: list[Problem] = []
        self.says: dict[tuple[str, int], str] = {}
        self.escaped: set[str] = set()  # modules whose code leaves a tensor where others find it when it has returned
        self._no_methods: dict[int, types.CodeType] = {}  # code that is no method of a module, by id
        self._ran: dict[int, types.CodeType] = {}
        self._ran_in: dict[int, set[str]] = {}
        self._ran_quietly: dict[int, set[str]] = {}  # by code: modules kept in PyTorch in which it has run
        self._known = known_as if known_as is not None else module
        self._tensor_rows: set[tuple[str, str]] = set()

    def _row(self, row: tuple[Any, ...], name: str) -> None:
        if not self.quiet:
            self.rows.setdefault((row[0] if row[0] > UNMAPPED else row[0] // 2, id(row[1]), row[2]), (row, name))

    def ask_tensor(self, where: str, now: Tensor, ask: Callable[[Tensor], Any], what: str) -> None:
        """Forward has asked this of a parameter or buffer, in whose place the trace has another tensor."""
        owner, _, name = where.rpartition(".")
        root = self._known

        def again() -> Any:
            return ask(getattr(root.get_submodule(owner), name))

        if not self.quiet and (where, what) not in self._tensor_rows:
            self._tensor_rows.add((where, what))
            self._row((CALL, None, again, ask(now)), what)

    def _module_at(self, frame: types.FrameType | None) -> str:
        """The innermost module whose code is running."""
        return frames.module_at(frames.outwards(frame), self._names, self._no_methods) or ""

    def _reader(self, frame: types.FrameType | None) -> tuple[str, types.FrameType | None]:
        """The user's frame that called into the standard library here (None: torch or logging did), and its module."""
        while frame is not None:
            path = frame.f_code.co_filename
            if not is_library(path):
                return self._module_at(frame), frame
            if for_itself(path):
                return "", None
            frame = frame.f_back
        return "", None

    def _problem_at(self, where: str, reason: str, frame: types.FrameType) -> None:
        self.problems.append(Problem(where, reason, frame.f_code.co_filename, frame.f_lineno))

    def problem_at(self, frame: types.FrameType, reason: str, whole: bool = False) -> None:
        """Code that runs here must stay in PyTorch; whole: with all that calls it."""
        if not self.quiet:
            self._problem_at("" if whole else self._module_at(frame), reason, frame)

    def _problem(self, token: Any, reason: str, fills: bool = False) -> None:
        if self.quiet:
            return
        if isinstance(token, str):
            code = getattr(self._classes_of[token].forward, "__code__", None)
        elif isinstance(token, type):
            code = getattr(token.forward, "__code__", None) if issubclass(token, nn.Module) else None
        else:
            code = self._ran[token]
        for where in self._places_of(token):
            self.problems.append(
                Problem(where, reason, code.co_filename if code else "", code.co_firstlineno if code else 0, fills)
            )

    def _places_of(self, token: Any) -> set[str]:
        """Where in the tree a module, a class, or code that has run (by its id; in the graph) stands."""
        if isinstance(token, str):
            return {token}
        if isinstance(token, type):
            return {where for where, cls in self._classes_of.items() if issubclass(cls, token)}
        return self._ran_in[token]

    def ran(self) -> set[str]:
        """Modules whose code has run as a part of the graph, but for a __call__ of their own."""
        return {w for key, places in self._ran_in.items() if self._ran[key].co_name != "__call__" for w in places}

    def _stop(self, reason: str, user: types.FrameType | None = None) -> None:
        """What the trace would use up cannot even be traced: the whole module stays in PyTorch."""
        user = user or libraries.first_user(sys._getframe(1))
        problem = Problem("", reason, user.f_code.co_filename if user else "", user.f_lineno if user else 0)
        self.problems.append(problem)
        raise CaptureError(problem.reason, "", problem.file, problem.line)
