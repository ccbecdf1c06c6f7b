"""Fixtures of more than one file."""

from collections.abc import Iterator

import pytest
import torch


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
