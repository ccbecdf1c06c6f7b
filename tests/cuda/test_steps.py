"""The optimizers' CUDA path, Python to kernels, on the fake device: against the CPU kernels (which are tested against fp64) and torch."""

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
from ortmodule.optim import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_, cuda
from ortmodule.optim.lists import first_nonfinite, grad_norm, has_nonfinite, scale_into

ROOT = Path(__file__).parents[2]
SIZES = [(3,), (1,), (0,), (257,), (13, 17), (16385,), ()]
TOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

MAKERS = {
    "adam": lambda p, **k: FusedAdam(p, 1e-2, weight_decay=0.1, **k),
    "adamw": lambda p, **k: FusedAdam(p, 1e-2, weight_decay=0.1, adam_w_mode=2, maximize=True, **k),
    "lamb": lambda p, **k: FusedLAMB(p, 1e-2, max_grad_norm=0.5, **k),
    "lamb free": lambda p, **k: FusedLAMB(p, 1e-2, max_grad_norm=None, keep_grads=True, adam_w_mode=False, **k),
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


@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_read_before_the_device_is_done(gpu, maker):
    """Launches are only queued: whoever looked at a norm or a flag in between would see the old one; and reading any value is an error."""
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
    """A captured step reads lr, counters and gradients at replay; eager steps between replays do not disturb it, nor it them."""
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


@pytest.mark.parametrize("inner", ["torch", "fused"])
def test_fp16_optimizer(gpu, inner):
    ours, theirs = make(gpu, torch.float16)

    def build(params):
        kind = torch.optim.AdamW(params, 1e-2) if inner == "torch" else FusedAdam(params, 1e-2, adam_w_mode=2)
        return FP16_Optimizer(kind, loss_scaler=None)

    a, b = build(ours), build(theirs)
    for step in range(4):
        for opt, params, place in ((a, ours, 0), (b, theirs, -1)):
            gpu.default = place
            opt.zero_grad()
            gen = torch.Generator().manual_seed(step)
            loss = sum((p * torch.randn(p.shape, generator=gen)).float().sum() for p in params) * (1e9 if step == 1 else 1e-3)
            opt.backward(loss)
            for p in params:
                gpu.put(p.grad, place)
            if step != 1:
                opt.clip_master_grads(0.01)
            opt.step()
    gpu.default = 0
    assert a.loss_scale == b.loss_scale == 2.0**15 and a.skipped_steps == b.skipped_steps == 1
    check(ours, theirs, 2e-3)


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
           "cuCtxPushCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction", "cuCtxPopCurrent_v2", "cuStreamIsCapturing"]  # fmt: skip
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


@pytest.mark.parametrize("maker", ["adam", "lamb", "sgd"])
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
