"""torch.export, and nothing else of the package touches it: a module and its arguments -> training IR with a plain
description.

The module is wrapped so that the export sees flat tensors only: the wrapper rebuilds the arguments from leaves, calls
the module and flattens the result into a skeleton that leaves through a box (attributes set on modules while tracing
are restored by the export). The IR is non-strict training IR: one node per ATen call as the user's code made it, in the
user's grad mode and under the user's autocast, not decomposed.

The user's model and process are left as they were: random states of torch, numpy and Python, tensors held as plain
attributes (the export edits those for real), and everything that is patched while tracing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import os
import random
import sys
import traceback
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from .. import _C, autocast, contents, frames, patches
from .. import torch_private as private
from ..errors import CaptureError
from ..frames import is_user_file
from ..patches import Patch, only_here, replaced
from ..watch import quiet, running, watching
from . import branches, checkpoints, layouts, marks, opaque
from .edits import contents_of
from .facts import Facts, Known
from .refused import NotRepeatable, refusing
from .skeleton import (
    Fill,
    Unreadable,
    flatten_inputs,
    input_skeleton,
    is_cache,
    skeleton,
    state_of,
    unreadable,
)

_TORCH_NN = os.path.join(frames.TORCH_DIR, "nn", "")
_FUNCTIONAL = os.path.join(_TORCH_NN, "functional.py")
_PREFIX = "m."  # the user's module inside the wrapper


@dataclass
class Source:
    """A placeholder of the exported graph. leaf: index into the flattened user leaves. tensor: the object, for all but
    user inputs. pairs: it is complex, and the graph takes it as pairs of reals (pairs.py)."""

    kind: str  # 'user' | 'param' | 'buffer' | 'const_attr' | 'constant'
    target: str = ""
    leaf: int = -1
    tensor: Tensor | None = None
    pairs: bool = False


@dataclass
class Exported:
    """graph_module: training IR. sources: by placeholder name. outputs: per output of the graph nothing but order;
    rebuild: from values of the slots. rebinds: buffers to which forward assigns a new tensor. tried: files and lines of
    the user's that call torch where an exception may be caught; n_made: what they have returned, behind the outputs.
    facts: what the trace was told of the arguments. conditions: what it was told of values; the tensors asked stand
    behind all other outputs. same: which results are a tensor argument (its number), parameter or buffer (its name).
    asked: where (file:line) a relation of `guards()` was.
    left: of modules (their names), attributes and what forward leaves in them: numbers, words, sizes. stored:
    attributes in which it leaves tensors, and which outputs those are; `rebuild` then gives (results, what those
    hold)."""

    graph_module: fx.GraphModule
    sources: dict[str, Source]
    rebuild: Fill
    table: opaque.Table
    grad_mode: bool
    autocast: autocast.State
    ranges: dict[Any, tuple[int, int]]
    sizes: Any  # the ShapeEnv
    leaves: list[Any] = field(default_factory=list)
    rebinds: list[str] = field(default_factory=list)
    tried: set[tuple[str, int]] = field(default_factory=set)
    n_made: int = 0
    facts: Facts = field(default_factory=Facts)
    same: dict[int, int | str] = field(default_factory=dict)
    conditions: branches.Answers = ()
    asked: dict[Any, str] = field(default_factory=dict)
    left: dict[tuple[str, str], Any] = field(default_factory=dict)
    stored: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    warned: list[Warned] = field(default_factory=list)

    def guards(self) -> list[tuple[Any, Any]]:
        """Relations between sizes that were taken one way so far, by the trace or by what was made of it (sympy), as
        they were asked and in the symbols that are left: others, or numbers, have taken the place of some since."""
        return [] if self.sizes is None else [(g.expr, self.sizes.replace(g.expr)) for g in self.sizes.guards]


class _Wrapper(nn.Module):
    """Flat leaves in, flat tuple of leaves out."""

    def __init__(
        self,
        module: nn.Module,
        fill: Fill,
        tensors: list[Tensor],
        float_leaves: Collection[int],
        box: dict[str, Any],
        asker: branches.Asker,
    ) -> None:
        super().__init__()
        self._asker = asker
        self._flags = set_libraries()
        self.m = module
        self._fill = fill
        known = Known(module)
        self._twins = {i: name for i, t in enumerate(tensors) if (name := known.name(t)) is not None}
        # with attributes of other names: the export looks into lists and dictionaries of a module
        owned: dict[int | str, Tensor] = dict(_tensors_of(module))
        self._real: Callable[[], dict[int | str, Tensor]] = lambda: {**dict(enumerate(tensors)), **owned}
        self._floats = frozenset(float_leaves)
        self._box = box
        self.training = module.training

    def forward(self, *leaves: Any) -> Any:
        # A float argument travels as a 0-d tensor; item() gives the symbolic Python number that torch's promotion rules
        # expect.
        values = [x.item() if i in self._floats else x for i, x in enumerate(leaves)]
        owned = dict(_tensors_of(self.m))
        for i, name in self._twins.items():  # an argument that is a parameter or buffer
            values[i] = owned[name]
        given = {id(t): name for name, t in reversed([*owned.items()])}
        standing: dict[int, int | str] = {id(x): i for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        standing.update(given)
        args, kwargs = self._fill(values)
        contents, objects = contents_of((args, kwargs)), _objects((args, *kwargs.values()), {})
        before = [(fqn, m, dict(m._buffers), [(p, p.requires_grad) for p in m._parameters.values() if p is not None])
                  for fqn, m in self.m.named_modules()]
        inside = set_libraries(self._flags)  # the export has put its own, which forward may read
        try:
            with refusing(is_user_file, standing, self._real()) as asked, running(), self._asker.tracing():
                out = self.m(*args, **kwargs)
        finally:
            set_libraries(inside)
        watch = watching()
        self._box["left"] = dict(watch.left) if watch is not None else {}
        stored = watch.take_stored() if watch is not None else {}
        self._box["facts"] = asked.facts
        self._box["tried"] = asked.tried
        self._box["made"] = made = list({id(t): t for t in asked.made}.values())  # else the export drops it
        if contents_of((args, kwargs)) != contents:
            raise CaptureError("forward edits a container or object among its arguments")
        flat: list[Any] = []
        slot: dict[int, int] = {}

        def leaf(x: Any) -> int | Fill | None:
            if isinstance(x, torch.SymBool):  # a relation between sizes: as it is now, or the capture does not hold
                truth = bool(x)
                return lambda _leaves: truth
            if not isinstance(x, (Tensor, torch.SymInt, torch.SymFloat)):
                reason = unreadable(x)
                if reason is None and id(x) in objects:
                    reason = f"forward returns a {type(x).__name__} that is among its arguments"
                if reason is not None:
                    raise CaptureError(reason)
                return None
            if id(x) not in slot:
                slot[id(x)] = len(flat)
                flat.append(x)
            return slot[id(x)]

        self._box["rebuild"] = skeleton((out, list(stored.values())) if stored else out, leaf)
        self._box["stored"] = {key: [slot[id(t)] for t in _each(value)] for key, value in stored.items()}
        if any(x is leaf for x in flat for leaf in asked.leaves):
            raise CaptureError("forward returns a leaf of its own making (requires_grad_): its gradient would be lost")
        put, returned = ([x for x in of if isinstance(x, Tensor)] for of in (leaves, flat))
        self._box["rebinds"], written = _write_assigned(before, put, returned)
        flat = [written.get(id(x), x) for x in flat]
        self._box["structure"] = _structure(out)
        self._box["hold"] = flat
        self._box["same"] = {i: standing[id(x)] for i, x in enumerate(flat) if id(x) in standing}
        self._box["conditions"] = tuple(self._asker.conditions)
        return (*flat, *made, *self._asker.values)


def _each(value: Any) -> Iterator[Tensor]:
    """The tensors of a tuple of tuples."""
    if isinstance(value, tuple):
        for x in value:
            yield from _each(x)
    else:
        yield value


def set_libraries(enabled: Sequence[bool | None] = (None, None)) -> list[bool]:
    """Switches torch.backends.cudnn and mkldnn on or off; None leaves one as it is. -> what they were."""
    puts: list[Any] = [torch.backends.cudnn.set_flags, torch.backends.mkldnn.set_flags]
    rest = [[None] * (len(inspect.signature(put).parameters) - 1) for put in puts]
    return [put(on, *others)[0] for put, on, others in zip(puts, enabled, rest, strict=True)]


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _write_assigned(
    modules: list[tuple[str, nn.Module, dict[str, Tensor | None], list[tuple[Tensor, bool]]]], given: list[Tensor],
    returned: list[Tensor],
) -> tuple[list[str], dict[int, Tensor]]:  # fmt: skip
    """A buffer to which forward has assigned a new tensor (`self.count = self.count + 1`) is written: the export would
    lose it. -> names of those buffers: before every run they get a tensor of their own, so that who holds the old one
    keeps the old values; and the buffers by what was assigned, which stand for it among the results."""
    writes: list[tuple[Tensor, Tensor]] = []
    names: list[str] = []
    owners = Counter(id(b) for _, _, before, _ in modules for b in before.values() if b is not None)
    memory, seen = ({private.storage_of(x) for x in of} for of in (given, returned))
    for fqn, module, before, params in modules:
        for name in {**before, **module._buffers}:
            old, new = before.get(name), module._buffers.get(name)
            if old is new:
                continue
            if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype or new.requires_grad:
                raise CaptureError(f"forward assigns another kind of tensor to the buffer self.{name}", fqn)
            if private.storage_of(new) in memory:
                raise CaptureError(f"forward assigns an argument, or a view of one, to the buffer self.{name}", fqn)
            if private.storage_of(old) in seen:  # whoever has it sees the old values
                raise CaptureError(f"forward returns what the buffer self.{name} was before it assigned another", fqn)
            if owners[id(old)] > 1:
                raise CaptureError(f"forward assigns to the buffer self.{name}, which other modules hold, too", fqn)
            writes.append((old, new))
            names.append(f"{fqn}.{name}".lstrip("."))
        now = [p for p in module._parameters.values() if p is not None]
        if len(now) != len(params) or any(p is not old for p, (old, _) in zip(now, params, strict=True)):
            raise CaptureError("forward assigns another parameter", fqn)
        if any(p.requires_grad != wanted for p, wanted in params):
            raise CaptureError("forward changes requires_grad of a parameter", fqn)
    # two may have changed places
    values = [new.clone() for _, new in writes] if len(writes) > 1 else [new for _, new in writes]
    for (old, _), value in zip(writes, values, strict=True):
        old.copy_(value)
    return names, {id(new): old for old, new in reversed(writes)}


# --- leaving no trace -----------------------------------------------------------------------------


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        torch.cuda.set_rng_state_all(devices)
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


@contextlib.contextmanager
def keep_attributes(root: nn.Module, registered: bool = False) -> Iterator[None]:
    """Restores attributes of the modules: which there are, what they refer to, and the contents of tensors held as
    plain attributes (of buffers too when `registered`, for a real run)."""
    modules = list(root.modules())
    before = [(m, dict(m.__dict__)) for m in modules]
    copies: list[tuple[Tensor, Tensor]] = []
    for _, attrs in before:
        held = list(attrs.values()) + (list(attrs["_buffers"].values()) if registered else [])
        copies += [(t, t.detach().clone()) for t in held if isinstance(t, Tensor)]
    containers = [(v, v.copy()) for _, attrs in before for v in attrs.values() if type(v) in (dict, list, OrderedDict)]
    versions = [contents.version_of(t) for t, _ in copies]
    try:
        yield
    finally:
        for (t, old), version in zip(copies, versions, strict=True):
            # without a new version: batch_norm's statistics; an edit in the trace that an exception has cut short
            if registered or contents.version_of(t) != version or not torch.equal(t, old):
                contents.put_tensor_back(t, old, version)
        for m, attrs in before:
            if m.__dict__.keys() != attrs.keys() or any(m.__dict__[k] is not v for k, v in attrs.items()):
                m.__dict__.clear()
                m.__dict__.update(attrs)
        for now, old_items in containers:
            if _differs(now, old_items):
                now.clear()
                now.extend(old_items) if isinstance(now, list) else now.update(old_items)


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(a[k] is not b[k] for k in b)
    return len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True))


def patched_torch() -> contextlib.AbstractContextManager[None]:
    """Places of torch that read data or unroll time while tracing, or put other objects in the place of modules. The
    causal-mask detector of nn.Transformer compares values (the engine finds causality itself); recurrent layers ask on
    CUDA where their weights lie, for cuDNN's sake, and their fake kernels unroll the sequence, which fixes its length;
    torch.div of sizes gives a tensor, whose value would be read as one that only the data knows; passes that make
    subgraphs of grad modes and autocast lose one inside of the other. Where a submodule stands at two places of the
    tree, a trace shows code a new object for each submodule at each access, which is neither the module nor of its
    class. Modules that other threads call are no part of the trace. What torch.jit.script has made of a function hides
    from autograd what it runs, once it has run a few times."""
    flatten = nn.RNNBase.flatten_parameters
    script = torch.jit.ScriptFunction
    rows = [Patch(script, "__call__", only_here(_of_script, script.__call__)),
            Patch(nn.RNNBase, "flatten_parameters", only_here(lambda self: None, flatten))]
    for of, name in ((private.grad_regions, "replace_set_grad_with_hop_pass"),
                     (private.autocast_regions, "replace_autocast_with_hop_pass")):
        rows.append(Patch(of, name, only_here(lambda gm, signature: (gm, signature), getattr(of, name))))
    if private.has("surely"):
        rows += [Patch(of, name, only_here(_remembering(name, getattr(of, name)), getattr(of, name)))
                 for of, names in ((torch, ("div", "divide", "floor_divide")), (Tensor, _SIZES)) for name in names]
    if private.has("module_tracer"):
        tracer = private.module_tracer
        rows += [Patch(tracer, "getattr", only_here(super(tracer, tracer).getattr, lambda self, name, value, _: value)),
                 Patch(tracer, "call_module", only_here(tracer.call_module, _called_elsewhere))]
    if private.has("transformer"):
        detect = private.transformer._detect_is_causal_mask

        def never_looks(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
            return is_causal is True

        rows.append(Patch(private.transformer, "_detect_is_causal_mask", only_here(never_looks, detect)))
    if private.has("composite_kernel"):
        aten, key = torch.ops.aten, private.composite_kernel
        for graded, kind in product((True, False), autocast.KINDS[: 1 + torch.cuda.is_initialized()]):
            _lowered(graded, kind)  # now, while tensors have values
        for op in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
            before = op.py_kernels.get(key) or functools.partial(_recurrent, op)
            rows += [Patch(op.py_kernels, key, only_here(functools.partial(_types_only, op), before)),
                     Patch(op, "_dispatch_cache", {})]  # filled from the kernels, for all keys
    return replaced(*rows)


def _of_script(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of TorchScript as the Python that it was made of."""
    original = getattr(self, "_torchdynamo_inline", None)
    if original is None:
        raise CaptureError(f"forward calls {self.name}, a function of TorchScript whose Python is not known")
    return original(*args, **kwargs)


def _called_elsewhere(self: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A module that another thread calls while this one traces."""
    return forward(*args, **kwargs)


def _remembering(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """compute, of name, for numbers that are sizes, as ints or in tensors of one number: what it makes remembers which
    size it is."""

    def size_in(x: Any) -> Any:
        return getattr(x, "item_memo", None) if isinstance(x, private.FakeTensor) and not x.dim() else x

    def computed(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        made = compute(a, b, *args, **kwargs)
        if not isinstance(made, private.FakeTensor) or made.dtype is not torch.int64 or made.dim() or args:
            return made
        x, y = size_in(a), size_in(b)
        if torch.SymInt not in (type(x), type(y)) or not {type(x), type(y)} <= {torch.SymInt, int}:
            return made
        if name in _SIZES:
            made.item_memo = _SIZES[name](x, y)
        elif (kwargs == {} if name == "floor_divide" else kwargs in ({"rounding_mode": "trunc"},
                                                                    {"rounding_mode": "floor"})):  # fmt: skip
            if private.surely(x >= 0) and private.surely(y > 0):
                made.item_memo = x // y
        return made

    return computed


_SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": operator.add, "__radd__": operator.add, "__mul__": operator.mul, "__rmul__": operator.mul,
    "__sub__": operator.sub, "__rsub__": lambda a, b: b - a,
}  # fmt: skip


def _recurrent(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the operator does without a kernel in Python."""
    return op._op_dk(private.composite_kernel, *args, **kwargs)


@functools.cache
def _lowered(graded: bool, kind: str) -> dict[tuple[Any, torch.dtype, torch.dtype, torch.dtype], list[torch.dtype]]:
    """Types of the recurrent operators' results under autocast of a type of device, by operator, autocast's type, those
    of input and state. Asked of PyTorch, because they depend on the processor (oneDNN's LSTM), on what of the operator
    is cast, and on whether gradients are recorded (oneDNN's LSTM in fp16 is for inference)."""
    found = {}
    half, double = (torch.float32, torch.bfloat16, torch.float16), torch.float64
    for op, gates in ((torch.lstm, 4), (torch.gru, 3), (torch.rnn_tanh, 1), (torch.rnn_relu, 1)):
        for low, (of_x, of_state) in product(half[1:], [*product(half, half), (double, double)]):
            w = torch.ones(8 * gates, 8, dtype=double if of_x == double else torch.float32, device=kind)
            x, zero = torch.ones(2, 1, 8, dtype=of_x, device=kind), torch.zeros(1, 1, 8, dtype=of_state, device=kind)
            b = w[:, 0].contiguous()
            with (torch.set_grad_enabled(graded), torch.autocast(kind, low, cache_enabled=False),
                  contextlib.suppress(RuntimeError)):  # fmt: skip
                states: Any = (zero, zero) if gates == 4 else zero
                made = op(x, states, [w, w, b, b], True, 1, 0.0, False, False, False)
                found[getattr(torch.ops.aten, op.__name__).input, low, of_x, of_state] = [t.dtype for t in made]
    return found


def _types_only(op: Any, x: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
                train: bool, bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
    state = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    made = [x.new_empty(steps, batch, state[0].shape[2] * (2 if bidirectional else 1))]
    made += [s.new_empty(s.shape) for s in state]
    kind = x.device.type
    if kind in autocast.KINDS and torch.is_autocast_enabled(kind):
        known = _lowered(torch.is_grad_enabled(), kind)
        types = known.get((op, torch.get_autocast_dtype(kind), x.dtype, state[0].dtype))
        made = [t.to(to) for t, to in zip(made, types or [t.dtype for t in made], strict=True)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state, *params)):
        made = [t.requires_grad_().clone() for t in made]  # a result, no leaf
    if batch_first:  # memory has the steps first
        made[0] = made[0].transpose(0, 1)
    return tuple(made)


def _light() -> contextlib.AbstractContextManager[None]:
    """A quarter of the tracing time goes into two things that nobody reads: source lines of the frames inside torch in
    every node's stack trace, and Python code for graph modules that the next pass of the export rewrites; with symbols
    another quarter into a second result of each operation, made for its dispatch keys (_like_result)."""
    rows: list[Patch] = []
    if private.has("trace_lines"):
        rows.append(Patch(private.trace_lines, "_extract_symbolized_tb",
                          only_here(_users_lines, private.trace_lines._extract_symbolized_tb)))
    if private.has("graph_code"):
        recompile = fx.GraphModule.recompile

        def once(gm: fx.GraphModule) -> Any:
            return None if "_code" in gm.__dict__ else recompile(gm)

        rows.append(Patch(fx.GraphModule, "recompile", only_here(once, recompile)))
    if private.has("known_results"):
        mode, name = private.known_results, "_output_from_cache_entry"
        rows.append(Patch(mode, name, only_here(_like_result(getattr(mode, name)), getattr(mode, name))))
    return replaced(*rows)


def _like_result(made: Callable[..., Any]) -> Callable[..., Any]:
    """Before it keeps what it knows of a result for the next call of the kind, PyTorch makes such a result and looks at
    its dispatch keys. They do not depend on sizes, and a tensor of symbolic ones asks a dozen questions of them."""
    module = sys.modules[private.FakeTensor.__module__]

    def result(self: Any, state: Any, entry: Any, *rest: Any) -> Any:
        like = entry.output_infos[0].metadata
        asked = sys._getframe(2).f_code.co_name == "_get_output_info_for_cache_entry"
        if not asked or like is None or like.layout is not torch.strided or like.is_conj or like.is_neg or (
            not state.known_symbols or any(map(_of_data, state.known_symbols))
        ):
            return made(self, state, entry, *rest)
        ones = [1] * len(like.shape)
        with module.in_kernel_invocation_manager(self):
            small = torch.empty_strided(ones, ones, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)
        return private.FakeTensor(self, small, like.device)

    return result


@functools.cache
def _of_data(symbol: Any) -> bool:
    """Is it a size that only data knows?"""
    return bool(private.free_unbacked_symbols(symbol))


def _users_lines(found: list[dict[str, Any]], skip: int) -> traceback.StackSummary:
    return traceback.StackSummary.from_list(
        [(f["filename"], f["line"], f["name"], "") for f in reversed(found[skip:]) if is_user_file(f["filename"])]
    )


def _forwards(frame: types.FrameType) -> bool:
    """Is it of the user's code, or of torch.nn's?"""
    return is_user_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_TORCH_NN)


Warned: TypeAlias = tuple[str, type[Warning], str, int]  # text, category, file, line


@contextlib.contextmanager
def without_warnings() -> Iterator[list[Warned]]:
    """No warning is shown. -> those of forward's own: of the user's code, and of torch.nn as the user has called it;
    not those of what stays in PyTorch, which warns itself."""
    found: list[Warned] = []
    shown: Any = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], file: str, line: int, *rest: Any) -> None:
        scope = patches.here()
        if scope is None:  # another thread's
            return shown(message, category, file, line, *rest)
        frames_ = [f for f in frames.outwards(sys._getframe(1)) if f.f_code.co_filename != warnings.__file__]
        if _forwards(frames_[0]) and not (scope.watch and scope.watch.quiet):
            # the trace stands between a function of torch.nn and who has called it
            at = next((f for f in frames_ if _forwards(f) and f.f_code.co_filename != _FUNCTIONAL), frames_[0])
            where = (file, line) if is_user_file(file) else (at.f_code.co_filename, at.f_lineno)
            found.append((str(message), category, *where))

    log = logging.getLogger("torch.export")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note  # type: ignore[assignment]
            yield found
    finally:
        log.setLevel(level)


# --- where an error comes from --------------------------------------------------------------------


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
    return CaptureError(told or f"{type(error).__name__}: {first}", module or "", file, line)


_OF_TORCH = {  # what the export says -> what it is about
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


# --- export ---------------------------------------------------------------------------------------


def export_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic: bool = False,
    symbolic_scalars: bool = False,
    keep_in_torch: Collection[str] = (),
    fixed: Collection[tuple[int, int]] = (),
    cut: tuple[Any, ...] = (),
    answers: branches.Answers | None = None,
    rehearse: bool = False,
    earlier: Sequence[dict[str, list[opaque.Recorded]]] = (),
    ones_are_symbols: bool = True,
) -> Exported:
    """Traces `module(*args, **kwargs)`; raises CaptureError. fixed: (tensor leaf, axis) that stay numbers in a dynamic
    capture, as sizes of 1 do without ones_are_symbols. cut: the cuts.Places of hooks. answers: those of the first
    branches on values that forward meets; None: a branch is an error. rehearse: others are expected. earlier: what
    modules in `keep` have returned at other sizes."""
    keep = sorted(keep_in_torch)
    lacking = private.lacks("capture")
    if lacking is not None:
        raise CaptureError(lacking)
    with patches.scope(), without_warnings() as warned, keep_random_state():
        told = _Told(module, args, kwargs, answers)
        if rehearse:
            told.rehearse()

        def trace(table: opaque.Table, asker: branches.Asker) -> Exported:
            warned.clear()
            return _export(module, args, kwargs, dynamic, symbolic_scalars, keep, table, fixed, cut, asker, earlier,
                           ones_are_symbols)  # fmt: skip

        try:
            exported = told.until_answered(trace)
            exported.warned = [*dict.fromkeys(warned)]
            return exported
        except CaptureError:
            raise
        except Exception as e:
            error = capture_error(module, e)
            ones = any(d == 1 for t in flatten_inputs(args, kwargs).tensors for d in t.shape)
            if not (dynamic and ones and ones_are_symbols):
                raise error from e
        # Taken as a symbol, a size of 1 does not broadcast. Where that was the trouble, such sizes are numbers.
        try:
            return told.until_answered(
                lambda table, asker: _export(
                    module, args, kwargs, dynamic, symbolic_scalars, keep, table, fixed, cut, asker, earlier, False
                )
            )
        except Exception:
            raise error from None


class _Told:
    """What a trace answers where forward branches on a value, as far as that is known."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answers: branches.Answers | None
    ) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._known = answers
        self._log: list[branches.Condition | branches.Read] | None = None  # of the rehearsal

    def until_answered(self, trace: Callable[[opaque.Table, branches.Asker], Exported]) -> Exported:
        while True:
            try:
                with opaque.table() as table:
                    return trace(table, branches.Asker(self._module, self._known, self._log))
            except branches.Unanswered:
                # a custom Function: it would run as often as a condition changes
                calls = [r for r in table.rows if r.kind != "aten"]
            if calls:
                raise branches.NoBranches(f"branches on values of tensors, and {calls[0].name} kept in PyTorch")
            if self._log is not None:
                raise CaptureError("a branch on a tensor's value, which is taken while forward is traced only")
            self.rehearse()

    def rehearse(self) -> None:
        """Forward in PyTorch, on copies of the arguments."""
        assert self._known is not None
        fill, flat = input_skeleton(self._args, self._kwargs)
        own = {id(t) for _, t in _tensors_of(self._module)}
        copies: dict[int, Tensor] = {}
        for t in flat.tensors:
            if id(t) not in copies:
                copies[id(t)] = t if id(t) in own else t.detach().clone().requires_grad_(t.requires_grad)
        args, kwargs = fill([*[copies[id(t)] for t in flat.tensors], *flat.scalars])
        with keep_attributes(self._module, registered=True):
            self._log = branches.rehearse(self._module, lambda: self._module(*args, **kwargs), self._known)


def _example(t: Tensor) -> Tensor:
    """The export wants leaf tensors and edits user inputs in place for real when the module does: give it a
    stand-in."""
    return t.detach().requires_grad_(t.requires_grad) if t.is_floating_point() else t.detach()


def _objects(x: Any, found: dict[int, Any]) -> dict[int, Any]:
    """What among the arguments somebody may edit: for who gets such an object back it must be the same one."""
    if isinstance(x, (Tensor, torch.SymInt, torch.SymFloat)) or id(x) in found or is_cache(x):
        return found
    state = state_of(x) or {}
    if isinstance(x, (list, dict)) or state:
        found[id(x)] = x
    for y in [*(x if isinstance(x, (list, tuple)) else dict.values(x) if isinstance(x, dict) else ()), *state.values()]:
        _objects(y, found)
    return found


def _structure(out: Any) -> Any:
    """What a result is but for sizes and values."""
    try:
        return flatten_inputs((out,), {}).key
    except Unreadable:
        return None


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, symbolic_scalars: bool,
            keep: list[str], table: opaque.Table, fixed: Collection[tuple[int, int]], cut: tuple[Any, ...],
            asker: branches.Asker, earlier: Sequence[dict[str, list[opaque.Recorded]]] = (),
            ones_are_symbols: bool = True) -> Exported:  # fmt: skip
    fill, flat = input_skeleton(args, kwargs)
    n = len(flat.tensors)
    examples: dict[int, Tensor] = {}  # an argument that is given twice is one tensor for the trace, too
    leaves: list[Any] = [examples.setdefault(id(t), _example(t)) for t in flat.tensors]
    floats: list[int] = []
    if symbolic_scalars:
        for i, x in enumerate(flat.scalars):
            if type(x) is float:
                floats.append(n + i)
            leaves.append(torch.tensor(x, dtype=torch.float64, device="cpu") if type(x) is float else x)
    else:
        constants, inner = list(flat.scalars), fill
        fill = lambda values: inner([*values, *constants])  # noqa: E731
    table.root = module
    recorded = bool(keep) and (not dynamic or not cut and any(all(k in c for k in keep) for c in earlier))
    if recorded:
        table.earlier = earlier if dynamic else ()
        with contextlib.ExitStack() as stack:
            stack.enter_context(keep_attributes(module, registered=True))
            if cut:
                stack.enter_context(marks.silent(module))
                stack.enter_context(quiet())
            real = [t.detach().clone().requires_grad_(t.requires_grad) for t in flat.tensors]
            inner_args, inner_kwargs = input_skeleton(args, kwargs)[0]([*real, *flat.scalars])
            table.recorded, result = opaque.record_results(module, keep, lambda: module(*inner_args, **inner_kwargs))
    box: dict[str, Any] = {}
    wrapper = _Wrapper(module, fill, flat.tensors, floats, box, asker)
    asked: dict[Any, str] = {}
    shapes: Any = None
    if dynamic or symbolic_scalars:
        auto = Dim.AUTO
        shapes = {
            "leaves": tuple(
                (
                    {
                        d: auto
                        for d, size in enumerate(x.shape)
                        if (size > 1 or size == 1 and ones_are_symbols) and (i, d) not in fixed
                    }
                    if dynamic
                    else None
                )
                if isinstance(x, Tensor)
                else Dim.DYNAMIC
                if type(x) is int
                else None
                for i, x in enumerate(leaves)
            )
        }
    with (
        keep_attributes(module),
        opaque.keep_functions(),
        marks.marked(module, cut, keep) as rest,
        opaque.keep_modules(module, rest),
        checkpoints.marked(),
        patched_torch(),
        layouts.unasked(asked),
        _light(),
        private.size_config.patch(backed_size_oblivious=True) if private.size_config else contextlib.nullcontext(),
    ):
        try:
            program = torch.export.export(wrapper, tuple(leaves), dynamic_shapes=shapes, strict=False,
                                          prefer_deferred_runtime_asserts_over_guards=False)
        finally:
            wrapper._real = dict  # the arguments are the caller's to hold
            private.export_map.clear()
            private.forget_real(next((m for t in box.get("hold", ()) if (m := getattr(t, "fake_mode", None))), None))
    if cut:
        marks.check(program, module, table)
    if recorded and box["structure"] != _structure(result):
        raise CaptureError(
            f"hooks on submodules (of {', '.join(keep)}) take part in what forward returns: without them it returns "
            "something else"
        )
    _check_stopped(module)
    return Exported(
        program.graph_module,
        _sources(module, program, leaves),
        box["rebuild"],
        table,
        torch.is_grad_enabled(),
        autocast.now(),
        _ranges(program),
        _sizes(program),
        leaves,
        box["rebinds"],
        box["tried"],
        len(box["made"]),
        box["facts"],
        box["same"],
        box["conditions"],
        asked,
        box["left"],
        box["stored"],
    )


def _sources(module: nn.Module, program: Any, leaves: list[Any]) -> dict[str, Source]:
    canonical, plain = contents.registered(module), contents.unregistered(module)
    users = {n.name: list(n.users) for n in program.graph.nodes if n.op == "placeholder"}
    sources: dict[str, Source] = {}
    living = functools.cache(lambda: _C.living((Tensor, nn.Parameter)))  # looks at every object there is
    n_user = 0
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        target = (spec.target or "").removeprefix(_PREFIX)
        if spec.kind == InputKind.USER_INPUT:
            sources[name] = Source("user", leaf=n_user)
            n_user += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            t = _registered(module, target)
            kind = "param" if spec.kind == InputKind.PARAMETER else "buffer"
            sources[name] = Source(kind, canonical.get(id(t), target), tensor=t)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            t = program.constants[spec.target]
            if id(t) in plain:
                sources[name] = Source("const_attr", plain[id(t)], tensor=t)
            elif all(n.target is torch.ops.aten.lift_fresh_copy.default for n in users[name]):
                sources[name] = Source("constant", target, tensor=t)  # written in the code: torch.tensor([1.0, 2.0])
            else:
                sources[name] = Source("const_attr", target, tensor=_original(t, living()))
        else:
            raise CaptureError(
                f"an input of kind {spec.kind.name} ({target or name}) has no meaning in a training graph"
            )
    return sources


def _check_stopped(module: nn.Module) -> None:
    """The export takes a tensor over all of a parameter's memory (w.detach() in a list, a closure, a global) for the
    parameter, and so for trained."""
    watch = watching()
    if watch is None:
        return
    trained = {_memory(p): name for name, p in module.named_parameters() if p.requires_grad}
    for x in watch.met():
        name = trained.get(_memory(x)) if isinstance(x, Tensor) and not x.requires_grad else None
        if name is not None:
            raise CaptureError(f"forward reaches a tensor without gradient that is over the memory of {name}, which is "
                               f"trained: write self.{name}.detach()")  # fmt: skip


def _memory(t: Tensor) -> Any:
    plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and t.numel()
    return (t.data_ptr(), t.shape, t.stride(), t.dtype) if plain else id(t)


def _original(t: Tensor, living: Sequence[Tensor]) -> Tensor:
    """The export holds tensors that the code reaches in other ways (closures, globals, lists of a module) by an alias
    without gradient; the object itself is found by its memory: of several, the one that the code has come to."""
    found = [
        x
        for x in living
        if x is not t
        and x.dtype == t.dtype
        and x.shape == t.shape
        and x.layout == torch.strided
        and x.data_ptr() == t.data_ptr()
        and x.stride() == t.stride()
    ]
    watch = watching()
    seen = set(map(id, watch.met())) if watch is not None else set()
    found = [x for x in found if id(x) in seen] or found
    if not found and frames.frozen():
        raise CaptureError(
            f"a tensor {tuple(t.shape)} that is no parameter or buffer of the module, which gc.freeze() hides: "
            "call it after the first step"
        )
    return next((x for x in found if x.requires_grad and x.is_leaf), found[0] if found else t)


def _registered(module: nn.Module, fqn: str) -> Tensor:
    owner, _, name = fqn.rpartition(".")
    return getattr(module.get_submodule(owner), name)  # type: ignore[no-any-return]


def _sizes(program: Any) -> Any:
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, Tensor) and getattr(val, "fake_mode", None) is not None:
            return val.fake_mode.shape_env  # type: ignore[attr-defined]
    return None


def _ranges(program: Any) -> dict[Any, tuple[int, int]]:
    big = 2**62
    out: dict[Any, tuple[int, int]] = {}
    for symbol, r in program.range_constraints.items():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            out[symbol] = (int(r.lower) if r.lower > -big else -big, int(r.upper) if r.upper < big else big)
    return out


SourceOf = Callable[[fx.Node], tuple[str, str, int]]


def source_of() -> SourceOf:
    """node -> (fqn of the innermost module, file, line of the innermost user frame)."""
    known: dict[str, tuple[str, int]] = {}

    def of(node: fx.Node) -> tuple[str, str, int]:
        stack = node.meta.get("nn_module_stack")
        fqn = ""
        if stack:
            fqn = next(reversed(stack.values()))[0]
            fqn = fqn[len(_PREFIX):] if fqn.startswith(_PREFIX) else ""
        trace = node.meta.get("stack_trace") or ""
        at = known.get(trace)
        if at is None:
            at = ("", 0)
            for text in reversed(trace.splitlines()):
                if text.startswith('  File "') or text.startswith('File "'):
                    path, _, rest = text.partition('"')[2].partition('"')
                    if is_user_file(path):
                        at = (path, int(rest.partition("line ")[2].partition(",")[0]))
                        break
            known[trace] = at
        return fqn, at[0], at[1]

    return of
