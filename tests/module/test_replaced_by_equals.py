"""State that forward reads is replaced by what looks the same, and changed then; or looks the same after a change that
is none of an element's: classes, dictionaries, what was not set, order, shape. Beside eager PyTorch, over the calls
before and after."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairs import close
from torch import Tensor, nn

from ortmodule import ORTModule, guard

pytestmark = pytest.mark.usefixtures("fp64")


class Scaled(nn.Module):
    """`by` gives the number to multiply with; it reads `held`."""

    def __init__(self, held: Any, by: Callable[[Any], Any]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.held = held
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.by(self.held)  # type: ignore[no-any-return]


class Box:
    kind = 2.0

    def __init__(self, k: float = 2.0) -> None:
        self.k = k


class Other(Box):
    kind = 3.0


class Slotted:
    __slots__ = ("k",)


class Word(str):
    k = 2.0


class Noted(str):
    __slots__ = ("k",)
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Pair(collections.namedtuple("Pair", "a")):
    k = 2.0


class Item:
    """Equal to all of its kind."""

    def __init__(self, k: float) -> None:
        self.k = k

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item)

    def __hash__(self) -> int:
        return 1


def word(k: float, kind: type = Word) -> Any:
    made = kind("a")
    made.k = k
    return made


def pair(k: float) -> Pair:
    made = Pair(1)
    made.k = k
    return made


def put(m: Scaled, value: Any) -> None:
    m.held = value


def edit(change: Callable[[Any], Any]) -> Callable[[Scaled], None]:
    def done(m: Scaled) -> None:
        change(m.held)

    return done


def refill(s: set[int]) -> None:
    s.clear()
    s.update((8, 0))


ALIVE: list[Box] = []


def boxed() -> Box:
    ALIVE.append(Box())
    return ALIVE[-1]


def cell_of(fill: bool) -> Any:
    """A function that asks whether a variable around it has a value."""

    def around() -> Any:
        def asks() -> float:
            try:
                return k
            except NameError:
                return 7.0

        def fills() -> None:
            nonlocal k
            k = 3.0

        if fill:
            k = 2.0
        return asks, fills

    return around()


# what is held, how it is read, changes one after the other
ROWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], list[Callable[[Scaled], Any]]]] = {
    "a list by an equal one, which is edited": (lambda: [2.0], lambda h: h[0], [lambda m: put(m, [2.0]), edit(lambda h: h.__setitem__(0, 3.0))]),
    "a list within a list": (lambda: [[2.0]], lambda h: h[0][0], [lambda m: put(m, [[2.0]]), edit(lambda h: h[0].append(3.0)), edit(lambda h: h[0].__setitem__(0, 3.0))]),
    "a list in a tuple": (lambda: ([2.0],), lambda h: h[0][0], [lambda m: put(m, ([2.0],)), edit(lambda h: h[0].__setitem__(0, 3.0))]),
    "a dictionary": (lambda: {"a": [2.0]}, lambda h: h["a"][0], [lambda m: put(m, {"a": [2.0]}), edit(lambda h: h["a"].__setitem__(0, 3.0)), edit(lambda h: h.update(a=[5.0]))]),
    "a dictionary with numbers": (lambda: {1: 2.0}, lambda h: h[1], [lambda m: put(m, {1: 2.0}), edit(lambda h: h.update({1: 3.0}))]),
    "an OrderedDict": (lambda: collections.OrderedDict(a=2.0), lambda h: h["a"], [lambda m: put(m, copy.copy(m.held)), edit(lambda h: h.update(a=3.0))]),
    "an object's dictionary": (Box, lambda h: h.k, [edit(lambda h: setattr(h, "__dict__", {"k": 3.0})), edit(lambda h: setattr(h, "k", 5.0))]),
    "an object's class": (Box, lambda h: h.kind, [edit(lambda h: setattr(h, "__class__", Other))]),
    "a slot that was not set": (Slotted, lambda h: h.k if hasattr(h, "k") else 7.0, [edit(lambda h: setattr(h, "k", 3.0))]),
    "a slot that is set no more": (lambda: [s := Slotted(), setattr(s, "k", 3.0)], lambda h: h[0].k if hasattr(h[0], "k") else 7.0, [edit(lambda h: delattr(h[0], "k"))]),
    "an empty variable": (lambda: cell_of(False), lambda h: h[0](), [edit(lambda h: h[1]())]),
    "a word with attributes": (lambda: word(2.0), lambda h: h.k, [lambda m: put(m, word(3.0))]),
    "a word with a slot": (lambda: word(2.0, Noted), lambda h: h.k, [lambda m: put(m, word(3.0, Noted))]),
    "a word that equals all others": (lambda: Noted("a"), lambda h: float(ord(h[0])), [lambda m: put(m, Noted("b"))]),
    "the sign of a zero of numpy's": (lambda: np.float64(0.0), lambda h: math.copysign(2.0, h), [lambda m: put(m, np.float64(-0.0))]),
    "the sign of a zero in a complex number": (lambda: [2 + 0j], lambda h: math.copysign(2.0, h[0].imag), [edit(lambda h: h.__setitem__(0, complex(2, -0.0)))]),
    "a number beyond 64 bits": (lambda: 8, lambda h: float(h % 1000), [lambda m: put(m, 2**64), lambda m: put(m, 2**64 + 2**61 - 1), lambda m: put(m, -8)]),
    "a named tuple with attributes": (lambda: pair(2.0), lambda h: h.k, [lambda m: put(m, pair(3.0))]),
    "a set of equals": (lambda: {Item(2.0)}, lambda h: next(iter(h)).k, [edit(lambda h: (h.clear(), h.add(Item(3.0))))]),
    "1 and True in a set": (lambda: {1}, lambda h: 2.0 if next(iter(h)) is True else 3.0, [edit(lambda h: (h.clear(), h.add(True)))]),
    "the order of a set": (lambda: {0, 8}, lambda h: [*h][0] + 1.0, [edit(refill)]),
    "an array's shape": (lambda: np.array([[2.0, 3.0]]), lambda h: float(len(h)), [edit(lambda h: setattr(h, "shape", (2, 1)))]),
    "an array's type": (lambda: np.array([1, 2], np.int64), lambda h: float(h[1]), [edit(lambda h: setattr(h, "dtype", np.int32))]),
    "what a defaultdict makes": (lambda: collections.defaultdict(lambda: 2.0), lambda h: h.default_factory(), [edit(lambda h: setattr(h, "default_factory", lambda: 3.0))]),
    "a partial's arguments": (lambda: functools.partial(max, 2.0), lambda h: h(0.0), [edit(lambda h: h.__setstate__((max, (3.0,), {}, {})))]),
    "an object that is gone": (lambda: weakref.ref(boxed()), lambda h: h().k if h() is not None else 7.0, [lambda m: ALIVE.clear()]),
    "an object of a weak dictionary": (lambda: weakref.WeakValueDictionary(a=boxed()), lambda h: h["a"].k if "a" in h else 7.0, [lambda m: ALIVE.clear()]),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_changes_is_seen(row: str) -> None:
    make, by, changes = ROWS[row]
    torch.manual_seed(0)
    eager = Scaled(make(), by)
    module = Scaled(make(), by)
    module.load_state_dict(eager.state_dict())
    ours = ORTModule(module)
    x = torch.randn(2, 4)
    for change in (lambda m: None, *changes):
        for m in (eager, module):
            change(m)
        gc.collect()
        for _ in range(3):
            for m in (eager, ours):
                m.zero_grad()
                m(x).sum().backward()
            close(ours(x), eager(x))
            close(ours.line.weight.grad, eager.line.weight.grad)


def test_a_submodules_dictionary() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    for _ in range(3):
        for m in (eager, ours):
            m(x).sum().backward()
        close(ours[0].weight.grad, eager[0].weight.grad)
        other = nn.Linear(4, 4)
        for m in (eager, ours):
            m[0].__dict__ = copy.deepcopy(other).__dict__


def test_a_cache_of_tensors_is_cleared() -> None:
    @functools.cache
    def table(n: int) -> Tensor:
        return torch.arange(float(n))

    line = nn.Linear(4, 4)
    ours = ORTModule(Scaled(None, lambda _: table(4)))
    ours.line = line
    x = torch.randn(2, 4)
    for edited in (False, True):
        table.cache_clear()
        if edited:
            table(4).mul_(2)
        for _ in range(4):
            close(ours(x), line(x) * table(4))


def test_two_captures_that_have_met_two_equal_lists() -> None:
    """Only the second has looked into it."""
    torch.manual_seed(0)

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.by = [2.0]

        def forward(self, x: Tensor, long: bool) -> Tensor:
            by = self.by
            return self.line(x) * (by[0] if long else 1.0)  # type: ignore[no-any-return]

    eager = Long()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    for put_in, long, edited in ((None, False, None), ([2.0], True, None), ([2.0], True, None), (None, True, 3.0), (None, False, None), (None, True, 5.0)):
        if put_in is not None:
            for m in (eager, ours):
                m.by = [*put_in]
        if edited is not None:
            for m in (eager, ours):
                m.by[0] = edited
        for _ in range(2):
            close(ours(x, long), eager(x, long))


# what is put on the module anew at every step, and how it is read
EQUALS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a list": (lambda: [2.0], lambda h: h[0]),
    "a set": (lambda: {3, 2}, lambda h: float(sum(h))),
    "a frozenset": (lambda: frozenset([(3, 2)]), lambda h: float(len(h))),
    "a range": (lambda: range(1, 3), lambda h: float(len(h))),
    "a slice": (lambda: slice(2), lambda h: float(h.stop)),
    "a device": (lambda: torch.device("cpu"), lambda h: torch.full((), 2.0, device=h)),
    "a complex number": (lambda: complex(2.0, 1.0), lambda h: h.real),
    "a number of numpy's": (lambda: np.float32(2.0), lambda h: float(h)),
    "no number": (lambda: np.float64("nan"), lambda h: 2.0 if h != h else 3.0),
}


@pytest.mark.parametrize("row", EQUALS)
def test_an_equal_at_every_step_makes_no_capture(row: str) -> None:
    make, by = EQUALS[row]
    ours = ORTModule(Scaled(make(), by))
    for _ in range(12):
        ours.held = make()
        ours(torch.randn(2, 4)).sum().backward()
    assert len(ours.report().graphs) == 1 and not ours.report().eager


def test_an_equal_set_is_looked_into() -> None:
    torch.manual_seed(0)
    eager = Scaled({3, 2}, lambda h: float(sum(h)))
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    for change in (lambda m: put(m, {3, 2}), edit(lambda h: h.add(5)), edit(lambda h: h.remove(5)), lambda m: put(m, {3, 2})):
        for m in (eager, ours):
            change(m)
        for _ in range(2):
            close(ours(x), eager(x))
    assert len(ours.report().graphs) == 2


def test_what_is_told_by_its_address_lives_as_long_as_that_counts() -> None:
    """Names, too: another could be put in the memory of one that is gone."""
    module = nn.Linear(4, 4)
    module.register_buffer("".join(["na", "me"]), None)
    own = guard.Guard(module)
    (name,) = module._buffers
    assert any(x is name for held in own.refs() for x in held)


def test_what_is_put_on_the_module_goes() -> None:
    """A batch or a result in an attribute that no forward reads: those of the last steps may stay, no more."""
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    seen = []
    for _ in range(40):
        x = torch.randn(2, 4)
        y = ours(x)
        y.sum().backward()
        ours.batch, ours.result = x, y
        seen += [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert sum(r() is not None for r in seen) <= 12 and len(ours.report().graphs) == 1
