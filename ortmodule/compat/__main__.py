"""python -m ortmodule.compat script.py arguments... (or -m module): an old script, unchanged."""

from __future__ import annotations

import os
import runpy
import sys

from .spawned import Arguments

USAGE = "usage: python -m ortmodule.compat script.py [arguments]   (or -m module [arguments])"


def main() -> None:
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in ("-h", "--help"):
        print(f"{USAGE}\n\nRuns a script that was written for onnxruntime-training or torch-ort, unchanged.")
        return
    if not first or first.startswith("-") and first != "-m":
        raise SystemExit(USAGE)
    sys.argv = Arguments(sys.argv[1:])
    if sys.argv[0] == "-m":
        del sys.argv[0]
        if len(sys.argv) == 0:
            raise SystemExit("usage: python -m ortmodule.compat -m module [arguments]")
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
