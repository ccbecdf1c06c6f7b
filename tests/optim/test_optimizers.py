"""FusedAdam, FusedLAMB, FusedSGD as torch optimizers: curves, state dicts both ways, schedulers, GradScaler, clipping,
odd groups."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import optim_reference as reference
import pytest
import torch

from ortmodule.optim import AdamWMode, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_


def net(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 11), torch.nn.LayerNorm(11), torch.nn.Linear(11, 5)]
    return torch.nn.Sequential(*layers).to(dtype)


def train(model, opt, steps, seed=3, scheduler=None, clip=None):
    gen = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        x, y = torch.randn(17, 7, generator=gen).to(dtype), torch.randn(17, 5, generator=gen).to(dtype)
        opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        if clip:
            clip(model.parameters(), 0.05)
        opt.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


PAIRS = {
    "adamw": (
        lambda p: FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    ),
    "adam": (
        lambda p: FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=AdamWMode.ADAM_TORCH, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    ),
    "adamw maximize": (
        lambda p: FusedAdam(p, 1e-4, eps=1e-8, adam_w_mode=2, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.1, maximize=True),
    ),
    "sgd": (lambda p: FusedSGD(p, 1e-2), lambda p: torch.optim.SGD(p, 1e-2)),
    "sgd momentum": (lambda p: FusedSGD(p, 1e-2, 0.9, 0.1, 0.01), lambda p: torch.optim.SGD(p, 1e-2, 0.9, 0.1, 0.01)),
    "sgd nesterov": (
        lambda p: FusedSGD(p, 1e-2, 0.9, 0, 0.01, True),
        lambda p: torch.optim.SGD(p, 1e-2, 0.9, 0, 0.01, True),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype,tol", [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_curve_of_200_steps_equals_torchs(name, dtype, tol):
    a, b = net(dtype), net(dtype)
    ours, theirs = train(a, PAIRS[name][0](a.parameters()), 200), train(b, PAIRS[name][1](b.parameters()), 200)
    np.testing.assert_allclose(ours, theirs, rtol=tol)
    assert ours[-1] != ours[0]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("direction", ["ours to torch", "torch to ours"])
def test_state_dicts_go_both_ways(name, direction):
    make = PAIRS[name] if direction == "ours to torch" else PAIRS[name][::-1]
    a, b = net(torch.float64), net(torch.float64)
    first = make[0](a.parameters())
    train(a, first, 7)
    b.load_state_dict(a.state_dict())
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = make[1](b.parameters())
    second.load_state_dict(torch.load(buffer, weights_only=True))
    ours, theirs = train(a, first, 20, seed=4), train(b, second, 20, seed=4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-11)
    for p, q in zip(a.parameters(), b.parameters()):
        if "step" in first.state[p] and "step" in second.state[q]:
            assert first.state[p]["step"].item() == second.state[q]["step"].item() == 27


MAKERS = {
    "adam": lambda p, **k: FusedAdam(p, 1e-2, weight_decay=0.1, **k),
    "lamb": lambda p, **k: FusedLAMB(p, 1e-2, **k),
    "sgd": lambda p, **k: FusedSGD(p, 1e-2, 0.9, **k),
}
STORES = {
    "f32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "f16 master": (torch.float16, dict(master_weights=True)),
    "bf16 split": (torch.bfloat16, dict(master_weights="split")),
    "bf16 stochastic": (torch.bfloat16, dict(stochastic_rounding=True)),
    "bf16 moments": (torch.bfloat16, dict(moment_dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("store", STORES)
def test_interrupt_and_resume_gives_the_same_bits(maker, store):
    dtype, kw = STORES[store]
    a, b = net(dtype), net(dtype, seed=9)
    first = MAKERS[maker](a.parameters(), **kw)
    train(a, first, 5)
    buffer = io.BytesIO()
    torch.save({"model": a.state_dict(), "opt": first.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    second = MAKERS[maker](b.parameters(), **kw)
    b.load_state_dict(saved["model"])
    second.load_state_dict(saved["opt"])
    train(a, first, 5, seed=8)
    train(b, second, 5, seed=8)
    assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("source", [True, "split"])
@pytest.mark.parametrize("target", [True, "split"])
def test_master_weights_change_form_on_loading(source, target):
    a, b = net(torch.bfloat16), net(torch.bfloat16, seed=9)
    first = FusedAdam(a.parameters(), 1e-2, master_weights=source)
    train(a, first, 5)
    b.load_state_dict(a.state_dict())
    second = FusedAdam(b.parameters(), 1e-2, master_weights=target)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(a, first, 3, seed=8)
    train(b, second, 3, seed=8)
    # the split form rounds halves up, the copy to even: equal masters, parameters equal up to ties
    assert (weights(a) - weights(b)).abs().max() <= 2**-7 * weights(a).abs().max()
    if source == target:
        assert torch.equal(weights(a), weights(b))


def test_onnxruntime_training_layout():
    """State of onnxruntime-training's FusedAdam: step in the group, not in the state; defaults eps 1e-6, mode 1."""
    model = net(torch.float64)
    opt = FusedAdam(model.parameters(), 1e-2, weight_decay=0.01)
    assert opt.defaults["eps"] == 1e-6 and opt._adam_w_mode == AdamWMode.ADAMW_TRANSFORMERS and opt.defaults["bias_correction"] is True
    train(model, opt, 4)
    state = opt.state_dict()
    assert state["param_groups"][0]["step"] == 4
    assert {"lr", "bias_correction", "betas", "eps", "weight_decay", "step", "params"} <= set(state["param_groups"][0])
    theirs = copy.deepcopy(state)
    for entry in theirs["state"].values():
        del entry["step"]
    other = net(torch.float64)
    other.load_state_dict(model.state_dict())
    opt2 = FusedAdam(other.parameters(), 1.0)
    opt2.load_state_dict(theirs)
    train(model, opt, 3, seed=5)
    train(other, opt2, 3, seed=5)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("mode", range(4))
def test_adam_object_matches_reference(mode):
    p = torch.nn.Parameter(torch.randn(19, 3, dtype=torch.float64))
    opt = FusedAdam([p], 0.01, True, (0.8, 0.99), 1e-4, mode, 0.1)
    ref, m, v = p.detach().numpy().copy(), np.zeros((19, 3)), np.zeros((19, 3))
    for step in range(1, 6):
        p.grad = torch.randn(19, 3, dtype=torch.float64)
        ref, m, v = reference.adam(ref, p.grad.numpy(), m, v, step, lr=0.01, b1=0.8, b2=0.99, eps=1e-4, wd=0.1, mode=mode)
        opt.step()
    np.testing.assert_allclose(p.detach().numpy(), ref, rtol=1e-11)


@pytest.mark.parametrize("limit", [0.5, None])
def test_lamb_object_matches_reference(limit):
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in ((19, 3), (7,))]
    opt = FusedLAMB(ps, 0.01, True, (0.8, 0.99), 1e-4, 0.1, max_grad_norm=limit, ratio_max=2.5)
    ref = [(p.detach().numpy().copy(), np.zeros(p.shape), np.zeros(p.shape)) for p in ps]
    for step in range(1, 6):
        for p in ps:
            p.grad = torch.randn_like(p)
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in ps))
        scale = reference.lamb_scale(1.0, norm, limit)
        kw = dict(lr=0.01, b1=0.8, b2=0.99, eps=1e-4, wd=0.1, scale=scale, ratio_max=2.5)
        ref = [reference.lamb(w, p.grad.numpy(), m, v, step, **kw)[:3] for p, (w, m, v) in zip(ps, ref)]
        opt.step()
        assert limit is None or opt.last_grad_norm == pytest.approx(norm, rel=1e-12)
    for p, (w, _, _) in zip(ps, ref):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-11)


def test_lamb_leaves_out_a_step_whose_norm_is_not_finite():
    p = torch.nn.Parameter(torch.randn(19))
    opt = FusedLAMB([p], 0.01)
    p.grad = torch.randn(19)
    opt.step()
    before, state = p.detach().clone(), copy.deepcopy(opt.state_dict())
    p.grad = torch.full((19,), math.inf)
    opt.step()
    assert torch.equal(p, before)
    after = opt.state_dict()
    assert after["state"][0]["step"] == state["state"][0]["step"] == 1
    assert torch.equal(after["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.parametrize("maker", MAKERS)
def test_grad_scaler(maker):
    """The scaler hands over scale and flag: same weights as without it, overflowed steps left out, gradients not
    rewritten."""
    a, b = net(), net()
    plain, fused = MAKERS[maker](a.parameters()), MAKERS[maker](b.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gen = torch.Generator().manual_seed(0)
    for step in range(6):
        x, y = torch.randn(17, 7, generator=gen), torch.randn(17, 5, generator=gen)
        for p in (*a.parameters(), *b.parameters()):
            p.grad = None
        if step != 3:
            ((a(x) - y) ** 2).mean().backward()
            plain.step()
        loss = scaler.scale(((b(x) - y) ** 2).mean())
        loss.backward()
        if step == 3:
            b[0].weight.grad[0, 0] = math.inf
        seen = b[2].weight.grad.clone()
        scaler.step(fused)
        if maker != "lamb":
            assert torch.equal(b[2].weight.grad, seen)
        scaler.update()
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(weights(a), weights(b), rtol=1e-5, atol=1e-6)
    assert fused.param_groups[0]["step"] == 5 and all(s["step"].item() == 5 for s in fused.state.values() if maker != "sgd")


def test_works_under_schedulers_and_clipping():
    a, b = net(torch.float64), net(torch.float64)
    ours, theirs = PAIRS["adamw"][0](a.parameters()), PAIRS["adamw"][1](b.parameters())
    make = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=40, cycle_momentum=True)  # noqa: E731
    x = train(a, ours, 30, scheduler=make(ours), clip=clip_grad_norm_)
    y = train(b, theirs, 30, scheduler=make(theirs), clip=torch.nn.utils.clip_grad_norm_)
    np.testing.assert_allclose(x, y, rtol=1e-10)


def test_groups_with_own_settings_and_tensor_lr():
    a, b = net(torch.float64), net(torch.float64)

    def groups(m):
        return [{"params": m[0].parameters(), "lr": 0.003, "weight_decay": 0.0}, {"params": [*m[2].parameters(), *m[4].parameters()]}]

    ours = FusedAdam(groups(a), torch.tensor(0.01, dtype=torch.float64), eps=1e-8, adam_w_mode=2, weight_decay=0.2, betas=(0.8, 0.9))
    theirs = torch.optim.AdamW(groups(b), 0.01, (0.8, 0.9), weight_decay=0.2)
    ours.add_param_group({"params": a[3].parameters(), "betas": (0.5, 0.6)})
    theirs.add_param_group({"params": b[3].parameters(), "betas": (0.5, 0.6)})
    np.testing.assert_allclose(train(a, ours, 20), train(b, theirs, 20), rtol=1e-11)


def test_parameters_that_get_gradients_later_count_their_own_steps():
    ps, qs = [[torch.nn.Parameter(torch.ones(3, dtype=torch.float64) * k) for k in (1, 2)] for _ in range(2)]
    ours, theirs = PAIRS["adamw"][0](ps), PAIRS["adamw"][1](qs)
    for step in range(6):
        for p, q in zip(ps, qs):
            p.grad = q.grad = None
        for i in range(2):
            if i == 0 or step >= 3:
                ps[i].grad = torch.full((3,), 0.1 * (step + 1), dtype=torch.float64)
                qs[i].grad = ps[i].grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(ps, qs):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


def test_refusals():
    p = torch.nn.Parameter(torch.randn(5, 3))
    opt = FusedAdam([p])
    p.grad = torch.randn(5, 3).to_sparse()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        opt.step()
    with pytest.raises(ValueError, match="amsgrad"):
        FusedLAMB([p], amsgrad=True)
    amsgrad = torch.optim.AdamW([p], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdam([p]).load_state_dict(amsgrad)
    for bad in (dict(lr=-1), dict(betas=(1.0, 0.9)), dict(eps=-1), dict(weight_decay=-1), dict(adam_w_mode=7), dict(master_weights="x")):
        with pytest.raises(ValueError):
            FusedAdam([p], **bad)
    with pytest.raises(ValueError, match="one of the two"):
        FusedAdam([p], master_weights=True, stochastic_rounding=True)


def test_in_place_update_is_seen_by_autograd():
    p = torch.nn.Parameter(torch.randn(5))
    opt = FusedAdam([p])
    loss = (p * p).sum()
    p.grad = torch.ones(5)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_zero_grad_rules():
    p = torch.nn.Parameter(torch.randn(5))
    for none, argument, result in ((True, False, None), (False, True, None), (False, False, 0.0)):
        opt = FusedAdam([p], set_grad_none=none)
        p.grad = torch.ones(5)
        opt.zero_grad(set_to_none=argument)
        assert p.grad is None if result is None else p.grad.sum().item() == 0


def test_closure_and_hooks():
    p = torch.nn.Parameter(torch.tensor([2.0]))
    opt = FusedSGD([p], 0.1)
    seen = []
    opt.register_step_post_hook(lambda *_: seen.append(1))

    def closure():
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 4.0
    assert p.item() == pytest.approx(1.6) and seen == [1]


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_clip_grad_norm(order, limit):
    torch.manual_seed(0)
    # torch refuses inf of nothing
    ps = [torch.nn.Parameter(torch.randn(s)) for s in ((13, 17), (5,), ()) + ((0,),) * (order != math.inf)]
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    for p, q in zip(ps, qs):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    a, b = clip_grad_norm_(ps, limit, order), torch.nn.utils.clip_grad_norm_(qs, limit, order)
    torch.testing.assert_close(a, b)
    for p, q in zip(ps, qs):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-6, atol=0)


def test_clip_grad_norm_with_bad_gradients_and_scale():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, math.nan, 2.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(p, 1.0).isnan() and p.grad.isnan().all()
    p.grad = torch.tensor([3.0, 0.0, 4.0]) * 64
    assert clip_grad_norm_(p, 1.0, loss_scale=64.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.0, 0.8]), rtol=1e-5, atol=0)
    p.grad = None
    assert clip_grad_norm_([p], 1.0).item() == 0.0


def test_deepcopy_and_pickle():
    model = net()
    opt = FusedAdam(model.parameters(), 1e-2)
    train(model, opt, 2)
    twin_model, twin = copy.deepcopy((model, opt))
    train(model, opt, 2, seed=6)
    train(twin_model, twin, 2, seed=6)
    assert torch.equal(weights(model), weights(twin_model))
