"""`make cuda-table` holds for the kernels of this build: every kernel for every architecture, no spill in a hot one."""

from __future__ import annotations

import re

import pytest
from cuda import kernel_table

from engine import ROOT
from ortmodule import _C

FOLDER = ROOT / "build" / "cuda"
LOGS = [p for p in FOLDER.glob("*.ptxas") if p.with_suffix(".fatbin").exists() and p.with_suffix(".fatbin").stat().st_size]
pytestmark = pytest.mark.skipif(not LOGS, reason="built without nvcc")


def kernels() -> set[str]:
    text = (ROOT / "csrc/cuda/engine.def").read_text()
    each = {"KERNEL": [""], "EACH_FLOAT": ["_f32", "_f64", "_bf16", "_f16"], "EACH_MMA": ["_bf16", "_f16"]}
    return {f"om_k_{name}{s}" for how, name in re.findall(r"^(KERNEL|EACH_FLOAT|EACH_MMA)\(\w+, (\w+),", text, re.M) for s in each[how]}


def test_every_kernel_for_every_architecture() -> None:
    found = {(name, arch) for log in LOGS for name, arch, *_ in kernel_table.rows(log.read_text())}
    missing = {(k, f"sm_{a}") for k in kernels() for a in _C.cuda_archs().split()} - found
    assert not missing, sorted(missing)[:5]


def test_nothing_hot_spills(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_table.main(FOLDER) == 0, capsys.readouterr().out.splitlines()[-1]


def test_a_spill_and_a_kernel_without_tensor_cores_are_seen(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Compiling entry function 'om_k_softmax_f32' for 'sm_90'\n 8 bytes stack frame, {} bytes spill stores, {} bytes spill loads\nUsed 40 registers, 12 bytes smem\n"
    log = tmp_path / "rows.ptxas"
    log.write_text(said.format(8, 8))
    assert kernel_table.rows(log.read_text()) == [("om_k_softmax_f32", "sm_90", 40, 16, 8, 12)]
    assert kernel_table.main(tmp_path) == 0
    log.write_text(said.format(80, 8))
    assert kernel_table.main(tmp_path) == 1
    log.write_text(said.format(0, 0))
    monkeypatch.setattr(kernel_table, "without_tensor_cores", lambda folder: [("om_k_attention_mma64_f16", "sm_80")])
    assert kernel_table.main(tmp_path) == 1
