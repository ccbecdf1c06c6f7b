"""Modes and random numbers: train, eval, no_grad, inference, autocast, dropout and its seed."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import MLP, Norm, close, pair, same_state
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


def test_train_eval_no_grad_inference():
    w, eager = pair(lambda: nn.Sequential(Norm(), MLPTail()))
    x = torch.randn(13, 5)
    for mode in ("train", "eval", "train", "eval"):
        for model in (w, eager):
            getattr(model, mode)()
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                a, b = w(x), eager(x)
                assert a.requires_grad == b.requires_grad and a.is_inference() == b.is_inference()
                close(a, b)
    same_state(w, eager)
    assert w.report().n_captures == 6  # every combination once


class MLPTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(x))


def test_dropout_follows_the_seed():
    w, _ = pair(lambda: MLP(0.5))
    x = torch.randn(101, 5)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        w.zero_grad()
        out = w(x)
        out.sum().backward()
        return [out.detach(), *[p.grad.clone() for p in w.parameters()]]

    a, b, c = run(3), run(3), run(4)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])
    torch.manual_seed(3)
    assert not torch.equal(w(x), w(x))


def test_no_random_numbers_are_drawn_without_random_nodes():
    w, _ = pair(MLP)
    w(torch.randn(13, 5))
    before = torch.get_rng_state()
    w(torch.randn(1).expand(13, 5)) if False else w(torch.ones(13, 5)).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_capture_leaves_random_state_alone():
    w, _ = pair(lambda: MLP(0.5))
    torch.manual_seed(5)
    w.eval()
    w(torch.ones(13, 5))
    a = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(a, torch.rand(()))


def test_dropout_gradient_belongs_to_its_mask():
    """out = drop(x): the gradient must be nonzero exactly where the output is."""
    w = ORTModule(nn.Sequential(nn.Dropout(0.4)), strict=True)
    x = (torch.rand(101, 7) + 1).requires_grad_()
    out = w(x)
    grad = torch.randn(101, 7)
    out.backward(grad)
    keep = out != 0
    close(out, torch.where(keep, x / 0.6, 0.0))
    close(x.grad, torch.where(keep, grad / 0.6, 0.0))
    assert 0.5 < keep.double().mean() < 0.7


def test_autocast_on_and_off():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        eager = MLP()
        w = ORTModule(copy.deepcopy(eager))
        x, grad = torch.randn(13, 5), torch.randn(13, 3)
        for on in (True, False, True):
            results = []
            for model in (w, eager):
                model.zero_grad()
                with torch.autocast("cpu", enabled=on):
                    out = model(x)
                out.backward(grad.to(out.dtype))
                results.append([out.detach(), *[p.grad for p in model.parameters()]])
            for a, b in zip(*results, strict=True):
                assert a.dtype == b.dtype
                assert torch.allclose(a.float(), b.float(), rtol=3e-2 if on else 1e-5, atol=3e-2 if on else 1e-6)
    finally:
        torch.set_default_dtype(before)


class Steps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        self.steps = self.steps + 1
        return self.fc(x)


def test_a_buffer_that_a_transform_has_left_behind():
    """What forward assigned within torch.func.jvp is a tensor of that transform, also when it has ended."""
    model = ORTModule(Steps())
    x = torch.randn(5, 4)
    model(x).sum().backward()
    torch.func.jvp(model, (x,), (x,))
    out = model(x)
    assert int(model.steps) == 3 and torch.equal(out, torch.nn.functional.linear(x, model.fc.weight, model.fc.bias))
    assert any("torch.func" in e.reason for e in model.report().eager)
    model.steps = torch.tensor(10)
    before = sum(g.forwards for g in model.report().graphs)
    model(x).sum().backward()
    assert model.steps == 11 and sum(g.forwards for g in model.report().graphs) == before + 1
