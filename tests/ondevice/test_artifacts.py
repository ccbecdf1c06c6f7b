"""artifacts.generate_artifacts: from an ONNX file to training on a device. Losses beside onnxruntime, gradients and
updates beside PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file
from torch import nn

from ortmodule import api, onnxblock
from ortmodule.artifacts import LossType, OptimType, generate_artifacts

ONNX_H = Path(__file__).resolve().parents[2] / "csrc/onnx/onnx.h"
ROWS, IN, HIDDEN, OUT = 9, 5, 11, 4
TRAINED = ["w1", "b1", "w2", "b2"]


def base(outputs: int = OUT, dropout: float = 0.0) -> onnx.ModelProto:
    """x -> Gemm, Relu, (Dropout), MatMul, Add -> y, with a constant scale."""
    g = np.random.default_rng(1)
    values = {
        "w1": g.normal(size=(IN, HIDDEN)), "b1": g.normal(size=HIDDEN), "w2": g.normal(size=(HIDDEN, outputs)), "b2": g.normal(size=outputs),
        "scale": np.array(0.5), "ratio": np.array(dropout)}  # fmt: skip
    inits = [numpy_helper.from_array(v.astype(np.float32), k) for k, v in values.items()]
    inits.append(numpy_helper.from_array(np.array(True), "training"))
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Dropout", ["r", "ratio", "training"], ["d"], seed=1) if dropout else helper.make_node("Identity", ["r"], ["d"]),
        helper.make_node("MatMul", ["d", "w2"], ["m"]), helper.make_node("Add", ["m", "b2"], ["a"]), helper.make_node("Mul", ["a", "scale"], ["y"])]  # fmt: skip
    if not dropout:
        inits = [i for i in inits if i.name not in ("ratio", "training")]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", IN])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])], inits)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def reference(model: onnx.ModelProto, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    p = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    for name in TRAINED:
        p[name].requires_grad_()
    return p, (torch.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) * p["scale"]


def load(folder: Path, prefix: str = "") -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(folder / f"{prefix}checkpoint")
    module = api.Module(folder / f"{prefix}training_model.onnx", state, folder / f"{prefix}eval_model.onnx")
    return state, module, api.Optimizer(folder / f"{prefix}optimizer_model.onnx", module)


def data(kind: Any, outputs: int = OUT) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(7)
    x = g.normal(size=(ROWS, IN)).astype(np.float32)
    if kind == LossType.CrossEntropyLoss:
        return x, g.integers(outputs, size=ROWS)
    t = g.normal(size=(ROWS, outputs))
    return x, (t > 0).astype(np.float32) if kind == LossType.BCEWithLogitsLoss else t.astype(np.float32)


LOSSES = {
    LossType.MSELoss: nn.functional.mse_loss,
    LossType.CrossEntropyLoss: nn.functional.cross_entropy,
    LossType.BCEWithLogitsLoss: nn.functional.binary_cross_entropy_with_logits,
    LossType.L1Loss: nn.functional.l1_loss,
}


def in_onnxruntime(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


@pytest.mark.parametrize("kind", LossType)
def test_losses(kind: LossType, tmp_path: Path) -> None:
    model = base()
    generate_artifacts(model, TRAINED, loss=kind, optimizer=OptimType.AdamW, artifact_directory=tmp_path)
    state, module, optimizer = load(tmp_path)
    x, target = data(kind)
    p, y = reference(model, torch.from_numpy(x))
    loss = LOSSES[kind](y, torch.from_numpy(target))
    loss.backward()
    got = module(x, target)
    assert got.shape == ()
    np.testing.assert_allclose(got, loss.item(), rtol=1e-5)
    for name in TRAINED:
        np.testing.assert_allclose(state.parameters[name].grad, p[name].grad, rtol=1e-4, atol=1e-6)
    weights = load_file(tmp_path / "checkpoint")
    labels = "labels" if kind == LossType.CrossEntropyLoss else "target"
    for name in ("training_model.onnx", "eval_model.onnx"):
        theirs = in_onnxruntime(tmp_path / name, {"x": x, labels: target, **weights})
        np.testing.assert_allclose(got, theirs[0], rtol=1e-5)
    assert module.input_names() == ["x", labels]
    # AdamW in transformers' order, eps 1e-6
    optimizer.step()
    for name in TRAINED:
        g = p[name].grad.double().numpy()
        m, v = 0.1 * g, 0.001 * g * g
        want = weights[name] - 1e-3 * np.sqrt(1 - 0.999) / (1 - 0.9) * m / (np.sqrt(v) + 1e-6)
        np.testing.assert_allclose(state.parameters[name].data, want, rtol=1e-5, atol=1e-7)


def test_large_logits_are_finite(tmp_path: Path) -> None:
    model = base()
    generate_artifacts(model, TRAINED, loss=LossType.BCEWithLogitsLoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    _, module, _ = load(tmp_path)
    x, target = data(LossType.BCEWithLogitsLoss)
    p, y = reference(model, torch.from_numpy(x * 1000))
    want = nn.functional.binary_cross_entropy_with_logits(y, torch.from_numpy(target))
    np.testing.assert_allclose(module(x * 1000, target), want.item(), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_losses(reduction: str, tmp_path: Path) -> None:
    weight = np.array([0.5, 2, 1, 3], np.float32)
    model = base()
    block = onnxblock.CrossEntropyLoss(weight=weight, reduction=reduction, ignore_index=2)
    generate_artifacts(model, TRAINED, loss=block, optimizer=OptimType.SGD, artifact_directory=tmp_path, prefix="ce_")
    _, module, _ = load(tmp_path, "ce_")
    x, labels = data(LossType.CrossEntropyLoss)
    _, y = reference(model, torch.from_numpy(x))
    want = nn.functional.cross_entropy(y, torch.from_numpy(labels), torch.from_numpy(weight), ignore_index=2, reduction=reduction)
    np.testing.assert_allclose(module(x, labels), want.item(), rtol=1e-5)
    block = onnxblock.BCEWithLogitsLoss(weight=weight, reduction=reduction, pos_weight=weight * 2)
    generate_artifacts(model, TRAINED, loss=block, optimizer=OptimType.SGD, artifact_directory=tmp_path, prefix="bce_")
    _, module, _ = load(tmp_path, "bce_")
    x, target = data(LossType.BCEWithLogitsLoss)
    want = nn.functional.binary_cross_entropy_with_logits(
        y, torch.from_numpy(target), torch.from_numpy(weight), pos_weight=torch.from_numpy(weight * 2), reduction=reduction)  # fmt: skip
    np.testing.assert_allclose(module(x, target), want.item(), rtol=1e-5)
    with pytest.raises(RuntimeError, match="'mean', 'sum' and 'none'"):
        onnxblock.MSELoss("median")


class Both(onnxblock.Block):
    def __init__(self) -> None:
        self.mse, self.l1 = onnxblock.MSELoss(), onnxblock.L1Loss()
        self.add, self.mul, self.third = onnxblock.Add(), onnxblock.Mul(), onnxblock.Constant(1 / 3)

    def build(self, *inputs: str) -> str:
        return self.add(self.mse(inputs[0]), self.mul(self.l1(inputs[0], "target"), self.third()))


def test_own_loss(tmp_path: Path) -> None:
    model = base()
    generate_artifacts(model, TRAINED, loss=Both(), optimizer=OptimType.SGD, artifact_directory=tmp_path, additional_output_names=["y"])
    state, module, optimizer = load(tmp_path)
    x, target = data(LossType.MSELoss)
    p, y = reference(model, torch.from_numpy(x))
    t = torch.from_numpy(target)
    want = nn.functional.mse_loss(y, t) + nn.functional.l1_loss(y, t) / 3
    want.backward()
    loss, scores = module(x, target)
    np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
    np.testing.assert_allclose(scores, y.detach(), rtol=1e-5, atol=1e-6)
    assert module.output_names()[1] == "y"
    optimizer.set_learning_rate(0.1)
    optimizer.step()
    np.testing.assert_allclose(state.parameters["w1"].data, (p["w1"] - 0.1 * p["w1"].grad).detach(), rtol=1e-5, atol=1e-6)


def test_loss_in_the_model_and_frozen(tmp_path: Path) -> None:
    """No loss given: the first output is it. Frozen parameters are inputs, other initializers constants."""
    model = base(outputs=1)
    model.graph.node.append(helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    onnx.save(model, tmp_path / "model.onnx")
    generate_artifacts(
        str(tmp_path / "model.onnx"), ["w1"], ["w2", "b2"], optimizer=OptimType.SGD, artifact_directory=tmp_path,
        nominal_checkpoint=True)  # fmt: skip
    train = onnx.load(tmp_path / "training_model.onnx")
    assert [i.name for i in train.graph.input] == ["x", "w1", "w2", "b2"]
    assert sorted(t.name for t in train.graph.initializer) == ["b1", "scale"]
    state, module, optimizer = load(tmp_path)
    assert [n for n, p in state.parameters.items() if p.requires_grad] == ["w1"]
    x, _ = data(LossType.MSELoss)
    module(x)
    optimizer.step()
    nominal = api.CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
    other = api.Module(tmp_path / "training_model.onnx", nominal)
    assert other.get_parameters_size() == IN * HIDDEN and other.get_parameters_size(False) == IN * HIDDEN + HIDDEN + 1


def test_dropout_is_of_training(tmp_path: Path) -> None:
    model = base(dropout=0.4)
    generate_artifacts(model, TRAINED, loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    _, module, _ = load(tmp_path)
    x, target = data(LossType.MSELoss)
    _, y = reference(model, torch.from_numpy(x))
    want = nn.functional.mse_loss(y, torch.from_numpy(target)).item()
    drawn = {float(module(x, target)) for _ in range(4)}
    assert len(drawn) == 4 and all(abs(d - want) > 1e-4 for d in drawn)
    np.testing.assert_allclose(module.eval()(x, target), want, rtol=1e-5)


def test_symbolic_rows(tmp_path: Path) -> None:
    """Batches of several sizes; the graph has a symbol for the rows."""
    model = base()
    generate_artifacts(model, TRAINED, loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    _, module, _ = load(tmp_path)
    x, target = data(LossType.MSELoss)
    for rows in (9, 4, 9, 1):
        _, y = reference(model, torch.from_numpy(x[:rows]))
        want = nn.functional.mse_loss(y, torch.from_numpy(target[:rows])).item()
        np.testing.assert_allclose(module(x[:rows], target[:rows]), want, rtol=1e-5)
        np.testing.assert_allclose(module.eval()(x[:rows], target[:rows]), want, rtol=1e-5)
        module.train()


@pytest.mark.parametrize("kind", [LossType.CrossEntropyLoss, LossType.MSELoss])
@pytest.mark.parametrize("name", ["", None])
def test_unnamed_rows(name: str | None, kind: LossType, tmp_path: Path) -> None:
    """A size that has no name, or an empty one, is any: the labels' as well."""
    model = base()
    for i in [*model.graph.input, *model.graph.output]:
        rows = i.type.tensor_type.shape.dim[0]
        rows.Clear()
        if name is not None:
            rows.dim_param = name
    generate_artifacts(model, TRAINED, loss=kind, optimizer=OptimType.SGD, artifact_directory=tmp_path, additional_output_names=["y"])
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == ""  # the caller's stays
    _, module, _ = load(tmp_path)
    x, target = data(kind)
    for rows in (9, 4, 1):
        _, y = reference(model, torch.from_numpy(x[:rows]))
        want = LOSSES[kind](y, torch.from_numpy(target[:rows])).item()
        np.testing.assert_allclose(module(x[:rows], target[:rows])[0], want, rtol=1e-5)
        np.testing.assert_allclose(module.eval()(x[:rows], target[:rows])[0], want, rtol=1e-5)
        module.train()


@pytest.mark.parametrize("opset", range(9, 26))
def test_opsets(opset: int, tmp_path: Path) -> None:
    """Those that a trainer loads are taken; others are refused when artifacts are made, and nothing is written."""
    low, high = (int(re.search(rf"OM_ONNX_OPSET_{end} = (\d+)", ONNX_H.read_text()).group(1)) for end in ("MIN", "MAX"))
    model = base()
    model.opset_import[0].version = opset
    if low <= opset <= high:
        generate_artifacts(model, TRAINED, loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
        load(tmp_path)[1](*data(LossType.CrossEntropyLoss))
        return
    with pytest.raises(RuntimeError, match=f"opset {opset} of ai.onnx; {low} to {high} are taken .onnx.version_converter converts"):
        generate_artifacts(model, TRAINED, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_clipping(tmp_path: Path) -> None:
    model = base()
    clipped = onnxblock.SGD(onnxblock.ClipGradNorm(0.25))
    generate_artifacts(model, TRAINED, loss=LossType.MSELoss, optimizer=clipped, artifact_directory=tmp_path)
    state, module, optimizer = load(tmp_path)
    optimizer.set_learning_rate(1.0)
    x, target = data(LossType.MSELoss)
    p, y = reference(model, torch.from_numpy(x))
    nn.functional.mse_loss(y, torch.from_numpy(target)).backward()
    norm = nn.utils.clip_grad_norm_([p[n] for n in TRAINED], 0.25)
    assert norm > 0.25
    module(x, target)
    optimizer.step()
    for name in TRAINED:
        np.testing.assert_allclose(state.parameters[name].data, (p[name] - p[name].grad).detach(), rtol=1e-5, atol=1e-6)


def test_settings_of_adamw(tmp_path: Path) -> None:
    """Decay after the step, of the weights it has moved: transformers' order."""
    model = base()
    block = onnxblock.AdamW(bias_correction=False, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1)
    generate_artifacts(model, TRAINED, loss=LossType.MSELoss, optimizer=block, artifact_directory=tmp_path)
    state, module, optimizer = load(tmp_path)
    optimizer.set_learning_rate(0.01)
    x, target = data(LossType.MSELoss)
    p, y = reference(model, torch.from_numpy(x))
    nn.functional.mse_loss(y, torch.from_numpy(target)).backward()
    module(x, target)
    optimizer.step()
    for name in TRAINED:
        g = p[name].grad.double()
        moved = p[name].detach() - 0.01 * 0.2 * g / ((0.01 * g * g).sqrt() + 1e-3)
        np.testing.assert_allclose(state.parameters[name].data, moved - 0.01 * 0.1 * moved, rtol=1e-5, atol=1e-7)


def test_clip_block(tmp_path: Path) -> None:
    class Bounded(onnxblock.Block):
        def build(self, *inputs: str) -> str:
            return onnxblock.MSELoss()(onnxblock.Clip(-0.5, 0.5)(inputs[0]))

    model = base()
    generate_artifacts(model, TRAINED, loss=Bounded(), optimizer=OptimType.SGD, artifact_directory=tmp_path)
    _, module, _ = load(tmp_path)
    x, target = data(LossType.MSELoss)
    _, y = reference(model, torch.from_numpy(x))
    np.testing.assert_allclose(module(x, target), nn.functional.mse_loss(y.clamp(-0.5, 0.5), torch.from_numpy(target)).item(), rtol=1e-5)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    model = base()
    for arguments, words in (
        (dict(requires_grad=["w1", "nothing"]), "requires_grad: nothing: no initializer"),
        (dict(requires_grad=["w1"], frozen_params=["w1"]), "in requires_grad and in frozen_params: w1"),
        (dict(), "no parameter to train"),
        (dict(requires_grad=["w1"], ort_format=True), "only onnxruntime"),
        (dict(requires_grad=["w1"], loss_input_names=["z"]), "loss_input_names: z"),
        (dict(requires_grad=["w1"], additional_output_names=["z"]), "additional_output_names: z"),
        (dict(requires_grad=["w1"], loss="mse"), "a LossType or an onnxblock.Block"),
        (dict(requires_grad=["w1"], loss=LossType.MSELoss, optimizer="adam"), "an OptimType, onnxblock.AdamW or SGD"),
    ):
        with pytest.raises(RuntimeError, match=words):
            generate_artifacts(model, artifact_directory=tmp_path / "none", **arguments)
    assert not (tmp_path / "none").exists()
    with pytest.raises(RuntimeError, match=r"'y' is float \[rows, 4\]; one float number is expected: give loss="):
        generate_artifacts(model, ["w1"], artifact_directory=tmp_path / "none")
    with pytest.raises(RuntimeError, match="ReduceMean or ReduceSum"):
        generate_artifacts(model, ["w1"], loss=onnxblock.MSELoss("none"), artifact_directory=tmp_path / "none")
    for wrong in (dict(betas=(0.9, 1.5)), dict(eps=float("nan")), dict(weight_decay=float("inf"))):
        with pytest.raises(ValueError, match="expected"):
            onnxblock.AdamW(**wrong)
    for norm in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="max_norm"):
            onnxblock.ClipGradNorm(norm)


def test_an_output_that_is_no_loss_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    generate_artifacts(base(), TRAINED, loss=LossType.MSELoss, artifact_directory=tmp_path, additional_output_names=["y"])
    model = onnx.load(tmp_path / "training_model.onnx")
    first, second = model.graph.output
    first.CopyFrom(model.graph.output[1]), second.CopyFrom(onnx.load(tmp_path / "training_model.onnx").graph.output[0])
    with pytest.raises(api.TrainingError, match=r"'y', is f32 \[\?, 4\]; it must be the loss"):
        api.Module(model.SerializeToString(), api.CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
