"""training.utils: schemas, dtypes, tables; export_gradient_graph against autograd in onnxruntime; HierarchicalORTModule."""

from __future__ import annotations

import collections
import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import CaptureError, ORTModule
from ortmodule.compat.gradient_graph import export_gradient_graph
from ortmodule.compat.profile import PTable, log_memory_usage, nvtx_function_decorator
from ortmodule.compat.schema import PrimitiveType, _TensorStub, extract_data_and_schema, unflatten_data_using_schema
from ortmodule.compat.types import (
    onnx_dtype_to_pytorch_dtype,
    pytorch_scalar_type_to_pytorch_dtype,
    pytorch_type_to_onnx_dtype,
)
from ortmodule.experimental.hierarchical_ortmodule import HierarchicalORTModule

Pair = collections.namedtuple("Pair", "first second")
T = torch.tensor
DATA = {
    "tensor": T([1.0, 2.0]),
    "none": None,
    "list": [T(1), T([2.0])],
    "dict": {"b": T(1), "a": T([2.0])},
    "nested": {"a": {"x": T(1), "y": [T(2), None]}, "b": (T(3),)},
    "namedtuple": Pair(T(1), {"k": T([2.0])}),
    "ordered": collections.OrderedDict(z=T(1), a=T(2)),
    "twice": [T(1)] * 2,
}


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a is b
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("name", DATA)
def test_data_there_and_back(name):
    tensors, schema = extract_data_and_schema(DATA[name])
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    same(unflatten_data_using_schema(tensors, schema), DATA[name])


def test_schemas():
    _, schema = extract_data_and_schema({"a": [T(1.0), T([[2]])], "b": None})
    assert schema == {"a": [_TensorStub(0, "a_0", "torch.float32", None, 0), _TensorStub(1, "a_1", "torch.int64", None, 2)], "b": None}
    assert str(schema["a"][0]) == "_TensorStub(tensor_idx=0,name=a_0,dtype=torch.float32,shape_dims=0)"
    with pytest.warns(UserWarning, match="treated as a constant"):
        tensors, schema = extract_data_and_schema([True, 2, "s"])
    assert tensors == [] and schema == [True, 2, "s"]
    with pytest.warns(UserWarning):
        tensors, schema = extract_data_and_schema([True, 2, 2.5, "s"], constant_as_tensor=True, device="cpu")
    assert [t.item() for t in tensors] == [True, 2, 2.5] and schema[3] == "s"
    assert [s.dtype for s in schema[:3]] == ["<class 'bool'>_True", "<class 'int'>", "<class 'float'>"]
    with pytest.raises(TypeError, match="Unsupported flatten data type: <class 'object'>"):
        extract_data_and_schema([object()])
    with pytest.raises(TypeError, match="Unsupported unflatten data type"):
        unflatten_data_using_schema([], object())
    with pytest.raises(NotImplementedError):
        assert _TensorStub(0) == 3
    assert PrimitiveType.is_primitive_type(True) and not PrimitiveType.is_primitive_type("s")


def test_dtypes():
    kinds = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
             torch.complex64, torch.complex128]  # fmt: skip
    for dtype in kinds:
        kind = pytorch_type_to_onnx_dtype(dtype)
        assert onnx_dtype_to_pytorch_dtype(kind) is dtype
        if dtype is not torch.bfloat16:
            assert int(kind) == onnx.helper.np_dtype_to_tensor_dtype(torch.zeros(1, dtype=dtype).numpy().dtype)
    for name, dtype in {"Float": torch.float32, "Long": torch.int64, "Half": torch.float16, "BFloat16": torch.bfloat16}.items():
        assert pytorch_scalar_type_to_pytorch_dtype(name) is dtype
        assert pytorch_type_to_onnx_dtype(name) == pytorch_type_to_onnx_dtype(dtype)
    for function, wrong in ((pytorch_type_to_onnx_dtype, "Floot"), (pytorch_scalar_type_to_pytorch_dtype, "Floot"), (onnx_dtype_to_pytorch_dtype, 99)):
        with pytest.raises(RuntimeError, match="Unsupported dtype"):
            function(wrong)


def test_tables_and_memory(capsys):
    table = PTable(sortable=True)
    below = PTable()
    below.add_row(["x", ":", "ON", ":", "why"])
    table.add_row(["long name", ":", "OFF", ":", "b"])
    table.add_row(["a", ":", "ON", ":", "c"]).append_annotation_table(below)
    assert [line.rstrip() for line in table.get_string().splitlines()] == ["a          :  ON   :  c", "x          :  ON   :  why", "long name  :  OFF  :  b"]
    log_memory_usage("after", step_info="step 3", module=nn.Linear(1024, 1024))
    assert capsys.readouterr().out.startswith("rank-0 step 3 memory (MiB) | phase: after | ")
    assert nvtx_function_decorator(lambda x: x + 1)(2) == 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(10, 20, bias=False).requires_grad_(False)
        self.fc1 = nn.Linear(20, 5)
        self.norm = nn.LayerNorm(5)
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x):
        return self.fc2(F.gelu(self.norm(self.fc1(self.frozen(x)))))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("loss", ["cross_entropy", "own"])
def test_a_gradient_graph_runs_in_onnxruntime(loss, rows, tmp_path):
    torch.manual_seed(0)
    model = Net()
    loss_fn = nn.CrossEntropyLoss() if loss == "cross_entropy" else lambda out, y: -(y * torch.log(out.softmax(1)[:, 0])).sum()

    def labels(n):
        return torch.arange(n) % 2 if loss == "cross_entropy" else torch.rand(n)

    before = {k: v.clone() for k, v in model.state_dict().items()}
    export_gradient_graph(model, loss_fn, torch.randn(rows, 10, requires_grad=True), labels(rows), tmp_path / "g.onnx")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.fc1.weight.grad is None
    onnx.checker.check_model(onnx.load(tmp_path / "g.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx")
    assert [i.name for i in session.get_inputs()] == ["input", "labels", *dict(model.named_parameters())]
    outputs = [o.name for o in session.get_outputs()]
    assert outputs == ["output", "loss", *[f"{k}_grad" for k, p in model.named_parameters() if p.requires_grad]]
    for n in (1, 2, 7):
        x, y = torch.randn(n, 10), labels(n)
        out = model(x)
        value = loss_fn(out, y)
        model.zero_grad()
        value.backward()
        given = {"input": x.numpy(), "labels": y.numpy(), **{k: p.detach().numpy() for k, p in model.named_parameters()}}
        got = dict(zip(outputs, session.run(None, given), strict=True))
        np.testing.assert_allclose(got["output"], out.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got["loss"], value.detach(), rtol=1e-4, atol=1e-5)
        for k, p in model.named_parameters():
            if p.requires_grad:
                np.testing.assert_allclose(got[f"{k}_grad"], p.grad, rtol=1e-3, atol=1e-5)


def test_a_gradient_graph_that_needs_pytorch_is_refused(tmp_path):
    with pytest.raises(CaptureError, match="export_gradient_graph: .* needs PyTorch"):
        export_gradient_graph(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten()), nn.MSELoss(), torch.randn(2, 1, 5), torch.randn(2, 6), tmp_path / "g.onnx")
    assert not (tmp_path / "g.onnx").exists()


class Printed(nn.Module):
    """Not to be captured: what it returns depends on a number it counts with a list."""

    def forward(self, x):
        return x * float(x.detach().sum().item() > -1e9)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.odd = Printed()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def forward(self, x):
        x = self.odd(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("wrap", [HierarchicalORTModule, ORTModule])
def test_hierarchical_by_name_and_automatic(wrap):
    torch.manual_seed(0)
    eager = Outer().double()
    model = wrap(copy.deepcopy(eager))
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(2):
        for m in (eager, model):
            m.zero_grad()
            m(x).square().sum().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-12)
    report = model.report()
    assert not report.eager and [h.module for h in report.host if h.kind == "module"] in ([], ["odd"])
    if wrap is HierarchicalORTModule:
        assert list(model.state_dict()) == [f"_original_module.{k}" for k in eager.state_dict()]
