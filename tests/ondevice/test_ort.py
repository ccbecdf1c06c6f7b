"""Artifacts that onnxruntime-training 1.19.2 made (tests/ort_models.py; its files and numbers are in ort/): its losses of
evaluation and training, its parameters, moments and properties; its checkpoints when they are broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import onnx
import onnxruntime
import ort_models
import pytest
from onnx import numpy_helper

from ortmodule import api

HOME = Path(__file__).with_name("ort")
MODELS = ort_models.models(False)


def load(name: str, checkpoint: str | bytes = "checkpoint") -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    home = HOME / name
    state = api.CheckpointState.load_checkpoint(checkpoint if isinstance(checkpoint, bytes) else home / checkpoint)
    module = api.Module(home / "training_model.onnx", state, home / "eval_model.onnx")
    return state, module, api.Optimizer(home / "optimizer_model.onnx", module)


def told(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(HOME / name / "told.npz"))


def run(name: str, module: api.Module, optimizer: api.Optimizer, steps: range) -> tuple[list[float], list[float]]:
    evals, losses = [], []
    for step in steps:
        batch = ort_models.inputs(MODELS[name][0], step % 3)
        evals.append(float(module.eval()(*batch)))
        losses.append(float(module.train()(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    return evals, losses


@pytest.mark.parametrize("name", MODELS)
def test_its_losses(name: str) -> None:
    state, module, optimizer = load(name)
    want = told(name)
    assert optimizer.get_learning_rate() == pytest.approx(1e-3)
    optimizer.set_learning_rate(0.01)
    evals, losses = run(name, module, optimizer, range(10))
    np.testing.assert_allclose(evals, want["evals"], rtol=1e-5)
    np.testing.assert_allclose(losses, want["losses"], rtol=1e-5)
    assert losses[-1] < losses[0]
    trained = {n for n, p in state.parameters.items() if p.requires_grad}
    assert {f"end:{n}" for n in state.parameters} == {n for n in want if n.startswith("end:")}
    assert trained == set(MODELS[name][1]) - ({"fc0.weight"} if name == "mlp" else set())
    for n, p in state.parameters.items():
        if not n.endswith("k.bias"):  # no score depends on it: AdamW divides noise by noise
            np.testing.assert_allclose(p.data, want[f"end:{n}"], rtol=1e-3, atol=1e-5)
    assert module.input_names() == ["x", "labels"]


@pytest.mark.parametrize("name", MODELS)
def test_its_training_goes_on(name: str, tmp_path: Path) -> None:
    """From a checkpoint of the middle, with its moments, through one of ours."""
    state, module, optimizer = load(name, "later")
    want = told(name)
    for n, p in state.parameters.items():
        assert np.array_equal(p.data, want[f"later:{n}"]), n
    assert dict(state.properties) == {"epoch": 7, "best": 0.25, "who": "é q"}
    api.CheckpointState.save_checkpoint(state, tmp_path / "ours", True)
    for checkpoint in ("later", (tmp_path / "ours").read_bytes()):
        if isinstance(checkpoint, bytes):  # ours says nothing of a graph of theirs: restored into a trainer of theirs
            module._t.check(api._lib.om_trainer_restore(module._t.p, api._Bytes(checkpoint, len(checkpoint))))
        optimizer.set_learning_rate(0.01)
        evals, losses = run(name, module, optimizer, range(5, 10))
        np.testing.assert_allclose(evals, want["evals"][5:], rtol=1e-5)
        np.testing.assert_allclose(losses, want["losses"][5:], rtol=1e-5)


def test_its_nominal_state() -> None:
    _, full, _ = load("mlp")
    _, module, _ = load("mlp", "nominal_checkpoint")
    batch = ort_models.inputs(MODELS["mlp"][0], 0)
    with pytest.raises(api.TrainingError, match="load parameters first"):
        module(*batch)
    assert module.get_parameters_size() == full.get_parameters_size() < full.get_parameters_size(False)
    module.copy_buffer_to_parameters(full.get_contiguous_parameters(), False)
    assert float(module(*batch)) == float(full(*batch))


def test_export(tmp_path: Path) -> None:
    state, module, _ = load("former", "later")
    (name,) = module.eval().output_names()
    module.export_model_for_inferencing(tmp_path / "net.onnx", [name])
    onnx.checker.check_model(onnx.load(tmp_path / "net.onnx"))
    x, labels = ort_models.inputs(MODELS["former"][0], 2)
    theirs = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x, "labels": labels})[0]
    np.testing.assert_allclose(float(module(x, labels)), float(np.ravel(theirs)[0]), rtol=1e-5)


# --- broken files: written by the flatbuffers package


def table(b: Any, fields: dict[int, Any], slots: int) -> int:
    """A table; a field is ("offset" | a type of numpy, value)."""
    b.StartObject(slots)
    for slot, (kind, value) in fields.items():
        if kind == "offset":
            b.PrependUOffsetTRelativeSlot(slot, value, 0)
        else:
            getattr(b, f"Prepend{kind}Slot")(slot, value, 0)
    return int(b.EndObject())


def offsets(b: Any, rows: list[int]) -> int:
    b.StartVector(4, len(rows), 4)
    for row in reversed(rows):
        b.PrependUOffsetTRelative(row)
    return int(b.EndVector())


def tensor(b: Any, key: str, value: np.ndarray, **other: Any) -> int:
    dims = b.CreateNumpyVector(np.array(other.get("dims", value.shape), np.int64))
    raw = b.CreateByteVector(value.tobytes())
    text = b.CreateString(other.get("name", key))
    return table(b, {0: ("offset", text), 2: ("offset", dims), 3: ("Int32", other.get("kind", 1)), 4: ("offset", raw)}, 6)


def written(values: dict[str, np.ndarray], *, version: int = 2, external: bool = False, groups: int = 1, twice: bool = False,
            moments: int = 0, module: bool = True, **other: Any) -> bytes:  # fmt: skip
    b = flatbuffers.Builder()
    rows = [tensor(b, n, v, **(other if i == 0 else {})) for i, (n, v) in enumerate(values.items())]
    state = table(b, {0: ("offset", offsets(b, rows + rows[: int(twice)])), 3: ("Bool", external)}, 4)
    first = next(iter(values))
    states = []
    if moments:
        one = table(b, {0: ("offset", b.CreateString(first)), 1: ("offset", offsets(b, [rows[0]] * moments))}, 2)
        states = [one] * int(other.get("states", 1))
    group = table(b, {1: ("Int64", 3), 2: ("Float32", 0.5), 3: ("offset", offsets(b, states))}, 4)
    all_groups = offsets(b, [group] * groups)
    fields = {0: ("Int32", version), 2: ("offset", all_groups)}
    if module:
        fields[1] = ("offset", state)
    b.Finish(table(b, fields, 4), b"ODTC")
    return bytes(b.Output())


def test_broken_checkpoints(tmp_path: Path) -> None:
    state, module, optimizer = load("cnn")
    values = {n: p.data for n, p in state.parameters.items()}
    first = next(iter(values))

    def restore(data: bytes) -> None:
        module._t.check(api._lib.om_trainer_restore(module._t.p, api._Bytes(data, len(data))))

    def everything() -> bytes:
        api.CheckpointState.save_checkpoint(state, tmp_path / "now", True)
        return (tmp_path / "now").read_bytes()

    restore(written({n: v * 2 for n, v in values.items()}))
    assert np.array_equal(state.parameters[first].data, values[first] * 2)
    assert optimizer.get_learning_rate() == 0.5
    before = everything()
    for words, data in {
        "version 1 of": written(values, version=1),
        "in a file beside it": written(values, external=True),
        "2 groups": written(values, groups=2),
        "has no parameters": written(values, module=False),
        "is given twice": written(values, twice=True),
        "has 3 moments": written(values, moments=3),
        "'optimizer.exp_avg:conv0.weight' is given": written(values, moments=1, states=2),
        "type 8": written(values, kind=8),
        "9 dimensions": written(values, dims=[1] * 9),
        "too large": written(values, dims=[2**62, 4]),
        "its type and shape need": written(values, dims=[1, 2]),
        "has no name": written(values, name=""),
        "not UTF-8": written(values, name=b"\xff\xfe"),
        "has no 'conv0.weight'": written({n: v for n, v in values.items() if n != first}),
        "has 'other', which": written({**values, "other": values[first]}),
        "the model's is f32": written({**values, first: values[first].reshape(-1)}),
        "cut or broken": written(values)[:200],
    }.items():
        with pytest.raises(api.TrainingError) as error:
            restore(data)
        assert words in str(error.value) or (words[0] == "'" and "is given twice" in str(error.value)), (words, str(error.value))
        assert everything() == before, words


def test_every_cut_and_many_changes(tmp_path: Path) -> None:
    """Of a real file: refused, or taken; where it is refused, nothing has changed."""
    state, module, _ = load("cnn", "later")
    good = (HOME / "cnn" / "later").read_bytes()
    buffer = module.get_contiguous_parameters()
    lib, p = api._lib, module._t.p
    random = np.random.default_rng(0)
    datas = [good[:n] for n in range(0, len(good), 7)]
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(random.integers(1, 4)):
            data[random.integers(len(data))] = random.choice([0, 1, 2, 4, 8, 127, 128, 255, random.integers(256)])
        datas.append(bytes(data))
    refused = 0
    for data in datas:
        if lib.om_trainer_restore(p, api._Bytes(data, len(data))):
            refused += 1
            assert lib.om_ctx_message(module._t.cx)
            lib.om_ctx_clear(module._t.cx)
            assert np.array_equal(module.get_contiguous_parameters(), buffer, equal_nan=True)
        elif lib.om_trainer_set(p, False, buffer.ctypes.data_as(api._FLOATS), buffer.size):
            raise AssertionError("what was taken is a trainer that takes parameters")
    assert len(datas) > refused > len(good) // 7


def test_its_gradient_nodes_are_not_needed() -> None:
    """The training graph here is the part of theirs before the loss: what they add is not read."""
    theirs = onnx.load(HOME / "mlp" / "training_model.onnx")
    assert any("Grad" in n.op_type for n in theirs.graph.node)
    assert any(i.name == "lazy_reset_grad" for i in theirs.graph.input)
    weights = {t.name: numpy_helper.to_array(t) for t in MODELS["mlp"][0].graph.initializer}
    state, _, _ = load("mlp")
    for n, p in state.parameters.items():
        assert np.array_equal(p.data, weights[n])
