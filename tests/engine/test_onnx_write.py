"""ONNX export: the file of an engine's graph is valid, standard ONNX of the same meaning, or refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx_models import CASES, RNG, Const, Fixed, f, i64, model_of, pos, reference, shape_model, written

from engine import EngineError, Graph

# indices of pools have no standard form; a recurrence stands without the products before it
UNWRITABLE = {"MaxPool:indices", *(k for k in CASES if k.split(":")[0] in ("RNN", "GRU", "LSTM"))}


@pytest.mark.parametrize("key", [k for k in CASES if k not in UNWRITABLE])
def test_a_written_file_means_the_same(key: str) -> None:
    """The file of the engine's graph is valid, standard ONNX of the same meaning, and can be read again."""
    m, inputs = model_of(key, dynamic=key != "Conv:same")
    feeds = {k: v.value if isinstance(v, Fixed) else v for k, v in inputs.items() if not isinstance(v, Const)}
    data = written(Graph.onnx(m.SerializeToString()))
    back = onnx.load_from_string(data)
    onnx.checker.check_model(back, full_check=True)
    assert all(n.domain == "" for n in back.graph.node)
    for want, got in zip(reference(m, feeds), reference(back, feeds)):
        assert want.shape == got.shape and want.dtype == got.dtype
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    again = Graph.onnx(data).verify().run([torch.from_numpy(np.array(v)) for v in feeds.values()], len(m.graph.output))
    for want, x in zip(reference(m, feeds), again):
        torch.testing.assert_close(x, torch.from_numpy(np.array(want)), rtol=2e-5, atol=2e-5, equal_nan=True)


def test_write_refuses_what_only_backward_knows() -> None:
    with pytest.raises(EngineError, match="output 0 is known only in backward"):
        written(Graph.parse("graph {\n grad_in dy: f32[3]\n y = tanh(dy) backward\n output y\n}"))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_write_attention_turned(lead: tuple[int, ...]) -> None:
    """With time before heads the file gets a Transpose."""
    q, k, v = f(*lead, 3, 5, 7), f(*lead, 3, 11, 7), f(*lead, 3, 11, 13)
    shape = ", ".join(map(str, lead)) + ", " * bool(lead)
    text = f"graph {{\n input q: f32[{shape}3, 5, 7]\n input k: f32[{shape}3, 11, 7]\n input v: f32[{shape}3, 11, 13]\n "
    g = Graph.parse(text + "y, l = attention(q, k, v) {scale=0.3, seq_first=1}\n output y\n}").verify()
    (want,) = g.run([torch.from_numpy(x) for x in (q, k, v)], 1)
    data = written(g)
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    (got,) = reference(onnx.load_from_string(data), {"q": q, "k": k, "v": v})
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-5, atol=2e-5)


def test_write_uneven_pads_of_a_convolution() -> None:
    x, w = f(2, 3, 7, 8), f(5, 3, 2, 4)
    text = "graph {\n input x: f32[2, 3, 7, 8]\n input w: f32[5, 3, 2, 4]\n y = conv(x, w) {pad=[0, 1, 1, 2]}\n output y\n}"
    g = Graph.parse(text).verify()
    (want,) = g.run([torch.from_numpy(x), torch.from_numpy(w)], 1)
    (got,) = reference(onnx.load_from_string(written(g)), {"x": x, "w": w})
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-5, atol=2e-5)


def test_written_shapes_and_roles_are_read_back() -> None:
    m, _ = shape_model()
    g = Graph.onnx(m.SerializeToString()).apply("fold", "simplify", "cse", "dce")
    x = RNG.standard_normal((5, 11, 12)).astype(np.float32)
    np.testing.assert_allclose(reference(onnx.load_from_string(written(g)), {"x": x})[0], reference(m, {"x": x})[0], rtol=2e-5, atol=2e-5)
    text = """graph {
      sym s0 = x[0]
      sym s1 = value of n
      input x: f64[s0, 3]
      input n: i64[]
      param w: f64[3]
      buffer m: f64[3]
      y = batch_norm(x, w, _, m, m) {training=1, momentum=0.25, eps=0.5}
      i = iota() {shape=[s1*2 + 1], dtype=f64, start=[s0], step=2}
      output y
      output x
      output y
      output i
      write v2 -> m
    }"""
    text = text.replace("      y = batch", "      y, v2, v3, v4, v5 = batch")
    g = Graph.parse(text)
    data = written(g)
    back = Graph.onnx(data).text()
    for line in ("param w: f64[3]", "buffer m: f64[3]", "sym s1 = value of n", "write v", "-> m"):
        assert line in back, back
    feeds = {"x": RNG.standard_normal((7, 3)), "n": np.array(4), "w": RNG.standard_normal(3), "m": np.array([0.5, 1.0, 2.0])}
    want = g.run([torch.from_numpy(np.array(v)) for v in feeds.values()], 5)
    for a, e in zip(reference(onnx.load_from_string(data), feeds), want):
        np.testing.assert_allclose(a, e.numpy(), rtol=1e-7)


def test_operators_without_a_standard_form_are_written_as_functions_or_refused() -> None:
    """Operators ONNX has no name for are written as compositions."""
    text = """graph {
      sym s = x[0]
      input x: f32[s, 5]
      input k: i64[s]
      param w: f32[5]
      a = expm1(x)
      b = abs(a)
      c = log1p(b)
      d = silu(c)
      e = trunc(x)
      f = floor_div(x, w)
      g = mod(x, w)
      h = add(d, e)
      i = add(f, g)
      j = flip(h) {axes=[0, 1]}
      l, m, n = cross_entropy(i, k, _) {label_smoothing=0.125, ignore_index=2, reduction=1}
      o, p, q = layer_norm(x, _, _) {axis=1, eps=0.001}
      r, t = rms_norm(x, _) {axis=1, eps=0.001}
      u = ne(k, k)
      output j
      output l
      output o
      output p
      output q
      output r
      output t
      output u
    }"""
    g = Graph.parse(text)
    feeds = {"x": f(7, 5) * 3, "k": i64(7, hi=5), "w": pos(5)}
    want = g.run([torch.from_numpy(v) for v in feeds.values()], 8)
    for a, e in zip(reference(onnx.load_from_string(written(g)), feeds), want):
        np.testing.assert_allclose(a, e.numpy(), rtol=2e-5, atol=2e-5)
    assert "eps=0.001}" in Graph.onnx(written(g)).text(), "attributes are float32, the double stands beside"
    with pytest.raises(EngineError, match="writing ONNX: cross_entropy has no standard form"):
        written(Graph.parse(text.replace("output l", "output m")))
