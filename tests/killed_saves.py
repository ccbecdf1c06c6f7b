"""kill -9 at 100 random moments of a process that saves checkpoints without end:

    killed_saves.py ARTIFACTS CHECKPOINT

A child saves states 1, 2, 3...: all parameters are the state's number, and a property says it. After each kill the file
must be one whole state, never an older one than after the kill before. Prints the last. Exit status 1 otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ortmodule import api

KILLS = 100


def header(data: bytes) -> tuple[dict[str, Any], bytes]:
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def with_header(text: str | dict[str, Any], rest: bytes) -> bytes:
    raw = (text if isinstance(text, str) else json.dumps(text)).encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + rest


def whole(path: Path, before: int) -> int:
    values = load_file(path)
    head, _ = header(path.read_bytes())
    i = int(head["__metadata__"]["int:i"])
    assert i >= before
    for name, t in values.items():
        assert name.startswith("optimizer.") or (t == i).all()
    return i


def main(built: Path, target: Path) -> int:
    state = api.CheckpointState.load_checkpoint(built / "checkpoint")
    device = api.Module(built / "training_model.onnx", state)
    api.Optimizer(built / "optimizer_model.onnx", device)
    n = device.get_parameters_size(False)

    def save(i: int) -> None:
        device.copy_buffer_to_parameters(np.full(n, i, np.float32), False)
        state.properties["i"] = i
        api.CheckpointState.save_checkpoint(state, target, True)

    save(1)
    last, random = 1, np.random.default_rng(0)
    for _ in range(KILLS):
        child, i = os.fork(), last
        while not child:
            i += 1
            save(i)
        time.sleep(random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = whole(target, last)
    return last


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2])))
