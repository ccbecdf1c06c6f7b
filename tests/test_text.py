"""Graph text: printing parses back byte for byte, says the same thing to the interpreter, and errors name line and
column. Passes that clean up: what each does to a small graph, and what it must leave alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import test_onnx
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
  input n: i64[]
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
  z = slice(v8) {axis=0, start=[3], end=[s3 + 4], step=2}: f32[(s3 + 2)//2]
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


@pytest.mark.parametrize("key", test_onnx.CASES)
def test_operators_round_trip(key: str) -> None:
    m, inputs = test_onnx.model_of(key, dynamic=key != "Conv:same")
    g = Graph.onnx(m.SerializeToString())
    text = again(g.text())
    assert again(text) == text
    feeds = [torch.from_numpy(v.value if isinstance(v, test_onnx.Fixed) else v) for v in inputs.values() if not isinstance(v, test_onnx.Const)]
    n = len(m.graph.output)
    for a, b in zip(g.run(feeds, n), Graph.parse(text).verify().run(feeds, n)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_gradient_graph_round_trips() -> None:
    m, _ = test_onnx.shape_model()
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


# --- cleaning passes -----------------------------------------------------------------------------------------

def body(text: str, *passes: str) -> list[str]:
    """Operators of the nodes left, after the passes and dce."""
    g = Graph.parse("graph {\n" + text + "\n}").apply(*passes, "dce").verify()
    return [ln.split(" = ")[1].split("(")[0] for ln in g.text().splitlines() if " = " in ln and not ln.lstrip().startswith(("const", "sym", "grad"))]


X = "input x: f32[3, 5, 2]\n"


@pytest.mark.parametrize(("text", "left"), [
    ("a = reshape(x) {shape=[15, 2]}\n b = reshape(a) {shape=[3, 5, 2]}\n y = tanh(b)", ["tanh"]),
    ("a = reshape(x) {shape=[15, 2]}\n y = reshape(a) {shape=[30]}", ["reshape"]),
    ("a = permute(x) {perm=[1, 2, 0]}\n b = permute(a) {perm=[2, 0, 1]}\n y = tanh(b)", ["tanh"]),
    ("a = permute(x) {perm=[1, 2, 0]}\n y = permute(a) {perm=[1, 2, 0]}", ["permute"]),
    ("a = cast(x) {to=f64}\n b = cast(a) {to=f32}\n y = tanh(b)", ["tanh"]),
    ("a = cast(x) {to=bf16}\n b = cast(a) {to=f32}\n y = tanh(b)", ["cast", "cast", "tanh"]),
    ("a = cast(x) {to=f64}\n y = cast(a) {to=bf16}", ["cast"]),
    ("a = slice(x) {axis=1, start=[0], end=[5], step=1}\n y = tanh(a)", ["tanh"]),
    ("a = slice(x) {axis=1, start=[1], end=[5], step=1}\n y = slice(a) {axis=1, start=[1], end=[3], step=1}", ["slice"]),
    ("a = flip(x) {axes=[0, 1]}\n b = flip(a) {axes=[0, 1]}\n y = tanh(b)", ["tanh"]),
    ("const c: f32[] = 1.0\n a = mul(x, c)\n b = div(a, c)\n y = tanh(b)", ["tanh"]),
    ("const c: f32[2] = [1, 1]\n a = mul(c, x)\n y = tanh(a)", ["tanh"]),
    ("const c: f32[2] = [1, 2]\n a = mul(c, x)\n y = tanh(a)", ["mul", "tanh"]),
    ("const c: f32[4, 1, 1, 1] = [1, 1, 1, 1]\n a = mul(c, x)\n y = tanh(a)", ["mul", "tanh"]),
    ("const c: f32[] = -0.0\n a = add(x, c)\n y = tanh(a)", ["tanh"]),
    ("const c: f32[] = 0.0\n a = add(x, c)\n y = tanh(a)", ["add", "tanh"]),
    ("const c: f32[] = 0.0\n a = sub(x, c)\n y = tanh(a)", ["tanh"]),
    ("const c: f32[] = -0.0\n a = sub(x, c)\n y = tanh(a)", ["sub", "tanh"]),
    ("a = slice(x) {axis=1, start=[2], end=[2], step=1}\n b = concat(a, x) {axis=1}\n y = tanh(b)", ["slice", "zero_grad", "tanh"]),
    ("c = cast(x) {to=i32}\n a = slice(c) {axis=1, start=[2], end=[2], step=1}\n y = concat(a, c) {axis=1}", ["cast"]),
    ("const z: f32[2] = [1, 2]\n a = zero_grad(x, z)\n y = tanh(a)", ["tanh"]),
    ("a = pad(x) {lo=[0, 0, 0], hi=[0, 0, 0], value=1.0}\n y = tanh(a)", ["tanh"]),
    ("a = dropout(x) {p=0.0}\n b = neg(a)\n c = neg(b)\n y = tanh(c)", ["tanh"]),
    ("const t: bool[] = 1\n const z: f32[] = 3.0\n a = where(t, x, z)\n y = tanh(a)", ["tanh"]),
    ("const t: bool[] = 1\n e = exp(x)\n a = where(t, x, e)\n y = tanh(a)", ["exp", "where", "tanh"]),
])
def test_simplify(text: str, left: list[str]) -> None:
    assert body(X + text + "\n output y", "simplify") == left


def test_simplify_keeps_values() -> None:
    text = X + """const one: f32[] = 1.0
      a = cast(x) {to=f64}
      b = cast(a) {to=f16}
      c = permute(x) {perm=[2, 0, 1]}
      d = permute(c) {perm=[1, 0, 2]}
      e = slice(x) {axis=1, start=[1], end=[4], step=1}
      f = slice(e) {axis=1, start=[1], end=[3], step=2}
      g = mul(x, one)
      output b
      output d
      output f
      output g"""
    x = torch.randn(3, 5, 2) * 1000
    full = Graph.parse("graph {\n" + text + "\n}")
    want = full.run([x], 4)
    for a, b in zip(full.apply("simplify", "fold", "cse", "dce").verify().run([x], 4), want):
        assert torch.equal(a, b)


def test_fold() -> None:
    consts = "const a: f32[2, 3] = [1, 2, 3, 4, 5, 6]\n const b: f32[3] = [1, -1, 2]\n"
    chain = "c = add(a, b)\n d = permute(c) {perm=[1, 0]}\n e = reduce_sum(d) {axes=[0], keepdims=0}\n"
    assert body(consts + chain + "i = iota() {shape=[2], dtype=f32, start=-3}\n y = mul(e, i)\n output y", "fold") == []
    assert body("i = iota() {shape=[100000], dtype=f32}\n y = neg(i)\n output y", "fold") == ["iota", "neg"], "too large to keep"
    assert body("sym s = x[0]\n input x: f32[s]\n i = iota() {shape=[s], dtype=f32}\n y = neg(i)\n output y", "fold") == ["iota", "neg"]
    assert body(consts + "y = dropout(a) {p=0.5} rng=1\n output y", "fold") == ["dropout"]
    g = Graph.parse("graph {\n" + consts + "c = add(a, b)\n d = permute(c) {perm=[1, 0]}\n output d\n}")
    want = g.run([], 1)[0]
    assert torch.equal(g.apply("fold", "dce").run([], 1)[0], want)


def test_cse() -> None:
    assert body(X + "a = tanh(x)\n b = tanh(x)\n y = mul(a, b)\n output y", "cse") == ["tanh", "mul"]
    assert body(X + "a = tanh(x)\n b = exp(x)\n c = add(a, b)\n d = add(b, a)\n y = mul(c, d)\n output y", "cse") == ["tanh", "exp", "add", "mul"]
    two = X + "a = tanh(x)\n b = exp(x)\n "
    assert body(two + "c = sub(a, b)\n d = sub(b, a)\n y = mul(c, d)\n output y", "cse") == ["tanh", "exp", "sub", "sub", "mul"]
    assert body(X + "a = dropout(x) {p=0.5} rng=1\n b = dropout(x) {p=0.5} rng=2\n y = mul(a, b)\n output y", "cse") == ["dropout", "dropout", "mul"]
    assert body(X + "const p: f32[] = 2.0\n const q: f32[] = 2.0\n a = mul(x, p)\n b = mul(x, q)\n y = mul(a, b)\n output y", "cse") == ["mul", "mul"]
    assert body(X + "a = softmax(x) {axis=1}\n b = softmax(x) {axis=2}\n y = mul(a, b)\n output y", "cse") == ["softmax", "softmax", "mul"]
    assert body(X + "a = tanh(x)\n b = tanh(x) backward\n y = mul(a, b) backward\n output y", "cse") == ["tanh", "tanh", "mul"], "recompute decides"


def test_layout() -> None:
    qkv = "input q: f32[2, 3, 5, 4]\n input k: f32[2, 3, 7, 4]\n input v: f32[2, 3, 7, 6]\n a, l = attention(q, k, v) {causal=1}\n "
    turn = "p = permute(a) {perm=[0, 2, 1, 3]}\n r = reshape(p) {shape=[2, 5, 18]}\n output r"
    assert body(qkv + turn, "layout", "simplify", "dce") == ["attention", "reshape"]
    assert body(qkv + turn + "\n t = tanh(a)\n output t", "layout", "simplify", "dce") == ["attention", "permute", "reshape", "tanh"]
    for other in ("p = permute(a) {perm=[0, 1, 3, 2]}\n output p", "p = permute(a) {perm=[2, 0, 1, 3]}\n output p", "output a"):
        assert "seq_first" not in Graph.parse("graph {\n" + qkv + other + "\n}").apply("layout").verify().text()
    full = Graph.parse("graph {\n" + qkv + turn + "\n t = tanh(a)\n output t\n}").grad([1, 1, 1], [1, 1])
    ins = [torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6), torch.randn(2, 5, 18), torch.randn(2, 3, 5, 6)]
    want = full.run(ins, 5)
    made = Graph.parse("graph {\n" + qkv + turn + "\n t = tanh(a)\n output t\n}").apply("layout", "simplify").grad([1, 1, 1], [1, 1]).verify()
    for a, b in zip(made.run(ins, 5), want, strict=True):
        assert torch.equal(a, b)


def test_bias() -> None:
    linear = "input x: f32[2, 3, 5]\n param w: f32[7, 5]\n param b: f32[7]\n t = permute(w) {perm=[1, 0]}\n m = matmul(x, t, _)\n "
    assert body(linear + "y = add(m, b)\n output y", "bias") == ["permute", "matmul"]
    assert body(linear + "y = add(b, m)\n output y", "bias") == ["permute", "matmul"]
    assert body(linear + "y = add(m, b)\n output y\n output m", "bias") == ["permute", "matmul", "add"]
    g = Graph.parse("graph {\n" + linear + "y = add(m, b)\n output y\n}")
    ins = [torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7)]
    torch.testing.assert_close(g.apply("bias", "dce").verify().run(ins, 1)[0], torch.nn.functional.linear(*ins), rtol=1e-5, atol=1e-5)


NUMBERS = "".join(f"const {n}: f64[] = {v}\n" for n, v in {"half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "k": 0.044715, "other": 0.05,
                                                           "s": 0.7978845608028654, "r": 0.7071067811865476, "root2": 1.4142135623730951,
                                                           "eps": 1e-6}.items())
RMS = "q = mul(x, x)\n m = reduce_mean(q) {axes=[1], keepdims=1}\n e = add(m, eps)\n i = rsqrt(e)\n n = mul(x, i)\n y = mul(n, w)"


@pytest.mark.parametrize(("text", "left"), [
    ("c = pow(x, three)\n d = mul(c, k)\n a = add(x, d)\n b = mul(a, s)\n t = tanh(b)\n u = add(t, one)\n h = mul(x, half)\n y = mul(h, u)",
     ["gelu_tanh"]),
    ("b = mul(x, r)\n t = erf(b)\n u = add(t, one)\n h = mul(x, u)\n y = mul(h, half)", ["gelu"]),
    ("t = sigmoid(x)\n y = mul(t, x)", ["silu"]),
    (RMS, ["rms_norm"]),
    (RMS.replace("axes=[1]", "axes=[0]"), ["mul", "reduce_mean", "add", "rsqrt", "mul", "mul"]),
    ("t = sigmoid(x)\n y = mul(t, t)", ["sigmoid", "mul"]),
    ("b = div(x, root2)\n t = erf(b)\n u = add(one, t)\n h = mul(half, u)\n y = mul(x, h)", ["gelu"]),
    ("b = div(root2, x)\n t = erf(b)\n u = add(one, t)\n h = mul(half, u)\n y = mul(x, h)", ["div", "erf", "add", "mul", "mul"]),
    ("c = mul(x, x)\n c3 = mul(x, c)\n d = mul(k, c3)\n a = add(d, x)\n b = mul(s, a)\n t = tanh(b)\n u = add(t, one)\n h = mul(u, x)\n y = mul(half, h)",
     ["gelu_tanh"]),
    ("q = pow(x, two)\n m = reduce_mean(q) {axes=[1], keepdims=1}\n e = add(eps, m)\n r1 = sqrt(e)\n i = reciprocal(r1)\n y = mul(i, x)", ["rms_norm"]),
    ("q = mul(x, x)\n m = reduce_mean(q) {axes=[1], keepdims=1}\n e = add(m, eps)\n i = rsqrt(e)\n z = neg(x)\n y = mul(z, i)",
     ["mul", "reduce_mean", "add", "rsqrt", "neg", "mul"]),
    ("b = mul(x, s)\n t = erf(b)\n u = add(t, one)\n h = mul(x, u)\n y = mul(h, half)", ["mul", "erf", "add", "mul", "mul"]),
    ("c = pow(x, three)\n d = mul(c, other)\n a = add(x, d)\n b = mul(a, s)\n t = tanh(b)\n u = add(t, one)\n h = mul(x, half)\n y = mul(h, u)",
     ["pow", "mul", "add", "mul", "tanh", "add", "mul", "mul"]),
])
def test_patterns(text: str, left: list[str]) -> None:
    """The value stays what was spelled out, whatever was recognised."""
    text = f"input x: f64[7, 5]\n param w: f64[5]\n {NUMBERS}{text}\n output y"
    g = torch.Generator().manual_seed(0)
    ins = [torch.randn(7, 5, dtype=torch.float64, generator=g), torch.randn(5, dtype=torch.float64, generator=g)]
    want = Graph.parse("graph {\n" + text + "\n}").run(ins, 1)[0]
    got = Graph.parse("graph {\n" + text + "\n}").apply("patterns", "dce").verify().run(ins, 1)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert body(text, "patterns") == left


# --- the command -----------------------------------------------------------------------------------------------

TOOL = Path(engine.lib._name).parent / "om-opt"


@pytest.mark.skipif(not TOOL.exists(), reason="om-opt is not built")
def test_om_opt(tmp_path: Path) -> None:
    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(TOOL), *map(str, args)], capture_output=True, text=True, check=False)

    model = tmp_path / "m.onnx"
    model.write_bytes(test_onnx.shape_model()[0].SerializeToString())
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
