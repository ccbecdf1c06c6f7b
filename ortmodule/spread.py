"""A module whose tensors lie on several devices: `model.a.to("cuda:0"); model.b.to("cuda:1")`, a device_map, embedding
tables on the CPU. A plan has one device, so such a module is no graph: PyTorch runs its forward, with what moves
tensors between devices, hooks and autograd, and its parts (parts.py) run in the engine: the outermost submodules on one
device.

Devices and children are compared at every call; where they have changed the module is judged anew. A part that is one
again keeps its captures.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from . import cuda_engine, fallback, guard
from .errors import CaptureError
from .parts import Part, Parts, listed, outermost
from .state import Refused, State

logger = logging.getLogger("ortmodule")


class Spread(Parts):
    """How a module is spread, as long as it `holds`."""

    def __init__(self, state: State, found: list[Part]) -> None:
        super().__init__(state, found)
        self._tables: list[dict[str, Any]] = [d for m in state.module.modules() for d in (m._parameters, m._buffers)]
        self._devices = self._places()

    def _places(self) -> list[torch.device | None]:
        return [None if t is None else cuda_engine.device_of(t) for d in self._tables for t in d.values()]

    def holds(self) -> bool:
        """Is also everything where it was?"""
        return super().holds() and self._places() == self._devices


def judge(state: State) -> Spread | None:
    """None: the module lies on one device, or no part of it can run in the engine. Raises what the options do not leave
    to PyTorch."""
    module, settings = state.module, state.settings
    devices = cuda_engine.devices(module)
    if len(devices) < 2 or settings.disable or any(d.type not in ("cpu", "cuda") for d in devices):
        return None
    if guard.refuse(module) is not None or guard.in_torchscript(module) is not None:
        return None  # told where all modules are
    found = list(outermost(module, settings.cuda_engine))
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
    ours = listed(spread.ours)
    if (places, ours) not in state.told:
        state.told.add((places, ours))
        logger.warning("%s lies on %s: PyTorch runs its forward, the engine %s", name, places, ours)
    return spread
