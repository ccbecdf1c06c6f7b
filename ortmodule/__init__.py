"""ortmodule: `model = ORTModule(model)` and an ordinary PyTorch training script trains faster and in less memory.

Public names are loaded at first use, so that `import ortmodule` costs nothing beyond torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .blocks import wrap_blocks
    from .capture import CaptureError
    from .config import DebugOptions, LogLevel
    from .module import ORTModule
    from .report import Report

_HOME = {
    "ORTModule": "module",
    "DebugOptions": "config",
    "LogLevel": "config",
    "CaptureError": "capture",
    "Report": "report",
    "wrap_blocks": "blocks",
}
__all__ = ["CaptureError", "DebugOptions", "LogLevel", "ORTModule", "Report", "__version__", "wrap_blocks"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
