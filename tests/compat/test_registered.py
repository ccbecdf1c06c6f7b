"""register_gradient, register_symbolic and register_graph_optimizer, against PyTorch's autograd of the same mathematics.

Judges: eager PyTorch with an autograd.Function that has the registered gradient written out, in fp64.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import ortmodule
from ortmodule.capture import registered, symbolic
from ortmodule.capture.registered import CustomGradientRegistry, register_gradient, register_graph_optimizer
from ortmodule.capture.symbolic import register_symbolic

ATEN = ("ATen", "org.pytorch.aten")
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    kept = [(d, dict(d)) for d in (registered.GRADIENTS, registered.STOPPED, symbolic.SYMBOLICS)]
    functions = list(registered.GraphOptimizerRegistry._functions)
    yield
    for d, before in kept:
        d.clear()
        d.update(before)
    registered.GraphOptimizerRegistry._functions[:] = functions


class Net(nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.f = nn.Linear(6, 5), nn.Linear(5, 3), f

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.f(self.a(x)) * 1.5))


def trained(model: nn.Module, *sizes: int) -> list[Tensor]:
    """Results, gradients of arguments and of parameters, for batches of these sizes."""
    found: list[Tensor] = []
    for n in sizes or (4, 4, 7, 9):
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(n, 6, dtype=next(model.parameters()).dtype, generator=generator).requires_grad_()
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]]
    return found


def same(f: Callable[..., Any], reference: Callable[..., Any], *, host: int | None = None, tol: float = 1e-12,
         dtype: torch.dtype = torch.float64, net: type = Net) -> Any:  # fmt: skip
    """Net(f) in the engine is Net(reference) in PyTorch. -> the wrapper."""
    eager = net(reference).to(dtype)
    model = net(f).to(dtype)
    model.load_state_dict(eager.state_dict())
    wrapped = ortmodule.ORTModule(model)
    for got, want in zip(trained(wrapped), trained(eager), strict=True):
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)
    report = wrapped.report()
    assert not report.eager, str(report)
    assert host is None or len(report.host) == host, str(report)
    return wrapped


# --- register_gradient


class Surrogate(torch.autograd.Function):
    """sign, whose gradient is that of tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh() ** 2)


def test_register_gradient_of_onnx_nodes() -> None:
    @register_gradient("org.pytorch.aten", "ATen", "sign", "")
    def surrogate() -> list[Any]:
        return [
            ("Constant", [], ["One"], {"value": {"value": 1.0, "dtype": "IElemType(0)", "is_tensor": True}}),
            ("Tanh", ["I(0)"], ["T"]),
            ("Mul", ["T", "T"], ["TT"]),
            ("Sub", ["One", "TT"], ["D"]),
            ("Mul", ["GO(0)", "D"], ["GI(0)"]),
        ]

    wrapped = same(torch.sign, Surrogate.apply, host=1)
    assert wrapped.report().host[0].reason == "a gradient is registered for it"
    same(torch.sign, Surrogate.apply, dtype=torch.float32, tol=1e-5)
    same(torch.sign, Surrogate.apply, dtype=torch.bfloat16, tol=5e-2)


def test_register_gradient_of_aten_nodes_with_numbers_as_arguments() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.cumsum(1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad.flip(1).cumsum(1).flip(1)

    @register_gradient("org.pytorch.aten", "ATen", "cumsum", "")
    def cumsum() -> list[Any]:
        return [
            ("Constant", [], ["Axes"], {"value": {"value": [1], "dtype": "int", "is_tensor": True}}),
            (ATEN, ["GO(0)", "Axes"], ["F"], {"operator": {"value": "flip", "dtype": "string"}}),
            (ATEN, ["F", "I(1)"], ["C"], {"operator": {"value": "cumsum", "dtype": "string"}}),
            (ATEN, ["C", "Axes"], ["B"], {"operator": {"value": "flip", "dtype": "string"}}),
            ("Add", ["B", "B"], ["GI(0)"]),
        ]

    same(lambda x: x.cumsum(1), Twice.apply, host=1)


def test_register_gradient_with_shapes_and_results() -> None:
    """What onnxruntime-training registers for max: shares among equals. PyTorch's amax does the same."""
    @register_gradient("org.pytorch.aten", "ATen", "max", "")
    def largest() -> list[Any]:
        return [
            ("Equal", ["I(0)", "O(0)"], ["Mask"]),
            ("Constant", [], ["Zero"], {"value": {"value": 0.0, "dtype": "IElemType(0)", "is_tensor": True}}),
            ("Constant", [], ["One"], {"value": {"value": 1.0, "dtype": "OElemType(0)", "is_tensor": True}}),
            ("Where", ["Mask", "One", "Zero"], ["Chosen"]),
            ("ReduceSum", ["Chosen"], ["Sum"], {"keepdims": {"value": 0, "dtype": "int"}}),
            ("Div", ["GO(0)", "Sum"], ["Part"]),
            ("Mul", ["Chosen", "Part"], ["GI(0)"]),
        ]

    same(lambda x: x * x.relu().max(), lambda x: x * x.relu().amax(), host=1)


@torch.library.custom_op("ortmodule_registered::scale", mutates_args=())
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


@scale.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def test_register_gradient_of_an_operator_of_torch_library() -> None:
    class Negative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -3 * grad

    @register_gradient("ortmodule_registered", "scale")
    def negative() -> list[Any]:
        return [("Neg", ["GO(0)"], ["N"]), (ATEN, ["N", "I(1)"], ["GI(0)"], {"operator": {"value": "ortmodule_registered::scale", "dtype": "string"}})]

    wrapped = same(lambda x: scale(x, 3.0), Negative.apply, host=1)
    x = torch.randn(2, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"does not know the gradient .*negative of ortmodule_registered::scale"):
        torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)


def test_edges_that_stop() -> None:
    CustomGradientRegistry.register_custom_stop_gradient_edges([1], "org.pytorch.aten", "ATen", "atan2", "")
    same(lambda x: torch.atan2(x, x * 2 + 1), lambda x: torch.atan2(x, (x * 2 + 1).detach()), host=1)


@pytest.mark.parametrize("domain, name, attributes, nodes, error, words", [
    ("", "Mul", (), [("Identity", ["GO(0)"], ["GI(0)"])], NotImplementedError, "write a torch.autograd.Function"),
    ("com.microsoft", "Gelu", (), [("Identity", ["GO(0)"], ["GI(0)"])], NotImplementedError, "is the engine's own"),
    ("org.pytorch.aten", "ATen", ("sin", ""), [(("GeluGrad", "com.microsoft"), ["GO(0)", "I(0)"], ["GI(0)"])], NotImplementedError, "neither an operator of ONNX"),
    ("org.pytorch.aten", "ATen", ("sin", ""), [(ATEN, ["GO(0)"], ["GI(0)"], {"operator": {"value": "no_such", "dtype": "string"}})], NotImplementedError, "no operator aten::no_such"),
    ("org.pytorch.aten", "ATen", ("sin", ""), [("Mul", ["GO(0)", "Nobody"], ["GI(0)"])], ValueError, "reads 'Nobody'"),
    ("org.pytorch.aten", "ATen", ("sin", ""), [("Identity", ["GO(0)"], ["X"])], ValueError, "no node makes a gradient"),
    ("org.pytorch.aten", "ATen", ("sin", ""), [("Identity", ["GO(0)"])], ValueError, "a node is"),
    ("org.pytorch.aten", "ATen", (), [("Identity", ["GO(0)"], ["GI(0)"])], ValueError, "operator, overload")])  # fmt: skip
def test_a_gradient_that_is_refused(domain: str, name: str, attributes: Any, nodes: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        register_gradient(domain, name, *attributes)(lambda: nodes)


# --- register_symbolic


@torch.library.custom_op("ortmodule_registered::swish", mutates_args=())
def swish(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


@swish.register_fake
def _(x: Tensor, beta: float) -> Tensor:
    return torch.empty_like(x)


def reference(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2.0 * x)


def test_register_symbolic_of_an_operator_without_a_row() -> None:
    seen = []

    @register_symbolic("swish", "ortmodule_registered")
    def spelled(g: Any, x: Any, beta: float) -> Any:
        seen.append((x.type().scalarType(), x.type().dim(), beta))
        return g.op("Mul", x, g.op("Sigmoid", g.op("Mul", g.op("Constant", value_t=torch.tensor(beta, dtype=torch.float64)), x)))

    same(lambda x: swish(x, 2.0), reference, host=0)
    assert seen[0] == ("Double", 2, 2.0)


def test_register_symbolic_with_node_helpers_and_versions() -> None:
    from torch.onnx import symbolic_helper

    calls = []

    @register_symbolic("swish", domain="ortmodule_registered", torch_version_start="99.0")
    def later(g: Any, x: Any, beta: float) -> Any:
        raise AssertionError

    @register_symbolic("swish", domain="ortmodule_registered", torch_version_end="1.0")
    def earlier(g: Any, x: Any, beta: float) -> Any:
        raise AssertionError

    @register_symbolic("swish", domain="ortmodule_registered", torch_version_start="1.11", need_node=True)
    def spelled(g: Any, node: Any, x: Any, beta: Any) -> Any:
        calls.append((node.kind(), node.output().type().scalarType()))
        beta = symbolic_helper._maybe_get_const(beta, "f")
        return g.op("Mul", x, g.op("Sigmoid", g.op("Mul", x, torch.tensor(beta, dtype=torch.float64)))).setType(x.type())

    same(lambda x: swish(x, 2.0), reference, host=0)
    assert calls[0] == ("ortmodule_registered::swish", "Double")


@torch.library.custom_op("ortmodule_registered::gated", mutates_args=())
def gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * x)


def gated_gradient(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(2 * x)
    return g * (s + 2 * x * s * (1 - s))


gated.register_fake(torch.empty_like)
gated.register_autograd(gated_gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def test_a_symbolic_of_torch_onnx_changes_no_training_and_is_named() -> None:
    """What a script registers for its files need not be what it trains: the operator stays PyTorch's, and the report says how
    the engine gets it."""
    name = "ortmodule_registered::gated"

    def rough(g: Any, x: Any) -> Any:
        return g.op("Mul", x, g.op("Sigmoid", x))

    torch.onnx.register_custom_op_symbolic(name, rough, 15)
    try:
        wrapped = same(gated, reference, host=1)
        (entry,) = wrapped.report().host
        assert entry.reason == ("no row in the operator table; its symbolic of torch.onnx is for files: "
                                "register_symbolic('gated', 'ortmodule_registered')(fn) of ortmodule.capture.symbolic gives it to the engine")  # fmt: skip
        register_symbolic("gated", "ortmodule_registered")(rough)
        same(gated, lambda x: x * torch.sigmoid(x), host=0)
    finally:
        torch.onnx.unregister_custom_op_symbolic(name, 15)
    symbolic.SYMBOLICS.clear()
    assert same(gated, reference, host=1).report().host[0].reason == "no row in the operator table"


def test_a_symbolic_comes_before_the_engines_own_row() -> None:
    """As in onnxruntime-training, whose registrations replaced the exporter's."""
    @register_symbolic("sin")
    def cosine(g: Any, x: Any) -> Any:
        return g.op("Cos", x)

    same(torch.sin, torch.cos, host=0)


def test_a_symbolic_may_call_aten_and_its_gradient() -> None:
    @register_symbolic("swish", "ortmodule_registered")
    def spelled(g: Any, x: Any, beta: float) -> Any:
        return g.op("org.pytorch.aten::ATen", x, operator_s="silu", overload_name_s="")

    same(lambda x: swish(x, 1.0), nn.functional.silu, host=1)

    @register_gradient("org.pytorch.aten", "ATen", "silu", "")
    def straight() -> list[Any]:
        return [("Identity", ["GO(0)"], ["GI(0)"])]

    same(lambda x: swish(x, 1.0), lambda x: x + (nn.functional.silu(x) - x).detach(), host=1)


@pytest.mark.parametrize("fn, words", [
    (lambda g, x, beta: g.op("acme::Swish", x), "acme::Swish is no operator of ONNX"),
    (lambda g, x, beta: g.op("NoSuch", x), "NoSuch"),
    (lambda g, x, beta: g.op("ReduceSum", x, keepdims_i=0), "rank|is f64"),
    (lambda g, x, beta: 1 / 0, "division by zero"),
    (lambda g, x, beta: (x, x), "2 values for 1 results"),
    (lambda g, x, beta: g.op("LeakyRelu", x, alpha=0.1), "its kind")])  # fmt: skip
def test_a_symbolic_that_the_engine_cannot_take_leaves_the_operator_to_pytorch(fn: Any, words: str) -> None:
    swish.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))  # fmt: skip
    register_symbolic("swish", "ortmodule_registered")(fn)
    model = Net(lambda x: swish(x, 2.0))
    eager = copy.deepcopy(model)
    wrapped = ortmodule.ORTModule(model)
    for got, want in zip(trained(wrapped), trained(eager), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert [h.kind for h in wrapped.report().host] == ["aten"] and not wrapped.report().eager
    assert re.search(words, wrapped.report().host[0].reason), wrapped.report().host[0].reason


# --- register_graph_optimizer


def relu_to_sigmoid(graph: onnx.GraphProto) -> None:
    for i, node in enumerate(graph.node):
        if node.op_type == "Relu":
            new = helper.make_node("Sigmoid", list(node.input), list(node.output), name=node.name)
            graph.node[i].CopyFrom(new)


class SigmoidNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sigmoid(self.f(self.a(x)) * 1.5))


def test_register_graph_optimizer_rewrites_before_gradients() -> None:
    register_graph_optimizer("Net|Other", devices="cuda|cpu")(relu_to_sigmoid)
    model = Net(torch.tanh)
    eager = SigmoidNet(torch.tanh)
    eager.load_state_dict(model.state_dict())
    wrapped = ortmodule.ORTModule(model)
    for got, want in zip(trained(wrapped), trained(eager), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    x = torch.randn(3, 6)
    with torch.no_grad():  # the graph of inference is left alone, as there
        torch.testing.assert_close(wrapped.eval()(x), model(x))


def test_graph_optimizers_are_chosen_by_class_device_and_priority() -> None:
    asked: list[str] = []
    for target, devices, priority in (("all", "all", 1), ("Net", "cpu", 5), ("Other", "all", 9), ("all", "cuda", 9), ("Net|Other", "all", 3)):
        def fn(graph: onnx.GraphProto, name: str = f"{target} {devices}") -> None:
            assert all(i.name for i in graph.input) and graph.node
            asked.append(name)

        register_graph_optimizer(target, devices, priority)(fn)
    ortmodule.ORTModule(Net(torch.tanh))(torch.randn(2, 6)).sum().backward()
    assert asked == ["Net cpu", "Net|Other all", "all all"]


def test_a_graph_optimizer_may_put_in_operators_of_pytorch() -> None:
    @register_graph_optimizer()
    def softplus(graph: onnx.GraphProto) -> None:
        for i, node in enumerate(graph.node):
            if node.op_type == "Relu":
                new = helper.make_node("ATen", list(node.input), list(node.output), domain="org.pytorch.aten", operator="softplus", overload_name="")
                graph.node[i].CopyFrom(new)

    class SoftplusNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.softplus(self.f(self.a(x)) * 1.5))

    model = Net(torch.tanh)
    eager = SoftplusNet(torch.tanh)
    eager.load_state_dict(model.state_dict())
    wrapped = ortmodule.ORTModule(model)
    for got, want in zip(trained(wrapped), trained(eager), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert [h.name for h in wrapped.report().host] == ["aten::softplus"]


def raises(graph: onnx.GraphProto) -> None:
    raise KeyError("mine")


def renames(graph: onnx.GraphProto) -> None:
    graph.output[0].name = "other"


def strange(graph: onnx.GraphProto) -> None:
    graph.node[-1].domain = "acme"


@pytest.mark.parametrize("fn, words", [(raises, "raised KeyError: 'mine'"), (renames, "changed the graph's inputs or outputs"), (strange, "nodes of the domain 'acme'")])
def test_a_graph_optimizer_that_fails_is_named(fn: Any, words: str) -> None:
    register_graph_optimizer()(fn)
    model = Net(torch.tanh)
    eager = copy.deepcopy(model)
    wrapped = ortmodule.ORTModule(model)
    for got, want in zip(trained(wrapped), trained(eager), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    reason = str(wrapped.report().eager)
    assert words in reason and f"graph optimizer {fn.__name__} ({__file__}:" in reason
    with pytest.raises(ortmodule.ORTModuleONNXModelException, match="graph optimizer"):
        ortmodule.ORTModule(Net(torch.tanh), fallback_policy=ortmodule.FallbackPolicy.FALLBACK_DISABLE)(torch.randn(2, 6))


def test_graph_optimizers_and_gradients_in_the_parts_around_a_hook() -> None:
    register_graph_optimizer()(relu_to_sigmoid)
    register_gradient("org.pytorch.aten", "ATen", "sign", "")(lambda: [("Identity", ["GO(0)"], ["GI(0)"])])
    model = Net(lambda x: torch.sign(x) * x)
    eager = SigmoidNet(lambda x: (x + (torch.sign(x) - x).detach()) * x)
    eager.load_state_dict(model.state_dict())
    model.a.register_forward_hook(lambda m, args, out: out * 1.25)
    eager.a.register_forward_hook(lambda m, args, out: out * 1.25)
    wrapped = ortmodule.ORTModule(model)
    for k in range(3):  # the first call with hooks is PyTorch's, which knows nothing of these
        x = torch.randn(3, 6)
        for m in (wrapped, eager):
            m.zero_grad()
            m(x).square().sum().backward()
        for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
            assert k == 0 or torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-12), k
