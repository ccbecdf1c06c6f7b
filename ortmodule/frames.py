"""Frames of Python: whose code is this, and which module is running? And what its collector hides."""

from __future__ import annotations

import dis
import functools
import gc
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
OWN_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
_AT_START = 4096 if sys.version_info[:2] == (3, 12) else 0  # CPython 3.12 begins with some hundred frozen objects


def frozen() -> bool:
    """Has gc.freeze() taken objects out of the collector's sight?"""
    return gc.get_freeze_count() > _AT_START


def is_user_file(path: str) -> bool:
    """Neither torch's nor this package's."""
    return not path.startswith((TORCH_DIR, OWN_DIR, "<"))


def outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _catches(code: types.CodeType, handler: Iterable[dis.Instruction]) -> bool:
    """May the handler that begins here end an exception? That of an `except` and of `with contextlib.suppress`; others
    raise it again."""
    popped = False
    for s in handler:
        if popped:  # what is left behind a handler's own code raises again
            return s.opname != "RERAISE"
        if s.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"):
            return True
        if s.opname == "WITH_EXCEPT_START":
            return "suppress" in code.co_names
        if s.opname == "RERAISE":
            return False
        popped = s.opname == "POP_EXCEPT"
    return popped


def _blocks(steps: list[dis.Instruction], at: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Up to 3.10: the handlers around each step, from what sets them up and takes them away on the ways through the
    code; -1 stands for one that runs."""
    found: dict[int, tuple[int, ...]] = {}
    ways: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while ways:
        i, around = ways.pop()
        if i in found or i >= len(steps):
            continue
        found[i], s = around, steps[i]
        if s.opname in ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"):
            ways += [(at[s.argval], (*around, -1)), (i + 1, (*around, at[s.argval]))]
        elif s.opname in ("POP_BLOCK", "POP_EXCEPT"):
            ways.append((i + 1, around[:-1]))
        elif s.opname not in ("RETURN_VALUE", "RAISE_VARARGS", "RERAISE"):
            if s.opcode in dis.hasjrel or s.opcode in dis.hasjabs:
                ways.append((at[s.argval], around))
            if s.opname not in ("JUMP_FORWARD", "JUMP_ABSOLUTE"):
                ways.append((i + 1, around))
    return found


@functools.cache
def _tries(code: types.CodeType) -> tuple[tuple[int, int], ...]:
    """Bytes of the code whose exceptions it may end itself, also where a `with` or a `finally` stands between."""
    steps = list(dis.get_instructions(code))
    at = {s.offset: i for i, s in enumerate(steps)}
    if not hasattr(dis, "_parse_exception_table"):
        return tuple((steps[i].offset, steps[i].offset + 2) for i, around in sorted(_blocks(steps, at).items())
                     if any(h >= 0 and _catches(code, steps[h:]) for h in around))  # fmt: skip
    rows = dis._parse_exception_table(code)

    def ends(target: int, met: frozenset[int] = frozenset()) -> bool:
        """Here, or where the handler raises again: a table names the innermost handler of each byte alone."""
        if _catches(code, steps[at[target]:]):
            return True
        outer = {e.target for e in rows if e.start <= target < e.end} - met
        return any(ends(t, met | outer) for t in outer)

    return tuple((e.start, e.end) for e in rows if ends(e.target))


def tried(frame: types.FrameType) -> bool:
    """Does the frame stand in a `try` that may catch what it calls?"""
    return any(start <= frame.f_lasti < end for start, end in _tries(frame.f_code))


def raised_in(error: BaseException) -> list[tuple[types.FrameType, int]]:
    """Frames and lines of an exception's traceback, innermost first."""
    found: list[tuple[types.FrameType, int]] = []
    tb = error.__traceback__
    while tb is not None:
        found.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    return found[::-1]


def names_of(root: nn.Module) -> dict[int, str]:
    """The modules of a tree by the id of their __dict__: the tracer puts other objects over the same __dict__ in their
    place."""
    return {id(m.__dict__): name for name, m in root.named_modules()}


def module_at(
    frames: Iterable[types.FrameType], names: Mapping[int, str], others: dict[int, types.CodeType] | None = None
) -> str | None:
    """The first of the modules (names_of) whose method one of the frames runs. others: code that is known to be no
    method of a module, to be passed again."""
    for frame in frames:
        code = frame.f_code
        if others is not None and id(code) in others:
            continue
        owner = frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None
        if isinstance(owner, nn.Module):
            name = names.get(id(object.__getattribute__(owner, "__dict__")))
            if name is not None:
                return name
        elif others is not None:
            others[id(code)] = code
    return None
