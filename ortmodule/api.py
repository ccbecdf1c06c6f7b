"""Training from artifacts, without PyTorch: the names of onnxruntime.training.api over the trainer of ortmodule.h.

    state = CheckpointState.load_checkpoint("checkpoint")
    module = Module("training_model.onnx", state, "eval_model.onnx")
    optimizer = Optimizer("optimizer_model.onnx", module)
    module.train()
    loss = module(x, labels)
    optimizer.step()
    module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, "checkpoint", include_optimizer_state=True)

One trainer (a state, its Module and Optimizer) is one thread's at a time: a call while another thread's goes on is an
error. Needs numpy only. Names and defaults are onnxruntime-training's; where its three flat-buffer calls disagree on
trainable_only (False, True, True), so do these. Differences: docs/ON_DEVICE.md.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import operator
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter", "TrainingError", "set_seed"]

Array = npt.NDArray[Any]


class TrainingError(RuntimeError):
    """What the engine refused or could not do: its sentence."""


# --- the C interface (csrc/ortmodule.h)

_RANK = 8
_NAMES = ["", "float32", "float64", "", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
_CODES = {np.dtype(n): i for i, n in enumerate(_NAMES) if n}


class _Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("dim", C.c_int64 * _RANK),
        ("stride", C.c_int64 * _RANK),
        ("dtype", C.c_uint8),
        ("rank", C.c_uint8),
        ("device", C.c_int16),
    ]


class _Bytes(C.Structure):
    _fields_ = [("data", C.c_char_p), ("size", C.c_size_t)]


class _Files(C.Structure):
    _fields_ = [(name, _Bytes) for name in ("packed", "train", "eval", "optimizer", "checkpoint")]


class _Options(C.Structure):
    _fields_ = [
        ("arena", C.c_void_p),
        ("arena_size", C.c_size_t),
        ("threads", C.c_int),
        ("one_batch", C.c_bool),
        ("loss_only", C.c_bool),
        ("seed", C.c_uint64),
    ]


class _Io(C.Structure):
    _fields_ = [
        ("name", C.c_char_p),
        ("role", C.c_uint8),
        ("dtype", C.c_uint8),
        ("rank", C.c_uint8),
        ("dim", C.c_int64 * _RANK),
        ("written", C.c_bool),
        ("differentiable", C.c_bool),
        ("host", C.c_bool),
    ]


class _Param(C.Structure):
    _fields_ = [("name", C.c_char_p), ("trainable", C.c_bool), ("value", _Tensor), ("grad", _Tensor)]


class _Property(C.Structure):
    _fields_ = [("name", C.c_char_p), ("kind", C.c_char), ("i", C.c_int64), ("f", C.c_double), ("s", C.c_char_p)]


class _Memory(C.Structure):
    _fields_ = [("arena", C.c_size_t), ("state", C.c_size_t), ("final", C.c_bool)]


_FLOATS = C.POINTER(C.c_float)
_TENSORS = C.POINTER(_Tensor)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "om_ctx_new": (C.c_void_p, [C.c_void_p]),
    "om_ctx_free": (None, [C.c_void_p]),
    "om_ctx_message": (C.c_char_p, [C.c_void_p]),
    "om_ctx_clear": (None, [C.c_void_p]),
    "om_trainer_load": (C.c_int, [C.c_void_p, C.POINTER(_Files), C.POINTER(_Options), C.POINTER(C.c_void_p)]),
    "om_trainer_free": (None, [C.c_void_p]),
    "om_trainer_inputs": (C.c_int, [C.c_void_p, C.c_bool]),
    "om_trainer_outputs": (C.c_int, [C.c_void_p, C.c_bool]),
    "om_trainer_input": (_Io, [C.c_void_p, C.c_bool, C.c_int]),
    "om_trainer_output": (_Io, [C.c_void_p, C.c_bool, C.c_int]),
    "om_trainer_memory": (_Memory, [C.c_void_p]),
    "om_trainer_step": (C.c_int, [C.c_void_p, _TENSORS, _FLOATS, _TENSORS]),
    "om_trainer_eval": (C.c_int, [C.c_void_p, _TENSORS, _FLOATS, _TENSORS]),
    "om_trainer_update": (C.c_int, [C.c_void_p]),
    "om_trainer_reset": (None, [C.c_void_p]),
    "om_trainer_seed": (None, [C.c_void_p, C.c_uint64]),
    "om_trainer_rate": (C.c_double, [C.c_void_p]),
    "om_trainer_set_rate": (C.c_int, [C.c_void_p, C.c_double]),
    "om_trainer_schedule": (C.c_int, [C.c_void_p, C.c_int, C.c_int64, C.c_int64, C.c_double]),
    "om_trainer_schedule_step": (C.c_int, [C.c_void_p]),
    "om_trainer_updates": (C.c_int64, [C.c_void_p]),
    "om_trainer_params": (C.c_int, [C.c_void_p]),
    "om_trainer_param_at": (_Param, [C.c_void_p, C.c_int]),
    "om_trainer_elements": (C.c_int64, [C.c_void_p, C.c_bool]),
    "om_trainer_get": (C.c_int, [C.c_void_p, C.c_bool, _FLOATS, C.c_int64]),
    "om_trainer_set": (C.c_int, [C.c_void_p, C.c_bool, _FLOATS, C.c_int64]),
    "om_trainer_save": (C.c_int, [C.c_void_p, C.c_char_p, C.c_bool]),
    "om_trainer_restore": (C.c_int, [C.c_void_p, _Bytes]),
    "om_trainer_copy": (C.c_int, [C.c_void_p, C.c_void_p]),
    "om_trainer_nominal": (C.c_bool, [C.c_void_p]),
    "om_trainer_set_property": (C.c_int, [C.c_void_p, C.POINTER(_Property)]),
    "om_trainer_properties": (C.c_int, [C.c_void_p]),
    "om_trainer_property_at": (_Property, [C.c_void_p, C.c_int]),
    "om_trainer_export": (C.c_int, [C.c_void_p, C.c_char_p, C.POINTER(C.c_char_p), C.c_int]),
}


def _open() -> C.CDLL:
    """ORTMODULE_DEVICE_LIBRARY: a libortmodule.so (make device) in the place of the package's own library."""
    path = os.environ.get("ORTMODULE_DEVICE_LIBRARY") or str(Path(__file__).with_name("_C.abi3.so"))
    lib = C.CDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        f = getattr(lib, name)
        f.restype, f.argtypes = result, arguments
    return lib


_lib = _open()
_seed = 0
_live: weakref.WeakSet[_Trainer] = weakref.WeakSet()
_live_lock = threading.Lock()


def set_seed(seed: int) -> None:
    """Of random operators (dropout), for modules made later and those that exist. A checkpoint with optimizer state
    goes on where its run was, whatever the seed was when its module was made."""
    global _seed
    _seed = operator.index(seed)
    with _live_lock:
        trainers = list(_live)
    for trainer in trainers:
        if trainer.end.alive:
            _lib.om_trainer_seed(trainer.p, seed & (2**64 - 1))


def _path(uri: str | os.PathLike[str]) -> bytes:
    path = os.fsencode(uri)
    if b"\0" in path:
        raise ValueError(f"{os.fspath(uri)!r}: a path has no NUL")
    return path


def _text(text: str, what: str) -> bytes:
    if "\0" in text:
        raise ValueError(f"{what} {text!r}: has a NUL, which checkpoints do not")
    return text.encode()


def _count(n: Any, what: str) -> int:
    n = operator.index(n)
    if not 0 <= n < 2**63:
        raise OverflowError(f"{what}: {n}; 0 to 2**63 - 1 are expected")
    return n


def _expect(given: Any, kind: type, what: str) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"{what}: a {kind.__name__} is expected, got {type(given).__name__}")


def _tensor(x: Array, what: str) -> _Tensor:
    code = _CODES.get(x.dtype)
    if code is None:
        known = ", ".join(n for n in _NAMES if n)
        raise TrainingError(f"{what}: an array of type {x.dtype}; {known} are taken")
    if x.ndim > _RANK:
        raise TrainingError(f"{what}: {x.ndim} dimensions; {_RANK} at most are taken")
    t = _Tensor(x.ctypes.data, dtype=code, rank=x.ndim, device=-1)
    for k in range(x.ndim):
        t.dim[k] = x.shape[k]
        t.stride[k] = x.strides[k] // x.itemsize
    return t


def _array(t: _Tensor, owner: Any = None) -> Array:
    """A view of the engine's memory."""
    if t.dtype >= len(_NAMES) or not _NAMES[t.dtype]:
        raise TrainingError("numpy has no type for this tensor (bfloat16)")
    dtype, shape = np.dtype(_NAMES[t.dtype]), tuple(t.dim[k] for k in range(t.rank))
    n = int(np.prod(shape, dtype=np.int64))
    if not n:
        return np.empty(shape, dtype)
    strides = tuple(t.stride[k] * dtype.itemsize for k in range(t.rank))
    span = 1 + sum((d - 1) * s for d, s in zip(shape, (t.stride[k] for k in range(t.rank))))
    buffer = (C.c_char * (span * dtype.itemsize)).from_address(t.data)
    buffer._owner = owner  # type: ignore[attr-defined]  # the trainer lives as long as the view
    return np.ndarray(shape, dtype, buffer, strides=strides)


class _Trainer:
    """An om_trainer and its context."""

    def __init__(self, files: Mapping[str, bytes], **options: Any) -> None:
        self.cx = _lib.om_ctx_new(None)
        if not self.cx:
            raise MemoryError
        p = C.c_void_p()
        rows = {name: _Bytes(data, len(data)) for name, data in files.items() if data}
        status = _lib.om_trainer_load(self.cx, _Files(**rows), _Options(seed=_seed & (2**64 - 1), **options), p)
        if status:
            message = _lib.om_ctx_message(self.cx).decode(errors="replace")
            _lib.om_ctx_free(self.cx)
            raise TrainingError(message)
        self.p = p
        self._one = threading.Lock()
        self.end = weakref.finalize(self, _Trainer._free, p, self.cx)
        self._ios: dict[tuple[bool, bool], list[_Io]] = {}
        with _live_lock:
            _live.add(self)

    @staticmethod
    def _free(p: C.c_void_p, cx: int) -> None:
        _lib.om_trainer_free(p)
        _lib.om_ctx_free(cx)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Around what must not meet another thread's call, which would go on in the midst of it."""
        if not self._one.acquire(blocking=False):
            raise TrainingError(
                "another thread is in a call of this trainer: one trainer is one thread's at a time. Make one for each "
                "thread, with a CheckpointState of its own, or hold a lock around its calls"
            )
        try:
            yield
        finally:
            self._one.release()

    def call(self, function: Any, *arguments: Any) -> None:
        with self.alone():
            self.check(function(self.p, *arguments))

    def check(self, status: int) -> None:
        if status:
            message = _lib.om_ctx_message(self.cx).decode(errors="replace")
            _lib.om_ctx_clear(self.cx)
            raise TrainingError(message)

    def ios(self, evaluation: bool, outputs: bool) -> list[_Io]:
        key = evaluation, outputs
        if key not in self._ios:
            count, at = (
                (_lib.om_trainer_outputs, _lib.om_trainer_output)
                if outputs
                else (_lib.om_trainer_inputs, _lib.om_trainer_input)
            )
            self._ios[key] = [at(self.p, evaluation, i) for i in range(count(self.p, evaluation))]
        return self._ios[key]


# --- checkpoints


class _Handle:
    """What stands for memory of the engine's: it is neither copied nor pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor pickled: it stands for memory of the engine's. "
            "CheckpointState.save_checkpoint keeps what it has; make another one from the files"
        )


class Parameter(_Handle):
    """A parameter of a CheckpointState."""

    def __init__(self, state: CheckpointState, index: int) -> None:
        self._state, self._index = state, index

    def _value(self) -> _Tensor:
        t = self._state._loaded()
        if _lib.om_trainer_nominal(t.p):
            raise TrainingError(
                f"{self.name}: this state has names and sizes of parameters and no values: give all of them first "
                "(Module.copy_buffer_to_parameters(buffer, trainable_only=False))"
            )
        return self._row().value

    def _row(self) -> _Param:
        row: _Param = _lib.om_trainer_param_at(self._state._loaded().p, self._index)
        return row

    @property
    def name(self) -> str:
        return str(self._row().name.decode())

    @property
    def data(self) -> Array:
        """A copy of the value."""
        return _array(self._value()).copy()

    @data.setter
    def data(self, value: npt.ArrayLike) -> None:
        mine = _array(self._value())
        given = np.asarray(value)
        if given.shape != mine.shape or given.dtype != mine.dtype:
            raise TrainingError(f"{self.name}: {mine.dtype} {mine.shape} expected, got {given.dtype} {given.shape}")
        mine[...] = given

    @property
    def grad(self) -> Array | None:
        """A copy of the gradient; None when there is none."""
        t = self._row().grad
        return _array(t).copy() if t.dtype else None

    @property
    def requires_grad(self) -> bool:
        return bool(self._row().trainable)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, requires_grad={self.requires_grad})"


class _Parameters(Mapping[str, Parameter]):
    def __init__(self, state: CheckpointState) -> None:
        self._state = state

    def _all(self) -> dict[str, Parameter]:
        t = self._state._loaded()
        rows = [Parameter(self._state, i) for i in range(_lib.om_trainer_params(t.p))]
        return {row.name: row for row in rows}

    def __getitem__(self, name: str) -> Parameter:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class _Properties(MutableMapping[str, "int | float | str"]):
    """Values that travel with the checkpoint. Until there is a Module they are kept here."""

    def __init__(self, state: CheckpointState) -> None:
        self._state = state
        self.early: dict[str, int | float | str] = {}

    def _all(self) -> dict[str, int | float | str]:
        t = self._state._trainer
        if t is None:
            return self.early
        rows = [_lib.om_trainer_property_at(t.p, i) for i in range(_lib.om_trainer_properties(t.p))]
        return {r.name.decode(): {b"i": r.i, b"f": r.f}.get(r.kind, (r.s or b"").decode()) for r in rows}

    def __getitem__(self, name: str) -> int | float | str:
        return self._all()[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        kind = "i" if isinstance(value, int) else "f" if isinstance(value, float) else "s"
        if not isinstance(value, (int, float, str)):
            raise TypeError(f"property {name!r}: int, float or str, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise OverflowError(f"property {name!r}: {value} does not fit into 64 bits; a str can keep it")
        if not isinstance(name, str) or not name:
            raise TypeError(f"a property's name is a str that is not empty, got {name!r}")
        encoded = _text(name, "property"), _text(value, f"property {name!r}:") if isinstance(value, str) else b""
        t = self._state._trainer
        if t is None:
            self.early[name] = value
            return
        p = _Property(name=encoded[0], kind=kind.encode())
        if kind == "i":
            p.i = int(value)
        elif kind == "f":
            p.f = float(value)
        else:
            p.s = encoded[1]
        t.call(_lib.om_trainer_set_property, p)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a property can be set, not removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, name: object) -> bool:
        return name in self._all()


class CheckpointState(_Handle):
    """Parameters, properties and what the optimizer keeps. Parameters can be read when a Module was made with it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._trainer: _Trainer | None = None
        self._parameters = _Parameters(self)
        self._properties = _Properties(self)

    def _loaded(self) -> _Trainer:
        if self._trainer is None:
            raise TrainingError("parameters: make a Module with this state first")
        return self._trainer

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str] | bytes) -> CheckpointState:
        """From a file, or from its bytes."""
        if isinstance(checkpoint_uri, bytes):
            return cls(checkpoint_uri)
        return cls(Path(checkpoint_uri).read_bytes())

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Written beside, synchronised and renamed."""
        _expect(state, CheckpointState, "save_checkpoint: state")
        t = state._loaded()
        t.call(_lib.om_trainer_save, _path(checkpoint_uri), include_optimizer_state)

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return self._parameters

    @property
    def properties(self) -> MutableMapping[str, int | float | str]:
        return self._properties


# --- training


def _file(uri: str | os.PathLike[str] | bytes | None, what: str) -> bytes:
    if uri is None:
        return b""
    data = uri if isinstance(uri, bytes) else Path(uri).read_bytes()
    if not data:
        raise TrainingError(f"{what}: {'the bytes are' if isinstance(uri, bytes) else os.fspath(uri)} empty")
    return data


class Module(_Handle):
    """The model. device: "cpu". session_options: not looked at. threads: of the engine's pool; 0: one.

    As in onnxruntime-training the optimizer's file comes later, with Optimizer: until then the trainer is made without.
    """

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str] | bytes,
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | bytes | None = None,
        device: str = "cpu",
        session_options: Any = None,
        *,
        threads: int = 0,
    ) -> None:
        if device != "cpu":
            raise TrainingError(f"device {device!r}: only 'cpu'")
        _expect(state, CheckpointState, "Module: state")
        self.training = True
        self._state = state
        self._files = {
            "train": _file(train_model_uri, "training model"),
            "eval": _file(eval_model_uri, "evaluation model"),
        }
        self._threads = threads
        if state._trainer is not None:
            raise TrainingError("this CheckpointState belongs to another Module")
        self._t = state._trainer = self._trainer(state._data, b"")
        for name, value in state._properties.early.items():
            state.properties[name] = value

    def _trainer(self, checkpoint: bytes, optimizer: bytes) -> _Trainer:
        files = {**self._files, "optimizer": optimizer, "checkpoint": checkpoint}
        return _Trainer(files, threads=self._threads)

    def _give(self, optimizer: bytes) -> None:
        """The optimizer's file has come: another trainer from the same files, with the values of the one so far, which
        stays when there is something wrong with the file."""
        old = self._t
        made = self._trainer(self._state._data, optimizer)
        made.check(_lib.om_trainer_copy(made.p, old.p))
        self._t = self._state._trainer = made
        old.end()

    def __call__(self, *user_inputs: npt.ArrayLike) -> Any:
        """The graph's outputs as arrays: one, or a tuple. While training, gradients are added to those there are."""
        t, evaluation = self._t, not self.training
        ios = t.ios(evaluation, False)
        if evaluation and not self._files["eval"]:
            raise TrainingError("eval: this Module was made without an evaluation model")
        if len(user_inputs) != len(ios):
            names = ", ".join(i.name.decode() for i in ios)
            raise TrainingError(f"{len(user_inputs)} inputs were given; the graph takes {len(ios)}: {names}")
        arrays = [np.asarray(x, order="C") for x in user_inputs]  # what is prepared is prepared for dense ones
        outputs = (_Tensor * len(t.ios(evaluation, True)))()
        named = (_tensor(x, f"input {i} ({io.name.decode()!r})") for i, (x, io) in enumerate(zip(arrays, ios)))
        given = (_Tensor * max(len(arrays), 1))(*named)
        call = _lib.om_trainer_eval if evaluation else _lib.om_trainer_step
        with t.alone():
            t.check(call(t.p, given, None, outputs))
            results = tuple(_array(y).copy() for y in outputs)
        return results[0] if len(results) == 1 else results

    def train(self, mode: bool = True) -> Module:
        self.training = mode
        return self

    def eval(self) -> Module:
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """The next training call begins with gradients of its own; until then these can be read, and step() uses them
        (so in onnxruntime-training)."""
        with self._t.alone():
            _lib.om_trainer_reset(self._t.p)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Array:
        """All parameters as one float32 array, in the order of the training graph's inputs."""
        out = np.empty(self.get_parameters_size(trainable_only), np.float32)
        self._t.call(_lib.om_trainer_get, trainable_only, out.ctypes.data_as(_FLOATS), out.size)
        return out

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Elements."""
        return int(_lib.om_trainer_elements(self._t.p, trainable_only))

    def copy_buffer_to_parameters(self, buffer: npt.ArrayLike, trainable_only: bool = True) -> None:
        x = np.ascontiguousarray(buffer, np.float32).reshape(-1)
        self._t.call(_lib.om_trainer_set, trainable_only, x.ctypes.data_as(_FLOATS), x.size)

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """The evaluation graph up to these outputs, with the weights as they are."""
        if isinstance(graph_output_names, str) or not all(isinstance(n, str) for n in graph_output_names):
            raise TypeError(f"graph_output_names: a list of names is expected, got {graph_output_names!r}")
        texts = [_text(n, "graph_output_names:") for n in graph_output_names]
        names = (C.c_char_p * len(texts))(*texts)
        self._t.call(_lib.om_trainer_export, _path(inference_model_uri), names, len(names))

    def input_names(self) -> list[str]:
        return [i.name.decode() for i in self._t.ios(not self.training, False)]

    def output_names(self) -> list[str]:
        return [i.name.decode() for i in self._t.ios(not self.training, True)]

    def memory(self) -> dict[str, int]:
        """Bytes: `arena`, all that steps ever use; `state`, the parameters and moments in it."""
        m = _lib.om_trainer_memory(self._t.p)
        return {"arena": m.arena, "state": m.state}


class Optimizer(_Handle):
    """The optimizer of a Module. A later one of the same kind goes on with the moments of the one before."""

    def __init__(self, optimizer_uri: str | os.PathLike[str] | bytes, module: Module) -> None:
        _expect(module, Module, "Optimizer: module")
        self._module = module
        module._give(_file(optimizer_uri, "optimizer model"))

    def step(self) -> None:
        t = self._module._t
        t.call(_lib.om_trainer_update)

    def set_learning_rate(self, learning_rate: float) -> None:
        t = self._module._t
        t.call(_lib.om_trainer_set_rate, float(learning_rate))

    def get_learning_rate(self) -> float:
        return float(_lib.om_trainer_rate(self._module._t.p))


class LinearLRScheduler(_Handle):
    """The rate rises from 0 to initial_lr in warmup_step_count updates, then falls to 0 at total_step_count."""

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        _expect(optimizer, Optimizer, "LinearLRScheduler: optimizer")
        self._module = optimizer._module
        t = self._module._t
        steps = _count(warmup_step_count, "warmup_step_count"), _count(total_step_count, "total_step_count")
        t.call(_lib.om_trainer_schedule, 2, *steps, float(initial_lr))

    def step(self) -> None:
        t = self._module._t
        t.call(_lib.om_trainer_schedule_step)
