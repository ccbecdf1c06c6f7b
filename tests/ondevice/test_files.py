"""Files of a device: broken, cut, another model's, interrupted while they are written; and steps without allocation."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import device_models as models
import numpy as np
import pytest
import torch
from killed_saves import header, with_header
from safetensors.numpy import load_file, save_file

from ortmodule import api, artifacts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    torch.manual_seed(0)
    models.artifacts(models.Mlp(), folder, models.Mlp, 1)
    return folder


def restore(device: api.Module, data: bytes) -> None:
    device._t.check(api._lib.om_trainer_restore(device._t.p, api._Bytes(data, len(data))))


def everything(state: api.CheckpointState, device: api.Module, update: api.Optimizer, folder: Path) -> bytes:
    api.CheckpointState.save_checkpoint(state, folder / "now", True)
    return (folder / "now").read_bytes()


def hostile(data: bytes) -> dict[str, tuple[bytes, str]]:
    """Files made from a good one, and a word of the refusal."""
    head, rest = header(data)
    name = "net.0.weight"

    def changed(**of_tensor: object) -> bytes:
        return with_header({**head, name: {**head[name], **of_tensor}}, rest)

    others = {k: v for k, v in head.items() if k != name}
    meta = head["__metadata__"]
    text = json.dumps(head)
    begin, end = head[name]["data_offsets"]
    return {
        "empty": (b"", "0 bytes"),
        "seven bytes": (data[:7], "7 bytes"),
        "header longer than the file": ((1 << 40).to_bytes(8, "little") + data[8:], "cut, or another format"),
        "cut data": (data[:-1], "past the end"),
        "cut header": (data[:100], "cut"),
        "more data": (data + b"x", "do not cover"),
        "not json": (with_header("hello", rest), "'{' expected"),
        "no end": (with_header(text[:-1], rest), "'}' expected"),
        "after the end": (with_header(text + "x", rest), "follows the header"),
        "twice": (with_header(text[:-1] + f', "{name}": {json.dumps(head[name])}}}', rest), "given twice"),
        "negative": (changed(shape=[-19, -7]), "a number expected"),
        "huge": (changed(shape=[2**62, 4]), "too large"),
        "overflow": (changed(shape=[2**32, 2**32]), "too large"),
        "many dimensions": (changed(shape=[1] * 9), "too many dimensions"),
        "leading zero": (with_header(text.replace('"shape": [19', '"shape": [019'), rest), "a number expected"),
        "offsets swapped": (changed(data_offsets=[end, begin]), "do not agree"),
        "offsets elsewhere": (changed(data_offsets=[begin + 4, end + 4]), "overlap"),
        "unknown dtype": (changed(dtype="F8_E4M3"), "unknown dtype"),
        "unknown key": (changed(layout="x"), "unknown or repeated key"),
        "no dtype": (with_header({**others, name: {"shape": [], "data_offsets": [0, 0]}}, rest), "a tensor needs dtype"),
        "other dtype": (changed(dtype="I32"), "is i32 [19, 7], the model's is f32 [19, 7]"),
        "other shape": (changed(shape=[7, 19]), "is f32 [7, 19], the model's is f32 [19, 7]"),
        "missing": (with_header({"__metadata__": meta}, b""), "has no 'net.0.weight'"),
        "unknown tensor": (with_header({**others, "other": head[name]}, rest), "has no 'net.0.weight'"),
        "not ours": (with_header({**others, name: head[name], "__metadata__": {}}, rest), "'format' is missing"),
        "version": (with_header({**head, "__metadata__": {**meta, "version": "2"}}, rest), "version 2"),
        "updates": (with_header({**head, "__metadata__": {**meta, "updates": "-1"}}, rest), "'updates' is '-1'"),
        "most updates": (with_header({**head, "__metadata__": {**meta, "updates": str(2**63 - 1)}}, rest), "'updates' is '9223372036854775807'"),
        "seed": (with_header({**head, "__metadata__": {**meta, "seed": "-1"}}, rest), "'seed' is '-1'"),
        "drawn": (with_header({**head, "__metadata__": {**meta, "drawn": str(2**64)}}, rest), "'drawn' is '18446744073709551616'"),
        "property": (with_header({**head, "__metadata__": {**meta, "int:a": "12x"}}, rest), "'int:a' is '12x'"),
        "NUL": (with_header(text.replace("net.0.weight", "net\\u0000"), rest), "NUL in text"),
        "surrogate": (with_header(text.replace("net.0.weight", "net\\ud800"), rest), "surrogate"),
        "not UTF-8": (data.replace(b"net.0.weight", b"net.0.w\xff\xffght"), "UTF-8"),
        "control": (data.replace(b"net.0.weight", b"net.0\x01weight"), "control character"),
        "deep": (with_header('{"a":' * 100000, rest), "unknown or repeated key"),
    }


def test_what_is_refused_changes_nothing(built: Path, tmp_path: Path) -> None:
    state, device, update = models.trainer(built)
    x, labels = (t.numpy() for t in models.batch(models.Mlp, 0))
    device(x, labels)
    update.step()
    state.properties["n"] = 3
    before = everything(state, device, update, tmp_path)
    rows = hostile((built / "checkpoint").read_bytes())
    for kind, (data, words) in rows.items():
        with pytest.raises(api.TrainingError) as told:
            restore(device, data)
        assert words in str(told.value), (kind, str(told.value))
        assert everything(state, device, update, tmp_path) == before, kind
        with pytest.raises(api.TrainingError):
            api.Module(built / "training_model.onnx", api.CheckpointState(data))
    good = (built / "checkpoint").read_bytes()
    restore(device, good)
    assert np.array_equal(state.parameters["net.0.weight"].data, load_file(built / "checkpoint")["net.0.weight"])
    assert not dict(state.properties)


def test_moments_are_all_or_none(built: Path, tmp_path: Path) -> None:
    state, device, update = models.trainer(built)
    device(*(t.numpy() for t in models.batch(models.Mlp, 0)))
    update.step()
    data = everything(state, device, update, tmp_path)
    head, rest = header(data)
    begin, end = head.pop("optimizer.exp_avg:net.2.bias")["data_offsets"]
    for row in (v for k, v in head.items() if k != "__metadata__"):
        row["data_offsets"] = [o - (end - begin) if o >= end else o for o in row["data_offsets"]]
    with pytest.raises(api.TrainingError, match="7 of the optimizer's 8 tensors"):
        restore(device, with_header(head, rest[:begin] + rest[end:]))


def test_files_of_others(built: Path, tmp_path: Path) -> None:
    """What the safetensors package writes is read, whatever its order, spaces and escapes."""
    values = load_file(built / "checkpoint")
    meta, _ = header((built / "checkpoint").read_bytes())
    save_file({k: values[k] * 2 for k in reversed(values)}, tmp_path / "theirs",
              {**meta["__metadata__"], "string:ä\n": "\U0001f600"})  # fmt: skip
    state, device, _ = models.trainer(built)
    restore(device, (tmp_path / "theirs").read_bytes())
    assert np.array_equal(state.parameters["net.2.weight"].data, values["net.2.weight"] * 2)
    assert state.properties["ä\n"] == "\U0001f600"
    head, rest = header((tmp_path / "theirs").read_bytes())
    spaced = json.dumps(head, indent=3, ensure_ascii=True)
    restore(device, with_header(spaced, rest))
    assert state.properties["ä\n"] == "\U0001f600"


def test_packed_file(built: Path) -> None:
    packed = (built / "model.omd").read_bytes()
    parts = {n: t.tobytes() for n, t in load_file(built / "model.omd").items()}
    assert parts["training_model.onnx"] == (built / "training_model.onnx").read_bytes()
    assert artifacts.pack(parts) == packed

    def load(data: bytes) -> None:
        api._Trainer({"packed": data})

    load(packed)
    for data, words in (
        (packed[:-5], "past the end"), (parts["checkpoint"], "'ortmodule-device' is expected"),
        (artifacts.pack({k: v for k, v in parts.items() if k != "training_model.onnx"}), "a training graph is needed"),
        (artifacts.pack({k: v for k, v in parts.items() if k != "checkpoint"}), "a checkpoint is needed"),
        (artifacts.pack({**parts, "training_model.onnx": b"\xff\xff"}), "not a valid ONNX file"),
        (artifacts.pack({**parts, "optimizer_model.onnx": parts["eval_model.onnx"]}), "optimizer graph: node"),
        (artifacts.pack({**parts, "checkpoint": parts["checkpoint"][:-1]}), "past the end"),
    ):  # fmt: skip
        with pytest.raises(api.TrainingError, match=words):
            load(data)


def test_killed_while_it_saves(built: Path, tmp_path: Path) -> None:
    """kill -9 at 100 random moments of a process that saves without end: what is there is always one whole state, and
    never an older one than before."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests" / "killed_saves.py", built, tmp_path / "state"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    cut = list(tmp_path.glob("state.*.part"))  # of children that died between creating and renaming
    assert len(cut) > 20


def test_write_fails(built: Path, tmp_path: Path) -> None:
    state, device, _ = models.trainer(built)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "x", tmp_path / "folder"):
        with pytest.raises(api.TrainingError, match="cannot be"):
            api.CheckpointState.save_checkpoint(state, path)
    assert os.listdir(tmp_path) == ["folder"] and not os.listdir(tmp_path / "folder")
    if os.path.exists("/dev/full"):
        os.symlink("/dev/full", f"{tmp_path}/y.{os.getpid()}.part")  # where the file is written aside
        with pytest.raises(api.TrainingError, match="No space"):
            api.CheckpointState.save_checkpoint(state, tmp_path / "y")
        assert not (tmp_path / "y").exists()


def test_what_is_no_file_is_not_replaced(built: Path, tmp_path: Path) -> None:
    """A pipe or a device where a checkpoint or an export is to be: refused, and nothing is written beside it."""
    state, device, _ = models.trainer(built)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    kinds = ["folder", "pipe"]
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            os.mknod(tmp_path / "node", stat.S_IFCHR | 0o600, os.makedev(1, 3))
            kinds.append("node")
    before = {name: os.lstat(tmp_path / name) for name in kinds}
    for name in kinds:
        for write in (
            lambda path: api.CheckpointState.save_checkpoint(state, path, True),
            lambda path: device.export_model_for_inferencing(path, device.eval().output_names()[1:]),
        ):
            with pytest.raises(api.TrainingError, match=f"{name}: cannot be replaced: is a .*; give the path of a file"):
                write(tmp_path / name)
    assert {name: os.lstat(tmp_path / name) for name in os.listdir(tmp_path)} == before
    os.symlink(tmp_path / "pipe", tmp_path / "link")  # replaced, as ever
    api.CheckpointState.save_checkpoint(state, tmp_path / "link")
    assert stat.S_ISREG(os.lstat(tmp_path / "link").st_mode) and stat.S_ISFIFO(os.lstat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [models.Mlp, models.Cnn, models.Former])
def test_no_allocation_in_a_step(kind: type, threads: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models.artifacts(kind(), tmp_path, kind, 1)
    subprocess.run(["make", "-s", "-C", str(ROOT), "build/om-quiet"], check=True)
    done = subprocess.run([ROOT / "build" / "om-quiet", tmp_path / "model.omd", str(threads)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
