"""Questions of PyTorch's own about how tensors of a trace lie in memory, which say nothing about their values.

`contiguous()` returns its operand or a copy, `linear` and a convolution choose among kernels, a decomposition makes its
operand contiguous: each asks whether strides follow from sizes, and with symbols for sizes the answer becomes a
condition of the capture ("the batch is not 1"). The graph is the same for either answer, so such questions are answered
as they are now and make no condition.

Only what is asked by the C++ of the operators named here counts (SymInt's comparisons): what Python asks (the checks of
shapes, forward's own code) stays a condition, and so does what other operators ask.

`contiguous` alone can be told by its result: it shares the operand's memory, or does not. Where forward's own code asks
for a layout, the answer is a condition at once (`pin`). For `contiguous` functional.py looks at the end whether anybody
could see it (an edit in place, a result, a buffer; where it copies nothing now, also a view that other strides forbid),
and pins it then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .. import torch_private as private
from ..errors import CaptureError
from ..frames import TORCH_DIR, is_user_file, outwards
from ..patches import Patch, only_here, replaced

_CPP = "SymInt.h"
# files of PyTorch below its directory, and functions in them that choose kernels and strides
_PLACES = frozenset(
    (os.path.join(TORCH_DIR, *path), name)
    for path, name in (
        (("_subclasses", "fake_impls.py"), "conv"),
        (("_subclasses", "fake_tensor.py"), "_get_output_tensor_from_cache_entry"),  # of what the operator has asked
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
    if name == "as_strided":  # does memory hold all places? In the engine one behind it is out of range
        return True
    if func is Tensor.contiguous or name == "contiguous":  # not of another memory format
        return len(given.get("args") or ()) == 1 and not given.get("kwargs")
    return func is torch.nn.functional.linear or name == "linear"


def _overlaps(t: Any) -> bool:
    """An expanded tensor cannot be written, unless all that is expanded has size 1."""
    return not isinstance(t, Tensor) or any(isinstance(n, int) and n == 0 for n in t.stride())


def _attends(frame: FrameType) -> bool:
    """The C++ of attention and einsum: it asks whether sizes are 1 to see what is broadcast. That they are not adds
    nothing to the condition that they are equal, which it asks then."""
    func = frame.f_locals.get("func", frame.f_locals.get("self"))
    if not isinstance(func, private.OpOverload) or not frame.f_code.co_filename.startswith(TORCH_DIR):
        return False
    return func._schema.name in ("aten::scaled_dot_product_attention", "aten::einsum")


_BY_FORMAT = frozenset(("group_norm", "adaptive_avg_pool1d"))


def _seeks_format(frame: FrameType, e: Any) -> bool:
    """Is it the last question of those by which C++ sees whether an operand is channels-last: whether the batch is
    above 1? What follows is the same for either answer (is_channels_last_strides_2d of c10)."""
    func, args = frame.f_locals.get("func", frame.f_locals.get("self")), frame.f_locals.get("args")
    if not isinstance(func, private.OpOverload) or not frame.f_code.co_filename.startswith(TORCH_DIR):
        return False
    x = args[0] if args else None
    return (func._schema.name.partition("::")[2] in _BY_FORMAT and isinstance(x, Tensor) and x.dim() > 2
            and getattr(e, "rel_op", "") == ">" and tuple(e.args) == (as_written(x.shape[0]), 1))  # fmt: skip


def _not_one(e: Any) -> bool:
    """Is it the question whether a size is another than 1, which is answered so?"""
    return getattr(e, "rel_op", "") in ("==", "!=") and 1 in e.args


def _guard_bool(original: Callable[..., bool], asked: dict[Any, str]) -> Callable[..., bool]:
    def guard_bool(self: Any, file: str, line: int) -> bool:
        frame = sys._getframe(2)  # below: this, only_here's
        if not file.endswith(_CPP) or not (_chooses(frame) or _seeks_format(frame, self.expr)
                                           or _attends(frame) and _not_one(self.expr)
                                           and self.hint is (self.expr.rel_op == "!=")):  # fmt: skip
            conditions = self.shape_env.guards
            before = len(conditions)
            answer = original(self, file, line)
            if len(conditions) == before:
                return answer
            user = next((f for f in outwards(frame) if is_user_file(f.f_code.co_filename)), None)
            if user is not None:
                asked.setdefault(conditions[-1].expr, f"{user.f_code.co_filename}:{user.f_lineno}")
            return answer
        with self.shape_env.suppress_guards():
            return original(self, file, line)

    return guard_bool


def _or_false(original: Callable[..., bool]) -> Callable[..., bool]:
    def guard_or_false(a: Any) -> bool:
        """squeeze leaves a size out where it is 1: what PyTorch then takes to be another is a condition."""
        code = sys._getframe(2).f_code
        if code.co_name == "squeeze" and code.co_filename.startswith(TORCH_DIR):
            return bool(a)
        return original(a)

    return guard_or_false


def unasked(asked: dict[Any, str]) -> contextlib.AbstractContextManager[None]:
    """Around a trace: see the file's head. asked: where (file:line) the user's code has asked for a condition."""
    made = []
    if private.has("size_node"):
        node = private.size_node
        made.append(Patch(node, "guard_bool", only_here(_guard_bool(node.guard_bool, asked), node.guard_bool)))
    if private.has("or_false"):
        sizes = private.or_false
        made.append(Patch(sizes, "guard_or_false", only_here(_or_false(sizes.guard_or_false), sizes.guard_or_false)))
    return replaced(*made)


def no_conditions(mode: Any) -> contextlib.AbstractContextManager[None]:
    """What is asked about sizes in this block makes no condition."""
    sizes = getattr(mode, "shape_env", None)
    return contextlib.nullcontext() if sizes is None else sizes.suppress_guards()


def pin(t: Tensor) -> bool:
    """Is it contiguous? The answer is a condition on sizes."""
    return follows(t) or any(size == 0 for size in t.shape) or _dense(t)


def pin_view(t: Tensor, shape: Sequence[Any]) -> bool:
    """Can it be seen in this shape without a copy? (Axes that lie one behind the other are one, whose places the new
    ones share out.) The answer is a condition on sizes."""
    if any(size == 0 for size in t.shape):
        return True
    new = list(shape)
    stride, old, made = (t.stride(-1), 1, 1) if t.dim() else (1, 1, 1)
    for d in range(t.dim() - 1, -1, -1):
        old = old * t.shape[d]
        if d and (as_written(t.stride(d - 1)) == as_written(old * stride) or t.stride(d - 1) == old * stride
                  or t.shape[d - 1] == 1):  # fmt: skip
            continue
        while new and as_written(made) != as_written(old) and (made < old or new[-1] == 1):
            made = made * new.pop()
        while new and (isinstance(new[-1], int) and new[-1] == 1):
            new.pop()
        if made != old:
            return False
        if d:
            stride, old, made = t.stride(d - 1), 1, 1
    return all(size == 1 for size in new)


class OneNow(CaptureError):
    """A size of 1 cannot be a symbol here; as a number it can be captured."""


def pin_ones(t: Tensor, dims: Sequence[Any]) -> None:
    """squeeze leaves a size out where it is 1. With symbols for sizes PyTorch takes it to be another without saying so:
    here that is a condition. dims: none, one or several, as squeeze takes them."""
    mode = getattr(t, "fake_mode", None)
    if mode is None or mode.shape_env is None:
        return
    asked = dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims
    for d in asked or range(t.dim()):
        if t.dim() and not isinstance(t.shape[d], int) and t.shape[d] == 1:
            raise OneNow("squeeze of a size that varies, and is 1 now")


def follows(t: Tensor) -> bool:
    """Do its strides follow from its sizes as they are written? No condition."""
    wanted: Any = 1
    for size, stride in reversed([*zip(t.shape, t.stride(), strict=True)]):
        if as_written(stride) != as_written(wanted):
            return False
        wanted = wanted * size
    return True


def order_of(t: Tensor) -> list[int] | None:
    """The axes as memory has them, the slowest first, where it holds the elements one behind the other; else None. The
    answer is a condition on sizes."""
    order: list[int] = []
    wanted: Any = 1
    rest = [d for d in range(t.dim()) if as_written(t.shape[d]) != 1]
    while rest:
        d = next((d for d in reversed(rest) if as_written(t.stride(d)) == as_written(wanted)), None)
        d = next((d for d in reversed(rest) if _now(t.stride(d)) == _now(wanted)), None) if d is None else d
        if d is None or t.stride(d) != wanted:
            return None
        order.insert(0, d)
        rest.remove(d)
        wanted = wanted * t.shape[d]
    return [d for d in range(t.dim()) if d not in order] + order


def order_now(t: Tensor) -> list[int] | None:
    """As order_of, of the sizes of the capture. No condition."""
    sizes, strides = [_now(n) for n in t.shape], [_now(n) for n in t.stride()]
    order = sorted(range(t.dim()), key=lambda d: (-strides[d], -sizes[d], d))
    wanted = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != wanted:
            return None
        wanted *= sizes[d]
    return order


def as_written(n: Any) -> Any:
    """A size to compare as it stands: a comparison of symbols would be a condition."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _now(n: Any) -> Any:
    """A size as it is at the capture. No condition."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def _dense(t: Tensor) -> bool:
    wanted: Any = 1
    for size, stride in reversed([*zip(t.shape, t.stride(), strict=True)]):
        if as_written(stride) == as_written(wanted):
            wanted = wanted * size
        elif _now(size) != 1 and _now(stride) == _now(wanted) and stride == wanted:  # whatever size is
            wanted = wanted * size
        elif size != 1:
            if stride != wanted:
                return False
            wanted = wanted * size
    return True


def depends(t: Tensor) -> bool:
    """Does it depend on symbols whether the tensor is contiguous?"""
    return any(not isinstance(n, int) for n in (*t.shape, *t.stride()))
