"""Transposed convolution, windows as columns and back, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import engine
from opcheck import check, rand

LOW = (torch.float32, torch.bfloat16, torch.float16)
CONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
CASES = [
    # n, c, spatial, o, kernel, stride, pad, out_pad, dilation, groups
    (2, 3, (7, 11), 5, (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 6, (5, 4), 4, (4, 3), (2, 3), (1, 0), (1, 2), (1, 1), 2),
    (3, 4, (7, 5), 6, (3, 3), (2, 1), (2, 2), (1, 0), (2, 2), 2),
    (1, 3, (3, 5), 7, (2, 2), (2, 2), (0, 0), (0, 0), (1, 1), 1),  # upsampling of U-nets
    (2, 6, (5, 7), 6, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 6),  # depthwise
    (3, 5, (7, 11), 11, (1, 1), (1, 1), (0, 0), (0, 0), (1, 1), 1),  # 1 x 1
    (2, 5, (17, 16), 7, (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1),  # many pixels
    (2, 3, (5, 4), 5, (3, 3), (1, 2), (1, 0), (2, 3), (3, 4), 1),  # out_pad of the stride's size and more
    (2, 3, (13,), 5, (4,), (3,), (1,), (2,), (1,), 1),
    (2, 4, (3, 5, 4), 6, (3, 2, 2), (1, 2, 1), (1, 0, 1), (0, 1, 0), (1, 1, 2), 2),
    (0, 3, (4, 4), 5, (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 5, (1, 1), 3, (4, 4), (1, 1), (0, 0), (0, 0), (1, 1), 1),  # the first layer of a generator
]


@pytest.mark.parametrize("case", CASES)
def test_conv_transpose(case: tuple) -> None:
    n, c, sp, o, k, s, p, q, d, groups = case
    check(
        "conv_transpose",
        [rand(n, c, *sp), rand(c, o // groups, *k)],
        lambda x, w: CONV[len(sp)](x, w, None, s, p, q, groups, d),
        f"stride={list(s)}, pad={list(p)}, dilation={list(d)}, groups={groups}, out_pad={list(q)}",
        low=LOW,
        terms=max(n * 300, c // groups * 30),
    )


def test_uneven_pads() -> None:
    def ref(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, stride=2)[:, :, 1:-2, :-1]

    check("conv_transpose", [rand(2, 3, 4, 5), rand(3, 4, 3, 3)], ref, "stride=[2, 2], pad=[1, 0, 2, 1]")


@pytest.mark.parametrize("grad", [(True, False), (False, True)])
def test_only_what_is_wanted(grad: tuple[bool, ...]) -> None:
    check("conv_transpose", [rand(3, 4, 7, 5), rand(4, 6, 3, 3)], lambda x, w: F.conv_transpose2d(x, w, padding=1), "pad=[1, 1]", grad=grad)


@pytest.mark.parametrize("op", ["conv_transpose", "im2col", "col2im"])
def test_same_bits_for_any_number_of_threads(op: str) -> None:
    x, w = rand(5, 12, 64).float() if op == "col2im" else rand(5, 3, 16, 16).float(), rand(3, 7, 3, 3).float()
    size = list(x.shape)
    node = {"conv_transpose": "conv_transpose(x, w) {pad=[1, 1]}", "im2col": "im2col(x) {kernel=[3, 3], pad=[1, 1]}",
            "col2im": "col2im(x) {size=[16, 16], kernel=[2, 2], stride=[2, 2]}"}[op]
    text = f"graph {{\n input x: f32{size}\n input w: f32[3, 7, 3, 3]\n y = {node}\n output y\n}}"
    shape = engine.run(text, [x, w])[0][0].shape
    dy = rand(*shape).float()
    wants = [1, int(op == "conv_transpose")]
    one = engine.Graph.parse(text, engine.Ctx(threads=False)).grad(wants, [1]).run([x, w, dy], 1 + sum(wants))
    two = engine.Graph.parse(text, engine.Ctx(threads=True)).grad(wants, [1]).run([x, w, dy], 1 + sum(wants))
    assert all(torch.equal(a, b) for a, b in zip(one, two))


WINDOWS = [
    # n, c, spatial, kernel, stride, pad, dilation
    (2, 3, (7, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 3, (9, 7), (2, 3), (2, 3), (0, 1), (2, 1)),
    (1, 1, (5, 5), (5, 5), (1, 1), (0, 0), (1, 1)),
    (3, 5, (8, 4), (4, 4), (4, 4), (0, 0), (1, 1)),
    (0, 2, (4, 4), (3, 3), (1, 1), (0, 0), (1, 1)),
]


@pytest.mark.parametrize("case", WINDOWS)
def test_im2col(case: tuple) -> None:
    n, c, sp, k, s, p, d = case
    attrs = f"kernel={list(k)}, stride={list(s)}, pad={list(p)}, dilation={list(d)}"
    check("im2col", [rand(n, c, *sp)], lambda x: F.unfold(x, k, d, p, s) if n else x.new_zeros(0, 18, 4) * x.sum(), attrs, low=LOW)


@pytest.mark.parametrize("case", WINDOWS[:-1])
def test_col2im(case: tuple) -> None:
    n, c, sp, k, s, p, d = case
    cols = F.unfold(torch.zeros(n, c, *sp), k, d, p, s).shape
    attrs = f"kernel={list(k)}, stride={list(s)}, pad={list(p)}, dilation={list(d)}, size={list(sp)}"
    check("col2im", [rand(*cols)], lambda x: F.fold(x, sp, k, d, p, s), attrs, low=LOW)


def test_one_and_three_axes() -> None:
    check("im2col", [rand(2, 3, 9)], lambda x: F.unfold(x[:, :, None], (1, 3), stride=(1, 2), padding=(0, 1)), "kernel=[3], stride=[2], pad=[1, 1]")

    def ref(x: torch.Tensor) -> torch.Tensor:
        y = x.unfold(2, 2, 1).unfold(3, 3, 2).unfold(4, 2, 2)  # (n, c, d, h, w, kd, kh, kw)
        return y.permute(0, 1, 5, 6, 7, 2, 3, 4).reshape(2, 3 * 12, -1)

    check("im2col", [rand(2, 3, 4, 5, 6)], ref, "kernel=[2, 3, 2], stride=[1, 2, 2]")


@pytest.mark.parametrize(
    "node,words",
    [
        ("conv_transpose(x, w) {groups=3}", ["conv_transpose", "4 channels", "3 groups"]),
        ("conv_transpose(x, v)", ["x has 4 channels, w takes 6"]),
        ("conv_transpose(x, w) {out_pad=[0, 1]}", ["out_pad 1", "less than the stride"]),
        ("conv_transpose(x, w) {pad=[5, 0]}", ["size -1"]),
        ("im2col(x) {kernel=[3]}", ["kernel must list"]),
        ("im2col(x) {kernel=[9, 1]}", ["larger than the padded input"]),
        ("col2im(c) {size=[4, 4], kernel=[2, 2]}", ["col2im: 10 columns, 9 windows"]),
        ("col2im(c) {size=[4, 4], kernel=[5, 1]}", ["larger"]),
        ("col2im(c) {size=[5, 6], kernel=[1, 3], stride=[1, 2]}", ["8 rows are no multiple of the 3"]),
    ],
)
def test_refused(node: str, words: list[str]) -> None:
    text = (f"graph {{\n input x: f64[2, 4, 7, 5]\n input w: f64[4, 3, 3, 3]\n input v: f64[6, 4, 3, 3]\n input c: f64[2, 8, 10]\n"
            f" y = {node}\n output y\n}}")
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(2, 4, 7, 5), rand(4, 3, 3, 3), rand(6, 4, 3, 3), rand(2, 8, 10)])
    assert all(w in str(e.value) for w in words), str(e.value)
