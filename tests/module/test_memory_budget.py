"""memory_budget: what the engine takes in a step is what was said before it, never more than the budget, and the bits are
those of no budget (csrc/run/budget.c, docs/MEMORY.md). Measured by the pool that all of the engine's blocks come from."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import MODELS, Cube, gpt2, ids
from torch import Tensor, nn

from ortmodule import _C, ORTModule
from ortmodule.memory import BudgetError, Memory, StepMemory, parse


def told(ours: ORTModule) -> StepMemory:
    found = ours.report().graphs[-1].memory
    assert found is not None
    return found


def step(model: nn.Module, batch: dict[str, Tensor], seed: int = 3, held: bool = True) -> Tensor:
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(**batch)
    loss = out if isinstance(out, Tensor) else out.loss
    if not held:
        del out
    loss.backward()
    return loss.detach()


def measured(model: nn.Module, batch: dict[str, Tensor], held: bool = True) -> int:
    """Bytes in blocks at the highest moment of a step, above those before it."""
    model.zero_grad()
    gc.collect()
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    step(model, batch, held=held)
    return _C.pool_stats()["peak_live"] - before


def equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for (name, x), y in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(x, y), name


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def asked(ours: ORTModule, budget: int | str | None) -> None:
    """Another budget for what is captured already: a capture is most of the time here."""
    for made in ours._ortmodule.every:
        made.graph.memory = Memory(None if budget is None else parse(budget))


def named(error: BaseException) -> int:
    return int(str(error).partition("is memory_budget=")[2].partition(";")[0].partition(" or")[0])


def smallest(ours: ORTModule, run: Callable[[nn.Module], Any]) -> int:
    """The number that the error names."""
    asked(ours, 1)
    with pytest.raises(BudgetError) as error:
        run(ours)
    asked(ours, None)
    return named(error.value)


@pytest.mark.parametrize("name", MODELS)
def test_ten_budgets(name: str) -> None:
    make, batch = MODELS[name]
    ours = ORTModule(fresh(make), strict=True, recheck=False)
    start = copy.deepcopy(ours.module.state_dict())
    loss = step(ours, batch)
    most = told(ours).peak
    assert told(ours).budget == 0 and measured(ours, batch) == most
    least = smallest(ours, lambda m: step(m, batch))
    assert least < 0.85 * most
    ours.load_state_dict(start)
    step(ours, batch)
    grads = [None if p.grad is None else p.grad.clone() for p in ours.parameters()]
    state = [b.clone() for b in ours.buffers()]
    times: list[float] = []
    peaks = set()
    for k in range(10):
        budget = least + (most - least) * k // 9
        asked(ours, budget)
        ours.load_state_dict(start)
        assert torch.equal(step(ours, batch), loss)
        for p, g in zip(ours.parameters(), grads, strict=True):
            assert (p.grad is None) == (g is None) and (g is None or torch.equal(p.grad, g))
        assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), state, strict=True))
        said = told(ours)
        assert said.peak <= said.budget == budget and said.without == most
        assert 0.97 * said.peak <= measured(ours, batch) <= said.peak
        assert 0.97 * said.released <= measured(ours, batch, held=False) <= said.released
        times.append(said.again)
        peaks.add(said.peak)
    assert times == sorted(times, reverse=True) and times[-1] == 0 < times[0], times
    assert len(peaks) >= 5, "a budget that lies between others is used"


def test_the_memory_of_whole_layers_costs_no_more_than_they_do() -> None:
    make, batch = MODELS["bert"]
    layers = ORTModule(fresh(make), memory_opt_level=1)
    step(layers, batch)
    ours = ORTModule(fresh(make), memory_budget=told(layers).peak)
    step(ours, batch)
    assert told(ours).peak <= told(layers).peak
    assert told(ours).again < 0.25


@pytest.mark.parametrize(("name", "segment_mb"), [("gpt2", 0.01), ("cnn", 25.0)])
def test_autocast(name: str, segment_mb: float) -> None:
    make, batch = MODELS[name]

    def run(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(m, batch)

    plain, ours = (ORTModule(fresh(make), segment_mb=segment_mb, strict=True) for _ in range(2))
    loss = run(plain)
    start = copy.deepcopy(ours.module.state_dict())
    run(ours)
    least = smallest(ours, run)
    asked(ours, least)
    ours.load_state_dict(start)
    assert torch.equal(run(ours), loss)
    equal(plain, ours)
    assert told(ours).peak == least < told(plain).peak
    ours.zero_grad()
    gc.collect()
    _C.pool_trim()
    before = _C.pool_stats()["live"]
    run(ours)
    assert 0.97 * least <= _C.pool_stats()["peak_live"] - before <= least


class Block(nn.Module):
    """With a buffer that it reads and overwrites, dropout, and a function of the user's in the middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x) + torch.tanh(self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        h = nn.functional.gelu(self.up(self.batch(h.transpose(1, 2)).transpose(1, 2)))
        h.mul_(2)
        return x + self.down(nn.functional.dropout(Cube.apply(h), 0.2, self.training))


def blocks() -> nn.Module:
    return nn.Sequential(*[Block(32) for _ in range(4)], nn.Linear(32, 3))


def test_write_backs_and_yield_points() -> None:
    x = torch.randn(8, 40, 32, generator=torch.Generator().manual_seed(1))

    def run(m: nn.Module) -> None:
        for k in range(3):
            m.zero_grad()
            torch.manual_seed(k)
            m(x + k).square().mean().backward()

    plain, ours = ORTModule(fresh(blocks)), ORTModule(fresh(blocks))
    start = copy.deepcopy(ours.module.state_dict())
    run(plain)
    run(ours)
    least = smallest(ours, run)
    for budget in (least, (least + told(plain).peak) // 2):
        asked(ours, budget)
        ours.load_state_dict(start)
        run(ours)
        equal(plain, ours)
        assert ours.report().host and told(ours).peak <= budget < told(plain).peak


def test_eval_and_no_grad_are_as_without() -> None:
    make, batch = MODELS["bert"]
    plain, ours = ORTModule(fresh(make)), ORTModule(fresh(make), memory_budget="80%")
    for m in (plain, ours):
        m.eval()
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, ours(**batch).logits)
    assert ours.report().graphs[0].memory is None
    a, b = step(plain, batch), step(ours, batch)  # a backward in eval mode keeps the budget, too
    assert torch.equal(a, b) and told(ours).peak <= 0.8 * told(plain).peak
    equal(plain, ours)


def test_other_sizes_choose_again() -> None:
    make = lambda: fresh(gpt2)  # noqa: E731
    sizes = [(4, 40), (6, 80), (2, 24), (6, 80), (8, 64), (4, 40)]
    plain = ORTModule(make())
    batch = {"input_ids": ids(1, 8, 64), "labels": ids(2, 8, 64)}
    step(plain, batch)
    budget = int(0.75 * told(plain).peak)
    ours = ORTModule(make(), memory_budget=budget)
    for b, t in sizes:
        batch = {"input_ids": ids(1, b, t), "labels": ids(2, b, t)}
        assert torch.equal(step(plain, batch), step(ours, batch))
        equal(plain, ours)
        assert measured(ours, batch) <= budget
    dynamic = ours.report().graphs[-1]
    assert dynamic.dynamic
    memory: Any = ours._ortmodule.every[-1].graph.memory
    assert len(memory.known) == len({*sizes[1:]})  # asked once for every size
    assert len({v.number for v in memory.known.values()}) > 1, "small batches compute nothing again"
    with pytest.raises(BudgetError, match="at these sizes"):
        step(ours, {"input_ids": ids(1, 40, 90), "labels": ids(2, 40, 90)})
    batch = {"input_ids": ids(1, 8, 64), "labels": ids(2, 8, 64)}
    assert torch.equal(step(plain, batch), step(ours, batch))


def test_two_steps_in_flight_and_other_losses() -> None:
    """A backward of a loss that was not foreseen runs the forward again, within the budget."""
    make, batch = MODELS["gpt2"]
    plain, ours = ORTModule(fresh(make)), ORTModule(fresh(make), memory_budget="75%")
    for m in (plain, ours):
        torch.manual_seed(5)
        a, b = m(**batch), m(input_ids=ids(7), labels=ids(8))
        a.loss.backward(retain_graph=True)
        b.logits.square().mean().backward()
        (a.loss * 2).backward()
        c = m(**batch)
        (c.loss + c.logits.mean()).backward()
    equal(plain, ours)


def test_infeasible_is_an_error_before_anything_is_computed() -> None:
    make, batch = MODELS["cnn"]
    model = fresh(make)
    before = copy.deepcopy(model)
    ours = ORTModule(model, memory_budget="3%")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"memory_budget=3% \(.* MiB\) cannot be met.* smaller batch") as error:
            step(ours, batch)
    equal(before, ours)  # no statistics were written
    percent = str(error.value).rpartition(" or '")[2].partition("'")[0]
    least = named(error.value)
    for budget in (percent, least):
        asked(ours, budget)
        step(ours, batch)
        assert told(ours).peak == least
    asked(ours, least - 1)
    with pytest.raises(BudgetError):
        step(ours, batch)


@pytest.mark.parametrize(
    ("given", "size"),
    [("6GB", 6 * 10**9), ("512MB", 512 * 10**6), (" 1.5 GiB ", 3 * 2**29), ("2gib", 2**31), (12345, 12345), ("12345", 12345), ("70 B", 70), ("1KiB", 1024)],
)  # fmt: skip
def test_sizes(given: str | int, size: int) -> None:
    assert parse(given).bytes == size


def test_shares() -> None:
    assert parse("60%").share == 0.6 and parse("60 %").bytes == -1 and parse("100%").share == 1


@pytest.mark.parametrize("given", ["", "GB", "6 gigs", "-1GB", "0", 0, -5, True, 0.6, "0.6", "120%", "0%", "1e3", "nan%", b"6GB", "9" * 30, "6GB 2"])
def test_bad_budgets_are_refused_at_construction(given: Any) -> None:
    with pytest.raises(ValueError, match=r"memory_budget=.* is not allowed; give bytes as an integer"):
        ORTModule(nn.Linear(2, 2), memory_budget=given)


def test_the_variable_goes_before_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_BUDGET", "70%")
    assert ORTModule(nn.Linear(2, 2), memory_budget=5)._ortmodule.settings.memory_budget == "70%"
    monkeypatch.setenv("ORTMODULE_MEMORY_BUDGET", "123456")
    assert ORTModule(nn.Linear(2, 2))._ortmodule.settings.memory_budget == 123456
    monkeypatch.setenv("ORTMODULE_MEMORY_BUDGET", "plenty")
    with pytest.raises(ValueError, match="ORTMODULE_MEMORY_BUDGET='plenty' is not allowed; give bytes"):
        ORTModule(nn.Linear(2, 2))


def test_a_budget_goes_before_a_level(caplog: pytest.LogCaptureFixture) -> None:
    make, batch = MODELS["gpt2"]
    with caplog.at_level(logging.INFO, "ortmodule"):
        ours = ORTModule(fresh(make), memory_budget="100%", memory_opt_level=1)
    assert "memory_opt_level=1 has no effect" in caplog.text
    plain = ORTModule(fresh(make))
    for m in (plain, ours):
        step(m, batch)
    assert told(ours).peak == told(plain).peak and told(ours).again == 0


def test_what_is_told(caplog: pytest.LogCaptureFixture) -> None:
    make, batch = MODELS["gpt2"]
    ours = ORTModule(fresh(make), memory_budget="70%")
    with caplog.at_level(logging.INFO, "ortmodule"):
        step(ours, batch)
        step(ours, batch)
    lines = [r.getMessage() for r in caplog.records if "memory of a step" in r.getMessage()]
    assert len(lines) == 1 and "of a budget of" in lines[0] and "activations kept" in lines[0]
    said = told(ours)
    assert said.parameters >= sum(p.nbytes for p in ours.parameters())
    assert said.optimizer == 8 * sum(p.numel() for p in ours.parameters())
    assert said.gradients >= sum(p.nbytes for p in ours.parameters())
    assert str(said) in str(ours.report()) and ours.report().to_dict()["graphs"][0]["memory"]["peak"] == said.peak


def test_hooks_on_submodules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda *_: None)
    ours = ORTModule(model, memory_budget="90%")
    with pytest.raises(RuntimeError, match=r"memory_budget cannot be kept for Sequential: hooks on submodules \(0\)"):
        ours(torch.ones(2, 3)).sum().backward()


def test_copies_keep_it() -> None:
    make, batch = MODELS["bert"]
    ours = ORTModule(fresh(make), memory_budget="80%")
    for m in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        step(m, batch)
        assert 0 < told(m).peak <= told(m).budget


class LossAndOutput(nn.Module):
    """The first result looks like the loss, so the gradients of the second are not expected."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return x.pow(2).mean(), x


def test_gradients_of_results_that_were_not_expected() -> None:
    """What holds of all results holds for the variant that a budget has put in another's place: an argument that
    PyTorch has computed gets its gradient from each of them."""
    torch.manual_seed(0)
    eager = LossAndOutput()
    ours = ORTModule(copy.deepcopy(eager), memory_budget="88%")
    for take in (0, 0, 1, 2, 1, 0):
        x = torch.randn(64, 32)
        grads = []
        for model in (ours, eager):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            loss, out = model(leaf * 2)
            [loss, out.sum(), loss + out.sum()][take].backward()
            grads.append([leaf.grad, *[p.grad for p in model.parameters()]])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not ours.report().eager
