"""What save_for_device makes of modes and of hooks: each submodule trains in the mode that it has; hooks, which no device
can run, are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_models import trainer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ortmodule import ORTModule
from ortmodule.errors import CaptureError
from ortmodule.optim import step_in_backward


class Net(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.i, self.norm, self.drop, self.o = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(p), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.o(self.drop(self.norm(self.i(x)))), labels)


def batch(k: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    return torch.randn(5, 6, generator=g), torch.randint(4, (5,), generator=g)


def saved(net: nn.Module, folder: Path, optimizer: Any = 2) -> None:
    ORTModule(net).save_for_device(folder, batch(), optimizer=optimizer)


@pytest.mark.parametrize("frozen", [("norm", "drop"), ("drop",)])
def test_submodules_in_eval_mode_stay_so(frozen: tuple[str, ...], tmp_path: Path) -> None:
    """A frozen BatchNorm goes on with its statistics, dropout that is off is off; evaluation evaluates everything."""
    torch.manual_seed(0)
    net = Net()
    net(*batch(9))  # statistics of some batch
    for name in frozen:
        net.get_submodule(name).eval()
    eager, modes = copy.deepcopy(net), [m.training for m in net.modules()]
    step = torch.optim.SGD(eager.parameters(), 0.1)
    saved(net, tmp_path, torch.optim.SGD(net.parameters(), 0.1))
    assert [m.training for m in net.modules()] == modes
    state, device, update = trainer(tmp_path)
    for k in range(4):
        step.zero_grad()
        loss = eager(*batch(k))
        loss.backward()
        step.step()
        np.testing.assert_allclose(device(*(t.numpy() for t in batch(k))), loss.item(), rtol=1e-5)
        update.step()
        device.lazy_reset_grad()
    for name in ("norm.running_mean", "norm.weight"):
        np.testing.assert_allclose(state.parameters[name].data, eager.state_dict()[name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        want = eager.eval()(*batch(7)).item()
    np.testing.assert_allclose(device.eval()(*(t.numpy() for t in batch(7))), want, rtol=1e-5)


def test_a_module_in_eval_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Net is in evaluation mode, so there is nothing to train: call model.train\(\) first"):
        saved(Net().eval(), tmp_path / "x")
    assert not (tmp_path / "x").exists()


class Counts(Net):
    def __init__(self, always: bool) -> None:
        super().__init__(0.0)
        self.always = always
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.always or self.training:
            self.calls += 1
        return super().forward(x, labels)


def test_buffers_written_in_evaluation_are_refused(tmp_path: Path) -> None:
    """Evaluation on a device leaves everything as it was, as its trainer says when it is loaded."""
    with pytest.raises(CaptureError, match="in evaluation mode forward writes 'calls'.* if self.training"):
        saved(Counts(True), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    saved(Counts(False), tmp_path)
    state, device, _ = trainer(tmp_path)
    for mode in (True, False, True):
        device.train(mode)(*(t.numpy() for t in batch()))
    assert state.parameters["calls"].data == 2


HOOKS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "forward pre-hook": (lambda n: n.register_forward_pre_hook(lambda m, a: (a[0] * 5, a[1])), "Net has hooks"),
    "forward hook": (lambda n: n.register_forward_hook(lambda m, a, out: out * 3), "Net has hooks"),
    "backward pre-hook": (lambda n: n.register_full_backward_pre_hook(lambda m, g: (g[0] * 0,)), "Net has hooks"),
    "backward hook": (lambda n: n.register_full_backward_hook(lambda *a: None), "Net has hooks"),
    "submodule": (lambda n: n.i.register_forward_hook(lambda m, a, out: out * 3), "submodule 'i' has hooks"),
    "gradient": (lambda n: n.i.weight.register_hook(lambda g: g * 0), "parameter 'i.weight' has a hook on its gradient .register_hook"),
    "after the gradient": (lambda n: n.o.bias.register_post_accumulate_grad_hook(lambda p: None),
                           "parameter 'o.bias' has a hook on its gradient .*register_post_accumulate_grad_hook"),
    "every module": (lambda n: torch.nn.modules.module.register_module_forward_hook(lambda m, a, out: None), "hooks for all modules"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_refused(kind: str, tmp_path: Path) -> None:
    register, words = HOOKS[kind]
    net = Net()
    handle = register(net)
    try:
        with pytest.raises(CaptureError, match=f"save_for_device: .*{words}"):
            saved(net, tmp_path / "x")
    finally:
        handle.remove()
    assert not (tmp_path / "x").exists()
    saved(net, tmp_path)


STEP_HOOKS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "before": lambda o: o.register_step_pre_hook(lambda *a: None),
    "after": lambda o: o.register_step_post_hook(lambda *a: None),
    "before all": lambda o: register_optimizer_step_pre_hook(lambda *a: None),
    "after all": lambda o: register_optimizer_step_post_hook(lambda *a: None),
}


@pytest.mark.parametrize("kind", STEP_HOOKS)
def test_hooks_around_steps_are_refused(kind: str, tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handle = STEP_HOOKS[kind](optimizer)
    try:
        with pytest.raises(ValueError, match="optimizer: hooks run around its steps, .*remove them"):
            saved(net, tmp_path / "x", optimizer)
    finally:
        handle.remove()
    assert not (tmp_path / "x").exists()
    saved(net, tmp_path, optimizer)


def test_steps_in_backward_are_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handle = step_in_backward(optimizer)
    with pytest.raises(CaptureError, match="parameter 'i.weight' has a hook .*optim.step_in_backward"):
        saved(net, tmp_path / "x", optimizer)
    handle.remove()
    saved(net, tmp_path, optimizer)
