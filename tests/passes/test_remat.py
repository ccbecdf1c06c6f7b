"""The remat pass: backward reads less of the forward, and the numbers stay the same bits."""

from __future__ import annotations

import ctypes as C
import random

import pytest
import torch
from graph_facts import facts
from graphs import random_graph

import engine
from opcheck import rand


def joint(text: str, wanted: list[int], remat: bool) -> engine.Graph:
    g = engine.Graph.parse("graph {\n" + text + "\n}").grad(wanted, [1]).apply("simplify", "cse", "dce")
    return g.apply("remat", "dce").verify() if remat else g


def kept(g: engine.Graph) -> set[str]:
    """Operators of the forward whose results backward reads (views seen through)."""
    made: dict[str, tuple[str, list[str], bool]] = {}
    out = set()
    for line in g.text().splitlines():
        if " = " not in line or "(" not in line or line.strip().startswith(("const", "sym")):
            continue
        left, right = line.strip().split(" = ", 1)
        op, rest = right.split("(", 1)
        args = [a.strip() for a in rest.split(")")[0].split(",")]
        backward = " backward" in line
        for name in left.split(","):
            made[name.strip()] = op, args, backward
        for a in args:
            while a in made and made[a][0] in ("permute", "reshape", "expand", "slice"):
                a = made[a][1][0]
            if backward and a in made and not made[a][2]:
                out.add(made[a][0])
    return out


MLP = """input x: f64[7, 5]
  param w: f64[5, 11]
  param v: f64[11, 3]
  h = matmul(x, w, _)
  """

CASES = {
    # name: (text, wanted, shapes of inputs, kept without, kept with)
    "activation": (MLP + "a = gelu_tanh(h)\n y = matmul(a, v, _)\n output y", [0, 1, 1], {"matmul", "gelu_tanh"}, {"matmul"}),
    "chain": (MLP + "s = sigmoid(h)\n a = mul(h, s)\n y = matmul(a, v, _)\n output y", [0, 1, 1], {"matmul", "sigmoid", "mul"}, {"matmul"}),
    "through a view": (MLP + "a = gelu_tanh(h)\n r = reshape(a) {shape=[1, 7, 11]}\n q = reshape(r) {shape=[7, 11]}\n y = matmul(q, v, _)\n "
                       "output y", [0, 1, 1], {"matmul", "gelu_tanh"}, {"matmul"}),
    "dropout": (MLP + "a = tanh(h)\n d = dropout(a) {p=0.5} rng=1\n y = matmul(d, v, _)\n output y", [0, 1, 1], {"tanh", "dropout"}, {"tanh"}),
    "an output stays": (MLP + "a = gelu_tanh(h)\n y = matmul(a, v, _)\n output y\n output a", [0, 1, 1], {"matmul", "gelu_tanh"},
                        {"matmul", "gelu_tanh"}),
    "nothing to compute it from": (MLP + "a = relu(h)\n y = matmul(a, v, _)\n output y", [0, 1, 1], {"relu"}, {"relu"}),
    "of inputs alone": ("input x: f64[7, 5]\n param w: f64[5, 11]\n param v: f64[11, 3]\n a = tanh(x)\n h = matmul(a, w, _)\n "
                        "y = matmul(h, v, _)\n output y", [0, 1, 1], {"tanh", "matmul"}, {"tanh", "matmul"}),
}  # fmt: skip


HALVES = """input x: f32[7, 5]
  param w: f32[5, 11]
  c = cast(x) {to=bf16}
  d = cast(w) {to=bf16}
  h = matmul(c, d, _)
  """


@pytest.mark.parametrize(("text", "without", "with_", "casts"), [
    ("a = cast(h) {to=f32}\n b = gelu_tanh(a)\n s = tanh(a)\n y = mul(b, s)", {"cast", "gelu_tanh", "tanh"}, {"cast", "matmul"}, 2),
    ("p = permute(h) {perm=[1, 0]}\n a = cast(p) {to=f32}\n y = gelu(a)", {"cast"}, {"cast", "matmul"}, 1),
    # elu, computed in f32 and rounded: neither where the exponential is taken stays, nor of what
    ("const zero: f32[] = 0\n const alpha: f32[] = 0.7\n a = cast(h) {to=f32}\n p = gt(a, zero)\n l = where(p, zero, a)\n e = expm1(l)\n"
     " t = mul(e, alpha)\n s = where(p, a, t)\n y = cast(s) {to=bf16}", {"gt", "where"}, {"cast", "matmul"}, 2),
    ("a = cast(h) {to=f32}\n y = gelu(a)\n output a", {"cast"}, {"cast"}, 0),  # handed out, so there
    ("k = slice(h) {axis=1, start=[0], end=[2], step=1}\n a = cast(k) {to=f32}\n y = gelu(a)", {"cast"}, {"cast"}, 0),  # less than what it is of
])  # fmt: skip
def test_halves_are_kept_instead_of_their_copies(text: str, without: set[str], with_: set[str], casts: int) -> None:
    """What is left of casts among kept: those of the product's operands. Every chain of the backward has its own."""
    got = []
    for remat in (False, True):
        full = "graph {\n" + HALVES + text.replace("\n output a", "") + "\n output y\n" + (" output a\n" if "output a" in text else "") + "}"
        arriving = [1, 0] if "output a" in text else [1]
        g = engine.Graph.parse(full).grad([0, 1], arriving).apply("simplify", "cse", "dce")
        if remat:
            g = g.apply("remat", "dce").verify()
            widen = [line for line in g.text().splitlines() if "{to=f32}" in line and " backward" in line and "f32[5, 11]" not in line]
            assert len(widen) == casts, g.text()
        assert kept(g) >= (with_ if remat else without), g.text()
        assert not remat or not kept(g) & {"gt", "where", "expm1"}, g.text()
        y = engine.run(full, [rand(7, 5).float(), rand(5, 11).float()])[0][0]
        got.append(g.run([rand(7, 5).float(), rand(5, 11).float(), torch.ones_like(y)], len(arriving) + 1, 5))
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_backward_reads_only_what_is_dear(name: str) -> None:
    text, wanted, without, with_ = CASES[name]
    arriving = [1] + [0] * (text.count("output ") - 1)
    inputs = [rand(7, 5), rand(5, 11), rand(11, 3)]
    got = []
    for remat in (False, True):
        g = engine.Graph.parse("graph {\n" + text + "\n}").grad(wanted, arriving).apply("simplify", "cse", "dce")
        if remat:
            g = g.apply("remat", "dce").verify()
        assert kept(g) == (with_ if remat else without), g.text()
        got.append(g.run([*inputs, rand(7, 3)], len(arriving) + 2, 5))
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


def test_written_inputs_are_not_read_again() -> None:
    """b is overwritten at the end of the forward: what was computed from it must be kept."""
    text = """input x: f64[7, 5]
      param w: f64[5, 11]
      buffer b: f64[7, 11]
      param v: f64[11, 3]
      h = matmul(x, w, _)
      g = gelu_tanh(h)
      s = add(g, b)
      y = matmul(s, v, _)
      m = sigmoid(h)
      write m -> b
      output y"""
    g = joint(text, [0, 1, 0, 1], True)
    assert "add" in kept(g), g.text()


def test_norm_is_computed_from_its_input() -> None:
    text = """input x: f64[7, 5]
      param w: f64[5, 5]
      param s: f64[5]
      param b: f64[5]
      param v: f64[5, 3]
      h = matmul(x, w, _)
      n, mean, rstd = layer_norm(h, s, b) {axis=1, epsilon=1e-5}
      y = matmul(n, v, _)
      output y"""
    inputs = [rand(7, 5), rand(5, 5), rand(5), rand(5).flip(0), rand(5, 3)]
    x, w, s, b, v = (t.clone().requires_grad_() for t in inputs)
    dy = rand(7, 3)
    want = torch.autograd.grad(torch.nn.functional.layer_norm(x @ w, (5,), s, b, 1e-5) @ v, (w, s, b, v), dy)
    g = joint(text, [0, 1, 1, 1, 1], True)
    assert g.text().count("layer_norm(") == 2 and "backward" in [x for x in g.text().splitlines() if "layer_norm(" in x][1]
    for got, ref in zip(g.run([*inputs, dy], 5)[1:], want, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-12, atol=1e-12)


ELEMENTWISE = {
    "square": ("y = mul(h, h)", lambda h: h * h),
    "chain": ("a = mul(h, h)\n b = add(a, h)\n y = abs(b)", lambda h: (h * h + h).abs()),
    "gelu": ("y = gelu(h)", torch.nn.functional.gelu),
    "silu": ("y = silu(h)", torch.nn.functional.silu),
    "product": ("a = sigmoid(h)\n b = mul(a, h)\n y = mul(b, h)", lambda h: h.sigmoid() * h * h),
}
READERS = {
    "amax": ("m = reduce_max(y) {axes=[1], keepdims=0}", lambda y: y.amax(1)),
    "amin": ("m = reduce_min(y) {axes=[1], keepdims=0}", lambda y: y.amin(1)),
    "by the largest": ("r = reduce_max(y) {axes=[1], keepdims=1}\n m = div(y, r)", lambda y: y / y.amax(1, keepdim=True)),
    "shifted": ("r = reduce_max(y) {axes=[1], keepdims=1}\n d = sub(y, r)\n m = exp(d)", lambda y: (y - y.amax(1, keepdim=True)).exp()),
}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("chain", ELEMENTWISE)
def test_computed_again_with_the_same_bits(chain: str, reader: str, dtype: str) -> None:
    """Backward asks where the largest element is, of values that it computes again from h: in registers, beside a
    maximum from memory."""
    made, f = ELEMENTWISE[chain]
    taken, g = READERS[reader]
    text = f"graph {{\n input x: {dtype}[8, 16]\n param w: {dtype}[8, 16]\n h = concat(x, w) {{axis=1}}\n {made}\n {taken}\n output m\n}}"
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    x, w = rand(8, 16).to(torch_dtype), (rand(8, 16).flip(0) * 1.5).to(torch_dtype).requires_grad_()
    want = g(f(torch.cat([x, w], 1)))
    dy = rand(*want.shape).to(torch_dtype)
    want.backward(dy)
    mine = engine.Graph.parse(text).apply("simplify", "patterns")
    _, (dw,) = engine.run(mine, [x, w.detach()], [0, 1], [dy], passes=("simplify", "cse", "remat", "dce", "fuse"))
    assert w.grad is not None and w.grad.abs().sum() > 0
    torch.testing.assert_close(dw, w.grad, rtol=0.05, atol=0.05)


def test_computed_again_beside_what_was_kept() -> None:
    """exp(y - q) where q was made of the rounded y: half a unit of y at 200 is a quarter of e's value."""
    text = ("graph {\n input x: bf16[8, 16]\n param w: bf16[8, 16]\n h = concat(x, w) {axis=1}\n y = mul(h, h)\n"
            " r = reduce_max(y) {axes=[1], keepdims=1}\n s = floor(r)\n q = stop_grad(s)\n d = sub(y, q)\n e = exp(d)\n m = reduce_sum(e) "
            "{axes=[1], keepdims=0}\n"
            " output m\n output q\n}")  # fmt: skip
    x, w = (rand(8, 16) * 4).bfloat16(), (rand(8, 16).flip(0) * 5).bfloat16().requires_grad_()
    y = torch.cat([x, w], 1).square()
    want = (y - y.amax(1, keepdim=True).floor()).exp().sum(1)
    want.sum().backward()
    _, (dw,) = engine.run(text, [x, w.detach()], [0, 1], [torch.ones_like(want), None], passes=("simplify", "cse", "remat", "dce", "fuse"))
    assert w.grad is not None
    torch.testing.assert_close(dw, w.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_where_pytorch_has_them(dtype: torch.dtype) -> None:
    """A comparison, a rounding: of the number that its dtype holds, not of the longer one in a register."""
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    text = (f"graph {{\n input x: {name}[4096]\n input t: {name}[]\n a = mul(x, x)\n c = gt(a, t)\n y = where(c, x, a)\n b = mul(a, x)\n"
            f" z = floor(b)\n i = cast(b) {{to=i64}}\n u = mul(b, x)\n v = isinf(u)\n output y\n output z\n output i\n "
            "output v\n}")
    x, t = (rand(4096) * 4).to(dtype), torch.tensor(1.0, dtype=dtype)
    x[:64] *= 64
    got, _ = engine.run(text, [x, t], passes=("fuse",))
    a = x * x
    b = a * x
    for mine, want in zip(got, [torch.where(a > t, x, a), b.floor(), b.nan_to_num(0, 0, 0).long(), (b * x).isinf()], strict=True):
        ok = torch.isfinite(want.double()) & torch.isfinite(b)
        assert torch.equal(mine[ok].double(), want[ok].double())
    assert torch.equal(got[3], (b * x).isinf())


# --- any legal set of flags
# ---------------------------------------------------------------------------------------------------------


class Joint:
    """A graph with gradients, to which flags are applied (csrc/passes/remat.h)."""

    def __init__(self, g: engine.Graph) -> None:
        self.g, self.f, self.owner = g, facts(g), g.owner
        engine._owners[self.owner] += 1  # a garbage collector may take g first
        first, node = (C.addressof(p.contents) for p in (self.f.users.first, self.f.users.node))
        self.values = (node - first) // 4 - 1

    def __del__(self) -> None:
        engine.lib.om_free(C.c_void_p(self.owner), C.byref(self.f))
        engine.release(self.owner)

    def illegal(self, v: int) -> str | None:
        why = engine.lib.om_remat_illegal
        why.restype, why.argtypes = C.c_char_p, [C.c_void_p, C.c_uint32]
        said = why(C.byref(self.f), v)
        return said.decode() if said else None

    def apply(self, flags: set[int]) -> engine.Graph:
        out = C.c_void_p()
        again = bytes(int(v in flags) for v in range(self.values))
        self.g.cx.check(engine.lib.om_remat_apply(self.g.cx.p, C.byref(self.f), again, C.byref(out)))
        return engine.Graph(self.g.cx, out)


@pytest.mark.parametrize("block", range(4))
def test_any_legal_set_gives_the_same_bits(block: int) -> None:
    """All values that may be flagged, about half of them, a tenth: node by node, and (f64, f32 keep their bits there)
    fused."""
    longer = 0
    for seed in range(block * 30, block * 30 + 30):
        r = random.Random(seed)
        text, ins, n_out, dtype = random_graph(seed)
        base = engine.run(text, ins, seed=3)[0]
        if not all(torch.isfinite(t).all() for t in base):
            continue
        dys = [torch.randn(o.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(o.dtype) for o in base[:n_out]]
        wanted = [1, 1, 1] + [0] * (len(ins) - 3)
        joint = Joint(engine.Graph.parse(text).grad(wanted, [1] * n_out).apply("simplify", "cse", "dce"))
        n, nodes = len(base) + 3, joint.g.text().count(" = ")
        legal = [v for v in range(joint.values) if not joint.illegal(v)]
        want = joint.g.run([*ins, *dys], n, 3)
        for share in (1.0, 0.5, 0.1):
            g = joint.apply({v for v in legal if r.random() < share}).verify()
            longer += g.text().count(" = ") > nodes
            for fused in range(1 + (dtype == "f64")):
                if fused:
                    g.apply("dce", "fuse").verify()
                for a, b in zip(g.run([*ins, *dys], n, 3), want, strict=True):
                    assert (a is None) == (b is None), (seed, share)
                    assert a is None or b is None or torch.equal(a.nan_to_num(7), b.nan_to_num(7)), (seed, share, fused, text)
    assert longer > 20


def test_an_illegal_flag_is_refused_by_name() -> None:
    text = """graph {
      input x: f64[4, 5]
      param w: f64[5, 5]
      param s: f64[5]
      buffer m: f64[5]
      buffer q: f64[5]
      h = matmul(x, w, _)
      d = dropout(h) {p=0.5} rng=7
      r = permute(d) {perm=[1, 0]}
      t = tanh(r)
      u = permute(t) {perm=[1, 0]}
      y, m1, q1, mean, rstd = batch_norm(u, s, s, m, q) {training=1}
      c = add(y, m)
      z = mul(c, c)
      a, b, e, f, i = batch_norm(z, s, s, _, _) {training=1}
      output a
      write m1 -> m
      write q1 -> q
    }"""
    joint = Joint(engine.Graph.parse(text).grad([0, 1, 1, 0, 0], [1]))
    names = "x w s m q h d r t u y m1 q1 mean rstd c z a b e f i".split()
    assert [line.split(" = ")[0].strip() for line in joint.g.text().splitlines() if " = " in line][:3] == ["h", "d", "r"]
    state, old = "a write stores it", "computed from what the forward overwrites"
    refused = {"x": "graph input", "w": "graph input", "s": "graph input", "m": "graph input", "q": "graph input", "r": "is a view", "u": "is a view",
               "m1": state, "q1": state, "c": old}  # fmt: skip
    last = None
    for v in range(joint.values):
        why = joint.illegal(v)
        name = names[v] if v < len(names) else None
        assert (name not in refused) == (why is None) if name else why, (v, name, why)
        if why is None:
            assert joint.apply({v}).verify()
            continue
        with pytest.raises(engine.EngineError, match="cannot be computed again in backward: ") as error:
            joint.apply({v})
        assert why in str(error.value) and refused.get(name or "", "") in why
        assert name is None or str(error.value).startswith(f"{name} (output ")
        last = why
    assert last == "it is a value of the backward"
    assert "1 of batch_norm" in str(pytest.raises(engine.EngineError, joint.apply, {names.index("m1")}).value)


@pytest.mark.parametrize(("training", "more"), [(0, ""), (1, "c = add(y, m1)\n")])
def test_running_statistics_that_matter_are_not_read_again(training: int, more: str) -> None:
    """Evaluated by them, or new ones that forward reads: a clone would see what the forward has stored."""
    text = f"""graph {{
      input x: f64[4, 5]
      param s: f64[5]
      buffer m: f64[5]
      buffer q: f64[5]
      h = exp(x)
      y, m1, q1, mean, rstd = batch_norm(h, s, s, m, q) {{training={training}}}
      {more}z = mul({"c" if more else "y"}, y)
      n = add(m, s)
      output z
      write n -> m
      write q1 -> q
    }}"""
    joint = Joint(engine.Graph.parse(text).grad([1, 1, 0, 0], [1]))
    assert [line.split(" = ")[0].strip() for line in joint.g.text().splitlines() if " = " in line][1].startswith("y, m1")
    assert joint.illegal(5) == "it is computed from what the forward overwrites"  # y


def test_random_without_a_stream_and_the_host_are_refused() -> None:
    text = """graph {
      input x: f64[4]
      d = dropout(x) {p=0.5}
      k = host(d) {index=0, out_dtype=[2], shape0=[4], diff=0}
      g = dropout(k) {p=0}
      output g
    }"""
    joint = Joint(engine.Graph.parse(text))
    assert [joint.illegal(v) for v in range(1, 4)] == ["it is random and has no stream", "the host computes it", None]


def test_an_update_reads_the_forward() -> None:
    """A graph that updates has no backward: nothing is computed again for it, and it may not be flagged."""
    _C = pytest.importorskip("ortmodule._C")
    text = """graph {
      input x: f64[4, 4]
      input on: bool[]
      buffer w: f64[4, 4]
      buffer u: f64[4, 4]
      a = matmul(x, x, _)
      b = tanh(a)
      e = accumulate(w, b, on) update
      f = accumulate(u, a, on) update
      write e -> w
      write f -> u
    }"""
    model = _C.Model.from_text(text)
    x, w, u = rand(4, 4), torch.zeros(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    run = model.forward(model.variant(bytes(4), b""), [x, torch.tensor(False), w, u], 0)
    assert run.resume() is None
    torch.testing.assert_close(w, (x @ x).tanh(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(u, 1 + x @ x, rtol=1e-12, atol=1e-12)
    joint = Joint(engine.Graph.parse(text))
    assert [joint.illegal(v) for v in range(4, 8)] == [None, None, "it is an update", "it is an update"]
