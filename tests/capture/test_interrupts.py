"""Ctrl-C between any two bytecodes of what changes the process for a while: all is as it was afterwards."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortmodule import ORTModule, torch_private


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
