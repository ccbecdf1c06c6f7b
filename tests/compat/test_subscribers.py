"""GlobalSubscriberManager, StatisticsSubscriber, inspect_activation: in PyTorch and in ORTModule the same files with the
same numbers, and the numbers are numpy's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ortmodule.compat  # noqa: F401
from ortmodule import ORTModule
from ortmodule.compat import hooks, merge
from ortmodule.compat.hooks import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    SubscriberBase,
    SubscriberManager,
    inspect_activation,
    summary,
)


class Net(nn.Module):
    def __init__(self, inspect: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(16, 3)
        self.inspect = inspect

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        mixed = a + b
        x = self.fc1(mixed)
        if self.inspect:
            x = inspect_activation("fc1_out", x)
        return self.fc2(self.relu(x)), mixed


@pytest.fixture(autouse=True)
def afterwards():
    yield
    GlobalSubscriberManager.unsubscribe()


def names(inspect: bool) -> set[str]:
    parts = ["Net_0_0th_output", "Net_0_1th_output", "Linear_1_0th_output", "ReLU_2_0th_output", "Linear_3_0th_output"]
    return {f"{p}_{way}" for p in [*parts, *["fc1_out"] * inspect] for way in ("forward", "backward")} | {"order.txt"}


def trained(folder: Path, wrap: bool, inspect: bool = False, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    model = Net(inspect).double()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder)])
    if wrap:
        model = ORTModule(model)
    for _ in range(steps):
        a = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        y, mixed = model(a, torch.randn(4, 8, dtype=torch.float64))
        (y.square().sum() + mixed.sum()).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("inspect", [False, True])
def test_the_same_files_in_pytorch_and_in_the_engine(inspect, tmp_path):
    eager, ours = trained(tmp_path / "eager", False, inspect), trained(tmp_path / "ours", True, inspect)
    for g, h in zip(ours, eager, strict=True):
        assert torch.allclose(g, h, rtol=1e-10, atol=1e-12)
    for step in range(3):
        folders = [tmp_path / run / f"step_{step}" for run in ("eager", "ours")]
        for folder in folders:
            assert {p.name for p in folder.iterdir()} == names(inspect)
        for name in names(inspect) - {"order.txt"}:
            # the same text but for the last digits
            mine, theirs = (re.split(r"[\s,\[\]]+", (folder / name).read_text()) for folder in folders)
            assert len(mine) == len(theirs)
            for p, q in zip(mine, theirs, strict=True):
                assert p == q or float(p) == pytest.approx(float(q), rel=1e-4, abs=1e-10), name


def test_merged_files_follow_the_order_of_pytorch(tmp_path, monkeypatch):
    trained(tmp_path / "eager", False)
    trained(tmp_path / "ours", True)
    arguments = ["--pt_dir", "eager", "--ort_dir", "ours", "--output_dir", "both"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge", *arguments])
    merge.main()
    first = [(tmp_path / "both" / run / "step_1_.txt").read_text() for run in ("merge_pt", "merge_ort")]
    titles = [re.findall(r"^>*(\w+ \w+ run)", text, re.M) for text in first]
    assert titles[0] == titles[1] and len(titles[0]) == 10
    assert len(list((tmp_path / "both" / "merge_ort").iterdir())) == 3
    with pytest.raises(FileExistsError, match="both"):
        merge.main()
    monkeypatch.setattr(sys, "argv", ["merge", *arguments, "--overwrite"])
    merge.main()


@pytest.mark.parametrize("case", ["normal", "odd", "ints", "empty", "one", "bools", "bf16"])
def test_the_numbers_are_numpys(case):
    torch.manual_seed(0)
    x = {
        "normal": torch.randn(7, 11) * 3 + 100, "odd": torch.tensor([1.0, float("nan"), float("inf"), -2, 0]), "ints": torch.arange(-5, 20),
        "empty": torch.zeros(0, 3), "one": torch.tensor(4.0), "bools": torch.tensor([True, False]), "bf16": torch.randn(50).bfloat16(),
    }[case]  # fmt: skip
    for size in (2**29, 10):
        text = summary("x forward run", x, 2, bucket_size=size)
        assert text.startswith(f">>x forward run shape: {x.shape} dtype: {x.dtype} ")
        n = x.double().reshape(-1).numpy()
        found = {k: float(v) for k, v in re.findall(r"(min|max|mean|std|nan|inf|neg|pos|zero): (\S+?)[,\s]", text)}
        with np.errstate(all="ignore"):
            want = {"nan": np.isnan(n).sum(), "inf": np.isinf(n).sum(), "neg": (n < 0).sum(), "pos": (n > 0).sum(), "zero": (n == 0).sum()}
            if len(n):
                want |= {"min": n.min(), "max": n.max(), "mean": n.mean()}
            if len(n) > 1:
                want["std"] = n.std(ddof=1)
        for key, value in want.items():
            assert found[key] == pytest.approx(value, rel=1e-8, nan_ok=True), (key, size)


class Doubles(SubscriberBase):
    """Changes what passes by, in steps 1 and 2."""

    def __init__(self) -> None:
        super().__init__(1, 3)
        self.seen: list[tuple[int, str]] = []

    def pre_forward_tensor_apply_impl(self, run_rtx, module, tensor_index, tensor):
        return tensor * 2 if isinstance(module, nn.ReLU) else tensor

    def post_forward_module_apply_impl(self, run_rtx, module, args, outputs):
        self.seen.append((run_rtx.global_states.execution_step, type(module).__name__))
        return args, outputs

    def post_forward_outmost_module_apply_impl(self, run_rtx, module, args, outputs):
        return args, (outputs[0] + 1, outputs[1])


@pytest.mark.parametrize("wrap", [False, True])
def test_subscribers_of_ones_own(wrap):
    torch.manual_seed(1)
    model = Net().double()
    manager, sub = SubscriberManager(), Doubles()
    x, zero = torch.randn(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64)
    plain = model(x, zero)[0].detach()
    hidden = torch.relu(model.fc1(x)).detach()
    changed = (model.fc2(2 * hidden) + 1).detach()
    run = ORTModule(model) if wrap else model
    manager.subscribe(run, [sub])
    for step in range(4):
        got = run(x, zero)[0]
        assert torch.allclose(got, changed if step in (1, 2) else plain, rtol=1e-10, atol=1e-12), step
    assert [s for s, _ in sub.seen] == [1] * 4 + [2] * 4
    assert manager.get_subscriber(Doubles) is sub and manager.get_run_context().global_states.execution_step == 4
    manager.subscribe(run, [Doubles()])  # steps begin anew, the first ones are gone
    assert torch.allclose(run(x, zero)[0], plain, rtol=1e-10, atol=1e-12) and len(sub.seen) == 8
    manager.unsubscribe()
    assert not model._forward_hooks and not model.relu._forward_pre_hooks
    with pytest.raises(RuntimeError, match="is not registered"):
        manager.get_subscriber(Doubles)


def test_errors_of_subscribing(tmp_path):
    manager = SubscriberManager()
    with pytest.raises(ValueError, match="torch.nn.Module"):
        manager.subscribe(3, [])
    with pytest.raises(ValueError, match="SubscriberBase"):
        manager.subscribe(Net(), [3])
    with pytest.raises(RuntimeError, match="No subscribers"):
        manager.subscribe(Net(), [])
    with pytest.raises(RuntimeError, match="StatisticsSubscriber is not registered"):
        inspect_activation("x", torch.zeros(1))
    with pytest.raises(FileExistsError, match="override_output_dir"):
        StatisticsSubscriber(tmp_path)
    (tmp_path / "old").write_text("")
    with pytest.warns(UserWarning, match="overriding"):
        StatisticsSubscriber(tmp_path, override_output_dir=True)
    assert not tmp_path.exists()


def test_only_the_steps_that_were_asked_for(tmp_path):
    model = Net()
    hooks.GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "s", start_step=1, end_step=2, run_on_cpu=True)])
    for _ in range(3):
        model(torch.ones(2, 8), torch.ones(2, 8))[0].sum().backward()
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["step_1"]
