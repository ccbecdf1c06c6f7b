"""What is said while a module trains: nothing by default, captures at INFO, variants at VERBOSE, and a line on stderr
when somebody waits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule import quiet

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import logging, sys, torch
from torch import nn
from ortmodule import ORTModule
{before}
model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
for n in (3, 5, 7):
    model(torch.randn(n, 4)).sum().backward()
"""


def said(level: str | None, before: str = "") -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "ORTMODULE_LOG_LEVEL"} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if level:
        env["ORTMODULE_LOG_LEVEL"] = level
    res = subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True, env=env, check=True)
    assert not res.stdout
    return [line for line in res.stderr.splitlines() if not line.startswith("ortmodule: ")]  # a busy machine


def test_nothing_by_default() -> None:
    assert said(None) == []


def test_info_tells_captures_and_features() -> None:
    lines = said("INFO")
    captures = [line for line in lines if "capture " in line and " nodes, " in line]
    assert [line.startswith("ortmodule INFO: Sequential: capture ") for line in captures] == [True, True]
    assert "(first call)" in captures[0] and "(changed: sizes of arguments)" in captures[1]
    assert any(line.startswith("Memory Optimizer") for line in lines) and not any("variant" in line for line in lines)


def test_verbose_tells_variants() -> None:
    assert any(line.startswith("ortmodule DEBUG: variant ") for line in said("VERBOSE"))


@pytest.mark.parametrize("before", ["logging.basicConfig(format='mine %(message)s')", "logging.basicConfig(format='mine %(message)s', level='ERROR')"])
def test_a_users_logging_is_used_and_nothing_twice(before: str) -> None:
    lines = said("INFO", before)
    assert sum("capture 1" in line for line in lines) == 1 and any(line.startswith("mine Sequential: capture 1") for line in lines)


def test_a_long_wait_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(quiet, "PATIENCE_S", 0.05)
    with quiet.progress("Net is being captured"):
        time.sleep(0.3)
    with quiet.progress("nothing to tell"):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ortmodule: Net is being captured ..." and lines[1].startswith("ortmodule: that took 0.") and len(lines) == 2
    with pytest.raises(KeyError), quiet.progress("an error"):
        raise KeyError
    assert logging.getLogger("ortmodule").name == "ortmodule"
