"""Members and habits of ORTModule 1.19.2 that no other test shows: docs/COMPATIBILITY.md names them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from ortmodule import ORTModule

ROOT = Path(__file__).parents[2]


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for name in ("second", "third"):
            if name in self._modules:
                x = torch.tanh(self._modules[name](x))
        return x * getattr(self, "scale", 1.0) + getattr(self, "bias", 0.0)


def alike(model: ORTModule, eager: nn.Module, *args: Tensor) -> None:
    for m in (model, eager):
        m.zero_grad()
        m(*args).square().sum().backward()
    assert list(model.state_dict()) == list(eager.state_dict())
    for (name, p), (_, q) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-12), name


def test_importing_replaces_nothing_of_pytorch():
    code = (
        "import random, torch, torch.utils.checkpoint as c\n"
        "before = torch.manual_seed, torch.cuda.manual_seed, c.checkpoint, torch.use_deterministic_algorithms\n"
        "state = torch.get_rng_state(), random.getstate()\n"
        "import ortmodule.compat\n"
        "from onnxruntime.training.ortmodule import ORTModule, DebugOptions\n"
        "from onnxruntime.training.utils.hooks import GlobalSubscriberManager\n"
        "assert before == (torch.manual_seed, torch.cuda.manual_seed, c.checkpoint, torch.use_deterministic_algorithms)\n"
        "assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


def test_nothing_is_captured_before_the_first_call():
    model = ORTModule(Grows())
    assert model.report().n_captures == 0 and not model.report().eager
    model(torch.randn(2, 3))
    assert model.report().n_captures == 1


def test_modules_parameters_and_buffers_may_be_added():
    torch.manual_seed(0)
    eager = Grows().double()
    model = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 3, dtype=torch.float64)
    alike(model, eager, x)
    added = nn.Linear(3, 3).double()
    for m in (model, eager):
        m.add_module("second", copy.deepcopy(added))
    alike(model, eager, x)
    for m in (model, eager):
        m.register_parameter("scale", nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)))
        m.register_buffer("bias", torch.ones(3, dtype=torch.float64))
    alike(model, eager, x)
    assert model.get_parameter("scale") is model.module.scale and model.get_buffer("bias") is model.module.bias
    model.third = copy.deepcopy(added)
    eager.third = copy.deepcopy(added)
    alike(model, eager, x)
    assert [n for n, _ in model.named_children()] == ["first", "second", "third"] and not model.report().eager


def test_arguments_that_are_not_used():
    torch.manual_seed(0)
    eager = Grows().double()
    model = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 3, dtype=torch.float64)
    unused = torch.randn(4, requires_grad=True)
    alike(model, eager, x, unused)
    assert unused.grad is None and not model.report().eager


class Cannot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if float(x.detach().sum()) > -1e9 else x


def test_a_capture_that_fails_prints_nothing(capfd):
    model = ORTModule(Cannot())
    model(torch.randn(2, 3))
    captured = capfd.readouterr()
    told = [line for line in (captured.out + captured.err).splitlines() if "runs in PyTorch" not in line]
    assert told == [] and model.report().eager


def test_methods_and_modes_reach_the_module():
    model = ORTModule(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert model.eval() is model and not any(m.training for m in model.module.modules())
    assert model.train() is model and all(m.training for m in model.module.modules())
    assert model.double() is model and all(p.dtype is torch.float64 for p in model.module.parameters())
    seen: list[str] = []
    assert model.apply(lambda m: seen.append(type(m).__name__)) is model and len(seen) == 3
    state = {k: v + 1 for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(v, state[k]) for k, v in model.module.state_dict().items())
