"""FP16_Optimizer and DynamicLossScaler: masters, scaling, overflow, resume, foreign wrappers; a small GPT-2 in fp16."""

from __future__ import annotations

import io
import logging
import math
import sys
import types
import warnings

import pytest
import torch
from ranks import dtensor

from ortmodule.optim import DynamicLossScaler, FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD, clip_grad_norm_


def net(dtype=torch.float16, seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).to(dtype)


def batch(gen, dtype):
    return torch.randn(17, 7, generator=gen).to(dtype), torch.randn(17, 5, generator=gen).to(dtype)


INNER = {
    "torch adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "torch sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "fused adam": lambda p: FusedAdam(p, 1e-2, eps=1e-8, adam_w_mode=2, weight_decay=0.1),
    "fused lamb": lambda p: FusedLAMB(p, 1e-2, max_grad_norm=None),
    "fused sgd": lambda p: FusedSGD(p, 1e-2, 0.9),
}


def masters_of(opt):
    if opt._f32_of:
        return list(opt._f32_of.values())
    return [s["master_weight"] for s in opt.state.values()]


@pytest.mark.parametrize("inner", INNER)
def test_steps_are_f32_steps_on_unscaled_gradients(inner):
    """Oracle: the same inner optimizer on an f32 copy of the weights that is given the gradients / scale."""
    model = net()
    same = INNER[inner](model.parameters())
    opt = FP16_Optimizer(same, loss_scaler=512.0)
    assert opt is same and isinstance(opt, torch.optim.Optimizer)
    shadow = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    oracle = INNER[inner](shadow)
    gen = torch.Generator().manual_seed(0)
    for _ in range(6):
        x, y = batch(gen, torch.float16)
        opt.zero_grad()
        opt.backward(((model(x) - y) ** 2).mean())
        for q, p in zip(shadow, model.parameters()):
            q.grad = p.grad.float() / 512.0
        opt.step()
        oracle.step()
    for p, q, m in zip(model.parameters(), shadow, masters_of(opt)):
        torch.testing.assert_close(m, q.detach(), rtol=2e-6, atol=1e-7)
        assert torch.equal(p.detach(), m.half())


@pytest.mark.parametrize("inner", INNER)
def test_overflow_skips_exactly_those_steps(inner, caplog):
    model, twin = net(torch.float32), net(torch.float32)
    opt = FP16_Optimizer(INNER[inner](model.parameters()), model)
    plain = INNER[inner](twin.parameters())
    gen = torch.Generator().manual_seed(0)
    for step in range(8):
        x, y = batch(gen, torch.float32)
        opt.zero_grad()
        plain.zero_grad()
        opt.backward(((model(x) - y) ** 2).mean())
        if step in (2, 5):
            model[2].weight.grad[1, 1] = math.inf if step == 2 else math.nan
        with caplog.at_level(logging.WARNING, "ortmodule"):
            opt.step()
        assert opt.overflow == (step in (2, 5))
        if step not in (2, 5):
            ((twin(x) - y) ** 2).mean().backward()
            plain.step()
    assert opt.loss_scale == 2.0**14 and opt.skipped_steps == 2 and opt.steps == 6
    assert opt.first_overflow == ("2.weight", "2 (Linear)")
    assert sum("2.weight" in r.getMessage() and "65536 -> 32768" in r.getMessage() for r in caplog.records) == 1
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)


def test_advice_after_repeated_overflows(caplog):
    p = torch.nn.Parameter(torch.ones(3))
    opt = FP16_Optimizer(torch.optim.SGD([p], 0.1))
    with caplog.at_level(logging.WARNING, "ortmodule"):
        for _ in range(7):
            opt.zero_grad()
            opt.backward((p * math.inf).sum())
            opt.step()
    assert sum("Likely causes" in r.getMessage() for r in caplog.records) == 1
    assert torch.equal(p.detach(), torch.ones(3))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_clip_master_grads(inner, dtype):
    model, twin = net(dtype), net(torch.float32)
    twin.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    opt = FP16_Optimizer(INNER[inner](model.parameters()), loss_scaler=256.0)
    plain = INNER[inner](twin.parameters())
    gen = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = batch(gen, dtype)
        opt.zero_grad()
        opt.backward(((model(x) - y) ** 2).mean())
        for q, p in zip(twin.parameters(), model.parameters()):
            q.grad = p.grad.float() / 256.0
        want = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        assert opt.clip_master_grads(0.05) == pytest.approx(want.item(), rel=1e-5)
        opt.step()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.detach(), q.detach().to(dtype), rtol=2e-3 if dtype == torch.float16 else 2e-6, atol=1e-6)


def test_what_changes_after_clipping_is_seen():
    """An inf that comes after clip_master_grads() is an overflow; the next backward() knows nothing of a norm clipped
    before it."""
    p = torch.nn.Parameter(torch.ones(3))
    opt = FP16_Optimizer(torch.optim.SGD([p], 1.0), loss_scaler=4.0)
    opt.backward(p.sum())
    opt.clip_master_grads(0.5)
    p.grad[1] = math.inf
    opt.step()
    assert opt.overflow and torch.equal(p.detach(), torch.ones(3))
    opt.zero_grad()
    opt.backward(p.sum())
    opt.clip_master_grads(0.5)
    p.grad = None  # the batch is dropped, as by model.zero_grad()
    opt.backward(p.sum())
    opt.step()
    torch.testing.assert_close(p.detach(), torch.zeros(3))


@pytest.mark.parametrize("inner", INNER)
def test_script_without_backward_stays_unscaled(inner):
    model, twin = net(torch.float32), net(torch.float32)
    opt, plain = FP16_Optimizer(INNER[inner](model.parameters())), INNER[inner](twin.parameters())
    gen = torch.Generator().manual_seed(0)
    for _ in range(4):
        x, y = batch(gen, torch.float32)
        for m, o in ((model, opt), (twin, plain)):
            o.zero_grad()
            ((m(x) - y) ** 2).mean().backward()
            o.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("inner", INNER)
def test_interrupt_and_resume_gives_the_same_bits(inner):
    def run(model, opt, n, gen):
        for _ in range(n):
            x, y = batch(gen, torch.float16)
            opt.zero_grad()
            opt.backward(((model(x) - y) ** 2).mean())
            opt.step()

    gen = torch.Generator().manual_seed(0)
    model = net()
    opt = FP16_Optimizer(INNER[inner](model.parameters()), loss_scaler=DynamicLossScaler(loss_scale=64.0, up_scale_window=3))
    run(model, opt, 4, gen)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "gen": gen.get_state()}, buffer)
    run(model, opt, 4, gen)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = net(seed=9)
    other_opt = FP16_Optimizer(INNER[inner](other.parameters()), loss_scaler=DynamicLossScaler(loss_scale=1.0, up_scale_window=3))
    other.load_state_dict(saved["model"])
    other_opt.load_state_dict(saved["opt"])
    gen.set_state(saved["gen"])
    run(other, other_opt, 4, gen)
    assert other_opt.loss_scale == opt.loss_scale == 256.0
    assert other_opt.steps == opt.steps == 8
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
    for m, n in zip(masters_of(opt), masters_of(other_opt)):
        assert torch.equal(m, n)


def test_scheduler_made_before_and_after():
    for before in (True, False):
        model = net()
        opt = torch.optim.SGD(model.parameters(), 1.0)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        opt = FP16_Optimizer(opt)
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        gen = torch.Generator().manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                x, y = batch(gen, torch.float16)
                opt.zero_grad()
                opt.backward(((model(x) - y) ** 2).mean())
                opt.step()
                scheduler.step()
        assert opt.param_groups[0]["lr"] == 0.125 and opt.steps + opt.skipped_steps == 3 and opt.steps >= 2


def test_accumulation_and_added_group():
    model, extra = net(), torch.nn.Linear(5, 5).half()
    opt = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.1), loss_scaler=128.0)
    opt.add_param_group({"params": extra.parameters()})
    before = [p.detach().clone() for p in (*model.parameters(), *extra.parameters())]
    gen = torch.Generator().manual_seed(0)
    total = [torch.zeros(p.shape) for p in before]
    for _ in range(2):
        x, y = batch(gen, torch.float16)
        opt.backward(((extra(model(x)) - y) ** 2).mean())
    for t, p in zip(total, (*model.parameters(), *extra.parameters())):
        t += p.grad.float() / 128
    opt.step()
    for p, b, t in zip((*model.parameters(), *extra.parameters()), before, total):
        torch.testing.assert_close(p.detach(), (b.float() - 0.1 * t).half(), rtol=1e-3, atol=1e-6)


def test_gpt2_in_fp16_recovers_from_injected_overflows():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).half()
    opt = FP16_Optimizer(FusedAdam(model.parameters(), 2e-3, eps=1e-8), model)
    tokens = torch.randint(0, 61, (5, 19))
    losses, skipped = [], []
    for step in range(40):
        opt.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        opt.backward(loss)
        if step in (7, 8, 21):
            model.transformer.h[1].attn.c_attn.weight.grad[3, 5] = math.inf
        opt.step()
        if opt.overflow:
            skipped.append(step)
        losses.append(loss.item())
    assert [s for s in skipped if s in (7, 8, 21)] == [7, 8, 21] and len(skipped) == opt.skipped_steps
    assert set(skipped) - {7, 8, 21} <= {0, 1, 2, 3}  # a scale of 2^16 may be too large at first
    assert opt.loss_scale == 2.0 ** (16 - len(skipped))
    assert "h.1.attn.c_attn.weight" in opt.first_overflow[0] and "Conv1D" in opt.first_overflow[1]
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.7 * losses[0]


def test_dynamic_loss_scaler():
    s = DynamicLossScaler(up_scale_window=3, max_loss_scale=2.0**18)
    assert s.loss_scale == 65536.0
    for _ in range(2):
        s.update(True)
    assert s.update(True) == 2.0**17
    for _ in range(9):
        s.update(True)
    assert s.loss_scale == 2.0**18
    for _ in range(30):
        s.update(False)
    assert s.loss_scale == 1.0
    s.update(True), s.update(True)
    s.update(False)
    s.update(True), s.update(True)
    assert s.loss_scale == 1.0  # the count starts again at an overflow
    s.update(types.SimpleNamespace(all_finite=True))
    assert s.loss_scale == 2.0
    fixed = DynamicLossScaler(False, 8.0)
    fixed.update(False)
    assert fixed.loss_scale == 8.0
    s.reset()
    assert s.loss_scale == 65536.0
    for bad in (dict(loss_scale=0), dict(up_scale_window=0), dict(min_loss_scale=3, max_loss_scale=2)):
        with pytest.raises(ValueError):
            DynamicLossScaler(**bad)


# --- foreign wrappers ------------------------------------------------------------------------------


def test_unknown_wrappers_keep_working_with_one_warning():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.step()

    p = torch.nn.Parameter(torch.ones(3))
    w = Wrapper(torch.optim.SGD([p], 0.5))
    with pytest.warns(UserWarning, match="Skip modifying optimizer") as seen:
        assert FP16_Optimizer(w) is w
    assert len(seen) == 1
    p.grad = torch.ones(3)
    w.step()
    assert torch.equal(p.detach(), torch.full((3,), 0.5))


def fake_class(monkeypatch, module, name, bases=(), **body):
    for i in range(module.count(".") + 1):
        part = ".".join(module.split(".")[: i + 1])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    return type(name, bases, {"__module__": module, **body})


@pytest.mark.parametrize("name", ["deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", "subclass", "accelerate"])
def test_deepspeed_zero(monkeypatch, name):
    """The methods DeepSpeed calls, on an object with DeepSpeed's fields (the real one needs process groups)."""
    body = dict(
        has_overflow_serial=None, has_overflow_partitioned_grads_serial=None, get_grad_norm_direct=None,
        _model_parallel_all_reduce=lambda self, tensor, op: None,
    )  # fmt: skip
    body = {k: v or (lambda self, *a: pytest.fail("not replaced")) for k, v in body.items()}
    cls = fake_class(monkeypatch, "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", **body)
    target = type("Mine", (cls,), {})() if name == "subclass" else cls()
    grads = [torch.randn(13, 7).half(), torch.randn(5).half()]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    target.bit16_groups, target.averaged_gradients = [params], {0: [*grads, None]}
    target.model_parallel_rank, target.dp_process_group = 0, None
    outer = target
    if name == "accelerate":
        outer = fake_class(monkeypatch, "accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper")()
        outer.optimizer = target
    with pytest.warns(UserWarning, match="DeepSpeed fp16_optimizer functions are overrided"):
        assert FP16_Optimizer(outer) is outer
    flat = torch.cat([g.double().flatten() for g in grads])
    assert target.get_grad_norm_direct(grads, params).item() == pytest.approx(flat.norm().item(), rel=1e-6)
    assert target.get_grad_norm_direct(grads, params, math.inf).item() == pytest.approx(flat.abs().max().item(), rel=1e-6)
    assert not bool(target.has_overflow_partitioned_grads_serial())
    params[0].grad = grads[0]
    assert not bool(target.has_overflow_serial(params))
    params[1].ds_pipe_replicated = True  # counted on one stage only
    assert target.get_grad_norm_direct(grads, params).item() == pytest.approx(grads[0].double().norm().item(), rel=1e-6)
    grads[0][3, 3] = math.nan
    assert bool(target.has_overflow_partitioned_grads_serial()) and bool(target.has_overflow_serial(params))
    assert target.get_grad_norm_direct(grads, params).item() == -1


def test_deepspeed_stage_3_is_left_alone(monkeypatch):
    target = fake_class(monkeypatch, "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")()
    with pytest.warns(UserWarning, match="keeps working as it is"):
        assert FP16_Optimizer(target) is target


def test_apex_amp(monkeypatch):
    halves = [torch.nn.Parameter(torch.randn(5, 3).half()), torch.nn.Parameter(torch.randn(7).half())]
    masters = [torch.nn.Parameter(p.detach().float()) for p in halves]
    seen = []
    cls = fake_class(
        monkeypatch, "apex.optimizers.fused_adam", "FusedAdam",
        _post_amp_backward=lambda self, scaler: seen.append("original"), zero_grad=lambda self: None, _amp_lazy_init=lambda self: None,
    )  # fmt: skip
    process = types.ModuleType("apex.amp._process_optimizer")
    process.post_backward_models_are_masters = lambda scaler, params, stash: seen.append("fp32")
    amp = types.ModuleType("apex.amp")
    amp._process_optimizer = process
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    opt = cls()
    opt._amp_stash = types.SimpleNamespace(
        all_fp16_params=halves, all_fp32_from_fp16_params=masters, all_fp32_from_fp32_params=[], all_fp32_from_fp32_grad_stash=[]
    )
    with pytest.warns(UserWarning, match="Apex AMP"):
        assert FP16_Optimizer(opt) is opt
    scaler = types.SimpleNamespace(_overflow_buf=torch.zeros(1, dtype=torch.int32), loss_scale=lambda: 64.0)
    halves[0].grad = torch.randn(5, 3).half()
    opt._post_amp_backward(scaler)
    torch.testing.assert_close(masters[0].grad, halves[0].grad.float() / 64, rtol=1e-6, atol=0)
    assert masters[1].grad is None and seen == ["fp32"] and scaler._overflow_buf.item() == 0
    opt.zero_grad()
    assert masters[0].grad is None and halves[0].grad is None
    halves[1].grad = torch.full((7,), math.inf).half()
    opt._post_amp_backward(scaler)
    assert scaler._overflow_buf.item() == 1


def test_megatron(monkeypatch):
    cls = fake_class(monkeypatch, "megatron.fp16.fp16", "FP16_Optimizer", _check_overflow=lambda s: None, clip_master_grads=lambda s, m: None)
    opt = cls()
    ps = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(3))]
    opt.optimizer = torch.optim.SGD(ps, 0.1)
    opt.fp16_groups, opt.fp32_from_fp32_groups = [ps], []
    ps[0].grad = torch.full((5,), 2.0)
    with pytest.warns(UserWarning, match="Megatron"):
        FP16_Optimizer(opt)
    opt._check_overflow()
    assert opt.overflow is False
    assert opt.clip_master_grads(1.0) == pytest.approx(math.sqrt(20))
    assert ps[0].grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    ps[0].grad[0] = math.nan
    opt._check_overflow()
    assert opt.overflow is True and opt.clip_master_grads(1.0) == -1


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = net(torch.float32)
    opt = FusedAdam(model.parameters(), 1e-2)
    model, opt = accelerator.prepare(model, opt)
    FP16_Optimizer(opt)
    gen = torch.Generator().manual_seed(0)
    losses = []
    x, y = batch(gen, torch.float32)
    for _ in range(20):
        opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


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
