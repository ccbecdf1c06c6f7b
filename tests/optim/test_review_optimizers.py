"""Odd but legal uses of the optimizers, and refusals: what fails says why and leaves everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from ortmodule.optim import FusedAdam, FusedLAMB, FusedSGD


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
    """torch's documented way to adapt a checkpoint is a pre-hook: what it returns is loaded, and post-hooks see the result."""
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


def test_the_state_of_another_optimizer_is_refused():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, sgd)
    with pytest.raises(ValueError, match="FusedAdam.*another optimizer"):
        FusedAdam(model.parameters()).load_state_dict(sgd.state_dict())
