"""docs/COMPATIBILITY.md: current, every row with a test that exists, every public name in a row."""

from __future__ import annotations

import re
from pathlib import Path

import compat_rows
import pytest
from expected import EXPECTED

from ortmodule.compat.names import MISSING, NAMES
from ortmodule.variables import VARIABLES

ROWS = [row for part in compat_rows.SECTIONS.values() for row in part]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name[:40])
def test_a_row_has_a_test(row):
    assert row.test in compat_rows.tests(), f"{row.name}: there is no {row.test}"
    assert row.kept in ("same", "better", "no") and (row.text or row.kept == "same")


@pytest.mark.parametrize("what, test", [row for part in EXPECTED.values() for row in part])
def test_what_is_expected_has_a_test(what, test):
    assert test in compat_rows.tests(), f"{what}: there is no {test}"


def test_the_document_is_current():
    assert (DOCS / "COMPATIBILITY.md").read_text() == compat_rows.doc(), "python tests/compat_rows.py > docs/COMPATIBILITY.md"
    for link in re.findall(r"\]\((\S+?)\)", compat_rows.doc()):
        assert (DOCS / link).is_file()


def test_every_public_name_is_in_a_row():
    """By itself, or by a word that stands for its family."""
    text = " ".join(f"{row.name} {row.text}" for row in ROWS)
    families = {
        "Scheduler": "learning-rate schedules", "nvtx": "nvtx functions", "ORTModelInputOutput": "`PrimitiveType`", "FusedLAMB": "`FusedAdam`",
        "ORTModule": "`ORTModuleFallbackException` and its five classes", "JSON_PATH": "`load_from_json`", "load_config": "`load_from_json`",
        "generate_summaries": "`merge_activation_summary`", "main": "`merge_activation_summary`", "shard_wrapped": "`LoadBalancingDistributedSampler`",
        "SubscriberManager": "`GlobalSubscriberManager`", "RuntimeStates": "`SubscriberBase`", "is_installed": "torch_cpp_extensions", "build_torch": "torch_cpp_extensions",
        "LossType": "`artifacts.generate_artifacts`", "OptimType": "`artifacts.generate_artifacts`", "ORTMODULE_IS_DET": "`export_context`",
        "ORTMODULE_ONNX_EXPORT": "`export_context`",
    }  # fmt: skip
    for module, names in {**NAMES, "missing": {n.rpartition(".")[2]: "" for n in MISSING}}.items():
        for name in names:
            if name.startswith("_") or "onnxblock" in module or name in ("ort_triton", "custom_op_library", "empty_base", "load_checkpoint_to_model", "pipe"):
                continue
            known = re.search(rf"\b{name}\b", text) or any(family in text for part, family in families.items() if part in name)
            assert known, f"{module}.{name} is in no row"


def test_every_variable_is_in_the_settings():
    text = (DOCS / "SETTINGS.md").read_text()
    assert all(f"`ORTMODULE_{v.name}`" in text for v in VARIABLES)
