"""Every allocation fails once: reading, passes, gradients, plans and runs give an error, leak nothing, and succeed with
the same bits when repeated (tests/alloc/alloc_fail.c says what is checked after each). make asan runs the same under
ASAN."""

from __future__ import annotations

import ctypes as C
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine

DRIVER = Path(engine.lib._name).resolve().parent / "om-alloc"

TEXTS = {
    "embedding": """graph {
  sym s0 = i[0]
  input i: i64[s0]
  input l: i64[s0]
  param w: f64[11, 5]
  x = gather(w, i) {axis=0, padding_idx=1}
  t = permute(w) {perm=[1, 0]}
  y = matmul(x, t)
  a, b, c = cross_entropy(y, l) {reduction=1, label_smoothing=0.1}
  output a
}""",
    "image": """graph {
  sym s0 = x[0]
  input x: f32[s0, 3, 6, 5]
  param w: f32[4, 3, 3, 2]
  param g: f32[4]
  param b: f32[4]
  buffer m: f32[4]
  buffer v: f32[4]
  c = conv(x, w) {stride=[1, 1], pad=[1, 1, 1, 0], dilation=[1, 1], groups=1}
  n, m1, v1, mean, rstd = batch_norm(c, g, b, m, v) {training=1, momentum=0.1}
  r = relu(n)
  p, k = max_pool(r) {kernel=[2, 2], stride=[2, 2], pad=[0, 0], dilation=[1, 1], ceil=0}
  d = dropout(p) {p=0.25} rng=1
  a = adaptive_avg_pool(d) {size=[1, 1]}
  f = reshape(a) {shape=[s0, 4]}
  output f
  write m1 -> m
  write v1 -> v
}""",
    "views": """graph {
  sym s0 = x[1]
  input x: f64[3, s0]
  a = slice(x) {axis=1, start=[0], end=[s0//2], step=1}
  b = slice(x) {axis=1, start=[s0//2], end=[s0], step=1}
  c = exp(a)
  d = tanh(b)
  y = concat(d, c) {axis=1}
  z = permute(y) {perm=[1, 0]}
  o = cumsum(z) {axis=0}
  q = flip(o) {axes=[0]}
  output q
  output x
}""",
}


class Block(nn.Module):
    """One block of GPT-2, with its embedding and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.ln1, self.ln2 = nn.Embedding(13, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.proj, self.fc, self.out = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids)
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in self.attn(self.ln1(x)).split(8, -1))
        see = torch.ones(t, t, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=see, dropout_p=0.1)
        x = x + F.dropout(self.proj(y.transpose(1, 2).reshape(b, t, c)), 0.1)
        x = x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        logits = x @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def fails_well(path: Path, *modes: str) -> None:
    args = [a for mode in modes for a in (str(path), mode)]
    res = subprocess.run([str(DRIVER), *args], capture_output=True, text=True, check=False, timeout=550)
    assert res.returncode == 0, res.stdout + res.stderr[-4000:]
    assert all(int(line.split(": ")[1].split()[0]) > 300 for line in res.stdout.splitlines())


@pytest.mark.parametrize("name", TEXTS)
def test_any_allocation_of_a_graphs_life_may_fail(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.txt"
    path.write_text(TEXTS[name])
    fails_well(path, "once", "after")


@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])
def test_any_allocation_of_a_gpt2_blocks_life_may_fail(part: str, tmp_path: Path) -> None:
    capture = pytest.importorskip("ortmodule.capture").capture
    ids = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "block.onnx"
    path.write_bytes(capture(Block(), (ids, ids), {}, dynamic=True).onnx)
    fails_well(path, f"once:{part}")


class Arena(C.Structure):
    _fields_ = [("cx", C.c_void_p), ("chunks", C.c_void_p)]


@pytest.mark.parametrize("size", [-1, -15, -16, -64, -65600, 2**63])
def test_a_size_that_wraps_is_out_of_memory(size: int) -> None:
    cx = engine.Ctx(threads=False)
    arena = Arena(cx.p, None)
    alloc = engine.lib.om_arena_alloc
    alloc.restype, alloc.argtypes = C.c_void_p, [C.POINTER(Arena), C.c_size_t]
    assert alloc(C.byref(arena), size % 2**64) is None
    with pytest.raises(engine.EngineError, match="out of memory"):
        cx.check(3)
    engine.lib.om_arena_free(C.byref(arena))
