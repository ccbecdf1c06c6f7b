"""Names of onnxruntime.training and onnxruntime.training.ortmodule that speak of its build and its exporter. Constants
tell what holds here."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger("ortmodule")

ONNX_OPSET_VERSION = 23  # of every captured graph; assigning another one changes nothing
ONNXRUNTIME_VERSION = "1.19.2"  # whose names are served
MINIMUM_RUNTIME_PYTORCH_VERSION_STR = "2.11"
ORTMODULE_TORCH_CPP_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # where _C lies
ORTMODULE_IS_DETERMINISTIC = torch.are_deterministic_algorithms_enabled()
ORTMODULE_ONNX_EXPORT_CONTEXT = [False]
ONNXRUNTIME_CUDA_VERSION = torch.version.cuda
ONNXRUNTIME_ROCM_VERSION = torch.version.hip


@contextlib.contextmanager
def export_context() -> Iterator[None]:
    """ORTMODULE_ONNX_EXPORT_CONTEXT[0] is True inside. A capture here does not enter it."""
    before, ORTMODULE_ONNX_EXPORT_CONTEXT[0] = ORTMODULE_ONNX_EXPORT_CONTEXT[0], True
    try:
        yield
    finally:
        ORTMODULE_ONNX_EXPORT_CONTEXT[0] = before


class PropagateCastOpsStrategy(enum.IntFlag):
    """Casts are moved by the engine itself; nothing reads these."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


class TrainingParameters:
    """Attributes of any name. Nothing reads them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def is_ortmodule_available() -> bool:
    return True


def _defined_from_envvar(name: str, default_value: Any, warn: bool = True) -> Any:
    """The environment variable in the type of the default; the default, with a warning, when it is none."""
    text = os.getenv(name)
    if text is None:
        return default_value
    try:
        return type(default_value)(text)
    except (TypeError, ValueError) as error:
        if warn:
            warnings.warn(f"Unable to overwrite constant {name!r} due to {error!r}.", stacklevel=2)
        return default_value


_told: set[str] = set()


def _without_effect(what: str, why: str) -> None:
    if what not in _told:
        _told.add(what)
        logger.warning("%s has no effect here: %s", what, why)


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Custom autograd.Functions always run, with their own backward."""
    if not to_enable:
        _without_effect(
            "enable_custom_autograd_support(False)", "custom autograd.Functions run with the backward that they define"
        )
