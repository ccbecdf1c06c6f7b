"""Tensors that forward puts into attributes of modules (a loss of a router, attention's weights, a hidden state to look
at): results of the graph, which go where forward puts them. Beside eager, in fp64."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import close
from torch import Tensor, nn

from ortmodule import ORTModule


class Router(nn.Module):
    """Leaves a loss of its own, which the script adds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 3), nn.Linear(4, 9), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        p = F.softmax(self.gate(x), -1)
        self.aux = (p.mean(0) ** 2).sum()
        h = self.up(x).unflatten(-1, (3, 3))
        return x + self.down((h * p[..., None]).sum(-2))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Router(), Router()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def twins(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    eager = make().double()
    return ORTModule(copy.deepcopy(eager), **options), eager


def data(n: int = 5, *rest: int) -> Tensor:
    return torch.randn(n, *(rest or (4,)), dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def gradients(module: nn.Module) -> list[Tensor | None]:
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    return found


def whole(model: Any, captures: int = 1) -> None:
    report = model.report()
    assert report.n_captures == captures and report.node_share == 1 and not report.eager, str(report)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_loss_of_a_router(level: int) -> None:
    ours, eager = twins(Routed, memory_opt_level=level)
    for step in range(4):
        found = []
        for model in (ours, eager):
            y = model(data(5 + step))
            (y.square().mean() + sum(0.1 * layer.aux for layer in model.layers)).backward()
            found.append([y.detach(), *[layer.aux.detach() for layer in model.layers], *gradients(model)])
            assert all(layer.aux.grad_fn is not None for layer in model.layers)
        for a, b in zip(*found, strict=True):
            close(a, b)
    whole(ours, 2)


def test_loss_of_a_router_alone() -> None:
    """The results get no gradient, or at one step none of the losses."""
    ours, eager = twins(Routed)
    losses: list[Callable[[Any, Tensor], Tensor]] = [
        lambda model, y: y.sum(),
        lambda model, y: model.layers[1].aux * 2,
        lambda model, y: model.layers[0].aux + y.sum(),
    ]
    for loss in losses * 2:
        found = []
        for model in (ours, eager):
            loss(model, model(data())).backward()
            found.append(gradients(model))
        for a, b in zip(*found, strict=True):
            close(a, b)
    whole(ours)


class Store(nn.Module):
    """Stores what `what` makes of x, h and y."""

    def __init__(self, what: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.what = nn.Linear(4, 4), nn.Linear(4, 4), what
        self.register_buffer("scale", torch.ones(4))
        self.plain = torch.full((4,), 2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y = self.last(h) * self.scale
        self.seen = self.what(self, x, h, y)
        return y


def without_gradients(self: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return h * 2


WHAT: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Any]] = {
    "value": lambda self, x, h, y: h * 2,
    "detached": lambda self, x, h, y: h.detach(),
    "result": lambda self, x, h, y: y,
    "detached result": lambda self, x, h, y: y.detach(),
    "view of the result": lambda self, x, h, y: y[:, 1:],
    "argument": lambda self, x, h, y: x,
    "view of the argument": lambda self, x, h, y: x.t(),
    "buffer": lambda self, x, h, y: self.scale,
    "plain tensor": lambda self, x, h, y: self.plain,
    "pair": lambda self, x, h, y: (h, y),
    "twice the same": lambda self, x, h, y: (h, h),
    "whole numbers": lambda self, x, h, y: h.argmax(-1),
    "truth": lambda self, x, h, y: h > 0,
    "no gradient": without_gradients,
    "turned": lambda self, x, h, y: h.t(),
    "nothing": lambda self, x, h, y: None,
    "number": lambda self, x, h, y: x.shape[0],
    "constant": lambda self, x, h, y: torch.arange(3),
    "inside": lambda self, x, h, y: h,
    "of the result": lambda self, x, h, y: y.square().mean(),
}


INSIDE = ("inside", "pair", "twice the same", "of the result")  # gradients between them and results: PyTorch's


@pytest.mark.parametrize("what", WHAT)
def test_what_is_stored(what: str) -> None:
    ours, eager = twins(lambda: Store(WHAT[what]))
    for step in range(3):
        x, found = data(5 + step // 2), []
        for model in (ours, eager):
            mine = x.clone().requires_grad_()
            y = model(mine)
            seen = model.seen if isinstance(model.seen, tuple) else (model.seen,)
            loss, facts = y.sum(), []
            for t in seen:
                if not isinstance(t, Tensor):
                    facts.append(t)
                    continue
                others = y, mine, model.scale, model.plain, seen[0]
                facts.append((t.dtype, t.shape, t.requires_grad, t.grad_fn is None, [t is u for u in others],
                              [t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr() for u in others]))  # fmt: skip
                if t.requires_grad:
                    loss = loss + (t * t).sum()
            of = [t for t in seen if isinstance(t, Tensor) and t.requires_grad]
            looked = torch.autograd.grad(loss, of, retain_graph=True) if of else []
            loss.backward()
            found.append((facts, [t for t in seen if isinstance(t, Tensor)], [mine.grad, *gradients(model), *looked]))
        assert found[0][0] == found[1][0]
        for a, b in zip(found[0][1] + found[0][2], found[1][1] + found[1][2], strict=True):
            if b is None or b.is_floating_point():
                close(a, b)
            else:
                assert torch.equal(a, b)
    assert bool(ours.report().eager) == (what in INSIDE), ours.report()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Store(lambda self, x, h, y: h * x.sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x) + 1)


class Uses(nn.Module):
    """Reads what it has stored, later in the same forward, and edits it; results are computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.first(x))
        self.once = self.h * 3
        self.once += 1
        self.h = self.h.exp()
        return self.last(self.h * self.once)


@pytest.mark.parametrize("make,names", [(Twice, ("part.seen",)), (Uses, ("h", "once"))])
def test_stored_more_than_once(make: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    ours, eager = twins(make)
    for step in range(3):
        found = []
        for model in (ours, eager):
            loss = model(data(5 + step)).sum()
            kept = []
            for name in names:
                at, _, last = name.rpartition(".")
                kept.append(getattr(model.get_submodule(at), last))
            (loss + sum(t.sin().sum() for t in kept)).backward()
            found.append([*[t.detach() for t in kept], *gradients(model)])
        for a, b in zip(*found, strict=True):
            close(a, b)
    assert bool(ours.report().eager) == (make is Uses)


def looked(model: Any, how: str) -> list[Tensor]:
    """Gradients of what was stored, as scripts ask for them."""
    y, seen = model(data()), []
    part = model.part.seen
    if how == "hook":
        part.register_hook(lambda g: seen.append(g.clone()))
    elif how == "retain_grad":
        part.retain_grad()
    if how == "grad":
        seen += torch.autograd.grad(y.sin().sum() + part.sum(), [part, *model.parameters()])
    else:
        (y.sin().sum() + part.sum()).backward()
        seen += [part.grad] if how == "retain_grad" else []
    return [*seen, *[g for g in gradients(model) if g is not None]]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Store(lambda self, x, h, y: h), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x).tanh())


@pytest.mark.parametrize("how", ["hook", "retain_grad", "grad"])
def test_gradients_of_what_lies_on_the_way(how: str) -> None:
    ours, eager = twins(Deep)
    for _ in range(5):
        for a, b in zip(looked(ours, how), looked(eager, how), strict=True):
            close(a, b)
    assert [h.module for h in ours.report().host] == ["part"]


class Recurrent(nn.Module):
    """Reads what the last call has left: state, which no graph may take for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) + (0 if self.state is None else self.state))
        self.state = h.detach()
        return h


class Previous(nn.Module):
    """One module stores what another reads before it does so: that of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), Store(lambda self, x, h, y: h)

    def forward(self, x: Tensor) -> Tensor:
        before = getattr(self.b, "seen", None)
        y = self.b(self.a(x))
        return y if before is None else y + before.detach().sum()


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n = len([v for v in vars(self).values() if isinstance(v, Tensor)])
        self.kept = self.first(x)
        return self.kept * (n + 1)


@pytest.mark.parametrize("make", [Recurrent, Previous, Looks])
def test_state_of_the_call_before(make: Callable[[], nn.Module]) -> None:
    ours, eager = twins(make)
    for step in range(6):
        found = []
        for model in (ours, eager):
            y = model(data(5, 4) * step)
            y.sum().backward()
            found.append([y.detach(), *gradients(model)])
        for a, b in zip(*found, strict=True):
            close(a, b)


class Mode(nn.Module):
    """Stores in training what evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mean = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.mean = h.mean(0).detach()
        return h - self.mean


def test_evaluation_reads_what_training_stores() -> None:
    ours, eager = twins(Mode)
    for step in range(8):
        for mode in (True, True, False, False) if step % 2 else (True, False):
            found = []
            for model in (ours, eager):
                model.train(mode)
                y = model(data(5) * (step + 1))
                y.sum().backward()
                found.append([y.detach(), model.mean, *gradients(model)])
                with torch.no_grad():
                    model.first.weight.add_(0.1)
            for a, b in zip(*found, strict=True):
                close(a, b)
    for model in (ours, eager):  # and what the script puts there
        model.mean = torch.ones(4, dtype=torch.float64)
        model.eval()
    close(ours(data(7)).detach(), eager(data(7)).detach())


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.wanted = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.wanted:
            self.kept = h * 2
        return h.exp()


def test_only_where_it_is_wanted() -> None:
    ours, eager = twins(Sometimes)
    for wanted in (True, False, True, False, False, True):
        for model in (ours, eager):
            model.wanted = wanted
            model.kept = None
            model(data())
        assert (ours.kept is None) == (not wanted)
        if wanted:
            close(ours.kept.detach(), eager.kept.detach())
    assert ours.report().n_captures == 2


def test_by_a_branch_on_values() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if x.sum() > 0:
                self.kept = h.exp()
            return h * 2

    ours, eager = twins(Branches)
    for sign in (1, -1, 1, -1, -1, 1):
        for model in (ours, eager):
            model.kept = None
            y = model(data().abs() * sign)
            (y.sum() + (0 if model.kept is None else model.kept.sum())).backward()
        assert (ours.kept is None) == (sign < 0)
        for a, b in zip(gradients(ours), gradients(eager), strict=True):
            close(a, b)


def test_nothing_is_kept_alive() -> None:
    """Whoever takes it out of the attribute is rid of it; a step costs one set of tensors."""
    ours, _ = twins(Routed)
    alive: list[Any] = []
    for _ in range(5):
        y = ours(data())
        (y.sum() + ours.layers[0].aux).backward()
        alive.append(weakref.ref(ours.layers[0].aux))
        ours.layers[0].aux = None
        del y
    gc.collect()
    assert [t() for t in alive] == [None] * 5
    assert len(ours._ortmodule.sites) == 1
    whole(ours)


def test_second_derivatives() -> None:
    ours, eager = twins(Routed)
    for _ in range(3):
        found = []
        for model in (ours, eager):
            x = data().requires_grad_()
            y = model(x)
            before = model.layers[1].aux
            loss = y.sin().sum() + before
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            assert model.layers[1].aux is before
            g.square().sum().backward()
            found.append([g.detach(), *gradients(model)])
        for a, b in zip(*found, strict=True):
            close(a, b)


def test_no_grad_and_inference() -> None:
    ours, eager = twins(Routed)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for model in (ours, eager):
            with mode():
                model(data())
        a, b = ours.layers[0].aux, eager.layers[0].aux
        assert a.requires_grad == b.requires_grad and a.is_inference() == b.is_inference()
        close(a.detach(), b.detach())


def test_checkpointed() -> None:
    """A checkpoint stores once more in backward; such a module is left to PyTorch."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.last = Router(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.part, x, use_reentrant=False))

    ours, eager = twins(Checkpointed)
    for _ in range(4):
        found = []
        for model in (ours, eager):
            y = model(data().requires_grad_())
            before = model.part.aux
            (y.sum() + before).backward()
            assert model.part.aux is not before
            found.append([model.part.aux.detach(), *gradients(model)])
        for a, b in zip(*found, strict=True):
            close(a, b)


def test_with_hooks_and_kept_modules() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.detach().numpy().mean())

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.odd, self.last = Router(), Odd(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.odd(self.part(x)))

    for hooked in (False, True):
        ours, eager = twins(Around)
        seen: dict[int, list[Tensor]] = {0: [], 1: []}
        for i, model in enumerate((ours, eager)):
            if hooked:
                model.part.down.register_forward_hook(lambda m, a, y, of=seen[i]: of.append(y.detach()))
        for _ in range(5):
            found = []
            for model in (ours, eager):
                y = model(data())
                (y.sum() + model.part.aux).backward()
                found.append([model.part.aux.detach(), *gradients(model)])
            for a, b in zip(*found, strict=True):
                close(a, b)
        for a, b in zip(seen[0], seen[1], strict=True):
            close(a, b)


def test_state_dict_and_copies() -> None:
    ours, eager = twins(lambda: Store(lambda self, x, h, y: h.detach()))
    for model in (ours, eager):
        model(data()).sum().backward()
    assert list(ours.state_dict()) == list(eager.state_dict())
    other = copy.deepcopy(ours)
    close(other.seen, eager.seen)
    other(data(7))
    assert other.seen.shape == (7, 4) and ours.seen.shape == (5, 4)


def test_kept_module_reads_what_the_graph_stores() -> None:
    """A module in PyTorch reads an attribute that another one has stored in the same forward."""

    class Reads(nn.Module):
        def __init__(self, source: list[nn.Module]) -> None:
            super().__init__()
            self.source = source

        def forward(self, x: Tensor) -> Tensor:
            return x * float(self.source[0].aux.detach().numpy())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Router()
            self.reads, self.last = Reads([self.part]), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.reads(self.part(x)))

    ours, eager = twins(Both)
    ours.reads.source[0] = ours.part
    for step in range(5):
        found = []
        for model in (ours, eager):
            y = model(data() * (step + 1))
            y.sum().backward()
            found.append([y.detach(), *gradients(model)])
        for a, b in zip(*found, strict=True):
            close(a, b)


def test_adamw_trains_alike() -> None:
    ours, eager = twins(Routed)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, eager)]
    for step in range(12):  # past the calls that are compared with forward
        for model, optimizer in zip((ours, eager), optimizers, strict=True):
            optimizer.zero_grad()
            (model(data(5)).square().mean() + sum(layer.aux for layer in model.layers)).backward()
            optimizer.step()
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-8, step
    whole(ours)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 3), nn.Linear(3, 2)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.weights = h.detach().softmax(-1)
        return self.last(h)


@pytest.mark.parametrize("steps", [0, 9])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_an_evaluation_has_stored_is_replaced(mode: Any, steps: int) -> None:
    """Tensors of inference_mode have no version; the tenth call is compared with forward."""
    torch.manual_seed(0)
    eager = Attends().double()
    ours = ORTModule(copy.deepcopy(eager))

    def step() -> None:
        x = torch.randn(4, 6, dtype=torch.float64)
        for m in (eager, ours):
            m(x).sum().backward()
        torch.testing.assert_close(ours.weights, eager.weights)

    for _ in range(steps):
        step()
    for m in (eager, ours):
        m.eval()
        with mode():
            m(torch.ones(4, 6, dtype=torch.float64))
        m.train()
    for _ in range(4):
        step()
    torch.testing.assert_close(ours.first.weight.grad, eager.first.weight.grad)
    assert not ours.report().eager, str(ours.report())


DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.detach().softmax(-1),
    "mean": lambda h: h.detach().mean(),
    "clone": lambda h: h.detach().clone(),
    "data": lambda h: h.data.abs().max(),
    "beside a gradient": lambda h: h.detach().exp() - h.detach(),
}


class Measures(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.of = nn.Linear(6, 3), of
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x).tanh()
        self.seen = self.of(h)
        return h


@pytest.mark.parametrize("name", DETACHED)
def test_what_is_measured_of_a_result(name: str) -> None:
    """No gradient passes from the result to it, so it is in nobody's way."""
    torch.manual_seed(0)
    eager = Measures(DETACHED[name]).double()
    ours = ORTModule(copy.deepcopy(eager))
    for n in (2, 3, 4):
        x = torch.randn(n, 6, dtype=torch.float64)
        for m in (eager, ours):
            m.zero_grad()
            y = m(x)
            (y.square().sum() * m.seen.sum()).backward()
        torch.testing.assert_close(ours.seen, eager.seen)
        torch.testing.assert_close(ours.line.weight.grad, eager.line.weight.grad)
        assert ours.seen is not None and not ours.seen.requires_grad
    assert not ours.report().eager, str(ours.report())
