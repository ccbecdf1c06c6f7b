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
import gc
import logging
import os
import random
import sys
import threading
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
import torch.utils._traceback as torch_traceback
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from ..watch import quiet, running
from . import opaque
from .refused import NotRepeatable, refusing
from .skeleton import Fill, Unreadable, flatten_inputs, input_skeleton, skeleton, unreadable

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PREFIX = "m."  # the user's module inside the wrapper
_lock = threading.RLock()


class CaptureError(Exception):
    """The module could not be captured. reason: why; module: innermost user submodule ('' = the whole); file, line:
    user's source."""

    def __init__(self, reason: str, module: str = "", file: str = "", line: int = 0) -> None:
        where = f" in submodule '{module}'" if module else ""
        at = f" ({file}:{line})" if file else ""
        super().__init__(f"capture failed{where}{at}: {reason}")
        self.reason = reason
        self.module = module
        self.file = file
        self.line = line


@dataclass
class Source:
    """A placeholder of the exported graph. leaf: index into the flattened user leaves. tensor: the object, for all but
    user inputs."""

    kind: str  # 'user' | 'param' | 'buffer' | 'const_attr' | 'constant'
    target: str = ""
    leaf: int = -1
    tensor: Tensor | None = None


@dataclass
class Exported:
    """graph_module: training IR. sources: by placeholder name. outputs: per output of the graph nothing but order;
    rebuild: from values of the slots. rebinds: buffers to which forward assigns a new tensor."""

    graph_module: fx.GraphModule
    sources: dict[str, Source]
    rebuild: Fill
    table: opaque.Table
    grad_mode: bool
    autocast: bool
    ranges: dict[Any, tuple[int, int]]
    guards: list[Any]
    leaves: list[Any] = field(default_factory=list)
    rebinds: list[str] = field(default_factory=list)


class _Wrapper(nn.Module):
    """Flat leaves in, flat tuple of leaves out."""

    def __init__(
        self, module: nn.Module, fill: Fill, n_tensors: int, float_leaves: Collection[int], box: dict[str, Any]
    ) -> None:
        super().__init__()
        self.m = module
        self._fill = fill
        self._floats = frozenset(float_leaves)
        self._box = box
        self.training = module.training

    def forward(self, *leaves: Any) -> Any:
        # A float argument travels as a 0-d tensor; item() gives the symbolic Python number that torch's promotion rules
        # expect.
        values = [x.item() if i in self._floats else x for i, x in enumerate(leaves)]
        args, kwargs = self._fill(values)
        given = _contents((args, kwargs))
        before = [(fqn, m, dict(m._buffers), [(p, p.requires_grad) for p in m._parameters.values() if p is not None])
                  for fqn, m in self.m.named_modules()]
        with refusing(is_user_file), running():
            out = self.m(*args, **kwargs)
        if _contents((args, kwargs)) != given:
            raise CaptureError("forward edits a container or object among its arguments")
        self._box["rebinds"] = _write_assigned(before, [x for x in leaves if isinstance(x, Tensor)])
        flat: list[Any] = []
        slot: dict[int, int] = {}

        def leaf(x: Any) -> int | None:
            if not isinstance(x, (Tensor, torch.SymInt, torch.SymFloat)):
                reason = unreadable(x)
                if reason is not None:
                    raise CaptureError(reason)
                return None
            if id(x) not in slot:
                slot[id(x)] = len(flat)
                flat.append(x)
            return slot[id(x)]

        self._box["rebuild"] = skeleton(out, leaf)
        self._box["structure"] = _structure(out)
        self._box["hold"] = flat
        return tuple(flat)


def _write_assigned(
    modules: list[tuple[str, nn.Module, dict[str, Tensor | None], list[tuple[Tensor, bool]]]], given: list[Tensor]
) -> list[str]:
    """A buffer to which forward has assigned a new tensor (`self.count = self.count + 1`) is written: the export would
    lose it. -> names of those buffers: before every run they get a tensor of their own, so that who holds the old one
    keeps the old values."""
    writes: list[tuple[Tensor, Tensor]] = []
    names: list[str] = []
    owners = Counter(id(b) for _, _, before, _ in modules for b in before.values() if b is not None)
    memory = {x.untyped_storage()._cdata for x in given}
    for fqn, module, before, params in modules:
        for name in {**before, **module._buffers}:
            old, new = before.get(name), module._buffers.get(name)
            if old is new:
                continue
            if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype or new.requires_grad:
                raise CaptureError(f"forward assigns another kind of tensor to the buffer self.{name}", fqn)
            if new.untyped_storage()._cdata in memory:
                raise CaptureError(f"forward assigns an argument, or a view of one, to the buffer self.{name}", fqn)
            if owners[id(old)] > 1:
                raise CaptureError(f"forward assigns to the buffer self.{name}, which other modules hold, too", fqn)
            writes.append((old, new))
            names.append(f"{fqn}.{name}".lstrip("."))
        if any(p.requires_grad != wanted for p, wanted in params):
            raise CaptureError("forward changes requires_grad of a parameter", fqn)
    # two may have changed places
    values = [new.clone() for _, new in writes] if len(writes) > 1 else [new for _, new in writes]
    for (old, _), value in zip(writes, values, strict=True):
        old.copy_(value)
    return names


# --- leaving no trace -----------------------------------------------------------------------------


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


@contextlib.contextmanager
def _keep_attributes(root: nn.Module, registered: bool = False) -> Iterator[None]:
    """Restores attributes of the modules: which there are, what they refer to, and the contents of tensors held as
    plain attributes (of buffers too when `registered`, for a real run)."""
    modules = list(root.modules())
    before = [(m, dict(m.__dict__)) for m in modules]
    copies: list[tuple[Tensor, Tensor]] = []
    for _, attrs in before:
        held = list(attrs.values()) + (list(attrs["_buffers"].values()) if registered else [])
        copies += [(t, t.detach().clone()) for t in held if isinstance(t, Tensor)]
    containers = [(v, v.copy()) for _, attrs in before for v in attrs.values() if type(v) in (dict, list, OrderedDict)]
    versions = [t._version for t, _ in copies]
    try:
        yield
    finally:
        for (t, old), version in zip(copies, versions, strict=True):
            if registered or t._version != version:  # batch_norm updates its statistics without a new version
                with torch.no_grad():
                    t.detach().copy_(old)
                torch._C._autograd._unsafe_set_version_counter((t,), (version,))  # a backward may be waiting
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


@contextlib.contextmanager
def _patched_torch() -> Iterator[None]:
    """Two places of torch read data or unroll time while tracing. The causal-mask detector of nn.Transformer compares
    values (the engine finds causality itself); the recurrent layers' fake kernels unroll the sequence, which fixes its
    length."""
    import torch.nn.modules.transformer as transformer

    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    aten = torch.ops.aten
    recurrent = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
    before = [op.py_kernels.get(key) for op in recurrent]

    def types_only(x: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
                   bidirectional: bool, batch_first: bool) -> Any:
        state = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        out = x.new_empty(x.shape[0], x.shape[1], state[0].shape[2] * (2 if bidirectional else 1))
        return (out, *[torch.empty_like(s) for s in state])

    try:
        for op in recurrent:
            op._dispatch_cache.clear()
            op.py_kernels[key] = types_only
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        for op, kernel in zip(recurrent, before, strict=True):
            op._dispatch_cache.clear()
            op.py_kernels.pop(key, None)
            if kernel is not None:
                op.py_kernels[key] = kernel


@contextlib.contextmanager
def _light() -> Iterator[None]:
    """A quarter of the tracing time goes into two things that nobody reads: source lines of the frames inside torch in
    every node's stack trace, and Python code for graph modules that the next pass of the export rewrites."""
    extract, recompile = torch_traceback._extract_symbolized_tb, fx.GraphModule.recompile

    def users(frames: list[dict[str, Any]], skip: int) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(
            [(f["filename"], f["line"], f["name"], "") for f in reversed(frames[skip:]) if is_user_file(f["filename"])]
        )

    def once(gm: fx.GraphModule) -> Any:
        return None if "_code" in gm.__dict__ else recompile(gm)

    torch_traceback._extract_symbolized_tb = users
    fx.GraphModule.recompile = once  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch_traceback._extract_symbolized_tb = extract
        fx.GraphModule.recompile = recompile  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


# --- where an error comes from --------------------------------------------------------------------


def is_user_file(path: str) -> bool:
    """Neither torch's nor this package's."""
    return not path.startswith((_TORCH_DIR, _OWN_DIR, "<"))


def capture_error(root: nn.Module, error: BaseException) -> CaptureError:
    """Names the innermost submodule whose forward is on the traceback, and the innermost line of user code; after the
    trace, those of the node at hand."""
    if isinstance(error, CaptureError):
        return error
    names = {id(m): fqn for fqn, m in root.named_modules()}
    module, file, line, depth = "", "", 0, -1
    chain: list[BaseException] = []
    e: BaseException | None = error
    while e is not None and e not in chain:
        chain.append(e)
        e = e.__cause__ or e.__context__
    for e in chain:
        at: list[Any]
        tb, n, found, at = e.__traceback__, 0, "", ["", 0]
        while tb is not None:
            frame = tb.tb_frame
            if frame.f_code.co_filename.startswith(_OWN_DIR):
                sources = [getattr(frame.f_locals.get(k), "src", None) for k in ("node", "self")]
                found, *at = next((s for s in sources if type(s) is tuple), (found, *at))
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            base = getattr(type(owner), "get_base", None)
            if base is not None:
                with contextlib.suppress(Exception):  # a proxy that was not finished
                    owner = owner.get_base()  # type: ignore[union-attr]
            if isinstance(owner, nn.Module) and id(owner) in names:
                found = names[id(owner)]
            if is_user_file(frame.f_code.co_filename):
                at = [frame.f_code.co_filename, tb.tb_lineno]
            n, tb = n + 1, tb.tb_next
        if n > depth:
            depth, module, (file, line) = n, found, at
    text = str(error).strip()
    first = next((s.strip() for s in text.splitlines() if s.strip()), "")
    if isinstance(error, NotRepeatable):
        return CaptureError(first, "" if error.whole else module, file, line)
    return CaptureError(f"{type(error).__name__}: {first}", module, file, line)


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
) -> Exported:
    """Traces `module(*args, **kwargs)`; raises CaptureError. fixed: (tensor leaf, axis) that stay numbers in a dynamic
    capture. cut: the cuts.Places of hooks."""
    keep = sorted(keep_in_torch)
    with _lock, _quiet(), _keep_random_state():
        try:
            with opaque.table() as table:
                return _export(module, args, kwargs, dynamic, symbolic_scalars, keep, table, fixed, cut)
        except CaptureError:
            raise
        except Exception as e:
            error = capture_error(module, e)
            if not dynamic or all(d != 1 for t in flatten_inputs(args, kwargs).tensors for d in t.shape):
                raise error from e
        # Taken as a symbol, a size of 1 does not broadcast. Where that was the trouble, such sizes are numbers.
        try:
            with opaque.table() as table:
                return _export(
                    module, args, kwargs, dynamic, symbolic_scalars, keep, table, fixed, cut, ones_are_symbols=False
                )
        except Exception:
            raise error from None


def _example(t: Tensor) -> Tensor:
    """The export wants leaf tensors and edits user inputs in place for real when the module does: give it a
    stand-in."""
    return t.detach().requires_grad_(t.requires_grad) if t.is_floating_point() else t.detach()


def _contents(x: Any, depth: int = 0) -> Any:
    """What stands where in the arguments, by identity (a comparison of symbolic numbers would fix them)."""
    if depth > 8:
        return id(x)
    if isinstance(x, (list, tuple)):
        return [_contents(y, depth + 1) for y in x]
    if isinstance(x, dict):
        return [(k, _contents(y, depth + 1)) for k, y in dict.items(x)]
    library = type(x).__module__.partition(".")[0] in ("torch", "builtins", "types")
    if library or isinstance(x, (Tensor, nn.Module, type)) or not hasattr(x, "__dict__"):
        return id(x)
    return [(k, _contents(y, depth + 1)) for k, y in vars(x).items()]


def _structure(out: Any) -> Any:
    """What a result is but for sizes and values."""
    try:
        return flatten_inputs((out,), {}).key
    except Unreadable:
        return None


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, symbolic_scalars: bool,
            keep: list[str], table: opaque.Table, fixed: Collection[tuple[int, int]], cut: tuple[Any, ...],
            ones_are_symbols: bool = True) -> Exported:  # fmt: skip
    from . import cuts

    fill, flat = input_skeleton(args, kwargs)
    n = len(flat.tensors)
    leaves: list[Any] = [_example(t) for t in flat.tensors]
    floats: list[int] = []
    if symbolic_scalars:
        for i, x in enumerate(flat.scalars):
            if type(x) is float:
                floats.append(n + i)
            leaves.append(torch.tensor(x, dtype=torch.float64) if type(x) is float else x)
    else:
        constants, inner = list(flat.scalars), fill
        fill = lambda values: inner([*values, *constants])  # noqa: E731
    if keep and not dynamic:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_keep_attributes(module, registered=True))
            if cut:
                stack.enter_context(cuts.silent(module))
                stack.enter_context(quiet())
            real = [t.detach().clone().requires_grad_(t.requires_grad) for t in flat.tensors]
            inner_args, inner_kwargs = input_skeleton(args, kwargs)[0]([*real, *flat.scalars])
            table.recorded, result = opaque.record_results(module, keep, lambda: module(*inner_args, **inner_kwargs))
    box: dict[str, Any] = {}
    wrapper = _Wrapper(module, fill, n, floats, box)
    shapes: Any = None
    if dynamic or symbolic_scalars:
        auto = Dim.AUTO
        shapes = {
            "leaves": tuple(
                (
                    {
                        d: auto
                        for d, size in enumerate(x.shape)
                        if (ones_are_symbols or size != 1) and (i, d) not in fixed
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
        _keep_attributes(module),
        opaque.keep_functions(),
        cuts.marked(module, cut, keep) as rest,
        opaque.keep_modules(module, rest),
        _patched_torch(),
        _light(),
        fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
    ):
        program = torch.export.export(wrapper, tuple(leaves), dynamic_shapes=shapes, strict=False,
                                      prefer_deferred_runtime_asserts_over_guards=False)
    if cut:
        cuts.check(program, module, table)
    if keep and not dynamic and box["structure"] != _structure(result):
        raise CaptureError(
            f"hooks on submodules (of {', '.join(keep)}) take part in what forward returns: without them it returns "
            "something else"
        )
    return Exported(
        program.graph_module,
        _sources(module, program, leaves),
        box["rebuild"],
        table,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        _ranges(program),
        _guards(program),
        leaves,
        box["rebinds"],
    )


def _sources(module: nn.Module, program: Any, leaves: list[Any]) -> dict[str, Source]:
    canonical = {id(p): fqn for fqn, p in [*module.named_buffers(), *module.named_parameters()]}
    plain = {
        id(t): f"{fqn}.{k}".lstrip(".")
        for fqn, m in module.named_modules()
        for k, t in m.__dict__.items()
        if isinstance(t, Tensor)
    }
    users = {n.name: list(n.users) for n in program.graph.nodes if n.op == "placeholder"}
    sources: dict[str, Source] = {}
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
                sources[name] = Source("const_attr", target, tensor=_original(t))
        else:
            raise CaptureError(
                f"an input of kind {spec.kind.name} ({target or name}) has no meaning in a training graph"
            )
    return sources


def _original(t: Tensor) -> Tensor:
    """The export holds tensors that the code reaches in other ways (closures, globals, lists of a module) by an alias
    without gradient; the object itself is found by its memory."""
    found = [
        x
        for x in gc.get_objects()
        if type(x) in (Tensor, nn.Parameter)
        and x is not t
        and x.dtype == t.dtype
        and x.shape == t.shape
        and x.layout == torch.strided
        and x.data_ptr() == t.data_ptr()
        and x.stride() == t.stride()
    ]
    return next((x for x in found if x.requires_grad and x.is_leaf), found[0] if found else t)


def _registered(module: nn.Module, fqn: str) -> Tensor:
    owner, _, name = fqn.rpartition(".")
    return getattr(module.get_submodule(owner), name)  # type: ignore[no-any-return]


def _guards(program: Any) -> list[Any]:
    """Relations between sizes that the trace took one way (sympy)."""
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, Tensor) and getattr(val, "fake_mode", None) is not None:
            env = val.fake_mode.shape_env  # type: ignore[attr-defined]
            return [] if env is None else [g.expr for g in env.guards]
    return []


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
