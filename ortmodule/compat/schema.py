"""Nested arguments and results as a list of tensors and a schema: onnxruntime.training.utils' two functions.

A schema has the structure of the data, with a numbered stub in the place of every tensor.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor

ORTModelInputOutputType = Union[  # noqa: UP007  names that are not defined yet
    None, str, int, bool, float, Tensor, Sequence["ORTModelInputOutputType"], Mapping[str, "ORTModelInputOutputType"]
]


class PrimitiveType:
    """bool, int and float: what may become a tensor."""

    @staticmethod
    def is_primitive_type(value: Any) -> bool:
        return type(value) in (int, bool, float)

    @staticmethod
    def get_tensor(value: int | bool | float, device: torch.device | str | None) -> Tensor:
        return torch.tensor(value, device=device)

    @staticmethod
    def get_primitive_dtype(value: int | bool | float) -> str:
        """The type's text; for a bool with its value, which belongs to the schema."""
        return f"{type(value)}_{value}" if isinstance(value, bool) else str(type(value))


class _TensorStub:
    """Stands for the tensor of a number."""

    __slots__ = ("dtype", "name", "shape", "shape_dims", "tensor_idx")

    def __init__(self, tensor_idx: int, name: str | None = None, dtype: str | None = None, shape: Any = None,
                 shape_dims: int | None = None) -> None:  # fmt: skip
        self.tensor_idx = tensor_idx
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.shape_dims = shape_dims

    def _values(self) -> list[tuple[str, Any]]:
        return [(n, getattr(self, n)) for n in ("tensor_idx", "name", "dtype", "shape", "shape_dims")]

    def __repr__(self) -> str:
        return f"_TensorStub({','.join(f'{n}={v}' for n, v in self._values() if v is not None)})"

    def __eq__(self, other: object) -> bool:
        if not other:
            return False
        if not isinstance(other, _TensorStub):
            raise NotImplementedError(f"a tensor stub is compared with a {type(other).__name__}")
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]


ORTModelInputOutputSchemaType = Union[  # noqa: UP007
    None,
    str,
    _TensorStub,
    Sequence["ORTModelInputOutputSchemaType"],
    Mapping[str, "ORTModelInputOutputSchemaType"],
]


def rebuilt(like: Any, items: Any) -> Any:
    """A sequence of like's type."""
    return type(like)._make(items) if hasattr(type(like), "_make") else type(like)(items)


def mapped(like: Any, items: dict[Any, Any]) -> Any:
    """A mapping of like's type: built from keywords where its keys are such, as results of transformers need."""
    if type(like) is dict or not all(isinstance(k, str) for k in items):
        return type(like)(items)
    return type(like)(**items)


def walk(data: Any, leaf: Callable[[Any, str], Any], name: str = "") -> Any:
    """Data of the same structure, with leaf(value, name) for what is neither a sequence nor a mapping."""
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return rebuilt(data, [walk(v, leaf, f"{name}_{i}" if name else f"{i}") for i, v in enumerate(data)])
    if isinstance(data, Mapping):
        return mapped(data, {k: walk(v, leaf, f"{name}_{k}" if name else f"{k}") for k, v in data.items()})
    return leaf(data, name)


def extract_data_and_schema(
    data: ORTModelInputOutputType, constant_as_tensor: bool = False, device: torch.device | str | None = None
) -> tuple[list[Tensor], ORTModelInputOutputSchemaType]:
    """The tensors, depth first, and the schema. constant_as_tensor: bool, int and float become tensors on `device`.

    Raises TypeError for a value that is neither tensor, number, text, None nor a sequence or mapping of such.
    """
    tensors: list[Tensor] = []

    def leaf(value: Any, name: str) -> Any:
        if value is None:
            return None
        number = PrimitiveType.is_primitive_type(value)
        if isinstance(value, str) or number:
            warnings.warn(
                f"Received input of type {type(value)} which may be treated as a constant: give it to the model's "
                "constructor, or as a tensor",
                stacklevel=4,
            )
            if not (number and constant_as_tensor):
                return value
            tensors.append(PrimitiveType.get_tensor(value, device))
            return _TensorStub(
                len(tensors) - 1, name=name, dtype=PrimitiveType.get_primitive_dtype(value), shape_dims=0
            )
        if isinstance(value, Tensor):
            tensors.append(value)
            return _TensorStub(len(tensors) - 1, name=name, dtype=str(value.dtype), shape_dims=value.dim())
        raise TypeError(f"Unsupported flatten data type: {type(value)}")

    return tensors, walk(data, leaf)


def unflatten_data_using_schema(data: list[Tensor], schema: ORTModelInputOutputSchemaType) -> ORTModelInputOutputType:
    """The nested data again: every stub's tensor is data[stub.tensor_idx]."""

    def fill(part: Any) -> Any:
        if isinstance(part, _TensorStub):
            found = data[part.tensor_idx]
            assert isinstance(found, Tensor), f"Expecting torch.Tensor, got {type(found)}"
            return found
        if part is None or isinstance(part, str) or PrimitiveType.is_primitive_type(part):
            return part
        if isinstance(part, Sequence):
            return rebuilt(part, [fill(v) for v in part])
        if isinstance(part, Mapping):
            result: Any = copy.copy(part)
            for key, value in part.items():
                result[key] = fill(value)
            return result
        raise TypeError(f"Unsupported unflatten data type: {type(part)}.")

    return fill(schema)  # type: ignore[no-any-return]
