"""Chains compiled at run time (csrc/cuda/program.c, strip_source.c) on the fake GPU, by a fake NVRTC (fake_nvrtc.cpp): the interpreter's bits, what may go
wrong, the cache. All rows of pointwise.def also by `OM_DEVICE=cuda-fake OM_FAKE_PROGRAMS=1 pytest tests/ops/test_pointwise.py`. What is written for the
fake one is given to nvcc, too, where there is one."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from cuda.children import ENV, TESTS, on_fake
from cuda.children import child as any_child

from ortmodule import cuda_engine

pytestmark = on_fake
OBJECTS = tempfile.TemporaryDirectory()  # what the fake NVRTC has compiled
child = functools.partial(any_child, OM_FAKE_PROGRAMS="1", OM_FAKE_RTC=OBJECTS.name)
ROWS = re.findall(r"^PW\((\w+),\s*(\d), (\w+),", (TESTS.parent / "csrc/graph/pointwise.def").read_text(), re.M)

TWICE = """
import torch, engine
from cuda import fake
from device import steps
def bits(t):  # which NaN comes of two is the compiler's choice
    t = t.contiguous()
    return torch.where(t.isnan(), t.new_ones(()), t).view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[t.element_size()])
def twice(text, ins, seed=0, dys=None):
    # interpreted, then compiled: the same bits
    before = fake.programs(engine.lib)
    fake.compile_chains(engine.lib, 0)
    a, da = engine.run(text, ins, seed=seed, dys=dys, device="cuda-fake")
    assert fake.programs(engine.lib) == before
    fake.compile_chains(engine.lib, 2)
    b, db = engine.run(text, ins, seed=seed, dys=dys, device="cuda-fake")
    assert not fake.programs_reason(engine.lib), fake.programs_reason(engine.lib)
    for k, (x, y) in enumerate(zip([*a, *da], [*b, *db], strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)) and torch.equal(x.isnan(), y.isnan()), (k, text[:3000], [p for p in zip(x.view(-1).tolist(), y.view(-1).tolist()) if p[0] != p[1]][:5])
    return fake.programs(engine.lib) - before
def ends():
    assert fake.count(fake.FAILURES) == 0, fake.message()
    print("done")
"""

OPERATORS = TWICE + """
ODD = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 1e30, -3.5, 2.0, -1.0, 0.5, 3.0])
def values(dtype, n, seed):
    g = torch.Generator().manual_seed(seed)
    if dtype == "bool": return torch.rand(n, generator=g) < 0.5
    if dtype[0] in "iu": return torch.randint(-9 if dtype[0] == "i" else 0, 9, n, generator=g).to(getattr(torch, {"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8"}[dtype]))
    x = torch.randn(n, generator=g, dtype=torch.float64) * 3
    x.view(-1)[:: 7] = ODD.double().repeat(x.numel())[: x.view(-1)[:: 7].numel()]
    return x.to({"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}[dtype])
KINDS = {"FLT": ("f32", "f64", "bf16", "f16"), "TRIG": ("f32", "f64", "bf16"), "NUM": ("f32", "f64", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool"),
         "CMP": ("f32", "f64", "bf16", "i64", "u8", "bool"), "PRED": ("f32", "f64", "f16"), "LOG": ("bool", "i64", "i32", "u8")}
for shape, other in SHAPES:
    for dtype in ("f32", "f64", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool"):
        names = [(name, int(arity)) for name, arity, rule in ROWS if dtype in KINDS.get(rule, ()) and not (dtype == "bool" and name in ("neg", "sub", "div", "pow", "floor_div", "mod", "fmod", "abs", "sign"))]
        body = [f" y{k} = {name}({', '.join(['x', 'z'][:arity])})" for k, (name, arity) in enumerate(names)]
        casts = [f" c{k} = cast(x) {{to={to}}}" for k, to in enumerate(("f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool")) if to != dtype and not (dtype[0] in "bf" and dtype != "bool" and to[0] in "iu")]
        text = f"graph {{\\n input x: {dtype}{list(shape)}\\n input z: {dtype}{list(other)}\\n input t: bool{list(other)}\\n" + "\\n".join(body + casts) + "\\n w = where(t, x, z)\\n"
        text += "".join(f" output y{k}\\n" for k in range(len(names))) + "".join(f" output {line.split()[0]}\\n" for line in casts) + " output w\\n}"
        made = twice(text, [values(dtype, shape, 1), values(dtype, other, 2), values("bool", other, 3)])
        assert made >= len(names), (made, len(names))
ends()
"""


@pytest.mark.parametrize("shapes", [[((700,), (700,))], [((9, 64), (64,))], [((5, 7, 33), (7, 1))]])
def test_every_operator_in_every_class(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """One axis, whole rows, rows that are not; special values."""
    assert child(f"ROWS, SHAPES = {ROWS!r}, {shapes!r}\n" + OPERATORS).endswith("done\n")


GRAPHS = TWICE + """
from graphs import random_graph
made = 0
for seed in range(200, 224):
    text, ins, n_out, _ = random_graph(seed)
    made += twice(text, ins, seed=3)
assert made > 25, made
ends()
"""


@pytest.mark.parametrize("seed", [0, 3])
def test_random_graphs(seed: int) -> None:
    assert child(GRAPHS, OM_FAKE_SEED=str(seed)).endswith("done\n")


CHAINS = TWICE + """
# dropout of more than one stream, broadcasts, a number, many values alive (one element a thread at once), views
torch.manual_seed(0)
x, b, s, k = torch.randn(6, 50, 128).bfloat16(), torch.randn(128).bfloat16(), torch.randn(6, 1, 1), torch.randn(())
head = "graph {\\n input x: bf16[6, 50, 128]\\n input b: bf16[128]\\n input s: f32[6, 1, 1]\\n input k: f32[]\\n a = add(x, b)\\n c = cast(a) {to=f32}\\n"
assert twice(head + " g = gelu_tanh(c)\\n m = mul(g, s)\\n y = dropout(m) {p=0.3, rng=3}\\n z = dropout(y) {p=0.5, rng=4}\\n w = add(z, k)\\n output w\\n output m\\n}", [x, b, s, k], seed=7)
many = "".join(f" v{i} = mul({'c' if not i else f'v{i - 1}'}, k)\\n" for i in range(40))
total = "".join(f" t{i} = add({'c' if not i else f't{i - 1}'}, v{39 - i})\\n" for i in range(40))
assert twice(head + many + total + " d = dropout(t39) {p=0.25, rng=9}\\n output d\\n}", [x, b, s, k], seed=7)
assert twice("graph {\\n input x: f32[70, 96]\\n y = permute(x) {perm=[1, 0]}\\n z = exp(y)\\n w = add(z, y)\\n output w\\n}", [torch.randn(70, 96)])
assert twice("graph {\\n input x: f32[3, 0, 5]\\n y = exp(x)\\n z = add(y, x)\\n output z\\n}", [torch.randn(3, 0, 5)]) <= 1
big = torch.randn(2100, 513)  # more elements than a grid of its own takes at once would be 2^29: the last part is not whole
assert twice("graph {\\n input x: f32[2100, 513]\\n y = dropout(x) {p=0.1, rng=1}\\n z = add(y, x)\\n output z\\n}", [big], seed=2)
ends()
"""


def test_chains() -> None:
    assert child(CHAINS).endswith("done\n")


STEPS = """
import os, torch
def one():
    import engine
    from cuda import fake
    text = "graph {\\n input x: f32[40, 64]\\n y = gelu(x)\\n z = mul(y, x)\\n output z\\n}"
    x = torch.randn(40, 64)
    fake.compile_chains(engine.lib, int(os.environ.get("WHEN", "2")), os.environ.get("LIBRARY", ""))
    engine.run("graph {\\n input x: f32[2, 1]\\n y = permute(x) {perm=[1, 0]}\\n output y\\n}", [x[:2, :1]], device="cuda-fake")
    if "FAIL" in os.environ: fake.fail(os.environ["FAIL"], 1, 6)
    for _ in range(2):
        (y,), _ = engine.run(text, [x], device="cuda-fake")
        assert torch.allclose(y, torch.nn.functional.gelu(x) * x, atol=1e-5)
    assert fake.count(fake.FAILURES) == 0, fake.message()
    return " ".join(str(fake.programs(engine.lib, k)) for k in range(3)) + " " + fake.programs_reason(engine.lib)
for env in EACH:
    at, to = os.pipe()
    if not os.fork():
        os.environ.update(env)
        os.write(to, one().encode())
        os._exit(0)
    os.close(to)
    with open(at) as f: print(f.read().replace("\\n", " "))
"""


def said(*each: dict[str, str]) -> list[str]:
    """Of a process with each: chains compiled, calls of NVRTC, modules found in the cache; what went wrong."""
    common = {"OM_FAKE_PROGRAMS": "1", "OM_FAKE_RTC": OBJECTS.name}
    return any_child(f"EACH = {[common | env for env in each]!r}\n" + STEPS).splitlines()


def test_what_is_not_compiled_is_interpreted(tmp_path: Path) -> None:
    library, nothing = str(TESTS.parent / "build/fake/libnvrtc.so.13"), {"OM_FAKE_PROGRAMS": "0"}
    assert said({}, {"WHEN": "0"}, {"WHEN": "1"}) == ["1 1 0 ", "0 0 0 ", "0 0 0 "]  # 1: too few elements to pay
    assert said({"OM_FAKE_SM": "75"}, nothing | {"LIBRARY": library}) == ["1 1 0 ", "1 1 0 "]
    none = said(nothing, nothing | {"LIBRARY": "/nowhere/libnvrtc.so"})
    assert all(line.startswith("0 0 0 there is no libnvrtc.so") for line in none), none
    entries = ("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBIN", "cuModuleLoadData", "cuModuleGetFunction")
    for entry, line in zip(entries, said(*({"FAIL": entry} for entry in entries)), strict=True):
        assert re.match(rf"0 [01] 0 {entry}.*\b6\b", line), line
    assert said({"CXX": "false", "OM_FAKE_RTC": str(tmp_path)})[0].startswith("0 0 0 nvrtcCompileProgram for sm_90 failed (6)")


def test_the_cache(tmp_path: Path) -> None:
    at = tmp_path / "deep" / "cache"
    here = {"OM_FAKE_CACHE": str(at)}
    assert said(here, here) == ["1 1 0 ", "1 0 1 "]
    (file,) = at.iterdir()
    assert re.fullmatch(r"strips-[0-9a-f]{16}-\d+\.cubin", file.name)
    whole = file.read_bytes()
    for broken in (b"", whole[:10], whole[:-1], whole[:-3] + b"?" + whole[-2:], whole[:8] + b"\xff" * 8 + whole[16:]):
        file.write_bytes(broken)
        assert said(here) == ["1 1 0 "] and file.read_bytes() == whole
    assert said(here | {"OM_FAKE_SM": "80"}) == ["1 1 0 "] and len([*at.iterdir()]) == 2  # another GPU, another module
    file.unlink()
    file.mkdir()
    assert said(here, {"OM_FAKE_CACHE": "/proc/nothing/here"}) == ["1 1 0 ", "1 1 0 "]  # cannot be written


MODELS = """
import torch, graph_correct
from cuda import fake
from ortmodule import _C
fake.late(False)
graph_correct.stand_in()
make = graph_correct.MODELS["{model}"]
for dtype in (torch.float32, torch.bfloat16):
    runs = []
    for when in (0, 2):
        _C.cuda_engine_programs(when, "", "")
        runs.append(graph_correct.train(make, "cuda", dtype, 0.1, "cpu", steps=4))
    assert len(runs[0]) > 40 and all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), dtype
made, calls, _, why = _C.cuda_engine_program_counts()
assert made >= 15 and not why, (made, why)
assert fake.count(fake.FAILURES) == 0 and fake.count(fake.PLAYED) > 0, fake.message()
print("done", made, calls)
"""


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_models_train_to_the_same_bits(model: str) -> None:
    """Interpreted and compiled, in f32 and bf16 with dropout, recorded as CUDA graphs once addresses repeat; one module for each plan."""
    _, made, calls = child(MODELS.replace("{model}", model), OM_FAKE_SEED="4", OM_FAKE_REUSE="1", OM_FAKE_KEEP="1", OM_FAKE_SOURCE=str(TESTS.parent)).split()
    assert int(calls) * 3 < int(made)


NVRTC = """
import ctypes as C, sys
lib, rtc = C.CDLL(LIBOM), C.CDLL(LIBRARY)
class Text(C.Structure):
    _fields_ = [("name", C.c_char_p), ("text", C.c_char_p)]
given = (Text * 9).in_dll(lib, "om_gpu_texts")  # what the engine gives it
names, texts = ((C.c_char_p * 9)(*(getattr(t, k) for t in given)) for k in ("name", "text"))
for sm in (75, 80, 86, 89, 90, 100, 120):
    program, n = C.c_void_p(), C.c_size_t()
    assert rtc.nvrtcCreateProgram(C.byref(program), SOURCE.encode(), b"strips.cu", 9, texts, names) == 0
    options = (C.c_char_p * 4)(f"--gpu-architecture=sm_{sm}".encode(), b"--std=c++17", b"-fmad=false", b"--no-source-include")
    failed = rtc.nvrtcCompileProgram(program, 4, options)
    rtc.nvrtcGetProgramLogSize(program, C.byref(n))
    log = C.create_string_buffer(n.value)
    rtc.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    assert rtc.nvrtcGetCUBINSize(program, C.byref(n)) == 0 and n.value
    cubin = C.create_string_buffer(n.value)
    assert rtc.nvrtcGetCUBIN(program, cubin) == 0 and cubin.raw[:4] == b"\\x7fELF"
    assert all(f"om_s_{name}".encode() in cubin.raw for name in NAMES)
print("done")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of a few chains."""
    folder = tmp_path_factory.mktemp("written")
    assert child(CHAINS, OM_FAKE_RTC=str(folder)).endswith("done\n")
    text = "".join(path.read_text() for path in sorted(folder.glob("*/*.cu")))
    parts = dict.fromkeys(re.findall(r"#include[^\n]*\n|#define NAME.*?STRIP_KERNEL\(\w+\)\n", text, re.S))
    assert len(parts) > 5
    return "".join(parts)


def test_nvrtc_takes_what_is_written(written: str) -> None:
    """The real one, where it is installed. In a process without the fake driver, of which it would ask more than there is."""
    library = cuda_engine.nvrtc()
    if not library:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    names = re.findall(r"STRIP_KERNEL\(s_(\w+)\)", written)
    libom = str(TESTS.parent / "build/libom.so")
    assert any_child(f"LIBOM, LIBRARY, SOURCE, NAMES = {libom!r}, {library!r}, {written!r}, {names!r}\n" + NVRTC) == "done\n"


def test_nvcc_takes_what_is_written(written: str, tmp_path: Path) -> None:
    """For the oldest GPU and the newest; no kernel keeps numbers in memory for want of registers."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("there is no nvcc")
    source = tmp_path / "all.cu"
    source.write_text(written)
    for sm in ("75", "120"):
        command = [nvcc, "-std=c++17", "-cubin", f"-arch=sm_{sm}", "-fmad=false", "-Xptxas", "-v", f"-I{TESTS.parent / 'csrc'}", "-o", str(tmp_path / "out.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV)
        assert done.returncode == 0, done.stderr[-2000:]
        spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
        assert len(spills) > 5 and not any(map(int, spills)), done.stderr
