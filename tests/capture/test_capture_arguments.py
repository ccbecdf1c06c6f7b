"""What goes into a captured graph and what comes out: structures, numbers, sizes, objects of results."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captured import Fn, check, graph_inputs, k, r
from captured_models import gpt2, ids, llama
from onnx_torch import Graph
from torch import Tensor, nn

from ortmodule import ORTModule
from ortmodule.capture import capture, flatten_inputs


def test_results_are_fresh_objects_of_the_users_types() -> None:
    @dataclasses.dataclass
    class Out:
        a: Tensor
        more: dict[str, Any]
        none: None = None

    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor, scale: float = 2.0) -> Out:
            y = x * self.w
            return Out(y, {"same": y, "list": [x, (y.sum(), 3, "text")], "w": self.w, "size": x.shape[0]})

    m, x = M(), r(5, 7)
    for dynamic in (False, True):
        c = capture(m, (x,), {}, dynamic=dynamic)
        names = [c.inputs[i].name for i in c.passthrough.values()]
        assert names == ["input_0", "w"]
        results = Graph(c.onnx).run(graph_inputs(c, m, (x,), {}))
        first, second = c.rebuild(results), c.rebuild(results)
        assert type(first) is Out and first is not second and first.more is not second.more
        assert first.more["same"] is first.a and first.more["list"][1][1:] == (3, "text") and first.none is None
        assert first.more["size"] == 5 and type(first.more["size"]) is int


def test_cache_decodes_next_token() -> None:
    m = llama().eval()
    c = capture(m, (), {"input_ids": ids(2, 11)})
    with torch.no_grad():
        ours = c.rebuild(Graph(c.onnx).run(graph_inputs(c, m, (), {"input_ids": ids(2, 11)})))
        theirs = m(input_ids=ids(2, 11))
        assert type(ours) is type(theirs) and type(ours.past_key_values) is type(theirs.past_key_values)
        assert ours.past_key_values is ours["past_key_values"]
        a = m(input_ids=ids(2, 1), past_key_values=ours.past_key_values).logits
        e = m(input_ids=ids(2, 1), past_key_values=theirs.past_key_values).logits
    torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{"return_dict": False}, {"output_hidden_states": True}, {"use_cache": False}])
def test_output_options(how: dict[str, Any]) -> None:
    check(gpt2(), (), {"input_ids": ids(3, 11), "labels": ids(3, 11), **how})


# --- arguments ------------------------------------------------------------------------------------


def test_structure_and_types_of_arguments_are_the_key() -> None:
    x, y = r(5, 7), k(5, 7)
    flat = flatten_inputs((x, [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": True}})
    assert [t is e for t, e in zip(flat.tensors, (x, y, x), strict=True)] == [True] * 3 and flat.scalars == [3, 2.5]
    same = flatten_inputs((x + 1, [y, None, 4]), {"b": 1.5, "a": {"k": x, "flag": True}})
    assert same.key == flat.key and hash(same.key) == hash(flat.key)
    for args, kwargs in (
        ((x, [y, None, 3.0]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x, [y, y, 3]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x, [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": False}}),
        ((x, (y, None, 3)), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x.double(), [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x[0], [y, None, 3]), {"b": 2.5, "a": {"k": x, "flag": True}}),
        ((x, [y, None, 3]), {"a": {"k": x, "flag": True}, "b": 2.5}),  # forward may take **kwargs
    ):
        assert flatten_inputs(args, kwargs).key != flat.key


def test_numbers_are_fixed_or_inputs() -> None:
    def f(x: Tensor, i: int, a: float) -> Any:
        return x * a + i, x.long() * a, torch.zeros(i) + 1, (x * a).sum() * i, torch.tensor(2.0) * a

    x = r(5, 7)
    fixed = capture(Fn(f), (x, 3, 0.5), {})
    assert fixed.fits(flatten_inputs((x, 3, 0.5), {})) and not fixed.fits(flatten_inputs((x, 4, 0.5), {}))
    free = capture(Fn(f), (x, 3, 0.5), {}, symbolic_scalars=True)
    assert free.fixed_scalars == [] and [s.leaf for s in free.inputs] == [0, 1, 2]
    for i, a in ((3, 0.5), (5, 0.1)):
        assert free.fits(flatten_inputs((x, i, a), {}))
        want = f(x, i, a)
        got = free.rebuild(Graph(free.onnx).run(graph_inputs(free, nn.Module(), (x, i, a), {})))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g, w)


def test_numbers_are_inputs_whatever_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO densities are looked for, among tensors and numbers."""
    with caplog.at_level(logging.INFO, "ortmodule"):
        made = capture(Fn(lambda x, i, a: x * a + i), (r(5, 7), 3, 0.5), {}, symbolic_scalars=True)
    assert made.fixed_scalars == [] and [s.leaf for s in made.inputs] == [0, 1, 2]


def test_conditions_on_sizes_bound_the_graph() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x @ y if x.shape[0] > 2 else x @ y * 2

    x, y = r(5, 7), r(7, 3)
    c = capture(Fn(f), (x, y), {}, dynamic=True)
    assert [s.dims for s in c.inputs] == [("s0", "s1"), ("s1", "s2")]
    for a, e, ok in ((r(5, 7), r(7, 3), True), (r(3, 2), r(2, 1), True), (r(2, 7), r(7, 3), False), (r(5, 7), r(6, 3), False)):
        assert c.fits(flatten_inputs((a, e), {})) == ok


def test_size_one_stays_symbolic() -> None:
    c = capture(gpt2(), (), {"input_ids": ids(1, 11), "labels": ids(1, 11)}, dynamic=True)
    assert c.inputs[0].dims == ("s0", "s1")
    check(nn.Linear(7, 3), (r(1, 7),), dynamic=True, other=((r(5, 7),), {}))


VALUES: dict[str, Callable[[int], Any]] = {
    "words": lambda i: {"names": [f"{i}.png", f"{i + 1}.png"]},
    "keys": lambda i: {f"key {i}": 1.5},
    "numpy numbers": lambda i: np.float64(i / 8),
    "arrays": lambda i: np.full(3, i),
    "functions": lambda i: lambda x: x * i,
    "slices": lambda i: slice(i, None),
    "bytes": lambda i: b"%d" % i,
}


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor, value: Any) -> Tensor:
        return self.inner(x) * (value if isinstance(value, float) else 2.0)


@pytest.mark.parametrize("name", VALUES)
def test_arguments_that_are_new_at_every_call_end_in_pytorch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """After max_captures, named once; other calls stay in the engine, and no call leaves anything behind."""
    eager = Given().double()
    ours = ORTModule(copy.deepcopy(eager), max_captures=3)
    state = ours._ortmodule
    for i in range(12):
        x = torch.randn(2, 4, dtype=torch.float64)
        torch.testing.assert_close(ours(x, VALUES[name](i)), eager(x, VALUES[name](i)))
        if i == 6:
            left = len(state.entries), len(state.sites)
    assert (len(state.entries), len(state.sites)) == left
    (entry,) = [e for e in ours.report().eager if "differ in an argument" in e.reason]
    assert entry.calls == 9 and sum("differ in an argument" in r.message for r in caplog.records) == 1
    assert len(state.entries) == 3
    ours(x, 1.5)
    assert len(state.entries) == 4 and entry.calls == 9
