"""Files made to hurt: each is refused by name or read, within a bound of time and of stack. The small ones are seeds of
the fuzzer too."""

from __future__ import annotations

import ctypes as C
import time

import onnx
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper as H

from engine import Ctx, EngineError, Graph, lib, run

lib.om_onnx_read.argtypes = [C.c_void_p, C.c_char_p, C.c_size_t, C.POINTER(C.c_void_p)]
lib.om_model_from_graph.argtypes = [C.c_void_p, C.c_void_p, C.POINTER(C.c_void_p)]
lib.om_model_variant.argtypes = [C.c_void_p] * 5 + [C.c_int, C.c_void_p]
lib.om_model_free.argtypes = [C.c_void_p] * 2
MIN = "(0 - 9223372036854775807 - 1)"


def info(name: str, shape: list | None, dtype: int = T.FLOAT) -> onnx.ValueInfoProto:
    return H.make_tensor_value_info(name, dtype, shape)


def model(nodes: list, inputs: list, outputs: list, inits: list | tuple = (), meta: dict[str, str] | None = None) -> bytes:
    g = H.make_graph(nodes, "g", inputs, outputs, initializer=list(inits))
    for key, value in (meta or {}).items():
        p = g.metadata_props.add()
        p.key, p.value = key, value
    return H.make_model(g, opset_imports=[H.make_opsetid("", 18)]).SerializeToString()


def relu_of(*dims: str) -> bytes:
    return model([H.make_node("Relu", ["x"], ["y"])], [info("x", list(dims)), info("z", ["s", "t"])], [info("y", None)])


def shared(n: int) -> bytes:
    """Sizes of which each holds the one before several times: as trees they are exponentially large."""
    nodes = [H.make_node("Shape", ["x"], ["shape"]), *(H.make_node("Gather", ["shape", f"i{k}"], [f"d{k}"]) for k in range(3))]
    cur = "d0"
    for k in range(n):
        nodes += [H.make_node("Min", [cur, "d1"], [f"a{k}"]), H.make_node("Max", [cur, "d2"], [f"b{k}"]),
                  H.make_node("Mul", [f"a{k}", f"b{k}"], [f"m{k}"])]  # fmt: skip
        cur = f"m{k}"
    nodes.append(H.make_node("ConstantOfShape", [cur], ["y"]))
    return model(nodes, [info("x", ["s0", "s1", "s2"])], [info("y", None)], [H.make_tensor(f"i{k}", T.INT64, [1], [k]) for k in range(3)])


def doubled(n: int) -> bytes:
    """s * 2 ** n, by adding to itself."""
    nodes = [H.make_node("Shape", ["x"], ["a0"]), *(H.make_node("Add", [f"a{k}", f"a{k}"], [f"a{k + 1}"]) for k in range(n))]
    return model([*nodes, H.make_node("ConstantOfShape", [f"a{n}"], ["y"])], [info("x", ["s"])], [info("y", None)])


SMALL: dict[str, tuple[bytes, str]] = {  # what the message says; "" = it is read
    "INT64_MIN // -1": (relu_of(f"{MIN}//(0 - 1)"), "in the size of a result"),
    "INT64_MIN % -1": (relu_of(f"{MIN}%(0 - 1)"), ""),
    "INT64_MIN % 3": (relu_of(f"Mod({MIN}, 3)"), ""),
    "coefficients": (relu_of(f"(s*{MIN})//(s*(0 - 1))"), "in the size of a result"),
    "remainder of coefficients": (relu_of(f"(s*{MIN})%(s*(0 - 1))"), "in the size of a result"),
    "a number of 70 bits": (relu_of("1000000000000000000000"), ""),  # like any text that is no expression: a name
    "shared sizes": (shared(40), "size expression of more than 1024 terms"),
    "doubled sizes": (doubled(70), "as shape of fill"),
    "a long name": (relu_of("é" * 200), "the name of a size"),
    "deep": (relu_of("(" * 300 + "s" + ")" * 300), "the name of a size"),
    "many in one": (relu_of("*".join(f"({' + '.join(f's{i}{j}' for j in range(9))})" for i in range(9))), "is not a dimension of any"),
}


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
def test_small(name: str) -> None:
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
def test_long_chain(name: str) -> None:
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


@pytest.mark.parametrize("text, said", [
    (f"input x: f32[{MIN}//(0 - 1)]", ""),  # only a run could tell; it says "a dimension would be"
    ("sym s = x[0]\n input x: f32[s]\n y = reshape(x) {shape=[" + "+".join(f"Max(s, {i})" for i in range(2000)) + "]}", "more than 1024 terms"),
    ("input x: f32[99999999999999999999]", "size expression"),
])  # fmt: skip
def test_text(text: str, said: str) -> None:
    if said:
        with pytest.raises(EngineError, match=said):
            Graph.parse("graph {\n" + text + "\n}")
    else:
        Graph.parse("graph {\n" + text + "\n}")
