"""What passes leave to look at: the files of ORTMODULE_DUMP_PASSES, and `om-opt bisect`, which names the pass that is wrong.
The wrong ones are those of build/om-opt-sabotaged, where OM_SABOTAGE=pass.<name>:k breaks the k-th application of a pass
(csrc/graph/sabotage.h)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import graphs
import pytest

from engine import ROOT, Graph

TOOL = ROOT / "build" / "om-opt"
SABOTAGED = ROOT / "build" / "om-opt-sabotaged"

TRAIN = """
import torch
from ortmodule import ORTModule
torch.manual_seed(0)
class Net(torch.nn.Sequential):
    def forward(self, x):
        return torch.tanh(super().forward(x) * 0.5)
model = Net(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
model = ORTModule(model, strict="engine")
loss = model(torch.randn(4, 5)).square().mean()
loss.backward()
print("\\x00".join(made.graph.model.text(v) for made in model._ortmodule.every for v in (-1, max(x.number for x in made.graph._full.values()))))
"""


def run(tool: Path, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(tool), *map(str, args)], capture_output=True, text=True, check=False, env={**os.environ, **env})


def test_dumps_of_a_model_parse_back(tmp_path: Path) -> None:
    to = tmp_path / "a" / "b"
    done = subprocess.run([sys.executable, "-c", TRAIN], env={**os.environ, "ORTMODULE_DUMP_PASSES": str(to)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (own,) = to.iterdir()  # one process
    files = sorted(p.name for p in own.glob("*.txt") if p.name != "index.txt")
    texts = {name: (own / name).read_text() for name in files}
    for name, text in texts.items():
        assert Graph.parse(text).verify().text() == text, name
    names = [re.fullmatch(r"(\d{4})-(\w+)-(before|after)\.txt", name) for name in files]
    assert all(names)
    numbers = sorted({int(m[1]) for m in names if m})
    assert numbers == list(range(1, len(numbers) + 1))
    steps = {}
    for m in names:
        assert m
        steps.setdefault((int(m[1]), m[2]), {})[m[3]] = texts[m[0]]
    assert [name for _, name in sorted(steps)][0] == "read" and {"grad", "fuse", "remat"} <= {name for _, name in steps}
    afters = []
    for (_, name), pair in sorted(steps.items()):
        if name != "read":
            assert pair["before"] != pair["after"] and pair["before"] in afters, name  # of some pass before it
        afters.append(pair["after"])
    # what runs is what the last pass left; segments are assigned after the passes
    forward, joint = done.stdout.rstrip("\n").split("\0")
    assert forward in afters and re.sub(r" seg=\d+", "", joint).strip() in [a.strip() for a in afters]
    # a pass makes of `before` what it made in the engine, and the tool reads what was written
    for (number, name), pair in sorted(steps.items()):
        if name in ("simplify", "fold", "cse", "bias", "patterns", "dce", "remat"):
            out = run(TOOL, own / f"{number:04d}-{name}-before.txt", "--pass", name)
            assert out.returncode == 0 and out.stdout == pair["after"], name
    index = (own / "index.txt").read_text().splitlines()
    assert [line.split()[:2] for line in index if line[0] != " "] == [[f"{n:04d}", name] for n, name in sorted(steps)]
    assert any("unchanged" in line for line in index if line[0] == " ")


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for to in ("file", "file/below"):
        done = subprocess.run([sys.executable, "-c", TRAIN], env={**os.environ, "ORTMODULE_DUMP_PASSES": str(tmp_path / to)}, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and "ORTMODULE_DUMP_PASSES" in done.stderr and "directory" in done.stderr


# --- bisect ----------------------------------------------------------------------------------------------------

MLP = """graph {
  sym s = x[0]
  input x: f32[s, 6]
  param w: f32[6, 8]
  param b: f32[8]
  param u: f32[8, 5]
  input i: i64[s]
  const one: f32[] = 1.0
  const t: f32[8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
  a = matmul(x, w) @"net.first" "net.py":11
  h = add(a, b) @"net.first" "net.py":11
  g = gelu(h) @"net.act" "net.py":12
  n = mul(g, one) @"net" "net.py":13
  c2 = neg(t)
  p = mul(n, c2) @"net" "net.py":14
  q = tanh(p) @"net" "net.py":15
  q2 = tanh(p) @"net" "net.py":16
  r = add(q, q2) @"net" "net.py":17
  y = matmul(r, u) @"net.last" "net.py":18
  loss, lse, k = cross_entropy(y, i, _) {reduction=1, label_smoothing=0.0}
  output loss
  output y
}"""
# pass -> where its first application in MLP is, and what stands before it
PLACES = {"simplify": ("net.py", 13, "mul"), "bias": ("net.py", 11, "add"), "cse": ("net.py", 16, "tanh"), "fold": ("", 0, "neg")}


def test_right_passes_are_found_right(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    for text in (MLP, MLP.replace("f32", "f64"), MLP.replace("f32", "bf16"), *(graphs.random_graph(seed)[0] for seed in range(6))):
        path.write_text(text)
        out = run(TOOL, "bisect", path)
        assert out.returncode == 0 and "none changes a result beyond rounding" in out.stdout, (out.stdout, out.stderr, text)


@pytest.mark.parametrize("name", PLACES)
def test_the_wrong_rewrite_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text(MLP)
    assert run(SABOTAGED, "bisect", path).returncode == 0
    out = run(SABOTAGED, "bisect", path, OM_SABOTAGE=f"pass.{name}:0")
    assert out.returncode == 2 and f", {name}, is wrong: " in out.stdout, out.stdout + out.stderr
    before = next(line for line in out.stdout.splitlines() if line.startswith("    before  "))
    file, line, op = PLACES[name]
    assert f" = {op}(" in before and (not file or f'"{file}":{line}' in before), out.stdout


def test_random_graphs_with_a_wrong_pass(tmp_path: Path) -> None:
    """Wherever the sabotage changes results, the pass is named, and never another one."""
    path, found = tmp_path / "g.txt", {}
    for seed in (1, 2, 3, 4, 8, 9, 10, 11):
        path.write_text(graphs.random_graph(seed)[0])
        for name in ("cse", "accumulate", "remat"):
            out = run(SABOTAGED, "bisect", path, OM_SABOTAGE=f"pass.{name}:0")
            assert out.returncode in (0, 2), out.stderr
            if out.returncode == 2:
                assert f", {name}, is wrong: " in out.stdout, (seed, name, out.stdout)
                found[name] = found.get(name, 0) + 1
    assert found.get("cse", 0) >= 2 and found.get("accumulate", 0) >= 4 and found.get("remat", 0) >= 1, found


def test_a_file_with_gradients_and_passes_by_name(tmp_path: Path) -> None:
    path, joint = tmp_path / "g.txt", tmp_path / "j.txt"
    path.write_text(graphs.random_graph(3)[0])
    assert run(TOOL, path, "--pass", "forward", "--grad", "all", "-o", joint).returncode == 0
    out = run(SABOTAGED, "bisect", joint, OM_SABOTAGE="pass.remat:0")
    assert out.returncode == 2 and ", remat, is wrong" in out.stdout, out.stdout
    out = run(SABOTAGED, "bisect", joint, "--pass", "simplify,cse", OM_SABOTAGE="pass.remat:0")
    assert out.returncode == 0 and "2 passes" in out.stdout
    path.write_text(MLP)
    out = run(TOOL, "bisect", path, "--size", "s=11", "--tries", "1", "--seed", "9")
    assert out.returncode == 0 and "1 sets of inputs" in out.stdout
    for wrong in (("--pass", "nope"), ("--size", "s"), ("--tries", "0"), ("--what", "1"), ("--seed",)):
        out = run(TOOL, "bisect", path, *wrong)
        assert out.returncode == 1 and "om-opt: " in out.stderr, wrong
    assert "--tries" in run(TOOL, "bisect", "--help").stdout


def test_what_the_interpreter_cannot_run_is_said(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text("graph {\n input x: f32[3]\n y = host(x) {index=0, out_dtype=[1], shape0=[3]}\n output y\n}")
    out = run(TOOL, "bisect", path)
    assert out.returncode == 1 and "host" in out.stderr, out.stdout + out.stderr
