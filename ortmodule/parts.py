"""A module whose forward PyTorch runs, with its submodules in the engine: because its tensors lie on several devices
(spread.py), or because its own code cannot be captured.

parts     The outermost submodules that the engine may run. Each gets a wrapper of its own, so captures and plans of its
          own; one that is called several times is what any wrapper is. A part that cannot be captured either has parts
          in its turn.
place     While forward runs, a call of a part is a call of its wrapper, by whatever way forward has come to the part:
          PyTorch asks a module for `_compiled_call_impl` before it calls it, and copies and files are made without
          that. The tree of modules, its classes and names are the user's at all times.
again     What is computed again in backward (torch.utils.checkpoint) must be computed as before, dropout's masks
          included. So a part runs in the engine only within the module's forward, on its thread, under the grad mode
          and the saved_tensors_hooks that this began with, and in no backward that it calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from . import _C, cuda_engine, cuts, fallback, forks, guard
from . import torch_private as private
from .report import PartEntry
from .state import State
from .torch_private import CALL, HOOKS

if TYPE_CHECKING:
    from .module import ORTModule

_FEW = 3  # modules with parameters of their own in a part that pays: with fewer a call of the engine costs more than
# it gains


class Part(NamedTuple):
    """A submodule on one device. reason: why PyTorch runs it; "": it need not."""

    name: str
    device: torch.device
    reason: str
    module: nn.Module


def outermost(module: nn.Module, enabled: bool, least: int = 0, prefix: str = "") -> Iterator[Part]:
    """The outermost submodules with a forward and tensors that lie on one device, in the order of the tree. enabled:
    the engine's CUDA kernels. least: modules with parameters of their own in one."""
    for key, child in module._modules.items():
        places = cuda_engine.devices(child) if child is not None else set()
        if child is None or not places:
            continue
        name = f"{prefix}{key}"
        if len(places) > 1 or not _has_forward(child):
            yield from outermost(child, enabled, least, f"{name}.")
        elif _n_layers(child) >= least:
            (device,) = places
            yield Part(name, device, _why_not(child, device, enabled), child)


def _has_forward(child: nn.Module) -> bool:
    """A ModuleList has none."""
    return isinstance(child, torch.jit.ScriptModule) or type(child).forward is not nn.Module.forward


def _why_not(child: nn.Module, device: torch.device, enabled: bool) -> str:
    if isinstance(getattr(child, "_ortmodule", None), State):
        return "it is an ORTModule already, with a report of its own"
    refused = cuda_engine.refusal(device, enabled)
    if refused:
        return refused
    if next(child.parameters(), None) is None:
        return "it has no parameters"
    if isinstance(child, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"an ORTModule must be inside of {type(child).__name__}"
    if isinstance(child, torch.jit.ScriptModule):
        return "it is TorchScript"
    call = child.__dict__.get(CALL)  # of a part of another module, whose forward runs, too
    if type(child).__name__ == "OptimizedModule" or call is not None and type(call) is not Call:
        return "it is torch.compile's"
    return guard.refuse(child) or private.lacks("parts") or private.lacks("hooks") or ""


class Call:
    """What PyTorch calls in the place of a part: the part, with the wrapper's forward. Hooks get the part itself. A
    module that somebody has made of the part's dictionary meanwhile is called as what it is."""

    __slots__ = ("part", "wrapper")

    def __init__(self, part: nn.Module, wrapper: ORTModule) -> None:
        self.part = part
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self.part
        own, called = part.__dict__, sys._getframe(1).f_locals.get("self")
        if isinstance(called, nn.Module) and called.__dict__ is not own:
            return private.call_impl(called, *args, **kwargs)
        if guard.global_hooks():  # for which PyTorch runs forward
            return private.call_impl(part, *args, **kwargs)
        if not any(own.get(name) for name in HOOKS):
            return self.wrapper.forward(*args, **kwargs)
        stand = cuts.Stand(part, self.wrapper.forward, every=True)
        try:
            return private.call_impl(stand, *args, **kwargs)
        finally:
            stand.forward = None  # autograd may keep the stand-in

    def __reduce__(self) -> Any:
        return _nothing, ()

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _nothing() -> None:
    """What a copy has of a Call."""


class Parts:
    """Of one module, as long as its tree `holds`."""

    def __init__(self, state: State, found: list[Part]) -> None:
        self.state = state
        self.parts: list[Part] = []
        self._calls: dict[int, tuple[nn.Module, Call]] = {}  # one module may be at two places
        for part in found:
            if not part.reason and id(part.module) not in self._calls:
                try:
                    self._calls[id(part.module)] = part.module, Call(part.module, self._wrapper(part))
                except Exception as error:  # a class that nobody can derive from, a metaclass that does not want to
                    part = part._replace(reason=str(error) or type(error).__name__)
            self.parts.append(part)
        inside = {id(m) for m in state.module.modules()}
        state.parts = {k: made for k, made in state.parts.items() if k in inside}  # what has been replaced may go
        self._lock = forks.lock()
        self._running = 0  # forwards, of all threads
        script = torch.jit.ScriptModule  # has no dictionaries
        self._children: list[Any] = [m._modules for m in state.module.modules() if not isinstance(m, script)]
        self._refs = [tuple(d.values()) for d in self._children]  # as guard.py's invariant asks
        self._tree = _C.guard_hash(self._children)

    def _wrapper(self, part: Part) -> ORTModule:
        made = self.state.parts.get(id(part.module))
        if made is None:
            assert self.state.new_part is not None
            made = self.state.parts[id(part.module)] = self.state.new_part(part.module)
        own: State = made._ortmodule
        own.name = self.state.within(part.name)
        own.part_of, own.announced = self.state, True  # told with the module
        return made  # type: ignore[no-any-return]

    @property
    def ours(self) -> list[str]:
        """Names of those that the engine runs."""
        return [p.name for p in self.parts if not p.reason]

    def holds(self) -> bool:
        """Is the tree what it was?"""
        return bool(_C.guard_hash(self._children) == self._tree)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = self.state.inside
        before = getattr(inside, "how", None)
        self._put(1)
        inside.how = _how()
        try:
            return self.state.body.forward(*args, **kwargs)
        finally:
            inside.how = before
            self._put(-1)

    def _put(self, change: int) -> None:
        """Calls go to the wrappers while any forward runs."""
        with self._lock:
            self._running += change
            if self._running == (change > 0):
                for module, call in self._calls.values():
                    own = module.__dict__
                    if change > 0:
                        own.setdefault(CALL, call)
                    elif own.get(CALL) is call:
                        del own[CALL]

    def entries(self) -> Iterator[PartEntry]:
        """A part that has parts is followed by those."""
        for p in self.parts:
            made = self.state.parts.get(id(p.module))
            inner: Parts | None = made._ortmodule.by_parts if made is not None and not p.reason else None
            reason = p.reason
            if made is not None and not p.reason and not made._ortmodule.every:
                if inner is not None:
                    reason = "by its parts" if inner.ours else "its forward is PyTorch's"
                else:  # called, and never in the engine
                    reason = next((e.reason for e in made._ortmodule.eager_entries.values() if e.calls), "")
            yield PartEntry(self.state.within(p.name), str(p.device), reason)
            if inner is not None:
                yield from inner.entries()


_CATEGORIES = (fallback.DEVICE, fallback.DATA, fallback.TORCH_MODEL, fallback.ONNX_MODEL)


def of(state: State) -> Parts | None:
    """The parts of a module whose forward cannot be captured; None: none that pays, or the options do not leave that
    to parts."""
    if state.by_parts is None or not state.by_parts.holds():
        with state.lock:
            found = list(outermost(state.module, state.settings.cuda_engine, _FEW)) if _allowed(state) else []
            state.by_parts = Parts(state, found)
    return state.by_parts if state.by_parts.ours else None


def _allowed(state: State) -> bool:
    settings = state.settings
    wanted = not settings.strict and not settings.disable and settings.memory_budget is None
    wanted = wanted and not settings.min_coverage and all(map(settings.allows, _CATEGORIES))
    return wanted and private.lacks("capture") is None


def better(state: State, keep: Iterable[str]) -> bool:
    """Do the submodules in these, which a graph would keep in PyTorch as they are, make up most of the module?"""
    if not keep or not _allowed(state):
        return False
    enabled = state.settings.cuda_engine
    inside = [p.module for k in keep
              for p in outermost(state.module.get_submodule(k), enabled, _FEW) if not p.reason]  # fmt: skip
    return 2 * sum(map(_n_layers, inside)) > _n_layers(state.module)


def _n_layers(module: nn.Module) -> int:
    """Modules with parameters of their own."""
    return sum(any(p is not None for p in m._parameters.values()) for m in module.modules())


def outside(state: State, whole: State) -> str | None:
    """Why a part of `whole` that is called now is PyTorch's."""
    how = getattr(whole.inside, "how", None)
    if how is None:
        return "called outside of the forward that it is a part of"
    return None if how == _how() else ("called under another grad mode than the forward that it is a part of, or "
                                       "within a backward, saved_tensors_hooks or torch.utils.checkpoint there"
                                       )  # fmt: skip


def _how() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), private.saved_hooks(True), private.in_backward()


def listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + f" and {len(names) - 4} more submodules" * (len(names) > 4)
