"""Familiar imports: `onnxruntime.training...` and `torch_ort` served by ortmodule when they are not installed.

    import ortmodule.compat                                         in the script, before the imports to serve
    python -m ortmodule.compat script.py arguments...               or without touching it

A finder at the end of sys.meta_path answers only for the names of the table below, and only when no other finder knows
them: an installed onnxruntime-training or torch-ort wins. The plain onnxruntime package may be installed; only its
missing `training` is added. A process that multiprocessing starts by spawn or forkserver imports the script without
this module: there the script needs the import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
from types import ModuleType

_OPTIM = "ortmodule.optim"
# module -> {name: (home, name there)}; a package also has the rows below it as attributes
_NAMES: dict[str, dict[str, tuple[str, str]]] = {
    "onnxruntime": {},
    "onnxruntime.training": {"ORTModule": ("ortmodule", "ORTModule")},
    "onnxruntime.training.ortmodule": {n: ("ortmodule", n) for n in ("ORTModule", "DebugOptions", "LogLevel")},
    "onnxruntime.training.optim": {
        n: (_OPTIM, n)
        for n in (
            "AdamWMode",
            "FusedAdam",
            "FusedLAMB",
            "FP16_Optimizer",
            "ConstantWarmupLRScheduler",
            "CosineWarmupLRScheduler",
            "LinearWarmupLRScheduler",
            "PolyWarmupLRScheduler",
        )
    },
    "onnxruntime.training.optim.fused_adam": {n: (_OPTIM, n) for n in ("FusedAdam", "AdamWMode")},
    "onnxruntime.training.optim.fp16_optimizer": {"FP16_Optimizer": (_OPTIM, "FP16_Optimizer")},
    "onnxruntime.training.optim.lr_scheduler": {
        n: (_OPTIM, n)
        for n in (
            "ConstantWarmupLRScheduler",
            "CosineWarmupLRScheduler",
            "LinearWarmupLRScheduler",
            "PolyWarmupLRScheduler",
        )
    },
    "onnxruntime.training.amp": {n: (_OPTIM, n) for n in ("DynamicLossScaler",)},
    "onnxruntime.training.amp.loss_scaler": {"DynamicLossScaler": (_OPTIM, "DynamicLossScaler")},
    "onnxruntime.training.api": {
        n: ("ortmodule.api", n) for n in ("CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "set_seed")
    },
    "onnxruntime.training.artifacts": {
        n: ("ortmodule.artifacts", n) for n in ("LossType", "OptimType", "generate_artifacts")
    },
    "onnxruntime.training.onnxblock": {
        n: ("ortmodule.onnxblock", n)
        for n in (
            "Block", "PassThrough", "Add", "Sub", "Mul", "Div", "Pow", "Sigmoid", "Log", "Neg", "Abs", "ReduceMean",
            "ReduceSum", "Constant", "Cast", "InputLike")  # fmt: skip
    },
    "onnxruntime.training.onnxblock.loss": {
        n: ("ortmodule.onnxblock", n) for n in ("MSELoss", "L1Loss", "CrossEntropyLoss", "BCEWithLogitsLoss")
    },
    "torch_ort": {n: ("ortmodule", n) for n in ("ORTModule", "DebugOptions", "LogLevel")},
    "torch_ort.optim": {n: (_OPTIM, n) for n in ("FusedAdam", "AdamWMode", "FP16_Optimizer")},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _NAMES:
            return None
        is_package = any(other.startswith(name + ".") for other in _NAMES)
        return importlib.machinery.ModuleSpec(name, self, origin="ortmodule.compat", is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = _NAMES[module.__name__]

        def load(name: str) -> object:
            below = f"{module.__name__}.{name}"
            if below in _NAMES:
                return importlib.import_module(below)
            if name not in names:
                raise AttributeError(
                    f"module {module.__name__!r} (served by ortmodule.compat) has no attribute {name!r}; it has: "
                    f"{', '.join(names)}"
                )
            home, attribute = names[name]
            value = getattr(importlib.import_module(home), attribute)
            setattr(module, name, value)
            return value

        module.__getattr__ = load  # type: ignore[method-assign]
        module.__all__ = list(names)  # type: ignore[attr-defined]


def install() -> None:
    """Adds the finder; once is enough."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


install()


class _Arguments(list[str]):
    """sys.argv of the script. Processes that it spawns get it pickled before they run the script, and so import this
    module in time."""


def main() -> None:
    """python -m ortmodule.compat script.py arguments..."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m ortmodule.compat script.py [arguments]   (or -m module [arguments])")
    sys.argv = _Arguments(sys.argv[1:])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        import os

        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # `python -m` runs this file as __main__; the finder in sys.meta_path must be the imported module's, so that it is
    # not added twice.
    from ortmodule.compat import main as run

    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "__main__"]
    run()
