"""Lists of parameters on a CUDA device: their tables, steps, norms and scaled copies (csrc/cuda/).

A list of parameters has a table of pointers in device memory. It is written anew only when a pointer, a size or a type
changed, by kernels that carry it in their arguments; steps then take what varies from device memory (step counters, lr,
grad_scale, found_inf), on torch's current stream. Nothing here waits for the device, and all of it may be captured in a
CUDA graph: a captured step has a table of its own in the graph's memory, which every replay writes again.

Numbers that a step both reads and changes (loss scale, counters of steps) live in a Mirror: on the host, or on the
device while steps are decided there. Then reading them waits, and Late brings a copy that is looked at when it has
arrived.

Only float32, bfloat16 and float16 lie on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ortmodule import _C

if TYPE_CHECKING:
    from .fused import FusedOptimizer

Lists = list[list[Tensor] | None]  # params, grads, first moments, second moments, masters, step counters
Head = tuple[int, int, Tensor, int, int]  # device, stream, table, spans, chunks: what every kernel call begins with
# where to copy it back to after the launches (None: nowhere), copy; alive until then
Copies = list[tuple[Tensor | None, Tensor]]
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Late:
    """A copy of a tensor on its way into pinned host memory: begun now, looked at later, never waited for. One at a
    time."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True, device="cpu")
        self.event: torch.cuda.Event | None = None  # while under way

    def begin(self) -> None:
        """Does nothing while an earlier copy is under way."""
        if self.event is None:
            self.copy.copy_(self.source, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(self.source.device))

    def arrived(self) -> list[float] | None:
        """The values, once, when they are there."""
        if self.event is None or not self.event.query():
            return None
        self.event = None
        return self.copy.tolist()


class Torch:
    """What is asked of torch about devices. Tests put another object in its place to run this file without a GPU."""

    index: Callable[[Tensor], int] = staticmethod(torch.Tensor.get_device)  # -1: the CPU

    def stream(self, index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream

    def empty(self, size: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.empty(size, dtype=dtype, device=like.device)

    def late(self, source: Tensor) -> Late:
        return Late(source)


host = Torch()


class Place:
    """Where one call works: a device, torch's current stream there, and whether that stream is being captured."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = host.stream(index)
        self.capturing: bool = _C.cuda_capturing(index, self.stream)


class Table:
    """The table of one list of parameters on one stream, and the image on the host by which changes are seen."""

    def __init__(self) -> None:
        self.image = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.memory: Tensor | None = None
        self.order: Tensor | None = None  # for LAMB in one launch
        self.again: list[int] = []  # parameters that share memory with earlier ones

    def refresh(
        self, place: Place, op: str, lists: Lists, store: int, numbers: list[int] | None = None, ordered: bool = False
    ) -> tuple[Head, Copies]:
        """Brings the table up to date, and the order if there is to be one. Also returns copies of tensors that did not
        lie in one memory order. numbers: of the parameters."""
        params = lists[0]
        assert params
        size = _C.cuda_image_size(len(params))
        if self.image.numel() < size:
            self.image = torch.zeros(size, dtype=torch.uint8, device="cpu")
        copies: Copies = []
        spans, chunks, need, changed, odd = _C.cuda_spans(op, self.image, *lists, store, numbers)
        if odd:
            lists = [None if x is None else list(x) for x in lists]
            for i in odd:
                copies += _one_order(op, lists, i)
            spans, chunks, need, changed, _ = _C.cuda_spans(op, self.image, *lists, store, numbers)
        if self.memory is None or self.memory.numel() < need:
            self.memory, changed = host.empty(need, torch.uint8, params[0]), True
        head = (place.index, place.stream, self.memory, spans, chunks)
        try:
            if changed:
                self.order, self.again = None, _C.overlaps(params)
                _C.cuda_upload(*head, self.image)
            if ordered and self.order is None:
                self.order = host.empty(_C.cuda_lamb_order_size(spans, chunks), torch.uint8, params[0])
                _C.cuda_lamb_order(*head, self.order)
        except RuntimeError:
            self.image.zero_()  # what lies on the device is unknown: the next step writes it again
            self.memory = None
            raise
        return head, copies


def _one_order(op: str, lists: Lists, i: int) -> Copies:
    """Replaces the tensors of parameter i that do not lie in the parameter's memory order (or, if that has gaps, in a
    dense one). A gradient is not copied back: in another order it keeps its values, as on the CPU."""
    p = lists[0][i]  # type: ignore[index]
    if any(n > 1 and stride == 0 for n, stride in zip(p.shape, p.stride())):
        raise ValueError(f"{op}: parameter {i} is an expanded tensor; several elements share memory: clone it first")
    order = torch.empty_like(p, memory_format=torch.preserve_format)
    copies: Copies = []
    for k, x in enumerate(lists[:5]):
        if x is None or x[i].stride() == order.stride():
            continue
        if k == 1 and x[i] is p and copies:  # a norm or scaling in place: both lists are one
            x[i] = copies[0][1]
            continue
        copy = torch.empty_like(order, dtype=x[i].dtype).copy_(x[i])
        copies.append((None if k == 1 else x[i], copy))
        x[i] = copy
    return copies


def write_back(copies: Copies) -> None:
    for original, copy in copies:
        if original is not None:
            original.copy_(copy)


def scalar(value: Any, like: Tensor) -> tuple[Tensor | None, float | None]:
    """(tensor for the kernels on like's device, None) for a CUDA tensor of one element, else (None, number)."""
    if value is None:
        return None, None
    if not isinstance(value, Tensor) or host.index(value) < 0:
        return None, float(value)
    if value.numel() != 1:
        raise ValueError(
            f"a tensor of {value.numel()} elements given for lr, grad_scale or found_inf; it must have one"
        )
    if value.dtype != torch.float32 or host.index(value) != host.index(like):
        value = value.to(device=like.device, dtype=torch.float32)
    return value, None


# --- steps -----------------------------------------------------------------------------------------


class Stepper:
    """The tables of one optimizer. An optimizer makes one when it first meets a CUDA parameter; it is not part of its
    state."""

    def __init__(self) -> None:
        self._tables: dict[Any, Table] = {}

    def table(self, place: Place, key: Any) -> Table:
        if place.capturing:
            return Table()
        return self._tables.setdefault((place.index, place.stream, key), Table())

    def step(self, optimizer: FusedOptimizer, index: int, grad_scale: Any, found_inf: Any) -> None:
        """One update of the optimizer's parameters on CUDA device `index`."""
        name = type(optimizer).__name__
        params = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and host.index(p) == index
        ]
        wrong = next((p for p in params if p.dtype not in TYPES), None)
        if wrong is not None:
            raise RuntimeError(
                f"{name} got a parameter of {wrong.dtype} on a CUDA device; allowed there: float32, bfloat16, float16"
            )
        found, found_number = scalar(found_inf, params[0])
        if found_number:
            return
        scale, scale_number = scalar(grad_scale, params[0])
        place = Place(index)
        if place.capturing and any(not optimizer.state.get(p) for p in params):
            raise RuntimeError(
                f"{name}: a parameter without state in a captured step; every replay would reset it: run one step "
                "before capturing"
            )
        inv_scale = 1.0 / scale_number if scale_number is not None else 1.0
        scales, found = optimizer._cuda_scales(self, place, params, scale, inv_scale, found)
        collected = [optimizer._collect(group, index) for group in optimizer.param_groups]
        optimizer._part_gradients(collected)
        op = name.removeprefix("Fused").lower()
        ready: list[tuple[Any, ...]] = []  # every list is looked at before the first moves
        for number, (group, by_store) in enumerate(zip(optimizer.param_groups, collected)):
            optimizer._check_numbers(group)
            for store, entry in by_store.items():
                lists = optimizer._lists(group, store, *entry)
                table = self.table(place, (number, store))
                head, copies = table.refresh(place, op, lists, store, ordered=optimizer.one_launch)
                ends = [*table.again, len(entry[0])]
                if len(ends) == 1:
                    ready.append((number, group, store, table, lists, head, copies))
                    continue
                for begin, end in zip([0, *ends], ends):  # pieces in which no two weights share memory
                    piece = [x and x[begin:end] for x in lists]
                    ready.append((number, group, store, self.table(place, (number, store, begin)), piece, None, []))
        for number, group, store, table, lists, head, copies in ready:
            if head is None:
                head, copies = table.refresh(place, op, lists, store, ordered=optimizer.one_launch)
            sign = -1.0 if group["maximize"] else 1.0
            lr, lr_number = scalar(group["lr"], params[0])
            scale, inv_scale = scales[number]
            scalars = (lr, scale, found, optimizer._seed(number, 0))
            optimizer._cuda_launch(
                table, (*head, *scalars), group, 0.0 if lr_number is None else lr_number, sign * inv_scale
            )
            write_back(copies)
            torch.autograd.graph.increment_version(lists[0])


# --- steps that the device decides about --------------------------------------------------------------

# om_gpu_steps: done, skipped, row, overflow; then step, param, before, after, row of each overflow
LOG_HEAD, LOG_ENTRY, LOG_ENTRIES = 4, 5, 16
CLIP_LAMB, CLIP_TORCH, CLIP_FINITE = range(3)  # OM_GPU_CLIP_...


class Mirror:
    """Numbers kept on the host or, while kernels change them, in a float64 tensor on a device."""

    def __init__(self, *values: float) -> None:
        self._values = list(values)
        self._tensor: Tensor | None = None
        self._ahead = False  # the device has newer ones
        self._current = False  # the device has these
        self._captured = False  # a graph changes them whenever it is replayed

    def get(self) -> list[float]:
        """Waits for the device when that has newer ones."""
        if self._tensor is not None and (self._ahead or self._captured):
            self._values, self._ahead = self._tensor.tolist(), False
        return self._values

    def set(self, *values: float) -> None:
        self._values, self._ahead, self._current = list(values), False, False
        if self._captured:
            self._write()

    def on(self, place: Place, like: Tensor) -> Tensor:
        """The numbers on like's device. Whoever queues a kernel that changes them calls changed()."""
        if self._tensor is None or host.index(self._tensor) != place.index:
            self.get()
            self._tensor, self._current, self._captured = (
                host.empty(len(self._values), torch.float64, like),
                False,
                False,
            )
        if not self._current:
            if place.capturing:
                raise RuntimeError(
                    "FP16_Optimizer: loss scale and counters that come from the host, in a captured step; every replay "
                    "would set them again: "
                    "run one step before capturing"
                )
            self._write()
        return self._tensor

    def _write(self) -> None:
        assert self._tensor is not None
        self._tensor.zero_()
        for i, value in enumerate(self._values):
            if value:
                self._tensor[i].fill_(value)  # the number travels in the launch: nothing to wait for
        self._current = True

    def changed(self, place: Place) -> None:
        self._ahead = True
        self._captured = self._captured or place.capturing


class Verdict:
    """One pass over gradients (their norm and finiteness), and what follows from it, in four numbers that stay on the
    device."""

    def __init__(self, table: Table, place: Place, grads: list[Tensor], numbers: list[int]) -> None:
        self.stream, self.capturing = place.stream, place.capturing
        self.head, _ = table.refresh(place, "norm", [grads, grads, None, None, None, None], 0, numbers)
        self.norm, self.stop, self.divisor, self.first = host.empty(4, torch.float32, grads[0])
        _C.cuda_norm(*self.head)

    def decide(self, scale: Tensor | None, divisor: float, max_norm: float | None) -> None:
        """divisor (times scale): of the gradients, before clipping. May be called again."""
        clip = (0.0, CLIP_LAMB) if max_norm is None else (max_norm, CLIP_FINITE)
        _C.cuda_norm_finish(*self.head, scale, None, self.norm, self.stop, self.divisor, self.first, divisor, *clip)

    def still_holds(self, place: Place) -> bool:
        return self.stream == place.stream and self.capturing == place.capturing


# --- lists without an optimizer ----------------------------------------------------------------------


def usable(tensors: Sequence[Tensor]) -> bool:
    """All on one CUDA device, strided, of a type the kernels have, in a build that has kernels."""
    if not tensors or not _C.cuda_archs():
        return False
    index = host.index(tensors[0])
    return index >= 0 and all(
        host.index(t) == index and t.layout is torch.strided and t.dtype in TYPES and type(t) is Tensor for t in tensors
    )


def norm(
    grads: Sequence[Tensor], loss_scale: float = 1.0, max_norm: float | None = None
) -> tuple[Tensor, Head, Copies]:
    """Three scalars on the device: the norm of grads / loss_scale; 1 if it is not finite, else 0; the divisor of grads
    that unscales them and limits their norm to max_norm by torch's formula (None: no limit). Then the list's head and
    its dense copies."""
    place = Place(host.index(grads[0]))
    head, copies = Table().refresh(place, "norm", [list(grads), list(grads), None, None, None, None], 0)
    out = host.empty(3, torch.float32, grads[0])
    _C.cuda_norm(*head)
    _C.cuda_norm_finish(
        *head,
        None,
        None,
        out[0],
        out[1],
        out[2],
        None,
        loss_scale,
        max_norm or 0.0,
        CLIP_LAMB if max_norm is None else CLIP_TORCH,
    )
    return out, head, copies


def axpby(dst: Sequence[Tensor], src: Sequence[Tensor] | None, a: float) -> None:
    """dst = a * src, converted (src None: dst itself)."""
    place = Place(host.index(dst[0]))
    head, copies = Table().refresh(
        place, "axpby", [list(dst), list(dst if src is None else src), None, None, None, None], 0
    )
    _C.cuda_axpby(*head, None, a, 0.0)
    write_back(copies)


def clip(grads: Sequence[Tensor], max_norm: float, loss_scale: float) -> Tensor:
    """Unscales and clips in place without the host learning whether it was needed; returns the norm, on the device."""
    out, head, copies = norm(grads, loss_scale, max_norm)
    _C.cuda_axpby(*head, out[2], 1.0, 0.0)
    write_back(copies)
    return out[0].clone()
