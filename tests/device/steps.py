"""om_run_* of csrc/ortmodule.h by ctypes, on a device: the CPU, or the checking device of tests/device/checking.c.

    model = Model.text(cx(device), "graph { ... }")
    step = model.step([x, w], wanted=[1, 1], dys=[dy])        -> Step(outputs, inputs as they are then, gradients)

Tensors are those of torch in the host's memory; what the engine is given and gives lies in blocks of the device's and
crosses by upload and download, on the CPU as well, so that both go the same way.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import engine
from engine import RANK, TORCH, Tensor, lib

HOST = 4  # om_status
FORWARD, INPUT, PARAM, BUFFER = -1, 1, 2, 3
LIVE, PENDING, SLICES, WAITS, ENDED = range(5)  # om_checking_count

Pointer = C.c_void_p
Answer = Callable[[int, bool, list["torch.Tensor | None"]], "list[torch.Tensor | None]"]


class Block(C.Structure):
    _fields_ = [("data", Pointer), ("size", C.c_size_t), ("device", Pointer)]


class IO(C.Structure):
    _fields_ = [("name", C.c_char_p), ("role", C.c_uint8), ("dtype", C.c_uint8), ("rank", C.c_uint8), ("dim", C.c_int64 * RANK),
                ("written", C.c_bool), ("differentiable", C.c_bool), ("host", C.c_bool)]


class Needs(C.Structure):
    _fields_ = [("n_segments", C.c_int), ("grad_segment", C.POINTER(C.c_int)), ("reads_input", C.POINTER(C.c_uint8)),
                ("reads_output", C.POINTER(C.c_uint8)), ("reaches", C.POINTER(C.c_uint8)), ("n_reads", C.c_int), ("n_host", C.c_int),
                ("reads", Pointer), ("host", Pointer)]


class HostStop(C.Structure):
    _fields_ = [("index", C.c_int), ("part", C.c_int), ("backward", C.c_bool), ("n_in", C.c_int), ("n_out", C.c_int),
                ("in_", C.POINTER(Tensor)), ("out", C.POINTER(Tensor))]


for name in ("om_model_input", "om_model_output"):
    getattr(lib, name).restype = IO
lib.om_model_needs.restype = C.POINTER(Needs)
lib.om_run_host.restype = C.POINTER(HostStop)
lib.om_checking_get.restype = C.POINTER(Block)
lib.om_checking_count.restype = C.c_long
lib.om_checking_idle.restype = C.c_char_p
lib.om_checking_late.argtypes = [C.c_uint64]
lib.om_model_free.argtypes = [Pointer, Pointer]
lib.om_block_put.argtypes = [C.POINTER(Block)]
lib.om_block_put.restype = lib.om_run_free.restype = lib.om_state_free.restype = lib.om_model_free.restype = None


def cx(device: str, threads: bool = True) -> engine.Ctx:
    """A context whose plans run on `device`."""
    return engine.Ctx(threads, device)


def count(what: int) -> int:
    return int(lib.om_checking_count(what))


def late(seed: int) -> None:
    """0: nothing runs before somebody waits; else pauses that follow from the seed."""
    lib.om_checking_late(seed)


def span(t: Tensor | torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    dims = list(zip(t.shape, t.stride())) if isinstance(t, torch.Tensor) else [(t.dim[k], t.stride[k]) for k in range(t.rank)]
    return 0 if any(n == 0 for n, _ in dims) else 1 + sum((n - 1) * s for n, s in dims)


class Memory:
    """Blocks of a context's device that go when this goes."""

    def __init__(self, ctx: engine.Ctx) -> None:
        self.cx = ctx
        self.blocks: list[C._Pointer[Block]] = []

    def take(self, block: C._Pointer[Block]) -> C._Pointer[Block]:
        self.blocks.append(block)
        return block

    def get(self, size: int) -> int:
        b = lib.om_checking_get(self.cx.p, C.c_size_t(size))
        if not b:
            self.cx.check(1)
        return self.take(b).contents.data

    def put(self) -> None:
        while self.blocks:
            lib.om_block_put(self.blocks.pop())

    def upload(self, to: int, t: torch.Tensor) -> None:
        size = span(t) * t.element_size()
        self.cx.check(lib.om_checking_upload(self.cx.p, Pointer(to), Pointer(t.data_ptr()), C.c_size_t(size)))

    def give(self, t: torch.Tensor | None) -> Tensor:
        """The tensor with its strides, in a block of the device's."""
        r = engine.tensor(t)
        if t is not None:
            r.data = self.get(span(t) * t.element_size())
            self.upload(r.data, t)
        return r

    def fetch(self, t: Tensor) -> torch.Tensor | None:
        if not t.dtype:
            return None
        dtype, n = TORCH[t.dtype], span(t)
        assert dtype is not None
        flat = torch.empty(n, dtype=dtype)
        to, size = flat.data_ptr(), n * flat.element_size()
        self.cx.check(lib.om_checking_download(self.cx.p, Pointer(to), Pointer(t.data), C.c_size_t(size)))
        return flat.as_strided([t.dim[k] for k in range(t.rank)], [t.stride[k] for k in range(t.rank)])

    def move(self, block: C._Pointer[Block]) -> C._Pointer[Block]:
        """The bytes of a block in another one; the first is given back."""
        size = block.contents.size
        host = C.create_string_buffer(max(size, 1))
        self.cx.check(lib.om_checking_download(self.cx.p, host, Pointer(block.contents.data), C.c_size_t(size)))
        other = lib.om_checking_get(self.cx.p, C.c_size_t(size))
        self.cx.check(lib.om_checking_upload(self.cx.p, Pointer(other.contents.data), host, C.c_size_t(size)))
        lib.om_block_put(block)
        return other


@dataclass
class Step:
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]  # as they are afterwards
    grads: dict[int, torch.Tensor]


def array(tensors: Sequence[Tensor]) -> C.Array[Tensor]:
    return (Tensor * max(1, len(tensors)))(*tensors)


class Model:
    def __init__(self, ctx: engine.Ctx, p: Pointer) -> None:
        self.cx, self.p, self.owner = ctx, p, engine.own(ctx)
        self.n_in, self.n_out = lib.om_model_inputs(p), lib.om_model_outputs(p)

    @staticmethod
    def text(ctx: engine.Ctx, text: str) -> Model:
        g, p = Pointer(), Pointer()
        ctx.check(lib.om_graph_parse(ctx.p, text.encode(), C.byref(g)))
        ctx.check(lib.om_model_from_graph(ctx.p, g, C.byref(p)))
        return Model(ctx, p)

    @staticmethod
    def onnx(ctx: engine.Ctx, data: bytes) -> Model:
        p = Pointer()
        ctx.check(lib.om_model_load(ctx.p, data, C.c_size_t(len(data)), C.byref(p)))
        return Model(ctx, p)

    def input(self, i: int) -> IO:
        return lib.om_model_input(self.p, i)

    def output(self, i: int) -> IO:
        return lib.om_model_output(self.p, i)

    def print(self, variant: int = FORWARD) -> str:
        s = C.c_char_p()
        self.cx.check(lib.om_model_text(self.cx.p, self.p, variant, C.byref(s)))
        text = (s.value or b"").decode()
        lib.om_text_free(self.cx.p, s)
        return text

    def variant(self, wanted: Sequence[int], arriving: Sequence[int], group: Sequence[int] | None = None, again: int = 0) -> int:
        v = C.c_int()
        groups = None if group is None else (C.c_int * max(1, len(group)))(*group)
        self.cx.check(lib.om_model_variant(self.cx.p, self.p, bytes(wanted), bytes(arriving), groups, again, C.byref(v)))
        return v.value

    def needs(self, variant: int) -> Needs:
        return lib.om_model_needs(self.p, variant).contents

    def profile(self, on: bool) -> int:
        return lib.om_model_profile(self.p, on, None, 0)

    def resume(self, run: Pointer, segment: int, mem: Memory, answer: Answer | None) -> None:
        while (s := lib.om_run_resume(run, segment)) == HOST:
            stop = lib.om_run_host(run).contents
            if answer is None:
                raise engine.EngineError("a host node is due and nobody is here to answer")
            given = [mem.fetch(stop.in_[k]) for k in range(stop.n_in)]
            outs = []
            for k, t in enumerate(answer(stop.index, bool(stop.backward), given)):
                out = Tensor.from_buffer_copy(stop.out[k])
                dense = t is not None and t.is_contiguous()
                if t is not None and dense and k % 2 == 0:  # straight to where it is wanted
                    mem.upload(out.data, t)
                    outs.append(out)
                else:  # another layout, another block, or zeros
                    outs.append(mem.give(t))
            self.cx.check(lib.om_run_answer(run, array(outs)))
        self.cx.check(s)

    def step(self, ins: Sequence[torch.Tensor], wanted: Sequence[int] | None = None, dys: Sequence[torch.Tensor | None] | None = None,
             group: Sequence[int] | None = None, drop: bool = False, seed: int = 0, again: int = 0, write: bool = True,
             answer: Answer | None = None, move: bool = False) -> Step:  # fmt: skip
        """A forward, and with dys a backward: segment by segment, and who has a gradient overwrites it at once.
        drop: nobody holds the outputs any more. move: the arena comes back at another address."""
        wanted = [0] * self.n_in if wanted is None or dys is None else wanted
        arriving = [0] * self.n_out if dys is None else [int(d is not None) for d in dys]
        v = self.variant(wanted, arriving, group, again)
        needs, mem, run = self.needs(v), Memory(self.cx), Pointer()
        state, arena = Pointer(), C.POINTER(Block)()
        try:
            given = [engine.tensor(t) if self.input(i).host else mem.give(t) for i, t in enumerate(ins)]
            self.cx.check(lib.om_run_forward(self.cx.p, self.p, v, array(given), C.c_uint64(seed), write, C.byref(run)))
            self.resume(run, 0, mem, answer)
            outs = [Tensor() for _ in range(self.n_out)]
            for i, o in enumerate(outs):
                b = C.POINTER(Block)()
                self.cx.check(lib.om_run_output(run, i, C.byref(o), C.byref(b)))
                mem.take(b)
            if needs.n_segments:
                self.cx.check(lib.om_run_state(run, C.byref(state), C.byref(arena)))
            lib.om_run_free(run)
            run = Pointer()
            # fetched before the backward only where that may overwrite them: it is queued behind the forward
            grads: dict[int, torch.Tensor] = {}
            outputs = [mem.fetch(o) for o in outs] if drop or not needs.n_segments else None
            if needs.n_segments:
                assert dys is not None
                arena = mem.move(arena) if move else arena
                back_in = array([t if needs.reads_input[i] else Tensor() for i, t in enumerate(given)])
                back_out = array([o if needs.reads_output[i] else Tensor() for i, o in enumerate(outs)])
                back_dy = array([mem.give(d) for d in dys])
                dropped = bytes(int(needs.reads_output[i]) for i in range(self.n_out)) if drop else None
                c = arena.contents
                self.cx.check(lib.om_run_backward(self.cx.p, state, Pointer(c.data), C.c_size_t(c.size), back_in, back_out, back_dy,
                                                  dropped, C.byref(run)))  # fmt: skip
                for segment in range(needs.n_segments):
                    self.resume(run, segment, mem, answer)
                    for i in range(self.n_in):
                        if needs.grad_segment[i] != segment:
                            continue
                        t, b = Tensor(), C.POINTER(Block)()
                        self.cx.check(lib.om_run_grad(run, i, C.byref(t), C.byref(b)))
                        mem.take(b)
                        g = mem.fetch(t)
                        assert g is not None
                        grads[i] = g
                        mem.upload(t.data, torch.full_like(g, float("nan")))
            outputs = [mem.fetch(o) for o in outs] if outputs is None else outputs
            return Step(outputs, [ins[i] if self.input(i).host else mem.fetch(t) for i, t in enumerate(given)], grads)
        finally:
            lib.om_run_free(run)
            lib.om_state_free(state)
            lib.om_block_put(arena)
            mem.put()

    def free(self) -> None:
        if self.p:
            lib.om_model_free(Pointer(self.owner), self.p)
            engine.release(self.owner)
        self.p = Pointer()

    def __del__(self) -> None:
        if getattr(self, "p", None):
            self.free()


def run(text: str, ins: Sequence[torch.Tensor], wanted: Sequence[int] | None, dys: Sequence[torch.Tensor | None] | None,
        seed: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:  # fmt: skip
    """What engine.run returns, from a planned step on `device`."""
    model = Model.text(cx(device), text)
    names = [line.split()[1].split(":")[0] for line in text.splitlines() if line.split()[:1] and line.split()[0] in ("input", "param", "buffer")]
    targets = [line.split("-> ")[1].strip() for line in text.splitlines() if line.strip().startswith("write ")]
    if dys is not None and wanted is None:
        wanted = [int(t.is_floating_point()) for t in ins]
    step = model.step(ins, wanted, dys, seed=seed)
    grads = [step.grads.get(i) for i, w in enumerate(wanted or []) if w] if dys is not None else []
    return step.outputs + [step.inputs[names.index(t)] for t in targets], grads


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """The same bits (and strides)."""
    if a is None or b is None:
        return a is b
    def flat(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(flat(a), flat(b))


def difference(a: Step, b: Step) -> str | None:
    """The first thing that has other bits in b."""
    for what, x, y in (("output", a.outputs, b.outputs), ("input", a.inputs, b.inputs)):
        for i, (s, t) in enumerate(zip(x, y, strict=True)):
            if not same(s, t):
                return f"{what} {i}"
    if a.grads.keys() != b.grads.keys():
        return f"gradients {sorted(a.grads)} and {sorted(b.grads)}"
    return next((f"gradient {i}" for i in a.grads if not same(a.grads[i], b.grads[i])), None)


def gpt2(folder: Path) -> tuple[bytes, torch.nn.Module, torch.Tensor]:
    """A small GPT-2: the file a capture of it saves, the module, and ids for a step."""
    transformers = pytest.importorskip("transformers")
    from ortmodule import DebugOptions, ORTModule

    torch.manual_seed(0)
    # dropout is on: its masks follow from the seed alone
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False))  # fmt: skip
    ids = torch.randint(0, 97, (2, 16))
    ORTModule(module.train(), DebugOptions(save_onnx=True, onnx_prefix="gpt2", save_path=str(folder)))(input_ids=ids, labels=ids).loss.backward()
    return next(folder.glob("*_torch_exported_training.onnx")).read_bytes(), module, ids
