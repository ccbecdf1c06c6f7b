"""What a trace took for granted of the arguments besides sizes: asked again at every call, of what was asked alone.

layout      forward branches on strides, reshapes what it edits or returns, or makes a view that other strides forbid
own_layouts forward looks into the memory of a parameter or buffer, in the order that it has
formats     an image or volume is returned: which arguments are channels_last, as eager's result may be
answers     what a method of an argument (is_contiguous, stride, storage_offset) has said to forward
attributes  Python attributes of arguments that forward looks for, and what was found
classes     forward asks whether an argument is an nn.Parameter
pattern     which arguments are one object, or are parameters or buffers of the module: where forward can tell (`is`,
            keys of a dictionary), or where they were at the capture
apart       what forward edits in place shares no memory with another argument, with the module's tensors, or within
            itself (expand, unfold): at the capture; state.GuardedGraph asks at later calls

A Facts is filled by the trace on its stand-ins; `freeze` then reads the real tensors. A capture that asks nothing has
no tests: None takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..errors import CaptureError

ABSENT: Any = object()
Test = Callable[[Sequence[Tensor], "Known"], bool]


class Known:
    """The tensors of a module at one moment, looked up by object and by memory when they are asked for."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ids: dict[int, str] | None = None

    def layouts(self) -> list[tuple[str, Hashable]]:
        return [(name, layout(t)) for name, t in self.named()]

    def named(self) -> list[tuple[str, Tensor]]:
        return [*self._module.named_parameters(remove_duplicate=False),
                *self._module.named_buffers(remove_duplicate=False)]

    def name(self, t: Tensor) -> str | None:
        """Of the parameter or buffer that t is."""
        if self._ids is None:
            self._ids = {id(x): name for name, x in reversed(self.named())}
        return self._ids.get(id(t))


def layout(t: Tensor) -> Hashable:
    """The kind of a tensor's strides, whatever its sizes: which order they have, and which neighbours can be one
    dimension. Equal kinds allow the same views, and results that follow them have equal kinds, too."""
    if t.layout is not torch.strided or t.is_contiguous():
        return True
    sizes, strides = t.shape, t.stride()
    wide = [d for d in range(t.dim()) if sizes[d] != 1]
    order = tuple(sorted(wide, key=lambda d: -strides[d]))
    merges = tuple([strides[d] == sizes[e] * strides[e] for of in (wide, order)
                    for d, e in zip(of, of[1:])])  # fmt: skip
    return order, merges, tuple([strides[d] == 0 for d in wide]), 1 in strides


def format_of(t: Tensor) -> torch.memory_format | None:
    """channels_last, channels_last_3d, or None for any other order."""
    kind = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    if kind is None or t.layout is not torch.strided or t.is_contiguous():
        return None
    return kind if t.is_contiguous(memory_format=kind) else None


def pattern(tensors: Sequence[Tensor], known: Known) -> tuple[Hashable, ...]:
    """Of each: the first that is the same object, or the name of the parameter or buffer that it is."""
    first: dict[int, int] = {}
    return tuple([known.name(t) or first.setdefault(id(t), i) for i, t in enumerate(tensors)])


class Facts:
    """See the file's head. Leaves are numbers of tensor arguments."""

    def __init__(self) -> None:
        self.layouts: set[int] = set()
        self.own_layouts = False
        self.formats: set[int] = set()
        self.by_layout = False  # something was not copied because of its layout (contiguous)
        # operands that contiguous() has not copied, for some sizes: functional.py looks whether anybody can tell
        self.uncopied: list[Tensor] = []
        self.looks = False  # forward asks for the layout of a tensor that it has made
        self.offsets: set[int] = set()
        self.answers: dict[tuple[int, Any, str], tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
        self.attributes: dict[tuple[int, str], Any] = {}
        self.bare = False  # forward may look into the __dict__ of any
        self.classes = False
        self.identity = False
        self.edited: set[int] = set()
        self.edited_names: set[str] = set()

    def freeze(self, tensors: Sequence[Tensor], module: nn.Module) -> list[Test] | None:
        """The tests for later calls. tensors: the arguments of this one. Raises CaptureError where the trace was told
        something else."""
        known, tests = Known(module), []  # type: tuple[Known, list[Test]]
        plain = [i for i in sorted(self.layouts) if layout(tensors[i]) is True]
        if plain:
            tests.append(lambda given, _: all([given[i].is_contiguous() for i in plain]))
        for i in sorted(self.layouts.difference(plain)):
            tests.append(_of_leaf(i, layout, layout(tensors[i])))
        if self.own_layouts:
            own = known.layouts()
            tests.append(lambda _, known: known.layouts() == own)
        for i in sorted(self.formats - self.layouts):
            tests.append(_of_leaf(i, format_of, format_of(tensors[i])))
        for i in sorted(self.offsets):
            tests.append(_of_leaf(i, Tensor.storage_offset, tensors[i].storage_offset()))
        for (i, ask, _), (args, kwargs, told) in self.answers.items():
            answer = ask(tensors[i], *args, **kwargs)
            if isinstance(told, (bool, int)) and told != answer:
                raise CaptureError(f"forward asks {ask.__name__} of an argument, which a trace answers otherwise")
            tests.append(_of_leaf(i, _asks(ask, args, kwargs), answer))
        for (i, name), value in self.attributes.items():
            tests.append(_of_leaf(i, _reads(name), value))
        if self.bare:
            if any(map(vars, tensors)):
                raise CaptureError("forward looks into a __dict__, and an argument has attributes")
            tests.append(lambda given, _: not any([vars(t) for t in given]))
        if self.classes:
            if any(isinstance(t, nn.Parameter) for t in tensors):
                raise CaptureError("forward asks whether an argument is an nn.Parameter, and one is")
            tests.append(lambda given, _: not any([isinstance(t, nn.Parameter) for t in given]))
        now = pattern(tensors, known)
        if self.identity or now != tuple(range(len(tensors))):
            tests.append(_pattern(now))
        if (self.edited or self.edited_names) and not self._apart(tensors, known, now):
            raise CaptureError(
                "forward edits a tensor in place that shares its memory with another one or within itself"
            )
        return tests or None

    def _apart(self, tensors: Sequence[Tensor], known: Known, same: tuple[Hashable, ...]) -> bool:
        named, n = known.named(), len(tensors)
        objects = [*same, *[known.name(t) for _, t in named]]
        written = [*self.edited, *[n + i for i, (name, _) in enumerate(named) if name in self.edited_names]]
        pairs = _C.overlaps_written([*tensors, *[t for _, t in named]], tuple(written))
        return not any(i == j or i < n and objects[i] != objects[j] for i, j in pairs)


def hold(tests: list[Test], tensors: Sequence[Tensor], known: Known) -> bool:
    """Is all of that so for these arguments?"""
    return all([test(tensors, known) for test in tests])


def _asks(ask: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
    return lambda t: ask(t, *args, **kwargs)


def _reads(name: str) -> Callable[[Tensor], Any]:
    return lambda t: vars(t).get(name, ABSENT)


def _of_leaf(i: int, ask: Callable[[Tensor], Any], answer: Any) -> Test:
    def test(tensors: Sequence[Tensor], _: Known) -> bool:
        now = ask(tensors[i])
        return now is answer or type(now) is type(answer) and bool(now == answer)

    return test


def _pattern(wanted: tuple[Hashable, ...]) -> Test:
    return lambda tensors, known: pattern(tensors, known) == wanted
