"""The casts pass on the fake GPU, whose device asks for it: fewer launches, the same bits, no copy more, and a segment hands out
what it did."""

from __future__ import annotations

from cuda.children import child, on_fake

pytestmark = on_fake

HEAD = """
import os, re, torch, engine
from cuda import fake
from device import steps
BITS = {2: torch.int16, 4: torch.int32}
def bits(t):
    return t.contiguous().view(BITS[t.element_size()])
"""

TAIL = """
assert fake.count(fake.FAILURES) == 0, fake.message()
assert fake.host_ops(engine.lib) == [], fake.host_ops(engine.lib)
print("done")
"""

# Layers as autocast has them; gradients of weights are cast back.
MODEL = """
SHAPES = {"w0": (48, 64), "b0": (64,), "w1": (64, 40), "b1": (40,), "w2": (40, 24), "b2": (24,)}
TEXT = "graph {\\n input x: bf16[32, 48]\\n" + "".join(f" param {n}: f32{list(s)}\\n" for n, s in SHAPES.items())
for k in range(3):
    TEXT += f" c{k} = cast(w{k}) {{to=bf16}}\\n d{k} = cast(b{k}) {{to=bf16}}\\n h{k} = matmul({f'r{k - 1}' if k else 'x'}, c{k}, d{k})\\n r{k} = relu(h{k})\\n"
TEXT += " output r2\\n}"
g = torch.Generator().manual_seed(1)
INS = [torch.randn(32, 48, generator=g).bfloat16(), *(torch.randn(s, generator=g) for s in SHAPES.values())]
DY = torch.randn(32, 24, generator=g).bfloat16()
WANTED = [0, 1, 1, 1, 1, 1, 1]
JOINT = re.findall(r"&om_pass_(\\w+)", (engine.ROOT / "csrc/passes/passes.c").read_text().split("om_passes_joint[] = ")[1].split("};")[0])
ALL, BUT_CASTS = "", str(JOINT.index("casts"))  # ORTMODULE_PASS_LIMIT: casts is the last
assert JOINT[-1] == "casts"
def lines(text, op):
    return [ln for ln in text.splitlines() if f" = {op}(" in ln]
def step(limit, group=None, again=0, device="cuda-fake"):
    os.environ["ORTMODULE_PASS_LIMIT"] = limit
    model = steps.Model.text(steps.cx(device), TEXT)
    try:
        count = lambda: (fake.count(fake.LAUNCHES), fake.ran("cast_all"), fake.ran("copy"))
        before = count()
        s = model.step(INS, WANTED, [DY], group, again=again)
        after = count()
        return s, model.print(model.variant(WANTED, [1], group, again)), *(b - a for a, b in zip(before, after))
    finally:
        model.free()
def same(a, b):
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a.outputs, b.outputs, strict=True))
    assert a.grads.keys() == b.grads.keys() and all(torch.equal(bits(a.grads[i]), bits(b.grads[i])) for i in a.grads)
"""

JOINED = """
for again in (0, 1):  # 1: backward casts two weights again
    one, text, launches, ran, copies = step(ALL, again=again)
    single, plain, before, none, copied = step(BUT_CASTS, again=again)
    same(one, single)
    assert not lines(plain, "cast_all") and len(lines(plain, "cast")) == 12 + 2 * again, plain
    joined = lines(text, "cast_all")
    assert len(joined) == 2 + again and not lines(text, "cast"), text
    assert "cast_all(w0, b0, w1, b1, w2, b2)" in joined[0] and all("backward" in ln for ln in joined[1:]) and "backward" not in joined[0]
    assert not again or "cast_all(w2, w1)" in joined[1] and text.index(joined[1]) < text.index(" = permute("), text
    assert text.index(joined[0]) < text.index(" = matmul(") and text.index(joined[-1]) > text.rindex(" = matmul(")
    assert (ran, none) == (2 + again, 0) and before - launches == 10 + again and copies == copied, (before, launches, copies, copied)
cpu, text, *_ = step(ALL, device="cpu")
assert not lines(text, "cast_all")  # it does not ask for it
for i, g in cpu.grads.items():
    torch.testing.assert_close(g, one.grads[i], rtol=2e-2, atol=2e-2)
"""

SEGMENTS = """
for group in ([0, 2, 2, 1, 1, 0, 0], [0, 5, 4, 3, 2, 1, 0], [0, 0, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0, 0]):  # bucketed gradients
    for again in (0, 1):
        one, text, launches, ran, copies = step(ALL, group, again)
        single, plain, before, none, copied = step(BUT_CASTS, group, again)
        same(one, single)
        made = {}  # segment of each value that backward makes
        for ln in text.splitlines():
            if " = " in ln and " backward" in ln:
                made |= {v: int(ln.rpartition(" seg=")[2].split()[0]) if " seg=" in ln else 0 for v in ln.split(" = ")[0].replace(",", " ").split()}
        grads = dict(ln.split()[1::2] for ln in text.splitlines() if ln.strip().startswith("grad "))
        assert [made[grads[n]] for n in SHAPES] == group[1:], text
        saved = sum(group[1:].count(s) - 1 for s in set(group[1:]))
        back = lambda t: [ln for ln in lines(t, "cast_all") if " backward" in ln and "cast_all(w" not in ln]
        assert len(back(text)) == sum(group[1:].count(s) > 1 for s in set(group[1:])), text
        assert before - launches == 5 + saved + sum(ln.count(", w") for ln in lines(text, "cast_all")[1:]), text
        assert copies == copied
"""

BOUNDS = """
os.environ["ORTMODULE_PASS_LIMIT"] = ALL
def variant(text, wanted=None, arriving=None):
    model = steps.Model.text(steps.cx("cuda-fake"), text)
    try:
        wanted = wanted or [0] * model.n_in
        return model.print(model.variant(wanted, arriving or [int(any(wanted))] * model.n_out))
    finally:
        model.free()
def of(body, *params):
    return variant("graph {\\n" + "".join(f" param {p}\\n" for p in params) + body + "}")
def casts(*names):
    return "".join(f" y{n} = cast({n}) {{to=bf16}}\\n" for n in names) + "".join(f" output y{n}\\n" for n in names)
text = of(casts("a", "b", "c"), *(f"{n}: f32[1500, 2000]" for n in "abc"))  # 6 MB each: two fit
assert "cast_all(a, b)" in text and len(lines(text, "cast")) == 1, text
text = of(casts("a", "b", "c"), "a: f32[4]", "b: f32[5000, 2000]", "c: f32[9]")  # 20 MB: alone, and the others are not kept apart
assert "cast_all(a, c)" in text and len(lines(text, "cast")) == 1, text
text = of(casts(*(f"p{k}" for k in range(70))), *(f"p{k}: f32[{k + 1}]" for k in range(70)))
assert [ln.count("bf16[") for ln in lines(text, "cast_all")] == [64, 6], text
text = of(casts("a"), "a: f32[4]", "b: f32[4]")
assert not lines(text, "cast_all")  # one stays as it is
text = of(" y = cast(a) {to=bf16}\\n z = cast(b) {to=bf16}\\n output y\\n output z\\n", "a: f32[4]", "b: i64[4]")
assert not lines(text, "cast_all")  # integers are converted by themselves
text = variant("graph {\\n sym s0 = a[0]\\n input a: f32[s0]\\n param b: f32[4]\\n param c: f32[4]\\n" + casts("a", "b", "c") + "}")
assert "cast_all(b, c)" in text and len(lines(text, "cast")) == 1, text
# a view of a weight: there before the first of the casts, or not
for order, joined in (("v y z", 1), ("y v z", 0)):
    made = {"v": " v = reshape(a) {shape=[2, 2]}\\n", "y": " y = cast(b) {to=bf16}\\n", "z": " z = cast(v) {to=bf16}\\n"}
    text = of("".join(made[k] for k in order.split()) + " output y\\n output z\\n", "a: f32[4]", "b: f32[4]")
    assert len(lines(text, "cast_all")) == joined, text
# a gradient that another node reads does not wait for others
text = variant("graph {\\n param p: f32[4, 4]\\n param q: f32[4]\\n param w: f32[4, 4]\\n s = add(p, q)\\n c = cast(s) {to=bf16}\\n d = cast(w) {to=bf16}\\n"
               " m = matmul(c, d)\\n output m\\n}", [1, 1, 1], [1])
assert len([ln for ln in lines(text, "cast") if "backward" in ln]) == 2 and lines(text, "reduce_sum") and not lines(text, "cast_all"), text
# nothing moves past a node of the host's
text = of(" y = cast(a) {to=bf16}\\n z = host(b) {index=0, out_dtype=[1], shape0=[4], effect=1}\\n u = cast(b) {to=bf16}\\n v = cast(c) {to=bf16}\\n"
          " output y\\n output z\\n output u\\n output v\\n", *(f"{n}: f32[4]" for n in "abc"))
assert "cast_all(b, c)" in text and len(lines(text, "cast")) == 1, text
"""


def test_a_model_has_fewer_launches_and_the_same_bits() -> None:
    assert child(HEAD + MODEL + JOINED + TAIL) == "done\n"


def test_each_segment_hands_out_its_own_gradients() -> None:
    assert child(HEAD + MODEL + SEGMENTS + TAIL) == "done\n"


def test_what_is_joined() -> None:
    assert child(HEAD + MODEL + BOUNDS + TAIL) == "done\n"
