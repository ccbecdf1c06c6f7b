"""What DeepSpeed compiles by itself: said before it stops there, with an error about one of its builders. And how its
ZeRO-3 takes a wrapper: as a leaf, whose parameters it gathers together; but each gradient when it is there."""

from __future__ import annotations

import functools
import importlib.abc
import logging
import os
import shutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger("ortmodule")


def lacks() -> str | None:
    """What is missing for DeepSpeed to compile, in a sentence with the remedy; None: nothing, or DeepSpeed has not been
    imported, or was installed with its parts compiled."""
    installed = getattr(sys.modules.get("deepspeed.git_version_info"), "installed_ops", None)
    missing = [] if installed is None or any(installed.values()) else _missing()
    if not missing:
        return None
    return (f"DeepSpeed compiles parts of itself when they are first used (DeepSpeedCPUAdam, the FusedAdam of its "
            f"configuration, communication between processes on CPUs) and will fail there: {' and '.join(missing)} not "
            "found; torch.optim.AdamW with zero_force_ds_cpu_optimizer: false needs neither")  # fmt: skip


def _missing() -> list[str]:
    compiler = os.environ.get("CXX", "c++")
    return [f"{what} ({how})" for found, what, how in (
        (shutil.which("ninja"), "ninja", "pip install ninja, and its folder in PATH"),
        (shutil.which(compiler), f"the C++ compiler {compiler}", "apt-get install g++, or CXX=..."),
    ) if not found]  # fmt: skip


@functools.cache
def tell() -> None:
    """Once in a process: now, or when DeepSpeed has been imported."""
    if "deepspeed" in sys.modules:
        if text := lacks():
            logger.warning("%s", text)
    elif _missing():
        sys.meta_path.insert(0, _Imported())


class Leaf:
    """`_z3_leaf` of a wrapper, which ZeRO-3 asks for: yes. DeepSpeed reduces the gradients of a leaf in a backward hook
    of the module, which comes once for each call of it: two calls before a backward (`block(block(x))`) would reduce
    them twice, the first time before they are there. So a wrapper's parameters get the hooks that they have in other
    modules: at AccumulateGrad, which runs once."""

    def __get__(self, wrapper: Any, owner: Any = None) -> bool:
        stage3 = getattr(sys.modules.get("deepspeed.runtime.zero.stage3"), "DeepSpeedZeroOptimizer_Stage3", None)
        make = getattr(stage3, _HOOKS, None)
        if make is not None and not hasattr(make, "_ortmodule_each"):
            setattr(stage3, _HOOKS, _each(make))
        return True


_HOOKS = "create_reduce_and_remove_grad_hooks"


def _each(make: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(make)
    def hooks(self: Any) -> None:
        for p in (p for group in self.fp16_groups for p in group):
            if hasattr(type(getattr(p, "ds_z3_leaf_module", None)), "_ortmodule"):
                del p.ds_z3_leaf_module
        make(self)

    hooks._ortmodule_each = True  # type: ignore[attr-defined]
    return hooks


class _Imported(importlib.abc.MetaPathFinder):
    """Finds DeepSpeed as the other finders do, and tells when it has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "deepspeed":
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for s in (f.find_spec(name, path, target) for f in others) if s is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
                run(module)
                tell.cache_clear()
                tell()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
