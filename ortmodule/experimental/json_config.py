"""load_from_json: the settings of an ORTModule from a file, in onnxruntime-training's form.

FallbackPolicy and DebugOptions are taken as they stand there. The other keys switch parts of onnxruntime that have no
counterpart: their values are checked as they were there, and one message names them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

from ..compat.build import PropagateCastOpsStrategy
from ..config import DebugOptions, LogLevel, SkipCheck, with_debug_options, with_policy
from ..debug import set_level
from ..fallback import policy_of
from ..module import ORTModule

logger = logging.getLogger("ortmodule")
JSON_PATH_ENVIRONMENT_KEY = "ORTMODULE_JSON_CONFIG_PATH"


def _bool(key: str, value: Any) -> None:
    assert isinstance(value, bool), f"{key} must be a boolean"


def _int(key: str, value: Any) -> None:
    assert isinstance(value, int) and not isinstance(value, bool), f"{key} must be an int"


def _casts(key: str, value: dict[str, Any]) -> None:
    for name, part in value.items():
        if name == "Strategy":
            PropagateCastOpsStrategy[part]
        elif name == "Level":
            _int(f"{key}.Level", part)
        elif name != "Allow":
            raise KeyError(f"{key}.{name}")


def _skips(_: str, value: list[str]) -> None:
    for name in value:
        SkipCheck[name]


_WITHOUT_EFFECT: dict[str, Callable[[str, Any], None]] = {
    "PropagateCastOps": _casts,
    "UseExternalGPUAllocator": _bool,
    "EnableCustomAutogradFunction": _bool,
    "EnableGradAccOptimization": _bool,
    "UseStaticShape": _bool,
    "RunSymbolicShapeInference": _bool,
    "SkipCheck": _skips,
    "UseMemoryEfficientGradient": _bool,
    "OnnxOpsetVersion": _int,
}
_DEBUG = {"LogLevel": "log_level", "SaveONNX": "save_onnx", "ONNXPrefix": "onnx_prefix", "SaveONNXPath": "save_path"}


def _debug_options(value: dict[str, Any]) -> DebugOptions:
    given = {_DEBUG[name]: part for name, part in value.items()}
    if "log_level" in given:
        given["log_level"] = LogLevel[given["log_level"]]
    return DebugOptions(**given)


def load_from_json(ortmodule: ORTModule, path: str | os.PathLike[str] | None = None) -> None:
    """Reads the file (ORTMODULE_JSON_CONFIG_PATH wins over `path`) and applies it to the module, for what is captured
    from now on. A second file overrides what it names.

    Raises ValueError without a path, KeyError for a key or name that is unknown, AssertionError for a value of a wrong
    type.
    """
    path = os.getenv(JSON_PATH_ENVIRONMENT_KEY, path)  # type: ignore[arg-type]
    if path is None:
        raise ValueError(
            f"Path to json is not provided. Give it to load_from_json, or set {JSON_PATH_ENVIRONMENT_KEY}"
        )
    with open(path, encoding="utf-8") as file:
        try:
            data: dict[str, Any] = json.load(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from error
    state = ortmodule._ortmodule
    settings = state.settings
    idle = []
    for key, value in data.items():
        if key == "FallbackPolicy":
            if value:
                settings = with_policy(settings, policy_of("|".join(value)))
        elif key == "DebugOptions":
            settings = with_debug_options(settings, _debug_options(value))
        elif key in _WITHOUT_EFFECT:
            _WITHOUT_EFFECT[key](key, value)
            idle.append(key)
        else:
            raise KeyError(f"{key} of {os.fspath(path)} is unknown; allowed: FallbackPolicy, DebugOptions, "
                           f"{', '.join(_WITHOUT_EFFECT)}")
    state.settings = settings
    if "DebugOptions" in data and settings.log_level is not None:
        set_level(settings.log_level)
    if idle:
        logger.info("%s: without effect here: %s (docs/COMPATIBILITY.md)", path, ", ".join(idle))


load_config_from_json = load_from_json
