"""A module whose tensors lie on several devices: `model.a.to("cuda:0"); model.b.to("cuda:1")`, a device_map, embedding
tables on the CPU. A plan has one device, so such a module is no graph: PyTorch runs its forward, with what moves
tensors between devices, hooks and autograd, and its parts run in the engine.

parts     The outermost submodules with a forward and parameters that lie on one device, which the engine runs on. Each
          gets a wrapper of its own, so a plan of its own; one that is called several times is what any wrapper is.
place     While forward runs, the wrappers stand in their parents' tables of children (what is reached otherwise runs in
          PyTorch). Before and after the tree is as the user made it; parameters, names and classes always are.
again     What is computed again in backward (torch.utils.checkpoint) must be computed as before, dropout's masks
          included, and may meet the tree without wrappers. So a part runs in the engine only within the module's
          forward, under the grad mode and the saved_tensors_hooks that this began with.
moved     Devices and children are compared at every call; where they have changed the module is judged anew. A part
          that is one again keeps its captures.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from . import _C, cuda_engine, fallback, guard
from . import torch_private as private
from .errors import CaptureError
from .report import PartEntry
from .state import Refused, State

if TYPE_CHECKING:
    from .module import ORTModule

logger = logging.getLogger("ortmodule")


class Part(NamedTuple):
    """A submodule on one device, in its parent's table of children. reason: why PyTorch runs it; "": it need not."""

    name: str
    device: torch.device
    reason: str
    table: dict[str, nn.Module | None]
    key: str
    module: nn.Module


def parts(module: nn.Module, enabled: bool, prefix: str = "") -> Iterator[Part]:
    """Outermost first, in the order of the tree; a module under two names is two parts. enabled: the engine's CUDA
    kernels."""
    for key, child in module._modules.items():
        places = cuda_engine.devices(child) if child is not None else set()
        if child is None or not places:
            continue
        name = f"{prefix}{key}"
        if len(places) > 1 or type(child).forward is nn.Module.forward:  # a ModuleList
            yield from parts(child, enabled, f"{name}.")
            continue
        (device,) = places
        yield Part(name, device, _why_not(child, device, enabled), module._modules, key, child)


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
    return guard.refuse(child) or ""


class Spread:
    """How a module is spread, as long as `holds`."""

    def __init__(self, state: State, found: list[Part]) -> None:
        self.state = state
        self.parts: list[Part] = []
        self._wrappers: list[tuple[Part, ORTModule]] = []
        for part in found:
            if not part.reason:
                try:
                    self._wrappers.append((part, self._wrapper(part)))
                except TypeError as error:  # a class that nobody can derive from
                    part = part._replace(reason=str(error))
            self.parts.append(part)
        self._lock = threading.Lock()
        self._running = 0  # forwards, of all threads
        self._entered = threading.local()  # how this thread's forward began
        modules = list(state.module.modules())
        self._children: list[Any] = [m._modules for m in modules]
        self._refs = [tuple(d.values()) for d in self._children]  # as guard.py's invariant asks
        self._tree = _C.guard_hash(self._children)
        self._tables: list[dict[str, Any]] = [d for m in modules for d in (m._parameters, m._buffers)]
        self._devices = self._places()

    def _places(self) -> list[torch.device | None]:
        return [None if t is None else cuda_engine.device_of(t) for d in self._tables for t in d.values()]

    def _wrapper(self, part: Part) -> ORTModule:
        made = self.state.parts.get(id(part.module))
        if made is None:
            assert self.state.new_part is not None
            made = self.state.parts[id(part.module)] = self.state.new_part(part.module)
        own: State = made._ortmodule
        own.name, own.spread_over, own.announced = part.name, self, True  # told with the module
        return made  # type: ignore[no-any-return]

    def holds(self) -> bool:
        """Is the tree what was judged, and everything where it was?"""
        with self._lock:  # the wrappers stand in the tree while a forward runs
            same = self._running > 0 or _C.guard_hash(self._children) == self._tree
        return same and self._places() == self._devices

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = getattr(self._entered, "how", None)
        self._put(1)
        self._entered.how = _how()
        try:
            return self.state.body.forward(*args, **kwargs)
        finally:
            self._entered.how = before
            self._put(-1)

    def _put(self, change: int) -> None:
        """The wrappers are there while any forward runs."""
        with self._lock:
            self._running += change
            if self._running == (change > 0):
                for part, wrapper in self._wrappers:
                    old, new = (part.module, wrapper) if change > 0 else (wrapper, part.module)
                    if part.table.get(part.key) is old:  # else the user has assigned another one
                        part.table[part.key] = new

    def outside(self) -> str | None:
        """Why a part that is called now is PyTorch's."""
        how = getattr(self._entered, "how", None)
        if how is None:
            return "called outside of the forward that it is a part of"
        return None if how == _how() else ("called under another grad mode than the forward that it is a part of, or "
                                           "within saved_tensors_hooks or torch.utils.checkpoint there")  # fmt: skip

    def entries(self) -> list[PartEntry]:
        return [PartEntry(p.name, str(p.device), p.reason) for p in self.parts]


def _how() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), private.saved_hooks(True)


def judge(state: State) -> Spread | None:
    """None: the module lies on one device, or no part of it can run in the engine. Raises what the options do not leave
    to PyTorch."""
    module, settings = state.module, state.settings
    devices = cuda_engine.devices(module)
    if len(devices) < 2 or settings.disable or any(d.type not in ("cpu", "cuda") for d in devices):
        return None
    if guard.refuse(module) is not None or guard.in_torchscript(module) is not None:
        return None  # told where all modules are
    found = list(parts(module, settings.cuda_engine))
    if all(p.reason for p in found):
        return None
    name, places = type(module).__name__, ", ".join(sorted(map(str, devices)))
    if not settings.allows(fallback.DEVICE):
        raise fallback.ORTModuleDeviceException(
            f"{name}: ORTModule supports a single device per model, and it has {places}; "
            "FALLBACK_UNSUPPORTED_DEVICE leaves its forward to PyTorch and runs parts of it")
    if settings.asked_strict or settings.min_coverage:
        which = "strict" if settings.asked_strict else "min_coverage"
        raise CaptureError(f"{which}: parameters and buffers lie on {places}, so PyTorch would run forward, and the "
                           f"engine parts of it; without {which} it does")  # fmt: skip
    if settings.memory_budget is not None:
        raise Refused(f"memory_budget cannot be kept for {name}: its parameters and buffers lie on {places}, so a step "
                      "is several plans. Remove the budget.")  # fmt: skip
    spread = Spread(state, found)
    ours = _listed([p.name for p in found if not p.reason])
    if (places, ours) not in state.told:
        state.told.add((places, ours))
        logger.warning("%s lies on %s: PyTorch runs its forward, the engine %s", name, places, ours)
    return spread


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + f" and {len(names) - 4} more submodules" * (len(names) > 4)
