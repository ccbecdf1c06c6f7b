"""Convolution and its gradients against eager PyTorch: 1 to 3 axes, groups, strides, padding, dilation, every path of
the kernel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CASES = [
    # n, c, spatial, o, kernel, stride, pad, dilation, groups
    (2, 3, (7, 11), 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 3, (13, 11), 5, (3, 2), (2, 3), (1, 0), (1, 2), 1),
    (3, 4, (7, 5), 6, (3, 3), (1, 1), (2, 2), (2, 2), 2),
    (1, 3, (17, 19), 7, (5, 3), (2, 1), (2, 1), (1, 1), 1),
    (2, 6, (9, 7), 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),  # depthwise
    (2, 3, (9, 7), 6, (3, 3), (2, 2), (1, 1), (1, 1), 3),  # depthwise, two filters each
    (3, 5, (7, 11), 11, (1, 1), (1, 1), (0, 0), (1, 1), 1),  # 1 x 1
    (3, 6, (7, 11), 4, (1, 1), (1, 1), (0, 0), (1, 1), 2),
    (3, 5, (9, 11), 11, (1, 1), (1, 1), (0, 0), (1, 1), 1),  # images large enough for products of their own
    (3, 6, (101,), 4, (1,), (1,), (0,), (1,), 2),
    (1, 6, (3, 2), 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (3, 5, (7, 11), 11, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (2, 3, (8, 12), 7, (4, 4), (4, 4), (0, 0), (1, 1), 1),  # patches
    (5, 3, (17, 16), 7, (3, 3), (1, 1), (1, 1), (1, 1), 1),  # many pixels: one product per image
    (1, 2, (5, 5), 3, (5, 5), (1, 1), (0, 0), (1, 1), 1),
    (2, 3, (29,), 5, (3,), (2,), (1,), (1,), 1),
    (2, 4, (301,), 6, (5,), (1,), (2,), (3,), 2),
    (2, 3, (5, 7, 4), 5, (3, 2, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1),
    (2, 4, (5, 7, 4), 4, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 4),
    (0, 3, (7, 7), 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (7, 97, (3, 3), 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 3, (3, 3), 5, (3, 3), (1, 1), (4, 4), (1, 1), 1),  # windows that see padding only
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_conv(case: tuple, bias: bool) -> None:
    n, c, sp, o, k, s, p, d, groups = case
    x, w = rand(n, c, *sp), rand(o, c // groups, *k)
    b = rand(o) if bias else None
    check(
        "conv",
        [x, w, b],
        lambda x, w, b: CONV[len(sp)](x, w, b, s, p, d, groups),
        f"stride={list(s)}, pad={list(p)}, dilation={list(d)}, groups={groups}",
        low=(torch.float32, torch.bfloat16),
        terms=max(n * math.prod(sp), c // groups * math.prod(k)),
    )


def test_several_chunks() -> None:
    """More patches than are built at a time, both ways of laying them out; weights' gradient sums over chunks."""
    for n, c, hw, o in ((11, 31, 40, 5), (89, 101, 12, 5)):
        check(
            "conv",
            [rand(n, c, hw, hw), rand(o, c, 3, 3), rand(o)],
            lambda x, w, b: F.conv2d(x, w, b, padding=1),
            "stride=[1, 1], pad=[1, 1], dilation=[1, 1], groups=1",
            strides=False,
            terms=n * hw * hw,
        )


def test_uneven_padding() -> None:
    check("conv", [rand(2, 3, 7, 8), rand(5, 3, 2, 4)], lambda x, w: F.conv2d(F.pad(x, (1, 2, 0, 1)), w), "stride=[1, 1], pad=[0, 1, 1, 2]")
    check("conv", [rand(2, 3, 7, 8), rand(5, 3, 2, 4)], lambda x, w: F.conv2d(x, w, padding="same"), "pad=[0, 1, 1, 2]")


@pytest.mark.parametrize("grad", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)])
def test_only_what_is_wanted(grad: tuple[bool, ...]) -> None:
    check("conv", [rand(3, 4, 7, 5), rand(6, 4, 3, 3), rand(6)], lambda x, w, b: F.conv2d(x, w, b, padding=1), "pad=[1, 1]", grad=grad)


def test_same_bits_for_any_number_of_threads() -> None:
    x, w, dy = rand(5, 3, 16, 16).float(), rand(7, 3, 3, 3).float(), rand(5, 7, 16, 16).float()
    text = "graph {\n input x: f32[5, 3, 16, 16]\n input w: f32[7, 3, 3, 3]\n y = conv(x, w) {pad=[1, 1]}\n output y\n}"
    one = engine.Graph.parse(text, engine.Ctx(threads=False)).grad([1, 1], [1]).run([x, w, dy], 3)
    two = engine.Graph.parse(text, engine.Ctx(threads=True)).grad([1, 1], [1]).run([x, w, dy], 3)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize(
    "node,words",
    [
        ("conv(x, w) {groups=2}", ["conv", "4 channels", "3 in each of 2 groups"]),
        ("conv(x, v) {stride=[0, 1]}", ["stride 0"]),
        ("conv(x, v) {stride=[1, 1, 1]}", ["stride", "2 integers", "3 given"]),
        ("conv(x, u)", ["larger than the padded input"]),
        ("conv(x, v, z)", ["bias"]),
        ("conv(z, v)", ["rank 1"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = (
        f"graph {{\n input x: f64[2, 4, 7, 5]\n input w: f64[6, 3, 3, 3]\n input v: f64[6, 4, 3, 3]\n input u: f64[6, "
        "4, 9, 3]\n input z: f64[5]\n"
        f" y = {node}\n output y\n}}"
    )
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(2, 4, 7, 5), rand(6, 3, 3, 3), rand(6, 4, 3, 3), rand(6, 4, 9, 3), rand(5)])
    assert all(w in str(e.value) for w in words), str(e.value)
