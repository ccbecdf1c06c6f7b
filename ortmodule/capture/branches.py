"""Branches on a tensor's value: `if (x < 0).any()`, `assert`, `while`, the checks of torch.distributions.

A graph has no branches, so a capture holds for one way through forward: it returns, besides what forward returns, the
tensors that were asked for their truth, and holds for a call when they answer as they did (`Condition`). What a call
has computed is thrown away when one of them does not, and the capture for that answer computes it again; ../branches.py
sees to it that nothing else has happened by then.

asking     while forward is traced, `bool(tensor)` (and `item()` of a boolean) is answered from a list, in order. Where
           the list ends the trace is given up, and forward runs once in PyTorch, on copies, to make the list
           (`rehearse`); then it is traced again.
answers    are guesses: whatever they are, the capture asks its tensors at every call. So it does not matter that
           PyTorch has drawn other random numbers, or rounds another way.
prefix     answers that are known of a call, by a capture that has gone the other way. They stand first in the list,
           and the rehearsal is given them.

numbers    what is compared may be a number read from a tensor, or a size that depends on data (`x.sum().item() > 3`,
           `if index.size(0)`): symbols of the trace. The rehearsal tells what they are, line by line, and so what a
           comparison says; the comparison itself becomes the tensor that is asked. Numbers that forward computes
           with stay what they are: values, not conditions.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import frames
from .. import torch_private as private
from ..errors import CaptureError
from ..frames import OWN_DIR, TORCH_DIR, is_user_file, outwards
from ..patches import Patch, only_here, replaced, silent
from ..watch import quiet
from .edits import undoing
from .not_repeatable import NotRepeatable, note_caught
from .refused import SilentProcesses, refusing

_MOST = 128  # conditions of one capture
_EXPORT = os.path.join(OWN_DIR, "capture", "export.py")
_OPAQUE = os.path.join(OWN_DIR, "capture", "opaque.py")


class Condition(NamedTuple):
    """asked: file and line of the code that asks; answer: what it was told; module, file, line: of the user's."""

    asked: tuple[str, int]
    answer: bool
    module: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def other(self) -> Condition:
        return self._replace(answer=not self.answer)


Answers = tuple[Condition, ...]


class Other(Exception):
    """A condition has gone the other way than in the capture that ran. answers: those up to it, as they are."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(f"a branch on a tensor's value at {answers[-1].place} goes another way")
        self.answers = answers


class NoBranches(CaptureError):
    """Conditions cannot be asked in this capture; without them it is what it would have been."""


class Unanswered(BaseException):
    """The trace has come to a condition behind the last answer. No Exception: the user's code must not catch it."""


def place_of(frame: FrameType | None, names: dict[int, str]) -> tuple[tuple[str, int], str, str, int]:
    """Who asks; the innermost module, and file and line of the user's."""
    at = [f for f in outwards(frame) if not f.f_code.co_filename.startswith(OWN_DIR)]
    asked = (at[0].f_code.co_filename, at[0].f_lineno) if at else ("", 0)
    user = next((f for f in at if is_user_file(f.f_code.co_filename)), None)
    file, line = (user.f_code.co_filename, user.f_lineno) if user is not None else asked
    return asked, frames.module_at(outwards(frame), names) or "", file, line


class Read(NamedTuple):
    """What the rehearsal has read from a tensor at a line of the user's: a number, or a size that depends on data."""

    line: tuple[str, int]
    value: Any


class Asker:
    """Stands in the place of Tensor.__bool__. known: the answers that are certain, None where a condition is an error;
    log: what a rehearsal has found, in order."""

    def __init__(
        self, module: nn.Module, known: Sequence[Condition] | None, log: Sequence[Condition | Read] | None = None
    ) -> None:
        self._names = frames.names_of(module)
        self._known = known
        self._log = known or () if log is None else log
        self._rehearsed = log is not None
        self._begin()

    def _begin(self) -> None:
        self.conditions: list[Condition] = []
        self.values: list[Tensor] = []  # what must be true for the answer True
        self._n_known = self._n_asked = self._n_read = 0
        self._numbers: dict[Any, Any] = {}  # what symbols of the trace stood for in the rehearsal
        self._unanswered = False

    def _next_known(self, asked: tuple[str, int]) -> bool | None:
        if not self._known or self._n_known == len(self._known) or self._known[self._n_known].asked != asked:
            return None
        self._n_known += 1
        return self._known[self._n_known - 1].answer

    # --- in PyTorch

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[list[Condition | Read]]:
        """Around forward in PyTorch: gives the list of what was asked and answered."""
        found: list[Condition | Read] = []
        asking = False

        def tell(frame: FrameType, truth: Callable[[], Any], _: Tensor) -> Any:
            nonlocal asking
            asked, module, file, line = place_of(frame, self._names)
            answer = self._next_known(asked)
            if answer is None:
                asking = True
                try:
                    answer = truth()
                finally:
                    asking = False
            found.append(Condition(asked, answer, module, file, line))
            return answer

        def read(values: list[Any]) -> None:
            if not asking:
                _, _, file, line = place_of(sys._getframe(1), self._names)
                found.extend(Read((file, line), v) for v in values)

        with self._asked(tell), _Looks(read):
            yield found

    # --- in the trace

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Around the user's forward while it is traced."""
        self._begin()
        known = vars(torch.SymBool)["__bool__"]

        def truth_of(b: torch.SymBool) -> Any:
            frame = sys._getframe(1)
            if not private.free_unbacked_symbols(b) or _in_kernel(frame) or not _of_the_trace(frame):
                return known(b)
            return self._of_number(frame, b, lambda: known(b))

        numbers = [
            Patch(private.unbacked, name, only_here(self._making(vars(private.unbacked)[name]),
                                                    vars(private.unbacked)[name]))
            for name in ("create_unbacked_symint", "create_unbacked_symfloat")
        ] if private.has("unbacked") else []  # fmt: skip
        with self._asked(self._of_tensor), replaced(Patch(torch.SymBool, "__bool__", only_here(truth_of, known)),
                                                    *numbers):  # fmt: skip
            yield
        if self._unanswered:  # and somebody has caught it
            raise Unanswered

    def _asked(self, tell: Callable[[FrameType, Callable[[], Any], Tensor], Any]) -> Any:
        truth, item = Tensor.__bool__, Tensor.item

        def as_bool(t: Tensor) -> Any:
            return tell(sys._getframe(1), lambda: truth(t), t)

        def as_item(t: Tensor) -> Any:
            return tell(sys._getframe(1), lambda: item(t), t) if t.dtype is torch.bool else item(t)

        return replaced(Patch(Tensor, "__bool__", only_here(as_bool, truth)),
                        Patch(Tensor, "item", only_here(as_item, item)))  # fmt: skip

    def _of_tensor(self, frame: FrameType, truth: Callable[[], Any], t: Tensor) -> Any:
        if not _unknown(t) or not _of_the_trace(frame):
            return truth()
        self._allowed(frame)
        asked, *_ = place_of(frame, self._names)
        answer = self._next_known(asked)
        log = self._log
        at = next((i for i in range(self._n_asked, len(log)) if _is_at(log[i], asked)), None)
        if at is not None:
            self._n_asked = at + 1
            answer = cast(Condition, log[at]).answer if answer is None else answer
        return self._answer(frame, answer, lambda: t.detach() != 0)

    def _of_number(self, frame: FrameType, b: torch.SymBool, truth: Callable[[], Any]) -> Any:
        self._allowed(frame)
        asked, *_ = place_of(frame, self._names)
        answer = self._next_known(asked)
        if answer is None:
            said = b.node.expr.subs(self._numbers)
            if said in (True, False):
                answer = bool(said)
            elif self._rehearsed:
                return truth()
        number = torch.sym_ite(b, 1, 0)
        return self._answer(frame, answer, lambda: torch.scalar_tensor(number, dtype=torch.int64, device="cpu") != 0)

    def _allowed(self, frame: FrameType) -> None:
        if self._known is not None:
            return
        error = NotRepeatable("a branch on a tensor's value")
        by = next((f for f in outwards(frame) if is_user_file(f.f_code.co_filename)), None)
        if by is not None:
            note_caught(error, by)
        raise error

    def _answer(self, frame: FrameType, answer: bool | None, value: Callable[[], Tensor]) -> bool:
        asked, module, file, line = place_of(frame, self._names)
        if answer is None:
            self._unanswered = True
            raise Unanswered
        if len(self.conditions) == _MOST:
            raise NoBranches(f"more than {_MOST} branches on values of tensors in one call", module, file, line)
        self.conditions.append(Condition(asked, answer, module, file, line))
        with private.NoTorchFunction():
            self.values.append(value())
        return answer

    def _making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """A symbol for what only the data knows is made: what was it in the rehearsal?"""

        def made(env: Any, *args: Any, **kwargs: Any) -> Any:
            number = make(env, *args, **kwargs)
            _, _, file, line = place_of(sys._getframe(1), self._names)
            log = self._log
            at = next((i for i, r in enumerate(log) if i >= self._n_read and _reads(r, file, line)), None)
            if at is not None:
                self._n_read = at + 1
                self._numbers[number.node.expr] = cast(Read, log[at]).value
            return number

        return made


def _is_at(row: Condition | Read, asked: tuple[str, int]) -> bool:
    return isinstance(row, Condition) and row.asked == asked


def _reads(row: Condition | Read, file: str, line: int) -> bool:
    return isinstance(row, Read) and row.line == (file, line)


_KERNELS = tuple(os.path.join(TORCH_DIR, name) for name in ("_subclasses", "_meta_registrations", "_refs", "_prims",
                                                            "_decomp", "fx"))  # fmt: skip


def _in_kernel(frame: FrameType) -> bool:
    """Is it PyTorch that asks about sizes, to know those of a result?"""
    at = next((f for f in outwards(frame) if not f.f_code.co_filename.startswith(OWN_DIR)), None)
    return at is not None and at.f_code.co_filename.startswith(_KERNELS)


def _unknown(t: Tensor) -> bool:
    """Is it one element, whose value the trace does not know?"""
    return (
        isinstance(t, private.FakeTensor)
        and getattr(t, "constant", None) is None
        and all(type(d) is int and d == 1 for d in t.shape)
    )


def _of_the_trace(frame: FrameType) -> bool:
    """Does forward itself ask, not what stays in PyTorch (a custom Function), of whose code the trace sees nothing?"""
    for f in outwards(frame):
        if f.f_code.co_filename == _OPAQUE:
            return False
        if f.f_code.co_filename == _EXPORT and f.f_code.co_name == "forward":
            return True
    return False


def asking(
    rebuild: Callable[[list[Tensor]], Any], n_outputs: int, conditions: Answers
) -> Callable[[list[Tensor]], Any]:
    """rebuild, for outputs behind which the conditions stand. Raises Other."""
    if not conditions:
        return rebuild

    def asked(tensors: list[Tensor]) -> Any:
        for i, condition in enumerate(conditions):
            if bool(tensors[n_outputs + i]) is not condition.answer:
                raise Other((*conditions[:i], condition.other()))
        return rebuild(tensors[:n_outputs])

    return asked


# --- once in PyTorch ------------------------------------------------------------------------------


def _sizes_of(func: Any, args: Any, out: Any) -> list[Any]:
    """Numbers and sizes that only the data knows, of one operation."""
    name = func.overloadpacket.__name__
    if name == "_local_scalar_dense":
        return [out]
    if name in ("nonzero", "masked_select", "repeat_interleave"):
        return [out.shape[0]]
    if name == "index":
        masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
        return [int(t.detach().count_nonzero()) for t in masks]
    return [out[0].shape[0]] if name.startswith(("unique", "_unique")) else []


class _Looks(private.DispatchMode):  # type: ignore[misc, name-defined]
    """Tells what is read from tensors."""

    def __init__(self, tell: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = _sizes_of(func, args, out)
        if read:
            self._tell(read)
        return out


def rehearse(module: nn.Module, run: Callable[[], Any], answers: Sequence[Condition]) -> list[Condition | Read]:
    """Runs forward in PyTorch and notes what it asks of values. Of what it changes nothing remains."""
    with undoing(module) as undo:
        with (
            quiet(),
            silent(),
            refusing(is_user_file),
            replaced(Patch(private.compiler, "_is_compiling_flag", True),
                     Patch(private.compiler, "_is_exporting_flag", True)),
            Asker(module, answers).rehearsing() as found,
            undo,
            SilentProcesses(),
        ):  # fmt: skip
            run()
    return found
