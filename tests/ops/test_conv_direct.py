"""Convolutions that are no product of patches: few channels per group, laid flat (cpu/conv_direct.c), and one tap with
bf16 left as it is (cpu/conv.c), against eager PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from opcheck import check, rand

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DIRECT = [
    # n, groups, channels and filters of each, spatial, kernel, stride, pad, dilation
    (2, 5, 1, 1, (9, 11), (7, 7), (1, 1), (3, 3), (1, 1)),
    (2, 3, 1, 1, (40, 37), (7, 7), (1, 1), (3, 3), (1, 1)),  # more than eight vectors, and a rest
    (1, 3, 1, 1, (70, 66), (3, 3), (1, 1), (1, 1), (1, 1)),  # more terms than a lane adds in fp32
    (2, 3, 1, 2, (13, 11), (3, 3), (2, 2), (1, 1), (1, 1)),  # two filters a channel, four phases
    (2, 3, 2, 1, (13, 11), (3, 2), (2, 3), (1, 0), (1, 2)),  # two channels a filter, unequal axes
    (2, 2, 2, 2, (12, 14), (3, 3), (3, 2), (2, 1), (2, 3)),  # phases that no tap belongs to
    (2, 4, 1, 1, (11, 10), (2, 2), (3, 3), (0, 0), (1, 1)),  # pixels that no window reads
    (3, 4, 1, 1, (5, 5), (5, 5), (1, 1), (0, 0), (1, 1)),  # one output
    (2, 3, 1, 1, (3, 3), (3, 3), (1, 1), (4, 4), (1, 1)),  # windows of nothing but padding
    (0, 3, 1, 1, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 3, 1, 2, (301,), (5,), (2,), (2,), (3,)),
    (2, 2, 1, 1, (5, 7, 6), (3, 2, 3), (2, 1, 2), (1, 1, 0), (1, 2, 1)),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", DIRECT)
def test_few_channels_per_group(case: tuple, bias: bool) -> None:
    n, groups, c, o, size, k, s, p, d = case
    x, w, b = rand(n, groups * c, *size), rand(groups * o, c, *k), rand(groups * o) if bias else None
    check("conv", [x, w, b], lambda x, w, b: CONV[len(size)](x, w, b, s, p, d, groups),
          f"stride={list(s)}, pad={list(p)}, dilation={list(d)}, groups={groups}", low=(torch.float32, torch.bfloat16, torch.float16),
          terms=max(n * math.prod(size), c * math.prod(k)))  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", [(1, 5, 7, (6, 9)), (3, 5, 7, (6, 9)), (4, 67, 33, (11, 13)), (2, 40, 70, (65,)), (2, 3, 4, (2, 3, 4)), (5, 129, 2, (1, 1))])
def test_one_tap(case: tuple, bias: bool) -> None:
    n, c, o, size = case
    x, w, b = rand(n, c, *size), rand(o, c, *[1] * len(size)), rand(o) if bias else None
    check("conv", [x, w, b], lambda x, w, b: CONV[len(size)](x, w, b), "", low=(torch.float32, torch.bfloat16), terms=max(n * math.prod(size), c))


@pytest.mark.parametrize("grad", ["101", "011", "100", "010", "001"])
@pytest.mark.parametrize("case", [(3, 5, 5, 1, 1), (3, 6, 6, 6, 3)])
def test_wanted_gradients_alone(case: tuple, grad: str) -> None:
    n, c, o, groups, k = case
    check("conv", [rand(n, c, 8, 7), rand(o, c // groups, k, k), rand(o)], lambda x, w, b: F.conv2d(x, w, b, padding=k // 2, groups=groups),
          f"pad=[{k // 2}, {k // 2}], groups={groups}", grad=[g == "1" for g in grad], low=(torch.float32, torch.bfloat16))
