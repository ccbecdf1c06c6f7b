"""Packaging. The Makefile knows how to build the extension; this only asks it to, and says where the packages lie."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class MakeExt(build_ext):
    """Builds ortmodule/_C.abi3.so with make, then copies it where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        subprocess.run(["make", "-C", str(ROOT), f"-j{os.cpu_count() or 1}", "ext", f"PY={sys.executable}", "VENV_STAMP="], check=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        built = ROOT / "ortmodule" / "_C.abi3.so"
        if built.resolve() != target.resolve():
            shutil.copy2(built, target)
            if shutil.which("strip"):  # the wheel carries no debug information
                subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)


setup(
    ext_modules=[Extension("ortmodule._C", ["csrc/pymodule.c"], py_limited_api=True)],
    cmdclass={"build_ext": MakeExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
