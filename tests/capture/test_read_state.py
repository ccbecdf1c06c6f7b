"""Python state that is easily overlooked: forward reads it, and it is none of the attributes, globals and containers of
tests/test_python_state.py. A wrapped module follows it as eager PyTorch does."""

from __future__ import annotations

import collections
import contextvars
import copy
import decimal
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.watch.table import FUNCTIONS

log = logging.getLogger("test_read_state")


def scale(x: Tensor, by: float = 2.0, *, plus: float = 0.0) -> Tensor:
    return x * by + plus


def other(x: Tensor, by: float = 2.0, *, plus: float = 0.0) -> Tensor:
    return x * by * by - plus


class Meta(type):
    flag = 1.0


class Net(nn.Module, metaclass=Meta):
    def __init__(self, rule: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act: nn.Module = First()
        self.rule = rule
        self.a = self.b = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, self.linear(x))


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Second(First):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


LOCAL = threading.local()
LOCAL.n = 0.0
EVENT = threading.Event()
LOCK = threading.Lock()
SEMAPHORE = threading.Semaphore(1)
ORDERED = collections.OrderedDict(a=1.0, b=2.0)
FIVE = decimal.Decimal(5)
PLAIN_DICT = {"a": 1.0, "b": 2.0}


def _move(step: int) -> None:
    ORDERED.move_to_end("a" if step % 2 else "b")


def _lock(step: int) -> None:
    LOCK.acquire() if step % 2 else LOCK.locked() and LOCK.release()


def _semaphore(step: int) -> None:
    SEMAPHORE.acquire() if step % 2 else step and SEMAPHORE.release()


def _reorder(step: int) -> None:
    PLAIN_DICT["a" if step % 2 else "b"] = PLAIN_DICT.pop("a" if step % 2 else "b")


def _set(owner: Any, name: str, values: Any) -> Callable[[int], None]:
    return lambda step: setattr(owner, name, values[step % 2])


def _flag(step: int) -> None:
    if step % 2:
        scale.special = True  # type: ignore[attr-defined]
    else:
        vars(scale).pop("special", None)


def _later(step: int) -> None:
    (EVENT.set if step % 2 else EVENT.clear)()


def _precision(step: int) -> None:
    decimal.getcontext().prec = 3 if step % 2 else 28


def _depth(step: int) -> None:
    sys.setrecursionlimit(LIMIT + step % 2)


def _environment(step: int) -> None:
    if step % 2:
        os.environ["TEST_READ_STATE"] = "1"
    else:
        os.environ.pop("TEST_READ_STATE", None)


def _thread(step: int) -> None:
    threading.current_thread().name = NAMES[step % 2]


def _in_context(step: int) -> None:
    CONTEXT.get()["k"] = step % 2


def _kwdefaults(step: int) -> None:
    scale.__kwdefaults__["plus"] = float(step % 2)  # type: ignore[index]


LIMIT = sys.getrecursionlimit()
NAMES = threading.current_thread().name, "of the test"
CONTEXT: contextvars.ContextVar[dict[str, int]] = contextvars.ContextVar("CONTEXT", default={"k": 0})  # noqa: B039
COMPLEX = 1 + 0j
CODES = scale.__code__, other.__code__

# what forward does with the result of a layer; what happens between steps
STATE: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[int], None]]] = {
    "attribute of a function": (lambda m, x: x * scale.n, _set(scale, "n", (1.0, 2.0))),  # type: ignore[attr-defined]
    "attribute of a function that comes and goes": (
        lambda m, x: x * 3 if getattr(scale, "special", False) else x, _flag),
    "hasattr of a function": (lambda m, x: x * 3 if hasattr(scale, "special") else x, _flag),
    "defaults of a function": (lambda m, x: scale(x), _set(scale, "__defaults__", ((2.0,), (5.0,)))),
    "keyword defaults of a function": (lambda m, x: scale(x), _set(scale, "__kwdefaults__",
                                                                    ({"plus": 0.0}, {"plus": 1.0}))),
    "keyword defaults edited": (lambda m, x: scale(x), _kwdefaults),
    "code of a function": (lambda m, x: scale(x), _set(scale, "__code__", CODES)),
    "attribute of the metaclass": (lambda m, x: x * type(m).flag, _set(Meta, "flag", (1.0, 3.0))),
    "threading.local": (lambda m, x: x + LOCAL.n, _set(LOCAL, "n", (0.0, 1.0))),
    "Event.is_set": (lambda m, x: x * 2 if EVENT.is_set() else x, _later),
    "Lock.locked": (lambda m, x: x * 2 if LOCK.locked() else x, _lock),
    "Semaphore": (lambda m, x: x * (2 + SEMAPHORE._value), _semaphore),
    "OrderedDict.move_to_end": (lambda m, x: x * next(iter(ORDERED.values())) + list(ORDERED.values())[1] / 3, _move),
    "order of a dictionary": (lambda m, x: x * next(iter(PLAIN_DICT.values())), _reorder),
    "isEnabledFor": (lambda m, x: x * 2 if log.isEnabledFor(logging.DEBUG) else x,
                     lambda step: log.setLevel(logging.DEBUG if step % 2 else logging.ERROR)),
    "isEnabledFor, of a parent": (lambda m, x: x * 2 if log.isEnabledFor(logging.WARNING) else x,
                                  lambda step: logging.disable(logging.CRITICAL if step % 2 else logging.NOTSET)),
    "getEffectiveLevel": (lambda m, x: x * (1 + log.getEffectiveLevel()),
                          lambda step: log.setLevel(logging.DEBUG if step % 2 else logging.ERROR)),
    "level of a logger": (lambda m, x: x * (1 + log.level),
                          lambda step: log.setLevel(logging.DEBUG if step % 2 else logging.ERROR)),
    "decimal context": (lambda m, x: x * float(decimal.Decimal(1) / 3), _precision),
    "decimal context, by a number": (lambda m, x: x * float(FIVE / 3), _precision),
    "recursion limit": (lambda m, x: x * (sys.getrecursionlimit() - LIMIT + 1), _depth),
    "the environment": (lambda m, x: x * sum(k == "TEST_READ_STATE" for k in os.environ), _environment),
    "the environment, copied": (lambda m, x: x * len(os.environ.copy().get("TEST_READ_STATE", "")), _environment),
    "how much is in the environment": (lambda m, x: x * len(os.environ), _environment),
    "the environment as bytes": (lambda m, x: x * len(os.environb.get(b"TEST_READ_STATE", b"")), _environment),
    "name of the thread": (lambda m, x: x * len(threading.current_thread().name), _thread),
    "what is in a ContextVar": (lambda m, x: x * CONTEXT.get()["k"], _in_context),
    "the sign of zero in a complex number": (
        lambda m, x: x * 2 if str(COMPLEX) == "(1+0j)" else x, _set(sys.modules[__name__], "COMPLEX", (1 + 0j, complex(1, -0.0)))),
}


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    scale.__defaults__, scale.__kwdefaults__, scale.__code__ = (2.0,), {"plus": 0.0}, CODES[0]
    vars(scale).clear()
    log.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
    decimal.getcontext().prec = 28
    sys.setrecursionlimit(LIMIT)
    _environment(0)
    _thread(0)
    LOCK.locked() and LOCK.release()
    Meta.flag = 1.0


def beside(eager: Net, change: Callable[[int], None], n: int = 6, ours: ORTModule | None = None) -> ORTModule:
    ours = ORTModule(copy.deepcopy(eager), recheck=False) if ours is None else ours
    for step in range(n):
        change(step)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(ours(x), eager(x), msg=lambda m, s=step: f"step {s}: {m}")
    return ours


@pytest.mark.parametrize("name", STATE)
def test_state(name: str) -> None:
    rule, change = STATE[name]
    ours = beside(Net(rule), change)
    assert not ours.report().eager and len(ours.report().graphs) == 2, str(ours.report())


def test_class_of_a_submodule() -> None:
    eager = Net(lambda m, x: m.act(x))
    ours = ORTModule(copy.deepcopy(eager), recheck=False)

    def change(step: int) -> None:
        eager.act.__class__ = ours.act.__class__ = (First, Second)[step % 2]

    beside(eager, change, ours=ours)
    assert len(ours.report().graphs) == 2 and not ours.report().eager


def test_class_of_the_module_in_a_list() -> None:
    """Deep in the tree."""
    eager = Net(lambda m, x: m.act(x))
    eager.act = nn.Sequential(First(), nn.Sequential(First()))
    ours = ORTModule(copy.deepcopy(eager), recheck=False)

    def change(step: int) -> None:
        for m in (eager, ours):
            m.act[1][0].__class__ = (First, Second)[step % 2]

    beside(eager, change, ours=ours)


def test_identity_of_equal_lists() -> None:
    eager = Net(lambda m, x: x * 2 if m.a is m.b else x)
    ours = ORTModule(copy.deepcopy(eager), recheck=False)

    def change(step: int) -> None:
        for m in (eager, ours):
            m.b = [1, 2] if step % 2 else m.a

    beside(eager, change, ours=ours)
    assert ours.report().graphs


def test_threads_have_their_own_values() -> None:
    """What another thread has set there is not this one's."""
    eager = Net(lambda m, x: x + getattr(LOCAL, "own", 0.0))
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    x = torch.ones(1, 3)
    found: list[Tensor] = []

    def elsewhere() -> None:
        LOCAL.own = 7.0
        found.extend((ours(x), eager(x)))

    for _ in range(2):
        torch.testing.assert_close(ours(x), eager(x))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        torch.testing.assert_close(found[-2], found[-1])


def test_which_thread_it_is() -> None:
    eager = Net(lambda m, x: x * 2 if threading.current_thread() is threading.main_thread() else x)
    ours = ORTModule(copy.deepcopy(eager), recheck=False)
    x = torch.ones(1, 3)
    found: list[Tensor] = []
    for _ in range(2):
        torch.testing.assert_close(ours(x), eager(x))
        thread = threading.Thread(target=lambda: found.extend((ours(x), eager(x))))
        thread.start()
        thread.join()
        torch.testing.assert_close(found[-2], found[-1])


def test_the_collector_rests_while_a_capture_runs() -> None:
    ours = beside(Net(lambda m, x: x * 2 if gc.isenabled() else x), lambda step: None)
    assert ours.report().eager


def test_functions_cost_one_row() -> None:
    """However many there are."""
    ours = beside(Net(lambda m, x: other(scale(x))), lambda step: None)
    (entry,) = [e for known in ours._ortmodule.entries.values() for e in known]
    kinds = entry.held.table[::4]
    others = [n for n in entry.held.names if not n.endswith(".__call__") and "_pytest" not in n]  # what the test's own imports run
    assert kinds.count(FUNCTIONS) == 1 and len(others) < 12
