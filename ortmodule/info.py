"""python -m ortmodule.info: what is installed and what is set, for a report of an error."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

from . import __version__

_BESIDE = ("torch", "onnx", "numpy", "transformers", "accelerate", "peft", "lightning", "deepspeed", "onnxruntime",
           "onnxruntime-training", "torch-ort")  # fmt: skip


def _versions() -> list[tuple[str, str]]:
    rows = []
    for name in _BESIDE:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return rows


def rows() -> list[tuple[str, str]]:
    """What is told, by name."""
    told = [
        ("ortmodule", f"{__version__} ({os.path.dirname(os.path.abspath(__file__))})"),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", platform.platform()),
        *_versions(),
    ]
    try:
        import torch

        from . import _C, torch_private

        told.append(("instruction set", _C.isa()))
        told.append(("threads", str(torch.get_num_threads())))
        told.append(("cuda kernels", _C.cuda_archs() or "none"))
        told.append(("cuda devices", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
                     or "none"))  # fmt: skip
        told += [("missing in torch", text) for text in torch_private.missing()]
    except Exception as error:
        told.append(("engine", f"does not load: {type(error).__name__}: {error}"))
    try:
        from . import config

        told.append(("settings", str(config.resolve({}))))
    except Exception as error:
        told.append(("settings", f"not allowed: {error}"))
    told += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(("ORTMODULE_", "OMP_"))]
    return told


def main() -> None:
    what = "What is installed and what is set, for a report of an error."
    argparse.ArgumentParser(prog="python -m ortmodule.info", description=what).parse_args()
    for name, value in rows():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
