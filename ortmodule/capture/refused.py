"""What forward may ask of PyTorch that a graph cannot repeat: refused by name, so that the module that asks stays in
PyTorch.

A trace answers such questions once, and on stand-ins: a hook on an intermediate tensor would be put on a tensor of the
trace and never run, a seed would be set when the model is captured and not again, `weight.grad is None` would hold for
ever. torch.export notices none of it. So while the user's forward is traced
  - a TorchFunctionMode looks at methods and attributes of tensors that code outside of PyTorch calls or reads, or has
    PyTorch call for it (zero_grad, an optimizer). What an argument is asked for (its strides) is noted, to be asked
    again at every call (facts.py); what eager PyTorch answers by giving the tensor itself (dropout that drops nothing,
    contiguous) gives it here, too;
  - attributes that are no tensor's (`x.tag`) are looked for on the argument behind the stand-in, and noted;
  - inference mode, and a user's own saved_tensors_hooks and dispatch modes, are refused at their entry;
  - collectives are refused before they are sent: a rank that captures alone would send one that no other rank awaits;
  - torch's generator as its functions see it (manual_seed, fork_rng, set_rng_state, however they were imported) refuses
    a new state;
  - `torch.compiler.is_compiling()` and `is_exporting()` answer False to the user's own code, as in a call without
    ORTModule. Installed packages, which mean the same by both answers, hear True: what they do then can be traced
    (False where it would be a detour around an operator that graphs here have).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import autocast
from .. import torch_private as private
from ..errors import TimeUp
from ..frames import OWN_DIR, TORCH_DIR, is_user_file, outwards
from ..patches import Patch, here, only_here, replaced
from . import layouts
from .facts import ABSENT, Facts
from .not_repeatable import NotRepeatable, in_try, note_caught
from .sizes_asked import of_numbers


def _getter(name: str, access: str = "__get__") -> Any:
    return getattr(getattr(Tensor, name), access)


def _changes_flag(tensor: Tensor, wanted: Any = True) -> bool:
    return tensor.requires_grad != bool(wanted)


def _has_history(t: Any) -> bool:
    """Neither a stand-in nor a leaf: an edit in place in a trace would stay in its history."""
    of = t._base if isinstance(t, Tensor) and t._is_view() else t
    return type(of) is Tensor and of.grad_fn is not None


_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(["__setitem__", *[f"__i{op}__" for op in _OPERATORS]])


def _edits(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _no_float(tensor: Tensor) -> bool:
    """It never has a gradient, so never a grad_fn."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


_HOOK = "a hook on a tensor made in forward would not run"
_MOMENT = "the answer belongs to one moment, a graph is made once"
_GRAD = "a graph leaves the gradients of before a call alone"
_FLAG = ("forward changes requires_grad of a tensor that was there before", True)
_HISTORY = ("forward edits a tensor that an earlier call has made part of autograd's graph", True)
_REFUSED: dict[Any, tuple[str, bool]] = {  # reason; whether only the whole module can answer
    Tensor.register_hook: (f"forward calls Tensor.register_hook: {_HOOK}", False),
    Tensor.register_post_accumulate_grad_hook: (
        f"forward calls Tensor.register_post_accumulate_grad_hook: {_HOOK}",
        True,
    ),
    Tensor.retain_grad: ("forward calls Tensor.retain_grad: the tensor would be one of the trace", False),
    torch.autograd.grad: ("forward calls torch.autograd.grad: what it differentiates is a trace", True),
    Tensor.backward: ("forward calls backward: what it differentiates is a trace", True),
    torch.autograd.backward: ("forward calls backward: what it differentiates is a trace", True),
    Tensor.data_ptr: (f"forward calls Tensor.data_ptr: {_MOMENT}", True),
    _getter("grad"): (f"forward reads Tensor.grad: {_MOMENT}", True),
    _getter("grad", "__set__"): (f"forward assigns Tensor.grad: {_GRAD}", True),
    _getter("grad", "__delete__"): (f"forward deletes Tensor.grad: {_GRAD}", True),
    _getter("data", "__set__"): ("forward assigns Tensor.data: a trace does not see what a tensor becomes", True),
    Tensor.requires_grad_: _FLAG,
    _getter("requires_grad", "__set__"): _FLAG,
    _getter("_version"): (f"forward reads Tensor._version: {_MOMENT}", True),
    _getter("is_leaf"): (f"forward reads Tensor.is_leaf: {_MOMENT}", True),
}
# asked by the user's code; PyTorch's own asks for other reasons
_OF_A_MOMENT: dict[Any, tuple[str, bool]] = {
    **{_getter(name): (f"forward reads Tensor.{name}: {_MOMENT}", True)
       for name in ("grad_fn", "_base", "output_nr", "retains_grad", "_cdata", "_backward_hooks")},
    **{getattr(Tensor, name): (f"forward calls Tensor.{name}: {_MOMENT}", True)
       for name in ("_is_view", "is_shared", "share_memory_", "is_set_to", "is_inference", "is_pinned", "storage",
                    "untyped_storage", "_typed_storage", "__dir__")},
    torch.is_inference: (f"forward calls torch.is_inference: {_MOMENT}", True),
}
_GRAD_FN = _getter("grad_fn")
_DATA = _getter("data")
_LAYOUT = frozenset((Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset, Tensor.dim_order))
# what returns its operand or a copy as the strides have it
_BY_LAYOUT = frozenset((Tensor.contiguous, Tensor.to, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten,
                        Tensor.ravel, torch.ravel))
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))


# Files of PyTorch that do these things because the code that calls them wants it
_FOR_OTHERS = tuple(os.path.join(TORCH_DIR, *p) for p in (("nn", "modules", "module.py"), ("nn", "utils"), ("optim",),
                                                          ("autograd",)))  # fmt: skip


_GAUSSIAN = nn.functional.gaussian_nll_loss


def _gaussian_nll_loss(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6,
                       reduction: str = "mean") -> Any:  # fmt: skip
    """PyTorch clamps the variance under no_grad. Inside one of torch's functions the trace hears nothing of a change of
    the grad mode: it is made out here, where it does, and changes nothing there. (The one function of
    torch.nn.functional with such a block.)"""
    if isinstance(var, Tensor) and not torch.any(var < 0):  # that is an error of PyTorch's
        var = var.clone()
        with torch.no_grad():
            var.clamp_(min=eps)
    return _GAUSSIAN(input, target, var, full, eps, reduction)


_L1 = nn.functional.l1_loss
# its own code, which asks nobody else first
_l1_loss = FunctionType(_L1.__code__, {**vars(nn.functional), "has_torch_function_variadic": lambda *_: False},
                        _L1.__name__, _L1.__defaults__)  # fmt: skip


def _l1_weight(frame: FrameType | None) -> Any:
    """The weight that l1_loss was called with, of which it tells modes nothing."""
    while frame is not None and frame.f_code is not _L1.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


class Asked(TorchFunctionMode):
    """given: the stand-ins of arguments (numbers) and of the module's tensors (names), by their id: what forward has
    not made itself. None: that was asked at the capture. real: the tensors behind them; without, nothing is noted."""

    def __init__(self, is_user_file: Callable[[str], bool], given: dict[int, int | str] | None,
                 real: dict[int | str, Tensor] | None) -> None:  # fmt: skip
        super().__init__()
        self._is_user_file = is_user_file
        self._given = given
        self._real = real
        self.facts = Facts()
        self.tried: set[tuple[str, int]] = set()  # files and lines that call torch in a `try`
        self.made: list[Tensor] = []  # what such calls have returned
        self.leaves: list[Tensor] = []  # that forward has made
        scope = here()
        self._deadline = math.inf if scope is None else scope.deadline

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if perf_counter() > self._deadline:
            raise TimeUp
        kwargs = kwargs or {}
        by = _asking(1)
        file = by.f_code.co_filename
        user, refused = self._is_user_file(file), _REFUSED.get(func, _REFUSED.get(inspect.unwrap(func)))
        if self._real is not None and args and _has_history(args[0]) and _edits(func):
            refused = _HISTORY
        run = _gaussian_nll_loss if func is _GAUSSIAN else func
        if func is _L1 and (weight := _l1_weight(sys._getframe(1))) is not None:
            run, kwargs = _l1_loss, {**kwargs, "weight": weight}
        if user and refused is None and not (func == _GRAD_FN and _no_float(args[0])):
            refused = _OF_A_MOMENT.get(func)
        if not user and (refused is None or refused is not _HISTORY and not file.startswith(_FOR_OTHERS)):
            return self._noted(func, args, kwargs, run(*args, **kwargs), False)
        try:
            changes = refused is _FLAG and _changes_flag(*args, **kwargs)
            if refused is not None and (refused is not _FLAG or changes and self._was_there(args[0])):
                raise NotRepeatable(*refused)
            if changes:
                self.leaves.append(args[0])
            out = _behind(args[0]) if user and func == _DATA else run(*args, **kwargs)
            if user and in_try(by) is not None:
                self.tried.add((file, by.f_lineno))
                self.made += [t for t in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(t, Tensor)]
        except Exception as error:
            if user:
                note_caught(error, by)
            raise
        return self._noted(func, args, kwargs, out, user)

    def _was_there(self, tensor: Tensor) -> bool:
        """What forward has made is a stand-in that was none of the given ones. The result of such a leaf tells by its
        own flag (ladder.py)."""
        return self._given is not None and (id(tensor) in self._given or type(tensor) in (Tensor, nn.Parameter))

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, user: bool) -> Any:
        """The result as forward is given it."""
        if self._real is None:
            return out
        if func in _LAYOUT:
            if user:
                self._note_layout(func, args[0], args[1:], kwargs, out)
        elif isinstance(out, Tensor) or type(out) in (tuple, list):
            self.facts.by_layout |= func in _BY_LAYOUT
            if func is Tensor.contiguous and layouts.depends(args[0]) and (
                    out is args[0] or _shares([args[0]], [out])):  # fmt: skip
                self.facts.uncopied.append(args[0])
            return itself(func, args, kwargs, out)
        return out

    def end(self) -> None:
        self._real = None
        self._given = None

    def refuse(self, reason: str, whole: bool = False) -> None:
        raise _noted(NotRepeatable(reason, whole))

    def _known(self, t: Any) -> int | str | None:
        return (self._given or {}).get(id(t))

    def _leaves(self) -> list[int]:
        assert self._real is not None
        return [i for i in self._real if isinstance(i, int)]

    def _note_layout(self, func: Any, t: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], told: Any) -> None:
        where = self._known(t)
        if isinstance(where, int):
            self.facts.answers.setdefault((where, func, repr((args, kwargs))), (args, kwargs, told))
        elif where is None:  # strides go from operands to results
            self.facts.looks = True
            if layouts.depends(t):  # it may be known, without a condition
                layouts.pin(t)
                _ = [n == 1 for n in t.shape if (args or kwargs) and bool(n == 1)]
            self.facts.layouts.update(self._leaves())
            if func is Tensor.storage_offset:
                self.facts.offsets.update(self._leaves())
            if func is Tensor.stride:  # a number that forward goes on with
                for i in self._leaves():
                    self.facts.answers.setdefault((i, func, repr(((), {}))), ((), {}, None))
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
        where = self._known(t)
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
        if isinstance(t, Tensor) and isinstance(self._known(t), int):
            self.facts.classes = True

    def as_key(self, t: Any) -> None:
        """A tensor as a key is told by its identity; what outlives the call may hold an argument's."""
        if self._known(t) is not None:
            self.refuse("forward uses an argument or a tensor of the module as a key, or takes its hash", True)
        self.facts.identity = True


def _behind(t: Tensor) -> Tensor:
    """Tensor.data, of which the export makes a tensor that has nothing to do with this one. An alias below a detach is
    made by nothing else: by it the conversion knows an edit that autograd would not see (functional.py)."""
    alias: Tensor = torch.ops.aten.alias.default(t.detach())
    return alias


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor) -> Any:
    return func(t, *args, **kwargs)


def _attribute(name: str, t: Tensor) -> Any:
    return vars(t).get(name, ABSENT)


_WRAPPERS = frozenset(("torch._tensor", "torch.overrides", __name__, here.__module__, f"{__package__}.sizes_asked",
                       f"{__package__}.tracing"))


def _asking(above: int) -> FrameType:
    """The code that called into the caller's caller; torch's own Python wrapper of a method does not count, nor do
    those around a method for the time of a trace."""
    frame = sys._getframe(above + 1)
    own = frame.f_globals.get("__name__")
    while frame.f_back is not None and own in _WRAPPERS:
        frame = frame.f_back
        own = frame.f_globals.get("__name__")
    return frame


def _noted(error: NotRepeatable) -> NotRepeatable:
    note_caught(error, next((f for f in outwards(sys._getframe(1)) if is_user_file(f.f_code.co_filename)),
                            sys._getframe(1)))
    return error


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
    if type(x) in (tuple, list, torch.Size):
        return (list if type(x) is list else tuple)([_bare(y, made) for y in x])
    if type(x) is slice:
        return slice(_bare(x.start, made), _bare(x.stop, made), _bare(x.step, made))
    return x.node.hint if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else x


def _operands(x: Any) -> Iterator[Tensor]:
    for y in x:
        if isinstance(y, Tensor):
            yield y
        elif type(y) in (tuple, list):
            yield from _operands(y)


def _shares(operands: list[Tensor], outs: Any) -> bool:
    """Is there a new object over the memory of an operand?"""
    ids = {id(t) for t in operands}
    memory = {private.storage_of(t) for t in operands if t.layout is torch.strided}
    return any(isinstance(y, Tensor) and id(y) not in ids and y.layout is torch.strided
               and private.storage_of(y) in memory for y in outs)  # fmt: skip


def itself(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """What func gives, with operands in the place of results that PyTorch does not make anew: a trace has a new object
    for each. PyTorch tells, on tensors without values."""
    outs = [out] if isinstance(out, Tensor) else out
    operands = list(_operands((*args, *kwargs.values())))
    made: dict[int, Tensor] = {}
    try:
        with private.NoTorchFunction() if private.has("NoTorchFunction") else contextlib.nullcontext():
            if "dropout" not in getattr(func, "__name__", "") and not _shares(operands, outs):
                return out
            with private.without_modes(), private.no_python_dispatcher(), autocast.off():
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
            raise _noted(NotRepeatable(
                "forward sets the state of torch's random generator (manual_seed, seed, set_rng_state or fork_rng)"
            ))
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


# A function that names one of these asks in order not to call it for targets that lack it, and computes the same in
# many more steps (a triangular system by a loop over its rows). Graphs here have it.
_NOT_EXPORTED = frozenset(("solve_triangular",))


def _answer_here(flag: str) -> bool:
    """The flag of torch.compiler for installed packages, False for the user's own code and for _NOT_EXPORTED."""
    frame: FrameType | None = sys._getframe(2)  # below: this, the asked function
    while frame and frame.f_code.co_name == "is_compiling" and frame.f_code.co_filename.startswith(TORCH_DIR):
        frame = frame.f_back  # older names of the same question
    assert frame is not None
    if flag == "_is_exporting_flag":
        asks = frame.f_back if frame.f_code.co_name == "is_torchdynamo_exporting" else frame  # transformers' name of it
        if asks and not _NOT_EXPORTED.isdisjoint(asks.f_code.co_names):
            return False
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


# --- other processes ------------------------------------------------------------------------------

_TALK = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "send", "recv",
         "recv_anysource", "barrier", "monitored_barrier", "allgather", "_allgather_base", "allgather_coalesced",
         "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "reduce_scatter",
         "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
         "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single")  # fmt: skip
_TALKING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


def talks(target: Any) -> NotRepeatable | None:
    """The error for an operator that communicates with other processes; None for others."""
    namespace = getattr(target, "namespace", "")
    return _talk(target.__name__.partition(".")[0]) if namespace in _TALKING else None


def _talk(name: str) -> NotRepeatable:
    return NotRepeatable(
        f"forward communicates with other processes ({name}), which run captures of their own when they need one: wrap "
        "the parts of the model that do not",
        True,
    )


def _processes() -> list[Patch]:
    group = getattr(torch.distributed, "ProcessGroup", None) if torch.distributed.is_available() else None

    def refused(name: str) -> Callable[..., Any]:
        def talk(*args: Any, **kwargs: Any) -> Any:
            raise _noted(_talk(name))

        return talk

    names = [name for name in _TALK if hasattr(group, name)]
    return [Patch(group, name, only_here(refused(name), getattr(group, name))) for name in names]


class SilentProcesses(private.DispatchMode):  # type: ignore[misc]
    """Around a run of forward on values that is none of the user's: it sends nothing."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (error := talks(func)) is not None:
            raise _noted(error)
        return func(*args, **(kwargs or {}))


# --- a module whose eval mode computes something else ----------------------------------------------


def _one_kernel(layer: Any, needed: Iterable[Tensor]) -> bool:
    """May PyTorch compute an encoder's layer by one kernel? In eval mode, where none of these needs a gradient, and not
    under CUDA's autocast, whatever the device."""
    return bool(
        not layer.training
        and torch.backends.mha.get_fastpath_enabled()
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in needed))
    )


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
            and _one_kernel(self.layers[0], self.layers[0].parameters())
        ):
            raise _noted(NotRepeatable(
                "nn.TransformerEncoder in eval mode drops padding (nested tensors) as the mask's values allow; "
                "enable_nested_tensor=False keeps it in the graph"
            ))
        return original(self, src, mask, src_key_padding_mask, *args, **kwargs)

    return forward


def _encoder_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """nn.TransformerEncoderLayer.forward: in eval mode without gradients one kernel computes all of it, under the CPU's
    autocast in its type. A trace takes the other way, which ends in that of the norm."""

    def forward(self: Any, src: Tensor, *args: Any, **kwargs: Any) -> Any:
        found, attn = original(self, src, *args, **kwargs), self.self_attn
        if (
            torch.is_autocast_enabled("cpu")
            and src.dim() == 3
            and attn.batch_first
            and attn.in_proj_bias is not None
            and attn._qkv_same_embed_dim
            and self.activation_relu_or_gelu
            and self.norm1.eps == self.norm2.eps
            and attn.num_heads % 2 == 0
            and _one_kernel(self, itertools.chain([src], self.parameters()))
        ):
            return found.to(torch.get_autocast_dtype("cpu"))
        return found

    return forward


# --- a module that is moved to where it is ---------------------------------------------------------


def _moving(original: Callable[..., Any]) -> Callable[..., Any]:
    """nn.Module.to in forward (a router that is kept in another type): where all is of that type and in that place it
    changes nothing, but reads gradients on its way. Any other is refused by what it does."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = [*args, *[kwargs[k] for k in ("device", "dtype") if k in kwargs]]
        rest = kwargs.keys() - {"device", "dtype", "non_blocking", "copy"}
        tensors = [*self.parameters(), *self.buffers()]
        if rest or not wanted or not all(_is_so(t, wanted) for t in tensors):
            return original(self, *args, **kwargs)
        return self

    return to


def _is_so(t: Tensor, wanted: list[Any]) -> bool:
    for x in wanted:
        if isinstance(x, torch.dtype):
            if x != t.dtype and (t.is_floating_point() or t.is_complex()):
                return False
        elif isinstance(x, (str, torch.device)):
            if torch.device(x) != t.device:
                return False
        elif x is not None and not isinstance(x, bool):
            return False
    return True


# --- modes that a graph does not have ---------------------------------------------------------------


def _inference(original: Callable[..., Any]) -> Callable[..., Any]:
    """inference_mode.__enter__, also of decorated functions. no_grad is another matter: the trace has it."""

    def enter(self: Any) -> Any:
        frame = sys._getframe(2)  # behind the patch
        decorated = frame.f_locals.get("func") if frame.f_code.co_name == "decorate_context" else None
        code = getattr(decorated, "__code__", frame.f_code)
        # the tracer leaves the mode in which the module was called
        if self.mode != torch.is_inference_mode_enabled() and not code.co_filename.startswith(
            (TORCH_DIR, OWN_DIR)
        ):
            raise NotRepeatable(
                f"forward enters torch.inference_mode({self.mode}): its tensors are of a kind that a graph does not "
                "make; torch.no_grad() stays in the graph",
                True,
            )
        return original(self)

    return enter


def users_hook(pack: Any) -> bool:
    """Is it not one of PyTorch's own (checkpoint, save_on_cpu), which give back what they were given?"""
    return not getattr(getattr(pack, "__code__", None), "co_filename", "").startswith((TORCH_DIR, OWN_DIR))


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        if users_hook(self.pack_hook) or users_hook(self.unpack_hook):
            raise NotRepeatable("forward enters saved_tensors_hooks: what a graph keeps for backward does not go "
                                "through them")  # fmt: skip
        return original(self)

    return enter


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        if type(self).__module__.partition(".")[0] not in ("torch", "ortmodule"):
            raise NotRepeatable(f"forward enters {type(self).__name__}, a TorchDispatchMode: a graph does not go "
                                "through it")  # fmt: skip
        return original(self)

    return enter




@contextlib.contextmanager
def refusing(is_user_file: Callable[[str], bool], given: dict[int, int | str] | None = None,
             real: dict[int | str, Tensor] | None = None) -> Iterator[Asked]:  # fmt: skip
    """Around the user's forward while it is traced. is_user_file: neither PyTorch's nor this package's. given, real: of
    Asked."""
    encode, layer = nn.TransformerEncoder.forward, nn.TransformerEncoderLayer.forward
    infer, save, mode = torch.inference_mode, torch.autograd.graph.saved_tensors_hooks, private.DispatchMode
    asked, scope = Asked(is_user_file, given, real), here()
    if scope is not None and scope.watch is not None and real is not None:
        scope.watch.asked = asked
    with replaced(
        Patch(private.random, "default_generator", _Generator(private.random.default_generator)),
        Patch(nn.TransformerEncoder, "forward", only_here(_encoder(encode), encode)),
        Patch(nn.TransformerEncoderLayer, "forward", only_here(_encoder_layer(layer), layer)),
        Patch(nn.Module, "to", only_here(_moving(nn.Module.to), nn.Module.to)),
        Patch(infer, "__enter__", only_here(_inference(infer.__enter__), infer.__enter__)),
        Patch(save, "__enter__", only_here(_saving(save.__enter__), save.__enter__)),
        *([Patch(mode, "__enter__", only_here(_dispatching(mode.__enter__), mode.__enter__))]
          if private.has("DispatchMode") else []),
        *_honest_flags(),
        *_processes(),
        *of_numbers(),
        *(_attributes(asked) if real is not None else ()),
    ), asked:  # fmt: skip
        try:
            yield asked
        finally:  # the arguments are the caller's to hold
            asked.end()
