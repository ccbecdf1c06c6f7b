"""What forward asks of sizes, numbers and classes before later operations say more about them; the order of keyword
arguments; functions of TorchScript. Beside eager, at many sizes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self, rule: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.rule = nn.Linear(3, 3), rule

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.rule(self.layer, *args, **kwargs)


def alike(rule: Callable[..., Tensor], *calls: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    net = Net(rule)
    model = ORTModule(copy.deepcopy(net))
    for args in calls:
        made = []
        for m in (net, model):
            m.zero_grad()
            try:
                y = m(*args)
                y.sum().backward()
                made.append([y.detach(), m.layer.weight.grad])
            except Exception as error:
                made.append(type(error))
        if isinstance(made[0], type):
            assert made[1] is made[0], args
        else:
            torch.testing.assert_close(made[1], made[0])
    return model


def rows(*sizes: int, width: int = 3) -> list[tuple[Tensor]]:
    return [(torch.randn(n, width),) for n in sizes]


SIZES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "a product of sizes as a float": lambda m, x: m(x) / math.sqrt(x.numel()),
    "its logarithm": lambda m, x: m(x) * math.log(x.shape[0] * x.shape[1] + 1),
    "a list's element": lambda m, x: m(x) * [1.0, 2.0, 3.0, 5.0][x.numel() % 4],
    "a branch on a product": lambda m, x: m(x) * 2 if x.numel() > 12 else m(x),
    "two sizes compared": lambda m, x: (2 if x.shape[0] > x.shape[1] else 3) * m(x),
    "two sizes equal": lambda m, x: (2 if x.shape[0] == x.shape[1] else 3) * m(x),
    "its text": lambda m, x: m(x) * len(str(x.numel())),
}


@pytest.mark.parametrize("kind", SIZES)
def test_a_size_that_a_layer_fixes_later(kind: str) -> None:
    alike(SIZES[kind], *rows(2, 5, 7, 9, 3, 4, 12, 40, 2))


PAIRS: dict[str, Callable[..., Tensor]] = {
    "a sum": lambda m, x, y: m(x) * (2 if x.shape[0] % 2 == 0 else 3) + y,
    "a loss": lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") * (2 if y.shape[0] % 3 == 0 else 3),
    "side by side": lambda m, x, y: torch.cat([m(x), y], 1) * (2 if x.shape[0] > 5 else 3),
    "a product": lambda m, x, y: torch.einsum("ij,ij->i", m(x), y) * (2 if y.shape[0] % 2 else 3),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_size_that_turns_out_to_be_another_arguments(kind: str) -> None:
    alike(PAIRS[kind], *[(torch.randn(n, 3), torch.randn(n, 3)) for n in (2, 4, 5, 6, 7, 9, 3)])


def test_a_number_that_turns_out_to_be_a_size() -> None:
    alike(lambda m, x, n: torch.ones(n, 3) * (2 if n % 2 == 0 else 3) + m(x),
          *[(torch.randn(n, 3), n) for n in (2, 4, 5, 6, 7, 9)])


def checked(m: nn.Linear, x: Tensor) -> Tensor:
    assert x.numel() % 2 == 0
    if x.shape[0] * x.shape[1] == 18:
        raise ValueError("18")
    return m(x)


def test_asserts_on_sizes() -> None:
    alike(checked, *rows(2, 4, 5, 6, 8, 7))


EMPTY: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "rows": lambda m, x: m.weight[0] * 7 if x.shape[0] == 0 else m(x),
    "elements": lambda m, x: m.weight[0] * 7 if x.numel() < 1 else m(x),
    "length": lambda m, x: m(x) if len(x) else m.weight[0] * 7,
    "largest": lambda m, x: m(x).max() * 2,
    "largest in columns": lambda m, x: m(x).amax(0),
    "where the largest is": lambda m, x: m(x) * m(x).argmax(),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_batch_of_nothing(kind: str) -> None:
    """Symbols for sizes are above 0 to PyTorch, which answers what forward asks about emptiness by that."""
    alike(EMPTY[kind], *rows(4, 5, 0, 6, 0))
    alike(EMPTY[kind], *rows(0, 4, 5, 0))


ONE = 1
CLASSES: dict[str, Callable[[Any], float]] = {
    "in a tuple": lambda k: 2.0 if type(k) in (int,) else 3.0,
    "in a set": lambda k: 2.0 if type(k) in {int} else 3.0,
    "not in": lambda k: 2.0 if type(k) not in (list, float) else 3.0,
    "a key": lambda k: {int: 2.0, float: 3.0}.get(type(k), 9.0),
    "of another number": lambda k: 2.0 if type(k) == type(ONE) else 3.0,  # noqa: E721
    "any": lambda k: 2.0 if any(type(k) is t for t in (int, float)) else 3.0,
    "name": lambda k: 2.0 if type(k).__name__ == "int" else 3.0,
    "subclass": lambda k: 2.0 if issubclass(type(k), float) else 3.0,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_class_of_a_number(kind: str) -> None:
    f = CLASSES[kind]
    calls = [(2, 2), (3, 3), (4, 2), (2.5, 2), (3.5, 2), (4.5, 3)]
    alike(lambda m, x, k: m(x) * f(k), *[(torch.ones(b, 3), k) for k, b in calls])
    alike(lambda m, x: m(x) * f(x.shape[0]), *rows(2, 3, 5, 4))


def test_the_class_of_a_size() -> None:
    alike(lambda m, x: m(x) * (2 if type(x.shape[0]).__name__ == "int" else 3), *rows(2, 3, 5, 4))
    alike(lambda m, x: m(x) * {int: 2, float: 3}.get(type(len(x)), 4), *rows(2, 3, 5, 4))


NO_NUMBERS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "a module": lambda m, x: m(x) * len(type(m).__name__),
    "an element": lambda m, x: m(x) * len(type([m, x][0]).__name__),
    "an attribute": lambda m, x: m(x) * len(type(m.training).__name__),
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_the_class_of_what_is_no_number_keeps_symbols(kind: str) -> None:
    assert alike(NO_NUMBERS[kind], *rows(2, 3, 5, 4, 9)).report().n_captures == 2


def in_order(m: nn.Linear, x: Tensor, **steps: Tensor) -> Tensor:
    h = m(x)
    for name, v in steps.items():
        h = h * v if name.startswith("mul") else h + v
    return h


def test_the_order_of_keyword_arguments() -> None:
    torch.manual_seed(0)
    net = Net(in_order)
    model = ORTModule(copy.deepcopy(net))
    x, v = torch.randn(2, 3), torch.full((3,), 5.0)
    for _ in range(2):
        torch.testing.assert_close(model(x, mul=v, add=v), net(x, mul=v, add=v))
        torch.testing.assert_close(model(x, add=v, mul=v), net(x, add=v, mul=v))


@torch.jit.script
def squashed(x: Tensor, by: float) -> Tensor:
    return (x / by).tanh() * by


@pytest.mark.parametrize("warm", [0, 1, 4])
def test_a_function_of_torchscript(warm: int) -> None:
    """Once it has run a few times it hides from autograd what it runs."""
    for _ in range(warm):
        squashed(torch.ones(2, requires_grad=True), 3.0).sum().backward()
    model = alike(lambda m, x: squashed(m(x), 50.0) @ m.weight, *rows(2, 3, 5, 4, 2))
    model.eval()
    w = model.layer.weight
    for x in (torch.ones(2, 3), torch.ones(2, 4, 3)):
        w.grad = None
        model(x).sum().backward()
        other = copy.deepcopy(model.layer)
        other.zero_grad()
        (((other(x) / 50).tanh() * 50) @ other.weight).sum().backward()
        torch.testing.assert_close(w.grad, other.weight.grad)
    assert model.report().node_share == 1


REFUSED: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], tuple[int, ...]]] = {
    "classes": (lambda m, x: F.one_hot((x[:, 0] * 0 + torch.arange(len(x))).long(), 3) + m(x)[:, :1], (2, 3, 4, 3, 5)),
    "negative classes": (lambda m, x: F.one_hot((x[:, 0] * 0 - torch.arange(len(x)) + 1).long(), 3) * m.bias, (2, 1, 3)),
    "select_scatter": (lambda m, x: m(x).select_scatter(torch.zeros(3), 0, 3), (4, 5, 2, 6, 3)),
    "select_scatter from the end": (lambda m, x: m(x).select_scatter(torch.zeros(3), 0, -3), (4, 5, 2, 6, 3)),
    "slice_scatter": (lambda m, x: m(x).slice_scatter(torch.zeros(2, 3), 0, 1, 3), (4, 5, 2, 1, 3)),
    "slice_scatter to the end": (lambda m, x: m(x).slice_scatter(torch.zeros(2, 3), 0, -2), (4, 5, 1, 6, 2)),
    "slice_scatter in steps": (lambda m, x: m(x).slice_scatter(torch.zeros(2, 3), 0, 0, None, 2), (4, 3, 5, 6, 2)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_eager_refuses(kind: str) -> None:
    rule, sizes = REFUSED[kind]
    alike(rule, *rows(*sizes))


@pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 3), (2, 4, 0, 3)])
def test_batch_norm_of_nothing(shape: tuple[int, ...]) -> None:
    norm = (nn.BatchNorm1d if len(shape) == 3 else nn.BatchNorm2d)(4)
    model = ORTModule(copy.deepcopy(norm))
    for m in (norm, model):
        for training in (True, False):
            m.train(training)
            x = torch.zeros(shape, requires_grad=True)
            m(x).sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
    for a, b in zip(norm.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(norm.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Cached(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(2, 2), kind

        @functools.lru_cache(None)
        def table(n: int) -> Tensor:
            return torch.randn(n)

        self.table = table

    @functools.cached_property
    def drawn(self) -> Tensor:
        return torch.randn(2, 2)

    @functools.cached_property
    def first(self) -> Tensor:
        return self.layer.weight.detach().norm()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "drawn":
            return self.layer(x @ self.drawn)
        return self.layer(x) / self.first if self.kind == "first" else self.layer(x) * self.table(x.shape[1])


@pytest.mark.parametrize("kind", ["drawn", "first", "table"])
def test_caches_of_functools_are_filled_once(kind: str) -> None:
    made = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        m = wrap(Cached(kind))
        losses = []
        for _ in range(5):
            loss = m(torch.ones(1, 2)).sum()
            m.zero_grad()
            loss.backward()
            with torch.no_grad():
                m.layer.weight -= 0.3 * m.layer.weight.grad
            losses.append(loss.detach())
        made.append((torch.stack(losses), torch.rand(1), kind in m.__dict__))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(b, a) if isinstance(a, Tensor) else None
    assert made[0][2] == made[1][2]
    assert m.report().n_captures == 1


GRIDS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "of sizes": lambda m, x: m(x) + edited(sub(*torch.meshgrid(torch.arange(len(x)), torch.arange(3), indexing="ij"))),
    "of views": lambda m, x: m(x).sum() * edited(sub(*torch.meshgrid(x[:, 0], x[:, 1], indexing="xy"))),
    "stacked": lambda m, x: m(x).sum() * edited(torch.stack(torch.meshgrid(m.weight[0], x[:, 1], indexing="ij"))),
    "spread": lambda m, x: m(x).sum() * edited(sub(*torch.broadcast_tensors(x[:, 0:1], x[0:1]))),
    "spread weights": lambda m, x: m(x).sum() * edited(sub(*torch.broadcast_tensors(m.weight[:, 0:1], m.weight[0:1]))),
}


def sub(a: Tensor, b: Tensor) -> Tensor:
    return a - b * 2


def edited(x: Tensor) -> Tensor:
    x += 3
    return x


@pytest.mark.parametrize("kind", GRIDS)
def test_edits_of_what_is_made_of_grids(kind: str) -> None:
    report = alike(GRIDS[kind], *rows(2, 3, 5, 4, 2)).report()
    assert report.node_share == 1 and not report.eager, str(report)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def __call__(self, x: Tensor, n: int = 1) -> Tensor:
        return super().__call__(x, n) * 10

    def forward(self, x: Tensor, n: int) -> Tensor:
        return self.layer(x) if n == 0 else self(x, n - 1)


def test_a_call_of_its_own_that_forward_calls() -> None:
    net = Again()
    model = ORTModule(copy.deepcopy(net))
    for n in (0, 1, 2, 3, 1):
        x = torch.randn(2, 3)
        torch.testing.assert_close(model(x, n), net(x, n))


class Inner(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.register_backward_hook(lambda m, given, back: seen.append((type(m), len(given), len(back))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Outer(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.inner = Inner(seen)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * float(x.detach().numpy().max()))  # PyTorch's


def test_the_older_backward_hook_of_a_part() -> None:
    made = []
    for wrap in (lambda m: m, ORTModule):
        seen: list[Any] = []
        torch.manual_seed(0)
        m = wrap(Outer(seen))
        for rows_ in (2, 3, 2, 4):
            m(torch.ones(rows_, 4)).sum().backward()
        made.append(seen)
    assert made[0] == made[1] and len(made[0]) == 4


class Powers(nn.Module):
    def forward(self, x: Tensor, k: int) -> Any:
        return x * 2**k, 2 ** x.shape[0], x.shape[0] ** k


def test_a_power_of_integers_is_one() -> None:
    net, model = Powers(), ORTModule(Powers())
    for n, k in ((2, 1), (3, 2), (4, 2), (5, -1), (3, 3)):
        for a, b in zip(model(torch.ones(n, 3), k), net(torch.ones(n, 3), k), strict=True):
            assert type(a) is type(b) and (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
