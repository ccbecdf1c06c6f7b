"""Graph text: printing parses back byte for byte, says the same thing to the interpreter, and errors name line and
column."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import onnx_models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine import EngineError, Graph

EVERYTHING = """graph {
  sym s0 = len[0]
  sym s3 = value of n
  input len: f32[s0]
  input x: f32[2, s0*12 + 3, 4]
  input n: i64[] host
  param _7_odd_name_ "7 odd\\x09name\\"": f32[5, 7]
  buffer none_ "none": f64[]
  const c0: i64[2] = [1, -2]
  const h: bf16[2] = [1.5, -0.0]
  const k: f64[] = 0.1
  const e: f32[0, 3] = []
  const t: bool[3] = [1, 0, 1]
  const inf: f16[2] = [inf, -65504.0]
  const nan: f32[1] = hex "0100c0ff"
  y = permute(x) {perm=[1, 0, 2]}: f32[s0*12 + 3, 2, 4] @"h.0.ln" "model.py":12
  v8 = reshape(_7_odd_name_) {shape=[35]}: f32[35] @"a \\"b\\""
  z = slice(v8) {axis=0, start=[3], end=[s3 + 4], step=2}: f32[s3//2 + 1]
  d = dropout(y) {p=0.1}: f32[s0*12 + 3, 2, 4] rng=3
  q, v12, r~2 = layer_norm(d, _, _) {axis=2, eps=1e-05}: f32[s0*12 + 3, 2, 4], f32[s0*12 + 3, 2], f32[s0*12 + 3, 2] backward seg=1
  w = cast(q) {to=bf16}: bf16[s0*12 + 3, 2, 4] update
  output y
  output z
  output w
  write z -> _7_odd_name_
  grad _7_odd_name_ = none
  grad x = y
}
"""


def again(text: str) -> str:
    return Graph.parse(text).text()


def test_everything_round_trips() -> None:
    text = again(EVERYTHING)
    assert text.splitlines() == EVERYTHING.splitlines()


def test_comments_blank_lines_and_left_out_types() -> None:
    text = "# c\n\ngraph {  # d\n input x:f32[3] # e\n\n  y=tanh(x)\n output y }\n"
    assert again(text) == "graph {\n  input x: f32[3]\n  y = tanh(x): f32[3]\n  output y\n}\n"


@pytest.mark.parametrize("key", onnx_models.CASES)
def test_operators_round_trip(key: str) -> None:
    m, inputs = onnx_models.model_of(key, dynamic=key != "Conv:same")
    g = Graph.onnx(m.SerializeToString())
    text = again(g.text())
    assert again(text) == text
    feeds = [torch.from_numpy(v.value if isinstance(v, onnx_models.Fixed) else v) for v in inputs.values() if not isinstance(v, onnx_models.Const)]
    n = len(m.graph.output)
    for a, b in zip(g.run(feeds, n), Graph.parse(text).verify().run(feeds, n)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_gradient_graph_round_trips() -> None:
    m, _ = onnx_models.shape_model()
    g = Graph.onnx(m.SerializeToString()).grad([1], [1]).verify()
    text = again(g.text())
    assert again(text) == text and "backward" in text and "grad_in" in text
    Graph.parse(text).verify()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(["f64", "f32", "bf16", "f16"]))
def test_constants_are_exact(values: list[float], dtype: str) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(engine.TORCH[engine.NAMES.index(dtype)])
    raw = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])
    hexa = bytes(x.view(torch.uint8).tolist()).hex()
    g = Graph.parse(f'graph {{\n const c: {dtype}[{len(values)}] = hex "{hexa}"\n output c }}')
    back = Graph.parse(g.text()).run([], 1)[0]
    assert torch.equal(back.view(raw.dtype), raw)


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False))
def test_float_attributes_are_exact(x: float) -> None:
    text = again(f"graph {{\n input x: f64[2]\n y = fill() {{shape=[], dtype=f64, value={x!r}}}\n output y }}")
    assert Graph.parse(text).run([torch.zeros(2, dtype=torch.float64)], 1)[0].item() == x


ANY_CHARACTER = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])


@settings(max_examples=200, deadline=None)
@given(st.text(ANY_CHARACTER, min_size=1, max_size=300), st.text(ANY_CHARACTER, max_size=20))
def test_names_and_scopes(name: str, module: str) -> None:
    def quote(s: str) -> str:
        return "".join(c if c.isalnum() and c.isascii() else "".join(f"\\x{b:02x}" for b in c.encode()) for c in s)

    q, m = quote(name), quote(module)
    text = again(f'graph {{\n input a "{q}": f32[2]\n input b "{q}": f32[2]\n y = tanh(a) @"{m}" "{q}":7\n output y }}')
    assert again(text) == text


@pytest.mark.parametrize(("line", "message"), [
    ("y = tahn(x)", "3, column 7: unknown operator 'tahn'"),
    ("y = tanh(z)", "'z' is not defined above"),
    ("y = tanh(x", "expected ','"),
    ("a, b = tanh(x)", "tanh makes 1 values, 2 names are given"),
    ("x = tanh(x)", "'x' is defined twice"),
    ("y = tanh(x): f32[5]", r"differs from the inferred f32\[3\]"),
    ("y = tanh(x) frob", "expected @"),
    ("y = reshape(x) {shape=[q+]}", "size expression 'q\\+' is not understood"),
    ("y = reshape(x) {shape=[2]}", "reshape: 3 elements cannot become 2"),
    ("input w: f33[2]", "unknown element type 'f33'"),
    ("const c: f32[3] = [1, 2]", "expected ','"),
    ("const c: i64[99999999999] = [1]", "constant too large"),
    ("sym s = nope[0]", "'nope' is not defined above"),
    ("sym s = x[4]", "has no such axis"),
    ("grad y = none", "'y' is not defined above"),
    ("frobnicate y", "starts no statement"),
    ('y = tanh(x) @"a', "without closing quote"),
])
def test_errors_have_a_place(line: str, message: str) -> None:
    with pytest.raises(EngineError, match="graph text line .*" + message):
        Graph.parse(f"graph {{\n  input x: f32[3]\n  {line}\n}}")


def test_verify_finds_what_text_can_state() -> None:
    with pytest.raises(EngineError, match="write 0 stores f32 of rank 1 into an input of f32 of rank 2"):
        Graph.parse("graph {\n input x: f32[3]\n input m: f32[3, 1]\n y = tanh(x)\n write y -> m\n}").verify()
    with pytest.raises(EngineError, match="symbol s0 is bound to axis 0 of an input, which has another size"):
        Graph.parse("graph {\n sym s0 = x[0]\n input x: f32[s0*2]\n y = tanh(x)\n output y\n}").verify()
    with pytest.raises(EngineError, match="random, but it has no stream"):
        Graph.parse("graph {\n input x: f32[3]\n y = dropout(x) {p=0.5}\n output y\n}").verify()
    with pytest.raises(EngineError, match="forward node reads a value of a later phase"):
        Graph.parse("graph {\n input x: f32[3]\n y = tanh(x) backward\n z = tanh(y)\n output z\n}").verify()


# --- the command -----------------------------------------------------------------------------------------------

TOOL = Path(engine.lib._name).parent / "om-opt"


@pytest.mark.skipif(not TOOL.exists(), reason="om-opt is not built")
def test_om_opt_applies_passes_and_converts(tmp_path: Path) -> None:
    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(TOOL), *map(str, args)], capture_output=True, text=True, check=False)

    model = tmp_path / "m.onnx"
    model.write_bytes(onnx_models.shape_model()[0].SerializeToString())
    out = run(model, "--pass", "fold,simplify,cse,dce", "--grad", "all", "--stats", "-o", tmp_path / "g.txt")
    assert out.returncode == 0 and "1 gradients" in out.stdout, out.stderr
    text = (tmp_path / "g.txt").read_text()
    assert again(text) == text and "grad x = " in text
    assert run(tmp_path / "g.txt").stdout == text
    assert run(model, "-o", tmp_path / "back.onnx").returncode == 0
    assert run(tmp_path / "back.onnx", "--print").returncode == 0
    bad = run(model, "--pass", "nope")
    assert bad.returncode == 1 and "no pass is named 'nope'" in bad.stderr
    assert run("/nonexistent").returncode == 1 and run().returncode == 1 and run("--help").returncode == 0
    assert "simplify" in run("--list").stdout and "reshape" in run("--ops").stdout


def test_every_pass_is_in_a_list_of_the_engines() -> None:
    """One that is written, tested and never run would not be noticed by its own tests."""
    def passes(name: str) -> set[int]:
        found: set[int] = set()
        for p in (ctypes.c_void_p * 100).in_dll(engine.lib, name):
            if not p:
                return found
            found.add(p)
        raise AssertionError(f"{name} has no end")

    lists = set.union(*(passes(f"om_passes_{name}") for name in ("forward", "variant", "joint")))
    assert lists <= passes("om_passes")
    find = engine.lib.om_pass_find
    find.restype = ctypes.c_void_p
    rows = re.findall(r"^PASS\((\w+),", (Path(__file__).parents[2] / "csrc/passes/passes.def").read_text(), re.M)
    assert {name for name in rows if find(name.encode()) not in lists} == {"layers"}  # in the place of remat, when asked for
