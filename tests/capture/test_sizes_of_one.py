"""Questions about sizes whose answer cannot be told by a result make no condition of a capture; where an edit, a result, a
buffer, `is` or a question can tell, every size has eager PyTorch's answer. The other such questions: test_layouts.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sizes import Of, run
from torch import Tensor, nn

BATCHES = [(2, 5), (3, 7), (1, 6), (2, 4), (1, 9), (4, 5)]


def contrastive(m: Any, x: Tensor) -> Tensor:
    z = F.normalize(x.unsqueeze(-1) * m.w, dim=-1)[:, 0]
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


def heads(m: Any, x: Tensor) -> Tensor:
    q = (x.unsqueeze(-1) * m.w).unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.sin(), q).transpose(1, 2).contiguous().view(*x.shape, 6)


def relative(m: Any, x: Tensor) -> Tensor:
    q = (x.unsqueeze(-1) * m.w).unflatten(-1, (2, 3)).transpose(1, 2)
    places = torch.arange(x.shape[1], dtype=x.dtype)
    return torch.einsum("bhld,lrd->bhlr", q, torch.cos(places[:, None, None] - places[:, None] + m.w[:3]))


def kind(value: Any, cls: type) -> bool:
    """As data classes that check their fields do."""
    if cls is int and isinstance(value, bool):
        return False
    return isinstance(value, cls)


def checked(m: Any, x: Tensor) -> Tensor:
    assert kind(3, int) and kind("a", str) and kind(x.shape[0], int)
    return x.sin() * m.w[0]


def channels(m: Any, x: Tensor) -> Tensor:
    return (x.unsqueeze(-1) * m.w).transpose(1, 2)


SAME: dict[str, Callable[[], nn.Module]] = {
    "len": lambda: Of(contrastive),
    "len in arithmetic": lambda: Of(lambda m, x: (x * m.w[0]).sum(0) / len(x) + torch.eye(len(x.t()), dtype=x.dtype)),
    "contiguous that copies nothing": lambda: Of(heads),
    "einsum": lambda: Of(relative),
    "classes that are told": lambda: Of(checked),
    "group norm": lambda: Of(lambda m, x: m.part(channels(m, x).unsqueeze(-1)), part=nn.GroupNorm(2, 6).double()),
    "group norm, channels last": lambda: Of(lambda m, x: m.part(channels(m, x).unsqueeze(-2)), part=nn.GroupNorm(3, 6).double()),
    "pool": lambda: Of(lambda m, x: torch.flatten(F.adaptive_avg_pool1d(channels(m, x), 1), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_batch_of_one_needs_no_capture(name: str) -> None:
    torch.manual_seed(0)
    assert run(SAME[name](), BATCHES) == 2


@pytest.mark.parametrize("name", SAME)
def test_half_precision_and_no_rows(name: str) -> None:
    torch.manual_seed(0)
    run(SAME[name](), [(2, 5), (3, 7), (1, 6)], dtype=torch.bfloat16)
    run(SAME[name](), [(2, 5), (3, 7), (0, 6), (1, 4)])


def turned(x: Tensor) -> Tensor:
    """Contiguous where one of the two sizes is 1."""
    return (x * 1.5).t().contiguous().t()


def edits_result(m: Any, x: Tensor) -> Tensor:
    y = turned(x)
    z = y.contiguous()
    z[:, :1] = 0
    return y * m.w[0] + z.sum()


def edits_operand(m: Any, x: Tensor) -> Tensor:
    y = turned(x)
    z = y.contiguous()
    y.t()[0].mul_(3)
    return z * m.w[0]


def edits_a_view(m: Any, x: Tensor) -> Tensor:
    y = turned(x)
    z = y.contiguous().view(-1)
    z[1:].add_(2)
    return y.cos() * m.w[0]


def edits_what_it_shares(m: Any, x: Tensor) -> Tensor:
    y = turned(x)
    z = F.dropout(y.contiguous(), 0.5, False).detach()
    z.mul_(2)
    return y * m.w[0]


def edits_other(m: Any, x: Tensor) -> Tensor:
    other = x.sin()
    other.mul_(2)
    return turned(x).contiguous() * m.w[0] + other


class Keeps(nn.Module):
    """A buffer is bound to what may be the argument."""

    edits = True

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(2, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w
        self.last = turned(x).contiguous()
        return y


def looks(m: Any, x: Tensor) -> tuple[Any, ...]:
    y = turned(x) * m.w[0]
    z = y.contiguous()
    return z.cos(), z is y, y.is_contiguous()


def branches(m: Any, x: Tensor) -> Tensor:
    y = turned(x)
    z = y.contiguous()
    return (z.sin() if z is y else z.cos()) * m.w[0]


class Doubles(torch.autograd.Function):
    """Its result is new, but it may look at its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (3.0 if x.is_contiguous() else 2.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


SEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "the result is edited": edits_result,
    "the operand is edited": edits_operand,
    "a view of the result is edited": edits_a_view,
    "a detached result is edited": edits_what_it_shares,
    "something else is edited": edits_other,
    "both are results": lambda m, x: ((y := turned(x) * m.w[0]), y.contiguous()),
    "both are results, of two that are made as wide": lambda m, x: ((y := turned(x)), torch.broadcast_tensors(x * m.w[0], y.contiguous())[1]),
    "the argument's as a result": lambda m, x: (x.contiguous(), x * m.w[0]),
    "the argument's, sliced": lambda m, x: (x[:, 1:].contiguous(), x.t().contiguous(), x * m.w[0]),
    "forward looks": looks,
    "forward branches on it": branches,
    "a Function of the user's": lambda m, x: Doubles.apply((turned(x) * m.w[0]).contiguous()),
    "turned back, and viewed where that is allowed": lambda m, x: (turned(x) * m.w[0]).contiguous().t().cos().view(-1),
    "turned back, and contiguous again": lambda m, x: ((y := turned(x).contiguous().t().cos() * m.w[0]), y.contiguous()),
    "viewed strictly": lambda m, x: turned(x).contiguous().view(-1) * m.w[0],
    "summed with einsum": lambda m, x: torch.einsum("ij->ij", turned(x)).contiguous() * m.w[0],
}  # fmt: skip
ORDERS = [[(2, 4), (3, 5), (1, 4), (2, 1), (1, 1)], [(1, 4), (1, 5), (3, 4), (2, 1), (1, 6)], [(3, 2), (4, 1), (1, 5), (2, 6), (0, 3)]]


def columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def part(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, : x.shape[1]]


@pytest.mark.parametrize(("sizes", "lay"), [(ORDERS[0], Tensor.clone), (ORDERS[1], Tensor.clone), (ORDERS[1], part), (ORDERS[2], columns)])
@pytest.mark.parametrize("name", SEEN)
def test_where_it_can_be_told(name: str, sizes: list[tuple[int, ...]], lay: Callable[[Tensor], Tensor]) -> None:
    module = Of(SEEN[name])
    module.edits = "argument" in name or "results" in name  # type: ignore[assignment]
    run(module, sizes, lay)


@pytest.mark.parametrize("sizes", ORDERS, ids=str)
def test_a_buffer_that_is_bound_to_it(sizes: list[tuple[int, ...]]) -> None:
    run(Keeps(), [(2, 3)] * 2 if (2, 3) in sizes else sizes)


def weights_of_another_size(m: Any, x: Tensor) -> Tensor:
    return m.part(x.unsqueeze(-1))


RAISES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "channels of a group norm": (lambda: Of(weights_of_another_size, part=nn.GroupNorm(2, 4).double()), [(2, 4), (3, 4), (1, 4), (1, 6), (3, 5)]),
    "an einsum of other sizes": (lambda: Of(lambda m, x: torch.einsum("bi,i->b", x, m.w)), [(2, 6), (3, 6), (1, 6), (1, 5), (2, 1)]),
    "an einsum of rows": (lambda: Of(lambda m, x: torch.einsum("bi,bj->ij", x, x[:-1]) * m.w[0]), [(2, 6), (2, 5), (3, 6), (1, 5), (1, 1)]),
    "length of a number": (lambda: Of(lambda m, x: x * m.w[0] * len(x.sum())), [(2, 6), (3, 5), (1, 4)]),
    "a class that is given": (lambda: Of(lambda m, x: x * m.w[0] if kind(x.shape[0], type(x.shape[1])) else x.sin()), [(2, 6), (3, 5), (1, 4)]),
    "a length as a key": (lambda: Of(lambda m, x: x * {2: 3.0, 3: 4.0}[len(x)] * m.w[0]), [(2, 6), (3, 5), (1, 4), (2, 5)]),
    "a length in a text": (lambda: Of(lambda m, x: x * float(f"{len(x)}") * m.w[0]), [(2, 6), (3, 5), (1, 4), (2, 5)]),
    "a length in a range": (lambda: Of(lambda m, x: sum((x[i] * (i + 1) for i in range(len(x))), m.w[0])), [(2, 6), (3, 5), (1, 4), (2, 5)]),
}  # fmt: skip


@pytest.mark.parametrize("name", RAISES)
def test_what_raises_or_counts(name: str) -> None:
    torch.manual_seed(0)
    make, sizes = RAISES[name]
    run(make(), sizes)
