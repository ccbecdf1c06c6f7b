"""The names of an older PyTorch that this package uses and that are not public: which of them has it?

    PYTHONPATH=LAID python tests/wheel/private_names.py WHEEL     (LAID by older_torch.py from the same wheel)

Names of Python are looked up in its Python files, names of torch._C and of the C interface as words of the wheel's
libraries. Prints a line; exit status 1 when a name is missing that stands in nothing's place.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import torch

from ortmodule import torch_private as private

C_NAMES = ("torch_parallel_for", "torch_get_num_threads", "__dlpack_c_exchange_api__",  # csrc/python, by dlsym
           "aoti_torch_create_tensor_from_blob", "aoti_torch_delete_tensor_object", "aoti_torch_cpu_mm_out",
           "aoti_torch_cpu_addmm_out", "aoti_torch_dtype_bfloat16", "aoti_torch_device_type_cpu")  # fmt: skip


def words(wheel: Path) -> set[bytes]:
    found: set[bytes] = set()
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if re.search(r"libtorch_(python|cpu)\.|torch_(python|cpu)\.dll|/_C/.*\.pyi$|/_tensor\.py$", name):
                found |= set(re.findall(rb"[A-Za-z_][A-Za-z0-9_]{4,}", z.read(name)))
    return found | {word[1:] for word in found if word.startswith((b"_torch_", b"_aoti_"))}


def main() -> int:
    there, lost, count = words(Path(sys.argv[1])), [], len(C_NAMES)
    for name in C_NAMES:
        if name.encode() not in there:
            lost.append(name)
    for row in private.TABLE:
        for name in row.names:
            count += 1
            last = [part for part in name.split(".") if part not in ("__get__", "__func__")][-1]
            if name.startswith("torch._C") or last in ("_backward_hooks", "_version", "_is_zerotensor", "_cdata"):
                known = last.encode() in there or private._look_up(name)[0] is not private._ABSENT and not name.startswith("torch._C")
            else:
                known = private._look_up(name)[0] is not private._ABSENT
            if not known and row.instead is None:
                lost.append(name)
        if not private.has(row.field) and row.instead is None:  # its probe as well
            lost.append(f"{row.field} (another one)")
    print(f"{count} names of torch {torch.__version__} that are not public: " + (f"lacks {', '.join(lost)}" if lost else "all are there"))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
