"""The net below the guards: the Python part of forward is run again from time to time, and compared with what it did at
the capture.

watch/ notes what forward reads; what it cannot see (a file, a database, a counter in C) would leave a capture that is
out of date. So right after a capture, and again at its 2nd, 10th, 100th, 1000th... call, forward runs on stand-ins:
tensors of the meta device, which have sizes and no values, cost no arithmetic and say that they are on the CPU. A
TorchFunctionMode sees every call of torch that the code makes, puts stand-ins in the place of real tensors (parameters
and buffers are neither read nor written), and notes the function, its arguments, which tensors they are (parameters and
buffers by name, others by number), grad mode and autocast. Two runs that note the same would have been captured as the
same graph. The sizes and numbers are those of the capture's call, so nothing of a later call is asked for. As long as
the notes are the same, a call is answered with what it returned the first time, which is most of what makes this cheap.

It leaves no trace: attributes, containers, random states, caches and output are as for a capture. Submodules kept in
PyTorch and custom autograd.Functions are not entered again: they run at every step. A forward that cannot run on
stand-ins (it asks for values) has no net.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import autocast, frames
from . import torch_private as private
from .capture import capture_error, flatten_inputs, opaque
from .capture.refused import refusing
from .capture.skeleton import Unreadable, input_skeleton
from .capture.tracing import keep_attributes, keep_random_state, patched_torch, without_warnings
from .frames import is_user_file
from .patches import Patch, replaced, silent
from .quiet import no_hooks

FIRST = 2  # call of a capture that is compared first; then the 10th, 100th, ...
_LONG = 20_000  # calls of torch in one forward, beyond which nothing is compared
_META = torch.device("meta")
_PLAIN = frozenset(
    (
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        type(None),
        type(...),
        slice,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    )
)
_AGAIN = object()
_grad = torch.is_grad_enabled


def _answers() -> dict[Any, Any]:
    """What stand-ins do not tell as it is."""
    device: dict[str, Any] = {"device": torch.device("cpu"), "is_cpu": True, "is_meta": False}
    return {getattr(Tensor, name).__get__: value for name, value in device.items()}


_ANSWERS = _answers()


class Difference(NamedTuple):
    """Forward no longer does what it did. Module, file and line: where."""

    reason: str
    module: str = ""
    file: str = ""
    line: int = 0


def after(calls: int) -> int:
    """The call to compare after this one."""
    return 10 if calls < 10 else 10 * calls


def cast(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: Collection[str],
    kept: dict[str, list[Any]],
    caches: list[Any],
    stored: Collection[tuple[str, str]],
) -> tuple[Net | None, str]:
    """A net for a capture that was just made; or None, and why. kept: what submodules kept in PyTorch have returned, on
    the meta device. stored: attributes of modules to which forward assigns tensors."""
    if any(k not in kept for k in keep):
        return None, "sizes of what modules kept in PyTorch return are not known"
    try:
        net = Net(module, args, kwargs, keep, kept, caches, stored)
    except Exception as error:
        return (
            None,
            f"forward cannot run on tensors without values ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]})",
        )
    return (net, "") if len(net.notes) <= _LONG else (None, f"forward makes more than {_LONG} calls of torch")


class Net:
    """What forward did at a capture."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: Collection[str],
        kept: dict[str, list[Any]],
        caches: list[Any],
        stored: Collection[tuple[str, str]],
    ) -> None:
        self._fill, flat = input_skeleton(args, kwargs)
        self._scalars = list(flat.scalars)
        self._keep = sorted(keep)
        self._kept = kept
        self._caches = caches
        self.stored = list(stored)
        self._n_modes = private.function_modes()
        self.results: list[tuple[list[Tensor], Any, list[int]]] = []  # of custom Functions
        self.notes: list[tuple[Any, ...]] = []
        self.returned: list[Any] = []  # by each call; _AGAIN: to be called again
        self.counts: list[int] = []  # of numbered tensors, after each call
        self.asked: dict[tuple[int, str, str], bool] = {}  # before which call, what, of which tensor
        self.words: dict[int, str] = {}  # what the tensors among `returned` are called
        self.inputs = [_stand_in(t) for t in flat.tensors]
        self.stand_ins: dict[str, Tensor] = {}  # by what the real ones are called
        first = _Noting(module, self, False)
        self._run(module, first)
        self.words = first.last_words()

    def check(self, module: nn.Module) -> Difference | None:
        """Runs forward again; the first difference."""
        if private.function_modes() != self._n_modes:  # the caller's own, which may change what is called
            return None
        again = _Noting(module, self, True)
        try:
            self._run(module, again)
        except Exception as raised:
            if again.difference is None:
                e = capture_error(module, raised)
                again.difference = Difference(f"it stops: {e.reason}", e.module, e.file, e.line)
        if again.difference is None and again.n < len(self.notes):
            again.difference = Difference(f"it ends before call {again.n} of torch, {_text(self.notes[again.n])}")
        return again.difference

    def _run(self, module: nn.Module, noting: _Noting) -> None:
        misses = [c.cache_info().misses for c in self._caches]
        autocast_cache = torch.is_autocast_cache_enabled()
        try:
            with (
                opaque.table() as table,
                without_warnings(),
                keep_random_state(),
                silent(),
                keep_attributes(module),
                opaque.keep_functions(),
                opaque.keep_modules(module, self._keep),
                patched_torch(),
                no_hooks(),
            ):
                table.recorded, table.instead = self._kept, noting.left_out
                args, kwargs = self._fill([*self.inputs, *self._scalars])
                buffers = [(name, m, dict(m._buffers)) for name, m in module.named_modules()]
                torch.set_autocast_cache_enabled(False)  # it would keep stand-ins of weights
                with (
                    noting,
                    refusing(is_user_file),
                    replaced(Patch(private.compiler, "_is_compiling_flag", True),
                             Patch(private.compiler, "_is_exporting_flag", True)),
                ):  # fmt: skip
                    out = module(*args, **kwargs)
                noting.end(
                    out,
                    [
                        (f"{name}.{k}", m._buffers.get(k))
                        for name, m, old in buffers
                        for k in {**old, **m._buffers}
                        if m._buffers.get(k) is not old.get(k)
                    ]
                    + [
                        (f"{where}.{k}", t)
                        for where, k in self.stored
                        if isinstance(t := module.get_submodule(where).__dict__.get(k), Tensor)
                    ],
                )
        finally:
            torch.set_autocast_cache_enabled(autocast_cache)
            for c, n in zip(self._caches, misses, strict=True):
                if c.cache_info().misses != n:
                    c.cache_clear()


class _Noting(TorchFunctionMode):
    """The mode of one run. again: it is compared with the notes of the net; else it makes them."""

    def __init__(self, module: nn.Module, net: Net, again: bool) -> None:
        super().__init__()
        self._net = net
        self._makers = frozenset(private.makers())
        self._again = again
        self.n = 0  # notes
        self._count = len(net.inputs)  # of numbered tensors: the arguments, then in the order in which they are met
        self.difference: Difference | None = None
        self._modules = frames.names_of(module)
        self._words: dict[int, str] = {}  # by id: what a tensor is called
        self._alive: list[Tensor] = []
        self._paused = False
        self._n_left_out = 0
        self._words.update(net.words)
        self._words.update((id(t), f"%{i}") for i, t in enumerate(net.inputs))
        for name, m in module.named_modules():
            for held in (m.__dict__, m._buffers, m._parameters):
                self._words.update((id(t), f"{name}.{k}".lstrip(".")) for k, t in held.items()
                                   if isinstance(t, Tensor) and (name, k) not in net.stored)  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        words: list[Any] = []
        args = [self._given(x, words) for x in args]
        given: dict[str, Any] = {}
        for k, x in (kwargs or {}).items():
            words.append(k)
            given[k] = self._given(x, words)
        name = func.__name__
        if func in self._makers or given.get("device") is not None:
            given["device"] = _META
        elif func is Tensor.to or func is Tensor.cpu:
            args = [_META if isinstance(x, str) else x for x in args]
            func = Tensor.to if func is Tensor.to else _itself
        if self._paused:
            return func(*args, **given)
        if name == "__get__":
            out = func(*args)
            if isinstance(out, Tensor):
                self._note(f".{func.__self__.__name__}", words)
                self._numbered(out)
            return self._as_then(func.__self__.__name__, str(words[0]), out) if type(out) is bool else out
        at = self.n
        self._note(name, words)
        net = self._net
        if self._again and self.difference is None and net.returned[at] is not _AGAIN:
            self._count = net.counts[at]
            out = net.returned[at]
            return list(out) if type(out) is list else out
        out = func(*args, **given)
        self._numbered(out)
        if not self._again:
            lasting = func is Tensor.__setitem__ or _lasting(out)  # which writes to stand-ins alone, and has done so
            net.returned[at] = out if private.transforms() is None and lasting else _AGAIN
            net.counts[at] = self._count
        return out

    def _as_then(self, name: str, word: str, answer: bool) -> bool:
        """What a tensor says of itself (requires_grad). In a run that is compared, tensors are those of the first, as
        edits in place have left them in the end."""
        if not self._again:
            self._net.asked[self.n, name, word] = answer
        return self._net.asked.get((self.n, name, word), answer)

    def _given(self, x: Any, words: list[Any]) -> Any:
        """An argument as forward is to see it, and as it is noted."""
        if isinstance(x, Tensor):
            words.append(self._word(x))
            return x if x.is_meta else self._stand_in(x)
        t = type(x)
        if t in _PLAIN:
            words.append(repr(x))
            return _META if t is torch.device else x
        if t is list or t is tuple:
            inner: list[Any] = []
            made = [self._given(y, inner) for y in x]
            words.append((t.__name__, *inner))
            return made if t is list else tuple(made)
        if t is dict:
            inner = []
            values = {k: self._given(y, inner) for k, y in x.items()}
            words.append((*map(repr, x), *inner))
            return values
        where = t.__module__
        if where == "numpy":
            words.append((t.__name__, str(x.dtype), x.shape, x.tobytes()) if hasattr(x, "tobytes") else repr(x))
        else:
            words.append(getattr(x, "__qualname__", t.__qualname__))
        return x

    def _word(self, t: Tensor) -> str:
        word = self._words.get(id(t))
        if word is None:
            word = self._words[id(t)] = f"%{self._count}"
            self._count += 1
            self._alive.append(t)
        return word

    def _stand_in(self, t: Tensor) -> Tensor:
        word = self._words[id(t)]
        made = self._net.stand_ins.get(word)
        if made is None or made.shape != t.shape or made.dtype != t.dtype or made.requires_grad != t.requires_grad:
            made = self._net.stand_ins[word] = _stand_in(t)
        self._words[id(made)] = word
        return made

    def _numbered(self, out: Any) -> None:
        if isinstance(out, Tensor):
            self._word(out)
        elif isinstance(out, (tuple, list)):
            for x in out:
                self._numbered(x)

    def _note(self, name: str, words: list[Any]) -> None:
        if self._paused:
            return
        note = (name, _grad(), autocast.now() != autocast.OFF, *words)
        known = self._net.notes
        if not self._again:
            known.append(note)
            self._net.returned.append(_AGAIN)
            self._net.counts.append(self._count)
        elif self.difference is None and (self.n >= len(known) or known[self.n] != note):
            was = _text(known[self.n]) if self.n < len(known) else "the end"
            self.difference = Difference(f"call {self.n} of torch was {was} and is {_text(note)}", *self._place())
        self.n += 1

    def _place(self) -> tuple[str, str, int]:
        """The innermost module, and the innermost line of the user's."""
        at = list(frames.outwards(sys._getframe(2)))
        user = next((f for f in at if is_user_file(f.f_code.co_filename)), None)
        where = (user.f_code.co_filename, user.f_lineno) if user is not None else ("", 0)
        return frames.module_at(at, self._modules) or "", *where

    def left_out(self, row: opaque.Row, tensors: list[Tensor], fill: Any) -> Any:
        """A custom Function, or a submodule kept in PyTorch: its results are those of the first time, or of the
        capture."""
        with private.NoTorchFunction():
            words: list[Any] = []
            given = [self._given(t, words) for t in tensors]
            self._given(fill([None] * len(tensors)), words)
            self._note(row.name, words)
        self._paused, count = True, self._count
        try:
            if row.kind == "module" or not self._again:
                outs = row.meta(given)
                if row.kind != "module":
                    self._net.results.append((outs, row.rebuild, row.silent))
            else:
                outs, row.rebuild, row.silent = self._net.results[self._n_left_out]
            self._n_left_out += row.kind != "module"
            assert row.rebuild is not None
            with private.NoTorchFunction():
                fresh = [opaque.like(t) for t in outs]
            self._alive += fresh
            self._words.update((id(t), f"{row.name} {self.n} {i}") for i, t in enumerate(fresh))
            return row.rebuild(fresh)
        finally:
            self._paused, self._count = False, count  # what is met in here only the first time has no number

    def last_words(self) -> dict[int, str]:
        """Of the tensors that the net keeps."""
        kept: list[Tensor] = []

        def gather(x: Any) -> None:
            if isinstance(x, Tensor):
                kept.append(x)
            elif isinstance(x, (tuple, list)):
                for y in x:
                    gather(y)

        gather([self._net.returned, list(self._net.stand_ins.values())])
        return {id(t): self._words[id(t)] for t in kept}

    def end(self, out: Any, assigned: list[tuple[str, Tensor | None]]) -> None:
        """What forward returns, and the buffers and other tensors it has assigned."""
        try:
            flat = flatten_inputs((out,), {})
            self._note("return", [*[self._word(t) for t in flat.tensors], repr(flat.scalars), flat.key])
        except Unreadable:
            pass
        for name, t in assigned:
            self._note("assign", [name, None if t is None else self._word(t)])


def _stand_in(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_META, requires_grad=t.requires_grad)


def _itself(t: Tensor, *_: Any, **__: Any) -> Tensor:
    return t


def _lasting(out: Any) -> bool:
    """Tensors alone: what returns anything else may have switched something (grad mode goes through a
    TorchFunctionMode, too)."""
    return isinstance(out, Tensor) or isinstance(out, (tuple, list)) and len(out) > 0 and all(_lasting(x) for x in out)


def _text(note: tuple[Any, ...]) -> str:
    words = [str(w) if isinstance(w, str) else "..." for w in note[3:]]
    text = f"{note[0]}({', '.join(words)})"
    text += " without gradients" * (not note[1]) + " in autocast" * note[2]
    return text if len(text) <= 120 else text[:117] + "..."
