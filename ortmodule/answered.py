"""What submodules that stay in PyTorch have answered in a call that begins again.

The engine may turn a call down when such submodules have run: one of them returns other sizes than at the capture, an
index is out of range, memory is short. PyTorch computes the call from its beginning, but what those submodules have
done (statistics, counters, random numbers) is done. So each of them gives its answers of before, in turn, and does not
run: host.noting has put them into the Failed, and `again` is around PyTorch's run.

An answer's autograd graph ends at copies of the arguments that the submodule was given (host.py), or goes on through
those themselves (cuts.py). `_Tied` ties copies to the arguments of now.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import torch_private as private
from .capture.opaque import results_of, tensors_of
from .host import Answer, hooks_at_rest
from .torch_private import CALL


class _Tied(torch.autograd.Function):
    """An answer whose graph ends at `leaves`, as one of `now`, which takes their place."""

    @staticmethod
    def forward(ctx: Any, outs: Sequence[Tensor], leaves: Sequence[Tensor], *now: Tensor) -> tuple[Tensor, ...]:
        ctx.outs, ctx.leaves = outs, leaves
        ctx.set_materialize_grads(False)
        made = tuple([t.detach() for t in outs])
        ctx.mark_non_differentiable(*[t for t, out in zip(made, outs, strict=True) if not out.requires_grad])
        return made

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [(t, g) for t, g in zip(ctx.outs, grads, strict=True) if g is not None and t.requires_grad]
        outs, incoming = [t for t, _ in given], [g for _, g in given]
        with hooks_at_rest(ctx.leaves):  # of parameters: run where the gradient arrives
            found = torch.autograd.grad(outs, ctx.leaves, incoming, allow_unused=True, retain_graph=True)
        return (None, None, *found)


def _tied(answer: Answer, given: Sequence[Tensor]) -> Any:
    outs, rebuild = results_of(answer.result)
    now = [*given, *answer.leaves[len(given) :]]
    trained = [(leaf, t) for leaf, t in zip(answer.leaves, now, strict=True) if leaf.requires_grad]
    if not trained or not any(t.requires_grad for t in outs):
        return answer.result
    return rebuild(_Tied.apply(outs, [leaf for leaf, _ in trained], *[t for _, t in trained]))


def _call(module: nn.Module, own: Callable[..., Any], answers: deque[Answer], thread: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not answers or threading.get_ident() != thread:
            return own(*args, **kwargs)
        if not answers[0].leaves:
            return answers.popleft().result
        given, _ = tensors_of(args, kwargs, True)
        if len(given) + len([*module.parameters()]) != len(answers[0].leaves):
            return own(*args, **kwargs)  # another call than that
        return _tied(answers.popleft(), given)

    return call


@contextlib.contextmanager
def again(answers: Sequence[Answer]) -> Iterator[None]:
    """In this block the modules give these answers, to this thread. Called once more they run."""
    turns: dict[int, deque[Answer]] = {}
    for answer in answers:
        turns.setdefault(id(answer.module), deque()).append(answer)
    before = [(of[0].module.__dict__, of[0].module.__dict__.get(CALL)) for of in turns.values()]
    try:
        for of, (own, call) in zip(turns.values(), before, strict=True):
            module = of[0].module
            own[CALL] = _call(module, call or functools.partial(private.call_impl, module), of, threading.get_ident())
        yield
    finally:
        for own, call in before:
            if call is None:
                own.pop(CALL, None)
            else:
                own[CALL] = call
