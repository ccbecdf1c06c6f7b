"""One parameter, buffer, submodule or tensor under several names: in the tree, and in a list, a dictionary, a closure or
another attribute. What is held against eager in fp64: outputs, gradients of all that there were, second derivatives; also
when one of the names gets another object between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded", "doubles")

G: Any = None


@pytest.fixture
def doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def both(make: Callable[[], nn.Module]) -> list[tuple[Any, Any]]:
    """(what is called, the module) of eager and of the engine."""
    made = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(3)
        net = make()
        made.append((wrap(net), net))
    return made


class Kept(nn.Module):
    """A weight that is also known by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind = nn.Linear(6, 6), kind
        w = self.a.weight
        self.d: Any = {"dict": {"w": w}, "list": [w], "closure": lambda: w}.get(kind)
        if kind == "attribute":
            object.__setattr__(self, "d", w)

    def forward(self, x: Tensor) -> Tensor:
        d, kind = self.d, self.kind
        w = d["w"] if kind == "dict" else d[0] if kind == "list" else d() if kind == "closure" else d
        return self.a(x).tanh() @ w


KINDS = ["dict", "list", "closure", "attribute"]


@pytest.mark.parametrize("warm", [1, 3, 4])
@pytest.mark.parametrize("how", ["functional_call", "new", "data"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_registered_one_is_replaced(kind: str, how: str, warm: int) -> None:
    got = []
    for m, net in both(lambda: Kept(kind)):
        old, x = net.a.weight, torch.arange(48.0).view(8, 6).sin()
        for _ in range(warm):
            m(x).sum().backward()
        m.zero_grad()
        new = nn.Parameter(old.detach() * 2)
        if how == "functional_call":
            y = torch.func.functional_call(m, {"a.weight": new}, (x,))
        else:
            if how == "new":
                net.a.weight = new
            else:
                old.data = old.data * 2
            y = m(x)
        y.sum().backward()
        again = m(x)  # and once more as it is now
        got.append([y, new.grad, old.grad, again])
    for a, b in zip(*got):
        close(a, b)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(6, 1), nn.Linear(6, 1)
        self.__dict__["w"] = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.h = [self.a]

    def forward(self, x: Tensor) -> Tensor:
        return self.h[0](self.a(x).tanh())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.t = torch.ones(6, 6)
        self.u = self.t
        self.register_buffer("b", torch.ones(6))
        self.d = {"b": self.b}

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.t + self.u.sum() + self.b * self.d["b"]


def change(net: Any, step: int) -> None:
    if isinstance(net, Expert):
        net.__dict__["w"] = (net.c if step == 0 else net.b).weight
    elif isinstance(net, Hidden):
        new = nn.Linear(6, 6)
        nn.init.ones_(new.weight)
        if step == 0:
            net.a = new
        else:
            net.h[0] = new
    elif step == 0:
        net.t, net.b = torch.ones(6, 6) * 2, torch.ones(6) * 3
    else:
        net.u, net.d["b"] = net.t, net.b


@pytest.mark.parametrize("make", [Expert, Hidden, Twice])
def test_names_part_and_meet(make: Callable[[], nn.Module]) -> None:
    got = []
    for m, net in both(make):
        mine: list[Any] = []
        for step in range(3):
            for k in range(3):
                m.zero_grad()
                y = m(torch.arange(48.0).view(8, 6) / (k + 7))
                y.square().sum().backward()
                mine += [y, *[p.grad for p in m.parameters()]]
            torch.manual_seed(step)
            change(net, step)
        got.append(mine)
    for a, b in zip(*got, strict=True):
        close(a, b)


class Stopped(nn.Module):
    """A tensor without gradient over a parameter's memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(6, 6), nn.Linear(6, 1)
        d = self.b.weight.detach()
        self.w: Any = {"list": [d], "closure": lambda: d, "data": [self.b.weight.data], "view": [d[0]], "both": [d], "attribute": d}.get(kind)
        global G
        G = d

    def forward(self, x: Tensor) -> Tensor:
        w = {"closure": lambda: self.w(), "attribute": lambda: self.w, "global": lambda: G, "view": lambda: self.w[0][None],
             "both": lambda: self.w[0] + self.b.weight}.get(self.kind, lambda: self.w[0])()  # fmt: skip
        return F.linear(self.a(x), w)


@pytest.mark.parametrize("kind", ["list", "closure", "data", "view", "both", "attribute", "global"])
def test_a_tensor_without_gradient_over_a_parameters_memory(kind: str) -> None:
    got = []
    for m, _ in both(lambda: Stopped(kind)):
        y = m(torch.arange(48.0).view(8, 6))
        y.sum().backward()
        got.append([y, *[p.grad for p in m.parameters()]])
    for a, b in zip(*got, strict=True):
        close(a, b)


class Asks(nn.Module):
    """Forward asks what its parameters are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 4), nn.Linear(4, 4), how
        self.group = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        chosen = {"class": lambda p: isinstance(p, nn.Parameter), "is": lambda p: any(p is q for q in self.group)}.get(self.how)
        terms = self.group if chosen is None else [p for p in self.parameters() if chosen(p)]
        return self.b(self.a(x).tanh()).square().mean() + sum(p.square().sum() * p.exp().sum() for p in terms)


@pytest.mark.parametrize("make", [*[lambda how=how: Asks(how) for how in ("class", "is", "list")], *[lambda kind=kind: Kept(kind) for kind in KINDS]])
def test_second_derivatives(make: Callable[[], nn.Module]) -> None:
    got = []
    for m, _ in both(make):
        mine: list[Any] = []
        for k in range(2):
            m.zero_grad()
            m.parameters().__next__().register_hook(lambda g: g * 2)  # once for each gradient
            x = (torch.arange(48.0).view(8, 6) / (k + 20)).requires_grad_()
            g = torch.autograd.grad(m(x).sum(), [*m.parameters(), x], create_graph=True, allow_unused=True)
            sum(t.square().sum() for t in g if t is not None).backward()
            mine += [*g, x.grad, *[p.grad for p in m.parameters()]]
        got.append(mine)
    for a, b in zip(*got, strict=True):
        close(a, b)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(3, 3)

    def forward(self, q: Tensor, k: Tensor | None = None) -> Tensor:
        return (self.c(q).sin() * (1.0 if k is None else k)).sum()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("unused", [False, True])
def test_one_tensor_as_two_arguments_differentiated_twice(unused: bool, computed: bool, before: bool) -> None:
    """before: the capture was made of two tensors."""
    module = Pair()
    if unused:
        module.forward = lambda q, k: module.c(q).sin().sum()  # type: ignore[assignment]
    found = []
    for run in (module, ORTModule(module)):
        for _ in range(2):
            x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
            given = x * 2 if computed else x
            if before:
                run(given, (x * 3) if computed else x.detach().clone().requires_grad_()).backward()
                x.grad = None
                given = x * 2 if computed else x
            (first,) = torch.autograd.grad(run(given, given), x, create_graph=True)
            found.append((first.detach(), *torch.autograd.grad(first.square().sum(), [x, *module.parameters()])))
    for each in found[1:]:
        for a, b in zip(each, found[0], strict=True):
            close(a, b)
