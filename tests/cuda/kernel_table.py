"""Registers, spills, stack and shared memory of every CUDA kernel, from what ptxas said while they were built
(build/cuda/*.ptxas). Exit status 1: a kernel that a step's time depends on spills more than a call saves.

    make cuda-table
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HOT = re.compile(r"om_k_(strip|strip_large|copy|flip|fill|softmax|norm|loss|gather|scatter|reduce|gemm|conv|attention)")
SPARED = re.compile(r"_f64$|64|_d$|_i$")  # f64 is for tests, integers are rarely summed
AROUND_CALLS = 64  # bytes: the sine of a large number in `strip`, a pair's score in attention


def rows(text: str) -> list[tuple[str, str, int, int, int, int]]:
    """kernel, architecture, registers, spilled bytes, stack, shared"""
    found = []
    for part in text.split("Compiling entry function '")[1:]:
        name, arch = re.match(r"(\w+)' for '(\w+)'", part).groups()  # type: ignore[union-attr]
        stack, store, load = (int(x) for x in re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", part).groups())  # type: ignore[union-attr]
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found.append((name, arch, int(used[1]) if used else 0, store + load, stack, int(shared[1]) if shared else 0))
    return found


def without_tensor_cores(folder: Path) -> list[tuple[str, str]]:
    """Kernels on tensor cores whose machine code (sm_80 and later) has no HMMA; needs cuobjdump and nvdisasm."""
    if not shutil.which("cuobjdump") or not shutil.which("nvdisasm"):
        print("no cuobjdump or nvdisasm: tensor-core instructions were not looked for")
        return []
    counts: dict[tuple[str, str], int] = {}
    for image in sorted(folder.glob("*_mma*.fatbin")):
        arch = name = ""
        with subprocess.Popen(["cuobjdump", "-sass", str(image)], stdout=subprocess.PIPE, text=True) as p:
            for line in p.stdout or ():
                if found := re.search(r"code for (sm_\d+)", line):
                    arch = found[1]
                elif found := re.search(r"Function : (\w+)", line):
                    name = found[1]
                    if int(arch[3:]) >= 80:
                        counts[name, arch] = 0
                elif " HMMA" in line:
                    counts[name, arch] += 1
    for name in sorted({n for n, _ in counts}):
        print(f"{name:32} HMMA: {', '.join(f'{a} {c}' for (n, a), c in counts.items() if n == name)}")
    return [key for key, n in counts.items() if not n]


def main(folder: Path) -> int:
    table: dict[str, list[tuple[str, int, int, int, int]]] = {}
    for log in sorted(folder.glob("*.ptxas")):
        for name, *rest in rows(log.read_text()):
            table.setdefault(name, []).append(tuple(rest))  # type: ignore[arg-type]
    bad: list[str] = []
    print(f"{'kernel':32} {'registers':>12} {'spilled':>8} {'stack':>6} {'shared':>7}   over {len(next(iter(table.values()), []))} architectures, the worst")
    for name, found in sorted(table.items()):
        registers, spilled, stack, shared = (max(x[i] for x in found) for i in (1, 2, 3, 4))
        print(f"{name:32} {min(x[1] for x in found):>6}-{registers:<5} {spilled:>8} {stack:>6} {shared:>7}")
        if spilled > AROUND_CALLS and HOT.match(name) and not SPARED.search(name):
            bad.append(name)
    bad += [f"{name} ({arch}) without HMMA" for name, arch in without_tensor_cores(folder)]
    if bad:
        print("bad:", ", ".join(bad))
    return int(bool(bad) or not table)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
