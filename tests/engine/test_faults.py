"""Indices and labels out of range: the fault word. The error names operator, value, position, what is allowed and the
user's line; it is the same whatever the number of threads; nothing later runs; no memory outside of the operands is
touched."""

from __future__ import annotations

import pytest
import torch

import engine
from ortmodule import _C

N = 60000  # more than one piece for every kernel
HEAD = f"input x: f64[11, 3]\n input i: i64[{N}]\n input j: i64[{N}, 3]\n input k: i64[{N}, 2]\n input s: f64[{N}, 3]\n input t: f64[{N}]\n input l: f64[{N}, 11]"
INDEXED = {
    "gather(x, i) {axis=0}": "i",
    "gather_grad(s, i) {axis=0, shape=[11, 3], padding_idx=-1}": "i",
    "gather_elements(x2, j) {axis=0}": "j",
    "scatter_elements(s2, j, s) {axis=0, reduce=1}": "j",
    "gather_nd(x, k)": "k",
    "scatter_nd(x, k, t) {reduce=1}": "k",
    f"max_pool_grad(s4, j4) {{shape=[{N}, 1, 11, 1], axes=2}}": "j",
    "cross_entropy(l, i) {reduction=1}": "i",
    "cross_entropy_grad(d, l, i, _, t, d) {reduction=1}": "i",
}


def inputs(bad: list[int], value: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    r = {
        "x": torch.rand(11, 3, generator=g),
        "s": torch.rand(N, 3, generator=g),
        "t": torch.rand(N, generator=g),
        "l": torch.rand(N, 11, generator=g),
    }
    r = {name: t.double() for name, t in r.items()}
    r["i"] = torch.randint(11, (N,), generator=g)
    r["j"] = torch.randint(11, (N, 3), generator=g)
    r["k"] = torch.stack([torch.randint(11, (N,), generator=g), torch.randint(3, (N,), generator=g)], 1)
    for at in bad:
        for name, step in (("i", 1), ("j", 3), ("k", 2)):
            r[name].view(-1)[at * step] = value
    return r


def graph(node: str) -> str:
    names = "y, z, w" if node.startswith("cross_entropy(") else "y"
    return (
        f"graph {{\n {HEAD}\n d = reduce_sum(t) {{axes=[0], keepdims=0}}\n x2 = expand(x) {{shape=[11, 3]}}\n"
        f" s2 = slice(s) {{axis=0, start=0, end=11, step=1}}\n"
        f" s4 = reshape(s) {{shape=[{N}, 1, 3, 1]}}\n j4 = reshape(j) {{shape=[{N}, 1, 3, 1]}}\n"
        f' {names} = {node} @"m.layer" "user.py":42\n u = neg(x)\n output y\n output u\n}}'
    )


@pytest.mark.parametrize("node", INDEXED)
@pytest.mark.parametrize("value", [11, -1, 2**62, -(2**63)])
def test_the_first_fault_of_many_is_named(node: str, value: int) -> None:
    """Pieces run last to first, and on one thread: the same fault."""
    of = INDEXED[node]
    at = 20011 * {"i": 1, "j": 3, "k": 2}[of]
    given = inputs([N - 1, 20011, 39998, 59000], value)
    texts = []
    for threads in (True, False):
        cx = engine.Ctx(threads)
        with pytest.raises(engine.EngineError) as e:
            engine.run(engine.Graph.parse(graph(node), cx), [given[n] for n in "xijkstl"])
        texts.append(str(e.value))
    word = (
        f"label {value} in row {at}; 0 to 10 or ignore_index -100"
        if "cross" in node
        else f"index {value} at position {at} is out of range; 0 to 10"
    )
    for text in texts:
        assert node.split("(")[0] + ":" in text and word in text and "(user.py:42)" in text, text
    assert texts[0] == texts[1]


def test_an_axis_without_entries_has_no_index() -> None:
    text = "graph {\n input x: f64[0, 3]\n input i: i64[2]\n y = gather(x, i) {axis=0}\n output y\n}"
    with pytest.raises(engine.EngineError, match="index 1 at position 0 .*no entries"):
        engine.run(text, [torch.zeros(0, 3).double(), torch.tensor([1, 0])])


@pytest.mark.parametrize("value", [5, -1])
def test_nothing_later_runs(value: int) -> None:
    """In a plan: no write-back, and the next run of the same model is sound."""
    text = "graph {\n input x: f64[5, 3]\n input i: i64[4]\n buffer b: f64[4, 3]\n y = gather(x, i) {axis=0}\n z = add(b, y)\n output z\n write z -> b\n}"
    model = _C.Model.from_text(text)
    x, b, good = torch.rand(5, 3).double(), torch.zeros(4, 3).double(), torch.tensor([0, 4, 2, 2])
    bad = good.clone()
    bad[1:3] = value
    v = model.variant(bytes([0, 0, 0]), bytes([0]), None)
    with pytest.raises(Exception, match=f"gather: index {value} at position 1 is out of range; 0 to 4 are allowed"):
        model.forward(v, [x, bad, b], 0).resume()
    assert not b.any()
    run = model.forward(v, [x, good, b], 0)
    assert run.resume() is None
    assert torch.equal(b, x[good])
