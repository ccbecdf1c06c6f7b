"""Random graphs over many operators: the planned run (fusion, recomputation, in place, reuse, loans, segments) against
the interpreter.

What tests/test_plan.py does with few operators and exact bits, with many: gathers and scatters, sums of a value and its
gathered self, reductions, norms, losses, attention, comparisons; up to three buffers written back with values, views of
themselves and each other; bf16 and f16; outputs that the caller has dropped. The interpreter has no planner and keeps
every value; for f64 it runs the graph as differentiation left it, for bf16 and f16 after the passes, since fusion may
round less. For an hour of them: make plan-fuzz N=20000, or

    python tests/test_plan_fuzz.py FIRST LAST        the seeds FIRST .. LAST - 1; ORTMODULE_ISA chooses the kernels
"""

from __future__ import annotations

import random
import sys

import pytest
import torch

import engine

_C = pytest.importorskip("ortmodule._C")

DTYPES = {"f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
PASSES = ("simplify", "fold", "cse", "accumulate", "remat", "dce", "fuse")
UNARY = ["tanh", "sigmoid", "gelu", "neg", "sin", "relu", "silu", "abs", "cos", "softplus"]
INPUTS = 8  # x, w, b, s, t, u, then indices
LARGEST = {"f64": 1e8, "bf16": 1e4, "f16": 1e3}


class Writer:
    """A graph being written: (n, n) matrices in `pool`, vectors of n in `vectors`."""

    def __init__(self, seed: int) -> None:
        self.r = r = random.Random(seed)
        self.dtype = "f64" if r.random() < 0.75 else r.choice(["bf16", "f16"])
        self.n = n = r.choice([1, 2, 3, 4, 5, 8, 17, 33])
        d = self.dtype
        self.lines = [f"input x: {d}[{n}, {n}]", f"param w: {d}[{n}, {n}]", f"param b: {d}[{n}]"]
        self.lines += [f"buffer {s}: {d}[{n}, {n}]" for s in "stu"]
        self.lines += [f"input i: i64[{n}]", f"input j: i64[{n}, {n}]", f"input k: i64[{n}, 1]"]
        self.pool, self.vectors, self.names = ["x", "w", "s", "t"], ["b"], 0

    def take(self, pool: list[str]) -> str:
        return self.r.choice(pool[-4:] if self.r.random() < 0.6 else pool)

    def put(self, text: str, results: int = 1) -> str:
        """Another line; -> its first result."""
        self.names += 1
        v = f"v{self.names}"
        self.lines.append(", ".join([v, *[f"{v}_{k}" for k in range(1, results)]]) + " = " + text)
        return v

    def two(self, first: str, then: str, results: int = 1) -> str:
        return self.put(then.replace("@", self.put(first, results)))

    def flat(self, a: str) -> str:
        return f"flip({self.put(f'reshape({a}) {{shape=[{self.n * self.n}]}}')}) {{axes=[0]}}"

    def gathered(self, a: str, axis: int) -> str:
        return self.r.choice([f"gather({a}, i) {{axis={axis}, padding_idx=-1}}", f"gather_elements({a}, j) {{axis={axis}}}", f"gather_nd({a}, k)"])

    def part(self, a: str, axis: int) -> tuple[str, str]:
        """A piece of `a`, and how to say which."""
        low = self.r.randrange(self.n)
        bounds = f"axis={axis}, start=[{low}], end=[{self.r.randint(low + 1, self.n)}], step={self.r.choice([1, 1, 2])}"
        return self.put(f"slice({a}) {{{bounds}}}"), bounds

    def step(self) -> None:
        r, n, put = self.r, self.n, self.put
        a, c, d = self.take(self.pool), self.take(self.pool), self.take(self.pool)
        if r.random() < 0.35:
            c = a
        if r.random() < 0.2:
            d = a
        vec, axis = self.take(self.vectors), r.randrange(2)
        choices = [
            lambda: put(f"{r.choice(['add', 'mul', 'sub', 'maximum', 'minimum'])}({a}, {c})"),
            lambda: put(f"{r.choice(UNARY)}({a})"),
            lambda: self.two(f"mul({a}, {c})", f"{r.choice(UNARY)}(@)"),
            lambda: put(f"add({a}, {vec})"),
            lambda: put(f"permute({a}) {{perm=[1, 0]}}"),
            lambda: put(f"flip({a}) {{axes=[{axis}]}}"),
            lambda: self.two(self.flat(a), f"reshape(@) {{shape=[{n}, {n}]}}"),
            lambda: put(f"{r.choice(['softmax', 'log_softmax'])}({a}) {{axis={axis}}}"),
            lambda: put(f"layer_norm({a}, {r.choice([vec, '_'])}, {r.choice([vec, '_'])}) {{axis=1, eps=0.1}}", 3),
            lambda: put(f"rms_norm({a}, {vec}) {{axis=1, eps=0.1}}", 2),
            lambda: put(f"gather({a}, i) {{axis={axis}, padding_idx={r.choice([-1, -1, 0])}}}"),
            lambda: self.two(f"gather({a}, i) {{axis={axis}, padding_idx=-1}}", f"{r.choice(['add', 'sub', 'mul'])}({a}, @)"),
            lambda: self.two(f"gather_elements({a}, j) {{axis={axis}}}", f"{r.choice(['add', 'sub', 'mul'])}({a}, @)"),
            lambda: self.two(f"gather_nd({a}, k)", f"add({a}, @)"),
            lambda: put(f"{r.choice(['tanh', 'sin'])}({self.two(self.gathered(a, axis), f'add({a}, @)')})"),
            lambda: put(f"gather_elements({a}, j) {{axis={axis}}}"),
            lambda: put(f"scatter_elements({a}, j, {c}) {{axis={axis}, reduce=1}}"),
            lambda: put(f"scatter_nd({a}, k, {c}) {{reduce={r.randrange(2)}}}"),
            lambda: self.patch(a, c, axis),
            lambda: put(f"cumsum({a}) {{axis={axis}, exclusive={r.randrange(2)}, reverse={r.randrange(2)}}}"),
            lambda: self.window(put(f"concat({a}, {c}, {d}) {{axis={axis}}}"), axis),
            lambda: put(f"trilu({a}) {{k={r.randint(-2, 2)}, upper={r.randrange(2)}}}"),
            lambda: self.reduced(a, c, axis),
            lambda: self.two(f"cross_entropy({a}, i, _) {{reduction={r.randrange(1, 3)}, label_smoothing=0.1}}", f"mul({c}, @)", 3),
            lambda: put(f"batch_norm({a}, {vec}, {vec}) {{training=1}}", 5) if n > 1 else put(f"neg({a})"),
            lambda: self.two(f"lt({a}, {c})", f"where(@, {d}, {a})"),
            lambda: put(f"pad({a}) {{lo=[1, {-(n // 2)}], hi=[-1, {n // 2}], value=0.5}}"),
            lambda: put(f"dropout({a}) {{p=0.25}} rng={self.names + 1}"),
            lambda: put(f"matmul({a}, {c})"),
            lambda: self.attention(a, c, d),
        ]
        if self.dtype != "f64":
            choices = choices[:-2]  # products round as their kernels sum
        self.pool.append(r.choice(choices)())

    def patch(self, a: str, c: str, axis: int) -> str:
        piece, bounds = self.part(a, axis)
        return self.two(f"{self.r.choice(UNARY)}({piece})", f"slice_scatter({c}, @) {{{bounds}}}")

    def window(self, v: str, axis: int) -> str:
        low = self.r.choice([0, self.n, 2 * self.n, self.n // 2])
        return self.put(f"slice({v}) {{axis={axis}, start=[{low}], end=[{low + self.n}], step=1}}")

    def reduced(self, a: str, c: str, axis: int) -> str:
        if self.r.random() < 0.3:
            self.vectors.append(self.put(f"reduce_sum({a}) {{axes=[0], keepdims=0}}"))
        v = self.put(f"reduce_{self.r.choice(['sum', 'mean', 'max', 'min'])}({a}) {{axes=[{axis}], keepdims=1}}")
        return self.put(f"{self.r.choice(['mul', 'add', 'sub'])}({c}, {v})")

    def attention(self, a: str, c: str, d: str) -> str:
        q, k, v = [self.put(f"reshape({t}) {{shape=[1, {self.n}, {self.n}]}}") for t in (a, c, d)]
        return self.two(f"attention({q}, {k}, {v}) {{causal={self.r.randrange(2)}, scale=0.3}}", f"reshape(@) {{shape=[{self.n}, {self.n}]}}", 2)

    def written(self) -> str:
        """What a buffer may become: something computed, itself or another from another side."""
        s = self.r.choice("stu")
        ways = [f"flip({s}) {{axes=[0]}}", f"permute({s}) {{perm=[1, 0]}}", f"gather({s}, i) {{axis=0, padding_idx=-1}}", ""]
        way = self.r.choice(ways)
        return self.take(self.pool) if self.r.random() < 0.4 else self.put(way) if way else s


def graph(seed: int) -> tuple[str, list[torch.Tensor], int, str]:
    """Text, inputs, number of outputs, dtype."""
    w = Writer(seed)
    for _ in range(w.r.randint(3, 18)):
        w.step()
    outputs = [w.take(w.pool) for _ in range(w.r.randint(1, 3))]
    writes = [(w.written(), s) for s in "stu" if w.r.random() < 0.3]
    w.lines += [f"output {o}" for o in outputs] + [f"write {v} -> {s}" for v, s in writes]
    g, n, dtype = torch.Generator().manual_seed(seed), w.n, DTYPES[w.dtype]
    ins = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in [(n, n), (n, n), (n,), (n, n), (n, n), (n, n)]]
    rows = torch.randint(0, n, (n,), generator=g) if w.r.random() < 0.6 else torch.randperm(n, generator=g)
    ins += [rows, torch.randint(0, n, (n, n), generator=g), torch.randperm(n, generator=g)[:, None].contiguous()]
    if w.r.random() < 0.4:
        ins[1] = ins[1].t().contiguous().t()
    return "\n".join(["graph {", *w.lines, "}"]), ins, len(outputs), w.dtype


def planned(text: str, ins: list[torch.Tensor], dys: list[torch.Tensor | None], wanted: list[int], group: list[int] | None,
            drop: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, torch.Tensor]]:  # fmt: skip
    """Outputs, the inputs as they are then, gradients. Who has a gradient changes it at once."""
    model = _C.Model.from_text(text)
    mine = [t.clone(memory_format=torch.preserve_format) for t in ins]
    v = model.variant(bytes(wanted), bytes(int(d is not None) for d in dys), group)
    run = model.forward(v, mine, 3)
    assert run.resume() is None
    outs, (state, arena), info = run.outputs(), run.state(), model.variant_info(v)
    kept, after = [o.clone() for o in outs], [t.clone() for t in mine]
    reads = [i in info["reads_outputs"] for i in range(len(outs))]
    given = [t if i in info["reads_inputs"] else None for i, t in enumerate(mine)]
    back = state.backward(arena, given, [o if r else None for o, r in zip(outs, reads)], dys, bytes(reads) if drop else None)
    grads = {}
    for s in range(info["segments"]):
        assert back.resume(s) is None
        for i, g in back.grads(s):
            grads[i] = g.clone()
            g.fill_(float("nan"))
    return kept, after, grads


def differs(seed: int) -> str | None:
    """What is wrong with graph `seed`; None: nothing; "": its numbers are too large to tell."""
    text, ins, n_out, dtype = graph(seed)
    passes = () if dtype == "f64" else PASSES
    g = torch.Generator().manual_seed(seed + 1)
    base = engine.run(engine.Graph.parse(text).apply("patterns"), ins, seed=3)[0]
    if not all(torch.isfinite(t).all() and t.abs().max() < LARGEST[dtype] for t in base):
        return ""
    dys: list[torch.Tensor | None] = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) for o in base[:n_out]]
    if n_out > 1 and seed % 3 == 0:
        dys[0] = None
    wanted = [1, 1, 1] + [0] * (len(ins) - 3)
    want, want_g = engine.run(engine.Graph.parse(text).apply("patterns"), ins, wanted, dys, seed=3, passes=passes)
    group = None if seed % 2 else [0, seed // 2 % 2, 1 - seed // 2 % 2] + [0] * (len(ins) - 3)
    got, after, got_g = planned(text, ins, dys, wanted, group, seed % 5 < 2)
    tolerance = 1e-9 if dtype == "f64" else 0.02

    def close(a: torch.Tensor, b: torch.Tensor) -> bool:
        finite = torch.isfinite(b)
        error, size = (a.double() - b.double())[finite].abs(), b.double()[finite].abs()
        return torch.equal(torch.isfinite(a), finite) and not (error.numel() and error.max() > tolerance * max(1.0, float(size.max())))

    for i in range(n_out):
        if not close(got[i], want[i]):
            return f"output {i}"
    targets = [line.split("-> ")[1] for line in text.splitlines() if line.startswith("write ")]
    for value, name in zip(want[n_out:], targets, strict=True):
        if not close(after[3 + "stu".index(name)], value):
            return f"write-back of {name}"
    for i, value in enumerate(want_g[:3]):
        if value is not None and (i not in got_g or not close(got_g[i], value)):
            return f"gradient {i}" + ("" if i in got_g else " is missing")
    return None


@pytest.mark.parametrize("block", range(4))
def test_random_graphs(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        assert not differs(seed), f"seed {seed}: {differs(seed)}\n{graph(seed)[0]}"


if __name__ == "__main__":
    first, last = int(sys.argv[1]), int(sys.argv[2])
    bad = skipped = 0
    for number in range(first, last):
        try:
            found = differs(number)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:300]}"
        skipped += found == ""
        if found:
            bad += 1
            print(f"seed {number}: {found}\n{graph(number)[0] if bad < 6 else ''}", flush=True)
    print(f"{last - first} graphs ({_C.isa()}): {bad} differ, {skipped} with numbers too large to compare")
    sys.exit(bad > 0)
