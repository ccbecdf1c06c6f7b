"""What a capture replaces in the process: all is put back, and other threads never see it."""

from __future__ import annotations

import builtins
import copy
import gc
import io
import logging
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy  # noqa: F401  its import, where a capture makes it, adds a filter of warnings
import torch
import torch.fx
import torch.utils._traceback as torch_traceback
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import transformer

from ortmodule import ORTModule, patches
from ortmodule.capture import CaptureError, capture

RECURRENT = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
KEY = torch._C.DispatchKey.CompositeImplicitAutograd


def names() -> dict[str, Any]:
    """Everything that some part of the package replaces while it captures, as it stands now."""
    found: dict[str, Any] = {
        "getattribute": nn.Module.__dict__.get("__getattribute__"),
        "setattr": nn.Module.__dict__["__setattr__"],
        "apply": Function.__dict__["apply"].__func__.__code__,
        "is_compiling": torch.compiler.is_compiling.__code__,
        "is_exporting": torch.compiler.is_exporting.__code__,
        "compiler": sorted(vars(torch.compiler)),
        "flags": (torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag),
        "generator": torch.random.default_generator,
        "modes": (torch.inference_mode.__dict__["__enter__"],
                  torch.autograd.graph.saved_tensors_hooks.__dict__["__enter__"]),
        "open": (builtins.open, io.open),
        "encoder": nn.TransformerEncoder.__dict__["forward"],
        "causal": transformer._detect_is_causal_mask,
        "lines": torch_traceback._extract_symbolized_tb,
        "recompile": torch.fx.GraphModule.__dict__["recompile"],
        "handle": logging.Logger.__dict__["handle"],
        "streams": (sys.stdout, sys.stderr),
        "filters": list(warnings.filters),
        "handlers": [list(h.filters) for h in logging.root.handlers],
        "profile": sys.getprofile(),
        "mine": State.__dict__.get("__getattribute__"),
        "oblivious": torch.fx.experimental._config.backed_size_oblivious,
        "torch.export": logging.getLogger("torch.export").level,
    }
    for op in RECURRENT:
        found[str(op)] = op.py_kernels.get(KEY)
    return found


class State:
    """A class of the user's whose reads are watched."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


STATE = State(2.0)


class Model(nn.Module):
    """meet: called in the middle of forward."""

    def __init__(self, meet: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.meet = [meet]

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) * STATE.scale
        self.meet[0]()
        return torch.tanh(h)


def module_state(m: nn.Module) -> list[Any]:
    return [[{k: v for k, v in sub.__dict__.items()}, *[dict(v) for v in sub.__dict__.values() if isinstance(v, dict)]]
            for sub in m.modules()]  # fmt: skip


class Meant(Exception):
    pass


@pytest.mark.parametrize("error", [Meant, KeyboardInterrupt])
def test_an_error_in_the_middle(error):
    before = names()

    def stop() -> None:
        raise error("meant")

    for model in (Model(stop), nn.Sequential(Model(), Model(stop))):
        state = module_state(model)
        with pytest.raises(error):
            ORTModule(model)(torch.ones(2, 4))
        assert names() == before and not patches.now() and not patches.threads
        assert module_state(model) == state


def test_an_error_in_the_net(monkeypatch):
    """The run on stand-ins replaces other names than a capture."""
    before = names()
    ours = ORTModule(Model())
    x = torch.ones(2, 4)
    ours(x)

    def stop() -> None:
        assert torch.compiler._is_exporting_flag and patches.now()
        raise Meant

    made = ours._ortmodule.every[0]
    ours.module.meet[0] = stop
    assert "Meant" in str(made.net.check(ours.module))
    assert names() == before and not patches.now() and not patches.threads


def test_captures_on_several_threads():
    """Half of them raise in the middle; each gets its own result, and nothing is left."""
    before = names()
    errors: list[Any] = []

    def use(number: int) -> None:
        try:
            def stop() -> None:
                if number % 2:
                    raise Meant

            torch.manual_seed(number)
            model = Model(stop)
            ours = ORTModule(copy.deepcopy(model))
            for rows in (2, 3, 5):
                x = torch.full((rows, 4), 0.1 * number)
                if number % 2:
                    with pytest.raises(Meant):
                        ours(x)
                else:
                    torch.testing.assert_close(ours(x), model(x))
            assert bool(ours.report().graphs) != bool(number % 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert names() == before and not patches.now() and not patches.threads


def test_a_capture_in_a_capture():
    before = names()
    inner: list[Any] = []

    def nested() -> None:
        inner.append(capture(Model(), (torch.ones(2, 4),), {}))

    with pytest.raises(CaptureError):  # torch.export cannot run inside of itself
        capture(Model(nested), (torch.ones(2, 4),), {})
    assert names() == before and not patches.now()
    other = ORTModule(Model())
    ours = ORTModule(Model(lambda: inner.append(other(torch.ones(2, 4)))))
    ours(torch.ones(2, 4))
    assert names() == before and not patches.now() and not patches.threads


def test_other_threads_meet_the_originals():
    """While one thread is in the middle of a trace, another one uses all that is replaced."""
    inside, go_on = threading.Lock(), threading.Event()  # a lock: forward must not be seen to signal
    inside.acquire()
    result: list[Any] = []

    def wait() -> None:
        if inside.locked():
            inside.release()
        assert go_on.wait(60)

    captures = threading.Thread(target=lambda: result.append(ORTModule(Model(wait), strict=True)(torch.ones(2, 4))))
    torch.manual_seed(3)
    x = torch.randn(2, 5, 4)
    lstm, encoder = nn.LSTM(4, 4, batch_first=True), nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()  # fmt: skip
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    state = (torch.zeros(1, 2, 4),) * 2
    mine = Model()

    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -g

    def use() -> list[Any]:
        leaf = torch.ones(3, requires_grad=True)
        Double.apply(leaf).sum().backward()
        traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
        traced.graph.output_node().prepend(traced.graph.call_function(torch.neg, (next(iter(traced.graph.nodes)),)))
        code = "neg" in traced.recompile().src and "neg" in traced.code
        args = (x, state, list(lstm.parameters()), True, 1, 0.0, False, False, True)
        padding = torch.zeros(2, 5, dtype=torch.bool)
        torch.manual_seed(11)
        with torch.no_grad():
            return [leaf.grad, code, lstm(x)[0], torch.ops.aten.lstm.input(*args)[0], encoder(x, mask),
                    encoder(x, src_key_padding_mask=padding), transformer._detect_is_causal_mask(mask, None, 5),
                    torch.compiler.is_compiling(), torch.rand(2), random.Random(1).random(), mine(x), STATE.scale,
                    "test_patches" in str(torch_traceback.CapturedTraceback.extract().summary())]  # fmt: skip

    expected = use()
    captures.start()
    try:
        assert inside.acquire(timeout=60)
        assert patches.threads == {captures.ident} and patches.here() is None and patches.now()
        met = use()
    finally:
        go_on.set()
        captures.join()
    torch.testing.assert_close(met, expected)
    assert result and not patches.now()


def test_layers_may_end_in_any_order():
    class Thing:
        name = "first"

    with patches.scope() as outer:
        outer.replace(Thing, "name", "second")
        with patches.scope() as inner:
            inner.replace(Thing, "name", "third")
            outer.replace(Thing, "other", 1)
            outer.ends.close()  # the outer one goes first
            assert Thing.name == "third" and not hasattr(Thing, "other")
        assert Thing.name == "first"
    assert Thing.name == "first" and not patches.now()
    with pytest.raises(RuntimeError, match="inside of a scope"), patches.replaced(patches.Patch(Thing, "name", "x")):
        pass
    with pytest.raises(TypeError), patches.scope(), patches.replaced(patches.Patch(Thing, "name", "x"),
                                                                     patches.Patch(int, "name", "x")):  # fmt: skip
        pass
    assert Thing.name == "first" and not patches.now() and not patches.threads


class Branches(nn.Module):
    """Stays in PyTorch: it is run for real before the trace of what is around it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if int(x.sum() > 0) else x


def test_a_capture_does_not_wait_for_who_waits_for_it():
    """Forward calls a wrapper whose first call, on another thread, waits for the end of this capture."""
    other = ORTModule(Model())
    x = torch.ones(2, 4)
    gate, once = threading.Lock(), threading.Lock()  # forward must not be seen to start a thread
    gate.acquire()
    thread = threading.Thread(target=lambda: gate.acquire() and other(x), daemon=True)
    thread.start()

    def meet() -> None:
        if not torch.compiler._is_exporting_flag and once.acquire(blocking=False):
            gate.release()
            lock = other._ortmodule.lock
            while lock.acquire(blocking=False):  # until the other thread has it
                lock.release()
        other(x)

    ours = ORTModule(nn.Sequential(Model(meet), Branches()))
    capture_ = threading.Thread(target=lambda: ours(x), daemon=True)
    capture_.start()
    capture_.join(60)
    assert not capture_.is_alive() and once.locked()
    thread.join(60)
    assert not thread.is_alive() and other.report().graphs and not patches.now()


def test_the_garbage_collector_is_no_part_of_forward():
    """A callback of the collector that asks for the time (as hypothesis' does), at every allocation outside of forward."""
    asked = []

    def callback(phase: str, info: dict[str, int]) -> None:
        asked.append(time.perf_counter())

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    try:
        gc.set_threshold(1)
        w = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        w(torch.randn(2, 3)).sum().backward()
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*threshold)
    assert asked and gc.isenabled() and not w.report().eager, str(w.report())
