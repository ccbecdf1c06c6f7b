"""Small files made to hurt: seeds of the fuzzer (fuzz/seeds.py), rows of engine/test_hostile.py."""

from __future__ import annotations

import onnx
from onnx import TensorProto as T
from onnx import helper as H

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


def window(op: str, shapes: list[list[int]], **attributes: object) -> bytes:
    """A convolution, or windows as columns."""
    names = ["x", "w"][: len(shapes)]
    node = H.make_node(op, names, ["y"], domain="" if op == "Conv" else "ortmodule", **attributes)
    return model([node], [info(n, s) for n, s in zip(names, shapes, strict=True)], [info("y", None)])


def from_columns(rows: int, columns: int, size: list[int], block: list[int], **attributes: object) -> bytes:
    inits = [H.make_tensor(n, T.INT64, [len(v)], v) for n, v in (("size", size), ("block", block))]
    return model([H.make_node("Col2Im", ["x", "size", "block"], ["y"], **attributes)], [info("x", [1, rows, columns])], [info("y", None)], inits)


MOST = 2**63 - 1
SMALL: dict[str, tuple[bytes, str]] = {  # what the message says; "" = it is read
    "INT64_MIN // -1": (relu_of(f"{MIN}//(0 - 1)"), "in the size of a result"),
    "INT64_MIN % -1": (relu_of(f"{MIN}%(0 - 1)"), ""),
    "INT64_MIN % 3": (relu_of(f"Mod({MIN}, 3)"), ""),
    "coefficients": (relu_of(f"(s*{MIN})//(s*(0 - 1))"), "in the size of a result"),
    "remainder of coefficients": (relu_of(f"(s*{MIN})%(s*(0 - 1))"), "in the size of a result"),
    "a number of 70 bits": (relu_of("1000000000000000000000"), ""),  # like any text that is no expression: a name
    "shared sizes": (shared(40), "size expression of more than 1024 terms"),
    "doubled sizes": (doubled(70), "as shape of fill"),
    "pads of 2^63 - 1": (from_columns(4, 9, [4, 4], [2, 2], pads=[MOST] * 4), "each less than 2^31"),
    "a dilation of 2^63 - 1": (window("Im2Col", [[1, 1, 4, 4]], kernel_shape=[2, 2], dilations=[MOST, 1]), "each less than 2^31"),
    "a window of 2^64": (from_columns(0, 1, [2**30, 2**30, 2**4], [2**30, 2**30, 2**4]), "a window has and spans 1 to 2^31 - 1 elements"),
    "a dilated window of 2^61": (from_columns(1, 1, [4], [2**30], dilations=[2**31 - 1]), "a window has and spans 1 to 2^31 - 1 elements"),
    "a long name": (relu_of("é" * 200), "the name of a size"),
    "deep": (relu_of("(" * 300 + "s" + ")" * 300), "the name of a size"),
    "many in one": (relu_of("*".join(f"({' + '.join(f's{i}{j}' for j in range(9))})" for i in range(9))), "is not a dimension of any"),
}
