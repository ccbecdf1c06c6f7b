"""Calls that go around the wrapper's forward: followed into the engine where they call its submodules, or told."""

from __future__ import annotations

import copy
import logging
import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close, same_state
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.head = nn.Linear(6, 13)
        self.loss = nn.CrossEntropyLoss()

    @property
    def base_model(self) -> nn.Module:
        return getattr(self, "model", self)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.model(ids))
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def replace_forward(model: Any) -> None:
    """As SFTTrainer does: the loss by pieces, from the backbone's hidden states and the head's weight; without labels
    what there was before."""
    before = model.forward
    head = model.head

    def forward(self: Any, ids: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return before(ids)
        hidden = self.base_model(ids).flatten(0, 1)
        rows = labels.flatten()
        total = hidden.new_zeros(())
        for i in range(0, len(rows), 4):
            logits = torch.utils.checkpoint.checkpoint(F.linear, hidden[i : i + 4], head.weight, head.bias,
                                                       use_reentrant=False)  # fmt: skip
            total = total + F.cross_entropy(logits, rows[i : i + 4], reduction="sum")
        return total / len(rows), None

    model.forward = types.MethodType(forward, model)


def ids(n: int = 3) -> Tensor:
    return torch.randint(0, 13, (n, 5))


def test_a_replaced_forward_that_calls_the_backbone(caplog: Any) -> None:
    eager = Model()
    ours = ORTModule(copy.deepcopy(eager))
    inner = ours.module.model
    for m in (ours, eager):
        replace_forward(m)
    assert ours.forward.__func__ is not eager.forward.__func__ and ours.forward is ours.forward
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        for _ in range(12):
            x = ids()
            for m in (ours, eager):
                m.zero_grad()
                m(x, x)[0].backward()
            same_state(ours, eager)
            assert ours.module.model is inner and ours.model is inner  # as the user made it
    report = ours.report()
    assert report.n_captures == 1 and report.node_share == 1 and report.graphs[0].backwards == 11, str(report)
    assert [e.calls for e in report.eager] == [1]  # the first call, which has shown what is called
    assert not [r for r in caplog.records if "nothing has run" in r.getMessage()]
    x = ids()
    close(ours(x), eager(x))  # the forward of before
    assert ours.report().n_captures == 2
    assert list(ours.state_dict()) == list(eager.state_dict())
    del ours.forward
    close(ours(x, x)[0], Model.forward(eager, x, x)[0])


@pytest.mark.parametrize("first", ["trained", "reference"])
def test_a_reference_without_the_adapter_does_not_keep_the_backbone_out(first: str) -> None:
    """As DPOTrainer with a peft_config: one model is its own reference, its adapters off and frozen meanwhile."""
    eager = Model().requires_grad_(False)
    ours = ORTModule(copy.deepcopy(eager))
    for m in (ours, eager):
        replace_forward(m)
    trained = ("model.layers.0.weight", "model.layers.1.bias")

    def passes(m: Any, x: Tensor) -> list[Tensor]:
        def step() -> Tensor:
            for name in trained:
                m.get_parameter(name).requires_grad_(True)
            m.zero_grad()
            loss = m(x, x)[0]
            loss.backward()
            return loss.detach()  # type: ignore[no-any-return]

        def reference() -> Tensor:
            for name in trained:
                m.get_parameter(name).requires_grad_(False)
            with torch.no_grad():
                return m(x, x)[0]  # type: ignore[no-any-return]

        return [f() for f in ((step, reference) if first == "trained" else (reference, step))]

    for _ in range(4):
        x = ids()
        for a, b in zip(passes(ours, x), passes(eager, x), strict=True):
            close(a, b)
        same_state(ours, eager)
    report = ours.report()
    assert report.node_share == 1 and report.graphs[0].backwards == 3 and report.n_captures == 2, str(report)
    assert [e.calls for e in report.eager] == [2 if first == "trained" else 3]  # until the second pass that trains


def test_a_replaced_forward_that_calls_the_one_before() -> None:
    """As accelerate does around autocast: no submodule is touched."""
    eager = Model()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    before = ours.forward
    seen = []

    def forward(*args: Any) -> Any:
        seen.append(type(ours.module.model))
        return before(*args)

    ours.forward = forward
    assert ours.forward is forward
    for _ in range(12):
        x = ids()
        close(ours(x), eager(x))
    assert set(seen) == {Backbone} and ours.report().n_captures == 1 and not ours.report().eager


def test_what_cannot_be_followed_is_said_once(caplog: Any) -> None:
    eager = Model()
    ours = ORTModule(eager)
    backbone, head = eager.model, eager.head  # the function holds them itself
    ours.forward = lambda x: head(backbone(x))
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        for _ in range(25):
            ours(ids()).sum().backward()
    said = [r.getMessage() for r in caplog.records if "nothing has run" in r.getMessage()]
    assert len(said) == 1 and f"of 10 calls nothing has run in the engine: the forward that was assigned to the wrapper ({__file__}:" in said[0]
    (told,) = ours.report().eager
    assert told.calls == 25 and "assigned to the wrapper" in str(ours.report())


class LightningModule(nn.Module):
    """Has the name and the steps by which Lightning's is known."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError

    def log(self, name: str, value: Any) -> None:
        pass


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.criterion = nn.CrossEntropyLoss()
        self.held: Any = [self.model]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        loss = self.criterion(self.model(x).flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss


class Reaches(Lit):
    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0]).square().mean()


class Around(Lit):
    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.held[0](batch[0]).square().mean()


@pytest.mark.parametrize("cls,captures", [(Lit, 1), (Reaches, 1), (Around, 0)])
def test_steps_of_a_lightning_module(cls: Any, captures: int, caplog: Any) -> None:
    import inspect

    eager = cls()
    ours = ORTModule(copy.deepcopy(eager))
    assert isinstance(ours, LightningModule)
    assert inspect.signature(ours.training_step) == inspect.signature(eager.training_step)
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        for i in range(12):
            batch = ids(), ids()
            for m in (ours, eager):
                m.zero_grad()
                m.training_step(batch, i).backward()
            same_state(ours, eager)
    report = ours.report()
    assert report.n_captures == captures, str(report)
    assert sum("nothing has run" in r.getMessage() for r in caplog.records) == (not captures)
    if not captures:
        assert [e.calls for e in report.eager] == [12] and "Around.training_step" in str(report)


def test_copies_and_exceptions() -> None:
    ours = ORTModule(Lit())

    for i in range(3):
        ours.training_step((ids(), ids()), i)
    with pytest.raises(IndexError):
        ours.training_step((ids() + 20, ids()), 3)
    assert type(ours.module.model) is Model and ours.model is ours.module.model
    again = pickle.loads(pickle.dumps(ours))
    twin = copy.deepcopy(ours)
    batch = ids(), ids()
    for m in (again, twin):
        for i in range(2):
            close(m.training_step(batch, i), ours.training_step(batch, i))
        assert m.report().n_captures == 1


def test_a_child_assigned_in_the_step_stays() -> None:
    ours = ORTModule(Model())

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.head(self.model(x))
        if len(x) == 2:
            self.head = nn.Linear(6, 13)
        return out

    ours.forward = types.MethodType(forward, ours)
    for n in (3, 3, 2, 3):
        ours(ids(n))
    assert type(ours.module.head) is nn.Linear and type(ours.module.model) is Backbone
    assert ours.report().n_captures >= 2
