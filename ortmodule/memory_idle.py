"""Memory that no step is using is given back to the system, without page faults in a steady loop.

The engine keeps the blocks of a step (arena, gradients, outputs) for the next one: a fresh page costs more than what is
computed on it. When no block has come or gone for `keep_memory` seconds, whatever is free is given back: an evaluation,
a second process, or nothing at all has taken the loop's place. One thread of the process waits for that; it sleeps
while there is nothing to give back.

A loop whose steps are further apart than that would pay for every one. So when a step begins after memory was given
back, the process waits twice the time that has passed in between from then on, at most MOST seconds.
"""

from __future__ import annotations

import math
import os
import threading
from time import monotonic

from . import _C

MOST = 120.0
NAP = 3600.0  # at a time: `keep` may have become infinite, which no wait takes


class Idle:
    """One for the process. keep: seconds; the longest that any module asks for counts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As in a fresh process; also in the child of a fork, which has no such thread."""
        self.keep = 0.0
        self.learnt = 0.0
        self.given_back = 0  # how often
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._gone: tuple[float, int] | None = None  # last move before memory was given back, blocks mapped by then

    def arm(self, keep: float) -> None:
        """A step begins. Costs a comparison, but for the first one after a rest."""
        if keep > self.keep:
            self.keep = keep
        if self._wake.is_set() or self.keep == math.inf:
            return
        if self._gone is not None:
            since, _ = self._gone
            self.learnt = min(max(self.learnt, 2 * (monotonic() - since)), MOST)
            self._gone = None
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ortmodule-idle", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            moved, since = _C.pool_stats()["moved"], monotonic()
            while True:
                left = since + max(self.keep, self.learnt) - monotonic()
                if left > 0:
                    threading.Event().wait(min(left, NAP))
                now = _C.pool_stats()
                if now["moved"] != moved:
                    moved, since = now["moved"], monotonic()
                elif monotonic() >= since + max(self.keep, self.learnt):  # may have grown
                    break
            if _C.pool_trim(False):
                self.given_back += 1
                self._gone = since, moved
            self._wake.clear()


idle = Idle()
os.register_at_fork(after_in_child=idle.reset)


def release_memory() -> int:
    """Gives the memory that no step is using back to the system now, rather than when nobody has asked for any for
    `keep_memory` seconds. The next step takes fresh pages. -> bytes."""
    return _C.pool_trim(False)
