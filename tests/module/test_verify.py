"""model.verify(batch): a right engine is found right on many kinds of models; one with a wrong gradient, or a wrong pass, is
found wrong at the module where it is (build/sabotage.so in a process of its own); and the model is left as it was."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import MODELS
from torch import Tensor, nn
from verified import Net, batch, made

from engine import ROOT
from ortmodule import ORTModule

# --- what is right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_right_models_are_found_right(name: str) -> None:
    make, given = MODELS[name]
    v = made(make).verify(given)
    assert v and v.ok and not v.differences and v.module is None and v.compared > 20, str(v)
    assert "all within the error band" in str(v)


@pytest.mark.parametrize("band", [0, -1.0, float("nan"), float("inf"), "2", None])
def test_a_band_that_is_none(band: Any) -> None:
    """Less than PyTorch's own error, or everything."""
    with pytest.raises(ValueError, match=rf"verify\(band={band!r}\): how many times .*; give a number above 0"):
        ORTModule(nn.Linear(3, 4)).verify(torch.randn(2, 3), band=band)


@pytest.mark.parametrize("kind", ["f64", "bf16", "autocast", "eval", "loss", "frozen"])
def test_in_other_precisions_and_modes(kind: str) -> None:
    model, x = made(), batch()
    loss: Callable[[Any], Tensor] | None = None
    if kind == "f64":
        model, x = model.double(), x.double()
    if kind == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    if kind == "eval":
        model.eval()
    if kind == "loss":
        loss = lambda out: F.cross_entropy(out[0], torch.arange(9) % 3)  # noqa: E731
    if kind == "frozen":
        model.blocks.requires_grad_(False)
        x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        v = model.verify(x, loss)
    assert v.ok and v.compared >= 20, str(v)


def test_what_stays_in_pytorch_is_said() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(np.mean(x.detach().numpy()))

    v = ORTModule(Odd(12, 12)).verify(batch())
    assert any("ran in PyTorch, not in the engine" in text for text in v.notes), str(v)


def test_random_modules_are_compared_in_eval_mode() -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(F.rrelu(x, training=self.training))

    v = made(Noisy).verify(batch())
    assert v.ok and any("random beside dropout" in text for text in v.notes), str(v)


# --- what is wrong ---------------------------------------------------------------------------------------------

CHILD = f"""
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("ortmodule._C", {str(ROOT / 'build' / 'sabotage.so')!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("ortmodule._C", loader))
sys.modules["ortmodule._C"] = module
loader.exec_module(module)
sys.path.insert(0, {str(ROOT / 'tests')!r})
import verified
v = verified.made().verify(verified.batch())
print(repr((v.ok, v.module, v.kind)))
print(v)
"""


@pytest.mark.parametrize(
    ("sabotage", "module", "kind", "what"),
    [
        ("gelu", "blocks.2.act", "GELU", "gradient of input 0"),  # its gradient, everywhere
        ("tanh", "blocks.0.act", "Tanh", "gradient of input 0"),
        ("pass.patterns", "blocks.1.act", "Swish", "output 0"),  # silu spelled out becomes one operator, wrongly
        ("layer_norm", "blocks.0.norm", "LayerNorm", "gradient of "),
        ("pass.bias", "blocks.0.lin", "Linear", "output 0"),
        ("", None, "", ""),
    ],
)
def test_the_first_wrong_module_is_named(sabotage: str, module: str | None, kind: str, what: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, "OM_SABOTAGE": sabotage}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, _, text = done.stdout.partition("\n")
    assert told == repr((module is None, module, kind)), done.stdout
    if module is not None:
        assert f"first wrong in submodule {module!r} ({kind})" in text and what in text.splitlines()[2], text


# --- what is left alone ----------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model, x = made(), batch().requires_grad_()
    model.drop.eval()
    called: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: called.append(1))
    model.head.weight.register_hook(lambda g: called.append(2))
    model.register_forward_hook(lambda *_: called.append(3))
    model(x)[0].sum().backward()
    model.anything = {"a": [1, 2]}
    called.clear()

    def state() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers(), x]
        return [
            [(id(t), t._version, t.data_ptr(), t.detach().clone()) for t in tensors],
            [(id(t.grad), t.grad._version, t.grad.clone()) if t.grad is not None else None for t in tensors],
            [(n, m.training, list(m._forward_hooks.items()), sorted(m.__dict__)) for n, m in model.named_modules()],
            torch.get_rng_state(), random.getstate(), [np.array(p) for p in np.random.get_state()[1:2]],
            [len(model._ortmodule.every), model.report().graphs[0].forwards, model.anything, torch.is_grad_enabled()],
        ]  # fmt: skip

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return torch.equal(a, b)
        if isinstance(a, np.ndarray):
            return bool((a == b).all())
        return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b

    before = state()
    v = model.verify(x)
    after = state()
    assert v.ok and not called, str(v)
    for i, (a, b) in enumerate(zip(before, after)):
        assert same(a, b), i
    # and an error changes nothing either
    with pytest.raises(RuntimeError), torch.no_grad():
        model.verify(torch.zeros(9, 13))
    assert all(map(same, before[:7], state()[:7])) and not called


def test_the_next_step_is_what_it_would_have_been() -> None:
    results = []
    for verified in (False, True):
        model = made()
        if verified:
            model.verify(batch())
        for _ in range(3):
            model.zero_grad()
            model(batch())[0].square().sum().backward()
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(map(torch.equal, *results))
