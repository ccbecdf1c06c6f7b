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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from .. import _C, autocast, contents, frames, patches
from .. import torch_private as private
from ..errors import CaptureError
from ..frames import is_user_file
from ..watch import quiet, running, watching
from . import branches, checkpoints, layouts, marks, opaque
from .edits import contents_of
from .facts import Facts, Known
from .origin import capture_error
from .refused import refusing
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
from .tracing import Warned, keep_attributes, keep_random_state, light, no_history, patched_torch, without_warnings

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
        no_history(module),
        opaque.keep_functions(),
        marks.marked(module, cut, keep) as rest,
        opaque.keep_modules(module, rest),
        checkpoints.marked(),
        patched_torch(),
        layouts.unasked(asked),
        light(),
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
