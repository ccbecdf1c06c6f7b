"""Settings: one table of environment variables, one parser, one printable object.

An option reaches ORTModule as a keyword argument; the environment variable of the same row overrides it, so that a
script can be steered from outside. Every value is read by its row, text of an option as a variable's text; one that is
not allowed raises ValueError (TypeError: of a wrong type), naming the option or variable, what was given and what is
allowed. A variable that starts with ORTMODULE_ and stands in no row is reported once (a typo must not pass for a
setting), unless it is one that onnxruntime-training knew: then the report says that it has no effect here.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from . import fallback
from .debug import DebugOptions, LogLevel
from .fallback import Category, FallbackPolicy, policy_of
from .memory import ALLOWED as BUDGET
from .memory import parse as parse_budget
from .memory_table import FORMAT
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
    """One setting."""

    name: str  # of the variable, without the prefix; "" = there is none
    field: str  # of Settings; "" = read where it is used: by the C engine, by ortmodule/api.py
    allowed: str
    parse: Callable[[Any], Any]  # of text or another value -> the field's; ValueError (why, or nothing) or TypeError
    doc: str

    def read(self, given: Any, name: str) -> Any:
        """name: under which it was given."""
        try:
            return self.parse(given.item() if isinstance(given, np.generic) else given)
        except (ValueError, TypeError, OverflowError) as error:
            why = f": {error}" if str(error) else ""
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name}={given!r} is not allowed{why}; give {self.allowed}") from None


def _typed(given: Any, *types: type) -> Any:
    if not isinstance(given, types):
        raise TypeError(f"it is of type {type(given).__name__}")
    return given


def _bool(given: Any) -> bool:
    word = str(int(given)) if isinstance(given, int) else _typed(given, str).strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError
    return word in ("1", "true", "yes", "on")


def _strict(given: Any) -> bool | Literal["engine"]:
    return "engine" if isinstance(given, str) and given.strip().lower() == "engine" else _bool(given)


def _number(fits: Callable[[float], bool]) -> Callable[[Any], float]:
    def parse(given: Any) -> float:
        try:
            value = float(_typed(given, str, int, float))
        except (ValueError, OverflowError):
            raise ValueError from None
        if not fits(value):
            raise ValueError
        return value

    return parse


def _integer(least: int, most: float = math.inf) -> Callable[[Any], int]:
    def parse(given: Any) -> int:
        if isinstance(given, str) and not re.fullmatch(r"\s*[+-]?[0-9]{1,99}\s*", given, re.ASCII):
            raise ValueError
        value = int(_typed(given, str, int))
        if not least <= value <= most:
            raise ValueError
        return value

    return parse


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(given: Any) -> str:
        if _typed(given, str) not in words:
            raise ValueError
        return str(given)

    return parse


def _path(given: Any) -> str:
    text: str = _typed(os.fspath(_typed(given, str, os.PathLike)), str)
    if not text or "\0" in text:
        raise ValueError
    return text


def _cache(given: Any) -> str:
    return "" if given == "" else _path(given)


def _clusters(given: Any) -> str:
    path = _path(given)
    read_config(path)
    return path


def _directory(given: Any) -> str:
    path = _path(given)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        raise ValueError from None
    if not os.access(path, os.W_OK):
        raise ValueError
    return path


def _anything(given: Any) -> str:
    return str(_typed(given, str))


def _budget(given: Any) -> str | int:
    try:
        parse_budget(given)
    except ValueError:
        raise ValueError from None
    return int(given) if isinstance(given, str) and given.strip().isdigit() else given  # type: ignore[no-any-return]


def _level(given: Any) -> LogLevel:
    try:
        return LogLevel[given.strip().upper()] if isinstance(given, str) else LogLevel(_typed(given, int))
    except (KeyError, ValueError):
        raise ValueError from None


def _policy(given: Any) -> FallbackPolicy:
    return policy_of(given) if isinstance(given, str) else _typed(given, FallbackPolicy)  # type: ignore[no-any-return]


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
        _number(lambda x: 0 <= x <= 1),
        "raise where a capture leaves the engine less than this share of the nodes (a submodule in PyTorch counts as "
        "many as it has modules), or where the model is left to PyTorch (default 0: never)",
    ),
    Row(
        "FALLBACK_POLICY",
        "fallback_policy",
        ", ".join(FallbackPolicy.__members__) + ", several joined by |",
        _policy,
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
        _number(lambda x: x > 0),
        "megabytes of gradients after which backward hands them out and goes on (default 25, DDP's bucket size)",
    ),
    Row(
        "MAX_CAPTURES",
        "max_captures",
        "an integer >= 1",
        _integer(1),
        "captures of one call structure before it is left to PyTorch (default 8)",
    ),
    Row(
        "CAPTURE_SECONDS",
        "capture_seconds",
        "a number > 0",
        _number(lambda x: x > 0),
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
        _integer(0, 2),
        "1: backward computes transformer layers again from their inputs instead of keeping their values: less memory, "
        "more time, the same bits. "
        "0 (default): only what costs one sweep over memory. 2: as 1 (its compromise about casts is part of 0 here)",
    ),
    Row(
        "MEMORY_BUDGET",
        "memory_budget",
        BUDGET,
        _budget,
        "what a step may take: backward computes again as much as is needed for that, and no more; the same bits. `%`: "
        "of what a step takes without a budget. Goes before MEMORY_OPT_LEVEL (docs/MEMORY.md)",
    ),
    Row(
        "MEMORY_OPT_CONFIG",
        "memory_opt_config",
        FORMAT,
        _clusters,
        "which clusters of operators backward computes again (1; 2: with a compromise at casts) or keeps (0), the "
        "first `count` of them, -1: all; names: the memory table of report(), and of the log at INFO. On top of level "
        "0; level 1 and MEMORY_BUDGET do not ask it (docs/MEMORY.md)",
    ),
    Row(
        "KEEP_MEMORY",
        "keep_memory",
        "seconds >= 0, or inf",
        _number(lambda x: x >= 0),
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
        _cache,
        'where compiled chains are kept between processes (default: ~/.cache/ortmodule); `cuda_cache=""`: nowhere',
    ),
    Row("LOG_LEVEL", "log_level", ", ".join(LogLevel.__members__), _level, "level of the logger 'ortmodule'"),
    Row(
        "SAVE_ONNX_PATH",
        "save_path",
        "a directory",
        _path,
        "write every captured graph there: `<prefix><class>_<n>_<mode>.onnx`",
    ),
    Row("", "save_prefix", "text", _anything, "what the files in save_path begin with; empty: the class's name"),
    Row(
        "ISA",
        "",
        "generic, avx2, avx512 or avx512_bf16",
        _one_of("generic", "avx2", "avx512", "avx512_bf16"),
        "highest instruction set the kernels may use (avx512: without AVX512_BF16 and AMX; avx512_bf16: without AMX). "
        "Read once per process",
    ),
    Row(
        "GEMM",
        "",
        "own, blas or host",
        _one_of("own", "blas", "host"),
        "force the matrix multiplication provider (host: PyTorch's bf16 product, and its convolution in fp32 "
        "and bf16; own: on AMX also the engine's bf16 product on tiles, which is as fast in large models). Read "
        "once per process",
    ),
    Row(
        "DUMP_PASSES",
        "",
        "a directory that can be written",
        _directory,
        "write the graph there as text, before and after each rewrite that changes it: "
        "`<process>/<n>-<rewrite>-before.txt`, `-after.txt`, and the list in `index.txt` (docs/LOOKING_IN.md)",
    ),
    Row(
        "PASS_LIMIT",
        "",
        "an integer from 0 to 2147483647",
        _integer(0, 2**31 - 1),
        "run only the first n rewrites of the graph (to bisect)",
    ),
    Row(
        "VERIFY",
        "",
        "0 or 1",
        _one_of("0", "1"),
        "1: check the graph after every rewrite (to find errors of the engine; captures take longer)",
    ),
    Row(
        "NO_REUSE",
        "",
        "anything",
        _anything,
        "when set, even empty: every value in memory of its own, nothing in place (to find memory errors)",
    ),
    Row(
        "POISON",
        "",
        "anything",
        _anything,
        "when set, even empty: fill memory that is not in use with NaN (to find memory errors). Read once per process",
    ),
    Row(
        "DEVICE_LIBRARY",
        "",
        "a file",
        _anything,
        "a libortmodule.so (`make device`) that `ortmodule.api` takes in the place of the package's own library. Read "
        "when that is imported",
    ),
)
PREFIX = "ORTMODULE_"
_ROWS = {row.field: row for row in TABLE if row.field}

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

    Raises TypeError for an option that does not exist or a value of a wrong type, ValueError for one that is not
    allowed.
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
    values = {name: _ROWS[name].read(given, name) for name, given in values.items()}
    for row in TABLE:
        text = env.get(PREFIX + row.name)
        if not row.name or not text:
            continue
        value = row.read(text, PREFIX + row.name)
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
    rows = {PREFIX + row.name for row in TABLE if row.name} | {PREFIX + v.name for v in VARIABLES if v.kept != "no"}
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
    if settings.memory_opt_config is not None and (
        settings.memory_opt_level == 1 or settings.memory_budget is not None
    ):
        logger.warning("memory_opt_config=%s has no effect beside memory_opt_level=1 or memory_budget",
                       settings.memory_opt_config)  # fmt: skip
    if settings.memory_budget is not None and settings.memory_opt_level:
        logger.info("memory_budget decides what is computed again; memory_opt_level=%d has no effect beside it",
                    settings.memory_opt_level)  # fmt: skip
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
        "variable overrides it. "
        "Text is read alike from both (0 and 1 also as false, no, off and true, yes, on); an empty variable is as one "
        "that is not set.",
        "Generated from the table in `ortmodule/config.py`.",
        "",
        "| variable | values | effect |",
        "|---|---|---|",
    ]
    lines += [f"| `{PREFIX}{row.name}` | {_cell(row.allowed)} | {_cell(row.doc)} |" for row in TABLE if row.name]
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
