"""export_gradient_graph: forward, loss and gradients of a model as one ONNX file of standard operators.

PyTorch differentiates: make_fx traces forward, loss and torch.autograd.grad as one program of ATen operators, which is
captured as any module is (capture/). An operator without a standard ONNX form is refused by name, since the file is for
programs without PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ..capture import capture
from ..errors import CaptureError
from ..stages import rename

_HEAD = ("input", "labels")


def export_gradient_graph(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    example_input: Tensor,
    example_labels: Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = 23,
) -> None:
    """Writes the file. Inputs: `input` and `labels`, whose first size is free, and every parameter by its name.
    Outputs: `output`, `loss`, and `<name>_grad` for every parameter that requires a gradient.

    The model is taken in the mode it is in; dropout and other random operators are refused. opset_version is taken for
    old scripts' sake: the file has the version in which captures are written. Raises CaptureError.
    """
    names = [name for name, _ in model.named_parameters()]
    parameters = [p.detach() for _, p in model.named_parameters()]
    wanted = [i for i, (_, p) in enumerate(model.named_parameters()) if p.requires_grad]

    def step(x: Tensor, labels: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        own = [w.detach().requires_grad_(i in wanted) for i, w in enumerate(weights)]
        output = torch.func.functional_call(model, dict(zip(names, own, strict=True)), (x,))
        loss = loss_fn(output, labels)
        grads = torch.autograd.grad(loss, [own[i] for i in wanted], allow_unused=True)
        return output, loss, *[torch.zeros_like(own[i]) if g is None else g for i, g in zip(wanted, grads, strict=True)]

    # a size of 1 would be taken for a constant
    heads = [torch.cat([t, t]) if t.dim() and len(t) == 1 else t for t in (example_input.detach(), example_labels)]
    args = (*heads, *parameters)
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
    table[torch.ops.aten.native_layer_norm.default] = _layer_norm
    program = make_fx(step, decomposition_table=table, tracing_mode="symbolic")(*args)
    fixed = {(i, axis) for i, t in enumerate(args) for axis in range(t.dim()) if i >= len(_HEAD) or axis}
    try:
        with torch.no_grad():
            captured = capture(program, args, {}, dynamic=True, fixed=fixed)
    except Exception as error:
        left = sorted({str(n.target) for n in program.graph.nodes if "backward" in str(n.target)})
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CaptureError(
            f"export_gradient_graph: {', '.join(left) or 'an operator'} needs PyTorch ({what})"
        ) from error
    for op in captured.host_ops:
        raise CaptureError(f"export_gradient_graph: {op.name} needs PyTorch ({op.reason})", op.module, op.file, op.line)
    proto = onnx.load_from_string(captured.onnx)
    if any(node.domain not in ("", "ai.onnx") and not _has_body(proto, node) for node in proto.graph.node):
        odd = next(node for node in proto.graph.node if node.domain not in ("", "ai.onnx"))
        raise CaptureError(f"export_gradient_graph: {odd.op_type} has no standard ONNX form")
    told = [*_HEAD, *names]
    new = {spec.name: told[spec.leaf] for spec in captured.inputs if spec.kind == "user"}
    outputs = [o.name for o in proto.graph.output[: captured.n_user_outputs]]
    new |= dict(zip(outputs, ["output", "loss", *[f"{names[i]}_grad" for i in wanted]], strict=True))
    rename(proto.graph, new)
    given = {i.name: i for i in proto.graph.input}
    del proto.graph.input[:]
    for name, t in zip(told, args, strict=True):
        kind = onnx.helper.np_dtype_to_tensor_dtype(t.numpy().dtype)
        sizes: list[int | str] = list(t.shape)
        if name in _HEAD and sizes:
            sizes[0] = "batch_size"
        proto.graph.input.append(given.get(name) or onnx.helper.make_tensor_value_info(name, kind, sizes))
    onnx.checker.check_model(proto)
    onnx.save(proto, os.fspath(gradient_graph_path))


def _layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """With the statistics that its gradient reads, as values of their own."""
    axes = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(axes, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


def _has_body(proto: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    return any(f.domain == node.domain and f.name == node.op_type for f in proto.functions)
