"""State that forward reads otherwise than by a name in its code: copies, descriptors, modules by their names, builtins."""

import builtins
import copy
import functools
import importlib
import inspect
import pickle
import sys
import types

import pytest
import torch
from torch import nn

from ortmodule import ORTModule

settings = types.ModuleType("settings_of_this_test")
LIMIT = 1.0


class Config:
    def __init__(self):
        self.value, self.deep = 1.0, {"values": [1.0]}


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1.0


class Act(nn.LeakyReLU):
    pass


@functools.singledispatch
def dispatch(c):
    return 1.0


def limit():
    return LIMIT


READS = {
    "copy": lambda s: copy.copy(s.cfg).value, "deepcopy": lambda s: copy.deepcopy(s.cfg).deep["values"][0], "copy of slots": lambda s: copy.copy(s.slots).value, "copy of a submodule": lambda s: copy.copy(s.act)(torch.tensor(-1.0)), "deepcopy of a submodule": lambda s: copy.deepcopy(s.act)(torch.tensor(-1.0)),
    "copy of a module outside": lambda s: copy.deepcopy(s.hidden[0])(torch.tensor(-1.0)), "pickle": lambda s: pickle.loads(pickle.dumps(s.cfg)).value, "__reduce_ex__": lambda s: s.cfg.__reduce_ex__(4)[2]["value"], "__getattribute__": lambda s: object.__getattribute__(s.cfg, "deep")["values"][0],
    "super": lambda s: super(Config, s.cfg).__getattribute__("value"), "getattr_static": lambda s: inspect.getattr_static(s.cfg, "value"), "descriptor": lambda s: Slots.value.__get__(s.slots), "sys.modules": lambda s: sys.modules["settings_of_this_test"].value, "own module": lambda s: sys.modules[__name__].LIMIT,
    "import_module": lambda s: importlib.import_module("settings_of_this_test").value, "__import__": lambda s: __import__("settings_of_this_test").value, "__globals__": lambda s: limit.__globals__["LIMIT"], "vars of a class": lambda s: vars(Config)["of_class"], "__dict__ of a class": lambda s: type(s.cfg).__dict__["of_class"],
    "builtins": lambda s: NUMBER_OF_THIS_TEST, "on torch": lambda s: torch.number_of_this_test, "singledispatch": lambda s: dispatch(s.cfg),  # noqa: F821
}  # fmt: skip
if hasattr(object, "__getstate__"):
    READS["__getstate__"] = lambda s: s.cfg.__getstate__()["value"]


class Model(nn.Module):
    def __init__(self, read, branches):
        super().__init__()
        self.l, self.cfg, self.slots, self.act, self.hidden, self.read, self.branches = nn.Linear(3, 3), Config(), Slots(), Act(1.0), [Act(1.0)], read, branches

    def forward(self, x):
        if self.branches and x.sum() > 1e6:  # then nothing is compared later on
            x = x / 2
        return self.l(x) * self.read(self)


def change(model, value):
    global LIMIT
    LIMIT = settings.value = model.cfg.value = model.cfg.deep["values"][0] = model.slots.value = model.act.negative_slope = model.hidden[0].negative_slope = value
    Config.of_class = value
    dispatch.register(Config, lambda c: value)
    builtins.NUMBER_OF_THIS_TEST = torch.number_of_this_test = value


@pytest.fixture(autouse=True)
def _places(monkeypatch):
    monkeypatch.setitem(sys.modules, "settings_of_this_test", settings)
    monkeypatch.setattr(builtins, "NUMBER_OF_THIS_TEST", 1.0, raising=False)
    monkeypatch.setattr(torch, "number_of_this_test", 1.0, raising=False)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("name", READS)
def test_what_it_reads_is_what_is_there(name, branches):
    torch.manual_seed(0)
    eager = Model(READS[name], branches).double()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(6):
        x = torch.randn(4, 3, dtype=torch.float64)
        for model in (eager, ours):
            change(model, 1.0 if step < 3 else 5.0)
            model.zero_grad()
            model(x).sum().backward()
        torch.testing.assert_close(ours(x), eager(x))
        torch.testing.assert_close(ours.l.weight.grad, eager.l.weight.grad)


class Stop(BaseException):
    pass


class Stops(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.norm, self.error, self.stop = nn.BatchNorm1d(3), error, False

    def forward(self, x):
        y = self.norm(x)
        if self.stop:
            raise self.error
        return y


@pytest.mark.parametrize("error", [Stop, SystemExit, GeneratorExit, ValueError, StopIteration])
def test_what_happened_before_forward_raised_has_happened(error):
    eager = Stops(error).double()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(5):
        x = torch.randn(5, 3, dtype=torch.float64)
        for model in (eager, ours):
            model.stop = step in (0, 3)
            if model.stop:
                with pytest.raises(error):
                    model(x)
            else:
                model(x).sum().backward()
        torch.testing.assert_close(ours.state_dict(), eager.state_dict())
