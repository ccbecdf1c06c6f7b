"""Calls that go around the wrapper's forward: one that was assigned to it and calls submodules itself (TRL's trainers
call the backbone and compute the loss from its hidden states), and the steps of a LightningModule.

follow   The first call shows whether the wrapper's forward is reached. If it is not, the submodules stand in the engine
         during later calls: in the module's table of children each gives place to a wrapper of its own, over the same
         state. Before and after, and while the wrapper's own forward runs, the table is as the user made it.
tell     What reaches neither (a function that holds a submodule of its own, layers in a list) runs in PyTorch. The
         tenth such call says so once, report() always.

Children are direct submodules with a forward and with parameters that are trained: losses and metrics stay what they
are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import guard
from .state import State

if TYPE_CHECKING:
    from .report import EagerEntry

logger = logging.getLogger("ortmodule")

TOLD_AFTER = 10  # calls
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Way:
    """A function that stands before the wrapper's forward, or beside it."""

    def __init__(self, state: State, name: str, wrap: Callable[[nn.Module], Any]) -> None:
        self.state = state
        self.name = name
        self.wrap = wrap
        self.direct: bool | None = None  # does it reach the wrapper's forward?
        self.lost = 0  # calls that reached nothing

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.state
        if state.off is not None or state.settings.disable or state.children_away:
            return function(*args, **kwargs)
        before = _entered(state)
        with contextlib.nullcontext() if self.direct is not False else self._children():
            result = function(*args, **kwargs)
        found = _entered(state) != before
        if self.direct is None and torch.is_grad_enabled():
            self.direct = found
        if not found:
            self._lose()
        return result

    def _lose(self) -> None:
        self.lost += 1
        entry = self._entry()
        entry.calls += 1
        if self.lost == TOLD_AFTER:
            logger.warning("%s: of %d calls nothing has run in the engine: %s", type(self.state.module).__name__,
                           TOLD_AFTER, entry.reason)  # fmt: skip

    def _entry(self) -> EagerEntry:
        return self.state.eager_entry(
            f"{self.name} reaches neither the wrapper's forward nor, as its attributes, submodules with a forward"
        )

    @contextlib.contextmanager
    def _children(self) -> Iterator[None]:
        state = self.state
        table = state.module._modules
        if not state.children and torch.is_grad_enabled():  # a pass of a reference may have frozen all for a while
            state.children = {
                name: (child, self.wrap(child)) for name, child in table.items() if child is not None and fits(child)
            }
        with _placed(state, True):
            yield


def fits(child: nn.Module) -> bool:
    return (
        not isinstance(getattr(child, "_ortmodule", None), State)
        and type(child).forward is not nn.Module.forward
        and any(p.requires_grad for p in child.parameters())
        and guard.refuse(child) is None
        and guard.in_torchscript(child) is None
    )


@contextlib.contextmanager
def _placed(state: State, wrapped: bool) -> Iterator[None]:
    """The children's wrappers in their place, or the children."""
    table = state.module._modules
    before = state.children_away
    pairs = state.children or {}

    def put(wrapped: bool) -> None:
        for name, both in pairs.items():
            if table.get(name) is both[not wrapped]:  # else the user has assigned another one
                table[name] = both[wrapped]
        state.children_away = wrapped

    put(wrapped)
    try:
        yield
    finally:
        put(before)


def itself(state: State) -> contextlib.AbstractContextManager[None]:
    """While the wrapper's own forward runs."""
    state.entered += 1
    return _placed(state, False) if state.children_away else _nothing


_nothing = contextlib.nullcontext()


def _entered(state: State) -> int:
    return state.entered + sum(_entered(w._ortmodule) for _, w in (state.children or {}).values())


def states(state: State) -> Iterator[State]:
    """Of a wrapper and of those that its children have got, or its parts."""
    yield state
    for wrapper in (*[w for _, w in (state.children or {}).values()], *state.parts.values()):
        yield from states(wrapper._ortmodule)


def steps(cls: type) -> dict[str, Any]:
    """What a wrapper of a LightningModule has in the place of its steps."""
    if not any(c.__name__ == "LightningModule" for c in cls.__mro__):
        return {}
    found: dict[str, Any] = {}
    for name in _STEPS:
        original = getattr(cls, name, None)
        if original is not None:
            found[name] = _step(name, original)
    return found


def _step(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        way = self._ortmodule.way(name, f"{type(self).__name__}.{name}")
        return way.run(functools.partial(original, self), args, kwargs)

    return step


def around(state: State, function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that was assigned to the wrapper, as nn.Module.__call__ calls it."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    way = state.way("forward", f"the forward that was assigned to the wrapper{place}")
    return lambda *args, **kwargs: way.run(function, args, kwargs)
