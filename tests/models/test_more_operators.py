"""Modules that once left operators to PyTorch: outputs and gradients as eager's, wholly in the engine, the captured
file right in onnxruntime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import capture


class Fn(nn.Module):
    """f(x * w, ...), w a parameter of x's last size: gradients flow through."""

    def __init__(self, f: Callable[..., Any], x: Tensor) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(r(*x.shape[-1:], seed=5).detach())

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.f(x * self.w, *more)


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).requires_grad_()


def tensors(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else [t for z in y for t in tensors(z)]


def wide(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(wide(y) for y in x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def step(m: nn.Module, args: tuple) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, gradients of parameters and arguments under random output gradients."""
    args = copy.deepcopy(args)
    m.zero_grad()
    ys = tensors(m(*args))
    g = torch.Generator().manual_seed(7)
    pairs = [(y, torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)) for y in ys
             if y.is_floating_point() and y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [d for _, d in pairs])
    leaves = [a for a in tensors(args) if a.requires_grad]
    return [y.detach() for y in ys], [t.grad for t in (*m.parameters(), *leaves)]


def compare(got: list, want: list, tolerance: float, what: str) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        if a is None or b is None:
            assert (a is None or not a.any()) and (b is None or not b.any()), f"{what} {i}: {a} and {b}"
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what} {i}"
        if b.numel() and b.is_floating_point():
            assert torch.equal(a.isnan(), b.isnan()), f"{what} {i}: NaN elsewhere"
            error = float((a - b).nan_to_num().abs().max())
            assert error <= tolerance * max(1.0, float(b.nan_to_num().abs().max())), f"{what} {i}: {error}"
        else:
            assert torch.equal(a, b), f"{what} {i}"


def same(m: nn.Module | Callable, *calls: tuple, ort: bool = True, tolerance: float = 1e-10) -> ORTModule:
    """calls: arguments of one call each; further ones may have other sizes. Tensors among them that require gradients
    are compared too."""
    m = m if isinstance(m, nn.Module) else Fn(m, calls[0][0])
    eager = copy.deepcopy(m).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    for call in calls:
        want, want_g = step(eager, wide(call))
        got, got_g = step(ours, wide(call))
        compare(got, want, tolerance, "output")
        compare(got_g, want_g, tolerance, "gradient")
    report = ours.report()
    assert report.node_share == 1, str(report)
    if ort:
        run_ort(m, calls[0])
    return ours


def run_ort(m: nn.Module, args: tuple) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    m = copy.deepcopy(m)
    c = capture(m, copy.deepcopy(args), {})
    assert not c.host_ops
    onnx.checker.check_model(onnx.load_from_string(c.onnx), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(c.onnx, options, providers=["CPUExecutionProvider"])
    named = dict(m.named_parameters()) | dict(m.named_buffers())
    flat = tensors([a for a in args if isinstance(a, (Tensor, tuple))])
    feeds = {s.name: flat[s.leaf] if s.kind == "user" else named[s.target] for s in c.inputs}
    got = session.run(None, {i.name: feeds[i.name].detach().numpy() for i in session.get_inputs()})
    with torch.no_grad():
        want = tensors(m(*args))
    for a, b in zip(got, want):
        torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-4, atol=1e-5, equal_nan=True)


# --- windows --------------------------------------------------------------------------------------

TRANSPOSED = [
    (nn.ConvTranspose1d(6, 4, 3, 2, 1, 1, groups=2), (3, 6, 7), (2, 6, 11)),
    (nn.ConvTranspose2d(6, 4, (3, 4), 2, 1, 1), (2, 6, 5, 4), (4, 6, 7, 7)),
    (nn.ConvTranspose2d(6, 4, 3, 1, 1, 1, dilation=2, bias=False), (2, 6, 5, 4), (3, 6, 5, 4)),
    (nn.ConvTranspose3d(2, 3, 2, 2), (2, 2, 3, 4, 2), (1, 2, 3, 4, 2)),
    (nn.ConvTranspose2d(6, 4, 2, 2), (6, 5, 4), (6, 3, 3)),
]


@pytest.mark.parametrize("m,first,second", TRANSPOSED)
def test_conv_transpose(m: nn.Module, first: tuple, second: tuple) -> None:
    ort = max(m.output_padding) < max(m.stride)  # onnxruntime takes no more
    same(m, (r(*first),), (r(*second),), (r(*first, seed=1),), ort=ort)


def test_conv_transpose_output_size() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[2 * x.shape[2], 2 * x.shape[3]])

    same(Sized(), (r(2, 3, 4, 5),), (r(3, 3, 6, 5),))


def test_adaptive_avg_pool_of_sizes_that_do_not_divide() -> None:
    same(lambda x: F.adaptive_avg_pool1d(x, 4), (r(2, 3, 9),))
    same(lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (r(2, 3, 10, 9),))
    same(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), (r(2, 3, 5, 7, 6),))
    same(lambda x: F.interpolate(x, size=(3, 2), mode="area"), (r(2, 3, 10, 9),))
    same(lambda x: F.adaptive_avg_pool1d(F.adaptive_avg_pool2d(x, (4, 13)).flatten(1, 2), 3), (r(2, 3, 10, 9),))
    x = r(2, 3, 10, 9).detach()
    x[0, 0, 0, 0], x[1, 1, 4, 4] = float("inf"), float("nan")  # of their windows alone
    run_ort(Fn(lambda x: F.adaptive_avg_pool2d(x, (3, 2)), x), (x,))


def test_unfold_and_fold() -> None:
    same(lambda x: F.unfold(x, 3, padding=1, stride=2), (r(2, 3, 8, 6),), (r(4, 3, 7, 6),))
    same(lambda x: F.unfold(x, (2, 3), dilation=(1, 2)), (r(3, 8, 6),))
    same(lambda x: F.fold(x, (6, 7), (2, 3), padding=(0, 1), dilation=2), (r(2, 12, 20),), (r(5, 12, 20),))
    same(lambda x: F.fold(x, (6, 7), (2, 3)), (r(12, 25),))
    same(lambda x: F.fold(F.unfold(x, 2, stride=2), x.shape[-2:], 2, stride=2), (r(2, 3, 8, 6),), (r(2, 3, 10, 6),))


def test_tensor_unfold() -> None:
    same(lambda x: x.unfold(1, 3, 2), (r(5, 9, 4),), (r(5, 12, 4),))
    same(lambda x: x.unfold(-1, 2, 1).unfold(1, 4, 3), (r(5, 9, 4),), (r(7, 9, 4),))
    same(lambda x: x.unfold(0, 5, 1), (r(5, 3),))
    same(lambda x: x.unfold(1, 4, 4).sum(-1), (r(2, 8, 3),), (r(3, 16, 3),))


# --- order ----------------------------------------------------------------------------------------


def test_topk_and_sort() -> None:
    same(lambda x: x.topk(3, -1), (r(5, 9),), (r(7, 9),))
    same(lambda x: (x.topk(2, 0, largest=False)[0], x.sort(1, descending=True)), (r(5, 9),), (r(7, 9),), (r(6, 9),))
    same(lambda x: (x.sort()[0], x.argsort(1), x.argsort(dim=0, stable=True), x.msort(), x.sort(dim=0, stable=True)), (r(5, 9),))
    same(lambda x: x.sort(dim=1, stable=True, descending=True), (r(5, 9).round().detach().requires_grad_(),))
    same(lambda x: (x > 0).sort(dim=1, stable=True)[0] * x, (r(5, 9),))
    same(lambda x: x[x.sum(1).argsort()], (r(5, 9),), (r(11, 9),))


def test_kthvalue_and_median() -> None:
    x = r(5, 9)
    with torch.no_grad():
        x[2, 3] = x[2, 7] = x[4, 0] = float("nan")
    same(lambda x: (x.kthvalue(4, 1), x.kthvalue(2, 0, keepdim=True)), (r(5, 9),), (r(6, 9),))
    same(lambda x: (x.median(1)[0], x.median(0, keepdim=True)[0]), (r(5, 9),), (r(6, 9),))
    same(lambda x: x.median(1), (x,), ort=False)  # onnxruntime has no order for NaN


class Routed(nn.Module):
    """A mixture of experts as switch transformers route it: the best two, weighted, every expert on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(r(4, 6, 8).detach()), nn.Parameter(r(4, 8, 6).detach())

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.gate(x).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        token = order // 2
        up, down = self.up[expert.flatten()[order]], self.down[expert.flatten()[order]]
        y = torch.bmm(F.silu(torch.bmm(x[token][:, None], up)), down)[:, 0] * weight.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, token, y)


def test_routing() -> None:
    same(Routed(), (r(10, 6),), (r(13, 6),), (r(4, 6),))


# --- recurrent layers -----------------------------------------------------------------------------


class Last(nn.Module):
    """A recurrent layer from states of its own, or from given ones; everything it returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.layer(x) if state is None else self.layer(x, state)


LAYERS = [
    nn.LSTM(6, 5),
    nn.LSTM(6, 5, num_layers=2, bidirectional=True),
    nn.LSTM(6, 4, num_layers=2, batch_first=True, bias=False),
    nn.GRU(6, 5),
    nn.GRU(6, 5, num_layers=2, bidirectional=True, batch_first=True),
    nn.GRU(6, 5, bias=False),
    nn.RNN(6, 5, nonlinearity="relu"),
    nn.RNN(6, 5, num_layers=3, bidirectional=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_recurrent(layer: nn.Module) -> None:
    torch.manual_seed(2)
    same(Last(layer), (r(7, 3, 6),), (r(7, 3, 6, seed=1),), (r(5, 4, 6),))


@pytest.mark.parametrize("layer", [nn.LSTM(6, 5, 2), nn.GRU(6, 5, 2)], ids=str)
def test_recurrent_with_states(layer: nn.Module) -> None:
    def state(n: int) -> Any:
        return (r(2, n, 5), r(2, n, 5, seed=2)) if isinstance(layer, nn.LSTM) else r(2, n, 5)

    same(Last(layer), (r(7, 3, 6), state(3)), (r(6, 4, 6), state(4)), ort=False)


def test_recurrent_without_a_batch_axis() -> None:
    same(Last(nn.LSTM(6, 5)), (r(7, 6),), (r(4, 6),))


def test_cells() -> None:
    for cell in (nn.LSTMCell(6, 5), nn.GRUCell(6, 5), nn.RNNCell(6, 5), nn.RNNCell(6, 5, nonlinearity="relu"), nn.GRUCell(6, 5, bias=False)):
        same(Last(cell), (r(3, 6),), (r(4, 6),))

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in x.unbind(0):
                state = self.cell(step, state)
            return state[0]

    same(Loop(), (r(4, 3, 6),))


def test_recurrent_dropout() -> None:
    """Between layers, in training only: other values at every call; in eval mode PyTorch's."""
    torch.manual_seed(4)
    eager = nn.LSTM(6, 8, num_layers=2, dropout=0.5).double()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    x = r(7, 3, 6).detach().double()
    a, b = ours(x)[0], ours(x)[0]
    assert not torch.equal(a, b)
    a.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())
    eager.eval(), ours.eval()
    assert (ours(x)[0] - eager(x)[0]).abs().max() < 1e-12
    assert ours.report().node_share == 1


@pytest.mark.parametrize("layer", [nn.LSTM(6, 5, proj_size=3), nn.LSTM(6, 5)], ids=["proj_size", "packed"])
def test_recurrent_left_to_pytorch(layer: nn.Module, request: pytest.FixtureRequest) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            if layer.proj_size:
                return self.layer(x)[0]
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4, 2]))
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]

    eager = Packed().double()
    ours = ORTModule(copy.deepcopy(eager))
    x = r(7, 3, 6).double().detach()
    for m in (eager, ours):
        m.zero_grad()
        m(x).square().sum().backward()
    for p, q in zip(eager.parameters(), ours.parameters()):
        assert (p.grad - q.grad).abs().max() < 1e-12
    assert ours.report().node_share < 1


# --- running and grouped --------------------------------------------------------------------------


def test_cumprod() -> None:
    same(lambda x: (x.cumprod(1), x.cumprod(0), x.prod(-1)), (r(5, 9),), (r(7, 9),))


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, float("inf")])
def test_cdist(p: float) -> None:
    same(lambda x, y: torch.cdist(x, y, p), (r(7, 5), r(4, 5, seed=1)), (r(9, 5), r(6, 5, seed=1)))
    same(lambda x, y: torch.cdist(x, y, p), (r(2, 3, 7, 5), r(3, 4, 5, seed=1)))


def test_cdist_of_many_rows() -> None:
    """Where PyTorch goes over a matrix product."""
    same(lambda x, y: torch.cdist(x, y), (r(40, 5), r(30, 5, seed=1)), tolerance=1e-9)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("how", ["sum", "mean", "amax", "amin"])
def test_scatter_reduce(how: str, include: bool) -> None:
    i = torch.randint(0, 6, (4, 9), generator=torch.Generator().manual_seed(2))

    def f(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return x.scatter_reduce(1, i, s, how, include_self=include)

    same(f, (r(5, 6), i, r(4, 9)), (r(5, 6), i, r(4, 9, seed=3)))
    same(lambda x, i, s: f(x.relu(), i, s.relu()), (r(5, 6), i, r(4, 9)))  # ties
    same(lambda x, i, s: f(x.round(), i, (s * 0.5).round()), (r(5, 6), i, r(4, 9)))


def test_masked_scatter() -> None:
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(5, 9, generator=g) > 0.6
    same(lambda x, m, s: x.masked_scatter(m, s), (r(5, 9), mask, r(6, 9)), (r(5, 9), ~mask, r(6, 9)))
    same(lambda x, m, s: x.masked_scatter(m, s), (r(5, 9), mask[:, :1], r(6, 9)), (r(4, 9), mask[:4, :1], r(8, 9)))


def test_masked_scatter_from_too_little() -> None:
    """PyTorch's error."""
    ours = ORTModule(Fn(lambda x, m, s: x.masked_scatter(m, s), r(5, 9)))
    with pytest.raises(RuntimeError, match="elements"):
        ours(r(5, 9), torch.ones(5, 9) > 0, r(2, 9))


def test_histc() -> None:
    x = torch.cat([torch.linspace(-1, 8, 64), torch.tensor([0.0, 7, 7.0001, float("nan"), 3])])
    for bins, low, high in ((8, 0, 7), (5, -0.5, 6.3), (3, 0, 1)):
        same(lambda x, t, a=(bins, low, high): x * 2 + torch.histc(t, *a).sum() + torch.histc(t, *a)[0], (r(5), x))
        same(lambda x, t, a=(bins, low, high): (x, torch.histc(t, *a)), (r(5), x), (r(5), x[:50]), ort=False)


class Bag(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(10, 3, **how)

    def forward(self, i: Tensor, offsets: Any = None, weights: Any = None) -> Tensor:
        return self.bag(i, offsets, weights)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str, padding: int | None) -> None:
    g = torch.Generator().manual_seed(5)
    i = torch.randint(0, 10, (4, 6), generator=g)
    same(Bag(mode=mode, padding_idx=padding), (i,), (i[:3],), (i[:, :4],))
    flat, offsets = torch.randint(0, 10, (11,), generator=g), torch.tensor([0, 3, 3, 7])
    same(Bag(mode=mode, padding_idx=padding), (flat, offsets), (flat[:9], offsets), (flat, offsets[:2]))
    same(Bag(mode=mode, padding_idx=padding, include_last_offset=True), (flat, torch.tensor([0, 3, 3, 11])))
    alike = Bag(mode=mode)
    with torch.no_grad():
        alike.bag.weight[3:8] = 0.5  # ties
    same(alike, (flat, offsets))


def test_embedding_bag_weighted() -> None:
    i = torch.randint(0, 10, (11,), generator=torch.Generator().manual_seed(5))
    same(Bag(mode="sum"), (i, torch.tensor([0, 3, 3, 7]), r(11)), (i, torch.tensor([0, 0, 5, 7]), r(11, seed=1)))


def test_embedding_bag_wrong_offsets() -> None:
    """PyTorch's error."""
    ours = ORTModule(Bag(mode="sum"))
    ours(torch.arange(5), torch.tensor([0, 2]))
    with pytest.raises(RuntimeError, match="offset"):
        ours(torch.arange(5), torch.tensor([1, 2]))


# --- resampling -----------------------------------------------------------------------------------

MODES = ["nearest", "nearest-exact", "bilinear", "bicubic"]


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_resize(mode: str, corners: bool) -> None:
    if corners and "nearest" in mode:
        pytest.skip("no corners to align")
    align = {"align_corners": corners} if "nearest" not in mode else {}

    def to(*size: int) -> Callable:
        return lambda x: F.interpolate(x, size, mode=mode, **align)

    def by(factor: Any, **more: Any) -> Callable:
        return lambda x: F.interpolate(x, scale_factor=factor, mode=mode, **align, **more)

    images = (r(2, 3, 7, 5),), (r(3, 3, 9, 5),), (r(2, 3, 12, 5),)  # the second shape makes the height a symbol
    for f in (to(5, 11), to(1, 1), by(2), by((1.6, 0.6)), by(1.3, recompute_scale_factor=True)):
        same(f, *images, tolerance=2e-7 if mode == "nearest" else 1e-10)
    same(by(1.4), (r(2, 3, 7, 5),), (r(2, 3, 9, 5),), (r(2, 3, 2, 5),))  # 2 stays 2: PyTorch copies


def test_resize_to_the_size_of_another() -> None:
    for mode in ("nearest", "bilinear", "bicubic"):
        same(lambda x, y, mode=mode: F.interpolate(x, y.shape[2:], mode=mode) * y.mean(), (r(2, 3, 4, 5), r(2, 1, 8, 9)),
             (r(2, 3, 5, 5), r(2, 1, 9, 7)), (r(2, 3, 6, 5), r(2, 1, 6, 5)))  # fmt: skip


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_grid_sample(padding: str, corners: bool) -> None:
    """Points outside of the image too; the gradient of the grid."""
    def f(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid * 0.9, padding_mode=padding, align_corners=corners)

    same(f, (r(2, 3, 7, 5), r(2, 4, 6, 2)), (r(3, 3, 7, 5), r(3, 4, 6, 2)), (r(3, 3, 8, 5), r(3, 9, 6, 2)))
    edge = torch.linspace(-1.2, 1.2, 24).reshape(1, 4, 3, 2).requires_grad_()
    same(f, (r(1, 2, 4, 3), edge))


def test_grid_sample_far_outside() -> None:
    """What lies there counts as 0, also beside an infinite pixel. (NaN in a grid crashes eager's backward.)"""
    grid = torch.tensor([70.0, 0.2, 0.1, -40, 1e6, 0, -1e5, 0.5]).reshape(1, 2, 2, 2)
    x = r(1, 2, 4, 3)
    with torch.no_grad():
        x[0, 0, 0, 0] = float("inf")
    for padding in ("zeros", "border"):
        same(lambda x, g, p=padding: F.grid_sample(x, g, padding_mode=p, align_corners=True), (x, grid), ort=False)


@pytest.mark.parametrize("corners", [False, True])
def test_grid_sample_at_whole_pixels(corners: bool) -> None:
    """In float32 the neighbours are eager's, and so is the side on which the slope is taken."""
    eager = Fn(lambda x, grid: F.grid_sample(x, grid, align_corners=corners), x := r(1, 1, 100, 100))
    places = torch.linspace(-1, 1, 100) * (1 if corners else 99 / 100)
    found = []
    for m in (eager, ORTModule(copy.deepcopy(eager), strict="engine")):
        grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)[None].requires_grad_()
        m(x, grid).sum().backward()
        found.append(grid.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
