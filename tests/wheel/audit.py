"""Where will this wheel (or extension) load? Size, tag, libraries and glibc that it asks for, by objdump.

    python tests/wheel/audit.py dist/ortmodule-*.whl        exit status 1 and a sentence when a promise is broken
    python tests/wheel/audit.py --tag dist/ortmodule-*.whl  ... and when none is, names it manylinux_2_28 for an index
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

GLIBC = (2, 28)  # torch's own wheels ask for it
WHEEL = 20_000_000  # bytes, of a wheel without CUDA kernels, or with
LIBRARIES = re.compile(r"(libc|libm|libpthread|libdl|ld-linux-[a-z0-9_-]+)\.so\.\d")


def broken(extension: Path) -> list[str]:
    """What keeps the extension from machines that it is promised to."""
    head = subprocess.run(["objdump", "-p", extension], check=True, capture_output=True, text=True).stdout
    names = subprocess.run(["objdump", "-T", extension], check=True, capture_output=True, text=True).stdout
    found = [f"needs the library {lib}" for lib in re.findall(r"NEEDED\s+(\S+)", head) if not LIBRARIES.fullmatch(lib)]
    found += [f"carries a search path: {line.strip()}" for line in head.splitlines() if re.search(r"\bR(UN)?PATH\b", line)]
    for version, name in re.findall(r"\*UND\*\s+\S+\s+\(?GLIBC_([\d.]+)\)?\s+(\S+)", names):
        if tuple(map(int, version.split("."))) > GLIBC:
            found.append(f"needs {name} of glibc {version} (csrc/python/glibc.c)")
    exported = re.findall(r"^\S+\s+g\s+DF?O?\s+\.\S+\s+\S+\s+(?:\S+\s+)?(\S+)$", names, re.M)
    found += [f"exports {name}" for name in exported if not name.startswith(("PyInit_", "om_"))]
    return found


def newest(extension: Path) -> str:
    names = subprocess.run(["objdump", "-T", extension], check=True, capture_output=True, text=True).stdout
    return max(re.findall(r"GLIBC_([\d.]+)", names), key=lambda v: tuple(map(int, v.split("."))))


def main() -> int:
    tag, path = "--tag" in sys.argv, Path(sys.argv[-1])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        extension = path
        if path.suffix == ".whl":
            if path.stat().st_size > WHEEL:
                found.append(f"the wheel has {path.stat().st_size} bytes")
            if "-cp310-abi3-" not in path.name:
                found.append("the wheel is not for the stable interface of Python 3.10")
            with zipfile.ZipFile(path) as z:
                extension = Path(z.extract("ortmodule/_C.abi3.so", folder))
                (metadata,) = [z.read(n).decode() for n in z.namelist() if n.endswith(".dist-info/METADATA")]
            for field in ("Summary", "License-Expression", "Requires-Python", "Description-Content-Type", "Classifier", "Keywords"):
                if f"\n{field}: " not in metadata:
                    found.append(f"an index shows nobody its {field}")
        found += broken(extension)
        if not found:
            print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, glibc {newest(extension)} and later, CPython 3.10 and later (abi3)")
    for sentence in found:
        print(f"{path.name}: {sentence}")
    if tag and not found:
        machine = path.stem.rpartition("linux_")[2]
        subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}", path], check=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
