"""A backward that fails: the exception is eager's, the model is usable afterwards, and later steps have eager's numbers.

Judge: an eager twin to which the same happens. Gradients that the failed backward has left are eager's, or not there.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ortmodule import FallbackPolicy, ORTModule

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("seeded")


class Mine(Exception):
    pass


class Switch:
    """Whether the next backward fails. Copies are the same switch."""

    def __init__(self) -> None:
        self.on = False

    def __deepcopy__(self, memo: Any) -> Switch:
        return self


class Fails(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: Switch) -> Tensor:
        ctx.switch = switch
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.switch.on:
            raise Mine("in backward")
        return grad * 2, None


@torch.library.custom_op("ortmodule_failing::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


OPERATOR = Switch()


def _double_backward(ctx: Any, grad: Tensor) -> Tensor:
    if OPERATOR.on:
        raise Mine("in the operator's backward")
    return grad * 2


double.register_fake(torch.empty_like)
double.register_autograd(_double_backward)


class Net(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.f = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), f

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.f(self.norm(self.a(x)))))


def function(switch: Switch) -> nn.Module:
    return Net(lambda x: Fails.apply(x, switch))


def operator(switch: Switch) -> nn.Module:
    global OPERATOR
    OPERATOR = switch
    return Net(lambda x: double(x))


def parameter_hook(switch: Switch) -> nn.Module:
    return Net(torch.sigmoid)


def module_hook(switch: Switch) -> nn.Module:
    return Net(torch.sigmoid)


def raising(switch: Switch, *_: Any) -> None:
    if switch.on:
        raise Mine("in a hook")


def hooked(kind: str, model: nn.Module, switch: Switch) -> None:
    if kind == "parameter_hook":
        model.a.weight.register_hook(lambda g: raising(switch))
    elif kind == "accumulate_hook":
        model.a.weight.register_post_accumulate_grad_hook(lambda p: raising(switch))
    elif kind == "module_hook":
        model.norm.register_full_backward_hook(lambda m, i, o: raising(switch))


KINDS: dict[str, Callable[[Switch], nn.Module]] = {
    "function": function, "operator": operator, "parameter_hook": parameter_hook, "accumulate_hook": parameter_hook, "module_hook": module_hook,
    "result_hook": parameter_hook}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_exception_in_backward(kind: str) -> None:
    switch = Switch()
    eager = KINDS[kind](switch)
    model = copy.deepcopy(eager)
    for m in (eager, model):
        hooked(kind, m, switch)
    wrapped = ORTModule(model)
    twins = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (wrapped, eager)]
    for step in range(7):
        x, switch.on = torch.randn(5, 6), step in (2, 3, 5)
        found: list[Any] = []
        for m, optimizer in twins:
            optimizer.zero_grad()
            y = m(x)
            if kind == "result_hook":
                y.register_hook(lambda g: raising(switch))
            error = None
            try:
                y.square().sum().backward()
                optimizer.step()
            except Exception as e:
                error = e
            found.append((type(error), str(error), [p.grad for p in m.parameters()], y.detach(),
                          [t.detach().clone() for t in (*m.parameters(), *m.buffers())]))  # fmt: skip
        (ours, our_text, our_grads, our_y, our_state), (theirs, their_text, grads, y_, state) = found
        assert (ours, our_text) == (theirs, their_text) and (ours is Mine) == switch.on, (step, ours, our_text)
        torch.testing.assert_close(our_y, y_, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(our_state, state, rtol=1e-12, atol=1e-12)
        for p, (g, h) in enumerate(zip(our_grads, grads, strict=True)):
            if switch.on and (g is None or h is None):
                continue  # where a backward has stopped, more or fewer have their gradients
            torch.testing.assert_close(g, h, rtol=1e-12, atol=1e-12, msg=f"step {step}, parameter {p}")
    assert not wrapped.report().eager


def test_a_failed_backward_leaves_other_forwards_alone() -> None:
    """Two forwards, the first backward fails: the second has its own state; and the first again is an error as in eager."""
    switch = Switch()
    eager = function(switch)
    wrapped = ORTModule(copy.deepcopy(eager))
    xs = torch.randn(2, 5, 6)
    for m in (wrapped, eager):
        one, two = m(xs[0]), m(xs[1])
        switch.on = True
        with pytest.raises(Mine):
            one.sum().backward()
        switch.on = False
        m.zero_grad()
        two.square().sum().backward()
    for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


class Deep(nn.Module):
    """Much is computed in backward before it fails."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.first, self.switch = nn.Linear(6, 6), switch
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = Fails.apply(torch.tanh(self.first(x)), self.switch)
        for layer in self.layers:
            h = h + nn.functional.gelu(layer(h))
        return h.square().sum()


@pytest.mark.parametrize("retain", [False, True])
def test_the_failed_backward_again(retain: bool) -> None:
    """It was computed from what the failed one had left of the forward's values."""
    switch = Switch()
    eager = Deep(switch).double()
    wrapped = ORTModule(copy.deepcopy(eager))
    x = torch.randn(40, 6, dtype=torch.float64)
    for m in (wrapped, eager):
        loss, switch.on = m(x), True
        with pytest.raises(Mine):
            loss.backward(retain_graph=retain)
        switch.on = False
        m.zero_grad()
        if retain:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
    for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not retain)
        if retain:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", list(FallbackPolicy))
def test_a_failing_backward_is_no_matter_of_the_policy(policy: FallbackPolicy) -> None:
    """Neither repeated by PyTorch nor wrapped, also under FALLBACK_FORCE_TORCH_BACKWARD."""
    switch = Switch()
    wrapped = ORTModule(function(switch), fallback_policy=policy)
    wrapped(torch.randn(5, 6)).sum().backward()
    switch.on = True
    with pytest.raises(Mine, match="^in backward$"):
        wrapped(torch.randn(5, 6)).sum().backward()
    switch.on = False
    wrapped(torch.randn(5, 6)).sum().backward()
    assert not wrapped.report().eager


_NO_MEMORY = """
import json, resource, sys, torch
from torch import nn
from ortmodule import ORTModule, release_memory
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2048, 6144), nn.GELU(), nn.Linear(6144, 2048))
if sys.argv[1] == "engine":
    model = ORTModule(model)
def step(n, limit=False):
    x = torch.randn(n, 2048, generator=torch.Generator().manual_seed(n))
    y = model(x).square().sum()
    if limit:
        release_memory()  # else the gradients of the step before leave enough
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
    try:
        y.backward()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return y.item()
step(4)
model.zero_grad()
error = None
try:
    step(64, True)
except Exception as e:
    error = e
model.zero_grad()
step(8)
print(json.dumps([[c.__name__ for c in type(error).__mro__], str(error)[:200], [float(p.grad.double().norm()) for p in model.parameters()]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as on Linux")
def test_no_memory_in_backward() -> None:
    """The machine refuses memory in the middle of a backward: an exception of the class PyTorch raises, and the next step
    has eager's gradients."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ORTMODULE_GEMM": "own"}
    done = {}
    for who in ("engine", "eager"):
        res = subprocess.run([sys.executable, "-c", _NO_MEMORY, who], capture_output=True, text=True, env=env, timeout=600, check=False)
        assert res.returncode == 0, res.stderr[-3000:]
        done[who] = json.loads(res.stdout.splitlines()[-1])
    (kind, text, grads), (kind_eager, text_eager, grads_eager) = done["engine"], done["eager"]
    assert set(kind_eager) < set(kind) and "MemoryError" in kind, done
    assert all("DefaultCPUAllocator: can't allocate memory" in t for t in (text, text_eager)), done  # as tools look for it
    assert grads == pytest.approx(grads_eager, rel=1e-4)
