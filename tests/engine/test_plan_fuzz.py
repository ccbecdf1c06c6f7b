"""Random graphs over many operators: the planned run (fusion, recomputation, in place, reuse, loans, segments) against
the interpreter.

What test_plan.py does with few operators and exact bits, with many: gathers and scatters, sums of a value and its
gathered self, reductions, norms, losses, attention, comparisons; up to three buffers written back with values, views
of themselves and each other; bf16 and f16; outputs that the caller has dropped. The interpreter has no planner and
keeps every value; for f64 it runs the graph as differentiation left it, for bf16 and f16 after the passes, since
fusion may round less. For an hour of them: make plan-fuzz N=20000, or

    python tests/engine/test_plan_fuzz.py FIRST LAST        the seeds FIRST .. LAST - 1; ORTMODULE_ISA chooses the kernels
"""

from __future__ import annotations

import sys

import pytest
import torch
from graphs import random_graph

import engine

_C = pytest.importorskip("ortmodule._C")

PASSES = ("simplify", "fold", "cse", "accumulate", "remat", "dce", "fuse")
INPUTS = 8  # x, w, b, s, t, u, then indices
LARGEST = {"f64": 1e8, "bf16": 1e4, "f16": 1e3}


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
    text, ins, n_out, dtype = random_graph(seed)
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
def test_random_plans_equal_the_interpreter(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        assert not differs(seed), f"seed {seed}: {differs(seed)}\n{random_graph(seed)[0]}"


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
            print(f"seed {number}: {found}\n{random_graph(number)[0] if bad < 6 else ''}", flush=True)
    print(f"{last - first} graphs ({_C.isa()}): {bad} differ, {skipped} with numbers too large to compare")
    sys.exit(bad > 0)
