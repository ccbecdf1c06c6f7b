"""What Hugging Face's Accelerate leaves out in silence: said at a capture. It trains then, by another plan than asked
for."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

logger = logging.getLogger("ortmodule")

_told: set[str] = set()
_PLUGINS = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}  # set where a plugin is given


def lacks() -> list[str]:
    """Sentences with the remedy; none where Accelerate is not in use, or does what it was asked for."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return []
    state, ranks = accelerate.AcceleratorState(), int(os.environ.get("WORLD_SIZE", "1"))
    does, found = str(getattr(state.distributed_type, "value", state.distributed_type)), []
    if ranks > 1 and state.num_processes == 1:
        found.append(f"this is one of {ranks} processes (WORLD_SIZE), and Accelerate counts one: each trains by "
                     "itself, Accelerate reduces nothing; on a CPU: Accelerator(cpu=True)")  # fmt: skip
    for variable, plugin in _PLUGINS.items():
        if os.environ.get(variable, "").lower() == "true" and does not in _PLUGINS.values():
            found.append(f"Accelerate was asked for {plugin} and leaves it out here, as it does on CPUs (its "
                         f"distributed_type is {does}): nothing is sharded; use "
                         f"{'fully_shard' if plugin == 'FSDP' else 'deepspeed.initialize'} by hand")  # fmt: skip
    return found


def tell() -> None:
    """Each once in a process."""
    with contextlib.suppress(Exception):  # another Accelerate
        for text in lacks():
            if text not in _told:
                _told.add(text)
                logger.warning("%s", text)
