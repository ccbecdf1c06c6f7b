"""onnxruntime-training compiled extensions of PyTorch after its installation. Here there is one, and it comes compiled:
`python -m ortmodule.torch_cpp_extensions.install` checks it."""

from __future__ import annotations

import os
from glob import glob


def is_installed(torch_cpp_extension_path: str | os.PathLike[str]) -> bool:
    """Does a compiled extension lie in this directory?"""
    return any(glob(os.path.join(torch_cpp_extension_path, f"*.{end}")) for end in ("so", "dll", "dylib", "pyd"))
