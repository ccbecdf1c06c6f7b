"""precision="bf16": the same as autocast around forward, and nowhere else; unwrap()."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from ortmodule import _C, ORTModule

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(self.norm(torch.nn.functional.gelu(self.a(x))))
        return y, y.float().pow(2).mean()


def grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_is_autocast_around_forward() -> None:
    torch.manual_seed(0)
    net = Net()
    ours, other = ORTModule(copy.deepcopy(net), precision="bf16"), ORTModule(copy.deepcopy(net))
    for x in (X, X, X[:3]):
        y, loss = ours(x)
        with torch.autocast("cpu", torch.bfloat16):
            want, wanted = other(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, want) and torch.equal(loss, wanted)
        assert all(torch.equal(a, b) for a, b in zip(grads(ours, loss), grads(other, wanted), strict=True))
        assert not torch.is_autocast_enabled("cpu")
    assert ours.report().node_share == 1
    with torch.no_grad():
        assert ours.eval()(X)[0].dtype == torch.bfloat16


def test_the_callers_own_autocast_counts() -> None:
    ours = ORTModule(Net(), precision="bf16")
    with torch.autocast("cpu", torch.float16):
        assert ours(X)[0].dtype == torch.float16
    assert ours(X)[0].dtype == torch.bfloat16


def test_also_where_pytorch_runs_it() -> None:
    """A whole call in PyTorch, a module that is turned off."""
    for ours in (ORTModule(Net(), precision="bf16", disable=True), ORTModule(Net(), precision="bf16", max_captures=1)):
        for n in (6, 5, 4, 3):
            assert ours(X[:n])[0].dtype == torch.bfloat16


def test_copies_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ORTModule(Net(), precision="bf16")
    assert copy.deepcopy(ours)(X)[0].dtype == pickle.loads(pickle.dumps(ours))(X)[0].dtype == torch.bfloat16
    monkeypatch.setenv("ORTMODULE_PRECISION", "bf16")
    assert ORTModule(Net())(X)[0].dtype == torch.bfloat16
    monkeypatch.setenv("ORTMODULE_PRECISION", "int8")
    with pytest.raises(ValueError, match="ORTMODULE_PRECISION='int8' is not allowed; give bf16"):
        ORTModule(Net())
    monkeypatch.delenv("ORTMODULE_PRECISION")
    with pytest.raises(ValueError, match="precision='fp8' is not allowed"):
        ORTModule(Net(), precision="fp8")


def test_verify_compares_in_the_same_precision() -> None:
    found = ORTModule(Net(), precision="bf16").verify((X,))
    assert found.ok, str(found)
    assert not torch.is_autocast_enabled("cpu")


def test_a_processor_without_bf16_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for has, times in ((True, 0), (False, 1)):
        monkeypatch.setattr(_C, "has_bf16", lambda has=has: has)
        caplog.clear()
        ORTModule(Net(), precision="bf16")
        ORTModule(Net())
        assert [m for m in caplog.messages if "without bf16 instructions" in m] == [m for m in caplog.messages][:times] and len(caplog.messages) == times


def test_unwrap() -> None:
    net = Net()
    ours = ORTModule(net)
    _, loss = ours(X)
    loss.backward()
    plain = ours.unwrap()
    assert plain is net and type(plain) is Net and not isinstance(plain, ORTModule)
    assert all(a is b for a, b in zip(plain.parameters(), ours.parameters(), strict=True)) and plain.a.weight.grad is not None
    torch.testing.assert_close(plain(X)[1], loss)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

        def unwrap(self) -> str:
            return "the user's"

    assert ORTModule(Own()).unwrap() == "the user's"
