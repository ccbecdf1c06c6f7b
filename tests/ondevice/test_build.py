"""make device, make device-arm: what the libraries need and weigh, and that every machine computes the same losses.
Runs by `make check-device`; ARM where Debian's cross compilers and qemu-user are."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import device_models as models
import numpy as np
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, api

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
MACHINES = {
    "device": [],
    "device-aarch64": ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
    "device-armv7": ["qemu-arm", "-L", "/usr/arm-linux-gnueabihf"],
}
pytestmark = pytest.mark.full


def run(machine: str, program: str, *args: object) -> str:
    command = [*MACHINES[machine], str(BUILD / machine / program), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    if not (BUILD / request.param / "libortmodule.a").exists():
        pytest.skip(f"build/{request.param} is not there (make device, make device-arm)")
    if MACHINES[request.param] and not shutil.which(MACHINES[request.param][0]):
        pytest.skip("qemu-user is not installed")
    return request.param


def symbols(path: Path, *flags: str) -> list[list[str]]:
    return [line.split() for line in subprocess.check_output(["nm", *flags, path], text=True).splitlines() if line]


def test_only_the_manual_is_visible() -> None:
    public = set(re.findall(r"\b(om_\w+)\(", (ROOT / "csrc" / "ortmodule.h").read_text()))
    exported = {row[-1] for row in symbols(BUILD / "device" / "libortmodule.so", "-D", "--defined-only")}
    assert exported <= public and {"om_trainer_step", "om_run_forward"} <= exported
    assert {row[-1] for row in symbols(BUILD / "device" / "libortmodule.a", "-g", "--defined-only") if len(row) == 3} == exported


def test_what_it_needs() -> None:
    """libc, libm and threads."""
    text = subprocess.check_output(["readelf", "-d", BUILD / "device" / "libortmodule.so"], text=True)
    assert set(re.findall(r"NEEDED.*\[(.*)\]", text)) <= {"libm.so.6", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def test_size(machine: str, tmp_path: Path) -> None:
    strip = {"device-aarch64": "aarch64-linux-gnu-strip", "device-armv7": "arm-linux-gnueabihf-strip"}.get(machine, "strip")
    subprocess.run([strip, "-s", "-o", tmp_path / "so", BUILD / machine / "libortmodule.so"], check=True)
    assert (tmp_path / "so").stat().st_size < 2_000_000


def test_half_is_half_everywhere(tmp_path: Path) -> None:
    """Also where the processor converts by itself (aarch64)."""
    found = {}
    for name, cc in (("device", "cc"), ("device-aarch64", "aarch64-linux-gnu-gcc"), ("device-armv7", "arm-linux-gnueabihf-gcc")):
        if not shutil.which(cc) or (MACHINES[name] and not shutil.which(MACHINES[name][0])):
            continue
        subprocess.run([cc, "-O2", "-ftree-vectorize", "-ffp-contract=fast", f"-I{ROOT}/csrc", ROOT / "tests" / "ondevice" / "half.c", "-o", tmp_path / name], check=True)
        found[name] = subprocess.check_output([*MACHINES[name], str(tmp_path / name)], text=True)
    assert len(set(found.values())) == 1, found


def test_neon(tmp_path: Path) -> None:
    """aarch64: products by vectors with a lane of another, sums in f32; halves converted four at a time."""
    library = BUILD / "device-aarch64" / "libortmodule.so"
    if not library.exists():
        pytest.skip("build/device-aarch64 is not there (make device-arm)")
    text = subprocess.check_output(["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", library], text=True)
    count = {op: len(re.findall(pattern, text)) for op, pattern in {
        "fmla": r"\bfmla\tv\d+\.4s, v\d+\.4s, v\d+\.s\[\d\]", "fmla64": r"\bfmla\tv\d+\.2d", "fcvtl": r"\bfcvtl2?\tv\d+\.4s, v\d+\.[48]h"}.items()}
    assert count["fmla"] > 500 and count["fmla64"] > 100 and count["fcvtl"] > 10, count


def test_header_is_cplusplus(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    (tmp_path / "x.cpp").write_text('#include "ortmodule.h"\nint main() { om_trainer_options o = {}; return o.threads; }\n')
    subprocess.run(["g++", "-fsyntax-only", "-Wall", "-Werror", "-I", BUILD / "device" / "include", tmp_path / "x.cpp"], check=True)


@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
@pytest.mark.parametrize("kind", [models.Mlp, models.Cnn, models.Former])
def test_same_losses(kind: type[nn.Module], optimizer: str, machine: str, tmp_path: Path) -> None:
    """100 steps: this machine's library within 1e-6 of the Python package's, which picks its own instruction set; that
    of x86_64 gives the same bits when the package is told to use the same."""
    torch.manual_seed(4)
    module = kind()
    ORTModule(module).save_for_device(tmp_path, models.batch(kind, 0), optimizer=models.OPTIMIZERS[optimizer](module.parameters()))
    subprocess.run(["make", "-s", "-C", ROOT, "build/om-losses"], check=True)
    same_isa = {**os.environ, "ORTMODULE_ISA": os.environ.get("DEVICE_ISA", "avx2")}
    here = subprocess.check_output([BUILD / "om-losses", tmp_path / "model.omd", "100"], text=True, env=same_isa)
    there = run(machine, "om-losses", tmp_path / "model.omd", 100)
    if machine == "device":
        assert there == here
        assert run(machine, "om-losses", tmp_path / "model.omd", 100, 2) == here  # threads change no bit
        return
    a, b = (np.array([float(x) for x in text.split()]) for text in (here, there))
    assert len(a) == 100 and a[-1] < a[0]
    # momentum brings the CNN to losses of 0.003, differences of numbers near 1: these are compared with 0.1
    least = 0.1 if optimizer == "momentum" else 0
    assert (np.abs(a - b) / np.maximum(b, least)).max() < 1e-6


@pytest.mark.parametrize("kind", [models.Mlp, models.Cnn, models.Former])
def test_wasm(kind: type[nn.Module], tmp_path: Path) -> None:
    """make device-wasm: 100 steps in a runtime of WASI, 1e-6 from those here."""
    program = BUILD / "device-wasm" / "om-losses.wasm"
    if not program.exists() or not importlib.util.find_spec("wasmtime"):
        pytest.skip("build/device-wasm is not there (make device-wasm), or no wasmtime (pip install wasmtime)")
    torch.manual_seed(4)
    module = kind()
    ORTModule(module).save_for_device(tmp_path, models.batch(kind, 0), optimizer=models.OPTIMIZERS["adamw"](module.parameters()))
    subprocess.run(["make", "-s", "-C", ROOT, "build/om-losses"], check=True)
    arguments = [tmp_path / "model.omd", "100"]
    here = subprocess.check_output([BUILD / "om-losses", *arguments], text=True).split()
    there = subprocess.check_output([os.sys.executable, ROOT / "tests" / "run_wasm.py", program, *arguments], text=True).split()
    a, b = np.array(here, float), np.array(there, float)
    assert len(b) == 100 and (np.abs(a - b) / a).max() < 1e-6


def test_digits(machine: str, tmp_path: Path) -> None:
    subprocess.run([os.sys.executable, ROOT / "examples" / "digits.py", tmp_path], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    out = run(machine, "train_digits", tmp_path / "model.omd", ROOT / "examples" / "digits.u8", "--export", tmp_path / "out.onnx",
              "--save", tmp_path / "after")  # fmt: skip
    assert re.search(r"epoch 19 loss 0\.\d+ accuracy 0\.9[5-9]", out)
    assert (tmp_path / "out.onnx").exists()


def test_only_what_files_use(tmp_path: Path) -> None:
    """make device OPS=digits: small, the same losses; what it lacks is refused by name."""
    home = BUILD / "device-only"
    if not (home / "libortmodule.so").exists():
        pytest.skip("build/device-only is not there (make device OPS=...)")
    subprocess.run(["strip", "-s", "-o", tmp_path / "so", home / "libortmodule.so"], check=True)
    assert (tmp_path / "so").stat().st_size < 800_000
    run_digits = [os.sys.executable, ROOT / "examples" / "digits.py", tmp_path]
    subprocess.run(run_digits, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    args = [tmp_path / "model.omd", ROOT / "examples" / "digits.u8"]
    outs = [subprocess.check_output([BUILD / m / "train_digits", *args], text=True).splitlines()[1:] for m in ("device", "device-only")]
    assert outs[0] == outs[1] and len(outs[0]) == 20
    models.artifacts(models.Cnn(), tmp_path / "cnn", models.Cnn, 1)
    done = subprocess.run([home / "om-losses", tmp_path / "cnn" / "model.omd", "1"], capture_output=True, text=True)
    assert done.returncode == 2 and re.search(r"\w+: this library was built for files that do not use this operator: make device OPS=", done.stderr), done.stderr


def test_python_over_the_library(tmp_path: Path) -> None:
    """ORTMODULE_DEVICE_LIBRARY: ortmodule.api without the extension."""
    models.artifacts(models.Mlp(), tmp_path, models.Mlp, 1)
    program = f"""
import numpy as np
from ortmodule import api
assert api._lib._name.endswith("libortmodule.so")
state = api.CheckpointState.load_checkpoint({str(tmp_path / "checkpoint")!r})
module = api.Module({str(tmp_path / "training_model.onnx")!r}, state)
print(float(module(np.ones((11, 7), np.float32), np.zeros(11, np.int64))[0]))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ORTMODULE_DEVICE_LIBRARY": str(BUILD / "device" / "libortmodule.so")}
    out = subprocess.check_output([os.sys.executable, "-c", program], env=env, text=True)
    _, module, _ = models.trainer(tmp_path)
    loss = float(module(np.ones((11, 7), np.float32), np.zeros(11, np.int64))[0])
    assert abs(float(out) / loss - 1) < 1e-5
    assert api._lib._name.endswith("_C.abi3.so")
