"""Settings: one table of environment variables, one parser, one printable object.

An option reaches ORTModule as a keyword argument; the environment variable of the same row overrides it, so that a
script can be steered from outside. Every value is parsed by its row; a value that does not parse raises ValueError
naming the variable, what was given and what is allowed. A variable that starts with ORTMODULE_ and stands in no row is
reported once (a typo must not pass for a setting), unless it is one that onnxruntime-training knew: then the report
says that it has no effect here.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from .memory import parse as parse_budget

logger = logging.getLogger("ortmodule")


class LogLevel(enum.IntEnum):
    """Names as in onnxruntime-training; the values are logging's."""

    VERBOSE = logging.DEBUG
    DEVINFO = logging.INFO - 5
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    FATAL = logging.CRITICAL


@dataclass(frozen=True)
class DebugOptions:
    """What onnxruntime-training's class of this name held: log level and where to save the captured graphs."""

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""
    save_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.log_level, LogLevel):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(self.log_level).__name__}.")
        if not self.save_onnx:
            return
        if not isinstance(self.onnx_prefix, str):
            raise TypeError(f"Expected onnx_prefix of type str, got {type(self.onnx_prefix).__name__}.")
        if not self.onnx_prefix:
            raise ValueError("onnx_prefix must be provided when save_onnx is set.")


class Row(NamedTuple):
    """One environment variable."""

    name: str  # without the prefix
    field: str  # of Settings; "" = read by the C engine itself
    allowed: str
    parse: Callable[[str], Any]
    doc: str


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError
    return word in ("1", "true", "yes", "on")


def _strict(text: str) -> bool | Literal["engine"]:
    return "engine" if text.strip().lower() == "engine" else _bool(text)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


def _memory(text: str) -> int:
    value = int(text)
    if value not in (0, 1, 2):
        raise ValueError
    return value


def _budget(text: str) -> str | int:
    parse_budget(text)
    return int(text) if text.strip().isdigit() else text


def _level(text: str) -> LogLevel:
    try:
        return LogLevel[text.strip().upper()]
    except KeyError:
        raise ValueError from None


def _policy(text: str) -> bool:
    if not text.startswith("FALLBACK_"):
        raise ValueError
    return text.strip() == "FALLBACK_DISABLE"


TABLE: tuple[Row, ...] = (
    Row(
        "STRICT",
        "strict",
        "0, 1 or engine",
        _strict,
        "1: raise instead of leaving the model or a submodule to PyTorch (single operators and custom "
        "autograd.Functions may be; report() names "
        "them). engine: raise for those, too",
    ),
    Row(
        "FALLBACK_POLICY",
        "strict",
        "FALLBACK_DISABLE or another FALLBACK_* name",
        _policy,
        "FALLBACK_DISABLE is STRICT=1; the other names of onnxruntime-training mean the default",
    ),
    Row("DISABLE", "disable", "0 or 1", _bool, "1: run the wrapped module in PyTorch, unchanged"),
    Row(
        "SEGMENT_MB",
        "segment_mb",
        "a number > 0",
        _positive,
        "megabytes of gradients after which backward hands them out and goes on (default 25, DDP's bucket size)",
    ),
    Row(
        "MAX_CAPTURES",
        "max_captures",
        "an integer >= 1",
        _count,
        "captures of one call structure before it is left to PyTorch (default 8)",
    ),
    Row(
        "RECHECK",
        "recheck",
        "0 or 1",
        _bool,
        "1 (default): at the 2nd, 10th, 100th... call of a capture the Python part of forward is run again, without "
        "arithmetic, and compared: state "
        "that changes unnoticed is said, and the calls go to PyTorch. 0: never",
    ),
    Row(
        "MEMORY_OPT_LEVEL",
        "memory_opt_level",
        "0, 1 or 2",
        _memory,
        "1: backward computes transformer layers again from their inputs instead of keeping their values: less memory, "
        "more time, the same bits. "
        "0 (default): only what costs one sweep over memory. 2: as 1 (its compromise about casts is part of 0 here)",
    ),
    Row(
        "MEMORY_BUDGET",
        "memory_budget",
        "bytes, or text as `6GB`, `512MiB`, `60%`",
        _budget,
        "what a step may take: backward computes again as much as is needed for that, and no more; the same bits. `%`: "
        "of what a step takes without a budget. Goes before MEMORY_OPT_LEVEL (docs/MEMORY.md)",
    ),
    Row(
        "CUDA_ENGINE",
        "cuda_engine",
        "0 or 1",
        _bool,
        "1: modules on a CUDA device run in the engine; its kernels were emulated, not measured (docs/GPU_STATUS.md)",
    ),
    Row("LOG_LEVEL", "log_level", ", ".join(LogLevel.__members__), _level, "level of the logger 'ortmodule'"),
    Row(
        "SAVE_ONNX_PATH",
        "save_path",
        "a directory",
        str,
        "write every captured graph there: `<prefix><class>_<n>_<mode>.onnx`",
    ),
    Row(
        "ISA",
        "",
        "generic, avx2 or avx512",
        _one_of("generic", "avx2", "avx512"),
        "highest instruction set the kernels may use",
    ),
    Row(
        "GEMM",
        "",
        "own, blas or host",
        _one_of("own", "blas", "host"),
        "force the matrix multiplication provider (host: PyTorch's bf16 product)",
    ),
    Row("PASS_LIMIT", "", "an integer", int, "run only the first n rewrites of the graph (to bisect)"),
    Row(
        "NO_REUSE",
        "",
        "anything",
        str,
        "when set: every value in memory of its own, nothing in place (to find memory errors)",
    ),
    Row("POISON", "", "anything", str, "when set: fill memory that is not in use with NaN (to find memory errors)"),
)
PREFIX = "ORTMODULE_"

# Known to onnxruntime-training, without effect here: what they switched is always on, decided automatically, or about
# its own internals.
WITHOUT_EFFECT = frozenset(
    PREFIX + name
    for name in (
        "ONNX_OPSET_VERSION FALLBACK_RETRY SKIPCHECK_POLICY ALLOW_AUTOGRAD_CHECKPOINT ENABLE_CUSTOM_AUTOGRAD "
        "ENABLE_COMPUTE_OPTIMIZER "
        "ENABLE_SPARSE_OPTIMIZER ENABLE_LABEL_SPARSE_OPTIMIZER ENABLE_EMBEDDING_SPARSE_OPTIMIZER PRINT_INPUT_DENSITY "
        "PRINT_MEMORY_STATS "
        "MEMORY_OPT_CONFIG MEMORY_OPT_PROBE_RECOMPUTE_LEVEL CACHE_DIR USE_TRITON TRITON_CONFIG_FILE TRITON_DEBUG "
        "ENABLE_TUNING MAX_TUNING_DURATION_MS TUNING_RESULTS_PATH USE_FLASH_ATTENTION USE_EFFICIENT_ATTENTION "
        "ATEN_SDPA_FALLBACK "
        "DEEPCOPY_BEFORE_MODEL_EXPORT DO_DEEPCOPY_BEFORE_MODEL_EXPORT ENABLE_MEM_EFFICIENT_GRAD_MGMT "
        "ENABLE_ZERO_STAGE3 "
        "CONV_ALGO_SEARCH JSON_CONFIG_PATH"
    ).split()
)


@dataclass(frozen=True)
class Settings:
    """How one ORTModule behaves. Build with `resolve`."""

    strict: bool | Literal["engine"] = False
    disable: bool = False
    segment_mb: float = 25.0
    max_captures: int = 8
    recheck: bool = True
    memory_opt_level: int = 0
    memory_budget: str | int | None = None
    cuda_engine: bool = False
    log_level: LogLevel | None = None
    save_path: str | None = None
    save_prefix: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))


_warned: set[str] = set()


def resolve(
    options: Mapping[str, Any], debug: DebugOptions | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from keyword arguments, then `debug`, then the environment (which wins).

    Raises TypeError for an option that does not exist, ValueError for a value that is not allowed.
    """
    env = os.environ if environ is None else environ
    known = {f.name for f in fields(Settings)}
    unknown = set(options) - known
    if unknown:
        raise TypeError(f"ORTModule got unknown options {sorted(unknown)}; allowed: {sorted(known)}")
    values = {k: v for k, v in options.items() if v is not None}
    if debug is not None:
        if not isinstance(debug, DebugOptions):
            raise TypeError(f"debug_options must be a DebugOptions, got {type(debug).__name__}")
        values.setdefault("log_level", debug.log_level)
        if debug.save_onnx:
            values.setdefault("save_path", debug.save_path or os.getcwd())
            values.setdefault("save_prefix", debug.onnx_prefix + "_")
    for row in TABLE:
        text = env.get(PREFIX + row.name)
        if text is None or text == "":
            continue
        try:
            value = row.parse(text)
        except (ValueError, OverflowError):
            raise ValueError(f"{PREFIX}{row.name}={text!r} is not allowed; give {row.allowed}") from None
        if row.field:  # the others are read by the engine
            values[row.field] = value
    rows = {PREFIX + row.name for row in TABLE}
    for name in env:
        if name.startswith(PREFIX) and name not in rows and name not in _warned:
            _warned.add(name)
            what = "has no effect here" if name in WITHOUT_EFFECT else f"is unknown; known: {', '.join(sorted(rows))}"
            logger.warning("environment variable %s %s", name, what)
    settings = Settings(**values)
    if settings.strict not in (False, True, "engine"):
        raise ValueError(f"strict={settings.strict!r} is not allowed; give False, True or 'engine'")
    if settings.segment_mb <= 0:
        raise ValueError(f"segment_mb={settings.segment_mb!r} is not allowed; give a number > 0")
    if settings.max_captures < 1:
        raise ValueError(f"max_captures={settings.max_captures!r} is not allowed; give an integer >= 1")
    if settings.memory_opt_level not in (0, 1, 2):
        raise ValueError(f"memory_opt_level={settings.memory_opt_level!r} is not allowed; give 0, 1 or 2")
    if settings.memory_budget is not None:
        parse_budget(settings.memory_budget)
        if settings.memory_opt_level:
            logger.info("memory_budget decides what is computed again; memory_opt_level=%d has no effect beside it",
                        settings.memory_opt_level)  # fmt: skip
    return settings


def doc() -> str:
    """The table as Markdown: docs/SETTINGS.md."""
    lines = [
        "# Environment variables",
        "",
        "An option reaches `ORTModule(model, option=value)` as a keyword argument of the name in lower case; the "
        "variable overrides it.",
        "Generated from the table in `ortmodule/config.py`.",
        "",
        "| variable | values | effect |",
        "|---|---|---|",
    ]
    lines += [f"| `{PREFIX}{row.name}` | {row.allowed} | {row.doc} |" for row in TABLE]
    return "\n".join(lines) + "\n"
