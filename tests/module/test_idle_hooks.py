"""A hook that asks for the gradient of what a trained embedding returns (Hugging Face puts one there for gradient
checkpointing) does nothing: no cut, and no first call in PyTorch. Any other hook does something."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule, guard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down, self.drop = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 3), nn.Dropout(0.2)

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.up(x)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(checkpoint(self.inner, self.tokens(ids), use_reentrant=False))


def build(hook: Callable[..., object] | None, frozen: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model()
    model.tokens.weight.requires_grad_(not frozen)
    if hook is not None:
        model.tokens.register_forward_hook(hook)
    return model


def theirs() -> Callable[..., object]:
    def make_inputs_require_grads(module, input, output):  # as in transformers: a function within another
        output.requires_grad_(True)

    return make_inputs_require_grads


IDS = torch.arange(22).view(2, 11) % 11


def losses(model: nn.Module, dropout: bool = True, steps: int = 3) -> list[float]:
    model.train(dropout)
    torch.manual_seed(5)
    opt, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), []
    for _ in range(steps):
        loss = model(IDS).pow(2).mean()
        loss.backward()
        opt.step(), opt.zero_grad()
        found.append(loss.item())
    return found


def test_the_first_call_is_the_engines() -> None:
    """With dropout: the numbers of the run without the hook, from the first call on."""
    hooked, plain = ORTModule(build(theirs())), ORTModule(build(None))
    assert losses(hooked) == losses(plain)
    assert [g.cuts for g in hooked.report().graphs] == [[]] and hooked.report().graphs[0].forwards == 3
    eager = build(theirs())
    assert losses(eager, False) == pytest.approx(losses(ORTModule(build(theirs())), False), rel=1e-6)


def test_what_is_not_idle() -> None:
    class Doubled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).detach()

    def no(module, input, output):
        output.requires_grad_(False)

    def more(module, input, output):
        output.requires_grad_(True)
        output.mul_(2)

    def others(module, input, output):
        module.requires_grad_(True)

    embedding = nn.Embedding(3, 2)
    assert guard.idle(theirs(), embedding)
    for hook in (no, more, others, lambda m, i, o: o * 2, print, None):
        assert not guard.idle(hook, embedding)
    assert not guard.idle(theirs(), Doubled(3, 2)) and not guard.idle(theirs(), nn.Linear(2, 2))
    assert not guard.idle(theirs(), nn.Embedding(3, 2).requires_grad_(False))
    with torch.no_grad():
        assert not guard.idle(theirs(), embedding)


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_between_steps(reentrant: bool) -> None:
    """A frozen embedding's result gets its gradient by the hook alone: checkpoints of the old kind need it."""

    class Old(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return self.down(checkpoint(self.inner, self.tokens(ids), use_reentrant=reentrant))

    torch.manual_seed(0)
    eager = Old().double()  # numbers near 0 are compared
    eager.tokens.register_forward_hook(theirs())
    ours = ORTModule(copy.deepcopy(eager))
    for frozen in (False, True, False):
        for model in (eager, ours):
            model.tokens.weight.requires_grad_(not frozen)
        assert losses(eager, False) == pytest.approx(losses(ours, False), rel=1e-6)
        with torch.no_grad():
            assert torch.allclose(eager(IDS), ours(IDS))


def test_another_hook_beside_it_still_runs() -> None:
    seen: list[tuple[int, ...]] = []
    model = build(theirs())
    model.tokens.register_forward_hook(lambda m, i, o: seen.append(tuple(o.shape)))
    losses(ORTModule(model))
    assert seen == [(2, 11, 8)] * 3
