"""Memory of a step at its highest moment, above what there was before it: PyTorch's allocator, and the engine's pool."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from ortmodule import _C


def of_torch(run: Callable[[], object]) -> int:
    """Bytes that PyTorch's CPU allocator has handed out at once."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    now = peak = 0
    assert p.profiler is not None and p.profiler.kineto_results is not None
    for e in sorted(p.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if e.name() == "[memory]":
            now += e.nbytes()
            peak = max(peak, now)
    return peak


def of_engine(run: Callable[[], object]) -> int:
    """Bytes of the engine's blocks. All of a step's are, where no node of the graph is left to PyTorch."""
    gc.collect()
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    run()
    return _C.pool_stats()["peak_live"] - before
