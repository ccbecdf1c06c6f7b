"""DeepSpeed where ninja or a compiler is missing: a sentence with the remedy when a model is wrapped, or DeepSpeed is
imported behind that, before DeepSpeed fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import launch
from zero import python

pytestmark = pytest.mark.slow

TOOLS = {"ninja", "c++"}
CODE = """
import logging, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCH_EXTENSIONS_DIR"] = os.environ["PATH"].partition(os.pathsep)[0] + "/built"
missing = sys.argv[1].split()
import importlib.util
import torch
if sys.argv[2] == "before":
    import deepspeed
from ortmodule import ORTModule, wrap_blocks
from tiny_gpt import build
said = []
logging.getLogger("ortmodule").addHandler(type("Says", (logging.Handler,), {"emit": lambda self, record: said.append(record.getMessage())})())
model = build()
wrap_blocks(model)
ORTModule(build())
if sys.argv[2] == "after":
    assert importlib.util.find_spec("deepspeed") is not None and not said  # who only looks for it is told nothing
    import deepspeed
    assert deepspeed.__spec__.name == "deepspeed" and deepspeed.__file__
    ORTModule(build())
assert len(said) == bool(missing), said
remedies = {"ninja": "pip install ninja", "c++": "apt-get install g++"}
assert all((name in missing) == (remedy in said[0]) for name, remedy in remedies.items() for _ in said), said
if missing:  # and DeepSpeed does
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    try:
        DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    except Exception as error:
        assert "failed to build" in str(error), error
    else:
        raise AssertionError("DeepSpeed needs it no more: say nothing")
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("missing", "imported"), [
    ("", "before"), ("ninja", "before"), ("c++", "after"), ("ninja c++", "before"), ("", "after"), ("ninja c++", "after"),
])  # fmt: skip
def test_what_is_missing_is_said_once(missing: str, imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with every program but those."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.iterdir() if folder.is_dir() else ():
            if program.name not in TOOLS and not (tools / program.name).is_symlink():
                (tools / program.name).symlink_to(program)
    for name in TOOLS - {*missing.split()}:
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    launch(CODE, missing, imported, ranks=1, python=python(), new=imported == "after")
