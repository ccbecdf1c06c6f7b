"""What forward may ask of PyTorch that a graph cannot repeat: refused by name, so that the module that asks stays in
PyTorch.

A trace answers such questions once, and on stand-ins: a hook on an intermediate tensor would be put on a tensor of the
trace and never run, a seed would be set when the model is captured and not again, `weight.grad is None` would hold for
ever. torch.export notices none of it. So while the user's forward is traced
  - a TorchFunctionMode looks at methods and attributes of tensors that code outside of PyTorch calls or reads;
  - torch's generator as its functions see it (manual_seed, fork_rng, set_rng_state, however they were imported) refuses
    a new state;
  - `torch.compiler.is_compiling()` and `is_exporting()` answer False to the user's own code, as in a call without
    ORTModule. Installed packages, which mean the same by both answers, hear True: what they do then can be traced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import torch_private as private
from ..patches import Patch, only_here, replaced


class NotRepeatable(Exception):
    """Raised in the line of the user's forward that asks; the capture turns it into a CaptureError with module, file
    and line. whole: a submodule kept in PyTorch could not answer either, since it is called with tensors of its own;
    only the whole module can."""

    def __init__(self, reason: str, whole: bool = False) -> None:
        super().__init__(reason)
        self.whole = whole


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_HOOK = "a hook on a tensor made in forward would not run"
_MOMENT = "the answer belongs to one moment, a graph is made once"
_REFUSED: dict[Any, tuple[str, bool]] = {  # reason; whether only the whole module can answer
    Tensor.register_hook: (f"forward calls Tensor.register_hook: {_HOOK}", False),
    Tensor.register_post_accumulate_grad_hook: (
        f"forward calls Tensor.register_post_accumulate_grad_hook: {_HOOK}",
        True,
    ),
    Tensor.retain_grad: ("forward calls Tensor.retain_grad: the tensor would be one of the trace", False),
    torch.autograd.grad: ("forward calls torch.autograd.grad: what it differentiates is a trace", True),
    Tensor.backward: ("forward calls backward: what it differentiates is a trace", True),
    Tensor.data_ptr: (f"forward calls Tensor.data_ptr: {_MOMENT}", True),
    _getter("grad"): (f"forward reads Tensor.grad: {_MOMENT}", True),
    _getter("_version"): (f"forward reads Tensor._version: {_MOMENT}", True),
    _getter("is_leaf"): (f"forward reads Tensor.is_leaf: {_MOMENT}", True),
}


class _Asked(TorchFunctionMode):
    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_user_file = is_user_file

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refused = _REFUSED.get(func)
        if refused is not None and self._is_user_file(_asking(1)):
            raise NotRepeatable(*refused)
        return func(*args, **(kwargs or {}))


def _asking(above: int) -> str:
    """File of the code that called into the caller's caller; torch's own Python wrapper of a method does not count."""
    frame = sys._getframe(above + 1)
    own = frame.f_globals.get("__name__")
    while frame.f_back is not None and own in ("torch._tensor", "torch.overrides", __name__):
        frame = frame.f_back
        own = frame.f_globals.get("__name__")
    return frame.f_code.co_filename


# --- the seed -------------------------------------------------------------------------------------


class _Generator:
    """torch's default generator in the eyes of torch.random: its state can be read, not set, by the thread that
    captures."""

    def __init__(self, inner: torch.Generator) -> None:
        self._inner = inner
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == self._thread:
            raise NotRepeatable(
                "forward sets the state of torch's random generator (manual_seed, seed, set_rng_state or fork_rng)"
            )
        return getattr(self._inner, name)


# --- whether this is a trace ----------------------------------------------------------------------

_INSTALLED = tuple(
    {os.path.realpath(path) + os.sep for name in ("purelib", "platlib") if (path := sysconfig.get_paths().get(name))}
    | {os.path.dirname(os.path.dirname(os.path.realpath(torch.__file__))) + os.sep}
    | {os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep}
)


@functools.cache
def _installed(path: str) -> bool:
    return os.path.realpath(path).startswith(_INSTALLED)


def _answer_here(flag: str) -> bool:
    """The flag of torch.compiler for installed packages, False for the user's own code."""
    frame = sys._getframe(2)  # below: this, the asked function
    return bool(getattr(torch.compiler, flag)) and _installed(frame.f_code.co_filename)


def _is_compiling() -> bool:
    from ortmodule.capture.refused import _answer_here

    return _answer_here("_is_compiling_flag")


def _is_exporting() -> bool:
    from ortmodule.capture.refused import _answer_here

    return _answer_here("_is_exporting_flag")


def _honest_flags() -> list[Patch]:
    """Gives the two functions other code, so that references taken earlier (`from torch.compiler import is_compiling`)
    answer so, too. The code finds its function by an import: it runs as torch's."""
    return [Patch(torch.compiler.is_compiling, "__code__", _is_compiling.__code__),
            Patch(torch.compiler.is_exporting, "__code__", _is_exporting.__code__)]


# --- a module whose eval mode computes something else ----------------------------------------------


def _encoder(original: Callable[..., Any]) -> Callable[..., Any]:
    """nn.TransformerEncoder.forward: in eval mode without gradients PyTorch drops padding and returns zeros in its
    place, if the mask's values allow it. A trace takes the other way."""

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if (
            src_key_padding_mask is not None
            and mask is None
            and getattr(self, "use_nested_tensor", False)
            and not self.layers[0].training
            and torch.backends.mha.get_fastpath_enabled()
            and not torch.is_autocast_enabled()
            and not (torch.is_grad_enabled() and any(p.requires_grad for p in self.layers[0].parameters()))
        ):
            raise NotRepeatable(
                "nn.TransformerEncoder in eval mode drops padding (nested tensors) as the mask's values allow; "
                "enable_nested_tensor=False keeps it in the graph"
            )
        return original(self, src, mask, src_key_padding_mask, *args, **kwargs)

    return forward


@contextlib.contextmanager
def refusing(is_user_file: Callable[[str], bool]) -> Iterator[None]:
    """Around the user's forward while it is traced. is_user_file: neither PyTorch's nor this package's."""
    encode = nn.TransformerEncoder.forward
    with replaced(
        Patch(private.random, "default_generator", _Generator(private.random.default_generator)),
        Patch(nn.TransformerEncoder, "forward", only_here(_encoder(encode), encode)),
        *_honest_flags(),
    ), _Asked(is_user_file):  # fmt: skip
        yield
