"""Mistakes that people make. Those that PyTorch has an error for have that error, word for word, whether the engine has
run before or not; those about ORTModule name what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ortmodule import (
    CaptureError,
    DebugOptions,
    FallbackPolicy,
    ORTModule,
    ORTModuleDeviceException,
    ORTModuleIOError,
)

Wrap = Callable[[nn.Module], nn.Module]


def ids(*n: int) -> Tensor:
    return torch.tensor(n)


class Line(nn.Module):
    """forward is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor] = lambda self, x: self.a(x), i: int = 4) -> None:
        super().__init__()
        self.a, self.w, self.n = nn.Linear(i, 3), nn.Parameter(torch.ones(3, 3)), 0
        self.body = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        y = self.h(self.e(x))
        return y if labels is None else nn.functional.cross_entropy(y, labels)


def twice(model: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    model(*first)
    model(*second)


def two_rows(self: Any, x: Tensor) -> Tensor:
    assert x.shape[0] == 2, "two rows, please"
    return self.a(x)


def through_numpy(self: Any, x: Tensor) -> Tensor:
    return self.a(torch.from_numpy(x.detach().numpy()))


def backward_twice(w: Wrap) -> None:
    loss = w(Line())(torch.randn(2, 4)).exp().sum()
    loss.backward()
    loss.backward()


def backward_of_no_grad(w: Wrap) -> None:
    with torch.no_grad():
        loss = w(Line())(torch.randn(2, 4)).sum()
    loss.backward()


PYTORCHS: dict[str, Callable[[Wrap], Any]] = {
    "wrong number of features": lambda w: w(Line())(torch.randn(2, 5)),
    "wrong number of features, later": lambda w: twice(w(Line()), (torch.randn(2, 4),), (torch.randn(2, 5),)),
    "double into float": lambda w: w(Line())(torch.randn(2, 4, dtype=torch.float64)),
    "double into float, later": lambda w: twice(w(Line()), (torch.randn(2, 4),), (torch.randn(2, 4).double(),)),
    "half weights, float input": lambda w: w(Line().half())(torch.randn(2, 4)),
    "integers into a linear layer": lambda w: w(Line())(torch.ones(2, 4, dtype=torch.int64)),
    "floats as ids": lambda w: w(Words())(torch.ones(2)),
    "an index too large": lambda w: w(Words())(ids(1, 7)),
    "an index too large, later": lambda w: twice(w(Words()), (ids(1, 2),), (ids(1, 7),)),
    "a negative index, later": lambda w: twice(w(Words()), (ids(1, 2),), (ids(1, -1),)),
    "a label too large": lambda w: twice(w(Words()), (ids(1, 2), ids(0, 1)), (ids(1, 2), ids(0, 3))),
    "labels of another length": lambda w: w(Words())(ids(1, 2), ids(0, 1, 2)),
    "labels of another length, later": lambda w: twice(w(Words()), (ids(1, 2), ids(0, 1)), (ids(1, 2), ids(0, 1, 2))),
    "a missing argument": lambda w: w(Line())(),
    "a missing argument, later": lambda w: twice(w(Line()), (torch.randn(2, 4),), ()),
    "an unknown keyword": lambda w: w(Words())(ids(1, 2), mask=None),
    "too many arguments": lambda w: w(Line())(torch.randn(2, 4), 3),
    "None": lambda w: w(Line())(None),
    "a list": lambda w: w(Line())([[1.0] * 4]),
    "an array": lambda w: w(Line())(numpy.ones((2, 4), "float32")),
    "a tensor on another device": lambda w: w(Line())(torch.randn(2, 4, device="meta")),
    "backward twice": backward_twice,
    "backward of a vector": lambda w: w(Line())(torch.randn(2, 4)).backward(),
    "backward after no_grad": backward_of_no_grad,
    "backward of what is frozen": lambda w: w(Line().requires_grad_(False))(torch.randn(2, 4)).sum().backward(),
    "a gradient of another shape": lambda w: w(Line())(torch.randn(2, 4)).backward(torch.ones(3, 3)),
    "a product that does not fit": lambda w: w(Line(lambda self, x: x @ self.w))(torch.randn(2, 4)),
    "a reshape that does not fit": lambda w: twice(w(Line(lambda self, x: self.a(x).view(-1, 4))), (torch.randn(4, 4),), (torch.randn(3, 4),)),
    "an assertion of the user's": lambda w: twice(w(Line(two_rows)), (torch.randn(2, 4),), (torch.randn(3, 4),)),
    "a name that is not there": lambda w: w(Line(lambda self, x: self.b(x)))(torch.randn(2, 4)),
    "a division by zero": lambda w: w(Line(lambda self, x: self.a(x) * (1 // self.n)))(torch.randn(2, 4)),
    "one row into BatchNorm": lambda w: w(nn.BatchNorm1d(4))(torch.randn(1, 4)),
    "state of another shape": lambda w: w(Line()).load_state_dict(Line(i=5).state_dict()),
    "state without names": lambda w: w(Line()).load_state_dict({}),
}


def error(do: Callable[[], Any]) -> Exception:
    torch.manual_seed(0)
    with pytest.raises(Exception) as e:  # noqa: PT011
        do()
    return e.value


@pytest.mark.parametrize("name", PYTORCHS)
def test_the_error_is_pytorchs(name: str) -> None:
    want, got = (error(lambda w=w: PYTORCHS[name](w)) for w in (lambda m: m, ORTModule))
    assert type(got) is type(want) and str(got) == str(want)



OURS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (lambda: ORTModule(nn.Linear), TypeError, "ORTModule wraps a torch.nn.Module, got the class Linear: make an object of it first"),
    "a function": (lambda: ORTModule(len), TypeError, "ORTModule wraps a torch.nn.Module, got builtin_function_or_method"),
    "wrapped twice": (lambda: ORTModule(ORTModule(Line())), TypeError, "ORTModule got a module that is already an ORTModule: wrap it once"),
    "an option misspelt": (lambda: ORTModule(Line(), memory_opt_lvl=1), TypeError,
                           r"ORTModule got unknown options: memory_opt_lvl \(did you mean memory_opt_level\?\); allowed: .*"),
    "a value that is not allowed": (lambda: ORTModule(Line(), memory_opt_level=9), ValueError, "memory_opt_level=9 is not allowed; give 0, 1 or 2"),
    "a budget in words": (lambda: ORTModule(Line(), memory_budget="lots"), ValueError,
                          r"memory_budget='lots' is not allowed; give bytes as an integer, or text: '6GB' \(10\^9 bytes\), .*"),
    "a budget too small": (lambda: ORTModule(nn.Sequential(nn.Linear(64, 64), nn.GELU()), memory_budget=1000)(torch.randn(64, 64)).sum().backward(), ValueError,
                           r"memory_budget=1000 .* cannot be met: .* The smallest budget that can be met is memory_budget=\d+; give at least that, .*"),
    "graphs without a prefix": (lambda: DebugOptions(save_onnx=True), ValueError, "onnx_prefix must be provided when save_onnx is set."),
    "graphs to nowhere": (lambda: DebugOptions(save_onnx=True, onnx_prefix="a", save_path="/nonexistent/x"), OSError, "Directory /nonexistent/x is not writable. .*"),
    "strict, an operator in PyTorch": (lambda: ORTModule(Line(lambda self, x: torch.linalg.inv(self.w + self.a(x))), strict="engine")(torch.randn(3, 4)), CaptureError,
                                       r"capture failed \(.*test_mistakes.py:\d+\): strict='engine': aten::linalg_inv.default would run in PyTorch \(no row in the operator table\); "
                                       r"without strict PyTorch runs that, by name in report\(\)"),
    "a graph that the policy does not allow": (
        lambda: ORTModule(Line(through_numpy), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)(torch.randn(3, 4)), CaptureError,
        r"capture failed \(.*test_mistakes.py:\d+\): RuntimeError: .numpy\(\) is not supported for tensor subclasses.; "
        "FALLBACK_UNSUPPORTED_ONNX_MODEL leaves that to PyTorch"),
    "strict, a submodule in PyTorch": (lambda: ORTModule(nn.Sequential(Line(), Line(through_numpy, 3)), strict=True)(torch.randn(3, 4)), CaptureError,
                                       r"capture failed in submodule '1' \(.*test_mistakes.py:\d+\): RuntimeError: .numpy\(\) is not supported for tensor subclasses.; "
                                       r"without strict PyTorch runs that, by name in report\(\)"),
    "data that the policy does not allow": (lambda: ORTModule(Line(), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)(iter([1])), ORTModuleIOError,
                                            "Line: among the arguments is a list_iterator, whose state is not watched; FALLBACK_UNSUPPORTED_DATA leaves such calls to PyTorch"),
    "a device that the policy does not allow": (
        lambda: ORTModule(Line().to("meta"), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)(torch.randn(3, 4, device="meta")), ORTModuleDeviceException,
        "Line: the engine runs on cpu, and here is meta; FALLBACK_UNSUPPORTED_DEVICE leaves that to PyTorch"),
    "wrapped around what must be outside": (lambda: ORTModule(torch.jit.script(nn.Linear(4, 3))), TypeError,
                                            "ORTModule wraps the module before torch.jit.script or torch.jit.trace, not what they return"),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_the_error_says_what_to_do(name: str) -> None:
    do, kind, text = OURS[name]
    got = error(do)
    assert isinstance(got, kind) and re.fullmatch(text, str(got), re.S), repr(got)
    assert str(got).count("\n") < 15
