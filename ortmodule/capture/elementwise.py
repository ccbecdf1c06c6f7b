"""ATen operators that are one ONNX operator with the same operands. Written by tests/new_op.py from
csrc/graph/pointwise.def; tests/test_tree.py says when it is stale."""

from __future__ import annotations

PLAIN: dict[str, str] = {
    "neg": "Neg",
    "abs": "Abs",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "erf": "Erf",
    "sin": "Sin",
    "cos": "Cos",
    "relu": "Relu",
    "sign": "Sign",
    "asinh": "Asinh",
}
