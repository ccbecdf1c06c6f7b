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


def test_the_table_sees_a_spill(tmp_path) -> None:
    said = "Compiling entry function '{}' for 'sm_90'\n 8 bytes stack frame, {} bytes spill stores, 8 bytes spill loads\nUsed 40 registers, 12 bytes smem\n"
    log = tmp_path / "rows.ptxas"
    log.write_text(said.format("om_k_softmax_f32", 8))
    assert kernel_table.rows(log.read_text()) == [("om_k_softmax_f32", "sm_90", 40, 16, 8, 12)]
    assert kernel_table.main(tmp_path) == 0
    for name, bad in [("softmax_f32", 1), ("attention_mma64_dkv_bf16", 1), ("attention_tiled64_f32", 1), ("strip", 1), ("strip64", 0), ("softmax_f64", 0), ("topk", 0)]:
        log.write_text(said.format(f"om_k_{name}", 80))
        assert kernel_table.main(tmp_path) == bad, name


def test_the_table_sees_a_kernel_without_tensor_cores(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of their kernels is looked at, for each architecture that has them; and what all of it weighs."""
    for name in ("attention_mma", "attention_mma_grad", "attention_f32"):
        for kind in ("fatbin", "ptxas"):
            (tmp_path / f"{name}.{kind}").write_bytes((FOLDER / f"{name}.{kind}").read_bytes())
    found = kernel_table.tensor_core_instructions(tmp_path)
    assert set(found) == {k for k in kernels() if "_mma" in k} - {"om_k_attention_mma_bits"}
    assert all(set(n) == {int(a) for a in _C.cuda_archs().split() if int(a) >= 80} for n in found.values())
    assert kernel_table.main(tmp_path) == 0
    monkeypatch.setattr(kernel_table, "MOST", 1000)
    assert kernel_table.main(tmp_path) == 1 and "MB in a wheel" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.undo()
    (tmp_path / "attention_f32.fatbin").rename(tmp_path / "attention_mma.fatbin")
    monkeypatch.setattr(kernel_table, "ON_TENSOR_CORES", re.compile("om_k_attention"))
    assert kernel_table.main(tmp_path) == 1 and "without HMMA" in capsys.readouterr().out.splitlines()[-1]
