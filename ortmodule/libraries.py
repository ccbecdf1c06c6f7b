"""Whose a file or a class is: the user's, or torch's, of what torch calls, the standard library's, this package's."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

from .frames import OWN_DIR, TORCH_DIR

TRACER = tuple(os.path.join(TORCH_DIR, p) for p in ("export", "_export", "overrides.py", "_compile.py", "_dynamo",
                                                      os.path.join("fx", "experimental")))  # fmt: skip
_STD_DIR = sysconfig.get_path("stdlib") + os.sep
_SITE = tuple({path + os.sep for path in (
    os.path.dirname(os.path.dirname(TORCH_DIR)), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
    os.path.join(_STD_DIR, "site-packages"),
    *[p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")])})  # fmt: skip


def of_program(path: str) -> bool:
    """The user's own, and no installed package's."""
    return not path.startswith((TORCH_DIR, OWN_DIR, _STD_DIR, *_SITE, "<"))


# Gathers ZeRO-3's parameters when they are read. What it keeps for that (a stack of the modules that are in forward:
# another one where torch.utils.checkpoint calls again) is nothing that forward computes with.
_GATHERS = os.path.join(os.sep + "deepspeed", "runtime", "zero", "parameter_offload.py")
_BELOW_TORCH = frozenset(
    (
        "numpy",
        "sympy",
        "mpmath",
        "networkx",
        "filelock",
        "fsspec",
        "jinja2",
        "markupsafe",
        "typing_extensions",
        "optree",
        "packaging",
        "triton",
        "setuptools",
        "functorch",
        "torchgen",
    )
)
LIBRARIES = frozenset(sys.stdlib_module_names) | _BELOW_TORCH | {"torch", "ortmodule"}
# Modules whose objects do not change, or not in a way that forward could tell: locks, loggers, types, patterns, dates,
# what is torch's.
STATELESS = frozenset(
    (
        "torch",
        "functorch",
        "numpy",
        "builtins",
        "typing",
        "types",
        "abc",
        "inspect",
        "threading",
        "thread",
        "logging",
        "re",
        "sre",
        "datetime",
        "decimal",
        "fractions",
        "operator",
        "functools",
        "struct",
        "enum",
        "pathlib",
        "uuid",
        "zoneinfo",
        "numbers",
        "ortmodule",
        "warnings",
        "dataclasses",
        "importlib",
        "frozen_importlib",
    )
)
# of torch, what a user's object may be
_WITH_STATE = ("torch.optim", "torch.distributions", "torch.utils.data", "torch.ao")


@functools.lru_cache(4096)  # asked for every call of some functions while a capture runs
def is_library(path: str) -> bool:
    """A file of torch, of what torch calls, numpy, this package or the standard library; also code that was generated
    by them."""
    if path.startswith((TORCH_DIR, OWN_DIR, "<frozen", "<eval_with_key>")) or in_std(path) or path.endswith(_GATHERS):
        return True
    site = next((p for p in _SITE if path.startswith(p)), None)
    return site is not None and path[len(site):].partition(os.sep)[0].removesuffix(".py") in _BELOW_TORCH


@functools.lru_cache(4096)
def in_std(path: str) -> bool:
    return path.startswith(_STD_DIR) and not path.startswith(_SITE)


def of_torch(path: str) -> bool:
    return path.startswith((TORCH_DIR, OWN_DIR))


def user_class(cls: type) -> bool:
    """Written in Python by a user or a library that is none of LIBRARIES; can be watched."""
    if not cls.__flags__ & (1 << 9) or cls.__flags__ & (1 << 8):  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE
        return False
    where = cls.__module__ if isinstance(cls.__module__, str) else ""
    return where.partition(".")[0] not in LIBRARIES or where.startswith(_WITH_STATE)


def first_user(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def once(frame: types.FrameType | None) -> bool:
    """Called through something that speaks once in a process anyway (transformers' warning_once)."""
    while frame is not None and not of_torch(frame.f_code.co_filename):
        if frame.f_code.co_name.endswith("once"):
            return True
        frame = frame.f_back
    return False
