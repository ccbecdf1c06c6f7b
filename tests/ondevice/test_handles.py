"""ortmodule.api as a program uses it: handles that are older than the optimizer, a wrong optimizer's file, arrays of any
strides, two threads that save to one path."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortmodule import ORTModule, api


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.o = nn.Conv1d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.o(self.conv(x).relu().mean(-1)), labels)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("handles")
    ORTModule(Net()).save_for_device(folder, (torch.zeros(6, 3, 8), torch.zeros(6, dtype=torch.long)))
    return folder


def made(files: Path) -> tuple[api.CheckpointState, api.Module]:
    state = api.CheckpointState.load_checkpoint(files / "checkpoint")
    return state, api.Module(files / "training_model.onnx", state)


def batch() -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    return g.normal(size=(6, 3, 8)).astype(np.float32), g.integers(0, 2, 6)


def test_a_parameter_from_before_the_optimizer(files: Path) -> None:
    state, module = made(files)
    held = dict(state.parameters.items())
    before = {name: p.data for name, p in held.items()}
    optimizer = api.Optimizer(files / "optimizer_model.onnx", module)
    schedule = api.LinearLRScheduler(optimizer, 0, 10, 0.1)
    for name, p in held.items():
        assert p.name == name and p.requires_grad and np.array_equal(p.data, before[name])
    module(*batch())
    optimizer.step()
    schedule.step()
    assert all(np.array_equal(p.data, state.parameters[n].data) and not np.array_equal(p.data, before[n]) for n, p in held.items())


@pytest.mark.parametrize("wrong", ["training_model.onnx", b"junk"])
def test_a_wrong_optimizers_file_leaves_the_module_as_it_was(files: Path, wrong: str | bytes, tmp_path: Path) -> None:
    state, module = made(files)
    loss = module(*batch())
    with pytest.raises(api.TrainingError):
        api.Optimizer(files / wrong if isinstance(wrong, str) else wrong, module)
    assert module(*batch()) == loss and module.memory() and state.parameters["o.bias"].data.shape == (2,)
    api.CheckpointState.save_checkpoint(state, tmp_path / "after")
    optimizer, before = api.Optimizer(files / "optimizer_model.onnx", module), state.parameters["o.bias"].data
    assert module(*batch()) == loss
    optimizer.step()
    assert not np.array_equal(state.parameters["o.bias"].data, before)


def test_arrays_of_any_strides(files: Path) -> None:
    _, module = made(files)
    x, labels = batch()
    want = module(x, labels)
    for given in (np.asfortranarray(x), np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1), np.repeat(x, 2, -1)[..., ::2], x[::-1][::-1]):
        assert module(given, labels[::-1][::-1]) == want
    assert module(np.broadcast_to(x[:1], x.shape), labels) == module(np.repeat(x[:1], 6, 0), labels)


def test_two_threads_save_to_one_path(files: Path, tmp_path: Path) -> None:
    states = [made(files) for _ in range(2)]
    errors: list[BaseException] = []

    def save(state: api.CheckpointState) -> None:
        try:
            for _ in range(100):
                api.CheckpointState.save_checkpoint(state, tmp_path / "one")
                api.CheckpointState.load_checkpoint(tmp_path / "one")
        except BaseException as e:  # noqa: BLE001
            errors.append(e)

    threads = [threading.Thread(target=save, args=(state,)) for state, _ in states]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def test_one_trainer_of_two_threads(files: Path, tmp_path: Path) -> None:
    """A call while another thread's goes on is refused by name; what was taken is one whole call after another."""
    state, module = made(files)
    optimizer = api.Optimizer(files / "optimizer_model.onnx", module)
    said: set[str] = set()
    begin, waiting = threading.Barrier(4), module._t

    def work(k: int) -> None:
        begin.wait()
        for _ in range(200):
            for call in (lambda: module(*batch()), optimizer.step, module.lazy_reset_grad,
                         lambda: api.CheckpointState.save_checkpoint(state, tmp_path / f"{k}", True)):  # fmt: skip
                try:
                    call()
                except api.TrainingError as error:
                    said.add(str(error))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    known = ("another thread is in a call of this trainer", "update: there are no gradients")
    assert said and all(text.startswith(known) for text in said), said
    with waiting.alone():  # a call that does not end
        for call in (lambda: module(*batch()), optimizer.step, module.lazy_reset_grad, module.get_contiguous_parameters,
                     lambda: api.CheckpointState.save_checkpoint(state, tmp_path / "x")):  # fmt: skip
            with pytest.raises(api.TrainingError, match="one trainer is one thread's at a time"):
                call()
    assert np.isfinite(module(*batch()))
