"""The graph engine on a CUDA device (csrc/cuda/): for which modules, on which stream, with which random numbers.

A module whose tensors lie on one CUDA device is planned for it; of one that is spread over several devices, each part
is (spread.py). A GPU or a driver that the kernels do not run on (cuda/driver.h) leaves it to PyTorch, with one
sentence; so does ORTMODULE_CUDA_ENGINE=0. Arguments that lie elsewhere are moved there by PyTorch in front of the
graph: a trace with devices holds only where forward moves them itself, or may use a number of the CPU's.

Dropout follows the device's generator, as PyTorch's does: a forward takes a seed that is a function of the generator's
seed and offset, and moves the offset on, so torch.cuda.manual_seed, get_rng_state and set_rng_state (checkpoints) do
what they do elsewhere. Both numbers are the host's: nothing waits for the device. Inside a capture of the user's the
generator is left alone; the engine refuses such a step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import _C

if TYPE_CHECKING:
    from .config import Settings

stand_in = False  # tests: CPU tensors stand for those of cuda:0


def device_of(t: Tensor) -> torch.device:
    return torch.device("cuda", 0) if stand_in else t.device


def devices(module: nn.Module) -> set[torch.device]:
    """Where its parameters and buffers lie."""
    return {device_of(t) for t in chain(module.parameters(), module.buffers())}


def home(module: nn.Module, given: Sequence[Tensor]) -> torch.device:
    """Of a module on one device: where it lies; one without tensors is where those that it is given (`given`) are. The
    CPU for others."""
    found = devices(module) or {d for t in given if (d := device_of(t)).type != "cpu"}
    return found.pop() if len(found) == 1 else torch.device("cpu")


def other_default(module: nn.Module, given: Sequence[Tensor], defaults: Sequence[torch.device]) -> torch.device | None:
    """One of these default devices that is not the module's own."""
    at = home(module, given)
    return next((d for d in defaults if d.type != at.type or d.type == "cuda" and at.index != (
        torch.cuda.current_device() if d.index is None else d.index)), None)


def ordinal(module: nn.Module, given: Sequence[Tensor], enabled: bool) -> int:
    """Of the device whose kernels run the module's graphs; -1: the CPU's."""
    at = home(module, given) if enabled or stand_in else torch.device("cpu")
    return at.index if at.type == "cuda" and at.index is not None else -1


def refusal(at: torch.device, enabled: bool) -> str:
    """Why the engine does not run what lies on this device; "": it does."""
    if at.type != "cuda" or stand_in:
        return ""
    if not enabled:
        return "ORTMODULE_CUDA_ENGINE=0 leaves modules on CUDA devices to PyTorch"
    return _C.cuda_engine_refusal(at.index)


def place(index: int) -> torch.device:
    """Of a plan with this ordinal."""
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def nothing(index: int, dtype: torch.dtype) -> Tensor:
    """The number 0 where a plan with this ordinal is."""
    return torch.zeros((), dtype=dtype, device="cpu" if index < 0 or stand_in else place(index))


def token(index: int, requires_grad: bool = False) -> Tensor:
    """Of no elements; what hands it on runs on the stream and in the thread of autograd that the plan's outputs do."""
    return torch.empty(0, requires_grad=requires_grad, device="cpu" if index < 0 or stand_in else place(index))


def elsewhere(tensors: Sequence[Tensor], index: int) -> list[int]:
    """Which of these lie on another device than the plan that is to take them, on one from which PyTorch can move
    them."""
    here = place(index)
    return [i for i, t in enumerate(tensors) if (at := device_of(t)) != here and at.type in ("cpu", "cuda")]


def moved(t: Tensor, index: int) -> Tensor:
    """The tensor where the plan is, through autograd."""
    return t if stand_in else t.to(place(index))


def number(t: Tensor, index: int, of_host: bool) -> Tensor:
    """A number of the CPU as an input of the plan: of_host: that the host reads."""
    return t if of_host or index < 0 or device_of(t).type != "cpu" else moved(t, index)


def tf32_allowed() -> bool:
    """Whether PyTorch lets float32 matrix products on CUDA cut their operands to TF32."""
    now = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # torch 2.9 and later
    return now == "tf32" if now is not None else torch.backends.cuda.matmul.allow_tf32


def follow_stream(index: int, graphs: bool) -> None:
    """What this thread queues next goes on torch's current stream, in torch's precision, and with `graphs` as CUDA
    graphs where it can."""
    if index < 0:
        return
    _C.cuda_engine_graphs(graphs)
    _C.cuda_engine_tf32(tf32_allowed())
    if not stand_in:
        _C.cuda_engine_stream(torch.cuda.current_stream(index).cuda_stream)


def look(index: int) -> None:
    """ValueError, with an index or label out of range that this device knows of and nobody was told."""
    if index >= 0:
        _C.cuda_engine_look(index)


# --- chains -----------------------------------------------------------------------------------------

_NEVER, _WHERE_IT_PAYS = 0, 1


def nvrtc() -> str:
    """Path of the libnvrtc.so that PyTorch brings; "": none is beside it."""
    torch_at = Path(torch.__file__).parent
    found = [*torch_at.parent.glob("nvidia/*/lib/libnvrtc.so.*"), *torch_at.glob("lib/libnvrtc*.so*")]
    return str(next((p for p in sorted(found) if "builtins" not in p.name and ".alt." not in p.name), ""))


def follow_settings(settings: Settings) -> None:
    """How plans that are made from now on do chains of elementwise operators."""
    if stand_in:
        return
    when = _WHERE_IT_PAYS if settings.cuda_chains == "compiled" else _NEVER
    cache = os.path.expanduser(settings.cuda_cache)
    _C.cuda_engine_programs(when, nvrtc() if when else "", cache)


# --- memory -----------------------------------------------------------------------------------------

_listening = False


def listen() -> None:
    """From now on torch.cuda.empty_cache reaches what the engine keeps for the next step, and Tensor.record_stream what
    it has given out (torch's allocator knows neither: to it both are memory in use, of somebody else)."""
    global _listening
    if _listening or stand_in:
        return
    _listening = True
    empty, record = torch.cuda.empty_cache, Tensor.record_stream

    @functools.wraps(empty)
    def empty_cache() -> None:
        _C.cuda_engine_empty()
        empty()

    @functools.wraps(record)
    def record_stream(self: Tensor, s: torch.Stream) -> None:
        if self.is_cuda and (type(self) is Tensor or isinstance(self, nn.Parameter)):
            stream: int = s.cuda_stream  # type: ignore[attr-defined]
            _C.cuda_engine_record_stream(self.device.index, self.data_ptr(), stream)
        record(self, s)

    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty_cache
    Tensor.record_stream = record_stream  # type: ignore[assignment, method-assign]


# --- random numbers ---------------------------------------------------------------------------------

_OFFSETS = 4  # of the generator, that a forward takes: as many as one draw of four words


def generator(index: int) -> torch.Generator | None:
    """Whose numbers dropout follows; None: torch's on the CPU."""
    return None if index < 0 or stand_in else torch.cuda.default_generators[index]


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _mixed(x: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit words."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return x ^ x >> 31


def seed(index: int, end: int) -> int:
    """Of a forward that draws: below `end`."""
    of = generator(index)
    if of is None:
        return int(torch.randint(end, (), device="cpu"))
    if capturing():
        return 0
    offset = of.get_offset()
    of.set_offset(offset + _OFFSETS)
    return _mixed(_mixed(of.initial_seed() % 2**64) ^ offset) % end


def random_states(index: int) -> list[Tensor]:
    """Of the CPU's generator, and of the device's."""
    of = generator(index)
    return [torch.get_rng_state(), *([] if of is None or capturing() else [of.get_state()])]


def set_random_states(index: int, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    of = generator(index)
    if of is not None and len(states) > 1:
        of.set_state(states[1])


def same_states(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@contextmanager
def random_from(index: int, states: Sequence[Tensor] | None) -> Iterator[None]:
    """Random numbers as from there, and as before afterwards; None: as they come."""
    before = None if states is None else random_states(index)
    try:
        if states is not None:
            set_random_states(index, states)
        yield
    finally:
        if before is not None:
            set_random_states(index, before)
