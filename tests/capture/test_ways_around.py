"""State of a module that forward reads or changes by ways around its attributes: its __dict__, vars(), dir(),
object.__getattribute__; its tables of parameters; a buffer that it returns and then replaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

READS: dict[str, Callable[[Any], float]] = {
    "vars": lambda m: vars(m)["scale"],
    "__dict__": lambda m: m.__dict__["scale"],
    "a name that is not there": lambda m: vars(m).get("new", 1.0),
    "is it there": lambda m: 2.0 if "new" in vars(m) else 1.0,
    "all of them": lambda m: sum(v for v in vars(m).values() if type(v) is float),
    "object, __dict__": lambda m: object.__getattribute__(m, "__dict__")["scale"],
    "object": lambda m: object.__getattribute__(m, "scale"),
    "object, a dictionary": lambda m: object.__getattribute__(m, "table")["scale"],
    "vars, a dictionary": lambda m: vars(m)["table"]["scale"],
    "Module": lambda m: nn.Module.__getattribute__(m, "scale"),
    "dir": lambda m: 2.0 if "new" in dir(m) else 1.0,
}


class Reads(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.scale, self.table, self.name = 1.5, {"scale": 1.5}, name

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * READS[self.name](self)


@pytest.mark.parametrize("deep", [False, True], ids=["itself", "a submodule"])
@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_compared(name: str, deep: bool) -> None:
    torch.manual_seed(0)
    eager: Any = nn.Sequential(Reads(name), nn.Tanh()) if deep else Reads(name)
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(8):
        x = torch.randn(3, 4, dtype=torch.float64)
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-12, atol=1e-12)
        for m in (eager, ours):
            m = m[0] if deep else m
            if step == 1:
                m.scale = 2.5
            if step == 3:
                m.new = 7.0
            if step == 5:
                m.table["scale"] = 9.0
    assert not ours.report().eager, str(ours.report())


def _list_of_vars(m: Any, h: Tensor) -> Tensor:
    vars(m)["log"].append(1)
    return h


def _list_made(m: Any, h: Tensor) -> Tensor:
    m.__dict__.setdefault("late", []).append(m.low)
    return h * m.low


def _list_by_object(m: Any, h: Tensor) -> Tensor:
    object.__getattribute__(m, "log").append(1)
    return h


def _new_parameter(m: Any, h: Tensor) -> Tensor:
    m.other.weight = nn.Parameter(m.other.weight.detach() * 0.5)
    return m.other(h)


def _table_of_parameters(m: Any, h: Tensor) -> Tensor:
    m.other._parameters["weight"] = nn.Parameter(m.other.weight.detach() * 0.5)
    return m.other(h)


def _old_buffer(m: Any, h: Tensor) -> Any:
    old = m.low
    m.low = m.low + 1
    return h, old, m.low


def _view_of_old_buffer(m: Any, h: Tensor) -> Any:
    old = m.low.view(1, 1)
    m.low = m.low + 1
    return h, [old]


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list, by vars": _list_of_vars,
    "a list that forward makes": _list_made,
    "a list, by object": _list_by_object,
    "a new parameter": _new_parameter,
    "a new parameter, by the table": _table_of_parameters,
    "a buffer, returned and replaced": _old_buffer,
    "a view of one": _view_of_old_buffer,
}


class Changes(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("low", torch.zeros(1, dtype=torch.float64))
        self.log: list[Any] = []
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return CHANGES[self.name](self, self.layer(x))


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_is_changed(name: str) -> None:
    torch.manual_seed(0)
    eager = Changes(name)
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(5):
        x = torch.randn(3, 4, dtype=torch.float64)
        want, got = eager(x), ours(x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        got = got[0] if isinstance(got, tuple) else got
        got.sum().backward()
        torch.testing.assert_close(dict(ours.state_dict()), dict(eager.state_dict()), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.log, eager.log)
        torch.testing.assert_close(vars(ours).get("late"), vars(eager).get("late"))
