"""The errors of a capture: below everything that raises them."""

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

    def say(self, text: str) -> CaptureError:
        """Adds what to do."""
        if not str(self.args[0]).endswith(text):
            self.args = (f"{self.args[0]}; {text}",)
        return self


class TimeUp(BaseException):
    """The time for captures is over. No Exception: the user's code, whose trace is given up, must not catch it."""
