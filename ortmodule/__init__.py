"""ortmodule: `model = ORTModule(model)` and an ordinary PyTorch training script trains faster and in less memory.

Public names are loaded at first use, so that `import ortmodule` costs nothing beyond torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .blocks import wrap_blocks
    from .capture import CaptureError
    from .debug import DebugOptions, LogLevel
    from .fallback import (
        FallbackPolicy,
        ORTModuleDeviceException,
        ORTModuleFallbackException,
        ORTModuleInitException,
        ORTModuleIOError,
        ORTModuleONNXModelException,
        ORTModuleTorchModelException,
    )
    from .memory_idle import release_memory
    from .module import ORTModule
    from .report import Report

_HOME = {
    "ORTModule": "module",
    "DebugOptions": "debug",
    "LogLevel": "debug",
    "FallbackPolicy": "fallback",
    "ORTModuleDeviceException": "fallback",
    "ORTModuleFallbackException": "fallback",
    "ORTModuleIOError": "fallback",
    "ORTModuleInitException": "fallback",
    "ORTModuleONNXModelException": "fallback",
    "ORTModuleTorchModelException": "fallback",
    "CaptureError": "capture",
    "Report": "report",
    "release_memory": "memory_idle",
    "wrap_blocks": "blocks",
}
__all__ = [
    "CaptureError",
    "DebugOptions",
    "FallbackPolicy",
    "LogLevel",
    "ORTModule",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "Report",
    "__version__",
    "release_memory",
    "wrap_blocks",
]


def _extension() -> Any:
    """Asked for before it is imported."""
    import importlib
    import os

    try:
        return importlib.import_module(f"{__name__}._C")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._C":
            raise
    raise ImportError(
        f"ortmodule has no extension in {os.path.dirname(os.path.abspath(__file__))}: these are its sources, which "
        "Python finds first where it is started. Start it in another directory, or build the extension there: "
        "make, or pip install -e ."
    )


def __getattr__(name: str) -> Any:
    if name == "_C":
        return _extension()
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
