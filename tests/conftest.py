"""Fixtures of more than one file.

OM_MODULES_ON=cuda: what a test makes without naming a device is made there, and its modules run in the engine there
(tests/gpu/run.py, graph-modules). OM_MODULES_ON=fake: the engine's plans run on the fake GPU of tests/cuda."""

import logging
import os
from collections.abc import Iterator

import full
import pytest
import torch

if os.environ.get("OM_MODULES_ON"):
    import on_device

    on_device.begin(os.environ["OM_MODULES_ON"])

    @pytest.fixture(autouse=True)
    def usable() -> Iterator[None]:
        """A GPU that no longer answers ends this process, so that pytest-xdist begins another: one test has failed, not
        all that follow."""
        yield
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(3)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full.mark(config, items)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """DebugOptions set the level of the process's logger, libraries that of the root: each test finds them as they
    were."""
    loggers = logging.getLogger("ortmodule"), logging.getLogger()
    before = [logger.level for logger in loggers]
    yield
    for logger, was in zip(loggers, before, strict=True):
        logger.setLevel(was)


@pytest.fixture
def fp64() -> Iterator[None]:
    """Modules and tensors are made in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def seeded(fp64: None) -> None:
    """The same random numbers in every run of a test, in double precision."""
    torch.manual_seed(1)
