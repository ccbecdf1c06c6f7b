"""The wrapper as an object: what it looks like, copies, methods, settings, report, modules it refuses."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import MLP, close, nodes_in_engine, pair
from torch import Tensor, nn

from ortmodule import ORTModule, config
from ortmodule.config import DebugOptions, LogLevel, resolve
from ortmodule.fallback import FallbackPolicy as P

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


# Of every option: what it takes, and what that is then; what it refuses.
NONE = (float("nan"), [1], {}, object(), b"1", "", " ", "nonsense")
FLAG = ([(x, False) for x in ("0", "no", "OFF", "false", False, 0, np.False_, np.int64(0))]
        + [(x, True) for x in ("1", " Yes ", "on", "true", True, 1, np.True_)], (2, -1, "2", 1.0, *NONE))  # fmt: skip
OPTIONS = {
    "strict": ([*FLAG[0], ("engine", "engine"), (" Engine", "engine")], FLAG[1]),
    "min_coverage": ([("0.5", 0.5), (1, 1.0), (np.float32(0.5), 0.5)], (1.5, -1, "90", *NONE)),
    "fallback_policy": ([("FALLBACK_DISABLE", P.FALLBACK_DISABLE), (P.FALLBACK_UNSUPPORTED_DATA, P.FALLBACK_UNSUPPORTED_DATA), ("FALLBACK_UNSUPPORTED_DATA|FALLBACK_BAD_INITIALIZATION", P.FALLBACK_UNSUPPORTED_DATA | P.FALLBACK_BAD_INITIALIZATION)], (1, *NONE)),
    "fallback_retry": FLAG,
    "disable": FLAG,
    "segment_mb": ([("25", 25.0), (3, 3.0), (1e-3, 1e-3), (np.int32(4), 4.0), (np.float64(2.5), 2.5), ("inf", math.inf)], (0, -1.0, "-1", 10**400, *NONE)),
    "max_captures": ([("8", 8), (3, 3), (np.int64(2), 2), (" +4 ", 4)], (0, 2.5, "2.5", "1_0", "\u0663", "9" * 10_000, math.inf, *NONE)),
    "capture_seconds": ([("3", 3.0), (math.inf, math.inf)], (0, "-1", *NONE)),
    "recheck": FLAG,
    "memory_opt_level": ([("1", 1), (2, 2), (np.int64(1), 1)], (3, -1, 1.0, "high", *NONE)),
    "memory_budget": ([("6GB", "6GB"), (123, 123), ("123", 123), (np.int64(5), 5)], (0, True, 1e9, *NONE)),
    "memory_opt_config": ([], (5, *NONE)),
    "keep_memory": ([("2", 2.0), (0, 0.0), ("inf", math.inf)], (-1, "-0.5", *NONE)),
    "label_sparsity": FLAG,
    "padding_sparsity": FLAG,
    "precision": ([("bf16", "bf16")], ("fp16", 16, torch.bfloat16, *NONE)),
    "cuda_engine": FLAG,
    "cuda_graphs": FLAG,
    "cuda_chains": ([("compiled", "compiled"), ("interpreted", "interpreted")], ("foo", 1, *NONE)),
    "cuda_cache": ([("/a", "/a"), (Path("/a"), "/a"), ("", "")], (3, b"/a", "a\0b")),
    "log_level": ([("info", LogLevel.INFO), (LogLevel.DEVINFO, LogLevel.DEVINFO), (10, LogLevel.VERBOSE)], (11, 1.5, *NONE)),
    "save_path": ([("/a", "/a"), (Path("/a"), "/a")], (5, b"/a", "", "a\0b", ["/a"])),
    "save_prefix": ([("a", "a"), ("", "")], (5, b"a")),
}  # fmt: skip


@pytest.mark.parametrize("name", config.OPTIONS)
def test_an_option_is_read_as_its_variable_is(name):
    takes, refuses = OPTIONS[name]
    variable = next((f"ORTMODULE_{row.name}" for row in config.TABLE if row.field == name and row.name), "")
    for given, value in takes:
        found = getattr(resolve({name: given}, None, {}), name)
        assert found == value and type(found) is type(value), (given, found)
        if isinstance(given, str) and given and variable:
            assert getattr(resolve({}, None, {variable: given}), name) == value
    for given in refuses:
        with pytest.raises((ValueError, TypeError), match=rf"^{name}={re.escape(repr(given))} is not allowed(: [^;]*)?; give "):
            resolve({name: given}, None, {})
        if isinstance(given, str) and given and "\0" not in given and variable:
            with pytest.raises(ValueError, match=rf"^{variable}={re.escape(repr(given))} is not allowed(: [^;]*)?; give "):
                resolve({}, None, {variable: given})


def test_an_empty_variable_is_not_set():
    empty = {f"ORTMODULE_{row.name}": "" for row in config.TABLE if row.name}
    assert resolve({}, None, empty) == resolve({}, None, {})
    assert resolve({}, None, empty).cuda_cache == "~/.cache/ortmodule"


def test_variables_without_an_option(caplog):
    known = {"PASS_LIMIT": "12", "VERIFY": "1", "DEVICE_LIBRARY": "/a.so", "NO_REUSE": "1", "POISON": "1", "ISA": "avx2"}
    resolve({}, None, {f"ORTMODULE_{name}": value for name, value in known.items()})
    assert not caplog.records
    for name, value in (("PASS_LIMIT", "-1"), ("PASS_LIMIT", "1_0"), ("PASS_LIMIT", "1" + 26 * "0"), ("VERIFY", "false"), ("VERIFY", "2")):
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
