"""What torch.optim does in the corners: parameters and gradients that share memory, lazy signs, infinite weights,
settings of groups; and that a step which is refused has changed nothing."""

from __future__ import annotations

import copy
import math
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from ortmodule import _C
from ortmodule.optim import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD

TWINS = {  # ours, torch's
    "adamw": (lambda p: FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=2), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0)),
    "adam": (
        lambda p: FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    ),
    "sgd": (lambda p: FusedSGD(p, 1e-2, weight_decay=0.1), lambda p: torch.optim.SGD(p, 1e-2, weight_decay=0.1)),
    "momentum": (lambda p: FusedSGD(p, 1e-2, 0.9, 0.3), lambda p: torch.optim.SGD(p, 1e-2, 0.9, 0.3)),
}
OURS = {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD, "FusedLAMB": FusedLAMB}


def given(params: list[nn.Parameter], t: int) -> None:
    gen = torch.Generator().manual_seed(t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype)


# --- memory in common ----------------------------------------------------------------------------------


def test_what_shares_memory_is_found() -> None:
    x = torch.zeros(100)
    parts = [x[:10], x[10:20], x[15:30], x[5:8], torch.zeros(3), x[29:40], x[50:60]]
    assert _C.overlaps(parts) == [2, 3, 5]
    assert _C.overlaps([x[50:], x[:50], x[:0], torch.zeros(0)]) == [] == _C.overlaps([])
    assert _C.overlaps([x[3:4], x, x]) == [1, 2]
    assert _C.overlaps([x[::2], x[1::2]]) == [1]  # their gaps count


@pytest.mark.parametrize("name", TWINS)
def test_weights_over_one_storage_move_one_after_the_other(name: str) -> None:
    """`decoder.weight.data = embedding.weight.data`: blocks of both in one parallel loop lost updates."""
    results = []
    before = torch.get_num_threads()
    for make in TWINS[name]:
        torch.set_num_threads(4)
        try:
            torch.manual_seed(0)
            table = torch.randn(3000, 64)
            # the middle one overlaps both others in part
            params = [nn.Parameter(table[:2000]), nn.Parameter(torch.randn(5)), nn.Parameter(table[1000:]), nn.Parameter(table[:])]
            params[3].data = table
            opt = make(params)
            for t in range(6):
                given(params, t)
                if t == 0:
                    params[2].grad = None  # the momentum of one is older than that of another
                opt.step()
            results.append(table)
        finally:
            torch.set_num_threads(before)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TWINS)
def test_a_parameter_twice_in_a_group_moves_twice(name: str) -> None:
    results = []
    for make in TWINS[name]:
        torch.manual_seed(0)
        p, q = nn.Parameter(torch.randn(40000)), nn.Parameter(torch.randn(3))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            opt = make([p, q, p])
        for t in range(4):
            given([p, q], t)
            opt.step()
        results.append((p.detach(), q.detach(), [s["step"].item() for s in opt.state.values() if "step" in s]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_random_rounding_of_pieces_is_each_parameters_own() -> None:
    """A list in pieces draws as the whole one does."""
    moved = []
    for alias in (False, True):
        torch.manual_seed(3)
        table = torch.ones(4096, dtype=torch.bfloat16)
        params = [nn.Parameter(table.clone()), nn.Parameter(table.clone()), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))]
        if alias:
            params.append(nn.Parameter(params[2].data))
        opt = FusedAdam(params, 1e-3, stochastic_rounding=True)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        moved.append([p.detach() for p in params[:2]])
    assert all(torch.equal(a, b) for a, b in zip(*moved)) and not torch.equal(*moved[0])


@pytest.mark.parametrize("options", [{}, {"keep_grads": True}, {"max_grad_norm": None}])
def test_lamb_reads_a_gradient_of_several_parameters_as_it_came(options: dict) -> None:
    """Its direction is written into the gradient; the next parameter, of another group too, is to have the gradient."""
    results = []
    for share in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5)) for _ in range(4)]
        with torch.no_grad():
            params[1][2] = math.inf  # left out, and marked so in its gradient
        opt = FusedLAMB([{"params": params[:2]}, {"params": params[2:3], "lr": 0.1}, {"params": params[3:]}], 0.2, **options)
        for t in range(3):
            base = torch.randn(7, generator=torch.Generator().manual_seed(t))
            for p, g in zip(params, (base[:5], base[:5], base[:5], base[2:])):
                p.grad = g if share else g.clone()
            opt.step()
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_fp16_unscales_a_shared_gradient_once() -> None:
    results = []
    for share in (True, False):
        params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        opt = FP16_Optimizer(torch.optim.SGD(params, 1.0), loss_scaler=4.0)
        opt.backward((params[0] * 2 + params[1] * 2 + params[2]).sum())
        if share:
            params[1].grad = params[0].grad
        opt.step()
        results.append([p.tolist() for p in params])
    assert results[0] == results[1] == [[-1.0] * 4, [-1.0] * 4, [0.0] * 4]


# --- lazy signs ----------------------------------------------------------------------------------------


def negated(x: Tensor) -> Tensor:
    """-x as z.conj().imag gives it: the memory of x, and a bit that says so."""
    y = torch.complex(torch.zeros_like(x), x).conj().imag
    assert y.is_neg()
    return y


@pytest.mark.parametrize("name", [*OURS, "FP16 SGD", "FP16 FusedAdam"])
def test_lazily_negated_gradients(name: str) -> None:
    results = []
    for resolve in (False, True):
        half = name.startswith("FP16")
        p = nn.Parameter(torch.ones(5, dtype=torch.float16 if half else torch.float32))
        opt = OURS[name]([p], 0.1) if not half else FP16_Optimizer({"FP16 SGD": torch.optim.SGD, "FP16 FusedAdam": FusedAdam}[name]([p], 0.1))
        g = torch._neg_view(torch.arange(1.0, 6.0).to(p.dtype)) if half else negated(torch.arange(1.0, 6.0))
        p.grad = g.resolve_neg() if resolve else g
        opt.step()
        results.append(p.detach())
    assert torch.equal(*results) and bool((results[0] > 1).all())


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_lazily_negated_parameter_is_refused(name: str, when: str) -> None:
    good, p = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    opt = OURS[name]([{"params": [good]}, {"params": [p]}], 0.1)
    if when == "later":
        given([good, p], 0)
        opt.step()
    p.data = negated(torch.arange(1.0, 6.0))
    given([good, p], 1)
    before = good.detach().clone(), p.detach().clone()
    with pytest.raises(ValueError, match=rf"{name} got a parameter of sizes \(5,\) that is negated lazily"):
        opt.step()
    assert torch.equal(before[0], good.detach()) and torch.equal(before[1], p.detach())


def test_fp16_refuses_a_lazily_negated_parameter() -> None:
    p, q = nn.Parameter(torch._neg_view(torch.arange(1.0, 6.0).half())), nn.Parameter(torch.ones(2).half())
    opt = torch.optim.SGD([p], 1.0)
    with pytest.raises(ValueError, match=r"FP16_Optimizer got a parameter of sizes \(5,\) that is negated lazily"):
        FP16_Optimizer(opt)
    assert type(opt) is torch.optim.SGD
    opt = FP16_Optimizer(torch.optim.SGD([q], 1.0))
    opt.add_param_group({"params": [p]})
    given([p, q], 0)
    with pytest.raises(ValueError, match="negated lazily"):
        opt.step()
    assert q.tolist() == [1.0, 1.0]


# --- infinite weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [*(lambda p, m=m: FusedAdam(p, 1e-2, adam_w_mode=m) for m in range(4)), lambda p: FusedSGD(p, 1e-2)]
    + [lambda p, n=n: FusedSGD(p, 1e-2, 0.9, nesterov=n) for n in (False, True)],
    ids=["mode 0", "mode 1", "mode 2", "mode 3", "sgd", "momentum", "nesterov"],
)
def test_an_infinite_weight_without_decay_stays_infinite(make, dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.tensor([1.0, -math.inf, math.inf] * 7, dtype=dtype))
    opt = make([p])
    for _ in range(2):
        p.grad = torch.tensor([1.0, 0.0, 0.5] * 7, dtype=dtype)
        opt.step()
    assert p.isfinite().sum() == 7 and p[1] == -math.inf and p[2] == math.inf and not p.isnan().any()


# --- groups ---------------------------------------------------------------------------------------------

FOREIGN = [
    ("FusedAdam", "amsgrad", True), ("FusedAdam", "differentiable", True), ("FusedAdam", "adam_w_mode", 3),
    ("FusedAdam", "decoupled_weight_decay", False), ("FusedAdam", "master_weights", True), ("FusedLAMB", "amsgrad", True),
    ("FusedLAMB", "use_nvlamb", True), ("FusedSGD", "stochastic_rounding", True),
]  # fmt: skip


@pytest.mark.parametrize("name,key,value", FOREIGN)
def test_settings_of_the_whole_optimizer_in_a_group_are_refused(name: str, key: str, value: object) -> None:
    cls = OURS[name]
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    message = rf"{name}: a parameter group has {key}={value!r}, the optimizer"
    with pytest.raises(ValueError, match=message):
        cls([{"params": [a], key: value}])
    opt = cls([a])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [b], key: value})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [b]})
    opt.param_groups[1][key] = value
    given([a, b], 0)
    with pytest.raises(ValueError, match=message):
        opt.step()
    assert a.tolist() == [1.0] * 3 and not opt.state
    opt.param_groups[1][key] = getattr(opt, key, False)  # its own setting is allowed
    opt.step()
    assert a.tolist() != [1.0] * 3


def test_what_torchs_groups_hold_besides_is_no_matter() -> None:
    p = nn.Parameter(torch.ones(3))
    torchs = {k: v for k, v in torch.optim.AdamW([p]).param_groups[0].items() if k != "params"}
    opt = FusedAdam([{"params": [p], **torchs, "foreach": True, "capturable": True, "name": "all"}])
    given([p], 0)
    opt.step()
    assert p.tolist() != [1.0] * 3


@pytest.mark.parametrize("betas", [(0.9,), 0.9, (2.0, 0.9), (1.0, 0.9), (0.9, -0.1)])
def test_bad_betas_of_a_group(betas: object) -> None:
    for cls in (FusedAdam, FusedLAMB):
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        opt = cls(params[:1])
        with pytest.raises(ValueError, match=re.escape(f"betas={betas} given; two numbers in [0, 1) are needed")):
            opt.add_param_group({"params": params[1:], "betas": betas})
        opt.add_param_group({"params": params[1:]})
        opt.param_groups[1]["betas"] = betas
        given(params, 0)
        with pytest.raises(ValueError, match="two numbers in"):
            opt.step()
        assert params[0].tolist() == [1.0] * 3 and "step" not in opt.param_groups[0]


# --- steps that are refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_all_groups_are_looked_at_before_the_first_moves(name: str) -> None:
    """The gradient of the last group has a type that its weight cannot have."""
    kw = {"momentum": 0.9, "dampening": 0.5} if name == "FusedSGD" else {}
    results = []
    for spoil in (True, False):
        params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
        opt = OURS[name]([{"params": params[:2]}, {"params": params[2:]}], 0.1, **kw)
        if spoil:
            given(params, 0)
            params[2].grad.data = torch.ones(3, dtype=torch.float64)
            with pytest.raises(ValueError, match="gradient of parameter 0 is f64, its weight f32"):
                opt.step()
            assert all(p.tolist() == [1.0] * 3 for p in params)
            assert all("step" not in group for group in opt.param_groups)
            assert all(s.get("step", 0) == 0 for s in opt.state.values())
        given(params, 0)
        opt.step()
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, "x", torch.ones(2), torch.tensor(0.0)])
@pytest.mark.parametrize("name", OURS)
def test_a_grad_scale_that_is_none(name: str, scale: object) -> None:
    p = nn.Parameter(torch.ones(3))
    opt = OURS[name]([p], 0.1)
    given([p], 0)
    opt.grad_scale = scale
    with pytest.raises(ValueError, match=rf"{name}: grad_scale=.*it must be a positive finite number"):
        opt.step()
    assert p.tolist() == [1.0] * 3
    opt.grad_scale = torch.tensor([2.0])
    opt.step()
    assert p.tolist() != [1.0] * 3


# --- states that are refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [math.nan, math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("of", ["parameter", "group"])
def test_a_step_that_is_no_number_is_refused_before_anything_changes(of: str, step: object) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    opt = FusedAdam(params, 1e-2)
    given(params, 0)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 5.0
    state["state"][0]["exp_avg"].fill_(9)
    (state["state"][2] if of == "parameter" else state["param_groups"][0])["step"] = step
    before = opt.state[params[0]]["exp_avg"].clone()
    with pytest.raises(ValueError, match="has a step .*; it must be finite"):
        opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 1e-2 and torch.equal(before, opt.state[params[0]]["exp_avg"])


FP16_WRONG = {
    "a master of one element": (lambda s: s["masters"].__setitem__(0, torch.tensor([7.0])), r"master of parameter 0 is of sizes \(1,\).*\(4,\)"),
    "a master that is none": (lambda s: s["masters"].__setitem__(1, 3.0), "master of parameter 1 is of sizes 3.0"),
    "no steps": (lambda s: s.pop("steps"), "saved steps is None"),
    "steps": (lambda s: s.__setitem__("skipped_steps", math.nan), "saved skipped_steps is nan"),
    "stable steps": (lambda s: s.pop("stable_steps"), "saved stable_steps is None"),
    **{
        f"scale {x}": (lambda s, x=x: s.__setitem__("loss_scale", x), f"saved loss_scale={x!r} given; it must be positive and finite")
        for x in (0.0, -1.0, math.nan, math.inf, "x", None)
    },
    "scale": (lambda s: s.pop("loss_scale"), "saved loss_scale=None"),
}


@pytest.mark.parametrize("name", FP16_WRONG)
def test_a_state_of_fp16_optimizer_that_is_wrong_changes_nothing(name: str) -> None:
    spoil, message = FP16_WRONG[name]
    params = [nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
    opt = FP16_Optimizer(torch.optim.AdamW(params, 1e-3))
    given(params, 0)
    opt.step()
    before, state = copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.state_dict())
    state["state"][0]["exp_avg"].add_(1)
    state["fp16_optimizer"]["masters"][0].add_(1)
    spoil(state["fp16_optimizer"])
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state)
    after = opt.state_dict()
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    mine, theirs = after["fp16_optimizer"], before["fp16_optimizer"]
    assert {k: v for k, v in mine.items() if k != "masters"} == {k: v for k, v in theirs.items() if k != "masters"}
    assert all(torch.equal(mine["masters"][i], theirs["masters"][i]) for i in range(2))


def test_a_state_that_the_inner_optimizer_refuses_leaves_the_scale() -> None:
    params = [nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
    opt = FP16_Optimizer(torch.optim.AdamW(params, 1e-3))
    state = copy.deepcopy(opt.state_dict())
    state["fp16_optimizer"]["loss_scale"] = 2.0
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        opt.load_state_dict(state)
    assert opt.loss_scale == 2.0**16


# --- FP16_Optimizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_are_divided_by_what_backward_multiplied_by(clip: bool) -> None:
    for inner in (torch.optim.SGD, FusedSGD):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float16))
        opt = FP16_Optimizer(inner([p], 1.0))
        opt.loss_scale = 1024.0
        opt.backward((p * 0.5).sum())
        opt.loss_scale = 256.0
        opt.backward((p * 0.25).sum())  # added to the first one, and of its scale
        opt.loss_scale = 8.0
        if clip:
            assert opt.clip_master_grads(10.0) == pytest.approx(0.75)
        opt.step()
        assert p.item() == -0.75 and opt.loss_scale == 8.0
        opt.zero_grad()
        opt.backward(p.sum())
        assert p.grad.item() == 8.0


def test_clipping_to_nothing() -> None:
    for inner in (torch.optim.SGD, FusedSGD):
        p = nn.Parameter(torch.ones(3, dtype=torch.float16))
        opt = FP16_Optimizer(inner([p], 1.0), loss_scaler=4.0)
        opt.backward(p.sum())
        opt.clip_master_grads(0.0)
        opt.step()
        assert p.tolist() == [1.0] * 3 and not opt.overflow


def test_lbfgs_is_refused_by_name() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = torch.optim.LBFGS([p])
    with pytest.raises(TypeError, match=r"FP16_Optimizer of LBFGS: its step\(\) needs a closure"):
        FP16_Optimizer(opt)
    assert type(opt) is torch.optim.LBFGS
    sgd = torch.optim.SGD([p], 0.1)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive and finite"):
            FP16_Optimizer(sgd, loss_scaler=scale)
    assert type(sgd) is torch.optim.SGD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FP16_Optimizer(sgd, loss_scaler=2.0)
    with pytest.raises(ValueError, match="loss_scale=nan given"):
        sgd.loss_scale = math.nan
