"""torch.cuda on the fake device, as far as tests/gpu uses it: so that its code runs before it meets a GPU. Tensors "on
cuda" are ordinary ones.

Clocks show the host's time. A graph holds this project's launches only: torch's own operations inside a capture run at
once. Memory is not checked (gradients that autograd makes are not registered).
"""

from __future__ import annotations

import contextlib
import functools
import time
import types

import torch
from torch.overrides import TorchFunctionMode


class CudaIsHere(TorchFunctionMode):
    """device="cuda" means the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*("cpu" if isinstance(a, str) and a == "cuda" else a for a in args), **kwargs)


class Event:
    def __init__(self, gpu, enable_timing=False):
        self.gpu, self.at, self.passed = gpu, 0.0, True

    def record(self, stream=None):
        self.at, self.passed = time.perf_counter(), not self.gpu.deferred
        self.gpu.events.append(self)

    def query(self):
        return self.passed

    def elapsed_time(self, end):
        assert self.passed and end.passed, "an event was read before the device came there"
        return max((end.at - self.at) * 1e3, 1e-3)


class Stream:
    cuda_stream = 0

    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Graph:
    replay = None


def install(gpu, monkeypatch):
    """Puts the stand-ins into torch.cuda; returns the mode to run under."""
    gpu.events = []

    def synchronize():
        gpu.sync()
        gpu.defer(False)
        for event in gpu.events:
            event.passed = True
        gpu.events.clear()

    @contextlib.contextmanager
    def graph(g):
        with gpu.capture() as g.replay:
            yield

    def debug(mode):
        gpu.unread = {"error": True, "default": False}[mode]

    properties = types.SimpleNamespace(name="Fake GPU", major=9, minor=0)
    stand_ins = dict(
        synchronize=synchronize, graph=graph, CUDAGraph=Graph, Stream=Stream, current_stream=Stream, stream=lambda s: contextlib.nullcontext(),
        Event=functools.partial(Event, gpu), _sleep=lambda cycles: gpu.defer(), set_sync_debug_mode=debug, memory_allocated=lambda: 0,
        empty_cache=lambda: None, is_available=lambda: True, get_device_properties=lambda i: properties,
    )  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, **kw: scaler("cpu", **kw))
    monkeypatch.setattr(torch, "autocast", lambda *args, **kw: contextlib.nullcontext())
    gpu.lib.fake_trust(1)
    return CudaIsHere()
