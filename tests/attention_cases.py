"""Modules with attention, captured: their graph with and without the passes `attention` and `masks`."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

import engine
from ortmodule.capture import capture

LOWEST = torch.finfo(torch.float64).min


def attentions(text: str) -> list[dict[str, Any]]:
    """The attention nodes of a graph text: causal, offset, window, mask (its type as text, or None), dropout, rng."""
    types = {m[1]: m[2] for m in re.finditer(r"^\s*(?:input |param |buffer |const )?([\w.]+)[^:\n]*: (\w+\[[^\]]*\])", text, re.M)}
    found = []
    for m in re.finditer(r"= attention\(([^)]*)\) \{([^}]*)\}(.*)", text):
        operands = [o.strip() for o in m[1].split(",")]
        attrs = dict(a.split("=") for a in m[2].split(", "))
        mask = operands[3] if len(operands) > 3 and operands[3] != "_" else None
        rng = re.search(r"rng=(\d+)", m[3])
        found.append({"causal": bool(int(attrs.get("causal", 0))), "offset": int(attrs.get("causal_offset", 0)),
                      "window": int(attrs.get("window", 0)), "mask": types[mask] if mask else None,
                      "dropout": float(attrs.get("dropout", 0)), "rng": int(rng[1]) if rng else 0, "key": operands[1]})
    return found


def close(a: Tensor | None, b: Tensor | None, tol: float = 1e-10, floor: float = 0.0) -> None:
    """Equal within tol of the largest element. floor: magnitude below which a value is rounding noise (a gradient that
    is 0 in theory)."""
    assert (a is None) == (b is None)
    if a is None or b is None or not a.numel():
        return
    assert a.shape == b.shape and a.dtype == b.dtype
    if not a.is_floating_point():
        assert torch.equal(a, b)
        return
    assert torch.isfinite(b).all(), "the reference itself is not finite"
    scale = max(b.abs().max().item(), floor) or 1.0
    assert (a - b).abs().max().item() <= tol * scale


class Case:
    """One captured module: its graph plain and passed, run by the interpreter on the same inputs."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, dynamic: bool = False) -> None:
        self.module, self.captured = module, capture(module, args, kwargs or {}, dynamic=dynamic)
        self.plain = engine.Graph.onnx(self.captured.onnx)
        self.passed = engine.Graph.onnx(self.captured.onnx).apply("attention", "masks").verify()
        self.nodes = attentions(self.passed.text())
        self.writes = self.plain.text().count("\n  write ")

    def inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        state = dict(self.module.named_parameters(remove_duplicate=False)) | dict(self.module.named_buffers(remove_duplicate=False))
        res = []
        for s in self.captured.inputs:
            t = tensors[s.leaf] if s.kind == "user" else s.tensor if s.tensor is not None else state[s.target]
            res.append(t.detach())
        return res

    def run(self, graph: engine.Graph, tensors: list[Tensor], seed: int = 3, grads: bool = True) -> tuple[list[Tensor], list[Tensor | None]]:
        ins = self.inputs(tensors)
        n = self.captured.n_user_outputs
        outs = graph.run(ins, n + self.writes, seed)
        if not grads:
            return outs[:n], []
        gen = torch.Generator().manual_seed(11)
        arriving = [int(o.is_floating_point()) for o in outs[:n]]
        dys = [torch.randn(o.shape, generator=gen, dtype=o.dtype) for o in outs[:n] if o.is_floating_point()]
        wanted = [int(t.is_floating_point() and s.kind != "buffer") for t, s in zip(ins, self.captured.inputs)]
        res = graph.grad(wanted, arriving).run(ins + dys, n + self.writes + sum(wanted), seed)
        return res[:n], res[n + self.writes:]

    def check(self, tensors: list[Tensor], grads: bool = True, tol: float = 1e-10) -> None:
        """Passed and plain graph agree, in outputs and in every gradient."""
        a, da = self.run(self.passed, tensors, grads=grads)
        b, db = self.run(self.plain, tensors, grads=grads)
        for x, y in zip(a, b, strict=True):
            close(x, y, tol)
        floor = 1e-5 * max((y.abs().max().item() for y in db if y is not None and y.numel()), default=0.0)
        for x, y in zip(da, db, strict=True):
            close(x, y, tol, floor)


def paddings(b: int, t: int) -> list[Tensor]:
    """All ones, right, left, random, one row fully masked."""
    right = (torch.arange(t) < torch.tensor([t, t - 4, 5])[:b, None]).long()
    gen = torch.Generator().manual_seed(5)
    rand = (torch.rand(b, t, generator=gen) > 0.4).long()
    full = right.clone()
    full[-1] = 0
    return [torch.ones(b, t, dtype=torch.long), right, right.flip(1), rand, full]


CAUSAL = dict(causal=True, offset=0, window=0)
FULL = dict(causal=False, offset=0, window=0)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by its definition; a row with nothing visible gives 0."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    e = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min))
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v
