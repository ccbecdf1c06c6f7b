"""What passes leave of a small graph."""

from __future__ import annotations

from engine import Graph


def body(text: str, *passes: str) -> list[str]:
    """Operators of the nodes left, after the passes and dce."""
    g = Graph.parse("graph {\n" + text + "\n}").apply(*passes, "dce").verify()
    return [ln.split(" = ")[1].split("(")[0] for ln in g.text().splitlines() if " = " in ln and not ln.lstrip().startswith(("const", "sym", "grad"))]


X = "input x: f32[3, 5, 2]\n"
