"""Writes the skeletons of a new operator: `make new-op NAME=foo` -> csrc/ops/foo.c, tests/ops/test_foo.py and a row in
csrc/ops.def.

The skeleton compiles and computes y = x; its test fails until the reference is filled in, so nothing half-done can pass
unseen.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

C = '''/* {n}.c - TODO what it computes, the algorithm in a few lines, what holds throughout.
 */
#include "engine.h"

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

static om_status {n}_run(om_ctx *cx, const om_args *a) {{ return om_copy(cx, &a->in[0], &a->out[0]); }}

const om_op om_op_{n} = {{
    .name = "{n}", .doc = "(x) -> y of x's shape", .kind = OM_K_ROW, .min_in = 1, .max_in = 1, .n_out = 1,
    .infer = {n}_infer, .grad = {n}_grad, .run = {n}_run,
}};
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


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        sys.exit("usage: make new-op NAME=lower_case_name")
    table = ROOT / "csrc/graph/ops.def"
    if re.search(rf"\bOP\({name}\)", table.read_text()) or (ROOT / f"csrc/ops/{name}.c").exists():
        sys.exit(f"{name} exists: see csrc/graph/ops.def")
    (ROOT / f"csrc/ops/{name}.c").write_text(C.format(n=name))
    (ROOT / f"tests/ops/test_{name}.py").write_text(T.format(n=name))
    table.write_text(table.read_text().rstrip("\n") + f"\n\n/* ops/{name}.c */\nOP({name})\n")
    print(f"csrc/ops/{name}.c        type rule, gradient, kernel (now: y = x)\ntests/ops/test_{name}.py  write the eager reference\n"
          f"csrc/graph/ops.def             row added: say what it means\nthen: make check-op OP={name}; ONNX spelling: "
          "csrc/onnx/map.h; ATen spelling: "
          "ortmodule/capture/ops_*.py")


if __name__ == "__main__":
    main()
