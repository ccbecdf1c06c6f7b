"""What a code object names, from its bytecode: the globals and closure variables that it can read, with the
attributes it asks them for, and what it compares by identity. Known once for a code object; the code is never run.
"""

from __future__ import annotations

import builtins
import dis
import opcode
import sys
import types
from typing import Any, NamedTuple

from torch import nn

from .. import patches
from ..libraries import of_program

UNKNOWN: Any = object()  # an operand that cannot be told


class Code(NamedTuple):
    """What a code object names. chains: which attributes are asked for after which global or closure variable."""

    names: frozenset[str]
    globals: tuple[str, ...]
    chains: dict[str, set[tuple[str, ...]]]
    bare: frozenset[str]  # globals used without an attribute
    stored: tuple[str, ...]  # globals assigned
    imports: tuple[str, ...]
    compared: tuple[tuple[str, Any], ...]  # _compared
    typed: tuple[Any, ...]  # operands (_compared) of which it asks the type()
    puts: frozenset[str]  # attributes that it assigns to, or deletes from, whatever


_codes: dict[int, tuple[types.CodeType, Code]] = {}
_NAME = {name: opcode.opmap[name] for name in opcode.opmap}
_LOADS_GLOBAL = {_NAME.get("LOAD_GLOBAL"), _NAME.get("LOAD_NAME"), _NAME.get("LOAD_FROM_DICT_OR_GLOBALS")}
_LOADS_ATTR = {_NAME.get("LOAD_ATTR"), _NAME.get("LOAD_METHOD")}
_STORES_GLOBAL = {_NAME.get("STORE_GLOBAL"), _NAME.get("DELETE_GLOBAL")}
_STORES_ATTR = {_NAME.get("STORE_ATTR"), _NAME.get("DELETE_ATTR")}
_COPIES = {(_NAME.get("COPY"), 1), (_NAME.get("DUP_TOP"), 0)}  # of the topmost: `x.n += 1` loads x once
_LOADS_FREE = {_NAME.get("LOAD_DEREF"), _NAME.get("LOAD_CLASSDEREF")}
_PREFIXES = {_NAME.get(n) for n in ("EXTENDED_ARG", "CACHE", "PUSH_NULL", "NOP", "PRECALL")}


def analyse(code: types.CodeType) -> Code:
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    names = code.co_names
    cells = [*code.co_cellvars, *code.co_freevars]
    local = [*code.co_varnames, *[c for c in code.co_cellvars if c not in code.co_varnames], *code.co_freevars]
    slots = local if sys.version_info >= (3, 11) else cells
    found: dict[str, None] = {}
    stored: dict[str, None] = {}
    imports: dict[str, None] = {}
    chains: dict[str, set[tuple[str, ...]]] = {}
    bare: set[str] = set()
    puts: set[str] = set()
    root, path = "", ()  # type: str, tuple[str, ...]

    def end() -> None:
        if root and path:
            chains.setdefault(root, set()).add(path)
        elif root:
            bare.add(root)

    rows = dis._unpack_opargs(code.co_code)  # type: ignore[attr-defined]
    for _, op, arg in ((row[0], row[-2], row[-1]) for row in rows):
        if op in _PREFIXES or (op, arg) in _COPIES:
            continue
        if op in _LOADS_GLOBAL:
            end()
            root, path = names[arg >> 1 if op == _NAME["LOAD_GLOBAL"] and sys.version_info >= (3, 11) else arg], ()
            found[root] = None
        elif op in _LOADS_FREE:
            end()
            root, path = slots[arg], ()
        elif op in _LOADS_ATTR:
            name = names[arg >> 1 if op == _NAME["LOAD_ATTR"] and sys.version_info >= (3, 12) else arg]
            path = (*path, name)
        else:
            end()
            root, path = "", ()
            if op in _STORES_GLOBAL:
                stored[names[arg]] = None
            elif op in _STORES_ATTR:
                puts.add(names[arg])
            elif op == _NAME["IMPORT_NAME"]:
                imports[names[arg]] = None
    end()
    if {"setattr", "delattr"}.intersection(names):  # by whichever of its words
        puts.update(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
    if of_program(code.co_filename) and {"modules", "import_module", "__import__"}.intersection(names):  # by name
        imports.update((x, None) for x in code.co_consts if isinstance(x, str) and x.replace(".", "_").isidentifier())
    made = Code(frozenset(names), tuple(found), chains, frozenset(bare), tuple(stored), tuple(imports),
                 _compared(code), _typed(code), frozenset(puts))  # fmt: skip
    _codes[id(code)] = code, made
    return made


_LOADS_ONE = {"LOAD_CONST": "constant", "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_FAST": "local",
              "LOAD_FAST_CHECK": "local", "LOAD_FAST_BORROW": "local", "LOAD_DEREF": "free"}  # fmt: skip
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ENDS = ("STORE_", "RETURN_", "YIELD_", "RERAISE", "POP_TOP")
_COMPARES = {"IS_OP": ("is",), "COMPARE_OP": ("==", "!=")}


def _compared(code: types.CodeType) -> tuple[tuple[str, Any], ...]:
    """The operands of every `is`, and of == where one of them may be a class. An operand is (kind, name, attributes)
    when it is loaded as such, None when it is computed. Comparisons with constants (None) do not count. An argument
    that the code never assigns is of a kind of its own."""
    if not {_NAME["IS_OP"], _NAME["COMPARE_OP"]} & set(code.co_code[::2]):
        return ()
    found: list[tuple[str, Any]] = []
    stack: list[Any] = []
    arguments = _arguments(code)
    for i in _instructions(code):
        kind = _LOADS_ONE.get(i.opname)
        if kind is not None:
            kind = "argument" if kind == "local" and i.argval in arguments else kind
            stack.append((kind, i.argval, ()))
        elif i.opname in ("LOAD_ATTR", "LOAD_METHOD") and stack and stack[-1] is not None:
            stack[-1] = (*stack[-1][:2], (*stack[-1][2], i.argval))
        elif i.opname in _COMPARES:
            left, right = ([None, None] + stack)[-2:]
            pair = left, right
            if all(x is None or x[0] != "constant" for x in pair) and (
                i.opname == "IS_OP" or any(x is not None and x[0] in ("global", "free") for x in pair)
            ):
                found.append((i.opname, pair))
            stack = [None]
        else:
            stack = [None]
    return tuple(found)


def _typed(code: types.CodeType) -> tuple[Any, ...]:
    """The operands of every type(x), as _compared tells operands; of a kind of its own where it is computed from a
    size. The text of an error does not count."""
    if "type" not in code.co_names:
        return ()
    found: list[Any] = []
    arguments = _arguments(code)
    at: Any = UNKNOWN  # of a type( that is open; None: computed
    sized = False
    instructions = _instructions(code)
    for n, i in enumerate(instructions):
        kind = _LOADS_ONE.get(i.opname)
        sized = sized or i.argval in ("shape", "size", "numel", "len")
        if kind == "global" and i.argval == "type":
            at, sized = (UNKNOWN, "", ()), False
        elif at is UNKNOWN:
            continue
        elif i.opname in ("CALL", "CALL_FUNCTION"):
            if i.arg == 1 and not _told(instructions[n + 1 :]):
                computed = at is None or at[0] is UNKNOWN
                found.append(("size", "", ()) if computed and sized else None if computed else at)
            at = UNKNOWN
        elif kind is not None and at is not None and at[0] is UNKNOWN:
            at = "argument" if kind == "local" and i.argval in arguments else kind, i.argval, ()
        elif i.opname in ("LOAD_ATTR", "LOAD_METHOD") and at is not None and at[0] is not UNKNOWN:
            at = (*at[:2], (*at[2], i.argval))
        else:
            at = None
    return tuple(found)


def _told(rest: list[dis.Instruction]) -> bool:
    """Does what is on the stack become part of a text, with which a `raise` ends, whatever comes?"""
    while rest and rest[0].opname == "LOAD_ATTR" and rest[0].argval in ("__name__", "__qualname__", "__module__"):
        rest = rest[1:]
    if not rest or not rest[0].opname.startswith(("FORMAT_", "CONVERT_VALUE")):
        return False
    for i in rest:
        if i.opname == "RAISE_VARARGS":
            return True
        if i.opcode in _JUMPS or i.opname.startswith(_ENDS):
            return False
    return False


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opcode not in _PREFIXES]


def _arguments(code: types.CodeType) -> set[str]:
    """Those that the code never assigns."""
    arguments = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    for i in dis.get_instructions(code):
        if "STORE_FAST" in i.opname or "DELETE_FAST" in i.opname:
            arguments.difference_update(i.argval if isinstance(i.argval, tuple) else (i.argval,))
    return arguments


def operand(frame: types.FrameType, x: Any) -> Any:
    """What an operand (_compared) is when code is entered, as far as that can be told without running anything."""
    if x is None:
        return UNKNOWN
    kind, name, path = x
    if kind == "global":
        at = frame.f_globals.get(name, vars(builtins).get(name, UNKNOWN))
    else:
        at = frame.f_locals.get(name, UNKNOWN)
        if kind != "free" and not isinstance(at, nn.Module):  # it may be assigned
            return UNKNOWN
    for attribute in path:
        if isinstance(at, (types.ModuleType, type)):
            at = vars(at).get(attribute, UNKNOWN)
        elif isinstance(at, nn.Module):
            at = object.__getattribute__(at, "__dict__").get(attribute, UNKNOWN)
        else:
            return UNKNOWN
    return at


def stores_free(code: types.CodeType) -> set[str]:
    """Closure variables that the code assigns."""
    return {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars
    }


def at(code: types.CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def cell(c: Any) -> Any:
    try:
        return c.cell_contents
    except ValueError:
        return patches.ABSENT
