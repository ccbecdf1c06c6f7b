"""Arguments and results of every kind that Python has, beside eager: values, gradients, which object it is, and what the
caller does with it afterwards. Where the engine cannot keep them apart from others, PyTorch runs the call, by name."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture.skeleton import skeleton

pytestmark = pytest.mark.usefixtures("seeded")


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, v: Any) -> Any:
        return self.function(self.layer(x), v)


class Plain:
    def __init__(self, **k: Any) -> None:
        self.__dict__.update(k)


class NeedsArgument:
    def __new__(cls, a: Any) -> NeedsArgument:
        return super().__new__(cls)

    def __init__(self, a: Any) -> None:
        self.a = a


class Slots:
    __slots__ = ("a",)


class Mixed(Slots):
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Private:
    __slots__ = ("__a",)

    def __init__(self, a: Any) -> None:
        self.__a = a

    @property
    def a(self) -> Any:
        return self.__a


class Frozen:
    def __init__(self, a: Any) -> None:
        object.__setattr__(self, "a", a)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("frozen")


class Awkward:
    """Asked whether it is true, or equal, it raises."""

    def __init__(self, a: Any) -> None:
        self.a = a

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


class AllEqual:
    def __init__(self, a: Any) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class List(list[Any]):
    pass


class Dict(dict[str, Any]):
    pass


class SlotDict(dict[str, Any]):
    __slots__ = ("a",)


class Text(str):
    pass


class AllEqualText(str):
    __slots__ = ()
    __eq__, __hash__ = AllEqual.__eq__, AllEqual.__hash__  # type: ignore[assignment]


class AllEqualInt(int):
    __slots__ = ()
    __eq__, __hash__ = AllEqual.__eq__, AllEqual.__hash__  # type: ignore[assignment]


class SlotText(str):
    __slots__ = ("a",)


class Pair(NamedTuple):
    a: Any
    b: Any = 2.0


class Wide(collections.namedtuple("Wide", "a b")):
    """Without __slots__: has attributes of its own."""


@dataclasses.dataclass
class Data:
    a: Any
    b: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenData:
    a: Any
    b: float = 2.0


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def put(x: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(x, name, value)
    return x


def t(n: int) -> Tensor:
    return torch.arange(4.0) + n


def tree(a: float) -> Plain:
    top = Plain(a=a)
    top.kids = [Plain(up=top) for _ in range(3)]  # type: ignore[attr-defined]
    return top


HELD = Plain(n=1)

# name: (what forward does with the layer's output and the object, the object at each call)
CASES: dict[str, tuple[Callable[[Tensor, Any], Any], list[Callable[[], Any]]]] = {
    # --- arguments
    "an array": (lambda h, v: h * torch.from_numpy(v), [lambda: np.ones(4), lambda: np.arange(4.0)]),
    "a large array": (lambda h, v: h * torch.from_numpy(v).mean() / 1e3, [lambda: np.ones(5000), lambda: np.arange(5000.0)]),
    "an array of objects": (lambda h, v: h * v[0], [lambda: np.array([t(1), None], dtype=object)]),
    "an array, edited": (lambda h, v: (v.__setitem__(0, v[0] + 1), h * v[0])[1], [lambda: np.ones(4)]),
    "an array, returned": (lambda h, v: (h, v), [lambda: np.ones(4)]),
    "signs of zero": (lambda h, v: h * math.copysign(1.0, v), [lambda: 0.0, lambda: -0.0, lambda: np.float64(0), lambda: np.float64(-0.0)]),
    "signs of zero, other sizes": (lambda h, v: h[: v[0]] * math.copysign(1.0, v[1]), [lambda: (2, 0.0), lambda: (3, 0.0), lambda: (3, -0.0)]),
    "signs of zero in a set": (lambda h, v: h * math.copysign(1.0, *v), [lambda: {0.0}, lambda: {-0.0}]),
    "signs of zero in a complex": (lambda h, v: h * math.copysign(1.0, v.imag), [lambda: 0j, lambda: complex(0, -0.0)]),
    "signs of zero in a partial": (lambda h, v: h * v(), [lambda: functools.partial(math.copysign, 1.0, 0.0),
                                                               lambda: functools.partial(math.copysign, 1.0, -0.0)]),
    "equal decimals": (lambda h, v: h * len(str(v)), [lambda: decimal.Decimal("1.0"), lambda: decimal.Decimal("1.00")]),
    "equal times": (lambda h, v: h * (1 + v.fold), [lambda: datetime.datetime(2020, 1, 1), lambda: datetime.datetime(2020, 1, 1, fold=1)]),
    "equal keys": (lambda h, v: h * type(next(iter(v)))(2), [lambda: {1: t(1)}, lambda: {1.0: t(1)}, lambda: {True: t(1)}]),
    "keys that are all equal": (lambda h, v: h * next(iter(v)).a, [lambda: {AllEqual(2): 0}, lambda: {AllEqual(3): 0}]),
    "words that are all equal": (lambda h, v: h * ord(v[0]), [lambda: AllEqualText("a"), lambda: AllEqualText("b")]),
    "integers that are all equal": (lambda h, v: h * int(v), [lambda: AllEqualInt(2), lambda: AllEqualInt(3)]),
    "a word with a slot": (lambda h, v: h * v.a, [lambda: put(SlotText("a"), a=2.0), lambda: put(SlotText("a"), a=3.0)]),
    "the order of a set": (lambda h, v: h * (1 + next(iter(v))), [lambda: {0, 8}, lambda: {8, 0}]),
    "tensors as keys": (lambda h, v: h * next(iter(v)), [lambda: {t(1): 0}, lambda: {t(2): 0}]),
    "a large integer": (lambda h, v: h * (v % 7), [lambda: 2**70, lambda: 2**70 + 1, lambda: 2**70 + 2]),
    "a slice": (lambda h, v: h[v], [lambda: slice(0, 2), lambda: slice(0, 3)]),
    "private slots": (lambda h, v: h * v.a, [lambda: Private(t(1)), lambda: Private(t(2)), lambda: Private(2.0), lambda: Private(3.0)]),
    "slots and attributes": (lambda h, v: h * v.a * v.b, [lambda: Mixed(t(1), 2.0), lambda: Mixed(t(2), 3.0)]),
    "slots of a dict": (lambda h, v: h * v.a, [lambda: put(SlotDict(), a=2.0), lambda: put(SlotDict(), a=3.0)]),
    "attributes of a list": (lambda h, v: h * v[0] * v.a, [lambda: put(List([t(1)]), a=2.0), lambda: put(List([t(2)]), a=3.0), lambda: put(List([t(2)]), a=t(5))]),
    "attributes of a tuple": (lambda h, v: h * v.a * v.c, [lambda: put(Wide(t(1), 1), c=2.0), lambda: put(Wide(t(2), 1), c=3.0), lambda: put(Wide(1, 1), c=t(3))]),
    "attributes of a dict": (lambda h, v: h * v["k"] * v.a, [lambda: put(Dict(k=t(1)), a=2.0), lambda: put(Dict(k=t(2)), a=t(3))]),
    "attributes of a text": (lambda h, v: h * v.a, [lambda: put(Text("x"), a=2.0), lambda: put(Text("x"), a=3.0)]),
    "a namedtuple": (lambda h, v: v._replace(a=h * v.a), [lambda: Pair(t(1)), lambda: Pair(t(2), 3.0)]),
    "a dataclass": (lambda h, v: Data(h * v.a, v.b), [lambda: Data(t(1)), lambda: Data(t(2), 3.0)]),
    "a frozen dataclass": (lambda h, v: dataclasses.replace(v, a=h * v.a), [lambda: FrozenData(t(1)), lambda: FrozenData(t(2), 3.0)]),
    "a class with a constructor": (lambda h, v: h * v.a, [lambda: NeedsArgument(t(1)), lambda: NeedsArgument(t(2))]),
    "a class that raises": (lambda h, v: h * v.a, [lambda: Awkward(t(1)), lambda: Awkward(t(2))]),
    "an enum": (lambda h, v: h * v.value, [lambda: Color.RED, lambda: Color.BLUE]),
    "a namespace": (lambda h, v: h * v.a, [lambda: types.SimpleNamespace(a=t(1)), lambda: types.SimpleNamespace(a=2.0)]),
    "a UserDict": (lambda h, v: h * v["a"], [lambda: collections.UserDict(a=t(1)), lambda: collections.UserDict(a=t(2))]),
    "parents and children": (lambda h, v: h * v.kids[0].up.a, [lambda: tree(2.0), lambda: tree(3.0)]),
    "a dataclass, edited": (lambda h, v: put(v, a=h * v.a), [lambda: Data(t(1)), lambda: Data(t(2))]),
    "slots, edited": (lambda h, v: h * put(v, a=v.a + 1).a, [lambda: put(Slots(), a=1), lambda: put(Slots(), a=1)]),
    "a set, edited": (lambda h, v: (v.add(7), h * len(v))[1], [lambda: {1}]),
    "a deque, edited": (lambda h, v: (v.append(7), h * len(v))[1], [lambda: collections.deque([1])]),
    # --- results
    "result: a class with a constructor": (lambda h, v: NeedsArgument(h), [lambda: 0]),
    "result: private slots": (lambda h, v: Private(h), [lambda: 0]),
    "result: slots and attributes": (lambda h, v: Mixed(h, v), [lambda: t(1), lambda: t(2)]),
    "result: frozen": (lambda h, v: (Frozen(h), FrozenData(h)), [lambda: 0]),
    "result: a class that raises": (lambda h, v: Awkward(h), [lambda: 0]),
    "result: attributes of a list": (lambda h, v: put(List([h]), a=2 * h), [lambda: 0]),
    "result: attributes of a tuple": (lambda h, v: put(Wide(1, 2), c=h), [lambda: 0]),
    "result: it holds itself": (lambda h, v: (lambda p: put(p, me=p))(Plain(h=h)), [lambda: 0]),
    "result: an object, made anew": (lambda h, v: (h, Plain(n=3)), [lambda: 0]),
    "result: an object that is held": (lambda h, v: (h, HELD), [lambda: 0]),
    "result: an array, made anew": (lambda h, v: (h, np.zeros(3)), [lambda: 0]),
    "result: a set, made anew": (lambda h, v: (h, {1, 2}, collections.deque([1]), bytearray(b"a")), [lambda: 0]),
    "result: an argument": (lambda h, v: (h, v), [lambda: [t(1)], lambda: Plain(a="text"), lambda: Data(t(1)), lambda: {}]),
    "result: inside of an argument": (lambda h, v: (h, v[0]), [lambda: ([t(1)],), lambda: [{"a": 1}]]),
}  # fmt: skip


def parts(x: Any) -> list[tuple[Any, Any]]:
    """What an object holds: (name, value)."""
    found: list[tuple[Any, Any]] = []
    if isinstance(x, dict):
        found += x.items()
    elif isinstance(x, (list, tuple, set, collections.deque)):
        found += enumerate(x)
    for c in type(x).__mro__:
        for s in c.__dict__.get("__slots__", ()):
            name = f"_{c.__name__}{s}" if s.startswith("__") else s
            found.append((name, getattr(x, name, "absent")))
    return found + sorted(getattr(x, "__dict__", {}).items())


_SIMPLE = (str, bytes, bytearray, int, complex, type(None), slice, functools.partial, decimal.Decimal, datetime.datetime, enum.Enum)


def told(x: Any, seen: dict[int, int]) -> Any:
    """All that can be told of a value, as text and numbers."""
    if isinstance(x, Tensor):
        assert type(x) in (Tensor, nn.Parameter)
        return x.dtype, x.shape, x.requires_grad, [round(y, 9) for y in x.flatten().tolist()]
    if isinstance(x, np.ndarray):
        return [told(y, seen) for y in x]
    if isinstance(x, float):
        return repr(round(x, 9))
    if isinstance(x, _SIMPLE):
        return type(x), str(x), [told(v, seen) for v in getattr(x, "__dict__", {}).values() if isinstance(x, Text)]
    if id(x) in seen:
        return "again", seen[id(x)]
    seen[id(x)] = len(seen)
    return type(x), [(told(k, seen), told(v, seen)) for k, v in parts(x)]


def outputs(x: Any, seen: set[int]) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x] if x.grad_fn is not None else []
    if isinstance(x, (*_SIMPLE, float, np.ndarray)) or id(x) in seen:
        return []
    seen.add(id(x))
    return [y for _, v in parts(x) for y in outputs(v, seen)]


def edit(x: Any, given: Any) -> None:
    """What a caller may do with a result."""
    for part in x if isinstance(x, tuple) else ():
        if isinstance(part, Plain) and part is not given and "n" in part.__dict__:
            part.n += 1  # type: ignore[attr-defined]
        elif isinstance(part, np.ndarray):
            part += 1
        elif isinstance(part, (list, collections.deque, bytearray)):
            part.append(7)
        elif isinstance(part, set):
            part.add(7)
        elif isinstance(part, dict):
            part["new"] = 7


def call(model: nn.Module, v: Any) -> Any:
    model.zero_grad()
    HELD.n = 1  # type: ignore[attr-defined]
    out = model(torch.linspace(-1, 1, 12).view(3, 4), v)
    first = told(out, {})
    found = outputs(out, set())
    if found:
        sum((y**2).sum() for y in found).backward()  # type: ignore[union-attr]
    edit(out, v)
    return first, told(v, {}), told(HELD, {}), [told(p.grad, {}) for p in model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_is_as_in_eager(name: str) -> None:
    function, makers = CASES[name]
    eager = Calls(function)
    ours = ORTModule(copy.deepcopy(eager))
    for make in [*makers, *makers, makers[0]]:
        want = call(eager, make())
        assert call(ours, make()) == want
    report = ours.report()
    assert report.n_captures or all(e.reason for e in report.eager)


CAPTURED = {"words that are all equal", "integers that are all equal", "the order of a set", "an array", "a large array", "signs of zero", "equal decimals", "equal keys", "a large integer", "a slice", "private slots", "slots and attributes", "attributes of a list",
            "a namedtuple", "a frozen dataclass", "a class with a constructor", "result: a class with a constructor", "result: private slots",
            "result: slots and attributes", "result: frozen", "result: an object, made anew", "result: an object that is held", "result: a set, made anew"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CAPTURED))
def test_the_engine_runs(name: str) -> None:
    function, makers = CASES[name]
    ours = ORTModule(Calls(function), strict=True)
    for make in makers:
        call(ours, make())
    assert ours.report().graphs and not ours.report().eager


def test_who_holds_an_object_is_asked_only_where_it_holds_no_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer takes a walk over every object of the process: a tenth of the first step of a model that returns a cache."""
    asked, ask = [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda x: asked.append(1) or ask(x))  # type: ignore[func-returns-value]
    t = torch.ones(2)
    fill = skeleton([Plain(h=t, inner=Plain(a=t)), Mixed(t, 1)], lambda x: 0 if x is t else None)
    new = fill([5])
    assert not asked and new[0].h == new[0].inner.a == new[1].a == 5 and new[1].b == 1
    elsewhere = {"held": Plain(a=1)}
    fill = skeleton([elsewhere["held"], Plain(a=2), Mixed(3, Plain(a=4))], lambda x: None)
    one, other = fill([]), fill([])
    assert len(asked) == 4 and one[0] is other[0] is elsewhere["held"]
    assert one[1] is not other[1] and one[2] is not other[2] and one[2].b is not other[2].b and one[2].b.a == 4
