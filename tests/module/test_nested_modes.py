"""Grad modes and autocast inside of each other in forward, as whole bodies or among other operations, by `with`, as
decorators and through exceptions. What is held: eager's outputs, which of them require a gradient, and every gradient."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("seeded")

LOW = torch.bfloat16
CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "set": lambda: torch.set_grad_enabled(False),
    "off": lambda: torch.autocast("cpu", enabled=False),
    "low": lambda: torch.autocast("cpu", LOW),
}


class Nest(nn.Module):
    """plan: what forward does in turn: a number (a product by that layer), or a context and the plan inside of it."""

    def __init__(self, plan: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.plan = plan

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen = [x]
        self.run(self.plan, seen)
        return (*seen[1:], sum(t.double().square().mean() for t in seen[1:]))  # type: ignore[return-value]

    def run(self, plan: list[Any], seen: list[Tensor]) -> None:
        for item in plan:
            if isinstance(item, int):
                seen.append(torch.tanh(self.layers[item](seen[-1].to(self.layers[item].weight.dtype))))
            elif item[0] == "decorated":
                torch.no_grad()(self.run)(item[1], seen)
            elif item[0] == "raises":
                with contextlib.suppress(ValueError), torch.no_grad(), torch.autocast("cpu", enabled=False):
                    self.run(item[1], seen)
                    raise ValueError
            else:
                with CONTEXTS[item[0]]():
                    self.run(item[1], seen)


def check(plan: list[Any], low: bool) -> None:
    eager = Nest(plan) if low else Nest(plan).double()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if low else {"rtol": 1e-10, "atol": 1e-12}
    for k in range(2):
        x = torch.randn(4 + k, 5, dtype=torch.float32 if low else torch.float64)
        got = []
        for m in (eager, ours):
            m.zero_grad()
            outs = m(x)
            if outs[-1].requires_grad:
                outs[-1].backward()
            got.append(outs)
        for a, b in zip(*got):
            assert a.requires_grad is b.requires_grad and a.dtype is b.dtype, plan
            torch.testing.assert_close(b, a, **tolerance)
        for (name, p), q in zip(eager.named_parameters(), ours.parameters()):
            assert (p.grad is None) is (q.grad is None), (plan, name)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, **tolerance, msg=lambda text, name=name: f"{plan} {name} {text}")


PLANS: list[list[Any]] = [
    [0, ("off", [("no_grad", [1])]), 2],
    [0, ("no_grad", [("off", [1])]), 2],
    [("off", [("no_grad", [1, 2])])],
    [0, ("off", [("set", [1])]), ("off", [("no_grad", [0]), ("no_grad", [1])]), 2],
    [0, ("off", [("off", [("no_grad", [1])])]), 2],
    [0, ("no_grad", [1, ("off", [("grad", [2])]), 1]), 0],
    [0, ("off", [("no_grad", [1]), 2]), 1],
    [0, ("off", [2, ("no_grad", [1])]), 1],
    [("no_grad", []), ("off", []), 0, ("off", [("no_grad", [])]), 1],
    [0, ("decorated", [("off", [1])]), ("off", [("decorated", [2])]), 1],
    [0, ("raises", [1]), 2, ("off", [("raises", [1])]), 0],
]


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_one_inside_of_the_other(number: int) -> None:
    check(PLANS[number], False)


def test_autocast_that_is_on() -> None:
    check([0, ("low", [("no_grad", [1])]), ("low", [("off", [("no_grad", [0])]), 1]), 2], True)
    check([0, ("low", [("no_grad", [("off", [2]), 1])]), ("no_grad", [("low", [1])]), 2], True)


@pytest.mark.parametrize("seed", range(12))
def test_random_nests(seed: int) -> None:
    chance = random.Random(seed)

    def plan(depth: int) -> list[Any]:
        return [chance.randrange(3) if depth == 0 or chance.random() < 0.35 else
                (chance.choice(["no_grad", "no_grad", "grad", "set", "off", "off", "decorated"]), plan(depth - 1))
                for _ in range(chance.randint(1, 3))]  # fmt: skip

    check([0, *plan(4), 1], False)


ITSELF: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda a, x: a.to(a.dtype),
    "double": lambda a, x: a.double(),
    "plus": lambda a, x: +a,
    "type_as": lambda a, x: a.type_as(x),
    "atleast_2d": lambda a, x: torch.atleast_2d(a),
    "real": lambda a, x: a.real,
    "cpu": lambda a, x: a.cpu(),
    "flatten": lambda a, x: a.flatten(1),
    "contiguous": lambda a, x: a.contiguous(),
    "dropout": lambda a, x: nn.functional.dropout(a, 0.5, False),
    "alpha_dropout": lambda a, x: nn.functional.alpha_dropout(a, 0.5, False),
    "sum_to_size": lambda a, x: a.sum_to_size(a.shape),
    "broadcast_tensors": lambda a, x: torch.broadcast_tensors(a, x)[0],
    "as_tensor": lambda a, x: torch.as_tensor(a),
    "twice": lambda a, x: a.to(x).cpu().double(),
}


class Metric(nn.Module):
    """A number is made under no_grad, of what a conversion that changes nothing returns: the tensor itself."""

    def __init__(self, way: str, of: str) -> None:
        super().__init__()
        self.layer, self.other, self.weight = nn.Linear(5, 5), nn.Linear(5, 5), nn.Parameter(torch.randn(4, 5))
        self.way, self.of = way, of

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = {"made": lambda: torch.tanh(self.layer(x)), "argument": lambda: x, "parameter": lambda: self.weight}[self.of]()
        with torch.no_grad():
            t = ITSELF[self.way](a, x)
            metric = self.other(t).mean()
        return metric, self.other(a).square().mean(), t * 2, (a * t).sum()


@pytest.mark.parametrize("of", ["made", "argument", "parameter"])
@pytest.mark.parametrize("way", ITSELF)
def test_a_conversion_to_what_it_is_already(way: str, of: str) -> None:
    eager = Metric(way, of).double()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    got = []
    x = torch.randn(4, 5, dtype=torch.float64)
    for m in (eager, ours):
        leaf = x.clone().requires_grad_()
        outs = m(leaf)
        sum(t.sum() for t in outs).backward()
        got.append([*outs, leaf.grad, *[p.grad for p in m.parameters()]])
    for a, b in zip(*got):
        assert (a is None) is (b is None)
        if a is not None:
            assert a.requires_grad is b.requires_grad
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


class Policy(nn.Module):
    """torch.distributions enables gradients for what it computes at its first use (probabilities of logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        of = torch.distributions.Categorical(logits=self.layer(x), validate_args=False)
        action = of.sample()
        return action, of.log_prob(action), of.entropy()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradients_enabled_for_what_requires_none(around: Callable[[], Any]) -> None:
    """In a call that computes none: a policy that acts."""
    eager = Policy()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for rows in (2, 3, 4):
        x = torch.randn(rows, 5)
        got = []
        for m in (eager, ours):
            torch.manual_seed(rows)
            with around():
                got.append(m(x))
        for a, b in zip(*got, strict=True):
            assert not b.requires_grad and a.is_inference() is b.is_inference()
            torch.testing.assert_close(b, a)
    assert ours.report().graphs and not ours.report().eager


class Enabled(nn.Module):
    """`used`, of layer's result, the weight, what a conversion returns of it, a view of it, and the argument."""

    def __init__(self, used: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.used = used

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, w = self.layer(x), self.layer.weight
        more = w.to(w.dtype), w.view(-1), x.contiguous()
        with torch.enable_grad():
            return y, self.used(y, w, *more)


USED: dict[str, Callable[..., Tensor]] = {
    "weight": lambda y, w, itself, view, x: y @ w,
    "itself": lambda y, w, itself, view, x: y @ itself,
    "view": lambda y, w, itself, view, x: y * view.sum(),
    "argument": lambda y, w, itself, view, x: y * x,
    "nothing": lambda y, w, itself, view, x: (y * 2).mul_(y),
}


@pytest.mark.parametrize("name", USED)
def test_gradients_enabled_in_a_call_that_computes_none(name: str) -> None:
    eager = Enabled(USED[name])
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (2, 3, 4):
        x = torch.randn(rows, 5, requires_grad=True)
        with torch.no_grad():
            got = eager(x), ours(x)
        for a, b in zip(*got, strict=True):
            assert a.requires_grad is b.requires_grad
            torch.testing.assert_close(b, a)
    assert bool(ours.report().graphs) == (name == "nothing")
