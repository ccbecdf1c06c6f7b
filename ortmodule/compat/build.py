"""Names of onnxruntime.training and onnxruntime.training.ortmodule that speak of its build, its exporter and its
gradient builder. Constants tell what holds here; what registers something for a part that does not exist here says so
once, by name, and changes nothing."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
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


def _registers(what: str, why: str) -> Callable[[F], F]:
    def keep(function: F) -> F:
        _without_effect(f"{what} ({function.__qualname__})", why)
        return function

    return keep


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Custom autograd.Functions always run, with their own backward."""
    if not to_enable:
        _without_effect(
            "enable_custom_autograd_support(False)", "custom autograd.Functions run with the backward that they define"
        )


def register_gradient(domain: str, name: str, *attributes: str) -> Callable[[F], F]:
    """Accepted; PyTorch differentiates an operator that the engine does not know."""
    return _registers(
        f"register_gradient({'::'.join((domain, name, *attributes))!r})",
        "PyTorch differentiates what the engine does not know; a gradient of your own is a torch.autograd.Function or "
        "torch.library.register_autograd",
    )


def register_symbolic(name: str, domain: str = "", torch_version_start: str | None = None,
                      torch_version_end: str | None = None, need_node: bool = False) -> Callable[[F], F]:  # fmt: skip
    """Accepted; an operator without ONNX spelling is one that PyTorch runs inside the graph."""
    return _registers(
        f"register_symbolic({name!r})", "torch.export captures; what has no ONNX spelling is run by PyTorch"
    )


def register_graph_optimizer(target_modules: str = "all", devices: str = "all", priority: int = 0) -> Callable[[F], F]:
    """Accepted; the engine derives the gradient graph in its own form, so there is none in ONNX to edit."""
    return _registers(
        "register_graph_optimizer", "the engine derives the gradient graph in a form of its own, not in ONNX"
    )
