"""Processes that begin with PyTorch, what it imports at a first capture and some packages behind them: forked by a server
that has done that once. Three to ten seconds of processor time less for each than with a Python of its own. What is
tried is the same where the beginning itself is not tried: ORTModule has captured nothing, the engine has not run, no
thread was started.

    with forked.Process(code, "argument", env={...}) as process:
        out, err = process.communicate(timeout=60)

This file is the server's program as well: `python tests/forked.py <descriptor of its socket> <packages>`."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transformers", "deepspeed", "accelerate", "lightning", "trl", "peft")  # begun with where the code imports them
AT_START = ("LD_", "OMP_", "MKL_", "ORTMODULE_ISA", "ORTMODULE_GEMM", "PYTHONPATH", "DS_ACCELERATOR")  # read before a program could change them

# --- the server: one for what a process begins with, ends with the process that asked for it -------------------------


def warm(packages: list[str]) -> None:
    """Imports the packages and what torch.export does; traces once, so that its tables are filled."""
    import torch

    importlib.import_module("ortmodule.module")
    for package in packages:
        importlib.import_module(package)
    if "transformers" in packages:
        importlib.import_module("transformers.modeling_utils")
    if "deepspeed" in packages:
        importlib.import_module("deepspeed.runtime.engine")
    x = torch.ones(2, 5, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Tanh())
    torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},), strict=False)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


def serve(asks: socket.socket) -> dict:
    """Forks for every request; returns in the child, with the request."""
    running: dict[int, int] = {}  # process: where its status goes
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False), os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w)
    while True:
        ready, _, _ = select.select([asks, wake_r], [], [])
        if wake_r in ready:
            os.read(wake_r, 65536)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                os.write(running[pid], os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
                os.close(running.pop(pid))
        if asks in ready:
            said, fds, _, _ = socket.recv_fds(asks, 1, 4)
            if not said:  # nobody asks any more
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            text, out, err, status_to = fds
            pid = os.fork()
            if pid:
                os.write(status_to, pid.to_bytes(4, "little"))
                running[pid] = status_to
                for fd in (text, out, err):
                    os.close(fd)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (wake_r, wake_w, status_to, *running.values()):
                os.close(fd)
            asks.close()
            os.dup2(out, 1), os.dup2(err, 2)
            with os.fdopen(text) as f:
                request: dict = json.load(f)
            for fd in (out, err):
                os.close(fd)
            return request


def begin(request: dict) -> str:
    """Makes this process what a Python of its own would be, and returns the program."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["-c", *request["args"]]
    sys.path[0] = ""
    return request["code"]


# --- who asks -----------------------------------------------------------------------------------------------------------

_servers: dict[tuple, socket.socket] = {}


def _server(env: dict[str, str], packages: tuple[str, ...]) -> socket.socket:
    fixed = tuple(sorted((k, v) for k, v in env.items() if k.startswith(AT_START)))
    key = (os.getpid(), fixed, packages)
    if key not in _servers:
        ours, theirs = socket.socketpair()
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), *packages]
        subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        _servers[key] = ours
        atexit.register(ours.close)
    return _servers[key]


class Process:
    """Like subprocess.Popen([sys.executable, "-c", code, *args], env=, cwd=) with pipes of text: pid, returncode,
    communicate(), wait(), kill()."""

    def __init__(self, code: str, *args: object, env: dict[str, str] | None = None, cwd: str | os.PathLike[str] | None = None) -> None:
        env = {**(os.environ if env is None else env)}
        packages = tuple(p for p in PACKAGES if f"import {p}" in code or f"from {p}" in code)
        self.returncode: int | None = None
        self._out, self._err, text = tempfile.TemporaryFile(), tempfile.TemporaryFile(), tempfile.TemporaryFile()
        text.write(json.dumps({"code": code, "args": list(map(str, args)), "env": env, "cwd": str(cwd or os.getcwd())}).encode())
        text.flush(), text.seek(0)
        self._status, status_to = os.pipe()
        try:
            socket.send_fds(_server(env, packages), [b"."], [text.fileno(), self._out.fileno(), self._err.fileno(), status_to])
        finally:
            os.close(status_to)
            text.close()
        said = os.read(self._status, 4)
        assert len(said) == 4, f"no process with {packages} to begin with: the server ended"
        self.pid = int.from_bytes(said, "little")

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
            said = os.read(self._status, 4)
            os.close(self._status)
            assert len(said) == 4, "the server of forked programs ended before the program did"
            self.returncode = int.from_bytes(said, "little", signed=True)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read().decode(), self._err.read().decode()

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(30)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def run(code: str, *args: object, env: dict[str, str] | None = None, cwd: str | os.PathLike[str] | None = None, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, ...)."""
    with Process(code, *args, env=env, cwd=cwd) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(["-c", *map(str, args)], process.wait(), out, err)


if __name__ == "__main__":
    warm(sys.argv[2:])
    _program = begin(serve(socket.socket(fileno=int(sys.argv[1]))))
    for _name in [n for n in globals() if n == "__file__" or not n.startswith("__") and n != "_program"]:
        del globals()[_name]
    __doc__ = None
    exec(compile(_program, "<string>", "exec"))
