"""What a user does with the wrapper beside training: errors, DataParallel, subclasses, assigned methods. Always against
eager PyTorch."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import pickle
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ortmodule
from ortmodule import ORTModule, stages
from ortmodule.capture import functional

pytestmark = pytest.mark.usefixtures("seeded")


class Calls(nn.Module):
    """A linear layer and a forward given as a function."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer if layer is not None else nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def outcome(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Result, or error."""
    try:
        out = model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)
    if isinstance(out, Tensor) and out.requires_grad:
        (out**2).sum().backward()
    return out.detach() if isinstance(out, Tensor) else out


def same(a: Any, b: Any) -> None:
    if isinstance(b, Tensor):
        assert isinstance(a, Tensor) and torch.allclose(a, b, rtol=1e-10, atol=1e-12), f"{a} against {b}"
    else:
        assert a == b, f"{a} against {b}"


def alike(ours: nn.Module, eager: nn.Module) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            same(p.grad, q.grad)
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        same(a, b)


# --- errors ---------------------------------------------------------------------------------------


class Odd(Exception):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def rows_asserted(m: Any, x: Tensor) -> Tensor:
    assert x.shape[0] == 3, "three rows, please"
    return m.layer(x)


def rows_checked(m: Any, x: Tensor) -> Tensor:
    if x.shape[0] != 3:
        raise Odd(f"{x.shape[0]} rows", 7)
    return m.layer(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", [rows_asserted, rows_checked])
def test_the_users_own_errors_are_the_users(function, strict):
    eager = Calls(function)
    w = ORTModule(copy.deepcopy(eager), strict=strict)
    for rows in (2, 3, 2, 3):
        x = torch.randn(rows, 4)
        same(outcome(w, x), outcome(eager, x))
    alike(w, eager)
    assert w.report().n_captures == 1 and not w.report().eager


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError("none"), KeyError("k"), StopIteration(), Odd("text", 3), UserWarning("w")])
def test_any_error_of_a_forward(error):
    def function(m: Any, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise error
        return m.layer(x)

    eager = Calls(function)
    w = ORTModule(copy.deepcopy(eager))
    for rows in (3, 2, 3):
        x = torch.randn(rows, 4)
        same(outcome(w, x), outcome(eager, x))
    alike(w, eager)


INDICES = {
    "embedding": (lambda m, x, i: m.layer(i), lambda: nn.Embedding(5, 4), (4, 5, -1)),
    "cross_entropy": (lambda m, x, i: F.cross_entropy(m.layer(x), i), None, (2, 4, -1)),
    "gather": (lambda m, x, i: m.layer(x).gather(1, i[:, None]), None, (3, 4)),
    "index": (lambda m, x, i: m.layer(x)[i], None, (2, 3, -1, -4)),
    "scatter": (lambda m, x, i: m.layer(x).scatter(1, i[:, None], 0.0), None, (3, 4)),
    "batch norm before it": (lambda m, x, i: m.norm(m.layer(x))[i], None, (2, 3, 1)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", list(INDICES))
def test_an_index_out_of_range_is_pytorchs_error(name, grad):
    """The engine says it in its own words; the user's `except IndexError` must go on working, and state must not be
    written twice."""
    function, layer, values = INDICES[name]
    eager = Calls(function, layer() if layer else None)
    w = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    raised = False
    for value in values:
        i = torch.tensor([0, 1, value])
        with torch.set_grad_enabled(grad):
            mine, theirs = outcome(w, x, i), outcome(eager, x, i)
        raised |= isinstance(theirs, tuple)
        same(mine, theirs)
    assert raised
    alike(w, eager)
    assert w.report().graphs[0].forwards


def test_errors_of_our_own_go_down_the_ladder(monkeypatch, caplog):
    """Whatever breaks in the capture: the submodule at hand goes to PyTorch, or the module."""
    real = functional.Functionalizer.operation

    def operation(self: Any, node: Any, target: Any, val: Any, env: Any) -> None:
        if "gelu" in str(target):
            raise ZeroDivisionError("ours")
        real(self, node, target, val, env)

    monkeypatch.setattr(functional.Functionalizer, "operation", operation)
    eager = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))
    w = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    same(outcome(w, x), outcome(eager, x))
    alike(w, eager)
    assert [h.name for h in w.report().host] == ["1"] and not w.report().eager
    with pytest.raises(ortmodule.CaptureError, match=r"'1'.*ZeroDivisionError: ours"):
        ORTModule(copy.deepcopy(eager), strict=True)(x)
    whole = Calls(lambda m, x: F.gelu(m.layer(x)))
    w = ORTModule(copy.deepcopy(whole))
    same(outcome(w, x), outcome(whole, x))
    (entry,) = w.report().eager
    assert entry.reason == "ZeroDivisionError: ours" and entry.file == __file__ and entry.line
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("place", ["capture", "load", "variant", "run", "guard"])
@pytest.mark.parametrize("error", [MemoryError, RuntimeError, ValueError])
def test_errors_anywhere_before_a_result(place, error, monkeypatch):
    from ortmodule import chain, climb, guard

    def broken(*_: Any, **__: Any) -> Any:
        raise error("ours")

    eager = Calls(lambda m, x: torch.tanh(m.layer(x)))
    w = ORTModule(copy.deepcopy(eager))
    at = {"capture": (climb, "capture"), "load": (climb, "Graph"), "variant": (chain.Graph, "_full_variant"), "run": (chain.Host, "drive_forward"),
          "guard": (guard.Guard, "structure")}[place]  # fmt: skip
    if place == "run":
        error = chain.Failed

    monkeypatch.setattr(*at, broken)
    for rows in (3, 3, 2):
        x = torch.randn(rows, 4)
        same(outcome(w, x), outcome(eager, x))
    alike(w, eager)
    assert sum(e.calls for e in w.report().eager) == 3 and all("ours" in e.reason for e in w.report().eager)


def test_arguments_that_hold_themselves():
    eager = Calls(lambda m, xs: m.layer(xs[0]))
    xs: list[Any] = [torch.randn(3, 4)]
    xs.append(xs)
    same(outcome(ORTModule(copy.deepcopy(eager)), xs), outcome(eager, xs))


def test_training_where_warnings_are_errors():
    eager = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.0), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = ORTModule(copy.deepcopy(eager), strict=True)
        for rows in (3, 5, 2):
            x = torch.randn(rows, 4)
            same(outcome(w, x), outcome(eager, x))
    alike(w, eager)


def test_a_graph_that_cannot_be_saved(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    w = ORTModule(nn.Linear(4, 4), save_path=str(tmp_path / "file"))
    w(torch.randn(3, 4))
    assert "cannot be saved" in caplog.text and w.report().n_captures == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", ["the name of a file", "a file's text", "the names of arguments"])
def test_training_goes_on_without_files_of_the_graph(fails, training, tmp_path, caplog, monkeypatch):
    def fail(*_args):
        raise ValueError("too large")

    if fails == "a file's text":
        monkeypatch.setattr(stages, "model_of", fail)
    elif fails == "the names of arguments":
        monkeypatch.setattr(stages, "argument_names", fail)
    eager = nn.Linear(4, 4).train(training)
    prefix = "no\ud800name" if fails == "the name of a file" else "m"  # as any name that the locale cannot write
    w = ORTModule(copy.deepcopy(eager), save_path=str(tmp_path), save_prefix=prefix)
    x = torch.randn(3, 4)
    same(outcome(w, x), outcome(eager, x))
    assert "the captured graph cannot be saved: " in caplog.text and w.report().n_captures == 1 and not w.report().eager


# --- DataParallel ---------------------------------------------------------------------------------


def test_around_data_parallel(caplog):
    eager = Calls(lambda m, x: torch.tanh(m.norm(m.layer(x))))
    w = ORTModule(nn.DataParallel(copy.deepcopy(eager)))
    for _ in range(2):
        x = torch.randn(3, 4)
        same(outcome(w, x), outcome(eager, x))
    alike(w, eager)
    assert isinstance(w, nn.DataParallel) and isinstance(w, ORTModule) and w.module.layer.weight.shape == (4, 4)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "DistributedDataParallel" in caplog.text
    (entry,) = ORTModule.report(w).eager
    assert entry.calls == 2
    again = copy.deepcopy(w)
    same(again(x), w(x))


def test_inside_data_parallel(caplog):
    """The copies are the user's module, in PyTorch."""
    eager = Calls(lambda m, x: torch.tanh(m.layer(x)))
    w = ORTModule(copy.deepcopy(eager))
    copies = [w._replicate_for_data_parallel() for _ in range(2)]
    assert all(type(c) is Calls for c in copies) and "DistributedDataParallel" in caplog.text
    parallel = nn.DataParallel(w)  # no device: it calls the module itself
    x = torch.randn(3, 4)
    same(outcome(parallel, x), outcome(eager, x))
    alike(w, eager)


# --- subclasses -----------------------------------------------------------------------------------


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def scores(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def save(self) -> str:
        return "the model's"

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x) * 2


class Doubled(ORTModule):
    def __init__(self, width: int, factor: float = 2.0) -> None:
        self.early = "set before"
        super().__init__(Helped(), ortmodule.DebugOptions(), max_captures=5)
        self.factor = factor
        self.extra = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor

    def predict(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self(x).argmax(-1)

    def scores(self, x: Tensor) -> Tensor:
        raise AssertionError("the module's forward calls the module's methods")

    def report(self) -> str:
        return "theirs"


class Simple(ORTModule):
    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle"])
def test_subclasses_of_ortmodule(way):
    w = Doubled(5, 3.0)
    if way == "deepcopy":
        w = copy.deepcopy(w)
    elif way == "pickle":
        w = pickle.loads(pickle.dumps(w))
    assert isinstance(w, Doubled) and isinstance(w, Helped) and type(w.module) is Helped
    assert w.early == "set before" and w.report() == "theirs" and w._ortmodule.settings.max_captures == 5
    assert list(w.state_dict()) == ["layer.weight", "layer.bias", "extra.weight", "extra.bias"]
    eager = Helped()
    eager.load_state_dict({k: v for k, v in w.state_dict().items() if "extra" not in k})
    x = torch.randn(3, 4)
    same(w(x).detach(), eager(x).detach() * 3)
    same(w.predict(x), eager(x).argmax(-1))
    with pytest.raises(TypeError, match="already"):
        w.__init__(5)  # type: ignore[misc]


def test_a_subclass_without_a_constructor():
    module = nn.Linear(4, 5)
    w = Simple(module, strict=True)
    x = torch.randn(3, 4)
    same(w.predict(x), module(x).argmax(-1))
    assert isinstance(w, Simple) and isinstance(w, nn.Linear) and w.report().graphs[0].forwards == 1 and w.module is module


class Counted(nn.Module):
    """Counts the classes below it, and doubles what they are given."""

    below: list[type] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Counted.below.append(cls)
        inner = cls.forward
        cls.forward = lambda self, x: inner(self, x * 2)  # type: ignore[method-assign]


class Tripled(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def scale(self, x: Tensor) -> Tensor:
        return x * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.layer(x))

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


@pytest.mark.parametrize("way", ["itself", "forward of its own", "assigned", "deepcopy"])
def test_a_class_that_changes_those_below(way):
    """The wrapper's class is none of the user's: Python's __init_subclass__ is not told of it. A forward on the object
    (Accelerate's hooks) is run by the engine, too."""
    eager = Tripled()
    module = copy.deepcopy(eager)
    if way == "forward of its own":
        module.forward = functools.partial(Tripled.forward, module)
    w = ORTModule(module, strict=True)
    if way == "assigned":
        w.scale = lambda x: x * 5
        eager.scale = lambda x: x * 5
    if way == "deepcopy":
        w = copy.deepcopy(w)
    for _ in range(2):
        x = torch.randn(3, 4)
        same(outcome(w, x), outcome(eager, x))
        gc.collect()  # what stood for the module at the capture
    alike(w, eager)
    assert [g.forwards for g in w.report().graphs] == [2] and Counted.below == [Tripled]


# --- methods and attributes of the wrapper --------------------------------------------------------


def test_methods_assigned_on_the_wrapper():
    """They count for what runs through the wrapper, as on a plain module, and leave the wrapped module alone."""
    module = Helped()
    eager = copy.deepcopy(module)
    plain = copy.deepcopy(module)
    w = ORTModule(module, strict=True)
    x = torch.randn(3, 4)
    same(outcome(w, x), outcome(eager, x))
    for model in (w, eager):
        before = model.scores
        model.scores = lambda x, before=before: before(x) - 1
        model.save = (lambda self: f"{type(self).__name__} by another hand").__get__(model)
        model.state_dict = (lambda self, *_, **__: {"only": self.layer.weight}).__get__(model)
        model.train = lambda mode=True, before=model.train: before(mode)
    same(outcome(w, x), outcome(eager, x))
    alike(w, eager)
    assert w.save() == eager.save() and list(w.state_dict()) == list(eager.state_dict()) == ["only"]
    assert w.eval() is w and not module.training
    assert module.save() == "the model's" and "scores" not in module.__dict__ and list(module.state_dict()) == list(plain.state_dict())
    module.zero_grad()
    same(module(x).detach(), plain(x).detach())
    again = copy.deepcopy(w)
    assert again.save() == w.save() and again.scores is not None
    same(again(x).detach(), eager(x).detach())
    del w.scores
    same(w(x).detach(), plain(x).detach())
    with pytest.raises(AttributeError):
        del w.scores
    w.scale = lambda t: t  # no method of the class: state, which is shared
    assert module.scale is w.scale
    assert w.report().node_share == 1 and not w.report().eager


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_of_what_refers_to_itself(way):
    """accelerate leaves `_original_forward`, a bound method of the model, on the model."""
    eager = Helped()
    w = ORTModule(copy.deepcopy(eager))
    for model in (w, eager):
        model._original_forward = model.forward
        model.other = [model]
    if way == "deepcopy":
        ours, theirs = copy.deepcopy(w), copy.deepcopy(eager)
    elif way == "pickle":
        ours, theirs = pickle.loads(pickle.dumps(w)), pickle.loads(pickle.dumps(eager))
    else:
        file = io.BytesIO()
        torch.save(w, file)
        ours, theirs = torch.load(io.BytesIO(file.getvalue()), weights_only=False), eager
    x = torch.randn(3, 4)
    assert ours is not w and ours.other[0] is ours and ours._original_forward.__self__ is ours
    same(ours._original_forward(x).detach(), theirs._original_forward(x).detach())
    same(ours(x).detach(), theirs(x).detach())


def test_copies_keep_an_assigned_forward():
    w = ORTModule(nn.Linear(4, 4))
    w.forward = torch.tanh
    x = torch.randn(3, 4)
    same(copy.deepcopy(w)(x), torch.tanh(x))


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.module = "a word"
        self._ortmodule = 3.0

    def report(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self._ortmodule


def test_attributes_of_the_same_name_are_told_once(caplog):
    eager = Awkward()
    w = ORTModule(copy.deepcopy(eager), strict=True)
    ORTModule(copy.deepcopy(eager))
    assert w.report() == "mine" and w.module == "a word" and ORTModule.report(w).n_captures == 0
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 3 and all(any(repr(name) in text for text in said) for name in ("report", "module", "_ortmodule"))
    x = torch.randn(3, 4)
    same(outcome(w, x), outcome(eager, x))
    alike(w, eager)


# --- state that forward changes -------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("other", torch.ones(4), persistent=False)
        self.register_buffer("late", None)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def counted(m: Any, x: Tensor) -> Tensor:
    m.count = m.count + 1
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return m.layer(x) * m.count + m.mean


def exchanged(m: Any, x: Tensor) -> Tensor:
    m.mean, m.other = m.other, m.mean
    return m.layer(x) * m.mean


def viewed(m: Any, x: Tensor) -> Tensor:
    m.mean = x.detach()[0]
    m.mean = m.mean + 1
    return m.layer(x) * m.mean


def made_late(m: Any, x: Tensor) -> Tensor:
    if m.late is None:
        m.late = x.detach().mean(0)
    return m.layer(x) * m.late


def remembered(m: Any, x: Tensor) -> Tensor:
    before = m.mean
    m.mean = m.mean * 0.9 + m.layer(x).detach().mean(0)
    return m.layer(x) - before + m.mean


def of_an_argument(m: Any, x: Tensor) -> Tensor:
    m.mean = x.detach()[0]
    return m.layer(x) * m.mean


def grown(m: Any, x: Tensor) -> Tensor:
    m.other = torch.cat([m.other, m.other[:1] * 2])
    return m.layer(x) * m.other.sum()


def frozen(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.requires_grad_(False)
    return m.layer(x)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("function", [counted, exchanged, viewed, remembered, of_an_argument, made_late, grown, frozen])
def test_buffers_that_forward_assigns(function, inner):
    """`self.count = self.count + 1`: the export loses it. Who holds the tensor of a step before keeps its values."""
    eager = nn.Sequential(nn.Linear(4, 4), Buffers(function)) if inner else Buffers(function)
    w = ORTModule(copy.deepcopy(eager))
    held: list[list[Tensor]] = [[], []]
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4)
        same(outcome(w, x), outcome(eager, x))
        alike(w, eager)
        for m, kept in zip((w, eager), held, strict=True):
            kept += [b for b in m.buffers() if b is not None]
    for a, b in zip(*held, strict=True):
        torch.testing.assert_close(a, b)
    report = w.report()
    if function in (counted, exchanged, remembered):
        assert report.node_share == 1 and not report.eager, str(report)


class State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(3, 4))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = torch.tanh(self.layer(x) + self.state)
        self.state = h.detach() * 0.5
        self.steps = self.steps + 1
        return h, {"state": self.state, "steps": self.steps}


def test_a_buffer_that_forward_assigns_and_returns():
    """The result is the buffer, until the next call."""
    eager = State()
    w = ORTModule(copy.deepcopy(eager), strict=True)
    held: list[list[Tensor]] = [[], []]
    for step in range(4):
        x = torch.randn(3, 4)
        for m, kept in zip((w, eager), held, strict=True):
            with torch.set_grad_enabled(step != 2):
                h, left = m(x)
            assert left["state"] is m.state and left["steps"] is m.steps and not left["state"].requires_grad
            if step != 2:
                h.sum().backward()
            left["state"][0] = 0
            m.steps += step
            kept += left.values()
        alike(w, eager)
    for a, b in zip(*held, strict=True):
        torch.testing.assert_close(a, b)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_call_of_the_users_own():
    for make in (Twice, lambda: nn.Sequential(Twice(), nn.Tanh())):
        eager = make()
        w = ORTModule(copy.deepcopy(eager), strict=True)
        x = torch.randn(3, 4)
        same(outcome(w, x), outcome(eager, x))
        alike(w, eager)


# --- arguments and results that are no tensors ----------------------------------------------------


class Box:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


VALUES = {
    "numpy": (lambda h, v: h * torch.from_numpy(v).sum(), [np.ones(2), np.ones(2) * 3, np.ones(3)]),
    "numpy scalars": (lambda h, v: h * v, [np.float64(2), np.int64(2), np.float64(3), True, 2, 2.0]),
    "set": (lambda h, v: h * len(v), [{1}, {1, 2}, {"a", "b"}, frozenset({1.5})]),
    "deque": (lambda h, v: h * v[0], [collections.deque([1.0]), collections.deque([2.0]), collections.deque([torch.ones(4)])]),
    "partial": (lambda h, v: v(h), [functools.partial(F.leaky_relu, negative_slope=s) for s in (0.1, 0.5)]),
    "iterator": (lambda h, v: h * next(v), [[2.0, 3.0], [4.0]]),
    "random": (lambda h, v: h * v.random(), [random.Random(1), random.Random(2)]),
    "generator": (lambda h, v: h * torch.rand((), generator=v), [1, 2]),
    "slots": (lambda h, v: h * v.value, [Box(2.0), Box(3.0), Box(torch.ones(4))]),
    "module": (lambda h, v: v(h), [nn.Threshold(0.0, 1.0), nn.Threshold(0.0, 2.0)]),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_arguments_of_any_type(name):
    function, values = VALUES[name]
    eager = Calls(lambda m, x, v: function(m.layer(x), v))
    w = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    for value in [*values, values[0]]:
        given = [copy.deepcopy(value) for _ in range(2)]
        if name == "iterator":
            given = [iter(v) for v in given]
        elif name == "generator":
            given = [torch.Generator().manual_seed(v) for v in given]
        same(outcome(w, x, given[0]), outcome(eager, x, given[1]))
    alike(w, eager)


RESULTS = {
    "generator": (lambda h: (h * i for i in range(2)), list),
    "map": (lambda h: map(torch.tanh, [h, -h]), list),
    "closure": (lambda h: (lambda: h * 2), lambda f: [f()]),
    "partial": (lambda h: functools.partial(torch.add, h), lambda f: [f(1)]),
    "set": (lambda h: {h}, list),
    "deque": (lambda h: collections.deque([h, 2 * h]), list),
    "slots": (lambda h: Box([h]), lambda b: b.value),
    "nested": (lambda h: Box({"a": (Box(h), 1, None)}), lambda b: [b.value["a"][0].value]),
}


@pytest.mark.parametrize("name", list(RESULTS))
def test_results_of_any_type(name):
    function, read = RESULTS[name]
    eager = Calls(lambda m, x: function(m.layer(x)))
    w = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        x = torch.randn(3, 4)
        for a, b in zip(read(w(x)), read(eager(x)), strict=True):
            same(a.detach(), b.detach())


# --- wrappers inside modules ----------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner = wrap(Helped())
        self.again = self.inner
        self.layers = nn.Sequential(wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.again(self.inner(x)))


@pytest.mark.parametrize("outer", [False, True])
def test_wrappers_inside_a_module(outer):
    """They work by themselves; in a module that is wrapped they are part of its graph."""
    eager = Around(lambda m: m)
    model: Any = Around(ORTModule)
    model.load_state_dict(eager.state_dict())
    inner = model.inner
    w = ORTModule(model, strict=True) if outer else copy.deepcopy(model)
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4)
        same(outcome(w, x), outcome(eager, x))
        alike(w, eager)
    assert model.inner is model.again is inner and isinstance(inner, ORTModule) and w.inner is w.again
    assert all(type(m.state_dict()) is type(w.state_dict()) for m in (w, eager)) and list(w.state_dict()) == list(eager.state_dict())
    reports = [w.report()] if outer else [w.inner.report(), w.layers[0].report()]
    assert all(r.node_share == 1 and not r.eager for r in reports)
    assert not outer or not inner.report().graphs


TOOLS = {
    "trace": lambda m, x: torch.jit.trace(m, x),
    "script": lambda m, x: torch.jit.script(m),
    "export": lambda m, x: torch.export.export(m, (x,)).module(),
    "compile": lambda m, x: torch.compile(m, backend="eager"),
    "functional_call": lambda m, x: lambda x: torch.func.functional_call(m, {n: p * 2 for n, p in m.named_parameters()}, (x,)),
    "vmap": lambda m, x: lambda x: torch.func.vmap(m)(x[None])[0],
}


@pytest.mark.parametrize("tool", list(TOOLS))
def test_tools_of_pytorch(tool):
    """They see the user's module, and the wrapper goes on working."""
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    w = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    same(TOOLS[tool](w, x)(x).detach(), TOOLS[tool](eager, x)(x).detach())
    same(outcome(w, x), outcome(eager, x))
    alike(w, eager)
    assert w.report().graphs


COUNTS = [True]


class Sometimes(nn.Module):
    """Assigns its buffer in some calls and only reads it in others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if COUNTS[0]:
            self.count = self.count + 1
        return self.layer(x) + self.count


def test_a_buffer_that_only_some_calls_assign():
    """The captures of the two kinds of calls both see the tensor of now."""
    eager = Sometimes()
    w = ORTModule(copy.deepcopy(eager))
    for COUNTS[0] in (True, False, False, True, True, False, True, False, True, True, False):
        x = torch.randn(3, 4)
        same(outcome(w, x), outcome(eager, x))
        alike(w, eager)
    assert len(w.report().graphs) == 2 and not w.report().eager


def test_two_wrappers_of_a_class_have_one_type() -> None:
    """As two modules have: an ensemble by torch.func; what is assigned on one is not the other's."""
    a, b = (ORTModule(nn.Linear(2, 2)) for _ in range(2))
    x = torch.ones(3, 2)
    expected = torch.stack([a(x), b(x)])
    assert type(a) is type(b)
    params, buffers = torch.func.stack_module_state([a, b])
    got = torch.vmap(lambda p, q: torch.func.functional_call(a, (p, q), (x,)))(params, buffers)
    torch.testing.assert_close(got, expected)
    a.extra_repr = lambda: "mine"  # type: ignore[method-assign]
    assert "mine" in repr(a) and "mine" not in repr(b) and isinstance(a, type(b))
    del a.extra_repr
    assert "mine" not in repr(a)

    class Own(nn.Linear):
        pass

    c = Own(2, 2)
    c.forward = lambda x: x  # type: ignore[method-assign]
    assert type(ORTModule(c)) is not type(ORTModule(Own(2, 2)))
    kept = weakref.ref(Own)
    del Own, c
    gc.collect()
    assert kept() is None
