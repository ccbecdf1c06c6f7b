"""What torch promises of its optimizers: schedulers, GradScaler, hooks, copies, checkpoints; every state dict loads or
is refused with a reason."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler as L
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import SWALR

from ortmodule.optim import AdamWMode, FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).to(dtype)


def give_gradients(model, t):
    gen = torch.Generator().manual_seed(t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)


def train(model, opt, steps=3):
    for k in range(steps):
        give_gradients(model, k)
        opt.step()


def same(a, b):
    """Two state dicts hold the same."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def adam(p, lr=1e-2, **more):
    return FusedAdam(p, lr, eps=1e-8, adam_w_mode=2, weight_decay=0.01, **more)


def adamw(p, lr=1e-2):
    return torch.optim.AdamW(p, lr)


OURS = {  # ours, torch's
    "adam": (adam, adamw),
    "sgd": (lambda p, lr=1e-2: FusedSGD(p, lr, 0.9), lambda p, lr=1e-2: torch.optim.SGD(p, lr, 0.9)),
    "lamb": (lambda p, lr=1e-2: FusedLAMB(p, lr, max_grad_norm=None), None),
    "fp16 adam": (lambda p, lr=1e-2: FP16_Optimizer(adam(p, lr)), adamw),
    "fp16 adamw": (lambda p, lr=1e-2: FP16_Optimizer(adamw(p, lr)), adamw),
    "fp16 sgd": (lambda p, lr=1e-2: FP16_Optimizer(FusedSGD(p, lr, 0.9)), lambda p, lr=1e-2: torch.optim.SGD(p, lr, 0.9)),
}

SCHEDULERS = {
    "LambdaLR": lambda o: L.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: L.StepLR(o, 2),
    "MultiStepLR": lambda o: L.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: L.ConstantLR(o),
    "LinearLR": lambda o: L.LinearLR(o),
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.1, 2), L.ExponentialLR(o, 0.9)], [2]),
    "PolynomialLR": lambda o: L.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.1, 2), L.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: L.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: L.CyclicLR(o, 1e-3, 1e-2, 2),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: L.OneCycleLR(o, 1e-2, 10),
    "SWALR": lambda o: SWALR(o, 0.05),
}


def test_every_scheduler_of_torch_is_in_the_table():
    classes = {c.__name__ for c in vars(L).values() if inspect.isclass(c) and issubclass(c, L.LRScheduler) and c is not L.LRScheduler}
    assert classes - {"_LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize(
    "lr", [1e-2, torch.tensor(1e-2), torch.tensor([1e-2], dtype=torch.float64)], ids=["number", "tensor", "f64 tensor of sizes [1]"]
)
@pytest.mark.parametrize("name", OURS)
def test_schedulers(name, lr):
    make, oracle = OURS[name]
    for scheduler, start in SCHEDULERS.items():
        a, b = net(), net()
        ours, theirs = make(a.parameters(), copy.copy(lr)), (oracle or adamw)(b.parameters(), float(lr))
        both = start(ours), start(theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "step() before optimizer.step()", if the scheduler did not see ours
            for t in range(7):
                for model, opt, schedule in ((a, ours, both[0]), (b, theirs, both[1])):
                    give_gradients(model, t)
                    opt.step()
                    if scheduler == "ReduceLROnPlateau":
                        schedule.step(1.0)
                    else:
                        schedule.step()
                assert float(ours.param_groups[0]["lr"]) == pytest.approx(float(theirs.param_groups[0]["lr"]), rel=1e-6), scheduler
                for key in ("betas", "momentum"):  # what CyclicLR and OneCycleLR move
                    if oracle and key in theirs.param_groups[0]:
                        assert ours.param_groups[0][key] == theirs.param_groups[0][key], scheduler
        if oracle:
            torch.testing.assert_close(flat(a), flat(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name,clip", [(n, c) for n in OURS for c in ("no", "unscale_", "clip_master_grads") if "fp16" in n or c != "clip_master_grads"]
)
def test_grad_scaler(name, clip):
    """Against the optimizer itself on unscaled gradients, with inf in step 3."""
    make = OURS[name][0]
    model, twin = net(), net()
    opt, oracle = make(model.parameters()), make(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for t in range(6):
        give_gradients(twin, t)
        for p, q in zip(model.parameters(), twin.parameters()):
            p.grad = q.grad * scaler._scale if t else scaler.scale(q.grad)
        if t == 3:
            model[0].weight.grad[1, 1] = math.inf
        if clip == "unscale_":
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif clip == "clip_master_grads":
            opt.clip_master_grads(0.05 * scaler.get_scale())
        scaler.step(opt)
        scaler.update()
        assert not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")
        if t != 3:
            if clip != "no":
                torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            oracle.step()
    assert scaler.get_scale() == 128.0
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_hooks(name):
    first = net()
    pair = first, OURS[name][0](first.parameters())
    for model, opt in (pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        seen = []
        for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            getattr(opt, f"register_{kind}_hook")(lambda *_, kind=kind, seen=seen: seen.append(kind))
        everyone = register_optimizer_step_post_hook(lambda *_, seen=seen: seen.append("global"))
        give_gradients(model, 0)
        opt.step()
        opt.load_state_dict(opt.state_dict())
        opt.step()
        everyone.remove()
        states = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
        assert seen == ["step_pre", "step_post", "global", *states, "step_pre", "step_post", "global"]
        if "fp16" in name:  # none for a step that is left out
            opt.backward((model[0].weight * math.inf).sum())
            opt.step()
            assert len(seen) == 10


@pytest.mark.parametrize("name", OURS)
def test_a_closure_may_clip(name):
    """Lightning clips in the closure, and asks the optimizer whether it may (whether it leaves unscaling to others)."""
    model, twin = net(), net()
    opt, oracle = OURS[name][0](model.parameters()), OURS[name][0](twin.parameters())
    asked = []

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(3, 7)).square().sum()
        loss.backward()
        asked.append(getattr(opt, "_step_supports_amp_scaling", False))
        clip_grad_norm_(model.parameters(), 0.1)
        return loss

    before = getattr(opt, "_step_supports_amp_scaling", False)
    for _ in range(2):
        opt.step(closure)
        oracle.zero_grad()
        twin(torch.ones(3, 7)).square().sum().backward()
        clip_grad_norm_(twin.parameters(), 0.1)
        oracle.step()
    assert asked == [False, False] and getattr(opt, "_step_supports_amp_scaling", False) == before
    assert torch.equal(flat(model), flat(twin))


def test_zero_grad_keeps_gradients_only_when_both_say_so():
    model = net()
    for make in (FusedAdam, FusedLAMB, FusedSGD):
        opt = make(model.parameters(), set_grad_none=False)
        give_gradients(model, 0)
        held = model[0].weight.grad
        opt.zero_grad(set_to_none=False)
        assert model[0].weight.grad is held and not held.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_copies(name, dtype):
    """deepcopy and pickle of model and optimizer together: the copy goes on with the same bits."""
    model = net(dtype)
    opt = OURS[name][0](model.parameters())
    schedule = L.StepLR(opt, 1)  # puts a wrapper of step() on the optimizer
    give_gradients(model, 0)
    opt.step()
    copies = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    assert schedule.optimizer is opt
    give_gradients(model, 1)
    opt.step()
    for twin, other in copies:
        assert type(other) is type(opt)
        give_gradients(twin, 1)
        other.step()
        assert torch.equal(flat(model), flat(twin))
        if "fp16" in name:
            other.loss_scale = 8.0
            assert opt.loss_scale == 2.0**16 and other.steps == opt.steps == 2


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd", "lamb"])
def test_distributed_checkpoint_state_dict(name, flatten):
    model, twin = net(), net()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    opt, other = OURS[name][0](model.parameters()), OURS[name][0](twin.parameters())
    give_gradients(model, 0)
    opt.step()
    state = saved(get_optimizer_state_dict(model, opt, options=options))
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, state, options=options)
    for m, o in ((model, opt), (twin, other)):
        give_gradients(m, 1)
        o.step()
    assert torch.equal(flat(model), flat(twin))


SOURCES = {
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, foreach=False),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), weight_decay=0.1, foreach=False),
    "named": lambda p: torch.optim.AdamW([(str(i), x) for i, x in enumerate(p)], 1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    "decoupled Adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("source", SOURCES)
def test_states_of_torch_load_both_ways(source):
    model, twin = net(torch.float64), net(torch.float64)
    theirs = SOURCES[source](model.parameters())
    mode = AdamWMode.ADAM_TORCH if source == "Adam" else AdamWMode.ADAMW_TORCH
    ours = FusedAdam(twin.parameters(), adam_w_mode=mode)
    give_gradients(model, 0)
    theirs.step()
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.load_state_dict(saved(theirs.state_dict()))
    back = net(torch.float64)
    third = SOURCES[source](back.parameters())
    for m, o in ((model, theirs), (twin, ours)):
        give_gradients(m, 1)
        o.step()
    back.load_state_dict(twin.state_dict())
    third.load_state_dict(saved(ours.state_dict()))
    for m, o in ((model, theirs), (back, third)):
        give_gradients(m, 2)
        o.step()
    torch.testing.assert_close(flat(model), flat(back), rtol=1e-7, atol=1e-9)  # the tensor lr is float32


@pytest.mark.parametrize("source,mode", [("Adam", AdamWMode.ADAMW_TORCH), ("loop", AdamWMode.ADAM_TORCH), ("Adam", AdamWMode.ADAMW_TRANSFORMERS)])
def test_weight_decay_of_another_kind_is_said(source, mode):
    model = net()
    theirs = SOURCES[source](model.parameters())
    opt = FusedAdam(model.parameters(), adam_w_mode=mode)
    with pytest.warns(UserWarning, match="pass adam_w_mode=AdamWMode." + ("ADAM_TORCH" if source == "Adam" else "ADAMW_TORCH")):
        opt.load_state_dict(theirs.state_dict())
    # what is saved from now on tells torch.optim.Adam the truth
    twin = torch.optim.Adam(model.parameters())
    twin.load_state_dict(opt.state_dict())
    assert twin.param_groups[0]["decoupled_weight_decay"] == (mode != AdamWMode.ADAM_TORCH)


@pytest.mark.parametrize(
    "make,reason",
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9), "no exp_avg, exp_avg_sq, only momentum_buffer"),
        (lambda p: torch.optim.RMSprop(p), "square_avg"),
        (lambda p: torch.optim.Adamax(p), "no exp_avg_sq"),
    ],
)
def test_states_of_other_optimizers_are_refused(make, reason):
    model = net()
    other = make(model.parameters())
    give_gradients(model, 0)
    other.step()
    for ours in (FusedAdam(model.parameters()), FusedLAMB(model.parameters())):
        before = ours.state_dict()
        with pytest.raises(ValueError, match=reason):
            ours.load_state_dict(other.state_dict())
        assert ours.state_dict() == before


def test_tensors_without_memory_are_refused():
    p = torch.nn.Parameter(torch.randn(5))
    p.grad = torch.ones(5)
    p.untyped_storage().resize_(0)  # as FSDP1 leaves parameters that it has gathered and freed
    with pytest.raises(ValueError, match="without memory"):
        FusedAdam([p]).step()


# --- loading a state ------------------------------------------------------------------------------------


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
