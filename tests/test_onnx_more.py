"""Reading and writing the standard ONNX operators of transposed convolutions, sorting, recurrence and their kin: as in
tests/test_onnx.py, whose rows these would be."""

from __future__ import annotations

import numpy as np
import pytest
import test_onnx as t
from test_onnx import Const, Fixed, f

BEFORE = set(t.CASES)
case = t.case

case("ConvTranspose", f(2, 4, 11), Fixed(f(4, 3, 3), 0, 1, 2), group=2, strides=[2], pads=[1, 1], output_padding=[1])
case("ConvTranspose", f(2, 3, 5, 7), Fixed(f(3, 5, 3, 2), 2, 3), f(5), dilations=[2, 1], pads=[1, 0, 2, 1], tag="asymmetric")
case("Col2Im", Fixed(f(2, 12, 20), 1, 2), Const([6, 7], np.int64), Const([2, 3], np.int64), dilations=[2, 2], pads=[0, 1, 0, 1])
case("TopK", f(3, 11), Const([4], np.int64), n_out=2)
case("TopK", f(7, 3), Const([7], np.int64), axis=0, largest=0, n_out=2, tag="all")
for _op, _gates, _more in (("RNN", 1, {}), ("GRU", 3, {"linear_before_reset": 1}), ("LSTM", 4, {})):
    for _dirs, _way in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
        _w = [Fixed(f(_dirs, _gates * 5, 6), 0, 1, 2), Fixed(f(_dirs, _gates * 5, 5), 0, 1, 2), f(_dirs, 2 * _gates * 5)]
        _states = [None, Fixed(f(_dirs, 3, 5), 0, 2)] + [Fixed(f(_dirs, 3, 5) * 2, 0, 2)] * (_op == "LSTM")
        _n = 3 if _op == "LSTM" else 2
        case(_op, Fixed(f(7, 3, 6), 2), *_w, *_states, n_out=_n, hidden_size=5, direction=_way, tag=_way, **_more)
        case(_op, Fixed(f(7, 3, 6), 2), *_w[:2], n_out=_n, hidden_size=5, direction=_way, tag=_way + ", bare", **_more)
case("RNN", Fixed(f(7, 3, 6), 2), Fixed(f(1, 5, 6), 0, 1, 2), Fixed(f(1, 5, 5), 0, 1, 2), hidden_size=5, activations=["Relu"], tag="relu")
UNWRITABLE = ("RNN", "GRU", "LSTM")  # in the graph, products stand outside of the recurrence

MINE = {k: t.CASES.pop(k) for k in list(t.CASES) if k not in BEFORE}


@pytest.fixture(autouse=True)
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "CASES", {**t.CASES, **MINE})


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("key", MINE)
def test_operator(key: str, dynamic: bool) -> None:
    t.test_operator(key, dynamic)


@pytest.mark.parametrize("key", [k for k in MINE if k.split(":")[0] not in UNWRITABLE])
def test_write(key: str) -> None:
    t.test_write(key)
