"""Runs a script in fresh processes: one, or several ranks that find each other through the environment (gloo,
accelerate, DeepSpeed)."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]


def python_with(package: str, tested: str) -> str:
    """A Python that has the package: this one, or the one named by ORTMODULE_<PACKAGE>; the test is skipped where there
    is none."""
    variable = f"ORTMODULE_{package.upper()}"
    found = os.environ.get(variable) or (sys.executable if importlib.util.find_spec(package) else None)
    return found or pytest.skip(f"{package} is not installed (tested with {tested}): install it here, or let {variable} name a Python that has it")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# gloo's threads let go of a collective's tensors a moment after it, and abort a process that ends meanwhile (PyTorch's;
# ortmodule.checkpoint waits for them): ranks that end do so later
SETTLED = "\nimport time\ntime.sleep(0.3)\n"


def launch(code: str, *args: object, ranks: int = 2, python: str = sys.executable, after: str = SETTLED,
           new: bool = False) -> None:  # fmt: skip
    """Every rank must exit with 0 and print "done" as its last line. after: what a rank runs at its end. new: for a
    program to which it matters what is imported when."""
    port = free_port()
    base = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    running: list[forked.Process | subprocess.Popen[str]] = []
    for rank in range(ranks):
        env = {**base, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else base
        program = code + (after if ranks > 1 else "")
        if python == sys.executable and not new:
            running.append(forked.Process(program, *args, env=env))
        else:
            running.append(subprocess.Popen([python, "-c", program, *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        for rank, process in enumerate(running):
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0 and out.split()[-1:] == ["done"], f"rank {rank}, exit {process.returncode}:\n{out[-500:]}{err[-3000:]}"
    finally:
        for process in running:
            process.kill()


def dtensor():
    """A replicated tensor; needs the fixture `one_process`."""
    import torch
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    return distribute_tensor(torch.ones(5), DeviceMesh("cpu", [0]), [Replicate()])
