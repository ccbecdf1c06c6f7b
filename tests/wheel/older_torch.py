"""An older PyTorch's Python files on the libraries of the PyTorch that is installed: what `torch.export`, FakeTensor, the
decompositions and nn.Module of that version do with this package can then be run, where no CPU build of it for this
machine can be had. The libraries stay the installed ones: kernels, dispatcher and autograd engine of the older version
are not tried.

    python tests/wheel/older_torch.py torch-2.12.1-cp311-cp311-macosx_14_0_arm64.whl DIRECTORY

Any wheel of that version will do whose Python is this one's; afterwards PYTHONPATH=DIRECTORY has `import torch` be it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from pathlib import Path

DOCS = ("_tensor_docs.py", "_torch_docs.py", "_storage_docs.py")  # texts for the names that the libraries have
# what these Python files expect of their own libraries, put in the place where it is first asked for
BESIDE = {
    "_tensor.py": """
if not hasattr(Tensor, "has_names"):  # named tensors went with 2.13
    Tensor.has_names = lambda self: False
""",
    "_prims/rng_prims.py": """
from torch._opaque_base import OpaqueBaseMeta
torch._C._set_generator_metaclass(OpaqueBaseMeta)  # 2.13's libraries want it before a Generator is made
""",
    "autograd/function.py": """
FunctionCtx.boxed_grads_call = False  # 2.13's libraries ask for it
""",
}
BEFORE = {
    "_dynamo/__init__.py": """
import torch._C._dynamo.eval_frame as _frames
for _name in ("_EvalFrameOverride", "set_eval_frame_override"):  # of torch.compile, which is not tried
    if not hasattr(_frames, _name):
        setattr(_frames, _name, lambda *_: None)
""",
}


def lay(wheel: Path, to: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "no torch is installed"
    installed = Path(spec.origin).parent
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if name.startswith(("torch/", "torchgen/", "functorch/", "torch-")) and name.endswith((".py", ".pyi", ".json", "METADATA")):
                z.extract(name, to)
    torch = to / "torch"
    for path in [*installed.glob("lib/**/*"), *installed.glob("_C*.so"), *installed.glob("bin/torch_shm_manager")]:
        target = torch / path.relative_to(installed)
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target)  # not a symbolic link: the libraries look for each other beside themselves
            except OSError:  # another file system
                shutil.copy2(path, target)
    for name in DOCS:
        (torch / name).write_bytes((installed / name).read_bytes())
    for name, text in BESIDE.items():
        (torch / name).write_text((torch / name).read_text() + text)
    for name, text in BEFORE.items():
        (torch / name).write_text(text + (torch / name).read_text())


if __name__ == "__main__":
    lay(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
