"""While a module is traced: what of torch is replaced, and what is kept as it was before (random states, attributes of
modules, warnings)."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import random
import sys
import traceback
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from .. import autocast, contents, frames, patches
from .. import torch_private as private
from ..errors import CaptureError
from ..frames import is_user_file
from ..patches import Patch, only_here, replaced
from ..watch import watching

_TORCH_NN = os.path.join(frames.TORCH_DIR, "nn", "")
_FUNCTIONAL = os.path.join(_TORCH_NN, "functional.py")


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


@contextlib.contextmanager
def no_history(root: nn.Module) -> Iterator[None]:
    """Around a trace. Autograd's metadata of a tensor that is neither parameter, buffer nor argument is the real one in
    a trace: what is written there makes it part of the trace's graph, and it requires a gradient. It is a leaf again
    afterwards, as it was (refused.py, _HISTORY)."""
    start = _sequence_nr()
    try:
        yield
    finally:
        watch = watching()
        met = [t for t in watch.met() if isinstance(t, Tensor)] if watch is not None else []
        own = [t for m in root.modules() for t in m.__dict__.values() if isinstance(t, Tensor)]
        for t in {id(t): t for t in (*own, *met)}.values():
            if t.grad_fn is not None and not t._is_view() and t.grad_fn._sequence_nr() >= start:
                t.detach_()


def _sequence_nr() -> int:
    """The number that autograd gives to the next node of this thread."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.zeros((), device="cpu", requires_grad=True).clone().grad_fn
    assert node is not None
    return node._sequence_nr()


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


def light() -> contextlib.AbstractContextManager[None]:
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
