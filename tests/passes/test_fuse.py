"""The fuse pass and the `fused` operator: fused graphs give the bits of unfused ones, groups are what the rule says,
programs round-trip."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import engine
from opcheck import rand

rand = functools.partial(rand, per_axis=7, dtype=torch.float32)


def both(text: str, inputs: list[torch.Tensor], dys: list[torch.Tensor | None] | None = None, wanted: list[int] | None = None) -> str:
    """Runs with and without the pass, compares bit for bit, returns the fused text."""
    plain = engine.run(text, inputs, wanted, dys, seed=5)
    fused = engine.run(text, inputs, wanted, dys, seed=5, passes=("fuse",))
    for i, (a, b) in enumerate(zip(plain[0] + plain[1], fused[0] + fused[1])):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), (i, (a.double() - b.double()).abs().max())
    g = engine.Graph.parse(text)
    if dys is not None:
        g = g.grad(wanted or [int(t.is_floating_point()) for t in inputs], [int(d is not None) for d in dys])
    out = g.apply("fuse").verify().text()
    assert engine.Graph.parse(out).text() == out
    return out


GELU_NEW = """graph {
  input x: T[S]
  input b: T[C]
  const half: T[] = 0.5
  const one: T[] = 1.0
  const k: T[] = 0.044715
  const s: T[] = 0.7978845608
  u = add(x, b)
  q = mul(u, u)
  c = mul(q, u)
  kc = mul(c, k)
  v = add(u, kc)
  w = mul(v, s)
  t = tanh(w)
  t1 = add(t, one)
  h = mul(u, half)
  y = mul(h, t1)
  output y
}"""


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("shape", [(7, 13), (5, 3, 257), (0, 13), (1, 1), (3, 2003)])
def test_chain_with_gradient(shape: tuple[int, ...], dtype: str) -> None:
    sizes = f"{dtype}[{', '.join(map(str, shape))}]"
    text = GELU_NEW.replace("T[S]", sizes).replace("T[C]", f"{dtype}[{shape[-1]}]").replace(": T[]", f": {dtype}[]")
    t = engine.TORCH[engine.NAMES.index(dtype)]
    out = both(text, [rand(*shape, dtype=t), rand(shape[-1], dtype=t)], [rand(*shape, dtype=t)])
    left = re.findall(r"= (add|mul|tanh|tanh_grad)\(", out)
    assert len(left) <= 1, out  # everything of the full shape is inside a program
    forward = both(text, [rand(*shape, dtype=t), rand(shape[-1], dtype=t)])
    assert forward.count("= fused(") == 1


def test_strided_operands() -> None:
    text = GELU_NEW.replace("T[S]", "f32[37, 53]").replace("T[C]", "f32[53]").replace(": T[]", ": f32[]")
    x = rand(53, 37).t()
    both(text, [x, rand(106)[::2]], [rand(37, 106)[:, ::2]])


def test_values_read_elsewhere_become_outputs() -> None:
    text = """graph {
  input x: f32[7, 5]
  input w: f32[5, 3]
  a = exp(x)
  b = tanh(a)
  c = mul(b, x)
  m = matmul(b, w)
  output c
  output m
}"""
    out = both(text, [rand(7, 5), rand(5, 3)], [rand(7, 5), rand(7, 3)])
    assert re.search(r"program=\"exp:f32 0;tanh:f32 1;mul:f32 2 0;out [^\"]*\"", out), out


def test_no_cycle() -> None:
    """b is read by the matmul that c needs: exp and add may not become one node."""
    text = """graph {
  input x: f32[5, 5]
  a = exp(x)
  m = matmul(a, x)
  c = add(a, m)
  output c
}"""
    assert "fused" not in both(text, [rand(5, 5)])


def test_sizes_and_phases_part_groups() -> None:
    text = """graph {
  input x: f32[7, 5]
  input y: f32[5]
  a = exp(y)
  b = tanh(a)
  c = add(x, b)
  d = sigmoid(c)
  output d
}"""
    out = both(text, [rand(7, 5), rand(5)])
    assert out.count("= fused(") == 2, out
    joint = both(text, [rand(7, 5), rand(5)], [rand(7, 5)])
    for line in joint.splitlines():
        assert not ("fused" in line and "sigmoid_grad" in line and "sigmoid:" in line), line


def test_masks_and_mixed_classes() -> None:
    text = """graph {
  input x: f32[11, 301]
  input i: i64[301]
  input j: i64[11, 1]
  const fill: f32[] = -1.5
  c = le(i, j)
  n = isnan(x)
  k = not(n)
  b = and(c, k)
  y = where(b, x, fill)
  h = cast(y) {to=3}
  z = cast(h) {to=2}
  output z
}"""
    x = rand(11, 301)
    x[3, 7] = float("nan")
    out = both(text, [x, torch.arange(301), torch.arange(0, 330, 30)[:, None]])
    assert out.count("= fused(") == 1, out
    got = engine.run(text, [x, torch.arange(301), torch.arange(0, 330, 30)[:, None]], passes=("fuse",))[0][0]
    keep = (torch.arange(301) <= torch.arange(0, 330, 30)[:, None]) & ~x.isnan()
    assert torch.equal(got, torch.where(keep, x, torch.tensor(-1.5)).bfloat16().double())


@pytest.mark.parametrize("op", ["not(x)", "neg(x)", "add(x, x)", "mul(x, x)", "abs(x)"])
@pytest.mark.parametrize("dtype", ["i32", "i16", "i8", "u8"])
def test_integers_wrap_around_inside(op: str, dtype: str) -> None:
    kind = {"i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8}[dtype]
    text = f"""graph {{
  input x: {dtype}[301]
  y = {op}
  z = cast(y) {{to=2}}
  output z
}}"""
    x = torch.linspace(torch.iinfo(kind).min, torch.iinfo(kind).max, 301, dtype=torch.float64).long().to(kind)
    out = both(text, [x])
    assert out.count("= fused(") == 1, out
    want = {"not(x)": ~x, "neg(x)": -x, "add(x, x)": x + x, "mul(x, x)": x * x, "abs(x)": x.abs()}[op]
    assert torch.equal(engine.run(text, [x], passes=("fuse",))[0][0], want.double())


def test_dropout_inside_keeps_its_mask() -> None:
    text = """graph {
  input x: f32[13, 129]
  input r: f32[13, 129]
  a = gelu(x)
  d = dropout(a) {p=0.3} rng=9
  y = add(d, r)
  output y
}"""
    out = both(text, [rand(13, 129), rand(13, 129)], [rand(13, 129)])
    assert "p=0.3" in out and "rng=9" in out


def test_wide_groups_are_split() -> None:
    """More members and operands than one program holds."""
    n = 70
    lines = [f"  input x{i}: f32[7, 31]" for i in range(n)] + ["  s0 = exp(x0)"]
    lines += [f"  s{i} = add(s{i - 1}, x{i})" for i in range(1, n)] + [f"  output s{n - 1}"]
    out = both("\n".join(["graph {", *lines, "}"]), [rand(7, 31) * (i + 1) for i in range(n)])
    assert 2 <= out.count("= fused(") <= 8


@pytest.mark.parametrize("program,words", [
    ("", "empty"), ("add:f32 0 7", "values below"), ("blah:f32 0", "no pointwise operator"), ("exp:f33 0", "dtype"), ("add:f32 0", "takes 2 values"),
    ("exp:f64 0", "declared"), ("exp:f32 0;out 9", "out"), ("exp:f32 0 p=", "p="), ("dropout:f32 0 p=0.1 rng=x", "rng"), ("exp", "op:dtype"),
])
def test_broken_programs_are_refused(program: str, words: str) -> None:
    text = f'graph {{\n  input x: f32[3]\n  y = fused(x) {{program="{program}", out_dtype=[1]}}\n  output y\n}}'
    with pytest.raises(engine.EngineError) as e:
        engine.run(text, [rand(3)])
    assert words in str(e.value), str(e.value)


def test_random_graphs_keep_their_bits() -> None:
    """Random DAGs of elementwise operators, broadcasts, reductions and views: same bits fused and not, forward and
    backward."""
    gen = torch.Generator().manual_seed(3)

    def pick(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=gen))

    for _ in range(25):
        lines, vals = ["  input x0: f32[5, 37]", "  input x1: f32[5, 37]", "  input x2: f32[37]"], [("x0", 0), ("x1", 0), ("x2", 1)]
        for k in range(30):
            a, sa = vals[pick(len(vals))]
            b, sb = vals[pick(len(vals))]
            kind = pick(10)
            if kind < 4:
                lines.append(f"  v{k} = {('add', 'mul', 'maximum', 'sub')[kind]}({a}, {b})")
                vals.append((f"v{k}", 0 if 0 in (sa, sb) else 1))
            elif kind < 8:
                lines.append(f"  v{k} = {('tanh', 'sigmoid', 'gelu', 'sin')[kind - 4]}({a})")
                vals.append((f"v{k}", sa))
            elif kind == 8 and sa == 0:
                lines.append(f"  v{k} = reduce_mean({a}) {{axes=[0]}}")
                vals.append((f"v{k}", 1))
            else:
                lines.append(f"  v{k} = flip({a}) {{axes=[0]}}")
                vals.append((f"v{k}", sa))
        outs = {vals[-1][0], vals[-2][0], vals[3 + pick(len(vals) - 3)][0]}
        lines += [f"  output {o}" for o in sorted(outs)]
        shapes = dict(vals)
        dys = [rand(5, 37) if shapes[o] == 0 else rand(37) for o in sorted(outs)]
        both("\n".join(["graph {", *lines, "}"]), [rand(5, 37), rand(5, 37) * 0.5, rand(37)], dys)
