"""A plugin of pytest: ortmodule._C is build/amx.so, the engine with AMX tiles emulated (csrc/cpu/kernels/amx.h).

    ORTMODULE_GEMM=own PYTHONPATH=tests python -m pytest -p amx_engine tests/module/test_mixed.py
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "build" / "amx.so"


def install() -> None:
    loader = importlib.machinery.ExtensionFileLoader("ortmodule._C", str(PATH))
    spec = importlib.util.spec_from_loader("ortmodule._C", loader)
    assert spec
    sys.modules["ortmodule._C"] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules["ortmodule._C"])


install()
