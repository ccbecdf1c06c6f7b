"""Files made to hurt: each is refused by name or read, within a bound of time and of stack. The small ones are seeds of
the fuzzer too."""

from __future__ import annotations

import ctypes as C
import time

import pytest
import torch
from hostile import MIN, SMALL, info, model
from onnx import helper as H

from engine import Ctx, EngineError, Graph, lib, run
from ortmodule import _C

lib.om_onnx_read.argtypes = [C.c_void_p, C.c_char_p, C.c_size_t, C.POINTER(C.c_void_p)]
lib.om_model_from_graph.argtypes = [C.c_void_p, C.c_void_p, C.POINTER(C.c_void_p)]
lib.om_model_variant.argtypes = [C.c_void_p] * 5 + [C.c_int, C.c_void_p]
lib.om_model_free.argtypes = [C.c_void_p] * 2


def read(data: bytes) -> str:
    """What the reader says of a file, "" when it takes it."""
    cx, g = Ctx(), C.c_void_p()
    try:
        cx.check(lib.om_onnx_read(cx.p, data, len(data), C.byref(g)))
        lib.om_graph_free(g)
        return ""
    except EngineError as e:
        return str(e)


@pytest.mark.parametrize("name", SMALL)
def test_small_files_are_refused_by_name_or_read(name: str) -> None:
    data, said = SMALL[name]
    t = time.process_time()
    message = read(data)
    assert time.process_time() - t < 1
    assert len(data) < 8192
    assert said in message if said else not message, message


def symbols(n: int) -> bytes:
    return model([H.make_node("Relu", ["x0"], ["y"])], [info(f"x{i}", [f"s{i}"]) for i in range(n)], [info("y", ["s0"])],
                 meta={f"role:x{i}": "param" for i in range(n)})  # fmt: skip


def written(n: int) -> bytes:
    return model([H.make_node("Relu", [f"x{i}"], [f"y{i}"]) for i in range(n)], [info(f"x{i}", [2]) for i in range(n)],
                 [info(f"y{i}", [2]) for i in range(n)], meta={f"write:y{i}": f"x{i}" for i in range(n)})  # fmt: skip


@pytest.mark.parametrize("make", [symbols, written])
def test_reading_takes_as_long_as_the_file(make) -> None:
    data = make(8000)
    t = time.process_time()
    assert read(data) == ""
    assert time.process_time() - t < 3  # 0.3 s; comparing each with each took 10 and more


CHAINS = {
    "sums": ("add({p}, w)", 8000),  # looked for terms from every sum down: 9 s
    "products": ("mul({p}, w)", 8000),  # computed again by recursion: the stack overflowed
    "activations": ("relu({p})", 8000),
    "choices": ("where(c, {p}, w)", 6000),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_takes_no_stack(name: str) -> None:
    what, n = CHAINS[name]
    lines, p = ["graph {", "input c: bool[2]", "input x: f32[2]", "param w: f32[2]"], "x"
    for i in range(n):
        lines.append(f"t{i} = {what.format(p=p)}")
        p = f"t{i}"
    cx, g, m, v = Ctx(), C.c_void_p(), C.c_void_p(), C.c_int()
    t = time.process_time()
    cx.check(lib.om_graph_parse(cx.p, "\n".join([*lines, f"output {p}", "}"]).encode(), C.byref(g)))
    cx.check(lib.om_model_from_graph(cx.p, g, C.byref(m)))
    try:
        cx.check(lib.om_model_variant(cx.p, m, b"\0\1\1", b"\1", None, 0, C.byref(v)))
    finally:
        lib.om_model_free(cx.p, m)
    assert time.process_time() - t < 5  # 1 s


@pytest.mark.parametrize("shape, said", [("1099511627776, 1024", "larger than the address space"), ("1, 4611686018427387904*s", "no 64-bit number")])
def test_too_large_for_a_run(shape: str, said: str) -> None:
    text = f"graph {{\n sym s = x[0]\n input x: f32[s]\n y = fill() {{shape=[{shape}], dtype=f32, value=1}}\n output y\n}}"
    with pytest.raises(EngineError, match=said):
        run(text, [torch.ones(3)])


@pytest.mark.parametrize("stride", [[2**30, 2**30, 4], [2**31 - 2] * 3, [40000, 40000, 1]], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_strides_beyond_the_image(stride: list[int], size: int) -> None:
    """One window: what is laid out for them does not grow with the stride, whose product is no 64-bit number."""
    x, w = torch.randn(1, 1, 4, 4, 4), torch.randn(1, 1, size, size, 1)
    s = f"[{', '.join(map(str, stride))}]"
    text = f"graph {{\n input x: f32[1, 1, 4, 4, 4]\n input w: f32[1, 1, {size}, {size}, 1]\n y = conv(x, w) {{stride={s}}}\n output y\n}}"
    (y,), _ = run(text, [x, w])
    torch.testing.assert_close(y, torch.nn.functional.conv3d(x, w, stride=[min(k, 9) for k in stride]))


def test_scratch_beyond_all_addresses_is_refused() -> None:
    text = ("graph {\n input x: f32[1, 1, 1, 1, 1]\n input w: f32[1, 1, 2, 2, 2]\n"
            f" y = conv(x, w) {{pad=[{2**30}], dilation=[{2**31 - 1}]}}\n output y\n}}")  # fmt: skip
    with pytest.raises(EngineError, match="conv at these sizes needs more memory than the address space has"):
        run(text, [torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1, 2, 2, 2)], device="cpu")


def test_names_cut_in_a_message_are_text() -> None:
    """The binding decodes messages strictly: a half character would be another error."""
    for name in ("a" * 79 + "é", "a" * 78 + "日本", "b" * 77 + "😀😀", "é" * 700):
        data = model([H.make_node("Nonexistent", ["x"], ["y"], name=name)], [info("x", [1])], [info("y", [1])])
        with pytest.raises(RuntimeError, match="Nonexistent"):
            _C.Model(data)


@pytest.mark.parametrize("text, said", [
    (f"input x: f32[{MIN}//(0 - 1)]", ""),  # only a run could tell; it says "a dimension would be"
    ("sym s = x[0]\n input x: f32[s]\n y = reshape(x) {shape=[" + "+".join(f"Max(s, {i})" for i in range(2000)) + "]}", "more than 1024 terms"),
    ("input x: f32[99999999999999999999]", "size expression"),
])  # fmt: skip
def test_sizes_in_text_are_refused_by_name_or_read(text: str, said: str) -> None:
    if said:
        with pytest.raises(EngineError, match=said):
            Graph.parse("graph {\n" + text + "\n}")
    else:
        Graph.parse("graph {\n" + text + "\n}")
