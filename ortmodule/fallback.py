"""Fallback policies and exceptions, under onnxruntime-training's names: which failures leave a model to PyTorch.

A failure has a category (`Category`). Where the policy has the category's flag, PyTorch runs what the engine cannot
and report() names it; where it has not, the category's exception is raised, with the cause. FALLBACK_DISABLE takes all
flags away. Operators and custom autograd.Functions that PyTorch computes inside the graph are no fallback.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class FallbackPolicy(enum.IntFlag):
    """Combined by |."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def is_disabled(self) -> bool:
        return FallbackPolicy.FALLBACK_DISABLE in self

    def is_set(self, policy: FallbackPolicy) -> bool:
        """Is it there, and not taken away by FALLBACK_DISABLE?"""
        return not self.is_disabled() and policy in self


class ORTModuleFallbackException(Exception):  # noqa: N818
    """Of all the following: what the engine cannot do, and the policy does not leave to PyTorch."""


class ORTModuleInitException(ORTModuleFallbackException):
    """This PyTorch, or this machine, cannot run the engine."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """Parameters or arguments lie on several devices, or on one that the engine does not know."""


class ORTModuleIOError(ORTModuleFallbackException):
    """An argument or a result of forward that cannot be an input or output of a graph."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """A module that cannot be wrapped."""


class ORTModuleONNXModelException(ORTModuleFallbackException):
    """A module that cannot be captured, or a graph that the engine does not run."""


class NotAModule(ORTModuleTorchModelException, TypeError):
    """What is to be wrapped is of a wrong type."""


class NotHere(ORTModuleInitException, RuntimeError):
    """The engine does not work with this PyTorch."""


P = FallbackPolicy
_FORCED = P.FALLBACK_FORCE_TORCH_FORWARD | P.FALLBACK_FORCE_TORCH_BACKWARD


class Category(NamedTuple):
    """flags: any of them leaves it to PyTorch."""

    flags: FallbackPolicy
    exception: type[ORTModuleFallbackException]


DEVICE = Category(P.FALLBACK_UNSUPPORTED_DEVICE | _FORCED, ORTModuleDeviceException)
DATA = Category(P.FALLBACK_UNSUPPORTED_DATA | _FORCED, ORTModuleIOError)
TORCH_MODEL = Category(
    P.FALLBACK_UNSUPPORTED_TORCH_MODEL | P.FALLBACK_BAD_INITIALIZATION | _FORCED, ORTModuleTorchModelException
)
ONNX_MODEL = Category(P.FALLBACK_UNSUPPORTED_ONNX_MODEL | _FORCED, ORTModuleONNXModelException)
INIT = Category(P.FALLBACK_BAD_INITIALIZATION, ORTModuleInitException)

# What an ORTModule takes that is made without a policy; scripts assign them, also by the names of the same spelling in
# onnxruntime.training.ortmodule. onnxruntime-training's policy had not the last flag.
ORTMODULE_FALLBACK_POLICY = (
    P.FALLBACK_UNSUPPORTED_DEVICE
    | P.FALLBACK_UNSUPPORTED_DATA
    | P.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | P.FALLBACK_UNSUPPORTED_ONNX_MODEL
    | P.FALLBACK_BAD_INITIALIZATION
)
ORTMODULE_FALLBACK_RETRY = False


def allows(policy: FallbackPolicy, category: Category) -> bool:
    return not policy.is_disabled() and bool(policy & category.flags)


def policy_of(text: str) -> FallbackPolicy:
    """Names joined by |. Raises ValueError for a name that is none."""
    found = FallbackPolicy(0)
    for word in text.split("|"):
        try:
            found |= FallbackPolicy[word.strip()]
        except KeyError:
            raise ValueError(f"{word.strip()!r} is no fallback policy") from None
    return found


def wrap_exception(
    new_exception: type[ORTModuleFallbackException], raised_exception: Exception
) -> ORTModuleFallbackException:
    """An exception of the first type, with the second as its cause."""
    error = new_exception(raised_exception)
    error.__cause__ = raised_exception
    return error
