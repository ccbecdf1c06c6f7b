"""Registers, spills, stack and shared memory of every CUDA kernel, from what ptxas said while they were built
(build/cuda/*.ptxas), the tensor-core instructions in their machine code (*.fatbin), and what that weighs in a wheel.
Exit status 1: a kernel that a step's time depends on spills more than a call saves, one on tensor cores has no
instruction of theirs, or the machine code weighs too much.

    make cuda-table
"""

from __future__ import annotations

import re
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

HOT = re.compile(r"om_k_(strip|strip_large|copy|flip|fill|softmax|norm|loss|gather|scatter|reduce|gemm|conv|attention)")
SPARED = re.compile(r"_f64$|^om_k_strip64|_d$|_i$")  # f64 is for tests, integers are rarely summed
AROUND_CALLS = 64  # bytes: the sine of a large number in `strip`, a pair's score in attention
ON_TENSOR_CORES = re.compile(r"om_k_attention_mma\d")
MOST = 30_000_000  # bytes of a wheel


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


def cubins(image: bytes) -> Iterator[tuple[int, bytes]]:
    """Of a fatbin: architecture, machine code (an ELF file)."""
    at, end = 16, 16 + struct.unpack_from("<Q", image, 8)[0]
    while at < end:
        kind, _, head, size, sm = struct.unpack_from("<HHIQ12xI", image, at)
        if kind == 2:
            yield sm, image[at + head : at + head + size]
        at += head + size


def instructions(cubin: bytes) -> Iterator[tuple[str, list[int]]]:
    """Of each kernel: the lower 12 bits of its instructions, which say what they do (sm_70 and later: 16 bytes each)."""
    first = struct.unpack_from("<Q", cubin, 40)[0]
    each, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I20xQQ", cubin, first + i * each) for i in range(count)]
    for name, at, size in sections:
        begin = sections[names][1] + name
        text = cubin[begin : cubin.index(b"\0", begin)].decode()
        if text.startswith(".text."):
            yield text[6:], [x & 0xFFF for (x,) in struct.iter_unpack("<H14x", cubin[at : at + size])]


def tensor_core_instructions(folder: Path) -> dict[str, dict[int, int]]:
    """HMMA in the kernels on tensor cores, by architecture (sm_80 and later)."""
    hmma = 0x23C
    counts: dict[str, dict[int, int]] = {}
    for image in sorted(folder.glob("*_mma*.fatbin")):
        for sm, cubin in cubins(image.read_bytes()):
            for name, codes in instructions(cubin):
                if sm >= 80 and ON_TENSOR_CORES.match(name):
                    counts.setdefault(name, {})[sm] = codes.count(hmma)
    return counts


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
    for name, counts in sorted(tensor_core_instructions(folder).items()):
        print(f"{name:32} HMMA: {', '.join(f'sm_{sm} {n}' for sm, n in counts.items())}")
        bad += [f"{name} (sm_{sm}) without HMMA" for sm, n in counts.items() if not n]
    images = [p.read_bytes() for p in sorted(folder.glob("*.fatbin"))]
    size = sum(len(zlib.compress(image)) for image in images)
    print(f"machine code: {sum(map(len, images)) / 1e6:.1f} MB, {size / 1e6:.1f} MB in a wheel")
    if size > MOST:
        bad.append(f"{size / 1e6:.1f} MB in a wheel")
    if bad:
        print("bad:", ", ".join(bad))
    return int(bool(bad) or not table)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
