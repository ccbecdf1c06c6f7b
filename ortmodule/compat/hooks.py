"""Subscribers: what is to be done around the forward of every submodule, and StatisticsSubscriber, which writes
statistics of activations and their gradients to files, to find where two runs begin to differ.

A manager gives every submodule a number (depth first) and a depth, and registers forward hooks, which ORTModule runs on
live tensors between parts of its graph (docs/ARCHITECTURE.md, Cuts). A step ends with the outermost module's forward.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..module import ORTModule
from .schema import walk

_SAMPLES = 128


class RuntimeStates:
    """What subscribers are given: the step and the modules' numbers and depths."""

    class _GlobalStates:
        def __init__(self) -> None:
            self.execution_step = 0
            self.module_index_to_depth: dict[int, int] = {}
            self.module_to_module_index: dict[nn.Module, int] = {}

    def __init__(self) -> None:
        self.global_states = RuntimeStates._GlobalStates()


class SubscriberBase:
    """Override what is needed of the methods that end in _impl; they run in the steps start_step <= step < end_step."""

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = sys.maxsize if end_step is None else end_step

    def pre_forward_module_apply_impl(self, run_rtx: RuntimeStates, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: Tensor
    ) -> Tensor:
        return tensor

    def post_forward_module_apply_impl(self, run_rtx: RuntimeStates, module: nn.Module, args: Any, outputs: Any) -> Any:
        return args, outputs

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: Tensor
    ) -> Tensor:
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, args: Any, outputs: Any
    ) -> Any:
        return args, outputs

    def _active(self, run: RuntimeStates) -> bool:
        return self._start_step <= run.global_states.execution_step < self._end_step

    def _has(self, *names: str) -> bool:
        return any(getattr(type(self), n) is not getattr(SubscriberBase, n) for n in names)


def _each(data: Any, function: Callable[[int, Tensor], Tensor]) -> Any:
    """The data with function(number, tensor) in the place of each tensor; other values as they are."""
    count = -1

    def leaf(value: Any, _: str) -> Any:
        nonlocal count
        if not isinstance(value, Tensor):
            return value
        count += 1
        return function(count, value)

    return walk(data, leaf)


class SubscriberManager:
    def __init__(self) -> None:
        self._run = RuntimeStates()
        self._subscribers: list[SubscriberBase] = []
        self._handles: list[Any] = []

    def subscribe(self, module: nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """From now on the subscribers are called around the submodules of `module` (an ORTModule or the module before
        it is wrapped); those of an earlier call are not. The step is 0 again.

        Raises ValueError for a wrong type, RuntimeError for an empty list.
        """
        if not isinstance(module, nn.Module):
            raise ValueError("module must be a torch.nn.Module instance")
        if any(not isinstance(s, SubscriberBase) for s in subscribers):
            raise ValueError("subscriber must be a SubscriberBase instance")
        self.unsubscribe()
        if not subscribers:
            raise RuntimeError("No subscribers are registered.")
        self._run = RuntimeStates()
        self._subscribers = list(dict.fromkeys(subscribers))
        module = module.module if isinstance(module, ORTModule) else module
        self._register(module, 1)

        def end(_: nn.Module, args: Any, outputs: Any) -> Any:
            for s in self._subscribers:
                if s._active(self._run):
                    _, outputs = s.post_forward_outmost_module_apply_impl(self._run, module, args, outputs)
            self._run.global_states.execution_step += 1
            return outputs

        self._handles.append(module.register_forward_hook(end))

    def unsubscribe(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._subscribers = []

    def get_subscriber(self, subscriber_type: type) -> SubscriberBase:
        for subscriber in self._subscribers:
            if isinstance(subscriber, subscriber_type):
                return subscriber
        raise RuntimeError(f"Subscriber {subscriber_type} is not registered.")

    def get_run_context(self) -> RuntimeStates:
        return self._run

    def _register(self, module: nn.Module, depth: int) -> None:
        states = self._run.global_states
        number = len(states.module_to_module_index)
        states.module_to_module_index[module] = number
        states.module_index_to_depth[number] = depth
        for child in module.children():
            if child not in states.module_to_module_index:
                self._register(child, depth + 1)

        # a hook may be called with a stand-in of the module: subscribers are given the one that has a number
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            for s in self._subscribers:
                if s._active(self._run):
                    args, kwargs = s.pre_forward_module_apply_impl(self._run, module, args, kwargs)
                    args, kwargs = _each([args, kwargs], partial(s.pre_forward_tensor_apply_impl, self._run, module))
            return args, kwargs

        def after(_: nn.Module, args: Any, outputs: Any) -> Any:
            for s in self._subscribers:
                if s._active(self._run):
                    _, outputs = s.post_forward_module_apply_impl(self._run, module, args, outputs)
                    outputs = _each(outputs, partial(s.post_forward_tensor_apply_impl, self._run, module))
            return outputs

        if any(s._has("pre_forward_module_apply_impl", "pre_forward_tensor_apply_impl") for s in self._subscribers):
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if any(s._has("post_forward_module_apply_impl", "post_forward_tensor_apply_impl") for s in self._subscribers):
            self._handles.append(module.register_forward_hook(after))


class _Inspect(torch.autograd.Function):
    """The tensor, and its gradient, seen by a StatisticsSubscriber on their way."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str, depth: int, run: RuntimeStates, sub: StatisticsSubscriber
    ) -> Tensor:
        ctx.seen = name, depth, run.global_states.execution_step, sub
        sub._write(tensor, depth, name, "forward", run.global_states.execution_step)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        name, depth, step, sub = ctx.seen
        sub._write(grads[0], depth, name, "backward", step)
        return grads[0], None, None, None, None


class StatisticsSubscriber(SubscriberBase):
    """Writes statistics of what every submodule returns, and of its gradient: `step_<n>/<class>_<number>_<k>th_output_
    forward` and `..._backward` in output_dir, their names in the order of writing in `step_<n>/order.txt`.

    output_dir: FileExistsError when there is one, unless override_output_dir says that it may be removed. run_on_cpu:
    the numbers are computed on the CPU. bucket_size: elements at a time, which bounds the memory for it.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 2**29,
    ) -> None:
        super().__init__(start_step, end_step)
        self._output_dir = Path(output_dir)
        self._run_on_cpu = run_on_cpu
        self._bucket_size = bucket_size
        if self._output_dir.exists():
            if not override_output_dir:
                raise FileExistsError(
                    f"Output directory {output_dir} already exists. Set override_output_dir=True for "
                    "StatisticsSubscriber if this is the intention."
                )
            warnings.warn(f"Output directory {output_dir} already exists, overriding it.", stacklevel=2)
            shutil.rmtree(self._output_dir)

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: Tensor
    ) -> Tensor:
        states = run_rtx.global_states
        number = states.module_to_module_index[module]
        name = f"{type(module).__name__}_{number}_{tensor_index}th_output"
        return _inspected(tensor, name, states.module_index_to_depth[number], run_rtx, self)

    def _write(self, tensor: Tensor | None, depth: int, name: str, way: str, step: int) -> None:
        if not isinstance(tensor, Tensor):
            return
        folder = self._output_dir / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "order.txt").open("a", encoding="utf-8") as file:
            file.write(f"{name}_{way}\n")
        text = summary(f"{name} {way} run", tensor.detach(), depth, self._run_on_cpu, self._bucket_size)
        (folder / f"{name}_{way}").write_text(text, encoding="utf-8")


def summary(title: str, tensor: Tensor, depth: int = 0, run_on_cpu: bool = False, bucket_size: int = 2**29) -> str:
    """Statistics of a tensor, in seven lines. Moments in fp64; inf and NaN go into them as arithmetic takes them."""
    flat = tensor.reshape(-1)
    flat = flat.cpu() if run_on_cpu else flat
    n = flat.numel()
    nan = inf = negative = positive = zero = 0
    low, high, total, square = float("inf"), float("-inf"), 0.0, 0.0
    for part in flat.split(bucket_size):
        if part.is_complex():
            part = part.abs()
        nan += int(part.isnan().sum())
        inf += int(part.isinf().sum())
        negative += int((part < 0).sum())
        positive += int((part > 0).sum())
        zero += int((part == 0).sum())
        if part.numel():
            least, most = (float(x) for x in (part.min(), part.max()))
            low = least if least < low or least != least else low
            high = most if most > high or most != most else high
            total += float(part.sum(dtype=torch.float64))
    mean = total / n if n else float("nan")
    for part in flat.split(bucket_size):
        square += float(((part.abs() if part.is_complex() else part).double() - mean).square().sum())
    std = (square / (n - 1)) ** 0.5 if n > 1 else float("nan")
    if not n:
        low = high = float("nan")
    samples = ", ".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in flat[:_SAMPLES].tolist())
    return (
        f"{'>' * max(0, depth)}{title} shape: {tensor.shape} dtype: {tensor.dtype} size: {flat.size()} \n"
        f"min: {low:.9g} max: {high:.9g}, mean: {mean:.9g}, std: {std:.9g} \n"
        f"nan: {nan}, inf: {inf}\n"
        f"samples(top {_SAMPLES}): [{samples}]\n"
        f"neg: {negative}, pos: {positive}, zero: {zero},\n"
        f"{'=' * 16}\n"
    )


def _inspected(tensor: Tensor, name: str, depth: int, run: RuntimeStates, subscriber: StatisticsSubscriber) -> Tensor:
    return _Inspect.apply(tensor, name, depth, run, subscriber)  # type: ignore[no-untyped-call, no-any-return]


GlobalSubscriberManager = SubscriberManager()


def inspect_activation(activation_name: str, tensor: Tensor) -> Tensor:
    """In the code of a model: the tensor's statistics go to `<activation_name>_forward` and `_backward`.

    Raises RuntimeError when GlobalSubscriberManager has no StatisticsSubscriber.
    """
    run = GlobalSubscriberManager.get_run_context()
    for subscriber in GlobalSubscriberManager._subscribers:
        if isinstance(subscriber, StatisticsSubscriber):
            return _inspected(tensor, activation_name, -1, run, subscriber) if subscriber._active(run) else tensor
    raise RuntimeError("StatisticsSubscriber is not registered, cannot inspect activation.")
