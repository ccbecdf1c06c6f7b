"""Every elementwise row and every row kernel, each instruction set of this machine: what an element costs, times a row
of the same kind, is within its bound (tests/bench/bench_rows.py, rows.csv). A loop that is no longer vectorised, or that
computes every branch under masks, gives the same results and only takes longer."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import bench_rows  # noqa: E402


def test_every_row_has_a_bound() -> None:
    names = [c.name for c in bench_rows.cases()]
    assert len(set(names)) == len(names) and set(names) == set(bench_rows.bounds()), "bench_rows.py --write"
    rows = bench_rows.rows()
    assert len(rows) > 50 and {n for n in rows if n not in {name.split()[0] for name in names}} == set()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the table was measured on x86_64")
@pytest.mark.parametrize("isa", bench_rows.have())
def test_no_row_is_above_its_bound(isa: str) -> None:
    base = {c.name: c.base for c in bench_rows.cases()}
    ns, bad = bench_rows.above(isa, [])
    bound = bench_rows.bounds()
    assert not bad, "\n".join(f"{n}: {ns[n]:.3f} ns an element, {ns[n] / ns[base[n]]:.1f}x {base[n]}; bound {bound[n][isa]:.1f}x" for n in bad)
