"""DebugOptions: what it refuses, which files it writes and what is in them, what is logged."""

from __future__ import annotations

import logging
import os

import onnx
import pytest
import torch
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule, debug
from ortmodule.config import resolve
from ortmodule.variables import VARIABLES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 2)

    def forward(self, first, second):
        return self.fc2(torch.relu(self.fc1(first + second)))


def op_types(path):
    return [n.op_type for n in onnx.load(path).graph.node]


def test_files_of_every_stage(tmp_path):
    model = ORTModule(Net(), DebugOptions(save_onnx=True, onnx_prefix="mine", save_path=str(tmp_path)))
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    model(a, second=b).sum().backward()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "mine_execution_model_training.onnx", "mine_optimized_pre_grad_training.onnx", "mine_optimized_training.onnx", "mine_torch_exported_training.onnx"]  # fmt: skip
    exported = onnx.load(tmp_path / "mine_torch_exported_training.onnx")
    onnx.checker.check_model(exported)
    assert [i.name for i in exported.graph.input][:2] == ["first", "second"]
    forward = op_types(tmp_path / "mine_optimized_pre_grad_training.onnx")
    joint = onnx.load(tmp_path / "mine_execution_model_training.onnx")
    assert "matmul" in forward and "grad" not in forward
    assert {o.name for o in joint.graph.output} >= {f"{n}_grad" for n in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
    assert [n.op_type for n in joint.graph.node].count("matmul") > forward.count("matmul")
    assert joint.SerializeToString() == onnx.load(tmp_path / "mine_optimized_training.onnx").SerializeToString()
    model.eval()
    with torch.no_grad():
        model(a, b)
    new = {p.name for p in tmp_path.iterdir() if "inference" in p.name}
    assert {n.split("_inference")[0] for n in new} == {"mine_torch_exported", "mine_optimized", "mine_execution_model"}


def test_every_node_of_the_engine_is_in_the_file(tmp_path):
    """Against the engine's own list of nodes."""
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.2)), DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path)))
    model(torch.randn(5, 4)).sum().backward()
    graph = model._ortmodule.every[0].graph
    (variant,) = graph._current.values()
    mine = [t for t in op_types(tmp_path / "m_execution_model_training.onnx") if t not in ("const", "grad", "write")]
    assert mine == [n["op"] for n in graph.model.nodes(variant.number)]


def test_names_of_arguments_are_kept(tmp_path):
    class Many(nn.Module):
        def forward(self, x, *rest, key, **more):
            return x + rest[0] + key["a"] + more["other"]

    t = torch.randn(2)
    ORTModule(Many(), DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path)))(t, t + 1, key={"a": t + 2}, other=t + 3)
    names = [i.name for i in onnx.load(next(tmp_path.glob("m_torch_exported_*"))).graph.input]
    assert names[0] == "x" and any("rest" in n for n in names) and any("key" in n for n in names) and any("other" in n for n in names)


def test_later_captures_have_numbers(tmp_path):
    model = ORTModule(nn.Linear(4, 2), DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path)))
    for rows in (2, 3):
        model(torch.randn(rows, 4)).sum().backward()
    assert {p.name for p in tmp_path.glob("m_torch_exported*")} == {"m_torch_exported_training.onnx", "m_torch_exported_training_1.onnx"}


def test_a_directory_alone_saves_what_is_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    ORTModule(nn.Linear(4, 2))(torch.randn(2, 4)).sum().backward()
    assert [p.name for p in tmp_path.iterdir()] == ["Linear_torch_exported_training.onnx"]


def test_what_is_refused_when_the_options_are_made(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="Expected log_level of type LogLevel, got <class 'int'>."):
        DebugOptions(log_level=3)
    with pytest.raises(TypeError, match="Expected name prefix of type str"):
        DebugOptions(save_onnx=True, onnx_prefix=3)
    with pytest.raises(ValueError, match="onnx_prefix must be provided when save_onnx is set."):
        DebugOptions(save_onnx=True)
    with pytest.raises(OSError, match="is not writable. Please set the ORTMODULE_SAVE_ONNX_PATH environment variable to a writable path"):
        DebugOptions(save_onnx=True, onnx_prefix="x", save_path=str(tmp_path / "absent"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="is not writable"):
        DebugOptions(save_onnx=True, onnx_prefix="x", save_path=str(tmp_path))
    DebugOptions(save_onnx=False, save_path=str(tmp_path / "absent"))
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
    with pytest.raises(KeyError, match="ORTMODULE_LOG_LEVEL='LOUD' is not allowed; give VERBOSE, "):
        DebugOptions()


def test_members(tmp_path, monkeypatch):
    options = DebugOptions(LogLevel.ERROR, True, "x", str(tmp_path))
    assert options.logging.log_level == options.log_level == LogLevel.ERROR
    assert options.save_onnx_models == (True, "x", str(tmp_path))
    assert (options.save_onnx_models.save, options.save_onnx_models.name_prefix, options.save_onnx_models.path) == (True, "x", str(tmp_path))
    assert options.torch_exporter_filter is None and options.onnxruntime_log_filter is None
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path / ".."))
    options = DebugOptions(LogLevel.ERROR, True, "x", "/absent")
    assert options.logging.log_level == LogLevel.INFO and options.log_level == LogLevel.ERROR
    assert options.save_onnx_models.path == str(tmp_path / "..")
    assert DebugOptions().save_onnx_models.path == str(tmp_path / "..") and [level.name for level in LogLevel] == [
        "VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"]  # fmt: skip


@pytest.mark.parametrize("level", [LogLevel.INFO, LogLevel.WARNING])
def test_info_prints_features_times_and_memory_once(level, caplog):
    before = logging.getLogger("ortmodule").level
    try:
        model = ORTModule(Net(), DebugOptions(log_level=level), memory_opt_level=1)
        with caplog.at_level(level, "ortmodule"):
            for _ in range(3):
                model(torch.randn(3, 4), torch.randn(3, 4)).sum().backward()
    finally:
        logging.getLogger("ortmodule").setLevel(before)
    if level == LogLevel.WARNING:
        assert not caplog.records
        return
    capture, memory, table, record = caplog.records
    assert "Memory Optimizer" in table.getMessage()
    assert "capture 1" in capture.getMessage() and capture.levelno == logging.INFO
    assert "activations" in memory.getMessage() and memory.levelno == logging.INFO
    assert record.name == "ortmodule" and record.levelno == logging.INFO
    rows = {line.split(":")[0].strip(): line for line in record.getMessage().splitlines()}
    assert "ON" in rows["Memory Optimizer"] and "level 1" in rows["Memory Optimizer"] and "OFF" in rows["ATen operators in PyTorch"]
    assert "FALLBACK_UNSUPPORTED_DATA" in rows["Auto Fallback"] and "100% of the nodes" in rows["Engine"]
    assert "where export takes" in record.getMessage() and "planned peak: " in record.getMessage()


def test_other_ranks_keep_silent(monkeypatch, caplog):
    log = logging.getLogger("ortmodule")
    before = log.level
    try:
        debug.set_level(LogLevel.INFO)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        for rank in (0, 1):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            log.info("info of %d", rank)
            log.warning("warning of %d", rank)
            log.error("error of %d", rank)
        debug.set_level(LogLevel.DEVINFO)
        log.info("developers' of 1")
    finally:
        log.setLevel(before)
    assert [r.getMessage() for r in caplog.records] == ["info of 0", "warning of 0", "error of 0", "error of 1", "developers' of 1"]


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: row.name)
def test_every_variable_is_taken_or_named(row, caplog, monkeypatch, tmp_path):
    from ortmodule import config

    (tmp_path / "plans.json").write_text("[]")

    monkeypatch.setattr(config, "_warned", set())
    value = {"LOG_LEVEL": "INFO", "FALLBACK_POLICY": "FALLBACK_DISABLE", "MEMORY_OPT_LEVEL": "1",
             "MEMORY_OPT_CONFIG": str(tmp_path / "plans.json")}.get(row.name, "1")  # fmt: skip
    with caplog.at_level(logging.WARNING, "ortmodule"):
        resolve({}, None, {f"ORTMODULE_{row.name}": value})
        resolve({}, None, {f"ORTMODULE_{row.name}": value})
    assert len(caplog.records) == (row.kept == "no")
    if row.kept == "no":
        assert row.why in caplog.text


def test_an_unknown_variable_names_the_nearest(caplog, monkeypatch):
    from ortmodule import config

    monkeypatch.setattr(config, "_warned", set())
    with caplog.at_level(logging.WARNING, "ortmodule"):
        resolve({}, None, {"ORTMODULE_FALBACK_POLICY": "x", "ORTMODULE_ZZZ": "1"})
    assert "ORTMODULE_FALBACK_POLICY is unknown; the nearest is ORTMODULE_FALLBACK_POLICY; known:" in caplog.text
    assert "ORTMODULE_ZZZ is unknown; known:" in caplog.text
