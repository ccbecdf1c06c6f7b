"""Autocast of each type of device (ortmodule/autocast.py): what is captured, what makes another capture, what is put back. The CPU's
tensors obey the CPU's switch alone, whatever the other one says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, autocast, patches


class Switch:
    """CUDA's switch, which no context sets where there is no GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        torch.set_autocast_dtype("cuda", self.dtype)
        torch.set_autocast_enabled("cuda", True)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_state_by_kind() -> None:
    assert autocast.now() == autocast.OFF
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast.now() == (torch.bfloat16, None)
        with Switch(torch.float16):
            assert autocast.now() == (torch.bfloat16, torch.float16)
            with autocast.off():
                assert autocast.now() == autocast.OFF
            assert autocast.now() == (torch.bfloat16, torch.float16)
    with autocast.put((torch.float16, None)):
        assert autocast.now() == (torch.float16, None)
    with torch.autocast("cpu", torch.bfloat16), autocast.put(()):
        assert autocast.now() == autocast.OFF
    assert autocast.now() == autocast.OFF
    assert autocast.changed(autocast.OFF, "cuda", torch.bfloat16, True) == (None, torch.bfloat16)
    assert autocast.changed((torch.bfloat16, torch.float16), "cpu", None, False) == (None, torch.float16)


def test_values_obey_the_switch_of_their_device() -> None:
    cpu, state = torch.ones(1), (None, torch.bfloat16)
    assert not autocast.of(state, cpu) and not autocast.of(state, None, [cpu, 3]) and autocast.of(state) and autocast.of(state, 3)
    assert autocast.of((torch.bfloat16, None), [cpu]) and not autocast.of((torch.bfloat16, torch.bfloat16), cpu.to("meta"))


def test_another_capture_when_either_changes() -> None:
    """A model on the CPU computes in float32 under CUDA's autocast, as in PyTorch."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    ours, x = ORTModule(eager, strict=True), torch.randn(4, 8)
    for inside, captures in ((autocast.off(), 1), (Switch(torch.bfloat16), 2), (torch.autocast("cpu", torch.bfloat16), 3), (Switch(torch.float16), 4)):
        with inside:
            got, want = ours(x), eager(x)
        got.sum().backward()
        assert got.dtype == want.dtype and len(ours.report().graphs) == captures
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_inside_forward_of_another_type() -> None:
    """Regions of autocast in forward are those of their kind and type."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))  # eager keeps casts of weights

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    z = self.b(y.float())
                with torch.autocast("cpu", torch.float16):
                    w = self.c(x)
            return y, z, w, self.d(x)

    eager = Mixed()
    ours, x = ORTModule(eager, strict=True), torch.randn(4, 8)
    for inside in (autocast.off(), torch.autocast("cpu", torch.float16)):
        with inside:
            got, want = ours(x), eager(x)
        assert [t.dtype for t in got] == [t.dtype for t in want]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        sum(t.float().sum() for t in got).backward()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_a_class_whose_metaclass_is_written_in_c() -> None:
    """pybind11's, which type.__setattr__ refuses (torch 2.11's ProcessGroup is one): replaced and put back."""
    owner = torch.distributed.Store
    assert type(owner).__module__ == "pybind11_builtins"
    before = vars(owner)["num_keys"]
    with patches.scope(), patches.replaced(patches.Patch(owner, "num_keys", lambda self: 7), patches.Patch(owner, "new_name", 1)):
        assert owner.num_keys(None) == 7 and owner.new_name == 1
    assert vars(owner)["num_keys"] is before and not hasattr(owner, "new_name")
