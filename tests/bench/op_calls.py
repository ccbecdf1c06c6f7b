"""One operator on the CPU, called again and again without graph, plan or allocation: what the benchmarks of kernels time.

    call = kernel(cx, "softmax", {"axis": 1}, [x], [y])     # prepared once
    call()

Structures as in csrc/graph/engine.h and device.h.
"""

from __future__ import annotations

import ctypes as C
import time
from collections.abc import Callable, Mapping, Sequence

import torch

import engine

Value = int | float | str | list[int]


class Attr(C.Structure):
    class Value(C.Union):
        _fields_ = [("i", C.c_int64), ("f", C.c_double), ("s", C.c_char_p), ("dims", C.c_void_p)]

    _anonymous_ = ("value",)
    _fields_ = [("name", C.c_char_p), ("kind", C.c_uint8), ("n", C.c_uint32), ("value", Value)]


class Node(C.Structure):
    _fields_ = [
        ("op", C.c_void_p),
        ("in_", C.c_uint32),
        ("out", C.c_uint32),
        ("n_in", C.c_uint16),
        ("n_out", C.c_uint16),
        ("n_attr", C.c_uint16),
        ("segment", C.c_uint16),
        ("phase", C.c_uint8),
        ("attr", C.c_void_p),
        ("scope", C.c_uint32),
        ("rng", C.c_uint64),
        ("again", C.c_uint32),
    ]


class Args(C.Structure):
    _fields_ = [
        ("node", C.c_void_p),
        ("graph", C.c_void_p),
        ("attr", C.c_void_p),
        ("n_attr", C.c_int),
        ("n_in", C.c_int),
        ("n_out", C.c_int),
        ("in_", C.c_void_p),
        ("out", C.c_void_p),
        ("prep", C.c_void_p),
        ("scratch", C.c_void_p),
        ("scalars", C.c_void_p),
        ("bounded", C.c_void_p),
        ("count", C.c_void_p),
        ("fault", C.c_void_p),
    ]


class Op(C.Structure):
    _fields_ = [("name", C.c_char_p), ("id", C.c_uint16)]


class Row(C.Structure):
    _fields_ = [
        ("dense", C.c_uint32),
        ("inplace", C.c_uint32),
        ("scratch", C.CFUNCTYPE(C.c_int64, C.c_void_p, C.c_void_p)),
        ("prepare", C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_void_p, C.c_void_p)),
        ("run", C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p)),
        ("strided", C.c_uint32),
    ]


class Device(C.Structure):
    _fields_ = [("name", C.c_char_p), ("rows", C.POINTER(Row))]


class Arena(C.Structure):
    _fields_ = [("cx", C.c_void_p), ("chunks", C.c_void_p)]


def _attr(to: Attr, name: str, v: Value, keep: list[object]) -> None:
    to.name = name.encode()
    if isinstance(v, float):
        to.kind, to.f = 1, v
    elif isinstance(v, str):
        to.kind, to.s = 2, v.encode()
    elif isinstance(v, list):
        dims = (C.c_int64 * len(v))(*v)
        keep.append(dims)
        to.kind, to.n, to.dims = 3, len(v), C.addressof(dims)
    else:
        to.kind, to.i = 0, v


def kernel(cx: engine.Ctx, name: str, attrs: Mapping[str, Value], ins: Sequence[torch.Tensor | None],
           outs: Sequence[torch.Tensor]) -> Callable[[], None]:
    op = Op.in_dll(engine.lib, "om_op_" + name)
    row = Device.in_dll(engine.lib, "om_device_cpu").rows[op.id]
    keep: list[object] = [list(ins), list(outs)]
    attr = (Attr * max(1, len(attrs)))()
    for a, (key, v) in zip(attr, attrs.items()):
        _attr(a, key, v, keep)
    i, o = (engine.Tensor * len(ins))(*map(engine.tensor, ins)), (engine.Tensor * len(outs))(*map(engine.tensor, outs))
    node = Node(op=C.addressof(op), n_in=len(ins), n_out=len(outs), n_attr=len(attrs), attr=C.addressof(attr), rng=7)
    scalars, fault, arena = (C.c_uint64 * 2)(3, 0), (C.c_uint64 * 8)(), Arena(cx.p.value, None)
    args = Args(node=C.addressof(node), attr=C.addressof(attr), n_attr=len(attrs), n_in=len(ins), n_out=len(outs), in_=C.addressof(i),
                out=C.addressof(o), scalars=C.addressof(scalars), fault=C.addressof(fault))
    bytes_ = row.scratch(cx.p, C.byref(args))
    prep = C.c_void_p()
    cx.check(row.prepare(cx.p, C.byref(arena), C.byref(args), C.byref(prep)))
    scratch = torch.empty(bytes_ + 64, dtype=torch.uint8)
    args.scratch, args.prep = (scratch.data_ptr() + 63) & ~63, prep
    keep += [cx, op, attr, i, o, node, scalars, fault, arena, scratch]
    run, at, ref = row.run, cx.p, C.byref(args)

    def call() -> None:
        assert keep
        if run(at, ref):
            cx.check(1)

    return call


def best(calls: Sequence[Callable[[], object]], seconds: float = 0.6, rounds: int = 200) -> list[float]:
    """Best CPU time of each, taking turns."""
    times = [float("inf")] * len(calls)
    for f in calls:
        f()
    stop, done = time.monotonic() + seconds * len(calls), 0
    while done < 3 or (time.monotonic() < stop and done < rounds):
        done += 1
        for i, f in enumerate(calls):
            t = time.thread_time()
            f()
            times[i] = min(times[i], time.thread_time() - t)
    return times
