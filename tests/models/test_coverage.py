"""Operators outside of the usual transformer, in the wrapper and beside eager PyTorch in fp64: outputs and gradients at
1e-10, at three sizes (captured with constants, then with symbols). The third entry of a row names what PyTorch runs:
nothing for operators of the engine; a region, listed in the report with file and line, for the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule import ORTModule

SIZES = ((4, 5, 6), (2, 7, 8), (3, 5, 10))  # last axis even


class Fn(nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, *xs: Tensor) -> Any:
        return self.f(*[x * self.scale for x in xs])


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def cube(b: int, t: int, d: int) -> tuple[Tensor, ...]:
    return (randn(1, b, t, d),)


def two(b: int, t: int, d: int) -> tuple[Tensor, ...]:
    return randn(1, b, t, d), randn(2, b, t, d)


def image(b: int, t: int, d: int) -> tuple[Tensor, ...]:
    return (randn(1, b, 8, t, d),)


def kernel(b: int, t: int, d: int) -> tuple[Tensor, ...]:
    return randn(1, b, 4, t, d), randn(2, 4, 3, 3, 2), randn(3, 3)


ROWS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]], str]] = {
    "diagonal": (lambda x: (x.diagonal(dim1=1, dim2=2), x.diagonal(1, 0, 2), x.diagonal(-2, 2, 1), x[0].diag(1), x[0, 0].diag(-1)), cube, ""),
    "diagonal-written": (lambda x: torch.diagonal_scatter(x, x[:, :, 0].exp()[:, : min(x.shape[1], x.shape[2])], dim1=1, dim2=2),
                         lambda b, t, d: (randn(1, b, t, t + 2),), ""),
    "diagonal-in-place": (lambda x: (lambda y: (y.diagonal(dim1=1, dim2=2).mul_(3), y)[1])(x * 1), lambda b, t, d: (randn(1, b, t, t),), ""),
    "diag_embed": (lambda x: (torch.diag_embed(x), torch.diag_embed(x, 1), torch.diag_embed(x, -2, 0, 2)), cube, ""),
    "cosine_similarity": (lambda x, y: (F.cosine_similarity(x, y, -1), F.cosine_similarity(x, y[:1], 1, 2.0)), two, ""),
    "roll": (lambda x: (x.roll(2, 1), x.roll((-1, 3), (1, 2)), x.roll(9, 1), x.roll(1), x.roll(-(x.shape[1] // 2), 1)), cube, ""),
    "pad-modes": (lambda x: tuple(F.pad(x, (2, 1), mode) for mode in ("reflect", "replicate", "circular")), cube, ""),
    "pad-modes-2d": (lambda x: tuple(F.pad(x, (2, 1, 0, 3), mode) for mode in ("reflect", "replicate", "circular")), image, ""),
    "pixel_shuffle": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(F.pad(x, (0, 0, 0, x.shape[2])), 2)), image, ""),
    "nearest": (lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x[:, :, 0], scale_factor=3)), image, ""),
    "nearest-broken": (lambda x: (F.interpolate(x, (7, 9)), F.interpolate(x, scale_factor=1.7)), lambda b, t, d: (randn(1, b, 3, 5, 6),), ""),
    "bilinear": (lambda x: (F.interpolate(x, scale_factor=2, mode="bilinear"), F.interpolate(x, (3, 11), mode="bilinear", align_corners=True),
                            F.interpolate(x[:, :, 0], scale_factor=1.6, mode="linear"), F.interpolate(x[None], (2, 9, 4), mode="trilinear")),
                 lambda b, t, d: (randn(1, b, 3, 5, 6),), ""),
    "einsum": (lambda x, y: (torch.einsum("btd,bsd->bts", x, y), torch.einsum("...td,...td->...t", x, y), torch.einsum("btd->db", x),
                             torch.einsum("bii->bi", x[:, :, :2] @ y[:, :, :2].transpose(1, 2)), torch.einsum("btd,bsd,bs->bt", x, y, y[..., 0]),
                             torch.einsum("...d,ed", x, y[0]), torch.einsum("btd,td->b", x, y[0]), torch.einsum("ii", x[0] @ y[0].t())), two, ""),
    "norms": (lambda x: (F.group_norm(x, 2), F.instance_norm(x), F.group_norm(x[:, :, 0], 4), F.local_response_norm(x, 3)), image, ""),
    "inner": (lambda x, y: torch.inner(x, y[0]), two, "aten::inner"),
    "topk-sort": (lambda x: (x.topk(3, -1)[0], x.sort(1)[0], x.kthvalue(2, 1)[0], x.median(2)[0]), cube, ""),
    "conv_transpose": (lambda x, w, b: (F.conv_transpose2d(x, w, b, 2, 1, 1), F.conv_transpose1d(x[:, :, 0], w[..., 0], b)), kernel, ""),
    "nearest-factor-in-vain": (lambda x: (F.interpolate(x, scale_factor=1.3), F.interpolate(x, scale_factor=2.4)),
                               lambda b, t, d: (randn(b, 3, 2, 5, 3),), ""),
    "bilinear-factor-in-vain": (lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"), lambda b, t, d: (randn(b, 3, 2, 5, 2),), ""),
    "bicubic": (lambda x: F.interpolate(x, (7, 9), mode="bicubic"), lambda b, t, d: (randn(1, b, 3, 5, 6),), ""),
    # Sizes that depend on data: a region from where the size appears to where it is gone.
    "mask": (lambda x: x[x > 0].tanh().sum() * x, cube, "aten::index.Tensor"),
    "mask-mean": (lambda x, y: (x.exp()[y[..., 0] > 0] * x.shape[-1]).mean() + y.sum(), two, "aten::index.Tensor"),
    "mask-count": (lambda x: (lambda z: z.sum() / z.shape[0] + x.exp())(x.flatten()[x.flatten() > 0.1]), cube, "aten::index.Tensor"),
    "masks": (lambda x, y: (x[x > 0].sum() + F.softplus(y), y.exp()[y > 0].square().sum()), two, "aten::index.Tensor"),
    "mask-after-mask": (lambda x: (lambda z: x.sin()[z > 0].sum() * z)(x * x[x > 0].sum().cos()), cube, "aten::index.Tensor"),
    "nonzero": (lambda x: x.flatten()[(x.flatten() > 0).nonzero()[:, 0]].reshape(-1, 1).square().sum() + x, cube, "aten::nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0).mean() + x.sum(), cube, "aten::masked_select"),
    "cdist": (lambda x, y: torch.cdist(x, y), two, ""),
    "cummax": (lambda x: x.cummax(1)[0], cube, "aten::cummax"),
}


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def compare(f: Callable[..., Any], make: Callable[..., tuple[Tensor, ...]]) -> ORTModule:
    eager = Fn(f)
    ours = ORTModule(Fn(f))
    for size in SIZES:
        xs = make(*size)
        found = []
        for m in (eager, ours):
            m.zero_grad()
            mine = [x.detach().clone().requires_grad_() for x in xs]
            outs = tensors(m(*mine))
            loss = sum(((o * torch.randn(o.shape, generator=torch.Generator().manual_seed(i), dtype=o.dtype)).sum() for i, o in enumerate(outs)),
                       start=torch.zeros((), dtype=torch.float64))
            loss.backward()
            found.append(([o.detach() for o in outs], [*[x.grad for x in mine], m.scale.grad]))
        (want, want_g), (got, got_g) = found
        for what, a, b in (("output", got, want), ("gradient", got_g, want_g)):
            assert len(a) == len(b)
            for i, (p, q) in enumerate(zip(a, b)):
                assert p.shape == q.shape and p.dtype == q.dtype, f"{size}: {what} {i}: {p.shape} {p.dtype}, eager {q.shape} {q.dtype}"
                error = (p - q).abs().max().item()
                assert error <= 1e-10 * q.abs().max().item() + 1e-13, f"{size}: {what} {i}: error {error:.2e}, largest {q.abs().max():.2e}"
    return ours


@pytest.mark.parametrize("name", ROWS)
def test_operators_equal_eager(name: str) -> None:
    f, make, host = ROWS[name]
    report = compare(f, make).report()
    assert not report.eager, str(report)
    names = [h.name for h in report.host]
    assert any(n.startswith(host) for n in names) if host else not names, str(report)
    assert all(h.file == __file__ and h.line for h in report.host), str(report)


class Many(nn.Module):
    """A submodule that only PyTorch can run, with more parameters than one node has gradients."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(randn(i, 5).detach()) for i in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for i, w in enumerate(self.weights):
            x = torch.tanh(x * w) if i or int(x.sum() > 0) else x * w
        return x


class Holder(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.first, self.many, self.last = nn.Linear(5, 5).double(), Many(n), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.many(self.first(x)))


def test_submodule_with_many_parameters_stays_alone() -> None:
    torch.manual_seed(0)
    eager = Holder(100)
    ours = ORTModule(copy.deepcopy(eager), segment_mb=1e-4)
    for seed in range(3):
        x = randn(seed, 7, 5).detach()
        for m in (eager, ours):
            m.zero_grad()
            m(x).square().sum().backward(retain_graph=True)
        for (n, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= 1e-10 * q.grad.abs().max(), n
    report = ours.report()
    assert not report.eager and [h.name for h in report.host] == ["many"], str(report)


@pytest.mark.parametrize("part", ["linear", "conv", "norm", "matmul", "embedding"])
def test_mixed_types_raise_as_in_eager(part: str) -> None:
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    make: dict[str, tuple[nn.Module, Tensor]] = {
        "linear": (nn.Linear(6, 3), x), "conv": (nn.Conv1d(4, 3, 2), x), "norm": (nn.LayerNorm(6), x),
        "matmul": (Multiply(), x), "embedding": (nn.Embedding(9, 2), x)}
    eager, x = make[part]
    ours = ORTModule(copy.deepcopy(eager))
    with pytest.raises(RuntimeError) as want:
        eager(x)
    with pytest.raises(RuntimeError) as got:
        ours(x)
    assert str(got.value) == str(want.value)


class Multiply(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.adaptive_avg_pool2d(F.max_pool2d(self.a(x), 2), 1).flatten(1))


def test_image_sizes_become_symbols_when_they_change() -> None:
    torch.manual_seed(0)
    eager = Image()
    ours = ORTModule(copy.deepcopy(eager), strict="engine")
    captures = []
    for size in ((4, 3, 8, 8), (2, 3, 8, 8), (5, 3, 8, 8), (5, 3, 11, 9), (2, 3, 12, 14)):
        x = randn(sum(size), *size).detach()
        for m in (eager, ours):
            m.zero_grad()
            m(x).square().sum().backward()
        for (n, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= 1e-10 * q.grad.abs().max(), f"{size}: {n}"
        captures.append(ours.report().n_captures)
    assert captures == [1, 2, 2, 3, 3], str(ours.report())
