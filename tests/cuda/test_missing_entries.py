"""Libraries that lack an entry point, as an older driver does: each of those that the engine looks up is missing once.

A driver without one of those that steps need: one sentence that names it, and the module runs in PyTorch. Without one of
those for CUDA graphs: steps run call by call, report() says why. A cuBLASLt without one counts as none: the engine's own
products. A libtorch_cuda.so without one: memory of the driver's."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cuda.children import child, on_fake

from engine import ROOT

pytestmark = on_fake
FAKE = ROOT / "build" / "fake"


def entries(header: str, table: str) -> list[str]:
    text = (ROOT / "csrc/cuda" / header).read_text()
    body = re.search(rf"#define {table}\(X\)(.*?[^\\])\n", text, re.S)
    assert body
    return re.findall(r"X\(\w+,\s*(\w+),", body[1])


def without(library: str, entry: str, folder: Path) -> str:
    """A copy whose entry point has another name; its hash table knows the old one alone, so dlsym finds neither."""
    name, data = f"\0{entry}\0".encode(), (FAKE / library).read_bytes()
    assert data.count(name) >= 1, entry
    path = folder / entry / library
    path.parent.mkdir()
    path.write_bytes(data.replace(name, b"\0X" + name[2:]))
    return str(path)


DRIVER, STEPS, GRAPHS = entries("driver.h", "OM_CUDA_API"), entries("queue.h", "OM_CUDA_QUEUE_API"), entries("capture.h", "OM_CUDA_CAPTURE_API")
BLAS, MEMORY = entries("blaslt.h", "OM_LT_API"), entries("host_memory.h", "OM_CUDA_TORCH_API")

SOURCE = """
import json, os, torch, graph_correct
from torch import nn
from ortmodule import ORTModule, _C
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
x = torch.randn(5, 6)
def steps(run):
    for _ in range(4):
        net.zero_grad()
        loss = run(x).square().sum()
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters())]
want = steps(net)
steps(ORTModule(net))  # what a capture imports is there before the forks
def told():
    from cuda import fake
    fake.late(False)
    graph_correct.stand_in()
    run = ORTModule(net)
    got = steps(run)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want, got, strict=True))
    assert fake.count(fake.FAILURES) == 0 and fake.gpu.fake_gpu_depth() == 0, fake.message()
    same = all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    return fake.count(fake.LAUNCHES), fake.products(), fake.count(fake.PLAYED), fake.torch_blocks(), same, str(run.report())
for env in LIBRARIES:
    at, to = os.pipe()
    child = os.fork()
    if not child:
        os.environ.update(env)
        os.write(to, json.dumps(told()).encode())
        os._exit(0)
    os.close(to)
    with open(at, "rb") as f:
        line = f.read().decode()
    assert os.waitpid(child, 0)[1] == 0, env
    print(line)
"""


def said(*libraries: dict[str, str]) -> list[tuple[int, int, int, int, bool, str]]:
    """Of a process with each: launches, products of the library's, graphs played, blocks of torch's, whether the results
    have eager's bits; the report."""
    return [tuple(json.loads(line)) for line in child(f"LIBRARIES = {list(libraries)!r}\n" + SOURCE).splitlines()]


def test_nothing_is_missing() -> None:
    """What the others are compared with."""
    assert "cuInit" in DRIVER and "cuLaunchKernel" in STEPS and "cuGraphLaunch" in GRAPHS and "cublasLtMatmul" in BLAS and len(MEMORY) == 4
    ((launches, products, played, blocks, _, report),) = said({"OM_FAKE_TORCH": str(FAKE / "libtorch_cuda.so")})
    assert launches and products and played and blocks, report


def test_a_driver_that_steps_cannot_use(tmp_path: Path) -> None:
    missing = sorted({*DRIVER, *STEPS})
    for entry, (launches, _, _, _, same, report) in zip(missing, said(*({"OM_FAKE_LIB": without("libcuda.so.1", e, tmp_path)} for e in missing)), strict=True):
        assert launches == 0 and same, (entry, report)
        left = [line for line in report.splitlines() if "whole module in PyTorch" in line]
        assert len(left) == 1 and re.search(rf": the NVIDIA driver \(libcuda.so.1\) has no {entry}: CUDA 11(\.2)? or later is needed \[\w+\.c:\d+\]$", left[0]), report


def test_a_driver_without_graphs(tmp_path: Path) -> None:
    missing = sorted({*GRAPHS} - {*DRIVER, *STEPS})
    for entry, (launches, products, played, _, _, report) in zip(missing, said(*({"OM_FAKE_LIB": without("libcuda.so.1", e, tmp_path)} for e in missing)), strict=True):
        assert launches and products and not played, (entry, report)
        assert report.count(f"the NVIDIA driver (libcuda.so.1) has no {entry}: CUDA graphs need CUDA 11.4 or later") == 1, report


def test_an_older_library_of_products(tmp_path: Path) -> None:
    for entry, (launches, products, played, _, _, report) in zip(BLAS, said(*({"OM_FAKE_BLAS": without("libcublasLt.so.13", e, tmp_path)} for e in BLAS)), strict=True):
        assert launches and played and not products, (entry, report)


def test_an_older_torch(tmp_path: Path) -> None:
    for entry, (launches, products, played, blocks, _, report) in zip(MEMORY, said(*({"OM_FAKE_TORCH": without("libtorch_cuda.so", e, tmp_path)} for e in MEMORY)), strict=True):
        assert launches and products and played and not blocks, (entry, report)
