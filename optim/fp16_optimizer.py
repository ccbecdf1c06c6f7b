"""FP16_Optimizer: mixed precision around any optimizer, as the same object.

On a torch optimizer (ours included) the object's class becomes a subclass of its own class, so schedulers, Accelerate
and isinstance keep working, and it gains `backward`, `clip_master_grads`, `loss_scale`, `overflow`. For every 16-bit
parameter there is an f32 master weight: inside the state of our fused optimizers, otherwise a tensor that takes the
parameter's place in param_groups while the inner step or state_dict runs, and only then.

    backward(loss)   scales the loss and runs autograd
    step()           one sweep: norm and finiteness of the gradients; inf or NaN: no update, the scale halves; else
                     gradients are unscaled
                     on their way to the masters (or inside the fused kernel), the inner step runs, masters are rounded
                     to the parameters

On CUDA the device decides (Verdict in cuda.py): loss scale, counters and the verdict over the gradients stay there, the
inner step takes divisor and stop flag from there, and nothing waits. Overflows are logged there and reported here when
a copy of that log has arrived. The inner optimizer must be able to leave a step out by itself: ours, and torch's Adam
and AdamW with fused=True (not its fused SGD, whose momentum is garbage after a first step left out). With others the
host decides, as on the CPU, and waits.

A script that never calls `optimizer.backward` keeps working unscaled. Wrappers of Apex, DeepSpeed and Megatron:
wrappers.py.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ortmodule import _C

from . import cuda
from .fused import HALF, FusedOptimizer, run_closure
from .lists import first_nonfinite, grad_norm, overlaps, scale_into
from .loss_scaler import DynamicLossScaler, count
from .wrappers import modify_wrapper

logger = logging.getLogger("ortmodule")

ADVICE_AFTER = 5  # overflows in a row before advice is given
ADVICE = (
    "Every one of the last {n} steps overflowed. Likely causes: a learning rate too high, an input with inf or NaN, a "
    "loss computed in "
    "float16 (compute it in float32), or an epsilon that is 0 in float16 (below 6e-8). bfloat16 needs no loss scaling."
)


def FP16_Optimizer(
    optimizer: Any,
    model: torch.nn.Module | None = None,
    loss_scaler: DynamicLossScaler | float | None = None,
    **kwargs: Any,
) -> Any:
    """Makes `optimizer` a mixed-precision optimizer and returns the same object.

    Args:
        optimizer: a torch optimizer; or an Apex AMP, DeepSpeed ZeRO 1/2 or legacy Megatron optimizer, whose overflow
        check and norm are
            replaced by faster ones; anything else is returned as it is, with a warning.
        model: only for messages: names of parameters and modules.
        loss_scaler: DynamicLossScaler, or a number for a constant scale. Default: dynamic, 2^16, window 2000.
        kwargs: get_tensor_model_parallel_rank, get_tensor_model_parallel_group (or ..._horizontal_...) for Megatron.
    """
    if isinstance(optimizer, torch.nn.Module):
        raise TypeError(
            f"FP16_Optimizer is given a module, {type(optimizer).__name__}, in the place of its optimizer: "
            "FP16_Optimizer(torch.optim.AdamW(model.parameters()), model)"
        )
    if modify_wrapper(optimizer, **kwargs):
        return optimizer
    if kwargs:
        raise TypeError(f"unknown arguments for a {type(optimizer).__name__}: {', '.join(kwargs)}")
    inner = getattr(optimizer, "optimizer", None)
    if type(optimizer).__module__.startswith("accelerate.") and isinstance(inner, torch.optim.Optimizer):
        FP16_Optimizer(inner, model, loss_scaler)
        return optimizer
    nested = (
        [v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)]
        if hasattr(optimizer, "__dict__")
        else []
    )
    if not isinstance(optimizer, torch.optim.Optimizer) or nested:
        warnings.warn(
            f"Skip modifying optimizer because {type(optimizer).__module__}.{type(optimizer).__qualname__} is not one "
            "that FP16_Optimizer "
            "knows; it is returned unchanged.",
            UserWarning,
            stacklevel=2,
        )
        return optimizer
    if isinstance(optimizer, MixedPrecision):
        return optimizer
    cls: Any = type(optimizer)
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"FP16_Optimizer of {cls.__name__}: its step() needs a closure, which it calls several times; "
            "FP16_Optimizer unscales the gradients of one backward: use an optimizer whose step() goes without"
        )
    _refuse_lazy(p for group in optimizer.param_groups for p in group["params"])
    if loss_scaler is not None and not isinstance(loss_scaler, DynamicLossScaler):
        loss_scaler = DynamicLossScaler(False, float(loss_scaler))
    optimizer.__class__ = _mixed_class(cls)
    optimizer._mixed_init(model, loss_scaler)  # type: ignore[attr-defined]
    return optimizer


def _refuse_lazy(params: Iterable[Tensor]) -> None:
    for p in params:
        if p.is_neg():
            raise ValueError(
                f"FP16_Optimizer got a parameter of sizes {tuple(p.shape)} that is negated lazily (is_neg()): set "
                "p.data = p.data.resolve_neg()"
            )


@functools.cache
def _mixed_class(cls: Any) -> Any:
    return type(
        f"FP16_{cls.__name__}", (MixedPrecision, cls), {"__module__": __name__, "__doc__": MixedPrecision.__doc__}
    )


def _blank(cls: Any) -> Any:
    """What a copy starts from; names of parameters and a scheduler's wrapper of step() stay behind."""
    optimizer = cls.__new__(cls)
    # here torch puts the calls of hooks into the step() of cls
    optimizer.__setstate__({"state": {}, "param_groups": [], "defaults": {}})
    optimizer.__class__ = _mixed_class(cls)
    optimizer._start()
    return optimizer


def _versions(grads: list[Tensor]) -> list[tuple[int, int]]:
    return [(id(g), g._version) for g in grads]


class MixedPrecision(torch.optim.Optimizer):
    """Methods that FP16_Optimizer adds to an optimizer's class."""

    _scaler: DynamicLossScaler
    _f32_of: dict[Tensor, Tensor]  # 16-bit parameter -> f32 master; empty for our fused optimizers
    master_weights: Any
    stochastic_rounding: bool

    def _start(self) -> None:
        """What a copy begins anew: knowledge of these gradients, of these parameters' names, and what is under way on a
        device."""
        # the gradients are finite, while they are in this state
        self._checked: tuple[bool, list[tuple[int, int]]] | None = None
        self._verdict: cuda.Verdict | None = None  # the same on CUDA
        self._scale: Tensor | float | None = None  # what backward() multiplied by; a tensor where the device decides
        self._late: cuda.Late | None = None
        self._gradients = cuda.Stepper()
        self._names: dict[int, tuple[str, str]] = {}  # id of a parameter -> its name, its module
        self._inner_step: Any = None

    def _mixed_init(self, model: torch.nn.Module | None, loss_scaler: DynamicLossScaler | None) -> None:
        self._scaler = loss_scaler or DynamicLossScaler()
        self._start()
        self._scaled = False  # backward() has run since the last step
        self._clip = 1.0
        self._limit: float | None = None  # on CUDA: the norm to clip to
        self._counts = cuda.Mirror(*[0.0] * (cuda.LOG_HEAD + cuda.LOG_ENTRIES * cuda.LOG_ENTRY))
        self._reported = 0  # overflows that messages have been written about
        self._first_overflow: tuple[str, str] | None = None
        self._fused = isinstance(self, FusedOptimizer)
        # A scheduler made before has put a wrapper of the class's step on the instance: it becomes the inner step, and
        # what takes its place carries the mark by which schedulers recognise their wrapper.
        self._inner_step = self.__dict__.pop("step", None)
        if self._inner_step is not None:
            this = weakref.ref(self)

            def step(closure: Callable[[], Any] | None = None) -> Any:
                return MixedPrecision.step(this(), closure)  # type: ignore[arg-type]

            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            self.step = step  # type: ignore[method-assign]
        self._f32_of = {}
        if model is not None:
            for prefix, module in model.named_modules():
                for name, p in module.named_parameters(recurse=False):
                    path = f"{prefix}.{name}" if prefix else name
                    self._names.setdefault(id(p), (path, f"{prefix or 'the model'} ({type(module).__name__})"))
        if self._fused:
            if not (self.master_weights or self.stochastic_rounding):
                self.master_weights = True
                for p, state in self.state.items():
                    self._init_master(p, state)  # type: ignore[attr-defined]
        else:
            self._add_masters()

    _COPIED = ("_scaler", "_scaled", "_clip", "_limit", "_counts", "_reported", "_first_overflow", "_fused", "_f32_of")

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._COPIED}}

    def _add_masters(self) -> None:
        _refuse_lazy(p for group in self.param_groups for p in group["params"] if p not in self._f32_of)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype in HALF and p not in self._f32_of:
                    self._f32_of[p] = p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
                    if p in self.state:  # the optimizer has run before
                        old = self.state.pop(p)
                        self.state[self._f32_of[p]] = {
                            k: v.float() if isinstance(v, Tensor) and v.dtype in HALF else v for k, v in old.items()
                        }

    @contextmanager
    def _with_masters(self) -> Iterator[None]:
        """While inside, param_groups hold the masters instead of the 16-bit parameters."""
        if not self._f32_of:
            yield
            return
        kept = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [self._f32_of.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, kept):
                group["params"] = params

    # --- scaling ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self._scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scaler.loss_scale = float(value)

    @property
    def loss_scaler(self) -> DynamicLossScaler:
        return self._scaler

    @property
    def steps(self) -> int:
        """Updates so far. On CUDA this and the other counters, and loss_scale, wait for the device."""
        return int(self._counters()[0])

    @property
    def skipped_steps(self) -> int:
        return int(self._counters()[1])

    @property
    def overflow(self) -> bool:
        """The last step was left out."""
        return bool(self._counters()[3])

    @property
    def first_overflow(self) -> tuple[str, str] | None:
        """Parameter and module with the first inf or NaN of the last overflow."""
        self._counters()
        return self._first_overflow

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """(loss * loss_scale).backward(); update_master_grads is accepted for Apex's sake, gradients reach the masters
        in step()."""
        place = self._place()
        if place is not None:
            self._scale = self._scale_on(place)
            (loss.float() * self._scale.to(loss.device)).backward(retain_graph=retain_graph)
        else:
            # to gradients of an earlier backward more are added: of one scale
            if not (self._scaled and isinstance(self._scale, float) and self._grads()[0]):
                self._scale = self._scaler.loss_scale
            (loss.float() * self._scale).backward(retain_graph=retain_graph)
        self._scaled = True
        self._checked = self._verdict = self._limit = None
        self._clip = 1.0  # a norm was clipped whose gradients are no more, or not all

    def update_master_grads(self) -> None:
        """Nothing to do here: gradients reach the masters in step()."""

    def _grads(self) -> tuple[list[Tensor], list[Tensor]]:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            if p.grad.layout is not torch.strided:  # type: ignore[union-attr]
                raise RuntimeError("FP16_Optimizer does not support sparse gradients")
        return params, [p.grad for p in params]  # type: ignore[misc]

    def _inverse_scale(self) -> float:
        return 1.0 / float(self._scaler.loss_scale if self._scale is None else self._scale) if self._scaled else 1.0

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float | Tensor:
        """Limits the norm of the unscaled gradients at the next step(); no gradient is touched. Returns the norm
        before, -1 at overflow: where the device decides a tensor there, else a number."""
        params, grads = self._grads()
        place = self._place(grads) if norm_type == 2.0 else None
        if place is not None:
            self._clip, self._limit = 1.0, float(max_norm)
            verdict = self._decide(place, params, grads)
            return torch.where(verdict.stop != 0, -1.0, verdict.norm)
        norm, finite = grad_norm(grads, norm_type)
        self._limit = None
        self._checked = finite, _versions(grads)
        if not finite:
            return -1.0
        norm *= self._inverse_scale()
        self._clip = min(1.0, max_norm / (norm + 1e-6))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self._forget()

    def _forget(self) -> None:
        self._scaled, self._clip, self._limit = False, 1.0, None
        self._checked = self._verdict = self._scale = None

    # --- step -------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, or none at overflow (see `overflow`). A closure is called once, first; its loss is returned."""
        loss = None
        if closure is not None:
            loss = run_closure(self, closure)
        self._opt_called = True  # what schedulers look for, also when this step is left out
        params, grads = self._grads()
        place = self._place(grads)
        if place is not None:
            self._step_on_device(place, params, grads)
            return loss
        if self._limit is not None:  # clip_master_grads() left it to the device, and gradients have moved since
            self.clip_master_grads(self._limit)
        scaled, factor = self._scaled, self._inverse_scale() * self._clip
        finite = True
        if scaled:
            known = self._checked is not None and self._checked[1] == _versions(grads)
            finite = self._checked[0] if known else grad_norm(grads)[1]  # type: ignore[index]
        done, skipped, row, _, *log = self._counters()
        if scaled:
            scale = self._scaler.loss_scale
            self._scaler.update(finite)
            if not finite:
                index = first_nonfinite(grads)
                where = None if index is None else self._names_of(params[index], index)
                self._report_overflow(int(done + skipped), where, scale, self._scaler.loss_scale, int(row) + 1)
        self._forget()
        if not finite:
            self._counts.set(done, skipped + 1, row + 1, 1.0, *log)
            self._reported = int(skipped) + 1
            return loss
        self._counts.set(done + 1, skipped, 0.0, 0.0, *log)
        if self._fused:
            self._step_fused(factor)
        else:
            self._step_masters(params, grads, factor)
        return loss

    # for torch, at loading and copying: hooks are run by the inner step, none at overflow
    step.hooked = True  # type: ignore[attr-defined]

    def _call_inner_step(self) -> None:
        if self._inner_step is not None:
            self._inner_step()
        else:
            super().step()

    def _step_fused(self, factor: float) -> None:
        # clipped to a norm of 0: a divisor that leaves nothing of a gradient
        with self._told(None if factor == 1.0 else 1.0 / factor if factor else sys.float_info.max, None):
            self._call_inner_step()

    @contextmanager
    def _told(self, grad_scale: float | Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
        """While inside, the inner step finds these where GradScaler would leave them."""
        before = {k: v for k, v in vars(self).items() if k in ("grad_scale", "found_inf")}  # a GradScaler's
        if grad_scale is not None and before.get("grad_scale") is not None:  # None when it has unscaled
            grad_scale = before["grad_scale"] * grad_scale
        given = {k: v for k, v in (("grad_scale", grad_scale), ("found_inf", found_inf)) if v is not None}
        self.__dict__.update(given)
        try:
            yield
        finally:
            for name in given:
                del self.__dict__[name]
            self.__dict__.update(before)

    def _step_masters(self, params: list[Tensor], grads: list[Tensor], factor: float) -> None:
        if any(p.dtype in HALF and p not in self._f32_of for p in params):
            self._add_masters()  # a group was added
        if factor != 1.0:
            kept = list(dict.fromkeys(p for p in params if p not in self._f32_of))
            for i in overlaps([p.grad for p in kept]):  # type: ignore[misc]
                kept[i].grad = kept[i].grad.clone()  # type: ignore[union-attr]
            scale_into([p.grad for p in kept], None, factor)  # type: ignore[misc]
        half = [(p, self._f32_of[p], g) for p, g in zip(params, grads) if p in self._f32_of]
        for _, master, _ in half:
            master.grad = torch.empty_like(master)
        scale_into([m.grad for _, m, _ in half], [g for _, _, g in half], factor)  # type: ignore[misc]
        try:
            with self._with_masters():
                self._call_inner_step()
        finally:
            for _, master, _ in half:
                master.grad = None
        scale_into([p.detach() for p, _, _ in half], [m for _, m, _ in half])

    # --- where the device decides -----------------------------------------------------------------

    def _place(self, grads: list[Tensor] | None = None) -> cuda.Place | None:
        """Where the device decides about a step; None: the host does."""
        skips = self._fused or (
            isinstance(self, (torch.optim.Adam, torch.optim.AdamW))
            and getattr(self, "_step_supports_amp_scaling", False)
        )
        if (
            not skips
            or type(self._scaler).update is not DynamicLossScaler.update
            or (grads is not None and not cuda.usable(grads))
        ):
            return None
        index = {cuda.host.index(p) for group in self.param_groups for p in group["params"]}
        return cuda.Place(index.pop()) if len(index) == 1 and -1 not in index and _C.cuda_archs() else None

    def _scale_on(self, place: cuda.Place) -> Tensor:
        """float32, of its own: a step that changes the scale does not change it."""
        return self._scaler.state.on(place, self.param_groups[0]["params"][0])[0].float()

    def _decide(self, place: cuda.Place, params: list[Tensor], grads: list[Tensor]) -> cuda.Verdict:
        """Norm, flag and divisor of the gradients as they are; the pass over them is made once."""
        if self._verdict is None or not self._verdict.still_holds(place):
            number = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
            self._verdict = cuda.Verdict(
                self._gradients.table(place, "gradients"), place, grads, [number[id(p)] for p in params]
            )
        if self._scaled and not isinstance(self._scale, Tensor):
            self._scale = self._scale_on(place)
        self._verdict.decide(
            self._scale if self._scaled else None,  # type: ignore[arg-type]
            1.0 / self._clip if self._clip else math.inf,
            self._limit,
        )
        return self._verdict

    def _step_on_device(self, place: cuda.Place, params: list[Tensor], grads: list[Tensor]) -> None:
        if self._late is not None and not place.capturing:
            self._report(self._late.arrived())
        counts = self._counts.on(place, params[0])
        scaled = self._scaled
        verdict = self._decide(place, params, grads) if scaled or self._clip != 1.0 or self._limit is not None else None
        self._forget()
        self._swept = verdict.head if verdict else None
        try:
            with self._told(verdict.divisor if verdict else None, verdict.stop if verdict and scaled else None):
                if self._fused:
                    self._call_inner_step()
                else:
                    self._step_masters(params, grads, 1.0)
        finally:
            self._swept = None
        if verdict and scaled:
            scaler = self._scaler
            state = scaler.state.on(place, params[0])
            _C.cuda_loss_scale(
                place.index,
                place.stream,
                state,
                counts,
                verdict.stop,
                verdict.first,
                scaler.automatic_update,
                *scaler.rule(),
            )
            scaler.state.changed(place)
        else:
            counts[0].add_(1)
            counts[2:4].zero_()
        self._counts.changed(place)
        if not place.capturing:
            if self._late is None or self._late.source is not counts:
                self._late = cuda.host.late(counts)
            self._late.begin()

    def _counters(self) -> list[float]:
        values = self._counts.get()
        self._report(values)
        return values

    def _report(self, values: list[float] | None) -> None:
        """Writes about the overflows in the log that nothing was written about."""
        if values is None or values[1] <= self._reported:
            return
        skipped = int(values[1])
        if skipped - self._reported > cuda.LOG_ENTRIES:
            logger.warning(
                "%d steps overflowed and were skipped; the last %d:", skipped - self._reported, cuda.LOG_ENTRIES
            )
        params = [p for group in self.param_groups for p in group["params"]]
        for k in range(max(self._reported, skipped - cuda.LOG_ENTRIES), skipped):
            at = cuda.LOG_HEAD + k % cuda.LOG_ENTRIES * cuda.LOG_ENTRY
            step, index, before, after, row = values[at : at + cuda.LOG_ENTRY]
            where = self._names_of(params[int(index)], int(index)) if 0 <= index < len(params) else None
            self._report_overflow(int(step), where, before, after, int(row))
        self._reported = skipped

    # --- messages ---------------------------------------------------------------------------------

    def _report_overflow(self, step: int, where: tuple[str, str] | None, before: float, after: float, row: int) -> None:
        self._first_overflow = where or self._first_overflow
        logger.warning(
            "step %d: %s in the gradient of %s, module %s; update skipped, loss scale %g -> %g",
            step,
            "inf or NaN",
            *(where or ("a shard on another rank", "?")),
            before,
            after,
        )
        if row == ADVICE_AFTER:
            logger.warning(ADVICE.format(n=ADVICE_AFTER))

    def _names_of(self, p: Tensor, index: int) -> tuple[str, str]:
        name, module = self._names.get(id(p), ("", ""))
        if not name:
            for group in self.param_groups:
                for q, known in zip(group["params"], group.get("param_names", [])):
                    if q is p:
                        name, module = known, known.rpartition(".")[0] or "the model"
        return (
            name or f"parameter {index} of sizes {tuple(p.shape)}",
            module or "unknown (pass model= to FP16_Optimizer)",
        )

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state over the masters, plus "fp16_optimizer": scaler, counters, masters. Plain tensors
        and numbers."""
        with self._with_masters():
            out = super().state_dict()
        masters = [self._f32_of.get(p) for group in self.param_groups for p in group["params"]]
        out["fp16_optimizer"] = {
            **self._scaler.state_dict(),
            **dict(zip(("steps", "skipped_steps", "overflows_in_a_row"), map(int, self._counters()))),
            "masters": {i: m for i, m in enumerate(masters) if m is not None},
        }
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes its own state, or a plain optimizer's: then the masters start from the parameters and the scale is left
        as it is."""
        own = state_dict.get("fp16_optimizer", {})
        inner = {k: v for k, v in state_dict.items() if k != "fp16_optimizer"}
        params = [p for group in self.param_groups for p in group["params"]]
        counts, masters, scaler = [], own.get("masters", {}), self._scaler.state_dict()
        if own:  # what is wrong in it is found before anything changes
            counts = [count(own, name) for name in ("steps", "skipped_steps", "overflows_in_a_row")]
            for i, p in enumerate(params):
                if p in self._f32_of and i in masters and getattr(masters[i], "shape", None) != p.shape:
                    given = tuple(masters[i].shape) if isinstance(masters[i], Tensor) else repr(masters[i])
                    raise ValueError(
                        f"FP16_Optimizer: the saved master of parameter {i} is of sizes {given}, the parameter of "
                        f"{tuple(p.shape)}: is it of another model?"
                    )
            self._scaler.load_state_dict(own)
        try:
            with self._with_masters():
                super().load_state_dict(inner)
        except Exception:
            self._scaler.load_state_dict(scaler)
            raise
        if own:
            self._counts.set(*counts, *self._counts.get()[3:])
            self._reported, self._late = int(own["skipped_steps"]), None
        for i, p in enumerate(params):
            if p in self._f32_of:
                self._f32_of[p].copy_(masters.get(i, p.detach()))
