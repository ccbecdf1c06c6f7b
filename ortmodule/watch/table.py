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
from ..patches import ABSENT

# kinds of rows, see csrc/python/guard.c
(ITEM, NO_ITEM, ATTRIBUTE, MAPPED, UNMAPPED, LIST, DICT, SEQUENCE, MEMORY, CALL, FUNCTIONS, CLASS, OWN,
 NO_ATTRIBUTE) = range(14)  # fmt: skip

_CONTENTS = (LIST, DICT, SEQUENCE)
_MUTABLE = (list, dict, set)
_EQUALS = (*_MUTABLE, tuple, frozenset)  # that count as the same where forward cannot tell: these classes, no others
_DEPTH = 8


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


class Asked:
    """An object whose class reads its attributes by itself (a __getattribute__), so that all of its dictionary may
    count: what it gave for the names that code has asked for. whole: code has come to the dictionary otherwise, or was
    given two things for one name."""

    __slots__ = ("gave", "obj", "own", "whole")

    def __init__(self, obj: Any, own: dict[str, Any]) -> None:
        self.obj = obj
        self.own = own
        self.gave: dict[str, Any] = {}
        self.whole = False

    def note(self, name: str, value: Any) -> None:
        was = self.gave.setdefault(name, value)
        self.whole = self.whole or not _same(value, was) and not _looks_like(value, was)

    def given(self) -> list[tuple[Any, Any]]:
        """(what it gives now, what it gave). For what it makes anew at every read, and that looks the same, twice what
        it gave: nothing can tell one from the other."""
        found = []
        for name, was in self.gave.items():
            now = self._now(name)
            made = not _same(now, was) and _looks_like(now, was) and self._now(name) is not now
            found.append((was if made else now, was))
        return found

    def _now(self, name: str) -> Any:
        get: Any = type(self.obj).__getattribute__
        try:
            return get(self.obj, name)
        except AttributeError:
            return ABSENT


def _same(now: Any, was: Any) -> bool:
    """As the rows mean it; a method is made anew at every read."""
    if type(now) is types.MethodType is type(was):
        return now.__self__ is was.__self__ and now.__func__ is was.__func__
    return _C.guard_check((LIST, [now], None, (was,))) < 0


class _Plain:
    pass


def _looks_like(now: Any, was: Any) -> bool:
    """Objects of one class that have the same attributes, and nothing else."""
    own, before = contents.attributes(now), contents.attributes(was)
    if type(now) is not type(was) or own is None or before is None or contents.container(now):
        return False
    if type(now).__basicsize__ != _Plain.__basicsize__ or type(now).__itemsize__:  # slots, or what lies in C
        return False
    a, b = contents.flat(own), contents.flat(before)
    return len(a) == len(b) and all(map(_same, a, b))


class Held:
    """The Python state that captures hold for: rows for _C.guard_check and what to call them.

    table: what is asked at every step. At first those are the rows as captures have made them (`_rows`). When one does
    not hold any more, and what is there now is nothing that forward could tell from what was (`follow`), the table is
    of what is there now, and costs what it did."""

    def __init__(self) -> None:
        self.table: tuple[Any, ...] = ()
        self.names: list[str] = []
        self._rows: list[tuple[Any, ...]] = []
        self._known: set[tuple[Any, ...]] = set()
        self._classes: set[type] = set()
        self._asked: dict[int, Asked] = {}  # by the object's dictionary
        self._equals = True  # no capture's forward may tell a container from an equal one
        self._shared: dict[int, Any] = {}  # containers that stood at several places

    def add(
        self,
        rows: dict[tuple[Any, ...], tuple[tuple[Any, ...], str]],
        classes: Collection[type],
        asked: Iterable[Asked],
        equals: bool,
        shared: Collection[Any],
    ) -> None:
        """The rows of one more capture. classes: whose dictionaries are among them; when a class goes, Python empties
        its dictionary, whoever holds it. asked, equals, shared: what `follow` may take for the same."""
        self._classes.update(classes)
        self._equals = self._equals and equals
        self._shared.update((id(v), v) for v in shared)
        given = {id(of.own): of for of in asked}
        for which, of in given.items():
            known = self._asked.setdefault(which, of)
            known.whole = known.whole or of.whole or known is of and (DICT, which, None) in self._known
            for name, value in of.gave.items():
                known.note(name, value)
        for which, known in self._asked.items():
            known.whole = known.whole or (DICT, which, None) in rows and which not in given
        new = [(row, name) for key, (row, name) in rows.items() if key not in self._known]
        self._known.update(rows)
        self.names += [name for _, name in new]
        self._rows += [row for row, _ in new]
        self.table += tuple(x for row, _ in new for x in row)

    def hold(self) -> bool:
        return _C.guard_check(self.table) < 0

    def apart(self, others: Iterable[tuple[Any, Any]]) -> bool:
        """Where equal containers stand in the place of others (what is there, what was), and all rows hold: are they as
        many as those were?"""
        stands = [*others]
        if all(now is was for now, was in stands):
            return True
        inside = [(row[1], row[3]) for row in self._rows if row[0] in _CONTENTS]
        rest = [(row[3], row[3]) for row in self._rows if row[0] not in _CONTENTS]
        return self._one_to_one([*stands, *rest], inside)

    def follow(self, others: Iterable[tuple[Any, Any]]) -> bool:
        """Does what is there now differ from what was in nothing that forward could tell? That is: in which of equal
        containers it is, and in attributes that it has not asked an object for. Then the rows are of what is there now.
        others: containers that forward has come to otherwise: (what is there, what was)."""
        if not self._equals and not self._asked:
            return False
        rows: list[Any] = []
        pairs = [*others]
        inside: list[tuple[Any, Any]] = []  # containers whose contents are what they were, and those
        watched = {id(row[1]) for row in self._rows}
        for row in self._rows:
            now: Any = row[3]
            asked = self._asked.get(id(row[1])) if row[0] == DICT else None
            try:
                if asked is not None and not asked.whole:
                    given = [*asked.given(), *_behind(asked, row[3], watched)]
                    now = contents.flat(row[1])
                else:
                    now = now if _C.guard_check(row) < 0 else _there(row)
                    given = [(now, row[3])]
                if not all(self._alike(now, was, watched) for now, was in given):
                    return False
            except Exception:  # of the user's code
                return False
            if row[0] in _CONTENTS and now is row[3]:
                inside.append((row[1], now))
            else:
                pairs += given
            rows += (*row[:3], now)
        if not self._one_to_one(pairs, inside):
            return False
        table = (*rows, *self.also(pairs))
        if _C.guard_check(table) >= 0:
            return False
        self.table = table
        return True

    def _one_to_one(self, pairs: Iterable[tuple[Any, Any]], inside: Iterable[tuple[Any, Any]]) -> bool:
        """Is what was one list one now, and what were two, two? pairs: (what is there, what was), alike. inside:
        containers with what is in them, as it was; where another stands in the place of one, that is no matter any
        more. Of what stood at several places that cannot be told: forward may put it where it is already, which changes
        nothing until another stands at one of them."""
        new: dict[int, Any] = {}
        old: dict[int, Any] = {}

        def joins(todo: list[tuple[Any, Any]]) -> bool:
            while todo:
                now, was = todo.pop()
                if type(now) in _MUTABLE and (
                    new.setdefault(id(was), now) is not now
                    or old.setdefault(id(now), was) is not was
                    or now is not was and id(was) in self._shared
                ):
                    return False
                if now is not was and type(now) in _MUTABLE or type(now) is tuple:
                    todo += zip(contents.copy(now), contents.copy(was), strict=False)
            return True

        return joins([*pairs]) and joins([(v, v) for holder, v in inside if new.get(id(holder), holder) is holder])

    def _alike(self, now: Any, was: Any, watched: set[int], depth: int = 0) -> bool:
        """The same, or equal containers of what is. Of a container that can be edited it must be known what it was."""
        if now is was or _same(now, was):
            return True
        kind = type(now)
        if not self._equals or kind is not type(was) or kind not in _EQUALS or depth == _DEPTH:
            return False
        if kind in _MUTABLE and id(was) not in watched:
            return False
        inside, before = contents.copy(now), contents.copy(was)
        return len(inside) == len(before) and all(
            self._alike(a, b, watched, depth + 1) for a, b in zip(inside, before, strict=True)
        )

    def also(self, stands: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
        """More rows, for containers that stand where equal ones were: (what is there, what was)."""
        todo = [(now, was) for now, was in stands if now is not was]
        if not todo:
            return ()
        rows: dict[int, tuple[Any, ...]] = {}
        known = {id(row[1]): row[0] for row in self._rows if row[0] in _CONTENTS}
        while todo:
            now, was = todo.pop()
            if type(now) is not type(was) or now is was:
                continue
            inside: Iterable[Any]
            before: Iterable[Any]
            if isinstance(now, dict):
                inside, before, held = now.values(), was.values(), contents.flat(now)
            elif isinstance(now, (list, tuple, set)):
                inside, before, held = now, was, tuple(now)
            else:
                continue
            if id(was) in known:
                rows[id(now)] = known[id(was)], now, None, held
            todo += zip(inside, before, strict=False)
        return tuple(x for row in rows.values() for x in row)

    def changed(self) -> list[str]:
        """Names of what is no longer as it was."""
        return list(
            dict.fromkeys(
                name for i, name in enumerate(self.names) if _C.guard_check(self.table[4 * i : 4 * i + 4]) >= 0
            )
        )


def _behind(asked: Asked, flat: tuple[Any, ...], watched: set[int]) -> list[tuple[Any, Any]]:
    """(what is there now, what was) of entries of its dictionary that code has not asked for by name, and whose
    contents or attributes are watched: the object's class may have read them."""
    was = dict(zip(flat[::2], flat[1::2], strict=True))
    seen = ((asked.own.get(name, ABSENT), v) for name, v in was.items() if name not in asked.gave)
    if any(name not in was and any(name in vars(cls) for cls in type(asked.obj).__mro__) for name in asked.own):
        return [(ABSENT, None)]  # it hides an attribute of the class
    return [(now, v) for now, v in seen if now is not v and (id(v) in watched or id(contents.attributes(v)) in watched)]


def _there(row: tuple[Any, ...]) -> Any:
    """What stands now where the row's value was; ABSENT: nothing, or the row says something else than what stands
    somewhere."""
    kind, holder, key, _ = row
    if kind == ITEM:
        return dict.get(holder, key, ABSENT)
    if kind == ATTRIBUTE:
        return getattr(holder, key, ABSENT)
    return tuple(holder) if kind == LIST else contents.flat(holder) if kind == DICT else ABSENT


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
