"""The engine's dropout in PyTorch: a forward that PyTorch runs again, for a second derivative, drops what the engine
has dropped.

What is kept is a function of the forward's seed, of the place of the dropout among those of the graph, and of the
element's place (csrc/cpu/philox.h). PyTorch draws such numbers by few operators (bernoulli_, native_dropout), in the
order in which forward comes to them, which is the order of the nodes in the ONNX graph. Whoever runs forward again
compares results: an order that is another would show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import torch_private as private

_ROUNDS = 7
_BITS = 0xFFFFFFFF


class Unknown(RuntimeError):
    """Forward draws random numbers that are not known to be the engine's."""


def draws(model: bytes) -> list[float]:
    """The rates of the dropouts of a graph, of attention too, in the order in which they are given their streams."""
    import onnx  # a wrapped module does without
    from onnx import numpy_helper

    graph = onnx.load_from_string(model).graph
    constants = {t.name: t for t in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type == "Dropout":
            found.append(float(numpy_helper.to_array(constants[node.input[1]]).reshape(())))
        elif node.op_type == "Attention":
            found += [a.f for a in node.attribute if a.name == "dropout_p" and a.f > 0]
    return found


def _product(a: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Upper and lower half of a product of numbers of 32 bits."""
    p = a * by  # wraps: the same 64 bits
    return (p >> 32) & _BITS, p & _BITS


def kept(seed: int, stream: int, n: int, rate: float, device: torch.device) -> Tensor:
    """(n) bool: which of n elements stay, by their place in memory order."""
    blocks = -(-n // 64)
    counter = torch.arange(blocks * 8, device=device)
    of_stream = torch.full_like(counter, stream)  # few: in the lower half
    c = [counter & _BITS, counter >> 32, of_stream, torch.zeros_like(counter)]
    k = [seed & _BITS, seed >> 32 & _BITS]
    for _ in range(_ROUNDS):
        (h0, l0), (h1, l1) = _product(c[0], 0xD2511F53), _product(c[2], 0xCD9E8D57)
        c = [h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0]
        k = [(k[0] + 0x9E3779B9) & _BITS, (k[1] + 0xBB67AE85) & _BITS]
    exchanged = [(w << 16 | w >> 16) & _BITS for w in c]
    words = torch.stack([w.view(blocks, 8) for w in (*c, *exchanged)], dim=1)
    return words.flatten()[:n] < min(int((1 - rate) * 2**32), _BITS)


class _Masks(private.DispatchMode):  # type: ignore[misc, name-defined]
    """What PyTorch would draw is the engine's."""

    def __init__(self, seed: int, rates: Sequence[float]) -> None:
        super().__init__()
        self._seed = seed
        self._rates = rates
        self.drawn = 0

    def _next(self, x: Tensor, rate: float) -> Tensor:
        if self.drawn == len(self._rates) or abs(self._rates[self.drawn] - rate) > 1e-6:
            raise Unknown
        self.drawn += 1
        found = kept(self._seed, self.drawn, x.numel(), self._rates[self.drawn - 1], x.device)
        return found.view(x.shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.bernoulli_.float and not kwargs and len(args) <= 2:
            x, stays = (*args, 0.5)[:2]  # 0.5 is the operator's own, and left out
            return x.copy_(self._next(x, 1 - stays)) if x.numel() else x
        if func is torch.ops.aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1:
            x, rate, _ = args
            keep = self._next(x, rate)
            return x * keep * (1 / (1 - rate)), keep
        if torch.Tag.nondeterministic_seeded in func.tags and not (
                func is torch.ops.aten.native_dropout.default and not args[2]):  # fmt: skip
            raise Unknown
        return func(*args, **kwargs)


@contextlib.contextmanager
def same(seed: int, model: bytes) -> Iterator[None]:
    """PyTorch's dropout in this block is that of the engine's forward with this seed. Raises Unknown, also when there
    have not been as many."""
    rates = draws(model)
    masks = _Masks(seed, rates)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), masks:
        yield
    if masks.drawn != len(rates):
        raise Unknown
