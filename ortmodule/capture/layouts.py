"""Questions of PyTorch's own about how tensors of a trace lie in memory, which say nothing about their values.

`contiguous()` returns its operand or a copy, `linear` and a convolution choose among kernels, a decomposition makes its
operand contiguous: each asks whether strides follow from sizes, and with symbols for sizes the answer becomes a
condition of the capture ("the batch is not 1"). The graph is the same for either answer, so such questions are answered
as they are now and make no condition.

Only what is asked by the C++ of the operators named here counts (SymInt's comparisons): what Python asks (the checks of
shapes, forward's own code) stays a condition, and so does what other operators ask.

`contiguous` alone can be told by its result: it shares the operand's memory, or does not. Where it does,
or where forward's own code asks for a layout, the answer is a condition at once (`pin`). Where it is a copy now,
functional.py looks whether anybody could see that (an edit in place, a result), and pins it then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import torch_private as private
from ..frames import TORCH_DIR
from ..patches import Patch, only_here, replaced

if TYPE_CHECKING:
    from .export import Exported

_CPP = "SymInt.h"
# files of PyTorch below its directory, and functions in them that choose kernels and strides
_PLACES = frozenset(
    (os.path.join(TORCH_DIR, *path), name)
    for path, name in (
        (("_subclasses", "fake_impls.py"), "conv"),
        (("nn", "functional.py"), "_in_projection_packed"),
        (("_meta_registrations.py",), "meta_copy_"),
        (("_decomp", "decompositions.py"), "_softmax"),
        (("_decomp", "decompositions.py"), "_log_softmax"),
    )
)


def _chooses(frame: FrameType) -> bool:
    """Is the C++ that this Python code has called that of an operator which asks for strides to choose by them?"""
    code = frame.f_code
    if (code.co_filename, code.co_name) in _PLACES:
        return code.co_name != "meta_copy_" or not _overlaps(frame.f_locals.get("self"))
    if not code.co_filename.startswith(TORCH_DIR) and code.co_name != "__torch_function__":
        return False
    given = frame.f_locals
    func = given.get("func", given.get("self"))
    name = func._schema.name.partition("::")[2] if isinstance(func, private.OpOverload) else ""
    if func is Tensor.contiguous or name == "contiguous":  # not of another memory format
        return len(given.get("args") or ()) == 1 and not given.get("kwargs")
    return func is torch.nn.functional.linear or name == "linear"


def _overlaps(t: Any) -> bool:
    """An expanded tensor cannot be written, unless all that is expanded has size 1."""
    return not isinstance(t, Tensor) or any(isinstance(n, int) and n == 0 for n in t.stride())


def _guard_bool(original: Callable[..., bool]) -> Callable[..., bool]:
    def guard_bool(self: Any, file: str, line: int) -> bool:
        if not file.endswith(_CPP) or not _chooses(sys._getframe(2)):  # below: this, only_here's
            return original(self, file, line)
        with self.shape_env.suppress_guards():
            return original(self, file, line)

    return guard_bool


def unasked() -> contextlib.AbstractContextManager[None]:
    """Around a trace: see the file's head."""
    if not private.has("size_node"):
        return contextlib.nullcontext()
    node = private.size_node
    return replaced(Patch(node, "guard_bool", only_here(_guard_bool(node.guard_bool), node.guard_bool)))


def no_conditions(mode: Any) -> contextlib.AbstractContextManager[None]:
    """What is asked about sizes in this block makes no condition."""
    sizes = getattr(mode, "shape_env", None)
    return contextlib.nullcontext() if sizes is None else sizes.suppress_guards()


def pin(t: Tensor, exported: Exported | None = None) -> bool:
    """Is it contiguous? The answer is a condition on sizes: of the trace that is being made, or of one that is."""
    mode = getattr(t, "fake_mode", None)
    sizes = None if mode is None else mode.shape_env
    before = 0 if sizes is None else len(sizes.guards)
    answer = _follow(t) or any(size == 0 for size in t.shape) or _dense(t)
    if exported is not None and sizes is not None:
        exported.guards += [g.expr for g in sizes.guards[before:]]
    return answer


def _follow(t: Tensor) -> bool:
    """Do its strides follow from its sizes as they are written? No condition."""
    wanted: Any = 1
    for size, stride in reversed([*zip(t.shape, t.stride(), strict=True)]):
        if _text(stride) != _text(wanted):
            return False
        wanted = wanted * size
    return True


def _text(n: Any) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _dense(t: Tensor) -> bool:
    wanted: Any = 1
    for size, stride in reversed([*zip(t.shape, t.stride(), strict=True)]):
        if _text(stride) == _text(wanted):
            wanted = wanted * size
        elif size != 1:
            if stride != wanted:
                return False
            wanted = wanted * size
    return True


def depends(t: Tensor) -> bool:
    """Does it depend on symbols whether the tensor is contiguous?"""
    return any(not isinstance(n, int) for n in (*t.shape, *t.stride()))
