"""Convolutions that the engine has PyTorch compute (cpu/conv_host.c, python/conv.c): the errors of all its results stay
within twice eager's own, whoever computes; who does is seen in oneDNN's log; the same bits again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import engine
from ortmodule import ORTModule

# channels, filters, kernel, more of the module; what the input is
CASES = {
    "plain": (nn.Conv2d, (16, 24, 3), {"padding": 1}, (4, 16, 20, 18)),
    "no bias": (nn.Conv2d, (16, 24, 3), {"bias": False}, (4, 16, 20, 18)),
    "stride and dilation": (nn.Conv2d, (16, 24, (3, 5)), {"stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)}, (4, 16, 40, 18)),
    "rows left over": (nn.Conv2d, (16, 24, 3), {"stride": 2}, (4, 16, 40, 38)),
    "groups": (nn.Conv2d, (64, 64, 3), {"groups": 4, "padding": 1}, (4, 64, 20, 18)),
    "sequence": (nn.Conv1d, (32, 24, 5), {"padding": 2}, (8, 32, 300)),
    "volume": (nn.Conv3d, (16, 24, 3), {"padding": 1}, (2, 16, 6, 12, 10)),
    "same": (nn.Conv2d, (16, 24, 3), {"padding": "same"}, (4, 16, 20, 18)),
    "unequal ends": (nn.Conv2d, (16, 24, (2, 4)), {"padding": "same"}, (4, 16, 20, 18)),  # left to the engine
    "transposed": (nn.ConvTranspose2d, (24, 16, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (4, 24, 20, 18)),
    "small images": (nn.Conv2d, (64, 64, 3), {"padding": 1}, (2, 64, 8, 10)),  # beside the filters
    "one channel": (nn.Conv2d, (1, 64, 5), {"padding": 2}, (4, 1, 40, 18)),
    "one tap": (nn.Conv2d, (64, 64, 1), {}, (4, 64, 20, 18)),
}


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], sizes: tuple, more: dict) -> None:
        super().__init__()
        self.conv = kind(*sizes, **more)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x * 1.5).sin()


def results(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = model(x)
    (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
    out = [y.detach(), x.grad, *[p.grad for p in model.parameters()]]
    model.zero_grad()
    return [t.clone() for t in out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_eagers(name: str, dtype: torch.dtype) -> None:
    kind, sizes, more, size = CASES[name]
    torch.manual_seed(3)
    x, eager = torch.randn(size), Net(kind, sizes, more)
    wrapped = ORTModule(Net(kind, sizes, more), strict="engine")
    wrapped.load_state_dict(eager.state_dict())
    ours, again, theirs = results(wrapped, x, dtype), results(wrapped, x, dtype), results(eager, x, dtype)
    exact = results(eager.double(), x.double(), torch.float64)
    for a, b, e, want in zip(ours, again, theirs, exact):
        assert a.dtype == e.dtype and a.shape == e.shape
        assert torch.equal(a, b)
        mine, own = ((t.double() - want).abs().max() / want.abs().max() for t in (a, e))
        assert mine <= 2 * own + 1e-6, (float(mine), float(own))


def _run(argv: list[str], **env: str) -> str:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STEP = """
import sys, torch
sys.path.insert(0, "tests/module")
from ortmodule import ORTModule
net = torch.nn.Conv2d(32, 32, 3, padding=1, dtype=getattr(torch, sys.argv[1]))
ORTModule(net)(torch.randn(4, 32, 24, 24, dtype=getattr(torch, sys.argv[1]), requires_grad=True)).sum().backward()
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_computes(dtype: str) -> None:
    """PyTorch gives oneDNN bf16 only on a processor whose vectors it finds wide enough."""
    theirs = dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for forced, calls in (("own", 0), ("host", 3 if theirs else 0)):
        log = _run(["-c", STEP, dtype], ORTMODULE_GEMM=forced, ONEDNN_VERBOSE="1").splitlines()
        found = [line.split(",")[6] for line in log if "exec,cpu,convolution" in line]
        assert len(found) == calls, found


@pytest.mark.skipif(not engine.lib.om_isa_bf16() & 1, reason="the processor has no AVX512_BF16")
def test_large_images_have_channels_last() -> None:
    """oneDNN's names of orders: acdb is NHWC. The net's own images are contiguous. (On AMX oneDNN turns all of them.)"""
    tiles = engine.lib.om_isa_bf16() & 2
    for side, count in ((24, 3), (6, 3 if tiles else 0)):
        log = _run(["-c", STEP.replace("24", str(side)), "bfloat16"], ORTMODULE_GEMM="host", ONEDNN_VERBOSE="1").splitlines()
        found = [line for line in log if "exec,cpu,convolution" in line]
        assert len(found) == 3 and sum("acdb" in line for line in found) == count, found


@pytest.mark.parametrize("provider", ["own", "host"])
def test_errors_with_either(provider: str) -> None:
    _run(["-m", "pytest", "-q", "-x", __file__, "-k", "errors_are_eagers", "-p", "no:cacheprovider"], ORTMODULE_GEMM=provider)
