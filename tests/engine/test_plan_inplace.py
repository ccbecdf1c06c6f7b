"""Every operator that may compute its result where an operand lies does so, beside the interpreter, which never does.

All the ways in which the operands of the result's size can be one and the same value are tried: an operator that reads
one of them out of order must not be given its memory through another.
"""

from __future__ import annotations

import ctypes as C
from itertools import product

import pytest
import torch

import engine

_C = pytest.importorskip("ortmodule._C")


class Op(C.Structure):
    _fields_ = [("name", C.c_char_p), ("id", C.c_uint16), ("doc", C.c_char_p), ("kind", C.c_uint8), ("min_in", C.c_int8), ("max_in", C.c_int8),
                ("n_out", C.c_int8), ("optional", C.c_uint32), ("state", C.c_void_p)]  # fmt: skip


class Row(C.Structure):
    _fields_ = [("dense", C.c_uint32), ("inplace", C.c_uint32), ("scratch", C.c_void_p), ("prepare", C.c_void_p), ("run", C.c_void_p), ("strided", C.c_uint32)]


class Device(C.Structure):
    _fields_ = [("name", C.c_char_p), ("rows", C.POINTER(Row))]


CPU = Device.in_dll(engine.lib, "om_device_cpu")


def ops_in_place() -> dict[str, Op]:
    """Those that change no state (tests/engine/test_plan_update.py has the others) and need no count (trim,
    compress: tests/engine/test_bounded.py)."""
    table, found, i = (C.POINTER(Op) * 4096).in_dll(engine.lib, "om_ops"), {}, 0
    while table[i]:
        op = table[i].contents
        assert op.id == i
        if CPU.rows[i].inplace and not op.state and op.name not in (b"trim", b"compress"):
            found[op.name.decode()] = op
        i += 1
    return found


# A, B, C: operands of the result's size. v: a vector, i: its length of indices, j: indices of the result's size, k: as
# i, one a row; l, e: one a row
ROWS = {
    "gather_grad": ["A, i, B) {axis=0, shape=[N, N]", "A, i, B) {axis=1, shape=[N, N], padding_idx=1"],
    "scatter_elements": ["A, j, B) {axis=0, reduce=1", "A, j, B) {axis=1, reduce=0"],
    "scatter_nd": ["A, k, B) {reduce=1", "A, k, B) {reduce=0"],
    "slice_scatter": ["A, B) {axis=0, start=[0], end=[N], step=1"],
    "softmax": ["A) {axis=0", "A) {axis=1"],
    "log_softmax": ["A) {axis=0", "A) {axis=1"],
    "softmax_grad": ["A, B) {axis=0", "A, B) {axis=1"],
    "log_softmax_grad": ["A, B) {axis=0", "A, B) {axis=1"],
    "layer_norm": ["A, v, v) {axis=1, eps=0.1", "A, B, C) {axis=0, eps=0.1", "A, A, A) {axis=0, eps=0.1"],
    "rms_norm": ["A, v) {axis=1, eps=0.1", "A, B) {axis=0, eps=0.1"],
    "layer_norm_grad": ["A, B, v, l, e) {axis=1, params=1", "A, B, _, l, e) {axis=1, params=0"],
    "rms_norm_grad": ["A, B, v, e) {axis=1, params=1"],
    "batch_norm_grad": ["A, B, v, v, v) {training=1", "A, B, v, v, v) {training=0"],
    "cross_entropy_grad": ["z, A, i, v, l, z) {reduction=1, label_smoothing=0.1", "z, A, i, _, l, z) {reduction=2"],
    "where": ["c, A, B)"],
    "cast": ["A) {to=f64"],
    "dropout": ["A) {p=0.25"],
    "fused": ['A, B, C) {program="mul:f64 0 1;add:f64 3 2;sub:f64 4 0;out 4 5", out_dtype=[2, 2]'],
}  # fmt: skip
OUTPUTS = {"layer_norm": 3, "rms_norm": 2, "layer_norm_grad": 3, "rms_norm_grad": 2, "batch_norm_grad": 3, "fused": 2}
LOGICAL = {"not", "and", "or", "xor"}


def graph(name: str, row: str, n: int, ways: tuple[int, ...]) -> str:
    """The operands A, B, C are made values ways[0], ways[1], ways[2], which nobody reads afterwards."""
    text = row.replace("N", str(n))
    for letter, way in zip("ABC", ways, strict=False):
        text = text.replace(letter, f"m{way}")
    outs = ["y"] + [f"y{i}" for i in range(1, OUTPUTS.get(name, 1))]
    make = "lt(x{0}, v)" if name in LOGICAL else "cumsum(x{0}) {{axis=1}}"
    made = "".join(f"  m{w} = {make.format(w)}\n" for w in sorted(set(ways)))
    sizes = "".join(f"  input x{w}: f64[{n}, {n}]\n" for w in range(3))
    kinds = {"v": f"f64[{n}]", "l": f"f64[{n}]", "e": f"f64[{n}]", "z": "f64[]", "i": f"i64[{n}]", "j": f"i64[{n}, {n}]", "k": f"i64[{n}, 1]"}
    rest = "".join(f"  input {k}: {v}\n" for k, v in kinds.items())
    close = "}" if "{" in text else ""
    stream = " rng=1" if name == "dropout" else ""
    before = "  c = lt(x0, x1)\n" if name == "where" else ""
    tail = "".join(f"  output {o}\n" for o in outs)
    return f"graph {{\n{sizes}{rest}{made}{before}  {', '.join(outs)} = {name}({text}{close}{stream}\n{tail}}}"


def planned(text: str, ins: list[torch.Tensor]) -> list[torch.Tensor]:
    model = _C.Model.from_text(text)
    mine = [t.clone() for t in ins]
    run = model.forward(model.variant(bytes(len(ins)), bytes(text.count("output ")), None), mine, 3)
    assert run.resume() is None
    return run.outputs()


@pytest.mark.parametrize("name", sorted(ops_in_place()))
def test_results_in_place_have_the_interpreters_bits(name: str) -> None:
    plain = ", ".join("ABC"[: ops_in_place()[name].min_in]) + ")"
    for n, row in product((1, 3, 17), ROWS.get(name, [plain])):
        g = torch.Generator().manual_seed(n)
        ins = [torch.randn(n, n, generator=g, dtype=torch.float64) for _ in range(3)]
        ins += [torch.rand(n, generator=g, dtype=torch.float64) + 0.5 for _ in range(3)] + [torch.tensor(1.5, dtype=torch.float64)]
        ins += [torch.randint(0, n, s, generator=g) for s in ((n,), (n, n))] + [torch.randperm(n, generator=g)[:, None].contiguous()]
        letters = sum(c in row for c in "ABC")
        for ways in {0: [()], 1: [(0,)], 2: [(0, 1), (0, 0)], 3: [(0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0)]}[letters]:
            text = graph(name, row, n, ways)
            want, _ = engine.run(text, ins, seed=3)
            for i, (a, b) in enumerate(zip(planned(text, ins), want, strict=True)):
                assert torch.allclose(a.double(), b.double(), rtol=1e-13, atol=1e-13, equal_nan=True), f"output {i}\n{text}"
