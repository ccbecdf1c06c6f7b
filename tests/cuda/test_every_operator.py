"""Every operator of the engine on the fake GPU: in a kernel (cuda.def), or by the CPU's row between copies, named by
om_cuda_host_op; the numbers are those of a step planned for the CPU (the very same of what moves, compares, or rounds
once: BITS), and the bits are the same when threads and blocks take turns in another order.

The list of operators is the engine's own (graph/ops.def, pointwise.def). One that is in no case here fails the first
test; one that is neither lowered nor named in ON_THE_CPU, or both, fails the others."""

from __future__ import annotations

import ast
import re

import pytest
from cuda.children import child, on_fake

from engine import ROOT

pytestmark = on_fake

ON_THE_CPU: set[str] = set()  # docs/GPU_STATUS.md
VIEWS = {"reshape", "permute", "expand", "slice", "flip", "stop_grad", "straight_through", "zero_grad"}  # move nothing
BY_THE_HOST = {"host", "host_grad"}  # PyTorch's: tests/cuda/test_cuda_graphs.py

BITS = {
    "copy", "concat", "pad", "slice", "slice_put", "slice_scatter", "trilu", "fill", "iota", "argmax", "argmin", "reduce_max", "reduce_min", "max_pool", "topk",
    "gather_elements", "gather_nd", "cast_all", "accumulate", "all_finite", "im2col", "col2im", "dropout", "cast", "where", "neg", "abs", "sign", "relu", "add", "sub",
    "mul", "div", "sqrt", "maximum", "minimum", "ceil", "floor", "round", "trunc", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "isinf",
}  # fmt: skip


def rows() -> list[tuple[str, str, int]]:
    """name, rule, arity of each elementwise operator"""
    text = (ROOT / "csrc/graph/pointwise.def").read_text()
    return [(n, rule, int(k)) for n, k, rule in re.findall(r"^PW\((\w+),\s*(\d),\s*(\w+),", text, re.M)]


def operators() -> set[str]:
    return set(re.findall(r"^OP\((\w+),", (ROOT / "csrc/graph/ops.def").read_text(), re.M)) | {n for n, _, _ in rows()}


def lowered() -> set[str]:
    return set(re.findall(r"^ROW\((\w+),", (ROOT / "csrc/cuda/cuda.def").read_text(), re.M)) | {n for n, _, _ in rows()}


# operator, operands as kind:sizes, results, attributes
SIMPLE = [
    ("copy", "5,7", 1, ""), ("concat", "5,7 5,2", 1, "axis=1"), ("pad", "5,7", 1, "lo=[1, -1], hi=[0, 2], value=0.5"),
    ("slice", "5,9", 1, "axis=1, start=[2], end=[8], step=2"), ("slice_put", "5,3", 1, "axis=1, start=[2], end=[8], step=2, shape=[5, 9]"),
    ("slice_scatter", "5,9 5,3", 1, "axis=1, start=[2], end=[8], step=2"), ("trilu", "2,5,7", 1, "k=1, upper=0"),
    ("fill", "", 1, "shape=[3, 4], dtype=f32, value=2.5"), ("iota", "", 1, "shape=[9], dtype=i64, start=3, step=2"),
    ("reduce_sum", "5,70", 1, "axes=[1]"), ("reduce_mean", "5,70", 1, "axes=[0]"), ("reduce_max", "5,70", 1, "axes=[1]"), ("reduce_min", "5,70", 1, "axes=[1]"),
    ("reduce_prod", "5,7", 1, "axes=[1]"), ("argmax", "5,300", 1, "axis=1"), ("argmin", "5,40,3", 1, "axis=1, keepdims=1"), ("argmax", "idx4:5,300", 1, "axis=1"),
    ("cumsum", "5,300", 1, "axis=1"), ("cumsum", "40,6", 1, "axis=0, exclusive=1, reverse=1"), ("cumsum", "idx4:3,50", 1, "axis=1"),
    ("softmax", "5,70", 1, "axis=1"), ("log_softmax", "5,70", 1, "axis=0"), ("layer_norm", "5,70 70 70", 3, "axis=1, eps=0.001"),
    *[("layer_norm", f"7,{n} {n} {n}", 3, f"axis=1, eps=0.001, to={half}") for n in (70, 72, 1500, 4400) for half in ("bf16", "f16")],
    ("rms_norm", "90,72 72", 2, "axis=1, to=bf16"), ("rms_norm", "3,4401 4401", 2, "axis=1, to=f16"),
    ("rms_norm", "5,70 70", 2, "axis=1, eps=0.001"), ("batch_norm", "6,5,3,4 5 5 5 pos:5", 5, "training=1, momentum=0.2, eps=0.01"),
    ("batch_norm", "6,5 5 5 5 pos:5", 5, "training=0"), ("batch_norm", "6,5", 5, "training=1"), ("matmul", "3,5,7 7,4 4", 1, ""),
    ("attention", "2,4,9,8 2,2,9,8 2,2,9,8", 2, "causal=1, scale=0.3"), ("gather", "4,7 idx4:9", 1, "axis=0"), ("gather_elements", "4,7 idx4:6,7", 1, "axis=0"),
    ("scatter_elements", "4,7 idx4:6,7 6,7", 1, "axis=0, reduce=1"), ("scatter_elements", "4,7 idx4:6,7 6,7", 1, "axis=0, reduce=2"),
    ("scatter_elements", "5,4 idx4:5,9 5,9", 1, "axis=1"), ("gather_nd", "4,4,7 idx4:9,2", 1, ""), ("scatter_nd", "4,4,7 idx4:9,2 9,7", 1, "reduce=1"),
    ("scatter_nd", "4,4 idx4:300,2 300", 1, "reduce=1"), ("scatter_nd", "idx4:4,4 idx4:300,2 idx4:300", 1, ""), ("scatter_nd", "idx4:4,4 idx4:300,2 idx4:300", 1, "reduce=1"),
    ("cross_entropy", "9,4 idx4:9 4", 3, "reduction=1, label_smoothing=0.1"), ("conv", "2,4,9,8 6,2,3,2 6", 1, "stride=[2, 1], pad=[1, 0, 1, 0], groups=2"),
    ("conv_transpose", "2,4,5,6 4,3,3,2", 1, "stride=[2, 1], pad=[1, 0, 1, 0], groups=2"),
    ("im2col", "2,3,7,8", 1, "kernel=[3, 2], stride=[2, 1], pad=[1, 0, 1, 1], dilation=[1, 2]"),
    ("col2im", "2,18,28", 1, "size=[7, 8], kernel=[3, 2], stride=[2, 1], pad=[1, 0, 1, 1], dilation=[1, 2]"),
    ("max_pool", "2,3,9,11", 2, "kernel=[3, 2], stride=[2, 1], pad=[1, 1], dilation=[1, 2], ceil=1"), ("max_pool", "3,300", 2, "kernel=[6], stride=[1]"),
    ("avg_pool", "2,3,9,11", 1, "kernel=[3, 2], stride=[2, 1], pad=[1, 1], ceil=1"), ("avg_pool", "2,3,9", 1, "kernel=[2], stride=[3], count_include_pad=0"),
    ("adaptive_avg_pool", "2,3,7,5", 1, "size=[3, 8]"), ("topk", "5,300", 2, "axis=1, k=[7]"), ("topk", "40,3", 2, "axis=0, k=[40], largest=0"),
    ("topk", "idx4:3,40", 2, "axis=1, k=[9]"), ("topk", "2,1500", 2, "axis=1, k=[300]"), ("topk", "idx4:3000,2", 2, "axis=0, k=[70], largest=0"),
    ("topk", "1,33000", 2, "axis=1, k=[5]"), *[(f"reduce_{n}", f"{k}5,0,3", 1, "axes=[1]") for n in ("sum", "mean", "max", "min", "prod") for k in ("", "idx4:")],
    *[("attention", f"2,4,9,8 2,2,9,8 2,2,9,8 {mask}", 2, "causal=1, scale=0.3") for mask in ("2,1,9,9", "4,1,9", "9", "1,4,9,9", "1")],
    ("attention", "2,4,9,8 2,2,40,8 2,2,40,8 2,4,9,40", 2, "dropout=0.3"), ("attention", "0,4,9,8 0,2,9,8 0,2,9,8 9,9", 2, ""), ("cumprod", "5,30", 1, "axis=1"), ("cumprod", "idx4:30,5", 1, "axis=0"), ("logcumsumexp", "30,5", 1, "axis=0"), ("logcumsumexp", "odd:4,4", 1, "axis=1"),
    *[("cdist", "3,5,4 3,6,4", 1, f"p={p}") for p in ("0.", "1.", "2.", "3.5", "-1.")], ("search_sorted", "up:40 5,6", 1, "right=1"),
    ("search_sorted", "up:5,40 5,6", 1, ""), ("search_sorted", "steps:40 idx4:5,6", 1, ""), ("grouped_matmul", "150,6 3,6,70 ends:3", 1, ""),
    ("grouped_outer", "150,6 150,70 ends:3", 1, ""), *[(n, "unit:5,60", 1, "") for n in ("acos", "asin", "atanh", "tan", "atan", "sinh", "cosh")],
    ("acosh", "over:5,60", 1, ""), *[(n, "pos:5,60", 1, "") for n in ("lgamma", "digamma", "trigamma")], ("atan2", "5,60 5,60", 1, ""), ("xlogy", "5,60 pos:5,60", 1, ""),
    ("recurrent", "4,2,12 12,3 _ 2,3 2,3", 4, "kind=2"), ("recurrent", "4,2,9 9,3 9 2,3 _", 4, "kind=3"), ("recurrent", "4,2,9 9,3 _ 2,3 _", 4, "kind=3, reverse=1"),
    ("recurrent", "5,18,160 160,40 _ 18,40 18,40", 4, "kind=2, reverse=1"), ("recurrent", "3,18,120 120,40 120 18,40 _", 4, "kind=3"),
    ("recurrent", "3,18,40 40,40 _ 18,40 _", 4, "kind=0"), ("recurrent", "3,2,5 5,5 _ 2,5 _", 4, "kind=1, reverse=1"), ("recurrent", "0,2,12 12,3 _ 2,3 2,3", 4, "kind=2"),
    ("ctc_loss", "log:9,2,4 label:2,3 _ frames:2 letters:2", 1, ""), ("ctc_loss", "log:9,2,4 label:5 _ frames:2 letters:2", 1, "zero_infinity=1"),
    ("ctc_loss", "log:9,2,4 label:2,9 some:2,9 frames:2 letters:2", 1, ""), ("dropout", "7,90", 1, "p=0.25"),
    ("fused", "5,60 60", 1, 'program="tanh:@ 0;mul:@ 2 1;gelu:@ 3;out 4", out_dtype=[#]'), ("cast_all", "5,7 9 0,3", 3, "out_dtype=[1, 3, #]"), ("clip_by_norm", "5,7 norm:", 1, "max_norm=0.5"),
    ("l2_norm_all", "5,7 9", 1, ""), ("all_finite", "5,7 9", 1, ""), ("accumulate", "5,7 5,7", 1, ""), ("sgd_step", "lr: _ 5,7 5,7", 1, "out_dtype=[#]"),
    ("adamw_step", "lr: count: _ 5,7 5,7 5,7 pos:5,7", 3, "out_dtype=[#, #, #]"),
    ("lamb_step", "_ _ _ lr: count: 5,7 5,7 5,7 pos:5,7 _", 6, "out_dtype=[0, #, #, #, #, 0]"),
    ("l2_norm_all", "60,70 0,3 9", 1, ""), ("all_finite", "60,70 0,3 9", 1, ""), ("sgd_step", "lr: _ 60,70 60,70 0,3 0,3 9 9", 3, "out_dtype=[#, #, #]"),
    ("adamw_step", "lr: count: _ 60,70 60,70 60,70 pos:60,70 9 9 9 pos:9", 6, "out_dtype=[#, #, #, #, #, #], adam_mode=1, correct_bias=0"),
    ("lamb_step", "_ norm: norm: lr: count: 60,70 60,70 60,70 pos:60,70 _ 9 9 9 pos:9 9", 11, "out_dtype=[0, #, #, #, #, 0, #, #, #, #, #], max_norm_clip=0.5, ratio_max=3.0"),
]  # fmt: skip

HEAD = """
import os, torch, engine, re
from cuda import fake
from device import steps
TYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
cxs = {device: steps.cx(device) for device in ("cpu", "cuda-fake")}
seen = set()
def step(device, text, ins, back):
    model = steps.Model.text(cxs[device], text)
    try:
        wanted = [int(back > 0 and t.is_floating_point()) for t in ins]
        outs = model.step(ins, seed=3).outputs
        g = torch.Generator().manual_seed(5)
        dys = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) if y.is_floating_point() else None for y in outs]
        dys = [None if k >= back else d for k, d in enumerate(dys)]
        s = model.step(ins, wanted, dys, seed=3) if back else None
        v = model.variant(wanted, [int(d is not None) for d in dys]) if back else steps.FORWARD
        if device != "cpu":
            seen.update(re.findall(r"= (\\w+)\\(", text + model.print(v)))
        return outs, s and s.grads
    finally:
        model.free()
def both(text, ins, near):
    "False: the CPU's engine does not take it."
    want = None
    for back in (9, 1, 0):  # gradients arrive at so many outputs
        try:
            want = step("cpu", text, ins, back)
        except engine.EngineError as e:
            reason = e
            continue
        got = step("cuda-fake", text, ins, back)
        fake.seed(int(os.environ["OM_FAKE_SEED"]) + 5)
        again = step("cuda-fake", text, ins, back)
        fake.seed(int(os.environ["OM_FAKE_SEED"]))
        assert all(map(steps.same, got[0], again[0])) and (got[1] or {}).keys() == (again[1] or {}).keys(), text
        assert all(steps.same(t, again[1][i]) for i, t in (got[1] or {}).items()), text
        break
    if want is None:
        refused.append(str(reason))
        return False
    least = 0 if all(t.dtype == torch.float64 for t in ins if t.is_floating_point()) else 2.0**-23  # half types are computed in f32
    for k, (x, y) in enumerate([*zip(want[0], got[0], strict=True)] + [(want[1][i], got[1][i]) for i in want[1] or {}]):
        assert x.dtype == y.dtype and x.shape == y.shape, (text, k)
        if not x.is_floating_point():
            assert torch.equal(x, y), (text, k, x, y)
            continue
        a, b = x.double(), y.double()
        top = a[a.isfinite()].abs().max() if near > 99 and a.isfinite().any() else a.abs()
        good = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= near * max(UNIT[x.dtype], least) * (1 + top))
        assert bool(good.all()), (text, k, a[~good][:5], b[~good][:5])
    return True
refused = []
"""

NODES = """
def operand(kind, shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    normal, flat = torch.randn(shape, generator=g, dtype=torch.float64), torch.rand(shape, generator=g, dtype=torch.float64)
    floats = {"": normal, "pos": flat * 3 + 0.3, "norm": flat + 1, "unit": flat * 1.8 - 0.9, "over": flat * 3 + 1.1, "up": normal.flatten().sort().values.view(shape) if not shape or len(shape) < 2 else normal.sort(-1).values}
    if kind in floats:
        return floats[kind].to(dtype)
    if kind == "odd":
        inf, nan = float("inf"), float("nan")
        return torch.tensor([[-inf, nan, -inf, 1], [inf, nan, inf, 1], [nan, -inf, 1, inf], [-inf, -inf, 1, inf]], dtype=dtype)
    if kind == "log":
        return normal.log_softmax(-1).to(dtype)
    return {"idx4": lambda: torch.randint(0, 4, shape, generator=g), "steps": lambda: torch.arange(shape[-1]) // 9, "ends": lambda: torch.tensor([40, 40, 140]),
            "label": lambda: torch.randint(1, 4, shape, generator=g), "frames": lambda: torch.tensor([9, 7]), "letters": lambda: torch.tensor([3, 2]), "some": lambda: (torch.arange(18) % 4 == 1).view(shape),
            "lr": lambda: torch.tensor(0.1), "count": lambda: torch.tensor(3)}[kind]()
for op, operands, n_out, attrs in CASES:
    taken = 0
    for name, dtype in TYPES.items():
        ins, lines, args = [], [], []
        for i, o in enumerate(operands.split()):
            if o == "_":
                args.append("_")
                continue
            kind, _, sizes = o.rpartition(":")
            if o.endswith(":"):
                kind, sizes = o[:-1], ""
            t = operand(kind, tuple(int(s) for s in sizes.split(",") if s), dtype, i + 1)
            ins.append(t)
            args.append(f"x{i}")
            lines.append(f"input x{i}: {engine.NAMES[engine.TORCH.index(t.dtype)]}{list(t.shape)}")
        said = attrs.replace("@", name).replace("#", str(engine.TORCH.index(dtype)))
        outs = [f"y{i}" for i in range(n_out)]
        node = f"{', '.join(outs)} = {op}({', '.join(args)}) {{{said}}}" + (" rng=7" if op == "dropout" else "")
        taken += both("\\n".join(["graph {", *lines, node, *(f"output {o}" for o in outs), "}"]), ins, 0 if op in BITS else 100)
    assert taken, (op, attrs, refused[-1])
"""

ROWS = """
ODD = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 88.0, -104.0, 1e30, -1e30, 3e6, float("inf"), -float("inf"), float("nan")]
WHOLE = [0, 1, -1, 2, -3, 7, 100, -(2**31), 2**31 - 1]
def numbers(dtype, seed, tame=False):
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(60, generator=g) < 0.5
    if not dtype.is_floating_point:
        return torch.cat([torch.tensor(WHOLE), torch.randint(-9, 9, (51,), generator=g)])[torch.randperm(60, generator=g)].to(dtype)
    x = torch.randn(60 if tame else 60 - len(ODD), generator=g, dtype=torch.float64) * 3
    return (x if tame else torch.cat([torch.tensor(ODD, dtype=torch.float64), x])[torch.randperm(60, generator=g)]).to(dtype)
WHOLES = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool}
for name, rule, arity in CASES:
    types = TYPES if rule in ("FLT", "TRIG", "PRED", "DRAW") else WHOLES if rule == "LOG" else TYPES | WHOLES
    taken = 0
    for said, dtype in types.items():
        ins = [numbers(dtype, k, rule == "CAST" or name.endswith("_grad")) for k in range(arity)]
        if rule == "SEL":
            ins[0] = numbers(torch.bool, 9)
        for to in types if rule == "CAST" else [""]:
            head = "".join(f" input x{i}: {'bool' if rule == 'SEL' and not i else said}[60]\\n" for i in range(arity))
            attrs = {"CAST": f" {{to={to}}}", "DRAW": " {p=0.25} rng=7"}.get(rule, "")
            taken += both(f"graph {{\\n{head} y = {name}({', '.join(f'x{i}' for i in range(arity))}){attrs}\\n output y\\n}}", ins, 0 if name in BITS else 64)
    assert taken, (name, refused[-1])
"""

BOUNDED = """
text = "graph {\\n sym s0 = x[0]\\n input x: f64[s0, 6]\\n input labels: i64[s0]\\n const k: i64[] = -100\\n mask = ne(labels, k)\\n"
text += " idx, count = select_rows(mask) {count=[c0], most=MOST}\\n r = compress(x, idx, count)\\n l = compress(labels, idx, count) {past=-7}\\n t = cos(r)\\n s = reduce_sum(t) {axes=[0]}\\n"
text += " z = restore(t, idx, count) {shape=[s0, 6]}\\n w = restore(l, idx, count) {shape=[s0]}\\n output z\\n output s\\n output w\\n}"
for n, least in ((9, 0), (9, -9), (9, 9), (1, 0), (0, 0), (9000, 2), (9000, 0), (4096, 1)):  # several tiles of a scan, of few and of most
    for most in (1.0, 0.5):
        labels = torch.randint(-4, 5, (n,), generator=torch.Generator().manual_seed(n))
        labels[labels < least] = -100
        ins = [torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), labels]
        assert both(text.replace("MOST", str(most)), ins, 10000 if n > 99 else 100), refused
"""

TAIL = """
assert fake.count(fake.FAILURES) == 0, fake.message()
print(sorted(seen))
print(fake.host_ops(engine.lib))
"""


@pytest.fixture(scope="module")
def told() -> tuple[set[str], set[str]]:
    """Operators that ran, and those of them that the CPU did."""
    ran: set[str] = set()
    on_cpu: set[str] = set()
    for seed, (source, cases) in enumerate([(NODES, SIMPLE[::2]), (NODES, SIMPLE[1::2]), (ROWS, rows()), (BOUNDED, [])]):
        out = child(f"CASES, BITS = {cases!r}, {BITS!r}\n" + HEAD + source + TAIL, OM_FAKE_SEED=str(seed)).splitlines()
        ran |= set(ast.literal_eval(out[-2]))
        on_cpu |= set(ast.literal_eval(out[-1]))
    return ran, on_cpu


def test_every_operator_runs(told: tuple[set[str], set[str]]) -> None:
    missing = operators() - told[0] - VIEWS - BY_THE_HOST
    assert operators() >= BITS
    assert not missing, f"in no case: {sorted(missing)}"


def test_what_is_lowered_stays_on_the_device(told: tuple[set[str], set[str]]) -> None:
    assert not told[1] & lowered()


def test_what_is_not_is_named_as_the_cpus(told: tuple[set[str], set[str]]) -> None:
    assert told[1] == ON_THE_CPU == operators() - lowered() - VIEWS - BY_THE_HOST
