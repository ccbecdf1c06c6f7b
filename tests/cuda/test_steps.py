"""The optimizers' CUDA path, Python to kernels, on the fake device: against the CPU kernels (which are tested against
fp64) and torch."""

from __future__ import annotations

import copy
import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortmodule import _C
from ortmodule.optim import DynamicLossScaler, FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_, cuda
from ortmodule.optim.lists import first_nonfinite, grad_norm, has_nonfinite, scale_into

ROOT = Path(__file__).parents[2]
SIZES = [(3,), (1,), (0,), (257,), (13, 17), (16385,), ()]
TOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}



def one_launch(opt):
    opt.one_launch = True
    return opt


MAKERS = {
    "adam": lambda p, **k: FusedAdam(p, 1e-2, weight_decay=0.1, **k),
    "adamw": lambda p, **k: FusedAdam(p, 1e-2, weight_decay=0.1, adam_w_mode=2, maximize=True, **k),
    "lamb": lambda p, **k: FusedLAMB(p, 1e-2, max_grad_norm=0.5, **k),
    "lamb free": lambda p, **k: FusedLAMB(p, 1e-2, max_grad_norm=None, keep_grads=True, adam_w_mode=False, **k),
    "lamb in one launch": lambda p, **k: one_launch(FusedLAMB(p, 1e-2, max_grad_norm=0.5, **k)),
    "sgd": lambda p, **k: FusedSGD(p, 1e-2, 0.9, dampening=0.3, weight_decay=0.1, **k),
    "sgd plain": lambda p, **k: FusedSGD(p, 1e-2, **k),
}
STORES = {
    "f32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "f16": (torch.float16, {}),
    "f16 master": (torch.float16, dict(master_weights=True)),
    "bf16 split": (torch.bfloat16, dict(master_weights="split")),
    "bf16 moments": (torch.bfloat16, dict(moment_dtype=torch.bfloat16)),
}


def make(gpu, dtype=torch.float32, sizes=SIZES, seed=0, device=0):
    """Parameters on the device and the same on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=gen).to(dtype) for s in sizes]
    ours = [gpu.put(torch.nn.Parameter(v.clone()), device) for v in values]
    return ours, [gpu.put(torch.nn.Parameter(v.clone()), -1) for v in values]


def give(gpu, ours, theirs, seed, factor=1.0):
    gen = torch.Generator().manual_seed(1000 + seed)
    for p, q in zip(ours, theirs):
        g = (torch.randn(p.shape, generator=gen) * factor).to(p.dtype)
        p.grad, q.grad = gpu.put(g.clone(), gpu.index(p)), gpu.put(g.clone(), -1)


def check(ours, theirs, tol, what=""):
    for i, (a, b) in enumerate(zip(ours, theirs)):
        a, b = a.detach().double(), b.detach().double()
        if a.numel():
            assert (a - b).abs().max() <= tol * b.abs().max().clamp_min(1e-30), (what, i)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("store", STORES)
def test_five_steps_equal_the_cpu(gpu, maker, store):
    dtype, kw = STORES[store]
    ours, theirs = make(gpu, dtype)
    a, b = MAKERS[maker](ours, **kw), MAKERS[maker](theirs, **kw)
    for step in range(5):
        give(gpu, ours, theirs, step)
        a.step()
        b.step()
    tol = 5 * TOL[dtype]
    check(ours, theirs, tol, "p")
    for p, q in zip(ours, theirs):
        for name in b.state[q]:
            if name == "master_rest" and p.numel():
                joined = [(x.view(torch.int16).int() << 16) + s[name].int() for x, s in ((p.detach(), a.state[p]), (q.detach(), b.state[q]))]
                check([joined[0].view(torch.float32)], [joined[1].view(torch.float32)], 1e-5, name)
            elif p.numel():
                check([a.state[p][name]], [b.state[q][name]], 1e-5 if a.state[p][name].dtype == torch.float32 else tol, name)
        assert p.numel() == 0 or a.state[p]["step"].item() == 5
    if b.__class__ is FusedLAMB and b.last_grad_norm is not None:
        assert float(a.last_grad_norm) == pytest.approx(b.last_grad_norm, rel=1e-5)


def test_stochastic_rounding_has_the_cpus_random_words(gpu):
    ours, theirs = make(gpu, torch.bfloat16)
    a, b = (FusedAdam(p, 1e-2, stochastic_rounding=True) for p in (ours, theirs))
    give(gpu, ours, theirs, 0)
    a.step()
    b.step()
    for p, q in zip(ours, theirs):
        assert (p != q).sum() <= 2 + 0.01 * p.numel()


def test_against_torch_in_fp64(gpu):
    ours, theirs = make(gpu)
    wide = [torch.nn.Parameter(q.detach().double()) for q in theirs]
    a, b = FusedAdam(ours, 1e-2, eps=1e-8, weight_decay=0.1, adam_w_mode=2), torch.optim.AdamW(wide, 1e-2, weight_decay=0.1)
    for step in range(5):
        give(gpu, ours, theirs, step)
        for w, q in zip(wide, theirs):
            w.grad = q.grad.double()
        a.step()
        b.step()
    check(ours, wide, 2e-6)


def test_no_upload_while_nothing_moves_and_one_when_a_gradient_does(gpu):
    ours, theirs = make(gpu)
    opt = FusedAdam(ours, 1e-2)
    give(gpu, ours, theirs, 0)
    opt.step()
    before = gpu.calls("cuLaunchKernel")
    opt.step()
    assert gpu.calls("cuLaunchKernel") - before == 2  # counters, Adam
    kept = ours[3].grad
    ours[3].grad = gpu.put(kept.clone(), 0)
    opt.step()
    assert gpu.calls("cuLaunchKernel") - before == 6  # + spans, chunks
    del kept
    opt.step()
    assert gpu.calls("cuLaunchKernel") - before == 8


def test_lamb_changes_between_one_launch_and_three(gpu):
    """The order is made when it is first needed and again after a gradient moved, also while it was not used."""
    ours, theirs = make(gpu)
    a, b = FusedLAMB(ours, 1e-2, max_grad_norm=None), FusedLAMB(theirs, 1e-2, max_grad_norm=None)
    expected = {0: 6, 1: 4, 2: 3, 3: 2, 4: 6, 5: 5}  # spans, chunks, count, direction, rate, update; order, count, lamb
    give(gpu, ours, theirs, 0)
    for step in range(6):
        a.one_launch = step in (2, 3, 5)
        if step == 4:
            kept = [p.grad for p in ours]
            ours[3].grad = gpu.put(torch.randn_like(ours[3]), 0)
            ours[5].grad = gpu.put(torch.randn_like(ours[5]), 0)
        if step == 5:
            ours[5].grad = gpu.put(ours[5].grad.clone(), 0)
        for p, q in zip(ours, theirs):
            q.grad = gpu.put(p.grad.clone(), -1)
        before = gpu.calls("cuLaunchKernel")
        a.step()
        assert gpu.calls("cuLaunchKernel") - before == expected[step], step
        b.step()
    assert kept
    check(ours, theirs, 1e-5)


@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_read_before_the_device_is_done(gpu, maker):
    """Launches are only queued: whoever looked at a norm or a flag in between would see the old one; and reading any
    value is an error."""
    ours, theirs = make(gpu)
    a, b = MAKERS[maker](ours), MAKERS[maker](theirs)
    give(gpu, ours, theirs, 0)
    a.step()
    b.step()
    gpu.lib.fake_defer(1)
    scale, found = torch.tensor(4.0), torch.tensor(0.0)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            q.grad = gpu.put(p.grad.clone(), -1)
        a.grad_scale, a.found_inf = scale, found
        b.grad_scale, b.found_inf = gpu.put(torch.tensor(4.0), -1), gpu.put(torch.tensor(0.0), -1)
        before = [p.detach().clone() for p in ours]
        gpu.unread = True
        a.step()
        gpu.unread = False
        b.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, before))
        gpu.sync()
    check(ours, theirs, 1e-5)


@pytest.mark.parametrize("maker", MAKERS)
def test_captured_steps_replay(gpu, maker):
    """A captured step reads lr, counters and gradients at replay; eager steps between replays do not disturb it, nor it
    them."""
    ours, theirs = make(gpu)
    a, b = MAKERS[maker](ours), MAKERS[maker](theirs)
    lr = torch.tensor(1e-2)
    a.param_groups[0]["lr"] = lr
    give(gpu, ours, theirs, 0)
    a.step()
    b.step()
    frozen = [p.grad for p in ours]
    with gpu.capture() as replay:
        a.step()
    for step in range(1, 5):
        lr.fill_(1e-2 * step)
        b.param_groups[0]["lr"] = 1e-2 * step
        give(gpu, ours, theirs, step)
        if step == 3:
            a.step()
        else:
            for f, p in zip(frozen, ours):
                f.copy_(p.grad)
            replay()
        b.step()
    check(ours, theirs, 1e-5)
    assert a.state_dict()["param_groups"][0]["step"] == 5
    assert b.state_dict()["param_groups"][0]["step"] == 5


def test_a_first_step_is_not_captured(gpu):
    ours, theirs = make(gpu)
    opt = FusedAdam(ours)
    give(gpu, ours, theirs, 0)
    _C.cuda_capturing(0, gpu.stream(0))
    with gpu.capture(), pytest.raises(RuntimeError, match="run one step before capturing"):
        opt.step()
    opt.step()


def test_first_use_of_a_device_inside_a_capture(gpu):
    ours, theirs = make(gpu, device=5)
    give(gpu, ours, theirs, 0)
    opt = FusedAdam(ours)
    _C.cuda_capturing(0, gpu.stream(0))
    with gpu.capture(), pytest.raises(RuntimeError, match="run one step before capturing"):
        opt.step()
    opt.step()


@pytest.mark.parametrize("maker", MAKERS)
def test_overflow_leaves_everything_alone(gpu, maker):
    ours, theirs = make(gpu)
    opt, twin = MAKERS[maker](ours), MAKERS[maker](theirs)
    for step, found in enumerate((1.0, 0.0, 1.0, 0.0)):  # also the very first: SGD's momentum must not count as begun
        give(gpu, ours, theirs, step, 8.0)
        for o, place in ((opt, 0), (twin, -1)):
            o.grad_scale, o.found_inf = gpu.put(torch.tensor(8.0), place), gpu.put(torch.tensor(found), place)
        before = [p.detach().clone() for p in ours]
        opt.step()
        twin.step()
        if found:
            assert all(torch.equal(p, q) for p, q in zip(ours, before))
    check(ours, theirs, 1e-5)
    assert opt.state_dict()["param_groups"][0]["step"] == 2


def test_lamb_with_a_non_finite_norm_does_nothing(gpu):
    ours, theirs = make(gpu)
    opt = FusedLAMB(ours, 1e-2)
    give(gpu, ours, theirs, 0)
    ours[3].grad[7] = math.inf
    before = [p.detach().clone() for p in ours]
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, before))
    assert all(s["step"] == 0 and not s["exp_avg"].any() for s in opt.state.values())
    assert not math.isfinite(float(opt.last_grad_norm))


def test_groups_with_their_own_limits_and_devices(gpu):
    one, cpu_one = make(gpu, device=0)
    two, cpu_two = make(gpu, seed=1, device=0)
    a = FusedLAMB([{"params": one, "max_grad_norm": 0.1}, {"params": two, "max_grad_norm": None}], 1e-2)
    b = FusedLAMB([{"params": cpu_one, "max_grad_norm": 0.1}, {"params": cpu_two, "max_grad_norm": None}], 1e-2)
    give(gpu, one + two, cpu_one + cpu_two, 0)
    a.step()
    b.step()
    check(one + two, cpu_one + cpu_two, 1e-5)


def test_several_devices_and_the_cpu_in_one_optimizer(gpu):
    (x, cx), (y, cy) = make(gpu, seed=0, device=0), make(gpu, seed=1, device=1)
    z, cz = make(gpu, seed=2, device=-1)
    a, b = FusedAdam(x + y + z, 1e-2), FusedAdam(cx + cy + cz, 1e-2)
    for step in range(3):
        give(gpu, x + y + z, cx + cy + cz, step)
        a.step()
        b.step()
    check(x + y + z, cx + cy + cz, 1e-5)
    assert a.param_groups[0]["step"] == 3
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        lamb = FusedLAMB(x + y)
        lamb.step()


def test_odd_layouts(gpu):
    """Views with gaps, transposed gradients, channels-last weights, unaligned memory."""
    base, other = torch.randn(9, 8), torch.randn(9, 8)
    ours, theirs = [], []
    for place, home in ((0, ours), (-1, theirs)):
        big = gpu.put(base.clone(), place)
        home.append(gpu.put(torch.nn.Parameter(big[:, 1:6]), place))
        home.append(gpu.put(torch.nn.Parameter(torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)), place))
        home.append(gpu.put(torch.nn.Parameter(torch.arange(20.0)[1:]), place))
    for kind in (FusedAdam, FusedLAMB, FusedSGD):
        a, b = kind(ours, 1e-2), kind(theirs, 1e-2)
        for step in range(2):
            give(gpu, ours, theirs, step)
            for p in ours + theirs:
                if p.dim() == 2:
                    p.grad = gpu.put(p.grad.t().contiguous().t(), gpu.index(p))
            a.step()
            b.step()
        check(ours, theirs, 1e-5, kind.__name__)
        check([p.grad for p in ours], [p.grad for p in theirs], 1e-4, kind.__name__)
    assert ours[0].stride() == (8, 1) and other.shape == base.shape
    with pytest.raises(ValueError, match="expanded"):
        p = gpu.put(torch.nn.Parameter(torch.zeros(1).expand(4)), 0)
        p.grad = torch.ones(4)
        FusedAdam([p]).step()


def test_many_tiny_tensors(gpu):
    ours, theirs = make(gpu, sizes=[(1 + i % 5,) for i in range(150)])  # more spans than one upload carries
    a, b = FusedAdam(ours, 1e-2), FusedAdam(theirs, 1e-2)
    for step in range(2):
        give(gpu, ours, theirs, step)
        a.step()
        b.step()
    check(ours, theirs, 1e-5)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("store", ["f32", "f16 master", "bf16 split"])
def test_resume_gives_the_same_bits_and_cpu_state_moves_over(gpu, maker, store):
    dtype, kw = STORES[store]
    ours, theirs = make(gpu, dtype)
    first = MAKERS[maker](ours, **kw)
    for step in range(3):
        give(gpu, ours, theirs, step)
        first.step()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    again = [gpu.put(torch.nn.Parameter(p.detach().clone()), 0) for p in ours]
    second = MAKERS[maker](again, **kw)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    cpu = [gpu.put(torch.nn.Parameter(p.detach().clone()), -1) for p in ours]
    third = MAKERS[maker](cpu, **kw)
    third.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(3, 5):
        give(gpu, ours, cpu, step)
        give(gpu, again, theirs, step)
        first.step()
        second.step()
        third.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, again))
    check(ours, cpu, 5 * TOL[dtype])
    copy.deepcopy(second)


@pytest.mark.parametrize("max_norm,norm_type", [(0.1, 2.0), (1e9, 2.0), (0.0, 2.0), (0.1, 1.0)])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_clip_grad_norm(gpu, max_norm, norm_type, bad):
    ours, theirs = make(gpu)
    give(gpu, ours, theirs, 0)
    if bad is not None:
        ours[3].grad[5] = theirs[3].grad[5] = bad
    before = gpu.calls("cuLaunchKernel")
    gpu.unread = norm_type == 2.0
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    gpu.unread = False
    if norm_type == 2.0:
        assert gpu.calls("cuLaunchKernel") - before == 5
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, want.float(), rtol=1e-6, atol=0, equal_nan=True)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_clip_unscales(gpu):
    ours, theirs = make(gpu, torch.float16)
    give(gpu, ours, theirs, 0, 64.0)
    norm = clip_grad_norm_(ours, 0.5, loss_scale=64.0)
    other = clip_grad_norm_([gpu.put(q, -1) for q in theirs], 0.5, loss_scale=64.0)
    assert float(norm) == pytest.approx(float(other), rel=1e-6)
    check([p.grad for p in ours], [p.grad for p in theirs], 1e-3)


def test_lists(gpu):
    ours, theirs = make(gpu, torch.float16)
    grads = [p.detach() for p in ours]
    norm, finite = grad_norm(grads)
    assert finite and norm == pytest.approx(math.sqrt(sum(q.detach().double().square().sum().item() for q in theirs)), rel=1e-6)
    wide = [torch.empty(p.shape) for p in ours]
    scale_into(wide, grads, 0.25)
    check(wide, [0.25 * q.detach().float() for q in theirs], 1e-6)
    scale_into(wide, None, 4.0)
    check(wide, [q.detach().float() for q in theirs], 1e-6)
    assert not has_nonfinite(grads) and first_nonfinite(grads) is None
    grads[4][0, 0] = math.nan
    assert has_nonfinite(grads) and first_nonfinite(grads) == 4


# --- FP16_Optimizer ------------------------------------------------------------------------------------

INNER = {
    "torch": lambda p: torch.optim.AdamW(p, 1e-2),  # cannot leave a step out by itself: the host decides, and waits
    "torch fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adam": lambda p: FusedAdam(p, 1e-2, adam_w_mode=2),
    "lamb": lambda p: FusedLAMB(p, 1e-2, max_grad_norm=0.02),
    "sgd": lambda p: FusedSGD(p, 1e-2, 0.9),
}


def one_step(gpu, opt, params, place, step, factor, clip=None):
    """backward() to step(); on the device reading a value is an error, unless the host must decide."""
    gpu.default = place
    opt.zero_grad()
    gen = torch.Generator().manual_seed(step)
    loss = sum((p * torch.randn(p.shape, generator=gen)).float().sum() for p in params) * factor
    gpu.unread = place == 0 and getattr(opt, "_step_supports_amp_scaling", False)  # ours, and torch's with fused=True
    opt.backward(loss)
    for p in params:
        gpu.put(p.grad, place)
    norm = opt.clip_master_grads(*clip) if clip else None
    opt.step()
    gpu.unread = False
    gpu.default = 0
    return norm


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp16_optimizer_beside_the_cpu(gpu, inner, dtype, caplog):
    ours, theirs = make(gpu, dtype)
    a, b = (FP16_Optimizer(INNER[inner](p), loss_scaler=DynamicLossScaler(up_scale_window=2)) for p in (ours, theirs))
    factors = [1e-3, 1e9 if dtype == torch.float16 else math.inf, 1e-3, 1e-4, 1e-3, 1e-3]
    for step, factor in enumerate(factors):
        clip = [None, (0.01,), (1e9,)][step % 3]
        norms = [one_step(gpu, opt, params, place, step, factor, clip) for opt, params, place in ((a, ours, 0), (b, theirs, -1))]
        if clip:
            assert float(norms[0]) == pytest.approx(norms[1], rel=1e-6) and (norms[1] == -1) == (step == 1)
        assert a.overflow == b.overflow == (step == 1)
        assert a.loss_scale == b.loss_scale
    assert a.loss_scale == 2.0**17 and (a.steps, a.skipped_steps) == (b.steps, b.skipped_steps) == (5, 1)
    check(ours, theirs, 2e-3 if dtype == torch.float16 else 1e-5)
    mine, other = a.state_dict()["fp16_optimizer"], b.state_dict()["fp16_optimizer"]
    assert {k: v for k, v in mine.items() if k != "masters"} == {k: v for k, v in other.items() if k != "masters"}
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and said[0] == said[1] and said[0].startswith("step 1: inf or NaN in the gradient of parameter 0 of sizes (3,)")
    assert said[0].endswith("loss scale 65536 -> 32768")


def test_fp16_optimizer_reports_late_and_never_waits(gpu, caplog):
    """Nothing that step() queued has run when it returns; the message comes with the first step() after the device has
    got there."""
    ours, theirs = make(gpu, torch.float16)
    names = torch.nn.Module()
    for i, p in enumerate(ours):
        names.register_parameter(f"w{i}", p)
    a = FP16_Optimizer(FusedAdam(ours, 1e-2, adam_w_mode=2), names)
    b = FP16_Optimizer(FusedAdam(theirs, 1e-2, adam_w_mode=2))
    gpu.defer()
    for step in range(9):
        bad = step in (2, 3, 6)
        for opt, params, place in ((a, ours, 0), (b, theirs, -1)):
            gpu.default = place
            gpu.unread = place == 0
            opt.zero_grad()
            opt.backward(sum(p.float().sum() for p in params))
            give(gpu, ours, theirs, step, 100.0)
            ours[1].grad = theirs[1].grad = None  # numbers are those of all parameters
            if bad:
                (ours if place == 0 else theirs)[4].grad.view(-1)[7] = math.nan
            before = [p.detach().clone() for p in params]
            opt.step()
            gpu.unread = False
            if place == 0:
                assert all(torch.equal(p, q) for p, q in zip(params, before))
        said = [r.getMessage() for r in caplog.records if "w4" in r.getMessage()]
        assert len(said) == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 2, 7: 3, 8: 3}[step]
        gpu.default = 0
        gpu.sync()
    gpu.defer(False)
    assert said[0] == "step 2: inf or NaN in the gradient of w4, module the model (Module); update skipped, loss scale 65536 -> 32768"
    assert said[1].startswith("step 3:") and said[1].endswith("32768 -> 16384") and said[2].startswith("step 6:")
    assert a.loss_scale == b.loss_scale == 2.0**13 and a.steps == b.steps == 6 and a.skipped_steps == 3 and not a.overflow
    assert a.first_overflow == ("w4", "the model (Module)")
    check(ours, theirs, 2e-3)


def test_overflows_that_nobody_heard_of_for_long(gpu, caplog):
    """The copy of the log is long under way; the log keeps the last sixteen; reading a counter tells the rest."""
    (ours, theirs) = make(gpu, sizes=[(3,)])
    opt = FP16_Optimizer(FusedAdam(ours), loss_scaler=DynamicLossScaler(min_loss_scale=2.0**-9))
    gpu.deferred = True  # copies only: kernels run at once
    for step in range(22):
        opt.zero_grad()
        opt.backward((ours[0] * (math.nan if step < 20 else 1.0)).sum())
        opt.step()
    assert not caplog.records
    assert opt.skipped_steps == 20 and opt.steps == 2
    said = [r.getMessage() for r in caplog.records]
    assert said[0] == "20 steps overflowed and were skipped; the last 16:" and len(said) == 18 and "Likely causes" in said[2]
    assert said[1].startswith("step 4:") and said[1].endswith("4096 -> 2048")
    assert said[-1].startswith("step 19:") and said[-1].endswith("0.125 -> 0.0625")
    gpu.sync()
    opt.step()  # the old copy arrives: nothing new in it
    assert len(caplog.records) == 18


def test_loss_scale_on_the_device_follows_the_rule(gpu):
    """The rule, written once more: windows, clamps at both ends, a constant scale."""
    p = gpu.put(torch.nn.Parameter(torch.ones(5)), 0)
    opt = FP16_Optimizer(FusedSGD([p], 1e-9), loss_scaler=DynamicLossScaler(True, 24.0, 3, 4.0, 70.0))
    fixed = FP16_Optimizer(FusedSGD([p], 1e-9), loss_scaler=24.0)
    flags = [int(c) for c in "111111111100111011110000000111111111111110"]
    scale, good = 24.0, 0
    for ok in flags:
        for o in (opt, fixed):
            gpu.unread = True
            o.zero_grad()
            o.backward((p * (1.0 if ok else math.inf)).sum())
            o.step()
            gpu.unread = False
        good = good + 1 if ok else 0
        if not ok:
            scale = max(4.0, scale / 2)
        elif good == 3:
            scale, good = min(70.0, scale * 2), 0
        assert opt.loss_scale == scale and opt.overflow == (not ok) and fixed.loss_scale == 24.0
        assert opt.loss_scaler.state_dict()["stable_steps"] == good
    assert opt.steps == sum(flags) and fixed.skipped_steps == len(flags) - sum(flags)


def test_fp16_optimizer_state_moves_between_host_and_device(gpu):
    """Set, reset, saved, loaded in the middle; the same bits go on, on the device and on the CPU."""
    ours, theirs = make(gpu, torch.float16)
    rule = dict(up_scale_window=3)
    a, b = (FP16_Optimizer(FusedAdam(p, 1e-2), loss_scaler=DynamicLossScaler(**rule)) for p in (ours, theirs))
    for step in range(4):
        one_step(gpu, a, ours, 0, step, math.inf if step == 2 else 1e-3)
    again, cpu = ([gpu.put(torch.nn.Parameter(p.detach().clone()), place) for p in ours] for place in (0, -1))
    c, d = (FP16_Optimizer(FusedAdam(p, 1e-2), loss_scaler=DynamicLossScaler(**rule)) for p in (again, cpu))
    one_step(gpu, c, again, 0, 9, math.inf)  # an older report is under way when the state is loaded
    saved = io.BytesIO()
    torch.save(a.state_dict(), saved)
    for opt in (c, d):
        saved.seek(0)
        opt.load_state_dict(torch.load(saved, weights_only=True))
        assert (opt.steps, opt.skipped_steps, opt.loss_scale) == (3, 1, 2.0**15)
    for step in range(4, 9):
        if step == 6:
            for opt in (a, c, d):
                opt.loss_scale = 64.0
        for opt, params, place in ((a, ours, 0), (c, again, 0), (d, cpu, -1)):
            one_step(gpu, opt, params, place, step, 1e-3)
            if step == 5:
                opt.step()  # without backward(): unscaled, unchecked
    assert all(torch.equal(p, q) for p, q in zip(ours, again))
    check(ours, cpu, 2e-3)
    assert a.loss_scale == c.loss_scale == d.loss_scale == 128.0 and a.steps == c.steps == d.steps == 9
    a.loss_scaler.reset()
    one_step(gpu, a, ours, 0, 9, 1e-3)
    assert a.loss_scale == 2.0**16 and b.loss_scale == 2.0**16


def test_clipping_unscaled_gradients(gpu):
    """Without backward(): clipped by the norm at that moment; not at all when that is not finite, and then the step is
    not left out."""
    ours, theirs = make(gpu)
    a, b = FP16_Optimizer(FusedSGD(ours, 0.1)), FP16_Optimizer(torch.optim.SGD(theirs, 0.1))
    for step in range(4):
        give(gpu, ours, theirs, step)
        if step == 2:
            ours[3].grad[5] = theirs[3].grad[5] = math.inf
        norms = [float(opt.clip_master_grads(0.3 + step)) for opt in (a, b)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6) and (norms[0] == -1) == (step == 2)
        a.step()
        b.step()
        assert not a.overflow and a.steps == step + 1
        for p, q in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, equal_nan=True)
        with torch.no_grad():
            ours[3][5] = theirs[3][5] = 1.0


def test_one_scaler_for_two_optimizers_and_a_scaler_with_a_rule_of_its_own(gpu):
    class Halving(DynamicLossScaler):
        def update(self, all_finite):
            self.loss_scale /= 2
            return self.loss_scale

    x, y = make(gpu, sizes=[(5,)])
    shared = DynamicLossScaler(up_scale_window=2)
    both = [FP16_Optimizer(FusedAdam(x), loss_scaler=shared), FP16_Optimizer(FusedAdam(y), loss_scaler=shared)]
    for step in range(2):  # a window of two counts the steps of both; the second optimizer is on the CPU
        for opt, params, place in zip(both, (x, y), (0, -1)):
            one_step(gpu, opt, params, place, step, 1.0)
    assert shared.loss_scale == 2.0**18
    own = FP16_Optimizer(FusedAdam(x), loss_scaler=Halving())
    own.backward(x[0].sum())
    own.step()
    assert own.loss_scale == 2.0**15 and own.steps == 1


def test_captured_mixed_precision_steps(gpu):
    """Replays count, skip and rescale by what the gradients are then."""
    ours, theirs = make(gpu, torch.float16)
    a, b = (FP16_Optimizer(FusedLAMB(p, 1e-2)) for p in (ours, theirs))
    for opt, params, place in ((a, ours, 0), (b, theirs, -1)):
        one_step(gpu, opt, params, place, 0, 1e-3)
    held = [p.grad for p in ours]
    a.zero_grad()
    a.backward(sum(p.float().sum() for p in ours) * 1e-3)
    for p, g in zip(ours, held):
        p.grad = g
    kept = a._scale
    with gpu.capture() as replay:
        a.step()
    for step in range(1, 5):
        gpu.default = -1
        b.zero_grad()
        b.backward(sum(p.float().sum() for p in theirs) * (math.nan if step == 2 else 1e-3 * step))
        gpu.default = 0
        for g, q in zip(held, theirs):
            g.copy_(gpu.put(q.grad, -1))
        kept.fill_(a.loss_scale)  # what the captured backward() would have done
        replay()
        b.step()
        assert a.loss_scale == b.loss_scale
    assert (a.steps, a.skipped_steps) == (b.steps, b.skipped_steps) == (4, 1)
    check(ours, theirs, 2e-3)
    a.loss_scale = b.loss_scale = 8.0  # reaches the graph
    kept.fill_(8.0)
    held[0].fill_(math.nan)
    replay()
    assert a.loss_scale == 4.0 and a.first_overflow is not None
    fresh = FP16_Optimizer(FusedAdam(ours))
    with gpu.capture(), pytest.raises(RuntimeError, match="run one step before capturing"):
        fresh.backward(sum(p.float().sum() for p in ours))


@pytest.mark.parametrize("inner", ["adam", "torch fused"])
def test_each_launch_of_a_mixed_precision_step_fails_once(gpu, inner):
    """A step that was not launched does not count, and the next one goes on."""
    for nth in range(1, 40):
        ours, _ = make(gpu, torch.float16)
        opt = FP16_Optimizer(INNER[inner](ours), loss_scaler=DynamicLossScaler(up_scale_window=1))
        one_step(gpu, opt, ours, 0, 0, 1e-3)
        start = gpu.calls("cuLaunchKernel")
        gpu.fail("cuLaunchKernel", nth, 719)
        try:
            one_step(gpu, opt, ours, 0, 1, 1e-3)
        except RuntimeError as e:
            gpu.unread = False
            assert "FAKE_ERROR_719" in str(e) and "launching om_cuda_" in str(e)
            gpu.fail("", 0)
            assert opt.steps == 1 and opt.loss_scale == 2.0**17 and not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")
            one_step(gpu, opt, ours, 0, 1, 1e-3)
            assert opt.steps == 2 and opt.loss_scale == 2.0**18
        else:
            break
    assert nth == 1 + gpu.calls("cuLaunchKernel") - start and nth > 5


@pytest.mark.parametrize("maker", MAKERS)
def test_grad_scaler_does_not_wait(gpu, maker):
    """torch.amp.GradScaler around a step, an overflow included, without reading a value."""
    ours, theirs = make(gpu)
    a, b = MAKERS[maker](ours), MAKERS[maker](theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for step in range(5):
        give(gpu, ours, theirs, step)
        if step != 2:
            b.step()
        gpu.unread = True
        for p in ours:
            scaler.scale(p.grad)
            p.grad.mul_(scaler._scale if step != 2 else math.inf)
        scaler.step(a)
        scaler.update()
        gpu.unread = False
    check(ours, theirs, 1e-5)
    assert scaler.get_scale() == 32.0


def test_grad_scaler_protocol_with_odd_scalars(gpu):
    """grad_scale and found_inf as numbers, CPU tensors, wider tensors."""
    results = []
    for scale in (8.0, torch.tensor(8.0, dtype=torch.float64), "cpu"):
        ours, theirs = make(gpu)
        opt = FusedAdam(ours, torch.tensor(1e-2, dtype=torch.float64))
        give(gpu, ours, theirs, 0, 8.0)
        opt.grad_scale = gpu.put(torch.tensor([8.0]), -1) if scale == "cpu" else scale
        opt.step()
        results.append([p.detach().clone() for p in ours])
    for r in results[1:]:
        check(r, results[0], 1e-6)
    with pytest.raises(ValueError, match="must have one"):
        opt.grad_scale = torch.ones(2)
        opt.step()


OPENING = ["cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
           "cuCtxPushCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction", "cuCtxPopCurrent_v2", "cuStreamIsCapturing"]
devices = iter(range(8, 32))


@pytest.mark.parametrize("call", OPENING)
def test_opening_a_device_fails_at(gpu, call):
    device = next(devices)
    ours, theirs = make(gpu, device=device)
    opt, twin = FusedAdam(ours, 1e-2), FusedAdam(theirs, 1e-2)
    give(gpu, ours, theirs, 0)
    gpu.fail(call)
    if call == "cuInit" and gpu.calls("cuInit"):
        pytest.skip("cuInit has run in this process")
    with pytest.raises(RuntimeError, match=call.removesuffix("_v2") if call != "cuModuleGetFunction" else "om_cuda_") as e:
        opt.step()
    assert "FAKE_ERROR_999" in str(e.value) and not opt.state and "step" not in opt.param_groups[0]
    opt.step()
    twin.step()
    check(ours, theirs, 1e-5)


def test_no_kernels_for_this_device(gpu):
    device = next(devices)
    ours, theirs = make(gpu, device=device)
    give(gpu, ours, theirs, 0)
    gpu.fail("cuModuleLoadData", code=209)
    with pytest.raises(RuntimeError, match=r"sm_90.*CUDA 13.0.*sm_ 75 80.*make CUDA_ARCHS=90"):
        FusedAdam(ours).step()


@pytest.mark.parametrize("maker", ["adam", "lamb", "lamb in one launch", "sgd"])
def test_each_launch_of_a_step_fails_once(gpu, maker):
    """Weights are never half updated; what was is said; the next step writes its tables anew and goes on."""
    for nth in range(1, 20):
        ours, theirs = make(gpu)
        opt = MAKERS[maker](ours)
        give(gpu, ours, theirs, 0)
        before = [p.detach().clone() for p in ours]
        gpu.fail("cuLaunchKernel", nth, 719)
        start = gpu.calls("cuLaunchKernel")
        try:
            opt.step()
        except RuntimeError as e:
            text = str(e)
            assert "FAKE_ERROR_719" in text and "launching om_cuda_" in text and "CUDA_LAUNCH_BLOCKING" in text
            counted = any(s["step"].item() for s in opt.state.values())
            assert ("step counters were advanced" in text or "step counters and moments were advanced" in text) == counted
            assert all(torch.equal(p, q) for p, q in zip(ours, before)) and "step" not in opt.param_groups[0]
            gpu.fail("", 0)
            opt.step()
            assert not any(torch.equal(p, q) for p, q in zip(ours, before) if p.numel())
        else:
            break
    assert nth == 1 + gpu.calls("cuLaunchKernel") - start and nth > 4


def test_doubles_stay_on_the_cpu(gpu):
    p = gpu.put(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), 0)
    p.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="float64 on a CUDA device; allowed there: float32"):
        FusedAdam([p]).step()


def test_the_fake_sees_freed_memory(gpu):
    """The check that the other tests lean on: a table with a dead pointer in it is noticed."""
    ours, theirs = make(gpu)
    give(gpu, ours, theirs, 0)
    place = cuda.Place(0)
    head, _ = cuda.Table().refresh(place, "axpby", [[p.detach() for p in ours], [p.grad for p in ours], None, None, None, None], 0)
    _C.cuda_axpby(*head, None, 1.0, 0.0)
    for _ in range(9):
        gpu.lib.fake_unregister(ours[3].grad.data_ptr())
    with pytest.raises(RuntimeError, match="is not live memory"):
        _C.cuda_axpby(*head, None, 1.0, 0.0)


def test_without_a_driver_the_message_says_so():
    code = "from ortmodule import _C\n_C.cuda_capturing(0, 0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    if not _C.cuda_archs():
        assert "this build has no CUDA kernels" in run.stderr
    elif run.returncode:
        assert "there is no NVIDIA driver" in run.stderr or "cuInit" in run.stderr


def test_entry_points_have_the_types_of_cuda_h(tmp_path):
    found = [p for p in [*Path("/usr/local").glob("cuda*/include/cuda.h"), Path("/usr/include/cuda.h")] if p.exists()]
    if not found:
        pytest.skip("no cuda.h")
    command = ["gcc", "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", f"-I{found[0].parent}"]
    subprocess.run([*command, str(ROOT / "tests/cuda/api_check.c")], check=True)


# --- corners ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["adamw", "sgd", "lamb free", "lamb in one launch"])
def test_weights_over_one_storage_move_one_after_the_other(gpu, maker):
    """Also where their addresses change, and a parameter that is in the group twice."""
    pairs, kept = [], []
    for device in (0, -1):
        torch.manual_seed(0)
        ps = [gpu.put(torch.nn.Parameter(torch.randn(20000)), device) for _ in range(3)]
        ps[2].data = ps[0].data
        with pytest.warns(UserWarning, match="duplicate"):
            pairs.append((ps, MAKERS[maker]([*ps, ps[1]])))
        if maker == "sgd" and device == 0:
            for p in ps:
                p.grad = gpu.put(torch.ones(20000), 0)
            with pytest.raises(ValueError, match="twice in a group with momentum"):
                pairs[0][1].step()
        if maker == "sgd":
            pairs[-1] = ps, MAKERS[maker](ps)
    (ours, a), (theirs, b) = pairs
    for step in range(4):
        if step == 2:  # apart from now on
            for ps, device in ((ours, 0), (theirs, -1)):
                kept.append(gpu.put(ps[2].detach().clone(), device))  # its memory is known while it lives
                ps[2].data = kept[-1]
        give(gpu, ours, theirs, step)
        a.step()
        b.step()
        check(ours, theirs, 3e-6, step)
        assert [s["step"].item() for s in a.state.values()] == [step + 1.0, (step + 1.0) * (1 if maker == "sgd" else 2), step + 1.0]


def test_a_shared_gradient_in_lamb(gpu):
    results = []
    for share in (True, False):
        torch.manual_seed(0)
        ps = [gpu.put(torch.nn.Parameter(torch.randn(300)), 0) for _ in range(2)]
        opt = FusedLAMB([{"params": [p]} for p in ps], 0.1)
        g = gpu.put(torch.randn(300), 0)
        ps[0].grad, ps[1].grad = g, g if share else gpu.put(g.clone(), 0)
        opt.step()
        results.append([p.detach() for p in ps])
    assert all(torch.equal(x, y) for x, y in zip(*results))


@pytest.mark.parametrize("maker", ["adamw", "sgd plain", "lamb free"])
def test_lazily_negated_gradients(gpu, maker):
    ours, theirs = make(gpu)
    a, b = MAKERS[maker](ours), MAKERS[maker](theirs)
    give(gpu, ours, theirs, 0)
    for p in ours:
        p.grad = torch._neg_view(p.grad)
    for q in theirs:
        q.grad.neg_()
    a.step()
    b.step()
    check(ours, theirs, 2e-6)


def test_infinite_weights_and_a_refused_group(gpu):
    ps = [gpu.put(torch.nn.Parameter(torch.tensor([1.0, -math.inf, math.inf])), 0) for _ in range(2)]
    for make_one in (lambda p: FusedSGD(p, 1e-2), lambda p: FusedSGD(p, 1e-2, 0.9), *(lambda p, m=m: FusedAdam(p, 1e-2, adam_w_mode=m) for m in range(4))):
        opt = make_one([{"params": ps[:1]}, {"params": ps[1:]}])
        for p in ps:
            p.grad = gpu.put(torch.tensor([1.0, 0.0, 0.5]), 0)
        before = [p.detach().clone() for p in ps]
        ps[1].grad.data = gpu.put(torch.ones(3, dtype=torch.float64), 0)
        with pytest.raises((ValueError, RuntimeError), match="gradient"):
            opt.step()
        assert all(torch.equal(p, q) for p, q in zip(ps, before))
        ps[1].grad = gpu.put(torch.ones(3), 0)
        opt.step()
        assert all(p[0] < q[0] and p[1] == -math.inf and p[2] == math.inf for p, q in zip(ps, before))


def test_dampening_without_momentum_is_nothing(gpu):
    ours, theirs = make(gpu)
    a, b = FusedSGD(ours, 1e-2, 0.0, dampening=0.5), torch.optim.SGD(theirs, 1e-2, 0.0, dampening=0.5)
    for step in range(3):
        give(gpu, ours, theirs, step)
        a.step()
        b.step()
    check(ours, theirs, 2e-6)
