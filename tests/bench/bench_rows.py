"""What an element costs in every elementwise row and every row kernel, for each instruction set that this machine has.

    python tests/bench/bench_rows.py                      the table; exit 1 when a row is above its bound (!)
    python tests/bench/bench_rows.py --isa avx2 gelu      one instruction set, rows that contain a word

    python tests/bench/bench_rows.py --write              rows.csv anew: what each row takes, times its base

A small array in cache, one thread, the least of many calls. A row is held against another of its type and instruction
set, so that no clock is in the figures: an elementwise one against add (add itself against a copy of its bytes), a
gradient against its own forward. Its bound is SLACK times what rows.csv has for it; a loop that is no longer vectorised
takes four to sixteen times as long. Scalar by nature are: f64 functions (libm), divisions and powers of integers, mod,
fmod and floor_div (libm's fmod).
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import new_op  # noqa: E402
import torch  # noqa: E402

import engine  # noqa: E402

N = 16384
ISAS = ("generic", "avx2", "avx512")
SLACK = 2.5
TABLE = HERE / "rows.csv"
LETTER = {torch.float32: "F", torch.float64: "D", torch.int64: "I", torch.bool: "B"}


@dataclass
class Case:
    name: str                 # row and type
    op: str
    attrs: dict[str, object]
    ins: list[torch.Tensor | None]
    base: str                 # the case that it is held against
    n_out: int = 1
    n: int = N                # elements


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=g).bool()
    if dtype == torch.int64:
        return torch.randint(1, 100, shape, generator=g)
    return (torch.randn(shape, generator=g).abs() + 0.1).to(dtype) if not dtype.is_floating_point else torch.randn(shape, generator=g).to(dtype)


RULES = {"FLT": "FD", "TRIG": "FD", "NUM": "FDI", "CMP": "FDIB", "PRED": "FD", "LOG": "IB", "SEL": "FDIB", "DRAW": "FD"}


def pointwise() -> Iterator[Case]:
    for name, (arity, rule) in rows().items():
        if rule == "CAST":
            continue
        for dtype, letter in LETTER.items():
            if letter not in RULES[rule]:
                continue
            xs = [numbers(dtype, N, seed=i) for i in range(arity)]
            if name in ("log", "log1p", "sqrt", "rsqrt"):
                xs = [x.abs() + 0.1 for x in xs]
            if name == "pow" and letter == "F":
                xs[0] = xs[0].abs()
            if name == "pow" and letter == "I":
                xs[1] = xs[1] % 8
            if name == "where":
                xs[0] = numbers(torch.bool, N, seed=3)
            forward = name.removesuffix("_grad")
            base = f"{forward} {letter}" if forward != name else "copy" if name == "add" else f"add {letter}" if letter != "B" else "and B"
            yield Case(f"{name} {letter}", name, {"p": 0.1} if name == "dropout" else {}, xs, "copy" if name == "and" and letter == "B" else base)
    yield Case("pow 3 F", "pow", {}, [numbers(torch.float32, N), torch.tensor(3.0)], "add F")
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    for a in kinds:
        for b in kinds:
            if a != b:
                x = numbers(torch.float32, N).mul(10).to(a)
                yield Case(f"cast {short(a)} {short(b)}", "cast", {"to": engine.TORCH.index(b)}, [x], "add F")


def short(d: torch.dtype) -> str:
    return str(d).removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i")


def rows() -> dict[str, tuple[int, str]]:
    text = new_op.ROWS.read_text()
    return {m[1]: (int(m[2]), m[3]) for m in re.finditer(r"^PW\((\w+), +(\d), (\w+),", text, re.M)}


def row_kernels() -> Iterator[Case]:
    f = torch.float32
    for d in (torch.float32, torch.float64, torch.bfloat16):
        s = short(d)
        x, dy, w = numbers(d, 32, 512), numbers(d, 32, 512, seed=1), numbers(d, 512, seed=2)
        stat = torch.float64 if d == torch.float64 else f
        m, r = numbers(stat, 32), numbers(stat, 32).abs() + 0.5
        unit = "add D" if d == torch.float64 else "add F"
        for name in ("softmax", "log_softmax"):
            yield Case(f"{name} {s}", name, {"axis": 1}, [x], "exp D" if d == torch.float64 else "exp F")
            yield Case(f"{name}_grad {s}", name + "_grad", {"axis": 1}, [dy, x], f"{name} {s}")
            yield Case(f"{name} cols {s}", name, {"axis": 0}, [x], f"{name} {s}")
            yield Case(f"{name}_grad cols {s}", name + "_grad", {"axis": 0}, [dy, x], f"{name} cols {s}")
        yield Case(f"layer_norm {s}", "layer_norm", {"axis": 1, "eps": 1e-5}, [x, w, w], unit, 3)
        yield Case(f"layer_norm_grad {s}", "layer_norm_grad", {"axis": 1}, [dy, x, w, m, r], f"layer_norm {s}", 3)
        yield Case(f"rms_norm {s}", "rms_norm", {"axis": 1, "eps": 1e-5}, [x, w], unit, 2)
        yield Case(f"rms_norm_grad {s}", "rms_norm_grad", {"axis": 1}, [dy, x, w, r], f"rms_norm {s}", 2)
        for how in ("sum", "mean", "max", "min", "prod"):
            yield Case(f"reduce_{how} {s}", f"reduce_{how}", {"axes": [1]}, [x], unit)
            yield Case(f"reduce_{how} cols {s}", f"reduce_{how}", {"axes": [0]}, [x], unit)
        yield Case(f"argmax {s}", "argmax", {"axis": 1}, [x], unit)
        labels, one = torch.randint(512, (32,)), torch.tensor(1.0)
        lse, denom = torch.logsumexp(x.double(), 1), torch.tensor(32.0, dtype=torch.float64)
        yield Case(f"cross_entropy {s}", "cross_entropy", {"reduction": 1}, [x, labels], "exp D" if d == torch.float64 else "exp F", 3)
        yield Case(f"cross_entropy_grad {s}", "cross_entropy_grad", {"reduction": 1}, [one.to(d), x, labels, None, lse, denom],
                   f"cross_entropy {s}")
        images, g = x.view(4, 8, 512), dy.view(4, 8, 512)
        c, c1 = numbers(stat, 8), numbers(stat, 8).abs() + 0.5
        yield Case(f"batch_norm {s}", "batch_norm", {"training": 1, "momentum": 0.1, "eps": 1e-5}, [images, c, c, c, c1], unit, 5)
        yield Case(f"batch_norm_grad {s}", "batch_norm_grad", {"training": 1}, [g, images, c, c, c1], f"batch_norm {s}", 3)
        idx = torch.arange(32) // 2
        yield Case(f"gather {s}", "gather", {"axis": 0}, [x, idx], unit)
        yield Case(f"gather_grad {s}", "gather_grad", {"axis": 0, "shape": [32, 512]}, [dy, idx], unit)
        yield Case(f"copy {s}", "copy", {}, [x], unit)
        yield Case(f"copy transposed {s}", "copy", {}, [x.view(128, 128).t()], unit)
        yield Case(f"copy strided {s}", "copy", {}, [torch.cat([x, x], 1).view(32, 512, 2)[:, :, 0]], unit)
        yield Case(f"concat {s}", "concat", {"axis": 1}, [x[:, :256], x[:, 256:]], unit)
        yield Case(f"pad {s}", "pad", {"lo": [0, 8], "hi": [0, 8]}, [x], unit)
        if d != torch.bfloat16:
            yield Case(f"cdist {s}", "cdist", {"p": 2.0}, [x[:, :32].contiguous(), numbers(d, 16, 32)], unit)
            yield Case(f"cumsum cols {s}", "cumsum", {"axis": 0}, [x], unit)
    yield Case("attention f32", "attention", {}, [numbers(f, 1, 1, 64, 64, seed=i) for i in range(3)], "exp F", 2, 64 * 64 * 8)
    for kind, gates in (("lstm", 4), ("gru", 3)):
        gx, wh, h0 = numbers(f, 1, 32, gates * 128), numbers(f, gates * 128, 128) * 0.1, numbers(f, 32, 128)
        bias = [numbers(f, gates * 128)] if kind == "gru" else [None]
        yield Case(f"{kind} f32", "recurrent", {"kind": 2 if kind == "lstm" else 3}, [gx, wh, *bias, h0, h0 if kind == "lstm" else None], "tanh F", 4, 32 * gates * 128)
    p = [numbers(f, N, seed=i).abs() for i in range(4)]
    lr, step = torch.tensor(1e-3), torch.tensor(3)
    yield Case("adamw_step f32", "adamw_step", {"out_dtype": [1, 1, 1]}, [lr, step, None, *p], "add F", 3)
    yield Case("sgd_step f32", "sgd_step", {"out_dtype": [1]}, [lr, None, p[0], p[1]], "add F", 1)
    yield Case("accumulate f32", "accumulate", {}, [p[0], p[1]], "add F")
    yield Case("clip_by_norm f32", "clip_by_norm", {}, [p[0], torch.tensor(3.0)], "add F")
    yield Case("l2_norm_all f32", "l2_norm_all", {}, [p[0]], "add F")
    yield Case("all_finite f32", "all_finite", {}, [p[0]], "add F")


def cases() -> list[Case]:
    return [Case("copy", "copy", {}, [numbers(torch.float32, N)], "copy"), *pointwise(), *row_kernels()]


# --- one instruction set ---------------------------------------------------------------------------------------------


def attrs_text(attrs: dict[str, object]) -> str:
    return ", ".join(f"{k}={v}" for k, v in attrs.items())


def prepare(c: Case, cx: object) -> Callable[[], None]:
    import op_calls

    import opcheck

    live = [t for t in c.ins if t is not None]
    outs = engine.run(opcheck.text_of(c.op, c.ins, attrs_text(c.attrs), c.n_out), live, device="")[0]
    return op_calls.kernel(cx, c.op, c.attrs, c.ins, outs)


def least(call: Callable[[], None], seconds: float) -> float:
    """Nanoseconds of the quickest call."""
    t0 = time.perf_counter_ns()
    call()
    times, stop = [], t0 + int(seconds * 1e9)
    while len(times) < 7 or (time.perf_counter_ns() < stop and len(times) < 400):
        t = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - t)
    return min(times)


def child(words: list[str], seconds: float) -> None:
    torch.set_num_threads(1)
    cx = engine.Ctx(threads=False)
    all_cases = {c.name: c for c in cases()}
    wanted = [c for c in all_cases.values() if not words or any(w in c.name for w in words)]
    need = {c.name for c in wanted}
    while more := {all_cases[n].base for n in need} - need:
        need |= more
    tiny = Case("", "neg", {}, [torch.ones(1)], "")
    overhead = least(prepare(tiny, cx), 0.05)
    out = {}
    for c in all_cases.values():
        if c.name in need:
            out[c.name] = max(1.0, least(prepare(c, cx), seconds) - overhead) / c.n
    print(json.dumps(out))


def have() -> list[str]:
    """Instruction sets of this machine."""
    engine.lib.om_isa_text.restype = ctypes.c_char_p
    return list(ISAS[: ISAS.index(engine.lib.om_isa_text().decode()) + 1])


def measure(isa: str, words: list[str], seconds: float) -> dict[str, float]:
    """Nanoseconds of an element, by row."""
    env = {**os.environ, "ORTMODULE_ISA": isa, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, __file__, *words, "--child", "--seconds", str(seconds)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def ratios(ns: dict[str, float], base: dict[str, str]) -> dict[str, float]:
    return {name: t / ns[base[name]] for name, t in ns.items()}


def bounds() -> dict[str, dict[str, float]]:
    """By row and instruction set."""
    with open(TABLE, newline="") as f:
        return {r["row"]: {isa: SLACK * max(1.0, float(r[isa])) for isa in ISAS} for r in csv.DictReader(f)}


def above(isa: str, words: list[str], seconds: float = 0.004) -> tuple[dict[str, float], list[str]]:
    """What was measured, and the rows above their bounds; these are measured again, longer and later: a busy machine is no
    finding (what another program does on the same core slows scalar loops to half, and those of memory's speed not)."""
    base, bound = {c.name: c.base for c in cases()}, bounds()
    ns = measure(isa, words, seconds)
    bad = [n for n, r in ratios(ns, base).items() if r > bound[n][isa]]
    for longer, pause in ((5, 0), (20, 0), (20, 5), (20, 20)):
        if bad:
            time.sleep(pause)
            again = ratios(measure(isa, bad, longer * seconds), base)
            bad = [n for n in bad if again[n] > bound[n][isa]]
    return ns, bad


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("words", nargs="*")
    p.add_argument("--isa", choices=ISAS)
    p.add_argument("--write", action="store_true")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=float, default=0.004, help="for a row")
    a = p.parse_args()
    if a.child:
        child(a.words, a.seconds)
        return 0
    base = {c.name: c.base for c in cases()}
    if a.write:
        got = {isa: ratios(measure(isa, [], a.seconds), base) for isa in ISAS}
        with open(TABLE, "w", newline="") as f:
            f.write("row," + ",".join(ISAS) + "\n")
            f.writelines(",".join([name, *(f"{got[isa][name]:.1f}" for isa in ISAS)]) + "\n" for name in base)
        return 0
    found = {isa: above(isa, a.words, a.seconds) for isa in ([a.isa] if a.isa else have())}
    print(f"{'row':28}" + "".join(f"{isa:>22}" for isa in found) + "   ns an element, times its base")
    for name in next(iter(found.values()))[0]:
        cells = [f"{ns[name]:12.3f}{ns[name] / ns[base[name]]:8.1f}x{'!' if name in bad else ' '}" for ns, bad in found.values()]
        print(f"{name:28}" + "".join(cells) + f"   {base[name]}")
    return int(any(bad for _, bad in found.values()))


if __name__ == "__main__":
    sys.exit(main())
