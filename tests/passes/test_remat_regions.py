"""Checkpoints (om_region) in the remat pass: what lies inside is computed again, from what was there outside, with the
same bits; what other parts ask for is kept."""

from __future__ import annotations

import re

import torch

import engine
from opcheck import rand

HEAD = """graph {
  input x: f64[7, 5]
  param w: f64[5, 5]
"""


def lines(g: engine.Graph, op: str, backward: bool) -> list[str]:
    return [s for s in g.text().splitlines() if f" = {op}(" in s and (" backward" in s) == backward]


def parsed(text: str) -> engine.Graph:
    return engine.Graph.parse(HEAD + text + "\n}")


def remat(text: str, outputs: int = 1, policy: str = "remat") -> engine.Graph:
    """With gradients of x and w, bits compared with those of no remat."""
    ins = [rand(7, 5), rand(5, 5), *[rand(7, 5)] * outputs]
    got = []
    for passes in (("simplify", "cse", "dce"), ("simplify", "cse", policy, "dce")):
        g = parsed(text).grad([1, 1], [1] * outputs).apply(*passes).verify()
        got.append(g.run(ins, outputs + 2, 5))
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)
    return g


TWO = """  a = matmul(x, w, _) @"m" in "1"
  b = tanh(a) @"m" in "1"
  c = matmul(b, w, _) @"m" in "1"
  d = sin(c) @"m" in "1"
  e = matmul(d, w, _) @"n" "f.py":3 in "2"
  f = tanh(e) @"n" "f.py":3 in "2"
  y = matmul(f, w, _) @"m" "f.py":4
  output y"""


def test_the_text_has_regions() -> None:
    g = parsed(TWO)
    assert '@"m" in "1"' in g.text() and '@"n" "f.py":3 in "2"' in g.text() and '@"m" "f.py":4\n' in g.text()
    assert engine.Graph.parse(g.text()).text() == g.text()


def test_inside_is_computed_again_and_what_others_ask_for_is_kept() -> None:
    g = remat(TWO)
    assert len(lines(g, "matmul", False)) == 4
    assert len([s for s in lines(g, "matmul", True) if re.search(r'in "1"', s)]) >= 2
    without = parsed(TWO.replace(' in "1"', "").replace(' in "2"', "")).grad([1, 1], [1]).apply("simplify", "cse", "remat", "dce")
    again = len(lines(g, "matmul", True)) - len(lines(without, "matmul", True))
    assert again == 2  # a and c; of e only f is read, which is asked for outside
    assert len(lines(g, "tanh", True)) == 1  # b; f is asked for outside
    assert len(lines(g, "sin", True)) == 0, "d begins the second region: it is kept"


def test_layers_leave_regions_alone() -> None:
    assert len(lines(remat(TWO, policy="layers"), "matmul", True)) == len(lines(remat(TWO), "matmul", True))


NESTED = """  a = matmul(x, w, _) @"m" in "1"
  b = tanh(a) @"m" in "1/2"
  c = matmul(b, w, _) @"m" in "1/2"
  d = exp(c) @"m" in "1/2"
  e = matmul(d, w, _) @"m" in "1"
  f = tanh(e) @"m" in "1"
  y = matmul(f, w, _) @"m" in "1"
  output y"""


def test_regions_within_regions_are_computed_for_the_outer_one_and_anew() -> None:
    g = remat(NESTED)
    assert len(lines(g, "exp", True)) == 2 and len(lines(g, "tanh", True)) == 3
    flat = remat(NESTED.replace("1/2", "1"))
    assert len(lines(flat, "exp", True)) == 1 and len(lines(flat, "tanh", True)) == 2


def test_random_numbers_are_drawn_once() -> None:
    g = remat("""  a = dropout(x) {p=0.5} @"m" in "1" rng=3
  b = matmul(a, w, _) @"m" in "1"
  c = tanh(b) @"m" in "1"
  y = matmul(c, w, _) @"m" in "1"
  output y""")
    assert [s for s in lines(g, "dropout", True) if "rng=3" in s]


def test_state_is_written_from_the_forward() -> None:
    text = """graph {
  input x: f64[7, 5]
  param w: f64[5, 5]
  buffer n: f64[5]
  a = matmul(x, w, _) @"m" in "1"
  b = sub(a, n) @"m" in "1"
  c = tanh(b) @"m" in "1"
  s = reduce_sum(c) {axes=[0], keepdims=0} @"m" in "1"
  y = matmul(c, w, _) @"m" in "1"
  write s -> n
  output y
}"""
    g = engine.Graph.parse(text).grad([1, 1, 0], [1]).apply("simplify", "cse", "remat", "dce").verify()
    ins = [rand(7, 5), rand(5, 5), rand(5), rand(7, 5)]
    want = engine.Graph.parse(text).grad([1, 1, 0], [1]).run(ins, 4)
    for a, b in zip(g.run(ins, 4), want, strict=True):
        assert torch.equal(a, b)
    assert not lines(g, "sub", True), "it read what is overwritten by then"


def test_what_is_asked_for_is_not_made_from_inside() -> None:
    """c = tanh(a) - x is cheap, but a is there only when the region is computed again."""
    g = remat("""  a = matmul(x, w, _) @"m" in "1"
  b = tanh(a) @"m" in "1"
  c = sub(b, x) @"m" in "1"
  d = matmul(c, w, _) @"m" in "2"
  y = sin(d) @"m" in "2"
  output y""")
    assert not lines(g, "sub", True)
