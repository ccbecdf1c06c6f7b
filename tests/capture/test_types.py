"""Operands of types that eager refuses: what the engine would convert is PyTorch's to refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

INTS = (torch.int64, torch.int32, torch.bool, torch.uint8)
CASES: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], tuple[torch.dtype, ...]]] = {
    "linear": (lambda m, x: m(x), INTS),
    "mv": (lambda m, x: torch.mv(x, m.weight[0]), INTS),
    "addmm": (lambda m, x: torch.addmm(m.bias, x, m.weight.t()), INTS),
    "matmul": (lambda m, x: x @ m.weight.t(), INTS),
    "conv1d": (lambda m, x: F.conv1d(x[None], m.weight[:, :, None].transpose(0, 1)[:, :4]), INTS),
    "integer weights": (lambda m, x: F.linear(x, m.weight.long()) + m.bias, (torch.float32,)),
    "cross_entropy": (lambda m, x: F.cross_entropy(m.weight, x[:3, 0]), (torch.int32, torch.int16)),
    "index_add": (lambda m, x: m.weight.index_add(0, torch.arange(3), x[:3]), (torch.float64, torch.int64)),
    "interpolate": (lambda m, x: F.interpolate(x[None], scale_factor=2) * m.bias[0], (torch.int64, torch.bool)),
    "pow": (lambda m, x: x.pow(-1) * m.weight[0], (torch.int64, torch.int32)),
    "abs": (lambda m, x: x.abs() * m.weight[0], (torch.bool,)),
    "floor": (lambda m, x: x.floor() * m.weight[0], (torch.bool,)),
    "relu": (lambda m, x: x.relu() * m.weight[0], (torch.bool,)),
    "argmax": (lambda m, x: x.argmax(1, True) * m.weight[0], (torch.bool,)),
}


class Net(nn.Module):
    def __init__(self, rule: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.rule = nn.Linear(6, 3), rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.layer, x)


@pytest.mark.parametrize("name", CASES)
def test_refused_as_in_eager(name: str) -> None:
    rule, types = CASES[name]
    for dtype in types:
        net = Net(rule)
        x = torch.ones(4, 6).to(dtype)
        with pytest.raises(RuntimeError) as theirs:
            net(x)
        model = ORTModule(net)
        for _ in range(2):
            with pytest.raises(type(theirs.value)):
                model(x)


def test_what_eager_computes_stays_in_the_engine() -> None:
    torch.manual_seed(0)
    rules: list[tuple[Callable[[nn.Linear, Tensor], Tensor], Tensor]] = [
        (lambda m, x: x.pow(2) * m.weight[0], torch.ones(4, 6).long()),
        (lambda m, x: x.abs() * m.weight[0], torch.ones(4, 6).long()),
        (lambda m, x: F.cross_entropy(m.weight, x[:3, 0]), torch.ones(4, 6).long()),
        (lambda m, x: F.interpolate(x[None], scale_factor=2) * m.bias[0], torch.ones(4, 6)),
        (lambda m, x: F.scaled_dot_product_attention(m(x)[None], m(x)[None], m(x)[None], x[:, :4] > 0), torch.randn(4, 6)),
    ]
    for rule, x in rules:
        net = Net(rule)
        model = ORTModule(net)
        torch.testing.assert_close(model(x), net(x), equal_nan=True)
        assert model.report().node_share == 1, str(model.report())
