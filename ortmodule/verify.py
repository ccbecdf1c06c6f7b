"""model.verify(batch): engine and PyTorch side by side, and the first module whose result or gradient is wrong.

Four copies of the module compute the batch, with the same weights: PyTorch in fp64 (the judge), PyTorch and the
engine in the module's own precision, the engine in fp64. A tensor of the engine's own precision may be as far from the
judge as `band` times PyTorch's is (root mean square over its elements), and some roundings; one in fp64 may differ by
1e-9.

If something leaves its band, the module is taken apart: every submodule that it calls is compared in the same way,
alone, on the inputs and the arriving gradients that it has in PyTorch, in the order of calls. The first that is wrong
by itself is taken apart in turn. So errors do not pile up on the way to it, and the module named is the innermost.

Copies are made without the user's hooks, and with dropout at 0, whose masks differ by design. The model itself is not
touched: not its parameters, buffers, gradients, modes, hooks; nor the generators of torch, numpy and random.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import numbers
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .capture import flatten_inputs
from .capture.skeleton import input_skeleton, skeleton
from .profile import loaded
from .torch_private import HOOK_TABLES

if TYPE_CHECKING:
    from .state import State

_FP64 = 1e-9  # relative difference that is allowed in fp64
_FP64_THROUGH_F32 = 1e-5  # the same, where the model's code goes through float32
_ROUNDINGS = 16  # of the tensor's dtype, beside the band
_SMALL = 0.1  # of the largest gradient: smaller ones may be as inexact, they are sums that cancel
_RANDOM = 1e-3  # relative difference of two runs that differ in seeds alone
_MAKES_F32 = re.compile(r" = \w+\(.*\bf32\[")  # a node's line in a graph's text
_THROUGH_F32 = "the model's code goes through float32: what is computed in fp64 is compared at 1e-5"
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass
class Difference:
    """A tensor that has left its band. error, eager: distance from PyTorch in fp64, root mean square; of the engine and
    of PyTorch in the same precision."""

    what: str  # output 0, gradient of weight, ...
    dtype: str
    error: float
    allowed: float
    eager: float

    def __str__(self) -> str:
        told = f"error {self.error:.3g}, allowed {self.allowed:.3g} (PyTorch's {self.eager:.3g})"
        return f"{self.what} in {self.dtype}: {told}"


@dataclass
class Verification:
    """What was found. True when everything is within its band."""

    model: str
    compared: int = 0  # tensors
    differences: list[Difference] = field(default_factory=list)  # of the whole model
    module: str | None = None  # the first module that is wrong by itself; "" is the whole one
    kind: str = ""  # and its class
    inner: list[Difference] = field(default_factory=list)  # of that module
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        told = "all within the error band" if self.ok else f"{len(self.differences)} outside of the error band"
        lines = [f"{self.model}: {self.compared} tensors compared with PyTorch in fp64, {told}"]
        if not self.ok:
            where = f"in submodule {self.module!r} ({self.kind})" if self.module else f"in {self.model} itself"
            lines.append(f"  first wrong {where}:")
            lines += [f"    {d}" for d in (self.inner or self.differences)[:8]]
            if self.module:
                lines += ["  of the whole model:", *[f"    {d}" for d in self.differences[:4]]]
        return "\n".join([*lines, *[f"  note: {text}" for text in self.notes]])


@dataclass
class _Call:
    """A module's call. cotangents: arriving gradients by output; None: made up, or the loss's."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cotangents: list[Tensor | None] | None = None


@dataclass
class _Result:
    outputs: list[Tensor]
    values: dict[str, Tensor]  # everything that is compared, by name
    notes: list[str] = field(default_factory=list)


def verify(state: State, wrap: Callable[[nn.Module, Any], nn.Module], batch: Any,
           loss: Callable[[Any], Tensor] | None, band: float) -> Verification:  # fmt: skip
    """See ORTModule.verify. wrap: a module and settings -> its wrapper."""
    if not isinstance(band, numbers.Real) or not 0 < band < math.inf:
        raise ValueError(f"verify(band={band!r}): how many times PyTorch's own error is allowed; give a number above 0")
    if isinstance(batch, Mapping):
        call = _Call((), dict(batch))
    else:
        call = _Call(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})
    found = Verification(type(state.module).__name__)
    if state.assigned or state.override is not None:
        found.notes.append("methods assigned to the wrapper are left out: the module's own forward is compared")
    settings = dataclasses.replace(
        state.settings, save_path=None, strict=False, asked_strict=False, min_coverage=0.0, disable=False,
        memory_budget=None, precision=None,
    )
    with _generators_kept():
        check = _Check(wrap, settings, band, found.notes)
        module = _copied(state.module)
        if check.is_random(module, call, loss):
            found.notes.append("forward is random beside dropout: compared in eval mode")
            module.eval()
        found.compared, found.differences = check.compare(module, call, loss)
        if found.differences:
            found.module, found.kind, found.inner = check.locate(module, call, loss, found.differences)
    found.notes[:] = dict.fromkeys(found.notes)
    return found


class _Check:
    def __init__(
        self, wrap: Callable[[nn.Module, Any], nn.Module], settings: Any, band: float, notes: list[str]
    ) -> None:
        self.wrap, self.settings, self.band, self.notes = wrap, settings, band, notes

    # --- runs

    def run(self, module: nn.Module, call: _Call, loss: Callable[[Any], Tensor] | None, engine: bool,
            wide: bool, judge: _Result | None = None) -> _Result:  # fmt: skip
        """A copy of the module computes the call. wide: in fp64."""
        module = _copied(module)
        if wide:
            module.double()
        runs = self.wrap(module, self.settings) if engine else module
        leaves, scalars, _ = flatten_inputs(call.args, call.kwargs)
        fill = input_skeleton(call.args, call.kwargs)[0]
        given = [_leaf(t, wide) for t in leaves]
        args, kwargs = fill([*given, *scalars])
        device = next((t.device.type for t in given), "cpu")
        autocast = torch.autocast(device, enabled=False) if wide else contextlib.nullcontext()
        with torch.enable_grad(), autocast:
            torch.manual_seed(0)
            out = runs(*args, **kwargs)
            outputs = _tensors(out)
            total = _total(out, outputs, call, loss)
        if total is not None:
            total.backward()  # type: ignore[no-untyped-call]
        values = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
        values |= {f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
        values |= {f"gradient of input {i}": t.grad for i, t in enumerate(given) if t.grad is not None}
        values |= {f"buffer {n}": b.detach() for n, b in module.named_buffers()}
        result = _Result(outputs, values)
        if engine:
            self._told(runs, result)
        return result

    def _told(self, runs: Any, result: _Result) -> None:
        state = runs._ortmodule
        result.notes += [
            f"{'forward ran in PyTorch, parts' if e.by_parts else 'ran in PyTorch, not'} in the engine: {e.reason}"
            for e in state.eager_entries.values()
            if e.calls
        ]
        texts = [g.model.text() for made in state.every for g in loaded(made)]
        result.notes += [_THROUGH_F32] * any(_MAKES_F32.search(text) for text in texts)

    def is_random(self, module: nn.Module, call: _Call, loss: Callable[[Any], Tensor] | None) -> bool:
        """Do two runs of PyTorch differ in what they draw? Dropout is off."""
        results = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=()):
                m = _copied(module)
                leaves, scalars, _ = flatten_inputs(call.args, call.kwargs)
                args, kwargs = input_skeleton(call.args, call.kwargs)[0]([*[_leaf(t, False) for t in leaves], *scalars])
                torch.manual_seed(seed)
                with torch.no_grad():
                    results.append(_tensors(m(*args, **kwargs)))
        return any(_distance(a, b) > _RANDOM * (_size(a) or 1.0) for a, b in zip(*results, strict=True))

    # --- comparing

    def compare(
        self, module: nn.Module, call: _Call, loss: Callable[[Any], Tensor] | None
    ) -> tuple[int, list[Difference]]:
        eager = self.run(module, call, loss, False, False)
        try:
            judge = self.run(module, call, loss, False, True)
        except Exception as error:  # the user's code asks for another dtype
            self.notes.append(f"not compared in fp64, which PyTorch cannot compute: {type(error).__name__}: {error}")
            return self._against(self.run(module, call, loss, True, False), eager, eager, False)
        wide = self.run(module, call, loss, True, True)
        n, found = self._against(wide, judge, judge, True)
        if any(p.dtype != torch.float64 for p in [*module.parameters(), *eager.outputs] if p.is_floating_point()):
            ours = self.run(module, call, loss, True, False)
            more, rest = self._against(ours, eager, judge, False)
            n, found = n + more, rest + found
        return n, found

    def _against(self, ours: _Result, eager: _Result, judge: _Result, wide: bool) -> tuple[int, list[Difference]]:
        self.notes += [text for text in ours.notes if text != _THROUGH_F32]
        through = wide and _THROUGH_F32 in ours.notes
        if through:
            self.notes.append(_THROUGH_F32)
        most = max((_size(t) for name, t in judge.values.items() if name.startswith("gradient")), default=0.0)
        found: list[Difference] = []
        if ours.values.keys() != judge.values.keys():
            for name in ours.values.keys() ^ judge.values.keys():
                has = "the engine" if name in ours.values else "PyTorch"
                found.append(Difference(f"{name}, which only {has} has", "", float("inf"), 0.0, 0.0))
        for name in [n for n in judge.values if n in ours.values and n in eager.values]:
            a, b, ref = ours.values[name], eager.values[name], judge.values[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                found.append(Difference(f"{name}, another type", str(a.dtype), float("inf"), 0.0, 0.0))
            elif not a.is_floating_point():
                if not torch.equal(a, b):
                    found.append(Difference(name, str(a.dtype), float("inf"), 0.0, 0.0))
            else:
                size = max(_size(ref), _SMALL * most if name.startswith("gradient") else 0.0)
                error, theirs = _distance(a, ref), _distance(b, ref)
                if wide:
                    allowed = (_FP64_THROUGH_F32 if through else _FP64) * size
                else:
                    floats = [t.dtype for t in (a, *eager.outputs) if t.is_floating_point()]
                    eps = max(_autocast_eps(a), *(torch.finfo(dtype).eps for dtype in floats))
                    allowed = self.band * theirs + _ROUNDINGS * eps * size
                if not error <= allowed:
                    found.append(Difference(name, str(a.dtype).removeprefix("torch."), error, allowed, theirs))
        return len(judge.values), found

    # --- taking apart

    def locate(self, module: nn.Module, call: _Call, loss: Callable[[Any], Tensor] | None,
               own: list[Difference]) -> tuple[str, str, list[Difference]]:  # fmt: skip
        """The innermost module that is wrong on its own inputs."""
        name, at, inner = "", module, own
        while True:
            for child, given in _calls(at, call, loss):
                try:
                    found = self.compare(at.get_submodule(child), given, None)[1]
                except Exception as error:
                    self.notes.append(
                        f"{name}.{child}".strip(".") + f" cannot be compared alone: {type(error).__name__}: {error}"
                    )
                    continue
                if found:
                    name, at, call, loss, inner = (
                        f"{name}.{child}".strip("."),
                        at.get_submodule(child),
                        given,
                        None,
                        found,
                    )
                    break
            else:
                return name, type(at).__name__, inner


def _calls(module: nn.Module, call: _Call, loss: Callable[[Any], Tensor] | None) -> list[tuple[str, _Call]]:
    """The calls of submodules that `module` makes itself, with their arriving gradients, as PyTorch computes them in
    the module's own precision."""
    module = _copied(module)
    names = {id(m): name for name, m in module.named_modules() if m is not module}
    depth = [0]
    found: list[tuple[str, _Call]] = []
    handles: list[Any] = []
    open_calls: list[_Call | None] = []

    def enter(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made: _Call | None = None
        if depth[0] == 0 and id(m) in names:
            leaves, scalars, _ = flatten_inputs(args, kwargs)
            held = [t.detach().clone().requires_grad_(t.requires_grad and t.is_floating_point()) for t in leaves]
            made = _Call(*input_skeleton(args, kwargs)[0]([*held, *scalars]))
            found.append((names[id(m)], made))
        open_calls.append(made)
        depth[0] += 1

    def leave(_m: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
        depth[0] -= 1
        made = open_calls.pop()
        if made is None:
            return
        outputs = _tensors(out)
        made.cotangents = [None] * len(outputs)
        for i, t in enumerate(outputs):
            if t.requires_grad:

                def arrived(grad: Tensor, i: int = i, into: list[Tensor | None] = made.cotangents) -> None:
                    into[i] = grad.detach().clone()

                t.register_hook(arrived)

    for m in module.modules():
        if m is not module:
            handles.append(m.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(m.register_forward_hook(leave, with_kwargs=True))
    leaves, scalars, _ = flatten_inputs(call.args, call.kwargs)
    args, kwargs = input_skeleton(call.args, call.kwargs)[0]([*[_leaf(t, False) for t in leaves], *scalars])
    with torch.enable_grad():
        torch.manual_seed(0)
        out = module(*args, **kwargs)
        total = _total(out, _tensors(out), call, loss)
    if total is not None:
        total.backward()  # type: ignore[no-untyped-call]
    return found


# --- copies ------------------------------------------------------------------------------------------


def _copied(module: nn.Module) -> nn.Module:
    """A copy without gradients, without the hooks of the user's, wrappers inside it being what they wrap, and without
    dropout."""
    memo: dict[int, Any] = {}
    for m in module.modules():
        for table in HOOK_TABLES:
            hooks = m.__dict__.get(table)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict((k, h) for k, h in hooks.items() if _of_torch(h))
    made: nn.Module = copy.deepcopy(module, memo)
    state = getattr(made, "_ortmodule", None)
    made = made if state is None else state.module
    for m in list(made.modules()):
        for name, child in m._modules.items():
            inner = getattr(child, "_ortmodule", None)
            if inner is not None:
                m._modules[name] = inner.module
    for p in made.parameters():
        p.grad = None
    for m in made.modules():
        if isinstance(m, _DROPOUT):
            m.p = 0.0
        for name, value in m.__dict__.items():
            if isinstance(value, float) and "drop" in name:
                m.__dict__[name] = 0.0
    return made


def _of_torch(hook: Any) -> bool:
    """Is it a part of what the module computes (weight_norm, spectral_norm)?"""
    return str(getattr(type(hook), "__module__", "")).startswith("torch.nn.utils.")


def _leaf(t: Tensor, wide: bool) -> Tensor:
    made = t.detach().clone()
    if wide and made.is_floating_point():
        made = made.double()
    return made.requires_grad_(t.requires_grad)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


# --- results -----------------------------------------------------------------------------------------


def _tensors(out: Any) -> list[Tensor]:
    """In the order of a walk, each once."""
    found: list[Tensor] = []
    seen: dict[int, int] = {}

    def leaf(x: Any) -> int | None:
        if not isinstance(x, Tensor):
            return None
        if id(x) not in seen:
            seen[id(x)] = len(found)
            found.append(x)
        return seen[id(x)]

    skeleton(out, leaf)
    return found


def _total(out: Any, outputs: list[Tensor], call: _Call, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """What backward starts from: the loss, or a sum of the outputs by the gradients that arrive."""
    if loss is not None:
        return loss(out)
    live = [(i, t) for i, t in enumerate(outputs) if t.requires_grad and t.is_floating_point()]
    if not live:
        return None
    if call.cotangents is None and live[0][1].dim() == 0:
        return live[0][1]
    total: Tensor | None = None
    for i, t in live:
        if call.cotangents is None:
            generator = torch.Generator().manual_seed(i)
            by: Tensor | None = torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu")
        else:
            by = call.cotangents[i]
        if by is None:
            continue
        part = (t * by.to(t.device, t.dtype)).sum()
        total = part if total is None else total + part.to(total.dtype)
    return total


def _distance(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference; infinite where one is not finite and the other is, or is another."""
    x, y = a.detach().double().flatten(), b.detach().double().flatten()
    if not x.numel():
        return 0.0
    finite = torch.isfinite(x) & torch.isfinite(y)
    same = finite | (x == y) | (torch.isnan(x) & torch.isnan(y))
    if not bool(same.all()):
        return float("inf")
    d = torch.where(finite, x - y, 0.0)
    return float(d.square().mean().sqrt())


def _size(t: Tensor) -> float:
    x = t.detach().double()
    return float(torch.where(torch.isfinite(x), x, 0.0).square().mean().sqrt()) if x.numel() else 0.0


def _autocast_eps(t: Tensor) -> float:
    kind = t.device.type
    return float(torch.finfo(torch.get_autocast_dtype(kind)).eps) if torch.is_autocast_enabled(kind) else 0.0
