"""Softmax and log-softmax along any axis against eager PyTorch."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)

rand = functools.partial(rand, per_axis=7, scale=3.0)


@pytest.mark.parametrize("shape,axis", [((7, 13, 5), 2), ((7, 13, 5), 1), ((7, 13, 5), 0), ((3, 1031), 1), ((1031, 3), 0),
                                        ((5, 1), 1), ((1, 7), 0), ((0, 5), 1), ((257,), 0), ((2, 3, 5, 67), 3), ((3, 11, 131), 1)])
def test_softmax(shape: tuple[int, ...], axis: int) -> None:
    check("softmax", [rand(*shape)], lambda x: torch.softmax(x, axis), f"axis={axis}", low=LOW)
    check("log_softmax", [rand(*shape)], lambda x: torch.log_softmax(x, axis), f"axis={axis}", low=LOW)


def node(op: str, x: torch.Tensor) -> torch.Tensor:
    name = engine.NAMES[engine.TORCH.index(x.dtype)]
    return engine.run(f"graph {{\n  input x: {name}[{', '.join(map(str, x.shape))}]\n  y = {op}(x) {{axis={x.dim() - 1}}}\n  output y\n}}", [x])[0][0]


def test_masked_scores_vanish() -> None:
    x = rand(5, 37).float()
    x[:, 11:] = -math.inf
    x[4] = -math.inf
    got = node("softmax", x)
    assert torch.equal(got[:4, 11:], torch.zeros(4, 26))
    assert got[4].isnan().all()
    assert torch.allclose(got[:4], torch.softmax(x, 1)[:4], rtol=1e-6)
    assert torch.equal(node("log_softmax", x)[:4, 11:], torch.full((4, 26), -math.inf))


def test_large_scores() -> None:
    x = rand(3, 101, scale=1e4).float()
    assert torch.allclose(node("softmax", x), torch.softmax(x, 1), rtol=1e-6, atol=1e-37)
    assert torch.allclose(node("log_softmax", x), torch.log_softmax(x, 1), rtol=1e-6)
    x[1, 3], x[2, 4] = math.inf, math.nan
    assert node("softmax", x)[1:].isnan().all()


def test_same_bits_on_any_number_of_threads() -> None:
    x = rand(211, 509).float()
    text = "graph {\n  input x: f32[211, 509]\n  y = softmax(x) {axis=1}\n  output y\n}"
    assert torch.equal(engine.run(engine.Graph.parse(text, engine.Ctx(threads=False)), [x])[0][0], engine.run(text, [x])[0][0])
