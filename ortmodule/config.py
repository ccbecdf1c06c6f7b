"""Settings: one table of environment variables, one parser, one printable object.

An option reaches ORTModule as a keyword argument; the environment variable of the same row overrides it, so that a
script can be steered from outside. Every value is parsed by its row; a value that does not parse raises ValueError
naming the variable, what was given and what is allowed. A variable that starts with ORTMODULE_ and stands in no row is
reported once (a typo must not pass for a setting), unless it is one that onnxruntime-training knew: then the report
says that it has no effect here.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from . import fallback
from .debug import DebugOptions, LogLevel
from .fallback import Category, FallbackPolicy, policy_of
from .memory import parse as parse_budget
from .memory_table import read as read_config
from .variables import VARIABLES

__all__ = ["DebugOptions", "LogLevel", "Settings", "SkipCheck", "resolve"]
logger = logging.getLogger("ortmodule")


class SkipCheck(enum.IntFlag):
    """Names of onnxruntime-training's checks that could be left out. Here all are made."""

    SKIP_CHECK_DISABLED = 1
    SKIP_CHECK_DEVICE = 2
    SKIP_CHECK_BUILD_GRADIENT = 4
    SKIP_CHECK_EXECUTION_AGENT = 8

    def is_disabled(self) -> bool:
        return SkipCheck.SKIP_CHECK_DISABLED in self

    def is_set(self, check: SkipCheck) -> bool:
        return not self.is_disabled() and check in self


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


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError
    return share


def _seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
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


def _directory(text: str) -> str:
    try:
        os.makedirs(text, exist_ok=True)
    except OSError:
        raise ValueError from None
    if not os.access(text, os.W_OK):
        raise ValueError
    return text


def _budget(text: str) -> str | int:
    parse_budget(text)
    return int(text) if text.strip().isdigit() else text


def _level(text: str) -> LogLevel:
    try:
        return LogLevel[text.strip().upper()]
    except KeyError:
        raise ValueError from None


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
        "MIN_COVERAGE",
        "min_coverage",
        "a number from 0 to 1",
        _share,
        "raise where a capture leaves the engine less than this share of the nodes (a submodule in PyTorch counts as "
        "many as it has modules), or where the model is left to PyTorch (default 0: never)",
    ),
    Row(
        "FALLBACK_POLICY",
        "fallback_policy",
        ", ".join(FallbackPolicy.__members__) + ", several joined by |",
        policy_of,
        "which failures leave a submodule or the model to PyTorch; the others raise an ORTModule...Exception "
        "(ortmodule/fallback.py). FALLBACK_DISABLE: none does, as STRICT=1",
    ),
    Row(
        "FALLBACK_RETRY",
        "fallback_retry",
        "0 or 1",
        _bool,
        "1: what was left to PyTorch because it could not be captured is tried again at every call",
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
        "CAPTURE_SECONDS",
        "capture_seconds",
        "a number > 0",
        _positive,
        "what the captures of one model may take, all together (default 300). After that, calls that no capture fits "
        "run in PyTorch, and report() says so",
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
        "MEMORY_OPT_CONFIG",
        "memory_opt_config",
        "a JSON file: a list of `cluster:strategy:count`",
        str,
        "which clusters of operators backward computes again (1; 2: with a compromise at casts) or keeps (0), the "
        "first `count` of them, -1: all; names: the memory table of report(), and of the log at INFO. On top of level "
        "0; level 1 and MEMORY_BUDGET do not ask it (docs/MEMORY.md)",
    ),
    Row(
        "KEEP_MEMORY",
        "keep_memory",
        "seconds >= 0, or inf",
        _seconds,
        "memory that no step is using for so long (default 2) is given back to the system; a loop whose steps are "
        "further apart is noticed (docs/MEMORY.md)",
    ),
    Row(
        "LABEL_SPARSITY",
        "label_sparsity",
        "0 or 1",
        _bool,
        "1 (default): the last product before a cross entropy leaves out the rows whose label is ignore_index: in the "
        "backward always, in the forward where only the loss reads its result (docs/SPARSITY.md). 0: all rows",
    ),
    Row(
        "PADDING_SPARSITY",
        "padding_sparsity",
        "0 or 1",
        _bool,
        "1: layers leave out tokens that attention's mask hides, where nobody can see the difference; a step may take "
        "5 % more memory (docs/SPARSITY.md). 0 (default): all tokens",
    ),
    Row(
        "PRECISION",
        "precision",
        "bf16",
        _one_of("bf16"),
        "bf16: forward runs as under torch.autocast(..., torch.bfloat16), where the caller has no autocast of its own; "
        "a loss outside of forward does not",
    ),
    Row(
        "CUDA_ENGINE",
        "cuda_engine",
        "0 or 1",
        _bool,
        "1 (default): modules on a CUDA device run in the engine where it has kernels for the GPU and its driver "
        "(docs/GPU_STATUS.md); else, and with 0, in PyTorch",
    ),
    Row(
        "CUDA_GRAPHS",
        "cuda_graphs",
        "0 or 1",
        _bool,
        "1 (default): on a CUDA device, steps that repeat their addresses are launched as CUDA graphs, with the same "
        "bits; report() says where that was given up and why. 0: every kernel is launched by itself",
    ),
    Row(
        "CUDA_CHAINS",
        "cuda_chains",
        "compiled or interpreted",
        _one_of("compiled", "interpreted"),
        "compiled (default): on a CUDA device, chains of elementwise operators over many elements are compiled by "
        "NVRTC, which comes with PyTorch, when they are first met; the same bits. interpreted: by one kernel for all",
    ),
    Row(
        "CUDA_CACHE",
        "cuda_cache",
        "a directory",
        str,
        "where compiled chains are kept between processes; an empty one: nowhere (default: ~/.cache/ortmodule)",
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
        "generic, avx2, avx512 or avx512_bf16",
        _one_of("generic", "avx2", "avx512", "avx512_bf16"),
        "highest instruction set the kernels may use (avx512: without AVX512_BF16 and AMX; avx512_bf16: without AMX)",
    ),
    Row(
        "GEMM",
        "",
        "own, blas or host",
        _one_of("own", "blas", "host"),
        "force the matrix multiplication provider (host: PyTorch's bf16 product, and its convolution in fp32 "
        "and bf16; own: on AMX also the engine's bf16 product on tiles, which is as fast in large models)",
    ),
    Row(
        "DUMP_PASSES",
        "",
        "a directory that can be written",
        _directory,
        "write the graph there as text, before and after each rewrite that changes it: "
        "`<process>/<n>-<rewrite>-before.txt`, `-after.txt`, and the list in `index.txt` (docs/LOOKING_IN.md)",
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

# Names that onnxruntime-training had; what each of them turns off.
SPARSITY = {
    "ENABLE_COMPUTE_OPTIMIZER": ("label_sparsity", "padding_sparsity"),
    "ENABLE_SPARSE_OPTIMIZER": ("label_sparsity", "padding_sparsity"),
    "ENABLE_LABEL_SPARSE_OPTIMIZER": ("label_sparsity",),
    "ENABLE_EMBEDDING_SPARSE_OPTIMIZER": ("padding_sparsity",),
}

# Known to onnxruntime-training, without effect here.
WITHOUT_EFFECT = {PREFIX + v.name: v.why for v in VARIABLES if v.kept == "no"}


@dataclass(frozen=True)
class Settings:
    """How one ORTModule behaves. Build with `resolve`."""

    strict: bool | Literal["engine"] = False
    min_coverage: float = 0.0
    disable: bool = False
    segment_mb: float = 25.0
    max_captures: int = 8
    capture_seconds: float = 300.0
    recheck: bool = True
    memory_opt_level: int = 0
    memory_budget: str | int | None = None
    memory_opt_config: str | None = None
    keep_memory: float = 2.0
    label_sparsity: bool = True
    padding_sparsity: bool = False
    precision: Literal["bf16"] | None = None
    cuda_engine: bool = True
    cuda_graphs: bool = True
    cuda_chains: Literal["compiled", "interpreted"] = "compiled"
    cuda_cache: str = "~/.cache/ortmodule"
    log_level: LogLevel | None = None
    save_path: str | None = None
    save_prefix: str = ""  # empty: the class's name
    fallback_policy: FallbackPolicy = fallback.ORTMODULE_FALLBACK_POLICY
    fallback_retry: bool = False
    asked_strict: bool | Literal["engine"] = False  # `strict` without what the policy makes of it

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTIONS)

    def allows(self, category: Category) -> bool:
        """Does the policy leave failures of this category to PyTorch?"""
        return fallback.allows(self.fallback_policy, category)


OPTIONS = tuple(f.name for f in dataclasses.fields(Settings) if f.name != "asked_strict")


def with_policy(settings: Settings, policy: FallbackPolicy) -> Settings:
    """A policy that does not leave to PyTorch what cannot be captured is strict."""
    strict = settings.asked_strict or not fallback.allows(policy, fallback.ONNX_MODEL)
    return dataclasses.replace(settings, fallback_policy=policy, strict=strict)


def with_debug_options(settings: Settings, debug: DebugOptions) -> Settings:
    saved = debug.save_onnx_models
    path, prefix = (saved.path, saved.name_prefix) if saved.save else (None, "")
    return dataclasses.replace(settings, log_level=debug.logging.log_level, save_path=path, save_prefix=prefix)


_warned: set[str] = set()


def resolve(
    options: Mapping[str, Any], debug: DebugOptions | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from keyword arguments, then `debug`, then the environment (which wins).

    Raises TypeError for an option that does not exist, ValueError for a value that is not allowed.
    """
    env = os.environ if environ is None else environ
    unknown = set(options) - set(OPTIONS)
    if unknown:
        guess = {name: difflib.get_close_matches(name, OPTIONS, 1) for name in sorted(unknown)}
        named = ", ".join(f"{name} (did you mean {n[0]}?)" if n else name for name, n in guess.items())
        raise TypeError(f"ORTModule got unknown options: {named}; allowed: {', '.join(sorted(OPTIONS))}")
    values = {k: v for k, v in options.items() if v is not None}
    values.setdefault("fallback_policy", fallback.ORTMODULE_FALLBACK_POLICY)
    values.setdefault("fallback_retry", fallback.ORTMODULE_FALLBACK_RETRY)
    if debug is not None:
        if not isinstance(debug, DebugOptions):
            raise TypeError(f"debug_options must be a DebugOptions, got {type(debug).__name__}; give "
                            "DebugOptions(log_level=LogLevel.INFO, save_onnx=..., onnx_prefix=...)")
        values.setdefault("log_level", debug.log_level)
        if debug.save_onnx:
            values.setdefault("save_path", debug.save_onnx_models.path)
            values.setdefault("save_prefix", debug.onnx_prefix)
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
    for name, off in SPARSITY.items():
        try:
            if env.get(PREFIX + name):
                if not _bool(env[PREFIX + name]):
                    values.update(dict.fromkeys(off, False))
                elif off == ("padding_sparsity",):  # the others are on
                    values["padding_sparsity"] = True
        except ValueError:
            raise ValueError(f"{PREFIX}{name}={env[PREFIX + name]!r} is not allowed; give 0 or 1") from None
    rows = {PREFIX + row.name for row in TABLE} | {PREFIX + v.name for v in VARIABLES if v.kept != "no"}
    for name in env:
        if name.startswith(PREFIX) and name not in rows and name not in _warned:
            _warned.add(name)
            if name in WITHOUT_EFFECT:
                what = f"has no effect here: {WITHOUT_EFFECT[name]}"
            else:
                near = difflib.get_close_matches(name[len(PREFIX) :], [r[len(PREFIX) :] for r in sorted(rows)], 1)
                told = f"; the nearest is {PREFIX}{near[0]}" if near else ""
                what = f"is unknown{told}; known: {', '.join(sorted(rows))}"
            logger.warning("environment variable %s %s", name, what)
    settings = Settings(**values, asked_strict=values.get("strict", False))
    if settings.strict not in (False, True, "engine"):
        raise ValueError(f"strict={settings.strict!r} is not allowed; give False, True or 'engine'")
    if not 0 <= settings.min_coverage <= 1:
        raise ValueError(f"min_coverage={settings.min_coverage!r} is not allowed; give a number from 0 to 1")
    if settings.segment_mb <= 0:
        raise ValueError(f"segment_mb={settings.segment_mb!r} is not allowed; give a number > 0")
    if settings.max_captures < 1:
        raise ValueError(f"max_captures={settings.max_captures!r} is not allowed; give an integer >= 1")
    if not settings.capture_seconds > 0:
        raise ValueError(f"capture_seconds={settings.capture_seconds!r} is not allowed; give a number > 0")
    if settings.precision not in (None, "bf16"):
        raise ValueError(f"precision={settings.precision!r} is not allowed; give None or 'bf16'")
    if settings.memory_opt_level not in (0, 1, 2):
        raise ValueError(f"memory_opt_level={settings.memory_opt_level!r} is not allowed; give 0, 1 or 2")
    if not settings.keep_memory >= 0:
        raise ValueError(f"keep_memory={settings.keep_memory!r} is not allowed; give seconds >= 0")
    if settings.memory_opt_config is not None:
        read_config(settings.memory_opt_config)
        if settings.memory_opt_level == 1 or settings.memory_budget is not None:
            logger.warning("memory_opt_config=%s has no effect beside memory_opt_level=1 or memory_budget",
                           settings.memory_opt_config)  # fmt: skip
    if settings.memory_budget is not None:
        parse_budget(settings.memory_budget)
        if settings.memory_opt_level:
            logger.info("memory_budget decides what is computed again; memory_opt_level=%d has no effect beside it",
                        settings.memory_opt_level)  # fmt: skip
    if not isinstance(settings.fallback_policy, FallbackPolicy):
        raise ValueError(f"fallback_policy={settings.fallback_policy!r} is not allowed; give a FallbackPolicy, as "
                         "FallbackPolicy.FALLBACK_DISABLE")
    return with_policy(settings, settings.fallback_policy)


_KEPT = {"same": "same", "nearest": "nearest", "no": "not kept"}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


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
    lines += [f"| `{PREFIX}{row.name}` | {_cell(row.allowed)} | {_cell(row.doc)} |" for row in TABLE]
    lines += [
        "",
        "## Variables of onnxruntime-training 1.19.2",
        "",
        "A variable that is not kept is named in the log, once, with the reason. One that neither program knows is "
        "named with the nearest that is known.",
        "",
        "| variable | here | what differs, or why |",
        "|---|---|---|",
    ]
    lines += [f"| `{PREFIX}{v.name}` | {_KEPT[v.kept]} | {_cell(v.why)} |" for v in VARIABLES]
    return "\n".join(lines) + "\n"
