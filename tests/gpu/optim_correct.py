"""The optimizers on a GPU against fp64 formulas, torch.optim and themselves. run("cuda") on a GPU; tests/cuda runs the
part that needs no torch.cuda with device "cpu" on the fake device."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optim_reference as reference
import torch
from bench_optim import sizes as model_sizes
from checks import rows_of

from ortmodule.optim import DynamicLossScaler, FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_

ODD = [(3,), (1,), (0,), (257,), (13, 17), (16385,), (), (40009,)]
RACES = [(30522, 64), (1024, 1024), (4096, 1024), (777, 333), (1,), (4097,), (1024, 4096), *((1 + 37 * i % 5000,) for i in range(300))]
TURNS = 40  # of LAMB in one launch over RACES
TINY = [(1 + i % 7,) for i in range(3000)]
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # largest relative error of one rounding
H = dict(lr=0.013, b1=0.87, b2=0.983, eps=1e-3, wd=0.11)

STORES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "f32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "f16": (torch.float16, {}),
    "bf16 master": (torch.bfloat16, dict(master_weights=True)),
    "f16 master": (torch.float16, dict(master_weights=True)),
    "bf16 split": (torch.bfloat16, dict(master_weights="split")),
}
HUGE = (1 << 31) + 12345


def one_launch(opt: FusedLAMB) -> FusedLAMB:
    opt.one_launch = True
    return opt


SGD = {"sgd": (0.9, 0.2, False, H["wd"]), "sgd nesterov": (0.9, 0.0, True, H["wd"]), "sgd plain": (0.0, 0.0, False, 0.0)}
ADAM = dict(lr=H["lr"], betas=(H["b1"], H["b2"]), eps=H["eps"], weight_decay=H["wd"])
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{f"adam mode {mode}": lambda p, mode=mode, **k: FusedAdam(p, adam_w_mode=mode, **ADAM, **k) for mode in range(4)},
    "lamb": lambda p, **k: FusedLAMB(p, max_grad_norm=0.7, **ADAM, **k),
    "lamb free": lambda p, **k: FusedLAMB(p, max_grad_norm=None, keep_grads=True, **ADAM, **k),
    "lamb in one launch": lambda p, **k: one_launch(FusedLAMB(p, max_grad_norm=None, **ADAM, **k)),
    "sgd": lambda p, **k: FusedSGD(p, H["lr"], 0.9, 0.2, H["wd"], **k),
    "sgd nesterov": lambda p, **k: FusedSGD(p, H["lr"], 0.9, 0, H["wd"], True, **k),
    "sgd plain": lambda p, **k: FusedSGD(p, H["lr"], **k),
}


def params_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str, unaligned: bool, seed: int = 0) -> list[torch.nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    out = []
    for s in shapes:
        n = math.prod(s)
        base = torch.empty(n + 1, dtype=dtype, device=device)
        base.copy_(torch.randn(n + 1, generator=gen))
        out.append(torch.nn.Parameter(base[1:].view(s) if unaligned else base[:n].view(s).clone()))
    return out


def give_grads(params: list[torch.nn.Parameter], seed: int, factor: float = 1.0) -> None:
    gen = torch.Generator().manual_seed(100 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=gen) * factor).to(device=p.device, dtype=p.dtype)


def weight(opt: torch.optim.Optimizer, p: torch.nn.Parameter) -> torch.Tensor:
    """The exact weight: the master if there is one."""
    state = opt.state[p]
    if "master_weight" in state:
        return state["master_weight"].double()
    if "master_rest" in state:
        return ((p.detach().view(torch.int16).int() << 16) + state["master_rest"].int()).view(torch.float32).double()
    return p.detach().double()


def formula(name: str, p: Any, g: Any, m: Any, v: Any, step: int, norm: float) -> tuple[Any, Any, Any]:
    """One step in numpy fp64."""
    if name.startswith("adam"):
        return reference.adam(p, g, m, v, step, mode=int(name[-1]), **H)
    if name.startswith("lamb"):
        scale = reference.lamb_scale(1.0, norm, 0.7 if name == "lamb" else 0)
        return reference.lamb(p, g, m, v, step, scale=scale, **H)[:3]
    momentum, damp, nesterov, wd = SGD[name]
    g = g + wd * p
    m = g if step == 1 else momentum * m + (1 - damp) * g
    return p - H["lr"] * (g + momentum * m if nesterov else m if momentum else g), m, v


def one_optimizer(name: str, store: str, shapes: list[tuple[int, ...]], unaligned: bool, device: str) -> str:
    dtype, kw = STORES[store]
    params = params_of(shapes, dtype, device, unaligned)
    opt = MAKERS[name](params, **kw)
    moments = [(torch.zeros(p.shape, dtype=torch.float64).numpy(),) * 2 for p in params]
    exact = dtype == torch.float32 or bool(kw)
    worst = 0.0
    for step in (1, 2, 3):
        give_grads(params, step)
        before = [(weight(opt, p) if opt.state.get(p) else p.detach().double()).cpu().numpy() for p in params]
        grads = [p.grad.detach().double().cpu().numpy() for p in params]  # type: ignore[union-attr]
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
        opt.step()
        for i, p in enumerate(params):
            if not p.numel():
                continue
            want, *new = formula(name, before[i], grads[i], *moments[i], step, norm)
            moments[i] = (new[0], new[1])
            w = torch.as_tensor(np.asarray(want)).reshape(p.shape)
            biggest = max(float(w.abs().max()), 1e-30)
            error = float((weight(opt, p).cpu() - w).abs().max()) / biggest
            limit = 3e-6 if exact else 1.01 * ULP[dtype]
            if not error <= limit:
                return f"step {step}, parameter {i} {tuple(p.shape)}: weight off by {error:.3g} of its largest element, allowed {limit:.3g}"
            worst = max(worst, error)
            if kw and not (p.detach().double().cpu() - w).abs().max() <= 1.01 * ULP[dtype] * biggest:
                return f"step {step}, parameter {i}: the {dtype} copy is not its master rounded"
            for key, m in zip(("exp_avg", "exp_avg_sq") if "sgd" not in name else ("momentum_buffer",), moments[i]):
                if key in opt.state[p]:
                    m = torch.as_tensor(np.asarray(m)).reshape(p.shape)
                    # the first moment's terms may cancel
                    biggest = float(np.abs(grads[i]).max()) if key != "exp_avg_sq" else 0.0
                    terms = max(float(m.abs().max()), (1 - H["b1"]) * biggest, 1e-30)
                    e = float((opt.state[p][key].double().cpu() - m).abs().max()) / terms
                    if not e <= 1e-5:
                        return f"step {step}, parameter {i}: {key} off by {e:.3g}"
    return f"ok {worst:.2g}"


def every_optimizer(device: str, tiny: int = len(TINY)) -> Iterator[tuple[str, Callable[[], str]]]:
    lists = {"odd sizes": (ODD, False), "unaligned views": (ODD, True), "many tiny": (TINY[:tiny], False)}
    for name in MAKERS:
        for store in STORES:
            for what, (shapes, unaligned) in lists.items():
                if what == "many tiny" and store not in ("f32", "bf16 split"):
                    continue
                yield f"{name}, {store}, {what}", lambda n=name, s=store, x=shapes, u=unaligned: one_optimizer(n, s, x, u, device)


# --- state, clipping, mixed precision: no torch.cuda needed ------------------------------------------


def same(a: list[torch.Tensor], b: list[torch.Tensor], tol: float) -> str:
    pairs = [(x.double().cpu(), y.double().cpu()) for x, y in zip(a, b) if x.numel()]
    worst = max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)) for x, y in pairs)
    return f"ok {worst:.2g}" if worst <= tol else f"off by {worst:.3g}, allowed {tol:.3g}"


def data(params: Any) -> list[torch.Tensor]:
    return [p.detach() for p in params]


def resume(name: str, store: str, device: str) -> str:
    dtype, kw = STORES[store]
    a, b = params_of(ODD, dtype, device, False), params_of(ODD, dtype, device, False, seed=7)
    first, second = MAKERS[name](a, **kw), MAKERS[name](b, **kw)
    for step in range(3):
        give_grads(a, step)
        first.step()
    buffer = io.BytesIO()
    torch.save({"w": data(a), "opt": first.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    for p, q in zip(b, saved["w"]):
        p.data.copy_(q)
    second.load_state_dict(saved["opt"])
    for step in range(3, 6):
        give_grads(a, step)
        give_grads(b, step)
        first.step()
        second.step()
    return "ok" if all(torch.equal(p, q) for p, q in zip(a, b)) else "the resumed run has other bits"


def torch_state(device: str) -> str:
    """State of torch.optim.AdamW(fused) into ours and back."""
    a, b = params_of(ODD, torch.float32, device, False), params_of(ODD, torch.float32, device, False)
    c = params_of(ODD, torch.float32, device, False)
    theirs = torch.optim.AdamW(a, 1e-2, weight_decay=0.1, **({"fused": True} if device == "cuda" else {}))
    ours = FusedAdam(b, 1e-2, eps=1e-8, weight_decay=0.1, adam_w_mode=2)
    back = torch.optim.AdamW(c, 1e-2, weight_decay=0.1, **({"fused": True} if device == "cuda" else {}))
    for step in range(9):
        give_grads(a, step)
        if step < 3:
            theirs.step()
            if step == 2:
                ours.load_state_dict(theirs.state_dict())
                for p, q in zip(b, a):
                    p.data.copy_(q.data)
            continue
        give_grads(b, step)
        theirs.step()
        if step < 6:
            ours.step()
            if step == 5:
                back.load_state_dict(ours.state_dict())
                for p, q in zip(c, b):
                    p.data.copy_(q.data)
            continue
        give_grads(c, step)
        back.step()
    return same(data(c), data(a), 3e-6)


def clipping(device: str) -> str:
    for max_norm in (0.1, 1e9):
        for bad in (None, math.inf, math.nan):
            a, b = params_of(ODD, torch.float32, device, False), params_of(ODD, torch.float32, device, False)
            for ps in (a, b):
                give_grads(ps, 0)
                if bad is not None:
                    ps[3].grad[5] = bad  # type: ignore[index]
            got, want = clip_grad_norm_(a, max_norm), torch.nn.utils.clip_grad_norm_(b, max_norm)
            for x, y in [(got, want), *((p.grad, q.grad) for p, q in zip(a, b))]:
                try:
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7, equal_nan=True)
                except AssertionError as e:
                    return f"max_norm {max_norm}, {bad}: {e}"
    return "ok"


def fp16_optimizer(inner: str, device: str) -> str:
    """Against AdamW over f32 twins of the weights, with gradients scaled by hand; the second step overflows and must
    leave no trace."""
    ours = params_of(ODD, torch.float16, device, False)
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    ways: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch": lambda p: torch.optim.AdamW(p, 1e-2),
        "torch fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
        "fused": lambda p: FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=2, weight_decay=1e-2),
    }
    opt = FP16_Optimizer(ways[inner](ours))
    ref = torch.optim.AdamW(theirs, 1e-2)
    for step in range(4):
        gen = torch.Generator().manual_seed(step)
        xs = [torch.randn(p.shape, generator=gen).to(device).half() for p in ours]
        opt.zero_grad()
        scale = opt.loss_scale
        factor = 1e9 if step == 1 else 1e-3
        opt.backward(sum((p * x).float().sum() for p, x in zip(ours, xs)) * factor)
        if step != 1:
            for q, p in zip(theirs, ours):
                q.grad = p.grad.float() / scale  # type: ignore[union-attr]
        opt.step()
        if opt.overflow != (step == 1):
            return f"step {step}: overflow {opt.overflow}"
        if step != 1:
            ref.step()
    if opt.loss_scale != 2.0**15:
        return f"loss scale {opt.loss_scale}"
    return same(data(ours), data(theirs), 1.01 * ULP[torch.float16])


def loss_scale(device: str) -> str:
    """The scale on the device beside the rule, and where it counts what."""
    p = params_of([(5,)], torch.float16, device, False)[0]
    opt = FP16_Optimizer(FusedSGD([p], 1e-9), loss_scaler=DynamicLossScaler(True, 24.0, 3, 4.0, 70.0))
    scale, good, flags = 24.0, 0, [int(c) for c in "1111111001110111100000001111111111101111111011111111"]
    for step, ok in enumerate(flags):
        opt.zero_grad()
        opt.backward((p.float() * (1.0 if ok else math.inf)).sum())
        opt.step()
        good = good + 1 if ok else 0
        if not ok:
            scale = max(4.0, scale / 2)
        elif good == 3:
            scale, good = min(70.0, scale * 2), 0
        if step % 5 == 4 and (opt.loss_scale != scale or opt.overflow == ok):
            return f"step {step}: scale {opt.loss_scale}, {scale} expected; overflow {opt.overflow}"
    counts = (opt.steps, opt.skipped_steps)
    return "ok" if counts == (sum(flags), len(flags) - sum(flags)) else f"counted {counts}"


def plain(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "loss scale of 60 steps", lambda: loss_scale(device)
    for name in ("adam mode 1", "lamb", "lamb in one launch", "sgd"):
        for store in ("f32", "f16 master", "bf16 split"):
            yield f"resume, {name}, {store}", lambda n=name, s=store: resume(n, s, device)
    yield "torch state both ways", lambda: torch_state(device)
    yield "clip_grad_norm_", lambda: clipping(device)
    for inner in ("torch", "torch fused", "fused"):
        yield f"FP16_Optimizer over {inner}", lambda i=inner: fp16_optimizer(i, device)


# --- what only a GPU has -------------------------------------------------------------------------------


def adamw(params: Any) -> FusedAdam:
    """torch.optim.AdamW's defaults."""
    return FusedAdam(params, 1e-3, eps=1e-8, adam_w_mode=2, weight_decay=0.01)


def gpt2_list() -> str:
    """Five steps over the 124 M list: the error against fp64 must not exceed twice that of torch's fused AdamW."""
    shapes = model_sizes("gpt2")

    def build(dtype: torch.dtype) -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        return [torch.nn.Parameter((torch.randn(s, device="cuda") * 0.02).to(dtype)) for s in shapes]

    a, b, c = build(torch.float32), build(torch.float32), build(torch.float64)
    opts = [adamw(a), torch.optim.AdamW(b, 1e-3, fused=True), torch.optim.AdamW(c, 1e-3, foreach=True)]
    for step in range(5):
        torch.manual_seed(10 + step)
        for p, q, r in zip(a, b, c):
            p.grad = torch.randn_like(p) * 1e-3
            q.grad, r.grad = p.grad.clone(), p.grad.double()
        for opt in opts:
            opt.step()
    ours = max(float((p.double() - r).abs().max()) for p, r in zip(a, c))
    theirs = max(float((q.double() - r).abs().max()) for q, r in zip(b, c))
    return f"ok ours {ours:.2g}, torch fused {theirs:.2g}" if ours <= 2 * theirs + 1e-9 else f"off by {ours:.3g}, torch fused by {theirs:.3g}"


def captured(name: str, store: str) -> str:
    """A step in torch.cuda.graph, replayed with new gradients and a new lr, has the bits of an eager twin."""
    dtype, kw = STORES[store]
    a, b = params_of(ODD, dtype, "cuda", False), params_of(ODD, dtype, "cuda", False)
    first, second = MAKERS[name](a, **kw), MAKERS[name](b, **kw)
    lr = torch.tensor(H["lr"], device="cuda")
    for opt in (first, second):
        opt.param_groups[0]["lr"] = lr
    give_grads(a, 0)
    give_grads(b, 0)
    first.step()
    second.step()
    held = [p.grad for p in a]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.step()
    for step in range(1, 6):
        give_grads(b, step)
        lr.fill_(H["lr"] * step)
        if step == 3:  # an eager step between replays, with gradients elsewhere
            give_grads(a, step)
            first.step()
        else:
            for g, q in zip(held, b):
                g.copy_(q.grad)  # type: ignore[union-attr,arg-type]
            graph.replay()
        second.step()
    if first.state_dict()["param_groups"][0]["step"] != 6:
        return f"step {first.state_dict()['param_groups'][0]['step']} after 6"
    return "ok" if all(torch.equal(p, q) for p, q in zip(a, b)) else same(data(a), data(b), 0.0)


def stochastic() -> str:
    """Unbiased, within one step of the grid, and other random bits at every replay."""
    p = torch.nn.Parameter(torch.full((1 << 20,), 1.0, device="cuda", dtype=torch.bfloat16))
    opt = FusedSGD([p], 2.0**-10, stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    opt.step()  # 1 - 2^-10: between 1 - 2^-8 and 1, a quarter of the elements must move
    moved = float((p != 1).double().mean())
    if abs(moved - 0.25) > 0.005 or not bool(((p == 1) | (p == 1 - 2.0**-8)).all()):
        return f"{moved:.4f} of the elements moved, 0.25 expected"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    masks = []
    for _ in range(2):
        p.data.fill_(1.0)
        graph.replay()
        masks.append(p != 1)
    both = float((masks[0] & masks[1]).double().mean())
    return f"ok {moved:.4f}, both replays {both:.4f}" if abs(both - 0.0625) < 0.005 else f"replays are not independent: {both:.4f}, 0.0625 expected"


def no_waiting() -> str:
    """torch raises at every synchronising call of its own; a long kernel ahead shows those of ours."""
    params = params_of(ODD, torch.float32, "cuda", False)
    other = params_of(ODD, torch.bfloat16, "cuda", False)
    opts = [FusedAdam(params), FusedLAMB(params), FusedSGD(params, 1e-3, 0.9), FusedAdam(other, master_weights="split")]
    scale, found = torch.tensor(4.0, device="cuda"), torch.tensor(0.0, device="cuda")
    give_grads(params, 0)
    give_grads(other, 0)
    for opt in opts:
        opt.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        mark = torch.cuda.Event()
        mark.record()
        for opt in opts:
            opt.grad_scale, opt.found_inf = scale, found  # type: ignore[attr-defined]
            opt.step()
        clip_grad_norm_(params, 1.0)
        waited = mark.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return "a step waited for the device" if waited else "ok"


def mixed_never_waits() -> str:
    """backward(), clip_master_grads() and step() of FP16_Optimizer behind a long kernel, the second of three
    overflowing; then the message."""
    ours = params_of(ODD, torch.float16, "cuda", False)
    others = params_of(ODD, torch.float16, "cuda", False)
    opts = [FP16_Optimizer(FusedLAMB(ours)), FP16_Optimizer(torch.optim.AdamW(others, fused=True))]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ortmodule").addHandler(handler)

    def train(factors: list[float]) -> None:
        for factor in factors:
            for opt, params in zip(opts, (ours, others)):
                opt.zero_grad()
                opt.backward(sum(p.float().sum() for p in params) * factor)
                opt.clip_master_grads(1.0)
                opt.step()

    try:
        train([1e-3])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(2_000_000_000)
        mark = torch.cuda.Event()
        mark.record()
        train([1e-3, math.inf, 1e-3])
        waited, early = mark.query(), len(said)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):  # the first looks at a copy that was begun before the overflow, and begins another
        torch.cuda.synchronize()
        train([1e-3])
    logging.getLogger("ortmodule").removeHandler(handler)
    if waited or early:
        return f"a step waited for the device ({waited}), or {early} messages came before it was done"
    if len(said) != 2 or any(not s.startswith("step 2: inf or NaN in the gradient of parameter 0 of sizes (3,)") for s in said):
        return f"messages: {said}"
    counts = [(o.steps, o.skipped_steps, o.loss_scale) for o in opts]
    return "ok" if counts == [(5, 1, 2.0**15)] * 2 else f"steps, skipped, scale: {counts}"


def mixed_graph() -> str:
    """A whole mixed-precision step, backward() included, in one CUDA graph beside an eager twin; the third batch
    overflows."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(torch.nn.Sequential(torch.nn.Linear(61, 257), torch.nn.GELU(), torch.nn.Linear(257, 5)).cuda().half())
    opts = [FP16_Optimizer(adamw(net.parameters())) for net in nets]
    held = torch.zeros(16, 61, device="cuda", dtype=torch.float16)

    def train(net: torch.nn.Module, opt: Any, x: torch.Tensor) -> None:
        opt.zero_grad()
        opt.backward(net(x).float().square().mean())
        opt.clip_master_grads(0.1)
        opt.step()

    batches = [torch.randn(16, 61, device="cuda").half() for _ in range(8)]
    batches[4][3, 3] = math.inf
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in batches[:2]:
            held.copy_(x)
            train(nets[0], opts[0], held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(nets[0], opts[0], held)
    for x in batches[2:]:
        held.copy_(x)
        graph.replay()
    for x in batches:
        train(nets[1], opts[1], x)
    counts = [(o.steps, o.skipped_steps, o.loss_scale, o.first_overflow is not None) for o in opts]
    if counts != [(7, 1, 2.0**15, True)] * 2:
        return f"steps, skipped, scale, named: {counts}"
    return same(data(nets[0].parameters()), data(nets[1].parameters()), 1e-3)


def lamb_repeated() -> str:
    """LAMB in one launch, many times from the same state beside other work: always the same bits (a sweep that came
    before its data, or read an old copy of them, would differ), and the numbers of LAMB in three launches."""
    start = params_of(RACES, torch.float32, "cuda", False)
    side, busy = torch.cuda.Stream(), torch.randn(1 << 24, device="cuda")
    results: list[list[torch.Tensor]] = []
    for keep in (False, True):
        for turn in range(1 + TURNS):
            shift = int(not keep)  # pieces that share lines of the cache
            memory = [torch.empty(p.numel() + 1, device="cuda")[shift:][: p.numel()] for p in start]
            params = [torch.nn.Parameter(x.view(p.shape).copy_(p.detach())) for x, p in zip(memory, start)]
            opt = FusedLAMB(params, max_grad_norm=None, keep_grads=keep, **ADAM)
            opt.one_launch = turn > 0
            for step in range(2):
                torch.manual_seed(step)
                for p in params:
                    p.grad = torch.randn_like(p)
                if turn % 2:  # some processors are taken by another stream
                    with torch.cuda.stream(side):
                        busy.mul_(1.0)
                opt.step()
            torch.cuda.synchronize()
            now = [p.detach().clone() for p in params] + [opt.state[p][k].clone() for p in params for k in ("exp_avg", "exp_avg_sq")]
            if turn == 0:
                results = [now]
                continue
            if turn == 1:
                verdict = same(now, results[0], 3e-6)
                if not verdict.startswith("ok"):
                    return f"beside three launches: {verdict}"
                results = [now]
            wrong = sum(int((a != b).sum()) for a, b in zip(now, results[0]))
            if wrong:
                return f"keep_grads {keep}, turn {turn}: {wrong} elements have other bits"
    return "ok"


def grad_scaler() -> str:
    """Beside torch's fused AdamW under the same GradScaler; the third loss overflows."""
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)).cuda() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    opts = [adamw(nets[0].parameters()), torch.optim.AdamW(nets[1].parameters(), 1e-3, fused=True)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=3) for _ in nets]
    for step in range(10):
        x = torch.randn(32, 64, device="cuda")
        for net, opt, scaler in zip(nets, opts, scalers):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = net(x).float().square().mean() * (math.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(opt)
                clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
    if scalers[0].get_scale() != scalers[1].get_scale():
        return f"scales {scalers[0].get_scale()} and {scalers[1].get_scale()}"
    return same(data(nets[0].parameters()), data(nets[1].parameters()), 1e-4)


def training_moves_gradients() -> str:
    """Gradients at new addresses every step, on a stream of its own, beside torch.optim.AdamW; memory does not grow."""
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(61, 257), torch.nn.GELU(), torch.nn.LayerNorm(257), torch.nn.Linear(257, 5)).cuda() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    opts = [adamw(nets[0].parameters()), torch.optim.AdamW(nets[1].parameters(), 1e-3)]
    side = torch.cuda.Stream()
    kept: list[torch.Tensor] = []
    levels = []
    for step in range(60):
        x = torch.randn(16, 61, device="cuda")
        for net, opt in zip(nets, opts):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if step % 3 else torch.cuda.current_stream()):
                opt.zero_grad()
                net(x).square().mean().backward()
                opt.step()
            torch.cuda.current_stream().wait_stream(side)
        kept = [torch.empty(1 + 37 * step, device="cuda"), *kept[:3]]
        levels.append(torch.cuda.memory_allocated() - sum(k.numel() * 4 for k in kept))
    grown = levels[-1] - levels[20]
    if grown > 1 << 16:
        return f"{grown} bytes more after 40 steps"
    return same(data(nets[0].parameters()), data(nets[1].parameters()), 1e-3)


def huge_tensor() -> str:
    """More than 2^31 elements in one tensor."""
    n = HUGE
    p = torch.nn.Parameter(torch.ones(n, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.5)
    FusedSGD([p], 0.5).step()
    wrong = int(sum(int((x != 0.75).sum()) for x in p.detach().split(1 << 28)))
    return "ok" if not wrong else f"{wrong} of {n} elements are wrong"


def cpu_bits() -> str:
    """How far GPU and CPU kernels are apart (information; both are checked against fp64)."""
    a, b = params_of(ODD, torch.float32, "cuda", False), params_of(ODD, torch.float32, "cpu", False)
    x, y = FusedAdam(a, 1e-2, weight_decay=0.1), FusedAdam(b, 1e-2, weight_decay=0.1)
    for step in range(5):
        give_grads(a, step)
        give_grads(b, step)
        x.step()
        y.step()
    return same(data(a), data(b), 3e-6)


def needs_cuda() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "GPT-2 124 M list against fp64 and torch fused", gpt2_list
    for name in ("adam mode 1", "adam mode 2", "lamb", "lamb in one launch", "sgd"):
        for store in ("f32", "bf16 split"):
            yield f"CUDA graph, {name}, {store}", lambda n=name, s=store: captured(n, s)
    yield "stochastic rounding", stochastic
    yield "no step waits for the device", no_waiting
    yield "no step of FP16_Optimizer waits, messages", mixed_never_waits
    yield "CUDA graph, FP16_Optimizer with backward", mixed_graph
    yield "LAMB in one launch, repeated", lamb_repeated
    yield "GradScaler", grad_scaler
    yield "gradients at new addresses, two streams, memory", training_moves_gradients
    yield "more than 2^31 elements", huge_tensor
    yield "CPU kernels", cpu_bits


def run(device: str, tiny: int = len(TINY)) -> list[dict[str, Any]]:
    return rows_of([*every_optimizer(device, tiny), *plain(device), *(needs_cuda() if device == "cuda" else [])])
