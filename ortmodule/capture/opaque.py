"""What stays PyTorch's inside a captured graph: custom autograd.Functions and submodules kept outside.

torch.export would trace through both, and the backward a user wrote, or the hooks on a module, would be lost without a
word. So while an export runs, the code of `Function.apply` (bound early or late, it is one function; where it is one of
C, since torch 2.14, `forward` of every Function, which it calls) and `forward` of kept submodules are replaced by one
opaque operator, ortmodule_capture::host(Tensor[] xs, int index) -> Tensor[], which the tracer records as a single node.
`index` is the row of the capture's table; the row knows how to rebuild the Python call from tensors.

The types of the results: a Function's forward is run on the fake tensors of the trace. A kept module often is kept
because it cannot run on fake tensors; then sizes come from a recording of the real module made before the export. In a
capture with symbolic sizes they are guessed: what has been a size of an argument in this recording and in those of
earlier captures, which had other sizes, is that size. Where a call shows that a guess was wrong, PyTorch computes it.

Invariants: everything patched is restored, also after a failure; rows are numbered per capture, so names are
reproducible; other threads never notice; Functions by which PyTorch traces are left alone, but for reentrant
checkpointing, whose region is traced and marked (checkpoints.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .. import autocast, patches
from .. import torch_private as private
from ..guard import part_of_forward
from ..host import Answer, Failed, note
from ..patches import Patch, only_here, replaced
from ..torch_private import HOOK_TABLES
from ..watch import inside, quiet, watching
from . import checkpoints, layouts
from .edits import Writes, Written, contents_of, hidden_in, trained_elsewhere
from .not_repeatable import in_try
from .refused import SilentProcesses
from .skeleton import Fill, Unreadable, flatten_inputs, skeleton

Call = Callable[[list[Tensor]], "Tensor | tuple[Tensor, ...]"]


class OpaqueError(Exception):
    """An opaque call that cannot be kept as a node; the message is the reason."""


class Changed(RuntimeError):
    """What was kept in PyTorch has run and returns what the captured code around it cannot take."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"ortmodule: {reason}. Later calls run in PyTorch.")
        self.reason = reason


@dataclass
class Expected:
    """What the captured code around an opaque call takes for granted of its result."""

    form: Hashable = None
    # it shares memory with an argument, with what the module holds, or within itself; and: the code around edits such
    # memory in place, which a graph does on values of its own
    shares: bool = False
    edited: bool = False
    fresh: frozenset[int] = frozenset()  # results that surely do not


@dataclass
class Row:
    """One opaque call of the trace."""

    kind: str  # 'python_op' | 'module'
    name: str
    call: Call
    meta: Callable[[list[Tensor]], list[Tensor]]  # results on fake tensors
    reason: str
    expected: Expected = field(default_factory=Expected)
    module: str = ""
    rebuild: Fill | None = None  # tensor results -> what the Python call returns; known after meta ran
    silent: list[int] = field(default_factory=list)  # results marked as not differentiable; known after meta ran
    arguments: Fill | None = None  # of an operator that the engine may have: its tensors -> args, kwargs


class Recorded(NamedTuple):
    """One call of a kept module. shares: whether the result shares memory; given: sizes of its tensor arguments."""

    result: Any
    shares: bool
    given: tuple[torch.Size, ...] = ()


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)
    recorded: dict[str, list[Recorded]] = field(default_factory=dict)  # by fqn of a kept module, in order of calls
    earlier: Sequence[dict[str, list[Recorded]]] = ()  # of captures at other sizes, for one with symbols
    n_calls: dict[str, int] = field(default_factory=dict)
    # marks.Mark, by the index of its node; open: enters without an exit yet
    marks: list[Any] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    checkpoints: checkpoints.Regions = field(default_factory=checkpoints.Regions)
    root: nn.Module | None = None  # what is captured
    # answers opaque calls, outside of a capture (net.py)
    instead: Callable[[Row, list[Tensor], Fill], Any] | None = None


_PLAIN = frozenset((bool, str, bytes, complex))
SHARES = "returns memory of its arguments or of its own, which the code around it edits in place"
_lib: Any = torch.library.Library("ortmodule_capture", "DEF")  # type: ignore[no-untyped-call]
_lib.define("host(Tensor[] xs, int index) -> Tensor[]")


def current_table() -> Table:
    """Of the capture that this thread is in."""
    scope = patches.here()
    if scope is None or scope.table is None:
        raise RuntimeError("ortmodule: an opaque operator outside of a capture")
    return scope.table


def _host_fake(xs: list[Tensor], index: int) -> list[Tensor]:
    return [like(y) for y in current_table().rows[index].meta(xs)]


def like(t: Tensor, shape: Sequence[Any] | None = None, strides: Sequence[Any] | None = None,
         device: torch.device | str | None = None) -> Tensor:  # fmt: skip
    """A tensor that lies in memory as t does, also with gaps."""
    if t.layout is not torch.strided:
        return torch.empty(t.shape, dtype=t.dtype, device=device or t.device)
    return torch.empty_strided(t.shape if shape is None else shape, t.stride() if strides is None else strides,
                               dtype=t.dtype, device=device or t.device)  # fmt: skip


torch.library.register_fake("ortmodule_capture::host", _host_fake, lib=_lib)
HOST = torch.ops.ortmodule_capture.host.default
# what a user wrote runs, also where nobody reads its result
torch.fx.node.has_side_effect(HOST)
_lib.define("cut(Tensor[] xs, int index) -> Tensor[]")  # see marks.py
CUT = torch.ops.ortmodule_capture.cut.default


def autocast_state() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The user's autocast as it is now, to be entered again when the call runs."""
    state, cache = autocast.now(), torch.is_autocast_cache_enabled()
    return lambda: autocast.put(state, cache)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any], once: bool = False) -> tuple[list[Tensor], Fill]:
    """Tensor leaves of a call, and leaves -> (args, kwargs). once: one that stands at several places is one leaf, and
    one tensor for who is called."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def leaf(x: Any) -> int | None:
        if not isinstance(x, Tensor):
            return None
        if once and id(x) in places:
            return places[id(x)]
        places[id(x)] = len(tensors)
        tensors.append(x)
        return len(tensors) - 1

    fill = skeleton((args, kwargs), leaf, share=False)
    return tensors, fill


def results_of(out: Any) -> tuple[list[Tensor], Fill]:
    """Tensor leaves of a result, and leaves -> an equal result."""
    tensors: list[Tensor] = []
    seen: dict[int, int] = {}

    def leaf(x: Any) -> int | None:
        if not isinstance(x, Tensor):
            return None
        if id(x) not in seen:
            seen[id(x)] = len(tensors)
            tensors.append(x)
        return seen[id(x)]

    fill = skeleton(out, leaf)
    return tensors, fill


def form_of(name: str, out: Any) -> Hashable:
    """What a result is besides its tensors. Values that the code around it could read are refused: they would be those
    of the capture for ever."""
    try:
        flat = flatten_inputs((out,), {})
    except Unreadable as e:
        raise OpaqueError(f"{name}, kept in PyTorch, returns {e}") from None
    plain = [type(x) for x in flat.scalars] + [k for k in cast(Iterable[Any], flat.key) if k in _PLAIN]
    if plain:
        kind = f"an {plain[0].__name__}" if plain[0] is int else f"a {plain[0].__name__}"
        raise OpaqueError(f"{name}, kept in PyTorch, returns {kind}, which the code around it may read")
    return flat.key


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module and those inside of it hold, also in lists and dicts."""
    for m in module.modules():
        for x in m.__dict__.values():
            for y in x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(y, Tensor):
                    yield y


def _share(outs: Iterable[Tensor], given: Iterable[Tensor], module: nn.Module | None) -> bool:
    """Whether results of a call lie in memory that somebody else knows, too."""
    memory = {t.untyped_storage()._cdata for t in (*given, *(_tensors_of(module) if module is not None else ()))}
    for t in outs:
        where = t.untyped_storage()._cdata
        if where in memory:
            return True
        memory.add(where)
    return False


def _nothing(given: Sequence[Tensor]) -> Tensor:
    """What stands for no result of a call, as a node has one at least: where the call's tensors are."""
    return torch.zeros((), device=given[0].device if given else "cpu")


def _as_call(
    name: str,
    run: Callable[..., Any],
    fill: Fill,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    expected: Expected,
    module: nn.Module | None = None,
) -> Call:
    def call(tensors: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
        args, kwargs = fill(tensors)
        contents = contents_of((args, kwargs)) if module is not None else None
        with autocast():
            out = run(*args, **kwargs)
        if module is not None:
            note(Answer(module, out, tensors))
        if contents is not None and contents_of((args, kwargs)) != contents:
            raise Changed(f"{name}, kept in PyTorch, edits a container or object among its arguments, and did not when "
                          "the module was captured")  # fmt: skip
        other: type[Exception] = Changed if module is None else Failed  # a module answers again what it has answered
        try:
            now = form_of(name, out)
        except OpaqueError as e:
            raise other(f"{e}, and did not when the module was captured") from None
        if now != expected.form:
            raise other(
                f"{name}, kept in PyTorch, returns a result of another structure, dtype or rank than when the module "
                f"was captured"
            )
        outs = (out,) if isinstance(out, Tensor) else tuple(results_of(out)[0])
        if expected.edited and _share(outs, tensors, module):
            raise Changed(f"{name}, kept in PyTorch, {SHARES}, and did not when the module was captured")
        return out if isinstance(out, Tensor) else outs or (_nothing(tensors),)

    return call


def _record(row: Row, tensors: list[Tensor], fill: Fill) -> Any:
    table = current_table()
    if table.instead is not None:
        return table.instead(row, tensors, fill)
    table.rows.append(row)
    scope, at = patches.here(), in_try(sys._getframe(1))
    if at is not None and scope is not None and scope.watch is not None:
        scope.watch.problem_at(at, f"calls {row.name}, which stays in PyTorch, in a try statement")
    outs = HOST(tensors, len(table.rows) - 1)
    assert row.rebuild is not None, "the fake kernel of an opaque call sets its skeleton"
    return row.rebuild([y.detach() if i in row.silent else y for i, y in enumerate(outs)])


def without_values(table: Table) -> dict[str, list[Recorded]]:
    """What kept submodules returned, on the meta device."""
    found: dict[str, list[Recorded]] = {}
    for fqn, results in table.recorded.items():
        found[fqn] = []
        for call in results:
            tensors, rebuild = results_of(call.result)
            bare = rebuild([like(t, device="meta") for t in tensors])
            found[fqn].append(call._replace(result=bare))
    return found


# --- custom autograd.Function ---------------------------------------------------------------------


class _MetaContext:
    """Stands for `ctx` while a Function's forward runs for the types of its results only."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty = False
        self.silent: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.silent = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = bool(tensors)


def _function_node(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if private.transforms() is not None:
        raise OpaqueError(f"{cls.__qualname__}.apply is called inside a function transform (vmap, grad)")
    new_style = cls.setup_context is not Function.setup_context
    if new_style:  # such a Function is given its defaults, and everything by position
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    forward = getattr(cls.forward, "ortmodule_own", cls.forward)
    by = hidden_in(args, kwargs, None)
    if by is not None:
        raise OpaqueError(
            f"{cls.__qualname__}.apply is given {by} with a tensor or size of the call in it: it must be an argument"
        )
    tensors, fill = tensors_of(args, kwargs)
    direct = {id(x) for x in args if isinstance(x, Tensor)}
    tensors = [x if id(x) in direct else x.detach() for x in tensors]  # autograd does not see tensors inside of lists
    needs = tuple([isinstance(x, Tensor) and x.requires_grad for x in args])
    autocast = autocast_state()

    def meta(xs: list[Tensor]) -> list[Tensor]:
        a, k = fill(xs)
        contents = contents_of((a, k))
        ctx = _MetaContext(needs)
        with torch.no_grad(), autocast(), inside(None), Writes() as writes:
            if new_style:
                out = forward(*a, **k)
                cls.setup_context(ctx, a, out)
            else:
                out = forward(ctx, *a, **k)
        if ctx.dirty or writes.wrote(xs):
            raise OpaqueError(f"{cls.__qualname__}.forward edits an input in place")
        if contents_of((a, k)) != contents:
            raise OpaqueError(f"{cls.__qualname__}.forward edits a container or object among its arguments")
        expected.form = form_of(name, out)
        outs, row.rebuild = results_of(out)
        expected.shares = _share(outs, xs, None)
        expected.fresh = frozenset(
            [k for k, y in enumerate(outs) if not _share([y], [*xs, *outs[:k], *outs[k + 1 :]], None)]
        )
        row.silent = [i for i, y in enumerate(outs) if any(y is t for t in ctx.silent)]
        return outs or [_nothing(xs)]

    expected, name = Expected(), f"{cls.__qualname__}.apply"
    call = _as_call(name, functools.partial(_apply, cls), fill, autocast, expected)
    reason = "custom autograd.Function: its backward is the user's Python code"
    row = Row("python_op", name, call, meta, reason, expected)
    return _record(row, tensors, fill)


# References to `MyFunction.apply` are taken early: at module level, in __init__, by import. They all are bound methods
# of one Python function, so its code is what has to be another one while an export runs.
def _copy(f: types.FunctionType) -> types.FunctionType:
    made = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    made.__kwdefaults__ = f.__kwdefaults__
    return made


_made: Any = Function.__dict__["apply"] if private.has("function_apply") else None
_live = getattr(_made, "__func__", None)  # None: C, which calls the `forward` that its class has at the time (2.14)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """As PyTorch does it."""
    return _made.__get__(None, cls)(*args, **kwargs) if _live is None else _python_apply(cls, *args, **kwargs)


_python_apply: Any = _live and _copy(_live)

# Parts of PyTorch whose Functions belong to tracing itself, or only pass tensors through.
_MACHINERY = (
    "torch._dynamo.",
    "torch._export.",
    "torch._functorch.",
    "torch._higher_order_ops.",
    "torch._inductor.",
    "torch._library.",
    "torch._prims_common.",
    "torch._subclasses.",
    "torch.autograd.",
    "torch.distributed.fsdp.",
    "torch.distributed.tensor.",
    "torch.nested.",
    "torch.nn.modules._functions.BackwardHookFunction",
    "torch.utils.checkpoint.",
)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return x.matmul(weight.t())
    return torch.addmm(bias, x, weight.t()) if x.dim() == 2 else x.matmul(weight.t()) + bias


# Functions of libraries that compute what an operator does, in another way: written out, with the operator's gradient.
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    # ZeRO-3 puts it in the place of F.linear, so that autograd does not keep a weight that is freed meanwhile
    "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3": _linear,
}


class _Code:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # a free variable, as in the original: code is exchanged only for code with as many
        __class__  # type: ignore[name-defined]  # noqa: B018
        from ortmodule.capture.opaque import _applied

        return _applied(cls, args, kwargs)


def _applied(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every call of a Function in the process comes here while an export runs; those of other threads go on as ever."""
    scope = patches.here()
    if scope is None or not scope.exporting or scope.table is None or not torch.compiler.is_exporting():
        return _apply(cls, *args, **kwargs)
    if cls.__module__ == "torch.utils.checkpoint" and cls.__name__ == "CheckpointFunction":
        run, _preserve_rng, *rest = args
        return checkpoints.reentrant(run, tuple(rest))
    name = f"{cls.__module__}.{cls.__name__}"
    if name.startswith(_MACHINERY):
        return _apply(cls, *args, **kwargs)
    if name in _OPERATORS:
        return _OPERATORS[name](*args, **kwargs)
    return _function_node(cls, args, kwargs)


def exporting() -> bool:
    """Is it this thread that exports? What is patched meanwhile is to look the same to the others."""
    scope = patches.here()
    return scope is not None and scope.exporting


_ctc_loss = torch.ctc_loss


def _ctc(*args: Any, **kwargs: Any) -> Tensor:
    """Its kernel reads the lengths: what it keeps for its backward has sizes that depend on data."""
    if not exporting():
        return _ctc_loss(*args, **kwargs)
    given = inspect.signature(like_ctc).bind(*args, **kwargs)
    x = given.arguments["log_probs"]
    if x.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(x.device.type):
        given.arguments["log_probs"] = x.float()  # as autocast does
    tensors, fill = tensors_of(given.args, given.kwargs)
    autocast = autocast_state()

    def call(xs: list[Tensor]) -> Tensor:
        a, k = fill(xs)
        with autocast():
            return _ctc_loss(*a, **k)

    def meta(xs: list[Tensor]) -> list[Tensor]:
        a, k = fill(xs)
        x, targets, lengths, _lengths, _blank, reduction, *_ = inspect.signature(like_ctc).bind(*a, **k).args
        rows = lengths.shape[0] if isinstance(lengths, Tensor) and lengths.dim() else None
        single = x.dim() == 2 or rows is None and isinstance(lengths, Tensor)
        return [x.new_empty((len(lengths) if rows is None else rows,) if reduction == 0 and not single else ())]

    if current_table().instead is not None:  # the net has noted the call of nn.functional's
        return meta(tensors)[0]
    row = Row("aten", "aten::ctc_loss", call, meta, "sizes that depend on data")
    row.rebuild = lambda leaves: leaves[0]
    row.arguments = fill
    return _record(row, tensors, fill)  # type: ignore[no-any-return]


def like_ctc(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
              zero_infinity: bool = False) -> None: ...  # fmt: skip


@contextlib.contextmanager
def keep_functions() -> Iterator[None]:
    """Functions become opaque nodes, whatever reference to `apply` they are called by; and operators that do not run
    without values."""
    with patches.scope(exporting=True) as scope, replaced(Patch(torch, "ctc_loss", only_here(_ctc, torch.ctc_loss))):
        if _live is not None:
            scope.replace(_live, "__code__", _Code.__dict__["apply"].__code__)
        else:
            scope.replace(Function, "apply", classmethod(_applied_by_class))
            for cls, own in [(cls, cls.forward) for cls in _functions(Function)]:
                scope.replace(cls, "forward", staticmethod(_forward_of(cls, own)))
        yield


def _applied_by_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return _applied(cls, args, kwargs)


def _functions(base: Any) -> Iterator[Any]:
    """The classes that become nodes."""
    for cls in base.__subclasses__():
        if not f"{cls.__module__}.{cls.__name__}".startswith(_MACHINERY):
            yield cls
        yield from _functions(cls)


def _forward_of(cls: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """What an `apply` of C that was bound early calls in the place of a class's own forward."""

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        scope = patches.here()
        if scope is None or not scope.exporting or scope.table is None or not torch.compiler.is_exporting():
            return own(*args, **kwargs)
        new_style = cls.setup_context is not Function.setup_context
        return _applied(cls, args if new_style else args[1:], kwargs)

    forward.ortmodule_own = own  # type: ignore[attr-defined]
    return forward


# --- submodules kept in PyTorch -------------------------------------------------------------------


def record_results(
    root: nn.Module, keep: Collection[str], run: Callable[[], Any]
) -> tuple[dict[str, list[Recorded]], Any]:
    """Runs the model once in PyTorch and notes what the kept submodules return, and whether that shares memory; of
    tensors sizes and dtypes are all that is used. Also its own result."""
    notes: dict[str, list[Recorded]] = {fqn: [] for fqn in keep}
    given: dict[str, tuple[list[tuple[Tensor, Any]], Any]] = {}
    written = Written(root, True)
    entered: list[contextlib.AbstractContextManager[None]] = []

    stale = {id(t): t for t in _tensors_of(root) if t.grad_fn is not None}  # of an earlier call

    def before(fqn: str, args: Any, kwargs: Any) -> None:
        entered.append(inside(fqn.rpartition(".")[0], True))
        entered[-1].__enter__()
        # a gradient goes to the arguments of a call, and no other way
        if any(t.grad_fn is not None and id(t) not in stale for t in _tensors_of(root.get_submodule(fqn))):
            raise OpaqueError(_STATE.format(fqn))
        taken = [(t, t.clone() if t.is_inference() else t._version) for t in tensors_of(args, kwargs, True)[0]]
        given[fqn] = taken, contents_of((args, kwargs))
        written.begin()

    def after(fqn: str, args: Any, kwargs: Any, out: Any) -> None:
        _told(fqn, written.end())
        entered.pop().__exit__(None, None, None)
        taken, contents = given.pop(fqn)
        if trained_elsewhere(results_of(out)[0], [t for t, _ in taken], root.get_submodule(fqn)):
            raise OpaqueError(_TRAINED.format(fqn))
        if contents_of((args, kwargs)) != contents:
            raise OpaqueError(_FILLS.format(fqn))
        shares = _share(results_of(out)[0], [t for t, _ in taken], root.get_submodule(fqn))
        notes[fqn].append(Recorded(out, shares, tuple([t.shape for t, _ in taken])))
        for t, was in taken:
            if not torch.equal(t, was) if isinstance(was, Tensor) else t._version != was:
                raise OpaqueError(_EDITS.format(fqn))

    handles = []
    for fqn in keep:
        m = root.get_submodule(fqn)
        handles.append(
            m.register_forward_pre_hook(lambda _m, args, kwargs, fqn=fqn: before(fqn, args, kwargs), with_kwargs=True)
        )
        handles.append(m.register_forward_hook(
            lambda _m, args, kwargs, out, fqn=fqn: after(fqn, args, kwargs, out), with_kwargs=True))  # fmt: skip
    try:
        with quiet(), SilentProcesses(), written:
            result = run()
    finally:
        while entered:
            entered.pop().__exit__(None, None, None)
        written.put_back()
        for h in handles:
            h.remove()
    return notes, result


_STATE = "{}, which would be kept in PyTorch, reads a tensor of its own that an earlier call of this forward has left"
_TRAINED = (
    "{}, which would be kept in PyTorch, uses a tensor that requires a gradient and is neither an argument nor one of "
    "its parameters"
)
_REACHES = "{}, which would be kept in PyTorch, {} {} that may use tensors of the code around it"
_FILLS = (
    "{}, which would be kept in PyTorch, edits a container or object among its arguments: that is for the code around "
    "it to see"
)
_SILENT = "{}, which would be kept in PyTorch, is called under no_grad and returns memory that it was given"
_OTHERS = (
    "{}, which would be kept in PyTorch, is given other tensors by forward under a trace than in a call: the code "
    "around it asks whether tensors have values"
)
_EDITS = "{}, which would be kept in PyTorch, edits an argument in place: that is for the code around it to see"


def _told(fqn: str, changes: set[tuple[str, str]]) -> None:
    """The code around it may not read what a kept submodule changes."""
    watch = watching()
    if watch is not None:
        watch.kept_changes.update((fqn, *change) for change in changes)


def kept_results(
    fqn: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[list[Tensor], Any], tuple[Any, Sized | None, bool]]:
    """For the call of a kept submodule that the trace has come to. The function returned takes its tensors and its
    (args, kwargs), and gives what it returns: as recorded, and the sizes of that, or on those tensors, which are fake
    (None); and whether it shares memory."""
    by = hidden_in(args, kwargs, module)
    if by is not None:
        raise OpaqueError(_REACHES.format(fqn, "is given", by))
    watch = watching()
    if watch is not None:
        watch.called.add(fqn)
    table, autocast = current_table(), autocast_state()
    turn = table.n_calls.get(fqn, 0)
    table.n_calls[fqn] = turn + 1

    def results(xs: list[Tensor], given: Any) -> tuple[Any, Sized | None, bool]:
        recorded = table.recorded.get(fqn)
        if recorded is not None:
            call = recorded[turn]
            if [len(shape) for shape in call.given] != [x.dim() for x in xs]:
                raise OpaqueError(_OTHERS.format(fqn))
            before = [c[fqn][turn] for c in table.earlier if turn < len(c.get(fqn, ()))]
            return call.result, functools.partial(_sizes, fqn, call, before, xs), call.shares
        contents, written = contents_of(given), Written(table.root or module, False)
        at = inside(fqn.rpartition(".")[0])
        with torch.no_grad(), autocast(), quiet(), at, written:
            written.begin()
            out = forward(*given[0], **given[1])
        _told(fqn, written.end())
        if written.wrote(xs):
            raise OpaqueError(_EDITS.format(fqn))
        if contents_of(given) != contents:
            raise OpaqueError(_FILLS.format(fqn))
        return out, None, _share(results_of(out)[0], xs, module)

    return results


Sized = Callable[[int], tuple[Sequence[Any], Sequence[Any]]]  # sizes and strides of the result's tensors, by number


def _sizes(fqn: str, call: Recorded, before: list[Recorded], xs: list[Tensor], i: int) -> tuple[Any, Any]:
    """Sizes and strides of a result that was recorded; in a capture with symbolic sizes in terms of the arguments'."""
    result = results_of(call.result)[0][i]
    if not before:
        return result.shape, result.stride()
    earlier = [(b.given, results_of(b.result)[0][i]) for b in before]
    if any(t.dim() != result.dim() or len(given) != len(xs) for given, t in earlier):
        raise OpaqueError(f"{fqn}, kept in PyTorch, returns a result of another structure from call to call")

    def found(size: int, were: list[int], times: int = 1) -> dict[str, Any]:
        symbols: dict[str, Any] = {}
        for n, x in enumerate(xs):
            for a, symbol in enumerate(x.shape):
                if isinstance(symbol, torch.SymInt) and call.given[n][a] * times == size and all(
                        given[n][a] * times == was for (given, _), was in zip(earlier, were, strict=True)):  # fmt: skip
                    symbols.setdefault(str(symbol.node.expr), symbol)
        return symbols

    sizes: list[Any] = []
    for axis, size in enumerate(result.shape):
        were = [t.shape[axis] for _, t in earlier]
        symbols = found(size, were)
        if not symbols and all(was == size for was in were):
            symbols = {"": size}
        if len(symbols) != 1:
            raise OpaqueError(f"the sizes of what {fqn}, kept in PyTorch, returns do not follow from its arguments'")
        sizes += symbols.values()
    # where an axis of size 1 leaves it open, another call's order tells
    orders = [layouts.order_now(t) for t in (result, *[t for _, t in earlier])]
    order = next((o for o in orders if o is not None and o != sorted(o)), orders[0])
    if order is not None and all(t.permute(order).is_contiguous() for t in (result, *[t for _, t in earlier])):
        strides, step = [0] * len(sizes), 1
        for axis in reversed(order):
            strides[axis], step = step, step * sizes[axis]
        return sizes, strides
    strides = []
    for axis, stride in enumerate(result.stride()):  # with gaps
        were = [t.stride(axis) for _, t in earlier]
        symbols = {"": stride} if all(was == stride for was in were) else {}
        for a in {n for given in call.given for n in given if n and stride % n == 0} if not symbols else ():
            symbols |= {name: symbol * (stride // a) for name, symbol in found(stride, were, stride // a).items()}
        if len(symbols) != 1:
            raise OpaqueError(f"how what {fqn}, kept in PyTorch, returns lies in memory does not follow from the sizes "
                              "of its arguments")  # fmt: skip
        strides += symbols.values()
    return sizes, strides


def _module_node(
    fqn: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensors, fill = tensors_of(args, kwargs, True)
    silent = not torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if torch.is_grad_enabled() and any(
        isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules()
    ):
        raise OpaqueError(f"{fqn} asks for sparse gradients, which only PyTorch's autograd can hand to its parameters")
    names = [name for name, _ in module.named_parameters()]
    params: list[Tensor] = [p for _, p in module.named_parameters()]
    n = len(tensors)
    results, expected = kept_results(fqn, module, forward, args, kwargs), Expected()

    def run(*a: Any, own: dict[str, Tensor], **k: Any) -> Any:
        return torch.func.functional_call(module, own, a, k)

    def fill_call(leaves: list[Any]) -> Any:
        a, k = fill(leaves[:n])
        return a, {**k, "own": dict(zip(names, leaves[n:], strict=True))}

    def meta(xs: list[Tensor]) -> list[Tensor]:
        out, sizes, expected.shares = results(xs[:n], fill(xs[:n]))
        if silent and expected.shares:  # an argument itself keeps its gradient
            raise OpaqueError(_SILENT.format(fqn))
        returned = hidden_in((out,), {}, module)
        if returned is not None:
            raise OpaqueError(_REACHES.format(fqn, "returns", returned))
        expected.form = form_of(fqn, out)
        outs, row.rebuild = results_of(out)
        if sizes is not None:
            outs = [like(y, *sizes(i)) for i, y in enumerate(outs)]
        return outs or [_nothing(xs)]

    call = _as_call(fqn, run, fill_call, autocast_state(), expected, module)
    row = Row("module", fqn, call, meta, "submodule kept in PyTorch", expected, module=fqn)
    return _record(row, tensors + params, fill_call)


def without_hooks(module: nn.Module) -> list[Patch]:
    """Its hooks rest, but for those that are part of the forward."""
    own = module.__dict__
    return [
        Patch(own, name, OrderedDict((k, f) for k, f in own[name].items() if part_of_forward(f)))
        for name in HOOK_TABLES
        if own.get(name)
    ]


def keep_modules(root: nn.Module, keep: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """The named submodules become opaque nodes; their hooks rest while the export runs and fire in the real call."""
    rows: list[Patch] = []
    for fqn in keep:
        module = root.get_submodule(fqn)

        def forward_node(
            *args: Any, _fqn: str = fqn, _module: nn.Module = module, _forward: Any = module.forward, **kwargs: Any
        ) -> Any:
            return _module_node(_fqn, _module, _forward, args, kwargs) if exporting() else _forward(*args, **kwargs)

        forward_node.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        rows += [*without_hooks(module), Patch(module.__dict__, "forward", forward_node)]
    return replaced(*rows)


@contextlib.contextmanager
def table() -> Iterator[Table]:
    """The table of opaque calls of one capture."""
    with patches.scope(table=Table()) as scope:
        assert scope.table is not None
        yield scope.table
