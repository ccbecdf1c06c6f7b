"""HierarchicalORTModule on the kinds of models onnxruntime-training tests it with, and load_from_json, key by key.

There a submodule that cannot be exported stays outside and its children are wrapped one by one; here all is one graph, and
what cannot be in it is named. Judge: eager.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ortmodule
from ortmodule import ORTModule
from ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule
from ortmodule.experimental.json_config import load_from_json

pytestmark = pytest.mark.usefixtures("seeded")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner = nn.Linear(4, 4), Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(checkpoint(self.inner, x, use_reentrant=True))


class Numpy(nn.Module):
    """Not to be traced: its arithmetic leaves torch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + float(x.detach().numpy().mean())


class Sequence(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.9))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, order: str = "there") -> Tensor:
        for layer in self.layers if order == "there" else reversed(self.layers):
            x = layer(x)
        return self.alpha * x


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Sequence(Checkpointed(), Plain()), Sequence(Plain(), Numpy())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


class Iterated(nn.Module):
    """A submodule several times in a step, and one by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.other = Plain(), Plain()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.step(x)
        return self.other.fc.forward(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], bool]] = {  # another call's second argument, something in PyTorch
    "checkpoint": (lambda: Sequence(Plain(), Checkpointed(), Plain()), (), False),
    "text": (lambda: Sequence(Plain(), Checkpointed()), ("back",), False),
    "lists": (lambda: Sequence(Sequence(Plain(), Checkpointed()), Sequence(Plain(), Plain())), (), False),
    "results": (TwoResults, (), True),
    "iterated": (Iterated, (), False),
    "numpy": (lambda: Sequence(Plain(), Numpy(), Plain()), (), True)}  # fmt: skip


@pytest.mark.parametrize("wrap", [HierarchicalORTModule, ORTModule])
@pytest.mark.parametrize("name", list(MODELS))
def test_hierarchical(name: str, wrap: Any) -> None:
    make, more, outside = MODELS[name]
    eager = make()
    model = wrap(copy.deepcopy(eager))
    for k in range(4):
        x = torch.randn(3 + k // 2, 4)
        found = []
        for m in (model, eager):
            m.zero_grad()
            given = x.clone().requires_grad_()
            out = m(given, *(more if k % 2 else ()))
            sum(y.square().sum() for y in (out if isinstance(out, tuple) else (out,))).backward()
            found.append([given.grad, *[p.grad for p in m.parameters()]])
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    report = model.report()
    assert not report.eager, str(report)
    assert bool([h for h in report.host if h.kind == "module"]) == outside, str(report)


# --- JSON


def loaded(tmp_path: Path, *datas: dict[str, Any]) -> Any:
    model = ORTModule(nn.Linear(3, 2))
    for i, data in enumerate(datas):
        (tmp_path / f"{i}.json").write_text(json.dumps(data))
        load_from_json(model, tmp_path / f"{i}.json")
    return model


CAST = {"Strategy": "INSERT_AND_REDUCE", "Level": 5, "Allow": ["XYZ", "PQR"]}
IDLE: list[tuple[str, Any, Any, type]] = [  # key, a value, a wrong value, its error
    ("PropagateCastOps", CAST, {"Level": "5"}, AssertionError), ("PropagateCastOps", {}, {"Other": 1}, KeyError),
    ("UseExternalGPUAllocator", True, "yes", AssertionError), ("EnableCustomAutogradFunction", False, 0, AssertionError),
    ("EnableGradAccOptimization", False, None, AssertionError), ("UseStaticShape", False, 2, AssertionError),
    ("RunSymbolicShapeInference", True, [], AssertionError), ("UseMemoryEfficientGradient", True, "", AssertionError),
    ("SkipCheck", ["SKIP_CHECK_DEVICE", "SKIP_CHECK_EXECUTION_AGENT"], ["SKIP"], KeyError), ("OnnxOpsetVersion", 12, 12.0, AssertionError)]  # fmt: skip


@pytest.mark.parametrize("key, value, wrong, error", IDLE)
def test_json_keys_of_parts_that_are_not_here(key: str, value: Any, wrong: Any, error: type, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ortmodule"):
        model = loaded(tmp_path, {key: value})
    assert [r.getMessage() for r in caplog.records if f"without effect here: {key}" in r.getMessage()]
    model(torch.randn(2, 3)).sum().backward()
    assert not model.report().eager
    with pytest.raises(error):
        loaded(tmp_path, {key: wrong})


POLICIES = ["FALLBACK_FORCE_TORCH_FORWARD", "FALLBACK_UNSUPPORTED_DEVICE", "FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_TORCH_MODEL",
            "FALLBACK_UNSUPPORTED_ONNX_MODEL", "FALLBACK_BAD_INITIALIZATION"]  # fmt: skip
ONE = {"FallbackPolicy": ["FALLBACK_DISABLE"], "DebugOptions": {"LogLevel": "VERBOSE", "SaveONNX": True, "ONNXPrefix": "my_model"}}
TWO = {"FallbackPolicy": POLICIES, "DebugOptions": {"LogLevel": "INFO", "SaveONNX": True, "ONNXPrefix": "my_other_model"}}


@pytest.mark.parametrize("first, second, policy, prefix, level", [
    (TWO, ONE, 1, "my_model", "VERBOSE"), (ONE, TWO, 250, "my_other_model", "INFO")])  # fmt: skip
def test_a_second_json_file_overrides(first: Any, second: Any, policy: int, prefix: str, level: str, tmp_path: Path) -> None:
    one, two = ({**d, "DebugOptions": {**d["DebugOptions"], "SaveONNXPath": str(tmp_path)}} for d in (first, second))
    model = loaded(tmp_path, one, two)
    settings = model._ortmodule.settings
    assert settings.fallback_policy == policy and settings.save_prefix == prefix
    assert settings.log_level == ortmodule.LogLevel[level]
    model(torch.randn(2, 3)).sum().backward()
    assert (tmp_path / f"{prefix}_torch_exported_training.onnx").exists()
    assert not list(tmp_path.glob(f"{'my_model' if 'other' in prefix else 'my_other_model'}_*"))
