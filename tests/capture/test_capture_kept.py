"""What stays in PyTorch in a captured graph, what is refused by name, and where a node comes from."""

from __future__ import annotations

import copy
import random
from typing import Any

import onnx
import pytest
import torch
from captured import Fn, check, nodes, r
from captured_models import gpt2, ids
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import CaptureError, capture


class Doubling(torch.autograd.Function):
    """The forward multiplies by a factor, the backward by seven: only a kept backward can tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * factor, x.sum(1)

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gs: Tensor) -> tuple[Tensor, None]:
        return gy * 7 + gs[:, None], None


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def test_custom_functions_stay_in_pytorch() -> None:
    c = check(Fn(lambda x: (Doubling.apply(x * 1, 2), NewStyle.apply(x))), (r(5, 7),), dynamic=True, other=((r(3, 2),), {}))
    assert [(h.kind, h.name) for h in c.host_ops] == [("python_op", "Doubling.apply"), ("python_op", "NewStyle.apply")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_inlined(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    lin = nn.Linear(7, 7)

    class M(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.lin = lin
            self.on = on

        def forward(self, x: Tensor) -> Tensor:
            def f(y: Tensor) -> Tensor:
                return torch.tanh(self.lin(y))

            return checkpoint(f, x * 2, use_reentrant=reentrant) if self.on else f(x * 2)

    assert nodes(capture(M(True), (r(5, 7),), {})) == nodes(capture(M(False), (r(5, 7),), {}))


class Branch(nn.Module):
    """Cannot be traced: the way depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        if int(x.sum() > 0):
            return self.lin(x)
        return self.lin(x) * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Tanh(), Branch()), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_branch_on_data_is_named_and_can_stay_in_pytorch() -> None:
    m = Outer()
    with pytest.raises(CaptureError) as e:
        capture(m, (r(5, 7),), {})
    assert e.value.module == "blocks.0.1" and e.value.file.endswith("test_capture_kept.py") and e.value.line > 0
    calls: list[int] = []
    m.blocks[0][1].register_forward_hook(lambda *_: calls.append(1))
    c = capture(m, (r(5, 7),), {}, keep_in_torch=["blocks.0.1"])
    assert [(h.kind, h.name) for h in c.host_ops] == [("module", "blocks.0.1")]
    assert "forward" not in m.blocks[0][1].__dict__
    n = len(calls)
    c = check(m, (r(5, 7),), keep_in_torch=["blocks.0.1"])
    assert len(calls) >= n


def test_result_of_unknown_size_is_an_error() -> None:
    """Inside the graph such sizes are a region (test_coverage.py); what the user gets must have a known one."""
    with pytest.raises(CaptureError, match="size depends on data is returned"):
        capture(Fn(lambda x: x[x > 0] * 2), (r(5, 7),), {})


def test_nodes_know_module_file_and_line() -> None:
    c = capture(gpt2(), (), {"input_ids": ids(2, 5)})
    graph = onnx.load_from_string(c.onnx).graph
    for n in graph.node:
        if n.op_type == "Attention":
            notes = {e.key: e.value for e in n.metadata_props}
            assert notes["module"].startswith("transformer.h.") and notes["file"].endswith("modeling_gpt2.py") and int(notes["line"]) > 0


class Scaled(nn.Module):
    """Kept in PyTorch by what it asks Python for; its second result has no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        random.random()
        return x * 2, x.detach().abs().max() / 127


@pytest.mark.parametrize("name", ["heaviside", "floor_divide", "igamma"])
def test_operators_without_a_derivative(name: str) -> None:
    """Of what a kept module has detached they need none; of anything else the error is eager's."""
    rules = {"heaviside": lambda s: torch.heaviside(s - 0.001, s), "floor_divide": lambda s: 1.0 // (s + 1), "igamma": lambda s: torch.igamma(s + 1, s + 2)}

    class Net(nn.Module):
        def __init__(self, direct: bool) -> None:
            super().__init__()
            self.layer, self.scaled, self.direct = nn.Linear(4, 4), Scaled(), direct

        def forward(self, x: Tensor) -> Tensor:
            h, s = self.scaled(self.layer(x))
            return (h * rules[name](h.abs().max() if self.direct else s)).sum()

    for direct in (False, True):
        torch.manual_seed(0)
        eager = Net(direct)
        ours = ORTModule(copy.deepcopy(eager))
        for rows in (2, 3, 4):
            found: list[Any] = []
            for m in (eager, ours):
                m.zero_grad()
                try:
                    m(torch.linspace(-1, 1.2, 4 * rows).reshape(-1, 4)).backward()
                    found.append(m.layer.weight.grad)
                except RuntimeError as error:
                    found.append(str(error))
            assert isinstance(found[0], str) == direct
            if direct:
                assert found[0] == found[1]
            else:
                torch.testing.assert_close(found[1], found[0])
