"""Branches on a tensor's value: every way through forward is a capture of its own, in the engine, beside eager."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close, nodes_in_engine, same_state
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.errors import CaptureError

pytestmark = pytest.mark.usefixtures("seeded")


class Ruled(nn.Module):
    """Two layers, and a rule that uses them."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 3)
        self.c = nn.Linear(7, 3)
        self.bn = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("limit", torch.tensor(0.5))
        self.rule = rule

    def forward(self, *args: Any) -> Any:
        return self.rule(self, *args)


def outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def beside(rule: Callable[..., Any], batches: Iterable[Any], whole: bool = True, captures: int | None = None,
           **options: Any) -> ORTModule:  # fmt: skip
    """Trains a wrapped module beside an eager one: outputs, gradients and buffers of every step."""
    eager = Ruled(rule)
    ours = ORTModule(copy.deepcopy(eager), **{"strict": "engine", **options} if whole else options)
    for batch in batches:
        batch = batch if isinstance(batch, tuple) else (batch,)
        found = []
        for model in (ours, eager):
            given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in batch]
            model.zero_grad()
            state = torch.get_rng_state()
            outs = outputs(model(*given))
            torch.set_rng_state(state)
            live = [o for o in outs if o.requires_grad]
            if live:
                torch.autograd.backward(live, [torch.linspace(0.5, 2, o.numel()).reshape(o.shape) for o in live])
            found.append(([o.detach() for o in outs], [x.grad for x in given]))
        (mine, my_grads), (theirs, their_grads) = found
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            close(a, b, f"output {i}") if a.is_floating_point() else torch.testing.assert_close(a, b)
        for i, (a, b) in enumerate(zip(my_grads, their_grads, strict=True)):
            close(a, b, f"gradient of argument {i}")
        same_state(ours, eager)
    if whole:
        nodes_in_engine(ours)
    if captures is not None:
        assert ours.report().n_captures == captures, str(ours.report())
    return ours


def up(n: int = 4) -> Tensor:
    return torch.rand(n, 5, dtype=torch.float64) + 0.1


def down(n: int = 4) -> Tensor:
    return -torch.rand(n, 5, dtype=torch.float64) - 0.1


def either(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    if x.sum() > 0:
        return m.b(h)
    return m.c(h) * 2


def raises(m: Any, x: Tensor) -> Tensor:
    assert not (x > 10).any(), f"too large: {tuple(x.shape)}"
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return m.b(m.a(x))


def several(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if (x[0] > 0).all():
        h = h.tanh()
    if (x[1] > 0).all():
        h = h * 3
    if (h.mean() > 0) and h.std() > 0:
        h = h.sigmoid()
    return m.b(h)


def loop(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    while h.abs().max() > 0.5:
        h = h / 2
    return m.b(h)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not x.min() < 0:
            return self.left(x)
        return self.right(x).relu()


ways = [up(), down(), up(), up(), down(), down(), up()]


@pytest.mark.parametrize("rule,batches,captures", [
    (either, ways, 2),
    (several, [torch.tensor(signs).double()[:, None] * up(2)
               for signs in ([1, 1], [1, -1], [-1, 1], [1, 1], [1, -1])], None),
    (loop, [x * k for x in (up(), down()) for k in (1, 2, 1, 2)], None),
    (raises, ways, 1),
    (lambda m, x: m.b(m.a(x)) if (x > 0).any().item() else x.sum(), ways, 2),  # an item of a boolean
    (lambda m, x: m.b(m.a(x)) if x[0, 0] else x.sum(), [up(), torch.zeros(2, 5).double(), up()], None),  # a number's truth
    (lambda m, x: m.b(m.a(x)) if m.a.weight.sum() > -1e9 else x, ways, 1),  # of a parameter
    (lambda m, x: (m.b(m.a(x)) if m.limit > 0.2 else x, m.limit.sub_(0.1))[0], [up()] * 5, 2),  # of a buffer
    (lambda m, x: max(m.a(x).sum(), m.a(x).mean()), ways, None),
    (lambda m, x: torch.stack([m.a(r) if r.sum() > 0 else m.a(-r).exp() for r in x]), [up(2), down(2), up(2)], 2),
    (lambda m, x: (m.a(x), (x > 0).all()) if (x > 0).all() else (m.a(x), x > 1), ways, 2),  # returned and asked
    (lambda m, x: m.b(m.a(x)) if torch.tensor([1.0, 2.0]).sum() > 0 else x, ways, 1),  # known to the trace
    (lambda m, x: m.b(m.a(x)) if x.shape[0] and bool((x == x).all()) else x.sum(), [up(), up(1), up(3)], None),
    (lambda m, x: m.b(m.a(x)) if x.sum().item() > 0 else m.c(m.a(x)), ways, 2),  # of numbers that are read
    (lambda m, x: m.b(m.a(x)) if -1e9 < x.sum().item() < 0.5 * x.numel() else m.c(m.a(x)), ways, None),
    (lambda m, x: m.b(m.a(x)) if (x > 0).sum().item() == 20 else m.c(m.a(x)), ways, 2),
    (lambda m, x: (x.exp() if x.detach().mean() > 0 else x).sum() * 2, ways, 2),  # parameters that are not used
])  # fmt: skip
def test_ways(rule: Any, batches: Any, captures: int | None) -> None:
    beside(rule, batches, captures=captures)


@pytest.mark.parametrize("rule", [
    lambda m, x: m.b(m.a(x)) if (x.sum(1) > 0).nonzero().size(0) > 2 else m.c(m.a(x)),
    lambda m, x: m.a(x)[x.sum(1) > 0].sum(0) if (x > 0).sum().item() else m.c(m.a(x)),
    lambda m, x: m.b(m.a(x)) if x[x > 0].numel() != 0 else m.c(m.a(x)),
])  # fmt: skip
def test_sizes_that_depend_on_data(rule: Any) -> None:
    """The operation that has the size is PyTorch's, the rest the engine's."""
    ours = beside(rule, ways, whole=False)
    assert ours.report().n_captures == 2 and not ours.report().eager, str(ours.report())


def test_in_a_submodule() -> None:
    eager = nn.Sequential(nn.Linear(5, 5), Picks(), nn.Tanh())
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for x in (up(), down() * 5, up() * 3, down()):
        for model in (ours, eager):
            model.zero_grad()
            model(x).square().sum().backward()
        close(ours(x), eager(x))
        same_state(ours, eager)
    nodes_in_engine(ours)


def test_other_sizes_and_no_rows() -> None:
    """A capture a way and sizes, then one a way; of no rows `all` is true."""

    def rule(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) if (x > 0).all() else m.c(m.a(x))

    beside(rule, [f(n) for n in (3, 4, 6, 7, 2) for f in (up, down)], captures=4)
    beside(rule, [up(3), torch.zeros(0, 5), down(3), torch.zeros(0, 5)])
    beside(lambda m, x: m.b(m.a(x)) if (x > 0).any() else m.c(m.a(x)), [up(3), torch.zeros(0, 5), down(3)])


def test_exceptions_are_the_users() -> None:
    eager, message = Ruled(raises), r"too large: \(4, 5\)"
    for first in (True, False):
        ours = ORTModule(copy.deepcopy(eager))
        if not first:
            ours(up())
        for _ in range(12):  # more than captures are allowed
            with pytest.raises(AssertionError, match=message):
                ours(up() + 10)
            with pytest.raises(ValueError, match="^not a number$"):
                ours(up() * float("nan"))
            if not first:
                x = up()
                close(ours(x), eager(x))
        if not first:
            assert ours.report().n_captures == 1


def test_an_engine_that_fails_on_the_wrong_way() -> None:
    """Indices that forward looks at before it uses them: out of range, they stop the engine before the answer."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(7, 3), nn.Linear(3, 2)

        def forward(self, ids: Tensor) -> Tensor:
            assert ids.min() >= 0, "negative"
            if (ids < 7).all():
                return self.out(self.embed(ids))
            return self.out(self.embed(ids % 7)) * 2

    eager = Looks()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for i in range(14):
        ids = torch.randint(2, 7, (3, 4)) + 5 * (i % 2)
        for m in (ours, eager):
            m.zero_grad()
            m(ids).square().sum().backward()
        same_state(ours, eager)
        if i > 3:
            with pytest.raises(AssertionError, match="^negative"):
                ours(ids - 20)
    nodes_in_engine(ours)
    assert ours.report().n_captures == 2


def test_exceptions_that_the_user_catches() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        try:
            assert x.sum() > 0
            return m.b(m.a(x))
        except AssertionError:
            return m.c(m.a(x))

    beside(rule, ways, whole=False)


def test_side_effects_of_a_way_not_taken() -> None:
    """Running statistics, counters and arguments are written once, by the way that is taken."""

    def rule(m: Any, x: Tensor) -> Tensor:
        m.seen.add_(1)
        h = m.bn(m.a(x).tanh())
        if x.sum() > 0:
            m.seen.mul_(2)
            return m.b(h)
        return m.c(h)

    beside(rule, ways, captures=2)

    def assigns(m: Any, x: Tensor) -> Tensor:
        m.seen = m.seen + 1
        return m.b(m.a(x)) if x.sum() > 0 else m.c(m.a(x))

    beside(assigns, ways, captures=2)

    def edits(m: Any, x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return m.b(m.a(x)) if x.sum() > 0 else m.c(m.a(x))

    eager = Ruled(edits)
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for x in ways:
        mine, theirs = torch.zeros(3), torch.zeros(3)
        close(ours(x, mine), eager(x, theirs))
        assert torch.equal(mine, theirs) and mine._version == theirs._version


GLOBAL: list[Any] = []
TENSOR = torch.zeros(2)


def test_python_state_behind_a_branch() -> None:
    """What is written behind a condition is written once a step, also in the call that is captured."""

    def lists(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            GLOBAL.append(1)
        return m.b(m.a(x))

    def tensors(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            TENSOR.add_(1)
        return m.b(m.a(x)) * TENSOR.sum()

    def attributes(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            m.calls = getattr(m, "calls", 0) + 1
        return m.b(m.a(x))

    def draws(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) * random.random() if x.sum() > 0 else m.a(x)

    for rule, state in ((lists, lambda m: len(GLOBAL)), (tensors, lambda m: TENSOR.clone().tolist()),
                        (attributes, lambda m: getattr(m, "calls", 0)), (draws, lambda m: random.random())):  # fmt: skip
        eager = Ruled(rule)
        seen = []
        for model in (eager, ORTModule(copy.deepcopy(eager))):
            GLOBAL.clear()
            TENSOR.zero_()
            random.seed(3)
            seen.append([(model(x).detach().sum().item(), state(model)) for x in ways])
        for (a, p), (b, q) in zip(*seen, strict=True):
            assert a == pytest.approx(b, rel=1e-12) and p == q, rule.__name__


def test_printing_behind_a_branch(capsys: Any) -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            print("up")
        return m.a(x)

    ours = ORTModule(Ruled(rule))
    ours(up()), ours(up())
    assert capsys.readouterr().out == "up\n"


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_random_numbers_of_a_way_not_taken(p: float) -> None:
    """A call that goes another way draws what it would have drawn."""

    def rule(m: Any, x: Tensor) -> Tensor:
        h = F.dropout(m.a(x), p)
        return m.b(h) if x.sum() > 0 else m.b(F.dropout(h, 0.3))

    model = Ruled(rule)
    ours = ORTModule(model, strict="engine")
    for x in ways:
        ours(x)
    found = []
    for other in (up(), down()):  # the second call is the same, whatever went before
        ours(other)
        torch.manual_seed(5)
        found.append((ours(down(4) * 0 - 1).detach(), torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert ours.report().n_captures == 2


def test_a_condition_on_random_numbers() -> None:
    """The engine's numbers decide: what is returned is of the way that they say."""

    def rule(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = F.dropout(x, 0.5)
        n = (kept != 0).sum()
        return (m.a(kept), n) if n * 2 > kept.numel() else (-m.a(kept).exp(), n)

    torch.manual_seed(4)
    ours = ORTModule(Ruled(rule), strict="engine")
    for _ in range(40):
        out, n = ours(torch.ones(3, 5))
        assert bool((out < 0).all()) or n * 2 > 15
    assert ours.report().n_captures == 2


def test_grad_modes_and_autocast() -> None:
    eager = Ruled(either)
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for x in ways:
        with torch.no_grad():
            close(ours(x), eager(x))
        with torch.inference_mode():
            close(ours(x).clone(), eager(x).clone())
    for m in (ours, eager):
        m.float()
    for x in ways:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a, b = ours(x.float()), eager(x.float())
        assert a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    nodes_in_engine(ours)

    def inside(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = m.a(x)
            if h.sum() > 0:
                h = h * 2
        return m.b(h) if (m.a(x).sum() > 0) else m.c(h)

    beside(inside, ways)


def test_accumulation_and_two_forwards_before_a_backward() -> None:
    eager = Ruled(either)
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for _ in range(3):
        for model in (ours, eager):
            model.zero_grad()
            torch.manual_seed(2)
            first, second, third = model(up()), model(down()), model(up())
            second.square().sum().backward()
            (first.sum() * third.sum()).backward()
            model(down()).sum().backward()
        same_state(ours, eager)


def test_backward_of_backward() -> None:
    eager = Ruled(either)
    ours = ORTModule(copy.deepcopy(eager))
    for x in (up(), down(), up()):
        found = []
        for model in (ours, eager):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
            grad.square().sum().backward()
            found.append((grad.detach(), leaf.grad))
        for a, b in zip(*found, strict=True):
            close(a, b)
        same_state(ours, eager)


def test_as_many_ways_as_captures(caplog: Any) -> None:
    """More ways than captures: what branches is left to PyTorch, by its place."""

    def rule(m: Any, x: Tensor) -> Tensor:
        for i in range(12):
            if x[0, 0] < i:
                return m.b(m.a(x)) * i
        return m.b(m.a(x)).tanh()

    batches = [torch.full((2, 5), float(i)) for i in range(12)] * 2
    with caplog.at_level(logging.WARNING, logger="ortmodule"):
        ours = beside(rule, batches, whole=False, max_captures=4)
    assert sum("go another way from call to call" in r.getMessage() for r in caplog.records) == 1
    told = [e for e in ours.report().eager if "branch" in e.reason]
    assert told and all(e.file == __file__ for e in told if e.file) and any(e.line for e in told), str(ours.report())
    assert sum(e.calls for e in ours.report().eager) >= 18

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(5, 5), Ruled(rule)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).tanh().sum() + self.inner(x).sum()

    eager = Outer()
    ours = ORTModule(copy.deepcopy(eager), max_captures=4)
    for x in batches:
        close(ours(x), eager(x))
    assert [h.module for h in ours.report().host] == ["inner"]  # of the model around it the engine has the rest
    with pytest.raises(CaptureError, match="a branch on a tensor's value"):
        strict = ORTModule(copy.deepcopy(eager), strict=True, max_captures=2)
        for x in batches:
            strict(x)


def test_a_way_that_cannot_be_captured() -> None:
    """It runs in PyTorch, and the other in the engine; who goes there again and again has what branches in PyTorch."""

    def rule(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(h) if x.sum() > 0 else h * int(x.sum().item())

    ours = beside(rule, [up(), down(), up(), up()], whole=False)
    assert [e.calls for e in ours.report().eager] == [1] and ours.report().n_captures == 1
    beside(rule, ways * 3, whole=False)
    eager = Ruled(rule)
    strict = ORTModule(copy.deepcopy(eager), strict=True)
    x = up()
    close(strict(x), eager(x))
    with pytest.raises(CaptureError):
        strict(down())


class Doubles(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubles.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_what_would_run_twice_is_left_to_pytorch() -> None:
    """Hooks, custom Functions and modules kept in PyTorch run as often as in eager."""

    def rule(m: Any, x: Tensor) -> Tensor:
        h = Doubles.apply(m.a(x))
        return m.b(h) if x.sum() > 0 else m.c(h)

    eager = Ruled(rule)
    counts = []
    for model in (eager, ORTModule(copy.deepcopy(eager))):
        Doubles.calls = 0
        seen: list[int] = []
        for x in ways:
            model(x).sum().backward()
            seen.append(Doubles.calls)
        counts.append(seen)
    assert counts[0] == counts[1] == list(range(1, len(ways) + 1))

    hooked = []
    for model in (Ruled(either), ORTModule(Ruled(either))):
        fired: list[int] = []
        model.a.register_forward_hook(lambda m, args, out, fired=fired: fired.append(len(out)))
        for x in ways:
            model(x).sum().backward()
        hooked.append(len(fired))
    assert hooked == [len(ways), len(ways)]


def test_with_edits_in_place_and_random_states_of_the_rehearsal() -> None:
    """The run that finds the answers leaves nothing behind: parameters, hooks, flags, the generator."""

    def rule(m: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            with torch.no_grad():
                m.c.weight.mul_(0.5)
            m.bn.running_mean.add_(1)
        return m.b(m.c.weight.t()[:5].sum() + m.bn(m.a(x).tanh()))

    beside(rule, ways, whole=False)
    model = Ruled(either)
    ours, x = ORTModule(model), up()
    state = torch.get_rng_state()
    versions = [p._version for p in model.parameters()]
    ours(x)
    assert torch.equal(state, torch.get_rng_state()) and versions == [p._version for p in model.parameters()]


def test_argument_checks() -> None:
    def normal(m: Any, x: Tensor) -> Tensor:
        h = m.b(m.a(x))
        d = torch.distributions.Normal(h, F.softplus(h) + 0.1, validate_args=True)
        return d.log_prob(x[:, :3]) + d.entropy()

    def categorical(m: Any, x: Tensor) -> Tensor:
        d = torch.distributions.Categorical(logits=m.b(m.a(x)), validate_args=True)
        return d.log_prob(torch.arange(len(x)) % 3) + d.entropy()

    def gaussian(m: Any, x: Tensor) -> Tensor:
        h = m.b(m.a(x))
        return nn.GaussianNLLLoss()(h, x[:, :3], h.exp())

    for rule in (normal, categorical, gaussian):
        beside(rule, [up(), down(), up(3), down(4), up(6)])
        eager = Ruled(rule)
        ours = ORTModule(copy.deepcopy(eager))
        ours(up())
        if rule is not gaussian:
            for _ in range(2):
                with pytest.raises(ValueError) as mine:
                    ours(up() * float("nan"))
                with pytest.raises(ValueError) as theirs:
                    eager(up() * float("nan"))
                assert str(mine.value)[:60] == str(theirs.value)[:60]
        x = up()
        close(ours(x), eager(x))

    def checked(m: Any, x: Tensor) -> Tensor:
        return F.gaussian_nll_loss(m.b(m.a(x)), x[:, :3], x[:, 2:])

    ours = beside(checked, [up(), up()])
    with pytest.raises(ValueError, match="var has negative entry"):
        ours(down())


def test_nothing_is_said() -> None:
    ours = ORTModule(Ruled(either), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in ways:
            ours(x)
    assert "__bool__" not in vars(Tensor) and "item" not in vars(Tensor)
    up_, down_ = sorted(ours.report().graphs, key=lambda g: g.ways, reverse=True)
    assert up_.ways[0].startswith(f"True at {__file__}:") and down_.ways[0].startswith("False at ")
    assert up_.astray + down_.astray == 4
    assert "for branches on values of tensors: True at" in str(ours.report())


class Counting(nn.Module):
    """What it changes behind a branch counts once."""

    def __init__(self, first: Any, change: Callable[[Any], object], count: Callable[[Any], int]) -> None:
        super().__init__()
        self.state, self.change, self.count = first, change, count

    def forward(self, x: Tensor) -> Tensor:
        y = x * (2.0 if x.detach().max().item() > 1 else 0.5)
        self.change(self.state)
        return y * self.count(self.state)


@pytest.mark.parametrize(("first", "change", "count"), [
    (set, lambda s: s.add(len(s)), len), (list, lambda s: s.append(1), len), (dict, lambda s: s.update({len(s): 1}), len),
    (lambda: {"inner": [1]}, lambda s: s["inner"].append(2), lambda s: len(s["inner"])),
    (lambda: bytearray(b"a"), lambda s: s.extend(b"b"), len),
])  # fmt: skip
def test_containers_changed_behind_a_branch(first: Any, change: Any, count: Any) -> None:
    ours, eager = Counting(first(), change, count), Counting(first(), change, count)
    model = ORTModule(ours)
    for scale in (3.0, 0.1, 3.0, 3.0, 0.1):
        x = torch.ones(2, 3) * scale
        close(model(x), eager(x))
        assert ours.state == eager.state
