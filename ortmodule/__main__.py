"""python -m ortmodule: what else is run so, a line each."""

from __future__ import annotations

import argparse

TOOLS = {
    "ortmodule.info": "what is installed and what is set, for a report of an error",
    "ortmodule.selftest": "does what is installed here work? small models beside PyTorch, in half a minute",
    "ortmodule.compat": "script.py arguments... (or -m module): a script of onnxruntime-training's, unchanged",
    "ortmodule.compat.merge": "what StatisticsSubscriber wrote in two runs, side by side",
    "ortmodule.torch_cpp_extensions.install": "a check of the installation, where old scripts build extensions",
}


def main() -> None:
    width = max(map(len, TOOLS))
    lines = [f"python -m {name:{width}}  {what}" for name, what in TOOLS.items()]
    parser = argparse.ArgumentParser(prog="python -m ortmodule", description="\n".join(lines),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
