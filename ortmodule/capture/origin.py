"""Where an error of a capture comes from: the submodule, the file and the line."""

from __future__ import annotations

import types

from torch import nn

from .. import frames
from ..errors import CaptureError
from ..frames import is_user_file
from .not_repeatable import NotRepeatable


def capture_error(root: nn.Module, error: BaseException) -> CaptureError:
    """Names the innermost submodule whose forward is on the traceback, and the innermost line of user code; after the
    trace, those of the node at hand. Of the exceptions behind each other the one that was raised deepest tells."""
    if isinstance(error, CaptureError):
        return error
    names = frames.names_of(root)
    chain: list[BaseException] = []
    e: BaseException | None = error
    while e is not None and e not in chain:
        chain.append(e)
        e = e.__cause__ or e.__context__
    deepest = max((frames.raised_in(e) for e in chain), key=len)  # innermost frame first
    module: str | None = None
    at: tuple[str, int] | None = None
    for frame, number in deepest:
        source = _source_at(frame)
        if module is None:
            module = frames.module_at([frame], names) if source is None else source[0]
        if at is None and (source is not None or is_user_file(frame.f_code.co_filename)):
            at = (frame.f_code.co_filename, number) if source is None else source[1:]
    file, line = at or ("", 0)
    data = next((e for e in chain if type(e).__name__ in _OF_DATA), None)
    if data is not None:
        reason = _OF_DATA[type(data).__name__]
        if "Could not guard" in str(data):
            reason = "a branch on a tensor's value"
        return CaptureError(reason, module or "", file, line)
    text = str(error).strip()
    first = next((s.strip() for s in text.splitlines() if s.strip()), "")
    if isinstance(error, NotRepeatable):
        return CaptureError(first, "" if error.whole else module or "", file, line)
    told = next((reason for part, reason in _OF_TORCH.items() if part in text), "")
    if not first:  # an assert, a StopIteration
        first = next((f"raised in {f.f_code.co_filename}:{number}" for f, number in deepest), "raised without a text")
    return CaptureError(told or f"{type(error).__name__}: {first}", module or "", file, line)


_SPARSE = "a sparse tensor (of torch.sparse), which the engine does not have"
_OF_TORCH = {  # what the export says -> what it is about
    "Cannot access storage of Sparse": _SPARSE,
    "from the 'Sparse": _SPARSE,
    "data is not allocated yet": "an operator that looks at the numbers of a tensor, of which a capture has none "
    "(pack_padded_sequence, compiled code of a library)",
    "fake tensor in the exported program": "a tensor that forward makes out of a capture's sight (by way of numpy, or "
    "in compiled code of a library)",
    ".numpy() is not supported for tensor subclasses": "a tensor that forward hands to numpy or scipy, which read its "
    "numbers",
    "functional.Node object": "a value of a kind that the engine does not have, such as complex numbers, which forward "
    "returns or goes on with",
    "__format__": "text that forward makes of a number that a capture does not know (a size, or read from a "
    "tensor)",
}
_OF_DATA = {
    "GuardOnDataDependentSymNode": "a number that is read from a tensor (int(), item(), tolist()), or a size that "
    "depends on data, which forward's code needs to know",
    "DataDependentOutputException": "a Python value that is read from tensors (torch.equal, torch.allclose, tolist())",
    "DynamicOutputShapeException": "a result whose size depends on data",
}  # fmt: skip


def _source_at(frame: types.FrameType) -> tuple[str, str, int] | None:
    """The source of the node that a function of this package works on."""
    if not frame.f_code.co_filename.startswith(frames.OWN_DIR):
        return None
    sources = [getattr(frame.f_locals.get(k), "src", None) for k in ("node", "self")]
    return next((s for s in sources if type(s) is tuple), None)
