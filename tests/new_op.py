"""Adds an operator: `make new-op NAME=foo [EXPR=... GRAD=... DOC=...] [KIND=kernel]`.

KIND=pointwise, the default: a row of csrc/graph/pointwise.def and a gradient in csrc/ops/pointwise.c, both from what is
given (y = x where nothing is), and ortmodule/capture/elementwise.py written anew. EXPR is C in x, GRAD an operand of
om_b_bin and its kin, as the gradients beside it. Where ONNX and ATen have an operator of that name, reader, writer,
capture and tests follow from the row: nothing else is to be written.

KIND=kernel: csrc/ops/foo.c (meaning), csrc/cpu/foo.c (what the CPU does), rows in ops.def and cpu.def, and
tests/ops/test_foo.py, which fails until its reference is written: nothing half-done can pass unseen.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "csrc/graph/pointwise.def"
TABLE = ROOT / "ortmodule/capture/elementwise.py"
ROW = re.compile(r'^PW\((\w+), +(\d), (\w+),.*?"(\w*)", "(\w*)",\s*"[^"]*"\)$', re.M | re.S)

C = '''/* {n}.c - TODO what it means: type rule and gradient.
 */
#include "graph/engine.h"

static om_status {n}_infer(om_graph *g, const om_node *n, om_type *out) {{
    const om_type *x = om_ty(g, om_ins(g, n)[0]);
    OM_CHECK(g->cx, om_is_float(x->dtype), "{n}: x is %s, a float is needed", om_dtype_name(x->dtype));
    out[0] = *x;
    return OM_OK;
}}

static om_status {n}_grad(om_builder *b, const om_node *n, const om_id *dy, const bool *want, om_id *dx) {{
    (void)n;
    if (want[0]) dx[0] = dy[0];
    return b->g->cx->status;
}}

const om_op om_op_{n} = {{
    OM_OP({n}),
    .kind = OM_K_ROW,
    .min_in = 1,
    .max_in = 1,
    .n_out = 1,
    .infer = {n}_infer,
    .grad = {n}_grad,
}};
'''

CPU = '''/* {n}.c - ops/{n}.c on the CPU. TODO the algorithm in a few lines, what holds throughout.
 */
#include "cpu/cpu.h"

typedef struct {n}_prep {{ /* what sizes, strides and attributes decide */
    int64_t count;
}} {n}_prep;

om_status om_cpu_prepare_{n}(om_ctx *cx, om_arena *mem, const om_args *a, const void **prep) {{
    {n}_prep *p = om_arena_alloc(mem, sizeof *p);
    if (!(*prep = p)) return cx->status;
    p->count = om_numel(&a->in[0]);
    return OM_OK;
}}

om_status om_cpu_run_{n}(om_ctx *cx, const om_args *a) {{
    const {n}_prep *p = a->prep;
    return p->count ? om_copy(cx, &a->in[0], &a->out[0]) : OM_OK;
}}
'''

T = '''"""{n} against eager PyTorch."""

import torch
from opcheck import check


def test_{n}() -> None:
    x = torch.randn(7, 5, 3, dtype=torch.float64)

    def reference(t: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("write the eager reference of {n}")

    check("{n}", [x], reference)
'''


def plain() -> dict[str, tuple[str, str, int]]:
    """Rows that are one ONNX and one ATen operator: engine name -> ONNX name, ATen name, operands."""
    return {m[1]: (m[4], m[5], int(m[2])) for m in ROW.finditer(ROWS.read_text()) if m[5]}


def table() -> str:
    """What ortmodule/capture/elementwise.py must hold."""
    head = '"""ATen operators that are one ONNX operator with the same operands. Written by tests/new_op.py from'
    head += '\ncsrc/graph/pointwise.def; tests/test_tree.py says when it is stale."""\n\nfrom __future__ import annotations\n\n'
    rows = "".join(f'    "{aten}": "{onnx}",\n' for onnx, aten, _ in plain().values())
    return head + "PLAIN: dict[str, str] = {\n" + rows + "}\n"


def exists(name: str) -> bool:
    text = (ROOT / "csrc/graph/ops.def").read_text() + ROWS.read_text()
    return bool(re.search(rf"\b(OP|PW)\({name}\b", text)) or (ROOT / f"csrc/ops/{name}.c").exists()


def insert_after_last(path: Path, pattern: str, text: str) -> None:
    s = path.read_text()
    at = [m.end() for m in re.finditer(pattern, s, re.M)][-1]
    path.write_text(s[:at] + text + s[at:])


def pointwise(name: str, given: dict[str, str]) -> None:
    import onnx.defs
    import torch

    names = {s.name for s in onnx.defs.get_all_schemas() if not s.domain and not s.attributes and len(s.inputs) == 1}
    spelled = given.get("ONNX", name.capitalize() if name.capitalize() in names else "")
    aten = given.get("ATEN", name if spelled and hasattr(torch.ops.aten, name) else "")
    doc = given.get("DOC", f"TODO y = {name} of x")
    row = f'PW({name + ",":<12} 1, FLT, {given.get("EXPR", "x")}, 0, {name}_grad, "{spelled}", "{aten}",'
    row += (" " if len(row) + len(doc) < 116 else "\n                ") + f'"{doc}")\n'
    mark = "/* `make new-op` adds rows"
    ROWS.write_text(ROWS.read_text().replace(mark, row + mark))
    insert_after_last(ROOT / "csrc/ops/pointwise.c", r"^UNARY\(.*\)\n", f"UNARY({name}_grad, {given.get('GRAD', 'DY')})\n")
    TABLE.write_text(table())
    print(f"csrc/graph/pointwise.def  the row\ncsrc/ops/pointwise.c      its gradient\nONNX: {spelled or 'none'}, ATen: {aten or 'none'}")
    if spelled and aten:
        print(f"then: make ext lib && {sys.executable} -m pytest tests/ops/test_pointwise.py -k {name}")
    else:
        print("no plain spelling: rules in csrc/onnx/elementwise.c, csrc/tools/onnx_write_math.c, ortmodule/capture/ops_math.py, "
              "a value in tests/ops/test_pointwise.py")


def kernel(name: str) -> None:
    (ROOT / f"csrc/ops/{name}.c").write_text(C.format(n=name))
    (ROOT / f"csrc/cpu/{name}.c").write_text(CPU.format(n=name))
    (ROOT / f"tests/ops/test_{name}.py").write_text(T.format(n=name))
    rows, cpu = ROOT / "csrc/graph/ops.def", ROOT / "csrc/cpu/cpu.def"
    rows.write_text(rows.read_text().rstrip("\n") + f'\n\n/* ops/{name}.c */\nOP({name}, "(x) -> TODO")\n')
    c = name + ","
    cpu.write_text(cpu.read_text().rstrip("\n") + f"\n\n/* cpu/{name}.c */\nROW({c:<24}{'0,':<15}{'0,':<15}{'none,':<20}{c:<23}{name})\n")
    print(f"csrc/ops/{name}.c  meaning: type rule, gradient (now: y = x)\ncsrc/cpu/{name}.c  what the CPU prepares and runs\n"
          f"csrc/graph/ops.def, csrc/cpu/cpu.def  rows: say what it means\ntests/ops/test_{name}.py  write the eager reference\n"
          f"then: make check-op OP={name}; ONNX spelling: csrc/onnx/map.h; ATen spelling: ortmodule/capture/ops_*.py")


def main() -> None:
    given = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a and a.split("=", 1)[1])
    if "TABLE" in given:
        TABLE.write_text(table())
        return
    name, kind = given.get("NAME", ""), given.get("KIND", "pointwise")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or kind not in ("pointwise", "kernel"):
        sys.exit("usage: make new-op NAME=lower_case_name [EXPR='C in x' GRAD='built from DY, Y, IN(0)' DOC='y = ...'] [KIND=kernel]")
    if exists(name):
        sys.exit(f"{name} exists: see csrc/graph/ops.def and csrc/graph/pointwise.def")
    if kind == "kernel":
        kernel(name)
    else:
        pointwise(name, given)


if __name__ == "__main__":
    main()
