"""step_in_backward beside ordinary steps: the same bits, with eager and in the engine; what cannot be had raises."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from small_models import gpt2
from torch import Tensor, nn

from ortmodule import _C, ORTModule
from ortmodule.optim import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, step_in_backward

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "FusedAdam": lambda p: FusedAdam(p, 1e-2, weight_decay=0.1),
    "FusedSGD": lambda p: FusedSGD(p, 1e-2, momentum=0.9),
    "FusedLAMB": lambda p: FusedLAMB(p, 1e-2, max_grad_norm=None),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def groups(model: nn.Module) -> list[dict]:
    decays = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": decays}, {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 3e-3}]


def train(model: nn.Module, make: Make, inside: bool, steps: int = 4, saved: dict | None = None) -> tuple[list, dict]:
    optimizer = make(groups(model))  # type: ignore[arg-type]
    if saved is not None:
        optimizer.load_state_dict(saved)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    if inside:
        step_in_backward(optimizer)
    losses = []
    for i in range(steps):
        ids = torch.randint(0, 211, (2, 13), generator=torch.Generator().manual_seed(i))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all((p.grad is None) == inside for p in model.parameters())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrap", [None, {}, {"segment_mb": 1e-5}, {"segment_mb": 0.05, "memory_opt_level": 1}],
                         ids=["eager", "engine", "many segments", "level 1"])  # fmt: skip
def test_the_bits_of_ordinary_steps(name: str, wrap: dict | None) -> None:
    """A tied head, two groups, a schedule, dropout, the state of the optimizer."""
    torch.manual_seed(0)
    model = gpt2(resid_pdrop=0.1)
    found = []
    for inside in (False, True):
        own: nn.Module = copy.deepcopy(model)
        if wrap is not None:
            own = ORTModule(own, strict="engine", **wrap)
        torch.manual_seed(1)
        losses, state = train(own, OPTIMIZERS[name], inside)
        found.append((losses, [p.detach() for p in own.parameters()], state))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2]["param_groups"] == found[1][2]["param_groups"]
    for k, state in found[0][2]["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[1][2]["state"][k][key])), (k, key)


@pytest.mark.parametrize("options", [{"master_weights": True}, {"master_weights": "split"}])
def test_bfloat16_parameters(options: dict) -> None:
    torch.manual_seed(0)
    model = gpt2().bfloat16()
    both = []
    for inside in (False, True):
        own = ORTModule(copy.deepcopy(model), segment_mb=0.02)
        torch.manual_seed(1)
        losses, state = train(own, lambda p: FusedAdam(p, 1e-2, **options), inside)
        losses += train(own, lambda p: FusedAdam(p, 1e-2, **options), inside, saved=state)[0]  # goes on
        both.append((losses, [p.detach() for p in own.parameters()]))
    assert both[0][0] == both[1][0]
    assert all(torch.equal(a, b) for a, b in zip(both[0][1], both[1][1], strict=True))


def test_random_rounding_is_each_parameters_own() -> None:
    """Two parameters with the same weights and gradients are not rounded alike."""
    a, b = (nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2))
    torch.manual_seed(0)
    optimizer = FusedAdam([a, b], 1e-3, stochastic_rounding=True)
    step_in_backward(optimizer)
    (a + b).sum().backward()
    assert 0.1 < (a != b).float().mean() < 0.9
    mean = (a.double().mean() + b.double().mean()) / 2
    assert abs(mean - 0.999) < 2e-4
    assert optimizer.rounding_seed == torch.initial_seed()


def test_gradients_do_not_lie_together() -> None:
    model = ORTModule(nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]), segment_mb=0.3)
    whole = sum(p.nbytes for p in model.parameters())
    most = []
    for inside in (False, True):
        optimizer = FusedSGD(model.parameters(), 1e-3)
        handle = step_in_backward(optimizer) if inside else None
        seen: list[int] = []
        watches = [p.register_post_accumulate_grad_hook(lambda _, s=seen: s.append(_C.pool_stats()["live"])) for p in model.parameters()]
        for _ in range(2):
            before = _C.pool_stats()["live"]
            seen.clear()
            model(torch.randn(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        most.append(max(seen) - before)
        for w in watches:
            w.remove()
        if handle is not None:
            handle.remove()
    assert most[0] > whole and most[1] < 0.4 * whole, (most, whole)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_two_backwards_before_a_step_raise() -> None:
    model = ORTModule(mlp())
    optimizer = FusedAdam(model.parameters())
    step_in_backward(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="second gradient before optimizer.step"):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    model(torch.ones(2, 4)).sum().backward()  # goes on


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.SGD])
def test_a_scaler_is_refused(make) -> None:
    model = mlp()
    optimizer = make(model.parameters(), 1e-3)
    step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises((RuntimeError, AssertionError), match="loss scaling|No inf checks"):
        scaler.step(optimizer)


def test_what_needs_all_gradients_is_refused() -> None:
    p = mlp().parameters
    with pytest.raises(ValueError, match="max_grad_norm=None"):
        step_in_backward(FusedLAMB(p()))
    with pytest.raises(TypeError, match="LBFGS.*allowed: FusedAdam"):
        step_in_backward(torch.optim.LBFGS(p()))
    with pytest.raises(TypeError, match="FP16_Optimizer"):
        step_in_backward(FP16_Optimizer(torch.optim.AdamW(p())))

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match="Own: it is not known"):
        step_in_backward(Own(p(), 0.1))


def test_a_group_added_later_a_closure_and_the_end() -> None:
    torch.manual_seed(0)
    models = [mlp(), mlp()]
    for model, inside in zip(models, (True, False), strict=True):
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.Adam(model[0].parameters(), 0.1)
        handle = step_in_backward(optimizer) if inside else None
        for i in range(6):
            if i == 1:
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
            if i == 2:
                model[0].weight.requires_grad_(True)
            if i == 4 and handle is not None:
                handle.remove()

            def closure(model: nn.Module = model, o: torch.optim.Optimizer = optimizer) -> Tensor:
                o.zero_grad()
                loss = F.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1))
                loss.backward()
                return loss

            assert optimizer.step(closure) is not None
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert models[0][0].weight.grad is not None


def test_a_parameter_in_two_optimizers() -> None:
    model = mlp()
    optimizers = [FusedAdam(model.parameters()), FusedSGD(model.parameters(), 0.1)]
    handles = [step_in_backward(o) for o in optimizers]
    with pytest.raises(RuntimeError, match="in two optimizers"):
        model(torch.ones(2, 4)).sum().backward()
    handles[1].remove()


def test_hooks_of_steps_run_once_a_step() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    step_in_backward(optimizer)
    ran: list[int] = []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert ran == [1]


def test_nothing_is_kept_alive() -> None:
    model = mlp()
    optimizer = FusedAdam(model.parameters())
    step_in_backward(optimizer)
    gone, weight = weakref.ref(optimizer), weakref.ref(model[0].weight)
    del optimizer
    assert gone() is None  # at once: it must not go on beside the next one
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None  # as without it
    del model
    gc.collect()
    assert weight() is None


def test_several_ranks_are_refused(one_process, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    step_in_backward(FusedAdam(model.parameters()))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    optimizer = FusedAdam(model.parameters())
    step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="several ranks"):
        model(torch.ones(2, 4)).sum().backward()


# --- groups that change ------------------------------------------------------------------------------------


def drop(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].clear()


def move(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[2]["params"].append(optimizer.param_groups[0]["params"].pop())


EDITS = {
    "reversed": lambda o: o.param_groups.reverse(),
    "a parameter taken out": drop,
    "a parameter moved": move,
    "a group popped": lambda o: o.param_groups.pop(0),
    "another list": lambda o: setattr(o, "param_groups", o.param_groups[1:]),
}


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("name", EDITS)
def test_groups_that_change_do_so_for_the_next_backward(name: str, make) -> None:
    results = []
    for inside in (False, True):
        params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        optimizer = make([{"params": [p], "lr": lr} for p, lr in zip(params, (0.1, 0.01, 0.001), strict=True)])
        if inside:
            step_in_backward(optimizer)
        for i in range(3):
            if i == 1:
                EDITS[name](optimizer)
            optimizer.zero_grad()
            sum((p * 2).sum() for p in params).backward()
            optimizer.step()
        results.append([p.item() for p in params])
    assert results[0] == results[1]


def test_a_norm_to_clip_to_that_is_set_later_is_noticed_within_backward() -> None:
    model = mlp()
    optimizer = FusedLAMB(model.parameters(), max_grad_norm=None)
    step_in_backward(optimizer)
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="max_grad_norm=1.0: the norm of all gradients"):
        model(torch.ones(2, 4)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_parameter_twice_in_a_group_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([p, p], 0.1)
    with pytest.raises(ValueError, match=r"a parameter of sizes \(3,\) is in the optimizer twice"):
        step_in_backward(optimizer)
    p.sum().backward()
    assert p.tolist() == [1.0] * 3  # no hook was left
