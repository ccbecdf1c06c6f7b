"""Rows on the fake GPU (row.h: norms, softmax, cross-entropy): few and wide accesses where addresses allow it; the same
bits where they do not, and in every order of threads and blocks."""

from __future__ import annotations

import pytest
from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import hashlib, torch, engine
from cuda import fake
from device import steps
fake.late(False)
cx = steps.cx("cuda-fake")
digest = hashlib.sha256()
def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
def labels(rows, n):
    y = torch.randint(n, (rows,), generator=torch.Generator().manual_seed(n))
    y[0], y[-1] = n - 1, 0
    y[rows // 2] = -100
    return y
def run(text, ins, outs):
    "outputs, loads and stores"
    model = steps.Model.text(cx, text + "".join(f" output {o}\\n" for o in outs) + "}")
    before = fake.gpu.fake_gpu_touches()
    got = model.step(ins).outputs
    touches = fake.gpu.fake_gpu_touches() - before
    model.free()
    assert fake.count(fake.FAILURES) == 0, fake.message()
    for t in got:
        digest.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return got, touches
def on_rows(nodes, outs, tensors, more=(), skip=0):
    "Rows that lie `skip` elements behind the beginning of a tensor"
    text, ins = "graph {\\n", []
    for name, t in tensors.items():
        flat = torch.cat([torch.zeros(skip, dtype=t.dtype), t.flatten()])
        text += f" input {name}_: {engine.NAMES[engine.TORCH.index(t.dtype)]}[{len(flat)}]\\n"
        ins.append(flat)
    for name, t in more:
        text += f" input {name}: {engine.NAMES[engine.TORCH.index(t.dtype)]}{list(t.shape)}\\n"
        ins.append(t)
    for name, t in tensors.items():
        text += f" {name}s = slice({name}_) {{axis=0, start=[{skip}], end=[{skip + t.numel()}], step=1}}\\n {name} = reshape({name}s) {{shape={list(t.shape)}}}\\n"
    return run(text + nodes, ins, outs)
def both(nodes, outs, tensors, more=(), least=0.0):
    "The same bits at an address that is not a multiple of 16; `least` times as many accesses"
    aligned, few = on_rows(nodes, outs, tensors, more)
    shifted, many = on_rows(nodes, outs, tensors, more, skip=1)
    for a, b in zip(aligned, shifted):
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), (nodes, tensors["x"].shape, tensors["x"].dtype)
    assert many > least * few, (nodes, tensors["x"].shape, few, many)
"""

NORM = """
LAYER = " y, m, r = layer_norm(x, w, b) {axis=1, eps=1e-5}\\n dx, dw, db = layer_norm_grad(dy, x, w, m, r) {axis=1, params=1}\\n"
RMS = " y, r = rms_norm(x, w) {axis=1, eps=1e-5}\\n dx, dw = rms_norm_grad(dy, x, w, r) {axis=1, params=1}\\n"
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for rows, n in [(5, 1), (3, 7), (9, 8), (4, 252), (5, 1023), (5, 1024), (3, 1025), (67, 1028), (2, 2056), (1, 8200), (1, 16384), (1, 16392)]:
        for weight in (dtype, torch.float32, torch.float16):
            if weight != dtype and n > 1028:
                continue
            x, dy = rand(rows, n, dtype=dtype), rand(rows, n + 1, dtype=dtype)[:, :n].contiguous()
            w, b = rand(n, dtype=weight), rand(n + 1, dtype=weight)[:n].contiguous()
            wide = 1.5 if n > 200 and n % 8 == 0 and weight == dtype == torch.float32 else 0
            both(LAYER, ["y", "m", "r", "dx", "dw", "db"], {"x": x, "dy": dy, "w": w, "b": b}, least=wide)
        both(RMS, ["y", "r", "dx", "dw"], {"x": x, "dy": dy, "w": rand(n, dtype=dtype)}, least=wide)
(y,), few = run("graph {\\n input x: f32[64, 768]\\n y, m, r = layer_norm(x) {axis=1, eps=1e-5}\\n", [rand(64, 768)], ["y"])
assert few == 64 * (2 * 768 / 4 + 2), few
print(digest.hexdigest())
"""

SOFTMAX = """
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    for rows, n in [(5, 1), (3, 7), (9, 8), (5, 1024), (3, 1025), (2, 1032), (1, 16384), (1, 16392)]:
        for op in ("softmax", "log_softmax"):
            both(f" y = {op}(x) {{axis=1}}\\n dx = {op}_grad(dy, y) {{axis=1}}\\n", ["y", "dx"], {"x": rand(rows, n, dtype=dtype), "dy": rand(rows, n + 1, dtype=dtype)[:, :n].contiguous()})
    both(" y = softmax(x) {axis=0}\\n", ["y"], {"x": rand(1025, 3, dtype=dtype)})
print(digest.hexdigest())
"""

LOSS = """
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for rows, n in [(7, 1), (7, 3), (7, 8), (9, 33), (5, 512), (5, 513), (3, 1024), (3, 1031), (4, 2051), (3, 8192), (3, 8201), (3, 16391), (2, 50257)]:
        for smoothing, reduction, weighted in [(0.0, 1, False), (0.1, 0, True), (0.1, 2, False)]:
            if n > 10000 and (smoothing or dtype in (torch.float16, torch.float64)):
                continue
            at = f"{{label_smoothing={smoothing}, reduction={reduction}}}"
            weight = [("v", rand(n).abs() + 0.1)] if weighted else []
            w, dl = ", v" if weighted else "", rand(rows) if reduction == 0 else rand(1)[0]
            both(f" l, e, d = cross_entropy(x, t{w}) {at}\\n dx = cross_entropy_grad(g, x, t, {'v' if weighted else '_'}, e, d) {at}\\n", ["l", "e", "d", "dx"],
                 {"x": rand(rows, n, dtype=dtype) * 4}, [("t", labels(rows, n)), ("g", dl.to(dtype)), *weight])
x = rand(3, 2061) * 3  # rows further apart than they are long, and classes that are not side by side
x[0, 2000] = 70  # far above what comes before
for text, logits in [(" a = slice(x) {axis=1, start=[3], end=[2060], step=1}\\n", x), (" a = permute(x) {perm=[1, 0]}\\n", x.T.contiguous())]:
    n = 2057 if "slice" in text else 2061
    (l, e), _ = run(f"graph {{\\n input x: f32{list(logits.shape)}\\n input t: i64[3]\\n" + text + " l, e, d = cross_entropy(a, t) {reduction=1}\\n", [logits, labels(3, n)], ["l", "e"])
    want = x.double()[:, 3:2060] if "slice" in text else x.double()
    keep = labels(3, n) >= 0
    assert torch.allclose(e[keep], want.logsumexp(1)[keep], rtol=1e-7, atol=0)
(y, e, d), few = run("graph {\\n input x: bf16[3, 50257]\\n input t: i64[3]\\n l, e, d = cross_entropy(x, t) {reduction=1}\\n", [rand(3, 50257, dtype=torch.bfloat16), labels(3, 50257).abs()], ["l", "e", "d"])
assert few < 3 * (50257 / 8 + 512 + 40), few  # every thread looks at the label
print(digest.hexdigest())
"""


@pytest.mark.parametrize("cases", [NORM, SOFTMAX, LOSS], ids=["norm", "softmax", "loss"])
def test_bits_in_every_order_and_place(cases: str) -> None:
    assert len({child(HEAD + cases, OM_FAKE_SEED=str(seed)) for seed in (0, 3, 8)}) == 1
