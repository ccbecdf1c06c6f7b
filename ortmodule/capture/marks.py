"""Marks: where hooks of submodules would run while a module is traced.

The hooks of a submodule rest. At the places where its forward pre-hooks and its forward hooks would run, the tensors
among (args, kwargs) or the result pass through ortmodule_capture::cut(Tensor[] xs, int index) -> Tensor[], which gives
stand-ins of the same kind. cuts.py splits the program there.

A mark is of a kind:
  enter, exit     around the forward of a hooked submodule
  call            a submodule that stays in PyTorch, with hooks on it or inside of it: it is called there, on live
                  tensors
  sync            a tensor that a hook has seen is edited in place: the new value is copied into it (functional.py puts
                  these)
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from .. import frames
from ..errors import CaptureError
from ..guard import Place, idle
from ..patches import Patch, replaced
from . import opaque
from .edits import contents_of
from .opaque import CUT
from .skeleton import Fill, flatten_inputs, is_cache, skeleton

MOST = 64  # calls of hooked submodules in one forward; more parts than that are not worth having


class CutError(opaque.OpaqueError):
    """The hooks cannot be given what PyTorch would give them; the message is the reason."""


Sizes = list[tuple[int, int, "int | tuple[int, int]"]]
"""(result, axis, size) where the capture takes the size as a number, or as that of an argument: (slot, axis)."""


@dataclass
class Mark:
    """One cut. fill: values of the operands -> what the hooks are given; order: place of every tensor in
    flatten_inputs' order of that -> operand; grad, autocast: what PyTorch would run the hooks under; partner: index of
    the exit of an enter; sizes: what the graph believes of the results of a kept submodule (Sizes). Slots are known
    after the split."""

    kind: str
    module: str
    fill: Fill
    order: list[int]
    key: Any = None
    grad: bool = True
    autocast: Any = None
    partner: int = -1
    meta: Callable[[list[Tensor]], list[Tensor]] | None = None
    given: Any = None  # while its module runs: the arguments, and what was in them
    operands: list[int] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)
    sizes: Sizes = field(default_factory=list)


# --- marks ----------------------------------------------------------------------------------------


def _fake(xs: list[Tensor], index: int) -> list[Tensor]:
    meta = opaque.current_table().marks[index].meta
    return [opaque.like(x) for x in (xs if meta is None else meta(xs))]


torch.library.register_fake("ortmodule_capture::cut", _fake, lib=opaque._lib)
# What leaves a mark requires a gradient when what entered it did: forward may ask.
torch.library.register_autograd("ortmodule_capture::cut", lambda ctx, grads: (grads, None), lib=opaque._lib)
torch.fx.node.has_side_effect(CUT)


def _leaves(x: Any, share: bool) -> tuple[list[Tensor], Fill, list[int], Any]:
    """Tensors of an object, leaves -> an equal object, which tensor stands at every place, structure key. share: one
    leaf for a tensor that is met twice."""
    tensors: list[Tensor] = []
    seen: dict[int, int] = {}

    def leaf(t: Any) -> int | None:
        if isinstance(t, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CutError("a size is handed to a hooked submodule or returned by it")
        if not isinstance(t, Tensor):
            return None
        if share and id(t) in seen:
            return seen[id(t)]
        seen[id(t)] = len(tensors)
        tensors.append(t)
        return len(tensors) - 1

    fill = skeleton(x, leaf, share=share)
    flat = flatten_inputs((x,), {})
    order = [seen.get(id(t), -1) for t in flat.tensors] if share else list(range(len(tensors)))
    if -1 in order or len(order) != len(flat.tensors):
        raise CutError("a hooked submodule takes or returns tensors inside of an object that cannot be rebuilt")
    return tensors, fill, order, flat.key


def _add(mark: Mark, tensors: list[Tensor]) -> list[Tensor]:
    table = opaque.current_table()
    if any(f.f_code.co_filename.endswith("torch/utils/checkpoint.py") for f in frames.outwards(sys._getframe())):
        raise CutError("hooks run inside of a checkpoint, and again when it is computed again")
    if sum(m.kind in ("enter", "call") for m in table.marks) >= MOST:
        raise CaptureError(
            f"submodules with hooks are called more than {MOST} times: that many cuts would cost more than the engine "
            "gains"
        )
    table.marks.append(mark)
    outs: list[Tensor] = CUT(tensors or [torch.zeros((), device="cpu")], len(table.marks) - 1)
    return outs


def _enter(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    table = opaque.current_table()
    tensors, fill, order, key = _leaves((args, kwargs), not place.apart)
    index = len(table.marks)
    outs = _add(Mark("enter", place.name, fill, order, key, torch.is_grad_enabled(), opaque.autocast_state()), tensors)
    table.open.append(index)
    result: tuple[Any, dict[str, Any]] = fill(_asked(outs, place.asks[0]))
    # a cache is the model's own: what the module puts there is for those after it
    given = tuple([old if is_cache(old) else new for old, new in zip(args, result[0], strict=True)])
    named = {k: kwargs[k] if is_cache(kwargs[k]) else v for k, v in result[1].items()}
    watched = [v for v in (*given, *named.values()) if not is_cache(v)]
    table.marks[index].given = watched, contents_of(watched)
    return given, named


def _exit(place: Place, out: Any) -> Any:
    table = opaque.current_table()
    if not table.open or table.marks[table.open[-1]].module != place.name:
        raise CutError(f"an error inside of {place.name} is caught by the code around it")
    entered = table.marks[table.open.pop()]
    entered.partner = len(table.marks)
    if contents_of(entered.given[0]) != entered.given[1]:
        raise CutError(f"{place.name}, which has hooks, edits a container or object among its arguments")
    entered.given = None
    tensors, fill, order, key = _leaves(out, not place.apart)
    return fill(_asked(_add(Mark("exit", place.name, fill, order, key), tensors), place.asks[1]))


def _asked(xs: list[Tensor], asks: bool) -> list[Tensor]:
    """Forward may ask, and a checkpoint of the old kind does, whether what a hook has given requires a gradient."""
    return [x.requires_grad_() if asks and x.is_floating_point() else x for x in xs]


def _call(
    fqn: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A kept submodule: the results' kinds are recorded ones, or those of a run on fake tensors."""
    tensors, fill, order, _ = _leaves((args, kwargs), True)
    results = opaque.kept_results(fqn, module, forward, args, kwargs)
    back: dict[str, Any] = {}

    def meta(xs: list[Tensor]) -> list[Tensor]:
        with silent(module):
            out, _, _ = results(xs, fill(xs))
        opaque.form_of(fqn, out)
        real, back["fill"], mark.order, mark.key = _leaves(out, True)
        return [opaque.like(y) for y in real]

    mark = Mark("call", fqn, fill, order, None, torch.is_grad_enabled(), opaque.autocast_state(), meta=meta)
    outs = _add(mark, tensors)
    return back["fill"](outs)


def sync_mark(table: opaque.Table, grad: bool) -> int:
    """The row of a mark where a tensor gets the value that an edit in place has given it."""
    table.marks.append(Mark("sync", "", lambda leaves: leaves, [], grad=grad))
    return len(table.marks) - 1


# --- modules while they are traced ----------------------------------------------------------------


def silent(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """No hook of a submodule fires, but for those that are part of the forward."""
    return replaced(*[p for m in root.modules() for p in opaque.without_hooks(m)])


@contextlib.contextmanager
def marked(root: nn.Module, places: tuple[Place, ...], keep: list[str]) -> Iterator[list[str]]:
    """Marks in the place of hooks. Gives the kept submodules that have none, which are somebody else's to keep."""
    live = {k for k in keep if any(p.name == k or p.name.startswith(k + ".") for p in places)}
    with contextlib.ExitStack() as ends:
        at_rest = places or any(idle(f, m) for m in root.modules() for f in m._forward_hooks.values())
        ends.enter_context(silent(root) if at_rest else contextlib.nullcontext())
        for place in places:
            if any(place.name == k or place.name.startswith(k + ".") for k in keep):
                continue
            d = root.get_submodule(place.name).__dict__

            def enter(_m: Any, args: Any, kwargs: Any, place: Place = place) -> Any:
                return _enter(place, args, kwargs) if opaque.exporting() else None

            def leave(_m: Any, _args: Any, out: Any, place: Place = place) -> Any:
                return _exit(place, out) if opaque.exporting() else None

            # silent: after are those that are part of the forward
            after, own = d["_forward_hooks"], [("cut", leave)]
            ends.enter_context(replaced(
                Patch(d, "_forward_pre_hooks", OrderedDict([("cut", enter), *d["_forward_pre_hooks"].items()])),
                Patch(d, "_forward_pre_hooks_with_kwargs", {**d["_forward_pre_hooks_with_kwargs"], "cut": True}),
                Patch(d, "_forward_hooks",
                      OrderedDict([*own, *after.items()] if place.early else [*after.items(), *own]))))  # fmt: skip
        for fqn in live:
            m = root.get_submodule(fqn)

            def call(*args: Any, _fqn: str = fqn, _m: nn.Module = m, _forward: Any = m.forward, **kwargs: Any) -> Any:
                return _call(_fqn, _m, _forward, args, kwargs) if opaque.exporting() else _forward(*args, **kwargs)

            ends.enter_context(replaced(Patch(m.__dict__, "forward", call)))
        yield [k for k in keep if k not in live]


def check(program: Any, module: nn.Module, table: opaque.Table) -> None:
    """What hooks leave behind is not among what the trace took for a constant, and every call has an end."""
    known = {id(t) for m in module.modules() for t in m.__dict__.values() if isinstance(t, Tensor)}
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.CONSTANT_TENSOR:
            t = program.constants[spec.target]
            users = [n for p in program.graph.nodes if p.name == spec.arg.name for n in p.users]
            if id(t) not in known and any(n.target is not torch.ops.aten.lift_fresh_copy.default for n in users):
                raise CaptureError(
                    "forward reads a tensor that is no attribute of a module: hooks on submodules may have put it "
                    "there, and so "
                    "take part in what forward returns"
                )
    if table.open:
        raise CaptureError(f"an error inside of {table.marks[table.open[-1]].module} is caught by the code around it")
