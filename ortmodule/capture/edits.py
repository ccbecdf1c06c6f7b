"""What code does beside returning a result, while it runs for a capture's sake: memory and containers that it edits.

A submodule that stays in PyTorch is a node of the graph: its result is all that the code around it hears of. So it may
not fill a list it is given, use tensors of the code around it by way of a function it is given, or write to a tensor
that the code around it reads.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_private as private
from ..contents import PLAIN
from .skeleton import is_array, is_cache, state_of

_FAR = 1000  # objects that are looked at
_STATISTICS = ("running_mean", "running_var")  # batch norm writes them, which its schemas do not say


class Writes(private.DispatchMode):  # type: ignore[misc, name-defined]
    """Notes what memory is written to."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, private.OpOverload):  # a higher-order operator writes to nothing that it is given
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        if func._schema.is_mutable or any(a.name in _STATISTICS for a in arguments):
            given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
            for a in arguments:
                written = a.alias_info is not None and a.alias_info.is_write or a.name in _STATISTICS
                if written and a.name in given:
                    x = given[a.name]
                    for t in x if isinstance(x, (list, tuple)) else (x,):
                        if isinstance(t, Tensor) and t.layout is torch.strided:
                            self._note(t)
        return func(*args, **kwargs)

    def _note(self, t: Tensor) -> None:
        """Called before the write."""
        self._written.add(private.storage_of(t))

    def wrote(self, tensors: Sequence[Tensor]) -> bool:
        return any(private.storage_of(t) in self._written for t in tensors)


class Undo(Writes):
    """Notes what memory held before it is edited in place."""

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[int, tuple[Tensor, Any]] = {}
        self._versions: dict[int, tuple[Tensor, int]] = {}

    def _note(self, t: Tensor) -> None:
        super()._note(t)
        where = private.storage_of(t)
        if where not in self._old:
            self._old[where] = t, t.untyped_storage().clone()
        if not t.is_inference():
            self._versions.setdefault(id(t), (t, t._version))

    def put_back(self) -> None:
        with torch.no_grad():
            for t, old in self._old.values():
                t.untyped_storage().copy_(old)
            for t, version in self._versions.values():
                private.set_version((t,), (version,))


@contextlib.contextmanager
def undoing(module: nn.Module) -> Iterator[Undo]:
    """Around a run of forward that is none of the user's. -> the mode to run it in; at the end memory is as it was
    before what that has seen, and so are requires_grad of parameters and autocast's cache."""
    flags = [(p, p.requires_grad) for p in module.parameters()]
    cached = torch.is_autocast_cache_enabled()
    undo = Undo()
    try:
        torch.set_autocast_cache_enabled(False)  # weights cast here are for nobody
        yield undo
    finally:
        torch.set_autocast_cache_enabled(cached)
        undo.put_back()
        for p, wanted in flags:
            if p.requires_grad != wanted:
                p.requires_grad_(wanted)


def contents_of(x: Any, depth: int = 0) -> Any:
    """What stands where in the arguments, by identity (a comparison of symbolic numbers would fix them)."""
    if depth > 8:
        return id(x)
    if is_array(x):
        return id(x), x.tobytes()
    items: list[Any] = []
    if isinstance(x, (list, tuple, set, frozenset, collections.deque)):
        items = [contents_of(y, depth + 1) for y in x]
    elif isinstance(x, dict):
        items = [(k, contents_of(y, depth + 1)) for k, y in dict.items(x)]
    library = type(x).__module__.partition(".")[0] in ("torch", "builtins", "types")
    if library or isinstance(x, (Tensor, nn.Module, type)):
        return items or id(x)
    state = state_of(x)
    return [*items, *[(k, contents_of(y, depth + 1)) for k, y in state.items()]] if state else items or id(x)


def hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None) -> str | None:
    """By what among its arguments code can reach tensors, or sizes of the trace, that it is not given as such.
    module: whose forward it is, whose own tensors are no matter. None: a custom Function, which differentiates what it
    reaches by modules itself: only what is of the trace."""
    own = {id(m) for m in module.modules()} if module is not None else set()
    todo: list[tuple[Any, str]] = [(x, "") for x in (*args, *kwargs.values())]
    seen: set[tuple[int, bool]] = set()
    while todo and len(seen) < _FAR:
        x, by = todo.pop()
        if type(x) in PLAIN or (id(x), bool(by)) in seen:
            continue
        seen.add((id(x), bool(by)))
        if isinstance(x, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            if by and (module is not None or type(x) not in (Tensor, nn.Parameter)):
                return by
        elif isinstance(x, nn.Module):
            if module is not None and id(x) not in own and any(True for _ in (*x.parameters(), *x.buffers())):
                return by or "a module"
        elif isinstance(x, (set, frozenset)):
            todo += [(y, by or "a set") for y in x]
        elif isinstance(x, (list, tuple, collections.deque)):
            todo += [(y, by) for y in x]
        elif isinstance(x, dict):
            todo += [(y, by) for y in dict.values(x)]
        elif isinstance(x, types.MethodType):
            todo += [(x.__self__, by or "a method"), (x.__func__, by or "a method")]
        elif isinstance(x, types.FunctionType):
            defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
            todo += [(y, by or "a function") for y in defaults]
            for cell in x.__closure__ or ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    todo.append((cell.cell_contents, by or "a function"))
        elif isinstance(x, functools.partial):
            todo += [(y, by or "a function") for y in (x.func, x.args, x.keywords)]
        elif isinstance(x, slice):
            todo += [(y, by or "a slice") for y in (x.start, x.stop, x.step)]
        elif is_array(x):
            if x.dtype.hasobject:
                return by or "an array of objects"
        elif isinstance(x, Iterator) and module is not None:
            return by or "an iterator"
        elif not isinstance(x, (type, types.ModuleType)) and not is_cache(x) and (state := state_of(x)):
            todo += [(y, by) for y in state.values()]
    return None


def trained_elsewhere(outs: Sequence[Tensor], given: Sequence[Tensor], module: nn.Module) -> bool:
    """Do these results of a module take gradients to a tensor that is neither an argument nor one of its parameters?"""
    own = {id(t) for t in (*given, *module.parameters())}
    ends = {t.grad_fn for t in given}
    todo, seen = [t.grad_fn for t in outs if not any(t is x for x in given)], set()
    while todo:
        node = todo.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(getattr(node, "variable", None)) not in own:
            return True
        todo += [before for before, _ in node.next_functions]
    return False


class Written(Undo):
    """Of the tensors of a module's tree alone; also which of them are written, or replaced, between `begin` and `end`.
    real: they have memory, which can be put back."""

    def __init__(self, root: nn.Module, real: bool) -> None:
        super().__init__()
        self._root = root
        self._tree = {private.storage_of(t) for t in tensors_in(root).values()} if real else set()
        self._were: dict[tuple[str, str], Tensor] = {}

    def _note(self, t: Tensor) -> None:
        if private.storage_of(t) in self._tree:
            super()._note(t)
        else:
            Writes._note(self, t)

    def begin(self) -> None:
        self._written = set()
        self._were = tensors_in(self._root)

    def end(self) -> set[tuple[str, str]]:
        """-> (module, name) of buffers, parameters and other attributes."""
        are = tensors_in(self._root)
        return {
            key for key in {**self._were, **are}
            if self._were.get(key) is not are.get(key) or self.wrote([are[key]])
        }


def tensors_in(root: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Buffers, parameters and other tensor attributes of all modules, by module and name."""
    return {
        (where, name): t
        for where, m in root.named_modules()
        for table in (m._buffers, m._parameters, m.__dict__)
        for name, t in table.items()
        if isinstance(t, Tensor)
    }
