"""Sizes that forward computes and reads back: torch.div of sizes, remainders, squeeze of a batch of one, places of memory.
They are sizes of the graph, nothing of which stays in PyTorch, and every size has eager PyTorch's answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sizes import Of, run
from torch import Tensor, nn

import ortmodule.climb
from ortmodule import ORTModule
from ortmodule.capture import capture

SIZES = [(2, 8), (3, 13), (1, 9), (2, 4), (1, 16), (4, 5), (1, 4), (5, 1)]


def chunks(m: Any, x: Tensor) -> Tensor:
    """Longformer's: padded to whole windows, seen in chunks that overlap."""
    y = F.pad(x, (0, (4 - x.size(1) % 4) % 4)).unsqueeze(-1) * m.w[:3]
    n = torch.div(y.size(1), 4, rounding_mode="trunc")
    y = y.view(y.size(0), n, 4, 3).reshape(y.size(0), -1, 3)
    size, stride = [y.size(0), torch.div(y.size(1), 2, rounding_mode="trunc") - 1, 4, 3], list(y.stride())
    return y.as_strided(size, (stride[0], 2 * stride[1], *stride[1:])) * (n + 1)


def whole_windows(m: Any, x: Tensor) -> Tensor:
    """PegasusX's: padded to whole windows, counted without what is left over."""
    y = F.pad(x, (0, (3 - x.size(1) % 3) % 3)) * m.w[0]
    n = y.size(1)
    return y.view(y.size(0), (n - n % 3) // 3, 3).cumsum(1)


def blocks(m: Any, x: Tensor) -> Tensor:
    """LongT5's: padded to a multiple, by the remainder of a negative number."""
    return (F.pad(x, (0, -x.size(1) % 4)) * m.w[1]).view(x.size(0), -1, 4).flip(1)


def transposed(m: Any, x: Tensor) -> Tensor:
    """Elements by memory that another order has."""
    y = torch.relu((x.unsqueeze(-1) * m.w).transpose(0, 1))
    return y.as_strided((y.size(1), y.size(0)), (y.stride(1), y.stride(0)))


def known_before(m: Any, x: Tensor) -> Tensor:
    """A size that is there before the tensor it is read from, too."""
    y = torch.full((x.size(0), x.size(1) // 2 + 1), x.size(1) // 2, dtype=x.dtype) * m.w[0]
    n = torch.div(x.size(1), 2, rounding_mode="floor")
    return y.view(x.size(0), n + 1) + n + x.sum()


ALL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "chunks": chunks,
    "whole windows": whole_windows,
    "blocks": blocks,
    "known before": known_before,
    "memory in another order": transposed,
}


@pytest.mark.parametrize("name", ALL)
def test_every_size(name: str) -> None:
    torch.manual_seed(0)
    run(Of(ALL[name]), SIZES if name != "chunks" else SIZES[:3])


@pytest.mark.parametrize("name", ALL)
def test_wholly_in_the_engine_with_symbols(name: str) -> None:
    c = capture(Of(ALL[name]), (torch.randn(3, 13).double(),), {}, dynamic=True, answers=())
    assert c.dynamic and not c.host_ops


@pytest.mark.parametrize("name", ["whole windows", "blocks"])
def test_one_capture_for_all_sizes(name: str) -> None:
    assert run(Of(ALL[name]), SIZES[:5]) == 2


def last(m: Any, x: Tensor) -> Tensor:
    """MBart's: the last token of each row, whatever squeeze makes of one row."""
    y, of = torch.zeros_like(x), torch.full((x.size(0), 1), -1) % x.size(1)
    y[:, 0] = (x * m.w[0]).gather(1, of).squeeze()
    return y + x * m.w[1]


def test_squeeze_at_batch_one_takes_any_length() -> None:
    torch.manual_seed(0)
    assert run(Of(last), [(2, 8), (3, 13), (1, 9), (2, 4), (1, 16), (1, 4), (1, 7)]) == 3


ELSEWHERE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a part of a memory": lambda m, x: (x.unsqueeze(-1) * m.w)[:, :, 1:].as_strided((2, 2), (3, 1)),
    "behind its elements": lambda m, x: (x.unsqueeze(-1) * m.w)[:1].as_strided((2, 3), (x.size(1) * 6, 1)),
    "from another place": lambda m, x: (x.unsqueeze(-1) * m.w)[1:].as_strided((2, 3), (3, 1), 1),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_memory_that_is_not_there_is_pytorchs(name: str) -> None:
    torch.manual_seed(0)
    run(Of(ELSEWHERE[name]), [(2, 8), (3, 13), (4, 5)])


def test_places_behind_the_elements_are_seen_at_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(16.0).view(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.w[0].as_strided((2, 2), (4, 1)) * x

    of, x = Rows(), torch.randn(2, 2)
    model = ORTModule(of)
    torch.testing.assert_close(model(x), Rows.forward(of, x))
    assert [e.reason for e in model.report().eager] == ["as_strided of a tensor whose memory holds more than its elements"]
    assert "the engine failed" not in caplog.text


def test_an_argument_in_another_order() -> None:
    """as_strided of an argument sees its memory: a capture does not hold for other strides."""
    of = Of(lambda m, x: torch.sin(x).as_strided((2, 3), (3, 1)) * m.w[0])
    model = ORTModule(of)
    for x in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2], torch.randn(4, 6)):
        torch.testing.assert_close(model(x.double()), of(x.double()), rtol=1e-12, atol=1e-12)


def test_a_parameter_and_a_buffer_in_another_order() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Buffer(torch.arange(6.0).view(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.sin(self.w).as_strided((2, 3), (1, 2))) + self.b.as_strided((2, 3), (1, 2))

    of, x = Own(), torch.randn(2, 3)
    model = ORTModule(of)
    for k in range(4):
        if k == 2:
            of.w.data = torch.arange(6.0).view(3, 2).t()
        elif k == 3:
            of.b = torch.arange(6.0).view(3, 2).t()
        torch.testing.assert_close(model(x), Own.forward(of, x))
    assert len(model.report().graphs) == 3


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(json.dumps([x.size(0)]))  # a symbol has no JSON


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).sin()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4), Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x))


def test_what_is_kept_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that fails within a module kept in PyTorch is given up: no other trace would do better."""
    tried: list[Any] = []

    def counted(*a: Any, **k: Any) -> Any:
        tried.append((k["dynamic"], sorted(k["keep_in_torch"])))
        return capture(*a, **k)

    monkeypatch.setattr(ortmodule.climb, "capture", counted)
    torch.manual_seed(0)
    eager = Outer().double()
    model = ORTModule(eager)
    for n in (3, 5):
        x = torch.randn(n, 4).double()
        torch.testing.assert_close(model(x), eager(x), rtol=1e-12, atol=1e-12)
    symbolic = [keep for dynamic, keep in tried if dynamic]
    assert symbolic == [[], ["middle.table"], ["middle"]] and [keep for dynamic, keep in tried if not dynamic] == [[], []]
