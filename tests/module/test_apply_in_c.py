"""Where `Function.apply` is a function of C (torch 2.14), custom autograd.Functions become nodes by their `forward`."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import copy

import torch
from torch import nn
from torch.autograd import Function

Function.apply = torch._C._FunctionBase.__dict__["apply"]  # as 2.14 has it


class Cube(Function):  # its backward is not the derivative of its forward: who traces through it is found out
    @staticmethod
    def forward(ctx, x, factor=2.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.factor * x, None


class Other(Cube):  # the same forward, inherited
    @staticmethod
    def backward(ctx, g):
        return g * 5, None


class Late(Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.saved_tensors[0]


class LateToo(Late):
    @staticmethod
    def backward(ctx, g):
        return 7 * g


cube, other, late, late_too = Cube.apply, Other.apply, Late.apply, LateToo.apply  # bound before the package is there
own = [cls.__dict__.get("forward") for cls in (Cube, Other, Late, LateToo)]

from ortmodule import ORTModule


class Calls(nn.Module):
    def __init__(self, early):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.early = early

    def forward(self, x):
        x = self.fc(x)
        if self.early:
            return late_too(late(other(cube(x, 3.0))))
        return LateToo.apply(Late.apply(Other.apply(Cube.apply(x, 3.0))))


for early in (True, False):
    torch.manual_seed(0)
    eager = Calls(early).double()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for _ in range(2):
        x = torch.randn(3, 4, dtype=torch.float64)
        grads = []
        for m in (eager, ours):
            m.zero_grad()
            leaf = x.clone().requires_grad_()
            out = m(leaf)
            out.sum().backward()
            grads.append([out.detach(), leaf.grad, m.fc.weight.grad, m.fc.bias.grad])
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert [h.kind for h in ours.report().host] == ["python_op"] * 4, str(ours.report())
    assert [cls.__dict__.get("forward") for cls in (Cube, Other, Late, LateToo)] == own
print("good")
"""


def test_early_and_late():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("good\n"), done.stdout + done.stderr
