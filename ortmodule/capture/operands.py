"""An ATen call's operands: in the order of the schema, and which of them eager PyTorch refuses where a trace does not.

A trace computes on stand-ins, whose kernels ask less of types and sizes than those of a device do: what would be
converted here without a word is refused by name, and left to PyTorch, which raises its own error."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import autocast
from .program import Node, draws

F32, I64 = torch.float32, torch.int64
_LOW = (torch.bfloat16, torch.float16)
_schemas: dict[Any, list[tuple[str, Any]]] = {}


def bound(n: Node) -> list[Any]:
    """Arguments in schema order, defaults filled in."""
    if isinstance(n.target, str):
        return list(n.args)
    schema = _schemas.get(n.target)
    if schema is None:
        schema = _schemas[n.target] = [(a.name, a.default_value) for a in n.target._schema.arguments]
    args, kwargs, k = n.args, n.kwargs, len(n.args)
    return [args[i] if i < k else kwargs.get(name, default) for i, (name, default) in enumerate(schema)]


def named(n: Node) -> dict[str, Any]:
    """The same by the names of the schema."""
    return dict(zip([a.name for a in n.target._schema.arguments], bound(n), strict=True))


def eager_refuses(n: Node) -> str | None:
    """Why eager does not compute this, or None."""
    return _refused_types(n) or _refused_sizes(n)


# What eager refuses and a trace does not: operands of a product are floats of one type, or none is a float; a norm's
# weight may be f32 beside a low type; these sums and losses do not convert; there is no such operator of bools.
_NORMS = frozenset(("aten::layer_norm", "aten::group_norm", "aten::batch_norm"))
_PRODUCTS = frozenset(f"aten::{n}" for n in (
    "linear", "mm", "bmm", "matmul", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "bilinear", "cdist",
    "cross", "linalg_cross", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "convolution",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))  # fmt: skip
_GIVEN_ALIKE = {"aten::nll_loss": (0, 2), "aten::nll_loss_nd": (0, 2), "aten::nll_loss2d": (0, 2),
                "aten::cross_entropy_loss": (0, 2), "aten::embedding_bag": (0, 6)}  # fmt: skip
_ALIKE = {"aten::index_add": (0, 3), "aten::huber_loss": (0, 1), "aten::smooth_l1_loss": (0, 1)}
_NO_BOOL = frozenset(f"aten::{n}" for n in (
    "abs", "floor", "ceil", "round", "trunc", "relu", "argmax", "argmin", "addcmul", "addcdiv"))  # fmt: skip
_FLOATS_ONLY = ("aten::upsample_linear1d", "aten::upsample_bilinear2d", "aten::upsample_bicubic2d",
                "aten::upsample_trilinear3d", "aten::upsample_nearest1d", "aten::upsample_nearest2d",
                "aten::upsample_nearest3d", "aten::_upsample_nearest_exact1d", "aten::_upsample_nearest_exact2d",
                "aten::_upsample_nearest_exact3d")  # fmt: skip
_STATISTICS = ("aten::var", "aten::std", "aten::var_mean", "aten::std_mean")


def _refused_types(n: Node) -> str | None:
    """Why eager does not compute this with operands of these types, or None."""
    name = n.target._schema.name
    types = [x.val.dtype if isinstance(x, Node) and isinstance(x.val, Tensor) else None for x in n.args]
    given = [t for t in types[: 3 if name.endswith("attention") else None] if t is not None]  # its mask may be of bools
    kinds = {t.is_floating_point for t in given}
    text = ", ".join(sorted({str(t) for t in given}))
    floats = {i.val.dtype for i in n.inputs() if isinstance(i.val, Tensor) and i.val.dtype.is_floating_point}
    mixed = len(floats) > 1 and not n.autocast
    if mixed and (name in _PRODUCTS or name in _NORMS and floats not in ({d, F32} for d in _LOW)):
        return f"{name} of operands of different types: {', '.join(sorted(map(str, floats)))}"
    if name in _PRODUCTS and (len(kinds) > 1 or kinds == {False} and len(set(given)) > 1):
        return f"{name} of operands of different types: {text}"
    if name in _ALIKE and not n.autocast and types[_ALIKE[name][0]] != types[_ALIKE[name][1]]:
        return f"{name} of operands of different types: {text}"
    first, other = _GIVEN_ALIKE.get(name, (0, len(types)))
    if other < len(types) and types[other] not in (None, types[first]) and not n.autocast:
        return f"{name} of operands of different types: {text}"
    if name in _STATISTICS and given and not given[0].is_floating_point:
        return f"{name} of {given[0]}"
    none_of = (torch.bool, torch.int32, I64) if name in _FLOATS_ONLY else (torch.bool,) if name in _NO_BOOL else ()
    none_of += (torch.uint8,) * name.endswith(("linear1d", "trilinear3d"))
    if types[:1] and types[0] in none_of:
        return f"{name} of {types[0]}"
    if name == "aten::cross_entropy_loss" and types[1] is not None and not types[1].is_floating_point:
        return None if types[1] in (I64, torch.uint8) else f"{name} with labels of {types[1]}"
    if name == "aten::pow" and isinstance(n.args[1], int) and n.args[1] < 0 and types[0] is not None:
        return None if types[0].is_floating_point else "negative integer powers of integers"
    return _refused_ones(n)


def _refused_sizes(n: Node) -> str | None:
    """The same for sizes: what eager computes in place, where a result of other sizes has none; and what a trace gives
    another size than eager."""
    name = n.target._schema.name.removeprefix("aten::")
    if name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
        given = n.args[2:4] if name.endswith("logits") else n.args[2:3]
        if any(isinstance(w, Node) and _widens(w.val.shape, n.args[0].val.shape) for w in given):
            return f"{name} with a weight of more elements than its input"
    if name == "scaled_dot_product_attention":
        scores = max(x.val.dim() for x in n.args[:2])
        if any(isinstance(mask, Node) and mask.val.dim() > scores for mask in n.args[3:4]):
            return f"{name} with a mask of more axes than its scores"
    if "upsample_" in name and isinstance(n.val, Tensor) and 0 in [d for d in n.val.shape if isinstance(d, int)]:
        return f"{name} to a size of 0"
    if name == "multi_margin_loss" and n.args[0].val.dim() == 1 and bound(n)[-1] == 0:
        return f"{name} of one row without a reduction, whose result has another shape in a trace"
    return None


def _widens(w: Sequence[Any], x: Sequence[Any]) -> bool:
    """Does broadcasting with w give x other sizes?"""
    return len(w) > len(x) or any(
        isinstance(a, int) and isinstance(b, int) and a != 1 and b == 1
        for a, b in zip(reversed(w), reversed(x), strict=False)
    )


# in the manner of those that PyTorch calls pointwise
_AS_POINTWISE = frozenset(f"aten::{n}" for n in ("rsub", "subtract", "multiply", "divide"))


def _refused_ones(n: Node) -> str | None:
    """The same of a pointwise operator, of which PyTorch has the last word: on stand-ins it does not look at all that
    its kernels do (bools are not subtracted)."""
    target = n.target
    if torch.Tag.pointwise not in target.tags and target._schema.name not in _AS_POINTWISE or draws(n):
        return None
    on = {i.val.device.type for i in n.inputs() if isinstance(i.val, Tensor)}
    bools = any(isinstance(i.val, Tensor) and i.val.dtype is torch.bool for i in n.inputs())
    if not on or n.autocast and not bools:  # autocast converts the others
        return None
    given = tuple([_like(a) for a in n.args]), tuple([(k, _like(a)) for k, a in n.kwargs.items()])
    return None if "" in (*given[0], *dict(given[1]).values()) else _tried(target, on == {"cpu"}, *given)


def _like(a: Any) -> Any:
    """An operand as a key. "": of a kind that this does not know."""
    a = a.val if isinstance(a, Node) else a
    if isinstance(a, Tensor):
        return a.dtype, a.dim() > 0
    if isinstance(a, (torch.SymInt, torch.SymFloat)):
        return (int, 1) if isinstance(a, torch.SymInt) else (float, 1.0)
    return (type(a), a) if a is None or type(a) in (bool, int, float, complex, str) else ""


@functools.cache
def _tried(target: Any, on_cpu: bool, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str | None:
    def made(like: tuple[Any, Any]) -> Any:
        kind, value = like
        return torch.ones([1] * value, dtype=kind, device="cpu") if isinstance(kind, torch.dtype) else value

    try:
        with torch.no_grad(), autocast.off():
            target(*[made(a) for a in args], **{k: made(a) for k, a in kwargs})
    except NotImplementedError as error:  # other devices have kernels of their own
        return str(error).splitlines()[0] if on_cpu else None
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
