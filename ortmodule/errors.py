"""The error of a capture: below everything that raises it."""

from __future__ import annotations

from .fallback import ORTModuleONNXModelException


class CaptureError(ORTModuleONNXModelException):
    """The module could not be captured. reason: why; module: innermost user submodule ('' = the whole); file, line:
    user's source."""

    def __init__(self, reason: str, module: str = "", file: str = "", line: int = 0) -> None:
        where = f" in submodule '{module}'" if module else ""
        at = f" ({file}:{line})" if file else ""
        super().__init__(f"capture failed{where}{at}: {reason}")
        self.reason = reason
        self.module = module
        self.file = file
        self.line = line
