"""Symbolic numbers (sizes, scalar arguments) as forward's code sees them: asked as Python's numbers are, they answer as
those do, and the graph then holds for what they have said."""

from __future__ import annotations

import builtins
import functools
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor

from .. import _C
from .. import torch_private as private
from ..frames import OWN_DIR, TORCH_DIR, is_user_file
from ..patches import Patch, only_here
from .not_repeatable import note_caught

_SYMPY = os.path.join(os.path.dirname(cast(str, find_spec("sympy").origin)), "")  # type: ignore[union-attr]
_NUMBER_OPS = "should_allow_numbers_as_tensors"


def _number(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of a symbolic number: asked for its value, it may have none."""

    def ask(self: Any) -> Any:
        try:
            return original(self)
        except Exception as error:
            by = sys._getframe(2)  # below: this, only_here's
            if is_user_file(by.f_code.co_filename):
                note_caught(error, by)
            raise

    return ask


_AS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _users(frame: FrameType) -> bool:
    """Is it code outside of PyTorch and what it computes sizes with? abc's is its caller's."""
    while frame.f_back is not None and frame.f_code.co_filename == "<frozen abc>":
        frame = frame.f_back
    path = frame.f_code.co_filename
    return not path.startswith((TORCH_DIR, OWN_DIR, _SYMPY, "<eval_with_key>", "<frozen "))


# that symbolic numbers lack
_OF_NUMBERS = {symbol: frozenset(name for name in vars(kind) if not name.startswith("__") and name not in vars(symbol))
               for symbol, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))}


def _class(self: Any, name: str) -> Any:
    """An attribute of a symbolic number: isinstance(size, int) holds for the user's code, as in eager."""
    if not _users(sys._getframe(1)):
        return object.__getattribute__(self, name)
    return _AS[type(self)] if name == "__class__" else getattr(_AS[type(self)](self), name)


def _text(original: Callable[..., Any]) -> Callable[..., Any]:
    """__repr__ of a symbolic number: in the user's code its value, which the graph then holds for."""

    def text(self: Any) -> str:
        return repr(_AS[type(self)](self)) if _users(sys._getframe(2)) else original(self)

    return text


def _as_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a symbolic number has no answer to, its value has one: its hash and its text in a format, to the user's
    code. The graph then holds for that value. (Einops asks for a hash to see whether it can look the rest up, and
    computes it where there is none.)"""

    def ask(self: Any, *args: Any) -> Any:
        frame = sys._getframe(2)
        if _users(frame) and f"{os.sep}einops{os.sep}" not in frame.f_code.co_filename:
            return getattr(_AS[type(self)], original.__name__)(_AS[type(self)](self), *args)
        return original(self, *args)

    return ask


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _rdivmod(self: Any, other: Any) -> Any:
    return other // self, other % self


def _divides(original: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    """A division by a symbolic number: the graph holds for others than 0, where Python raises."""

    def op(self: Any, other: Any) -> Any:
        by = self if turned else other
        if type(by) in _AS and _users(sys._getframe(2)):
            bool(by != 0)
        return original(self, other)

    return op


def _raises(original: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    """A power of symbolic numbers: 0 ** -1 raises, a negative base may give a complex number, a negative exponent a
    float. That of an integer to a symbol is an integer, and holds for one value."""

    def op(self: Any, other: Any) -> Any:
        base, exponent = (other, self) if turned else (self, other)
        if _users(sys._getframe(2)):
            if type(exponent) in _AS:
                bool(exponent >= 0)
            if type(base) in _AS and not (isinstance(exponent, int) and type(exponent) not in _AS and exponent >= 0):
                bool(base > 0)
            if type(exponent) is torch.SymInt and type(base) in (int, torch.SymInt):
                return other ** int(self) if turned else original(self, int(other))
        return original(self, other)

    return op


_SIZED = frozenset((tuple, list, dict, str, set, torch.Size))


def _length(original: Callable[..., int]) -> Callable[..., Any]:
    """len(): of a tensor, in the user's code, a size like any other. Python's own makes it a number. (Traces call it
    some 100,000 times.)"""
    me = threading.get_ident()

    @functools.wraps(original)
    def length(x: Any, /) -> Any:
        if type(x) not in _SIZED and isinstance(x, Tensor) and threading.get_ident() == me:
            if x.dim() and _users(sys._getframe(1)):
                return x.shape[0]
        return original(x)

    return length


_ARITHMETIC = [(cls, f"__{'r' if turned else ''}{name}__", make, turned)
               for cls in (torch.SymInt, torch.SymFloat)
               for turned in (False, True)
               for name, make in (("truediv", _divides), ("floordiv", _divides), ("mod", _divides), ("pow", _raises))]


_NUMBERS = ((torch.SymBool, "__bool__"), (torch.SymInt, "__bool__"), (torch.SymInt, "__int__"),
            (torch.SymInt, "__index__"), (torch.SymFloat, "__bool__"), (torch.SymFloat, "__int__"),
            (torch.SymFloat, "__float__"))


def _edited(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What takes numbers for tensors is computed by the trace where no operand is a stand-in: a constant. So would be
    an edit in place of a parameter that no module has, which then gets a stand-in, as by other operators."""

    def allow(func: Any) -> bool:
        return original(func) and not func._schema.is_mutable

    return allow


def of_numbers() -> list[Patch]:
    """What is replaced while a user's forward is traced."""
    return [
        Patch(private.numbers, _NUMBER_OPS, only_here(_edited(vars(private.numbers)[_NUMBER_OPS]),
                                                      vars(private.numbers)[_NUMBER_OPS])),
        Patch(builtins, "len", _length(len)),
        *[Patch(cls, name, only_here(_number(vars(cls)[name]), vars(cls)[name]))
          for cls, name in _NUMBERS if name in vars(cls)],
        *[Patch(cls, name, only_here(make(vars(cls)[name], turned), vars(cls)[name]))
          for cls, name, make, turned in _ARITHMETIC if name in vars(cls)],
        *[Patch(cls, "__getattribute__", _C.attributes_asked(cls, names | {"__class__"}, _class))
          for cls, names in _OF_NUMBERS.items()],
        *[Patch(cls, "__repr__", only_here(_text(cls.__repr__), cls.__repr__)) for cls in _AS],
        *[Patch(cls, name, only_here(_as_number(getattr(cls, name)), getattr(cls, name)))
          for cls in _AS for name in ("__hash__", "__format__")],
        *[Patch(cls, name, ask) for cls in (torch.SymInt, torch.SymFloat)
          for name, ask in (("__divmod__", _divmod), ("__rdivmod__", _rdivmod)) if name not in vars(cls)],
    ]  # fmt: skip
