"""Dropout: the mask is a function of (seed, stream, logical index) alone, the gradient uses the same one, the rate is
right."""

from __future__ import annotations

import pytest
import torch

import engine

LOW = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def run(x: torch.Tensor, p: float, seed: int = 1, rng: int = 3, dy: torch.Tensor | None = None, cx: engine.Ctx | None = None):
    name = engine.NAMES[engine.TORCH.index(x.dtype)]
    text = f"graph {{\n  input x: {name}[{', '.join(map(str, x.shape))}]\n  y = dropout(x) {{p={p}}} rng={rng}\n  output y\n}}"
    return engine.run(engine.Graph.parse(text, cx), [x], None, None if dy is None else [dy], seed=seed)


def philox(seed: int, stream: int, index: int) -> int:
    """Philox4x32-7 written from its definition (Salmon et al., 2011), word of one element as csrc/cpu/philox.h maps
    it."""
    m = 0xFFFFFFFF
    counter = index // 64 * 8 + index % 8
    c, k = [counter & m, counter >> 32, stream & m, stream >> 32], [seed & m, seed >> 32]
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & m, (p0 >> 32) ^ c[3] ^ k[1], p0 & m]
        k = [(k[0] + 0x9E3779B9) & m, (k[1] + 0xBB67AE85) & m]
    word = c[index // 8 % 4]
    return (word << 16 | word >> 16) & m if index // 32 % 2 else word


def test_philox_known_answers() -> None:
    """The generator's published test vectors fix the reference above."""
    assert philox(0, 0, 0) == 0x5F6FB709 and philox(0, 0, 8) == 0x0D893F64
    assert philox(0, 0, 32) == 0xB7095F6F and philox(0, 0, 40) == 0x3F640D89


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [(1,), (7, 13), (3, 257), (5, 3, 7), (1031,), (2, 2053)])
def test_mask_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    seed, rng, p = 0x1234567890ABCDEF, 5, 0.3
    x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype) + 1
    keep = torch.tensor([philox(seed, rng, i) < int((1 - p) * 2**32) for i in range(x.numel())]).reshape(shape)
    want = torch.where(keep, x.double() / (1 - p), torch.zeros(()))
    got = run(x, p, seed, rng)[0][0]
    assert torch.equal(got != 0, keep)
    assert torch.allclose(got.double(), want, rtol=torch.finfo(dtype).eps * 2)


def test_strides_and_threads_do_not_matter() -> None:
    x = torch.rand(211, 307, generator=torch.Generator().manual_seed(1)) + 1
    want = run(x, 0.4)[0][0]
    assert torch.equal(run(x.t().contiguous().t(), 0.4)[0][0], want)
    assert torch.equal(run(x, 0.4, cx=engine.Ctx(threads=False))[0][0], want)
    assert not torch.equal(run(x, 0.4, seed=2)[0][0], want)
    assert not torch.equal(run(x, 0.4, rng=4)[0][0], want)


@pytest.mark.parametrize("dtype", LOW)
def test_gradient_uses_the_same_mask(dtype: torch.dtype) -> None:
    x = (torch.rand(31, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1).to(dtype)
    dy = (torch.rand(31, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1).to(dtype)
    (y,), (dx,) = run(x, 0.25, dy=dy)
    assert torch.equal(y != 0, dx != 0)
    assert torch.allclose(dx.double(), torch.where(y != 0, dy.double() / 0.75, torch.zeros(())), rtol=torch.finfo(dtype).eps * 2)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    kept = (run(torch.ones(1000, 1009), p)[0][0] != 0).double()
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 5 * sigma
    assert (kept.mean(0) - (1 - p)).abs().max() < 6 * (p * (1 - p) / 1000) ** 0.5


@pytest.mark.parametrize("apart", [1, 8, 16, 24, 32, 40, 64, 128])
def test_elements_that_share_a_counter_are_independent(apart: int) -> None:
    p = 0.3
    kept = run(torch.ones(2 * apart * ((1 << 21) // apart), dtype=torch.float32), p)[0][0] != 0
    both = (kept.reshape(-1, 2 * apart)[:, :apart] & kept.reshape(-1, 2 * apart)[:, apart:]).double()
    expected = (1 - p) ** 2
    assert abs(both.mean().item() - expected) < 5 * (expected * (1 - expected) / both.numel()) ** 0.5


def test_extremes() -> None:
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf")])
    assert torch.equal(run(x, 0.0)[0][0].nan_to_num(), x.nan_to_num())
    assert torch.equal(run(x, 1.0)[0][0], torch.zeros(4))
    with pytest.raises(engine.EngineError, match="probability"):
        run(x, 1.5)
