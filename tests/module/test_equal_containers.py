"""What stands where an equal container stood, and attributes of objects that forward does not ask for, make no new
capture: beside eager PyTorch, over the calls before and after, with what is mutated then and what forward can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import close
from torch import Tensor, nn

from ortmodule import _C, ORTModule

pytestmark = pytest.mark.usefixtures("fp64")


class Plain:
    def __init__(self) -> None:
        self.n = 2.0
        self.names = ["a", "b"]
        self.several = {1, 2}
        self.nested = ([1.0], {"k": [2.0]})
        self.one = self.other = [1.0]
        self.cache = self.kept = [1.0, 2.0]


class Renaming(Plain):
    """Reads its attributes by itself, as configurations of Hugging Face do, some by another name."""

    attribute_map = {"width": "n"}

    def __getattribute__(self, key: str) -> Any:
        if key != "attribute_map" and key in super().__getattribute__("attribute_map"):
            key = super().__getattribute__("attribute_map")[key]
        return super().__getattribute__(key)

    @property
    def view(self) -> View:
        return View(self)


class View:
    def __init__(self, of: Renaming) -> None:
        self.of = of


class Held(nn.Module):
    def __init__(self, held: Any, by: Callable[[Any], Any]) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.held = held
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.by(self.held)  # type: ignore[no-any-return]


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda h: setattr(h, name, copy.deepcopy(value))


def both(h: Any) -> None:
    h.one = h.other = [1.0]


def copied(h: Any) -> int:
    one, other = copy.deepcopy([h.one, h.other])
    one.append(3.0)
    return len(other)


def longer(h: Any) -> int:
    h.one.append(1.0)
    try:
        return len(h.other)
    finally:
        h.one.pop()


def stores(h: Any) -> int:
    h.kept = h.cache
    return len(h.cache)


# what forward reads, changes that make no capture, and what comes then, which is seen
SAME: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None], Callable[[Any], None]]] = {
    "an attribute that is not read": (lambda h: h.n, put("unread", [1]), put("n", 3.0)),
    "a list": (lambda h: len(h.names), put("names", ["a", "b"]), lambda h: h.names.append("c")),
    "a set": (lambda h: sum(h.several), put("several", {1, 2}), lambda h: h.several.add(4)),
    "a list in a tuple": (lambda h: h.nested[0][0], put("nested", ([1.0], {"k": [2.0]})), lambda h: h.nested[0].append(h.nested[0].pop() + 1)),
    "a list in a dictionary": (lambda h: h.nested[1]["k"][0], lambda h: h.nested[1].update(k=[2.0]), lambda h: h.nested[1]["k"].__setitem__(0, 7.0)),
    "a dictionary and its list": (lambda h: h.nested[1]["k"][0], put("nested", ([1.0], {"k": [2.0]})), lambda h: h.nested[1].update(k=[3.0])),
}  # fmt: skip
# what forward reads, changes that it can tell
TOLD: dict[str, tuple[Callable[[Any], Any], list[Callable[[Any], None]]]] = {
    "all attributes": (lambda h: len(vars(h)), [put("more", 1), put("names", ["a", "b"])]),
    "one that is not there": (lambda h: 2 if hasattr(h, "more") else 3, [put("names", ["a", "b"]), put("more", [1])]),
    "which list it is": (lambda h: 2 if h.one is h.other else 3, [put("one", [1.0]), both]),
    "one list at two places, copied": (copied, [put("one", [1.0]), both]),
    "one list at two places, edited meanwhile": (longer, [put("one", [1.0]), both]),
    "a list put where it is already": (stores, [put("cache", [1.0, 2.0])]),
}


def train(ours: Any, module: Any, eager: Any, changes: list[Callable[[Any], None]]) -> None:
    x = torch.randn(2, 3)
    for change in (lambda h: None, *changes):
        for m in (module, eager):
            change(m.held)
        for _ in range(3):
            close(ours(x), eager(x))
            assert (eager.held.kept is eager.held.cache) == (module.held.kept is module.held.cache)


def pair(kind: Any, by: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    eager, module = Held(kind(), by), Held(kind(), by)
    module.load_state_dict(eager.state_dict())
    return ORTModule(module), module, eager


@pytest.mark.parametrize("kind", [Plain, Renaming])
@pytest.mark.parametrize("row", SAME)
def test_no_capture(row: str, kind: Any) -> None:
    by, same, told = SAME[row]
    ours, module, eager = pair(kind, by)
    train(ours, module, eager, [same] * 10)
    assert len(ours.report().graphs) == 1 and not ours.report().eager
    train(ours, module, eager, [told, same, told])


@pytest.mark.parametrize("kind", [Plain, Renaming])
@pytest.mark.parametrize("row", TOLD)
def test_what_forward_can_tell(row: str, kind: Any) -> None:
    by, changes = TOLD[row]
    train(*pair(kind, by), changes)


def test_what_is_read_by_another_name_or_made_at_every_read() -> None:
    ours, module, eager = pair(Renaming, lambda h: h.width * h.view.of.n)
    train(ours, module, eager, [put("more", i) for i in range(9)])
    assert len(ours.report().graphs) == 1
    train(ours, module, eager, [put("n", 3.0), lambda h: vars(h).update(n=5.0)])
    assert len(ours.report().graphs) == 3


@pytest.mark.parametrize("by", [lambda m: copied(m), lambda m: longer(m)])
def test_attributes_of_a_module_that_were_one_list(by: Callable[[Any], Any]) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 3)
            self.one = self.other = [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x) * by(self)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    eager = Own()
    module = copy.deepcopy(eager)
    ours, x = ORTModule(module), torch.randn(2, 3)
    for change in (lambda m: None, put("one", [1.0]), both):
        for m in (module, eager):
            change(m)
        for _ in range(2):
            close(ours(x), eager(x))


def test_what_a_call_asks_does_not_grow() -> None:
    ours, module, eager = pair(Renaming, lambda h: h.width * len(h.names))
    train(ours, module, eager, [])
    (entry,) = (e for of in ours._ortmodule.entries.values() for e in of)
    before = len(entry.held.table)
    train(ours, module, eager, [put("names", ["a", "b"])] * 10)
    assert len(entry.held.table) <= before + 4  # the contents of the list that is there
    assert _C.guard_check(entry.held.table) < 0


def test_saves_of_a_hugging_face_model_make_no_capture(tmp_path: Path) -> None:
    """save_pretrained gives the configuration a new list, of the name of the model's class."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    ours, ids = ORTModule(model), torch.arange(8)[None]
    for _ in range(10):
        ours(input_ids=ids, labels=ids).loss.backward()
        ours.save_pretrained(tmp_path)
    assert len(ours.report().graphs) == 1 and not ours.report().eager
    model.config.output_hidden_states = True  # which forward reads
    assert len(ours(input_ids=ids).hidden_states) == 2


class Hiding(Plain):
    """Reads more than it is asked for."""

    def __init__(self) -> None:
        self.overrides: dict[str, float] = {}
        self.inner = Plain()
        super().__init__()

    def __getattribute__(self, key: str) -> Any:
        read = super().__getattribute__
        if key == "inner_n":
            return read("inner").n
        if key == "many":
            return float(len(read("names")))
        return read("overrides")[key] if key in read("overrides") else read(key)


class Unit(float):
    pass


class Made(Plain):
    """Makes what it is asked for, of a class whose values lie in C."""

    def __getattribute__(self, key: str) -> Any:
        return Unit(super().__getattribute__("n")) if key == "width" else super().__getattribute__(key)


class Base:
    def __init__(self) -> None:
        self.n, self.mode, self.cache = 2.0, "x", None
        self.kept = self.cache


class Derived(Base):
    def __getattribute__(self, key: str) -> Any:
        value = super().__getattribute__(key)
        return value * 2 if key == "n" and object.__getattribute__(self, "mode") == "double" else value


class Two(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.derived = Base(), Derived()
        self.derived.mode = "double"


class Bound(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.push, self.pop = self.names.append, self.names.pop


def pushed(h: Any) -> int:
    h.push("c")
    n = len(h.names)
    h.pop()
    return n


BEHIND: dict[str, tuple[Any, Callable[[Any], Any], list[Callable[[Any], None]]]] = {
    "a dictionary of others": (Hiding, lambda h: h.n, [put("overrides", {}), lambda h: h.overrides.update(n=5.0)]),
    "an object inside": (Hiding, lambda h: h.inner_n, [lambda h: vars(h).update(inner=Plain()), lambda h: setattr(h.inner, "n", 5.0)]),
    "a length": (Hiding, lambda h: h.many, [put("names", ["a", "b"]), lambda h: h.names.append("c")]),
    "an attribute of the class": (Renaming, lambda h: h.width, [put("attribute_map", {"width": "n"}), lambda h: h.attribute_map.update(width="wide"),
                                                                put("wide", 7.0)]),
    "what is made when it is read": (Made, lambda h: h.width * 1.0, [put("n", 3.0)]),
    "a class that derives from another": (Two, lambda h: h.base.n * h.derived.n, [lambda h: setattr(h.derived, "mode", "plain")]),
    "methods of a list": (Bound, pushed, [put("names", ["a", "b"])]),
}  # fmt: skip


@pytest.mark.parametrize("row", BEHIND)
def test_what_lies_behind_a_name(row: str) -> None:
    kind, by, changes = BEHIND[row]
    if row == "an attribute of the class":  # the other half of the rename is there before it is read
        changes = [changes[2], *changes[:2]]
    train(*pair(kind, by), changes)
