"""A module at calls of several sizes beside its eager twin: results, gradients, arguments afterwards, and which results and
buffers share memory with the argument and with each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ortmodule import ORTModule


class Of(nn.Module):
    def __init__(self, f: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.f(self, x)


def step(module: nn.Module, x: Tensor) -> list[Any]:
    """Results, buffers, gradients, what has become of the argument, and which of them share memory."""
    x = x.clone().requires_grad_(x.is_floating_point() and not getattr(module, "edits", False))
    for p in module.parameters():
        p.grad = None
    try:
        out = module(x)
    except Exception as error:  # noqa: BLE001
        return [type(error)]
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    told = [t for t in (out if isinstance(out, tuple) else (out,)) if not isinstance(t, Tensor)]
    loss = sum((t.double().cos().sum() for t in outs if t.requires_grad), torch.zeros((), dtype=torch.float64))
    if loss.requires_grad:
        try:
            loss.backward()
        except RuntimeError:  # what it needs has been edited
            return [RuntimeError]
    held = [*outs, *module.buffers()]
    shared = [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for i, a in enumerate(held) if a.numel() for b in (x, *held[:i])]
    values = [t.detach().clone() for t in (*held, x)]
    return [*values, x.grad, *[p.grad for p in module.parameters()], shared, told]


def agree(a: list[Any], b: list[Any], tolerance: float = 1e-12) -> None:
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            assert x.shape == y.shape and x.dtype == y.dtype
            assert torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True), (i, (x - y).abs().max())
        else:
            assert x == y, (i, x, y)


def run(module: nn.Module, sizes: list[tuple[int, ...]], lay: Callable[[Tensor], Tensor] = Tensor.clone, dtype: torch.dtype = torch.float64) -> int:
    """lay: how the argument lies in memory. -> captures."""
    eager, wrapped = copy.deepcopy(module).to(dtype), ORTModule(copy.deepcopy(module).to(dtype))
    for i, size in enumerate(sizes):
        x = lay(torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).to(dtype))
        agree(step(wrapped, x), step(eager, x), 1e-12 if dtype == torch.float64 else 0.15)
    return wrapped.report().n_captures  # type: ignore[no-any-return]
