"""How a trace is refused, and what is noted where the user's code catches that."""

from __future__ import annotations

from types import FrameType

from ..frames import OWN_DIR, is_user_file, outwards, tried
from ..patches import here


class NotRepeatable(Exception):
    """Raised in the line of the user's forward that asks; the capture turns it into a CaptureError with module, file
    and line. whole: a submodule kept in PyTorch could not answer either, since it is called with tensors of its own;
    only the whole module can."""

    def __init__(self, reason: str, whole: bool = False) -> None:
        super().__init__(reason)
        self.whole = whole


def in_try(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's, from this one outwards, that may catch what is raised here."""
    for f in outwards(frame):
        if f.f_code.co_filename.startswith(OWN_DIR) and f.f_code.co_name == "forward":
            return None  # where the trace begins
        if is_user_file(f.f_code.co_filename) and tried(f):
            return f
    return None


def note_caught(error: Exception, by: FrameType) -> None:
    """An exception of PyTorch's, or one by which a trace is refused, arrives in the user's code. If the trace goes on
    behind it, the user has caught it: the path taken is that of tensors without values."""
    scope = here()
    if scope is not None and scope.watch is not None and scope.exporting:
        what = str(error) if isinstance(error, NotRepeatable) else f"PyTorch raises {type(error).__name__}"
        whole = isinstance(error, NotRepeatable) and error.whole
        scope.watch.problem_at(by, f"catches what stops a trace ({what})", whole)
