"""Host nodes: their types, their gradient node, and that nothing but the host runs them."""

from __future__ import annotations

import pytest
import torch

import engine

TEXT = """graph {
  input x: f64[3, 5]
  input n: i64[7]
  input w: f64[5]
  a, k, b = host(x, n, w) {index=4, uid=9, out_dtype=[2, 5, 2], shape0=[3, 5], shape1=[7], shape2=[]}
  output a
  output k
  output b
}"""


def test_types_and_gradient() -> None:
    g = engine.Graph.parse(TEXT)
    assert "f64[3, 5], i64[7], f64[]" in g.text() or "f64[3, 5]" in g.text()
    j = g.verify().grad([1, 0, 1], [1, 0, 0]).verify()
    line = next(x for x in j.text().splitlines() if "host_grad" in x)
    for part in ("index=4", "uid=9", "want=[0, 2]", "out_dtype=[2, 2]", "f64[3, 5]", "f64[5]"):
        assert part in line, line
    args = line.split("host_grad(")[1].split(")")[0].split(",")
    assert len(args) == 2  # the gradient of a, and zeros for b; none for the integers
    assert any("fill" in x for x in j.text().splitlines())


def test_not_differentiable() -> None:
    j = engine.Graph.parse(TEXT.replace("uid=9", "uid=9, diff=0")).grad([1, 0, 1], [1, 0, 1])
    assert "host_grad" not in j.text()


def test_only_the_host_runs_it() -> None:
    with pytest.raises(engine.EngineError, match="host"):
        engine.run(TEXT, [torch.zeros(3, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.int64), torch.zeros(5, dtype=torch.float64)])


@pytest.mark.parametrize(
    "change,words",
    [
        (("index=4, ", ""), ["index"]),
        ((", shape1=[7]", ""), ["shape1"]),
        (("[2, 5, 2]", "[2, 55, 2]"), ["entry 1", "dtype"]),
    ],
)
def test_refused(change: tuple[str, str], words: list[str]) -> None:
    with pytest.raises(engine.EngineError) as e:
        engine.Graph.parse(TEXT.replace(*change))
    assert all(w in str(e.value) for w in words), str(e.value)
