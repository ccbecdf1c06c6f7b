"""What changes between steps takes effect: attributes, parameters, hooks, submodules, shapes, numbers; and what
costs no new capture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import MLP, Norm, close, pair, same_state, step
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


def changes() -> dict[str, Callable[[Any], None]]:
    def dropout_off(m: Any) -> None:
        m.drop.p = 0.0

    def attribute(m: Any) -> None:
        m.scale = 2.5

    def replace_parameter(m: Any) -> None:
        m.second.weight = nn.Parameter(m.second.weight.detach() * 0.5)

    def swap_data(m: Any) -> None:
        m.second.weight.data = m.second.weight.data * 0.5

    def ema(m: Any) -> None:
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(0.9)

    def replace_submodule(m: Any) -> None:
        m.second = nn.Sequential(nn.Linear(7, 11), nn.Tanh())
        for p in m.second.parameters():
            nn.init.constant_(p, 0.3)

    def bias_removed(m: Any) -> None:
        m.third.bias = None

    def hook(m: Any) -> None:
        m.second.register_forward_hook(lambda module, args, out: out * 3)

    def full_backward_hook(m: Any) -> None:
        m.second.register_full_backward_hook(lambda module, gi, go: tuple(g * 2 for g in gi))

    def freeze(m: Any) -> None:
        m.first.requires_grad_(False)

    def eval_child(m: Any) -> None:
        m.drop.eval()

    def parametrize(m: Any) -> None:
        class Double(nn.Module):
            def forward(self, w: Tensor) -> Tensor:
                return w * 2

        nn.utils.parametrize.register_parametrization(m.second, "weight", Double())

    return {f.__name__: f for f in (dropout_off, attribute, replace_parameter, swap_data, ema, replace_submodule, bias_removed, hook,
                                    full_backward_hook, freeze, eval_child, parametrize)}  # fmt: skip


@pytest.mark.parametrize("name", list(changes()))
def test_change_after_the_first_step_takes_effect(name):
    change = changes()[name]
    p = 0.5 if name in ("dropout_off", "eval_child") else 0.0
    eager = MLP(p)
    w = ORTModule(copy.deepcopy(eager))
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for model in (w, eager):
        step(model, x, grad)
        model.zero_grad()
        change(model)
    for _ in range(2):
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    report = w.report()
    assert not report.eager, str(report)
    assert report.n_captures == (1 if name in ("replace_parameter", "swap_data", "ema") else 2), str(report)


def test_frozen_batch_norm():
    w, eager = pair(Norm)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for frozen in (False, True, False):
        for model in (w, eager):
            model.bn.train(not frozen)
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)


def test_module_converted_to_another_dtype():
    w, eager = pair(MLP)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    step(w, x, grad), step(eager, x, grad)
    for model in (w, eager):
        model.zero_grad()
        model.float()
    out, other = step(w, x.float(), grad.float()), step(eager, x.float(), grad.float())
    assert out[0].dtype == torch.float32
    for a, b in zip(out, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_attribute_that_forward_does_not_read_costs_no_capture():
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    for i in range(20):
        w.step_number = i
        w.notes = [torch.randn(2)]
        close(w(x), eager(x))
    assert w.report().n_captures == 1


def test_forward_that_assigns_attributes():
    class Keeps(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    eager = Keeps()
    w = ORTModule(copy.deepcopy(eager))
    x = torch.randn(13, 5)
    for _ in range(5):
        close(w(x), eager(x))
    assert w.calls == eager.calls == 5
    assert "assigns" in str(w.report())


def test_forward_that_fills_a_cache_once():
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(3, dtype=x.dtype)
            return self.fc(x) * self.table

    eager = Caches()
    w = ORTModule(copy.deepcopy(eager))
    x, grad = torch.randn(7, 5), torch.randn(7, 3)
    for _ in range(4):
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    assert sum(e.calls for e in w.report().eager) == 1 and w.report().graphs[0].forwards == 3


# --- shapes and numbers ---------------------------------------------------------------------------


def test_new_shapes_cost_one_more_capture():
    w, eager = pair(MLP)
    for rows in (13, 7, 13, 29, 1, 2, 31):
        x, grad = torch.randn(rows, 5), torch.randn(rows, 3)
        for a, b in zip(step(w, x, grad), step(eager, x, grad), strict=True):
            close(a, b)
        same_state(w, eager)
    report = w.report()
    assert report.n_captures == 2 and not report.eager, str(report)


def test_numbers_as_arguments():
    class Scaled(MLP):
        def forward(self, x: Tensor, alpha: float, n: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) * alpha + n

    w, eager = pair(Scaled)
    x, grad = torch.randn(13, 5), torch.randn(13, 3)
    for alpha, n in ((0.5, 2), (0.5, 2), (0.25, 2), (0.125, 3), (0.3, 5), (0.7, 7)):
        for model in (w, eager):
            model.zero_grad()
            model(x, alpha, n).backward(grad)
        close(w(x, alpha, n), eager(x, alpha, n))
        same_state(w, eager)
    assert w.report().n_captures <= 3 and not w.report().eager, str(w.report())


def test_many_captures_say_why(caplog):
    """One warning, at the sixteenth capture, with the reasons."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.scale = 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    model = ORTModule(Scaled(), max_captures=99)
    with caplog.at_level("WARNING", "ortmodule"):
        for i in range(9):
            for grad in (True, False):
                model.scale = float(i)
                model(torch.randn(4, 3, requires_grad=grad))
    said = [r.getMessage() for r in caplog.records if "captured" in r.getMessage()]
    assert len(said) == 1 and "captured 16 times" in said[0] and "changed: scale" in said[0] and "requires_grad of arguments" in said[0], said
    model(torch.randn(5, 3))
    assert [g.why for g in model.report().graphs][-1] == "changed: sizes of arguments", str(model.report())
