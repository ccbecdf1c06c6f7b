"""Mistakes that people make. Those that PyTorch has an error for have that error, word for word, whether the engine has
run before or not, or where it speaks of its own nodes, at least its class; those about ORTModule name what is wrong and
what to do. No message has more than 15 lines."""

from __future__ import annotations

import re
import traceback
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
    wrap_blocks,
)
from ortmodule.experimental.json_config import load_from_json
from ortmodule.optim import FP16_Optimizer, FusedAdam, LinearWarmupLRScheduler, step_in_backward

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


def twice_with(model: Any, change: Callable[[Any], Any]) -> None:
    model(torch.randn(2, 4)).sum().backward()
    change(model)
    model(torch.randn(2, 4)).sum().backward()


def used_up(parameters: Any) -> Any:
    list(parameters)
    return parameters


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(2, 4)


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
    "state of DistributedDataParallel": lambda w: w(Line()).load_state_dict({f"module.{k}": v for k, v in Line().state_dict().items()}),
    "the model for its state": lambda w: w(Line()).load_state_dict(w(Line())),
    "an attribute misspelt": lambda w: w(Line()).wieght,
    "a result that has no loss": lambda w: w(Line())(torch.randn(2, 4)).loss,
    "a weight replaced by one of another size": lambda w: twice_with(w(Line()), lambda m: setattr(m.a.weight, "data", torch.ones(5, 4))),
    "one submodule left on another device": lambda w: twice_with(w(Line()), lambda m: m.a.to("meta")),
    "converted, and the input not": lambda w: twice_with(w(Line()), lambda m: m.double()),
    "a tensor of inference_mode": lambda w: w(Line())(inference()).sum().backward(),
    "forward of a class without one": lambda w: w(nn.Module())(torch.randn(2, 4)),
    "the model where its parameters go": lambda w: torch.optim.SGD(w(Line()), 0.1),
    "parameters that were used up": lambda w: torch.optim.SGD(used_up(w(Line()).parameters()), 0.1),
}


def sparse(make: Callable[[Any], Any]) -> None:
    model = ORTModule(nn.Embedding(5, 4, sparse=True))
    optimizer = make(model.parameters())
    model(ids(1, 2)).sum().backward()
    optimizer.step()


def converted(w: Wrap, make: Callable[[Any], Any] = FusedAdam) -> None:
    """The optimizer is at work before the model is converted."""
    model = w(Line())
    optimizer = make([model.a.weight])
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)(torch.randn(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def edited(w: Wrap, edit: Callable[[Any, Tensor, Tensor], Any], retain: bool = False) -> None:
    """Between forward and backward, what backward reads."""
    model, x = w(Line(lambda self, x: (self.a(x).tanh() @ self.w).softmax(-1))), torch.randn(2, 4)
    y = model(x)
    if retain:
        y.sum().backward(retain_graph=True)
    with torch.no_grad():
        edit(model, x, y)
    y.square().sum().backward()


EDITED: dict[str, Callable[[Wrap], Any]] = {
    "a weight": lambda w: edited(w, lambda m, x, y: m.w.mul_(2)),
    "an argument": lambda w: edited(w, lambda m, x, y: x.mul_(2)),
    "a result": lambda w: edited(w, lambda m, x, y: y.mul_(2)),
    "an optimizer's step before a second backward": lambda w: edited(w, lambda m, x, y: FusedAdam(m.parameters()).step(), True),
}


@pytest.mark.parametrize("name", EDITED)
def test_what_backward_reads_is_edited(name: str) -> None:
    want, got = (error(lambda w=w: EDITED[name](w)) for w in (lambda m: m, ORTModule))
    assert type(got) is type(want) and str(got)[:87] == str(want)[:87] and str(got).count("\n") < 15
    assert re.search(r"an inplace operation: (\[torch.FloatTensor \[|\S+, a torch.float32 tensor of size \()", str(got))


def error(do: Callable[[], Any]) -> Exception:
    torch.manual_seed(0)
    with pytest.raises(Exception) as e:  # noqa: PT011
        do()
    return e.value


def places(error: Exception) -> list[tuple[str, int | None]]:
    """The lines of this file in the traceback, the user's forward among them."""
    return [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]


@pytest.mark.parametrize("name", PYTORCHS)
def test_the_error_is_pytorchs(name: str) -> None:
    want, got = (error(lambda w=w: PYTORCHS[name](w)) for w in (lambda m: m, ORTModule))
    assert type(got) is type(want) and str(got) == str(want) and str(got).count("\n") < 15
    if name != "a tensor of inference_mode":  # autograd refuses it where the engine hands it over, outside of forward
        assert places(got) == places(want)



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
        r"capture failed \(.*test_mistakes.py:\d+\): a tensor that forward hands to numpy or scipy, which read its numbers; "
        "FALLBACK_UNSUPPORTED_ONNX_MODEL leaves that to PyTorch"),
    "strict, a submodule in PyTorch": (lambda: ORTModule(nn.Sequential(Line(), Line(through_numpy, 3)), strict=True)(torch.randn(3, 4)), CaptureError,
                                       r"capture failed in submodule '1' \(.*test_mistakes.py:\d+\): a tensor that forward hands to numpy or scipy, which read its numbers; "
                                       r"without strict PyTorch runs that, by name in report\(\)"),
    "data that the policy does not allow": (lambda: ORTModule(Line(), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)(iter([1])), ORTModuleIOError,
                                            "Line: among the arguments is a list_iterator, whose state is not watched; FALLBACK_UNSUPPORTED_DATA leaves such calls to PyTorch"),
    "a device that the policy does not allow": (
        lambda: ORTModule(Line().to("meta"), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)(torch.randn(3, 4, device="meta")), ORTModuleDeviceException,
        "Line: the engine runs on cpu, and here is meta; FALLBACK_UNSUPPORTED_DEVICE leaves that to PyTorch"),
    "wrapped around what must be outside": (lambda: ORTModule(torch.jit.script(nn.Linear(4, 3))), TypeError,
                                            "ORTModule wraps the module before torch.jit.script or torch.jit.trace, not what they return"),
    "an optimizer": (lambda: ORTModule(torch.optim.SGD(Line().parameters(), 0.1)), TypeError, "ORTModule wraps a torch.nn.Module, got SGD"),
    "a lazy module": (lambda: ORTModule(nn.LazyLinear(3)), Exception,
                      "ORTModule cannot run LazyLinear: its parameters have no sizes yet, and its first call makes it another class: call it once, then wrap it."),
    "options in words": (lambda: ORTModule(Line(), "INFO"), TypeError, r"debug_options must be a DebugOptions, got str; give DebugOptions\(log_level=LogLevel.INFO, .*\)"),
    "a level in words": (lambda: DebugOptions(log_level="INFO"), TypeError, r"Expected log_level of type LogLevel, got <class 'str'>. Give LogLevel.INFO, for instance."),
    "a policy that is none": (lambda: ORTModule(Line(), fallback_policy="FALLBACK_NEVER"), ValueError,
                              "fallback_policy='FALLBACK_NEVER' is not allowed: 'FALLBACK_NEVER' is no fallback policy; give FALLBACK_DISABLE, .*"),
    "a policy as a number": (lambda: ORTModule(Line(), fallback_policy=1), TypeError, "fallback_policy=1 is not allowed: it is of type int; give FALLBACK_DISABLE, .*"),
    "a level as a float": (lambda: ORTModule(Line(), memory_opt_level=1.0), TypeError, "memory_opt_level=1.0 is not allowed: it is of type float; give 0, 1 or 2"),
    "a share in percent": (lambda: ORTModule(Line(), min_coverage=90), ValueError, "min_coverage=90 is not allowed; give a number from 0 to 1"),
    "a precision that is none": (lambda: ORTModule(Line(), precision="fp8"), ValueError, "precision='fp8' is not allowed; give bf16"),
    "a file of clusters that is not there": (lambda: ORTModule(Line(), memory_opt_config="absent.json"), ValueError,
                                             r"memory_opt_config='absent.json' is not allowed: .* No such file or directory: 'absent.json'; give a JSON file with a list of 'cluster:strategy:count', .*"),
    "settings that are no JSON": (lambda: load_from_json(ORTModule(Line()), __file__), ValueError, r".*test_mistakes.py is no JSON: Extra data: line 1 column 3 .*"),
    "blocks of what has none": (lambda: wrap_blocks(Line()), ValueError, r"Line has no repeated blocks \(.*\); wrap submodules one by one, or the whole model"),
    "a number of steps to profile": (lambda: ORTModule(Line()).profile(5), TypeError,
                                     r"profile\(step=5\): step is a function that makes one training step; how often it is called is steps="),
    "a device, and no loss": (lambda: ORTModule(Line()).save_for_device("out", torch.randn(2, 4)), ValueError,
                              r"save_for_device: forward must return the loss \(one float32 number\), or a tuple or dict that begins with it"),
    "an optimizer that a device does not have": (
        lambda: (m := ORTModule(Line(lambda self, x: self.a(x).sum() + self.w.sum()))).save_for_device("out", torch.randn(2, 4), optimizer=torch.optim.Adagrad(m.parameters())), ValueError,
        "optimizer: Adagrad; AdamW and SGD of torch.optim are supported on a device"),
    "sparse gradients into FusedAdam": (lambda: sparse(FusedAdam), RuntimeError, "FusedAdam does not support sparse gradients; use torch.optim.SparseAdam for those parameters"),
    "an optimizer made before a conversion": (
        lambda: converted(ORTModule), RuntimeError, r"FusedAdam: a parameter of sizes \(3, 4\) is torch.float64 now, its exp_avg of an earlier step has sizes \(3, 4\) and is torch.float32. "
        r"Convert the model first and make the optimizer then; state is taken along by load_state_dict\(old.state_dict\(\)\)"),
    "the optimizer's state of another model": (lambda: FusedAdam([Line(i=5).a.weight]).load_state_dict(adams_state()), ValueError,
                                               r"FusedAdam: the saved state of parameter 0 has a exp_avg of sizes \(3, 4\), the parameter has \(3, 5\): is it of another model\?"),
    "betas above 1": (lambda: FusedAdam(Line().parameters(), betas=(0.9, 1.5)), ValueError, r"betas=\(0.9, 1.5\) given; two numbers in \[0, 1\) are needed"),
    "warmup in steps": (lambda: LinearWarmupLRScheduler(FusedAdam(Line().parameters()), total_steps=10, warmup=5), ValueError,
                        r"warmup=5 given; it is a fraction of total_steps in \[0, 1\)"),
    "updates within backward, of LBFGS": (lambda: step_in_backward(torch.optim.LBFGS(Line().parameters())), TypeError,
                                          "step_in_backward of LBFGS: it is not known to treat its parameters one by one; allowed: FusedAdam, .*"),
    "updates within backward, of two backwards": (lambda: accumulated(), RuntimeError,
                                                  r"step_in_backward: a parameter got a second gradient before optimizer.step\(\). Call that after each backward; .*"),
    "a module for its optimizer": (lambda: FP16_Optimizer(Line()), TypeError, r"FP16_Optimizer is given a module, Line, in the place of its optimizer: .*"),
    "a mode of Adam": (lambda: FusedAdam(Line().parameters(), adam_w_mode=9), ValueError, r"adam_w_mode=9: it is one of 0 \(ADAM_L2_REGULARIZATION\), .*"),
    "loss scaling and updates within backward": (lambda: step_in_backward(FP16_Optimizer(FusedAdam((m := Line()).parameters()), m)), TypeError,
                                                 "step_in_backward of an FP16_Optimizer: it needs all gradients .*"),
}  # fmt: skip


def adams_state() -> dict[str, Any]:
    w = nn.Parameter(torch.ones(3, 4))
    w.grad, optimizer = torch.ones(3, 4), FusedAdam([w])
    optimizer.step()
    return optimizer.state_dict()


def accumulated() -> None:
    model = ORTModule(Line())
    optimizer = FusedAdam(model.a.parameters())
    step_in_backward(optimizer)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()


def test_a_lazy_submodule_gets_its_sizes_in_pytorch() -> None:
    model = ORTModule(nn.Sequential(nn.LazyLinear(3)))
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    (entry,) = model.report().eager
    assert entry.calls == 1 and "0.weight of a lazy module gets its size at the first call" in entry.reason


def test_an_error_of_the_trace_without_a_text_says_where_it_was_raised(monkeypatch: Any) -> None:
    def stop(*args: Any, **rest: Any) -> Any:
        return next(iter(()))

    monkeypatch.setattr("ortmodule.capture.export._export", stop)
    with pytest.raises(CaptureError, match=r"StopIteration: raised in .*test_mistakes\.py:\d+"):
        ORTModule(Line(), strict=True)(torch.randn(2, 4))


def test_a_converted_model_is_an_error_of_one_class() -> None:
    assert type(error(lambda: converted(lambda m: m, torch.optim.AdamW))) is type(error(lambda: converted(ORTModule)))


class Sparse(nn.Module):
    """A matrix of torch.sparse times a layer's result; held: the same, as a buffer or an attribute."""

    def __init__(self, held: Tensor | None = None, buffer: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        if buffer:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, x: Tensor, by: Tensor | None = None) -> Tensor:
        by = self.held if by is None else by
        assert by is not None
        return by @ self.a(x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("where", ["an argument", "a buffer", "an attribute"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_is_named(where: str, layout: torch.layout) -> None:
    by = torch.eye(3).to_sparse(layout=layout)
    model = ORTModule(Sparse() if where == "an argument" else Sparse(by, where == "a buffer"))
    for rows in (1, 2):
        x = torch.randn(3, 4) * rows
        y = model(x, by) if where == "an argument" else model(x)
        torch.testing.assert_close(y, model.a(x))
    (entry,) = model.report().eager
    assert entry.calls == 2 and entry.reason == "a sparse tensor (of torch.sparse), which the engine does not have"


@pytest.mark.parametrize("name", OURS)
def test_the_error_says_what_to_do(name: str) -> None:
    do, kind, text = OURS[name]
    got = error(do)
    assert isinstance(got, kind) and re.fullmatch(text, str(got), re.S), repr(got)
    assert str(got).count("\n") < 15
