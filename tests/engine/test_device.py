"""A device whose memory is not the host's (tests/device/foreign.c): nothing in run/ looks into it, constants, scalars and
sizes cross by upload and download, and the results have the CPU's bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import engine

DRIVER = Path(engine.lib._name).resolve().parent / "om-foreign"

TEXTS = {
    "constants, dropout, a gradient laid out otherwise": """graph {
  sym s0 = x[0]
  input x: f64[s0, 3]
  param w: f64[3, 3]
  const c: f64[3] = [0.5, -1.25, 2.0]
  y = matmul(x, w)
  z = add(y, c)
  d = dropout(z) {p=0.5} rng=1
  o = tanh(d)
  output o
  output d
}""",
    "a size that is a value": """graph {
  sym s0 = value of n
  input n: i64[]
  input x: f64[5]
  a = slice(x) {axis=0, start=[0], end=[s0], step=1}
  y = exp(a)
  output y
}""",
    "write-backs of what backward reads": """graph {
  input x: f64[3, 3]
  buffer s: f64[3, 3]
  p = mul(x, s)
  y = sin(p)
  v = permute(s) {perm=[1, 0]}
  output y
  write v -> s
}""",
    "host nodes": """graph {
  input x: f64[3, 2]
  a = exp(x)
  f = flip(a) {axes=[0]}
  v = host(f) {index=0, out_dtype=[2], shape0=[3, 2], diff=1}
  y = sin(v)
  output y
}""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_memory_is_the_devices(name: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(TEXTS[name])
    res = subprocess.run([str(DRIVER), str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert res.returncode == 0, (res.returncode, res.stdout + res.stderr)
