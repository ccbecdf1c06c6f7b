"""The C extension (csrc/python/pymodule.c). Tensors cross by DLPack's C exchange API: borrowed on the way in, blocks of
the engine's pool with a deleter on the way out. Every call that computes releases the GIL. Failures raise RuntimeError
(ValueError for bad input) with the engine's message.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

def has_bf16() -> bool:
    """Whether the processor multiplies bf16 (AVX512_BF16 or AMX), and the engine may use that (ORTMODULE_ISA)."""

def isa() -> str:
    """Instruction set the kernels were chosen for: 'generic', 'avx2' or 'avx512'."""

def pool_stats() -> dict[str, int]:
    """Bytes of the block pool: 'live' (handed out), 'free' (kept for reuse), 'peak_live'; counters: 'mapped' (blocks of
    64 KiB and more that the system was asked for), 'moved' (blocks handed out and given back)."""

def pool_trim(anew: bool = True) -> int:
    """Give free blocks back to the system; anew: and let peak_live start anew; returns bytes."""

def living(types: tuple[type, ...]) -> list[Any]:
    """The objects of exactly one of these types that the garbage collector knows, as gc.get_objects() has them; without
    its trap for other threads: those see no reference to a tuple that they are still filling."""

def guard_hash(dicts: Sequence[dict[str, Any] | tuple[Any, ...] | frozenset[str]]) -> int:
    """Order-dependent hash of the identity and (for int, float, bool, str, None, tuples of these) value of every entry
    of the dictionaries; tensors count by identity, dtype-free; about 10 ns an entry. Of the objects in a tuple the
    class counts. Keys in a frozenset do not count in the dictionary behind it."""

def guard_check(table: tuple[Any, ...]) -> int:
    """Index of the first row that does not hold, or -1. Rows of four: kind, holder, key, value (csrc/python/guard.c);
    some 0.1 us a row. An exception of the user's code in a comparison counts as a difference."""

def watch_calls(
    choose: Callable[[Any], int],
    called: Callable[[Any, Any], object],
    c_called: Callable[[Any, Any], object],
    functions: tuple[Any, ...],
    types: tuple[type, ...],
) -> None:
    """A profile function for this thread until watch_end: called(frame, code) for code objects of which choose(code)
    has bit 0 (asked once each), c_called(frame, function) for what code with bit 1 calls: builtin functions among
    `functions` and builtin methods of objects of `types`."""

def watch_end() -> None:
    """Ends watch_calls."""

def attributes_asked(cls: type, names: frozenset[str], ask: Callable[[Any, str], Any]) -> Any:
    """A __getattribute__ for cls (four classes of a process at most), object's otherwise: ask(self, name) answers for
    `names`, on this thread."""

def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    store: int,
    seed: int,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    inv_scale: float,
    mode: int,
    bias_correction: bool,
) -> None:
    """One Adam step over parallel lists (csrc/optim/optim.h). steps: one-element CPU tensors, counted up here. store: 0
    as is, 1 f32 masters, 2 int16 rests of bfloat16 parameters, 3 stochastic rounding. Gradients are multiplied by
    inv_scale (negative: ascend). The caller bumps version counters."""

def sgd_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None,
    masters: Sequence[Tensor] | None,
    store: int,
    seed: int,
    lr: Any,
    momentum: float,
    dampening: float,
    weight_decay: float,
    inv_scale: float,
    nesterov: bool,
    first: bool | list[bool],
) -> None:
    """One SGD step; first: the momentum buffers (all of them, or each) hold nothing yet and become the gradients."""

def lamb_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    store: int,
    seed: int,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    l2: float,
    grad_weight: float,
    ratio_min: float,
    ratio_max: float,
    inv_scale: float,
    bias_correction: bool,
    no_ratio: bool,
    keep_grads: bool,
) -> None:
    """One LAMB step. Gradients of the computing type become the direction unless keep_grads."""

def steps(kernel: str, calls: list[tuple[Any, ...]]) -> None:
    """<kernel>_step ("adam", "sgd", "lamb") for each tuple of arguments. What the engine refuses in any of them is
    refused before the first moves. In all of these, weights that share memory are updated one after the other, as
    listed."""

def overlaps(tensors: Sequence[Tensor]) -> list[int]:
    """Indices of the tensors that share memory with an earlier one, gaps of strided ones counted."""

def overlaps_written(tensors: list[Any], written: tuple[int, ...]) -> set[tuple[int, int]]:
    """Pairs of indices, the lower one first, of tensors that share memory (gaps of strided ones counted) and of which
    one is written; one twice: it is written, and two of its elements may be one in memory. Without what has no memory
    that can be seen (None, sparse tensors)."""

def norm(tensors: Sequence[Tensor], ord: float, per_tensor: bool) -> Any:
    """(norm, all finite) over all elements of all float tensors; with per_tensor also a list of norms."""

def axpby(dst: Sequence[Tensor], src: Sequence[Tensor] | None, a: float, b: float) -> None:
    """dst = a * src + b * dst for each pair, converting types; src None: dst itself."""

def loss_scale_next(
    scale: float, good: float, finite: bool, window: float, lowest: float, highest: float
) -> tuple[float, float]:
    """Dynamic loss scaling: (scale, steps without overflow since it changed) after one more step."""

# The optimizers on CUDA (csrc/python/cuda.c; called by optim/cuda.py). What works on the device begins with `head`: the
# device's ordinal, the stream's address, the table (uint8, on the device) and its numbers of spans and chunks. Scalars
# given as tensors have one float32 element on the device. Nothing waits for the device.

def cuda_engine_stream(stream: int) -> None:
    """Where this thread's next runs on a CUDA device are queued."""
def cuda_engine_tf32(allowed: bool) -> None:
    """Whether this thread's next float32 products on a CUDA device may cut their operands to TF32."""
def cuda_engine_graphs(allowed: bool) -> None:
    """Whether this thread's next runs on a CUDA device may be launched as CUDA graphs."""
def cuda_engine_programs(when: int, library: str, cache: str) -> None:
    """Whether chains of plans that are made from now on are compiled: 0 never, 1 where it pays, 2 always. library: path
    of a libnvrtc.so for where the process has none; cache: directory in which modules are kept, "": nowhere."""
def cuda_engine_program_counts() -> tuple[int, int, int, str]:
    """Chains compiled, calls of NVRTC, modules found in the cache, why not all were ("": nothing went wrong)."""
def cuda_engine_empty() -> None:
    """Blocks that are kept for the next step go back to torch's allocator, or the driver's pool."""
def cuda_engine_record_stream(device: int, address: int, stream: int) -> bool:
    """The block there is worked with on that stream, too: when it is given back, its own stream waits for what the
    other has been given. -> whether it is one of the engine's."""
def cuda_engine_keep(on: bool) -> None:
    """Whether blocks that are given back are kept for the next step; gives back those that are."""
def cuda_engine_graph_counts() -> tuple[int, int, int, list[str]]:
    """CUDA graphs made, launched, pieces of plans that were given up, and why."""
def cuda_engine_stand_in(on: bool | Callable[[Tensor], int]) -> None:
    """Tests: CPU tensors stand for those of a CUDA device; a function says of which (ordinal; -1: the CPU)."""
def cuda_engine_look(device: int, /) -> None:
    """ValueError with an index or label out of range that is known there and was not told."""
def cuda_engine_counts() -> tuple[int, int, list[str], int]:
    """Kernels launched, calls the CPU did for a CUDA device, names of their operators, products by cuBLASLt."""
def cuda_engine_refusal(device: int) -> str:
    """Why no plan can run on that GPU, with what was found and what is wanted; ''."""
def cuda_archs() -> str:
    """Architectures of the embedded kernels ('75 80 ...'); '' when the extension was built without nvcc."""

def cuda_capturing(device: int, stream: int) -> bool:
    """The stream is being captured into a CUDA graph. Opens the device at first use."""

def cuda_image_size(n: int) -> int:
    """Bytes of the host image of a list of n parameters."""

def cuda_spans(*args: Any) -> tuple[int, int, int, bool, list[int]]:
    """(op, image, params, grads, exp_avgs, exp_avg_sqs, masters, steps, store, numbers), lists or None: brings the
    image (uint8, CPU) up to date. numbers: of the parameters, where first_out is to be one of them; None: places in the
    lists. Spans, chunks, bytes the table needs, whether the image changed, parameters whose tensors do not share one
    dense memory order (then the image is left as it was)."""

def cuda_upload(device: int, stream: int, table: Tensor, n_span: int, n_chunk: int, image: Tensor) -> None:
    """Writes the table on the device from the image."""

def cuda_adam(*args: Any) -> None:
    """(head, lr_tensor, grad_scale, found_inf, seed, lr, beta1, beta2, eps, weight_decay, inv_scale, mode,
    bias_correction): one Adam step. lr is used when lr_tensor is None; gradients are multiplied by inv_scale /
    grad_scale."""

def cuda_sgd(*args: Any) -> None:
    """(head, lr_tensor, grad_scale, found_inf, seed, lr, momentum, dampening, weight_decay, inv_scale, nesterov)"""

def cuda_lamb(*args: Any) -> None:
    """(head, lr_tensor, grad_scale, found_inf, seed, lr, beta1, beta2, eps, weight_decay, l2, grad_weight, ratio_min,
    ratio_max, inv_scale, bias_correction, no_ratio, keep_grads, order): order None: three launches; else what
    cuda_lamb_order wrote: one launch."""

def cuda_lamb_order_size(n_span: int, n_chunk: int) -> int:
    """Bytes of the order of a list, for LAMB in one launch."""

def cuda_lamb_order(device: int, stream: int, table: Tensor, n_span: int, n_chunk: int, order: Tensor) -> None:
    """Writes the order (uint8, on the device) in which the sweeps of the list are done."""

def cuda_norm(device: int, stream: int, table: Tensor, n_span: int, n_chunk: int) -> None:
    """Sums of squares of the gradients, into the table."""

def cuda_norm_finish(
    device: int,
    stream: int,
    table: Tensor,
    n_span: int,
    n_chunk: int,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    norm_out: Tensor,
    stop_out: Tensor,
    scale_out: Tensor,
    first_out: Tensor | None,
    div: float,
    max_norm: float,
    clip: int,
) -> None:
    """From cuda_norm's sums: the norm of the gradients / (div * grad_scale), whether to stop (found_inf, or the norm is
    not finite), the divisor that unscales and clips (clip 0: LAMB's rule; 1: by max_norm / (norm + 1e-6); 2: the same,
    if the norm is finite), the number of the first parameter with an inf or NaN, or -1."""

def cuda_loss_scale(
    device: int,
    stream: int,
    scaler: Tensor,
    counters: Tensor,
    stop: Tensor,
    first: Tensor,
    automatic: bool,
    window: float,
    lowest: float,
    highest: float,
) -> None:
    """After a scaled step: the next loss scale (scaler: float64 scale, good steps), counters and log of overflows
    (om_gpu_steps)."""

def cuda_axpby(
    device: int, stream: int, table: Tensor, n_span: int, n_chunk: int, grad_scale: Tensor | None, a: float, b: float
) -> None:
    """params = a / grad_scale * grads + b * params, with conversion."""

class Model:
    """A captured graph: owner of its variants and plans. Thread-safe."""

    def __init__(
        self, onnx: bytes, memory_level: int = 0, cuda: int = -1, all_rows: bool = False, all_tokens: bool = False
    ) -> None:
        """memory_level: of variants that are asked for without one. cuda: ordinal of the plans' device; -1: the CPU.
        all_rows: heads are computed for rows whose label is ignored, too. all_tokens: layers for padding, too."""
    @staticmethod
    def from_text(text: str) -> Model:
        """From the text form of the internal graph (tests)."""
    inputs: list[tuple[str, str, str, int]]
    """Per graph input: name, role ('input' | 'param' | 'buffer'), dtype name ('f32', 'i64', ...), rank."""
    outputs: list[tuple[str, str, int, bool]]
    """Per user output: name, dtype name, rank, differentiable."""
    writes: list[int]
    """Graph inputs that a forward overwrites, in order."""
    host_inputs: list[int]
    """Graph inputs that the host reads, as sizes: numbers of the CPU also where the plan is a GPU's."""
    load_ms: float
    random: bool
    """A live random node exists: a seed must be drawn for each forward."""
    def text(self, variant: int = -1) -> str: ...
    def nodes(self, variant: int = -1) -> list[dict[str, Any]]:
        """One dict per node: op, phase ('forward' | 'backward' | 'update'), module, file, line, segment, host_index (-1
        if none)."""
    def variant(
        self, wanted: bytes, arriving: bytes, group: Sequence[int] | None = None, memory_level: int = ...
    ) -> int:
        """Joint graph. wanted: one byte per graph input. arriving: one byte per user output. group: per graph input,
        the backward segment (0 runs first) in which its gradient must be complete; None = one segment. memory_level: 0,
        what is cheap is computed again in backward instead of kept; 1, transformer layers as well; default: the
        model's. Another of these is another variant, beside the first."""
    def variant_info(self, variant: int) -> dict[str, Any]:
        """segments: int (backward segments; 0 when there is no backward); grads: list of (graph input, segment) that
        get a gradient (wanted inputs without a path are absent); reads_inputs: graph inputs whose data backward reads,
        as list of int; reads_outputs: user outputs whose data backward reads; reaches: user
        outputs that depend on a wanted input; reads: (backward segment, graph input whose data it reads);
        host_nodes: list of (part, host_index, is_backward, want), part: 0, or which of the gradient nodes of that host
        node; want: for a gradient, the node inputs (by position) whose gradients are its outputs, in order; flow:
        om_flow of csrc/graph/engine.h as (terms: kind, a, b; (host_index, which float output): term; graph input: term;
        per output the outputs it shares nodes with, as bits); ms: build time."""
    def fit(
        self,
        wanted: bytes,
        arriving: bytes,
        group: Sequence[int] | None,
        tensors: Sequence[Tensor],
        bytes: int,
        share: float,
    ) -> dict[str, Any]:
        """The variant that computes least again among those whose step takes at most that many bytes at the sizes of
        these tensors; bytes < 0: at most `share` of what level 0 takes. variant: -1: there is none; memory: of its step
        (see memory); bytes: what was asked for; most, least: the peak of level 0, the smallest one that is known;
        again_us, step_us: by calculation, what it computes again and the step of level 0. docs/MEMORY.md."""
    def memory(self, variant: int, tensors: Sequence[Tensor]) -> dict[str, int]:
        """Bytes that a step of the variant takes in blocks: peak; released (the same when nobody but the
        backward holds outputs); kept (from forward to backward), workspace, outputs,
        gradients, loans (gradients of outputs that somebody still holds)."""
    def clusters(self, wanted: bytes, arriving: bytes, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
        """What backward may compute again, by structure, at the sizes of these tensors: name, count, bytes, formula,
        cheap and layers (of how many levels 0 and 1 do), compromise (memory_table.Cluster)."""
    def choose(
        self, wanted: bytes, arriving: bytes, group: Sequence[int] | None, level: int,
        plans: Sequence[tuple[str, int, int]] | None,
    ) -> int:
        """The variant that computes again what the level does, changed by these (cluster, strategy, count). None:
        nothing. ValueError, with the names there are, for a cluster that there is not."""
    def forward(self, variant: int, tensors: Sequence[Tensor], seed: int = 0, write: bool = True) -> Run:
        """Plans (cached) and starts a forward. tensors: one per graph input, in order. write=False: leave the graph
        inputs that a forward overwrites as they are (a forward run again for other output gradients)."""
    def plan_report(self) -> list[dict[str, Any]]:
        """Per cached plan: variant, sizes, plan_ms, arena_bytes, peak_bytes by class ('activations', 'gradients',
        'outputs'), calls, largest (of the plan with the largest arena: what lies in memory at its peak, gradients
        apart; empty in the others)."""
    def profile(self, on: bool) -> list[dict[str, Any]]:
        """Switch timing of nodes on or off; returns and clears what was gathered: op, count, ms."""
    def profile_calls(self) -> list[dict[str, Any]]:
        """Of every cached plan of which a run was timed since profile() was called: variant, threads, sizes, calls: a
        dict per call in order. kind ('run' | 'copy' | 'view copy' | 'write' | 'host'), op, phase, segment, module,
        file, line, program (statements of an elementwise chain; None), again (backward computes it again), dtype,
        host_index (-1: none), count, ms (of all), flops and bytes (of one, by calculation: csrc/run/work.c)."""
    def timeline(self) -> dict[str, Any] | None:
        """What lies in memory over a step of the plan with a backward that was used last; None: there is none. variant,
        sizes, n_forward, segment_ends (calls), arena (bytes), peak, released (see memory), calls (as in
        profile_calls), storages: (bytes, first call, last call, 'kept' | 'workspace' | 'scratch' | 'output' |
        'gradient' | 'loan', user output or entry of the gradients)."""

class Run:
    """One forward or one backward in progress. Not thread-safe."""

    def resume(self, segment: int = -1) -> tuple[int, int, list[Tensor]] | None:
        """Runs until the segment is done (-1: to the end) -> None, or until a host node: (host_index, part, its
        inputs). The inputs are strided views of engine memory, valid until the run ends (clone to keep); None where
        left out. Answer with host_done, then resume again. In a backward the inputs are the gradients of the forward
        node's floating-point outputs (zeros where none arrived) and the answer is one gradient per entry of `want`
        (variant_info, host_nodes), None = zero. A node with very many inputs stops several times, once per part."""
    def host_done(self, outputs: Sequence[Tensor | None]) -> None:
        """Tensors of the host node's outputs: dtype and sizes as declared, any strides; kept alive as long as
        needed."""
    def outputs(self) -> list[Tensor]:
        """Forward: the user outputs, each in its own block. Graph inputs that are outputs as they stand come back as
        copies."""
    def state(self) -> tuple[State, Tensor]:
        """Forward with a backward, once: what that needs. The tensor (1-d uint8) is the arena: keep it as you like, it
        may come back at another address."""
    def grads(self, segment: int) -> list[tuple[int, Tensor]]:
        """Backward, after resume(segment): (graph input, gradient) of that segment; dtype, sizes and strides of the
        input."""

class State:
    """What a forward leaves beside its arena. Keeps the plan; may serve any number of backwards."""

    def backward(
        self,
        arena: Tensor,
        tensors: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        dropped: bytes | None = None,
        fleeting: bool = False,
    ) -> Run:
        """Starts a backward; the arena is used up. tensors / outputs: only those variant_info names need be given;
        grads: one per user output (None where it does not arrive: must match `arriving`); dropped: per user output, 1
        when nobody else reads its memory any more, so that its gradient may take the place."""
