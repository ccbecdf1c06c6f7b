"""The wrapper as an object: what it looks like, copies, methods, settings, report, modules it refuses."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
from pathlib import Path

import pytest
import torch
from pairs import MLP, close, nodes_in_engine, pair
from torch import Tensor, nn

from ortmodule import ORTModule, config
from ortmodule.config import DebugOptions, resolve

pytestmark = pytest.mark.usefixtures("seeded")


def test_identity_of_the_wrapper():
    model = MLP()
    w = ORTModule(model)
    assert isinstance(w, ORTModule) and isinstance(w, MLP) and w.module is model
    assert type(w).__name__ == "MLP" and type(w).__qualname__ == MLP.__qualname__ and type(w).__module__ == MLP.__module__
    assert inspect.signature(type(w).forward) == inspect.signature(MLP.forward)
    assert inspect.signature(w.forward) == inspect.signature(model.forward)
    assert list(w.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(w.parameters(), model.parameters(), strict=True))
    assert [n for n, _ in w.named_modules()] == [n for n, _ in model.named_modules()]
    w.scale = 4.0
    assert model.scale == 4.0
    w.eval()
    assert not model.training and not model.drop.training


def test_wrapping_what_cannot_be_wrapped():
    with pytest.raises(TypeError, match="torch.nn.Module"):
        ORTModule(lambda x: x)
    with pytest.raises(TypeError, match="already"):
        ORTModule(ORTModule(MLP()))
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ORTModule(nn.DataParallel(MLP()), strict=True)
    with pytest.raises(TypeError, match=r"before torch\.jit"):
        ORTModule(torch.jit.script(nn.Linear(2, 3)))
    with pytest.raises(TypeError, match="unknown options"):
        ORTModule(MLP(), stict=True)


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "save"])
def test_copies_are_wrapped_and_on_their_own(way):
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    w(x).sum().backward()
    if way == "pickle":
        other = pickle.loads(pickle.dumps(w))
    elif way == "deepcopy":
        other = copy.deepcopy(w)
    else:
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, ORTModule) and isinstance(other, MLP) and other.module is not w.module
    assert other._ortmodule.settings == w._ortmodule.settings
    assert all(a is not b for a, b in zip(w.parameters(), other.parameters(), strict=True))
    close(other(x), eager(x))
    nodes_in_engine(other)


def test_methods_of_the_user_run_through_the_engine():
    class WithMethod(MLP):
        def twice(self, x: Tensor) -> Tensor:
            return self(x) + self(x)

    w, eager = pair(WithMethod)
    x = torch.randn(13, 5)
    close(w.twice(x), eager.twice(x))
    assert w.report().graphs[0].forwards == 2


def test_children_called_module_and_report():
    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(5, 3)

        def report(self) -> str:
            return "mine"

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    w, eager = pair(Awkward)
    x = torch.randn(7, 5)
    assert w.report() == "mine" and isinstance(w.module, nn.Linear)
    close(w(x), eager(x))


def test_assigned_forward():
    w, eager = pair(MLP)
    x = torch.randn(13, 5)
    original = w.forward
    w.forward = lambda x: original(x) * 2
    close(w(x), eager(x) * 2)
    del w.forward
    close(w(x), eager(x))


def test_report_and_log(caplog, tmp_path):
    w = ORTModule(MLP(), DebugOptions(save_onnx=True, onnx_prefix="mlp", save_path=str(tmp_path)))
    x = torch.randn(13, 5)
    with caplog.at_level(logging.INFO, "ortmodule"):
        for _ in range(4):
            w(x).sum().backward()
    assert len(caplog.records) == 4 and "100%" in caplog.text and "memory of a step" in caplog.text and "capture 1" in caplog.text
    report = w.report()
    data = report.to_dict()
    assert data["n_captures"] == 1 and data["n_plans"] >= 1 and data["node_share"] == 1
    assert data["graphs"][0]["forwards"] == 4 and data["graphs"][0]["backwards"] == 4
    assert "capture" in str(report)
    assert "mlp_torch_exported_training.onnx" in [p.name for p in tmp_path.iterdir()]


def test_settings_are_checked_by_name():
    assert resolve({"segment_mb": 3.0}, None, {}).segment_mb == 3.0
    assert resolve({"segment_mb": 3.0}, None, {"ORTMODULE_SEGMENT_MB": "5"}).segment_mb == 5.0
    assert resolve({}, None, {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"}).strict is True
    assert resolve({}, None, {"ORTMODULE_STRICT": "engine"}).strict == "engine" and resolve({}, None, {"ORTMODULE_STRICT": "1"}).strict is True
    with pytest.raises(ValueError, match="strict='some' is not allowed"):
        resolve({"strict": "some"}, None, {})
    for name, value in (("SEGMENT_MB", "-1"), ("STRICT", "maybe"), ("LOG_LEVEL", "LOUD"), ("MAX_CAPTURES", "0")):
        with pytest.raises(ValueError, match=f"ORTMODULE_{name}='{value}' is not allowed"):
            resolve({}, None, {f"ORTMODULE_{name}": value})


def test_the_settings_document_is_current():
    text = (Path(__file__).resolve().parents[2] / "docs" / "SETTINGS.md").read_text()
    assert text == config.doc(), "docs/SETTINGS.md is stale: python -c 'from ortmodule import config; print(config.doc(), end=\"\")'"


def test_sharded_modules_are_refused():
    m = MLP()
    m.first.weight.ds_id, m.first.weight.ds_numel = 0, 10**6  # a part of it is here: nobody has gathered it
    w = ORTModule(m)
    with pytest.raises(RuntimeError, match="partitioned by DeepSpeed ZeRO-3"):
        w(torch.randn(13, 5))

    class FSDPModule:
        pass

    sharded = MLP()
    sharded.first.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    with pytest.raises(RuntimeError, match="fully_shard"):
        ORTModule(sharded)


def test_disabled_is_pytorch(monkeypatch):
    monkeypatch.setenv("ORTMODULE_DISABLE", "1")
    w = ORTModule(MLP())
    x = torch.randn(13, 5)
    assert torch.equal(w(x), w.module(x))
    assert w.report().n_captures == 0 and w.report().eager[0].calls == 1
