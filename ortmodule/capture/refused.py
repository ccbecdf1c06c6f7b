"""What forward may ask of PyTorch that a graph cannot repeat: refused by name, so that the module that asks stays in
PyTorch.

A trace answers such questions once, and on stand-ins: a hook on an intermediate tensor would be put on a tensor of the
trace and never run, a seed would be set when the model is captured and not again, `weight.grad is None` would hold for
ever. torch.export notices none of it. So while the user's forward is traced
  - a TorchFunctionMode looks at methods and attributes of tensors that code outside of PyTorch calls or reads. What an
    argument is asked for (its strides) is noted, to be asked again at every call (facts.py); what eager PyTorch answers
    by giving the tensor itself (dropout that drops nothing, contiguous) gives it here, too;
  - attributes that are no tensor's (`x.tag`) are looked for on the argument behind the stand-in, and noted;
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
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import torch_private as private
from ..patches import Patch, here, only_here, replaced
from .facts import ABSENT, Facts


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
    **{_getter(name): (f"forward reads Tensor.{name}: {_MOMENT}", True)
       for name in ("grad_fn", "_base", "output_nr", "retains_grad", "_cdata", "_backward_hooks")},
    **{getattr(Tensor, name): (f"forward calls Tensor.{name}: {_MOMENT}", True)
       for name in ("_is_view", "is_shared", "share_memory_", "is_set_to", "is_inference", "is_pinned", "storage",
                    "untyped_storage", "_typed_storage", "__dir__")},
    torch.is_inference: (f"forward calls torch.is_inference: {_MOMENT}", True),
}
_LAYOUT = frozenset((Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset, Tensor.dim_order))
# what returns its operand or a copy as the strides have it
_BY_LAYOUT = frozenset((Tensor.contiguous, Tensor.to, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten,
                        Tensor.ravel, torch.ravel))
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))


class Asked(TorchFunctionMode):
    """given: the stand-ins of arguments (numbers) and of the module's tensors (names), by their id. real: the tensors
    behind them. Without them nothing is noted."""

    def __init__(self, is_user_file: Callable[[str], bool], given: dict[int, int | str] | None = None,
                 real: dict[int | str, Tensor] | None = None) -> None:  # fmt: skip
        super().__init__()
        self._is_user_file = is_user_file
        self._given = given or {}
        self._real = real
        self.facts = Facts()
        self.refusal: NotRepeatable | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refused = _REFUSED.get(func)
        if refused is not None and self._is_user_file(_asking(1)):
            self.refuse(*refused)
        out = func(*args, **kwargs)
        if func in _LAYOUT:
            if self._real is not None and self._is_user_file(_asking(1)):
                self._note_layout(func, args[0], args[1:], kwargs, out)
        elif self._real is not None and (isinstance(out, Tensor) or type(out) in (tuple, list)):
            made = itself(func, args, kwargs, out)
            self.facts.by_layout |= func in _BY_LAYOUT
            return made
        return out

    def refuse(self, reason: str, whole: bool = False) -> None:
        """Forward may catch what is raised here: it is raised again behind it."""
        self.refusal = self.refusal or NotRepeatable(reason, whole)
        raise NotRepeatable(reason, whole)

    def _leaves(self) -> list[int]:
        assert self._real is not None
        return [i for i in self._real if isinstance(i, int)]

    def _note_layout(self, func: Any, t: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], told: Any) -> None:
        where = self._given.get(id(t))
        if isinstance(where, int):
            self.facts.answers.setdefault((where, func, repr((args, kwargs))), (args, kwargs, told))
        elif where is None:  # strides go from operands to results
            self.facts.layouts.update(self._leaves())
            if func is Tensor.storage_offset:
                self.facts.offsets.update(self._leaves())
        else:
            assert self._real is not None
            self._again(where, functools.partial(_call, func, args, kwargs), f"{func.__name__} of {where}")

    def _again(self, where: str, ask: Callable[[Tensor], Any], what: str) -> None:
        """A question about a tensor of the module's: compared at every step with the rest of the Python state."""
        scope = here()
        assert self._real is not None
        if scope is not None and scope.watch is not None:
            scope.watch.ask_tensor(where, self._real[where], ask, what)

    def missing(self, t: Tensor, name: str) -> Any:
        """An attribute that no tensor has, which the user's code looks for."""
        where = self._given.get(id(t))
        assert self._real is not None
        if where is None:
            for i in self._leaves():  # in PyTorch it may be an argument itself
                if name in vars(self._real[i]):
                    self.refuse(f"forward reads the attribute {name} of a tensor", True)
                self.facts.attributes.setdefault((i, name), ABSENT)
            return ABSENT
        value = vars(self._real[where]).get(name, ABSENT)
        if value is not ABSENT and type(value) not in _PLAIN:
            self.refuse(f"forward reads the attribute {name} of a tensor", True)
        if isinstance(where, int):
            self.facts.attributes.setdefault((where, name), value)
        else:
            self._again(where, functools.partial(_attribute, name), f"the attribute {name} of {where}")
        return value

    def asks_class(self, t: Any) -> None:
        if isinstance(t, Tensor) and isinstance(self._given.get(id(t)), int):
            self.facts.classes = True

    def as_key(self, t: Any) -> None:
        """A tensor as a key is told by its identity; what outlives the call may hold an argument's."""
        if id(t) in self._given:
            self.refuse("forward uses an argument or a tensor of the module as a key, or takes its hash", True)
        self.facts.identity = True


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor) -> Any:
    return func(t, *args, **kwargs)


def _attribute(name: str, t: Tensor) -> Any:
    return vars(t).get(name, ABSENT)


def _asking(above: int) -> str:
    """File of the code that called into the caller's caller; torch's own Python wrapper of a method does not count."""
    frame = sys._getframe(above + 1)
    own = frame.f_globals.get("__name__")
    while frame.f_back is not None and own in ("torch._tensor", "torch.overrides", __name__):
        frame = frame.f_back
        own = frame.f_globals.get("__name__")
    return frame.f_code.co_filename


# --- results that are an operand ------------------------------------------------------------------


def _bare(x: Any, made: dict[int, Tensor]) -> Any:
    """The argument of a call with tensors without values. made: of which tensor's id."""
    if isinstance(x, Tensor):
        if id(x) not in made:
            sizes, strides = [[int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in of]
                              for of in (x.shape, x.stride())]  # fmt: skip
            made[id(x)] = torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta",
                                              requires_grad=x.requires_grad)  # fmt: skip
        return made[id(x)]
    if type(x) in (tuple, list):
        return type(x)([_bare(y, made) for y in x])
    return int(x.node.hint) if isinstance(x, torch.SymInt) else x


def _operands(x: Any) -> Iterator[Tensor]:
    for y in x:
        if isinstance(y, Tensor):
            yield y
        elif type(y) in (tuple, list):
            yield from _operands(y)


def itself(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """What func gives, with operands in the place of results that PyTorch does not make anew: a trace has a new object
    for each. PyTorch tells, on tensors without values."""
    outs = [out] if isinstance(out, Tensor) else out
    operands = list(_operands((*args, *kwargs.values())))
    ids = {id(t) for t in operands}
    with private.NoTorchFunction():
        if "dropout" not in getattr(func, "__name__", ""):
            memory = {private.storage_of(t) for t in operands if t.layout is torch.strided}
            if not memory or not any(isinstance(y, Tensor) and id(y) not in ids and y.layout is torch.strided
                                     and private.storage_of(y) in memory for y in outs):  # fmt: skip
                return out
        made: dict[int, Tensor] = {}
        try:
            with private.without_modes(), private.no_python_dispatcher(), torch.autocast("cpu", enabled=False):
                again = func(*_bare(args, made), **{k: _bare(v, made) for k, v in kwargs.items()})
        except Exception:  # what cannot be told is a new object
            return out
    of = {id(bare): t for t in operands if (bare := made.get(id(t))) is not None}
    if isinstance(out, Tensor):
        return of.get(id(again), out)
    if type(again) in (tuple, list) and len(again) == len(out):
        return type(out)([of.get(id(a), y) for a, y in zip(again, out, strict=True)])
    return out


# --- attributes of stand-ins ----------------------------------------------------------------------


def _attributes(asked: Asked) -> list[Patch]:
    """What the user's code looks for on a stand-in and does not find, and what it assigns there."""
    put = private.FakeTensor.__setattr__

    me = threading.get_ident()

    def users(frame: FrameType) -> bool:
        return threading.get_ident() == me and asked._is_user_file(frame.f_code.co_filename)

    def missing(self: Tensor, name: str) -> Any:
        value = ABSENT
        if name[:2] != "__" and users(sys._getframe(1)):
            value = asked.missing(self, name)
        if value is ABSENT:
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return value

    def assign(self: Tensor, name: str, value: Any) -> None:
        if not hasattr(Tensor, name) and users(sys._getframe(1)):
            asked.refuse(f"forward assigns the attribute {name} of a tensor: it would stand on one of the trace", True)
        put(self, name, value)

    return [Patch(private.FakeTensor, "__getattr__", missing), Patch(private.FakeTensor, "__setattr__", assign)]


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
def refusing(is_user_file: Callable[[str], bool], given: dict[int, int | str] | None = None,
             real: dict[int | str, Tensor] | None = None) -> Iterator[Asked]:  # fmt: skip
    """Around the user's forward while it is traced. is_user_file: neither PyTorch's nor this package's. given, real: of
    Asked."""
    encode = nn.TransformerEncoder.forward
    asked, scope = Asked(is_user_file, given, real), here()
    if scope is not None and scope.watch is not None and real is not None:
        scope.watch.asked = asked
    with replaced(
        Patch(private.random, "default_generator", _Generator(private.random.default_generator)),
        Patch(nn.TransformerEncoder, "forward", only_here(_encoder(encode), encode)),
        *_honest_flags(),
        *(_attributes(asked) if real is not None else ()),
    ), asked:  # fmt: skip
        yield asked
    if asked.refusal is not None:
        raise asked.refusal
