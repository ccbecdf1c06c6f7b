"""Random graphs as text, with inputs for them: over many operators, and of optimizer steps."""

from __future__ import annotations

import random

import torch

DTYPES = {"f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
UNARY = ["tanh", "sigmoid", "gelu", "neg", "sin", "relu", "silu", "abs", "cos", "softplus"]


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


def random_graph(seed: int) -> tuple[str, list[torch.Tensor], int, str]:
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


STEPS = {"adamw_step": ("wgmv", "wmv"), "sgd_step": ("wg", "w"), "lamb_step": ("wgmvh", "wgmvh")}


def scalars(op: str) -> str:
    return {"adamw_step": "lr, step, on", "sgd_step": "lr, on", "lamb_step": "on, _, _, lr, step"}[op]


def random_update(seed: int) -> tuple[str, list[torch.Tensor]]:
    """Steps over random groups, some of them sharing tensors, reading each other's results, views of weights; random
    outputs and writes."""
    r = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    shape = r.choice([(3, 5), (4, 4), (1,), (0, 3), (70, 300)])
    kind = f"f64[{', '.join(map(str, shape))}]"
    head = ["  input lr: f32[]", "  input step: i64[]", "  input on: bool[]"]
    ins: list[torch.Tensor] = [torch.tensor(0.01), torch.tensor(3), torch.tensor(r.random() < 0.85)]
    names: dict[str, str] = {}  # value -> the input it would be written to
    for i in range(r.randint(1, 4)):
        for k in "wgmv":
            head.append(f"  {'param' if k == 'w' else 'buffer'} {k}{i}: {kind}")
            x = torch.randn(shape, generator=gen, dtype=torch.float64)
            x = x.abs() if k == "v" else x
            ins.append(x.t().contiguous().t() if r.random() < 0.2 and x.dim() == 2 else x)
            names[f"{k}{i}"] = f"{k}{i}"
    inputs = list(names)
    body: list[str] = []
    for n in range(r.randint(1, 5)):
        kind_of = r.randrange(6)
        if kind_of == 0:  # a reader of an old or a new value
            body.append(f"  y{n} = {r.choice(['tanh', 'neg'])}({r.choice(list(names))})")
            names[f"y{n}"] = ""
            continue
        if kind_of == 1:
            v = r.choice(list(names))
            body.append(f"  y{n} = flip({v}) {{axes=[0]}}" if r.random() < 0.5 else f"  y{n} = accumulate({v}, {r.choice(list(names))}, on)")
            names[f"y{n}"] = names[v] if "accumulate" in body[-1] else ""
            continue
        op = r.choice(list(STEPS))
        takes, makes = STEPS[op]
        groups = [{k: r.choice([v for v in names if v[0] in (k, "y") or r.random() < 0.1] or inputs) if r.random() < 0.3 else
                   f"{k if k != 'h' else '_'}{r.randrange(len(inputs) // 4)}" for k in takes} for _ in range(r.randint(1, 3))]
        operands = [g[k] if g[k][0] != "_" else "_" for g in groups for k in takes]
        outs = [f"{k}_{n}_{i}" for i, _ in enumerate(groups) for k in makes]
        if op == "lamb_step":
            outs.insert(0, f"s_{n}")
        body.append(f"  {', '.join(outs)} = {op}({scalars(op)}, {', '.join(operands)}) {{out_dtype=[{', '.join('0' * len(outs))}]}}")
        for i, g in enumerate(groups):
            for k in makes:
                if not g[k].startswith("_"):
                    names[f"{k}_{n}_{i}"] = names[g[k]]
    new = [v for v in names if v not in inputs]
    tail = [f"  output {v}" for v in r.sample(list(names), r.randint(0, 2))]
    written = set()
    for v in r.sample(new, len(new)):
        to = names[v] if names[v] and r.random() < 0.9 else r.choice(inputs)
        if to not in written and r.random() < 0.8:
            tail.append(f"  write {v} -> {to}")
            written.add(to)
    return "\n".join(["graph {", *head, *body, *tail, "}"]), ins
