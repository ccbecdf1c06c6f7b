"""What DeepSpeed compiles by itself: said before it stops there, with an error about one of its builders."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys

logger = logging.getLogger("ortmodule")


def lacks() -> str | None:
    """What is missing for DeepSpeed to compile, in a sentence with the remedy; None: nothing, or DeepSpeed has not been
    imported, or was installed with its parts compiled."""
    installed = getattr(sys.modules.get("deepspeed.git_version_info"), "installed_ops", None)
    if installed is None or any(installed.values()):
        return None
    compiler = os.environ.get("CXX", "c++")
    missing = [f"{what} ({how})" for found, what, how in (
        (shutil.which("ninja"), "ninja", "pip install ninja, and its folder in PATH"),
        (shutil.which(compiler), f"the C++ compiler {compiler}", "apt-get install g++, or CXX=..."),
    ) if not found]  # fmt: skip
    if not missing:
        return None
    return (f"DeepSpeed compiles parts of itself when they are first used (DeepSpeedCPUAdam, the FusedAdam of its "
            f"configuration, communication between processes on CPUs) and will fail there: {' and '.join(missing)} not "
            "found; torch.optim.AdamW with zero_force_ds_cpu_optimizer: false needs neither")  # fmt: skip


@functools.cache
def tell() -> None:
    """Once in a process."""
    if text := lacks():
        logger.warning("%s", text)
