"""A module on several devices, without a GPU: parameters that a test puts "on cuda:0" lie on the CPU, and where the CUDA
engine is off (the default) PyTorch runs what has them. Parts on the CPU run in the engine. What is held: eager's losses
and gradients, and a tree of modules that nobody can tell from the user's. tests/cuda/test_spread_on_fake.py has plans on
several devices."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close
from pairs import step_of_both as step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule import FallbackPolicy, ORTModule, cuda_engine
from ortmodule.capture import CaptureError
from ortmodule.fallback import ORTModuleDeviceException

pytestmark = pytest.mark.usefixtures("seeded", "placed")


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "device_of", lambda t: torch.device(getattr(t, "lies_on", t.device)))
    monkeypatch.setenv("ORTMODULE_CUDA_ENGINE", "0")


def put(module: nn.Module, device: str) -> nn.Module:
    """As module.to(device) does: the same parameters."""
    for t in (*module.parameters(), *module.buffers()):
        t.lies_on = device  # type: ignore[attr-defined]
    return module


class Layer(nn.Module):
    def __init__(self, n: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(n, 2 * n), nn.Linear(2 * n, n), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))

    def twice(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * 2


class Net(nn.Module):
    """embed and layers.1 are the CPU's, layers.0 and head the GPU's; scale belongs to forward itself."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(6, p), Layer(6, p)])
        self.head = nn.Linear(6, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        self.seen += 1
        x = self.head(x) * self.scale
        return x if labels is None else F.cross_entropy(x.flatten(0, 1), labels.flatten())


def spread(net: Any) -> Any:
    put(net.layers[0], "cuda:0")
    put(net.head, "cuda:0")
    return net.double()


def batch(k: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    return torch.randint(0, 11, (2, 5), generator=g), torch.randint(0, 11, (2, 5), generator=g)


def both(make: Any = Net, **options: Any) -> tuple[Any, Any]:
    eager = spread(make())
    return ORTModule(spread(copy.deepcopy(eager)), **options), eager


def test_parts_on_the_cpu_run_in_the_engine(caplog: Any) -> None:
    ours, eager = both()
    tree = [(name, type(m), id(m)) for name, m in ours.module.named_modules()]
    with caplog.at_level(logging.INFO, logger="ortmodule"):
        for k in range(4):
            step(ours, eager, *batch(k))
    assert [(name, type(m), id(m)) for name, m in ours.module.named_modules()] == tree
    assert list(ours.state_dict()) == list(eager.state_dict())
    report = ours.report()
    assert {(g.part, g.forwards, g.backwards) for g in report.graphs} == {("embed", 4, 4), ("layers.1", 4, 4)}
    off = "ORTMODULE_CUDA_ENGINE=0 leaves modules on CUDA devices to PyTorch"
    assert [(p.name, p.device, p.reason) for p in report.parts] == [
        ("embed", "cpu", ""), ("layers.0", "cuda:0", off), ("layers.1", "cpu", ""), ("head", "cuda:0", off), ("unused", "cpu", "")]
    text = str(report)
    assert "it lies on cpu, cuda:0: forward in PyTorch, 3 of 5 parts in the engine" in text
    assert f"  on cuda:0, in PyTorch ({off}): layers.0, head\n" in text and "  on cpu, in the engine: embed, layers.1, unused\n" in text
    assert "nodes of layers.1" in text and not report.eager
    assert report.to_dict()["parts"][1] == {"name": "layers.0", "device": "cuda:0", "reason": off}
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == ["Net lies on cpu, cuda:0: PyTorch runs its forward, the engine embed, layers.1, unused"]
    assert sum("3 of 5 parts" in r.getMessage() for r in caplog.records) == 1  # told once, for all parts


def test_eval_and_no_grad() -> None:
    ours, eager = both(lambda: Net(0.5))
    for m in (ours, eager):
        m.eval()
    for _ in range(2):
        step(ours, eager, *batch())
        with torch.no_grad():
            close(ours(batch()[0]), eager(batch()[0]))
    assert not ours.report().eager


def test_dropout_is_that_of_wrapped_parts() -> None:
    """The same generator, drawn from in the same order, as by wrappers that a user puts there."""
    net = spread(Net(0.4))
    hand = spread(copy.deepcopy(net))
    hand.embed, hand.layers[1] = ORTModule(hand.embed), ORTModule(hand.layers[1])
    ours = ORTModule(net)
    for k in range(3):
        for m in (ours, hand):
            torch.manual_seed(k)
            m.zero_grad()
            m(*batch(k)).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), hand.parameters()) if p.grad is not None)


class Shares(Net):
    """The head's weight is the embedding's, layers.1 is called twice and stands under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.same = self.layers[1]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.embed(ids)))
        x = self.layers[1].twice(self.same(x))  # no forward: PyTorch's
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_what_parts_share() -> None:
    eager = Shares().double()
    ours = ORTModule(copy.deepcopy(eager))
    for m in (ours, eager):
        put(m.layers[0], "cuda:0")
    for k in range(3):
        step(ours, eager, *batch(k))
    counts = {g.part: g.forwards for g in ours.report().graphs}
    assert counts["embed"] == counts["head"] == 3 and sum(counts.values()) == 12, str(ours.report())


class Deferred(Net):
    """Parts are called again in backward: by the attribute, or by the object that forward has met."""

    def __init__(self, how: str) -> None:
        super().__init__(0.5)
        self.how = how

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids))
        again: Any = self.layers[1] if "object" in self.how else lambda x: self.layers[1](x)
        x = checkpoint(again, x, use_reentrant="reentrant" in self.how)
        self.kept, self.given = x.detach(), x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("how", ["object", "attribute", "object reentrant", "attribute reentrant"])
def test_what_backward_computes_again(how: str) -> None:
    """The masks of forward, so eager's under the same seed: such a part is PyTorch's both times."""
    ours, eager = both(lambda: Deferred(how))
    for k in range(3):
        torch.manual_seed(k)
        ours.zero_grad()
        ours(*batch(k)).backward()
        torch.manual_seed(k)
        eager.zero_grad()
        x = eager.embed(batch(k)[0])
        eager(*batch(k)).backward()
        for p, q in zip(ours.parameters(), eager.parameters()):
            close(p.grad, q.grad)
        assert x.requires_grad
    (told,) = ours.report().eager
    assert told.module == "layers.1" and told.calls == 3 and "torch.utils.checkpoint there" in told.reason


def test_hooks_see_what_they_do_in_pytorch() -> None:
    ours, eager = both()
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for i, m in enumerate((ours, eager)):
        for part in (m.layers[1], m.layers[1].up, m.head, m.embed):
            part.register_forward_hook(lambda m, a, out, i=i: seen[i].append((type(m).__name__, out.detach().clone())))
        m.layers[1].register_full_backward_hook(lambda m, gi, go, i=i: seen[i].append(("gradient", go[0].clone())))
        m.layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    for k in range(3):
        step(ours, eager, *batch(k))
    assert len(seen[0]) == len(seen[1]) == 15
    for (a, x), (b, y) in zip(*seen.values()):
        assert a == b
        close(x, y)
    assert {g.part for g in ours.report().graphs} == {"embed", "layers.1"}


def test_moved_later() -> None:
    ours, eager = both()
    step(ours, eager, *batch())
    put(ours, "cpu")  # whole now
    for k in range(2):
        step(ours, eager, *batch(k))
    assert {g.part: g.forwards for g in ours.report().graphs} == {"embed": 1, "layers.1": 1, "": 2} and not ours.report().parts
    ours.module.head = put(copy.deepcopy(eager.head), "cuda:0")
    eager.head = copy.deepcopy(eager.head)
    for k in range(2):
        step(ours, eager, *batch(k))
    report = ours.report()
    assert {g.part: g.forwards for g in report.graphs} == {"embed": 3, "layers.1": 3, "layers.0": 2, "": 2}, str(report)
    assert [p.name for p in report.parts if p.reason] == ["head"] and not report.eager
    ours.module.layers[1] = copy.deepcopy(eager.layers[0])  # another part in the place of one
    eager.layers[1] = copy.deepcopy(eager.layers[0])
    step(ours, eager, *batch())
    report = ours.report()
    assert [g.forwards for g in report.graphs if g.part == "layers.1"] == [1] and not report.eager, str(report)
    assert type(ours.module.layers[1]) is Layer


def test_a_part_that_forward_replaces_stays() -> None:
    ours, eager = both()

    def forward(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
        loss = Net.forward(self, ids, labels)
        self.layers[1] = Layer().double()
        return loss

    ours.module.forward = forward.__get__(ours.module)
    ours(*batch())
    assert type(ours.module.layers[1]) is Layer and ours.module.layers[1].up.weight.abs().sum() != eager.layers[1].up.weight.abs().sum()
    ours(*batch())
    assert {g.part for g in ours.report().graphs} == {"embed", "layers.1"}


def test_copies_and_exceptions() -> None:
    ours, eager = both()
    step(ours, eager, *batch())
    with pytest.raises(IndexError):
        ours(batch()[0] + 20)
    assert type(ours.module.embed) is nn.Embedding and type(ours.module.layers[1]) is Layer
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        step(spread(twin), copy.deepcopy(eager), *batch(1))
        assert {g.part for g in twin.report().graphs} == {"embed", "layers.1"}


def test_a_wrapped_part_stays_what_it_is() -> None:
    ours, eager = both()
    own = ours.module.layers[1] = ORTModule(ours.module.layers[1])
    for k in range(2):
        step(ours, eager, *batch(k))
    assert ours.module.layers[1] is own and own.report().graphs[0].forwards == 2
    assert [p.reason for p in ours.report().parts if p.name == "layers.1"] == ["it is an ORTModule already, with a report of its own"]


def test_what_cannot_be_captured_in_a_part_is_named() -> None:
    class Odd(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.from_numpy(x.detach().numpy())

    ours, eager = both()
    for m in (ours, eager):
        m.layers[1].__class__ = Odd
        step(m, m, *batch())
    for k in range(2):
        step(ours, eager, *batch(k))
    (told,) = ours.report().eager
    assert told.module.startswith("layers.1") and "numpy" in told.reason and told.calls == 4


class Sealed(type):
    def __new__(mcs, name: str, bases: Any, namespace: Any) -> Any:
        if any(isinstance(b, Sealed) for b in bases):
            raise TypeError("final")
        return super().__new__(mcs, name, bases, namespace)


class Final(Layer, metaclass=Sealed):
    pass


def test_a_class_that_nobody_can_derive_from() -> None:
    ours, eager = both()
    for m in (ours, eager):
        m.layers[1].__class__ = Final
    for k in range(2):
        step(ours, eager, *batch(k))
    assert [p.reason for p in ours.report().parts if p.name == "layers.1"] == ["ORTModule cannot make a subclass of Final and ORTModule: final"]


def test_what_the_options_forbid() -> None:
    def call(**options: Any) -> None:
        ORTModule(spread(Net()), **options)(*batch())

    with pytest.raises(CaptureError, match="strict: parameters and buffers lie on cpu, cuda:0, so PyTorch would run forward"):
        call(strict=True)
    with pytest.raises(CaptureError, match="min_coverage: .*; without min_coverage it does"):
        call(min_coverage=0.5)
    with pytest.raises(ORTModuleDeviceException, match="Net: ORTModule supports a single device per model, and it has cpu, cuda:0"):
        call(fallback_policy=FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL)
    with pytest.raises(RuntimeError, match="memory_budget cannot be kept for Net: its parameters and buffers lie on cpu, cuda:0"):
        call(memory_budget="1 GB")
    call(fallback_policy=FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE)
    off = ORTModule(spread(Net()), disable=True)
    off(*batch())
    assert [e.reason for e in off.report().eager] == ["switched off by ORTMODULE_DISABLE"] and not off.report().parts


def test_devices_that_the_engine_does_not_know() -> None:
    """As before: no parts beside them, PyTorch has the error."""
    ours, eager = both()
    for m in (ours, eager):
        m.layers[0].to("meta")
        with pytest.raises(Exception) as raised:
            m(*batch()).backward()
        m.error = str(raised.value)
    assert ours.error == eager.error and not ours.report().parts


def test_accelerates_hooks() -> None:
    """AlignDevicesHook, as dispatch_model puts it on every module of a device_map: in the place of forward."""
    hooks = pytest.importorskip("accelerate.hooks")
    ours, eager = both()
    for m in (ours.module, eager):
        for part in (m.embed, m.layers[0], m.layers[1], m.head):
            hooks.add_hook_to_module(part, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=False))
        hooks.add_hook_to_module(m, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    for k in range(3):
        step(ours, eager, *batch(k))
    # what accelerate makes at the first call of a hook in a process it keeps as an attribute of a function: that call is PyTorch's
    graphs, eager_calls = {g.part: g.forwards for g in ours.report().graphs}, [(e.calls, e.reason) for e in ours.report().eager]
    first = sum(calls for calls, reason in eager_calls if "fills a dictionary" in reason)
    assert len(eager_calls) == first <= 1 and graphs == {"embed": 3 - first, "layers.1": 3}, str(ours.report())


class Counts(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(ids, labels)


def test_buffers_that_forward_assigns(caplog: Any) -> None:
    ours, eager = both(Counts)
    judged = []
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        for k in range(3):
            step(ours, eager, *batch(k))
            judged.append(ours._ortmodule.spread)
    assert len(set(map(id, judged))) == 1 and len(caplog.records) == 1 and not ours.report().eager


class Elsewhere(Net):
    """A part gets an argument from a device that it does not lie on, or returns a result there."""

    def forward(self, ids: Tensor, back: bool) -> Tensor:
        x = self.embed(ids)
        return self.layers[1](x.to("meta")) if not back else self.layers[1](x)


def test_an_argument_on_another_device_is_pytorchs_error() -> None:
    ours, eager = both(Elsewhere)
    step(ours, eager, batch()[0], True)
    said = []
    for m in (ours, eager):
        with pytest.raises(RuntimeError) as raised:
            m(batch()[0], False)
        said.append(str(raised.value))
    assert said[0] == said[1] and "meta" in said[0]
    step(ours, eager, batch()[0], True)
    assert not ours.report().eager


def test_a_result_on_another_device() -> None:
    class Away(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.to("meta")

    ours = ORTModule(Away())
    for _ in range(3):
        y, away = ours(torch.randn(2, 6))
        y.sum().backward()
        assert away.device.type == "meta"
    (told,) = ours.report().eager
    assert told.reason == "forward returns a tensor on meta, the module lies on cpu"


def test_profile_and_memory() -> None:
    ours, eager = both()
    profile = ours.profile(lambda: ours(*batch()).backward(), steps=2)
    assert {row.what for row in profile.rows} and profile.steps >= 1
    assert ours.memory_timeline() is not None


def test_captures_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager = both(capture_seconds=1e-6)
    for k in range(2):
        step(ours, eager, *batch(k))
    told = ours.report().eager
    assert {e.module for e in told} == {"embed", "layers.1"} and all("ORTMODULE_CAPTURE_SECONDS" in e.reason for e in told)
    assert len(ours.report().failed) == 1  # the second part had no time left to begin


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_device_without_kernels_or_driver_is_pytorchs(switch: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("ORTMODULE_CUDA_ENGINE", switch)
    why = "ORTMODULE_CUDA_ENGINE=0" if switch == "0" else "NVIDIA driver|built without CUDA"  # (other tests may have loaded a stand-in for the driver)
    x = torch.randn(3, 6)
    ours = ORTModule(put(Layer(), "cuda:0"))
    for _ in range(3):
        torch.testing.assert_close(ours(x), ours.module(x))
    (entry,) = ours.report().eager
    assert entry.calls == 3 and re.search(why, entry.reason) and not ours.report().failed, ours.report()
    assert sum(r.levelno >= logging.WARNING for r in caplog.records) == 1
    with pytest.raises(CaptureError, match=why):
        ORTModule(put(Layer(), "cuda:0"), strict=True)(x)
    put(ours.module, "cpu")._apply(torch.clone)  # as .to(device) does
    torch.testing.assert_close(ours(x), ours.module(x))
    assert [g.forwards for g in ours.report().graphs] == [1], ours.report()
