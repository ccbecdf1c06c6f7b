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
    """Builds the extension with make: in build/ and ortmodule/ for an editable install, otherwise in a folder of its
    own: both may run at once."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["make", "-C", str(ROOT), f"-j{os.cpu_count() or 1}", "ext", f"PY={sys.executable}"]
        if not self.inplace:
            command += [f"B={os.path.relpath(self.build_temp, ROOT)}/make", f"EXT={os.path.relpath(target, ROOT)}"]
        # an outer make's flags are for its own targets (B=, a job server that is not handed on); NVCC=, CC= and their
        # like come by the environment
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        subprocess.run(command, check=True, env=env)
        if not self.inplace and shutil.which("strip"):  # the wheel carries no debug information
            subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)


setup(
    ext_modules=[Extension("ortmodule._C", ["csrc/python/pymodule.c"], py_limited_api=True)],
    cmdclass={"build_ext": MakeExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
