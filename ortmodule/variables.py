"""Every ORTMODULE_* variable of onnxruntime-training 1.19.2, and what it is here."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Variable(NamedTuple):
    """kept: same = the same names and meaning; nearest = taken, and does what comes nearest; no = said once, and
    ignored. why: what differs, or what takes its place."""

    name: str  # without the prefix
    kept: Literal["same", "nearest", "no"]
    why: str


_ALWAYS = "always on: the engine decides from the graph"
_TRITON = "no kernels are generated"
_TUNING = "kernels are chosen by machine and sizes alone, so that two runs give the same bits"

VARIABLES: tuple[Variable, ...] = (
    Variable("LOG_LEVEL", "same", "an unknown name is refused with the allowed ones"),
    Variable("SAVE_ONNX_PATH", "nearest", "also without save_onnx: then the files begin with the class's name"),
    Variable("FALLBACK_POLICY", "nearest", "also several names joined by |; the default also has "
             "FALLBACK_BAD_INITIALIZATION"),
    Variable("FALLBACK_RETRY", "same", "what cannot be captured is tried again at every call"),
    Variable("JSON_CONFIG_PATH", "same", "read by experimental.json_config.load_from_json"),
    Variable("MEMORY_OPT_LEVEL", "nearest", "2 is as 1: its compromise about casts is part of 0 here"),
    Variable("ONNX_OPSET_VERSION", "no", "graphs are written in opset 23"),
    Variable("SKIPCHECK_POLICY", "no", "all checks are made at every call; together they take microseconds"),
    Variable("ALLOW_AUTOGRAD_CHECKPOINT", "no", "torch.utils.checkpoint is captured, and recomputes as it says"),
    Variable("ENABLE_CUSTOM_AUTOGRAD", "no", "custom autograd.Functions always run with their own backward"),
    Variable("ENABLE_COMPUTE_OPTIMIZER", "nearest", "0 turns off LABEL_SPARSITY and PADDING_SPARSITY; products are "
             "not moved behind gathers otherwise"),
    Variable("ENABLE_SPARSE_OPTIMIZER", "nearest", "0 turns off LABEL_SPARSITY and PADDING_SPARSITY"),
    Variable("ENABLE_LABEL_SPARSE_OPTIMIZER", "same", "as LABEL_SPARSITY; decided by each batch's labels, not by the "
             "first one's density"),
    Variable("ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "nearest", "as PADDING_SPARSITY: tokens that attention's mask "
             "hides, not those at padding_idx, and only where nobody can see the difference"),
    Variable("PRINT_INPUT_DENSITY", "no", "nothing is decided by the density of the first batch"),
    Variable("PRINT_MEMORY_STATS", "no", "report() has the planned peak by kind and place; training.utils has "
             "log_memory_usage"),
    Variable("MEMORY_OPT_CONFIG", "nearest", "clusters are named by the engine's operators: the memory table has them"),
    Variable("MEMORY_OPT_PROBE_RECOMPUTE_LEVEL", "no", "clusters are looked for among all operators"),
    Variable("CACHE_DIR", "no", "nothing is kept between processes; a capture takes about a second"),
    Variable("USE_TRITON", "no", _TRITON),
    Variable("TRITON_CONFIG_FILE", "no", _TRITON),
    Variable("TRITON_DEBUG", "no", _TRITON),
    Variable("ENABLE_TUNING", "no", _TUNING),
    Variable("MAX_TUNING_DURATION_MS", "no", _TUNING),
    Variable("TUNING_RESULTS_PATH", "no", _TUNING),
    Variable("USE_FLASH_ATTENTION", "no", _ALWAYS),
    Variable("USE_EFFICIENT_ATTENTION", "no", _ALWAYS),
    Variable("ATEN_SDPA_FALLBACK", "no", _ALWAYS),
    Variable("DEEPCOPY_BEFORE_MODEL_EXPORT", "no", "a capture runs on tensors without values: nothing is copied"),
    Variable("DO_DEEPCOPY_BEFORE_MODEL_EXPORT", "no", "as DEEPCOPY_BEFORE_MODEL_EXPORT"),
    Variable("ENABLE_MEM_EFFICIENT_GRAD_MGMT", "no", "always so: gradients are handed out in backward as they are made "
             "(SEGMENT_MB)"),
    Variable("ENABLE_ZERO_STAGE3", "no", "ZeRO-3 works around blocks: `ortmodule.wrap_blocks` (DISTRIBUTED.md)"),
    Variable("CONV_ALGO_SEARCH", "no", _TUNING),
    Variable("ROCM_TEST", "no", "of onnxruntime's own tests"),
)  # fmt: skip
