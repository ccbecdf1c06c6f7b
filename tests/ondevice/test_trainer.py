"""ortmodule.api and the C trainer below it, beside eager PyTorch and the Python engine."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from device_models import OPTIMIZERS, Cnn, Former, Mlp, artifacts, batch, trainer
from killed_saves import header, with_header
from safetensors.numpy import load_file
from torch import Tensor, nn

from ortmodule import ORTModule, api

ROOT = Path(__file__).resolve().parents[2]
STEPS = 100


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Mlp, Cnn, Former])
def test_hundred_steps(kind: type[nn.Module], optimizer: str, tmp_path: Path) -> None:
    """Losses and weights as in eager PyTorch with the same optimizer; the Python engine's losses, bit for bit, while both
    have the same weights."""
    torch.manual_seed(3)
    module = kind()
    eager = copy.deepcopy(module)
    steps = OPTIMIZERS[optimizer](eager.parameters())
    model = artifacts(module, tmp_path, kind, OPTIMIZERS[optimizer](module.parameters()))
    state, device, update = trainer(tmp_path)
    ours, theirs = [], []
    for i in range(STEPS):
        x, labels = batch(kind, i % 4)
        steps.zero_grad()
        loss, _ = eager(x, labels)
        loss.backward()
        steps.step()
        theirs.append(loss.item())
        if i < 3 or i == STEPS - 1:  # the Python engine, put where the device is
            with torch.no_grad():
                for name, t in [*model.named_parameters(), *model.named_buffers()]:
                    if name in state.parameters:
                        t.copy_(torch.from_numpy(state.parameters[name].data))
            python, scores = model(x, labels)
            python.backward()
            got, got_scores = device(x.numpy(), labels.numpy())
            assert got.tobytes() == python.detach().numpy().tobytes()
            assert np.array_equal(got_scores, scores.detach().numpy())
            for name, p in model.named_parameters():
                assert np.array_equal(state.parameters[name].grad, p.grad.numpy()), name
            model.zero_grad()
        else:
            got, _ = device(x.numpy(), labels.numpy())
        ours.append(float(got))
        update.step()
        device.lazy_reset_grad()
    assert ours[0] != ours[-1]
    np.testing.assert_allclose(ours, theirs, rtol=2e-4 if kind is Mlp else 5e-3)
    assert ours[-1] < 0.9 * ours[0]
    eager.eval()
    device.eval()
    x, labels = batch(kind, 2)
    loss, scores = eager(x, labels)
    got, got_scores = device(x.numpy(), labels.numpy())
    np.testing.assert_allclose(float(got), loss.item(), rtol=1e-2)


def test_files_are_standard(tmp_path: Path) -> None:
    """onnx.checker takes them; onnxruntime computes the same loss; safetensors opens the weights."""
    torch.manual_seed(5)
    module = Cnn()
    x, labels = batch(Cnn, 0)
    model = artifacts(module, tmp_path, Cnn, 1)
    state, device, _ = trainer(tmp_path)
    weights = load_file(tmp_path / "checkpoint")
    assert {n: t.tobytes() for n, t in weights.items()} == {
        n: t.detach().numpy().tobytes() for n, t in model.state_dict().items() if n in weights
    }
    loss, scores = device(x.numpy(), labels.numpy())
    device.eval()
    eval_loss, eval_scores = device(x.numpy(), labels.numpy())
    weights.update({n: p.data for n, p in state.parameters.items()})  # BatchNorm's statistics have moved
    for name, want in (("training_model.onnx", None), ("eval_model.onnx", eval_loss)):
        onnx.checker.check_model(onnx.load(tmp_path / name), full_check=True)
        session = onnxruntime.InferenceSession(tmp_path / name)
        feeds = {"input_0": x.numpy(), "input_1": labels.numpy(), **weights}
        feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
        got = session.run(None, feeds)[0]
        np.testing.assert_allclose(got, loss if want is None else want, rtol=1e-5)
    onnx.checker.check_model(onnx.load(tmp_path / "optimizer_model.onnx"))
    assert eval_scores.shape == scores.shape


def test_export(tmp_path: Path) -> None:
    torch.manual_seed(5)
    artifacts(Cnn(), tmp_path, Cnn, 1)
    _, device, update = trainer(tmp_path)
    x, labels = (t.numpy() for t in batch(Cnn, 0))
    for _ in range(3):
        device(x, labels)
        update.step()
        device.lazy_reset_grad()
    device.eval()
    _, scores = device(x, labels)
    loss_name, scores_name = device.output_names()
    device.export_model_for_inferencing(tmp_path / "out.onnx", [scores_name])
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    assert [i.name for i in session.get_inputs()] == ["input_0"]  # labels belong to the loss
    np.testing.assert_allclose(session.run(None, {"input_0": x})[0], scores, rtol=1e-4, atol=1e-5)
    device.export_model_for_inferencing(tmp_path / "both.onnx", [scores_name, loss_name])
    session = onnxruntime.InferenceSession(tmp_path / "both.onnx")
    assert len(session.run(None, {"input_0": x, "input_1": labels})) == 2
    with pytest.raises(api.TrainingError, match="'nothing' is no output"):
        device.export_model_for_inferencing(tmp_path / "no.onnx", ["nothing"])
    with pytest.raises(api.TrainingError, match=f"output '{scores_name}' is named twice"):
        device.export_model_for_inferencing(tmp_path / "no.onnx", [scores_name, scores_name])
    assert not (tmp_path / "no.onnx").exists()


class Pooled(nn.Module):
    """Windows that do not divide, and a loss that has no meaning in standard operators."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.o = nn.Conv1d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.o(nn.functional.adaptive_avg_pool1d(self.c(x), 5).transpose(1, 2)).log_softmax(-1)
        lengths = torch.full((x.shape[0],), 5), torch.full((x.shape[0],), 2)
        return nn.functional.ctc_loss(y.transpose(0, 1), labels, *lengths), y


def test_export_of_own_operators(tmp_path: Path) -> None:
    """With a body in standard operators any runtime has them; without one it is said."""
    x, labels = torch.randn(2, 3, 10), torch.tensor([[1, 2], [4, 3]])
    ORTModule(Pooled()).save_for_device(tmp_path, (x, labels))
    _, device, _ = trainer(tmp_path)
    loss, want = device.eval()(x.numpy(), labels.numpy())
    loss_name, y_name = device.output_names()
    device.export_model_for_inferencing(tmp_path / "y.onnx", [y_name])
    np.testing.assert_allclose(onnxruntime.InferenceSession(tmp_path / "y.onnx").run(None, {"input_0": x.numpy()})[0], want, rtol=1e-4, atol=1e-5)
    with pytest.raises(api.TrainingError, match="export: CTCLoss of domain ortmodule has no meaning in standard operators"):
        device.export_model_for_inferencing(tmp_path / "loss.onnx", [loss_name])
    assert not (tmp_path / "loss.onnx").exists()


def test_gradients_add_up_until_they_are_reset(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Mlp()
    artifacts(module, tmp_path, Mlp, 1)
    state, device, update = trainer(tmp_path)
    batches = [batch(Mlp, k) for k in range(3)]
    for x, labels in batches:
        device(x.numpy(), labels.numpy())
    sum(module(x, labels)[0] for x, labels in batches).backward()
    for name, p in module.named_parameters():
        np.testing.assert_allclose(state.parameters[name].grad, p.grad, rtol=1e-5, atol=1e-6)
    device.lazy_reset_grad()
    assert state.parameters["net.0.bias"].grad is not None  # lazily
    module.zero_grad()
    x, labels = batches[1]
    device(x.numpy(), labels.numpy())
    module(x, labels)[0].backward()
    np.testing.assert_allclose(state.parameters["net.0.bias"].grad, module.net[0].bias.grad, rtol=1e-5, atol=1e-7)
    device.lazy_reset_grad()
    update.step()
    assert api._lib.om_trainer_updates(device._t.p) == 1


def test_frozen_parameters(tmp_path: Path) -> None:
    module = Mlp()
    module.net[0].weight.requires_grad_(False)
    artifacts(module, tmp_path, Mlp, 1)
    state, device, update = trainer(tmp_path)
    before = {n: p.data for n, p in state.parameters.items()}
    x, labels = batch(Mlp, 0)
    device(x.numpy(), labels.numpy())
    update.step()
    changed = {n for n, p in state.parameters.items() if not np.array_equal(p.data, before[n])}
    assert changed == {"net.0.bias", "net.2.weight", "net.2.bias"}
    assert {n for n, p in state.parameters.items() if p.requires_grad} == changed
    assert state.parameters["net.0.weight"].grad is None
    assert device.get_parameters_size() == 19 + 95 + 5 and device.get_parameters_size(False) == 119 + 133


def test_one_buffer(tmp_path: Path) -> None:
    module = Cnn()
    module.c1.bias.requires_grad_(False)
    artifacts(module, tmp_path, Cnn, 1)
    state, device, _ = trainer(tmp_path)
    names = [i.name for i in onnx.load(tmp_path / "training_model.onnx").graph.input]
    order = [n for n in names if n in state.parameters and state.parameters[n].data.dtype == np.float32]
    everything = device.get_contiguous_parameters()
    assert np.array_equal(everything, np.concatenate([state.parameters[n].data.ravel() for n in order]))
    some = device.get_contiguous_parameters(True)
    assert some.size == device.get_parameters_size() == sum(p.numel() for p in module.parameters() if p.requires_grad)
    device.copy_buffer_to_parameters(some * 2)
    assert np.array_equal(device.get_contiguous_parameters(True), some * 2)
    assert np.array_equal(state.parameters["c1.bias"].data, module.c1.bias.detach().numpy())
    device.copy_buffer_to_parameters(everything, False)
    assert np.array_equal(device.get_contiguous_parameters(), everything)
    with pytest.raises(api.TrainingError, match=f"{some.size} elements; these parameters have {everything.size}"):
        device.copy_buffer_to_parameters(some, False)


def test_nominal(tmp_path: Path) -> None:
    """A client that is sent the weights."""
    torch.manual_seed(2)
    artifacts(Mlp(), tmp_path, Mlp, 1)
    _, full, update = trainer(tmp_path)
    x, labels = (t.numpy() for t in batch(Mlp, 0))
    state = api.CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
    device = api.Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    step = api.Optimizer(tmp_path / "optimizer_model.onnx", device)
    for refused in (lambda: device(x, labels), lambda: device.eval()(x, labels), step.step,
                    device.get_contiguous_parameters, lambda: device.copy_buffer_to_parameters(np.zeros(252)),
                    lambda: device.export_model_for_inferencing(tmp_path / "n.onnx", ["x"]),
                    lambda: api.CheckpointState.save_checkpoint(state, tmp_path / "n")):  # fmt: skip
        with pytest.raises(api.TrainingError, match="load parameters first"):
            refused()
        device.train()
    assert device.get_parameters_size() == 252
    device.copy_buffer_to_parameters(full.get_contiguous_parameters(), False)
    assert device(x, labels)[0] == full(x, labels)[0]
    step.step()
    update.step()
    assert np.array_equal(device.get_contiguous_parameters(), full.get_contiguous_parameters())


def test_checkpoint_continues(tmp_path: Path) -> None:
    """Stopped after five steps, gone on: the bits of ten in one go. Without moments they differ."""
    torch.manual_seed(2)
    artifacts(Mlp(), tmp_path, Mlp, 1)
    x, labels = (t.numpy() for t in batch(Mlp, 0))

    def train(device: api.Module, update: api.Optimizer, n: int) -> bytes:
        for _ in range(n):
            device(x, labels)
            update.step()
            device.lazy_reset_grad()
        return device.get_contiguous_parameters().tobytes()

    state, device, update = trainer(tmp_path)
    want = train(device, update, 10)
    for moments in (True, False):
        state, device, update = trainer(tmp_path)
        update.set_learning_rate(1e-3)
        train(device, update, 5)
        state.properties["epoch"], state.properties["best"], state.properties["who"] = 7, 0.1, 'é "q" \\ \n'
        api.CheckpointState.save_checkpoint(state, tmp_path / "later", moments)
        state = api.CheckpointState.load_checkpoint(tmp_path / "later")
        device = api.Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
        update = api.Optimizer(tmp_path / "optimizer_model.onnx", device)
        assert dict(state.properties) == {"epoch": 7, "best": 0.1, "who": 'é "q" \\ \n'}
        assert (train(device, update, 5) == want) == moments
        assert sorted(load_file(tmp_path / "later")) == sorted(
            n for n in state.parameters for n in [n] + [f"optimizer.{k}:{n}" for k in ("exp_avg", "exp_avg_sq") if moments]
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_goes_on_where_pytorch_stopped(optimizer: str, tmp_path: Path) -> None:
    """The optimizer's moments and its count of steps come along."""
    torch.manual_seed(6)
    module = Mlp()
    steps = OPTIMIZERS[optimizer](module.parameters())

    def eager() -> float:
        steps.zero_grad()
        loss, _ = module(*batch(Mlp, 0))
        loss.backward()
        steps.step()
        return float(loss.detach())

    for _ in range(5):
        eager()
    artifacts(module, tmp_path, Mlp, steps)
    _, device, update = trainer(tmp_path)
    x, labels = (t.numpy() for t in batch(Mlp, 0))
    for _ in range(5):
        np.testing.assert_allclose(device(x, labels)[0], eager(), rtol=1e-5)
        update.step()
        device.lazy_reset_grad()
    for name, p in module.named_parameters():
        np.testing.assert_allclose(device._state.parameters[name].data, p.detach(), rtol=1e-4, atol=1e-6)


def test_parameters_of_different_age(tmp_path: Path) -> None:
    module = Mlp()
    steps = torch.optim.AdamW(module.parameters())
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    steps.step()
    with pytest.raises(ValueError, match="fewer steps than others"):
        artifacts(module, tmp_path, Mlp, steps)


@pytest.mark.parametrize("setting", [{"maximize": True}, {"amsgrad": True}, {"decoupled_weight_decay": False}])
def test_settings_of_adamw_that_a_device_has_not(setting: dict, tmp_path: Path) -> None:
    module = Mlp()
    steps = torch.optim.AdamW([{"params": list(module.parameters()), **setting}])
    with pytest.raises(ValueError, match=f"optimizer: {next(iter(setting))}.* not supported on a device"):
        artifacts(module, tmp_path, Mlp, steps)


def test_one_trainer_a_thread(tmp_path: Path) -> None:
    """Two trainers at once in two threads (a call lets the interpreter go): each the bits it has alone."""
    for kind in (Mlp, Former):
        torch.manual_seed(1)
        artifacts(kind(), tmp_path / kind.__name__, kind, 1)

    def train(kind: type[nn.Module], threads: int) -> bytes:
        _, device, update = trainer(tmp_path / kind.__name__, threads=threads)
        for i in range(40):
            device(*(t.numpy() for t in batch(kind, i % 4)))
            update.step()
            device.lazy_reset_grad()
        return device.get_contiguous_parameters().tobytes()

    jobs = [(kind, threads) for kind in (Mlp, Former) for threads in (0, 2)] * 2
    alone = [train(*job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(train, *zip(*jobs))) == alone


def test_rates(tmp_path: Path) -> None:
    artifacts(Mlp(), tmp_path, Mlp, 1)
    _, device, update = trainer(tmp_path)
    x, labels = (t.numpy() for t in batch(Mlp, 0))
    assert update.get_learning_rate() == pytest.approx(1e-3)
    update.set_learning_rate(0.25)
    assert update.get_learning_rate() == 0.25
    schedule = api.LinearLRScheduler(update, 2, 6, 0.5)
    rates = [update.get_learning_rate()]
    for _ in range(7):
        device(x, labels)
        update.step()
        schedule.step()
        rates.append(update.get_learning_rate())
    assert rates == pytest.approx([0, 0.25, 0.5, 0.375, 0.25, 0.125, 0, 0])
    with pytest.raises(api.TrainingError, match="warm-up"):
        api.LinearLRScheduler(update, 6, 6, 0.5)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(400))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.w * x, 0.5, self.training).mean()


def test_seed(tmp_path: Path) -> None:
    ORTModule(Dropped()).save_for_device(tmp_path, torch.ones(400))
    x = np.ones(400, np.float32)

    def losses(seed: int) -> list[float]:
        api.set_seed(seed)
        _, device, _ = trainer(tmp_path)
        return [float(device(x)) for _ in range(4)]

    a, b = losses(1), losses(2)
    assert a == losses(1) and a != b and len(set(a)) > 1
    _, device, _ = trainer(tmp_path)
    assert float(device.eval()(x)) == 1.0
    api.set_seed(0)


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_checkpoint_goes_on_drawing(seed: int, tmp_path: Path) -> None:
    """With the state of the optimizer it has where random operators are: the masks of a run that was not stopped,
    whatever seed the later process begins with. Without, and in files of before, the process has its own."""
    ORTModule(Dropped()).save_for_device(tmp_path, torch.ones(400))
    x = np.ones(400, np.float32)

    def losses(device: api.Module, update: api.Optimizer, n: int) -> list[float]:
        out = []
        for _ in range(n):
            out.append(float(device(x)))
            update.step()
            device.lazy_reset_grad()
        return out

    def later(name: str) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
        state = api.CheckpointState.load_checkpoint(tmp_path / name)
        device = api.Module(tmp_path / "training_model.onnx", state)
        return state, device, api.Optimizer(tmp_path / "optimizer_model.onnx", device)

    api.set_seed(seed)
    _, device, update = trainer(tmp_path)
    want = losses(device, update, 8)
    state, device, update = trainer(tmp_path)
    assert losses(device, update, 3) == want[:3]
    for moments in (True, False):
        api.CheckpointState.save_checkpoint(state, tmp_path / f"moments {moments}", moments)
    api.set_seed(5)
    assert losses(*later("moments True")[1:], 5) == want[3:]
    fresh = losses(*later("moments False")[1:], 5)
    assert fresh != want[3:] and fresh == losses(*later("moments False")[1:], 5)
    state, device, update = later("moments True")
    api.set_seed(seed)  # said afterwards, it is begun anew
    again = losses(device, update, 5)
    assert again != want[3:]
    data = (tmp_path / "moments True").read_bytes()
    head, rest = header(data)
    assert (head["__metadata__"]["seed"], head["__metadata__"]["drawn"]) == (str(seed), "3")
    del head["__metadata__"]["seed"], head["__metadata__"]["drawn"]
    (tmp_path / "before").write_bytes(with_header(head, rest))
    assert losses(*later("before")[1:], 5) == again
    device._t.check(api._lib.om_trainer_restore(device._t.p, api._Bytes(data, len(data))))
    assert losses(device, update, 5) == want[3:]
    api.set_seed(0)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    artifacts(Mlp(), tmp_path, Mlp, 1)
    _, device, update = trainer(tmp_path)
    x, labels = (t.numpy() for t in batch(Mlp, 0))
    for call, words in (
        (lambda: device(x), "1 inputs were given; the graph takes 2: input_0, input_1"),
        (lambda: device(x[:5], labels), r"input 0 .'input_0'. is f32 \[5, 7\]; the graph takes f32 \[11, 7\]: a size that is a number"),
        (lambda: device(x.astype(np.float64), labels), r"is f64 \[11, 7\]; the graph takes f32 \[11, 7\]"),
        (lambda: device(x, labels + 100), "100"),
        (update.step, "there are no gradients"),
    ):
        with pytest.raises(api.TrainingError, match=words):
            call()
    device(x, labels)
    update.step()  # after all that
    for module, optimizer, error, words in (
        (Mlp(), torch.optim.Adam(Mlp().parameters()), ValueError, "parameters that require a gradient are not in it"),
        (nn.Linear(7, 5), 1, ValueError, "must return the loss"),
    ):
        given = batch(Mlp, 0) if isinstance(module, Mlp) else torch.ones(2, 7)
        with pytest.raises(error, match=words):
            ORTModule(module).save_for_device(tmp_path / "x", given, optimizer=optimizer)
    assert not (tmp_path / "x").exists()


def test_numpy_is_enough(tmp_path: Path) -> None:
    """In a process where neither torch nor onnx can be imported."""
    artifacts(Mlp(), tmp_path, Mlp, 1)
    program = f"""
import sys
sys.modules["torch"] = sys.modules["onnx"] = None
import numpy as np
from ortmodule.api import CheckpointState, Module, Optimizer
state = CheckpointState.load_checkpoint({str(tmp_path / "checkpoint")!r})
module = Module({str(tmp_path / "training_model.onnx")!r}, state, {str(tmp_path / "eval_model.onnx")!r})
optimizer = Optimizer({str(tmp_path / "optimizer_model.onnx")!r}, module)
x, labels = np.ones((11, 7), np.float32), np.zeros(11, np.int64)
losses = []
for _ in range(20):
    losses.append(float(module(x, labels)[0]))
    optimizer.step()
    module.lazy_reset_grad()
assert losses[-1] < losses[0]
print(module.memory())
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "arena" in done.stdout, done.stderr
