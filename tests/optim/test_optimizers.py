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


# --- complex parameters: pairs of reals ---------------------------------------------------------------------


def mixed() -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(4, 3, dtype=torch.complex64, generator=g), torch.randn(5, generator=g),
            torch.randn(3, 7, dtype=torch.complex128, generator=g).t(), torch.randn(2, 2, dtype=torch.float64, generator=g)]  # fmt: skip
    return [torch.nn.Parameter(t) for t in made]


TWINS = {
    "AdamW": (lambda p: FusedAdam(p, 1e-2, adam_w_mode=AdamWMode.ADAMW_TORCH, eps=1e-8, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
    "Adam": (lambda p: FusedAdam(p, 1e-2, adam_w_mode=AdamWMode.ADAM_TORCH, eps=1e-8, weight_decay=0.1), lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1)),
    "masters": (lambda p: FusedAdam(p, 1e-2, adam_w_mode=AdamWMode.ADAMW_TORCH, eps=1e-8, master_weights=True, maximize=True),
                lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0, maximize=True)),
    "SGD": (lambda p: FusedSGD(p, 1e-2), lambda p: torch.optim.SGD(p, 1e-2)),
    "momentum": (lambda p: FusedSGD(p, 1e-2, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_complex_parameters(seeded, twin):
    """With real ones in a group; missing and conjugated gradients; the states of both optimizers exchanged midway."""
    ours, torchs = mixed(), mixed()
    a, b = TWINS[twin][0](ours), TWINS[twin][1](torchs)
    for step in range(5):
        for x, y in zip(ours, torchs, strict=True):
            g = None if step == 2 and x.dim() == 2 else torch.randn(x.shape, dtype=x.dtype)
            x.grad, y.grad = (g, g) if g is None else (g.conj() if step == 3 else g.clone(), g.conj().resolve_conj() if step == 3 else g.clone())
        a.step()
        b.step()
        for x, y in zip(ours, torchs, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)
        if step == 1:
            of_a, of_b = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            a.load_state_dict(of_b)
            b.load_state_dict({"state": of_a["state"], "param_groups": of_b["param_groups"]})


@pytest.mark.parametrize("limit", [None, 0.5])
def test_complex_parameters_in_lamb(seeded, limit):
    """The norms of complex tensors are those of their parts."""
    ours = mixed()
    parts = [torch.nn.Parameter((torch.view_as_real(p.detach()) if p.is_complex() else p.detach()).clone()) for p in ours]
    a, b = FusedLAMB(ours, 1e-2, max_grad_norm=limit), FusedLAMB(parts, 1e-2, max_grad_norm=limit)
    for _ in range(3):
        for x, y in zip(ours, parts, strict=True):
            x.grad = torch.randn_like(x)
            y.grad = (torch.view_as_real(x.grad) if x.is_complex() else x.grad).clone()
        a.step()
        b.step()
        for x, y in zip(ours, parts, strict=True):
            assert torch.equal(torch.view_as_real(x) if x.is_complex() else x, y)


# --- a step that is refused ------------------------------------------------------------------------------


REFUSED = {
    "complex halves": (lambda: torch.ones(5, dtype=torch.complex32), "torch.complex32 .*allowed: float32"),
    "conjugated": (lambda: torch.ones(5, dtype=torch.complex64).conj(), "conjugated lazily.*resolve_conj"),
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


def test_a_model_that_becomes_bfloat16_later_gets_its_masters():
    for master in (True, "split"):
        model = net()
        opt = FusedAdam(model.parameters(), 1e-2, master_weights=master)
        train(model, opt, 3)
        model.to(torch.bfloat16)
        train(model, opt, 3)
        name = "master_weight" if master is True else "master_rest"
        assert all(name in state and state["exp_avg"].dtype == torch.float32 for state in opt.state.values())


@pytest.mark.parametrize("order", [0, -2.0, -math.inf, "inf", 0.5])
def test_clipping_by_any_order_is_torchs(order):
    ours, theirs = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    ours.grad = torch.tensor([3.0, -0.5, 2.0, 1.0])
    theirs.grad = ours.grad.clone()
    norm = clip_grad_norm_([ours], 0.25, order)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_([theirs], 0.25, order).item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)


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
    train(model, first, 3)
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
        train(model, opt, 3)
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
