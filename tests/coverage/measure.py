"""One model of the table beside eager PyTorch: four training steps (SGD aside: forward and backward), the second of the
same sizes as the first, then two of other sizes, the last of batch 1.

Judge: eager PyTorch in float64, with what forward casts to float32 (a softmax, a norm, the loss) in float64 as well: a
judge that rounds as eager does would find eager right and what is more exact wrong. Every output and every parameter's gradient may be off by twice what eager in float32
is off, or by TOLERANCE of the tensor's largest number (a gradient: at least a thousandth of the largest gradient's), if
that is more. A model that is further off runs again in float64, casts as they are: where that is eager's to FINE, it was rounding (a ReLU at its
kink goes one way or the other), and said to be. Where eager does not run in float64, float32 is the judge, and COARSE
the tolerance. Models that draw
random numbers are not compared, and said to be random.
"""

from __future__ import annotations

import dataclasses
import re
import time
import traceback
from typing import Any

import torch
from rows import Row
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ortmodule import ORTModule


class Wide(TorchFunctionMode):
    """float64 wherever float32 is asked for by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


TOLERANCE, COARSE, FINE = 5e-5, 5e-4, 1e-9
STATUSES = {
    "engine": "wholly in the engine",
    "regions": "in the engine, with regions in PyTorch",
    "partly": "some calls in PyTorch",
    "pytorch": "in PyTorch altogether",
    "raised": "raised where eager works",
    "wrong": "wrong",
    "timeout": "ran out of time",
    "unusable": "no row: eager PyTorch raises",
}


@dataclasses.dataclass
class Result:
    name: str
    family: str
    status: str = ""
    share: float = 0.0  # of the nodes of all captures
    in_pytorch: int = 0  # calls of four
    captures: list[int] = dataclasses.field(default_factory=list)  # after each step
    steps_s: list[float] = dataclasses.field(default_factory=list)  # processor time
    eager_s: float = 0.0  # of the first
    reasons: list[str] = dataclasses.field(default_factory=list)
    message: str = ""
    parameters: int = 0
    random: bool = False
    exact: bool = True  # judged by float64
    earlier: bool = False  # kept from a run of an earlier state of the program
    rounding: str = ""  # how far float32 is off where float64 agrees
    again: list[str] = dataclasses.field(default_factory=list)  # why there is more than a capture per change of sizes


def tensors(x: Any, path: str = "", depth: int = 0) -> dict[str, Tensor]:
    """Tensors of a result by the way to them."""
    if isinstance(x, Tensor):
        return {path: x}
    if depth > 8 or x is None or isinstance(x, (str, int, float, bool, nn.Module)):
        return {}
    if isinstance(x, dict):
        items = list(x.items())
    elif isinstance(x, (list, tuple, set)):
        items = list(enumerate(x))
    elif hasattr(x, "__dict__"):
        items = list(vars(x).items())
    else:
        return {}
    return {k: t for key, y in items for k, t in tensors(y, f"{path}.{key}".lstrip("."), depth + 1).items()}


def own(x: Any, dtype: torch.dtype) -> Any:
    """Arguments of their own, floating ones in that type."""
    if isinstance(x, Tensor):
        return x.to(dtype).clone() if x.is_floating_point() else x.clone()
    if isinstance(x, dict):
        return {k: own(v, dtype) for k, v in x.items()}
    return type(x)(own(v, dtype) for v in x) if isinstance(x, (list, tuple)) else x


def step(model: nn.Module, batch: Any, dtype: torch.dtype, seed: int) -> dict[str, Tensor | None]:
    """Outputs, buffers behind them, and the gradients of their loss: the model's own, or a weighted sum of all that
    has one."""
    model.zero_grad(set_to_none=True)
    given = own(batch, dtype)
    torch.manual_seed(seed)
    out = model(**given) if isinstance(given, dict) else model(*given)
    found = tensors(out)
    loss = out if isinstance(out, Tensor) and out.dim() == 0 else getattr(out, "loss", None)
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        loss = torch.zeros((), dtype=dtype)
        for i, t in enumerate(t for t in found.values() if t.requires_grad and t.is_floating_point()):
            w = torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            loss = loss + (t * w.to(t.dtype)).sum() / max(t.numel(), 1) ** 0.5
    loss = loss.sum()
    if loss.requires_grad:
        loss.backward()
    grads = {f"gradient of {k}": None if p.grad is None else p.grad.detach().clone() for k, p in model.named_parameters()}
    buffers = {f"buffer {k}": b.detach().clone() for k, b in model.named_buffers()}
    return {"loss": loss.detach(), **{k: t.detach().clone() for k, t in found.items()}, **grads, **buffers}


def difference(mine: dict[str, Any], eager: dict[str, Any], exact: dict[str, Any] | None, tolerance: float = TOLERANCE) -> str:
    """What is wrong, the worst first; empty if nothing is."""
    if mine.keys() != eager.keys():
        return f"other results: {sorted(mine.keys() ^ eager.keys())[:4]}"
    judge = exact if exact is not None and exact.keys() == eager.keys() else eager
    biggest = max((t.abs().max().item() for k, t in judge.items() if k.startswith("gradient") and t is not None and t.numel()), default=0.0)
    worst = (1.0, "")
    for k, a in eager.items():
        b, c = mine[k], judge[k]
        if a is None or b is None or c is None:
            if (a is None) != (b is None):
                return f"{k}: {'None' if b is None else 'a tensor'}, eager has {'None' if a is None else 'a tensor'}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{k}: {tuple(b.shape)} {b.dtype}, eager has {tuple(a.shape)} {a.dtype}"
        if c.shape != a.shape or not a.numel():
            continue
        if not a.is_floating_point():
            if a.is_complex():
                a, b, c = (torch.view_as_real(t) for t in (a, b, c))
            elif not torch.equal(a, b) and torch.equal(a, c.to(a.dtype)):
                return f"{k}: other {a.dtype} values in {int((a != b).sum())} of {a.numel()} places"
            else:
                continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return f"{k}: not finite in {int((~b.isfinite()).sum())} places, eager in {int((~a.isfinite()).sum())}"
        a, b, c = (t.double().nan_to_num(0, 0, 0) for t in (a, b, c))
        scale = max(c.abs().max().item(), 1e-3 * biggest if k.startswith("gradient") else 0.0, 1e-6)
        error, eager_error = ((t - c).abs().max().item() / scale for t in (b, a))
        allowed = max(2 * eager_error, tolerance if judge is exact else COARSE)
        if error / allowed > worst[0]:
            worst = error / allowed, f"{k}: off by {error:.2g} of its largest number, eager by {eager_error:.2g}"
    return worst[1]


def _same(row: Row, state: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = row.make()
    model.load_state_dict(state)
    model.train()
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = 0.0
    return model


def _line(error: BaseException) -> str:
    """One line: the exception, and where in the program it came from."""
    first = next((s.strip() for s in str(error).splitlines() if s.strip()), "")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first[:160]} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


def eager_steps(row: Row, state: dict[str, Any], batches: list[Any], dtype: torch.dtype) -> tuple[list[dict[str, Any]], float]:
    model = _same(row, state).to(dtype)
    out, first = [], 0.0
    for i, batch in enumerate(batches):
        began = time.process_time()
        out.append(step(model, batch, dtype, 100 + i))
        first = first or time.process_time() - began
    return out, first


def agrees(row: Row, state: dict[str, Any], batches: list[Any], **options: Any) -> bool:
    """The same steps in float64: is the engine there what eager is?"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exact = eager_steps(row, state, batches, torch.float64)[0]
        model = ORTModule(_same(row, state).to(torch.float64), **options)
        mine = [step(model, batch, torch.float64, 100 + i) for i, batch in enumerate(batches)]
    except Exception:
        return False
    finally:
        torch.set_default_dtype(before)
    return not any(difference(a, b, b, FINE) for a, b in zip(mine, exact, strict=True))


def measure(row: Row, only_eager: bool = False, **options: Any) -> Result:
    r = Result(row.name, row.family)
    try:
        torch.manual_seed(0)
        first = row.make()
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in first.state_dict().items()}
        r.parameters = sum(p.numel() for p in first.parameters())
        batches = [row.batch(first, *size, torch.Generator().manual_seed(i)) for i, size in enumerate(row.sizes)]
        eager, r.eager_s = eager_steps(row, state, batches, torch.float32)
        again = step(_same(row, state), batches[0], torch.float32, 7)
        draws = not torch.equal(torch.get_rng_state(), torch.manual_seed(7).get_state())
        r.random = difference(again, eager[0], None) != ""
    except Exception as error:
        r.status, r.message = "unusable", _line(error)
        return r
    if only_eager:
        return r
    exact: list[dict[str, Any]] | None = None
    try:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for tensors that forward makes
        try:
            with Wide():
                exact = eager_steps(row, state, batches, torch.float64)[0]
        finally:
            torch.set_default_dtype(before)
    except Exception:
        r.exact = False
    model = ORTModule(_same(row, state), **options)
    wrong = ""
    try:
        for i, batch in enumerate(batches):
            began = time.process_time()
            mine = step(model, batch, torch.float32, 100 + i)
            r.steps_s.append(time.process_time() - began)
            r.captures.append(model.report().n_captures)
            if not wrong and not r.random:
                wrong = difference(mine, eager[i], None if exact is None else exact[i])
                wrong = wrong and f"step {i + 1}: {wrong}"
    except Exception as error:
        r.status, r.message = "raised", _line(error)
    _tell(r, model)
    if r.status:
        return r
    if wrong and exact is not None and not draws and agrees(row, state, batches, **options):
        r.rounding, wrong = wrong, ""
    if wrong and draws:  # numbers that this seed has made no use of, another does
        r.random, wrong = True, ""
    if wrong:
        r.status, r.message = "wrong", wrong
    elif r.in_pytorch >= len(batches):
        r.status = "pytorch"
    elif r.in_pytorch:
        r.status = "partly"
    else:
        r.status = "regions" if r.reasons else "engine"
    return r


def _place(file: str, line: int) -> str:
    return f" ({file.rpartition('/')[2]}:{line})" if file else ""


def _again(why: str, failed: list[Any]) -> str:
    """Why another capture was needed: what the others hold for, or why there is none with symbols for sizes."""
    _, known, holds = why.rpartition("; a capture holds where ")
    if known:
        return f"a capture holds where {re.sub(r'[^ (]*/', '', holds)}"
    why = why.partition(";")[0]
    symbolic = next((f for f in failed if f.symbolic), None)
    return why if symbolic is None else f"{why}, not captured as symbols: {symbolic.reason}{_place(symbolic.file, symbolic.line)}"


def _tell(r: Result, model: Any) -> None:
    report = model.report()
    r.share = report.node_share
    r.in_pytorch = sum(e.calls for e in report.eager)
    r.again = [_again(g.why, report.failed) for g in report.graphs[2:]]
    r.reasons = [f"{e.reason}{_place(e.file, e.line)}" for e in report.eager]
    r.reasons += sorted({f"{h.name}: {h.reason}{_place(h.file, h.line)}" for h in report.host})
    if r.status == "raised" or r.in_pytorch:
        r.reasons += [f"not captured: {f.reason}{_place(f.file, f.line)}" for f in report.failed if f.reason not in str(r.reasons)]
