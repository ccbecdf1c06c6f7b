"""Python state that forward reads or changes: an ORTModule trains as eager PyTorch does, whatever the state is
(docs/SEMANTICS.md).

A case builds the same module twice, once wrapped, runs both for some steps and changes the state before every step.
Everything the state consists of belongs to the case, so that the two do not share what forward changes."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import copy
import dataclasses
import datetime
import enum
import fractions
import functools
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

STATES = (0, 1, 1, 0, 1)  # before every step the state is put to one of two; one that comes back needs no new capture


class Base(nn.Module):
    """forward: the linear layer times what `read(self)` gives. What else there is is an attribute."""

    def __init__(self, read: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self)


class Plain:
    def __init__(self, v: Any = 1.0) -> None:
        self.v = v

    def value(self) -> Any:
        return self.v

    def __call__(self) -> Any:
        return self.v

    def __len__(self) -> int:
        return int(self.v)

    def __getitem__(self, i: int) -> Any:
        return self.v + i


class Slots:
    __slots__ = ("v",)

    def __init__(self) -> None:
        self.v = 1.0


class Fallback:
    def __init__(self) -> None:
        self.data = {"v": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Redirect:
    """As configurations of transformers do."""

    def __init__(self) -> None:
        self.real = 1.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("real" if name == "alias" else name)


@dataclasses.dataclass
class Config:
    k: float = 1.0
    inner: Any = None


class Pair(NamedTuple):
    a: Any
    b: float


class Mode(enum.Enum):
    LOW = 1.0
    HIGH = 2.0


class Counted:
    total = 1.0


class WithProperty(Base):
    hidden = 1.0

    @property
    def factor(self) -> float:
        return self.hidden * 2


class WithClassAttribute(Base):
    k: Any = 1.0
    table: ClassVar[dict[str, float]] = {"k": 1.0}


G: Any = 1.0
OTHER = types.ModuleType("settings_of_the_user")
NUMBERS = [1.0, 2.0]
TABLE: dict[str, Any] = {"k": 1.0, "deep": {"k": [1.0]}}
SPACE = types.SimpleNamespace(k=1.0)
HELD = Plain()
TENSOR = torch.ones(5, dtype=torch.float64)
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
OUTSIDE = Base(lambda s: 1.0)


def helper() -> float:
    return 1.0


def reads_default(s: Any, box: list[float] = [1.0]) -> float:  # noqa: B006
    return box[0]


def closure() -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    k = 1.0

    def read(s: Any) -> Any:
        return k

    def put(v: Any) -> None:
        nonlocal k
        k = v

    return read, put


@functools.lru_cache
def cached(n: int) -> Tensor:
    return torch.full((5,), float(n), dtype=torch.float64)


def put_global(name: str) -> Callable[[Any, int], None]:
    def change(m: Any, i: int) -> None:
        globals()[name] = 1.0 + i

    return change


def put(path: str) -> Callable[[Any, int], None]:
    """Sets the attribute at the end of a dotted path of the module."""

    def change(m: Any, i: int) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            m = getattr(m, owner)
        setattr(m, name, 1.0 + i)

    return change


def forget(m: Any, i: int) -> None:
    if i:
        m.extra = 2.0
    elif "extra" in vars(m):
        del m.extra


def set_environment(m: Any, i: int) -> None:
    os.environ["SCALE_OF_THE_TEST"] = str(1.0 + i)


def environment_or_not(m: Any, i: int) -> None:
    os.environ.pop("SCALE_OF_THE_TEST", None)
    if i:
        os.environ["SCALE_OF_THE_TEST"] = "3"


def fill(container: Any, *items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (set, dict)) else container.extend)(items if not isinstance(container, dict) else dict(items))


def swap_method(m: Any, i: int) -> None:
    Plain.value = PLAIN_VALUES[i]  # type: ignore[method-assign]


PLAIN_VALUES = [Plain.value, lambda self: self.v + 1]
READ, PUT = closure()


def moved(m: nn.Module, i: int) -> None:
    """The array's memory goes elsewhere and, of the size it was, back."""
    at, held = m.a.ctypes.data, []
    while m.a.ctypes.data == at and len(held) < 99:
        held.append(np.ones(40_000))  # stands in the way of growing where it is
        m.a.resize((640_000,), refcheck=False)
        m.a.resize((40_000,), refcheck=False)
    m.a.fill(1.0 + i)


# name, module, change of its state; all of these stay in the engine
HONOURED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Any]]] = {
    "module global, a number": (lambda: Base(lambda s: G), put_global("G")),
    "module global, a tensor bound anew": (lambda: Base(lambda s: TENSOR), lambda m, i: globals().update(TENSOR=TENSORS[i])),
    "module global, a tensor edited in place": (lambda: Base(lambda s: TENSOR), lambda m, i: TENSOR.fill_(1.0 + i)),
    "module global, a dictionary": (lambda: Base(lambda s: TABLE["k"]), lambda m, i: TABLE.update(k=1.0 + i)),
    "a list in a dictionary in a global": (lambda: Base(lambda s: TABLE["deep"]["k"][0]), lambda m, i: TABLE["deep"]["k"].__setitem__(0, 1.0 + i)),
    "module global, a list": (lambda: Base(lambda s: NUMBERS[0]), lambda m, i: NUMBERS.__setitem__(0, 1.0 + i)),
    "length of a list": (lambda: Base(lambda s: len(s.items), items=[1]), lambda m, i: fill(m.items, *range(1 + i))),
    "module global, a SimpleNamespace": (lambda: Base(lambda s: SPACE.k), lambda m, i: setattr(SPACE, "k", 1.0 + i)),
    "module global, an object": (lambda: Base(lambda s: HELD.value()), lambda m, i: setattr(HELD, "v", 1.0 + i)),
    "a function bound anew": (lambda: Base(lambda s: helper()), lambda m, i: globals().update(helper=HELPERS[i])),
    "attribute of another Python module": (lambda: Base(lambda s: OTHER.k), lambda m, i: setattr(OTHER, "k", 1.0 + i)),
    "closure variable": (lambda: Base(READ), lambda m, i: PUT(1.0 + i)),
    "mutable default argument": (lambda: Base(reads_default), lambda m, i: reads_default.__defaults__[0].__setitem__(0, 1.0 + i)),
    "attribute of the module, a number": (lambda: Base(lambda s: s.k, k=1.0), put("k")),
    "attribute that comes and goes": (lambda: Base(lambda s: getattr(s, "extra", 1.0)), forget),
    "hasattr": (lambda: Base(lambda s: 3.0 if hasattr(s, "extra") else 1.0), forget),
    "dataclass": (lambda: Base(lambda s: s.cfg.k, cfg=Config()), put("cfg.k")),
    "dataclass in a dataclass": (lambda: Base(lambda s: s.cfg.inner.k, cfg=Config(inner=Config())), put("cfg.inner.k")),
    "argparse.Namespace": (lambda: Base(lambda s: s.args.k, args=argparse.Namespace(k=1.0)), put("args.k")),
    "dictionary attribute": (lambda: Base(lambda s: s.d["k"], d={"k": 1.0}), lambda m, i: m.d.update(k=1.0 + i)),
    "key in a dictionary": (lambda: Base(lambda s: 2.0 if "b" in s.d else 1.0, d={"a": 1}), lambda m, i: m.d.update(b=1) if i else m.d.pop("b", 0)),
    "plain object, through its method": (lambda: Base(lambda s: s.plain.value(), plain=Plain()), put("plain.v")),
    "callable object": (lambda: Base(lambda s: s.plain(), plain=Plain()), put("plain.v")),
    "object with __len__": (lambda: Base(lambda s: len(s.plain), plain=Plain()), put("plain.v")),
    "object with __getitem__": (lambda: Base(lambda s: s.plain[1], plain=Plain()), put("plain.v")),
    "object in a list": (lambda: Base(lambda s: s.items[0].v, items=[Plain()]), lambda m, i: setattr(m.items[0], "v", 1.0 + i)),
    "object in an object": (lambda: Base(lambda s: s.plain.v.v, plain=Plain(Plain())), put("plain.v.v")),
    "object in a named tuple": (lambda: Base(lambda s: s.pair.a.v, pair=Pair(Plain(), 1.0)), lambda m, i: setattr(m.pair.a, "v", 1.0 + i)),
    "object with slots": (lambda: Base(lambda s: s.slots.v, slots=Slots()), put("slots.v")),
    "object with __getattr__": (lambda: Base(lambda s: s.f.v, f=Fallback()), lambda m, i: m.f.data.update(v=1.0 + i)),
    "object with __getattribute__": (lambda: Base(lambda s: s.r.alias, r=Redirect()), lambda m, i: setattr(m.r, "real", 1.0 + i)),
    "vars() of an object": (lambda: Base(lambda s: vars(s.plain)["v"], plain=Plain()), put("plain.v")),
    "functools.partial": (lambda: Base(lambda s: s.part(), part=functools.partial(lambda b: b.v, Plain())),
        lambda m, i: setattr(m.part.args[0], "v", 1.0 + i)),
    "bound method": (lambda: Base(lambda s: s.call(), call=Plain().value), lambda m, i: setattr(m.call.__self__, "v", 1.0 + i)),
    "weak reference": (lambda: Base(lambda s: s.ref().v, ref=weakref.ref(HELD)), lambda m, i: setattr(HELD, "v", 1.0 + i)),
    "enum member": (lambda: Base(lambda s: s.mode.value, mode=Mode.LOW), lambda m, i: setattr(m, "mode", Mode.HIGH if i else Mode.LOW)),
    "property": (lambda: WithProperty(lambda s: s.factor), put("hidden")),
    "class attribute": (lambda: WithClassAttribute(lambda s: s.k), lambda m, i: setattr(WithClassAttribute, "k", 1.0 + i)),
    "class attribute through type(self)": (lambda: WithClassAttribute(lambda s: type(s).k), lambda m, i: setattr(WithClassAttribute, "k", 1.0 + i)),
    "class attribute, a dictionary": (lambda: WithClassAttribute(lambda s: s.table["k"]), lambda m, i: WithClassAttribute.table.update(k=1.0 + i)),
    "attribute of a global class": (lambda: Base(lambda s: Counted.total), lambda m, i: setattr(Counted, "total", 1.0 + i)),
    "method of a class bound anew": (lambda: Base(lambda s: s.plain.value(), plain=Plain()), swap_method),
    "class of an object (isinstance)": (lambda: Base(lambda s: 2.0 if isinstance(s.o, Config) else 1.0, o=Plain()),
        lambda m, i: setattr(m, "o", OBJECTS[i])),
    "set": (lambda: Base(lambda s: 2.0 if 7 in s.set else 1.0, set={1}), lambda m, i: fill(m.set, 1, *[7] * i)),
    "deque": (lambda: Base(lambda s: s.q[0], q=collections.deque([1.0])), lambda m, i: fill(m.q, 1.0 + i)),
    "defaultdict": (lambda: Base(lambda s: s.d["k"], d=collections.defaultdict(float)), lambda m, i: m.d.update(k=1.0 + i)),
    "numpy array": (lambda: Base(lambda s: float(s.a[0]), a=np.ones(3)), lambda m, i: m.a.fill(1.0 + i)),
    "numpy array, a view with strides": (lambda: Base(lambda s: float(s.a[1]), a=np.ones(8)[::2]), lambda m, i: m.a.fill(1.0 + i)),
    "numpy array given other memory": (lambda: Base(lambda s: float(s.a[0]), a=np.ones(40_000)), moved),
    "array.array": (lambda: Base(lambda s: s.a[0], a=array.array("d", [1.0])), lambda m, i: m.a.__setitem__(0, 1.0 + i)),
    "fractions.Fraction": (lambda: Base(lambda s: float(s.f), f=fractions.Fraction(1)), lambda m, i: setattr(m, "f", FRACTIONS[i])),
    "environment variable": (lambda: Base(lambda s: float(os.environ["SCALE_OF_THE_TEST"])), set_environment),
    "environment variable that comes and goes": (lambda: Base(lambda s: float(os.getenv("SCALE_OF_THE_TEST", "1"))), environment_or_not),
    "context variable": (lambda: Base(lambda s: CONTEXT.get()), lambda m, i: CONTEXT.set(1.0 + i)),
    "attribute of a module outside of the tree": (lambda: Base(lambda s: OUTSIDE.k), lambda m, i: setattr(OUTSIDE, "k", 1.0 + i)),
    "negative zero": (lambda: Base(lambda s: 1.0 if str(s.k) == "0.0" else 2.0, k=0.0), lambda m, i: setattr(m, "k", -0.0 if i else 0.0)),
    "number of threads": (lambda: Base(lambda s: float(torch.get_num_threads())), lambda m, i: torch.set_num_threads(1 + i)),
    "switch of a backend": (lambda: Base(lambda s: 2.0 if torch.backends.cudnn.benchmark else 1.0),
        lambda m, i: setattr(torch.backends.cudnn, "benchmark", bool(i))),
    "default dtype": (lambda: Base(lambda s: torch.ones(5).sum()), lambda m, i: torch.set_default_dtype((torch.float32, torch.float64)[i])),
    "functools.lru_cache": (lambda: Base(lambda s: cached(s.n), n=1), lambda m, i: setattr(m, "n", 1 + i)),
}  # fmt: skip
TENSORS = [torch.full((5,), 1.0 + i, dtype=torch.float64) for i in range(2)]
HELPERS: list[Callable[[], float]] = [lambda: 1.0, lambda: 2.0]
OBJECTS = [Plain(), Config()]
FRACTIONS = [fractions.Fraction(1), fractions.Fraction(5, 2)]
OTHER.k = OUTSIDE.k = 1.0  # type: ignore[attr-defined, assignment]

# what forward does; before every step the generators are seeded. These run in PyTorch, and say so.
IN_PYTORCH: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random.random": (lambda: Base(lambda s: random.random()), "Python's random"),
    "teacher forcing": (lambda: Base(lambda s: 2.0 if random.random() < 0.5 else 1.0), "Python's random"),
    "random.Random of the module": (lambda: Base(lambda s: s.r.random(), r=random.Random(3)), "Python's random"),
    "numpy.random": (lambda: Base(lambda s: np.random.rand()), "numpy.random"),
    "numpy Generator of the module": (lambda: Base(lambda s: s.r.random(), r=np.random.default_rng(3)), "random numbers"),
    "numpy RandomState of the module": (lambda: Base(lambda s: s.r.rand(), r=np.random.RandomState(3)), "random numbers"),
    "torch.Generator of the module": (lambda: Base(lambda s: torch.rand(5, generator=s.g, dtype=torch.float64), g=torch.Generator()), "generator"),
    "torch.manual_seed in forward": (lambda: Base(lambda s: (torch.manual_seed(3), torch.rand(5, dtype=torch.float64))[1]), "manual_seed"),
    "iterator": (lambda: Base(lambda s: next(s.it), it=iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])), "whose state"),
    "generator": (lambda: Base(lambda s: next(s.it), it=(float(i) for i in range(1, 9))), "whose state"),
    "itertools.count": (lambda: Base(lambda s: next(s.it), it=itertools.count(1)), "whose state"),
    "array too large to compare": (lambda: Base(lambda s: float(s.a[0]), a=np.ones(1 << 18)), "too large"),
    "dictionary too large to compare": (lambda: Base(lambda s: s.d[0], d=dict.fromkeys(range(30_000), 1.0)), "too many"),
    "counter in a global object": (lambda: Base(lambda s: s.count(), count=CountUp()), "assigns n"),
    "list appended to": (lambda: Base(lambda s: (s.log.append(1), len(s.log))[1], log=[]), "changes"),
    "dictionary filled": (lambda: Base(lambda s: (s.d.update(n=s.d["n"] + 1), s.d["n"])[1], d={"n": 0}), "changes"),
    "nonlocal assigned": (lambda: Base(nonlocal_counter()), "assigns n"),
    "class attribute assigned": (lambda: Base(CountOnClass.read), "assigns CountOnClass.n"),
    "slot assigned": (lambda: Base(lambda s: (setattr(s.slots, "v", s.slots.v + 1), s.slots.v)[1], slots=Slots()), "changes"),
    "numpy array written": (lambda: Base(lambda s: (s.a.__iadd__(1), float(s.a[0]))[1], a=np.ones(2)), "changes"),
    "globals()": (lambda: Base(lambda s: globals()["NUMBERS"][1]), "globals()"),
    "object of a C extension": (lambda: Base(lambda s: 2.0 if s.z is None else 1.0, z=zlib.compressobj()), "whose state cannot be compared or put back"),
}  # fmt: skip


class CountUp:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def nonlocal_counter() -> Callable[[Any], int]:
    n = 0

    def read(s: Any) -> int:
        nonlocal n
        n += 1
        return n

    return read


class CountOnClass:
    n = 0

    @staticmethod
    def read(s: Any) -> float:
        CountOnClass.n += 1
        return 2.0




def wrapped_and_eager(make: Callable[[], nn.Module]) -> tuple[ORTModule, nn.Module]:
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    return ORTModule(make()), eager


def step(m: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    m.zero_grad()
    out = m(x)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in m.parameters()]


def same(a: tuple[Tensor, list[Tensor | None]], b: tuple[Tensor, list[Tensor | None]]) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a[1], b[1], rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    threads, dtype, value = torch.get_num_threads(), torch.get_default_dtype(), Plain.value
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.backends.cudnn.benchmark = benchmark
    Plain.value = value  # type: ignore[method-assign]
    os.environ.pop("SCALE_OF_THE_TEST", None)


X = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)


@pytest.mark.parametrize("name", HONOURED)
def test_state_that_is_followed(name: str) -> None:
    make, change = HONOURED[name]
    ours, eager = wrapped_and_eager(make)
    for state in STATES:
        change(eager, state)
        want = step(eager, X)
        change(ours, state)
        same(step(ours, X), want)
    report = ours.report()
    assert not report.eager and report.n_captures <= 2, str(report)


@pytest.mark.parametrize("name", IN_PYTORCH)
def test_state_that_leaves_the_module_to_pytorch(name: str) -> None:
    make, reason = IN_PYTORCH[name]
    ours, eager = wrapped_and_eager(make)
    for state in STATES:
        both = []
        for m in (eager, ours):
            random.seed(state)
            np.random.seed(state)
            torch.manual_seed(state)
            both.append(step(m, X))
        same(both[1], both[0])
    report = ours.report()
    assert report.eager and reason in report.eager[0].reason, str(report)


LOG: list[Any] = []
METRICS: dict[str, Any] = {}


class Logs(nn.Module):
    """Writes to globals, to its own list, and to an object, and prints."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.log: list[Tensor] = []
        self.stats = Plain(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        LOG.append(h.detach().mean())
        METRICS["mean"] = h.detach().mean()
        self.log.append(h.detach())
        self.stats.last = h.detach()  # type: ignore[attr-defined]
        return torch.tanh(h)


def test_side_effects_happen_once_a_step() -> None:
    """The innermost module that has them stays in PyTorch; no tensor of the trace is left in what they write to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), Logs(), nn.Linear(5, 5, dtype=torch.float64), Logs())
    ours, eager = ORTModule(copy.deepcopy(model)), model
    for n in range(1, 4):
        LOG.clear()
        want = step(eager, X)
        log, mean = LOG.copy(), METRICS["mean"]
        LOG.clear()
        same(step(ours, X), want)
        assert [type(t) for t in LOG] == [Tensor] * 2 and type(METRICS["mean"]) is Tensor
        torch.testing.assert_close((LOG, METRICS["mean"]), (log, mean))
        for i in (1, 3):
            assert len(ours[i].log) == n and all(type(t) is Tensor for t in ours[i].log)
            torch.testing.assert_close(ours[i].stats.last, eager[i].stats.last)
    report = ours.report()
    assert sorted(h.module for h in report.host) == ["1", "3"] and not report.eager, str(report)


def test_random_numbers_keep_the_innermost_module_alone() -> None:
    noise = Base(lambda s: random.random())
    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), noise, nn.Linear(5, 5, dtype=torch.float64))
    ours, eager = ORTModule(copy.deepcopy(model)), model
    for i in range(3):
        random.seed(i)
        want = step(eager, X)
        random.seed(i)
        same(step(ours, X), want)
    report = ours.report()
    assert [h.module for h in report.host] == ["1"] and not report.eager, str(report)
    assert "Python's random" in report.host[0].reason, report.host[0].reason


def test_printing_is_said_once(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = wrapped_and_eager(lambda: Base(lambda s: print("forward runs") or 1.0))
    with caplog.at_level(logging.WARNING, "ortmodule"):
        for _ in range(3):
            ours(X)
    assert "forward runs" in capsys.readouterr().out
    assert sum("forward prints" in r.message for r in caplog.records) == 1
    assert not ours.report().eager


def kept_in_pytorch(s: Any) -> float:
    warnings.warn("careful", RuntimeWarning, stacklevel=1)
    return random.random() * 0


WARNS: dict[str, Callable[[Any], Any]] = {
    "the user": lambda s: warnings.warn("careful", RuntimeWarning, stacklevel=1) or 1.0,
    "torch.nn.functional": lambda s: nn.functional.mse_loss(torch.ones(2, 1), torch.ones(2)),
    "torch.nn": lambda s: nn.MSELoss()(torch.ones(2, 1), torch.ones(2)),
    "what stays in PyTorch": kept_in_pytorch,
    "nobody": lambda s: 1.0,
}


@pytest.mark.parametrize("name", WARNS)
def test_warnings_are_those_of_eager(name: str) -> None:
    """With text, type, file and line; at each call, as the filters say."""
    ours, eager = wrapped_and_eager(lambda: Base(WARNS[name]))
    for rule in ("always", "error", "default", "ignore"):
        seen: list[Any] = []
        for m in (eager, ours):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter(rule)  # type: ignore[arg-type]
                for _ in range(2):
                    try:
                        m(X)
                    except Warning as e:
                        seen.append((m is eager, type(e), str(e)))
            seen += [(m is eager, w.category, str(w.message), w.filename, w.lineno) for w in found]
        assert [w[1:] for w in seen if w[0]] == [w[1:] for w in seen if not w[0]], rule
    assert not ours.report().eager or name == "what stays in PyTorch"


def test_logging_is_said_once_and_only_when_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("a.user's.log")
    ours, _ = wrapped_and_eager(lambda: Base(lambda s: (log.info("step"), log.debug("no"), 1.0)[2]))
    quiet, _ = wrapped_and_eager(lambda: Base(lambda s: (log.debug("no"), 1.0)[1]))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            ours(X), quiet(X)
    assert sum("forward logs" in r.message for r in caplog.records) == 1


def test_the_time_is_asked_for() -> None:
    for ask in (time.time, time.perf_counter, datetime.datetime.now, lambda: os.urandom(4)):
        ours, eager = wrapped_and_eager(lambda ask=ask: Base(lambda s: 1.0 if ask() else 0.0))  # type: ignore[misc]
        same(step(ours, X), step(eager, X))
        assert ours.report().eager, ask


def test_arguments_that_forward_edits() -> None:
    """A list among the arguments is the caller's own."""

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5, dtype=torch.float64)

        def forward(self, x: Tensor, seen: list[Tensor], box: Plain) -> Tensor:
            h = self.linear(x)
            seen.append(h)
            box.v = h
            return h

    ours = ORTModule(Collects())
    for _ in range(3):
        seen: list[Tensor] = []
        box = Plain()
        out = ours(X, seen, box)
        assert seen == [out] and box.v is out and type(out) is Tensor


def test_what_changes_at_every_step_ends_in_pytorch_and_is_named() -> None:
    ours, eager = wrapped_and_eager(lambda: Base(lambda s: G))
    ours._ortmodule.settings = dataclasses.replace(ours._ortmodule.settings, max_captures=3)
    for i in range(6):
        globals()["G"] = 10.0 + i
        same(step(ours, X), step(eager, X))
    report = ours.report()
    assert report.n_captures == 3 and report.eager[0].calls == 3, str(report)
    assert "global G of" in report.eager[0].reason and "test_python_state.py" in report.eager[0].reason, str(report)
    assert any("global G of" in g.why for g in report.graphs[1:])


def test_a_cache_keeps_no_tensor_of_the_trace() -> None:
    cached.cache_clear()
    ours, _ = wrapped_and_eager(lambda: Base(lambda s: cached(7)))
    ours(X)
    assert type(cached(7)) is Tensor and cached(7).tolist() == [7.0] * 5


def test_a_global_tensor_that_forward_edits() -> None:
    before = TENSOR.clone()
    results = []
    for wrap in (lambda m: m, ORTModule):
        TENSOR.copy_(before)
        torch.manual_seed(0)
        m = wrap(Base(lambda s: TENSOR.add_(1.0).clone()))
        results.append([m(X).detach() for _ in range(3)] + [TENSOR.clone()])
    torch.testing.assert_close(results[1], results[0])


def test_state_seen_at_another_size() -> None:
    """What only the second capture of a state has read counts too."""
    ours, eager = wrapped_and_eager(lambda: Base(lambda s: s.k if s.big else 1.0, k=1.0, big=False))
    Base.forward, before = (lambda self, x: self.linear(x) * (G if len(x) > 3 else 1.0)), Base.forward  # type: ignore[method-assign]
    try:
        for g in (1.0, 2.0, 1.0, 3.0):
            globals()["G"] = g
            for n in (2, 4, 5):
                x = torch.ones(n, 5, dtype=torch.float64)
                same(step(ours, x), step(eager, x))
    finally:
        Base.forward = before  # type: ignore[method-assign]


def test_nothing_stays_patched() -> None:
    get, put = nn.Module.__dict__.get("__getattribute__"), nn.Module.__setattr__
    errors: list[BaseException] = []

    def train(k: float) -> None:
        try:
            for _ in range(3):
                m = ORTModule(Base(lambda s: s.plain.value() * s.cfg.k, plain=Plain(k), cfg=Config()))
                torch.testing.assert_close(m(X), m.module.linear(X) * k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(1.0 + i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    with pytest.raises(ZeroDivisionError):
        ORTModule(Base(lambda s: 1 / 0 * s.plain.v, plain=Plain()))(X)
    assert nn.Module.__dict__.get("__getattribute__") is get is None and nn.Module.__setattr__ is put
    assert all("__getattribute__" not in vars(c) for c in (Plain, Config, Fallback)) and sys.getprofile() is None
    assert not torch.compiler._is_exporting_flag and not torch.compiler._is_compiling_flag


def test_a_profiler_goes_on() -> None:
    calls: list[str] = []
    ours, _ = wrapped_and_eager(lambda: Base(lambda s: 1.0))

    def profile(frame: types.FrameType, event: str, arg: Any) -> None:
        calls.append(event)

    sys.setprofile(profile)
    try:
        ours(X)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_a_wrapped_module_is_freed() -> None:
    """The table of what was read refers to the module; the collector sees it."""
    ours, _ = wrapped_and_eager(lambda: Base(lambda s: s.plain.v, plain=Plain()))
    ours(X)
    ref = weakref.ref(ours.linear)
    del ours
    gc.collect()
    assert ref() is None


class Gate(nn.Module):
    """Draws a number and leaves a value beside its result, as mixtures of experts do with their auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * random.random()
        self.extra = h.square().mean()
        return h


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.gate.extra


def test_an_attribute_that_a_kept_module_assigns_is_read_around_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), Block(), nn.Linear(5, 5, dtype=torch.float64))
    ours, eager = ORTModule(copy.deepcopy(model)), model
    for i in range(4):
        random.seed(i)
        want = step(eager, X)
        random.seed(i)
        same(step(ours, X), want)
        torch.testing.assert_close(ours[1].gate.extra, eager[1].gate.extra)
    assert [h.module for h in ours.report().host] == ["1"], str(ours.report())


def test_whisper_spec_augment_follows_numpy() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, dropout=0.0, num_mel_bins=8, max_source_positions=20, max_target_positions=20, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, apply_spec_augment=True, mask_time_prob=0.5, mask_time_length=4, mask_time_min_masks=2,
        init_std=0.5)  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.WhisperForConditionalGeneration(config).double().train()
    ours = ORTModule(copy.deepcopy(eager))
    batch = {"input_features": torch.randn(2, 8, 40, dtype=torch.float64), "labels": torch.randint(3, 50, (2, 5))}
    losses = []
    for seed in range(3):
        for m in (eager, ours):
            np.random.seed(seed)
            losses.append(m(**batch).loss)
    torch.testing.assert_close(losses[1::2], losses[::2], rtol=1e-10, atol=1e-10)
    assert float((losses[0] - losses[2]).detach().abs()) > 1e-4
    report = ours.report()  # the augmentation edits its argument, too, so the module around it has to go along
    assert report.eager or any("numpy.random" in h.reason for h in report.host), str(report)


def test_a_method_that_the_capture_itself_replaces() -> None:
    """nn.TransformerEncoder.forward is another function while it is traced: what holds is the one that stands there
    afterwards."""
    model = ORTModule(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 1))
    for _ in range(3):
        model(torch.randn(2, 3, 4)).sum().backward()
    assert model.report().n_captures == 1


@pytest.mark.parametrize("name", [lambda m: m, copy.copy], ids=["itself", "a copy that shares its tables"])
def test_the_module_reached_by_a_global(name):
    """Code that names the wrapped module itself, not self: its parameters and buffers stay what they are."""
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("b", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return NAMED[0].layer(x) + NAMED[0].b

    module = Named()
    NAMED[:] = [name(module)]
    w = ORTModule(module)
    for step in range(3):
        module.b.fill_(float(step))
        x = torch.randn(2, 4)
        torch.testing.assert_close(w(x), module.layer(x) + step)
        assert type(module.b) is Tensor and type(module.layer.weight) is nn.Parameter
    assert w.report().graphs


NAMED: list[nn.Module] = []


class Chooses(nn.Module):
    """Stays in PyTorch; what is around it runs there once, too, before it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if int(x.sum() > 0) else x


class AroundChooses(nn.Module):
    factor = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.chooses = Chooses()

    def forward(self, x: Tensor) -> Tensor:
        return self.chooses(x * type(self).factor)


def test_class_attributes_around_what_is_kept_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = ORTModule(AroundChooses())
    x = torch.ones(2, 3)
    for _ in range(2):
        wrapped(x)
    assert wrapped.report().graphs
    monkeypatch.setattr(AroundChooses, "factor", 2.0)
    assert torch.equal(wrapped(x), wrapped.module(x))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: type(x).__name__ == "Tensor",
        lambda x: x.__class__.__name__ in ("Tensor", "Parameter"),
        lambda x: type(x).__module__ == "torch",
        lambda x: not torch._dynamo.is_compiling(),
        lambda x: not torch.compiler.is_compiling(),
    ],
)
def test_names_of_classes(ask: Callable[[Tensor], bool]) -> None:
    """A trace's tensors are of another class; what asks for its name has eager's answer."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1.0 if ask(x) else 2.0)

    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), Asks())
    ours, eager = ORTModule(copy.deepcopy(model)), model
    for _ in range(2):
        same(step(ours, X), step(eager, X))
    assert ours.report().graphs


MOVED = """
import numpy as np, torch
from ortmodule import ORTModule
table = np.full(100_000, 2.0, dtype=np.float32)
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * float(table[0])
module, x = ORTModule(Scaled()), torch.ones(4)
assert module(x).tolist() == [2.0] * 4
for value in (2.0, 5.0, 2.0):
    at, held = table.ctypes.data, []
    while table.ctypes.data == at:
        held.append(np.ones(100_000, dtype=np.float32))
        for size in (6_400_000, 100_000):
            table.resize((size,), refcheck=False)
    table.fill(value)
    assert module(x).tolist() == [value] * 4
"""


def test_memory_that_an_array_has_given_back_is_not_read() -> None:
    """Blocks of this size are mapped, so the pages are gone when the array has moved."""
    done = subprocess.run([sys.executable, "-P", "-c", MOVED], env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}, timeout=300)
    assert done.returncode == 0
