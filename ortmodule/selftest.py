"""python -m ortmodule.selftest: does what is installed here work? In seconds, with nothing but torch.

The checks of the installation (torch_cpp_extensions.install), then small models of several kinds, each trained for
three steps in float64 beside its twin in PyTorch: losses and parameters must agree to 1e-9. A line for each; exit
status 0, or 1 when one fails.
"""

from __future__ import annotations

import argparse
import copy
import io
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from . import ORTModule, optim
from .torch_cpp_extensions.install import CHECKS as INSTALLED

TOLERANCE = 1e-9


class _Block(nn.Module):
    """A layer of a transformer, as they are written today."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(17, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class _Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return cast(Tensor, self.head(x.mean((2, 3)))).square().mean()


class _Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.lstm(x)[0][:, -1])).tanh().sum()


class _Twice(Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.b(_Twice.apply(self.a(x)))).square().mean()  # type: ignore[no-untyped-call]


class _Branches(_Calls):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if x.sum() > 0 else self.b(-x)
        return x.square().mean()


def _trained(make: Callable[[], nn.Module], batches: list[Tensor], again: bool = False) -> str:
    torch.manual_seed(0)
    eager = make().double()
    ours: Any = ORTModule(copy.deepcopy(eager), strict=True, disable=False, save_path=None)
    if again:
        ours = pickle.loads(pickle.dumps(ours))
    updates = [torch.optim.AdamW(eager.parameters(), lr=1e-2), optim.FusedAdam(ours.parameters(), lr=1e-2, eps=1e-8,
               weight_decay=1e-2, adam_w_mode=optim.AdamWMode.ADAMW_TORCH)]  # fmt: skip
    worst = 0.0
    for x in batches:
        losses = []
        for model, update in zip((eager, ours), updates, strict=True):
            update.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            update.step()
        worst = max(worst, float((losses[0] - losses[1]).detach().abs()))
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        worst = max(worst, float((p - q).detach().abs().max()))
    if not worst < TOLERANCE:
        raise RuntimeError(f"differs from PyTorch by {worst:.3g}")
    return f"{ours.report().headline()}; within {worst:.1e} of PyTorch"


def _transformer() -> str:
    return _trained(_Block, [torch.randint(17, size, device="cpu") for size in ((3, 9), (3, 9), (2, 12))])


def _pictures() -> str:
    return _trained(_Pictures, [torch.randn(2, 3, 8, 8, dtype=torch.float64, device="cpu") for _ in range(3)])


def _sequences() -> str:
    return _trained(_Sequences, [torch.randn(3, 6, 5, dtype=torch.float64, device="cpu") for _ in range(3)])


def _functions() -> str:
    return _trained(_Calls, [torch.randn(3, 4, dtype=torch.float64, device="cpu") for _ in range(3)])


def _branches() -> str:
    x = torch.randn(3, 4, dtype=torch.float64, device="cpu")
    return _trained(_Branches, [x, -x, x])


def _pickled() -> str:
    picture = torch.randn(2, 3, 8, 8, dtype=torch.float64, device="cpu")
    return _trained(lambda: nn.Sequential(_Pictures()), [picture] * 3, again=True)


def _checkpoint() -> str:
    torch.manual_seed(0)
    model, file = _Sequences(), io.BytesIO()
    torch.save(ORTModule(model).state_dict(), file)
    file.seek(0)
    _Sequences().load_state_dict(torch.load(file, weights_only=True))
    return "a wrapped model's state_dict is the model's"


CHECKS: dict[str, Callable[[], str]] = {
    **INSTALLED,
    "transformer": _transformer,
    "pictures": _pictures,
    "sequences": _sequences,
    "functions": _functions,
    "branches": _branches,
    "pickled": _pickled,
    "checkpoint": _checkpoint,
}


def run() -> bool:
    """Runs the checks and prints a line for each; True when all hold."""
    began, failed = time.perf_counter(), []
    for name, check in CHECKS.items():
        try:
            with torch.random.fork_rng(devices=[]):
                print(f"{name:12} ok      {check()}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"{name:12} failed  {type(error).__name__}: {error}", flush=True)
    took = f"({time.perf_counter() - began:.0f} s)"
    print(f"failed: {', '.join(failed)} {took}. `python -m ortmodule.info` says what is installed." if failed else
          f"{len(CHECKS)} checks hold {took}.")  # fmt: skip
    return not failed


def main() -> None:
    what = "Does what is installed here work? Small models beside PyTorch, a line each, in half a minute."
    argparse.ArgumentParser(prog="python -m ortmodule.selftest", description=what).parse_args()
    sys.exit(0 if run() else 1)


if __name__ == "__main__":
    main()
