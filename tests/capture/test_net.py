"""State that nothing watches: forward is run again on tensors without values at the 2nd, 10th, 100th... call, and what
differs is said."""

from __future__ import annotations

import copy
import ctypes
import functools
import logging
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

SPACE = types.ModuleType("a_module_of_the_test")
vars(SPACE).update(value=1.0, entered=0, drawn=0)
NUMBER = ctypes.c_double(1.0)


class Net(nn.Module):
    """forward: `rule` computes from a linear layer."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.rule = rule

    def forward(self, x: Tensor) -> Any:
        return self.rule(self, x)


def checked(model: ORTModule) -> list[int]:
    """At which call each capture is compared next."""
    return [c.next_check for c in model._ortmodule.every]


def beside(rule: Callable[..., Any], change: Callable[[int], None], steps: int) -> tuple[list[bool], ORTModule]:
    """Trains beside eager: at which steps they agreed."""
    eager = Net(rule)
    ours = ORTModule(copy.deepcopy(eager))
    agreed = []
    for step in range(steps):
        change(step)
        x = torch.randn(3, 4, dtype=torch.float64)
        found = []
        for m in (eager, ours):
            m.zero_grad()
            out = m(x)
            out.sum().backward()
            found += [out.detach(), m.linear.weight.grad.clone()]
        agreed.append(bool(torch.allclose(found[0], found[2], rtol=1e-12)) and bool(torch.allclose(found[1], found[3], rtol=1e-12)))
    return agreed, ours


def by_computed_name(m: Net, x: Tensor) -> Tensor:
    return m.linear(x) * getattr(SPACE, "val" + "ue")


def by_size_of_a_file(path: str) -> Callable[..., Any]:
    return lambda m, x: m.linear(x) * float(os.stat(path).st_size)


def by_memory(m: Net, x: Tensor) -> Tensor:
    return m.linear(x) if ctypes.string_at(ctypes.addressof(NUMBER), 8) == bytes(ctypes.c_double(1.0)) else torch.tanh(m.linear(x))


@pytest.mark.parametrize(("name", "when"), [("a computed name", 1), ("the size of a file", 5), ("memory read by C", 5)])
def test_state_that_nothing_watches_is_said(name: str, when: int, tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    file = tmp_path / "scale"
    file.write_text("x")
    monkeypatch.setattr(SPACE, "value", 1.0)
    monkeypatch.setattr(NUMBER, "value", 1.0)
    rule, change = {
        "a computed name": (by_computed_name, lambda step: setattr(SPACE, "value", 2.0 if step >= when else 1.0)),
        "the size of a file": (by_size_of_a_file(str(file)), lambda step: file.write_text("xx" if step >= when else "x")),
        "memory read by C": (by_memory, lambda step: setattr(NUMBER, "value", 2.0 if step >= when else 1.0)),
    }[name]
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        agreed, ours = beside(rule, change, 12)
    look = 1 if when == 1 else 9  # the 2nd call, the 10th
    assert agreed == [not when <= step < look for step in range(12)]
    said = [r.getMessage() for r in caplog.records if "no longer does what it did" in r.getMessage()]
    assert len(said) == 1 and "test_net.py:" in said[0]
    (entry,) = ours.report().eager
    assert entry.calls == 12 - look and entry.file.endswith("test_net.py") and "no longer does" in entry.reason


def test_strict_raises_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SPACE, "value", 1.0)
    model = ORTModule(Net(by_computed_name), strict=True)
    x = torch.randn(3, 4, dtype=torch.float64)
    model(x)
    monkeypatch.setattr(SPACE, "value", 2.0)
    with pytest.raises(Exception, match=r"no longer does what it did.*was mul\(%\d+, 1\.0\) and is mul\(%\d+, 2\.0\).*test_net\.py"):
        model(x)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_RECHECK", "0")
    model = ORTModule(Net(by_computed_name))
    model(torch.randn(3, 4, dtype=torch.float64))
    assert checked(model) == [-1] and "ORTMODULE_RECHECK is 0" in str(model.report())


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        vars(SPACE)["entered"] += 1
        return x * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2, None


class Drawn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        vars(SPACE)["drawn"] += 1
        return x * random.random()


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drawn = Drawn()

    def forward(self, x: Tensor) -> Tensor:
        return self.drawn(Scaled.apply(self.linear(x), 2.0)) + self.linear(x)


@functools.lru_cache
def mask(n: int) -> Tensor:
    return torch.ones(n, n).tril()


class Everything(nn.Module):
    """What could leave a trace: state of batch norm, buffers assigned, casts of weights, caches, tensors made from
    values, output."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        y = torch.zeros(4, device=x.device)
        y[1:3] = torch.tensor([1.0, 2.0]).to(x.device)
        with torch.no_grad():
            z = self.body[0].weight.detach().mean()
        if x.device.type != "cpu" or x.is_meta:
            raise AssertionError("stand-ins say where they are")
        print("forward runs")
        part = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return part @ mask(4) + self.plain * y.cpu() + z


class Checkpointed(nn.Module):
    """With PyTorch's Function of its own around what is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=True)  # of what requires no gradient
        return torch.utils.checkpoint.checkpoint(torch.tanh, self.second(h), use_reentrant=True)  # type: ignore[no-any-return]


def transformer(cls: str, **config: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    made: nn.Module = getattr(transformers, cls)(getattr(transformers, cls.partition("For")[0].replace("LMHeadModel", "") + "Config")(**config))
    return made


IDS = torch.randint(0, 50, (2, 12))
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor]]] = {
    "GPT-2": (lambda: transformer("GPT2LMHeadModel", n_layer=2, n_embd=16, n_head=2, vocab_size=50),
              lambda m, i: m(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss),
    "BERT": (lambda: transformer("BertForSequenceClassification", vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                 intermediate_size=32), lambda m, i: m(input_ids=IDS, labels=IDS[:, 0] % 2).loss),
    "Llama in autocast": (lambda: transformer("LlamaForCausalLM", vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                              intermediate_size=32), lambda m, i: autocast(lambda: m(input_ids=IDS, labels=IDS).loss)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten()),
                     lambda m, i: m(torch.randn(2, 3, 6, 6)).sum()),
    "nn.TransformerEncoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
                              lambda m, i: m(torch.randn(2, 5, 8)).sum()),
    "LSTM": (lambda: nn.LSTM(4, 4), lambda m, i: m(torch.randn(5, 2, 4))[0].sum()),
    "parts in PyTorch": (Host, lambda m, i: m(torch.randn(2, 4)).sum()),
    "reentrant checkpoints": (Checkpointed, lambda m, i: m(torch.randn(3, 4)).sum()),
    "everything": (Everything, lambda m, i: m(torch.randn(3, 4)).sum()),
    "other sizes": (Everything, lambda m, i: m(torch.randn(3 + i % 3, 4)).sum()),
}  # fmt: skip


def autocast(run: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run()


@pytest.mark.parametrize("name", MODELS)
def test_no_false_alarm(name: str) -> None:
    made, step = MODELS[name]
    model = ORTModule(made())
    for i in range(11):
        step(model, i).backward()
    assert not [e for e in model.report().eager if "no longer" in e.reason]
    sizes = 2 if name == "other sizes" else 1
    assert len(checked(model)) == sizes and checked(model)[-1] == 100, [c.no_net for c in model._ortmodule.every]


def test_no_trace_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    module = Everything()
    model = ORTModule(module)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    made = model._ortmodule.every[0]
    assert made.net is not None
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    tensors = [*module.parameters(), *module.buffers(), module.plain]

    def state() -> Any:
        return ([t.clone() for t in tensors], [t._version for t in tensors], [dict(m.__dict__) for m in module.modules()],
                torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled(),
                torch.is_autocast_cache_enabled(), torch.compiler.is_compiling(), mask.cache_info())  # fmt: skip

    capsys.readouterr()
    mask.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        before = state()
        assert made.net.check(module) is None
        after = state()
        assert module.body[0](x).device.type == "cpu"  # the cast of the weight in autocast's cache
    for a, b in zip(before[0], after[0], strict=True):
        assert torch.equal(a, b)
    assert before[1] == after[1]
    for a, b in zip(before[2], after[2], strict=True):
        assert a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    assert torch.equal(before[3], after[3]) and before[4:-1] == after[4:-1]
    assert mask.cache_info().currsize == 0
    assert capsys.readouterr().out == ""


def test_what_stays_in_pytorch_is_not_entered_again() -> None:
    model = ORTModule(Host())
    model(torch.randn(2, 4))
    vars(SPACE).update(entered=0, drawn=0)
    for _ in range(10):
        model(torch.randn(2, 4)).sum().backward()
    assert checked(model) == [100] and vars(SPACE)["entered"] == vars(SPACE)["drawn"] == 10


class BehindAFunction(nn.Module):
    """New tensors behind a custom Function, whose own code is entered the first time only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = Scaled.apply(self.layer(x), 2.0)
        return y @ y.T


def test_no_false_alarm_behind_a_function() -> None:
    net = BehindAFunction()
    model = ORTModule(net)
    for _ in range(4):
        model(torch.randn(3, 4)).sum().backward()
    assert not model.report().eager, str(model.report())


class Itself(nn.Module):
    """A call that returns an argument itself, which nothing before it was given."""

    def __init__(self, same: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.same = same

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        index % x.shape[0]
        return self.same(x) * 2


@pytest.mark.parametrize("same", [torch.real, torch.conj, Tensor.contiguous, lambda x: x.to(x.dtype), lambda x: x.real,
                                  lambda x: x.data, lambda x: torch.atleast_1d(x), lambda x: x.expand_as(x)])  # fmt: skip
def test_no_false_alarm_where_a_call_returns_its_argument(same: Callable[[Tensor], Tensor]) -> None:
    model = ORTModule(Itself(same), strict=True)
    for rows in (3, 2, 3, 3, 2, 3, 3, 2, 4, 4):
        model(torch.randn(rows, 4), torch.randint(0, 9, (rows, 5)))
    assert 10 in checked(model) or 100 in checked(model), checked(model)


def adds_to_zeros(m: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    before = h.requires_grad
    h += m.linear(x)
    return h * (2 + before + 4 * h.requires_grad)


def adds_to_what_is_detached(m: Net, x: Tensor) -> Tensor:
    h = m.linear(x).detach()
    scale = 2 if h.requires_grad else 3
    h.mul_(m.linear.weight[0])
    return h * scale


def assigns_to_what_has_an_earlier_view(m: Net, x: Tensor) -> Tensor:
    h = m.linear(x)
    with torch.no_grad():
        v = h.reshape(-1)
    h[0] = v[0]
    return h * 2


@pytest.mark.parametrize("rule", [adds_to_zeros, adds_to_what_is_detached, assigns_to_what_has_an_earlier_view])
def test_no_false_alarm_where_an_edit_makes_a_gradient(rule: Callable[..., Tensor]) -> None:
    """Asked before, the tensor answers as it was before; and what is assigned to it is not so again."""
    agreed, ours = beside(rule, lambda step: None, 11)
    assert all(agreed) and not ours.report().eager and checked(ours) == [100]
