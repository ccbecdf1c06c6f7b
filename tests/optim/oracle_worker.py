"""Runs under a Python that has onnxruntime-training 1.19.2 (numpy and onnx, no torch): its CPU operators and Python
rules on given arrays.

    oracle_worker.py input.npz output.npz
"""

import importlib.util
import pathlib
import sys
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def sequence(name):
    return helper.make_tensor_sequence_value_info(name, FLOAT, None)


def scalar(name, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, None)


def run(node, inputs, outputs, feeds):
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    # these operators work in place, on the very arrays that are fed
    return session.run(None, {k: [x.copy() for x in v] if isinstance(v, list) else v.copy() for k, v in feeds.items()})


def adamw(p, g, m, v, lr, step, mode):
    names = ["lr", "step", "p", "g", "m", "v"]
    node = helper.make_node(
        "AdamWOptimizer", names, ["flag", "p1", "m1", "v1"], domain="com.microsoft",
        alpha=0.87, beta=0.983, epsilon=1e-3, weight_decay=0.11, adam_mode=mode, correct_bias=1,
    )  # fmt: skip
    kinds = [scalar("lr"), scalar("step", TensorProto.INT64), *map(sequence, names[2:])]
    outs = [scalar("flag", TensorProto.BOOL), *map(sequence, ("p1", "m1", "v1"))]
    feeds = {"lr": np.array(lr, np.float32), "step": np.array(step, np.int64), "p": p, "g": g, "m": m, "v": v}
    return run(node, kinds, outs, feeds)[1:]


def sgd(p, g, lr):
    node = helper.make_node("SGDOptimizerV2", ["lr", "p", "g"], ["flag", "p1"], domain="com.microsoft")
    outs = [scalar("flag", TensorProto.BOOL), sequence("p1")]
    return run(node, [scalar("lr"), sequence("p"), sequence("g")], outs, {"lr": np.array(lr, np.float32), "p": p, "g": g})[1]


def clip(g, limit):
    node = helper.make_node("InplaceClipGradNorm", ["g"], ["g1"], domain="com.microsoft", max_norm=limit, norm_type="fro")
    return run(node, [sequence("g")], [sequence("g1")], {"g": g})[0]


def models(lists):
    """name -> (model bytes, feeds, results): graphs of tensors with the operators inside, to be run by another engine
    as they are."""
    n = len(lists["p"])
    flat = {f"{k}{i}": x for k in "pgmv" for i, x in enumerate(lists[k])}
    make = {k: helper.make_node("SequenceConstruct", [f"{k}{i}" for i in range(n)], [k]) for k in "pgmv"}
    index = [helper.make_node("Constant", [], [f"i{i}"], value_int=i) for i in range(n)]

    def take(k):
        return [helper.make_node("SequenceAt", [k.upper(), f"i{i}"], [f"new_{k}{i}"]) for i in range(n)]

    def node(op, ins, outs, **attrs):
        return helper.make_node(op, ins, outs, domain="com.microsoft", **attrs)

    adamw = node("AdamWOptimizer", ["lr", "step", *"pgmv", "update"], ["flag", *"PMV"], alpha=0.87, beta=0.983, epsilon=1e-3, weight_decay=0.11)
    graphs = {
        "adamw": ([*make.values(), *index, adamw, *take("p"), *take("m"), *take("v")], "pmv"),
        "sgd": ([make["p"], make["g"], *index, node("SGDOptimizerV2", ["lr", "p", "g", "update"], ["flag", "P"]), *take("p")], "p"),
        "clip": ([make["g"], *index, node("InplaceClipGradNorm", ["g"], ["G"], max_norm=0.5), *take("g")], "g"),
        "accumulate": ([node("InPlaceAccumulatorV2", ["p0", "g0", "update"], ["flag", "new_p0"])], None),
    }
    out = {}
    for name, (nodes, kinds) in graphs.items():
        outputs = [f"new_{k}{i}" for k in kinds for i in range(n)] if kinds else ["new_p0"]
        used = {x for node in nodes for x in node.input}
        for update in (True, False):
            feeds = {"lr": np.array(0.013, np.float32), "step": np.array(5, np.int64), "update": np.array([update]), **flat}
            feeds = {k: v for k, v in feeds.items() if k in used}
            kinds_of = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): TensorProto.INT64, np.dtype(bool): TensorProto.BOOL}
            ins = [helper.make_tensor_value_info(k, kinds_of[v.dtype], v.shape) for k, v in feeds.items()]
            outs = [helper.make_tensor_value_info(k, FLOAT, flat[k[4:]].shape) for k in outputs]
            graph = helper.make_graph(nodes, "g", ins, outs)
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=8)
            session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            results = session.run(outputs, {k: v.copy() for k, v in feeds.items()})
            out[f"{name}_{update}"] = (model.SerializeToString(), feeds, results)
    return out


def python_file(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    given = np.load(sys.argv[1])
    n = int(given["n"])
    lists = {k: [given[f"{k}{i}"] for i in range(n)] for k in "pgmv"}
    out = {}
    for mode in (0, 1):
        for name, rows in zip("pmv", adamw(*(lists[k] for k in "pgmv"), 0.013, 5, mode)):
            for i, x in enumerate(rows):
                out[f"adamw{mode}_{name}{i}"] = x
    for i, x in enumerate(sgd(lists["p"], lists["g"], 0.013)):
        out[f"sgd_p{i}"] = x
    for limit in (0.5, 1e6):
        for i, x in enumerate(clip(lists["g"], limit)):
            out[f"clip{limit}_g{i}"] = x
    for name, (model, feeds, results) in models(lists).items():
        out[f"model_{name}"] = np.frombuffer(model, np.uint8)
        out[f"feeds_{name}"] = np.array(list(feeds))
        for k, x in feeds.items():
            out[f"feed_{name}_{k}"] = x
        for i, x in enumerate(results):
            out[f"result_{name}_{i}"] = x
    root = pathlib.Path(ort.__file__).parent / "training"
    scaler = python_file(root / "amp" / "loss_scaler.py").DynamicLossScaler(up_scale_window=3)
    trace = []
    for finite in given["finite"]:
        scaler.update(SimpleNamespace(all_finite=bool(finite)))
        trace.append(scaler.loss_scale)
    out["scaler"] = np.array(trace)
    schedules = python_file(root / "optim" / "lr_scheduler.py")
    for name, args in (("Constant", {}), ("Linear", {}), ("Cosine", {"cycles": 0.5}), ("Poly", {"power": 2.0, "lr_end": 1e-7})):
        s = getattr(schedules, f"{name}WarmupLRScheduler")(total_steps=50, warmup=0.1, **args)
        info = lambda t: SimpleNamespace(optimization_step=t, optimizer_config=SimpleNamespace(lr=0.3))  # noqa: E731
        out[f"schedule_{name}"] = np.array([s.get_lr(info(t))[0] for t in range(55)])
    np.savez(sys.argv[2], **out)


if __name__ == "__main__":
    main()
