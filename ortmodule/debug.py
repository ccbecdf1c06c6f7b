"""DebugOptions, as in onnxruntime-training: the level of the logger, and files of the graph at every stage."""

from __future__ import annotations

import enum
import logging
import os
import sys
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("ortmodule")


class LogLevel(enum.IntEnum):
    """Names as in onnxruntime-training; the values are logging's."""

    VERBOSE = logging.DEBUG
    DEVINFO = logging.INFO - 5
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    FATAL = logging.CRITICAL


class SaveOptions(NamedTuple):
    """DebugOptions.save_onnx_models."""

    save: bool
    name_prefix: str
    path: str


class LoggingOptions(NamedTuple):
    """DebugOptions.logging."""

    log_level: LogLevel


class DebugOptions:
    """log_level: of the logger 'ortmodule'; ORTMODULE_LOG_LEVEL wins. save_onnx: write every graph, at each stage,
    under names that begin with onnx_prefix, into save_path (the current directory when empty; ORTMODULE_SAVE_ONNX_PATH
    wins). config is not used.

    Raises TypeError and ValueError for what is not allowed, OSError for a directory that cannot be written.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(log_level)}. Give LogLevel.INFO, for "
                            "instance.")
        self.log_level = log_level
        self.save_onnx = save_onnx
        self.onnx_prefix = onnx_prefix
        path = os.getenv("ORTMODULE_SAVE_ONNX_PATH") or save_path or os.getcwd()
        level = os.getenv("ORTMODULE_LOG_LEVEL")
        self._save = SaveOptions(save_onnx, onnx_prefix, path)
        if level and level.strip().upper() not in LogLevel.__members__:
            raise KeyError(f"ORTMODULE_LOG_LEVEL={level!r} is not allowed; give {', '.join(LogLevel.__members__)}")
        self._logging = LoggingOptions(LogLevel[level.strip().upper()] if level else log_level)
        if not save_onnx:
            return
        if not os.access(path, os.W_OK):
            raise OSError(
                f"Directory {path} is not writable. Please set the ORTMODULE_SAVE_ONNX_PATH environment variable to a "
                "writable path."
            )
        if not isinstance(onnx_prefix, str):
            raise TypeError(f"Expected name prefix of type str, got {type(onnx_prefix)}. File names begin with it.")
        if not onnx_prefix:
            raise ValueError("onnx_prefix must be provided when save_onnx is set.")

    def __repr__(self) -> str:
        return (
            f"DebugOptions(log_level={self.log_level!r}, save_onnx={self.save_onnx}, onnx_prefix={self.onnx_prefix!r}, "
            f"save_path={self._save.path!r})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DebugOptions) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.log_level, self._save))

    @property
    def save_onnx_models(self) -> SaveOptions:
        """Whether, under which names and where graphs are saved."""
        return self._save

    @property
    def logging(self) -> LoggingOptions:
        """The level, after the environment."""
        return self._logging

    @property
    def torch_exporter_filter(self) -> list[str] | None:
        """Nothing of the exporter's output is filtered by its text."""
        return None

    @property
    def onnxruntime_log_filter(self) -> list[str] | None:
        return None


class _FirstRank(logging.Filter):
    """At level INFO and above the other processes of a group keep silent, but for errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR or logger.level < logging.INFO:
            return True
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not distributed or torch.distributed.get_rank() == 0


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Where nobody has set up logging, a level that was asked for is shown; Python alone shows warnings and worse."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("ortmodule %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            self.setStream(sys.stderr)  # as it is now
            super().emit(record)


def set_level(level: int) -> None:
    """Of the logger 'ortmodule', as the user has asked."""
    logger.setLevel(level)
    if not any(isinstance(f, _FirstRank) for f in logger.filters):
        logger.addFilter(_FirstRank())
    if level < logging.WARNING and not logger.handlers:
        logger.addHandler(_Stderr())
