"""Artifacts of onnxruntime-training for three models, made by onnxruntime-training itself (in an environment of its own:
Python 3.11, pip install onnxruntime-training-cpu==1.19.2 onnx==1.16.2 'numpy<2'):

    python tests/ort_models.py DIRECTORY [--large]

A folder for each model: the four files, and `told.npz`: batches, losses of training and evaluation on them, and what
is in `later`, a checkpoint saved in the middle with moments and properties. Small sizes are those of
tests/ondevice/ort, large ones those of tests/bench/bench_ondevice.py. Imported, it needs onnx and numpy alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """Nodes and initializers one after the other; a call returns the name of its result."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.values: list[onnx.TensorProto] = []
        self.trained: list[str] = []
        self.random = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        out = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attributes))
        return out

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.values)}"
        self.values.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def param(self, name: str, *shape: int, scale: float | None = None) -> str:
        if scale is None:
            scale = 1 / np.sqrt(shape[0] if len(shape) == 2 else np.prod(shape[1:]))
        value = self.random.normal(size=shape) * scale if scale else np.zeros(shape)
        self.values.append(numpy_helper.from_array(value.astype(np.float32), name))
        self.trained.append(name)
        return name

    def ones(self, name: str, *shape: int) -> str:
        self.values.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
        self.trained.append(name)
        return name

    def linear(self, x: str, name: str, n_in: int, n_out: int) -> str:
        y = self.op("MatMul", x, self.param(f"{name}.weight", n_in, n_out))
        return self.op("Add", y, self.param(f"{name}.bias", n_out, scale=0))

    def norm(self, x: str, name: str, n: int) -> str:
        out = self.op("LayerNormalization", x, self.ones(f"{name}.weight", n), self.param(f"{name}.bias", n, scale=0),
                      axis=-1, epsilon=1e-5)  # fmt: skip
        self.nodes[-1].output.extend([f"{out}_mean", f"{out}_scale"])  # their gradient needs them
        return out

    def model(self, x: tuple[int, list[int]], output: str, shape: list[int]) -> onnx.ModelProto:
        info = helper.make_tensor_value_info
        graph = helper.make_graph(self.nodes, "net", [info("x", *x)], [info(output, TensorProto.FLOAT, shape)], self.values)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mlp(batch: int, sizes: list[int]) -> tuple[onnx.ModelProto, list[str]]:
    g = Graph(1)
    x = "x"
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        x = g.op("Gemm", x, g.param(f"fc{i}.weight", b, a), g.param(f"fc{i}.bias", b, scale=0), transB=1)
        if i < len(sizes) - 2:
            x = g.op("Relu", x)
    return g.model((TensorProto.FLOAT, [batch, sizes[0]]), x, [batch, sizes[-1]]), g.trained


def cnn(batch: int, size: int, channels: list[int], classes: int) -> tuple[onnx.ModelProto, list[str]]:
    g = Graph(2)
    x, edge = "x", size
    for i, (a, b) in enumerate(zip(channels, channels[1:])):
        x = g.op("Conv", x, g.param(f"conv{i}.weight", b, a, 3, 3), g.param(f"conv{i}.bias", b, scale=0), pads=[1, 1, 1, 1],
                 kernel_shape=[3, 3])  # fmt: skip
        x = g.op("MaxPool", g.op("Relu", x), kernel_shape=[2, 2], strides=[2, 2])
        edge //= 2
    x = g.linear(g.op("Flatten", x, axis=1), "head", channels[-1] * edge * edge, classes)
    return g.model((TensorProto.FLOAT, [batch, channels[0], size, size]), x, [batch, classes]), g.trained


def former(batch: int, time: int, dim: int, heads: int, layers: int, words: int, classes: int) -> tuple[onnx.ModelProto, list[str]]:
    """Tokens, layers with norms before, gelu by Erf as exporters write it, mean over time."""
    g = Graph(3)
    x = g.op("Gather", g.param("token", words, dim, scale=0.3), "x", axis=0)
    x = g.op("Add", x, g.param("place", time, dim, scale=0.3))
    split = g.const([batch, time, heads, dim // heads], np.int64)
    whole = g.const([batch, time, dim], np.int64)
    for i in range(layers):
        h = g.norm(x, f"l{i}.n1", dim)
        q, k, v = (g.op("Reshape", g.linear(h, f"l{i}.{n}", dim, dim), split) for n in "qkv")
        q, v = (g.op("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
        k = g.op("Transpose", k, perm=[0, 2, 3, 1])
        p = g.op("Softmax", g.op("Mul", g.op("MatMul", q, k), g.const((dim // heads) ** -0.5)), axis=-1)
        a = g.op("Reshape", g.op("Transpose", g.op("MatMul", p, v), perm=[0, 2, 1, 3]), whole)
        x = g.op("Add", x, g.linear(a, f"l{i}.out", dim, dim))
        h = g.linear(g.norm(x, f"l{i}.n2", dim), f"l{i}.up", dim, 4 * dim)
        half = g.op("Mul", h, g.const(0.5))
        h = g.op("Mul", half, g.op("Add", g.op("Erf", g.op("Mul", h, g.const(2**-0.5))), g.const(1.0)))
        x = g.op("Add", x, g.linear(h, f"l{i}.down", 4 * dim, dim))
    x = g.linear(g.op("ReduceMean", g.norm(x, "n", dim), axes=[1], keepdims=0), "head", dim, classes)
    return g.model((TensorProto.INT64, [batch, time]), x, [batch, classes]), g.trained


def models(large: bool) -> dict[str, tuple[onnx.ModelProto, list[str]]]:
    if large:
        return {"mlp": mlp(64, [784, 512, 256, 10]), "cnn": cnn(32, 28, [1, 16, 32], 10),
                "former": former(8, 64, 128, 4, 2, 1000, 10)}  # fmt: skip
    return {"mlp": mlp(6, [8, 12, 5]), "cnn": cnn(4, 8, [2, 3, 4], 5), "former": former(3, 6, 8, 2, 1, 11, 5)}


def inputs(model: onnx.ModelProto, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch: x of the graph's type and shape, labels."""
    g = np.random.default_rng(100 + step)
    kind = model.graph.input[0].type.tensor_type
    shape = [d.dim_value for d in kind.shape.dim]
    classes = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    words = next((t.dims[0] for t in model.graph.initializer if t.name == "token"), 0)
    x = g.integers(words, size=shape) if words else g.normal(size=shape).astype(np.float32)
    return x, g.integers(classes, size=shape[0])


def without_torch() -> None:
    """onnxruntime.training without what its __init__ imports: all else of that package wants PyTorch."""
    import onnxruntime

    package = types.ModuleType("onnxruntime.training")
    package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
    sys.modules[package.__name__] = package


def make(home: Path, large: bool) -> None:
    without_torch()
    from onnxruntime.training import artifacts
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    for name, (model, trained) in models(large).items():
        folder = home / name
        folder.mkdir(parents=True, exist_ok=True)
        kind = artifacts.OptimType.SGD if name == "cnn" else artifacts.OptimType.AdamW
        frozen = [trained.pop(0)] if name == "mlp" and not large else []
        artifacts.generate_artifacts(model, requires_grad=trained, frozen_params=frozen, loss=artifacts.LossType.CrossEntropyLoss,
                                     optimizer=kind, artifact_directory=str(folder), nominal_checkpoint=True)  # fmt: skip
        if large:
            continue
        state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        module = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
        optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(0.01)
        told: dict[str, Any] = {"evals": [], "losses": []}
        for step in range(10):
            batch = inputs(model, step % 3)
            module.eval()
            told["evals"].append(module(*batch))
            module.train()
            told["losses"].append(module(*batch))
            optimizer.step()
            module.lazy_reset_grad()
            if step == 4:
                for key, value in (("epoch", 7), ("best", 0.25), ("who", "é q")):
                    state.properties[key] = value
                CheckpointState.save_checkpoint(state, str(folder / "later"), True)
                told.update({f"later:{n}": p.data.copy() for n, p in state.parameters})
        told.update({f"end:{n}": p.data.copy() for n, p in state.parameters})
        np.savez(folder / "told.npz", **told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    home = given.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)  # onnxblock writes files into the current directory
    make(home, given.large)
