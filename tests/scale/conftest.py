"""Which rows of these tests are left to `make test-full`: ranks are processes, and what they try the rows beside them try
as well, with another number of ranks, another moment or another schedule."""

from __future__ import annotations

import pytest

FULL = {
    "test_fsdp2_checkpoints.py": ["[around]", "[inside]", "[wrapper around]"],
    "test_ddp_mixed.py": ["[parts,uneven]"],
    "test_ddp_more.py": ["[hangs]"],
    "test_deepspeed_peft.py": ["[1]", "[2]"],
    "test_deepspeed_more.py": ["[2-whole-bf16-4]", "[3-blocks]"],
    "test_gone.py": ["[hangs-load]", "[dies-load]"],
    "test_gone_ranks.py": [
        "[stopped-backward-2-own-4]", "[stopped-forward-0-own-2]", "[killed-backward-0-kept-2]", "[killed-between-0-own-2]", "[killed-forward-1-file-2]",
        "[stopped-uncaught-1-2]", "[killed-uncaught-0-2]", "[stopped-forward-0-2]", "[killed-forward-1-2]", "[stopped-1-2]",
    ],
    "test_pipeline.py": ["[ScheduleGPipe]", "[ScheduleLoopedBFS]", "[ScheduleInterleaved1F1B]"],
    "test_trainers.py": ["[fp32]"],
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = all("::" not in arg for arg in config.args)  # a test asked for by name is run
    for file, rows in FULL.items():
        here = [item for item in items if item.path.name == file and item.path.parent.name == "scale"]
        for row in rows:
            found = [item for item in here if item.name.endswith(row)]
            assert found or not here or not whole, f"tests/scale/conftest.py: {file} has no row {row}"
            for item in found if whole else []:
                item.add_marker(pytest.mark.full)
