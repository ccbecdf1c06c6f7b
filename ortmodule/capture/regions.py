"""Parts of a program whose sizes depend on data (x[mask], nonzero, masked_select), or that compute with complex numbers
(spectra), become one node each that PyTorch runs.

The engine plans with sizes that are known before it starts. A size that only the data tells has a symbol of its own
(torch calls it unbacked): all operations that make, take or ask for such a size are gathered, symbol by symbol,
together with what lies between them, and leave the program as one host node whose own results have known sizes again (a
sum, a mean, an indexed write). PyTorch runs the operations one by one and differentiates them.

Invariants: a region is convex (nothing outside of it lies between two of its nodes), so the program stays in
topological order. A result of unknown size that the module returns or stores cannot be kept this way: CaptureError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .. import autocast
from .. import torch_private as private
from ..errors import CaptureError
from . import opaque
from .export import Exported
from .program import COPY, FILL, STOP, Node, Program, is_complex, operand

_LARGE = 32 << 20  # bytes; from here on every malloc is a mapping of its own
_RESULTS = 256  # of arithmetic on sizes, remembered
_NAMED: dict[str, Callable[..., Tensor]] = {
    STOP: lambda _shape, _at, x: x.detach(),
    COPY: lambda shape, _at, x: x.expand(shape).clone(),
    FILL: lambda shape, at, x: x.expand(shape).clone() if isinstance(x, Tensor) else torch.full(shape, x, device=at),
    "reshape_to": lambda shape, _at, x: x.reshape(shape),
}


def keep_unknown_sizes(program: Program, exported: Exported) -> None:
    """Moves the regions out of `program`, into rows of `exported.table`."""
    while True:
        region = _find(program, exported)
        if not region:
            return
        _replace(program, exported, region)


def _numbers(args: Any) -> Iterator[Any]:
    for a in args:
        if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _numbers(a)


def _of_torch(n: Node, exported: Exported) -> bool:
    """An operator that the trace did not run (CTC loss)."""
    if n.target is not opaque.HOST:
        return False
    row = exported.table.rows[n.args[1]]
    return row.kind == "aten" and row.meta is not _never


def _unknown(program: Program, n: Node, exported: Exported) -> set[Any]:
    """Symbols that the engine cannot bind: of the node's results, operands and numbers. A complex tensor, which the
    engine does not have, stands as the node that makes it."""
    if n.target is opaque.HOST and not _of_torch(n, exported) and not private.free_unbacked_symbols(list(n.val)):
        return set()
    found = set(private.free_unbacked_symbols(list(n.val) if isinstance(n.val, (list, tuple)) else n.val))
    for i in n.inputs():
        if isinstance(i.val, Tensor):
            found |= private.free_unbacked_symbols(i.val)
    for x in _numbers([*n.args, *n.kwargs.values()]):
        found |= {s for s in private.free_unbacked_symbols(x) if s not in program.item_of}
    return found | {x for x in (n, *n.inputs()) if is_complex(x.val)} if n.target is not opaque.HOST else found


def _find(program: Program, exported: Exported) -> list[Node]:
    """The first region: nodes that share unknown symbols, directly or through others, and what lies between them."""
    unknown = {n: s for n in program.nodes if (s := _unknown(program, n, exported))}
    if not unknown:
        return []
    first = next(n for n in program.nodes if n in unknown)
    inside, symbols = {first}, set(unknown[first])
    while True:
        before = len(inside)
        for n, s in unknown.items():
            if n not in inside and s & symbols:
                inside.add(n)
                symbols |= s
        # results of one node belong to it, whatever their sizes
        inside.update([n for n in program.nodes if n.target is operator.getitem and n.args[0] in inside])
        after: set[Node] = set()
        for n in program.nodes:
            if n not in inside and any(i in inside or i in after for i in n.inputs()):
                after.add(n)
        above: set[Node] = set()
        for n in reversed(program.nodes):
            if n in inside or n in above:
                above.update(n.inputs())
        between = {n for n in after & above if n not in inside}
        inside |= between
        for n in between:
            symbols |= unknown.get(n, set())
        if len(inside) == before:
            return [n for n in program.nodes if n in inside]


def _replace(program: Program, exported: Exported, region: list[Node]) -> None:
    inside = set(region)
    src = next((n.src for n in region if n.src[1]), region[0].src)
    used = {i for n in program.nodes if n not in inside for i in n.inputs()}
    kept = (
        {n for n in program.outputs if isinstance(n, Node)}
        | {n for _, n in program.writes}
        | set(program.item_of.values())
    )
    outputs = [n for n in region if n in used | kept and isinstance(n.val, Tensor)]
    for n in region:
        unknown = n.target not in _NAMED if isinstance(n.target, str) else n.target is opaque.HOST
        if unknown and not _of_torch(n, exported):
            raise CaptureError(f"{n.target} of a size that depends on data", *n.src)
    for n in outputs:
        if is_complex(n.val):
            raise CaptureError(f"{n.target}: a result of complex numbers is returned or stored", *n.src)
        if private.free_unbacked_symbols(n.val):
            what = "size" if private.free_unbacked_symbols(list(n.val.shape)) else "place in memory"
            raise CaptureError(f"{n.target}: a result whose {what} depends on data is returned or stored", *n.src)
    inputs = list(dict.fromkeys(i for n in region for i in n.inputs() if i not in inside))
    source_of = {node: source for source, node in program.inputs}
    constants: dict[Node, Tensor] = {}
    for held in [i for i in inputs if is_complex(i.val)]:
        source = source_of[held]
        if source.kind != "constant" or source.tensor is None:
            raise CaptureError(f"{source.target or 'an argument'} is a complex tensor", *src)
        constants[held] = source.tensor
    inputs = [i for i in inputs if i not in constants]
    program.inputs = [(s, node) for s, node in program.inputs if node not in constants]
    mode = next(
        v.fake_mode
        for n in [*region, *inputs]
        for v in (n.val if isinstance(n.val, (list, tuple)) else [n.val])
        if hasattr(v, "fake_mode")
    )
    numbers: dict[Any, int] = {}  # symbol -> input that holds its value
    for s in sorted({s for n in region for s in _all_symbols(n)}, key=str):
        node = program.item_of.get(s)
        if node is None and not str(s).startswith("u"):
            with mode:
                val = torch.empty((), dtype=torch.int64, device="cpu")
            node = Node(
                torch.ops.aten.scalar_tensor.default,
                (mode.shape_env.create_symintnode(s, hint=None),),
                {"dtype": torch.int64},
                val,
                src,
            )
            inputs.append(node)
            program.nodes.insert(0, node)
        if node is None or node in inside:
            continue  # known once its tensor has been made
        if node not in inputs:
            inputs.append(node)
        numbers[s] = inputs.index(node)
    items = {s: n for s, n in program.item_of.items() if n in inside}
    table = exported.table
    names = list(
        dict.fromkeys(
            table.rows[n.args[1]].name if n.target is opaque.HOST else str(n.target).replace("aten.", "aten::")
            for n in region
            if isinstance(n.target, private.OpOverload)
        )
    )
    call = _caller(table.rows, constants, region, inputs, outputs, numbers, items)
    table.rows.append(
        opaque.Row(
            "aten",
            " ".join(names[:3]) + " ..." * (len(names) > 3),
            call,
            _never,
            "complex numbers" if any(is_complex(n.val) for n in region) else "sizes that depend on data",
            module=src[0],
        )
    )
    host = Node(opaque.HOST, (inputs, len(table.rows) - 1), {}, tuple([n.val for n in outputs]), src)
    for i, n in enumerate(outputs):  # the nodes stay what others refer to; they now read the host node's results
        n.target, n.args, n.kwargs = operator.getitem, (host, i), {}
    after: set[Node] = {host, *outputs}
    head: list[Node] = []
    tail: list[Node] = []
    late: set[Any] = set()  # symbols that nodes behind the region make: a fill of such a size has no other operand
    for n in program.nodes:
        if n in inside:
            continue
        unknown_sizes = _unknown(program, n, exported)
        if any(i in after for i in n.inputs()) or unknown_sizes & late:
            after.add(n)
            late |= unknown_sizes
            tail.append(n)
        else:
            head.append(n)
    program.nodes = [*head, host, *outputs, *tail]


def _all_symbols(n: Node) -> set[Any]:
    found = {s for x in _numbers([*n.args, *n.kwargs.values()]) for s in private.free_symbols(x)}
    return found | (set(private.free_symbols(n.val)) if isinstance(n.target, str) else set())


def _never(_xs: list[Tensor]) -> list[Tensor]:
    raise AssertionError("a region is made after the trace")


_SCATTERS = {torch.ops.aten.slice_scatter.default: torch.ops.aten.slice.Tensor,
             torch.ops.aten.select_scatter.default: torch.ops.aten.select.int,
             torch.ops.aten.diagonal_scatter.default: torch.ops.aten.diagonal.default}  # fmt: skip


def _scattered(view: Any, x: Tensor, new: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out = x.clone()
    view(out, *args, **kwargs).copy_(new)
    return out


def _caller(
    rows: list[opaque.Row],
    constants: dict[Node, Tensor],
    region: list[Node],
    inputs: list[Node],
    outputs: list[Node],
    numbers: dict[Any, int],
    items: dict[Any, Node],
) -> opaque.Call:
    """The region as a function of its tensors."""
    from sympy import sympify

    # as they are now: outputs change their meaning; by the modes that they run in
    dead = _last_read(region, {*outputs, *items.values()})
    steps = [((n.grad, n.autocast), (n, _function(n), n.args, n.kwargs, n.val, _made_known(n.val), dead[n]))
             for n in region]  # fmt: skip
    groups = [(*modes, [step for _, step in group]) for modes, group in groupby(steps, key=operator.itemgetter(0))]
    symbols: dict[Any, tuple[Any, tuple[Any, ...]]] = {}  # of an expression, as sympy has it
    results: dict[tuple[Any, ...], int | float] = {}  # sympy takes as long for one as PyTorch for several operations

    def call(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        value: dict[Node, Any] = {**constants, **dict(zip(inputs, tensors, strict=True))}
        size: dict[Any, Any] = {s: tensors[i].item() for s, i in numbers.items()}

        def number(e: Any) -> Any:
            known = size.get(e)
            if type(known) is int:
                return known
            if e not in symbols:
                whole = sympify(e)
                symbols[e] = whole, tuple(whole.free_symbols)
            whole, free = symbols[e]
            for s in free:
                if s not in size:
                    size[s] = value[items[s]].item()
            key = e, *[(type(size[s]), size[s]) for s in free]
            if key not in results:
                r = whole.subs({s: size[s] for s in free})
                if len(results) >= _RESULTS:
                    results.clear()
                results[key] = int(r) if r.is_integer else float(r)
            return results[key]

        def of(a: Any) -> Any:
            return operand(a, value, number)

        for grad, lowered, group in groups:
            with (
                torch.set_grad_enabled(grad and torch.is_grad_enabled()),
                autocast.put(lowered),
            ):
                for n, target, args, kwargs, val, told, gone in group:
                    if isinstance(target, str):
                        shape = [of(d) for d in val.shape]
                        made: Any = _NAMED[target](shape, val.device, *map(of, args)).to(val.dtype)
                    elif target is opaque.HOST:
                        made = rows[args[1]].call(of(args[0]))
                        made = (made,) if isinstance(made, Tensor) else made
                    else:
                        made = target(*map(of, args), **{k: of(a) for k, a in kwargs.items()})
                    value[n] = made
                    for i, k, s in told:
                        size[s] = (made if isinstance(made, Tensor) else made[i]).shape[k]
                    for x in gone:
                        if _large(value[x]):
                            del value[x]
        return tuple([value[n] for n in outputs])

    return call


def _large(made: Any) -> bool:
    """Does it pay to free it at once? Smaller tensors lie in the heap, whose end goes back to the system, page by page,
    when much of it is free: a step with regions of some MiB took a fifth longer for it."""
    tensors = made if isinstance(made, (list, tuple)) else (made,)
    return any(isinstance(t, Tensor) and t.layout is torch.strided and t.nbytes >= _LARGE for t in tensors)


def _last_read(region: list[Node], kept: set[Node]) -> dict[Node, list[Node]]:
    """By node: those of the region that nothing reads after it."""
    last = {n: n for n in region}
    for n in region:
        last.update((x, n) for x in n.inputs() if x in last)
    dead: dict[Node, list[Node]] = {n: [] for n in region}
    for x, n in last.items():
        if x not in kept:
            dead[n].append(x)
    return dead


def _function(n: Node) -> Any:
    """What computes a node; PyTorch does not differentiate all operators for complex numbers."""
    return partial(_scattered, _SCATTERS[n.target]) if n.target in _SCATTERS and is_complex(n.val) else n.target


def _made_known(val: Any) -> list[tuple[int, int, Any]]:
    """Symbols that a result tells by its sizes: of which of its tensors, which dimension."""
    found: list[tuple[int, int, Any]] = []
    for i, t in enumerate(val if isinstance(val, (list, tuple)) else [val]):
        sizes: list[Any] = [*t.shape] if isinstance(t, Tensor) else []
        found += [(i, k, d.node.expr) for k, d in enumerate(sizes)
                  if isinstance(d, torch.SymInt) and d.node.expr.is_Symbol]  # fmt: skip
    return found
