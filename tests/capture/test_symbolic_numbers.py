"""Sizes and number arguments that are symbols in a capture, as the user's code sees them: numbers, as in eager."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sizes import Of, run
from torch import Tensor, nn

from ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self, rule: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer, self.rule = nn.Linear(4, 4), rule

    def forward(self, x: Tensor, k: Any = 2) -> Tensor:
        return self.layer(x) * self.rule(x, k)


TABLE = {"3": 5.0, "(3, 4)": 6.0, "rows=3": 7.0, "[3, 4]": 8.0, "3.0": 9.0, "3/1": 10.0}
KINDS: dict[str, Callable[[Tensor, Any], Any]] = {
    "isinstance of a size": lambda x, k: 2 if isinstance(x.shape[0], int) else 3,
    "isinstance of one of several": lambda x, k: 2 if isinstance(x.shape[0], (str, int)) else 3,
    "isinstance of an abstract class": lambda x, k: 2 if isinstance(x.shape[0], numbers.Number) else 3,
    "isinstance of an argument": lambda x, k: 2 if isinstance(k, int) else 3,
    "no bool": lambda x, k: 2 if isinstance(k, bool) else 3,
    "isinstance of a quotient": lambda x, k: 2 if isinstance(x.shape[0] / 2, float) else 3,
    "type of a size": lambda x, k: 2 if type(x.shape[0]) is int else 3,
    "type of an argument, equal": lambda x, k: 2 if type(k) == int else 3,  # noqa: E721
    "str": lambda x, k: TABLE.get(str(x.shape[0]), 1.0),
    "repr": lambda x, k: TABLE.get(repr(k), 1.0),
    "f-string": lambda x, k: TABLE.get(f"rows={x.shape[0]}", 1.0),
    "format": lambda x, k: TABLE.get(f"{k:d}", 1.0),
    "percent": lambda x, k: TABLE.get("%s" % k, 1.0),  # noqa: UP031
    "a tuple's text": lambda x, k: TABLE.get(str(tuple(x.shape)), 1.0),
    "a list's text": lambda x, k: TABLE.get(f"{list(x.shape)}", 1.0),
    "a float's text": lambda x, k: TABLE.get(str(k * 1.0), 1.0),
    "length of a text": lambda x, k: len(str(x.shape[0] * 4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_look_as_in_eager(kind: str) -> None:
    torch.manual_seed(0)
    net = Net(KINDS[kind])
    model = ORTModule(net)
    for rows, k in ((2, 2), (3, 3), (5, 4), (3, 3), (7, 5), (2, 3)):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x, k), net.layer(x) * net.rule(x, k))
    assert model.report().n_captures >= 1
    if "isinstance" in kind:
        assert model.report().n_captures == 2, str(model.report())  # sizes and numbers stay symbols


class Unknown(TypeError):
    pass


def checked(k: Any) -> float:
    if k is None:
        raise Unknown(f"no number, a {type(k)}")
    return k * 1.0


def named(k: Any) -> float:
    if k is None:
        raise Unknown(f"of class {type(k).__name__}, {type(k).__module__}")
    return k * 1.0


def rejected(k: Any) -> float:
    try:
        if k > 0:
            raise Unknown(type(k))
    except Unknown as error:
        return 2.0 if error.args[0] is int else 3.0
    return 1.0


@pytest.mark.parametrize("kind", [checked, named, rejected])
def test_the_class_of_a_number_in_an_error(kind: Callable[[Any], float]) -> None:
    """What nobody reads is no question: one capture for all sizes."""
    torch.manual_seed(0)
    net = Net(lambda x, k: kind(x.shape[0]))
    model = ORTModule(net)
    for rows in (2, 3, 5, 4, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x, 0), net.layer(x) * kind(rows))
    assert kind is rejected or model.report().n_captures == 2, str(model.report())


ARITHMETIC: dict[str, tuple[Callable[[Tensor, Any], Any], tuple[Any, ...]]] = {
    "floor division by 0": (lambda x, k: 7 // k, (1, 2, 3, 0, 5)),
    "remainder by 0": (lambda x, k: 7 % k, (1, 2, 3, 0, 5)),
    "division by 0": (lambda x, k: 7 / k, (1, 2, 3, 0, 5)),
    "division by 0.0": (lambda x, k: 1 / k, (1.0, 2.0, 3.0, 0.0, 5.0)),
    "0.0 to a negative power": (lambda x, k: k**-1, (1.0, 2.0, 3.0, 0.0, 5.0)),
    "root of a negative number": (lambda x, k: k**0.5, (1.0, 2.0, 3.0, -4.0, 5.0)),
    "negative power": (lambda x, k: 2**k, (1, 2, 3, -4, 5)),
    "square": (lambda x, k: k**2, (1.0, 2.0, 3.0, -4.0, 0.0)),
    "division of it": (lambda x, k: k / 2 + k % 3 + k // 2, (1, 2, 3, 0, -5)),
}


@pytest.mark.parametrize("kind", ARITHMETIC)
def test_arithmetic_raises_as_in_eager(kind: str) -> None:
    torch.manual_seed(0)
    rule, values = ARITHMETIC[kind]
    net = Net(rule)
    model = ORTModule(net)
    for rows, k in enumerate(values):
        x = torch.randn(rows + 2, 4)
        try:
            want = net.layer(x) * rule(x, k)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                model(x, k)
        else:
            torch.testing.assert_close(model(x, k), want)


@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.AvgPool2d])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 3), (3, 2), (2, 2)])
def test_pools_that_round_up_at_symbolic_sizes(pool: type, kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), pool(kernel, stride, 0, ceil_mode=True))
    model = ORTModule(net)
    for rows, height in ((4, 7), (3, 7), (2, 8), (5, 9), (1, 10)):
        x = torch.randn(rows, 2, height, 9)
        torch.testing.assert_close(model(x), net[1](net[0](x)))


@pytest.mark.parametrize("first", [(2, 4), (5, 4), (1, 4)], ids=str)
def test_relations_between_sizes_as_results(first: tuple[int, int]) -> None:
    """What one is counts as a condition of the capture: one for each way it may be, and one for the first sizes."""
    module = Of(lambda m, x: (x.sin() * m.w[0], {"many": [x.shape[0] > 2]}))
    assert run(module, [first, (2, 5), (3, 6), (2, 7), (4, 9), (3, 3), (2, 8)]) <= 3


def test_a_relation_that_depends_on_data_as_a_result() -> None:
    run(Of(lambda m, x: (x.sin() * m.w[0], x.sum().item() > 0)), [(2, 4), (2, 5), (3, 6), (2, 4)])


class Scores(nn.Module):
    """Attention as it is written by hand, whose scores a number of the sizes changes."""

    def __init__(self, rule: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer, self.rule = nn.Linear(8, 24), rule

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, -1)
        return torch.softmax(self.rule(q @ k.transpose(-1, -2), x.shape[1]), -1) @ v


SCORES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "times": lambda s, n: s * n,
    "divided": lambda s, n: s / n,
    "times a full tensor": lambda s, n: s * torch.full((1, 1), n, dtype=s.dtype),
    "times a number in a tensor": lambda s, n: s * torch.tensor(n),
    "plus": lambda s, n: s - n,
    "filled": lambda s, n: s.masked_fill(torch.ones(n, n).triu(1).bool(), -1.0 * n),
    "chosen": lambda s, n: torch.where(torch.ones(n, n).tril().bool(), s, torch.full((), -n, dtype=s.dtype)),
    "hidden by it": lambda s, n: s.masked_fill(torch.ones(n, n).triu(1).bool(), -1e9 * n),
}


@pytest.mark.parametrize("rule", SCORES)
def test_attention_takes_no_size_for_a_number(rule: str) -> None:
    torch.manual_seed(0)
    net = Scores(SCORES[rule]).double()
    model = ORTModule(net)
    for rows in (5, 7, 9, 6):
        x = torch.randn(2, rows, 8, dtype=torch.double)
        got = torch.autograd.grad((y := model(x)).square().sum(), list(model.parameters()))
        want = torch.autograd.grad((z := net(x)).square().sum(), list(net.parameters()))
        torch.testing.assert_close((y, *got), (z, *want))
