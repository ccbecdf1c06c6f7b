"""DebugOptions set the level of the process's logger: each test finds it as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    logger = logging.getLogger("ortmodule")
    before = logger.level
    yield
    logger.setLevel(before)
