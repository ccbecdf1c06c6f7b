"""Host nodes: their types, their gradient node, and that nothing but the host runs them."""

from __future__ import annotations

import pytest
import torch

import engine

TEXT = """graph {
  input x: f64[3, 5]
  input n: i64[7]
  input w: f64[5]
  a, k, b = host(x, n, w) {index=4, out_dtype=[2, 5, 2], shape0=[3, 5], shape1=[7], shape2=[]}
  output a
  output k
  output b
}"""


def test_types_and_gradient() -> None:
    g = engine.Graph.parse(TEXT)
    assert "f64[3, 5], i64[7], f64[]" in g.text() or "f64[3, 5]" in g.text()
    j = g.verify().grad([1, 0, 1], [1, 0, 0]).verify()
    line = next(x for x in j.text().splitlines() if "host_grad" in x)
    for part in ("index=4", "part=0", "want=[0, 2]", "out_dtype=[2, 2]", "f64[3, 5]", "f64[5]"):
        assert part in line, line
    args = line.split("host_grad(")[1].split(")")[0].split(",")
    assert len(args) == 2  # the gradient of a, and zeros for b; none for the integers
    assert any("fill" in x for x in j.text().splitlines())


def test_many_gradients_come_in_parts() -> None:
    names = [f"x{i}" for i in range(100)]
    text = "graph {\n" + "".join(f"  input {x}: f32[{i + 1}]\n" for i, x in enumerate(names))
    text += f"  y = host({', '.join(names)}) {{index=0, out_dtype=[1], shape0=[3]}}\n  output y\n}}"
    wanted = [int(i % 10 != 3) for i in range(100)]
    j = engine.Graph.parse(text).verify().grad(wanted, [1]).verify()
    lines = [x for x in j.text().splitlines() if "host_grad" in x]
    assert len(lines) == 3 and all(f"part={k}" in x for k, x in enumerate(lines)), lines
    found = [int(i) for x in lines for i in x.split("want=[")[1].split("]")[0].split(",")]
    assert found == [i for i, w in enumerate(wanted) if w]


def test_not_differentiable() -> None:
    j = engine.Graph.parse(TEXT.replace("index=4", "index=4, diff=0")).grad([1, 0, 1], [1, 0, 1])
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
