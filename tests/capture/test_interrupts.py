"""Ctrl-C between any two bytecodes of what changes the process for a while, and a fork in the midst of it: all is as it
was afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.overrides
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch.autograd import grad_mode

from ortmodule import ORTModule, interrupts, patches, quiet, torch_private, watch

BEFORE = logging.Logger.handle, sys.stdout, sys.stderr
INSIDE = "ORTMODULE_TEST_INSIDE"


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """In a process of its own: what PyTorch itself may leave of a block that was interrupted is nobody else's."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if os.environ.get(INSIDE):
            return test(**fixtures)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"{__file__}::{test.__name__}"]
        env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, INSIDE: "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]

    return run


class Interrupts:
    """Raises KeyboardInterrupt at the n-th bytecode of functions of these files."""

    def __init__(self, n: int, *files: str) -> None:
        self.n, self.files = n, files
        self.left = n

    def _trace(self, frame: Any, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = True
        self.left -= event != "return"
        if not self.left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace

    def run(self, run: Callable[[], Any]) -> BaseException | None:
        """-> what was raised: its frames are kept, so nothing ends only because they go."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            run()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(before)
        return None


def everywhere(run: Callable[[], Any], after: Callable[[], None], *files: str) -> int:
    """-> at how many places it was interrupted."""
    for n in itertools.count(1):
        interrupts = Interrupts(n, *files)
        error = interrupts.run(run)
        after()
        if interrupts.left > 0:
            assert error is None
            return n - 1
    raise AssertionError


class Thing:
    here = 1

    def __init__(self) -> None:
        self.own = 1


THING, TABLE = Thing(), {"here": 1}


@interrupts.whole
def nested() -> None:
    """Names of all kinds of owners, twice over each other, ends in another order than their beginnings."""
    with patches.scope(exporting=True) as outer:
        outer.replace(Thing, "here", 2)
        with patches.silent(), patches.scope(deadline=1.0) as inner:
            with patches.no_collector():
                inner.replace(Thing, "here", 3)
                outer.replace(TABLE, "here", 2)
                outer.replace(TABLE, "there", 2)
                outer.ends.close()
                seen = Thing.here, dict(TABLE), gc.isenabled()
            with patches.replaced(patches.Patch(THING, "own", 4), patches.Patch(nn.Module, "ours", 5)):
                scope = patches.here()
                assert scope is not None and scope.exporting and scope.deadline == 1.0
                assert THING.own == 4 and nn.Module.ours == 5 and sys.stdout is not BEFORE[1]
    assert seen == (3, {"here": 1}, False)


def as_it_was() -> None:
    assert (logging.Logger.handle, sys.stdout, sys.stderr) == BEFORE
    assert vars(Thing)["here"] == 1 and vars(THING) == {"own": 1} and TABLE == {"here": 1} and "ours" not in vars(nn.Module)
    assert gc.isenabled() and not patches.now() and not patches.threads and patches.here() is None
    assert not patches._lock._is_owned()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is let go
@apart
def test_names(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BEFORE", (logging.Logger.handle, sys.stdout, sys.stderr))

    def after() -> None:
        as_it_was()
        nested()
        as_it_was()

    assert everywhere(nested, after, patches.__file__, interrupts.__file__, contextlib.__file__) > 500


@apart
def test_the_level_of_vmap():
    def after() -> None:
        y = nn.Linear(2, 2)(torch.ones(1, 2)).sum()
        y.backward()  # an error inside of vmap
        assert torch_private.vmap_level(()) == 0

    torch_private.vmap_level(())
    assert everywhere(lambda: torch_private.vmap_level(()), after, torch_private.__file__)

    def call(frame: Any, event: str, arg: Any) -> None:
        if event == "c_return" and "vmapmode" in getattr(arg, "__name__", ""):
            sys.setprofile(None)
            raise KeyboardInterrupt

    x, model = torch.randn(2, 4), ORTModule(nn.Linear(4, 4))
    loss = model(x).sum()
    sys.setprofile(call)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            loss.backward()
    finally:
        sys.setprofile(None)
    after()


class Model(nn.Module):
    """meet: called in the middle of forward."""

    def __init__(self, meet: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.meet = [meet]

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.meet[0]()
        with torch.no_grad():
            scale = h.abs().amax()
        return torch.tanh(self.norm(h)) / scale


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@apart
def test_a_capture():
    """Where blocks of ours and of PyTorch begin and end. What is left shows at once, but for what a trace would meet."""
    files = [patches.__file__, interrupts.__file__, quiet.__file__, watch.__file__, contextlib.__file__,
             torch.overrides.__file__, torch.utils._python_dispatch.__file__, grad_mode.__file__]  # fmt: skip
    x = torch.randn(2, 4)
    ORTModule(Model())(x).sum().backward()

    def state() -> list[Any]:
        return [*[(owner, name, id(value)) for owner, name, value in torch_private.names_of_export()],
                torch_private.modes_of_thread(), sys.getprofile(), gc.isenabled(), patches.now(), patches.threads,
                patches._lock._is_owned(), logging.Logger.handle, sys.stdout, sys.stderr,
                [list(h.filters) for h in logging.root.handlers], logging.getLogger("torch.export").level,
                *[signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)]]  # fmt: skip

    before = state()
    every = Interrupts(10**9, *files)
    assert every.run(lambda: ORTModule(Model())(x)) is None
    n_all = 10**9 - every.left
    assert n_all > 1000
    for k in range(40):
        interrupts_ = Interrupts(1 + k * n_all // 40, *files)
        model = ORTModule(Model())
        error = interrupts_.run(lambda model=model: model(x))
        assert state() == before, (k, error)
        torch.testing.assert_close(model(x), model.module(x))
        model(x).sum().backward()
        assert model.fc.weight.grad is not None
    assert model.report().graphs


@apart
def test_a_fork_while_another_thread_captures():
    """The child uses PyTorch, a wrapper that was captured before, the one that is being captured, and a new one."""
    inside, go_on = threading.Lock(), threading.Event()  # a lock: forward must not be seen to signal
    inside.acquire()

    def wait() -> None:
        if inside.locked():
            inside.release()
        assert go_on.wait(60)

    used, caught, x = ORTModule(Model()), ORTModule(Model(wait)), torch.randn(3, 4)
    used(x).sum().backward()
    before = torch_private.names_of_export()
    thread = threading.Thread(target=lambda: caught(x).sum().backward())
    thread.start()
    reads, writes = os.pipe()
    try:
        assert inside.acquire(timeout=60) and patches.now() and not gc.isenabled()
        pid = os.fork()
        if not pid:
            try:
                torch.set_num_threads(1)  # OpenMP's threads are no child's: PyTorch alone hangs, too
                go_on.set()
                assert gc.isenabled() and not patches.now() and not patches.threads
                assert [v for *_, v in torch_private.names_of_export()] == [v for *_, v in before]
                plain = Model()
                plain(x).sum().backward()
                for model in (used, caught, ORTModule(plain)):
                    torch.testing.assert_close(model(x), model.module(x))
                    model(x).sum().backward()
                    assert model.report().graphs, str(model.report())
                os.write(writes, b"fine")
            except BaseException:
                os.write(writes, traceback.format_exc().encode())
            finally:
                os._exit(0)
        deadline = time.monotonic() + 60
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
    finally:
        go_on.set()
        thread.join()
        os.close(writes)
    with os.fdopen(reads, "rb") as f:
        said = f.read().decode()
    assert said == "fine", said
    torch.testing.assert_close(caught(x), caught.module(x))
