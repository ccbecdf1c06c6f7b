"""Capture: a module and one call's arguments -> an ONNX training graph and what is needed to run it in the module's
place.

    export.py       torch.export, training IR                       (the only file that touches torch.export)
    tracing.py      what of torch is replaced while it traces; refused.py, sizes_asked.py: what forward asks meanwhile
    functional.py   in-place edits and views become values
    convert.py      pure nodes -> ONNX, with ops_*.py: one row per ATen operator
    onnx_build.py   the ModelProto; onnx_functions.py: bodies of the ortmodule operators
    skeleton.py     flattening of arguments and results
    facts.py        what the trace took for granted of the arguments besides sizes
    registered.py   gradients and graph optimizers that a user registers; symbolic.py: symbolics
    density.py      which share of the labels and tokens counts
    pairs.py        complex numbers become pairs of reals, where arithmetic is all that is done with them
    regions.py      what has sizes that depend on data becomes nodes that PyTorch runs
    opaque.py       custom autograd.Functions and submodules kept in PyTorch
    checkpoints.py  where torch.utils.checkpoint stands
    marks.py        where hooks on submodules would run, while tracing
    cuts.py         submodules with hooks: the graph in parts

Nothing of the user's model is copied: parameters and buffers are graph inputs, named by their fully qualified name.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import interrupts, patches
from .. import torch_private as private
from ..errors import CaptureError
from ..guard import Place
from . import (  # noqa: F401  the rows of ops_* register themselves
    branches,
    cuts,
    marks,
    ops_math,
    ops_nn,
    ops_product,
    ops_recurrent,
    ops_reduce,
    ops_resize,
    ops_select,
    ops_sequence,
    ops_shape,
    ops_special,
    ops_windows,
)
from .checkpoints import Regions
from .convert import HostOp, convert
from .density import Density, densities
from .export import Exported, export_module
from .facts import Test, format_of
from .functional import functionalize
from .layouts import OneNow
from .onnx_build import Builder, UnsupportedError, expr_of, shape_of
from .opaque import Recorded, without_values
from .origin import capture_error
from .pairs import complex_as_pairs
from .program import STOP, Node, Program, View
from .regions import keep_unknown_sizes
from .skeleton import FlatInputs, flatten_inputs
from .tracing import Warned

__all__ = [
    "CaptureError",
    "Captured",
    "CutCaptured",
    "FlatInputs",
    "HostOp",
    "InputSpec",
    "capture",
    "capture_error",
    "flatten_inputs",
]


@dataclass
class InputSpec:
    """One graph input. leaf: index into the flattened user leaves (FlatInputs.tensors, then .scalars). target: fully
    qualified name. tensor: the object itself for kind 'const_attr' (a tensor that is neither parameter nor buffer).
    dims: sizes, as in the ONNX file. turn: when PyTorch's backward would hand out its gradient, among those of all
    inputs. pairs: complex, and taken as pairs of reals."""

    name: str
    kind: Literal["user", "param", "buffer", "const_attr"]
    leaf: int = -1
    target: str = ""
    tensor: Tensor | None = None
    dims: tuple[int | str, ...] = ()
    turn: int = 0
    pairs: bool = False


@dataclass
class Captured:
    """A captured module.

    onnx: the graph (docs/ONNX.md). inputs: in the order of the graph inputs. rebuild: tensor outputs -> what the user's
    forward returns, a fresh object each time. places: which output each tensor of that result is, in its order; the
    other outputs are numbers and conditions. passthrough: output index -> graph input index where an output is that
    input itself. writes: graph input index per write-back; write-backs follow the user outputs. quiet: those of
    them that are no new version. host_ops: rows for
    nodes with `host_index`. fits: whether tensors and scalars of another call (FlatInputs of equal key) may use this
    graph; unmet: what it took for granted that does not hold for them, in words. fixed_scalars: int/float leaves whose
    value the graph depends on (all of them unless captured with symbolic_scalars). conditions: of branches.py; their
    tensors are the last of the outputs, and rebuild raises branches.Other when they say something else. rebinds: graph
    inputs that are buffers to which forward assigns new tensors; the graph writes into them. between: output -> outputs
    (bits) that it is computed from. tests: of facts.py, for tensors that `fits`. left: attributes of modules to which
    forward assigns numbers, words or sizes; leave: what they are after a call. stored: attributes of modules to which
    forward assigns tensors, or tuples of them; rebuild then gives (results, list of those). inside: those of them from
    which, or for which, other outputs are computed: their gradients would lack what the graph has between. warned: the
    warnings of forward, which each call gives again.
    """

    onnx: bytes
    inputs: list[InputSpec]
    n_user_outputs: int
    rebuild: Callable[[list[Tensor]], Any]
    passthrough: dict[int, int]
    views: dict[int, tuple[int, int, list[View]]]
    writes: list[int]
    host_ops: list[HostOp]
    seconds: float
    n_nodes: int
    dynamic: bool
    fits: Callable[[FlatInputs], bool]
    unmet: Callable[[FlatInputs], str] = lambda _: ""
    fixed_scalars: list[int] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    leave: Callable[[FlatInputs], Sequence[Any]] = lambda _: ()
    stored: list[tuple[str, str]] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    inside: frozenset[tuple[str, str]] = frozenset()
    places: list[int] = field(default_factory=list)
    rebinds: list[int] = field(default_factory=list)
    quiet: frozenset[int] = frozenset()
    between: dict[int, int] = field(default_factory=dict)
    tests: list[Test] | None = None
    conditions: branches.Answers = ()
    checkpoints: Regions = field(default_factory=Regions)
    densities: list[Density] = field(default_factory=list)  # of the call that was captured, at level INFO
    formats: dict[int, torch.memory_format] = field(default_factory=dict)  # of outputs that are not contiguous
    # what submodules kept in PyTorch returned, as tensors without values
    kept: dict[str, list[Recorded]] = field(default_factory=dict)


@interrupts.whole
def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic: bool = False,
    symbolic_scalars: bool = False,
    keep_in_torch: Collection[str] = (),
    fixed: Collection[tuple[int, int]] = (),
    cut: tuple[Place, ...] = (),
    answers: branches.Answers | None = None,
    rehearse: bool = False,
    earlier: Sequence[dict[str, list[Recorded]]] = (),
) -> Captured:
    """Captures `module(*args, **kwargs)` for training. The module, its state and all random generators are left as they
    were.

    dynamic: sizes of all tensor arguments are symbols, but for `fixed`, pairs of tensor leaf and axis.
    symbolic_scalars: int and float arguments are graph inputs (0-d int64, float64) instead of constants. keep_in_torch:
    fully qualified names of submodules that stay outside the graph. cut: submodules whose hooks run between parts of it
    (the result is a CutCaptured). answers: to the first branches on values that forward meets, () when none is known;
    None: such a branch is an error. rehearse: forward is known to have more. earlier: `kept` of captures at other
    sizes. Grad mode and autocast are the caller's.
    Raises CaptureError with the innermost submodule, file and line.
    """
    started = time.perf_counter()
    how: dict[str, Any] = {
        "dynamic": dynamic,
        "symbolic_scalars": symbolic_scalars,
        "keep_in_torch": keep_in_torch,
        "fixed": fixed,
        "cut": cut,
        "answers": answers,
        "rehearse": rehearse,
        "earlier": earlier,
    }
    try:
        exported = export_module(module, args, kwargs, **how)
        program = functionalize(exported)
    except OneNow:
        exported = export_module(module, args, kwargs, **how, ones_are_symbols=False)
        program = functionalize(exported)
    _on_one_device(program, module, flatten_inputs(args, kwargs))
    training = module.training and exported.grad_mode
    tests = _tests(program, exported, flatten_inputs(args, kwargs), module)
    if exported.table.marks:
        if exported.rebinds:
            raise CaptureError(f"forward assigns to the buffer {exported.rebinds[0]} while submodules have hooks")
        return _capture_parts(
            program, exported, type(module).__name__, training, flatten_inputs(args, kwargs), dynamic, symbolic_scalars,
            started, tests,
        )  # fmt: skip
    told = logging.getLogger("ortmodule").isEnabledFor(logging.INFO)
    shares = densities(program, exported, flatten_inputs(args, kwargs).tensors) if told else []
    ops_sequence.ctc_into_graph(program, exported)
    complex_as_pairs(program, exported)
    keep_unknown_sizes(program, exported)
    asked = program.outputs[len(program.outputs) - len(exported.conditions) :]
    program.outputs = program.outputs[: len(program.outputs) - len(asked)]
    inside = _inside(program, exported)
    users, places = _outputs(program, exported)  # changes program.outputs
    between, formats = _between(program), _formats(program)
    rebuild = branches.asking(users, len(program.outputs), exported.conditions)
    program.outputs += asked
    try:
        onnx_bytes, host_ops, builder = convert(program, exported, type(module).__name__, training)
    except UnsupportedError as e:
        raise CaptureError(str(e)) from e
    if exported.conditions:
        kept = next((op for op in host_ops if op.kind != "aten"), None)
        if kept is not None:
            raise branches.NoBranches(
                f"branches on values of tensors, and {kept.name} kept in PyTorch", kept.module, kept.file, kept.line
            )
    specs, index = _inputs(program, builder)
    flat = flatten_inputs(args, kwargs)
    called = {s.leaf: s.name for s in specs if s.kind == "user"}
    held = _conditions(program, exported, flat, dynamic, symbolic_scalars, called)
    return Captured(
        onnx=onnx_bytes,
        inputs=specs,
        n_user_outputs=len(program.outputs),
        rebuild=rebuild,
        places=places,
        passthrough={i: index[n] for i, n in program.passthrough.items() if n in index},
        views=_views(program, index),
        writes=[index[n] for n, _ in program.writes],
        host_ops=host_ops,
        seconds=time.perf_counter() - started,
        n_nodes=len(builder.graph.node),
        dynamic=dynamic,
        fits=held.fits,
        unmet=held.unmet,
        fixed_scalars=held.fixed,
        left=held.left,
        leave=held.leave,
        stored=list(exported.stored),
        warned=exported.warned,
        inside=inside,
        kept=without_values(exported.table),
        quiet=frozenset([index[n] for n, _ in program.writes if n in program.quiet]),
        rebinds=[i for i, s in enumerate(specs) if s.kind == "buffer" and s.target in exported.rebinds],
        between=between,
        tests=tests,
        conditions=exported.conditions,
        checkpoints=exported.table.checkpoints,
        densities=shares,
        formats=formats,
    )


@dataclass
class CutCaptured(Captured):
    """A captured module in parts. captured: per part, None where it computes nothing. inputs: of the whole, the first
    slots."""

    cut: cuts.Split | None = None
    captured: list[Captured | None] = field(default_factory=list)
    interpreters: list[cuts.Interpreter] = field(default_factory=list)


def _capture_parts(
    program: Program,
    exported: Exported,
    name: str,
    training: bool,
    flat: FlatInputs,
    dynamic: bool,
    symbolic_scalars: bool,
    started: float,
    tests: list[Test] | None,
) -> CutCaptured:
    rebuild, places = _outputs(program, exported)
    held = _conditions(program, exported, flat, dynamic, symbolic_scalars, {})
    try:
        cut = cuts.split(program, exported)
    except marks.CutError as e:
        raise CaptureError(str(e)) from e
    captured: list[Captured | None] = []
    interpreters: list[cuts.Interpreter] = []
    specs = [
        InputSpec(
            s.target or f"input_{s.leaf}",
            cast(Any, s.kind),
            s.leaf,
            s.target,
            s.tensor if s.kind == "const_attr" else None,
        )
        for s, _ in program.inputs
        if s.kind != "constant"
    ]
    for part in cut.parts:
        p = part.program
        if part.empty:
            captured.append(None)
            interpreters.append(cuts.Interpreter(Program(), exported.table))
            continue
        keep_unknown_sizes(p, exported)
        n_outputs = len(p.outputs)
        try:
            onnx_bytes, host_ops, builder = convert(p, exported, name, training)
        except UnsupportedError as e:
            raise CaptureError(str(e)) from e
        own, index = _inputs(p, builder)
        captured.append(
            Captured(
                onnx=onnx_bytes,
                inputs=own,
                n_user_outputs=n_outputs,
                rebuild=list,
                passthrough={},
                views={},
                writes=[index[n] for n, _ in p.writes],
                quiet=frozenset([index[n] for n, _ in p.writes if n in p.quiet]),
                host_ops=host_ops,
                seconds=0.0,
                n_nodes=len(builder.graph.node),
                dynamic=dynamic,
                fits=lambda _: True,
            )
        )
        interpreters.append(cuts.Interpreter(p, exported.table))
    made = [c for c in captured if c is not None]
    return CutCaptured(
        onnx=b"".join(c.onnx for c in made),
        inputs=specs,
        n_user_outputs=len(cut.outputs),
        rebuild=rebuild,
        places=places,
        passthrough={},
        views=_views(program, {node: i for i, node in enumerate(n for s, n in program.inputs if s.kind != "constant")}),
        writes=[],
        host_ops=[op for c in made for op in c.host_ops],
        seconds=time.perf_counter() - started,
        n_nodes=sum(c.n_nodes for c in made),
        dynamic=dynamic,
        fits=held.fits,
        unmet=held.unmet,
        fixed_scalars=held.fixed,
        cut=cut,
        captured=captured,
        interpreters=interpreters,
        tests=tests,
        warned=exported.warned,
        checkpoints=exported.table.checkpoints,
    )


def _tests(program: Program, exported: Exported, flat: FlatInputs, module: nn.Module) -> list[Test] | None:
    """What later calls must have in common with this one, besides sizes."""
    facts, scope = exported.facts, patches.here()
    if scope is not None and scope.watch is not None:
        facts.identity |= scope.watch.identity
        facts.bare = scope.watch.looks_inside()
    outs = [x for x in program.outputs if isinstance(x, Node)]
    if facts.by_layout and (program.edits or facts.identity or program.passthrough or program.views
                            or len(outs) != len(set(outs))):  # fmt: skip
        facts.layouts.update(range(len(flat.tensors)))
    facts.layouts |= program.layouts
    facts.own_layouts = program.own_layouts
    if any(_is_image(n) for n in outs) and not exported.table.marks:
        facts.formats.update([i for i, t in enumerate(flat.tensors) if t.dim() in (4, 5)])
    for source in program.edited:
        if source.kind == "user":
            facts.edited.add(source.leaf)
        else:
            facts.edited_names.add(source.target)
    return facts.freeze(flat.tensors, module)


def _is_image(n: Any) -> bool:
    return isinstance(n, Node) and isinstance(n.val, Tensor) and n.val.dim() in (4, 5)


def _formats(program: Program) -> dict[int, torch.memory_format]:
    """Outputs that eager gives in the order of channels_last. The engine's are contiguous."""
    found: dict[int, torch.memory_format] = {}
    for i, n in enumerate(program.outputs):
        if _is_image(n) and i not in program.passthrough and i not in program.views:
            both = n.val.shape, n.val.stride()
            sizes, strides = ([d if isinstance(d, int) else d.node.hint for d in ds] for ds in both)
            kind = format_of(torch.empty_strided(sizes, strides, device="meta"))
            if kind is not None:
                found[i] = kind
    return found


def _inputs(program: Program, builder: Builder) -> tuple[list[InputSpec], dict[Node, int]]:
    specs: list[InputSpec] = []
    index: dict[Node, int] = {}
    names = list(builder.inputs)
    turns = _turns(program)
    for source, node in program.inputs:
        if source.kind == "constant":
            continue
        if source.tensor is not None and source.tensor.is_neg():
            raise CaptureError(
                f"{source.target}: torch negates it lazily (imag of a conjugate); call resolve_neg() on it"
            )
        index[node] = len(specs)
        v = builder.inputs[names[len(specs)]]
        dims = tuple(d if isinstance(d, int) else builder.sizes.text(d) for d in v.shape)
        kind: Any = source.kind
        tensor = source.tensor if kind == "const_attr" else None
        specs.append(InputSpec(v.name, kind, source.leaf, source.target, tensor, dims, turns[node],
                               source.pairs))  # fmt: skip
    return specs, index


def _turns(program: Program) -> dict[Node, int]:
    """InputSpec.turn: the gradient of a parameter is complete when backward has come to where forward first used it;
    arguments come last."""
    inputs = {node for _, node in program.inputs}
    first: dict[Node, tuple[int, int]] = {}
    for at, n in enumerate(program.nodes):
        # the bias before the weight, which has been transposed; autocast makes a copy of it first
        back = n.target is torch.ops.aten.linear.default and not n.autocast
        for place, x in enumerate(n.inputs()):
            if x in inputs and n.target != STOP:
                first.setdefault(x, (-at, -place if back else place))
    given = {node: source.kind == "user" for source, node in program.inputs}
    order = sorted(given, key=lambda x: (given[x], *first.get(x, (1, 0))))
    return {x: turn for turn, x in enumerate(order)}


def _between(program: Program) -> dict[int, int]:
    place = {out: i for i, out in enumerate(program.outputs) if isinstance(out, Node)}
    if len(place) < 2:
        return {}
    from_outputs = _from_outputs(program, place)
    return {i: bits for out, i in place.items() if (bits := from_outputs.get(out, 0))}


def _inside(program: Program, exported: Exported) -> frozenset[tuple[str, str]]:
    """Captured.inside. Not so: an argument or parameter itself, what has no gradient, a view that is made again of the
    result or argument that it is one of."""
    if not exported.stored or not exported.grad_mode:
        return frozenset()
    outputs, itself, views = program.outputs, program.passthrough, program.views
    place = {out: i for i, out in reversed([*enumerate(outputs)]) if isinstance(out, Node) and i not in itself}
    made = _from_outputs(program, place)
    of_others = 0
    for out, i in place.items():
        of_others |= made.get(out, 0) if i not in views else 0

    def within(i: int) -> bool:
        out = outputs[i]
        if not isinstance(out, Node) or out not in place or i in itself or out.target == STOP:
            return False
        if not isinstance(out.val, Tensor) or not (out.val.is_floating_point() or out.val.is_complex()):
            return False
        return bool(of_others >> place[out] & 1 or i not in views and made.get(out, 0))

    return frozenset([key for key, at in exported.stored.items() if any(map(within, at))])


def _from_outputs(program: Program, place: dict[Node, int]) -> dict[Node, int]:
    """Of each node, the outputs (bits of their numbers in `place`) that it is computed from, so that gradients flow."""
    from_outputs: dict[Node, int] = {}
    for node in program.nodes:
        bits = 0
        if node.target not in (STOP, torch.ops.aten.detach.default):
            for x in node.inputs():
                bits |= from_outputs.get(x, 0) | (1 << place[x] if x in place else 0)
        from_outputs[node] = bits
    return from_outputs


def _on_one_device(program: Program, module: nn.Module, flat: FlatInputs) -> None:
    """A plan's results lie where it runs, so what forward returns must: there, or as the argument that it is."""
    home = {t.device for t in (*module.parameters(), *module.buffers())} or {t.device for t in flat.tensors}
    for i, out in enumerate(program.outputs) if len(home) == 1 else ():
        val = out.val if isinstance(out, Node) and i not in program.passthrough else None
        if isinstance(val, Tensor) and val.device not in home:
            raise CaptureError(f"forward returns a tensor on {val.device}, the module lies on {home.pop()}")


def _views(program: Program, index: dict[Node, int]) -> dict[int, tuple[int, int, list[View]]]:
    """In the order in which they are made: views of results after those results, which may be views themselves."""
    place = {out: i for i, out in reversed([*enumerate(program.outputs)]) if isinstance(out, Node)}
    made = {
        i: (index.get(node, -1), place.get(node, -1) if node not in index else -1, views)
        for i, (node, views) in program.views.items()
    }

    def depth(i: int) -> int:
        return 1 + depth(made[i][1]) if i in made else 0

    return {i: made[i] for i in sorted(made, key=depth)}


def _outputs(program: Program, exported: Exported) -> tuple[Callable[[list[Tensor]], Any], list[int]]:
    """Results that are numbers become 0-d outputs, read back by rebuild; numbers known at capture are constants.
    -> rebuild, places (Captured)."""
    slots: list[Any] = []
    kept: list[Any] = []
    passthrough: dict[int, Node] = {}
    views: dict[int, tuple[Node, list[View]]] = {}
    known: dict[Node, int] = {}
    for i, out in enumerate(program.outputs):
        if not isinstance(out, Node):
            out = expr_of(out) if isinstance(out, torch.SymInt) else out
            if isinstance(out, (int, float, bool)) or out is None:
                slots.append(("value", out))
                continue
            slots.append(("number", len(kept)))
        elif out in known and i not in program.passthrough:
            slots.append(("tensor", known[out]))
            continue
        else:
            known.setdefault(out, len(kept))
            if i in program.passthrough:
                passthrough[len(kept)] = program.passthrough[i]
            if i in program.views:
                views[len(kept)] = program.views[i]
            slots.append(("tensor", len(kept)))
        kept.append(program.outputs[i])
    program.outputs = kept
    program.passthrough = passthrough
    program.views = views
    fill = exported.rebuild
    places = [x for kind, x in slots if kind == "tensor"]
    if all(s == ("tensor", i) for i, s in enumerate(slots)):
        return fill, places

    def rebuild(tensors: list[Tensor]) -> Any:
        return fill(
            [x if kind == "value" else tensors[x] if kind == "tensor" else tensors[x].item() for kind, x in slots]
        )

    return rebuild, places


class Conditions(NamedTuple):
    """What a trace took for granted about sizes and numbers. fits: does it hold for a call? unmet: the first of it that
    does not, in words. fixed: numbers that must be the same. left: attributes that forward leaves as they follow from a
    call; leave: what they are."""

    fits: Callable[[FlatInputs], bool]
    unmet: Callable[[FlatInputs], str]
    fixed: list[int]
    left: list[tuple[str, str]]
    leave: Callable[[FlatInputs], Sequence[Any]]


def _conditions(program: Program, exported: Exported, flat: FlatInputs, dynamic: bool, symbolic: bool,
                called: dict[int, str]) -> Conditions:  # fmt: skip
    """As compiled expressions: the first is asked at every step. called: names of arguments."""
    n = len(flat.tensors)
    held = {s.leaf: node.val.select(-1, 0) if s.pairs else node.val for s, node in program.inputs if s.kind == "user"}
    fixed = [i for i in range(len(flat.scalars)) if not symbolic or isinstance(held.get(n + i, 0), int)]
    known: dict[str, Any] = {f"x{i}": flat.scalars[i] for i in fixed}
    terms = [f"type(c[{i}]) is {type(flat.scalars[i]).__name__} and c[{i}] == x{i}" for i in fixed]
    terms += [f"math.copysign(1.0, c[{i}]) == {math.copysign(1.0, x)}" for i in fixed
              if type(x := flat.scalars[i]) is float and x == 0.0]  # fmt: skip
    lines: list[str] = []
    if not dynamic:
        for i, t in enumerate(flat.tensors):
            known[f"shape{i}"] = t.shape
            terms.append(f"t[{i}].shape == shape{i}")
    name: dict[Any, str] = {}
    sizes: list[tuple[str, Any]] = []
    for leaf in sorted(held):
        val = held[leaf]
        if isinstance(val, torch.SymInt):
            sizes.append((f"c[{leaf - n}]", expr_of(val)))
        elif isinstance(val, Tensor) and dynamic and leaf < n and val.dim():
            names = [f"d{leaf}_{axis}" for axis in range(val.dim())]
            lines.append(f"{', '.join(names)}, = t[{leaf}].shape")
            sizes += zip(names, shape_of(val), strict=True)
    for text, e in sizes:
        if not isinstance(e, int) and e.is_Symbol:
            name.setdefault(e, text)
    derived: list[Any] = []
    for text, e in sizes:
        if isinstance(e, int):
            terms.append(f"{text} == {e}")
        elif not e.is_Symbol:
            free = [s for s in e.free_symbols if s not in name]
            if free:  # 2*s: the size tells s
                factor, symbol = e.as_coeff_Mul()
                terms.append(f"{text} % {int(factor)} == 0")
                name.setdefault(symbol, f"({text} // {int(factor)})")
            derived.append(f"{text} == ({_python(e, name)})")
        elif name[e] != text:
            terms.append(f"{text} == {name[e]}")
    terms += derived
    # PyTorch takes a size that is a symbol for one above 0: what forward asks about emptiness is answered by that
    terms += [f"{name[e]} > 0" for e in name if e.is_positive]
    for symbol, (lo, hi) in exported.ranges.items():
        if symbol in name and (lo > 0 or hi < _UNBOUNDED):
            terms.append(f"{lo} <= {name[symbol]} <= {hi}" if hi < _UNBOUNDED else f"{name[symbol]} >= {lo}")
    layout = {s for val in held.values() if isinstance(val, Tensor) and val.layout is torch.strided
              for n in (*val.stride(), val.storage_offset()) if isinstance(n, torch.SymInt)
              for s in private.free_symbols(n)}  # fmt: skip
    asked: dict[str, str] = {}  # where
    for g, now in exported.guards():
        unnamed = now.free_symbols - name.keys()
        if unnamed - layout:
            raise CaptureError(f"forward asks whether {now}, which the sizes and numbers of the arguments do not tell")
        if now.free_symbols and not unnamed:
            terms.append(f"({_python(now, name)})")
            asked.setdefault(terms[-1], exported.asked.get(g, ""))
    space: dict[str, Any] = {**known, "math": math, "torch": torch}

    def compiled(text: str) -> Callable[[FlatInputs], Any]:
        """Our own text: names above, and expressions printed by sympy."""
        made: dict[str, Any] = {}
        exec("\n    ".join(["def f(f):", "t, c = f.tensors, f.scalars", *lines, f"return {text}"]), space, made)
        found: Callable[[FlatInputs], Any] = made["f"]
        return found

    def words(term: str) -> str:
        """As the caller knows the arguments."""
        text = re.sub(r"\bd(\d+)_(\d+)\b", lambda m: f"{called.get(int(m[1]), f'argument {m[1]}')}.size({m[2]})", term)
        text = re.sub(r"\bc\[(\d+)\]", lambda m: called.get(n + int(m[1]), f"number {m[1]}"), text)
        text = text[1:-1] if term in asked else text
        return f"{text} ({asked[term]})" if asked.get(term) else text

    def unmet(f: FlatInputs) -> str:
        ordered = sorted(terms, key=lambda term: not asked.get(term))  # what has a place in the code says more
        return next((words(term) for term in ordered if not compiled(term)(f)), "")

    left: dict[tuple[str, str], str] = {}
    for i, (key, value) in enumerate(exported.left.items()):
        text_of = _text_of(value, name) if _symbolic(value) else f"left{i}"
        if text_of is not None:
            space[f"left{i}"], left[key] = value, text_of
    leave = compiled(f"({', '.join(left.values())},)") if left else lambda _: ()
    return Conditions(compiled(" and ".join(terms) or "True"), unmet, fixed, list(left), leave)


def _symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or isinstance(value, tuple) and any(map(_symbolic, value))


def _text_of(value: Any, name: dict[Any, str]) -> str | None:
    """A value of an attribute as Python text over the given names; None when there is more in it."""
    if isinstance(value, torch.SymInt):
        e = expr_of(value)
        known = isinstance(e, int) or all(s in name for s in e.free_symbols)
        return str(e) if isinstance(e, int) else _python(e, name) if known else None
    if isinstance(value, tuple):
        parts = [_text_of(v, name) for v in value]
        text = f"({', '.join([*map(str, parts), ''])})"
        return None if None in parts else f"torch.Size({text})" if type(value) is torch.Size else text
    return repr(value) if type(value) in (int, bool, str, type(None)) else None


_UNBOUNDED = 2**62


def _python(e: Any, name: dict[Any, str]) -> str:
    """A relation or size as Python text over the given names."""
    class Printer(private.SizePrinter):  # type: ignore[misc]
        def _print_Symbol(self, symbol: Any) -> str:
            return name[symbol]

    return str(Printer().doprint(e))
