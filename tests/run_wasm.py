"""Runs a WASI program with the wasmtime package: run_wasm.py PROGRAM.wasm ARGUMENT... Directories of arguments that are
files are open to it."""

from __future__ import annotations

import sys
from pathlib import Path

from wasmtime import Engine, ExitTrap, Linker, Module, Store, WasiConfig


def main(program: str, *arguments: str) -> int:
    engine = Engine()
    linker, store = Linker(engine), Store(engine)
    linker.define_wasi()
    wasi = WasiConfig()
    wasi.argv = [program, *arguments]
    for folder in {str(Path(a).resolve().parent) for a in arguments if Path(a).exists()}:
        wasi.preopen_dir(folder, folder)
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    store.set_wasi(wasi)
    start = linker.instantiate(store, Module.from_file(engine, program)).exports(store)["_start"]
    try:
        start(store)  # type: ignore[operator]
    except ExitTrap as end:
        return int(end.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
