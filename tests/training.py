"""Models trained beside eager PyTorch in fp64: every output, gradient and buffer at 1e-10 relative to its largest
element, sums that cancel at the rounding of their terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

TOL = 1e-10
ROUNDING = 2.0**-46  # 128 units in the last place of fp64


def stay_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's own drops to fp32 inside fp64 models become fp64."""
    to, softmax, full = Tensor.to, F.softmax, Tensor.float

    def keep(t: Tensor, *a: Any, **k: Any) -> Tensor:
        if t.dtype == torch.float64:
            a = tuple(x for x in a if x is not torch.float32)
            k = {n: v for n, v in k.items() if v is not torch.float32}
        elif torch.float32 in a and not t.is_floating_point():
            a = tuple(torch.float64 if x is torch.float32 else x for x in a)
        return to(t, *a, **k) if a or k else t

    monkeypatch.setattr(Tensor, "to", keep)
    monkeypatch.setattr(Tensor, "float", lambda t: t if t.dtype == torch.float64 else full(t).double())
    monkeypatch.setattr(F, "softmax", lambda x, dim=None, _stacklevel=3, dtype=None: softmax(x, dim))
    monkeypatch.setattr(torch.nn.functional, "softmax", F.softmax)


def leaves(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        return [t for v in out.values() for t in leaves(v)]
    if isinstance(out, list | tuple):
        return [t for v in out for t in leaves(v)]
    return []


def loss_of(out: Any) -> Tensor:
    total = None
    for k, t in enumerate(x for x in leaves(out) if x.is_floating_point() and x.requires_grad):
        g = torch.Generator().manual_seed(100 + k)
        w = torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype)
        total = (t * w).sum() if total is None else total + (t * w).sum()
    assert total is not None
    return total


def same(a: Tensor, b: Tensor, what: str, tol: float = TOL, summed: float = 0.0) -> None:
    """Equal up to tol of the largest element. summed: size of the terms that `b` is a sum of, for sums that cancel (see
    largest_grad)."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    if not b.is_floating_point():
        assert torch.equal(a, b), what
        return
    scale = b.abs().max().item() if b.numel() else 0.0
    err = (a - b).abs().max().item() if b.numel() else 0.0
    assert err <= tol * scale + ROUNDING * summed, f"{what}: error {err:.2e}, largest {scale:.2e}, terms {summed:.2e}"


def largest_grad(model: nn.Module) -> float:
    """Some gradients are zero but for rounding: a bias of the key projection moves all scores of a row alike, which
    softmax does not see, so its gradient is a sum of thousands of terms that cancel. Their size is that of the other
    gradients, their rounding 2**-53 of it each."""
    return max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)


def compare_step(model: nn.Module, ours: ORTModule, batch: dict[str, Tensor], what: str, loss: Callable[[Any], Tensor] = loss_of,
                 tol: float = TOL) -> None:  # fmt: skip
    """One forward and backward of both: types, outputs, every gradient, buffers."""
    want, got = model(**batch), ours(**batch)
    assert type(want) is type(got)
    for i, (a, b) in enumerate(zip(leaves(got), leaves(want), strict=True)):
        same(a.detach(), b.detach(), f"{what} output {i}", tol)
        assert a.requires_grad == b.requires_grad, f"{what} output {i}: requires_grad {a.requires_grad}"
    loss(want).backward()
    loss(got).backward()
    summed = largest_grad(model)
    for (name, p), q in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what} {name}: gradient {p.grad is not None}, eager {q.grad is not None}"
        if q.grad is not None:
            same(p.grad, q.grad, f"{what} gradient of {name}", tol, summed)
    for (name, p), q in zip(ours.named_buffers(), model.buffers(), strict=True):
        same(p, q, f"{what} buffer {name}", tol)


def train(model: nn.Module, batches: list[dict[str, Tensor]], steps: int = 5, loss: Callable[[Any], Tensor] = loss_of,
          strict: bool = False) -> ORTModule:
    """Trains `model` and a wrapped copy side by side; returns the wrapped one."""
    model = model.double().train()
    ours = ORTModule(copy.deepcopy(model), strict="engine" if strict else False)
    opts = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, ours)]
    for step in range(steps):
        compare_step(model, ours, batches[step % len(batches)], f"step {step}", loss)
        for o in opts:
            o.step()
            o.zero_grad()
    return ours


def ids(vocab: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(seed))


def padded(b: int, t: int) -> Tensor:
    return (torch.arange(t)[None] < torch.tensor([[t], [t - 3], [t - 5]])[:b]).long()


def compare_fp32(ours: ORTModule, eager: nn.Module, exact: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
    """fp32: error of each gradient against `exact` (fp64, of the same parameters) within twice eager fp32's own (plus
    rounding of the result)."""
    for m in (eager, ours):
        loss_of(m(**batch)).backward()
    for (name, p), e in zip(ours.named_parameters(), eager.parameters(), strict=True):
        x = exact[name]
        scale = x.abs().max().item()
        mine, theirs = (p.grad.double() - x).norm().item(), (e.grad.double() - x).norm().item()
        assert mine <= 2 * theirs + 4e-7 * scale, f"{name}: {mine:.2e} against eager's {theirs:.2e}, scale {scale:.2e}"


def replay_dropout(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[int]:
    """From here on eager PyTorch drops what the engine drops in a step of that seed. Streams are numbered in call order
    from 1; the result gives the numbers that were not used."""
    import engine

    streams = iter(range(1, 1000))

    def mask(shape: Any, p: float) -> Tensor:
        text = f"graph {{ input x: f64[{', '.join(map(str, shape))}]\n y = dropout(x) {{p={p!r}}} rng={next(streams)}\n output y }}"
        return engine.run(text.replace("{ input", "{\n input").replace("y }", "y\n}"), [torch.ones(*shape, dtype=torch.float64)], seed=seed)[0][0]

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * mask(x.shape, p) if training and p > 0 else x

    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
             scale: float | None = None, **kw: Any) -> Tensor:
        s = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        if is_causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else s + attn_mask
        return dropout(torch.softmax(s, -1), dropout_p) @ v

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(nn.Dropout, "forward", lambda m, x: dropout(x, m.p, m.training))
    return streams


def compare_dropout_replay(model: nn.Module, ours: ORTModule, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the engine with its own masks, then eager with the same: outputs and all gradients equal."""
    torch.manual_seed(9)
    got = ours(**batch)
    loss_of(got).backward()
    torch.manual_seed(9)
    streams = replay_dropout(monkeypatch, int(torch.randint(2**63 - 1, (1,))))
    want = model(**batch)
    loss_of(want).backward()
    assert next(streams) > 3, "no dropout was replayed"
    for i, (a, b) in enumerate(zip(leaves(got), leaves(want), strict=True)):
        same(a.detach(), b.detach(), f"output {i}")
    summed = largest_grad(model)
    for (n, p), q in zip(ours.named_parameters(), model.parameters(), strict=True):
        same(p.grad, q.grad, f"gradient of {n}", summed=summed)
