"""HierarchicalORTModule: the largest parts of a module that can be captured run in the engine, the rest in PyTorch.

That is what every ORTModule does, with all parts in one graph. This class stands for scripts that name it: it holds the
wrapper under the attribute that gave the parameters their names there, so that checkpoints keep theirs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import DebugOptions
from ..module import ORTModule
from ..report import Report


class HierarchicalORTModule(nn.Module):
    """module: the module to wrap, in place of ORTModule(module). debug_options: as ORTModule's."""

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None) -> None:
        super().__init__()
        self._original_module = ORTModule(module, debug_options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._original_module(*inputs, **kwargs)

    def report(self) -> Report:
        """What runs in the engine, and what in PyTorch and why."""
        return self._original_module.report()
