"""Frames of Python: whose code is this, and which module is running?"""

from __future__ import annotations

import dis
import functools
import os
import types
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
OWN_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep


def is_user_file(path: str) -> bool:
    """Neither torch's nor this package's."""
    return not path.startswith((TORCH_DIR, OWN_DIR, "<"))


def outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def _tries(code: types.CodeType) -> tuple[tuple[int, int], ...]:
    """Bytes of the code whose exceptions it may end itself: bodies of `try` with an `except`, and of
    `with contextlib.suppress`."""
    steps = list(dis.get_instructions(code))
    at = {s.offset: i for i, s in enumerate(steps)}
    if hasattr(dis, "_parse_exception_table"):
        rows = [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]
    else:  # up to 3.10 blocks are instructions
        rows = [(s.offset, s.argval, s.argval) for s in steps if s.opname in ("SETUP_FINALLY", "SETUP_WITH")]
    found: list[tuple[int, int]] = []
    for start, end, target in rows:
        for s in steps[at[target]:]:
            if s.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH", "POP_EXCEPT") or (
                    s.opname == "WITH_EXCEPT_START" and "suppress" in code.co_names):
                found.append((start, end))
            elif s.opname not in ("RERAISE", "WITH_EXCEPT_START"):
                continue
            break
    # what is left behind a handler is such a row, too: no code of the user's runs there
    return tuple(dict.fromkeys(found))


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
