"""The capture against eager PyTorch. Two judges that are not ours: onnxruntime runs the captured file's inference
part (function bodies included) in float32, and onnx_torch runs it node by node in float64 with PyTorch's autograd,
so that outputs, gradients, write-backs and every size and type the file declares are compared with the module at
1e-10. And small modules to capture.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx_torch import Graph
from torch import Tensor, nn

from ortmodule.capture import Captured, capture, flatten_inputs

onnxruntime = pytest.importorskip("onnxruntime")


def tensors_in(x: Any) -> list[Tensor]:
    """Tensors of a result in the order of a plain walk."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for y in x.values() for t in tensors_in(y)]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in tensors_in(y)]
    if hasattr(x, "layers"):
        return [t for layer in x.layers for t in (layer.keys, layer.values)]
    if hasattr(x, "self_attention_cache"):
        return tensors_in(x.self_attention_cache) + tensors_in(x.cross_attention_cache)
    if dataclasses.is_dataclass(x):
        return [t for f in dataclasses.fields(x) for t in tensors_in(getattr(x, f.name))]
    return []


def graph_inputs(c: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    flat = flatten_inputs(args, kwargs)
    leaves = [*flat.tensors, *flat.scalars]
    names = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    out: list[Tensor] = []
    for s in c.inputs:
        x = leaves[s.leaf] if s.kind == "user" else s.tensor if s.kind == "const_attr" else names[s.target]
        out.append(x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64 if type(x) is int else torch.float64))
    return out


def own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments as fresh leaves; float ones want gradients when the originals do."""
    return copy.deepcopy(args), copy.deepcopy(kwargs)


def double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)):
        return type(x)(double(y) for y in x)
    return {k: double(y) for k, y in x.items()} if isinstance(x, dict) else x


def check(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    ort: bool = True,
    other: Any = None,
    tolerance: float = 1e-10,
    **how: Any,
) -> Captured:
    """Captures the module in float64 and compares the file, run by onnx_torch, with the module: outputs, gradients by
    random output gradients, buffers and inputs after the call. Then the same in float32 in onnxruntime, outputs only.
    other: (args, kwargs) of different sizes for a dynamic capture."""
    kwargs = kwargs or {}
    wide = copy.deepcopy(module).double()
    wargs, wkwargs = double(args), double(kwargs)
    c = capture(wide, *own(wargs, wkwargs), **how)
    model = onnx.load_from_string(c.onnx)
    onnx.checker.check_model(model, full_check=True)
    for call_args, call_kwargs in [(wargs, wkwargs)] + ([(double(other[0]), double(other[1]))] if other else []):
        compare(c, wide, call_args, call_kwargs, tolerance)
    if ort and not c.host_ops:
        c32 = capture(module, *own(args, kwargs), **how)
        run_ort(c32, module, args, kwargs)
        if other:
            run_ort(c32, module, *other)
    return c


def compare(c: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float) -> None:
    theirs = copy.deepcopy(module)
    eargs, ekwargs = own(args, kwargs)
    assert c.fits(flatten_inputs(eargs, ekwargs))
    expected = theirs(*eargs, **ekwargs)
    want = tensors_in(expected)

    ours = copy.deepcopy(module)
    oargs, okwargs = own(args, kwargs)
    inputs = graph_inputs(c, ours, oargs, okwargs)
    results = Graph(c.onnx, c.host_ops).run(inputs)
    user, writes = results[: c.n_user_outputs], results[c.n_user_outputs :]
    rebuilt = c.rebuild(user)
    assert type(rebuilt) is type(expected)
    got = tensors_in(rebuilt)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)

    generator = torch.Generator().manual_seed(11)
    seeds = [torch.randn(w.shape, generator=generator, dtype=w.dtype) if w.is_floating_point() else None for w in want]

    def gradients(outs: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
        pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if s is not None and o.requires_grad]
        if not pairs or not leaves:
            return [None] * len(leaves)
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [s for _, s in pairs], allow_unused=True))

    flags = [o.requires_grad for o in want]
    assert [o.requires_grad for o in got] == flags, "which outputs require grad"
    eleaves = dict(theirs.named_parameters())
    oleaves = dict(ours.named_parameters())
    names = [n for n, p in eleaves.items() if p.requires_grad]
    e_in = [t for t in flatten_inputs(eargs, ekwargs).tensors if t.requires_grad and t.is_leaf]
    o_in = [t for t in flatten_inputs(oargs, okwargs).tensors if t.requires_grad and t.is_leaf]
    eg = gradients(want, [eleaves[n] for n in names] + e_in)
    og = gradients(got, [oleaves[n] for n in names] + o_in)
    for name, e, o in zip(names + [f"input {i}" for i in range(len(e_in))], eg, og, strict=True):
        if e is None or o is None:
            assert (e is None or not e.any()) and (o is None or not o.any()), f"gradient of {name}"
        else:
            error = float((o - e).abs().max()) if e.numel() else 0.0
            assert error <= tolerance * max(1.0, float(e.abs().max())) if e.numel() else True, f"gradient of {name}: off by {error:.3e}"

    with torch.no_grad():
        for i, value in zip(c.writes, writes, strict=True):
            inputs[i].copy_(value)
    for (name, e), (_, o) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"buffer {name}: {m}")
    for e, o in zip(flatten_inputs(eargs, ekwargs).tensors, flatten_inputs(oargs, okwargs).tensors, strict=True):
        torch.testing.assert_close(o, e, rtol=tolerance, atol=tolerance, equal_nan=True)


def run_ort(c: Captured, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(c.onnx, options, providers=["CPUExecutionProvider"])
    theirs = copy.deepcopy(module)
    eargs, ekwargs = own(args, kwargs)
    with torch.no_grad():
        want = tensors_in(theirs(*eargs, **ekwargs))
    feeds = {s.name: t.detach().numpy() for s, t in zip(c.inputs, graph_inputs(c, module, args, kwargs), strict=True)}
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    results = [torch.from_numpy(np.asarray(r)) for r in session.run(None, feeds)]
    got = tensors_in(c.rebuild(results[: c.n_user_outputs]))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)


class Fn(nn.Module):
    """A module around a function of tensors."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)


def r(*shape: int, grad: bool = True) -> Tensor:
    g = torch.Generator().manual_seed(sum(d * 7**i for i, d in enumerate(shape)) + 3)
    return torch.randn(*shape, generator=g).requires_grad_(grad)


def wide(*shape: int) -> Tensor:
    return (r(*shape) * 4).detach().requires_grad_()


def u(*shape: int) -> Tensor:
    """In (0.2, 1.2): where logarithms and roots are smooth."""
    g = torch.Generator().manual_seed(sum(shape) + 5)
    return (torch.rand(*shape, generator=g) + 0.2).requires_grad_()


def k(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


def b(*shape: int) -> Tensor:
    return k(2, *shape) > 0


def nodes(c: Captured) -> list[str]:
    return [n.op_type for n in onnx.load_from_string(c.onnx).graph.node]
