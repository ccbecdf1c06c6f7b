"""examples/train_mlp.c: the engine without Python. It is built with ortmodule.h alone, trains what ORTModule has saved,
and prints the losses of the same training in Python, bit for bit."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engine
from ortmodule import DebugOptions, ORTModule

ROOT = Path(__file__).resolve().parents[2]
BATCH, FEATURES, STEPS, RATE = 64, 2, 300, 0.5
MASK = 2**64 - 1


@pytest.fixture(scope="module")
def program() -> str:
    built = Path(engine.lib._name).resolve().parent / "train_mlp"
    subprocess.run(["make", "-s", "-C", str(ROOT), str(built.relative_to(ROOT))], check=True)
    return str(built)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


def uniform(counter: int) -> Iterator[float]:
    """The example's numbers (splitmix64)."""
    while True:
        counter = z = (counter + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        yield ((z ^ z >> 31) >> 40) / 8388608.0 - 1.0


def weights(model: nn.Module) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            counter = 14695981039346656037
            for c in name.encode():
                counter = ((counter ^ c) * 1099511628211) & MASK
            bound, numbers = 1 / math.sqrt(p.shape[-1]), uniform(counter)
            p.copy_(torch.tensor([next(numbers) * bound for _ in range(p.numel())]).view_as(p) if p.dim() > 1 else torch.zeros_like(p))


def data() -> tuple[Tensor, Tensor]:
    numbers = uniform(0)
    x = torch.tensor([next(numbers) for _ in range(BATCH * FEATURES)]).view(BATCH, FEATURES)
    return x, ((x[:, 0] < 0) == (x[:, 1] < 0)).long()


def saved(module: nn.Module, folder: Path, *args: Tensor) -> tuple[nn.Module, Path]:
    """Wrapped, and the file that its first step writes."""
    model = ORTModule(module, DebugOptions(save_onnx=True, onnx_prefix="mlp", save_path=str(folder)))
    out = model(*args)
    out.sum().backward()
    model.zero_grad()
    return model, next(folder.glob("*_torch_exported_training.onnx"))


def run(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, check=False, timeout=120)


def test_it_includes_one_header() -> None:
    source = (ROOT / "examples" / "train_mlp.c").read_text()
    assert re.findall(r'#\s*include\s*"([^"]+)"', source) == ["ortmodule.h"]


def test_trains_as_in_python(program: str, tmp_path: Path) -> None:
    x, labels = data()
    model, path = saved(Net(), tmp_path, x, labels)
    weights(model)
    losses = []
    for _ in range(STEPS):
        loss = model(x, labels)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= RATE * p.grad
        model.zero_grad()
    res = run(program, path, "--steps", STEPS, "--rate", RATE, "--below", 0.2)
    assert res.returncode == 0, res.stderr
    assert [line.rsplit(" ", 1)[0] for line in res.stdout.splitlines()] == [f"step {i} loss" for i in range(STEPS)]
    printed = torch.tensor([float(line.split()[-1]) for line in res.stdout.splitlines()])
    assert torch.equal(printed, torch.tensor(losses))
    assert losses[-1] < 0.2 < losses[0]


def test_loss_not_reached(program: str, tmp_path: Path) -> None:
    res = run(program, saved(Net(), tmp_path, *data())[1], "--steps", 3)
    assert res.returncode == 1 and "not below 0.2" in res.stderr and len(res.stdout.splitlines()) == 3


def test_what_is_wrong_is_said(program: str, tmp_path: Path) -> None:
    res = run(program, "--help")
    assert res.returncode == 0 and res.stdout.startswith("usage: train_mlp MODEL.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model at all")
    (tmp_path / "other").mkdir()
    no_loss = saved(nn.Linear(3, 2), tmp_path / "other", torch.ones(4, 3))[1]
    for args, words in (
        ((), "usage: train_mlp"), ((tmp_path / "absent.onnx",), "absent.onnx: No such file"), ((tmp_path,), "Is a directory"),
        ((broken,), "not a valid ONNX file: byte 0"), ((no_loss,), "does not take x"), (("--steps",), "--steps: a number must follow"),
        ((broken, "--steps", "many"), "--steps: a number must follow"), ((broken, "--depth", 3), "--depth is not understood"),
    ):  # fmt: skip
        res = run(program, *args)
        assert res.returncode == 2 and words in res.stderr and not res.stdout, (args, res.stdout, res.stderr)
