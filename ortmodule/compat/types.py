"""PyTorch's dtypes, their old scalar names, and ONNX's element types."""

from __future__ import annotations

from typing import Any

import torch

# scalar name of PyTorch, dtype, name of ONNX's element type
_ROWS: tuple[tuple[str, torch.dtype | None, str], ...] = (
    ("Byte", torch.uint8, "UINT8"),
    ("Char", torch.int8, "INT8"),
    ("Double", torch.float64, "DOUBLE"),
    ("Float", torch.float32, "FLOAT"),
    ("Half", torch.float16, "FLOAT16"),
    ("Int", torch.int32, "INT32"),
    ("Long", torch.int64, "INT64"),
    ("Short", torch.int16, "INT16"),
    ("Bool", torch.bool, "BOOL"),
    ("ComplexFloat", torch.complex64, "COMPLEX64"),
    ("ComplexDouble", torch.complex128, "COMPLEX128"),
    ("BFloat16", torch.bfloat16, "BFLOAT16"),
    ("Undefined", None, "UNDEFINED"),
)


def _onnx(name: str) -> Any:
    return getattr(torch.onnx.TensorProtoDataType, name)  # type: ignore[attr-defined]


def pytorch_type_to_onnx_dtype(dtype_or_scalar_type: torch.dtype | str) -> Any:
    """torch.onnx.TensorProtoDataType of a dtype or of a scalar name ("Float"). RuntimeError when there is none."""
    for scalar, dtype, name in _ROWS:
        if dtype_or_scalar_type == (scalar if isinstance(dtype_or_scalar_type, str) else dtype):
            return _onnx(name)
    raise RuntimeError(f"Unsupported dtype {dtype_or_scalar_type}")


def pytorch_scalar_type_to_pytorch_dtype(dtype: str) -> torch.dtype | None:
    """The dtype of a scalar name; None for "Undefined". RuntimeError for a name that is none."""
    assert isinstance(dtype, str)
    for scalar, found, _ in _ROWS:
        if dtype == scalar:
            return found
    raise RuntimeError(f"Unsupported dtype {dtype}")


def onnx_dtype_to_pytorch_dtype(dtype: Any) -> torch.dtype | None:
    """The dtype of a torch.onnx.TensorProtoDataType; None for UNDEFINED. RuntimeError when there is none."""
    for _, found, name in _ROWS:
        if dtype == _onnx(name):
            return found
    raise RuntimeError(f"Unsupported dtype {dtype}")
