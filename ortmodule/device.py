"""model.save_for_device: a wrapped module and one batch -> artifacts that train without PyTorch (artifacts.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from . import artifacts, guard, interrupts, watch
from . import torch_private as private
from .artifacts import OptimType
from .capture import Captured, capture
from .capture.origin import capture_error
from .capture.pairs import as_pairs
from .capture.skeleton import skeleton
from .errors import CaptureError
from .quiet import quiet
from .state import State, shadow_of, tensor_of, unwrapped

_KINDS = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextlib.contextmanager
def _modes(module: nn.Module, training: bool) -> Iterator[None]:
    """Training: as they are, a frozen BatchNorm in evaluation mode; else all evaluate."""
    before = [(m, m.training) for m in module.modules()]
    if not training:
        module.eval()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode


def _refuse_hooks(module: nn.Module) -> None:
    """Hooks of modules and of gradients: no graph has them, so a device would go on without a word."""
    at = next((name for name, m in module.named_modules() if guard.place_of(name, m) is not None), None)
    if at is not None:
        where = f"submodule {at!r}" if at else type(module).__name__
        raise CaptureError(f"save_for_device: {where} has hooks, which are Python: remove them")
    if guard.global_hooks():
        raise CaptureError("save_for_device: there are hooks for all modules of the process, which are Python: remove "
                           "them")  # fmt: skip
    for name, p in module.named_parameters():
        hook = "register_hook" if private.tensor_hooks(p) else ""
        if not hook and private.post_hooks(p):
            hook = "register_post_accumulate_grad_hook, or optim.step_in_backward"
        if hook:
            raise CaptureError(f"save_for_device: parameter {name!r} has a hook on its gradient ({hook}), which is "
                               "Python: remove it")  # fmt: skip


def _apart(call: Any) -> Any:
    """The same call where no tensor comes twice: two arguments that are one example are two inputs of a device."""
    seen: set[int] = set()
    leaves: list[Tensor] = []

    def slot(x: Any) -> int | None:
        if not isinstance(x, Tensor):
            return None
        leaves.append(x.detach().clone().requires_grad_(x.requires_grad) if id(x) in seen else x)
        seen.add(id(x))
        return len(leaves) - 1

    return skeleton(call, slot, share=False)(leaves)


@interrupts.whole
def _graph(state: State, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Captured:
    """The captured forward; refuses by name what a device cannot do."""
    args, kwargs = _apart((args, kwargs))
    kind = "training" if training else "evaluation"
    shadow = shadow_of(state.body)
    with _modes(state.module, training), torch.set_grad_enabled(training):
        shadow.training = training
        try:
            with unwrapped(shadow), watch.Watch(shadow, state.module) as seen, quiet():
                captured = capture(shadow, args, kwargs)
        except Exception as error:
            raise capture_error(shadow, error) from error
    if seen.problems:
        p = seen.problems[0]
        raise CaptureError(f"save_for_device: {p.reason}", p.module, p.file, p.line)
    if seen.writes:
        where, name = sorted(seen.writes)[0]
        raise CaptureError(f"save_for_device: forward assigns self.{name}", where)
    for op in captured.host_ops:
        raise CaptureError(
            f"save_for_device: {op.name} needs PyTorch ({op.reason}; {kind})", op.module, op.file, op.line
        )
    for i in captured.writes:
        if captured.inputs[i].kind == "user":
            raise CaptureError(f"save_for_device: forward writes into its argument {captured.inputs[i].name}")
        if not training:
            raise CaptureError(
                f"save_for_device: in evaluation mode forward writes {captured.inputs[i].name!r}; that of a device "
                "leaves everything as it was: write it if self.training"
            )
    return captured


def _optimizer(given: Any, parameters: list[Tensor]) -> tuple[onnx.ModelProto | None, float]:
    """The optimizer graph and its rate."""
    if given is None:
        return None, 1e-3
    if isinstance(given, (int, OptimType)):
        return artifacts.optimizer_of(OptimType(given), 23), 1e-3
    if not isinstance(given, torch.optim.Optimizer):
        raise TypeError(f"optimizer: an OptimType, a torch optimizer or None, got {type(given).__name__}")
    lacking = private.lacks("device")
    if lacking is not None:
        raise ValueError(f"optimizer: {lacking}")
    if private.has_step_hooks(given):
        raise ValueError(
            "optimizer: hooks run around its steps, which are Python: remove them. For gradients that are clipped, "
            "artifacts.generate_artifacts takes onnxblock.ClipGradNorm"
        )
    groups = [{k: v for k, v in g.items() if k != "params"} for g in given.param_groups]
    if any(g != groups[0] for g in groups):
        raise ValueError("optimizer: a device has one group of parameters; these groups have different settings")
    theirs = {id(p) for g in given.param_groups for p in g["params"]}
    if any(id(p) not in theirs for p in parameters):
        raise ValueError("optimizer: some parameters that require a gradient are not in it; freeze them")
    g = groups[0]
    for name in ("amsgrad", "maximize"):
        if g.get(name):
            raise ValueError(f"optimizer: {name} is not supported on a device")
    if type(given) is torch.optim.AdamW and not g.get("decoupled_weight_decay", True):
        raise ValueError("optimizer: decoupled_weight_decay=False (Adam's decay) is not supported on a device")
    rate = float(g["lr"])
    if type(given) is torch.optim.AdamW:
        attributes = {
            "alpha": float(g["betas"][0]),
            "beta": float(g["betas"][1]),
            "epsilon": float(g["eps"]),
            "weight_decay": float(g["weight_decay"]),
            "adam_mode": 0,
            "correct_bias": 1,
        }
        return artifacts.optimizer_model("AdamWOptimizer", "com.microsoft", attributes, 2, 23), rate
    if type(given) is torch.optim.SGD:
        numbers = {k: float(g[k]) for k in ("momentum", "dampening", "weight_decay")}
        if not any(numbers.values()) and not g["nesterov"]:
            return artifacts.optimizer_model("SGDOptimizerV2", "com.microsoft", {}, 0, 23), rate
        attributes = {**numbers, "nesterov": int(g["nesterov"])}
        return artifacts.optimizer_model("SGD", "ortmodule", attributes, 1, 23), rate
    raise ValueError(f"optimizer: {type(given).__name__}; AdamW and SGD of torch.optim are supported on a device")


def _moments(given: Any, trained: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    """How many updates a torch optimizer has taken, and what it keeps of each parameter, as a checkpoint names it."""
    if not isinstance(given, torch.optim.Optimizer) or not any(p in given.state for p in trained.values()):
        return 0, {}
    adam = type(given) is torch.optim.AdamW
    kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"} if adam else {"momentum_buffer": "exp_avg"}
    rows = {name: given.state.get(p, {}) for name, p in trained.items()}
    steps = {int(row["step"]) if "step" in row else 0 for row in rows.values()} if adam else {1}
    found = {f"optimizer.{to}:{name}": row.get(of) for name, row in rows.items() for of, to in kinds.items()}
    if not adam and all(t is None for t in found.values()):  # neither momentum nor steps: nothing to go on with
        return 0, {}
    if len(steps) > 1 or any(t is None for t in found.values()):
        raise ValueError(
            "optimizer: some parameters have taken fewer steps than others; a device has one count for all. "
            "Freeze them, or give an optimizer that has taken no step"
        )
    return steps.pop(), {name: t for name, t in found.items() if t is not None}


def _bytes(t: Tensor) -> tuple[str, list[int], bytes]:
    flat = t.detach().to("cpu").contiguous()
    return _KINDS[t.dtype], list(t.shape), flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _check_loss(onnx_bytes: bytes) -> int:
    """The opset, if the first output can be a loss."""
    model = onnx.load_from_string(onnx_bytes)
    first = model.graph.output[0].type.tensor_type if model.graph.output else None
    if first is None or first.elem_type != onnx.TensorProto.FLOAT or any(d.dim_value != 1 for d in first.shape.dim):
        raise ValueError(
            "save_for_device: forward must return the loss (one float32 number), or a tuple or dict that begins with it"
        )
    return int(model.opset_import[0].version)


def save_for_device(
    state: State,
    directory: str | os.PathLike[str],
    batch: Any,
    *,
    optimizer: Any = OptimType.AdamW,
    eval_batch: Any = None,
    prefix: str = "",
) -> Path:
    """See ORTModule.save_for_device."""

    def call(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(given, Mapping):
            return (), dict(given)
        return tuple(given) if isinstance(given, (tuple, list)) else (given,), {}

    if not state.module.training:
        raise ValueError(
            f"save_for_device: {type(state.module).__name__} is in evaluation mode, so there is nothing to train: call "
            "model.train() first (submodules that are put back into evaluation mode after it train so)"
        )
    _refuse_hooks(state.module)
    train = _graph(state, *call(batch), training=True)
    evaluation = _graph(state, *call(batch if eval_batch is None else eval_batch), training=False)
    _check_loss(train.onnx)
    values: dict[str, tuple[str, list[int], bytes]] = {}
    frozen: list[str] = []
    trained: dict[str, Tensor] = {}
    for spec in train.inputs:
        if spec.kind == "user":
            continue
        t = tensor_of(state.module, spec)
        values[spec.name] = _bytes(as_pairs(t) if spec.pairs else t)
        if spec.pairs and t.requires_grad:
            raise ValueError(
                f"save_for_device: parameter {spec.target} is complex, and a device trains real ones: keep its parts "
                "as a real parameter of one more axis, and let forward read torch.view_as_complex of it"
            )
        if spec.kind == "param" and t.requires_grad:
            trained[spec.name] = t
        elif spec.kind == "param":
            frozen.append(spec.name)
    known = {s.name for s in train.inputs if s.kind != "user"}
    other = [s.name for s in evaluation.inputs if s.kind != "user" and s.name not in known]
    if other:
        raise CaptureError(f"save_for_device: only evaluation reads {', '.join(other)}")
    if not trained:
        raise ValueError("save_for_device: no parameter of the graph requires a gradient")
    update, rate = _optimizer(optimizer, list(trained.values()))
    updates, moments = _moments(optimizer, trained)
    values.update({name: _bytes(t) for name, t in moments.items()})
    parts = {"training_model.onnx": train.onnx, "eval_model.onnx": evaluation.onnx}
    if update is not None:
        parts["optimizer_model.onnx"] = update.SerializeToString()
    parts["checkpoint"] = artifacts.checkpoint_bytes(values, frozen, rate, updates=updates)
    nominal = artifacts.checkpoint_bytes({}, frozen, rate, nominal=True)
    return artifacts.write_artifacts(directory, prefix, parts, nominal)
