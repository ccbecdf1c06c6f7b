"""Odd but legal uses of the optimizers, and refusals: what fails says why and leaves everything as it was."""

from __future__ import annotations

import copy
import math

import numpy as np
import optim_reference as reference
import pytest
import torch

from ortmodule import _C
from ortmodule.optim import DynamicLossScaler, FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).to(dtype)


def train(model, opt, steps=3):
    for k in range(steps):
        opt.zero_grad()
        (model(torch.full((3, 7), 1.0 + k, dtype=model[0].weight.dtype)) ** 2).mean().backward()
        opt.step()


def same(a, b):
    """Two state dicts hold the same."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


# --- loading a state -----------------------------------------------------------------------------------


def test_load_hooks_see_and_change_what_is_loaded():
    """torch's documented way to adapt a checkpoint is a pre-hook: what it returns is loaded, and post-hooks see the
    result."""
    model = net(torch.bfloat16)
    saved_by, opt = FusedAdam(model.parameters()), FusedAdam(net(torch.bfloat16).parameters())
    train(model, saved_by)
    seen = []

    def swap_moments(optimizer, state):
        return {**state, "state": {k: {**v, "exp_avg": v["exp_avg_sq"]} for k, v in state["state"].items()}}

    opt.register_load_state_dict_pre_hook(swap_moments)
    opt.register_load_state_dict_post_hook(lambda optimizer: seen.extend(s["exp_avg"].dtype for s in optimizer.state.values()))
    opt.load_state_dict(saved_by.state_dict())
    for ours, theirs in zip(opt.state.values(), saved_by.state.values()):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg_sq"])
    assert seen == [torch.float32] * 4  # not the parameters' bfloat16
    opt.load_state_dict(saved_by.state_dict())
    assert len(seen) == 8


def without(name):
    return lambda state: state["state"][1].pop(name)


def with_(name, value):
    return lambda state: state["state"][1].__setitem__(name, value)


WRONG = {
    "no second moment": (FusedAdam, without("exp_avg_sq"), "no exp_avg_sq"),
    "no first moment": (FusedLAMB, without("exp_avg"), "no exp_avg"),
    "sizes": (FusedAdam, with_("exp_avg", torch.zeros(3)), r"exp_avg .*sizes \(3,\).*\(13,\)"),
    "momentum's sizes": (FusedSGD, with_("momentum_buffer", torch.zeros(13, 1)), r"momentum_buffer .*sizes \(13, 1\).*\(13,\)"),
    "not a tensor": (FusedAdam, with_("exp_avg", [0.0] * 13), "exp_avg .*list"),
    "step": (FusedAdam, with_("step", "x"), "step .*'x'"),
    "groups": (FusedAdam, lambda state: state["param_groups"].append(state["param_groups"][0]), "number of parameter groups"),
    "parameters": (FusedAdam, lambda state: state["param_groups"][0]["params"].pop(), "size of optimizer's group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name):
    cls, spoil, message = WRONG[name]
    kw = {"momentum": 0.9} if cls is FusedSGD else {}
    model = net()
    opt = cls(model.parameters(), 1e-2, **kw)
    train(model, opt)
    spoiled = copy.deepcopy(opt.state_dict())
    train(model, opt)
    before = copy.deepcopy(opt.state_dict())
    spoil(spoiled)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(spoiled)
    assert same(opt.state_dict(), before)
    train(model, opt)


def test_the_groups_step_follows_torchs_state():
    """torch keeps steps with the parameters, onnxruntime-training with the group: what was loaded from one can be saved
    for the other."""
    model = net()
    theirs, ours = torch.optim.AdamW(model.parameters()), FusedAdam(net().parameters())
    train(model, theirs, 4)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict()["param_groups"][0]["step"] == 4


def test_the_state_of_another_optimizer_is_refused():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, sgd)
    with pytest.raises(ValueError, match="FusedAdam.*another optimizer"):
        FusedAdam(model.parameters()).load_state_dict(sgd.state_dict())


# --- a step that is refused ----------------------------------------------------------------------------


def dtensor():
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    return distribute_tensor(torch.ones(5), DeviceMesh("cpu", [0]), [Replicate()])


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


REFUSED = {
    "complex": (lambda: torch.ones(5, dtype=torch.complex64), "torch.complex64 .*allowed: float32"),
    "float8": (lambda: torch.ones(5).to(torch.float8_e4m3fn), "torch.float8_e4m3fn .*allowed: float32"),
    "meta": (lambda: torch.empty(5, device="meta"), "on meta; allowed: .* on cpu, cuda"),
    "expanded": (lambda: torch.ones(1).expand(5), "expanded.*clone it"),
    "sparse gradient": (lambda: torch.ones(5), "sparse gradients.*SparseAdam"),
}


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedSGD])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stepped_is_refused_and_nothing_changes(cls, name):
    """The group before the refused parameter has not moved either: the step can be repeated without it."""
    make, message = REFUSED[name]
    good, bad = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(make())
    opt = cls([{"params": [good]}, {"params": [bad]}])
    good.grad, bad.grad = torch.ones(3), torch.ones_like(bad)
    if name == "sparse gradient":
        bad.grad = bad.grad.to_sparse()
    with pytest.raises((RuntimeError, ValueError), match=message):
        opt.step()
    assert torch.equal(good.detach(), torch.ones(3))
    assert all("step" not in group for group in opt.param_groups)
    bad.grad = None
    opt.step()
    assert not torch.equal(good.detach(), torch.ones(3)) and opt.param_groups[0]["step"] == 1


def test_empty_parameters_may_have_any_strides():
    p = torch.nn.Parameter(torch.empty(2, 0, 5).as_strided((2, 0, 5), (0, 5, 0)))
    opt = FusedAdam([p])
    p.grad = torch.empty(2, 0, 5)
    opt.step()
    assert opt.state[p]["step"].item() == 1


def test_the_engine_refuses_tensors_without_memory(one_process):
    with pytest.raises(ValueError, match="DTensor.*to_local"):
        _C.norm([dtensor()], 2.0, False)


def test_a_model_that_becomes_bfloat16_later_gets_its_masters():
    for master in (True, "split"):
        model = net()
        opt = FusedAdam(model.parameters(), 1e-2, master_weights=master)
        train(model, opt)
        model.to(torch.bfloat16)
        train(model, opt)
        name = "master_weight" if master is True else "master_rest"
        assert all(name in state and state["exp_avg"].dtype == torch.float32 for state in opt.state.values())


# --- what the engine's lists do not take is torch's ------------------------------------------------------


@pytest.mark.parametrize("order", [0, -2.0, -math.inf, "inf", 0.5])
def test_clipping_by_any_order_is_torchs(order):
    ours, theirs = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    ours.grad = torch.tensor([3.0, -0.5, 2.0, 1.0])
    theirs.grad = ours.grad.clone()
    norm = clip_grad_norm_([ours], 0.25, order)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_([theirs], 0.25, order).item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)


ODD = {"complex": lambda: torch.randn(6, dtype=torch.complex64), "nine axes": lambda: torch.randn([2] * 9), "DTensor": dtensor}


@pytest.mark.parametrize("name", ODD)
def test_clipping_and_mixed_precision_around_torchs_optimizer_take_any_parameter(name, one_process):
    torch.manual_seed(0)
    start = ODD[name]()
    a, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours, theirs = FP16_Optimizer(torch.optim.AdamW([a], 0.1), loss_scaler=8.0), torch.optim.AdamW([b], 0.1)
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        ours.backward((a.abs() ** 3).sum())
        (b.abs() ** 3).sum().backward()
        clip_grad_norm_([a], 4.0)  # of the scaled gradients
        torch.nn.utils.clip_grad_norm_([b], 0.5)
        ours.step()
        theirs.step()
        assert not ours.overflow
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)
    ours.backward((a.abs() * math.inf).sum())
    ours.step()
    assert ours.overflow
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_a_loss_scaler_resumes_its_count():
    first, second = DynamicLossScaler(up_scale_window=3), DynamicLossScaler(up_scale_window=3)
    for _ in range(2):
        first.update(True)
    second.load_state_dict(first.state_dict())
    assert first.update(True) == second.update(True) == 2.0**17


# --- arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB])
def test_torchs_argument_order_is_noticed(cls):
    """AdamW(params, lr, betas) written with these classes: the third argument is bias_correction, as in the
    originals."""
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"bias_correction=\(0.9, 0.95\).*betas="):
        cls([p], 1e-3, (0.9, 0.95))
    for bad in (dict(betas=(0.9,)), dict(betas=0.9), dict(lr="1e-3"), dict(weight_decay=None), dict(eps="1e-8")):
        with pytest.raises((TypeError, ValueError)):
            cls([p], **bad)
    assert cls([p], 1e-3, 0).defaults["bias_correction"] == 0


def test_moment_dtype_float64_is_refused_at_once():
    with pytest.raises(ValueError, match="moment_dtype=torch.float64 given"):
        FusedAdam([torch.nn.Parameter(torch.ones(3))], moment_dtype=torch.float64)


# --- storage of the weights --------------------------------------------------------------------------------


def f32_weights(opt):
    """The exact weights: bits of the bfloat16 parameter and the int16 rest put together, or the f32 masters."""
    out = []
    for p, state in opt.state.items():
        if "master_rest" in state:
            out.append(((p.detach().view(torch.int16).to(torch.int32) << 16) + state["master_rest"]).view(torch.float32))
        else:
            out.append(state["master_weight"])
    return torch.cat([w.flatten() for w in out])


@pytest.mark.parametrize("source,target", [(True, "split"), ("split", True), (True, True), ("split", "split")])
def test_changing_the_form_of_masters_keeps_every_bit(source, target):
    model, other = net(torch.bfloat16), net(torch.bfloat16)
    first = FusedAdam(model.parameters(), 1e-3, master_weights=source)
    train(model, first)
    other.load_state_dict(model.state_dict())
    second = FusedAdam(other.parameters(), 1e-3, master_weights=target)
    second.load_state_dict(first.state_dict())
    assert torch.equal(f32_weights(first), f32_weights(second))
    assert not torch.equal(f32_weights(first), f32_weights(first).bfloat16().float())  # there are bits to lose


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedSGD])
def test_moments_have_the_type_that_was_asked_for(cls):
    for dtype, asked, got in (
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
    ):
        model = net(dtype)
        opt = cls(model.parameters(), moment_dtype=asked, **({"momentum": 0.9} if cls is FusedSGD else {}))
        train(model, opt)
        for _ in range(2):
            assert {v.dtype for state in opt.state.values() for k, v in state.items() if k != "step"} == {got}
            opt.load_state_dict(opt.state_dict())


def test_stochastic_rounding_of_float16_is_refused():
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.float16))
    opt = FusedAdam([p], stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="float16 and stochastic_rounding.*master_weights"):
        opt.step()


def test_stochastic_rounding_draws_anew_every_step():
    """Steps of a quarter of the distance to the next bfloat16: with the same draw every time three quarters would never
    move."""
    p = torch.nn.Parameter(torch.ones(4001, dtype=torch.bfloat16))
    opt = FusedSGD([p], 1.0, stochastic_rounding=True)
    p.grad = torch.full((4001,), -(2**-9), dtype=torch.bfloat16)
    for _ in range(40):
        opt.step()
    moved = (p.detach().float() - 1) * 2**7
    assert (moved == 0).sum() < 20  # expected: 4001 * 0.75^40 = 0.04
    assert moved.mean().item() == pytest.approx(10, abs=5 * (40 * 0.25 * 0.75 / 4001) ** 0.5)


LAMB_OPTIONS = {  # option -> what it means to the reference of LambOptimizer
    "no decay, no ratio": (dict(weight_decay=0.0), dict(wd=0.0, ratio_min=1.0, ratio_max=1.0)),
    "no decay, nvlamb": (dict(weight_decay=0.0, use_nvlamb=True), dict(wd=0.0)),
    "no averaging": (dict(weight_decay=0.1, grad_averaging=False), dict(wd=0.1, g_weight=1.0)),
    "l2": (dict(weight_decay=0.1, adam_w_mode=False), dict(wd=0.0)),
    "no bias correction": (dict(weight_decay=0.1, bias_correction=False), dict(wd=0.1, bias=False)),
    "ratio_min": (dict(weight_decay=0.1, ratio_min=7.0), dict(wd=0.1, ratio_min=7.0)),
    "maximize": (dict(weight_decay=0.1, maximize=True), dict(wd=0.1, scale=-1.0)),
}


@pytest.mark.parametrize("name", LAMB_OPTIONS)
def test_lamb_options_match_the_reference(name):
    kw, meaning = LAMB_OPTIONS[name]
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(19, 3, dtype=torch.float64))
    opt = FusedLAMB([p], 0.01, betas=(0.8, 0.99), eps=1e-4, max_grad_norm=None, keep_grads=True, **kw)
    w, m, v = p.detach().numpy().copy(), np.zeros((19, 3)), np.zeros((19, 3))
    for step in range(1, 5):
        p.grad = torch.randn(19, 3, dtype=torch.float64)
        g = p.grad.numpy() + (0.1 * w if name == "l2" else 0.0)
        w, m, v, _ = reference.lamb(w, g, m, v, step, lr=0.01, b1=0.8, b2=0.99, eps=1e-4, **meaning)
        opt.step()
    np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-11)


@pytest.mark.parametrize("mode", range(4))
def test_adam_settings_of_a_group_match_the_reference(mode):
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(19, 3, dtype=torch.float64)) for _ in range(2)]
    special = dict(lr=0.003, betas=(0.5, 0.9), eps=1e-2, weight_decay=0.3, bias_correction=False, maximize=True)
    opt = FusedAdam([{"params": ps[:1]}, {"params": ps[1:], **special}], 0.01, True, (0.8, 0.99), 1e-4, mode, 0.1)
    settings = [dict(lr=0.01, b1=0.8, b2=0.99, eps=1e-4, wd=0.1), dict(lr=0.003, b1=0.5, b2=0.9, eps=1e-2, wd=0.3, bias=False)]
    rows = [(p.detach().numpy().copy(), np.zeros((19, 3)), np.zeros((19, 3))) for p in ps]
    for step in range(1, 6):
        for i, (p, sign) in enumerate(zip(ps, (1, -1))):
            p.grad = torch.randn(19, 3, dtype=torch.float64)
            w, m, v = rows[i]
            rows[i] = reference.adam(w, sign * p.grad.numpy(), m, v, step, mode=mode, **settings[i])
        opt.step()
    for p, (w, _, _) in zip(ps, rows):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-11)
